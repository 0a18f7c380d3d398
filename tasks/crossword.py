r"""Crossword: find the word behind a clue. The clues are mechanical (hidden words, anagrams, ...),
so no dictionary is needed to solve one.

One row, rows("test", 1, seed=0, config="words"):
  {'id': 'crossword-words-reversed-AUTUMN', 'task': 'crossword',
   'prompt': 'Solve the crossword clue "NMUTUA, written backwards (6)". Letters known from crossing
   words: _U__MN. Reason inside <think> </think>, then put only the word or words inside <answer>
   </answer>.',
   'answer': {'answer': 'AUTUMN', 'enumeration': '6'},
   'solutions': ['<think>A-U-T-U-M-N fits _U__MN (6).</think>\n<answer>AUTUMN</answer>'],
   'num_modes': 1}

Problems. Every word has one clue of each kind in CLUES, with half of its letters as crossing
letters. "words" has the list below. "tiny", for a character-level model, has 2,000 made-up words of
4 to 6 letters, and only clues that need no vocabulary. An anagram may have another answer in
English that fits the crossing letters; only the word in the list is right. 64 words of each variant
are held out with all their clues: those with the smallest CRC-32 of their sorted letters. So no
test word, and no anagram of one, is a training answer. Clues made of initials use training words
only.

reward() covers: the last complete <answer>...</answer> or, without one, the whole text, up to 200
characters. Its letters must be exactly the answer's. Case, accents (E for É), width, white space,
digits and signs do not matter; a letter of another script is a different letter.
An enumeration ("6", "3,5", "(3-5)"), in the answer or as a column `enumeration`, is checked too:
the completion must have that many letters and, if white space or hyphens divide it, parts of these
lengths. For "3,5", "ICE-CREAM" and "ICECREAM" are right and "ICEC REAM" is wrong; "S-I-L-E-N-T" is
right only without an enumeration. An enumeration that does not add up to the answer's letters is an
error. A user's own rows may have just the word as answer: "SILENT".
It does not cover: the reasoning, misspellings, the word among others ("SILENT or LISTEN", "the
answer is SILENT"): all 0.
"""

import random
import re
import unicodedata
import zlib
from functools import cache
from string import ascii_uppercase

from tasks import SPLITS, check_choice, hold_out, last_answer, take, worked_solution

DEFAULT = "words"
HELD_OUT = 64  # words, or rather classes of anagrams
MAX_CHARACTERS = 200  # of an answer before NFKD, which can turn one character into 18 letters
WORDS = (
    'Solve the crossword clue "{clue} ({enumeration})". Letters known from crossing words: '
    "{pattern}. Reason inside <think> </think>, then put only the word or words inside <answer> "
    "</answer>."
)
CLUES = {
    # the short prompts of "tiny" name the kind by its key
    "anagram": "Mix the letters of {fodder}",
    "reversed": "{fodder}, written backwards",
    "hidden": "Letters in a row somewhere in {fodder}",
    "alternate": "First, third, fifth and so on of the letters {fodder}",
    "initials": "First letters of {fodder}",
}
CONFIGS = {
    # made_up: how many words to invent, 0: take LIST; words: whether the prompt is a sentence
    "words": dict(kinds=tuple(CLUES), made_up=0, words=True),
    "tiny": dict(kinds=("reversed", "hidden", "alternate"), made_up=2000, words=False),
}
# for a character class [...]: Unicode's hyphens and dashes, then the ASCII hyphen
HYPHENS = r"\u2010-\u2015-"
PARTS_OF_TEXT = re.compile(rf"[\s{HYPHENS}]+")
PARTS_OF_ENUMERATION = re.compile(rf"[,\s{HYPHENS}]+")
# a hyphen stands for the space in an answer of two or more words
LIST = """
about above acorn actor admit adult afraid after agree alarm album alien almond alone amber anchor
angle animal ankle apple apple-pie apron arena armour arrow artist atlas autumn badge baker
balance ballet bamboo banana banjo barley basket beach beaver bishop black-hole blanket
blue-cheese bottle branch brass-band bread breeze bridge bronze brush bubble bucket butter button
cabin cactus camel candle canvas carbon carpet carrot castle cattle cellar cement chalk chapel
cheese cherry chicken circus city-hall clock cloud coffee copper coral cotton cradle crane crayon
cricket crown crystal curtain cushion daisy dancer decade desert diamond dinner doctor dolphin
donkey dragon drawer dream dry-dock eagle earth elbow eleven empire engine escape evening fabric
falcon farmer feather fence ferry fiddle finger fire-engine fish-pond flame flute forest fossil
garden garlic ghost giant ginger giraffe glacier glove goblin golden goose goose-egg grape guitar
hammer harbour harvest hazel helmet heron hockey holiday honey horse hot-dog hotel hunter
ice-cream iceberg igloo insect iron-ore island ivory jacket jaguar jazz-band jelly jewel jigsaw
jockey jungle kayak kennel kettle kidney kingdom kitchen knight ladder lagoon lantern
lap-of-honour lemon leopard library lizard lobster magnet mango maple marble market meadow
milk-float mirror monkey morning museum mustard needle nephew noodle north oasis ocean olive onion
open-air opera orange orchard otter oyster paddle palace panda paper paper-clip parrot pasta
peanut pebble pencil pepper piano pigeon pillow pirate planet pocket polar-bear potato prince
pumpkin puzzle pyramid quarry queen quilt rabbit radio rainbow raven ribbon rice-field river robin
rocket rubber saddle sailor salmon sandal satin saturn school sea-lion season secret shadow shovel
silver sister spider spoon squash stable statue steam-train sugar summer sunset swallow table
tailor tea-leaf temple thunder tiger timber time-zone tomato town-clock trumpet tulip tunnel
turkey turtle unicorn urchin valley vanilla velvet village violin volcano waffle walnut walrus
wander weasel whale wild-boar window winter wizard yellow yogurt zebra zipper
"""

# --- the reward


def canonical(text: str) -> str:
    """Only the letters, in upper case, without accents: ICECREAM for "Ice-cream!"."""
    # NFKD splits É into E and an accent, which is not a letter
    decomposed = unicodedata.normalize("NFKD", text).upper()
    # isalpha() drops accents, spaces, hyphens and digits
    return "".join(c for c in decomposed if c.isalpha())


def parts(enumeration) -> list[int]:
    """[3, 5] of "3,5", "3-5" or "(3-5)"; [] without a number."""
    wanted = []
    for part in PARTS_OF_ENUMERATION.split(str(enumeration)):
        # summed, because "1'5" is one part of 6 letters
        length = sum(map(int, re.findall("[0-9]+", part)))
        if length > 0:
            wanted.append(length)
    return wanted


def fits(text: str, wanted: list[int]) -> bool:
    """Whether the text has as many letters as the enumeration says and, if it is in parts, parts of
    these lengths. True without an enumeration."""
    if not wanted:
        return True
    lengths = []
    for part in PARTS_OF_TEXT.split(text):
        length = len(canonical(part))
        if length > 0:  # a lone dash or full stop is not a part
            lengths.append(length)
    # either in the wanted parts or written as one word
    return lengths in (wanted, [sum(wanted)])


def mode(completion: str, answer, enumeration=None) -> str | None:
    """The letters of a correct completion, "ICECREAM"; None for a wrong one.

    answer: {"answer": "ICE CREAM", "enumeration": "3,5"}, or just "ICE CREAM"."""
    if isinstance(answer, dict):
        words = answer["answer"]
        enumeration = answer.get("enumeration") or enumeration
    else:
        words = answer
    if not isinstance(words, str):
        raise ValueError(f"crossword: the answer must be text, not {words!r:.100}")
    letters = canonical(words)
    # an answer without letters would equal any completion without letters
    if not letters:
        raise ValueError(f"crossword: the answer {words!r} has no letters")
    wanted = parts(enumeration)
    if wanted and sum(wanted) != len(letters):
        raise ValueError(
            f"crossword: the answer {words!r} has {len(letters)} letters but its enumeration "
            f"{enumeration!r} adds up to {sum(wanted)}: no completion can be right"
        )
    text = last_answer(completion)
    if len(text) > MAX_CHARACTERS or canonical(text) != letters:
        return None
    return letters if fits(text, wanted) else None


def reward(completion: str, answer, enumeration=None, **row) -> float:
    """1.0 for a correct completion, else 0.0. Covered and not covered: see the top of this file."""
    return float(mode(completion, answer, enumeration) is not None)


# --- clues


def make_up(count: int) -> list[str]:
    """`count` different random words like ZOBAD and IFUL: vowels and consonants alternate."""
    sounds = ("AEIOU", "BCDFGHJKLMNPRSTVWZ")
    # a fixed seed: the words are the same in every run
    rng = random.Random("crossword")
    words = {}  # used as a set that keeps its order
    while len(words) < count:
        length = rng.randint(4, 6)
        first = rng.randrange(2)  # 0: begins with a vowel, 1: with a consonant
        letters = [rng.choice(sounds[(first + i) % 2]) for i in range(length)]
        words["".join(letters)] = None
    return list(words)


def draw(kind: str, word: str, initials: dict[str, list[str]]) -> tuple[str, str]:
    """(fodder: what a clue of this kind works on, crossing letters), such as ("DNAP", "P__A") for
    PANDA reversed; always the same for a word. initials: {letter: words that begin with it}."""
    # a generator for each clue, so that adding a word changes no other word's clues
    rng = random.Random(f"crossword/{kind}/{word}")
    letters = canonical(word)  # the word without its spaces
    places = [i for i, c in enumerate(word) if c != " "]
    shown = rng.sample(places, len(letters) // 2)
    pattern = "".join(c if i in shown or c == " " else "_" for i, c in enumerate(word))
    if kind == "reversed":
        fodder = letters[::-1]  # DNAP
    elif kind == "alternate":
        # PXAQNRDS: a random letter after each
        fodder = "".join(c + rng.choice(ascii_uppercase) for c in letters)
    elif kind == "initials":
        # PLANET APPLE NURSE DRAGON
        fodder = " ".join(rng.choice(initials[c]) for c in letters)
    else:
        fodder = draw_fodder(rng, kind, letters, pattern)
    return fodder, pattern


def draw_fodder(rng: random.Random, kind: str, letters: str, pattern: str) -> str:
    """The letters hidden among others, or mixed. Read as a pattern, the crossing letters fit in one
    place of a "hidden" clue's fodder, so that there is one answer, and nowhere in an "anagram"'s,
    so that it is well mixed."""
    # P__A as the regular expression P..A, in a lookahead so that places may overlap
    crossing = re.compile(f"(?={pattern.replace(' ', '').replace('_', '.')})")
    while True:
        # drawn even for an anagram, because without these draws its problems would be others
        noise = "".join(rng.choices(ascii_uppercase, k=6))
        cut = rng.randint(1, 5)
        if kind == "hidden":
            fodder = noise[:cut] + letters + noise[cut:]
            wanted_places = 1
        else:
            fodder = "".join(rng.sample(letters, len(letters)))
            wanted_places = 0
        if len(crossing.findall(fodder)) == wanted_places:
            return fodder


@cache
def problems(config: str) -> dict[str, list[tuple]]:
    """{"train": [(word, kind, fodder, pattern), ...], "test": ...}"""
    c = CONFIGS[config]
    classes = {}
    for word in make_up(c["made_up"]) or words_of_list():
        letters = "".join(sorted(canonical(word)))  # so that anagrams are in one class
        classes.setdefault(zlib.crc32(letters.encode()), []).append(word)
    words = hold_out(classes, HELD_OUT)

    # training words only: a test word must not occur in a training prompt
    initials = {letter: [] for letter in ascii_uppercase}
    for word in words["train"]:
        if " " not in word:  # two words would give two first letters
            initials[word[0]].append(word)

    clues = {split: [] for split in SPLITS}
    for split in SPLITS:
        for word in words[split]:
            for kind in c["kinds"]:
                fodder, pattern = draw(kind, word, initials)
                clues[split].append((word, kind, fodder, pattern))
    return clues


def words_of_list() -> list[str]:
    """["ABOUT", ..., "APPLE PIE", ...]"""
    return [word.replace("-", " ") for word in LIST.upper().split()]


def to_row(config: str, word: str, kind: str, fodder: str, pattern: str) -> dict:
    """The row of a problem."""
    # 3,5 for ICE CREAM
    enumeration = ",".join(str(len(part)) for part in word.split())
    if CONFIGS[config]["words"]:
        clue = CLUES[kind].format(fodder=fodder)
        prompt = WORDS.format(clue=clue, enumeration=enumeration, pattern=pattern)
        reasoning = f"{'-'.join(canonical(word))} fits {pattern} ({enumeration})."
        solution = worked_solution(reasoning, word)
    else:
        prompt = f"{kind} {fodder} {pattern}:"
        solution = word
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
    check_choice("split", split, SPLITS)
    chosen = take(problems(config)[split], n, seed)
    return [to_row(config, *problem) for problem in chosen]
