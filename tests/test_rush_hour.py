"""tasks/rush_hour.py: boards replayed by a second simulator, shortest solutions against trying
everything, each part of the shaped reward."""

import random
from itertools import pairwise

import pytest

from tasks import rush_hour
from tasks.rush_hour import mode, modes, rush_hour_exact, rush_hour_shaped

CONFIGS = list(rush_hour.CONFIGS)
# ..B.   B has to go down by 2, then A drives out
# AAB.
# ....
# CC..
ONE = {"board": "..B.AAB.....CC..", "size": 4, "moves": 2, "solution": "BD2,AR2"}
# ..BC   either car may go first
# AABC
# ....
# ....
TWO = {"board": "..BCAABC........", "size": 4, "moves": 3, "solution": "BD2,CD2,AR2"}
ROW = {
    "answer": ONE,
    "id": "x",
    "task": "rush_hour",
    "prompt": "",
    "solutions": ["BD2,AR2"],
    "num_modes": 1,
}


def all_rows(config: str) -> list[dict]:
    return rush_hour.rows("train", -1, 0, config) + rush_hour.rows("test", -1, 0, config)


# --- a second simulator: a dict of cells, one cell at a time


def grid_of(board: str, size: int) -> dict:
    return {divmod(i, size): car for i, car in enumerate(board)}


def text_of(grid: dict) -> str:
    return "".join(grid[cell] for cell in sorted(grid))


def one_cell(grid: dict, car: str, direction: str) -> dict | None:
    cells = [cell for cell in grid if grid[cell] == car]
    along_a_row = cells[0][0] == cells[1][0]
    if along_a_row != (direction in "LR"):
        return None
    down, right = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}[direction]
    there = [(row + down, column + right) for row, column in cells]
    if any(grid.get(cell, "wall") not in (".", car) for cell in there):
        return None
    return grid | dict.fromkeys(cells, ".") | dict.fromkeys(there, car)


def drive(board: str, size: int, moves: str) -> dict | None:
    """The grid after moves like BD2,AR3; None if one is illegal."""
    grid = grid_of(board, size)
    for move in moves.split(","):
        for _ in range(int(move[2:])):
            grid = one_cell(grid, move[0], move[1])
            if grid is None:
                return None
    return grid


def is_out(grid: dict | None, size: int) -> bool:
    return grid is not None and any(grid[row, size - 1] == "A" for row in range(size))


def next_boards(grid: dict, size: int) -> list[tuple[str, dict]]:
    """[("BD2", the grid after it), ...] of all legal moves."""
    found = []
    for car in sorted(set(grid.values()) - {"."}):
        for direction in "UDLR":
            after = grid
            for count in range(1, size):
                after = one_cell(after, car, direction)
                if after is None:
                    break
                found.append((f"{car}{direction}{count}", after))
    return found


def try_everything(board: str, size: int, depth: int) -> set[str]:
    """All solutions with the fewest moves, at most `depth`, by writing down every list of moves;
    nothing is remembered or left out."""
    level = [("", grid_of(board, size))]
    for _ in range(depth):
        longer = []
        for moves, grid in level:
            for move, after in next_boards(grid, size):
                longer.append((f"{moves},{move}".strip(","), after))
        level = longer
        solved = {moves for moves, grid in level if is_out(grid, size)}
        if solved:
            return solved
    return set()


# --- boards and their solutions


@pytest.mark.parametrize("config", CONFIGS)
def test_every_listed_solution_drives_a_out_and_has_the_stated_number_of_merged_moves(config):
    rows = random.Random(0).sample(all_rows(config), 100)
    long = [row for row in all_rows(config) if row["answer"]["moves"] > 4]
    rows += random.Random(1).sample(long, min(len(long), 200))
    for row in rows:
        answer = row["answer"]
        board = answer["board"]
        size = answer["size"]
        keys = {mode(text, answer) for text in row["solutions"]}
        assert len(keys) == len(row["solutions"]) == row["num_modes"] <= 8
        assert answer["solution"] in keys
        for key in keys:
            moves = key.split(",")
            assert len(moves) == answer["moves"]
            assert is_out(drive(board, size, key), size)
            assert not is_out(drive(board, size, ",".join(moves[:-1])), size)
            assert all(a[0] != b[0] for a, b in pairwise(moves))  # no car moves twice in a row


@pytest.mark.parametrize("config, longest, count", [("tiny", 3, 40), ("6x6", 2, 8)])
def test_the_solutions_are_those_that_trying_everything_finds(config, longest, count):
    rows = [row for row in all_rows(config) if row["answer"]["moves"] <= longest]
    for row in random.Random(0).sample(rows, count):
        answer = row["answer"]
        expected = try_everything(answer["board"], answer["size"], answer["moves"])
        assert expected != set()
        assert modes(answer) == expected
        assert {mode(text, answer) for text in row["solutions"]} == expected


def test_the_search_agrees_with_trying_everything_on_any_small_board_solvable_or_not():
    rng = random.Random(1)
    lengths = set()
    for _ in range(80):
        text = rush_hour.draw(rng, 4, (8, 20))
        board = rush_hour.read_board(text, 4)
        expected = try_everything(text, 4, 3)
        solutions = rush_hour.shortest(board, max_moves=3)
        assert {rush_hour.write_moves(moves) for moves in solutions} == expected, text
        lengths.add(len(min(expected).split(",")) if expected else None)
    assert lengths == {None, 1, 2, 3}


def test_boards_with_more_than_eight_shortest_solutions_are_left_out_and_not_cut():
    full = [row for row in all_rows("tiny") + all_rows("6x6") if row["num_modes"] == 8]
    assert len(full) > 5
    for row in full:
        assert modes(row["answer"]) == {mode(text, row["answer"]) for text in row["solutions"]}


def test_modes_of_three_boards_by_hand():
    assert modes(ONE) == {"BD2,AR2"}
    assert modes(TWO) == {"BD2,CD2,AR2", "CD2,BD2,AR2"}
    assert modes({"board": "..B.AAB...B.....", "size": 4}) == set()  # B always stands in A's row


def cells_of(board: dict, state: tuple) -> str:
    """The board's text after the moves that led to `state`."""
    size = board["size"]
    cells = ["."] * size**2
    for car, bits in zip(board["letters"], state):
        for i in range(size**2):
            if bits >> size + i & 1:
                cells[i] = car
    return "".join(cells)


def test_play_agrees_with_the_second_simulator_on_random_moves():
    rng = random.Random(2)
    rows = random.Random(0).sample(all_rows("tiny"), 300)
    rows += random.Random(0).sample(all_rows("6x6"), 100)
    num_legal = 0
    for row in rows:
        size = row["answer"]["size"]
        board = rush_hour.read_board(row["answer"]["board"], size)
        moves = []
        for _ in range(rng.randint(1, 2)):
            moves.append((rng.choice(board["letters"]), rng.choice("UDLR"), rng.randint(1, 3)))
        grid = drive(row["answer"]["board"], size, rush_hour.write_moves(moves))
        state, legal = rush_hour.play(board, moves)
        assert legal == (grid is not None)
        if legal:
            assert cells_of(board, state) == text_of(grid)
            num_legal += 1
    assert num_legal > 10


def test_letters_are_in_reading_order_and_a_is_blocked_at_the_start():
    for config in CONFIGS:
        for row in all_rows(config):
            board = row["answer"]["board"]
            size = row["answer"]["size"]
            others = "".join(dict.fromkeys(board.replace(".", "").replace("A", "")))
            assert others == "BCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(others)]
            assert row["answer"]["moves"] >= 2
            assert not is_out(grid_of(board, size), size)


# --- rewards


@pytest.mark.parametrize(
    "text, key",
    [
        ("BD2,AR2", "BD2,AR2"),
        ("BD2 AR2", "BD2,AR2"),
        (" BD2, AR2\n", "BD2,AR2"),
        ("BD2\nAR2", "BD2,AR2"),
        ("Bv2,A>2", "BD2,AR2"),
        ("BD1,BD1,AR1,AR1", "BD2,AR2"),
        ("BD1 BD1 AR2", "BD2,AR2"),
        ("<think>AR2?</think><answer>BD2,AR2</answer>.", "BD2,AR2"),
        ("<answer>AR2</answer> no: <answer>BD2,AR2</answer>", "BD2,AR2"),
        ("<answer>BD2,AR2</answer> and <answer>AR", "BD2,AR2"),
    ],
)
def test_these_are_right(text, key):
    for answer in (ONE, "BD2,AR2", "Bv1 Bv1 A>2", {"solution": "BD2,AR2"}):
        assert rush_hour_exact(text, answer) == rush_hour.reward(text, answer, id="x") == 1.0
        assert mode(text, answer) == key


def test_a_board_may_be_given_by_lines_with_o_for_empty_and_x_for_a_wall():
    lines = {"board": "ooBo\nAABo\noooo\nCCoo", "solution": "BD2,AR2"}
    assert rush_hour_shaped("BD2,AR2", lines) == 1.0
    assert rush_hour_shaped("BD2", lines) == rush_hour_shaped("BD2", ONE)
    # B stops at the wall
    cells = ".....AAB....B............"
    walled = {"board": cells[:-3] + "x..", "size": 5, "solution": "BD1,AR3"}
    for answer, value in ((walled, 0.0), ({**walled, "board": cells}, 1.0)):
        assert rush_hour_shaped("BD1,AR3", answer) == 1.0
        assert rush_hour_shaped("BD2,AR3", answer) == value
        assert ("BD2,AR3" in modes(answer)) == bool(value)


@pytest.mark.parametrize("board", ["AA.x............", "AAx.............", ".AAx...B...B...."])
def test_a_board_whose_wall_keeps_a_in_is_an_error_of_the_row(board):
    with pytest.raises(ValueError, match="a wall keeps car A from the right edge"):
        rush_hour_exact("AR1", {"board": board, "size": 4, "moves": 1, "solution": "AR1"})
    rush_hour.read_board("xAA.............", 4)  # behind it


def test_any_shortest_solution_is_exact_with_a_board_and_only_the_known_one_without():
    for text in ("BD2,CD2,AR2", "CD2,BD2,AR2", "CD2,BD1,BD1,AR2"):
        assert rush_hour_exact(text, TWO) == rush_hour_shaped(text, TWO) == 1.0
    assert rush_hour_exact("BD1,CD2,BD1,AR2", TWO) == 0.0
    assert mode("CD2,BD1,BD1,AR2", TWO) == "CD2,BD2,AR2"
    assert rush_hour_exact("CD2,BD2,AR2", TWO["solution"]) == 0.0
    assert mode("CD2,BD2,AR2", TWO["solution"]) is None


def test_better_than_the_known_solution_is_right_too():
    long = {"board": ONE["board"], "size": 4, "solution": "BD1,BU1,BD2,AR2"}
    assert rush_hour_exact("BD2,AR2", long) == rush_hour_exact(long["solution"], long) == 1.0


def test_the_answer_s_moves_and_not_its_solution_say_what_is_shortest():
    wordy = {**ONE, "solution": "BD1,BU1,BD2,AR2"}
    for answer in (ONE, wordy, "BD2,AR2"):
        assert rush_hour_exact("BD2,AR2,AL1,AR1", answer) == 0.0


@pytest.mark.parametrize(
    "text, solve, prefix, progress",
    [
        ("BD2", 0, 1 / 2, 1 / 3),  # of 2 cells and 1 car in A's way the car has gone
        ("BD2,AR1", 0, 1 / 2, 2 / 3),
        ("BD2 AR1 AR1 AL1", 0, 1, 2 / 3),
        ("BD1", 0, 0, 0),
        ("BD2,BU2", 0, 1 / 2, 0),
        ("BD2,AR2,AL1,AR1", 2 / 4, 1, 1),
        ("BD2,AR2,AL1", 0, 1, 2 / 3),
        ("BD1,BU1,BD2,AR2", 2 / 4, 0, 1),
        ("BD2,AR1,CR0", 0, 0, 0),
        ("BD2,AR3", 0, 1 / 2, 1 / 3),
        # over the edge; merged it is the same move
        ("BD2,AR2,AR1", 0, 1 / 2, 1 / 3),
        ("BD2,AR2,CU1", 0, 1, 1),
        # solved, then illegal: no solve term
        ("BD2,AR2,ZU1", 0, 1, 1),
        ("AR2", 0, 0, 0),
        ("AR2,BD2", 0, 0, 0),
        ("AR1,AR1,BD2", 0, 0, 0),
        ("AL1", 0, 0, 0),
        ("BU1,BD2,AR2", 0, 0, 0),
        ("CU1,BD2,AR2", 0, 0, 0),
        ("CR2,BD1", 0, 0, 0),
        ("BR1", 0, 0, 0),
        ("", 0, 0, 0),
        ("none", 0, 0, 0),
        ("BD2,AR100", 0, 0, 0),
        ("BD2,aR2", 0, 0, 0),
        ("BD2,\N{FULLWIDTH LATIN CAPITAL LETTER A}R2", 0, 0, 0),
        ("BD2,AR\N{ARABIC-INDIC DIGIT ONE}", 0, 0, 0),
    ],
)
def test_the_parts_of_the_shaped_reward_by_hand(text, solve, prefix, progress):
    expected = 0.20 * solve + 0.10 * prefix + 0.05 * progress
    assert rush_hour_shaped(text, **ROW) == pytest.approx(expected, abs=1e-12)
    assert rush_hour_exact(text, **ROW) == 0.0
    assert mode(text, ONE) is None


def test_a_few_shaped_rewards_as_numbers():
    assert rush_hour_shaped("BD2,AR2", ONE) == 1.0
    assert rush_hour_shaped("BD2,AR2,AL1,AR1", ONE) == pytest.approx(0.25)
    assert rush_hour_shaped("BD2", ONE) == pytest.approx(0.05 + 0.05 / 3)
    assert rush_hour_shaped("BD2,AR2", {"solution": "BD2,AR2", "moves": 2, "board": ""}) == 0.75
    # further away than at the start: not less than 0
    assert rush_hour_shaped("AL1", {"board": "...B.AAB........", "solution": "BD2,AR1"}) == 0.0


@pytest.mark.parametrize(
    "text, value",
    [("BD2,AR2", 0.75), ("BD1 BD1 AR2", 0.75), ("BD2,AR1", 0.05), ("AR2,BD2", 0), ("CU1", 0)],
)
def test_without_a_board_the_shaped_reward_is_exact_and_prefix(text, value):
    assert rush_hour_shaped(text, "BD2,AR2") == value


def test_the_prefix_may_be_that_of_any_known_solution_and_keeps_the_order():
    progress = 1 - 3 / 4
    assert rush_hour_shaped("CD2", TWO) == pytest.approx(0.05 * progress)
    solutions = ["<answer>CD2,BD2,AR2</answer>", "junk"]
    value = rush_hour_shaped("CD2", TWO, solutions=solutions)
    assert value == pytest.approx(0.10 / 3 + 0.05 * progress)
    # the right moves in another order
    assert rush_hour_shaped("AR2,CD2,BD2", TWO, solutions=None) == 0.0


def test_only_shortest_solutions_reach_one_and_longer_ones_less_the_longer_they_are():
    values = [rush_hour_shaped("BD2,AR2" + ",AL1,AR1" * n, ONE) for n in range(100)]
    assert values[0] == 1.0
    assert values[1] == pytest.approx(0.25)
    assert values == sorted(values, reverse=True)
    assert values[-1] > 0.15


def test_moving_to_and_fro_earns_nothing():
    for n in range(100):
        assert rush_hour_shaped("BD1,BU1," * n + "BD1", ONE) == 0.0


def test_over_a_thousand_characters_are_no_answer():
    assert rush_hour_shaped("BD2,AR2" + ",AL1,AR1" * 200, ONE) == 0.0


def test_random_moves_stay_between_zero_and_one_and_only_exact_ones_reach_one():
    rng = random.Random(0)
    values = set()
    for row in random.Random(0).sample(all_rows("tiny"), 400):
        answer = row["answer"]
        grid = grid_of(answer["board"], 4)
        moves = []
        for _ in range(rng.randint(1, 4)):
            move, grid = rng.choice(next_boards(grid, 4))
            moves.append(move)
        text = ",".join(moves + ["AR1"] * rng.randint(0, 2))
        value = rush_hour_shaped(text, **row)
        exact = rush_hour_exact(text, **row)
        assert (exact == 1) == (mode(text, answer) in modes(answer))
        if exact:
            assert value == 1
        else:
            assert 0 <= value < 0.35
        values.add(value)
    assert {0.0, 1.0} <= values
    assert len(values) > 10


# --- hostile text


WRONG = [
    # other separators, something around the moves
    *", BD2;AR2 BD2.AR2 BD2AR2 BD2,AR2, ,BD2,AR2 BD2,AR2. [BD2,AR2]".split(),
    "",
    " ",
    "BD2 then AR2",
    "BD2,AR2 solves it",
    "1. BD2 2. AR2",
    # moves in another form
    *"bd2,ar2 Bd2,Ar2 B2D,A2R 2BD,2AR BD,AR2 vD2,AR2".split(),
    "BD 2,AR 2",
    "B D2,A R2",
    # other numbers
    *"BD02,AR2 BD0,BD2,AR2 BD2,AR2,AR0 BD+2,AR2 BD-2,AR2 BD2.0,AR2".split(),
    *"AR99999999999999 BD2,AR99999999999999 BD99,AR99".split(),
    # other scripts
    "BD\N{ARABIC-INDIC DIGIT TWO},AR2",
    "BD\N{FULLWIDTH DIGIT TWO},AR2",
    "BD\N{SUPERSCRIPT TWO},AR2",
    "\N{FULLWIDTH LATIN CAPITAL LETTER B}D2,AR2",
    "\N{CYRILLIC CAPITAL LETTER VE}D2,AR2",
    "B\N{DOWNWARDS ARROW}2,AR2",
    "BD2\N{NO-BREAK SPACE}AR2",
    "BD2\N{FULLWIDTH COMMA}AR2",
    "BD2\u2028AR2",
    "BD2\0AR2",
    "BD2,AR2\0",
    "\ud800BD2,AR2",
    "BD2,\udfffAR2",
    # no complete answer, or another one after it
    "<answer>BD2,AR2",
    "BD2,AR2</answer>",
    "<answer></answer>BD2,AR2",
    "<answer>BD2,AR2</answer><answer>AR2</answer>",
    "<ANSWER>BD2,AR2</ANSWER>",
    # long ones
    "AR" + "9" * 1_000_000,
    "BD2," * 250_000,
    "BD2,AR2" + " " * 1000 + "AL1",
    "BD2,AR2," * 100 + "AL1",
    "BD1,BU1," * 100 + "AR2",
    "AR1 " * 249 + "AR2",
    ", " * 500_000,
    "BD1," * 200 + "x",
    "BD1" + " " * 900 + "x",
    "BD1" + ", " * 400 + "!",
    "A" * 1_000_000,
    "\0" * 1_000_000,
    "\ud800" * 1_000_000,
    "<answer>" * 125_000,
    "</answer>" * 111_000,
    "<answer>BD2,AR2" * 70_000,
    "<answer>" + "BD2,AR2 " * 120_000 + "</answer>",
    "</answe" * 140_000,
]


# a deadline and no measure: see test_countdown.py
@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", WRONG, ids=lambda text: ascii(text[:24]))
def test_these_are_wrong_without_an_exception_and_soon(text):
    for answer in (ONE, "BD2,AR2"):
        assert rush_hour_exact(text, answer) == 0.0
        assert mode(text, answer) is None
    assert 0 <= rush_hour_shaped(text, **ROW) < 0.25


@pytest.mark.timeout(60)
def test_a_long_list_of_legal_moves_on_the_largest_boards_takes_little_time():
    row = max(all_rows("6x6"), key=lambda row: len(set(row["answer"]["board"])))
    first_move, _ = next_boards(grid_of(row["answer"]["board"], 6), 6)[0]
    car, direction, count = first_move
    back = {"U": "D", "D": "U", "L": "R", "R": "L"}[direction]
    text = ",".join([first_move, car + back + count] * 124)
    assert rush_hour_shaped(text, **row) < 0.1


def test_random_text_never_raises():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("AABBBDDRRUL12, \n.v>\0\ud800", k=rng.randint(0, 20)))
        assert 0 <= rush_hour_shaped(text, ONE) <= 1
        assert rush_hour_exact(text, ONE) == (mode(text, ONE) is not None)


# short of the edge, blocked, no such car, away again
UNSOLVED = ["BD2,AR1", "AR2", "BD2,ZU1,AR2", "BD2,AR2,AL1"]


@pytest.mark.parametrize(
    "answer, message",
    [
        ("42", "the answer '42' is not a list of moves like BD2,AR3"),
        (7, "the answer 7 is not a list of moves"),
        ("", "the answer '' is not"),
        ({**ONE, "board": "..B.AAB."}, "is not a board of 4 rows of 4 cells with a car A"),
        ({**ONE, "board": "..B.CCB.....DD.."}, "with a car A that lies in a row"),
        ({**ONE, "board": "..B.AAB.B..B.B.."}, "car B of the board .* is not one straight piece"),
        ({**ONE, "board": "..B.AA.C.....CC."}, "car B .* 2 or more cells"),
        ({**ONE, "board": "...AA..........."}, "car A of the board"),
        ({**ONE, "moves": "many"}, "many"),
        ({"board": "x"}, "the answer None is not a list of moves"),
        ({**ONE, "solution": "BD2,AR3"}, "'BD2,AR3' does not solve the board '..B.AAB.....CC..'"),
        *(({**ONE, "solution": moves}, f"'{moves}' does not solve") for moves in UNSOLVED),
    ],
    ids=repr,
)
def test_an_answer_that_cannot_be_read_is_an_error_that_names_it(answer, message):
    solution = str(answer.get("solution") if isinstance(answer, dict) else answer)
    for function in (rush_hour_exact, rush_hour_shaped, mode):
        for text in ("no moves at all", solution):
            with pytest.raises(ValueError, match=message):
                function(text, answer)


# --- splits


def in_reading_order(board: str) -> str:
    """The board with its cars named as draw() names them."""
    names = dict(zip(dict.fromkeys(".A" + board), ".ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    return "".join(names[car] for car in board)


def upside_down(board: str, size: int) -> str:
    rows = [board[i : i + size] for i in range(0, len(board), size)]
    return "".join(reversed(rows))


def class_of(row: dict) -> int:
    return rush_hour.class_key(row["answer"]["board"], row["answer"]["size"])


@pytest.mark.parametrize("config", CONFIGS)
def test_moves_other_letters_and_swapping_top_and_bottom_keep_the_class(config):
    rng = random.Random(0)
    for row in rush_hour.rows("train", 40, 0, config):
        board = row["answer"]["board"]
        size = row["answer"]["size"]
        key = class_of(row)
        _, grid = rng.choice(next_boards(grid_of(board, size), size))
        moved = text_of(grid)
        assert rush_hour.class_key(moved, size) == key
        assert rush_hour.class_key(upside_down(moved, size), size) == key
        assert rush_hour.class_key(in_reading_order(upside_down(board, size)), size) == key
        removed = board.replace(max(board), ".")
        assert rush_hour.class_key(removed, size) != key


def test_no_training_board_is_a_held_out_one_moved_or_mirrored():
    train = {row["answer"]["board"] for row in rush_hour.rows("train", -1, 0, "tiny")}
    assert all(in_reading_order(board) == board for board in train)
    for row in rush_hour.rows("test", 50, 0, "tiny"):
        todo = [row["answer"]["board"]]
        reached = set(todo)
        for board in todo:
            after = {text_of(grid) for _, grid in next_boards(grid_of(board, 4), 4)} - reached
            reached |= after
            todo += sorted(after)
        for board in reached:
            assert in_reading_order(board) not in train
            assert in_reading_order(upside_down(board, 4)) not in train


@pytest.mark.parametrize("config, train_count", [("6x6", 871), ("tiny", 4620)])
def test_the_splits_have_the_pinned_sizes_and_share_no_class(config, train_count):
    train = rush_hour.rows("train", -1, 0, config)
    test = rush_hour.rows("test", -1, 0, config)
    train_classes = {class_of(row) for row in train}
    test_classes = {class_of(row) for row in test}
    assert len(train) == train_count
    assert len(test) == len(test_classes) == 128
    assert not train_classes & test_classes


@pytest.mark.parametrize("config", CONFIGS)
def test_the_solutions_score_one_shaped_too(config):
    for row in all_rows(config)[::5]:
        assert all(rush_hour_shaped(text, **row) == 1.0 for text in row["solutions"])


@pytest.mark.parametrize("config", CONFIGS)
def test_prompts_show_the_board(config):
    for row in all_rows(config):
        assert row["answer"]["board"] in row["prompt"].replace("\n", "").replace("/", "")
        assert row["prompt"].replace("\n", " ").isprintable()
        assert row["prompt"].isascii()
        assert config != "tiny" or len(row["prompt"]) == 20
