"""Prompts as the model sees them: its chat template, and rows turned into token ids once.

rows = encode_prompts(rows, tokenizer, system_prompt="", max_length=512, long_prompts="error")     # with "prompt_ids"
"""

import math
import socket
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub.constants

from common import UserError, in_one_line


def use_cache_without_hub(endpoint: str) -> bool:
    """Whether the hub can't be reached. Its library is then told to look into its cache alone, or
    it would ask again and again for half a minute. Behind a proxy that is left to the library."""
    hub = huggingface_hub.constants
    address = urlsplit(endpoint)
    if not hub.HF_HUB_OFFLINE and not {"http", "https", "all"} & set(getproxies()):
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname, port), timeout=10).close()
        except OSError as error:
            print(f"{endpoint} can't be reached ({error}): only its cache is used", flush=True)
            hub.HF_HUB_OFFLINE = True
    return hub.HF_HUB_OFFLINE


def set_chat_template(tokenizer, template: str) -> None:
    """template: the template itself, or a file with one."""
    if "{" not in template:
        try:
            template = Path(template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # no such file, no path at all, no text
            raise UserError(
                f"chat_template={template!r} is neither a template (it has no braces) nor a "
                f"readable file: {getattr(error, 'strerror', None) or error}"
            ) from None
    tokenizer.chat_template = template
    check_chat_template(tokenizer, "chat_template")


def check_chat_template(tokenizer, what: str) -> None:
    """UserError, beginning with `what`, for a template that fails or leaves the user out."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "\0"}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program: jinja2 has a dozen kinds, `1/0` its own
        raise UserError(
            f"{what} can't be used: {type(error).__name__}: {in_one_line(error)}"
        ) from None
    if "\0" not in text:
        raise UserError(
            f"{what} leaves the user's message out: it must write messages[i]['content']"
        )


def end_of_turn(tokenizer, stop_ids: list[int]) -> str:
    """A sentence on whether the chat template ends the assistant's turn with a token that ends completions."""
    if not tokenizer.chat_template:
        return "a base model: no chat template"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\0"}], tokenize=False
    )
    if "\0" not in text:
        return "the chat template leaves the assistant's message out"
    end = tokenizer(text.rpartition("\0")[2], add_special_tokens=False)["input_ids"][:1]
    if not end or end[0] in stop_ids:
        return "the chat template ends a turn with " + (
            repr(tokenizer.decode(end)) if end else "nothing"
        )
    return f"warning: the chat template ends a turn with {tokenizer.decode(end)!r}, which does not end a completion"


def check_context(
    model_config, model: str, max_prompt_length: int, max_completion_length: int
) -> None:
    """A UserError if the model has fewer positions than a prompt and its completion need. Stretched ones (YaRN and so on) are left to vLLM."""
    stretched = (getattr(model_config, "rope_parameters", None) or {}).get(
        "rope_type", "default"
    ) != "default"
    limit = getattr(model_config, "max_position_embeddings", None)
    if limit and not stretched and max_prompt_length + max_completion_length > limit:
        raise UserError(
            f"max_prompt_length={max_prompt_length} + max_completion_length={max_completion_length} is more than "
            f"the {limit} positions of model={model!r}"
        )


def render_prompt(row: dict, tokenizer, system_prompt: str) -> str:
    """The prompt as the model sees it: its chat template with the assistant's turn opened, or the bare text for a base model."""
    if not tokenizer.chat_template:
        return system_prompt + row["prompt"]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    try:
        return tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": row["prompt"]}],
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # some refuse a system prompt; a template is a program
        raise UserError(
            f"the chat template can't render row {row['id']!r} with "
            f"system_prompt={system_prompt!r}: {type(error).__name__}: {in_one_line(error)}"
        ) from None


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
        special = tokenizer.added_tokens_decoder.values()
        self.spaces_vanish = any(token.lstrip or token.rstrip for token in special)
        self.counts = {}  # character: whether it counts

    def exceeded_by(self, text: str) -> bool:
        if len(text) <= self.most:
            return False
        total = 0
        for character, count in Counter(text).most_common():
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


def encode_prompts(
    rows: list[dict], tokenizer, system_prompt: str, max_length: int, long_prompts: str, seeded=None
) -> list[dict]:
    """New rows with "prompt_ids". Prompts over `max_length` tokens are a UserError ("error"), are
    left out ("drop"), or lose the beginning of the user's message, never the system prompt or the
    assistant's header ("truncate"); the last two are counted on the console.
    seeded: row -> its prompts with an InfoSeed seed, token ids that must fit as well."""

    def tokenise(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]

    def encode(rows: list[dict]) -> list[list[int]]:
        return tokenise([render_prompt(row, tokenizer, system_prompt) for row in rows])

    def size(row: dict, prompt: list[int]) -> int:
        if not seeded or len(prompt) + room <= max_length:
            return len(prompt)  # it need not be rendered again with every seed
        return max(len(prompt), *map(len, seeded(row)))

    room = seed_room(rows[0], seeded, encode) if seeded else 0
    limit = CharacterLimit(tokenizer, max_length)
    texts = [render_prompt(row, tokenizer, system_prompt) for row in rows]
    endless = {i: len(text) for i, text in enumerate(texts) if limit.exceeded_by(text)}
    ids = tokenise(["" if i in endless else text for i, text in enumerate(texts)])
    sizes = [math.inf if i in endless else size(rows[i], ids[i]) for i in range(len(rows))]
    too_long = [i for i, tokens in enumerate(sizes) if tokens > max_length]
    if not too_long:
        return [{**row, "prompt_ids": prompt} for row, prompt in zip(rows, ids)]

    worst = max(too_long, key=lambda i: (sizes[i], endless.get(i, 0)))
    length = f"{sizes[worst]} tokens" + (" with its seed" if seeded else "")
    if worst in endless:
        length = f"{endless[worst]} characters, which are more tokens than that"
    sentence = (
        f"max_prompt_length={max_length}: {len(too_long)} of {len(rows)} prompts are longer, "
        f"row {rows[worst]['id']!r} has {length}"
    )
    if long_prompts == "error":
        raise UserError(
            f"{sentence}; raise max_prompt_length, leave them out with --long_prompts=drop or "
            f"shorten them with --long_prompts=truncate"
        )
    kept = {i: {**rows[i], "prompt_ids": ids[i]} for i in set(range(len(rows))) - set(too_long)}
    fitting = len(kept)
    if long_prompts == "truncate":
        for i in too_long:
            row = rows[i] | {"prompt": limit.end_of(rows[i]["prompt"])}
            if shorter := cut_left(row, tokenizer, max_length, encode, size):
                kept[i] = shorter
    if not kept:
        without = " even without the users' messages" if long_prompts == "truncate" else ""
        raise UserError(f"{sentence}: nothing is left{without}")
    print(
        f"{sentence}: {len(kept) - fitting} have lost the beginning of the user's message, "
        f"{len(rows) - len(kept)} are left out"
    )
    return [kept[i] for i in sorted(kept)]


def seed_room(row: dict, seeded, encode) -> int:
    """Tokens that InfoSeed's seeds add to a prompt, and as much again: text splits otherwise there."""
    row = row | {"prompt": "1"}
    (ids,) = encode([row])
    return 2 * max(map(len, seeded(row))) - 2 * len(ids) + 64


def cut_left(row: dict, tokenizer, max_length: int, encode, size) -> dict | None:
    """The row with as much of the end of its prompt as fits into `max_length` tokens by size(row, ids), None if not even one token of it does."""
    message = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    keep = len(message)
    while keep > 0:
        shorter = row | {
            "prompt": tokenizer.decode(message[len(message) - keep :]).lstrip("\ufffd")
        }  # of a character cut in two
        (ids,) = encode([shorter])
        if (tokens := size(shorter, ids)) <= max_length:
            return shorter | {"prompt_ids": ids} if shorter["prompt"] else None
        keep -= max(
            1, tokens - max_length
        )  # joined with its surroundings the text may be split into other tokens
    return None


def seed_prompts(row: dict, tokenizer, c: dict) -> list[list[int]]:
    """The token ids of a row's prompt for every InfoSeed seed: info_seed_prompt_template with {seed} and {prompt} filled in, or added to the
    prompt where it doesn't hold {prompt}."""
    template = (
        c["info_seed_prompt_template"]
        if "{prompt}" in c["info_seed_prompt_template"]
        else "{prompt}\n" + c["info_seed_prompt_template"]
    )
    before, after = template.replace("{seed}", "\0").split(
        "{prompt}", 1
    )  # in this order: a prompt may hold braces itself
    prompts = [
        before.replace("\0", str(z)) + row["prompt"] + after.replace("\0", str(z))
        for z in range(c["info_seed_num_seeds"])
    ]
    texts = [
        render_prompt(row | {"prompt": prompt}, tokenizer, c["system_prompt"]) for prompt in prompts
    ]
    return tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
