"""What a person can get wrong: one sentence with key and value, exit status 2, nothing left
behind. (The dry run, which says so first: test_dry_run.py.)"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from deadlines import PATIENCE

import common
import evaluate
import generate
import journal
import preflight
import ranks
import sft
import train
from checks import FLAGS
from common import UserError, load_config
from compare import __main__ as compare
from server import http as vllm_http

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "config" / "countdown_tiny.py")


def jsonl(path: Path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def refusal(tiny_model_dir, tmp_path, monkeypatch):
    """A function from flags to the sentence that train.py refuses them with, before anything
    starts and before there is a run folder."""
    monkeypatch.setattr(train, "start_distributed", lambda: pytest.fail("the run started"))

    def refused(*flags) -> str:
        with pytest.raises(UserError) as caught:
            train.main(
                load_config(
                    [
                        TINY,
                        f"--model={tiny_model_dir}",
                        f"--output_dir={tmp_path / 'run'}",
                        *map(str, flags),
                    ]
                )
            )
        assert not (tmp_path / "run").exists() and "\n" not in str(caught.value)
        return str(caught.value)

    return refused


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--learning_rat=1"], ["learning_rat", "learning_rate"]),
        (["--dataset.name=nobody/nothing"], ["dataset 'nobody/nothing'"]),
        (["--dataset.name=tasks/countdown.py"], ["dataset 'tasks/countdown.py'"]),
        (["--dataset.name=nowhere.jsonl"], ["dataset 'nowhere.jsonl'"]),
        (["--dataset.name="], ["dataset.name"]),
        (
            ["--dataset=countdown"],
            ["has entries: write dataset = {'name': 'countdown'}", "--dataset.name=..."],
        ),
        (["--dataset={name: a.jsonl}"], ["dataset='{name: a.jsonl}' is not a Python literal"]),
        (["--vllm_options={seed:"], ["vllm_options='{seed:' is not a Python literal"]),
        (["--temperature={0: 1.0"], ["temperature='{0: 1.0' is not a Python literal"]),
        (["--resume_from_checkpoint=True"], ["write --resume_from_checkpoint=latest"]),
        (["--stop=</answer>"], ["stop is not a key here: a completion ends with a token"]),
        (["--dataset.config=5"], ["dataset 'countdown'", "'5'"]),
        (["--dataset.split=dev"], ["dataset 'countdown'", "'dev'"]),
        (["--eval_dataset.name=nobody/nothing"], ["'nobody/nothing'"]),
        (["--model=no/such/folder"], ["model='no/such/folder'"]),
        (["--model=/no/such/folder"], ["model='/no/such/folder'"]),
        (["--model=nobody/nothing"], ["model='nobody/nothing'"]),
        (["--model=runs/nothing"], ["model='runs/nothing'", "sft.py"]),
        (["--model="], ["model is empty"]),
        (
            ["--num_generations=1", "--scale_rewards=group"],
            ["num_generations=1", "at least 2"],
        ),
        (["--max_prompt_length=5"], ["max_prompt_length=5", "10489 of 10489", "tokens"]),
        (
            ["--max_prompt_length=5", "--long_prompts=drop"],
            ["max_prompt_length=5", "10489 of 10489"],
        ),
        (["--reward_funcs=['magic']"], ["reward_funcs", "'magic'", "countdown"]),
        (
            ["--max_completion_length=1000"],
            ["max_prompt_length=32", "max_completion_length=1000", "1024 positions", "model="],
        ),
        (["--vllm_options.tensor_parallel_size=2"], ["vllm_options.tensor_parallel_size=2", "1"]),
        (
            ["--resume_from_checkpoint=/no/such/step_000001"],
            ["resume_from_checkpoint='/no/such/step_000001'"],
        ),
        (
            ["--resume_from_checkpoint=latest"],
            ["resume_from_checkpoint='latest'", "output_dir", "run"],
        ),
    ],
)
def test_bad_input_is_one_sentence_with_key_and_value_and_no_run_folder(refusal, flags, words):
    message = refusal(*flags)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("key", ["output_dir", "model", "resume_from_checkpoint"])
def test_a_path_that_libraries_read_as_a_pattern_is_refused_before_it_can_not_be_resumed(
    key, refusal, tmp_path
):
    """DeepSpeed looks for its shards, and vLLM for weights, by glob: "try[1]" is "try1" to them."""
    (tmp_path / "try[1]").mkdir()
    sentence = refusal(f"--{key}={tmp_path / 'try[1]'}")
    assert f"{key}=" in sentence and "as a pattern" in sentence


def test_a_number_of_prompts_that_ranks_can_not_share_is_refused(refusal, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert all(word in refusal() for word in ("prompts_per_step=32", "3"))


def test_an_empty_dataset_is_refused(refusal, tmp_path):
    path = jsonl(tmp_path / "empty.jsonl")
    said = refusal(f"--dataset.name={path}")
    for words in (repr(path), "its 0 rows", "dataset.prompt"):
        assert words in said


def test_a_folder_without_a_model_is_refused(refusal, tmp_path):
    (tmp_path / "empty").mkdir()
    assert f"model={str(tmp_path / 'empty')!r} is a folder without" in refusal(
        f"--model={tmp_path / 'empty'}"
    )


def test_a_reward_that_can_not_read_the_answers_of_the_dataset_is_refused(refusal, tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", {"prompt": "1+1", "answer": "2"})
    assert all(
        word in refusal(f"--dataset.name={path}") for word in ("reward_funcs", "'countdown'", path)
    )
    assert all(
        word in refusal(f"--eval_dataset.name={path}")
        for word in ("reward_funcs", "'countdown'", path)
    )


@pytest.fixture
def run_folder(tmp_path):
    """An earlier run with a metric and no checkpoint."""
    folder = tmp_path / "earlier"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def test_a_run_folder_that_is_not_empty_is_left_alone(refusal, run_folder):
    message = refusal(f"--output_dir={run_folder}")
    assert all(
        word in message for word in (f"output_dir={str(run_folder)!r}", "overwrite_output_dir")
    )
    assert (run_folder / "metrics.jsonl").read_text() == "{}\n"


def test_overwriting_refuses_what_is_not_a_run_and_what_holds_the_model(
    refusal, run_folder, tiny_model_dir
):
    for flag in ("", "--overwrite_output_dir=True"):  # no advice to overwrite what would be kept
        message = refusal(f"--output_dir={tiny_model_dir}", *flag.split())
        assert f"output_dir={str(tiny_model_dir)!r}" in message and "not a run" in message
        assert "overwrite_output_dir" not in message and "resume" not in message
    assert (tiny_model_dir / "config.json").exists()
    inside = shutil.copytree(tiny_model_dir, run_folder / "step_000001")
    message = refusal(
        f"--output_dir={run_folder}", "--overwrite_output_dir=True", f"--model={inside}"
    )
    assert "model=" in message and f"output_dir={str(run_folder)!r}" in message and inside.exists()


def test_what_a_run_reads_is_not_overwritten_by_it(refusal, run_folder):
    rows = run_folder / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n')
    for flags in (
        [f"--dataset={[{'name': str(rows)}]}", "--eval_steps=0"],
        [f"--easy_dataset.name={rows}", "--easy_dataset.share=0.5"],
        [f"--chat_template={rows}"],
    ):
        message = refusal(f"--output_dir={run_folder}", "--overwrite_output_dir=True", *flags)
        assert (
            str(rows) in message
            and "overwrite_output_dir=True would delete" in message
            and rows.exists()
        )


def test_a_checkpoint_to_go_on_from_is_not_deleted_with_its_folder(run_folder):
    kept = run_folder / "keep" / "step_000001"  # not directly in it: another run's
    flags = ["--overwrite_output_dir=True", f"--resume_from_checkpoint={kept}"]
    c = load_config([TINY, f"--output_dir={run_folder}", *flags])
    with pytest.raises(UserError, match=r"resume_from_checkpoint.* would delete"):
        journal.check_run_folder(c, resuming=False)
    # weights for servers are the run's own
    c |= {"resume_from_checkpoint": "", "weight_sync": str(run_folder / "weights")}
    journal.check_run_folder(c, resuming=False)


def test_a_run_that_died_before_its_first_metric_can_be_overwritten(tmp_path):
    c = load_config([TINY, f"--output_dir={tmp_path}", "--overwrite_output_dir=True"])
    journal.make_run_folder(c, {"command": "train.py"}, resuming=False)
    journal.check_run_folder(c, resuming=False)
    (tmp_path / "launches.jsonl").unlink()
    with pytest.raises(UserError, match="not a run of this program"):
        journal.check_run_folder(c, resuming=False)


def test_a_start_that_failed_does_not_stand_in_the_way_of_the_next(tmp_path):
    c = load_config([TINY, f"--output_dir={tmp_path}"])
    journal.make_run_folder(c, {"command": "train.py"}, resuming=False)
    (tmp_path / journal.TRIAL_SAVE).touch()
    journal.check_run_folder(c, resuming=False)
    # what the log of metrics has made when the first step fails
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "wandb_id").write_text("12345678")
    journal.check_run_folder(c, resuming=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"is not empty: replace it") as caught:
        journal.check_run_folder(c, resuming=False)
    assert "resume_from_checkpoint" not in str(caught.value)  # there is none
    (tmp_path / "step_000001.tmp").mkdir()  # half of one, which a kill has left
    (tmp_path / "step_000001.abandoned2").mkdir()
    with pytest.raises(UserError, match=r"is not empty: replace it"):
        journal.check_run_folder(c, resuming=False)
    (tmp_path / "step_000001").mkdir()
    with pytest.raises(UserError, match=r"is not empty: continue it with --resume_from_checkpoint"):
        journal.check_run_folder(c, resuming=False)


def test_what_somebody_else_keeps_in_a_folder_is_not_taken_for_a_start(tmp_path):
    c = load_config([TINY, f"--output_dir={tmp_path}"])
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match="not a run of this program"):
        journal.check_run_folder(c, resuming=False)
    journal.make_run_folder(c, {"command": "train.py"}, resuming=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="is not empty"):
        journal.check_run_folder(c, resuming=False)


def test_a_run_folder_that_is_a_file_is_refused(refusal, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert f"output_dir={str(tmp_path / 'file')!r}" in refusal(f"--output_dir={tmp_path / 'file'}")
    assert "output_dir" in refusal(f"--output_dir={tmp_path / 'file' / 'run'}")


# --- places that can't be written


def long_name(folder: Path) -> Path:
    return folder / "new" / ("n" * 300)


def long_path(folder: Path) -> Path:
    return folder / "/".join(["n" * 100] * 50)


def dangling(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link"


def under_a_dangling_link(folder: Path) -> Path:
    return dangling(folder) / "new"


def under_a_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file" / "new"


def in_proc(folder: Path) -> Path:
    return Path("/proc/new")


PLACES = {
    long_name: "300 bytes",
    long_path: "3800 bytes at most",
    dangling: "a link that leads nowhere",
    under_a_dangling_link: "a link that leads nowhere",
    under_a_file: "is a file, not a folder",
    in_proc: "no file can be created in '/proc'",
}


@pytest.fixture
def refused_by(tiny_model_dir, tmp_path, monkeypatch):
    """The sentence with which a script refuses flags, before it reads the model's files or data."""

    def sentence(script, *flags) -> str:
        name = "load_inputs" if script is train else "load_checked_files"
        monkeypatch.setattr(script, name, lambda *_: pytest.fail("files were read"))
        argv = [TINY, f"--model={tiny_model_dir}", f"--output_dir={tmp_path / 'run'}", *flags]
        own, config = common.load_with_flags(argv, FLAGS[script.__name__])
        with pytest.raises(UserError) as caught:
            if script is not train:
                script.main(config, own)
            elif own["dry_run"]:
                train.dry_run_main(config)
            else:
                train.main(config)
        return str(caught.value)

    return sentence


@pytest.mark.parametrize("place, words", PLACES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_can_not_be_written_is_said_before_anything_is_read(
    refused_by, tmp_path, place, words
):
    path = place(tmp_path)
    for script, key in (
        (train, "output_dir"),
        (train, "weight_sync"),
        (sft, "output_dir"),
        (evaluate, "output"),
        (generate, "output"),
    ):
        message = refused_by(script, f"--{key}={path}")
        assert (
            message.removeprefix("--").startswith(f"{key}=")
            and "can't be written" in message
            and words in message
        )
    with pytest.raises(UserError, match=f"^--output=.*{words}"):
        compare.read_own([f"--output={path}", "--arms=compare/arms.py"])


def test_a_folder_is_no_file_and_a_file_no_folder(refused_by, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "unfinished.jsonl.tmp").mkdir()
    for script, key, path in (
        (evaluate, "output", tmp_path),
        (evaluate, "output", "/dev/null"),  # a rename would take its place
        (evaluate, "output", tmp_path / "unfinished.jsonl"),
        (generate, "output", tmp_path),
    ):
        assert "a folder or a device, not a file" in refused_by(script, f"--{key}={path}")
    for script, key in ((train, "output_dir"), (train, "weight_sync"), (sft, "output_dir")):
        message = refused_by(script, f"--{key}={tmp_path / 'file'}")
        assert "is a file, not a folder" in message
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def as_nobody():
    """Two folders, one that may not be entered and one that may not be written, seen by somebody
    who is not root: root may do everything."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for one user
        closed, read_only = Path(name, "closed"), Path(name, "read_only")
        closed.mkdir(mode=0)
        read_only.mkdir(mode=0o555)
        Path(name).chmod(0o755)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            yield closed, read_only
        finally:
            os.seteuid(user)
            closed.chmod(0o755)


def test_a_folder_that_one_may_not_enter_or_write_is_refused(as_nobody):
    closed, read_only = as_nobody
    for path, folder in (
        (closed, True),
        (closed / "new" / "run", True),
        (closed / "new.jsonl", False),
        (read_only, True),
        (read_only / "new", True),
        (read_only / "new.jsonl", False),
    ):
        with pytest.raises(UserError, match=f"^key='{path}' can't be written: .*Permission denied"):
            common.check_writable("key", path, folder=folder)


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for path, folder in (
        (tmp_path, True),
        (tmp_path / "a" / "b", True),
        (tmp_path / "a" / "b", False),
        (tmp_path / "file", False),
        (tmp_path / "link", False),
    ):
        common.check_writable("key", path, folder=folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_dry_run_says_that_the_run_folder_can_not_be_made(refused_by, tmp_path):
    assert "can't be written" in refused_by(
        train, "--dry_run", f"--output_dir={under_a_file(tmp_path)}"
    )


@pytest.mark.parametrize("text", ["{}", "[1]", '{"model_type": "qwen2"}', "{broken", "[" * 5000])
def test_another_programs_settings_are_not_taken_for_ours(refused_by, tmp_path, text):
    output = tmp_path / "out.jsonl"
    beside = tmp_path / "out.jsonl.config.json"
    beside.write_text(text)
    for there in (False, True):
        if there:
            output.write_text("")
        message = refused_by(generate, f"--output={output}")
        assert "holds no settings that this program wrote" in message and str(beside) in message
        assert beside.read_text() == text
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"holds no settings[^;]*;[^;]*$"):
        compare.state_of({"folder": tmp_path, "config": {}})
    (tmp_path / "train_config.json").touch()  # then it is the model's, in a checkpoint
    with pytest.raises(UserError, match=r"settings of this checkpoint are .*train_config\.json"):
        load_config([str(tmp_path / "config.json")])


def test_the_folder_of_a_run_is_no_model_and_its_last_checkpoint_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"reward_funcs": []}')
    (tmp_path / "step_000002").mkdir()
    (tmp_path / "step_000004").mkdir()
    with pytest.raises(UserError, match=r"the folder of a run.*: .*step_000004$"):
        preflight.load_model_files(str(tmp_path))


def test_a_folder_that_is_not_there_is_told_its_neighbour(refusal, tmp_path):
    (tmp_path / "countdown_sft").mkdir()
    wanted = f"did you mean '{tmp_path / 'countdown_sft'}'?"
    assert wanted in refusal(f"--model={tmp_path / 'countdown_stf'}")
    assert refusal(f"--model={tmp_path / 'xyz'}").endswith("is not a folder")
    assert "sft.py or train.py makes it" in refusal("--model=runs/xyz")


def test_a_model_with_an_endless_name_is_one_sentence(refusal):
    assert "is not a folder" in refusal("--model=/" + "n" * 300)
    assert "can't be loaded" in refusal("--model=" + "n" * 300)
    assert "can't be loaded" in refusal("--dataset.name=" + "n" * 300)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1"])
def test_a_port_that_can_not_exist_is_not_waited_for(port):
    with pytest.raises(UserError, match=f"port {port} can't exist"):
        vllm_http.addresses(f"http://127.0.0.1:8000,http://127.0.0.1:{port}")


@pytest.mark.parametrize("url", ["http://:8000", "http:///path"])
def test_a_server_without_a_host_is_not_waited_for(url):
    with pytest.raises(UserError, match="names no host"):
        vllm_http.addresses(url)


def test_resuming_from_another_run_does_not_write_over_a_third(
    refusal, run_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        train.checkpoint, "resumes_in_place", lambda *_: False
    )  # a whole one, elsewhere
    assert f"output_dir={str(run_folder)!r}" in refusal(
        f"--output_dir={run_folder}", "--resume_from_checkpoint=somewhere"
    )


def test_the_model_that_sft_makes_is_not_looked_for_on_the_hub(
    tiny_model_dir, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"only sft\.py makes: first `python sft\.py CONFIG"):
        preflight.load_model_files("tiny")
    (tmp_path / "tiny").symlink_to(tiny_model_dir)  # a folder of the user's own
    assert preflight.load_model_files("tiny").config.model_type == "qwen2"


def test_resuming_is_refused_without_a_whole_checkpoint(refusal, run_folder):
    message = refusal(f"--output_dir={run_folder}", "--resume_from_checkpoint=latest")
    assert "resume_from_checkpoint='latest'" in message and str(run_folder) in message
    (run_folder / "step_000001").mkdir()
    assert "manifest.json" in refusal(
        f"--output_dir={run_folder}", f"--resume_from_checkpoint={run_folder / 'step_000001'}"
    )
    missing = f"--resume_from_checkpoint={run_folder / 'step_000009'}"
    message = refusal(f"--output_dir={run_folder}", missing)
    assert f"is not a folder; did you mean '{run_folder / 'step_000001'}'?" in message
    message = refusal(f"--output_dir={run_folder}", f"--resume_from_checkpoint={run_folder}")
    assert f"is the folder of a run: name a checkpoint in it, such as {run_folder}/step" in message


@pytest.mark.parametrize(
    "asked, refused",
    [
        ("0,1", True),
        ("GPU-5ebe9f43", True),
        ("", False),
        ("-1", False),
        ("NoDevFiles", False),
        (None, False),
    ],
)
def test_a_gpu_that_torch_can_not_use_is_not_passed_over(asked, refused, monkeypatch):
    """No machine that runs this has one; where it has, torch is the build that can use it."""
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(
        "CUDA_VISIBLE_DEVICES", raising=False
    ) if asked is None else monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    monkeypatch.setattr(ranks, "Path", lambda path: Path("/nowhere"))
    if not refused:
        return ranks.refuse_idle_gpu()
    with pytest.raises(
        UserError, match=f"CUDA_VISIBLE_DEVICES={asked} asks for a GPU.*can't use it"
    ):
        ranks.refuse_idle_gpu()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(ranks, "Path", lambda path: Path("/"))  # the driver's device is there
    with pytest.raises(UserError, match="there is a GPU, /dev/nvidia0"):
        ranks.refuse_idle_gpu()
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: True)
    ranks.refuse_idle_gpu()


def test_no_process_joins_others_on_a_cpu_beside_such_a_gpu(monkeypatch):
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ranks, "be_alone", lambda: None)
    monkeypatch.setattr(ranks, "check_environment", lambda: pytest.fail("it goes on"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=0 asks for a GPU"):
        ranks.start_distributed()


# --- the script


def script(*flags, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "train.py", *map(str, flags)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | environment,
    )


@pytest.mark.slow
def test_the_script_ends_with_status_2_and_one_line(tmp_path):
    """As evaluate.py does in test_preflight.py, and train.py on Slurm in test_slurm.py."""
    done = script(TINY, f"--output_dir={tmp_path / 'run'}", "--model=no/such/folder")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and "model='no/such/folder'" in errors[0]
    assert "Traceback" not in done.stderr + done.stdout and not (tmp_path / "run").exists()
