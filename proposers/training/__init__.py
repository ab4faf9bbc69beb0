"""Recipes that train the models Foretoken ships. Nothing that serves requests imports this package."""
