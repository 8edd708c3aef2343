"""The data of a session: branches, their segments, texts that are to become tokens, and the commands
to other actors that changes of them make (`outbox`).
"""
