"""The contract of Ramify: wire frames, mailbox messages, step plans, errors, configuration.

A leaf: imports msgspec and nothing of Ramify's other packages.
"""
