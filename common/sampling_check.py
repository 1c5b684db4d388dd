"""Does sampling with a drafter draw from the target's own distribution? Counted on many answers to one prompt."""

import torch

from common.decode import decode
from common.sampling import distribution

LENGTH = 3  # tokens: the one that prefill gives, and two that drafts are judged for
BATCH = 64  # answers drawn at once
CELL = 5  # expected count from which an answer is a cell of its own; all others are one together


@torch.inference_mode()
def check_sampling(model, prompt_ids, draws, sampling, drafter, steps, topk, draft_tokens, numbers):
    """Pearson's chi-square of `draws` answers of three tokens, decoded as always, against their exact chances.

    drafter, steps, topk, draft_tokens, numbers: as decode takes them. Returns a dict of chi_square, cells, p_value.
    """
    chances = exact_chances(model, prompt_ids, draws, sampling)
    counts = dict.fromkeys(chances, 0)
    for first in range(0, draws, BATCH):
        group = decode(model, [prompt_ids] * min(BATCH, draws - first), LENGTH, frozenset(), drafter, steps, topk, draft_tokens, sampling,
                       numbers)
        for answer in group.answers:
            if tuple(answer.ids) in counts:
                counts[tuple(answer.ids)] += 1
    observed = torch.tensor([*counts.values(), draws - sum(counts.values())], dtype=torch.float64)
    expected = torch.tensor([*chances.values(), 1 - sum(chances.values())], dtype=torch.float64) * draws
    return {"draws": draws, **chi_square(observed, expected)}


def chi_square(observed, expected):
    """Of counts float64 [C]: the last cell is merged into the one before when it expects too little."""
    if len(expected) > 1 and expected[-1] < CELL:
        observed, expected = (torch.cat([part[:-2], part[-2:].sum()[None]]) for part in (observed, expected))
    statistic = float(((observed - expected) ** 2 / expected.clamp_min(1e-12)).sum())
    freedom = len(expected) - 1
    p_value = float(torch.special.gammaincc(*torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)))
    return {"chi_square": round(statistic, 3), "cells": len(expected), "p_value": p_value if freedom else None}


def exact_chances(model, prompt_ids, draws, sampling):
    """{answer of LENGTH ids: its chance} of all that are expected CELL times or more in so many draws, from the target alone."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        longer, prefixes = {}, list(found)
        for first in range(0, len(prefixes), BATCH):
            part = prefixes[first : first + BATCH]
            _, last = model.states(torch.tensor([[*prompt_ids, *prefix] for prefix in part], device=model.device))
            chances, ids = distribution(model.logits(last[:, -1]), sampling)  # [B, C]
            for i, prefix in enumerate(part):
                whole = found[prefix] * chances[i].double()
                for place in (whole * draws >= CELL).nonzero()[:, 0].tolist():
                    token = place if ids is None else int(ids[i, place])
                    longer[(*prefix, token)] = float(whole[place])
        found = longer
    return found
