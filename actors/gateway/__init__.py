"""The gateway: sockets, codecs, auth and per-socket send queues. See `actor.py`."""
