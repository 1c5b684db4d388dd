#!/usr/bin/env python3
"""What the engines' own configuration code makes of drafters; no weights are loaded. Run by the engine's own
Python:

    ENGINE_PYTHON tests/engine_configs.py sglang|vllm JOB.json OUT.json

JOB: {"target": folder of one target for all, as vLLM takes ten seconds for every other architecture,
"drafters": {name: folder}}. OUT: {name: {"refused": what was raised, or null with "draft": the drafter's
SIZES as the engine reads them, "rope": its rotary table, cosines and sines [ROWS, 2 x half]}}.
"""

import json
import os
import sys
from pathlib import Path

SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "draft_vocab_size")
ROWS = 100  # positions of the rotary table


def main():
    engine, job, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    os.environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    shim = str(Path(__file__).resolve().parent / "sgl_shim")
    if engine == "sglang" and shim not in sys.path:  # sitecustomize is read at start-up only
        os.environ["PYTHONPATH"] = shim
        os.execv(sys.executable, [sys.executable, *sys.argv])
    job, found = json.loads(job.read_text()), {}
    read = (read_sglang if engine == "sglang" else read_vllm)(job["target"])
    for name, drafter in job["drafters"].items():
        try:
            config, rope = read(drafter)
            found[name] = {"refused": None, "draft": {key: getattr(config, key, None) for key in SIZES},
                           "rope": rope.cos_sin_cache[:ROWS].tolist()}
        except Exception as error:  # whatever an engine raises is its answer, and is written down
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            found[name] = {"refused": f"{type(error).__name__}: {' '.join(lines)[:400]}"}
    out.write_text(json.dumps(found))


def read_sglang(target):
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.server_args import ServerArgs

    def read(drafter):
        arguments = ServerArgs(
            model_path=target, device="cpu", dtype="float32", prefill_attention_backend="intel_amx",
            decode_attention_backend="intel_amx", disable_overlap_schedule=True, disable_cuda_graph=True,
            speculative_algorithm="EAGLE3", speculative_draft_model_path=drafter, speculative_num_steps=3,
            speculative_eagle_topk=1, speculative_num_draft_tokens=4)
        config = ModelConfig.from_server_args(arguments, model_path=drafter, is_draft_model=True).hf_config
        rope = config.rope_parameters  # as its layers of llama take it
        return config, get_rope(
            config.head_dim, rotary_dim=int(getattr(config, "partial_rotary_factor", 1) * config.head_dim),
            max_position=config.max_position_embeddings, base=rope["rope_theta"], rope_scaling=rope)

    return read


def read_vllm(target):
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.rotary_embedding import get_rope

    engine = EngineArgs(model=target, dtype="bfloat16", enforce_eager=True).create_engine_config()

    def read(drafter):
        made = SpeculativeConfig(method="eagle3", model=drafter, num_speculative_tokens=3,
                                 target_model_config=engine.model_config,
                                 target_parallel_config=engine.parallel_config)
        config = made.draft_model_config.hf_config.model
        with set_current_vllm_config(engine):
            return config, get_rope(config.head_dim, max_position=config.max_position_embeddings,
                                    rope_parameters=config.rope_parameters)

    return read


if __name__ == "__main__":
    main()
