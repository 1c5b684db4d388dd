"""The loss on the drafter's hidden states, fused with its lm_head, and the simulated accept length. For batches see common/ttt.py."""

import torch
from torch import nn

from common.target import process_logits
from common.ttt import make_batch, rms_norm, stretches, supervised_rows, ttt_hidden

TINY = torch.finfo(torch.float32).tiny
DRAFTED = ("input_ids", "loss_mask", "aux_hidden_states", "target_argmax")  # what draft_hits reads of a sample
CHUNK_BYTES = 256 * 1024 * 1024  # of logits' gradients at a time: few additions to the lm_head's gradient, small beside a model
PIECE = 256  # rows of logits at a time: full-speed products, and what is done to them still finds them in the cache
BLOCK = 4 * 1024 * 1024  # elements of the lm_head at a time for its gradient on a CPU, where blocks in the cache are several times as fast


class Buffers:
    """Uninitialised memory by name, the same at every call: fresh pages cost as much as the products written to them."""

    def __init__(self, columns, dtype, device):
        self.columns, self.dtype, self.device, self.kept = columns, dtype, device, {}

    def __call__(self, name, rows, columns=None):
        """[rows, columns], by default as many as the draft rows."""
        if name not in self.kept or len(self.kept[name]) < rows:
            self.kept[name] = torch.empty(rows, columns or self.columns, dtype=self.dtype, device=self.device)
        return self.kept[name][:rows]


def draft_rows(vocab_size, rows, device):
    """int64 [V]: the draft row of a target id, -1 outside of the map. rows: int64 [D] target ids, None for the full vocabulary."""
    if rows is None:
        return torch.arange(vocab_size, device=device)
    return torch.full((vocab_size,), -1).index_copy_(0, rows, torch.arange(len(rows))).to(device)


class Teacher:
    """The target's distribution over the draft rows: its lm_head rows, and what it does to its logits.

    With whole=True also the share of its probability that falls on the draft rows, which needs a product with all other rows.
    """

    reads = ("last_hidden_state",)  # of a batch

    def __init__(self, lm_head, rows, logit_softcap, logit_scale, device, dtype, whole=False):
        self.row_of, self.rest = draft_rows(len(lm_head), rows, device), None
        if rows is not None and whole:
            self.rest = lm_head[(self.row_of < 0).cpu()].to(device, dtype)  # [V - D, H]
        self.weight = (lm_head if rows is None else lm_head[rows]).to(device, dtype)  # [D, H]
        self.softcap, self.scale = logit_softcap, logit_scale
        self.buffer = Buffers(len(self.weight), dtype, device)

    def logits(self, last, weight, name):
        logits = torch.mm(last.to(weight.dtype), weight.T, out=self.buffer(name, len(last), len(weight)))
        if self.softcap or self.scale != 1.0:
            logits = process_logits(logits.float(), self.softcap, self.scale).to(weight.dtype)
        return logits

    def probabilities(self, given, likeliest):
        """(p [N, D] in the dtype of the weights: softmax over the draft rows, float32 [N, 1] the draft rows' share of all
        probability or None without `whole`) for given = (lm_head inputs [N, H],) and int64 [N] the draft row of the target's choice."""
        last, = given
        logits = self.logits(last, self.weight, "logits")
        p = torch.softmax(logits, -1, out=self.buffer("teacher", len(last)))
        if self.rest is None:
            return p, None
        others = self.logits(last, self.rest, "rest").float().logsumexp(-1, keepdim=True)
        return p, torch.sigmoid(log_total(logits, p, likeliest) - others)


class CompactTeacher:
    """The same from what is stored of the target's likeliest tokens; the tail is dropped, the rest renormalised."""

    reads = ("teacher_ids", "teacher_logprobs")

    def __init__(self, vocab_size, rows, device, dtype):
        self.row_of = draft_rows(vocab_size, rows, device)
        self.buffer = Buffers(vocab_size if rows is None else len(rows), dtype, device)

    def probabilities(self, given, likeliest):
        """As Teacher's, for given = (ids int32 [N, C], -1 where there is none; log-probabilities [N, C])."""
        ids, logprobs = given
        columns = torch.where(ids >= 0, self.row_of[ids.clamp(min=0)], -1)  # [N, C]
        chances = torch.where(columns >= 0, logprobs.float().exp(), 0)
        share = chances.sum(1, keepdim=True)
        p = self.buffer("teacher", len(ids)).zero_().scatter_add_(1, columns.clamp(min=0), (chances / share).to(self.buffer.dtype))
        return p, share


def log_total(logits, softmax, columns):
    """log sum exp(logits), float32 [N, 1], from the softmax at hand: logits[j] - log softmax[j] for any j, best a likely one."""
    chosen = softmax.gather(1, columns[:, None]).float()
    total = logits.gather(1, columns[:, None]).float() - chosen.clamp_min(TINY).log()
    vanished = (chosen[:, 0] < TINY).nonzero()[:, 0]  # as with a drafter that diverges
    total[vanished] = logits[vanished].float().logsumexp(-1, keepdim=True)
    return total


class TrainStep(nn.Module):
    """The drafter with its loss as forward pass, so that DistributedDataParallel sees one call a micro-batch."""

    def __init__(self, drafter, embedding, teacher, depths, decay, loss="kl"):
        super().__init__()
        self.drafter = drafter
        self.frozen = (embedding, teacher)  # in a tuple: neither parameters nor buffers of this module
        self.depths, self.loss = depths, loss
        self.depth_weights = [decay**depth for depth in range(depths)]

    def forward(self, batch, scale):
        """scale: what the sum over rows is multiplied by (processes / supervised labels of the whole optimizer step).

        Returns (loss, float32 [depths] unweighted sums of the rows' losses, int64 [depths] rows that count).
        """
        embedding, teacher = self.frozen
        rows, supervised = supervised_rows(batch["loss_mask"], batch["bounds"], self.depths)
        hidden = rms_norm(ttt_hidden(self.drafter, embedding, batch, rows, self.depths), self.drafter.norm)  # [K, R, H]
        likeliest = teacher.row_of[batch["target_argmax"]]  # [N] the draft row of the target's choice
        pairs = []  # per depth: which of `rows` count, and the teacher row of each
        for depth in range(self.depths):
            teacher_rows = rows + depth + 1
            kept = supervised[depth].nonzero()[:, 0]
            kept = kept[likeliest[teacher_rows[kept]] >= 0]
            pairs.append((kept, teacher_rows[kept]))
        weights = [weight * scale for weight in self.depth_weights]
        head = self.drafter.lm_head.weight
        head = head if torch.is_grad_enabled() else head.detach()  # else its gradient would be computed all the same
        given = tuple(batch[name] for name in teacher.reads)
        loss, sums = HeadLoss.apply(hidden, head, given, likeliest, teacher, pairs, weights, self.loss)
        return loss, sums, torch.tensor([len(kept) for kept, _ in pairs])


class HeadLoss(torch.autograd.Function):
    """lm_head and loss against the teacher, with their gradients, in chunks of teacher rows.

    No [rows, vocabulary] tensor outlives its chunk, the teacher of a row is computed once for all depths, and the backward
    pass recomputes nothing: the gradient by the logits is at hand in the forward pass.

    With p the teacher on the draft rows, q the drafter and a = sum min(p', q) the expected acceptance (p' = p times the draft
    rows' share of the target's probability), the loss of a row is

        kl         CE(p, q)
        lk         w CE(p, q) + (1 - w) (1 - a), w = exp(-3 a) taken as a constant
        lk-log     -log a

    lk and lk-log are those of arXiv 2602.23881, but for w, which is the row's own and not the batch's: so a row's gradient does not
    depend on what it is packed with.
    """

    @staticmethod
    def forward(ctx, hidden, weight, given, likeliest, teacher, pairs, depth_weights, kind):
        """hidden [K, R, H], weight [D, H], given: tensors [N, ...] that the teacher reads, likeliest int64 [N] draft rows of the
        target's choices; pairs: K of (int64 [n] into R, int64 [n] teacher rows, ascending).

        Returns (the weighted sum of the rows' losses, float32 [K] their unweighted sums).
        """
        dtype = teacher.buffer.dtype
        weight_cast = weight if weight.dtype == dtype else teacher.buffer("lm_head", *weight.shape).copy_(weight)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        sums = torch.zeros(len(pairs), device=hidden.device)
        teacher_rows = torch.unique(torch.cat([rows for _, rows in pairs]))
        chunk = max(1, CHUNK_BYTES // (dtype.itemsize * len(weight) * len(pairs)))
        columns = len(weight) if weight.is_cuda else max(256, BLOCK // weight.shape[1])
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in teacher_rows.split(chunk) if len(teacher_rows) else ():
                p, share = teacher.probabilities([part[rows] for part in given], likeliest[rows])  # [c, D], [c, 1] or None
                mean_row = p @ weight_cast  # [c, H], so that p . logits is a product of width H
                inside = [((r >= rows[0]) & (r <= rows[-1])).nonzero()[:, 0] for _, r in pairs]
                h = torch.cat([hidden[k].index_select(0, pairs[k][0][i]) for k, i in enumerate(inside)]).to(dtype)  # [m, H]
                grad = teacher.buffer("drafter", len(h))  # [m, D]: the drafter's distribution, then the gradient by its logits
                first = 0
                for k, i in [(k, piece) for k, kept in enumerate(inside) for piece in kept.split(PIECE) if len(piece)]:
                    part = slice(first, first + len(i))
                    first += len(i)
                    own = torch.searchsorted(rows, pairs[k][1][i])  # [n] into the chunk's teacher rows
                    logits = torch.mm(h[part], weight_cast.T, out=teacher.buffer("logits", len(i)))  # [n, D]
                    q = torch.softmax(logits, -1, out=grad[part])
                    losses = (log_total(logits, q, likeliest[rows[own]])
                              - (mean_row[own].float() * h[part].float()).sum(-1, keepdim=True))  # [n, 1]: the cross entropies
                    if kind == "kl":
                        for a, b in stretches(own.tolist()):  # views of p, not a copy
                            q[a:b].sub_(p[own[a] : own[a] + b - a])
                    else:
                        losses = _acceptance_loss(kind, p[own], None if share is None else share[own], q, losses, logits)
                    sums[k] += losses.sum()
                    h[part] *= depth_weights[k]
                if grad_hidden is None:
                    continue
                grad_h = grad @ weight_cast  # [m, H]
                if ctx.needs_input_grad[1]:
                    first_chunk = grad_weight is None
                    if first_chunk:  # float32 also where FSDP hands over weights in bfloat16
                        grad_weight = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
                    for column in range(0, len(weight), columns):  # blocks of the weight that stay in the cache
                        part = grad[:, column : column + columns].T @ h
                        block = grad_weight[column : column + columns]
                        block.copy_(part) if first_chunk else block.add_(part)
                for k, (i, part) in enumerate(zip(inside, grad_h.split([len(i) for i in inside]), strict=True)):
                    grad_hidden[k].index_copy_(0, pairs[k][0][i], (part * depth_weights[k]).to(hidden.dtype))
        if grad_weight is None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
        ctx.grads = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.mark_non_differentiable(sums)
        return torch.dot(sums, sums.new_tensor(depth_weights)), sums

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.grads
        del ctx.grads  # the last reference but autograd's own, which then need not copy the gradient
        if grad_loss.is_cuda or grad_loss != 1:  # a pass over the weight saved, where asking does not stall
            grad_hidden = grad_hidden * grad_loss
            grad_weight = None if grad_weight is None else grad_weight.mul_(grad_loss)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _acceptance_loss(kind, p, share, q, cross_entropy, scratch):
    """The rows' lk or lk-log, float32 [n, 1]; q [n, D] becomes their gradient by the logits. scratch: [n, D] to overwrite.

    The gradient of a by logit j is q_j ([q_j < p'_j] - s), s = sum of q_i [q_i < p'_i].
    """
    whole = p if share is None else p * share.to(p.dtype)
    accepted = torch.minimum(q, whole, out=scratch).sum(-1, dtype=torch.float32, keepdim=True).clamp_min(TINY)  # [n, 1]
    below = torch.where(q < whole, q, 0)
    share_below = below.sum(-1, dtype=torch.float32, keepdim=True)
    if kind == "lk-log":
        q.mul_((share_below / accepted).to(q.dtype)).sub_(below.mul_((1 / accepted).to(q.dtype)))
        return -accepted.log()
    mix = (-3.0 * accepted).exp()  # [n, 1]
    q.mul_((mix + (1 - mix) * share_below).to(q.dtype)).sub_(below.mul_((1 - mix).to(q.dtype))).addcmul_(p, mix.to(q.dtype), value=-1)
    return mix * cross_entropy + (1 - mix) * (1 - accepted)


@torch.no_grad()
def draft_hits(drafter, embedding, batch, map_rows, depths):
    """Where the drafter's choice is the target's: (rows int64 [R], hits bool [depths, R]).

    hits[k, i]: the drafter's greedy choice at depth k of row t = rows[i] equals target_argmax[t+k+1]. A target token outside
    the draft vocabulary is a miss. map_rows: int64 [D] target ids or None.
    """
    rows, supervised = supervised_rows(batch["loss_mask"], batch["bounds"], depths)
    hidden = rms_norm(ttt_hidden(drafter, embedding, batch, rows, depths), drafter.norm)  # [K, R, H]
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
