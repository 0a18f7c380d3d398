"""Groups dealt to ranks: each has about as much to learn from, and a step's metrics are those of
one rank. Two real processes with gloo."""

import os
import random
from pathlib import Path
from types import SimpleNamespace

import child
import pytest
import torch
import torch.distributed as dist

import experience
import infoseed
import learner
import rollout
import train
from common import load_config
from journal import Timer
from ranks import World, mean_over_ranks, start_distributed

# --- who gets what


def loads(tokens: list[int], learns: list[bool], dealt: list[list[int]]) -> list[int]:
    """Tokens that need a backward, of each rank."""
    return [sum(tokens[place] for place in places if learns[place]) for places in dealt]


def test_groups_stay_where_they_are_when_nothing_is_gained():
    assert experience.share_out([5, 5, 5, 5], [True] * 4, 2) == [[0, 1], [2, 3]]
    assert experience.share_out([5] * 6, [False] * 6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert experience.share_out([9, 1, 4], [True, False, True], 1) == [[0, 1, 2]]


def test_what_learns_is_shared_out_first_and_the_others_even_out_the_forwards():
    # one rank had all that learns
    tokens = [10, 10, 10, 10, 99, 50, 50, 1]
    learns = [True] * 4 + [False] * 4
    dealt = experience.share_out(tokens, learns, 2)
    assert loads(tokens, learns, dealt) == [20, 20]
    assert dealt[0][2:] == [4, 7] or dealt[1][2:] == [4, 7]  # 99 + 1 against 50 + 50


def test_a_group_that_learns_weighs_three_times_one_that_rests():
    learns = [True, False, False, False]
    assert experience.share_out([10, 20, 20, 1], learns, 2) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_with_half_of_64_groups_idle_no_rank_of_8_has_a_tenth_more_than_the_mean(seed):
    rng = random.Random(seed)
    tokens = [rng.randint(2_000, 16_000) for _ in range(64)]
    learns = [rng.random() < 0.5 for _ in range(64)]
    dealt = experience.share_out(tokens, learns, 8)
    assert sorted(place for places in dealt for place in places) == list(range(64))
    assert {len(places) for places in dealt} == {8}  # a rank's rows are as many as ever
    before = loads(tokens, learns, [list(range(r * 8, r * 8 + 8)) for r in range(8)])
    after = loads(tokens, learns, dealt)
    mean = sum(after) / 8
    assert max(before) > 1.3 * mean
    assert max(after) < 1.1 * mean


def test_tokens_of_a_group_count_a_shared_prompt_once():
    group = []
    for length in (2, 5):
        group.append({"prompt_ids": [1] * 7, "completion_ids": [1] * length})
    assert experience.group_tokens(group, packed=True) == 7 + 2 + 5
    assert experience.group_tokens(group, packed=False) == 2 * (7 + 5)


@pytest.mark.parametrize("pack", [True, False])
def test_groups_are_dealt_out_by_the_tokens_that_are_computed(pack, monkeypatch):
    counted = []

    def gather_rows(tokens):
        counted.extend(tokens.tolist())
        return tokens.repeat(2)  # the other rank has groups of the same sizes

    monkeypatch.setattr(experience, "gather_rows", gather_rows)
    monkeypatch.setattr(experience, "gather_objects", lambda leaving: [])
    monkeypatch.setattr(experience, "share_out", lambda *args: [[0, 1], [2, 3]])
    world = World(0, 2, torch.device("cpu"))
    collected = collected_by(world)
    experience.deal(collected, world, load_config([f"--pack_sequences={pack}"]))
    groups = rollout.groups_of(collected.rollouts, P // 2)
    assert counted == [experience.group_tokens(group, pack) for group in groups]


@pytest.mark.parametrize(
    "flags, resting",
    [
        ([], [True, True, False]),
        (["--objective=grpo"], [True, True, False]),
        (["--maxent_skip_equal_groups=wrong"], [True, False, False]),
        (["--maxent_skip_equal_groups=none"], [False] * 3),
        (["--objective=token_entropy"], [False] * 3),
        (["--objective=dr_grpo", "--beta=0.1"], [False] * 3),
        # its bonus is 0 where rewards are equal
        (["--objective=grpo", "--policy_entropy_bonus_coef=0.1"], [True, True, False]),
        # right answers differ by how likely they were, wrong ones do not
        (["--objective=grpo", "--unlikeliness_coef=0.1"], [True, False, False]),
        (["--info_seed_num_seeds=2", "--info_seed_reward=0.1"], [False] * 3),
    ],
)
def test_which_groups_rest(flags, resting):
    rewards = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    c = load_config(flags)
    teaching = learner.may_have_gradient(rewards, c["beta"], c)
    assert (~teaching).tolist() == resting


# --- a step on two ranks and on one

P = 4
G = 4
CASES = {
    "maxent": ["--objective=maxent", "--max_tokens_per_micro_batch=60"],
    "grpo": [
        "--objective=grpo",
        "--num_iterations=2",
        "--max_tokens_per_micro_batch=40",
        "--epsilon=0.001",
    ],
    "reference": ["--objective=flow", "--beta=0.3"],
    "seeds": ["--info_seed_num_seeds=2", "--info_seed_lambda=3"],
}


def collected_by(world: World) -> experience.Collected:
    """A rank's part of a step in which only the first two groups, the longest, teach something:
    they are on the first of two ranks."""
    rng = random.Random(1)
    rows, rollouts = [], []
    for place in range(P):
        rows.append({"id": str(place), "prompt_ids": [10 + place] * (2 + place)})
        for j in range(G):
            length = rng.randint(7, 9) if place < 2 else rng.randint(1, 3)
            ids = [rng.randrange(100) for _ in range(length)]
            r = {"prompt_ids": rows[-1]["prompt_ids"], "completion_ids": ids}
            r |= {"logprobs": [-rng.random() for _ in ids], "finish_reason": "stop"}
            rollouts.append(r | ({"seed_id": j - 2} if j >= 2 else {}))
    rewards = torch.tensor([[0.0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    share = P // world.size
    own = slice(world.rank * share, world.rank * share + share)
    mine = rollouts[own.start * G : own.stop * G]
    right = rewards[own] == 1
    return experience.Collected(
        rank=world.rank,
        prompts=rows[own],
        rollouts=mine,
        rewards_per_func=rewards[own, :, None],
        right=right,
        rewards=rewards,
        metrics={},
    )


def one_step(c: dict, world: World) -> dict:
    """Places and metrics of a step, as train.train has them."""
    torch.manual_seed(0)
    collected = experience.deal(collected_by(world), world, c)
    # what is known of each row moves with it
    own = collected.rewards[collected.rank * len(collected.prompts) :][: len(collected.prompts)]
    assert torch.equal(collected.right, own == 1)
    assert torch.equal(collected.rewards_per_func, own[..., None])
    engine = train.load_policy(c, world.device)
    reference = train.load_reference(c, engine, world.device)
    batch = rollout.to_batch(collected.rollouts, "cpu")
    seeds = infoseed.Seeds(engine, collected, c, "cpu")
    group = learner.measure_groups(engine, reference, batch, collected, seeds.rewards, c)
    targets = learner.group_targets(group, c["maxent_tau"], c["beta"], c)
    norm = learner.step_counts(targets, group.lengths)
    state = {"beta": c["beta"]}
    run = SimpleNamespace(
        config=c, engine=engine, world=world, controller_state=state, step=0, skipped_steps=0
    )
    run.timer = Timer()
    metrics = train.update(run, batch, learner.local_targets(targets, world), norm, seeds)
    metrics |= learner.sampler_mismatch(batch, -1)
    metrics |= learner.weight_metrics(targets, batch, c)
    metrics |= seeds.metrics(targets)
    metrics |= learner.group_metrics(collected.rewards, group.lengths)
    metrics |= mean_over_ranks(rollout.completion_metrics(collected.rollouts, G))
    return {"places": [int(row["id"]) for row in collected.prompts], "metrics": metrics}


def on_a_rank(folder: Path, configs: dict) -> None:
    torch.set_num_threads(1)
    world = start_distributed()
    result = {name: one_step(c, world) for name, c in configs.items()}
    torch.save(result, folder / f"{world.rank}_of_{world.size}.pt")
    dist.barrier()
    os._exit(0)  # what takes engines and threads apart is not what is tested


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("balance")
    configs = {}
    for name, flags in CASES.items():
        plain = ["--max_prompt_length=9", "--max_completion_length=9", "--learning_rate=1e-3"]
        plain.append("--maxent_tau=0.2")
        configs[name] = load_config(
            [f"--model={tiny_model_dir}", "--dataset.name=countdown", *plain, *flags]
        )
    started = []
    for size in (1, 2):
        logs = [folder / f"{rank}_of_{size}.log" for rank in range(size)]
        started += child.start_ranks(size, on_a_rank, folder, configs, logs=logs)
    for process in started:
        assert child.status(process) == 0, [p.read_text() for p in folder.glob("*.log")]
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


@pytest.mark.parametrize("case", CASES)
def test_the_metrics_of_two_ranks_are_those_of_one_wherever_groups_are_learnt_from(results, case):
    one = results["0_of_1"][case]
    first, second = results["0_of_2"][case], results["1_of_2"][case]
    assert one["places"] == [0, 1, 2, 3]
    moved = {tuple(first["places"]), tuple(second["places"])}
    if case != "reference":
        assert moved in ({(0, 2), (1, 3)}, {(0, 3), (1, 2)})
    assert first["metrics"] == second["metrics"]
    assert set(one["metrics"]) == set(first["metrics"])
    for name, value in one["metrics"].items():
        if not name.startswith("time/"):
            assert first["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_seconds_of_learning_are_those_of_the_slowest_rank_and_of_the_mean(results):
    for rank in ("0_of_2", "1_of_2"):
        metrics = results[rank]["maxent"]["metrics"]
        assert 0 < metrics["time/learn_mean"] <= metrics["time/learn_slowest"]
    alone = results["0_of_1"]["maxent"]["metrics"]
    assert alone["time/learn_mean"] == alone["time/learn_slowest"]


def test_two_different_ranks_have_a_slowest_and_a_mean(monkeypatch):
    monkeypatch.setattr(learner, "gather_rows", lambda own: torch.cat([own, own + 2.0]))
    found = learner.learning_seconds(1.0)
    assert found == {"time/learn_slowest": 3.0, "time/learn_mean": 2.0, "time/wait": 2.0}


def test_shares_of_clipped_tokens_are_those_of_the_last_update(results):
    """In the first update nothing is clipped."""
    metrics = results["0_of_1"]["grpo"]["metrics"]
    assert metrics["clip_ratio/low"] + metrics["clip_ratio/high"] > 0
