"""The drafter's hidden states at every depth of training-time test; no tensor is [T, T].

Depth k of row t stands for the draft position t+k. Its input token is x[t+1+k], its h is the depth k-1 output
of the same row, its rotary position is t+k. It attends to the depth-0 rows 0..t of its document and to its
own row at depths 1..k. It predicts x[t+k+2], and its teacher is the target's distribution at row t+k+1. So
depth k equals step-by-step drafting when the drafted tokens are the data's tokens.

A batch is a dict of packed documents, without padding: input_ids int64 [N], loss_mask bool [N],
aux_hidden_states [N, 3H], last_hidden_state [N, H], target_argmax int64 [N], bounds (a list: document i is
rows bounds[i]..bounds[i+1]).
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

PIECE = 512  # queries at a time where there is no flash kernel


def make_batch(samples, device="cpu"):
    """Pack samples (dicts as Shards.sample returns them) into one batch on `device`."""
    bounds = [0]
    for sample in samples:
        bounds.append(bounds[-1] + len(sample["input_ids"]))
    batch = {}
    for name in samples[0]:
        batch[name] = torch.cat([sample[name] for sample in samples]).to(device, non_blocking=True)
    batch["input_ids"] = batch["input_ids"].long()
    batch["target_argmax"] = batch["target_argmax"].long()
    batch["loss_mask"] = batch["loss_mask"].bool()
    batch["bounds"] = bounds
    return batch


def supervised_rows(loss_mask, bounds, depths):
    """Which rows are needed, and at which depth their label is supervised.

    loss_mask: bool [N]. Returns (rows int64 [R] ascending, supervised bool [depths, R]): supervised[k, i]
    says that the label x[t+k+2] of row t = rows[i] exists in the same document and is supervised.
    """
    device = loss_mask.device
    ends = torch.tensor(bounds, device=device)
    end = torch.repeat_interleave(ends[1:], ends.diff())  # [N] where each row's document ends
    shift = torch.arange(2, depths + 2, device=device)[:, None]
    label = torch.arange(len(loss_mask), device=device) + shift  # [depths, N]
    supervised = (label < end) & loss_mask[label.clamp(max=len(loss_mask) - 1)]
    rows = supervised.any(0).nonzero()[:, 0]
    return rows, supervised[:, rows]


def teacher_rows(rows, depths, count):
    """int64 [depths, R]: the row where the target chooses what is drafted, t+k+1 for depth k of row t =
    rows[i].

    Behind the last of `count` rows, where nothing is supervised, that is the last.
    """
    return (rows + torch.arange(1, depths + 1, device=rows.device)[:, None]).clamp(max=count - 1)


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


def ttt_hidden(drafter, embedding, batch, rows, depths):
    """The drafter's outputs before norm, [depths, R, H], for `rows` (int64 [R] ascending) of a batch.

    embedding: the target's raw table [V, H]. Depth 0 makes keys and values for every row of the batch;
    everything else is computed for `rows` only. The result is in autocast's dtype where that is on, else in
    that of the weights.
    """
    ids, bounds = batch["input_ids"], batch["bounds"]
    count, device = len(ids), ids.device
    dtype = drafter.norm.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    with torch.autocast(device.type, enabled=False):
        weights = cast_weights(drafter, dtype)
        starts = torch.tensor(bounds, device=device)
        every = torch.arange(count, device=device)
        position = every - torch.repeat_interleave(starts[:-1], starts.diff())  # [N] within its document
        # What a token adds to q, k and v is the same at every depth that it is the input of.
        embedded = rms_norm(embedding[ids].to(dtype), drafter.midlayer["input_layernorm"])
        tokens = F.linear(embedded, weights.for_token)  # [N, (heads + 2 kv) d]

        def inputs(rows):  # no supervised row sees what the last row gets for a next token
            return tokens.index_select(0, rows.clamp(max=count - 1))

        states = F.linear(batch["aux_hidden_states"].to(dtype), weights.fc)  # [N, H]
        queries, keys, values = project(drafter, weights, inputs(every + 1), states, position)
        queries, hidden, position = (x.index_select(0, rows) for x in (queries, states, position))  # [R, ...]
        places = query_places(rows.tolist(), bounds)
        own, outputs = [], []
        for depth in range(depths):
            if depth:
                queries, own_keys, own_values = project(drafter, weights, inputs(rows + 1 + depth), hidden,
                                                        position + depth)
                own += [own_keys, own_values]
            attended = Attention.apply(queries, keys, values, places, *own).flatten(1)  # [R, heads * d]
            hidden = torch.addmm(hidden, attended, weights.output.T)
            if drafter.recompute:
                hidden = checkpoint(feed_forward, drafter, weights, hidden, use_reentrant=False)
            else:
                hidden = feed_forward(drafter, weights, hidden)
            outputs.append(hidden)
        return torch.stack(outputs)


def project(drafter, weights, tokens, hidden, positions):
    """q, k, v [R, heads, d] of rows with states [R, H]; keys and values are repeated for their heads.

    tokens: [R, (heads + 2 kv) d], what the rows' input tokens add.
    """
    heads, kv_heads = drafter.heads, drafter.kv_heads
    x = torch.addmm(tokens, rms_norm(hidden, drafter.midlayer["hidden_norm"]), weights.for_hidden.T)
    rotated, v = x.unflatten(1, (-1, drafter.head_dim)).split([heads + kv_heads, kv_heads], 1)
    q, k = drafter.rotate(rotated, positions).split([heads, kv_heads], 1)
    if kv_heads < heads:
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
    attention, arXiv 2310.01889), so that a flash kernel serves in both directions.
    """

    @staticmethod
    def forward(ctx, queries, keys, values, places, *own):
        """queries [R, heads, d]; keys, values [N, heads, d] of depth 0; own: k, v, k, v, ... [R, heads, d] of
        depths 1, 2, ...; places: as query_places returns them. Returns [R, heads, d].
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
        return grad_queries, grad_keys, grad_values, None, *grad_own


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


def _flash(q):
    return q.device.type == "cpu"


def _block(q, k, v, causal):
    """(output [n, heads, d], log-sum-exp [n, heads]) of queries [n, heads, d] and one block [t, heads, d]."""
    if _flash(q):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out[0].transpose(0, 1), total[0].T
    outs, totals = [], []
    for first, last, end in _pieces(len(q), len(k), causal):
        scores = _scores(q, k, first, last, end, causal)  # [heads, piece, end]
        total = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(total).exp_().to(v.dtype)
        outs.append((weights @ v[:end].transpose(0, 1)).transpose(0, 1))
        totals.append(total[..., 0].T)
    return torch.cat(outs), torch.cat(totals)


def _block_backward(grad, q, out, total, k, v, causal):
    """Gradients by q, k, v of one block, with the merged output and log-sum-exp of all blocks."""
    if _flash(q):
        grad, q, out, k, v = (x.transpose(0, 1)[None] for x in (grad, q, out, k, v))
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return [x[0].transpose(0, 1) for x in backward(grad, q, k, v, out, total.T[None], 0.0, causal)]
    scale = q.shape[-1] ** -0.5
    drift = (grad * out).sum(-1, dtype=total.dtype)  # [n, heads]
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first, last, end in _pieces(len(q), len(k), causal):
        g, queries = grad[first:last].transpose(0, 1), q[first:last].transpose(0, 1)  # [heads, piece, d]
        weights = _scores(q, k, first, last, end, causal).sub_(total[first:last].T[..., None]).exp_()
        by_weight = (g @ v[:end].permute(1, 2, 0)).to(weights.dtype)  # [heads, piece, end]
        by_score = (by_weight.sub_(drift[first:last].T[..., None]) * weights * scale).to(q.dtype)
        grad_q[first:last] = (by_score @ k[:end].transpose(0, 1)).transpose(0, 1)
        grad_k[:end] += (by_score.transpose(1, 2) @ queries).transpose(0, 1)
        grad_v[:end] += (weights.to(q.dtype).transpose(1, 2) @ g).transpose(0, 1)
    return grad_q, grad_k, grad_v


def _pieces(queries, keys, causal):
    """(first, last, end) for every PIECE: queries first..last see keys 0..end."""
    pieces = []
    for first in range(0, queries, PIECE):
        last = min(first + PIECE, queries)
        pieces.append((first, last, last if causal else keys))
    return pieces


def _scores(q, k, first, last, end, causal):
    """[heads, last - first, end] of queries first..last and keys 0..end."""
    products = q[first:last].transpose(0, 1) @ k[:end].permute(1, 2, 0)
    scores = products.to(_wide(q.dtype)) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).triu(1)
        scores[..., first:].masked_fill_(later, -math.inf)
    return scores


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
