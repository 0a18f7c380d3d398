"""The learner: from a batch of rollouts and their rewards to accumulated gradients, the same on one rank and on many.

    targets = group_targets(rewards, ref_scores, tau, beta, config)         # (P, G): weights, advantages, active groups
    metrics = accumulate_gradients(engine, batch, targets, beta, config, norm)      # then engine.step()

P prompts, G completions each, N = P*G rows; p = P / world prompts of this rank; n rows of a micro-batch; T tokens of a completion.
"""
import math
import os
import socket

import deepspeed
import torch
import torch.distributed as dist
import transformers

import loss as L
import rollout
from common import RunStopped, UserError

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False      # plain gloo on a CPU: its own needs a C++ compiler and half a minute


# --- the model

class Policy(torch.nn.Module):
    """A causal language model whose forward answers with log-probs of the completion's tokens, never with logits."""

    def __init__(self, lm, temperature: float, chunk: int):
        super().__init__()
        head = lm.get_output_embeddings()
        if getattr(head, "bias", None) is not None or getattr(lm.config, "final_logit_softcapping", None):
            raise UserError(f"model {lm.config.model_type!r} has a biased or soft-capped vocabulary head, which the log-probs here do not cover")
        self.lm, self.temperature, self.chunk = lm, temperature, chunk

    def forward(self, ids, prompt_lengths, lengths, want_entropy=True):
        """(logps, entropy) of the completions, (n, T) float32, 0 outside; entropy None if not wanted. ids (n, S), lengths (n,)."""
        hidden = self.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state        # (n, S, H)
        row, t = completion_mask(lengths).nonzero(as_tuple=True)                             # the tokens of all completions, flat
        at = prompt_lengths[row] + t
        head = self.lm.get_output_embeddings().weight
        flat = L.token_logps(hidden[row, at - 1], head, ids[row, at], self.temperature, self.chunk, want_entropy)
        return tuple(x if x is None else x.new_zeros(len(ids), int(lengths.max())).index_put((row, t), x) for x in flat)


class CheckedAdamW(torch.optim.AdamW):
    """AdamW for ZeRO stage 0 in float32, where DeepSpeed neither measures the gradient nor refuses a NaN as its own stages do.
    DeepSpeed reads the two attributes back in get_global_grad_norm() and was_step_applied()."""

    def __init__(self, params, max_grad_norm: float, **kwargs):
        super().__init__(params, **kwargs)
        self.max_grad_norm, self._global_grad_norm, self.overflow = max_grad_norm, 0.0, False

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        self._global_grad_norm, self.overflow = norm.item(), not bool(norm.isfinite())
        if not self.overflow:
            if self.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(params, self.max_grad_norm, norm)
            super().step()


def completion_mask(lengths):
    """(n, T) bool from lengths (n,): true on every completion token, EOS included."""
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]


def named_weights(lm, zero_stage: int):
    """(name, tensor) of every weight of a Hugging Face model, whole on every rank, as an engine's sync and a checkpoint take them.
    ZeRO-3 parameters are gathered one at a time, by all ranks together. Tied embeddings appear under both names: a vLLM reload
    without lm_head.weight is silently wrong."""
    head = lm.get_output_embeddings().weight
    tied = head is lm.get_input_embeddings().weight
    for name, parameter in lm.named_parameters():
        if zero_stage == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        else:
            whole = parameter.detach()
        yield name, whole
        if tied and parameter is head:
            yield "lm_head.weight", whole


# --- ranks

def start_distributed():
    """(rank, world, device); one process without torchrun is a world of one."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    deepspeed.utils.logger.setLevel("ERROR")
    transformers.utils.logging.disable_progress_bar()       # of files that load in a blink, once per rank
    deepspeed.init_distributed(dist_backend="nccl" if gpu else "gloo", verbose=False)
    return dist.get_rank(), dist.get_world_size(), device


def dtype_of(c: dict) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(c["dtype"], torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def across_ranks(tensor, op=dist.ReduceOp.SUM):
    """`tensor` reduced over all ranks, on the CPU."""
    tensor = tensor.to("cuda" if dist.get_backend() == "nccl" else "cpu", copy=True)
    dist.all_reduce(tensor, op)
    return tensor.cpu()


def gather_groups(tensor):
    """(P / world, G) of every rank as (P, G), in rank order, on the CPU: group quantities are small and everyone works on all of them."""
    tensor = tensor.float().to("cuda" if dist.get_backend() == "nccl" else "cpu").contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts).cpu()


# --- micro-batches

def plan_micro_batches(lengths, budget: int, unit: int, at_least: int = 1) -> list:
    """Row indices of each micro-batch: longest rows first, as many as fit in `budget` padded tokens, `unit` neighbouring rows (a
    group) never torn apart; `lengths` (n,) prompt + completion. Then halved until there are `at_least`: ranks must agree on the number."""
    longest = lengths.view(-1, unit).amax(1)
    bins, width = [], 0
    for u in longest.argsort(descending=True, stable=True).tolist():
        if not bins or (len(bins[-1]) + 1) * unit * width > budget:
            bins.append([])
            width = int(longest[u])     # the first of a bin is its longest
        bins[-1].append(u)
    while len(bins) < at_least:
        bins.sort(key=len)
        largest = bins.pop()
        bins += [largest[::2], largest[1::2]]
    return [(torch.tensor(b)[:, None] * unit + torch.arange(unit)).flatten() for b in bins]


def agree_on_plan(lengths, budget: int, unit: int) -> tuple[list, bool]:
    """The micro-batches of this rank, as many on every rank, and whether groups of `unit` rows had to be cut because one of them,
    on any rank, exceeds the budget."""
    lengths = lengths.cpu()
    cut = int(lengths.view(-1, unit).amax()) * unit > budget
    mine = torch.tensor([cut, *(len(plan_micro_batches(lengths, budget, u)) for u in (unit, 1))])
    agreed = across_ranks(mine, dist.ReduceOp.MAX).tolist()
    cut = unit > 1 and bool(agreed[0])
    return (plan_micro_batches(lengths, budget, 1, agreed[2]) if cut else plan_micro_batches(lengths, budget, unit, agreed[1])), cut


@torch.no_grad()
def score_rows(model, batch: dict, plan: list):
    """Log-probs (N, T) of all rows under `model`, 0 outside completions. No gradient, no entropy."""
    logps = torch.zeros_like(batch["sampler_logps"])
    for rows in plan:
        part = rollout.take(batch, rows)
        values, _ = model(part["ids"], part["prompt_lengths"], part["lengths"], want_entropy=False)
        logps[rows, :values.shape[1]] = values
    return logps


# --- the step's loss

def group_targets(rewards, ref_scores, tau: float, beta: float, c: dict) -> dict:
    """What the rewards (P, G) of the whole step ask of the policy: weights and active groups (maxent, xdr), advantages, all (P, G)."""
    scale = c["scale_rewards"] or L.OWN_SCALE[c["objective"]]
    targets = {"rewards": rewards, "active": ~L.equal_groups(rewards)}
    if c["objective"] == "maxent":
        utilities = L.log_reward_targets(rewards, c["maxent_q_temperature"], c["maxent_q_epsilon"])
        targets["weights"] = L.maxent_weights(utilities, ref_scores, tau, beta)
        targets["active"] = L.active_groups(rewards, c["maxent_skip_equal_groups"])
    elif c["objective"] == "xdr":
        targets["weights"] = L.maxent_weights(L.group_advantages(rewards, scale), None, tau, 0.0)
    targets["advantages"] = L.objective_advantages(c["objective"], rewards, scale, tau, targets.get("weights"))
    if c["objective"] == "maxent":
        targets["advantages"] = targets["advantages"].masked_fill(~targets["active"][:, None], 0.0)
    return targets


def couples_rows(c: dict) -> bool:
    """Whether the loss of a row depends on the log-probs of the others in its group."""
    return (c["objective"] == "maxent" and c["maxent_loss"] == "listwise") or c["mode_entropy_coef"] > 0


def scores_of(logps, lengths, c: dict):
    """Sequence scores (n,) for group_loss: in maxent_score_norm, or plain sums for the mode-entropy term."""
    return L.sequence_scores(logps, lengths, c["maxent_score_norm"] if c["objective"] == "maxent" else "sum", c["max_completion_length"])


def group_loss(scores, targets: dict, c: dict, norm: dict):
    """The part of the loss that couples the rows of a group, from their scores (p, G): listwise maxent or the mode-entropy term."""
    if c["objective"] == "maxent":
        return L.listwise_loss(scores, targets["weights"], targets["active"], norm["active"])
    return c["mode_entropy_coef"] * L.mode_entropy_loss(scores, targets["rewards"], norm["prompts"] * c["max_completion_length"])


def token_loss(logps, part: dict, advantages, beta: float, c: dict, norm: dict) -> tuple:
    """The part of the loss that is a sum over tokens: clipped surrogate and KL. (loss, clipped below, clipped above, KL sum)."""
    mask = completion_mask(part["lengths"])
    share = L.token_weights(L.AGGREGATION[c["objective"]], mask, norm["rows"], norm["tokens"], c["max_completion_length"])
    total, low, high, kl_sum = logps.new_zeros(()), mask & False, mask & False, logps.new_zeros(())
    if c["objective"] != "maxent" or c["maxent_loss"] == "policy_gradient":
        surrogate, low, high = L.clipped_surrogate(logps, part["old_logps"], advantages, c["epsilon"],
                                                   c["epsilon_high"] if c["epsilon_high"] >= 0 else c["epsilon"], c["delta"])
        correction = L.importance_ratio(part["old_logps"], part["sampler_logps"], c["importance_sampling"], c["importance_sampling_cap"])
        total = total - (share * correction * surrogate).sum()
    if "ref_logps" in part:
        kl = L.k3_kl(logps, part["ref_logps"]) * mask
        kl_sum = kl.detach().sum()
        if c["objective"] != "maxent" or c["maxent_kl"]:
            total = total + beta * (share * kl).sum()
    return total, (low & mask).sum(), (high & mask).sum(), kl_sum


def accumulate_gradients(engine, batch: dict, targets: dict, beta: float, c: dict, norm: dict) -> dict:
    """Forward and backward over all micro-batches of one update; the metrics of the step, over all ranks.

    targets: this rank's groups (p, G); norm: counts of the whole step. Sets batch["old_logps"] in the first update of a batch."""
    G, world = c["num_generations"], dist.get_world_size()
    targets = {key: value.to(batch["ids"].device) for key, value in targets.items()}
    plan, cut = agree_on_plan(batch["prompt_lengths"] + batch["lengths"], c["max_tokens_per_micro_batch"], G if couples_rows(c) else 1)
    coefficients, value, first = None, 0.0, "old_logps" not in batch
    if cut:     # a group does not fit: its members' scores come from a pass of their own, and each row gets d loss / d score
        scores = scores_of(score_rows(engine, batch, plan), batch["lengths"], c).requires_grad_()
        value = group_loss(scores.view(-1, G), targets, c, norm)
        coefficients, value = torch.autograd.grad(value, scores)[0], value.item()
    old_logps = torch.zeros_like(batch["sampler_logps"])
    sums = torch.zeros(5, dtype=torch.float64)
    sums[0] = value
    for rows in plan:
        part = rollout.take(batch, rows)
        logps, entropy = engine(part["ids"], part["prompt_lengths"], part["lengths"])        # (n, T)
        if first:
            part["old_logps"] = logps.detach()
            old_logps[rows, :logps.shape[1]] = part["old_logps"]
        loss, low, high, kl = token_loss(logps, part, targets["advantages"].flatten()[rows], beta, c, norm)
        reported = loss.item()
        if couples_rows(c):
            scores = scores_of(logps, part["lengths"], c)
            if cut:
                loss = loss + (coefficients[rows] * scores).sum()
            else:
                whole = {k: v[rows[::G] // G] for k, v in targets.items()}
                coupled = group_loss(scores.view(-1, G), whole, c, norm)
                loss, reported = loss + coupled, reported + coupled.item()
        # A NaN loss can have a finite gradient: make sure it has not, then the optimizer skips the step on every rank.
        # Times world, because DeepSpeed averages over ranks what is meant to be a sum.
        engine.backward(loss * (world if math.isfinite(reported) else math.nan), scale_wrt_gas=False)
        sums += torch.tensor([reported, entropy.sum().item(), kl.item(), low.sum().item(), high.sum().item()])
    if first:
        batch["old_logps"] = old_logps
    total, entropy, kl, low, high = across_ranks(sums).tolist()
    tokens = norm["tokens"]
    metrics = {"loss": total, "entropy": entropy / tokens, "clip_ratio/low": low / tokens, "clip_ratio/high": high / tokens}
    return metrics | ({"kl": kl / tokens} if "ref_logps" in batch else {})


def sampler_mismatch(batch: dict, tokens: int, limit: float) -> dict:
    """How far the sampler's log-probs are from the trainer's before the update, over all ranks. They should be the same policy: a mean
    difference above `limit` (nats, -1 off) means that weights did not arrive, and stops the run."""
    mask = completion_mask(batch["lengths"])
    d = (batch["old_logps"] - batch["sampler_logps"])[mask]
    ratio = d.clamp(max=20).exp()
    mean, ratio_mean = (across_ranks(torch.stack([d.abs().sum(), ratio.sum()])) / tokens).tolist()
    largest, ratio_max, ratio_min = across_ranks(torch.stack([d.abs().max(), ratio.max(), -ratio.min()]), dist.ReduceOp.MAX).tolist()
    if limit >= 0 and mean > limit:
        raise RunStopped(f"the sampler's log-probs differ from the trainer's by {mean:.3f} nats a token on average (at most {largest:.1f}), "
                         f"over max_logp_difference={limit}: the rollout engine does not hold the policy's weights")
    found = {"sampling_logp_difference/mean": mean, "sampling_logp_difference/max": largest, "importance_sampling_ratio/mean": ratio_mean,
             "importance_sampling_ratio/min": -ratio_min, "importance_sampling_ratio/max": ratio_max}
    return {f"sampling/{name}": value for name, value in found.items()}
