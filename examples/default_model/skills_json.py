"""Structured output: JSON extraction, JSON writing, questions about JSON, and simple formats.

Every assistant answer that is meant to be JSON is made by `json.dumps`, so it is valid by
construction. Does not know how answers are checked; `evaluate.py` parses them again.
"""

from __future__ import annotations

import json
from typing import Any

from words import Chooser, article, listed

Turn = tuple[str, str]
Record = dict[str, Any]

SENTENCES: dict[str, tuple[str, ...]] = {
    "name": ("{name}",),
    "age": ("who is {age} years old", "aged {age}"),
    "city": ("lives in {city}", "comes from {city}", "is from {city}"),
    "job": ("works as {job_a}", "is {job_a}"),
    "pet": ("has a {pet}", "owns a {pet}", "has a pet {pet}"),
    "color": ("likes the color {color}", "loves {color}", "wears {color}"),
    "food": ("likes {food}", "loves to eat {food}", "enjoys {food}"),
    "hobby": ("enjoys {hobby}", "likes {hobby}", "spends weekends {hobby}"),
    "day": ("is free on {day}", "comes on {day}"),
}
KIND = {
    "city": "city", "job": "job", "pet": "animal", "color": "color", "food": "food", "hobby": "hobby",
    "day": "day",
}  # fmt: skip


def dumps(choose: Chooser, value: Any, pretty: float = 0.15) -> str:
    """JSON text, now and then with indentation."""
    return json.dumps(value, indent=2 if choose.chance(pretty) else None, ensure_ascii=False)


def person(choose: Chooser, count: int) -> Record:
    """A person with `count` further fields."""
    record: Record = {"name": choose.value("name")}
    for key in choose.rng.sample([*KIND, "age"], count):
        record[key] = choose.number(4, 95) if key == "age" else choose.value(KIND[key])
    return record


def describe(choose: Chooser, record: Record) -> str:
    """Sentences that state every field of a person."""
    values = {key: str(value) for key, value in record.items()}
    values["job_a"] = article(values["job"]) if "job" in values else ""
    values["pet"] = values.get("pet", "")
    parts = [choose.one(SENTENCES[key]).format(**values) for key in record if key not in ("name", "age")]
    name = values["name"]
    age = values.get("age")
    style = choose.number(0, 2)
    if style == 0:
        lead = f"{name}, {age} years old, " if age else f"{name} "
        return lead + listed(parts) + "." if parts else f"{name} is {age} years old."
    sentences = [f"{name} is {age} years old."] if age else []
    subject = name if not sentences else choose.one(("He", "She", name))
    for part in parts:
        sentences.append(f"{subject} {part}.")
        subject = choose.one(("He", "She", name)) if style == 1 else name
    return " ".join(sentences) or f"{name} is here."


def event(choose: Chooser) -> tuple[str, Record]:
    """A calendar entry in a sentence."""
    hour = choose.number(1, 12)
    record: Record = {
        "event": choose.one(
            ("meeting", "concert", "party", "lesson", "picnic", "dinner", "walk", "exam")
        ),
        "day": choose.word("day"),
        "time": f"{hour} {choose.one(('am', 'pm'))}",
        "place": choose.value("place"),
    }
    text = choose.one(
        (
            "There is a {event} on {day} at {time} in the {place}.",
            "The {event} takes place in the {place} on {day} at {time}.",
            "Come to the {event}! {day}, {time}, at the {place}.",
            "On {day} at {time} we have a {event} in the {place}.",
        )
    ).format(**record)
    return text, record


def order(choose: Chooser) -> tuple[str, Record]:
    """Something bought, with a number and a price."""
    record: Record = {
        "item": choose.value("thing"),
        "color": choose.value("color"),
        "quantity": choose.number(1, 20),
        "price": choose.number(1, 99),
    }
    text = choose.one(
        (
            "I would like {quantity} {color} {item}s for {price} dollars each.",
            "Please send me {quantity} of the {color} {item}, price {price} dollars.",
            "The order: {quantity} x {item}, {color}, {price} dollars.",
            "A {color} {item} costs {price} dollars. We take {quantity}.",
        )
    ).format(**record)
    return text, record


def weather(choose: Chooser) -> tuple[str, Record]:
    """A weather report."""
    record: Record = {
        "city": choose.value("city"),
        "weather": choose.value("weather"),
        "temperature": choose.number(-9, 38),
    }
    return choose.one(
        (
            "It is {weather} in {city} today, {temperature} degrees.",
            "Weather for {city}: {weather} with {temperature} degrees.",
            "Today {city} is {weather} and the temperature is {temperature} degrees.",
        )
    ).format(**record), record


def source(choose: Chooser) -> tuple[str, Record]:
    """A text and the record it states."""
    if choose.chance(0.55):
        record = person(choose, choose.number(1, 4))
        return describe(choose, record), record
    return choose.rng.choice((event, order, weather))(choose)


def subset(choose: Chooser, record: Record) -> Record:
    """The record, or a part of it, or its fields in another order."""
    keys = list(record)
    if choose.chance(0.3) and len(keys) > 2:
        keys = choose.rng.sample(keys, choose.number(2, len(keys)))
    return {key: record[key] for key in keys}


def extract(choose: Chooser) -> Turn:
    """Text in, JSON object out."""
    text, full = source(choose)
    record = subset(choose, full)
    keys = ", ".join(record)
    quoted = ", ".join(f'"{key}"' for key in record)
    schema = json.dumps(
        {"type": "object", "properties": {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in record.items()},
         "required": list(record)}
    )  # fmt: skip
    ask = choose.one(
        (
            f"Extract {keys} from this text as JSON.\n\n{text}",
            f"{text}\n\nGive me this as a JSON object with the keys {keys}.",
            f"Read the text and answer with JSON only. Keys: {keys}.\n\nText: {text}",
            f"Turn this into JSON with the fields {quoted}: {text}",
            f"Text: {text}\nReturn a JSON object with {listed(list(record))}.",
            f"{text}\n\nJSON with keys {keys}:",
            f"Answer with a JSON object that matches this schema: {schema}\n\n{text}",
            f"Extract the data as JSON ({keys}): {text}",
        )
    )
    return ask, dumps(choose, record)


def several(choose: Chooser) -> Turn:
    """A JSON list of small objects or of words."""
    if choose.chance(0.5):
        people = [person(choose, 1) for _ in range(choose.number(2, 3))]
        key = next(name for name in people[0] if name != "name")
        for other in people[1:]:
            value = choose.number(4, 95) if key == "age" else choose.value(KIND[key])
            other.clear()
            other.update({"name": choose.value("name"), key: value})
        text = " ".join(describe(choose, one) for one in people)
        return f"{text}\n\nWrite a JSON list of objects with the keys name and {key}.", dumps(
            choose, people, 0.05
        )
    kind = choose.one(("fruit", "vegetable", "animal", "color", "city"))
    words = choose.several(kind, choose.number(2, 4), value=kind != "color")
    text = f"I saw {listed(words)}." if kind != "color" else f"The flag is {listed(words)}."
    return f"{text}\n\nList every {kind} in this text as a JSON array.", dumps(choose, words, 0.0)


def invent(choose: Chooser) -> Turn:
    """JSON with values of the model's own choice."""
    record = person(Chooser(choose.rng, choose.split, 0.0, wild=0.0), choose.number(2, 4))
    keys = listed(list(record))
    ask = choose.one(
        (
            f"Make up a person and describe them as JSON with {keys}.",
            f"Create a JSON object for a story character with the keys {keys}.",
            f"Write a JSON example with the fields {keys}.",
            f"Give me JSON for a person with {keys}.",
        )
    )
    return ask, dumps(choose, record)


def read(choose: Chooser) -> Turn:
    """A question about a JSON object."""
    record = person(choose, choose.number(2, 4))
    key = choose.one(list(record))
    text = dumps(choose, record)
    if choose.chance(0.25):
        return f"Write one sentence about this: {text}", describe(choose, record).replace(". ", ", ", 0)
    ask = choose.one(
        ("{text}\n\nWhat is the {key}?", "Look at this JSON: {text}\nWhat is the value of {key}?")
    )
    return ask.replace("{text}", text).replace("{key}", key), f"The {key} is {record[key]}."


def format_turn(choose: Chooser) -> Turn:
    """Bullet lists, numbered lists, comma lists and tables of given words."""
    kind = choose.one(("fruit", "vegetable", "animal", "color", "city", "sport"))
    words = choose.several(kind, choose.number(2, 5))
    shape = choose.number(0, 4)
    if shape == 0:
        return f"Make a bullet list of {listed(words)}.", "\n".join(f"- {word}" for word in words)
    if shape == 1:
        numbered = "\n".join(f"{place}. {word}" for place, word in enumerate(words, 1))
        return f"Make a numbered list: {', '.join(words)}", numbered
    if shape == 2:
        return f"Write these as a JSON array: {', '.join(words)}", json.dumps(words)
    if shape == 3:
        return f"Sort these words by the alphabet: {', '.join(words)}", ", ".join(
            sorted(words, key=str.lower)
        )
    return (
        f"How many words are in this list: {', '.join(words)}?",
        f"There are {len(words)} words in the list.",
    )


def turn(choose: Chooser) -> Turn:
    """Any structured-output turn, extraction most of the time."""
    make = choose.rng.choices(
        (extract, several, invent, read, format_turn), weights=(55, 12, 10, 13, 10)
    )[0]
    return make(choose)
