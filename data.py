"""Rows to train and evaluate on, from tasks/, files, Hugging Face datasets or a weighted mixture of them, and which of them a step takes.

A row is a dict {"id", "task", "prompt", "answer", ...}; prompts.py adds "prompt_ids". Which rows a step takes is a pure
function of (seed, step, rank, world): there is no cursor to save, and another number of ranks sees the same prompts.
"""

import inspect
import json
import os
from pathlib import Path

import tasks
from checks import entries, sources
from common import UserError, quoted, shown
from prompts import encode_prompts, seed_prompts, use_cache_without_hub

OURS = (
    "id",
    "task",
    "solutions",
    "num_modes",
    "enumeration",
)  # columns that mean something here, read where a dataset has them
BLOCK = 1000  # prompts over which a mixture keeps its weights to the row


# --- where rows come from


def load_rows(
    name: str,
    config: str,
    split: str,
    prompt_column: str,
    answer_column: str,
    seed: int,
    task: str = "",
    more: tuple = (),
    also: tuple = (),
) -> list[dict]:
    """All rows of a task, a .jsonl or .parquet file, a folder of save_to_disk or a Hugging Face dataset; never an empty list. Rows without
    prompt or answer are left out with a printed count. What can't be found or read is a UserError that names it.

    task: of rows without one; a row may name a reward of rewards.REWARDS there, not a function. more: further columns of a dataset that rewards
    want to see; also: the same, where it has them (a .jsonl file brings all of its own)."""
    if not name:
        raise UserError(
            f"dataset.name is empty: name a task ({', '.join(tasks.NAMES)}), a .jsonl or .parquet file, a folder or a Hugging Face dataset"
        )
    if name in tasks.NAMES:
        rows = tasks.module(name).rows
        if config and "config" not in inspect.signature(rows).parameters:
            raise UserError(f"dataset.config={config!r}: the task {name!r} has no variants")
        try:
            return rows(split, -1, seed, **({"config": config} if config else {}))
        except ValueError as error:
            raise UserError(f"dataset.name={name!r}: {error}") from None
    in_lines = name.endswith(".jsonl")
    if in_lines:
        found = read_jsonl(name)
    else:
        columns = (prompt_column, answer_column, *more)
        found = dict(enumerate(read_dataset(name, config, split, columns, also)))
    rows = []
    for i, (number, row) in enumerate(found.items()):
        if not row.get(prompt_column) or row.get(answer_column) in (None, ""):
            continue
        where = f"{name}:{number}" if in_lines else f"dataset.name={name!r}, row {number}"
        check_row(row, prompt_column, where)
        own = {
            "id": str(i if row.get("id") is None else row["id"]),
            "task": own_task(row) or task,
            "prompt": row[prompt_column],
            "answer": row[answer_column],
        }
        rows.append({**row, **own})
        rows[-1].pop("completion", None)  # a reward's own argument
    if not rows:
        columns = ", ".join(found[min(found)]) if found else "none"
        raise UserError(
            f"dataset.name={name!r} split {split!r}: none of its {len(found)} rows has both a prompt (column {prompt_column!r}) "
            f"and an answer (column {answer_column!r}); its columns are: {columns}"
        )
    if len(rows) < len(found):
        print(
            f"{name}: {len(found) - len(rows)} of {len(found)} rows have no prompt or no answer and are left out"
        )
    return rows


def is_count(value) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**31


def is_texts(value) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def is_name(value) -> bool:
    return type(value) in (str, int, float)


# What a row's field must be where the row has it, and that in words. "task" may be anything: a
# column of that name is often a class label.
FIELDS = {
    "id": (is_name, "text or a number"),
    "solutions": (is_texts, "a list of texts"),
    "num_modes": (is_count, "a number from 0 on"),
}


def check_row(row: dict, prompt_column: str, where: str) -> None:
    """UserError with the place of a row whose prompt, or one of FIELDS, is of the wrong type."""
    if not isinstance(row[prompt_column], str):
        raise UserError(
            f"{where}: the prompt (column {prompt_column!r}) must be text, "
            f"not a {type(row[prompt_column]).__name__}"
        )
    for field, (fits, words) in FIELDS.items():
        if row.get(field) is not None and not fits(row[field]):
            raise UserError(f"{where}: {field!r} must be {words}, not {shown(row[field])}")


def own_task(row: dict) -> str:
    """A row's own task; "" for a number, as a class label is, and for "module:function": data names no code."""
    found = row.get("task")
    return found if isinstance(found, str) and ":" not in found else ""


def read_jsonl(path: str) -> dict[int, dict]:
    """{number of a line: the row in it}; a UserError names file and line of one that can't be used."""
    rows = {}
    try:
        with open(path, "rb") as file:  # as text it would be decoded ahead of its lines
            for number, line in enumerate(file, 1):
                if line := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    rows[number] = read_row(line, f"{path}:{number}")
    except OSError as error:
        raise UserError(f"dataset.name={path!r} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number}: not UTF-8 text: {error}") from None
    return rows


def read_row(line: str, where: str) -> dict:
    """The JSON object of one line."""
    try:
        row = json.loads(line)
        if "\\u" in line:  # only so can half of a character, which no tokenizer takes, come in
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start]
        raise UserError(f"{where}: {bad!r} is not a character but half of one") from None
    except (ValueError, RecursionError) as error:  # also thousands of digits or brackets
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {line[:40]!r}")
    return row


def read_dataset(
    name: str, config: str, split: str, columns: tuple, also: tuple = ()
) -> list[dict]:
    """Rows, with `columns` and as many of `also` and OURS as there are, of a .parquet file, a folder written by save_to_disk, or a dataset of the hub,
    which huggingface_hub asks again after 1, 2, 4, 8 and 8 seconds when it is busy."""
    import datasets

    here = name.endswith(".parquet") or os.path.isdir(name)
    if not here and use_cache_without_hub(datasets.config.HF_ENDPOINT):
        datasets.config.HF_HUB_OFFLINE = True
    known = (
        ""
        if here
        else f"is not a task of tasks/ ({', '.join(tasks.NAMES)}), not a .jsonl or .parquet file or a folder of save_to_disk, and "
    )
    try:
        if name.endswith(".parquet"):
            dataset = datasets.load_dataset("parquet", data_files=name, split="train")
        elif os.path.isdir(name) and any(
            (Path(name) / file).exists() for file in ("dataset_info.json", "dataset_dict.json")
        ):
            dataset = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(name, config or None, split=split)
    except ConnectionError as error:
        raise UserError(
            f"dataset.name={name!r} {known}the Hugging Face hub can't be reached (no network, or HF_HUB_OFFLINE is set) and has left "
            f"no copy of it in the cache: {quoted(error)}"
        ) from None
    except (
        Exception
    ) as error:  # of datasets, huggingface_hub, its HTTP library, pyarrow: dozens of kinds
        reason = error.__cause__ or error
        raise UserError(
            f"dataset.name={name!r} (dataset.config={config!r}, dataset.split={split!r}) {known}can't be loaded as a "
            f"dataset: {type(reason).__name__}: {quoted(' '.join(str(reason).split()), 300)}"
        ) from None
    if isinstance(dataset, dict):
        if split not in dataset:
            raise UserError(
                f"dataset.name={name!r} has no split {split!r}; it has {', '.join(dataset)}"
            )
        dataset = dataset[split]
    missing = [c for c in columns if c not in dataset.column_names]
    if missing:
        raise UserError(
            f"dataset.name={name!r} has no column {missing[0]!r}; its columns are {', '.join(dataset.column_names)}"
        )
    wanted = dict.fromkeys(
        [*columns, *(column for column in (*OURS, *also) if column in dataset.column_names)]
    )
    try:  # the other columns may be gigabytes of other people's rollouts
        return dataset.select_columns(list(wanted)).to_list()
    except UnicodeDecodeError as error:
        raise UserError(f"dataset.name={name!r} holds text that is not UTF-8: {error}") from None


def load_source(source: dict, seed: int, also: tuple = ()) -> list[dict]:
    """The rows of one source, a dict with all entries of checks.SOURCE."""
    return load_rows(
        source["name"],
        source["config"],
        source["split"],
        source["prompt"],
        source["answer"],
        seed,
        source["task"],
        tuple(source["more"]),
        also,
    )


def load_mixture(c: dict) -> tuple[list[list[dict]], list[float]]:
    """Rows and weight of every source of `dataset`."""
    rows = [load_source(source, c["seed"]) for source in sources(c)]
    weights = [source["weight"] for source in sources(c)]
    if (least := min(weights)) * BLOCK < sum(weights):
        raise UserError(
            f"dataset: source {weights.index(least)}: weight={least} is less than one in {BLOCK} of "
            f"all weights together: it would never be drawn"
        )
    return rows, weights


def names(c: dict) -> str:
    """The sources of the training rows, for a sentence."""
    return ", ".join(source["name"] for source in sources(c))


def more_columns(c: dict) -> tuple:
    """The further columns of the training sources: other sources bring them where they have them."""
    return tuple(column for source in sources(c) for column in source["more"])


def refuse_leakage(rows: list[dict], eval_rows: list[dict], allowed: bool) -> None:
    """A UserError, or if `allowed` a printed count, where an evaluation prompt is also a training prompt."""
    trained = {row["prompt"] for row in rows}
    leaked = [row for row in eval_rows if row["prompt"] in trained]
    if leaked:
        sentence = f"{len(leaked)} of {len(eval_rows)} evaluation prompts are training prompts too, such as row {quoted(leaked[0]['id'])}"
        if not allowed:
            raise UserError(
                f"{sentence}: their score would be one of memory; choose another eval_dataset, or set --allow_leakage=True"
            )
        print(f"warning: {sentence} (allow_leakage=True)")


def encode(rows: list[dict], tokenizer, c: dict) -> list[dict]:
    """Training rows with "prompt_ids", none too long with any of InfoSeed's seeds either."""
    seeded = (lambda row: seed_prompts(row, tokenizer, c)) if c["info_seed_num_seeds"] else None
    return encode_prompts(
        rows, tokenizer, c["system_prompt"], c["max_prompt_length"], c["long_prompts"], seeded
    )


def training_sources(c: dict, tokenizer) -> tuple[list[list[dict]], list[float]]:
    """Encoded rows and weight of every source of the training data: what prompts_for_step draws from."""
    loaded, weights = load_mixture(c)
    return [encode(rows, tokenizer, c) for rows in loaded], weights


def easy_rows(c: dict, tokenizer) -> list[dict]:
    """The encoded rows of easy_dataset; an empty list without one."""
    source = entries(c, "easy_dataset")
    if not source["name"]:
        return []
    return encode(load_source(source, c["seed"], also=more_columns(c)), tokenizer, c)


# --- which rows a step takes
