"""What shards hold with --store fp8 and --teacher compact, and that training learns from it. Folders of many
shards.
"""

import base64
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import common.shards
import extract_hidden_states
from common.cli import UserError
from common.drafter import load_drafter
from common.files import write_sealed
from common.loss import CompactTeacher, Teacher, TrainStep
from common.shards import Shards, bytes_per_token, read_manifest, store_states
from common.target import open_target
from common.ttt import make_batch
from tests import tiny
from tests.scripts import EXACT, call


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target, and shards of its answers to the same rows in every storage."""
    folder = tmp_path_factory.mktemp("storage")
    tiny.make_target(folder / "target")
    tiny.write_rows(folder / "rows.jsonl",
                    [{"messages": row["messages"][:1]} for row in tiny.conversations(24)])
    candidates = {"compact": 328, "small": 16}
    for name, flags in (("bf16", EXACT), ("fp8", ("--teacher", "states")), ("compact", ("--store", "bf16")),
                        ("small", ())):  # float8 and compact by default
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(extract_hidden_states, "CANDIDATES", candidates.get(name, 64))
            call("extract_hidden_states", "--target", folder / "target", "--data", folder / "rows.jsonl",
                 "--out", folder / name, "--regenerate", "--max-new-tokens", 24, "--dtype", "float32",
                 "--heldout", 0.2, *flags)
    return folder


def test_float8_is_within_half_a_step_of_its_scale():
    states = torch.randn(50, 3 * 64) * torch.logspace(-6, 6, 50)[:, None]
    states[7, 64:128] = 0
    stored, scale = store_states(states, 3, torch.float8_e4m3fn)
    assert stored.dtype == torch.float8_e4m3fn and scale.shape == (50, 3) and scale[7, 1] == 1
    split = states.view(50, 3, 64).double()
    assert torch.allclose(scale.double() * 448,
                          split.abs().amax(2).where(scale != 1, torch.tensor(448.0).double()), rtol=1e-6)
    error = (stored.double().view(50, 3, 64) * scale[:, :, None].double() - split).abs()
    # three bits of mantissa: half a step is 1/16 of the number; below the smallest normal one, 2^-6, half of
    # 2^-9
    assert (error <= torch.maximum(split.abs() / 16, scale[:, :, None] * 2.0**-10) * (1 + 1e-6)).all()


def test_the_same_ids_and_choices_in_every_storage(work):
    plain = Shards(work / "bf16")
    for name in ("fp8", "compact", "small"):
        other = Shards(work / name)
        assert (other.index == plain.index).all()
        for number in range(len(plain.index)):
            a, b = plain.sample(number), other.sample(number)
            assert all(torch.equal(a[key], b[key]) for key in ("input_ids", "loss_mask", "target_argmax"))
            gap = (a["aux_hidden_states"].float() - b["aux_hidden_states"].float()).abs()
            largest = a["aux_hidden_states"].float().unflatten(1, (3, -1)).abs().amax(2)
            largest = largest.repeat_interleave(64, 1)
            # half a step is 1/28 of the largest; bfloat16's besides
            assert (gap <= largest * (0.045 if name != "compact" else 0)).all()
            assert ("last_hidden_state" in b) == (name == "fp8")


def test_the_compact_teacher_is_the_targets_distribution_at_supervised_rows(work):
    target, plain, compact = open_target(work / "target"), Shards(work / "bf16"), Shards(work / "compact")
    head = target.lm_head().double()
    for number in range(len(plain.index)):
        sample, small = plain.sample(number), compact.sample(number)
        wanted = (sample["last_hidden_state"].double() @ head.T).log_softmax(-1)  # [T, V]
        teaches = torch.cat([sample["loss_mask"][1:] == 1, torch.tensor([False])])
        assert ((small["teacher_ids"] >= 0).all(1) == teaches).all()
        assert (small["teacher_ids"][~teaches] == -1).all()
        ids, found = small["teacher_ids"][teaches].long(), small["teacher_logprobs"][teaches].double()
        assert (ids.sort(1).values == torch.arange(328)).all()  # all of them were asked for
        # stored states are bfloat16, logits up to 60
        assert torch.allclose(found, wanted[teaches].gather(1, ids), atol=0.5, rtol=0.02)
        few = Shards(work / "small").sample(number)["teacher_ids"][teaches]
        assert (few == ids[:, :16]).float().mean() > 0.99
        assert (few == sample["target_argmax"][teaches][:, None]).any(1).all()


@pytest.mark.parametrize("rows", [None, torch.arange(0, 328, 3)])
@pytest.mark.parametrize("kind", ["kl", "lk", "lk-log"])
def test_all_candidates_give_the_loss_of_stored_states(work, rows, kind):
    """To the rounding of the stored log-probabilities, with gradients."""
    target, (plain, compact) = open_target(work / "target"), (Shards(work / "bf16"), Shards(work / "compact"))
    folder = tiny.make_drafter(work / f"drafter-{kind}-{rows is None}", target,
                               None if rows is None else len(rows))
    found = []
    for shards, teacher in ((plain, Teacher(target.lm_head().float(), rows, None, 1.0, "cpu", torch.float32,
                                            whole=True)),
                            (compact, CompactTeacher(target.vocab_size, rows, "cpu", torch.float32))):
        drafter, _ = load_drafter(folder)
        batch = make_batch([shards.sample(number) for number in range(8)])
        loss, sums, counted = TrainStep(drafter.train(), target.embedding().float(), teacher, 3, 0.8,
                                        kind)(batch, 0.01)
        loss.backward()
        found.append((loss.detach(),
                      torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()]), counted))
    (loss, grad, counted), (other, other_grad, other_counted) = found
    assert torch.allclose(loss, other, rtol=0.02) and torch.equal(counted, other_counted)
    assert torch.nn.functional.cosine_similarity(grad, other_grad, dim=0) > 0.995


def test_bytes_per_token(work):
    """What is said is what a shard's tensors take, and at the size of the real job half of what states in
    bfloat16 take.
    """
    for name, store, candidates in (("bf16", "bf16", 0), ("fp8", "fp8", 0), ("small", "fp8", 16)):
        manifest = json.loads((work / name / "manifest.json").read_text())
        done = manifest["done"]
        told = bytes_per_token(64, store, candidates, done["supervised_tokens"] / done["tokens"])
        stored = sum(entry["bytes"] for entry in manifest["shards"]) / done["tokens"]
        assert 0 <= stored - told < 60  # headers, sample numbers
    assert bytes_per_token(7168, "bf16") == 57353
    assert bytes_per_token(7168, "fp8", 64, 0.5) < 22000


def test_training_learns_from_the_smallest_storage(work, tmp_path):
    lengths = []
    for name in ("bf16", "small"):
        summary = call("train_drafter", "--shards", work / name, "--target", work / "target", "--out",
                       tmp_path / name,
                       "--draft-vocab", "full", "--ttt-steps", 2, "--epochs", 8, "--lr", 3e-3,
                       "--batch-tokens", 200)
        lengths.append(summary["accept_length"])
    assert lengths[1] > 1.2 and abs(lengths[1] / lengths[0] - 1) < 0.15
    with pytest.raises(UserError, match="one holds the compact teacher"):
        call("train_drafter", "--shards", work / "small", "--eval-shards", work / "bf16", "--target",
             work / "target", "--out",
             tmp_path / "x", "--draft-vocab", "full", "--dry-run")


def test_the_index_is_that_of_the_shards_themselves(work, monkeypatch):
    """Whether it is of the manifest's entries, of the files' content, or, with verify, of both."""
    shards = Shards(work / "small")
    again = Shards(work / "small", verify=True)
    assert (shards.index == again.index).all() and not shards.open and again.open
    for number in range(len(shards.index)):
        sample = shards.sample(number)
        assert shards.index[number, 2] == len(sample["input_ids"])
        assert shards.index[number, 5] == sample["loss_mask"][2:].sum()
    entries = read_manifest(work / "small")["shards"]
    monkeypatch.setattr(common.shards, "sha256_file", lambda path: entries[0]["sha256"])
    told = np.frombuffer(base64.b64decode(entries[0]["index"]), dtype="<i4").copy()
    told[0] += 1
    shards = Shards(work / "small")
    shards.verify, entries[0]["index"] = True, base64.b64encode(told.tobytes()).decode()
    with pytest.raises(UserError, match="holds other samples than the manifest says"):
        shards.extend(entries[0])


def test_a_hundred_thousand_shards_are_listed_without_opening_one(work, tmp_path, monkeypatch):
    count, manifest, small = 100_000, read_manifest(work / "small"), Shards(work / "small")
    entry = {**manifest["shards"][0], "bytes": 0, "samples": 2}
    entry["index"] = base64.b64encode(base64.b64decode(entry["index"])[:32]).decode()
    entries = [{**entry, "block": n, "file": f"shard-{n:05d}.safetensors"} for n in range(count)]
    # a disk is slow to make so many files
    monkeypatch.setattr(Shards, "_sizes", lambda self: {one["file"]: 0 for one in entries})
    write_sealed(tmp_path / "manifest.json", {**manifest, "shards": entries})
    monkeypatch.setattr(common.shards, "safe_open", lambda *_, **__: 1 / 0)
    shards = Shards(tmp_path)
    samples = 2
    assert (shards.index[:, 0] == np.arange(count).repeat(samples)).all()
    assert (shards.index[:, 1:].reshape(count, samples, 5) == small.index[:samples, 1:]).all()


def test_few_shards_are_mapped_at_once(work, tmp_path):
    manifest = read_manifest(work / "small")
    source, entry = work / "small" / manifest["shards"][0]["file"], manifest["shards"][0]
    entries = [{**entry, "block": n, "file": f"shard-{n:05d}.safetensors"} for n in range(200)]
    for one in entries:
        os.link(source, tmp_path / one["file"])
    write_sealed(tmp_path / "manifest.json", {**manifest, "shards": entries})
    shards = Shards(tmp_path)
    wanted = shards.sample(0)
    for number in [*range(0, len(shards.index), entry["samples"]), 0]:
        found = shards.sample(number)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(shards.open) == common.shards.OPEN and 0 < len(maps) <= 2 * common.shards.OPEN


def test_a_block_costs_as_many_bytes_late_as_early(tmp_path):
    """Of all that is written, the shard and its line in the journal."""
    def written():
        return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])

    cost, ids = {}, torch.arange(9, dtype=torch.int32)
    for number in range(1001):
        facts = {"block": 10_000 + number, "read": 1, "skipped": {}, "cut": 0}
        if number in (10, 1000):
            sample = {"input_ids": ids, "loss_mask": torch.ones(9, dtype=torch.uint8),
                      "aux_hidden_states": torch.zeros(9, 192), "sample_id": 10_000 + number, "turn_id": 0,
                      "source_id": 0, "heldout": 0}
            before = written()
            extract_hidden_states.write([sample], facts, None, tmp_path)
            cost[number] = written() - before
        else:
            extract_hidden_states.record(facts, tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["journal-0.jsonl", "shard-10010.safetensors", "shard-11000.safetensors"]
    assert cost[1000] == cost[10] > 300
