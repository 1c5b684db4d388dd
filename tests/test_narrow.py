"""A drafter narrower than its target: its start, training, export, and what reads it again."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from common.cli import UserError
from common.drafter import Drafter, drafter_config, load_drafter
from common.target import open_target
from tests import tiny
from tests.scripts import call
from train_drafter import nearest_map, project


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target's shards, and two narrow drafters: `full` with all rows, and `reduced` with 100."""
    work = tmp_path_factory.mktemp("narrow")
    tiny.make_target(work / "target", "qwen3")
    rows = tiny.write_rows(work / "rows.jsonl", tiny.conversations(24))
    call("extract_hidden_states", "--target", work / "target", "--data", rows, "--out", work / "shards",
         "--dtype", "float32", "--heldout", 0.25)
    call("build_vocab_map", "--shards", work / "shards", "--draft-vocab", 100, "--out", work / "map")
    train(work, "full", "--draft-vocab", "full")
    train(work, "reduced", "--draft-vocab", 100, "--vocab-map", work / "map")
    return work


def train(work, out, *arguments, width=32):
    narrow = ["--hidden-size", width] if width else []
    return call("train_drafter", "--shards", work / "shards", "--target", work / "target",
                "--out", work / out, *narrow, "--epochs", 20, "--batch-tokens", 200, *arguments)


@pytest.mark.parametrize("name", ["full", "reduced"])
def test_the_folder_is_what_the_engines_load(work, name):
    """Its own embedding and everything else at its width, fc from the target's."""
    config = json.loads((work / name / "config.json").read_text())
    tensors = load_file(work / name / "model.safetensors")
    assert (config["hidden_size"], config["target_hidden_size"]) == (32, 64)
    assert tensors["embed_tokens.weight"].shape == (328, 32)
    assert tensors["fc.weight"].shape == (32, 3 * 64)
    assert tensors["lm_head.weight"].shape == (328 if name == "full" else 100, 32)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (4 * 32, 2 * 32)


def test_its_embedding_is_kept_and_is_not_the_targets(work):
    """One epoch more leaves it as it was, bit by bit; what is loaded is what was exported."""
    train(work, "longer", "--draft-vocab", "full", "--max-steps", 25)
    table = load_file(work / "full" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(load_file(work / "longer" / "model.safetensors")["embed_tokens.weight"], table)
    drafter, _ = load_drafter(work / "full")
    assert torch.equal(drafter.table(open_target(work / "target").embedding()), table.float())


def test_all_scripts_take_them(work):
    """Answers drafted by a narrow drafter are the plain ones, and some drafts of it are right; pruned, it
    keeps its embedding."""
    call("build_vocab_map", "--shards", work / "shards", "--draft-vocab", 100, "--prune", work / "full",
         "--out", work / "cut")
    folders = [work / "full", work / "reduced", work / "cut"]
    summary, code = call("eval_speculative", "--target", work / "target",
                         *(word for folder in folders for word in ("--drafter", folder)),
                         "--prompts", work / "rows.jsonl", "--limit", 6, "--dtype", "float32",
                         "--shards", work / "shards", "--max-new-tokens", 24)
    assert code == 0
    for entry in summary["drafters"]:
        assert entry["identical"] == summary["prompts"] == 6
        assert entry["simulated_accept_length"] > 1
    whole, cut = (load_file(folder / "model.safetensors") for folder in (work / "full", work / "cut"))
    assert torch.equal(whole["embed_tokens.weight"], cut["embed_tokens.weight"])


def test_going_on_from_one(work):
    """From a checkpoint the width is the checkpoint's; new rows come from its own ones."""
    start = ("--init", "checkpoint", "--checkpoint", work / "reduced", "--max-steps", 2, "--force")
    train(work, "again", "--draft-vocab", 100, *start, width=None)
    train(work, "remapped", "--draft-vocab", "full", "--remap-vocab", *start, width=None)
    for name, rows in (("again", 100), ("remapped", 328)):
        drafter, _ = load_drafter(work / name)
        assert drafter.lm_head.weight.shape == (rows, 32)


def test_resumed_exactly(work):
    """Cut off after five steps and resumed, the weights are those of the whole run."""
    train(work, "whole", "--draft-vocab", "full", "--max-steps", 8, "--save-every", 5)
    train(work, "half", "--draft-vocab", "full", "--max-steps", 8, "--save-every", 5)
    for folder in (work / "half" / "checkpoints").glob("step-000008"):
        folder.rename(work / "taken-away")
    train(work, "half", "--draft-vocab", "full", "--max-steps", 8, "--save-every", 5, "--resume")
    whole, half = (load_file(work / name / "checkpoints" / "step-000008" / "state" / "weights.safetensors")
                   for name in ("whole", "half"))
    assert whole.keys() == half.keys()
    assert all(torch.equal(whole[name], half[name]) for name in whole)


def test_folded_and_turned_it_is_the_same_model(work):
    """By an orthogonal matrix as large as the target nothing is lost: norms folded into the weights, states
    turned, the logits are those of the layer as it was. In float64."""
    target = open_target(work / "target")
    torch.manual_seed(0)
    config = drafter_config(target, target.vocab_size, [2, 4, 5])
    plain, turned = Drafter(config).double(), Drafter(config).double()
    for name, parameter in plain.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    directions, _ = torch.linalg.qr(torch.randn(64, 64))
    found = {name.removesuffix(".weight"): parameter.detach().float()
             for name, parameter in plain.named_parameters() if "hidden_norm" not in name}
    joined = {name: found[name] for name in found if name.endswith(("q_proj", "k_proj", "v_proj"))}
    found |= {name: 2 * tensor[:, :64] for name, tensor in joined.items()}  # both halves are the same here
    with torch.no_grad():
        plain.midlayer["hidden_norm"].weight.copy_(plain.midlayer["input_layernorm"].weight)
        for name, tensor in joined.items():
            dict(plain.named_parameters())[f"{name}.weight"].copy_(tensor[:, :64].repeat(1, 2))
    fc = found.pop("fc")
    project(found, directions)
    found["fc"] = directions.T @ fc
    for name, tensor in found.items():
        weight = torch.cat([tensor, tensor], 1) / 2 if name in joined else tensor
        dict(turned.named_parameters())[f"{name}.weight"].data.copy_(weight)
    embedding, states = torch.randn(5, 64).double(), torch.randn(5, 192).double()
    wanted, got = (logits(*one) for one in ((plain, embedding, states),
                                            (turned, embedding @ directions.double(), states)))
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()


def logits(drafter, embedded, states):
    """Of each row alone: attention to itself is its value."""
    hidden = F.linear(states, drafter.fc.weight)
    _, values = drafter.keys_values(drafter.fuse(embedded, hidden), torch.arange(5))
    attended = values.repeat_interleave(drafter.heads // drafter.kv_heads, 1).flatten(1)
    return drafter.lm_head(drafter.norm(drafter.finish_layer(hidden, attended)))


def test_the_nearest_map_is_found():
    """Of rows that a matrix made, that matrix, but for the weight decay."""
    torch.manual_seed(0)
    rows, matrix = torch.randn(200, 16), torch.randn(16, 4)
    assert (nearest_map(rows, rows @ matrix) - matrix).abs().max() < 1e-3


@pytest.mark.parametrize("width, wanted", [(65, "wider than its target"), (0, "0")])
def test_a_width_that_cannot_be(work, width, wanted):
    with pytest.raises((UserError, SystemExit)) as caught:
        train(work, f"refused-{width}", "--draft-vocab", "full", "--hidden-size", width, width=None)
    assert isinstance(caught.value, SystemExit) or wanted in str(caught.value)


def test_a_checkpoint_has_its_own_width(work):
    with pytest.raises(UserError, match="--hidden-size"):
        train(work, "refused", "--draft-vocab", 100, "--init", "checkpoint", "--checkpoint", work / "reduced")
