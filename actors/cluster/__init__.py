"""Replicas: several cores behind one front. A session is at one, and moves when that one goes."""
