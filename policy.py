"""The policy: a language model whose forward returns log-probs of completions; its optimizer, its
weights by name, its adapters.

    policy = Policy(lm, temperature=1.0)
    logps, entropy = policy(ids, prompt_lengths, lengths)       # (n, T) each

n rows with k completion tokens in all; T tokens of the longest completion, W of the longest row
(prompt and completion), M of the packed row, in which shared tokens count once; H hidden size, V
vocabulary, S InfoSeed's seeds.
"""

import inspect
from contextlib import nullcontext
from operator import attrgetter
from typing import NamedTuple

import deepspeed
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

import packing
from checks import OPTIMIZERS, entries
from common import UserError, in_one_line
from loss import token_logps
from ranks import wait_for_gpu

GATHERED_BYTES = 2**30  # ZeRO-3 parameters gathered at once, for a sync or a save
# flip_signs() flips every 53rd number. A prime that divides no usual width: otherwise the flipped
# signs of a norm and of the matrix columns that it feeds would cancel.
FLIP_EVERY = 53
CHUNK = 1024  # tokens whose vocabulary logits are computed at once, see loss.CPU_CHUNK
DITHERED = 2**24  # numbers that dither() moves at once, so that its noise takes little memory


class TokenPlaces(NamedTuple):
    """Where the k completion tokens of n rows are among the hidden states of a forward. A place is
    an index into these hidden states."""

    row: torch.Tensor  # (k,) each token's row
    t: torch.Tensor  # (k,) its index in its completion
    targets: torch.Tensor  # (k,) its id
    predictor: torch.Tensor  # (k,) the place of the token that predicts it
    place: torch.Tensor  # (k,) its own place
    ends: torch.Tensor  # (n,) places of the completions' last tokens
    packed: packing.Packed | None  # None without packing


class Policy(torch.nn.Module):
    """A causal language model whose forward returns log-probs of completion tokens, never
    logits. seed_classes: of InfoSeed's linear head, 0 for none; pack: see packing.py."""

    def __init__(
        self, lm, temperature: float, chunk: int = CHUNK, seed_classes: int = 0, pack: bool = True
    ):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.chunk = chunk
        self.pack = pack
        # a model whose attention is packed has been in a Policy before, which checked its head
        if lm.config._attn_implementation != packing.NAME:
            check_head(lm)
        self.seed_head = None
        if seed_classes:  # InfoSeed's "ce": hidden state -> which seed
            head = lm.get_output_embeddings().weight  # (V, H)
            self.seed_head = torch.nn.Linear(head.shape[1], seed_classes, dtype=head.dtype)
        if pack:
            packing.prepare(lm)

    def plan(self, ids, prompt_lengths, lengths) -> TokenPlaces:
        """The places for a forward; all tensors in CPU memory."""
        if self.pack:
            varlen = packing.uses_varlen(self.lm)
            packed, places = packing.pack(ids, prompt_lengths, lengths, varlen)
        else:
            packed = None
            # rows of W tokens one after the other, padding included
            places = torch.arange(ids.numel()).view(ids.shape)  # (n, W)
        row, t = completion_mask(lengths).nonzero(as_tuple=True)  # (k,) each
        at = prompt_lengths[row] + t  # (k,) index in the row
        place = places[row, at]
        ends = place[t == lengths[row] - 1]  # (n,)
        return TokenPlaces(row, t, ids[row, at], places[row, at - 1], place, ends, packed)

    def forward(self, ids, prompt_lengths, lengths, want_entropy=True, pool=""):
        """(logps, entropy) of the completions, each (n, T) float32, 0 outside; entropy is None if
        not wanted. ids (n, W), right-padded; prompt_lengths, lengths (n,).
        With pool "mean" or "last" instead: (the completions' final hidden states, pooled in this
        way, (n, H) float32; the seed head's logits on them or None). Not a method of its own,
        because ZeRO-3 gathers weights only for forward."""
        # planned on the host: on a GPU every size that depends on data would make the host wait
        host = packing.on_host(ids, prompt_lengths, lengths)
        longest = int(host[2].max())  # T
        plan = packing.to_device(self.plan(*host), ids.device)
        if self.pack:
            hidden = packing.hidden_states(self.lm, plan.packed)  # (M, H)
        else:
            out = self.lm.base_model(input_ids=ids, use_cache=False)
            hidden = out.last_hidden_state.flatten(0, 1)  # (n * W, H)
        if pool:
            return self.pooled(hidden, plan, lengths, pool)
        logps, entropy = token_logps(
            hidden.index_select(0, plan.predictor),  # (k, H): prompts need no logits
            self.lm.get_output_embeddings().weight,
            plan.targets,
            self.temperature,
            self.chunk,
            want_entropy,
        )
        if self.seed_head is not None:
            # gives the seed head a gradient of zero: if a step's first backward gave it none,
            # ZeRO-3 would keep that of the previous step
            logps = logps + 0.0 * self.seed_head(hidden[:1]).sum()

        def table(x):  # (k,) to (n, T)
            if x is None:
                return None
            return x.new_zeros(len(ids), longest).index_put((plan.row, plan.t), x)

        return table(logps), table(entropy)

    def pooled(self, hidden, plan: TokenPlaces, lengths, pool: str) -> tuple:
        """What forward returns with `pool`."""
        pooled = hidden[plan.ends].float()  # (n, H); float32, as it will be summed and compared
        if pool == "mean":
            # (k, H) to (n, H)
            sums = torch.zeros_like(pooled).index_add(0, plan.row, hidden[plan.place].float())
            pooled = sums / lengths[:, None]
        if self.seed_head is None:
            return pooled, None
        logits = self.seed_head(pooled.to(self.seed_head.weight.dtype))  # (n, S)
        return pooled, logits.float()


def completion_mask(lengths):
    """(n, T) bool from lengths (n,): true on every completion token, EOS included."""
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]


def set_temperature(models, temperature: float) -> None:
    """Sets the temperature at which models compute log-probs: that of the rollouts. models:
    policies, engines around them, or None."""
    for model in models:
        if model is not None:
            policy = getattr(model, "module", model)  # a DeepSpeed engine has it inside
            policy.temperature = temperature


# --- what a config says about the model


def dtype_of(c: dict) -> torch.dtype:
    if c["dtype"] == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[c["dtype"]]


def seed_classes(c: dict) -> int:
    """Number of classes of the head that InfoSeed's "ce" trains with the policy; 0: no head."""
    return c["info_seed_num_seeds"] if c["info_seed_loss_type"] == "ce" else 0


# --- a model as it was loaded: what is refused, what is changed

# keys in the configs of models with experts that add noise to their routing in training
NOISE = ("router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")
ODD_HEAD = (
    "has a bias, a cap or a scale on the logits of its vocabulary head (lm_head), which is not "
    "supported"
)


@torch.no_grad()
def check_head(lm) -> None:
    """Tries the model on eight tokens. UserError if its logits are not finite, differ in training
    mode, or are not just hidden states times vocabulary head: the log-probs here are computed
    without a bias, cap or scale."""
    name = lm.config.model_type
    check_body(lm)
    head = lm.get_output_embeddings()
    ids = torch.arange(5, 13, device=lm.device)[None]  # (1, 8)
    ids = ids % lm.config.vocab_size

    was_training = lm.training
    lm.eval()
    hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (1, 8, H)
    plain = (hidden @ head.weight.T).float()  # (1, 8, V)
    logits = lm(input_ids=ids, use_cache=False).logits.float()  # (1, 8, V)
    lm.train(was_training)

    if not logits.isfinite().all():
        raise UserError(
            f"model {name!r} answers with logits that are no numbers (NaN or "
            f"infinite): its weights are broken; take an earlier checkpoint"
        )
    # allows for rounding in the model's type, which is far less than dropout, a cap or a scale
    tolerance = 1e-3 if lm.dtype == torch.float32 else 0.02
    if was_training:
        training_logits = lm(input_ids=ids, use_cache=False).logits.float()
        differs = (training_logits - logits).abs().max() > tolerance * logits.abs().max()
        # the config is read too: in 16 bits, or on eight tokens, a little noise may not show
        if differs or any(getattr(lm.config, key, None) for key in NOISE):
            raise UserError(
                f"model {name!r} computes something else while it trains (dropout, or noise in its "
                f"routing) than while it samples, which is not supported"
            )
    gap = (logits - plain).abs().max() / plain.abs().max()
    # has_plain_head() too, because eight tokens may not show a small bias, or a cap on small logits
    if gap > tolerance or not has_plain_head(lm):
        raise UserError(f"model {name!r} {ODD_HEAD}")


def check_body(lm) -> None:
    """UserError if transformers does not say which part of the model gives hidden states, as for
    the text models of Llama 4."""
    if lm.base_model is lm:
        raise UserError(
            f"model {lm.config.model_type!r} is not supported: transformers does not say which of "
            f"its parts gives hidden states (base_model_prefix={lm.base_model_prefix!r})"
        )


def has_plain_head(lm) -> bool:
    """False if the model's modules or config show a bias, a cap or a scale on its logits. Needs no
    loaded weights."""
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        return False
    caps = ("final_logit_softcapping", "logits_soft_cap")
    if any(getattr(lm.config, name, None) for name in caps):
        return False
    scales = [getattr(lm.config, name, None) for name in ("logits_scaling", "logit_scale")]
    return all(scale in (None, 1) for scale in scales)


def turn_off_dropout(lm) -> float:
    """Sets every dropout of a model to 0; returns the largest there was. Completions are sampled
    without dropout; with it, ratios of probabilities would be noise. lm.config is left as it is."""
    largest = 0.0
    for module in lm.modules():
        for name, value in vars(module).items():
            is_dropout = "drop" in name or isinstance(module, torch.nn.modules.dropout._DropoutNd)
            if is_dropout and isinstance(value, float) and value > 0:
                largest = max(largest, value)
                setattr(module, name, 0.0)
    return largest


def refuse_untied(lm, model: str) -> None:
    """UserError if config.json ties the head to the embedding but the weights hold two different
    tensors. transformers then loads both, but a reader that trusts the saved config.json drops
    one."""
    head = lm.get_output_embeddings()  # None: check_body() refuses that
    if not getattr(lm.config, "tie_word_embeddings", False) or head is None:
        return
    if head.weight is not lm.get_input_embeddings().weight:
        raise UserError(
            f"model={model!r}: its weights hold a vocabulary head that differs from the embedding, "
            f"and its config.json says that they are one: set tie_word_embeddings to false there"
        )


def plain_config(lm) -> None:
    """Undoes what config.json may ask of every forward: a tuple instead of a dict, or attention
    weights, which packing can't give. Also removes references to code, which no checkpoint has."""
    vars(lm.config).pop("auto_map", None)
    lm.config.return_dict = True
    lm.config.output_attentions = False


def set_stop_tokens(lm, stop_ids: list[int]) -> None:
    """Makes checkpoints stop at the same tokens as the run. Without a generation_config.json only
    config.json names stop tokens, and they may differ from the tokenizer's."""
    lm.generation_config.eos_token_id = stop_ids if len(stop_ids) > 1 else stop_ids[0]


def drop_unsavable(lm) -> str:
    """transformers loads a generation_config.json that it later refuses to save, such as one with a
    temperature but without do_sample, and a run could then save no checkpoint. In that case keeps
    only its token ids; nothing here uses the rest. Returns a sentence that says so, or ""."""
    given = lm.generation_config
    try:
        given.validate(strict=True)
    except ValueError as error:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: getattr(given, name) for name in names}
        if type(ids["pad_token_id"]) is int and ids["pad_token_id"] < 0:  # means "none"
            del ids["pad_token_id"]
        lm.generation_config = GenerationConfig(**ids)
        return (
            f"warning: transformers can't save this model's generation_config.json "
            f"({in_one_line(error, 300)}): checkpoints keep only its token ids"
        )
    return ""


def make_trainable(lm, model: str) -> str:
    """Prepares a loaded model, so that it can be trained and then saved as it was trained. Returns
    the warning of drop_unsavable()."""
    refuse_untied(lm, model)
    plain_config(lm)
    return drop_unsavable(lm)


# --- the optimizer

# what an optimizer raises for options that it can't take
REFUSALS = (TypeError, ValueError, RuntimeError, LookupError)


class ClipAndSkip:
    """Mixed into an optimizer for ZeRO stage 0 in float32: clips the gradient, and skips the step
    if it is not finite. In all other cases DeepSpeed does both."""

    max_grad_norm = 0.0  # 0: the gradient is measured, not clipped
    # DeepSpeed's get_global_grad_norm() and was_step_applied() read these two
    _global_grad_norm = 0.0
    overflow = False  # whether the last step was skipped

    @torch.no_grad()
    def step(self):
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


def optimizer_clips(c: dict) -> bool:
    """Whether the optimizer itself clips and skips (ClipAndSkip), and not DeepSpeed."""
    return c["zero_stage"] == 0 and dtype_of(c) == torch.float32


def make_optimizer(parameters, c: dict) -> torch.optim.Optimizer:
    """The optimizer that the config names. UserError for options that it does not take."""
    cls = getattr(torch.optim, OPTIMIZERS[c["optimizer"]].cls)
    arguments = {"lr": c["learning_rate"]} | entries(c, "optimizer_options")
    # fused: one kernel, where the default makes a dozen passes with temporary tensors. torch
    # refuses it together with foreach.
    if "fused" in inspect.signature(cls).parameters and not arguments.get("foreach"):
        arguments.setdefault("fused", True)
    kind = cls
    if optimizer_clips(c):
        options = {"max_grad_norm": c["max_grad_norm"]}
        kind = type("ClipAndSkip" + cls.__name__, (ClipAndSkip, cls), options)
    try:
        return kind(parameters, **arguments)
    except REFUSALS as error:
        raise options_refused(c, error) from None


def skip_by_norm(optimizer, c: dict) -> None:
    """Stops DeepSpeed's bfloat16 optimizers of stages 0 to 2 from searching each gradient for NaN
    and infinity. Both show in the gradient's norm too, by which these optimizers then skip the
    step, as stage 3 does anyway. The search takes a dozen kernels for each parameter: with 290 tiny
    ones, a third or more of the optimizer's time on a CPU (LOG.md, 2026-11-26).

    optimizer: that of a DeepSpeed engine."""
    if dtype_of(c) != torch.bfloat16 or c["offload_optimizer"]:
        return
    if c["zero_stage"] == 0:
        optimizer.overflow_checker.check = lambda: False
    elif c["zero_stage"] < 3:
        optimizer.check_overflow = lambda **_: None


@torch.no_grad()
def dither(optimizer, c: dict) -> None:
    """Moves the float32 copy of every trained bfloat16 weight by less than half the distance to the
    next bfloat16 number, at random. The weights themselves stay what they are.

    Copies begin exactly at their weights. At a small learning rate no weight would move for tens of
    steps, until its copy has come half of the way, and then nearly all would move twice as far.
    With copies spread over the distance some move in each step, and the mean of all moves is right:
    SmolLM2's numbers learn as in float32 from the first step on (LOG.md, 2026-12-01).
    Rounding at random in every step does the same (Zamirai et al. 2020, "Revisiting BFloat16
    Training"), but needs random numbers in every step.

    optimizer: that of a DeepSpeed engine that no checkpoint has been loaded into."""
    if dtype_of(c) != torch.bfloat16:
        return
    copies = float32_copies(optimizer, c["zero_stage"])
    # the same numbers on all ranks, which at stage 0 all hold whole copies
    generator = torch.Generator(copies[0].device).manual_seed(c["seed"])
    for copy in copies:
        for part in copy.view(-1).split(DITHERED):
            noise = torch.randint(
                1 - 2**15,
                2**15,
                part.shape,
                generator=generator,
                dtype=torch.int32,
                device=part.device,
            )
            # bfloat16 is the upper 16 bits of a float32: less than half of the lower 16, added or
            # taken away, rounds back. The bits of 0 would become those of a NaN.
            part.view(torch.int32).add_(noise.mul_(part != 0))


def float32_copies(optimizer, zero_stage: int) -> list[torch.Tensor]:
    """The float32 copies that DeepSpeed's optimizer keeps of bfloat16 weights: of all at stage 0,
    above it of this rank's share. Writing to them changes no weight before the next step."""
    if zero_stage == 3:  # where param_groups are empty between steps
        return optimizer.fp32_partitioned_groups_flat
    copies = []
    for group in optimizer.optimizer.param_groups:
        copies += group["params"]
    return copies


def try_optimizer(c: dict) -> None:
    """UserError for optimizer options that fail, some of which do so only in the first step."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = make_optimizer([weight], c)
    weight.grad = torch.ones_like(weight)
    try:
        optimizer.step()
    except REFUSALS as error:
        raise options_refused(c, error) from None


def options_refused(c: dict, error: Exception) -> UserError:
    return UserError(
        f"optimizer_options={c['optimizer_options']}: torch.optim."
        f"{OPTIMIZERS[c['optimizer']].cls} refuses them: {in_one_line(error, 300)}"
    )


# --- weights by name


class ParameterCounts(NamedTuple):
    """How many parameters a model has, and how many of them are trained."""

    all: int
    trained: int


def count_parameters(module) -> ParameterCounts:
    total = trained = 0
    for parameter in module.parameters():
        total += numel_of(parameter)
        if parameter.requires_grad:
            trained += numel_of(parameter)
    return ParameterCounts(total, trained)


def numel_of(parameter) -> int:
    """Numbers in a parameter. Under ZeRO-3 its own numel() is 0 until it is gathered."""
    return getattr(parameter, "ds_numel", parameter.numel())


def named_weights(lm, zero_stage: int):
    """(name, tensor) of every weight of a Hugging Face model, for a sampler's sync: the same as
    model_weights(), but with tied embeddings under both of their names. A vLLM reload without the
    head's name is silently wrong."""
    embeddings = lm.get_input_embeddings().weight
    head = lm.get_output_embeddings()
    shared = [name for name, p in lm.named_parameters() if p is embeddings and p is head.weight]
    name_of_head = next(name for name, module in lm.named_modules() if module is head)
    for name, tensor in model_weights(lm, zero_stage):
        yield name, tensor
        if name in shared:
            yield f"{name_of_head}.weight", tensor  # usually lm_head.weight


class Weight(NamedTuple):
    """A weight as checkpoints and vLLM know it, and the parameters that it is made of."""

    name: str
    parameters: list  # [the weight]; of an adapted layer [W, A, B]
    layer: object  # the adapted layer, or None


def model_weights(lm, zero_stage: int):
    """(name, tensor) of every weight, once, whole on every rank, for a checkpoint. Adapters are
    merged, so names and values are those of a plain model. ZeRO-3 parameters are gathered
    GATHERED_BYTES at a time, by all ranks together."""
    weights = []
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:  # is taken along with the weight that it adapts
            continue
        path, _, kind = name.rpartition(".base_layer.")  # peft's name for a layer it has wrapped
        layer = lm.get_submodule(path) if kind == "weight" and path else None
        parameters = [parameter]
        if layer is not None:
            parameters += [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        weights.append(Weight(name.replace(".base_layer.", "."), parameters, layer))

    for portion in portions(weights, attrgetter("parameters")):
        parameters = []
        for weight in portion:
            parameters += weight.parameters
        tensors = iter(whole(parameters, zero_stage))
        for weight in portion:
            parts = [next(tensors) for _ in weight.parameters]
            yield weight.name, parts[0] if weight.layer is None else merged(weight.layer, *parts)


def portions(weights, parameters_of) -> list[list]:
    """The weights in order, in lists whose parameters take at most GATHERED_BYTES, or of a single
    larger weight. parameters_of(weight): those that it is made of."""
    lists = []
    size = 0  # bytes in the last list
    for weight in weights:
        added = sum(numel_of(p) * p.element_size() for p in parameters_of(weight))
        if not lists or size + added > GATHERED_BYTES:
            lists.append([])
            size = 0
        lists[-1].append(weight)
        size += added
    return lists


def whole(parameters: list, zero_stage: int) -> list:
    """The whole tensors of parameters; under ZeRO-3 all ranks gather them together."""
    if zero_stage < 3:
        return [p.detach() for p in parameters]
    with deepspeed.zero.GatheredParameters(parameters):
        # copies, because the gathered tensors are freed when the context ends
        return [p.detach().clone() for p in parameters]


@torch.no_grad()
def flip_signs(lm, zero_stage: int) -> None:
    """Flips the sign of every 53rd number of each parameter, in place, which makes it a different
    model. A second call restores the old one to the bit, without a copy of it. All ranks
    together."""
    for parameters in portions(lm.parameters(), lambda p: [p]):
        gathered = nullcontext()
        if zero_stage == 3:  # all ranks change them alike; DeepSpeed keeps the changes of one
            gathered = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
        with gathered:
            for p in parameters:
                p.detach().view(-1)[::FLIP_EVERY].neg_()
    # vLLM may have put this thread on a stream of its own, and DeepSpeed gathers the weights of the
    # next forward on another, which does not wait for it
    wait_for_gpu()


# --- adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): each linear layer's frozen weight W becomes
# W + 2 B A, with A (rank, in) and B (out, rank)


def add_adapters(lm, rank: int, base: str) -> str:
    """Gives every linear layer except the vocabulary head an adapter; from then on only adapters
    are trained. B starts at 0, so the model's outputs do not change yet. base: where the model
    comes from, for peft's files. Returns a sentence to print. UserError if peft is missing or can't
    adapt this model."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f"lora_rank={rank} needs peft, which can't be imported ({error}): make env installs it"
        ) from None
    adapter = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,  # scales B A by alpha / rank = 2, at any rank
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
    for name, _ in lm.named_parameters():
        if ".base_layer." in name and name.split(".base_layer.")[1] not in ("weight", "bias"):
            raise UserError(
                f"lora_rank={rank}: peft adapts parameters of model {lm.config.model_type!r} that "
                f"are no linear layer's (such as {name}), which can't be merged here: lora_rank=0"
            )
    parameters = count_parameters(lm)
    return (
        f"adapters of rank {rank} on {len(adapted_layers(lm))} linear layers: "
        f"{parameters.trained / 1e6:.2f}M of {parameters.all / 1e6:.2f}M parameters are trained"
    )


def adapted_layers(lm) -> list:
    return [module for module in lm.modules() if hasattr(module, "lora_A")]


@torch.no_grad()
def merged(layer, weight, a, b):
    """W + 2 B A of an adapted layer, in the type of W, rounded only once, see rounded()."""
    weight = weight.to(b.device)  # it may be in CPU memory, see train.sync_weights
    change = layer.scaling["default"] * (b.float() @ a.float())  # (out, in)
    if layer.fan_in_fan_out:  # GPT-2 keeps its weights as (in, out)
        change = change.T
    return rounded(weight.float() + change, weight.dtype)


def rounded(values, dtype):
    """float32 values in another type; in bfloat16 by stochastic rounding: up or down at random,
    with odds that make the mean right. Rounding to the nearest would give W itself until a change
    exceeds half the gap between two numbers: for tens of steps the sampler would see almost none of
    it."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    # always the same random numbers, so that all ranks and a resumed run round alike
    generator = torch.Generator(values.device).manual_seed(0)
    noise = torch.randint(
        2**16, values.shape, generator=generator, dtype=torch.int32, device=values.device
    )
    # bfloat16 is the upper 16 bits of a float32: noise below them carries over with the right odds
    bits = values.contiguous().view(torch.int32) + noise
    moved = (bits & -(2**16)).view(torch.float32)
    # the bits of a NaN could overflow into those of a number
    return torch.where(values.isfinite(), moved, values).to(dtype)


def save_adapter(folder, lm, zero_stage: int, rank: int) -> None:
    """Writes the adapters as peft's own files, for PeftModel.from_pretrained(base model, folder).
    All ranks gather the weights together, rank 0 writes. Without adapters it writes nothing."""
    weights = {}
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            (tensor,) = whole([parameter], zero_stage)
            # peft's names: under its two wrapper modules, without the adapter's own name
            weights["base_model.model." + name.replace(".default.", ".")] = tensor.cpu()
    if weights and rank == 0:
        folder.mkdir()
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        lm.peft_config["default"].save_pretrained(folder)


def move_frozen(lm, device) -> None:
    """Moves the weights that are not trained to a device. With adapters that is nearly all of
    them."""
    for parameter in lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(device)


class WithoutAdapters:
    """The reference for a policy that trains adapters: the same model with its adapters off."""

    def __init__(self, engine):
        self.engine = engine
        self.module = engine.module  # where set_temperature finds the policy

    def __call__(self, *args, **kwargs):
        layers = adapted_layers(self.module.lm)
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return self.engine(*args, **kwargs)
        finally:
            for layer in layers:
                layer.enable_adapters(True)
