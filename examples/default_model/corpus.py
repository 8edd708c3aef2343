"""Which parts of the corpus the default model may learn from, and how to read them.

Knows the file names of the corpus folder, the licence of each part and the content filters.
Does not know tokens, models or training.

The model is offered under Apache-2.0, so every part whose licence or origin leaves a doubt is left
out: share-alike texts, texts written by other companies' models, and files in which such texts are
mixed in without a mark that would let them be told apart.
"""

from __future__ import annotations

import io
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

DOCUMENT_END = "<|endoftext|>"


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


# Files that are used, with the epochs they are seen for each epoch of the whole mix.
TEXT_FILES: dict[str, float] = {
    "text_children_classics.txt": 1.0,
    "text_classics_simple.txt": 1.0,
    "text_classics_rest.txt": 0.34,
    "text_nonfiction.txt": 1.0,
}
CHAT_FILES: dict[str, float] = {
    "chat_country_facts.jsonl": 1.0,
    "chat_fairytale_qa.jsonl": 1.0,
    "chat_instructions.jsonl": 1.0,
    "chat_math_word.jsonl": 1.0,
    "chat_persona.jsonl": 1.0,
    "chat_self_dialogue.jsonl": 1.0,
    "chat_smalltalk.jsonl": 1.0,
    "chat_stories.jsonl": 1.0,
    "chat_task_oriented.jsonl": 1.0,
}
LEFT_OUT_FILES: dict[str, str] = {
    "text_stories.txt": "TinyStories (GPT output, CDLA-Sharing) mixed in without a mark",
    "chat_dictionary.jsonl": "CC BY-SA",
    "chat_topical.jsonl": "CDLA-Sharing",
    "chat_trivia.jsonl": "CC BY-SA",
    "synth_*.jsonl": "replaced by synthesize.py, whose evaluation splits are known",
}
LEFT_OUT_SOURCES: dict[str, str] = {
    "gpteacher": "GPT-4 output",
    "tinystories": "GPT-3.5 and GPT-4 output, CDLA-Sharing",
    "tf1": "output of models under a licence with naming terms",
    "schema-guided-dialogue": "CC BY-SA",
    "wordset": "CC BY-SA",
    "opentriviaqa": "CC BY-SA",
    "topical-chat": "CDLA-Sharing",
    "synth": "replaced by synthesize.py",
    "chatterbot-corpus": "answers that read like other models' output, code among small talk",
    "tldr": "command-line pages: correct by licence, useless for plain talk",
}
# The system turn of dialogues between people.
PERSON = "Chat like a person."
# Every news article of OneStopEnglish (CC BY-SA) in the non-fiction file is shorter than this.
NONFICTION_MINIMUM = 6000

_DATED = re.compile(
    r"\b(negro(?:es)?|negress|darkey|darkie|darkies|sambo|squaws?|savages|half-?breeds?|chinam[ae]n|"
    r"hottentots?|jewess|mulattos?|coolies?|heathens?|pickaninn(?:y|ies)|redskins?|injuns?)\b",
    re.IGNORECASE,
)
# The model says itself who it is; other bots' answers to this would contradict it.
_IDENTITY = re.compile(
    r"\b(who|what) (are|r) (you|u)\b|your name|(made|created|built|designed|owns?) you|how old are you|"
    r"your (age|birthday|boss|creator|maker)|what can you do|are you (a |an )?(human|robot|bot|real|person|ai)\b",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(r"\[[^\]]*(?:user|name|hometown|city|your)[^\]]*\]", re.IGNORECASE)
_LINK = re.compile(r"\[?\]\(#[^)]*\)|\(\)")


def open_text(path: Path) -> io.TextIOBase:
    """Open a `.zst`, `.xz` or plain UTF-8 file for reading text."""
    if path.suffix == ".zst":
        import zstandard

        reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(path.open("rb"))
        return io.TextIOWrapper(reader, encoding="utf-8")
    if path.suffix == ".xz":
        return io.TextIOWrapper(lzma.open(path), encoding="utf-8")
    return path.open(encoding="utf-8")


def find(folder: Path, name: str) -> Path:
    """The file `name` in `folder`, compressed or not.

    Raises FileNotFoundError with the folder's name when none is there.
    """
    for suffix in (".zst", ".xz", ""):
        path = folder / (name + suffix)
        if path.exists():
            return path
    raise FileNotFoundError(f"{name} (.zst, .xz or plain) is not in {folder}: pass the corpus folder")


def documents(folder: Path, name: str) -> Iterator[str]:
    """Documents of a text file that pass the licence and content filters."""
    with open_text(find(folder, name)) as file:
        whole = file.read()
    for raw in whole.split(DOCUMENT_END + "\n"):
        text = raw.replace(DOCUMENT_END, "").strip()
        if name == "text_nonfiction.txt":
            if len(text) < NONFICTION_MINIMUM:
                continue
            text = _LINK.sub("", text)
        if len(text) >= 200 and not _DATED.search(text):
            yield text


def conversations(folder: Path, name: str) -> Iterator[tuple[str, list[Message]]]:
    """(source, messages) of a chat file's records that pass the licence and content filters."""
    with open_text(find(folder, name)) as file:
        for line in file:
            record: dict[str, Any] = json.loads(line)
            source = str(record.get("source", ""))
            messages: list[Message] = record["messages"]
            if source in LEFT_OUT_SOURCES:
                continue
            joined = "\n".join(message["content"] for message in messages)
            # Chit-chat in several voices: only where a system turn names the voice.
            if source.startswith("botframework") and (
                messages[0]["role"] != "system" or _IDENTITY.search(joined)
            ):
                continue
            # Talk between people is marked as such, so that without the mark the model is itself.
            if source in ("self-dialogue", "synthetic-persona-chat") and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": PERSON}, *messages]
            if _DATED.search(joined) or _PLACEHOLDER.search(joined):
                continue
            yield source, messages
