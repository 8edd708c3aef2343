"""HellaSwag, 20-shot: which end of a scene is the likeliest, by `select` over whole sentences.

--data: 1,500 scenes (`hellaswag_val_sample.jsonl`); the first twenty are the examples.
"""

from collections.abc import Sequence

from stage import brief, stage, total

from ramify.clients.program import Failed, State, program, select

SHOTS = 20
ROOM = 3600  # characters of examples: the bundled model's context is 4,096 tokens
THINGS = ("ball", "book", "cup", "boat", "kite", "lamp", "coin", "cake", "drum", "shoe", "bell", "rope")
MADE_UP = [
    {
        "context": f"A child finds a {thing}. The child takes the {thing}",
        "endings": ["home.", "and turns into a cloud.", "of the sea of the sea.", "is a number."],
        "label": "0",
    }
    for thing in THINGS * 2
]


@program
def likeliest(s: State, shots: str, scene: str, endings: list[str]) -> str:
    s += shots
    s += scene + select("end", choices=[f" {end}" for end in endings])
    return s["end"]


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=8, what="scenes") as shown:
        rows = shown.rows("hellaswag_val_sample", MADE_UP)
        shots = ""
        for row in rows[:SHOTS]:
            shot = f"{row['context']} {row['endings'][int(row['label'])]}\n\n"
            shots += shot if len(shots) + len(shot) <= ROOM else ""
        asked = rows[SHOTS : SHOTS + shown.size]
        items = [{"shots": shots, "scene": r["context"], "endings": r["endings"]} for r in asked]
        right = []
        for row, run in zip(asked, likeliest.using(shown.url).run_batch(items), strict=True):
            if isinstance(run, Failed):
                raise run.error
            result = run.results["end"]
            shown.took(result)
            right.append(result.choice == int(row["label"]))
            mark = "[green]✓[/]" if right[-1] else "[red]✗[/]"
            shown.console.print(f"{mark} {brief(row['context'], 90)} [cyan]{brief(run.value, 90)}[/]")
        shown.console.print(f"[bold]{total(right)} right[/]; a guess is right one time in four")


if __name__ == "__main__":
    main()
