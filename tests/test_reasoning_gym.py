"""tasks/reasoning_gym.py: rows and scores of a library, and graders that are not trusted."""

import ast
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import reasoning_gym
from deadlines import PATIENCE
from exact_matrix import ROOT
from reasoning_gym.factory import DATASETS
from reward_tools import LEGS, config, functions_for, measured, row_of
from row_files import check_words, load, refusal

import scoring
from common import UserError, load_config
from tasks import reasoning_gym as task

LIBRARY = Path(reasoning_gym.__file__).parent
TEN = '{"leg_counting": {"max_animals": 4, "size": 10}}'
SPIDERS = {"problem": "leg_counting", "settings": {}, "entry": LEGS}


# --- which graders are not trusted

# what may run a text as code, or leads to something that may
CALLS = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "parse_latex"}
CALLS |= {"literal_eval"}
MODULES = {"sympy", "pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "numexpr"}
MODULES |= {"os", "subprocess", "pty", "ctypes", "importlib", "runpy", "code", "builtins"}
MODULES |= {"socket", "urllib", "requests", "httpx"}
# files of the installed version that use some of it on no model's text and no row, as somebody has
# read
READ = {
    "algebra/polynomial_equations.py": "sympy makes the problem; answers go through float",
    "algebra/simple_equations.py": "sympy makes the problem; answers are compared as texts",
    "arithmetic/basic_arithmetic.py": "eval makes the problem",
    "arithmetic/gsm_symbolic/generators_00_49.py": "eval makes the problem",
    "arithmetic/gsm_symbolic/generators_50_99.py": "eval makes the problem",
    "coaching/curriculum_config.py": "yaml reads files that are given by name, which are none here",
    "code/bf.py": "a compiler of a toy language makes the problem",
    "code/codeio.py": "exec of programs that come with the library makes the problem",
    "code/contrib/bfit/BF-it.py": "that compiler",
    "code/contrib/bfit/Compiler/Compiler.py": "that compiler",
    "composite.py": "yaml, as above, and refused",
    "data/__init__.py": "finds the library's own files",
    "geometry/advanced_geometry.py": "sympy makes the problem; answers go through float",
    "logic/propositional_logic.py": "a parser of its own, of five signs",
}


def suspects(path: Path) -> set[str]:
    """What of CALLS and MODULES a file uses."""
    named = set()
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            named.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "re":  # re.compile
            named.add(node.attr)
        elif isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {alias.name for alias in node.names}
            if not node.level:  # "from .os" is a file of its own
                imported.add(node.module.split(".")[0])
    return named & CALLS | imported & MODULES


def test_no_file_of_the_installed_version_may_run_a_text_that_nobody_has_read():
    found = set()
    for path in LIBRARY.rglob("*.py"):
        if suspects(path):
            found.add(path.relative_to(LIBRARY).as_posix())
    refused = {path for path in found if Path(path).stem in task.REFUSED}
    assert found - refused - set(READ) == set(), "read these graders, then refuse them or say why"
    assert set(READ) - found == set(), "these do so no more"
    for name, why in task.REFUSED.items():
        if why in (task.EVAL, task.PARSER, task.ROW):
            assert name in {Path(path).stem for path in refused}, f"{name} does so no more"


def test_every_refused_task_is_in_the_library_and_told_why():
    assert set(task.REFUSED) <= set(DATASETS)
    for name, why in task.REFUSED.items():
        check_words(refusal(load, "reasoning_gym", config=name), repr(name), "is refused", why)
        check_words(refusal(load, "reasoning_gym", config=str({name: {}})), repr(name), why)


def test_the_pin_is_the_version_whose_graders_were_read():
    version = importlib.metadata.version("reasoning_gym")
    for name in ("requirements.txt", "requirements-cpu.txt"):
        assert f"reasoning_gym=={version}" in (ROOT / name).read_text().splitlines()


@pytest.mark.parametrize("name", ["countdown", "n_queens", "game_of_life_halting"])
def test_a_row_of_somebodys_data_can_not_name_a_refused_task(name, tmp_path):
    mark = tmp_path / "ran"
    answer = {"problem": name, "settings": {}, "entry": LEGS}
    with pytest.raises(ValueError, match="is refused"):
        task.reward(f"__import__('os').system('touch {mark}')", answer)
    assert not mark.exists()


@pytest.mark.parametrize("name, text", [("bitwise_arithmetic", "1"), ("number_sorting", '["1"]')])
def test_nor_does_a_row_run_as_code(name, text, tmp_path):
    """These two graders call eval on what the row, not the model, has written."""
    mark = tmp_path / "ran"
    code = f"__import__('os').system('touch {mark}')"
    entry = {"question": "", "answer": code, "metadata": {"problem": code}}
    grader = DATASETS[name][0](DATASETS[name][1](size=1, seed=0))
    grader.score_answer(text, entry)
    assert mark.exists(), "it does so no more"
    mark.unlink()
    with pytest.raises(ValueError, match="is refused"):
        task.reward(text, {"problem": name, "settings": {}, "entry": entry})
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DATASETS) - set(task.REFUSED)))
def test_no_text_is_right_whatever_the_problem(name):
    """Training would find it: coin_flip took 0 for any probability."""
    rows = task.rows("test", 8, 0, str({name: {}}))
    for text in ("", "0", "1", "-1", "yes", "[]", "{}", "a"):
        scores = [task.reward(text, **row) for row in rows]
        assert min(scores) < 1.0, f"{text!r} is right for {len(scores)} problems"


# --- rows


def test_rows_are_the_librarys_problems_and_its_answers_are_right():
    rows = load("reasoning_gym", config=TEN)
    assert len(rows) == 10
    for row in rows:
        assert row["id"].startswith("leg_counting/train/")
        assert row["task"] == "reasoning_gym"
        assert "how many legs" in row["prompt"]
        (solution,) = row["solutions"]
        assert task.reward(solution, **row) == 1.0
        assert task.reward(f"5 <answer>{solution}</answer> 6", **row) == 1.0
        assert task.reward(f"{solution}0", **row) < 1.0
        assert task.mode(f" <answer>\n{solution} </answer>", row["answer"]) == solution


def test_the_held_out_problems_are_of_another_seed_and_none_of_them_is_trained_on():
    # so small that both splits meet the same problems again and again
    few = "{'leg_counting': {'max_animals': 3, 'max_instances': 1, 'size': 400}}"
    train = load("reasoning_gym", config=few)
    test = load("reasoning_gym", config=few, split="test")
    asked = [row["prompt"] for row in train + test]
    assert len(set(asked)) == len(asked)
    assert len({row["id"] for row in train + test}) == len(asked)
    assert 100 < len(test) <= task.HELD_OUT
    # problem i of a seed is problem 0 of seed + i
    assert task.SEEDS["test"] - task.SEEDS["train"] > 10**9


def test_the_seed_of_a_run_only_orders_the_problems():
    first = task.rows("test", -1, 0, TEN)
    second = task.rows("test", -1, 7, TEN)
    assert first != second
    assert sorted(map(str, first)) == sorted(map(str, second))
    assert task.rows("test", 5, 7, TEN) == second[:5]


def test_several_tasks_with_settings_of_their_own():
    wanted = {"leg_counting": {"size": 6}, "chain_sum": {"size": 4, "min_terms": 5}}
    rows = load("reasoning_gym", config=str(wanted))
    problems = [row["answer"]["problem"] for row in rows]
    assert sorted(problems) == ["chain_sum"] * 4 + ["leg_counting"] * 6
    for row in rows:
        assert row["answer"]["settings"] == wanted[row["answer"]["problem"]]
        assert task.reward(row["solutions"][0], **row) == 1.0


@pytest.mark.parametrize(
    "wanted, words",
    [
        ("", ["'' does not exist", "leg_counting"]),
        ("legs", ["'legs' does not exist", "leg_counting"]),
        ("{'legs': {}}", ["'legs' does not exist"]),
        ("{}", ["must be the name of a task or"]),
        ("{'leg_counting': 5}", ["must be the name of a task or"]),
        ("{'leg_counting': {1, 2}}", ["must be the name of a task or"]),
        ("{'leg_counting'", ["must be the name of a task or"]),
        ("{" * 9999, ["must be the name of a task or"]),
        ("{__import__('os').getcwd(): {}}", ["must be the name of a task or"]),
        ("{'leg_counting': {'animals': 5}}", ["'animals'", "its settings are", "max_animals"]),
        ("{'leg_counting': {'max_animals': 0}}", ["max_animals must be"]),
        ("{'leg_counting': {'max_animals': '5'}}", ["'leg_counting'", "TypeError"]),
        ("{'leg_counting': {'max_instances': 2.5}}", ["problem 0 can't be made"]),
        ("{'leg_counting': {'seed': 5}}", ["seed can't be set"]),
        ("{'leg_counting': {'size': 0}}", ["size=0"]),
        ("{'leg_counting': {'size': True}}", ["size=True"]),
        (
            "{'leg_counting': {'max_animals': 1, 'min_animals': 1, 'max_instances': 1, 'size': 3}}",
            ["all of its training problems", "held-out"],
        ),
    ],
)
def test_a_config_that_names_no_task_is_one_sentence(wanted, words):
    check_words(refusal(load, "reasoning_gym", config=wanted), "'reasoning_gym'", *words)


def test_a_config_may_be_a_dict_of_settings(tmp_path):
    source = {"name": "reasoning_gym", "config": {"leg_counting": {"size": 5}}}
    (tmp_path / "mine.py").write_text(f"dataset = {source}\n")
    in_a_file = load_config([str(tmp_path / "mine.py")])
    flags = ["--dataset.name=reasoning_gym", "--dataset.config={'leg_counting': {'size': 5}}"]
    assert in_a_file["dataset"] == load_config(flags)["dataset"]
    assert len(load(**in_a_file["dataset"])) == 5
    check_words(refusal(load, "countdown", config="{'tiny': {}}"), "countdown", "does not exist")
    with pytest.raises(UserError, match="must be text"):
        load_config([f"--dataset={ {'name': 'a', 'config': {'b': b'c'}} }"])


# --- scores


@pytest.mark.usefixtures("reward_folder")
def test_its_own_score_is_the_reward_in_the_workers():
    row = row_of("reasoning_gym", SPIDERS)
    texts = ["46", "<answer>46</answer>", "it is 46", "12", ""]
    values, failed = measured(texts, row, config("reasoning_gym"))
    assert values == [1.0, 1.0, pytest.approx(2 / 8), 0.0, 0.0]
    assert not failed


def test_a_grader_that_raises_at_a_text_calls_it_wrong_and_one_that_can_not_read_the_row_fails():
    (row,) = task.rows("test", 1, 0, "prime_factorization")
    grader = task.grader("prime_factorization", "{}")
    with pytest.raises(ValueError, match="purple"):
        grader.score_answer("purple", row["answer"]["entry"])
    assert task.reward("purple", **row) == 0.0
    row["answer"]["entry"]["answer"] = "purple"
    with pytest.raises(ValueError, match="purple"):
        task.reward("2", **row)


def test_a_row_is_scored_by_its_task_under_auto_and_other_answers_are_refused():
    c = config("auto", reward_workers=0)
    rows = [row_of("reasoning_gym", SPIDERS), row_of("math", "10")]
    assert [function.name for function in functions_for(c, rows)] == ["math", "reasoning_gym"]
    c = config("reasoning_gym", reward_workers=0)
    message = refusal(scoring.check_answers, functions_for(c, rows), rows, "my_data", c)
    check_words(message, "'reasoning_gym'", "my_data", "'a row of math'")


def test_the_library_is_not_imported_before_it_is_asked_for():
    code = "import sys, data, rewards; rewards.check_names(['reasoning_gym'])\n"
    code += "assert 'tasks.reasoning_gym' in sys.modules and 'reasoning_gym' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE)


# --- all of its tasks


PROBLEMS = """
import hashlib, json, sys
from tasks import reasoning_gym as task
for name in sys.argv[1:]:
    size = 3 if name in ("knight_swap", "futoshiki", "zebra_puzzles") else 20  # these are slow
    try:
        found = task.entries_of(name, {"size": size, "seed": 5})
    except ValueError:  # it is the mixture, which has no problems of its own
        found = None
    # on a line of its own: one of them prints dots
    print(f"\\n{name} {hashlib.sha256(json.dumps(found, default=str).encode()).hexdigest()}")
"""


@pytest.mark.slow
def test_problems_are_the_same_in_every_process_but_for_the_refused():
    outputs = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROBLEMS, *sorted(DATASETS)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=900,
        )
        lines = [line.split() for line in done.stdout.splitlines()]
        outputs.append(dict(line for line in lines if len(line) == 2))
    first, second = outputs
    assert set(first) == set(second) == set(DATASETS)
    drifting = {name for name in first if first[name] != second[name]}
    assert drifting <= set(task.REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DATASETS) - set(task.REFUSED)))
def test_a_task_scores_its_own_answers_as_right_and_runs_nothing_of_a_text(name, tmp_path):
    mark = tmp_path / "ran"
    call = f"__import__('os').system('touch {mark}')"
    texts = ["", "purple", "[" * 5000, "1/0", "nan", "\ud800", "\0", call, f"[{call}]", f"({call})"]
    texts += [f"(lambda: {call})()", f'["{call}"]', json.dumps({"a": call}), f"{{{call}: 1}}"]
    for entry in task.entries_of(name, {"size": 3, "seed": 0}).values():
        row = task.row_of("0", name, {}, entry)
        assert pickle.loads(pickle.dumps(row)) == row
        for solution in row["solutions"]:
            assert task.reward(solution, **row) == 1.0
        for text in texts:
            assert 0.0 <= task.reward(text, **row) <= 1.0
    assert not mark.exists()
