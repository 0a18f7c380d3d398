"""Fixtures of the tests of server/, which name this file in pytest_plugins."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import any_weights, make_engine
from stand_ins import FakeWorld, StandIn
from transformers import AutoModelForCausalLM

import sft
from server import engine as server_engine


@pytest.fixture(scope="session")
def untied_model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    tokenizer = sft.tiny_tokenizer()
    sft.tiny_model(len(tokenizer), seed=0, layers=2, tied=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lm(tiny_model_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


@pytest.fixture
def world(monkeypatch):
    """One rank, without torch.distributed."""
    monkeypatch.setattr(server_engine, "dist", FakeWorld(1))
    return server_engine.dist


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(server_engine, "dist", FakeWorld(2))
    return server_engine.dist


@pytest.fixture
def naps(monkeypatch) -> list[float]:
    """The seconds that the engine would have slept before each new try: here they cost a
    hundredth."""
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        time.sleep(seconds / 100)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(server_engine, "time", clock)
    return slept


@pytest.fixture
def short_wait(naps, monkeypatch):
    """A clock that stands still but for naps: a minute's wait for servers is over in a second."""
    clock = SimpleNamespace(sleep=server_engine.time.sleep, monotonic=lambda: sum(naps))
    monkeypatch.setattr(server_engine, "time", clock)


@pytest.fixture
def make(tiny_model_dir, tmp_path):
    """make(urls or stand-ins, key=value, ...): an engine; everything is closed in the end."""
    opened = []

    def engine(*servers, synced=True, model=tiny_model_dir, **settings):
        urls = ",".join(s if isinstance(s, str) else s.url for s in servers)
        made = make_engine(model, urls, tmp_path / "run", **settings)
        opened.append(made)
        if synced:
            made.sync(any_weights())
        return made

    yield engine
    for made in opened:
        made.close()


@pytest.fixture
def stand_in():
    """stand_in(...): a StandIn, or what `kind` says, that is closed in the end."""
    opened = []

    def one(*args, kind=StandIn, **kwargs):
        opened.append(kind(*args, **kwargs))
        return opened[-1]

    yield one
    for each in opened:
        each.close()
