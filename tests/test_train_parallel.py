"""Training on two processes (gloo), replicated and sharded, against one; order of samples; logs and plots;
whose files are removed."""

import json
import multiprocessing
import os
import shutil
import socket
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor

import common.cli
import common.ttt
import train_drafter
from common.cli import Progress, UserError
from common.drafter import load_drafter
from common.loss import packs
from common.target import Target
from tests.scripts import call, make_work
from tests.test_train import adamw_alone
from train_drafter import plan_steps, sample_costs, share_out

# Forked from a process that has imported everything and done nothing else: a start takes no second.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["train_drafter", "transformers.models.llama.modeling_llama",
                                  "tests.test_train_parallel"])
# Batches of one to three samples leave a process with fewer micro-batches than the other, or with nothing to
# learn from.
ARGUMENTS = ("--ttt-steps", 2, "--lr", 3e-3, "--batch-tokens", 60, "--gradient-accumulation-steps", 2,
             "--max-steps", 6,
             "--eval-every", 2, "--save-every", 3)
STATE = "checkpoints/step-000006/state"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target, shards of its own answers, a map of 101 ids, which two processes cannot share evenly,
    and a run of one process."""
    folder = make_work(tmp_path_factory.mktemp("parallel"), 24, 24, 101)
    train(folder, folder / "one")
    return folder


def train(work, out, *more, muon=False):
    """Clipped at every step, and without muon unless told otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train_drafter.MAX_GRAD_NORM", 1e-2)
        if not muon:
            patch.setattr("train_drafter.make_optimizers", adamw_alone)
        return call("train_drafter", "--shards", work / "shards", "--target", work / "target", "--out", out,
                    "--draft-vocab", 101,
                    "--vocab-map", work / "map", *ARGUMENTS, *more)


def train_apart(processes, work, out, *more, sharded=False, muon=False):
    """The same on processes of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "ACCELERATE_USE_CPU": "true",
                "ACCELERATE_USE_FSDP": str(sharded).lower()}
    answers = PROCESSES.Queue()
    started = [PROCESSES.Process(target=_process, args=(rank, launched, answers, work, out, more, muon))
               for rank in range(processes)]
    for process in started:
        process.start()
    summaries = [answers.get(timeout=120) for _ in started]
    for process in started:
        process.join()
    assert all(summary["processes"] == processes for summary in summaries), summaries
    assert len({json.dumps(summary["accept_length"]) for summary in summaries}) == 1
    assert all((summary["largest_share"] < 0.51) == (sharded and processes == 2) for summary in summaries)
    return summaries


def _process(rank, launched, answers, work, out, more, muon):
    launched = {**launched, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({key: str(value) for key, value in launched.items()})
    common.cli.RANK = train_drafter.RANK = rank
    torch.set_num_threads(1)
    shares, gather = [], train_drafter.gather

    def watch(tensors, keep):  # what this process holds of each weight and moment
        shares.extend((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() / tensor.numel()
                      for name, tensor in tensors.items() if not name.startswith("step/"))
        return gather(tensors, keep)

    def count(training, *what):  # gradients that DDP sends
        if training.progress["step"] == 0 and hasattr(training.model, "register_comm_hook"):
            training.model.register_comm_hook(None, send)
        return learn(training, *what)

    def send(state, bucket):
        sent.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    sent, learn = [], train_drafter.learn
    train_drafter.gather, train_drafter.learn = watch, count
    try:
        summary = train(work, out, *more, muon=muon)
        answers.put({**summary, "largest_share": max(shares), "sent": sum(sent)})
    except BaseException as error:
        answers.put({"processes": 0, "error": repr(error)})
        raise
    torch.distributed.destroy_process_group() if torch.distributed.is_initialized() else None


@pytest.fixture(scope="module")
def sharded(work):
    train_apart(2, work, work / "sharded", sharded=True)
    return work / "sharded"


def records(out, heldout=False):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if ("heldout" in line) == heldout]


def check_alike(ours, theirs):
    """Losses, gradient norms and held-out figures of two runs, their drafters and states: equal but for
    rounding."""
    for a, b in zip(records(ours), records(theirs), strict=True):
        assert a["grad_norm"] > 0.02  # clipped at every step
        for key in ("loss", "grad_norm", "lr", "depth_losses", "tokens"):
            assert a[key] == pytest.approx(b[key], rel=1e-4), key
    for a, b in zip(records(ours, heldout=True), records(theirs, heldout=True), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert all(a[key] == b[key] for key in ("step", "accept_length", "acceptance", "coverage"))
    for file in ("model.safetensors", f"{STATE}/weights.safetensors", f"{STATE}/optimizer.safetensors"):
        a, b = load_file(ours / file), load_file(theirs / file)
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].shape == b[name].shape and a[name].dtype == b[name].dtype
            assert torch.allclose(a[name].double(), b[name].double(), atol=1e-3), f"{file}: {name}"


def test_two_processes_learn_what_one_learns(work, tmp_path):
    """With gradients sent once a step, whatever number of micro-batches it has."""
    for summary in train_apart(2, work, tmp_path / "two"):
        assert summary["sent"] == summary["steps"] * summary["trainable_params"]
    check_alike(tmp_path / "two", work / "one")


def test_sharded_weights_learn_the_same(work, sharded):
    check_alike(sharded, work / "one")


def test_muon_on_sharded_matrices_learns_the_same(work, tmp_path):
    """To the rounding of Muon's own products, which are in bfloat16; the momentum is sharded, too."""
    train(work, tmp_path / "one", muon=True)
    train_apart(2, work, tmp_path / "two", sharded=True, muon=True)
    for a, b in zip(records(tmp_path / "two"), records(tmp_path / "one"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
    stored = load_file(tmp_path / "two" / STATE / "optimizer.safetensors")
    assert {"momentum_buffer/fc.weight", "exp_avg/lm_head.weight"} <= stored.keys()
    assert "exp_avg/fc.weight" not in stored


MATRICES = ((24, 16), (16, 24), (8, 40), (40, 8), (16, 16))


def _muon(rank, port, answers):
    """Three steps of our Muon, or of torch's where `rank` is None; how many matrices it orthogonalises."""
    kind, calls, orthogonal = train_drafter.Muon, [], train_drafter.orthogonal
    if rank is None:
        kind = torch.optim.Muon
    else:
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        train_drafter.orthogonal = lambda *inputs: calls.append(1) or orthogonal(*inputs)
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in MATRICES]
    optimizer = kind(matrices, lr=0.02, weight_decay=0.0, adjust_lr_fn="original")
    for _ in range(3):
        for matrix in matrices:
            matrix.grad = torch.randn_like(matrix)
        optimizer.step()
    answers.put((len(calls) / 3, [matrix.tolist() for matrix in matrices]))


def test_muon_shares_its_matrices_out_and_gives_torchs_bits():
    answers = PROCESSES.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [PROCESSES.Process(target=_muon, args=(rank, port, answers)) for rank in (0, 1)]
    for process in started:
        process.start()
    found = [answers.get(timeout=120) for _ in started]
    for process in started:
        process.join()
    _muon(None, port, answers)
    assert sum(count for count, _ in found) == len(MATRICES) and all(count >= 2 for count, _ in found)
    wanted = answers.get(timeout=10)[1]
    assert all(matrices == wanted for _, matrices in found)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sharded_run_is_resumed_in_any_number_of_processes(work, sharded, tmp_path, processes):
    """From step 3 of 6; in the same number bit for bit."""
    shutil.copytree(sharded, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-000006")
    train_apart(processes, work, tmp_path / "out", "--resume", sharded=True)
    check_alike(tmp_path / "out", sharded)
    if processes == 2:
        losses = [[record["loss"] for record in records(folder)] for folder in (tmp_path / "out", sharded)]
        assert losses[0] == losses[1]
        for file in ("weights.safetensors", "optimizer.safetensors"):
            ours, theirs = load_file(tmp_path / "out" / STATE / file), load_file(sharded / STATE / file)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_sharded_in_bfloat16_with_a_frozen_head(work, tmp_path):
    more = ("--mixed-precision", "bf16", "--freeze-lm-head", "--max-steps", 2)
    train_apart(2, work, tmp_path / "two", *more, sharded=True)
    train_apart(1, work, tmp_path / "one", *more)
    for ours, theirs in zip(records(tmp_path / "two"), records(tmp_path / "one"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)
    two, one = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert torch.equal(two["lm_head.weight"], one["lm_head.weight"])


def test_gradient_checkpointing_changes_no_bit(work, tmp_path, monkeypatch):
    calls, checkpoint = [], common.ttt.checkpoint

    def watch(*inputs, **settings):
        calls.append(inputs)
        return checkpoint(*inputs, **settings)

    monkeypatch.setattr("common.ttt.checkpoint", watch)
    train(work, tmp_path / "out", "--gradient-checkpointing")
    assert len(calls) >= 12  # of every depth of every step
    folders = (tmp_path / "out", work / "one")
    ours, theirs = (load_file(out / STATE / "weights.safetensors") for out in folders)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_samples_are_shared_out_by_their_cost(work):
    """The two that are all labels do not meet, as they would by tokens alone."""
    index = np.zeros((5, 6), dtype=np.int64)
    index[:, 2], index[:, 5] = [100, 101, 102, 99, 20], [100, 101, 1, 1, 20]
    drafter, _ = load_drafter(work / "one")
    training = SimpleNamespace(step=SimpleNamespace(drafter=drafter), args=SimpleNamespace(ttt_steps=3),
                               inputs=SimpleNamespace(shards=SimpleNamespace(index=index)))
    costs, config, fc = sample_costs(training, np.arange(5)), drafter.config, drafter.fc.weight.numel()
    each = sum(part.numel() for part in drafter.parameters()) - fc
    width = config["num_attention_heads"] * config["head_dim"]
    assert costs[1] == 101 * fc + 101 * 3 * (each + 101 * width)
    assert [sorted(share) for share in share_out(np.arange(5), costs, 2)] == [[1, 2, 3], [0, 4]]


@pytest.mark.parametrize(("processes", "room", "words"), [
    (2, 10**9, []), (8, 10**9, ["of 8 processes 6 have nothing to do; --batch-tokens 800 or more"]),
    (1, 10**6, ["a checkpoint takes 2.9 MiB", "976.6 KiB that --max-disk-gb leaves"]),
])
def test_waste_is_said_before_it_begins(monkeypatch, processes, room, words):
    index = np.zeros((4, 6), dtype=np.int64)
    index[:, 2] = 100
    said = []
    monkeypatch.setattr(train_drafter, "say", said.append)
    monkeypatch.setattr(train_drafter, "checkpoint_bytes", lambda drafter: 3 * 10**6)
    shards = SimpleNamespace(index=index, manifest={"planned": {"room": room}})
    order = SimpleNamespace(steps=200, tokens=40000)
    train_drafter.doubts(SimpleNamespace(follow=True, max_steps=None), SimpleNamespace(shards=shards),
                         SimpleNamespace(drafter=None), SimpleNamespace(order=order, batch_tokens=200),
                         processes)
    assert len(said) == bool(words) and all(word in said[0] for word in words)


def test_samples_are_measured_by_tokens(monkeypatch):
    monkeypatch.setattr("common.loss.MEASURED", 10)
    lengths = np.array([4, 6, 1, 30, 9, 2])
    assert list(packs([0, 1, 2, 3, 5, 4], lengths)) == [[0, 1], [2], [3], [5], [4]]
    assert list(packs([], lengths)) == []


@pytest.mark.parametrize("max_steps", [None, 1, 30])
def test_steps_take_samples_in_a_random_order_up_to_the_size(max_steps):
    """Against one loop over the samples: a step ends before the sample of which less than half would fit."""
    lengths, samples = np.random.default_rng(3).integers(3, 400, 500), np.arange(0, 500, 2)
    wanted = []
    for epoch in range(3):
        order, tokens = np.random.default_rng([5, epoch]).permutation(samples), 0
        assert sorted(order) == list(samples) and list(order) != list(samples)
        for sample in order:
            if not tokens or tokens + lengths[sample] / 2 > 700:
                wanted.append([])
                tokens = 0
            wanted[-1].append(sample)
            tokens += lengths[sample]
    order, ends = plan_steps(lengths, samples, epochs=3, batch_tokens=700, max_steps=max_steps, seed=5)
    assert [list(order[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)] == wanted[:max_steps]
    _, ends = plan_steps(np.array([900, 5, 900]), np.arange(3), epochs=1, batch_tokens=10, max_steps=None,
                         seed=0)
    assert list(ends) == [0, 1, 2, 3]  # longer than a step


def test_only_the_runs_own_files_are_removed(work, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(work / "one", out)
    places = [out / "notes.txt", out / ".notes.tmp-1", out / "checkpoints" / "notes.txt",
              out / "checkpoints" / "step-000003" / "notes.txt",
              out / "checkpoints" / "step-000003" / "state" / "notes.txt",
              out / "checkpoints" / "step-000001" / "notes.txt",
              out / "checkpoints" / "step-mine" / "notes.txt",
              out / "checkpoints" / "step-000002-mine" / "model.safetensors"]
    shutil.copytree(out / "checkpoints" / "step-000003", out / "checkpoints" / "step-000003-mine")
    for place in places:
        place.parent.mkdir(exist_ok=True)
        place.write_text("mine")
    (out / "checkpoints" / "step-000006" / "state" / "optimizer.safetensors").write_bytes(b"cut")
    train(work, out, "--resume", "--keep", 1)
    assert all(place.read_text() == "mine" for place in places)
    assert (out / "checkpoints" / "step-000003-mine" / "state" / "progress.json").exists()
    left = sorted(path.name for path in (out / "checkpoints" / "step-000003").rglob("*"))
    assert left == ["notes.txt", "notes.txt", "state"]
    assert [path for path in (out / "checkpoints").glob("step-000006.damaged-*")]
    ours, theirs = (load_file(folder / STATE / "optimizer.safetensors") for folder in (out, work / "one"))
    assert ours.keys() == theirs.keys()


def test_best_checkpoint_is_the_one_of_the_best_held_out_accept_length(work):
    summary_step = json.loads((work / "one" / STATE / "progress.json").read_text())["best"]["step"]
    lengths = {record["step"]: record["accept_length"] for record in records(work / "one", heldout=True)}
    assert summary_step == max(step for step in lengths if lengths[step] == max(lengths.values()))
    assert json.loads((work / "one" / "config.json").read_text())["training"]["steps"] == summary_step


def test_curves_are_plotted(work, tmp_path):
    train(work, tmp_path / "out", "--plot", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_curves_reach_tensorboard(work, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                      reason="tensorboard is not installed")
    train(work, tmp_path / "out", "--log-with", "tensorboard")
    events = accumulator.EventAccumulator(str(next((tmp_path / "out").rglob("events.out*")).parent)).Reload()
    assert {f"train/{name}" for name in ("loss", "lr", "grad_norm", "tokens_per_second", "seconds_left",
                                         "depth_losses/1",
                                         "depth_losses/2")} <= set(events.Tags()["scalars"])
    curve = [(event.step, event.value) for event in events.Scalars("heldout/accept_length")]
    measured = records(tmp_path / "out", heldout=True)
    assert curve == [(record["step"], pytest.approx(record["accept_length"])) for record in measured]
    second = [record["acceptance"][1] for record in records(tmp_path / "out", heldout=True)]
    wanted = [pytest.approx(value) for value in second if value is not None]
    assert [event.value for event in events.Scalars("heldout/acceptance/2")] == wanted


def test_plot_that_cannot_be_drawn_is_refused_before_training(work, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="in a folder that exists"):
        train(work, tmp_path / "out", "--plot", tmp_path / "nowhere" / "curves.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        train(work, tmp_path / "out", "--plot", tmp_path / "curves.png")
    assert not (tmp_path / "out").exists()


def test_the_target_is_read_once_and_a_refused_resume_says_no_more(work, tmp_path, monkeypatch, capfd):
    read, tensor = [], Target.tensor
    monkeypatch.setattr(Target, "tensor", lambda self, name: read.append(name) or tensor(self, name))
    train(work, tmp_path / "out", "--max-steps", 1)
    assert read.count("lm_head.weight") == 1 and read.count("model.embed_tokens.weight") == 1
    capfd.readouterr()
    with pytest.raises(UserError, match="lr is 0.5 now"):
        train(work, tmp_path / "out", "--max-steps", 1, "--resume", "--lr", 0.5)
    assert "vocabulary" not in capfd.readouterr().err


def test_time_left_counts_from_where_a_run_was_resumed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("common.cli.time.monotonic", lambda: now[0])
    bar = Progress(100, "steps", "train", done=80)
    now[0] = 10.0
    bar.update(5)
    assert bar.seconds_left() == pytest.approx(30.0)
