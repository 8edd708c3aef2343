"""What the page and the README show first: forms, judging between answers, names for things.

A form is an answer whose braces and member names a JSON Schema forces; the model sees no schema, so it
learns only the values that stand between them. Does not know how a form is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import skills_endings
import skills_json
import skills_math
import skills_story
import skills_talk
import skills_tools
from words import Chooser, article

Piece = tuple[str, bool]
Turn = tuple[str, str]

COUNTRIES: dict[str, tuple[str, str, bool]] = {  # capital, continent, whether it is an island
    "France": ("Paris", "Europe", False), "Germany": ("Berlin", "Europe", False), "Spain": ("Madrid", "Europe", False),
    "Italy": ("Rome", "Europe", False), "Portugal": ("Lisbon", "Europe", False), "Austria": ("Vienna", "Europe", False),
    "Norway": ("Oslo", "Europe", False), "Sweden": ("Stockholm", "Europe", False), "Finland": ("Helsinki", "Europe", False),
    "Ireland": ("Dublin", "Europe", True), "Greece": ("Athens", "Europe", False), "Poland": ("Warsaw", "Europe", False),
    "Hungary": ("Budapest", "Europe", False), "Iceland": ("Reykjavik", "Europe", True), "Malta": ("Valletta", "Europe", True),
    "Egypt": ("Cairo", "Africa", False), "Kenya": ("Nairobi", "Africa", False), "Nigeria": ("Abuja", "Africa", False),
    "Ghana": ("Accra", "Africa", False), "Tunisia": ("Tunis", "Africa", False), "Morocco": ("Rabat", "Africa", False),
    "Madagascar": ("Antananarivo", "Africa", True), "Senegal": ("Dakar", "Africa", False), "Ethiopia": ("Addis Ababa", "Africa", False),
    "Japan": ("Tokyo", "Asia", True), "China": ("Beijing", "Asia", False), "India": ("New Delhi", "Asia", False),
    "Vietnam": ("Hanoi", "Asia", False), "Thailand": ("Bangkok", "Asia", False), "Nepal": ("Kathmandu", "Asia", False),
    "Turkey": ("Ankara", "Asia", False), "Iran": ("Tehran", "Asia", False), "Sri Lanka": ("Colombo", "Asia", True),
    "Peru": ("Lima", "America", False), "Chile": ("Santiago", "America", False), "Brazil": ("Brasilia", "America", False),
    "Argentina": ("Buenos Aires", "America", False), "Colombia": ("Bogota", "America", False), "Cuba": ("Havana", "America", True),
    "Ecuador": ("Quito", "America", False), "Canada": ("Ottawa", "America", False), "Mexico": ("Mexico City", "America", False),
    "Jamaica": ("Kingston", "America", True), "Australia": ("Canberra", "Oceania", False), "New Zealand": ("Wellington", "Oceania", True),
    "Fiji": ("Suva", "Oceania", True), "Samoa": ("Apia", "Oceania", True),
}  # fmt: skip
CITIES = {
    "Milan": "Italy", "Naples": "Italy", "Venice": "Italy", "Munich": "Germany", "Hamburg": "Germany", "Lyon": "France",
    "Marseille": "France", "Porto": "Portugal", "Seville": "Spain", "Barcelona": "Spain", "Lagos": "Nigeria",
    "Kyoto": "Japan", "Osaka": "Japan", "Shanghai": "China", "Mumbai": "India", "Delhi": "India", "Istanbul": "Turkey",
    "Sydney": "Australia", "Melbourne": "Australia", "Auckland": "New Zealand", "Toronto": "Canada", "Montreal": "Canada",
    "Vancouver": "Canada", "Bergen": "Norway", "Krakow": "Poland", "Cusco": "Peru", "Galway": "Ireland", "Mombasa": "Kenya",
    **{capital: country for country, (capital, _, _) in COUNTRIES.items()},
}  # fmt: skip
ADJECTIVES = (
    "good, great, lovely, boring, long, funny, sad, clever, slow, wonderful, terrible, simple".split(
        ", "
    )
)
STARS = {"good": 4, "great": 5, "lovely": 5, "boring": 2, "long": 3, "funny": 4, "sad": 3, "clever": 4, "slow": 2,
         "wonderful": 5, "terrible": 1, "simple": 3}  # fmt: skip
WORKS = ("film", "book", "story", "play", "song", "concert", "game", "show", "picture")


def chat(turns: list[Turn], system: str = "") -> list[Piece]:
    """A conversation in pieces; the assistant's turns are learnt from."""
    pieces: list[Piece] = [(f"<|im_start|>system\n{system}<|im_end|>\n", False)] if system else []
    for ask, say in turns:
        pieces += [
            (f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n", False),
            (f"{say}<|im_end|>", True),
            ("\n", False),
        ]
    return pieces


def _filled(value: Any) -> list[Piece]:
    """JSON text as it is written behind a schema: strings, numbers and words are learnt, the rest is forced."""
    if isinstance(value, dict):
        pieces: list[Piece] = [("{", False)]
        for place, (name, inner) in enumerate(value.items()):
            pieces += [((", " if place else "") + json.dumps(name) + ": ", False), *_filled(inner)]
        return [*pieces, ("}", False)]
    if isinstance(value, str):
        return [('"', False), (json.dumps(value, ensure_ascii=False)[1:], True)]
    return [(json.dumps(value), True)]


def _record(choose: Chooser) -> tuple[str, str, dict[str, Any]]:
    """system, what is asked, and the form that answers it."""
    kind = choose.number(0, 4)
    if kind == 0:
        city = choose.one(list(CITIES))
        ask = choose.one(
            (
                "Where is {0}?",
                "In which country is {0}?",
                "Tell me where {0} is.",
                "{0}",
                "What do you know about {0}?",
            )
        )
        return "", ask.format(city), {"name": city, "country": CITIES[city]}
    if kind == 1:
        country = choose.one(list(COUNTRIES))
        capital, continent, island = COUNTRIES[country]
        millions = choose.number(1, 300)
        people = choose.one(
            (f"{millions} million", f"Some {millions} million", f"About {millions},000,000")
        )
        sentences = [
            choose.one((f"{people} people live there.", f"It has {people} people.")),
            choose.one(
                (
                    f"Its capital is {capital}.",
                    f"The capital, {capital}, is its largest city.",
                    f"Most of them live in {capital}.",
                )
            ),
        ]
        choose.rng.shuffle(sentences)
        lead = f"{country} is an island in {continent}." if island else f"{country} lies in {continent}."
        system = choose.one(("Say as JSON what the text says of the country.", "Fill in the form.", ""))
        return system, " ".join([lead, *sentences]), {
            "name": country, "capital": capital, "continent": continent, "population": millions * 1_000_000, "island": island,
        }  # fmt: skip
    if kind == 2:
        work, word = choose.one(WORKS), choose.one(ADJECTIVES)
        title = f"{choose.one(('A', 'The', 'One'))} {word.capitalize()} {work.capitalize()}"
        ask = choose.one(
            (
                "I saw a {w} yesterday. It was {a}.",
                "The {w} was {a}.",
                "What do you say about a {w} that is {a}?",
            )
        )
        return "", ask.format(w=work, a=word), {"title": title, "stars": STARS[word]}
    if kind == 3:
        hero = choose.one(skills_story.HEROES)
        ask = choose.one(
            (
                "Write a review of a story about {0}.",
                "Make up a book about {0}.",
                "A book about {0}, please.",
            )
        )
        title = f"The {choose.one(skills_story.TRAITS).capitalize()} {hero.capitalize()}"
        return "", ask.format(article(hero)), {"title": title, "stars": choose.number(3, 5)}
    person = skills_json.person(choose, choose.number(1, 4))
    ask = choose.one(("{0}", "Fill in the form: {0}", "Extract the facts. {0}"))
    return "", ask.format(skills_json.describe(choose, person)), person


def form(choose: Chooser) -> list[Piece]:
    """A question, and an answer in a form."""
    system, ask, record = _record(choose)
    lead = (
        f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    ) + f"<|im_start|>user\n{ask}<|im_end|>\n"
    return [
        (lead + "<|im_start|>assistant\n", False),
        *_filled(record),
        ("<|im_end|>", True),
        ("\n", False),
    ]


def place(choose: Chooser) -> Turn:
    """The same facts as a sentence."""
    if choose.chance(0.5):
        city = choose.one(list(CITIES))
        return choose.one(("Where is {0}?", "In which country is {0}?")).format(
            city
        ), f"{city} is in {CITIES[city]}."
    country = choose.one(list(COUNTRIES))
    return choose.one(
        ("What is the capital of {0}?", "Which city is the capital of {0}?", "capital of {0}?")
    ).format(country), f"The capital of {country} is {COUNTRIES[country][0]}."


JUDGE = (
    "How good is this answer, from 1 (poor) to 9 (excellent)? Say only the number.",
    "How good is this answer, from 1 to 9?", "Rate your answer from 1 to 9. Say only the number.",
)  # fmt: skip


def judged(choose: Chooser) -> list[Turn]:
    """An answer that is good, cut off, or to another question, and its mark."""
    make: Callable[[Chooser], Turn] = choose.one(
        (skills_story.turn, skills_talk.turn, skills_math.turn, place)
    )  # type: ignore[arg-type]
    ask, say = make(choose)
    kind = choose.number(0, 3)
    if kind <= 1:
        mark = 9 if len(say) > 60 else 8
    elif kind == 2 and len(say) > 40:
        say, mark = skills_endings.cut(choose, say), 5
    else:
        say, mark = choose.one((skills_talk.turn, skills_math.turn, place))(choose)[1], 1  # type: ignore[arg-type]
    return [(ask, say), (choose.one(JUDGE), str(mark))]


NAMED = {
    "small boat": ("Sea Star", "Little Wave", "Blue Gull", "Morning Tide", "Silver Fish", "Wind Song", "Lucky Duck"),
    "cat": ("Whiskers", "Luna", "Tiger", "Mittens", "Felix", "Smoky", "Pepper"),
    "dog": ("Rex", "Bella", "Buddy", "Lucky", "Max", "Daisy", "Bruno"),
    "horse": ("Star", "Thunder", "Silver", "Beauty", "Spirit", "Prince"),
    "band": ("The Night Owls", "Seven Rivers", "The Loud Teapots", "Red Lantern", "The Paper Boats"),
    "cafe": ("The Corner Cup", "Sunny Beans", "The Warm Spoon", "Golden Crumb", "The Little Kettle"),
    "book shop": ("The Open Page", "Paper Moon", "The Reading Fox", "Ink and Leaf", "Chapter One"),
    "robot": ("Bolt", "Rusty", "Tin Tom", "Gizmo", "Spark"),
    "dragon": ("Ember", "Smoky", "Scale", "Goldwing", "Flame", "Old Cinder"),
    "garden": ("Green Corner", "The Bee House", "Rose Hill", "Quiet Leaves"),
    "team": ("The Lions", "Fast Foxes", "The Blue Comets", "Brave Bears"),
    "bakery": ("Warm Crust", "The Early Bun", "Golden Loaf", "Sweet Morning"),
}  # fmt: skip


def named(choose: Chooser) -> Turn:
    """A name for something."""
    kind = choose.one(list(NAMED))
    one, two, three = choose.rng.sample(NAMED[kind], 3)
    if choose.chance(0.3):
        return f"Give me three names for {article(kind)}.", f"1. {one}\n2. {two}\n3. {three}"
    ask = choose.one(
        (
            "What is a good name for {0}?",
            "Find a name for {0}.",
            "How should I call {0}?",
            "I need a name for {0}.",
        )
    )
    say = choose.one(
        (
            "How about {0}?",
            "{0} is a good name.",
            "You could call it {0}.",
            "{0}",
            "I like the name {0}.",
        )
    )
    return ask.format(article(kind)), say.format(one)


def called(choose: Chooser) -> list[Piece]:
    """A tool that is called; sums most of all, since elsewhere in this stage they are answered without a tool."""
    messages = skills_tools.tool_call(choose, "calculator" if choose.chance(0.4) else None)
    pieces: list[Piece] = []
    for message in messages:
        pieces += [
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", message["role"] == "assistant"),
            ("\n", False),
        ]
    return pieces


def document(choose: Chooser) -> list[Piece]:
    """One of the things that this file and `skills_endings.py` teach, in pieces."""
    kind = choose.rng.choices(
        ("ends", "story", "form", "judged", "named", "place", "called"),
        weights=(34, 14, 19, 10, 7, 7, 9),
    )[0]
    if kind == "called":
        return called(choose)
    if kind == "form":
        return form(choose)
    if kind == "ends":
        return chat(skills_endings.turns(choose))
    if kind == "story":
        return chat([skills_story.turn(choose)])
    if kind == "judged":
        return chat(judged(choose))
    make = named if kind == "named" else place
    return chat([make(choose) for _ in range(choose.number(1, 3))])
