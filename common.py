"""Configuration, and how a script ends and shows progress: what every script here shares.

config = load_config(sys.argv[1:])     # config/default.py <- file(s) <- --key=value
"""

import ast
import difflib
import errno
import math
import os
import sys
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

import checks

ROOT = Path(__file__).resolve().parent
# of a collective, in which ranks wait for each other: longer than anything that one may do alone (rollout servers that start, rewards that hang, the
# hash of a large checkpoint, the last upload: an hour). A rank that dies is noticed at once, by its connections or by torchrun
DEADLINE = timedelta(hours=3)
ALIASES = {"init_kl_coeff": "beta"}  # older names of the research code -> ours


class UserError(ValueError):
    """Something the user can put right. Scripts print it as one sentence and exit with status 2."""


class RunStopped(RuntimeError):
    """A run that must not go on, for a reason that is not a bug of the program: one sentence, exit status 1."""


def quoted(text, limit: int = 200) -> str:
    """The words of a stranger (a server, a reward, a dataset, a model) for a sentence of ours: in
    quotes and escaped, so that they can't steer a terminal or look like a line of ours, and cut."""
    text = str(text)
    return repr(text[:limit]) + ("..." if len(text) > limit else "")


def escaped(sentence: str) -> str:
    """A sentence of ours, into which a stranger's words may have slipped, as one harmless line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence)


def leave(sentence: str, status: int) -> None:
    """The end of a process after an error. Not sys.exit: other ranks may be in a collective, and the atexit handlers of the libraries would wait for them."""
    sys.stdout.flush()
    print(f"error: {escaped(sentence)}", file=sys.stderr, flush=True)
    os._exit(status)


def script(main) -> None:
    """Runs main(argv) of a script; errors that are meant for a person come without a stack of library frames."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        return print(
            f"{main.__globals__['__doc__']}\nconfig/default.py lists every key with its meaning; --key=value sets one."
        )
    try:
        main(sys.argv[1:])
    except (UserError, RunStopped) as error:
        leave(str(error), 2 if isinstance(error, UserError) else 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        leave(f"{error.filename or 'a file of the run'} could not be written: {error.strerror}", 1)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")):
            raise
        leave(
            f"another rank has died or left (its own words are above or below): {str(error).splitlines()[0]}",
            1,
        )


# --- config


def read_config_file(path) -> dict:
    """The `key = value` lines of a config file as a dict; literals only, so reading a stranger's file runs nothing."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"config file {path} can't be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{path}:{getattr(error, 'lineno', 0)}: not a config file of `key = value` lines: {error}"
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
                f"{path}:{node.lineno}: expected `key = value`, found {ast.unparse(node)[:60]!r}"
            )
        key = node.targets[0].id
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, TypeError):
            raise UserError(
                f"{path}:{node.lineno}: {key} must be a plain literal, not {ast.unparse(node.value)[:60]!r}"
            ) from None
        if key in values:
            raise UserError(f"{path}:{node.lineno}: {key} is set twice")
        values[key] = value
    return values


def merge(config: dict, values: dict, source: str) -> dict:
    """A copy of `config` with `values` on top; a key it does not know or a value of another type is a UserError naming `source`."""
    merged = dict(config)
    for name, value in values.items():
        key = ALIASES.get(name, name)
        if name != key and key in values:
            raise UserError(f"{source}: {key} is set twice, once by its older name {name}")
        if key not in config:
            near = difflib.get_close_matches(key, config, n=1)
            raise UserError(
                f"{source}: unknown key {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "; config/default.py lists all keys")
            )
        merged[key] = coerce(value, config[key], f"{source}: {name}")
    return merged


def coerce(value, default, where: str):
    """`value` in the type of `default`: ints may stand for floats, "inf" is a float, True is not a number."""
    kind = type(default)
    if kind is float and isinstance(value, str) and value in ("inf", "Infinity"):
        return math.inf
    if kind is float and type(value) is int:
        return float(value)
    if (
        kind is dict and type(value) is dict
    ):  # JSON, such as a run's config.json, turns the steps of a schedule into text
        return {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
    if type(value) is not kind:
        raise UserError(
            f"{where} must be of type {kind.__name__} like {default!r}, not {type(value).__name__} {value!r}"
        )
    if kind is float and math.isnan(value):
        raise UserError(f"{where} is not a number")
    return value


def read_flag(argument: str, defaults: dict) -> dict:
    """{key: value} of one --key=value; strings need no quotes."""
    key, equals, text = argument[2:].partition("=")
    if not equals or not argument.startswith("--"):
        raise UserError(
            f"{argument}: write --key=value, in one word: --{argument.lstrip('-').partition('=')[0] or 'key'}=..."
        )
    if isinstance(defaults.get(ALIASES.get(key, key)), str):
        return {key: text}
    try:
        return {key: ast.literal_eval(text)}
    except (ValueError, SyntaxError, TypeError):
        return {key: text}  # merge() says which type was expected


def load_config(argv) -> dict:
    """The resolved and checked config: config/default.py, then the files of `argv`, then its --key=value, whatever their order."""
    defaults = read_config_file(ROOT / "config" / "default.py")
    config = dict(defaults)
    flags = [
        read_flag(a, defaults) for a in argv if a.startswith("-")
    ]  # before the files: in "--seed 3" the 3 is no file
    for path in [a for a in argv if not a.startswith("-")]:
        config = merge(config, read_config_file(path), path)
    for flag in flags:
        config = merge(config, flag, "command line")
    check_config(config)
    return config


def check_config(c: dict) -> None:
    """UserError with the first claim of checks.py that does not hold."""
    for holds, sentence in checks.claims(c):
        if not holds:
            raise UserError(sentence)


def refuse_missing_folder(model: str) -> None:
    """A path is no hub id: where it leads nowhere the hub need not be asked."""
    if model.startswith(("/", "./", "../", "runs/")) and not Path(model).is_dir():
        raise UserError(
            f"model={model!r} is not a folder; a model in runs/ comes from sft.py or train.py, the first lines of its config say how"
        )


def progress(**settings) -> tqdm:
    """A progress bar; into a file, where nobody sees it move, a line every half a minute."""
    line = "{desc}{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]\n"
    calm = {} if sys.stderr.isatty() else {"mininterval": 30, "maxinterval": 60, "bar_format": line}
    return tqdm(dynamic_ncols=True, **calm, **settings)
