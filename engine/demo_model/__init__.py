"""The embedded model: weights, tokenizer and card, as package data."""
