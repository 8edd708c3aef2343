"""A request that a session answers, over HTTP or on a WebSocket: what an API builds on."""
