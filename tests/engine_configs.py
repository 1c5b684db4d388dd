#!/usr/bin/env python3
"""What the engines' own configuration code says to targets with their drafters; no weights are loaded. Run by
the engine's own Python:

    ENGINE_PYTHON tests/engine_configs.py sglang|vllm JOB.json OUT.json

JOB: {name: {"target": folder, "drafter": folder}}. OUT: {name: {"refused": null or the last line of what was
raised, "draft": {the drafter's sizes as the engine reads them}}}.
"""

import json
import os
import sys
from pathlib import Path

SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "draft_vocab_size")


def main():
    engine, job, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    os.environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    read = read_sglang if engine == "sglang" else read_vllm
    found = {}
    for name, case in json.loads(job.read_text()).items():
        try:
            found[name] = {"refused": None, "draft": sizes(read(case["target"], case["drafter"]))}
        except Exception as error:  # whatever an engine raises is its answer, and is written down
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            found[name] = {"refused": f"{type(error).__name__}: {' '.join(lines)[:400]}", "draft": None}
    out.write_text(json.dumps(found))


def sizes(config):
    return {key: getattr(config, key, None) for key in SIZES}


def read_sglang(target, drafter):
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=target, device="cpu", dtype="float32", prefill_attention_backend="intel_amx",
        decode_attention_backend="intel_amx", disable_overlap_schedule=True, disable_cuda_graph=True,
        trust_remote_code=False, speculative_algorithm="EAGLE3", speculative_draft_model_path=drafter,
        speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
    ModelConfig.from_server_args(arguments)
    return ModelConfig.from_server_args(arguments, model_path=drafter, is_draft_model=True).hf_config


def read_vllm(target, drafter):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=target, dtype="bfloat16", enforce_eager=True, speculative_config={
        "method": "eagle3", "model": drafter, "num_speculative_tokens": 3})
    return arguments.create_engine_config().speculative_config.draft_model_config.hf_config.model


if __name__ == "__main__":
    main()
