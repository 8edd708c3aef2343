"""Drafters, which guess the next tokens of rows for the model to check, and the code that runs them."""
