#!/usr/bin/env python3
"""What the engines' own code makes of rotary settings and layer lists. Run by the engine's own Python:

    ENGINE_PYTHON tests/engine_rules.py sglang|vllm JOB.json OUT.json

JOB: {"ropes": {name: rope_parameters}, "head_dim": d, "max_position": n, "positions": [p], "list": [ids],
"inside": {class: the class it hands a list on to}}. OUT: {"ropes": {name: [cos and sin of each position, 2 *
d/2]}, "layers": {class: {"default": HF indices captured by default of LAYERS layers, "list": for that
list}, or null for one that hands it on}}; vLLM has no layers.
"""

import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

LAYERS = 61


def main():
    engine, job, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    os.environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    shim = str(Path(__file__).resolve().parent / "sgl_shim")
    if engine == "sglang" and shim not in sys.path:  # sitecustomize is read at start-up only
        os.environ["PYTHONPATH"] = shim
        os.execv(sys.executable, [sys.executable, *sys.argv])
    job = json.loads(job.read_text())
    ropes, layers = (ropes_sglang(job), layers_sglang(job)) if engine == "sglang" else (ropes_vllm(job), {})
    out.write_text(json.dumps({"ropes": ropes, "layers": layers}))


def ropes_sglang(job):
    from sglang.srt.layers.rotary_embedding import get_rope

    size, end = job["head_dim"], job["max_position"]
    return {name: get_rope(size, size, end, rope["rope_theta"], True, rope)
            .cos_sin_cache[job["positions"]].tolist() for name, rope in job["ropes"].items()}


def ropes_vllm(job):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        return {name: get_rope(job["head_dim"], job["max_position"], True, rope)
                .cos_sin_cache[job["positions"]].tolist() for name, rope in job["ropes"].items()}


def layers_sglang(job):
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.runtime_context import get_parallel

    found = {}
    for name, cls in ModelRegistry.models.items():
        if not hasattr(cls, "set_eagle3_layers_to_capture"):
            continue
        inner = job["inside"].get(name)
        if inner and inner not in inspect.getsource(sys.modules[cls.__module__]):
            raise RuntimeError(f"{name} holds no {inner} any more")
        asked = ModelRegistry.models[inner] if inner else cls
        try:
            with get_parallel().override(pp_group=SimpleNamespace(is_last_rank=True)):
                found[name] = {"default": captured(asked, None), "list": captured(asked, job["list"])}
        except AttributeError:  # a wrapper of another class, which decides
            found[name] = None
    return found


def captured(cls, ids):
    """HF indices that a class captures for its list `ids`, asked with a stand-in for the loaded model."""
    sizes = SimpleNamespace(num_hidden_layers=LAYERS)
    sizes.text_config = sizes
    model = SimpleNamespace(layers=[SimpleNamespace() for _ in range(LAYERS)], config=sizes,
                            end_layer=LAYERS, start_layer=0)
    loaded = SimpleNamespace(model=model, config=sizes, pp_group=SimpleNamespace(is_last_rank=True))
    cls.set_eagle3_layers_to_capture(loaded, ids)
    return sorted(model.layers_to_capture)


if __name__ == "__main__":
    main()
