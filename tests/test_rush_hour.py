"""tasks/rush_hour.py: boards replayed by a second simulator, shortest solutions against trying everything, each part of the shaped reward."""

import hashlib
import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tasks import rush_hour
from tasks.rush_hour import mode, modes, rush_hour_exact, rush_hour_shaped

ROOT = Path(__file__).resolve().parent.parent
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
            grid = one_cell(grid, move[0], move[1]) if grid else None
    return grid


def is_out(grid: dict | None, size: int) -> bool:
    return grid is not None and any(grid[row, size - 1] == "A" for row in range(size))


def next_boards(grid: dict, size: int) -> list[tuple[str, dict]]:
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
    """All solutions with the fewest moves, at most `depth`, by writing down every list of moves; nothing is remembered or left out."""
    level = [("", grid_of(board, size))]
    for _ in range(depth):
        level = [
            (f"{moves},{move}".strip(","), after)
            for moves, grid in level
            for move, after in next_boards(grid, size)
        ]
        solved = {moves for moves, grid in level if is_out(grid, size)}
        if solved:
            return solved
    return set()


# --- boards and their solutions


@pytest.mark.parametrize("config", CONFIGS)
def test_every_listed_solution_drives_a_out_and_has_the_stated_number_of_merged_moves(config):
    rows = random.Random(0).sample(all_rows(config), 300) + [
        row for row in all_rows(config) if row["answer"]["moves"] > 4
    ]
    for row in rows:
        answer = row["answer"]
        keys = {mode(text, answer) for text in row["solutions"]}
        assert (
            len(keys) == len(row["solutions"]) == row["num_modes"] <= 8
            and answer["solution"] in keys
        )
        for key in keys:
            moves = key.split(",")
            assert (
                is_out(drive(answer["board"], answer["size"], key), answer["size"])
                and len(moves) == answer["moves"]
            )
            assert all(a[0] != b[0] for a, b in pairwise(moves))  # no car moves twice in a row
            assert not is_out(
                drive(answer["board"], answer["size"], ",".join(moves[:-1])), answer["size"]
            )


@pytest.mark.parametrize("config, count", [("tiny", 40), ("6x6", 8)])
def test_the_solutions_are_those_that_trying_everything_finds(config, count):
    rows = [
        row for row in all_rows(config) if row["answer"]["moves"] <= (3 if config == "tiny" else 2)
    ]
    for row in random.Random(0).sample(rows, count):
        answer = row["answer"]
        found = try_everything(answer["board"], answer["size"], answer["moves"])
        assert {mode(text, answer) for text in row["solutions"]} == modes(answer) == found != set()


def test_the_search_agrees_with_trying_everything_on_any_small_board_solvable_or_not():
    rng, lengths = random.Random(1), set()
    for _ in range(80):
        board = rush_hour.draw(rng, 4, (8, 20))
        found = try_everything(board, 4, 3)
        everything = {
            rush_hour.write_moves(moves)
            for moves in rush_hour.shortest(rush_hour.read_board(board, 4), max_moves=3)
        }
        assert everything == found, board
        lengths.add(len(min(found).split(",")) if found else None)
    assert lengths == {None, 1, 2, 3}


def test_boards_with_more_than_eight_shortest_solutions_are_left_out_and_not_cut():
    full = [row for row in all_rows("tiny") + all_rows("6x6") if row["num_modes"] == 8]
    assert len(full) > 5 and all(
        modes(row["answer"]) == {mode(text, row["answer"]) for text in row["solutions"]}
        for row in full
    )


def test_modes_of_three_boards_by_hand():
    assert modes(ONE) == {"BD2,AR2"}
    assert modes(TWO) == {"BD2,CD2,AR2", "CD2,BD2,AR2"}
    assert modes({"board": "..B.AAB...B.....", "size": 4}) == set()  # B always stands in A's row


def test_play_agrees_with_the_second_simulator_on_random_moves():
    rng, legal = random.Random(2), 0
    for row in random.Random(0).sample(all_rows("tiny"), 300) + random.Random(0).sample(
        all_rows("6x6"), 100
    ):
        board, size = row["answer"]["board"], row["answer"]["size"]
        start = rush_hour.read_board(board, size)
        moves = [
            (rng.choice(start["letters"]), rng.choice("UDLR"), rng.randint(1, 3))
            for _ in range(rng.randint(1, 2))
        ]
        grid = drive(board, size, rush_hour.write_moves(moves))
        state, ok = rush_hour.play(start, moves)
        assert ok == (grid is not None)
        if ok:
            cells = [
                "".join(car for car, bits in zip(start["letters"], state) if bits >> size + i & 1)
                or "."
                for i in range(size * size)
            ]
            assert "".join(cells) == text_of(grid)
            legal += 1
    assert legal > 10


def test_letters_are_in_reading_order_and_a_is_blocked_at_the_start():
    for config in CONFIGS:
        for row in all_rows(config):
            board, size = row["answer"]["board"], row["answer"]["size"]
            others = "".join(dict.fromkeys(board.replace(".", "").replace("A", "")))
            assert others == "BCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(others)]
            assert row["answer"]["moves"] >= 2 and not is_out(grid_of(board, size), size)


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
        assert (
            rush_hour_exact(text, answer) == rush_hour.reward(text, answer, id="x") == 1.0
            and mode(text, answer) == key
        )


def test_a_board_may_be_given_by_lines_with_o_for_empty_and_x_for_a_wall():
    lines = {"board": "ooBo\nAABo\noooo\nCCoo", "solution": "BD2,AR2"}
    assert rush_hour_shaped("BD2,AR2", lines) == 1.0 and rush_hour_shaped(
        "BD2", lines
    ) == rush_hour_shaped("BD2", ONE)
    walled = {**ONE, "board": "..B.AAB.....CCx."}
    assert (
        rush_hour_shaped("BD2,AR1", walled) == 0.05 and rush_hour_shaped("BD2,AR1", ONE) > 0.08
    )  # B stops at the wall: the prefix alone
    assert modes(walled) == set()


def test_any_shortest_solution_is_exact_with_a_board_and_only_the_known_one_without():
    assert [
        rush_hour_exact(text, TWO)
        for text in ("BD2,CD2,AR2", "CD2,BD2,AR2", "CD2,BD1,BD1,AR2", "BD1,CD2,BD1,AR2")
    ] == [1, 1, 1, 0]
    assert [rush_hour_shaped(text, TWO) for text in ("BD2,CD2,AR2", "CD2,BD2,AR2")] == [1, 1]
    assert mode("CD2,BD1,BD1,AR2", TWO) == "CD2,BD2,AR2"
    assert (
        rush_hour_exact("CD2,BD2,AR2", TWO["solution"]) == 0.0
        and mode("CD2,BD2,AR2", TWO["solution"]) is None
    )
    long = {key: value for key, value in ONE.items() if key != "moves"} | {
        "solution": "BD1,BU1,BD2,AR2"
    }
    assert (
        rush_hour_exact("BD2,AR2", long) == rush_hour_exact(long["solution"], long) == 1.0
    )  # better than the known one is right too
    wordy = {
        **ONE,
        "solution": "BD1,BU1,BD2,AR2",
    }  # "moves", not this solution, says what is shortest
    assert (
        rush_hour_exact("BD2,AR2,AL1,AR1", ONE)
        == rush_hour_exact("BD2,AR2,AL1,AR1", wordy)
        == 0.0
        == rush_hour_exact("BD2,AR2,AL1,AR1", "BD2,AR2")
    )


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
        ("BD2,AR2,AR1", 0, 1 / 2, 1 / 3),  # over the edge; merged it is the same move
        ("BD2,AR2,CU1", 0, 1, 1),
        ("BD2,AR2,ZU1", 0, 1, 1),  # solved, then illegal: no solve term
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
    assert rush_hour_shaped(text, **ROW) == pytest.approx(
        0.20 * solve + 0.10 * prefix + 0.05 * progress, abs=1e-12
    )
    assert rush_hour_exact(text, **ROW) == 0.0 and mode(text, ONE) is None


def test_a_few_shaped_rewards_as_numbers():
    assert rush_hour_shaped("BD2,AR2", ONE) == 1.0
    assert rush_hour_shaped("BD2,AR2,AL1,AR1", ONE) == pytest.approx(0.25)
    assert rush_hour_shaped("BD2", ONE) == pytest.approx(0.05 + 0.05 / 3)
    assert [
        rush_hour_shaped(text, "BD2,AR2")
        for text in ("BD2,AR2", "BD1 BD1 AR2", "BD2,AR1", "AR2,BD2", "CU1")
    ] == [0.75, 0.75, 0.05, 0, 0]
    assert rush_hour_shaped("BD2,AR2", {"solution": "BD2,AR2", "moves": 2, "board": ""}) == 0.75
    assert (
        rush_hour_shaped("AL1", {"board": "...B.AAB........", "solution": "BD2,AR1"}) == 0.0
    )  # further away than at the start: not less than 0


def test_the_prefix_may_be_that_of_any_known_solution_and_keeps_the_order():
    assert rush_hour_shaped("CD2", TWO) == pytest.approx(0.05 * (1 - 3 / 4))
    assert rush_hour_shaped(
        "CD2", TWO, solutions=["<answer>CD2,BD2,AR2</answer>", "junk"]
    ) == pytest.approx(0.10 / 3 + 0.05 * (1 - 3 / 4))
    assert (
        rush_hour_shaped("AR2,CD2,BD2", TWO, solutions=None) == 0.0
    )  # the right moves in another order


def test_only_shortest_solutions_reach_one_and_longer_ones_less_the_longer_they_are():
    detour = ["BD2,AR2"] + ["BD2,AR2" + ",AL1,AR1" * n for n in range(1, 100)]
    values = [rush_hour_shaped(text, ONE) for text in detour]
    assert (
        values[0] == 1.0
        and values[1] == pytest.approx(0.25)
        and values == sorted(values, reverse=True)
        and values[-1] > 0.15
    )
    idle = ["BD1,BU1," * n + "BD1" for n in range(100)]
    assert all(
        rush_hour_shaped(text, ONE) == 0.0 for text in idle
    )  # moving to and fro earns nothing
    assert (
        rush_hour_shaped(",".join(["BD2", "AR2", *["AL1", "AR1"] * 200]), ONE) == 0.0
    )  # over 1,000 characters


def test_random_moves_stay_between_zero_and_one_and_only_exact_ones_reach_one():
    rng, values = random.Random(0), []
    for row in random.Random(0).sample(all_rows("tiny"), 400):
        moves, grid = [], grid_of(row["answer"]["board"], 4)
        for _ in range(rng.randint(1, 4)):
            move, grid = rng.choice(next_boards(grid, 4))
            moves.append(move)
        text = ",".join(moves + ["AR1"] * rng.randint(0, 2))
        value = rush_hour_shaped(text, **row)
        assert 0 <= value <= 1 and (value == 1) == (rush_hour_exact(text, **row) == 1) == (
            mode(text, row["answer"]) in modes(row["answer"])
        )
        assert value == 1 or value < 0.35
        values.append(value)
    assert 1.0 in values and 0.0 in values and len(set(values)) > 10


# --- hostile text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ",",
        "BD2;AR2",
        "BD2.AR2",
        "BD2AR2",
        "BD2,AR2,",
        ",BD2,AR2",
        "BD2,AR2.",
        "BD2 then AR2",
        "BD2,AR2 solves it",
        "1. BD2 2. AR2",
        "[BD2,AR2]",
        "bd2,ar2",
        "Bd2,Ar2",
        "BD 2,AR 2",
        "B D2,A R2",
        "BD02,AR2",
        "BD0,BD2,AR2",
        "BD2,AR2,AR0",
        "BD+2,AR2",
        "BD-2,AR2",
        "BD2.0,AR2",
        "B2D,A2R",
        "2BD,2AR",
        "BD,AR2",
        "BD\N{ARABIC-INDIC DIGIT TWO},AR2",
        "BD\N{FULLWIDTH DIGIT TWO},AR2",
        "BD\N{SUPERSCRIPT TWO},AR2",
        "\N{FULLWIDTH LATIN CAPITAL LETTER B}D2,AR2",
        "ВD2,AR2",
        "B\N{DOWNWARDS ARROW}2,AR2",
        "vD2,AR2",
        "BD2\N{NO-BREAK SPACE}AR2",
        "BD2\N{FULLWIDTH COMMA}AR2",
        "BD2\u2028AR2",
        "BD2\0AR2",
        "BD2,AR2\0",
        "\ud800BD2,AR2",
        "BD2,\udfffAR2",
        "<answer>BD2,AR2",
        "BD2,AR2</answer>",
        "<answer></answer>BD2,AR2",
        "<answer>BD2,AR2</answer><answer>AR2</answer>",
        "<ANSWER>BD2,AR2</ANSWER>",
        "AR99999999999999",
        "BD2,AR99999999999999",
        "BD99,AR99",
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
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_these_are_wrong_without_an_exception_and_soon(text):
    start = time.process_time()
    for answer in (ONE, "BD2,AR2"):
        assert rush_hour_exact(text, answer) == 0.0 and mode(text, answer) is None
    assert 0 <= rush_hour_shaped(text, **ROW) < 0.25
    assert time.process_time() - start < 10


def test_a_long_list_of_legal_moves_on_the_largest_boards_takes_little_time():
    row = max(all_rows("6x6"), key=lambda row: len(set(row["answer"]["board"])))
    board = row["answer"]["board"]
    move, back = next(
        (m, m[0] + "UDLR"["DURL".index(m[1])] + m[2:]) for m, _ in next_boards(grid_of(board, 6), 6)
    )
    text, start = ",".join([move, back] * 124), time.process_time()
    assert rush_hour_shaped(text, **row) < 0.1 and time.process_time() - start < 10


def test_random_text_never_raises():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("AABBBDDRRUL12, \n.v>\0\ud800", k=rng.randint(0, 20)))
        assert 0 <= rush_hour_shaped(text, ONE) <= 1 and rush_hour_exact(text, ONE) == (
            mode(text, ONE) is not None
        )


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
    ],
    ids=repr,
)
def test_an_answer_that_cannot_be_read_is_an_error_that_names_it(answer, message):
    for function in (rush_hour_exact, rush_hour_shaped, mode):
        with pytest.raises(ValueError, match=message):
            function("no moves at all", answer)


# --- splits


def in_reading_order(board: str) -> str:
    names = dict(zip(dict.fromkeys(".A" + board), ".ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    return "".join(names[car] for car in board)


def upside_down(board: str, size: int) -> str:
    return "".join(board[i : i + size] for i in range(len(board) - size, -1, -size))


def test_moves_other_letters_and_swapping_top_and_bottom_keep_the_class():
    rng = random.Random(0)
    for config in CONFIGS:
        for row in rush_hour.rows("train", 40, 0, config):
            board, size = row["answer"]["board"], row["answer"]["size"]
            key = rush_hour.class_key(board, size)
            moved = text_of(rng.choice(next_boards(grid_of(board, size), size))[1])
            assert (
                rush_hour.class_key(moved, size)
                == rush_hour.class_key(upside_down(moved, size), size)
                == key
            )
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
        assert (
            not {in_reading_order(b) for board in reached for b in (board, upside_down(board, 4))}
            & train
        )


@pytest.mark.parametrize("config, train_count", [("6x6", 871), ("tiny", 4620)])
def test_the_splits_have_the_pinned_sizes_and_share_no_class(config, train_count):
    train, test = (rush_hour.rows(split, -1, 0, config) for split in ("train", "test"))
    keys = [
        [rush_hour.class_key(row["answer"]["board"], row["answer"]["size"]) for row in rows]
        for rows in (train, test)
    ]
    assert (
        len(train) == train_count
        and len(test) == len(set(keys[1])) == 128
        and not set(keys[0]) & set(keys[1])
    )
    assert len({row["id"] for row in train + test}) == len(train + test)
    again = rush_hour.rows("test", -1, 7, config)
    assert (
        again != test
        and sorted(again, key=json.dumps) == sorted(test, key=json.dumps)
        and rush_hour.rows("test", 5, 7, config) == again[:5]
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_the_solutions_score_one_and_prompts_show_the_board(config):
    for i, row in enumerate(all_rows(config)):
        assert all(rush_hour.reward(text, **row) == 1.0 for text in row["solutions"])
        assert i % 5 or all(rush_hour_shaped(text, **row) == 1.0 for text in row["solutions"])
        shown = row["prompt"].replace("\n", "").replace("/", "")
        assert (
            row["answer"]["board"] in shown
            and row["prompt"].replace("\n", " ").isprintable()
            and row["prompt"].isascii()
        )
        assert config != "tiny" or len(row["prompt"]) == 20


def test_rows_are_the_same_in_every_process():
    script = (
        "import hashlib, json; from tasks import rush_hour as t; t.CONFIGS['tiny']['count'] = 500; t.CONFIGS['6x6']['count'] = 140; "
        "rows = [t.rows(s, -1, 3, c) for c in t.CONFIGS for s in ('train', 'test')]; print(hashlib.sha256(json.dumps(rows).encode()).hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop().strip()) == 2 * hashlib.sha256().digest_size


def test_changing_a_row_does_not_change_the_next_caller_s():
    row = rush_hour.rows("test", 1, 0, "tiny")[0]
    before = json.dumps(row)
    row["answer"].clear()
    row["solutions"].clear()
    assert json.dumps(rush_hour.rows("test", 1, 0, "tiny")[0]) == before


def test_the_row_on_top_of_the_file_is_a_real_one():
    assert "".join(repr(rush_hour.rows("test", 1, 0)[0]).split()) in "".join(
        rush_hour.__doc__.split()
    )


def test_errors_name_the_value_and_the_choices():
    with pytest.raises(ValueError, match=r"^config 'big' does not exist: choose one of 6x6, tiny$"):
        rush_hour.rows("train", 1, 0, "big")
    with pytest.raises(
        ValueError, match=r"^split 'val' does not exist: choose one of train, test$"
    ):
        rush_hour.rows("val", 1, 0)
    with pytest.raises(ValueError, match="n=129 rows asked for, but this split has 128 "):
        rush_hour.rows("test", 129, 0, "tiny")
