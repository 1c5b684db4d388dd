"""Every step of train_drafter.py is the same, to rounding, for any padding, packing, accumulation and number
of processes; which drafter is kept, and in which precision it is trained."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.cli import UserError
from common.drafter import load_drafter
from common.files import read_sealed, write_sealed
from common.shards import Shards, write_shard
from common.target import open_target
from tests import reference, tiny
from tests.scripts import EXACT, ROOT, call, make_work
from tests.test_train import adamw_alone

COMPARED = ("step", "epoch", "loss", "depth_losses", "lr", "grad_norm", "heldout", "accept_length",
            "acceptance", "coverage")
SEVERAL = ("--ttt-steps", 3, "--lr", 3e-3, "--max-steps", 6, "--eval-every", 2)


def train_plainly(monkeypatch):
    """Two of six steps with a rising rate; no clipping, which would hide a gradient of another scale, and no
    muon."""
    monkeypatch.setattr("train_drafter.WARMUP", 0.3)
    monkeypatch.setattr("train_drafter.MAX_GRAD_NORM", 1e6)
    monkeypatch.setattr("train_drafter.make_optimizers", adamw_alone)


@pytest.fixture
def plainly(monkeypatch):
    train_plainly(monkeypatch)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target, shards of its own answers, a map of 24 ids, and the same samples in other folders.

    padded: five tokens more at each sample's end, unsupervised, with states of their own; and NaN as the
    lm_head's input of every row whose next token is not supervised. N: only the first N samples to train on,
    of unequal lengths. some: a sample of three has no label.
    """
    folder = make_work(tmp_path_factory.mktemp("exact"), 12, 16, 24)
    samples = read_samples(folder / "shards")
    write_samples(folder, "padded", [padded(sample) for sample in samples])
    learnt = [sample for sample in samples if not sample["heldout"]]
    aside = [sample for sample in samples if sample["heldout"]]
    for number, sample in enumerate(learnt):
        tensors = {name: value for name, value in sample.items() if torch.is_tensor(value)}
        sample.update({name: value[: len(value) - number % 3] for name, value in tensors.items()})
    for count in (1, 3, 5, 7):
        write_samples(folder, str(count), learnt[:count] + aside)
    for sample in learnt[:3]:
        sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
    write_samples(folder, "some", learnt + aside)
    return folder


def read_samples(folder):
    shards, samples = Shards(folder), []
    for file in map(shards.file, range(len(shards.entries))):
        numbers = {key: file.get_tensor(f"{key}s").tolist() for key in ("sample_id", "turn_id", "source_id")}
        for i in range(len(file.get_tensor("heldout"))):
            number = len(samples)
            samples.append({**shards.sample(number), **{key: values[i] for key, values in numbers.items()},
                            "heldout": int(shards.heldout[number])})
    return samples


def write_samples(work, name, samples):
    """A finished folder of shards beside work/shards that holds `samples`."""
    (work / name).mkdir()
    entry = write_shard(work / name, 0, [{**sample} for sample in samples])
    write_sealed(work / name / "manifest.json",
                 {**read_sealed(work / "shards" / "manifest.json"), "shards": [entry]})


def padded(sample, extra=5):
    generator = torch.Generator().manual_seed(len(sample["input_ids"]))
    more = {name: torch.randint(0, 300, (extra,), generator=generator).to(sample[name].dtype)
            for name in ("input_ids", "target_argmax")}
    more |= {name: torch.randn(extra, sample[name].shape[1], generator=generator)
             for name in ("aux_hidden_states", "last_hidden_state")}
    more["loss_mask"] = torch.zeros(extra, dtype=torch.uint8)
    longer = {**sample, **{name: torch.cat([sample[name], value]) for name, value in more.items()}}
    longer["last_hidden_state"] = longer["last_hidden_state"].clone()
    longer["last_hidden_state"][:-1][longer["loss_mask"][1:] == 0] = float("nan")
    return longer


def train(work, out, *more):
    """The summary of a run in this process, with the full vocabulary of work/shards unless told otherwise."""
    arguments = ["--target", work / "target", "--out", out, *more]
    arguments += [] if "--shards" in more else ["--shards", work / "shards"]
    arguments += [] if "--draft-vocab" in more else ["--draft-vocab", "full"]
    return call("train_drafter", *arguments)


def records(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in COMPARED if key in line} for line in lines]


def steps(out):
    return [record for record in records(out) if "heldout" not in record]


def assert_same_steps(ours, theirs, rel=2e-4):
    """Every step's loss, its parts by depth, gradient norm and rate, and every held-out measurement."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if value is not None and key in ("loss", "depth_losses", "grad_norm"):
                assert value == pytest.approx(b[key], rel=rel, abs=1e-6), f"{key} at step {a['step']}"
            else:
                assert value == b[key], f"{key} at step {a['step']}"


def everything(work):
    """All samples in each step, without a cut into steps that their lengths would change."""
    return (*SEVERAL, "--batch-tokens", 10**6, "--epochs", 6)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("batch", [1, 10**6], ids=["a sample a step", "all in a step"])
def test_unsupervised_tokens_at_the_end_change_nothing(work, tmp_path, batch):
    """Nor does NaN in a teacher row that no supervised label has."""
    arguments = (*SEVERAL, "--batch-tokens", batch, "--epochs", 6)
    train(work, tmp_path / "a", *arguments)
    train(work, tmp_path / "b", *arguments, "--shards", work / "padded")
    assert_same_steps(records(tmp_path / "b"), records(tmp_path / "a"))


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("parts", [2, 3, 50])
def test_accumulation_changes_only_rounding(work, tmp_path, parts):
    """More parts than samples, too: then every sample is a batch of its own, and so packing changes nothing
    either."""
    train(work, tmp_path / "a", *SEVERAL, "--batch-tokens", 200, "--epochs", 3)
    train(work, tmp_path / "b", *SEVERAL, "--batch-tokens", 200, "--epochs", 3,
          "--gradient-accumulation-steps", parts)
    assert_same_steps(records(tmp_path / "b"), records(tmp_path / "a"))


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
def test_the_loss_is_over_all_supervised_labels(work, tmp_path, vocabulary):
    """L = sum over depths of 0.8^k * (the depth's sum of cross entropies) / N, where N counts the labels that
    a drafter can predict, in the map or not, and no prompt or padding; the rows of each depth are counted
    here."""
    choice = ("full",) if vocabulary == "full" else (24, "--vocab-map", work / "map")
    inside = set(range(328)) if vocabulary == "full" else None
    train(work, tmp_path / "out", *everything(work), "--loss", "kl", "--draft-vocab", *choice)
    inside = inside or set(load_drafter(tmp_path / "out")[1].tolist())
    labels, rows = 0, [0, 0, 0]
    for sample in read_samples(work / "shards"):
        mask, argmax = sample["loss_mask"].tolist(), sample["target_argmax"].tolist()
        if not sample["heldout"]:
            labels += sum(mask[2:])
            for k in range(3):
                rows[k] += sum(mask[label] and argmax[label - 1] in inside
                               for label in range(k + 2, len(mask)))
    assert len(steps(tmp_path / "out")) == 6 and (rows[0] == labels) == (vocabulary == "full")
    for record in steps(tmp_path / "out"):
        wanted = sum(0.8**k * record["depth_losses"][k] * rows[k] for k in range(3)) / labels
        assert record["loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("parts", [1, 4])
def test_the_rate_rises_and_falls_over_the_optimizer_steps(work, tmp_path, parts):
    """Counted in optimizer steps, whatever the accumulation: two of six rise, then half a cosine."""
    train(work, tmp_path / "out", *everything(work), "--gradient-accumulation-steps", parts)
    falling = [0.5 + 0.5 * math.cos(math.pi * i / 4) for i in range(4)]
    wanted = [3e-3 * share for share in (0.5, 1.0, *falling)]
    assert [record["lr"] for record in steps(tmp_path / "out")] == pytest.approx(wanted)


def test_order_is_another_in_each_epoch_and_each_sample_is_once_in_it(work, tmp_path):
    """A sample a step: the first step of each sample's length, by the tokens that the step reports."""
    train(work, tmp_path / "out", "--ttt-steps", 1, "--batch-tokens", 1, "--epochs", 2, "--eval-every", 100)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    tokens = {epoch: [line["tokens"] for line in lines if line.get("epoch") == epoch] for epoch in (0, 1)}
    lengths = sorted(len(sample["input_ids"])
                     for sample in read_samples(work / "shards") if not sample["heldout"])
    assert sorted(tokens[0]) == sorted(tokens[1]) == lengths and tokens[0] != tokens[1]


# Two processes

ALL_IN_A_STEP = ("--batch-tokens", 10**6, "--max-steps", 3, "--epochs", 3)
CASES = {  # by name: arguments
    "1 sample": ["--shards", "1", *ALL_IN_A_STEP],
    "3 samples": ["--shards", "3", *ALL_IN_A_STEP],
    "5 samples": ["--shards", "5", *ALL_IN_A_STEP],
    "7 samples": ["--shards", "7", *ALL_IN_A_STEP],
    "a sample a step": ["--batch-tokens", 1],
    "steps without a label": ["--shards", "some", "--batch-tokens", 1, "--max-steps", 11],
    "accumulation": ["--batch-tokens", 200, "--gradient-accumulation-steps", 3],
    "more parts than samples": ["--batch-tokens", 200, "--max-steps", 3, "--gradient-accumulation-steps", 9],
    "reduced": ["--batch-tokens", 200, "--max-steps", 3, "--draft-vocab", 24, "--vocab-map", "map"],
    # with so low a rate, rounding does not add up over the steps
    "bf16": [*ALL_IN_A_STEP, "--lr", 1e-6, "--mixed-precision", "bf16"],
    "resumed": ["--batch-tokens", 200, "--save-every", 1, "--keep", 9, "--resume"],
}


def run_case(work, name, folder):
    places = {"map", "some", "1", "3", "5", "7"}
    return train(work, folder / name, *SEVERAL,
                 *(work / word if word in places else word for word in CASES[name]))


def kill_group(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="module")
def both(work, tmp_path_factory):
    """All cases by one process, here, and by two on gloo, started once; none may hang. `resumed` begins in
    one and goes on in two."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "two").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        train_plainly(patch)
        summaries = {name: run_case(work, name, folder / "one") for name in CASES}
    shutil.copytree(folder / "one" / "resumed", folder / "two" / "resumed")
    for step in (4, 5, 6):
        shutil.rmtree(folder / "two" / "resumed" / "checkpoints" / f"step-{step:06d}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
               "tests.test_train_exact", work,
               folder / "two"]
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
                               start_new_session=True)
    try:
        words, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        kill_group(process)
        pytest.fail("two processes hang; finished: "
                    f"{sorted(path.stem for path in (folder / 'two').glob('*.json'))}")
    assert process.returncode == 0, words[-3000:]
    return folder, summaries


@pytest.mark.parametrize("name", CASES)
def test_two_processes_do_as_one_does(both, name):
    folder, summaries = both
    two = json.loads((folder / "two" / f"{name}.json").read_text())
    assert (two["processes"], summaries[name]["processes"]) == (2, 1)
    assert two["tokens"] == summaries[name]["tokens"] and two["best_step"] == summaries[name]["best_step"]
    assert_same_steps(records(folder / "two" / name), records(folder / "one" / name),
                      2e-2 if name == "bf16" else 2e-4)
    if name == "steps without a label":
        assert 0.0 in [record["loss"] for record in steps(folder / "two" / name)]


def main():
    """In each of two processes: the cases one after the other, the summaries written by the first process."""
    work, folder = map(Path, sys.argv[1:])
    train_plainly(pytest.MonkeyPatch())
    for name in CASES:
        summary = run_case(work, name, folder)
        if os.environ["RANK"] == "0":
            (folder / f"{name}.json").write_text(json.dumps(summary))


# Precision, what is trained, what is kept


def test_master_weights_and_moments_are_float32_under_bf16(work, tmp_path, capsys):
    """A rate of which a bfloat16 weight would not move; nothing of the embedding is in the optimizer; what is
    trained is said."""
    summary = train(work, tmp_path / "out", "--mixed-precision", "bf16", "--lr", 1e-6, "--muon-lr", 1e-5,
                    "--batch-tokens", 200, "--max-steps", 3, "--save-every", 1, "--keep", 9,
                    "--draft-vocab", 24, "--vocab-map", work / "map")
    millions = summary["trainable_params"] / 1e6
    said = f"training {millions:.1f} M parameters (the embedding is the target's, frozen)"
    assert said in capsys.readouterr().err
    state = [tmp_path / "out" / "checkpoints" / f"step-{step:06d}" / "state" for step in (1, 2, 3)]
    before, after = (load_file(folder / "weights.safetensors") for folder in (state[0], state[2]))
    moments = load_file(state[2] / "optimizer.safetensors")
    assert {tensor.dtype for tensor in (*after.values(), *moments.values())} == {torch.float32}
    assert sum(tensor.numel() for tensor in after.values()) == summary["trainable_params"]
    # the target's table has 328 rows
    assert not any(328 in tensor.shape for tensor in (*after.values(), *moments.values()))
    shapes = [tensor.shape for tensor in moments.values()]
    assert all(shapes.count(tensor.shape) >= 1 for tensor in after.values())
    moved = torch.cat([(after[name] != before[name]).flatten() for name in after]).float().mean()
    assert moved > 0.9
    rounded = [(after[name].bfloat16() != before[name].bfloat16()).flatten() for name in after]
    assert torch.cat(rounded).float().mean() < 0.2  # bfloat16 weights would have stood still
    assert [json.loads((folder / "progress.json").read_text())["step"] for folder in state] == [1, 2, 3]


@pytest.mark.parametrize("tensor, value, words", [
    ("aux_hidden_states", float("nan"), "aux_hidden_states holds NaN or infinity"),
    ("last_hidden_state", float("inf"), "last_hidden_state holds NaN or infinity"),
    ("input_ids", -7, "input_ids holds -7, the target's ids are 0..327"),
    ("target_argmax", 5000, "target_argmax holds 5000, the target's ids are 0..327"),
])
def test_damaged_samples_are_named(work, tmp_path, tensor, value, words):
    (tmp_path / "shards").mkdir()
    shutil.copy(work / "shards" / "manifest.json", tmp_path / "shards")
    samples = read_samples(work / "shards")
    number = next(i for i, sample in enumerate(samples) if not sample["heldout"])
    samples[number][tensor] = samples[number][tensor].clone()
    samples[number][tensor][-2] = value
    write_samples(tmp_path, "damaged", samples)
    where = rf"shard-00000.safetensors, rows \d+..\d+ \(sample {number}\)"
    with pytest.raises(UserError, match=f"{where}: {words}"):
        train(work, tmp_path / "out", "--shards", tmp_path / "damaged", "--max-steps", 2, "--batch-tokens",
              10**6)


@pytest.mark.parametrize("size", [None, 100])
def test_the_trained_head_of_a_tied_target_is_exported(tmp_path, size):
    target = tiny.make_target(tmp_path / "target", "llama_tied")
    tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(6))
    call("extract_hidden_states", "--target", target, "--data", tmp_path / "rows.jsonl",
         "--out", tmp_path / "shards", "--heldout", 0, *EXACT)
    choice = ["--draft-vocab", size or "full"]
    if size:
        call("build_vocab_map", "--shards", tmp_path / "shards", "--draft-vocab", size, "--out",
             tmp_path / "map")
        choice += ["--vocab-map", tmp_path / "map"]
    train(tmp_path, tmp_path / "out", "--lr", 1e-2, "--batch-tokens", 100, *choice)
    drafter, rows = load_drafter(tmp_path / "out")
    last = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1]
    trained = load_file(last / "state" / "weights.safetensors")["lm_head.weight"]
    assert torch.equal(drafter.lm_head.weight, trained.bfloat16().float())
    head = open_target(target).lm_head().float()
    assert (trained - (head if rows is None else head[rows])).abs().max() > 1e-3
    assert not drafter.config["tie_word_embeddings"]
    assert "embed_tokens.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_the_best_by_held_out_accept_length_is_kept(work, tmp_path, monkeypatch):
    """Constructed: held-out samples whose target writes what a certain drafter drafts, and training on others
    from that drafter on. The loss falls while the held-out accept length does; the last step and the one of
    the least loss are not what is kept."""
    monkeypatch.setattr("train_drafter.WARMUP", 1.0)
    target = open_target(work / "target")
    start = tiny.make_drafter(tmp_path / "start", target)
    drafter, _ = load_drafter(start)
    samples = [sample for sample in read_samples(work / "shards") if sample["heldout"]][:2]
    for sample in samples:
        for t in range(len(sample["input_ids"]) - 1):
            logits = reference.draft_logits(drafter, target.embedding(), sample["input_ids"],
                                            sample["aux_hidden_states"], t, [])
            sample["target_argmax"][t + 1] = int(logits[0].argmax())
    write_samples(work, "drafted", samples)
    arguments = ("--init", "checkpoint", "--checkpoint", start, "--eval-shards", work / "drafted",
                 "--eval-steps", 1, "--eval-every", 1,
                 "--save-every", 1, "--keep", 99, "--ttt-steps", 2, "--lr", 1e-3, "--batch-tokens", 200,
                 "--epochs", 4)
    summary = train(work, tmp_path / "out", *arguments)
    lengths = {record["step"]: record["accept_length"]
               for record in records(tmp_path / "out") if "heldout" in record and record["step"]}
    losses = {record["step"]: record["loss"] for record in steps(tmp_path / "out")}
    best, last = summary["best_step"], summary["steps"]
    assert lengths[best] == max(lengths.values()) == summary["accept_length"] > lengths[last]
    assert losses[best] > losses[last] and best < min(losses, key=losses.get)
    checkpoints = tmp_path / "out" / "checkpoints"
    kept = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert kept == (checkpoints / f"step-{best:06d}" / "model.safetensors").read_bytes()
    assert kept != (checkpoints / f"step-{last:06d}" / "model.safetensors").read_bytes()
    for step in range(best + 1, last + 1):
        shutil.rmtree(checkpoints / f"step-{step:06d}")
    # known after a resume, too
    assert train(work, tmp_path / "out", *arguments, "--resume")["best_step"] == best
    assert kept == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_only_what_the_run_wrote_is_removed(work, tmp_path):
    """Somebody's notes, and a copy of a checkpoint under a name of its own, stay and are not gone on from."""
    arguments = ("--ttt-steps", 1, "--batch-tokens", 1, "--max-steps", 9, "--save-every", 1, "--eval-every",
                 100)
    train(work, tmp_path / "out", *arguments, "--keep", 99)
    checkpoints = tmp_path / "out" / "checkpoints"
    shutil.copytree(checkpoints / "step-000009", checkpoints / "step-000009-good")
    for step in (7, 8, 9):
        shutil.rmtree(checkpoints / f"step-{step:06d}")
    (checkpoints / "step-000002" / "notes.txt").write_text("mine")
    (tmp_path / "out" / ".draft.tmp-1").write_text("mine")
    train(work, tmp_path / "out", *arguments, "--keep", 1, "--resume")
    assert (checkpoints / "step-000002" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / ".draft.tmp-1").read_text() == "mine"
    assert load_drafter(checkpoints / "step-000009-good")
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["step-000002", "step-000009", "step-000009-good"]


def test_a_damaged_checkpoint_is_written_anew(work, tmp_path):
    """The run falls back to the one before it, and ends with a whole one in its place, equal to the
    undisturbed one."""
    arguments = ("--ttt-steps", 2, "--batch-tokens", 200, "--epochs", 2, "--max-steps", 4, "--save-every", 1,
                 "--keep", 9)
    train(work, tmp_path / "out", *arguments)
    last = tmp_path / "out" / "checkpoints" / "step-000004"
    wanted = {path.name: path.read_bytes() for path in last.rglob("*.safetensors")}
    (last / "state" / "optimizer.safetensors").write_bytes(b"cut")
    train(work, tmp_path / "out", *arguments, "--resume")
    assert {path.name: path.read_bytes() for path in last.rglob("*.safetensors")} == wanted


if __name__ == "__main__":
    main()
