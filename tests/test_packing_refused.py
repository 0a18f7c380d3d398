"""Which models and configs can't be packed, and what packing leaves of a model."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from packed_rows import MIXED, batch_of, both, model

import packing
import policy
import sft
from common import UserError, load_config
from policy import Policy
from preflight import load_inputs


def states(lm, rows=MIXED, pack=True):
    batch = batch_of(rows)
    return Policy(lm, 1.0, 64, pack=pack)(batch["ids"], batch["prompt_lengths"], batch["lengths"])


LONGEST = max(len(p) + len(c) for p, c in MIXED)


@pytest.mark.parametrize(
    "name, changes",
    [("Mistral", {}), ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0})],
)
def test_a_sliding_window_is_refused_where_it_would_cut_and_only_there(name, changes):
    both(model(name, sliding_window=LONGEST, **changes), batch_of(MIXED))
    narrow = model(name, sliding_window=LONGEST - 1, **changes)
    with pytest.raises(UserError, match=r"sliding window.*pack_sequences=False"):
        states(copy.deepcopy(narrow))
    states(narrow, pack=False)


def test_a_window_is_compared_with_rows_without_their_padding():
    """A micro-batch may be cut from a wider batch."""
    batch = batch_of(MIXED, junk=3)
    arguments = batch["ids"], batch["prompt_lengths"], batch["lengths"]
    assert packing.pack(*arguments)[0].longest == LONGEST < batch["ids"].shape[1]


GPT_OSS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 64,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    "name, changes, words",
    [("Gemma2", {"attn_logit_softcapping": 30.0}, "softcap"), ("GptOss", GPT_OSS, "s_aux")],
)
def test_attention_that_wants_more_than_causal_order_is_refused(name, changes, words):
    with pytest.raises(UserError, match=rf"uses {words}.*pack_sequences=False"):
        states(model(name, **changes))
    states(model(name, **changes), pack=False)


def test_attention_dropout_is_no_matter_outside_training():
    both(model(attention_dropout=0.5), batch_of(MIXED))


def test_a_mask_and_dropout_are_refused():
    q = torch.zeros(1, 4, 3, 8)
    packed, _ = packing.pack(torch.tensor([[1, 2, 3]]), torch.tensor([1]), torch.tensor([2]))
    module = torch.nn.Linear(1, 1)
    with pytest.raises(UserError, match="uses a mask"):
        packing.attention(module, q, q, q, torch.ones(1, 1, 3, 3), packed=packed)
    with pytest.raises(UserError, match="uses dropout"):
        packing.attention(module, q, q, q, None, packed=packed, dropout=0.1)


# what stands between the layers' tokens: states that run on, position biases of their own,
# attention that is not told of the packing
OTHERS = {
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "StableLm": {},
    "FalconH1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_n_groups": 1,
        "mamba_d_ssm": 64,
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_is_more_than_causal_attention_is_refused_before_it_trains(name):
    lm = model(name, **OTHERS[name])
    usual = lm.config._attn_implementation
    with pytest.raises(UserError, match=r"can't have its sequences packed.*pack_sequences=False"):
        Policy(lm, 1.0, 64)
    assert lm.config._attn_implementation == usual
    states(lm, pack=False)


@pytest.mark.parametrize("distances", [(0.001, 0.0), (0.0, 0.01)], ids=["leak", "gap"])
def test_a_leak_from_other_rows_alone_is_refused_and_so_is_a_gap_to_padded_ones(
    distances, monkeypatch
):
    monkeypatch.setattr(packing, "try_packing", lambda lm: distances)
    with pytest.raises(UserError, match="can't have its sequences packed"):
        Policy(model(), 1.0, 64)


def test_a_model_that_is_packed_already_goes_into_another_policy():
    lm = model()
    once = states(lm)
    assert torch.equal(states(lm)[0], once[0])


def test_no_keys_are_kept_for_tokens_that_never_come():
    lm = model()
    kept = []
    lm.base_model.register_forward_hook(lambda m, given, out: kept.append(out.past_key_values))
    states(lm)
    assert kept and not any(kept)


@pytest.mark.parametrize("name, window", [("sliding_window", 63), ("attention_chunk_size", 63)])
def test_a_window_that_is_narrower_than_a_row_may_be_is_refused_from_the_config_alone(name, window):
    """Some models have it in their masks only."""
    config = SimpleNamespace(model_type="m", **{name: window})
    packing.check_window(config, window)
    sentence = rf"{name}=63 and rows may have 64 tokens.*pack_sequences=False"
    with pytest.raises(UserError, match=sentence):
        packing.check_window(config, window + 1)
    packing.check_window(SimpleNamespace(model_type="m", **{name: None}), 10**6)


def test_a_run_with_such_a_window_is_refused_before_weights_load(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 16}
    (folder / "config.json").write_text(json.dumps(config))
    flags = [f"--model={folder}", "--dataset.name=countdown", "--reward_workers=0"]
    with pytest.raises(UserError, match=r"sliding_window=16 and rows may have"):
        load_inputs(load_config(flags), 1)
    load_inputs(load_config([*flags, "--pack_sequences=False"]), 1)
    with pytest.raises(UserError, match=r"sliding_window=16 and rows may have"):
        sft.load_model(load_config(flags))  # of a warm start


def test_a_packed_model_can_not_be_called_by_itself_and_can_again_once_it_is_set_back():
    lm = model()
    ids = torch.tensor([[5, 6, 7]])
    wanted = lm(ids).logits
    policy = Policy(lm, 1.0, 64)
    for call in (policy.lm, policy.lm.base_model):
        with pytest.raises(ValueError, match=r"policy\.Policy"):
            call(ids)
    lm.set_attn_implementation("sdpa")
    assert torch.equal(lm(ids).logits, wanted)


def test_a_saved_model_does_not_know_that_it_was_packed(tmp_path):
    lm = model()
    ids = torch.tensor([[5, 6, 7]])
    wanted = lm(ids).logits
    Policy(lm, 1.0, 64).lm.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, wanted)


def test_a_policy_that_is_not_packed_leaves_the_model_alone():
    lm = model()
    Policy(lm, 1.0, 64, pack=False)
    assert lm.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(
    "name, changes",
    [
        ("Granite", {"logits_scaling": 4.0}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Gemma2", {"final_logit_softcapping": 30.0}),
        ("Phi", {}),
    ],
)
def test_a_model_whose_logits_are_more_than_its_head_says_is_refused(name, changes, pack):
    lm = model(name, **changes)
    with pytest.raises(UserError, match="has a bias, a cap or a scale on the logits"):
        Policy(lm, 1.0, 64, pack=pack)
    assert not policy.has_plain_head(lm)  # what preflight asks, before weights load


def test_a_cap_under_its_other_name_is_refused():
    """RecurrentGemma's."""
    lm = model("Qwen2", logits_soft_cap=30.0)
    assert not policy.has_plain_head(lm)


@pytest.mark.parametrize("name, changes", [("Granite", {"logits_scaling": 1.0}), ("Qwen2", {})])
def test_a_plain_head_is_known_without_weights(name, changes):
    assert policy.has_plain_head(model(name, **changes))
