"""Prompts that are too long: refused, left out or cut, and never tokenised where
they are endless."""

import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from row_files import check_words, refusal
from transformers import PreTrainedTokenizerFast

import prompts
import sft
from common import UserError, load_config

TOKENIZER = sft.tiny_tokenizer()
CONFIG = load_config([])
ROW = {"id": "1", "task": "", "prompt": "1+1?", "answer": "2"}


def encode(rows: list[dict], tokenizer, limit: int, long_prompts: str, system: str = ""):
    changes = {
        "max_prompt_length": limit,
        "long_prompts": long_prompts,
        "system_prompt": system,
    }
    return prompts.encode_prompts(rows, tokenizer, CONFIG | changes)


def encode_one(text: str, tokenizer, limit: int, long_prompts: str, system: str = "") -> dict:
    (row,) = encode([{**ROW, "prompt": text}], tokenizer, limit, long_prompts, system)
    return row


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and 150 merges, so that a text falls into other tokens when something is cut off or put
    before it; TEMPLATE of sft.py."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    texts = ["What is one and one? Be brief."] * 20
    for i in range(20):
        texts.append("".join(random.Random(i).choices("abü\N{PILE OF POO}1+ ", k=200)))
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + 150 + len(special),
        special_tokens=special,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=sft.TEMPLATE
    )


BPE = bpe_tokenizer()


# --- over the limit


def test_prompts_over_the_limit_stop_the_run_or_are_dropped_and_counted(capsys):
    # 2 tokens of the template come to each
    rows = [{**ROW, "id": str(n), "prompt": "1" * n} for n in (3, 9, 8, 20)]
    message = refusal(encode, rows, TOKENIZER, 10, "error")
    check_words(message, "max_prompt_length=10", "2 of 4", "'20'", "22 tokens")
    kept = encode(rows, TOKENIZER, 10, "drop")
    assert [len(row["prompt_ids"]) for row in kept] == [5, 10]
    assert "2 of 4" in capsys.readouterr().out
    # an empty dataset is never the result
    assert "4 of 4" in refusal(encode, rows, TOKENIZER, 4, "drop")
    assert "prompt_ids" not in rows[0]


def test_cut_and_dropped_prompts_are_counted_and_the_others_stay_in_their_order(capsys):
    rows = [{**ROW, "id": str(n), "prompt": "1" * n} for n in (3, 9, 8, 20)]
    cut = encode(rows, TOKENIZER, 10, "truncate")
    assert [len(row["prompt_ids"]) for row in cut] == [5, 10, 10, 10]
    assert [row.get("uncut_prompt") for row in cut] == [None, "1" * 9, None, "1" * 20]
    check_words(capsys.readouterr().out, "2 of 4", "2 have lost the beginning", "0 are left out")
    kept = encode(rows, TOKENIZER, 10, "drop")
    assert [row["id"] for row in kept] == ["3", "8"]
    check_words(capsys.readouterr().out, "0 have lost the beginning", "2 are left out")
    fitting = encode(rows, TOKENIZER, 22, "truncate")
    assert fitting == encode(rows, TOKENIZER, 22, "error")
    assert capsys.readouterr().out == ""


# --- cut


class AnyLength(prompts.Encoder):
    """Of a tokenizer that makes any number of tokens of the shorter text."""

    def __init__(self, limit: int, seed: int):
        super().__init__(TOKENIZER, CONFIG | {"max_prompt_length": limit}, seeds=False)
        self.rng = random.Random(seed)
        self.lengths = []
        self.last_size = 0

    def size(self, row: dict, ids: list[int]) -> int:
        self.lengths.append(len(row["prompt"]))
        self.last_size = self.rng.randint(1, 60)
        return self.last_size


@settings(max_examples=60)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 9999))
def test_cutting_ends_whatever_the_tokenizer_makes_of_the_shorter_text(count, limit, seed):
    encoder = AnyLength(limit, seed)
    found = encoder.cut_left({**ROW, "prompt": "x" * count})
    assert found is None or encoder.last_size <= limit
    assert encoder.lengths == sorted(set(encoder.lengths), reverse=True)
    assert len(encoder.lengths) <= count


@settings(max_examples=80)
@given(
    st.text(sft.CHARACTERS, min_size=1, max_size=50),
    st.integers(1, 60),
    st.sampled_from(["", "Be brief."]),
)
def test_a_prompt_that_is_cut_keeps_its_end_its_system_prompt_and_the_assistants_header(
    text, limit, system
):
    """A token per character: to the character what fits."""
    size = len(f"{system}{text}") + (3 if system else 2)
    room = limit - size + len(text)
    if room < 1:
        message = refusal(encode_one, text, TOKENIZER, limit, "truncate", system)
        assert "even without the users' messages" in message
        return
    row = {**ROW, "prompt": text}
    (encoded,) = encode([row], TOKENIZER, limit, "truncate", system)
    head = f"<|system|>{system}" if system else ""
    wanted = f"{head}<|user|>{text[-room:]}<|assistant|>"
    assert TOKENIZER.decode(encoded["prompt_ids"]) == wanted
    assert len(encoded.pop("prompt_ids")) == min(size, limit)
    uncut = {"uncut_prompt": text} if size > limit else {}
    assert encoded == {**ROW, "prompt": text[-room:]} | uncut
    assert row == {**ROW, "prompt": text}


@settings(max_examples=80)
@given(
    st.text("abü\N{PILE OF POO}1+ ?\n\N{SNOWMAN}e", min_size=1, max_size=50),
    st.integers(4, 40),
    st.sampled_from(["", "Be brief."]),
)
def test_the_same_holds_where_cutting_a_text_changes_its_tokens(text, limit, system):
    head = (f"<|system|>{system}" if system else "") + "<|user|>"
    try:
        encoded = encode_one(text, BPE, limit, "truncate", system)
    except UserError:
        shortest = len(BPE(head + text[-1] + "<|assistant|>")["input_ids"])
        # a character has at most 4 bytes, a token each
        assert shortest > limit - 4, "room for a character was not used"
        return
    size = len(encoded["prompt_ids"])
    assert size <= limit
    assert BPE.decode(encoded["prompt_ids"]) == head + encoded["prompt"] + "<|assistant|>"
    assert encoded["prompt"]
    assert text.endswith(encoded["prompt"])
    if encoded["prompt"] != text:
        # little is wasted: a character's bytes, and merges that the cut makes possible
        assert size > limit - 8


def test_a_character_cut_in_two_leaves_no_rubbish():
    encoded = encode_one("\N{SNOWMAN}" * 9, BPE, 9, "truncate")
    # three bytes each, room for seven
    assert encoded["prompt"] == "\N{SNOWMAN}" * 2
    assert len(encoded["prompt_ids"]) == 8


def test_a_base_models_prompt_is_cut_behind_the_system_prompt():
    base = sft.tiny_tokenizer()
    base.chat_template = None
    encoded = encode_one("123456789", base, 8, "truncate", "Q: ")
    assert base.decode(encoded["prompt_ids"]) == "Q: 56789"


# --- endless


ENDLESS = {**ROW, "id": "endless", "prompt": "What is 1+1? " * 4000}


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BPE])
@pytest.mark.parametrize("seeds", [0, 4])
def test_an_endless_prompt_is_refused_dropped_or_cut(tokenizer, seeds, capsys):
    c = load_config(["--model=x", f"--info_seed_num_seeds={seeds}", "--max_prompt_length=60"])

    def encoded(long_prompts: str) -> list[dict]:
        settings = c | {"long_prompts": long_prompts}
        return prompts.encode_prompts([ENDLESS, ROW], tokenizer, settings, seeds=True)

    message = refusal(encoded, "error")
    check_words(message, "1 of 2 prompts", "row 'endless', has", "tokens")
    assert [row["id"] for row in encoded("drop")] == [ROW["id"]]
    cut, other = encoded("truncate")
    assert ENDLESS["prompt"].endswith(cut["prompt"])
    assert 30 < len(cut["prompt_ids"]) <= 60
    assert other["id"] == ROW["id"]
    assert "1 have lost the beginning" in capsys.readouterr().out


def test_only_a_prompt_that_is_trained_on_needs_room_for_a_seed():
    c = load_config(["--model=x", "--info_seed_num_seeds=4", "--max_prompt_length=6"])
    row = ROW | {"prompt": "1+1?"}  # four tokens between the template's two
    (encoded,) = prompts.encode_prompts([row], TOKENIZER, c)
    assert len(encoded["prompt_ids"]) == 6
    message = refusal(prompts.encode_prompts, [row], TOKENIZER, c, seeds=True)
    check_words(message, "1 of 1 prompts are longer", "tokens with its seed")
