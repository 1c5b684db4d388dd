"""The draft vocabulary: which target ids the drafter's rows mean. Contract of t2d, d2t and vocab_map.json."""

from pathlib import Path

import numpy as np
import torch

from common.cli import UserError
from common.files import read_sealed, replace_folder, sha256_tensors, write_sealed

MAP_FILE = "vocab_map.json"
MAP_FILES = (MAP_FILE, "t2d.npy", "d2t.npy", "t2d.pt", "d2t.pt")


def count_ids(parts, vocab_size):
    """(int64 [V] counted, int64 [V] held out) occurrences of each id; parts: (ids [n], held out bool [n],
    ...)."""
    counted, heldout = np.zeros(vocab_size, dtype=np.int64), np.zeros(vocab_size, dtype=np.int64)
    for ids, aside, *_ in parts:
        counted += np.bincount(ids[~aside], minlength=vocab_size)
        heldout += np.bincount(ids[aside], minlength=vocab_size)
    return counted, heldout


def ranking(counts, forced):
    """All ids, int64 [V], in the order in which a draft vocabulary takes them: the `forced` ones, then by
    count.

    counts: int64 [V] occurrences of each id. Of equal counts the lower id comes first.
    """
    forced = np.array(sorted(set(forced)), dtype=np.int64)
    order = np.argsort(-counts, kind="stable")
    return np.concatenate([forced, order[~np.isin(order, forced)]])


def shortened(text):
    return text if len(text) <= 40 else f"{text[:40]}..."


def check_size(size, vocab_size):
    if not 1 <= size <= vocab_size:
        raise UserError(f"--draft-vocab {shortened(str(size))} is not in 1..{vocab_size} (the target's "
                        f"lm_head has {vocab_size} rows)")


def rows_to_d2t(rows):
    """int64 [D] OFFSETS from ascending target ids: target id = i + d2t[i]."""
    return rows - np.arange(len(rows), dtype=np.int64)


def coverage(counts, rows):
    """Share of the counted occurrences whose id is in `rows`; None when nothing was counted."""
    total = int(counts.sum())
    return float(counts[rows].sum() / total) if total else None


def least_coverage(promised):
    """The lowest coverage that still keeps a map's promise: half as many misses again and two points are let
    pass.

    Held-out coverage on other samples of the same kind scatters by less than that where it was measured
    (docs/vocabulary.md); another language or domain misses several times as much.
    """
    return 1 - 1.5 * (1 - promised) - 0.02


def check_coverage(found, facts, what, force=False, tokens="the supervised tokens here"):
    """Refuse a map that covers clearly less of `tokens`, `found`, than its `facts` promise, the lower of two.

    Returns a warning if forced, None where the promise is kept or there is none.
    """
    promises = [facts[key] for key in ("coverage_heldout", "coverage") if facts.get(key) is not None]
    if not promises or found >= least_coverage(min(promises)):
        return None
    message = (f"{what} covers {found:.2%} of {tokens} and promised {min(promises):.2%} (at least "
               f"{least_coverage(min(promises)):.2%} is wanted): it was counted on other data, and what it "
               "lacks can never be drafted")
    if not force:
        raise UserError(f"{message}; count a map on these shards with build_vocab_map.py, or --force to go "
                        "on with fewer accepted drafts")
    return message


def save_map(folder, rows, vocab_size, facts):
    """Write a map as one folder: t2d bool [V], d2t int64 [D], each as .npy and .pt, and vocab_map.json with
    `facts`.

    rows: int64 [D] ascending target ids. A map that is there is replaced.
    """
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[rows] = True
    d2t = rows_to_d2t(rows)

    def fill(temporary):
        np.save(temporary / "t2d.npy", t2d)
        np.save(temporary / "d2t.npy", d2t)
        torch.save(torch.from_numpy(t2d), temporary / "t2d.pt")
        torch.save(torch.from_numpy(d2t), temporary / "d2t.pt")
        stated = {"vocab_size": vocab_size, "draft_vocab": len(rows), "map_sha256": map_sha256(d2t)}
        write_sealed(temporary / MAP_FILE, {**stated, **facts})

    replace_folder(folder, fill)


def map_sha256(d2t):
    """Hash of a map's offsets, int64 [D], whatever file they came from."""
    return sha256_tensors([torch.as_tensor(d2t, dtype=torch.int64)])


def map_facts(folder, flag):
    """The dict of vocab_map.json in `folder`, which `flag` names. Raises UserError where there is none,
    saying what the folder is instead."""
    folder = Path(folder)
    if (folder / MAP_FILE).exists():
        return read_sealed(folder / MAP_FILE)
    sizes = sorted(int(entry.parent.name) for entry in folder.glob(f"*/{MAP_FILE}")
                   if entry.parent.name.isdecimal())
    if not folder.exists():
        found = "does not exist; build_vocab_map.py makes one"
    elif not folder.is_dir():
        found = "is no folder; build_vocab_map.py makes one"
    elif sizes:
        names = ", ".join(map(str, sizes))
        found = f"holds maps {names}: name one of them, like {folder / str(sizes[0])}"
    elif (folder / "config.json").exists():
        found = "is a drafter; build_vocab_map.py --from-checkpoint writes out its map"
    elif (folder / "manifest.json").exists():
        found = "holds shards; build_vocab_map.py --shards makes a map of them"
    else:
        found = f"holds no {MAP_FILE}; build_vocab_map.py makes one"
    raise UserError(f"{flag} {folder} {found}")


def load_map(folder):
    """(rows int64 [D] ascending target ids, facts of vocab_map.json), checked.

    Raises UserError when a file is missing, t2d and d2t disagree, or d2t holds absolute ids instead of
    offsets.
    """
    folder, arrays = Path(folder), {}
    facts = map_facts(folder, "--vocab-map")
    for name in ("t2d", "d2t"):
        try:
            arrays[name] = np.load(folder / f"{name}.npy", allow_pickle=False)
        # numpy raises many kinds for what is no .npy: of zip files, of Python's tokenizer, of memory
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{folder / name}.npy cannot be read ({reason}); make the map again with "
                            "build_vocab_map.py") from None
        if not isinstance(arrays[name], np.ndarray):
            raise UserError(f"{folder / name}.npy is an archive, one array is wanted; make the map again "
                            "with build_vocab_map.py")
    rows = check_map(arrays["d2t"], arrays["t2d"], folder)
    if facts["map_sha256"] != map_sha256(arrays["d2t"].astype(np.int64)):
        raise UserError(f"{folder}: d2t.npy is not the one that {MAP_FILE} describes (its hash differs); "
                        "make the map again")
    return rows, facts


def check_map(d2t, t2d, where, ordered=True):
    """Target ids int64 [D] of offsets d2t, after checking that they ascend strictly (unless not `ordered`)
    and are those that t2d names. Raises UserError otherwise."""
    d2t, t2d = np.asarray(d2t), np.asarray(t2d)
    kinds = d2t.dtype.kind in "iu" and t2d.dtype.kind in "biuf"
    if not kinds or d2t.ndim != 1 or t2d.ndim != 1 or len(d2t) == 0:
        raise UserError(f"{where}: d2t must be a list of integers and t2d one of booleans, found {d2t.dtype} "
                        f"{d2t.shape} and {t2d.dtype} {t2d.shape}")
    ids = np.flatnonzero(t2d)
    rows = d2t.astype(np.int64) + np.arange(len(d2t))
    if np.array_equal(rows if ordered else np.sort(rows), ids):
        return rows
    if np.array_equal(d2t, ids):
        raise UserError(f"{where}: d2t holds absolute target ids, offsets are wanted (target id = i + "
                        "d2t[i])")
    if np.array_equal(np.sort(rows), ids):
        raise UserError(f"{where}: the target ids of d2t do not ascend, as they must; train_drafter.py "
                        "--init checkpoint --remap-vocab sorts them, with the lm_head's rows")
    raise UserError(f"{where}: t2d names {len(ids)} ids and d2t {len(rows)}, and they are not the same "
                    "ascending ids; the map is broken")
