"""OpenAI's HTTP API, spoken on the same port.

A request becomes a session of its own that ends with the answer: `open`, `append` and `generate` in one
frame, like those of any client. So it finds its prefix in the same radix tree, and shares the machine
by the same rules. Files here are pure: from a request's JSON to ops, from a session's messages to the
answer's JSON. `gateway.exchange` is the socket.
"""
