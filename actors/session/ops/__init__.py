"""The ops that wait for their branches. Each has one home: a file with its check, the branches that it
touches, and how it runs (`home` says more). To add one: its frame in `protocol/wire.py`, its file here,
and a line in `registry`.
"""
