"""Rows to train and evaluate on: from a task, a file, a Hugging Face dataset, or a mixture of them.

    rows = load_rows({"name": "countdown", "config": "tiny"}, seed=42)
    pools, weights = training_pools(config, tokenizer)        # with "prompt_ids"

A source is a dict with the entries of checks.SOURCE, of which only "name" must be given. A row is a
dict {"id", "task", "prompt", "answer", ...} with whatever else its source holds; prompts.py adds
"prompt_ids". stream.py decides which rows a step takes.
"""

import glob
import inspect
import json
import os
import pickle
import socket
import traceback
from pathlib import Path
from types import NoneType
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub.constants

import tasks
from checks import SOURCE, entries, sources
from common import (
    PATHS,
    ROOT,
    UserError,
    check_writable,
    in_one_line,
    near_path,
    quoted,
    say_on_rank_0,
)
from prompts import encode_prompts, is_blank, messages_of, prompt_fault, prompt_key, with_uncut

# columns with a meaning in this program, read if a dataset has them
OURS = ("id", "task", "solutions", "num_modes", "enumeration")
BLOCK = 1000  # in every block of this many prompts each source of a mixture has its share


# --- the rows of a source


def load_rows(source: dict, seed: int, also: list[str] = ()) -> list[dict]:
    """All rows of a source, at least one. Rows without prompt or answer are left out, and their
    number is printed. UserError, naming the source, for what can't be found or read.

    seed: for tasks that draw their rows at random. also: optional further columns of a dataset;
    those in source["more"] are required. From a .jsonl file all columns are read."""
    source = SOURCE | source
    name = source["name"]
    if not name:
        raise UserError(
            f"dataset.name is empty: name a task ({', '.join(tasks.NAMES)}), "
            f"a .jsonl or .parquet file, a folder or a Hugging Face dataset"
        )
    if name in tasks.NAMES:
        rows = task_rows(source, seed)
    else:
        if names_file(name):
            check_single(source)
        is_jsonl = names_file(name, ".jsonl")
        raw_rows = read_jsonl(name) if is_jsonl else read_dataset(source, also)
        rows = usable_rows(raw_rows, source, also)
    for row in rows:
        row.pop("uncut_prompt", None)  # the trainer's own column, see prompts.with_uncut()
    return rows


def names_file(name: str, *endings: str) -> bool:
    """Whether a source's name has such an ending (by default any of a file of rows) and is not a
    folder: other programs write rows.parquet as a folder that holds the parts."""
    return name.endswith(endings or (".jsonl", ".parquet")) and not os.path.isdir(name)


def task_rows(source: dict, seed: int) -> list[dict]:
    """The rows that rows() of tasks/<name>.py makes. UserError for what is wrong with the file or
    its rows."""
    name = source["name"]
    file = f"tasks/{name}.py"
    try:
        rows = tasks.module(name).rows
    except Exception as error:  # it may be somebody's first task, with any mistake in it
        raise UserError(f"{file} can't be imported: {describe_error(error, file)}") from None
    # a task without variants need not have the argument
    variant = {"config": source["config"]} if source["config"] else {}
    if variant and "config" not in inspect.signature(rows).parameters:
        raise UserError(f"dataset.config={source['config']!r}: the task {name!r} has no variants")
    try:
        made = list(rows(source["split"], -1, seed, **variant))  # -1: all of them
    except tasks.NoSuchRows as error:
        raise UserError(f"dataset {name!r}: {error}") from None
    except Exception as error:
        called = f"rows({source['split']!r}, n=-1, seed={seed})"
        raise UserError(f"{file}: {called} failed: {describe_error(error, file)}") from None
    if not made:
        raise UserError(f"{file}: its split {source['split']!r} has no rows")
    for i, row in enumerate(made):
        check_task_row(row, f"{file}, row {i}")
        row["id"] = id_of(row, i)
        row["answer"] = task_answer(row, source)
    for column in source["more"]:
        if all(column not in row for row in made):
            raise UserError(
                f'{name!r}: no row has the column {column!r} ("more", which a task does not need: '
                f"a reward gets the whole row)"
            )
    make_ids_unique(made, name)
    return made


def task_answer(row: dict, source: dict):
    """The column of a task's row that `source` names as the answer. UserError if there is none."""
    column = source["answer"]
    if column == "answer":
        return row["answer"]
    answer = column_of(row, column)
    if answer is None:
        columns = [*row, *inner_columns(row, column)]
        raise UserError(
            f"dataset {source['name']!r}: row {row['id']!r} has no answer in the column {column!r} "
            f"(dataset.answer); its columns are {', '.join(columns)}"
        )
    return answer


def describe_error(error: Exception, file: str) -> str:
    """The type and message of an error, and the line of `file` that raised it, if one did: where
    Python can't parse the file, the message itself says where."""
    words = f"{type(error).__name__}: {quoted(' '.join(str(error).split()))}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == str(ROOT / file):
            return f"{words}, line {frame.lineno} of {file}"
    return words


def check_task_row(row, where: str) -> None:
    """UserError, beginning with `where`, if what a task made is not a row."""
    if not isinstance(row, dict):
        raise UserError(f"{where} must be a dict, not {quoted(row)}")
    for key in ("id", "task", "prompt", "answer"):
        if key not in row:
            raise UserError(
                f"{where} lacks {key!r}: it has {', '.join(map(str, row)) or 'nothing'}"
            )
    if fault := prompt_fault(row["prompt"]):
        raise UserError(f"{where}: the prompt {fault}")
    if not isinstance(row["task"], str):
        raise UserError(f"{where}: 'task' must be a name, not {quoted(row['task'])}")
    check_fields(row, where)
    check_depth(row, where)
    try:
        pickle.dumps(row)  # as it goes to a reward
        json.dumps(row["answer"], default=str)  # as generate.py writes it
        # as a run logs it; half a surrogate pair, which no tokenizer takes, fails here too
        json.dumps(row["prompt"], ensure_ascii=False).encode()
        json.dumps(row.get("solutions"), ensure_ascii=False, default=str).encode()
    except Exception as error:  # a lambda, a lock, a key that is a tuple: each raises its own kind
        raise UserError(
            f"{where} can't be sent to a reward or written to a file: {quoted(str(error))}"
        ) from None


def check_single(source: dict) -> None:
    """UserError if the config asks for a split of a source that has none. "train" and "test" are
    allowed, because they are the defaults of training and evaluation. source["config"] is not
    checked: it may be left over from another source."""
    if source["split"] not in ("train", "test"):
        raise UserError(
            f"dataset {source['name']!r} has no splits, so split={source['split']!r} can't be "
            "taken from it: put each split into a file of its own"
        )


def inner_columns(row: dict, *columns: str) -> list[str]:
    """For an error about a missing "outer.inner": the columns that the row's "outer" does have."""
    inner = []
    for column in columns:
        outer, dot, _ = column.partition(".")
        if dot and isinstance(row.get(outer), dict):
            inner += [f"{outer}.{key}" for key in row[outer]]
    return inner


def usable_rows(raw_rows: dict[str, dict], source: dict, also: list[str]) -> list[dict]:
    """Turns a source's rows into this program's rows; those without prompt or answer are left out.
    raw_rows: {where it stands, for errors: row}; also: see load_rows()."""
    name = source["name"]
    absent = object()
    for column in source["more"]:
        # a .jsonl file, and a column that a dataset keeps as JSON, have only what is in their rows
        if raw_rows and all(column_of(raw, column, absent) is absent for raw in raw_rows.values()):
            raise UserError(f'{name!r}: no row has the column {column!r} ("more")')
    rows = []
    left_out = []  # where they stand
    for i, (where, raw) in enumerate(raw_rows.items()):
        prompt = column_of(raw, source["prompt"])
        answer = column_of(raw, source["answer"])
        # 0 and False are answers, NaN (which does not equal itself) is not
        if prompt is None or is_blank(prompt) or answer in (None, "") or answer != answer:
            left_out.append(where)
            continue
        if fault := prompt_fault(prompt):
            raise UserError(f"{where}: the prompt (column {source['prompt']!r}) {fault}")
        check_fields(raw, where)
        check_depth(raw, where)
        row = dict(raw)  # rewards get the other columns
        for column in source["more"]:  # in every row, as None where it has no value
            row[column] = column_of(raw, column)
        for column in also:  # only where it has one
            if (value := column_of(raw, column)) is not None:
                row[column] = value
        row["id"] = id_of(raw, i)
        row["task"] = own_task(raw) or source["task"]
        # only role and content of messages: other entries may be of types that JSON lacks
        row["prompt"] = prompt if isinstance(prompt, str) else messages_of({"prompt": prompt}, "")
        row["answer"] = answer
        row.pop("completion", None)  # rewards have an argument of that name
        rows.append(row)

    if not rows:
        raise none_usable(raw_rows, source)
    make_ids_unique(rows, name)
    if left_out:
        say_on_rank_0(
            f"{name}: {len(left_out)} of {len(raw_rows)} rows have no prompt or no answer and are "
            f"left out, the first is {left_out[0]}"
        )
    return rows


def none_usable(raw_rows: dict[str, dict], source: dict) -> UserError:
    """The error to raise if no row of a source has both prompt and answer."""
    first = next(iter(raw_rows.values()), {})
    columns = [*first, *inner_columns(first, source["prompt"], source["answer"])]
    split = "" if has_no_splits(Path(source["name"])) else f" split {source['split']!r}"
    return UserError(
        f"{source['name']!r}{split}: none of its {len(raw_rows)} rows has both a prompt "
        f"(column {source['prompt']!r}) and an answer (column {source['answer']!r}); its "
        f"columns are: {', '.join(columns) or 'none'}. Set dataset.prompt and dataset.answer "
        f"(any column, if no reward reads an answer); an eval_dataset with a name of its own "
        f"needs eval_dataset.prompt and .answer"
    )


def id_of(row: dict, number: int) -> str:
    """The id of a row as text, so that all ids of a run can be sorted; without one, its number."""
    return str(number if row.get("id") is None else row["id"])


def make_ids_unique(rows: list[dict], name: str) -> None:
    """Appends a row's number to its id if an earlier row has the same: an evaluation takes rows
    with one id for one problem."""
    seen = set()
    repeated = 0
    for i, row in enumerate(rows):
        if row["id"] in seen:
            repeated += 1
        while row["id"] in seen:  # a loop: the new id may be taken too
            row["id"] = f"{row['id']}#{i}"
        seen.add(row["id"])
    if repeated:
        say_on_rank_0(
            f"{name}: {repeated} rows have the id of an earlier row; '#' and the row's number are "
            f"appended to it"
        )


# --- the fields of a row

# levels of lists and dicts: pickle, which takes rows to the reward workers, fails at a few hundred
DEEPEST_ROW = 100


def is_deeper(value, levels: int) -> bool:
    """Whether a value's lists and dicts are nested deeper than `levels`."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(is_deeper(item, levels - 1) for item in value)


def check_depth(row: dict, where: str) -> None:
    """UserError, beginning with `where`, if a row is nested too deep for pickle."""
    if is_deeper(row, DEEPEST_ROW):
        raise UserError(
            f"{where}: a column is nested deeper than {DEEPEST_ROW} levels, so the row can't be "
            "sent to a reward"
        )


def column_of(row: dict, name: str, absent=None):
    """The value of a row's column, `absent` if there is none. "reward_model.ground_truth" is the
    entry ground_truth of the column reward_model, unless a column is called exactly that; it is
    None if reward_model is None."""
    if name in row:
        return row[name]
    content = row
    for part in name.split("."):
        if content is None:
            return None
        if not isinstance(content, dict) or part not in content:
            return absent
        content = content[part]
    return content


def is_name(value) -> bool:
    return type(value) in (str, int, float)  # not isinstance: True is not a name


def is_count(value) -> bool:
    in_range = type(value) in (int, float) and 0 <= value < 2**31  # NaN is not
    return in_range and value == int(value)


# field -> (check of its value if a row has it, the check in words). Not "task" and "solutions",
# which mean something else in many datasets: own_task() ignores a task that is not text, and
# sft.py checks solutions.
FIELDS = {
    "id": (is_name, "text or a number"),
    "num_modes": (is_count, "a whole number from 0 on"),
}


def check_fields(row: dict, where: str) -> None:
    """UserError, beginning with `where`, if one of FIELDS has the wrong type in this row."""
    for field, (fits, words) in FIELDS.items():
        if row.get(field) is not None and not fits(row[field]):
            raise UserError(f"{where}: {field!r} must be {words}, not {quoted(row[field])}")


def own_task(row: dict) -> str:
    """The task that a row names. "" for a number, which is a class label, and for
    "module:function": data must not name code to run."""
    task = row.get("task")
    return task if isinstance(task, str) and ":" not in task else ""


# --- .jsonl files


def read_jsonl(path: str) -> dict[str, dict]:
    """{"path:line number": row}. UserError, with file and line number, for a line that can't be
    used."""
    if "://" in path:
        raise UserError(
            f"dataset {path!r}: addresses are read of .parquet files only: download this file and "
            f"name its path"
        )
    rows = {}
    number = 0
    try:
        # bytes: text is decoded in blocks, so it would be unknown which line has an error
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                # utf-8-sig: Windows puts a byte order mark at the beginning
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    where = f"{path}:{number}"
                    rows[where] = read_row(text, where)
    except OSError as error:
        near = near_path(path) if isinstance(error, FileNotFoundError) else ""
        raise UserError(
            f"dataset {path!r} can't be read: {error.strerror}{sought(path)}{near}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number}: not UTF-8 text: {error}") from None
    return rows


def sought(path: str) -> str:
    """From where a relative path was looked for, as part of a sentence."""
    return "" if os.path.isabs(path) else f", looked for from {os.getcwd()}"


def read_row(line: str, where: str) -> dict:
    """The JSON object of one line."""
    try:
        row = json.loads(line)
        if "\\u" in line:  # only an escape can bring in half a surrogate pair
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start]
        raise UserError(f"{where}: {bad!r} is half a character (a lone surrogate)") from None
    except (ValueError, RecursionError) as error:  # also for thousands of digits or brackets
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {line[:40]!r}")
    return row


# --- datasets: .parquet files, folders of save_to_disk, the hub


def read_dataset(source: dict, also: list[str]) -> dict[str, dict]:
    """{"dataset NAME, row I": row} with the columns that `source` names, and those of OURS and
    `also` that the dataset has."""
    name = source["name"]
    split = source["split"]
    check_part(source)
    check_readable(name)
    dataset = open_dataset(source)
    if isinstance(dataset, dict):  # {split: dataset}, as save_to_disk keeps them
        dataset = part_of(dataset, split, name)
    elif is_saved_to_disk(Path(name)):
        check_single(source)

    # the other columns may be gigabytes, such as rollouts of other models
    dataset = dataset.select_columns(wanted_columns(dataset, source, also))
    try:
        rows = dataset.to_list()
    except UnicodeDecodeError as error:
        raise UserError(f"dataset {name!r} holds text that is not UTF-8: {error}") from None
    except Exception as error:  # such as a date that Python has no object for
        raise UserError(
            f"dataset {name!r} holds a value that can't be read: {type(error).__name__}: "
            f"{in_one_line(error, 300)}"
        ) from None
    if dataset.builder_name == "json":
        warn_of_guesses(rows, dataset.features, name)
    return {f"dataset {name!r}, row {i}": row for i, row in enumerate(rows)}


def wanted_columns(dataset, source: dict, also: list[str]) -> list[str]:
    """The columns that read_dataset() reads, each once; UserError for one that `source` names and
    the dataset does not have."""
    wanted = {}  # a dict keeps the order and drops repetitions
    for column in (source["prompt"], source["answer"], *source["more"]):
        whole = whole_column(dataset.features, column)
        if whole is None:
            # Features are nested dicts, as rows are
            columns = [*dataset.column_names, *inner_columns(dataset.features, column)]
            raise UserError(
                f"dataset {source['name']!r} has no column {column!r}; its columns are "
                f"{', '.join(columns)}. The source's entries prompt, answer and more name columns "
                f"(docs/data.md); an eval_dataset with a name inherits none of them"
            )
        wanted[whole] = None
    for column in (*OURS, *also):  # optional
        whole = whole_column(dataset.features, column)
        if whole is not None:
            wanted[whole] = None
    return list(wanted)


def check_part(source: dict) -> None:
    """UserError if what stands in brackets behind a split is not a part of it."""
    import datasets  # here: it takes seconds, and tasks and .jsonl files don't need it

    split = source["split"]
    try:
        if "[" in split:
            datasets.ReadInstruction.from_spec(split)
    except ValueError:
        raise UserError(
            f"dataset {source['name']!r}: split={split!r} is not written as a part of a split: "
            f"write it as in 'train[:90%]', 'train[-10%:]' or 'train[100:200]', with whole numbers "
            f"and at most 100%"
        ) from None


def check_readable(name: str) -> None:
    """UserError for a dataset where there is nothing, or for whose name the datasets library would
    read something else."""
    import datasets

    # the library looks for files by a pattern that the folder's name is part of; what save_to_disk
    # wrote it opens by name
    whole = os.path.realpath(name)
    if os.path.isdir(name) and glob.has_magic(whole) and not is_saved_to_disk(Path(name)):
        raise UserError(
            f"dataset {name!r}: the datasets library takes [, * and ? in the name of its folder, "
            f"{whole!r}, for a pattern, and may read another folder: rename it"
        )
    if Path(name).stem in tasks.NAMES and name.endswith(".py"):
        raise UserError(f"dataset {name!r} is a task: name it {Path(name).stem!r}")
    if os.path.isfile(name) and not name.endswith(".parquet"):
        raise UserError(
            f"dataset {name!r} is a file that is neither .jsonl nor .parquet: any other that the "
            f"datasets library reads, such as .csv, must be in a folder of its own: name the folder"
        )
    is_path = name.startswith(PATHS)
    if names_file(name, ".parquet"):  # the name may be a pattern, or an address
        is_path = not glob.has_magic(name) and "://" not in name
    if is_path and not os.path.exists(name):  # no need to ask the hub
        raise UserError(
            f"dataset {name!r} is neither a file nor a folder{sought(name)}{near_path(name)}"
        )
    readers = os.listdir(datasets.packaged_modules.__path__[0])  # csv, json, text, ...
    if name in readers and not os.path.isdir(name):
        raise UserError(
            f"dataset {name!r} is the name of a file format, for which the datasets library would "
            f"read all such files in the current folder: name a folder with your files"
        )


def part_of(dataset: dict, split: str, name: str):
    """The rows of a split, or of a part of it such as train[:90%], of {split: dataset}."""
    import datasets

    if split in dataset:  # its name may be one that an instruction can't hold, such as train-2
        return dataset[split]
    lengths = {split: len(rows) for split, rows in dataset.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except ValueError:  # no such split, or not written as one
        splits = ", ".join(dataset)
        raise UserError(
            f"dataset {name!r} has no split {split!r}; it has {splits}{no_test(split)}"
        ) from None
    chosen = []
    for part in parts:
        if part.from_ < part.to:
            chosen.append(dataset[part.splitname].select(range(part.from_, part.to)))
    if not chosen:
        raise UserError(
            f"dataset {name!r}: split={split!r} has no rows: choose a part within {lengths}"
        )
    try:
        return datasets.concatenate_datasets(chosen)
    except ValueError as error:
        raise UserError(
            f"dataset {name!r}: the columns of split={split!r} differ, so its parts can't be "
            f"joined: choose one of them ({in_one_line(error, 300)})"
        ) from None


def no_test(split: str) -> str:
    """What to do about a missing split, if it is the one that is evaluated by default."""
    if split != "test":
        return ""
    return "; --eval_dataset.split takes another for the evaluation, or a part as in 'train[:256]'"


def warn_of_guesses(rows: list[dict], features: dict, name: str) -> None:
    """Warns of columns of .json files in which the datasets library has taken texts for something
    else, so that a reward which compares texts would never pay."""
    for column, kind in features.items():
        made = ""
        if "timestamp[" in repr(kind):
            made = "made dates of texts"
        # a text that is JSON itself is not told from what is kept as JSON
        elif "Json(" in repr(kind) and any(is_guess(row[column], kind) for row in rows):
            made = "kept values of several types as JSON, where a text such as '7' becomes 7"
        if made:
            say_on_rank_0(
                f"warning: dataset {name!r}: in its column {column!r} the datasets library has "
                f"{made}: name a .jsonl file itself, and its values stay as they are"
            )


def is_guess(value, kind) -> bool:
    """Whether a value of this feature, or one within it, is kept as JSON and may have been text."""
    if getattr(kind, "_type", "") == "Json":
        return not isinstance(value, dict | list | NoneType)
    if isinstance(kind, dict) and value is not None:
        return any(is_guess(value[entry], inner) for entry, inner in kind.items())
    if isinstance(value, list):
        return any(is_guess(item, kind.feature) for item in value)
    return False


def whole_column(features: dict, name: str) -> str | None:
    """The column of a dataset that contains `name`: reward_model for "reward_model.ground_truth".
    None if there is none."""
    if name in features:
        return name
    first, *parts = name.split(".")
    content = features.get(first)
    for part in parts:
        if getattr(content, "_type", "") == "Json":  # its entries differ from row to row
            return first
        content = content.get(part) if isinstance(content, dict) else None
    return None if content is None else first


def open_dataset(source: dict):
    """A dataset, or a dict of its splits; UserError if it can't be loaded.

    If the hub is busy, huggingface_hub tries again after 1, 2, 4, 8 and 8 seconds."""
    import datasets

    name = source["name"]
    is_parquet = names_file(name, ".parquet")
    unknown = ""  # for errors: the name may be misspelt, so say what else it is not
    if not (is_parquet or os.path.isdir(name)):
        if use_cache_without_hub(datasets.config.HF_ENDPOINT):
            datasets.config.HF_HUB_OFFLINE = True  # datasets has its own copy of this setting
        unknown = (
            f"is not a task of tasks/ ({', '.join(tasks.NAMES)}), not a .jsonl or .parquet file "
            f"or a folder of save_to_disk, and "
        )
    try:
        if is_parquet:  # datasets calls its only split "train"
            # escaped: in the name of a file * and ? are not patterns
            files = glob.escape(os.path.abspath(name)) if os.path.isfile(name) else name
            return datasets.load_dataset("parquet", data_files=files, split="train")
        if is_saved_to_disk(Path(name)):
            return datasets.load_from_disk(name)
        # ./: a folder called csv would be taken for the library's own reader of that name
        where = os.path.join(".", name) if os.path.isdir(name) else name
        return datasets.load_dataset(where, source["config"] or None, split=source["split"])
    except ConnectionError as error:
        raise UserError(
            f"dataset {name!r} {unknown}the Hugging Face hub can't be reached (no network, or "
            f"HF_HUB_OFFLINE is set), nor is there a copy in the cache: {quoted(error)}"
        ) from None
    # datasets, huggingface_hub, its HTTP library and pyarrow raise dozens of kinds
    except Exception as error:
        raise not_loaded(source, unknown, error) from None


def not_loaded(source: dict, unknown: str, error: Exception) -> UserError:
    """The error to raise for one of the datasets library. unknown: see open_dataset()."""
    import datasets
    from datasets.exceptions import SplitsVerificationError

    reason = error.__cause__ or error  # the cause says more than the library's wrapper
    words = f"{type(reason).__name__}: {quoted(' '.join(str(reason).split()), 300)}"
    cure = "; dataset.config='' clears one left over from a config file" if source["config"] else ""
    if isinstance(error, SplitsVerificationError):
        words = "its files do not hold the splits and numbers of rows that its README.md gives"
        cure = ": complete them, or remove dataset_info from README.md"
    elif "Unknown split" in words:
        cure = no_test(source["split"])
    elif isinstance(reason, OSError):
        # a container's user often has no home, and the library keeps a copy even of a local file
        cache = datasets.config.HF_DATASETS_CACHE
        name = "HF_DATASETS_CACHE" if "HF_DATASETS_CACHE" in os.environ else "HF_HOME"
        try:
            check_writable("HF_DATASETS_CACHE", cache, folder=True)
        except UserError as problem:
            words, cure = str(problem), f": set {name} to a folder of your own"
    return UserError(
        f"dataset {source['name']!r} (config={source['config']!r}, split={source['split']!r}) "
        f"{unknown}can't be loaded as a dataset: {words}{cure}"
    )


def is_saved_to_disk(folder: Path) -> bool:
    """Whether save_to_disk of the datasets library wrote this folder, with one split or several."""
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def has_no_splits(path: Path) -> bool:
    """Whether this is a file, or a folder that save_to_disk wrote with a single split."""
    return names_file(str(path)) or (path / "dataset_info.json").exists()


def use_cache_without_hub(endpoint: str) -> bool:
    """Whether the hub can't be reached. If so, this tells huggingface_hub to use its cache only:
    otherwise it would retry for half a minute. Behind a proxy this tries nothing and leaves it to
    the library. UserError if `endpoint`, which HF_ENDPOINT sets, is not an address."""
    hub = huggingface_hub.constants
    proxies = {"http", "https", "all"} & set(getproxies())
    if hub.HF_HUB_OFFLINE or proxies:
        return hub.HF_HUB_OFFLINE
    try:
        address = urlsplit(endpoint)
        if not address.hostname:
            raise ValueError("it must begin with https:// or http://")
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname, port), timeout=10).close()
    except ValueError as error:  # such as a port that is not a number, or a host like a..b
        raise UserError(f"HF_ENDPOINT={quoted(endpoint)} is not an address: {error}") from None
    except OSError as error:
        say_on_rank_0(f"{endpoint} can't be reached ({error}): only its cache is used")
        hub.HF_HUB_OFFLINE = True
    return hub.HF_HUB_OFFLINE


# --- the sources that a config names


def training_pools(c: dict, tokenizer) -> tuple[list[list[dict]], list[float]]:
    """The pool (the encoded rows) and the weight of every source of the training data; stream.py
    draws from the pools."""
    loaded, weights = load_mixture(c)
    return [encode_prompts(rows, tokenizer, c, seeds=True) for rows in loaded], weights


def load_mixture(c: dict) -> tuple[list[list[dict]], list[float]]:
    """The rows and the weight of every source of the training data."""
    loaded = []
    weights = []
    for source in sources(c):
        loaded.append(load_rows(source, c["seed"]))
        weights.append(source["weight"])
    # stream.py rounds a source's share of BLOCK prompts, and could round this one to 0
    least = min(weights)
    if least * BLOCK < sum(weights):
        raise UserError(
            f"dataset: source {weights.index(least)}: weight={least} is less than 1/{BLOCK} of "
            f"the sum of all weights, so its rows might never be drawn"
        )
    return loaded, weights


def easy_rows(c: dict, tokenizer) -> list[dict]:
    """The encoded rows of the easy pool; an empty list if there is no such pool."""
    source = entries(c, "easy_dataset")
    if not source["name"]:
        return []
    rows = load_rows(source, c["seed"], also=more_columns(c))
    return encode_prompts(rows, tokenizer, c, seeds=True)


def source_names(c: dict) -> str:
    """The names of the training sources, joined for a sentence."""
    return ", ".join(source["name"] for source in sources(c))


def all_rows(pools: list[list[dict]]) -> list[dict]:
    """The rows of all pools in one list."""
    return [row for pool in pools for row in pool]


def more_columns(c: dict) -> list[str]:
    """The further columns ("more") of the training data. The easy pool and the evaluation data load
    them too if they have them, because the same rewards score their rows."""
    return [column for source in sources(c) for column in source["more"]]


def leave_out_evaluated(pools: list[list[dict]], eval_rows: list[dict], c: dict) -> list:
    """Leaves out the training rows whose prompts are also evaluation prompts, because scores on
    these would measure memory, and prints their number. With allow_leakage it leaves out none and
    warns.

    pools: the rows of every source, then, if there is an easy pool, its rows. UserError if a pool
    would have no rows left."""

    def keys(row: dict) -> set[str]:
        return {prompt_key(whole, c["system_prompt"]) for whole in with_uncut(row)}

    evaluated = set()
    for row in eval_rows:
        evaluated |= keys(row)
    left = []
    for rows in pools:
        left.append([row for row in rows if evaluated.isdisjoint(keys(row))])
    total = sum(map(len, pools))
    count = total - sum(map(len, left))
    if not count:
        return pools
    sentence = f"{count} of {total} training rows are evaluation prompts too"
    if c["allow_leakage"]:
        say_on_rank_0(f"warning: {sentence} (allow_leakage=True)")
        return pools
    sources_of_pools = [*sources(c), entries(c, "easy_dataset")]
    for source, rows, rest in zip(sources_of_pools, pools, left):
        if rows and not rest:
            raise UserError(
                f"{sentence}, and without them nothing is left of {source['name']!r}: set a "
                f"smaller eval_max_prompts ({c['eval_max_prompts']}), set eval_dataset.name to "
                f"other rows (by default rows of dataset.name are evaluated), evaluate nothing "
                f"(--eval_steps=0 and no eval_dataset), or set --allow_leakage=True"
            )
    say_on_rank_0(f"{sentence} and are left out of training")
    return left
