"""SmolLM2-135M-Instruct goes through all that the tiny random model goes through elsewhere: slow,
5 GiB of memory a rank. The model comes from PyPI (no test asks the hub): without a network these
tests fail."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from child import ended_well
from exact_matrix import difference, steps_in, without_torchrun
from safetensors.torch import load_file
from servers import ROOT, Fleet
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FLAGS = [
    "--prompts_per_step=2",
    "--num_generations=4",
    "--max_steps=2",
    "--eval_steps=0",
    "--eval_max_prompts=2",
    # rewards that differ within a group, whatever the model can do
    "--reward_funcs=['parity_reward:parity']",
]
SENTENCE = (
    "The capital of France is Paris, and the river that runs through the city is called the Seine."
)
SAVED = "step_000002"


def run(*command, ranks: int = 0) -> subprocess.CompletedProcess:
    """A script of ours on its own, or under torchrun."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = without_torchrun()
    environment["PYTHONPATH"] = str(ROOT / "tests" / "helpers")  # parity_reward
    done = subprocess.run(
        [*launcher, *map(str, command)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    ended_well(done)
    return done


@pytest.fixture(scope="module")
def smollm2_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    run("-m", "bench.smollm2", folder)
    return folder


def train(model: Path, folder: Path, *flags, ranks: int = 0) -> list[dict]:
    """The lines of metrics.jsonl of a run."""
    flags = [*FLAGS, f"--model={model}", f"--output_dir={folder}", *flags]
    run("train.py", "config/smollm2_sentence.py", *flags, ranks=ranks)
    return steps_in(folder)


@pytest.fixture(scope="module")
def trained(smollm2_dir, tmp_path_factory) -> Path:
    """A run of two steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(smollm2_dir, folder, "--save_steps=1")
    return folder


def check_steps(lines: list[dict], gap: float) -> None:
    """Two steps that learnt something; sampler and trainer at most `gap` nats apart."""
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["grad_norm"] > 0 and math.isfinite(line["loss"])
        assert line["sampling/sampling_logp_difference/mean"] < gap


@torch.no_grad()
def test_what_the_file_holds_is_a_model_that_knows_english(smollm2_dir):
    """Query and key rows in another order, or digits that are not split, would not be English."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    assert model(ids, labels=ids).loss.exp() < 10  # 6.9; 49,152 would know nothing
    assert tokenizer.tokenize("357") == ["3", "5", "7"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    asked = prompt["input_ids"]
    answer = model.generate(asked, max_new_tokens=16, do_sample=False)[0, asked.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


def test_it_trains_and_is_saved_as_a_folder(trained, smollm2_dir):
    check_steps(steps_in(trained), 1e-4)
    before = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(trained / SAVED, dtype=torch.float32)
    name = "model.layers.3.self_attn.q_proj.weight"
    gap = (after.state_dict()[name] - before.state_dict()[name]).abs().max()
    assert 0 < gap < 1e-3


def test_a_resumed_run_goes_on_to_the_bit(trained, smollm2_dir, tmp_path):
    resumed = tmp_path / "run"
    shutil.copytree(trained, resumed, ignore=shutil.ignore_patterns(SAVED, "done"))
    lines = train(smollm2_dir, resumed, "--save_steps=1", "--resume_from_checkpoint=latest")
    assert lines == steps_in(trained)
    tensors = []
    for file in ("model.safetensors",):
        one = load_file(trained / SAVED / file)
        assert not difference(one, load_file(resumed / SAVED / file), "", tensors)
    assert len(tensors) > 200


def check_evaluation(model: Path, folder: Path) -> None:
    output = folder / "scores.jsonl"
    flags = [*FLAGS, f"--model={model}", f"--output={output}"]
    done = run("evaluate.py", "config/smollm2_sentence.py", *flags)
    assert "mean@4" in done.stdout
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == 2
    assert all(0 <= record["correct"] <= 4 for record in records)


def check_generation(model: Path, folder: Path) -> None:
    output = folder / "texts.jsonl"
    flags = [*FLAGS, f"--model={model}", f"--output={output}", "--max_prompts=2"]
    run("generate.py", "config/smollm2_sentence.py", *flags)
    assert len(output.read_text().splitlines()) == 2 * 4  # one for each completion


def test_it_is_evaluated_and_generates(trained, tmp_path):
    check_evaluation(trained / SAVED, tmp_path)
    check_generation(trained / SAVED, tmp_path)


def test_two_ranks_at_zero_stage_2_learn_what_one_learns(smollm2_dir, trained, tmp_path):
    flags = ["--zero_stage=2", "--max_steps=1"]
    (line,) = train(smollm2_dir, tmp_path / "run", *flags, ranks=2)
    alone = steps_in(trained)[0]
    assert line["reward"] == alone["reward"]
    assert line["loss"] == pytest.approx(alone["loss"], rel=1e-3, abs=1e-6)
    assert line["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)


# in bfloat16 it was .053 nats (docs/metrics.md)
@pytest.mark.parametrize("flag, gap", [("--dtype=bfloat16", 0.1), ("--lora_rank=8", 1e-4)])
def test_it_trains_in_bfloat16_and_with_adapters(smollm2_dir, tmp_path, flag, gap):
    folder = tmp_path / "run"
    lines = train(smollm2_dir, folder, flag, "--max_logp_difference=-1")
    check_steps(lines, gap)
    # whole weights: what reads the first folder reads this one
    saved = load_file(folder / SAVED / "model.safetensors")
    first = load_file(smollm2_dir / "model.safetensors")
    assert saved.keys() == first.keys()
    check_evaluation(folder / SAVED, tmp_path)
    check_generation(folder / SAVED, tmp_path)


def test_a_server_samples_for_it(smollm2_dir, tmp_path):
    fleet = Fleet([smollm2_dir], tmp_path, "config/smollm2_sentence.py")
    try:
        urls = fleet.ready(0, seconds=900)
        flags = ["--rollout_engine=server", f"--rollout_server={urls}", "--rollout_timeout=300"]
        lines = train(smollm2_dir, tmp_path / "run", *flags)
    finally:
        fleet.close()
    check_steps(lines, 1e-4)
