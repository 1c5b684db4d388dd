"""The folder of a training run: who may use it, its checkpoints, and how one is gone on from.

A checkpoint is checkpoints/step-NNNNNN: the drafter as it is served, and in state/ what training needs beside it.
"""

import fcntl
import json
import shutil
from contextlib import suppress

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.cli import RANK, UserError, say
from common.files import TEMPORARY, read_json, replace_file, replace_folder, write_json


def check_run(out, settings, resume):
    """Refuse a folder that holds another run, or this one without --resume."""
    if not (out / "run.json").exists():
        return
    if not resume:
        raise UserError(f"--out {out} holds an earlier run; add --resume to go on with it, or give another folder")
    before = read_json(out / "run.json")
    for key in settings:
        if before.get(key) != settings[key]:
            raise UserError(f"--resume: {key} is {settings[key]} now and was {before.get(key)} when the run in {out} began; give the same "
                            f"arguments, or another --out")


def lock_run(out):
    """An open file that only one process can hold; with it, what a killed run left half-written is removed."""
    lock = open(out / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--out {out} is being trained by another process; wait for it, or give another folder") from None
    for stray in [*out.iterdir(), *(out / "checkpoints").glob("*")]:
        if TEMPORARY.match(stray.name):
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
    return lock


def checkpoints(out):
    """This run's checkpoints by step, oldest first, without any that somebody has taken files from."""
    files = ("config.json", "model.safetensors", "state/weights.safetensors", "state/optimizer.safetensors", "state/progress.json")
    return [folder for folder in sorted((out / "checkpoints").glob("step-[0-9]*")) if all((folder / file).exists() for file in files)]


def save_checkpoint(out, export, drafter, optimizer, parameters, progress, keep):
    """checkpoints/step-NNNNNN: the drafter as served, and in state/ the float32 weights, moments and counters. Whole or absent."""
    def fill(folder):
        export(folder)
        state = folder / "state"
        state.mkdir()
        moments = {}
        for name, parameter in parameters.items():
            for key, value in optimizer.state[parameter].items():
                moments[f"{key}/{name}"] = value.detach().cpu().contiguous()
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
        replace_file(state / "weights.safetensors", lambda path: save_file(weights, path))
        replace_file(state / "optimizer.safetensors", lambda path: save_file(moments, path))
        write_json(state / "progress.json", progress)

    (out / "checkpoints").mkdir(exist_ok=True)
    folder = out / "checkpoints" / f"step-{progress['step']:06d}"
    if not folder.exists():
        replace_folder(folder, fill)
    for old in checkpoints(out)[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(out, drafter, optimizer, parameters, fresh):
    """Weights, moments and counters of the last checkpoint that is whole; `fresh` without one. Lines logged after it are dropped."""
    progress = fresh
    for folder in reversed(checkpoints(out)):
        try:
            progress = read_json(folder / "state" / "progress.json")
            weights, moments = (load_file(folder / "state" / f"{name}.safetensors") for name in ("weights", "optimizer"))
            states = {name: {key: moments[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")} for name in parameters}
            drafter.load_state_dict(weights)
        except (UserError, SafetensorError, KeyError, RuntimeError) as error:
            say(f"{folder} is damaged ({str(error)[:100]}); the one before it is tried")
            progress = fresh
            continue
        for name, parameter in parameters.items():
            optimizer.state[parameter] = {key: value.to("cpu" if key == "step" and not parameter.is_cuda else parameter.device)
                                          for key, value in states[name].items()}
        say(f"going on after step {progress['step']} of {folder}")
        break
    metrics = out / "metrics.jsonl"
    if metrics.exists() and RANK == 0:
        kept = []
        for line in metrics.read_text(encoding="utf-8").split("\n"):
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut off when the run was killed
                if json.loads(line)["step"] <= progress["step"]:
                    kept.append(line + "\n")
        replace_file(metrics, lambda path: path.write_text("".join(kept), encoding="utf-8"))
    return progress
