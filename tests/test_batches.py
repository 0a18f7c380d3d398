"""From rollouts to tensors, micro-batches and log-probs, against loops that do the same slowly."""

import copy
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import shared_by

import checks
import learner
import rollout
import sft
from common import load_config
from policy import Policy, completion_mask

examples = settings(max_examples=60)
packed_or_not = pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
EOS = 0  # also what pad() fills with


def rollout_of(prompt_ids: list, completion_ids: list) -> dict:
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [-0.1 * (i + 1) for i in range(len(completion_ids))],
    }


RAGGED = [
    rollout_of([5, 6], [7, EOS]),
    rollout_of([5, 6, 7, 8, 9], [10, 11, EOS, EOS, 12, EOS]),
    rollout_of([EOS], [13]),
    rollout_of([9, 9, 9], [EOS]),
]


def random_rollouts(count: int, seed: int) -> list[dict]:
    """Ragged, with token id 0 anywhere."""
    rng = random.Random(seed)
    rollouts = []
    for _ in range(count):
        prompt = rng.choices(range(100), k=rng.randint(1, 9))
        completion = rng.choices(range(100), k=rng.randint(1, 9))
        rollouts.append(rollout_of(prompt, completion))
    return rollouts


# --- tensors


def test_a_batch_holds_prompt_and_completion_side_by_side_and_counts_the_eos():
    batch = rollout.to_batch(RAGGED, "cpu")
    assert batch["prompt_lengths"].tolist() == [2, 5, 1, 3]
    assert batch["lengths"].tolist() == [2, 6, 1, 1]
    for row, r in enumerate(RAGGED):
        whole = r["prompt_ids"] + r["completion_ids"]
        assert batch["ids"][row].tolist() == whole + [0] * (11 - len(whole))
        logps = batch["sampler_logps"][row, : len(r["logprobs"])].tolist()
        assert logps == pytest.approx(r["logprobs"])
    assert batch["sampler_logps"].shape == (4, 6)
    assert batch["ids"].dtype == torch.long


def test_masks_come_from_lengths_and_keep_a_completion_of_zeros():
    mask = completion_mask(rollout.to_batch(RAGGED, "cpu")["lengths"])
    assert mask.tolist() == [[t < len(r["completion_ids"]) for t in range(6)] for r in RAGGED]


def test_building_a_batch_leaves_the_rollouts_as_they_are():
    before = [{key: list(value) for key, value in r.items()} for r in RAGGED]
    rollout.to_batch(RAGGED, "cpu")
    assert before == RAGGED


def test_taking_rows_cuts_to_their_own_longest_and_loses_no_token():
    batch = rollout.to_batch(RAGGED, "cpu") | {"old_logps": torch.arange(24.0).view(4, 6)}
    part = rollout.take(batch, torch.tensor([3, 0]))
    assert part["ids"].tolist() == [[9, 9, 9, EOS], [5, 6, 7, EOS]]
    assert part["sampler_logps"].shape == (2, 2)
    assert part["old_logps"].tolist() == [[18.0, 19.0], [0.0, 1.0]]
    assert part["lengths"].tolist() == [1, 2]
    assert batch["ids"].shape == (4, 11)
    one = rollout.take(batch, torch.tensor([1]))
    assert one["ids"][0].tolist() == RAGGED[1]["prompt_ids"] + RAGGED[1]["completion_ids"]


def test_taking_rows_cuts_what_a_user_has_added_per_token_and_nothing_else():
    own = {
        "surprise": torch.arange(24.0).view(4, 6),
        "features": torch.arange(48.0).view(4, 6, 2),
        "of_rows": torch.arange(20.0).view(4, 5),
    }
    part = rollout.take(rollout.to_batch(RAGGED, "cpu") | own, torch.tensor([3, 0]))
    assert part["surprise"].tolist() == [[18.0, 19.0], [0.0, 1.0]]
    assert part["features"].tolist() == own["features"][[3, 0], :2].tolist()
    assert part["of_rows"].tolist() == own["of_rows"][[3, 0]].tolist()
    again = rollout.take(part, torch.tensor([0]))  # of a batch that is cut already
    assert again["surprise"].tolist() == [[18.0]]


SAMPLING = rollout.Sampling(temperature=1.0, max_tokens=6, stop_token_ids=[EOS], seeds=[1, 2])


class Fake:
    """An engine that answers with what it was given, the last prompt first."""

    def __init__(self, *rollouts):
        self.rollouts = list(rollouts)

    def generate(self, prompts_ids, n, sampling, finished):
        for i in reversed(range(len(prompts_ids))):
            finished(i, self.rollouts[i * n : (i + 1) * n])
        return self.rollouts


def test_generate_decodes_without_special_tokens():
    tokenizer = sft.tiny_tokenizer()
    ids = tokenizer("2*3+4", add_special_tokens=False)["input_ids"]
    engine = Fake(rollout_of([5], [*ids, EOS]), rollout_of([5], ids))
    rollouts = rollout.generate(engine, tokenizer, [[5]], 2, SAMPLING)
    assert [r["text"] for r in rollouts] == ["2*3+4", "2*3+4"]
    assert rollouts[0]["completion_ids"][-1] == EOS


def test_a_prompts_completions_are_handed_on_with_their_text_as_soon_as_they_are_there(
    tiny_model_dir,
):
    tokenizer = sft.tiny_tokenizer()
    ids = tokenizer("abcd", add_special_tokens=False)["input_ids"]
    told = []

    def group_done(i, group):
        told.append((i, [r["text"] for r in group]))

    fake = Fake(*[rollout_of([5], [i, EOS]) for i in ids])
    rollout.generate(fake, tokenizer, [[5], [6]], 2, SAMPLING, group_done)
    assert told == [(1, ["c", "d"]), (0, ["a", "b"])]
    told.clear()
    engine = rollout.HfEngine(str(tiny_model_dir), {}, torch.float32, torch.device("cpu"))
    sampling = rollout.Sampling(temperature=1.0, max_tokens=3, stop_token_ids=[0], seeds=[1, 2])
    rollouts = rollout.generate(engine, tokenizer, [[5], [6, 7]], 2, sampling, group_done)
    texts = [r["text"] for r in rollouts]
    assert told == [(0, texts[:2]), (1, texts[2:])]
    # a rank with nothing to sample again
    assert rollout.generate(engine, tokenizer, [], 2, sampling._replace(seeds=[])) == []


@pytest.mark.parametrize(
    "rollouts, words",
    [
        ([rollout_of([5], [6])], "1 completions for 1 prompts x 2"),
        (
            [rollout_of([5], [6]), {**rollout_of([5], [6, 7]), "logprobs": [-0.1]}],
            "2 tokens with 1 log-probs",
        ),
        ([rollout_of([5], [6]), rollout_of([5], [])], "0 tokens"),
    ],
)
def test_an_engine_that_returns_too_little_is_an_error(rollouts, words):
    with pytest.raises(RuntimeError, match=words):
        rollout.generate(Fake(*rollouts), sft.tiny_tokenizer(), [[5]], 2, SAMPLING)


# --- micro-batches

plans = st.tuples(
    st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 300), st.integers(0, 9999)
)


def batch_of(units: int, unit: int, seed: int) -> dict:
    """Units of one prompt each, which now and then is that of the unit before, one row in ten with
    another; ids at random where rows have ended."""
    rng = random.Random(seed)
    pool = [rng.choices([0, 1], k=rng.randint(1, 30)) for _ in range(2)]
    pool += [[0, 1], [0, 1, 1], [1, 1, 1]]
    pool += [[*pool[0], 0], [*pool[0], 1, 1]]
    rollouts = []
    for unit_prompt in rng.choices(pool, k=units):
        for _ in range(unit):
            prompt = unit_prompt if rng.random() < 0.9 else rng.choice(pool)
            completion = rng.choices([0, 1], k=rng.randint(1, 30))
            rollouts.append(rollout_of(prompt, completion))
    batch = rollout.to_batch(rollouts, "cpu")
    ends = batch["prompt_lengths"] + batch["lengths"]
    junk = torch.randint(2, batch["ids"].shape, generator=torch.Generator().manual_seed(seed))
    inside = torch.arange(junk.shape[1]) < ends[:, None]
    return batch | {"ids": torch.where(inside, batch["ids"], junk)}


def cost(batch: dict, rows, pack: bool) -> int:
    """Tokens of a micro-batch: padded to the longest row, or packed, without what a row shares with
    the row before it."""
    P = batch["prompt_lengths"][rows].tolist()
    T = batch["lengths"][rows].tolist()
    if not pack:
        return len(P) * max(p + t for p, t in zip(P, T))
    total = 0
    before = None
    for row, p, t in zip(rows.tolist(), P, T):
        ids = batch["ids"][row, : p + t].tolist()
        own = ids[:p], ids[p:]
        total += p + t - shared_by(before, own)
        before = own
    return total


def plan_of(batch: dict, budget: int, unit: int, pack: bool, at_least=(0, 0), rests=None):
    """The micro-batches of one rank, which has heard at_least of the others."""
    filled = learner.fill_micro_batches(batch, budget, unit, pack, rests)
    return learner.stretch(*filled, *at_least)


def kept_together(batch: dict, budget: int, unit: int, pack: bool) -> list[list[int]]:
    """What must not come apart: the rows of a group that fits, and each row of another."""
    found = []
    for group in torch.arange(len(batch["ids"])).view(-1, unit):
        if cost(batch, group, pack) <= budget:
            found.append(group.tolist())
        else:
            found += [[i] for i in group.tolist()]
    return found


def units_in(rows, kept: list[list[int]]) -> list[list[int]]:
    """The units of a micro-batch, in its order; an error if one is not there as a whole."""
    unit_of = {own[0]: own for own in kept}
    found = []
    left = rows.tolist()
    while left:
        own = unit_of[left[0]]
        assert left[: len(own)] == own
        found.append(own)
        left = left[len(own) :]
    return found


@packed_or_not
@examples
@given(plans)
def test_every_row_is_in_one_micro_batch_and_no_group_that_fits_is_split(pack, case):
    units, unit, budget, seed = case
    batch = batch_of(units, unit, seed)
    plan = plan_of(batch, budget, unit, pack).learning
    assert sorted(torch.cat(plan).tolist()) == list(range(units * unit))
    # rows that share a prompt stay neighbours
    assert not pack or torch.cat(plan).tolist() == list(range(units * unit))
    kept = kept_together(batch, budget, unit, pack)
    found = [own for rows in plan for own in units_in(rows, kept)]
    assert sorted(found) == kept


@packed_or_not
@examples
@given(plans)
def test_no_micro_batch_is_over_the_budget_unless_one_row_alone_is(pack, case):
    units, unit, budget, seed = case
    batch = batch_of(units, unit, seed)
    for rows in plan_of(batch, budget, unit, pack).learning:
        assert cost(batch, rows, pack) <= budget or len(rows) == 1


@packed_or_not
@examples
@given(plans)
def test_no_two_neighbouring_micro_batches_would_fit_into_one(pack, case):
    """Not even the first unit of the second would have fitted into the first."""
    units, unit, budget, seed = case
    batch = batch_of(units, unit, seed)
    kept = kept_together(batch, budget, unit, pack)
    plan = plan_of(batch, budget, unit, pack).learning
    for a, b in itertools.pairwise(plan):
        first = torch.tensor(units_in(b, kept)[0])
        assert cost(batch, torch.cat([a, first]), pack) > budget


@packed_or_not
@examples
@given(plans, st.data())
def test_a_plan_can_be_stretched_to_any_number_and_keeps_its_promises(pack, case, data):
    units, unit, budget, seed = case
    batch = batch_of(units, unit, seed)
    own = len(plan_of(batch, budget, unit, pack).learning)
    at_least = data.draw(st.integers(1, units))
    plan = plan_of(batch, budget, unit, pack, (0, at_least)).learning
    assert len(plan) == max(own, at_least)
    assert sorted(torch.cat(plan).tolist()) == list(range(units * unit))
    kept = kept_together(batch, budget, unit, pack)
    for rows in plan:
        assert len(units_in(rows, kept)) > 0
        assert cost(batch, rows, pack) <= budget or len(rows) == 1


@packed_or_not
@examples
@given(plans, st.data())
def test_rows_without_a_gradient_come_first_in_micro_batches_of_their_own(pack, case, data):
    """at_least: what the ranks have agreed on; where a rank has too few units that learn, a single
    one that rests goes along for each that it lacks."""
    units, unit, budget, seed = case
    batch = batch_of(units, unit, seed)
    rests = data.draw(st.lists(st.booleans(), min_size=units, max_size=units))
    rests = torch.tensor(rests).repeat_interleave(unit)
    at_least = data.draw(st.tuples(st.integers(0, units), st.integers(0, units)))
    plan = plan_of(batch, budget, unit, pack, at_least, rests)
    assert sorted(torch.cat(plan.micro_batches).tolist()) == list(range(units * unit))
    kept = kept_together(batch, budget, unit, pack)
    for rows in plan.micro_batches:
        assert cost(batch, rows, pack) <= budget or len(rows) == 1
    assert all(rests[rows].all() for rows in plan.resting)
    along = [rows for rows in plan.learning if rests[rows].any()]
    active = sum(not rests[own[0]] for own in kept)
    assert len(along) == max(0, at_least[1] - active)
    assert all(len(units_in(rows, kept)) == 1 for rows in along)
    assert len(plan.learning) >= at_least[1]
    assert len(plan.resting) + plan.missing >= at_least[0]
    assert plan.missing == 0 or all(len(units_in(rows, kept)) == 1 for rows in plan.resting)
    if pack:  # and neighbours stay neighbours
        active = [rows for rows in plan.learning if not rests[rows].any()]
        for kind in (plan.resting, active):
            rows = torch.cat([torch.tensor([], dtype=torch.long), *kind]).tolist()
            assert rows == sorted(rows)


def test_what_a_unit_shares_with_the_one_before_it_in_its_micro_batch_is_counted_once():
    """Not only with the one before it in the batch: the group between these two rests."""
    rollouts = [rollout_of([5, 6, 7, 8], [9])] * 2
    rollouts += [rollout_of([1], [9])] * 2 + rollouts
    batch = rollout.to_batch(rollouts, "cpu")
    rests = torch.tensor([False, False, True, True, False, False])
    for budget, micro_batches in ((8, 1), (7, 2)):
        assert len(plan_of(batch, budget, 2, True, rests=rests).learning) == micro_batches


@packed_or_not
@examples
@given(plans, st.data())
def test_only_groups_over_the_budget_are_split_unless_another_rank_needs_more(pack, case, data):
    """`others`: (a split group, micro-batches that rest, that learn) on another rank."""
    units, unit, budget, seed = case
    batch = batch_of(units, unit, seed)
    too_large = [
        cost(batch, rows, pack) > budget for rows in torch.arange(units * unit).view(units, unit)
    ]
    splits = unit > 1 and any(too_large)
    learn = data.draw(st.integers(0, units * unit if unit > 1 else units))
    others = [data.draw(st.booleans()), 0, learn]
    c = {"max_tokens_per_micro_batch": budget, "pack_sequences": pack}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "across_ranks", lambda x, op: x.maximum(torch.tensor(others)))
        if others[2] > units and not (splits or others[0]):
            return  # then that rank has a split group, or more groups than this one
        plan = learner.agree_on_plan(batch, unit, c)
    assert sorted(torch.cat(plan.learning).tolist()) == list(range(units * unit))
    assert len(plan.learning) >= max(1, others[2])
    if not (splits or others[0]):
        assert plan.split is None
        return
    place = {i: k for k, rows in enumerate(plan.learning) for i in rows.tolist()}
    for group, large in zip(torch.arange(units * unit).view(units, unit).tolist(), too_large):
        apart = len({place[i] for i in group}) > 1
        assert plan.split[group].tolist() == [apart] * unit
        assert apart or not large or unit == 1
        assert large or not apart or len(plan.learning) == others[2]


@packed_or_not
@examples
@given(plans)
def test_plans_are_the_same_every_time_and_leave_the_batch_alone(pack, case):
    units, unit, budget, seed = case
    batch = batch_of(units, unit, seed)
    untouched = batch_of(units, unit, seed)
    first = plan_of(batch, budget, unit, pack, (0, units))
    second = plan_of(batch, budget, unit, pack, (0, units))
    assert all(map(torch.equal, first.learning, second.learning))
    assert all(torch.equal(batch[key], untouched[key]) for key in untouched)


@packed_or_not
@examples
@given(plans)
def test_a_budget_of_just_what_all_rows_cost_takes_them_at_once(pack, case):
    units, unit, _, seed = case
    batch = batch_of(units, unit, seed)
    whole = cost(batch, torch.arange(units * unit), pack)
    assert len(plan_of(batch, whole, unit, pack).learning) == 1
    tight = plan_of(batch, whole - 1, unit, pack)
    assert units == 1 or len(tight.learning) == 2


@packed_or_not
@examples
@given(plans)
def test_a_units_tokens_are_what_it_costs_alone(pack, case):
    units, unit, _, seed = case
    batch = batch_of(units, unit, seed)
    rows = torch.arange(units * unit).split(unit)
    found = learner.units_of(batch, unit, pack)
    assert [one.cost for one in found] == [cost(batch, r, pack) for r in rows]


# --- log-probs


@pytest.fixture(scope="module", params=["tied", "untied"])
def lm(request):
    return sft.tiny_model(100, seed=1, layers=2, width=32, tied=request.param == "tied")


def naive_logps(lm, r: dict, temperature: float):
    """(T,) log-probs and entropies of one row, alone and with all its logits."""
    ids = torch.tensor([r["prompt_ids"] + r["completion_ids"]])
    all_logps = (lm(ids).logits[0].float() / temperature).log_softmax(-1)
    logps = []
    entropies = []
    for t in range(len(r["prompt_ids"]), ids.shape[1]):
        log_p = all_logps[t - 1]
        logps.append(log_p[ids[0, t]])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logps), torch.stack(entropies)


SHARED = [
    rollout_of([5, 6], [7, EOS]),
    rollout_of([5, 6], [10, 11, EOS, EOS, 12, EOS]),
    rollout_of([EOS], [13]),
    rollout_of([9, 9, 9], [EOS]),
]


def policy_of(lm, pack: bool, chunk: int = 7):
    """Around a copy: a packed model can't be called by itself any more."""
    return Policy(copy.deepcopy(lm), 0.7, chunk, pack=pack)


def policy_logps(policy, rollouts: list):
    batch = rollout.to_batch(rollouts, "cpu")
    return policy(batch["ids"], batch["prompt_lengths"], batch["lengths"])


@packed_or_not
def test_log_probs_and_entropy_equal_those_of_the_full_logits_row_by_row(lm, pack):
    rollouts = RAGGED + SHARED + random_rollouts(6, seed=2)
    logps, entropy = policy_logps(policy_of(lm, pack), rollouts)
    for row, r in enumerate(rollouts):
        T = len(r["completion_ids"])
        for found, wanted in zip((logps, entropy), naive_logps(lm, r, 0.7)):
            torch.testing.assert_close(found[row, :T], wanted, rtol=0, atol=1e-5)
            assert not found[row, T:].any()


@packed_or_not
def test_gradients_equal_those_of_the_full_logits(lm, pack):
    rollouts = random_rollouts(5, seed=3) + SHARED
    coefficients = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    lm.zero_grad()
    for i, r in enumerate(rollouts):
        logps, _ = naive_logps(lm, r, 0.7)
        (logps * coefficients[i, : len(logps)]).sum().backward()
    policy = policy_of(lm, pack)
    policy.lm.zero_grad()
    logps, _ = policy_logps(policy, rollouts)
    (logps * coefficients[:, : logps.shape[1]]).sum().backward()
    for (name, p), wanted in zip(policy.lm.named_parameters(), lm.parameters(), strict=True):
        torch.testing.assert_close(p.grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=name)


@packed_or_not
def test_log_probs_do_not_depend_on_other_rows_padding_order_or_chunk(lm, pack):
    policy = policy_of(lm, pack)
    rollouts = RAGGED + SHARED + random_rollouts(4, seed=4)
    whole, _ = policy_logps(policy, rollouts)
    reverse, _ = policy_logps(policy_of(lm, pack, chunk=1000), rollouts[::-1])
    torch.testing.assert_close(reverse.flip(0), whole, rtol=0, atol=1e-5)
    batch = rollout.to_batch(rollouts, "cpu")
    # other and more padding
    wider = torch.nn.functional.pad(batch["ids"], (0, 3))
    ends = batch["prompt_lengths"] + batch["lengths"]
    junk = torch.where(torch.arange(wider.shape[1]) < ends[:, None], wider, 77)
    padded, _ = policy(junk, batch["prompt_lengths"], batch["lengths"])
    torch.testing.assert_close(padded, whole, rtol=0, atol=1e-5)
    for row, r in enumerate(rollouts):
        alone, _ = policy_logps(policy, [r])
        torch.testing.assert_close(alone[0], whole[row, : alone.shape[1]], rtol=0, atol=1e-5)


@packed_or_not
def test_scoring_in_micro_batches_puts_every_row_where_it_belongs(lm, pack):
    batch = rollout.to_batch(RAGGED + SHARED + random_rollouts(6, seed=5), "cpu")
    plan = plan_of(batch, 25, 1, pack)
    assert len(plan.learning) > 3
    policy = policy_of(lm, pack)
    whole, _ = policy(batch["ids"], batch["prompt_lengths"], batch["lengths"])
    torch.testing.assert_close(learner.forward_rows(policy, batch, plan), whole, rtol=0, atol=1e-5)


def test_metrics_of_groups_and_completions_are_what_they_are_called():
    rewards, lengths = torch.tensor([[1.0, 0], [1, 1]]), torch.tensor([[2.0, 4], [6, 8]])
    assert learner.group_metrics(rewards, lengths) == pytest.approx(
        {
            "reward": 0.75,
            "reward_std": 0.5**0.5 / 2,
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 5.0,
            "completions/max_length": 8.0,
        }
    )
    reasons = ("length", "stop", "stop", "stop")
    rows = [rollout_of([5], [6, 7]) | {"finish_reason": reason} for reason in reasons]
    assert rollout.completion_metrics(rows, 2)["completions/clipped_ratio"] == 0.25


# --- what is trained

OBJECTIVES = [
    *checks.OBJECTIVES,
    "maxent --maxent_loss=policy_gradient",
    "maxent --maxent_loss=mle",
]


def loss_of(logps, entropy, batch: dict, targets, c: dict):
    """The loss of one step of 2 prompts x 2 completions from its log-probs, put together as
    accumulate_gradients does."""
    norm = {"rows": 4, "prompts": 2, "tokens": int(batch["lengths"].sum()), "active": 2}
    part = batch | {"old_logps": logps.detach(), "sampler_logps": logps.detach()}
    if targets.advantages is not None:
        part["advantages"] = targets.advantages.flatten()
    total, *_ = learner.token_loss(logps, entropy, part, 0.0, c, norm)
    if learner.couples_rows(c):
        scores = learner.loss_scores(logps, batch["lengths"], c).view(2, 2)
        total = total + learner.group_loss(scores, targets, c, norm)
    return total


@packed_or_not
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_completion_token_is_trained_the_eos_too_and_nothing_else(objective, pack):
    """Of all hidden states, only those that predict a completion token get a gradient. States are
    told by (place in the row, token)."""
    c = load_config(["--num_generations=2", "--pkpo_k=1", *f"--objective={objective}".split()])
    batch = rollout.to_batch(SHARED, "cpu")
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    group = learner.GroupMeasures(
        rewards,
        rewards,
        batch["lengths"].view(2, 2),
        clusters=torch.tensor([[0, 1], [0, 1]]),
        mean_logps=torch.zeros(2, 2),
    )
    targets = learner.group_targets(group, 0.2, 0.0, c)
    policy = Policy(sft.tiny_model(100, seed=1, layers=1, width=32, tied=False), 1.0, 64, pack=pack)
    seen = []

    def hook(module, args, given, out):
        out.last_hidden_state.retain_grad()
        ids = given["input_ids"]
        in_order = torch.arange(ids.shape[1]).expand_as(ids)
        seen.append((ids, given.get("position_ids", in_order), out.last_hidden_state))

    policy.lm.base_model.register_forward_hook(hook, with_kwargs=True)
    logps, entropy = policy(batch["ids"], batch["prompt_lengths"], batch["lengths"])
    loss_of(logps, entropy, batch, targets, c).backward()
    ((ids, positions, states),) = seen
    trained = states.grad.abs().sum(-1) != 0
    wanted = []
    for r in SHARED:
        row = r["prompt_ids"] + r["completion_ids"]
        for place in range(len(r["prompt_ids"]) - 1, len(row) - 1):
            wanted.append((place, row[place]))
    if pack:
        # the end of the prompt that two rows share predicts both their first tokens
        wanted.remove((1, 6))
    assert sorted(zip(positions[trained].tolist(), ids[trained].tolist())) == sorted(wanted)


# --- metrics


@examples
@given(st.integers(1, 3), st.integers(2, 5), st.integers(0, 9999))
def test_diversity_equals_a_slow_loop(prompts, n, seed):
    rng = random.Random(seed)
    rollouts = []
    for _ in range(prompts * n):
        rollouts.append(rollout_of([1], rng.choices(range(6), k=rng.randint(1, 7))))
    one = 0.0
    two = 0.0
    overlap = 0.0
    for g in range(prompts):
        group = [r["completion_ids"] for r in rollouts[g * n : (g + 1) * n]]
        tokens = [t for ids in group for t in ids]
        bigrams = [(ids[i], ids[i + 1]) for ids in group for i in range(len(ids) - 1)]
        one += len(set(tokens)) / len(tokens) / prompts
        two += (len(set(bigrams)) / len(bigrams) if bigrams else 0.0) / prompts
        pairs = list(itertools.combinations(map(set, group), 2))
        overlap += sum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs) / prompts
    slow = {
        "completions/distinct_1": one,
        "completions/distinct_2": two,
        "completions/jaccard": overlap,
    }
    assert rollout.diversity_metrics(rollouts, n) == pytest.approx(slow, abs=1e-6)
