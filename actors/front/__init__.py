"""Gateways with their sessions: in the engine's process, or in processes of their own."""
