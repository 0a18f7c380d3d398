"""What all tests share: the repository on the path, one thread, no network, and a tiny random
model."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",  # before the libraries that read them once
    PYTHONFAULTHANDLER="1",  # a process that a library aborts says where
    WANDB__SERVICE_WAIT="600",  # seconds for its own process to start, 30 otherwise
)
torch.set_num_threads(1)
# the same examples every time, and a slow machine is no error
settings.register_profile(
    "here", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")


LONG = [
    f"test_{name}.py"
    for name in (
        "slurm",
        "server_vllm",
        "server_answers",
        "resume",
        "infoseed",
        "train",
        "rollout",
        "zero",
        "compare",
        "generate",
    )
]


def pytest_collection_modifyitems(items):
    """Files that take minutes first, so that no process has one left when the others are done."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A Hugging Face folder with a two-layer character model, weights random."""
    import sft

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = sft.tiny_tokenizer()
    sft.tiny_model(len(tokenizer), seed=0, layers=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind():
    """A module that starts vLLM or torch.distributed in this process must leave neither what they
    write into the environment, which scripts that others start would inherit, nor its groups to
    the next module that starts one."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        sys.modules["deepspeed"].utils.groups._WORLD_GROUP = None  # it keeps a copy
    for name in os.environ.keys() - before.keys():
        os.environ.pop(name)
    os.environ.update(before)


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    """A folder of which rewards may import modules, and where helpers/hostile.py leaves its notes.
    Workers that tests have started are stopped when the module is done."""
    from reward_tools import close_pools

    folder = tmp_path_factory.mktemp("rewards")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("REWARD_TEST_FOLDER", str(folder))
        yield folder
    close_pools()


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The axes of every picture that the test saves, which is not written."""
    from matplotlib.figure import Figure

    axes = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: axes.extend(figure.axes))
    return axes
