"""Ollama's HTTP API, spoken on the same port, as far as chat front ends use it.

Models cannot be pulled, made or deleted here: there is the one that is served. As with OpenAI's API,
files here are pure, and a request is a session of its own that ends with the answer.
"""
