#!/usr/bin/env python3
"""Tokens per second of SGLang's prefill with our states captured and read, over its own without. Run by the
Python of SGLang's environment:

    ENGINE_PYTHON tests/bench_capture.py TARGET [more arguments of sglang.launch_server]

Two engines take turns in one process, so that a busy machine slows both; the medians are compared. Prints one
line of JSON.
"""

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from common.sglang import SGLang
from common.target import default_layers, open_target

ROUNDS, SAMPLES, LENGTH = 7, 4, 256


def main():
    import sglang
    from sglang.srt.server_args import prepare_server_args

    target, arguments = open_target(sys.argv[1]), sys.argv[2:]
    generator, seconds = torch.Generator().manual_seed(0), {"with": [], "without": []}
    with SGLang(target, default_layers(target.num_layers), "auto", 2 * LENGTH,
                arguments=arguments) as capturing:
        dtype = str(capturing.dtype).removeprefix("torch.")
        plain = sglang.Engine(server_args=prepare_server_args([
            "--log-level", "error", *arguments, "--model-path", str(target.folder), "--dtype", dtype,
            "--context-length", str(2 * LENGTH), "--disable-radix-cache", "--chunked-prefill-size", "-1",
            "--disable-prefill-cuda-graph"]))
        for _ in range(ROUNDS + 1):
            samples = [torch.randint(3, 300, (LENGTH,), generator=generator).tolist() for _ in range(SAMPLES)]
            start = time.perf_counter()
            capturing.states(samples)
            middle = time.perf_counter()
            plain.generate(input_ids=samples, sampling_params={"temperature": 0, "max_new_tokens": 1})
            seconds["with"].append(middle - start)
            seconds["without"].append(time.perf_counter() - middle)
        plain.shutdown()
    speeds = {name: SAMPLES * LENGTH / statistics.median(times[1:]) for name, times in seconds.items()}
    ratio = speeds["with"] / speeds["without"]
    print(json.dumps({"tokens_per_second": speeds, "ratio": ratio, "dtype": dtype}))


if __name__ == "__main__":
    main()
