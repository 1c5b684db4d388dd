"""train_drafter.py as a whole: overfitting, resuming, processes, and what it refuses."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from common.cli import UserError
from common.drafter import load_drafter
from common.files import read_sealed, write_sealed
from common.target import open_target
from common.target_model import TargetModel
from tests import tiny
from tests.scripts import EXACT, call, make_work, shell
from train_drafter import LAYER_FLAGS, lock_run, start_from_scratch

FAST = ("--ttt-steps", 2, "--lr", 3e-3, "--batch-tokens", 200, "--epochs", 2)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target, shards of its own answers, and a map of 100 ids."""
    return make_work(tmp_path_factory.mktemp("train"), 24, 24, 100)


def train(work, out, *more):
    return call("train_drafter", "--shards", work / "shards", "--target", work / "target", "--out", out,
                *more)


def test_overfitting_one_conversation_accepts_everything(tmp_path):
    """Served, too: accept length = steps + 1 exactly, in both vocabularies, with no round cut short (1 + 10 *
    4 tokens)."""
    # 26 different tokens, and no near tie among its choices
    target = tiny.make_target(tmp_path / "target", seed=3)
    prompt = [{"messages": [{"role": "user", "content": "Count the apples of Ann."}]}]
    tiny.write_rows(tmp_path / "rows.jsonl", prompt)
    call("extract_hidden_states", *EXACT, "--target", target, "--data", tmp_path / "rows.jsonl",
         "--out", tmp_path / "shards", "--regenerate",
         "--max-new-tokens", 41, "--dtype", "float32", "--heldout", 0)
    call("build_vocab_map", "--shards", tmp_path / "shards", "--draft-vocab", 80, "--out", tmp_path / "map")
    for name, choice in (("full", ["full"]), ("reduced", [80, "--vocab-map", tmp_path / "map"])):
        out = tmp_path / name
        summary = call("train_drafter", "--shards", tmp_path / "shards", "--target", target, "--out", out,
                       "--draft-vocab", *choice,
                       "--eval-shards", tmp_path / "shards", "--ttt-steps", 3, "--epochs", 150, "--lr", 1e-2,
                       "--eval-every", 50)
        assert summary["accept_length"] == 4.0 and summary["acceptance"] == [1.0, 1.0, 1.0]
        found, code = call("eval_speculative", "--target", target, "--drafter", out, "--prompts",
                           tmp_path / "rows.jsonl", "--steps", 3,
                           "--max-new-tokens", 41, "--dtype", "float32")
        assert code == 0 and found["drafters"][0]["accept_length"] == 4.0
        assert found["drafters"][0]["identical"] == 1


def test_summary_files_and_what_is_frozen(work, tmp_path):
    code, summary, stderr = shell("train_drafter", "--shards", work / "shards", "--target", work / "target",
                                  "--out", tmp_path / "out",
                                  "--draft-vocab", 100, "--vocab-map", work / "map", *FAST)
    assert code == 0, stderr
    assert {"steps", "epochs", "tokens", "loss", "accept_length", "acceptance", "best_step",
            "trainable_params", "draft_vocab", "init",
            "tokens_per_second", "out"} <= summary.keys()
    drafter, rows = load_drafter(tmp_path / "out")
    # no embedding, no target
    assert summary["trainable_params"] == sum(parameter.numel() for parameter in drafter.parameters())
    assert len(rows) == drafter.config["draft_vocab_size"] == 100
    head = open_target(work / "target").lm_head()[rows].float()
    # trained, in a drafter whose config does not tie it
    assert (drafter.lm_head.weight - head).abs().max() > 1e-3
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "embed_tokens.weight" not in tensors and not drafter.config["tie_word_embeddings"]
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "lr" in record]
    assert [record["step"] for record in steps] == list(range(1, summary["steps"] + 1))
    lengths = [record["accept_length"] for record in records if "heldout" in record]
    assert max(lengths) == summary["accept_length"]
    assert "covers" in stderr and "Traceback" not in stderr


def test_resume_goes_on_bit_for_bit(work, tmp_path):
    """Stopped after the third checkpoint and resumed equals straight through: weights, moments, metrics,
    best."""
    arguments = ("--draft-vocab", "full", *FAST, "--save-every", 1, "--eval-every", 2, "--keep", 100)
    straight = train(work, tmp_path / "straight", *arguments)
    shutil.copytree(tmp_path / "straight", tmp_path / "again")
    for folder in sorted((tmp_path / "again" / "checkpoints").iterdir())[3:]:
        shutil.rmtree(folder)
    resumed = train(work, tmp_path / "again", *arguments, "--resume")
    for name in ("steps", "loss", "accept_length", "best_step", "tokens"):
        assert resumed[name] == straight[name]
    last = sorted((tmp_path / "again" / "checkpoints").iterdir())[-1].name
    for file in ("model.safetensors", "state/weights.safetensors", "state/optimizer.safetensors"):
        ours = load_file(tmp_path / "again" / "checkpoints" / last / file)
        theirs = load_file(tmp_path / "straight" / "checkpoints" / last / file)
        assert ours.keys() == theirs.keys(), file
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file

    def records(out):
        timed = ("tokens_per_second", "waiting", "seconds_left")
        return [{key: value for key, value in json.loads(line).items() if key not in timed}
                for line in (out / "metrics.jsonl").read_text().splitlines()]

    assert records(tmp_path / "again") == records(tmp_path / "straight")
    with pytest.raises(UserError, match=r"lr is 0.1 now and was 0.003"):
        train(work, tmp_path / "again", *arguments, "--resume", "--lr", 0.1)
    with pytest.raises(UserError, match="holds an earlier run"):
        train(work, tmp_path / "again", *arguments)


def test_resume_refuses_other_shards_of_the_same_data(work, tmp_path):
    call("extract_hidden_states", *EXACT, "--target", work / "target", "--data", work / "rows.jsonl",
         "--out", tmp_path / "shards", "--regenerate",
         "--max-new-tokens", 24, "--dtype", "float32", "--heldout", 0.4)
    train(work, tmp_path / "out", "--draft-vocab", "full", *FAST, "--max-steps", 2)
    with pytest.raises(UserError, match="shards_sha256"):
        train(work, tmp_path / "out", "--draft-vocab", "full", *FAST, "--max-steps", 2, "--resume",
              "--shards", tmp_path / "shards")
    with pytest.raises(UserError, match="eval_shards_sha256"):
        train(work, tmp_path / "out", "--draft-vocab", "full", *FAST, "--max-steps", 2, "--resume",
              "--eval-shards", work / "shards")


def test_resume_falls_back_to_the_last_whole_checkpoint(work, tmp_path):
    arguments = ("--draft-vocab", "full", *FAST, "--save-every", 2, "--keep", 9)
    straight = train(work, tmp_path / "out", *arguments)
    last, before = sorted((tmp_path / "out" / "checkpoints").iterdir())[:-3:-1]
    (last / "state" / "optimizer.safetensors").write_bytes(b"cut")
    (before / "state" / "progress.json").unlink()
    (tmp_path / "out" / "checkpoints" / ".step-000099.tmp-123").mkdir()  # left by a killed save
    (tmp_path / "out" / ".tmpFANZsD").write_text("")  # left by safetensors in a killed save
    with open(tmp_path / "out" / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    resumed = train(work, tmp_path / "out", *arguments, "--resume")
    assert resumed["steps"] == straight["steps"] and resumed["loss"] == straight["loss"]
    assert not (tmp_path / "out" / "checkpoints" / ".step-000099.tmp-123").exists()
    assert not (tmp_path / "out" / ".tmpFANZsD").exists()


def test_one_process_trains_into_a_folder_at_a_time(tmp_path):
    with lock_run(tmp_path), pytest.raises(UserError, match="being trained by another process"):
        lock_run(tmp_path)


def test_another_tokenizer_is_refused_and_forced_shards_are_named(work, tmp_path):
    shutil.copytree(work / "target", tmp_path / "target")
    text = (tmp_path / "target" / "tokenizer.json").read_text()
    (tmp_path / "target" / "tokenizer.json").write_text(text + " ")
    with pytest.raises(UserError, match="was made for another tokenizer: hash"):
        train(work, tmp_path / "out", "--draft-vocab", "full", *FAST, "--target", tmp_path / "target")
    summary = train(work, tmp_path / "out", "--draft-vocab", "full", *FAST, "--max-steps", 1, "--target",
                    tmp_path / "target", "--force")
    assert "tokenizer" in summary["warnings"][0]
    shutil.copytree(work / "shards", tmp_path / "shards")
    manifest = read_sealed(work / "shards" / "manifest.json")
    write_sealed(tmp_path / "shards" / "manifest.json", {**manifest, "forced": ["target tensors_sha256"]})
    summary = train(work, tmp_path / "other", "--draft-vocab", "full", *FAST, "--max-steps", 1, "--shards",
                    tmp_path / "shards")
    assert "target tensors_sha256" in summary["warnings"][0]


def adamw_alone(parameters, lr, muon_lr):
    """make_optimizers without muon, which rounds products of its own to bfloat16 and so hides small
    differences."""
    groups = [{"params": list(parameters.values()), "initial_lr": lr}]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def logged(out, key="loss"):
    """That of every step."""
    return [json.loads(line)[key] for line in (out / "metrics.jsonl").read_text().splitlines()
            if "heldout" not in line]


@pytest.mark.parametrize("optimizer, tolerance", [("adamw", 1e-4), ("muon", 2e-3)])
def test_accumulation_changes_only_rounding(work, tmp_path, monkeypatch, optimizer, tolerance):
    if optimizer == "adamw":
        monkeypatch.setattr("train_drafter.make_optimizers", adamw_alone)
    arguments = ("--draft-vocab", "full", *FAST)
    train(work, tmp_path / "a", *arguments)
    train(work, tmp_path / "b", *arguments, "--gradient-accumulation-steps", 3)
    assert logged(tmp_path / "a") == pytest.approx(logged(tmp_path / "b"), rel=tolerance)


def test_two_processes_train_as_one(work, tmp_path, monkeypatch):
    """On gloo; batches of one long sample leave a process with nothing to learn from."""
    arguments = ("--shards", work / "shards", "--target", work / "target", "--draft-vocab", "full",
                 "--ttt-steps", 2, "--lr", 3e-3,
                 "--batch-tokens", 60, "--epochs", 1, "--max-steps", 6)
    one = call("train_drafter", "--out", tmp_path / "one", *arguments)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    code, two, stderr = shell("train_drafter", "--out", tmp_path / "two", *arguments, launcher=launcher)
    assert code == 0, stderr[-2000:]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert logged(tmp_path / "one") == pytest.approx(logged(tmp_path / "two"), rel=1e-4)
    # before clipping, which would hide a wrong scale
    norms = [logged(tmp_path / name, "grad_norm") for name in ("one", "two")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert one["accept_length"] == two["accept_length"] and one["tokens"] == two["tokens"]


def test_checkpoint_starts_from_its_weights_and_its_own_map(work, tmp_path):
    train(work, tmp_path / "first", "--draft-vocab", 100, "--vocab-map", work / "map", *FAST, "--epochs", 12)
    summary = train(work, tmp_path / "second", "--draft-vocab", 100, "--init", "checkpoint", "--checkpoint",
                    tmp_path / "first", *FAST,
                    "--lr", 1e-9, "--muon-lr", 1e-9, "--max-steps", 1)
    assert summary["init"] == "checkpoint"
    before, rows = load_drafter(tmp_path / "first")
    after, same_rows = load_drafter(tmp_path / "second")
    assert torch.equal(rows, same_rows)
    pairs = zip(before.state_dict().values(), after.state_dict().values(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_a_checkpoint_that_no_step_improves_is_what_comes_out(work, tmp_path):
    train(work, tmp_path / "first", "--draft-vocab", "full", *FAST, "--epochs", 12)
    summary = train(work, tmp_path / "second", "--draft-vocab", "full", "--init", "checkpoint",
                    "--checkpoint", tmp_path / "first",
                    "--ttt-steps", 2, "--lr", 10, "--muon-lr", 10, "--max-steps", 2)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert summary["best_step"] == 0 and any("lower --lr" in warning for warning in summary["warnings"])
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("shape", [{"num_attention_heads": 8, "head_dim": 8, "num_key_value_heads": 4},
                                   {"rms_norm_eps": 0.1},
                                   {"intermediate_size": 200}])
def test_a_checkpoint_keeps_its_own_shape(work, tmp_path, shape):
    tiny.make_drafter(tmp_path / "first", open_target(str(work / "target")), **shape)
    train(work, tmp_path / "second", "--draft-vocab", "full", "--init", "checkpoint", "--checkpoint",
          tmp_path / "first", "--max-steps", 1,
          "--force")  # a random drafter is worth nothing here
    config = load_drafter(tmp_path / "second")[0].config
    assert all(config[key] == value for key, value in shape.items())


def test_a_checkpoint_for_other_layers_is_refused_by_its_config_alone(work, tmp_path):
    tiny.make_drafter(tmp_path / "first", open_target(str(work / "target")), layers=[1, 3, 6], training=False)
    with pytest.raises(UserError, match=r"was made for other layers: \[1, 3, 6\] there, \[2, 4, 5\] here"):
        train(work, tmp_path / "second", "--draft-vocab", "full", "--init", "checkpoint", "--checkpoint",
              tmp_path / "first")


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "llava_tied"])
def test_layer_starts_as_the_targets_last_one_where_that_fits(tmp_path, kind):
    target = open_target(tiny.make_target(tmp_path, kind))
    inputs = SimpleNamespace(target=target, head=target.lm_head(),
                             shards=SimpleNamespace(manifest={"layers": [2, 4, 5]}))
    args = SimpleNamespace(seed=0, trust_remote_code=False, **dict.fromkeys(LAYER_FLAGS))
    drafter = start_from_scratch(args, inputs, 328, None).drafter
    model = TargetModel(target, [2, 4, 5], "float32").decoder
    block, ours = model.layers[7], drafter.midlayer
    x = torch.randn(3, 64)
    # both halves alike: then the halved copies add up to the target's own projection
    fused = torch.cat([x, x], dim=1)
    assert torch.allclose(ours["self_attn"]["v_proj"](fused), block.self_attn.v_proj(x), atol=1e-5)
    # Gemma multiplies by 1 + w
    assert torch.allclose(ours["hidden_norm"](x), block.input_layernorm(x), atol=1e-4)
    assert torch.allclose(drafter.norm(x), model.norm(x), atol=1e-4)
    assert torch.equal(drafter.lm_head.weight, target.lm_head())
    if kind == "gemma2":
        assert torch.allclose(ours["post_attention_layernorm"](x), block.pre_feedforward_layernorm(x),
                              atol=1e-4)
    if kind == "mixtral":  # its experts fit nowhere
        assert ours["mlp"]["up_proj"].weight.std() < 0.03


@pytest.mark.parametrize(("arguments", "words"), [
    (["--draft-vocab", 100], "needs --vocab-map"),
    (["--draft-vocab", "full", "--vocab-map", "MAP"], "takes no --vocab-map"),
    (["--draft-vocab", 90, "--vocab-map", "MAP"], "has 100 rows, --draft-vocab says 90"),
    (["--draft-vocab", 0], "not in 1..328"),
    (["--draft-vocab", -1], "not in 1..328"),
    (["--draft-vocab", 329], "not in 1..328"),
    (["--draft-vocab", "half"], "neither full nor a number"),
    (["--draft-vocab", "full", "--init", "checkpoint"], "needs --checkpoint"),
    (["--draft-vocab", "full", "--init", "checkpoint", "--checkpoint", "TARGET"], "no EAGLE-3 drafter"),
    (["--draft-vocab", "full", "--shards", "nowhere"], "is no folder"),
    (["--draft-vocab", "full", "--target", "./nowhere"], "does not exist"),
    (["--draft-vocab", "full", "--target", "OTHER"], "made for another target"),
    (["--draft-vocab", "full", "--out", "TARGET"], "holds something else"),
    (["--draft-vocab", "full", "--lr", "nan"], "argument --lr: nan is no number above 0"),
    (["--draft-vocab", "full", "--ttt-steps", 129], "at least 1 and at most 128"),
    (["--draft-vocab", "full", "--muon-lr", -1], "argument --muon-lr: -1 is no number above 0"),
    (["--draft-vocab", "full", "--epochs", 0], "0 is no integer of at least 1"),
    (["--draft-vocab", "full", "--seed", -1], "argument --seed: -1 is no integer of at least 0"),
    (["--draft-vocab", "full", "--log-with", "trackio"], "not installed"),
])
def test_refused_before_anything_is_written(work, tmp_path, arguments, words):
    if "OTHER" in arguments:
        tiny.make_target(tmp_path / "other", seed=1)
    places = {"MAP": work / "map", "TARGET": work / "target", "OTHER": tmp_path / "other"}
    with pytest.raises(UserError, match=words):
        train(work, tmp_path / "out", *[places.get(argument, argument) for argument in arguments])
    assert not (tmp_path / "out").exists()


def test_a_map_for_another_target_is_refused(work, tmp_path):
    shutil.copytree(work / "map", tmp_path / "map")
    facts = read_sealed(work / "map" / "vocab_map.json")
    facts["target"]["tensors_sha256"] = "0" * 64
    write_sealed(tmp_path / "map" / "vocab_map.json", facts)
    with pytest.raises(UserError,
                       match=r"map .* made for another target: lm_head and embedding 000000000000"):
        train(work, tmp_path / "out", "--draft-vocab", 100, "--vocab-map", tmp_path / "map")


def test_dry_run_touches_nothing(work, tmp_path):
    summary = train(work, tmp_path / "out", "--draft-vocab", "full", *FAST, "--dry-run")
    assert summary["steps"] > 0 and not (tmp_path / "out").exists()


def test_the_batch_grows_with_the_data_and_the_rate_falls_with_the_width(work, tmp_path):
    def plan(*more):
        return train(work, tmp_path / "out", "--draft-vocab", "full", "--dry-run", *more)

    few, some, many = plan("--epochs", 1), plan("--epochs", 1000), plan("--epochs", 9000)
    assert few["batch_tokens"] == 512 and many["batch_tokens"] == 8192 and 512 < some["batch_tokens"] < 8192
    width = json.loads((work / "target" / "config.json").read_text())["hidden_size"]
    assert few["lr"] == pytest.approx(0.3 / width, rel=0.05)
    assert plan("--lr", 1e-5, "--batch-tokens", 9)["lr"] == 1e-5
