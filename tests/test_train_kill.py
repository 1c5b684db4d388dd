"""train_drafter.py killed at any moment: what is resumed equals a run that nobody disturbed, bit for bit. And
what is found damaged."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import train_drafter
from common import cli
from common.cli import Failed, UserError
from common.drafter import load_drafter
from common.files import TEMPORARY, read_sealed, write_json, write_sealed
from tests.scripts import call, make_work, shell
from train_drafter import FILES, load_checkpoint, lock_run, save_checkpoint

# a sample a step
OFTEN = ("--draft-vocab", "full", "--batch-tokens", 1, "--epochs", 9, "--save-every", 1, "--eval-every", 2)
TIMES = {"seconds", "seconds_left", "waited", "waiting", "tokens_per_second", "command", "sha256"}
OPERATIONS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree"}

# Each run is a process of its own, forked from one that has imported everything and done nothing else: a
# start takes no second.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["train_drafter", "transformers.models.llama.modeling_llama",
                                  "tests.test_train_kill"])


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return make_work(tmp_path_factory.mktemp("kill"), 14, 12, 100)


def _train(arguments, log, out, fatal, operations):
    """One run, its words in the file `log`. From its first step on it numbers its file operations in `out`;
    at number `fatal` it is killed with SIGKILL before it does it, or else all are listed in the file
    `operations`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own one, of several processes, would outlive a kill
    seen = []

    def watch(event, values):
        writes = event == "open" and str(values[0]).startswith(out) and str(values[1])[:1] in "wax"
        writes = writes or "+" in str(values[1:2])
        if not (writes or event in OPERATIONS) or not (seen or "metrics.jsonl" in str(values[0])):
            return
        if len(seen) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        subject = values[1] if event == "os.rename" else values[0]  # a rename by what it makes
        seen.append(f"{event} {subject}")

    def store_and_wait(training, best, checkpoint):  # operations of two threads would have no order
        store(training, best, checkpoint)
        train_drafter.written(training)

    store = train_drafter.store
    if fatal is not None or operations:
        sys.addaudithook(watch)
        train_drafter.store = store_and_wait
    call("train_drafter", *arguments)
    if operations:
        names, seen = list(seen), ["done"]
        with open(operations, "w") as file:
            json.dump(names, file)


class Run:
    """A training command into `out`, started as often as it takes."""

    def __init__(self, work, out, *more):
        self.out, self.log = out, out.with_suffix(".log")
        self.arguments = ["--shards", work / "shards", "--target", work / "target", "--out", out,
                          "--ttt-steps", 2, "--lr", 3e-3, *more]

    def start(self, fatal=None, operations=None):
        self.log.unlink(missing_ok=True)
        process = PROCESSES.Process(target=_train,
                                    args=(["--resume", *map(str, self.arguments)], str(self.log),
                                          str(self.out), fatal,
                                                         operations and str(operations)))
        process.start()
        return process

    def finish(self):
        process = self.start()
        process.join(120)
        assert process.exitcode == 0, self.log.read_text()[-2000:]
        return self

    def resumed_from(self):
        """The step that it says it goes on after, None while it says nothing."""
        found = re.search(r"going on after step (\d+)", self.log.read_text() if self.log.exists() else "")
        return found and int(found[1])

    def killed(self, fatal):
        process = self.start(fatal)
        process.join(120)
        words = self.log.read_text()[-2000:]
        assert process.exitcode == -signal.SIGKILL, f"{process.exitcode}, not killed: {words}"


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def content(out):
    """All files of a run by name: JSON without what the clock and the command line give, everything else byte
    for byte."""
    found = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        if path.suffix == ".json":
            value = without_times(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            value = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        else:
            value = path.read_bytes()
        found[str(path.relative_to(out))] = value
    return found


def assert_equal_runs(out, straight):
    ours, theirs = content(out), content(straight)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert folders(out) == folders(straight)


def folders(out):
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_dir())


def step_folders(out):
    return sorted(path for path in (out / "checkpoints").glob("*") if not TEMPORARY.match(path.name))


def what_is_there(out, whole):
    """(the step to go on from, was it killed in a save) after a kill; the newest checkpoint, and the drafter
    in `out`, must be whole.

    whole: names of the files of a checkpoint.
    """
    inside = {folder: {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
              for folder in step_folders(out)}
    last = 0
    for folder, files in inside.items():
        if folder == max(inside):
            assert files >= whole, f"the newest checkpoint {folder} lacks {whole - files}"
        if files >= whole:
            load_drafter(folder)
            assert all(load_file(path) for path in folder.rglob("*.safetensors"))
            last = json.loads((folder / "state" / "progress.json").read_text())["step"]
            assert folder.name == f"step-{last:06d}"
    if (out / "model.safetensors").exists() and (out / "config.json").exists():
        load_drafter(out)
    strays = [path for path in out.rglob("*") if TEMPORARY.match(path.name)]
    return last, bool(strays) or any(not files >= whole for files in inside.values())


def renamed(operations, step):
    """Number of the operation that gave the checkpoint of `step` its name."""
    renames = [i for i, line in enumerate(operations) if line.startswith("os.rename")]
    return next(i for i in renames if operations[i].endswith(f"step-{step:06d}"))


@pytest.fixture(scope="module")
def straight(work, tmp_path_factory):
    """Ten steps that nobody disturbs, saved at each; and the names of a checkpoint's files."""
    run = Run(work, tmp_path_factory.mktemp("straight") / "out", *OFTEN, "--max-steps", 10).finish()
    folder = step_folders(run.out)[-1]
    return run.out, {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("more", [
    ["--draft-vocab", "full"],
    ["--draft-vocab", 100, "--vocab-map", "MAP", "--mixed-precision", "bf16"],
    ["--draft-vocab", "full", "--gradient-accumulation-steps", 3, "--batch-tokens", 150],
    ["--draft-vocab", 100, "--vocab-map", "MAP", "--freeze-lm-head"],
], ids=["fp32", "bf16", "accumulation", "frozen_head"])
def test_five_steps_a_kill_and_five_more_equal_ten(work, tmp_path, more):
    """Every file: weights, moments, counters, best so far, export, and each step's metrics, thus the order of
    the samples."""
    arguments = ["--batch-tokens", 60, "--epochs", 9, "--max-steps", 10, "--save-every", 5, "--eval-every", 3,
                 "--keep", 3,
                 *(work / "map" if word == "MAP" else word for word in more)]
    straight = Run(work, tmp_path / "straight", *arguments)
    process = straight.start(operations=tmp_path / "operations.json")
    process.join(120)
    assert process.exitcode == 0, straight.log.read_text()[-2000:]
    operations = json.loads((tmp_path / "operations.json").read_text())
    saved = renamed(operations, 5)
    later = [i for i, line in enumerate(operations) if i > saved and line.startswith("open")
             and "metrics.jsonl" in line]
    run = Run(work, tmp_path / "out", *arguments)
    run.killed(later[1])  # steps 6 and 7 are computed, 6 is logged
    assert [folder.name for folder in step_folders(run.out)] == ["step-000005"]
    run.finish()
    assert run.resumed_from() == 5
    assert_equal_runs(run.out, straight.out)


def kill_at_random(work, straight, whole, out, kills, seed, steps):
    """Kills `kills` times, within two steps of a start or (one in six) before its first one; returns how many
    hit a save. Then the run is left to end, as `straight` did."""
    run = Run(work, out, *OFTEN, "--max-steps", steps)
    generator = random.Random(seed)
    last = in_save = 0
    for number in range(kills):
        process = run.start()
        early, wanted = generator.random() < 1 / 6, last + 1 + generator.randint(0, 1)

        def reached(step=wanted, begun=last):  # the step is logged, by this start
            path = out / "metrics.jsonl"
            said = run.resumed_from() or not begun
            return path.exists() and said and f'"step": {step},' in path.read_text()

        deadline = time.monotonic() + 60
        while not early and not reached() and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(generator.random() * (0.5 if early else 0.05))
        process.kill()
        process.join(60)
        code, words = process.exitcode, run.log.read_text()[-2000:] if run.log.exists() else ""
        if code == 0 and number:  # it was at its end before the kill, as may happen where steps are quick
            last, _ = what_is_there(out, whole)
            break
        assert code == -signal.SIGKILL, f"kill {number}: exit code {code}, {words}"
        went_on = run.resumed_from()
        assert went_on in (last or None, None), f"kill {number}: {last} was the last whole checkpoint"
        last, hit = what_is_there(out, whole)
        in_save += hit
    run.finish()
    assert run.resumed_from() == (last or None)
    assert_equal_runs(out, straight)
    return in_save


def test_killed_at_random_moments(work, straight, tmp_path):
    out, whole = straight
    in_save = kill_at_random(work, out, whole, tmp_path / "out", 3, time.time_ns(), 10)
    print(f"{in_save} of 3 kills landed in a save")


@pytest.mark.slow
def test_killed_at_30_random_moments(work, straight, tmp_path):
    _, whole = straight
    seed = time.time_ns()
    print(f"seed {seed}")
    longer = Run(work, tmp_path / "longer", *OFTEN, "--max-steps", 90).finish()
    in_save = kill_at_random(work, longer.out, whole, tmp_path / "out", 30, seed, 90)
    print(f"{in_save} of 30 kills landed in a save")
    assert in_save >= 5


def kill_at_operations(work, straight, whole, folder, choose):
    """A kill before each of the chosen file operations of steps 4 and 5 (each removes the oldest checkpoint,
    and one exports what is the best so far), always of a new run, which is then resumed and ends as
    `straight` did."""
    run = Run(work, folder / "out", *OFTEN, "--max-steps", 10)
    process = run.start(operations=folder / "operations.json")
    process.join(120)
    operations = json.loads((folder / "operations.json").read_text())
    numbers = choose(range(renamed(operations, 3) + 1, renamed(operations, 5) + 5))
    for number in numbers:
        shutil.rmtree(run.out)
        run.killed(number)
        last, _ = what_is_there(run.out, whole)
        run.finish()
        assert run.resumed_from() == (last or None), operations[number]
        try:
            assert_equal_runs(run.out, straight)
        except AssertionError as error:
            raise AssertionError(f"killed before {operations[number]}") from error
    return len(numbers)


def test_killed_at_some_file_operations_of_a_save(work, straight, tmp_path):
    kill_at_operations(work, *straight, tmp_path,
                       lambda numbers: random.Random(time.time_ns()).sample(list(numbers), 3))


@pytest.mark.slow
def test_killed_at_every_file_operation_of_two_saves(work, straight, tmp_path):
    count = kill_at_operations(work, *straight, tmp_path, list)
    print(f"{count} file operations")
    assert count > 30


def test_a_start_from_a_checkpoint_that_is_killed_measures_it_once(work, straight, tmp_path):
    """The record of step 0 stands before any checkpoint; the next start writes it again, not twice."""
    arguments = ("--draft-vocab", "full", "--batch-tokens", 60, "--max-steps", 2, "--init", "checkpoint",
                 "--checkpoint", straight[0],
                 "--force")  # ten steps are no drafter yet
    run = Run(work, tmp_path / "out", *arguments)
    run.killed(2)
    run.finish()
    records = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "heldout" in record] == [0, 1, 2]


def test_training_goes_on_while_a_checkpoint_is_written(work, tmp_path, monkeypatch):
    """That of step 3 is written when step 4 is done, and is the one of step 3."""
    later, save, note = threading.Event(), train_drafter.save_checkpoint, train_drafter.note_step

    def late(out, export, weights, moments, progress, keep):
        assert progress["step"] != 3 or later.wait(60)
        save(out, export, weights, moments, progress, keep)

    def noted(training, *what):
        note(training, *what)
        later.set() if training.progress["step"] == 4 else None

    monkeypatch.setattr(train_drafter, "save_checkpoint", late)
    monkeypatch.setattr(train_drafter, "note_step", noted)
    resume(work, tmp_path / "out", "--keep", 9)
    monkeypatch.undo()
    resume(work, tmp_path / "straight", "--keep", 9)
    assert later.is_set()
    assert_equal_runs(tmp_path / "out", tmp_path / "straight")


def test_a_checkpoint_that_cannot_be_written_ends_the_training(work, tmp_path, monkeypatch):
    def full(*what):
        raise OSError(28, "No space left on device", "checkpoints")

    monkeypatch.setattr(train_drafter, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        resume(work, tmp_path / "out")
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert len([line for line in lines if "lr" in json.loads(line)]) <= 3


# What is found damaged


def resume(work, out, *more):
    return call("train_drafter", "--resume", *Run(work, out, *OFTEN, "--max-steps", 10, *more).arguments)


def replace(path, name, value):
    """The tensor `name` of a safetensors file, any where it is None, by `value` of its own values."""
    tensors = load_file(path)
    name = name or max(tensors, key=lambda key: tensors[key].dim())
    save_file({**tensors, name: value(tensors[name])}, path)


def edit(write, **changes):
    def damage(folder):
        path = folder / "state" / "progress.json"
        write(path, {**read_sealed(path), **changes})
    return damage


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "state" / "progress.json").write_text("{}"),
    lambda folder: (folder / "state" / "progress.json").write_text('{"step": 10}'),
    edit(write_json, step=3), edit(write_json, best=3), edit(write_json, tokens=None),
    edit(write_sealed, step=3),
    lambda folder: replace(folder / "state/weights.safetensors", "lm_head.weight",
                           lambda x: x * float("nan")),
    lambda folder: replace(folder / "state/weights.safetensors", "lm_head.weight", lambda x: x[:-1].clone()),
    lambda folder: replace(folder / "state/optimizer.safetensors", None, lambda x: x + float("inf")),
], ids=["no keys", "one key", "step 3", "best 3", "tokens none", "another step", "nan", "shape", "inf"])
def test_a_damaged_state_is_not_gone_on_from(work, straight, tmp_path, capsys, damage):
    out = tmp_path / "out"
    shutil.copytree(straight[0], out)
    damage(out / "checkpoints" / "step-000010")
    resume(work, out)
    words = capsys.readouterr().err
    assert "step-000010 is damaged" in words and "going on after step 9" in words
    shutil.rmtree(out / "checkpoints" / "step-000010.damaged-1")
    assert_equal_runs(out, straight[0])


def test_damaged_checkpoints_do_not_count_among_those_kept(tmp_path):
    for step in (8, 9):
        for file in FILES:
            path = tmp_path / "checkpoints" / f"step-{step:06d}" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"cut")
    (tmp_path / "checkpoints" / "step-000009.damaged-1").mkdir()
    fresh = {"step": 0, "loss": None, "best": None}
    drafter = torch.nn.Linear(2, 2)
    assert load_checkpoint(tmp_path, drafter, fresh) == (fresh, {})

    def export(folder):
        (folder / "config.json").write_text("{}")
        save_file(drafter.state_dict(), folder / "model.safetensors")

    moments = {f"momentum/{name}": torch.ones(2) for name in ("weight", "bias")}
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, export, drafter.state_dict(), moments, {**fresh, "step": step}, keep=2)
    names = ["step-000002", "step-000003", "step-000008.damaged-1", "step-000009.damaged-1",
             "step-000009.damaged-2"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names
    assert load_checkpoint(tmp_path, drafter, fresh)[0]["step"] == 3


def test_a_drafter_whose_checkpoints_are_all_damaged_is_not_replaced(work, straight, tmp_path):
    """Without any checkpoint it may be what was exported before the first save of a run that was killed: that
    one begins anew."""
    out = tmp_path / "out"
    shutil.copytree(straight[0], out)
    for folder in step_folders(out):
        (folder / "state" / "weights.safetensors").write_bytes(b"cut")
    before = content(out)
    with pytest.raises(UserError, match="none of the checkpoints in .* is whole"):
        resume(work, out)
    assert content(out) == before
    (out / "model.safetensors").unlink()
    resume(work, out)
    for folder in (out / "checkpoints").glob("*.damaged-1"):
        shutil.rmtree(folder)
    assert_equal_runs(out, straight[0])
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints").write_text("")
    with pytest.raises(UserError, match="its checkpoints is no folder"):
        resume(work, out)


def test_a_run_killed_between_its_first_drafter_and_its_first_save_begins_anew(work, tmp_path):
    arguments = (*OFTEN, "--max-steps", 4, "--save-every", 3)
    straight = Run(work, tmp_path / "straight", *arguments)
    process = straight.start(operations=tmp_path / "operations.json")
    process.join(120)
    operations = json.loads((tmp_path / "operations.json").read_text())
    run = Run(work, tmp_path / "out", *arguments)
    run.killed(next(i for i, line in enumerate(operations) if "checkpoints" in line))
    assert (run.out / "model.safetensors").exists() and not step_folders(run.out)
    assert_equal_runs(run.finish().out, straight.out)


def test_a_run_that_diverges_says_so_and_leaves_no_drafter(work, tmp_path):
    arguments = Run(work, tmp_path / "out", *OFTEN, "--lr", 1e38).arguments
    code, summary, words = shell("train_drafter", *arguments, "--max-steps", 1)
    assert (code, summary) == (1, None) and "Traceback" not in words
    assert "is not finite after step 1: training diverged; begin again" in words.splitlines()[-1]
    assert not list(tmp_path.rglob("*.safetensors"))
    arguments[arguments.index("--out") + 1] = tmp_path / "other"
    with pytest.raises(Failed, match="the gradient of step 2 is not finite .* lower --lr"):
        call("train_drafter", *arguments, "--max-steps", 9, "--save-every", 9, "--eval-every", 9)


def test_metrics_that_somebody_has_edited(work, straight, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(straight[0], out)
    lines = (out / "metrics.jsonl").read_bytes()
    edited = b'\xff\xfe\n{"step": 2, "no\xff": 1}\n[3]\n{"step": 1, "heldout": true}\n'
    (out / "metrics.jsonl").write_bytes(edited + lines)
    resume(work, out, "--plot", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (out / "metrics.jsonl").read_bytes().endswith(lines)
    (out / "metrics.jsonl").unlink()
    resume(work, out, "--plot", tmp_path / "none.png")
    assert "nothing is plotted" in capsys.readouterr().err and not (tmp_path / "none.png").exists()


def test_out_that_holds_a_lock_only_or_has_lost_something(work, straight, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    lock_run(out).close()
    assert resume(work, out)["steps"] == 10
    (out / "run.json").unlink()
    with pytest.raises(UserError, match="has lost its run.json"):
        resume(work, out)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("dangling", "loop"):
        with pytest.raises(UserError, match="is a link to what does not exist"):
            resume(work, tmp_path / name)
    monkeypatch.setattr("train_drafter.get_available_trackers", lambda: [])
    with pytest.raises(UserError, match="--log-with all: none is installed"):
        resume(work, out, "--log-with", "all")

    def after_another(folder):
        shutil.copy(straight[0] / "run.json", folder)
        return lock_run(folder)

    # whose run began between the first look and the lock
    monkeypatch.setattr("train_drafter.lock_run", after_another)
    with pytest.raises(UserError, match="seed is 5 now and was 0"):
        resume(work, tmp_path / "late", "--seed", 5)


def test_other_processes_leave_the_first_one_time_to_say_what_is_wrong(monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    for rank, wanted in ((0, []), (1, [10.0])):
        monkeypatch.setattr(cli, "RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            cli._leave("it is wrong", 2)
        assert slept == wanted and "it is wrong" in capsys.readouterr().err
