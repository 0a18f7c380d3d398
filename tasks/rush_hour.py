r"""Rush Hour: slide cars along their lanes until car A reaches the right edge, in as few moves as
possible. Often several answers are right.

One row, rows("test", 1, seed=0, config="6x6"):
  {'id': 'rush_hour-6x6-...B../CCDB.E/F.D..E/FGD..H/.G.AAH/.G....', 'task': 'rush_hour',
   'prompt': 'Rush Hour: the board has 6 rows and 6 columns, a letter is a car and a dot is an empty
   cell.\n...B..\nCCDB.E\nF.D..E\nFGD..H\n.G.AAH\n.G....\nA car moves only along its own length,
   over empty cells. Bring car A to the right edge in as few moves as possible. BD2 moves car B down
   by 2 cells; the directions are U, D, L, R, and a move of any distance counts as one. Reason
   inside <think> </think>, then put only the moves, written like BD2,AR3, inside <answer>
   </answer>.',
   'answer': {'board': '...B..CCDB.EF.D..EFGD..H.G.AAH.G....', 'size': 6, 'moves': 3,
   'solution': 'EU1,HU1,AR1'},
   'solutions': ['<think>EU1, then HU1, then AR1 brings car A to the right
   edge.</think>\n<answer>EU1,HU1,AR1</answer>'],
   'num_modes': 1}

A board is its cells row by row: "." (or "o") is empty, a capital letter belongs to a straight car
of 2 or more cells, anything else is a wall; car A lies in a row. A move is a car's letter, a
direction (U D L R or ^ v < >) and a number of cells; commas or white space separate moves.
Consecutive moves of one car in one direction count as one move (AR1 AR2 is AR3), in opposite
directions as two. A mode is a shortest solution, written like "BD2,AR3".

Problems: "6x6" has 1,000 random boards that take 2 to 6 moves; "tiny", for a character-level model,
has 6,000 boards of 4 x 4 cells that take 2 to 4. Each has at most 8 shortest solutions, all found
by breadth-first search. 128 classes of each variant are held out. A class has all boards that turn
into each other by moving cars, renaming them or swapping top and bottom. A test problem is the
first of its class; the other problems of these classes are in neither split.

rush_hour_exact, the task's reward: 1.0 for any shortest solution, else 0.0. The answer's "moves"
says how many moves a shortest solution has; without it, the length of "solution" counts.
rush_hour_shaped: 1.0 for any shortest solution, else 0.65 exact + 0.20 solve + 0.10 prefix +
0.05 progress.
  solve: (moves of a shortest solution) / (moves given) if all moves are legal and A is at the edge
    after the last one, else 0.
  prefix: the share of a known solution (the answer's, or one of the row's "solutions") with which
    the moves begin.
  progress: the share by which "cells between A and the edge, plus cars on them" has fallen since
    the start, up to the first illegal move; 1 is solved.
A user's own rows may have just the moves as answer, "BD2,AR3". Without a board, exact means these
moves, solve and progress are 0, and 0.75 is the maximum. With a board, a "solution" that does not
solve it is an error.

Both cover: the last complete <answer>...</answer> or, without one, the whole text, up to 1,000
characters.
They do not cover: the reasoning, lower case, "A R 3", AR03, AR100, leaving the board, a word
between the moves: all 0, whatever else is right.
"""

import math
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from string import ascii_uppercase

from tasks import SPLITS, check_choice, hold_out, last_answer, take, worked_solution

DEFAULT = "6x6"
HELD_OUT = 128  # classes of boards
MAX_MODES = 8
MAX_CHARACTERS = 1000  # of a list of moves
# a board whose search meets more states is not used: boards with much free space take seconds
MAX_STATES = 300
NO_LIMIT = 10**6
WORDS = (
    "Rush Hour: the board has {size} rows and {size} columns, a letter is a car and a dot is an "
    "empty cell.\n{rows}\nA car moves only along its own length, over empty cells. Bring car A to "
    "the right edge in as few moves as possible. BD2 moves car B down by 2 cells; the directions "
    "are U, D, L, R, and a move of any distance counts as one. Reason inside <think> </think>, "
    "then put only the moves, written like BD2,AR3, inside <answer> </answer>."
)
CONFIGS = {
    # tries: least and most cars that draw() tries to place; words: whether the prompt is sentences
    "6x6": dict(size=6, tries=(10, 30), max_moves=6, count=1000, words=True),
    "tiny": dict(size=4, tries=(4, 14), max_moves=4, count=6000, words=False),
}
# a number of up to two digits that does not begin with 0
MOVE = "([A-Z])([UDLR^v<>])([1-9][0-9]?)"
# each part begins with a character that can't end the part before, so hostile texts cause no
# backtracking
MOVES = re.compile(f"{MOVE}(?:[, \t\r\n]+{MOVE})*")
ARROWS = str.maketrans("^v<>", "UDLR")  # other signs for the directions


# --- moves and boards; a move is (car, direction, count), a state is a tuple of each car's cells


def read_moves(text: str) -> list[tuple[str, str, int]] | None:
    """The moves in a text: [("B", "D", 2), ("A", "R", 3)] for "BD2,AR3", or for "BD1 BD1 AR3". None
    if the text is not a list of moves."""
    if len(text) > MAX_CHARACTERS or not MOVES.fullmatch(text):
        return None
    merged = []
    for car, sign, digits in re.findall(MOVE, text):
        direction = sign.translate(ARROWS)  # U, D, L or R
        count = int(digits)
        if merged and merged[-1][:2] == (car, direction):
            count += merged.pop()[2]  # BD1 BD1 is BD2
        merged.append((car, direction, count))
    return merged


def write_moves(moves: Sequence) -> str:
    """The text of moves: BD2,AR3 for [("B", "D", 2), ("A", "R", 3)]."""
    return ",".join(f"{car}{direction}{count}" for car, direction, count in moves)


def read_board(text: str, size: int) -> dict:
    """{"size", "letters": the cars' letters, A first; "start": each car's cells; "lanes": each
    car's row or column without walls}. ValueError if the text is not a board.

    A set of cells is an int in which cell i is bit size + i. The lowest `size` bits are not cells:
    a car that is pushed over the top or left edge lands there, and keeps all of its bits."""
    # rows may be on separate lines, and o is an empty cell too
    text = "".join(text.split()).replace("o", ".")
    if len(text) != size * size or "AA" not in text:
        raise ValueError(
            f"rush_hour: {text!r} is not a board of {size} rows of {size} cells "
            "with a car A that lies in a row"
        )
    letters = sorted(set(text) & set(ascii_uppercase))  # ["A", "B", ...]
    start = []
    lanes = []
    for car in letters:
        cells, lane = cells_and_lane(text, size, car)
        # cells that are neither empty nor a car's are walls
        open_lane = [i for i in lane if text[i] == "." or text[i] in letters]
        start.append(bits(cells, size))
        lanes.append(bits(open_lane, size))
        walls = [i for i in lane if i not in open_lane]
        if car == "A" and walls and walls[-1] > cells[-1]:
            raise ValueError(
                f"rush_hour: in the board {text!r} a wall keeps car A from the right edge for ever"
            )
    return {"size": size, "letters": "".join(letters), "start": tuple(start), "lanes": lanes}


def cells_and_lane(text: str, size: int, car: str) -> tuple[list[int], list[int]]:
    """(the numbers of a car's cells, the numbers of all cells of its row or column)."""
    cells = [i for i, c in enumerate(text) if c == car]
    row_start = cells[0] // size * size  # number of the first cell of its row
    column = cells[0] % size
    # a car that lies across has its second cell to the right of its first; else it is a row below
    across = text[cells[0] : cells[0] + 2] == 2 * car
    if across:
        lane = list(range(row_start, row_start + size))
    else:
        lane = list(range(column, size * size, size))
    first = lane.index(cells[0])
    # bent, in two pieces, or only one cell
    if len(cells) < 2 or cells != lane[first : first + len(cells)]:
        raise ValueError(
            f"rush_hour: car {car} of the board {text!r} is not one straight piece "
            "of 2 or more cells"
        )
    return cells, lane


def bits(cells: list[int], size: int) -> int:
    """These cells as one int, see read_board()."""
    return sum(1 << size + i for i in cells)


# cached: a lane has few patterns, and a search meets each of them many times
@cache
def reach(cells: int, free: int, step: int) -> list[int]:
    """The car's cells after 1, 2, ... steps, as long as all of them are free. step: 1 right, -1
    left, size down, -size up."""
    reached = []
    while True:
        cells = cells << step if step > 0 else cells >> -step
        if cells & ~free:  # another car, a wall, or off the board
            return reached
        reached.append(cells)


def in_the_way(board: dict, state: tuple) -> tuple[int, int]:
    """(cells between car A and the right edge, cars on them); (0, 0) is solved."""
    # letters are sorted, so A is the first
    car_a = state[0]
    # the cells of A's row to the right of A: the bits above A's highest one
    left_of_edge = car_a.bit_length()
    ahead = board["lanes"][0] >> left_of_edge << left_of_edge
    cars = sum(cells & ahead > 0 for cells in state[1:])
    return ahead.bit_count(), cars


def slides(board: dict, state: tuple) -> Iterator[tuple]:
    """All legal moves, each as ((car, direction, count), the state after it)."""
    size = board["size"]
    across = (("L", -1), ("R", 1))
    down = (("U", -size), ("D", size))
    full = sum(state)  # the union of all cars, as no two share a bit
    for i, cells in enumerate(state):
        others = full - cells
        free = board["lanes"][i] & ~others
        lies_across = cells & cells << 1  # two neighbours in a row
        for direction, step in across if lies_across else down:
            for count, moved in enumerate(reach(cells, free, step), 1):
                after = (*state[:i], moved, *state[i + 1 :])
                yield (board["letters"][i], direction, count), after


def play(board: dict, moves: Sequence) -> tuple[tuple, bool]:
    """(the state after all moves, or before the first illegal one; whether all moves are legal)."""
    state = board["start"]
    for move in moves:
        after = dict(slides(board, state)).get(move)
        if after is None:
            return state, False
        state = after
    return state, True


# --- rewards


# cached: a group's completions share a row, and playing takes longer than a look into the cache
@lru_cache(maxsize=1024)
def solved_board(text: str, size: int, solution: tuple) -> dict:
    """read_board(text, size). ValueError unless the moves `solution` solve it."""
    board = read_board(text, size)
    end, legal = play(board, solution)
    if not legal or any(in_the_way(board, end)):
        raise ValueError(
            f"rush_hour: the answer {write_moves(solution)!r} does not solve the board {text!r}"
        )
    return board


def judge(completion: str, answer) -> dict:
    """How good a completion is: {"moves", "gold": the known solution, "board": None if the answer
    has none, "exact": bool, "solve", "progress": 0 to 1}. ValueError for an answer that can't be
    read or does not solve its board."""
    given = answer if isinstance(answer, dict) else {"solution": answer}
    gold = read_moves(str(given.get("solution")).strip())
    # the row is wrong, not the completion: a reward of 0 would hide that
    if not gold:
        raise ValueError(
            f"rush_hour: the answer {given.get('solution')!r} is not a list of moves like BD2,AR3"
        )
    text = given.get("board")
    board = None
    if text:
        board = solved_board(text, given.get("size") or math.isqrt(len(text)), tuple(gold))
    # "moves" first, because the known solution of a user's row may not be a shortest one
    fewest = int(given.get("moves") or len(gold))
    moves = read_moves(last_answer(completion))
    verdict = {
        "moves": moves or [],
        "gold": gold,
        "board": board,
        "exact": moves == gold,
        "solve": 0.0,
        "progress": 0.0,
    }
    if moves and board:
        # with a board, any shortest solution is exact, not only the known one
        end, legal = play(board, moves)
        left = sum(in_the_way(board, end))
        at_first = sum(in_the_way(board, board["start"]))
        # max(1, ...): a user's board may be solved at the start
        verdict["progress"] = max(0.0, 1 - left / max(1, at_first))
        if legal and left == 0:
            verdict["exact"] = moves == gold or len(moves) <= fewest
            verdict["solve"] = min(1.0, fewest / len(moves))
    return verdict


def rush_hour_exact(completion: str, answer, **row) -> float:
    """1.0 for a shortest solution, else 0.0. Covered and not covered: see the top of this file."""
    return float(judge(completion, answer)["exact"])


def rush_hour_shaped(completion: str, answer, solutions=(), **row) -> float:
    """0.65 exact + 0.20 solve + 0.10 prefix + 0.05 progress, each 0 to 1: see the top of this
    file."""
    verdict = judge(completion, answer)
    if verdict["exact"] and verdict["board"]:
        # the sum below would be 1.0000000000000002, or less than 1 for another shortest solution
        return 1.0
    prefix = prefix_share(verdict["moves"], verdict["gold"])
    # `or ()`: the column may hold None
    for text in solutions or ():
        known = read_moves(last_answer(text))
        if known:
            prefix = max(prefix, prefix_share(verdict["moves"], known))
    value = 0.65 * verdict["exact"]
    value += 0.20 * verdict["solve"]
    value += 0.10 * prefix
    value += 0.05 * verdict["progress"]
    return value


def prefix_share(moves: list, known: list) -> float:
    """The share of the known moves with which `moves` begins."""
    same = 0
    for move, known_move in zip(moves, known):
        if move != known_move:
            break
        same += 1
    return same / len(known)


reward = rush_hour_exact


def mode(completion: str, answer) -> str | None:
    """The merged moves of a correct completion, "BD2,AR3"; None for a wrong one."""
    verdict = judge(completion, answer)
    return write_moves(verdict["moves"]) if verdict["exact"] else None


# --- shortest solutions


def ways(came: dict, state: tuple) -> Iterator[list]:
    """All shortest lists of moves from the start to a state. came[state]: a (last move, state
    before it) for each way to get there; empty for the start."""
    if not came[state]:
        yield []
    for move, before in came[state]:
        for moves in ways(came, before):
            yield [*moves, move]


def shortest(board: dict, max_moves: int = NO_LIMIT, max_states: int = NO_LIMIT) -> Iterator[list]:
    """All shortest solutions, by breadth-first search. Yields none if a solution takes more than
    max_moves moves or the search meets more than max_states states."""
    level = [board["start"]]  # the states that take as many moves as there were rounds
    came = {board["start"]: []}  # {state: [(last move, state before it), ...]}
    for _ in range(max_moves):
        # A's drive to the edge is always the last move. The search ends where A's way is clear,
        # which saves the last level, the largest.
        clear = [state for state in level if in_the_way(board, state)[1] == 0]
        for state in clear:
            last_move = ("A", "R", in_the_way(board, state)[0])
            for moves in ways(came, state):
                yield [*moves, last_move]
        if clear:
            return
        new = next_level(board, level, came, max_states)
        # unsolvable, or too many states
        if not new:
            return
        level = list(new)
        # only now that the level is complete, so that each state has all of its shortest ways
        came |= new


def next_level(board: dict, level: list, came: dict, max_states: int) -> dict:
    """{state: [(move, state before it), ...]} for the states that are one move from `level` and
    not in `came`. {} if there are none, or so many that `came` would exceed max_states."""
    new = {}  # with lists, because several last moves may lead to a state
    for state in level:
        for move, after in slides(board, state):
            if after not in came:
                new.setdefault(after, []).append((move, state))
        if len(came) + len(new) > max_states:
            return {}
    return new


def modes(answer: dict) -> set[str]:
    """All shortest solutions, by breadth-first search: fast for boards like those of this file,
    seconds for the hardest ones of 6 x 6."""
    board = read_board(answer["board"], answer["size"])
    return {write_moves(moves) for moves in shortest(board)}


# --- problems


def class_key(text: str, size: int) -> int:
    """A hash of the lengths of the cars in every lane. It is equal for boards that turn into each
    other by moving cars, renaming them or swapping top and bottom."""
    rows = [text[i : i + size] for i in range(0, size * size, size)]
    lengths = min(car_lengths(rows), car_lengths(rows[::-1]))
    return zlib.crc32(lengths.encode())


def car_lengths(rows: list[str]) -> str:
    """The cars of each row, then of each column, as text: each car's length - 1, or A for car A."""
    columns = ["".join(column) for column in zip(*rows)]
    lanes = []  # [["A"], [1, 2], ...]
    for lane in rows + columns:
        # a letter and its repetitions; a car across this lane has only one cell in it, so no match
        cars = re.findall(r"([A-Z])(\1+)", lane)
        lanes.append(["A" if car == "A" else len(rest) for car, rest in cars])
    return str(lanes)


def possible_cars(size: int) -> list[range]:
    """The cells of every possible car of 2 or 3 cells on the board, those across first."""
    across = []
    down = []
    for length in (2, 3):
        for lane in range(size):
            for first in range(size - length + 1):
                begin = lane * size + first
                across.append(range(begin, begin + length))
                down.append(range(first * size + lane, (first + length) * size, size))
    return across + down  # the order decides what rng.sample() draws


def draw(rng: random.Random, size: int, tries: tuple) -> str:
    """A random board. Car A is not at the right edge; the other cars are named in reading order. A
    car that is tried is placed unless it overlaps another."""
    row = rng.randrange(size)
    # size - 2, so that A's right cell is never at the edge
    column = rng.randrange(size - 2)
    car_a = row * size + column  # its left cell
    cells = [0] * size**2  # 0 is empty, 1 is car A
    cells[car_a : car_a + 2] = [1, 1]
    num_tries = rng.randint(*tries)
    for number, car in enumerate(rng.sample(possible_cars(size), num_tries), 2):
        if not any(cells[i] for i in car):
            for i in car:
                cells[i] = number
    # numbers follow the order of drawing; letters are given in reading order
    in_reading_order = dict.fromkeys([0, 1, *cells])
    names = dict(zip(in_reading_order, "." + ascii_uppercase))
    return "".join(names[number] for number in cells)


@cache
def problems(config: str) -> dict[str, list[tuple]]:
    """{"train": [(board, solutions), ...], "test": ...}"""
    c = CONFIGS[config]
    # a fixed seed: problems never change with a run's seed
    rng = random.Random("rush_hour")
    seen = set()  # boards
    classes = {}  # {key: [(board, solutions), ...]}
    while len(seen) < c["count"]:
        text = draw(rng, c["size"], c["tries"])
        board = read_board(text, c["size"])
        one_move_would_do = in_the_way(board, board["start"])[1] == 0
        if text in seen or one_move_would_do:
            continue
        # MAX_MODES + 1, to recognise boards with too many solutions, which are left out
        all_moves = list(islice(shortest(board, c["max_moves"], MAX_STATES), MAX_MODES + 1))
        if 0 < len(all_moves) <= MAX_MODES:
            seen.add(text)
            solutions = sorted(map(write_moves, all_moves))
            classes.setdefault(class_key(text, c["size"]), []).append((text, solutions))
    return hold_out(classes, HELD_OUT)


def to_row(config: str, board: str, solutions: list[str]) -> dict:
    """The row of a problem."""
    size = CONFIGS[config]["size"]
    # ...B../CCDB.E/...
    short = "/".join(board[i : i + size] for i in range(0, size * size, size))
    if CONFIGS[config]["words"]:
        prompt = WORDS.format(size=size, rows=short.replace("/", "\n"))
        texts = []
        for solution in solutions:
            reasoning = f"{solution.replace(',', ', then ')} brings car A to the right edge."
            texts.append(worked_solution(reasoning, solution))
    else:
        prompt = short + ":"
        # a new list: a caller may change a row, and problems() keeps this one
        texts = list(solutions)
    return {
        "id": f"rush_hour-{config}-{short}",
        "task": "rush_hour",
        "prompt": prompt,
        "answer": {
            "board": board,
            "size": size,
            "moves": len(read_moves(solutions[0])),
            "solution": solutions[0],
        },
        "solutions": texts,
        "num_modes": len(texts),
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test"; `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, SPLITS)
    chosen = take(problems(config)[split], n, seed)
    return [to_row(config, board, solutions) for board, solutions in chosen]
