"""The stage that a CPU can train: a little of what the page and the README show first, and of all else.

`pack` writes the token files of a round (0.8M and 0.6M tokens), for `train.py --mix narrow`; `blend` goes
part of the way from the old weights to the new ones, which keeps what the old ones could. Does not know how
weights are trained.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import corpus
import model as models
import prepare
import skills_endings
import skills_game24
import skills_math
import skills_page
import skills_story
import synthesize
from words import Chooser

Piece = skills_page.Piece
T = TypeVar("T")

# How often each kind of document is drawn, in the first round and in the second.
KINDS = {
    1: {"ends": 44, "story": 18, "form": 12, "judged": 3, "named": 8, "place": 8, "called": 3, "game": 10},
    2: {"ends": 34, "story": 16, "form": 10, "place": 16, "named": 3, "math": 18, "called": 3},
}  # fmt: skip
DOCUMENTS = {1: 2600, 2: 2200}
# The share of each file of the corpus that is seen again.
SHARES = {
    1: {"country_facts": 0.1, "fairytale_qa": 0.01, "persona": 0.015, "stories": 0.02,
        "self_dialogue": 0.0025, "smalltalk": 0.02, "math_word": 0.006},
    2: {"country_facts": 0.1, "fairytale_qa": 0.01, "persona": 0.015, "stories": 0.02,
        "self_dialogue": 0.003, "smalltalk": 0.02, "math_word": 0.006},
}  # fmt: skip
TEXTS = {
    "text_children_classics.txt": 0.003,
    "text_nonfiction.txt": 0.003,
    "text_classics_simple.txt": 0.0018,
}
CONVERSATIONS = 700


def _document(choose: Chooser, kind: str, most: int) -> list[Piece]:
    """A document of a kind. `most`: questions in a row about places and sums."""
    if kind == "game":
        pieces: list[Piece] = [(skills_game24.RULES, False)]
        for _ in range(5):
            pieces += (
                skills_game24.solved(choose) if choose.chance(0.5) else skills_game24.judged(choose)
            )
        return pieces
    if kind == "called":
        return skills_page.called(choose)
    if kind == "form":
        return skills_page.form(choose)
    if kind == "ends":
        return skills_page.chat(skills_endings.turns(choose))
    if kind == "judged":
        return skills_page.chat(skills_page.judged(choose))
    if kind == "story":
        return skills_page.chat([skills_story.turn(choose)])
    make: Callable[[Chooser], skills_page.Turn]
    if kind == "math":
        make, least, most = skills_math.turn, 2, 6
    elif kind == "place":
        make, least = skills_page.place, 1 if most == 3 else 2
    else:
        make, least, most = skills_page.named, 1, 3
    return skills_page.chat([make(choose) for _ in range(choose.number(least, most))])


def shown(number: int) -> Iterator[list[Piece]]:
    """The documents of what is shown first, of one round."""
    kinds, choose = KINDS[number], Chooser(random.Random(100 * number + 3))
    for _ in range(DOCUMENTS[number]):
        kind = choose.rng.choices(list(kinds), weights=list(kinds.values()))[0]
        yield _document(choose, kind, 3 if number == 1 else 5)


def some(rng: random.Random, every: Iterable[T], share: float) -> Iterator[T]:
    """A share of them, drawn."""
    return (one for one in every if rng.random() < share)


def pack(source: Path, tokenizer: Path, out: Path, number: int) -> None:
    """Write the token files of a round."""
    out.mkdir(parents=True, exist_ok=True)
    path, rng = tokenizer / "tokenizer.json", random.Random(6 + number)

    def write(name: str, documents: Iterable[Any], encode: Any) -> None:
        prepare.pack(name, documents, encode, path, out, 1)

    write("shown", shown(number), prepare.encode_pieces)
    made = synthesize.conversations(CONVERSATIONS, 100 * number + 2)
    write("synthetic_chat", made, prepare.encode_conversation)
    for name, share in SHARES[number].items():
        found = some(rng, corpus.conversations(source, f"chat_{name}.jsonl"), share)
        write(f"chat_{name}", (messages for _, messages in found), prepare.encode_conversation)
    texts = (
        text
        for name, share in TEXTS.items()
        for text in some(rng, corpus.documents(source, name), share)
    )
    write("text", texts, prepare.encode_document)


def blend(old: Path, new: Path, out: Path, share: float) -> None:
    """Weights that lie between two folders'; `share`: of the new ones (Wortsman et al. 2022)."""
    model = models.load_folder(old)
    before, after = model.state_dict(), models.load_folder(new).state_dict()
    model.load_state_dict({name: before[name].lerp(after[name], share) for name in before})
    models.save_folder(model, old, out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packed, blended = commands.add_parser("pack"), commands.add_parser("blend")
    packed.add_argument("--corpus", type=Path, required=True)
    packed.add_argument("--tokenizer", type=Path, required=True)
    packed.add_argument("--round", type=int, choices=(1, 2), required=True)
    blended.add_argument("--old", type=Path, required=True)
    blended.add_argument("--new", type=Path, required=True)
    blended.add_argument("--share", type=float, required=True)
    for command in (packed, blended):
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "pack":
        pack(args.corpus, args.tokenizer, args.out, args.round)
    else:
        blend(args.old, args.new, args.out, args.share)


if __name__ == "__main__":
    main()
