"""Prompts as the model sees them: its tokenizer and chat template, and rows turned into token ids once.

config, tokenizer = load_model_files("Qwen/Qwen2.5-0.5B-Instruct")
rows = encode_prompts(rows, tokenizer, system_prompt="", max_length=512, long_prompts="error")     # with "prompt_ids"
"""

from pathlib import Path

import jinja2
from transformers import AutoConfig, AutoTokenizer

from common import UserError, quoted, refuse_missing_folder


def load_model_files(model: str, chat_template: str = ""):
    """(model config, tokenizer) of a folder or a hub id, no weights; a UserError that names it when there is no such model.
    chat_template: takes the place of the tokenizer's own; a file, or the template itself."""
    if not model:
        raise UserError(
            "model is empty: name a Hugging Face id or a folder, such as --model=Qwen/Qwen2.5-0.5B-Instruct"
        )
    refuse_missing_folder(model)
    try:
        config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:  # OSError covers an unreachable hub
        what = (
            "is a folder without a usable model"
            if Path(model).is_dir()
            else "is not a folder, and can't be loaded from the hub"
        )
        raise UserError(f"model={model!r} {what}: {quoted(error, 300)}") from None
    if chat_template:
        set_chat_template(tokenizer, chat_template)
    return config, tokenizer


def set_chat_template(tokenizer, template: str) -> None:
    try:
        if "{" not in template:
            template = Path(template).read_text(encoding="utf-8")
        tokenizer.chat_template = template
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "\0"}], tokenize=False, add_generation_prompt=True
        )
    except OSError as error:
        raise UserError(
            f"chat_template={template!r} is neither a template (it has no braces) nor a readable file: {error.strerror}"
        ) from None
    except Exception as error:  # jinja2 has a dozen kinds
        raise UserError(
            f"chat_template can't be used: {type(error).__name__}: {quoted(' '.join(str(error).split()))}"
        ) from None
    if "\0" not in text:
        raise UserError(
            "chat_template leaves the user's message out: it must write messages[i]['content']"
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
    except jinja2.TemplateError as error:  # some refuse a system prompt
        raise UserError(
            f"the chat template can't render row {quoted(row['id'])} with system_prompt={system_prompt!r}: {quoted(' '.join(str(error).split()))}"
        ) from None


def encode_prompts(
    rows: list[dict], tokenizer, system_prompt: str, max_length: int, long_prompts: str, seeded=None
) -> list[dict]:
    """New rows with "prompt_ids". Prompts over `max_length` tokens are a UserError ("error"), left out ("drop") or lose the beginning of the
    user's message, never the system prompt or the assistant's header ("truncate"); the last two are counted on the console.
    seeded: row -> its prompts with an InfoSeed seed, token ids that must fit as well."""

    def encode(rows: list[dict]) -> list[list[int]]:
        texts = [render_prompt(row, tokenizer, system_prompt) for row in rows]
        return tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]

    def size(row: dict, prompt: list[int]) -> int:
        near = (
            seeded and len(prompt) + room > max_length
        )  # the others need not be rendered again with every seed
        return max(len(prompt), *map(len, seeded(row))) if near else len(prompt)

    ids = encode(rows)
    room = (
        2 * max(map(len, seeded(rows[0]))) - 2 * len(ids[0]) + 64 if seeded else 0
    )  # what a seed adds, and as much again
    too_long = {
        i: tokens
        for i, (row, prompt) in enumerate(zip(rows, ids))
        if (tokens := size(row, prompt)) > max_length
    }
    worst = max(too_long, key=too_long.get, default=None)
    sentence = too_long and (
        f"max_prompt_length={max_length}: {len(too_long)} of {len(rows)} prompts are longer, row {quoted(rows[worst]['id'])} has "
        f"{too_long[worst]} tokens" + (" with its seed" if seeded else "")
    )
    if too_long and long_prompts == "error":
        raise UserError(
            f"{sentence}; raise max_prompt_length, leave them out with --long_prompts=drop or shorten them with --long_prompts=truncate"
        )
    cut = {}
    for i in too_long if long_prompts == "truncate" else ():
        if found := cut_left(rows[i], tokenizer, max_length, encode, size):
            cut[i] = found
    drop = set(too_long) - set(cut)
    if len(drop) == len(rows):
        raise UserError(
            f"{sentence}: nothing is left"
            + (" even without the users' messages" if long_prompts == "truncate" else "")
        )
    if too_long:
        print(
            f"{sentence}: {len(cut)} have lost the beginning of the user's message, {len(drop)} are left out"
        )
    return [
        cut.get(i) or {**row, "prompt_ids": prompt}
        for i, (row, prompt) in enumerate(zip(rows, ids))
        if i not in drop
    ]


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
