"""Constraints while they are run: which tokens a text may go on with, and where it must go on."""
