"""generate.py: every line it promises, in order, also when it was interrupted."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import child
import pytest
import torch
from child import ended_well
from deadlines import PATIENCE
from digit_engine import FAKE_REWARD, TOKENIZER, FakeEngine, rows_of
from row_files import jsonl
from servers import environment

import checks
import common
import evaluate
import generate
import journal
import rollout
import scoring
from common import UserError, load_config, load_with_flags
from prompts import answers_hash, prompts_hash
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

    monkeypatch.setattr(evaluate, "sample_and_measure", sample)
    functions = [RewardFunction("a", 1.0, None, True, "m:f")]
    exam = evaluate.Exam(None, None, [0], [], functions)
    c = load_config(["--temperature={0: 1.0, 10: 0.5}", "--max_steps=10"])
    assert generate.batch_lines(exam, range(0), c) == {}
    assert asked == [0.5]


def test_what_is_drawn_for_a_prompt_depends_on_its_place_in_the_data_and_on_the_seed():
    engine = FakeEngine()
    exam = evaluate.Exam(engine, TOKENIZER, [0], rows_of(*["same"] * 5), [FAKE_REWARD])
    c = load_config(["--seed=7", "--reward_workers=0"])
    assert list(generate.batch_lines(exam, range(1, 5, 2), c)) == [1, 3]
    assert engine.calls[0]["prompts_ids"] == [exam.rows[i]["prompt_ids"] for i in (1, 3)]
    assert engine.calls[0]["seeds"] == [rollout.prompt_seed("generate", 7, i) for i in (1, 3)]


def test_the_lines_of_all_ranks_are_written_in_the_order_of_the_data(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("before\n")
    shares = [{4: ["4a\n", "4b\n"], 6: ["6\n"]}, {5: ["5\n"]}, {}]
    assert generate.write_batch(path, shares) == 3
    assert path.read_text().split() == ["before", "4a", "4b", "5", "6"]


def test_without_a_limit_it_takes_every_row_of_every_source(tiny_model_dir, tmp_path, monkeypatch):
    sources = []
    for name, size in (("a", 3), ("b", 2)):
        (tmp_path / name).mkdir()
        rows = [{"prompt": f"{name}{i}", "answer": "1"} for i in range(size)]
        sources.append({"name": jsonl(tmp_path / name, *rows)})
    asked = []
    told = []

    def batch_lines(exam, places, c):
        asked.extend(exam.rows[i] for i in places)
        return {}

    monkeypatch.setattr(generate, "batch_lines", batch_lines)
    monkeypatch.setattr(generate, "check_alike", told.append)
    monkeypatch.setattr(generate, "leave_together", lambda sampler: None)
    monkeypatch.setattr(rollout, "start_sampler", lambda *args: None)
    flags = [f"--model={tiny_model_dir}", f"--dataset={sources}", "--reward_funcs=['length']"]
    c = load_config([*flags, "--prompts_per_step=2", "--reward_workers=0"])
    own = checks.FLAGS["generate"] | {"output": str(tmp_path / "out.jsonl")}
    generate.main(c, own)
    assert [row["prompt"] for row in asked] == ["a0", "a1", "a2", "b0", "b1"]
    # ranks compare what they sample for: each writes its own prompts' lines
    assert told[0]["hash of the prompts"] == prompts_hash(asked)
    assert told[0]["hash of the answers"] == answers_hash(asked)


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
    text = whole.read_bytes()
    path.write_bytes(text[: len(text) // 2])  # both ranks have some of what is missing
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
    rows = [{key: line[key] for key in generate.SAMPLED} for line in lines[::3]]
    assert generate.finished_prompts(whole, rows, c) == 5
    changes = {"temperature": 0.5, "seed": 9, "max_completion_length": 9, "system_prompt": "S"}
    changes |= {"model": "m", "reward_weights": [1.0, 0.1], "num_generations": 2}
    for key, value in changes.items():
        with pytest.raises(UserError, match=rf"made with {key}=.*, not {re.escape(repr(value))}:"):
            generate.finished_prompts(whole, rows, c | {key: value})
    # a file that is older than a key had its default
    older = Path(shutil.copy(whole, tmp_path / "older.jsonl"))
    del config["eval_temperature"]
    Path(f"{older}.config.json").write_text(json.dumps(config))
    assert generate.finished_prompts(older, rows, c) == 5
    with pytest.raises(UserError, match="made with eval_temperature="):
        generate.finished_prompts(older, rows, c | {"eval_temperature": 0.25})
    # the weights were written again since
    beside = Path(f"{older}.config.json")
    (weights,) = Path(c["model"]).glob("*.safetensors")
    os.utime(beside, (1, 1))
    with pytest.raises(UserError, match=f"{weights} is newer than the first lines of --output"):
        generate.finished_prompts(older, rows, c)
    # the first row was deleted, or a text or an answer changed, since
    with pytest.raises(UserError, match="was made from other rows: its prompt 1 is"):
        generate.finished_prompts(whole, rows[1:], c)
    changes = {"prompt": "another", "answer": {"numbers": [1], "target": 1}, "prompt_ids": [3, 4]}
    for change in ({key: value} for key, value in changes.items()):
        changed = [*rows[:3], rows[3] | change, rows[4]]
        with pytest.raises(UserError, match="was made from other rows: its prompt 4 is"):
            generate.finished_prompts(whole, changed, c)
    spoilt = tmp_path / "spoilt.jsonl"
    for text in ("no json", "[]", "{}", "[" * 100_000):
        spoilt.write_text(f"{text}\n" * 3)
        with pytest.raises(UserError, match="was made from other rows: its prompt 1 is"):
            generate.check_rows(spoilt, rows[:1], 3)
    stray = tmp_path / "stray.jsonl"
    stray.write_text("{}\n")
    with pytest.raises(UserError, match=r"exists, but stray\.jsonl\.config"):
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
    rows = [{"id": "x", "prompt": "y", "answer": math.nan, "prompt_ids": [1]}] * 2
    assert generate.finished_prompts(path, rows, config) == 0
    line = json.dumps(rows[0]) + "\n"
    path.write_text(line * 3 + line[:7])
    assert generate.finished_prompts(path, rows, config) == 1 and path.read_text() == line * 2


OURS = b'{"id": "x", "prompt": "y", "answer": NaN, "prompt_ids": [1]}\n'


@pytest.mark.parametrize(
    "content",
    [
        b'{"id": "mine", "prompt": "z"}\n' * 3,
        b'{"id": "mine", "prompt": "z"}\n',
        OURS * 2 + b'{"id": "mine", "prompt": "z"}\n{"id',
        b"\xff\xfe\n" * 3,
    ],
    ids=["a group and a part", "a part", "a group of ours and a part", "no UTF-8"],
)
def test_a_file_of_other_rows_is_refused_as_it_is(tmp_path, content):
    path = tmp_path / "out.jsonl"
    config = load_config(["config/countdown_tiny.py", "--num_generations=2"])
    rows = [{"id": "x", "prompt": "y", "answer": math.nan, "prompt_ids": [1]}] * 2
    generate.finished_prompts(path, rows, config)  # writes the settings beside it
    path.write_bytes(content)
    with pytest.raises(UserError, match="was made from other rows: its prompt"):
        generate.finished_prompts(path, rows, config)
    assert path.read_bytes() == content


def test_answers_that_a_reward_can_not_read_are_told_before_anything_is_sampled(
    tiny_model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(generate, "start_distributed", lambda: pytest.fail("it goes on"))
    path = jsonl(tmp_path, {"prompt": "1+1?", "answer": "two"})
    more = [f"--dataset.name={path}", "--reward_workers=0"]
    argv = words(tiny_model_dir, tmp_path / "lines.jsonl", *more)
    own, c = load_with_flags(argv, checks.FLAGS["generate"])
    with pytest.raises(UserError, match=r"'countdown' can't score row '0'"):
        generate.main(c, own)
    assert not (tmp_path / "lines.jsonl").exists()


def test_without_a_file_to_write_nothing_is_sampled(monkeypatch):
    monkeypatch.setattr(generate, "write", lambda *args: pytest.fail("it goes on"))
    with pytest.raises(UserError, match="--output is empty"):
        generate.main(load_config([]), checks.FLAGS["generate"])
