"""tasks/graph_coloring.py: modes against all assignments, classes of graphs, hostile text."""

import random
from itertools import permutations, product

import pytest
from test_countdown import WRONG

from tasks import graph_coloring

PATH = {"n": 3, "edges": [[0, 1], [1, 2]], "partial": "R.."}


def test_modes_of_a_path_and_of_an_impossible_triangle():
    assert graph_coloring.modes(PATH) == {"RGR", "RGB", "RBR", "RBG"}
    triangle = {"n": 3, "edges": [[1, 0], [2, 1], [0, 2]], "partial": "RR."}
    assert graph_coloring.modes(triangle) == set()


def is_right(colors: str, answer: dict) -> bool:
    for u, v in answer["edges"]:
        if colors[u] == colors[v]:
            return False
    return all(given in (".", color) for given, color in zip(answer["partial"], colors))


@pytest.mark.parametrize("config", graph_coloring.CONFIGS)
def test_coloring_modes_and_mode_equal_trying_all_assignments(config):
    for row in graph_coloring.rows("train", 30, 1, config):
        answer = row["answer"]
        right = set()
        for letters in product("RGB", repeat=answer["n"]):
            colors = "".join(letters)
            if is_right(colors, answer):
                right.add(colors)
                assert graph_coloring.mode(colors, answer) == colors
            else:
                assert graph_coloring.mode(colors, answer) is None
        assert graph_coloring.modes(answer) == right
        assert row["num_modes"] == len(right)


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
        ("\N{FULLWIDTH LATIN CAPITAL LETTER R}GB", 0.0),
        ("RGB" * 300_000, 0.0),
    ],
    ids=lambda x: ascii(x)[:24],
)
def test_a_coloring_keeps_the_given_colours_and_separates_neighbours(text, value):
    assert graph_coloring.reward(text, PATH, id="x", task="graph_coloring") == value


# a deadline and no measure: see test_countdown.py
@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", WRONG, ids=lambda text: ascii(text[:24]))
def test_these_are_wrong_without_an_exception_and_soon(text):
    assert graph_coloring.reward(text, PATH) == 0.0


def test_random_text_never_raises():
    rng = random.Random(0)
    for _ in range(5000):
        length = rng.randint(0, 40)
        text = "".join(rng.choices("223344+-*/() \n.,_=\0\ud800<answer></answer>", k=length))
        assert graph_coloring.reward(text, PATH) == 0.0


# --- problems


def test_tiny_prompts_are_short():
    rows = graph_coloring.rows("train", -1, 0, "tiny") + graph_coloring.rows("test", -1, 0, "tiny")
    assert max(len(row["prompt"]) for row in rows) < 50


def test_renumbering_vertices_and_renaming_colours_keeps_the_class():
    rng = random.Random(0)
    color_orders = list(permutations("RGB"))
    for row in graph_coloring.rows("train", 50, 0, "tiny"):
        answer = row["answer"]
        order = rng.sample(range(6), 6)
        names = dict(zip("RGB.", (*rng.choice(color_orders), ".")))
        partial = [""] * 6
        for v, color in enumerate(answer["partial"]):
            partial[order[v]] = names[color]
        edges = [(order[v], order[u]) for u, v in answer["edges"]]
        other = {"n": 6, "edges": edges, "partial": "".join(partial)}
        assert graph_coloring.class_key(other) == graph_coloring.class_key(answer)


@pytest.mark.parametrize("config", graph_coloring.CONFIGS)
def test_no_training_graph_is_a_held_out_one_in_disguise(config):
    train_rows = graph_coloring.rows("train", -1, 0, config)
    test_rows = graph_coloring.rows("test", -1, 0, config)
    train = {graph_coloring.class_key(row["answer"]) for row in train_rows}
    test = {graph_coloring.class_key(row["answer"]) for row in test_rows}
    assert not train & test
    assert len(test) == len(test_rows) == 256
    assert len(train_rows) > 4000


@pytest.mark.parametrize(
    "answer",
    [
        {"n": "3", "edges": [[0, 1]], "partial": "..."},
        {"n": 3, "edges": [[0, -1]], "partial": "..."},
        {"n": 3, "edges": [[0, 3]], "partial": "..."},
        {"n": 3, "edges": [[0, 1, 2]], "partial": "..."},
        {"n": 3, "edges": [[0, 1]], "partial": "."},
        {"n": 3.5, "edges": [[0, 1]], "partial": "..."},
        {"n": 0, "edges": [], "partial": ""},
        {"n": 3.0, "edges": [[0.0, 1.0]], "partial": "..."},
        {"n": 3, "edges": [[False, True]], "partial": "..."},
        {"n": 3, "edges": [[0, 0]], "partial": "..."},
        {"n": 3, "edges": [[0, 1]], "partial": "r.."},
        {"n": 3, "edges": [[0, 1]], "partial": ".. "},
        {"n": 3, "edges": [[0, 1]], "partial": None},
        {"n": 3},
        "RGB",
    ],
)
def test_an_answer_that_nothing_could_match_is_an_error_and_not_0(answer):
    for text in ("1", "RGB"):
        with pytest.raises(ValueError, match=r"^graph_coloring: the answer must"):
            graph_coloring.reward(text, answer)


def test_a_whole_number_of_vertices_may_be_written_as_a_float():
    assert graph_coloring.reward("RGB", {**PATH, "n": 3.0}) == 1.0
