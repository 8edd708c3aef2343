"""Anthropic's Messages API, spoken on the same port: what Claude Code and its kind send.

As with OpenAI's API, a request is a session of its own that ends with the answer, and the files here are
pure: from a request's JSON to ops, from a session's messages to the answer's JSON or its events.
"""
