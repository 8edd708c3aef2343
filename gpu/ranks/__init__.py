"""Processes that run one model together, each with a part of its weights and of its KV."""
