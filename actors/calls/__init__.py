"""What a model's output is made of: its answer, what it thinks, and the tools that it calls.

    dialects   which marks a model writes, read off its chat template
    reader     text comes in as it is generated; labels and complete calls come out
    forms      each family's way to write a call, as a coroutine over characters
    scanner    JSON, character by character
    toolbox    which tools there are, and what counts as a call of one
    templates  what a chat template makes of messages: the shape of calls, turns that it rewrites
    labels     the reader's labels, one for each chunk of an output
    openings   how a call begins, to force one

All of it is pure. Nothing here knows tokens, branches or sockets.
"""
