"""tasks/: the pinned counts, modes against a naive search, hostile text, held-out problems."""

import json
import operator
import random
import subprocess
import sys
import time
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path

import pytest

from tasks import countdown, graph_coloring

ROOT = Path(__file__).resolve().parent.parent

VARIANTS = [(task, config) for task in (countdown, graph_coloring) for config in task.CONFIGS]
TEN = {"numbers": [2, 3, 4], "target": 10}
PATH = {"n": 3, "edges": [[0, 1], [1, 2]], "partial": "R.."}
ROW = {
    "answer": TEN,
    "id": "x",
    "task": "countdown",
    "prompt": "",
    "solutions": [],
    "num_modes": 2,
}  # what rewards.score passes on


def all_rows(task, config: str) -> list[dict]:
    return task.rows("train", -1, 0, config) + task.rows("test", -1, 0, config)


# --- countdown: the rules


def test_two_three_four_to_ten_has_exactly_two_modes():
    assert countdown.modes([2, 3, 4], 10) == {"2*3+4", "3*4-2"}


def test_problem_counts_are_the_pinned_ones():
    start = time.process_time()
    assert {c: len(countdown.problems(c)) for c in countdown.CONFIGS} == {
        "3": 787,
        "4": 5426,
        "tiny": 10745,
    }
    assert time.process_time() - start < 200


def test_exactly_256_problems_are_held_out_or_128_of_a_small_variant():
    assert {c: len(countdown.rows("test", -1, 0, c)) for c in countdown.CONFIGS} == {
        "3": 128,
        "4": 256,
        "tiny": 256,
    }


def test_order_of_operands_is_no_mode_but_grouping_is():
    assert (
        countdown.mode("4+3*2", TEN)
        == countdown.mode("2*3+4", TEN)
        == countdown.mode("((3) * 2) + 4", TEN)
        == "2*3+4"
    )
    nine = {"numbers": [2, 3, 4], "target": 9}
    assert (
        len(
            {
                countdown.mode(text, nine)
                for text in ("(2+3)+4", "2+(3+4)", "4+(3+2)", "2+3+4", "(4+2)+3")
            }
        )
        == 3
    )


@pytest.mark.parametrize(
    "text, numbers, target",
    [
        ("8/(3-8/3)", [3, 3, 8, 8], 24),
        ("(2+3-5)*7+9", [2, 3, 5, 7, 9], 9),
        ("2-3+4", [2, 3, 4], 3),
        ("12*2/3", [2, 3, 12], 8),
        ("2/3*12", [2, 3, 12], 8),
        ("2*(3-4)+12", [2, 3, 4, 12], 10),
    ],
)
def test_zero_negative_and_fractional_intermediates_are_fine(text, numbers, target):
    assert countdown.reward(text, {"numbers": numbers, "target": target}) == 1.0


def test_division_by_zero_is_wrong():
    assert countdown.reward("9/(2+3-5)", {"numbers": [2, 3, 5, 9], "target": 9}) == 0.0
    assert countdown.reward("2*3+4/(5-5)", {"numbers": [2, 3, 4, 5, 5], "target": 6}) == 0.0


def random_tree(rng: random.Random, numbers: list) -> tuple[str, Fraction | None, object]:
    """(fully parenthesised text with spaces, value or None, key as nested tuples): a second definition of everything."""
    if len(numbers) == 1:
        return str(numbers[0]), Fraction(numbers[0]), numbers[0]
    cut, op = rng.randrange(1, len(numbers)), rng.choice("+-*/")
    return combine(op, random_tree(rng, numbers[:cut]), random_tree(rng, numbers[cut:]))


def combine(op: str, left: tuple, right: tuple) -> tuple:
    (s, a, x), (t, b, y) = left, right
    undefined = a is None or b is None or (op == "/" and b == 0)
    value = (
        None
        if undefined
        else {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[op](
            a, b
        )
    )
    key = (op, frozenset([x, y]) if x != y else x) if op in "+*" else (op, x, y)
    return f"({s} {op} {t})", value, key


def naive_answers(numbers: list) -> list[tuple]:
    """Every (text, value, key), through postfix notation: push a number or combine the two on top, until all are used."""
    found, states = [], [((), tuple(numbers))]
    while states:
        stack, rest = states.pop()
        if not rest and len(stack) == 1:
            found.append(stack[0])
        for i, n in enumerate(rest):
            states.append(((*stack, (str(n), Fraction(n), n)), rest[:i] + rest[i + 1 :]))
        if len(stack) >= 2:
            states += [((*stack[:-2], combine(op, stack[-2], stack[-1])), rest) for op in "+-*/"]
    return [answer for answer in found if answer[1] is not None]


@pytest.mark.parametrize(
    "numbers",
    [[2, 3, 4], [1, 2, 12], [5, 5, 5], [2, 2, 4], [3, 6, 9], [7, 1, 20], [2, 3, 5, 6]],
    ids=str,
)
def test_modes_equals_a_naive_search_and_mode_maps_onto_it(numbers):
    texts = {}
    for text, value, key in naive_answers(numbers):
        texts.setdefault(value, {}).setdefault(
            key, text
        )  # one text of each tree is enough; random_tree tries the others
    for value, by_key in texts.items():
        if value.denominator == 1:
            target = int(value)
            found = {
                countdown.mode(text, {"numbers": numbers, "target": target})
                for text in by_key.values()
            }
            assert found == countdown.modes(numbers, target) and len(found) == len(by_key)
    assert countdown.modes(numbers, 10**9) == set()


def test_every_correct_random_expression_has_a_mode_that_is_in_modes():
    rng, found = random.Random(0), 0
    tables = {
        n: countdown.expressions(n) for n in [(2, 3, 4), (4, 7, 11), (2, 2, 3, 8), (5, 7, 9, 12)]
    }
    for _ in range(4000):
        numbers = rng.choice(list(tables))
        text, value, _ = random_tree(rng, rng.sample(numbers, len(numbers)))
        if value is None or value.denominator != 1:
            continue
        key = countdown.mode(
            f"<answer>{text}</answer>", {"numbers": list(numbers), "target": int(value)}
        )
        assert key in {text for text, _ in tables[numbers][value]}
        assert countdown.mode(key, {"numbers": list(numbers), "target": int(value)}) == key
        assert countdown.reward(text, {"numbers": list(numbers), "target": int(value) + 1}) == 0.0
        found += 1
    assert found > 1000


# --- hostile text


@pytest.mark.parametrize(
    "text",
    [
        "2*3+4",
        " 2*3+4\n",
        "(2*3)+4",
        "4 + 2*3",
        "<answer>2*3+4</answer>",
        "<think>4*5</think><answer>\n 3*4-2 \n</answer> bye",
        "<answer>1</answer> no: <answer>2*3+4</answer>",
        "<answer>2*3+4</answer> and <answer>",
        "<answer>2*3+4</answer> </answer>",
        "<answer><answer>2*3+4</answer>",
    ],
)
def test_these_are_right(text):
    assert countdown.reward(text, **ROW) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "10",
        "3*4",
        "2*3+4=10",
        "10=2*3+4",
        "2*3+4+0",
        "2*3+4*1",
        "2*3+2*2",
        "2*3-4",
        "2+3+4",  # wrong
        "<answer>2*3+4",
        "2*3+4</answer>",
        "<answer></answer>2*3+4",
        "<ANSWER>2*3+4</ANSWER>",
        "<answer>2*3+4</answer><answer>9</answer>",
        "-(2*3+4)",
        "+2*3+4",
        "2*3--4",
        "2*3+-(-4)",
        "2**3+4-2",
        "3**2+4",
        "4//2*3",
        "2*3+4//1",
        "2*3|4",
        "4<<2*3",
        "2*3@4",
        "24-3",
        "2.0*3+4",
        "2e0*3+4",
        "0x2*3+4",
        "02*3+4",
        "2_*3+4",
        "0_2*3+4",
        "2j*3+4",
        "2(3)+4",
        "2 3 4",
        "(2,3,4)",
        "[2*3+4]",
        "{2*3+4}",
        "\N{ARABIC-INDIC DIGIT TWO}*3+4",
        "２*3+4",
        "2×3+4",
        "2*3\u22124",
        "2*3+\N{SUPERSCRIPT FOUR}",
        "2\u200b*3+4",
        "2*3+4#",
        "2*3+4;",
        "2*3+4 # 10",
        "2*3\n+4",
        "2*3+\\\n4",
        "2*3\t+4",
        "2*3+4\0",
        "\0",
        "2*3\r+4",
        "2*3+4\ud800",
        "\udfff",
        "__import__('os').abort()",
        "(lambda:10)()",
        "2*3+4 if 1 else 0",
        "2*3+4or 9",
        "(",
        ")",
        "(2*3+4",
        "2*3+4)",
        "()",
        "2*()3+4",
        "(" * 10_000 + "2*3+4" + ")" * 10_000,
        "-" * 10_000 + "2*3+4",
        "(" * 50 + "2*3+4" + ")" * 51,
        "2*3+4" + " " * 100 + "(",
        "9**9**9**9",
        "1" * 1_000_000,
        "9" * 90 + "*2+3",
        "2*3+4+" * 200_000,
        "<answer>" * 125_000,
        "</answer>" * 111_000,
        "<answer>" + "a" * 1_000_000 + "</answer>",
        "<answer>2*3+4" * 70_000,
        "\0" * 1_000_000,
        "\ud800" * 1_000_000,
        "</answe" * 140_000,
        "answer>" * 140_000,
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_these_are_wrong_without_an_exception_and_soon(text):
    start = time.process_time()
    assert countdown.reward(text, **ROW) == 0.0
    assert graph_coloring.reward(text, PATH) == 0.0
    assert time.process_time() - start < 10


def test_random_text_never_raises():
    rng = random.Random(0)
    for _ in range(5000):
        text = "".join(
            rng.choices("223344+-*/() \n.,_=\0\ud800<answer></answer>", k=rng.randint(0, 40))
        )
        assert (
            countdown.reward(text, TEN) in (0.0, 1.0) and graph_coloring.reward(text, PATH) == 0.0
        )


@pytest.mark.filterwarnings("error")
def test_nothing_warns_about_odd_expressions():
    for text in ("2(3)+4", "2 (3) (4)", "(2)(3)(4)", "2*3+(4)()"):
        assert countdown.reward(text, TEN) == 0.0


def test_a_hundred_characters_of_parentheses_are_the_limit():
    assert countdown.reward("(" * 47 + "2*3+4" + ")" * 47, TEN) == 1.0
    assert countdown.reward("(" * 48 + "2*3+4" + ")" * 48, TEN) == 0.0


def test_a_thousand_solutions_and_random_formulas_are_told_apart():
    rows = countdown.rows("train", 1000, 0, "4")
    texts = [
        random_tree(random.Random(i), row["answer"]["numbers"])[0] if i % 2 else row["solutions"][0]
        for i, row in enumerate(rows)
    ]
    rewards = [countdown.reward(text, **row) for text, row in zip(texts, rows)]
    assert rewards[::2] == [1.0] * 500 and set(rewards[1::2]) == {0.0, 1.0}


# --- graph colouring


def test_modes_of_a_path_and_of_an_impossible_triangle():
    assert graph_coloring.modes(PATH) == {"RGR", "RGB", "RBR", "RBG"}
    assert (
        graph_coloring.modes({"n": 3, "edges": [[1, 0], [2, 1], [0, 2]], "partial": "RR."}) == set()
    )


@pytest.mark.parametrize("config", graph_coloring.CONFIGS)
def test_coloring_modes_and_mode_equal_trying_all_assignments(config):
    for row in graph_coloring.rows("train", 30, 1, config):
        answer = row["answer"]
        right = set()
        for colors in product("RGB", repeat=answer["n"]):
            proper = not any(colors[u] == colors[v] for u, v in answer["edges"])
            if proper and all(p in (".", c) for p, c in zip(answer["partial"], colors)):
                right.add("".join(colors))
            assert graph_coloring.mode("".join(colors), answer) == (
                "".join(colors) if "".join(colors) in right else None
            )
        assert graph_coloring.modes(answer) == right and row["num_modes"] == len(right)


@pytest.mark.parametrize(
    "text, value",
    [
        ("RGB", 1.0),
        (" RBR\n", 1.0),
        ("<think>BBB</think><answer>RGR</answer>", 1.0),
        ("<answer>RRR</answer><answer>RGB</answer>", 1.0),
        ("GRG", 0.0),
        ("RRG", 0.0),
        ("RG", 0.0),
        ("RGBR", 0.0),
        ("rgb", 0.0),
        ("R G B", 0.0),
        ("RG.", 0.0),
        ("ＲGB", 0.0),
        ("RGB" * 300_000, 0.0),
    ],
    ids=lambda x: ascii(x)[:24],
)
def test_a_coloring_keeps_the_given_colours_and_separates_neighbours(text, value):
    assert graph_coloring.reward(text, PATH, id="x", task="graph_coloring") == value


def test_renumbering_vertices_and_renaming_colours_keeps_the_class():
    rng = random.Random(0)
    for row in graph_coloring.rows("train", 50, 0, "tiny"):
        answer = row["answer"]
        order, names = (
            rng.sample(range(6), 6),
            dict(zip("RGB.", rng.choice(list(permutations("RGB"))) + (".",))),
        )
        partial = [""] * 6
        for v, c in enumerate(answer["partial"]):
            partial[order[v]] = names[c]
        other = {
            "n": 6,
            "edges": [(order[v], order[u]) for u, v in answer["edges"]],
            "partial": "".join(partial),
        }
        assert graph_coloring.class_key(other) == graph_coloring.class_key(answer)


def test_no_training_graph_is_a_held_out_one_in_disguise():
    for config in graph_coloring.CONFIGS:
        train, test = (
            [
                graph_coloring.class_key(row["answer"])
                for row in graph_coloring.rows(s, -1, 0, config)
            ]
            for s in ("train", "test")
        )
        assert (
            not set(train) & set(test) and len(set(test)) == len(test) == 256 and len(train) > 4000
        )


def test_tiny_prompts_are_short():
    assert max(len(row["prompt"]) for row in all_rows(countdown, "tiny")) <= 12
    assert max(len(row["prompt"]) for row in all_rows(graph_coloring, "tiny")) < 50


# --- both


@pytest.mark.parametrize("task, config", VARIANTS, ids=lambda x: getattr(x, "__name__", x))
def test_the_solutions_are_right_different_and_of_all_modes(task, config):
    rows = all_rows(task, config)
    assert all(task.reward(solution, **row) == 1.0 for row in rows for solution in row["solutions"])
    assert all(len(set(row["solutions"])) == len(row["solutions"]) for row in rows)
    for row in random.Random(0).sample(rows, 60):
        modes = task.modes(**row["answer"]) if task is countdown else task.modes(row["answer"])
        assert {
            task.mode(solution, row["answer"]) for solution in row["solutions"]
        } == modes and len(modes) == row["num_modes"]


@pytest.mark.parametrize("task, config", VARIANTS, ids=lambda x: getattr(x, "__name__", x))
def test_train_and_test_share_no_problem_and_seed_only_orders(task, config):
    def problem(row):
        return json.dumps(row["answer"])

    train, test = (task.rows(split, -1, 0, config) for split in ("train", "test"))
    assert not {problem(row) for row in train} & {problem(row) for row in test}
    ids = [row["id"] for row in train + test]
    assert len(set(ids)) == len(ids)
    again = task.rows("test", -1, 7, config)
    assert again != test and sorted(again, key=problem) == sorted(test, key=problem)
    assert task.rows("test", 5, 7, config) == again[:5]


def test_changing_a_row_does_not_change_the_next_caller_s():
    for task, config in VARIANTS:
        row = task.rows("test", 1, 0, config)[0]
        before = json.dumps(row)
        row["answer"].clear()
        assert json.dumps(task.rows("test", 1, 0, config)[0]) == before


def test_rows_are_the_same_in_every_process():
    script = (
        "import hashlib, json; from tasks import countdown as c, graph_coloring as g; "
        "rows = [t.rows(s, -1, 3, k) for t, k in ((c, '3'), (g, 'tiny')) for s in ('train', 'test')]; "
        "print(hashlib.sha256(json.dumps(rows).encode()).hexdigest())"
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
    assert len(outputs) == 1


@pytest.mark.parametrize("task", [countdown, graph_coloring], ids=lambda task: task.__name__)
def test_the_row_on_top_of_each_file_is_a_real_one(task):
    row = task.rows("test", 1, 0)[0]
    assert "".join(repr(row).split()) in "".join(task.__doc__.split())


@pytest.mark.parametrize(
    "task, names",
    [(countdown, "3, 4, tiny"), (graph_coloring, "small, tiny")],
    ids=["countdown", "graph_coloring"],
)
def test_errors_name_the_value_and_the_choices(task, names):
    with pytest.raises(ValueError, match=f"^config 'big' does not exist: choose one of {names}$"):
        task.rows("train", 1, 0, "big")
    with pytest.raises(
        ValueError, match=r"^split 'val' does not exist: choose one of train, test$"
    ):
        task.rows("val", 1, 0)
    with pytest.raises(ValueError, match=r"n=100000 rows asked for, but this split has [0-9]+ "):
        task.rows("test", 100_000, 0)
    with pytest.raises(ValueError, match="n=-2"):
        task.rows("test", -2, 0)
