"""The ops. Each has one home: a file with its check, the branches that it touches, and how it runs
(`handler` says more). To add one: its wire type in `protocol/wire.py`, and its file here.
CONTRIBUTING.md has the walk.
"""
