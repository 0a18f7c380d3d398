r"""Crossword: find the word behind a clue. The clues are mechanical (hidden words, anagrams, ...), so no dictionary is needed to solve one.

One row, rows("test", 1, seed=0, config="words"):
  {'id': 'crossword-words-reversed-AUTUMN', 'task': 'crossword', 'prompt': 'Solve the crossword clue "NMUTUA, written
   backwards (6)". Letters known from crossing words: _U__MN. Reason inside <think> </think>, then put only the word
   or words inside <answer> </answer>.', 'answer': {'answer': 'AUTUMN', 'enumeration': '6'}, 'solutions':
   ['<think>A-U-T-U-M-N fits _U__MN (6).</think>\n<answer>AUTUMN</answer>'], 'num_modes': 1}

Problems. Every word has one clue of each kind in CLUES, with half of its letters as crossing letters. "words" has the list below; "tiny", for a
character-level model, 2,000 made-up words of 4 to 6 letters and only clues that take no vocabulary. An anagram may have another answer in English
that fits the crossing letters; only the one in the list is right. Held out are 64 words of each variant with all their clues, those with the smallest
CRC-32 of their sorted letters: no test word and no anagram of one is a training answer, and initials are those of training words.

reward() covers: the last complete <answer>...</answer> or, without one, the whole text, up to 200 characters. Its letters must be the answer's and no
others. Case, accents (E for É), width, white space, digits, signs do not matter; a letter of another script is another letter. Where there is an
enumeration ("6", "3,5", "(3-5)", in the answer or as a column `enumeration`; without one nothing is checked) the answer must have that many letters,
and if white space or hyphens part the completion, parts of those lengths: of "3,5", "ICE-CREAM" and "ICECREAM" are right and "ICEC REAM" is wrong;
"S-I-L-E-N-T" is right without an enumeration only. One's own rows may have the word alone as answer: "SILENT".
It does not cover: the reasoning, misspellings, the word among others ("SILENT or LISTEN", "the answer is SILENT"): all 0.
"""

import random
import re
import unicodedata
import zlib
from functools import cache
from string import ascii_uppercase

from tasks.countdown import check_choice, last_answer, take

DEFAULT = "words"
HELD_OUT = 64
WORDS = (
    'Solve the crossword clue "{clue} ({enumeration})". Letters known from crossing words: {pattern}. Reason inside <think> </think>, then put '
    "only the word or words inside <answer> </answer>."
)
CLUES = {
    "anagram": "Mix the letters of {fodder}",
    "reversed": "{fodder}, written backwards",
    "hidden": "Letters in a row somewhere in {fodder}",
    "alternate": "First, third, fifth and so on of the letters {fodder}",
    "initials": "First letters of {fodder}",
}
CONFIGS = {
    "words": dict(kinds=tuple(CLUES), made_up=0, words=True),
    "tiny": dict(kinds=("reversed", "hidden", "alternate"), made_up=2000, words=False),
}
LIST = """
about above acorn actor admit adult afraid after agree alarm album alien almond alone amber anchor angle animal ankle apple apple-pie apron arena
armour arrow artist atlas autumn badge baker balance ballet bamboo banana banjo barley basket beach beaver bishop black-hole blanket blue-cheese
bottle branch brass-band bread breeze bridge bronze brush bubble bucket butter button cabin cactus camel candle canvas carbon carpet carrot castle
cattle cellar cement chalk chapel cheese cherry chicken circus city-hall clock cloud coffee copper coral cotton cradle crane crayon cricket crown
crystal curtain cushion daisy dancer decade desert diamond dinner doctor dolphin donkey dragon drawer dream dry-dock eagle earth elbow eleven
empire engine escape evening fabric falcon farmer feather fence ferry fiddle finger fire-engine fish-pond flame flute forest fossil garden garlic
ghost giant ginger giraffe glacier glove goblin golden goose goose-egg grape guitar hammer harbour harvest hazel helmet heron hockey holiday honey
horse hot-dog hotel hunter ice-cream iceberg igloo insect iron-ore island ivory jacket jaguar jazz-band jelly jewel jigsaw jockey jungle kayak
kennel kettle kidney kingdom kitchen knight ladder lagoon lantern lap-of-honour lemon leopard library lizard lobster magnet mango maple marble
market meadow milk-float mirror monkey morning museum mustard needle nephew noodle north oasis ocean olive onion open-air opera orange orchard
otter oyster paddle palace panda paper paper-clip parrot pasta peanut pebble pencil pepper piano pigeon pillow pirate planet pocket polar-bear
potato prince pumpkin puzzle pyramid quarry queen quilt rabbit radio rainbow raven ribbon rice-field river robin rocket rubber saddle sailor
salmon sandal satin saturn school sea-lion season secret shadow shovel silver sister spider spoon squash stable statue steam-train sugar summer
sunset swallow table tailor tea-leaf temple thunder tiger timber time-zone tomato town-clock trumpet tulip tunnel turkey turtle unicorn urchin
valley vanilla velvet village violin volcano waffle walnut walrus wander weasel whale wild-boar window winter wizard yellow yogurt zebra zipper
"""


def canonical(text: str) -> str:
    """The letters alone, upper case, without accents: ICECREAM for "Ice-cream!"."""
    return "".join(c for c in unicodedata.normalize("NFKD", text).upper() if c.isalpha())


def fits(text: str, enumeration) -> bool:
    """Whether the text has as many letters as "6", "3,5" or "(3-5)" says and, if it is in parts, parts of those lengths. True without a number."""
    parts = [
        sum(map(int, re.findall("[0-9]+", part)))
        for part in re.split(r"[,\s\u2010-\u2015-]+", str(enumeration))
    ]  # "1'5" is one of 6
    wanted = [n for n in parts if n]
    found = [n for n in map(len, map(canonical, re.split(r"[\s\u2010-\u2015-]+", text))) if n]
    return not wanted or found in (wanted, [sum(wanted)])


def mode(completion: str, answer, enumeration=None) -> str | None:
    """The letters of a correct completion, "ICECREAM"; None for a wrong one."""
    given = answer if isinstance(answer, dict) else {"answer": answer}
    gold, text = canonical(str(given["answer"])), last_answer(completion)
    if not gold:
        raise ValueError(f"crossword: the answer {given['answer']!r} has no letters")
    right = (
        len(text) <= 200
        and canonical(text) == gold
        and fits(text, given.get("enumeration") or enumeration)
    )
    return gold if right else None


def reward(completion: str, answer, enumeration=None, **row) -> float:
    """1.0 for a correct completion, else 0.0. Covered and not covered: see the top of this file."""
    return float(mode(completion, answer, enumeration) is not None)


def make_up(count: int) -> list[str]:
    """Different random words like ZOBAD and IFUL, vowels and consonants in turn."""
    rng, found = random.Random("crossword"), {}
    while len(found) < count:
        length, first = rng.randint(4, 6), rng.randrange(2)
        found[
            "".join(
                rng.choice(("AEIOU", "BCDFGHJKLMNPRSTVWZ")[(first + i) % 2]) for i in range(length)
            )
        ] = True
    return list(found)


def draw(kind: str, word: str, initials: dict) -> tuple[str, str]:
    """(what a clue of this kind works on, crossing letters), always the same for a word: ("DNAP", "P__A")."""
    rng, letters = random.Random(f"crossword/{kind}/{word}"), canonical(word)
    shown = rng.sample([i for i, c in enumerate(word) if c != " "], len(letters) // 2)
    pattern = "".join(c if i in shown or c == " " else "_" for i, c in enumerate(word))
    if kind == "reversed":
        return letters[::-1], pattern
    if kind == "alternate":
        return "".join(c + rng.choice(ascii_uppercase) for c in letters), pattern
    if kind == "initials":
        return " ".join(rng.choice(initials[c]) for c in letters), pattern
    while True:
        noise, cut = "".join(rng.choices(ascii_uppercase, k=6)), rng.randint(1, 5)
        fodder = (
            noise[:cut] + letters + noise[cut:]
            if kind == "hidden"
            else "".join(rng.sample(letters, len(letters)))
        )
        places = re.findall(f"(?={pattern.replace(' ', '').replace('_', '.')})", fodder)
        if len(places) == (
            kind == "hidden"
        ):  # one place in a hidden word's letters; none in an anagram's, which are mixed well
            return fodder, pattern


@cache
def problems(config: str) -> dict[str, list[tuple]]:
    """{"train": [(word, kind, fodder, pattern), ...], "test": ...}"""
    c, classes = CONFIGS[config], {}
    for word in make_up(c["made_up"]) or [word.replace("-", " ") for word in LIST.upper().split()]:
        classes.setdefault(zlib.crc32("".join(sorted(canonical(word))).encode()), []).append(word)
    keys = sorted(classes)
    words = {
        "test": [classes[key][0] for key in keys[:HELD_OUT]],
        "train": [word for key in keys[HELD_OUT:] for word in classes[key]],
    }
    initials = {
        letter: [word for word in words["train"] if word[0] == letter and " " not in word]
        for letter in ascii_uppercase
    }
    return {
        split: [
            (word, kind, *draw(kind, word, initials))
            for word in words[split]
            for kind in c["kinds"]
        ]
        for split in words
    }


def to_row(config: str, word: str, kind: str, fodder: str, pattern: str) -> dict:
    enumeration = ",".join(str(len(part)) for part in word.split())
    if CONFIGS[config]["words"]:
        prompt = WORDS.format(
            clue=CLUES[kind].format(fodder=fodder), enumeration=enumeration, pattern=pattern
        )
        solution = f"<think>{'-'.join(canonical(word))} fits {pattern} ({enumeration}).</think>\n<answer>{word}</answer>"
    else:
        prompt, solution = f"{kind} {fodder} {pattern}:", word
    return {
        "id": f"crossword-{config}-{kind}-{word}",
        "task": "crossword",
        "prompt": prompt,
        "answer": {"answer": word, "enumeration": enumeration},
        "solutions": [solution],
        "num_modes": 1,
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test"; `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, ("train", "test"))
    return [to_row(config, *problem) for problem in take(problems(config)[split], n, seed)]
