"""All that is drawn: an evaluation, a training, the choice of a draft vocabulary. matplotlib is imported only here, only when asked for."""

import math
import os
import tempfile

import numpy as np

from common.accept import names
from common.cli import UserError
from common.files import replace_file

PNG = b"\x89PNG\r\n\x1a\n"  # how one begins


def plot(path, summary):
    """Write a PNG: accept length with its interval per drafter and category, acceptance per depth, and, where drafters have different
    draft vocabularies, the speed-up (without it tokens/s or the accept length) over their size."""
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
    """The speed-up over the draft vocabulary (tokens/s without plain decoding, else simulated accept lengths): measured points with the
    legend's numbers, predicted ones hollow."""
    kinds = (("speed_up", "speed_up", "speed-up over plain decoding"), ("tokens_per_second", "tokens_per_second", "tokens/s"),
             ("simulated_accept_length", "accept_length", "simulated accept length"))
    key, predicted_key, title = next((kind for kind in kinds if any(entry.get(kind[0]) for entry in entries)), kinds[-1])
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
    sizes = sorted({entry["draft_vocab"] for entry in entries} - {None})
    axes.set(xlabel=f"draft vocabulary{'; hollow: predicted' if predicted else ''}", xscale="log",
             ylabel=title)
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


def check_plot(path, out=None):
    """Refuse a --plot that could not be written in the end, or that would replace anything but a PNG. out: where --out is."""
    figure_class()
    try:
        tempfile.TemporaryFile(dir=path.absolute().parent).close()  # permissions alone do not tell: root has them where nothing can be made
        usable = not path.is_dir() and (out is None or os.path.realpath(path) != os.path.realpath(out))
    except OSError:
        usable = False
    if not usable:
        raise UserError(f"--plot {path} cannot be written; give a file of its own in a folder that exists and can be written to")
    if path.exists() and not (path.is_file() and path.open("rb").read(len(PNG)) == PNG):
        raise UserError(f"--plot {path} is there already and is no PNG, which alone is replaced; give the name of a new file")


def figure_class():
    """matplotlib's Figure, imported only where something is plotted."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib, which is not installed; pip install matplotlib, or leave --plot out") from None
    rcParams["text.parse_math"] = False  # dollars in a name are no formula
    return Figure


DRAWN = 8  # of them in a plot


def plot_vocabulary(path, title, curve, sources, costs, prediction):
    """Write a PNG: coverage over the size, counted, held out and by source; the head's cost; and tokens/s where predicted.

    curve: vocab_map.json's; sources: as coverage_by_source gives them at the curve's sizes; costs: head_costs of the chosen sizes.
    """
    figure = figure_class()(figsize=(15 if prediction else 10.5, 4.8), layout="constrained")
    axes = figure.subplots(1, 3 if prediction else 2)
    chosen = [cost["draft_vocab"] for cost in costs]
    first = next(n for n, point in enumerate(curve) if point["draft_vocab"] >= chosen[0] / 8)
    sizes = [point["draft_vocab"] for point in curve[first:]]
    for name, part in list(sources.items())[:DRAWN]:
        label = name if part["coverage_heldout"] else f"{name} (counted)"
        axes[0].plot(sizes, (part["coverage_heldout"] or part["coverage"])[first:], linewidth=0.8, alpha=0.7, label=label)
    axes[0].plot(sizes, [point["coverage"] for point in curve[first:]], "k--", label="all, counted")
    best = "coverage" if curve[0]["coverage_heldout"] is None else "coverage_heldout"
    if best == "coverage_heldout":
        axes[0].plot(sizes, [point[best] for point in curve[first:]], "k", linewidth=2, label="all, held out")
    for point in curve:
        if point["draft_vocab"] in chosen[:-1]:
            axes[0].plot(point["draft_vocab"], point[best], "ko", markersize=4)
            axes[0].annotate(f"{point[best]:.1%}", (point["draft_vocab"], point[best]), textcoords="offset points", xytext=(3, -13))
    axes[0].set_ylabel("share of supervised tokens covered")
    axes[0].legend(fontsize="small", title="by source, held out" if sources else None, title_fontsize="small")
    axes[1].plot(chosen, [cost["bytes"] / 2**20 for cost in costs], "o-")
    for cost in costs:
        share = "" if cost["share"] is None else f"{cost['share']:.0%}"
        axes[1].annotate(share, (cost["draft_vocab"], cost["bytes"] / 2**20), textcoords="offset points", xytext=(-4, 8), ha="right",
                         fontsize="small")
    axes[1].set_ylabel("lm_head, MiB in bfloat16 (%: of a step's multiply-adds)")
    if prediction:
        lengths = [size["accept_length"] for size in prediction["sizes"]]
        axes[2].plot(chosen, [size["tokens_per_second"] for size in prediction["sizes"]], "o-",
                     label=f"with a drafter, accept lengths {lengths[0]:.2f} to {lengths[-1]:.2f}")
        plain = [size["tokens_per_second"] / size["speed_up"] for size in prediction["sizes"]]
        axes[2].plot(chosen, plain, color="grey", linestyle=":", label="plain decoding")
        axes[2].set(ylabel=f"predicted tokens/s, {prediction['steps']} steps, {prediction['dtype']}, {prediction['device']}")
        axes[2].legend(fontsize="small", loc="lower left")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("draft vocabulary")
        axis.grid(alpha=0.3)
    for axis in axes[1:]:
        axis.set_xticks(chosen, [f"{size:,}" for size in chosen], rotation=30, ha="right")
        axis.margins(x=0.15, y=0.15)
        axis.set_ylim(bottom=0)
    axes[0].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.suptitle(title, fontsize="medium")
    replace_file(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))
