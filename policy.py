"""The policy: a language model that answers with log-probs of its completions, its optimizer at ZeRO stage 0, its weights by name.

    policy = Policy(lm, temperature=1.0, chunk=256)
    logps, entropy = policy(ids, prompt_lengths, lengths)       # (n, T) each

n rows; T tokens of the longest completion; S of the longest row; M of all of them; H hidden size.
"""

from typing import NamedTuple

import deepspeed
import torch

import loss as L
import packing
from common import UserError

CHUNK = 1024  # tokens whose vocabulary logits are computed at once (on a CPU at most 128)


class Plan(NamedTuple):
    """Where the k completion tokens of n rows stand among the hidden states of a forward."""

    row: torch.Tensor  # (k,)
    t: torch.Tensor  # (k,) the index in its completion
    targets: torch.Tensor  # (k,) token ids
    before: torch.Tensor  # (k,) the place of what predicts it
    own: torch.Tensor  # (k,) its own place
    ends: torch.Tensor  # (n,) places of the completions' last tokens
    packed: packing.Packed | None


class Policy(torch.nn.Module):
    """A causal language model whose forward answers with log-probs of the completion's tokens, never with logits."""

    def __init__(self, lm, temperature: float, chunk: int, seeds: int = 0, pack: bool = True):
        super().__init__()
        head = lm.get_output_embeddings()
        if lm.config._attn_implementation != packing.NAME:  # else it is in a Policy already
            check_head(lm)
        self.lm, self.temperature, self.chunk, self.pack = lm, temperature, chunk, pack
        self.seed_head = (
            torch.nn.Linear(head.weight.shape[1], seeds, dtype=head.weight.dtype) if seeds else None
        )  # InfoSeed, "ce"
        if pack:
            packing.prepare(lm)

    def plan(self, ids, prompt_lengths, lengths) -> Plan:
        """What forward needs to know of where tokens stand. On the host."""
        row, t = completion_mask(lengths).nonzero(as_tuple=True)
        packed = None
        if self.pack:
            packed = packing.pack(ids, prompt_lengths, lengths, packing.uses_varlen(self.lm))
            before, own = packing.completion_places(packed, row, t)
        else:
            own = row * ids.shape[1] + prompt_lengths[row] + t
            before = own - 1
        targets = ids[row, prompt_lengths[row] + t]
        return Plan(row, t, targets, before, own, own[t == lengths[row] - 1], packed)

    def forward(self, ids, prompt_lengths, lengths, want_entropy=True, pool=""):
        """(logps, entropy) of the completions, (n, T) float32, 0 outside; entropy None if not
        wanted. ids (n, S), lengths (n,).
        With pool "mean" or "last": (final hidden states of the completion (n, H) float32, the seed
        head's logits on them or None)."""
        host = packing.on_host(ids, prompt_lengths, lengths)
        shape = len(ids), int(host[2].max())
        plan = packing.to_device(self.plan(*host), ids.device)
        if self.pack:
            hidden = packing.states(self.lm, plan.packed)  # (M, H)
        else:
            out = self.lm.base_model(input_ids=ids, use_cache=False)
            hidden = out.last_hidden_state.flatten(0, 1)
        if pool:
            return self.pooled(hidden, plan, lengths, pool)
        logps, entropy = L.token_logps(
            hidden.index_select(0, plan.before),
            self.lm.get_output_embeddings().weight,
            plan.targets,
            self.temperature,
            self.chunk,
            want_entropy,
        )
        if self.seed_head is not None:
            # a gradient of zero: without any in a step's first backward, ZeRO-3 keeps that of the
            # last step
            logps = logps + 0.0 * self.seed_head(hidden[:1]).sum()

        def table(x):  # (k,) to (n, T)
            return None if x is None else x.new_zeros(shape).index_put((plan.row, plan.t), x)

        return table(logps), table(entropy)

    def pooled(self, hidden, plan: Plan, lengths, pool: str) -> tuple:
        """forward's results with pool."""
        pooled = hidden[plan.ends].float()  # (n, H)
        if pool == "mean":
            sums = torch.zeros_like(pooled).index_add(0, plan.row, hidden[plan.own].float())
            pooled = sums / lengths[:, None]
        if self.seed_head is None:
            return pooled, None
        return pooled, self.seed_head(pooled.to(self.seed_head.weight.dtype)).float()


@torch.no_grad()
def check_head(lm) -> None:
    """UserError if the model's logits are more than its hidden states times its vocabulary head: biased, capped or scaled, as the log-probs here are not."""
    head, trains = lm.get_output_embeddings(), lm.training
    ids = torch.arange(5, 13, device=lm.device)[None] % lm.config.get_text_config().vocab_size
    lm.eval()
    plain, logits = (
        (lm.base_model(input_ids=ids, use_cache=False).last_hidden_state @ head.weight.T).float(),
        lm(input_ids=ids, use_cache=False).logits.float(),
    )
    lm.train(trains)
    if not logits.isfinite().all():
        raise UserError(
            f"model {lm.config.model_type!r} answers with logits that are no numbers (NaN or "
            f"infinite): its weights are broken; take an earlier checkpoint"
        )
    gap, most = (
        (logits - plain).abs().max() / plain.abs().max(),
        1e-3 if lm.dtype == torch.float32 else 0.02,
    )
    if trains and (lm(input_ids=ids, use_cache=False).logits.float() - logits).abs().max() > (
        most * logits.abs().max()
    ):
        raise UserError(
            f"model {lm.config.model_type!r} computes something else while it trains (dropout, or "
            f"noise in its routing) than while it samples, which is not supported"
        )
    # a small bias does not show among eight tokens, nor does a cap at small logits
    if (
        gap > most
        or getattr(head, "bias", None) is not None
        or getattr(lm.config, "final_logit_softcapping", None)
    ):
        raise UserError(
            f"model {lm.config.model_type!r} has a bias, a cap or a scale on the logits of its vocabulary head (lm_head), which is not supported"
        )


def turn_off_dropout(lm) -> float:
    """Sets every dropout of a model to 0; returns the largest there was. Completions were sampled
    without it, and with it the ratios of probabilities would be noise. The config keeps its own."""
    largest = 0.0
    for module in lm.modules():
        for name, value in vars(module).items():
            is_dropout = "drop" in name or isinstance(module, torch.nn.modules.dropout._DropoutNd)
            if is_dropout and isinstance(value, float) and value > 0:
                largest = max(largest, value)
                setattr(module, name, 0.0)
    return largest


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


def seed_classes(c: dict) -> int:
    """Classes of the head that InfoSeed's "ce" trains with the policy; 0: there is none."""
    return c["info_seed_num_seeds"] if c["info_seed_loss_type"] == "ce" else 0


def dtype_of(c: dict) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
        c["dtype"], torch.bfloat16 if torch.cuda.is_available() else torch.float32
    )


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


def set_temperature(models, temperature: float) -> None:
    """Log-probs are taken at the temperature that rollouts are sampled at. models: policies, engines around them, or None."""
    for model in models:
        if model is not None:
            getattr(model, "module", model).temperature = temperature
