"""The order of calls on a GPU, by a fake of vLLM that knows its rules of sleep: training,
evaluation, InfoSeed, resampling, a resumed run and evaluate.py with on_gpu=True. And what two
ranks log of all that."""

import json
import os
import shutil
from pathlib import Path
from statistics import fmean

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
    "--info_seed_reward=0.3",
    "--beta=0.1",
    "--log_rollouts_steps=1",
]


def flags_of(folder: Path, model: Path) -> list[str]:
    for name in "ab":
        rows = [{"prompt": f"{name} {i}", "answer": "1"} for i in range(12)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    sources = [f"--dataset.name={folder / 'a.jsonl'}", f"--eval_dataset.name={folder / 'b.jsonl'}"]
    return [f"--model={model}", *sources, *FLAGS]


def work(main, argv: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    fake_vllm.install()
    train.evaluate.report = lambda folder: None  # no picture
    real = train.move_frozen

    def place(lm, device):  # sync_weights says "cpu", the learner a torch.device
        fake_vllm.calls.append(f"frozen to {'cpu' if isinstance(device, str) else 'device'}")
        real(lm, device)

    train.move_frozen = place
    real_targets = train.learner.group_targets

    def group_targets(measured, *args):  # measured (P, G + S): 1 where a seed has earned something
        earned = (measured.rewards != measured.task_rewards).int()
        fake_vllm.calls.append(f"seeds earn {earned.tolist()}")
        return real_targets(measured, *args)

    train.learner.group_targets = group_targets
    try:
        main(load_config(argv))
    finally:
        rank = os.environ.get("RANK", "0")
        (folder / f"calls_{rank}").write_text("\n".join(fake_vllm.calls))


def done(main, argv: list[str], folder: Path, size: int = 2) -> list[str]:
    """What the first of `size` ranks asked of the fake."""
    log = folder / "log"
    ranks = child.start_ranks(size, work, main, argv, folder, logs=[log] * size)
    assert set(child.statuses(ranks)) == {0}, log.read_text()[-3000:]
    return (folder / "calls_0").read_text().splitlines()


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(run: Path) -> list[dict]:
    return lines_of(run / "metrics.jsonl")


def steps_of(run: Path) -> list[dict]:
    return [line for line in metrics_of(run) if "reward" in line]


def logged(run: Path, step: int) -> list[dict]:
    """Both ranks' rollouts of a step."""
    first, second = [run / "rollouts" / f"step_{step:06d}.rank_{rank}.jsonl" for rank in (0, 1)]
    return lines_of(first) + lines_of(second)


@pytest.fixture(scope="module")
def whole(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake")
    argv = [*flags_of(folder, tiny_model_dir), f"--output_dir={folder / 'whole'}"]
    return folder, argv, done(train.main, argv, folder)


def test_a_run_with_everything_goes_through_a_gpus_order_of_calls(whole):
    folder, _, calls = whole
    steps = steps_of(folder / "whole")
    assert [line["step"] for line in steps] == [1, 2, 3]
    wanted = {"resampled_groups", "seed/loss", "seed/pred_acc"}
    assert all(wanted <= set(line) for line in steps)
    assert sum("eval/mean@2" in line for line in metrics_of(folder / "whole")) == 3
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


def test_what_seeds_earn_enters_the_targets_in_the_seed_rows_alone(whole):
    _, _, calls = whole
    earned = [call for call in calls if call.startswith("seeds earn")]
    assert earned == [f"seeds earn {[[0, 0, 0, 1, 1]] * 4}"] * 3  # in each step


def test_what_is_logged_of_a_step_is_of_both_ranks_and_without_seed_rows(whole):
    run = whole[0] / "whole"
    for line in steps_of(run):
        rows = [row for row in logged(run, line["step"]) if "seed_id" not in row]
        mean = {"reward": fmean(row["reward"] for row in rows)}
        mean["completions/mean_length"] = fmean(row["tokens"] for row in rows)
        mean["completions/clipped_ratio"] = fmean(row["finish_reason"] == "length" for row in rows)
        assert {name: line[name] for name in mean} == pytest.approx(mean)


def test_files_of_rollouts_name_the_prompt_of_each_group(whole):
    for step in (1, 2, 3):
        ids = [row["id"] for row in logged(whole[0] / "whole", step)]
        assert len(set(ids)) > 2  # resampling may have chosen one of the four twice
        assert ids == [name for name in ids[::5] for _ in range(5)]


@pytest.mark.slow
def test_a_resumed_run_goes_through_it_too_and_is_the_same(whole):
    folder, argv, _ = whole
    part = folder / "part"
    shutil.copytree(folder / "whole", part)
    shutil.rmtree(part / "step_000003")
    (part / "done").unlink()
    more = [f"--output_dir={part}", "--resume_from_checkpoint=latest"]
    done(train.main, [*argv, *more], folder)
    one, other = (metrics_of(folder / name)[-1] for name in ("whole", "part"))
    for name, value in one.items():
        if not name.startswith(("time/", "tokens_per")):
            assert other[name] == value, name


def exam(c: dict) -> None:
    evaluate.main(c, {"seeds": 1, "output": ""})


@pytest.mark.slow
def test_a_checkpoint_is_scored_by_it_too(whole):
    folder, argv, _ = whole
    calls = done(exam, [*argv, f"--model={folder / 'whole' / 'step_000003'}"], folder, size=1)
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
