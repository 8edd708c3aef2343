"""What waits: tasks in one queue per branch name, and the prunes that watch them."""
