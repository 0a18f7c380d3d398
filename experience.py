"""The experience of a step: which prompts it takes, G completions of each by the policy as it is, what they are worth.

    got = collect(sampler, inputs, buffer, step, c, rank, world, timer)
    begun = begin(sampler, inputs, buffer, step + 1, c, rank, world)        # then collect(..., begun) of the next step finds it done
    got["rows"], got["rollouts"]        this rank's p rows and their p * (G + S) rollouts, prompt-major
    got["values"]                       (p, G + S, F) what each reward function says of them
    got["rewards"], got["metrics"]      (P, G + S) and {"reward/...": ...} of the whole step, the same on every rank

P prompts of the step over `world` ranks, p = P / world of this one, S rows asked with an InfoSeed seed (0 without).
"""

from concurrent.futures import Future

import torch
from tqdm import tqdm

import data
import infoseed
import loss as L
import rewards as R
import rollout
from inputs import Inputs
from ranks import gather_groups


def step_rows(inputs: Inputs, buffer, step: int, c: dict, attempt: int = 0) -> list[dict]:
    """The P rows of a step, the same list on every rank; attempt 1, 2, ...: other rows, to replace groups that taught nothing."""
    seed = f"{c['seed']}/again/{attempt}" if attempt else c["seed"]
    rows = data.prompts_for_step(
        inputs.sources, step, c["prompts_per_step"], seed, 0, 1, inputs.weights
    )
    if attempt:
        return rows
    rows = data.with_easy_prompts(
        rows, inputs.easy, step, data.scheduled(c["easy_schedule"], step, 0.0), c["seed"]
    )
    return rows if buffer is None else buffer.mix(rows, c["replay_fraction"])


def request(
    inputs: Inputs, rows: list[dict], places: list[int], step: int, attempt: int, c: dict
) -> tuple:
    """What a rollout engine is asked for these rows, and what is done with a prompt's completions as they come: (prompts, G, sampling, finished).
    places: their indices in the step."""
    again = [attempt] * (attempt > 0)
    sampling = {
        "temperature": data.scheduled(c["temperature_schedule"], step, c["temperature"]),
        "max_tokens": c["max_completion_length"],
        "stop_token_ids": inputs.stop_ids,
        "seeds": [rollout.prompt_seed(c["seed"], step, i, *again) for i in places],
        "names": ["-".join([f"s{step + 1}-p{i}", *(f"r{n}" for n in again)]) for i in places],
    }
    return (
        [row["prompt_ids"] for row in rows],
        c["num_generations"],
        sampling,
        lambda i, group: R.begin(group, rows[i], inputs.columns, c),
    )


def share(P: int, rank: int, world: int) -> list[int]:
    """The indices of this rank's prompts in the step."""
    return list(range(rank * (P // world), (rank + 1) * (P // world)))


def begin(sampler, inputs: Inputs, buffer, step: int, c: dict, rank: int, world: int) -> Future:
    """Has the rollouts of a coming step made in the background, by the weights that the servers hold now (rollout_ahead)."""
    own, everyone = share(c["prompts_per_step"], rank, world), step_rows(inputs, buffer, step, c)
    prompts, G, sampling, finished = request(inputs, [everyone[i] for i in own], own, step, 0, c)
    return sampler.begin(prompts, G, sampling, *rollout.with_text(inputs.tokenizer, finished))


def sample(
    sampler,
    inputs: Inputs,
    rows: list[dict],
    places: list[int],
    step: int,
    attempt: int,
    c: dict,
    timer,
    begun=None,
) -> tuple[list, torch.Tensor, list]:
    """Rollouts of these rows, their reward values (rows, G + S, F), and the failed rewards."""
    prompts, G, sampling, finished = request(inputs, rows, places, step, attempt, c)
    with timer("rollout"):
        rollouts = rollout.generate(
            sampler, inputs.tokenizer, prompts, G, sampling, finished, begun
        )
        if c["info_seed_enabled"]:  # also without rows: ranks that share an engine ask it together
            rollouts = infoseed.join(
                rollouts,
                infoseed.completions(sampler, inputs.tokenizer, rows, sampling, c),
                max(1, len(rows)),
            )
    with timer("reward"):
        return rollouts, *R.measure(rollouts, rows, inputs.columns, c)


def collect(
    sampler, inputs: Inputs, buffer, step: int, c: dict, rank: int, world: int, timer, begun=None
) -> dict:
    """All ranks together: they agree on which groups are sampled again and on whether too many rewards failed (RunStopped). begun: of begin()."""
    P, G = c["prompts_per_step"], c["num_generations"]
    everyone, own = step_rows(inputs, buffer, step, c), share(P, rank, world)
    rows, again = [everyone[i] for i in own], 0
    rollouts, values, failed = sample(sampler, inputs, rows, own, step, 0, c, timer, begun)
    size = len(rollouts) // len(rows)
    groups = [rollouts[i * size : (i + 1) * size] for i in range(len(rows))]
    rewards, metrics = R.combine(gather_groups(values), inputs.columns)
    worst = metrics  # groups that failed are replaced
    for attempt in range(1, c["resample_equal_groups"] + 1):
        stale = L.equal_groups(rewards[:, :G]).tolist()
        if not any(stale):
            break
        if (
            buffer is not None
        ):  # or a remembered prompt that has nothing left to teach would be chosen, and replaced, again and again
            buffer.update([row for row, old in zip(everyone, stale) if old], rewards[stale, :G])
        fresh = step_rows(inputs, buffer, step, c, attempt)
        places = [i for i in own if stale[i]]
        found, its_values, its_failed = sample(
            sampler, inputs, [fresh[i] for i in places], places, step, attempt, c, timer
        )
        for n, i in enumerate(places):
            rows[i - own[0]], groups[i - own[0]] = fresh[i], found[n * size : (n + 1) * size]
            values[i - own[0]] = its_values[n]
        everyone, again, failed = (
            [new if old else row for new, old, row in zip(fresh, stale, everyone)],
            again + sum(stale),
            failed + its_failed,
        )
        rewards, metrics = R.combine(gather_groups(values), inputs.columns)
        worst = max(worst, metrics, key=lambda found: found["reward/failures"])
    sampler.sleep()
    if failed:
        tqdm.write(R.save_failures(c["output_dir"], failed, step + 1, rank))
    R.check_failures(worst, rewards.numel(), c["max_reward_failures"])  # stops all ranks alike
    if buffer is not None:
        buffer.update(everyone, rewards[:, :G])
    if c["resample_equal_groups"]:
        metrics["resampled_groups"] = again
    if c["rollout_engine"] == "server":
        metrics |= sampler.take_counts()
    return {
        "rows": rows,
        "rollouts": [r for group in groups for r in group],
        "values": values,
        "rewards": rewards,
        "metrics": metrics,
    }
