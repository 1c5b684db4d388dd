"""All that is drawn: an evaluation, a training, the choice of a draft vocabulary.

matplotlib is imported only here, and only when a plot was asked for.
"""

import math
import os
import tempfile

import numpy as np

from common.accept import names
from common.cli import UserError
from common.files import replace_file

PNG = b"\x89PNG\r\n\x1a\n"  # how one begins
DRAWN = 8  # sources in the plot of a vocabulary, the largest
# What the third part of an evaluation's plot shows: of the drafters, of the predicted, and how it is called.
OVER_SIZE = (("speed_up", "speed_up", "speed-up over plain decoding"),
             ("tokens_per_second", "tokens_per_second", "tokens/s"),
             ("simulated_accept_length", "accept_length", "simulated accept length"))


def check_plot(path, out=None):
    """Refuse a --plot that could not be written in the end, or that would replace anything but a PNG.

    out: where --out is. Raises UserError.
    """
    figure_class()
    try:
        # permissions alone do not tell: root has them where nothing can be made
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
        usable = not path.is_dir() and (out is None or os.path.realpath(path) != os.path.realpath(out))
    except OSError:
        usable = False
    if not usable:
        raise UserError(f"--plot {path} cannot be written; give a file of its own in a folder that exists "
                        "and can be written to")
    if path.exists() and not (path.is_file() and path.open("rb").read(len(PNG)) == PNG):
        raise UserError(f"--plot {path} is there already and is no PNG, which alone is replaced; give the "
                        "name of a new file")


def figure_class():
    """matplotlib's Figure. Raises UserError where it is not installed."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib, which is not installed; pip install matplotlib, or leave "
                        "--plot out") from None
    rcParams["text.parse_math"] = False  # dollars in a name are no formula
    return Figure


def save(path, figure):
    replace_file(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def plot(path, summary):
    """Write a PNG of an evaluation's summary: accept length with its interval per drafter and category, and
    acceptance per depth; where draft vocabularies differ also what is reached over their size."""
    entries, settings = summary["drafters"], summary["settings"]
    categories = list(dict.fromkeys(name for entry in entries for name in entry.get("categories") or {}))
    groups = [None, *(categories if len(categories) > 1 else [])]
    several = len({entry["draft_vocab"] for entry in entries} - {None}) > 1
    widths = [max(5, 0.35 * len(groups) * len(entries)), 5, *([7] if several else [])]
    height = 4.8 + 0.12 * len(entries)  # the legend grows with the drafters
    figure = figure_class()(figsize=(1 + sum(widths), height), layout="constrained")
    left, right, *more = figure.subplots(1, len(widths), width_ratios=widths)
    greys = [str(0.1 + 0.8 * (number % 10) / 10) for number in range(len(entries))]
    colors = [f"C{number}" if number < 10 else greys[number] for number in range(len(entries))]
    for number, (name, entry) in enumerate(zip(names(entries), entries, strict=True)):
        kind = "" if entry.get("accept_length") is not None else "simulated_"
        label = f"{number + 1}  {name}" if several else name
        style = {"label": f"{label} (simulated)" if kind else label, "color": colors[number]}
        plot_lengths(left, entry, groups, kind, (number, len(entries)), style)
        acceptance = entry.get(f"{kind}acceptance") or []
        depths = [depth for depth, value in enumerate(acceptance, start=1) if value is not None]
        right.plot(depths, [acceptance[depth - 1] for depth in depths], marker="o", **style)
    slanted = {"rotation": 30, "ha": "right"} if len(groups) > 4 else {}
    left.set_xticks(range(len(groups)), ["all", *groups[1:]], **slanted)
    left.set_ylabel("accept length (1 = nothing accepted), 95 % interval")
    right.set(xlabel="depth", ylabel="acceptance of the drafts that were reached", ylim=(0, 1.02),
              xticks=range(1, settings["steps"] + 1))
    right.grid(alpha=0.3)
    for axes in more:
        plot_sizes(axes, entries, colors)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"{summary['target']}, {summary['prompts'] or 'no'} prompts, {settings.get('dtype')}, "
                    f"{settings['steps']} steps, topk {settings.get('topk')}, "
                    f"temperature {settings.get('temperature')}", fontsize="medium")
    save(path, figure)


def plot_lengths(axes, entry, groups, kind, place, style):
    """Bars of one drafter's accept lengths, over all prompts (None) and by category. place: (its number, of
    how many) beside each other; kind: what the names of the figures begin with."""
    number, count = place
    width = min(0.8 / count, 0.3)
    places, heights, errors = [], [], []
    for middle, group in enumerate(groups):
        part = entry if group is None else (entry.get("categories") or {}).get(group, {})
        height = part.get(f"{kind}accept_length")
        if height is None:
            continue
        low, high = part.get(f"{kind}accept_length_interval") or (height, height)
        places.append(middle + (number - (count - 1) / 2) * width)
        heights.append(height - 1)
        errors.append((max(height - low, 0), max(high - height, 0)))
    axes.bar(places, heights, width * 0.9, bottom=1, yerr=np.array(errors).T if errors else None, capsize=2,
             **style)


def plot_sizes(axes, entries, colors):
    """The speed-up over the draft vocabulary (tokens/s without plain decoding, else simulated accept
    lengths): measured points with the legend's numbers, predicted ones hollow."""
    measured = [kind for kind in OVER_SIZE if any(entry.get(kind[0]) for entry in entries)]
    key, predicted_key, title = (measured or OVER_SIZE[-1:])[0]
    points, predicted = [], {}
    for number, entry in enumerate(entries):
        if entry.get(key) is not None and entry["draft_vocab"]:
            points.append((entry["draft_vocab"], entry[key], number))
        if entry.get("predicted") and entry["predicted"][predicted_key] is not None:
            predicted[entry["draft_vocab"]] = entry["predicted"][predicted_key]
    axes.plot(sorted(predicted), [predicted[size] for size in sorted(predicted)], "o--", color="black",
              fillstyle="none", markersize=9, linewidth=0.5)
    left, before = False, None
    for size, value, number in sorted(points):
        left = size == before and not left  # numbers of points above each other
        before = size
        axes.plot(size, value, "o", color=colors[number])
        axes.annotate(number + 1, (size, value), (-7 if left else 7, 0), textcoords="offset points",
                      va="center",
                      ha="right" if left else "left", color=colors[number], fontweight="bold")
    sizes = sorted({entry["draft_vocab"] for entry in entries} - {None})
    hollow = "; hollow: predicted" if predicted else ""
    axes.set(xlabel=f"draft vocabulary{hollow}", xscale="log", ylabel=title)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    axes.margins(0.1)
    axes.grid(alpha=0.3)


def plot_training(path, records):
    """Write a PNG of the records of metrics.jsonl over the steps: loss, held-out accept length, acceptance
    per depth and learning rate."""
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
        shares = [math.nan if value is None else value for value in values]
        acceptance.plot(measured, shares, marker="o", label=f"depth {depth}")
    acceptance.set(ylabel="held-out acceptance of the drafts reached", xlabel="step", ylim=(0, 1.02))
    if heldout:
        acceptance.legend()
    rate.plot(steps, [record["lr"] for record in training])
    rate.set(ylabel="learning rate", xlabel="step")
    for axes in (loss, length, acceptance, rate):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    save(path, figure)


def plot_vocabulary(path, title, curve, sources, costs, prediction):
    """Write a PNG: coverage over the size, counted, held out and by source; the head's cost; and tokens/s
    where predicted.

    curve, sources: build_vocab_map.py's Coverage; costs: head_costs of the chosen sizes and the full one;
    prediction: vocab_map.json's, or None.
    """
    figure = figure_class()(figsize=(15 if prediction else 10.5, 4.8), layout="constrained")
    covered, *others = figure.subplots(1, 3 if prediction else 2)
    chosen = [cost["draft_vocab"] for cost in costs]
    plot_coverage(covered, curve, sources, chosen[:-1])
    sizes = [cost["bytes"] / 2**20 for cost in costs]
    others[0].plot(chosen, sizes, "o-")
    for cost, size in zip(costs, sizes, strict=True):
        if cost["share"] is not None:
            others[0].annotate(f"{cost['share']:.0%}", (cost["draft_vocab"], size),
                               textcoords="offset points",
                               xytext=(-4, 8), ha="right", fontsize="small")
    others[0].set_ylabel("lm_head, MiB in bfloat16 (%: of a step's multiply-adds)")
    if prediction:
        lengths = [size["accept_length"] for size in prediction["sizes"]]
        speeds = [size["tokens_per_second"] for size in prediction["sizes"]]
        plain = [size["tokens_per_second"] / size["speed_up"] for size in prediction["sizes"]]
        others[1].plot(chosen, speeds, "o-",
                       label=f"with a drafter, accept lengths {lengths[0]:.2f} to {lengths[-1]:.2f}")
        others[1].plot(chosen, plain, color="grey", linestyle=":", label="plain decoding")
        others[1].set_ylabel(f"predicted tokens/s, {prediction['steps']} steps, {prediction['dtype']}, "
                             f"{prediction['device']}")
        others[1].legend(fontsize="small", loc="lower left")
    for axes in (covered, *others):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("draft vocabulary")
        axes.grid(alpha=0.3)
    for axes in others:
        axes.set_xticks(chosen, [f"{size:,}" for size in chosen], rotation=30, ha="right")
        axes.margins(x=0.15, y=0.15)
        axes.set_ylim(bottom=0)
    covered.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.suptitle(title, fontsize="medium")
    save(path, figure)


def plot_coverage(axes, curve, sources, chosen):
    """Coverage from an eighth of the smallest chosen size on, with what the chosen ones reach."""
    first = next(n for n, point in enumerate(curve) if point["draft_vocab"] >= chosen[0] / 8)
    sizes = [point["draft_vocab"] for point in curve[first:]]
    for name, part in list(sources.items())[:DRAWN]:
        label = name if part["coverage_heldout"] else f"{name} (counted)"
        shares = part["coverage_heldout"] or part["coverage"]
        axes.plot(sizes, shares[first:], linewidth=0.8, alpha=0.7, label=label)
    axes.plot(sizes, [point["coverage"] for point in curve[first:]], "k--", label="all, counted")
    best = "coverage"
    if curve[0]["coverage_heldout"] is not None:
        best = "coverage_heldout"
        axes.plot(sizes, [point[best] for point in curve[first:]], "k", linewidth=2, label="all, held out")
    for point in curve:
        if point["draft_vocab"] in chosen:
            place = (point["draft_vocab"], point[best])
            axes.plot(*place, "ko", markersize=4)
            axes.annotate(f"{point[best]:.1%}", place, textcoords="offset points", xytext=(3, -13))
    axes.set_ylabel("share of supervised tokens covered")
    axes.legend(fontsize="small", title="by source, held out" if sources else None, title_fontsize="small")
