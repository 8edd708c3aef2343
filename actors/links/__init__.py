"""Connections between processes: framed messages with credits, over Unix sockets and TCP."""
