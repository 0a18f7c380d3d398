"""Rows to train and evaluate on: from tasks/, a .jsonl file or a Hugging Face dataset, rendered to token ids once.

A row is a dict {"id", "task", "prompt", "answer", ...}; encode_prompts adds "prompt_ids". Which rows a step takes is a pure
function of (seed, step, rank, world): there is no cursor to save, and another number of ranks sees the same prompts.
"""
import importlib
import json
import random
from functools import lru_cache
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from common import ROOT, UserError

TASKS = sorted(p.stem for p in (ROOT / "tasks").glob("*.py") if p.stem != "__init__")


def task_module(name: str):
    """tasks/<name>.py, or None if there is no such task."""
    return importlib.import_module(f"tasks.{name}") if name in TASKS else None


def load_rows(name: str, config: str, split: str, prompt_column: str, answer_column: str, seed: int) -> list[dict]:
    """All rows of a task, a .jsonl file or a Hugging Face dataset; never an empty list. Rows without prompt or answer are left out
    with a printed count. What can't be found or read is a UserError that names it."""
    if not name:
        raise UserError(f"dataset_name is empty: name a task ({', '.join(TASKS)}), a .jsonl file or a Hugging Face dataset")
    if name in TASKS:
        try:
            return task_module(name).rows(split, -1, seed, **({"config": config} if config else {}))
        except ValueError as error:
            raise UserError(f"dataset_name={name!r}: {error}") from None
    found = read_jsonl(name) if name.endswith(".jsonl") else read_hub(name, config, split, (prompt_column, answer_column))
    rows = [{**row, "id": str(row.get("id", i)), "task": row.get("task", ""), "prompt": row[prompt_column], "answer": row[answer_column]}
            for i, row in enumerate(found) if row.get(prompt_column) and row.get(answer_column) not in (None, "")]
    if not rows:
        columns = ", ".join(found[0]) if len(found) else "none"
        raise UserError(f"dataset_name={name!r} split {split!r}: none of its {len(found)} rows has both a prompt (column {prompt_column!r}) "
                        f"and an answer (column {answer_column!r}); its columns are: {columns}")
    for row in rows:
        if not isinstance(row["prompt"], str):
            raise UserError(f"dataset_name={name!r}: the prompt (column {prompt_column!r}) of row {row['id']!r} must be text, "
                            f"not a {type(row['prompt']).__name__}")
        row.pop("completion", None)     # a reward's own argument
    if len(rows) < len(found):
        print(f"{name}: {len(found) - len(rows)} of {len(found)} rows have no prompt or no answer and are left out")
    return rows


def read_jsonl(path: str) -> list[dict]:
    rows = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise UserError(f"{path}:{number}: a row must be a JSON object, not {line[:40]!r}")
                    rows.append(row)
    except OSError as error:
        raise UserError(f"dataset_name={path!r} can't be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{number}: not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"dataset_name={path!r} is not UTF-8 text: {error}") from None
    return rows


def read_hub(name: str, config: str, split: str, columns: tuple) -> list[dict]:
    import datasets
    try:
        dataset = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:     # OSError covers an unreachable hub
        raise UserError(f"dataset_name={name!r} (dataset_config={config!r}, dataset_split={split!r}) is not a task of tasks/ ({', '.join(TASKS)}), "
                        f"not a .jsonl file, and can't be loaded from the hub: {str(error).splitlines()[0]}") from None
    missing = [c for c in columns if c not in dataset.column_names]
    if missing:
        raise UserError(f"dataset_name={name!r} has no column {missing[0]!r}; its columns are {', '.join(dataset.column_names)}")
    return dataset.select_columns(list(dict.fromkeys(columns))).to_list()     # the rest may be gigabytes of other people's rollouts


def load_model_files(model: str):
    """(model config, tokenizer) of a folder or a hub id, no weights; a UserError that names it when there is no such model."""
    if not model:
        raise UserError("model is empty: name a Hugging Face id or a folder, such as --model=Qwen/Qwen2.5-0.5B-Instruct")
    if model.startswith(("/", "./", "../", "runs/")) and not Path(model).is_dir():      # no hub id: don't go and ask
        raise UserError(f"model={model!r} is not a folder; a model in runs/ comes from sft.py or train.py, the first lines of its config say how")
    try:
        return AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:      # OSError covers an unreachable hub
        what = "is a folder without a usable model" if Path(model).is_dir() else "is not a folder, and can't be loaded from the hub"
        raise UserError(f"model={model!r} {what}: {str(error).splitlines()[0]}") from None


def check_context(model_config, model: str, max_prompt_length: int, max_completion_length: int) -> None:
    """A UserError if the model has fewer positions than a prompt and its completion need. Stretched ones (YaRN and so on) are left to vLLM."""
    stretched = (getattr(model_config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    limit = getattr(model_config, "max_position_embeddings", None)
    if limit and not stretched and max_prompt_length + max_completion_length > limit:
        raise UserError(f"max_prompt_length={max_prompt_length} + max_completion_length={max_completion_length} is more than "
                        f"the {limit} positions of model={model!r}")


def render_prompt(row: dict, tokenizer, system_prompt: str) -> str:
    """The prompt as the model sees it: its chat template with the assistant's turn opened, or the bare text for a base model."""
    if not tokenizer.chat_template:
        return system_prompt + row["prompt"]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return tokenizer.apply_chat_template([*system, {"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True)


def encode_prompts(rows: list[dict], tokenizer, system_prompt: str, max_length: int, long_prompts: str) -> list[dict]:
    """New rows with "prompt_ids". Prompts over `max_length` tokens are a UserError ("error") or left out and counted ("drop")."""
    texts = [render_prompt(row, tokenizer, system_prompt) for row in rows]
    ids = tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    too_long = [i for i, prompt in enumerate(ids) if len(prompt) > max_length]
    if too_long and (long_prompts == "error" or len(too_long) == len(rows)):
        worst = max(too_long, key=lambda i: len(ids[i]))
        raise UserError(f"max_prompt_length={max_length}: {len(too_long)} of {len(rows)} prompts are longer, row {rows[worst]['id']!r} has "
                        f"{len(ids[worst])} tokens; raise max_prompt_length or leave them out with --long_prompts=drop")
    if too_long:
        print(f"{len(too_long)} of {len(rows)} prompts are over max_prompt_length={max_length} tokens and are left out")
    drop = set(too_long)
    return [{**row, "prompt_ids": prompt} for i, (row, prompt) in enumerate(zip(rows, ids)) if i not in drop]


def seed_prompts(row: dict, tokenizer, c: dict) -> list[list[int]]:
    """The token ids of a row's prompt for every InfoSeed seed: info_seed_prompt_template with {seed} and {prompt} filled in, or added to the
    prompt where it doesn't hold {prompt}. One over max_prompt_length is a UserError."""
    template = c["info_seed_prompt_template"] if "{prompt}" in c["info_seed_prompt_template"] else "{prompt}\n" + c["info_seed_prompt_template"]
    before, after = template.replace("{seed}", "\0").split("{prompt}", 1)      # in this order: a prompt may hold braces itself
    prompts = [before.replace("\0", str(z)) + row["prompt"] + after.replace("\0", str(z)) for z in range(c["info_seed_num_seeds"])]
    texts = [render_prompt(row | {"prompt": prompt}, tokenizer, c["system_prompt"]) for prompt in prompts]
    ids = tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    longest = max(map(len, ids))
    if longest > c["max_prompt_length"]:
        raise UserError(f"max_prompt_length={c['max_prompt_length']}: the prompt of row {row['id']!r} has {longest} tokens with its seed; "
                        f"raise max_prompt_length")
    return ids


def training_rows(c: dict, tokenizer) -> list[dict]:
    """All rows of the config's training dataset, encoded: what train.py and sft.py learn from."""
    rows = load_rows(c["dataset_name"], c["dataset_config"], c["dataset_split"], c["dataset_prompt_column"], c["dataset_answer_column"], c["seed"])
    return encode_prompts(rows, tokenizer, c["system_prompt"], c["max_prompt_length"], c["long_prompts"])


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"order/{seed}/{epoch}").sample(range(count), count)


def prompts_for_step(rows: list[dict], step: int, prompts_per_step: int, seed: int, rank: int, world: int) -> list[dict]:
    """This rank's share of the step's prompts, prompts_per_step / world rows: a shuffled pass over all rows, then the next."""
    share = prompts_per_step // world
    first = step * prompts_per_step + rank * share
    return [rows[epoch_order(len(rows), seed, i // len(rows))[i % len(rows)]] for i in range(first, first + share)]
