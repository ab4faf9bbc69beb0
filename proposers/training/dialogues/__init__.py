"""Dialogues for the demonstration model, one file per domain: each makes chats out of corpus records, or from rules."""
