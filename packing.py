"""Packing: the rows of a micro-batch as one long row, without padding. What a row shares with the
row before it appears only once: their prompt, or a long beginning of their prompts.

    prepare(lm)                                                         # once
    packed, places = pack(ids, prompt_lengths, lengths, uses_varlen(lm))    # on the host
    hidden = hidden_states(lm, to_device(packed, device))               # (M, H), for M tokens

All layers except attention treat each token by itself, so the M tokens may form one long row.
Attention works on segments of it. The segment of a row is what the row does not share with the row
before it; it sees the keys of the shared tokens before its own. So G completions of one prompt save
the forward and backward of G - 1 prompts, and P prompts that begin with the same long examples save
those of P - 1 copies of the examples.

On a GPU in 16 bits, one varlen_attn per layer takes all segments (Varlen). Elsewhere, segments of
about the same length are padded to a block (Block). Either plan is made on the host and sent to
the device once, so that no layer and no block makes the host wait for the device.

n rows, each with a segment; W tokens of the longest row; M tokens in all. A place is an index into
the M tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from common import UserError

# cuDNN makes a plan for every new shape, 23-37 ms each, and here every micro-batch has new shapes
torch.backends.cuda.enable_cudnn_sdp(False)

NAME = "packed"  # how transformers knows this attention

# Arguments that models pass to attention and that change nothing here. Any other argument asks for
# more than causal order.
HARMLESS = {
    "is_causal",
    "use_cache",
    "position_ids",
    "output_attentions",
    "output_hidden_states",
    "cache_position",
}


class Block(NamedTuple):
    """b segments with at most Q tokens each, which see at most K tokens; m tokens in all. `queries`
    and `real` are None if there is no padding. `keys` and `before` are None if no shared tokens
    come before the segments; attention is then plain causal."""

    tokens: slice  # the places of these m tokens
    count: int  # b
    queries: Tensor | None  # (b, Q) indices into the slice, padded
    real: Tensor | None  # (m,) which of the b * Q are not padding
    keys: Tensor | None  # (b, K) places of the shared tokens, then of the segment's own, padded
    before: Tensor | None  # (b or 1,) number of shared tokens
    seen: Tensor | None = None  # (b or 1, 1, Q, K) bool: seen_keys(), set on the device


class Varlen(NamedTuple):
    """All n segments for one varlen_attn. Queries are the M tokens in order; the keys of the
    segments follow one another."""

    keys: Tensor | None  # places of each segment's keys, shared ones first; None: as the queries
    cu_seq_q: Tensor  # (n + 1,) int32: cumulative numbers of queries, as varlen_attn wants them
    cu_seq_k: Tensor  # (n + 1,) int32: the same for keys
    max_q: int  # most queries of a segment
    max_k: int  # most keys of a segment


class Packed(NamedTuple):
    """The M tokens as one long row, and how attention works on its segments."""

    ids: Tensor  # (1, M)
    positions: Tensor  # (1, M) of each token in its own row
    longest: int  # tokens of the longest row
    blocks: list[Block]
    varlen: Varlen | None  # used instead of blocks


def uses_varlen(lm) -> bool:
    """Whether this model can use varlen_attn, which needs 16 bits, a GPU from Ampere on, and heads
    that FlashAttention takes: as wide for values as for keys, a multiple of 8, at most 256."""
    if lm.device.type != "cuda" or lm.dtype not in (torch.bfloat16, torch.float16):
        return False
    width = head_width(lm.config)
    if width % 8 or width > 256 or getattr(lm.config, "v_head_dim", None):
        return False
    return torch.cuda.get_device_capability(lm.device) >= (8, 0)


def head_width(config) -> int:
    """Numbers in a key of one attention head."""
    given = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


# --- between host and device


def on_host(*tensors: Tensor) -> list[Tensor]:
    """These integer tensors in CPU memory, with a single wait for the device."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    flat = torch.cat([x.flatten() for x in tensors]).cpu()
    pieces = flat.split([x.numel() for x in tensors])
    return [piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]


def map_tensors(change, plan):
    """The plan (nested tuples and lists of tensors) with every tensor x replaced by change(x)."""
    if isinstance(plan, Tensor):
        return change(plan)
    if not isinstance(plan, (list, tuple)):
        return plan
    parts = [map_tensors(change, part) for part in plan]
    # a NamedTuple takes its fields as separate arguments
    return type(plan)(*parts) if hasattr(plan, "_fields") else type(plan)(parts)


def to_device(plan, device: torch.device):
    """A plan of integers on the host, moved to the device in one copy without waiting for it."""
    if device.type == "cpu":
        return plan
    tensors = []
    map_tensors(tensors.append, plan)  # only collects them: the plan that it returns is dropped
    flat = torch.cat([x.flatten().long() for x in tensors])
    if device.type == "cuda":
        flat = flat.pin_memory()  # without this the host waits for the copy
    flat = flat.to(device, non_blocking=True)
    pieces = iter(flat.split([x.numel() for x in tensors]))
    return map_tensors(lambda x: next(pieces).view(x.shape).to(x.dtype), plan)


# --- the plan, on the host


def shared_tokens(ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> Tensor:
    """(n,) how many of its first tokens each row takes from the row before it: the whole prompt if
    both have the same, or the common beginning of two different prompts if it is at least half of
    the row. A shorter one would not pay, because a segment with tokens before it needs a mask and
    copies of their keys. ids (n, W), prompt_lengths, lengths (n,)."""
    shorter = torch.minimum(prompt_lengths[1:], prompt_lengths[:-1])  # (n - 1,)
    longest = int(prompt_lengths.max())
    steps = torch.arange(longest, device=ids.device)
    same = (ids[1:, :longest] == ids[:-1, :longest]) & (steps < shorter[:, None])
    common = same.cumprod(1).sum(1)  # (n - 1,)
    one_prompt = (prompt_lengths[1:] == prompt_lengths[:-1]) & (common == shorter)
    pays = one_prompt | (2 * common >= (prompt_lengths + lengths)[1:])
    return torch.cat([common.new_zeros(1), common * pays])  # no row comes before the first


def kind_of(before: Tensor, size: Tensor) -> Tensor:
    """(n,) a number for each segment's kind. Segments of one kind are padded to one block: the
    longest is less than twice as long as the shortest, and either all of them have shared tokens
    before them or none does. before, size (n,): a segment's shared tokens, and its own."""
    # + 64: log2 of a size is below 64, so kinds with and without shared tokens stay apart
    return size.log2().ceil().long() + 64 * (before > 0)


def ragged_indices(counts: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs (i, t) with 0 <= t < counts[i], in order, as two tensors."""
    return (torch.arange(int(counts.max())) < counts[:, None]).nonzero(as_tuple=True)


def pack(ids: Tensor, prompt_lengths: Tensor, lengths: Tensor, varlen: bool = False) -> tuple:
    """(Packed, places (n, W)): the plan for these rows, and the place of each of their tokens (in
    the padding that of the row's last token); all tensors on the host. ids (n, W): prompt and
    completion, right-padded; prompt_lengths, lengths (n,). varlen: plan for varlen_attn instead of
    blocks.

    The rows "p p a", "p p b b" and "q c" become the M = 7 tokens "q c p p a b b" at the positions
    0 1 0 1 2 2 3, because segments of one kind are neighbours. places: 2 3 4 4, 2 3 5 6, 0 1 1 1.
    """
    total = prompt_lengths + lengths  # (n,)
    shared = shared_tokens(ids, prompt_lengths, lengths)  # (n,)
    # segments are sorted by kind: row, before, size and start have that order, places that of rows
    row = kind_of(shared, total - shared).argsort(stable=True)  # (n,) each segment's row
    before = shared[row]
    size = total[row] - before
    start = size.cumsum(0) - size  # (n,) place of each segment's first token
    places = places_of(total, shared, start[row.argsort()])  # argsort: back to the order of rows
    segment, t = ragged_indices(size)  # (M,) each token's segment, and its index in it
    at = before[segment] + t  # (M,) its index in its row
    segments = Segments(places[row], before, size)
    packed = Packed(
        ids=ids[row[segment], at][None],
        positions=at[None],
        longest=int(total.max()),
        blocks=[] if varlen else blocks_of(segments),
        varlen=varlen_of(segments) if varlen else None,
    )
    return packed, places


def places_of(total: Tensor, shared: Tensor, start: Tensor) -> Tensor:
    """(n, W): the place of each token of each row. (n,) each: total, a row's tokens; shared, how
    many of them it takes from the row before; start, the place of the first that is its own."""
    rows = torch.arange(len(total))[:, None]  # (n, 1)
    t = torch.arange(int(total.max()))  # (W,)
    # owner: the row whose segment holds the token. That is the row itself or, if it shares the
    # token, the last row before it that does not share it
    owner = ((t >= shared[:, None]) * rows).cummax(0).values  # (n, W)
    t = torch.minimum(t, total[:, None] - 1)  # (n, W) padding gets the place of the last token
    return start[owner] + t - shared[owner]


class Segments(NamedTuple):
    """The n segments in their order, or some neighbours of them."""

    places: Tensor  # (n, W) of all tokens of the segment's row
    before: Tensor  # (n,) how many of these tokens are shared
    size: Tensor  # (n,) how many are the segment's own


def varlen_of(segments: Segments) -> Varlen:
    width = segments.before + segments.size  # (n,) number of keys

    def ends(counts: Tensor) -> Tensor:
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()

    shares = bool(segments.before.any())  # if not, keys have the same places as queries
    return Varlen(
        keys=segments.places[ragged_indices(width)] if shares else None,
        cu_seq_q=ends(segments.size),
        cu_seq_k=ends(width),
        max_q=int(segments.size.max()),
        max_k=int(width.max()),
    )


def blocks_of(segments: Segments) -> list[Block]:
    """A block for each kind of segment."""
    kinds = kind_of(segments.before, segments.size)  # (n,) in order, because pack() sorts by them
    counts = kinds.unique_consecutive(return_counts=True)[1].tolist()
    pieces = zip(*[tensor.split(counts) for tensor in segments], strict=True)
    return [block(Segments(*piece)) for piece in pieces]


def block(part: Segments) -> Block:
    """The block of these segments, neighbours of one kind."""
    places, before, size = part
    last = places.shape[1] - 1
    longest = int(size.max())  # Q
    m = int(size.sum())  # tokens of the block without padding
    steps = torch.arange(longest)
    own = places.gather(1, (before[:, None] + steps).clamp(max=last))  # (b, Q)
    real = steps < size[:, None]  # (b, Q)
    start = int(own[0, 0])
    keys = None
    if before.any():
        j = torch.arange(int(before.max()) + longest)  # (K,) index among a segment's keys
        keys = places[:, j.clamp(max=last)]  # (b, K)
        if (before == before[0]).all():  # then one mask is enough for all segments
            before = before[:1]
    unpadded = m == real.numel()  # all segments have the same length
    return Block(
        tokens=slice(start, start + m),
        count=len(size),
        queries=None if unpadded else own - start,
        real=None if unpadded else real.flatten().nonzero()[:, 0],
        keys=keys,
        before=None if keys is None else before,
    )


# --- attention, on the device


def with_masks(packed: Packed) -> Packed:
    """The same with `seen` set in all blocks: computed once here, not in every layer."""
    return packed._replace(blocks=[b._replace(seen=seen_keys(b)) for b in packed.blocks])


def seen_keys(b: Block) -> Tensor | None:
    """(b or 1, 1, Q, K) bool: which keys the queries of a block see; None: plain causal order."""
    if b.keys is None:
        return None
    longest = (b.tokens.stop - b.tokens.start) // b.count  # Q
    if b.queries is not None:
        longest = b.queries.shape[1]
    steps = torch.arange(longest, device=b.keys.device)
    j = torch.arange(b.keys.shape[1], device=b.keys.device)
    return j <= b.before[:, None, None, None] + steps[:, None]


def attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    packed: Packed | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """An attention function for transformers' AttentionInterface: query (1, heads, M, d), key and
    value (1, kv heads, M, d), result (1, M, heads, d). UserError if the model's attention asks for
    more than causal order."""
    if packed is None:
        raise ValueError(
            f"the attention of this model is set to {NAME!r}: call it through policy.Policy, or "
            f"lm.set_attn_implementation('sdpa') first"
        )
    scaling = kwargs.pop("scaling", None)
    wants = beyond_causal(attention_mask, packed.longest, kwargs)
    if wants:
        raise UserError(
            f"{type(module).__name__} uses {', '.join(wants)} in its attention, which packing does "
            f"not support: set pack_sequences=False"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (M, heads, d)
    if packed.varlen is not None:
        return attend_at_once(q, k, v, packed.varlen, scaling)[None], None
    parts = [attend_block(q, k, v, b, scaling) for b in packed.blocks]
    return torch.cat(parts)[None], None


def beyond_causal(attention_mask, longest: int, kwargs: dict) -> list[str]:
    """What a model's attention asks for that packing does not do, in words. longest: tokens of the
    longest row; a sliding window at least as long does no harm."""
    kwargs = dict(kwargs)
    dropout = kwargs.pop("dropout", 0.0)
    window = kwargs.pop("sliding_window", None)
    wants = []
    for name, value in kwargs.items():
        if value is not None and name not in HARMLESS:
            wants.append(name)
    if attention_mask is not None:
        wants.append("a mask")
    if dropout > 0:
        wants.append("dropout")
    if window is not None and window < longest:
        wants.append("a sliding window")
    return wants


def attend_at_once(q: Tensor, k: Tensor, v: Tensor, plan: Varlen, scaling) -> Tensor:
    """Attention of all segments, (M, heads, d). varlen_attn aligns its causal mask at the ends of
    queries and keys (bottom right), so a query sees all shared tokens, then its own segment up to
    itself. bench/gpu.py checks this on a GPU."""
    if plan.keys is not None:
        k = k.index_select(0, plan.keys)
        v = v.index_select(0, plan.keys)
    return varlen_attn(
        q,
        k,
        v,
        plan.cu_seq_q,
        plan.cu_seq_k,
        plan.max_q,
        plan.max_k,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=True,
    )


def attend_block(q: Tensor, k: Tensor, v: Tensor, b: Block, scaling) -> Tensor:
    """Attention of one block, (m, heads, d)."""
    queries = fold(q, b)  # (b, heads, Q, d)
    if b.keys is None:
        keys = fold(k, b)
        values = fold(v, b)
    else:
        keys = gather_entries(k, b.keys)  # (b, kv heads, K, d)
        values = gather_entries(v, b.keys)
    # grouped-query attention: so many query heads share a key head
    sharing = queries.shape[1] // keys.shape[1]
    if b.seen is not None and sharing > 1:  # no fast kernel takes a mask with fewer key heads
        keys = keys.repeat_interleave(sharing, 1)
        values = values.repeat_interleave(sharing, 1)
    out = scaled_dot_product_attention(
        queries,
        keys,
        values,
        b.seen,
        is_causal=b.seen is None,
        scale=scaling,
        enable_gqa=queries.shape[1] > keys.shape[1],
    )
    out = out.transpose(1, 2).flatten(0, 1)  # (b * Q, heads, d)
    return out if b.real is None else out.index_select(0, b.real)


def gather_entries(x: Tensor, places: Tensor) -> Tensor:
    """The entries of x (tokens, heads, d) at places (b, K), as (b, heads, K, d)."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def fold(x: Tensor, b: Block) -> Tensor:
    """The segments of a block, taken from all tokens x (M, heads, d), as (b, heads, Q, d)."""
    part = x[b.tokens]  # (m, heads, d)
    if b.queries is None:
        return part.unflatten(0, (b.count, -1)).transpose(1, 2)
    return gather_entries(part, b.queries)


AttentionInterface.register(NAME, attention)


def hidden_states(lm, packed: Packed) -> Tensor:
    """Final hidden states (M, H) of the packed tokens. `packed` must be on the model's device."""
    out = lm.base_model(
        input_ids=packed.ids,
        position_ids=packed.positions,
        packed=with_masks(packed),
        use_cache=False,
    )
    return out.last_hidden_state[0]


# --- which models can be packed


def check_window(config, longest: int) -> None:
    """UserError if rows of `longest` tokens exceed a window of the model's attention. Some models
    apply their window only in the mask, which packing does not use."""
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        # if it is no int, config.json is damaged
        if window is not None and (type(window) is not int or window < longest):
            raise UserError(
                f"model {config.model_type!r} has {name}={window!r} and rows may have {longest} "
                f"tokens, which packing does not support: set "
                f"pack_sequences=False, or shorten max_prompt_length + max_completion_length"
            )


def small_rows(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Four rows (ids, prompt lengths, lengths) to try a model on; the first two share a prompt."""
    ids = torch.arange(28).view(4, 7) * 5 % vocabulary
    ids[1, :3] = ids[0, :3]
    return ids, torch.tensor([3, 3, 3, 2]), torch.tensor([3, 3, 2, 4])


@torch.no_grad()
def prepare(lm) -> None:
    """Sets the model's attention to this one and tries it on a few tokens, because a model's files
    do not tell whether it can be packed. UserError if tokens affect one another outside attention
    too (convolutions, recurrent states), or if its attention is not plain causal."""
    usual = lm.config._attn_implementation
    if usual == NAME:
        return
    was_training = lm.training
    lm.eval()
    try:
        leak, gap = try_packing(lm)
        # The limits allow for rounding in the model's type. The gap's is larger, because packed and
        # padded rows are summed in different orders.
        exact = lm.dtype == torch.float32
        if leak > (2e-5 if exact else 0.02) or gap > (1e-3 if exact else 0.1):
            raise UserError(
                f"model {lm.config.model_type!r} can't have its sequences packed: a token's hidden "
                f"state depends on more than the tokens before it in its row; set "
                f"pack_sequences=False"
            )
    except UserError:
        lm.set_attn_implementation(usual)
        raise
    # for example, the model's layers do not pass `packed` on to attention
    except (TypeError, ValueError, AttributeError) as error:
        lm.set_attn_implementation(usual)
        raise UserError(
            f"model {lm.config.model_type!r} can't have its sequences packed ({error}): set "
            f"pack_sequences=False"
        ) from None
    finally:
        lm.train(was_training)


def try_packing(lm) -> tuple[float, float]:
    """(leak, gap), both relative to the largest hidden state. leak: how much a row's states change
    when another row's text changes; gap: how far they are from those of padded rows. Sets the
    attention."""
    ids, prompt_lengths, lengths = small_rows(lm.config.vocab_size)  # on the host
    changed_ids = ids.clone()
    changed_ids[2, :5] += 1  # changes a row in the middle
    changed_ids %= lm.config.vocab_size
    row, t = ragged_indices(lengths)  # (k,) each, of k completion tokens
    others = (row != 2).nonzero()[:, 0].to(lm.device)
    padded = lm.base_model(input_ids=ids.to(lm.device), use_cache=False).last_hidden_state
    wanted = padded[row.to(lm.device), (prompt_lengths[row] + t).to(lm.device)].float()  # (k, H)
    lm.set_attn_implementation(NAME)

    def packed_states(ids: Tensor) -> Tensor:
        packed, places = pack(ids, prompt_lengths, lengths, uses_varlen(lm))
        packed, own = to_device((packed, places[row, prompt_lengths[row] + t]), lm.device)
        return hidden_states(lm, packed)[own].float()

    states = packed_states(ids)  # (k, H)
    changed = packed_states(changed_ids)
    size = wanted.abs().max()
    # not always exactly 0: experts round differently when other tokens are beside them
    leak = (states - changed)[others].abs().max() / size
    gap = (states - wanted).abs().max() / size
    return leak.item(), gap.item()
