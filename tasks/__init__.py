"""Tasks: a file each, with rows(split, n, seed, config), reward(completion, answer) and mode(completion, answer)."""

import importlib
from pathlib import Path

NAMES = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem != "__init__")


def module(name: str):
    """tasks/<name>.py, or None if there is no such task."""
    return importlib.import_module(f"tasks.{name}") if name in NAMES else None
