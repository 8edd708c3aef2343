"""Word lists for the synthetic data, each split into training and held-out words.

A word is held out when its CRC-32 is divisible by ten, so the split needs no second list and never
changes; lists in which fewer than six words would be held out are not split. Evaluation draws only held-out words, training only the others. Does not know what the words
are used for.
"""

from __future__ import annotations

import random
import zlib
from functools import cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "held"]


def held(key: str) -> bool:
    """Whether `key` is reserved for evaluation."""
    return zlib.crc32(key.lower().encode()) % 10 == 0


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.replace("\n", " ").split(",") if word.strip()]


_LISTS: dict[str, list[str]] = {
    "name": _words(
        """Anna, Ben, Clara, David, Ella, Finn, Grace, Henry, Iris, Jack, Kate, Leo, Mia, Noah, Olivia,
        Paul, Quinn, Rosa, Sam, Tara, Uma, Victor, Wendy, Xavier, Yara, Zoe, Amir, Bella, Carlos, Daisy,
        Emil, Fatima, George, Hana, Ivan, Jasmine, Kofi, Lena, Marco, Nina, Omar, Priya, Rahul, Sofia,
        Tom, Ursula, Vera, Walter, Ximena, Yusuf, Alice, Bruno, Chloe, Dan, Eva, Felix, Gita, Hugo, Ines,
        James, Karim, Lucy, Max, Nora, Oscar, Peter, Ruth, Simon, Tina, Ulla, Violet, Will, Yuki, Zack,
        Adam, Beth, Colin, Diana, Erik, Flora, Gus, Hazel, Isaac, Julia, Kevin, Laura, Martin, Nadia,
        Otto, Pia, Robert, Sara, Theo, Vivian, Wanda, Alan, Bianca, Chen, Dora, Edgar, Fiona, Gina, Hank,
        Ida, Jonas, Kira, Luis, Maya, Nils, Olga, Pedro, Rita, Sven, Thea, Umar, Vince, Wei, Yasmin, Zara,
        Ali, Boris, Celia, Derek, Elsa, Frank, Greta, Harry, Irene, Joan, Kurt, Lily, Mohamed, Nancy,
        Oliver, Penny, Ray, Stella, Tim, Valerie, Wes, Amelia, Bob, Carmen, Dylan, Emma, Fred, Gloria,
        Hassan, Ingrid, Jorge, Karen, Liam, Mona, Ned, Opal, Pablo, Rosie, Sid, Tess, Vito, Winnie, Abel,
        Bridget, Caleb, Dina, Eli, Freya, Gavin, Helen, Ian, Jane, Kyle, Linda, Miles, Naomi, Owen, Polly,
        Ravi, Susan, Toby, Una, Wyatt, Zoya, Aisha, Basil, Cora, Dmitri, Esther, Fabian, Gemma, Holly,
        Igor, Judy, Keiko, Lars, Margaret, Nick, Oona, Philip, Rachel, Stefan, Tamara, Viktor, Willa"""
    ),
    "city": _words(
        """Paris, London, Berlin, Rome, Madrid, Lisbon, Vienna, Prague, Oslo, Stockholm, Helsinki, Dublin,
        Athens, Warsaw, Budapest, Amsterdam, Brussels, Zurich, Geneva, Milan, Naples, Venice, Munich,
        Hamburg, Lyon, Porto, Seville, Cairo, Nairobi, Lagos, Accra, Tunis, Rabat, Cape Town, Tokyo, Kyoto,
        Osaka, Seoul, Beijing, Shanghai, Hanoi, Bangkok, Manila, Jakarta, Delhi, Mumbai, Chennai, Karachi,
        Dhaka, Istanbul, Ankara, Tehran, Dubai, Sydney, Melbourne, Perth, Auckland, Toronto, Montreal,
        Vancouver, Ottawa, Chicago, Boston, Seattle, Denver, Austin, Houston, Dallas, Miami, Atlanta,
        Portland, Phoenix, Detroit, Lima, Bogota, Quito, Santiago, Buenos Aires, Havana, Mexico City,
        Glasgow, Leeds, Bristol, Cardiff, Belfast, Galway, Bergen, Turin, Valencia, Krakow, Riga, Vilnius"""
    ),
    "color": _words(
        """red, blue, green, yellow, orange, purple, pink, brown, black, white, gray, silver, gold,
        turquoise, violet, teal, beige, crimson, navy, olive, maroon, lavender, coral, indigo, cream,
        scarlet, mint, peach, amber, emerald"""
    ),
    "food": _words(
        """pizza, pasta, soup, rice, sushi, curry, pancakes, salad, cheese, noodles, bread, tacos, apples,
        grapes, cake, ice cream, chocolate, waffles, lasagna, dumplings, beans, potatoes, fish, omelets,
        burgers, mango, strawberries, cherries, popcorn, yogurt, honey toast, porridge, falafel, hummus,
        ramen, risotto, stew, pie, cookies, carrots, corn, bananas, melon, peaches, muffins, sandwiches,
        paella, chili, kebab, tofu"""
    ),
    "animal": _words(
        """dog, cat, rabbit, horse, parrot, turtle, hamster, goldfish, pony, goat, sheep, duck, hen, lizard,
        snake, mouse, canary, guinea pig, ferret, frog, pig, donkey, goose, pigeon, gecko, budgie, crab,
        hedgehog, llama, cow"""
    ),
    "job": _words(
        """teacher, nurse, doctor, baker, farmer, pilot, cook, painter, singer, dancer, writer, plumber,
        carpenter, gardener, engineer, scientist, librarian, firefighter, sailor, driver, tailor, builder,
        dentist, lawyer, mechanic, photographer, waiter, florist, barber, fisherman, electrician, judge,
        musician, actor, clerk, shoemaker, vet, chemist, guard, postman, programmer, designer, architect"""
    ),
    "hobby": _words(
        """reading, swimming, chess, painting, hiking, cooking, gardening, cycling, singing, dancing,
        fishing, running, knitting, drawing, skiing, sailing, climbing, photography, football, tennis,
        basketball, pottery, birdwatching, baking, camping, yoga, sewing, surfing, rowing, skating,
        juggling, stargazing, writing poems, playing the piano, playing the guitar, playing the violin"""
    ),
    "thing": _words(
        """book, lamp, umbrella, key, clock, basket, kite, bicycle, drum, mirror, pencil, blanket, hat, coat,
        scarf, boat, chair, table, candle, bottle, camera, radio, ring, box, spoon, cup, bell, ladder, rope,
        hammer, map, coin, shoe, pillow, guitar, flute, ball, doll, puzzle, backpack, letter, stamp, vase,
        brush, bucket, shovel, wagon, lantern, button, whistle"""
    ),
    "place": _words(
        """garden, kitchen, park, library, market, school, beach, forest, barn, museum, station, harbor,
        bakery, attic, cellar, meadow, river, bridge, tower, square, cafe, hospital, theater, stadium,
        office, workshop, castle, cave, island, hill, lake, village"""
    ),
    "relative": _words(
        "sister, brother, mother, father, aunt, uncle, cousin, grandmother, grandfather, friend, neighbor,"
        " teacher, boss, daughter, son"
    ),
    "day": _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "month": _words(
        "January, February, March, April, May, June, July, August, September, October, November, December"
    ),
    "fruit": _words(
        "apple, banana, cherry, pear, plum, peach, grape, lemon, lime, orange, mango, kiwi, melon, fig,"
        " apricot, pineapple, strawberry, blueberry, raspberry, coconut"
    ),
    "vegetable": _words(
        "carrot, potato, onion, tomato, pea, bean, cabbage, spinach, lettuce, pepper, cucumber, pumpkin,"
        " leek, radish, turnip, broccoli, garlic, celery, beet, corn"
    ),
    "sport": _words(
        "football, tennis, basketball, volleyball, rugby, hockey, golf, cricket, swimming, rowing, cycling,"
        " boxing, judo, skiing, running, baseball, badminton, fencing"
    ),
    "instrument": _words(
        "piano, guitar, violin, flute, drum, trumpet, cello, harp, clarinet, organ, banjo"
    ),
    "drink": _words("tea, coffee, milk, water, juice, lemonade, cocoa, soda, apple juice, iced tea"),
    "weather": _words("sunny, rainy, cloudy, windy, snowy, foggy, stormy, warm, cold, mild"),
}

_ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr r s sh st t tr v w z th sl".split()
_VOWELS = "a e i o u ai ea oo ia".split()
_CODAS = "n l r s m t x nd rk ll th ck sk mp".split()


@cache
def pool(kind: str, split: Split) -> list[str]:
    """The words of a kind that belong to the split; short lists are not split."""
    words = _LISTS[kind]
    if sum(map(held, words)) < 6:
        return words
    return [word for word in words if held(word) == (split == "held")]


def invented(rng: random.Random, split: Split) -> str:
    """A made-up name of two or three syllables, such as `Tramolk`; copying it needs attention."""
    while True:
        parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 2))]
        word = (
            "".join(parts) + rng.choice(_ONSETS[:20]) + rng.choice("aeiou") + rng.choice(["", *_CODAS])
        )
        if held(word) == (split == "held"):
            return word.capitalize()


@cache
def _wild(line: int, split: Split) -> list[str]:
    """Ordinary words (line 0) or proper names (line 1) out of old books, of one split."""
    text = (Path(__file__).parent / "seed_words.txt").read_text(encoding="utf-8")
    return [word for word in text.splitlines()[line].split() if held("wild" + word) == (split == "held")]


class Chooser:
    """Random choices for one conversation, from one split.

    `made_up` is the share of names that are invented rather than taken from the list. `wild` is the
    share of other values that are any word at all, so that copying does not lean on the lists.
    """

    def __init__(
        self, rng: random.Random, split: Split = "train", made_up: float = 0.3, wild: float = 0.3
    ) -> None:
        self.rng = rng
        self.wild = wild
        self.split: Split = split
        self.made_up = made_up

    def word(self, kind: str) -> str:
        """A word of the kind; names are now and then invented."""
        if kind == "name" and self.rng.random() < self.made_up:
            return invented(self.rng, self.split)
        return self.rng.choice(pool(kind, self.split))

    def value(self, kind: str) -> str:
        """A word of the kind for the place of a value; now and then any word or proper name."""
        if kind in ("day", "month", "relative", "weather") or self.rng.random() >= self.wild:
            return self.word(kind)
        if kind in ("name", "city"):
            if self.rng.random() < 0.3:
                return invented(self.rng, self.split)
            return self.rng.choice(_wild(1, self.split))
        count = 2 if self.rng.random() < 0.15 else 1
        return " ".join(self.rng.choice(_wild(0, self.split)) for _ in range(count))

    def several(self, kind: str, count: int, value: bool = False) -> list[str]:
        """Different words of one kind."""
        found: list[str] = []
        while len(found) < count:
            word = self.value(kind) if value else self.word(kind)
            if word not in found:
                found.append(word)
        return found

    def one(self, options: list[str] | tuple[str, ...]) -> str:
        """One of the options."""
        return self.rng.choice(options)

    def chance(self, share: float) -> bool:
        """True with probability `share`."""
        return self.rng.random() < share

    def number(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.rng.randint(low, high)


def article(word: str) -> str:
    """`a` or `an` with the word."""
    return ("an " if word[0].lower() in "aeiou" else "a ") + word


def listed(words: list[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
