"""MaxEnt-GRPO: reinforcement learning of a language model from groups of sampled answers.

    python train.py config/countdown_tiny.py                                    one process
    torchrun --standalone --nproc_per_node 2 train.py config/countdown_tiny.py --maxent_tau=0.1
    torchrun --standalone --nproc_per_node 8 train.py config/math_maxent.py     eight GPUs
    torchrun ... train.py config/math_maxent.py --dry_run    check everything, run nothing

A step: prompts -> G rollouts each (vLLM) -> rewards -> weights or advantages over the group ->
loss -> DeepSpeed -> controllers. The function `train` below is that step: read it first.

Where this departs from the papers:
1. Every loss is (sum of row or token terms) / (one normaliser of the whole step, all ranks), so
   the split into micro-batches and ranks never changes it. So dapo and cispo are means over all
   tokens of the step; the papers average over the tokens of a group, then over groups. In bfloat16
   the split changes the rounding: DeepSpeed adds up gradients in the model's type.
2. Rows of a group whose rewards are all equal have advantage exactly 0, not rounding noise / 1e-4.
3. One update per batch by default: the old log-probs are then the current ones, and the gradient
   of a clipped surrogate is that of REINFORCE. With more updates, the log-probs computed in the
   first update serve as the old ones.
4. Sampler and trainer compute slightly different log-probs. Their ratio is measured every step.
   Policy-gradient objectives correct for it up to a cap; maxent's listwise loss does not need to,
   because its fixed point does not depend on the sampling distribution.
5. xdr is dr_grpo with rows weighted by G * softmax(A / tau); tau = inf is dr_grpo to the bit. With
   xdr_ref_tilt, beta acts through these weights instead of a KL in the loss, never through both.
6. InfoSeed (infoseed.py, off by default) puts a seed into the prompt of some completions, and
   trains them to show which. Without a trained head it guesses a row's seed from the mean hidden
   state of each seed. These means leave out all rows of the row's own prompt; otherwise guesses
   would be below chance.
"""

from checks import FLAGS
from common import load_with_flags, script

# Report a wrong config at once: the imports below take ten seconds. script() prints a user's error
# as one sentence, without a traceback.
if __name__ == "__main__":
    flags, config = script(lambda argv: load_with_flags(argv, FLAGS["train"]))

import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import checkpoint
import controllers
import evaluate
import infoseed
import learner
import rollout
from checks import CHOICES, entries, max_sequence_length, warn_config
from common import (
    RewardsFailed,
    RolloutsLost,
    RunStopped,
    Stop,
    default_config,
    from_launcher,
    in_one_line,
    launched_rank,
    launched_ranks,
    out_of_memory,
    print_above_bar,
    progress,
    say_on_rank_0,
    scheduled,
    usable_cores,
    with_tau,
)
from experience import Experience, Symptoms, deal, log_rollouts
from journal import (
    MetricsLog,
    Timer,
    check_run_folder,
    check_wandb,
    has_evaluation,
    hold_folder,
    make_run_folder,
    run_header,
)
from policy import (
    Policy,
    WithoutAdapters,
    add_adapters,
    count_parameters,
    dither,
    dtype_of,
    flip_signs,
    make_optimizer,
    make_trainable,
    move_frozen,
    named_weights,
    optimizer_clips,
    seed_classes,
    set_stop_tokens,
    set_temperature,
    skip_by_norm,
    turn_off_dropout,
)
from preflight import Inputs, dry_run, fitting_tokens, load_inputs
from prompts import answers_hash, leakage_warning, prompts_hash, with_trained
from ranks import (
    World,
    across_ranks,
    any_rank,
    check_alike,
    leave_together,
    mean_over_ranks,
    start_distributed,
    wait_for_ranks,
)

# prove_sync() changes the weights, which moves the log-probs some distance. After a sync, at most
# this share of it may remain between sampler and policy, to allow for rounding.
TRIAL_SHARE = {torch.float32: 0.02, torch.bfloat16: 0.25}
TRIAL_PROMPTS = 4  # trial_batch() samples 2 completions of each
TRIAL_TOKENS = 4  # at most, in each of these completions
MAX_SKIPPED_STEPS = 5  # a run stops after this many steps in a row with a non-finite update


@dataclass
class Run:
    """What a run holds from one step to the next."""

    config: dict
    world: World  # rank, size, device
    inputs: Inputs  # tokenizer, rows, reward functions
    sampler: object  # the rollout engine, a rollout.Engine
    engine: object  # always DeepSpeed's, around the policy
    reference: object  # the frozen reference model; None at beta = 0
    experience: Experience
    timer: Timer
    stop: Stop
    log: MetricsLog | None  # None on all ranks but 0
    hub: checkpoint.Hub | None  # likewise, and None without push_to_hub
    step: int  # finished steps
    controller_state: dict  # tau, beta and what their controllers remember
    saved_step: int  # the last one saved, or where the run began; -1: that has no model yet
    skipped_steps: int  # how many steps in a row had an update that was not applied
    symptoms: Symptoms  # warns when something explains why the run does not learn
    stopping: bool = False  # whether the run was asked to end, which it does after this step

    @property
    def folder(self) -> Path:
        return Path(self.config["output_dir"])

    def say(self, sentence: str) -> None:
        """Prints a line above the progress bar, on rank 0 only."""
        if self.world.rank == 0:
            print_above_bar(sentence)


# --- set-up


def deepspeed_config(c: dict) -> dict:
    """DeepSpeed's own settings for a resolved config."""
    zero = {
        "stage": c["zero_stage"],
        "overlap_comm": False,  # unsupported with unmanaged accumulation, except at stage 2
    }
    if c["offload_optimizer"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # required, though ours have as many rows as fit
        "managed_gradient_accumulation": False,  # allows any number of backward() per step()
        # 0: DeepSpeed does not clip, because policy.ClipAndSkip does
        "gradient_clipping": 0.0 if optimizer_clips(c) else c["max_grad_norm"],
        "bf16": {"enabled": dtype_of(c) == torch.bfloat16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # see checks.OPTIMIZERS
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's CPU optimizer must be compiled
        "steps_per_print": sys.maxsize,  # never: we have our own progress bar
    }


def load_lm(c: dict, trains: bool, device) -> Policy:
    """Loads config["model"] into a Policy, which checks it on a few tokens. trains: False for the
    frozen reference."""
    lm = AutoModelForCausalLM.from_pretrained(c["model"], dtype=dtype_of(c)).to(device)
    warning = make_trainable(lm, c["model"])
    lm.train(trains).requires_grad_(trains)
    dropout = turn_off_dropout(lm)
    classes = 0  # of InfoSeed's head
    if trains:  # what follows is printed once, not for the reference too
        if warning:
            say_on_rank_0(warning)
        if dropout:
            say_on_rank_0(
                f"the model's dropout of up to {dropout:g} is off: completions are sampled "
                f"without it"
            )
        if c["gradient_checkpointing"]:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        if c["lora_rank"]:
            say_on_rank_0(add_adapters(lm, c["lora_rank"], base=c["model"]))
        classes = seed_classes(c)
    # the first temperature only: set_temperature() follows the schedule
    temperature = scheduled(c["temperature"], 0)
    return Policy(lm, temperature, seed_classes=classes, pack=c["pack_sequences"])


def load_policy(c: dict, device):
    """The DeepSpeed engine around the policy."""
    policy = load_lm(c, trains=True, device=device)
    trained = [p for p in policy.parameters() if p.requires_grad]  # with lora_rank: adapters only
    optimizer = make_optimizer(trained, c)
    engine = start_deepspeed(policy, deepspeed_config(c), optimizer)
    skip_by_norm(engine.optimizer, c)
    dither(engine.optimizer, c)
    return engine


def start_deepspeed(model, settings: dict, optimizer=None):
    """DeepSpeed's engine around a model, once all ranks have loaded theirs: its first collective
    waits ten minutes on GPUs, and the disk of one node may be slower than that of another."""
    dist.barrier()  # waits common.DEADLINE
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def share_cores(c: dict, device) -> None:
    """Gives an offloaded optimizer, which steps on the CPU, this rank's share of the machine's
    cores: torchrun and vLLM leave it a single thread."""
    if c["offload_optimizer"] and device.type == "cuda":
        ranks_here = from_launcher("LOCAL_WORLD_SIZE", 1)
        torch.set_num_threads(max(1, usable_cores() // ranks_here))


def load_reference(c: dict, engine, device):
    """The frozen reference model; None at beta = 0. engine: the policy's. If that trains adapters,
    the reference is the same model with its adapters switched off."""
    if c["beta"] == 0:
        return None
    if c["lora_rank"]:
        return WithoutAdapters(engine)
    reference = load_lm(c, trains=False, device=device)
    if c["reference_placement"] == "cpu":
        return reference.to("cpu")  # moves to the device for its forward passes only
    if c["reference_placement"] == "device":
        return reference
    sharded = {
        "train_micro_batch_size_per_gpu": 1,  # required, as in deepspeed_config()
        "bf16": {"enabled": dtype_of(c) == torch.bfloat16},
        "zero_optimization": {"stage": 3},
    }
    reference_engine = start_deepspeed(reference, sharded)
    reference_engine.eval()
    return reference_engine


def micro_batch_tokens(c: dict, inputs: Inputs, parameters, resume_path) -> int:
    """max_tokens_per_micro_batch, the same on all ranks. If the config leaves it open (0), a run
    that is resumed on the same number of ranks takes the checkpoint's value, so that it continues
    bit for bit; any other takes as many tokens as fit into memory. All ranks call it together."""
    tokens = c["max_tokens_per_micro_batch"]
    if tokens:
        return tokens
    size = dist.get_world_size()
    if resume_path and checkpoint.ranks_of(resume_path) == size:
        tokens = checkpoint.settings_of(resume_path)["max_tokens_per_micro_batch"]
        if tokens > 0:
            return tokens
    fitting = fitting_tokens(c, inputs.model_config, parameters, size)
    fitting = int(across_ranks(torch.tensor(fitting), dist.ReduceOp.MIN))  # machines may differ
    say_on_rank_0(f"max_tokens_per_micro_batch={fitting}: it follows the memory of a rank")
    return fitting


def resume(path: Path, engine, inputs: Inputs, c: dict) -> tuple:
    """Loads a checkpoint into the engine, and says what has changed since it was saved. Returns
    its TrainerState, and the inputs with the prompts that it was trained on added to
    inputs.trained. All ranks call it together."""
    saved = checkpoint.load(path, engine, Path(c["output_dir"]))
    for sentence in (checkpoint.changes(path, c), rate_change(path, saved.step, c)):
        if sentence:
            say_on_rank_0(sentence)
    if saved.prompts_hash and saved.prompts_hash != inputs.prompts_hash:
        say_on_rank_0(
            f"warning: the training prompts are not those of {path}: from here on the run takes "
            f"other prompts than it would have taken (or their chat template has changed, or "
            f"writes the date)"
        )
    elif saved.answers_hash and saved.answers_hash != inputs.answers_hash:
        say_on_rank_0(
            f"warning: the training prompts are those of {path}, but not their answers, or other "
            f"columns that rewards read: from here on rewards may be others"
        )
    if warning := leakage_warning(inputs.eval_rows, path):
        say_on_rank_0(warning)
    rest = "" if saved.step < c["max_steps"] else "; none is left, a larger max_steps goes on"
    say_on_rank_0(f"resumed from {path}, {saved.step} steps done{rest}")
    saved = saved._replace(controllers=controllers.resume_state(saved.controllers, c))
    return saved, inputs._replace(trained=with_trained(inputs.trained, path))


def rate_change(path: Path, step: int, c: dict) -> str:
    """A sentence if the next step's learning rate differs from what the checkpoint's own config
    says: a larger max_steps raises a rate that had fallen. Otherwise, or if no step is left, ""."""
    before = checkpoint.settings_of(path)
    if step >= c["max_steps"] or before["lr_scheduler_type"] not in CHOICES["lr_scheduler_type"]:
        return ""
    old, new = learning_rate_at(step, before), learning_rate_at(step, c)
    if math.isclose(old, new, rel_tol=0.01):
        return ""
    return f"the learning rate goes on at {new:.3g}, where {path} would have had {old:.3g}"


def start(c: dict) -> Run:
    """Loads everything that a run needs; makes the run's folder, or continues in the old one."""
    learning_rate_at(c["max_steps"], c)  # a schedule without a formula fails now, not later
    in_place = checkpoint.resumes_in_place(c)
    check_run_folder(c, in_place)
    # before the ranks meet, so that one that reports an error and exits leaves no other waiting
    inputs = load_inputs(c, launched_ranks())
    c = with_tau(c, inputs.model_config.vocab_size)
    hub = None
    # early, so that a user without write permission hears of it before weights load
    if c["push_to_hub"] and launched_rank() == 0:
        hub = checkpoint.Hub(c["push_to_hub"], c["output_dir"])
    if c["report_to"] == "wandb" and launched_rank() == 0:
        check_wandb(c)

    world = start_distributed()
    hashes = {
        "hash of the training prompts": inputs.prompts_hash,
        "hash of the evaluation prompts": prompts_hash(inputs.eval_rows),
        "hash of the training answers": inputs.answers_hash,
        "hash of the evaluation answers": answers_hash(inputs.eval_rows),
    }
    check_alike(c | hashes)
    resume_path = checkpoint.find(c)
    if resume_path:
        checkpoint.check_model(resume_path, inputs.model_config)
    header = run_header(world.size)
    say_on_rank_0(" ".join(f"{key}={value!r}" for key, value in header.items()))
    for warning in warn_config(c, inputs.model_config.vocab_size, default_config()):
        say_on_rank_0(f"warning: {warning}")

    # The sampler loads first, because on a GPU vLLM measures the free memory. Policy and reference
    # start from the same weights.
    torch.manual_seed(c["seed"])
    sampler = rollout.start_engine(c, world.device)
    rollout.check_class_unchanged(sampler, c)
    sampler.sleep()  # its memory is the learner's until the first sync
    engine = load_policy(c, world.device)
    set_stop_tokens(engine.module.lm, inputs.stop_ids)
    share_cores(c, world.device)
    reference = load_reference(c, engine, world.device)
    saved = checkpoint.TrainerState(step=0, controllers=controllers.init_state(c), replay={})
    if resume_path:
        saved, inputs = resume(resume_path, engine, inputs, c)
    # The last step's checkpoint may hold no model ("shallow"), if more steps were to follow when it
    # was saved. Then catch_up() saves it again, with the model.
    lacks_model = saved.step == c["max_steps"] and not checkpoint.holds_model(resume_path)
    parameters = count_parameters(engine.module)
    c = c | {"max_tokens_per_micro_batch": micro_batch_tokens(c, inputs, parameters, resume_path)}
    log = None
    dist.barrier()  # rank 0 may now rename the checkpoint, which others were still reading
    if world.rank == 0:  # the run writes nothing until everything has loaded
        make_run_folder(c, header, in_place)
        print(checkpoint.prepare_folder(c, saved.step, parameters), flush=True)
        log = MetricsLog(Path(c["output_dir"]), c, saved.step)
    dist.barrier()
    return Run(
        config=c,
        world=world,
        inputs=inputs,
        sampler=sampler,
        engine=engine,
        reference=reference,
        experience=Experience(sampler, inputs, c, world, saved.replay),
        timer=Timer(),
        stop=Stop(c["output_dir"], world.rank),
        log=log,
        hub=hub,
        step=saved.step,
        controller_state=saved.controllers,
        saved_step=-1 if lacks_model else saved.step,
        skipped_steps=saved.streaks["skipped"],
        symptoms=Symptoms(c, saved.streaks["equal"]),
    )


# --- what the loop calls


@contextmanager
def enough_memory(phase: str, c: dict):
    """Raises RunStopped, which names the key to lower, if memory runs out inside this context.
    phase: "rollout", "evaluate", "learn" or "sync"."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        # a RunStopped already has its own message, which may quote a server that lacks memory
        if isinstance(error, RunStopped) or not out_of_memory(error):
            raise
        raise RunStopped(
            f"memory ran out ({phase}): {less_memory(phase, c)}, and "
            f"{checkpoint.how_to_go_on(Path(c['output_dir']))}; {in_one_line(error)}"
        ) from None


def less_memory(phase: str, c: dict) -> str:
    """What to change so that a phase takes less memory, as part of a sentence."""
    length = f"max_completion_length={c['max_completion_length']}"
    if phase in ("rollout", "evaluate"):
        key = "num_generations" if phase == "rollout" else "eval_num_generations"
        cure = f"lower {key}={c[key]} or {length}"
        # the tokens that HfEngine samples at once
        return f"{cure}, or HF_TOKENS in rollout.py" if c["rollout_engine"] == "hf" else cure
    own_vllm = c["rollout_engine"] == "vllm" and torch.cuda.is_available()
    if phase == "sync" and own_vllm:  # a sync wakes vLLM, which allocates its cache again
        options = entries(c, "vllm_options")
        # a size that is given counts alone: vLLM then looks at no share
        given = options["kv_cache_memory_bytes"]
        key = "kv_cache_memory_bytes" if given else "gpu_memory_utilization"
        return f"lower vllm_options.{key}={options[key]}"
    budget = c["max_tokens_per_micro_batch"]
    cure = f"lower max_tokens_per_micro_batch={budget}"
    if budget <= max_sequence_length(c):  # a micro-batch holds at least one row
        cure += f" or {length}"
    if not c["gradient_checkpointing"]:
        cure += " or set gradient_checkpointing=True"
    return cure


def learning_rate_at(step: int, c: dict) -> float:
    """Linear warm-up over warmup_steps, then constant, or falling to 0 at max_steps. `step` counts
    finished steps."""
    peak = c["learning_rate"]
    if step < c["warmup_steps"]:
        return peak * (step + 1) / c["warmup_steps"]  # + 1: no step at rate 0
    done = (step - c["warmup_steps"]) / max(1, c["max_steps"] - c["warmup_steps"])  # 0 to 1
    if c["lr_scheduler_type"] == "linear":
        return peak * (1 - done)
    if c["lr_scheduler_type"] == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    if c["lr_scheduler_type"] == "constant":
        return peak
    # a name that was added only to checks.CHOICES
    raise ValueError(f"learning_rate_at has no lr_scheduler_type={c['lr_scheduler_type']!r}")


def update(
    run: Run, batch: dict, local_targets: learner.GroupTargets, counts: dict, seeds: infoseed.Seeds
) -> dict:
    """Updates the policy num_iterations times on this rank's rows; returns metrics. Sets
    run.skipped_steps and batch["old_logps"].

    With several updates, the loss, entropy and KL are the first one's, before the policy has moved.
    The shares of clipped tokens and the norm of the gradient are the last one's, because nothing is
    clipped in the first. Seconds are summed."""
    c, engine = run.config, run.engine
    learning_rate = learning_rate_at(run.step, c)
    for param_group in engine.optimizer.param_groups:
        param_group["lr"] = learning_rate
    all_metrics = []  # of each update
    all_applied = True
    for i in range(c["num_iterations"]):
        update_metrics = learner.accumulate_gradients(
            engine, batch, local_targets, run.controller_state["beta"], c, counts
        )
        update_metrics |= seeds.accumulate_gradients(update=i)
        # the Timer subtracts it from "learn", the phase around it
        run.timer.add("wait", update_metrics.pop("time/wait"))
        all_metrics.append(update_metrics)
        engine.step()  # skips itself, on all ranks, when the gradient is not finite
        all_applied = all_applied and engine.was_step_applied()
    # the same on all ranks, see engine.step()
    run.skipped_steps = 0 if all_applied else run.skipped_steps + 1
    metrics = all_metrics[0]
    for name in ("clip_ratio/low", "clip_ratio/high"):
        metrics[name] = all_metrics[-1][name]
    for name in ("time/learn_slowest", "time/learn_mean"):
        metrics[name] = sum(update_metrics[name] for update_metrics in all_metrics)
    metrics["grad_norm"] = float(engine.get_global_grad_norm())
    metrics["skipped_steps"] = run.skipped_steps
    metrics["learning_rate"] = learning_rate
    return metrics


def steer(
    run: Run,
    metrics: dict,
    targets: learner.GroupTargets,
    measured: learner.GroupMeasures,
    batch: dict,
) -> dict:
    """Moves tau and beta for the next step; returns what is logged about it. Sets
    run.controller_state.

    Either two separate rules move them, following the entropy of the weights and the KL in
    `metrics`, or the meta-controller moves both."""
    c, old = run.config, run.controller_state
    meta_metrics = {}
    if c["controller_meta_method"]:
        scores = learner.policy_scores(batch, measured.rewards.shape[1], c)  # (P, G + S)
        groups = {
            "utilities": targets.utilities[targets.active],
            "ref_scores": measured.ref_scores[targets.active],
            "scores": scores[targets.active],
        }
        new, meta_metrics = controllers.meta_step(old, groups, c)
    else:
        new = controllers.update_tau(old, metrics.get(controllers.steering_metric(c)), c)
        new = controllers.update_beta(new, metrics.get("kl"), c)
    run.controller_state = new
    return meta_metrics | {
        "tau": old["tau"],
        "delta_tau": new["tau"] - old["tau"],
        "beta": old["beta"],
        "delta_beta": new["beta"] - old["beta"],
        "controller/skipped": new["skipped"],
    }


def sync_weights(run: Run) -> None:
    """Copies the policy's weights into the sampler, in place. Where the two share a GPU, weights
    that are not trained wait in CPU memory until the sampler sleeps again."""
    lm, stage = run.engine.module.lm, run.config["zero_stage"]
    if run.sampler.sleeps and stage < 3:  # under ZeRO-3 they are sharded over the ranks
        move_frozen(lm, "cpu")
    with enough_memory("sync", run.config):
        run.sampler.wake()
        run.sampler.sync(named_weights(lm, stage))


@torch.random.fork_rng(devices=[])  # so that the trial does not affect the run's random draws
def prove_sync(run: Run) -> None:
    """Syncs the policy's weights into the sampler, after proving that a sync works at all: at a
    small learning rate, weights that never arrive would hardly show.

    For the proof the sampler first gets changed weights. RunStopped, on all ranks alike, if its
    log-probs do not follow. Whether the policy's own weights arrive afterwards is left to the check
    in every step, learner.sampler_mismatch."""
    c, lm = run.config, run.engine.module.lm
    if c["max_logp_difference"] < 0:  # off
        sync_weights(run)
        return
    flip_signs(lm, c["zero_stage"])
    sync_weights(run)
    with enough_memory("rollout", c):
        batch = trial_batch(run)
    with enough_memory("learn", c):
        move_frozen(lm, run.world.device)
        set_temperature([run.engine], 1.0)
        to_new = learner.sampler_distance(run.engine, batch, c)
        flip_signs(lm, c["zero_stage"])
        to_old = learner.sampler_distance(run.engine, batch, c)
    sync_weights(run)
    limit = TRIAL_SHARE[dtype_of(c)] * to_old
    if not to_new <= limit:  # NaN stops it too
        raise RunStopped(
            f"the weights of the policy do not arrive in the rollout engine: for a trial they were "
            f"changed, and its log-probs are {to_new:.4f} nats a token from those of the changed "
            f"weights (wanted: at most {limit:.4f}), {to_old:.4f} from the old ones; "
            f"max_logp_difference=-1 skips this check"
        )
    run.say(
        f"the sampler follows the weights: {to_new:.2g} nats a token from changed ones, "
        f"{to_old:.2g} from those before"
    )


def trial_batch(run: Run) -> dict:
    """Samples a few short completions that belong to no step, puts the sampler to sleep, and
    returns them as a batch."""
    c = run.config
    prompts = [row["prompt_ids"] for row in run.inputs.pools[0][:TRIAL_PROMPTS]]
    sampling = rollout.Sampling(
        temperature=1.0,
        max_tokens=min(TRIAL_TOKENS, c["max_completion_length"]),
        stop_token_ids=run.inputs.stop_ids,
        seeds=list(range(len(prompts))),
        names=[f"trial-{i}" for i in range(len(prompts))],
    )
    rollouts = rollout.generate(run.sampler, run.inputs.tokenizer, prompts, 2, sampling)
    run.sampler.take_metrics()  # dropped
    run.sampler.sleep()
    return rollout.to_batch(rollouts, run.world.device)


def save_now(run: Run) -> None:
    """Saves a checkpoint of this step, unless there is one or save_steps=-1; then starts
    eval_command and the upload."""
    c = run.config
    if c["save_steps"] < 0 or run.saved_step == run.step:
        return
    run.saved_step = run.step
    with run.timer("checkpoint"):
        state = checkpoint.TrainerState(
            step=run.step,
            controllers=run.controller_state,
            replay=run.experience.replay_state,
            streaks={"skipped": run.skipped_steps, "equal": run.symptoms.equal_steps},
            prompts_hash=run.inputs.prompts_hash,
            answers_hash=run.inputs.answers_hash,
        )
        saved = checkpoint.save(state, run.engine, run.inputs.tokenizer, c, run.inputs.trained)
    run.say(f"saved {saved}")
    if run.world.rank == 0 and c["eval_command"]:
        evaluate.start_command(c["eval_command"], saved)
    if run.hub:
        run.hub.push(saved, last=run.step == c["max_steps"])


@contextmanager
def needs_folder(run: Run):
    """Raises RunStopped if a file can't be created inside this context because the run's folder has
    been deleted since stop_if_folder_is_gone()."""
    try:
        yield
    except FileNotFoundError:
        raise RunStopped(checkpoint.gone(run.folder)) from None


def evaluate_now(run: Run) -> None:
    """Evaluates on the held-out problems, writes a line for each, and logs mean@k, pass@k and the
    other metrics."""
    if not run.inputs.eval_rows:
        return
    try:
        with run.timer("evaluate"), enough_memory("evaluate", run.config):
            records = evaluate.evaluate(run.sampler, run.inputs, run.config, run.world)
    except RolloutsLost as error:  # the next step will fail too, and saves before it stops
        run.say(f"step {run.step}: not evaluated: {error}")
        return
    metrics = evaluate.summarize(records, run.config["eval_num_generations"])
    if run.log:
        with needs_folder(run):
            run.log.write_evaluation(run.step, records)
        run.log.write(run.step, metrics)
    figures = " ".join(f"{name} {value:.3f}" for name, value in metrics.items())
    run.say(f"step {run.step}: {figures}")


def evaluation_due(step: int, c: dict) -> bool:
    """Whether a run evaluates when this many steps are done."""
    return c["eval_steps"] > 0 and (step == c["max_steps"] or step % c["eval_steps"] == 0)


def owes_evaluation(run: Run) -> bool:
    """Whether this launch begins at a step that is due for evaluation but has none yet: the start,
    or where the run was asked to stop. The same on all ranks."""
    if not evaluation_due(run.step, run.config):
        return False
    return any_rank(run.log is not None and not has_evaluation(run.folder, run.step))


def catch_up(run: Run) -> None:
    """Runs before the first step of this launch: evaluates the start, and does what an earlier
    launch did not get to (its last evaluation, save or upload)."""
    if owes_evaluation(run):
        evaluate_now(run)
    if run.step < run.config["max_steps"]:
        return
    if run.saved_step < run.step:  # its checkpoint holds no model, see start()
        save_now(run)
    elif run.hub:
        newest = checkpoint.latest(run.folder)
        # they differ if the run resumed from a checkpoint in another folder
        if newest and checkpoint.number_of(newest) == run.step:
            run.hub.push(newest, last=True)


def evaluate_and_save(run: Run) -> None:
    """Evaluates and saves a finished step, where that is due. Sets run.stopping if the run was
    asked to stop."""
    c = run.config
    last = run.step == c["max_steps"]
    # a stop in the last step changes nothing: the run is finished, and waits for its upload
    run.stopping = any_rank(run.stop.asked()) and not last
    # a run that is asked to stop may soon be killed: it saves now, and the next launch evaluates
    postponed = run.stopping and c["save_steps"] >= 0
    if evaluation_due(run.step, c) and not postponed:
        evaluate_now(run)
    if run.stopping or last or (c["save_steps"] > 0 and run.step % c["save_steps"] == 0):
        save_now(run)


def finish(run: Run) -> None:
    """Ends a run that is done or was asked to stop: writes what is left, then all ranks leave."""
    c = run.config
    if run.log:
        if run.step == c["max_steps"]:
            (run.folder / "done").touch()  # tells the batch script not to queue the job again
        if run.stopping:
            # also after a signal: by this file the batch script knows a stop from a failed start
            (run.folder / "stop").touch()
        run.log.close()
        evaluate.report(run.folder)
    if run.stopping:
        cure = "; go on with --resume_from_checkpoint=latest" if c["save_steps"] >= 0 else ""
        run.say(f"stopped as asked after step {run.step} of {c['max_steps']}{cure}")
    leave_together(run.sampler)
    # after leave_together, so that other ranks do not wait for an upload
    if run.hub and not run.stopping:
        run.hub.finish()


def log_step(run: Run, metrics: dict, bar) -> None:
    """Writes a line of metrics.jsonl and moves the progress bar on, on rank 0."""
    if not run.log:
        return
    run.log.write(run.step, metrics)
    shown = {"kl": "kl", "entropy": "entropy", "tokens/s": "tokens_per_second"}
    words = [f"reward {metrics['reward']:.3g}"]
    words += [f"{label} {metrics[key]:.3g}" for label, key in shown.items() if key in metrics]
    bar.set_postfix_str(" ".join(words), refresh=False)
    bar.update()


def show_rollouts(run: Run, collected, local_targets: learner.GroupTargets) -> None:
    """In some steps writes or prints the completions, for a person to read."""
    c, G = run.config, run.config["num_generations"]
    if c["log_rollouts_steps"] and run.step % c["log_rollouts_steps"] == 0:
        with needs_folder(run):
            functions = run.inputs.reward_functions
            log_rollouts(run.folder, collected, local_targets, functions, run.step)
    if run.step in (1, c["max_steps"]):
        rewards = collected.local_rewards[:, :G]  # without InfoSeed's
        run.say(rollout.show(run.inputs.tokenizer, collected.unseeded, rewards))


def stop_if_folder_is_gone(run: Run) -> None:
    """RunStopped, on all ranks alike, if the run's folder has been deleted or renamed."""
    if any_rank(run.log is not None and run.log.lost()):  # rank 0 alone has a log
        raise RunStopped(checkpoint.gone(run.folder))


def stop_after_skipped_updates(run: Run) -> None:
    """Warns at the first step whose updates were not applied. RunStopped after MAX_SKIPPED_STEPS of
    them in a row: going on would change nothing."""
    if run.skipped_steps == 1:
        run.say(
            f"warning: step {run.step}: the loss or its gradient is not finite (null in "
            f"metrics.jsonl), and the update was not applied"
        )
    if run.skipped_steps >= MAX_SKIPPED_STEPS:
        save_now(run)  # with num_iterations > 1 other updates of these steps were applied
        raise RunStopped(
            f"{run.skipped_steps} steps in a row had a non-finite loss or gradient, which was not "
            f"applied; lower learning_rate={run.config['learning_rate']}, look into metrics.jsonl "
            f"or, if the objective is your own, at what it divides by"
        )


# --- the loop


def dry_run_main(c: dict) -> None:
    """Checks everything and prints what would run (--dry_run). Loads no weights."""
    if launched_rank() > 0:
        return
    size = launched_ranks()
    learning_rate_at(c["max_steps"], c)  # as in start()
    inputs = dry_run(c, size, deepspeed_config(c))
    # checked last, because everything shown above holds for any other folder too
    check_run_folder(c, checkpoint.resumes_in_place(c))
    resume_path = checkpoint.asked_for(c)
    if resume_path:
        checkpoint.check_resumable(resume_path, c)
        checkpoint.check_model(resume_path, inputs.model_config)


def main(c: dict) -> None:
    """Loads everything and trains, in a folder that is locked against other runs."""
    with hold_folder(c["output_dir"], launched_rank()):
        run = start(c)
        try:
            train(run)
        except RunStopped:
            if run.hub:
                run.hub.abandon()
            raise
    if run.hub:
        run.hub.leave()  # does not wait for an upload, which matters if the run was asked to stop


def train(run: Run) -> None:
    """The nine steps of the README, over and over."""
    c, timer = run.config, run.timer
    G = c["num_generations"]
    # -1, off: with rollout_ahead the sampler's weights are a step older, so log-probs may differ
    limit = -1 if c["rollout_ahead"] else c["max_logp_difference"]
    prove_sync(run)
    catch_up(run)
    bar = progress(total=c["max_steps"], initial=run.step, disable=run.world.rank > 0, unit="step")
    timer.bar = bar
    timer.take()  # set-up and evaluation do not count as part of the first step
    while run.step < c["max_steps"] and not run.stopping:
        # 1. P prompts, 2. G completions of each by the policy as it is (with rollout_ahead as it
        # was a step ago), and with InfoSeed S more, 3. the rewards of all of them (P, G + S)
        try:
            with enough_memory("rollout", c):
                collected = run.experience.collect(run.step, timer)
        except (RolloutsLost, RewardsFailed):  # raised on all ranks alike: they can save together
            save_now(run)
            raise
        with timer("deal"):
            # groups move between ranks, so that all ranks have about equal work
            collected = deal(collected, run.world, c)

        # 4. what the groups ask of the policy: weights or advantages (P, G + S)
        with timer("score"), enough_memory("learn", c):
            # LoRA: its base weights waited in CPU memory while the sampler was awake
            move_frozen(run.engine.module.lm, run.world.device)
            set_temperature((run.engine, run.reference), scheduled(c["temperature"], run.step))
            batch = rollout.to_batch(collected.rollouts, run.world.device)
            # InfoSeed: seeds.rewards (P, G + S) are collected.rewards, plus what the S rows earn by
            # showing their seed. If it is off, S = 0 and the two are the same
            seeds = infoseed.Seeds(run.engine, collected, c, run.world.device)
            measured = learner.measure_groups(  # sets batch["ref_logps"]
                run.engine, run.reference, batch, collected, seeds.rewards, c
            )
            # of the keys that group_targets reads, only this may be {step: value}
            at_step = c | {"pkpo_k": round(scheduled(c["pkpo_k"], run.step))}
            tau, beta = run.controller_state["tau"], run.controller_state["beta"]
            targets = learner.group_targets(measured, tau, beta, at_step)
            local_targets = learner.local_targets(targets, run.world)  # (p, G + S)
            counts = learner.step_counts(targets, measured.lengths)

        # 5. the loss and its gradients, 6. an optimizer step on all ranks, or none
        with timer("learn"), enough_memory("learn", c):
            metrics = update(run, batch, local_targets, counts, seeds)  # sets batch["old_logps"]
            # 7. sampler against trainer: weights that did not arrive stop the run. Only after 6,
            # because the trainer's log-probs are by-products of the forwards in 5. Without the S
            # rows, which may be trained under another prompt than they were sampled with
            unseeded = rollout.take(batch, collected.unseeded_indices)
            # the log-probs of a skipped update may be NaN, which says nothing about the sampler
            limit_now = -1 if run.skipped_steps else limit
            metrics |= learner.sampler_mismatch(unseeded, limit_now)

        # 8. tau and beta of the next step
        metrics |= learner.weight_metrics(targets, batch, c)
        metrics |= steer(run, metrics, targets, measured, batch)
        run.step += 1

        # 9. the new weights go to the sampler
        with timer("rollout"):
            run.sampler.wait()  # rollout_ahead: old weights may still be sampling the next batch
        with timer("sync"):
            # before the sync, which may write weights for servers into the run's folder
            stop_if_folder_is_gone(run)
            sync_weights(run)

        # log what happened, then evaluate and save if it is time
        wait_for_ranks(timer)
        metrics |= collected.metrics
        metrics |= seeds.metrics(targets)
        metrics |= learner.group_metrics(collected.rewards[:, :G], measured.lengths[:, :G])
        metrics |= mean_over_ranks(rollout.completion_metrics(collected.unseeded, G))
        metrics |= timer.take(tokens=counts["tokens"])
        log_step(run, metrics, bar)
        show_rollouts(run, collected, local_targets)
        for warning in run.symptoms.warnings(run.step, collected, metrics, tau, beta):
            run.say(warning)
        stop_after_skipped_updates(run)
        evaluate_and_save(run)
    bar.close()
    finish(run)


if __name__ == "__main__":
    script(dry_run_main if flags["dry_run"] else main, config)
