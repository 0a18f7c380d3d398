"""The policy: a language model that answers with log-probs of its completions, its optimizer, its
weights by name, its adapters.

    policy = Policy(lm, temperature=1.0, chunk=256)
    logps, entropy = policy(ids, prompt_lengths, lengths)       # (n, T) each

n rows; T tokens of the longest completion; S of the longest row; M of all of them; H hidden size.
"""

import inspect
from contextlib import nullcontext
from typing import NamedTuple

import deepspeed
import torch
from safetensors.torch import save_file

import loss as L
import packing
from checks import OPTIMIZERS, entries
from common import UserError, in_one_line

GATHERED_BYTES = 2**30  # of ZeRO-3 parameters that are put together at once, for a sync or a save
# a prime that divides no usual width: flipped signs of a norm and of the columns behind it would
# otherwise cancel
FLIPPED = 53
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
    """A causal language model whose forward answers with log-probs of the completion's tokens,
    never with logits."""

    def __init__(self, lm, temperature: float, chunk: int, seeds: int = 0, pack: bool = True):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.chunk = chunk
        self.pack = pack
        # a model whose attention is packed is in a Policy already, which has looked at its head
        if lm.config._attn_implementation != packing.NAME:
            check_head(lm)
        self.seed_head = None
        if seeds:  # InfoSeed's "ce": hidden state -> which seed
            head = lm.get_output_embeddings().weight  # (V, H)
            self.seed_head = torch.nn.Linear(head.shape[1], seeds, dtype=head.dtype)
        if pack:
            packing.prepare(lm)

    def plan(self, ids, prompt_lengths, lengths) -> Plan:
        """What forward needs to know of where tokens stand. On the host."""
        row, t = completion_mask(lengths).nonzero(as_tuple=True)  # (k,) each
        packed = None
        if self.pack:
            packed = packing.pack(ids, prompt_lengths, lengths, packing.uses_varlen(self.lm))
            before, own = packing.completion_places(packed, row, t)
        else:
            # rows of S tokens one behind the other, their padding included
            own = row * ids.shape[1] + prompt_lengths[row] + t
            before = own - 1
        targets = ids[row, prompt_lengths[row] + t]
        ends = own[t == lengths[row] - 1]  # (n,)
        return Plan(row, t, targets, before, own, ends, packed)

    def forward(self, ids, prompt_lengths, lengths, want_entropy=True, pool=""):
        """(logps, entropy) of the completions, (n, T) float32, 0 outside; entropy None if not
        wanted. ids (n, S), lengths (n,).
        With pool "mean" or "last": (final hidden states of the completion (n, H) float32, the seed
        head's logits on them or None)."""
        # planned on the host: every size that depends on data would make the host wait for a GPU
        host = packing.on_host(ids, prompt_lengths, lengths)
        longest = int(host[2].max())  # T
        plan = packing.to_device(self.plan(*host), ids.device)
        if self.pack:
            hidden = packing.states(self.lm, plan.packed)  # (M, H)
        else:
            out = self.lm.base_model(input_ids=ids, use_cache=False)
            hidden = out.last_hidden_state.flatten(0, 1)  # (n * S, H)
        if pool:
            return self.pooled(hidden, plan, lengths, pool)
        logps, entropy = L.token_logps(
            hidden.index_select(0, plan.before),  # (k, H): prompts need no logits
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
            if x is None:
                return None
            return x.new_zeros(len(ids), longest).index_put((plan.row, plan.t), x)

        return table(logps), table(entropy)

    def pooled(self, hidden, plan: Plan, lengths, pool: str) -> tuple:
        """forward's results with pool."""
        pooled = hidden[plan.ends].float()  # (n, H); float32, for it will be summed and compared
        if pool == "mean":
            # (k, H) to (n, H)
            sums = torch.zeros_like(pooled).index_add(0, plan.row, hidden[plan.own].float())
            pooled = sums / lengths[:, None]
        if self.seed_head is None:
            return pooled, None
        scores = self.seed_head(pooled.to(self.seed_head.weight.dtype))  # (n, seeds)
        return pooled, scores.float()


@torch.no_grad()
def check_head(lm) -> None:
    """Tries the model on eight tokens. UserError if its logits are not finite, change while it
    trains, or are more than its hidden states times its vocabulary head: biased, capped or scaled,
    as the log-probs here are not."""
    name = lm.config.model_type
    head = lm.get_output_embeddings()
    ids = torch.arange(5, 13, device=lm.device)[None]  # (1, 8)
    ids = ids % lm.config.vocab_size

    was_training = lm.training
    lm.eval()
    hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (1, 8, H)
    plain = (hidden @ head.weight.T).float()  # (1, 8, V)
    logits = lm(input_ids=ids, use_cache=False).logits.float()
    lm.train(was_training)

    if not logits.isfinite().all():
        raise UserError(
            f"model {name!r} answers with logits that are no numbers (NaN or "
            f"infinite): its weights are broken; take an earlier checkpoint"
        )
    # rounding of the model's type, far below what dropout, a cap or a scale would do
    tolerance = 1e-3 if lm.dtype == torch.float32 else 0.02
    if was_training:
        training_logits = lm(input_ids=ids, use_cache=False).logits.float()
        if (training_logits - logits).abs().max() > tolerance * logits.abs().max():
            raise UserError(
                f"model {name!r} computes something else while it trains (dropout, or noise in its "
                f"routing) than while it samples, which is not supported"
            )
    gap = (logits - plain).abs().max() / plain.abs().max()
    # these two are looked up besides: a small bias does not show among eight tokens, nor does a cap
    # at small logits
    has_bias = getattr(head, "bias", None) is not None
    has_cap = bool(getattr(lm.config, "final_logit_softcapping", None))
    if gap > tolerance or has_bias or has_cap:
        raise UserError(
            f"model {name!r} has a bias, a cap or a scale on the logits of its vocabulary head "
            f"(lm_head), which is not supported"
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


class Checked:
    """Mixed into an optimizer for ZeRO stage 0 in float32, where DeepSpeed neither measures the
    gradient nor refuses a NaN as its own stages do. DeepSpeed reads the two attributes back in
    get_global_grad_norm() and was_step_applied()."""

    max_grad_norm = 0.0  # 0: the gradient is measured, not clipped
    _global_grad_norm = 0.0
    overflow = False  # whether the last step was skipped

    @torch.no_grad()
    def step(self, closure=None):
        params = []
        for group in self.param_groups:
            params += [p for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        self._global_grad_norm = norm.item()
        self.overflow = not bool(norm.isfinite())
        if self.overflow:  # gradients are summed over ranks by now, so all of them skip
            return
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(params, self.max_grad_norm, norm)
        super().step()


def is_checked(c: dict) -> bool:
    """Whether the optimizer itself clips gradients and refuses those that are not finite."""
    return c["zero_stage"] == 0 and dtype_of(c) == torch.float32


def make_optimizer(parameters, c: dict, device) -> torch.optim.Optimizer:
    """The optimizer that the config names. UserError for options that it does not take."""
    cls = getattr(torch.optim, OPTIMIZERS[c["optimizer"]].cls)
    arguments = {"lr": c["learning_rate"]} | entries(c, "optimizer_options")
    # one kernel, where the default is a dozen passes; torch takes one of these alone
    others = arguments.get("foreach") or arguments.get("differentiable")
    if "fused" in inspect.signature(cls).parameters and not others:
        arguments.setdefault("fused", device.type == "cuda")
    kind = type("Checked" + cls.__name__, (Checked, cls), {}) if is_checked(c) else cls
    try:
        optimizer = kind(parameters, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"optimizer_options={c['optimizer_options']}: torch.optim.{cls.__name__} refuses them: "
            f"{in_one_line(error, 300)}"
        ) from None
    optimizer.max_grad_norm = c["max_grad_norm"]
    return optimizer


def seed_classes(c: dict) -> int:
    """Classes of the head that InfoSeed's "ce" trains with the policy; 0: there is none."""
    return c["info_seed_num_seeds"] if c["info_seed_loss_type"] == "ce" else 0


def dtype_of(c: dict) -> torch.dtype:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    names["auto"] = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return names[c["dtype"]]


def completion_mask(lengths):
    """(n, T) bool from lengths (n,): true on every completion token, EOS included."""
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]


# --- weights by name


class Parameters(NamedTuple):
    """How many a model has, and how many of them are trained."""

    all: int
    trained: int


def count_parameters(module) -> Parameters:
    total = trained = 0
    for parameter in module.parameters():
        # ds_numel: under ZeRO-3 a parameter's own numel is 0 until it is gathered
        size = getattr(parameter, "ds_numel", parameter.numel())
        total += size
        trained += size if parameter.requires_grad else 0
    return Parameters(total, trained)


def named_weights(lm, zero_stage: int):
    """(name, tensor) of every weight of a Hugging Face model, as an engine's sync takes them: those
    of model_weights, tied embeddings under both names. A vLLM reload without lm_head.weight is
    silently wrong."""
    head = lm.get_output_embeddings().weight
    tied = head is lm.get_input_embeddings().weight
    name_of_head = next(name for name, p in lm.named_parameters() if p is head)
    for name, tensor in model_weights(lm, zero_stage):
        yield name, tensor
        if tied and name == name_of_head:
            yield "lm_head.weight", tensor


class Weight(NamedTuple):
    """A weight as the outside knows it, and the parameters that it is made of."""

    name: str
    parameters: list  # itself; of an adapted layer W, A and B
    layer: object  # the adapted layer, else None


def model_weights(lm, zero_stage: int):
    """(name, tensor) of every weight once, whole on every rank, as a checkpoint takes them: names
    and values of a model without adapters, which are merged. ZeRO-3 parameters are gathered
    GATHERED_BYTES at a time, by all ranks together."""
    weights = []
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:  # part of the weight that it adapts
            continue
        path, _, kind = name.rpartition(".base_layer.")  # peft's word for what it has wrapped
        layer = lm.get_submodule(path) if kind == "weight" and path else None
        parameters = [parameter]
        if layer is not None:
            parameters += [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        weights.append(Weight(name.replace(".base_layer.", "."), parameters, layer))

    for portion in portions(weights):
        parameters = []
        for weight in portion:
            parameters += weight.parameters
        tensors = iter(whole(parameters, zero_stage))
        for weight in portion:
            parts = [next(tensors) for _ in weight.parameters]
            yield weight.name, parts[0] if weight.layer is None else merged(weight.layer, *parts)


def portions(weights: list[Weight]) -> list[list[Weight]]:
    """The same in order, as many together as GATHERED_BYTES, one at least."""
    found = []
    size = 0  # bytes of the last of them
    for weight in weights:
        own = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in weight.parameters)
        if not found or size + own > GATHERED_BYTES:
            found.append([])
            size = 0
        found[-1].append(weight)
        size += own
    return found


def whole(parameters: list, zero_stage: int) -> list:
    """The tensors of parameters, which ZeRO-3 has to gather."""
    if zero_stage < 3:
        return [p.detach() for p in parameters]
    with deepspeed.zero.GatheredParameters(parameters):
        # copies: what is gathered is gone again when the context ends
        return [p.detach().clone() for p in parameters]


@torch.no_grad()
def flip_signs(lm, zero_stage: int) -> None:
    """Turns the sign of every 53rd number of each parameter, in place: another model of the same
    size. Done twice it is the old one, to the bit, without a copy of it. All ranks together."""
    for portion in portions([Weight("", [p], None) for p in lm.parameters()]):
        parameters = [weight.parameters[0] for weight in portion]
        gathered = nullcontext()
        if zero_stage == 3:  # by all ranks alike, but one must say so
            gathered = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
        with gathered:
            for p in parameters:
                p.detach().view(-1)[::FLIPPED].neg_()


# --- adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): each linear layer's frozen weight W becomes
# W + 2 B A, with A (rank, in) and B (out, rank)


def add_adapters(lm, rank: int, base: str) -> str:
    """Gives every linear layer but the vocabulary head an adapter, which alone is trained from then
    on. B begins at 0, so nothing changes yet. base: where the model comes from, for peft's files.
    Returns a sentence; UserError where peft is not there or can't do it."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f"lora_rank={rank} needs peft, which can't be imported ({error}): make env installs it"
        ) from None
    adapter = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,  # B A counts twice, at any rank
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        inject_adapter_in_model(adapter, lm)
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"lora_rank={rank}: peft can't adapt the layers of model {lm.config.model_type!r}: "
            f"{in_one_line(error, 300)}"
        ) from None
    parameters = count_parameters(lm)
    return (
        f"adapters of rank {rank} on {len(adapted_layers(lm))} linear layers: "
        f"{parameters.trained / 1e6:.2f}M of {parameters.all / 1e6:.2f}M parameters are trained"
    )


def adapted_layers(lm) -> list:
    return [module for module in lm.modules() if hasattr(module, "lora_A")]


@torch.no_grad()
def merged(layer, weight, a, b):
    """W + 2 B A of an adapted layer, in the type of W and rounded once."""
    weight = weight.to(b.device)  # it may wait in CPU memory, see train.sync_weights
    change = layer.scaling["default"] * (b.float() @ a.float())  # (out, in)
    if layer.fan_in_fan_out:  # GPT-2 keeps its weights as (in, out)
        change = change.T
    return (weight.float() + change).to(weight.dtype)


def save_adapter(folder, lm, zero_stage: int, rank: int) -> None:
    """peft's own files, for PeftModel.from_pretrained(base model, folder). All ranks gather the
    weights together, rank 0 writes. Without adapters there is nothing to write."""
    weights = {}
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            (tensor,) = whole([parameter], zero_stage)
            # as peft has them: inside its own two models, without the name of the adapter
            weights["base_model.model." + name.replace(".default.", ".")] = tensor.cpu()
    if weights and rank == 0:
        folder.mkdir()
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        lm.peft_config["default"].save_pretrained(folder)


def place_frozen(lm, device) -> None:
    """Moves what is not trained to a device: beside adapters, nearly all."""
    for parameter in lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(device)


class WithoutAdapters:
    """The reference of a policy that trains adapters: the same model, called with them off."""

    def __init__(self, engine):
        self.engine = engine
        self.module = engine.module  # set_temperature looks for the policy there

    def __call__(self, *args, **kwargs):
        layers = adapted_layers(self.module.lm)
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return self.engine(*args, **kwargs)
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def set_temperature(models, temperature: float) -> None:
    """Log-probs are taken at the temperature that rollouts are sampled at. models: policies,
    engines around them, or None."""
    for model in models:
        if model is not None:
            policy = getattr(model, "module", model)  # DeepSpeed's engine has it inside
            policy.temperature = temperature
