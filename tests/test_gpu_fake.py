"""The order of calls on a GPU, by a fake of vLLM that knows its rules of sleep: training,
evaluation, InfoSeed, resampling, a resumed run and evaluate.py with on_gpu=True."""

import json
import shutil
from pathlib import Path

import child
import fake_vllm
import pytest
import torch

import evaluate
import rollout
import train
from common import load_config

FLAGS = [
    "--reward_funcs=['length']",
    "--reward_workers=0",
    "--prompts_per_step=4",
    "--num_generations=3",
    "--max_completion_length=6",
    "--max_prompt_length=32",
    "--learning_rate=1e-3",
    "--max_steps=3",
    "--save_steps=2",
    "--eval_steps=2",
    "--eval_max_prompts=4",
    "--eval_num_generations=2",
    "--resample_equal_groups=2",
    "--info_seed_num_seeds=2",
    "--info_seed_lambda=0.1",
    "--beta=0.1",
]


def flags_of(folder: Path, model: Path) -> list[str]:
    for name in "ab":
        rows = [{"prompt": f"{name} {i}", "answer": "1"} for i in range(12)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    sources = [f"--dataset.name={folder / 'a.jsonl'}", f"--eval_dataset.name={folder / 'b.jsonl'}"]
    return [f"--model={model}", *sources, *FLAGS]


def work(main, argv: list[str], calls: Path) -> None:
    torch.set_num_threads(1)
    fake_vllm.install()
    train.evaluate.report = lambda folder: None  # no picture
    real = train.place_frozen

    def place(lm, device):  # sync_weights says "cpu", the learner a torch.device
        fake_vllm.calls.append(f"frozen to {'cpu' if isinstance(device, str) else 'device'}")
        real(lm, device)

    train.place_frozen = place
    try:
        main(load_config(argv))
    finally:
        calls.write_text("\n".join(fake_vllm.calls))


def done(main, argv: list[str], folder: Path) -> list[str]:
    """What was asked of the fake."""
    log = folder / "log"
    status = child.status(child.start(work, main, argv, folder / "calls", log=log))
    assert status == 0, log.read_text()[-3000:]
    return (folder / "calls").read_text().splitlines()


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake")
    argv = [*flags_of(folder, tiny_model_dir), f"--output_dir={folder / 'whole'}"]
    return folder, argv, done(train.main, argv, folder)


def test_a_run_with_everything_goes_through_a_gpus_order_of_calls(whole):
    folder, _, calls = whole
    steps = [line for line in lines_of(folder / "whole") if "reward" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all("resampled_groups" in line and "seed/loss" in line for line in steps)
    assert sum("eval/mean@2" in line for line in lines_of(folder / "whole")) == 3
    for line in steps:
        assert line["sampling/sampling_logp_difference/mean"] < 1e-5
    assert any(call.startswith("sleep") for call in calls)
    # a sync wakes the cache, which lies beside the weights, last of all
    for i, call in enumerate(calls):
        if call == "reload":
            assert calls[i + 1] == "wake kv_cache"
    # asleep it begins to learn, each time: at the start, in the trial, and three steps
    assert sum(call.startswith("sleep") for call in calls) == 5
    back = [i for i, call in enumerate(calls) if call == "frozen to device"]
    assert len(back) == 4  # in the trial and three steps
    assert all(calls[i - 1].startswith("sleep") for i in back)


@pytest.mark.slow
def test_a_resumed_run_goes_through_it_too_and_is_the_same(whole):
    folder, argv, _ = whole
    part = folder / "part"
    shutil.copytree(folder / "whole", part)
    shutil.rmtree(part / "step_000003")
    (part / "done").unlink()
    more = [f"--output_dir={part}", "--resume_from_checkpoint=latest"]
    done(train.main, [*argv, *more], folder)
    one, other = (lines_of(folder / name)[-1] for name in ("whole", "part"))
    for name, value in one.items():
        if not name.startswith(("time/", "tokens_per")):
            assert other[name] == value, name


def exam(c: dict) -> None:
    evaluate.main(c, {"seeds": 1, "output": ""})


@pytest.mark.slow
def test_a_checkpoint_is_scored_by_it_too(whole):
    folder, argv, _ = whole
    calls = done(exam, [*argv, f"--model={folder / 'whole' / 'step_000003'}"], folder)
    assert calls == ["generate"]  # it never sleeps
    assert '"eval/mean@2"' in (folder / "log").read_text()


def test_the_fake_is_as_strict_as_vllm(tiny_model_dir):
    config = load_config([f"--model={tiny_model_dir}", "--dtype=float32"])
    settings = rollout.vllm_settings(str(tiny_model_dir), config, torch.float32, on_gpu=True)
    llm = fake_vllm.FakeLLM(**settings)
    llm.sleep(level=2)
    weights = {"weights_iterator": iter(llm.sampler.model.state_dict().items())}
    with pytest.raises(RuntimeError, match="generate while"):
        llm.enqueue([], [], use_tqdm=False)
    with pytest.raises(RuntimeError, match="reload_weights while"):
        llm.collective_rpc("reload_weights", kwargs=weights)
    llm.wake_up(["weights"])
    llm.collective_rpc("reload_weights", kwargs=weights)
    with pytest.raises(RuntimeError, match=r"generate while \{'kv_cache'\} sleeps"):
        llm.enqueue([], [], use_tqdm=False)
    llm.wake_up(["kv_cache"])
    llm.enqueue([], [], use_tqdm=False)
