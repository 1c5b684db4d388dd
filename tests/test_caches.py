"""Targets whose layers keep more than keys and values, or hand on several streams: what is decoded and
captured of them, and what is refused before their weights are loaded. Random models of published layouts.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers

from common.cli import UserError
from common.decode import decode, random_numbers, transformers_generate
from common.shards import Shards
from common.target import open_target
from common.target_model import TargetModel, odd_layers
from tests import tiny
from tests.scripts import EXACT, call

SHAPE = dict(vocab_size=328, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0,
             eos_token_id=2, pad_token_id=0)
MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
             head_dim=16)
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)
MAMBA1 = dict(mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False)
LATENT = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
              v_head_dim=16)
EXPERTS = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
WINDOWS = dict(head_dim=16, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8,
               num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=328)

ODD = {  # class of the model, class of its config, what differs from SHAPE
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig",
                   {**MIXED, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**MIXED, **DELTA}),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig",
                    {**MIXED, **LATENT, **EXPERTS, "linear_num_heads": 4, "linear_head_dim": 16}),
    "minimax": ("MiniMaxForCausalLM", "MiniMaxConfig",
                {**MIXED, "block_size": 4, "head_dim": 16, "num_local_experts": 4}),
    "jamba": ("JambaForCausalLM", "JambaConfig",
              {**MAMBA1, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}),
    "bamba": ("BambaForCausalLM", "BambaConfig", {**MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {**MAMBA2, "mamba_d_ssm": 128, "head_dim": 16}),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig",
                   {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 4,
                    "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8,
                    "head_dim": 16}),
    "granite4": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
                 {**MAMBA2, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 96,
                  "num_local_experts": 0}),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config",
               {"layers_block_type": ["mamba", "hybrid", "mamba", "mamba"], "mamba_d_state": 8,
                "mamba_headdim": 32, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 8,
                "attention_head_dim": 32, "hybrid_layer_ids": [1], "num_mem_blocks": 1,
                "use_mem_rope": True}),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config",
             {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config",
                     {**LATENT, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
                      "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
                      "index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}),  # of few heads scores tie
}
STREAMS = {
    "gemma3n": ("Gemma3nForCausalLM", "Gemma3nTextConfig",
                {**WINDOWS, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}),
    "hy_v4": ("HYV4ForCausalLM", "HYV4Config", {**LATENT, "moe_intermediate_size": 32, "n_routed_experts": 4,
                                                "num_experts_per_tok": 2, "index_n_heads": 16,
                                                "index_head_dim": 16, "index_topk": 8, "hc_mult": 2}),
}
SHARED = {"gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", {**WINDOWS, "global_head_dim": 16})}


def make(folder, kind):
    """A random target of `kind`, whose choices have a clear margin. Returns the folder."""
    model_class, config_class, other = {**ODD, **STREAMS, **SHARED}[kind]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**SHAPE, **other}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.6 / parameter.shape[1] ** 0.5)
        model.get_output_embeddings().weight.mul_(20)
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    return folder


def prompts():
    torch.manual_seed(1)
    return [torch.randint(3, 320, (length,)).tolist() for length in (13, 7, 13, 13, 22)]


@pytest.mark.parametrize("kind", ODD)
def test_odd_caches_decode_and_are_captured_as_in_transformers(tmp_path, monkeypatch, kind):
    """Greedy answers id by id, some cut by an end token; the states of samples that were computed together;
    evaluation is refused without loading."""
    folder = make(tmp_path / "target", kind)
    target = open_target(folder)
    model = TargetModel(target, [1, 2, 3], "float32", device="cpu")
    assert model.odd == odd_layers(target.text) != ""
    asked, limits = prompts(), [14, 14, 9, 14, 14]
    stops = {decode(model, asked[:1], 14, set()).answers[0].ids[5]}
    answers = [answer.ids for answer in decode(model, asked, limits, stops, most=2).answers]
    wanted = [transformers_generate(model, prompt, limit, stops).answers[0].ids
              for prompt, limit in zip(asked, limits, strict=True)]
    assert answers == wanted and len(answers[0]) <= 6

    rows = tiny.write_rows(tmp_path / "rows", tiny.conversations(4))
    call("extract_hidden_states", *EXACT, "--target", folder, "--data", rows, "--out", tmp_path / "out",
         "--regenerate", "--max-new-tokens", 6, "--layers", "1,2,3", "--dtype", "float32")
    shards = Shards(tmp_path / "out")
    for sample in map(shards.sample, range(4)):
        alone, _ = model.states(sample["input_ids"][None].long())
        assert torch.allclose(sample["aux_hidden_states"].float(), alone[0], rtol=0.01, atol=0.001)
        written = sample["loss_mask"].bool()
        assert torch.equal(sample["target_argmax"][:-1][written[1:]], sample["input_ids"][written])

    monkeypatch.setattr(TargetModel, "__init__", lambda *_, **__: pytest.fail("the weights were loaded"))
    with pytest.raises(UserError, match="cannot go back .* --backend sglang --server-url"):
        evaluate(folder, tmp_path / "drafter", rows)


def evaluate(folder, drafter, rows):
    return call("eval_speculative", "--target", folder, "--drafter", drafter, "--prompts", rows, "--dtype",
                "float32", "--max-new-tokens", 8)


def test_drawn_answers_of_an_odd_cache_do_not_depend_on_their_company(tmp_path):
    model = TargetModel(open_target(make(tmp_path / "target", "qwen3_5")), [1, 2, 3], "float32", device="cpu")
    asked = prompts()
    drawn = [random_numbers(0, [n], 10) for n in range(5)]

    def sampled(order, most):
        group = decode(model, [asked[n] for n in order], 10, {2}, most=most,
                       sampling={"temperature": 4.0, "top_p": 0.95, "top_k": 50},
                       numbers=lambda n, first, count: drawn[order[n]][first : first + count])
        return [answer.ids for answer in group.answers]

    assert sampled([2, 4, 0], 3) == [sampled([n], 1)[0] for n in (2, 4, 0)]


@pytest.mark.parametrize("kind", STREAMS)
def test_several_residual_streams_are_refused_from_the_config(tmp_path, monkeypatch, kind):
    folder = make(tmp_path / "target", kind)
    rows = tiny.write_rows(tmp_path / "rows", tiny.conversations(2))
    with pytest.raises(UserError, match="is of shape"):  # also where no config tells
        TargetModel(open_target(folder), [1, 2, 3], "float32", device="cpu").check_logits()
    monkeypatch.setattr(TargetModel, "__init__", lambda *_, **__: pytest.fail("the weights were loaded"))
    with pytest.raises(UserError, match=r"several residual streams \(\w+ \d\)"):
        call("extract_hidden_states", "--target", folder, "--data", rows, "--out", tmp_path / "out",
             "--layers", "1,2,3")
    with pytest.raises(UserError, match="--backend sglang --server-url"):
        evaluate(folder, tmp_path / "drafter", rows)


def test_layers_that_read_anothers_keys_and_values_draft_as_others_do(tmp_path):
    folder = make(tmp_path / "target", "gemma4")
    target, rows = open_target(folder), tiny.write_rows(tmp_path / "rows", tiny.conversations(3))
    model = TargetModel(target, [1, 2, 3], "float32", device="cpu")
    answers = [answer.ids for answer in decode(model, prompts(), 14, set(), most=2).answers]
    assert model.odd == ""
    assert answers == [transformers_generate(model, prompt, 14, set()).answers[0].ids for prompt in prompts()]
    summary, code = evaluate(folder, tiny.make_drafter(tmp_path / "drafter", target, layers=[1, 2, 3]), rows)
    assert code == 0 and summary["drafters"][0]["identical"] == 3


@pytest.mark.parametrize("text, odd", [
    ({}, ""), ({"layer_types": ["full_attention", "sliding_attention"], "mamba_d_state": 8}, ""),
    ({"layer_types": ["full_attention", "conv"]}, "layers of conv"),
    ({"layer_types": ["full_attention"], "index_topk": 8}, "layers with index_topk"),
    ({"index_topk": None, "hybrid_override_pattern": "M*-"}, "layers with hybrid_override_pattern"),
    ({"linear_attn_config": {"kda_layers": [1]}}, "layers with linear_attn_config"),
    ({"attn_type_list": [0, 1]}, "layers with attn_type_list")])
def test_odd_layers_are_told_by_kind_not_by_family(text, odd):
    assert odd_layers(text) == odd


def test_a_cache_that_only_the_model_tells_of_is_odd(tmp_path, monkeypatch):
    model = TargetModel(open_target(tiny.make_target(tmp_path / "target")), [2, 4, 5], "float32", "cpu")
    made = SimpleNamespace(layers=[])
    monkeypatch.setattr(model, "go_on", lambda *_: (made, None))
    assert model.odd == "a cache of SimpleNamespace"
    with pytest.raises(UserError, match="a cache of SimpleNamespace, whose cache cannot go back"):
        decode(model, [[3]], 4, set(), drafter=(None, None, None))
