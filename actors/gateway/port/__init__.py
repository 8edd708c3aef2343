"""The port: sockets, HTTP and WebSocket, who may connect and how much, and which session a socket has.

Knows no API: `apis/` has those, and `actor.py` hands them to its connections.
"""
