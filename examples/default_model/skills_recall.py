"""Facts a user tells and asks for again some turns later.

Knows how a fact is stated, acknowledged, asked for, answered and corrected. Does not decide what is
said in between: `synthesize.py` puts other skills' turns there.
"""

from __future__ import annotations

from dataclasses import dataclass

from words import Chooser, article, held

Turn = tuple[str, str]


@dataclass(frozen=True)
class Kind:
    """One kind of fact: `{v}` is its value, `{w}` a second word (a relative, a thing)."""

    value: str
    tell: tuple[str, ...]
    nod: tuple[str, ...]
    ask: tuple[str, ...]
    say: tuple[str, ...]
    second: str = ""


NODS = ("Thanks for telling me.", "Got it.", "I will remember that.", "Okay, noted.", "Good to know.")

KINDS: dict[str, Kind] = {
    "name": Kind(
        "name",
        ("My name is {v}.", "I'm {v}.", "Hi, I am {v}.", "Hello! My name is {v}.", "Please call me {v}.",
         "Hey there, {v} here.", "You can call me {v}.", "I am called {v}.", "hi my name is {v}"),
        ("Nice to meet you, {v}!", "Hello {v}! How can I help you?", "Hi {v}, it is good to meet you.",
         "Welcome, {v}! What would you like to talk about?"),
        ("What is my name?", "Do you remember my name?", "What's my name?", "Who am I?",
         "Can you tell me my name?", "what is my name", "Do you still know what I am called?"),
        ("Your name is {v}.", "You are {v}.", "You told me that your name is {v}."),
    ),
    "city": Kind(
        "city",
        ("I live in {v}.", "I am from {v}.", "My home is in {v}.", "I live in {v} now.",
         "I moved to {v} last year.", "Right now I live in {v}."),
        ("{v} sounds like an interesting place.", "How nice! What do you like about {v}?",
         "I would like to hear more about {v}."),
        ("Where do I live?", "Which city do I live in?", "Do you remember where I live?",
         "What city did I say I live in?", "Where is my home?"),
        ("You live in {v}.", "You told me that you live in {v}.", "Your home is in {v}."),
    ),
    "color": Kind(
        "color",
        ("My favorite color is {v}.", "I like the color {v} best.", "The color I love most is {v}.",
         "{v} is my favorite color."),
        ("{v} is a lovely color.", "Good choice! {v} is beautiful."),
        ("What is my favorite color?", "Which color do I like best?", "Do you remember my favorite color?",
         "What color do I like?"),
        ("Your favorite color is {v}.", "You like {v} best.", "It is {v}."),
    ),
    "food": Kind(
        "food",
        ("My favorite food is {v}.", "I love to eat {v}.", "The food I like best is {v}.",
         "I could eat {v} every day."),
        ("Yum, {v}!", "{v} is a tasty choice.", "That sounds delicious."),
        ("What is my favorite food?", "What do I like to eat?", "Which food do I like best?",
         "Do you remember what I love to eat?"),
        ("Your favorite food is {v}.", "You love to eat {v}.", "You told me that you like {v}."),
    ),
    "pet": Kind(
        "name",
        ("I have a {w} called {v}.", "My {w} is named {v}.", "I have a {w}. Its name is {v}.",
         "My {w}'s name is {v}.", "We have a pet {w} named {v}."),
        ("{v} is a nice name for a {w}.", "How sweet! Say hello to {v} from me."),
        ("What is my {w}'s name?", "What is the name of my {w}?", "What is my pet called?",
         "Do you remember the name of my pet?", "Who is {v}?", "What kind of pet do I have?"),
        ("Your {w} is called {v}.", "Your {w}'s name is {v}."),
        "animal",
    ),
    "relative": Kind(
        "name",
        ("My {w}'s name is {v}.", "My {w} is called {v}.", "I have a {w} named {v}.",
         "{v} is my {w}."),
        ("{v} is a nice name.", "Thanks for telling me about your {w}."),
        ("What is my {w}'s name?", "What is my {w} called?", "What is the name of my {w}?",
         "Do you remember my {w}'s name?", "Who is {v}?"),
        ("Your {w}'s name is {v}.", "Your {w} is called {v}."),
        "relative",
    ),
    "job": Kind(
        "job",
        ("I am {av}.", "I work as {av}.", "My job is being {av}.", "I'm {av} by trade.",
         "For a living, I am {av}."),
        ("Being {av} sounds like important work.", "That must be an interesting job."),
        ("What is my job?", "What do I do for a living?", "What do I work as?",
         "Do you remember what my job is?"),
        ("You are {av}.", "You work as {av}.", "You told me that you are {av}."),
    ),
    "hobby": Kind(
        "hobby",
        ("My hobby is {v}.", "In my free time I enjoy {v}.", "I love {v}.", "I really like {v}.",
         "My favorite thing to do is {v}."),
        ("{v} sounds like fun!", "That is a great hobby."),
        ("What is my hobby?", "What do I like to do in my free time?", "What do I enjoy doing?",
         "Do you remember my hobby?"),
        ("Your hobby is {v}.", "You enjoy {v}.", "You told me that you like {v}."),
    ),
    "number": Kind(
        "#",
        ("My lucky number is {v}.", "My favorite number is {v}.", "Remember the number {v}.",
         "Please remember this number: {v}."),
        ("{v} is a fine number.", "I will keep the number {v} in mind."),
        ("What is my number?", "Which number did I tell you?", "What was the number?",
         "Do you remember my number?", "What number should you remember?"),
        ("The number is {v}.", "Your number is {v}.", "It is {v}."),
    ),
    "age": Kind(
        "#",
        ("I am {v} years old.", "I'm {v} years old.", "I turned {v} this year.", "My age is {v}."),
        ("{v} is a great age!",),
        ("How old am I?", "What is my age?", "Do you remember how old I am?"),
        ("You are {v} years old.", "You told me that you are {v}."),
    ),
    "code": Kind(
        "*",
        ("The secret word is {v}.", "Remember the word {v}.", "The password is {v}.",
         "Please remember this word: {v}.", "My code word is {v}."),
        ("I will remember the word {v}.", "Okay, the word is {v}."),
        ("What is the secret word?", "What was the word?", "Which word should you remember?",
         "What word did I tell you?", "Tell me the word again."),
        ("The word is {v}.", "It is {v}.", "You told me the word {v}."),
    ),
    "lost": Kind(
        "place",
        ("I left my {w} in the {v}.", "My {w} is in the {v}.", "I put the {w} in the {v}.",
         "The {w} is in the {v}."),
        ("Okay, your {w} is in the {v}.", "I will remind you where the {w} is."),
        ("Where is my {w}?", "Where did I put the {w}?", "Where did I leave my {w}?",
         "Can you remind me where the {w} is?"),
        ("Your {w} is in the {v}.", "It is in the {v}.", "You left it in the {v}."),
        "thing",
    ),
    "month": Kind(
        "month",
        ("My birthday is in {v}.", "I was born in {v}.", "I have my birthday in {v}."),
        ("{v} is a good month for a birthday!",),
        ("When is my birthday?", "In which month is my birthday?", "Which month was I born in?"),
        ("Your birthday is in {v}.", "It is in {v}."),
    ),
    "plan": Kind(
        "day",
        ("I have a meeting on {v}.", "I am going to the {w} on {v}.", "My trip to the {w} is on {v}.",
         "On {v} I will visit the {w}."),
        ("I hope {v} goes well.", "Okay, {v} it is."),
        ("On which day is that?", "When is it, which day?", "Which day did I mention?",
         "What day was my plan for?"),
        ("It is on {v}.", "You said {v}."),
        "place",
    ),
    "sport": Kind(
        "sport",
        ("I play {v}.", "My favorite sport is {v}.", "I play {v} every week."),
        ("{v} is good exercise.", "{v} is a fun sport."),
        ("Which sport do I play?", "What is my favorite sport?", "What sport do I like?"),
        ("Your sport is {v}.", "You play {v}.", "It is {v}."),
    ),
    "buy": Kind(
        "thing",
        ("I want to buy a {v}.", "I need a new {v}.", "Tomorrow I will buy a {v}."),
        ("I hope you find a good {v}.", "A {v} is useful."),
        ("What do I want to buy?", "What did I say I need?", "What was I going to buy?"),
        ("You want to buy a {v}.", "A {v}.", "You said that you need a {v}."),
    ),
}  # fmt: skip


@dataclass
class Fact:
    """A fact of one conversation, with its words filled in."""

    kind: str
    value: str
    second: str

    def fill(self, template: str) -> str:
        """The template with this fact's words."""
        text = template.format(v=self.value, w=self.second, av=article(self.value) if self.value else "")
        return text[0].upper() + text[1:] if template.startswith("{") else text


def draw(choose: Chooser, kind: str | None = None) -> Fact:
    """A fact of the split, of a given or random kind."""
    kind = kind or choose.one([*KINDS, "name", "name", "pet", "city"])
    spec = KINDS[kind]
    if spec.value == "#":
        while True:
            value = str(choose.number(5, 90) if kind == "age" else choose.number(2, 9999))
            if held("fact" + value) == (choose.split == "held"):
                break
    elif spec.value == "*":
        value = Chooser(choose.rng, choose.split, 0.7).word("name").lower()
        if choose.chance(0.4):
            value = choose.word(choose.one(["thing", "fruit", "vegetable", "animal"]))
    else:
        value = choose.value(spec.value)
    return Fact(
        kind,
        value,
        (choose.value if choose.chance(0.2) else choose.word)(spec.second) if spec.second else "",
    )


def tell(choose: Chooser, fact: Fact) -> Turn:
    """The user states the fact."""
    spec = KINDS[fact.kind]
    nod = choose.one(spec.nod) if choose.chance(0.7) else choose.one(NODS)
    return fact.fill(choose.one(spec.tell)), fact.fill(nod)


def ask(choose: Chooser, fact: Fact, plain: bool = False) -> Turn:
    """The user asks for the fact; the answer holds its value.

    `plain` keeps to questions that do not give the value away.
    """
    spec = KINDS[fact.kind]
    question = choose.one(
        [ask for ask in spec.ask if not (plain and ("{v}" in ask or "kind of pet" in ask))]
    )
    if question == "Who is {v}?":
        answer = "{v} is your {w}."
    elif "kind of pet" in question:
        answer = "You have a {w} called {v}."
    else:
        answer = choose.one(spec.say)
    return fact.fill(question), fact.fill(answer)


def correct(choose: Chooser, fact: Fact) -> tuple[Turn, Fact]:
    """The user takes the fact back and gives a new value."""
    new = draw(choose, fact.kind)
    new.second = fact.second
    spec = KINDS[fact.kind]
    lead = choose.one(
        ("Actually, that was wrong. ", "Sorry, I made a mistake. ", "No wait. ", "Let me correct that. ")
    )
    statement = new.fill(choose.one(spec.tell[:2]))
    return (
        lead + statement,
        choose.one(("Thanks for the correction.", "Okay, I have changed that.")),
    ), new


def unknown(choose: Chooser, known: list[Fact]) -> Turn:
    """The user asks for a fact that was never told."""
    kinds = [kind for kind in KINDS if kind not in {fact.kind for fact in known} and kind != "plan"]
    fact = draw(choose, choose.one(kinds))
    question = choose.one([ask for ask in KINDS[fact.kind].ask if "{v}" not in ask])
    return fact.fill(question), choose.one(
        (
            "You have not told me that yet.",
            "I don't know, you have not told me.",
            "I do not know that yet. Please tell me!",
        )
    )
