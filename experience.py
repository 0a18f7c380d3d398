"""The experience of a step: its prompts, G completions of each by the current policy, and their
rewards.

    experience = Experience(sampler, inputs, config, world, replay_state)
    collected = experience.collect(step, timer)   # all ranks together
    collected = deal(collected, world, config)    # gives all ranks about equal work

P prompts of the step, p = P / world of this rank; G completions of each, and S more whose prompt
has an InfoSeed seed (S = 0 without InfoSeed); F reward functions. A place is a prompt's index in
the step, 0..P-1.
"""

import json
import math
from collections import deque
from typing import NamedTuple

import torch

import infoseed
import learner
import rollout
import scoring
from checks import OBJECTIVES, entries, uses_scores
from common import print_above_bar, scheduled
from data import all_rows
from loss import equal_groups
from preflight import Inputs
from ranks import World, any_rank, gather_objects, gather_rows, wait_for_ranks
from stream import Replay, step_rows

# When Symptoms warns:
EQUAL_STEPS = 5  # after this many steps in a row in which no group taught anything
ENTROPY_STEPS = 16  # the entropy of a run is followed by its mean over so many steps
# how far it may rise above its lowest. Of 279 runs 23 went further, by both, and 20 of these
# came apart (LOG.md, 2026-11-30)
ENTROPY_RISE = 2.0  # times
ENTROPY_NATS = 0.5  # nats per token
CUT_STEPS = 5  # after this many in a row in which more than CUT_SHARE of completions were cut off
CUT_SHARE = 0.5
FLAT_STEPS = 5  # once, after this many steps, if in none of them weights told right from wrong


class Collected(NamedTuple):
    """A step's completions and their rewards."""

    rank: int
    prompts: list[dict]  # this rank's p rows of the dataset
    rollouts: list[dict]  # their p * (G + S) completions, prompt-major
    rewards_per_func: torch.Tensor  # (p, G + S, F) of each completion
    right: torch.Tensor  # (p, G + S) bool: which completions are correct
    rewards: torch.Tensor  # (P, G + S) of the whole step, the same on every rank
    metrics: dict  # of rewards, sampler and resampling, of the whole step, the same on every rank

    @property
    def local_rewards(self) -> torch.Tensor:
        """(p, G + S): this rank's rewards. `rewards` is in rank order, also after deal()."""
        p = len(self.prompts)
        return self.rewards[self.rank * p : (self.rank + 1) * p]

    @property
    def unseeded_indices(self) -> torch.Tensor:
        """(p * G,) indices in `rollouts` of the completions without an InfoSeed seed."""
        return torch.tensor([i for i, r in enumerate(self.rollouts) if "seed_id" not in r])

    @property
    def unseeded(self) -> list[dict]:
        return [r for r in self.rollouts if "seed_id" not in r]


class Sampled(NamedTuple):
    """A step's groups as soon as all are scored, from which collect() makes a Collected."""

    groups: dict  # {place: (its G + S completions, their values (G + S, F))} of this rank
    failed: list[dict]  # records of rewards that failed on this rank
    rewards: torch.Tensor  # (P, G + S) of the whole step
    metrics: dict  # of rewards and resampling, for the whole step


class Experience:
    """Samples and scores one step after the other; remembers prompts for the replay, if it is
    on."""

    def __init__(self, sampler, inputs: Inputs, config: dict, world: World, replay_state: dict):
        self.sampler = sampler
        self.inputs = inputs
        self.config = config
        self.rank = world.rank
        self.places = world.share(config["prompts_per_step"])  # this rank's
        self.replay_state = replay_state  # after the last whole step, for checkpoints
        self.replay = None
        remembered = entries(config, "replay")
        if remembered["size"]:
            rows = all_rows(inputs.pools)
            self.replay = Replay(rows, remembered["size"], remembered["ucb"], replay_state)

    def collect(self, step: int, timer) -> Collected:
        """Samples and scores a step. All ranks together: they agree on which groups are sampled
        again, and on whether too many rewards failed (RewardsFailed)."""
        c = self.config
        rows = step_rows(self.inputs, self.replay, step, c)  # P, the same on every rank
        sampled = self.sample_groups(rows, step, timer)
        if self.replay is not None:
            self.replay.update(rows, sampled.rewards[:, : c["num_generations"]])
            self.replay_state = self.replay.state
        metrics = sampled.metrics | self.sampler.take_metrics()
        if c["rollout_ahead"] and step + 1 < c["max_steps"]:
            self.ask_ahead(step + 1)

        rollouts = []
        for place in self.places:
            group, _ = sampled.groups[place]
            rollouts += group
        rewards_per_func = self.stack_rewards(sampled.groups)
        return Collected(
            rank=self.rank,
            prompts=[rows[place] for place in self.places],
            rollouts=rollouts,
            rewards_per_func=rewards_per_func,
            right=scoring.correct(rewards_per_func, self.inputs.reward_functions),
            rewards=sampled.rewards,
            metrics=metrics,
        )

    def sample_groups(self, rows: list[dict], step: int, timer) -> Sampled:
        """Samples and scores the step's P prompts. With resample_equal_groups, prompts whose
        completions are all equally good are replaced, in `rows` too."""
        c = self.config
        groups, failed = self.sample(rows, self.places, step, 0, timer)
        rewards, metrics = self.step_rewards(groups, timer)
        sampled = Sampled(groups, failed, rewards, metrics)
        if c["resample_equal_groups"]:
            sampled = self.resample(rows, sampled, step, timer)
        self.sampler.sleep()  # its memory is the learner's until the next rollout
        if sampled.failed:
            folder = c["output_dir"]
            print_above_bar(scoring.save_failures(folder, sampled.failed, step + 1, self.rank))
        completions = sampled.rewards.numel()
        # all ranks reach the same verdict
        scoring.check_failures(sampled.metrics, completions, c["max_reward_failures"])
        return sampled

    def resample(self, rows: list[dict], sampled: Sampled, step: int, timer) -> Sampled:
        """What `sampled` becomes in up to resample_equal_groups rounds. In each, other prompts
        replace those with equal rewards, in `rows` too."""
        groups, failed, rewards, metrics = sampled
        worst = metrics  # of the round with the most failures
        resampled = 0
        for attempt in range(1, self.config["resample_equal_groups"] + 1):
            equal = equal_groups(rewards[:, : self.config["num_generations"]])  # (P,) bool
            if not equal.any():
                break
            places = self.replace_rows(rows, equal, rewards, step, attempt)
            # called even without places, because ranks that share a sampler call it together
            replacements, new_failed = self.sample(rows, places, step, attempt, timer)
            groups = groups | replacements
            failed = failed + new_failed
            rewards, metrics = self.step_rewards(groups, timer)
            worst = max(worst, metrics, key=lambda m: m["reward/failures"])
            resampled += int(equal.sum())
        # counts failures of replaced groups too: if all rewards of a group fail, it is replaced
        metrics = metrics | scoring.failure_counts(worst) | {"resampled_groups": resampled}
        return Sampled(groups, failed, rewards, metrics)

    def sample(self, rows: list[dict], places, step: int, attempt: int, timer) -> tuple[dict, list]:
        """Samples and scores the prompts at `places`. Returns {place: (its G + S completions, their
        reward values (G + S, F))} and the records of rewards that failed."""
        asked = [rows[place] for place in places]
        tokenizer = self.inputs.tokenizer
        with timer("rollout"):
            prompts, G, sampling, group_done = self.request(asked, places, step, attempt)
            rollouts = rollout.generate(self.sampler, tokenizer, prompts, G, sampling, group_done)
            # called even without rows, because ranks that share a sampler call it together
            rollouts = infoseed.add_completions(
                self.sampler, tokenizer, asked, rollouts, sampling, self.config
            )
        with timer("reward"):
            functions = self.inputs.reward_functions
            limit = scoring.max_timeouts_of_step(asked, functions, self.config)
            values, failed = scoring.measure(rollouts, asked, functions, self.config, limit)
        groups = rollout.groups_of(rollouts, len(asked))  # of G + S
        return dict(zip(places, zip(groups, values))), failed

    def request(self, rows: list[dict], places, step: int, attempt: int) -> tuple:
        """The arguments of rollout.generate() for these rows: (prompts, G, sampling, group_done).

        The sampler calls group_done with a prompt's completions as soon as they are complete. That
        starts their scoring while other prompts are still being sampled. scoring.measure() waits
        for all of them."""
        c = self.config
        suffix = f"-r{attempt}" if attempt else ""
        seeds = []
        names = []
        for place in places:
            # from the place, not the rank, so that any number of ranks samples the same
            parts = (c["seed"], step, place, attempt) if attempt else (c["seed"], step, place)
            seeds.append(rollout.prompt_seed(*parts))
            names.append(f"s{step + 1}-p{place}{suffix}")
        sampling = rollout.Sampling(
            temperature=scheduled(c["temperature"], step),
            max_tokens=c["max_completion_length"],
            stop_token_ids=self.inputs.stop_ids,
            seeds=seeds,
            names=names,
        )

        def group_done(i: int, group: list[dict]) -> None:
            scoring.begin(group, rows[i], self.inputs.reward_functions, c)

        return [row["prompt_ids"] for row in rows], c["num_generations"], sampling, group_done

    def step_rewards(self, groups: dict, timer) -> tuple[torch.Tensor, dict]:
        """Rewards (P, G + S) of the whole step and their metrics, once all ranks have sampled."""
        wait_for_ranks(timer)
        rewards_per_func = gather_rows(self.stack_rewards(groups))  # (P, G + S, F)
        return scoring.combine(rewards_per_func, self.inputs.reward_functions)

    def stack_rewards(self, groups: dict) -> torch.Tensor:
        """(p, G + S, F): the rewards of this rank's places, in their order."""
        return torch.stack([groups[place][1] for place in self.places])

    def replace_rows(self, rows: list[dict], equal, rewards, step: int, attempt: int) -> list[int]:
        """Changes `rows`: the groups that taught nothing, equal (P,) bool, get other prompts.
        Returns those of this rank's places that have to be sampled again. rewards: (P, G + S)."""
        G = self.config["num_generations"]
        replaced = equal.nonzero().flatten().tolist()  # places of all ranks
        if self.replay is not None:
            # otherwise a remembered prompt that has nothing left to teach would be chosen in every
            # step
            self.replay.update([rows[place] for place in replaced], rewards[equal, :G])
        fresh = step_rows(self.inputs, self.replay, step, self.config, attempt)
        for place in replaced:
            rows[place] = fresh[place]
        return [place for place in replaced if place in self.places]

    def ask_ahead(self, step: int) -> None:
        """Starts to sample a later step in the background, with the weights that the servers hold
        now. The sampler keeps the completions until generate() is called with the same
        arguments."""
        rows = step_rows(self.inputs, self.replay, step, self.config)
        local_rows = [rows[place] for place in self.places]
        request = self.request(local_rows, self.places, step, 0)
        rollout.begin(self.sampler, self.inputs.tokenizer, *request)


# --- for a person to read


def log_rollouts(folder, collected: Collected, local_targets, functions: list, step: int) -> None:
    """Writes all rollouts of this rank to rollouts/step_N.rank_r.jsonl, each with what the
    objective asked of it. local_targets: learner.GroupTargets (p, G + S)."""
    rewards = collected.local_rewards  # (p, G + S)
    path = folder / "rollouts" / f"step_{step:06d}.rank_{collected.rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    size = rewards.shape[1]  # G + S
    rewards_per_func = collected.rewards_per_func.flatten(0, 1)  # (p * (G + S), F)
    right = collected.right.flatten().tolist()
    named = {  # (p, G + S) or None
        "advantage": local_targets.advantages,
        "weight": local_targets.weights,
        "goal": local_targets.goals,
    }
    asked = {}  # {name: its value for each row}, without those that this objective does not have
    for name, values in named.items():
        if values is not None:
            asked[name] = values.flatten().tolist()
    with open(path, "w", encoding="utf-8") as file:
        for i, (r, reward) in enumerate(zip(collected.rollouts, rewards.flatten().tolist())):
            row = collected.prompts[i // size]
            line = {
                "step": step,
                "id": row["id"],
                "prompt": row["prompt"],
                "completion": r["text"],
                "reward": reward,
                "rewards": scoring.by_name(functions, rewards_per_func[i]),
                "correct": right[i],
                "finish_reason": r["finish_reason"],
                "tokens": len(r["completion_ids"]),
                "logprob": sum(r["logprobs"]),
            }
            for name, values in asked.items():
                line[name] = values[i]
            if "seed_id" in r:  # InfoSeed's
                line["seed_id"] = r["seed_id"]
            file.write(json.dumps(line) + "\n")


# --- which rank learns from which groups


def group_tokens(rollouts: list[dict], packed: bool) -> int:
    """Roughly how many tokens a forward over a group computes: with packing the prompt counts once.
    Ignores that groups may share the beginning of a prompt, and that InfoSeed's prompts differ: a
    wrong number only makes the ranks' work less equal."""
    lengths = [len(r["completion_ids"]) for r in rollouts]
    prompt_length = len(rollouts[0]["prompt_ids"])
    if packed:
        return prompt_length + sum(lengths)
    return (prompt_length + max(lengths)) * len(rollouts)


def share_out(tokens: list[int], learns: list[bool], ranks: int) -> list[list[int]]:
    """The places of the groups that each rank gets, the same number on every rank.

    Greedy: largest groups first, each goes to the rank with the least work so far; groups that need
    no backward come last and fill the gaps. If that does not relieve the busiest rank, all groups
    stay where they were sampled."""
    share = len(tokens) // ranks
    # a backward costs twice as much as a forward, so the two together cost three
    work = [n * 3 if learning else n for n, learning in zip(tokens, learns)]
    dealt = [[] for _ in range(ranks)]
    load = [0] * ranks

    for place in sorted(range(len(tokens)), key=lambda i: (not learns[i], -tokens[i])):
        home = place // share  # the rank that sampled it, which gets it if loads are equal
        free = [rank for rank in range(ranks) if len(dealt[rank]) < share]
        rank = min(free, key=lambda r: (load[r], r != home))
        dealt[rank].append(place)
        load[rank] += work[place]
    sampled = [list(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]
    busiest = max(sum(work[place] for place in places) for places in sampled)
    if busiest <= max(load):  # moving groups would gain nothing
        return sampled
    return [sorted(places) for places in dealt]


class Group(NamedTuple):
    """One prompt's part of a Collected, which deal() moves between ranks."""

    prompt: dict
    rollouts: list[dict]  # G + S
    rewards_per_func: torch.Tensor  # (G + S, F)
    right: torch.Tensor  # (G + S,) bool


def deal(collected: Collected, world: World, c: dict) -> Collected:
    """The same step with its groups moved between ranks, so that no rank waits long for another.
    `rewards` (P, G + S) gets the new order: the groups of rank 0 first. All ranks together."""
    if world.size == 1:
        return collected
    groups = rollout.groups_of(collected.rollouts, len(collected.prompts))
    held = {}  # {place: Group}, at first of the groups that this rank has sampled
    for i, place in enumerate(world.share(len(collected.rewards))):
        held[place] = Group(
            prompt=collected.prompts[i],
            rollouts=groups[i],
            rewards_per_func=collected.rewards_per_func[i],
            right=collected.right[i],
        )

    tokens = [group_tokens(group, c["pack_sequences"]) for group in groups]
    tokens = gather_rows(torch.tensor(tokens)).long()  # (P,)
    # only a guess: a wrong one costs nothing but time
    learns = learner.may_have_gradient(collected.rewards, c["beta"], c)  # (P,)
    dealt = share_out(tokens.tolist(), learns.tolist(), world.size)

    places = dealt[world.rank]  # that this rank learns from
    leaving = {place: group for place, group in held.items() if place not in places}
    for moved in gather_objects(leaving):  # from all ranks, to all ranks
        held |= moved
    kept = [held[place] for place in places]
    order = torch.tensor(dealt).flatten()  # (P,)
    return collected._replace(
        prompts=[group.prompt for group in kept],
        rollouts=[r for group in kept for r in group.rollouts],
        rewards_per_func=torch.stack([group.rewards_per_func for group in kept]),
        right=torch.stack([group.right for group in kept]),
        rewards=collected.rewards[order],
    )


# --- why a run may not learn


def against_rising_entropy(c: dict) -> str:
    """What to change where the entropy rises: whatever raises it, and the step itself."""
    objective = OBJECTIVES[c["objective"]]
    raises = {
        "token_entropy_coef": objective.term == "token_entropy",
        "policy_entropy_bonus_coef": c["policy_entropy_bonus_coef"] > 0,
        "mode_entropy_coef": c["mode_entropy_coef"] > 0,
        "maxent_tau": objective.group_loss != "",
        "learning_rate": True,
    }
    cure = "lower " + " or ".join(f"{key}={c[key]}" for key in raises if raises[key])
    if objective.group_loss == "weights" and c["beta"] == 0:
        cure += ", or use a reference (beta)"  # right rows are then weighted by it, not all alike
    return cure


class Symptoms:
    """Looks for what would explain that a run does not learn. Counts over the steps of this launch;
    only equal_steps is saved in checkpoints and goes on at a resume."""

    def __init__(self, config: dict, equal_steps: int = 0):
        self.config = config
        self.steps = 0  # of this launch
        self.equal_steps = equal_steps  # in a row, in which no group's rewards taught anything
        self.cut_steps = 0  # in a row, in which more than CUT_SHARE of completions were cut off
        self.told_of_cuts = False
        self.widest = 0.0  # the largest difference of two rewards of a group
        self.entropies = deque(maxlen=ENTROPY_STEPS)
        self.lowest_entropy = math.inf  # of means over ENTROPY_STEPS steps
        self.told_of_entropy = False

    def warnings(
        self, step: int, collected: Collected, metrics: dict, tau: float, beta: float
    ) -> list[str]:
        """The warnings after a step, usually none. All ranks together. step: how many are done;
        metrics, tau, beta: of the last one, the same on all ranks."""
        rewards = collected.rewards[:, : self.config["num_generations"]]  # (P, G)
        self.steps += 1
        sentences = (
            self.look_at_cuts(step, metrics["completions/clipped_ratio"]),
            self.look_at_equal(step, rewards, metrics, collected.right),
            self.look_at_weights(step, rewards, tau, beta),
            self.look_at_entropy(metrics["entropy"]),
        )
        return [f"warning: {sentence}" for sentence in sentences if sentence]

    def look_at_cuts(self, step: int, share: float) -> str:
        """A sentence, once, when for CUT_STEPS steps more than CUT_SHARE of the completions were
        cut off. share: how many of this step's."""
        c = self.config
        self.cut_steps = self.cut_steps + 1 if share > CUT_SHARE else 0
        if self.cut_steps < CUT_STEPS or self.told_of_cuts:
            return ""
        self.told_of_cuts = True
        cure = "raise it, or see with --dry_run which tokens end a completion"
        if self.cut_steps < step:
            cure = (
                f"if they ended before, the policy is breaking, so lower "
                f"learning_rate={c['learning_rate']}; if not, {cure}"
            )
        return (
            f"for {CUT_STEPS} steps more than {CUT_SHARE:.0%} of the completions (now {share:.0%}) "
            f"have been cut off at max_completion_length={c['max_completion_length']}: {cure}"
        )

    def look_at_equal(self, step: int, rewards, metrics: dict, right) -> str:
        """A sentence when for EQUAL_STEPS steps no group's rewards (P, G) taught anything. right
        (p, G + S): which of this rank's completions are correct."""
        c = self.config
        # InfoSeed's rows have rewards and a loss of their own
        teaches = c["info_seed_num_seeds"] > 0 or learner.rewards_teach(rewards, c).any()
        self.equal_steps = 0 if teaches else self.equal_steps + 1
        if self.equal_steps != EQUAL_STEPS:
            return ""
        all_right = not any_rank(not bool(right.all()))
        unless = ""
        if OBJECTIVES[c["objective"]].has_custom_advantages:
            unless = f" (unless objective={c['objective']!r} looks beyond the rewards of a group)"
        return (
            f"for {EQUAL_STEPS} steps all completions of a group have had equal rewards (mean "
            f"{rewards.mean():.3g}), from which nothing is learnt{unless}: "
            f"{self.suspect(step, rewards, metrics, all_right)}"
        )

    def suspect(self, step: int, rewards, metrics: dict, all_right: bool) -> str:
        """The end of look_at_equal()'s sentence, by what the completions have in common."""
        c = self.config
        differed = self.equal_steps < step  # before these steps
        cut_off = metrics["completions/clipped_ratio"]
        to_see = (
            f"look at a few with --log_rollouts_steps=1, and at reward_funcs={c['reward_funcs']}"
        )
        if all_right and differed:
            return "all are right, so take harder prompts, or stop here"
        if all_right:
            return f"all have been right from the first step; take harder prompts, or {to_see}"
        if cut_off > CUT_SHARE:  # look_at_cuts() says what to do
            length = c["max_completion_length"]
            return f"{cut_off:.0%} of the completions are cut off at max_completion_length={length}"
        # the same tokens (jaccard 1) in the same order: together the completions of a group have no
        # more different bigrams than one of them
        bigrams = metrics["completions/distinct_2"] * c["num_generations"]
        if metrics["completions/jaccard"] > 0.999 and bigrams < 1.01:
            return (
                f"the completions of a group are the same, too; raise "
                f"temperature={c['temperature']}, or, if they differed at first, lower "
                f"learning_rate={c['learning_rate']}"
            )
        if differed and not (rewards > 0).any():
            return (
                f"rewards differed before, so the policy may have lost what it knew; lower "
                f"learning_rate={c['learning_rate']}, or, if they seldom differed, take easier "
                f"prompts or raise num_generations={c['num_generations']}"
            )
        return to_see

    def look_at_weights(self, step: int, rewards, tau: float, beta: float) -> str:
        """A sentence if in the run's first FLAT_STEPS steps no rewards (P, G) of a group differed
        enough for its weights to tell right from wrong. Only then: later, when all answers are
        right, small differences, such as those of a penalty on length, may be all that is left."""
        c = self.config
        if step > FLAT_STEPS or OBJECTIVES[c["objective"]].group_loss != "weights":
            return ""
        if self.steps < step:  # a resume: rewards of the steps before are unknown
            return ""
        self.widest = max(self.widest, float((rewards.amax(1) - rewards.amin(1)).max()))
        # the weights are softmax(rewards / softness): if the widest difference is less than that,
        # the best answer has at most e times the weight of the worst
        softness = c["maxent_q_temperature"] * (tau + beta)
        # scores that are scaled down turn a small lead in w into a large one of the policy
        scale = min(1.0, c["maxent_score_scale"]) if uses_scores(c) else 1.0
        if step < FLAT_STEPS or not 0 < self.widest < scale * softness:
            return ""
        return (
            f"in the first {FLAT_STEPS} steps rewards of a group differed by {self.widest:.3g} at "
            f"most, and maxent_q_temperature * (maxent_tau + beta) = {softness:.3g} is more: the "
            f"weights hardly tell right from wrong; lower maxent_tau or beta, or raise "
            f"reward_weights={c['reward_weights']}"
        )

    def look_at_entropy(self, entropy: float) -> str:
        """A sentence, once, when the mean entropy (nats per token) of ENTROPY_STEPS steps has risen
        far above its lowest."""
        c = self.config
        self.entropies.append(entropy)
        if len(self.entropies) < ENTROPY_STEPS or self.told_of_entropy:
            return ""
        mean = sum(self.entropies) / ENTROPY_STEPS
        lowest = self.lowest_entropy
        self.lowest_entropy = min(lowest, mean)  # a mean of NaN leaves it as it is
        if not mean >= max(ENTROPY_RISE * lowest, ENTROPY_NATS + lowest):
            return ""
        self.told_of_entropy = True
        return (
            f"the entropy has risen to {mean:.3g} nats a token, from {lowest:.3g} (means of "
            f"{ENTROPY_STEPS} steps): completions are probably coming apart, whatever their "
            f"rewards say; read a few with --log_rollouts_steps=1, go back to a checkpoint from "
            f"before, and {against_rising_entropy(c)}"
        )
