"""A frame becomes tasks (`intake`), and tasks run in order until each has its reply (`op_runner`)."""
