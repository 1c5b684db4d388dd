#!/usr/bin/env python3
"""Serve prompts greedily in float32 on the CPU in a real engine, and record what it drafted. Run by the
engine's own Python:

    ENGINE_PYTHON tests/engines.py sglang|vllm JOB.json OUT.json

JOB: a list of engines to start in turn, each {"target": folder, "drafter": folder or null, "prompts":
[[ids]], "max_new_tokens": n, "stop_ids": [ids], "steps": n, "topk": n, "draft_tokens": n, "states": folder or
null}; vLLM knows no topk but 1.
OUT: {"version": the engine's, "runs": [[answer of each prompt]]}, an answer being {"ids", "accepted",
"verifications", "candidates"}: candidates holds the ids of every verification, root first. With a drafter and
"states", NUMBER.safetensors in that folder holds the states of a prompt's rows: "aux" [N, 3H] as the drafter
gets it, and with SGLang "last" [N, H], the lm_head's input.

SGLang's CPU kernels are in no package index: tests/sgl_shim stands in for them. It logs the candidates, and
our hook keeps the states.
vLLM runs in this process, so that its proposer can be watched.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["sglang", "vllm"])
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    jobs = json.loads(args.job.read_text())
    os.environ |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1",
                   "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    prepare, serve = (prepare_sglang, serve_sglang) if args.engine == "sglang" else (prepare_vllm, serve_vllm)
    version = prepare(args.out)
    runs = []
    for number, job in enumerate(jobs, start=1):
        start = time.perf_counter()
        if job["states"]:
            Path(job["states"]).mkdir()
        runs.append(serve(job))
        print(f"{args.engine} {version}: engine {number} of {len(jobs)}, {len(runs[-1])} answers, "
              f"{time.perf_counter() - start:.0f} s",
              file=sys.stderr, flush=True)
    args.out.write_text(json.dumps({"version": version, "runs": runs}))


def prepare_sglang(out):
    # The engine's processes find both the stand-in and this module, for its hook, on PYTHONPATH;
    # sitecustomize is read at start-up only.
    if str(HERE / "sgl_shim") not in sys.path:
        log = Path(f"{out}.verifications").resolve()
        log.write_text("")
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "VERIFY_LOG": str(log),
                       "PYTHONPATH": f"{HERE / 'sgl_shim'}:{HERE}"}
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import sglang

    return sglang.__version__


def serve_sglang(job):
    import sglang

    log = Path(os.environ["VERIFY_LOG"])
    speculative = {}
    if job["drafter"]:
        speculative = dict(
            speculative_algorithm="EAGLE3", speculative_draft_model_path=job["drafter"],
            speculative_num_steps=job["steps"], speculative_eagle_topk=job["topk"],
            speculative_num_draft_tokens=job["draft_tokens"])
    hooks = [{"name": "states", "target_modules": ["logits_processor"], "hook_factory": "engines:keep_states",
              "config": {"folder": job["states"]}}]
    context = max(map(len, job["prompts"])) + job["max_new_tokens"] + 64
    engine = sglang.Engine(model_path=job["target"], device="cpu", dtype="float32", context_length=context,
                           max_total_tokens=4 * context, max_running_requests=1, mem_fraction_static=0.3,
                           prefill_attention_backend="intel_amx", decode_attention_backend="intel_amx",
                           disable_overlap_schedule=True, disable_cuda_graph=True, disable_radix_cache=True,
                           chunked_prefill_size=-1, log_level="error",
                           forward_hooks=hooks if job["states"] else None, **speculative)
    answers = []
    for number, prompt in enumerate(job["prompts"]):
        before = len(log.read_text().splitlines())  # one at a time: what the log gains is this prompt's
        answer = engine.generate(input_ids=prompt, rid=str(number), sampling_params={
            "temperature": 0, "max_new_tokens": job["max_new_tokens"], "stop_token_ids": job["stop_ids"]})
        candidates = [json.loads(line)[0] for line in log.read_text().splitlines()[before:]]
        facts = answer["meta_info"]
        answers.append({"ids": answer["output_ids"], "accepted": facts.get("spec_num_correct_drafts", 0),
                        "verifications": facts.get("spec_verify_ct", 0), "candidates": candidates})
    engine.shutdown()
    return answers


def keep_states(config):
    """SGLang's forward hook on the target's logits processor: writes the states of every prompt's rows."""
    import torch
    from safetensors.torch import save_file

    def hook(module, args, output):
        _, last, _, batch, aux = args[:5]
        mode = batch.forward_mode
        if aux is None or len(aux) != 3 or not mode.is_extend() or mode.is_target_verify():
            return  # the drafter's own, decoding, or a verification
        counts = batch.extend_seq_lens_cpu
        parts = zip(batch.rids, torch.cat(aux, -1).split(counts), last.split(counts), strict=True)
        for rid, aux_part, last_part in parts:
            save_file({"aux": aux_part.contiguous(), "last": last_part.contiguous()},
                      f"{config['folder']}/{rid}.safetensors")

    return hook


def prepare_vllm(out):
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import vllm

    return vllm.__version__


def serve_vllm(job):
    import vllm
    from safetensors.torch import save_file
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.spec_decode.eagle import EagleProposer

    proposals = []  # (root, drafts, target states [N, 3H]) of every call
    propose = EagleProposer.propose

    def watched(self, *args, **kwargs):
        states = kwargs["target_hidden_states"].clone()
        drafts = propose(self, *args, **kwargs)
        proposals.append((kwargs["next_token_ids"].tolist(), drafts.tolist(), states))
        return drafts

    EagleProposer.propose = watched
    speculative = {}
    if job["drafter"]:
        speculative = {"speculative_config": {"method": "eagle3", "model": job["drafter"],
                                              "num_speculative_tokens": job["steps"]}}
    context = max(map(len, job["prompts"])) + job["max_new_tokens"] + 64
    engine = vllm.LLM(model=job["target"], dtype="float32", max_model_len=context, enforce_eager=True,
                      max_num_seqs=1, enable_prefix_caching=False, disable_log_stats=False, **speculative)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=job["max_new_tokens"],
                                   stop_token_ids=job["stop_ids"])
    answers = []
    for number, prompt in enumerate(job["prompts"]):
        proposals.clear()
        before = vllm_counters(engine)
        answer = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0]
        counters = zip(vllm_counters(engine), before, strict=True)
        accepted, verifications = (now - then for now, then in counters)
        # what is proposed behind the end of an answer is never verified
        candidates = [[*root, *drafts[0]] for root, drafts, _ in proposals[:verifications]]
        answers.append({"ids": list(answer.token_ids), "accepted": accepted, "verifications": verifications,
                        "candidates": candidates})
        if proposals and job["states"]:
            save_file({"aux": proposals[0][2]}, f"{job['states']}/{number}.safetensors")
    EagleProposer.propose = propose
    del engine
    cleanup_dist_env_and_memory()
    return answers


def vllm_counters(engine):
    """(accepted drafts, verifications) since the engine's start."""
    found = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    return [found.get(f"vllm:spec_decode_num_{name}", 0) for name in ("accepted_tokens", "drafts")]


if __name__ == "__main__":
    main()
