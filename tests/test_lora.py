"""Adapters: their gradients are peft's own, what they change reaches the sampler and the files, and
without them the model is what it was."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import exact_matrix
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_learner import batch_of, config, meet
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    Qwen2Config,
    Qwen3MoeConfig,
)

import checkpoint
import packing
import sft
import train
from checkpoint import checkpoint_bytes
from common import UserError, load_config
from policy import (
    ParameterCounts,
    add_adapters,
    count_parameters,
    model_weights,
    move_frozen,
    named_weights,
    rounded,
)
from preflight import memory_estimate

CPU = torch.device("cpu")
RANK = 4


def policy_of(model: Path, *flags) -> SimpleNamespace:
    """(config, engine) of a policy whose adapters are not 0 any more."""
    meet()
    c = config(model, f"--lora_rank={RANK}", *flags)
    torch.manual_seed(0)
    engine = train.load_policy(c, CPU)
    disturb(engine.module.lm)
    return SimpleNamespace(c=c, engine=engine, lm=engine.module.lm)


def disturb(lm) -> None:
    """Random numbers into all adapters: those of B begin at 0."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.05 * noise)


def logps_of(engine, batch: dict):
    return engine(batch["ids"], batch["prompt_lengths"], batch["lengths"])[0]  # (n, T)


def one_update(policy) -> None:
    batch = batch_of()
    policy.engine.backward(-logps_of(policy.engine, batch).sum(), scale_wrt_gas=False)
    policy.engine.step()


def adapters_of(lm) -> dict:
    """{name as in peft's own model: parameter}"""
    names = {}
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            names["base_model.model." + name] = parameter
    return names


@pytest.mark.parametrize("recompute", ["False", "True"])
def test_gradients_of_packed_rows_are_those_of_pefts_own_model_on_plain_rows(
    tiny_model_dir, recompute
):
    policy = policy_of(tiny_model_dir, f"--gradient_checkpointing={recompute}")
    batch = batch_of()
    weights = torch.randn(len(batch["ids"]), generator=torch.Generator().manual_seed(2))  # (n,)
    loss = -(weights[:, None] * logps_of(policy.engine, batch)).sum()
    policy.engine.backward(loss, scale_wrt_gas=False)

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    theirs = get_peft_model(base, adapter)
    disturb(theirs)
    for i, weight in enumerate(weights):
        prompt, length = int(batch["prompt_lengths"][i]), int(batch["lengths"][i])
        row = batch["ids"][i, : prompt + length]
        logps = theirs(row[None]).logits[0].log_softmax(1)  # (S, V)
        places = torch.arange(prompt, prompt + length)
        (-weight * logps[places - 1, row[places]].sum()).backward()

    found = adapters_of(policy.lm)
    wanted = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys() and len(found) == 2 * 7 * 2  # A and B, 7 layers in each
    for name, parameter in wanted.items():
        assert torch.equal(found[name], parameter)
        gap = (found[name].grad - parameter.grad).abs().max()
        assert gap < 2e-5 * parameter.grad.abs().max(), name
        assert parameter.grad.abs().max() > 1e-3, name


def test_only_adapters_are_trained(tiny_model_dir):
    policy = policy_of(tiny_model_dir)
    before = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}
    one_update(policy)
    for name, parameter in policy.lm.named_parameters():
        assert torch.equal(parameter, before[name]) == (".lora_" not in name), name
    (group,) = policy.engine.optimizer.param_groups
    parameters = count_parameters(policy.lm)
    assert sum(p.numel() for p in group["params"]) == parameters.trained
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert parameters.all - parameters.trained == base.num_parameters()


def test_fresh_adapters_change_no_bit_and_no_name(tiny_model_dir):
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    adapted = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    sentence = add_adapters(adapted, RANK, base="me/model")
    assert sentence == (
        "adapters of rank 4 on 14 linear layers: 0.02M of 0.43M parameters are trained"
    )
    ours = dict(named_weights(adapted, 0))
    theirs = dict(named_weights(plain, 0))
    assert list(ours) == list(theirs) and "lm_head.weight" in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_reference_is_the_policy_with_adapters_off(tiny_model_dir, beta):
    policy = policy_of(tiny_model_dir, f"--beta={beta}")
    reference = train.load_reference(policy.c, policy.engine, CPU)
    if beta == 0:
        assert reference is None
        return
    batch = batch_of()
    alone = train.load_lm(policy.c | {"lora_rank": 0}, trains=False, device=CPU)
    with torch.no_grad():
        assert torch.equal(logps_of(reference, batch), logps_of(alone, batch))
    # and it leaves them on, and to be trained
    assert not torch.equal(logps_of(policy.engine, batch), logps_of(alone, batch))
    before = {name: p.detach().clone() for name, p in adapters_of(policy.lm).items()}
    one_update(policy)
    for name, parameter in adapters_of(policy.lm).items():
        assert not torch.equal(parameter, before[name]), name


class Sampler:
    """An engine on the policy's GPU, and what was done around it, in order."""

    sleeps = True

    def __init__(self, calls: list):
        self.wake = lambda: calls.append("wake")
        self.sync = lambda weights: calls.append(["sync", len(list(weights))])


def test_frozen_weights_leave_a_gpu_before_the_sampler_takes_it(tiny_model_dir, monkeypatch):
    """They come back when it sleeps: `train` below collect(). Only the calls: no GPU is here."""
    calls = []
    monkeypatch.setattr(train, "move_frozen", lambda lm, device: calls.append(device))
    policy = policy_of(tiny_model_dir)
    run = SimpleNamespace(config=policy.c, engine=policy.engine, sampler=Sampler(calls))
    train.sync_weights(run)
    run.sampler.sleeps = False
    train.sync_weights(run)
    assert calls == ["cpu", "wake", ["sync", 27], "wake", ["sync", 27]]


def test_what_leaves_the_gpu_is_frozen_and_what_is_trained_stays(tiny_model_dir):
    """DeepSpeed has the trained weights in buffers of its own, which would not notice."""
    weights = []
    for parameter in policy_of(tiny_model_dir).lm.parameters():
        data = SimpleNamespace(to=lambda device: f"moved to {device}")
        weights.append(SimpleNamespace(requires_grad=parameter.requires_grad, data=data))
    move_frozen(SimpleNamespace(parameters=lambda: weights), "cpu")
    moved = [weight.data == "moved to cpu" for weight in weights]
    assert moved == [not weight.requires_grad for weight in weights]
    assert 0 < sum(moved) < len(moved)


@pytest.mark.parametrize("shape", ["gpt2", "qwen2_untied", "qwen2_bfloat16"])
def test_merged_weights_are_the_model_with_its_adapters(shape):
    torch.manual_seed(0)
    small = {"vocab_size": 101, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    qwen2 = Qwen2Config(**small, num_key_value_heads=2, intermediate_size=64)
    qwen2.tie_word_embeddings = shape != "qwen2_untied"
    kind = GPT2Config(**small) if shape == "gpt2" else qwen2
    dtype = torch.bfloat16 if shape == "qwen2_bfloat16" else torch.float32
    adapted = AutoModelForCausalLM.from_config(kind, dtype=dtype).eval()
    plain = AutoModelForCausalLM.from_config(kind, dtype=dtype).eval()
    add_adapters(adapted, RANK, base="")
    disturb(adapted)
    before = logits_of(adapted)
    weights = dict(named_weights(adapted, 0))
    assert weights.keys() == set(plain.state_dict())
    assert all(tensor.dtype == dtype for tensor in weights.values())
    plain.load_state_dict(weights)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02  # of the largest logit
    assert (logits_of(plain) - before).abs().max() < tolerance * before.abs().max()


def test_what_is_less_than_half_a_step_of_bfloat16_reaches_the_sampler_in_the_mean():
    """The nearest bfloat16 of W + change would be W."""
    torch.manual_seed(0)
    weight = torch.randn(200, 500).bfloat16().float()
    exponent = weight.abs().log2().floor()
    step = 2 ** (exponent - 7)  # between neighbours there, which have 8 significant bits
    for sign in (1, -1):
        change = sign * 0.1 * step
        assert torch.equal((weight + change).bfloat16().float(), weight)
        moved = rounded(weight + change, torch.bfloat16).float() - weight
        # 100,000 weights, each moved with odds of .1: one standard error is .001
        assert (moved / step).mean() == pytest.approx(sign * 0.1, abs=0.005)
        # the same again
        assert torch.equal(rounded(weight + change, torch.bfloat16).float(), weight + moved)
    # numbers that bfloat16 has stay as they are, and so does what is no number
    assert torch.equal(rounded(weight, torch.bfloat16).float(), weight)
    broken = torch.tensor([0x7FFFFFFF, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)
    assert not rounded(broken.expand(50, 3), torch.bfloat16).isfinite().any()


# --- files


@pytest.fixture(scope="module")
def saved(tiny_model_dir, tmp_path_factory):
    """A policy after an update, and its checkpoint."""
    folder = tmp_path_factory.mktemp("adapters")
    policy = policy_of(tiny_model_dir, f"--output_dir={folder}", "--checkpoint_mode=full")
    one_update(policy)
    policy.tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    policy.path = save(policy, 1)
    return policy


def save(policy, step: int) -> Path:
    memory = checkpoint.TrainerState(step, {}, {})
    return checkpoint.save(memory, policy.engine, policy.tokenizer, policy.c, set())


def logits_of(lm):
    with torch.no_grad():
        return lm(torch.arange(5, 30)[None]).logits


def assert_same_model(lm, policy) -> None:
    """An ordinary model answers as the policy does, and not as its base."""
    policy.lm.set_attn_implementation("sdpa")
    wanted = logits_of(policy.lm)
    policy.lm.set_attn_implementation(packing.NAME)
    base = AutoModelForCausalLM.from_pretrained(policy.c["model"])
    assert (logits_of(lm) - wanted).abs().max() < 1e-5
    assert (logits_of(base) - wanted).abs().max() > 1e-2


def test_a_checkpoint_is_an_ordinary_model_and_its_adapter_folder_is_pefts(saved, tmp_path):
    checkpoint.export(saved.path, tmp_path / "exported")
    for folder in (saved.path, tmp_path / "exported"):
        merged, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        assert_same_model(merged, saved)
        base = AutoModelForCausalLM.from_pretrained(saved.c["model"])
        assert_same_model(PeftModel.from_pretrained(base, folder / "adapter"), saved)
        adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == saved.c["model"]
        assert (adapter["r"], adapter["lora_alpha"]) == (RANK, 2 * RANK)


def test_an_export_holds_the_very_weights_that_the_sampler_got(saved, tmp_path):
    checkpoint.export(saved.path, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    checkpointed = load_file(saved.path / "model.safetensors")
    for name, tensor in model_weights(saved.lm, 0):
        assert torch.equal(exported[name], tensor), name
        assert torch.equal(checkpointed[name], tensor), name


def test_what_goes_to_the_hub_has_the_adapter_too(saved, tmp_path):
    checkpoint.link_model(saved.path, tmp_path / "copy")
    files = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*")}
    assert {"model.safetensors", "adapter/adapter_model.safetensors"} <= files
    assert not any("engine" in name or "train_config" in name for name in files)


def test_a_policy_goes_on_from_a_checkpoint_bit_for_bit(tiny_model_dir, tmp_path):
    """Whole runs do so below."""
    one = policy_of(tiny_model_dir, f"--output_dir={tmp_path}")
    one.tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    one_update(one)
    path = save(one, 1)
    one_update(one)
    two = policy_of(tiny_model_dir, f"--output_dir={tmp_path}")
    checkpoint.load(path, two.engine, tmp_path)
    one_update(two)
    theirs = dict(two.lm.named_parameters())
    for name, parameter in one.lm.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    fresh = policy_of(tiny_model_dir, f"--output_dir={tmp_path}")
    one_update(fresh)
    assert not torch.equal(logps_of(fresh.engine, batch_of()), logps_of(one.engine, batch_of()))


# --- what is refused, and what is foretold


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--lora_rank=-1"], "lora_rank=-1 must be at least 0 and at most 1024"),
        (["--lora_rank=1025"], "lora_rank=1025 must be"),
        (["--lora_rank=4", "--reference_placement=cpu"], "no second model.*'cpu'"),
        (["--lora_rank=4", "--reference_placement=sharded"], "no second model.*'sharded'"),
    ],
)
def test_what_can_not_be_is_refused_with_a_sentence(flags, words):
    with pytest.raises(UserError, match=words):
        load_config(flags)


def test_a_checkpoint_does_not_go_on_with_another_rank_or_optimizer_state(saved):
    checkpoint.check_fit(saved.path, saved.c)
    for rank in (0, 8):
        with pytest.raises(UserError, match=f"lora_rank=4.*this run has {rank}"):
            checkpoint.check_fit(saved.path, saved.c | {"lora_rank": rank})
    other = saved.c | {"optimizer_options": {"amsgrad": True}}
    with pytest.raises(UserError, match=r"amsgrad=False.*this run has True"):
        checkpoint.check_fit(saved.path, other)


def test_a_warm_start_does_not_pretend_to_train_adapters(tmp_path):
    c = load_config(["--lora_rank=4", f"--output_dir={tmp_path}"])
    with pytest.raises(UserError, match=r"sft\.py trains all weights"):
        sft.check(c, {"steps": 1, "learning_rate": 1e-3, "batch_size": 4}, 1)


def test_without_peft_there_is_a_sentence(tiny_model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="lora_rank=4 needs peft"):
        add_adapters(AutoModelForCausalLM.from_pretrained(tiny_model_dir), 4, base="")


@pytest.mark.slow
def test_peft_is_imported_for_adapters_only(tiny_model_dir):
    lines = ["import sys, torch, train", "from common import load_config"]
    lines += [f"c = load_config(['--model={tiny_model_dir}'])"]
    lines += ["train.load_lm(c, True, torch.device('cpu'))", "assert 'peft' not in sys.modules"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_memory_and_checkpoints_count_an_optimizer_for_adapters_only():
    c = load_config(["--lora_rank=4", "--beta=0.1", "--dtype=bfloat16"])
    shape = Qwen2Config(num_hidden_layers=2)
    parameters = ParameterCounts(1010, 10)
    table = memory_estimate(c, shape, parameters, 1)
    assert (table["weights"], table["gradients"]) == (2020, 20)
    assert (table["optimizer"], table["reference"]) == (10 * (4 + 8), 0)
    # bfloat16: DeepSpeed's weights and Hugging Face's
    assert checkpoint_bytes(c, parameters) == 1010 * (2 + 2) + 10 * (4 + 8)
    assert checkpoint_bytes(c | {"checkpoint_mode": "shallow"}, parameters) == 1010 * 2 + 120


# --- whole runs


class AdapterCase(exact_matrix.Case):
    def flags(self) -> list[str]:
        return [*super().flags(), f"--lora_rank={RANK}"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [("hf", 0, 2), ("hf", 1, 2), ("hf", 2, 2), ("vllm", 3, 2)])
def test_a_killed_run_with_adapters_goes_on_bit_for_bit(tiny_model_dir, tmp_path, case):
    assert exact_matrix.compare(tiny_model_dir, tmp_path, AdapterCase(*case)) == ""
    left = tmp_path / "whole" / "step_000004"
    mismatch = exact_matrix.steps_in(tmp_path / "whole")[-1]
    assert mismatch["sampling/sampling_logp_difference/mean"] < 1e-5
    assert mismatch["kl"] > 1e-4  # what the sampler would be off by without adapters
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    theirs = PeftModel.from_pretrained(base, left / "adapter")
    gap = logits_of(theirs) - logits_of(AutoModelForCausalLM.from_pretrained(left))
    assert gap.abs().max() < 1e-5


def test_adapters_on_fused_experts_are_refused():
    """peft wraps them, but they are no linear layers whose adapters could be merged."""
    shape = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4}
    lm = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape, moe_intermediate_size=16))
    with pytest.raises(UserError, match=r"'qwen3_moe' that are no linear layer's .*lora_rank=0"):
        add_adapters(lm, 4, base="mine")
