"""Runs inside SGLang, with nothing but torch and safetensors: writes the target's states of each prompt as
they are computed.

SGLang is told of it with --forward-hooks, on the module `logits_processor`. Only requests whose id begins
with PREFIX are written, each to ID.safetensors in the hook's folder: `last` [T, H], the lm_head's input, and
`aux0`, `aux1`, ... [T, ...], side by side the captured layers. What goes wrong is told in ID.error.
"""

import os
import queue
import re
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

PREFIX = "states-"
OURS = re.compile(PREFIX + r"[\w-]+")  # the id becomes a file's name
WAITING = 4  # batches whose states wait in memory to be written; then the engine waits


def write_states(config):
    """The forward hook (a factory, as SGLang wants it). config: {"folder": where to write}."""
    folder, batches = Path(config["folder"]), queue.Queue(WAITING)
    folder.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_write_all, args=(folder, batches), daemon=True).start()

    def hook(module, args, output):
        if len(args) < 5 or args[4] is None:
            return
        _, last, _, batch, aux = args[:5]
        mode, rids = batch.forward_mode, batch.rids or ()
        if not mode.is_extend() or mode.is_target_verify() or not any(OURS.fullmatch(rid) for rid in rids):
            return
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return  # every rank of a tensor-parallel target has the same states
        parts = [aux] if isinstance(aux, torch.Tensor) else aux
        states = {"last": _to_host(last)} | {f"aux{n}": _to_host(part) for n, part in enumerate(parts)}
        copied = None
        if last.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        batches.put((list(rids), list(batch.extend_seq_lens_cpu), states, copied))

    return hook


def _to_host(state):
    """A copy, as the engine may use its memory again; of a GPU's in pinned memory and under way while the
    engine goes on."""
    state = state.detach()
    if not state.is_cuda:
        return state.clone()
    return torch.empty(state.shape, dtype=state.dtype, pin_memory=True).copy_(state, non_blocking=True)


def _write_all(folder, batches):
    while True:
        rids, counts, states, copied = batches.get()
        start = 0
        for rid, count in zip(rids, counts, strict=False):  # the counts may be padded
            if OURS.fullmatch(rid):
                try:
                    if copied:
                        copied.synchronize()
                    rows = slice(start, start + count)
                    _write(folder, rid, {name: state[rows].contiguous() for name, state in states.items()})
                except Exception as error:  # else the queue fills, and the engine waits for ever
                    _tell(folder, rid, error)
            start += count


def _write(folder, rid, rows):
    temporary = folder / f".{rid}.tmp-{os.getpid()}"
    try:
        save_file(rows, temporary)
        temporary.chmod(0o644)  # safetensors leaves files that only their owner can read
        temporary.replace(folder / f"{rid}.safetensors")
    finally:
        temporary.unlink(missing_ok=True)


def _tell(folder, rid, error):
    """Say what went wrong to whoever waits for the file; the engine serves on."""
    temporary = folder / f".{rid}.tmp-{os.getpid()}"
    try:
        temporary.write_text(f"{type(error).__name__}: {error}")
        temporary.replace(folder / f"{rid}.error")  # at once: it is read as soon as it is there
    except OSError:
        print(f"states of {rid} cannot be written to {folder}: {error}", flush=True)
