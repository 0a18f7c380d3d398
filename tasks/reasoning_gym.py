"""The problems of Reasoning Gym: about a hundred generators, each with a score of its own.
Stojanovski et al. 2025, arXiv:2505.24760; the package reasoning_gym.

config names one of its tasks, or several with settings of theirs:

  "leg_counting"
  '{"leg_counting": {"max_animals": 5, "size": 1000}, "chain_sum": {}}'

Row of "leg_counting":
  {"id": "leg_counting/test/0", "task": "reasoning_gym", "prompt": "Your task is to count ...",
   "answer": {"problem": "leg_counting", "settings": {}, "entry": {"question", "answer",
   "metadata"}}, "solutions": ["52"]}

Covers: what the task's own grader covers, 0.0 to 1.0, often with a share for less than right, of
what stands in the last <answer>...</answer>, or else of all of the text.
Does not cover: tasks whose graders run as code what a model, or whoever made a row, has written,
and some others (REFUSED).

The library is imported when rows or scores are asked for, not before.
"""

import ast
import dataclasses
import functools
import json

from tasks import SPLITS, check_choice, last_answer, take

EVAL = "its grader calls eval on the model's answer, which would run as code"
PARSER = "its grader gives the model's answer to sympy's parser, which runs it as code"
ROW = "its grader calls eval on the row, which may be a stranger's, and would run as code"
DRIFTS = "its problems depend on more than their seed: ranks would not have the same"
# tests look for more of the first four kinds in the installed version
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
    "composite": "it is a mixture of others: name those",
    "coin_flip": "its grader calls 0 right, whatever the probability",
    "game_of_life_halting": "its grader calls any text right",
}
# Problem i of a seed is problem 0 of seed + i: splits must lie further apart than they are long.
SEEDS = {"train": 0, "test": 2**30}
HELD_OUT = 128  # test problems; a setting "size" says how many training problems


def rows(split: str, n: int, seed: int, config: str = "") -> list[dict]:
    """Problems of all tasks that `config` names, each once; the training problems are none of the
    held-out ones. seed only orders them. n: -1 for all."""
    check_choice("split", split, SPLITS)
    found = []
    for problem, settings in read_config(config).items():
        held_out = entries_of(problem, settings | {"size": HELD_OUT, "seed": SEEDS["test"]})
        chosen = held_out
        if split == "train":
            chosen = entries_of(problem, settings | {"seed": SEEDS["train"]})
            chosen = {text: entry for text, entry in chosen.items() if text not in held_out}
        if not chosen:
            raise ValueError(
                f"config {problem!r}: all of its training problems are among the {len(held_out)} "
                f"held-out ones: a larger size, or settings with more variety, would help"
            )
        for i, entry in enumerate(chosen.values()):
            found.append(row_of(f"{problem}/{split}/{i}", problem, settings, entry))
    return take(found, n, seed)


def row_of(name: str, problem: str, settings: dict, entry: dict) -> dict:
    return {
        "id": name,
        "task": "reasoning_gym",
        "prompt": entry["question"],
        "answer": {"problem": problem, "settings": settings, "entry": entry},
        # some have no answer but a rule that an answer must keep
        "solutions": [entry["answer"]] if isinstance(entry["answer"], str) else [],
    }


def read_config(config: str) -> dict[str, dict]:
    """{task of the library: its settings}; a ValueError for what is none."""
    wanted = {config: {}}
    if config.startswith("{"):
        try:
            # through JSON: as it will come back in a worker
            wanted = json.loads(json.dumps(ast.literal_eval(config)))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            wanted = None
    fits = isinstance(wanted, dict) and len(wanted) > 0
    if not fits or not all(isinstance(settings, dict) for settings in wanted.values()):
        form = '{"leg_counting": {settings}}'
        raise ValueError(f"config {config[:60]!r} must be the name of a task or {form}")
    for problem, settings in wanted.items():
        refuse(problem)
        size = settings.get("size", 1)
        if type(size) is not int or not 0 < size < SEEDS["test"]:
            raise ValueError(f"config {problem!r}: size={size!r} must be a number of problems")
        if "seed" in settings:
            raise ValueError(f"config {problem!r}: seed is no setting of it: the split has its own")
    return wanted


def refuse(problem: str) -> None:
    """ValueError for a task that the library does not have, or that is refused here."""
    from reasoning_gym.factory import DATASETS

    if problem in REFUSED:
        raise ValueError(f"config {problem!r} is refused: {REFUSED[problem]}")
    check_choice("config", problem, sorted(set(DATASETS) - set(REFUSED)))


def generator_of(problem: str, settings: dict):
    """The library's dataset, which makes problems and scores answers."""
    from reasoning_gym.factory import DATASETS, create_dataset

    try:
        return create_dataset(problem, **settings)
    # a setting that it does not have, or does not take
    except (TypeError, AssertionError, ValueError) as error:
        known = [field.name for field in dataclasses.fields(DATASETS[problem][1])]
        known.remove("seed")
        raise ValueError(
            f"config {problem!r}: {type(error).__name__}: {error}; its settings are "
            f"{', '.join(known)}"
        ) from None


def entries_of(problem: str, settings: dict) -> dict[str, dict]:
    """{question: entry} of the library's problems."""
    generator = generator_of(problem, settings)
    entries = {}
    for i in range(len(generator)):
        try:
            entry = generator[i]
        except Exception as error:  # not all of them look at their settings before
            raise ValueError(
                f"config {problem!r}: its problem {i} can't be made with {settings}: "
                f"{type(error).__name__}: {error}"
            ) from None
        entries.setdefault(entry["question"], entry)
    return entries


@functools.lru_cache(maxsize=64)  # some read a dictionary first
def grader(problem: str, settings: str):
    """The library's own for one task and its settings, which are JSON."""
    refuse(problem)  # a row of somebody's data may name any
    return generator_of(problem, json.loads(settings) | {"size": 1, "seed": 0})


def reward(completion: str, answer: dict, **row) -> float:
    """The score of Reasoning Gym's own grader, 1.0 for what it calls right."""
    import reasoning_gym  # noqa: F401  here already: a worker's first call may take its time

    own = grader(answer["problem"], json.dumps(answer["settings"]))
    entry = answer["entry"]
    try:
        return float(own.score_answer(last_answer(completion), entry))
    except Exception:
        # some raise at a text that they can't read: it is wrong, unless they can't read the row
        if entry["answer"] is not None:
            own.score_answer(entry["answer"], entry)
        return 0.0


def mode(completion: str, answer: dict) -> str:
    """Right answers differ if their words do: nobody knows how many there are."""
    return " ".join(last_answer(completion).split())
