"""What of an extraction is finished, by whichever process: the manifest, and the journals of the processes beside rank 0.

Only rank 0 writes the manifest. Another process lists what it finished in its journal, whence rank 0 takes it.
"""

import fcntl
import json
import re
import time
from collections import Counter

from torch import distributed

from common.cli import RANK, Failed, UserError, human_bytes, say
from common.files import STRAY, TEMPORARY, lock_folder, read_json, sha256_file, write_json
from common.shards import ACKNOWLEDGED, FREE, MANIFEST, acknowledged, read_manifest, settings_sha256, shard_name

FLAGS = {"dtype": "--store", "compute_dtype": "--dtype", "stored": "--teacher", "data_sha256": "--data and --limit, with hash",
         "max_disk_gb": "--max-disk-gb"}
COUNTS = ("rows", "samples", "bytes", "supervised_tokens", "heldout_samples")


def check_same(begun, manifest, args):
    """Refuse to go on with `begun`, the manifest on disk, under other settings. What --force lets pass is said and listed."""
    pairs = [(key, begun.get(key), manifest[key], key in ("tokenizer_sha256", "chat_template_sha256"))
             for key in manifest if key not in {*FREE, "planned"}]
    pairs.append(("planned blocks", begun["planned"]["blocks"], manifest["planned"]["blocks"], False))
    pairs += [(f"target {key}", begun["target"].get(key), manifest["target"][key], True)
              for key in ("tensors_sha256", "text_config_sha256", "sample_sha256") if key in begun["target"]]
    if begun.get("batches") != manifest["batches"]:
        say(f"{args.out} was begun with batches {short(begun.get('batches'))}, now they are {short(manifest['batches'])}: what is computed "
            f"from here on is rounded otherwise, and of answers in bfloat16 some may be others")
    for key, before, now, forcible in pairs:
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):  # only what differs
            before, now = ({name: part[name] for name in part if before.get(name) != now.get(name)} for part in (before, now))
        key = FLAGS.get(key, key)
        if not (forcible and args.force):
            raise UserError(f"{args.out} was begun with {key} {short(before)}, this command has {short(now)}; give the settings it "
                            f"was begun with, or another --out")
        manifest["forced"].append(key)
        say(f"forced: {args.out} was begun with {key} {short(before)}, now it is {short(now)}")
    manifest["forced"] = sorted({*begun.get("forced", []), *manifest["forced"]})
    manifest["versions"] = begun["versions"]


def agree(manifest):
    """All processes of a command: give the manifest the `run` of rank 0. Raises UserError where their settings or data differ."""
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, (manifest["run"], settings_sha256(manifest)))  # accelerate's gathers nothing on CPUs
    if len({found for _, found in everyone}) > 1:
        raise UserError("the processes of this command have different settings, data or targets; give all of them the same")
    manifest["run"] = everyone[0][0]


def follow(manifest, out):
    """Another rank, while rank 0 loads the target: wait for its manifest. Raises Failed when another command has begun the folder."""
    while not (out / MANIFEST).exists():
        time.sleep(0.1)
    if read_json(out / MANIFEST).get("run") != manifest["run"]:
        raise Failed(f"another command has begun {out} meanwhile; give this one again when it is done")


def begin(manifest, begun, args):
    """Rank 0, before any process computes: lock the folder, remove what a killed run left half-written, take over what is finished.

    Returns the lock, an open file. All processes of a command share it, so that another one waits for the last of them.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(args.out, "written")
    if not begun and (args.out / MANIFEST).exists():
        raise UserError(f"--out {args.out} was begun by another command just now; give the same command again")
    for stray in args.out.iterdir():
        if TEMPORARY.match(stray.name) or STRAY.fullmatch(stray.name):
            stray.unlink()
    if begun:
        begun = read_manifest(args.out)  # once more, now that nobody else changes it
        blocks = manifest["planned"]["blocks"]
        wrong = sum(not usable(entry, blocks) for entry in listed(begun))
        if wrong or len({entry["block"] for entry in listed(begun)}) < len(listed(begun)):
            raise UserError(f"{args.out / MANIFEST} lists shards that cannot be this extraction's ({wrong} entries, or one twice): it was "
                            f"changed after it was written; restore it, or give another --out")
        add(manifest, intact(begun, args))
        remove_read(args.out, manifest)
    fcntl.flock(lock, fcntl.LOCK_SH)
    save(manifest, args.out)
    remove_journals(args.out)
    return lock


def intact(begun, args):
    """The entries of the finished blocks whose shards are there, or with --max-disk-gb were read and removed; others are named."""
    blocks, gone = begun["planned"]["blocks"], acknowledged(args.out, begun["planned"])
    return [entry for entry in listed(begun) + journals(args.out, blocks)
            if usable(entry, blocks) and (entry["block"] in gone or whole(entry, args))]


def remove_read(out, manifest):
    """Remove the shards that a training which follows has acknowledged. Returns their blocks, a range."""
    blocks = acknowledged(out, manifest["planned"])
    gone = set(map(shard_name, blocks))
    for path in out.glob("shard-*.safetensors") if gone else ():
        if path.name in gone:
            path.unlink(missing_ok=True)  # another process may be faster
    return blocks


def wait_for_room(manifest, block, out):
    """With --max-disk-gb: wait until the shards from the first unread one to `block` fit. All is decided by planned bytes, so that
    processes need not ask each other. Raises Failed when the training has ended before."""
    planned, spoke = manifest["planned"], time.monotonic() - 55  # a short wait needs no words
    while "room" in planned and block >= planned["heldout_blocks"]:
        read = remove_read(out, manifest)
        first = read.stop
        if sum(planned["block_bytes"][first : block + 1]) <= planned["room"]:
            return
        if (out / ACKNOWLEDGED).exists() and read_json(out / ACKNOWLEDGED).get("finished"):
            raise Failed(f"the training that follows has ended with {len(read)} of "
                         f"{planned['blocks'] - planned['heldout_blocks']} shards read, as its --max-steps said; no more are made")
        if time.monotonic() - spoke > 60:
            spoke = time.monotonic()
            waiting = human_bytes(sum(planned["block_bytes"][first:block]))
            say(f"paused: shards of up to {waiting} wait for train_drafter.py --follow to read them")
        if RANK == 0:
            take_over(manifest, out)
        time.sleep(0.5)


def take_over(manifest, out):
    """Rank 0, while it waits: list what other processes have finished. Training that follows may wait for that very shard."""
    before = len(listed(manifest))
    add(manifest, journals(out, manifest["planned"]["blocks"], manifest["run"]))
    if len(listed(manifest)) > before:
        save(manifest, out)


def whole(entry, args):
    """Whether a finished block's shard is still there, of its size, and with --verify of its hash."""
    path = args.out / entry.get("file", "")
    if path == args.out or path.exists() and path.stat().st_size == entry["bytes"] and not (
            args.verify and sha256_file(path) != entry["sha256"]):
        return True
    say(f"{path} is missing or damaged and is to be made again")
    return False


def listed(manifest):
    """The entries of all finished blocks, those without samples included."""
    return manifest["shards"] + manifest["empty_blocks"]


def usable(entry, blocks):
    """Whether an entry of a manifest or a journal can be of a finished block, of so many."""
    if not isinstance(entry, dict) or type(entry.get("block")) is not int or not 0 <= entry["block"] < blocks:
        return False
    skipped, read = entry.get("skipped"), entry.get("read")
    if not isinstance(skipped, dict) or any(type(count) is not int for count in [read, *skipped.values()]):
        return False
    if "file" not in entry:
        return sum(skipped.values()) >= read
    return entry["file"] == shard_name(entry["block"]) and entry.get("samples") != 0 and all(
        type(entry.get(key)) is int and entry[key] >= 0 for key in COUNTS)


def journals(out, blocks, run=None):
    """The usable entries of all journals, or of those of one `run`; what cannot be read is said, and its blocks are made again."""
    found = []
    for path in sorted(out.glob("journal-*.json")):
        try:
            journal = read_json(path)
        except UserError as error:
            say(f"{error}; what it lists is made again")
            continue
        entries = journal.get("finished") if run in (None, journal.get("run")) else []
        found += [entry for entry in entries if usable(entry, blocks)] if isinstance(entries, list) else []
    return found


def remove_journals(out):
    for path in out.glob("journal-*.json"):
        path.unlink()


def add(manifest, entries):
    """List finished blocks, each once, in order."""
    found = {entry["block"]: entry for entry in entries + listed(manifest)}
    entries = [found[block] for block in sorted(found)]
    manifest["shards"] = [entry for entry in entries if "file" in entry]
    manifest["empty_blocks"] = [entry for entry in entries if "file" not in entry]


def record(manifest, entry, own, out):
    """A block is finished. own: the entries of this process since it began."""
    own.append(entry)
    if RANK != 0:
        write_json(out / f"journal-{RANK}.json", {"run": manifest["run"], "finished": own})
        return
    add(manifest, [entry, *journals(out, manifest["planned"]["blocks"], manifest["run"])])
    save(manifest, out)


def save(manifest, out):
    manifest["done"] = sum_up(manifest)
    write_json(out / MANIFEST, manifest)


def sum_up(manifest):
    entries = listed(manifest)
    total = {key: sum(entry.get(name, 0) for entry in entries) for key, name in (
        ("read", "read"), ("samples", "samples"), ("tokens", "rows"), ("supervised_tokens", "supervised_tokens"),
        ("heldout_samples", "heldout_samples"), ("answers_cut", "cut"))}
    total["skipped"] = dict(sum((Counter(entry["skipped"]) for entry in entries), Counter()))
    return total


def short(value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text[:100]
