"""What the ranks of test_zero.py do: three updates on fixed rollouts under each case and ZeRO
stage; rank 0 saves the parameters."""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

import infoseed
import rollout
import train
from common import load_config
from journal import Timer
from learner import (
    accumulate_gradients,
    group_targets,
    local_targets,
    measure_groups,
    step_counts,
)
from policy import named_weights
from ranks import World, start_distributed

P = 4
G = 4
CASES = {
    "maxent": ["--objective=maxent"],
    # a group needs over 40 tokens: it is cut
    "maxent_cut": ["--objective=maxent", "--max_tokens_per_micro_batch=40"],
    "grpo_two_updates": [
        "--objective=grpo",
        "--num_iterations=2",
        "--max_tokens_per_micro_batch=50",
    ],
    "modes_and_kl": [
        "--objective=dr_grpo",
        "--mode_entropy_coef=0.3",
        "--beta=0.1",
        "--max_tokens_per_micro_batch=90",
    ],
    "gspo_bonus": [
        "--objective=gspo",
        "--importance_sampling=none",
        "--policy_entropy_bonus_coef=0.05",
        "--max_tokens_per_micro_batch=50",
    ],
    "token_entropy": [
        "--objective=token_entropy",
        "--token_entropy_coef=0.5",
        "--importance_sampling=sequence_truncate",
    ],
    "infoseed_nce": [
        "--info_seed_num_seeds=2",
        "--info_seed_lambda=3",
        "--num_iterations=2",
        "--max_tokens_per_micro_batch=50",
    ],
    "infoseed_ce": [
        "--info_seed_num_seeds=2",
        "--info_seed_lambda=3",
        "--info_seed_loss_type=ce",
        "--info_seed_pooling=last",
        "--max_tokens_per_micro_batch=50",
    ],
    "infoseed_adapters": [
        "--lora_rank=2",
        "--beta=0.5",  # the reference is the policy with adapters off
        "--info_seed_num_seeds=2",
        "--info_seed_lambda=3",
        "--info_seed_loss_type=ce",  # its head is trained beside adapters
        "--max_tokens_per_micro_batch=50",
    ],
    "maxent_tilted": ["--objective=maxent", "--beta=0.5", "--reference_placement=sharded"],
}


def rollouts_of(step: int) -> tuple[list, torch.Tensor]:
    """P * G ragged rollouts and rewards with ties, the same everywhere."""
    rng = random.Random(step)
    rows = []
    for i in range(P * G):
        prompt = [rng.randrange(100) for _ in range(2 + i // G)]
        completion = [rng.randrange(100) for _ in range(rng.randint(1, 9))]
        rows.append({"prompt_ids": prompt, "completion_ids": completion})
    for row in rows:
        row["logprobs"] = [-rng.random() for _ in row["completion_ids"]]
    rewards = torch.tensor([[float(rng.random() < 0.4) for _ in range(G)] for _ in range(P)])
    rewards[1] = 1.0  # an all-equal group
    if step == 1:
        rewards[2:] = 0.0  # the second of two ranks has no other
    return rows, rewards


def collected_by(rollouts: list[dict], rewards) -> SimpleNamespace:
    """As an experience; InfoSeed takes the last two rows of every group for its own."""
    for i, r in enumerate(rollouts):
        if i % G >= G - 2:
            r["seed_id"] = i % G - (G - 2)
    rows = [{"prompt_ids": r["prompt_ids"]} for r in rollouts[::G]]
    return SimpleNamespace(prompts=rows, rollouts=rollouts, right=None, rewards=rewards)


def three_updates(c: dict, world: World) -> dict:
    torch.manual_seed(0)  # InfoSeed's head
    engine = train.load_policy(c, torch.device("cpu"))
    reference = train.load_reference(c, engine, torch.device("cpu"))
    share = P // world.size * G  # rows of a rank
    for step in range(3):
        rows, rewards = rollouts_of(step)
        mine = rows[world.rank * share : (world.rank + 1) * share]
        batch = rollout.to_batch(mine, "cpu")
        collected = collected_by(mine, rewards)
        group = measure_groups(engine, reference, batch, collected, rewards, c)
        targets = group_targets(group, c["maxent_tau"], c["beta"], c)
        norm = step_counts(targets, group.lengths)
        run = SimpleNamespace(
            config=c,
            engine=engine,
            world=world,
            controller_state={"beta": c["beta"]},
            step=step,
            skipped_steps=0,
            timer=Timer(),
        )
        seeds = infoseed.Seeds(engine, collected, c, "cpu")
        metrics = train.update(run, batch, local_targets(targets, world), norm, seeds)
    result = {
        "weights": weights_of(engine, c),
        "loss": metrics["loss"],
        "seed_loss": metrics.get("seed/loss", 0.0),
        "grad_norm": float(engine.get_global_grad_norm()),
        "applied": run.skipped_steps == 0,
    }
    return result | {"nan": poisoned_update(run, batch, targets, norm)}


def weights_of(engine, c: dict) -> dict:
    weights = named_weights(engine.module.lm, c["zero_stage"])
    return {name: tensor.clone() for name, tensor in weights}


def poisoned_update(run, batch: dict, targets, norm: dict) -> dict:
    """One more update whose loss is NaN on the last rank only."""
    c = run.config
    engine = run.engine
    before = weights_of(engine, c)
    mine = local_targets(targets, run.world)
    if run.world.rank == run.world.size - 1:
        for key in ("weights", "advantages"):
            if getattr(mine, key) is not None:
                mine = mine._replace(**{key: getattr(mine, key) * float("nan")})
    accumulate_gradients(engine, batch, mine, c["beta"], c, norm)
    engine.step()
    after = weights_of(engine, c)
    return {
        "applied": engine.was_step_applied(),
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
    }


def all_cases(model: Path, out: Path, stage: int) -> None:
    world = start_distributed()
    common = [
        f"--model={model}",
        "--num_generations=4",
        "--max_prompt_length=9",
        "--max_completion_length=9",
        "--learning_rate=1e-3",
        "--maxent_tau=0.2",
        "--dataset.name=countdown",
        "--max_tokens_per_micro_batch=16384",  # unless a case has less
    ]
    for name, flags in CASES.items():
        c = load_config([*common, *flags, f"--zero_stage={stage}"])
        result = three_updates(c, world)
        if world.rank == 0:
            torch.save(result, out / f"{name}.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    # no farewell: an engine for each case and two process groups taken apart beside gloo's threads
    # are not what is tested, and may abort the process
    os._exit(0)
