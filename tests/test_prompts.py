"""Prompts as the model sees them: chat templates, good, bad and hostile."""

import datetime
import os
import subprocess
import sys
from fractions import Fraction

import jinja2
import numpy
import pytest
from row_files import check_words, refusal
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers.normalizers import BertNormalizer, Replace
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import prompts
import sft
from common import ROOT, UserError, load_config
from preflight import load_model_files

TOKENIZER = sft.tiny_tokenizer()
ROW = {"id": "1", "task": "", "prompt": "1+1?", "answer": "2"}
OWN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[me]{% endif %}"
)


def base_tokenizer():
    tokenizer = sft.tiny_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def rendered(tokenizer, *flags, row=ROW) -> str:
    return prompts.render_prompt(row, tokenizer, load_config(list(flags)))


def encoded_ids(tokenizer, *flags) -> list[int]:
    (row,) = prompts.encode_prompts([ROW], tokenizer, load_config(list(flags)))
    return row["prompt_ids"]


# --- what the model sees


def test_the_chat_template_is_rendered_with_the_assistants_turn_open():
    text = rendered(TOKENIZER, "--system_prompt=Be brief.")
    assert text == "<|system|>Be brief.<|user|>1+1?<|assistant|>"
    assert rendered(TOKENIZER) == "<|user|>1+1?<|assistant|>"
    characters = TOKENIZER.convert_tokens_to_ids(list("1+1?"))
    assert encoded_ids(TOKENIZER) == [3, *characters, 4]


def test_a_base_model_sees_the_bare_text_and_its_own_special_tokens():
    base = base_tokenizer()
    assert rendered(base, "--system_prompt=Q: ") == "Q: 1+1?"
    assert base.decode(encoded_ids(base)) == "1+1?"


def test_the_tokenizer_adds_its_first_token_where_no_template_does():
    """Llama's and Gemma's: twice with a template, never without, if this were turned round."""
    for template, first in ((None, [3]), (OWN, [])):
        tokenizer = sft.tiny_tokenizer()
        tokenizer.chat_template = template
        single = TemplateProcessing("<|user|> $A", special_tokens=[("<|user|>", 3)])
        tokenizer.backend_tokenizer.post_processor = single
        text = rendered(tokenizer)
        characters = tokenizer.convert_tokens_to_ids(list(text))
        assert encoded_ids(tokenizer) == first + characters


def test_a_prompt_is_known_by_its_text_alone():
    row = prompts.with_prompt(ROW, "2+2?")
    assert row == {**ROW, "prompt": "2+2?"}
    assert ROW["prompt"] == "1+1?"
    assert prompts.prompt_text(row) == "2+2?"
    assert prompts.prompt_key(row) == prompts.prompt_key({"prompt": " 2+2? "})


def test_other_prompts_another_order_and_other_ends_of_prompts_have_another_hash():
    ids = ([[1, 2], [3]], [[3], [1, 2]], [[1], [2, 3]], [[1, 2], [4]], [[12], [3]])
    hashes = {prompts.prompts_hash([{"prompt_ids": prompt} for prompt in two]) for two in ids}
    assert len(hashes) == len(ids)


DAY = datetime.date(2026, 11, 29)
OTHER_ROWS = [
    {"answer": "6"},
    {"answer": 6},
    {"answer": 10**5000},  # whose repr() Python refuses
    {"answer": 6.0},
    {"answer": b"6"},
    {"answer": Fraction(1, 6)},
    {"answer": numpy.arange(3)},
    {"answer": {"b", "a"}},
    {"answer": {"b", "c"}},
    {"answer": DAY},
    {"answer": {(1, 2): 3}},
    {"answer": {(1, 2): None}},
    {"answer": "6", "level": 2},
]


def test_rows_with_another_answer_or_column_have_another_hash():
    hashes = {prompts.answers_hash([row]) for row in OTHER_ROWS}
    assert len(hashes) == len(OTHER_ROWS)
    encoded = {"answer": "6"} | dict.fromkeys(prompts.ADDED, 1)  # as encode_prompts() leaves it
    assert prompts.answers_hash([encoded]) == prompts.answers_hash([{"answer": "6"}])
    first, second = OTHER_ROWS[:2]
    assert prompts.answers_hash([first, second]) != prompts.answers_hash([second, first])


def test_the_hash_of_answers_is_the_same_in_every_process():
    """Sets, and what is made of them, have another order in each, and objects another address."""
    words = "set('abcde')"
    row = (
        f"{{'answer': {words}, 'a': list({words}), 'b': {{x: 1 for x in {words}}}, 'c': object()}}"
    )
    nested = f"{{'answer': {{frozenset({words}), frozenset('xyz')}}}}"
    code = f"import prompts; print(prompts.answers_hash([{row}, {nested}]))"
    told = set()
    for seed in ("1", "2", "3"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        told.add(done.stdout)
    assert len(told) == 1 and len(told.pop()) == 17


# --- templates of one's own


def test_a_chat_template_comes_as_text_or_as_a_file(tiny_model_dir, tmp_path):
    (tmp_path / "template.jinja").write_text(OWN)
    (tmp_path / "windows.jinja").write_text(OWN, encoding="utf-8-sig")  # a byte order mark
    for given_as in (OWN, str(tmp_path / "template.jinja"), str(tmp_path / "windows.jinja")):
        tokenizer = load_model_files(str(tiny_model_dir), given_as).tokenizer
        assert rendered(tokenizer, "--system_prompt=S") == "[system]S[user]1+1?[me]"
    assert load_model_files(str(tiny_model_dir)).tokenizer.chat_template == sft.TEMPLATE


def test_a_base_model_can_be_given_a_template():
    base = base_tokenizer()
    prompts.set_chat_template(base, OWN)
    assert encoded_ids(base) == base("[user]1+1?[me]")["input_ids"]


SYSTEM_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template, words",
    [
        ("nowhere.jinja", ["'nowhere.jinja'", "No such file"]),
        (".", ["'.'", "directory"]),
        ("/dev/zero", ["longer than 1000000 characters"]),
        ("{% for %}", ["TemplateSyntaxError"]),
        ("{{ messages[0]['content'] }", ["TemplateSyntaxError"]),
        ("{{ raise_exception('one\ntwo') }}", ["one two"]),
        ("{{ nobody.content }}", ["UndefinedError"]),
        ("{{ 'Answer:' }}", ["leaves the user's message out"]),
        ("{}", ["leaves the user's message out"]),
        (SYSTEM_ONLY, ["leaves the user's message out"]),
    ],
)
def test_a_chat_template_that_can_not_be_used_is_one_sentence(template, words):
    message = refusal(prompts.set_chat_template, sft.tiny_tokenizer(), template)
    check_words(message, "chat_template", *words)


TURNS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
NO_SYSTEM = TURNS.replace("messages %}", "messages if m['role'] != 'system' %}")


def chat(*roles) -> dict:
    return {"id": "7", "prompt": [{"role": role, "content": "a"} for role in roles]}


@pytest.mark.parametrize(
    "template, row, system_prompt, words",
    [
        (TURNS, chat("system", "user"), "", ""),
        (TURNS, {"id": "7", "prompt": "a"}, "Be short.", ""),
        (NO_SYSTEM, {"id": "7", "prompt": "a"}, "", ""),
        (NO_SYSTEM, {"id": "7", "prompt": "a"}, "Be short.", "(the first is system_prompt)"),
        (NO_SYSTEM, chat("system", "user"), "", "leaves out 1 of the 2 messages of row '7'"),
        (
            "{{ messages[-1]['content'] }}",
            chat("user", "assistant", "user"),
            "",
            "leaves out 2 of the 3 messages of row '7', whose roles are user, assistant, user: set",
        ),
    ],
)
def test_a_template_that_drops_a_message_is_refused(template, row, system_prompt, words):
    tokenizer = sft.tiny_tokenizer()
    prompts.set_chat_template(tokenizer, template)
    c = load_config([f"--system_prompt={system_prompt}"])
    if words:
        assert words in refusal(prompts.encode_prompts, [row], tokenizer, c)
    else:
        prompts.encode_prompts([row], tokenizer, c)


@pytest.mark.parametrize(
    "attack",
    [
        "''.__class__.__mro__",
        "messages.__class__.__base__.__subclasses__()",
        "cycler.__init__.__globals__.os.system('touch {path}')",
        "messages.append(1)",
        "self.__init__.__globals__.os",
        "raise_exception.__globals__['os'].system('touch {path}')",
        "'x'.format.__globals__.os",
        "range(10**9)|list",
        "messages[0].update(content='x')",
    ],
)
def test_a_hostile_chat_template_runs_nothing(attack, tmp_path):
    """Templates come with models of strangers: transformers renders them in a sandbox, and this is
    where it is relied on."""
    path = tmp_path / "ran"
    attack = attack.replace("{path}", str(path))
    template = "{{ " + attack + " }}{{ messages[0]['content'] }}"
    message = refusal(prompts.set_chat_template, sft.tiny_tokenizer(), template)
    kinds = ("SecurityError", "UndefinedError", "OverflowError")
    assert any(kind in message for kind in kinds), message
    assert not path.exists()


def test_a_spying_chat_template_sees_nothing():
    spy = sft.tiny_tokenizer()
    template = (
        "{{ messages.__class__ }}{{ '{0.__class__}'.format(messages) }}"
        "{{ messages[0]['content'] }}{{ raise_exception.__globals__ }}"
    )
    prompts.set_chat_template(spy, template)
    assert rendered(spy) == "1+1?"


def test_a_template_that_refuses_a_row_is_one_sentence():
    strict = sft.tiny_tokenizer()
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}" + sft.TEMPLATE
    )
    assert encoded_ids(strict)
    message = refusal(encoded_ids, strict, "--system_prompt=Be brief.")
    check_words(message, "system_prompt='Be brief.'", "System role not supported", "row '1'")
    with pytest.raises(jinja2.TemplateError):  # what it came as
        strict.apply_chat_template([{"role": "system", "content": ""}], tokenize=False)


# --- the end of a turn

RIGHT = "the chat template ends a turn with '<|end|>'"
WRONG = "warning: {}, which does not end a completion"


@pytest.mark.parametrize(
    "template, stop_ids, sentence",
    [
        (sft.TEMPLATE, [0], RIGHT),
        (sft.TEMPLATE, [3, 0], RIGHT),
        (sft.TEMPLATE, [3], WRONG.format(RIGHT)),
        (
            sft.TEMPLATE.replace("<|end|>", "\n"),
            [0],
            WRONG.format("the chat template ends a turn with '\\n'"),
        ),
        (sft.TEMPLATE.replace("<|end|>", "<|end|>\\n"), [0], RIGHT),  # as Qwen does
        (sft.TEMPLATE.replace("<|end|>", " <|end|>"), [0], RIGHT),
        (OWN, [0], "the chat template ends a turn with nothing"),
        (None, [0], "a base model: no chat template"),
        (
            "{{ messages[0]['content'] }}",
            [0],
            "the chat template leaves the assistant's message out",
        ),
        (
            "{{ messages[0]['content'] + messages[1]['no'].such }}",
            [0],
            "the chat template takes no assistant message: 'dict object' has no attribute 'no'",
        ),
    ],
)
def test_it_is_said_whether_a_turns_end_ends_a_completion(template, stop_ids, sentence):
    tokenizer = sft.tiny_tokenizer()
    tokenizer.chat_template = template
    assert prompts.end_of_turn(tokenizer, stop_ids) == sentence


def test_a_prompt_of_which_the_tokenizer_makes_nothing_is_one_sentence():
    tokenizer = sft.tiny_tokenizer()
    tokenizer.chat_template = None
    rows = [{"id": "7", "prompt": "\u65e5\u672c"}]
    with pytest.raises(UserError, match="row '7': the tokenizer makes no token"):
        prompts.encode_prompts(rows, tokenizer, load_config([]))


def test_characters_that_the_tokenizer_leaves_out_are_told(capsys):
    config = load_config([])
    rows = [ROW | {"prompt": text} for text in ("3 × 4 ≤ a", "2×2", "a\tb\u200b", "1+1?")]
    prompts.encode_prompts(rows, TOKENIZER, config)
    check_words(capsys.readouterr().out, "warning", "'×≤'", "2 of 4 prompts")
    prompts.encode_prompts(rows[2:], TOKENIZER, config)
    row = ROW | {"prompt_ids": [1], "solutions": ["2 €", "2"]}
    assert "warning" not in capsys.readouterr().out
    sft.demonstrations([row], TOKENIZER, config)
    check_words(capsys.readouterr().out, "warning", "'€'", "1 of 2 solutions")
    bytes_known = Tokenizer(BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, []))
    bytes_known.pre_tokenizer = ByteLevel(add_prefix_space=False)
    prompts.warn_of_unknown(
        ["×≤"], PreTrainedTokenizerFast(tokenizer_object=bytes_known), "prompts"
    )
    assert "warning" not in capsys.readouterr().out


def test_characters_that_only_words_or_special_tokens_hold_are_not_told(capsys):
    words = Tokenizer(WordLevel({"[UNK]": 0, "left": 1, "go": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    digits = Tokenizer(BPE({character: i for i, character in enumerate("0123456789+= ")}, []))
    digits.add_special_tokens(["<|user|>"])
    strict = Tokenizer(Unigram([("a", -1.0), ("b", -1.0)]))  # refuses all others itself
    accents = Tokenizer(WordPiece({"[UNK]": 0, "cafe": 1, "c": 2}, unk_token="[UNK]"))
    accents.normalizer = BertNormalizer()
    accents.pre_tokenizer = BertPreTokenizer()
    no_sign = Tokenizer(WordLevel({"[UNK]": 0, "go": 1}, unk_token="[UNK]"))
    no_sign.normalizer = Replace("×", "")
    far = "1" * 150
    cases = [
        (words, "[UNK]", ["left ", "go left"], ""),  # a space at the end makes no difference
        (words, "[UNK]", ["go left", "go wild"], "'diw'"),  # but l, which "left" holds
        (digits, None, ["<|user|>1+1=", "<|user|>2="], ""),
        (digits, None, ["<|user|>1+1=", "<|user|>2×2="], "'×'"),
        (digits, None, [far + "<|user|>" + far], ""),
        (strict, None, ["ab"], ""),
        (no_sign, "[UNK]", ["go×", "go"], "'×'"),  # other unknown signs get a token
        (accents, "[UNK]", ["Café"], ""),
        (accents, "[UNK]", ["Café", "c ❤"], "'❤'"),
    ]
    for tokenizer, unknown, texts, told in cases:
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown)
        prompts.warn_of_unknown(texts, fast, "prompts")
        said = capsys.readouterr().out
        assert ("no token for " in said) == bool(told), said
        check_words(said, *([f"no token for {told}:", f"in 1 of {len(texts)}"] if told else []))


def test_many_texts_are_tokenised_as_few_are(monkeypatch):
    texts = [str(i) for i in range(5)]
    whole = prompts.tokenise(texts, TOKENIZER)
    monkeypatch.setattr(prompts, "AT_ONCE", 2)
    assert prompts.tokenise(texts, TOKENIZER) == whole
    assert len(whole) == 5
    assert prompts.tokenise([], TOKENIZER) == []


def test_only_what_takes_long_has_a_progress_bar_and_only_on_rank_0(monkeypatch, capsys):
    rows = [ROW] * 5

    def shown(patience: int, rank: int = 0, at_once: int = 2) -> str:
        monkeypatch.setattr(prompts, "PATIENCE", patience)
        monkeypatch.setattr(prompts, "AT_ONCE", at_once)
        monkeypatch.setenv("RANK", str(rank))
        prompts.encode_prompts(rows, TOKENIZER, load_config([]))
        return capsys.readouterr().err

    check_words(shown(0), "rendered: 100% 5/5", "tokenised: 100% 6/6")  # three parts of 2
    assert shown(3600) == ""
    # no bar at all: one that shows nothing still has tqdm's thread and its lock
    monkeypatch.setattr(prompts, "progress", lambda **settings: pytest.fail("a bar"))
    assert shown(0, rank=1) == shown(0, at_once=5) == ""
