#!/usr/bin/env python3
"""Choose the draft vocabulary: the D target tokens that the drafter can propose, and what that choice costs and covers.

Reads the supervised tokens of hidden-state shards, takes the D most frequent ones with the end-of-sequence and chat tokens
always among them, and writes the map that train_drafter.py --vocab-map reads.
"""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from common.cli import Parser, UserError, human_bytes, run, say
from common.drafter import Drafter, drafter_config
from common.files import TEMPORARY, check_output_folder, read_json
from common.shards import Shards
from common.vocab import MAP_FILE, MAP_FILES, check_size, choose_rows, coverage, map_sha256, ranking, rows_to_d2t, save_map


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument("--shards", required=True, type=Path, metavar="DIR",
                        help="shards of extract_hidden_states.py; no default. Their held-out samples are not counted, only covered")
    parser.add_argument("--draft-vocab", required=True, metavar="N[,N...]",
                        help="rows of the drafter's lm_head; several with commas are counted once and written to OUT/N/ each. No default: "
                             "it is a decision between the cost and the coverage that this script prints")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR",
                        help="folder of the map: new, empty, or an earlier map of the same data and size, which is replaced; no default")
    parser.add_argument("--force", action="store_true",
                        help="replace a map that was made of other shards or another size (default: refuse, since drafters may rely on it)")
    return parser.parse_args()


def main():
    args = parse_arguments()
    sizes = parse_sizes(args.draft_vocab)
    shards = Shards(args.shards)
    target = shards.manifest["target"]
    vocab_size = target["vocab_size"]
    for size in sizes:
        check_size(size, vocab_size)
        if size == vocab_size:
            raise UserError(f"--draft-vocab {size} is the target's whole vocabulary, which is `full` and needs no map: give "
                            f"--draft-vocab full to train_drafter.py")
    outs = [args.out] if len(sizes) == 1 else [args.out / str(size) for size in sizes]
    if len(sizes) > 1:
        check_parent(args.out)
    inputs = {
        "tokenizer_sha256": shards.manifest["tokenizer_sha256"],
        "target": {key: target[key] for key in ("name", "tensors_sha256", "text_config_sha256", "vocab_size", "hidden_size")},
        "data_sha256": shards.manifest["data_sha256"], "shards_sha256": shards.sha256,
    }
    warnings = [warning for out, size in zip(outs, sizes, strict=True) if (warning := check_out(out, size, inputs, args.force))]

    counted, heldout = shards.supervised_counts(vocab_size)
    if not counted.any():
        raise UserError(f"{args.shards} holds no supervised token outside the held-out samples: there is nothing to count")
    forced, missing = forced_ids(shards.manifest["special_ids"], vocab_size)
    for sentence in warnings + missing:
        say(f"warning: {sentence}")
    maps = [(size, choose_rows(counted, size, forced)) for size in sizes]
    say(f"{counted.sum()} supervised tokens counted, {np.count_nonzero(counted)} different ones, {heldout.sum()} held out; "
        f"{len(forced)} ids forced in: {', '.join(f'{name} ({i})' for i, name in forced.items()) or 'none'}")

    summaries = []
    for out, (size, rows) in zip(outs, maps, strict=True):
        uncounted = [i for i in rows.tolist() if counted[i] == 0 and i not in forced]
        if uncounted:
            say(f"draft vocabulary {size}: {len(uncounted)} of its rows were never counted and are filled by the lowest ids "
                f"({uncounted[0]}..{uncounted[-1]})")
        summary = {
            "vocab_size": vocab_size, "draft_vocab": size, "coverage": coverage(counted, rows),
            "coverage_heldout": coverage(heldout, rows), "lm_head_params": size * target["hidden_size"], "forced": list(forced),
            "filled": len(uncounted), "map_sha256": map_sha256(rows_to_d2t(rows)), "warnings": warnings + missing, "out": str(out),
        }
        save_map(out, rows, vocab_size, {
            **inputs, "source": "shards", "shards": str(args.shards), "supervised_tokens": int(counted.sum()),
            "supervised_tokens_heldout": int(heldout.sum()), "distinct_tokens": int(np.count_nonzero(counted)),
            "coverage": summary["coverage"], "coverage_heldout": summary["coverage_heldout"],
            "forced": {str(i): name for i, name in forced.items()}, "filled": len(uncounted), "warnings": warnings + missing,
            "curve": coverage_curve(counted, heldout, forced),
        })
        summaries.append(summary)
    print_table(summaries, target)
    return summaries[0] if len(summaries) == 1 else summaries


def parse_sizes(text):
    """Different sizes, ascending, from `32000` or `8000,32000`."""
    if text.strip() == "full":
        raise UserError("--draft-vocab full needs no map: give --draft-vocab full to train_drafter.py, without --vocab-map")
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--draft-vocab {text} is neither a number like 32000 nor several like 8000,32000") from None


def check_parent(out):
    """Refuse a folder for several maps that holds anything but folders named by a size."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder that is new or empty")
    names = sorted(entry.name for entry in out.iterdir() if not TEMPORARY.match(entry.name)) if out.is_dir() else []
    for name in names:
        if not (name.isdigit() and (out / name).is_dir()):
            raise UserError(f"--out {out} holds something else ({name}); several maps want a folder that is new or holds such maps")


def check_out(out, size, inputs, force):
    """Refuse a folder that holds anything but this map made earlier. Returns a warning where --force overrides."""
    check_output_folder(out, MAP_FILE)
    if not (out / MAP_FILE).exists():
        return None
    extra = sorted({entry.name for entry in out.iterdir()} - set(MAP_FILES))
    if extra:
        raise UserError(f"--out {out} holds {extra[0]} beside a map, and replacing the map would delete it; give another folder")
    old = read_json(out / MAP_FILE)
    for key, found, wanted in (("size", old.get("draft_vocab"), size), ("shards hash", old.get("shards_sha256"), inputs["shards_sha256"]),
                               ("target hash", (old.get("target") or {}).get("tensors_sha256"), inputs["target"]["tensors_sha256"])):
        if found != wanted:
            message = f"--out {out} holds a map of another {key} ({found} there, {wanted} here)"
            if not force:
                raise UserError(f"{message}; give another folder, or --force to replace it")
            return f"{message}; replaced by --force"
    return None


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
    return dict(sorted(forced.items())), missing


def coverage_curve(counted, heldout, forced):
    """Coverage of the map of every size that is a power of two, from the forced ids up to V."""
    order = ranking(counted, forced)
    shares = [np.cumsum(counts[order]) / counts.sum() if counts.any() else None for counts in (counted, heldout)]  # [V] each
    sizes = [2**power for power in range(len(counted).bit_length()) if len(forced) <= 2**power <= len(counted)]
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


def print_table(summaries, target):
    """The cost of each choice beside its coverage, with `full` for comparison."""
    layer = layer_multiply_adds(target)
    full = {"draft_vocab": target["vocab_size"], "lm_head_params": target["vocab_size"] * target["hidden_size"], "coverage": 1.0,
            "coverage_heldout": None if summaries[0]["coverage_heldout"] is None else 1.0}
    say(f"{'draft vocab':>14} {'lm_head params':>15} {'in bfloat16':>12} {'share of a step':>16} {'coverage':>9} {'held out':>9}")
    for row in (*summaries, full):
        head = row["lm_head_params"]  # one multiply-add each per drafted token
        share = "unknown" if layer is None else f"{head / (head + layer):.1%}"
        heldout = "-" if row["coverage_heldout"] is None else f"{row['coverage_heldout']:.2%}"
        name = f"full {row['draft_vocab']}" if row is full else row["draft_vocab"]
        say(f"{name:>14} {head:>15,} {human_bytes(2 * head):>12} {share:>16} {row['coverage']:>9.2%} {heldout:>9}")


if __name__ == "__main__":
    run(main)
