"""The `foretoken bench` commands and `foretoken tune`: what speculation and the server bring, measured."""
