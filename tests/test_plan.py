"""build_vocab_map.py --prune, --predict and --plot: a drafter cut to a map, and what sizes would reach before
they are trained."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear

from build_vocab_map import check_drafter, step_times
from common.cli import UserError
from common.decode import Group
from common.drafter import load_drafter
from common.files import read_json, sha256_file, write_json
from common.loss import simulated
from common.plots import plot_vocabulary
from common.shards import Shards
from common.target import open_target
from common.vocab import load_map, map_sha256, rows_to_d2t
from tests import reference, tiny
from tests.scripts import call, make_work
from tests.test_vocab_map import change, refusal, script


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Shards of a tiny target's own answers, a map of 60 of its 328 ids, and a drafter of all of them that
    has learnt a little."""
    work = make_work(tmp_path_factory.mktemp("work"), 60, 24, 60)
    call("train_drafter", "--shards", work / "shards", "--target", work / "target", "--draft-vocab", "full",
         "--out", work / "run", "--ttt-steps", 3, "--epochs", 5, "--lr", 1e-2, "--batch-tokens", 300)
    return work


def prune(work, out, size=60, drafter="run", *more):
    return script("--prune", work / drafter, "--shards", work / "shards", "--draft-vocab", size, "--out", out,
                  *more)


def test_a_pruned_drafter_is_the_full_one_without_the_other_rows(tmp_path, work):
    code, summary, _ = prune(work, tmp_path / "cut")
    rows, facts = load_map(work / "map")
    full, cut = (load_file(folder / "model.safetensors") for folder in (work / "run", tmp_path / "cut"))
    assert code == 0 and cut.keys() == full.keys() | {"d2t", "t2d"}
    for name, tensor in full.items():
        wanted = tensor[torch.from_numpy(rows)] if name == "lm_head.weight" else tensor
        assert cut[name].dtype == wanted.dtype and torch.equal(cut[name], wanted)
    assert cut["d2t"].tolist() == rows_to_d2t(rows).tolist()
    assert cut["t2d"].nonzero()[:, 0].tolist() == rows.tolist()

    config, before = (json.loads((folder / "config.json").read_text())
                      for folder in (tmp_path / "cut", work / "run"))
    training = config.pop("training")
    wanted = before.pop("training")
    assert config == {**before, "draft_vocab_size": 60}
    assert training["pruned_from"]["model_sha256"] == sha256_file(work / "run/model.safetensors")
    assert training["draft_vocab"] == 60
    assert training["map_sha256"] == summary["map_sha256"] == facts["map_sha256"]
    assert facts["map_sha256"] == map_sha256(rows_to_d2t(rows))
    assert training["coverage_heldout"] == summary["coverage_heldout"] == facts["coverage_heldout"] < 1
    assert training["accept_length"] is None
    assert training["target"] == wanted["target"] and training["layers"] == wanted["layers"]
    assert summary["pruned_from"] == str(work / "run") and summary["lm_head_params"] == 60 * 64

    drafter, own = load_drafter(tmp_path / "cut")
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    logits = linear(drafter.norm(hidden), drafter.lm_head.weight)
    whole, _ = load_drafter(work / "run")
    assert torch.equal(logits, linear(whole.norm(hidden), whole.lm_head.weight)[:, own])


def test_a_pruned_drafter_is_evaluated(tmp_path, work):
    """It accepts what the full one does inside its rows, and all of it where it keeps the rows that are
    chosen."""
    prune(work, tmp_path / "maps", "40,327")
    found, _ = call("eval_speculative", "--shards", work / "shards", "--steps", 3, "--drafter", work / "run",
                 "--drafter", tmp_path / "maps/40", "--drafter", tmp_path / "maps/327")
    full, few, most = (entry["simulated_accept_length"] for entry in found["drafters"])
    assert [entry["draft_vocab"] for entry in found["drafters"]] == [328, 40, 327]
    assert 1.05 < few < most == full


def test_a_drafter_cut_to_a_named_map_and_to_several_sizes(tmp_path, work):
    code, summary, _ = script("--prune", work / "run", "--vocab-map", work / "map", "--out",
                              tmp_path / "named")
    assert code == 0 and summary["coverage"] == load_map(work / "map")[1]["coverage"]
    code, summaries, _ = prune(work, tmp_path / "maps", "60,30")
    assert code == 0 and [summary["draft_vocab"] for summary in summaries] == [30, 60]
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["30", "60"]
    named, counted = (sha256_file(tmp_path / folder / "model.safetensors") for folder in ("named", "maps/60"))
    assert named == counted
    few, more = (load_drafter(tmp_path / "maps" / size)[1].tolist() for size in ("30", "60"))
    assert len(few) == 30 and set(few) < set(more)


def test_what_a_pruned_drafter_replaces(tmp_path, work):
    def refused(out, *more):
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        code, _, stderr = prune(work, out, *more)
        assert code == 2 and before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        return stderr

    out = tmp_path / "cut"
    prune(work, out)
    before = sha256_file(out / "model.safetensors")
    assert prune(work, out)[0] == 0 and sha256_file(out / "model.safetensors") == before
    assert "another size (60 there, 61 here)" in refused(out, 61)
    other = make_work(tmp_path / "other", 20, 12, 60)  # the same target, which answered other questions
    code, _, stderr = script("--prune", work / "run", "--shards", other / "shards", "--draft-vocab", 60,
                             "--out", out)
    assert code == 2 and "another shards hash" in stderr
    code, summary, _ = script("--prune", work / "run", "--shards", other / "shards", "--draft-vocab", 60,
                              "--out", out, "--force")
    assert code == 0 and "another shards hash" in summary["warnings"][0]
    assert json.loads((out / "config.json").read_text())["training"]["warnings"] == summary["warnings"]
    code, summary, _ = script("--prune", work / "run", "--vocab-map", work / "map", "--out", out, "--force")
    assert code == 0 and "another shards hash" in summary["warnings"][0]
    (out / "notes.txt").write_text("mine")
    assert "notes.txt" in refused(out) and "notes.txt" in refused(out, 60, "run", "--force")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    assert "holds something else (notes.txt)" in refused(tmp_path / "mine")
    trained = tiny.make_drafter(tmp_path / "trained", open_target(work / "target"))
    assert "not made by pruning" in refused(trained, 60, "run", "--force")
    assert "another size" not in refused(work / "map")  # a map is no drafter, and stays


def test_drafters_that_are_not_pruned(tmp_path, work):
    def refused(drafter, *more):
        return refusal(tmp_path / "out", "--shards", work / "shards", "--draft-vocab", 60, "--prune", drafter,
                       *more)

    target = open_target(work / "target")
    assert "has 50 of 328 rows already" in refused(tiny.make_drafter(tmp_path / "reduced", target, 50))
    wider = open_target(tiny.make_target(tmp_path / "wide/target", vocab_size=400))
    assert "made for another target" in refused(tiny.make_drafter(tmp_path / "wider", wider), "--force")
    foreign = tiny.make_drafter(tmp_path / "foreign", wider, training=False)
    assert "vocabulary 400 of an unnamed target there" in refused(foreign, "--force")

    narrow = SimpleNamespace(config={"vocab_size": 328, "target_hidden_size": 32})
    with pytest.raises(UserError, match="hidden size 32 of an unnamed target there, 64"):
        check_drafter("narrow", narrow, {"target": target.facts()}, force=True)

    other = tiny.make_drafter(tmp_path / "other", open_target(tiny.make_target(tmp_path / "twin", seed=5)))
    assert "lm_head and embedding" in refused(other) and "--force goes on" in refused(other)
    code, summary, stderr = prune(work, tmp_path / "forced", 60, other, "--force")
    assert code == 0 and "lm_head and embedding" in summary["warnings"][0]
    assert "warning: --force: the drafter" in stderr
    assert read_json(tmp_path / "forced/config.json")["training"]["warnings"] == summary["warnings"]

    config = json.loads((work / "run/config.json").read_text())
    retold = tiny.make_drafter(tmp_path / "retold", target)
    change(retold / "config.json", training={**config["training"], "tokenizer_sha256": "f" * 64})
    assert "made for another tokenizer: hash ffffffffffff" in refused(retold)
    assert "ffffffffffff" in prune(work, tmp_path / "retold-cut", 60, retold, "--force")[1]["warnings"][0]
    layers = tiny.make_drafter(tmp_path / "layers", target, layers=[1, 3, 6])
    assert "made for other layers: [1, 3, 6] there, [2, 4, 5] here" in refused(layers)
    assert "made for other layers: [1, 3, 6] there" in refused(layers, "--force")
    trained = {"target": {"tensors_sha256": target.facts()["tensors_sha256"]}}
    partial = SimpleNamespace(config={"vocab_size": 328, "target_hidden_size": 64, "training": trained})
    assert check_drafter("partial", partial, {"target": target.facts()}, False) == []  # what it does not say
    unnamed = tiny.make_drafter(tmp_path / "unnamed", target, training=False)
    assert "does not say which target" in prune(work, tmp_path / "unnamed-cut", 60, unnamed)[1]["warnings"][0]


@pytest.mark.parametrize("told", [None, "text", ["earlier"]])
def test_a_pruned_drafter_keeps_what_was_told_and_tells_of_other_templates(tmp_path, work, told):
    drafter = tiny.make_drafter(tmp_path / "drafter", open_target(work / "target"))
    config = json.loads((drafter / "config.json").read_text())
    config["training"] |= {"warnings": told, "template_kwargs": {"thinking": True},
                           "chat_template_sha256": "1" * 64}
    write_json(drafter / "config.json", config)
    code, summary, _ = prune(work, tmp_path / "cut", 60, drafter)
    template, arguments = summary["warnings"]
    assert code == 0 and "another chat template: 111111111111" in template
    assert "arguments of the template: {'thinking': True}" in arguments
    kept = json.loads((tmp_path / "cut/config.json").read_text())["training"]["warnings"]
    assert kept == [*(told if isinstance(told, list) else []), template, arguments]
    code, summary, _ = script("--prune", drafter, "--vocab-map", work / "map", "--out", tmp_path / "named")
    assert code == 0 and [words[:60] for words in summary["warnings"]] == [template[:60], arguments[:60]]


def test_a_target_that_is_named_beside_shards_or_a_map_is_compared(tmp_path, work):
    twin = tiny.make_target(tmp_path / "twin", seed=5)
    renamed = tiny.make_target(tmp_path / "renamed")
    write_json(renamed / "added_tokens.json", {"x": 1})  # another tokenizer
    for what in (("--shards", work / "shards", "--draft-vocab", 60),
                 ("--prune", work / "run", "--vocab-map", work / "map"),
                 ("--shards", work / "shards", "--draft-vocab", 60, "--predict", 2)):
        for target, words in ((twin, "lm_head and embedding"), (renamed, "made for another tokenizer: hash"),
                              ("./no", "./no does not exist")):
            assert words in refusal(tmp_path / "out", *what, "--target", target)
    code, summary, _ = script("--shards", work / "shards", "--draft-vocab", 60, "--target", work / "target",
                              "--out", tmp_path / "out")
    assert code == 0 and summary["warnings"] == []
    code, summary, _ = script("--shards", work / "shards", "--draft-vocab", 60, "--target", twin, "--out",
                              tmp_path / "out", "--force")
    assert code == 0 and "lm_head and embedding" in summary["warnings"][0]


def held(hits, depth, row):
    """Whether the target's choice that follows the token drafted at `depth` from `row` has a row."""
    return hits[row + depth + 1]


def slow_lengths(shards, maps, steps):
    """{size: accept length} of a drafter that is right wherever the target's choice is in its vocabulary,
    played round by round."""
    found = {}
    for size, rows in maps.items():
        totals = [0, 0]
        for number in shards.heldout.nonzero()[0]:
            sample = shards.sample(int(number), ("loss_mask", "target_argmax"))
            hits = [token in rows for token in sample["target_argmax"].tolist()]
            played = reference.walk(sample["loss_mask"].tolist(), partial(held, hits), steps)
            totals = [total + part for total, part in zip(totals, played, strict=True)]
        found[size] = 1 + totals[0] / totals[1]
    return found


@pytest.mark.parametrize("steps", [1, 3])
def test_predicted_ceilings_are_those_of_a_slow_walk(tmp_path, work, monkeypatch, steps):
    monkeypatch.setattr("build_vocab_map.ACCEPTANCE", 1.0)
    code, summaries, stderr = script("--shards", work / "shards", "--draft-vocab", "10,25,60", "--out",
                                     tmp_path / "maps", "--predict", steps, "--dtype", "float32")
    assert code == 0
    prediction, shards = summaries[0]["prediction"], Shards(work / "shards")
    maps = {size: set(load_map(tmp_path / f"maps/{size}")[0].tolist())
            for size in (10, 25, 60)} | {328: set(range(328))}
    slow = slow_lengths(shards, maps, steps)
    sizes = {size["draft_vocab"]: size for size in prediction["sizes"]}
    for size, length in slow.items():
        assert sizes[size]["ceiling"] == pytest.approx(length, abs=1e-4)
        # every draft is right where the vocabulary has the token
        assert sizes[size]["accept_length"] == sizes[size]["ceiling"]
    ceilings = [size["ceiling"] for size in prediction["sizes"]]
    assert list(sizes) == [10, 25, 60, 328] and ceilings == sorted(set(ceilings))
    assert steps + 0.7 < ceilings[-1] <= steps + 1  # short of steps + 1 by what the end of an answer cuts off
    assert steps > 1 or ceilings[-1] > 1.9
    assert load_map(tmp_path / "maps/25")[1]["prediction"] == prediction and prediction["steps"] == steps
    assert prediction["target_sha256"] == shards.manifest["target"]["tensors_sha256"]
    assert prediction["pilot"] is None

    assert "within 5 % of the fastest" in stderr and "if 100% of the drafts are right" in stderr


def test_predicted_speeds_follow_from_the_times_and_the_expected_length(tmp_path, work, monkeypatch):
    monkeypatch.setattr("build_vocab_map.ACCEPTANCE", 0.5)
    _, summary, _ = script("--shards", work / "shards", "--draft-vocab", "25", "--out", tmp_path / "map",
                           "--predict", 3)
    prediction, shards = summary["prediction"], Shards(work / "shards")
    tokens = prediction["answer_tokens"]
    assert tokens == round(shards.index[shards.heldout, 5].mean())
    plain = prediction["prefill_ms"] + (tokens - 1) * prediction["plain_ms"]
    for size in prediction["sizes"]:
        one = (3 * size["draft_ms"] + prediction["verify_ms"]) / size["accept_length"]
        milliseconds = prediction["prefill_ms"] + (tokens - 1) * one
        assert size["accept_length"] < size["ceiling"] - 0.1
        assert size["tokens_per_second"] == pytest.approx(1000 * tokens / milliseconds, rel=2e-3)
        assert size["speed_up"] == pytest.approx(plain / milliseconds, rel=2e-3)


def test_what_is_timed(work, monkeypatch):
    """Medians over the rounds but for the first of each, which warms up; a draft's time is that of one of its
    steps."""
    def decode(model, prompts, limits, eos_ids, drafter, steps, topk, draft_tokens):
        slow = 1 if limits > 2 else 1000
        if not drafter:
            return Group([], 0.5 * slow, [], [0.1 * slow] * 3)
        return Group([], 9.0, [0.001 * len(drafter[0].lm_head.weight) * slow] * 3, [0.2 * slow] * 3)

    monkeypatch.setattr("build_vocab_map.decode", decode)
    model = SimpleNamespace(target=open_target(work / "target"), device=torch.device("cpu"),
                            dtype=torch.float32)
    times = step_times(model, {60: load_map(work / "map")[0], 328: None}, 3, Shards(work / "shards"))
    assert times == {"plain_ms": 100.0, "prefill_ms": 200.0, "verify_ms": 200.0,
                     "draft_ms": {60: 20.0, 328: 109.3333}}


def test_a_share_of_right_drafts_is_expected_without_a_pilot(tmp_path, work, monkeypatch):
    def lengths(acceptance):
        monkeypatch.setattr("build_vocab_map.ACCEPTANCE", acceptance)
        _, summary, _ = script("--shards", work / "shards", "--draft-vocab", "25", "--out",
                               tmp_path / str(acceptance), "--predict", 3)
        assert summary["prediction"]["acceptance"] == acceptance
        return [size["accept_length"] for size in summary["prediction"]["sizes"]]

    few, more = lengths(0.3), lengths(0.8)
    assert few[0] < few[1] < more[1] and few[0] < more[0] < more[1]
    assert few[1] == pytest.approx(1 + 0.3 + 0.3**2 + 0.3**3, abs=0.15)  # of many drafts


def test_a_pilots_own_hits_are_what_is_expected(tmp_path, work):
    """At its own size they give the pilot's simulated accept length; at a smaller one nearly that of the
    pilot cut to it, whose choice inside the map is sometimes right where the pilot's own is outside of it."""
    prune(work, tmp_path / "cut", "60")
    shards, embedding = Shards(work / "shards"), open_target(work / "target").embedding().float()
    for pilot, sizes in ((work / "run", {60: tmp_path / "cut", 328: work / "run"}),
                         (tmp_path / "cut", {60: tmp_path / "cut"})):
        code, summary, stderr = script("--shards", work / "shards", "--draft-vocab", "60", "--out",
                                       tmp_path / f"{pilot.name}-map",
                                       "--predict", 3, "--pilot", pilot)
        predicted = {size["draft_vocab"]: size for size in summary["prediction"]["sizes"]}
        assert code == 0 and summary["prediction"]["pilot"] == str(pilot)
        assert summary["prediction"]["acceptance"] is None
        for size, folder in sizes.items():
            drafter, rows = load_drafter(folder)
            counts = simulated(drafter, embedding, rows, shards, shards.heldout.nonzero()[0], 3).sum(0)
            length = 1 + int(counts[1].sum()) / int(counts[0, 0])
            off = predicted[size]["accept_length"] - length
            assert 1.05 < length < predicted[size]["ceiling"] and off < 1e-4
            assert off > (-1e-4 if folder == pilot else -0.03 * length)
        assert ("the pilot has 60 rows" in stderr) == (pilot.name == "cut")


def test_pilots_and_shards_that_predict_nothing(tmp_path, work):
    def refused(shards, *more):
        return refusal(tmp_path / "out", "--shards", shards, "--draft-vocab", "60", "--predict", 3, *more)

    target = open_target(work / "target")
    other = tiny.make_drafter(tmp_path / "other", open_target(tiny.make_target(tmp_path / "twin", seed=5)))
    assert "lm_head and embedding" in refused(work / "shards", "--pilot", other)
    code, summary, _ = script("--shards", work / "shards", "--draft-vocab", "60", "--out",
                              tmp_path / "forced", "--predict", 3,
                              "--pilot", other, "--force")
    assert code == 0 and "lm_head and embedding" in summary["warnings"][0]
    layers = tiny.make_drafter(tmp_path / "layers", target, layers=[1, 3, 6])
    assert "made for other layers: [1, 3, 6] there" in refused(work / "shards", "--pilot", layers)
    assert "lm_head and embedding" in refused(work / "shards", "--target", tmp_path / "twin")
    call("extract_hidden_states", "--target", work / "target", "--data",
         tiny.write_rows(tmp_path / "rows", tiny.conversations(5)),
         "--out", tmp_path / "shards", "--heldout", 0)
    assert "holds no held-out samples" in refused(tmp_path / "shards")


def whole_png(path):
    """Width and height of a PNG that is there from its first byte to its last."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def test_a_plot_is_written_whole(tmp_path, work):
    plain = ("--shards", work / "shards", "--draft-vocab", "30,60", "--plot", tmp_path / "plot.png", "--out",
             tmp_path / "maps")
    assert script(*plain)[0] == 0
    width, height = whole_png(tmp_path / "plot.png")
    assert script(*plain, "--predict", 2)[0] == 0  # with a third part, of what is predicted
    assert whole_png(tmp_path / "plot.png")[0] > width and height > 400
    data = tiny.write_rows(tmp_path / "rows",
                           [{**row, "source": str(n % 12)} for n, row in enumerate(tiny.conversations(48))])
    code, _, stderr = script("--data", data, "--target", work / "target", "--draft-vocab", "30", "--plot",
                             tmp_path / "data.png",
                             "--out", tmp_path / "data-map")
    assert code == 0 and whole_png(tmp_path / "data.png")[0] > 400 and "coverage by source" in stderr


def test_what_was_not_held_out_is_not_plotted(tmp_path):
    curve = [{"draft_vocab": size, "coverage": size / 16, "coverage_heldout": None}
             for size in (1, 2, 4, 8, 16)]
    sources = {name: {"supervised_tokens": 9, "coverage": [0.1, 0.2, 0.3, 0.5, 1.0], "coverage_heldout": None}
               for name in "ab"}
    costs = [{"draft_vocab": size, "parameters": size, "bytes": 2 * size, "share": None} for size in (4, 16)]
    plot_vocabulary(tmp_path / "plot.png", "tiny", curve, sources, costs, None)
    whole_png(tmp_path / "plot.png")
