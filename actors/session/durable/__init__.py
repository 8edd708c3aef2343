"""A session in the form in which it is kept: items of a store, or one file."""
