"""Constrained decoding: regexes, schemas and grammars become masks over a model's tokens."""
