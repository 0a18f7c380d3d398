"""Prompts as the model sees them: its chat template, and rows turned into token ids once.

    rows = encode_prompts(rows, tokenizer, config)     # with "prompt_ids"

A row's "prompt" is a text that the user says, or a conversation: a list of messages {"role",
"content"} of which the last is the user's. What that means stands in the first part of this file;
all else asks there.
"""

import hashlib
import math
import re
from collections import Counter
from functools import cached_property
from pathlib import Path

from common import UserError, in_one_line, quoted, say_once

# --- what a prompt is: a text that the user says, or a list of chat messages

ROLES = ("system", "user", "assistant")
MOST_MESSAGES = 1000  # of a conversation: a template goes through all of them


def prompt_fault(prompt) -> str:
    """What is wrong with a row's prompt, as a sentence goes on; "" for nothing."""
    if isinstance(prompt, str):
        return ""
    if not isinstance(prompt, list):
        kind = type(prompt).__name__
        return (
            f"must be text or a list of chat messages, not a {kind}: name a column that holds the "
            f"question alone; the chat template is put around it here"
        )
    if not 0 < len(prompt) <= MOST_MESSAGES:
        return f"is a list of {len(prompt)} messages; it must hold 1 to {MOST_MESSAGES}"
    for i, message in enumerate(prompt):
        if fault := message_fault(i, message):
            return f"is a list of messages whose number {i + 1} {fault}"
    last = prompt[-1]
    if last["role"] != "user":
        return f"ends with a message of the role {last['role']!r}; the last must be the user's"
    if not last["content"]:
        return "ends with a message of the user that is empty"
    return ""


def message_fault(i: int, message) -> str:
    """What is wrong with message i of a list; "" for nothing. Entries of it beside role and content
    are not read."""
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        return f'must be {{"role": ..., "content": ...}}, not {quoted(message)}'
    role = message["role"]
    if role not in ROLES:
        return f"has the role {quoted(role)}; there are {', '.join(ROLES)}"
    if role == "system" and i > 0:
        return "is the system's, which only the first may be"
    if not isinstance(message["content"], str):
        return f"must have a text as its content, not {quoted(message['content'])}"
    return ""


def messages_of(row: dict, system_prompt: str) -> list[dict]:
    """The conversation that the assistant continues. A system message of its own wins."""
    prompt = row["prompt"]
    given = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    messages = []
    if system_prompt and given[0]["role"] != "system":
        messages.append({"role": "system", "content": system_prompt})
    for message in given:
        messages.append({"role": message["role"], "content": message["content"]})
    return messages


def prompt_text(row: dict) -> str:
    """What the user says last, of which the beginning is cut where a prompt is too long."""
    return messages_of(row, "")[-1]["content"]


def with_prompt(row: dict, text: str) -> dict:
    """The row with another text in the place of prompt_text: cut, or with an InfoSeed seed."""
    if not isinstance(row.get("prompt"), list):
        return {**row, "prompt": text}
    return {**row, "prompt": [*row["prompt"][:-1], {"role": "user", "content": text}]}


def prompt_identity(row: dict) -> str:
    """Equal for equal prompts: the whole conversation, or the text of one that is nothing else."""
    messages = messages_of(row, "")
    if len(messages) == 1:
        return prompt_text(row)
    # NUL, so that no text looks like it; between spaces, which prompt_key evens out
    return " ".join(f"\0{message['role']}\0 {message['content']}" for message in messages)


def prompt_key(row: dict) -> str:
    """The same for prompts that differ in spaces and case only: how replay knows them again."""
    words = prompt_identity(row).lower().split()
    # JSON can hold half a character, which is no UTF-8
    return hashlib.sha256(" ".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:16]


# --- chat templates


def render_prompt(row: dict, tokenizer, c: dict) -> str:
    """The prompt as the model sees it: its chat template with the assistant's turn opened, or the
    bare text for a base model. c: system_prompt and chat_template_kwargs are read."""
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
            f"chat_template_kwargs={c['chat_template_kwargs']!r}: "
            f"{type(error).__name__}: {in_one_line(error, 300)}"
        ) from None


def bare_text(row: dict, messages: list[dict]) -> str:
    """The prompt of a base model, which knows no roles: system prompt and question."""
    turns = [message for message in messages if message["role"] != "system"]
    if len(turns) > 1:
        raise UserError(
            f"row {row['id']!r} is a conversation of {len(turns)} turns, and a model without a "
            f"chat template can't tell them apart: --chat_template gives it one"
        )
    return "".join(message["content"] for message in messages)


def check_template_kwargs(tokenizer, kwargs: dict) -> None:
    """UserError for one of chat_template_kwargs that nothing reads: a template passes over it."""
    for name in kwargs:
        if not tokenizer.chat_template:
            raise UserError(
                f"chat_template_kwargs: {name!r} is for a chat template, and the model has none"
            )
        # as a word anywhere in it: which branch reads it is the template's business
        if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()):
            raise UserError(f"chat_template_kwargs: the chat template does not read {name!r}")


def set_chat_template(tokenizer, template: str) -> None:
    """template: the template itself, or a file with one."""
    if "{" not in template:  # no template does without braces: it is a path
        try:
            template = Path(template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # no such file, no path at all, no text
            raise UserError(
                f"chat_template={template!r} is neither a template (it has no braces) nor a "
                f"readable file: {getattr(error, 'strerror', None) or error}"
            ) from None
    # before the check, which renders a message with it
    tokenizer.chat_template = template
    check_chat_template(tokenizer, "chat_template")


def check_chat_template(tokenizer, what: str) -> None:
    """UserError, beginning with `what`, for a template that fails or leaves the user out."""
    user = [{"role": "user", "content": "\0"}]  # which no template writes by itself
    try:
        text = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: jinja2 has a dozen kinds, `1/0` its own
        raise UserError(
            f"{what} can't be used: {type(error).__name__}: {in_one_line(error, 300)}"
        ) from None
    if "\0" not in text:
        raise UserError(
            f"{what} leaves the user's message out: it must write messages[i]['content']"
        )


def end_of_turn(tokenizer, stop_ids: list[int]) -> str:
    """A sentence on whether the chat template ends the assistant's turn with a token that ends
    completions."""
    if not tokenizer.chat_template:
        return "a base model: no chat template"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\0"}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # a template is a program
        return f"the chat template takes no assistant's message: {in_one_line(error, 300)}"
    _, found, rest = text.rpartition("\0")
    if not found:
        return "the chat template leaves the assistant's message out"
    # only the first token: Qwen's writes a newline behind its own
    end = tokenizer(rest.lstrip() or rest, add_special_tokens=False)["input_ids"][:1]
    if not end:
        return "the chat template ends a turn with nothing"
    sentence = f"the chat template ends a turn with {tokenizer.decode(end)!r}"
    if end[0] in stop_ids:
        return sentence
    return f"warning: {sentence}, which does not end a completion"


# --- token ids


def tokenise(texts: list[str], tokenizer) -> list[list[int]]:
    """A chat template writes its special tokens itself; a base model's tokenizer adds them."""
    return tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]


def encode_prompts(rows: list[dict], tokenizer, c: dict, seeds: bool = False) -> list[dict]:
    """New rows with "prompt_ids". Prompts over max_prompt_length tokens are a UserError
    (long_prompts="error"), are left out ("drop"), or lose the beginning of the user's message,
    never the system prompt or the assistant's header ("truncate"); the last two are counted on the
    console.

    seeds: the prompts with an InfoSeed seed in them must fit as well."""
    check_template_kwargs(tokenizer, c["chat_template_kwargs"])
    encoder = Encoder(tokenizer, c, seeds)
    encoded, sizes = encoder.encode_all(rows)
    # the usual case: nothing to say
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
        raise UserError(f"{sentence}: nothing is left{without}")
    say_once(
        f"{sentence}: {cut} have lost the beginning of the user's message, "
        f"{len(rows) - len(kept)} are left out"
    )
    return kept


class Encoder:
    """Rows to token ids, and how many tokens a row needs at most."""

    def __init__(self, tokenizer, c: dict, seeds: bool):
        self.tokenizer = tokenizer
        self.config = c
        self.limit = c["max_prompt_length"]
        self.characters = CharacterLimit(tokenizer, self.limit)
        # 0 seeds: InfoSeed is off
        self.seeds = seeds and c["info_seed_num_seeds"] > 0

    def render(self, row: dict) -> str:
        return render_prompt(row, self.tokenizer, self.config)

    def encode_all(self, rows: list[dict]) -> tuple[list[dict], list[float]]:
        """Rows with "prompt_ids", and the tokens that each needs: math.inf, and no ids, where a
        prompt's characters alone are too many."""
        texts = [self.render(row) for row in rows]
        endless = [self.characters.exceeded_by(text) for text in texts]
        # all in one call, which tokenises them side by side; endless ones not at all
        short = ["" if long else text for text, long in zip(texts, endless)]
        encoded = []
        sizes = []
        for row, long, ids in zip(rows, endless, tokenise(short, self.tokenizer)):
            encoded.append({**row, "prompt_ids": ids})
            sizes.append(math.inf if long else self.size(row, ids))
        return encoded, sizes

    def size(self, row: dict, ids: list[int]) -> int:
        """Tokens of the prompt, or of its longest version with a seed. ids: without one."""
        if not self.seeds or len(ids) + self.seed_room <= self.limit:
            # surely short enough, and need not be rendered again with every seed
            return len(ids)
        return max(len(ids), self.longest_seeded(row))

    def longest_seeded(self, row: dict) -> int:
        return max(map(len, seed_prompts(row, self.tokenizer, self.config)))

    @cached_property
    def seed_room(self) -> int:
        """Tokens that a seed adds to a prompt, and as much again: text splits otherwise there."""
        row = with_prompt({"id": ""}, "1")  # any will do
        (ids,) = tokenise([self.render(row)], self.tokenizer)
        # generous: too much costs a row another rendering, too little would let a long prompt pass
        return 2 * (self.longest_seeded(row) - len(ids)) + 64

    def sentence(self, rows: list[dict], sizes: list[float]) -> str:
        """How many rows are too long, and the worst of them. sizes: as of encode_all."""
        too_long = [size for size in sizes if size > self.limit]
        most = max(sizes)
        places = [i for i, size in enumerate(sizes) if size == most]
        worst = rows[places[0]]
        length = f"{most} tokens" + (" with its seed" if self.seeds else "")
        if most == math.inf:
            # all of these have infinitely many tokens: characters tell which is the longest
            worst = max((rows[i] for i in places), key=lambda row: len(prompt_identity(row)))
            length = f"{len(self.render(worst))} characters, which are more tokens than that"
        return (
            f"max_prompt_length={self.limit}: {len(too_long)} of {len(rows)} prompts are longer, "
            f"row {worst['id']!r} has {length}"
        )

    def cut_left(self, row: dict) -> dict | None:
        """The row with as much of the end of its prompt as fits; None if not even a token does."""
        text = self.characters.end_of(prompt_text(row))
        message = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        # tokens of the message that are kept, less in each round
        keep = len(message)
        while keep > 0:
            text = self.tokenizer.decode(message[len(message) - keep :])
            # of a character that is cut in two a replacement character is left
            shorter = with_prompt(row, text.lstrip("\ufffd"))
            (ids,) = tokenise([self.render(shorter)], self.tokenizer)
            excess = self.size(shorter, ids) - self.limit
            if excess <= 0:
                return {**shorter, "prompt_ids": ids} if prompt_text(shorter) else None
            # once more: joined with its surroundings the text may be split into other tokens
            keep -= max(1, excess)
        return None


class CharacterLimit:
    """Whether a text has more than `max_tokens` tokens, by its characters alone: ten megabytes take
    a minute to tokenise.

    A text that fits is never said to be longer. A token has at most as many characters as the
    longest of the vocabulary; before, normalisation (NFC) joins at most JOINED characters into one;
    and characters that the tokenizer drops, or makes one token of however many stand in a row, do
    not count: a run of each is tried."""

    JOINED = 4  # no character of Unicode is composed of more
    RUN = 4  # times the longest token: so many equal characters must be as many tokens at least

    def __init__(self, tokenizer, max_tokens: int):
        self.tokenizer = tokenizer
        self.longest = max(map(len, tokenizer.get_vocab()))
        self.most = self.JOINED * self.longest * max_tokens  # characters
        # some special tokens swallow the spaces beside them
        special = tokenizer.added_tokens_decoder.values()
        self.spaces_vanish = any(token.lstrip or token.rstrip for token in special)
        self.counts = {}  # character: whether it counts

    def exceeded_by(self, text: str) -> bool:
        if len(text) <= self.most:
            return False
        total = 0  # characters that count
        for character, count in Counter(text).most_common():  # so that it is soon over
            if character not in self.counts:
                self.counts[character] = self.takes_tokens(character)
            if self.counts[character]:
                total += count
            if total > self.most:
                return True
        return False

    def takes_tokens(self, character: str) -> bool:
        if self.spaces_vanish and character.isspace():
            return False
        run = character * (self.RUN * self.longest)
        return len(self.tokenizer(run, add_special_tokens=False)["input_ids"]) >= self.RUN

    def end_of(self, text: str) -> str:
        """The end of a text, more of it than fits: nothing before it is left when it is cut."""
        size = self.most + 1
        while size < len(text) and not self.exceeded_by(text[-size:]):
            size *= 2
        return text[-size:]


# --- InfoSeed


def seed_prompts(row: dict, tokenizer, c: dict) -> list[list[int]]:
    """The token ids of a row's prompt for every InfoSeed seed: info_seed_prompt_template with
    {seed} and {prompt} filled in, or added below the prompt where it doesn't hold {prompt}."""
    template = c["info_seed_prompt_template"]
    if "{prompt}" not in template:
        template = "{prompt}\n" + template
    # in two, not by str.format: a prompt may hold braces itself
    before, after = template.split("{prompt}", 1)
    texts = []
    for z in range(c["info_seed_num_seeds"]):
        head = before.replace("{seed}", str(z))
        tail = after.replace("{seed}", str(z))
        seeded = with_prompt(row, head + prompt_text(row) + tail)
        texts.append(render_prompt(seeded, tokenizer, c))
    return tokenise(texts, tokenizer)
