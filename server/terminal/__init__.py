"""`foretoken chat`: a conversation in the terminal."""
