"""What guesses the next tokens of a row, for the model to check: drafters, and how they are run."""
