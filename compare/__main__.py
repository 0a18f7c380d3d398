"""Compares objectives: trains and evaluates one config under several arms and seeds, tests the
differences and draws them.

    python -m compare config/countdown_tiny.py --arms=compare/arms.py --seeds=3
    python -m compare config/countdown_tiny.py --arms=compare/arms.py --jobs=2 --max_steps=100
    python -m compare config/countdown_tiny.py --arms=compare/arms.py --report_only=True
    python -m compare config/countdown_tiny.py --arms=compare/arms.py --max_steps=999 --patience=300

An arm is a line `name = {"key": value, ...}` of the arms file, with what the arm changes in the
config. The first arm is the baseline. The command's own flags: --arms, --seeds (runs of each arm,
seeds 1..n, default 3), --eval_seeds (default 3), --output (default runs/compare_<config>), --ranks
of a run (default 2; on GPUs one each), --jobs (runs at a time; on GPUs 1: all take the first),
--patience (end a run whose held-out mean@k has set no record for so many steps, see settled_at()
in results.py), --report_only (table and picture of what is finished). Every other --key=value goes
to all runs. The same command again continues where it was interrupted: finished runs are not
repeated, unfinished ones go on.

Writes results.md and comparison.png (results.py says what the figures mean), and each run's folder
<output>/<arm>/seed_<n>/, in which eval.jsonl has the scores of the last checkpoint on every
held-out problem under --eval_seeds evaluation seeds.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint
import rewards
from checks import INSTEAD, eval_source
from common import (
    CHOSEN_WAITING,
    ROOT,
    RunStopped,
    UserError,
    as_read_back,
    check_ranks,
    check_writable,
    default_config,
    end_now,
    listen,
    load_config,
    merge,
    own_flags,
    print_above_bar,
    progress,
    read_config_file,
    read_settings,
    refuse_missing_folder,
    script,
    with_tau,
)
from compare.results import LAST, SET_HERE, draw, evaluation_seeds, settled_at, write_results
from journal import hold_folder, write_whole

OWN = {
    "arms": "",  # the arms file, see above
    "seeds": 3,  # runs of each arm
    "eval_seeds": 3,  # in the final evaluation of every run
    "output": "",  # "": runs/compare_<config>
    "ranks": 2,  # of one run
    "jobs": 1,  # runs at a time
    "patience": 0,  # steps without a new record that end a run; 0: all have max_steps
    "report_only": False,
}
# with long_prompts="drop" these decide which rows are left
LENGTH_KEYS = ("max_prompt_length", "system_prompt", "chat_template", "chat_template_kwargs")
TAIL = 2**16  # bytes read from the end of metrics.jsonl, whose lines have about 2,000
DEFAULTS = default_config()


def read_own(argv) -> tuple[dict, list[str]]:
    """The command's own flags, and the arguments that every run gets."""
    own, shared = own_flags(argv, OWN)
    for key in ("seeds", "eval_seeds", "ranks", "jobs"):
        if own[key] < 1:
            raise UserError(f"--{key}={own[key]} must be at least 1")
    if own["patience"] < 0:
        raise UserError(f"--patience={own['patience']} must be steps, or 0 for off")
    if not own["arms"]:
        raise UserError(
            '--arms=FILE is missing: lines like `slow = {"learning_rate": 1e-5}`, the first one is '
            "the baseline"
        )
    # arguments that are no flags are config files; the output folder is named after them
    configs = [Path(argument).stem for argument in shared if not argument.startswith("-")]
    output = Path(own["output"] or "_".join(["runs/compare", *configs]))
    check_writable("--output", output, folder=True)
    return own | {"output": output}, shared


def plan_runs(own: dict, shared: list[str]) -> list[dict]:
    """All runs in the order of their seeds, so that every arm has one run before any has two.
    UserError, before any run starts, for what an arm's config shows to be wrong."""
    runs, evaluations = [], []
    for arm, overrides in read_config_file(own["arms"]).items():
        flags, config = read_arm(own["arms"], arm, overrides, shared)
        evaluations.append(evaluation_settings(config))
        # eval_steps: curves, and figures "at equal mean@k", need evaluations during training
        if config["eval_steps"] == 0:
            raise UserError(
                f"{own['arms']}: {arm}: eval_steps=0, and arms are compared by their evaluations: "
                f"set some, such as --eval_steps=25"
            )
        if evaluations[-1] != evaluations[0]:
            raise UserError(
                f"{own['arms']}: {arm}: all arms need the same held-out rows (eval_dataset, which "
                f"follows dataset), the same eval_*, max_completion_length and first of "
                f"reward_funcs"
            )
        rewards.check_names(config["reward_funcs"])
        check_ranks(config, own["ranks"])
        check_patience(own["patience"], config)
        for seed in range(1, own["seeds"] + 1):
            runs.append(plan_run(arm, seed, own, flags, config))
    if not runs:
        raise UserError(f"--arms={own['arms']} names no arm")
    return sorted(runs, key=lambda run: run["seed"])  # stable: arms stay in the file's order


def check_patience(patience: int, config: dict) -> None:
    """UserError if --patience can't end a run early, or would leave one without a model."""
    every = config["eval_steps"]
    soonest = (math.ceil(patience / every) + LAST - 1) * every
    if patience and soonest >= config["max_steps"]:
        raise UserError(
            f"--patience={patience} with eval_steps={every} ends no run before "
            f"step {soonest}, and max_steps is {config['max_steps']}"
        )
    if patience and config["checkpoint_mode"] == "shallow":
        raise UserError(
            "--patience needs checkpoint_mode='full': a shallow checkpoint before the last step "
            "has no model that could be evaluated"
        )


def read_arm(file: str, arm: str, overrides, shared: list[str]) -> tuple[list[str], dict]:
    """The flags and the resolved config of an arm's runs."""
    where = f"{file}: {arm}"
    if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
        raise UserError(
            f'{where} must be a dict of overrides such as {{"maxent_tau": 0.1}}, not {overrides!r}'
        )
    merge(DEFAULTS, overrides, where)  # checks types, which can't be seen in flags
    # the arm's flags come last, so they override those for all runs
    flags = [*shared, *flags_of(overrides)]
    for flag in flags:
        if flag.partition("=")[0].removeprefix("--") in SET_HERE:
            raise UserError(f"{flag}: compare itself sets {', '.join(SET_HERE)}")
    try:
        return flags, load_config(flags)
    except UserError as error:
        raise UserError(f"{error} (arm {arm})") from None


def flags_of(settings: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in settings.items()]


def evaluation_settings(config: dict) -> list:
    """The settings that must be equal for two arms to be comparable."""
    evaluation = [(key, value) for key, value in config.items() if key.startswith("eval_")]
    evaluation.append(config["max_completion_length"])  # an evaluation's too
    if config["long_prompts"] != "error":  # what is left out or cut depends on these keys
        evaluation += [(key, config[key]) for key in LENGTH_KEYS]
    # the first reward decides what is correct
    return [config["reward_funcs"][0], eval_source(config), config["long_prompts"], *evaluation]


def plan_run(arm: str, seed: int, own: dict, flags: list[str], config: dict) -> dict:
    folder = own["output"] / arm / f"seed_{seed}"
    # so that an interrupted run can be continued from its last evaluation
    save_steps = config["save_steps"] if config["save_steps"] > 0 else config["eval_steps"]
    settings = {"seed": seed, "output_dir": str(folder), "save_steps": save_steps}
    return {
        "arm": arm,
        "seed": seed,
        "folder": folder,
        "config": config | settings,
        "flags": [*flags, *flags_of(settings)],
        "eval_seeds": own["eval_seeds"],
        "patience": own["patience"],
    }


def with_known_tau(config: dict) -> dict:
    """The config as train.py writes it into config.json, with maxent_tau=-1 replaced."""
    if config["maxent_tau"] != -1:
        return config
    from transformers import AutoConfig  # imported here: takes seconds, and few arms need it

    try:
        model_config = AutoConfig.from_pretrained(config["model"], trust_remote_code=False)
        return with_tau(config, model_config.vocab_size)
    except (OSError, ValueError):  # the model is gone, which a report does not need
        return {key: value for key, value in config.items() if key != "maxent_tau"}


def state_of(run: dict) -> str:
    """ "new", "interrupted", "trained" or "done". UserError if the folder holds a run of another
    config."""
    folder = run["folder"]
    # a run that ended before it wrote its config has nothing to keep
    if not (folder / "config.json").exists():
        return "new"
    # DEFAULTS: keys that are newer than the run had their defaults
    saved = as_read_back(DEFAULTS | read_settings(folder / "config.json"))
    for key, value in as_read_back(with_known_tau(run["config"])).items():
        if key == "max_tokens_per_micro_batch" and value == 0:
            continue  # the run has chosen a number and saved that
        # not SET_HERE: a run stays the same if its folder is moved
        if key not in SET_HERE and saved[key] != value:
            raise UserError(
                f"{folder} holds a run with {key}={saved[key]!r} instead of {value!r}: delete it, "
                f"or choose another --output"
            )
    # evaluate.py renames this file into place when it is whole
    if (folder / "eval.jsonl").exists():
        return "done"
    latest = checkpoint.latest(folder)
    if latest is None:  # the run ended before its first checkpoint
        return "new"
    return "trained" if checkpoint.number_of(latest) >= last_step(run) else "interrupted"


def last_step(run: dict) -> int:
    """The step at which a run's training is over."""
    return settled_at(run) or run["config"]["max_steps"]


def check_evaluation(run: dict) -> None:
    """UserError if a finished run was evaluated under another number of seeds than is asked for,
    or if its training ended before last_step(), as with another --patience."""
    # not latest(), which reads a whole checkpoint; there is none if somebody has tidied up
    saved = checkpoint.checkpoints_in(run["folder"])
    if saved and checkpoint.number_of(saved[-1]) < last_step(run):
        raise UserError(
            f"{run['folder']} ended at step {checkpoint.number_of(saved[-1])}, before step "
            f"{last_step(run)}: give the --patience that it was made with, or delete its "
            f"eval.jsonl to go on with it"
        )
    seeds = evaluation_seeds(run["folder"])
    if seeds != run["eval_seeds"]:
        other = f", or give --eval_seeds={seeds}" if seeds else ""
        raise UserError(
            f"{run['folder'] / 'eval.jsonl'} has {seeds} evaluation seed(s) instead of "
            f"--eval_seeds={run['eval_seeds']}: delete it to evaluate again{other}"
        )


def take_own_evaluation(run: dict) -> bool:
    """Whether train.py has already evaluated a finished run's last checkpoint as is asked for
    here, under one seed. If so, that becomes the run's eval.jsonl, because evaluate.py would sample
    the same answers."""
    last = checkpoint.checkpoints_in(run["folder"])[-1].name
    evaluation = run["folder"] / "evaluations" / f"{last}.jsonl"
    if run["eval_seeds"] > 1 or not evaluation.exists():
        return False
    write_whole(run["folder"] / "eval.jsonl", evaluation.read_text())
    return True


def command_of(run: dict, ranks: int) -> list[str]:
    """The next command of a run, train.py or evaluate.py, under torchrun."""
    state = state_of(run)
    # --standalone: each run uses a port of its own, so several fit on one machine
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc_per_node", str(ranks)]
    if state == "trained":
        output = run["folder"] / "eval.jsonl"
        evaluation = [
            f"--model={checkpoint.latest(run['folder'])}",
            f"--seeds={run['eval_seeds']}",
            f"--output={output}",
        ]
        # without those that evaluate.py would warn about
        foreign = tuple(f"--{key}=" for key in INSTEAD["evaluate"])
        flags = [word for word in run["flags"] if not word.startswith(foreign)]
        return [*launch, str(ROOT / "evaluate.py"), *flags, *evaluation]
    # the folder of a new run may hold remains, see state_of()
    how = "--overwrite_output_dir=True" if state == "new" else "--resume_from_checkpoint=latest"
    return [*launch, str(ROOT / "train.py"), *run["flags"], how]


def start(run: dict, ranks: int, locked) -> subprocess.Popen:
    """Starts a run's next command; its output is appended to the run's log."""
    run["folder"].parent.mkdir(parents=True, exist_ok=True)
    kept = dict(os.environ)
    kept.pop(CHOSEN_WAITING, None)  # runs choose it for themselves
    # beside the run's folder, not in it: overwriting the folder would delete the log
    with open(run["folder"].with_suffix(".log"), "a") as log:
        return subprocess.Popen(
            command_of(run, ranks),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only us, and we end the runs
            pass_fds=[locked.fileno()],  # see carry_out()
            env={"OMP_NUM_THREADS": "1", **kept},  # ranks share the cores
        )


def steps_done(run: dict) -> int:
    """The last training step in the run's metrics.jsonl, for the progress bar."""
    try:
        with open(run["folder"] / "metrics.jsonl", "rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - TAIL)
            file.seek(begin)
            lines = file.read().split(b"\n")
    except FileNotFoundError:  # the run is still starting
        return 0
    # the last line may lack its end; the first its beginning, unless it is the file's first
    for line in reversed(lines[1:-1] if begin else lines[:-1]):
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # damaged: train.py leaves it out with a warning
    return 0


def end_if_settled(run: dict, before: int, now: int) -> None:
    """Asks a run in training to end if it has settled. before, now: its last steps at the last look
    and at this one."""
    every = run["config"]["eval_steps"]
    # step N's evaluation is written after its line, so it is there once step N + 1 has a line
    evaluated = (now - 1) // every > (before - 1) // every
    if run["patience"] and evaluated and settled_at(run) is not None:
        (run["folder"] / "stop").touch()


def unfinished(runs: list[dict]) -> list[dict]:
    """The runs that are not done. UserError, before anything starts, for a folder that holds a run
    of another config, or that was evaluated otherwise."""
    waiting = []
    for run in runs:
        if state_of(run) == "done":
            check_evaluation(run)
        else:
            waiting.append(run)
    return waiting


def carry_out(runs: list[dict], own: dict, locked) -> None:
    """Trains and evaluates the unfinished runs, own["jobs"] at a time. If one fails its name is
    printed and the others go on. Leaves no process behind. locked: the locked file of the output
    folder, which every run inherits: if we are killed, the folder stays locked until they end."""
    live, stop = [], []
    waiting = unfinished(runs)
    print(
        f"{len(runs)} runs, {len(waiting)} of them to do, {own['jobs']} at a time, {own['ranks']} "
        f"rank(s) each, into {own['output']}",
        flush=True,
    )
    total = sum(run["config"]["max_steps"] for run in waiting)
    bar = progress(total=total, unit="step", disable=not waiting)
    steps = {run["folder"]: steps_done(run) for run in waiting}
    # the handler only takes a note: if it raised, a run just started might be forgotten
    listen(lambda number, frame: stop.append(signal.Signals(number).name))
    try:
        while (waiting or live) and not stop:
            if waiting and len(live) < own["jobs"]:
                run = waiting.pop(0)
                live.append((run, start(run, own["ranks"], locked)))
            time.sleep(0.1)
            for run, process in list(live):
                now = steps_done(run)
                end_if_settled(run, steps[run["folder"]], now)
                steps[run["folder"]] = now
                if process.poll() is None:
                    continue
                live.remove((run, process))
                # state_of(): a run may end with status 0 but without its last checkpoint
                if process.returncode == 0 and state_of(run) == "trained":
                    if not take_own_evaluation(run):
                        waiting.insert(0, run)  # to be evaluated at once
                    # a settled run has taken fewer steps than were announced
                    bar.total -= run["config"]["max_steps"] - now
                elif process.returncode:
                    log = run["folder"].with_suffix(".log")
                    print_above_bar(f"failed: {run['folder']}, see {log}", file=sys.stderr)
            bar.set_postfix_str(f"{len(waiting) + len(live)} runs to do", refresh=False)
            bar.update(sum(steps.values()) - bar.n)
    finally:
        for _, process in live:
            process.terminate()  # torchrun ends its ranks; tell all before waiting for any
        for _, process in live:
            process.wait()
    bar.close()
    listen(end_now)  # what follows, table and picture, can be repeated
    if stop:
        raise RunStopped(
            f"stopped by {stop[0]}: the same command goes on from the last checkpoints"
        )


def main(argv) -> None:
    own, shared = read_own(argv)
    runs = plan_runs(own, shared)
    output = own["output"]
    if not own["report_only"]:
        for run in runs:  # before any run starts, because the tenth would fail after hours
            refuse_missing_folder(run["config"]["model"])
        look = "look at what is finished with --report_only=True"
        with hold_folder(output, key="output", cure=look) as locked:
            carry_out(runs, own, locked)

    # from the plan, because the baseline's first run may be unfinished
    baseline = runs[0]["arm"]
    done = [run for run in runs if state_of(run) == "done"]
    missing = [run for run in runs if run not in done]
    # a default is a number in the picture's doses
    done = [run | {"config": with_known_tau(run["config"])} for run in done]
    if not any(run["arm"] == baseline for run in done):
        raise RunStopped(
            f"{len(done)} of {len(runs)} runs are finished, none of them of the baseline "
            f"{baseline}: nothing to compare yet"
        )
    print(write_results(done, baseline, output, missing), flush=True)
    print(f"results: {output / 'results.md'}\npicture: {draw(done, output)}", flush=True)
    if missing and not own["report_only"]:
        first = missing[0]["folder"]
        raise RunStopped(
            f"{len(missing)} of {len(runs)} runs are not finished, as they failed or a file `stop` "
            f"ended them; the first: {first}, see {first.with_suffix('.log')}"
        )


if __name__ == "__main__":
    script(main)
