"""Tiny random checkpoints in the layout in which families of targets are published, made on the spot.

A maker writes config.json with the hub's keys, nesting and spelling, the tensors under the published names
and in the published dtypes, a tokenizer and a generation config. Beside the folder lies plain/, the same
weights (those of a quantised checkpoint as they are after rounding) under a config that transformers itself
wrote: what `reference` loads, and what the published layout must compute.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import tiny

LAYERS = 8
SHAPE = dict(vocab_size=328, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0,
             eos_token_id=2, pad_token_id=0, torch_dtype="bfloat16", tie_word_embeddings=False,
             initializer_range=0.02, use_cache=True)
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"config_groups": {"group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                        "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
                        "symmetric": True, "type": "int"}}},
        "format": "pack-quantized", "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                   "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"], "quantization_status": "compressed"}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128, "type": "yarn"}
DEEPSEEK = SHAPE | dict(
    architectures=["DeepseekV3ForCausalLM"], hidden_act="silu", num_key_value_heads=4, q_lora_rank=48,
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, moe_intermediate_size=32,
    n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
    first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=True, routed_scaling_factor=2.5,
    scoring_func="sigmoid", topk_method="noaux_tc", ep_size=1, num_nextn_predict_layers=0,
    attention_bias=False, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=YARN)
KIMI_K2 = DEEPSEEK | dict(
    model_type="kimi_k2", rms_norm_eps=1e-5, rope_theta=50000.0, routed_scaling_factor=2.827,
    auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config",
              "AutoModel": "modeling_deepseek.DeepseekV3Model",
              "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"})
QWEN3 = SHAPE | dict(hidden_act="silu", head_dim=32, rms_norm_eps=1e-6, rope_theta=1000000, rope_scaling=None,
                     attention_bias=False)
QWEN_MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1,
                mlp_only_layers=[], norm_topk_prob=True)
QWEN_LINEAR = dict(linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16,
                   linear_num_key_heads=2, linear_num_value_heads=4, full_attention_interval=4)
QWEN_VISION = dict(depth=2, hidden_size=32, intermediate_size=32, num_heads=2, in_channels=3, patch_size=8,
                   spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=64,
                   num_position_embeddings=16, hidden_act="gelu_pytorch_tanh", initializer_range=0.02)
QWEN_TOKENS = dict(image_token_id=321, video_token_id=322, vision_start_token_id=323, vision_end_token_id=324,
                   tie_word_embeddings=False)
SIGLIP = dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=32, num_hidden_layers=1,
              num_attention_heads=2, image_size=32, patch_size=8)
# where transformers writes other names than the hub has
RENAMED = {"kimi_k25": [("language_model.model.blocks.", "language_model.model.layers.")],
           "gemma3": [("vision_tower.", "vision_tower.vision_model.")]}


def write(folder, config, known=None, quantise=None, more=None, files=1):
    """Write the published checkpoint `folder` and plain/ beside it; returns `folder`.

    config: config.json as published; known: the same in words that transformers knows, where it is not.
    quantise: {name: tensor} as published of (name, weight), None to leave it; the plain weight becomes what
    those stand for. more: {name: tensor} that the published files hold beside the model's. files: number of
    files, of more than one with an index.
    """
    folder = Path(folder)
    plain = folder.parent / "plain"
    for path in (folder, plain):
        path.mkdir(parents=True)
        tiny.save_tokenizer(path)
        stated = {"bos_token_id": 0, "eos_token_id": [2], "pad_token_id": 0, "do_sample": True,
                  "temperature": 0.6, "top_p": 0.95, "transformers_version": "4.55.0"}
        (path / "generation_config.json").write_text(json.dumps(stated))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    known = known or config
    (plain / "config.json").write_text(json.dumps(known))
    loaded = transformers.AutoConfig.from_pretrained(plain)
    model = random_model(getattr(transformers, known["architectures"][0]), loaded)
    model.generation_config = transformers.GenerationConfig.from_pretrained(plain)
    model.to(torch.bfloat16).save_pretrained(plain)
    tensors, published = load_file(plain / "model.safetensors"), dict(more or {})
    for name, tensor in sorted(tensors.items()):
        as_published = name
        for ours, theirs in RENAMED.get(config["model_type"], ()):
            as_published = as_published.replace(ours, theirs)
        made = quantise(as_published, tensor) if quantise else None
        if "e_score_correction_bias" in name:
            tensor = tensor.float()
        published |= {as_published: tensor} if made is None else made[0]
        tensors[name] = tensor if made is None else made[1]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_files(folder, published, files)
    return folder


def random_model(model_class, config, seed=0):
    """A model whose answers are no token repeated and whose greedy choice has a clear margin."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.6 / parameter.shape[-1] ** 0.5)
            elif "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0, 0.1)
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        table.mul_(1.0 if table is head else 10.0)
        head.mul_(4.0 if table is head else 40.0)
    return model


def save_files(folder, tensors, files):
    names = sorted(tensors)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def reference(folder, dtype=torch.float32):
    """The model that the published checkpoint `folder` stands for, from plain/, by transformers alone."""
    plain = Path(folder).parent / "plain"
    architecture = json.loads((plain / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(plain, dtype=dtype).eval()
    # transformers' forward of the whole Llama 4 fails without an image
    return model.language_model if architecture == "Llama4ForConditionalGeneration" else model


def fp8(name, weight, block=128):
    """DeepSeek's and Qwen's blocks: float8_e4m3fn [O, I] with a scale each, float32 [O/128, I/128] rounded
    up, of every linear layer but the router and the lm_head."""
    linear = ("_proj.weight", "_with_mqa.weight", ".wq_b.weight", ".wk.weight")
    if weight.dim() != 2 or not name.endswith(linear) or "weights_proj" in name:
        return None
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // block), -(-columns // block))
    stored, plain = torch.zeros(rows, columns), torch.zeros(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale[i, j] = weight[at].float().abs().max() / 448
            stored[at] = weight[at].float() / scale[i, j]
            plain[at] = stored[at].to(torch.float8_e4m3fn).float() * scale[i, j]
    stored = stored.to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale_inv": scale}, plain


def int4(name, weight, group=32):
    """compressed-tensors' pack-quantized, of routed experts: eight numbers in an int32, the first lowest,
    each 8 more than it is; a bfloat16 scale a group of 32; the shape."""
    if ".experts." not in name:
        return None
    rows, columns = weight.shape
    parts = weight.float().unflatten(1, (-1, group))
    scale = (parts.abs().amax(2, keepdim=True) / 7.5).bfloat16()
    numbers = (parts / scale.float()).round().clamp(-8, 7)
    plain = (numbers * scale.float()).flatten(1).bfloat16()  # to which everyone rounds them
    nibbles = (numbers.flatten(1).to(torch.int64) + 8).unflatten(1, (-1, 8))
    packed = (nibbles << torch.arange(0, 32, 4)).sum(2)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    stem = name.removesuffix("weight")
    return {f"{stem}weight_packed": packed, f"{stem}weight_scale": scale.squeeze(2),
            f"{stem}weight_shape": torch.tensor([rows, columns], dtype=torch.int32)}, plain


def mxfp4(name, weight):
    """gpt-oss' experts: [E, I, O] stored as [E, O, I/32, 16] bytes of two numbers, the lower first, with an
    exponent, uint8, a block of 32."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    parts = weight.float().transpose(1, 2).unflatten(2, (-1, 32))  # [E, O, I/32, 32]
    exponent = (parts.abs().amax(3, keepdim=True) / 6).log2().ceil()
    codes = (parts / exponent.exp2())[..., None].sub(values).abs().argmin(-1)
    plain = (values[codes] * exponent.exp2()).flatten(2).transpose(1, 2).contiguous()
    blocks = (codes[..., 0::2] + codes[..., 1::2] * 16).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponent.squeeze(3) + 127).to(torch.uint8)}, plain


def mtp_layer(config):
    """The tensors that DeepSeek-V3 and GLM-4.5 publish as one more layer, of those that no text model has."""
    hidden, vocab, stem = config["hidden_size"], config["vocab_size"], f"model.layers.{LAYERS}."
    shapes = {"embed_tokens.weight": (vocab, hidden), "enorm.weight": (hidden,), "hnorm.weight": (hidden,),
              "eh_proj.weight": (hidden, 2 * hidden), "shared_head.norm.weight": (hidden,),
              "shared_head.head.weight": (vocab, hidden), "input_layernorm.weight": (hidden,)}
    return {stem + name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def kimi_k2(folder):
    known = KIMI_K2 | {"model_type": "deepseek_v3"}
    return write(folder, KIMI_K2, {key: known[key] for key in known if key != "auto_map"}, files=3)


def kimi_k25(folder, quantise=None):
    text = KIMI_K2 | ({"quantization_config": INT4} if quantise else {})
    vision = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1,
                  patch_size=14)
    config = dict(
        architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", torch_dtype="bfloat16",
        auto_map={"AutoConfig": "configuration_kimi_k25.KimiK25Config",
                  "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
                  "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
        bos_token_id=0, eos_token_id=2, pad_token_id=0, ignore_index=-100, media_placeholder_token_id=321,
        tie_word_embeddings=False, use_unified_vision_chunk=True, text_config=text,
        # the hub names its sizes vt_*, and transformers has those as its own defaults
        vision_config=vision | dict(
            model_type="kimi_k25_vision", init_pos_emb_height=4, init_pos_emb_width=4, init_pos_emb_time=4,
            pos_emb_height=4, pos_emb_width=4, pos_emb_time=4, merge_kernel_size=[2, 2],
            merge_type="sd2_tpool", mm_projector_type="patchmerger", mm_hidden_size=32, text_hidden_size=64,
            **{f"vt_{key}": value for key, value in vision.items() if key != "patch_size"}),
        projection_hidden_size=32)
    known = {key: config[key] for key in config if key != "auto_map"} | {
        "architectures": ["Kimi_K25ForConditionalGeneration"], "image_token_id": 321, "video_token_id": 322,
        "text_config": {key: KIMI_K2[key] for key in KIMI_K2 if key != "auto_map"}}
    return write(folder, config, known, quantise, files=3)


def kimi_k25_int4(folder):
    return kimi_k25(folder, int4)


def deepseek_v3_fp8(folder):
    config = DEEPSEEK | dict(model_type="deepseek_v3", quantization_config=FP8, num_nextn_predict_layers=1,
                             hidden_size=128, intermediate_size=192, n_group=4, topk_group=2)
    return write(folder, config, without(config, "quantization_config"), fp8, mtp_layer(config), files=3)


def deepseek_v32(folder):
    """Of as few as four heads of the indexer, many scores would be 0 alike, the choice among them chance."""
    config = DEEPSEEK | dict(
        model_type="deepseek_v32", architectures=["DeepseekV32ForCausalLM"], num_nextn_predict_layers=1,
        quantization_config=FP8 | {"scale_fmt": "ue8m0"}, index_head_dim=32, index_n_heads=16, index_topk=24)
    return write(folder, config, without(config, "quantization_config"), fp8, mtp_layer(config), files=2)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def qwen3_fp8(folder):
    config = QWEN3 | dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], quantization_config=FP8,
                          hidden_size=128, intermediate_size=192, use_sliding_window=False,
                          sliding_window=None, max_window_layers=8)
    return write(folder, config, without(config, "quantization_config"), fp8)


def qwen3_next(folder):
    config = QWEN3 | QWEN_MOE | QWEN_LINEAR | dict(
        model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"], partial_rotary_factor=0.25,
        shared_expert_intermediate_size=32)
    return write(folder, config, more={"mtp.fc.weight": torch.randn(64, 128).bfloat16(),
                                       "mtp.norm.weight": torch.randn(64).bfloat16()})


def qwen3_5(folder):
    text = without(QWEN3, "rope_theta", "rope_scaling") | QWEN_LINEAR | dict(
        model_type="qwen3_5_text", mtp_num_hidden_layers=1, attn_output_gate=True, mamba_ssm_dtype="float32",
        rope_parameters={"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default",
                         "rope_theta": 10000000, "partial_rotary_factor": 0.25})
    config = QWEN_TOKENS | dict(
        model_type="qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"], text_config=text,
        vision_config=QWEN_VISION | {"model_type": "qwen3_5"})
    return write(folder, config, more={"mtp.fc.weight": torch.randn(64, 128).bfloat16(),
                                       "mtp.norm.weight": torch.randn(64).bfloat16()})


def qwen3_moe(folder):
    return write(folder, QWEN3 | QWEN_MOE | dict(
        model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], router_aux_loss_coef=0.001), files=2)


def qwen3_vl(folder):
    text = QWEN3 | dict(model_type="qwen3_vl_text", rope_scaling={
        "mrope_interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default"})
    return write(folder, QWEN_TOKENS | dict(
        model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"], text_config=text,
        vision_config=QWEN_VISION | {"model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 1]}))


def gpt_oss(folder, quantise=None):
    config = SHAPE | dict(
        model_type="gpt_oss", architectures=["GptOssForCausalLM"], head_dim=32, num_local_experts=4,
        num_experts_per_tok=2, experts_per_token=2, intermediate_size=64, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2), attention_bias=True,
        hidden_act="silu", rms_norm_eps=1e-5, rope_theta=150000, swiglu_limit=7.0, initial_context_length=128,
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "rope_type": "yarn",
                      "original_max_position_embeddings": 128, "truncate": False})
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    return write(folder, config | ({"quantization_config": stated} if quantise else {}), config, quantise)


def gpt_oss_mxfp4(folder):
    return gpt_oss(folder, mxfp4)


def glm4_moe(folder):
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config = without(DEEPSEEK, *latent) | dict(
        model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], head_dim=32, num_key_value_heads=2,
        attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, rope_theta=1000000,
        rope_scaling=None, num_nextn_predict_layers=1, rms_norm_eps=1e-5)
    return write(folder, config, more=mtp_layer(config))


def glm4_moe_lite(folder):
    config = DEEPSEEK | dict(
        model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"], rope_theta=1000000,
        rope_scaling=None, partial_rotary_factor=1.0, num_nextn_predict_layers=1, routed_scaling_factor=1.8,
        rms_norm_eps=1e-5)
    return write(folder, without(config, "scoring_func"), more=mtp_layer(config))


def gemma2(folder):
    config = SHAPE | dict(
        model_type="gemma2", architectures=["Gemma2ForCausalLM"], head_dim=16, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
        query_pre_attn_scalar=16, sliding_window=16, cache_implementation="hybrid", rms_norm_eps=1e-6,
        rope_theta=10000.0)
    return write(folder, without(config, "tie_word_embeddings"))


GEMMA3 = without(SHAPE, "tie_word_embeddings") | dict(
    head_dim=16, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16, sliding_window=16,
    sliding_window_pattern=6, rms_norm_eps=1e-6, rope_theta=1000000, rope_local_base_freq=10000,
    rope_scaling=None, attn_logit_softcapping=None, final_logit_softcapping=None)


def gemma3_text(folder):
    return write(folder, GEMMA3 | dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"]))


def gemma3(folder):
    """The hub's text_config states only what differs from the class' defaults."""
    text = without(GEMMA3, "bos_token_id", "eos_token_id", "pad_token_id") | dict(
        model_type="gemma3_text", rope_scaling={"factor": 8.0, "rope_type": "linear"})
    return write(folder, dict(
        model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], text_config=text,
        vision_config=SIGLIP | {"vision_use_head": False}, boi_token_index=321, eoi_token_index=322,
        image_token_index=323, eos_token_id=[2, 1], mm_tokens_per_image=4, torch_dtype="bfloat16"))


LLAMA = SHAPE | dict(hidden_act="silu", rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False)


def llama31(folder):
    return write(folder, LLAMA | dict(
        model_type="llama", architectures=["LlamaForCausalLM"], rope_theta=500000.0, pretraining_tp=1,
        eos_token_id=[1, 2], rope_scaling={
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 64}), files=2)


def llama4(folder):
    text = without(LLAMA, "mlp_bias") | dict(
        model_type="llama4_text", head_dim=16, intermediate_size_mlp=96, intermediate_size=48,
        num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=1, use_qk_norm=True,
        attention_chunk_size=32, no_rope_layers=[1, 1, 1, 0] * (LAYERS // 4), rope_theta=500000.0,
        attn_temperature_tuning=True, floor_scale=16, attn_scale=0.1, rope_scaling={
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 64})
    vision = dict(model_type="llama4_vision_model", hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                  num_attention_heads=2, image_size=32, patch_size=8, pixel_shuffle_ratio=0.5,
                  projector_input_dim=64, projector_output_dim=64, vision_output_dim=64, rope_theta=10000)
    return write(folder, dict(
        model_type="llama4", architectures=["Llama4ForConditionalGeneration"], text_config=text,
        vision_config=vision, boi_token_index=321, eoi_token_index=322, image_token_index=323,
        tie_word_embeddings=False, torch_dtype="bfloat16"), files=2)


def mistral3(folder):
    """The hub's config does not state that the lm_head, which is there, is not tied."""
    text = without(LLAMA, "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    text |= dict(model_type="mistral", head_dim=32, rope_theta=1000000000.0, sliding_window=None)
    vision = dict(model_type="pixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                  num_attention_heads=2, head_dim=16, image_size=32, patch_size=8, hidden_act="silu",
                  rope_theta=10000.0)
    config = dict(
        model_type="mistral3", architectures=["Mistral3ForConditionalGeneration"], text_config=text,
        vision_config=vision, image_token_index=321, multimodal_projector_bias=False,
        projector_hidden_act="gelu", spatial_merge_size=2, vision_feature_layer=-1, torch_dtype="bfloat16")
    return write(folder, config, config | {"tie_word_embeddings": False})


PHI3 = LLAMA | dict(model_type="phi3", architectures=["Phi3ForCausalLM"], sliding_window=None,
                    original_max_position_embeddings=512, resid_pdrop=0.0, rope_theta=10000.0,
                    auto_map={"AutoConfig": "configuration_phi3.Phi3Config",
                              "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"})


def phi4(folder):
    return write(folder, PHI3 | dict(rope_theta=250000, rope_scaling=None), without(PHI3, "auto_map") | dict(
        rope_theta=250000, rope_scaling=None))


def phi4_mini(folder):
    config = PHI3 | dict(
        partial_rotary_factor=0.75, original_max_position_embeddings=64, tie_word_embeddings=True,
        rope_scaling={"type": "longrope", "long_factor": [1, 1.1, 1.5, 2, 4, 8], "short_factor": [1.0] * 6})
    return write(folder, config, without(config, "auto_map"))


def granite(folder):
    return write(folder, LLAMA | dict(
        model_type="granite", architectures=["GraniteForCausalLM"], embedding_multiplier=12.0,
        residual_multiplier=0.22, attention_multiplier=0.0625, logits_scaling=8.0, rope_theta=10000000.0,
        rope_scaling=None, tie_word_embeddings=True))


COHERE = without(SHAPE, "tie_word_embeddings") | dict(
    hidden_act="silu", layer_norm_eps=1e-5, logit_scale=0.25, rope_theta=50000, attention_bias=False)


def cohere(folder):
    return write(folder, COHERE | dict(model_type="cohere", architectures=["CohereForCausalLM"],
                                       use_qk_norm=False, logit_scale=0.0625))


def cohere2(folder):
    return write(folder, COHERE | dict(
        model_type="cohere2", architectures=["Cohere2ForCausalLM"], head_dim=16, sliding_window=16,
        sliding_window_pattern=4, order_of_interleaved_layers="local_attn_first", rotary_pct=1.0,
        position_embedding_type="rope_gptj", use_embedding_sharing=True, use_gated_activation=True,
        use_parallel_block=True, use_parallel_embedding=True, use_qk_norm=False, layer_switch=4))


def olmo2(folder):
    return write(folder, without(LLAMA, "mlp_bias") | dict(
        model_type="olmo2", architectures=["Olmo2ForCausalLM"], rope_theta=500000, rope_scaling=None))


def exaone4(folder):
    return write(folder, without(LLAMA, "mlp_bias") | dict(
        model_type="exaone4", architectures=["Exaone4ForCausalLM"], head_dim=16, rope_theta=1000000,
        sliding_window=16, sliding_window_pattern="LLLG",
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2, rope_scaling={
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 64}))


def ernie45(folder):
    return write(folder, LLAMA | dict(
        model_type="ernie4_5", architectures=["Ernie4_5ForCausalLM"], head_dim=16, use_bias=False,
        rope_theta=500000.0, tie_word_embeddings=True))


def minimax(folder):
    return write(folder, without(LLAMA, "mlp_bias") | dict(
        model_type="minimax", architectures=["MiniMaxForCausalLM"], head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, rope_theta=10000000, block_size=16,
        layer_types=["linear_attention", "full_attention"] * 4))


def falcon_h1(folder):
    return write(folder, LLAMA | dict(
        model_type="falcon_h1", architectures=["FalconH1ForCausalLM"], head_dim=16, mamba_d_ssm=64,
        mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
        mamba_chunk_size=16, lm_head_multiplier=0.05, embedding_multiplier=4.0, key_multiplier=0.5,
        attention_out_multiplier=0.9, ssm_multipliers=[0.35, 0.25, 0.18, 0.5, 0.3], ssm_in_multiplier=1.2,
        mlp_multipliers=[0.9, 0.2], rope_theta=100000000000.0, rope_scaling=None))


FAMILIES = {maker.__name__: maker for maker in (
    kimi_k2, kimi_k25, kimi_k25_int4, deepseek_v3_fp8, deepseek_v32, qwen3_fp8, qwen3_moe, qwen3_next,
    qwen3_5, qwen3_vl, gpt_oss, gpt_oss_mxfp4, glm4_moe, glm4_moe_lite, gemma2, gemma3_text, gemma3, llama31,
    llama4, mistral3, phi4, phi4_mini, granite, cohere, cohere2, olmo2, exaone4, ernie45, minimax,
    falcon_h1)}
