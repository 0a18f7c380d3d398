"""The proof that a sync works, at the start of every run: changed weights go to the sampler and
come back, and the policy is to the bit what it was."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import learner
import policy
import rollout
import train
from common import RunStopped, load_config
from policy import flip_signs, named_weights
from ranks import World, start_distributed
from server import nccl


def config(model, *flags) -> dict:
    plain = ["--rollout_engine=hf", "--max_completion_length=8", "--dataset.name=countdown"]
    return load_config([f"--model={model}", *plain, *flags])


class Sampler(rollout.HfEngine):
    """It copies the weights, as other engines do. drops(name): whether a weight never arrives."""

    drops = staticmethod(lambda name: False)

    def sync(self, named_parameters):
        kept = [(name, w.clone()) for name, w in named_parameters if not self.drops(name)]
        super().sync(kept)


@pytest.fixture(scope="module")
def device():
    return start_distributed().device


@pytest.fixture(scope="module")
def lively(tiny_model_dir, tmp_path_factory):
    """The tiny model, with weights that matter: the random one says nearly the same of all."""
    folder = tmp_path_factory.mktemp("lively")
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    lm.save_pretrained(folder)
    return folder


def run_of(c: dict, device) -> SimpleNamespace:
    """What prove_sync reads of a Run."""
    rows = [{"prompt_ids": [5 + i, 6, 7]} for i in range(9)]
    said = []
    # characters of the tiny model: nothing is decoded for a proof but its texts
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids), chat_template=None)
    return SimpleNamespace(
        config=c,
        world=World(0, 1, device),
        engine=train.load_policy(c, device),
        sampler=Sampler(c["model"], c, policy.dtype_of(c), device),
        inputs=SimpleNamespace(pools=[rows], tokenizer=tokenizer, stop_ids=[0]),
        say=said.append,
        said=said,
    )


@pytest.mark.parametrize("kind, head", [("biogpt", "output_projection"), ("llama", "lm_head")])
def test_a_tied_head_goes_to_the_sampler_under_its_own_name(kind, head):
    shape = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    c = AutoConfig.for_model(kind, **shape, **special, tie_word_embeddings=True)
    lm = AutoModelForCausalLM.from_config(c)
    names = [name for name, _ in named_weights(lm, 0)]
    assert f"{head}.weight" in names and sorted(names) == sorted(lm.state_dict())


def weights_of(run) -> dict:
    lm = run.engine.module.lm
    return {name: w.clone() for name, w in named_weights(lm, run.config["zero_stage"])}


@pytest.mark.parametrize(
    "stage, dtype",
    [
        (0, "float32"),
        (3, "bfloat16"),
        *(
            pytest.param(stage, dtype, marks=pytest.mark.slow)
            for stage, dtype in ((0, "bfloat16"), (2, "float32"), (2, "bfloat16"), (3, "float32"))
        ),
    ],
)
def test_a_run_begins_with_a_proof_that_leaves_everything_as_it_was(stage, dtype, lively, device):
    # at another temperature than that of the trial, which is 1
    flags = [f"--zero_stage={stage}", f"--dtype={dtype}", "--temperature=0.5"]
    run = run_of(config(lively, *flags), device)
    before = weights_of(run)
    train.prove_sync(run)
    after = weights_of(run)
    held = run.sampler.model.state_dict()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name
        assert torch.equal(weight, held[name]), name
    pattern = r"the sampler follows the weights: (\S+) nats a token from changed ones, (\S+) from"
    followed, stale = map(float, re.match(pattern, run.said[0]).groups())
    assert followed < (1e-5 if dtype == "float32" else 0.02)
    assert stale > 0.1


@pytest.mark.parametrize("stage, shared", [(0, True), (1, True), (2, True), (3, False)])
def test_the_hf_engine_holds_no_second_copy_of_weights_that_are_whole(
    stage, shared, lively, device
):
    c = config(lively, f"--zero_stage={stage}")
    lm = train.load_policy(c, device).module.lm
    sampler = rollout.HfEngine(c["model"], c, policy.dtype_of(c), device)
    flip_signs(lm, stage)
    sampler.sync(named_weights(lm, stage))
    held = sampler.model.state_dict()
    for name, weight in named_weights(lm, stage):
        assert torch.equal(held[name], weight)
        assert (held[name].data_ptr() == weight.data_ptr()) == shared


@pytest.mark.parametrize(
    "lost",
    ["", "layers.1", "mlp", "q_proj", "embed_tokens lm_head"],  # the last two are one weight
    ids=["all", "a layer", "mlp", "queries", "embeddings"],
)
def test_weights_that_do_not_arrive_stop_a_run_before_its_first_step(lost, lively, device):
    run = run_of(config(lively), device)
    words = lost.split() or [""]
    run.sampler.drops = lambda name: any(word in name for word in words)
    with pytest.raises(RunStopped, match="do not arrive in the rollout engine: for a trial"):
        train.prove_sync(run)


def test_distances_that_are_no_numbers_prove_nothing(lively, device, monkeypatch):
    monkeypatch.setattr(train.learner, "sampler_distance", lambda *args: math.nan)
    with pytest.raises(RunStopped, match="do not arrive in the rollout engine: for a trial"):
        train.prove_sync(run_of(config(lively), device))


def test_minus_1_skips_the_proof(lively, device):
    run = run_of(config(lively, "--max_logp_difference=-1"), device)
    run.sampler.drops = lambda name: True
    train.prove_sync(run)
    assert run.said == []


@pytest.mark.parametrize("stage", [0, 3])
def test_every_weight_is_changed_and_changed_back(stage, lively, device):
    run = run_of(config(lively, f"--zero_stage={stage}"), device)
    lm = run.engine.module.lm
    before = weights_of(run)
    flip_signs(lm, stage)
    for name, weight in weights_of(run).items():
        turned = before[name].flatten()[:: policy.FLIP_EVERY]
        # of matrices: a bias may be all zeros
        assert weight.dim() == 1 or turned.any(), name
        assert (weight != before[name]).sum() == (turned != 0).sum(), name
    flip_signs(lm, stage)
    for name, weight in weights_of(run).items():
        assert torch.equal(weight, before[name]), name


def test_zero_3_puts_a_gigabyte_together_at_a_time(lively, device, monkeypatch):
    run = run_of(config(lively, "--zero_stage=3"), device)
    lm = run.engine.module.lm
    sizes = []
    real = policy.whole

    def whole(parameters, stage):
        tensors = real(parameters, stage)
        sizes.append([t.nbytes for t in tensors])
        return tensors

    monkeypatch.setattr(policy, "whole", whole)
    everything = weights_of(run)
    assert len(sizes) == 1  # it is small
    sizes.clear()
    limit = 300_000
    monkeypatch.setattr(policy, "GATHERED_BYTES", limit)
    again = weights_of(run)
    assert all(torch.equal(everything[name], again[name]) for name in everything)
    assert 1 < len(sizes) < len(list(lm.parameters()))
    for portion in sizes:
        assert sum(portion) <= limit or len(portion) == 1


def test_over_nccl_the_gpu_is_waited_for_before_a_weight_is_made_and_before_it_is_sent(monkeypatch):
    events = []
    monkeypatch.setattr(nccl, "wait_for_gpu", lambda: events.append("wait"))

    def weights():
        for name in "ab":
            events.append(f"make {name}")
            yield name, None

    transfer = object.__new__(nccl.NcclTransfer)
    transfer.weights = weights()
    for name, _ in transfer:
        events.append(f"send {name}")
    one, two = (["wait", f"make {name}", "wait", f"send {name}"] for name in "ab")
    assert events == [*one, *two, "wait"]


def test_the_proof_is_of_all_ranks_together(lively, device, monkeypatch):
    """Else one of them would stop alone, and the others would wait for it."""
    run = run_of(config(lively), device)
    batch = train.trial_batch(run)
    others = torch.tensor([30.0, 7.0])  # of another rank: nats apart, tokens
    own = learner.sampler_distance(run.engine, batch, run.config)
    tokens = batch["lengths"].sum().item()
    # ranks agree on other numbers too, by an operation of their own
    monkeypatch.setattr(learner, "across_ranks", lambda own, *op: own if op else own + others)
    together = learner.sampler_distance(run.engine, batch, run.config)
    assert together == pytest.approx((own * tokens + 30.0) / (tokens + 7.0), rel=1e-5)
