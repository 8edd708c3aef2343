"""Choices and texts scored by the model: `select`, and appends with log-probabilities."""
