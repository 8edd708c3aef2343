"""A small language for programs that call a model: `@program`, `gen`, `select`, turns and forks.

    from ramify.clients.program import State, assistant, gen, program, user

    @program
    def tips(s: State, topic: str) -> list[str]:
        s += user(f"Give two tips on {topic}.")
        forks = s.fork(2)
        for number, fork in enumerate(forks, 1):
            fork += assistant(f"Tip {number}:", gen("tip", max_tokens=40, stop="\\n"))
        return forks.values("tip")

    print(tips.run("sleep").value)

`expressions` are what programs add, `writer` turns them into ops, `steps` sends them one by one or as a
frame, `state` and `forks` hold what comes back, `sync` is the same without `await`, `program` runs it,
`graph` draws it.
"""

from ramify.clients.program.batch import Failed, Run
from ramify.clients.program.expressions import assistant, gen, image, select, system, tool, user
from ramify.clients.program.forks import Forks
from ramify.clients.program.graph import Graph
from ramify.clients.program.program import Program, program
from ramify.clients.program.state import AsyncState
from ramify.clients.program.steps import NotOneFrame
from ramify.clients.program.sync import State, SyncForks
from ramify.clients.program.value import Piece, Value

__all__ = [
    "AsyncState",
    "Failed",
    "Forks",
    "Graph",
    "NotOneFrame",
    "Piece",
    "Program",
    "Run",
    "State",
    "SyncForks",
    "Value",
    "assistant",
    "gen",
    "image",
    "program",
    "select",
    "system",
    "tool",
    "user",
]
