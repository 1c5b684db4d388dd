"""Decoding with the target in transformers: plainly, or with a drafter that proposes a chain or a tree of tokens a round.

Both are the same loop through the same target code, so that the one is the baseline of the other: a plain round verifies the
last token alone. Several prompts are decoded at once, each at its own pace.
"""

import time
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.cli import UserError
from common.generate import distribution
from common.target_model import SlotCache


@dataclass
class Answer:
    """One decoded prompt. `ids` are the answer's ids, the end token included, cut at the limit.

    One entry a verification in `candidates` (the tokens given to the target, root first), `accepted` (drafts that are in the
    answer) and `reached` (depths that were judged: no depth behind a miss, nor behind a cut by the end token or the limit).
    """

    ids: list
    candidates: list = field(default_factory=list)
    accepted: list = field(default_factory=list)
    reached: list = field(default_factory=list)


@dataclass
class Group:
    """Answers that were decoded together, the seconds of all of it, and those of each round (empty where not measured)."""

    answers: list
    seconds: float = 0.0
    draft_seconds: list = field(default_factory=list)
    verify_seconds: list = field(default_factory=list)


class Tree(NamedTuple):
    """What a round verifies: N tokens behind each of B sequences, the root first and parents before children.

    depths int64 [B, N] below the root and ancestors bool [B, N, N] (a node's own included) are None for a chain. chances: of a
    sampled chain the drafter's distributions [B, N - 1, V], else None.
    """

    tokens: torch.Tensor  # int64 [B, N]
    depths: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    chances: torch.Tensor | None = None


class Draft:
    """A drafter at work on B sequences, with its own KV cache.

    Of each sequence the cache keeps rows 0..length-1, made of the target's states; what drafting writes behind them is
    overwritten by the next `extend`. Row t pairs target state t with token t+1, so the root of the next draft is token `length`.
    """

    def __init__(self, drafter, embedding, rows, batch, capacity):
        """embedding: the target's raw table [V, H] in the drafter's dtype; rows: target ids int64 [D] of a reduced draft
        vocabulary, None for the full one."""
        self.drafter, self.embedding, self.rows = drafter, embedding, rows
        shape = (batch, drafter.kv_heads, capacity, drafter.head_dim)
        self.keys, self.values = embedding.new_zeros(shape), embedding.new_zeros(shape)
        self.lengths = [0] * batch
        self.state = embedding.new_empty(batch, embedding.shape[1])  # [B, H]: h'' of each sequence's last row

    def layer(self, part, hidden, ids, slots, positions, seen, end, last=None):
        """The drafter's layer over T new rows of the sequences `part` (a slice of B' ones).

        hidden [B', T, H], ids, slots and positions int64 [B', T]; seen: bool [B', queries, end], or None for all up to `end`.
        Returns h'' [B', T, H], or [B', 1, H] of row `last` (int64 [B']) of each: the others then leave keys and values only,
        as with one layer nothing else of them is ever read.
        """
        drafter, (batch, _) = self.drafter, ids.shape
        fused = drafter.fuse(F.embedding(ids, self.embedding), hidden)  # [B', T, 2H]
        keys, values = drafter.keys_values(fused.flatten(0, 1), positions.flatten())
        own = torch.arange(batch, device=ids.device)[:, None]
        self.keys[part][own, :, slots] = keys.view(*ids.shape, *keys.shape[1:])
        self.values[part][own, :, slots] = values.view(*ids.shape, *values.shape[1:])
        if last is not None:
            hidden, fused, positions = (x[own, last[:, None]] for x in (hidden, fused, positions))
        queries = drafter.queries(fused.flatten(0, 1), positions.flatten()).unflatten(0, (batch, -1)).transpose(1, 2)  # [B', heads, T, d]
        attended = F.scaled_dot_product_attention(
            queries, self.keys[part, :, :end], self.values[part, :, :end], None if seen is None else seen[:, None],
            enable_gqa=drafter.heads != drafter.kv_heads)
        return drafter.finish_layer(hidden.flatten(0, 1), attended.transpose(1, 2).flatten(0, 1).flatten(1)).unflatten(0, (batch, -1))

    def prefill(self, part, aux, next_ids):
        """Take in the prompts of the sequences `part`: target states [B', T, 3H] and the tokens that follow them, int64 [B', T]."""
        count = next_ids.shape[1]
        places = torch.arange(count, device=next_ids.device).expand_as(next_ids)
        self.state[part] = self.layer(part, self.drafter.fc(aux), next_ids, places, places, None, count, places[:, -1])[:, 0]
        if not self.state[part].isfinite().all():
            raise UserError(f"the drafter's states of a prompt are not finite in {aux.dtype}; take another --dtype")
        self.lengths[part] = [count] * len(next_ids)

    def extend(self, aux, next_ids, counts):
        """Take in verified rows: of target states [B, P, 3H] and the tokens that follow them, int64 [B, P], the first counts[b]."""
        lengths = torch.tensor(self.lengths, device=next_ids.device)[:, None]
        places = lengths + torch.arange(next_ids.shape[1], device=next_ids.device)
        end, last = max(self.lengths) + next_ids.shape[1], torch.tensor(counts, device=next_ids.device) - 1
        seen = None
        if len(counts) > 1:
            seen = (torch.arange(end, device=next_ids.device) <= lengths + last[:, None])[:, None]  # [B, 1, end]
        self.state = self.layer(slice(None), self.drafter.fc(aux), next_ids, places, places, seen, end, last)[:, 0]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows):
        """Keep only the sequences `rows`, a list."""
        self.keys, self.values, self.state = self.keys[rows], self.values[rows], self.state[rows]
        self.lengths = [self.lengths[row] for row in rows]

    def head(self, hidden):
        """Logits [..., D] of h'' [..., H], before norm."""
        return self.drafter.lm_head(self.drafter.norm(hidden))

    def ids(self, chosen):
        """Target ids of rows of the draft head."""
        return chosen if self.rows is None else self.rows[chosen]

    def chain(self, roots, steps, sampling, generator):
        """A Tree without branches of `steps` drafts behind roots int64 [B]: the likeliest, or sampled ones."""
        lengths = torch.tensor(self.lengths, device=roots.device)[:, None]
        tokens, chances, hidden = [roots], [], self.state[:, None]  # [B, 1, H]
        for step in range(steps):
            if step:
                places, end = lengths + step - 1, max(self.lengths) + step
                seen = None if len(roots) == 1 else (torch.arange(end, device=roots.device) <= places)[:, None]
                hidden = self.layer(slice(None), hidden, tokens[-1][:, None], places, places, seen, end)
            logits = self.head(hidden[:, 0])  # [B, D]
            if sampling["temperature"]:
                found, order = distribution(logits.float(), sampling)
                chosen = torch.multinomial(found, 1, generator=generator)
                order = self.ids(torch.arange(logits.shape[1], device=roots.device).expand_as(logits) if order is None else order)
                chances.append(found.new_zeros(len(roots), len(self.embedding)).scatter_(1, order, found))
                tokens.append(order.gather(1, chosen)[:, 0])
            else:
                tokens.append(self.ids(logits.max(-1).indices))  # of bfloat16 max is faster than argmax
        return Tree(torch.stack(tokens, 1), chances=torch.stack(chances, 1) if chances else None)

    def tree(self, roots, steps, topk, draft_tokens):
        """EAGLE-2's dynamic tree: of `topk` alternatives behind each of the `topk` likeliest nodes of a depth (products of the
        drafter's probabilities), the draft_tokens - 1 likeliest of all depths. Returns a Tree."""
        batch, device = len(roots), roots.device
        rows = torch.arange(batch, device=device)[:, None]
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        beams, hidden, scores = roots[:, None], self.state[:, None], roots.new_ones(batch, 1, dtype=torch.float32)
        nodes = roots.new_zeros(batch, 1)  # [B, beams] number of each beam's node; 0 is the root
        lineage = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # [B, beams, slots behind length]
        tokens, parents, depths, found = [roots[:, None]], [nodes], [nodes], [scores + 1]
        for step in range(steps):
            if step:
                width = beams.shape[1]
                lineage = torch.cat([lineage, torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)], 2)
                behind, end = torch.arange(lineage.shape[2], device=device), max(self.lengths) + lineage.shape[2]
                seen = (torch.arange(end, device=device) < lengths)[:, None].repeat(1, width, 1)
                seen.scatter_(2, (lengths + behind)[:, None].expand_as(lineage), lineage)
                hidden = self.layer(slice(None), hidden, beams, lengths + behind[-width:], (lengths + step - 1).expand_as(beams), seen, end)
            chances, chosen = self.head(hidden).float().softmax(-1).nan_to_num().topk(topk)  # [B, beams, topk]
            first = sum(part.shape[1] for part in tokens)
            scores = (scores[:, :, None] * chances).flatten(1)
            new = self.ids(chosen).flatten(1)
            tokens.append(new)
            parents.append(nodes[:, :, None].expand_as(chances).flatten(1))
            depths.append(torch.full_like(new, step + 1))
            found.append(scores)
            scores, best = scores.topk(topk)  # the beams of the next depth
            beams, nodes = new.gather(1, best), best + first
            hidden, lineage = hidden[rows, best // topk], lineage[rows, best // topk]
        tokens, parents, depths, found = (torch.cat(part, 1) for part in (tokens, parents, depths, found))
        # stable: of equal scores the earlier node, so that no node is taken without its parent; the root's score is above 1
        kept = found.sort(dim=1, descending=True, stable=True).indices[:, :draft_tokens].sort(1).values  # [B, N]
        places = torch.zeros_like(tokens).scatter_(1, kept, torch.arange(draft_tokens, device=device).expand_as(kept))
        parents = places.gather(1, parents.gather(1, kept))  # [B, N] among the kept
        ancestors = torch.eye(draft_tokens, dtype=torch.bool, device=device).expand(batch, -1, -1)
        for _ in range(steps):
            ancestors = ancestors | ancestors[rows, parents]
        return Tree(tokens.gather(1, kept), depths.gather(1, kept), ancestors)


@torch.inference_mode()
def decode(model, prompts, limit, eos_ids, drafter=(), steps=3, topk=1, draft_tokens=4, sampling=None, generator=None):
    """The target's answers to `prompts` (lists of ids), each up to `limit` ids or an id of the set `eos_ids`. Returns a Group.

    drafter: (Drafter, embedding, rows) as Draft takes them, on the target's device; () decodes plainly. model.layers are the
    drafter's. sampling: {temperature, top_p, top_k}, None is greedy. Equal prompts that stand together are read once.
    """
    sampling = sampling or {"temperature": 0}
    start = clock(model.device)
    longest = max(map(len, prompts)) + limit
    cache = SlotCache(model.target.num_layers, len(prompts), longest + draft_tokens)
    draft = Draft(*drafter, len(prompts), longest + steps * topk) if drafter else None
    roots = []
    for prompt_ids, own in groupby(range(len(prompts)), key=lambda row: prompts[row]):
        own = list(own)
        part = slice(own[0], own[-1] + 1)
        prompt = torch.tensor([prompt_ids], device=model.device)
        cache.fill(own[0])
        aux, last = model.states(prompt, cache)
        cache.filled(part, len(prompt_ids))
        roots.append(choose(model, last[0, -1:].expand(len(own), -1), sampling, generator))  # [B']
        if draft:
            next_ids = torch.cat([prompt[:, 1:].expand(len(own), -1), roots[-1][:, None]], 1)
            draft.prefill(part, aux.expand(len(own), -1, -1), next_ids)
    roots = torch.cat(roots)
    group = Group([Answer([root]) for root in roots.tolist()])
    rows = list(range(len(prompts)))  # the answers that sequences 0, 1, ... of the caches belong to
    keep = [i for i, row in enumerate(rows) if not finished(group.answers[row].ids, limit, eos_ids)]
    now = clock(model.device)
    while keep:
        if len(keep) < len(rows):
            rows, roots = [rows[i] for i in keep], roots[keep]
            for part in (cache, draft) if draft else (cache,):
                part.select(keep)
        if draft is None:
            tree = Tree(roots[:, None])
        elif topk == 1:
            tree = draft.chain(roots, steps, sampling, generator)
        else:
            tree = draft.tree(roots, steps, topk, draft_tokens)
        drafted_at = clock(model.device)
        aux, last = model.judge_states(cache, tree.tokens, tree.depths, tree.ancestors)
        accepted, path, written = judge(model, tree, last, sampling, generator)
        accepted, drafts, texts = accepted.tolist(), tree.tokens.tolist(), written.tolist()
        judged_at = clock(model.device)

        keep, width = [], max(accepted) + 1
        for i, row in enumerate(rows):
            answer = group.answers[row]
            kept = cut(texts[i][: accepted[i] + 1], limit - len(answer.ids), eos_ids)
            answer.ids += kept
            if draft:
                answer.candidates.append(drafts[i])
                answer.accepted.append(min(accepted[i], len(kept)))
                answer.reached.append(min(accepted[i] + 1, steps) if len(kept) == accepted[i] + 1 else len(kept))
            if not finished(answer.ids, limit, eos_ids):
                keep.append(i)
        if keep:
            counts = [count + 1 for count in accepted]
            path = None if path is None else path[:, :width]  # [B, P]
            cache.keep(path, counts)
            roots = written[torch.arange(len(rows)), accepted]
            if draft:
                aux = aux[:, :width] if path is None else aux.gather(1, path[:, :, None].expand(-1, -1, aux.shape[2]))
                draft.extend(aux, written[:, :width], counts)
        group.verify_seconds.append(judged_at - drafted_at)
        before, now = now, clock(model.device)
        if draft:
            group.draft_seconds.append(drafted_at - before + now - judged_at)
    group.seconds = now - start
    return group


@torch.inference_mode()
def transformers_generate(model, prompt_ids, limit, eos_ids):
    """What transformers' own generate answers to one prompt, greedily, as a Group: plain decoding must not be slower."""
    prompt = torch.tensor([prompt_ids], device=model.device)
    start = clock(model.device)
    ids = model.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False, num_beams=1,
                               temperature=None, top_p=None, top_k=None, eos_token_id=sorted(eos_ids) or None, pad_token_id=0)
    return Group([Answer(ids[0, len(prompt_ids) :].tolist())], clock(model.device) - start)


@torch.inference_mode()
def head_seconds(drafter, batch, repeats=30):
    """Median seconds that the drafter's head and its choice take for [batch, H] of a step."""
    head = Draft(drafter, drafter.lm_head.weight[:1], None, 0, 0)
    hidden = torch.randn(batch, drafter.config["hidden_size"], device=drafter.norm.weight.device).to(drafter.norm.weight.dtype)
    times = []
    for _ in range(repeats):
        start = clock(hidden.device)
        head.head(hidden).max(-1)
        times.append(clock(hidden.device) - start)
    return sorted(times)[repeats // 2]


def judge(model, tree, last, sampling, generator):
    """What the target makes of a Tree, given its last states [B, N, H].

    Returns (accepted int64 [B]: how many drafts stand, path int64 [B, <= N]: the root and the nodes that stand, or None for a
    chain's 0, 1, 2, ..., written int64 [B, <= N]: the tokens behind those nodes). Behind the accepted + 1 first columns lies
    nothing of use.

    Greedy, a draft stands where it and all before it are the target's choice. Sampled, a chain is judged by speculative
    sampling (Leviathan et al., 2023): a draft d stands with probability min(1, p(d) / q(d)), and what replaces the first that
    does not is drawn from max(p - q, 0); a tree by drawing the target's own token behind every node.
    """
    tokens = tree.tokens
    batch, count = tokens.shape
    if tree.chances is None:
        chosen = choose(model, last.flatten(0, 1), sampling, generator).view(batch, count)  # the target's token behind each node
        if tree.ancestors is None:
            return (tokens[:, 1:] == chosen[:, :-1]).cumprod(1).sum(1), None, chosen
        parents = (tree.depths[:, :, None] - 1 == tree.depths[:, None]) & tree.ancestors  # [B, N, N], one a row
        hits = tokens == chosen.gather(1, parents.int().argmax(2))
        hits[:, 0] = True
        stands = ~(tree.ancestors & ~hits[:, None]).any(2)  # [B, N]; siblings differ, so these are one path
        path = stands.int().sort(dim=1, descending=True, stable=True).indices
        return stands.sum(1) - 1, path, chosen.gather(1, path)
    p, order = distribution(model.logits(last), sampling)  # [B, N, V]
    if order is not None:
        p = torch.zeros(*p.shape[:2], model.target.vocab_size, device=p.device).scatter_(2, order, p)
    drafts = tokens[:, 1:, None]
    ratio = (p[:, :-1].gather(2, drafts) / tree.chances.gather(2, drafts))[:, :, 0]  # [B, N - 1]
    accepted = (torch.rand(ratio.shape, device=p.device, generator=generator) < ratio).cumprod(1).sum(1)
    rest = p.clone()
    rest[:, :-1] = (p[:, :-1] - tree.chances).clamp_(min=0)
    own = torch.arange(batch, device=p.device), accepted
    rest = torch.where(rest[own].sum(1, keepdim=True) > 0, rest[own], p[own])  # [B, V]; nothing is left where p = q but for rounding
    written = tokens.roll(-1, 1)
    written.scatter_(1, accepted[:, None], torch.multinomial(rest, 1, generator=generator))
    return accepted, None, written


def choose(model, last, sampling, generator):
    """int64 [N]: the target's next tokens for last states [N, H], greedy or drawn."""
    if not sampling["temperature"]:
        return model.argmax(last)
    chances, order = distribution(model.logits(last), sampling)
    chosen = torch.multinomial(chances, 1, generator=generator)
    return (chosen if order is None else order.gather(1, chosen))[:, 0]


def cut(ids, room, eos_ids):
    """`ids` up to the first end token, it included, and no more than `room`."""
    for position, token in enumerate(ids[:room]):
        if token in eos_ids:
            return ids[: position + 1]
    return ids[:room]


def finished(ids, limit, eos_ids):
    return len(ids) >= limit or ids[-1] in eos_ids


def clock(device):
    """Seconds, with the device's queue empty: else drafting's work would be billed to verification."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
