"""The exported folder: what engines read from it, and what is refused when it is loaded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.cli import UserError
from common.drafter import (
    Drafter,
    check_embedding,
    draft_layer,
    drafter_config,
    layer_ids,
    load_drafter,
    save_drafter,
)
from common.target import open_target
from common.ttt import lay_out, make_batch, ttt_hidden
from tests import reference, tiny
from tests.scripts import EXACT, call

LAYER = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
         "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TENSORS = {"fc.weight", "norm.weight", "lm_head.weight", *(f"midlayer.{name}.weight" for name in LAYER)}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_target(tiny.make_target(tmp_path_factory.mktemp("target"), "qwen3"))


def export(target, folder, rows=None, layers=(2, 4, 5)):
    config = drafter_config(target, target.vocab_size if rows is None else len(rows), list(layers))
    drafter = Drafter(config)
    save_drafter(folder, drafter.state_dict(), config, rows)
    return drafter


def test_names_dtypes_and_map_of_both_vocabularies(target, tmp_path):
    export(target, tmp_path / "full")
    export(target, tmp_path / "reduced", torch.arange(10, 60))
    full = load_file(tmp_path / "full" / "model.safetensors")
    reduced = load_file(tmp_path / "reduced" / "model.safetensors")
    assert full.keys() == TENSORS and reduced.keys() == TENSORS | {"d2t", "t2d"}
    assert {tensor.dtype for name, tensor in full.items()} == {torch.bfloat16}
    # offsets, not ids
    assert torch.equal(reduced["d2t"], torch.full((50,), 10)) and reduced["d2t"].dtype == torch.int64
    assert reduced["t2d"].dtype == torch.bool
    assert reduced["t2d"].nonzero()[:, 0].tolist() == list(range(10, 60))
    config = json.loads((tmp_path / "reduced" / "config.json").read_text())
    assert config["draft_vocab_size"] == 50 and config["vocab_size"] == target.vocab_size == 328
    assert config["num_hidden_layers"] == 1 and config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] == 512
    assert not {"num_experts", "quantization_config", "sliding_window", "norm_before_residual",
                "layer_types"} & config.keys()


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3", "gemma2", "mixtral", "llava", "gpt2"])
def test_nothing_of_the_target_but_what_the_draft_has(tmp_path, kind):
    """One layer, no biases, no experts, no quantisation, its own head, whatever the target's config says:
    these entries and no others.
    """
    folder = tiny.make_target(tmp_path, kind)
    raw = json.loads((folder / "config.json").read_text())
    for part in (raw, raw.get("text_config", {})):
        part |= {"attention_bias": True, "mlp_bias": True, "use_sliding_window": True, "sliding_window": 8,
                 "n_routed_experts": 4,
                 "quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoConfig": "x.Y"},
                 "pretraining_tp": 2}
    (folder / "config.json").write_text(json.dumps(raw))
    config = drafter_config(open_target(folder), 100, [2, 4, 5])
    assert config.keys() == {
        "architectures", "model_type", "num_hidden_layers", "hidden_size", "target_hidden_size",
                             "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings",
                             "vocab_size",
        "draft_vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta",
                             "rope_scaling", "bos_token_id",
        "eos_token_id", "torch_dtype"}
    assert config["num_hidden_layers"] == 1 and config["model_type"] == "llama"
    assert config["hidden_act"] == "silu"
    assert not config["attention_bias"] and not config["mlp_bias"] and not config["tie_word_embeddings"]
    assert config["draft_vocab_size"] == 100 and config["vocab_size"] == 328


def test_an_embedding_is_the_targets_or_refused(tmp_path):
    """vLLM drafts with what the folder holds, SGLang with the target's: a nearly equal one would make the two
    differ.
    """
    target = open_target(tiny.make_target(tmp_path / "target"))
    out = tmp_path / "out"
    export(target, out)
    check_embedding(out, target)  # none: the target's is taken
    tensors = load_file(out / "model.safetensors")
    embedding = target.embedding()
    save_file({**tensors, "embed_tokens.weight": embedding.clone()}, out / "model.safetensors")
    check_embedding(out, target)
    drafter, _ = load_drafter(out)
    assert not any("embed" in name for name in drafter.state_dict())
    embedding[5, 7] *= 1.001
    for other in (embedding, embedding[:300].clone()):
        save_file({**tensors, "embed_tokens.weight": other}, out / "model.safetensors")
        with pytest.raises(UserError,
                           match=r"holds an embed_tokens.weight, .* not the one of .*, \[328, 64\]"):
            check_embedding(out, target)


def test_drafting_past_the_training_length(tmp_path):
    """Trained on 40 tokens, drafting at position 300 follows the formulas, and serving may go as far as the
    target.
    """
    target = tiny.make_target(tmp_path / "target")
    tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(4))
    call("extract_hidden_states", "--target", target, "--data", tmp_path / "rows.jsonl",
         "--out", tmp_path / "shards", "--max-length", 40, *EXACT)
    call("train_drafter", "--shards", tmp_path / "shards", "--target", target, "--out", tmp_path / "out",
         "--draft-vocab", "full",
         "--ttt-steps", 2, "--max-steps", 1)
    drafter, _ = load_drafter(tmp_path / "out")
    assert drafter.config["max_position_embeddings"] == 512
    torch.manual_seed(0)
    ids, aux = torch.randint(0, 328, (304,)), torch.randn(304, 3 * 64)
    embedding = open_target(target).embedding().float()
    sample = {"input_ids": ids, "loss_mask": torch.ones(304), "aux_hidden_states": aux, "target_argmax": ids}
    with torch.no_grad():
        layout = lay_out(torch.tensor([300]), [0, 304], 3, "cpu")
        hidden = torch.stack(ttt_hidden(drafter, embedding, make_batch([sample]), layout))
        found = drafter.lm_head(drafter.norm(hidden))[:, 0]
    wanted = reference.draft_logits(drafter, embedding, ids, aux, 300, ids[302:304])
    assert torch.allclose(found.double(), wanted, atol=1e-3, rtol=1e-3)


def test_reload_gives_the_same_logits(target, tmp_path):
    saved = export(target, tmp_path / "out", torch.arange(0, 300, 3))
    loaded, rows = load_drafter(tmp_path / "out")
    assert rows.tolist() == list(range(0, 300, 3))
    for (name, a), b in zip(saved.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a.bfloat16().float(), b), name


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0,
     "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
])
def test_rotary_settings_survive_export_in_both_spellings(tmp_path, rope):
    """The inverse frequencies are the target's, also when a reader knows only one spelling."""
    folder = tiny.make_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    target = open_target(folder)
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    wanted = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    export(target, tmp_path / "out")
    for dropped in (("rope_theta", "rope_scaling"), ("rope_parameters",)):
        exported = json.loads((tmp_path / "out" / "config.json").read_text())
        for key in dropped:
            del exported[key]
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "config.json").write_text(json.dumps(exported))
        save_file(load_file(tmp_path / "out" / "model.safetensors"), tmp_path / "other" / "model.safetensors")
        drafter, _ = load_drafter(tmp_path / "other")
        assert torch.allclose(drafter.inverse_frequencies, wanted.inv_freq, rtol=1e-6)
        assert drafter.rope_factor == pytest.approx(wanted.attention_scaling)


@pytest.mark.parametrize("old", [{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                                 {"type": "linear", "factor": 2.0}, None])
def test_rotary_settings_of_a_target_in_the_old_spelling(tmp_path, old):
    folder = tiny.make_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0, "rope_scaling": old}))
    export(open_target(folder), tmp_path / "out")
    drafter, _ = load_drafter(tmp_path / "out")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_theta": 5000.0, **(old or {}), "rope_type": (old or {}).get("type", "default")}
    wanted = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4,
                                              max_position_embeddings=512, rope_parameters=rope))
    assert torch.equal(drafter.inverse_frequencies, wanted.inv_freq)
    assert drafter.rope_factor == wanted.attention_scaling


def test_gemma3_takes_the_global_rope(tmp_path):
    target = open_target(tiny.make_target(tmp_path, "gemma3"))
    assert drafter_config(target, 328, [2, 4, 5])["rope_theta"] == 1_000_000.0


@pytest.mark.parametrize(("layers", "model_class", "top", "nested"), [
    ([2, 15, 27], "LlamaForCausalLM", None, None),
    ([5, 11, 21], "LlamaForCausalLM", [5, 11, 21], [4, 10, 20]),
    ([5, 11, 21], "DeepseekV3ForCausalLM", [5, 11, 21], [5, 11, 21]),
    ([2, 11, 21], "DeepseekV3ForCausalLM", [2, 11, 21], [1, 10, 20]),
])
def test_layer_ids_as_each_engine_reads_them(layers, model_class, top, nested):
    """SGLang adds 1 to the nested ids: for DeepSeek-V3 style classes only if the first of them is 1."""
    entries = layer_ids(layers, 30, model_class)
    assert entries.get("eagle_aux_hidden_state_layer_ids") == top
    assert entries.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids") == nested


def test_a_layer_that_sglang_cannot_name_is_refused():
    with pytest.raises(UserError, match="cannot be told to capture layer 1"):
        layer_ids([1, 11, 21], 30, "DeepseekV3ForCausalLM")


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.pop("fc.weight"), r"fc.weight is missing"),
    (lambda t: t.update({"model.extra.weight": torch.zeros(1)}),
     r"extra.weight is \(1,\), no such tensor is wanted"),
    (lambda t: t.pop("d2t"), "no d2t and t2d"),
    (lambda t: t.update(d2t=torch.arange(10, 60)), "absolute target ids"),
    (lambda t: t["d2t"].__setitem__(3, 30), "not the same ascending ids"),
])
def test_broken_exports_are_refused(target, tmp_path, change, words):
    export(target, tmp_path, torch.arange(10, 60))
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=words):
        load_drafter(tmp_path)


@pytest.mark.parametrize(("stated", "wanted"), [
    ({"torch_dtype": None}, "bfloat16"), ({"torch_dtype": None, "dtype": "float32"}, "float32"),
                                                ({"torch_dtype": "float16"}, "float16"),
    ({"torch_dtype": "auto"}, None), ({"torch_dtype": 5}, None),
])
def test_a_drafters_dtype_is_one_that_can_be_written(target, tmp_path, stated, wanted):
    export(target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **stated}))
    if wanted:
        assert load_drafter(tmp_path)[0].config["torch_dtype"] == wanted
    else:
        with pytest.raises(UserError, match=f"torch_dtype is {stated['torch_dtype']!r} in its config"):
            load_drafter(tmp_path)


def test_a_full_drafter_with_a_map_is_refused(target, tmp_path):
    export(target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "d2t": torch.zeros(328, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="which vLLM refuses"):
        load_drafter(tmp_path)


def test_heads_need_not_divide_the_hidden_size(tmp_path):
    target = open_target(tiny.make_target(tmp_path / "target"))
    drafter, _ = load_drafter(tiny.make_drafter(tmp_path / "drafter", target, num_attention_heads=6))
    assert target.hidden_size % 6
    assert drafter.midlayer["self_attn"]["q_proj"].weight.shape == (6 * 16, 2 * target.hidden_size)


LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
SHAPES = {  # (text config, heads, key-value heads, head_dim, MLP)
    "Kimi-K2": ({**LATENT, "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64,
                 "v_head_dim": 128, "intermediate_size": 18432, "n_routed_experts": 384}, 64, 8, 128, 18432),
    "DeepSeek-V3": ({**LATENT, "hidden_size": 7168, "num_attention_heads": 128, "head_dim": 64,
                     "v_head_dim": 128, "intermediate_size": 18432, "n_routed_experts": 256},
                    56, 8, 128, 18432),
    "GLM-4.7-Flash": ({**LATENT, "hidden_size": 2048, "num_attention_heads": 20, "v_head_dim": 256,
                       "intermediate_size": 10240, "n_routed_experts": 64}, 8, 8, 256, 10240),
    "gpt-oss": ({"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                 "intermediate_size": 2880, "num_local_experts": 128}, 64, 8, 64, 8640),
    "Llama-4": ({"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                 "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16},
                40, 8, 128, 16384),
    "Mixtral": ({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 14336, "num_local_experts": 8}, 32, 8, 128, 14336),
    "one width a layer": ({"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": [96, 128]},
                          4, 4, 16, 96),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_the_draft_layer(name):
    text, *wanted = SHAPES[name]
    layer, reasons = draft_layer(text)
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    assert [layer[key] for key in keys] == wanted
    assert any("latent" in reason for reason in reasons) == ("kv_lora_rank" in text)
    assert any("experts" in reason for reason in reasons) == (name == "gpt-oss")
    given = dict(zip(keys, (8, 2, 32, 96), strict=True))
    assert draft_layer(text, **given)[0].items() >= given.items()
    with pytest.raises(UserError, match="3 key-value heads for 8 heads; give --kv-heads a divisor"):
        draft_layer(text, **{**given, "num_key_value_heads": 3})


def test_any_spelling_of_the_norms_epsilon_is_read(tmp_path):
    target = open_target(tiny.make_target(tmp_path / "target"))
    for key, value in (("layer_norm_eps", 1e-4), ("norm_epsilon", 1e-3)):
        text = {**target.text, "rms_norm_eps": None, key: value}
        assert drafter_config(replace(target, text=text), 328, [2, 4, 5])["rms_norm_eps"] == value


def in_layout(folder, out, name):
    """`folder`, a drafter of ours with a reduced vocabulary, as others publish theirs."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    out.mkdir()
    if name == "layers.0":
        config["architectures"] = ["Eagle3LlamaForCausalLM"]
        tensors = {f"model.{key.replace('midlayer', 'layers.0')}" if "." in key and "lm_head" not in key
                   else key: tensor for key, tensor in tensors.items()}
    if name == "speculators":
        own = ("draft_vocab_size", "target_hidden_size")
        config = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
                  "norm_before_residual": False, **{key: config.pop(key) for key in own},
                  "transformer_layer_config": config}
        tensors = {key.replace("midlayer", "layers.0"): tensor for key, tensor in tensors.items()}
        tensors["embed_tokens.weight"] = torch.randn(328, 64)
    if name == "no t2d":
        del tensors["t2d"]
    if name == "no lm_head":
        del tensors["lm_head.weight"]
    (out / "config.json").write_text(json.dumps(config))
    if name == "pickled":
        torch.save(tensors, out / "pytorch_model.bin")
    else:
        save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize("name, told", [
    ("layers.0", "15 tensors"), ("speculators", "16 tensors, embed_tokens.weight left out, the target's"),
    ("no t2d", "14 tensors, t2d made from d2t"), ("no lm_head", "14 tensors, lm_head.weight the target's"),
    ("pickled", "15 tensors")])
def test_layouts_in_which_others_publish_drafters(tmp_path, name, told):
    target = open_target(tiny.make_target(tmp_path / "target"))
    ours = tiny.make_drafter(tmp_path / "ours", target, 100)
    theirs = in_layout(ours, tmp_path / "theirs", name)
    wanted, rows = load_drafter(ours)
    found, same = load_drafter(theirs, target=target)
    assert torch.equal(rows, same) and found.used.startswith(told)
    for key, tensor in wanted.state_dict().items():
        if name == "no lm_head" and key == "lm_head.weight":
            tensor = target.lm_head()[rows].float()
        assert torch.equal(found.state_dict()[key], tensor), key
    if name == "no lm_head":
        with pytest.raises(UserError, match="lm_head.weight is missing"):
            load_drafter(theirs)


def test_a_pickled_drafter_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    target = open_target(tiny.make_target(tmp_path / "target"))
    folder = tiny.make_drafter(tmp_path / "drafter", target)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin cannot be read"):
        load_drafter(folder)
    assert not (tmp_path / "ran").exists()
