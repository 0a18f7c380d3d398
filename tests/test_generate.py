"""generate.py: every line it promises, in order, also when it was interrupted."""

import json
import subprocess
import sys
from pathlib import Path

import child
import pytest
import torch
from child import ended_well
from deadlines import PATIENCE
from servers import environment

import checks
import common
import generate
import journal
import rollout
import scoring
from common import UserError, load_config, load_with_flags
from scoring import RewardFunction

ROOT = Path(__file__).resolve().parent.parent
FLAGS = [
    "--max_prompts=5",
    "--num_generations=3",
    "--prompts_per_step=2",
    "--max_completion_length=8",
    "--rollout_engine=hf",
    "--reward_timeout=300",
    "--reward_funcs=['countdown','length']",
    "--reward_weights=[1.0,0.5]",
]


def words(model: Path, output: Path, *flags) -> list[str]:
    """A command line of the script."""
    config = str(ROOT / "config" / "countdown_tiny.py")
    return [config, *FLAGS, f"--model={model}", f"--output={output}", *flags]


def run(model: Path, output: Path, *flags) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "generate.py", *words(model, output, *flags)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_a_reward_that_failed_is_null_and_so_is_the_sum():
    functions = [RewardFunction(name, 1.0, None, i == 0, "m:f") for i, name in enumerate("ab")]
    row = {"id": "1", "task": "t", "prompt": "p", "answer": "x"}
    r = {"text": "", "finish_reason": "stop", "prompt_ids": [1], "completion_ids": [2]}
    values = torch.tensor([[1.0, 0.5], [1.0, scoring.ERROR], [1.0, torch.nan]])
    totals, _ = scoring.combine(values[None], functions)
    lines = generate.lines_of([r | {"logprobs": [0.0]}] * 3, row, values, totals[0], functions)
    lines = [json.loads(line) for line in lines]
    assert [line["reward"] for line in lines] == [1.5, None, 1.0]
    assert [line["rewards"]["b"] for line in lines] == [0.5, None, None]


def test_a_temperature_that_changes_is_the_one_at_the_end_of_training(monkeypatch):
    asked = []

    def sample(exam, rows, n, sampling, c):
        asked.append(sampling.temperature)
        return [], torch.zeros(0, n, 1), []

    monkeypatch.setattr(scoring, "sample_and_measure", sample)
    functions = [RewardFunction("a", 1.0, None, True, "m:f")]
    exam = scoring.Exam(None, None, [0], [], functions)
    c = load_config(["--temperature={0: 1.0, 10: 0.5}", "--max_steps=10"])
    assert generate.batch_lines(exam, range(0), c) == {}
    assert asked == [0.5]


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tiny_model_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("generated") / "out.jsonl"
    done = run(tiny_model_dir, path)
    ended_well(done)
    return path


def test_every_prompt_has_its_group_in_the_order_of_the_data_with_log_probs_and_rewards(whole):
    lines = lines_of(whole)
    assert [line["sample"] for line in lines] == [0, 1, 2] * 5
    assert len({line["id"] for line in lines}) == 5
    for line in lines:
        tokens = len(line["completion_ids"])
        assert 1 <= tokens == len(line["logprobs"]) <= 8
        assert all(value < 0 for value in line["logprobs"])
        rewards = line["rewards"]
        assert set(rewards) == {"countdown", "length"}
        assert rewards["length"] == pytest.approx(-tokens / 8)
        assert line["reward"] == pytest.approx(rewards["countdown"] + 0.5 * rewards["length"])
        assert line["finish_reason"] in ("stop", "length")
        assert line["answer"]["numbers"] and line["prompt"] and line["prompt_ids"]


def without_log_probs(lines: list[dict]) -> list[dict]:
    return [{key: line[key] for key in line if key != "logprobs"} for line in lines]


def test_an_interrupted_file_goes_on_to_the_same_lines_on_two_ranks_too(
    whole, tiny_model_dir, tmp_path
):
    """The engine samples each prompt alone: batches and ranks don't change a line beyond the last
    digits of its log-probs."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(whole.read_bytes()[:-700])  # in the middle of a line of the last group
    Path(f"{path}.config.json").write_text(Path(f"{whole}.config.json").read_text())
    kept = lines_of(whole)[: path.read_text().count("\n") // 3 * 3]
    own, c = load_with_flags(words(tiny_model_dir, path), checks.FLAGS["generate"])
    log = tmp_path / "log"
    ranks = child.start_ranks(2, common.script, generate.main, c, own, logs=[log, log])
    assert child.statuses(ranks) == [0, 0], log.read_text()[-3000:]
    found = lines_of(path)
    assert found[: len(kept)] == kept
    assert without_log_probs(found) == without_log_probs(lines_of(whole))


def test_the_same_command_again_leaves_a_finished_file_as_it_is(
    whole, tiny_model_dir, monkeypatch, capsys
):
    """In this process, which costs no start."""
    monkeypatch.setattr(generate, "leave_together", lambda sampler: None)
    asked = []
    monkeypatch.setattr(rollout, "start_sampler", lambda *args: asked.append(args))
    before = whole.read_bytes()
    argv = words(tiny_model_dir, whole, "--reward_workers=0")
    own, c = load_with_flags(argv, checks.FLAGS["generate"])
    generate.main(c, own)
    assert whole.read_bytes() == before and asked == []
    assert "5 prompts x 3" in capsys.readouterr().out


def test_one_completion_of_each_prompt_may_be_asked_for(tiny_model_dir, tmp_path, monkeypatch):
    """Training refuses a group of one."""
    monkeypatch.setattr(generate, "leave_together", lambda sampler: None)
    path = tmp_path / "out.jsonl"
    argv = words(tiny_model_dir, path, "--num_generations=1", "--max_prompts=2")
    own, c = load_with_flags([*argv, "--reward_workers=0"], checks.FLAGS["generate"])
    generate.main(c, own)
    lines = lines_of(path)
    assert [line["sample"] for line in lines] == [0, 0]
    assert lines[0]["id"] != lines[1]["id"]
    assert json.loads(Path(f"{path}.config.json").read_text())["num_generations"] == 1
    with pytest.raises(UserError, match="--num_generations=-1 must be at least 0"):
        generate.main(c, own | {"num_generations": -1})


@pytest.mark.slow
def test_vllm_writes_the_same_kind_of_file_and_leaves_without_a_word(tiny_model_dir, tmp_path):
    done = run(tiny_model_dir, tmp_path / "out.jsonl", "--rollout_engine=vllm", "--max_prompts=2")
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr[-3000:]
    assert [line["sample"] for line in lines_of(tmp_path / "out.jsonl")] == [0, 1, 2] * 2


def test_a_file_made_with_other_settings_is_refused(whole, tmp_path):
    config = json.loads(Path(f"{whole}.config.json").read_text())
    flags = [f"--model={config['model']}", *FLAGS[1:]]  # without --max_prompts
    c = load_config(["config/countdown_tiny.py", *flags])
    lines = lines_of(whole)
    rows = [{"id": line["id"], "prompt": line["prompt"]} for line in lines[::3]]
    assert generate.finished_prompts(whole, rows, c) == 5
    with pytest.raises(UserError, match=r"temperature=1\.0, not 0\.5"):
        generate.finished_prompts(whole, rows, c | {"temperature": 0.5})
    # the first row was deleted, or its text changed, since
    with pytest.raises(UserError, match="was made of other rows: its prompt 1 is"):
        generate.finished_prompts(whole, rows[1:], c)
    changed = [*rows[:3], rows[3] | {"prompt": "another"}, rows[4]]
    with pytest.raises(UserError, match="was made of other rows: its prompt 4 is"):
        generate.finished_prompts(whole, changed, c)
    spoilt = tmp_path / "spoilt.jsonl"
    for text in ("no json", "[]", "{}", "[" * 100_000):
        spoilt.write_text(f"{text}\n" * 3)
        with pytest.raises(UserError, match="was made of other rows: its prompt 1 is"):
            generate.check_rows(spoilt, rows[:1], 3)
    stray = tmp_path / "stray.jsonl"
    stray.write_text("{}\n")
    with pytest.raises(UserError, match=r"is there, but not stray\.jsonl\.config"):
        generate.finished_prompts(stray, rows, c)
    assert stray.read_text() == "{}\n"


def test_a_file_that_another_process_writes_is_refused(whole, tiny_model_dir):
    own, config = load_with_flags(words(tiny_model_dir, whole), checks.FLAGS["generate"])
    with journal.hold_folder(f"{whole}.lock"):
        with pytest.raises(UserError, match=r"in use by .* choose another --output"):
            generate.main(config, own)
    assert not Path(f"{whole}.lock").exists()


def test_a_group_that_is_not_whole_is_cut_off(tmp_path):
    path, config = (
        tmp_path / "out.jsonl",
        load_config(["config/countdown_tiny.py", "--num_generations=2"]),
    )
    rows = [{"id": "x", "prompt": "y"}] * 2
    assert generate.finished_prompts(path, rows, config) == 0
    line = json.dumps(rows[0]) + "\n"
    path.write_text(line * 3 + line[:7])
    assert generate.finished_prompts(path, rows, config) == 1 and path.read_text() == line * 2


@pytest.mark.parametrize(
    "content",
    [
        b'{"id": "mine", "prompt": "z"}\n' * 3,
        b'{"id": "mine", "prompt": "z"}\n',
        b'{"id": "x", "prompt": "y"}\n' * 2 + b'{"id": "mine", "prompt": "z"}\n{"id',
        b"\xff\xfe\n" * 3,
    ],
    ids=["a group and a part", "a part", "a group of ours and a part", "no UTF-8"],
)
def test_a_file_of_other_rows_is_refused_as_it_is(tmp_path, content):
    path = tmp_path / "out.jsonl"
    config = load_config(["config/countdown_tiny.py", "--num_generations=2"])
    rows = [{"id": "x", "prompt": "y"}] * 2
    generate.finished_prompts(path, rows, config)  # writes the settings beside it
    path.write_bytes(content)
    with pytest.raises(UserError, match="was made of other rows: its prompt"):
        generate.finished_prompts(path, rows, config)
    assert path.read_bytes() == content
