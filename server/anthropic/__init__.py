"""Anthropic's Messages API: what it asks in its own words, and how an answer becomes content blocks, events and errors of its kind."""
