"""Plain talk: small talk, who the model is, everyday knowledge, and following short instructions.

Small talk comes from `seed_talk.txt` (question variants `=>` answers), knowledge from `topics.py`.
Does not know about remembered facts, tools or stories.
"""

from __future__ import annotations

from pathlib import Path

from topics import TOPICS, Topic
from words import Chooser, article, listed

Turn = tuple[str, str]


def _load() -> list[tuple[list[str], list[str]]]:
    lines = (Path(__file__).parent / "seed_talk.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" => ") for line in lines if " => " in line]
    return [
        (
            [ask.strip() for ask in asks.split(" / ")],
            [say.strip().replace("\\n", "\n") for say in says.split(" / ")],
        )
        for asks, says in pairs
    ]


TALK = _load()
OPPOSITES = (
    "big small, hot cold, fast slow, happy sad, light dark, old young, tall short, early late, full empty, "
    "hard soft, high low, near far, open closed, rich poor, wet dry, strong weak, loud quiet, clean dirty, "
    "good bad, up down, left right, in out, day night, first last, easy difficult, thick thin, long short, "
    "cheap expensive, awake asleep, brave afraid, begin end, buy sell, push pull, give take, win lose"
)
PAIRS = [(pair.split()[0], pair.split()[1]) for pair in OPPOSITES.split(", ")]
GOOD = (
    "I love this {t}!", "What a wonderful day.", "The {t} works very well.", "The food was delicious.",
    "I am so happy with my new {t}.", "The staff were kind and helpful.", "This is the best {t} I ever had.",
    "Great service, I will come back.", "My {t} arrived early and looks beautiful.", "We had so much fun.",
)  # fmt: skip
BAD = (
    "I hate this {t}.", "What a terrible day.", "The {t} broke after one day.", "The food was cold and bad.",
    "I am very unhappy with my {t}.", "The staff were rude.", "This is the worst {t} I ever had.",
    "Poor service, I will never come back.", "My {t} never arrived.", "We were bored the whole time.",
)  # fmt: skip
KINDS = (
    "fruit",
    "vegetable",
    "animal",
    "color",
    "city",
    "sport",
    "job",
    "drink",
    "instrument",
    "food",
    "hobby",
)
PLURALS = {
    "fruit": "fruits", "vegetable": "vegetables", "animal": "animals", "color": "colors", "city": "cities",
    "sport": "sports", "job": "jobs", "drink": "drinks", "instrument": "instruments", "food": "foods",
    "hobby": "hobbies",
}  # fmt: skip
NUMBER = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "You are a kind and patient helper.",
    "Answer in short sentences.", "You are the small default model of Ramify.", "Be brief.",
    "You are a helpful assistant. Answer in plain English.", "Help the user.", "You are a teacher for children.",
)  # fmt: skip


def small_talk(choose: Chooser) -> Turn:
    """Greetings, feelings, identity, common questions; the first ones more often."""
    asks, says = choose.rng.choice(TALK[:24] if choose.chance(0.3) else TALK)
    return choose.one(asks), choose.one(says)


def knowledge(choose: Chooser) -> Turn:
    """A question about a topic."""
    topic = choose.rng.choice(TOPICS)
    a_name, plural = topic.a_name, topic.plural
    shape = choose.number(0, 7)
    if shape <= 1:
        ask = choose.one(
            (
                f"What is {a_name}?",
                f"Explain what {a_name} is.",
                f"Can you explain {a_name}?",
                f"what is {a_name}",
            )
        )
        return ask, " ".join(topic.facts[: choose.number(1, 2)])
    if shape <= 3:
        ask = choose.one(
            (f"Tell me about {plural}.", f"What do you know about {plural}?", f"tell me about {a_name}")
        )
        return ask, " ".join(topic.facts)
    if shape == 4:
        count = choose.number(2, min(3, len(topic.facts)))
        facts = topic.facts[:count]
        ask = f"Give me {NUMBER[count]} facts about {plural}."
        return ask, "\n".join(f"{place}. {fact}" for place, fact in enumerate(facts, 1))
    if shape == 5:
        return f"Describe {a_name} in one sentence.", topic.facts[0]
    if shape == 6:
        return choose.one(
            (f"Tell me a fact about {plural}.", f"Tell me something about {plural}.")
        ), choose.one(topic.facts)
    return reading(choose, topic)


def reading(choose: Chooser, topic: Topic) -> Turn:
    """A question that is answered by a given text: retrieval, or a summary."""
    others = choose.rng.sample([one for one in TOPICS if one.name != topic.name], choose.number(1, 2))
    texts = [" ".join(topic.facts), *(" ".join(other.facts) for other in others)]
    choose.rng.shuffle(texts)
    if choose.chance(0.3):
        return f"Summarize this text in one sentence: {' '.join(topic.facts)}", topic.facts[0]
    ask = choose.one(
        ("Use the text to answer the question.", "Answer the question with the help of these texts.")
    )
    context = "\n".join(f"[{place}] {text}" for place, text in enumerate(texts, 1))
    return f"{ask}\n\n{context}\n\nQuestion: What is {topic.a_name}?", topic.facts[0]


def passage(choose: Chooser) -> Turn:
    """A small invented text and a question whose answer is one of its words."""
    names = choose.several("name", choose.number(2, 4), value=True)
    kind = choose.one(("city", "food", "job", "hobby"))
    verb = {"city": "lives in", "food": "likes", "job": "works as", "hobby": "enjoys"}[kind]
    values = choose.several(kind, len(names), value=True)
    said = [
        f"{n} {verb} {article(v) if kind == 'job' else v}." for n, v in zip(names, values, strict=True)
    ]
    place = choose.number(0, len(names) - 1)
    ask = {
        "city": f"Where does {names[place]} live?", "food": f"What does {names[place]} like?",
        "job": f"What is the job of {names[place]}?", "hobby": f"What does {names[place]} enjoy?",
    }[kind]  # fmt: skip
    value = article(values[place]) if kind == "job" else values[place]
    return f"{' '.join(said)}\n\n{ask}", f"{names[place]} {verb} {value}."


def instruction(choose: Chooser) -> Turn:
    """Short orders that must be followed to the letter."""
    word = choose.value(choose.one(["thing", "fruit", "animal", "name", "city"]))
    phrase = choose.one(
        (
            f"the {choose.value('animal')} sleeps in the {choose.value('place')}",
            f"{choose.value('name')} likes {choose.value('food')}",
            f"I see a {choose.value('color')} {choose.value('thing')}",
            f"on {choose.value('day')} we go to {choose.value('city')}",
        )
    )
    shape = choose.number(0, 10)
    if shape == 0:
        return choose.one(
            (f"Repeat after me: {phrase}", f"Say this: {phrase}", f"Repeat: {phrase}")
        ), phrase
    if shape == 1:
        return f"Write this in capital letters: {phrase}", phrase.upper()
    if shape == 2:
        return f"Write this in small letters: {phrase.upper()}", phrase.lower()
    if shape == 3:
        return choose.one(
            (f"Answer with one word: {word}", f"Say only the word {word}.", f"Say {word}.")
        ), word
    if shape == 4:
        times = choose.number(2, 5)
        return f"Say the word {word} {NUMBER[times]} times.", " ".join([word] * times)
    if shape == 5:
        return (
            f"What is the first letter of {word}?",
            f"The first letter of {word} is {word[0].upper()}.",
        )
    if shape == 6:
        a, b = choose.rng.choice(PAIRS)
        if choose.chance(0.4):
            a, b = b, a
        return choose.one(
            (f"What is the opposite of {a}?", f"Give me the opposite of {a}.")
        ), f"The opposite of {a} is {b}."
    if shape == 7:
        return (
            f"How many words are in this sentence: {phrase}",
            f"There are {len(phrase.split())} words.",
        )
    if shape == 8:
        return f"Use the word {word} in a sentence.", choose.one(
            (
                f"I can see {word} from here.",
                f"Do you know {word}?",
                f"We talked about {word} yesterday.",
            )
        )
    if shape == 9:
        other = choose.value("color")
        return f"Do not tell me about {word}. Just say {other}.", other
    first, second = choose.several("fruit", 2)
    return f"First I wanted you to say {first}, but now say {second}.", second


def listing(choose: Chooser) -> Turn:
    """Lists of things of one kind, as a line, bullets or a numbered list."""
    kind = choose.one(KINDS)
    count = choose.number(2, 5)
    words = choose.several(kind, min(count, 3) if kind == "instrument" else count)
    count = len(words)
    plural = PLURALS[kind]
    shape = choose.number(0, 3)
    if shape == 0:
        return f"Give me a numbered list of {NUMBER[count]} {plural}.", "\n".join(
            f"{place}. {word.capitalize()}" for place, word in enumerate(words, 1)
        )
    if shape == 1:
        return f"Make a bullet list with {NUMBER[count]} {plural}.", "\n".join(
            f"- {word.capitalize()}" for word in words
        )
    ask = choose.one(
        (
            f"Name {NUMBER[count]} {plural}.",
            f"List {NUMBER[count]} {plural}.",
            f"Tell me {NUMBER[count]} {plural}.",
        )
    )
    return ask, (listed(words) + ".").capitalize() if kind != "city" else listed(words) + "."


def choice(choose: Chooser) -> Turn:
    """Feelings of a text, yes or no, multiple choice, odd one out, sorting into kinds."""
    shape = choose.number(0, 4)
    if shape == 0:
        good = choose.chance(0.5)
        text = choose.one(GOOD if good else BAD).format(t=choose.word("thing"))
        ask = choose.one(
            (
                f"Is this positive or negative? {text}",
                f"Text: {text}\nIs the mood positive or negative?",
                f"Classify the text as positive or negative.\n\n{text}",
            )
        )
        return ask, "positive" if good else "negative"
    kinds = choose.rng.sample(["fruit", "animal", "color", "city", "job", "sport", "vegetable"], 2)
    if shape == 1:
        word = choose.word(kinds[0])
        if word == "orange" or choose.chance(0.5):
            return (
                f"Is {article(word)} {article(kinds[0])}?",
                f"Yes, {article(word)} is {article(kinds[0])}.",
            )
        return f"Is {article(word)} {article(kinds[1])}?", f"No, {article(word)} is {article(kinds[0])}."
    if shape == 2:
        topic = choose.rng.choice(TOPICS)
        wrong = choose.rng.sample([one.facts[1] for one in TOPICS if one.kind != topic.kind], 2)
        options = [topic.facts[0], *wrong]
        choose.rng.shuffle(options)
        letter = "ABC"[options.index(topic.facts[0])]
        text = "\n".join(f"{mark}. {option}" for mark, option in zip("ABC", options, strict=True))
        return f"What is {topic.a_name}?\n{text}\nAnswer with A, B or C.", letter
    if shape == 3:
        words = choose.several(kinds[0], 3)
        odd = choose.word(kinds[1])
        mixed = [*words, odd]
        choose.rng.shuffle(mixed)
        return f"Which word does not belong: {', '.join(mixed)}?", f"{odd.capitalize()} does not belong."
    word = choose.word(kinds[0])
    pair = list(kinds)
    choose.rng.shuffle(pair)
    return (
        f"Is {word} {article(pair[0])} or {article(pair[1])}?",
        f"{word[0].upper()}{word[1:]} is {article(kinds[0])}.",
    )


def skeleton(choose: Chooser) -> list[Turn]:
    """Points first, then one point at length; or ideas first, then the choice of one."""
    topic = choose.rng.choice([one for one in TOPICS if len(one.facts) >= 3])
    heads = [" ".join(fact.rstrip(".").split()[:6]) for fact in topic.facts[:3]]
    points = "\n".join(f"{place}. {head}" for place, head in enumerate(heads, 1))
    place = choose.number(1, 3)
    ask = choose.one(
        (
            f"Write a skeleton with three points about {topic.plural}.",
            f"Give me three short points about {topic.plural}.",
        )
    )
    more = choose.one(
        (
            f"Write more about point {place}.",
            f"Expand point {place}.",
            f"Please continue with point {place}.",
        )
    )
    return [(ask, points), (more, topic.facts[place - 1])]


def turn(choose: Chooser) -> Turn:
    """Any single turn of plain talk."""
    make = choose.rng.choices(
        (small_talk, knowledge, passage, instruction, listing, choice), weights=(36, 24, 8, 16, 7, 9)
    )[0]
    return make(choose)
