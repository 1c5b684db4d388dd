"""What SGLang and vLLM make of rotary settings and layer lists, asked of their own code."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from common.cli import UserError
from common.drafter import (
    AS_GIVEN,
    OFF_BY_DEFAULT,
    captured_layers,
    draft_layer,
    layer_ids,
    load_drafter,
    rotary_settings,
)
from common.target import open_target
from tests import tiny

SHAPE = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "intermediate_size": 1024,
         "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 1024}
SECTIONS = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
TARGETS = {  # name: (rotary entries of a target's text config, the rotary type of its drafter)
    "default": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "default"),
    "old": ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    "llama3": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                                    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                    "original_max_position_embeddings": 512}}, "llama3"),
    "yarn": ({"rope_parameters": YARN}, "yarn"),
    "deepseek": ({"rope_parameters": {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                                      "mscale_all_dim": 1.0}}, "yarn"),
    "gpt-oss": ({"rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.5}}, "yarn"),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "default"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS},
                  "partial_rotary_factor": 0.75}, "default"),
    "mrope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, **SECTIONS,
                                   "partial_rotary_factor": 0.25}}, "default"),
    "mrope, old": ({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", **SECTIONS}}, "default"),
    "two kinds": ({"rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "linear"),
}
POSITIONS = [0, 1, 77, 1000]
INSIDE = {"KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM"}


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def rules(request, tmp_path_factory):
    """What tests/engine_rules.py found out."""
    python = os.environ.get(f"{request.param.upper()}_PYTHON")
    if not python:
        pytest.skip(f"{request.param.upper()}_PYTHON names no Python with the engine")
    folder = tmp_path_factory.mktemp("rules")
    ropes = {name: draft_layer({**SHAPE, **entries})[0]["rope_parameters"]
             for name, (entries, _) in TARGETS.items()}
    job = {"ropes": ropes, "head_dim": 128, "max_position": 4096, "positions": POSITIONS,
           "list": [3, 20, 40], "inside": INSIDE}
    (folder / "job.json").write_text(json.dumps(job))
    command = [python, Path(__file__).with_name("engine_rules.py"), request.param, folder / "job.json",
               folder / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("name", TARGETS)
def test_a_drafters_rotary_positions_are_those_of_the_engines(rules, name):
    layer, _ = draft_layer({**SHAPE, **TARGETS[name][0]})
    assert layer["rope_parameters"]["rope_type"] == TARGETS[name][1]
    frequencies, factor = rotary_settings({**SHAPE, **layer})
    angles = torch.tensor(POSITIONS, dtype=torch.float32)[:, None] * frequencies
    wanted = torch.cat([angles.cos() * factor, angles.sin() * factor], 1)  # [positions, d]
    torch.testing.assert_close(torch.tensor(rules["ropes"][name]), wanted, atol=1e-4, rtol=1e-4)


def test_every_class_of_sglang_captures_what_is_exported(rules):
    if not rules["layers"]:
        pytest.skip("vLLM takes a list as HF indices, whatever the class")
    targets = {name: found for name, found in rules["layers"].items()
               if found and not name.endswith(("NextN", "Eagle", "MTP"))}
    assert len(targets) > 30 and {"DeepseekV32ForCausalLM", *INSIDE} <= targets.keys()
    for name, found in targets.items():
        assert (found["default"] == [2, 30, 58]) == (name not in OFF_BY_DEFAULT), name
        assert (found["list"] == [3, 20, 40]) == (name in AS_GIVEN), name
        assert (found["list"] == [4, 21, 41]) == (name not in AS_GIVEN), name


def test_published_layer_lists_are_read_as_sglang_reads_them():
    for model_class in ("LlamaForCausalLM", *AS_GIVEN, *OFF_BY_DEFAULT):
        for layers in ([2, 30, 58], [3, 20, 40], [4, 21, 41]):
            entries = layer_ids(layers, 61, model_class)
            assert captured_layers(entries, 61, "", model_class) == layers
            nested = {"eagle_config": entries.get("eagle_config")}
            assert captured_layers(nested, 61, "", model_class) == layers

    def nested(ids, model_class, **more):
        entries = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}, **more}
        return captured_layers(entries, 61, "IT", model_class)

    assert nested([2, 30, 58], "DeepseekV3ForCausalLM") == nested([1, 29, 57], "DeepseekV3ForCausalLM")
    assert nested([2, 30, 58], "LlamaForCausalLM") == [3, 31, 59]
    with pytest.raises(UserError, match=r"IT reads layers \[2, 30, 58\] in vLLM and \[3, 31, 59\] in SGLang"):
        nested([2, 30, 58], "LlamaForCausalLM", eagle_aux_hidden_state_layer_ids=[2, 30, 58])


@pytest.mark.parametrize("more, words", [
    ({"norm_before_residual": True}, "norm_before_residual True"),
    ({"norm_output": True}, "norm_output True"),
    ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc True"),
    ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"num_key_value_heads": 3}, "3 key-value heads for 4 heads"),
    ({"rope_parameters": {**YARN, "mscale": 1.0}}, "yarn with mscale"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **SECTIONS}}, "with mrope_section"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "are dynamic,"),
])
def test_what_engines_heed_is_computed_or_refused(tmp_path, more, words):
    folder = tiny.make_drafter(tmp_path / "drafter", open_target(tiny.make_target(tmp_path / "target")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    with pytest.raises(UserError, match=words):
        load_drafter(folder)
