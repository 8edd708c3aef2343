"""What an append puts on a branch, and the generation prompt: chat templates, roles, earlier calls."""
