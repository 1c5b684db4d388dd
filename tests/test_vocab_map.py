"""build_vocab_map.py and the map's own checks."""

import contextlib
import io
import time
from collections import Counter

import numpy as np
import pytest
import torch
import transformers

import build_vocab_map
from common.cli import UserError
from common.files import write_json
from common.shards import MANIFEST, write_shard
from common.vocab import check_map, choose_rows, load_map, save_map
from tests.scripts import call, shell

V, HIDDEN = 100, 8
SPECIAL = {"eos": [97], "chat": {"<|im_start|>": 95, "<|im_end|>": 97}}


def make_samples(count=30, seed=0, top=60):
    """[(ids, mask, heldout)]: Zipf-like ids below `top`, about half of them supervised, every fifth sample set aside."""
    generator = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        length = int(generator.integers(5, 40))
        ids = np.minimum(generator.zipf(1.3, length), top) - 1
        samples.append((ids, generator.integers(0, 2, length), int(number % 5 == 4)))
    return samples


def make_shards(folder, blocks, vocab_size=V, special=SPECIAL):
    """Shards of `blocks`, lists of (ids, mask, heldout), with a manifest that says what build_vocab_map.py reads."""
    folder.mkdir(parents=True)
    entries, line = [], 0
    for block, samples in enumerate(blocks):
        rows = []
        for ids, mask, heldout in samples:
            rows.append({
                "input_ids": torch.tensor(ids, dtype=torch.int32), "loss_mask": torch.tensor(mask, dtype=torch.uint8),
                "aux_hidden_states": torch.zeros(len(ids), 3), "last_hidden_state": torch.zeros(len(ids), 1),
                "target_argmax": torch.zeros(len(ids), dtype=torch.int32), "sample_id": line, "turn_id": 0, "source_id": 0,
                "heldout": heldout,
            })
            line += 1
        entries.append(write_shard(folder, block, rows))
    text = transformers.LlamaConfig(vocab_size=vocab_size, hidden_size=HIDDEN, intermediate_size=16, num_attention_heads=2,
                                    num_key_value_heads=1, head_dim=4, num_hidden_layers=8).to_dict()
    write_json(folder / MANIFEST, {
        "format": 1, "complete": True, "planned": {"blocks": len(blocks)}, "shards": entries, "special_ids": special,
        "tokenizer_sha256": "t" * 64, "data_sha256": "d" * 64, "layers": [2, 4, 5], "template_kwargs": {}, "block_lines": 8,
        "empty_blocks": [], "sources": [""],
        "target": {"name": "tiny", "model_class": "LlamaForCausalLM", "text_config": text, "text_config_sha256": "c" * 64,
                   "tensors_sha256": "w" * 64, "vocab_size": vocab_size, "hidden_size": HIDDEN},
    })
    return folder


def build(shards, out, size, *more):
    """(exit code, summary or None, stderr) of the script, run in this process."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            return 0, call("build_vocab_map", "--shards", shards, "--draft-vocab", size, "--out", out, *more), stderr.getvalue()
        except UserError as error:
            return 2, None, stderr.getvalue() + str(error)


@pytest.fixture
def shards(tmp_path):
    samples = make_samples()
    return make_shards(tmp_path / "shards", [samples[:11], samples[11:]])


def slow_map(samples, size, forced):
    """(rows, coverage counted, coverage held out), one token at a time."""
    counted, aside = Counter(), Counter()
    for ids, mask, heldout in samples:
        for i, supervised in zip(ids, mask, strict=True):
            if supervised:
                (aside if heldout else counted)[int(i)] += 1
    rows = set(forced)
    for i in sorted(range(V), key=lambda i: (-counted[i], i)):
        if len(rows) < size:
            rows.add(i)
    share = [sum(count for i, count in counts.items() if i in rows) / sum(counts.values()) for counts in (counted, aside)]
    return sorted(rows), *share


@pytest.mark.parametrize("size", [2, 9, 33])
def test_map_equals_a_slow_count(tmp_path, shards, size):
    code, summary, stderr = build(shards, tmp_path / "map", size)
    rows, facts = load_map(tmp_path / "map")
    wanted, coverage, heldout = slow_map(make_samples(), size, {95, 97})
    assert code == 0 and rows.tolist() == wanted
    assert summary["coverage"] == pytest.approx(coverage) and summary["coverage_heldout"] == pytest.approx(heldout)
    assert {key: summary[key] for key in ("vocab_size", "draft_vocab", "lm_head_params", "forced")} == {
        "vocab_size": V, "draft_vocab": size, "lm_head_params": size * HIDDEN, "forced": [95, 97]}
    assert facts["forced"] == {"95": "<|im_start|>", "97": "<|im_end|>"}
    assert facts["target"]["tensors_sha256"] == "w" * 64 and facts["data_sha256"] == "d" * 64
    for point in facts["curve"]:
        _, *shares = slow_map(make_samples(), point["draft_vocab"], {95, 97})
        assert [point["coverage"], point["coverage_heldout"]] == pytest.approx(shares)
    assert [point["draft_vocab"] for point in facts["curve"]] == sorted({2, 4, 8, 16, 32, 64, size, V})
    assert "full 100" in stderr


def test_equal_counts_take_the_lower_id():
    counts = np.array([1, 5, 5, 5, 0, 7])
    assert choose_rows(counts, 3, []).tolist() == [1, 2, 5]
    assert choose_rows(counts, 3, [4]).tolist() == [1, 4, 5]
    with pytest.raises(UserError, match="cannot hold the 2 ids"):
        choose_rows(counts, 1, [4, 0])


def test_map_does_not_depend_on_shard_order(tmp_path):
    samples = make_samples()
    for name, blocks in (("a", [samples[:4], samples[4:20], samples[20:]]), ("b", [samples[20:], samples[4:20][::-1], samples[:4]])):
        make_shards(tmp_path / name, blocks)
        build(tmp_path / name, tmp_path / f"map-{name}", 17)
    (rows_a, facts_a), (rows_b, facts_b) = load_map(tmp_path / "map-a"), load_map(tmp_path / "map-b")
    assert rows_a.tolist() == rows_b.tolist()
    told = {"shards": "", "shards_sha256": ""}  # which shards they were, the one thing that may differ
    assert {**facts_a, **told} == {**facts_b, **told}


def test_fewer_distinct_tokens_than_rows_are_filled_by_the_lowest_ids(tmp_path):
    make_shards(tmp_path / "shards", [[([50, 60, 60, 3], [1, 1, 1, 0], 0)]])
    _, summary, stderr = build(tmp_path / "shards", tmp_path / "map", 8)
    assert load_map(tmp_path / "map")[0].tolist() == [0, 1, 2, 3, 50, 60, 95, 97]
    assert summary["filled"] == 4 and "4 of its rows were never counted" in stderr
    assert summary["coverage"] == 1.0 and summary["coverage_heldout"] is None


def test_what_cannot_be_forced_is_named(tmp_path):
    make_shards(tmp_path / "shards", [make_samples(5)], special={"eos": [], "chat": {"<think>": 100, "<|im_end|>": 99, "<call>": None}})
    _, summary, stderr = build(tmp_path / "shards", tmp_path / "map", 8)
    assert summary["forced"] == [99] and 99 in load_map(tmp_path / "map")[0]
    assert "<think> has id 100" in stderr and "<call> has no id" in stderr and "no end-of-sequence id" in stderr
    assert len(summary["warnings"]) == 3


@pytest.mark.parametrize(("size", "words"), [
    ("0", "--draft-vocab 0 is not in 1..100"), ("-1", "--draft-vocab -1 is not in 1..100"), ("101", "--draft-vocab 101 is not in 1..100"),
    ("16,101", "--draft-vocab 101 is not in 1..100"), ("100", "whole vocabulary"), ("full", "full needs no map"),
    ("many", "neither a number"), ("1", "cannot hold the 2 ids"),
])
def test_sizes_that_are_refused(tmp_path, shards, size, words):
    code, summary, stderr = build(shards, tmp_path / "map", size)
    assert code == 2 and summary is None and words in stderr and not (tmp_path / "map").exists()


def test_several_sizes(tmp_path, shards):
    code, summaries, _ = build(shards, tmp_path / "maps", "32,8")
    assert code == 0 and [summary["draft_vocab"] for summary in summaries] == [8, 32]
    assert set(load_map(tmp_path / "maps/8")[0]) < set(load_map(tmp_path / "maps/32")[0])
    assert build(shards, tmp_path / "maps", "16,32")[0] == 0
    (tmp_path / "maps/notes.txt").touch()
    code, _, stderr = build(shards, tmp_path / "maps", "16,32")
    assert code == 2 and "notes.txt" in stderr


def test_out_replaces_only_its_own_map(tmp_path, shards):
    out = tmp_path / "map"
    build(shards, out, 16)
    before = (out / "d2t.npy").read_bytes()
    assert build(shards, out, 16)[0] == 0 and (out / "d2t.npy").read_bytes() == before
    code, _, stderr = build(shards, out, 17)
    assert code == 2 and "another size (16 there, 17 here)" in stderr and (out / "d2t.npy").read_bytes() == before
    code, summary, _ = build(shards, out, 17, "--force")
    assert code == 0 and "another size" in summary["warnings"][0] and len(load_map(out)[0]) == 17
    (out / "notes.txt").write_text("mine")
    assert build(shards, out, 17)[0] == 2 and (out / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map", "shards"]


def test_leftovers_of_a_killed_run_are_passed_over_and_a_users_file_is_not(tmp_path, shards):
    out = tmp_path / "maps"
    (out / ".8-new.tmp-123").mkdir(parents=True)  # the name that save_map gives a map before it replaces another
    assert build(shards, out, "8,16")[0] == 0
    (out / "my.tmp-notes").write_text("mine")
    code, _, stderr = build(shards, out, "8,16")
    assert code == 2 and "holds something else (my.tmp-notes)" in stderr


def test_nothing_to_count_is_refused(tmp_path):
    make_shards(tmp_path / "shards", [[([1, 2, 3], [1, 1, 1], 1), ([4, 5], [0, 0], 0)]])
    code, _, stderr = build(tmp_path / "shards", tmp_path / "map", 8)
    assert code == 2 and "no supervised token" in stderr


def test_ids_beyond_the_target_are_refused(tmp_path):
    make_shards(tmp_path / "shards", [[([1, V], [1, 1], 0)]])
    code, _, stderr = build(tmp_path / "shards", tmp_path / "map", 8)
    assert code == 2 and f"token id {V}" in stderr


def test_offsets_are_checked_on_load(tmp_path):
    rows = np.array([1, 4, 5, 9])
    save_map(tmp_path / "map", rows, 12, {})
    assert load_map(tmp_path / "map")[0].tolist() == rows.tolist()
    d2t, t2d = np.load(tmp_path / "map/d2t.npy"), np.load(tmp_path / "map/t2d.npy")
    assert d2t.tolist() == [1, 3, 3, 6] and d2t.dtype == np.int64 and t2d.dtype == bool and len(t2d) == 12
    for name, wanted in (("d2t", d2t), ("t2d", t2d)):
        twin = torch.load(tmp_path / f"map/{name}.pt", weights_only=True)
        assert twin.numpy().dtype == wanted.dtype and np.array_equal(twin.numpy(), wanted)

    np.save(tmp_path / "map/d2t.npy", rows)
    with pytest.raises(UserError, match="absolute target ids"):
        load_map(tmp_path / "map")
    np.save(tmp_path / "map/d2t.npy", d2t[::-1].copy())
    with pytest.raises(UserError, match="not the same ascending ids"):
        load_map(tmp_path / "map")
    np.save(tmp_path / "map/d2t.npy", d2t)
    np.save(tmp_path / "map/t2d.npy", np.roll(t2d, 1))
    with pytest.raises(UserError, match="not the same ascending ids"):
        load_map(tmp_path / "map")
    other = np.array([0, 4, 5, 9])  # sound in itself, but not the map that vocab_map.json describes
    np.save(tmp_path / "map/t2d.npy", np.isin(np.arange(12), other))
    np.save(tmp_path / "map/d2t.npy", other - np.arange(4))
    with pytest.raises(UserError, match="hash differs"):
        load_map(tmp_path / "map")
    with pytest.raises(UserError, match="list of integers"):
        check_map(d2t.astype(float), t2d, "here")


def test_a_vocabulary_of_163840(tmp_path):
    generator = np.random.default_rng(0)
    ids = (generator.random(300_000) ** 4 * 163_840).astype(int)
    make_shards(tmp_path / "shards", [[(ids, np.ones(len(ids), dtype=int), 0)]], vocab_size=163_840)
    start = time.monotonic()
    code, summary, _ = build(tmp_path / "shards", tmp_path / "map", 32_000)
    print(f"map of 32,000 from 163,840 ids: {time.monotonic() - start:.1f} s")
    assert code == 0 and len(load_map(tmp_path / "map")[0]) == 32_000 and 0.5 < summary["coverage"] < 1


def test_command_line(tmp_path, shards):
    """One line of JSON on stdout and exit code 0; one sentence on stderr and exit code 2."""
    arguments = ("build_vocab_map", "--shards", shards, "--out", tmp_path / "map", "--draft-vocab")
    code, summary, _ = shell(*arguments, 8)
    assert code == 0 and summary["draft_vocab"] == 8
    assert shell(*arguments, 0) == (
        2, None, "build_vocab_map.py: --draft-vocab 0 is not in 1..100 (the target's lm_head has 100 rows)\n")


def test_layer_multiply_adds(shards):
    target = build_vocab_map.Shards(shards).manifest["target"]
    q, kv, o, mlp = 8 * 16, 2 * 4 * 16, 8 * 8, 3 * 16 * 8
    assert build_vocab_map.layer_multiply_adds(target) == q + kv + o + mlp
    target["text_config"] = {"hidden_size": HIDDEN}
    assert build_vocab_map.layer_multiply_adds(target) is None
