"""Greedy decoding of one prompt at a time: plainly, and with a drafter that proposes a chain of tokens.

Both go through the same target code, so that the one is the baseline of the other.
"""

import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from common.target_model import GrowingCache


@dataclass
class Answer:
    """One decoded prompt. `ids` are the answer's ids, the end token included, cut at the limit.

    One entry a verification in `candidates` ([root, d1..dK] as given to the target), `accepted` (drafts that are in the
    answer) and `reached` (depths that were judged: no depth behind a miss, nor behind a cut by the end token or the limit).
    """

    ids: list
    seconds: float = 0.0  # everything, the prompt included
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    candidates: list = field(default_factory=list)
    accepted: list = field(default_factory=list)
    reached: list = field(default_factory=list)


class Chain:
    """A drafter at work on one sequence, with its own KV cache.

    The cache keeps the depth-0 rows 0..length-1, made of the target's states; what drafting appends behind them is
    overwritten by the next `extend`. Row t pairs target state t with token t+1, so the root of the next draft is token `length`.
    """

    def __init__(self, drafter, embedding, rows, capacity):
        self.drafter, self.embedding, self.rows = drafter, embedding, rows
        shape = (1, drafter.kv_heads, capacity, drafter.head_dim)
        self.keys, self.values = embedding.new_empty(shape), embedding.new_empty(shape)
        self.length = 0
        self.state = None  # [1, H]: h'' of the last depth-0 row

    def layer(self, hidden, input_ids, first):
        """The drafter's layer over N new rows at positions first..first+N-1: [N, H] and int64 [N] to h'' [1, H] of the last row.

        The earlier ones leave their keys and values only: with one layer nothing else of them is ever read.
        """
        drafter = self.drafter
        end = first + len(input_ids)
        positions = torch.arange(first, end, device=hidden.device)
        fused = drafter.fuse(F.embedding(input_ids, self.embedding), hidden)
        keys, values = drafter.keys_values(fused, positions)
        self.keys[0, :, first:end] = keys.transpose(0, 1)
        self.values[0, :, first:end] = values.transpose(0, 1)
        queries = drafter.queries(fused[-1:], positions[-1:])[:, :, None]  # [1, heads, 1, d]
        attended = F.scaled_dot_product_attention(queries, self.keys[:, :, :end], self.values[:, :, :end],
                                                  enable_gqa=drafter.heads != drafter.kv_heads)
        return drafter.finish_layer(hidden[-1:], attended.flatten(1))

    def extend(self, aux, next_ids):
        """Take in verified rows: target states [N, 3H] and the tokens that follow them, int64 [N]."""
        self.state = self.layer(self.drafter.fc(aux), next_ids, self.length)
        self.length += len(next_ids)

    def draft(self, steps):
        """int64 [steps]: the drafter's greedy choices behind the root, as target ids."""
        hidden, chosen = self.state, [self.choose(self.state)]
        for step in range(steps - 1):
            hidden = self.layer(hidden, chosen[-1], self.length + step)
            chosen.append(self.choose(hidden))
        return torch.cat(chosen)

    def choose(self, hidden):
        """The greedy choice for h'' [1, H], before norm, as a target id, int64 [1]."""
        best = self.drafter.lm_head(self.drafter.norm(hidden)).max(-1).indices
        return best if self.rows is None else self.rows[best]


@torch.inference_mode()
def plain_decode(target_model, prompt_ids, max_new_tokens, eos_ids):
    """Greedy decoding without a drafter. prompt_ids: list of int; eos_ids: set of int. Returns an Answer."""
    start = clock(target_model.device)
    cache = GrowingCache()
    feed = torch.tensor([prompt_ids], device=target_model.device)
    ids = []
    while True:
        _, last = target_model.states(feed, cache)
        feed = target_model.argmax(last[0, -1:])[None]  # [1, 1]
        ids.append(feed.item())
        if finished(ids, max_new_tokens, eos_ids):
            return Answer(ids, clock(target_model.device) - start)


@torch.inference_mode()
def speculative_decode(target_model, drafter, embedding, rows, prompt_ids, steps, max_new_tokens, eos_ids):
    """Greedy decoding with drafts of `steps` tokens, each judged in one forward pass of the target. Returns an Answer.

    embedding: the target's raw table [V, H] in the drafter's dtype; rows: target ids int64 [D] of a reduced draft
    vocabulary, None for the full one; both on the target's device. target_model.layers are the drafter's.
    """
    device = target_model.device
    start = clock(device)
    prompt = torch.tensor(prompt_ids, device=device)
    cache = GrowingCache()
    aux, last = target_model.states(prompt[None], cache)
    root = target_model.argmax(last[0, -1:])  # [1]
    answer = Answer([root.item()])
    chain = Chain(drafter, embedding, rows, len(prompt_ids) + max_new_tokens + steps)
    chain.extend(aux[0], torch.cat([prompt[1:], root]))
    now = clock(device)
    while not finished(answer.ids, max_new_tokens, eos_ids):
        candidates = torch.cat([root, chain.draft(steps)])  # [K+1]
        drafted_at = clock(device)
        aux, last = target_model.states(candidates[None], cache)
        predicted = target_model.argmax(last[0])  # [K+1]: entry i is the target's token behind candidate i
        drafts, best = torch.stack([candidates, predicted]).tolist()
        accepted = agreeing(drafts[1:], best)
        cache.truncate(chain.length + accepted + 1)
        judged_at = clock(device)

        kept = cut(best[: accepted + 1], max_new_tokens - len(answer.ids), eos_ids)
        whole = len(kept) == accepted + 1
        answer.ids += kept
        answer.candidates.append(drafts)
        answer.accepted.append(min(accepted, len(kept)))
        answer.reached.append(min(accepted + 1, steps) if whole else len(kept))
        if not finished(answer.ids, max_new_tokens, eos_ids):
            root = predicted[accepted : accepted + 1]
            chain.extend(aux[0, : accepted + 1], predicted[: accepted + 1])
        answer.draft_seconds += drafted_at - now
        answer.verify_seconds += judged_at - drafted_at
        now = clock(device)
        answer.draft_seconds += now - judged_at
    answer.seconds = now - start
    return answer


def agreeing(drafts, best):
    """How many drafts, from the first on, are what the target would have written there."""
    for count, (draft, wanted) in enumerate(zip(drafts, best, strict=False)):
        if draft != wanted:
            return count
    return len(drafts)


def cut(ids, room, eos_ids):
    """`ids` up to the first end token, it included, and no more than `room`."""
    for position, token in enumerate(ids[:room]):
        if token in eos_ids:
            return ids[: position + 1]
    return ids[:room]


def finished(ids, max_new_tokens, eos_ids):
    return len(ids) >= max_new_tokens or ids[-1] in eos_ids


def clock(device):
    """Seconds, with the device's queue empty: else drafting's work would be billed to verification."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
