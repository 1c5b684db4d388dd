#!/usr/bin/env python3
"""Choose the draft vocabulary: the D target tokens that the drafter can propose, and what that choice costs and covers.

Counts the supervised tokens of hidden-state shards, or of a file of conversations, takes the D most frequent ones with the
end-of-sequence and chat tokens always among them, and writes the map that train_drafter.py --vocab-map reads. With --prune it cuts
a full-vocabulary drafter to that map instead; with --from-checkpoint it writes out the map of a drafter.
"""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from common.accept import accept_figures, rounded
from common.cli import Parser, Progress, UserError, finite, human_bytes, in_range, positive_int, run, say
from common.conversations import add_data_arguments, count_text, longest_sample, prepare, read_rows
from common.decode import decode
from common.drafter import Drafter, captured_layers, drafter_config, load_drafter, save_drafter
from common.files import TEMPORARY, check_output_folder, read_json, replace_folder, sha256_file
from common.loss import DRAFTED, draft_hits, simulate
from common.plots import check_plot, plot_vocabulary
from common.rendering import Renderer, chat_ids
from common.shards import Shards, check_shards, open_shards_target, other_template
from common.target import chat_template_sha256, check_same_target, end_ids, load_tokenizer, open_target, stop_ids, tokenizer_sha256
from common.target_model import TargetModel
from common.ttt import make_batch, supervised_rows
from common.vocab import MAP_FILE, MAP_FILES, check_size, count_ids, load_map, map_sha256, ranking, rows_to_d2t, save_map, shortened
from eval_speculative import heldout_prompts

TARGET_KEYS = ("name", "tensors_sha256", "text_config_sha256", "vocab_size", "hidden_size")
MADE_OF = ("shards_sha256", "data_sha256", "tokenizer_sha256", "chat_template_sha256", "template_kwargs", "max_length", "heldout", "system",
           "first_shards")
MARKERS = {"tool calls": ("tool", "function"), "thinking": ("think", "channel")}  # parts of chat tokens, by what they are for


class Corpus(NamedTuple):
    """What is counted. `parts()` goes over (ids int32 [n], held out bool [n], source int32 [n]) of its supervised tokens."""

    parts: object
    sources: list
    special: dict  # {"eos": [ids], "chat": {token: id}}
    target: dict  # the target's facts
    facts: dict  # for vocab_map.json: where the counts are from
    shards: Shards | None = None  # None for a file


def parse_arguments():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--shards", type=Path, metavar="DIR",
        help="count these shards of extract_hidden_states.py; no default. Their held-out samples are not counted, only covered")
    add("--verify", action="store_true", help="first check the sha256 of every shard; default no: it reads all of them")
    add("--first-shards", type=positive_int, metavar="N",
        help="count the first N shards, beside the held-out ones, of an extraction with --max-disk-gb that may still be at work; default "
             "all of a finished one")
    add("--data", metavar="FILE",
        help="count the answers in this file of JSON lines (- is stdin) instead, as --target's tokenizer and template write them: no model "
             "runs. A drafter is asked for what the target answers: where these answers are not its own, --shards is the better count")
    add("--target", metavar="MODEL", help="folder or hub id of the target, for --data; with --shards or --vocab-map it must be theirs; "
        "default for --predict: where the shards say. Only its tokenizer, lm_head and embedding are read, unless --predict runs it")
    add_data_arguments(parser)
    add("--draft-vocab", metavar="N[,N...]",
        help="rows of the drafter's lm_head; several with commas are counted once and written to OUT/N/ each. No default: "
             "it is a decision between the cost and the coverage that this script prints")
    add("--out", required=True, type=Path, metavar="DIR",
        help="folder of the map (with --prune of the drafter): new, empty, or an earlier one of the same data and size, which is replaced; "
             "no default")
    add("--from-checkpoint", type=Path, metavar="DRAFTER", help="write out this drafter's own map, and count nothing; default no")
    add("--prune", type=Path, metavar="DRAFTER",
        help="cut this full-vocabulary drafter to the counted map, without training: OUT is then a drafter; default no")
    add("--vocab-map", type=Path, metavar="DIR", help="with --prune: cut to this map, and count nothing; default: count")
    add("--plot", type=Path, metavar="PNG", help="also plot coverage and cost by size, and --predict's speeds; default no. A PNG that "
        "is there is replaced")
    add("--predict", type=positive_int, metavar="STEPS",
        help="also run the target on a few held-out prompts, time verifications and drafting steps of every size on this machine, and "
             "predict accept length and tokens/s of so many drafts per verification; default no: it loads the target")
    add("--pilot", type=Path, metavar="DRAFTER",
        help="a drafter at hand, of any size, whose hits on the held-out answers --predict expects of the others as well; default none")
    add("--acceptance", type=in_range(0, 1),
        help="without --pilot, the share of drafts that --predict takes to be right where the vocabulary has the token; default 0.6, a "
             "guess, of rare tokens as of frequent ones, which undervalues small sizes: a pilot is better")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"],
        help="of --predict's target and drafters; default auto, the target's own, as it is served")
    add("--trust-remote-code", action="store_true", help="run code that comes with the target; default no, since it can do anything")
    add("--revision", metavar="NAME", help="of a hub id; default its main one")
    add("--force", action="store_true",
        help="replace a map that was made of other shards or another size, and prune or pilot a drafter of another target; default: refuse")
    args = parser.parse_args()
    args.regenerate = False
    counted = [f"--{key.replace('_', '-')}" for key in ("shards", "data", "from_checkpoint", "vocab_map") if getattr(args, key)]
    if len(counted) != 1:
        raise UserError(f"{' and '.join(counted) or 'nothing'} given: one of --shards, --data, --from-checkpoint, and with --prune also "
                        f"--vocab-map, is wanted, where the vocabulary comes from")
    if args.vocab_map and not args.prune:
        raise UserError("--vocab-map is a map already; it goes with --prune, which cuts a drafter to it")
    idle = [key for key in ("max_length", "heldout", "template_kwargs", "system", "limit") if getattr(args, key) != parser.get_default(key)]
    if idle and not args.data:
        raise UserError(f"--{idle[0].replace('_', '-')} says how --data is read, which is not given; leave it out, or give --data")
    if args.first_shards and not args.shards:
        raise UserError("--first-shards says how much of --shards is counted, which is not given; leave it out, or give --shards")
    if args.data and not args.target:
        raise UserError("--data needs --target, whose tokenizer and chat template say what its tokens are")
    if (args.shards or args.data) and not args.draft_vocab:
        raise UserError("--draft-vocab is missing: it is a decision; several sizes, like 8000,16000,32000, show the trade")
    if (args.from_checkpoint or args.vocab_map) and args.draft_vocab:
        raise UserError(f"--draft-vocab {args.draft_vocab}: the size is that of {args.from_checkpoint or args.vocab_map}; leave it out")
    if args.prune and args.from_checkpoint:
        raise UserError("--prune cuts to a map, --from-checkpoint writes one; give one of them")
    if (args.predict or args.plot) and not (args.shards or args.data) or args.predict and not args.shards:
        raise UserError("--predict goes with --shards, on whose held-out answers it walks, and --plot with --shards or --data")
    for key in ("pilot", "acceptance", "dtype"):
        if getattr(args, key) is not None and not args.predict:
            raise UserError(f"--{key} is for --predict STEPS; add it, or leave --{key} out")
    if args.pilot and args.acceptance is not None:
        raise UserError("--acceptance is a guess for want of a --pilot, whose own hits are taken; leave one of them out")
    args.acceptance, args.dtype = args.acceptance or 0.6, args.dtype or "auto"
    if args.plot:
        check_plot(args.plot, args.out)
    return args


def main():
    args = parse_arguments()
    if args.from_checkpoint:
        return write_own_map(args)
    drafter, reduced = load_drafter(args.prune) if args.prune else (None, None)
    if reduced is not None:
        raise UserError(f"--prune {args.prune} has {len(reduced)} of {drafter.config['vocab_size']} rows already; give a drafter that was "
                        f"trained with --draft-vocab full")
    if args.vocab_map:
        rows, facts = load_map(args.vocab_map)
        if not {*TARGET_KEYS} <= (facts.get("target") or {}).keys():
            raise UserError(f"{args.vocab_map / MAP_FILE} does not say which target the map is for; make the map again")
        warnings = check_out(args.out, args, len(rows), facts)
        if args.target:
            made = SimpleNamespace(folder=args.vocab_map, manifest={"layers": None, "tokenizer_sha256": None, **facts})
            check_target(args, made, warnings)
        warnings += check_fits(args.prune, drafter, facts["target"], facts.get("tokenizer_sha256"), args.force)
        warnings += other_template(drafter.config.get("training") or {}, facts, args.vocab_map, f"the drafter {args.prune}")
        warn(warnings)
        return write(args, args.out, drafter, rows, {**facts, "warnings": warnings})

    corpus = open_shards(args) if args.shards else open_data(args)
    vocab_size = corpus.target["vocab_size"]
    sizes = parse_sizes(args.draft_vocab, vocab_size)
    outs = [args.out] if len(sizes) == 1 else [args.out / str(size) for size in sizes]
    if len(sizes) > 1:
        check_parent(args.out)
    warnings = [warning for out, size in zip(outs, sizes, strict=True) for warning in check_out(out, args, size, corpus.facts)]
    target = check_target(args, corpus.shards, warnings) if corpus.shards and (args.target or args.predict) else None
    pilot = load_drafter(args.pilot) if args.pilot else ()
    made_for = corpus.target, corpus.facts["tokenizer_sha256"], args.force
    if drafter:
        warnings += check_fits(args.prune, drafter, *made_for, corpus.shards and corpus.shards.manifest["layers"])
        trained = drafter.config.get("training") or {}
        warnings += other_template(trained, corpus.facts, args.shards or args.data, f"the drafter {args.prune}")
    warnings += check_fits(args.pilot, pilot[0], *made_for) if pilot else []

    counted, heldout = count_ids(corpus.parts(), vocab_size)
    if not counted.any():
        raise UserError(f"{args.shards or args.data} holds no supervised token outside the held-out samples: there is nothing to count")
    forced, missing = forced_ids(corpus.special, vocab_size)
    warn(warnings + missing)
    if len(forced) > sizes[0]:
        raise UserError(f"--draft-vocab {sizes[0]} cannot hold the {len(forced)} ids that must be in it (end of sequence and chat tokens)")
    order = ranking(counted, forced)
    maps = {size: np.sort(order[:size]) for size in sizes}
    say(f"{counted.sum()} supervised tokens counted, {np.count_nonzero(counted)} different ones, {heldout.sum()} held out; "
        f"{len(forced)} ids forced in: {', '.join(f'{name} ({i})' for i, name in forced.items()) or 'none'}")
    points = sorted({2**power for power in range(vocab_size.bit_length()) if len(forced) <= 2**power <= vocab_size} | {*sizes, vocab_size})
    curve = coverage_curve(counted, heldout, order, points)
    sources = coverage_by_source(corpus.parts(), order, points, corpus.sources)
    if args.predict:  # before anything is written, as it may refuse
        full_too = {**maps, vocab_size: None}
        lengths = expected_lengths(corpus.shards, target, full_too, args.predict, args.acceptance, pilot)
    made = []
    for out, (size, rows) in zip(outs, maps.items(), strict=True):
        at, told = points.index(size), warnings + missing
        uncounted = [i for i in rows.tolist() if counted[i] == 0 and i not in forced]
        if len(uncounted) > size / 2:
            told = [*told, f"draft vocabulary {size}: only {np.count_nonzero(counted[rows])} of its {size} rows were counted, "
                           f"{len(uncounted)} are filled by the lowest ids; give a smaller --draft-vocab, or more data"]
            warn(told[-1:])
        elif uncounted:
            say(f"draft vocabulary {size}: {len(uncounted)} of its rows were never counted and are filled by the lowest ids "
                f"({uncounted[0]}..{uncounted[-1]})")
        facts = {
            **corpus.facts, "supervised_tokens": int(counted.sum()), "supervised_tokens_heldout": int(heldout.sum()),
            "distinct_tokens": int(np.count_nonzero(counted)), **curve[at], "forced": {str(i): name for i, name in forced.items()},
            "filled": len(uncounted), "warnings": told, "curve": curve, "prediction": None,
            "sources": {name: {key: value[at] if isinstance(value, list) else value for key, value in part.items()}
                        for name, part in sources.items()},
        }
        made.append((out, rows, facts))
    summaries = [write(args, out, drafter, rows, facts) for out, rows, facts in made]
    costs, prediction = head_costs([*sizes, vocab_size], corpus.target), None
    print_table(costs, curve, sources, points)
    if args.predict:  # takes minutes: the maps are written before, and again with what was found
        prediction = {"pilot": args.pilot and str(args.pilot), "acceptance": None if pilot else args.acceptance,
                      **predict(corpus.shards, target, full_too, args.predict, lengths, args.dtype, args.trust_remote_code)}
        summaries = [write(args, out, drafter, rows, {**facts, "prediction": prediction}) for out, rows, facts in made]
        print_prediction(prediction)
    if args.plot:
        name = "/".join(Path(corpus.target["name"]).parts[-2:])
        title = f"{name}: {counted.sum():,} supervised tokens counted, {heldout.sum():,} held out"
        plot_vocabulary(args.plot, title, curve, sources, costs, prediction)
    return summaries[0] if len(summaries) == 1 else summaries


def write(args, out, drafter, rows, facts):
    """Write the map, or with --prune the cut drafter, and return its summary."""
    size, hash_ = len(rows), map_sha256(rows_to_d2t(rows))
    vocab_size, hidden = facts["target"]["vocab_size"], facts["target"]["hidden_size"]
    if drafter:
        trained = drafter.config.get("training") or {}
        own = {"draft_vocab": drafter.config["draft_vocab_size"], "drafter": str(args.prune),
               "model_sha256": sha256_file(args.prune / "model.safetensors"),
               **{key: facts.get(key) for key in MADE_OF}}
        training = {**trained, "draft_vocab": size, "map_sha256": hash_, "coverage": facts.get("coverage"),
                    "coverage_heldout": facts.get("coverage_heldout"), "pruned_from": own, "accept_length": None, "acceptance": None,
                    "warnings": [*(trained["warnings"] if isinstance(trained.get("warnings"), list) else []), *facts["warnings"]]}
        config = finite({**drafter.config, "draft_vocab_size": size, "training": training})
        replace_folder(out, lambda folder: save_drafter(folder, pruned(drafter, rows).state_dict(), config, rows))
    else:
        save_map(out, rows, vocab_size, finite(facts))
    return {"vocab_size": vocab_size, "draft_vocab": size, "coverage": facts.get("coverage"),
            "coverage_heldout": facts.get("coverage_heldout"), "lm_head_params": size * hidden, "lm_head_bytes": 2 * size * hidden,
            "forced": [int(i) for i in facts.get("forced") or ()], "filled": facts.get("filled"), "map_sha256": hash_,
            "sources": facts.get("sources"), "prediction": facts.get("prediction"), "pruned_from": str(args.prune) if drafter else None,
            "warnings": facts["warnings"], "out": str(out)}


def open_shards(args):
    """The Corpus of --shards."""
    shards = Shards(args.shards, args.verify, args.first_shards)
    manifest = shards.manifest
    if args.first_shards and not shards.followed:
        raise UserError(f"--first-shards is for an extraction with --max-disk-gb, and {args.shards} was made without; leave it out")
    return Corpus(shards.supervised, manifest["sources"], manifest["special_ids"], manifest["target"], {
        "target": {key: manifest["target"][key] for key in TARGET_KEYS}, "source": "shards", "shards": str(args.shards),
        **{key: manifest.get(key) for key in MADE_OF}, "shards_sha256": shards.sha256, "first_shards": args.first_shards}, shards)


def open_data(args):
    """The Corpus of --data: the answers in its rows, cut and set aside as the extraction would."""
    target = open_target(args.target, args.revision, args.trust_remote_code)
    tokenizer = load_tokenizer(target.folder, args.trust_remote_code)
    stops, max_length = stop_ids(target, tokenizer), longest_sample(args, target)
    rows, _, data_sha256 = read_rows(args.data, args.limit)
    if not rows:
        raise UserError(f"--data {args.data} holds no rows")
    samples, skipped, notes, sources = prepare(rows, Renderer(tokenizer, args.template_kwargs, stops), target, args, max_length)
    say(f"{len(samples)} of {len(rows)} rows; skipped: {count_text(Counter(reason for _, reason in skipped)) or 'none'}")
    for what, turns in notes.items():
        say(f"{turns} {what}")
    keep = [np.array(sample["loss_mask"], dtype=bool) for sample in samples]
    ids = np.concatenate([np.array(sample["input_ids"], dtype=np.int32)[mask] for sample, mask in zip(samples, keep, strict=True)])
    aside, source = (np.repeat([sample[key] for sample in samples], [mask.sum() for mask in keep]) for key in ("heldout", "source_id"))
    facts, special = target.facts(), {"eos": end_ids(target, tokenizer), "chat": chat_ids(tokenizer)}
    return Corpus(lambda: [(ids, aside.astype(bool), source)], sources, special, facts, {
        "target": {key: facts[key] for key in TARGET_KEYS}, "source": "data", "data": args.data, "shards_sha256": None,
        "tokenizer_sha256": tokenizer_sha256(target.folder), "chat_template_sha256": chat_template_sha256(tokenizer),
        "template_kwargs": args.template_kwargs, "data_sha256": data_sha256, "max_length": max_length,
        "heldout": args.heldout, "system": args.system, "first_shards": None})


def check_target(args, made, warnings):
    """The Target of --target, or else of `made`, Shards or what a map states in their place, which must have been made with it."""
    target = open_shards_target(made, args.target, args.revision, args.trust_remote_code)
    warnings += check_shards(made, target, target.facts(), made.manifest["layers"], args.force)
    return target


def write_own_map(args):
    """The summary of --from-checkpoint: a drafter's map in a folder of its own, for the target that the drafter names, or --target."""
    drafter, rows = load_drafter(args.from_checkpoint)
    config, trained = drafter.config, drafter.config.get("training") or {}
    if rows is None:
        raise UserError(f"{args.from_checkpoint} has the full vocabulary, {config['vocab_size']} rows, and no map to write out")
    target, tokenizer = trained.get("target"), trained.get("tokenizer_sha256")
    if args.target:
        opened = open_target(args.target, args.revision, args.trust_remote_code)
        target, tokenizer = opened.facts(), tokenizer_sha256(opened.folder)
    elif not tokenizer or not {*TARGET_KEYS} <= (target or {}).keys():
        raise UserError(f"{args.from_checkpoint} does not say which target it was trained for; name it with --target")
    facts = {"target": {key: target[key] for key in TARGET_KEYS}, "tokenizer_sha256": tokenizer, "source": "checkpoint",
             "chat_template_sha256": trained.get("chat_template_sha256"), "template_kwargs": trained.get("template_kwargs"),
             "drafter": str(args.from_checkpoint), "model_sha256": sha256_file(args.from_checkpoint / "model.safetensors"),
             "shards_sha256": None, "data_sha256": None, "coverage": trained.get("coverage"),
             "coverage_heldout": trained.get("coverage_heldout")}
    warnings = check_out(args.out, args, len(rows), facts) + check_fits(args.from_checkpoint, drafter, target, tokenizer, args.force)
    warn(warnings)
    return write(args, args.out, None, rows.numpy(), {**facts, "warnings": warnings})


def warn(warnings):
    for sentence in warnings:
        say(f"warning: {sentence}")


def parse_sizes(text, vocab_size):
    """Different sizes, ascending, from `32000` or `8000,32000`."""
    if text.strip() == "full":
        raise UserError("--draft-vocab full needs no map: give --draft-vocab full to train_drafter.py, without --vocab-map")
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--draft-vocab {shortened(text)} is neither a number like 32000 nor several like 8000,32000") from None
    for size in sizes:
        check_size(size, vocab_size)
        if size == vocab_size:
            raise UserError(f"--draft-vocab {size} is the target's whole vocabulary, which is `full` and needs no map: give "
                            f"--draft-vocab full to train_drafter.py")
    return sizes


def check_parent(out):
    """Refuse a folder for several maps that holds anything but folders named by a size."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder that is new or empty")
    for name in sorted(entry.name for entry in out.iterdir() if not TEMPORARY.match(entry.name)) if out.is_dir() else ():
        if not (name.isdigit() and (out / name).is_dir()):
            raise UserError(f"--out {out} holds something else ({name}); several maps want a folder that is new or holds such maps")


def check_out(out, args, size, facts):
    """Refuse a folder that holds anything but this map (or this pruned drafter) made earlier. Returns what --force lets pass."""
    marker, names = ("config.json", ("config.json", "model.safetensors")) if args.prune else (MAP_FILE, MAP_FILES)
    check_output_folder(out, marker)
    if not (out / marker).exists():
        return []
    extra = sorted({entry.name for entry in out.iterdir()} - set(names))
    if extra:
        raise UserError(f"--out {out} holds {extra[0]} beside {marker}, and replacing that would delete it; give another folder")
    old = read_json(out / marker)
    before = (old.get("training") or {}).get("pruned_from") if args.prune else old
    if args.prune and not isinstance(before, dict):
        raise UserError(f"--out {out} holds a drafter that was not made by pruning; give another folder")
    wanted = {**facts, "model_sha256": sha256_file(args.prune / "model.safetensors")} if args.prune else facts
    stated = {**wanted, **before} if before.get("shards_sha256") else before  # shards' hash says all, also where an older map says less
    compared = [("size", old.get("draft_vocab_size" if args.prune else "draft_vocab"), size),
                *((key.replace("_sha256", " hash"), stated.get(key), wanted.get(key)) for key in (*MADE_OF, "model_sha256"))]
    if not args.prune:
        compared.insert(1, ("target hash", (old.get("target") or {}).get("tensors_sha256"), facts["target"]["tensors_sha256"]))
    for key, found, here in compared:
        if found != here:
            message = f"--out {out} holds {'a drafter' if args.prune else 'a map'} of another {key} ({found} there, {here} here)"
            if not args.force:
                raise UserError(f"{message}; give another folder, or --force to replace it")
            return [f"{message}; replaced by --force"]
    return []


def forced_ids(special, vocab_size):
    """({id: name} of what must be in every map, sentences on what could not be found).

    special: {"eos": [ids], "chat": {token: id}} as extraction wrote it.
    """
    forced, missing = {}, []
    for name, i in [*special["chat"].items(), *(("end of sequence", i) for i in special["eos"])]:
        if i is None:
            missing.append(f"{name} has no id in the target's tokenizer and is not forced into the map")
        elif not 0 <= i < vocab_size:
            missing.append(f"{name} has id {i}, beyond the {vocab_size} rows of the target's lm_head, and is not forced into the map")
        else:
            forced.setdefault(i, name)
    if not special["eos"]:
        missing.append("the target's generation config and tokenizer name no end-of-sequence id: none is forced into the map")
    if not special["chat"]:
        missing.append("no chat token was found in the target's tokenizer: none is forced into the map")
    elif absent := [what for what, parts in MARKERS.items() if not any(part in name.lower() for name in special["chat"] for part in parts)]:
        say(f"the tokenizer has no tokens of its own for {' or '.join(absent)}: none to force in")
    return dict(sorted(forced.items())), missing


def print_table(costs, curve, sources, points):
    """The cost of each choice beside its coverage, the full vocabulary last; then coverage by source."""
    def percent(value):
        return "-" if value is None else f"{value:.2%}"

    at = {point["draft_vocab"]: point for point in curve}
    lines = [["draft vocab", "lm_head params", "in bfloat16", "share of a step", "coverage", "held out"]]
    for cost in costs:
        size = cost["draft_vocab"]
        lines.append([f"full {size}" if cost is costs[-1] else str(size), f"{cost['parameters']:,}", human_bytes(cost["bytes"]),
                      "unknown" if cost["share"] is None else f"{cost['share']:.1%}", percent(at[size]["coverage"]),
                      percent(at[size]["coverage_heldout"])])
    print_lines(lines)
    if sources:
        say("coverage by source, held out where something was:")
        shown = [points.index(cost["draft_vocab"]) for cost in costs[:-1]]
        print_lines([["source", "tokens", *(str(cost["draft_vocab"]) for cost in costs[:-1])], *(
            [name if part["coverage_heldout"] else f"{name} (counted)", f"{part['supervised_tokens']:,}",
             *(percent((part["coverage_heldout"] or part["coverage"])[n]) for n in shown)]
            for name, part in sources.items())])


def print_prediction(prediction):
    sizes = prediction["sizes"]
    print_lines([["draft vocab", "ceiling", "accept", "draft ms", "tok/s", "speed-up"], *(
        [str(size["draft_vocab"]), f"{size['ceiling']:.3f}", f"{size['accept_length']:.3f}", f"{size['draft_ms']:.2f}",
         f"{size['tokens_per_second']:.1f}", f"{size['speed_up']:.2f}"] for size in sizes)])
    best = max(size["speed_up"] for size in sizes)
    near = [str(size["draft_vocab"]) for size in sizes if size["speed_up"] > 0.95 * best]
    whose = f"with the hits of {prediction['pilot']}" if prediction["pilot"] else (
        f"if {prediction['acceptance']:.0%} of the drafts are right, of rare tokens as of frequent ones, which undervalues small sizes")
    say(f"predicted {whose}, {prediction['steps']} steps, one prompt at a time, {prediction['dtype']} on this machine "
        f"({prediction['device']}, {prediction['threads']} threads): a step of plain decoding {prediction['plain_ms']:.1f} ms, a "
        f"verification {prediction['verify_ms']:.1f} ms; within 5 % of the fastest: {', '.join(near)} rows. The ceiling is what a drafter "
        f"reaches that misses only what its vocabulary lacks")


def print_lines(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *cells in rows:
        say("  ".join([f"{first:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))]))


SAMPLES = 256  # held-out ones that are walked over, at most
SOURCES = 40  # that are told apart, the largest
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


if __name__ == "__main__":
    run(main)
