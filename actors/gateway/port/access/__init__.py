"""Who may connect, and how much a socket, a credential or an address may ask for.

Pure: time is an argument.
"""
