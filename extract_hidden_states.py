#!/usr/bin/env python
"""Conversations in, hidden states of the target out: what train_drafter.py learns from.

Reads JSON lines, applies the target's chat template, marks the tokens that the assistant wrote (or, with --regenerate, lets
the target write them anew), runs the target once over every sample and stores the states of three layers and the lm_head's
input in shards with a manifest. The same command again goes on with what is missing, on any number of processes:
    accelerate launch extract_hidden_states.py --target TARGET --data ROWS --out SHARDS
"""

import fcntl
import json
import math
import os
import re
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import torch
from torch import distributed
from torch.nn.utils.rnn import pad_sequence

from common.cli import RANK, Failed, Parser, Progress, UserError, human_bytes, in_range, positive_int, run, say, split_words
from common.conversations import Skip, add_data_arguments, count_text, first_question, longest_sample, prepare, read_rows
from common.decode import decode, random_numbers, sampling_settings
from common.files import STRAY, TEMPORARY, check_output_folder, lock_folder, read_json, sha256_file, write_json
from common.rendering import Renderer, chat_ids
from common.sglang import SGLang, server_command
from common.shards import (
    ACKNOWLEDGED,
    FORMAT,
    FREE,
    MANIFEST,
    SCALES,
    STORE,
    TEACHER,
    acknowledged,
    bytes_per_token,
    fitting,
    read_manifest,
    settings_sha256,
    shard_name,
    store_states,
    stored_tensors,
    write_shard,
)
from common.target import chat_template_sha256, choices, end_ids, load_tokenizer, open_target, parse_layers, stop_ids, tokenizer_sha256
from common.target_model import TargetModel

BLOCK_LINES, BLOCK_BYTES = 512, 2 << 30  # a block is computed in memory and redone whole after an interruption


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--target", required=True, help="folder of a Hugging Face model, or a hub id")
    add("--data", required=True, help="JSON lines (README lists the kinds of rows); - is stdin")
    add("--out", required=True, type=Path, help="folder for the shards: new, empty, or one that this command began")
    add_data_arguments(parser)
    add("--backend", choices=["hf", "sglang"], default="hf", help="what runs the target: default hf, transformers; sglang, a stock "
        "engine in this process, faster for large targets")
    add("--server-url", metavar="URL", help="of a running SGLang, with --backend sglang; --dry-run prints the command that starts one. "
        "Default none: an engine in this process")
    add("--states-folder", type=Path, metavar="DIR", help="where the states of that SGLang pass, as this machine sees it; default: where "
        "the server says it writes, or memory")
    add("--server-arguments", default="", metavar="TEXT", help="more arguments of sglang.launch_server, like '--tp 8'; default none")
    add("--regenerate", action="store_true",
        help="let the target write the answers: a drafter learns what the target says, and that is what it will be asked to guess")
    add("--max-new-tokens", type=positive_int, default=512, metavar="N", help="longest answer with --regenerate: most chats end before")
    add("--layers", default="auto", help="three HF hidden_states indices like 2,15,27; default auto, [2, n/2, n-3], as the engines "
        "capture by themselves")
    add("--store", choices=list(STORE), default="fp8", help="dtype of the states on disk; default fp8, float8_e4m3fn with a scale for each "
        "state: half of bf16, and drafters learn as much from it (docs/extraction.md)")
    add("--teacher", choices=["states", "compact"], default="compact", help="what training learns from beside the three layers' states; "
        "default compact: the likeliest tokens' log-probabilities at supervised rows, which spare training the product with the "
        "target's lm_head, too. states: the lm_head's input, from which its whole distribution can be computed")
    add("--candidates", type=in_range(8, low_too=True, kind=int), default=64, metavar="C", help="tokens of the compact teacher; default "
        "64: 16 did as well, and the rest is a hundredth of the states")
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
    add("--max-disk-gb", type=in_range(0, 1e9), metavar="GB", help="for train_drafter.py --follow, which trains meanwhile: held-out "
        "samples come first, extraction pauses when so many GB are there, and removes what the training has read; default none: all "
        "shards stay")
    add("--verify", action="store_true", help="when going on, check the sha256 of the finished shards and redo damaged ones")
    add("--dry-run", action="store_true", help="print samples, tokens, bytes and expected hours and stop; touches nothing. The hours are "
        "from a short trial with --backend hf, for which it loads the target")
    add("--trust-remote-code", action="store_true", help="run code that comes with the target")
    add("--revision", metavar="NAME", help="of a hub id; default its main one")
    add("--force", action="store_true", help="go on although target, tokenizer or template changed since these shards were begun")
    return parser.parse_args()


def main():
    args = parse_args()
    started = time.monotonic()
    args.server_arguments = split_words("--server-arguments", args.server_arguments)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and args.data == "-":
        raise UserError(f"--data - can be read by one process, and there are {processes}; give a file")
    for key in ("server_url", "states_folder", "server_arguments"):
        if getattr(args, key) and args.backend != "sglang":
            raise UserError(f"--{key.replace('_', '-')} is for --backend sglang; give that too")
    if args.backend == "sglang" and not args.server_url and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise UserError("several processes would each start an SGLang on the same GPUs; start one, with --server-arguments '--tp "
                        "N' for N GPUs, or give --server-url")
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
    supervised = tokens if args.regenerate else sum(sum(c["loss_mask"]) for c in conversations)  # at most
    args.candidates = min(args.candidates, target.vocab_size) if args.teacher == "compact" else 0
    args.max_batch_tokens = args.max_batch_tokens or (32768 if torch.cuda.is_available() else 4096)
    row_bytes = bytes_per_token(target.hidden_size, args.store, args.candidates, supervised / tokens)
    begun = read_manifest(args.out) if (args.out / MANIFEST).exists() else None
    longest = bytes_per_token(target.hidden_size, args.store, args.candidates) * max(c["bound"] for c in conversations)
    room = None if args.max_disk_gb is None else int(args.max_disk_gb * 1e9)
    fit = int(min(BLOCK_BYTES, BLOCK_BYTES if room is None else room / 10) / longest)
    args.block_lines = args.block_lines or (begun and begun["block_lines"]) or max(1, min(BLOCK_LINES, fit))
    by_block, aside_blocks = lay_out(conversations, lines, args.block_lines, room is not None)
    blocks = len(by_block)
    planned = {"lines": lines, "blocks": blocks, "samples": sum(c["samples"] for c in conversations), "tokens": tokens}
    if room is not None:
        planned |= plan_room(by_block, aside_blocks, room, target.hidden_size, args)
    at_most = "at most " if args.regenerate else ""
    at_a_time = room and f", {human_bytes(room)} at a time: {aside_blocks} with held-out samples and {fitting(planned)} others" or ""
    say(f"{len(conversations)} of {len(rows)} rows, {at_most}{tokens} tokens, {at_most}{row_bytes:.0f} bytes per token, "
        f"{at_most}{human_bytes(tokens * row_bytes)} in {blocks} shards{at_a_time}, "
        f"{human_bytes(free_space(args.out))} free; skipped: {count_text(reasons) or 'none'}")
    for what, turns in notes.items():
        say(f"{turns} {what}")
    manifest = {
        "format": FORMAT, "target": target.facts(), "layers": layers, "dtype": str(STORE[args.store]).removeprefix("torch."),
        "stored": stored_tensors(args.teacher), "candidates": args.candidates, "tokenizer_sha256": tokenizer_sha256(target.folder),
        "chat_template_sha256": chat_template_sha256(tokenizer),
        "template_kwargs": args.template_kwargs, "system": args.system, "sampling": sampling, "max_length": max_length,
        "data_sha256": data_sha256, "max_disk_gb": args.max_disk_gb, "block_lines": args.block_lines, "heldout": args.heldout,
        "compute_dtype": args.dtype, "backend": args.backend, "sources": sources,
        "special_ids": {"eos": end_ids(target, tokenizer), "chat": chat_ids(tokenizer)},
        "batches": {"max_batch_tokens": args.max_batch_tokens, "generate_rows": args.generate_rows},
        "planned": planned, "done": {}, "complete": False, "forced": [],
        "versions": {"python": python_version(), **{name: version(name) for name in ("torch", "transformers", "safetensors")}},
        "shards": [], "empty_blocks": [], "run": os.urandom(8).hex(),
    }
    if begun:
        check_same(begun, manifest, args)
    if args.dry_run:
        finished = {entry["block"] for entry in intact(begun, args)} if begun else set()
        left, hours = [c for block in by_block if block not in finished for c in by_block[block]], None
        if begun:
            say(f"{len(finished)} of {blocks} shards are finished")
        if args.backend == "sglang":
            folder = args.states_folder or args.out.absolute().with_name(f"{args.out.name}-states")
            say("a server for --server-url, with a folder that both sides see: " + server_command(
                target, layers, args.dtype, max_length, folder, args.server_arguments, args.trust_remote_code))
        elif RANK == 0 and left:
            with open_backend(args, target, layers, max_length) as backend:
                hours = expect(backend, left, renderer, sampling, args, processes)
        return {"dry_run": True, "samples": sum(c["samples"] for c in conversations), "skipped": dict(reasons), "tokens": tokens,
                "supervised_tokens": None if args.regenerate else supervised, "bytes": int(tokens * row_bytes),
                "bytes_per_token": row_bytes, "hours": hours, "seconds": time.monotonic() - started, "tokens_per_second": None,
                "shards": blocks, "finished": len(finished), "out": str(args.out)}

    with ExitStack() as held:
        group = device = None
        if processes > 1:
            from accelerate import PartialState

            group = PartialState(timeout=timedelta(days=1))  # what rank 0 looks through below may be large
            device = group.device
            agree(manifest)
        if begun and RANK == 0:
            held.enter_context(begin(manifest, begun, args))
        if group:
            group.wait_for_everyone()
            group.destroy_process_group()
            if begun and RANK != 0:
                add(manifest, listed(read_manifest(args.out)))
        done_before = sum_up(manifest)
        missing = sorted(by_block.keys() - {entry["block"] for entry in listed(manifest)})
        mine = [block for block in missing if block % processes == RANK]
        if begun:
            say(f"{blocks - len(missing)} of {blocks} shards are finished")
        there = sum(path.stat().st_size for path in args.out.glob("shard-*.safetensors"))
        check_space(args, min(sum(c["bound"] for block in missing for c in by_block[block]) * row_bytes, (room or math.inf) - there))
        if mine:
            backend = held.enter_context(open_backend(args, target, layers, max_length, device))
            if RANK == 0:
                if not begun:
                    held.enter_context(begin(manifest, begun, args))
                expect(backend, [c for block in missing for c in by_block[block]], renderer, sampling, args, processes)
            else:
                follow(manifest, args.out)
                held.enter_context(lock_folder(args.out, "written", shared=True))
            extract(manifest, mine, by_block, skipped, renderer, backend, args)
        if RANK != 0:
            return {}
        spoke = time.monotonic()
        while left := len(by_block.keys() - {entry["block"] for entry in listed(manifest)}):
            if time.monotonic() - spoke > 60:
                spoke = time.monotonic()
                say(f"{left} blocks are still being made by other processes")
            time.sleep(0.2)
            take_over(manifest, args.out)
            remove_read(args.out, manifest)
        if not manifest["shards"]:
            raise UserError(f"none of the samples could be kept ({count_text(Counter(sum_up(manifest)['skipped']))}); there is nothing to "
                            f"train on")
        manifest["complete"] = True
        del manifest["run"]  # only to tell running commands apart
        save(manifest, args.out)
        remove_journals(args.out)
    done, seconds = manifest["done"], time.monotonic() - started
    if cut := done["answers_cut"]:
        say(f"{cut} of {done['samples']} answers were cut at --max-new-tokens or --max-length")
    say(f"{args.out} is complete: {done['samples']} samples, {done['tokens']} tokens")
    row_bytes = bytes_per_token(target.hidden_size, args.store, args.candidates, done["supervised_tokens"] / done["tokens"])
    return {**done, "bytes": sum(entry["bytes"] for entry in manifest["shards"]), "bytes_per_token": row_bytes, "seconds": seconds,
            "tokens_per_second": (done["tokens"] - done_before["tokens"]) / seconds, "shards": len(manifest["shards"]),
            "dropped_or_cut": dict(notes), "forced": manifest["forced"], "out": str(args.out)}


def extract(manifest, mine, by_block, skipped_rows, renderer, backend, args):
    """Compute the blocks `mine`. Each is written by a thread while the next one is computed."""
    parts = [by_block[block] for block in mine]
    total = sum(c["samples"] if args.regenerate else c["bound"] for part in parts for c in part)
    progress = Progress(total, "answers" if args.regenerate else "tokens", "extracting")
    own, writing = [], None
    with ThreadPoolExecutor(1) as writer:
        first = manifest["planned"].get("heldout_blocks", 0)
        for block, part in zip(mine, parts, strict=True):
            skipped = Counter(reason for line, reason in skipped_rows if first + line // manifest["block_lines"] == block)
            read = len(part) + skipped.total()
            if args.regenerate:
                samples, cut = write_answers(backend, renderer, part, manifest["sampling"], manifest["max_length"], skipped, progress)
            else:
                cut = 0
                samples = [sample_of(c, c["input_ids"], c["loss_mask"]) for c in part]
            samples = add_states(backend, samples, args, skipped, None if args.regenerate else progress)
            if writing:
                writing.result()  # no more than two blocks are in memory
            wait_for_room(manifest, block, args.out)
            facts = {"block": block, "read": read, "skipped": dict(skipped), "cut": cut}
            writing = writer.submit(write, manifest, own, samples, facts, args.out)
        writing.result()
    progress.close()


def lay_out(conversations, lines, block_lines, followed):
    """({block: its conversations}, how many held-out blocks come first): a block is so many lines in order; for a training that follows,
    held-out samples have blocks of their own, which come first and stay."""
    aside = [c for c in conversations if followed and c["heldout"]]
    first = -(-len(aside) // block_lines)
    by_block = {block: [] for block in range(first - (-lines // block_lines))}
    for number, conversation in enumerate(aside):
        by_block[number // block_lines].append(conversation)
    for conversation in conversations:
        if not followed or not conversation["heldout"]:
            by_block[first + conversation["line"] // block_lines].append(conversation)
    return by_block, first


def plan_room(by_block, aside_blocks, room, hidden, args):
    """What the manifest states for --max-disk-gb, room in bytes: what each block takes at most, and what the held-out ones leave."""
    def most(part):
        tokens = sum(c["bound"] for c in part)
        taught = tokens if args.regenerate else sum(sum(c["loss_mask"]) for c in part)
        rows = tokens and tokens * bytes_per_token(hidden, args.store, args.candidates, taught / tokens)
        return int(rows) + 64 * sum(c["samples"] for c in part) + 4096  # and a shard's index and header

    sizes = [most(part) for part in by_block.values()]
    aside = [c for block in range(aside_blocks) for c in by_block[block]]
    kept, largest = sum(sizes[:aside_blocks]), max(sizes[aside_blocks:])
    if kept > room / 2:
        raise UserError(f"the held-out samples stay and take {human_bytes(kept)}, --max-disk-gb {args.max_disk_gb:g} is "
                        f"{human_bytes(room)}, of which they may take half; give a lower --heldout than {args.heldout:g}, or more disk")
    if largest > (room - kept) / 4:
        raise UserError(f"a shard takes up to {human_bytes(largest)} and --max-disk-gb {args.max_disk_gb:g} leaves "
                        f"{human_bytes(room - kept)} beside the held-out samples, of which it may take a quarter; give fewer "
                        f"--block-lines, or more disk")
    return {"heldout_blocks": aside_blocks, "heldout_samples": sum(c["samples"] for c in aside),
            "heldout_tokens": sum(c["bound"] for c in aside), "room": room - kept, "block_bytes": sizes}


def write(manifest, own, samples, facts, out):
    need = sum(value.nbytes for sample in samples for value in sample.values() if torch.is_tensor(value))
    free = shutil.disk_usage(out).free
    if free < 1.05 * need + (1 << 20):
        raise Failed(f"the disk of {out} has {human_bytes(free)} left and the next shard needs {human_bytes(need)}; make room and give "
                     f"the same command again")
    record(manifest, {**(write_shard(out, facts["block"], samples) or {}), **facts}, own, out)


def sample_of(conversation, ids, mask, turn=0):
    return {"input_ids": torch.tensor(ids, dtype=torch.int32), "loss_mask": torch.tensor(mask, dtype=torch.uint8),
            "sample_id": conversation["line"], "turn_id": turn, "source_id": conversation["source_id"], "heldout": conversation["heldout"]}


def write_answers(backend, renderer, conversations, sampling, max_length, skipped, progress):
    """(Samples of the answers that the target writes, turn by turn, each in the context of its own earlier answers; how many were cut
    by a limit)."""
    samples, written, cut, start = [], 0, 0, time.monotonic()

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
        seeds = [int(random_numbers(sampling["seed"], [conversation["line"], turn], 1)[0] * 2**31) for conversation, turn, _ in jobs]
        answers = backend.answer(prompts, limits, sampling, seeds, finished)
        cut += sum(answer[-1] not in sampling["stop_ids"] for answer in answers)
        for (conversation, turn, prompt), answer in zip(jobs, answers, strict=True):
            samples.append(sample_of(conversation, prompt + answer, [0] * len(prompt) + [1] * len(answer), turn))
            conversation["messages"][conversation["messages"].index(None)] = renderer.message(answer)
    return samples, cut


def add_states(backend, samples, args, skipped, progress):
    """The samples with their states, by line and turn, in batches of like length."""
    samples = sorted(samples, key=lambda sample: (-len(sample["input_ids"]), sample["sample_id"], sample["turn_id"]))
    kept = []
    batches = []
    while samples:
        count = max(1, args.max_batch_tokens // len(samples[0]["input_ids"]))
        batches.append(samples[:count])
        samples = samples[count:]
    here = args.backend == "hf" and backend.device.type == "cpu"  # nothing is won where both would share the cores
    computed = (map if here else ahead)(backend.states, map(ids_of, batches))
    for batch, states in zip(batches, computed, strict=True):
        kept += pack(backend, batch, states, args, skipped)
        if progress:
            progress.update(sum(len(sample["input_ids"]) for sample in batch))
    return sorted(kept, key=lambda sample: (sample["sample_id"], sample["turn_id"]))


def ids_of(batch):
    return [sample["input_ids"].tolist() for sample in batch]


def ahead(function, values):
    """function(value) of each value, in order; the next one is computed by a thread meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        coming = None
        for value in values:
            coming, done = pool.submit(function, value), coming
            if done:
                yield done.result()
        if coming:
            yield coming.result()


def pack(backend, batch, states, args, skipped):
    """The samples with what is stored of their states, a list of (aux [T, 3H], last [T, H]), on the CPU.

    Samples with states that are not finite are named, counted in `skipped` and left out. Raises UserError when --store overflows.
    """
    aux, last = zip(*states, strict=True)
    states = {"aux_hidden_states": torch.cat(aux), "last_hidden_state": torch.cat(last)}  # [N, 3H], [N, H]: rows of all samples
    lengths = [len(sample["input_ids"]) for sample in batch]
    names = [f"line {sample['sample_id'] + 1}, turn {sample['turn_id']}" for sample in batch]
    finite = per_sample(states, lengths)
    mask = torch.cat([sample["loss_mask"] for sample in batch])
    teach = mask[1:].nonzero()[:, 0]  # rows whose next token is supervised; no sample's first one ever is
    chosen, ids, logprobs = choices(backend.target, backend.lm_head, states["last_hidden_state"], teach.to(backend.device), args.candidates)
    made = {"target_argmax": chosen.int()}
    if args.candidates:
        taught = [int(sample["loss_mask"].sum()) for sample in batch]
        made |= {"teacher_ids": ids.int(), "teacher_logprobs": logprobs.bfloat16()}
        del states["last_hidden_state"]
    for key, state in states.items():
        made[key], scale = store_states(state, state.shape[1] // backend.target.hidden_size, STORE[args.store])
        if scale is not None:
            made[SCALES[key]] = scale
        elif args.store == "fp16":
            for name, good, fits in zip(names, finite, per_sample({key: made[key]}, lengths), strict=True):
                if good and not fits:
                    raise UserError(f"{name}: a state of {state.nan_to_num(0, 0, 0).abs().max():.0f} does not fit into --store fp16; take "
                                    f"bf16")
    made = {name: value.to("cpu").split(taught if name in TEACHER else lengths) for name, value in made.items()}
    kept = []
    for n, sample in enumerate(batch):
        if not finite[n]:
            hint = "; float16 overflows in this target, --dtype bfloat16 does not" if backend.dtype == torch.float16 else ""
            say(f"{names[n]}: states that are not finite, skipped{hint}")
            skipped["non-finite states"] += 1
            continue
        if args.candidates:
            sample["teacher_rows"] = sample["loss_mask"][1:].nonzero()[:, 0]
        kept.append({**sample, **{name: value[n] for name, value in made.items()}})
    return kept


def per_sample(states, lengths):
    """Whether all of each sample's states are finite, a list of bools."""
    rows = torch.stack([state.isfinite().all(1) for state in states.values()]).all(0).cpu()  # [N]
    return [bool(part.all()) for part in rows.split(lengths)]


def expect(backend, conversations, renderer, sampling, args, processes):
    """Say how long `conversations` will take, at most where answers are written, by a short trial with some of them. Returns hours."""
    some, room = [], args.max_batch_tokens // 4
    count = min(args.generate_rows, args.block_lines)  # at once
    for conversation in conversations[:: max(1, len(conversations) // count)][:count]:
        ids = conversation.get("input_ids") or renderer.prompt_ids(first_question(conversation), conversation["tools"])
        if some and len(ids) > room:
            break
        room -= len(ids)
        some.append(sample_of(conversation, ids, conversation.get("loss_mask") or [0] + [1] * (len(ids) - 1)))
    seconds, spent = 0.0, time.monotonic()
    if sampling:
        prompts, trial = [sample["input_ids"].tolist() for sample in some], {}
        for limit in (1, 1, 9):  # the first token takes the prompt's forward pass besides; the very first call is slower
            start = time.monotonic()
            answers = backend.answer(prompts, [limit] * len(prompts), sampling, [0] * len(prompts))
            trial[limit] = time.monotonic() - start, sum(map(len, answers))
        (first, _), (both, count) = trial[1], trial[9]
        count -= len(some)
        token = (both - first) / count if count else 0.0
        answers = sum(c["samples"] for c in conversations)
        seconds = answers * first / len(some) + answers * args.max_new_tokens * max(token, 0.0)
    start = time.monotonic()
    pack(backend, some, backend.states(ids_of(some)), args, Counter())
    rate = sum(len(sample["input_ids"]) for sample in some) / (time.monotonic() - start)
    seconds = (seconds + sum(c["bound"] for c in conversations) / rate) / processes
    words = f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} s"
    writes = f" and {1 / token:.0f} tokens/s of answers" if sampling and token > 0 else ""
    bound = f", if all answers take {args.max_new_tokens} tokens" if sampling else ""
    say(f"this will take about {words}{bound} ({rate:.0f} tokens/s of states{writes} in a trial of {len(some)} "
        f"samples, {time.monotonic() - spent:.1f} s{f'; {processes} processes' if processes > 1 else ''})")
    return seconds / 3600


def free_space(out):
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    return shutil.disk_usage(place).free


def check_space(args, need):
    free = free_space(args.out)
    if need <= free:
        return
    if not args.regenerate:
        raise UserError(f"the shards need {human_bytes(need)} and the disk of {args.out} has {human_bytes(free)} free; give fewer rows "
                        f"(--limit), a smaller --max-length{', a smaller --max-disk-gb' if args.max_disk_gb else ''}, or another disk")
    say(f"warning: the shards need at most {human_bytes(need)} and the disk of {args.out} has {human_bytes(free)} free")


class Transformers:
    """The target in transformers; a context manager.

    Its answers, its states and its lm_head, a function of [n, H] to [n, V], are all that an extraction needs. `dtype` is that of the
    states, `device` where they lie.
    """

    def __init__(self, target, layers, dtype, most, batch_tokens, device=None, trust_remote_code=False):
        """most: answers written at once. batch_tokens: of their prompts' forward passes."""
        self.model = TargetModel(target, layers, dtype, device, trust_remote_code)
        self.model.check_logits()
        self.target = target
        self.dtype, self.device, self.lm_head = self.model.dtype, self.model.device, self.model.lm_head
        self.most, self.batch_tokens = most, batch_tokens

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def answer(self, prompts, limits, sampling, seeds, report=lambda ids: None):
        """The target's answers to prompts: lists of ids, the end token included, each cut at its limit. The random numbers of each
        depend on its seed alone. report(ids) is called with each answer as it ends."""
        drawn = [random_numbers(seed, [], limit) for seed, limit in zip(seeds, limits, strict=True)]
        group = decode(self.model, prompts, limits, set(sampling["stop_ids"]), sampling=sampling, most=self.most,
                       numbers=lambda n, first, count: drawn[n][first : first + count], prefill_tokens=self.batch_tokens, report=report)
        return [answer.ids for answer in group.answers]

    def states(self, samples):
        """[(aux [T, 3H], last [T, H])] of id lists, in one forward pass, padded on the right."""
        ids = pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True).to(self.device)  # [B, T]
        aux, last = self.model.states(ids)  # [B, T, 3H], [B, T, H]
        return [(aux[n, : len(sample)], last[n, : len(sample)]) for n, sample in enumerate(samples)]


def open_backend(args, target, layers, max_length, device=None):
    """What args.backend names, ready to run. Raises UserError when it cannot."""
    if args.backend == "hf":
        return Transformers(target, layers, args.dtype, args.generate_rows, args.max_batch_tokens, device, args.trust_remote_code)
    return SGLang(target, layers, args.dtype, max_length, args.server_url, args.states_folder, args.server_arguments,
                  args.trust_remote_code)


FLAGS = {"dtype": "--store", "compute_dtype": "--dtype", "stored": "--teacher", "data_sha256": "--data and --limit, with hash",
         "max_disk_gb": "--max-disk-gb"}
COUNTS = ("rows", "samples", "bytes", "supervised_tokens", "heldout_samples")


def check_same(begun, manifest, args):
    """Refuse to go on with `begun`, the manifest on disk, under other settings. What --force lets pass is said and listed."""
    pairs = [(key, begun.get(key), manifest[key], key in ("tokenizer_sha256", "chat_template_sha256"))
             for key in manifest if key not in {*FREE, "planned"}]
    pairs.append(("planned blocks", begun["planned"]["blocks"], manifest["planned"]["blocks"], False))
    pairs += [(f"target {key}", begun["target"].get(key), manifest["target"][key], True)
              for key in ("tensors_sha256", "text_config_sha256", "sample_sha256") if key in begun["target"]]
    if begun.get("batches") != manifest["batches"]:
        say(f"{args.out} was begun with batches {short(begun.get('batches'))}, now they are {short(manifest['batches'])}: what is computed "
            f"from here on is rounded otherwise, and of answers in bfloat16 some may be others")
    for key, before, now, forcible in pairs:
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):  # only what differs
            before, now = ({name: part[name] for name in part if before.get(name) != now.get(name)} for part in (before, now))
        key = FLAGS.get(key, key)
        if not (forcible and args.force):
            raise UserError(f"{args.out} was begun with {key} {short(before)}, this command has {short(now)}; give the settings it "
                            f"was begun with, or another --out")
        manifest["forced"].append(key)
        say(f"forced: {args.out} was begun with {key} {short(before)}, now it is {short(now)}")
    manifest["forced"] = sorted({*begun.get("forced", []), *manifest["forced"]})
    manifest["versions"] = begun["versions"]


def agree(manifest):
    """All processes of a command: give the manifest the `run` of rank 0. Raises UserError where their settings or data differ."""
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, (manifest["run"], settings_sha256(manifest)))  # accelerate's gathers nothing on CPUs
    if len({found for _, found in everyone}) > 1:
        raise UserError("the processes of this command have different settings, data or targets; give all of them the same")
    manifest["run"] = everyone[0][0]


def follow(manifest, out):
    """Another rank, while rank 0 loads the target: wait for its manifest. Raises Failed when another command has begun the folder."""
    while not (out / MANIFEST).exists():
        time.sleep(0.1)
    if read_json(out / MANIFEST).get("run") != manifest["run"]:
        raise Failed(f"another command has begun {out} meanwhile; give this one again when it is done")


def begin(manifest, begun, args):
    """Rank 0, before any process computes: lock the folder, remove what a killed run left half-written, take over what is finished.

    Returns the lock, an open file. All processes of a command share it, so that another one waits for the last of them.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(args.out, "written")
    if not begun and (args.out / MANIFEST).exists():
        raise UserError(f"--out {args.out} was begun by another command just now; give the same command again")
    for stray in args.out.iterdir():
        if TEMPORARY.match(stray.name) or STRAY.fullmatch(stray.name):
            stray.unlink()
    if begun:
        begun = read_manifest(args.out)  # once more, now that nobody else changes it
        blocks = manifest["planned"]["blocks"]
        wrong = sum(not usable(entry, blocks) for entry in listed(begun))
        if wrong or len({entry["block"] for entry in listed(begun)}) < len(listed(begun)):
            raise UserError(f"{args.out / MANIFEST} lists shards that cannot be this extraction's ({wrong} entries, or one twice): it was "
                            f"changed after it was written; restore it, or give another --out")
        add(manifest, intact(begun, args))
        remove_read(args.out, manifest)
    fcntl.flock(lock, fcntl.LOCK_SH)
    save(manifest, args.out)
    remove_journals(args.out)
    return lock


def intact(begun, args):
    """The entries of the finished blocks whose shards are there, or with --max-disk-gb were read and removed; others are named."""
    blocks, gone = begun["planned"]["blocks"], acknowledged(args.out, begun["planned"])
    return [entry for entry in listed(begun) + journals(args.out, blocks)
            if usable(entry, blocks) and (entry["block"] in gone or whole(entry, args))]


def remove_read(out, manifest):
    """Remove the shards that a training which follows has acknowledged. Returns their blocks, a range."""
    blocks = acknowledged(out, manifest["planned"])
    gone = set(map(shard_name, blocks))
    for path in out.glob("shard-*.safetensors") if gone else ():
        if path.name in gone:
            path.unlink(missing_ok=True)  # another process may be faster
    return blocks


def wait_for_room(manifest, block, out):
    """With --max-disk-gb: wait until the shards from the first unread one to `block` fit. All is decided by planned bytes, so that
    processes need not ask each other. Raises Failed when the training has ended before."""
    planned, spoke = manifest["planned"], time.monotonic() - 55  # a short wait needs no words
    while "room" in planned and block >= planned["heldout_blocks"]:
        read = remove_read(out, manifest)
        first = read.stop
        if sum(planned["block_bytes"][first : block + 1]) <= planned["room"]:
            return
        if (out / ACKNOWLEDGED).exists() and read_json(out / ACKNOWLEDGED).get("finished"):
            raise Failed(f"the training that follows has ended with {len(read)} of "
                         f"{planned['blocks'] - planned['heldout_blocks']} shards read, as its --max-steps said; no more are made")
        if time.monotonic() - spoke > 60:
            spoke = time.monotonic()
            waiting = human_bytes(sum(planned["block_bytes"][first:block]))
            say(f"paused: shards of up to {waiting} wait for train_drafter.py --follow to read them")
        if RANK == 0:
            take_over(manifest, out)
        time.sleep(0.5)


def take_over(manifest, out):
    """Rank 0, while it waits: list what other processes have finished. Training that follows may wait for that very shard."""
    before = len(listed(manifest))
    add(manifest, journals(out, manifest["planned"]["blocks"], manifest["run"]))
    if len(listed(manifest)) > before:
        save(manifest, out)


def whole(entry, args):
    """Whether a finished block's shard is still there, of its size, and with --verify of its hash."""
    path = args.out / entry.get("file", "")
    if path == args.out or path.exists() and path.stat().st_size == entry["bytes"] and not (
            args.verify and sha256_file(path) != entry["sha256"]):
        return True
    say(f"{path} is missing or damaged and is to be made again")
    return False


def listed(manifest):
    """The entries of all finished blocks, those without samples included."""
    return manifest["shards"] + manifest["empty_blocks"]


def usable(entry, blocks):
    """Whether an entry of a manifest or a journal can be of a finished block, of so many."""
    if not isinstance(entry, dict) or type(entry.get("block")) is not int or not 0 <= entry["block"] < blocks:
        return False
    skipped, read = entry.get("skipped"), entry.get("read")
    if not isinstance(skipped, dict) or any(type(count) is not int for count in [read, *skipped.values()]):
        return False
    if "file" not in entry:
        return sum(skipped.values()) >= read
    return entry["file"] == shard_name(entry["block"]) and entry.get("samples") != 0 and all(
        type(entry.get(key)) is int and entry[key] >= 0 for key in COUNTS)


def journals(out, blocks, run=None):
    """The usable entries of all journals, or of those of one `run`; what cannot be read is said, and its blocks are made again."""
    found = []
    for path in sorted(out.glob("journal-*.json")):
        try:
            journal = read_json(path)
        except UserError as error:
            say(f"{error}; what it lists is made again")
            continue
        entries = journal.get("finished") if run in (None, journal.get("run")) else []
        found += [entry for entry in entries if usable(entry, blocks)] if isinstance(entries, list) else []
    return found


def remove_journals(out):
    for path in out.glob("journal-*.json"):
        path.unlink()


def add(manifest, entries):
    """List finished blocks, each once, in order."""
    found = {entry["block"]: entry for entry in entries + listed(manifest)}
    entries = [found[block] for block in sorted(found)]
    manifest["shards"] = [entry for entry in entries if "file" in entry]
    manifest["empty_blocks"] = [entry for entry in entries if "file" not in entry]


def record(manifest, entry, own, out):
    """A block is finished. own: the entries of this process since it began."""
    own.append(entry)
    if RANK != 0:
        write_json(out / f"journal-{RANK}.json", {"run": manifest["run"], "finished": own})
        return
    add(manifest, [entry, *journals(out, manifest["planned"]["blocks"], manifest["run"])])
    save(manifest, out)


def save(manifest, out):
    manifest["done"] = sum_up(manifest)
    write_json(out / MANIFEST, manifest)


def sum_up(manifest):
    entries = listed(manifest)
    total = {key: sum(entry.get(name, 0) for entry in entries) for key, name in (
        ("read", "read"), ("samples", "samples"), ("tokens", "rows"), ("supervised_tokens", "supervised_tokens"),
        ("heldout_samples", "heldout_samples"), ("answers_cut", "cut"))}
    total["skipped"] = dict(sum((Counter(entry["skipped"]) for entry in entries), Counter()))
    return total


def short(value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text[:100]


if __name__ == "__main__":
    run(main)
