"""What a draft vocabulary of each size would cover, cost and reach, before anything is trained; and a drafter cut to one."""

from contextlib import suppress
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from common.cli import Progress, UserError, say
from common.decode import decode
from common.drafter import Drafter, captured_layers, drafter_config
from common.figures import accept_figures, figure_class, rounded
from common.files import replace_file
from common.prompts import heldout_prompts
from common.target import check_same_target
from common.target_model import TargetModel
from common.training import DRAFTED, draft_hits, simulate
from common.ttt import make_batch, supervised_rows

SAMPLES = 256  # held-out ones that are walked over, at most
SOURCES = 40  # that are told apart, the largest
DRAWN = 8  # of them in a plot
TIMED_TOKENS, TIMED_PROMPTS, TURNS = 17, 2, 2  # a drafter's decoding is timed over so many tokens, prompts, and rounds of all drafters


def pruned(drafter, rows):
    """A full-vocabulary Drafter cut to the lm_head rows of target ids int64 [D]; everything else is shared. None keeps all rows."""
    if rows is None:
        return drafter
    with torch.device("meta"):
        cut = Drafter({**drafter.config, "draft_vocab_size": len(rows)})
    head = drafter.lm_head.weight
    cut.load_state_dict({**drafter.state_dict(), "lm_head.weight": head[torch.as_tensor(rows, device=head.device)]}, assign=True)
    cut.inverse_frequencies = drafter.inverse_frequencies  # a buffer that is not in the state
    return cut.eval()


def check_fits(folder, drafter, target, tokenizer, force, layers=None):
    """Refuse the drafter in `folder` where it is not for the target with these facts, the tokenizer with this hash, or these layers.

    Returns warnings: what force lets pass, and that a drafter does not say what it was trained for. Other sizes are always refused.
    """
    config, trained = drafter.config, drafter.config.get("training") or {}
    made_for = {**(trained.get("target") or {**target, "name": "an unnamed target"}), "vocab_size": config["vocab_size"],
                "hidden_size": config["target_hidden_size"]}
    warnings = [check_same_target(made_for, target, f"the drafter {folder} was", force)]
    if not trained.get("target"):
        warnings.append(f"{folder} does not say which target it was trained for; only the sizes were compared")
    if trained.get("tokenizer_sha256", tokenizer) != tokenizer:
        warnings.append(f"{folder} was trained with tokenizer {str(trained['tokenizer_sha256'])[:12]}, {str(tokenizer)[:12]} is wanted")
        if not force:
            raise UserError(f"{warnings[-1]}; use the drafter, shards and map that belong together (--force goes on all the same)")
    if layers and (own := captured_layers(config, target["num_layers"], folder)) != layers:
        warnings.append(f"{folder} reads layers {own}, the shards hold {layers}: they were not extracted for it")
        if not force:
            raise UserError(f"{warnings[-1]}; count the shards that it was trained on (--force goes on all the same)")
    return [warning for warning in warnings if warning]


def coverage_curve(counted, heldout, order, sizes):
    """[{draft_vocab, coverage, coverage_heldout}] of the maps of `sizes`; order: int64 [V] ids as a draft vocabulary takes them."""
    shares = [np.cumsum(counts[order]) / counts.sum() if counts.any() else None for counts in (counted, heldout)]  # [V] each
    return [{"draft_vocab": size, "coverage": float(shares[0][size - 1]),
             "coverage_heldout": None if shares[1] is None else float(shares[1][size - 1])} for size in sizes]


def layer_multiply_adds(target):
    """Multiply-adds per token of a drafter's decoder layer, None when the target's text config does not say enough."""
    from transformers import AutoConfig

    text = dict(target["text_config"])
    with suppress(TypeError, ValueError):  # no model type, or one with its own code: the file's own entries have to do
        text = AutoConfig.for_model(**text).to_dict()  # fills in what the library takes for granted
    known = SimpleNamespace(text=text, hidden_size=target["hidden_size"], vocab_size=target["vocab_size"], num_layers=0,
                            model_class="")
    try:
        config = drafter_config(known, 1, [1, 2, 3])
        with torch.device("meta"):
            drafter = Drafter(config)
    except (KeyError, UserError) as error:
        say(f"the share of a drafting step is unknown: the target's text config does not say enough ({error})")
        return None
    return sum(weight.numel() for weight in drafter.midlayer.parameters() if weight.dim() == 2)


def head_costs(sizes, target):
    """[{draft_vocab, parameters, bytes (bfloat16), share of a drafting step's multiply-adds or None}]; target: its facts()."""
    hidden, layer = target["hidden_size"], layer_multiply_adds(target)
    return [{"draft_vocab": size, "parameters": size * hidden, "bytes": 2 * size * hidden,
             "share": None if layer is None else size * hidden / (size * hidden + layer)} for size in sizes]


def coverage_by_source(parts, order, sizes, names):
    """{name: supervised_tokens, and coverage and coverage_heldout at each of `sizes`} of the largest sources; {} where there is one.

    parts: as Shards.supervised gives them; order: int64 [V] ids as a draft vocabulary takes them; sizes: ascending.
    """
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    counts = np.zeros((len(names), 2, len(sizes) + 1), dtype=np.int64)  # by source, held out, and first size that holds the token
    for ids, aside, source in parts:
        first = np.searchsorted(sizes, rank[ids], side="right")
        counts += np.bincount((source.astype(np.int64) * 2 + aside) * (len(sizes) + 1) + first, minlength=counts.size).reshape(counts.shape)
    totals = counts.sum((1, 2))
    kept = [n for n in np.argsort(-totals, kind="stable").tolist() if totals[n]]
    groups = {names[n] or "(none named)": counts[n] for n in kept[:SOURCES]}
    if len(kept) > SOURCES:
        groups[f"({len(kept) - SOURCES} others)"] = counts[kept[SOURCES:]].sum(0)
    shares = {}
    for name, group in groups.items() if len(groups) > 1 else ():
        covered = [(row.cumsum()[:-1] / row.sum()).tolist() if row.any() else None for row in group]
        shares[name] = {"supervised_tokens": int(group.sum()), "coverage": covered[0], "coverage_heldout": covered[1]}
    return shares


@torch.inference_mode()
def expected_lengths(shards, target, maps, steps, acceptance, pilot):
    """{size: (ceiling, expected accept length)} of vocabularies `maps`, {D: target ids int64 [D], None for the full one}.

    The ceiling is the accept length of a drafter that misses only what its vocabulary lacks, walked over held-out answers. What is
    expected is that walk with the own hits of `pilot`, (Drafter, its rows), or, where that is empty, with a share `acceptance` of them,
    drawn. Raises UserError without held-out samples, and for a pilot of other layers.
    """
    samples = shards.heldout.nonzero()[0][:SAMPLES]
    if not len(samples):
        raise UserError(f"{shards.folder} holds no held-out samples, on which --predict goes; extract with --heldout")
    if pilot:
        config, layers = pilot[0].config, shards.manifest["layers"]
        if (stated := captured_layers(config, target.num_layers, "the pilot")) != layers:
            raise UserError(f"the pilot reads layers {stated}, {shards.folder} holds {layers}; give another --pilot")
        if max(maps) > config["draft_vocab_size"]:
            say(f"the pilot has {config['draft_vocab_size']} rows: what it would reach with more is at least what is told")
    names = DRAFTED if pilot else ("input_ids", "loss_mask", "target_argmax")
    embedding = target.embedding().float() if pilot else None
    known = {size: None if rows is None else torch.from_numpy(np.isin(np.arange(target.vocab_size), rows)) for size, rows in maps.items()}
    generator, counts = torch.Generator().manual_seed(0), {size: torch.zeros(2, 2, steps, dtype=torch.int64) for size in maps}
    for first in range(0, len(samples), 8):
        batch = make_batch([shards.sample(int(number), names) for number in samples[first : first + 8]])
        rows, supervised = supervised_rows(batch["loss_mask"], batch["bounds"], steps)
        at = rows[None] + torch.arange(1, steps + 1)[:, None]  # [K, R] the row where the target chooses what is drafted
        chosen = batch["target_argmax"][at.clamp(max=len(batch["input_ids"]) - 1)]
        hits = (draft_hits(pilot[0], embedding, batch, pilot[1], steps)[1] if pilot
                else torch.rand(supervised.shape, generator=generator) < acceptance)
        for size, inside in known.items():
            possible = supervised if inside is None else supervised & inside[chosen]
            for n, found in enumerate((possible, possible & hits)):
                counts[size][n] += simulate(batch["loss_mask"], batch["bounds"], rows, found).sum(0)
    lengths = {size: [accept_figures(*part.tolist())[0] for part in both] for size, both in counts.items()}
    if None in lengths[max(maps)]:
        raise UserError(f"the held-out answers of {shards.folder} are too short to predict from; extract longer ones")
    return lengths


def predict(shards, target, maps, steps, lengths, dtype, trust_remote_code=False):
    """What drafters with vocabularies `maps` would reach here, one prompt at a time: a dict for vocab_map.json, key `prediction`.

    lengths: of expected_lengths. Every step is timed with an untrained drafter of that size, as times do not depend on what was learnt.

        tokens/s = n / (prefill + (n - 1) / accept length * (steps * draft + verify)), n: tokens of a mean held-out answer
    """
    model = TargetModel(target, shards.manifest["layers"], dtype, trust_remote_code=trust_remote_code)
    model.check_logits()
    times = step_times(model, maps, steps, shards)
    answer = max(2, round(shards.index[shards.heldout.nonzero()[0][:SAMPLES], 5].mean()))
    plain = times["prefill_ms"] + (answer - 1) * times["plain_ms"]
    sizes = []
    for size, draft_ms in times.pop("draft_ms").items():
        ceiling, expected = lengths[size]
        milliseconds = times["prefill_ms"] + (answer - 1) / expected * (steps * draft_ms + times["verify_ms"])
        sizes.append({"draft_vocab": size, "ceiling": rounded(ceiling), "accept_length": rounded(expected), "draft_ms": draft_ms,
                      "tokens_per_second": rounded(1000 * answer / milliseconds), "speed_up": rounded(plain / milliseconds)})
    return {"steps": steps, "dtype": str(model.dtype).removeprefix("torch."), "device": model.device.type,
            "threads": torch.get_num_threads(), "target_sha256": shards.manifest["target"]["tensors_sha256"], "answer_tokens": answer,
            **times, "sizes": sizes}


@torch.inference_mode()
def step_times(model, maps, steps, shards):
    """Median milliseconds of plain decoding's step, of a verification, of reading a prompt, and of a drafting step by size."""
    target = model.target
    embedding = target.embedding().to(model.device, model.dtype)
    with torch.device(model.device):
        full = Drafter(drafter_config(target, target.vocab_size, shards.manifest["layers"])).to(model.dtype).eval()
    drafters = {size: (pruned(full, rows), embedding, None if rows is None else torch.as_tensor(rows, device=model.device), None)
                for size, rows in maps.items()}
    prompts = [conversation.script[0] for conversation in heldout_prompts(shards, TIMED_PROMPTS)]
    limits = min(TIMED_TOKENS, target.text["max_position_embeddings"] - steps - 1 - max(map(len, prompts)))
    if limits < 3:
        raise UserError(f"the prompts of {shards.folder} leave no room for an answer in the target's positions, to time one")
    found = {size: [] for size in (0, *maps)}  # 0: plain decoding
    progress = Progress((TURNS + 1) * len(found), "decodings", "timing")
    for turn in range(TURNS + 1):
        for size, groups in found.items():
            progress.update(1)
            for prompt in prompts:
                group = decode(model, [prompt], limits if turn else 2, set(), drafters.get(size, ()), steps, 1, steps + 1)
                if turn:  # the first, short round warms up
                    groups.append(group)
    progress.close()

    def milliseconds(groups, read):
        return rounded(1000 * median(seconds for group in groups for seconds in read(group)))

    drafted = [group for size in maps for group in found[size]]
    return {"plain_ms": milliseconds(found[0], lambda group: group.verify_seconds),
            "prefill_ms": milliseconds(found[0], lambda group: [group.seconds - sum(group.verify_seconds)]),
            "verify_ms": milliseconds(drafted, lambda group: group.verify_seconds),
            "draft_ms": {size: rounded(milliseconds(found[size], lambda group: group.draft_seconds) / steps) for size in maps}}


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
