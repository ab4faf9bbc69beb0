"""The web: HTTP and OpenAI shapes, nothing about tensors."""
