"""The parts of every actor: mailboxes, links to other processes, clocks, logs, metrics."""
