r"""Graph colouring: complete a partial 3-colouring so that no edge joins two vertices of one colour. Many answers are right.

One row, rows("test", 1, seed=0, config="small"):
  {'id': 'graph_coloring-small-a-c,a-e,a-g,b-e,b-f,b-h,c-d,c-h,d-e,d-f,d-g,d-h,e-g;.....G.B', 'task': 'graph_coloring',
   'prompt': 'A graph has 8 vertices a, b, c, d, e, f, g, h and the edges a-c, a-e, a-g, b-e, b-f, b-h, c-d, c-h, d-e, d-f,
   d-g, d-h, e-g. Give every vertex one of the colours R, G, B so that no edge joins two vertices of the same colour. Already
   coloured: f=G, h=B. Reason inside <think> </think>, then put only the 8 colours of a, b, c, d, e, f, g, h, in this order
   and without spaces, inside <answer> </answer>.', 'answer': {'n': 8, 'edges': [[0, 2], [0, 4], [0, 6], [1, 4], [1, 5], [1,
   7], [2, 3], [2, 7], [3, 4], [3, 5], [3, 6], [3, 7], [4, 6]], 'partial': '.....G.B'}, 'solutions': ['<think>a=R, b=R, c=G,
   d=R, e=B, f=G, g=G, h=B</think>\n<answer>RRGRBGGB</answer>', '<think>a=R, b=R, c=G, d=R, e=G, f=G, g=B,
   h=B</think>\n<answer>RRGRGGBB</answer>'], 'num_modes': 2}

Vertices are 0..n-1 in "answer" and letters a, b, ... in the prompt. "partial" has one character per vertex, "." where it is free.
A mode is a correct answer itself ("RGBRGB"): the colours have names, so two assignments are never the same answer.
Problems are drawn from a fixed seed: 6,000 different ones per variant, each with 2 to 8 modes. Held out are whole classes of problems:
class_key() does not change when vertices are renumbered or colours swapped, so no training problem is a test problem in disguise. A
test problem is the first of its class, 256 in all; further members of those classes are in neither split. Each variant holds out for itself: "small" has 6 to 8
vertices and a prompt in words, "tiny" 6 vertices and under 50 characters, for a character-level model.

reward() covers: the last complete <answer>...</answer> or, without one, the whole text; exactly one capital letter R, G, B per vertex.
It does not cover: the reasoning, lower case, colour names, separators between the letters, "a=R, b=G": all 0.
"""

import random
import zlib
from functools import cache
from itertools import combinations

from tasks.countdown import check_choice, last_answer, take

DEFAULT = "small"
COLORS = "RGB"
HELD_OUT = 256
WORDS = (
    "A graph has {n} vertices {names} and the edges {edges}. Give every vertex one of the colours R, G, B so that no edge joins "
    "two vertices of the same colour. Already coloured: {given}. Reason inside <think> </think>, then put only the {n} colours "
    "of {names}, in this order and without spaces, inside <answer> </answer>."
)
CONFIGS = {
    "small": dict(vertices=(6, 7, 8), max_edges=16, count=6000, words=True),
    "tiny": dict(vertices=(6,), max_edges=9, count=6000, words=False),  # 9 edges: 43 characters
}


def modes(answer: dict) -> set[str]:
    """All correct answers; a triangle with partial "R.." has {"RGB", "RBG"}. Exponential in the free vertices."""
    found = [""]
    for v, given in enumerate(answer["partial"]):
        before = [min(edge) for edge in answer["edges"] if max(edge) == v]
        found = [
            s + c
            for s in found
            for c in (COLORS if given == "." else given)
            if all(s[u] != c for u in before)
        ]
    return set(found)


def mode(completion: str, answer: dict) -> str | None:
    """The correct completion's assignment, None for a wrong completion."""
    text = last_answer(completion)
    if len(text) != answer["n"] or not set(text) <= set(COLORS):
        return None
    keeps = all(given in (".", c) for given, c in zip(answer["partial"], text))
    return text if keeps and all(text[u] != text[v] for u, v in answer["edges"]) else None


def reward(completion: str, answer: dict, **row) -> float:
    """1.0 for a correct completion, else 0.0. Covered and not covered: see the top of this file."""
    return float(mode(completion, answer) is not None)


def class_key(answer: dict) -> int:
    """Equal for problems that differ in vertex numbers or colour names only (and, rarely, for others: that only holds out more).

    Colour refinement: a vertex is told by its neighbours and by those shown in its colour, three times over; no name ever enters."""
    vertices, partial = range(answer["n"]), answer["partial"]
    near = [[u for edge in answer["edges"] if v in edge for u in edge if u != v] for v in vertices]
    same = [[u for u in vertices if u != v and partial[u] == partial[v] != "."] for v in vertices]
    label = [int(partial[v] != ".") for v in vertices]
    for _ in range(3):
        told = [
            (label[v], sorted(label[u] for u in near[v]), sorted(label[u] for u in same[v]))
            for v in vertices
        ]
        label = [zlib.crc32(repr(t).encode()) for t in told]
    return zlib.crc32(repr(sorted(label)).encode())


def draw(rng: random.Random, vertices: tuple, max_edges: int) -> dict:
    """A random problem with at least one answer: edges and shown colours come from a colouring."""
    n = rng.choice(vertices)
    colors = rng.choices(COLORS, k=n)
    allowed = [(u, v) for u, v in combinations(range(n), 2) if colors[u] != colors[v]]
    edges = sorted(rng.sample(allowed, min(rng.randint(n, max_edges), len(allowed))))
    shown = rng.sample(range(n), rng.randint(1, n // 2))
    return {
        "n": n,
        "edges": edges,
        "partial": "".join(c if v in shown else "." for v, c in enumerate(colors)),
    }


@cache
def problems(config: str) -> dict[str, list[dict]]:
    """{"train": answers, "test": answers}; held out are the 256 classes with the smallest key, so frequent ones are not preferred."""
    c, rng, seen, classes = CONFIGS[config], random.Random("graph_coloring"), set(), {}
    while len(seen) < c["count"]:
        answer = draw(rng, c["vertices"], c["max_edges"])
        if problem_text(answer) not in seen and 2 <= len(modes(answer)) <= 8:
            seen.add(problem_text(answer))
            classes.setdefault(class_key(answer), []).append(answer)
    keys = sorted(classes)
    return {
        "test": [classes[key][0] for key in keys[:HELD_OUT]],
        "train": [answer for key in keys[HELD_OUT:] for answer in classes[key]],
    }


def letters(n: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[:n]


def problem_text(answer: dict) -> str:
    """The whole problem in one word: a-b,a-c;R.. is a triangle without b-c."""
    v = letters(answer["n"])
    return ",".join(f"{v[a]}-{v[b]}" for a, b in answer["edges"]) + ";" + answer["partial"]


def to_row(config: str, answer: dict) -> dict:
    short, v, solutions = problem_text(answer), letters(answer["n"]), sorted(modes(answer))
    prompt = short + ":"
    if CONFIGS[config]["words"]:
        given = ", ".join(f"{v[i]}={c}" for i, c in enumerate(answer["partial"]) if c != ".")
        prompt = WORDS.format(
            n=answer["n"],
            names=", ".join(v),
            edges=short.split(";")[0].replace(",", ", "),
            given=given,
        )
        solutions = [
            f"<think>{', '.join(f'{a}={c}' for a, c in zip(v, key))}</think>\n<answer>{key}</answer>"
            for key in solutions
        ]
    return {
        "id": f"graph_coloring-{config}-{short}",
        "task": "graph_coloring",
        "prompt": prompt,
        "answer": {**answer, "edges": [list(edge) for edge in answer["edges"]]},
        "solutions": solutions,
        "num_modes": len(solutions),
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test"; `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, ("train", "test"))
    return [to_row(config, answer) for answer in take(problems(config)[split], n, seed)]
