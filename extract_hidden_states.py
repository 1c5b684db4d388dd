#!/usr/bin/env python
"""Conversations in, hidden states of the target out: what train_drafter.py learns from.

Reads JSON lines, applies the target's chat template, marks the tokens that the assistant wrote (or, with --regenerate, lets
the target write them anew), runs the target once over every sample and stores the states of three layers and the lm_head's
input in shards with a manifest. The same command again goes on with what is missing.
"""

import json
import re
import shutil
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import torch

from common.cli import Parser, Progress, UserError, human_bytes, in_range, positive_int, run, say
from common.conversations import Skip, count_text, read_rows
from common.corpus import add_data_arguments, first_question, longest_sample, prepare
from common.decode import decode
from common.files import check_output_folder, sha256_file, write_json
from common.rendering import Renderer, chat_ids
from common.sampling import random_numbers, sampling_settings, stop_ids
from common.shards import (
    FORMAT,
    MANIFEST,
    SCALES,
    STORE,
    bytes_per_token,
    read_manifest,
    store_states,
    stored_tensors,
    write_shard,
)
from common.target import chat_template_sha256, choices, load_tokenizer, open_target, parse_layers, tokenizer_sha256
from common.target_model import TargetModel

BLOCK_LINES, BLOCK_BYTES = 512, 2 << 30  # a block is computed in memory and redone whole after an interruption


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--target", required=True, help="folder of a Hugging Face model, or a hub id")
    add("--data", required=True, help="JSON lines (README lists the kinds of rows); - is stdin")
    add("--out", required=True, type=Path, help="folder for the shards: new, empty, or one that this command began")
    add_data_arguments(parser)
    add("--backend", choices=["hf"], default="hf", help="what runs the target: transformers")
    add("--regenerate", action="store_true",
        help="let the target write the answers: a drafter learns what the target says, and that is what it will be asked to guess")
    add("--max-new-tokens", type=positive_int, default=512, metavar="N", help="longest answer with --regenerate: most chats end before")
    add("--layers", default="auto", help="three HF hidden_states indices like 2,15,27; default auto, [2, n/2, n-3], as the engines "
        "capture by themselves")
    add("--store", choices=list(STORE), default="bf16", help="dtype of the states on disk; default bf16, which never overflows. fp8: half "
        "of it, with a scale for each state")
    add("--teacher", choices=["states", "compact"], default="states", help="what training learns from beside the three layers' states: "
        "default states, the lm_head's input; compact: the likeliest tokens' log-probabilities at supervised rows, which is smaller and "
        "spares training the product with the target's lm_head")
    add("--candidates", type=in_range(8, low_too=True, kind=int), default=64, metavar="C", help="tokens of the compact teacher; default 64")
    add("--temperature", default="0", metavar="T",
        help="of the answers; 0 is greedy, what a drafter guesses best; config: what the target's generation config says")
    add("--top-p", type=float, default=1.0, metavar="P", help="for temperature > 0; 1 keeps everything")
    add("--top-k", type=int, default=0, metavar="K", help="for temperature > 0; 0 keeps everything")
    add("--seed", type=int, default=0, help="of the sampled answers; with line and turn it fixes each answer's random numbers")
    add("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto", help="of the target; default auto, that of its "
        "files, as it is served")
    add("--max-batch-tokens", type=positive_int, metavar="N", help="tokens of a forward pass; default 4096 on a CPU, 32768 on a GPU: "
        "full speed, little memory")
    add("--generate-rows", type=positive_int, default=128, metavar="N", help="answers written at once: more is faster until memory "
        "ends; default 128")
    add("--block-lines", type=positive_int, metavar="N",
        help=f"input lines of a shard; default {BLOCK_LINES}, fewer when that could pass {human_bytes(BLOCK_BYTES)}")
    add("--verify", action="store_true", help="when going on, check the sha256 of the finished shards and redo damaged ones")
    add("--dry-run", action="store_true", help="print samples, tokens and bytes and stop; touches nothing")
    add("--trust-remote-code", action="store_true", help="run code that comes with the target")
    add("--revision", metavar="NAME", help="of a hub id; default its main one")
    add("--force", action="store_true", help="go on although target, tokenizer or template changed since these shards were begun")
    return parser.parse_args()


def main():
    args = parse_args()
    started = time.monotonic()
    target = open_target(args.target, args.revision, args.trust_remote_code)
    layers = parse_layers(args.layers, target.num_layers)
    max_length = longest_sample(args, target)
    check_output_folder(args.out, MANIFEST)
    tokenizer = load_tokenizer(target.folder, args.trust_remote_code)
    stops = stop_ids(target, tokenizer)
    sampling = None
    if args.regenerate:
        sampling = {**sampling_settings(target, args.temperature, args.top_p, args.top_k), "seed": args.seed,
                    "max_new_tokens": args.max_new_tokens, "stop_ids": stops}

    rows, lines, data_sha256 = read_rows(args.data, args.limit)
    if not rows:
        raise UserError(f"--data {args.data} holds no rows")
    renderer = Renderer(tokenizer, args.template_kwargs, stops)
    conversations, skipped, notes, sources = prepare(rows, renderer, target, args, max_length)
    reasons = Counter(reason for _, reason in skipped)
    tokens = sum(c["bound"] for c in conversations)
    args.candidates = min(args.candidates, target.vocab_size) if args.teacher == "compact" else 0
    row_bytes = int(bytes_per_token(target.hidden_size, args.store, args.candidates))  # at most: with every token supervised
    begun = read_manifest(args.out) if (args.out / MANIFEST).exists() else None
    fit = BLOCK_BYTES // (row_bytes * max(c["bound"] for c in conversations))
    block_lines = args.block_lines or (begun and begun["block_lines"]) or max(1, min(BLOCK_LINES, fit))
    blocks = -(-lines // block_lines)
    at_most = "at most " if args.regenerate else ""
    say(f"{len(conversations)} of {len(rows)} rows, {at_most}{tokens} tokens, {row_bytes} bytes per token, "
        f"{at_most}{human_bytes(tokens * row_bytes)} in {blocks} shards; skipped: {count_text(reasons) or 'none'}")
    for what, turns in notes.items():
        say(f"{turns} {what}")
    if args.dry_run:
        return {"dry_run": True, "samples": sum(c["samples"] for c in conversations), "skipped": dict(reasons), "tokens": tokens,
                "supervised_tokens": None if args.regenerate else sum(sum(c["loss_mask"]) for c in conversations),
                "bytes": tokens * row_bytes, "bytes_per_token": row_bytes, "seconds": time.monotonic() - started,
                "tokens_per_second": None, "shards": blocks, "out": str(args.out)}

    manifest = {
        "format": FORMAT, "target": target.facts(), "layers": layers, "dtype": str(STORE[args.store]).removeprefix("torch."),
        "stored": stored_tensors(args.teacher), "candidates": args.candidates, "tokenizer_sha256": tokenizer_sha256(target.folder),
        "chat_template_sha256": chat_template_sha256(tokenizer),
        "template_kwargs": args.template_kwargs, "system": args.system, "sampling": sampling, "max_length": max_length,
        "data_sha256": data_sha256, "block_lines": block_lines, "heldout": args.heldout, "compute_dtype": args.dtype,
        "backend": args.backend, "special_ids": {"eos": stops, "chat": chat_ids(tokenizer, target.vocab_size)}, "sources": sources,
        "planned": {"lines": lines, "blocks": blocks}, "done": {}, "complete": False, "forced": [],
        "versions": {"python": python_version(), **{name: version(name) for name in ("torch", "transformers", "safetensors")}},
        "shards": [], "empty_blocks": [],
    }
    if begun:
        resume(begun, manifest, args)
    have = {entry["block"] for entry in manifest["shards"] + manifest["empty_blocks"]}
    missing = [block for block in range(blocks) if block not in have]
    done_before = sum_up(manifest)
    check_space(args, conversations, {*missing}, block_lines, row_bytes)
    if missing:
        extract(manifest, missing, conversations, skipped, renderer, target, layers, args)
    if not manifest["shards"]:
        raise UserError(f"none of the samples could be kept ({count_text(Counter(sum_up(manifest)['skipped']))}); there is nothing to "
                        f"train on")
    manifest["complete"] = True
    save(manifest, args.out)
    done, seconds = manifest["done"], time.monotonic() - started
    row_bytes = bytes_per_token(target.hidden_size, args.store, args.candidates, done["supervised_tokens"] / done["tokens"])
    return {**done, "bytes": sum(entry["bytes"] for entry in manifest["shards"]), "bytes_per_token": row_bytes, "seconds": seconds,
            "tokens_per_second": (done["tokens"] - done_before["tokens"]) / seconds, "shards": len(manifest["shards"]),
            "dropped_or_cut": dict(notes), "forced": manifest["forced"], "out": str(args.out)}


def extract(manifest, missing, conversations, skipped_rows, renderer, target, layers, args):
    """Compute the missing blocks and write them, the manifest after each."""
    model = TargetModel(target, layers, args.dtype, trust_remote_code=args.trust_remote_code)
    model.check_logits()
    args.out.mkdir(parents=True, exist_ok=True)
    for stray in args.out.glob(".*.tmp-*"):
        stray.unlink()
    save(manifest, args.out)
    block_lines, max_length = manifest["block_lines"], manifest["max_length"]
    by_block = {block: [] for block in missing}
    for conversation in conversations:
        if conversation["line"] // block_lines in by_block:
            by_block[conversation["line"] // block_lines].append(conversation)
    total = sum(c["samples"] if args.regenerate else c["bound"] for part in by_block.values() for c in part)
    progress = Progress(total, "answers" if args.regenerate else "tokens", "extracting")
    budget = args.max_batch_tokens or (4096 if model.device.type == "cpu" else 32768)
    for block in missing:
        skipped = Counter(reason for line, reason in skipped_rows if line // block_lines == block)
        read = len(by_block[block]) + skipped.total()
        if args.regenerate:
            samples = write_answers(model, renderer, by_block[block], manifest["sampling"], max_length, args, budget, skipped, progress)
        else:
            samples = [sample_of(c, c["input_ids"], c["loss_mask"]) for c in by_block[block]]
        samples = add_states(model, samples, args, budget, skipped, None if args.regenerate else progress)
        need = sum(len(sample["input_ids"]) for sample in samples) * bytes_per_token(target.hidden_size, args.store, args.candidates)
        free = shutil.disk_usage(args.out).free
        if free < 1.05 * need + (1 << 20):
            raise UserError(f"the disk of {args.out} has {human_bytes(free)} left and the next shard needs {human_bytes(need)}; make room "
                            f"and give the same command again")
        entry = write_shard(args.out, block, samples)
        facts = {"block": block, "read": read, "skipped": dict(skipped)}
        where = manifest["empty_blocks"] if entry is None else manifest["shards"]
        where.append({**(entry or {}), **facts})
        where.sort(key=lambda item: item["block"])
        save(manifest, args.out)
    progress.close()


def sample_of(conversation, ids, mask, turn=0):
    return {"input_ids": torch.tensor(ids, dtype=torch.int32), "loss_mask": torch.tensor(mask, dtype=torch.uint8),
            "sample_id": conversation["line"], "turn_id": turn, "source_id": conversation["source_id"], "heldout": conversation["heldout"]}


def write_answers(model, renderer, conversations, sampling, max_length, args, budget, skipped, progress):
    """Samples of the answers that the target writes: turn by turn, each in the context of its own earlier answers."""
    samples, written, start = [], 0, time.monotonic()

    def finished(ids):
        nonlocal written
        written += len(ids)
        progress.update(1, f"{written / (time.monotonic() - start):.0f} tokens/s")

    while conversations := [c for c in conversations if None in c["messages"]]:
        jobs = []
        for conversation in conversations:
            told = first_question(conversation)
            try:
                prompt = renderer.prompt_ids(told, conversation["tools"])
                if len(prompt) >= max_length:
                    raise Skip("prompt too long")
            except Skip as skip:
                skipped[skip.reason] += 1
                conversation["messages"].clear()
                continue
            jobs.append((conversation, sum(message["role"] == "assistant" for message in told), prompt))
        prompts = [prompt for _, _, prompt in jobs]
        limits = [min(sampling["max_new_tokens"], max_length - len(prompt)) for prompt in prompts]
        drawn = [random_numbers(sampling["seed"], [conversation["line"], turn], limit)
                 for (conversation, turn, _), limit in zip(jobs, limits, strict=True)]
        group = decode(model, prompts, limits, set(sampling["stop_ids"]), sampling=sampling, most=args.generate_rows,
                       numbers=lambda n, first, count: drawn[n][first : first + count], prefill_tokens=budget, report=finished)  # noqa: B023
        for (conversation, turn, prompt), answer in zip(jobs, group.answers, strict=True):
            samples.append(sample_of(conversation, prompt + answer.ids, [0] * len(prompt) + [1] * len(answer.ids), turn))
            conversation["messages"][conversation["messages"].index(None)] = renderer.message(answer.ids)
    return samples


def add_states(model, samples, args, budget, skipped, progress):
    """The samples with their states, by line and turn. Batches are of like length, padded on the right; padding is taken off.

    Samples with states that are not finite are named, counted in `skipped` and left out. Raises UserError when --store overflows.
    """
    samples = sorted(samples, key=lambda sample: (-len(sample["input_ids"]), sample["sample_id"], sample["turn_id"]))
    kept = []
    while samples:
        longest = len(samples[0]["input_ids"])
        batch, samples = samples[: max(1, budget // longest)], samples[max(1, budget // longest) :]
        ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in batch], batch_first=True).to(model.device).long()  # [B, T]
        aux, last = model.states(ids)  # [B, T, 3H], [B, T, H]
        for n, sample in enumerate(batch):
            length = len(sample["input_ids"])
            states = {"aux_hidden_states": aux[n, :length], "last_hidden_state": last[n, :length]}
            name = f"line {sample['sample_id'] + 1}, turn {sample['turn_id']}"
            if not all(state.isfinite().all() for state in states.values()):
                hint = "; float16 overflows in this target, --dtype bfloat16 does not" if model.dtype == torch.float16 else ""
                say(f"{name}: states that are not finite, skipped{hint}")
                skipped["non-finite states"] += 1
                continue
            teach = sample["loss_mask"][1:].nonzero()[:, 0]  # rows whose next token is supervised
            chosen, ids, logprobs = choices(model.target, model.lm_head, last[n, :length], teach.to(model.device), args.candidates)
            sample["target_argmax"] = chosen.to("cpu", torch.int32)
            if args.candidates:
                sample |= {"teacher_rows": teach, "teacher_ids": ids.to("cpu", torch.int32),
                           "teacher_logprobs": logprobs.to("cpu", torch.bfloat16)}
                del states["last_hidden_state"]
            for key, state in states.items():
                stored, scale = store_states(state, state.shape[1] // model.target.hidden_size, STORE[args.store])
                sample[key] = stored.to("cpu")
                if scale is not None:
                    sample[SCALES[key]] = scale.to("cpu")
                elif not sample[key].isfinite().all():
                    raise UserError(f"{name}: a state of {state.abs().max():.0f} does not fit into --store fp16; take bf16")
            kept.append(sample)
        if progress:
            progress.update(sum(len(sample["input_ids"]) for sample in batch))
    return sorted(kept, key=lambda sample: (sample["sample_id"], sample["turn_id"]))


def resume(old, manifest, args):
    """Take over the finished blocks of `old`, the manifest on disk, into `manifest`. Raises UserError when settings differ."""
    free_keys = {"done", "complete", "versions", "shards", "empty_blocks", "forced", "format", "target"}
    pairs = [(key, old.get(key), manifest[key], key in ("tokenizer_sha256", "chat_template_sha256"))
             for key in manifest if key not in free_keys]
    pairs += [(f"target {key}", old["target"].get(key), manifest["target"][key], True) for key in ("tensors_sha256", "text_config_sha256")]
    for key, before, now, forcible in pairs:
        if before == now:
            continue
        if not (forcible and args.force):
            raise UserError(f"{args.out} was begun with {key} {short(before)}, this command has {short(now)}; give the settings it "
                            f"was begun with, or another --out")
        manifest["forced"].append(key)
        say(f"forced: {args.out} was begun with {key} {short(before)}, now it is {short(now)}")
    manifest["forced"] = sorted({*old.get("forced", []), *manifest["forced"]})
    manifest["empty_blocks"], manifest["versions"] = old["empty_blocks"], old["versions"]
    for entry in old["shards"]:
        path = args.out / entry["file"]
        if not path.exists() or path.stat().st_size != entry["bytes"] or args.verify and sha256_file(path) != entry["sha256"]:
            say(f"{path} is missing or damaged, it is made again")
            continue
        manifest["shards"].append(entry)


def check_space(args, conversations, missing, block_lines, row_bytes):
    need = sum(c["bound"] for c in conversations if c["line"] // block_lines in missing) * row_bytes
    place = next(folder for folder in (args.out.absolute(), *args.out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if need <= free:
        return
    if not args.regenerate:
        raise UserError(f"the shards need {human_bytes(need)} and the disk of {args.out} has {human_bytes(free)} free; give fewer rows "
                        f"(--limit), a smaller --max-length, or another disk")
    say(f"warning: the shards need at most {human_bytes(need)} and the disk of {args.out} has {human_bytes(free)} free")


def sum_up(manifest):
    entries = manifest["shards"] + manifest["empty_blocks"]
    total = {key: sum(entry.get(name, 0) for entry in entries) for key, name in (
        ("read", "read"), ("samples", "samples"), ("tokens", "rows"), ("supervised_tokens", "supervised_tokens"),
        ("heldout_samples", "heldout_samples"))}
    total["skipped"] = dict(sum((Counter(entry["skipped"]) for entry in entries), Counter()))
    return total


def save(manifest, out):
    manifest["done"] = sum_up(manifest)
    write_json(out / MANIFEST, manifest)


def short(value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text[:100]


if __name__ == "__main__":
    run(main)
