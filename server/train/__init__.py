"""The `foretoken train` commands: targets and drafters, from text to folders that serve."""
