"""Figures, intervals, table and plot of constructed answers, and the accept length that is simulated from shards."""

import itertools
import random
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.cli import UserError
from common.drafter import load_drafter
from common.figures import accept_figures, accept_interval, figures, interval, names, plot, simulated_figures, table
from common.shards import Shards, check_shards, open_shards_target
from common.target import open_target, tokenizer_sha256
from common.training import simulated
from tests import reference, tiny
from tests.scripts import call
from tests.test_training import EMBEDDING, MAP, drafter_of, sample_of


@dataclass
class Answer:
    ids: list
    accepted: list = field(default_factory=list)
    reached: list = field(default_factory=list)


@dataclass
class Group:
    answers: list
    seconds: float
    draft_seconds: list = field(default_factory=list)
    verify_seconds: list = field(default_factory=list)


OURS = [
    Group([Answer([1] * 10, [3, 3, 1], [3, 3, 2]), Answer([2], [], [])], 2.0, [0.03, 0.03, 9.0], [0.1, 0.2, 0.1]),
    Group([Answer([3] * 5, [0, 0, 0, 0], [1, 1, 1, 1])], 1.0, [0.06], [0.1]),
]
PLAIN = [Group([Answer([1] * 10), Answer([2])], 5.5), Group([Answer([3] * 4 + [9])], 0.5)]


def test_figures_of_constructed_answers():
    """Over all verifications, not a mean of prompts' means; acceptance of the depths that were reached; medians a step and a round."""
    found = figures(PLAIN, OURS, 3)
    assert found["accept_length"] == 2.0 and found["verifications"] == 7 and found["accepted"] == 7  # the mean of means were 2.17
    assert found["acceptance"] == [round(3 / 7, 4), round(2 / 3, 4), 1.0]
    assert found["tokens"] == 16 and found["tokens_per_second"] == 5.3333 and found["baseline_tokens_per_second"] == 2.6667
    assert found["speed_up"] == 2.0 and found["identical"] == 2 and found["prompts"] == 3
    assert found["draft_ms"] == 15.0 and found["verify_ms"] == 100.0
    # two groups: both of either, at a quarter each, or one of each
    assert found["speed_up_interval"] == [0.5, 2.75] and found["accept_length_interval"][0] == 1.0


def test_a_round_for_every_answer_of_k_plus_1_and_of_1():
    right = [Group([Answer([0] * 9, [3, 3], [3, 3])], 1.0), Group([Answer([0] * 5, [3], [3])], 1.0)]
    wrong = [Group([Answer([0] * 3, [0, 0], [1, 1])], 1.0), Group([Answer([0] * 2, [0], [1])], 1.0)]
    assert figures(None, right, 3)["accept_length"] == 4.0 and figures(None, right, 3)["accept_length_interval"] == [4.0, 4.0]
    found = figures(None, wrong, 3)
    assert found["accept_length"] == 1.0 and found["acceptance"] == [0.0, None, None]


def test_what_was_not_measured_is_none():
    found = figures(None, [Group([Answer([5], [], [])], 1.0)], 2)
    assert found["acceptance"] == [None, None] and found["prompts"] == found["tokens"] == 1
    assert {key for key, value in found.items() if value is None} == {
        "accept_length", "accept_length_interval", "baseline_tokens_per_second", "speed_up", "speed_up_interval", "identical", "draft_ms",
        "verify_ms"}
    with pytest.raises(ValueError):
        figures(PLAIN[:1], OURS, 3)  # other prompts on the two sides are never compared


def test_intervals_against_all_possible_draws():
    """Five prompts: the 3,125 draws there are, one by one, weighted alike."""
    accepted, rounds = [9, 2, 0, 14, 5], [4, 3, 6, 5, 5]
    lengths = sorted(1 + sum(accepted[i] for i in draw) / sum(rounds[i] for i in draw) for draw in itertools.product(range(5), repeat=5))
    wanted = [lengths[int(0.025 * len(lengths))], lengths[int(0.975 * len(lengths))]]
    assert accept_interval(accepted, rounds) == pytest.approx(wanted, abs=0.06)
    assert accept_interval(accepted, rounds) == accept_interval(accepted, rounds)  # seeded


def test_speed_up_interval_against_a_slow_bootstrap():
    random.seed(1)
    rows = [[random.randint(50, 90), random.uniform(1, 2), random.randint(50, 90), random.uniform(2, 4)] for _ in range(12)]

    def ratio(some):
        ours, seconds, plain, plain_seconds = map(sum, zip(*some, strict=True))
        return (ours / seconds) / (plain / plain_seconds)

    slow = sorted(ratio(random.choices(rows, k=12)) for _ in range(20000))
    answers = [[Group([Answer([0] * row[at])], row[at + 1]) for row in rows] for at in (2, 0)]
    found = figures(*answers, 3)
    assert found["speed_up"] == pytest.approx(ratio(rows), abs=1e-4)
    assert found["speed_up_interval"] == pytest.approx([slow[500], slow[19500]], rel=0.02)
    assert interval([[1.0, 2.0]], lambda sums: sums[0]) is None


def test_simulated_counts_equal_a_slow_walk():
    """Every sample's own, over batches of several: each draft recomputed alone in float64, then the rounds played."""
    drafter, steps = drafter_of(norm=1.0), 3
    samples = [sample_of(5 + number % 7, number, prompt=1 + number % 4) for number in range(10)]
    random.seed(0)
    wanted = []
    for sample in samples:
        ids, hits = sample["input_ids"].long(), {}
        for t in range(len(ids) - 2):
            logits = reference.draft_logits(drafter, EMBEDDING, ids, sample["aux_hidden_states"], t, ids[t + 2 : t + 1 + steps].tolist())
            for depth, choice in enumerate(MAP[logits.argmax(-1)].tolist()):
                hits[depth, t] = (choice, t + depth + 1)
        for choice, row in hits.values():
            if random.random() < 0.6 and row < len(ids):
                sample["target_argmax"][row] = choice
        right = {place: row < len(ids) and choice == int(sample["target_argmax"][row]) for place, (choice, row) in hits.items()}
        wanted.append(reference.walk(sample["loss_mask"].tolist(), lambda depth, t: right[depth, t], steps))  # noqa: B023
    stored = SimpleNamespace(sample=lambda number, names: {name: samples[number][name] for name in names})
    counts = simulated(drafter, EMBEDDING, MAP, stored, np.arange(10), steps)
    assert counts.shape == (10, 2, steps)
    assert [(int(count[1].sum()), int(count[0, 0])) for count in counts] == wanted
    assert 0 < counts[:, 1].sum() < counts[:, 0].sum()  # hits and misses
    found = simulated_figures(counts)
    accepted, rounds = (sum(part) for part in zip(*wanted, strict=True))
    assert found["simulated_accept_length"] == round(1 + accepted / rounds, 4)
    low, high = found["simulated_accept_length_interval"]
    assert 1 <= low < found["simulated_accept_length"] < high
    assert simulated(drafter, EMBEDDING, MAP, stored, [], steps).shape == (0, 2, steps)
    assert simulated_figures(torch.zeros(0, 2, steps))["simulated_accept_length"] is None
    assert accept_figures([0, 0], [0, 0]) == (None, [None, None])


def test_simulated_equals_measured_on_the_targets_own_answers(tmp_path):
    """Greedy answers in float32: the walk over the shards is the very verifications that serving makes, cut ones too."""
    target = tiny.make_target(tmp_path / "target", seed=3)
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"messages": row["messages"][:1]} for row in tiny.conversations(6)])
    call("extract_hidden_states", "--target", target, "--data", rows, "--out", tmp_path / "shards", "--regenerate",
         "--max-new-tokens", 30, "--dtype", "float32", "--heldout", 0)
    call("train_drafter", "--shards", tmp_path / "shards", "--target", target, "--out", tmp_path / "out", "--draft-vocab", "full",
         "--ttt-steps", 3, "--epochs", 25, "--lr", 1e-2, "--batch-tokens", 200)
    measured, _ = call("eval_speculative", "--target", target, "--drafter", tmp_path / "out", "--prompts", rows, "--steps", 3,
                       "--max-new-tokens", 30, "--dtype", "float32")
    drafter, map_rows = load_drafter(tmp_path / "out")
    shards = Shards(tmp_path / "shards")
    counts = simulated(drafter, open_target(target).embedding(), map_rows, shards, range(len(shards.index)), 3)
    entry = measured["drafters"][0]
    assert (entry["verifications"], entry["accepted"]) == (int(counts[:, 0, 0].sum()), int(counts[:, 1].sum()))
    assert 1.1 < entry["accept_length"] == simulated_figures(counts)["simulated_accept_length"] < 3.9
    assert entry["acceptance"] == simulated_figures(counts)["simulated_acceptance"]


def test_shards_are_checked_against_target_and_layers(tmp_path):
    target = open_target(tiny.make_target(tmp_path / "target"))
    facts = target.facts()

    def shards(**changed):
        manifest = {"target": facts, "layers": [2, 4, 5], "tokenizer_sha256": tokenizer_sha256(target.folder), **changed}
        return SimpleNamespace(folder="SHARDS", manifest=manifest)

    assert check_shards(shards(), target, facts, [2, 4, 5], False) == []
    with pytest.raises(UserError, match=r"SHARDS holds layers \[2, 4, 5\], layers \[1, 4, 5\] are wanted"):
        check_shards(shards(), target, facts, [1, 4, 5], True)
    stranger = shards(target={**facts, "tensors_sha256": "0" * 64})
    with pytest.raises(UserError, match="SHARDS was made for another target: lm_head and embedding 000000000000"):
        check_shards(stranger, target, facts, [2, 4, 5], False)
    with pytest.raises(UserError, match="the tokenizer of .* has hash .*, SHARDS was made with 111111111111"):
        check_shards(shards(tokenizer_sha256="1" * 64), target, facts, [2, 4, 5], False)
    assert len(check_shards(stranger, target, facts, [2, 4, 5], True)) == 1
    assert "by force" in check_shards(shards(forced=["seed"]), target, facts, [2, 4, 5], False)[0]

    assert open_shards_target(shards()).facts() == facts
    (tmp_path / "target").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="the target of SHARDS cannot be read where it was .*; give --target, its place now"):
        open_shards_target(shards())
    assert open_shards_target(shards(), tmp_path / "moved").facts()["tensors_sha256"] == facts["tensors_sha256"]


def summary_of(steps=3, drafters=("runs/full", "runs/reduced/checkpoints/step-000400"), **more):
    entries = [{"drafter": drafter, "draft_vocab": 8000, "concurrency": 1, **figures(PLAIN, OURS, steps), "head_share": 0.25,
                "categories": {"maths": figures(PLAIN[:1], OURS[:1], steps), "code": figures(PLAIN[1:], OURS[1:], steps)}, **more}
               for drafter in drafters]
    return {"target": "smol", "prompts": 3, "drafters": entries, "baseline_tokens_per_second": 12.34,
            "transformers_tokens_per_second": None,
            "settings": {"backend": "local", "dtype": "bfloat16", "steps": steps, "topk": 1, "draft_tokens": steps + 1, "temperature": 0.0}}


def test_table_has_every_figure_in_160_columns():
    difference = {"line": 7, "turn": 0, "position": 4, "plain": [9], "drafted": [3], "gap": 0.0625, "rounding_steps": 1.0}
    lines = table(summary_of(differences=[difference] * 9))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 160 and "plain decoding: 12.3 tokens/s" in text and "generate" not in text
    head = next(line for line in lines if line.startswith("drafter"))
    total, maths = (next(line for line in lines if line.startswith(name)) for name in ("full", "  maths"))
    assert len(head) == len(total) == len(maths)
    cells = "full 8000 1 2.000 1.00-3.33 0.429 0.667 1.000 5.3 2.7 2.00 0.50-2.75 15.00 0.25 100.0 2 of 3"
    assert total.split() == cells.split() and maths.split()[1] == "3.333"
    assert "simul." not in head and "simul." in "\n".join(table(summary_of(simulated_accept_length=2.1)))
    assert "full differs from plain decoding in 9 of 3 prompts" in text and "and 4 more" in text and "the intervals are rough" in text
    assert "line 7, answer token 5: [3] for [9], whose logit is 0.0625 higher, 1 rounding step of bfloat16: a near tie" in text
    fault = table(summary_of(differences=[{**difference, "gap": 0.5, "rounding_steps": 8.0}]))
    assert "MORE than rounding" in "\n".join(fault)
    wide = table(summary_of(7, ("runs/" + "long" * 40, "b")))
    assert max(map(len, wide)) <= 160 and any("…" in line for line in wide)


def test_names_are_what_sets_the_folders_apart():
    entries = [{"drafter": "runs/a/step-1", "concurrency": 1}, {"drafter": "runs/b/step-1", "concurrency": 8}]
    assert names(entries) == ["a/step-1 x1", "b/step-1 x8"] and names(entries[:1]) == ["step-1"] and names([]) == []


def test_plot_is_a_whole_png(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    unmeasured = {"drafter": "x", "draft_vocab": 9, "concurrency": 1, "accept_length": None, "acceptance": None, "categories": {}}
    summary = summary_of()
    summary["drafters"] += [unmeasured, {**unmeasured, **simulated_figures(np.ones((4, 2, 3), dtype=int))}]
    summary["drafters"][0]["categories"] = {"$\\frac{$": {}}  # a name, no formula
    plot(tmp_path / "plot.png", summary)
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and (tmp_path / "plot.png").stat().st_size > 10000
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="matplotlib, which is not installed"):
        plot(tmp_path / "other.png", summary)
