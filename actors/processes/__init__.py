"""Processes that belong to this one: started, watched, ended."""
