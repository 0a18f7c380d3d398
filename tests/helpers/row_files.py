"""Files with rows, rows of them, and the sentence with which something is refused."""

import json
from pathlib import Path

import datasets
import pytest

import data
from common import UserError


def jsonl(folder: Path, *rows) -> str:
    """rows: dicts, or lines as they are."""
    path = folder / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def parquet(folder: Path, **columns) -> str:
    path = folder / "rows.parquet"
    datasets.Dataset.from_dict(columns).to_parquet(path)
    return str(path)


def load(name: str, **entries) -> list[dict]:
    """The rows of a source."""
    return data.load_rows({"name": name, **entries}, seed=0)


def refusal(what, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        what(*args, **kwargs)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def check_words(sentence: str, *words: str) -> None:
    for word in words:
        assert word in sentence, sentence
