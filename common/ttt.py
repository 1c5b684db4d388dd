"""The drafter's hidden states at every depth of training-time test; no tensor is [T, T].

Depth k of row t stands for the draft position t+k. Its input token is x[t+1+k], its h is the depth k-1 output
of the same row, its rotary position is t+k. It attends to the depth-0 rows 0..t of its document and to its
own row at depths 1..k. It predicts x[t+k+2], and its teacher is the target's distribution at row t+k+1. So
depth k equals step-by-step drafting when the drafted tokens are the data's tokens.

A batch is a dict of packed documents, without padding: input_ids int64 [N], loss_mask bool [N],
aux_hidden_states [N, 3H], last_hidden_state [N, H], target_argmax int64 [N], bounds (a list: document i is
rows bounds[i]..bounds[i+1]).
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from common.shards import widen

BLOCK = 128  # rows and columns of FlexAttention's blocks


def fuses(device):
    """Whether `device` has few big kernels (FlexAttention) or, as a CPU, many that stay in its cache."""
    return torch.device(device).type != "cpu"


def on_cuda(device):
    return torch.device(device).type == "cuda"


def ship(tensor, device):
    """A CPU tensor on `device`; to CUDA from pinned memory, so that nobody waits for the copy."""
    if on_cuda(device) and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def make_batch(samples, device="cpu", prepare=None, spread=map):
    """Pack samples (dicts as Shards.sample returns them, raw or not) into one batch on `device`.

    prepare: what makes batch["prepared"] of the batch while it is on the CPU (TrainStep.prepare), default
    none. spread: a `map` that the copies are made with, perhaps by threads: raw samples are read then.
    """
    bounds = [0]
    for sample in samples:
        bounds.append(bounds[-1] + len(sample["input_ids"]))
    batch, copies = {}, []
    for name, part in samples[0].items():
        batch[name] = torch.empty(bounds[-1], *part.shape[1:], dtype=part.dtype, pin_memory=on_cuda(device))
        copies += zip(batch[name].split(np.diff(bounds).tolist()), (sample[name] for sample in samples),
                      strict=True)
    for _ in spread(lambda copy: copy[0].copy_(copy[1]), copies):
        pass  # what a thread raises is raised here
    batch["input_ids"] = batch["input_ids"].long()
    batch["target_argmax"] = batch["target_argmax"].long()
    batch["loss_mask"] = batch["loss_mask"].bool()
    batch["bounds"] = bounds
    prepared = {"prepared": prepare(batch)} if prepare else {}
    batch = {name: ship(value, device) if torch.is_tensor(value) else value for name, value in batch.items()}
    widen(batch)
    return batch | prepared


def supervised_rows(loss_mask, bounds, depths):
    """Which rows are needed, and at which depth their label is supervised.

    loss_mask: bool [N] on the CPU. Returns there (rows int64 [R] ascending, supervised bool [depths, R]):
    supervised[k, i] says that the label x[t+k+2] of row t = rows[i] exists in the same document and is
    supervised.
    """
    ends = torch.tensor(bounds)
    end = torch.repeat_interleave(ends[1:], ends.diff())  # [N] where each row's document ends
    label = torch.arange(len(loss_mask)) + torch.arange(2, depths + 2)[:, None]  # [depths, N]
    supervised = (label < end) & loss_mask[label.clamp(max=len(loss_mask) - 1)]
    rows = supervised.any(0).nonzero()[:, 0]
    return rows, supervised[:, rows]


def teacher_rows(rows, depths, count):
    """int64 [depths, R]: the row where the target chooses what is drafted, t+k+1 for depth k of row t =
    rows[i].

    Behind the last of `count` rows, where nothing is supervised, that is the last.
    """
    return (rows + torch.arange(1, depths + 1)[:, None]).clamp(max=count - 1)


@dataclass
class Layout:
    """The rows of a batch that are computed, and what they see: made on the CPU, once a batch."""

    depths: int
    rows: torch.Tensor  # int64 [R] ascending, on the device
    position: torch.Tensor  # int64 [N] of a row within its document, on the device
    places: list  # on a CPU: as query_places returns them
    masks: list  # elsewhere: a BlockMask for each depth


def lay_out(rows, bounds, depths, device):
    """The Layout on `device` of `rows` (int64 [R] ascending, on the CPU) in documents with `bounds`."""
    starts = torch.tensor(bounds)
    position = torch.arange(bounds[-1]) - torch.repeat_interleave(starts[:-1], starts.diff())
    places, masks = [], []
    if fuses(device):
        masks = block_masks(rows, bounds, depths, device)
    else:
        places = query_places(rows.tolist(), bounds)
    return Layout(depths, ship(rows, device), ship(position, device), places, masks)


def block_masks(rows, bounds, depths, device):
    """For each depth, the BlockMask of R queries over the columns that `join` makes: the depth-0 rows, then
    for each later depth the queries' own keys, each part filled up to whole blocks.

    Of own keys a block of queries sees one block a depth; of depth 0 it sees those up to its last row, from
    where its first row's document begins, wholly where this holds for all its rows.
    """
    starts = torch.tensor(bounds)
    first = starts[torch.bucketize(rows, starts[1:], right=True)]  # [R] where each row's document begins
    tops = torch.arange(0, len(rows), BLOCK)  # [blocks of queries]
    ends = (tops + BLOCK - 1).clamp(max=len(rows) - 1)
    begins = torch.arange(0, bounds[-1], BLOCK)  # [blocks of columns]
    some = (begins + BLOCK > first[tops][:, None]) & (begins <= rows[ends][:, None])
    whole = (begins >= first[ends][:, None]) & (begins + BLOCK <= rows[tops][:, None] + 1)
    own = torch.eye(len(tops), dtype=torch.bool)
    # Of a column, the row of depth 0, or -1 - the query that it belongs to.
    columns = torch.cat([torch.arange(len(begins) * BLOCK),
                         (-1 - torch.arange(len(tops) * BLOCK)).repeat(depths - 1)])
    first, last, columns = (ship(part.int(), device) for part in (first, rows, columns))

    def sees(_, head, query, column):
        column = columns[column]
        return ((column >= first[query]) & (column <= last[query])) | (column == -1 - query)

    masks = []
    for depth in range(depths):
        partly = torch.cat([some & ~whole, *[own] * depth], 1)
        wholly = F.pad(whole, (0, depth * len(tops)))
        blocks = {}
        for name, table in (("kv", partly), ("full_kv", wholly), ("q", partly.T), ("full_q", wholly.T)):
            order = torch.argsort(table.int(), descending=True, stable=True)
            blocks[f"{name}_num_blocks"] = ship(table.sum(1, dtype=torch.int32)[None, None], device)
            blocks[f"{name}_indices"] = ship(order.int()[None, None], device)
        masks.append(BlockMask((len(rows), partly.shape[1] * BLOCK), BLOCK_SIZE=(BLOCK, BLOCK),
                               mask_mod=sees, **blocks))
    return masks


@dataclass
class Weights:
    """The drafter's matrices in the dtype of the computation, joined where they read the same."""

    fc: torch.Tensor  # [H, 3H]
    for_token: torch.Tensor  # [(heads + 2 kv) d, H] to q, k and v
    for_hidden: torch.Tensor  # [(heads + 2 kv) d, H] to q, k and v
    output: torch.Tensor  # [H, heads * d]
    gate_up: torch.Tensor  # [2I, H]
    down: torch.Tensor  # [H, I]


def cast_weights(drafter, dtype):
    attention, mlp = drafter.midlayer["self_attn"], drafter.midlayer["mlp"]
    qkv = torch.cat([attention[name].weight.to(dtype) for name in ("q_proj", "k_proj", "v_proj")])
    for_token, for_hidden = qkv.chunk(2, 1)
    gate_up = torch.cat([mlp[name].weight.to(dtype) for name in ("gate_proj", "up_proj")])
    fc, output, down = (part.weight.to(dtype) for part in (drafter.fc, attention["o_proj"], mlp["down_proj"]))
    return Weights(fc, for_token, for_hidden, output, gate_up, down)


def ttt_hidden(drafter, embedding, batch, layout):
    """The drafter's outputs before norm for the rows of a Layout of a batch: a list of [R, H], one a depth.

    embedding: the target's raw table [V, H]. Depth 0 makes keys and values for every row of the batch;
    everything else is computed for the layout's rows only. The result is in autocast's dtype where that is
    on, else in that of the weights.
    """
    ids, rows = batch["input_ids"], layout.rows
    count, device = len(ids), ids.device
    dtype = drafter.norm.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    with torch.autocast(device.type, enabled=False):
        weights = cast_weights(drafter, dtype)
        # What a token adds to q, k and v is the same at every depth that it is the input of.
        embedded = rms_norm(embedding[ids].to(dtype), drafter.midlayer["input_layernorm"])
        tokens = F.linear(embedded, weights.for_token)  # [N, (heads + 2 kv) d]

        def inputs(rows):  # no supervised row sees what the last row gets for a next token
            return tokens.index_select(0, rows.clamp(max=count - 1))

        states = F.linear(batch["aux_hidden_states"].to(dtype), weights.fc)  # [N, H]
        following = torch.arange(1, count + 1, device=device)
        queries, keys, values = project(drafter, weights, inputs(following), states, layout.position)
        queries, hidden, position = (x.index_select(0, rows) for x in (queries, states, layout.position))
        latest, seen, outputs = (keys, values), (), []
        for depth in range(layout.depths):
            if depth:
                queries, *latest = project(drafter, weights, inputs(rows + 1 + depth), hidden,
                                           position + depth)
            if layout.masks:
                seen = join(seen, latest)
                attended = fused_attention(queries, *seen, layout.masks[depth])
            else:
                seen = (*seen, *latest)
                attended = Attention.apply(queries, layout.places, *seen)
            hidden = torch.addmm(hidden, attended.flatten(1), weights.output.T)
            if drafter.recompute:
                hidden = checkpoint(feed_forward, drafter, weights, hidden, use_reentrant=False)
            else:
                hidden = feed_forward(drafter, weights, hidden)
            outputs.append(hidden)
        return outputs


def normed(outputs, norm):
    """norm of outputs as ttt_hidden returns them, [depths, R, H]; on a device depth after depth, as float32
    copies of all at once would be the largest tensors of a step."""
    if fuses(outputs[0].device):
        return torch.stack([rms_norm(output, norm) for output in outputs])
    return rms_norm(torch.stack(outputs), norm)


def project(drafter, weights, tokens, hidden, positions):
    """q, k, v [R, heads, d] of rows with states [R, H]; on a CPU keys and values are repeated for their
    heads, elsewhere they are [R, kv, d].

    tokens: [R, (heads + 2 kv) d], what the rows' input tokens add.
    """
    heads, kv_heads = drafter.heads, drafter.kv_heads
    x = torch.addmm(tokens, rms_norm(hidden, drafter.midlayer["hidden_norm"]), weights.for_hidden.T)
    rotated, v = x.unflatten(1, (-1, drafter.head_dim)).split([heads + kv_heads, kv_heads], 1)
    q, k = drafter.rotate(rotated, positions).split([heads, kv_heads], 1)
    if kv_heads < heads and not fuses(hidden.device):
        k, v = (states.repeat_interleave(heads // kv_heads, 1) for states in (k, v))
    return q, k, v


def feed_forward(drafter, weights, hidden):
    """hidden [R, H] with the MLP's output added."""
    x = rms_norm(hidden, drafter.midlayer["post_attention_layernorm"])
    gate, up = F.linear(x, weights.gate_up).chunk(2, 1)
    return torch.addmm(hidden, F.silu(gate) * up, weights.down.T)


def query_places(rows, bounds):
    """Where queries lie, for Attention: (first, row, a, b) says that queries a..b are consecutive rows.

    They are those from `row` on, in the document that begins at `first`. rows: a list, ascending.
    """
    places = []
    for a, b in stretches(rows, bounds):
        first = bounds[bisect_right(bounds, rows[a]) - 1]
        places.append((first, rows[a], a, b))
    return places


def stretches(numbers, borders=()):
    """Where numbers are consecutive, and cross none of the borders: a list of (a, b) for numbers[a:b]."""
    borders, cuts = set(borders), []
    for i, number in enumerate(numbers):
        if i == 0 or number != numbers[i - 1] + 1 or number in borders:
            cuts.append(i)
    return list(pairwise([*cuts, len(numbers)]))


class Attention(torch.autograd.Function):
    """Softmax attention of a row to depth 0 of its document up to itself, and to its own row at earlier
    depths.

    The keys fall into blocks: the depth-0 rows before a stretch of queries, those of the stretch (causal),
    and the row's own keys, one a depth. Blocks are merged by their log-sum-exps. A block's gradient is that
    of attention to the block alone with the merged output and log-sum-exp in place of its own (as in ring
    attention, arXiv 2310.01889), so that the CPU's flash kernel serves in both directions.
    """

    @staticmethod
    def forward(ctx, queries, places, keys, values, *own):
        """queries [R, heads, d]; places: as query_places returns them; keys, values [N, heads, d] of depth 0;
        own: k, v, k, v, ... [R, heads, d] of depths 1, 2, .... Returns [R, heads, d].
        """
        scale = queries.shape[-1] ** -0.5
        out = torch.empty_like(queries)
        total = queries.new_empty(queries.shape[:2], dtype=_wide(queries.dtype))  # [R, heads]
        for first, row, a, b in places:
            parts = [_block(queries[a:b], keys[row : row + b - a], values[row : row + b - a], True)]
            if row > first:
                parts.append(_block(queries[a:b], keys[first:row], values[first:row], False))
            out[a:b], total[a:b] = _merge(parts)
        scores = [(queries * k).sum(-1, dtype=total.dtype) * scale for k in own[::2]]  # [R, heads] each
        if own:
            out, total = _merge([(out, total), *zip(own[1::2], scores, strict=True)])
        ctx.save_for_backward(queries, keys, values, out, total, *own, *scores)
        ctx.places, ctx.depths = places, len(scores)
        return out

    @staticmethod
    def backward(ctx, grad):
        queries, keys, values, out, total, *rest = ctx.saved_tensors
        own, scores = rest[: 2 * ctx.depths], rest[2 * ctx.depths :]
        scale = queries.shape[-1] ** -0.5
        grad = grad.contiguous()
        grad_queries = torch.empty_like(queries)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        for first, row, a, b in ctx.places:
            end = row + b - a
            here = grad[a:b], queries[a:b], out[a:b], total[a:b]
            grad_queries[a:b], k, v = _block_backward(*here, keys[row:end], values[row:end], True)
            grad_keys[row:end] += k
            grad_values[row:end] += v
            if row > first:
                q, k, v = _block_backward(*here, keys[first:row], values[first:row], False)
                grad_queries[a:b] += q
                grad_keys[first:row] += k
                grad_values[first:row] += v
        drift = (grad * out).sum(-1, dtype=total.dtype)  # [R, heads]
        grad_own = []
        for k, v, score in zip(own[::2], own[1::2], scores, strict=True):
            weight = (score - total).exp()
            by_weight = (grad * v).sum(-1, dtype=total.dtype)
            by_score = (weight * (by_weight - drift) * scale).to(queries.dtype)[..., None]
            grad_queries += by_score * k
            grad_own += [by_score * queries, weight.to(queries.dtype)[..., None] * grad]
        return grad_queries, None, grad_keys, grad_values, *grad_own


def _wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _merge(parts):
    """Blocks of (output [R, heads, d], log-sum-exp [R, heads]) as one."""
    if len(parts) == 1:
        return parts[0]
    totals = torch.stack([total for _, total in parts])
    merged = totals.logsumexp(0)
    weights = (totals - merged).exp().to(parts[0][0].dtype)[..., None]
    return sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True)), merged


def _block(q, k, v, causal):
    """(output [n, heads, d], log-sum-exp [n, heads]) of queries [n, heads, d] and one block [t, heads, d]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out[0].transpose(0, 1), total[0].T


def _block_backward(grad, q, out, total, k, v, causal):
    """Gradients by q, k, v of one block, with the merged output and log-sum-exp of all blocks."""
    grad, q, out, k, v = (x.transpose(0, 1)[None] for x in (grad, q, out, k, v))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [x[0].transpose(0, 1) for x in backward(grad, q, k, v, out, total.T[None], 0.0, causal)]


@cache
def _flex():
    return torch.compile(flex_attention, dynamic=True)


def join(seen, latest):
    """(keys, values) that fused_attention reads: those of `seen`, () at depth 0, with `latest`, each
    [n, kv, d], behind them, which are filled up to whole blocks."""
    latest = [F.pad(part, (0, 0, 0, 0, 0, -len(part) % BLOCK)) for part in latest]
    return [torch.cat(both) for both in zip(seen, latest, strict=True)] if seen else latest


def fused_attention(queries, keys, values, mask):
    """What Attention computes, as one kernel, whose scores stay in float32 up to the softmax.

    queries [R, heads, d]; keys, values [columns, kv, d] as `join` makes them; mask: the depth's of
    block_masks. Returns [R, heads, d].
    """
    grouped = queries.shape[1] != keys.shape[1]
    q, k, v = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    return _flex()(q, k, v, block_mask=mask, enable_gqa=grouped)[0].transpose(0, 1)


def rms_norm(x, norm):
    """norm (an RMSNorm) of x [N, H], computed in float32 and rounded once.

    On a CPU several times as fast as autograd through torch's own.
    """
    return _RmsNorm.apply(x, norm.weight, norm.eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(_wide(x.dtype))
        inverse = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()  # [N, 1]
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, inverse = ctx.saved_tensors
        grad = grad.to(inverse.dtype)
        normed = x.to(inverse.dtype) * inverse
        grad_weight = (grad * normed).sum(0).to(weight.dtype)
        grad = grad * weight
        grad_x = normed.mul_((grad * normed).mean(-1, keepdim=True)).neg_().add_(grad).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None
