"""Generations: submitted, held to constraints, streamed, ended."""
