"""The problems of Reasoning Gym: about a hundred generators, each with its own grader.
Stojanovski et al. 2025, arXiv:2505.24760; the package reasoning_gym.

config names one of its tasks, or several with their settings:

  "leg_counting"
  '{"leg_counting": {"max_animals": 5, "size": 1000}, "chain_sum": {}}'

Row of "leg_counting":
  {"id": "leg_counting/test/0", "task": "reasoning_gym", "prompt": "Your task is to count ...",
   "answer": {"problem": "leg_counting", "settings": {}, "entry": {"question", "answer",
   "metadata"}}, "solutions": ["52"]}

Covers: what the task's own grader covers. It gets the content of the last <answer>...</answer>, or
the whole text if there is none, and gives 0.0 to 1.0, often with partial credit.
Does not cover: the tasks in REFUSED, most of them because their graders would run as code a text
that comes from a model, or from a stranger's row.

The library is imported only when rows or scores are asked for.
"""

import ast
import dataclasses
import functools
import json

from tasks import SPLITS, NoSuchRows, check_choice, last_answer, take

EVAL = "its grader calls eval on the model's answer, which would run as code"
PARSER = "its grader gives the model's answer to sympy's parser, which runs it as code"
ROW = "its grader calls eval on the row, which may be a stranger's, and would run as code"
DRIFTS = "its problems depend on more than their seed, so ranks would get different ones"
# a test looks through the installed version for more tasks of these four kinds
REFUSED = {
    "binary_matrix": EVAL,
    "n_queens": EVAL,
    "spiral_matrix": EVAL,
    "string_insertion": EVAL,
    "countdown": PARSER,  # tasks/countdown.py has the same game
    "intermediate_integration": PARSER,
    "polynomial_multiplication": PARSER,
    "puzzle24": PARSER,
    "simple_integration": PARSER,
    "bitwise_arithmetic": ROW,
    "number_sorting": ROW,
    "isomorphic_strings": DRIFTS,
    "knight_swap": DRIFTS,
    "list_functions": DRIFTS,
    "ransom_note": DRIFTS,
    "word_ladder": DRIFTS,
    "composite": "it is a mixture of other tasks: name those",
    "coin_flip": "its grader calls 0 right, whatever the probability",
    "game_of_life_halting": "its grader calls any text right",
}
# Problem i of a seed is problem 0 of seed + i, so the splits' seeds must be further apart than a
# split is long.
SEEDS = {"train": 0, "test": 2**30}
HELD_OUT = 128  # test problems; a setting "size" says how many training problems


def rows(split: str, n: int, seed: int, config: str = "") -> list[dict]:
    """n problems (-1: all) of the tasks that `config` names, without repetitions. No training
    problem is among the held-out ones. `seed` only orders them."""
    check_choice("split", split, SPLITS)
    all_rows = []
    for problem, settings in read_config(config).items():
        held_out = entries_of(problem, settings | {"size": HELD_OUT, "seed": SEEDS["test"]})
        chosen = held_out
        if split == "train":
            chosen = entries_of(problem, settings | {"seed": SEEDS["train"]})
            chosen = {text: entry for text, entry in chosen.items() if text not in held_out}
        if not chosen:
            raise NoSuchRows(
                f"config {problem!r}: all of its training problems are among the {len(held_out)} "
                f"held-out ones: set a larger size, or settings with more variety"
            )
        for i, entry in enumerate(chosen.values()):
            all_rows.append(row_of(f"{problem}/{split}/{i}", problem, settings, entry))
    return take(all_rows, n, seed)


def row_of(name: str, problem: str, settings: dict, entry: dict) -> dict:
    return {
        "id": name,
        "task": "reasoning_gym",
        "prompt": entry["question"],
        "answer": {"problem": problem, "settings": settings, "entry": entry},
        # some entries have no answer, only a rule that answers must follow
        "solutions": [entry["answer"]] if isinstance(entry["answer"], str) else [],
    }


def read_config(config: str) -> dict[str, dict]:
    """{task of the library: its settings}. NoSuchRows if `config` is not that."""
    wanted = {config: {}}
    if config.startswith("{"):
        try:
            # through JSON, because grader() gets the settings as JSON
            wanted = json.loads(json.dumps(ast.literal_eval(config)))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            wanted = None
    fits = isinstance(wanted, dict) and len(wanted) > 0
    if not fits or not all(isinstance(settings, dict) for settings in wanted.values()):
        form = '{"leg_counting": {settings}}'
        raise NoSuchRows(f"config {config[:60]!r} must be the name of a task or {form}")
    for problem, settings in wanted.items():
        refuse(problem)
        size = settings.get("size", 1)
        if type(size) is not int or not 0 < size < SEEDS["test"]:
            raise NoSuchRows(f"config {problem!r}: size={size!r} must be a number of problems")
        if "seed" in settings:
            raise NoSuchRows(f"config {problem!r}: seed can't be set: each split has its own")
    return wanted


def refuse(problem: str) -> None:
    """NoSuchRows for a task that the library does not have, or that is refused here."""
    from reasoning_gym.factory import DATASETS

    if problem in REFUSED:
        raise NoSuchRows(f"config {problem!r} is refused: {REFUSED[problem]}")
    check_choice("config", problem, sorted(set(DATASETS) - set(REFUSED)))


def generator_of(problem: str, settings: dict):
    """The library's dataset, which makes problems and scores answers."""
    from reasoning_gym.factory import DATASETS, create_dataset

    try:
        return create_dataset(problem, **settings)
    # an unknown setting, or a value that the task does not take
    except (TypeError, AssertionError, ValueError) as error:
        known = [field.name for field in dataclasses.fields(DATASETS[problem][1])]
        known.remove("seed")
        raise NoSuchRows(
            f"config {problem!r}: {type(error).__name__}: {error}; its settings are "
            f"{', '.join(known)}"
        ) from None


def entries_of(problem: str, settings: dict) -> dict[str, dict]:
    """{question: entry} of all the generator's problems; the first entry if a question repeats."""
    generator = generator_of(problem, settings)
    entries = {}
    for i in range(len(generator)):
        try:
            entry = generator[i]
        except Exception as error:  # not all generators check their settings beforehand
            raise NoSuchRows(
                f"config {problem!r}: its problem {i} can't be made with {settings}: "
                f"{type(error).__name__}: {error}"
            ) from None
        entries.setdefault(entry["question"], entry)
    return entries


@functools.lru_cache(maxsize=64)  # some graders load a dictionary first
def grader(problem: str, settings: str):
    """The library's grader for one task. settings: JSON."""
    refuse(problem)  # a row of somebody's data may name any task
    return generator_of(problem, json.loads(settings) | {"size": 1, "seed": 0})


def reward(completion: str, answer: dict, **row) -> float:
    """The score of Reasoning Gym's own grader, 1.0 for what it calls right."""
    import reasoning_gym  # noqa: F401  slow, so a worker's trial call, which has more time, does it

    library_grader = grader(answer["problem"], json.dumps(answer["settings"]))
    entry = answer["entry"]
    try:
        score = float(library_grader.score_answer(last_answer(completion), entry))
        # a score just below 1 would become 1.0 in float32 and count as right
        return score if score == 1.0 else min(score, 0.99)
    except Exception:
        # Some graders raise for a text that they can't read: it is wrong. But if the row itself is
        # broken, grading its own answer raises again.
        if entry["answer"] is not None:
            library_grader.score_answer(entry["answer"], entry)
        return 0.0


def mode(completion: str, answer: dict) -> str:
    """The answer with single spaces: right answers that differ in more than white space are
    different modes. How many there are is unknown. Nothing is graded here:
    scoring.modes_of() asks about right completions only."""
    return " ".join(last_answer(completion).split())
