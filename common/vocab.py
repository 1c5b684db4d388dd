"""The draft vocabulary: which target ids the drafter's rows mean. Contract of t2d, d2t and vocab_map.json."""

from pathlib import Path

import numpy as np
import torch

from common.cli import UserError
from common.files import read_json, replace_folder, sha256_tensors, write_json

MAP_FILE = "vocab_map.json"
MAP_FILES = (MAP_FILE, "t2d.npy", "d2t.npy", "t2d.pt", "d2t.pt")


def count_ids(parts, vocab_size):
    """(int64 [V] counted, int64 [V] held out) occurrences of each id; parts: of (ids [n], held out bool [n], anything)."""
    counted, heldout = np.zeros(vocab_size, dtype=np.int64), np.zeros(vocab_size, dtype=np.int64)
    for ids, aside, *_ in parts:
        counted += np.bincount(ids[~aside], minlength=vocab_size)
        heldout += np.bincount(ids[aside], minlength=vocab_size)
    return counted, heldout


def ranking(counts, forced):
    """All ids in the order in which a draft vocabulary takes them: `forced` ones, then by count, ties by the lower id.

    counts: int64 [V] occurrences of each id. Returns int64 [V]; ids that were never counted come last, the lowest first.
    """
    forced = np.array(sorted(set(forced)), dtype=np.int64)
    order = np.argsort(-counts.astype(np.int64), kind="stable")  # stable: the lower id first among equal counts
    return np.concatenate([forced, order[~np.isin(order, forced)]])


def shortened(text):
    return text if len(text) <= 40 else f"{text[:40]}..."


def check_size(size, vocab_size):
    if not 1 <= size <= vocab_size:
        raise UserError(f"--draft-vocab {shortened(str(size))} is not in 1..{vocab_size} (the target's lm_head has {vocab_size} rows)")


def rows_to_d2t(rows):
    """int64 [D] OFFSETS from ascending target ids: target id = i + d2t[i]."""
    return rows - np.arange(len(rows), dtype=np.int64)


def coverage(counts, rows):
    """Share of the counted occurrences whose id is in `rows`; None when nothing was counted."""
    total = int(counts.sum())
    return float(counts[rows].sum() / total) if total else None


def is_share(value):
    """Whether that is a coverage: a number in 0..1, or None, not known."""
    return value is None or type(value) in (int, float) and 0 <= value <= 1


def least_coverage(promised):
    """The lowest coverage that still keeps the promise of a map: half as many misses again, and two points, are let pass.

    Held-out coverage on other samples of the same kind scatters by less than that where it was measured (docs/vocabulary.md); another
    language or domain misses several times as much.
    """
    return 1 - 1.5 * (1 - promised) - 0.02


def check_coverage(found, facts, what, force=False, tokens="the supervised tokens here"):
    """Refuse a map that covers clearly less of `tokens`, `found`, than its `facts` promise (the lower of their two figures).

    Returns a warning if forced, None where the promise is kept or there is none.
    """
    promised = min((facts[key] for key in ("coverage_heldout", "coverage") if facts.get(key) is not None), default=None)
    if promised is None or found >= least_coverage(promised):
        return None
    message = (f"{what} covers {found:.2%} of {tokens} and promised {promised:.2%} (at least "
               f"{least_coverage(promised):.2%} is wanted): it was counted on other data, and what it lacks can never be drafted")
    if not force:
        raise UserError(f"{message}; count a map on these shards with build_vocab_map.py, or --force to go on with fewer accepted drafts")
    return message


def save_map(folder, rows, vocab_size, facts):
    """Write t2d and d2t, as .npy and .pt, and vocab_map.json with `facts`, as one folder; a map that is there is replaced."""
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[rows] = True
    d2t = rows_to_d2t(rows)

    def fill(temporary):
        np.save(temporary / "t2d.npy", t2d)
        np.save(temporary / "d2t.npy", d2t)
        torch.save(torch.from_numpy(t2d), temporary / "t2d.pt")
        torch.save(torch.from_numpy(d2t), temporary / "d2t.pt")
        write_json(temporary / MAP_FILE, {"vocab_size": vocab_size, "draft_vocab": len(rows), "map_sha256": map_sha256(d2t), **facts})

    replace_folder(folder, fill)


def map_sha256(d2t):
    """Hash of a map's offsets, int64 [D], whatever file they came from."""
    return sha256_tensors([torch.as_tensor(d2t, dtype=torch.int64)])


def map_facts(folder, flag):
    """The dict of vocab_map.json in `folder`, which `flag` names. Raises UserError where there is none, saying what the folder is
    instead, and for entries of another type."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{flag} {folder} {'is no folder' if folder.exists() else 'does not exist'}; build_vocab_map.py makes one")
    if not (folder / MAP_FILE).exists():
        sizes = sorted(int(entry.parent.name) for entry in folder.glob(f"*/{MAP_FILE}") if entry.parent.name.isdecimal())
        found = (f"holds maps {', '.join(map(str, sizes))}: name one of them, like {folder / str(sizes[0])}" if sizes
                 else "is a drafter; build_vocab_map.py --from-checkpoint writes out its map" if (folder / "config.json").exists()
                 else "holds shards; build_vocab_map.py --shards makes a map of them" if (folder / "manifest.json").exists()
                 else f"holds no {MAP_FILE}; build_vocab_map.py makes one")
        raise UserError(f"{flag} {folder} {found}")
    facts = read_json(folder / MAP_FILE)
    usable = {"target": isinstance(facts.get("target") or {}, dict), "coverage": is_share(facts.get("coverage")),
              "coverage_heldout": is_share(facts.get("coverage_heldout")),
              "template_kwargs": isinstance(facts.get("template_kwargs") or {}, dict),
              "forced": isinstance(facts.get("forced") or {}, dict) and all(key.isdecimal() for key in facts.get("forced") or ())}
    for key in usable:
        if not usable[key]:
            raise UserError(f"{folder / MAP_FILE}: {key} is {shortened(str(facts[key]))}, which it never is; make the map again")
    return facts


def load_map(folder):
    """(rows int64 [D] ascending target ids, facts of vocab_map.json), checked.

    Raises UserError when a file is missing, t2d and d2t disagree, or d2t holds absolute ids instead of offsets.
    """
    folder, arrays = Path(folder), {}
    facts = map_facts(folder, "--vocab-map")
    for name in ("t2d", "d2t"):
        try:
            arrays[name] = np.load(folder / f"{name}.npy", allow_pickle=False)
        except Exception as error:  # numpy raises many kinds for what is no .npy: of zip files, of Python's tokenizer, of memory
            raise UserError(f"{folder / name}.npy cannot be read ({' '.join(str(error).split())[:200]}); make the map again with "
                            f"build_vocab_map.py") from None
        if not isinstance(arrays[name], np.ndarray):
            raise UserError(f"{folder / name}.npy is an archive, one array is wanted; make the map again with build_vocab_map.py")
    rows = check_map(arrays["d2t"], arrays["t2d"], folder)
    if facts.get("map_sha256") != map_sha256(arrays["d2t"].astype(np.int64)):
        raise UserError(f"{folder}: d2t.npy is not the one that {MAP_FILE} describes (its hash differs); make the map again")
    return rows, facts


def check_map(d2t, t2d, where, ordered=True):
    """Target ids int64 [D] of a map after checking that they ascend strictly and equal nonzero(t2d); in any order if not `ordered`."""
    d2t, t2d = np.asarray(d2t), np.asarray(t2d)
    if d2t.ndim != 1 or t2d.ndim != 1 or d2t.dtype.kind not in "iu" or t2d.dtype.kind not in "biuf" or len(d2t) == 0:
        raise UserError(f"{where}: d2t must be a list of integers and t2d one of booleans, found {d2t.dtype} {d2t.shape} and "
                        f"{t2d.dtype} {t2d.shape}")
    ids = np.flatnonzero(t2d)
    rows = d2t.astype(np.int64) + np.arange(len(d2t))
    if np.array_equal(rows if ordered else np.sort(rows), ids):
        return rows
    if np.array_equal(d2t, ids):
        raise UserError(f"{where}: d2t holds absolute target ids, offsets are wanted (target id = i + d2t[i])")
    if np.array_equal(np.sort(rows), ids):
        raise UserError(f"{where}: the target ids of d2t do not ascend, as they must; train_drafter.py --init checkpoint --remap-vocab "
                        f"sorts them, with the lm_head's rows")
    raise UserError(f"{where}: t2d names {len(ids)} ids and d2t {len(rows)}, and they are not the same ascending ids; the map is broken")
