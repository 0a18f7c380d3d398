r"""Graph colouring: complete a partial 3-colouring so that no edge joins two vertices of the same
colour. Many answers are right.

One row, rows("test", 1, seed=0, config="small"):
  {'id': 'graph_coloring-small-a-c,a-e,a-g,b-e,b-f,b-h,c-d,c-h,d-e,d-f,d-g,d-h,e-g;.....G.B',
   'task': 'graph_coloring',
   'prompt': 'A graph has 8 vertices a, b, c, d, e, f, g, h and the edges a-c, a-e, a-g, b-e, b-f,
   b-h, c-d, c-h, d-e, d-f, d-g, d-h, e-g. Give every vertex one of the colours R, G, B so that no
   edge joins two vertices of the same colour. Already coloured: f=G, h=B. Reason inside <think>
   </think>, then put only the 8 colours of a, b, c, d, e, f, g, h, in this order and without
   spaces, inside <answer> </answer>.',
   'answer': {'n': 8, 'edges': [[0, 2], [0, 4], [0, 6], [1, 4], [1, 5], [1, 7], [2, 3], [2, 7],
   [3, 4], [3, 5], [3, 6], [3, 7], [4, 6]], 'partial': '.....G.B'},
   'solutions': [
   '<think>a=R, b=R, c=G, d=R, e=B, f=G, g=G, h=B</think>\n<answer>RRGRBGGB</answer>',
   '<think>a=R, b=R, c=G, d=R, e=G, f=G, g=B, h=B</think>\n<answer>RRGRGGBB</answer>'],
   'num_modes': 2}

Vertices are 0..n-1 in "answer" and letters a, b, ... in the prompt. "partial" has one character per
vertex, "." where the vertex is free. A mode is a correct answer itself ("RGBRGB"): the colours have
names, so two different assignments are never the same answer.

Problems are drawn from a fixed seed: 6,000 different ones per variant, each with 2 to 8 modes.
"small" has 6 to 8 vertices and a prompt in words; "tiny" has 6 vertices and a prompt of under 50
characters, for a character-level model. In each variant 256 whole classes of problems are held out.
A problem's class_key() does not change when vertices are renumbered or colours swapped, so no
training problem is a test problem in disguise. A test problem is the first of its class; the other
problems of these classes are in neither split.

reward() covers: the last complete <answer>...</answer> or, without one, the whole text; exactly one
capital letter R, G, B per vertex.
It does not cover: the reasoning, lower case, colour names, separators between the letters,
"a=R, b=G": all 0. Nor does it check that a graph of your own can be coloured at all: if it can't,
every completion gets 0.
"""

import random
import zlib
from functools import cache
from itertools import combinations, permutations
from string import ascii_lowercase

from tasks import SPLITS, check_choice, hold_out, last_answer, take, worked_solution

DEFAULT = "small"
COLORS = "RGB"
FREE = "."
HELD_OUT = 256  # classes of problems
MIN_MODES = 2  # problems with fewer or
MAX_MODES = 8  # more correct answers are left out
WORDS = (
    "A graph has {n} vertices {names} and the edges {edges}. Give every vertex one of the colours "
    "R, G, B so that no edge joins two vertices of the same colour. Already coloured: {given}. "
    "Reason inside <think> </think>, then put only the {n} colours of {names}, in this order and "
    "without spaces, inside <answer> </answer>."
)
CONFIGS = {
    # vertices: numbers of vertices to draw from; count: problems; words: a prompt in sentences
    "small": dict(vertices=(6, 7, 8), max_edges=16, count=6000, words=True),
    "tiny": dict(vertices=(6,), max_edges=9, count=6000, words=False),  # 9 edges: 43 characters
}


# --- modes and the reward


def modes(answer: dict) -> set[str]:
    """All correct answers; a triangle with partial "R.." has {"RGB", "RBG"}. The time is
    exponential in the number of free vertices."""
    # all proper colourings of vertices 0..v-1
    colorings = [""]
    for v, given in enumerate(answer["partial"]):
        allowed = COLORS if given == FREE else given
        # neighbours that already have a colour; an edge may name its vertices in either order
        earlier = [min(edge) for edge in answer["edges"] if max(edge) == v]
        longer = []
        for coloring in colorings:
            taken = {coloring[u] for u in earlier}
            for color in allowed:
                if color not in taken:
                    longer.append(coloring + color)
        colorings = longer
    return set(colorings)


def mode(completion: str, answer: dict) -> str | None:
    """The correct completion's assignment, None for a wrong completion."""
    text = last_answer(completion)
    if len(text) != answer["n"] or not set(text) <= set(COLORS):
        return None
    for given, color in zip(answer["partial"], text):
        # not the given colour
        if given not in (FREE, color):
            return None
    for u, v in answer["edges"]:
        if text[u] == text[v]:
            return None
    return text


def reward(completion: str, answer: dict, **row) -> float:
    """1.0 for a correct completion, else 0.0. Covered and not covered: see the top of this file.
    ValueError for an answer that is not a graph."""
    # the row is wrong, not the completion: a reward of 0 would hide that
    if not is_graph(answer):
        raise ValueError(
            "graph_coloring: the answer must be a dict with a whole number n, a partial of n "
            'characters R, G, B or "." and edges of two different vertices from 0 to n - 1, not '
            f"{answer!r:.100}"
        )
    return float(mode(completion, answer) is not None)


def is_graph(answer: dict) -> bool:
    """Whether an answer is a graph of one or more vertices, each of them coloured or free."""
    if not isinstance(answer, dict) or not {"n", "partial", "edges"} <= answer.keys():
        return False
    n, partial = answer["n"], answer["partial"]
    if (
        not isinstance(partial, str)
        or n != len(partial)
        or not partial
        or not set(partial) <= {*COLORS, FREE}
    ):
        return False
    for edge in answer["edges"]:
        # type(), not isinstance(): True is not a vertex. Nor is 1.0, which can't index a text
        if not all(type(v) is int and 0 <= v < n for v in edge):
            return False
        if len(edge) != 2 or edge[0] == edge[1]:
            return False
    return True


# --- problems


def class_key(answer: dict) -> int:
    """Equal for problems that differ only in vertex numbers or colour names. In rare cases other
    problems are equal too, which does no harm: more are held out.

    Colour refinement: three times, a vertex's label is replaced by a hash of itself, its
    neighbours' labels and those of the vertices shown in its colour. No name is ever used."""
    vertices = range(answer["n"])
    partial = answer["partial"]
    near = [[] for _ in vertices]  # the neighbours of each vertex
    for u, v in answer["edges"]:
        near[u].append(v)
        near[v].append(u)
    same = [[] for _ in vertices]  # for each vertex, the others that are shown in its colour
    for u, v in permutations(vertices, 2):
        if partial[u] == partial[v] != FREE:
            same[u].append(v)

    label = [int(color != FREE) for color in partial]
    # each round takes in vertices one edge further away
    for _ in range(3):
        refined = []
        for v in vertices:
            # sorted, so that the order of the vertices does not matter
            near_labels = sorted(label[u] for u in near[v])
            same_labels = sorted(label[u] for u in same[v])
            refined.append(checksum((label[v], near_labels, same_labels)))
        label = refined
    return checksum(sorted(label))  # sorted: vertex numbers do not matter


def checksum(value) -> int:
    """A hash of any value that is the same in every process, unlike hash()."""
    return zlib.crc32(repr(value).encode())


def draw(rng: random.Random, vertices: tuple, max_edges: int) -> dict:
    """A random problem. Edges and given colours come from a random colouring, so that there is at
    least one answer."""
    n = rng.choice(vertices)
    colors = rng.choices(COLORS, k=n)  # a correct answer
    allowed = [(u, v) for u, v in combinations(range(n), 2) if colors[u] != colors[v]]
    # a colouring may allow fewer edges than were drawn
    num_edges = min(rng.randint(n, max_edges), len(allowed))
    edges = sorted(rng.sample(allowed, num_edges))
    shown = rng.sample(range(n), rng.randint(1, n // 2))
    partial = [color if v in shown else FREE for v, color in enumerate(colors)]
    return {"n": n, "edges": edges, "partial": "".join(partial)}


@cache
def problems(config: str) -> dict[str, list[dict]]:
    """{"train": [answer, ...], "test": ...}, all different; an answer as in the rows."""
    c = CONFIGS[config]
    # a fixed seed: problems never change with a run's seed
    rng = random.Random("graph_coloring")
    seen = set()  # draws often repeat a problem
    classes = {}
    while len(seen) < c["count"]:
        answer = draw(rng, c["vertices"], c["max_edges"])
        text = problem_text(answer)
        if text not in seen and MIN_MODES <= len(modes(answer)) <= MAX_MODES:
            seen.add(text)
            classes.setdefault(class_key(answer), []).append(answer)
    return hold_out(classes, HELD_OUT)


def edge_names(answer: dict) -> list[str]:
    """["a-b", "a-c"] for the edges [[0, 1], [0, 2]]."""
    return [f"{ascii_lowercase[u]}-{ascii_lowercase[v]}" for u, v in answer["edges"]]


def problem_text(answer: dict) -> str:
    """The whole problem without a space: a-b,a-c;R.. is a path b-a-c with a=R."""
    return f"{','.join(edge_names(answer))};{answer['partial']}"


def assignments(names: str, colors: str) -> str:
    """The coloured vertices as text: "a=R, c=B"."""
    pairs = []
    for name, color in zip(names, colors):
        if color != FREE:
            pairs.append(f"{name}={color}")
    return ", ".join(pairs)


def to_row(config: str, answer: dict) -> dict:
    """The row of a problem, with all of its solutions."""
    short = problem_text(answer)  # a-c,a-e;R..G.B
    # sorted, because the order of a set differs between processes
    keys = sorted(modes(answer))  # ["RRGRBGGB", ...]
    if CONFIGS[config]["words"]:
        names = ascii_lowercase[: answer["n"]]  # "abcdefgh"
        prompt = WORDS.format(
            n=answer["n"],
            names=", ".join(names),
            edges=", ".join(edge_names(answer)),
            given=assignments(names, answer["partial"]),
        )
        solutions = [worked_solution(assignments(names, key), key) for key in keys]
    else:
        prompt = short + ":"
        solutions = keys
    return {
        "id": f"graph_coloring-{config}-{short}",
        "task": "graph_coloring",
        "prompt": prompt,
        # new lists: a caller may change a row, and problems() keeps these
        "answer": {**answer, "edges": [list(edge) for edge in answer["edges"]]},
        "solutions": solutions,
        "num_modes": len(solutions),
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test"; `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, SPLITS)
    chosen = take(problems(config)[split], n, seed)
    return [to_row(config, answer) for answer in chosen]
