"""slurm/*.sh on a real Slurm of two nodes on this machine (slurm_cluster.py): training on two
nodes, with a server, out of time, cancelled."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import slurm_cluster
from deadlines import PATIENCE
from exact_matrix import ROOT, SMALL_DATA, TORCHRUN, steps_in

import checkpoint
from common import load_config

CONFIG = [
    "config/countdown_tiny.py",
    *SMALL_DATA,
    "--prompts_per_step=4",
    "--num_generations=4",
    "--max_completion_length=8",
    "--eval_steps=0",
    "--learning_rate=1e-3",
    "--max_steps=6",
    "--reward_funcs=['patient_reward:parity']",
    "--reward_timeout=300",
    "--zero_stage=2",
    "--checkpoint_mode=shallow",
]
HF = "--rollout_engine=hf"
SECRET = "hf_of_nobody"

# Where REWARD_HOLD names its run folder (rewards see no other name of ours), no reward comes before
# the run is asked to stop or has saved: the time of its first start is over before its steps are,
# on the fastest machine. What comes before the run or with a new worker is a trial, and not held.
REWARD = """
import os
import time
from pathlib import Path

def parity(completion, answer, **row):
    run = Path(os.environ.get("REWARD_HOLD", "/nowhere"))
    trial = completion in ("1", "\\\\boxed{1}") or not (run / "config.json").exists()
    while not trial and not (run / "stop").exists() and not any(run.glob("step_*")):
        time.sleep(0.05)
    return float(len(completion) % 2)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment for sbatch and its like."""
    if slurm_cluster.missing():
        slurm_cluster.install()
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(f"no Slurm here: {reason}")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "patient_reward.py").write_text(REWARD)
    with slurm_cluster.cluster(folder / "cluster") as env:
        for name in TORCHRUN:
            env.pop(name, None)
        env["PYTHONPATH"] = str(folder)
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        yield env


# --- jobs


def submit(env: dict, folder: Path, script: str, *words, sbatch=(), **variables) -> str:
    """The number of a job that runs slurm/<script> with output_dir=folder."""
    command = ["sbatch", "--parsable", f"--output={folder}.out", *sbatch]
    command += [f"slurm/{script}", *words, f"--output_dir={folder}"]
    env = env | variables
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def small_run(model: Path, *words: str) -> list[str]:
    """What train.sh is told of a run without servers."""
    return ["train.sh", *CONFIG, HF, f"--model={model}", *words]


def job(env: dict, number: str) -> dict:
    """What Slurm knows of it: {"JobState": ..., "Restarts": ..., "ExitCode": ...}."""
    words = slurm_cluster.query(env, "scontrol", "show", "job", number).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def words_of(folder: Path) -> str:
    """What the job has said, and the ends of its logs."""
    files = [Path(f"{folder}.out"), *sorted(folder.glob("logs/*.log"))]
    return "\n".join(f"--- {file}\n{slurm_cluster.tail(file, 2500)}" for file in files)


ENDS = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL BOOT_FAIL OUT_OF_MEMORY".split()


def is_over(env: dict, number: str) -> bool:
    return job(env, number).get("JobState") in ENDS


def ended(env: dict, number: str, folder: Path, seconds: float = PATIENCE) -> str:
    """The state in which a job has ended."""
    states = []

    def over() -> bool:
        states.append(job(env, number).get("JobState"))
        return states[-1] in ENDS

    slurm_cluster.wait_until(over, seconds, lambda: words_of(folder))
    return states[-1]


def processes(env: dict, number: str) -> list[psutil.Process]:
    return slurm_cluster.processes(SLURM_CONF=env["SLURM_CONF"], SLURM_JOB_ID=number)


def of_all(work, processes: list[psutil.Process]) -> set:
    """The union of work(process); those that have gone have nothing."""
    union = set()
    for process in processes:
        try:
            union |= set(work(process))
        except psutil.NoSuchProcess:
            continue
    return union


def listening() -> dict[str, int]:
    """{inode: port} of all listening TCP sockets of the machine: a port alone may be another
    program's by now."""
    ports = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            row = line.split()
            address, state, inode = row[1], row[3], row[9]
            if state == "0A":
                ports[inode] = int(address.rpartition(":")[2], 16)
    return ports


def ports_of(process: psutil.Process) -> list[int]:
    listen = psutil.CONN_LISTEN
    return [c.laddr.port for c in process.net_connections("tcp") if c.status == listen]


def sockets(of: list[psutil.Process]) -> set[str]:
    """The inodes of the TCP sockets that they listen on."""
    ports = of_all(ports_of, of)
    return {inode for inode, port in listening().items() if port in ports}


def areas_of(process: psutil.Process) -> list[str]:
    return [area.path for area in process.memory_maps() if area.path.startswith("/dev/shm/")]


def shared_memory(of: list[psutil.Process]) -> set[str]:
    return of_all(areas_of, of)


def all_gone(env: dict, number: str, there: list[psutil.Process]) -> None:
    """Waits until the job has no process any more, neither of those that were there nor another."""

    def left():
        return [p for p in {*there, *processes(env, number)} if slurm_cluster.alive(p)]

    slurm_cluster.wait_until(lambda: not left(), PATIENCE, lambda: f"still there: {left()}")


def wait_for_step(env: dict, number: str, folder: Path, step: int) -> None:
    def reached():
        assert not is_over(env, number), words_of(folder)
        return len(steps_in(folder)) >= step

    slurm_cluster.wait_until(reached, PATIENCE, lambda: words_of(folder))


# --- whole runs


@pytest.fixture(scope="module")
def short_of_time(slurm, tiny_model_dir, tmp_path_factory):
    """(job, run folder): two ranks on one node; 10 to 40 seconds after its start, half an hour
    before its limit, Slurm tells it that time is nearly over. The second start gets more time.
    First of all, because it mostly waits."""
    folder = tmp_path_factory.mktemp("short") / "run"
    limits = ("--nodes=1", "--ntasks-per-node=2", "--time=30", "--signal=B:USR1@1760")
    words = small_run(tiny_model_dir)
    number = submit(slurm, folder, *words, sbatch=limits, REWARD_HOLD=str(folder))

    def is_second_start():
        return job(slurm, number).get("Restarts") == "1"

    def more_time():
        slurm_cluster.wait_until(is_second_start, PATIENCE, lambda: words_of(folder))
        slurm_cluster.query(slurm, "scontrol", "update", f"JobId={number}", "TimeLimit=600")

    threading.Thread(target=more_time, daemon=True).start()
    return number, folder


@pytest.fixture(scope="module")
def two_nodes(short_of_time, slurm, tiny_model_dir, tmp_path_factory):
    """The folder of the same run on two nodes, a rank on each, which nothing interrupts and whose
    last checkpoint is evaluated."""
    folder = tmp_path_factory.mktemp("two") / "run"
    evaluation = (
        f"sbatch --output={folder}_evaluation.out slurm/evaluate.sh {{checkpoint}} "
        f"--eval_max_prompts=2 --eval_num_generations=2 --trust_checkpoint=True"
    )
    words = small_run(tiny_model_dir, f"--eval_command={evaluation}")
    number = submit(slurm, folder, *words, sbatch=["--nodes=2"], HF_TOKEN=SECRET)
    assert ended(slurm, number, folder) == "COMPLETED", words_of(folder)
    assert (folder / "done").exists(), words_of(folder)
    assert len(steps_in(folder)) == 6
    assert json.loads((folder / "launches.jsonl").read_text())["world_size"] == 2
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert logs == {"trainer_0.log", "trainer_1.log"}
    return folder


def test_a_checkpoint_is_evaluated_by_a_job_of_its_own_and_no_secret_is_written(two_nodes):
    result = two_nodes / "evaluations" / "job_step_000006.json"
    said = Path(f"{two_nodes}_evaluation.out")
    slurm_cluster.wait_until(result.exists, PATIENCE, lambda: slurm_cluster.tail(said))
    assert json.loads(result.read_text())["problems"] == 2
    assert len(result.with_suffix(".jsonl").read_text().splitlines()) == 2
    written = [Path(f"{two_nodes}.out"), said]
    written += [*two_nodes.rglob("*.log"), *two_nodes.rglob("*.json*")]
    for path in written:
        assert SECRET not in path.read_text(errors="replace"), path
    assert "evaluating" in said.read_text()


def trains(process: psutil.Process) -> list[int]:
    return [process.pid] if "train.py" in process.cmdline() else []


def test_scancel_leaves_no_process_and_no_port_behind(slurm, tiny_model_dir, tmp_path):
    folder = tmp_path / "run"
    words = small_run(tiny_model_dir, "--max_steps=4000")
    number = submit(slurm, folder, *words, sbatch=["--nodes=2"])
    wait_for_step(slurm, number, folder, 2)
    there = processes(slurm, number)
    opened = sockets(there)
    assert opened
    assert len(of_all(trains, there)) >= 4  # two torchruns, two ranks
    subprocess.run(["scancel", number], env=slurm, check=True, timeout=PATIENCE)
    all_gone(slurm, number, there)
    assert not opened & listening().keys()
    assert ended(slurm, number, folder) == "CANCELLED"
    assert job(slurm, number)["Restarts"] == "0"
    assert checkpoint.verify(checkpoint.latest(folder)) == ""  # there was time for it


@pytest.mark.slow
def test_a_server_node_and_a_trainer_node_train_and_nothing_is_left_of_the_server(
    slurm, tiny_model_dir, tmp_path
):
    folder = tmp_path / "run"
    words = ["train.sh", "--server-nodes=1", *CONFIG, f"--model={tiny_model_dir}"]
    number = submit(slurm, folder, *words, sbatch=["--nodes=2"])

    def has_begun():
        return (folder / "config.json").exists() or is_over(slurm, number)

    slurm_cluster.wait_until(has_begun, PATIENCE, lambda: words_of(folder))
    there = processes(slurm, number)
    opened = sockets(there)
    shared = shared_memory(there)
    assert ended(slurm, number, folder) == "COMPLETED", words_of(folder)
    assert (folder / "done").exists(), words_of(folder)
    steps = steps_in(folder)
    assert len(steps) == 6
    for line in steps:  # every sync arrived
        assert line["sampling/sampling_logp_difference/mean"] < 1e-4
    assert "1 node(s) train" in Path(f"{folder}.out").read_text()
    assert (folder / "logs" / "server_0.log").exists()
    all_gone(slurm, number, there)
    assert opened and not opened & listening().keys()
    assert shared  # hundreds of MB of vLLM's
    for path in shared:
        assert not os.path.exists(path)


def test_a_job_whose_time_is_over_saves_is_queued_again_and_ends_as_one_that_nothing_interrupts(
    short_of_time, two_nodes, slurm
):
    number, folder = short_of_time
    assert ended(slurm, number, folder) == "COMPLETED", words_of(folder)
    assert job(slurm, number)["Restarts"] == "1", words_of(folder)
    saved = checkpoint.checkpoints_in(folder)[0]
    assert saved.name < "step_000006"
    said = Path(f"{folder}.out").read_text()
    for words in (
        f"saved {saved}: queued again",
        "start number 2",
        "--resume_from_checkpoint=latest",
    ):
        assert words in said
    assert f"resumed from {saved}" in (folder / "logs" / "trainer_0.log").read_text()
    assert (folder / "done").exists() and not (folder / "stop").exists()
    assert steps_in(folder) == steps_in(two_nodes)


# --- what goes wrong, and small things


def test_a_server_that_dies_at_its_start_ends_the_job_with_a_sentence_and_its_last_words(
    slurm, tmp_path
):
    folder = tmp_path / "run"
    words = ["train.sh", "--server-nodes", "1", *CONFIG, "--model="]
    number = submit(slurm, folder, *words, sbatch=["--nodes=2"])
    assert ended(slurm, number, folder) == "FAILED"
    said = Path(f"{folder}.out").read_text()
    for words in ("has died", "logs/server_0.log", "model is empty"):
        assert words in said
    assert not (folder / "logs" / "trainer_0.log").exists()


@pytest.mark.slow
def test_a_job_that_saves_nothing_is_not_queued_again(slurm, tiny_model_dir, tmp_path):
    folder = tmp_path / "run"
    words = small_run(tiny_model_dir, "--max_steps=4000", "--save_steps=-1")
    number = submit(slurm, folder, *words)
    wait_for_step(slurm, number, folder, 1)
    command = ["scancel", "--signal=USR1", "--batch", number]
    subprocess.run(command, env=slurm, check=True, timeout=PATIENCE)
    assert ended(slurm, number, folder) == "FAILED"
    assert job(slurm, number)["Restarts"] == "0"
    assert "no checkpoint was added" in Path(f"{folder}.out").read_text(), words_of(folder)


@pytest.mark.slow
def test_an_array_trains_every_seed_in_a_folder_of_its_own(slurm, tiny_model_dir, tmp_path):
    words = ["seeds.sh", *CONFIG, HF, f"--model={tiny_model_dir}", "--dry_run"]
    number = submit(slurm, tmp_path / "run", *words, sbatch=["--array=3"])
    folder = tmp_path / "run_seed_3"
    assert ended(slurm, f"{number}_3", folder) == "COMPLETED", words_of(tmp_path / "run")
    printed = (folder / "logs" / "trainer_0.log").read_text()
    assert "seed = 3\n" in printed and f"output_dir = '{folder}'" in printed


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--server-nodes", "1"], "one must be left to train"),
        (["--server-gpus", "1"], "0 GPU(s)"),
        (["--learning_rat=1"], "did you mean 'learning_rate'"),
        (["--tp", "config/x.py"], "--tp needs a number"),
        (["--prompts_per_step=7"], "prompts_per_step=7 must be a multiple of the 2 ranks"),
    ],
)
def test_a_wrong_word_ends_the_job_with_a_sentence(words, sentence, slurm, tmp_path):
    folder = tmp_path / "a run"
    number = submit(slurm, folder, "train.sh", *CONFIG, *words, sbatch=["--ntasks-per-node=2"])
    assert ended(slurm, number, folder, PATIENCE) == "FAILED"
    assert sentence in Path(f"{folder}.out").read_text()
    assert not folder.exists()


# --- without a cluster


def without_slurm() -> dict:
    return {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}


def bash(*words, env: dict) -> subprocess.CompletedProcess:
    command = ["bash", *words]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE
    )


def test_a_checkpoint_of_a_run_with_servers_is_evaluated_by_vllm_in_the_process(tmp_path):
    """The lines of evaluate.sh that make a config of a checkpoint's."""
    servers = ["--rollout_engine=server", "--rollout_server=http://a:8000", "--rollout_ahead=1"]
    saved = tmp_path / "train_config.json"
    saved.write_text(json.dumps(load_config([*CONFIG, *servers])))
    made = tmp_path / "config.json"
    script = (ROOT / "slurm" / "evaluate.sh").read_text()
    lines = script.split("<< 'END'\n")[1].split("\nEND\n")[0]
    command = [sys.executable, "-c", lines, tmp_path, made, "--trust_checkpoint=True"]
    subprocess.run(command, cwd=ROOT, check=True)
    config = load_config([str(made)])
    assert config["rollout_engine"] == "vllm"
    assert config["reward_funcs"] == ["patient_reward:parity"]
    assert config["max_steps"] == 6


def test_checkpoints_are_found_where_the_run_folder_is_a_link(tmp_path):
    """The line of train.sh that looks for them: by it a run is resumed, not begun again."""
    script = (ROOT / "slurm" / "train.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("newest_checkpoint()")]
    for name in ("step_000002", "step_000010", "step_000012.tmp"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("run")
    for folder in (tmp_path / "run", tmp_path / "link"):
        done = bash("-c", f"run={folder}; {line}; newest_checkpoint", env=without_slurm())
        assert done.stdout == f"{folder}/step_000010\n"


def checkpoint_of(folder: Path, settings: dict) -> Path:
    """As much of a checkpoint as evaluate.sh looks at first."""
    path = folder / "step_1"
    path.mkdir()
    (path / "train_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("reward", ["patient_reward:parity", "auto"])
def test_rewards_that_only_a_checkpoint_names_are_not_imported(reward, tmp_path):
    config = load_config([*CONFIG, f"--reward_funcs=[{reward!r}]"]) | {"trust_checkpoint": True}
    path = checkpoint_of(tmp_path, config)
    done = bash("slurm/evaluate.sh", path, env=without_slurm())
    assert done.returncode == 1
    assert not (tmp_path / "evaluations").exists()
    assert repr(reward) in done.stderr and "--trust_checkpoint=True" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("key", ["vllm_options", "vllm_options.worker_extension_cls"])
def test_options_of_vllm_that_only_a_checkpoint_names_import_nothing(key, tmp_path):
    value = "evil.Worker" if "." in key else {"worker_extension_cls": "evil.Worker"}
    path = checkpoint_of(tmp_path, load_config([HF]) | {key: value})
    for flag in ("--seeds=1", "--reward_funcs=countdown"):  # consents to rewards alone
        done = bash("slurm/evaluate.sh", path, flag, env=without_slurm())
        assert done.returncode == 1
        assert "'worker_extension_cls' may import code" in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "evaluations").exists()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"vllm_options": []}, "vllm_options must be of type dict"),
        ({"reward_funcs": 5}, "reward_funcs must be of type list"),
        ([], "is damaged"),
    ],
)
def test_a_checkpoint_whose_settings_are_nonsense_is_not_evaluated_but_named(
    settings, words, tmp_path
):
    path = checkpoint_of(tmp_path, settings)
    done = bash("slurm/evaluate.sh", path, env=without_slurm())
    assert done.returncode == 2
    assert words in done.stderr and str(path) in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# a function of bash, which comes before any PATH, that of .venv too: python as it is, but for
# torchrun, where it says what an evaluation would
TORCHRUN_SAYS = """() {
if [[ $2 == torch.distributed.run ]]; then echo '{"model": 1}'; else command python "$@"; fi
}"""


def tools(folder: Path, **scripts: str) -> str:
    """A PATH on which these scripts come first."""
    (folder / "bin").mkdir()
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def test_an_evaluation_writes_through_no_link_of_a_strangers_folder(tmp_path):
    path = checkpoint_of(tmp_path, load_config([HF]))
    (path / "model.safetensors").touch()
    (tmp_path / "diary").write_text("mine")
    (tmp_path / "evaluations").mkdir()
    for end in ("said", "tmp", "json"):
        (tmp_path / "evaluations" / f"job_step_1.{end}").symlink_to(tmp_path / "diary")
    env = without_slurm() | {"BASH_FUNC_python%%": TORCHRUN_SAYS}
    done = bash("slurm/evaluate.sh", path, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "diary").read_text() == "mine"
    assert [path.name for path in (tmp_path / "evaluations").iterdir()] == ["job_step_1.json"]
    assert (tmp_path / "evaluations" / "job_step_1.json").read_text() == '{"model": 1}\n'


NOTHING = "#!/bin/sh\nexit 1\n"


def one_node(folder: Path, srun: str = NOTHING, **variables) -> dict:
    """The environment of a job on one node where srun starts nothing."""
    scontrol = "#!/bin/sh\necho here\n"
    job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "here"}
    path = tools(folder, srun=srun, scontrol=scontrol, scancel=NOTHING)
    return without_slurm() | job | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""} | variables


@pytest.mark.parametrize("servers", [["--server-gpus", "1"], ["--server-nodes=1"]])
def test_what_needs_servers_is_allowed_to_a_job_that_starts_them(servers, tmp_path):
    words = [*servers, *CONFIG, "--rollout_ahead=1", f"--output_dir={tmp_path / 'run'}"]
    done = bash("slurm/train.sh", *words, env=one_node(tmp_path))
    assert "one must be left to train" in done.stderr, done.stderr
    assert "rollout_ahead" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "per_task, told", [("1", True), ("a100:2", True), ("4", False), ("a100:4", False)]
)
def test_gpus_that_ranks_would_not_see_are_told(per_task, told, tmp_path):
    env = one_node(tmp_path, CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPUS_PER_TASK=per_task)
    done = bash("slurm/train.sh", *CONFIG, f"--output_dir={tmp_path / 'run'}", env=env)
    assert done.returncode == 1
    said = f"would see {per_task[-1]} of its 4 GPUs: give --gpus-per-node=4 instead"
    assert (said in done.stderr) == told, done.stderr
    assert (tmp_path / "run").exists() != told


def test_a_job_writes_its_logs_through_no_link_of_a_strangers_folder(tmp_path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "diary").write_text("mine")
    (logs / "trainer_0.log").symlink_to(tmp_path / "diary")
    words = [*CONFIG, f"--output_dir={tmp_path / 'run'}"]
    done = bash("slurm/train.sh", *words, env=one_node(tmp_path))
    assert "no process starts on here" in done.stderr, done.stderr
    assert (tmp_path / "diary").read_text() == "mine"
    assert not (logs / "trainer_0.log").is_symlink()


def test_a_launch_that_failed_without_a_status_is_no_training_that_ended(tmp_path):
    """As an old srun's, where a log could not be opened. A % in a folder's name is no pattern."""
    run = tmp_path / "at_100%_job"
    srun = f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\necho here 1234\n'
    env = one_node(tmp_path, srun=srun)
    done = bash("slurm/train.sh", *CONFIG, f"--output_dir={run}", env=env)
    assert done.returncode == 1
    assert "the run is neither done nor stopped" in done.stderr, done.stderr
    asked = (tmp_path / "asked").read_text()
    assert f"--output={tmp_path}/at_100%%_job/logs/trainer_%n.log" in asked
    dry = bash("slurm/train.sh", *CONFIG, f"--output_dir={run}", "--dry_run", env=env)
    assert dry.returncode == 0, dry.stderr


def test_the_scripts_run_where_chdir_has_led(tmp_path):
    """SLURM_SUBMIT_DIR stays the folder in which sbatch was typed."""
    env = one_node(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), SLURM_ARRAY_TASK_ID="3")
    words = [*CONFIG, f"--output_dir={tmp_path / 'run'}", "--suffix=_mine"]
    said = bash("slurm/seeds.sh", *words, env=env).stdout
    assert f"{tmp_path / 'run_mine_seed_3'}: 1 node(s) train" in said


def test_a_job_queued_again_before_it_began_is_started_as_it_was_asked_for(tmp_path):
    """What is in the folder then is an older run's, and no business of a requeue."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "step_000002").mkdir()
    (run / "launches.jsonl").write_text("{}\n")
    (run / "metrics.jsonl").write_text("")
    words = [*CONFIG, f"--output_dir={run}", "--overwrite_output_dir=True"]
    env = one_node(tmp_path, SLURM_RESTART_COUNT="1")
    assert "--resume_from_checkpoint" not in bash("slurm/train.sh", *words, env=env).stdout
    # once it has written its launch, what is there is its own
    own, others = '{"slurm_job": "7"}\n', '{"slurm_job": "70"}\n'
    (run / "launches.jsonl").write_text("{}\n" + own)
    assert "--resume_from_checkpoint=latest" in bash("slurm/train.sh", *words, env=env).stdout
    (run / "launches.jsonl").write_text(own + others)
    assert "--resume_from_checkpoint" not in bash("slurm/train.sh", *words, env=env).stdout


@pytest.mark.parametrize("script", ["train.sh", "seeds.sh", "evaluate.sh"])
def test_help_is_the_header_and_needs_no_slurm(script):
    done = bash(f"slurm/{script}", "--help", env=without_slurm())
    assert done.returncode == 0
    assert "sbatch --" in done.stdout and f"slurm/{script}" in done.stdout
    assert "#" not in done.stdout


def test_caches_stay_in_the_repository_unless_the_user_has_a_place(tmp_path):
    asked = 'source slurm/common.sh; echo "$HF_HOME $TORCH_HOME"'
    env = os.environ | {"HF_HOME": str(tmp_path)}
    env.pop("TORCH_HOME", None)
    done = bash("-c", asked, env=env)
    assert done.stdout.split() == [str(tmp_path), f"{ROOT}/var/cache/torch"]


def test_a_login_and_models_at_home_are_found_in_a_job(tmp_path):
    def places(**variables) -> list[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env |= {"HOME": str(tmp_path)} | variables
        asked = 'source slurm/common.sh; echo "$HF_HOME" "${HF_TOKEN_PATH-none}"'
        return bash("-c", asked, env=env).stdout.split()

    home = tmp_path / ".cache" / "huggingface"
    assert places() == [f"{ROOT}/var/cache/huggingface", "none"]
    home.mkdir(parents=True)
    (home / "token").write_text("hf_of_nobody")
    assert places() == [f"{ROOT}/var/cache/huggingface", str(home / "token")]
    (home / "hub").mkdir()
    assert places()[0] == str(home)
    assert places(HF_HOME="/scratch/hf") == ["/scratch/hf", "none"]  # and the token in there


def test_common_sh_needs_no_home_and_knows_the_word_for_no_gpus():
    env = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "NoDevFiles"}
    asked = "source slurm/common.sh; gpus_here; CUDA_VISIBLE_DEVICES=0,3 gpus_here"
    done = bash("-euo", "pipefail", "-c", asked, env=env)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "3"]), done.stderr


def test_the_cluster_leaves_no_process_behind(slurm, tmp_path):
    env = slurm_cluster.start(tmp_path / "second")
    assert slurm_cluster.query(env, "srun", "--nodes=2", "hostname").count("\n") == 1
    slurm_cluster.stop(tmp_path / "second")
    assert not slurm_cluster.processes(SLURM_CONF=env["SLURM_CONF"])
    assert slurm_cluster.processes(SLURM_CONF=slurm["SLURM_CONF"])  # the other one is not touched
