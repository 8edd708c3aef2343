"""The labels of one output, chunk by chunk: `OutputSegment.labels` beside `OutputSegment.chunks`. Pure.

A delta is some chunks, and so its parts are the labels of those. A chunk has its label when all of its
text has: what may become a mark makes it wait, for sockets that want parts alone.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from ramify.actors.calls.reader import Reader
from ramify.protocol.wire import Part, PartKind

Label: TypeAlias = PartKind | tuple[Part, ...]  # a kind: the whole chunk is that
_PART = 300  # bytes that a part takes, beside its text


class Labels:
    """Chunks go in as they are released; their labels come out in order."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._sizes: deque[int] = deque()  # characters of the chunks without a label
        self._parts: deque[Part] = deque()  # of those
        self._labelled = 0  # characters of `_parts`
        self._held = 0

    def add(self, chunk: str) -> list[Label]:
        """A chunk was released; the labels that are known now."""
        if not self._sizes and (kind := self.reader.plain(chunk)) is not None:
            return [kind]
        self._sizes.append(len(chunk))
        self.reader.feed(chunk)
        return self._take()

    def finish(self) -> list[Label]:
        """The output has ended: the labels of all that is left."""
        self.reader.finish()
        return self._take()

    def grown(self) -> int:
        """By how many bytes it holds more than when this was asked last; nothing, once it has ended."""
        before, self._held = self._held, self.reader.held
        return self._held - before

    def _take(self) -> list[Label]:
        for part in self.reader.take():
            self._parts.append(part)
            self._labelled += len(part.text)
        labels: list[Label] = []
        while self._sizes and self._sizes[0] <= self._labelled:
            size = self._sizes.popleft()
            self._labelled -= size
            labels.append(_label(list(self._cut(size))))
        return labels

    def _cut(self, size: int) -> Iterator[Part]:
        """The parts of the next `size` characters; what a part tells beside its text goes last."""
        while size or (self._parts and not self._parts[0].text):
            part = self._parts.popleft()
            if len(part.text) > size:
                self._parts.appendleft(msgspec.structs.replace(part, text=part.text[size:]))
                if size:
                    yield Part(kind=part.kind, text=part.text[:size], call=part.call)
                return
            size -= len(part.text)
            yield part


def merged(labels: Iterable[Label], chunks: Iterable[str]) -> list[Part]:
    """The parts of some chunks, with neighbours of one kind joined."""
    runs: list[list[Part]] = []
    for label, chunk in zip(labels, chunks, strict=True):
        parts = label if isinstance(label, tuple) else (Part(kind=label, text=chunk),) if chunk else ()
        for part in parts:
            if runs and (runs[-1][-1].kind, runs[-1][-1].call) == (part.kind, part.call):
                runs[-1].append(part)
            else:
                runs.append([part])
    return [_joined(run) for run in runs]


def kind_of(label: Label) -> PartKind:
    """Of the text that it begins with."""
    if not isinstance(label, tuple):
        return label
    return label[0].kind if label else "text"


def label_bytes(label: Label) -> int:
    """The bytes that labels take in memory."""
    if not isinstance(label, tuple):
        return 8
    return sum(_PART + len(part.text) + len(part.arguments or "") for part in label)


def _label(parts: list[Part]) -> Label:
    if len(parts) == 1 and parts[0].kind != "call":
        return parts[0].kind
    return tuple(parts) if parts else "text"


def _joined(run: list[Part]) -> Part:
    if len(run) == 1:
        return run[0]
    return Part(
        kind=run[0].kind,
        text="".join(part.text for part in run),
        call=run[0].call,
        id=next((part.id for part in run if part.id is not None), None),
        name=next((part.name for part in run if part.name is not None), None),
        arguments="".join(part.arguments or "" for part in run) or None,
    )
