"""Generative agents in a small town: each hour everybody acts, then hears what the others did.

People are branches that share the town; `join` puts what the others did into everybody's own story, on
the server. An hour is one frame. --data: the town of Phandalin (`generative_agents_town.jsonl`).
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from stage import Stage, brief, stage

import ramify

MADE_UP: list[dict[str, Any]] = [
    {"kind": "area", "name": "The market", "description": "Stalls with fruit, bread and fish."},
    {"kind": "area", "name": "The inn", "description": "A warm house with a large table."},
    {"kind": "person", "name": "Ada", "description": "Ada bakes bread and sells it at the market."},
    {"kind": "person", "name": "Ben", "description": "Ben owns the inn and likes to talk."},
    {"kind": "person", "name": "Cleo", "description": "Cleo catches fish in the lake."},
]


def hour(people: dict[str, str], time: int) -> list[dict[str, Any]]:
    """What happens between one hour and the next. `people`: names by branch."""
    names = list(people)
    ops: list[dict[str, Any]] = []
    for name in names:
        ask = f"It is {time} o'clock. What do you do now? One sentence."
        if time == 8:
            ops.append(
                {"type": "append", "branch": name, "messages": [{"role": "user", "content": ask}]}
            )
        else:  # the joins stand before all generations, so everybody hears of the hour before
            others = [other for other in names if other != name]
            ops.append(
                {"type": "join", "from": others, "branch": name, "keep": True, "suffix": ask,
                 "prefix": "Meanwhile, others:\n", "each": "{name}: {text}\n"}
            )  # fmt: skip
    ops += [
        {"type": "generate", "branch": name, "max_tokens": 30, "temperature": 0.7, "seed": 11 * time + i}
        for i, name in enumerate(names)
    ]
    return ops


async def live(shown: Stage) -> None:
    rows = shown.rows("generative_agents_town", MADE_UP)
    places = "\n".join(f"{r['name']}: {r['description']}" for r in rows if r["kind"] == "area")
    persons = [row for row in rows if row["kind"] == "person"]
    people = {row["name"].split()[0].lower(): row["name"] for row in persons}
    async with ramify.connect(shown.url) as session:
        await session.main.append(messages=[{"role": "system", "content": f"A small town.\n{places}"}])
        await session.fork(*people)
        for (branch, name), row in zip(people.items(), persons, strict=True):
            start = f"You are {name}. {row['description'][:300]}"
            await session.branch(branch).append(messages=[{"role": "system", "content": start}])
        for time in range(8, 8 + shown.size):
            shown.console.print(f"\n[bold]{time} o'clock[/]")
            handles = await session.send(hour(people, time))
            acts: Any = await asyncio.gather(*handles[-len(people) :])  # type: ignore[arg-type]
            shown.took(*acts)
            for name, act in zip(people.values(), acts, strict=True):
                shown.console.print(f"  [cyan]{name}[/]: {brief(act.text, 140)}")


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=3, what="hours") as shown:
        asyncio.run(live(shown))


if __name__ == "__main__":
    main()
