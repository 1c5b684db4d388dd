"""The figures of an evaluation: from decoded answers to numbers with intervals, as a table, a plot and a
summary hold them.

An answer has ids, and of every verification `accepted` (drafts of it that are in the answer) and `reached`
(depths judged there); a group has the answers that were decoded together, their wall time `seconds`, and
draft_seconds and verify_seconds of its rounds.
"""

import os
from statistics import median

import numpy as np

DRAWS = 2000  # of a bootstrap
FEW = 10  # prompts or samples


def figures(plain_groups, groups, steps):
    """The figures of one drafter over `groups`; plain_groups are the same prompts decoded without it, None
    where they were not.

    What was not measured is None.
    """
    ours = [answer for group in groups for answer in group.answers]
    accepted = [sum(answer.accepted) for answer in ours]
    verifications = [len(answer.accepted) for answer in ours]
    counts = [[sum(count >= depth for answer in ours for count in getattr(answer, name))
               for depth in range(1, steps + 1)]
              for name in ("reached", "accepted")]
    length, acceptance = accept_figures(*counts)
    speed, plain_speed, identical, speed_ups = [_tokens(group) for group in groups], [], None, None
    if plain_groups is not None:
        plain = [answer for group in plain_groups for answer in group.answers]
        identical = sum(a.ids == b.ids for a, b in zip(plain, ours, strict=True))
        plain_speed = [_tokens(group) for group in plain_groups]
        speed_ups = speed_interval(groups, plain_groups)
    rate, plain_rate = _rate(speed), _rate(plain_speed)
    drafting = [seconds for group in groups for seconds in group.draft_seconds]
    verifying = [seconds for group in groups for seconds in group.verify_seconds]
    return {
        "accept_length": rounded(length), "accept_length_interval": accept_interval(accepted, verifications),
        "acceptance": rounded(acceptance), "tokens_per_second": rounded(rate),
        "baseline_tokens_per_second": rounded(plain_rate),
        "speed_up": rounded(rate / plain_rate) if rate and plain_rate else None,
        "speed_up_interval": speed_ups,
        "identical": identical, "prompts": len(ours),
        # medians: other work on the machine
        "draft_ms": rounded(1000 * median(drafting) / steps) if drafting else None,
        "verify_ms": rounded(1000 * median(verifying)) if verifying else None,  # must not decide them
        "verifications": sum(verifications), "accepted": sum(accepted),
        "tokens": sum(tokens for tokens, _ in speed),
    }


def simulated_figures(counts):
    """The same of simulated walks. counts: int [S, 2, K], of every sample how often depth k was reached and
    accepted."""
    counts = np.asarray(counts)
    length, acceptance = accept_figures(*counts.sum(0).tolist())
    return {"simulated_accept_length": rounded(length),
            "simulated_accept_length_interval": accept_interval(counts[:, 1].sum(1), counts[:, 0, 0]),
            "simulated_acceptance": rounded(acceptance)}


def accept_figures(reached, accepted):
    """(accept length, acceptance per depth) from counts by depth: 1 + accepted / verifications, and accepted
    / reached."""
    if not reached or not reached[0]:
        return None, [None] * len(reached)
    by_depth = [a / r if r else None for a, r in zip(accepted, reached, strict=True)]
    return 1 + sum(accepted) / reached[0], by_depth


def accept_interval(accepted, verifications):
    """95 % interval of the accept length over prompts: int [P] each."""
    return interval(np.stack([accepted, verifications], axis=1), lambda sums: 1 + sums[0] / sums[1])


def speed_interval(groups, others):
    """95 % interval of the tokens/s of `groups` over those of `others`, the same prompts decoded in another
    way."""
    rows = [_tokens(ours) + _tokens(theirs) for ours, theirs in zip(groups, others, strict=True)]
    return interval(rows, lambda sums: sums[0] * sums[3] / (sums[1] * sums[2]))


def interval(rows, statistic):
    """[low, high] of 95 % by bootstrap over rows [n, c]; statistic maps column sums [c, draws] to [draws].
    None below two rows."""
    rows = np.asarray(rows, dtype=np.float64)
    if len(rows) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(rows), size=(DRAWS, len(rows)))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic([column[drawn].sum(1) for column in rows.T])
    # a draw of prompts that end at their first token has no accept length
    values = values[np.isfinite(values)]
    return rounded(np.quantile(values, [0.025, 0.975]).tolist()) if len(values) else None


def rounded(value):
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return None if value is None else round(float(value), 4)


def _tokens(group):
    return [sum(len(answer.ids) for answer in group.answers), group.seconds]


def _rate(speed):
    seconds = sum(seconds for _, seconds in speed)
    return sum(tokens for tokens, _ in speed) / seconds if seconds else None


def names(entries):
    """What sets the drafters' folders apart, with the concurrency where there are several."""
    folders = [os.path.abspath(entry["drafter"]) for entry in entries]
    base = os.path.commonpath([os.path.dirname(folder) for folder in folders]) if folders else ""
    several = len({entry.get("concurrency") for entry in entries}) > 1
    return [os.path.relpath(folder, base) + (f" x{entry['concurrency']}" if several else "")
            for folder, entry in zip(folders, entries, strict=True)]
