"""bench.gpu: what it says where there is no GPU, how it runs its checks, and that those of
attention, head and learner run, on a CPU with stand-ins for the kernels. Its figures are a GPU's to
give."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest
import torch
from deadlines import PATIENCE
from exact_matrix import ROOT
from row_files import check_words, refusal

import experience
import packing
from bench import gpu, gpu_kernels, gpu_learner, gpu_machine, gpu_needs, shapes
from common import UserError

TINY = gpu.Setting("cpu", "tiny")


def test_without_a_gpu_there_is_one_sentence_and_status_3():
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("no GPU: ")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("wrong", ["attentoin", "--devise=cpu", "--check=nothing"])
def test_an_unknown_check_or_flag_is_refused_with_those_there_are(wrong):
    with pytest.raises(UserError) as caught:
        gpu.main([wrong])
    said = str(caught.value)
    named = wrong.removeprefix("--check=").partition("=")[0]
    for word in (named, "attention", "--json="):
        assert word in said


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--shape=7b"], ["--shape=7b", "0.5b, 1.5b, tiny"]),
        (["head", "--device=gpu"], ["--device=gpu", "cuda, cpu"]),
        (["--json=/proc/x/y.json"], ["--json='/proc/x/y.json' can't be written"]),
        (["--json="], ["--json='' can't be written", "is a folder"]),
    ],
)
def test_its_flags_are_checked_before_anything_is_done(argv, words, monkeypatch):
    monkeypatch.setattr(gpu, "no_gpu", lambda: pytest.fail("torch is loaded"))
    said = refusal(gpu.main, argv)
    check_words(said, *words)


def ended(out: str, status: int | None = 0, err: str = "") -> CompletedProcess:
    return CompletedProcess([], status, out, err)


def finding(what: str, good: bool) -> str:
    row = gpu.Finding(what, good, "2 ms", "< 3", {"ms": 2.0})._asdict()
    return "finding " + json.dumps(row | {"seconds": 1.0}) + "\n"


def test_all_checks_run_whatever_one_of_them_does(tmp_path, monkeypatch, capsys):
    """One is fine, one fails, one dies half way, one does not end, one needs what is not here."""

    def run_for(command, limit):
        name = command[3].removeprefix("--check=")
        if name == "head":
            return ended(finding("early", True), None)
        if name == "zero1":
            return ended(finding("early", True), 1, "RuntimeError: out of memory\nleaked\n")
        return ended(finding("it", name != "peaks"))

    monkeypatch.setattr(gpu, "run_for", run_for)
    monkeypatch.setitem(gpu.CHECKS, "engine", gpu.Check("gpu_engine", 9, ("no_such_package",)))
    monkeypatch.setitem(gpu.CHECKS, "nccl", gpu.Check("gpu_machine", 9, (), gpus=3))
    path = tmp_path / "new" / "figures.json"
    names = ["driver", "peaks", "zero1", "head", "engine", "nccl"]
    assert gpu.run_all(names, TINY, path) == 1
    rows = {row["check"]: row for row in json.loads(path.read_text())["rows"]}
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "driver: it": "ok",
        "peaks: it": "FAIL",
        "zero1: early": "ok",
        "zero1": "FAIL",
        "head: early": "ok",
        "head": "FAIL",
        "engine": "skip",
        "nccl": "skip",
    }
    assert "out of memory" in rows["zero1"]["measured"]
    assert "not done after 180 seconds" in rows["head"]["measured"]
    assert rows["driver: it"]["figures"] == {"ms": 2.0}
    table = capsys.readouterr().out
    assert "| driver: it | ok | 2 ms | < 3 | 1.0 |" in table
    assert "| engine | skip | no_such_package not installed |" in table
    assert gpu.run_all(["driver"], TINY, path) == 0


def test_a_check_that_finds_nothing_has_failed(monkeypatch):
    monkeypatch.setattr(gpu, "run_for", lambda command, limit: ended("nothing\n"))
    assert [row["state"] for row in gpu.rows_of("driver", TINY, 9)] == ["FAIL"]


def test_every_check_is_a_function_of_its_module():
    for name, check in gpu.CHECKS.items():
        module = importlib.import_module(f"bench.{check.module}")
        assert list(inspect.signature(getattr(module, name)).parameters) == ["setting"], name


def test_checks_of_learner_and_kernels_do_not_need_vllm():
    modules = {check.module for name, check in gpu.CHECKS.items() if "vllm" not in check.needs}
    assert modules >= {"gpu_learner", "gpu_kernels"}
    without = "import sys; sys.modules['vllm'] = None; "  # an import of it fails
    code = without + "; ".join(f"import bench.{module}" for module in sorted(modules))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_why_there_is_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built for CPUs" in gpu.no_gpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is empty" in gpu.no_gpu()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert "driver on your system is too old" in gpu.no_gpu()


@pytest.mark.parametrize("version, good", [("580.65.06", True), ("550.54.15", False)])
def test_the_driver_must_be_new_enough_for_the_wheels(version, good, monkeypatch):
    monkeypatch.setattr(gpu_machine, "output_of", lambda *command: f"{version}, NVIDIA X, 80 GiB")
    (found,) = gpu_machine.driver(TINY)
    assert found.good == good
    assert version in found.measured


@pytest.mark.parametrize(
    "programs, CC, found",
    [
        ("gcc clang cc", None, "gcc"),
        ("clang", None, "clang"),
        ("cc", None, ""),  # Triton does not know it
        ("gcc clang", "clang", "clang"),
        ("gcc", "", ""),  # it takes CC as it is, and asks for no other
        ("gcc", "icc", ""),
        ("gcc", "gcc -m64", ""),
    ],
)
def test_a_compiler_is_looked_for_as_triton_does(programs, CC, found, tmp_path, monkeypatch):
    for name in programs.split():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} 12.3\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if CC is not None:
        monkeypatch.setenv("CC", CC)
    assert gpu_needs.find_compiler() == (str(tmp_path / found) if found else "")
    problem = gpu_needs.compiler_problem()
    assert bool(problem) == (not found)
    assert not problem or repr(CC or "") in problem or "neither gcc nor clang" in problem
    (row,) = gpu_machine.compiler(TINY)
    assert (row.good, row.measured) == (bool(found), f"{found} 12.3" if found else "none")
    # what Triton itself would call
    find = pytest.importorskip("triton.runtime.build")._find_compiler.__wrapped__
    if CC is None and not found:
        with pytest.raises(RuntimeError, match="Failed to find C compiler"):
            find("c")
    else:
        assert find("c") in (gpu_needs.find_compiler(), CC)


def test_python_h_is_looked_for_where_triton_does(monkeypatch):
    """Debian's default has another folder for it, which nobody fills."""
    real = sysconfig.get_paths

    def get_paths(scheme="posix_local"):
        return {"include": "/usr/local/include"} if scheme == "posix_local" else real(scheme)

    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(sysconfig, "get_paths", get_paths)
    there = Path(real("posix_prefix")["include"]) / "Python.h"
    (row,) = gpu_machine.python_h(TINY)
    assert row.measured == str(there)
    assert bool(gpu_needs.header_problem()) == (not there.exists())


@pytest.mark.parametrize("name", ["alignment", "attention", "head"])
def test_the_kernels_of_the_model_are_right_or_said_to_be_wrong(name, monkeypatch):
    """With the stand-ins all is well; with a kernel of another order or scale nothing is."""
    monkeypatch.setattr("packing.varlen_attn", gpu_kernels.packing.varlen_attn)
    for attribute in ("on_gpu", "compiled", "room_for_softmaxes"):
        monkeypatch.setattr(gpu_kernels.loss, attribute, getattr(gpu_kernels.loss, attribute))
    findings = list(getattr(gpu_kernels, name)(TINY))
    assert findings
    assert all(found.good for found in findings)
    wrong = {
        "alignment": ("packing.varlen_attn", top_left),
        "attention": ("packing.varlen_attn", top_left),
        "head": ("loss.head_logits", lambda hidden, weight: 1.1 * (hidden @ weight.T).float()),
    }
    monkeypatch.setattr(gpu_kernels, "prepare_stand_in", lambda setting: None)
    monkeypatch.setattr(*wrong[name])
    assert not next(iter(getattr(gpu_kernels, name)(TINY))).good


def top_left(q, k, v, ends_q, ends_k, *more, **options):
    """Causal order aligned at the first query and key."""
    groups = q.shape[1] // k.shape[1]
    parts = []
    for i in range(len(ends_q) - 1):
        queries = slice(ends_q[i], ends_q[i + 1])
        keys = slice(ends_k[i], ends_k[i + 1])
        segment = (
            q[queries],
            k[keys].repeat_interleave(groups, 1),
            v[keys].repeat_interleave(groups, 1),
        )
        qkv = [x.transpose(0, 1)[None] for x in segment]  # (1, heads, tokens, d)
        out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def test_a_batch_has_the_tokens_asked_for_and_shares_prompts():
    for tokens, groups in ((1300, 1), (8192, 2), (16384, 4)):
        batch = shapes.batch_of(1000, tokens, groups, 8, "cpu")
        held = groups * shapes.PROMPT + int(batch["lengths"].sum())
        assert held == pytest.approx(tokens, rel=0.03)
        assert held <= tokens
        prompts = batch["ids"][:, : shapes.PROMPT].view(groups, 8, -1)
        assert (prompts == prompts[:, :1]).all()
        assert batch["lengths"].unique().numel() > 3


def test_products_are_counted_once_for_a_shared_prompt():
    shape = gpu.SHAPES["tiny"]
    one = shapes.batch_of(shape.vocabulary, 1300, 1, 8, "cpu")
    batch = one | {"lengths": one["lengths"] * 0}
    hidden, kv = shape.hidden, shape.kv_heads / shape.heads
    weights = shape.layers * (hidden * hidden * (2 + 2 * kv) + 3 * hidden * shape.feed_forward)
    assert shapes.products(shape, batch, 1) == 6 * weights * shapes.PROMPT


def test_what_a_gpu_is_asked_for_is_in_the_torch_that_is_pinned():
    """Keywords of varlen_attn, float32 products of 16 bits, a fused AdamW: none of them runs on a
    CPU, all can be looked up."""
    parameters = inspect.signature(packing.varlen_attn).parameters
    names = list(parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa"} <= set(names)
    schema = str(torch.ops.aten.mm.dtype._schema)
    assert "ScalarType out_dtype" in schema
    assert "fused" in inspect.signature(torch.optim.AdamW).parameters
    assert callable(torch.cuda.set_sync_debug_mode)


@pytest.mark.parametrize("moved, words", [(True, "weights moved"), (False, "weights stay")])
def test_a_step_says_whether_the_weights_moved(moved, words, monkeypatch):
    class Case:
        def __init__(self, *args, **changes):
            self.steps = 0

        def weights(self):
            return torch.tensor([1.0 + self.steps * moved])

        def step(self):
            self.steps += 1
            return {"loss": 0.5}

    monkeypatch.setattr(gpu_learner, "Case", Case)
    found = next(gpu_learner.steps_and_saves(TINY))
    assert (found.good, found.measured) == (moved, f"loss 5.00e-01, {words}")


def test_the_experience_that_a_case_makes_up_has_the_names_of_a_real_one(monkeypatch):
    seen = []

    def measure(engine, reference, batch, collected, *rest):
        seen.append(vars(collected))
        raise InterruptedError

    monkeypatch.setattr(gpu_learner.learner, "measure_groups", measure)
    case = object.__new__(gpu_learner.Case)
    vars(case).update(batch={}, groups=2, rewards=None, engine=None, reference=None, c=None)
    with pytest.raises(InterruptedError):
        case.learn()
    assert seen[0].keys() <= {*experience.Collected._fields}


def test_a_model_that_was_half_saved_is_not_taken_for_one(tmp_path, monkeypatch):
    saved = []

    def save(folder):
        folder.mkdir()
        saved.append(folder)
        (folder / "model.safetensors").write_text("half")
        if len(saved) == 1:
            raise KeyboardInterrupt
        (folder / "model.safetensors").write_text("whole")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(shapes, "random_model", lambda *a: SimpleNamespace(save_pretrained=save))
    shape = gpu.SHAPES["tiny"]
    with pytest.raises(KeyboardInterrupt):
        shapes.model_folder(shape, "cpu")
    for _ in range(2):
        folder = shapes.model_folder(shape, "cpu")
        assert (folder / "model.safetensors").read_text() == "whole"
    assert len(saved) == 2  # once in vain
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["waits", "zero0", "zero1", "zero2", "zero3", "lora", "reference", "trl"]
)
def test_checks_of_the_learner_run_on_a_cpu(name):
    """Steps, saves, loads and skips a NaN in bfloat16 at every ZeRO stage."""
    rows = gpu.rows_of(name, TINY, PATIENCE)
    assert {row["state"] for row in rows} == {"ok"}, rows
