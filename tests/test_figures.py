"""Figures, intervals, table and plot of constructed answers, and the accept length that is simulated from
shards."""

import itertools
import json
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import extract_hidden_states
from common.accept import accept_figures, accept_interval, figures, interval, names, simulated_figures
from common.cli import UserError
from common.drafter import load_drafter
from common.files import write_sealed
from common.loss import simulated
from common.plots import PNG, check_plot, figure_class, plot
from common.provenance import target_record
from common.shards import Shards, check_shards, open_shards_target
from common.target import (
    chat_template_sha256,
    load_tokenizer,
    open_target,
    stored_template_sha256,
    tokenizer_sha256,
)
from eval_speculative import (
    answers_coverage,
    compare_prediction,
    read_prediction,
    simulated_coverage,
    table,
    verdict,
)
from tests import reference, tiny
from tests.scripts import EXACT, call
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
    Group([Answer([1] * 10, [3, 3, 1], [3, 3, 2]), Answer([2], [], [])], 2.0, [0.03, 0.03, 9.0],
          [0.1, 0.2, 0.1]),
    Group([Answer([3] * 5, [0, 0, 0, 0], [1, 1, 1, 1])], 1.0, [0.06], [0.1]),
]
PLAIN = [Group([Answer([1] * 10), Answer([2])], 5.5), Group([Answer([3] * 4 + [9])], 0.5)]


def test_figures_of_constructed_answers():
    """Over all verifications, not a mean of prompts' means; acceptance of the depths that were reached;
    medians a step and a round."""
    found = figures(PLAIN, OURS, 3)
    # the mean of means were 2.17
    assert found["accept_length"] == 2.0 and found["verifications"] == 7 and found["accepted"] == 7
    assert found["acceptance"] == [round(3 / 7, 4), round(2 / 3, 4), 1.0]
    assert (found["tokens"] == 16 and found["tokens_per_second"] == 5.3333
            and found["baseline_tokens_per_second"] == 2.6667)
    assert found["speed_up"] == 2.0 and found["identical"] == 2 and found["prompts"] == 3
    assert found["draft_ms"] == 15.0 and found["verify_ms"] == 100.0
    # two groups: both of either, at a quarter each, or one of each
    assert found["speed_up_interval"] == [0.5, 2.75] and found["accept_length_interval"][0] == 1.0


def test_a_round_for_every_answer_of_k_plus_1_and_of_1():
    right = [Group([Answer([0] * 9, [3, 3], [3, 3])], 1.0), Group([Answer([0] * 5, [3], [3])], 1.0)]
    wrong = [Group([Answer([0] * 3, [0, 0], [1, 1])], 1.0), Group([Answer([0] * 2, [0], [1])], 1.0)]
    found = figures(None, right, 3)
    assert found["accept_length"] == 4.0 and found["accept_length_interval"] == [4.0, 4.0]
    found = figures(None, wrong, 3)
    assert found["accept_length"] == 1.0 and found["acceptance"] == [0.0, None, None]


def test_what_was_not_measured_is_none():
    found = figures(None, [Group([Answer([5], [], [])], 1.0)], 2)
    assert found["acceptance"] == [None, None] and found["prompts"] == found["tokens"] == 1
    assert {key for key, value in found.items() if value is None} == {
        "accept_length", "accept_length_interval", "baseline_tokens_per_second", "speed_up",
        "speed_up_interval", "identical", "draft_ms",
        "verify_ms"}
    with pytest.raises(ValueError):
        figures(PLAIN[:1], OURS, 3)  # other prompts on the two sides are never compared


def test_intervals_against_all_possible_draws():
    """Five prompts: the 3,125 draws there are, one by one, weighted alike."""
    accepted, rounds = [9, 2, 0, 14, 5], [4, 3, 6, 5, 5]
    lengths = sorted(1 + sum(accepted[i] for i in draw) / sum(rounds[i] for i in draw)
                     for draw in itertools.product(range(5), repeat=5))
    wanted = [lengths[int(0.025 * len(lengths))], lengths[int(0.975 * len(lengths))]]
    assert accept_interval(accepted, rounds) == pytest.approx(wanted, abs=0.06)
    assert accept_interval(accepted, rounds) == accept_interval(accepted, rounds)  # seeded


def test_speed_up_interval_against_a_slow_bootstrap():
    random.seed(1)
    rows = [[random.randint(50, 90), random.uniform(1, 2), random.randint(50, 90), random.uniform(2, 4)]
            for _ in range(12)]

    def ratio(some):
        ours, seconds, plain, plain_seconds = map(sum, zip(*some, strict=True))
        return (ours / seconds) / (plain / plain_seconds)

    slow = sorted(ratio(random.choices(rows, k=12)) for _ in range(20000))
    answers = [[Group([Answer([0] * row[at])], row[at + 1]) for row in rows] for at in (2, 0)]
    found = figures(*answers, 3)
    assert found["speed_up"] == pytest.approx(ratio(rows), abs=1e-4)
    assert found["speed_up_interval"] == pytest.approx([slow[500], slow[19500]], rel=0.02)
    assert interval([[1.0, 2.0]], lambda sums: sums[0]) is None


def test_simulated_counts_equal_a_slow_walk(monkeypatch):
    """Every sample's own, over batches of several: each draft recomputed alone in float64, then the rounds
    played."""
    drafter, steps = drafter_of(norm=1.0), 3
    samples = [sample_of(5 + number % 7, number, prompt=1 + number % 4) for number in range(10)]
    random.seed(0)
    wanted = []
    for sample in samples:
        ids, hits = sample["input_ids"].long(), {}
        for t in range(len(ids) - 2):
            logits = reference.draft_logits(drafter, EMBEDDING, ids, sample["aux_hidden_states"], t,
                                            ids[t + 2 : t + 1 + steps].tolist())
            for depth, choice in enumerate(MAP[logits.argmax(-1)].tolist()):
                hits[depth, t] = (choice, t + depth + 1)
        for choice, row in hits.values():
            if random.random() < 0.6 and row < len(ids):
                sample["target_argmax"][row] = choice
        right = {place: row < len(ids) and choice == int(sample["target_argmax"][row])
                 for place, (choice, row) in hits.items()}
        hit = lambda depth, t, right=right: right[depth, t]  # noqa: E731
        wanted.append(reference.walk(sample["loss_mask"].tolist(), hit, steps))
    stored = SimpleNamespace(sample=lambda number, names: {name: samples[number][name] for name in names},
                             index=np.array([[0, 0, len(sample["input_ids"])] for sample in samples]))
    monkeypatch.setattr("common.loss.MEASURED", 40)
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


def test_simulated_equals_measured_on_the_targets_own_answers(tmp_path, monkeypatch):
    """Greedy answers in float32: the walk over the shards is the very verifications that serving makes, cut
    ones too."""
    # rounded to bfloat16, a near tie in the drafter falls one way or the other by machine
    monkeypatch.setitem(extract_hidden_states.STORE, "bf16", torch.float32)
    target = tiny.make_target(tmp_path / "target", seed=3)
    rows = tiny.write_rows(tmp_path / "rows.jsonl",
                           [{"messages": row["messages"][:1]} for row in tiny.conversations(6)])
    call("extract_hidden_states", *EXACT, "--target", target, "--data", rows, "--out", tmp_path / "shards",
         "--regenerate",
         "--max-new-tokens", 30, "--dtype", "float32", "--heldout", 0)
    call("train_drafter", "--shards", tmp_path / "shards", "--target", target, "--out", tmp_path / "out",
         "--draft-vocab", "full",
         "--ttt-steps", 3, "--epochs", 25, "--lr", 1e-2, "--batch-tokens", 200)
    measured, _ = call("eval_speculative", "--target", target, "--drafter", tmp_path / "out", "--prompts",
                       rows, "--steps", 3,
                       "--max-new-tokens", 30, "--dtype", "float32")
    drafter, map_rows = load_drafter(tmp_path / "out")
    shards = Shards(tmp_path / "shards")
    counts = simulated(drafter, open_target(target).embedding(), map_rows, shards, range(len(shards.index)),
                       3)
    entry = measured["drafters"][0]
    assert (entry["verifications"], entry["accepted"]) == (int(counts[:, 0, 0].sum()),
                                                           int(counts[:, 1].sum()))
    assert 1.1 < entry["accept_length"] == simulated_figures(counts)["simulated_accept_length"] < 3.9
    assert entry["acceptance"] == simulated_figures(counts)["simulated_acceptance"]


def test_shards_are_checked_against_target_and_layers(tmp_path):
    target = open_target(tiny.make_target(tmp_path / "target"))
    facts = target.facts()
    here = {**target_record(target, facts), "layers": [2, 4, 5]}

    def shards(**changed):
        manifest = {"target": facts, "layers": [2, 4, 5], "forced": [],
                    "tokenizer_sha256": tokenizer_sha256(target.folder), **changed}
        return SimpleNamespace(folder="SHARDS", manifest=manifest)

    assert check_shards(shards(), here) == []
    with pytest.raises(UserError, match=r"SHARDS was made for other layers: \[2, 4, 5\] there, \[1, 4, 5\] "
                                        r"here"):
        check_shards(shards(), {**here, "layers": [1, 4, 5]}, force=True)
    stranger = shards(target={**facts, "tensors_sha256": "0" * 64})
    with pytest.raises(UserError, match="SHARDS was made for another target: lm_head and embedding "
                                        "000000000000"):
        check_shards(stranger, here)
    with pytest.raises(UserError, match="SHARDS was made for another tokenizer: hash 111111111111 there"):
        check_shards(shards(tokenizer_sha256="1" * 64), here)
    assert len(check_shards(stranger, here, force=True)) == 1
    assert "by force" in check_shards(shards(forced=["seed"]), here)[0]
    # what the extraction states is what the files hold
    template = chat_template_sha256(load_tokenizer(target))
    assert check_shards(shards(chat_template_sha256=template), here) == []
    [sentence] = check_shards(shards(chat_template_sha256="2" * 64), here)
    assert f"SHARDS was made for another chat template: 222222222222 there, {template[:12]} here" in sentence
    for folder, words in ((tiny.make_target(tmp_path / "config"), "chat template"),
                          (tiny.make_target(tmp_path / "none"), "None")):
        text = (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").unlink()
        if folder.name == "config":  # where older tokenizers have it
            config = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": text + "x"}))
        tokenizer = load_tokenizer(open_target(folder))
        assert (stored_template_sha256(folder) or None) == chat_template_sha256(tokenizer) != template
        other = open_target(folder)
        for record in (target_record(other, other.facts()), target_record(other, other.facts(), tokenizer)):
            assert words in check_shards(shards(chat_template_sha256=template), record)[0]

    assert open_shards_target(shards()).facts() == facts
    (tmp_path / "target").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="the target of SHARDS cannot be read where it was .*; give --target, "
                                        "its place now"):
        open_shards_target(shards())
    assert open_shards_target(shards(), tmp_path
                              / "moved").facts()["tensors_sha256"] == facts["tensors_sha256"]


def summary_of(steps=3, drafters=("runs/full", "runs/reduced/checkpoints/step-000400"), **more):
    entries = [{"drafter": drafter, "draft_vocab": 8000, "concurrency": 1, **figures(PLAIN, OURS, steps),
                "head_share": 0.25,
                "categories": {"maths": figures(PLAIN[:1], OURS[:1], steps),
                               "code": figures(PLAIN[1:], OURS[1:], steps)}, **more}
               for drafter in drafters]
    return {"target": "smol", "prompts": 3, "drafters": entries, "verdict": None,
            "baseline_tokens_per_second": 12.34,
            "transformers_tokens_per_second": None,
            "settings": {"backend": "local", "dtype": "bfloat16", "device": "cpu", "threads": 2,
                         "steps": steps, "topk": 1, "draft_tokens": steps + 1, "max_new_tokens": 64,
                         "temperature": 0.0, "concurrency": [1]}}


def test_table_has_every_figure_in_160_columns():
    difference = {"line": 7, "turn": 0, "position": 4, "plain": [9], "drafted": [3], "gap": 0.0625,
                  "rounding_steps": 1.0}
    lines = table(summary_of(differences=[difference] * 9))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 160 and "plain decoding: 12.3 tokens/s" in text and "generate" not in text
    head = next(line for line in lines if line.startswith("drafter"))
    total, maths = (next(line for line in lines if line.startswith(name)) for name in ("full", "  maths"))
    assert len(head) == len(total) == len(maths)
    cells = "full 8000 1 2.000 1.00-3.33 0.429 0.667 1.000 5.3 2.7 2.00 0.50-2.75 15.00 0.25 100.0 2 of 3"
    assert total.split() == cells.split() and maths.split()[1] == "3.333"
    assert "simul." not in head and "simul." in "\n".join(table(summary_of(simulated_accept_length=2.1)))
    assert ("full differs from plain decoding in 9 of 3 "
            "prompts" in text and "and 4 more" in text and "the intervals are rough" in text)
    told = ("line 7, answer token 5: [3] for [9], whose logit is 0.0625 higher, 1 rounding step of bfloat16: "
            "a near tie")
    assert told in text
    fault = table(summary_of(differences=[{**difference, "gap": 0.5, "rounding_steps": 8.0}]))
    assert "MORE than rounding" in "\n".join(fault)
    wide = table(summary_of(7, ("runs/" + "long" * 40, "b")))
    assert max(map(len, wide)) <= 160 and any("…" in line for line in wide)


def timed(rounds, draft, verify, prefill=0.0, drafter="runs/a", size=8000, steps=3, plain=None):
    """(entry, groups) of prompts whose rounds accept `rounds` (a list each) and take draft + verify
    seconds."""
    groups = [Group([Answer([0] * (1 + sum(accepted) + len(accepted)), accepted,
                            [min(count + 1, steps) for count in accepted])],
                    prefill + len(accepted) * (draft + verify), [draft] * len(accepted),
                    [verify] * len(accepted)) for accepted in rounds]
    return {"drafter": drafter, "draft_vocab": size, "concurrency": 1,
            **figures(plain, groups, steps)}, groups


LOCAL = {"backend": "local", "device": "cpu", "threads": 2, "dtype": "bfloat16", "steps": 3}


def test_break_even_against_rounds_that_are_played():
    """The other drafter's own rounds, with accepted drafts added until the tokens per second of all of them
    are the winner's."""
    one = timed([[2, 1, 0, 3] * 5, [1, 1, 2] * 7], 0.009, 0.06)
    two = timed([[2, 1, 1, 3] * 5, [1, 1, 2] * 7], 0.030, 0.06, drafter="runs/b", size=49152)
    found = verdict([two[0], one[0]], [two[1], one[1]], LOCAL)
    assert (found["winner"], found["runner_up"]) == ("runs/a", "runs/b")
    assert "2 prompts are too few to tell" in found["sentences"][0]

    def speed(groups, more=0.0):
        tokens = sum(len(group.answers[0].ids) - 1 for group in groups)  # without the one that prefill gives
        rounds = sum(len(group.draft_seconds) for group in groups)
        return (tokens + more * rounds) / sum(sum(group.draft_seconds) + sum(group.verify_seconds)
                                              for group in groups)

    low, high = 0.0, 4.0
    for _ in range(60):
        more = (low + high) / 2
        low, high = (more, high) if speed(two[1], more) < speed(one[1]) else (low, more)
    even = found["break_even"][0]
    assert even["break_even_accept_length"] == pytest.approx(two[0]["accept_length"] + low, abs=2e-4)
    assert (even["drafter"], even["round_ms"], even["winner_round_ms"]) == ("runs/b", 90.0, 69.0)
    text = found["sentences"][-1]
    assert text == ("b (49152 rows) would have to reach an accept length of "
                    f"{two[0]['accept_length'] + low:.2f} to be as fast as a (8000 rows): it drafts in 10.0 "
                    f"ms for 3.0, a verification takes 60.0, and it reached {two[0]['accept_length']:.2f}")
    slow = timed([[3] * 9] * 2, 0.9, 0.06, drafter="runs/c")
    assert "3 steps cannot give more than 4" in verdict([slow[0], one[0]], [slow[1], one[1]],
                                                        LOCAL)["sentences"][-1]
    late = timed([[3] * 9] * 2, 0.009, 0.06, prefill=9.0, drafter="runs/d")
    assert "by these medians it is as fast" in verdict([late[0], one[0]], [late[1], one[1]],
                                                       LOCAL)["sentences"][-1]


def test_too_close_to_tell_is_a_paired_interval_over_prompts():
    random.seed(4)
    slow = [random.uniform(1, 30) for _ in range(12)]  # prompts take their own time, whoever drafts

    def groups(factors):
        return [Group([Answer([0] * 40, [1] * 13, [2] * 13)], seconds * factor, [0.01] * 13, [0.05] * 13)
                for seconds, factor in zip(slow, factors, strict=True)]

    def entry(name, some):
        return {"drafter": name, "draft_vocab": 8000, "concurrency": 1, **figures(None, some, 3)}

    one, clear, noisy = groups([1] * 12), groups([1.04, 1.05, 1.06] * 4), groups([0.7, 1.05, 1.4] * 4)
    found = verdict([entry("a", one), entry("b", clear)], [one, clear], LOCAL)
    assert not found["too_close"] and "too close" not in found["sentences"][0] and found["winner"] == "a"
    ratio = sum(group.seconds for group in clear) / sum(group.seconds for group in one)
    assert found["ratio"] == pytest.approx(ratio, abs=1e-3)
    pairs = list(zip(one, clear, strict=True))
    drawn = sorted(sum(b.seconds for _, b in some) / sum(a.seconds for a, _ in some)
                   for some in (random.choices(pairs, k=12) for _ in range(4000)))
    assert found["ratio_interval"] == pytest.approx([drawn[100], drawn[3900]], abs=3e-3)
    found = verdict([entry("a", one), entry("b", noisy)], [one, noisy], LOCAL)
    assert found["too_close"] and "too close to tell" in found["sentences"][0]
    # the same work took longer: it is not the drafter's
    loaded = [replace(group, verify_seconds=[0.07] * 13) for group in clear]
    found = verdict([entry("a", one), entry("b", loaded)], [one, loaded], LOCAL)
    assert found["too_close"] and found["ratio_interval"][0] > 1
    assert "other work on the machine decides: a verification took 50 to 70 ms" in found["sentences"][0]
    found = verdict([entry("a", one[:1]), entry("b", clear[:1])], [one[:1], clear[:1]], LOCAL)
    assert (found["too_close"] and found["ratio_interval"] is None
            and "one batch of prompts cannot tell" in found["sentences"][0])


def test_plain_decoding_may_win_and_servers_tell_tokens_per_second_only():
    plain = [Group([Answer([0] * 41)], 2.0), Group([Answer([0] * 41)], 2.1)]
    one, two = (timed([[1] * 20] * 2, draft, 0.1, plain=plain, drafter=name)
                for name, draft in (("a", 0.03), ("b", 0.06)))
    found = verdict([one[0], two[0]], [one[1], two[1]], LOCAL)
    needed = 2 * one[0]["baseline_tokens_per_second"] / one[0]["tokens_per_second"]
    told = ("plain decoding beats them all with 20.0 tokens/s: a would have to reach an accept length of "
            f"{needed:.2f}, and reached 2.00")
    assert found["plain_beats_all"] and told in found["sentences"][1]
    assert "cannot give" not in found["sentences"][1]
    one, two = (timed([[1] * 20] * 2, draft, 0.1, plain=plain, drafter=name)
                for name, draft in (("a", 0.13), ("b", 0.16)))
    found = verdict([one[0], two[0]], [one[1], two[1]], LOCAL)
    assert "and reached 2.00, where 3 steps cannot give more than 4" in found["sentences"][1]
    unsure = [Group([Answer([0] * 41)], 0.5), Group([Answer([0] * 41)], 6.0)]
    one, two = (timed([[1] * 20] * 2, draft, 0.1, plain=unsure, drafter=name)
                for name, draft in (("a", 0.03), ("b", 0.06)))
    found = verdict([one[0], two[0]], [one[1], two[1]], LOCAL)
    assert (found["plain_beats_all"] is False and "whether a is faster is too close to "
                                                  "tell" in found["sentences"][1])
    for entry in (one[0], two[0]):
        entry |= {"draft_ms": None, "verify_ms": None, "baseline_tokens_per_second": None}
    found = verdict([one[0], two[0]], [one[1], two[1]], {**LOCAL, "backend": "sglang"})
    assert (found["winner"], found["plain_beats_all"], found["break_even"]) == ("a", None, [])
    assert len(found["sentences"]) == 1
    assert "sglang" in found["sentences"][0] and "threads" not in found["sentences"][0]
    assert verdict([one[0]], [one[1]], LOCAL) is None


def test_coverage_counts_what_can_be_drafted():
    """Of answers all but the first token; of held-out samples what the walk drafts, token by token."""
    rows = torch.tensor([1, 4, 5])
    groups = [Group([Answer([9, 1, 4, 9]), Answer([9])], 1.0), Group([Answer([1, 9, 5])], 1.0)]
    assert answers_coverage(groups, rows, 10) == 0.6 and answers_coverage(groups, None, 10) == 1.0
    assert answers_coverage([Group([Answer([9])], 1.0)], rows, 10) is None
    assert answers_coverage([], None, 10) is None
    random.seed(3)
    samples = [{"input_ids": torch.tensor([random.randint(0, 9) for _ in range(n)]),
                "loss_mask": torch.tensor([random.randint(0, 3) > 0 for _ in range(n)], dtype=torch.uint8)}
               for n in (1, 2, 3, 9, 30, 30)]
    drafted = []
    for sample in samples:
        ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].tolist()
        # append returns None: each round accepts nothing
        reference.walk(mask, lambda depth, t, ids=ids: drafted.append(ids[t + 2 + depth]), 1)
    stored = SimpleNamespace(sample=lambda number, names: samples[number],
                             manifest={"target": {"vocab_size": 10}})
    assert simulated_coverage(stored, range(6),
                              rows) == round(sum(token in (1, 4, 5) for token in drafted) / len(drafted), 4)
    assert simulated_coverage(stored, range(6), None) == 1.0 and simulated_coverage(stored, [0], rows) is None


def predicted(size, length, speed, ratio):
    return {"draft_vocab": size, "coverage_heldout": 0.9, "ceiling": 3.9, "accept_length": length,
            "draft_ms": 3.0,
            "tokens_per_second": speed, "speed_up": ratio}


def test_prediction_stands_beside_measurement():
    summary = summary_of(coverage=0.95, simulated_accept_length=2.1, simulated_acceptance=[0.4, 0.6, 1.0],
                         simulated_coverage=0.9)
    first, second = summary["drafters"]
    second |= {"draft_vocab": 49152, "accept_length": 1.6, "tokens_per_second": 4.0, "speed_up": 1.5}
    summary["drafters"] += [{**first, "draft_vocab": 7},
                            {**first, "concurrency": 8, "tokens_per_second": 99.0}]
    summary["settings"] |= {"device": "cpu", "threads": 2, "concurrency": [1, 8]}
    prediction = {"steps": 3, "dtype": "float32", "device": "cuda", "threads": 2,
                  "sizes": [predicted(8000, 1.9, 6.0, 2.5), predicted(49152, 1.7, None, 1.4)]}
    [warning] = compare_prediction(summary, prediction, "MAP")
    assert all(word in warning for word in ("MAP", "dtype float32 for "
                                                   "bfloat16", "device cuda for cpu",
                                            "one prompt at once")), warning
    assert "threads" not in warning
    assert first["predicted"] == {"accept_length": 1.9, "ceiling": 3.9, "draft_ms": 3.0,
                                  "tokens_per_second": 6.0, "speed_up": 2.5}
    assert [entry["predicted"] is None for entry in summary["drafters"]] == [False, False, True, False]
    errors = summary["prediction"]["largest_error"]
    assert errors == {"accept_length": round(max(1 - 1.9 / 2.0, 1.7 / 1.6 - 1), 4),
                      "tokens_per_second": round(6.0 / 5.3333 - 1, 4),
                      "speed_up": 0.25}
    lines = table(summary)
    assert "accept length 6.2 % (runs" not in lines[-1] and lines[-1].startswith("largest error of the "
                                                            "prediction: accept length 6.2%")
    at = lines.index("prediction beside measurement:")
    assert lines[at + 1].split("  ")[0] == "drafter" and max(map(len, lines[at:-1])) <= 160
    cells = "full x1 8000 2.000 2.100 1.900 5.3 6.0 2.00 2.50 15.00 3.00 3.900"
    assert lines[at + 2].split() == cells.split()
    assert lines[at + 4].split()[-1] == lines[at + 4].split()[5] == "-"
    assert all(title in lines[at + 1] for title in ("pred. "
                                                    "accept", "pred. "
                                                              "tok/s", "pred. x", "pred. ms",
                                                    "pred. ceiling"))
    assert all(title in next(line for line in lines if line.startswith("drafter"))
               for title in ("  cover", "s. cover"))
    assert "pred." not in "\n".join(table(summary_of()))
    summary["settings"] |= {"dtype": "float32", "concurrency": [1]}
    assert compare_prediction(summary, {**prediction, "device": "cpu"}, "MAP") == []
    assert "topk 1 for 4" in compare_prediction({**summary, "settings": {**summary["settings"], "topk": 4}},
                                                prediction, "MAP")[0]
    summary = summary_of(drafters=("a",), accept_length=None, tokens_per_second=None, speed_up=None,
                         simulated_accept_length=2.0)
    summary["settings"] |= {"device": "cpu", "threads": 2, "concurrency": [1]}
    compare_prediction(summary, prediction, "MAP")
    assert summary["prediction"]["largest_error"] == {"accept_length": 0.05, "tokens_per_second": None,
                                                      "speed_up": None}
    compare_prediction(summary, {**prediction, "sizes": []}, "MAP")
    assert summary["prediction"]["sentences"] == ["the prediction names no figure that was measured here"]


def test_predictions_that_do_not_fit_are_refused(tmp_path):
    facts = {"name": "smol", "tensors_sha256": "a" * 64, "text_config_sha256": "b", "vocab_size": 49152,
             "hidden_size": 576}
    good = {"steps": 3, "dtype": "float32", "device": "cpu", "threads": 2,
            "sizes": [predicted(8, 2.0, 5.0, 1.1)]}

    def attempt(found, steps=3, force=False):
        write_sealed(tmp_path / "vocab_map.json",
                     {"target": {**facts, "name": "other"}, "prediction": good, **found})
        return read_prediction(tmp_path, {"target": facts}, steps, force)

    assert attempt({}) == (good, [])
    stranger = {"target": {**facts, "name": "other", "tensors_sha256": "c" * 64}}
    for found, words in (({"prediction": None}, "holds no prediction; make one with build_vocab_map.py "
                                                "--predict 3"),
                         ({"target": {**facts, "text_config_sha256": "x"}}, "another target: text config x"),
                         ({"prediction": {**good, "steps": 5}}, "is for 5 steps, 3 are measured"),
                         (stranger, "another target.*cccccccccccc of other .*aaaa of smol")):
        with pytest.raises(UserError, match=words):
            attempt(found)
    assert "cccccccccccc" in attempt(stranger, force=True)[1][0]
    path = tmp_path / "vocab_map.json"
    path.write_text(path.read_text().replace('"draft_vocab": 8', '"draft_vocab": "8"'))
    with pytest.raises(UserError, match="was changed after it was written"):
        read_prediction(tmp_path, {"target": facts}, 3, True)
    with pytest.raises(UserError, match="does not exist"):
        read_prediction(tmp_path / "none", {"target": facts}, 3, False)


def test_names_are_what_sets_the_folders_apart():
    entries = [{"drafter": "runs/a/step-1", "concurrency": 1}, {"drafter": "runs/b/step-1", "concurrency": 8}]
    assert names(entries) == ["a/step-1 "
                              "x1", "b/step-1 x8"] and names(entries[:1]) == ["step-1"] and names([]) == []


def test_a_plot_replaces_nothing_but_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "old.png").write_bytes(PNG + b"rest")
    (tmp_path / "manifest.json").write_text("{}")
    check_plot(tmp_path / "old.png", tmp_path / "out")
    check_plot(tmp_path / "new.png")
    for path, words in (("manifest.json", "is there already and is no "
                                          "PNG"), ("none/p.png", "cannot be written"),
                        (".", "cannot be written"), ("out", "a file of its own")):
        with pytest.raises(UserError, match=words):
            check_plot(tmp_path / path, tmp_path / "out")
    with pytest.raises(UserError, match="can be written to"):
        check_plot(Path("/proc/new.png"))  # where a superuser may write, and cannot


def test_plot_is_a_whole_png(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    unmeasured = {"drafter": "x", "draft_vocab": 9, "concurrency": 1, "accept_length": None,
                  "acceptance": None, "categories": {}}
    summary = summary_of()
    summary["drafters"] += [unmeasured, {**unmeasured, **simulated_figures(np.ones((4, 2, 3), dtype=int))}]
    summary["drafters"][0]["categories"] = {"$\\frac{$": {}}  # a name, no formula
    plot(tmp_path / "plot.png", summary)
    picture = (tmp_path / "plot.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 10000
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
    panels, subplots = [], figure_class().subplots
    monkeypatch.setattr(figure_class(), "subplots", lambda *given,
                        **more: panels.append(subplots(*given, **more)) or panels[-1])
    summary = summary_of()
    summary["drafters"][1] |= {"draft_vocab": 49152, "speed_up": 0.9}
    summary["drafters"][0]["predicted"] = predicted(8000, 2.0, 6.0, 1.1)
    plot(tmp_path / "sizes.png", summary)
    sizes = panels[0][2]
    assert len(panels[0]) == 3 and sizes.get_xscale() == "log"
    assert [text.get_text() for text in sizes.texts[:2]] == ["1", "2"]
    drawn = [(list(line.get_xdata()), list(line.get_ydata()), line.get_fillstyle())
             for line in sizes.lines[:3]]
    assert drawn == [([8000], [1.1], "none"), ([8000], [summary["drafters"][0]["speed_up"]], "full"),
                     ([49152], [0.9], "full")]
    summary["drafters"] += [{**summary["drafters"][0], "speed_up": 1.0 + number} for number in range(3)]
    plot(tmp_path / "same.png", summary)
    # 8000 four times, 49152
    assert [text.get_ha() for text in panels[-1][2].texts[:5]] == ["left", "right", "left", "right", "left"]
    for entry in summary["drafters"]:
        entry |= {"speed_up": None, "tokens_per_second": None, "simulated_accept_length": 1.5}
    plot(tmp_path / "simulated.png", summary)
    assert panels[-1][2].get_ylabel() == "simulated accept length"
    assert list(panels[-1][2].lines[1].get_ydata()) == [1.5]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="matplotlib, which is not installed"):
        plot(tmp_path / "other.png", summary)
