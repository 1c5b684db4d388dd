"""Decoding with the target in transformers: plainly, or with a drafter that proposes a chain or a tree of tokens a round.

Both are the same loop through the same target code, so that the one is the baseline of the other: a plain round verifies the
last token alone. Several prompts are decoded at once, each at its own pace; the target's answers for training are made so too.
"""

import hashlib
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common.cli import UserError
from common.files import read_json
from common.target_model import SlotCache

LEAST_TEMPERATURE = 1e-5  # vLLM takes less for greedy, and so does SGLang, from 1e-6 on; at last logits would overflow


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

    ancestors: bool [B, N, N], a node itself included; None for a chain. chances: of a sampled chain the drafter's distributions
    [B, N - 1, V], else None.
    """

    tokens: torch.Tensor  # int64 [B, N]
    ancestors: torch.Tensor | None = None
    chances: torch.Tensor | None = None


class Draft:
    """A drafter at work on the sequences of a SlotCache, whose layer `draft` is its own.

    Of each sequence that layer keeps rows 0..length-1, made of the target's states; what drafting writes behind them is
    overwritten by the next `extend`. Row t pairs target state t with token t+1, so the root of the next draft is token `length`.
    """

    def __init__(self, cache, drafter, embedding, rows, layers=None):
        """embedding: the target's raw table [V, H] in the drafter's dtype; rows: target ids int64 [D] of a reduced draft
        vocabulary, None for the full one; layers: of the target, that the drafter reads, None for all that are captured."""
        self.cache, self.drafter, self.embedding, self.rows, self.layers = cache, drafter, embedding, rows, layers
        self.state = embedding.new_empty(cache.most, embedding.shape[1])  # [B, H]: h'' of each sequence's last row

    def layer(self, hidden, ids, seen, positions=None, last=None):
        """The drafter's layer over T new rows of the B sequences that the cache was told of.

        hidden [B, T, H], ids int64 [B, T]; seen: bool [B, queries, end], or None for all up to `end`; positions int64 [B, T],
        None for those of the slots. Returns h'' [B, T, H], or [B, 1, H] of row `last` (int64 [B]) of each: the others then leave
        keys and values only, as with one layer nothing else of them is ever read.
        """
        drafter, batch = self.drafter, len(ids)
        if positions is None:
            positions = self.cache.slots
        fused = drafter.fuse(F.embedding(ids, self.embedding), hidden)  # [B, T, 2H]
        keys, values = (states.unflatten(0, (batch, -1)).transpose(1, 2)
                        for states in drafter.keys_values(fused.flatten(0, 1), positions.flatten()))
        keys, values = self.cache.draft.update(keys, values)  # [B, kv, end, d]
        if last is not None:
            own = torch.arange(batch, device=ids.device)[:, None]
            hidden, fused, positions = (x[own, last[:, None]] for x in (hidden, fused, positions))
        queries = drafter.queries(fused.flatten(0, 1), positions.flatten()).unflatten(0, (batch, -1)).transpose(1, 2)  # [B, heads, T, d]
        attended = F.scaled_dot_product_attention(queries, keys, values, None if seen is None else seen[:, None],
                                                  enable_gqa=drafter.heads != drafter.kv_heads)
        return drafter.finish_layer(hidden.flatten(0, 1), attended.transpose(1, 2).flatten(0, 1).flatten(1)).unflatten(0, (batch, -1))

    def extend(self, part, aux, next_ids, counts):
        """Take in rows of the sequences `part`, a slice, that the cache was told of: of target states [B, P, 3H] and the tokens
        that follow them, int64 [B, P], the first counts[b], int64 [B]."""
        seen, last = None, counts - 1
        if len(counts) > 1:
            seen = (torch.arange(self.cache.end, device=counts.device) <= self.cache.slots[:, :1] + last[:, None])[:, None]  # [B, 1, end]
        self.state[part] = self.layer(self.drafter.fc(aux), next_ids, seen, last=last)[:, 0]

    def head(self, hidden):
        """Logits [..., D] of h'' [..., H], before norm."""
        return self.drafter.lm_head(self.drafter.norm(hidden))

    def ids(self, chosen):
        """Target ids of rows of the draft head."""
        return chosen if self.rows is None else self.rows[chosen]

    def chain(self, roots, steps, sampling, numbers):
        """A Tree without branches of `steps` drafts behind roots int64 [B]: the likeliest, or drawn at `numbers` float64 [B, steps]."""
        tokens, chances, hidden = [roots], [], self.state[: len(roots), None]  # [B, 1, H]
        for step in range(steps):
            if step:
                self.cache.append(1, roots.device, step - 1)
                seen = None if len(roots) == 1 else (torch.arange(self.cache.end, device=roots.device) <= self.cache.slots)[:, None]
                hidden = self.layer(hidden, tokens[-1][:, None], seen)
            logits = self.head(hidden[:, 0])  # [B, D]
            if sampling["temperature"]:
                found, order = distribution(logits.float(), sampling)
                order = self.ids(torch.arange(logits.shape[1], device=roots.device).expand_as(logits) if order is None else order)
                chances.append(found.new_zeros(len(roots), len(self.embedding)).scatter_(1, order, found))
                tokens.append(pick(found, order, numbers[:, step]))
            else:
                tokens.append(self.ids(logits.max(-1).indices))  # of bfloat16 max is faster than argmax
        return Tree(torch.stack(tokens, 1), chances=torch.stack(chances, 1) if chances else None)

    def tree(self, roots, steps, topk, draft_tokens):
        """EAGLE-2's dynamic tree: of `topk` alternatives behind each of the `topk` likeliest nodes of a depth (products of the
        drafter's probabilities), the draft_tokens - 1 likeliest of all depths. Returns a Tree."""
        batch, device = len(roots), roots.device
        rows = torch.arange(batch, device=device)[:, None]
        lengths = torch.tensor(self.cache.lengths, device=device)[:, None]
        beams, hidden, scores = roots[:, None], self.state[:batch, None], roots.new_ones(batch, 1, dtype=torch.float32)
        nodes = roots.new_zeros(batch, 1)  # [B, beams] number of each beam's node; 0 is the root
        lineage = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # [B, beams, slots behind length]
        tokens, parents, found = [roots[:, None]], [nodes], [scores + 1]
        for step in range(steps):
            if step:
                width = beams.shape[1]
                lineage = torch.cat([lineage, torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)], 2)
                self.cache.append(width, device, lineage.shape[2] - width)
                seen = (torch.arange(self.cache.end, device=device) < lengths)[:, None].repeat(1, width, 1)
                seen.scatter_(2, (lengths + torch.arange(lineage.shape[2], device=device))[:, None].expand_as(lineage), lineage)
                hidden = self.layer(hidden, beams, seen, (lengths + step - 1).expand_as(beams))
            chances, chosen = self.head(hidden).float().softmax(-1).nan_to_num().topk(topk)  # [B, beams, topk]
            first = sum(part.shape[1] for part in tokens)
            scores = (scores[:, :, None] * chances).flatten(1)
            new = self.ids(chosen).flatten(1)
            tokens.append(new)
            parents.append(nodes[:, :, None].expand_as(chances).flatten(1))
            found.append(scores)
            scores, best = scores.topk(topk)  # the beams of the next depth
            beams, nodes = new.gather(1, best), best + first
            hidden, lineage = hidden[rows, best // topk], lineage[rows, best // topk]
        tokens, parents, found = (torch.cat(part, 1) for part in (tokens, parents, found))
        # stable: of equal scores the earlier node, so that no node is taken without its parent; the root's score is above 1
        kept = found.sort(dim=1, descending=True, stable=True).indices[:, :draft_tokens].sort(1).values  # [B, N]
        places = torch.zeros_like(tokens).scatter_(1, kept, torch.arange(draft_tokens, device=device).expand_as(kept))
        parents = places.gather(1, parents.gather(1, kept))  # [B, N] among the kept
        ancestors = torch.eye(draft_tokens, dtype=torch.bool, device=device).expand(batch, -1, -1)
        for _ in range(steps):
            ancestors = ancestors | ancestors[rows, parents]
        return Tree(tokens.gather(1, kept), ancestors)


@torch.inference_mode()
def decode(model, prompts, limits, eos_ids, drafter=(), steps=3, topk=1, draft_tokens=4, sampling=None, numbers=None, most=None,
           prefill_tokens=4096, report=lambda ids: None):
    """The target's answers to `prompts` (lists of ids), each up to its limit or an id of the set `eos_ids`. Returns a Group.

    limits: most ids of each answer, a list, or one number for all. drafter: (Drafter, embedding, rows, layers) as Draft takes them,
    on the target's device; () decodes plainly. sampling: {temperature, top_p, top_k}, None is greedy.
    numbers(n, first, count): uniform random numbers for prompt n, whose answer has `first` ids. most: answers written at once,
    default all. prefill_tokens: of one forward pass over prompts. report: called with the ids of each answer that has ended.

    An answer that has ended idles while prompts wait, until a quarter of the batch has; then the next prompts take their places.
    """
    sampling = sampling or {"temperature": 0}
    limits = [limits] * len(prompts) if isinstance(limits, int) else limits
    start = clock(model.device)
    waiting = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))  # longest taken first: what joins later is shorter
    group = Group([Answer([]) for _ in prompts])
    cache = SlotCache(model.target.num_layers, min(most or len(prompts), len(prompts)))
    draft = Draft(cache, *drafter) if drafter else None
    layers = draft.layers if draft else ()
    roots = torch.zeros(cache.most, dtype=torch.int64, device=model.device)  # the newest token of each sequence
    rows = []  # the prompts of sequences 0, 1, ... of the cache

    def ended(n):
        ids = group.answers[n].ids
        return len(ids) >= limits[n] or not eos_ids.isdisjoint(ids[-1:])

    def draw(some, count):
        if sampling["temperature"]:
            drawn = [np.zeros(count) if ended(n) else numbers(n, len(group.answers[n].ids), count) for n in some]
            return torch.from_numpy(np.stack(drawn)).to(model.device)  # float64 [B, count]

    while rows or waiting:
        began = clock(model.device)
        gone = [i for i, n in enumerate(rows) if ended(n)]
        if 4 * len(gone) >= len(rows) or gone and not waiting:
            count = len(rows) - len(gone)
            for i in gone:
                report(group.answers[rows[i]].ids)
            for old, new in zip([i for i in range(count, len(rows)) if i not in gone], gone, strict=False):
                cache.move(old, new)
                rows[new], roots[new] = rows[old], roots[old]
                if draft:
                    draft.state[new] = draft.state[old]
            del rows[count:], cache.lengths[count:]
            while waiting and len(rows) < cache.most:
                fit = max(1, prefill_tokens // max(1, len(prompts[waiting[-1]])))
                new = [waiting.pop() for _ in range(min(fit, cache.most - len(rows), len(waiting)))]
                first = prefill(model, cache, draft, [prompts[n] for n in new], sampling, draw(new, 1))
                roots[len(rows) : len(rows) + len(new)] = first
                rows += new
                for n, token in zip(new, first.tolist(), strict=True):
                    group.answers[n].ids.append(token)
            continue  # of those that joined some may have ended
        newest = roots[: len(rows)]
        if draft is None:
            tree = Tree(newest[:, None])
        elif topk == 1:
            tree = draft.chain(newest, steps, sampling, draw(rows, steps))
        else:
            tree = draft.tree(newest, steps, topk, draft_tokens)
        drafted_at = clock(model.device)
        aux, last = model.judge_states(cache, tree.tokens, layers, tree.ancestors)
        accepted, path, written = judge(model, tree, last, sampling, draw(rows, tree.tokens.shape[1]))
        accepted, drafts, texts = accepted.tolist(), tree.tokens.tolist(), written.tolist()
        judged_at = clock(model.device)

        counts = [0 if ended(n) else accepted[i] + 1 for i, n in enumerate(rows)]
        for i, n in enumerate(rows):
            if not counts[i]:
                continue
            answer = group.answers[n]
            kept = cut(texts[i][: counts[i]], limits[n] - len(answer.ids), eos_ids)
            answer.ids += kept
            if draft:
                answer.candidates.append(drafts[i])
                answer.accepted.append(min(accepted[i], len(kept)))
                answer.reached.append(min(counts[i], steps) if len(kept) == counts[i] else len(kept))
        if not all(map(ended, rows)):
            width = max(counts)
            path = None if path is None else path[:, :width]  # [B, P]
            roots[: len(rows)] = written[torch.arange(len(rows)), accepted]
            if draft:
                aux = aux[:, :width] if path is None else aux.gather(1, path[:, :, None].expand(-1, -1, aux.shape[2]))
                cache.append(width, model.device)
                draft.extend(slice(len(rows)), aux, written[:, :width], torch.tensor(counts, device=model.device))
            cache.keep(path, counts)
        group.verify_seconds.append(judged_at - drafted_at)
        if draft:
            group.draft_seconds.append(drafted_at - began + clock(model.device) - judged_at)
    group.seconds = clock(model.device) - start
    return group


def prefill(model, cache, draft, prompts, sampling, numbers):
    """Read prompts as further sequences of the cache, equal ones once. Returns the tokens behind them, int64 [B']."""
    read = list(dict.fromkeys(map(tuple, prompts)))
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in read], batch_first=True).to(model.device)  # [U, T]
    copies = torch.tensor([read.index(tuple(prompt)) for prompt in prompts], device=model.device)  # [B'] rows of ids
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    part = slice(len(cache.lengths), len(cache.lengths) + len(prompts))
    cache.fill(part, ids.shape[1], copies)
    aux, last = model.states(ids, cache, draft.layers if draft else ())
    roots = choose(model, last[copies, lengths - 1], sampling, numbers)
    if draft:
        next_ids = ids[copies].roll(-1, 1).scatter_(1, lengths[:, None] - 1, roots[:, None])
        cache.fill(part, ids.shape[1], torch.arange(len(prompts), device=model.device))
        draft.extend(part, aux[copies], next_ids, lengths)
        if not draft.state[part].isfinite().all():
            raise UserError(f"the drafter's states of a prompt are not finite in {aux.dtype}; take another --dtype")
    cache.lengths += lengths.tolist()
    return roots


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
    hidden = torch.randn(batch, drafter.config["hidden_size"], device=drafter.norm.weight.device).to(drafter.norm.weight.dtype)
    times = []
    for _ in range(repeats):
        start = clock(hidden.device)
        drafter.lm_head(drafter.norm(hidden)).max(-1)
        times.append(clock(hidden.device) - start)
    return sorted(times)[repeats // 2]


def judge(model, tree, last, sampling, numbers):
    """What the target makes of a Tree, given its last states [B, N, H] and, to sample, uniform numbers float64 [B, N].

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
        chosen = choose(model, last.flatten(0, 1), sampling, numbers).view(batch, count)  # the target's token behind each node
        if tree.ancestors is None:
            return (tokens[:, 1:] == chosen[:, :-1]).cumprod(1).sum(1), None, chosen
        depths = tree.ancestors.sum(2)
        parents = (depths[:, :, None] - 1 == depths[:, None]) & tree.ancestors  # [B, N, N], one a row
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
    accepted = (numbers[:, :-1] < ratio).cumprod(1).sum(1)
    rest = p.clone()
    rest[:, :-1] = (p[:, :-1] - tree.chances).clamp_(min=0)
    own = torch.arange(batch, device=p.device), accepted
    rest = torch.where(rest[own].sum(1, keepdim=True) > 0, rest[own], p[own])  # [B, V]; nothing is left where p = q but for rounding
    written = tokens.roll(-1, 1)
    written.scatter_(1, accepted[:, None], pick(rest, None, numbers[:, -1])[:, None])
    return accepted, None, written


def cut(ids, room, eos_ids):
    """`ids` up to the first end token, it included, and no more than `room`."""
    for position, token in enumerate(ids[:room]):
        if token in eos_ids:
            return ids[: position + 1]
    return ids[:room]


def clock(device):
    """Seconds, with the device's queue empty: else drafting's work would be billed to verification."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def sampling_settings(target, temperature, top_p, top_k):
    """{temperature, top_p, top_k}, checked. `temperature` is a text: a number, 0 for greedy, or `config` for all three from the
    target's generation config."""
    if temperature == "config":
        file = target.folder / "generation_config.json"
        config = read_json(file) if file.exists() else {}
        temperature = (config.get("temperature") or 1.0) if config.get("do_sample") else 0
        top_p, top_k = config.get("top_p") or 1.0, config.get("top_k") or 0
    try:
        temperature, top_p, top_k = float(temperature), float(top_p), int(top_k)
        right = (temperature == 0 or LEAST_TEMPERATURE <= temperature < float("inf")) and 0 < top_p <= 1 and top_k >= 0
    except (TypeError, ValueError, OverflowError):
        right = False
    if not right:
        raise UserError(f"temperature {temperature}, top-p {top_p}, top-k {top_k}: a temperature of 0 (greedy), at least "
                        f"{LEAST_TEMPERATURE}, or config, a top-p above 0, up to 1, and a top-k of at least 0 are wanted")
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k}


def distribution(logits, sampling):
    """(chances, ids or None) of float32 logits [..., V] at temperature, top_k and top_p: chances [..., C] sum to 1, of token ids
    [..., C], likeliest first, or of all in order (None)."""
    logits, ids = logits / sampling["temperature"], None
    if sampling["top_k"] or sampling["top_p"] < 1:
        logits, ids = logits.topk(min(sampling["top_k"] or logits.shape[-1], logits.shape[-1]))
    chances = logits.softmax(-1)
    if sampling["top_p"] < 1:
        least = max(sampling["top_p"], 1e-30)  # less is 0 in float32, and would leave nothing
        chances = chances.masked_fill(chances.cumsum(-1) - chances >= least, 0.0)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances, ids


def pick(chances, ids, numbers):
    """int64 [N]: ids drawn from a `distribution` over [N, C], by inverting its cumulative sum at uniform `numbers` float64 [N]."""
    ladder = chances.double().cumsum(-1)
    places = torch.searchsorted(ladder, (numbers * ladder[:, -1])[:, None], right=True)
    return (places if ids is None else ids.gather(1, places))[:, 0]


def choose(model, last, sampling, numbers):
    """int64 [N]: the target's next ids for last states [N, H], greedy, or drawn at N uniform `numbers`, float64."""
    return pick(*distribution(model.logits(last), sampling), numbers.flatten()) if sampling["temperature"] else model.argmax(last)


def random_numbers(seed, name, count):
    """float64 [count] uniform numbers that depend on nothing but the seed and `name`, any JSON value."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little"))).random(count)
