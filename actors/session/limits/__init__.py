"""What a session may take: bytes of memory, and its share of the event loop."""
