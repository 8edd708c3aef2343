"""Routing: which replica a session goes to, and how many replicas there should be. Pure."""
