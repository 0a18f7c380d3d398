"""bench: TRL's arms are set as ours are, keep nothing, and load nothing that they leave unused."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as bench
from bench import arms, gpu, gpu_trl, trl_arms
from bench.scenarios import LONGEST_PROMPT, parts

SMALL = "P2G4T8V256"


# --- both mean the same
# A library had changed its defaults under one arm, and ours looked twice as fast: LOG.md,
# 2026-11-27. So nothing here is read from what the arms set, but from what the two trainers got.


class Noted(Exception):
    """A trainer has what it needs, and would begin."""


def given_to_ours(arm: str, monkeypatch) -> dict:
    """The config that train.py gets from this arm."""
    import train

    def note(config):
        raise Noted(config)

    monkeypatch.setattr(train, "main", note)
    # they change modules for good, and other tests come after this one
    monkeypatch.setattr(arms, "watch", lambda steps: ([], {}))
    monkeypatch.setattr(arms, "make_endless", lambda: None)
    with pytest.raises(Noted) as caught:
        bench.ARMS[arm](SMALL, 0.25, 8)
    return caught.value.args[0]


def given_to_trl(arm: str, monkeypatch) -> SimpleNamespace:
    """The GRPOConfig ("args") and the model that a GRPOTrainer gets from this arm."""
    from trl import import_utils

    # as hide_vllm_from_trl() does, for as long as this test runs: no vLLM is started here
    monkeypatch.setattr(import_utils, "is_vllm_available", lambda min_version=None: False)
    monkeypatch.setattr(trl_arms, "prepare_vllm_of_trl", lambda: None)
    import trl

    def note(self, **given):
        raise Noted(given)

    monkeypatch.setattr(trl.GRPOTrainer, "__init__", note)
    with pytest.raises(Noted) as caught:
        bench.ARMS[arm](SMALL, 0.25, 8)
    return SimpleNamespace(**caught.value.args[0])


def meaning_of_ours(c: dict) -> dict:
    rows = c["prompts_per_step"] * c["num_generations"]
    options = c["optimizer_options"]
    return {
        "rows of an update": rows,
        "group": c["num_generations"],
        "updates of a batch": c["num_iterations"],
        "completion": c["max_completion_length"],
        "temperature": c["temperature"],
        "loss": (c["objective"], c["scale_rewards"] or "none"),
        "clip": (c["epsilon"], max(c["epsilon_high"], c["epsilon"])),
        "beta": c["beta"],
        "entropy bonus": c["policy_entropy_bonus_coef"],
        "recomputed layers": c["gradient_checkpointing"],
        "rate": (c["learning_rate"], c["warmup_steps"]),
        "clipped norm": c["max_grad_norm"],
        "optimizer": c["optimizer"],
        "weight decay": options.get("weight_decay", 0.0),
        "saves": c["save_steps"] >= 0,
        "evaluates": c["eval_steps"] > 0,
        "reports": bool(c["report_to"]),
    }


def meaning_of_trls(args) -> dict:
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return {
        "rows of an update": rows,
        "group": args.num_generations,
        "updates of a batch": args.num_iterations,
        "completion": args.max_completion_length,
        "temperature": args.temperature,
        "loss": (args.loss_type, args.scale_rewards),
        "clip": (args.epsilon, high),
        "beta": args.beta,
        "entropy bonus": args.entropy_coef,
        "recomputed layers": args.gradient_checkpointing,
        "rate": (args.learning_rate, args.warmup_steps),
        "clipped norm": args.max_grad_norm,
        "optimizer": args.optim.split("_")[0],  # whichever kernel computes it
        "weight decay": args.weight_decay,
        "saves": args.save_strategy != "no",
        "evaluates": args.eval_strategy != "no",
        "reports": bool(args.report_to),
    }


@pytest.mark.parametrize("against", bench.PAIRS)
def test_both_arms_mean_the_same(against, monkeypatch):
    mine, theirs = bench.PAIRS[against]
    c = given_to_ours(mine, monkeypatch)
    given = given_to_trl(theirs, monkeypatch)
    args = given.args
    assert meaning_of_trls(args) == meaning_of_ours(c)
    # nothing of TRL's is cut or shared that ours has whole
    assert (args.top_p, args.top_k, args.min_p) == (1.0, 0, None)
    assert not (args.mask_truncated_completions or args.use_liger_kernel or args.torch_compile)
    assert args.top_entropy_quantile == 1.0
    # arithmetic: no autocast, and weights of float32, which "auto" is on a CPU
    assert not (args.bf16 or args.fp16)
    assert given.model.dtype == torch.float32 and c["dtype"] == "auto"
    # micro-batches: TRL's rows are padded to the longest
    tokens = arms.tokens_of_ours(SMALL, given.model)
    longest = LONGEST_PROMPT + parts(SMALL)["T"]
    rows = args.per_device_train_batch_size
    assert rows == parts(SMALL)["P"] * parts(SMALL)["G"] or 2 * rows * longest > tokens


def test_with_vllm_both_correct_what_it_samples_alike(monkeypatch):
    c = given_to_ours("ours_compiled", monkeypatch)
    args = given_to_trl("trl_vllm", monkeypatch).args
    assert args.vllm_importance_sampling_correction
    assert c["importance_sampling"] == args.vllm_importance_sampling_mode
    assert c["importance_sampling_cap"] == args.vllm_importance_sampling_clip_max
    assert c["vllm_options"]["kv_cache_memory_bytes"] == arms.CACHE * 2**30


def test_where_transformers_samples_nothing_is_corrected(monkeypatch):
    assert given_to_ours("ours_hf", monkeypatch)["importance_sampling"] == "none"
    assert not given_to_trl("trl", monkeypatch).args.use_vllm


# --- what an arm leaves, and what it loads


class Trainer:
    """Of TRL, which writes something into its folder."""

    def __init__(self, args, callbacks, **more):
        self.folder = Path(args.output_dir)
        (self.clock,) = callbacks

    def _generate(self):
        pass

    def train(self):
        (self.folder / "README.md").write_text("trained")
        for _ in range(8):
            self.clock.on_step_begin()
            self._generate()
            self.clock.on_step_end()


@pytest.fixture
def fake_trl(tmp_path, monkeypatch):
    trl = SimpleNamespace(GRPOConfig=SimpleNamespace, GRPOTrainer=Trainer)
    trl.import_utils = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setattr(trl_arms, "tokens_of_ours", lambda scenario, lm: 512)
    monkeypatch.setattr(trl_arms, "prepare", lambda scenario: tmp_path)
    monkeypatch.setattr(trl_arms, "read_rows", lambda folder: [{"prompt": "a"}])
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", lambda *args, **more: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("fake_trl")
def test_nothing_is_left_of_the_run_of_an_arm_of_trls(tmp_path):
    first, times = trl_arms.trl("P4G8T64V2048", 0.0, 8)
    assert first > 0 and len(times) == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fake_trl")
def test_trls_model_is_of_float32_as_ours_whatever_the_folder_holds(monkeypatch):
    given = {}
    model = "transformers.AutoModelForCausalLM.from_pretrained"
    monkeypatch.setattr(model, lambda folder, **more: given.update(more))
    trl_arms.trl("smollm2", 0.0, 4)
    assert given == {"dtype": torch.float32}


@pytest.mark.usefixtures("fake_trl")
def test_trls_micro_batches_have_the_tokens_of_ours_and_all_of_them_make_one_update(monkeypatch):
    given = []

    class Noting(Trainer):
        def __init__(self, args, **more):
            given.append((args.per_device_train_batch_size, args.gradient_accumulation_steps))
            super().__init__(args, **more)

    monkeypatch.setattr(sys.modules["trl"], "GRPOTrainer", Noting)
    for tokens in (100_000, 512, 96, 1):  # a row has 32 + 64
        monkeypatch.setattr(trl_arms, "tokens_of_ours", lambda *_, limit=tokens: limit)
        trl_arms.trl("P4G8T64V2048", 0.0, 4)
    assert given == [(32, 1), (4, 8), (1, 32), (1, 32)]


@pytest.mark.usefixtures("fake_trl")
def test_trl_does_not_load_a_vllm_that_it_leaves_unused():
    trl_arms.trl("P4G8T64V2048", 0.0, 4)
    assert sys.modules["trl"].import_utils.is_vllm_available(min_version="0.26.0") is False


def test_trls_vllm_is_of_float32_as_ours(monkeypatch):
    """Left alone it samples from float32 weights in bfloat16."""
    theirs = SimpleNamespace(VLLMGeneration=SimpleNamespace(), LLM=dict)
    generation = SimpleNamespace(vllm_generation=theirs)
    monkeypatch.setitem(sys.modules, "trl.generation", generation)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    trl_arms.prepare_vllm_of_trl()
    assert theirs.LLM(model="a") == {"model": "a", "dtype": "float32"}


@pytest.mark.usefixtures("fake_trl")
def test_nothing_is_left_of_trls_step_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_trl, "model_folder", lambda shape, device: tmp_path)
    setting = gpu.Setting("cpu", "tiny")
    seconds, gib = gpu_trl.trl_step(setting, 1300, False, torch.float32)
    assert seconds > 0 and gib == 0
    assert list(tmp_path.iterdir()) == []
