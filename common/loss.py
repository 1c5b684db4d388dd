"""The loss on the drafter's hidden states, fused with its lm_head, and the simulated accept length.

For batches see common/ttt.py.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from common.target import process_logits
from common.ttt import (
    fuses,
    lay_out,
    make_batch,
    normed,
    ship,
    stretches,
    supervised_rows,
    teacher_rows,
    ttt_hidden,
)

TINY = torch.finfo(torch.float32).tiny
DRAFTED = ("input_ids", "loss_mask", "aux_hidden_states", "target_argmax")  # of a sample, for draft_hits
# Of gradients by logits, on a CPU and elsewhere: small beside a model, few additions to the head's own.
CHUNK_BYTES, DEVICE_CHUNK_BYTES = 256 * 1024 * 1024, 1024 * 1024 * 1024
# Rows of logits at a time: full-speed products, and on a CPU what is done to them finds them in the cache.
PIECE, DEVICE_PIECE = 256, 2048
MEASURED = 8192  # tokens that are measured at a time, and one sample if it is longer
BLOCK = 4 * 1024 * 1024  # elements of the lm_head's gradient at a time on a CPU: much faster in its cache


def chunk_rows(device, dtype, draft_rows, depths):
    """Teacher rows of a chunk: with all their labels, gradients by logits [rows * depths, draft_rows]."""
    size = DEVICE_CHUNK_BYTES if fuses(device) else CHUNK_BYTES
    return max(1, size // (dtype.itemsize * draft_rows * depths))


class Buffers:
    """Uninitialised memory by name, the same at every call: fresh pages cost as much as the products in
    them."""

    def __init__(self, columns, dtype, device):
        self.columns, self.dtype, self.device = columns, dtype, device
        self.kept = {}

    def __call__(self, name, rows, columns=None):
        """[rows, columns], by default as many as the draft rows."""
        if name not in self.kept or len(self.kept[name]) < rows:
            self.kept[name] = torch.empty(rows, columns or self.columns, dtype=self.dtype, device=self.device)
        return self.kept[name][:rows]


def draft_rows(vocab_size, rows):
    """int64 [V] on the CPU: the draft row of a target id, -1 outside of the map.

    rows: int64 [D] target ids, None for the full vocabulary.
    """
    if rows is None:
        return torch.arange(vocab_size)
    return torch.full((vocab_size,), -1).index_copy_(0, rows, torch.arange(len(rows)))


class Teacher:
    """The target's distribution over the draft rows: its lm_head rows, and what it does to its logits.

    With whole=True also the share of its probability that falls on the draft rows, which needs a product with
    all other rows.
    """

    reads = ("last_hidden_state",)  # of a batch

    def __init__(self, lm_head, rows, logit_softcap, logit_scale, device, dtype, whole=False):
        self.row_of = draft_rows(len(lm_head), rows)
        self.weight = (lm_head if rows is None else lm_head[rows]).to(device, dtype)  # [D, H]
        self.rest = None
        if rows is not None and whole:
            self.rest = lm_head[self.row_of < 0].to(device, dtype)  # [V - D, H]
        self.softcap, self.scale = logit_softcap, logit_scale
        self.buffer = Buffers(len(self.weight), dtype, device)

    def logits(self, last, weight, name):
        logits = torch.mm(last.to(weight.dtype), weight.T, out=self.buffer(name, len(last), len(weight)))
        if self.softcap or self.scale != 1.0:
            logits = process_logits(logits.float(), self.softcap, self.scale).to(weight.dtype)
        return logits

    def probabilities(self, given, likeliest):
        """(p [N, D]: softmax over the draft rows, in the dtype of the weights; share float32 [N, 1]).

        share: the draft rows' part of all probability, None without `whole`. given: (lm_head inputs [N, H],);
        likeliest: int64 [N] the draft row of the target's choice.
        """
        (last,) = given
        logits = self.logits(last, self.weight, "logits")
        p = torch.softmax(logits, -1, out=self.buffer("teacher", len(last)))
        if self.rest is None:
            return p, None
        others = self.logits(last, self.rest, "rest").float().logsumexp(-1, keepdim=True)
        return p, torch.sigmoid(log_total(logits, p, likeliest) - others)


class CompactTeacher:
    """The same from what is stored of the target's likeliest tokens; the tail is dropped, the rest
    renormalised."""

    reads = ("teacher_ids", "teacher_logprobs")

    def __init__(self, vocab_size, rows, device, dtype):
        self.row_of = draft_rows(vocab_size, rows)
        self.column_of = self.row_of.to(device)
        self.buffer = Buffers(vocab_size if rows is None else len(rows), dtype, device)

    def probabilities(self, given, likeliest):
        """As Teacher's, for given = (ids int32 [N, C], -1 where there is none; log-probabilities [N, C])."""
        ids, logprobs = given
        columns = torch.where(ids >= 0, self.column_of[ids.clamp(min=0)], -1)  # [N, C]
        chances = torch.where(columns >= 0, logprobs.float().exp(), 0)
        share = chances.sum(1, keepdim=True)
        p = self.buffer("teacher", len(ids)).zero_()
        p.scatter_add_(1, columns.clamp(min=0), (chances / share).to(p.dtype))
        return p, share


def log_total(logits, softmax, columns):
    """log sum exp(logits), float32 [N, 1], from the softmax at hand: logits[j] - log softmax[j] for any j.

    columns: int64 [N], that j of each row, best a likely one. On a device the likeliest is looked for: a pass
    more, but it never vanishes, and to ask whether one did would wait.
    """
    fused = fuses(logits.device)
    columns = (logits.argmax(-1) if fused else columns)[:, None]
    chosen = softmax.gather(1, columns).float()
    total = logits.gather(1, columns).float() - chosen.clamp_min(TINY).log()
    if fused:
        return total
    vanished = (chosen[:, 0] < TINY).nonzero()[:, 0]  # as with a drafter that diverges
    total[vanished] = logits[vanished].float().logsumexp(-1, keepdim=True)
    return total


@dataclass
class Labels:
    """The M labels that the drafter learns from, in chunks of their U teacher rows, in a chunk depth after
    depth: made on the CPU, once a batch."""

    place: torch.Tensor  # int64 [M] a label's row of the states [depths * R], on the device as all tensors
    depth: torch.Tensor  # int64 [M]
    own: torch.Tensor  # int64 [M] which of its chunk's teacher rows is the label's
    order: torch.Tensor  # int64 [M] its place among all, depth after depth
    taught_by: torch.Tensor  # int64 [U] rows of the batch where the target chooses labels, ascending
    likeliest: torch.Tensor  # int64 [U] the draft rows of what it chooses
    counts: torch.Tensor  # int64 [depths] labels of each depth
    sizes: list  # the same as numbers
    chunks: list  # (a, b, first, last): labels a..b have teacher rows first..last


def cut_labels(counted, chosen_at, likeliest, size, device):
    """The Labels on `device`, in chunks of `size` teacher rows.

    counted: bool [K, R], whether a label is learnt from; chosen_at: int64 [K, R], its teacher row; likeliest:
    int64 [N], the draft row of the target's choice; all on the CPU.
    """
    depth, row = counted.nonzero(as_tuple=True)
    taught_by, own = torch.unique(chosen_at[depth, row], return_inverse=True)
    order = torch.argsort(own // size, stable=True)
    firsts = range(0, len(taught_by), size)
    ends = torch.bincount(own // size, minlength=len(firsts)).cumsum(0).tolist()
    chunks = [(a, b, first, min(first + size, len(taught_by)))
              for (a, b), first in zip(pairwise([0, *ends]), firsts, strict=True)]
    counts = counted.sum(1)
    tensors = ((depth * counted.shape[1] + row)[order], depth[order], own[order] % size, order, taught_by,
               likeliest[taught_by], counts)
    return Labels(*(ship(part, device) for part in tensors), counts.tolist(), chunks)


class TrainStep(nn.Module):
    """The drafter with its loss as forward pass, so that DistributedDataParallel sees one call a
    micro-batch."""

    def __init__(self, drafter, embedding, teacher, depths, decay, loss="kl"):
        super().__init__()
        self.drafter = drafter
        # in a tuple: neither parameters nor buffers of this module
        self.frozen = (drafter.table(embedding), teacher)
        self.depths, self.loss = depths, loss
        weights = [decay**depth for depth in range(depths)]
        self.depth_weights = torch.tensor(weights, dtype=torch.float64).to(embedding.device)

    def prepare(self, batch):
        """(Layout, Labels) of a batch on the device: all integers of a step, so that the step asks the device
        for none. The batch is best on the CPU still; else this waits for its mask."""
        embedding, teacher = self.frozen
        device, bounds = embedding.device, batch["bounds"]
        rows, supervised = supervised_rows(batch["loss_mask"].cpu(), bounds, self.depths)
        if not len(rows):  # one that learns nothing, as kernels take no empty tensors
            rows, supervised = torch.tensor([0]), torch.zeros(self.depths, 1, dtype=torch.bool)
        likeliest = teacher.row_of[batch["target_argmax"].cpu()]  # [N] the draft row of the target's choice
        chosen_at = teacher_rows(rows, self.depths, len(likeliest))  # [K, R]
        counted = supervised & (likeliest[chosen_at] >= 0)  # [K, R]
        size = chunk_rows(device, teacher.buffer.dtype, teacher.buffer.columns, self.depths)
        return lay_out(rows, bounds, self.depths, device), cut_labels(counted, chosen_at, likeliest, size,
                                                                      device)

    def forward(self, batch, scale):
        """scale: what the rows' losses are multiplied by (processes / supervised labels of the optimizer
        step). A batch without `prepared` is prepared here.

        Returns (loss, float32 [depths] unweighted sums of the rows' losses, int64 [depths] rows that count).
        """
        embedding, teacher = self.frozen
        layout, labels = batch["prepared"] if "prepared" in batch else self.prepare(batch)
        hidden = normed(ttt_hidden(self.drafter, embedding, batch, layout), self.drafter.norm)  # [K, R, H]
        weights = (self.depth_weights * scale).float()
        head = self.drafter.lm_head.weight
        if not torch.is_grad_enabled():
            head = head.detach()  # else its gradient would be computed all the same
        given = tuple(batch[name] for name in teacher.reads)
        loss, sums = HeadLoss.apply(hidden, head, given, teacher, labels, weights, self.loss)
        return loss, sums, labels.counts


class HeadLoss(torch.autograd.Function):
    """lm_head and loss against the teacher, with their gradients, in chunks of teacher rows.

    No [rows, vocabulary] tensor outlives its chunk, the teacher of a row is computed once for all depths, and
    the backward pass recomputes nothing: the gradient by the logits is at hand in the forward pass.

    With p the teacher on the draft rows, q the drafter and a = sum min(p', q) the expected acceptance (p' = p
    times the draft rows' share of the target's probability), the loss of a row is

        kl         CE(p, q)
        lk         w CE(p, q) + (1 - w) (1 - a), w = exp(-3 a) taken as a constant

    lk is that of arXiv 2602.23881, but for w, which is the row's own and not the batch's: so a row's gradient
    does not depend on what it is packed with.
    """

    @staticmethod
    def forward(ctx, hidden, weight, given, teacher, labels, by_depth, kind):
        """hidden [K, R, H], weight [D, H]; given: tensors [N, ...] that the teacher reads; labels: Labels;
        by_depth: float32 [K] weights of the depths.

        Returns (the weighted sum of the labels' losses, float32 [K] their unweighted sums).
        """
        dtype = teacher.buffer.dtype
        weight_cast = weight
        if weight.dtype != dtype:
            weight_cast = teacher.buffer("lm_head", *weight.shape).copy_(weight)
        states = hidden.flatten(0, 1)  # [K * R, H]
        losses = torch.zeros(len(labels.place), device=hidden.device)
        grad_states = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_states = torch.zeros_like(states)
        if ctx.needs_input_grad[1]:  # float32 also where FSDP hands over weights in bfloat16
            make = torch.empty_like if labels.chunks else torch.zeros_like
            grad_weight = make(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        with torch.autocast(hidden.device.type, enabled=False):
            for a, b, first, last in labels.chunks:
                rows, likeliest = labels.taught_by[first:last], labels.likeliest[first:last]  # [c]
                place, own = labels.place[a:b], labels.own[a:b]  # [m]
                h = states.index_select(0, place).to(dtype)  # [m, H]
                p, share = teacher.probabilities([part[rows] for part in given], likeliest)
                found, grad = _losses(h, weight_cast, p, share, own, likeliest, teacher, kind)
                losses.index_copy_(0, labels.order[a:b], found)
                if grad_states is None:
                    continue
                factor = by_depth[labels.depth[a:b]][:, None]
                grad_h = (grad @ weight_cast) * factor  # [m, H]
                grad_states.index_copy_(0, place, grad_h.to(hidden.dtype))
                if grad_weight is not None:
                    _add_product(grad_weight, grad, h.mul_(factor), first == 0)
        sums = torch.stack([part.sum() for part in losses.split(labels.sizes)])
        if grad_states is not None:
            grad_states = grad_states.view(hidden.shape)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.grads = grad_states, grad_weight
        ctx.mark_non_differentiable(sums)
        return torch.dot(sums, by_depth), sums

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.grads
        del ctx.grads  # the last reference but autograd's own, which then need not copy the gradient
        # a pass over the weight saved, where asking does not wait
        if fuses(grad_loss.device) or grad_loss != 1:
            grad_hidden = grad_hidden * grad_loss
            if grad_weight is not None:
                grad_weight.mul_(grad_loss)
        return grad_hidden, grad_weight, None, None, None, None, None


def _losses(h, weight, p, share, own, likeliest, teacher, kind):
    """(float32 [m] losses, [m, D] their gradients by the logits) of states h [m, H] with the lm_head [D, H].

    p [c, D], share: as a teacher's `probabilities` returns them; own: int64 [m] which rows of them are a
    state's; likeliest: int64 [c] draft rows of the target's choices.
    """
    fused = fuses(h.device)
    piece = DEVICE_PIECE if fused else PIECE
    mean_row = p @ weight  # [c, H]: p . logits is a product of width H with it
    losses = torch.empty(len(h), device=h.device)
    grads = teacher.buffer("drafter", len(h))
    for first in range(0, len(h), piece):
        part = slice(first, first + piece)
        rows = own[part]  # [n]
        logits = torch.mm(h[part], weight.T, out=teacher.buffer("logits", len(rows)))  # [n, D]
        q = torch.softmax(logits, -1, out=grads[part])  # the drafter's distribution, then the gradient
        expected = (mean_row[rows].float() * h[part].float()).sum(-1, keepdim=True)  # [n, 1]
        cross_entropy = log_total(logits, q, likeliest[rows]) - expected  # [n, 1]
        if kind == "kl" and fused:
            q.sub_(p[rows])
        elif kind == "kl":
            numbers = rows.tolist()
            for a, b in stretches(numbers):  # views of p, not a copy
                q[a:b].sub_(p[numbers[a] : numbers[a] + b - a])
        if kind == "kl":
            losses[part] = cross_entropy[:, 0]
        else:
            whole = p[rows] if share is None else p[rows] * share[rows].to(p.dtype)
            losses[part] = _acceptance_loss(p[rows], whole, q, cross_entropy, logits)[:, 0]
    return losses, grads


def _acceptance_loss(p, whole, q, cross_entropy, scratch):
    """The rows' lk, float32 [n, 1]; q [n, D] becomes their gradient by the logits. scratch: [n, D] to
    overwrite.

    p: the teacher on the draft rows [n, D], whole: p', with the share that they have of all probability. The
    gradient of a by logit j is q_j ([q_j < p'_j] - s), s = sum of q_i [q_i < p'_i].
    """
    accepted = torch.minimum(q, whole, out=scratch).sum(-1, dtype=torch.float32, keepdim=True)  # [n, 1]
    below = torch.where(q < whole, q, 0)
    share_below = below.sum(-1, dtype=torch.float32, keepdim=True)
    mix = (-3.0 * accepted).exp()  # [n, 1]
    q.mul_((mix + (1 - mix) * share_below).to(q.dtype))
    q.sub_(below.mul_((1 - mix).to(q.dtype))).addcmul_(p, mix.to(q.dtype), value=-1)
    return mix * cross_entropy + (1 - mix) * (1 - accepted)


def _add_product(total, left, right, first):
    """Add left.T @ right to `total` [D, H], or write it there if it is the first, in blocks that stay in the
    cache."""
    rows = len(total) if fuses(total.device) else max(256, BLOCK // total.shape[1])
    for start in range(0, len(total), rows):
        product = left[:, start : start + rows].T @ right
        block = total[start : start + rows]
        if first:
            block.copy_(product)
        else:
            block.add_(product)


@torch.no_grad()
def draft_hits(drafter, embedding, batch, map_rows, depths):
    """Where the drafter's choice is the target's, on the CPU: (rows int64 [R], hits bool [depths, R]).

    hits[k, i]: the drafter's greedy choice at depth k of row t = rows[i] equals target_argmax[t+k+1]. A
    target token outside the draft vocabulary is a miss. map_rows: int64 [D] target ids, None for the full
    vocabulary.
    """
    embedding = drafter.table(embedding)
    device, chosen = embedding.device, batch["target_argmax"].cpu()
    rows, supervised = supervised_rows(batch["loss_mask"].cpu(), batch["bounds"], depths)
    if not len(rows):
        return rows, supervised
    layout = lay_out(rows, batch["bounds"], depths, device)
    hidden = normed(ttt_hidden(drafter, embedding, batch, layout), drafter.norm)  # [K, R, H]
    weight = drafter.lm_head.weight.to(hidden.dtype)
    size = chunk_rows(device, torch.float32, len(weight), 1)
    choices = [(part @ weight.T).max(-1).indices for part in hidden.flatten(0, 1).split(size)]
    choice = torch.cat(choices).view(supervised.shape)  # [K, R]
    if map_rows is not None:
        choice = map_rows[choice]
    return rows, supervised & (choice.cpu() == chosen[teacher_rows(rows, depths, len(chosen))])


def simulate(loss_mask, bounds, rows, hits):
    """Walk over every answer as serving would: int64 [S, 2, K], how often document s reached depth k, and
    accepted there.

    An answer is a run of supervised tokens. Start at the row that predicts its second token (prefill gives
    the first), count consecutive hits up to K, move on by hits + 1, as long as there is a token of the answer
    left to predict. loss_mask: bool [N]; rows, hits as draft_hits returns them.
    """
    mask, table = loss_mask.tolist(), dict(zip(rows.tolist(), hits.T.tolist(), strict=True))
    counts = torch.zeros(len(bounds) - 1, 2, len(hits), dtype=torch.int64)
    for document, (start, end) in enumerate(pairwise(bounds)):
        answered = [row for row in range(start, end) if mask[row]]
        reached, accepted = [0] * len(hits), [0] * len(hits)
        for a, b in stretches(answered):
            stop = answered[b - 1] + 1
            row = max(answered[a] - 1, start)
            while row + 2 < stop:
                depth = 0
                while depth < len(hits) and row + depth + 2 < stop:
                    reached[depth] += 1
                    if not table[row][depth]:
                        break
                    accepted[depth] += 1
                    depth += 1
                row += depth + 1
        counts[document] = torch.tensor([reached, accepted])
    return counts


def packs(samples, lengths):
    """`samples` (numbers) in lists of together at most MEASURED tokens, or of one longer; lengths: int64 [S]
    of every sample."""
    part, tokens = [], 0
    for number in samples:
        if part and tokens + lengths[number] > MEASURED:
            yield part
            part, tokens = [], 0
        part.append(int(number))
        tokens += lengths[number]
    if part:
        yield part


def simulated(drafter, embedding, map_rows, shards, samples, steps, progress=None):
    """The counts of `simulate` for `samples` (numbers) of a Shards folder, int64 [S, 2, steps] on the CPU.

    embedding: the target's raw table [V, H] on the drafter's device; map_rows: int64 [D] target ids there, or
    None.
    """
    counts = [torch.zeros(0, 2, steps, dtype=torch.int64)]
    for part in packs(samples, shards.index[:, 2]):
        batch = make_batch([shards.sample(int(number), DRAFTED) for number in part], embedding.device)
        rows, hits = draft_hits(drafter, embedding, batch, map_rows, steps)
        counts.append(simulate(batch["loss_mask"], batch["bounds"], rows, hits))
        if progress:
            progress.update(len(part))
    return torch.cat(counts)
