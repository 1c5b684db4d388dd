"""Plans from config.json alone: what they say against what is really built, written and kept."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from common.cli import UserError
from common.drafter import Drafter, drafter_config
from common.loss import CompactTeacher, TrainStep
from common.plan import serving_size, weight_bits
from common.target import open_target, stated_quantisation
from common.ttt import make_batch
from tests import tiny
from tests.scripts import call
from train_drafter import make_optimizers, step_memory

TEXT = {
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
    "vocab_size": 163840, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                     "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0},
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
    "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "group_size": 32}}}},
}
KIMI = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": TEXT,
        "vision_config": {"model_type": "kimi_k25_vision"}}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target, the same without its weights, and rows."""
    folder = tmp_path_factory.mktemp("plan")
    tiny.make_target(folder / "target")
    shutil.copytree(folder / "target", folder / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    tiny.write_rows(folder / "rows.jsonl", tiny.conversations(24))
    return folder


def plan(target, *more):
    return call("train_drafter", "--target", target, "--dry-run", *more)


def test_a_plan_counts_what_is_really_built(work):
    told = plan(work / "bare", "--draft-vocab", 100, "--tokens", 90000, "--tokens-per-second", 50)
    target = open_target(work / "target")
    assert told["hours"] == 2 * 90000 / 50 / 3600 and told["steps"] == -(-180000 // told["batch_tokens"])
    assert set(told["sizes"]) == {"100", "328"} and told["draft_vocab"] == 100
    for rows, said in told["sizes"].items():
        built = {name: part.numel() for name, part in
                 Drafter(drafter_config(target, int(rows), [2, 4, 5])).named_parameters()}
        assert said["fc"] == built.pop("fc.weight") and said["lm_head"] == built.pop("lm_head.weight")
        assert said["layer"] == sum(built.values())
        assert said["embedding"] == load_file(work / "target" / "model.safetensors")[
            target.embedding_name].numel()


def test_a_plan_is_within_20_lines_and_names_the_commands(work, capfd):
    told = plan(work / "bare", "--draft-vocab", 100, "--tokens", 90000, "--ttt-steps", 2)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 200 and lines[-3:] == told["commands"]
    assert "--out shards" in told["commands"][0] and "--tp" not in told["commands"][0]
    assert "--draft-vocab 100 --out map" in told["commands"][1]
    given = f"--target {work / 'bare'} --draft-vocab 100 --ttt-steps 2"
    assert told["commands"][2] == ("accelerate launch train_drafter.py --shards shards --out drafter "
                                   f"{given} --vocab-map map")
    crowded = plan(work / "bare", "--draft-vocab", "full", "--tokens", 90000, "--gpu-gb=0.001", "--out", "x")
    assert len(crowded["commands"]) == 2 and "--tp 2" in crowded["commands"][0]  # 1.1 MB of weights
    assert "--use_fsdp" in crowded["commands"][1] and "--gpu-gb" not in crowded["commands"][1]
    assert crowded["commands"][1].endswith(f"--target {work / 'bare'} --draft-vocab full")


@pytest.mark.parametrize("flags", [("fp8", "compact"), ("bf16", "compact"), ("fp8", "states"),
                                   ("bf16", "states")])
def test_the_bytes_of_a_bare_folder_are_those_written_with_its_weights(work, tmp_path, flags):
    def extract(target, *more):
        return call("extract_hidden_states", "--target", work / target, "--data", work / "rows.jsonl",
                    "--store", flags[0], "--teacher", flags[1], *more)

    told = extract("bare", "--dry-run", "--tokens-per-second", 7)
    extract("target", "--out", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "shard-00000.safetensors")
    # beside what is told are the bounds and numbers of the samples
    of_samples = ("cu_seqlens", "sample_ids", "turn_ids", "source_ids", "heldout")
    written = sum(tensor.nbytes for name, tensor in tensors.items() if name not in of_samples)
    assert told["bytes"] == told["bytes_by_storage"][", ".join(flags)] == written
    assert told["hours"] == len(tensors["input_ids"]) / 7 / 3600
    assert told["bytes_by_storage"]["plain, 4 H in bf16"] == 4 * 64 * 2 * len(tensors["input_ids"])
    assert "--model-path" in told["server_command"] and "--tp" not in told["server_command"]


def test_kimi_k25_from_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    told = plan(tmp_path, "--draft-vocab", "full", "--tokens", 17300000)
    small, full = told["sizes"]["32000"], told["sizes"]["163840"]
    assert small["lm_head"] == 32000 * 7168 and full["lm_head"] == full["embedding"] == 163840 * 7168
    assert small["fc"] == full["fc"] == 3 * 7168 * 7168 and small["layer"] == full["layer"]
    assert round(told["bytes"]["plain, 4 H in bf16"] / 2**30) == 924
    assert told["bytes"]["fp8, compact"] / told["bytes"]["plain, 4 H in bf16"] < 0.39
    # experts of three matrices, 384 + 1 of them in 60 layers, are all but a hundredth of 1.03e12
    parameters, size, gpus = serving_size(open_target(tmp_path, config_only=True), 80)
    assert 0.98 < 60 * 385 * 3 * 7168 * 2048 / parameters < 1 and size == int(parameters * 4.5 / 8)
    assert gpus == 16 and "--tp 16" in told["commands"][0]
    assert serving_size(open_target(tmp_path, config_only=True), 141)[2] == 8


@pytest.mark.parametrize(("stated", "bits"), [
    ({}, 16), ({"dtype": "float32"}, 32), ({"quantization_config": {"quant_method": "fp8"}}, 8),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, 4.125),
    ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": -1}}, 4),
    ({"quantization_config": {"quant_method": "of tomorrow"}}, None),
])
def test_bits_of_a_weight(stated, bits):
    nested = stated_quantisation({"text_config": stated}, stated)
    assert weight_bits(stated_quantisation(stated, stated), stated) == weight_bits(nested, stated) == bits


@pytest.mark.parametrize("kind", ["llama", "heads"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_is_what_is_really_held(work, kind, frozen, recompute):
    """Weights, gradients and moments to the byte; what is kept of the tokens to a tenth."""
    torch.manual_seed(0)
    target = open_target(work / "target")
    config = drafter_config(target, 100, [2, 4, 5])
    if kind == "heads":
        config["num_key_value_heads"] = config["num_attention_heads"]
    drafter, length = Drafter(config), 160
    drafter.recompute = recompute
    drafter.lm_head.weight.requires_grad_(not frozen)
    sample = {"input_ids": torch.randint(0, 328, (length,)), "loss_mask": torch.ones(length),
              "target_argmax": torch.randint(0, 100, (length,)),
              "aux_hidden_states": torch.randn(length, 3 * 64).bfloat16(),
              "teacher_ids": torch.randint(0, 100, (length, 64), dtype=torch.int32),
              "teacher_logprobs": torch.randn(length, 64).half()}
    rows, kept = torch.arange(100), {}
    teacher = CompactTeacher(328, rows, "cpu", torch.float32)
    step = TrainStep(drafter, target.embedding(), teacher, 3, 0.8)
    batch = make_batch([sample])

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step(batch, 1.0)[0]
    own = {part.data_ptr() for part in drafter.parameters()}
    activations = sum(size for place, size in kept.items() if place not in own)
    attention, mlp = drafter.midlayer["self_attn"], drafter.midlayer["mlp"]
    activations -= sum(part.weight.nbytes for part in (attention["q_proj"], attention["k_proj"],
                       attention["v_proj"], mlp["gate_proj"], mlp["up_proj"]))  # joined, of no token
    activations += 2 * 3 * 64 * 4 * length  # normed, and their gradient, which HeadLoss keeps by itself
    activations += sum(buffer.nbytes for buffer in teacher.buffer.kept.values())
    activations += 2 * sum(part.nbytes for part in batch.values() if torch.is_tensor(part))  # and the next
    loss.backward()
    parameters = {name: part for name, part in drafter.named_parameters() if part.requires_grad}
    held = sum(part.nbytes for part in [*drafter.parameters(), *parameters.values()])
    for optimizer in make_optimizers(parameters, 1e-3, 1e-3):
        optimizer.step()
        held += sum(moment.nbytes for own in optimizer.state.values() for moment in own.values()
                    if moment.dim())
    args = SimpleNamespace(ttt_steps=3, gradient_accumulation_steps=1, loss="kl",
                           gradient_checkpointing=recompute)
    here = SimpleNamespace(num_processes=1, mixed_precision="no")
    told = list(step_memory(args, drafter, 0, True, length, here, "cpu").values())
    assert told[0] == held
    assert 0.95 < told[2] / activations < 1.1


@pytest.mark.parametrize("frozen", [[], ["--freeze-lm-head"]])
def test_checkpoint_bytes_are_those_on_disk(work, tmp_path, frozen):
    call("extract_hidden_states", "--target", work / "target", "--data", work / "rows.jsonl", "--out",
         tmp_path / "shards")
    training = ["--shards", tmp_path / "shards", "--target", work / "target", "--out", tmp_path / "out",
                "--draft-vocab", "full", "--max-steps", 1, *frozen]
    told = call("train_drafter", *training, "--dry-run")
    alone = plan(work / "bare", "--draft-vocab", "full", "--tokens", 9000, *frozen)
    call("train_drafter", *training)
    files = (tmp_path / "out/checkpoints/step-000001").rglob("*.safetensors")
    written = sum(file.stat().st_size for file in files)
    assert told["checkpoint_bytes"] == alone["checkpoint_bytes"]
    assert 0 <= written - told["checkpoint_bytes"] < 3 * 2048 + 200  # headers, and the optimizers' counts


@pytest.mark.parametrize(("script", "arguments", "words"), [
    ("train_drafter", ["--tokens", 9, "--out", "OUT"], "--tokens is for --dry-run"),
    ("train_drafter", ["--tokens", 9, "--dry-run", "--shards", "x"], "leave out --tokens, or --shards"),
    ("train_drafter", ["--tokens-per-second", 9, "--dry-run"], "is for --dry-run with --tokens"),
    ("train_drafter", ["--dry-run"], "required: --shards, --out"),
    ("train_drafter", ["--tokens", 9, "--dry-run", "--draft-vocab", 329], "329 is not in 1..328"),
    ("extract_hidden_states", [], "required: --out"),
    ("extract_hidden_states", ["--out", "OUT", "--tokens-per-second", 9], "is for --dry-run"),
    ("extract_hidden_states", ["--out", "OUT"], "holds no model.safetensors"),
])
def test_what_is_no_plan(work, tmp_path, script, arguments, words):
    rest = ["--data", work / "rows.jsonl"] if script.startswith("extract") else ["--draft-vocab", "full"]
    arguments = [tmp_path / "out" if word == "OUT" else word for word in arguments]
    with pytest.raises(UserError, match=words):
        call(script, "--target", work / "bare", *rest, *arguments)
    assert not (tmp_path / "out").exists()
