"""extract_hidden_states.py on several processes, killed at any moment, and on a full disk: the same shards as
in one go.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from tqdm import tqdm

import common.cli
import extract_hidden_states
from common.cli import UserError
from common.files import lock_folder, read_sealed, replace_file, sha256_file, write_sealed
from common.shards import Shards, read_manifest
from tests import tiny
from tests.scripts import EXACT, ROOT, call

OPERATIONS = {"os.rename", "os.remove", "os.mkdir", "os.chmod"}

# Each run is a process of its own, forked from one that has imported everything and done nothing else: a
# start takes no second.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["extract_hidden_states", "accelerate",
                                  "transformers.models.llama.modeling_llama",
                                  "tests.test_extract_kill"])


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target, rows of which one cannot be used, and the shards of one undisturbed process, 11 of them
    and an empty block.
    """
    folder = tmp_path_factory.mktemp("extract")
    tiny.make_target(folder / "target")
    rows = tiny.conversations(24)
    rows[6:8] = [{"messages": []}, {"messages": []}]
    tiny.write_rows(folder / "rows.jsonl", rows)
    call("extract_hidden_states", *flags(folder, folder / "once"))
    return folder


def flags(work, out):
    return ["--target", str(work / "target"), "--data", str(work / "rows.jsonl"), "--out", str(out),
            "--block-lines", "2", "--generate-rows", "4", "--regenerate",
            "--max-new-tokens", "6", "--temperature", "1", *EXACT]


def _extract(arguments, log, launched, fatal):
    """One process of a run, its words in the file `log`; killed with SIGKILL before its file operation number
    `fatal`.
    """
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own one, of several processes, would outlive a kill
    os.environ.update({key: str(value) for key, value in launched.items()})
    for module in (common.cli, extract_hidden_states):
        module.RANK = launched.get("RANK", 0)
    out, seen = arguments[arguments.index("--out") + 1], 0

    def watch(event, values):
        nonlocal seen
        writes = event == "open" and str(values[0]).startswith(out) and str(values[1])[:1] in "wax"
        if writes or event in OPERATIONS and str(values[0]).startswith(out):
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    if fatal is not None:
        sys.addaudithook(watch)
    call("extract_hidden_states", *arguments)


def start(work, out, processes=1, fatal=None, more=()):
    launched = {}
    if processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            launched = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": probe.getsockname()[1],
                        "ACCELERATE_USE_CPU": "true"}
    log = out.with_suffix(".log")
    log.unlink(missing_ok=True)
    started = [PROCESSES.Process(target=_extract, args=([*flags(work, out), *more], str(log),
                                                        launched | ({"RANK": rank, "LOCAL_RANK": rank}
                                                                    if launched else {}), fatal))
               for rank in range(processes)]
    for process in started:
        process.start()
    return started


def finish(work, out, processes=1, more=()):
    started = start(work, out, processes, more=more)
    for process in started:
        process.join(120)
    assert [process.exitcode
            for process in started] == [0] * processes, out.with_suffix(".log").read_text()[-3000:]


def shards(out):
    return {file.name: sha256_file(file) for file in out.glob("shard-*")}


def assert_whole(work, out):
    """Nothing is lost, doubled or left over, and every shard is that of an undisturbed run."""
    once = work / "once"
    assert shards(out) == shards(once) and len(shards(out)) == 11
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in once.iterdir())
    ours, theirs = (json.loads((folder / "manifest.json").read_text()) for folder in (out, once))
    assert ours == theirs and ours["complete"] and [entry["block"] for entry in ours["empty_blocks"]] == [3]


def listed(out):
    """What a run says is finished, {file: (hash in the list, hash of the file, time of the file)}."""
    found = {}
    if (out / "manifest.json").exists():
        for entry in read_manifest(out)["shards"]:
            file = out / entry["file"]
            found[file.name] = entry["sha256"], sha256_file(file), file.stat().st_mtime_ns
    return found


def kill_and_go_on(work, out, processes, resumed, chosen, seconds):
    """Kill all processes at a random moment, or each before a random file operation, and go on with another
    number of them.
    """
    by_time = chosen.random() < 0.5
    started = start(work, out, processes, None if by_time else chosen.randrange(60 // processes))
    if by_time:
        time.sleep(chosen.random() * seconds)
        for process in started:
            process.kill()
    for process in started:
        process.join(60)
        if process.exitcode is None:  # it waits for one that is dead
            process.kill()
            process.join()
    finished = listed(out)
    assert all(told == found for told, found, _ in finished.values())
    finish(work, out, resumed)
    assert_whole(work, out)
    assert all((out / name).stat().st_mtime_ns == when for name, (_, _, when) in finished.items())
    return len(finished)


def kill_often(work, folder, times, seed):
    chosen, landed = random.Random(seed), []
    begun = time.monotonic()
    finish(work, folder / "timed")
    seconds = time.monotonic() - begun
    for n in range(times):
        processes = 2 if n % 5 == 4 else 1
        landed.append(kill_and_go_on(work, folder / f"killed-{n}", processes,
                                     chosen.choice((1, 1, 1, 2)) if processes == 1 else 1, chosen,
                                     seconds * processes))
    return landed


def test_killed_at_a_few_moments(work, tmp_path):
    kill_often(work, tmp_path, 3, 5)


@pytest.mark.slow
def test_killed_at_fifty_moments(work, tmp_path):
    landed = kill_often(work, tmp_path, 50, 1)
    assert sum(0 < count < 11 for count in landed) >= 5


@pytest.mark.parametrize("processes, resumed", [(2, 3), (3, 1)])
def test_the_shards_do_not_depend_on_the_number_of_processes(work, tmp_path, processes, resumed):
    finish(work, tmp_path / "out", processes)
    assert_whole(work, tmp_path / "out")
    for block in (1, 4, 5, 9):
        (tmp_path / "out" / f"shard-{block:05d}.safetensors").unlink()
    finish(work, tmp_path / "out", resumed)
    assert_whole(work, tmp_path / "out")


def test_under_torchrun_rank_0_speaks(work, tmp_path):
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               ROOT / "extract_hidden_states.py"]
    done = subprocess.run([*command, *flags(work, tmp_path / "out")], capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0 and json.loads(done.stdout)["samples"] == 22, done.stderr
    assert_whole(work, tmp_path / "out")
    assert done.stderr.count("22 of 24 rows") == 1
    done = subprocess.run([*command, *flags(work, tmp_path / "out"), "--max-length", "99"],
                          capture_output=True, text=True, env=environment)
    assert done.returncode and done.stdout == ""
    assert done.stderr.count("max_length 512, this command has 99") == 1


def test_two_commands_on_one_folder(work, tmp_path):
    out = shutil.copytree(work / "once", tmp_path / "out")
    words = "being written by another process"
    with lock_folder(out, "written", shared=True), pytest.raises(UserError, match=words):
        call("extract_hidden_states", *flags(work, out))
    call("extract_hidden_states", *flags(work, out))


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", folder],
                      capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("told", [True, False])
def test_a_full_disk(work, small_disk, monkeypatch, capsys, told):
    """told: by what is free, before a shard; or by the system, while it is written."""
    out, filler = small_disk / "out", small_disk / "filler"
    usage = shutil.disk_usage(small_disk)
    filler.write_bytes(bytes(1 << 20 if told else usage.free - 150000))
    if not told:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 40))
    monkeypatch.setattr(common.cli.os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["extract_hidden_states.py", *flags(work, out)])
    with pytest.raises(SystemExit) as left:
        common.cli.run(extract_hidden_states.main)
    words = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 1 and ("left and the next shard needs" if told
                                     else "the disk is full: no room for") in words, words
    finished = listed(out)
    assert 0 < len(finished) < 11 and all(said == found for said, found, _ in finished.values())
    # the list of what is finished may itself find no room: then a shard is whole and will be made again
    assert shards(out).items() <= shards(work / "once").items()
    assert len(shards(out)) - len(finished) <= (not told)
    assert {file.name for file in out.iterdir() if not file.name.startswith("answers-")} == {
        ".lock", "manifest.json", "journal-0.jsonl", *shards(out)}
    with pytest.raises(OSError, match="No space left on device"):  # safetensors' own kind of error, too
        replace_file(out / "large", lambda path: save_file({"a": torch.zeros(1 << 20)}, path))
    assert not list(out.glob(".*large*"))
    filler.unlink()
    monkeypatch.undo()
    call("extract_hidden_states", *flags(work, out))
    assert_whole(work, out)
    assert all((out / name).stat().st_mtime_ns == when for name, (_, _, when) in finished.items())


def test_damaged_and_foreign_shards_are_named(work, tmp_path, capsys):
    out = shutil.copytree(work / "once", tmp_path / "out")
    path = out / "shard-00004.safetensors"
    before = path.read_bytes()
    Shards(out, verify=True)
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    Shards(out)
    with pytest.raises(UserError,
                       match=rf"shard-00004.safetensors has hash {sha256_file(path)}, "
                             r"the manifest says [0-9a-f]{64}"):
        Shards(out, verify=True)
    path.write_bytes(before[:-1])
    with pytest.raises(UserError,
                       match=f"shard-00004.safetensors has {len(before) - 1} bytes, "
                             f"the manifest says {len(before)}"):
        Shards(out)
    path.unlink()
    with pytest.raises(UserError, match="shard-00004.safetensors is listed in the manifest and missing"):
        Shards(out)
    shutil.copy(out / "shard-00005.safetensors", path)
    manifest = read_sealed(out / "manifest.json")
    entries = {entry["file"]: entry for entry in manifest["shards"]}
    entries[path.name]["bytes"] = path.stat().st_size
    entries[path.name]["rows"] += entries[path.name]["rows"] == entries["shard-00005.safetensors"]["rows"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    for refused in (lambda: Shards(out), lambda: call("extract_hidden_states", *flags(work, out))):
        with pytest.raises(UserError, match="manifest.json was changed after it was written"):
            refused()
    write_sealed(out / "manifest.json", manifest)
    with pytest.raises(UserError,
                       match=r"shard-00004.safetensors holds input_ids of \d+ rows, the manifest says \d+"):
        list(Shards(out).supervised())  # when it is opened
    del entries[path.name]["index"]  # of an earlier version, which read all headers at once
    write_sealed(out / "manifest.json", manifest)
    with pytest.raises(UserError, match=r"holds input_ids of \d+ rows, the manifest says \d+"):
        Shards(out)
    shutil.rmtree(out)
    shutil.copytree(work / "once", out)
    shutil.copy(path.with_name("shard-00005.safetensors"), out / "shard-00077.safetensors")
    Shards(out)
    assert "shard-00077.safetensors is not listed in the manifest and is not read" in capsys.readouterr().err
