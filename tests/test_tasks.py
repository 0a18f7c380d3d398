"""tasks/: what every task promises of its rows; what it promises alone is in a file of its own."""

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tasks
from checks import FLAGS
from common import load_config, own_flags
from tasks import between, countdown, crossword, graph_coloring, rush_hour

ROOT = Path(__file__).resolve().parent.parent
TASKS = [between, countdown, graph_coloring, crossword, rush_hour]
VARIANTS = [(task, config) for task in TASKS for config in task.CONFIGS]


def name_of(parameter) -> str:
    """The id of a test's parameter: a task or a variant."""
    return getattr(parameter, "__name__", str(parameter))


def all_rows(task, config: str) -> list[dict]:
    return task.rows("train", -1, 0, config) + task.rows("test", -1, 0, config)


def modes_of(task, row: dict) -> set[str]:
    """All modes of a row's problem."""
    if task is crossword:
        return {row["answer"]["answer"].replace(" ", "")}
    if task is countdown:
        return task.modes(**row["answer"])
    return set(task.modes(row["answer"]))


def test_every_task_has_rows_and_a_reward_and_ours_a_mode():
    ours = {"between", "countdown", "crossword", "graph_coloring", "rush_hour", "sentence"}
    assert ours <= set(tasks.NAMES)
    for name in tasks.NAMES:  # a user's own are among them
        task = tasks.module(name)
        assert task.__name__ == f"tasks.{name}"
        assert callable(task.rows) and callable(task.reward)
        assert name not in ours or callable(task.mode)


@pytest.mark.parametrize("name", ["__init__", "mathematics", "poetry", ""])
def test_a_file_without_rows_is_no_task(name):
    assert name not in tasks.NAMES
    assert tasks.module(name) is None


@pytest.mark.parametrize(
    "name, text, is_one",
    [
        ("first.py", "def rows(split, n, seed):", True),
        ("later.py", "# words\n\ndef rows(split, n, seed):", True),
        ("inner.py", "class A:\n    def rows(self):", False),
        ("binary.py", "\udcff", False),
        ("._mac.py", "def rows(split, n, seed):", False),
        (".#emacs.py", None, False),
    ],
)
def test_a_task_is_a_file_that_defines_rows_and_not_what_an_editor_leaves(
    name, text, is_one, tmp_path
):
    path = tmp_path / name
    if text is None:
        path.symlink_to("user@host.1234:1")  # leads nowhere
    else:
        path.write_text(text, errors="surrogateescape")
    assert tasks.is_task(path) == is_one


ALL = pytest.param(100_000, marks=pytest.mark.slow)  # a variant has up to 12,000 rows


@pytest.mark.parametrize("most", [300, ALL])
@pytest.mark.parametrize("task, config", VARIANTS, ids=name_of)
def test_the_solutions_are_right_different_and_of_all_modes(task, config, most):
    rows = all_rows(task, config)
    for row in random.Random(1).sample(rows, min(len(rows), most)):
        assert len(set(row["solutions"])) == len(row["solutions"])
        for solution in row["solutions"]:
            assert task.reward(solution, **row) == 1.0
    for row in random.Random(0).sample(rows, 60):
        modes = modes_of(task, row)
        assert {task.mode(solution, row["answer"]) for solution in row["solutions"]} == modes
        assert len(modes) == row["num_modes"]


def problems_of(rows: list[dict]) -> set[str]:
    return {json.dumps(row["answer"]) for row in rows}


@pytest.mark.parametrize("task, config", VARIANTS, ids=name_of)
def test_train_and_test_share_no_problem(task, config):
    train = task.rows("train", -1, 0, config)
    test = task.rows("test", -1, 0, config)
    assert not problems_of(train) & problems_of(test)
    ids = {row["id"] for row in train + test}
    assert len(ids) == len(train + test)


@pytest.mark.parametrize("task, config", VARIANTS, ids=name_of)
def test_seed_only_orders(task, config):
    first = task.rows("test", -1, 0, config)
    second = task.rows("test", -1, 7, config)
    assert second != first
    assert sorted(second, key=json.dumps) == sorted(first, key=json.dumps)
    assert task.rows("test", 5, 7, config) == second[:5]


@pytest.mark.parametrize("task, config", VARIANTS, ids=name_of)
def test_changing_a_row_does_not_change_the_next_caller_s(task, config):
    row = task.rows("test", 1, 0, config)[0]
    before = json.dumps(row)
    for value in row["answer"].values():
        if isinstance(value, list):
            value.clear()
    row["answer"].clear()
    row["solutions"].clear()
    assert json.dumps(task.rows("test", 1, 0, config)[0]) == before


# variants that take little time, and how many problems of them: enough to tell
FEW = {
    "between": {"tens": None},
    "countdown": {"3": None},
    "graph_coloring": {"tiny": 2000},
    "crossword": {"words": None, "tiny": None},
    "rush_hour": {"6x6": 140, "tiny": 500},
}
HASH_OF_ROWS = """
import hashlib, importlib, json, sys
task = importlib.import_module(sys.argv[1])
rows = []
for config, count in json.loads(sys.argv[2]).items():
    if count:
        task.CONFIGS[config]["count"] = count
    for split in ("train", "test"):
        rows += task.rows(split, -1, 3, config)
assert len(rows) > 400
print(hashlib.sha256(json.dumps(rows).encode()).hexdigest())
"""


@pytest.mark.parametrize("task", FEW)
def test_rows_are_the_same_in_every_process(task):
    outputs = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", HASH_OF_ROWS, f"tasks.{task}", json.dumps(FEW[task])],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(done.stdout.strip())
    assert len(outputs) == 1
    assert len(outputs.pop()) == 64  # hexadecimal digits of a SHA-256


@pytest.mark.parametrize("task", TASKS, ids=name_of)
def test_the_row_on_top_of_each_file_is_a_real_one(task):
    row = task.rows("test", 1, 0)[0]
    # but for where the docstring's lines end
    assert "".join(repr(row).split()) in "".join(task.__doc__.split())


@pytest.mark.parametrize(
    "task, configs",
    [
        (between, "tens"),
        (countdown, "3, 4, tiny"),
        (graph_coloring, "small, tiny"),
        (crossword, "words, tiny"),
        (rush_hour, "6x6, tiny"),
    ],
    ids=name_of,
)
def test_errors_name_the_value_and_the_choices(task, configs):
    with pytest.raises(ValueError, match=f"^config 'big' does not exist: choose one of {configs}$"):
        task.rows("train", 1, 0, "big")
    with pytest.raises(
        ValueError, match=r"^split 'val' does not exist: choose one of train, test$"
    ):
        task.rows("val", 1, 0)
    size = len(task.rows("test", -1, 0))
    message = f"^n={size + 1} rows asked for, but this split has {size} "
    with pytest.raises(ValueError, match=message):
        task.rows("test", size + 1, 0)
    with pytest.raises(ValueError, match="n=-2"):
        task.rows("test", -2, 0)


def test_the_readmes_own_task_and_its_commands_hold_together():
    """A warm start that leaves something to learn, and a training that shows it."""
    section = (ROOT / "README.md").read_text().split("## Your own task")[1].split("\n## ")[0]
    code, commands = re.findall(r"```\w*\n(.*?)```", section, re.DOTALL)
    own = {}
    exec(code, own)
    train, test = own["rows"]("train", -1, 0), own["rows"]("test", -1, 0)
    assert train and test and not {row["id"] for row in train} & {row["id"] for row in test}
    for row in [*train, *test]:
        assert [own["reward"](text, row["answer"]) for text in row["solutions"]] == [1]
    warm, rl = (
        shlex.split(line) for line in commands.replace("\\\n", " ").splitlines() if line.strip()
    )
    assert (warm[:2], rl[:2]) == (["python", "sft.py"], ["python", "train.py"])
    flags, rest = own_flags(warm[2:], FLAGS["sft"])
    config = load_config(rl[2:])
    assert config["model"] == load_config(rest)["output_dir"]
    assert flags["steps"] <= 80  # after 200 a share of .98 is right, and RL shows nothing
    assert 0 < config["eval_steps"] < config["max_steps"]
    longest = max(len(row["answer"]) for row in train)
    assert config["max_completion_length"] > longest
