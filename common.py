"""What every script here shares: the configuration, errors, progress bars, how a script ends.

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
import select
import signal
import stat
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import checks

ROOT = Path(__file__).resolve().parent
PATHS = ("/", "./", "../")  # a name that begins with one of these is a path, not a hub id
# Timeout of our own collectives (DeepSpeed's use torch's default, ten minutes on GPUs). It must
# exceed anything that one rank may do alone while the others wait: start rollout servers, wait for
# rewards that hang, hash a large checkpoint, finish an upload (an hour). It is not what notices a
# dead rank: broken connections, torchrun and ranks.Heartbeat do that at once.
DEADLINE = timedelta(hours=3)
# most characters of a config file or of one value: a file named by mistake may have no end
# (/dev/zero)
LONGEST_CONFIG = 1_000_000
# an item in a flag's list: math, tasks.reverse:reward, my-module:Class.score. A path matches too:
# workers.imported() refuses it with a clearer message
NAME = re.compile(r"[A-Za-z_./~][\w./~-]*(:[\w.]+)?")
DEEPEST = 10  # levels of nested lists and dicts
NESTED = f"is nested deeper than the {DEEPEST} levels that a setting may have"
TRIAL_FILE = ".writable-"  # prefix of a file that check_writable() creates
LONGEST_NAME = 240  # bytes of a file name: file systems allow 255, and we append suffixes
LONGEST_PATH = 3800  # bytes: Linux allows 4095, and we append names inside folders
# how often a waiting thread of torch checks before it sleeps, see choose_waiting()
SPINS = 10_000
# seconds within which a rank may get a copy of a signal: Slurm and systemd can send it to every
# process of a job, and torchrun passes it on to its ranks
ECHO = 5.0
# most characters of an error message: it may quote a column or id, perhaps a megabyte long, of a
# stranger's data
LONGEST_ERROR = 2000
# no bugs: a full disk, a quota, a limit of file sizes; a disk that fails, or that Linux has made
# read-only because it failed; a file server that was started again
DISK_ERRORS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE

# how torch names NCCL's errors that are this rank's own. ncclRemoteError is another's end
NCCL_FAULTS = (
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
)

# --- errors, and how a script ends


class UserError(ValueError):
    """Something the user can put right. Scripts print it as one sentence and exit with status 2."""


class RunStopped(RuntimeError):
    """A run must not go on, for a reason that is not a bug. Scripts print it as one sentence and
    exit with status 1."""


class RewardsFailed(RunStopped):
    """More rewards of a step failed than max_reward_failures allows. All ranks raise it
    together."""


class RolloutsLost(RunStopped):
    """No rollout server is left, or a prompt can't get its completions. All ranks raise it
    together."""


def quoted(value, limit: int = 200) -> str:
    """A value, or text from a server, reward, dataset or model, made fit for an error message: the
    repr() of at most `limit` of its characters. So no text can control the terminal or look like
    one of our own lines."""
    if isinstance(value, (str, Exception)):
        text = str(value)
        return repr(text[:limit]) + ("..." if len(text) > limit else "")
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def memory_text(size: float) -> str:
    """A number of bytes as text: 1.50 GiB, or 12.3 MiB below one GiB."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB"


def in_one_line(text, limit: int = 0) -> str:
    """Text from a library, or a sentence of ours that may quote a stranger, as one line without
    control characters, cut to `limit` characters (0: not cut)."""
    words = " ".join(str(text).splitlines())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
    return line[: limit - 3] + "..." if 0 < limit < len(line) else line


def error_text(error: Exception) -> str:
    """An error that a library has raised, as one line: its kind and the beginning of what it
    says."""
    return f"{type(error).__name__}: {in_one_line(error, 300)}"


def die(sentence: str, status: int) -> None:
    """Prints an error, cut in the middle if it is long, and ends the process. Not by sys.exit:
    other ranks may be in a collective, and the atexit handlers of libraries would wait for them."""
    line = in_one_line(sentence)
    if len(line) > LONGEST_ERROR:
        line = line[: LONGEST_ERROR // 2] + " ... " + line[-LONGEST_ERROR // 2 :]
    try:
        sys.stdout.flush()  # os._exit loses buffered output
    except OSError:
        pass  # nobody reads it any more, or its disk is full
    write_stderr(f"error: {line}")
    os._exit(status)


def lost_a_rank(error: Exception) -> bool:
    """Whether this is an error that torch.distributed raises when another rank is gone. NCCL's
    errors are alike, whatever their cause: see connection_lost()."""
    words = ("gloo", "NCCL", "Connection closed by peer")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def connection_lost(error: Exception) -> str:
    """What to say of an error that lost_a_rank() knows."""
    text = str(error)
    if any(kind in text for kind in NCCL_FAULTS):
        # Docker gives a container 64 MB of it
        cure = "; give the container more: docker run --ipc=host" if "/dev/shm" in text else ""
        # whole, because the cause stands in the last line
        said = in_one_line(text, 800)
        return f"NCCL, by which the ranks talk to each other, has failed: {said}{cure}"
    first = text.splitlines()[0]
    return f"another rank has died or left (its own message is above or below): {first}"


def out_of_memory(error: Exception) -> bool:
    """Whether torch or vLLM raised this because the GPU or the machine has run out of memory."""
    words = (
        "out of memory",  # CUDA and vLLM
        "CUBLAS_STATUS_ALLOC_FAILED",  # a GPU's libraries, which allocate beside torch
        "can't allocate memory",  # torch's CPU allocator
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    watch = select.poll()
    watch.register(1, 0)  # 0: errors only
    return any(event & select.POLLERR for _, event in watch.poll(0))


def set_up_libraries() -> None:
    """Sets what libraries read from the environment, to keep harmless messages out of the terminal
    and a GPU's memory from fragmenting. Call this before libraries are imported."""
    # micro-batches differ in shape from step to step, and would leave blocks of fixed sizes unused
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # in CUDA graphs (of an engine on several GPUs) NCCL would register the memory of such blocks,
    # which is mapped in pieces, and might read outside it
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # else the C++ code of torch and vLLM prints a warning on each rank, about memory bound to cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    place_caches(os.environ)
    # a filter, because DeepSpeed resets its logger's level. It would warn that there is no GPU
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def place_caches(environment) -> None:
    """Gives vLLM and Triton a place for what they compile if the user has no home that can be
    written, as in many containers: vLLM would end in a traceback when it compiles. `environment` is
    os.environ; what the user has set stays."""
    home = os.path.expanduser("~")
    usual = {
        "VLLM_CACHE_ROOT": environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"),
        "TRITON_CACHE_DIR": os.path.join(environment.get("TRITON_HOME") or home, ".triton"),
    }
    for name, place in usual.items():
        if name in environment:
            continue
        try:
            check_writable(name, place, folder=True)
        except UserError:  # also for "~", which stays as it is for a user id without a home
            of_user = f"compiled-{os.getuid()}"  # as in slurm/common.sh
            library = name.split("_")[0].lower()
            with suppress(FileNotFoundError):  # no folder at all can be written
                environment[name] = os.path.join(tempfile.gettempdir(), of_user, library)


def open_missing_streams() -> None:
    """Opens /dev/null as standard input, output or error if the process was started without it
    (`train.py >&-`). Otherwise Python has None in its place, and the next file or connection that
    is opened gets its number, so that libraries and signal handlers would write into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the smallest number that is free: this one
            os.set_inheritable(number, True)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, errors="backslashreplace", closefd=False))


def refuse_other_python() -> None:
    """UserError if this is not the Python that `make env` has filled: the usual reason is that the
    environment is not active, in a new terminal. Looks for libraries but does not import them."""
    for name in ("torch", "transformers"):
        if not find_spec(name):
            raise UserError(
                f"{sys.executable} has no {name}: type `source .venv/bin/activate` in {ROOT}, and "
                f"before it `make env` if that was never done"
            )


def script(work, *arguments):
    """Runs a script and returns its result: work(*arguments), or work(sys.argv[1:]) if no arguments
    are given. Errors meant for the user end the process with one sentence and no traceback."""
    set_up_libraries()
    open_missing_streams()
    # a terminal's encoding may lack characters of a model or dataset; stderr escapes them already
    sys.stdout.reconfigure(errors="backslashreplace")
    # before any import: libraries swallow KeyboardInterrupt while they load
    listen(end_now)  # train.py replaces this once it is ready to save when asked to stop
    end_with_torchrun()
    try:
        # before the config is read: --help must work even if the other arguments are wrong
        if {"-h", "--help"} & set(sys.argv[1:]):
            doc = sys.modules["__main__"].__doc__ or ""  # `python -OO` drops it
            print(doc)
            if "config/" in doc:  # the command reads one
                print("config/default.py lists every key with its meaning; --key=value sets one.")
            sys.exit()
        refuse_other_python()
        if arguments:
            return work(*arguments)
        print_overridden(sys.argv[1:])
        return work(sys.argv[1:])
    except (UserError, RunStopped) as error:
        die(str(error), 2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        if not reader_has_gone():  # another pipe broke, which is unexpected
            raise
        write_stderr("error: the program that read the output (| head?) has ended")
        os._exit(1)  # a normal exit would try to flush, fail, and print that
    except OSError as error:
        if error.errno not in DISK_ERRORS:  # unexpected, so the traceback is shown
            raise
        # these two may come while a file is read
        done = "used" if error.errno in (errno.EIO, errno.ESTALE) else "written"
        die(f"{error.filename or 'a file of the run'} could not be {done}: {error.strerror}", 1)
    except RuntimeError as error:
        if out_of_memory(error):  # while a model loads; for a step train.py has its own message
            die(
                f"memory ran out: {in_one_line(error, 300)}; train.py with --dry_run estimates "
                f"what a run takes",
                1,
            )
        if not lost_a_rank(error):
            raise
        die(connection_lost(error), 1)


# --- a config file


def read_config_file(path) -> dict:
    """The `key = value` lines of a config file as a dict. Values are literals only, so reading a
    stranger's file runs no code."""
    text, tree = parse_config_file(path)
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        line = f"{path}:{node.lineno}"
        if not (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            dotted = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
            cure = '; in a file an entry is written key = {"entry": value}' if dotted else ""
            raise UserError(f"{line}: expected `key = value`, found {source_of(node, text)}{cure}")
        key = node.targets[0].id
        try:
            # literal_eval accepts no name and no call, so nothing runs
            value = parse(ast.literal_eval, node.value, f"{line}: {key}")
        except UserError:  # a ValueError too, which the next clause would catch
            raise
        except (ValueError, TypeError):
            source = source_of(node.value, text)
            raise UserError(f"{line}: {key} must be a plain literal, not {source}") from None
        # Python would silently use the last value, and the first would mislead readers of the file
        if key in values:
            raise UserError(f"{line}: {key} is set twice")
        values[key] = value
    return values


def parse_config_file(path) -> tuple:
    """The text of a config file and its syntax tree. UserError if it can't be read or is not
    Python."""
    try:
        # utf-8-sig: some editors begin a file with a byte order mark
        with open(path, encoding="utf-8-sig") as file:
            # one character more than allowed, so that parse() sees when the file is too long
            text = file.read(LONGEST_CONFIG + 1)
        tree = parse(ast.parse, text, f"config file {path}")
    except OSError as error:
        hint = near_path(str(path)) or near_path(f"config/{path}")
        if os.path.exists(f"{path}/train_config.json"):  # its config.json is the model's
            hint = f"; it is a checkpoint: the config of its run is {path}/train_config.json"
        elif os.path.exists(f"{path}/config.json"):
            hint = f"; it is the folder of a run or model: a run's config is {path}/config.json"
        raise UserError(f"config file {path} can't be read: {error.strerror}{hint}") from None
    except UserError:  # a ValueError too, as above
        raise
    except (SyntaxError, ValueError) as error:  # ValueError: bytes that are not UTF-8, null bytes
        raise UserError(
            f"{path}:{getattr(error, 'lineno', 0)}: not a config file of `key = value` lines: "
            f"{getattr(error, 'msg', error)}"
        ) from None
    return text, tree


def parse(parser, source, where: str):
    """parser(source), a function of ast. UserError if the source (text or a node) is too long or
    nested too deeply."""
    if isinstance(source, str) and len(source) > LONGEST_CONFIG:
        raise UserError(f"{where} is longer than {LONGEST_CONFIG} characters")
    try:
        return parser(source)
    except (RecursionError, MemoryError):  # both mean that it is nested too deeply
        raise UserError(f"{where} {NESTED}") from None


def source_of(node, text: str) -> str:
    """The beginning of a node's source text. Not ast.unparse: it fails on deep nesting."""
    return quoted(ast.get_source_segment(text, node) or "", 60)


# --- keys and values


def check_literal(value, where: str, depth: int = 0) -> None:
    """UserError for values that no setting needs and that some library would choke on: other types
    than text, numbers, lists and dicts, deep nesting, huge integers, bad characters."""
    if depth > DEEPEST:
        raise UserError(f"{where} {NESTED}")
    if isinstance(value, dict):
        value = [*value, *value.values()]  # check the keys too
    if isinstance(value, (list, tuple)):
        for item in value:
            check_literal(item, where, depth + 1)
    elif isinstance(value, int):  # or a bool
        if value.bit_length() > 100:  # Python itself refuses to print thousands of digits
            raise UserError(f"{where} is or holds a whole number of more than 30 digits")
    elif isinstance(value, str):
        check_characters(value, where)
    elif not isinstance(value, (float, type(None))):
        raise UserError(f"{where} must be text, numbers, lists and dicts, not {quoted(value)}")


def check_characters(text: str, where: str) -> None:
    """UserError for a null byte, which ends a string in C, and for half a surrogate pair, which is
    no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = quoted(text[error.start])
        raise UserError(f"{where}: {quoted(text)} holds {bad}, which is not a character") from None
    if "\0" in text:
        raise UserError(f"{where}: {quoted(text)} holds a null byte")


def merge(config: dict, values: dict, source: str) -> dict:
    """A copy of `config` with `values` on top; {"dataset.name": ...} sets one entry of a dict.

    UserError, naming `source`, for an unknown key, a key that no longer exists or a value of the
    wrong type. The older name of a key is accepted, with a message."""
    refuse_unknown(values, config, source)
    merged = dict(config)
    for name, value in values.items():
        path = RENAMED.get(name, name)
        if path != name:
            say_on_rank_0(f"{source}: {name} is now {path}", file=sys.stderr)
            if path in values:
                raise UserError(f"{source}: {path} is set twice, once by its older name {name}")
        key, dot, entry = path.partition(".")
        where = f"{source}: {name}"
        if dot:
            if type(merged[key]) is not dict:
                raise UserError(f"{where}: {key}={quoted(merged[key])} has no entries by name")
            if not entry:
                raise UserError(f"{where}: the name of an entry of {key} must follow the dot")
            value = {**merged[key], entry: value}
        merged[key] = coerce_key(key, value, config[key], where)
    return merged


def refuse_unknown(names, config: dict, source: str) -> None:
    """UserError that says of each of these names what it is here, unless it is a key or the older
    name of one. All at once, because a config of another trainer has dozens, and each sentence
    once, because die() cuts an error that is too long."""
    refused = {}  # {(whether names are unknown, the sentence that they share): names}
    for name in dict.fromkeys(names):  # a flag may be given twice
        if name in NO_KEYS:
            refused.setdefault((False, NO_KEYS[name]), []).append(name)
        elif RENAMED.get(name, name).partition(".")[0] not in config:
            hint = did_you_mean(name, config) or "; config/default.py lists all keys"
            if name.startswith(VERL):
                hint += "; docs/from_trl.md has those names of verl that mean something here"
            refused.setdefault((True, hint), []).append(repr(name))
    clauses = []
    for (unknown, sentence), same in refused.items():
        several = len(same) > 1
        listed = ", ".join(same)
        if unknown:
            clauses.append(f"unknown key{'s' if several else ''} {listed}{sentence}")
        else:
            verb = "are no keys" if several else "is not a key"
            clauses.append(f"{listed} {verb} here: {sentence}")
    if len(clauses) > 1:
        clauses = [f"({i}) {clause}" for i, clause in enumerate(clauses, 1)]
    if clauses:
        raise UserError(f"{source}: {' '.join(clauses)}")


def did_you_mean(name: str, known) -> str:
    """The end of an error about an unknown name: the known one most like it; "" if none is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def coerce_key(key: str, value, before, where: str):
    """`value` in the type of the key. before: its default, or what a file or flag set earlier,
    which has that type too. Keys of checks.SCHEDULED may also be {step: value}, and "dataset" a
    list of sources, whichever form `before` has."""
    default = before
    if key in checks.SCHEDULED:
        default = checks.values_of(before)[0]
        if type(value) is dict:
            return coerce_points(value, default, where)
    check_literal(value, where)
    refuse_usual_mistakes(key, value, default, where)
    if key == "dataset":
        default = {}  # `before` may be a list
        if type(value) is list:
            return [coerce_source(source, f"{where}, source {i}") for i, source in enumerate(value)]
    if key.endswith(".config") and type(value) is dict:  # a task takes its settings as text
        value = repr(value)
    value = coerce(value, default, where)
    return coerce_entries(key, value, where) if key in checks.ENTRIES else value


def refuse_usual_mistakes(key: str, value, default, where: str) -> None:
    """UserError that says how to correct a usual mistake, where one about types would not help."""
    if type(value) is str and value[:1] in ("[", "{") and type(default) is not str:
        raise UserError(
            f"{where}={quoted(value)} is not a Python literal: put quotes around names and texts, "
            f"close every bracket, and in a shell put '...' around the whole value"
        )
    if key == "scale_rewards" and str(value).lower() in ("true", "false"):
        ours = "group" if str(value).lower() == "true" else "none"
        raise UserError(f"{where}: TRL's {str(value).capitalize()} is {key}={ours!r} here")
    if key == "report_to" and value in ("none", "None"):
        raise UserError(f"{where}: leave it out, or write --{key}= for no report")
    if value is True and key == "resume_from_checkpoint":
        raise UserError(f"{where}: write --{key}=latest, or name a step_* folder")
    first = next(iter(checks.ENTRIES.get(key, {})), "")
    if first and type(value) in (int, float, bool):
        raise UserError(f"{where}={value} has entries, such as --{key}.{first}=...")
    if type(value) is str and key.endswith("dataset"):
        entry = f"{key} = {{'name': {quoted(value, 60)}}}"
        raise UserError(f"{where} has entries: write {entry}, or as a flag --{key}.name=...")


def coerce_source(source, where: str) -> dict:
    return coerce_entries("dataset", coerce(source, {}, where), where)


def coerce_entries(key: str, value: dict, where: str) -> dict:
    """`value`, a dict, with its known entries in the types of their defaults. UserError for an
    unknown entry, unless a library reads the dict (checks.OPEN_KEYS)."""
    known = checks.ENTRIES[key]
    coerced = dict(value)
    for entry, content in value.items():
        if entry in known:
            coerced[entry] = coerce_key(
                f"{key}.{entry}", content, known[entry], f"{where}: {entry}"
            )
        elif type(entry) is not str or key not in checks.OPEN_KEYS:
            raise UserError(
                f"{where}: unknown entry {quoted(entry)}; those of {key} are {', '.join(known)}"
            )
    return coerced


def coerce_points(value: dict, default, where: str) -> dict:
    """{step: value} with int steps, and values in the type of `default`. Steps may be text, which
    is what JSON (a run's config.json) makes of them."""
    check_literal(value, where)
    points = {}
    for step, number in value.items():
        if isinstance(step, str) and step.isdecimal() and len(step) < 30:  # as in check_literal
            step = int(step)
        if type(step) is not int or step < 0:  # type(): isinstance would accept True
            raise UserError(f"{where}={quoted(value)} must be {{step: value}}, steps from 0 on")
        points[step] = coerce(number, default, f"{where}, step {step}")
    if not points:
        raise UserError(
            f"{where}={{}} holds no point: {{step: value}}, such as {{0: 1.2, 100: 1.0}}"
        )
    return points


def coerce(value, default, where: str):
    """`value` in the type of `default`. An int may stand for a float, and "inf" is a float; True is
    not a number."""
    kind = type(default)
    check_literal(value, where)
    # Python has no literal for infinity, so files and flags write it as text
    if kind is float and isinstance(value, str) and value in ("inf", "Infinity"):
        return math.inf
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # not isinstance: bool is a subclass of int
        like = f" like {default!r}" if default != "" else ""
        points = ""
        if type(value) is dict:
            points = f"; {', '.join(checks.SCHEDULED)} may change by step"
        raise UserError(
            f"{where} must be of type {kind.__name__}{like}, "
            f"not {type(value).__name__} {quoted(value)}{points}"
        )
    # a list's items have the type of its default's first item; an empty default allows any
    if kind is list and default:
        where = f"{where}={quoted(value)}, entry"
        return [coerce(item, default[0], f"{where} {i}") for i, item in enumerate(value)]
    if kind is float and math.isnan(value):
        raise UserError(f"{where} is not a number")
    return value


# --- the command line


def read_flag(argument: str, defaults: dict) -> tuple:
    """The name and the value of one --key=value. Strings need no quotes, not even in lists; true
    and false need no capital letter. A flag without a value is True."""
    name, equals, text = argument[2:].partition("=")
    if not equals:
        return name, True
    key, _, entry = RENAMED.get(name, name).partition(".")
    default = defaults.get(key)
    if entry:
        default = checks.ENTRIES.get(key, {}).get(entry)
    # also for an unknown key, which merge() refuses, and for one that takes text:
    # --push_to_hub=False does not mean a repository "False". Not for a key with choices, so that
    # the error lists them
    if text.lower() in ("true", "false") and key not in checks.CHOICES:
        return name, text.lower() == "true"
    if isinstance(default, str):  # never parsed: a name such as 1e5 or None stays text
        return name, text
    try:
        value = parse(ast.literal_eval, text, f"command line: {name}")
    except UserError:  # a ValueError too, which the next clause would catch
        raise
    except (ValueError, SyntaxError, TypeError):
        if isinstance(default, list):  # --reward_funcs=a,b or [a]: a shell takes the quotes off 'a'
            words = text.removeprefix("[").removesuffix("]").split(",")
            words = [word.strip() for word in words]
            if all(map(NAME.fullmatch, words)):
                return name, words
        return name, text  # merge() says which type was expected
    if isinstance(default, list) and isinstance(value, tuple):  # --reward_weights=1,0.1
        value = list(value)
    elif isinstance(default, list) and type(value) in (int, float):  # --reward_weights=2
        value = [value]
    return name, value


def refuse_two_words(argv, switches: tuple = ()) -> None:
    """UserError for `--port 8000`, and for anything else that begins with - but is not --key=value.
    switches: names that may stand without a value."""
    for i, word in enumerate(argv):
        if not word.startswith("-") or (word.startswith("--") and "=" in word):
            continue
        if word.removeprefix("--") in switches:
            continue
        if re.match(r"-\.?\d", word):  # of --reward_weights=[1, -1], which the shell has cut
            raise UserError(f"{word}: no flag begins with a number; put '...' around a whole list")
        name = word.lstrip("-").partition("=")[0] or "key"
        if name.replace("-", "_") in switches:
            raise UserError(f"{word}: write --{name.replace('-', '_')}")
        if name in NO_KEYS:
            raise UserError(f"{word}: {NO_KEYS[name]}")
        value = "latest" if RENAMED.get(name, name) == "resume_from_checkpoint" else "..."
        if i + 1 < len(argv) and argv[i + 1][:1] != "-":
            value = argv[i + 1]
        raise UserError(f"{word}: write --key=value, in one word: --{name}={value}")


def refuse_cut_flags(argv, defaults: dict) -> None:
    """UserError for a list or dict that was not quoted, so that the shell has cut it at a blank:
    --temperature={0: 1.2, 100: 1.0}."""
    for word, next_word in pairwise(argv):
        key, _, value = word.lstrip("-").partition("=")
        opened = value[:1] in ("{", "[") and value[-1] not in ("}", "]")
        cut = opened and not next_word.startswith("-") and not os.path.exists(next_word)
        if cut and not isinstance(defaults.get(key), str):
            raise UserError(f"{word} ...: the shell has cut this flag: put '...' around its value")


def print_overridden(argv) -> None:
    """Prints which flags are overridden by a later one of the same key. This is allowed:
    scripts append flags to the user's."""
    last = {}
    for word in argv:
        if not word.startswith("--"):  # a path may hold a "=" too: runs/lr=1e-4/step_000100
            continue
        name, equals, _ = word.removeprefix("--").partition("=")
        key = RENAMED.get(name, name)  # an older name means the same key
        if key in last and equals:
            say_on_rank_0(f"{last[key]} is not used: {word} comes after it", file=sys.stderr)
        last[key] = word


def own_flags(argv, defaults: dict) -> tuple[dict, list[str]]:
    """Splits a command line into the command's own flags, as a dict like `defaults`, and the
    remaining words: files, and flags of the config."""
    switches = tuple(key for key, default in defaults.items() if isinstance(default, bool))
    refuse_two_words(argv, switches)
    flags = dict(defaults)
    others = []
    for word in argv:
        name, equals, text = word.removeprefix("--").partition("=")
        if name not in defaults:
            name = RENAMED.get(name, name)  # sft.py --lr=1e-3
        if word.startswith("--") and name in defaults:
            _, value = read_flag(f"--{name}{equals}{text}", defaults)
            flags[name] = coerce(value, defaults[name], f"command line: {name}")
        else:
            others.append(word)
    return flags, others


def unused_flags(argv, instead: dict) -> str:
    """One line of warning for each flag that is for training runs and changes nothing in this
    script; "" if there is none. instead: an entry of checks.INSTEAD."""
    lines = []
    for word in argv:
        name = word.removeprefix("--").partition("=")[0]
        name = RENAMED.get(name, name)
        if word.startswith("--") and name in instead:
            lines.append(
                f"warning: {word} is for training runs and changes nothing here; set "
                f"--{instead[name]}"
            )
    return "\n".join(lines)


def load_with_flags(argv, defaults: dict, instead: dict | None = None) -> tuple[dict, dict]:
    """A command line's own flags, as own_flags() reads them, and the config of the rest. Prints the
    warning of unused_flags(), if there is one."""
    flags, others = own_flags(argv, defaults)
    for word in others:
        name = word.removeprefix("--").partition("=")[0]
        near = difflib.get_close_matches(name, defaults, n=1, cutoff=0.75)
        if word.startswith("--") and near and name.partition(".")[0] not in default_config():
            raise UserError(f"{word}: did you mean --{near[0]}?")
    if warning := unused_flags(others, instead or {}):
        say_on_rank_0(warning, file=sys.stderr)
    return flags, load_config(others)


def default_config() -> dict:
    """The config of config/default.py."""
    return read_config_file(ROOT / "config" / "default.py")


def load_config(argv) -> dict:
    """The resolved and checked config: config/default.py, then the files of `argv`, then its
    --key=value, whatever their order."""
    refuse_two_words(argv)  # first, else the 3 of "--seed 3" would be read as a file
    defaults = default_config()
    config = dict(defaults)
    flags = [read_flag(word, defaults) for word in argv if word.startswith("-")]
    files = [word for word in argv if not word.startswith("-")]
    refuse_cut_flags(argv, defaults)
    for path in files:
        if "=" in str(path) and not os.path.exists(path):  # key=value, as Hydra has it
            raise UserError(f"{path}: a flag begins with two dashes: --{path}")
        if str(path).endswith(".json"):
            values = read_settings(Path(path))
        else:
            values = read_config_file(path)
        config = merge(config, values, path)
    refuse_unknown([name for name, _ in flags], config, "command line")
    # flags override all files, wherever they stand on the line
    for name, value in flags:
        config = merge(config, {name: value}, "command line")
    check_config(config)
    return config


# --- a config that has been read


def check_config(c: dict) -> None:
    """UserError with the sentence of the first claim in checks.py that does not hold."""
    for holds, sentence in checks.claims(c):
        if not holds:
            raise UserError(sentence)


def with_tau(c: dict, vocabulary: int) -> dict:
    """The config, with maxent_tau=-1 replaced by its value for the model's vocabulary."""
    if c["maxent_tau"] != -1:
        return c
    return {**c, "maxent_tau": checks.default_tau(c, vocabulary)}


def scheduled(value, step: int) -> float:
    """The value of a setting at `step`. A number is constant; {step: value} is interpolated between
    these points, flat before the first and after the last."""
    if not isinstance(value, dict):
        return value
    before = max((s for s in value if s <= step), default=min(value))
    after = min((s for s in value if s >= step), default=max(value))
    if before >= after:  # on a point, or before the first or after the last
        return value[before]
    done = (step - before) / (after - before)
    return (1 - done) * value[before] + done * value[after]


def check_ranks(c: dict, ranks: int) -> None:
    """UserError unless every rank can take the same number of a step's prompts."""
    if c["prompts_per_step"] % ranks:
        raise UserError(
            f"prompts_per_step={c['prompts_per_step']} must be a multiple of the number of ranks, "
            f"{ranks}"
        )


def check_tensor_parallel(c: dict, ranks: int) -> None:
    """UserError if the ranks can't be divided into engines of tensor_parallel_size ranks each.
    Servers have a --tp of their own."""
    if c["rollout_engine"] != "vllm":
        return
    size = checks.entries(c, "vllm_options")["tensor_parallel_size"]
    if ranks % size:
        raise UserError(
            f"vllm_options.tensor_parallel_size={size} must divide the number of ranks, {ranks}"
        )


# --- paths and files


def check_lengths(path: Path, where: str) -> None:
    """UserError if a path, or a name in it, is too long for a file system."""
    longest = max(len(os.fsencode(name)) for name in path.parts)  # bytes: a letter may take 4
    if longest > LONGEST_NAME:
        raise UserError(f"{where}: it holds a name of {longest} bytes, more than {LONGEST_NAME}")
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise UserError(f"{where}: a path may have {LONGEST_PATH} bytes at most")


def check_writable(key: str, path, folder: bool) -> None:
    """UserError if `path` can't be written, as a folder or as a file. Scripts call this before they
    load anything, so that the error does not come hours later."""
    where = f"{key}={quoted(str(path))} can't be written"
    check_characters(str(path), where)
    if str(path).startswith("~"):
        raise UserError(f"{where}: {checks.TILDE}")
    absolute = Path(path).absolute()
    check_lengths(absolute, where)
    existing = absolute  # the path itself, or its nearest parent that exists
    # lexists: a link that leads nowhere exists too, and mkdir would fail on it
    while not os.path.lexists(existing):
        existing = existing.parent
    is_folder = folder or existing != absolute  # whether `existing` must be a folder
    if not os.path.exists(existing):
        raise UserError(f"{where}: {str(existing)!r} is a link that leads nowhere")
    if is_folder and not os.path.isdir(existing):
        raise UserError(f"{where}: {str(existing)!r} is a file, not a folder")
    if not is_folder and not os.path.isfile(existing):
        raise UserError(f"{where}: {str(existing)!r} is a folder or a device, not a file")
    if not is_folder and not os.access(existing, os.W_OK):  # a file that would be overwritten
        raise UserError(f"{where}: it exists and is write-protected")
    place = existing if is_folder else existing.parent
    try:  # only a trial tells: as root, on a read-only disk or in /proc, permissions do not
        # a prefix that journal.is_empty() knows: where the file system has no files without a name
        # (NFS), another rank may see this one
        tempfile.TemporaryFile(dir=place, prefix=TRIAL_FILE).close()
    except OSError as error:
        raise UserError(
            f"{where}: no file can be created in {str(place)!r}: {error.strerror}"
        ) from None


def as_read_back(settings: dict) -> dict:
    """The settings as a .json file gives them back, for comparison with those of one: tuples become
    lists, and the steps of a schedule become text."""
    return json.loads(json.dumps(settings))


def read_settings(path: Path) -> dict:
    """The settings that one of these scripts wrote to a .json file. UserError if the file is
    another program's, or has a key twice."""

    def to_dict(pairs: list[tuple]) -> dict:
        table = {}
        for key, value in pairs:
            if key in table:  # json would silently take the last value
                raise UserError(f"{str(path)!r}: {quoted(key)} is set twice")
            table[key] = value
        return table

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(LONGEST_CONFIG + 1)  # the file may have no end
        if len(text) > LONGEST_CONFIG:
            raise UserError(f"{str(path)!r} is longer than {LONGEST_CONFIG} characters")
        settings = json.loads(text, object_pairs_hook=to_dict)
    except OSError as error:
        raise UserError(f"{str(path)!r} can't be read: {error.strerror}") from None
    except UserError:  # a ValueError too, which the next clause would catch
        raise
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        settings = None
    if not isinstance(settings, dict) or "reward_funcs" not in settings:  # every one of ours has it
        beside = path.parent / "train_config.json"  # the other config.json there is the model's
        saved = f"; the settings of this checkpoint are {beside}" if beside.exists() else ""
        raise UserError(
            f"{str(path)!r} holds no settings that this program wrote. A config of your own must "
            f"be a .py file of `key = value` lines; an --output needs another name{saved}"
        )
    return settings


def refuse_missing_folder(model: str) -> None:
    """UserError, so that the hub is not asked for it, if `model` is clearly a path, not a hub id,
    and there is no such folder, or if it is sft.py's name for a new model."""
    if model == "tiny" and not os.path.isdir(model):
        raise UserError(
            "model='tiny' is a new model that only sft.py makes: first `python sft.py CONFIG "
            "--model=tiny --output_dir=runs/warm --learning_rate=2e-3`, then --model=runs/warm here"
        )
    if not model.startswith((*PATHS, "runs/")) or os.path.isdir(model):
        return
    hint = ""
    if model.startswith("runs/"):
        hint = "; sft.py or train.py makes it, as the first lines of a shipped config show"
    raise UserError(f"model={model!r} is not a folder{near_path(model) or hint}")


def near_path(path: str) -> str:
    """ "; did you mean ...?" with the name beside a missing path that is most like it; "" if none
    is. For a link to nothing, where it points."""
    if os.path.islink(path):
        return f"; it is a link to {os.readlink(path)!r}"
    if os.path.exists(path):  # a folder where a file was expected, or the reverse
        return ""
    folder, name = os.path.split(path.rstrip("/"))
    if not os.path.isdir(folder) or not os.access(folder, os.R_OK):
        return ""
    near = difflib.get_close_matches(name, os.listdir(folder), n=1)
    return f"; did you mean {os.path.join(folder, near[0])!r}?" if near else ""


# --- what a command prints


def say_on_rank_0(text: str, file=None) -> None:
    """Prints on rank 0 only, even before the process group exists."""
    if launched_rank() == 0:
        print(text, file=file, flush=True)


def progress(**settings):
    """A tqdm progress bar; if stderr is not a terminal, a line every half minute instead."""
    # here: it would be most of this file's import time, during which Ctrl-C is not handled yet
    from tqdm import tqdm

    line = "{desc}{percentage:3.0f}% {n_fmt}/{total_fmt} "
    line += "[{elapsed}<{remaining}, {rate_fmt}{postfix}]\n"
    # seconds between two lines
    calm = {} if sys.stderr.isatty() else {"mininterval": 30, "maxinterval": 60, "bar_format": line}
    return tqdm(dynamic_ncols=True, **calm, **settings)


def print_above_bar(sentence: str, file=None) -> None:
    """Prints a line above the progress bar, if there is one."""
    # in a file a bar is plain lines: tqdm would "clear" the last one with blanks and write it again
    if sys.stderr.isatty():
        from tqdm import tqdm  # late, as in progress()

        tqdm.write(sentence, file)
    else:
        print(sentence, file=file, flush=True)


# --- memory and cores


CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # of a process; of the machine


def rank_memory() -> int:
    """Bytes of main memory that one rank may use: its share of the machine's memory, or of the
    limit of the container or Slurm job that it runs in. A share of all memory, not of what is free
    now, so that the same command always gets the same answer."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *memory_limits(*CGROUPS)]) // from_launcher("LOCAL_WORLD_SIZE", 1)


def memory_limits(membership: Path, root: Path) -> list[int]:
    """Memory limits in bytes of the control groups that a process is in, see group_folders()."""
    limits = []
    for folder in group_folders(membership, root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2; version 1
            limit = text_of(folder / name).strip()
            if limit.isdecimal():  # "max" means no limit
                limits.append(int(limit))
    return limits


def usable_cores() -> int:
    """Cores that this process may use: those that it is bound to, or as much processor time as its
    container or Slurm job has."""
    limits = [math.ceil(limit) for limit in core_limits(*CGROUPS)]
    bound = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        bound = len(os.sched_getaffinity(0))
    return min([bound, *limits])


def core_limits(membership: Path, root: Path) -> list[float]:
    """Limits of processor time, in cores, of the control groups that a process is in, see
    group_folders()."""
    limits = []
    for folder in group_folders(membership, root, "cpu"):
        # processor time and the period it is for, in microseconds: one file in version 2, else two
        names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(text_of(folder / name) for name in names).split()
        # "max" and -1 mean no limit; a quota without its period, or the reverse, says nothing
        if len(words) == 2 and all(word.isdecimal() for word in words):
            limits.append(int(words[0]) / int(words[1]))
    return limits


def group_folders(membership: Path, root: Path, kind: str):
    """Folders of the control groups (cgroup versions 1 and 2) that a process is in and of those
    around them, whose limits hold for it too. membership: /proc/self/cgroup; root: /sys/fs/cgroup;
    kind: of limits, "memory" or "cpu"."""
    # lines are "0::/path" in version 2, "5:cpu,cpuacct:/path" in version 1
    for line in text_of(membership).splitlines():
        _, kinds, inside = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        top = root / kinds
        if not top.exists():  # "cpuacct,cpu" in the list, "cpu,cpuacct" and a link "cpu" here
            top = root / kind
        group = top / inside.lstrip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == top:
                break


def text_of(file: Path) -> str:
    """The text of a file of the system; "" if there is none or it may not be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def choose_waiting(environment) -> str:
    """Chooses how threads of torch wait for each other: in a loop for a moment if cores are free;
    asleep at once if other processes use them, because a loop would take the core from the very
    thread that it waits for. `environment` is os.environ, before torch loads; what the user has set
    stays.

    A tiny model's step on two cores took .5 to 1.3 s with the loop and 1.0 to 2.0 s without it;
    beside one busy process, 2.4 to 4.5 s with it and 1.0 to 2.2 s without. Returns the name of the
    variable that it sets, or ""."""
    if "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment:
        return ""
    cores = usable_cores()
    threads = environment.get("OMP_NUM_THREADS", "")
    threads = int(threads) if threads.isdecimal() else cores
    # without RANK it was left in the shell by another job, see from_launcher()
    ranks = environment.get("LOCAL_WORLD_SIZE", "") if "RANK" in environment else ""
    ranks = int(ranks) if ranks.isdecimal() else 1
    free = threads * ranks <= cores and threads + running_elsewhere() <= os.cpu_count()
    if threads > 1 and free:  # one thread has nobody to wait for
        environment["GOMP_SPINCOUNT"] = str(SPINS)
        return "GOMP_SPINCOUNT"
    environment["OMP_WAIT_POLICY"] = "passive"
    return "OMP_WAIT_POLICY"


def running_elsewhere(looks: int = 5) -> int:
    """How many other threads on this machine run or wait for a core: the least of `looks` counts,
    10 ms apart, so that threads that wake only for a moment are left out. The number of cores, if
    the system does not tell."""
    least = os.cpu_count()
    for look in range(looks):
        if look:
            time.sleep(0.01)
        # "0.20 0.18 0.12 3/133 17": 3 of 133 run, we are one of them
        load = text_of(Path("/proc/loadavg"))
        if load:
            least = min(least, int(load.split()[3].split("/")[0]) - 1)
    return least


# the variable that we set, not the user: commands that we start must choose for themselves
CHOSEN_WAITING = choose_waiting(os.environ)


# --- A user asks a run to end early by SIGTERM, SIGINT, SIGHUP (a closed terminal) or SIGUSR1 to
# any of its processes, or by a file "stop" in its folder


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def listen(hear) -> None:
    """Installs hear(number, frame) as the handler of every signal in SIGNALS. A signal that was
    ignored when we started stays ignored: nohup ignores SIGHUP, so that a closed terminal does not
    end us."""
    # SIGUSR1: Slurm sends it to a batch script before its time is up
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, hear)


def end_now(number: int, frame) -> None:
    """A signal handler that ends the process with one sentence. It raises no exception, because
    libraries swallow exceptions while they load."""
    name = signal.Signals(number).name
    by_torchrun = under_torchrun() and number == signal.SIGTERM  # torchrun itself says why
    if launched_rank() == 0 and not by_torchrun:
        write_stderr(f"error: stopped by {name}")
    os._exit(128 + number)  # the status that shells give to a process ended by a signal


def write_stderr(sentence: str) -> None:
    """Prints to stderr from a signal handler, or from a thread that ends the process. print() is
    not safe there: the main thread may be in the middle of one and hold its lock."""
    try:
        os.write(2, f"{sentence}\n".encode())  # one call, without Python's buffer and its lock
    except OSError:
        pass  # the terminal is closed


def leave_terminal() -> None:
    """Sends stdout and stderr to /dev/null if they go to a terminal. Writing to a closed terminal
    raises an error, which would end the run before it has saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # a terminal, not a file or a pipe
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
    """Whether the run has been asked to end early, by a signal or by the file "stop" in `folder`. A
    second signal ends the process at once."""

    def __init__(self, folder, rank: int):
        self.file = Path(folder) / "stop" if rank == 0 else None  # rank 0 looks for all ranks
        self.heard = 0  # number of the signal; 0: none yet
        self.echo_until = 0.0  # a signal before this time is a copy of the first
        listen(self.hear)
        outlive_terminal()

    def hear(self, number: int, frame) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
            # a second SIGHUP means nothing: the shell and the kernel both send one
            self.heard = self.heard or number
        elif self.heard in (0, signal.SIGHUP):
            self.heard = number
            if under_torchrun():
                self.echo_until = time.monotonic() + ECHO
            if self.file is not None:  # rank 0: a step can take minutes
                write_stderr(
                    f"\n{signal.Signals(number).name}: the run saves and ends after this step; a "
                    f"second signal ends it at once, unsaved"
                )
        elif time.monotonic() < self.echo_until:
            self.echo_until = 0.0  # there is only one copy
        else:
            # asked twice, so end now. There is nothing to tidy up: a checkpoint gets its name only
            # when it is complete
            os._exit(128 + number)

    def asked(self) -> bool:
        return bool(self.heard) or (self.file is not None and self.file.exists())


# --- torchrun


def launched_rank() -> int:
    """This process's rank, as its launcher says: known before the ranks have met."""
    return from_launcher("RANK", 0)


def launched_ranks() -> int:
    """How many processes were launched together."""
    return from_launcher("WORLD_SIZE", 1)


def from_launcher(name: str, default: int) -> int:
    """A number that torchrun has put into the environment. Without RANK there was no torchrun but
    one process, and what another job has left in the shell (WORLD_SIZE=8) is not for us. default:
    that of one process, the smallest that there is."""
    text = os.environ.get(name, str(default)) if "RANK" in os.environ else str(default)
    if not text.isdecimal() or int(text) < default:
        raise UserError(
            f"the environment has {name}={quoted(text)}, which must be a number from {default} on"
        )
    return int(text)


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@cache  # once in a process
def end_with_torchrun() -> None:
    """Starts a thread that ends this rank, even in the middle of a step, within seconds after its
    torchrun is gone.

    A torchrun that is killed can't end its ranks, and they would go on unnoticed. Without torchrun
    the parent is a shell, whose end means only that somebody has logged out."""
    if under_torchrun():
        threading.Thread(target=follow, args=[os.getppid()], daemon=True).start()


def follow(parent: int) -> None:
    """Waits until the parent process is gone, then ends this one."""
    # not PR_SET_PDEATHSIG: that signal comes when the parent's thread ends, not the parent
    while os.getppid() == parent:
        time.sleep(1)  # seconds
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one sentence per machine
        write_stderr(f"error: torchrun (process {parent}) is gone, so its ranks end too")
    os._exit(1)


# --- keys of older versions and of other trainers

# Key of an older version, of the research code, of TRL or of verl -> today's key, or key.entry
RENAMED = {
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
    # TRL's and verl's, which no config.json of ours has
    "lr": "learning_rate",
    "max_new_tokens": "max_completion_length",
    "model_name_or_path": "model",
    "run_name": "wandb_options.name",
    "hub_model_id": "push_to_hub",
    "lora_r": "lora_rank",
    "num_generations_eval": "eval_num_generations",
    "torch_dtype": "dtype",
    "dataset_train_split": "dataset.split",
    "dataset_test_split": "eval_dataset.split",
    "vllm_importance_sampling_mode": "importance_sampling",
    "vllm_importance_sampling_cap": "importance_sampling_cap",
    "vllm_importance_sampling_clip_max": "importance_sampling_cap",
    "vllm_server_base_url": "rollout_server",
    "epsilon_low": "epsilon",
    "clip_ratio": "epsilon",
    "clip_ratio_low": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "clip_ratio_c": "delta",  # its dual clip
    "resume": "resume_from_checkpoint",
    "actor_rollout_ref.actor.optim.lr": "learning_rate",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.rollout.n": "num_generations",
    "actor_rollout_ref.rollout.temperature": "temperature",
    "actor_rollout_ref.actor.clip_ratio": "epsilon",
    "actor_rollout_ref.actor.clip_ratio_low": "epsilon",
    "actor_rollout_ref.actor.clip_ratio_high": "epsilon_high",
    "actor_rollout_ref.actor.clip_ratio_c": "delta",
    "actor_rollout_ref.actor.ppo_epochs": "num_iterations",
    "data.train_batch_size": "prompts_per_step",
    "data.train_files": "dataset.name",
    "data.val_files": "eval_dataset.name",
    "data.max_prompt_length": "max_prompt_length",
    "data.max_response_length": "max_completion_length",
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.total_training_steps": "max_steps",
}
VERL = ("actor_rollout_ref.", "algorithm.", "critic.", "data.", "trainer.")  # blocks of its config
# sentences that several keys share
WHOLE = "completions are sampled from the whole distribution, which the loss assumes"
ENDS = (
    "a completion ends with a token that ends a turn (--dry_run names them) or at its full length"
)
KL = (
    "--beta is the weight of a KL in the loss (there is none in the reward); under maxent and flow "
    "it tilts the weights instead (maxent_kl=True: both)"
)
BONUS = (
    "a bonus per token is --objective=token_entropy with --token_entropy_coef, a sum over N * L "
    "where TRL has a mean over tokens"
)
AGGREGATION = (
    "the objective says it: verl's grpo with its default token-mean is --objective=dapo, with "
    "seq-mean-token-mean it is grpo, with seq-mean-token-sum-norm and unscaled advantages dr_grpo"
)
RESAMPLE = (
    "--resample_equal_groups=N replaces, up to N times, prompts whose completions are all equally "
    "good"
)
REWARD = "a reward is a Python function, --reward_funcs=module:function (docs/rewards.md)"
REFERENCE = "the reference stays the model that the run began with (docs/objectives.md)"
CRITIC = "there is no critic, and a row's tokens share its advantage (docs/objectives.md: Your own)"
LIGER = "logits are never kept for a whole batch: policy.py computes log-probs piece by piece"
# Key whose value no key of ours could take -> a sentence about what there is instead
NO_KEYS = {
    "dataset_mixture": "dataset takes a list of sources: "
    '[{"name": "countdown", "weight": 2.0}, ...]',
    "easy_schedule": "easy_dataset has a share, a line through points: "
    "--easy_dataset.share='{0: 0.5, 100: 0}'",
    "temperature_schedule": "temperature can be a line through points: "
    "--temperature='{0: 1.2, 100: 1.0}'",
    "maxent_target_final": "the target can be a line through points: "
    "--maxent_target_weight_entropy='{0: 1.5, 100: 1.0}'",
    "maxent_target_horizon": "the target can be a line through points: "
    "--maxent_target_weight_entropy='{0: 1.5, 100: 1.0}'",
    "maxent_length_normalize_ref": "--maxent_score_norm=length divides the scores of policy and "
    "reference by length, sum does not",
    "controller_meta_enabled": "name a method, such as --controller_meta_method=analytic, or none",
    "info_seed_enabled": "set the number of seeds, such as --info_seed_num_seeds=4, or 0",
    "vllm_kv_cache_gib": "--vllm_options.kv_cache_memory_bytes=N, in bytes",
    "vllm_enforce_eager": "--vllm_options.enforce_eager=False compiles the model, True does not",
    "adam_beta1": "--optimizer_options.betas='[0.9, 0.999]' sets both",
    "adam_beta2": "--optimizer_options.betas='[0.9, 0.999]' sets both",
    "dry_run": "it is a flag of train.py: --dry_run",
    "eval_seeds": "it is a flag of evaluate.py: --seeds=3",
    "eval_output": "it is a flag of evaluate.py: --output=eval.jsonl",
    "generate_output": "it is a flag of generate.py: --output=out.jsonl",
    "generate_max_prompts": "it is a flag of generate.py: --max_prompts=100",
    "sft_steps": "it is a flag of sft.py: --steps=1000",
    "sft_batch_size": "it is a flag of sft.py: --batch_size=64",
    "sft_learning_rate": "it is a flag of sft.py: --learning_rate=1e-5",
    "trust_checkpoint": "it is a flag of slurm/evaluate.sh alone",
    "max_skipped_steps": "it is fixed: train.MAX_SKIPPED_STEPS",
    "logprob_chunk_size": "it is fixed: policy.CHUNK",
    "rollout_concurrency": "it is fixed: CONCURRENCY in server/engine.py",
    "client_tag": "set the environment variable VLLM_CLIENT_TAG",
    "hub_private_repo": "a repository that push_to_hub makes is always private",
    # TRL's and verl's
    "warmup_ratio": "--warmup_steps=N is a number of steps",
    "ref_model": "the reference is --model as the run found it, and --beta turns it on",
    "eval_on_start": "--eval_steps=N evaluates the start too",
    "trainer.val_before_train": "--eval_steps=N evaluates the start too",
    "config": "a config file is named without a flag, as in train.py FILE --key=value",
    "use_liger_kernel": LIGER,
    "use_liger_loss": LIGER,
    "reward_kwargs": "functools.partial in a module of yours fixes a reward's arguments",
    "kl_coef": KL,
    "kl_loss_coef": KL,
    "use_kl_loss": KL,
    "vllm_server_timeout": "--rollout_timeout is for each answer of a server, its start included",
    "log_completions": "--log_rollouts_steps=N writes them every N steps",
    "num_completions_to_print": "--log_rollouts_steps=N writes all of every N-th step",
    "logging_strategy": "every step is logged, in metrics.jsonl",
    "eval_strategy": "--eval_steps=N evaluates every N steps, 0 never",
    "save_strategy": "--save_steps=N saves every N steps, 0 at the end only, -1 never",
    "load_best_model_at_end": "the last checkpoint is the model; --save_steps=N keeps others",
    "logging_steps": "every step is logged, in metrics.jsonl",
    "loss_agg_mode": AGGREGATION,
    "loss_type": "the objective says it: --objective=dr_grpo, grpo, dapo, ...",
    "importance_sampling_level": '--objective=gspo is "sequence", the others are "token"',
    "use_bias_correction_kl": "--kl_loss_type=k2 has the gradient of True (with ratios per token) "
    "at one update a batch, k3 that of False",
    "use_adaptive_entropy": "--maxent_target_weight_entropy steers the entropy of the weights",
    "entropy_target": "--maxent_target_weight_entropy is a target for the weights of a group",
    "entropy_coef": BONUS,
    "entropy_coeff": BONUS,
    "dynamic_sampling": RESAMPLE,
    "filter_groups": RESAMPLE,
    "adam_epsilon": "--optimizer_options.eps=1e-8 sets it",
    "lora_alpha": "it is always 2 * lora_rank",
    "peft_config": "adapters have a rank: --lora_rank=32",
    "use_peft": "adapters have a rank: --lora_rank=32, and 0 is none",
    "lora_target_modules": "all linear layers but the vocabulary head have adapters",
    "lora_dropout": "nothing is dropped while a model trains",
    "disable_dropout": "nothing is dropped while a model trains",
    "load_in_4bit": "weights are --dtype=bfloat16 or float32",
    "trust_remote_code": "a model's own code is not run",
    "model_init_kwargs": "of a model, --model and --dtype can be set",
    "deepspeed": "--zero_stage=0 to 3; train.py:deepspeed_config has the rest",
    "fp16": "the type of the model is --dtype=bfloat16 or float32",
    "attn_implementation": "packed rows need an attention of their own, see packing.py",
    "vllm_importance_sampling_clip_min": "ratios have no lower bound here",
    "vllm_importance_sampling_correction": "--importance_sampling=none turns it off",
    "vllm_max_model_length": "it is max_prompt_length + max_completion_length",
    "top_entropy_quantile": "all tokens count",
    "shuffle_dataset": "rows come in shuffled passes, by --seed",
    "data_seed": "--seed orders the rows too",
    "repetition_penalty": WHOLE,
    "generation_kwargs": f"{WHOLE}; {ENDS}",
    "min_tokens": WHOLE,
    "stop": ENDS,
    "stop_strings": ENDS,
    "stop_token_ids": ENDS,
    "generation_batch_size": "--prompts_per_step says how many groups are sampled at once, and "
    "each of --num_iterations updates takes all of them",
    "num_train_epochs": "a run has a number of steps: --max_steps",
    "per_device_train_batch_size": "--prompts_per_step counts over all ranks, and "
    "--max_tokens_per_micro_batch says what one forward takes",
    "gradient_accumulation_steps": "as many micro-batches are made as a step needs, see "
    "--max_tokens_per_micro_batch",
    "steps_per_generation": "--num_iterations updates are made on the whole batch",
    "use_vllm": '--rollout_engine="vllm", "server" or "hf"',
    "bf16": "the type of the model is --dtype=bfloat16",
    "top_p": WHOLE,
    "top_k": WHOLE,
    "min_p": WHOLE,
    "vllm_mode": '--rollout_engine="vllm" runs in this process, "server" talks to others',
    "sync_ref_model": REFERENCE,
    "ref_model_sync_steps": REFERENCE,
    "ref_model_mixup_alpha": REFERENCE,
    "gamma": CRITIC,
    "lam": CRITIC,
    "algorithm.gamma": CRITIC,
    "algorithm.lam": CRITIC,
    "mask_truncated_completions": "completions that were cut off count like others; the reward "
    "soft_overlong makes long ones worth less",
    "ppo_mini_batch_size": "--num_iterations updates are made on the whole batch",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "--num_iterations updates are made on the whole "
    "batch",
    "actor_rollout_ref.actor.loss_agg_mode": AGGREGATION,
    "actor_rollout_ref.actor.use_kl_loss": KL,
    "actor_rollout_ref.actor.kl_loss_coef": KL,
    "actor_rollout_ref.actor.entropy_coeff": BONUS,
    "algorithm.adv_estimator": f"{AGGREGATION}; rloo is an objective of your own (README.md)",
    "algorithm.norm_adv_by_std_in_grpo": "--scale_rewards=group divides by the standard deviation "
    "of the group, none by nothing",
    "algorithm.use_kl_in_reward": KL,
    "algorithm.kl_ctrl.kl_coef": KL,
    "algorithm.filter_groups.enable": RESAMPLE,
    "custom_reward_function.path": REWARD,
    "custom_reward_function.name": REWARD,
    "reward_model.enable": f"there are no reward models: {REWARD}",
    "trainer.total_epochs": "a run has a number of steps: --max_steps",
}
