"""Tokens/s of an extraction (no answers written) over those of the target's bare forward passes on the same
batches.

Everything takes turns, round by round, so that noise hits all alike: the decoder alone, the decoder with the
lm_head's logits of every row (which the choices in a shard need, too), and the extraction from the samples to
shards on disk. Medians are compared, of the time that passed and of this process's CPU time, which other
processes disturb less; the writing thread's is in it.
"""

import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from common.cli import Parser, positive_int, run, say
from common.shards import CANDIDATES, STORE
from common.target import open_target, parse_layers
from extract_hidden_states import Transformers, extract


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--target", required=True, help="folder of a Hugging Face model, or a hub id")
    add("--tokens", type=positive_int, default=512, help="of a sample; default 512, a usual conversation")
    add("--samples", type=positive_int, default=16, help="of a block; default 16")
    add("--blocks", type=positive_int, default=3, help="default 3: one is written while the next is computed")
    add("--max-batch-tokens", type=positive_int, default=4096, help="default 4096, the extraction's on a CPU")
    add("--store", choices=list(STORE), default="bf16", help="default bf16, the extraction's")
    add("--teacher", choices=["states", "compact"], default="states", help="default states, the extraction's")
    add("--rounds", type=positive_int, default=5, help="default 5, against noise")
    args = parser.parse_args()
    target = open_target(args.target)
    backend = Transformers(target, parse_layers("auto", target.num_layers), "auto", 1, args.max_batch_tokens)
    torch.manual_seed(0)
    parts = [[{"line": n, "source_id": 0, "heldout": 0,
               "input_ids": torch.randint(3, target.vocab_size, (args.tokens,)).tolist(),
               "loss_mask": [0] * (args.tokens // 2) + [1] * (args.tokens - args.tokens // 2),
               "bound": args.tokens}
              for n in range(args.samples)] for _ in range(args.blocks)]
    count = max(1, args.max_batch_tokens // args.tokens)
    batches = [torch.tensor([c["input_ids"] for c in part[n : n + count]], device=backend.device)
               for part in parts for n in range(0, len(part), count)]
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    job = SimpleNamespace(args=SimpleNamespace(store=args.store, out=folder), sampling=None,
                          batch_tokens=args.max_batch_tokens,
                          candidates=CANDIDATES if args.teacher == "compact" else 0)
    plan = SimpleNamespace(blocks=parts, skipped=[Counter() for _ in parts])
    every = range(args.blocks)

    @torch.inference_mode()
    def bare(logits):
        for ids in batches:
            last = backend.model.decoder(input_ids=ids, use_cache=False).last_hidden_state
            if logits:
                backend.lm_head(last)
        if backend.device.type == "cuda":
            torch.cuda.synchronize()

    def extraction():
        extract({"planned": {}}, [every], set(every), plan, backend, job, None)

    cases = {"decoder": lambda: bare(False), "decoder_and_logits": lambda: bare(True),
             "extraction": extraction}
    seconds, cpu = {name: [] for name in cases}, {name: [] for name in cases}
    try:
        for turn in range(args.rounds + 1):
            for name, case in cases.items():
                start, worked = time.monotonic(), time.process_time()
                case()
                if turn:  # the first one is not counted
                    seconds[name].append(time.monotonic() - start)
                    cpu[name].append(time.process_time() - worked)
            if turn:
                say(f"round {turn}: {' '.join(f'{name} {seconds[name][-1]:.2f} s' for name in cases)}")
    finally:
        shutil.rmtree(folder)
    summary = {"store": args.store, "teacher": args.teacher}
    for clock, found in (("time", seconds), ("cpu_time", cpu)):
        tokens = sum(batch.numel() for batch in batches)
        rate = {name: tokens / median(values) for name, values in found.items()}
        summary[clock] = {"tokens_per_second": rate, "over_decoder": rate["extraction"] / rate["decoder"],
                          "over_decoder_and_logits": rate["extraction"] / rate["decoder_and_logits"]}
    return summary


if __name__ == "__main__":
    run(main)
