"""Decoding with the target in transformers: plainly, or with a drafter that proposes tokens in every round.

What is proposed is a chain or a tree. Both ways are the same loop through the same target code, so that the
one is the baseline of the other: a plain round verifies the last token alone. Several prompts are decoded at
once, each at its own pace; the target's answers for training are made so too.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common.cli import UserError
from common.target import generation_config
from common.target_model import SlotCache, TargetModel, cannot_draft

LEAST_TEMPERATURE = 1e-5  # vLLM takes less for greedy, and SGLang from 1e-6 on; at last logits would overflow


@dataclass
class Answer:
    """One decoded prompt. `ids` are the answer's ids, the end token included, cut at the limit.

    Of every verification `candidates` has the tokens given to the target, root first, `accepted` how many
    drafts are in the answer, and `reached` how many depths were judged: none behind a miss, nor behind a cut
    by the end token or the limit.
    """

    ids: list
    candidates: list = field(default_factory=list)
    accepted: list = field(default_factory=list)
    reached: list = field(default_factory=list)


@dataclass
class Group:
    """Answers that were decoded together, with the seconds of all of it and of each round's two parts.

    Those of the rounds are empty where they were not measured.
    """

    answers: list
    seconds: float = 0.0
    draft_seconds: list = field(default_factory=list)
    verify_seconds: list = field(default_factory=list)


def sampling_settings(target, temperature, top_p, top_k):
    """{temperature, top_p, top_k}, checked.

    temperature: a text, that of a number, of 0 for greedy, or `config` for all three as the target's
    generation config has them. Raises UserError for what nothing can be drawn with.
    """
    if temperature == "config":
        config, temperature = generation_config(target), 0
        if config.get("do_sample"):
            temperature = config.get("temperature") or 1.0
        top_p, top_k = config.get("top_p") or 1.0, config.get("top_k") or 0
    try:
        temperature, top_p, top_k = float(temperature), float(top_p), int(top_k)
        right = temperature == 0 or LEAST_TEMPERATURE <= temperature < float("inf")
        right = right and 0 < top_p <= 1 and top_k >= 0
    except (TypeError, ValueError, OverflowError):
        right = False
    if not right:
        raise UserError(f"temperature {temperature}, top-p {top_p}, top-k {top_k}: a temperature of 0 "
                        f"(greedy), at least {LEAST_TEMPERATURE}, or config, a top-p above 0, up to 1, and a "
                        f"top-k of at least 0 are wanted")
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k}


# What else a generation config may ask for that changes answers, with the value that asks for nothing: of any
# answer, and of drawn ones only
NEUTRAL = {
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": [], "force_words_ids": [],
    "constraints": [], "sequence_bias": {}, "suppress_tokens": [], "begin_suppress_tokens": [],
    "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0, "min_new_tokens": 0,
    "exponential_decay_length_penalty": None, "stop_strings": [], "guidance_scale": 1, "num_beams": 1,
    "penalty_alpha": 0, "dola_layers": None, "watermarking_config": None, "token_healing": False,
}
NEUTRAL_DRAWN = {"min_p": 0, "top_h": 1, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}


def not_applied(target, sampling):
    """[a sentence that names what the target's generation config asks for and no decoder here applies], []
    where that is nothing. sampling: as `sampling_settings` returns it."""
    neutral = {**NEUTRAL, **(NEUTRAL_DRAWN if sampling["temperature"] else {})}
    config = generation_config(target)
    asked = [f"{key} {json.dumps(config[key])[:60]}" for key, nothing in neutral.items()
             if config.get(key) not in (None, nothing)]
    if not asked:
        return []
    return [f"the generation_config.json of {target.name} asks for {', '.join(asked)}, which is not applied "
            f"here: answers are those of temperature, top-p and top-k alone, and a server that applies it "
            f"gives others"]


def distribution(logits, sampling):
    """(chances, ids): what is drawn from, of float32 logits [..., V] at a temperature, top_k and top_p.

    chances [..., C] sum to 1; ids, int64 [..., C], are their tokens, likeliest first, or None: all, in order.
    """
    logits, ids = logits / sampling["temperature"], None
    if sampling["top_k"] or sampling["top_p"] < 1:
        size = logits.shape[-1]
        logits, ids = logits.topk(min(sampling["top_k"] or size, size))
    chances = logits.softmax(-1)
    if sampling["top_p"] < 1:
        least = max(sampling["top_p"], 1e-30)  # less is 0 in float32, and would leave nothing
        chances = chances.masked_fill(chances.cumsum(-1) - chances >= least, 0.0)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances, ids


def spread(chances, ids, size):
    """A `distribution` as chances of all tokens in order, [..., size]."""
    if ids is None:
        return chances
    return chances.new_zeros(*chances.shape[:-1], size).scatter_(-1, ids, chances)


def pick(chances, ids, numbers):
    """int64 [N]: ids drawn from a `distribution` over [N, C], by inverting its cumulative sum at `numbers`.

    numbers: float64 [N], uniform in 0..1.
    """
    ladder = chances.double().cumsum(-1)
    places = torch.searchsorted(ladder, (numbers * ladder[:, -1])[:, None], right=True)
    if ids is not None:
        places = ids.gather(1, places)
    return places[:, 0]


def choose(model, last, sampling, numbers):
    """int64 [N]: the target's next ids for last states [N, H], greedy, or drawn at N `numbers` as in
    `pick`."""
    if not sampling["temperature"]:
        return model.argmax(last)
    return pick(*distribution(model.logits(last), sampling), numbers.flatten())


def random_numbers(seed, name, count):
    """float64 [count] uniform numbers that depend on nothing but the seed and `name`, any JSON value."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little"))).random(count)


class Tree(NamedTuple):
    """What a round verifies of each of B sequences: N tokens, the root first and parents before children."""

    tokens: torch.Tensor  # int64 [B, N]
    ancestors: torch.Tensor | None = None  # bool [B, N, N], a node itself included; None for a chain
    chances: torch.Tensor | None = None  # of a sampled chain the drafter's distributions [B, N - 1, V]


class Draft:
    """A drafter at work on the sequences of a SlotCache, whose layer `draft` is its own.

    Of each sequence that layer keeps rows 0..length-1, made of the target's states; what drafting writes
    behind them is overwritten by the next `extend`. Row t pairs target state t with token t+1, so the root of
    the next draft is token `length`.
    """

    def __init__(self, cache, drafter, embedding, rows, layers=None):
        """embedding: the target's raw table [V, H] in the drafter's dtype; rows: int64 [D] target ids, None
        for the full vocabulary; layers: those of the target that the drafter reads, None for all captured
        ones."""
        self.cache = cache
        self.drafter = drafter
        self.embedding = embedding = drafter.table(embedding)
        self.rows = rows
        self.layers = layers
        self.state = embedding.new_empty(cache.most, embedding.shape[1])  # [B, H]: h'' of the last rows

    def layer(self, hidden, ids, seen, positions=None, last=None):
        """The drafter's layer over T new rows of the B sequences that the cache was told of.

        hidden [B, T, H], ids int64 [B, T]; seen: bool [B, queries, end], or None for all up to `end`;
        positions int64 [B, T], None for those of the slots. Returns h'' [B, T, H], or [B, 1, H] of row `last`
        (int64 [B]) of each: the others then leave keys and values only, as with one layer nothing else of
        them is ever read.
        """
        drafter = self.drafter
        if positions is None:
            positions = self.cache.slots
        fused = drafter.fuse(F.embedding(ids, self.embedding), hidden)  # [B, T, 2H]
        new = drafter.keys_values(fused, positions)  # [B, T, kv, d] each
        keys, values = self.cache.draft.update(*(states.transpose(1, 2) for states in new))  # [B, kv, end, d]
        if last is not None:
            own = torch.arange(len(ids), device=ids.device)
            hidden, fused, positions = (x[own, last][:, None] for x in (hidden, fused, positions))
        queries = drafter.queries(fused, positions).transpose(1, 2)  # [B, heads, T, d]
        mask = None if seen is None else seen[:, None]
        attended = F.scaled_dot_product_attention(queries, keys, values, mask,
                                                  enable_gqa=drafter.heads != drafter.kv_heads)
        return drafter.finish_layer(hidden, attended.transpose(1, 2).flatten(2))

    def up_to(self, slots):
        """bool [B, 1, end]: all slots up to `slots`, int64 [B, 1]; None for one sequence alone: it sees
        all."""
        if len(slots) == 1:
            return None
        return (torch.arange(self.cache.end, device=slots.device) <= slots)[:, None]

    def extend(self, part, aux, next_ids, counts):
        """Take in rows of the sequences `part`, a slice, that the cache was told of.

        aux [B, P, 3H] of the target and the tokens that follow, int64 [B, P], of which the first counts[b]
        are of use; counts: int64 [B].
        """
        last = counts - 1
        seen = self.up_to(self.cache.slots[:, :1] + last[:, None])
        self.state[part] = self.layer(self.drafter.fc(aux), next_ids, seen, last=last)[:, 0]

    def head(self, hidden):
        """Logits [..., D] of h'' [..., H], before norm."""
        return self.drafter.lm_head(self.drafter.norm(hidden))

    def ids(self, chosen):
        """Target ids of rows of the draft head."""
        return chosen if self.rows is None else self.rows[chosen]

    def chain(self, roots, steps, sampling, numbers):
        """A Tree without branches of `steps` drafts behind `roots`, int64 [B].

        Drafts are the likeliest, or drawn at `numbers`, float64 [B, steps].
        """
        tokens, chances = [roots], []
        hidden = self.state[: len(roots), None]  # [B, 1, H]
        for step in range(steps):
            if step:
                self.cache.append(1, roots.device, step - 1)
                hidden = self.layer(hidden, tokens[-1][:, None], self.up_to(self.cache.slots))
            logits = self.head(hidden[:, 0])  # [B, D]
            if not sampling["temperature"]:
                tokens.append(self.ids(logits.max(-1).indices))  # of bfloat16 max is faster than argmax
                continue
            found, ids = distribution(logits.float(), sampling)
            if ids is not None:
                ids = self.ids(ids)
            elif self.rows is not None:
                ids = self.rows.expand_as(found)
            chances.append(spread(found, ids, len(self.embedding)))
            tokens.append(pick(found, ids, numbers[:, step]))
        return Tree(torch.stack(tokens, 1), chances=torch.stack(chances, 1) if chances else None)

    def tree(self, roots, steps, topk, draft_tokens):
        """The dynamic tree of EAGLE-2 (arXiv 2406.16858) behind `roots`, int64 [B], with `draft_tokens`
        nodes.

        At every depth `topk` alternatives are drafted behind each of the `topk` likeliest nodes, by the
        products of the drafter's probabilities. The likeliest of all depths are taken.
        """
        batch, device = len(roots), roots.device
        own = torch.arange(batch, device=device)[:, None]
        # of the nodes that are drafted behind: tokens and numbers (0 is the root), int64 [B, beams], products
        # of probabilities [B, beams], states [B, beams, H], and which slots they see [B, beams, slots]
        beams, nodes = roots[:, None], torch.zeros_like(roots)[:, None]
        scores = torch.ones(batch, 1, device=device)
        hidden = self.state[:batch, None]
        lineage = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
        # of all nodes, a part a depth; the root's score is above all others
        tokens, parents, found = [beams], [nodes], [scores + 1]
        for step in range(steps):
            if step:
                width = beams.shape[1]
                itself = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
                lineage = torch.cat([lineage, itself], 2)
                self.cache.append(width, device, lineage.shape[2] - width)
                positions = (self.cache.starts + step - 1).expand_as(beams)
                hidden = self.layer(hidden, beams, self.cache.seen(lineage), positions)
            chances = self.head(hidden).float().softmax(-1).nan_to_num()  # [B, beams, D]
            chances, chosen = chances.topk(topk)  # [B, beams, topk]
            scores = (scores[:, :, None] * chances).flatten(1)  # [B, beams * topk]
            new = self.ids(chosen).flatten(1)
            first = sum(part.shape[1] for part in tokens)  # number of the first new node
            tokens.append(new)
            parents.append(nodes[:, :, None].expand_as(chances).flatten(1))
            found.append(scores)
            scores, best = scores.topk(topk)  # the beams of the next depth
            beams, nodes = new.gather(1, best), best + first
            hidden, lineage = hidden[own, best // topk], lineage[own, best // topk]
        tokens, parents, found = (torch.cat(parts, 1) for parts in (tokens, parents, found))
        return likeliest(tokens, parents, found, draft_tokens, steps)


def likeliest(tokens, parents, scores, count, depth):
    """The Tree of the `count` nodes with the highest scores, of a tree that is `depth` deep.

    tokens, parents, scores: int64, int64, float32 [B, M] of all nodes, the root first; parents by number.
    """
    batch, device = len(tokens), tokens.device
    own = torch.arange(batch, device=device)[:, None]
    # stable: of equal scores the earlier node, so that no node is taken without its parent
    order = scores.sort(dim=1, descending=True, stable=True).indices
    kept = order[:, :count].sort(1).values  # [B, N]
    places = torch.arange(count, device=device).expand_as(kept)
    places = torch.zeros_like(tokens).scatter_(1, kept, places)  # [B, M] where a node stands among the kept
    parents = places.gather(1, parents.gather(1, kept))  # [B, N] among the kept
    ancestors = torch.eye(count, dtype=torch.bool, device=device).expand(batch, -1, -1)
    for _ in range(depth):
        ancestors = ancestors | ancestors[own, parents]
    return Tree(tokens.gather(1, kept), ancestors)


@dataclass
class Work:
    """What `decode` has in hand. Sequence i of the cache answers prompt rows[i], with roots[i] its last
    token."""

    model: TargetModel
    cache: SlotCache
    draft: Draft | None
    prompts: list
    limits: list
    eos_ids: set
    sampling: dict
    numbers: Callable | None
    answers: list
    waiting: list  # numbers of prompts, taken from the end: the longest first, what joins later is shorter
    roots: torch.Tensor  # int64 [most]
    rows: list = field(default_factory=list)

    def ended(self, prompt):
        ids = self.answers[prompt].ids
        return len(ids) >= self.limits[prompt] or not self.eos_ids.isdisjoint(ids[-1:])

    def draw(self, prompts, count):
        """Uniform numbers float64 [B, count] for the next tokens of B `prompts`; None when greedy."""
        if not self.sampling["temperature"]:
            return None
        drawn = []
        for prompt in prompts:
            written = len(self.answers[prompt].ids)
            drawn.append(np.zeros(count) if self.ended(prompt) else self.numbers(prompt, written, count))
        return torch.from_numpy(np.stack(drawn)).to(self.model.device)


@torch.inference_mode()
def decode(model, prompts, limits, eos_ids, drafter=(), steps=3, topk=1, draft_tokens=4, sampling=None,
           numbers=None, most=None, prefill_tokens=4096, report=lambda ids: None):
    """The Group of the target's answers to `prompts`, lists of ids: each up to its limit or one of `eos_ids`.

    limits: most ids of each answer, a list, or one number for all. drafter: (Drafter, embedding, rows,
    layers) as Draft takes them, on the target's device; () decodes plainly. steps, topk, draft_tokens: the
    depth of a draft, the alternatives behind a node (1 is a chain), and the nodes of a tree. sampling:
    {temperature, top_p, top_k}, None is greedy. numbers(n, first, count): uniform random numbers for prompt
    n, whose answer has `first` ids. most: answers written at once, default all. prefill_tokens: of one
    forward pass over prompts. report: called with the ids of each answer that has ended.

    An answer that has ended idles while prompts wait, until a quarter of the batch has; then the next prompts
    take their places. Raises UserError for a drafter where the target's cache cannot be a SlotCache.
    """
    start = clock(model.device)
    most = min(most or len(prompts), len(prompts))
    limits = [limits] * len(prompts) if isinstance(limits, int) else limits
    if model.odd:
        if drafter:
            raise cannot_draft(model.target, model.odd)
        return decode_alike(model, prompts, limits, eos_ids, sampling or {"temperature": 0}, numbers, most,
                            prefill_tokens, report)
    waiting = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    group = Group([Answer([]) for _ in prompts])
    cache = SlotCache(model.target.num_layers, most)
    draft = Draft(cache, *drafter) if drafter else None
    roots = torch.zeros(most, dtype=torch.int64, device=model.device)
    work = Work(model, cache, draft, prompts, limits, eos_ids, sampling or {"temperature": 0}, numbers,
                group.answers, waiting, roots)
    while work.rows or work.waiting:
        began = clock(model.device)
        if change_places(work, prefill_tokens, report):
            continue  # of those that joined some may have ended
        rows = work.rows
        newest = roots[: len(rows)]
        if draft is None:
            tree = Tree(newest[:, None])
        elif topk == 1:
            tree = draft.chain(newest, steps, work.sampling, work.draw(rows, steps))
        else:
            tree = draft.tree(newest, steps, topk, draft_tokens)
        drafted_at = clock(model.device)
        aux, last = model.judge_states(cache, tree.tokens, draft.layers if draft else (), tree.ancestors)
        drawn = work.draw(rows, tree.tokens.shape[1])
        accepted, path, written = judge(model, tree, last, work.sampling, drawn)
        found = accepted.tolist(), tree.tokens.tolist(), written.tolist()
        judged_at = clock(model.device)
        counts = write(work, *found, steps)
        if not all(map(work.ended, rows)):
            advance(work, aux, accepted, path, written, counts)
        group.verify_seconds.append(judged_at - drafted_at)
        if draft:
            group.draft_seconds.append(drafted_at - began + clock(model.device) - judged_at)
    group.seconds = clock(model.device) - start
    return group


def decode_alike(model, prompts, limits, eos_ids, sampling, numbers, most, prefill_tokens, report):
    """Plain `decode` with the cache that the model makes for itself.

    Only prompts of one length are decoded together, step by step until the last has ended: no layer ever
    reads padding, which a recurrent state would keep.
    """
    start = clock(model.device)
    group = Group([Answer([]) for _ in prompts])
    work = Work(model, None, None, prompts, limits, eos_ids, sampling, numbers, group.answers, [], None)
    batches = []
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for length, alike in groupby(order, key=lambda number: len(prompts[number])):
        same, count = list(alike), max(1, min(most, prefill_tokens // length))
        batches += [same[first : first + count] for first in range(0, len(same), count)]
    for rows in batches:
        ids = torch.tensor([prompts[row] for row in rows], device=model.device)  # [B, T]
        cache = None
        for step in range(max(limits[row] for row in rows)):
            cache, last = model.go_on(ids, len(prompts[rows[0]]) + step, cache)
            going = [row for row in rows if not work.ended(row)]
            chosen = choose(model, last, sampling, work.draw(rows, 1))  # [B]
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if row in going:
                    work.answers[row].ids.append(token)
                    if work.ended(row):
                        report(work.answers[row].ids)
            if all(map(work.ended, rows)):
                break
            ids = chosen[:, None]
    group.seconds = clock(model.device) - start
    return group


def change_places(work, prefill_tokens, report):
    """Let waiting prompts take the places of ended answers, if it is time to. Returns whether it was."""
    rows, cache, draft = work.rows, work.cache, work.draft
    gone = [row for row, prompt in enumerate(rows) if work.ended(prompt)]
    if 4 * len(gone) < len(rows) and (work.waiting or not gone):
        return False
    for row in gone:
        report(work.answers[rows[row]].ids)
    count = len(rows) - len(gone)
    stay = [row for row in range(count, len(rows)) if row not in gone]
    for old, new in zip(stay, gone, strict=False):
        cache.move(old, new)
        rows[new], work.roots[new] = rows[old], work.roots[old]
        if draft:
            draft.state[new] = draft.state[old]
    del rows[count:], cache.lengths[count:]
    while work.waiting and len(rows) < cache.most:
        longest = len(work.prompts[work.waiting[-1]])
        room = min(max(1, prefill_tokens // longest), cache.most - len(rows), len(work.waiting))
        prefill(work, [work.waiting.pop() for _ in range(room)])
    return True


def prefill(work, joining):
    """Read the prompts of these numbers, equal ones once, as further sequences, and begin their answers."""
    model, cache, draft = work.model, work.cache, work.draft
    prompts = [tuple(work.prompts[number]) for number in joining]
    read = list(dict.fromkeys(prompts))
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in read], batch_first=True)
    ids = ids.to(model.device)  # [U, T]
    copies = torch.tensor([read.index(prompt) for prompt in prompts], device=model.device)  # [B'] rows of ids
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    part = slice(len(cache.lengths), len(cache.lengths) + len(prompts))
    cache.fill(part, ids.shape[1], copies)
    aux, last = model.states(ids, cache, draft.layers if draft else ())
    roots = choose(model, last[copies, lengths - 1], work.sampling, work.draw(joining, 1))  # [B']
    if draft:
        next_ids = ids[copies].roll(-1, 1).scatter_(1, lengths[:, None] - 1, roots[:, None])
        cache.fill(part, ids.shape[1], torch.arange(len(prompts), device=model.device))
        draft.extend(part, aux[copies], next_ids, lengths)
        if not draft.state[part].isfinite().all():
            raise UserError(f"the drafter's states of a prompt are not finite in {aux.dtype}; take another "
                            f"--dtype")
    cache.lengths += lengths.tolist()
    work.roots[part] = roots
    work.rows += joining
    for number, token in zip(joining, roots.tolist(), strict=True):
        work.answers[number].ids.append(token)


def judge(model, tree, last, sampling, numbers):
    """What the target makes of a Tree, given its last states [B, N, H].

    numbers: uniform, float64 [B, N]; None when greedy. Returns (accepted int64 [B]: how many drafts stand,
    path int64 [B, <= N]: the root and the nodes that stand, or None for a chain's 0, 1, 2, ..., written int64
    [B, <= N]: the tokens behind those nodes). Behind the accepted + 1 first columns lies nothing of use.

    Greedy, a draft stands where it and all before it are the target's choice. Sampled, a chain is judged by
    speculative sampling; a tree by drawing the target's own token behind every node.
    """
    if tree.chances is not None:
        return speculative_sampling(model, tree, last, sampling, numbers)
    tokens = tree.tokens
    chosen = choose(model, last.flatten(0, 1), sampling, numbers).view(tokens.shape)  # [B, N] the target's
    if tree.ancestors is None:
        accepted = (tokens[:, 1:] == chosen[:, :-1]).cumprod(1).sum(1)
        return accepted, None, chosen
    depths = tree.ancestors.sum(2)  # [B, N]
    parents = (depths[:, :, None] - 1 == depths[:, None]) & tree.ancestors  # [B, N, N], one a row
    hits = tokens == chosen.gather(1, parents.int().argmax(2))
    hits[:, 0] = True
    stands = ~(tree.ancestors & ~hits[:, None]).any(2)  # [B, N]; siblings differ, so these are one path
    path = stands.int().sort(dim=1, descending=True, stable=True).indices
    return stands.sum(1) - 1, path, chosen.gather(1, path)


def speculative_sampling(model, tree, last, sampling, numbers):
    """`judge` for a sampled chain (Leviathan et al., arXiv 2211.17192).

    A draft d stands with probability min(1, p(d) / q(d)), p the target's and q the drafter's; what replaces
    the first that does not is drawn from max(p - q, 0), and what follows if all stand from p.
    """
    p = spread(*distribution(model.logits(last), sampling), model.target.vocab_size)  # [B, N, V]
    q, drafts = tree.chances, tree.tokens[:, 1:, None]
    ratio = (p[:, :-1].gather(2, drafts) / q.gather(2, drafts))[:, :, 0]  # [B, N - 1]
    accepted = (numbers[:, :-1] < ratio).cumprod(1).sum(1)
    rest = p.clone()
    rest[:, :-1] = (p[:, :-1] - q).clamp_(min=0)
    own = torch.arange(len(p), device=p.device), accepted
    some = rest[own].sum(1, keepdim=True) > 0  # nothing is left where p = q but for rounding
    replacement = pick(torch.where(some, rest[own], p[own]), None, numbers[:, -1])
    written = tree.tokens.roll(-1, 1)
    written.scatter_(1, accepted[:, None], replacement[:, None])
    return accepted, None, written


def write(work, accepted, candidates, written, steps):
    """Add to the answers what a round found: lists of B, as `judge` returns them, and the tokens of the Tree.

    Returns for every sequence how many of its tokens stand, the root included, 0 where its answer had ended.
    """
    counts = []
    for row, prompt in enumerate(work.rows):
        counts.append(0 if work.ended(prompt) else accepted[row] + 1)
        if not counts[row]:
            continue
        answer = work.answers[prompt]
        kept = cut(written[row][: counts[row]], work.limits[prompt] - len(answer.ids), work.eos_ids)
        answer.ids += kept
        if work.draft:
            answer.candidates.append(candidates[row])
            answer.accepted.append(min(accepted[row], len(kept)))
            whole = len(kept) == counts[row]
            answer.reached.append(min(counts[row], steps) if whole else len(kept))
    return counts


def cut(ids, room, eos_ids):
    """`ids` up to the first end token, it included, and no more than `room`."""
    for position, token in enumerate(ids[:room]):
        if token in eos_ids:
            return ids[: position + 1]
    return ids[:room]


def advance(work, aux, accepted, path, written, counts):
    """Have the cache keep the tokens that stand, `counts` of each sequence, and the drafter take them in.

    aux [B, N, 3H] of all that were verified; the rest as `judge` and `write` return it.
    """
    width = max(counts)
    work.roots[: len(counts)] = written.gather(1, accepted[:, None])[:, 0]
    if path is not None:
        path = path[:, :width]  # [B, P]
    if work.draft:
        aux = aux[:, :width] if path is None else aux.gather(1, path[:, :, None].expand(-1, -1, aux.shape[2]))
        device = written.device
        work.cache.append(width, device)
        work.draft.extend(slice(len(counts)), aux, written[:, :width], torch.tensor(counts, device=device))
    work.cache.keep(path, counts)


def clock(device):
    """Seconds, with the device's queue empty: else drafting's work would be billed to verification."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def transformers_generate(model, prompt_ids, limit, eos_ids):
    """A Group with the greedy answer of transformers' own generate: plain decoding is to be as fast."""
    prompt = torch.tensor([prompt_ids], device=model.device)
    greedy = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    start = clock(model.device)
    ids = model.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit,
                               eos_token_id=sorted(eos_ids) or None, pad_token_id=0, **greedy)
    return Group([Answer(ids[0, len(prompt_ids) :].tolist())], clock(model.device) - start)


@torch.inference_mode()
def head_seconds(drafter, batch, repeats=30):
    """Median seconds that the drafter's head and its choice take for [batch, H] of a step."""
    weight = drafter.norm.weight
    hidden = torch.randn(batch, drafter.config["hidden_size"], device=weight.device).to(weight.dtype)
    times = []
    for _ in range(repeats):
        start = clock(hidden.device)
        drafter.lm_head(drafter.norm(hidden)).max(-1)
        times.append(clock(hidden.device) - start)
    return sorted(times)[repeats // 2]
