"""How model families write tool calls: one small parser each, which turns a model's growing text into calls and content."""
