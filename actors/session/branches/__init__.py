"""The data of a session: branches, their segments, what waits for them (`tasks`), and the commands to
other actors that changes of them make (`state.Outbox`).
"""
