"""OpenAI's Responses API: what it asks in its own words, how an answer becomes items and events, and the store of past ones."""
