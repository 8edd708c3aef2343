"""Tokens to text as they come, text to tokens off the loop, and the stop strings in it."""
