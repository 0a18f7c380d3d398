"""Rows to train and evaluate on: of a task, a file, a Hugging Face dataset, or several of them.

    rows = load_rows({"name": "countdown", "config": "tiny"}, seed=42)
    sources, weights = training_sources(config, tokenizer)      # with "prompt_ids"

A source is a dict like checks.SOURCE, of which only "name" must be given. A row is a dict {"id",
"task", "prompt", "answer", ...} with whatever else its source holds; prompts.py adds "prompt_ids".
Which rows a step takes is decided in stream.py.
"""

import inspect
import json
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub.constants

import tasks
from checks import SOURCE, entries, sources
from common import UserError, quoted, say_once
from prompts import encode_prompts, prompt_fault, prompt_identity

# columns that mean something here, read wherever a dataset has them
OURS = ("id", "task", "solutions", "num_modes", "enumeration")
BLOCK = 1000  # prompts over which a mixture keeps its weights to the row


# --- the rows of a source


def load_rows(source: dict, seed: int, also: list[str] = ()) -> list[dict]:
    """All rows of a source, at least one. Rows without prompt or answer are left out with a printed
    count. What can't be found or read is a UserError that names it.

    seed: of tasks that draw their rows. also: further columns of a dataset, where it has them;
    those of source["more"] it must have. A .jsonl file brings all of its own."""
    source = SOURCE | source
    name = source["name"]
    if not name:
        raise UserError(
            f"dataset.name is empty: name a task ({', '.join(tasks.NAMES)}), "
            f"a .jsonl or .parquet file, a folder or a Hugging Face dataset"
        )
    if name in tasks.NAMES:
        return task_rows(source, seed)
    if name.endswith((".jsonl", ".parquet")):
        check_single(source)
    found = read_jsonl(name) if name.endswith(".jsonl") else read_dataset(source, also)
    return usable_rows(found, source, [*source["more"], *also])


def task_rows(source: dict, seed: int) -> list[dict]:
    """What rows() of tasks/<name>.py makes."""
    name = source["name"]
    rows = tasks.module(name).rows
    # a task of one kind need not have the argument
    variant = {"config": source["config"]} if source["config"] else {}
    if variant and "config" not in inspect.signature(rows).parameters:
        raise UserError(f"dataset.config={source['config']!r}: the task {name!r} has no variants")
    try:
        return rows(source["split"], -1, seed, **variant)  # -1: all of them
    except ValueError as error:  # no such split or variant; other errors are bugs of the task
        raise UserError(f"dataset.name={name!r}: {error}") from None


def check_single(source: dict) -> None:
    """UserError if a part is asked of a source that has none. "test" is what evaluation asks for
    where nothing else is said; a config may be left of another source."""
    if source["split"] not in ("train", "test"):
        raise UserError(
            f"dataset.name={source['name']!r} has no splits, so split={source['split']!r} can't be "
            "taken of it: make files of the parts"
        )


def usable_rows(found: dict[str, dict], source: dict, more: list[str]) -> list[dict]:
    """found: {place: row as its source has it}; more: further columns. The rows with prompt and
    answer, as they are meant here."""
    rows = []
    for i, (place, raw) in enumerate(found.items()):
        prompt = column_of(raw, source["prompt"])
        answer = column_of(raw, source["answer"])
        if prompt in (None, "") or answer in (None, ""):  # 0 and False are answers
            continue
        if fault := prompt_fault(prompt):
            raise UserError(f"{place}: the prompt (column {source['prompt']!r}) {fault}")
        check_fields(raw, place)
        row = dict(raw)  # its other columns are for rewards
        for column in more:
            if "." in column and column_of(raw, column) is not None:
                row[column] = column_of(raw, column)
        row["id"] = str(i if raw.get("id") is None else raw["id"])
        row["task"] = own_task(raw) or source["task"]
        row["prompt"] = prompt
        row["answer"] = answer
        row.pop("completion", None)  # a reward's own argument
        rows.append(row)

    name = source["name"]
    if not rows:
        first = next(iter(found.values()), {})
        raise UserError(
            f"{name!r} split {source['split']!r}: none of its {len(found)} rows has both a prompt "
            f"(column {source['prompt']!r}) and an answer (column {source['answer']!r}); its "
            f"columns are: {', '.join(first) or 'none'}. Set dataset.prompt and dataset.answer, "
            f"or eval_dataset.prompt and eval_dataset.answer, which do not follow dataset's where "
            f"eval_dataset has a name"
        )
    if len(rows) < len(found):
        say_once(
            f"{name}: {len(found) - len(rows)} of {len(found)} rows have no prompt or no answer "
            f"and are left out"
        )
    return rows


# --- what a row's fields must be


def column_of(row: dict, name: str):
    """The content of a column, None where the row has none. "reward_model.ground_truth" is an entry
    of the column reward_model, unless a column has all of that as its name."""
    if name in row:
        return row[name]
    content = row
    for part in name.split("."):
        if not isinstance(content, dict):
            return None
        content = content.get(part)
    return content


def is_name(value) -> bool:
    return type(value) in (str, int, float)  # not isinstance: True is no name


def is_texts(value) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def is_count(value) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**31  # NaN is not


# Field: what it must be where a row has it, and that in words. "task" may be anything: a column of
# that name is often a class label.
FIELDS = {
    "id": (is_name, "text or a number"),
    "solutions": (is_texts, "a list of texts"),
    "num_modes": (is_count, "a number from 0 on"),
}


def check_fields(row: dict, where: str) -> None:
    """UserError with the place of a row of which one of FIELDS is of the wrong type."""
    for field, (fits, words) in FIELDS.items():
        if row.get(field) is not None and not fits(row[field]):
            raise UserError(f"{where}: {field!r} must be {words}, not {quoted(row[field])}")


def own_task(row: dict) -> str:
    """A row's own task; "" for a number, as a class label is, and for "module:function": data
    names no code."""
    task = row.get("task")
    return task if isinstance(task, str) and ":" not in task else ""


# --- .jsonl files


def read_jsonl(path: str) -> dict[str, dict]:
    """{"path:number" of a line: the row in it}; UserError with file and line of one that can't be
    used."""
    rows = {}
    number = 0
    try:
        with open(path, "rb") as file:  # as text it would be decoded ahead of its lines
            for number, line in enumerate(file, 1):
                # a byte order mark, as Windows puts it at the beginning
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    where = f"{path}:{number}"
                    rows[where] = read_row(text, where)
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


# --- datasets: .parquet files, folders of save_to_disk, the hub


def read_dataset(source: dict, also: list[str]) -> dict[str, dict]:
    """{place: row}, the columns of `source` and as many of OURS and `also` as there are."""
    name = source["name"]
    split = source["split"]
    dataset = open_dataset(source)
    if isinstance(dataset, dict):  # of its splits: save_to_disk keeps them together
        if split not in dataset:
            splits = ", ".join(dataset)
            raise UserError(f"dataset.name={name!r} has no split {split!r}; it has {splits}")
        dataset = dataset[split]
    elif is_saved_to_disk(Path(name)):
        check_single(source)

    wanted = []
    for column in [source["prompt"], source["answer"], *source["more"]]:
        whole = whole_column(dataset.features, column)
        if whole is None:
            raise UserError(
                f"dataset.name={name!r} has no column {column!r}; "
                f"its columns are {', '.join(dataset.column_names)}"
            )
        wanted.append(whole)
    for column in (*OURS, *also):  # welcome, not needed
        whole = whole_column(dataset.features, column)
        if whole is not None:
            wanted.append(whole)
    # the other columns may be gigabytes of other people's rollouts
    dataset = dataset.select_columns(list(dict.fromkeys(wanted)))
    try:
        rows = dataset.to_list()
    except UnicodeDecodeError as error:
        raise UserError(f"dataset.name={name!r} holds text that is not UTF-8: {error}") from None
    return {f"dataset.name={name!r}, row {i}": row for i, row in enumerate(rows)}


def whole_column(features: dict, name: str) -> str | None:
    """The column that holds "reward_model.ground_truth" among others: reward_model. None without
    such a one."""
    if name in features:
        return name
    first, *parts = name.split(".")
    content = features.get(first)
    for part in parts:
        if getattr(content, "_type", "") == "Json":  # it may hold anything: a row tells
            return first
        content = content.get(part) if isinstance(content, dict) else None
    return None if content is None else first


def open_dataset(source: dict):
    """A dataset, or a dict of its splits; UserError if there is none that can be loaded.

    huggingface_hub asks a busy hub again after 1, 2, 4, 8 and 8 seconds."""
    import datasets  # takes seconds, and tasks and .jsonl files do without

    name = source["name"]
    unknown = ""  # what the name is not, where it may be a misspelt one
    if not (name.endswith(".parquet") or os.path.isdir(name)):
        if use_cache_without_hub(datasets.config.HF_ENDPOINT):
            datasets.config.HF_HUB_OFFLINE = True  # it has a copy of its own
        unknown = (
            f"is not a task of tasks/ ({', '.join(tasks.NAMES)}), not a .jsonl or .parquet file "
            f"or a folder of save_to_disk, and "
        )
    try:
        if name.endswith(".parquet"):  # which has one split, called train
            return datasets.load_dataset("parquet", data_files=name, split="train")
        if is_saved_to_disk(Path(name)):
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, source["config"] or None, split=source["split"])
    except ConnectionError as error:
        raise UserError(
            f"dataset.name={name!r} {unknown}the Hugging Face hub can't be reached (no network, or "
            f"HF_HUB_OFFLINE is set) and has left no copy of it in the cache: {quoted(error)}"
        ) from None
    # of datasets, huggingface_hub, its HTTP library, pyarrow: dozens of kinds
    except Exception as error:
        reason = error.__cause__ or error  # the library's own words say less
        words = quoted(" ".join(str(reason).split()), 300)
        raise UserError(
            f"dataset.name={name!r} (dataset.config={source['config']!r}, "
            f"dataset.split={source['split']!r}) {unknown}can't be loaded as a dataset: "
            f"{type(reason).__name__}: {words}"
        ) from None


def is_saved_to_disk(folder: Path) -> bool:
    """Whether save_to_disk of datasets wrote it: one split, or several."""
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def use_cache_without_hub(endpoint: str) -> bool:
    """Whether the hub can't be reached. Its library is then told to look into its cache alone, or
    it would ask again and again for half a minute. Behind a proxy that is left to the library."""
    hub = huggingface_hub.constants
    proxies = {"http", "https", "all"} & set(getproxies())
    if hub.HF_HUB_OFFLINE or proxies:
        return hub.HF_HUB_OFFLINE
    address = urlsplit(endpoint)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=10).close()
    except OSError as error:
        say_once(f"{endpoint} can't be reached ({error}): only its cache is used")
        hub.HF_HUB_OFFLINE = True
    return hub.HF_HUB_OFFLINE


# --- the sources that a config names


def training_sources(c: dict, tokenizer) -> tuple[list[list[dict]], list[float]]:
    """Encoded rows and weight of every source of the training data: what stream.py draws from."""
    loaded, weights = load_mixture(c)
    return [encode_prompts(rows, tokenizer, c, seeds=True) for rows in loaded], weights


def load_mixture(c: dict) -> tuple[list[list[dict]], list[float]]:
    """Rows and weight of every source of the training data."""
    loaded = []
    weights = []
    for source in sources(c):
        loaded.append(load_rows(source, c["seed"]))
        weights.append(source["weight"])
    # stream.py rounds a source's share of BLOCK prompts
    least = min(weights)
    if least * BLOCK < sum(weights):
        raise UserError(
            f"dataset: source {weights.index(least)}: weight={least} is less than one in {BLOCK} "
            f"of all weights together: it would never be drawn"
        )
    return loaded, weights


def easy_rows(c: dict, tokenizer) -> list[dict]:
    """The encoded rows of the easy pool; an empty list without one."""
    source = entries(c, "easy_dataset")
    if not source["name"]:
        return []
    rows = load_rows(source, c["seed"], also=more_columns(c))
    return encode_prompts(rows, tokenizer, c, seeds=True)


def names(c: dict) -> str:
    """The sources of the training rows, for a sentence."""
    return ", ".join(source["name"] for source in sources(c))


def all_rows(sources: list[list[dict]]) -> list[dict]:
    """Those of every source, one after the other."""
    rows = []
    for source in sources:
        rows += source
    return rows


def more_columns(c: dict) -> list[str]:
    """The further columns of the training data, which other sources bring where they have them:
    the same rewards judge their rows."""
    columns = []
    for source in sources(c):
        columns += source["more"]
    return columns


def leave_out_evaluated(pools: list[list[dict]], eval_rows: list[dict], c: dict) -> list:
    """The training rows without those whose prompts are evaluated, counted on the console: their
    score would be one of memory. With allow_leakage all of them, and a warning.

    pools: the rows of every source, then those of the easy pool. UserError where nothing is left of
    one."""

    def identity(row: dict) -> str:
        # but for white space: what differs in case is another prompt to a model
        return " ".join(prompt_identity(row).split())

    evaluated = {identity(row) for row in eval_rows}
    left = []
    for rows in pools:
        left.append([row for row in rows if identity(row) not in evaluated])
    total = sum(map(len, pools))
    count = total - sum(map(len, left))
    if not count:
        return pools
    sentence = f"{count} of {total} training rows are evaluation prompts too"
    if c["allow_leakage"]:
        say_once(f"warning: {sentence} (allow_leakage=True)")
        return pools
    places = [*sources(c), entries(c, "easy_dataset")]
    for source, rows, rest in zip(places, pools, left):
        if rows and not rest:
            raise UserError(
                f"{sentence}, and without them nothing is left of {source['name']!r}: set "
                f"eval_dataset.name to other rows (without it those of dataset.name are evaluated "
                f"too), --eval_steps=0 without an eval_dataset for none, or --allow_leakage=True"
            )
    say_once(f"{sentence} and are left out of training")
    return left
