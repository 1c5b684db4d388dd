"""extract_hidden_states.py --max-disk-gb and train_drafter.py --follow: one epoch over shards that are
removed once they are read.
"""

import json
import multiprocessing
import os
import random
import shutil
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

import extract_hidden_states
from common.cli import UserError
from common.files import append_sealed, read_sealed, write_json, write_sealed
from common.shards import ACKNOWLEDGED, Journals, Shards, read_manifest
from tests import tiny
from tests.scripts import EXACT, call, shell
from train_drafter import Stream, expected_tokens, schedule

ROOM = 0.0011  # GB, of which the held-out samples take a third; a shard takes 0.15 MB
# Each run is a process of its own, forked from one that has imported everything and done nothing else: a
# start takes no second.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["train_drafter", "extract_hidden_states", "accelerate",
                                  "transformers.models.llama.modeling_llama",
                                  "tests.test_follow"])


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target, its rows, the shards of an extraction that never had to wait, and a drafter that
    followed it.
    """
    folder = tmp_path_factory.mktemp("follow")
    tiny.make_target(folder / "target")
    rows = tiny.conversations(120)
    rows[40:48] = [{"messages": []}] * 8  # a block of which nothing is kept
    tiny.write_rows(folder / "rows.jsonl", rows)
    call("extract_hidden_states", *extraction(folder, folder / "shards", 1))
    call("train_drafter", *training(folder, folder / "shards", folder / "drafter"))
    return folder


def extraction(work, out, room):
    return ["--target", str(work / "target"), "--data", str(work / "rows.jsonl"), "--out", str(out),
            "--block-lines", "8", "--heldout",
            "0.1", "--max-disk-gb", str(room)]


def training(work, shards, out, *more):
    return ["--target", str(work / "target"), "--shards", str(shards), "--out", str(out), "--draft-vocab",
            "full", "--follow",
            "--batch-tokens", "256", "--eval-every", "4", *map(str, more)]


def _run(script, arguments, log):
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own one, of several processes, would outlive a kill
    call(script, *arguments)


def start(script, arguments, log):
    process = PROCESSES.Process(target=_run, args=(script, arguments, str(log)))
    process.start()
    return process


def size(folder):
    """Bytes of the shards there, also of those half-written."""
    total = 0
    for name in os.listdir(folder) if folder.exists() else ():
        with suppress(FileNotFoundError):
            total += os.path.getsize(folder / name) if "shard-" in name or name.startswith(".tmp") else 0
    return total


def same_drafter(one, other):
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_bounded_disk_gives_the_same_drafter(work, tmp_path):
    """Both at once: never more shards than the bound, in the end all were read, and the drafter is that of an
    unbounded disk.
    """
    shards, out = tmp_path / "shards", tmp_path / "drafter"
    running = [start("train_drafter", training(work, shards, out), tmp_path / "train.log"),
               start("extract_hidden_states", extraction(work, shards, ROOM), tmp_path / "extract.log")]
    most = 0
    while any(process.is_alive() for process in running):
        most = max(most, size(shards))
        time.sleep(0.01)
    words = "".join((tmp_path / f"{name}.log").read_text() for name in ("extract", "train"))
    assert [process.exitcode for process in running] == [0, 0], words
    assert most <= ROOM * 1e9 < size(work / "shards")
    assert same_drafter(out, work / "drafter")
    manifest = read_manifest(shards)
    assert manifest["complete"] and manifest["done"] == read_manifest(work / "shards")["done"]
    # once more: removes what was read last
    left = call("extract_hidden_states", *extraction(work, shards, ROOM))
    assert left["samples"] == manifest["done"]["samples"]
    aside = manifest["planned"]["heldout_blocks"]
    names = [f"shard-{block:05d}.safetensors" for block in range(aside)]
    assert sorted(path.name for path in shards.glob("shard-*")) == names
    held = Shards(shards, first=0)
    assert held.heldout.all() and len(held.index) == manifest["done"]["heldout_samples"] > 3
    with pytest.raises(UserError, match=r"lacks 1\d of its shards"):
        Shards(shards)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_either_side_killed(work, tmp_path, seed):
    """Both are killed at random moments, again and again; the drafter is the same, bit for bit."""
    shards, out, chance = tmp_path / "shards", tmp_path / "drafter", random.Random(seed)
    wanted = {"extract_hidden_states": extraction(work, shards, ROOM),
              "train_drafter": training(work, shards, out, "--save-every", 3, "--resume")}
    running, kills, most = {}, 0, 0
    while wanted:
        for script in list(wanted):
            if script not in running:
                running[script] = start(script, wanted[script], tmp_path / f"{script}.log")
        victim, until = chance.choice(list(wanted)), time.monotonic() + chance.uniform(0.2, 1.2)
        while time.monotonic() < until and running[victim].is_alive():
            most = max(most, size(shards))
            time.sleep(0.01)
        for script in list(wanted):
            if not running[script].is_alive():
                assert running[script].exitcode == 0, (tmp_path / f"{script}.log").read_text()
                del wanted[script]
        if victim in wanted and kills < 12:
            running[victim].kill()
            running.pop(victim).join()
            kills += 1
    print(f"{kills} kills")
    assert kills >= 3 and same_drafter(out, work / "drafter")
    # a killed extraction's half-written shard stays until it is begun again
    assert most <= ROOM * 1e9 + 0.4e6


def stream_of(work, shards=None, **changed):
    """As the drafter of `work` follows its shards, or others."""
    settings = {"batch_tokens": 256, "max_steps": None, "seed": 0, **changed}
    return Stream(shards or Shards(work / "shards", first=0), work / "drafter", **settings)


def walk(stream, until=None):
    """The (shard, first row) of the samples of each step, and the positions after them."""
    steps, positions = [], []
    while len(steps) != until and (found := stream.step(len(steps))):
        steps.append([tuple(stream.shards.index[number, :2].tolist()) for number in found[0]])
        steps[-1] = [(stream.shards.entries[shard]["file"], row) for shard, row in steps[-1]]
        positions.append(found[1])
    return steps, positions


def test_every_sample_once_and_resumed_anywhere(work, tmp_path):
    steps, positions = walk(stream_of(work))
    everything = Shards(work / "shards")
    wanted = {(everything.entries[shard]["file"], row) for shard, row, _, held,
              *_ in everything.index.tolist() if not held}
    taken = [sample for step in steps for sample in step]
    assert len(taken) == len(wanted) and set(taken) == wanted
    assert positions[-1] == {"block": everything.manifest["planned"]["blocks"], "taken": 0,
                             "samples": len(taken)}
    files = [file for file, _ in taken]
    assert files == sorted(files) and taken != sorted(taken)  # shard after shard, shuffled inside
    assert any(len({file for file, _ in step}) == 2 for step in steps), "no step reaches over a shard's end"
    for number in range(0, len(positions), 3):
        again = stream_of(work)
        again.position = positions[number]
        assert walk(again)[0] == steps[number + 1 :]
    assert walk(stream_of(work, seed=1))[0] != steps


def test_steps_and_schedule_come_from_the_plan(work, tmp_path):
    """Expected tokens are the planned ones; the rate's place is the share of the planned samples that are
    gone.
    """
    shards = Shards(work / "shards", first=0)
    everything = Shards(work / "shards")
    tokens = int(everything.index[~everything.heldout, 2].sum())
    assert expected_tokens(shards) == tokens
    stream = stream_of(work, shards)
    assert (stream.steps, stream.samples) == (round(tokens / 256), int((~everything.heldout).sum()))
    place = stream.place({"samples": stream.samples // 2, "step": 3})
    assert place == pytest.approx(stream.steps / 2, rel=0.02)
    few = stream_of(work, shards, max_steps=4)
    assert (few.steps, few.place({"samples": 0, "step": 3})) == (4, 3)
    # between two steps of the warm-up, too
    assert max(schedule(place / 7, 40, 0.3) for place in range(280)) == 1.0
    # as of answers that came out half as long as they could be
    shards.manifest["planned"]["heldout_tokens"] *= 2
    planned = shards.manifest["planned"]
    assert expected_tokens(shards) == (planned["tokens"] - planned["heldout_tokens"]) // 2


def test_a_checkpoint_is_due_before_the_room_is_needed(work, tmp_path):
    shards = Shards(work / "shards", first=0)
    stream = stream_of(work, shards)
    first = stream.planned["heldout_blocks"]
    room = 2 * sum(stream.planned["block_bytes"][first : first + 3])
    stream.acknowledged, stream.planned = first, {**stream.planned, "room": room}
    assert [stream.due(first + read) for read in range(5)] == [False, False, False, False, True]
    sizes, reached = stream.planned["block_bytes"], []
    large = stream_of(work, shards, batch_tokens=4096)
    large.planned, start = stream.planned, first
    # more tokens than may be there: a step ends before it reaches over half of the room
    while found := large.step(0):
        end = found[1]["block"] + (found[1]["taken"] > 0)
        assert sum(sizes[start:end]) <= stream.planned["room"] / 2
        reached.append(end - start)
        start = found[1]["block"]
    assert start == stream.planned["blocks"] and max(reached) > 2


def test_regenerated_answers_follow_too(work, tmp_path):
    """Planned tokens are the most that answers can be; what the held-out ones came to says what is
    expected.
    """
    tiny.write_rows(tmp_path / "rows.jsonl",
                    [{"messages": row["messages"][:1]} for row in tiny.conversations(60)])
    call("extract_hidden_states", "--target", work / "target", "--data", tmp_path / "rows.jsonl", "--out",
         tmp_path / "shards",
         "--regenerate", "--max-new-tokens", 40, "--heldout", 0.2, "--block-lines", 8, "--max-disk-gb", 1,
         *EXACT)
    shards, everything = Shards(tmp_path / "shards", first=0), Shards(tmp_path / "shards")
    tokens, planned = int(everything.index[~everything.heldout, 2].sum()), everything.manifest["planned"]
    assert abs(expected_tokens(shards) / tokens - 1) < 0.1
    assert (planned["tokens"] - planned["heldout_tokens"]) / tokens - 1 > 0.1
    for entry in everything.manifest["shards"]:
        assert entry["bytes"] <= planned["block_bytes"][entry["block"]]


def test_a_map_of_the_first_shards(work, tmp_path):
    """Counted while the extraction waits, from shards that are named: the same however many are there. And
    training follows with it.
    """
    shards, out = tmp_path / "shards", tmp_path / "map"
    writing = start("extract_hidden_states", extraction(work, shards, ROOM), tmp_path / "log")
    arguments = ("--draft-vocab", 100, "--first-shards", 2, "--out", out)
    with pytest.raises(UserError, match="first shards that are wanted|manifest.json|no folder"):
        call("build_vocab_map", "--shards", shards, *arguments)  # at once: nothing is there yet
    while writing.is_alive():
        with suppress(UserError):
            made = call("build_vocab_map", "--shards", shards, *arguments)
            break
        time.sleep(0.1)
    everything = Shards(work / "shards")
    aside = everything.manifest["planned"]["heldout_blocks"]
    first = [number for number, row in enumerate(everything.index) if row[0] < aside + 2]
    counted = sum(int(everything.sample(n)["loss_mask"].sum()) for n in first if not everything.heldout[n])
    facts = json.loads((out / "vocab_map.json").read_text())
    assert (facts["supervised_tokens"], facts["first_shards"], made["draft_vocab"]) == (counted, 2, 100)
    own = training(work, shards, tmp_path / "drafter", "--vocab-map", out)
    own[own.index("full")] = "100"
    done = call("train_drafter", *own)
    writing.join()
    assert done["coverage"] is None
    assert 0.5 < done["coverage_heldout"] == pytest.approx(made["coverage_heldout"])
    with pytest.raises(UserError, match="first shards that are wanted|lacks"):
        call("build_vocab_map", "--shards", shards, *arguments, "--force")  # those are gone


def test_no_shard_is_larger_than_planned(work):
    manifest = read_manifest(work / "shards")
    planned = manifest["planned"]["block_bytes"]
    assert all(0.8 * planned[entry["block"]] < entry["bytes"] <= planned[entry["block"]]
               for entry in manifest["shards"])


@pytest.mark.parametrize("steps", [1, 6])
def test_an_ended_training_ends_the_extraction(work, tmp_path, steps):
    shards = tmp_path / "shards"
    writing = start("extract_hidden_states", extraction(work, shards, ROOM), tmp_path / "log")
    done = call("train_drafter", *training(work, shards, tmp_path / "drafter", "--max-steps", steps))
    assert done["steps"] == steps
    writing.join()
    assert writing.exitcode == 1
    assert "the training that follows has ended with" in (tmp_path / "log").read_text()


def test_refusals(work, tmp_path):
    def refused(words, script, *arguments):
        with pytest.raises(UserError, match=words):
            call(script, *arguments)

    own = training(work, work / "shards", tmp_path / "out")
    refused("at most 15 shards", "build_vocab_map", "--shards", work / "shards", "--draft-vocab", 100,
            "--first-shards", 500, "--out",
            tmp_path / "map")
    for planned in ({"heldout_blocks": 99}, {"block_bytes": [1]}, {"samples": 1}, {"room": 0}):
        shutil.copytree(work / "shards", tmp_path / f"{planned}")
        manifest = read_manifest(work / "shards")
        edited = {**manifest, "planned": {**manifest["planned"], **planned}}
        (tmp_path / f"{planned}" / "manifest.json").write_text(json.dumps(edited))
        refused("was changed after it was written", "train_drafter",
                *training(work, tmp_path / f"{planned}", tmp_path / "out"))
    refused("with --follow each shard is there once", "train_drafter", *own, "--epochs", 2)
    refused("is followed by the training in .*drafter, which has acknowledged", "train_drafter", *own)
    refused("held-out samples stay and take", "extract_hidden_states",
            *extraction(work, tmp_path / "none", 0.0004))
    refused("it may take a quarter", "extract_hidden_states", *extraction(work, tmp_path / "none", ROOM),
            "--block-lines", 30)
    refused("begun with --max-disk-gb 1.0, this command has 2.0", "extract_hidden_states",
            *extraction(work, work / "shards", 2))
    refused("begun with --max-disk-gb 1.0, this command has null", "extract_hidden_states",
            *extraction(work, work / "shards", 2)[:-2])
    call("extract_hidden_states", *extraction(work, tmp_path / "plain", 1)[:-2])
    refused("was extracted without --max-disk-gb", "train_drafter",
            *training(work, tmp_path / "plain", tmp_path / "out"))
    refused("not there yet", "train_drafter", *training(work, tmp_path / "later", tmp_path / "out"),
            "--dry-run")
    shutil.copytree(work / "shards", tmp_path / "moved")
    write_json(tmp_path / "moved" / ACKNOWLEDGED, {"blocks": 999})
    refused("acknowledged.json was changed after it was written", "train_drafter",
            *training(work, tmp_path / "moved", tmp_path / "out"))
    (tmp_path / "moved" / ACKNOWLEDGED).unlink()
    call("train_drafter", *training(work, tmp_path / "moved", tmp_path / "out"), "--dry-run")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "moved" / ACKNOWLEDGED).exists()


def test_a_lost_checkpoint_is_not_gone_on_from(work, tmp_path):
    """Its shards are removed: training again from an earlier one would leave out samples."""
    for name in ("shards", "drafter"):
        shutil.copytree(work / name, tmp_path / name)
    steps = sorted((tmp_path / "drafter" / "checkpoints").iterdir())
    shutil.rmtree(steps[-1])
    with pytest.raises(UserError,
                       match="goes on at shard .* were removed when a later checkpoint had read them"):
        call("train_drafter", *training(work, tmp_path / "shards", tmp_path / "drafter", "--resume"))


def test_a_paused_extraction_goes_on_on_a_disk_of_the_bound(work, tmp_path, monkeypatch):
    """Its own shards are part of what it may take."""
    writing = start("extract_hidden_states", extraction(work, tmp_path / "shards", ROOM), tmp_path / "log")
    while size(tmp_path / "shards") < 0.8e6:
        time.sleep(0.05)
    writing.kill()
    writing.join()
    asked = []
    monkeypatch.setattr(extract_hidden_states, "check_space", lambda args, need: asked.append(need))
    monkeypatch.setattr(extract_hidden_states, "open_backend", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call("extract_hidden_states", *extraction(work, tmp_path / "shards", ROOM))
    there = size(tmp_path / "shards")  # without what the kill left half-written
    assert 0 < asked[0] <= ROOM * 1e9 - there


def test_what_every_process_finished_is_listed_while_rank_0_waits(work, tmp_path, capsys):
    """Else training would wait for a shard that is on disk, and the extraction for training."""
    manifest = read_manifest(work / "shards")
    manifest |= {"run": "r", "complete": False}
    last, before = manifest["shards"].pop(), manifest["shards"].pop()
    write_sealed(tmp_path / "manifest.json", manifest)
    append_sealed(tmp_path / "journal-1.jsonl", last)
    append_sealed(tmp_path / "journal-0.jsonl", before)
    assert read_manifest(tmp_path)["shards"][-2:] == [before, last]
    journals = Journals(tmp_path)
    assert len(journals.read()) == 2 and journals.read() == []
    lines = (tmp_path / "journal-1.jsonl").read_bytes()
    with open(tmp_path / "journal-1.jsonl", "ab") as file:
        file.write(lines[:-9])  # as a kill leaves it, or while it is written
        file.flush()
        assert journals.read() == []
        file.write(lines[-9:] + lines.replace(b'"rows": ', b'"rows": 1'))
    assert journals.read() == [last]
    assert "journal-1.jsonl was changed after it was written: 1 of its lines" in capsys.readouterr().err


def test_another_extraction_in_the_same_place(work, tmp_path):
    shutil.copytree(work / "shards", tmp_path / "shards")
    stream = stream_of(work, Shards(tmp_path / "shards", first=0))
    stream.step(0)
    manifest = read_sealed(work / "shards" / "manifest.json")
    write_sealed(tmp_path / "shards" / "manifest.json", {**manifest, "data_sha256": "0" * 64})
    with pytest.raises(UserError, match="is another extraction's now"):
        walk(stream)


@pytest.mark.slow
def test_several_processes_follow(work, tmp_path, monkeypatch):
    """Two extract, two train: the disk is bounded for all of them together, and the drafter is the same but
    for rounding.
    """
    shards, out = tmp_path / "shards", tmp_path / "drafter"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    results = {}
    threads = [threading.Thread(target=lambda script=script, arguments=arguments: results.update(
        {script: shell(script, *arguments, launcher=launcher)})) for script, arguments in (
            ("extract_hidden_states", extraction(work, shards, ROOM)), ("train_drafter",
                                                                        training(work, shards, out)))]
    most = 0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, size(shards))
        time.sleep(0.01)
    assert [results[script][0] for script in sorted(results)] == [0, 0], results
    assert most <= ROOM * 1e9
    one, other = (load_file(folder / "model.safetensors") for folder in (out, work / "drafter"))
    for name in one:
        np.testing.assert_allclose(one[name].float(), other[name].float(), atol=2e-2, rtol=2e-2)
