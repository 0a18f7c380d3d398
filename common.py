"""Configuration, and how a script ends and shows progress: what every script here shares.

config = load_config(sys.argv[1:])     # config/default.py <- file(s) <- --key=value
"""

import ast
import difflib
import errno
import io
import json
import logging
import math
import os
import re
import signal
import stat
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import cache
from pathlib import Path

import checks

ROOT = Path(__file__).resolve().parent
# of a collective, in which ranks wait for each other: longer than anything that one may do alone
# (rollout servers that start, rewards that hang, the hash of a large checkpoint, the last upload:
# an hour). A rank that dies is noticed at once, by its connections, torchrun or ranks.Heartbeat
DEADLINE = timedelta(hours=3)
# a config named by mistake, /dev/zero say, is not read to its end
LONGEST_CONFIG = 1_000_000  # characters of a config file, or of one value
NAME = re.compile(r"[A-Za-z_][\w.]*(:\w+)?")  # in the list of a flag: math, tasks.reverse:reward
DEEPEST = 10  # lists and dicts within each other
NESTED = f"is nested deeper than the {DEEPEST} levels that a setting may have"
LONGEST_NAME = 240  # bytes of a file's name: file systems take 255, and names get endings
LONGEST_PATH = 3800  # bytes: Linux takes 4095, and folders get contents
# Keys of older versions and of the research code: the key, or the entry of one, that has taken
# their place; or, where the value can't be taken over as it is, what to write instead.
REPLACED = {
    "init_kl_coeff": "beta",
    "dataset_name": "dataset.name",
    "dataset_config": "dataset.config",
    "dataset_split": "dataset.split",
    "dataset_prompt_column": "dataset.prompt",
    "dataset_answer_column": "dataset.answer",
    "dataset_more_columns": "dataset.more",
    "easy_dataset_name": "easy_dataset.name",
    "easy_dataset_config": "easy_dataset.config",
    "eval_dataset_name": "eval_dataset.name",
    "eval_dataset_config": "eval_dataset.config",
    "eval_dataset_split": "eval_dataset.split",
    "eval_prompt_column": "eval_dataset.prompt",
    "eval_answer_column": "eval_dataset.answer",
    "replay_size": "replay.size",
    "replay_fraction": "replay.fraction",
    "replay_ucb": "replay.ucb",
    "vllm_gpu_memory_utilization": "vllm_options.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "vllm_options.tensor_parallel_size",
    "vllm_enable_sleep_mode": "vllm_options.enable_sleep_mode",
    "weight_sync_dir": "weight_sync",
    "weight_decay": "optimizer_options.weight_decay",
    "wandb_project": "wandb_options.project",
    "wandb_name": "wandb_options.name",
    "wandb_mode": "wandb_options.mode",
    # with a space in it: a sentence for the person, as the value can't be taken over
    "dataset_mixture": "dataset takes a list of sources: "
    '[{"name": "countdown", "weight": 2.0}, ...]',
    "easy_schedule": "easy_dataset has a share, a line through points: "
    "--easy_dataset.share={0: 0.5, 100: 0}",
    "temperature_schedule": "temperature can be a line through points: "
    "--temperature={0: 1.2, 100: 1.0}",
    "maxent_target_final": "the target can be a line through points: "
    "--maxent_target_weight_entropy={0: 1.5, 100: 1.0}",
    "maxent_target_horizon": "the target can be a line through points: "
    "--maxent_target_weight_entropy={0: 1.5, 100: 1.0}",
    "controller_meta_enabled": "name a method, such as --controller_meta_method=analytic, or none",
    "info_seed_enabled": "set the number of seeds, such as --info_seed_num_seeds=4, or 0",
    "vllm_kv_cache_gib": "--vllm_options.kv_cache_memory_bytes=N, in bytes",
    "vllm_enforce_eager": "--vllm_options.enforce_eager=False compiles the model, True does not",
    "adam_beta1": '--optimizer_options={"betas": [0.9, 0.999]} has both',
    "adam_beta2": '--optimizer_options={"betas": [0.9, 0.999]} has both',
    "dry_run": "it is a flag of train.py alone: --dry_run",
    "eval_seeds": "it is a flag of evaluate.py alone: --seeds=3",
    "eval_output": "it is a flag of evaluate.py alone: --output=eval.jsonl",
    "generate_output": "it is a flag of generate.py alone: --output=out.jsonl",
    "generate_max_prompts": "it is a flag of generate.py alone: --max_prompts=100",
    "sft_steps": "it is a flag of sft.py alone: --steps=1000",
    "sft_batch_size": "it is a flag of sft.py alone: --batch_size=64",
    "sft_learning_rate": "it is a flag of sft.py alone: --learning_rate=1e-5",
    "trust_checkpoint": "it is a flag of slurm/evaluate.sh alone",
    "max_skipped_steps": "it is fixed: train.MAX_SKIPPED_STEPS",
    "logprob_chunk_size": "it is fixed: policy.CHUNK",
    "rollout_concurrency": "it is fixed: CONCURRENCY in server/engine.py",
    "client_tag": "set the environment variable VLLM_CLIENT_TAG",
    "hub_private_repo": "a repository that push_to_hub makes is always private",
}


class UserError(ValueError):
    """Something the user can put right. Scripts print it as one sentence and exit with status 2."""


class RunStopped(RuntimeError):
    """A run that must not go on, for a reason that is not a bug of the program: one sentence, exit
    status 1."""


class RewardsFailed(RunStopped):
    """More rewards of a step failed than the config puts up with. All ranks raise it together."""


class RolloutsLost(RunStopped):
    """No rollout server is left, or a prompt can't get its completions. All ranks raise it
    together."""


def quoted(value, limit: int = 200) -> str:
    """A value, or the words of a stranger (a server, a reward, a dataset, a model), for a sentence
    of ours: as Python writes it, so that no text can steer a terminal or look like a line of ours,
    and cut."""
    if isinstance(value, (str, Exception)):
        text = str(value)
        return repr(text[:limit]) + ("..." if len(text) > limit else "")
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def memory_text(size: float) -> str:
    """Bytes as a person reads them: 1.50 GiB, or 12.3 MiB where it is less than one GiB."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB"


def in_one_line(text, limit: int = 0) -> str:
    """What a library says, or a sentence of ours into which a stranger's words may have slipped, as
    one harmless line; cut at `limit` characters, 0 whole."""
    words = " ".join(str(text).splitlines())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
    return line[: limit - 3] + "..." if 0 < limit < len(line) else line


def leave(sentence: str, status: int) -> None:
    """The end of a process after an error. Not sys.exit: other ranks may be in a collective, and
    the atexit handlers of the libraries would wait for them."""
    sys.stdout.flush()  # os._exit would lose what is buffered
    print(f"error: {in_one_line(sentence)}", file=sys.stderr, flush=True)
    os._exit(status)


def lost_a_rank(error: Exception) -> bool:
    """Whether it is what torch.distributed raises on a rank when another one is gone."""
    words = ("gloo", "NCCL", "Connection closed by peer")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def out_of_memory(error: Exception) -> bool:
    """Whether it is what torch or vLLM raises where a GPU's memory or the machine's runs out."""
    words = ("out of memory", "can't allocate memory")  # CUDA's and vLLM's own, the CPU allocator's
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def quiet_libraries() -> None:
    """Keeps what is no error out of the terminal: before they are imported, for they speak then."""
    # its C++, and vLLM's with it: a warning per rank about memory that is bound to the cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # a filter, for DeepSpeed sets the level itself: that it has found no GPU, ranks.py knows
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def script(work, *arguments):
    """Runs a script: work(*arguments), or work(command line) if there are none, and returns what
    that returns. Errors that are meant for a person end it with one sentence, no traceback."""
    quiet_libraries()
    # first of all: libraries swallow KeyboardInterrupt while they load
    listen(end_now)  # until a run is ready to save what it has
    end_with_torchrun()
    # before the config is read: help must work where the rest of the line is wrong
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(sys.modules["__main__"].__doc__)
        print("config/default.py lists every key with its meaning; --key=value sets one.")
        sys.exit()
    try:
        if arguments:
            return work(*arguments)
        tell_repeats(sys.argv[1:])
        return work(sys.argv[1:])
    except (UserError, RunStopped) as error:
        leave(str(error), 2 if isinstance(error, UserError) else 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            # neither a full disk nor a quota: nobody knows the cure, so the traceback stays
            raise
        leave(f"{error.filename or 'a file of the run'} could not be written: {error.strerror}", 1)
    except RuntimeError as error:
        if not lost_a_rank(error):
            raise
        leave(
            "another rank has died or left (its own words are above or below): "
            f"{str(error).splitlines()[0]}",
            1,
        )


# --- config


def read_config_file(path) -> dict:
    """The `key = value` lines of a config file as a dict; literals only, so reading a stranger's
    file runs nothing."""
    try:
        # utf-8-sig: some editors begin a file with a byte order mark
        with open(path, encoding="utf-8-sig") as file:
            # one more than allowed, by which parse() sees that it is too long
            text = file.read(LONGEST_CONFIG + 1)
        tree = parse(ast.parse, text, f"config file {path}")
    except OSError as error:
        raise UserError(f"config file {path} can't be read: {error.strerror}") from None
    except UserError:  # is a ValueError, which the next lines would wrap once more
        raise
    except (SyntaxError, ValueError) as error:  # ValueError: bytes that are not UTF-8, null bytes
        raise UserError(
            f"{path}:{getattr(error, 'lineno', 0)}: not a config file of `key = value` lines: "
            f"{getattr(error, 'msg', error)}"
        ) from None
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if not (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            raise UserError(
                f"{path}:{node.lineno}: expected `key = value`, found {source_of(node, text)}"
            )
        key = node.targets[0].id
        try:
            # literal_eval: takes no name and no call, so nothing runs
            value = parse(ast.literal_eval, node.value, f"{path}:{node.lineno}: {key}")
        except UserError:
            raise
        except (ValueError, TypeError):
            raise UserError(
                f"{path}:{node.lineno}: {key} must be a plain literal, not "
                f"{source_of(node.value, text)}"
            ) from None
        # Python would take the last one in silence, and the first would mislead who reads the file
        if key in values:
            raise UserError(f"{path}:{node.lineno}: {key} is set twice")
        values[key] = value
    return values


def parse(parser, source, where: str):
    """parser(source), of ast; a UserError where the source, text or a node, is too much for it."""
    if isinstance(source, str) and len(source) > LONGEST_CONFIG:
        raise UserError(f"{where} is longer than {LONGEST_CONFIG} characters")
    try:
        return parser(source)
    except (RecursionError, MemoryError):  # both mean the depth of it
        raise UserError(f"{where} {NESTED}") from None


def source_of(node, text: str) -> str:
    """The beginning of a node's own text. Not ast.unparse, which fails on what is nested deeply."""
    return quoted(ast.get_source_segment(text, node) or "", 60)


def check_literal(value, where: str, depth: int = 0) -> None:
    """UserError for what no setting needs, and what some library behind it can't take."""
    if depth > DEEPEST:
        raise UserError(f"{where} {NESTED}")
    if isinstance(value, dict):
        value = [*value, *value.values()]  # keys too come from a stranger
    if isinstance(value, (list, tuple)):
        for item in value:
            # ends at DEEPEST, far below Python's own limit of recursion
            check_literal(item, where, depth + 1)
    elif isinstance(value, int):
        # bool is an int and passes
        if value.bit_length() > 100:  # Python itself refuses to print thousands of digits
            raise UserError(f"{where} is or holds a whole number of more than 30 digits")
    elif isinstance(value, str):
        check_characters(value, where)
    elif not isinstance(value, (float, type(None))):
        raise UserError(f"{where} must be text, numbers, lists and dicts, not {quoted(value)}")


def check_characters(text: str, where: str) -> None:
    """UserError for a null byte, which ends a text in C, and for half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = quoted(text[error.start])
        raise UserError(f"{where}: {quoted(text)} holds {bad}, which is not a character") from None
    if "\0" in text:
        raise UserError(f"{where}: {quoted(text)} holds a null byte")


def merge(config: dict, values: dict, source: str) -> dict:
    """A copy of `config` with `values` on top; {"dataset.name": ...} sets one entry of a dict.

    A key it does not know, one that is gone, or a value of another type is a UserError that names
    `source`; an older name is said and taken."""
    merged = dict(config)
    for name, value in values.items():
        path = current_name(name, source)
        if path != name:
            say_once(f"{source}: {name} is now {path}", file=sys.stderr)
            if path in values:
                raise UserError(f"{source}: {path} is set twice, once by its older name {name}")
        key, _, entry = path.partition(".")
        if key not in config:
            raise UserError(f"{source}: unknown key {name!r}{nearest(key, config)}")
        where = f"{source}: {name}"
        if entry:
            if type(merged[key]) is not dict:
                raise UserError(f"{where}: {key}={quoted(merged[key])} has no entries by name")
            value = {**merged[key], entry: value}
        # the type is that of `config`, whose values have been coerced to those of default.py
        merged[key] = coerce_key(key, value, config[key], where)
    return merged


def current_name(name: str, source: str) -> str:
    """The key, or key.entry, that a name means today; a UserError for a key that is gone."""
    replacement = REPLACED.get(name, name)
    if " " in replacement:  # a sentence, not a key
        raise UserError(f"{source}: {name} is no key any more: {replacement}")
    return replacement


def nearest(name: str, known) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; config/default.py lists all keys"


def coerce_key(key: str, value, default, where: str):
    """`value` in the type of the key: that of its default, or {step: value}, or for "dataset" a
    list of sources."""
    if key in checks.STEPS and type(value) is dict:  # only these may change during a run
        return coerce_points(value, default, where)
    if key == "dataset" and type(value) is list:
        return [
            coerce_entries(key, coerce(source, {}, f"{where}, source {i}"), f"{where}, source {i}")
            for i, source in enumerate(value)
        ]
    if key.endswith(".config") and type(value) is dict:  # of a task: its settings, as a text
        check_literal(value, where)
        value = repr(value)
    value = coerce(value, default, where)
    return coerce_entries(key, value, where) if key in checks.ENTRIES else value


def coerce_entries(key: str, value: dict, where: str) -> dict:
    """The entries of a key that is a dict: known ones in the type of their default."""
    known = checks.ENTRIES[key]
    coerced = dict(value)
    for entry, content in value.items():
        if entry in known:
            coerced[entry] = coerce_key(
                f"{key}.{entry}", content, known[entry], f"{where}: {entry}"
            )
        elif type(entry) is not str or key not in checks.OPEN:  # OPEN ones go to a library
            raise UserError(
                f"{where}: unknown entry {quoted(entry)}; those of {key} are {', '.join(known)}"
            )
    return coerced


def coerce_points(value: dict, default, where: str) -> dict:
    """{step: value} in the type of the key; JSON, such as a run's config.json, has turned steps
    into text."""
    check_literal(value, where)
    points = {}
    for step, number in value.items():
        if isinstance(step, str) and step.isdecimal() and len(step) < 30:  # as in check_literal
            step = int(step)
        if type(step) is not int or step < 0:  # type(): True is an int for isinstance
            raise UserError(f"{where}={quoted(value)} must be {{step: value}}, steps from 0 on")
        points[step] = coerce(number, default, f"{where}, step {step}")
    if not points:
        raise UserError(
            f"{where}={{}} holds no point: {{step: value}}, such as {{0: 1.2, 100: 1.0}}"
        )
    return points


def coerce(value, default, where: str):
    """`value` in the type of `default`: ints may stand for floats, "inf" is a float, True is not a
    number."""
    kind = type(default)
    check_literal(value, where)
    # Python has no literal of it: files and flags hold a text
    if kind is float and isinstance(value, str) and value in ("inf", "Infinity"):
        return math.inf
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # not isinstance: bool is a subclass of int
        raise UserError(
            f"{where} must be of type {kind.__name__} like {default!r}, "
            f"not {type(value).__name__} {quoted(value)}"
        )
    # an empty default says nothing about what its list holds
    if kind is list and default:  # a list holds what its default holds
        where = f"{where}={quoted(value)}, entry"
        return [coerce(item, default[0], f"{where} {i}") for i, item in enumerate(value)]
    if kind is float and math.isnan(value):
        raise UserError(f"{where} is not a number")
    return value


def modern(settings: dict) -> dict:
    """The settings of a run of an older version, from its config.json, with today's keys: without
    those that are gone, and without entries that only say their default."""
    translated = {}
    for name, value in settings.items():
        path = REPLACED.get(name, name)
        key, _, entry = path.partition(".")
        if path == name:
            translated.setdefault(key, value)
        elif " " in path:
            continue
        elif entry:
            if value != checks.ENTRIES[key].get(entry, ""):
                translated[key] = {**translated.get(key, {}), entry: value}
        elif value != "":  # "" was off, which the new key says by its default
            translated[key] = value
    # switches that are gone: off is now a value of another key
    if settings.get("info_seed_enabled") is False:
        translated["info_seed_num_seeds"] = 0
    if settings.get("controller_meta_enabled") is False:
        translated["controller_meta_method"] = ""
    if settings.get("dataset_mixture"):
        translated["dataset"] = [modern_source(source) for source in settings["dataset_mixture"]]
    return translated | modern_schedules(settings, translated.get("easy_dataset", {}))


def modern_source(source: dict) -> dict:
    """A source of an older mixture: {"id", "columns": {"prompt", ...}, ...}."""
    rest = {key: value for key, value in source.items() if key not in ("id", "columns")}
    # "id" was its name; what it called a column is now an entry of its own
    return {"name": source["id"], **source.get("columns", {}), **rest}


def modern_schedules(settings: dict, easy: dict) -> dict:
    """What changed over time in a run of an older version, as lines through points."""
    changing = {}
    if settings.get("easy_schedule"):
        changing["easy_dataset"] = {**easy, "share": stairs(settings["easy_schedule"], 0.0)}
    if settings.get("temperature_schedule"):
        start = settings["temperature"]
        changing["temperature"] = stairs(settings["temperature_schedule"], start)
    if settings.get("maxent_target_final", -1) >= 0:  # -1 was off
        for key in ("maxent_target_weight_entropy", "maxent_target_excess_entropy"):
            if settings.get(key, -1) >= 0:
                last = settings["maxent_target_horizon"]
                changing[key] = {0: settings[key], last: settings["maxent_target_final"]}
    return changing


def stairs(schedule: dict, value: float) -> dict:
    """{first step: value}, each until the next one, `value` before, as a line through points."""
    points = {0: value}  # a stair is two points, one step apart
    for first, following in sorted((int(first), value) for first, value in schedule.items()):
        if first > 0:
            points[first - 1] = value  # holds up to here: between points the line is straight
        points[first] = value = following
    return points


def read_flag(argument: str, defaults: dict) -> dict:
    """{key: value} of one --key=value; strings need no quotes, also in lists, true and false no
    capital. A flag without a value is True."""
    name, equals, text = argument[2:].partition("=")
    if not equals:
        return {name: True}
    key, _, entry = REPLACED.get(name, name).partition(".")
    default = defaults.get(key)
    if entry:
        default = checks.ENTRIES.get(key, {}).get(entry)
    if isinstance(default, str):  # never parsed: a name such as 1e5 or None stays text
        return {name: text}
    # None: an unknown key, of which merge() will say so
    if (default is None or isinstance(default, bool)) and text.lower() in ("true", "false"):
        return {name: text.lower() == "true"}
    try:
        value = parse(ast.literal_eval, text, f"command line: {name}")
        if isinstance(default, list) and isinstance(value, tuple):  # --reward_weights=1,0.1
            value = list(value)
        return {name: value}
    except UserError:
        raise
    except (ValueError, SyntaxError, TypeError):
        if isinstance(default, list):  # --reward_funcs=a,b, and what a shell makes of ['a']
            words = text.removeprefix("[").removesuffix("]").split(",")
            words = [word.strip() for word in words]
            if all(map(NAME.fullmatch, words)):
                return {name: words}
        return {name: text}  # merge() says which type was expected


def refuse_two_words(argv, switches: tuple = ()) -> None:
    """UserError for `--port 8000`, and for anything else that begins with - and is no --key=value.
    switches: names that may stand without a value."""
    for i, word in enumerate(argv):
        if not word.startswith("-") or (word.startswith("--") and "=" in word):
            continue
        if word.removeprefix("--") in switches:
            continue
        value = argv[i + 1] if i + 1 < len(argv) and argv[i + 1][:1] != "-" else "..."
        name = word.lstrip("-").partition("=")[0] or "key"
        raise UserError(f"{word}: write --key=value, in one word: --{name}={value}")


def tell_repeats(argv) -> None:
    """Says which flags are overridden by a later one of the same key. It is no error: scripts
    rely on adding flags behind the user's."""
    last = {}
    for word in argv:
        key, equals, _ = word.partition("=")
        if key in last and equals:
            say_once(f"{last[key]} is not used: {word} comes after it", file=sys.stderr)
        last[key] = word


def own_flags(argv, defaults: dict) -> tuple[dict, list[str]]:
    """Splits a command line: (the command's own flags, as a dict like `defaults`; the rest, files
    and flags of the config)."""
    switches = tuple(key for key, default in defaults.items() if isinstance(default, bool))
    refuse_two_words(argv, switches)
    own, rest = dict(defaults), []
    for word in argv:
        if word.startswith("--") and word[2:].partition("=")[0] in defaults:
            own |= coerce_flag(word, defaults)
        else:
            rest.append(word)
    return own, rest


def only_source(words: list[str], takes: str) -> Path:
    """The file or folder that is all that own_flags() has left; a UserError, which begins with what
    the command takes, if there is none or more."""
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"{takes}, not {' '.join(words) or 'nothing'}")
    return Path(words[0])


def coerce_flag(word: str, defaults: dict) -> dict:
    ((key, value),) = read_flag(word, defaults).items()
    return {key: coerce(value, defaults[key], f"command line: {key}")}


def load_with_flags(argv, defaults: dict) -> tuple[dict, dict]:
    """(the flags of a command of its own, the config) of a command line."""
    own, rest = own_flags(argv, defaults)
    return own, load_config(rest)


def default_config() -> dict:
    """config/default.py by its own place: a command may be started from any folder."""
    return read_config_file(ROOT / "config" / "default.py")


def load_config(argv) -> dict:
    """The resolved and checked config: config/default.py, then the files of `argv`, then its
    --key=value, whatever their order."""
    refuse_two_words(argv)  # before the files are read: in "--seed 3" the 3 is none
    defaults = default_config()
    config = dict(defaults)
    flags = [read_flag(a, defaults) for a in argv if a.startswith("-")]
    for path in [a for a in argv if not a.startswith("-")]:
        if str(path).endswith(".json"):
            values = read_settings(Path(path))
        else:
            values = read_config_file(path)
        config = merge(config, values, path)
    # after all files, wherever they stood on the line
    for flag in flags:
        config = merge(config, flag, "command line")
    check_config(config)
    return config


def check_config(c: dict) -> None:
    """UserError with the first claim of checks.py that does not hold."""
    for holds, sentence in checks.claims(c):
        if not holds:
            raise UserError(sentence)


def with_tau(c: dict, vocabulary: int) -> dict:
    """The config with a figure for maxent_tau=-1, which takes the model's vocabulary."""
    if c["maxent_tau"] != -1:
        return c
    return {**c, "maxent_tau": checks.default_tau(c, vocabulary)}


def check_lengths(path: Path, where: str) -> None:
    """UserError for a path or a name in it that no file system takes."""
    longest = max(len(os.fsencode(name)) for name in path.parts)  # in bytes: one letter may take 4
    if longest > LONGEST_NAME:
        raise UserError(f"{where}: a name of {longest} bytes is in it, {LONGEST_NAME} are the most")
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise UserError(f"{where}: a path may have {LONGEST_PATH} bytes at most")


def check_writable(key: str, path, folder: bool) -> None:
    """UserError if `path` can't be written, as a folder or as a file: said before anything is
    loaded, not when there is something to write."""
    where = f"{key}={quoted(str(path))} can't be written"
    check_characters(str(path), where)
    if str(path).startswith("~"):
        raise UserError(f"{where}: {checks.TILDE}")
    absolute = Path(path).absolute()
    check_lengths(absolute, where)
    there = absolute
    # lexists: a link that leads nowhere is there too, and mkdir would fail on it
    while not os.path.lexists(there):
        there = there.parent
    is_folder = folder or there != absolute  # what has to be a folder for this
    if not os.path.exists(there):
        raise UserError(f"{where}: {str(there)!r} is a link that leads nowhere")
    if is_folder and not os.path.isdir(there):
        raise UserError(f"{where}: {str(there)!r} is a file, not a folder")
    if not is_folder and not os.path.isfile(there):
        raise UserError(f"{where}: {str(there)!r} is a folder or a device, not a file")
    if not is_folder and not os.access(there, os.W_OK):  # a file that is overwritten
        raise UserError(f"{where}: it is there and protected against writing")
    place = there if is_folder else there.parent
    try:  # nothing else tells for root, on read-only disks and in /proc
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UserError(
            f"{where}: nothing can be made in {str(place)!r}: {error.strerror}"
        ) from None


def as_read_back(settings: dict) -> dict:
    """The settings as a .json file gives them back, to be compared with such: tuples are lists, and
    the steps of a schedule are texts."""
    return json.loads(json.dumps(settings))


def read_settings(path: Path) -> dict:
    """The settings that one of these scripts has left in a .json file; a UserError if it is
    somebody else's."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{str(path)!r} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # no JSON, or nested deeper than Python goes
        found = None
    if not isinstance(found, dict) or "reward_funcs" not in found:  # a key of every version
        raise UserError(
            f"{str(path)!r} does not hold settings of this program, it is somebody else's: "
            f"choose another place, or move it away"
        )
    return modern(found)


def say_once(text: str, file=None) -> None:
    """Prints on rank 0, also before the ranks know of each other."""
    if os.environ.get("RANK", "0") == "0":  # torchrun's; without it there is one process
        print(text, file=file, flush=True)


def refuse_missing_folder(model: str) -> None:
    """A path is no hub id: where it leads nowhere the hub need not be asked."""
    if not model.startswith(("/", "./", "../", "runs/")) or os.path.isdir(model):
        return
    hint = ""
    if model.startswith("runs/"):
        hint = "; it comes from sft.py or train.py, the first lines of a shipped config say how"
    folder, name = os.path.split(model.rstrip("/"))
    if os.path.isdir(folder) and os.access(folder, os.R_OK):
        near = difflib.get_close_matches(name, os.listdir(folder), n=1)
        hint = f"; did you mean {os.path.join(folder, near[0])!r}?" if near else hint
    raise UserError(f"model={model!r} is not a folder{hint}")


def progress(**settings):
    """A progress bar; into a file, where nobody sees it move, a line every half a minute."""
    from tqdm import tqdm  # most of what this file would take to import, before Ctrl-C is heard

    line = "{desc}{percentage:3.0f}% {n_fmt}/{total_fmt} "
    line += "[{elapsed}<{remaining}, {rate_fmt}{postfix}]\n"
    # seconds from one line to the next
    calm = {} if sys.stderr.isatty() else {"mininterval": 30, "maxinterval": 60, "bar_format": line}
    return tqdm(dynamic_ncols=True, **calm, **settings)


def scheduled(value, step: int) -> float:
    """The value of a setting at `step`. A number stays as it is; {step: value} is a line through
    these points, flat before the first and after the last."""
    if not isinstance(value, dict):
        return value
    before = max((s for s in value if s <= step), default=min(value))
    after = min((s for s in value if s >= step), default=max(value))
    if before >= after:  # on a point, or outside
        return value[before]
    done = (step - before) / (after - before)
    return (1 - done) * value[before] + done * value[after]


# --- memory


def rank_memory() -> int:
    """Bytes of main memory that one rank may use: its share of this machine's, or of what the
    container or Slurm job that it runs in may take. Of all there is, not of what is free now: the
    same command gives the same answer."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = min([machine, *memory_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])
    return limit // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def memory_limits(membership: Path, root: Path) -> list[int]:
    """Bytes that Linux lets the control groups of a process take, in both of cgroup's versions."""
    limits = []
    # "0::/path", or of the first version "5:memory:/path"
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, kinds, inside = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        name = "memory.limit_in_bytes" if kinds else "memory.max"
        top = root / kinds
        group = top / inside.lstrip("/")
        # a group has the limits of those around it too
        for folder in (group, *group.parents):
            file = folder / name
            if file.is_file() and file.read_text().strip().isdecimal():  # "max": none
                limits.append(int(file.read_text()))
            if folder == top:
                break
    return limits


# --- How a run is asked to end early: SIGTERM, SIGINT, SIGHUP (a closed terminal) or SIGUSR1 to
# any of its processes, or a file "stop" in its folder


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def listen(hear) -> None:
    """hear(number, frame) for every signal that asks to end. What was ignored at the start stays
    so: nohup means that a closed terminal is not our concern."""
    # SIGUSR1: what a Slurm script is sent before its time is over
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, hear)


def end_now(number: int, frame) -> None:
    """Ends the process with one sentence. No exception: libraries swallow it while they load."""
    name = signal.Signals(number).name
    by_torchrun = under_torchrun() and number == signal.SIGTERM  # which says why itself
    if os.environ.get("RANK", "0") == "0" and not by_torchrun:
        say(f"error: stopped by {name}")
    os._exit(128 + number)  # the shell's status of a process that a signal ended


def say(sentence: str) -> None:
    """From a signal handler, or a thread that ends the process: print() may be half-way
    elsewhere."""
    try:
        os.write(2, f"{sentence}\n".encode())  # one call, without Python's buffer and its lock
    except OSError:
        pass  # the terminal is gone, and with it whoever would read this


def leave_terminal() -> None:
    """What goes to a terminal goes nowhere from now on: writing to one that is closed is an error,
    which would end the run before it has saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # a file or a pipe goes on being written
            os.dup2(nowhere, stream)
    os.close(nowhere)


class Terminal(io.FileIO):
    """Standard output or standard error on a terminal that may be closed while a run prints."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # it was closed an instant ago, and SIGHUP has not been handled yet
            leave_terminal()
            return len(data)


def outlive_terminal() -> None:
    """From now on, what is printed to a terminal that was closed is dropped, without an error."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if os.isatty(number):
            raw = io.BufferedWriter(Terminal(number, "w", closefd=False))
            old = getattr(sys, name)
            new = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=True)
            setattr(sys, name, new)


class Stop:
    def __init__(self, folder, rank: int):
        self.file = Path(folder) / "stop" if rank == 0 else None  # one rank looks, all agree
        self.heard = 0  # number of the signal; 0: none yet
        listen(self.hear)
        outlive_terminal()

    def hear(self, number: int, frame) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
            self.heard = self.heard or number  # shell and kernel both send it: two are no haste
        elif self.heard in (0, signal.SIGHUP):
            self.heard = number
        else:  # checkpoints are renamed when they are whole: nothing to tidy up
            # the second time of asking: somebody is in haste
            os._exit(128 + number)

    def asked(self) -> bool:
        return bool(self.heard) or (self.file is not None and self.file.exists())


# --- torchrun


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@cache  # once in a process
def end_with_torchrun() -> None:
    """Ends this rank within seconds, even in the middle of a step, when its torchrun is gone.

    A torchrun that is killed can't end its ranks, and they would train on unseen. Without torchrun
    the parent is a shell, and its end means nothing: somebody has logged out."""
    if under_torchrun():
        threading.Thread(target=follow, args=[os.getppid()], daemon=True).start()


def follow(parent: int) -> None:
    # not PR_SET_PDEATHSIG: that one tells of the parent's thread, not of the parent
    while os.getppid() == parent:
        time.sleep(1)  # seconds: an orphan is noticed within them
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one sentence a machine
        say(
            f"error: torchrun (process {parent}) is gone, and its ranks leave with it; "
            "go on with --resume_from_checkpoint=latest"
        )
    os._exit(1)
