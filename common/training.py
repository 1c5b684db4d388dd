"""Training-time test: the drafter's hidden states at every depth, the loss on them, and the simulated accept length.

Depth k of row t stands for the draft position t+k. Its input token is x[t+1+k], its h is the depth k-1 output of the same
row, its rotary position is t+k. It attends to the depth-0 rows 0..t of its document and to its own row at depths 1..k. It
predicts x[t+k+2], and its teacher is the target's distribution at row t+k+1. So depth k equals step-by-step drafting when
the drafted tokens are the data's tokens.

A batch is a dict of packed documents, without padding: input_ids int64 [N], loss_mask bool [N], aux_hidden_states [N, 3H],
last_hidden_state [N, H], target_argmax int64 [N], bounds (a list: document i is rows bounds[i]..bounds[i+1]).
"""

import torch
from torch import nn

from common.target import process_logits

TINY = torch.finfo(torch.float32).tiny
DRAFTED = ("input_ids", "loss_mask", "aux_hidden_states", "target_argmax")  # what draft_hits reads of a sample
CHUNK_BYTES = 128 * 1024 * 1024  # of logits at a time: large enough for full-speed products, small beside the model


def make_batch(samples, device="cpu"):
    """Pack samples (dicts as Shards.sample returns them) into one batch on `device`."""
    bounds = [0]
    for sample in samples:
        bounds.append(bounds[-1] + len(sample["input_ids"]))
    batch = {name: torch.cat([sample[name] for sample in samples]).to(device, non_blocking=True) for name in samples[0]}
    batch["input_ids"] = batch["input_ids"].long()
    batch["target_argmax"] = batch["target_argmax"].long()
    batch["loss_mask"] = batch["loss_mask"].bool()
    batch["bounds"] = bounds
    return batch


def supervised_rows(loss_mask, bounds, depths):
    """Which rows are needed, and at which depth their label is supervised.

    loss_mask: bool [N]. Returns (rows int64 [R] ascending, supervised bool [depths, R]): supervised[k, i] says that the
    label x[t+k+2] of row t = rows[i] exists in the same document and is supervised.
    """
    n, device = len(loss_mask), loss_mask.device
    lengths = torch.tensor(bounds, device=device).diff()
    end = torch.repeat_interleave(torch.tensor(bounds[1:], device=device), lengths)  # [N] where each row's document ends
    label = torch.arange(n, device=device)[None] + torch.arange(2, depths + 2, device=device)[:, None]  # [K, N]
    supervised = (label < end[None]) & loss_mask[label.clamp(max=max(n - 1, 0))] if n else label.bool()
    rows = supervised.any(0).nonzero()[:, 0]
    return rows, supervised[:, rows]


def ttt_hidden(drafter, embedding, batch, rows, depths):
    """The drafter's outputs before norm, [depths, R, H], for `rows` (int64 [R] ascending) of a batch.

    embedding: the target's raw table [V, H]. Depth 0 makes keys and values for every row of the batch; everything else is
    computed for `rows` only.
    """
    ids, bounds = batch["input_ids"], batch["bounds"]
    n, device = len(ids), ids.device
    dtype = drafter.norm.weight.dtype
    starts = torch.tensor(bounds, device=device)
    position = torch.arange(n, device=device) - torch.repeat_interleave(starts[:-1], starts.diff())  # [N] within its document
    row_position = position[rows]
    inside = torch.searchsorted(rows, starts).tolist()  # document i holds rows[inside[i]:inside[i+1]]
    documents = list(zip(bounds[:-1], bounds[1:], inside[:-1], inside[1:], strict=True))

    def embed(token_rows):  # the last row of the batch has no next token; what it gets instead no supervised row sees
        return embedding[ids[token_rows.clamp(max=max(n - 1, 0))]].to(dtype)

    states = drafter.fc(batch["aux_hidden_states"].to(dtype))  # [N, H]
    fused = drafter.fuse(embed(torch.arange(1, n + 1, device=device)), states)  # [N, 2H]
    keys, values = drafter.keys_values(fused, position)  # [N, kv, d]
    hidden, fused = states[rows], fused[rows]  # [R, H], [R, 2H]
    own, outputs = [], []
    for depth in range(depths):
        if depth:
            fused = drafter.fuse(embed(rows + 1 + depth), hidden)
            own.append(drafter.keys_values(fused, row_position + depth))
        queries = drafter.queries(fused, row_position + depth)  # [R, heads, d]
        attended = [  # also of documents without rows, so that every parameter is attached when there is nothing to learn from
            _attend(queries[a:b], keys[first:last], values[first:last], [(k[a:b], v[a:b]) for k, v in own], row_position[a:b])
            for first, last, a, b in documents
        ]
        hidden = drafter.finish_layer(hidden, torch.cat(attended))
        outputs.append(hidden)
    return torch.stack(outputs)


def _attend(q, keys, values, own, position):
    """Attention of one document's rows to its depth-0 rows up to themselves and to their own earlier depths.

    q: [R, heads, d]; keys, values: [T, kv, d]; own: list of ([R, kv, d], [R, kv, d]); position: int [R]. Returns [R, heads*d].
    """
    r, heads, width = q.shape
    t, kv = keys.shape[:2]
    group = heads // kv
    q = q.view(r, kv, group, width).permute(1, 2, 0, 3) * width**-0.5  # [kv, g, R, d]
    scores = torch.matmul(q.reshape(kv, group * r, width), keys.permute(1, 2, 0)).view(kv, group, r, t).float()
    later = torch.arange(t, device=q.device)[None] > position[:, None]  # [R, T]
    scores = scores.masked_fill(later, float("-inf"))
    extra = [(q * k.transpose(0, 1)[:, None]).sum(-1, keepdim=True).float() for k, _ in own]  # [kv, g, R, 1] each
    weights = torch.cat([scores, *extra], dim=-1).softmax(-1).to(values.dtype)
    out = torch.matmul(weights[..., :t].reshape(kv, group * r, t), values.transpose(0, 1)).view(kv, group, r, width)
    for number, (_, v) in enumerate(own):
        out = out + weights[..., t + number : t + number + 1] * v.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(r, heads * width)


class Teacher:
    """The target's distribution over the draft rows: its lm_head rows, and what it does to its logits."""

    def __init__(self, lm_head, rows, logit_softcap, logit_scale, device, dtype):
        self.row_of = torch.arange(len(lm_head))
        if rows is not None:
            self.row_of = torch.full((len(lm_head),), -1).index_copy_(0, rows, torch.arange(len(rows)))
            lm_head = lm_head[rows]
        self.row_of = self.row_of.to(device)  # int64 [V]: draft row of a target id, -1 outside of the map
        self.weight = lm_head.to(device, dtype)  # [D, H]
        self.softcap, self.scale = logit_softcap, logit_scale
        self.buffers = {}

    def probabilities(self, last):
        """[N, D] in the dtype of the weights: softmax over the draft rows, for lm_head inputs [N, H]."""
        logits = torch.mm(last.to(self.weight.dtype), self.weight.T, out=self.buffer("logits", len(last)))
        if self.softcap or self.scale != 1.0:
            logits = process_logits(logits.float(), self.softcap, self.scale).to(self.weight.dtype)
        return torch.softmax(logits, -1, out=self.buffer("teacher", len(last)))

    def buffer(self, name, rows):
        """An uninitialised [rows, D] of the weights' dtype, the same memory at every call: fresh pages cost as much as the products."""
        if name not in self.buffers or len(self.buffers[name]) < rows:
            self.buffers[name] = self.weight.new_empty(rows, len(self.weight))
        return self.buffers[name][:rows]


class TrainStep(nn.Module):
    """The drafter with its loss as forward pass, so that DistributedDataParallel sees one call a micro-batch."""

    def __init__(self, drafter, embedding, teacher, depths, decay):
        super().__init__()
        self.drafter = drafter
        self.frozen = (embedding, teacher)  # in a tuple: neither parameters nor buffers of this module
        self.depths = depths
        self.depth_weights = [decay**depth for depth in range(depths)]

    def forward(self, batch, scale):
        """scale: what the sum over rows is multiplied by (processes / supervised labels of the whole optimizer step).

        Returns (loss, float32 [depths] unweighted sums of the cross entropies, int64 [depths] rows that count).
        """
        embedding, teacher = self.frozen
        rows, supervised = supervised_rows(batch["loss_mask"], batch["bounds"], self.depths)
        hidden = self.drafter.norm(ttt_hidden(self.drafter, embedding, batch, rows, self.depths))  # [K, R, H]
        likeliest = teacher.row_of[batch["target_argmax"]]  # [N] the draft row of the target's choice
        pairs = []  # per depth: which of `rows` count, and the teacher row of each
        for depth in range(self.depths):
            teacher_rows = rows + depth + 1
            kept = supervised[depth].nonzero()[:, 0]
            kept = kept[likeliest[teacher_rows[kept]] >= 0]
            pairs.append((kept, teacher_rows[kept]))
        weights = [weight * scale for weight in self.depth_weights]
        loss, sums = HeadLoss.apply(hidden, self.drafter.lm_head.weight, batch["last_hidden_state"], likeliest, teacher, pairs, weights)
        return loss, sums, torch.tensor([len(kept) for kept, _ in pairs])


class HeadLoss(torch.autograd.Function):
    """lm_head and cross entropy against the teacher, with their gradients, in chunks of teacher rows.

    No [rows, vocabulary] tensor outlives its chunk, the teacher of a row is computed once for all depths, and the backward
    pass recomputes nothing: CE has the gradient softmax(logits) - p, which is at hand in the forward pass.
    """

    @staticmethod
    def forward(ctx, hidden, weight, last, likeliest, teacher, pairs, depth_weights):
        """hidden [K, R, H], weight [D, H], last [N, H], likeliest int64 [N] draft rows of the target's choices;
        pairs: K of (int64 [n] into R, int64 [n] teacher rows, ascending).

        Returns (the weighted sum of the cross entropies, float32 [K] their unweighted sums).
        """
        dtype = teacher.weight.dtype
        weight_cast = weight.to(dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        sums = torch.zeros(len(pairs), device=hidden.device)
        teacher_rows = torch.unique(torch.cat([rows for _, rows in pairs]))
        chunk = max(1, CHUNK_BYTES // (dtype.itemsize * len(weight) * len(pairs)))
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in teacher_rows.split(chunk) if len(teacher_rows) else ():
                p = teacher.probabilities(last[rows])  # [c, D]
                mean_row = p @ weight_cast  # [c, H], so that p . logits is a product of width H
                inside = [((r >= rows[0]) & (r <= rows[-1])).nonzero()[:, 0] for _, r in pairs]
                bounds = [0]
                for i in inside:
                    bounds.append(bounds[-1] + len(i))
                h = torch.cat([hidden[k][pairs[k][0][i]] for k, i in enumerate(inside)]).to(dtype)  # [m, H], depth after depth
                logits = torch.mm(h, weight_cast.T, out=teacher.buffer("logits", len(h)))  # [m, D]
                q = torch.softmax(logits, -1, out=teacher.buffer("drafter", len(h)))  # [m, D]
                for k, i in enumerate(inside):
                    part = slice(bounds[k], bounds[k + 1])
                    own = slice(None) if len(i) == len(rows) else torch.searchsorted(rows, pairs[k][1][i])
                    # CE = log sum exp(logits) - p . logits, and log sum exp(logits) = logits[j] - log q[j] for any j
                    j = likeliest[rows[own], None]
                    log_total = logits[part].gather(1, j).float() - q[part].gather(1, j).float().clamp_min(TINY).log()
                    sums[k] += log_total.sum() - (mean_row[own].float() * h[part].float()).sum()
                    q[part].sub_(p[own])  # the gradient of CE by the logits
                    h[part] *= depth_weights[k]
                if grad_hidden is None:
                    continue
                if ctx.needs_input_grad[1]:
                    part = (q.T @ h).float()
                    grad_weight = part if grad_weight is None else grad_weight.add_(part)
                grad_h = q @ weight_cast
                for k, i in enumerate(inside):
                    grad_hidden[k].index_copy_(0, pairs[k][0][i], (grad_h[bounds[k] : bounds[k + 1]] * depth_weights[k]).to(hidden.dtype))
        if grad_weight is None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
        ctx.grads = grad_hidden, grad_weight
        ctx.mark_non_differentiable(sums)
        return torch.dot(sums, sums.new_tensor(depth_weights)), sums

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.grads
        return grad_hidden * grad_loss, None if grad_weight is None else grad_weight.mul_(grad_loss), None, None, None, None, None


@torch.no_grad()
def draft_hits(drafter, embedding, batch, map_rows, depths):
    """Where the drafter's choice is the target's: (rows int64 [R], hits bool [depths, R]).

    hits[k, i]: the drafter's greedy choice at depth k of row t = rows[i] equals target_argmax[t+k+1]. A target token outside
    the draft vocabulary is a miss. map_rows: int64 [D] target ids or None.
    """
    rows, supervised = supervised_rows(batch["loss_mask"], batch["bounds"], depths)
    hidden = drafter.norm(ttt_hidden(drafter, embedding, batch, rows, depths))  # [K, R, H]
    weight = drafter.lm_head.weight.to(hidden.dtype)
    chunk = max(1, CHUNK_BYTES // (4 * len(weight)))
    hits = torch.zeros_like(supervised)
    for depth in range(depths):
        choice = torch.cat([(part @ weight.T).max(-1).indices for part in hidden[depth].split(chunk)])
        if map_rows is not None:
            choice = map_rows[choice]
        teacher_row = (rows + depth + 1).clamp(max=max(len(batch["input_ids"]) - 1, 0))
        hits[depth] = supervised[depth] & (choice == batch["target_argmax"][teacher_row])
    return rows, hits


def simulate(loss_mask, bounds, rows, hits):
    """Walk over every answer as serving would: int64 [S, 2, K], how often document s reached depth k, and accepted there.

    An answer is a run of supervised tokens. Start at the row that predicts its second token (prefill gives the first), count
    consecutive hits up to K, move on by hits + 1, as long as there is a token of the answer left to predict.
    loss_mask: bool [N]; rows, hits as draft_hits returns them.
    """
    depths = len(hits)
    mask, table = loss_mask.tolist(), {row: hit for row, hit in zip(rows.tolist(), hits.T.tolist(), strict=True)}
    counts = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        reached, accepted = [0] * depths, [0] * depths
        row = start
        while row < end:
            if not mask[row]:
                row += 1
                continue
            stop = row
            while stop < end and mask[stop]:
                stop += 1
            t = max(row - 1, start)
            while t + 2 < stop:
                depth = 0
                while depth < depths and t + depth + 2 < stop:
                    reached[depth] += 1
                    if not table[t][depth]:
                        break
                    accepted[depth] += 1
                    depth += 1
                t += depth + 1
            row = stop
        counts.append([reached, accepted])
    return torch.tensor(counts)


def simulated(drafter, embedding, map_rows, shards, samples, steps, progress=None):
    """The counts of `simulate` for `samples` (numbers) of a Shards folder, int64 [S, 2, steps] on the CPU.

    embedding: the target's raw table [V, H] on the drafter's device; map_rows: int64 [D] target ids there, or None.
    """
    counts = [torch.zeros(0, 2, steps, dtype=torch.int64)]
    for first in range(0, len(samples), 8):
        part = samples[first : first + 8]
        batch = make_batch([shards.sample(int(number), DRAFTED) for number in part], embedding.device)
        counts.append(simulate(batch["loss_mask"], batch["bounds"], *draft_hits(drafter, embedding, batch, map_rows, steps)))
        if progress:
            progress.update(len(part))
    return torch.cat(counts)
