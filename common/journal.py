"""What of an extraction is finished, by whichever process: the manifest, and the journals of the processes beside rank 0.

Only rank 0 writes the manifest. Another process lists what it finished in its journal, whence rank 0 takes it.
"""

import fcntl
import json
import re
from collections import Counter

from common.cli import RANK, UserError, say
from common.files import TEMPORARY, lock_folder, read_json, sha256_file, write_json
from common.shards import MANIFEST, read_manifest

FREE = {"done", "complete", "versions", "shards", "empty_blocks", "forced", "format", "target"}  # may differ when a folder is gone on with
STRAY = re.compile(r"\.tmp[0-9A-Za-z]{6}")  # what safetensors makes beside the file it saves


def check_same(begun, manifest, args):
    """Refuse to go on with `begun`, the manifest on disk, under other settings. What --force lets pass is said and listed."""
    pairs = [(key, begun.get(key), manifest[key], key in ("tokenizer_sha256", "chat_template_sha256"))
             for key in manifest if key not in FREE]
    pairs += [(f"target {key}", begun["target"].get(key), manifest["target"][key], True)
              for key in ("tensors_sha256", "text_config_sha256")]
    for key, before, now, forcible in pairs:
        if before == now:
            continue
        if not (forcible and args.force):
            raise UserError(f"{args.out} was begun with {key} {short(before)}, this command has {short(now)}; give the settings it "
                            f"was begun with, or another --out")
        manifest["forced"].append(key)
        say(f"forced: {args.out} was begun with {key} {short(before)}, now it is {short(now)}")
    manifest["forced"] = sorted({*begun.get("forced", []), *manifest["forced"]})
    manifest["versions"] = begun["versions"]


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
        add(manifest, [entry for entry in listed(begun) + journals(args.out) if whole(entry, args)])
    fcntl.flock(lock, fcntl.LOCK_SH)
    save(manifest, args.out)
    remove_journals(args.out)
    return lock


def whole(entry, args):
    """Whether a finished block's shard is still there, of its size, and with --verify of its hash."""
    path = args.out / entry.get("file", "")
    if path == args.out or path.exists() and path.stat().st_size == entry["bytes"] and not (
            args.verify and sha256_file(path) != entry["sha256"]):
        return True
    say(f"{path} is missing or damaged, it is made again")
    return False


def listed(manifest):
    """The entries of all finished blocks, those without samples included."""
    return manifest["shards"] + manifest["empty_blocks"]


def journals(out):
    return [entry for path in sorted(out.glob("journal-*.json")) for entry in read_json(path)["finished"]]


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
        write_json(out / f"journal-{RANK}.json", {"finished": own})
        return
    add(manifest, [entry, *journals(out)])
    save(manifest, out)


def save(manifest, out):
    manifest["done"] = sum_up(manifest)
    write_json(out / MANIFEST, manifest)


def sum_up(manifest):
    entries = listed(manifest)
    total = {key: sum(entry.get(name, 0) for entry in entries) for key, name in (
        ("read", "read"), ("samples", "samples"), ("tokens", "rows"), ("supervised_tokens", "supervised_tokens"),
        ("heldout_samples", "heldout_samples"))}
    total["skipped"] = dict(sum((Counter(entry["skipped"]) for entry in entries), Counter()))
    return total


def short(value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text[:100]
