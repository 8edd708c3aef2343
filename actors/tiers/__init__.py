"""Homes of KV outside of the executor: what moves blocks between host memory and a disk."""
