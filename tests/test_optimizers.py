"""The table of optimizers: what it says of each is true, and none steps on a NaN."""

import pytest
import torch
from test_learner import batch_of, config, meet

import train
from checkpoint import checkpoint_bytes
from checks import OPTIMIZERS
from common import UserError, load_config
from policy import ParameterCounts, make_optimizer, try_optimizer
from preflight import load_inputs, memory_estimate

CPU = torch.device("cpu")


def one_step(name: str, gradient: float = 0.1, **flags):
    """(optimizer, weights before, weights after) of a matrix of 64 x 64."""
    c = load_config([f"--optimizer={name}", "--learning_rate=1e-3"])
    weights = torch.nn.Parameter(torch.ones(64, 64))
    before = weights.detach().clone()
    optimizer = make_optimizer([weights], c | flags)
    weights.grad = torch.full((64, 64), gradient)
    optimizer.step()
    return optimizer, before, weights.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_as_many_bytes_as_its_line_says(name):
    optimizer, *_ = one_step(name)
    size = 0
    for state in optimizer.state.values():
        size += sum(x.numel() * x.element_size() for x in state.values() if torch.is_tensor(x))
    # a counter, and adafactor's two rows, are less than a byte of each of 4,096 parameters
    assert OPTIMIZERS[name].state_bytes == pytest.approx(size / 64**2, abs=0.2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_measures_the_gradient_clips_it_and_refuses_a_nan(name):
    optimizer, before, after = one_step(name)
    assert (after < before).all()
    assert optimizer._global_grad_norm == pytest.approx(6.4, rel=1e-4)  # .1 * 64
    # clipped to a norm of 1
    assert optimizer.param_groups[0]["params"][0].grad.norm() == pytest.approx(1.0, rel=1e-4)
    assert optimizer.overflow is False
    for limit, norm in ((0.25, 0.25), (0.0, 6.4)):
        optimizer, *_ = one_step(name, max_grad_norm=limit)
        clipped = optimizer.param_groups[0]["params"][0].grad.norm()
        assert clipped == pytest.approx(norm, rel=1e-4)

    for value in (float("nan"), float("inf")):
        optimizer, before, after = one_step(name, value)
        assert torch.equal(before, after)
        assert optimizer.overflow is True


def test_weight_decay_is_off_unless_it_is_asked_for():
    _, _, plain = one_step("sgd", gradient=0.0)
    assert (plain == 1.0).all()
    _, _, decayed = one_step("sgd", gradient=0.0, optimizer_options={"weight_decay": 0.5})
    assert decayed[0, 0] == pytest.approx(1 - 1e-3 * 0.5)
    assert one_step("adamw")[0].defaults["weight_decay"] == 0.0


@pytest.mark.parametrize(
    "options, words",
    [
        ('{"momentum_": 0.9}', "momentum_"),
        ('{"momentum": -1.0}', "Invalid momentum"),
        ('{"momentum": "much"}', "not supported between"),
    ],
)
def test_an_option_that_the_optimizer_does_not_take_is_one_sentence(options, words):
    c = load_config(["--optimizer=sgd", f"--optimizer_options={options}"])
    sentence = f"optimizer_options=.*torch.optim.SGD refuses them: .*{words}"
    with pytest.raises(UserError, match=sentence):
        make_optimizer([torch.zeros(2, 2)], c)


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer_options.betas=[0.9]"],
        ["--optimizer_options={'betas': {}}"],
        ["--optimizer_options.betas=[0.9,0.95,0.99]"],
        ["--optimizer=adafactor", "--optimizer_options.eps=[1]", "--zero_stage=0"],
        ["--optimizer=adafactor", "--optimizer_options.eps=[None,0.001,3]", "--zero_stage=0"],
    ],
)
def test_options_that_fail_at_once_or_in_the_first_step_are_one_sentence(flags):
    with pytest.raises(UserError, match=r"optimizer_options=.* refuses them: "):
        try_optimizer(load_config(flags))
    try_optimizer(load_config(["--optimizer_options.amsgrad=True"]))


def test_a_run_tries_its_optimizer_before_weights_load(tiny_model_dir):
    flags = [f"--model={tiny_model_dir}", "--dataset.name=countdown", "--reward_workers=0"]
    with pytest.raises(UserError, match=r"optimizer_options=.* refuses them: "):
        load_inputs(load_config([*flags, "--optimizer_options.betas=[0.9]"]), 1)


def test_an_optimizer_is_refused_at_a_stage_where_it_is_shown_no_matrices():
    load_config(["--optimizer=adafactor", "--zero_stage=0"])
    with pytest.raises(UserError, match="'adafactor' needs zero_stage 0, not 2"):
        load_config(["--optimizer=adafactor", "--zero_stage=2"])
    load_config(["--optimizer=sgd", "--zero_stage=2"])


def test_old_names_of_adamws_arguments_are_taken_or_explained():
    assert load_config(["--weight_decay=0.1"])["optimizer_options"] == {"weight_decay": 0.1}
    with pytest.raises(UserError, match="betas"):
        load_config(["--adam_beta1=0.8"])


def test_memory_and_size_of_a_checkpoint_follow_the_optimizer():
    from transformers import Qwen2Config

    sizes = {}
    parameters = ParameterCounts(1000, 1000)
    for name in ("adamw", "adafactor"):
        c = load_config([f"--optimizer={name}", "--dtype=float32"])
        table = memory_estimate(c, Qwen2Config(num_hidden_layers=2), parameters, 1)
        sizes[name] = (table["optimizer"], checkpoint_bytes(c, parameters))
    assert sizes == {"adamw": (8000, 16000), "adafactor": (0, 8000)}
    # its shards hold float32 weights once more
    assert checkpoint_bytes(load_config(["--dtype=float32", "--zero_stage=2"]), parameters) == 20000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepspeed_shows_adafactor_whole_matrices_at_stage_0(dtype, tiny_model_dir):
    meet()
    c = config(tiny_model_dir, "--optimizer=adafactor", f"--dtype={dtype}")
    engine = train.load_policy(c, CPU)
    batch = batch_of()
    logps, _ = engine(batch["ids"], batch["prompt_lengths"], batch["lengths"])  # (n, T)
    weight = engine.module.lm.get_input_embeddings().weight
    before = weight.detach().clone()
    engine.backward(-logps.sum(), scale_wrt_gas=False)
    engine.step()
    assert engine.was_step_applied()
    assert not torch.equal(weight, before)
    shapes = set()
    for state in engine.basic_optimizer.state.values():
        if "row_var" in state:
            shapes.add((len(state["row_var"]), state["col_var"].shape[-1]))
    assert tuple(weight.shape) in shapes


def test_an_optimizer_is_one_kernel_unless_another_way_is_asked_for():
    """torch takes one of fused and foreach."""
    for options, fused in (({}, True), ({"foreach": True}, None), ({"fused": False}, False)):
        c = load_config([f"--optimizer_options={options}"])
        assert make_optimizer([torch.zeros(2, 2)], c).defaults["fused"] == fused
    # adafactor has no such kernel
    make_optimizer([torch.zeros(2, 2)], load_config(["--optimizer=adafactor"]))
