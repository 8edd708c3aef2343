"""Typed records out of prose: each document becomes an object of a Python type, whatever the model is.

The type's schema constrains the output, so the text always is JSON of that shape; which values it holds
is the model's part. What the schema leaves no choice for (braces, names of members) need not be asked
of the model one token at a time: the last column counts it. --data: `json_country_documents.jsonl`.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from rich.table import Table
from stage import Stage, brief, stage

import ramify
from ramify.clients.generation import Result

MADE_UP = [
    {"document": "Iceland is an island in the north. 383,000 live there, most of them in Reykjavik."},
    {"document": "Peru lies in South America. Some 34 million live there, ten of them in Lima."},
    {"document": "Kenya, in the east of Africa, has its capital in Nairobi and 55 million people."},
]

Name = Annotated[str, msgspec.Meta(pattern="^[A-Z][A-Za-z ]{0,30}$")]


class Country(msgspec.Struct):
    """What is wanted of each document."""

    name: Name
    capital: Name
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    population: Annotated[int, msgspec.Meta(ge=0, le=2_000_000_000)]
    island: bool


async def extract(shown: Stage, documents: Sequence[str]) -> list[tuple[Country, Result]]:
    """A branch for each document, all at once; the instructions are computed once."""
    async with ramify.connect(shown.url) as session:
        await session.main.append(
            messages=[{"role": "system", "content": "Say as JSON what the text says of the country."}]
        )
        branches = await session.main.fork(*(f"document{i}" for i in range(len(documents))))
        running = [
            branch.chat(document, type=Country, max_tokens=200, temperature=0.0)
            for branch, document in zip(branches, documents, strict=True)
        ]
        return [(await each.parsed(), await each) for each in running]


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=3, what="documents") as shown:
        rows = shown.rows("json_country_documents", MADE_UP)[: shown.size]
        records = asyncio.run(extract(shown, [row["document"].strip()[:1500] for row in rows]))
        table = Table("document", "record", "forced")
        for row, (record, result) in zip(rows, records, strict=True):
            shown.took(result)
            usage = result.usage
            table.add_row(brief(row["document"], 40), str(record), f"{usage.forced} of {usage.output}")
        shown.console.print(table)


if __name__ == "__main__":
    main()
