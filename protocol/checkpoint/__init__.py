"""The files of a model: a Hugging Face folder's, or what a GGUF file holds in their place."""
