"""Constraints at run time: the tokens that may follow a text, and the text that must."""
