"""How much to speculate: what guesses cost, what they bring, and the choice that follows."""
