"""Files that are whole or not there: temporary name in the same folder, fsync, rename. And hashes."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from common.cli import DISK, UserError

# what replace_file and replace_folder leave behind when they are killed
TEMPORARY = re.compile(r"\..+\.tmp-\d+$")
STRAY = re.compile(r"\.tmp[0-9A-Za-z]{6}")  # what safetensors makes beside the file it saves
UMASK = os.umask(0o022)
os.umask(UMASK)


def replace_file(path, write):
    """`write(temporary path)`, flush it to disk, then rename it to `path`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name[:60]}.tmp-{os.getpid()}")  # names end at 255 bytes
    try:
        try:
            write(temporary)
        except Exception as error:  # safetensors has a kind of its own for what the system says
            code = next((code for code in DISK if os.strerror(code) in str(error)), None)
            if code is None:
                raise
            raise OSError(code, os.strerror(code), str(path)) from None
        os.chmod(temporary, 0o666 & ~UMASK)  # safetensors leaves files that only their owner can read
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def replace_folder(path, fill):
    """`fill(temporary folder)`, flush its files, then rename it to `path`; a folder that is there is
    replaced.

    The new one is whole on disk before the old one moves; a reader sees the one, the other, or for an instant
    none.
    """
    path = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
    temporary, old = (path.with_name(f".{path.name[:60]}{what}.tmp-{os.getpid()}") for what in ("", "-old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for file in temporary.rglob("*"):
            _sync(file)
        if path.exists():
            os.rename(path, old)
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    _sync(path.parent)


def write_json(path, value):
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path):
    """The JSON object in `path`. Raises UserError when it is missing or no JSON object."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError, IsADirectoryError, RecursionError) as error:
        raise UserError(f"{path} is not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, an object was expected")
    return value


def write_sealed(path, value):
    """Write our own JSON object with the sha256 of its content, which read_sealed wants to find."""
    value = json.loads(json.dumps(value, allow_nan=False))  # keys as they will be read: texts
    write_json(path, {**value, "sha256": sha256_json(value)})


def read_sealed(path):
    """The object that write_sealed wrote, without its hash: nobody need ask what it holds.

    Raises UserError when the file is missing, cut, or was edited since.
    """
    value = read_json(path)
    if value.pop("sha256", None) != sha256_json(value):
        raise UserError(f"{path} was changed after it was written, or is of an earlier version: its sha256 "
                        "is not that of its content; restore it, or make it again")
    return value


def append_sealed(path, value):
    """Add a line to a file of JSON lines, with the sha256 of its content, and have it on disk."""
    new = not path.exists()
    with open(path, "ab") as file:
        file.write((json.dumps({"value": value, "sha256": sha256_json(value)}) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    if new:
        _sync(path.parent)


def read_appended(path, place=0):
    """([value, None for a line that was changed since], where to read on) of what append_sealed wrote behind
    byte `place`. A line that is not whole yet waits; a file that is gone holds nothing."""
    try:
        with open(path, "rb") as file:
            file.seek(place)
            data = file.read()
    except FileNotFoundError:
        return [], place
    data, values = data[: data.rfind(b"\n") + 1], []
    for line in data.splitlines():
        try:
            found = json.loads(line)
            right = found["sha256"] == sha256_json(found["value"])
        except (ValueError, TypeError, KeyError, RecursionError):
            right = False
        values.append(found["value"] if right else None)
    return values, place + len(data)


def sha256_file(path):
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_json(value):
    """Hash of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def sha256_tensors(tensors):
    """Hash of the dtypes, shapes and bytes of `tensors`, in order."""
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_output_folder(path, marker):
    """Refuse an output folder that holds anything but an earlier output of the same kind, known by its file
    `marker`."""
    path = Path(path)
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise UserError(f"--out {path}: {place} is a link to what does not exist; give a folder that is "
                            "new or empty")
    if path.exists() and not path.is_dir():
        raise UserError(f"--out {path} is a file; give a folder that is new or empty")
    place = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"--out {path} cannot be made: {place} is "
                        f"{'not writable' if place.is_dir() else 'a file'}; give another folder")
    if not shutil.disk_usage(place).total:  # /proc and the like let root believe that it may write
        raise UserError(f"--out {path} cannot be made: {place} is no disk that holds files; give another "
                        "folder")
    if path.is_dir() and not (path / marker).exists():
        found = sorted(entry.name for entry in path.iterdir() if entry.name != ".lock"
                       and not TEMPORARY.match(entry.name))
        if found:
            raise UserError(f"--out {path} holds something else ({found[0]}), or has lost its {marker}; give "
                            "a folder that is new or empty")


def lock_folder(out, use, shared=False):
    """An open file in `out` that only one process can hold, or several that share it. `use`: what they do
    with the folder."""
    lock = open(out / ".lock", "a+")  # noqa: SIM115
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"--out {out} is being {use} by another process; wait for it, or give another "
                        "folder") from None
    return lock


def _sync(path):
    """Have a file, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
