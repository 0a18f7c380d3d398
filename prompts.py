"""Prompts as the model sees them: chat templates, and rows turned into token ids, once.

    rows = encode_prompts(rows, tokenizer, config)     # with "prompt_ids"

A row's "prompt" is either the user's text, or a conversation: a list of messages {"role",
"content"} that ends with the user's. Only the first section of this file knows the difference.
"""

import hashlib
import re
from array import array
from collections.abc import Iterable
from datetime import date, time, timedelta
from functools import cached_property
from numbers import Number
from pathlib import Path
from types import NoneType

from common import (
    LONGEST_CONFIG,
    UserError,
    error_text,
    in_one_line,
    launched_rank,
    progress,
    quoted,
    say_on_rank_0,
)

ADDED = ("prompt_ids", "uncut_prompt")  # what encode_prompts() adds to a row
# types whose repr() tells all of a value and nothing of the process
STABLE = (str, bytes, bool, float, complex, NoneType, Number, date, time, timedelta)

# --- what a prompt is: the user's text, or a list of chat messages

ROLES = ("system", "user", "assistant")
MOST_MESSAGES = 1000  # in a conversation: a template goes through all of them


def prompt_fault(prompt) -> str:
    """What is wrong with a row's prompt, as the end of a sentence that begins "the prompt"; "" if
    nothing is."""
    if is_blank(prompt):
        return "is empty or white space: give it a text, or leave the row out"
    if isinstance(prompt, str):
        return ""
    if not isinstance(prompt, list):
        kind = type(prompt).__name__
        return (
            f"must be text or a list of chat messages, not a {kind}: name a column that holds only "
            f"the question, to which the chat template is then applied"
        )
    if not 0 < len(prompt) <= MOST_MESSAGES:
        return f"is a list of {len(prompt)} messages; it must hold 1 to {MOST_MESSAGES}"
    for i, message in enumerate(prompt):
        if fault := message_fault(i, message):
            return f"is a list of messages whose number {i + 1} {fault}"
    last = prompt[-1]
    if last["role"] != "user":
        return f"ends with a message of the role {last['role']!r}; the last must be the user's"
    if is_blank(last["content"]):
        return "ends with a message of the user that is empty or white space: leave the row out"
    return ""


def is_blank(value) -> bool:
    """Whether a value is an empty text, or one of white space only."""
    return isinstance(value, str) and not value.strip()


def message_fault(i: int, message) -> str:
    """What is wrong with message i of a list, as the end of a sentence; "" if nothing is. Entries
    other than role and content are ignored."""
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        return f'must be {{"role": ..., "content": ...}}, not {quoted(message)}'
    role = message["role"]
    if role not in ROLES:
        return f"has the role {quoted(role)}; the roles are {', '.join(ROLES)}"
    if role == "system" and i > 0:
        return "is a system message, which only the first may be"
    if not isinstance(message["content"], str):
        return f"must have a text as its content, not {quoted(message['content'])}"
    return ""


def messages_of(row: dict, system_prompt: str) -> list[dict]:
    """The conversation that the assistant continues. system_prompt is put first unless the row has
    a system message of its own."""
    prompt = row["prompt"]
    given = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    messages = []
    if system_prompt and given[0]["role"] != "system":
        messages.append({"role": "system", "content": system_prompt})
    for message in given:
        messages.append({"role": message["role"], "content": message["content"]})
    return messages


def prompt_text(row: dict) -> str:
    """The user's last message. If a prompt is too long, the beginning of this text is cut."""
    return messages_of(row, "")[-1]["content"]


def with_prompt(row: dict, text: str) -> dict:
    """The row with prompt_text() replaced by `text`, which may be cut or have an InfoSeed seed."""
    if not isinstance(row.get("prompt"), list):
        return {**row, "prompt": text}
    return {**row, "prompt": [*row["prompt"][:-1], {"role": "user", "content": text}]}


def without_system_message(row: dict) -> dict:
    prompt = row["prompt"]
    if isinstance(prompt, list) and prompt[0]["role"] == "system":
        return {**row, "prompt": prompt[1:]}
    return row


def prompt_identity(row: dict, system_prompt: str = "") -> str:
    """A text that is equal for equal prompts: the whole conversation, or only the user's text if
    there is nothing else."""
    messages = messages_of(row, system_prompt)
    if len(messages) == 1:
        return prompt_text(row)
    # NUL marks the roles, so that no user's text can look like a conversation
    return " ".join(f"\0{message['role']}\0 {message['content']}" for message in messages)


def prompt_key(row: dict, system_prompt: str = "") -> str:
    """A hash that ignores white space but not case, because a change of case gives the model
    another prompt. The replay buffer recognises prompts by it."""
    words = prompt_identity(row, system_prompt).split()
    # surrogatepass: a row of somebody's task may hold half a surrogate pair, which is not UTF-8
    return hashlib.sha256(" ".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def with_uncut(row: dict) -> list[dict]:
    """The row and, if encode_prompts() has cut its prompt, the same row with the whole prompt: the
    problem is the same."""
    if "uncut_prompt" not in row:
        return [row]
    return [row, row | {"prompt": row["uncut_prompt"]}]


# --- whether two processes, or two launches, have the same rows


def prompts_hash(rows: list[dict]) -> str:
    """A hash of the rows' prompts, as the model gets them, and of their order. It shows a resumed
    run that its data have changed, and ranks that theirs differ."""
    # -1 ends each
    return hash_of(array("q", [*row["prompt_ids"], -1]).tobytes() for row in rows)


def answers_hash(rows: list[dict]) -> str:
    """The same for all that rewards read of the rows: two nodes' copies of a dataset may differ in
    this alone, or an answer may be corrected between two launches."""
    return hash_of(stable_text(without_added(row)).encode() for row in rows)


def hash_of(parts: Iterable[bytes]) -> str:
    """A hash of byte strings and their order."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:16]


def without_added(row: dict) -> dict:
    """What rewards read of a row: all but what encode_prompts() adds."""
    return {key: value for key, value in row.items() if key not in ADDED}


def stable_text(value) -> str:
    """A value as a text that is the same in every process. Containers are sorted, because what was
    made from a set has another order in each process. An object that might print its address is
    only its type."""
    if hasattr(value, "tolist"):  # numpy's
        value = value.tolist()
    if isinstance(value, dict):
        pairs = [f"{stable_text(key)}:{stable_text(content)}" for key, content in value.items()]
        return "{" + ",".join(sorted(pairs)) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ",".join(sorted(map(stable_text, value))) + "]"
    if type(value) is int:
        return hex(value)  # repr() refuses more than 4,300 digits
    if isinstance(value, STABLE):
        return repr(value)
    return type(value).__name__


# --- which prompts a model may have learnt

TRAINED = "trained_prompts.txt"  # in a model's folder: prompt_keys(), one a line
MOST_KEYS = 2**24  # in a list: we write none that is longer
OUR_FILES = ("train_config.json", "sft.json")  # a folder with a model of ours has one of them


def prompt_keys(rows: list[dict]) -> set[str]:
    """prompt_key() of every row without its system message, and of the whole prompt of those that
    encode_prompts() has cut."""
    keys = set()
    for row in rows:
        for whole in with_uncut(row):
            keys.add(prompt_key(without_system_message(whole)))
    return keys


def write_trained(folder: Path, keys: set[str] | None) -> None:
    """Writes the list. None, for unknown keys, writes nothing: an incomplete list would pass for a
    complete one."""
    if keys is not None:
        (folder / TRAINED).write_text("".join(f"{key}\n" for key in sorted(keys)))


def read_trained(folder) -> set[str] | None:
    """The keys of all prompts that the model in this folder may have been trained on, by the run
    that saved it and by earlier ones. Empty if the model is somebody else's. None (unknown) if it
    is ours but has no list: an earlier version made it, or somebody removed the list. UserError if
    the file is not such a list."""
    path = Path(folder) / TRAINED
    if not path.is_file():
        return None if any((Path(folder) / name).exists() for name in OUR_FILES) else set()
    keys = set()
    try:
        with open(path, "rb") as file:
            for _ in range(MOST_KEYS + 1):
                line = file.read(17)  # a key and the line's end
                if not line:
                    return keys
                if not re.fullmatch(b"[0-9a-f]{16}\n", line):
                    break
                keys.add(line[:16].decode())
        why = "it is not a list that train.py or sft.py wrote"
    except OSError as error:
        why = error.strerror
    raise UserError(f"{path} can't be read ({why}): remove it to go on without it")


def with_trained(keys: set[str] | None, folder) -> set[str] | None:
    """The keys, and those of the model in a folder; None if one of them is unknown."""
    known = read_trained(folder)
    return None if keys is None or known is None else keys | known


def leakage_warning(rows: list[dict], model) -> str:
    """A warning if `model`, a folder, may have learnt from some of the evaluation rows; "" if it
    has not, or if it is somebody else's model, of which nothing is known."""
    trained = read_trained(model) if rows else set()
    if trained is None:
        return (
            f"warning: {model}, or the model it began with, has no list of its training prompts "
            f"({TRAINED}): whether it has learnt the answers to some of these {len(rows)} "
            f"evaluation prompts is unknown"
        )
    count = sum(not trained.isdisjoint(prompt_keys([row])) for row in rows)
    if not count:
        return ""
    return (
        f"warning: {count} of these {len(rows)} evaluation prompts are training prompts of {model} "
        f"({TRAINED}): it may have learnt their answers"
    )


# --- chat templates


def render_prompt(row: dict, tokenizer, c: dict) -> str:
    """The prompt's text as the model sees it: the chat template up to the beginning of the
    assistant's turn, or the bare text for a base model. Of c, only system_prompt and
    chat_template_kwargs are read."""
    messages = messages_of(row, c["system_prompt"])
    if not tokenizer.chat_template:
        return bare_text(row, messages)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **c["chat_template_kwargs"]
        )
    except Exception as error:  # some refuse a system prompt; a template is a program
        raise UserError(
            f"the chat template can't render row {row['id']!r} with "
            f"system_prompt={c['system_prompt']!r} and "
            f"chat_template_kwargs={c['chat_template_kwargs']!r}: {error_text(error)}"
        ) from None


def bare_text(row: dict, messages: list[dict]) -> str:
    """The prompt for a base model, which knows no roles: the system prompt and the question,
    joined."""
    turns = [message for message in messages if message["role"] != "system"]
    if len(turns) > 1:
        raise UserError(
            f"row {row['id']!r} is a conversation of {len(turns)} turns, and a model without a "
            f"chat template can't tell them apart: --chat_template gives it one"
        )
    return "".join(message["content"] for message in messages)


def check_template_kwargs(tokenizer, kwargs: dict) -> None:
    """UserError for an entry of chat_template_kwargs that the template does not read, and so would
    silently ignore."""
    for name in kwargs:
        if not tokenizer.chat_template:
            raise UserError(
                f"chat_template_kwargs: {name!r} is for a chat template, and the model has none"
            )
        # "reads" means that the name occurs as a word anywhere in the template
        if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()):
            raise UserError(f"chat_template_kwargs: the chat template does not read {name!r}")


def set_chat_template(tokenizer, template: str) -> None:
    """Sets and checks a tokenizer's chat template. template: the template itself, or a file with
    one."""
    if "{" not in template:  # every template has braces, so this is a path
        try:
            # utf-8-sig: without the byte order mark that Windows puts at the beginning
            with open(template, encoding="utf-8-sig") as file:
                template = file.read(LONGEST_CONFIG + 1)  # the file may have no end
        except (OSError, ValueError) as error:  # no such file, not a path, not text
            raise UserError(
                f"chat_template={template!r} is neither a template (it has no braces) nor a "
                f"readable file: {getattr(error, 'strerror', None) or error}"
            ) from None
    if len(template) > LONGEST_CONFIG:
        raise UserError(f"chat_template is longer than {LONGEST_CONFIG} characters")
    # before the check, which renders a message with it
    tokenizer.chat_template = template
    check_chat_template(tokenizer, "chat_template")


def check_chat_template(tokenizer, what: str) -> None:
    """UserError, beginning with `what`, if the template fails or leaves out the user's message."""
    user = [{"role": "user", "content": "\0"}]  # NUL: no template contains it
    try:
        text = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program, so it may raise anything
        raise UserError(f"{what} can't be used: {error_text(error)}") from None
    if "\0" not in text:
        raise UserError(
            f"{what} leaves the user's message out: it must write messages[i]['content']"
        )


def check_turns(rows: list[dict], tokenizer, c: dict) -> None:
    """UserError if the chat template silently leaves out a message, such as the system prompt or an
    earlier turn. Tried once for each sequence of roles that rows have."""
    if not tokenizer.chat_template:
        return
    tried = {("user",)}  # by check_chat_template()
    for row in rows:
        messages = messages_of(row, c["system_prompt"])
        roles = tuple(message["role"] for message in messages)
        if roles in tried:
            continue
        tried.add(roles)
        marked = [{"role": role, "content": "\0"} for role in roles]
        written = render_prompt({"id": row["id"], "prompt": marked}, tokenizer, c).count("\0")
        if written < len(marked):
            has_system_prompt = len(marked) > len(messages_of(row, ""))
            raise UserError(
                f"the chat template leaves out {len(marked) - written} of the {len(marked)} "
                f"messages of row {quoted(row['id'])}, whose roles are {', '.join(roles)}"
                + (" (the first is system_prompt)" if has_system_prompt else "")
                + ": set another template with --chat_template"
            )


def closing_token(tokenizer) -> tuple[int | None, str]:
    """The token with which the chat template ends the assistant's turn, and ""; or None, and a
    sentence that says why there is none."""
    if not tokenizer.chat_template:
        return None, "a base model: no chat template"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\0"}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # a template is a program
        return None, f"the chat template takes no assistant message: {in_one_line(error, 300)}"
    _, marker, rest = text.rpartition("\0")
    if not marker:
        return None, "the chat template leaves the assistant's message out"
    # only the first token: Qwen's template writes a newline after it
    end = tokenizer(rest.lstrip() or rest, add_special_tokens=False)["input_ids"][:1]
    if not end:
        return None, "the chat template ends a turn with nothing"
    return end[0], ""


def end_of_turn(tokenizer, stop_ids: list[int]) -> str:
    """A sentence about the token with which the chat template ends the assistant's turn. It begins
    with "warning" if that token does not end a completion."""
    token, none = closing_token(tokenizer)
    if token is None:
        return none
    sentence = f"the chat template ends a turn with {tokenizer.decode([token])!r}"
    if token in stop_ids:
        return sentence
    return f"warning: {sentence}, which does not end a completion"


# --- token ids


AT_ONCE = 1000  # texts in a call of the tokenizer, which takes them in parallel
PATIENCE = 10  # seconds without a progress bar: most data are ready by then


def tokenise(texts: list[str], tokenizer) -> list[list[int]]:
    """The token ids of each text. A chat template writes special tokens itself; for a base model
    the tokenizer adds them."""
    return token_ids(texts, tokenizer, special=not tokenizer.chat_template)


def token_ids(texts: list[str], tokenizer, special: bool) -> list[list[int]]:
    """The token ids of each text. special: whether the tokenizer adds special tokens."""
    ids = []
    # until it returns, a call needs several times the memory of the ids, and there may be millions
    for start in with_bar(range(0, len(texts), AT_ONCE), "tokenised", scale=AT_ONCE):
        part = texts[start : start + AT_ONCE]
        ids += tokenizer(part, add_special_tokens=special)["input_ids"]
    return ids


def with_bar(items, what: str, scale: int = 1):
    """The items, one after the other, with a progress bar on rank 0 for what takes longer than
    PATIENCE. what: what is done to them; scale: the texts in an item.

    No bar for few of them, as in every step: even one that shows nothing has a thread and a lock,
    which a process that is killed may hold for ever."""
    if len(items) * scale <= AT_ONCE or launched_rank() > 0:
        return items
    in_texts = scale if scale > 1 else False  # tqdm takes 1 for k, M, ...
    desc = f"{what}: "
    return progress(iterable=items, desc=desc, unit="text", unit_scale=in_texts, delay=PATIENCE)


RARE = "\U00010000"  # Linear B: only a vocabulary of bytes, which holds every character, knows it


def unknown_characters(texts: list[str], tokenizer) -> set[str]:
    """The characters of the texts that the tokenizer has no token for: it silently leaves them out,
    or gives all of them the same token. White space and characters without width are not told of,
    because a tokenizer may leave them out on purpose."""

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def is_token(character: str) -> bool:
        ids = ids_of(character)
        return bool(ids) and tokenizer.unk_token_id not in ids

    def matters(character: str, text: str) -> bool:
        """To the ids of this text: a vocabulary may hold it only within words or special tokens."""
        before, _, after = text.partition(character)
        before, after = before[-100:], after[:100]  # enough of a long text to hold a token
        ids = ids_of(before + character + after)
        return ids not in (ids_of(before + after), ids_of(before + RARE + after))

    try:
        if is_token(RARE):
            return set()
    except Exception:  # a tokenizer without an unknown token refuses what it does not know
        return set()
    shown = set(filter(str.isprintable, set().union(*texts))) - {" "}
    doubtful = {character for character in shown if not is_token(character)}
    first_text = {}  # {character: the first text that holds it}
    if doubtful:
        for text in texts:
            for character in doubtful.intersection(text) - first_text.keys():
                first_text[character] = text
    return {character for character, text in first_text.items() if not matters(character, text)}


def warn_of_unknown(texts: list[str], tokenizer, what: str) -> None:
    """Warns of characters that the model will not see. what: such as "prompts"."""
    unknown = unknown_characters(texts, tokenizer)
    if unknown:
        count = sum(not unknown.isdisjoint(text) for text in texts)
        say_on_rank_0(
            f"warning: the tokenizer has no token for {quoted(''.join(sorted(unknown)), 20)}: the "
            f"model does not see these characters in {count} of {len(texts)} {what}: use other "
            f"characters, or another model"
        )


def check_known(ids: list[int], tokenizer, vocab_size: int, what: str) -> None:
    """UserError if token ids lie beyond a model's vocabulary: a tokenizer may have special tokens
    that its model lacks, and any text may contain one. what: such as "row 'a': its prompt"."""
    last = max(ids, default=0)
    if last >= vocab_size:
        raise UserError(
            f"{what} holds {tokenizer.decode([last])!r}, which is number {last} of the tokenizer, "
            f"but the model's config.json has vocab_size={vocab_size}"
        )


def encode_prompts(rows: list[dict], tokenizer, c: dict, seeds: bool = False) -> list[dict]:
    """New rows with "prompt_ids". What happens to a prompt longer than max_prompt_length tokens
    depends on long_prompts. "error": UserError. "drop": it is left out. "truncate": the beginning
    of the user's message is cut, never the system prompt or the assistant's header. The numbers of
    dropped and truncated prompts are printed.

    seeds: the prompts with an InfoSeed seed in them must fit as well."""
    check_template_kwargs(tokenizer, c["chat_template_kwargs"])
    check_turns(rows, tokenizer, c)
    encoder = Encoder(tokenizer, c, seeds)
    encoded, sizes = encoder.encode_all(rows)
    for row, size in zip(encoded, sizes):
        if size == 0:
            raise UserError(
                f"row {row['id']!r}: the tokenizer makes no token of its prompt "
                f"{quoted(prompt_text(row), 60)}"
            )
    # the usual case: all prompts fit
    if max(sizes) <= encoder.limit:
        return encoded

    sentence = encoder.sentence(rows, sizes)
    if c["long_prompts"] == "error":
        raise UserError(
            f"{sentence}; raise max_prompt_length, leave them out with --long_prompts=drop or "
            f"shorten them with --long_prompts=truncate"
        )
    kept = []
    cut = 0
    for row, size in zip(encoded, sizes):
        if size <= encoder.limit:
            kept.append(row)
        elif c["long_prompts"] == "truncate":
            shorter = encoder.cut_left(row)
            if shorter:
                kept.append(shorter)
                cut += 1
    if not kept:
        without = " even without the users' messages" if c["long_prompts"] == "truncate" else ""
        raise UserError(f"{sentence}: nothing is left{without}; raise max_prompt_length")
    say_on_rank_0(
        f"{sentence}: {cut} have lost the beginning of the user's message, "
        f"{len(rows) - len(kept)} are left out"
    )
    return kept


class Encoder:
    """Turns rows into token ids, and knows how many tokens each row needs at most."""

    def __init__(self, tokenizer, c: dict, seeds: bool):
        self.tokenizer = tokenizer
        self.config = c
        self.limit = c["max_prompt_length"]
        # 0 seeds: InfoSeed is off
        self.seeds = seeds and c["info_seed_num_seeds"] > 0

    def render(self, row: dict) -> str:
        return render_prompt(row, self.tokenizer, self.config)

    def encode_all(self, rows: list[dict]) -> tuple[list[dict], list[int]]:
        """Rows with "prompt_ids", and the number of tokens that each needs."""
        texts = []
        for row in with_bar(rows, "rendered"):
            texts.append(self.render(row))
        warn_of_unknown(texts, self.tokenizer, "prompts")
        all_ids = tokenise(texts, self.tokenizer)
        encoded = [{**row, "prompt_ids": ids} for row, ids in zip(rows, all_ids)]
        return encoded, [self.size(row, row["prompt_ids"]) for row in encoded]

    def size(self, row: dict, ids: list[int]) -> int:
        """Tokens of the prompt or, if that is longer, of its longest version with a seed. ids: the
        prompt's without a seed."""
        if not self.seeds or len(ids) + self.seed_room <= self.limit:
            # surely short enough: no need to render it again with every seed
            return len(ids)
        return max(len(ids), self.longest_seeded(row))

    def longest_seeded(self, row: dict) -> int:
        return max(map(len, seed_prompts(row, self.tokenizer, self.config)))

    @cached_property
    def seed_room(self) -> int:
        """An upper bound for the tokens that a seed adds to a prompt: twice the number measured on
        one prompt, plus 64, because other text is split into other tokens."""
        row = with_prompt({"id": ""}, "1")  # any prompt will do
        (ids,) = tokenise([self.render(row)], self.tokenizer)
        # too high a bound costs some renderings; too low a bound would let a long prompt pass
        return 2 * (self.longest_seeded(row) - len(ids)) + 64

    def sentence(self, rows: list[dict], sizes: list[int]) -> str:
        """A sentence: how many rows are too long, and which is the longest. sizes: from
        encode_all()."""
        too_long = [size for size in sizes if size > self.limit]
        most = max(sizes)
        worst = rows[sizes.index(most)]
        seeded = " with its seed" if self.seeds else ""
        return (
            f"max_prompt_length={self.limit}: {len(too_long)} of {len(rows)} prompts are longer; "
            f"the longest, row {worst['id']!r}, has {most} tokens{seeded}"
        )

    def cut_left(self, row: dict) -> dict | None:
        """The row with as much of the end of its prompt as fits; None if not even a token fits."""
        text_ids = self.tokenizer(prompt_text(row), add_special_tokens=False)["input_ids"]
        # number of the text's tokens that are kept; it falls in each round
        keep = min(len(text_ids), self.limit)
        while keep > 0:
            text = self.tokenizer.decode(text_ids[-keep:])
            # lstrip: a character that was cut in two leaves a replacement character
            shorter = with_prompt(row, text.lstrip("\ufffd"))
            (ids,) = tokenise([self.render(shorter)], self.tokenizer)
            excess = self.size(shorter, ids) - self.limit
            if excess <= 0:
                if is_blank(prompt_text(shorter)):
                    return None
                # uncut_prompt: see with_uncut()
                return {**shorter, "prompt_ids": ids, "uncut_prompt": row["prompt"]}
            # a loop, because the shorter text may be split into other tokens within the template
            keep -= max(1, excess)
        return None


# --- InfoSeed


def seed_prompts(row: dict, tokenizer, c: dict) -> list[list[int]]:
    """The token ids of a row's prompt for every InfoSeed seed."""
    texts = []
    for text in seed_texts(prompt_text(row), c):
        texts.append(render_prompt(with_prompt(row, text), tokenizer, c))
    return tokenise(texts, tokenizer)


def seed_texts(text: str, c: dict) -> list[str]:
    """The user's text for every seed: info_seed_prompt_template with {seed} and {prompt} filled in.
    A template without {prompt} is added below the text."""
    template = c["info_seed_prompt_template"]
    if "{prompt}" not in template:
        template = "{prompt}\n" + template
    parts = template.split("{prompt}")  # not str.format: a prompt may hold braces itself
    texts = []
    for z in range(c["info_seed_num_seeds"]):
        filled = [part.replace("{seed}", str(z)) for part in parts]
        texts.append(text.join(filled))
    return texts


def warn_of_seeds(tokenizer, c: dict) -> None:
    """Warns of characters of info_seed_prompt_template that the model will not see."""
    warn_of_unknown(seed_texts("", c), tokenizer, "prompts with a seed (info_seed_prompt_template)")
