"""Text to token ids and back, and chats to text, for one model folder. See `tokenizer.py`."""

from ramify.actors.tokenizer.tokenizer import GUARD, GenerationDefaults, Tokenizer

__all__ = ["GUARD", "GenerationDefaults", "Tokenizer"]
