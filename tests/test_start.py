"""The first second of every command: what is wrong with its words is said before
torch is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import PATIENCE

from common import UserError, load_config, own_flags

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "deepspeed", "transformers", "datasets", "vllm", "trl")
TINY = "config/countdown_tiny.py"
SCRIPTS = ("train.py", "sft.py", "evaluate.py", "generate.py", "checkpoint.py")
WINGS = ("server", "compare", "bench", "bench.gpu")


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """A function that runs a command in a Python where every heavy library fails to import."""
    folder = tmp_path_factory.mktemp("nothing")
    for name in HEAVY:
        (folder / f"{name}.py").write_text("raise RuntimeError('this takes ten seconds')")

    def run(*command) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )

    return run


def test_a_config_is_read_and_checked_without_torch(without_torch):
    done = without_torch("-c", f"import checks, common; common.load_config(['{TINY}'])")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [[script] for script in SCRIPTS] + [["-m", w] for w in WINGS])
def test_help_shows_how_to_run_before_torch_is_loaded(without_torch, command):
    done = without_torch(*command, TINY, "--help")
    assert done.returncode == 0, done.stderr
    assert " ".join(command) in done.stdout
    # told to who can set them only
    assert ("config/default.py lists every key" in done.stdout) == ("config/" in done.stdout)


@pytest.mark.parametrize(
    "command",
    [
        *("train.py", "sft.py", "evaluate.py", "generate.py", "checkpoint.py"),
        *("-m compare", "-m compare.frontier", "-m compare.pass_at_k", "-m compare.targets"),
        *("-m compare.toy", "-m server"),
    ],
)
def test_a_python_without_the_libraries_is_told_how_to_get_them(command):
    """As in a terminal where the environment is not active: -S hides its packages."""
    done = subprocess.run(
        [sys.executable, "-S", *command.split(), TINY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"{sys.executable} has no torch: " in done.stderr
    assert "`make env`" in done.stderr
    assert f"`source .venv/bin/activate` in {ROOT}," in done.stderr


@pytest.mark.parametrize(
    "command", [["train.py"], ["sft.py"], ["evaluate.py"], ["generate.py"], ["-m", "server"]]
)
def test_a_mistyped_key_is_told_before_torch_is_loaded(without_torch, command):
    done = without_torch(*command, TINY, "--max_step=3")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "unknown key 'max_step'; did you mean 'max_steps'?" in done.stderr


def test_compare_tells_a_mistyped_key_before_torch_is_loaded(without_torch, tmp_path):
    (tmp_path / "arms.py").write_text('slow = {"learning_rat": 1e-5}')
    done = without_torch("-m", "compare", TINY, f"--arms={tmp_path / 'arms.py'}")
    assert done.returncode == 2 and "did you mean 'learning_rate'?" in done.stderr, done.stderr


@pytest.mark.parametrize("wing, typo", [("bench", "--repeat=5"), ("bench.gpu", "attentoin")])
def test_bench_tells_a_mistyped_word_before_torch_is_loaded(without_torch, wing, typo):
    done = without_torch("-m", wing, typo)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert typo in done.stderr


def test_a_checkpoint_is_verified_without_torch(without_torch, tmp_path):
    done = without_torch("checkpoint.py", "verify", tmp_path)
    assert done.returncode == 1 and "manifest.json" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "command, cure",
    [
        (
            ["-m", "server", TINY, "--port", "8000"],
            "--port: write --key=value, in one word: --port=8000",
        ),
        (["train.py", "--seed", "3"], "--seed: write --key=value, in one word: --seed=3"),
        (["train.py", "-seed=3"], "-seed=3: write --key=value, in one word: --seed=..."),
        (
            ["-m", "compare", TINY, "--jobs", "2"],
            "--jobs: write --key=value, in one word: --jobs=2",
        ),
        (["train.py", "--pack_sequences", TINY], f"in one word: --pack_sequences={TINY}"),
        (["train.py", TINY, "--dry-run"], "--dry-run: write --dry_run\n"),
        (["train.py", TINY, "--dryrun=True"], "--dryrun=True: did you mean --dry_run?"),
        (["sft.py", TINY, "--step=2"], "--step=2: did you mean --steps?"),
        (["train.py", "--resume_from_checkpoint"], "--resume_from_checkpoint=latest"),
        (["train.py", TINY, "--resume"], "--resume=latest"),
        (["train.py", TINY, "--temperature={0:", "1.2}"], "{0: ...: the shell has cut this flag"),
        (["train.py", TINY, "--reward_weights=[1,", "-1]"], "put '...' around a whole list"),
        (["train.py", TINY, "--dataset.=a"], "an entry of dataset must follow the dot"),
        (["train.py", TINY, "--learning_rate.=1"], "learning_rate=0.0002 has no entries by name"),
        (["train.py", TINY, "--datset.=a"], "unknown key 'datset.'; did you mean 'dataset'?"),
        (["train.py", "no.py", "--system_prompt=[INST] Go:", "x=1"], "config file no.py"),
    ],
)
def test_a_flag_in_two_words_is_told_how_to_be_one(without_torch, command, cure):
    done = without_torch(*command)
    assert done.returncode == 2 and cure in done.stderr, done.stderr


def test_a_flag_that_is_given_twice_is_said_to_be(without_torch):
    done = without_torch("train.py", TINY, "--seed=1", "--max_step=3", "--seed=2")
    assert done.stderr.startswith("--seed=1 is not used: --seed=2 comes after it\nerror: "), (
        done.stderr
    )
    done = without_torch("train.py", TINY, "--lr=1e-5", "--max_step=3", "--learning_rate=1e-6")
    assert "--lr=1e-5 is not used: --learning_rate=1e-6 comes after it" in done.stderr


@pytest.mark.parametrize("text", ["true", "TRUE", "True", "false", "False"])
def test_true_and_false_need_no_capital_letter(text):
    config = load_config([f"--pack_sequences={text}"])
    assert config["pack_sequences"] is (text.lower() == "true")
    own, rest = own_flags([f"--report_only={text}", TINY], {"report_only": False})
    assert own == {"report_only": text.lower() == "true"} and rest == [TINY]


@pytest.mark.parametrize("text", ["yes", "1", "on", ""])
def test_other_words_for_true_are_refused(text):
    with pytest.raises(UserError, match="pack_sequences must be of type bool"):
        load_config([f"--pack_sequences={text}"])
