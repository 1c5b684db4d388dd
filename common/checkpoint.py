"""The folder of a training run: who may use it, its checkpoints, and how one is gone on from.

A checkpoint is checkpoints/step-NNNNNN: the drafter as it is served, and in state/ what training needs beside it.
"""

import json
import os
import re
import shutil
from contextlib import suppress
from itertools import count

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from common.cli import RANK, UserError, say
from common.files import STRAY, lock_folder, read_json, replace_file, replace_folder, write_json

FILES = ("config.json", "model.safetensors", "state/weights.safetensors", "state/optimizer.safetensors", "state/progress.json")
STEP = re.compile(r"step-\d{6,}")
# What a killed run leaves half-written: our own temporary files, and those that safetensors makes beside the file it saves.
TEMPORARY = re.compile(r"\.(run\.json|metrics\.jsonl|config\.json|model\.safetensors|step-\d+)\.tmp-\d+")


def check_run(out, settings, resume):
    """Refuse a folder that holds another run, or this one without --resume."""
    if os.path.lexists(out / "checkpoints") and not (out / "checkpoints").is_dir():
        raise UserError(f"--out {out}: its checkpoints is no folder; remove it, or give another --out")
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
    lock = lock_folder(out, "trained")
    for stray in [*out.iterdir(), *(out / "checkpoints").glob("*")]:
        if TEMPORARY.fullmatch(stray.name) or STRAY.fullmatch(stray.name):
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
    return lock


def checkpoints(out):
    """This run's checkpoints by step, oldest first, without any that somebody has taken files from."""
    return [folder for folder in _step_folders(out) if all((folder / file).exists() for file in FILES)]


def _step_folders(out):
    found = [folder for folder in (out / "checkpoints").glob("step-*") if STEP.fullmatch(folder.name)]
    return sorted(found, key=_step)


def _step(folder):
    return int(folder.name.removeprefix("step-"))


def gather(tensors, keep):
    """The tensors of a dict on the CPU, whole where they are spread over the processes, each of which must call this; {} unless `keep`."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = tensor.detach().cpu().contiguous()
    return whole


def save_checkpoint(out, export, weights, moments, progress, keep):
    """checkpoints/step-NNNNNN: the drafter as served, and in state/ the float32 weights, moments and counters. Whole or absent.

    Of older ones only the last `keep` stay; of the others this run's files are removed and anything else is left.
    """
    def fill(folder):
        export(folder, weights)
        state = folder / "state"
        state.mkdir()
        replace_file(state / "weights.safetensors", lambda path: save_file(weights, path))
        replace_file(state / "optimizer.safetensors", lambda path: save_file(moments, path))
        write_json(state / "progress.json", progress)

    (out / "checkpoints").mkdir(exist_ok=True)
    replace_folder(out / "checkpoints" / f"step-{progress['step']:06d}", fill)
    folders = _step_folders(out)
    for old in folders[: folders.index(checkpoints(out)[-keep:][0])]:
        for file in FILES:
            (old / file).unlink(missing_ok=True)
        for place in (old / "state", old):
            with suppress(OSError):  # it holds somebody's files, or is not there
                place.rmdir()


def load_checkpoint(out, drafter, fresh):
    """Go on from the last checkpoint that is whole: its weights are loaded into `drafter`, lines logged after it are dropped, and damaged
    checkpoints after it get a name under which neither --keep nor a later start counts them.

    Returns (counters, {parameter: {key: tensor}} of the optimizer), or (`fresh`, {}) without one. Raises UserError when there are damaged
    ones only, beside a drafter that training from the start would replace.
    """
    progress, moments = fresh, {}
    trainable = [name for name, parameter in drafter.named_parameters() if parameter.requires_grad]
    for folder in reversed(checkpoints(out)):
        try:
            progress = _read_progress(folder, fresh)
            weights, stored = (load_file(folder / "state" / f"{name}.safetensors") for name in ("weights", "optimizer"))
            moments = {name: {key.split("/")[0]: stored[key] for key in stored if key.endswith(f"/{name}")} for name in trainable}
            if not all(moments.values()):
                raise ValueError("moments of a parameter are missing")
            if broken := not_finite({**weights, **stored}):
                raise ValueError(f"{broken} is not finite")
            shapes, wanted = ({name: value.shape for name, value in state.items()} for state in (weights, drafter.state_dict()))
            if shapes != wanted:
                raise ValueError("its weights have other names or shapes")  # found before any of them is loaded
            drafter.load_state_dict(weights)
        except (UserError, OSError, SafetensorError, ValueError) as error:
            say(f"{folder} is damaged ({str(error)[:200]}); the one before it is tried")
            progress, moments = fresh, {}
            continue
        say(f"going on after step {progress['step']} of {folder}")
        break
    later = [folder for folder in _step_folders(out) if _step(folder) > progress["step"]]
    if later and progress is fresh and (out / "model.safetensors").exists():  # before the first save of a run there is no such folder
        raise UserError(f"--resume: none of the checkpoints in {out} is whole, and training from the start would replace its drafter; "
                        f"give another --out, or remove {out / 'model.safetensors'}")
    if RANK != 0:
        return progress, moments
    for folder in later:  # another process that still reads one finds it as damaged when it is gone
        names = (folder.with_name(f"{folder.name}.damaged-{number}") for number in count(1))
        os.rename(folder, next(name for name in names if not os.path.lexists(name)))
    metrics = out / "metrics.jsonl"
    if metrics.exists():
        kept = []
        for line in metrics.read_text(encoding="utf-8", errors="replace").split("\n"):
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut off when the run was killed
                if progress is not fresh and json.loads(line)["step"] <= progress["step"]:
                    kept.append(line + "\n")
        replace_file(metrics, lambda path: path.write_text("".join(kept), encoding="utf-8"))
    return progress, moments


def _read_progress(folder, fresh):
    """The counters of a checkpoint, all that `fresh` has. Raises UserError or ValueError where they cannot be those of its folder."""
    progress = read_json(folder / "state" / "progress.json")
    if missing := fresh.keys() - progress.keys():
        raise ValueError(f"progress.json lacks {min(missing)}")
    if type(progress["step"]) is not int or progress["step"] != _step(folder):
        raise ValueError(f"progress.json is of step {progress['step']}")
    for key, value in ((key, progress[key]) for key in fresh):
        if key in ("last", "best"):  # a measurement, None before the first one
            right = value is None or isinstance(value, dict) and {"step", "accept_length", "acceptance"} <= value.keys()
        else:
            right = type(value) in (int, float) or key == "loss" and value is None
        if not right:
            raise ValueError(f"{key} in progress.json is {value}")
    return progress


def not_finite(tensors):
    """Name of the first tensor with NaN or infinity, or with a norm beyond float32, as after a step far too large; None without one."""
    return next((name for name, tensor in tensors.items() if not tensor.float().norm().isfinite()), None)


def read_metrics(out):
    """The records of metrics.jsonl that can be plotted: a line that was cut off, or edited so that it lacks something, is left out."""
    records = []
    with suppress(FileNotFoundError):
        for line in (out / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").split("\n"):
            with suppress(ValueError, TypeError, AttributeError):
                record = json.loads(line)
                wanted = {"step", "loss", "accept_length", "acceptance"} if "heldout" in record else {"step", "loss", "lr"}
                if wanted <= record.keys():
                    records.append(record)
    return records


def restore_moments(optimizers, parameters, moments):
    """Give the optimizers the moments that load_checkpoint found, each process its part where parameters are spread over processes."""
    names = {parameter: name for name, parameter in parameters.items()}
    for optimizer in optimizers if moments else ():
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            for key, value in moments[names[parameter]].items():
                if value.dim() and isinstance(parameter, DTensor):
                    value = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)
                optimizer.state[parameter][key] = value.to("cpu" if key == "step" and not parameter.is_cuda else parameter.device)
