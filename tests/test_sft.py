"""What a warm start learns from."""

import math
import random

import pytest
import torch
from row_files import check_words, refusal
from tokenizers.processors import TemplateProcessing

import sft
from checks import FLAGS
from common import load_config
from preflight import load_model_files
from ranks import World

TOKENIZER = sft.tiny_tokenizer()


def row_of(solutions, name: str = "r") -> dict:
    return {"id": name, "prompt_ids": [1], "solutions": solutions}


@pytest.mark.parametrize(
    "solutions, words",
    [
        (None, 'none of its rows has "solutions"'),
        ("a text", "row 'r': 'solutions' must be a list of texts, not 'a text'"),
        ([3], "row 'r': 'solutions' must be a list of texts, not [3]"),
        (["x" * 99], "1 of 1 solutions are empty or longer: nothing is left"),
        ([""], "1 of 1 solutions are empty or longer: nothing is left"),
    ],
)
def test_solutions_that_can_not_be_learnt_from_are_a_sentence(solutions, words):
    c = load_config(["--max_completion_length=20"])
    assert words in refusal(sft.demonstrations, [row_of(solutions)], TOKENIZER, c)


def test_solutions_that_are_too_long_are_counted(capsys):
    c = load_config(["--max_completion_length=20"])
    rows = [row_of(["short", "x" * 99, ""]), row_of(None, "s")]
    ((group, _),) = sft.demonstrations(rows, TOKENIZER, c)
    assert len(group) == 1
    sentence = "max_completion_length=20: 2 of 3 solutions are empty or longer, and are left out"
    assert sentence in capsys.readouterr().out


def test_a_solution_does_not_begin_with_the_token_that_begins_a_prompt():
    """As Llama's tokenizer would put it there: the model never samples it."""
    tokenizer = sft.tiny_tokenizer()
    single = TemplateProcessing("<|user|> $A", special_tokens=[("<|user|>", 3)])
    tokenizer.backend_tokenizer.post_processor = single
    ((group, _),) = sft.demonstrations([row_of(["12"])], tokenizer, load_config([]))
    assert group[0]["completion_ids"] == [*tokenizer.convert_tokens_to_ids(["1", "2"]), 0]


def test_half_of_a_rows_demonstrations_show_a_seed_and_lean_to_its_own_solutions():
    group = [{"prompt_ids": [1], "completion_ids": [i]} for i in range(6)]
    seeded = [[1, 70], [1, 71], [1, 72]]
    rng = random.Random(0)
    drawn = [sft.demonstration(group, seeded, rng) for _ in range(6000)]
    plain = [demo for demo in drawn if demo["prompt_ids"] == [1]]
    assert len(plain) == pytest.approx(3000, abs=150)  # 4 standard deviations
    for z, prompt in enumerate(seeded):
        shown = [demo["completion_ids"][0] for demo in drawn if demo["prompt_ids"] == prompt]
        assert len(shown) == pytest.approx(1000, abs=115)
        own = sum(i // 2 == z for i in shown) / len(shown)  # two solutions of six are its own
        assert own == pytest.approx(sft.SEEDED + (1 - sft.SEEDED) / 3, abs=0.06)
    assert all(len(demo["prompt_ids"]) == 1 for demo in group)  # the rows stay as they are


def test_ranks_divide_the_batch_that_one_rank_would_have():
    groups = []
    for i in range(50):
        demonstration = {"prompt_ids": [1], "completion_ids": [i], "logprobs": []}
        groups.append(([demonstration], []))

    def drawn(step: int, seed: int, rank: int, size: int) -> list[int]:
        world = World(rank, size, torch.device("cpu"))
        return sft.sft_batch(groups, step, 8, seed, world)["ids"][:, 1].tolist()

    whole = drawn(0, 0, 0, 1)
    assert len(whole) == 8
    assert drawn(0, 0, 0, 2) == whole[::2]
    assert drawn(0, 0, 1, 2) == whole[1::2]
    assert drawn(1, 0, 0, 1) != whole
    assert drawn(0, 1, 0, 1) != whole


@pytest.fixture
def alone(monkeypatch):
    """sft.train without ranks around it. Returns the rates of its steps, and the temperature of its
    Policy in a list."""
    rates, temperatures = [], []
    make_optimizer, Policy = sft.make_optimizer, sft.Policy

    def optimizer_and_schedule(*given):
        optimizer, schedule = make_optimizer(*given)

        def note_rate(optimizer, args, kwargs) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

        optimizer.register_step_pre_hook(note_rate)
        return optimizer, schedule

    def policy(lm, temperature, *given, **more):
        temperatures.append(temperature)
        return Policy(lm, temperature, *given, **more)

    monkeypatch.setattr(sft, "start_distributed", lambda: World(0, 1, torch.device("cpu")))
    monkeypatch.setattr(sft, "check_alike", lambda told: None)
    monkeypatch.setattr(sft, "DistributedDataParallel", lambda policy: policy)
    monkeypatch.setattr(sft, "across_ranks", lambda sums: sums)
    monkeypatch.setattr(sft, "leave_together", lambda: None)
    monkeypatch.setattr(sft, "save", lambda *given: None)
    monkeypatch.setattr(sft, "make_optimizer", optimizer_and_schedule)
    monkeypatch.setattr(sft, "Policy", policy)
    return rates, temperatures


def test_the_rate_of_a_warm_start_rises_and_falls_and_its_temperature_is_1(alone, tmp_path):
    c = load_config(["--model=tiny", "--temperature=0.7", f"--output_dir={tmp_path}"])
    lm, tokenizer = sft.load_model(c)
    demonstration = {"prompt_ids": [5, 6], "completion_ids": [7, 0], "logprobs": [0.0, 0.0]}
    own = {"steps": 40, "batch_size": 2, "learning_rate": 1e-3}
    sft.train(c, own, lm, tokenizer, [([demonstration], [])], set())
    rates, temperatures = alone
    assert len(rates) == 40
    assert max(rates) == pytest.approx(1e-3)
    assert rates[0] < 0.6 * max(rates) > rates[-1]
    assert temperatures == [1.0]


def test_two_ranks_of_a_warm_start_have_the_gradient_of_one_on_average(
    alone, tmp_path, monkeypatch
):
    c = load_config(["--model=tiny", f"--output_dir={tmp_path}"])
    groups = []
    for length in (1, 2, 5, 9):  # ranks have unlike numbers of tokens
        tokens = list(range(5, 5 + length))
        logps = [0.0] * length
        demonstration = {"prompt_ids": [5, 6], "completion_ids": tokens, "logprobs": logps}
        groups.append(([demonstration], []))
    totals = []
    gradients = []

    def kept(parameters, most: float) -> torch.Tensor:
        gradients.append([p.grad.clone() for p in parameters])
        return torch.tensor(1.0)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", kept)
    monkeypatch.setattr(sft, "across_ranks", lambda sums: totals.append(sums) or totals[0])
    for rank, size in ((0, 1), (0, 2), (1, 2)):  # alone first: all have its totals
        world = World(rank, size, torch.device("cpu"))
        monkeypatch.setattr(sft, "start_distributed", lambda world=world: world)
        lm, tokenizer = sft.load_model(c)
        own = {"steps": 1, "batch_size": 6, "learning_rate": 1e-3}
        sft.train(c, own, lm, tokenizer, groups, set())
    assert totals[1][1] != totals[2][1]
    for one, first, second in zip(*gradients, strict=True):
        torch.testing.assert_close((first + second) / 2, one, rtol=1e-4, atol=1e-6)


def test_ranks_of_a_warm_start_compare_what_they_learn_from(alone, tmp_path, monkeypatch):
    class Compared(Exception):
        """Carries what a rank tells the others."""

    def compared(told):
        raise Compared(told)

    monkeypatch.setattr(sft, "check_alike", compared)
    c = load_config(["--model=tiny", f"--output_dir={tmp_path}"])
    hashes = []
    for token in (7, 8, 7):  # as many demonstrations, of other tokens
        demonstration = {"prompt_ids": [5, 6], "completion_ids": [token, 0], "logprobs": []}
        with pytest.raises(Compared) as stopped:
            sft.train(c, {"steps": 1}, None, None, [([demonstration], [])], set())
        hashes.append(stopped.value.args[0]["hash of the demonstrations"])
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_tiny_model_is_not_trained_for_rows_that_are_longer_than_its_positions():
    """train.py and evaluate.py would refuse it afterwards."""
    c = load_config(["--model=tiny"])
    lm, _ = sft.load_model(c)
    message = refusal(sft.load_model, c | {"max_prompt_length": 2048})
    limit = lm.config.max_position_embeddings
    check_words(message, "max_prompt_length=2048", f"{limit} positions of model='tiny'")


def test_the_tiny_tokenizer_has_a_token_per_character_and_survives_saving(tiny_model_dir):
    """AutoTokenizer chooses the class by the model beside it, not by what was saved."""
    loaded = load_model_files(str(tiny_model_dir)).tokenizer
    text = "".join(sft.CHARACTERS) + "  a\n\n b it's <|end|> 10\n"
    for tokenizer in (TOKENIZER, loaded):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(text) - len("<|end|>") + 1
        assert len(tokenizer) == 101
        assert ids[:96] == list(range(5, 101))
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded.eos_token_id == TOKENIZER.eos_token_id == 0


@pytest.mark.parametrize(
    "settings, flags, words",
    [
        ({}, {"steps": 0}, "--steps=0 and --learning_rate=1e-05 must be above 0"),
        ({}, {"learning_rate": math.nan}, "--learning_rate=nan must be above 0"),
        ({}, {"batch_size": 0}, "--batch_size=0 must be at least the number of ranks, 1"),
        ({"chat_template": "{{ 1 }}"}, {}, "model='tiny' brings its own chat template"),
        ({"output_dir": ""}, {}, "is not empty, and sft.py never replaces a folder"),
    ],
)
def test_a_warm_start_that_can_not_be_is_refused_before_a_model_is_made(
    settings, flags, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(sft, "load_model", lambda c: pytest.fail("it goes on"))
    (tmp_path / "a_file").write_text("of somebody")
    c = load_config(["--model=tiny", f"--output_dir={tmp_path / 'new'}"])
    if "output_dir" in settings:
        settings = {"output_dir": str(tmp_path)}
    assert words in refusal(sft.main, c | settings, FLAGS["sft"] | flags)
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]
