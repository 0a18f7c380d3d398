"""Exact resume, measured: train 2n steps against train n, kill -9, resume, n more, for every
engine, ZeRO stage and number of ranks.

    python tests/helpers/exact_matrix.py                        all twelve: six minutes on two cores
    python tests/helpers/exact_matrix.py vllm 2 1  hf 0 2       some: engine, ZeRO stage, ranks

The kill falls into the third of four steps, between its two updates (num_iterations=2), after the
checkpoint of step 2; every rank is killed. Both controllers, the replay buffer, resampling and
the reference model are on. Compared to the bit: metrics.jsonl without seconds, and everything in
the checkpoint of step 4: model.safetensors, controller_state.json with the replay buffer, the
optimizer's moments and whatever else DeepSpeed keeps in engine/, the random state of every rank.
The last line counts the combinations that differ, and so does the exit status.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from deadlines import PATIENCE
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
# 659 problems instead of 10,489: a second less at every start
SMALL_DATA = ["--dataset.config=3", "--max_prompt_length=200"]
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FLAGS = [
    *SMALL_DATA,
    "--prompts_per_step=4",
    "--num_generations=4",
    "--max_completion_length=8",
    "--eval_steps=0",
    "--learning_rate=1e-3",
    "--max_steps=4",
    "--reward_timeout=300",
    "--reward_funcs=['parity_reward:parity']",
    "--num_iterations=2",
    "--save_steps=2",
    "--save_total_limit=0",
    "--replay.size=50",
    "--replay.fraction=0.5",
    "--resample_equal_groups=1",
    "--maxent_target_weight_entropy=1.0",
    "--warmup_steps=0",  # tau moves from the first step
    "--beta=0.05",
    "--kl_target=0.05",
    "--checkpoint_mode=shallow",
]


class Case(NamedTuple):
    engine: str
    zero: int  # ZeRO stage
    ranks: int

    def flags(self) -> list[str]:
        return [f"--rollout_engine={self.engine}", f"--zero_stage={self.zero}"]


CASES = [Case(*case) for case in product(("hf", "vllm"), (0, 2, 3), (1, 2))]

# train.py of which every rank dies in step 3
KILLED = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "helpers")!r}]
import common, exact_matrix, train
exact_matrix.die_between_two_updates()
train.script(train.main, train.script(common.load_config))
"""


def die_between_two_updates() -> None:
    """Has this process, a rank of a run, die when it is about to compute the second update of
    step 3."""
    import learner  # a process that only compares has no use for it

    calls = []
    accumulate = learner.accumulate_gradients

    def accumulate_or_die(*args):
        calls.append(1)
        if len(calls) == 6:
            # or one rank's death would end another one earlier, in the first update
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return accumulate(*args)

    learner.accumulate_gradients = accumulate_or_die


def without_torchrun() -> dict:
    """This environment, of no rank."""
    return {key: value for key, value in os.environ.items() if key not in TORCHRUN}


def start(
    model: Path, folder: Path, *flags, ranks: int = 1, script: str = "train.py", **environment
) -> subprocess.Popen:
    """A training script on config/countdown_tiny.py with FLAGS and `flags`, its words in
    `folder`.log; under torchrun with more than one rank."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [script, "config/countdown_tiny.py", *FLAGS]
    command += [f"--model={model}", f"--output_dir={folder}", *flags]
    env = without_torchrun()
    env["PYTHONPATH"] = str(ROOT / "tests" / "helpers")  # parity_reward
    env |= environment
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
            env=env,
        )


def finish(process: subprocess.Popen, seconds: float = PATIENCE) -> int:
    try:
        return process.wait(seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def log_of(folder: Path) -> str:
    return Path(f"{folder}.log").read_text()


def error_of(folder: Path) -> str:
    """The one sentence, on one line, that a run has ended with."""
    log = log_of(folder)
    errors = re.findall("error: .*", log)  # behind the progress bar, which ends without a newline
    assert len(errors) == 1 and log.endswith(errors[0] + "\n"), log[-3000:]
    assert "Traceback" not in log, log[-3000:]
    return errors[0]


def steps_in(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl without seconds, and without half a line at the end."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        if text.endswith("}"):
            lines.append(without_seconds(json.loads(text)))
    return lines


def without_seconds(line: dict) -> dict:
    kept = {}
    for name, value in line.items():
        if not name.startswith("time/") and name != "tokens_per_second":
            kept[name] = value
    return kept


def killed_and_resumed(model: Path, folder: Path, case: Case) -> None:
    """A run that is killed between two updates of step 3 and resumed up to step 4."""
    script = folder.with_suffix(".py")
    script.write_text(KILLED)
    flags = case.flags()
    status = finish(start(model, folder, *flags, ranks=case.ranks, script=str(script)))
    died = status == -signal.SIGKILL
    if case.ranks > 1:  # torchrun's own status
        died = status == 1 and "Signal 9 (SIGKILL)" in log_of(folder)
    steps = [line["step"] for line in steps_in(folder)]
    saved = sorted(path.name for path in folder.glob("step_*"))
    if not died or steps != [1, 2] or saved != ["step_000002"]:
        raise RuntimeError(
            f"not killed in step 3: status {status}, steps {steps}, saved {saved}\n"
            f"{log_of(folder)[-3000:]}"
        )
    flags.append("--resume_from_checkpoint=latest")
    status = finish(start(model, folder, *flags, ranks=case.ranks))
    if status or "step_000002, 2 steps done" not in log_of(folder):
        raise RuntimeError(f"not resumed: status {status}\n{log_of(folder)[-3000:]}")


# --- the comparison


def difference(one, two, where: str, tensors: list) -> str:
    """The first place where two nested values are not the same to the bit, "" without one. Appends
    the place of every tensor to `tensors`."""
    if type(one) is not type(two):
        return f"{where}: {type(one).__name__} against {type(two).__name__}"
    if isinstance(one, torch.Tensor):
        tensors.append(where)
        return tensor_difference(one, two, where)
    if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):  # DeepSpeed's loss scaler
        return difference(vars(one), vars(two), where, tensors)
    if isinstance(one, dict) and list(one) != list(two):
        keys = sorted(map(str, set(one) ^ set(two)))
        return f"{where}: keys {keys or 'in another order'}"
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            return f"{where}: {len(one)} against {len(two)} entries"
        one = dict(enumerate(one))
        two = dict(enumerate(two))
    if isinstance(one, dict):
        for key in one:
            problem = difference(one[key], two[key], f"{where}/{key}", tensors)
            if problem:
                return problem
        return ""
    return "" if one == two else f"{where}: {one!r} against {two!r}"


def tensor_difference(one: torch.Tensor, two: torch.Tensor, where: str) -> str:
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{where}: {one.dtype} {tuple(one.shape)} against {two.dtype} {tuple(two.shape)}"
    if torch.equal(bits(one), bits(two)):  # NaN and -0.0 too
        return ""
    count = int((one != two).sum())
    gap = (one - two).abs().max().item()
    return f"{where}: {count} of {one.numel()} numbers, by at most {gap:.2g}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def contents(folder: Path) -> dict:
    """What a run has left: its metrics, and of its checkpoint of step 4 everything but the configs
    and the tokenizer."""
    last = folder / "step_000004"
    left = {
        "metrics": steps_in(folder),
        "controllers": json.loads((last / "controller_state.json").read_text()),
        "model": load_file(last / "model.safetensors"),
    }
    for path in sorted(last.rglob("*.pt")):
        pickled = torch.load(path, map_location="cpu", weights_only=False)
        left[str(path.relative_to(last))] = pickled
    return left


def first_difference(whole: Path, resumed: Path) -> str:
    """ "" if two runs of four steps ended the same to the bit. RuntimeError if there was too little
    to compare."""
    one = contents(whole)
    tensors = []  # the places of what was compared
    problem = difference(one, contents(resumed), "", tensors)
    if problem:
        return problem
    for reason in too_little(one, tensors):
        raise RuntimeError(f"{whole} has {reason}: {one['controllers']}, {tensors}")
    return ""


def too_little(left: dict, tensors: list[str]):
    """What a run lacks that its comparison should have been of."""
    metrics = left["metrics"]
    state = left["controllers"]
    if [line["step"] for line in metrics] != [1, 2, 3, 4] or state["controllers"]["step"] != 4:
        yield "not four steps"
    if not state["replay"]["prompts"]:
        yield "no replay"
    for name in ("tau", "beta"):
        if metrics[0][name] == metrics[-1][name]:
            yield f"a {name} that did not move"
    for part in ("/model/", "exp_avg", "exp_avg_sq", "/rng_"):
        if not any(part in where for where in tensors):
            yield f"no {part}"


def compare(model: Path, folder: Path, case: Case) -> str:
    """The first difference between a run left alone and one that is killed and resumed, side by
    side in `folder`; "" without one."""
    whole = folder / "whole"
    killed = folder / "killed"
    process = start(model, whole, *case.flags(), ranks=case.ranks)
    try:
        killed_and_resumed(model, killed, case)
    finally:
        status = finish(process)
    if status:
        words = log_of(whole)[-3000:]
        raise RuntimeError(f"the run left alone ended with status {status}\n{words}")
    return first_difference(whole, killed)


def report(model: Path, folder: Path, case: Case) -> bool:
    """Prints a line on a case; whether it differs."""
    begin = time.perf_counter()
    folder.mkdir()
    try:
        verdict = compare(model, folder, case)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        verdict = f"failed: {str(error).splitlines()[0]}"
    name = f"{case.engine} ZeRO {case.zero} ranks {case.ranks}"
    seconds = time.perf_counter() - begin
    print(f"{name:<22}  {verdict or 'same':<8}{seconds:5.0f} s", flush=True)
    return verdict != ""


def main(argv) -> int:
    sys.path.insert(0, str(ROOT))
    import sft

    cases = []
    for i in range(0, len(argv), 3):
        cases.append(Case(argv[i], int(argv[i + 1]), int(argv[i + 2])))
    cases = cases or CASES
    differ = 0
    with tempfile.TemporaryDirectory() as there:
        model = Path(there) / "model"
        tokenizer = sft.tiny_tokenizer()
        sft.tiny_model(len(tokenizer), seed=0, layers=2).save_pretrained(model)
        tokenizer.save_pretrained(model)
        for case in cases:
            differ += report(model, Path(there) / "_".join(map(str, case)), case)
    print(f"{differ} of {len(cases)} differ")
    return differ


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    sys.exit(main(sys.argv[1:]))
