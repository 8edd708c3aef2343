"""What every actor is made of: mailboxes, links to other processes, clocks, logs, metrics."""
