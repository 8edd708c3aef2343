"""Open talk: answering what a user tells, going on about a topic, and saying what one does not know.

A small model cannot know most things, so it is taught to say so for words it has no facts about, and to
answer a statement with a question about the very thing the user mentioned.
"""

from __future__ import annotations

from topics import TOPICS
from words import Chooser, article

Turn = tuple[str, str]

KNOWN = frozenset(topic.name for topic in TOPICS)
ASK_THING = (
    "What is {w}?", "Tell me about {w}.", "What do you know about {w}?", "Explain {w}.", "What is a {w}?",
    "What does {w} mean?", "Can you explain {w} to me?", "How does {w} work?", "Why is {w} important?",
    "tell me about {w}", "Tell me about the history of {w}.", "What is the meaning of {w}?", "Who invented {w}?",
)  # fmt: skip
ASK_NAME = (
    "Who was {w}?", "Who is {w}?", "Tell me about {w}.", "When was {w} born?", "What do you know about {w}?",
    "Where is {w}?", "What happened in {w}?", "What is {w} famous for?", "Why is {w} famous?",
    "Tell me about the history of {w}.", "Who founded {w}?",
)  # fmt: skip
NOT_KNOWN = (
    "I am sorry, I do not know much about {w}. I am only a small model.",
    "I do not know enough about {w} to answer that.",
    "I have not learned about {w}. You could ask me about animals, food or everyday things.",
    "I am not sure about {w}, and I do not want to tell you something wrong.",
)
HARD = (
    "Write an essay about {w}.", "Write a program that sorts {w}.", "Translate {w} into {l}.", "Write an email about {w}.",
    "Write a letter to {n} about {w}.", "Write a song about {w}.", "How do you say {w} in {l}?", "Plan a trip to {n}.",
    "Write Python code for {w}.", "Write a speech about {w}.", "Draw a picture of {w}.", "Solve this equation: {e}",
    "Write a report on {w}.", "Make a website about {w}.", "What is the price of {w}?", "What is the latest news about {w}?",
    "Write an email to my {r}.", "Write an email to {n}.",
)  # fmt: skip
TOO_HARD = (
    "That is too hard for me. I am only a small model.",
    "I am sorry, I am too small to do that well. A larger model could help you.",
    "I cannot do that well. I can tell stories, do small sums and write JSON.",
)
LANGUAGES = (
    "French, German, Spanish, Italian, Dutch, Latin, Greek, Polish, Turkish, Chinese, Japanese".split(
        ", "
    )
)
# Statement and answers; {t} {a} {p} {r} {f} {n} {h} {j} {c} are words that the answer takes up again.
SAID: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("I went to the {p} with my {r} yesterday.", ("How nice! What did you and your {r} do at the {p}?", "Did your {r} like the {p}?")),
    ("I was at the {p} today.", ("What did you see at the {p}?", "How was it at the {p}?")),
    ("I bought a {t} today.", ("What will you do with the {t}?", "What does your new {t} look like?")),
    ("My {t} is broken.", ("I am sorry about your {t}. Can it be mended?", "Oh no! What happened to your {t}?")),
    ("I saw a {a} today.", ("How exciting! What was the {a} doing?", "Where did you see the {a}?")),
    ("My {a} is ill.", ("I am sorry. I hope your {a} gets well soon. Have you been to a vet?", "Poor {a}! A vet may be able to help.")),
    ("My {a} is very loud.", ("Maybe your {a} wants to tell you something. Is it hungry?", "Perhaps the {a} is bored and wants to play.")),
    ("My {a} ran away.", ("I am sorry. Have you looked near your home for the {a}?", "That must be hard. I hope your {a} comes back soon.")),
    ("I ate {f} today.", ("Did you like the {f}?", "{f} sounds good. Did you make it yourself?")),
    ("I do not like {f}.", ("That is all right. What do you like better than {f}?", "Not everyone likes {f}. What do you prefer?")),
    ("I like {f}.", ("{f} is a good choice. How do you like it best?", "What do you like about {f}?")),
    ("My {r} likes {h}.", ("{h} is a nice hobby. Do you like it, too?", "How did your {r} come to like {h}?")),
    ("My {r} is coming to visit me.", ("How nice! What will you do with your {r}?", "When will your {r} come?")),
    ("My {r} is ill.", ("I am sorry to hear that. I hope your {r} feels better soon.", "That must be hard. How is your {r} now?")),
    ("My {r} is {j2}.", ("Does your {r} like to work as {j2}?", "That sounds like important work.")),
    ("I started {h} last week.", ("How do you like {h} so far?", "{h} is fun. Keep going!")),
    ("I want to learn {h}.", ("{h} is a good thing to learn. Start with small steps and practice every day.", "What do you like about {h}?")),
    ("I am reading a book about {w}.", ("What have you learned about {w} so far?", "Is the book about {w} good?")),
    ("I am thinking about {w}.", ("What do you think about {w}?", "Tell me more about {w}.")),
    ("Yesterday I talked to {n}.", ("What did {n} say?", "How is {n} doing?")),
    ("I am going to {c} tomorrow.", ("Have a good trip! What will you do in {c}?", "How nice! Have you been to {c} before?")),
    ("I was in {c} last year.", ("What did you like best in {c}?", "How was {c}?")),
    ("I do not like {d}s.", ("Why do you not like {d}s?", "I understand. Which day do you like better?")),
    ("It was {v} today.", ("Do you like {v} weather?", "What did you do on such a {v} day?")),
    ("I lost my {t}.", ("Where did you see your {t} last?", "I am sorry. Have you looked everywhere for the {t}?")),
    ("I found a {t} at the {p}.", ("Maybe someone is looking for the {t}. What will you do with it?", "How exciting! Whose {t} could it be?")),
    ("I made {f} for my {r}.", ("That was kind. Did your {r} like the {f}?", "How nice of you! I am sure your {r} was happy.")),
    ("I dreamed of a {a}.", ("What did the {a} do in your dream?", "Dreams can be strange. Were you afraid of the {a}?")),
    ("I think {w} is great.", ("What do you like about {w}?", "I am glad that you like {w}. Tell me more!")),
    ("I hate {w}.", ("I understand. What is it about {w} that you do not like?", "Is there something you like better than {w}?")),
)  # fmt: skip
OPINION = (
    "What do you think about {w}?",
    "Do you like {w}?",
    "What is your opinion on {w}?",
    "Are you interested in {w}?",
)
NO_OPINION = (
    "I am a program, so I have no opinion on {w}. What do you think?",
    "I do not know {w} from my own life, but I would like to hear what you think.",
    "What do you like about {w}? I am curious.",
)


def _any_word(choose: Chooser) -> str:
    wild = Chooser(choose.rng, choose.split, 0.0, wild=0.75)
    while True:
        word = wild.value(choose.one(("thing", "food", "animal", "hobby", "place", "job")))
        if word not in KNOWN:
            return (
                word + "s" if choose.chance(0.3) and " " not in word and not word.endswith("s") else word
            )


def unknown(choose: Chooser) -> Turn:
    """A question about something the model was never told about."""
    if choose.chance(0.5):
        word = Chooser(choose.rng, choose.split, 0.2, wild=1.0).value("name")
        if choose.chance(0.2):
            word += " " + Chooser(choose.rng, choose.split, 0.2, wild=1.0).value("city")
        return choose.one(ASK_NAME).format(w=word), choose.one(NOT_KNOWN).format(w=word)
    word = Chooser(choose.rng, choose.split, 0.0, wild=1.0).value("thing")
    return choose.one(ASK_THING).format(w=word), choose.one(NOT_KNOWN).format(w=word)


def hard(choose: Chooser) -> Turn:
    """A request that is beyond a small model."""
    a, b = choose.number(2, 99), choose.number(2, 99)
    words = {
        "w": _any_word(choose), "l": choose.one(LANGUAGES), "n": choose.value("city"),
        "e": f"{a}x + {b} = {a * b}", "r": choose.word("relative"),
    }  # fmt: skip
    return choose.one(HARD).format(**words), choose.one(TOO_HARD)


def said(choose: Chooser) -> Turn:
    """A statement of the user, answered with interest in what it names."""
    statement, answers = choose.rng.choice(SAID)
    words = {
        "t": choose.value("thing"), "a": choose.word("animal"), "p": choose.word("place"), "r": choose.word("relative"),
        "f": choose.value("food"), "n": choose.value("name"), "h": choose.word("hobby"), "c": choose.value("city"),
        "j2": article(choose.word("job")), "w": _any_word(choose), "d": choose.word("day"), "v": choose.word("weather"),
    }  # fmt: skip
    answer = choose.one(answers).format(**words)
    return statement.format(**words), answer[0].upper() + answer[1:]


def opinion(choose: Chooser) -> Turn:
    """A question about the model's opinion."""
    word = _any_word(choose)
    return choose.one(OPINION).format(w=word), choose.one(NO_OPINION).format(w=word)


def turn(choose: Chooser) -> Turn:
    """Any turn of open talk."""
    return choose.rng.choices((unknown, hard, said, opinion), weights=(20, 10, 54, 16))[0](choose)


def more(choose: Chooser) -> list[Turn]:
    """A topic, and then more of it."""
    topic = choose.rng.choice(TOPICS)
    ask = choose.one(
        ("What is {0}?", "Explain what {0} is.", "what is {0}", "Can you tell me what {0} is?")
    ).format(topic.a_name)
    again = (
        "Tell me more.",
        "Tell me more about it.",
        "What else do you know?",
        "More, please.",
        "Go on.",
        "tell me more",
    )
    turns: list[Turn] = [(ask, topic.facts[0]), (choose.one(again), " ".join(topic.facts[1:]))]
    if choose.chance(0.3):
        turns.append((choose.one(again), f"That is all I know about {topic.plural}."))
    return turns
