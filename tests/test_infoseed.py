"""infoseed.py: its losses against slow loops, what reaches the gradient, and the whole thing
through the real scripts.

For the last part a toy: three letters R, G, B in any order are right (a triangle to colour). The
warm start has seen prompts with a digit 0, 1, 2 behind them, and then begins with "its" letter in 3
of 7 answers instead of a third: too little to show in pred_acc, enough to be amplified."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deadlines import PATIENCE
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import infoseed
import preflight
import prompts
import rollout
import sft
from common import UserError, load_config

ROOT = Path(__file__).resolve().parent.parent
examples = settings(max_examples=25)
sizes = dict(P=st.integers(2, 4), S=st.integers(2, 4), seed=st.integers(0, 999))


def features(P, S, seed, H=5):
    return torch.randn(P * S, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a, b):
    def dot(a, b):
        return sum(x * y for x, y in zip(a, b))

    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


# --- losses


def slow_info_nce(h, S, T):
    rows = h.tolist()
    total = 0.0
    for i, own in enumerate(rows):
        e = [math.exp(cosine(own, row) / T) for row in rows]
        others = sum(e) - e[i]
        positive = [j for j in range(len(rows)) if j % S == i % S and j // S != i // S]
        total -= sum(math.log(e[j] / others) for j in positive) / len(positive)
    return total / len(rows)


@examples
@given(**sizes)
def test_infonce_equals_the_slow_loop_and_its_gradient_finite_differences(P, S, seed):
    h = features(P, S, seed)
    assert infoseed.info_nce(h, S, 0.3).item() == pytest.approx(slow_info_nce(h, S, 0.3), rel=1e-9)
    leaf = h.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: infoseed.info_nce(x, S, 0.3), leaf)


@examples
@given(**sizes)
def test_log_q_is_the_softmax_over_class_means_without_the_rows_of_the_own_prompt(P, S, seed):
    h = features(P, S, seed)
    log_q = infoseed.seed_logps(h, S, 0.2)
    groups = h.view(P, S, -1)
    for i, own in enumerate(h.tolist()):
        other_prompts = [x for x in range(P) if x != i // S]
        means = groups[other_prompts].mean(0).tolist()  # (S, H)
        e = [math.exp(cosine(own, mean) / 0.2) for mean in means]
        assert log_q[i].exp().tolist() == pytest.approx([v / sum(e) for v in e], rel=1e-6)


def test_completions_that_tell_nothing_are_guessed_at_chance_however_much_their_prompts_differ():
    """The reason for leaving out the whole prompt: with only the row itself left out, guessing
    would be right far below 1/S."""
    S = 4
    right = []
    for seed in range(40):
        of_prompt = 5 * features(16, 1, seed, H=8).repeat_interleave(S, 0)
        h = of_prompt + features(16, S, seed + 1000, H=8)
        guesses = infoseed.seed_logps(h, S, 0.1).argmax(1)
        right.append((guesses == torch.arange(64) % S).double().mean().item())
    # 2,560 rows: three standard errors
    assert sum(right) / len(right) == pytest.approx(0.25, abs=0.03)


def test_seeds_that_show_are_found_and_their_loss_is_lower():
    S, h = 3, features(6, 3, 0, H=8)
    shown = h + 9 * torch.eye(8, dtype=torch.float64)[:3].repeat(6, 1)
    metrics = infoseed.seed_metrics(
        shown, infoseed.seed_logps(shown, S, 0.1), torch.ones(6, S), None, None
    )
    assert metrics["seed/pred_acc"] == 1.0
    assert metrics["seed/reward"] == 1.0
    assert infoseed.info_nce(shown, S, 0.1) < infoseed.info_nce(h, S, 0.1)


def test_the_reward_is_the_information_about_the_own_seed_on_seed_rows_only():
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1], [0.9, 0.1]])  # 2 prompts x 2 seeds
    log_q = q.log()
    task = torch.tensor([[1.0, 0, 1, 0], [0, 0, 1, 1]])  # G = 2, S = 2
    shaped = infoseed.add_rewards(task, log_q, 2, 0.5)
    assert torch.equal(shaped[:, :2], task[:, :2])
    assert shaped[0, 2:].tolist() == pytest.approx([1, 0], abs=1e-6)  # tells nothing: nothing
    wanted = [1 + 0.5 * math.log(1.8), 1 + 0.5 * math.log(0.2)]
    assert shaped[1, 2:].tolist() == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(task, torch.tensor([[1.0, 0, 1, 0], [0, 0, 1, 1]]))
    assert torch.equal(infoseed.add_rewards(task, log_q, 2, 0.0), task)


def test_entropy_gap_compares_the_weights_within_ordinary_and_within_seed_rows():
    def gap(w):
        h = features(1, 2, 0)
        log_q = torch.zeros(2, 2)
        metrics = infoseed.seed_metrics(h, log_q, torch.zeros(1, 2), w, torch.tensor([True]))
        return metrics["seed/entropy_gap"]

    assert gap(torch.tensor([[0.25, 0.25, 0.5, 0.0]])) == pytest.approx(math.log(2))
    assert gap(torch.tensor([[0.0, 0.0, 1.0, 0.0]])) == 0  # a tiny tau


def test_the_metrics_of_seeds_are_of_the_tasks_reward_and_of_distances_between_means():
    P, S = 3, 3
    h = features(P, S, 0)
    seeds = infoseed.Seeds.__new__(infoseed.Seeds)  # measured already: no engine is needed
    seeds.count, seeds.h, seeds.log_q = S, h, torch.zeros(P * S, S)
    rewards = torch.tensor([[1.0, 1, 0, 0, 1], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]])
    seeds.rewards = rewards + 5  # what InfoSeed adds is no reward of the task
    metrics = seeds.metrics(SimpleNamespace(task_rewards=rewards, weights=None, active=None))
    assert metrics["seed/reward"] == pytest.approx(1 / 9)
    means = [[sum(h[p * S + s][k] for p in range(P)) / P for k in range(5)] for s in range(S)]
    pairs = list(itertools.combinations(means, 2))
    wanted = sum(math.dist(one, other) for one, other in pairs) / len(pairs)
    assert metrics["seed/diversity_l2"] == pytest.approx(wanted, rel=1e-9)


# --- groups and prompts


def test_without_seeds_a_group_stays_as_it_is_and_nothing_is_sampled():
    base = [{"n": i} for i in range(6)]
    assert infoseed.add_completions(None, None, [{}, {}], base, {}, load_config([])) is base


@pytest.mark.parametrize(
    "template, first",
    [
        ("{prompt} #{seed}", "a{seed}{prompt}b #0"),
        ("seed {seed}: {prompt}", "seed 0: a{seed}{prompt}b"),
        ("seed {seed}", "a{seed}{prompt}b\nseed 0"),
    ],
)
def test_a_seed_prompt_fills_in_the_template_and_leaves_braces_of_the_prompt_alone(template, first):
    tokenizer = sft.tiny_tokenizer()
    c = load_config(
        [
            "--info_seed_num_seeds=3",
            f"--info_seed_prompt_template={template}",
        ]
    )
    ids = prompts.seed_prompts({"id": "x", "prompt": "a{seed}{prompt}b"}, tokenizer, c)
    assert tokenizer.decode(ids[0]) == f"<|user|>{first}<|assistant|>"
    assert len(ids) == 3
    assert len({tuple(i) for i in ids}) == 3


def test_characters_of_the_template_that_the_tokenizer_leaves_out_are_told(tiny_model_dir, capsys):
    flags = ["config/countdown_tiny.py", f"--model={tiny_model_dir}", "--eval_steps=0"]
    flags += ["--info_seed_num_seeds=2", "--info_seed_prompt_template={prompt} №{seed}"]
    preflight.load_inputs(load_config(flags), 1)
    said = capsys.readouterr().out
    assert (
        "no token for '№': the model does not see these characters in 2 of 2 prompts with" in said
    )
    assert said.count("warning") == 1 and "info_seed_prompt_template" in said
    for quiet in (flags[:-1], [*flags, "--info_seed_num_seeds=0"]):
        preflight.load_inputs(load_config(quiet), 1)
        assert "warning" not in capsys.readouterr().out


# 8 and 5 tokens, 19 and 16 with a seed
LONG = [{"id": "x", "prompt": "abcdef"}, {"id": "y", "prompt": "abc"}]


def fitting_config(rule: str, limit: int, *more) -> dict:
    flags = [
        "--info_seed_num_seeds=4",
        "--info_seed_prompt_template={prompt} (variant{seed})",
        f"--max_prompt_length={limit}",
        f"--long_prompts={rule}",
    ]
    return load_config([*flags, *more])


def fitting(rule: str, limit: int) -> list[dict]:
    c = fitting_config(rule, limit)
    return prompts.encode_prompts(LONG, sft.tiny_tokenizer(), c, seeds=True)


def test_a_prompt_that_only_its_seed_makes_too_long_is_found_at_the_start():
    sentence = (
        "max_prompt_length=18: 1 of 2 prompts are longer; the longest, row 'x', has 19 tokens with "
        "its seed"
    )
    with pytest.raises(UserError, match=sentence):
        fitting("error", 18)
    assert len(fitting("error", 19)) == 2
    assert [row["id"] for row in fitting("drop", 18)] == ["y"]
    assert [row["prompt"] for row in fitting("truncate", 18)] == ["bcdef", "abc"]


def test_so_it_is_in_every_source_that_a_run_trains_on(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row | {"answer": "1"}) + "\n" for row in LONG))
    named = [f"--dataset.name={file}", f"--easy_dataset.name={file}", "--easy_dataset.share=0.5"]
    c = fitting_config("drop", 18, *named)
    (pool,), _ = data.training_pools(c, sft.tiny_tokenizer())
    assert [row["prompt"] for row in pool] == ["abc"]
    assert [row["prompt"] for row in data.easy_rows(c, sft.tiny_tokenizer())] == ["abc"]


class Sampler:
    """Stands in for an engine: answers every prompt with its own last token."""

    def generate(self, prompts_ids, n, sampling, finished):
        self.seeds = sampling.seeds
        rollouts = []
        for i, ids in enumerate(prompts_ids):
            answer = {
                "prompt_ids": ids,
                "completion_ids": [ids[-2], 0],
                "logprobs": [-1.0, -1.0],
                "finish_reason": "stop",
            }
            group = [dict(answer) for _ in range(n)]
            finished(i, group)
            rollouts += group
        return rollouts


@pytest.mark.parametrize("reward, scored_under", [(0.0, "base"), (0.1, "seeded")])
def test_seeded_completions_carry_their_seed_and_train_under_the_base_prompt_or_a_rewarded_one(
    reward, scored_under
):
    tokenizer = sft.tiny_tokenizer()
    sampler = Sampler()
    c = load_config(
        [
            "--info_seed_num_seeds=2",
            "--info_seed_prompt_template={prompt}{seed}",
            f"--info_seed_reward={reward}",
        ]
    )
    rows = []
    for p in "ab":
        prompt_ids = tokenizer.encode(f"<|user|>{p}<|assistant|>")
        rows.append({"id": p, "prompt": p, "prompt_ids": prompt_ids})
    sampling = rollout.Sampling(1.0, 8, [0], seeds=[1, 2], names=["x", "y"])
    base = [{"n": i} for i in range(6)]
    groups = infoseed.add_completions(sampler, tokenizer, rows, base, sampling, c)
    assert groups[:3] + groups[5:8] == base  # prompt by prompt, ordinary rows first
    seeded = groups[3:5] + groups[8:]
    assert [(r["seed_id"], r["text"]) for r in seeded] == [(0, "0"), (1, "1")] * 2
    asked = {"base": ["a", "a", "b", "b"], "seeded": ["a0", "a1", "b0", "b1"]}[scored_under]
    prompts_of_rows = [tokenizer.decode(r["prompt_ids"]) for r in seeded]
    assert prompts_of_rows == [f"<|user|>{p}<|assistant|>" for p in asked]
    assert len(set(sampler.seeds)) == 4
    collected = SimpleNamespace(prompts=rows, rollouts=groups)
    assert [len(r["prompt_ids"]) for r in infoseed.under_base_prompt(collected, 2)] == [3] * 4


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--info_seed_prompt_template=again"], "must hold {seed}"),
        (["--info_seed_prompt_template={prompt} {prompt} {seed}"], "may hold {prompt} once"),
        (["--prompts_per_step=1"], "at least 2"),
        (["--info_seed_num_seeds=1"], "at least 2"),
        (["--info_seed_temperature=0"], "greater than 0"),
        (["--maxent_q_epsilon=0.1"], "rows of a group"),
        (["--info_seed_loss_type=l2"], "infonce"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(flags, sentence):
    with pytest.raises(UserError, match=sentence):
        load_config(["--info_seed_num_seeds=4", *flags])


# --- end to end

ORDERS = ["".join(p) for p in itertools.permutations("RGB")]
COMMON = ["--max_prompt_length=16", "--max_completion_length=5"]


def run(script: str, *flags) -> None:
    # of this process: it may be a world of one itself
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in own}
    done = subprocess.run(
        [sys.executable, ROOT / script, *COMMON, *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Rows, and the warm start."""
    folder = tmp_path_factory.mktemp("toy")
    answer = {"n": 3, "edges": [[0, 1], [1, 2], [0, 2]], "partial": "..."}
    plain = []
    tagged = []
    for a, b in itertools.product("abcdefgh", repeat=2):
        row = {"prompt": f"{a}{b}:", "answer": answer, "solutions": ORDERS}
        plain.append(row)
        for z, letter in enumerate("RGB"):
            solutions = ORDERS * 2 + [p for p in ORDERS if p[0] == letter]
            tagged.append(row | {"prompt": f"{a}{b}:{z}", "solutions": solutions})
    for name, rows in (("rows", plain), ("start", plain + tagged)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(
        "sft.py",
        f"--dataset.name={folder / 'start'}.jsonl",
        "--model=tiny",
        f"--output_dir={folder / 'start'}",
        "--steps=150",
        "--learning_rate=2e-3",
    )
    return folder


def train_toy(folder, name: str, *flags) -> dict:
    """Means over the last 10 of 50 steps."""
    run(
        "train.py",
        f"--dataset.name={folder / 'rows'}.jsonl",
        f"--model={folder / 'start'}",
        "--reward_funcs=['graph_coloring']",
        "--prompts_per_step=16",
        "--num_generations=4",
        "--info_seed_num_seeds=3",
        "--info_seed_prompt_template={prompt}{seed}",
        "--learning_rate=3e-4",
        "--max_steps=50",
        "--save_steps=-1",
        f"--output_dir={folder / name}",
        *flags,
    )
    text = (folder / name / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()[-10:]]
    means = {}
    for key in ("seed/pred_acc", "seed/reward", "reward", "weights/incorrect_mass"):
        values = [line[key] for line in lines if key in line]
        if values:  # a step without an active group has no weights
            means[key] = sum(values) / len(values)
    return means


@pytest.mark.slow
def test_seeds_become_predictable_with_loss_and_reward_at_the_same_task_reward(toy):
    """480 rows: the standard error of pred_acc is at most 0.023, that of the reward at most 0.01 at
    0.97."""
    flags = ["--info_seed_loss_type=ce", "--info_seed_lambda=0.01", "--info_seed_reward=0.3"]
    on = train_toy(toy, "on", *flags)
    off = train_toy(toy, "off", "--info_seed_lambda=0")
    assert on["seed/pred_acc"] > 0.8
    # by the task's reward: by the sum with the seed reward one row of a group would be best
    assert on["weights/incorrect_mass"] < 0.1
    assert off["seed/pred_acc"] == pytest.approx(1 / 3, abs=0.08)
    assert on["reward"] == pytest.approx(off["reward"], abs=0.04)
    assert off["reward"] > 0.9
