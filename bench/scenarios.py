"""The scenarios of `python -m bench`: a model, prompts and sizes, by the scenario's name. All arms
read the same folder.

    parts("P4G8T64V2048")     {"P": prompts a step, "G": completions of each, ...}
    prepare("P4G8T64V2048")   the folder, made once
"""

import json
import os
import re
import tempfile
from pathlib import Path

REAL = "smollm2"  # the scenario with the pretrained model of bench/smollm2.py
END = 0  # the token that ends a completion of a random model
LONGEST_PROMPT = 32  # in tokens; prompts have 20


def parts(scenario: str) -> dict:
    """{"P": prompts a step, "G": completions of each, "T": tokens in each, "V": vocabulary}"""
    if scenario == REAL:
        return {"P": 4, "G": 8, "T": 64, "V": 49152}
    pairs = re.findall(r"([PGTV])(\d+)", scenario)
    return {letter: int(number) for letter, number in pairs}


def has_tail(scenario: str) -> bool:
    """Whether completions end by chance; otherwise all have T tokens."""
    return scenario.endswith("tail")


def ends(scenario: str) -> list[int]:
    """The tokens that end a completion. With "tail" one token in 64 does; because the weights are
    random, lengths are then geometric, 64 on average."""
    if not has_tail(scenario):
        return [END]
    # single characters have ids below 100, and remain text
    return [END, *range(100, 99 + parts(scenario)["V"] // 64)]


# --- model and prompts


def prepare(scenario: str) -> Path:
    """A folder with model, tokenizer and prompts, which all arms read. It is made once."""
    from transformers import GenerationConfig

    import sft

    size = parts(scenario)["V"]
    folder = Path(tempfile.gettempdir()) / f"bench_{os.getuid()}_{scenario}"
    if (folder / "rows.jsonl").exists():  # written last, so the folder is whole
        return folder
    if scenario == REAL:
        return prepare_real(folder)
    # random weights, because the cost of a step does not depend on them
    sft.tiny_model(size, seed=0).save_pretrained(folder)
    tokenizer_of(size).save_pretrained(folder)
    # TRL has no flag for the tokens that end a completion, and reads them here
    GenerationConfig(eos_token_id=ends(scenario), pad_token_id=END).save_pretrained(folder)
    write_rows(folder / "rows.jsonl")
    return folder


def prepare_real(folder: Path) -> Path:
    """The pretrained model and prompts for it."""
    from transformers import AutoTokenizer

    from bench import smollm2

    # in a folder of its own: a failed attempt leaves no rows, and make() looks only for a model
    smollm2.make(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # ours would use it; TRL, which is given plain texts, would not
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    # every digit is a token, so these prompts have one length too
    write_rows(folder / "rows.jsonl")
    return folder


def words(size: int) -> list[str]:
    """A vocabulary: the end token, ASCII characters, the space, then words to fill it."""
    vocabulary = ["<|end|>"]
    vocabulary += [chr(i) for i in range(33, 127)]
    vocabulary.append("\u0120")  # how Qwen's tokenizer writes a space
    vocabulary += [f"\u0120w{i}" for i in range(size - len(vocabulary))]
    return vocabulary


def tokenizer_of(size: int):
    """A tokenizer of `size` words."""
    from transformers import Qwen2Tokenizer

    vocabulary = words(size)
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],  # every word is whole: prompts are one token a character
        eos_token=vocabulary[END],
        pad_token=vocabulary[END],
    )


def write_rows(path: Path) -> None:
    """64 prompts, all of 20 tokens (11 of the real model), so that no arm gains by how it pads."""
    with open(path, "w") as file:
        for i in range(64):
            # two primes give sums that look random and are the same in every run
            left = i * 7919 % 1000
            right = i * 104729 % 1000
            row = {"prompt": f"{left:03d}+{right:03d}=".rjust(20, "x"), "answer": "0"}
            file.write(json.dumps(row) + "\n")


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def reward(completion: str, answer, **row) -> float:
    """A cheap reward that differs within a group, so that there is something to learn."""
    return len(set(completion)) / 100
