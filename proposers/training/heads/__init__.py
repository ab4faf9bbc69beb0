"""Heads in training, one file per method: a Trainee with its published loss that writes its published checkpoint layout."""
