"""Exact resume, measured: train 2n steps against train n, kill -9, resume, n more, for every engine, ZeRO stage and number of ranks.

    python tests/helpers/exact_matrix.py                            all twelve, about six minutes on two cores
    python tests/helpers/exact_matrix.py vllm 2 1  hf 0 2           some: engine, ZeRO stage, ranks

The kill falls into the third of four steps, between its two updates (num_iterations=2), after the checkpoint of step 2; every rank is killed. Both
controllers, the replay buffer, resampling and the reference model are on. Compared to the bit: metrics.jsonl without seconds, and everything in
the checkpoint of step 4: model.safetensors, controller_state.json with the replay buffer, the optimizer's moments and whatever else DeepSpeed
keeps in engine/, the random state of every rank. The last line counts the combinations that differ, and so does the exit status.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
SMALL_DATA = [
    "--dataset.config=3",
    "--max_prompt_length=200",
]  # 659 problems instead of 10,489: a second less at every start
FLAGS = [
    *SMALL_DATA,
    "--prompts_per_step=4",
    "--num_generations=4",
    "--max_completion_length=8",
    "--eval_steps=0",
    "--learning_rate=1e-3",
    "--max_steps=4",
    "--reward_funcs=['parity_reward:parity']",
    "--num_iterations=2",
    "--save_steps=2",
    "--save_total_limit=0",
    "--replay.size=50",
    "--replay.fraction=0.5",
    "--resample_equal_groups=1",
    "--maxent_target_weight_entropy=1.0",
    "--beta=0.05",
    "--kl_target=0.05",
    "--checkpoint_mode=shallow",
]
CASES = list(product(("hf", "vllm"), (0, 2, 3), (1, 2)))  # engine, ZeRO stage, ranks

# train.py of which every rank dies when it is about to compute the second update of step 3
KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
import common, learner, train
calls, accumulate = [], learner.accumulate_gradients
def accumulate_or_die(*args):
    calls.append(args)
    if len(calls) == 6:
        dist.barrier()      # or one rank's death would end another one earlier, in the first update
        os.kill(os.getpid(), signal.SIGKILL)
    return accumulate(*args)
learner.accumulate_gradients = accumulate_or_die
train.script(train.main, train.script(common.load_config))
"""


def start(
    model: Path, folder: Path, *flags, ranks: int = 1, script: str = "train.py", **environment
) -> subprocess.Popen:
    """A training script on config/countdown_tiny.py with FLAGS and `flags`, its words in `folder`.log; under torchrun with more than one rank."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(
            [
                sys.executable,
                *launcher,
                script,
                "config/countdown_tiny.py",
                *FLAGS,
                f"--model={model}",
                f"--output_dir={folder}",
                *flags,
            ],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**env, "PYTHONPATH": str(ROOT / "tests" / "helpers"), **environment},
        )


def finish(process: subprocess.Popen, seconds: float = 240) -> int:
    try:
        return process.wait(seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def log_of(folder: Path) -> str:
    return Path(f"{folder}.log").read_text()


def steps_in(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl without seconds, and without half a line at the end."""
    path = folder / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )
    return [
        {
            key: value
            for key, value in line.items()
            if not key.startswith("time/") and key != "tokens_per_second"
        }
        for line in lines
    ]


def case_flags(engine: str, zero: int) -> list[str]:
    return [f"--rollout_engine={engine}", f"--zero_stage={zero}"]


def killed_and_resumed(model: Path, folder: Path, engine: str, zero: int, ranks: int) -> None:
    """A run that is killed between two updates of step 3 and resumed up to step 4."""
    script = folder.with_suffix(".py")
    script.write_text(KILLED)
    status = finish(
        start(model, folder, *case_flags(engine, zero), ranks=ranks, script=str(script))
    )
    steps, saved = (
        [line["step"] for line in steps_in(folder)],
        sorted(path.name for path in folder.glob("step_*")),
    )
    died = (
        status == -signal.SIGKILL
        if ranks == 1
        else status == 1 and log_of(folder).count("Signal 9 (SIGKILL)") >= 1
    )
    if not died or steps != [1, 2] or saved != ["step_000002"]:
        raise RuntimeError(
            f"not killed in step 3: status {status}, steps {steps}, saved {saved}\n{log_of(folder)[-3000:]}"
        )
    status = finish(
        start(
            model, folder, *case_flags(engine, zero), "--resume_from_checkpoint=latest", ranks=ranks
        )
    )
    if status or "step_000002, 2 steps done" not in log_of(folder):
        raise RuntimeError(f"not resumed: status {status}\n{log_of(folder)[-3000:]}")


def difference(one, two, where: str, seen: list) -> str:
    """The first place where two nested values are not the same to the bit, "" without one. Appends the place of every tensor to `seen`."""
    if type(one) is not type(two):
        return f"{where}: {type(one).__name__} against {type(two).__name__}"
    if isinstance(one, torch.Tensor):
        seen.append(where)
        if one.shape != two.shape or one.dtype != two.dtype:
            return f"{where}: {one.dtype} {tuple(one.shape)} against {two.dtype} {tuple(two.shape)}"
        if torch.equal(
            one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8)
        ):
            return ""
        return f"{where}: {int((one != two).sum())} of {one.numel()} numbers, by at most {(one - two).abs().max().item():.2g}"
    if isinstance(one, dict):
        if list(one) != list(two):
            return f"{where}: keys {sorted(map(str, set(one) ^ set(two))) or 'in another order'}"
        return next(
            filter(None, (difference(one[key], two[key], f"{where}/{key}", seen) for key in one)),
            "",
        )
    if isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return f"{where}: {len(one)} against {len(two)} entries"
        return next(
            filter(
                None,
                (difference(a, b, f"{where}/{i}", seen) for i, (a, b) in enumerate(zip(one, two))),
            ),
            "",
        )
    if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):  # DeepSpeed's loss scaler
        return difference(vars(one), vars(two), where, seen)
    return "" if one == two else f"{where}: {one!r} against {two!r}"


def contents(folder: Path) -> dict:
    """What a run has left: its metrics, and of its checkpoint of step 4 everything but the configs and the tokenizer."""
    last = folder / "step_000004"
    pickles = {
        str(path.relative_to(last)): torch.load(path, map_location="cpu", weights_only=False)
        for path in sorted(last.rglob("*.pt"))
    }
    controllers = json.loads((last / "controller_state.json").read_text())
    return {
        "metrics": steps_in(folder),
        "controllers": controllers,
        "model": load_file(last / "model.safetensors"),
        **pickles,
    }


def first_difference(whole: Path, resumed: Path) -> str:
    """ "" if two runs of four steps ended the same to the bit. RuntimeError if there was too little to compare."""
    one, two, seen = contents(whole), contents(resumed), []
    found = difference(one, two, "", seen)
    metrics, state = one["metrics"], one["controllers"]
    if not found and not (
        [line["step"] for line in metrics] == [1, 2, 3, 4]
        and state["controllers"]["step"] == 4
        and state["replay"]["prompts"]
        and metrics[0]["tau"] != metrics[-1]["tau"]
        and metrics[0]["beta"] != metrics[-1]["beta"]
        and all(
            any(part in where for where in seen)
            for part in ("/model/", "exp_avg", "exp_avg_sq", "/rng_")
        )
    ):
        raise RuntimeError(
            f"{whole} has no moving controllers, no replay or no moments: {state}, {seen}"
        )
    return found


def compare(model: Path, folder: Path, engine: str, zero: int, ranks: int) -> str:
    """The first difference between a run left alone and one that is killed and resumed, side by side in `folder`; "" without one."""
    whole, killed = folder / "whole", folder / "killed"
    process = start(model, whole, *case_flags(engine, zero), ranks=ranks)
    try:
        killed_and_resumed(model, killed, engine, zero, ranks)
    finally:
        status = finish(process)
    if status:
        raise RuntimeError(
            f"the run left alone ended with status {status}\n{log_of(whole)[-3000:]}"
        )
    return first_difference(whole, killed)


def main(argv) -> int:
    sys.path.insert(0, str(ROOT))
    import sft

    cases = [(argv[i], int(argv[i + 1]), int(argv[i + 2])) for i in range(0, len(argv), 3)] or CASES
    differ = 0
    with tempfile.TemporaryDirectory() as there:
        model, tokenizer = Path(there) / "model", sft.tiny_tokenizer()
        sft.tiny_model(len(tokenizer), seed=0, layers=2).save_pretrained(model)
        tokenizer.save_pretrained(model)
        for case in cases:
            name, begin, folder = (
                "{} ZeRO {} ranks {}".format(*case),
                time.perf_counter(),
                Path(there) / "_".join(map(str, case)),
            )
            folder.mkdir()
            try:
                found = compare(model, folder, *case)
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                found = f"failed: {str(error).splitlines()[0]}"
            differ += bool(found)
            print(
                f"{name:<22}  {found or 'same':<8}{time.perf_counter() - begin:5.0f} s", flush=True
            )
    print(f"{differ} of {len(cases)} differ")
    return differ


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    sys.exit(main(sys.argv[1:]))
