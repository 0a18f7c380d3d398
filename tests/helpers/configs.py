"""Configs that load, and the sentences of those that do not."""

from pathlib import Path

import pytest

from common import UserError, default_config, load_config

DEFAULTS = default_config()


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_bytes(text.encode())
    return str(path)


def refusal(*argv) -> str:
    """The one sentence that load_config refuses argv with."""
    with pytest.raises(UserError) as caught:
        load_config(list(argv))
    assert "\n" not in str(caught.value)
    return str(caught.value)
