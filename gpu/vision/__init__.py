"""Towers: pictures become vectors of the decoder's stream."""
