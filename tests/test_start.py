"""How a drafter starts: the vocabulary as decided, a checkpoint's rows as they are or remapped, and whether
it is one for this target."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import train_drafter
from common.cli import UserError
from common.drafter import load_drafter
from common.shards import Shards
from common.target import open_target, plain_weight
from common.vocab import load_map, save_map
from tests import tiny
from tests.scripts import EXACT, call, shell
from train_drafter import constant_guess, norms_add_one, remap, scatter

V = 328
IDLE = (326, 327)  # ids whose lm_head rows are zero in the target: never the likeliest


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target, shards of its own answers, maps, and drafters `full` and `reduced` that have learnt
    them."""
    folder = tmp_path_factory.mktemp("start")
    tiny.make_target(folder / "target")
    tensors = load_file(folder / "target" / "model.safetensors")
    tensors["lm_head.weight"][list(IDLE)] = 0.0
    save_file(tensors, folder / "target" / "model.safetensors", metadata={"format": "pt"})
    tiny.write_rows(folder / "rows.jsonl",
                    [{"messages": row["messages"][:1]} for row in tiny.conversations(24)])
    call("extract_hidden_states", *EXACT, "--target", folder / "target", "--data", folder / "rows.jsonl",
         "--out", folder / "shards",
         "--regenerate", "--max-new-tokens", 24, "--dtype", "float32", "--heldout", 0.2)
    call("build_vocab_map", "--shards", folder / "shards", "--draft-vocab", "60,99", "--out", folder / "maps")
    counted, facts = load_map(folder / "maps" / "99")
    make_map(folder / "map", [*counted, IDLE[0]], facts)
    make_map(folder / "other", [*counted, IDLE[1]], facts)
    for name, choice in (("full", ["full"]), ("reduced", [100, "--vocab-map", folder / "map"])):
        train(folder, folder / name, "--draft-vocab", *choice, "--epochs", 12, "--batch-tokens", 200)
    return folder


def make_map(folder, rows, facts, **changed):
    kept = {key: value for key, value in facts.items()
            if key not in ("vocab_size", "draft_vocab", "map_sha256")}
    save_map(folder, np.sort(np.array(rows)), V, {**kept, **changed})


def train(work, out, *more):
    return call("train_drafter", "--shards", work / "shards", "--target", work / "target", "--out", out,
                "--ttt-steps", 2,
                "--lr", 3e-3, *more)


def go_on(work, out, checkpoint, *more):
    """One step, so small that what comes out is the start."""
    return train(work, out, "--init", "checkpoint", "--checkpoint", checkpoint, "--max-steps", 1, "--lr",
                 1e-12, "--muon-lr", 1e-12, *more)


def change(folder, source, tensors=None, **training):
    """A copy of a drafter's folder with other tensors, or other entries of its training block."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["training"] |= training
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**load_file(source / "model.safetensors"), **(tensors or {})}, folder / "model.safetensors",
              metadata={"format": "pt"})
    return folder


TO_ANOTHER = "--remap-vocab to change it"
# --draft-vocab, --init with its checkpoint, --vocab-map, --remap-vocab, words of the refusal or None
TABLE = [
    (100, None, "map", False, None),
    ("full", None, None, False, None),
    (328, None, None, False, None),  # written as a number
    (60, None, "maps/60", False, None),
    (100, None, None, False, "needs --vocab-map"),
    (60, None, "map", False, "has 100 rows, --draft-vocab says 60"),
    ("full", None, "map", False, "takes no --vocab-map"),
    (100, None, "map", True, "--remap-vocab goes with --init checkpoint"),
    (100, "reduced", None, False, None),
    (100, "reduced", "map", False, None),
    (100, "reduced", "other", False, "is not the map of .* or --remap-vocab to carry its rows over"),
    (60, "reduced", "maps/60", False, f"vocabulary of 100, --draft-vocab says 60; .* {TO_ANOTHER}"),
    (60, "reduced", None, False, TO_ANOTHER),
    ("full", "reduced", None, False, f"vocabulary of 100, --draft-vocab says full; .* {TO_ANOTHER}"),
    ("full", "full", None, False, None),
    (328, "full", None, False, None),
    ("full", "full", "map", False, "takes no --vocab-map"),
    (100, "full", "map", False, rf"vocabulary of 328 \(full\), --draft-vocab says 100; .* {TO_ANOTHER}"),
    (100, "full", None, False, TO_ANOTHER),
    (60, "reduced", "maps/60", True, None),
    (100, "reduced", "other", True, None),
    (100, "reduced", "map", True, None),  # nothing changes
    ("full", "reduced", None, True, None),
    (100, "full", "map", True, None),
    ("full", "full", None, True, None),
    (60, "reduced", None, True, "needs --vocab-map"),
    (100, "reduced", None, True, "needs --vocab-map"),  # its own map is not meant: it must be named
    (60, "reduced", "map", True, "has 100 rows, --draft-vocab says 60"),
    ("full", "reduced", "map", True, "takes no --vocab-map"),
    ("full", "full", "map", True, "takes no --vocab-map"),
    *((size, checkpoint, named, remap, rf"--draft-vocab {size} is not in 1..328") for size in (0, -1, 329)
      for checkpoint, named, remap in ((None, "map", False), ("reduced", None, False), ("full", None, False),
                                       ("reduced", "map", True))),
]


@pytest.mark.parametrize(("size", "checkpoint", "named", "remapped", "words"), TABLE)
def test_every_choice_of_a_vocabulary(work, tmp_path, size, checkpoint, named, remapped, words):
    arguments = ["--draft-vocab", size, "--dry-run",
                 *(["--init", "checkpoint", "--checkpoint", work / checkpoint] if checkpoint else []),
                 *(["--vocab-map", work / named] if named else []), *(["--remap-vocab"] if remapped else [])]
    if words is None:
        assert train(work, tmp_path / "out", *arguments)["draft_vocab"] == (V if size == "full" else size)
    else:
        with pytest.raises(UserError, match=words):
            train(work, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_map_that_lies_about_is_not_picked_up(work, tmp_path, monkeypatch):
    """In the current folder, in --shards, and beside --out; a named one is all that counts."""
    shutil.copytree(work / "shards", tmp_path / "shards")
    for place in (tmp_path, tmp_path / "shards"):
        for file in (work / "maps" / "60").iterdir():
            shutil.copy(file, place)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="needs --vocab-map"):
        train(work, tmp_path / "out", "--shards", tmp_path / "shards", "--draft-vocab", 60)
    train(work, tmp_path / "out", "--shards", tmp_path / "shards", "--draft-vocab", "full", "--max-steps", 1)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "out" / "model.safetensors").keys()
    go_on(work, tmp_path / "again", work / "reduced", "--draft-vocab", 100, "--shards", tmp_path / "shards")
    assert torch.equal(load_drafter(tmp_path / "again")[1], load_drafter(work / "reduced")[1])


@pytest.mark.parametrize(("checkpoint", "size", "named"),
                         [("reduced", 60, "maps/60"), ("reduced", "full", None), ("full", 100, "map"),
                                                         ("reduced", 100, "other")])
def test_remapped_rows_are_the_checkpoints_or_the_targets(work, tmp_path, checkpoint, size, named):
    """Token by token; the export and the summary say how many of each."""
    summary = go_on(work, tmp_path / "out", work / checkpoint, "--draft-vocab", size, "--remap-vocab",
                    "--force",
                    *(["--vocab-map", work / named] if named else []))
    before, old = load_drafter(work / checkpoint)
    after, new = load_drafter(tmp_path / "out")
    old, new = (list(range(V)) if ids is None else ids.tolist() for ids in (old, new))
    assert new == (list(range(V)) if named is None else load_map(work / named)[0].tolist())
    head = open_target(work / "target").lm_head().float()
    moved = (before.lm_head.weight - head[old]).mean(0)  # new rows move with those that were trained
    for row, token in enumerate(new):
        wanted = before.lm_head.weight[old.index(token)] if token in old else head[token] + moved
        assert torch.allclose(after.lm_head.weight[row], wanted, rtol=1e-2)  # rounded to bfloat16
    shared = len(set(old) & set(new))
    assert summary["remapped"] == {"carried": shared, "new": len(new) - shared, "dropped": len(old) - shared}
    assert after.config["training"]["remapped"] == summary["remapped"]
    assert after.config["draft_vocab_size"] == len(new)
    kept = after.state_dict()
    for name, tensor in before.state_dict().items():
        assert name == "lm_head.weight" or torch.allclose(tensor, kept[name], rtol=1e-2)


def test_rows_in_another_order_are_refused_and_sorted_when_remapped(work, tmp_path):
    """Two entries exchanged together with their rows: the same drafter, which drafts the same once it is
    sorted."""
    tensors = load_file(work / "reduced" / "model.safetensors")
    ids, order = tensors["d2t"] + torch.arange(100), torch.arange(100)
    order[[20, 70]] = order[[70, 20]]
    swapped = {"d2t": ids[order] - torch.arange(100), "lm_head.weight": tensors["lm_head.weight"][order]}
    # as a foreign checkpoint, which states none
    change(tmp_path / "swapped", work / "reduced", swapped, map_sha256=None)
    with pytest.raises(UserError, match="do not ascend, as they must; .* --remap-vocab sorts them"):
        go_on(work, tmp_path / "out", tmp_path / "swapped", "--draft-vocab", 100)
    remapped = go_on(work, tmp_path / "out", tmp_path / "swapped", "--draft-vocab", 100, "--remap-vocab",
                     "--vocab-map", work / "map")
    plain = go_on(work, tmp_path / "plain", work / "reduced", "--draft-vocab", 100)
    assert remapped["start"] == plain["start"] and remapped["start"]["accept_length"] > 1.3
    assert remapped["remapped"] == {"carried": 100, "new": 0, "dropped": 0}
    assert torch.equal(load_drafter(tmp_path / "out")[1], ids)


def test_an_exchanged_id_that_never_matters_changes_nothing_when_remapped(work, tmp_path):
    with pytest.raises(UserError, match="--remap-vocab"):
        go_on(work, tmp_path / "out", work / "reduced", "--draft-vocab", 100, "--vocab-map", work / "other")
    remapped = go_on(work, tmp_path / "out", work / "reduced", "--draft-vocab", 100, "--vocab-map",
                     work / "other", "--remap-vocab")
    plain = go_on(work, tmp_path / "plain", work / "reduced", "--draft-vocab", 100)
    assert remapped["remapped"] == {"carried": 99, "new": 1, "dropped": 1}
    assert remapped["start"] == plain["start"]


def test_a_map_copied_over_a_drafters_own_is_refused(work, tmp_path):
    """Also when its rows are to be carried over: they would be taken for those of other tokens."""
    rows, _ = load_map(work / "other")
    t2d = torch.zeros(V, dtype=torch.bool).index_fill_(0, torch.from_numpy(rows), True)
    change(tmp_path / "mixed", work / "reduced",
           {"d2t": torch.from_numpy(rows) - torch.arange(100), "t2d": t2d})
    swapped = load_file(work / "reduced" / "model.safetensors")["d2t"] + torch.arange(100)
    swapped[[20, 70]] = swapped[[70, 20]]  # and its rows not
    change(tmp_path / "swapped", work / "reduced", {"d2t": swapped - torch.arange(100)})
    for name, more in (("mixed", []), ("mixed", ["--remap-vocab", "--vocab-map", work / "map"]),
                       ("swapped", ["--remap-vocab", "--vocab-map", work / "map"])):
        with pytest.raises(UserError, match="its d2t has hash .* a map was copied over"):
            go_on(work, tmp_path / "out", tmp_path / name, "--draft-vocab", 100, *more)


def test_a_plot_does_not_replace_a_manifest(work, tmp_path):
    with pytest.raises(UserError, match="is there already and is no PNG"):
        train(work, tmp_path / "out", "--draft-vocab", "full", "--plot", work / "shards" / "manifest.json")
    with pytest.raises(UserError, match="a file of its own"):
        train(work, tmp_path / "out", "--draft-vocab", "full", "--plot", tmp_path / "out")


def test_what_is_not_stated_is_not_taken_for_granted(work, tmp_path):
    """A checkpoint that names no target, and a map that states no coverage: both are used, and told."""
    change(tmp_path / "first", work / "reduced", target=None, tokenizer_sha256=None)
    summary = go_on(work, tmp_path / "out", tmp_path / "first", "--draft-vocab", 100)
    words = "does not say which target it was made for; only the sizes were compared"
    assert summary["warnings"] == [f"the checkpoint {tmp_path / 'first'} {words}"]
    rows, facts = load_map(work / "map")
    make_map(tmp_path / "map", rows, facts, coverage=None, coverage_heldout=None)
    summary = train(work, tmp_path / "fresh", "--draft-vocab", 100, "--vocab-map", tmp_path / "map",
                    "--max-steps", 1)
    assert f"the map {tmp_path / 'map'} states no coverage: nothing was compared" in summary["warnings"][0]


def test_a_checkpoint_of_another_tokenizer_is_refused_and_of_another_template_named(work, tmp_path):
    change(tmp_path / "first", work / "full", tokenizer_sha256="0" * 64, chat_template_sha256="1" * 64,
           template_kwargs={"thinking": True})
    with pytest.raises(UserError, match="checkpoint .* made for another tokenizer: hash 000000000000"):
        go_on(work, tmp_path / "out", tmp_path / "first", "--draft-vocab", "full")
    summary = go_on(work, tmp_path / "out", tmp_path / "first", "--draft-vocab", "full", "--force")
    tokenizer, template, arguments = summary["warnings"]
    assert "000000000000" in tokenizer and "another chat template: 11111111" in template
    assert "other arguments of the template: {'thinking': True} there, {} here" in arguments
    assert load_drafter(tmp_path / "out")[0].config["training"]["warnings"] == summary["warnings"]


def test_a_map_that_promised_more_is_refused(work, tmp_path):
    """From scratch the map's promise counts, from a checkpoint its own, with --remap-vocab the map's
    again."""
    _, facts = load_map(work / "maps" / "60")
    counted, _ = Shards(work / "shards").supervised_counts()
    few = np.argsort(-counted)[10:40]
    make_map(tmp_path / "poor", few, facts, coverage=0.9, coverage_heldout=0.9, chat_template_sha256="2" * 64)
    poor = ("--draft-vocab", 30, "--vocab-map", tmp_path / "poor")
    with pytest.raises(UserError, match="the map .*poor covers .* and promised 90.00%"):
        train(work, tmp_path / "out", *poor)
    with pytest.raises(UserError, match="the map .*poor covers .* and promised 90.00%"):
        go_on(work, tmp_path / "out", work / "full", *poor, "--remap-vocab")
    assert not (tmp_path / "out").exists()
    summary = train(work, tmp_path / "out", *poor, "--max-steps", 1, "--force")
    assert "another chat template: 22222222" in summary["warnings"][0]
    assert "promised 90.00%" in summary["warnings"][1]
    change(tmp_path / "first", tmp_path / "out", coverage=0.95, coverage_heldout=None)
    with pytest.raises(UserError, match="the draft vocabulary of .*first covers .* and promised 95.00%"):
        go_on(work, tmp_path / "again", tmp_path / "first", "--draft-vocab", 30)


@pytest.fixture(scope="module")
def foreign(work, tmp_path_factory):
    """A drafter with its lm_head rows shuffled: it fits by every hash and size, and means other tokens."""
    weight = load_file(work / "full" / "model.safetensors")["lm_head.weight"]
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    return change(tmp_path_factory.mktemp("foreign") / "drafter", work / "full",
                  {"lm_head.weight": weight[order]})


def test_a_checkpoint_for_another_model_is_called_out_at_once(work, tmp_path, foreign, monkeypatch):
    words = (r"starts at an accept length of 1\.\d+ on 6 samples here \(best constant guess 1\.\d+\), a "
             r"fresh "
             r"drafter reaches 1\.\d+ after 32 steps: it was made for another model, .* \(--init scratch\), "
             r"or "
             r"--force")
    with pytest.raises(UserError, match=words):
        go_on(work, tmp_path / "out", foreign, "--draft-vocab", "full")
    assert not (tmp_path / "out").exists()
    arguments = ("--draft-vocab", "full", "--force", "--save-every", 1)
    summary = go_on(work, tmp_path / "out", foreign, *arguments)
    assert "it was made for another model" in summary["warnings"][-1]
    assert summary["start"]["warning"] == summary["warnings"][-1]
    assert summary["start"]["accept_length"] - 1 < (summary["start"]["fresh"] - 1) / 2
    config = load_drafter(tmp_path / "out")[0].config
    assert config["training"]["start"] == summary["start"]
    assert config["training"]["warnings"] == summary["warnings"]
    monkeypatch.setattr(train_drafter, "probe", None)  # a run that is gone on with knows it
    assert go_on(work, tmp_path / "out", foreign, *arguments, "--resume")["start"] == summary["start"]


def test_a_good_checkpoint_goes_on_and_its_figure_is_the_first_measurement(work, tmp_path, capsys):
    summary = go_on(work, tmp_path / "out", work / "full", "--draft-vocab", "full")
    first = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and first["accept_length"] == summary["start"]["accept_length"]
    assert summary["start"]["warning"] is None and summary["warnings"] == []
    length, samples = first["accept_length"], summary["start"]["samples"]
    words = f"starts at an accept length of {length:.3f} on {samples} samples here (best"
    assert words in capsys.readouterr().err


def test_every_process_of_a_run_comes_to_the_same_verdict(work, tmp_path, foreign, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    arguments = ("--shards", work / "shards", "--target", work / "target", "--draft-vocab", "full", "--init",
                 "checkpoint", "--checkpoint",
                 foreign, "--max-steps", 1)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    code, two, stderr = shell("train_drafter", *arguments, "--out", tmp_path / "two", "--force",
                              launcher=launcher)
    assert code == 0 and two["processes"] == 2, stderr[-2000:]
    one = call("train_drafter", *arguments, "--out", tmp_path / "one", "--force")
    assert {**two["start"], "fresh": 0, "warning": ""} == {**one["start"], "fresh": 0, "warning": ""}
    assert two["start"]["fresh"] == pytest.approx(one["start"]["fresh"], abs=0.1)  # of other roundings


def test_a_barely_trained_checkpoint_is_let_pass_with_a_warning(work, tmp_path):
    """Better than nothing and worse than a fresh one: the user decides."""
    weak = load_file(work / "full" / "model.safetensors")["fc.weight"].float()
    for share in range(1, 20):
        noise = torch.randn(weak.shape, generator=torch.Generator().manual_seed(0)) * weak.std() * share * 0.2
        folder = change(tmp_path / f"weak-{share}", work / "full", {"fc.weight": (weak + noise).bfloat16()})
        summary = go_on(work, tmp_path / f"out-{share}", folder, "--draft-vocab", "full", "--force")
        if summary["start"]["fresh"] and summary["start"]["accept_length"] < summary["start"]["fresh"]:
            break
    assert "it is of little use here; --init scratch may well be better" in summary["warnings"][0]
    # without --force
    assert go_on(work, tmp_path / "out", folder, "--draft-vocab", "full")["start"] == summary["start"]


def test_without_held_out_samples_a_checkpoint_is_measured_on_some_to_train_on(work, tmp_path, foreign):
    call("extract_hidden_states", *EXACT, "--target", work / "target", "--data", work / "rows.jsonl",
         "--out", tmp_path / "shards", "--regenerate",
         "--max-new-tokens", 24, "--dtype", "float32", "--heldout", 0)
    with pytest.raises(UserError, match="it was made for another model"):
        go_on(work, tmp_path / "out", foreign, "--draft-vocab", "full", "--shards", tmp_path / "shards")
    summary = go_on(work, tmp_path / "out", work / "full", "--draft-vocab", "full", "--shards",
                    tmp_path / "shards")
    # half of 24: the others are for the fresh one
    assert summary["start"]["samples"] == 12 and summary["accept_length"] is None


def test_the_constant_guess_by_hand(work):
    """The best of all constants, by a walk over every answer that knows nothing of rows and depths."""
    shards = Shards(work / "shards")
    samples = np.arange(len(shards.index))
    found = constant_guess(shards, samples, 3).sum(0)
    totals = {}
    parts = [shards.sample(int(number), ("input_ids", "loss_mask", "target_argmax")) for number in samples]
    common = torch.cat([part["target_argmax"][:-1][part["loss_mask"][1:] == 1] for part in parts]).tolist()
    for token in set(common):
        starts = accepted = 0
        for part in parts:
            answer = part["loss_mask"].nonzero()[:, 0].tolist()
            # prefill gives the first
            choices = [int(part["target_argmax"][position - 1]) for position in answer][1:]
            while choices:
                starts += 1
                hits = next((i for i, choice in enumerate(choices[:3]) if choice != token), len(choices[:3]))
                accepted += hits
                choices = choices[hits + 1 :]
        totals[token] = starts, accepted
    best = max(set(common), key=common.count)
    assert (int(found[0, 0]), int(found[1].sum())) == totals[best]


def test_the_scatter_of_a_difference_is_that_of_drawing_samples_again():
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(5, 60, (2, 40), generator=generator)
    parts = []
    for row, rate in zip(starts, (0.5, 0.3), strict=True):
        noise = torch.randn(40, generator=generator) * row.sqrt()
        accepted = (row * rate + noise).round().clamp(min=0).long()
        parts.append(torch.stack([torch.stack([row, accepted]), torch.zeros(2, 40, dtype=torch.int64)],
                                 dim=2).permute(1, 0, 2))
    differences = []
    for _ in range(2000):
        drawn = torch.randint(0, 40, (40,), generator=generator)
        a, b = (part[drawn, 1].sum().item() / part[drawn, 0, 0].sum().item() for part in parts)
        differences.append(a - b)
    assert scatter(*parts) == pytest.approx(np.std(differences), rel=0.15)
    assert scatter(parts[0], parts[0]) == 0.0


def test_remap_counts(work):
    drafter, rows = load_drafter(work / "reduced")
    counts = remap(drafter, rows, None, open_target(work / "target").lm_head())
    assert counts == {"carried": 100, "new": 228, "dropped": 0}
    assert drafter.lm_head(torch.zeros(1, 64)).shape == (1, V)


@pytest.mark.parametrize("scale", ["block", "row", "tensor", "none", "packed"])
def test_quantised_weights_are_multiplied_by_their_scale_or_left(scale):
    """Blocks of 128 x 128 whose last ones are cut, as of DeepSeek's 576 rows."""
    torch.manual_seed(0)
    weight = torch.randn(200, 130)
    steps = {"block": torch.rand(2, 2) + 0.5, "row": torch.rand(200, 1) + 0.5, "tensor": torch.rand(1) + 0.5}
    whole = steps.get(scale, torch.ones(1))
    if scale == "block":
        whole = torch.stack([torch.stack([steps["block"][i // 128, j // 128] for j in range(130)])
                             for i in range(200)])
    tensors = {"w": (weight / whole).to(torch.float8_e4m3fn), "w_scale_inv": steps.get(scale)}
    if scale == "packed":
        tensors = {"w": torch.zeros(200, 65, dtype=torch.uint8), "w_scale": torch.ones(1)}
    names = {name for name, tensor in tensors.items() if tensor is not None}
    target = SimpleNamespace(weights=names, tensor=tensors.get, quantisation={})
    found = plain_weight(target, "w")
    if scale in ("none", "packed"):
        assert found is None
    else:
        torch.testing.assert_close(found, tensors["w"].float() * whole)
        assert ((found - weight).abs() <= weight.abs() / 15 + 0.01).all()  # three bits of mantissa


@pytest.mark.parametrize("kind, config, adds", [
    ("Gemma2ForCausalLM", "Gemma2Config", True), ("Gemma3ForCausalLM", "Gemma3TextConfig", True),
    ("Qwen3NextForCausalLM", "Qwen3NextConfig", True), ("LlamaForCausalLM", "LlamaConfig", False),
    ("Gemma4ForCausalLM", "Gemma4TextConfig", False), ("CohereForCausalLM", "CohereConfig", False),
    ("DeepseekV3ForCausalLM", "DeepseekV3Config", False), ("OfNoClass", "MistralConfig", False)])
def test_whether_norms_add_one_is_what_the_models_own_norm_does(tmp_path, kind, config, adds):
    shape = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
                 num_hidden_layers=4, vocab_size=128, head_dim=16, pad_token_id=0)
    getattr(transformers, config)(**shape).save_pretrained(tmp_path)
    target = SimpleNamespace(folder=tmp_path, model_class=kind, hidden_size=64)
    assert norms_add_one(target, False) == adds
