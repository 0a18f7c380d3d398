r"""Rush Hour: slide cars along their lanes until car A reaches the right edge, in as few moves as possible. Often several answers are right.

One row, rows("test", 1, seed=0, config="6x6"):
  {'id': 'rush_hour-6x6-...B../CCDB.E/F.D..E/FGD..H/.G.AAH/.G....', 'task': 'rush_hour', 'prompt': 'Rush Hour: the
   board has 6 rows and 6 columns, a letter is a car and a dot is an empty
   cell.\n...B..\nCCDB.E\nF.D..E\nFGD..H\n.G.AAH\n.G....\nA car moves only along its own length, over empty cells.
   Bring car A to the right edge in as few moves as possible. BD2 moves car B down by 2 cells; the directions are U,
   D, L, R, and a move of any distance counts as one. Reason inside <think> </think>, then put only the moves, written
   like BD2,AR3, inside <answer> </answer>.', 'answer': {'board': '...B..CCDB.EF.D..EFGD..H.G.AAH.G....', 'size': 6,
   'moves': 3, 'solution': 'EU1,HU1,AR1'}, 'solutions': ['<think>EU1, then HU1, then AR1 brings car A to the right
   edge.</think>\n<answer>EU1,HU1,AR1</answer>'], 'num_modes': 1}

A board is its cells row by row: "." (or "o") is empty, a capital letter a straight car of 2 or more cells, anything else a wall; car A lies in a
row. A move is a letter, a direction (U D L R or ^ v < >) and a number of cells; commas or white space part moves. Moves of one car in one direction
that follow each other are one move (AR1 AR2 is AR3), opposite ones are two. A mode is a shortest solution, so written: "BD2,AR3".
Problems: 1,000 random boards of 6 x 6 cells that take 2 to 6 moves, 6,000 of 4 x 4 in "tiny" (2 to 4; for a character-level model), each with at most
8 shortest solutions, all found by breadth-first search. Held out are 128 classes of each variant, a class being all boards that turn into each other by
moves, other letters or swapping top and bottom. The test problem is the first of its class; the others of these classes are in neither split.

rush_hour_exact, the task's reward: 1.0 for any shortest solution, else 0.0. The answer's "moves" says how many moves that is, else its "solution" does.
rush_hour_shaped: 0.65 exact + 0.20 solve + 0.10 prefix + 0.05 progress, 1.0 for any shortest solution.
  solve: shortest / own number of moves if all are legal and A is at the edge after the last one, else 0.
  prefix: share of a known solution (the answer's, or one of the row's "solutions") that the moves begin with.
  progress: how far "cells between A and the edge, plus cars on them" fell below its value at the start, before the first illegal move; 1 is solved.
One's own rows may have the moves alone as answer, "BD2,AR3": without a board exact means those, solve and progress are 0 and 0.75 is the most.

Both cover: the last complete <answer>...</answer> or, without one, the whole text, up to 1,000 characters.
They do not cover: the reasoning, lower case, "A R 3", AR03, AR100, leaving the board, a word between the moves: all 0, whatever else is right.
"""

import math
import random
import re
import zlib
from collections.abc import Iterator
from functools import cache
from itertools import islice, takewhile
from string import ascii_uppercase

from tasks.countdown import check_choice, last_answer, take

DEFAULT = "6x6"
HELD_OUT = 128
MAX_MODES = 8
MAX_STATES = 300  # a search that meets more is given up and the board with it: loose boards would take seconds
WORDS = (
    "Rush Hour: the board has {size} rows and {size} columns, a letter is a car and a dot is an empty cell.\n{rows}\nA car moves only along its "
    "own length, over empty cells. Bring car A to the right edge in as few moves as possible. BD2 moves car B down by 2 cells; the directions "
    "are U, D, L, R, and a move of any distance counts as one. Reason inside <think> </think>, then put only the moves, written like "
    "BD2,AR3, inside <answer> </answer>."
)
CONFIGS = {
    "6x6": dict(size=6, tries=(10, 30), max_moves=6, count=1000, words=True),
    "tiny": dict(size=4, tries=(4, 14), max_moves=4, count=6000, words=False),
}
MOVE = "([A-Z])([UDLR^v<>])([1-9][0-9]?)"
MOVES = re.compile(f"{MOVE}(?:[, \t\r\n]+{MOVE})*")
ARROWS = str.maketrans("^v<>", "UDLR")


def read_moves(text: str) -> list[tuple[str, str, int]] | None:
    """[("B", "D", 2), ("A", "R", 3)] for "BD2,AR3" and for "BD1 BD1 AR3"; None for a text that is not a list of moves."""
    if len(text) > 1000 or not MOVES.fullmatch(text):
        return None
    merged = []
    for car, sign, count in re.findall(MOVE, text):
        direction = sign.translate(ARROWS)
        before = merged.pop()[2] if merged and merged[-1][:2] == (car, direction) else 0
        merged.append((car, direction, before + int(count)))
    return merged


def write_moves(moves: list) -> str:
    return ",".join(f"{car}{direction}{count}" for car, direction, count in moves)


def read_board(text: str, size: int) -> dict:
    """{"size", "letters": of the cars, A first, "start": each car's cells, "lanes": each car's row or column without walls}.

    Sets of cells are ints: cell i is bit size + i, so that a car pushed over any edge leaves its lane without losing a bit."""
    text = "".join(text.split()).replace("o", ".")
    letters, start, lanes = "".join(sorted(set(text) & set(ascii_uppercase))), [], []
    if len(text) != size * size or "AA" not in text:
        raise ValueError(
            f"rush_hour: {text!r} is not a board of {size} rows of {size} cells with a car A that lies in a row"
        )
    for car in letters:
        cells = [i for i, c in enumerate(text) if c == car]
        row, column, across = (
            cells[0] // size * size,
            cells[0] % size,
            text[cells[0] : cells[0] + 2] == 2 * car,
        )
        lane = list(range(row, row + size) if across else range(column, size * size, size))
        first = lane.index(cells[0])
        if len(cells) < 2 or cells != lane[first : first + len(cells)]:
            raise ValueError(
                f"rush_hour: car {car} of the board {text!r} is not one straight piece of 2 or more cells"
            )
        start.append(sum(1 << size + i for i in cells))
        lanes.append(sum(1 << size + i for i in lane if text[i] in letters + "."))
    return {"size": size, "letters": letters, "start": tuple(start), "lanes": lanes}


@cache  # a lane has few patterns, and a search meets each of them over and over
def reach(cells: int, free: int, step: int) -> list[int]:
    """Where a car gets in 1, 2, ... steps before it leaves the free cells; a step is 1 right, -1 left, size down, -size up."""
    found = []
    while True:
        cells = cells << step if step > 0 else cells >> -step
        if cells & ~free:
            return found
        found.append(cells)


def in_the_way(board: dict, state: tuple) -> tuple[int, int]:
    """(cells between car A and the right edge, cars that stand on them); (0, 0) is solved."""
    ahead = board["lanes"][0] >> state[0].bit_length() << state[0].bit_length()
    return ahead.bit_count(), sum(cells & ahead > 0 for cells in state[1:])


def slides(board: dict, state: tuple) -> Iterator[tuple]:
    """All legal moves ((car, direction, count), the state after it)."""
    full, size = sum(state), board["size"]
    for car, cells in enumerate(state):
        for direction, step in (
            (("L", -1), ("R", 1)) if cells & cells << 1 else (("U", -size), ("D", size))
        ):
            for count, after in enumerate(
                reach(cells, board["lanes"][car] & ~(full - cells), step), 1
            ):
                yield (
                    (board["letters"][car], direction, count),
                    (*state[:car], after, *state[car + 1 :]),
                )


def play(board: dict, moves: list) -> tuple[tuple, bool]:
    """(the state after the moves or before the first illegal one, whether all are legal)."""
    state = board["start"]
    for move in moves:
        after = dict(slides(board, state)).get(move)
        if after is None:
            return state, False
        state = after
    return state, True


def judge(completion: str, answer) -> dict:
    """{"moves", "gold": the known solution, "board": None without one, "exact": bool, "solve", "progress": 0 to 1} of a completion."""
    given = answer if isinstance(answer, dict) else {"solution": answer}
    gold, moves, text = (
        read_moves(str(given["solution"]).strip()),
        read_moves(last_answer(completion)),
        given.get("board"),
    )
    if not gold:
        raise ValueError(
            f"rush_hour: the answer {given['solution']!r} is not a list of moves like BD2,AR3"
        )
    board = read_board(text, given.get("size") or math.isqrt(len(text))) if text else None
    found = {
        "moves": moves or [],
        "gold": gold,
        "board": board,
        "exact": moves == gold,
        "solve": 0.0,
        "progress": 0.0,
    }
    if not moves or not board:
        return found
    (end, legal), least = play(board, moves), int(given.get("moves") or len(gold))
    left, at_first = sum(in_the_way(board, end)), sum(in_the_way(board, board["start"]))
    if legal and left == 0:
        found |= {
            "exact": moves == gold or len(moves) <= least,
            "solve": min(1.0, least / len(moves)),
        }
    return found | {"progress": max(0.0, 1 - left / max(1, at_first))}


def rush_hour_exact(completion: str, answer, **row) -> float:
    """1.0 for a shortest solution, else 0.0. Covered and not covered: see the top of this file."""
    return float(judge(completion, answer)["exact"])


def rush_hour_shaped(completion: str, answer, solutions=(), **row) -> float:
    """0.65 exact + 0.20 solve + 0.10 prefix + 0.05 progress, each 0 to 1: see the top of this file."""
    found = judge(completion, answer)
    if found["exact"] and found["board"]:
        return 1.0  # not 1.0000000000000002, the sum; and not less for a solution that is not the known one
    known = [
        found["gold"],
        *filter(None, (read_moves(last_answer(text)) for text in solutions or ())),
    ]
    same = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found["moves"], moves)))
        for moves in known
    ]
    prefix = max(n / len(moves) for n, moves in zip(same, known))
    return 0.65 * found["exact"] + 0.20 * found["solve"] + 0.10 * prefix + 0.05 * found["progress"]


reward = rush_hour_exact


def mode(completion: str, answer) -> str | None:
    """The merged moves of a correct completion, "BD2,AR3"; None for a wrong one."""
    found = judge(completion, answer)
    return write_moves(found["moves"]) if found["exact"] else None


def ways(came: dict, state: tuple) -> Iterator[list]:
    """All shortest lists of moves from the start to a state. came[state] has (last move, state before it) of each; the start's is empty."""
    if not came[state]:
        yield []
    for move, before in came[state]:
        yield from ([*moves, move] for moves in ways(came, before))


def shortest(board: dict, max_moves: int = 10**6, max_states: int = 10**6) -> Iterator[list]:
    """All shortest solutions by breadth-first search; none where it takes more moves or meets more states than this."""
    level, came = [board["start"]], {board["start"]: []}
    for _ in range(max_moves):
        clear = [state for state in level if in_the_way(board, state)[1] == 0]
        if clear:  # A's drive to the edge is always the last move: no need to look at the next level, the largest
            return (
                [*moves, ("A", "R", in_the_way(board, state)[0])]
                for state in clear
                for moves in ways(came, state)
            )
        found = {}
        for state in level:
            for move, after in slides(board, state):
                if after not in came:
                    found.setdefault(after, []).append((move, state))
            if len(came) + len(found) > max_states:
                return iter(())
        if not found:
            break
        level = list(found)
        came |= found
    return iter(())


def modes(answer: dict) -> set[str]:
    """All shortest solutions. As slow as breadth-first search is: fine for boards like those of this file, seconds for the hardest of 6 x 6."""
    return {write_moves(moves) for moves in shortest(read_board(answer["board"], answer["size"]))}


def class_key(text: str, size: int) -> int:
    """Equal for boards that moves, other letters or swapping top and bottom turn into each other: the lengths of the cars in every lane."""

    def lengths(rows: list) -> str:
        lanes = rows + ["".join(column) for column in zip(*rows)]
        return str(
            [
                [
                    "A" if car == "A" else len(more)
                    for car, more in re.findall(r"([A-Z])(\1+)", lane)
                ]
                for lane in lanes
            ]
        )

    rows = [text[i : i + size] for i in range(0, size * size, size)]
    return zlib.crc32(min(lengths(rows), lengths(rows[::-1])).encode())


def draw(rng: random.Random, size: int, tries: tuple) -> str:
    """A random board with car A not at the edge, the other cars named in reading order. Each try is a car that stays if it meets no other."""
    ends = [
        (length, lane, first)
        for length in (2, 3)
        for lane in range(size)
        for first in range(size - length + 1)
    ]
    places = [
        range(lane * size + first, lane * size + first + length) for length, lane, first in ends
    ]
    places += [
        range(first * size + lane, (first + length) * size, size) for length, lane, first in ends
    ]
    cells, begin = [0] * size**2, rng.randrange(size) * size + rng.randrange(size - 2)
    cells[begin : begin + 2] = [1, 1]
    for car, place in enumerate(rng.sample(places, rng.randint(*tries)), 2):
        if not any(cells[i] for i in place):
            for i in place:
                cells[i] = car
    names = dict(zip(dict.fromkeys([0, 1, *cells]), "." + ascii_uppercase))
    return "".join(names[car] for car in cells)


@cache
def problems(config: str) -> dict[str, list[tuple]]:
    """{"train": [(board, solutions), ...], "test": ...}; held out are the classes with the smallest key, so frequent ones are not preferred."""
    c, rng, seen, classes = CONFIGS[config], random.Random("rush_hour"), set(), {}
    while len(seen) < c["count"]:
        text = draw(rng, c["size"], c["tries"])
        board = read_board(text, c["size"])
        if text in seen or in_the_way(board, board["start"])[1] == 0:  # one move would do
            continue
        found = list(islice(shortest(board, c["max_moves"], MAX_STATES), MAX_MODES + 1))
        if 0 < len(found) <= MAX_MODES:
            seen.add(text)
            classes.setdefault(class_key(text, c["size"]), []).append(
                (text, sorted(map(write_moves, found)))
            )
    keys = sorted(classes)
    return {
        "test": [classes[key][0] for key in keys[:HELD_OUT]],
        "train": [problem for key in keys[HELD_OUT:] for problem in classes[key]],
    }


def to_row(config: str, board: str, solutions: list[str]) -> dict:
    size, texts = CONFIGS[config]["size"], list(solutions)
    short = "/".join(re.findall("." * size, board))
    prompt = short + ":"
    if CONFIGS[config]["words"]:
        prompt = WORDS.format(size=size, rows=short.replace("/", "\n"))
        texts = [
            f"<think>{text.replace(',', ', then ')} brings car A to the right edge.</think>\n<answer>{text}</answer>"
            for text in solutions
        ]
    answer = {
        "board": board,
        "size": size,
        "moves": len(read_moves(solutions[0])),
        "solution": solutions[0],
    }
    return {
        "id": f"rush_hour-{config}-{short}",
        "task": "rush_hour",
        "prompt": prompt,
        "answer": answer,
        "solutions": texts,
        "num_modes": len(texts),
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test"; `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, ("train", "test"))
    return [to_row(config, *problem) for problem in take(problems(config)[split], n, seed)]
