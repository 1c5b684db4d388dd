#!/usr/bin/env python3
"""Choose the draft vocabulary: the D target tokens that the drafter can propose, and what that choice costs
and covers.

Counts the supervised tokens of hidden-state shards, or of a file of conversations, takes the D most frequent
ones with the end-of-sequence and chat tokens always among them, and writes the map that train_drafter.py
--vocab-map reads. With --prune it cuts a full-vocabulary drafter to that map instead; with --from-checkpoint
it writes out the map of a drafter.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from common.accept import accept_figures, rounded
from common.cli import Parser, Progress, UserError, finite, human_bytes, positive_int, run, say
from common.conversations import add_data_arguments, count_text, longest_sample, prepare, read_rows
from common.decode import decode
from common.drafter import Drafter, captured_layers, drafter_config, load_drafter, save_drafter, weights_file
from common.files import TEMPORARY, check_output_folder, read_json, read_sealed, replace_folder, sha256_file
from common.loss import DRAFTED, draft_hits, simulate
from common.plots import check_plot, plot_vocabulary
from common.provenance import compare, made_for, target_record
from common.rendering import Renderer, chat_ids
from common.shards import Shards, check_shards, open_shards_target
from common.target import end_ids, load_tokenizer, open_target, stop_ids
from common.target_model import TargetModel
from common.ttt import make_batch, supervised_rows
from common.vocab import (
    MAP_FILE,
    MAP_FILES,
    check_size,
    count_ids,
    load_map,
    map_sha256,
    ranking,
    rows_to_d2t,
    save_map,
    shortened,
)

# What a map says of its target.
TARGET_KEYS = ("name", "tensors_sha256", "text_config_sha256", "vocab_size", "hidden_size")
# What the counts of a map depend on: a map of others is another map.
MADE_OF = ("shards_sha256", "data_sha256", "tokenizer_sha256", "tokenizer_probe_sha256",
           "chat_template_sha256", "template_kwargs", "max_length", "heldout", "system", "first_shards")
# Parts of the names of chat tokens, by what these are for.
MARKERS = {"tool calls": ("tool", "function"), "thinking": ("think", "channel")}
SOURCES = 40  # that are told apart, the largest
SAMPLES = 256  # held-out ones that --predict walks over, at most
# The share of drafts that --predict takes to be right without a --pilot, where the vocabulary has the token:
# a guess, the same for rare tokens as for frequent ones, which undervalues small sizes.
ACCEPTANCE = 0.6
# A drafter's decoding is timed over so many tokens, prompts, and rounds of all drafters.
TIMED_TOKENS, TIMED_PROMPTS, TURNS = 17, 2, 2


def parse_args():
    parser = Parser(__doc__, usage="%(prog)s --shards DIR --draft-vocab N --out DIR [options]")
    add = parser.add_argument_group("what is counted, and where the map goes").add_argument
    add("--shards", type=Path, metavar="DIR",
        help="shards of extract_hidden_states.py; their held-out samples are not counted, only covered")
    add("--data", metavar="FILE",
        help="instead of shards the answers in this file of JSON lines (- is stdin), as --target's tokenizer "
             "and template write them: no model runs. A drafter is asked for what the target answers: where "
             "these answers are not its own, --shards is the better count")
    add("--target", metavar="MODEL",
        help="folder or hub id of the target, for --data; with --shards or --vocab-map it must be theirs. "
             "Only its tokenizer, lm_head and embedding are read, unless --predict runs it; default where "
             "the shards say that it was")
    add("--draft-vocab", metavar="N[,N...]",
        help="rows of the drafter's lm_head; several are counted once and written to OUT/N/ each. No "
             "default: it is a decision between the cost and the coverage that this script prints")
    add("--out", required=True, type=Path, metavar="DIR",
        help="folder of the map (with --prune of the drafter): new, empty, or an earlier one of the same "
             "data and size, which is replaced")

    add_data_arguments(parser.add_argument_group("how --data is read"))

    add = parser.add_argument_group("a drafter at hand").add_argument
    add("--prune", type=Path, metavar="DRAFTER",
        help="cut this full-vocabulary drafter to the counted map, without training: OUT is then a drafter")
    add("--vocab-map", type=Path, metavar="DIR", help="with --prune: cut to this map, and count nothing")
    add("--from-checkpoint", type=Path, metavar="DRAFTER",
        help="write out this drafter's own map, and count nothing")

    add = parser.add_argument_group("what sizes would reach").add_argument
    add("--plot", type=Path, metavar="PNG",
        help="plot coverage and cost by size, and --predict's speeds; a PNG that is there is replaced")
    add("--predict", type=positive_int, metavar="STEPS",
        help="run the target on a few held-out prompts, time verifications and drafting steps of every size "
             "on this machine, and predict accept length and tokens/s of so many drafts per verification; "
             "default none, as it loads the target")
    add("--pilot", type=Path, metavar="DRAFTER",
        help="a drafter of any size, whose hits on the held-out answers --predict expects of the others as "
             f"well; default none: {ACCEPTANCE:.0%}% of the drafts are taken to be right, a guess that "
             "undervalues small sizes")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
        help="of --predict's target and drafters; default auto, the target's own, as it is served")

    add = parser.add_argument_group("rarely").add_argument
    add("--first-shards", type=positive_int, metavar="N",
        help="count the first N shards, beside the held-out ones, of an extraction with --max-disk-gb that "
             "may still be at work; default all of a finished one")
    add("--trust-remote-code", action="store_true",
        help="run code that comes with the target; default off, since it can do anything")
    add("--revision", metavar="NAME", help="of a hub id; default its main one")
    add("--force", action="store_true",
        help="replace a map that was made of other shards or another size, and prune or pilot a drafter of "
             "another target of the same sizes; default off: both are refused")
    parser.set_defaults(regenerate=False)  # the rows of --data are read as extraction reads answers
    args = parser.parse_args()
    check_args(args, parser)
    return args


def check_args(args, parser):
    """Refuse arguments that exclude each other, or that lack another one."""
    given = [flag(key) for key in ("shards", "data", "from_checkpoint", "vocab_map") if getattr(args, key)]
    if len(given) != 1:
        raise UserError(f"{' and '.join(given) or 'nothing'} given: one of --shards, --data, "
                        "--from-checkpoint, and with --prune also --vocab-map, is wanted, where the "
                        "vocabulary comes from")
    counted = args.shards or args.data
    if args.vocab_map and not args.prune:
        raise UserError("--vocab-map is a map already; it goes with --prune, which cuts a drafter to it")
    if args.from_checkpoint and args.prune:
        raise UserError("--prune cuts to a map, --from-checkpoint writes one; give one of them")
    for key in ("max_length", "heldout", "template_kwargs", "system", "limit"):
        if getattr(args, key) != parser.get_default(key) and not args.data:
            raise UserError(f"{flag(key)} says how --data is read, which is not given; leave it out, or give "
                            "--data")
    if args.first_shards and not args.shards:
        raise UserError("--first-shards says how much of --shards is counted, which is not given; leave it "
                        "out, or give --shards")
    if args.data and not args.target:
        raise UserError("--data needs --target, whose tokenizer and chat template say what its tokens are")
    if counted and not args.draft_vocab:
        raise UserError("--draft-vocab is missing: it is a decision; several sizes, like 8000,16000,32000, "
                        "show the trade")
    if not counted and args.draft_vocab:
        raise UserError(f"--draft-vocab {args.draft_vocab}: the size is that of "
                        f"{args.from_checkpoint or args.vocab_map}; leave it out")
    if args.predict and not args.shards or args.plot and not counted:
        raise UserError("--predict goes with --shards, on whose held-out answers it walks, and --plot with "
                        "--shards or --data")
    for key in ("pilot", "dtype"):
        if getattr(args, key) != parser.get_default(key) and not args.predict:
            raise UserError(f"{flag(key)} is for --predict STEPS; add it, or leave {flag(key)} out")
    if args.plot:
        check_plot(args.plot, args.out)


def flag(key):
    return f"--{key.replace('_', '-')}"


def main():
    args = parse_args()
    if args.from_checkpoint:
        return write_own_map(args)
    if args.vocab_map:
        return prune_to_map(args)
    drafter = load_full_drafter(args.prune) if args.prune else None
    corpus = open_shards(args) if args.shards else open_data(args)
    vocab_size = corpus.record["target"]["vocab_size"]
    sizes = parse_sizes(args.draft_vocab, vocab_size)
    outs = output_folders(args.out, sizes)

    warnings, target, pilot = [], None, ()
    for out, size in zip(outs, sizes, strict=True):
        warnings += check_out(out, size, corpus.facts, args)
    if corpus.shards and (args.target or args.predict):
        target = open_shards_target(corpus.shards, args.target, args.revision, args.trust_remote_code)
        warnings += check_shards(corpus.shards, target_record(target, target.facts()), args.force)
    if args.prune:
        warnings += check_drafter(args.prune, drafter, corpus.record, args.force)
    if args.pilot:
        pilot = load_drafter(args.pilot)
        warnings += check_drafter(args.pilot, pilot[0], corpus.record, args.force)

    counts = count(corpus, sizes[0])
    warnings += counts.missing
    warn(warnings)
    maps = {size: np.sort(counts.order[:size]) for size in sizes}
    coverage = measure_coverage(corpus, counts, sizes)
    if args.predict:  # before anything is written, as it may refuse
        maps_and_full = {**maps, vocab_size: None}
        lengths = expected_lengths(corpus.shards, target, maps_and_full, args.predict, pilot)

    choices = [choose(out, rows, corpus, counts, coverage, warnings)
               for out, rows in zip(outs, maps.values(), strict=True)]
    summaries = [write(choice, args.prune, drafter) for choice in choices]
    costs = head_costs([*sizes, vocab_size], corpus.record["target"])
    print_costs(costs, coverage)
    prediction = None
    if args.predict:  # takes minutes: the maps are written before, and again with what was found
        prediction = {"pilot": str(args.pilot) if pilot else None,
                      "acceptance": None if pilot else ACCEPTANCE,
                      **predict(corpus.shards, target, maps_and_full, args, lengths)}
        for choice in choices:
            choice.facts["prediction"] = prediction
        summaries = [write(choice, args.prune, drafter) for choice in choices]
        print_prediction(prediction)
    if args.plot:
        plot_vocabulary(args.plot, plot_title(corpus, counts), coverage.curve, coverage.sources, costs,
                        prediction)
    return summaries if len(sizes) > 1 else summaries[0]


def prune_to_map(args):
    """The summary of --prune with --vocab-map: a drafter cut to a map that is there."""
    drafter = load_full_drafter(args.prune)
    rows, facts = load_map(args.vocab_map)
    warnings = check_out(args.out, len(rows), facts, args)
    if args.target:
        target = open_target(args.target, args.revision, args.trust_remote_code)
        warnings += compare(made_for(facts), target_record(target, target.facts()), args.vocab_map,
                            args.force)
    warnings += check_drafter(args.prune, drafter, made_for(facts), args.force)
    warn(warnings)
    return write(Choice(args.out, rows, {**facts, "warnings": warnings}), args.prune, drafter)


def write_own_map(args):
    """The summary of --from-checkpoint: a drafter's map in a folder of its own, for the target that the
    drafter names, or --target."""
    drafter, rows = load_drafter(args.from_checkpoint)
    config, trained = drafter.config, drafter.config.get("training") or {}
    if rows is None:
        raise UserError(f"{args.from_checkpoint} has the full vocabulary, {config['vocab_size']} rows, and "
                        "no map to write out; give --draft-vocab full to train_drafter.py, which needs none")
    here = made_for(trained)
    if args.target:
        target = open_target(args.target, args.revision, args.trust_remote_code)
        here = target_record(target, target.facts())
    elif not here.get("tokenizer_sha256") or not {*TARGET_KEYS} <= (here.get("target") or {}).keys():
        raise UserError(f"{args.from_checkpoint} does not say which target it was trained for; name it with "
                        "--target")
    facts = {
        "target": map_target(here["target"]), "tokenizer_sha256": here["tokenizer_sha256"],
        "source": "checkpoint", "drafter": str(args.from_checkpoint),
        "model_sha256": sha256_file(weights_file(args.from_checkpoint)),
        **{key: trained[key] for key in ("chat_template_sha256", "template_kwargs", "coverage",
                                         "coverage_heldout") if key in trained},
    }
    warnings = check_out(args.out, len(rows), facts, args)
    warnings += check_drafter(args.from_checkpoint, drafter, {**made_for(facts), "target": here["target"]},
                              args.force)
    warn(warnings)
    return write(Choice(args.out, rows.numpy(), {**facts, "warnings": warnings}))


@dataclass
class Corpus:
    """What is counted, and what it was made with."""

    parts: Callable  # () -> of supervised tokens (ids int32 [n], held out bool [n], source int32 [n]), ...
    sources: list  # names, by source id
    special: dict  # {"eos": [ids], "chat": {token: id}}
    record: dict  # as in common/provenance.py
    made_of: dict  # the rest of what decides the counts
    shards: Shards | None = None  # None for a file

    @property
    def facts(self):
        """Of vocab_map.json, what says where the counts are from."""
        record = {key: value for key, value in self.record.items() if key != "layers"}
        return {**record, "target": map_target(self.record["target"]), **self.made_of}


def map_target(facts):
    return {key: facts[key] for key in TARGET_KEYS}


def open_shards(args):
    """The Corpus of --shards."""
    shards = Shards(args.shards, first=args.first_shards)
    if args.first_shards and not shards.followed:
        raise UserError(f"--first-shards is for an extraction with --max-disk-gb, and {args.shards} was made "
                        "without; leave it out")
    manifest = shards.manifest
    made_of = {"source": "shards", "shards": str(args.shards), "shards_sha256": shards.sha256,
               **{key: manifest[key] for key in ("data_sha256", "max_length", "heldout", "system")}}
    if args.first_shards:
        made_of["first_shards"] = args.first_shards
    return Corpus(shards.supervised, manifest["sources"], manifest["special_ids"], made_for(manifest),
                  made_of, shards)


def open_data(args):
    """The Corpus of --data: the answers in its rows, cut and set aside as the extraction would."""
    target = open_target(args.target, args.revision, args.trust_remote_code)
    tokenizer = load_tokenizer(target, args.trust_remote_code)
    max_length = longest_sample(args, target)
    rows, _, data_sha256 = read_rows(args.data, args.limit)
    if not rows:
        raise UserError(f"--data {args.data} holds no rows; one conversation a line is wanted")
    renderer = Renderer(tokenizer, args.template_kwargs, stop_ids(target, tokenizer))
    samples, skipped, notes, sources = prepare(rows, renderer, target, args, max_length)
    reasons = count_text(Counter(reason for _, reason in skipped)) or "none"
    say(f"{len(samples)} of {len(rows)} rows; skipped: {reasons}")
    for what, turns in notes.items():
        say(f"{turns} {what}")

    masks = [np.array(sample["loss_mask"], dtype=bool) for sample in samples]
    ids = np.concatenate([np.array(sample["input_ids"], dtype=np.int32)[mask]
                          for sample, mask in zip(samples, masks, strict=True)])
    lengths = [mask.sum() for mask in masks]
    heldout = np.repeat([bool(sample["heldout"]) for sample in samples], lengths)
    source = np.repeat([sample["source_id"] for sample in samples], lengths)
    special = {"eos": end_ids(target, tokenizer), "chat": chat_ids(tokenizer)}
    record = {**target_record(target, target.facts(), tokenizer), "template_kwargs": args.template_kwargs}
    made_of = {"source": "data", "data": args.data, "data_sha256": data_sha256, "max_length": max_length,
               "heldout": args.heldout, "system": args.system}
    return Corpus(lambda: [(ids, heldout, source)], sources, special, record, made_of)


def parse_sizes(text, vocab_size):
    """Different sizes, ascending, from `32000` or `8000,32000`."""
    if text.strip() == "full":
        raise UserError("--draft-vocab full needs no map: give --draft-vocab full to train_drafter.py, "
                        "without --vocab-map")
    if ",0" in text:
        raise UserError(f"--draft-vocab {shortened(text)}: no size begins with 0; write 32000, without a "
                        "separator, and several sizes as 8000,32000")
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--draft-vocab {shortened(text)} is neither a number like 32000 nor several like "
                        "8000,32000") from None
    for size in sizes:
        check_size(size, vocab_size)
        if size == vocab_size:
            raise UserError(f"--draft-vocab {size} is the target's whole vocabulary, which is `full` and "
                            "needs no map: give --draft-vocab full to train_drafter.py")
    return sizes


def output_folders(out, sizes):
    """The folder of each size: OUT, or of several OUT/N, where OUT may hold nothing but such folders."""
    if len(sizes) == 1:
        return [out]
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder that is new or empty")
    for entry in sorted(out.iterdir()) if out.is_dir() else ():
        if not (TEMPORARY.match(entry.name) or entry.name.isdigit() and entry.is_dir()):
            raise UserError(f"--out {out} holds something else ({entry.name}); several maps want a folder "
                            "that is new or holds such maps")
    return [out / str(size) for size in sizes]


def check_out(out, size, facts, args):
    """Refuse a folder that holds anything but this map (or this pruned drafter) made earlier.

    Returns what --force lets pass, in a list of at most one sentence.
    """
    kind, marker, names = "a map", MAP_FILE, MAP_FILES
    if args.prune:
        kind, marker, names = "a drafter", "config.json", ("config.json", "model.safetensors")
    check_output_folder(out, marker)
    if not (out / marker).exists():
        return []
    extra = sorted({entry.name for entry in out.iterdir()} - set(names))
    if extra:
        raise UserError(f"--out {out} holds {extra[0]} beside {marker}, and replacing that would delete it; "
                        "give another folder")
    here = {**facts, "draft_vocab": size}
    difference = pruned_difference(out, here, args.prune) if args.prune else map_difference(out, here)
    if difference is None:
        return []
    holds = f"--out {out} holds {kind} {difference}"
    if not args.force:
        raise UserError(f"{holds}; give another folder, or --force to replace it")
    return [f"{holds}; replaced by --force"]


def map_difference(out, here):
    """What sets the map in `out` apart from that of the facts `here`, None where it is the same."""
    try:
        there = read_sealed(out / MAP_FILE)
    except UserError:
        return "that was changed after it was written, or is of an earlier version"
    found, wanted = there["target"]["tensors_sha256"], here["target"]["tensors_sha256"]
    if found != wanted:
        return f"of another target hash ({found} there, {wanted} here)"
    return first_difference(there, here)


def pruned_difference(out, here, folder):
    """What sets the pruned drafter in `out` apart from that of `folder` cut to the map of `here`."""
    config = read_json(out / "config.json")
    there = (config.get("training") or {}).get("pruned_from")
    if not isinstance(there, dict):
        raise UserError(f"--out {out} holds a drafter that was not made by pruning; give another folder")
    here = {**here, "model_sha256": sha256_file(folder / "model.safetensors")}
    return first_difference({**there, "draft_vocab": config.get("draft_vocab_size")}, here)


def first_difference(there, here):
    for key in ("draft_vocab", *MADE_OF, "model_sha256"):
        if there.get(key) != here.get(key):
            name = "size" if key == "draft_vocab" else key.replace("_sha256", " hash")
            return f"of another {name} ({there.get(key)} there, {here.get(key)} here)"
    return None


def load_full_drafter(folder):
    drafter, rows = load_drafter(folder)
    if rows is not None:
        raise UserError(f"--prune {folder} has {len(rows)} of {drafter.config['vocab_size']} rows already; "
                        "give a drafter that was trained with --draft-vocab full")
    return drafter


def check_drafter(folder, drafter, here, force):
    """Sentences on what a drafter was trained for that is otherwise in the record `here`.

    Raises UserError for what is refused: sizes and layers always, as its config says them where its training
    block does not.
    """
    config, what = drafter.config, f"the drafter {folder}"
    trained = config.get("training") or {}
    made = made_for(trained)
    if "layers" in here:
        made["layers"] = captured_layers(config, here["target"]["num_layers"], folder,
                                         here["target"].get("model_class", ""))
    name = (trained.get("target") or {}).get("name") or "an unnamed target"
    sizes = {"name": name, "vocab_size": config["vocab_size"], "hidden_size": config["target_hidden_size"]}
    compare({"target": sizes}, here, what)
    return compare(made, here, what, force)


def warn(warnings):
    for sentence in warnings:
        say(f"warning: {sentence}")


@dataclass
class Counts:
    """How often each id is supervised, and the order in which a draft vocabulary takes the ids."""

    counted: np.ndarray  # int64 [V]
    heldout: np.ndarray  # int64 [V], in the samples set aside
    order: np.ndarray  # int64 [V]
    forced: dict  # {id: name} of what is in every map
    missing: list  # sentences on what should be, and could not be found


def count(corpus, least):
    """The Counts of a Corpus. Raises UserError where there are none, or more forced ids than `least`."""
    vocab_size = corpus.record["target"]["vocab_size"]
    counted, heldout = count_ids(corpus.parts(), vocab_size)
    if not counted.any():
        raise UserError(f"{corpus.made_of[corpus.made_of['source']]} holds no supervised token outside the "
                        "held-out samples: there is nothing to count; give more data")
    forced, missing = forced_ids(corpus.special, vocab_size)
    if len(forced) > least:
        raise UserError(f"--draft-vocab {least} cannot hold the {len(forced)} ids that must be in it (end of "
                        "sequence and chat tokens); give at least that")
    names = ", ".join(f"{name} ({i})" for i, name in forced.items()) or "none"
    say(f"{counted.sum()} supervised tokens counted, {np.count_nonzero(counted)} different ones, "
        f"{heldout.sum()} held out; {len(forced)} ids forced in: {names}")
    return Counts(counted, heldout, ranking(counted, forced), forced, missing)


def forced_ids(special, vocab_size):
    """({id: name} of what must be in every map, sentences on what could not be found).

    special: {"eos": [ids], "chat": {token: id}} as extraction wrote it.
    """
    forced, missing = {}, []
    for name, i in [*special["chat"].items(), *(("end of sequence", i) for i in special["eos"])]:
        if i < vocab_size:
            forced.setdefault(i, name)
        else:
            missing.append(f"{name} has id {i}, beyond the {vocab_size} rows of the target's lm_head, and is "
                           "not forced into the map")
    if not special["eos"]:
        missing.append("the target's generation config and tokenizer name no end-of-sequence id: none is "
                       "forced into the map")
    if not special["chat"]:
        missing.append("no chat token was found in the target's tokenizer: none is forced into the map")
    names = " ".join(special["chat"]).lower()
    absent = [what for what, parts in MARKERS.items() if not any(part in names for part in parts)]
    if names and absent:
        say(f"the tokenizer has no tokens of its own for {' or '.join(absent)}: none to force in")
    return dict(sorted(forced.items())), missing


@dataclass
class Coverage:
    """Shares of the supervised tokens that maps of several sizes hold, the full vocabulary last."""

    curve: list  # [{draft_vocab, coverage, coverage_heldout}] by size, ascending
    sources: dict  # {name: {supervised_tokens, coverage and coverage_heldout: [share at each of the curve]}}


def measure_coverage(corpus, counts, sizes):
    """The Coverage at `sizes`, at powers of two, and of the full vocabulary.

    Of the sources the largest are told apart, and none where there is only one. A share is None where nothing
    was held out, or nothing else.
    """
    vocab_size = len(counts.order)
    powers = [2**power for power in range(vocab_size.bit_length())]
    points = sorted({power for power in powers if power >= len(counts.forced)} | {*sizes, vocab_size})
    rank = np.empty(vocab_size, dtype=np.int64)
    rank[counts.order] = np.arange(vocab_size)
    columns = len(points) + 1
    # by source, held out or not, and the first size that holds the token; the last column stays 0
    table = np.zeros((len(corpus.sources), 2, columns), dtype=np.int64)
    for ids, heldout, source in corpus.parts():
        first = np.searchsorted(points, rank[ids], side="right")
        cells = (source.astype(np.int64) * 2 + heldout) * columns + first
        table += np.bincount(cells, minlength=table.size).reshape(table.shape)

    counted, heldout = covered_shares(table.sum(0))
    heldout = heldout or [None] * len(points)
    curve = [{"draft_vocab": size, "coverage": share, "coverage_heldout": aside}
             for size, share, aside in zip(points, counted, heldout, strict=True)]

    totals = table.sum((1, 2))
    largest = [n for n in np.argsort(-totals, kind="stable").tolist() if totals[n]]
    groups = {corpus.sources[n] or "(none named)": table[n] for n in largest[:SOURCES]}
    if len(largest) > SOURCES:
        groups[f"({len(largest) - SOURCES} others)"] = table[largest[SOURCES:]].sum(0)
    sources = {}
    for name, group in groups.items() if len(groups) > 1 else ():
        counted, heldout = covered_shares(group)
        sources[name] = {"supervised_tokens": int(group.sum()), "coverage": counted,
                         "coverage_heldout": heldout}
    return Coverage(curve, sources)


def covered_shares(group):
    """[share at each size, or None] of what was counted and of what was held out; group: int64 [2, P + 1]."""
    return [(row.cumsum()[:-1] / row.sum()).tolist() if row.any() else None for row in group]


@dataclass
class Choice:
    """The map of one size."""

    out: Path
    rows: np.ndarray  # int64 [D] target ids, ascending
    facts: dict  # of vocab_map.json


def choose(out, rows, corpus, counts, coverage, warnings):
    """The Choice of `rows`, with a warning where most of them were never counted."""
    size, counted = len(rows), counts.counted
    uncounted = [i for i in rows.tolist() if counted[i] == 0 and i not in counts.forced]
    if len(uncounted) > size / 2:
        warning = (f"draft vocabulary {size}: only {np.count_nonzero(counted[rows])} of its {size} rows were "
                   f"counted, {len(uncounted)} are filled by the lowest ids; give a smaller --draft-vocab, "
                   "or more data")
        warn([warning])
        warnings = [*warnings, warning]
    elif uncounted:
        say(f"draft vocabulary {size}: {len(uncounted)} of its rows were never counted and are filled by the "
            f"lowest ids ({uncounted[0]}..{uncounted[-1]})")
    at = next(n for n, point in enumerate(coverage.curve) if point["draft_vocab"] == size)
    sources = {name: {"supervised_tokens": part["supervised_tokens"],
                      "coverage": part["coverage"] and part["coverage"][at],
                      "coverage_heldout": part["coverage_heldout"] and part["coverage_heldout"][at]}
               for name, part in coverage.sources.items()}
    facts = {
        **corpus.facts, "supervised_tokens": int(counted.sum()),
        "supervised_tokens_heldout": int(counts.heldout.sum()),
        "distinct_tokens": int(np.count_nonzero(counted)),
        **coverage.curve[at], "forced": {str(i): name for i, name in counts.forced.items()},
        "filled": len(uncounted), "warnings": warnings, "curve": coverage.curve, "prediction": None,
        "sources": sources,
    }
    return Choice(out, rows, facts)


def write(choice, folder=None, drafter=None):
    """Write the map, or the drafter of `folder` cut to it, and return its summary."""
    rows, facts = choice.rows, choice.facts
    vocab_size, hidden = facts["target"]["vocab_size"], facts["target"]["hidden_size"]
    if drafter is None:
        save_map(choice.out, rows, vocab_size, finite(facts))
    else:
        config = finite(pruned_config(choice, folder, drafter.config))
        state = pruned(drafter, rows).state_dict()
        replace_folder(choice.out, lambda temporary: save_drafter(temporary, state, config, rows))
    return {
        "vocab_size": vocab_size, "draft_vocab": len(rows), "coverage": facts.get("coverage"),
        "coverage_heldout": facts.get("coverage_heldout"), "lm_head_params": len(rows) * hidden,
        "lm_head_bytes": 2 * len(rows) * hidden, "forced": [int(i) for i in facts.get("forced") or ()],
        "filled": facts.get("filled"), "map_sha256": map_sha256(rows_to_d2t(rows)),
        "sources": facts.get("sources"), "prediction": facts.get("prediction"),
        "pruned_from": None if drafter is None else str(folder), "warnings": facts["warnings"],
        "out": str(choice.out),
    }


def pruned_config(choice, folder, config):
    """The config.json of the drafter in `folder`, which has this one, once it is cut: measured is nothing."""
    facts, trained = choice.facts, config.get("training") or {}
    pruned_from = {"draft_vocab": config["draft_vocab_size"], "drafter": str(folder),
                   "model_sha256": sha256_file(weights_file(folder)),
                   **{key: facts.get(key) for key in MADE_OF}}
    told = trained.get("warnings")
    training = {
        **trained, "draft_vocab": len(choice.rows), "map_sha256": map_sha256(rows_to_d2t(choice.rows)),
        "coverage": facts.get("coverage"), "coverage_heldout": facts.get("coverage_heldout"),
        "pruned_from": pruned_from, "accept_length": None, "acceptance": None,
        "warnings": [*(told if isinstance(told, list) else []), *facts["warnings"]],
    }
    return {**config, "draft_vocab_size": len(choice.rows), "training": training}


def pruned(drafter, rows):
    """A full-vocabulary Drafter cut to the lm_head rows of target ids int64 [D]; everything else is shared.
    None keeps all rows."""
    if rows is None:
        return drafter
    with torch.device("meta"):
        cut = Drafter({**drafter.config, "draft_vocab_size": len(rows)})
    head = drafter.lm_head.weight
    kept = head[torch.as_tensor(rows, device=head.device)]
    cut.load_state_dict({**drafter.state_dict(), "lm_head.weight": kept}, assign=True)
    cut.inverse_frequencies = drafter.inverse_frequencies  # a buffer that is not in the state
    return cut.eval()


def head_costs(sizes, target):
    """[{draft_vocab, parameters, bytes (bfloat16), share of a drafting step's multiply-adds or None}];
    target: its facts()."""
    hidden, layer = target["hidden_size"], layer_multiply_adds(target)
    return [{"draft_vocab": size, "parameters": size * hidden, "bytes": 2 * size * hidden,
             "share": None if layer is None else size * hidden / (size * hidden + layer)} for size in sizes]


def layer_multiply_adds(target):
    """Multiply-adds per token of a drafter's decoder layer, None when the target's text config does not say
    enough."""
    from transformers import AutoConfig

    text = dict(target["text_config"])
    # no model type, or one with its own code: the file's entries have to do
    with suppress(TypeError, ValueError):
        text = AutoConfig.for_model(**text).to_dict()  # fills in what the library takes for granted
    known = SimpleNamespace(text=text, hidden_size=target["hidden_size"], vocab_size=target["vocab_size"],
                            num_layers=0, model_class="")
    try:
        config = drafter_config(known, 1, [1, 2, 3])
        with torch.device("meta"):
            drafter = Drafter(config)
    except (KeyError, UserError) as error:
        say("the share of a drafting step is unknown: the target's text config does not say enough "
            f"({error})")
        return None
    return sum(weight.numel() for weight in drafter.midlayer.parameters() if weight.dim() == 2)


@torch.inference_mode()
def expected_lengths(shards, target, maps, steps, pilot):
    """{D: (ceiling, expected accept length)} of vocabularies `maps`, {D: target ids int64 [D], None for all}.

    The ceiling is the accept length of a drafter that misses only what its vocabulary lacks, walked over
    held-out answers. What is expected is that walk with the own hits of `pilot`, (Drafter, its rows), or,
    where that is empty, with a share ACCEPTANCE of them, drawn. Raises UserError without held-out samples.
    """
    samples = shards.heldout.nonzero()[0][:SAMPLES]
    if not len(samples):
        raise UserError(f"{shards.folder} holds no held-out samples, on which --predict goes; extract with "
                        "--heldout")
    names, embedding = ("input_ids", "loss_mask", "target_argmax"), None
    if pilot:
        names, embedding = DRAFTED, target.embedding().float()
        pilot_rows = pilot[0].config["draft_vocab_size"]
        if max(maps) > pilot_rows:
            say(f"the pilot has {pilot_rows} rows: what it would reach with more is at least what is told")
    ids = np.arange(target.vocab_size)
    held = {size: torch.from_numpy(np.isin(ids, ids if rows is None else rows))  # bool [V]
            for size, rows in maps.items()}
    counts = {size: torch.zeros(2, 2, steps, dtype=torch.int64) for size in maps}  # possible and expected
    generator = torch.Generator().manual_seed(0)
    for first in range(0, len(samples), 8):
        batch = make_batch([shards.sample(int(number), names) for number in samples[first : first + 8]])
        rows, supervised = supervised_rows(batch["loss_mask"], batch["bounds"], steps)
        at = rows + torch.arange(1, steps + 1)[:, None]  # [K, R] where the target chooses what is drafted
        chosen = batch["target_argmax"][at.clamp(max=len(batch["input_ids"]) - 1)]
        if pilot:
            _, hits = draft_hits(pilot[0], embedding, batch, pilot[1], steps)
        else:
            hits = torch.rand(supervised.shape, generator=generator) < ACCEPTANCE
        for size in maps:
            possible = supervised & held[size][chosen]
            for n, found in enumerate((possible, possible & hits)):
                counts[size][n] += simulate(batch["loss_mask"], batch["bounds"], rows, found).sum(0)
    lengths = {size: [accept_figures(*part.tolist())[0] for part in both] for size, both in counts.items()}
    if None in lengths[max(maps)]:
        raise UserError(f"the held-out answers of {shards.folder} are too short to predict from; extract "
                        "longer ones")
    return lengths


def predict(shards, target, maps, args, lengths):
    """What drafters with vocabularies `maps` would reach here, one prompt at a time: a dict for
    vocab_map.json, key `prediction`.

    lengths: of expected_lengths. Every step is timed with an untrained drafter of that size, as times do not
    depend on what was learnt.

        tokens/s = n / (prefill + (n - 1) / accept length * (steps * draft + verify))

    where n is the tokens of a mean held-out answer.
    """
    model = TargetModel(target, shards.manifest["layers"], args.dtype,
                        trust_remote_code=args.trust_remote_code)
    model.check_logits()
    times = step_times(model, maps, args.predict, shards)
    draft_times = times.pop("draft_ms")
    answer = max(2, round(shards.index[shards.heldout.nonzero()[0][:SAMPLES], 5].mean()))
    plain = times["prefill_ms"] + (answer - 1) * times["plain_ms"]
    sizes = []
    for size, draft_ms in draft_times.items():
        ceiling, expected = lengths[size]
        verification = args.predict * draft_ms + times["verify_ms"]
        milliseconds = times["prefill_ms"] + (answer - 1) / expected * verification
        sizes.append({"draft_vocab": size, "ceiling": rounded(ceiling), "accept_length": rounded(expected),
                      "draft_ms": draft_ms, "tokens_per_second": rounded(1000 * answer / milliseconds),
                      "speed_up": rounded(plain / milliseconds)})
    return {"steps": args.predict, "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type, "threads": torch.get_num_threads(),
            "target_sha256": shards.manifest["target"]["tensors_sha256"], "answer_tokens": answer, **times,
            "sizes": sizes}


@torch.inference_mode()
def step_times(model, maps, steps, shards):
    """Median milliseconds of a step of plain decoding, of reading a prompt, of a verification, and by size of
    a drafting step."""
    target, device = model.target, model.device
    embedding = target.embedding().to(device, model.dtype)
    with torch.device(device):
        config = drafter_config(target, target.vocab_size, shards.manifest["layers"])
        full = Drafter(config).to(model.dtype).eval()
    drafters = {0: ()}  # 0: plain decoding
    for size, rows in maps.items():
        own = None if rows is None else torch.as_tensor(rows, device=device)
        drafters[size] = (pruned(full, rows), embedding, own, None)
    prompts = [ids for _, _, ids in shards.heldout_prompts(TIMED_PROMPTS)]
    room = target.text["max_position_embeddings"] - steps - 1 - max(map(len, prompts))
    tokens = min(TIMED_TOKENS, room)
    if tokens < 3:
        raise UserError(f"the prompts of {shards.folder} leave no room for an answer in the target's "
                        "positions, to time one; give shards with shorter held-out prompts")
    found = {size: [] for size in drafters}
    progress = Progress((TURNS + 1) * len(drafters), "decodings", "timing")
    for turn in range(TURNS + 1):
        for size, drafter in drafters.items():
            progress.update(1)
            for prompt in prompts:
                group = decode(model, [prompt], tokens if turn else 2, set(), drafter, steps, 1, steps + 1)
                if turn:  # the first, short round warms up
                    found[size].append(group)
    progress.close()
    drafted = [group for size in maps for group in found[size]]
    return {"plain_ms": middle(found[0], lambda group: group.verify_seconds),
            "prefill_ms": middle(found[0], lambda group: [group.seconds - sum(group.verify_seconds)]),
            "verify_ms": middle(drafted, lambda group: group.verify_seconds),
            "draft_ms": {size: rounded(middle(found[size], lambda group: group.draft_seconds) / steps)
                         for size in maps}}


def middle(groups, read):
    """Median milliseconds of the seconds that `read` finds in each Group."""
    return rounded(1000 * median(seconds for group in groups for seconds in read(group)))


def print_costs(costs, coverage):
    """The cost of each choice beside its coverage, the full vocabulary last; then coverage by source."""
    at = {point["draft_vocab"]: n for n, point in enumerate(coverage.curve)}
    lines = [["draft vocab", "lm_head params", "in bfloat16", "share of a step", "coverage", "held out"]]
    for cost in costs:
        size = cost["draft_vocab"]
        point = coverage.curve[at[size]]
        share = "unknown" if cost["share"] is None else f"{cost['share']:.1%}"
        lines.append([str(size), f"{cost['parameters']:,}", human_bytes(cost["bytes"]), share,
                      percent(point["coverage"]), percent(point["coverage_heldout"])])
    lines[-1][0] = f"full {lines[-1][0]}"
    print_lines(lines)
    if not coverage.sources:
        return
    say("coverage by source, held out where something was:")
    sizes = [cost["draft_vocab"] for cost in costs[:-1]]
    lines = [["source", "tokens", *map(str, sizes)]]
    for name, part in coverage.sources.items():
        shares = part["coverage_heldout"] or part["coverage"]
        label = name if part["coverage_heldout"] else f"{name} (counted)"
        lines.append([label, f"{part['supervised_tokens']:,}",
                      *(percent(shares[at[size]]) for size in sizes)])
    print_lines(lines)


def percent(share):
    return "-" if share is None else f"{share:.2%}"


def print_prediction(prediction):
    lines = [["draft vocab", "ceiling", "accept", "draft ms", "tok/s", "speed-up"]]
    for size in prediction["sizes"]:
        lines.append([str(size["draft_vocab"]), f"{size['ceiling']:.3f}", f"{size['accept_length']:.3f}",
                      f"{size['draft_ms']:.2f}", f"{size['tokens_per_second']:.1f}",
                      f"{size['speed_up']:.2f}"])
    print_lines(lines)
    best = max(size["speed_up"] for size in prediction["sizes"])
    near = [str(size["draft_vocab"]) for size in prediction["sizes"] if size["speed_up"] > 0.95 * best]
    if prediction["pilot"]:
        whose = f"with the hits of {prediction['pilot']}"
    else:
        whose = (f"if {prediction['acceptance']:.0%} of the drafts are right, of rare tokens as of frequent "
                 "ones, which undervalues small sizes")
    say(f"predicted {whose}, {prediction['steps']} steps, one prompt at a time, {prediction['dtype']} on "
        f"this machine ({prediction['device']}, {prediction['threads']} threads): a step of plain decoding "
        f"{prediction['plain_ms']:.1f} ms, a verification {prediction['verify_ms']:.1f} ms; within 5 % of "
        f"the fastest: {', '.join(near)} rows. The ceiling is what a drafter reaches that misses only what "
        "its vocabulary lacks")


def print_lines(rows):
    """A table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        say("  ".join([f"{first:{widths[0]}}", *padded]))


def plot_title(corpus, counts):
    name = "/".join(Path(corpus.record["target"]["name"]).parts[-2:])
    return f"{name}: {counts.counted.sum():,} supervised tokens counted, {counts.heldout.sum():,} held out"


if __name__ == "__main__":
    run(main)
