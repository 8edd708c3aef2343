"""A frame becomes tasks (`queues`), and tasks run in order until each has its reply (`op_runner`)."""
