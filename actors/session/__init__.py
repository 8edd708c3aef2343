"""Sessions: one actor each, and the directory that has them. Rooms, and what they stand on:

    (here)     a whole session, its actor, its sockets coming and going, saving and restoring it
    ops        each op: its check, its branches, how it runs; `running`: how frames become tasks that run
    durable    a session as items of a store, or as one file
    scoring    `select`, and appends with log-probabilities
    sockets    what each socket has seen, is told and is answered
    output     generations
    input      what an append puts on a branch: chat templates, roles, calls of before
    queues     what waits: an op on one of its branches
    branches   the data: branches, their segments, what is told to other actors

Below them: `actors/calls`, what an output is made of; `actors/tokenizer`; `actors/kit`.
Imports go down this list only; what stands beside each other is in pyproject.toml.
"""
