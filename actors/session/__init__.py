"""Sessions: one actor each, and the directory that has them. Rooms, and what they stand on:

    (here)     a whole session, its actor, its sockets coming and going, saving and restoring it
    ops        each op: its check, its branches, how it runs; `running`: frames become tasks that run;
               `scoring`: choices and appends scored by the model
    durable    a session as items of a store, or as one file
    sockets    what each socket has seen, is told and is answered
    output     generations
    input      what an append puts on a branch: chat templates, roles, calls of before
    branches   the data: branches, their segments, what waits for them, what is told to other actors

Below them: `actors/calls`, what an output is made of; `actors/tokenizer`; `actors/kit`.
Imports go down this list only; what stands beside each other is in pyproject.toml.
"""
