"""MaxEnt-GRPO: reinforcement learning of a language model from groups of sampled answers. One file, one loop.

    python train.py config/countdown_tiny.py                                                   one process
    torchrun --standalone --nproc_per_node 2 train.py config/countdown_tiny.py --maxent_tau=0.2    two ranks
    torchrun --standalone --nproc_per_node 8 train.py config/math_maxent.py                    eight GPUs
    python train.py config/math_maxent.py --dry_run=True                                       check everything, run nothing

A step: prompts -> G rollouts each (vLLM) -> rewards -> weights or advantages over the group -> loss -> DeepSpeed -> controllers.

Where this departs from the papers:
1. Every loss is (sum of row or token terms) / (one normaliser of the whole step, all ranks), so micro-batches and ranks never change it
   (in bfloat16 but for rounding: DeepSpeed adds up the gradients of micro-batches in the model's type).
2. Rows of a group with equal rewards have advantage exactly 0, not 0 / 1e-4 noise.
3. One update per batch by default: then the old log-probs are the current ones, and the first gradient is plain REINFORCE.
   With more updates the first one's log-probs serve as the old ones: no extra forward.
4. Sampler and trainer compute slightly different log-probs. The ratio is measured every step and corrected, capped at 3
   (policy-gradient objectives; the fixed point of maxent does not depend on the sampling distribution).
5. xdr is dr_grpo with rows weighted by G * softmax(A / tau); tau = inf is dr_grpo to the bit. With xdr_ref_tilt beta is in these
   weights and no longer in the loss: beta enters once.
6. InfoSeed's class means leave out the whole prompt of the row that they judge, else chance would not be 1 / seeds.
"""

from common import load_config, script

# A wrong config is told here, at once: the imports that follow take ten seconds.
if __name__ == "__main__":
    config = script(load_config)

import math
import os
import sys
from concurrent import futures
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import checkpoint
import controllers
import data
import evaluate
import experience
import infoseed
import learner
import loss as L
import rewards as R
import rollout
from checks import warn_config
from common import RunStopped, progress, say_once
from hub import Hub
from inputs import dry_run, load_inputs
from journal import (
    MetricsLog,
    Timer,
    check_run_folder,
    hold_folder,
    make_run_folder,
    run_header,
)
from policy import (
    CheckedAdamW,
    Policy,
    dtype_of,
    named_weights,
    seed_classes,
    set_temperature,
    turn_off_dropout,
)
from ranks import across_ranks, gather_groups, leave_together, start_distributed
from replay import Replay
from server import RolloutsLost
from stop import Stop

# --- set-up


def deepspeed_config(c: dict, dtype: torch.dtype) -> dict:
    checked_here = c["zero_stage"] == 0 and dtype == torch.float32  # CheckedAdamW clips
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed asks for one; our micro-batches have as many rows as fit
        "managed_gradient_accumulation": False,  # any number of backward() per step()
        "gradient_clipping": 0.0 if checked_here else c["max_grad_norm"],
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": c["zero_stage"],
            "overlap_comm": False,  # not with unmanaged accumulation, except at stage 2
            **({"offload_optimizer": {"device": "cpu"}} if c["offload_optimizer"] else {}),
        },
        "zero_allow_untested_optimizer": True,  # torch.optim.AdamW works at every stage
        "zero_force_ds_cpu_optimizer": False,  # also offloaded, without compiling DeepSpeed's own
        "steps_per_print": sys.maxsize,
    }


def load_lm(model: str, dtype: torch.dtype, c: dict, trains: bool, device) -> Policy:
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(
        device
    )  # Policy tries it on a few tokens
    dropout = turn_off_dropout(lm)
    if trains and dropout:
        say_once(
            f"the model's dropout of up to {dropout:g} is off: completions are sampled without it"
        )
    if trains and c["gradient_checkpointing"]:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(
        lm.train(trains).requires_grad_(trains),
        c["temperature"],
        c["logprob_chunk_size"],
        seed_classes(c) if trains else 0,
        c["pack_sequences"],
    )


def adamw_settings(c: dict, device) -> dict:
    return {
        "lr": c["learning_rate"],
        "betas": (c["adam_beta1"], c["adam_beta2"]),
        "weight_decay": c["weight_decay"],
        "fused": device.type == "cuda",  # one kernel, where the default is a dozen passes
    }


def load_policy(c: dict, dtype: torch.dtype, device):
    """The DeepSpeed engine around the policy."""
    policy = load_lm(c["model"], dtype, c, trains=True, device=device)
    settings = adamw_settings(c, device)
    if c["zero_stage"] == 0 and dtype == torch.float32:
        optimizer = CheckedAdamW(policy.parameters(), c["max_grad_norm"], **settings)
    else:
        optimizer = torch.optim.AdamW(policy.parameters(), **settings)
    engine, *_ = deepspeed.initialize(
        model=policy, optimizer=optimizer, config=deepspeed_config(c, dtype)
    )
    if (
        c["offload_optimizer"] and device.type == "cuda"
    ):  # AdamW then steps on the CPU, where torchrun and vLLM leave one thread
        torch.set_num_threads(
            max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        )
    return engine


def load_reference(c: dict, dtype: torch.dtype, device):
    """The frozen reference model, None at beta = 0."""
    if c["beta"] == 0:
        return None
    reference = load_lm(c["model"], dtype, c, trains=False, device=device)
    if c["reference_placement"] == "sharded":
        sharded = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "zero_optimization": {"stage": 3},
        }
        engine, *_ = deepspeed.initialize(model=reference, config=sharded)
        engine.eval()
        return engine
    return reference.to("cpu") if c["reference_placement"] == "cpu" else reference


def learning_rate_at(step: int, c: dict) -> float:
    """Linear warm-up over warmup_steps, then constant, or down to 0 at max_steps; `step` counts finished steps."""
    if step < c["warmup_steps"]:
        return c["learning_rate"] * (step + 1) / c["warmup_steps"]
    done = (step - c["warmup_steps"]) / max(1, c["max_steps"] - c["warmup_steps"])
    return (
        c["learning_rate"]
        * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
            c["lr_scheduler_type"]
        ]
    )


# --- the loop


def update(
    engine, batch: dict, targets: dict, beta: float, norm: dict, seeds: tuple, c: dict
) -> tuple[dict, bool]:
    """num_iterations updates of the policy on this rank's rows: (metrics, whether all of them were applied). Loss, entropy and KL are those of the
    policy that sampled; clipping shows only in later updates. seeds: with InfoSeed (batch of the seed rows, features of all ranks' seed rows)."""
    metrics, applied = {}, True
    for i in range(c["num_iterations"]):
        found = learner.accumulate_gradients(engine, batch, targets, beta, c, norm)
        if seeds and c["info_seed_lambda"] > 0:
            stale = (
                i > 0 and c["info_seed_loss_type"] == "infonce"
            )  # the other loss does not look at them
            found |= infoseed.accumulate_gradients(
                engine,
                seeds[0],
                infoseed.features(engine, seeds[0], c)[0] if stale else seeds[1],
                c,
            )
        metrics |= (
            found
            if i == 0
            else {name: found[name] for name in ("clip_ratio/low", "clip_ratio/high")}
        )
        engine.step()  # skips itself, on all ranks, when the gradient is not finite
        applied = applied and engine.was_step_applied()
    return metrics, applied


def steer(
    state: dict, metrics: dict, targets: dict, group: dict, batch: dict, c: dict
) -> tuple[dict, dict]:
    """(controller state of the next step, what is logged of it): from the entropy of the weights and the KL in `metrics`, or by the meta-controller."""
    if c["controller_meta_enabled"]:
        scores = L.sequence_scores(
            batch["old_logps"], batch["lengths"], c["maxent_score_norm"], c["max_completion_length"]
        )
        measured = {
            "utilities": targets["utilities"],
            "ref_scores": group["ref_scores"],
            "scores": gather_groups(scores.view(-1, group["rewards"].shape[1])),
        }
        new, found = controllers.meta_step(
            state, {k: v[targets["active"]] for k, v in measured.items()}, c
        )
    else:
        new = controllers.update_tau(state, metrics.get(controllers.steering_entropy(c)), c)
        new, found = controllers.update_beta(new, metrics.get("kl"), c), {}
    return new, found | {
        "tau": state["tau"],
        "delta_tau": new["tau"] - state["tau"],
        "beta": state["beta"],
        "delta_beta": new["beta"] - state["beta"],
        "controller/skipped": new["skipped"],
    }


def main(c: dict) -> None:
    dtype, rank, world = (
        dtype_of(c),
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
    )
    if c["dry_run"]:
        if rank == 0:
            dry_run(c, world, dtype, deepspeed_config(c, dtype))
        return
    with hold_folder(c["output_dir"], rank):
        train(c, dtype, world)


def train(c: dict, dtype: torch.dtype, world: int) -> None:
    """The run, in a folder that nobody else writes to."""
    rank = int(os.environ.get("RANK", 0))
    # False too for a run that starts from another
    resuming = checkpoint.check_request(c["resume_from_checkpoint"], c["output_dir"])
    check_run_folder(c, resuming)
    inputs = load_inputs(c, world)
    tokenizer, eval_rows = inputs.tokenizer, inputs.eval_rows
    hub = (
        Hub(c["push_to_hub"], c["hub_private_repo"], c["output_dir"])
        if c["push_to_hub"] and rank == 0
        else None
    )

    rank, world, device = start_distributed()
    resume_path = checkpoint.find(c)
    folder, header = Path(c["output_dir"]), run_header(world)
    say = (
        (lambda *text: tqdm.write(" ".join(map(str, text)))) if rank == 0 else (lambda *text: None)
    )
    say(*(f"{k}={v!r}" for k, v in header.items()))
    for warning in warn_config(c, inputs.model.vocab_size):
        say(f"warning: {warning}")

    # The sampler first: on a GPU vLLM measures what is free. Policy and reference start from the same weights.
    torch.manual_seed(c["seed"])
    sampler = rollout.ENGINES[c["rollout_engine"]](c["model"], c, dtype, device)
    sampler.sleep()
    engine, reference = load_policy(c, dtype, device), load_reference(c, dtype, device)
    step, state, remembered = 0, controllers.init_state(c), {}
    if resume_path:
        step, state, remembered = checkpoint.load(resume_path, engine, rank)
        state = controllers.resume_state(state, c)
        say(f"resumed from {resume_path}, {step} steps done")
    if rank == 0:  # everything has loaded: only now does the run leave a trace
        make_run_folder(c, header, resuming)
        checkpoint.tidy(folder)
        for path in checkpoint.set_aside(folder, step):
            say(f"the run goes on from an earlier checkpoint: {path.stem} is now {path}")
            (folder / "wandb_id").unlink(
                missing_ok=True
            )  # where it is another run then: Weights & Biases takes no step twice
        say(
            checkpoint.report(
                folder,
                sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
                dtype,
                c,
            )
        )
    dist.barrier()
    stop, stopping = Stop(folder, rank), False
    lm, p, G, S = (
        engine.module.lm,
        c["prompts_per_step"] // world,
        c["num_generations"],
        c["info_seed_num_seeds"] if c["info_seed_enabled"] else 0,
    )
    buffer = (
        Replay(
            [row for source in inputs.sources for row in source],
            c["replay_size"],
            c["replay_ucb"],
            remembered,
        )
        if c["replay_size"]
        else None
    )
    log = MetricsLog(folder, c, step) if rank == 0 else None
    timer, skipped_in_a_row, saved_step, begun = (
        Timer(),
        0,
        step,
        None,
    )  # step 0, or the checkpoint's own: nothing to save yet

    def sync():
        sampler.wake()
        sampler.sync(named_weights(lm, c["zero_stage"]))

    def save_now():
        nonlocal saved_step
        if c["save_steps"] < 0 or saved_step == step:
            return
        saved_step = step
        with timer("checkpoint"):
            saved = checkpoint.save(folder, step, engine, tokenizer, c, state, remembered)
        say(f"saved {saved}")
        if rank == 0 and c["eval_command"]:
            evaluate.start_command(c["eval_command"], saved)
        if hub:
            hub.push(saved, last=step == c["max_steps"])

    def evaluate_now():
        try:
            with timer("evaluate"):
                metrics = evaluate.evaluate(
                    sampler, tokenizer, eval_rows, inputs.stop_ids, c, rank, world
                )
        except RolloutsLost as error:  # the next step finds out too, and saves
            return say(f"step {step}: not evaluated: {error}")
        if rank == 0:
            log.write(step, metrics)
        say(f"step {step}:", *(f"{k} {v:.3f}" for k, v in metrics.items()))

    sync()
    if eval_rows and step == 0:
        evaluate_now()
    bar = progress(total=c["max_steps"], initial=step, disable=rank > 0, unit="step")
    timer.take()
    while step < c["max_steps"] and not stopping:
        # 1. G completions for each of this rank's p prompts, by the policy as it is now
        # 2. rewards; from here on every rank knows the rewards (P, G) of the whole step
        try:
            got = experience.collect(sampler, inputs, buffer, step, c, rank, world, timer, begun)
        except RunStopped:  # on all ranks: no server is left, or too many rewards failed
            save_now()
            raise
        remembered = (
            buffer.state if buffer else {}
        )  # not earlier: a step that is lost in the middle has changed it
        begun = (
            experience.begin(sampler, inputs, buffer, step + 1, c, rank, world)
            if c["rollout_ahead"] and step + 1 < c["max_steps"]
            else None
        )
        rollouts, batch_rows, rewards, task_rewards = (
            got["rollouts"],
            got["rows"],
            got["rewards"],
            got["rewards"],
        )
        base, seeded = (
            [r for r in rollouts if "seed_id" not in r],
            [r for r in rollouts if "seed_id" in r],
        )
        set_temperature(
            (engine, reference), data.scheduled(c["temperature_schedule"], step, c["temperature"])
        )

        # 3. what else the objective wants to know of these completions: the reference's opinion, entropies, answers
        with timer("score"):
            batch = rollout.to_batch(rollouts, device)
            if S:
                seed_batch = infoseed.under_base_prompt(seeded, batch_rows, S, device)
                h, log_q = infoseed.features(engine, seed_batch, c)
                rewards = infoseed.add_rewards(task_rewards, log_q, S, c["info_seed_reward"])
            group = learner.measure_groups(
                engine,
                reference,
                batch,
                rollouts,
                batch_rows,
                rewards,
                R.correct(got["values"], inputs.columns),
                c,
            )
            group["task_rewards"] = task_rewards

        # 4. weights or advantages over the group, then num_iterations updates of the policy
        with timer("learn"):
            targets = learner.group_targets(group, state["tau"], state["beta"], c)
            mine = {k: v[rank * p : (rank + 1) * p] for k, v in targets.items()}
            lengths = group["lengths"][:, :G]  # of the rows asked without a seed
            norm = learner.step_counts(targets, group["lengths"])
            for parameters in engine.optimizer.param_groups:
                parameters["lr"] = learning_rate_at(step, c)
            metrics, applied = update(
                engine, batch, mine, state["beta"], norm, (seed_batch, h) if S else (), c
            )
            plain = (
                torch.arange(len(rollouts)).view(p, -1)[:, :G].flatten()
            )  # rows asked without a seed
            limit = (
                -1 if c["rollout_ahead"] else c["max_logp_difference"]
            )  # sampled by weights a step older, they may differ
            metrics |= learner.sampler_mismatch(
                rollout.take(batch, plain), int(lengths.sum()), limit
            )
            skipped_in_a_row = 0 if applied else skipped_in_a_row + 1

        # 5. controllers: tau and beta of the next step
        if "weights" in targets:
            metrics |= L.weight_metrics(targets["weights"], targets["rewards"], targets["active"])
        state, moved = steer(state, metrics, targets, group, batch, c)
        step += 1

        # 6. the sampler gets the new weights
        if begun:
            with timer("rollout"):
                futures.wait([begun])
        with timer("sync"):
            sync()

        # 7. what happened
        clipped = sum(r["finish_reason"] == "length" for r in base)
        variety = {
            "completions/clipped_ratio": clipped / len(base),
            **rollout.diversity_metrics(base, G),
        }
        lost = log is not None and log.lost()
        *shared, stopping, lost = (
            across_ranks(torch.tensor([*variety.values(), stop.asked(), lost])) / world
        ).tolist()
        if lost:
            raise RunStopped(checkpoint.gone(folder))
        if S:
            metrics |= infoseed.measure(
                h, log_q, task_rewards[:, G:], targets.get("weights"), targets["active"]
            )
        times = timer.take()  # evaluate and checkpoint are those since the last line
        busy = times["time/step"] - times.get("time/evaluate", 0) - times.get("time/checkpoint", 0)
        metrics |= (
            moved
            | got["metrics"]
            | learner.group_metrics(task_rewards[:, :G], lengths)
            | dict(zip(variety, shared))
            | times
            | {
                "grad_norm": float(engine.get_global_grad_norm()),
                "learning_rate": learning_rate_at(step - 1, c),
                "skipped_steps": skipped_in_a_row,
                "tokens_per_second": norm["tokens"] / busy,
            }
        )
        if rank == 0:
            log.write(step, metrics)
            shown = {
                "reward": "reward",
                "kl": "kl",
                "entropy": "entropy",
                "tokens/s": "tokens_per_second",
            }
            bar.set_postfix_str(
                " ".join(
                    f"{label} {metrics[name]:.3g}"
                    for label, name in shown.items()
                    if name in metrics
                ),
                refresh=False,
            )
            bar.update()
        if c["log_rollouts_steps"] and step % c["log_rollouts_steps"] == 0:
            rollout.log_rollouts(
                folder, rollouts, task_rewards[rank * p : (rank + 1) * p], batch_rows, step, rank
            )
        if step == 1 or step == c["max_steps"]:
            say(rollout.show(tokenizer, base, task_rewards[rank * p : (rank + 1) * p, :G]))
        if skipped_in_a_row >= c["max_skipped_steps"]:
            save_now()
            raise RunStopped(
                f"{skipped_in_a_row} steps in a row had a non-finite loss or gradient, which was not applied (max_skipped_steps="
                f"{c['max_skipped_steps']}); lower learning_rate={c['learning_rate']} or look into metrics.jsonl"
            )
        if eval_rows and (step % c["eval_steps"] == 0 or step == c["max_steps"]):
            evaluate_now()
        if (
            stopping
            or step == c["max_steps"]
            or (c["save_steps"] > 0 and step % c["save_steps"] == 0)
        ):
            save_now()
    bar.close()
    if rank == 0:
        if step == c["max_steps"]:
            (folder / "done").touch()
        log.close()
        evaluate.report(folder)
    if stopping:
        say(
            f"stopped as asked after step {step} of {c['max_steps']}"
            + ("; go on with --resume_from_checkpoint=latest" if c["save_steps"] >= 0 else "")
        )
    leave_together(sampler)
    if hub and not stopping:
        hub.finish()


if __name__ == "__main__":
    script(main, config)
