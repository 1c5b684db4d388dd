"""The figures of an evaluation: from decoded answers to numbers with intervals, a table and a plot.

An answer has ids, and of every verification `accepted` (drafts of it that are in the answer) and `reached` (depths judged there);
a group has the answers that were decoded together, their wall time `seconds`, and draft_seconds and verify_seconds of its rounds.
"""

import math
import os
from statistics import median

import numpy as np

from common.cli import UserError
from common.files import replace_file

DRAWS = 2000  # of a bootstrap
FEW = 10  # prompts or samples
TIE = 4  # rounding steps between two logits: as much as another order of adding up moves them
SHOWN = 5  # differences of one drafter in the table
COLUMNS = [  # title, key, digits
    ("vocab", "draft_vocab", 0), ("cover", "coverage", 4), ("conc.", "concurrency", 0), ("accept", "accept_length", 3),
    ("95 %", "accept_length_interval", 2),
    ("d", "acceptance", 3), ("simul.", "simulated_accept_length", 3), ("95 %", "simulated_accept_length_interval", 2),
    ("s", "simulated_acceptance", 3), ("s. cover", "simulated_coverage", 4), ("tok/s", "tokens_per_second", 1),
    ("plain", "baseline_tokens_per_second", 1), ("speed-up", "speed_up", 2), ("95 %", "speed_up_interval", 2), ("draft ms", "draft_ms", 2),
    ("head", "head_share", 2), ("verify ms", "verify_ms", 1), ("identical", "identical", 0),
]
BESIDE = [  # measured, then predicted, then the accept length of a drafter that is always right where its vocabulary has the token
    ("vocab", "draft_vocab", 0), ("accept", "accept_length", 3), ("simul.", "simulated_accept_length", 3),
    ("pred. accept", "predicted.accept_length", 3), ("tok/s", "tokens_per_second", 1), ("pred. tok/s", "predicted.tokens_per_second", 1),
    ("speed-up", "speed_up", 2), ("pred. x", "predicted.speed_up", 2), ("draft ms", "draft_ms", 2), ("pred. ms", "predicted.draft_ms", 2),
    ("pred. ceiling", "predicted.ceiling", 3),
]


def figures(plain_groups, groups, steps):
    """The figures of one drafter over `groups`; plain_groups are the same prompts decoded without it, None where they were not.

    What was not measured is None.
    """
    ours = [answer for group in groups for answer in group.answers]
    accepted = [sum(answer.accepted) for answer in ours]
    verifications = [len(answer.accepted) for answer in ours]
    counts = [[sum(count >= depth for answer in ours for count in getattr(answer, name)) for depth in range(1, steps + 1)]
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
        "acceptance": rounded(acceptance), "tokens_per_second": rounded(rate), "baseline_tokens_per_second": rounded(plain_rate),
        "speed_up": rounded(rate / plain_rate) if rate and plain_rate else None, "speed_up_interval": speed_ups,
        "identical": identical, "prompts": len(ours),
        "draft_ms": rounded(1000 * median(drafting) / steps) if drafting else None,  # medians: other work on the machine
        "verify_ms": rounded(1000 * median(verifying)) if verifying else None,  # must not decide them
        "verifications": sum(verifications), "accepted": sum(accepted), "tokens": sum(tokens for tokens, _ in speed),
    }


def simulated_figures(counts):
    """The same of simulated walks. counts: int [S, 2, K], of every sample how often depth k was reached and accepted."""
    counts = np.asarray(counts)
    length, acceptance = accept_figures(*counts.sum(0).tolist())
    return {"simulated_accept_length": rounded(length),
            "simulated_accept_length_interval": accept_interval(counts[:, 1].sum(1), counts[:, 0, 0]),
            "simulated_acceptance": rounded(acceptance)}


def accept_figures(reached, accepted):
    """(accept length, acceptance per depth) from counts by depth: 1 + accepted / verifications, and accepted / reached."""
    if not reached or not reached[0]:
        return None, [None] * len(reached)
    return 1 + sum(accepted) / reached[0], [a / r if r else None for a, r in zip(accepted, reached, strict=True)]


def accept_interval(accepted, verifications):
    """95 % interval of the accept length over prompts: int [P] each."""
    return interval(np.stack([accepted, verifications], axis=1), lambda sums: 1 + sums[0] / sums[1])


def speed_interval(groups, others):
    """95 % interval of the tokens/s of `groups` over those of `others`, the same prompts decoded in another way."""
    rows = [_tokens(ours) + _tokens(theirs) for ours, theirs in zip(groups, others, strict=True)]
    return interval(rows, lambda sums: sums[0] * sums[3] / (sums[1] * sums[2]))


def interval(rows, statistic):
    """[low, high] of 95 % by bootstrap over rows [n, c]; statistic maps column sums [c, draws] to [draws]. None below two rows."""
    rows = np.asarray(rows, dtype=np.float64)
    if len(rows) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(rows), size=(DRAWS, len(rows)))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic([column[drawn].sum(1) for column in rows.T])
    values = values[np.isfinite(values)]  # a draw of prompts that end at their first token has no accept length
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


def table(summary):
    """The summary as lines, of at most 160 characters in the table; columns that nothing was measured for are left out. The verdict's
    sentences come last."""
    settings, entries = summary["settings"], summary["drafters"]
    words = [f"{key.replace('_', ' ')} {settings[key]}" for key in
             ("backend", "dtype", "device", "threads", "steps", "topk", "draft_tokens", "max_new_tokens", "temperature")
             if settings.get(key) is not None]
    if settings.get("temperature"):
        words += [f"{key.replace('_', ' ')} {settings[key]}" for key in ("top_p", "top_k", "seed")]
    samples = [entry["simulated_samples"] for entry in entries if "simulated_samples" in entry]
    what = [f"{summary['prompts']} prompts"] * bool(summary["prompts"]) + [f"{count} held-out samples simulated" for count in samples[:1]]
    lines = [f"{summary['target']}, {', '.join(what)}: {', '.join(words)}"]
    if min(filter(None, [summary["prompts"], *samples]), default=0) < FEW:
        lines.append(f"fewer than {FEW} prompts: the intervals are rough")
    first = f", {entries[0]['concurrency']} at once" if len({entry.get("concurrency") for entry in entries}) > 1 else ""
    for key, name in (("baseline_tokens_per_second", f"plain decoding{first}"),
                      ("transformers_tokens_per_second", "transformers' own generate, one prompt at a time")):
        if summary.get(key) is not None:
            lines.append(f"{name}: {summary[key]:.1f} tokens/s")
    if ratio := summary.get("plain_over_transformers"):
        lines[-1] += f"; plain decoding of the same prompts {ratio:.2f} times that"
    rows = []
    for name, entry in zip(names(entries), entries, strict=True):
        rows.append((name, entry))
        parts = entry.get("categories") or {}
        rows += [(f"  {category}", part) for category, part in parts.items() if len(parts) > 1]
    lines += grid(rows, COLUMNS)
    for name, entry in zip(names(entries), entries, strict=True):
        if differences := entry.get("differences"):
            lines.append(f"{name} differs from plain decoding in {len(differences)} of {entry['prompts']} prompts")
            for one in differences[:SHOWN]:
                lines.append(f"  line {one['line']}, answer token {one['position'] + 1}: {one['drafted']} for {one['plain']}")
                if (steps := one.get("rounding_steps")) is not None:
                    lines[-1] += (f", whose logit is {one['gap']:.4g} higher, {steps:g} rounding step{'s' * (steps != 1)} of "
                                  f"{settings['dtype']}: {'a near tie' if steps <= TIE else 'MORE than rounding'}")
            if len(differences) > SHOWN:
                lines.append(f"  and {len(differences) - SHOWN} more in the summary")
    for part in summary.get("verdict") or ():
        lines += part["sentences"]
    if prediction := summary.get("prediction"):
        lines += ["prediction beside measurement:", *grid(list(zip(names(entries), entries, strict=True)), BESIDE),
                  *prediction["sentences"]]
    return lines


def grid(rows, columns):
    """Lines of a table of (name, entry) rows and (title, key, digits) columns; those that no entry has a value for are left out."""
    found = [["drafter", *(name for name, _ in rows)]]
    for title, key, digits in columns:
        values = [_value(entry, key) for _, entry in rows]
        parts = [(title, values)]
        if key in ("acceptance", "simulated_acceptance"):
            depths = max((len(value) for value in values if value), default=0)
            parts = [(f"{title}{depth + 1}", [value[depth] if value else None for value in values]) for depth in range(depths)]
        found += [[name, *(_cell(value, digits) for value in part)] for name, part in parts
                  if any(value not in (None, "") for value in part)]
    widths = [max(map(len, column)) for column in found]
    widths[0] = min(widths[0], max(12, 160 - sum(widths[1:]) - 2 * len(widths[1:])))
    lines = []
    for first, *cells in zip(*found, strict=True):
        short = first if len(first) <= widths[0] else f"{first[: 2 if first[0] == ' ' else 0]}…{first[-widths[0] + 3 :]}"
        lines.append("  ".join([f"{short:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))]))
    return lines


def _value(entry, key):
    """entry["a"]["b"] for a.b; "" where categories have none, None where nothing was measured or predicted."""
    if key == "identical":
        return "-" if entry.get(key) is None else f"{entry[key]} of {entry['prompts']}"
    first, _, second = key.partition(".")
    value = entry.get(first, "")
    return value[second] if second and value else value


def _cell(value, digits):
    if isinstance(value, str):  # also "": drafters have it and categories do not
        return value
    if isinstance(value, list):
        return "-".join(f"{item:.{digits}f}" for item in value)
    return "-" if value is None else f"{value:.{digits}f}"


def names(entries):
    """What sets the drafters' folders apart, with the concurrency where there are several."""
    folders = [os.path.abspath(entry["drafter"]) for entry in entries]
    base = os.path.commonpath([os.path.dirname(folder) for folder in folders]) if folders else ""
    several = len({entry.get("concurrency") for entry in entries}) > 1
    return [os.path.relpath(folder, base) + (f" x{entry['concurrency']}" if several else "")
            for folder, entry in zip(folders, entries, strict=True)]


def plot(path, summary):
    """Write a PNG: accept length with its interval per drafter and category, acceptance per depth, and, where drafters have different
    draft vocabularies, tokens/s (without it the accept length) over their size."""
    Figure = figure_class()
    entries, sizes = summary["drafters"], {entry["draft_vocab"] for entry in summary["drafters"]} - {None}
    categories = list(dict.fromkeys(name for entry in entries for name in entry.get("categories") or {}))
    groups = [None, *(categories if len(categories) > 1 else [])]
    widths = [max(5, 0.35 * len(groups) * len(entries)), 5, *[7] * (len(sizes) > 1)]
    figure = Figure(figsize=(1 + sum(widths), 4.8 + 0.12 * len(entries)), layout="constrained")  # the legend grows with the drafters
    left, right, *more = figure.subplots(1, len(widths), width_ratios=widths)
    width = min(0.8 / max(len(entries), 1), 0.3)
    colors = [f"C{number}" if number < 10 else str(0.1 + 0.8 * (number % 10) / 10) for number in range(len(entries))]
    for number, (name, entry) in enumerate(zip(names(entries), entries, strict=True)):
        kind = "" if entry.get("accept_length") is not None else "simulated_"
        places, heights, errors = [], [], []
        for place, group in enumerate(groups):
            part = entry if group is None else (entry.get("categories") or {}).get(group, {})
            if (height := part.get(f"{kind}accept_length")) is not None:
                low, high = part.get(f"{kind}accept_length_interval") or (height, height)
                places.append(place + (number - (len(entries) - 1) / 2) * width)
                heights.append(height - 1)
                errors.append((max(height - low, 0), max(high - height, 0)))
        label = f"{f'{number + 1}  ' if more else ''}{name}{' (simulated)' if kind else ''}"
        left.bar(places, heights, width * 0.9, bottom=1, yerr=np.array(errors).T if errors else None, capsize=2, label=label,
                 color=colors[number])
        depths = [(depth, value) for depth, value in enumerate(entry.get(f"{kind}acceptance") or [], start=1) if value is not None]
        right.plot(*zip(*depths, strict=True) if depths else ([], []), marker="o", label=label, color=colors[number])
    left.set_xticks(range(len(groups)), ["all", *groups[1:]], **({"rotation": 30, "ha": "right"} if len(groups) > 4 else {}))
    left.set_ylabel("accept length (1 = nothing accepted), 95 % interval")
    right.set(xlabel="depth", ylabel="acceptance of the drafts that were reached", ylim=(0, 1.02),
              xticks=range(1, summary["settings"]["steps"] + 1))
    right.grid(alpha=0.3)
    for axes in more:
        plot_sizes(axes, entries, colors)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    settings = summary["settings"]
    figure.suptitle(f"{summary['target']}, {summary['prompts'] or 'no'} prompts, {settings.get('dtype')}, {settings['steps']} steps, "
                    f"topk {settings.get('topk')}, temperature {settings.get('temperature')}", fontsize="medium")
    replace_file(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def plot_sizes(axes, entries, colors):
    """Tokens/s over the draft vocabulary, or simulated accept lengths where none is timed: measured points with the legend's numbers,
    predicted ones hollow."""
    timed = any(entry.get("tokens_per_second") for entry in entries)
    key, predicted_key = ("tokens_per_second",) * 2 if timed else ("simulated_accept_length", "accept_length")
    points, predicted = [], {}
    for number, entry in enumerate(entries):
        if entry.get(key) is not None and entry["draft_vocab"]:
            points.append((entry["draft_vocab"], entry[key], number))
        if entry.get("predicted") and entry["predicted"][predicted_key] is not None:
            predicted[entry["draft_vocab"]] = entry["predicted"][predicted_key]
    axes.plot(*zip(*sorted(predicted.items()), strict=True) if predicted else ([], []), "o--", color="black", fillstyle="none",
              markersize=9, linewidth=0.5)
    left = False
    points.sort()
    for (size, value, number), before in zip(points, [None, *points], strict=False):
        left = before is not None and before[0] == size and not left  # numbers of points above each other
        axes.plot(size, value, "o", color=colors[number])
        axes.annotate(number + 1, (size, value), (-7 if left else 7, 0), textcoords="offset points", va="center",
                      ha="right" if left else "left", color=colors[number], fontweight="bold")
    for plain in {entry.get("baseline_tokens_per_second") for entry in entries} - {None} if timed else ():
        axes.axhline(plain, color="grey", linestyle="--", linewidth=0.8)
        axes.annotate("plain decoding", (0, plain), (3, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
                      fontsize="small", color="grey")
    sizes = sorted({entry["draft_vocab"] for entry in entries} - {None})
    axes.set(xlabel=f"draft vocabulary{'; hollow: predicted' if predicted else ''}", xscale="log",
             ylabel="tokens/s" if timed else "simulated accept length")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    axes.margins(0.1)
    axes.grid(alpha=0.3)


def plot_training(path, records):
    """Write a PNG of the records of metrics.jsonl: loss, held-out accept length, acceptance per depth and learning rate over the steps."""
    figure = figure_class()(figsize=(10, 7), layout="constrained")
    (loss, length), (acceptance, rate) = figure.subplots(2, 2, sharex=True)
    training = [record for record in records if "heldout" not in record]
    heldout = [record for record in records if "heldout" in record and record["accept_length"] is not None]
    steps, measured = ([record["step"] for record in part] for part in (training, heldout))
    loss.plot(steps, [record["loss"] for record in training], linewidth=0.8, label="of each step")
    loss.plot(measured, [record["loss"] for record in heldout], marker="o", label="held out")
    loss.set_ylabel("loss")
    loss.legend()
    length.plot(measured, [record["accept_length"] for record in heldout], marker="o")
    length.set_ylabel("held-out accept length (1 = nothing accepted)")
    for depth, values in enumerate(zip(*(record["acceptance"] for record in heldout), strict=True), start=1):
        acceptance.plot(measured, [math.nan if value is None else value for value in values], marker="o", label=f"depth {depth}")
    acceptance.set(ylabel="held-out acceptance of the drafts reached", xlabel="step", ylim=(0, 1.02))
    if heldout:
        acceptance.legend()
    rate.plot(steps, [record["lr"] for record in training])
    rate.set(ylabel="learning rate", xlabel="step")
    for axes in (loss, length, acceptance, rate):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    replace_file(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def figure_class():
    """matplotlib's Figure, imported only where something is plotted."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib, which is not installed; pip install matplotlib, or leave --plot out") from None
    rcParams["text.parse_math"] = False  # dollars in a name are no formula
    return Figure
