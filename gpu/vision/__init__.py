"""Vision towers, which turn pictures into vectors of the decoder's stream."""
