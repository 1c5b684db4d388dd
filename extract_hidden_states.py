#!/usr/bin/env python
"""Conversations in, hidden states of the target out: what train_drafter.py learns from.

Reads JSON lines, applies the target's chat template, marks the tokens that the assistant wrote (or, with
--regenerate, lets the target write them anew), runs the target once over every sample and stores the states
of three layers, and what the target would say next, in shards with a manifest. The same command again goes on
with what is missing, on any number of processes:
    accelerate launch extract_hidden_states.py --target TARGET --data ROWS --out SHARDS
"""

import fcntl
import json
import math
import os
import re
import shutil
import time
from argparse import Namespace
from bisect import bisect
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from platform import python_version

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed
from torch.nn.utils.rnn import pad_sequence

from common.cli import (
    RANK,
    Failed,
    Parser,
    Progress,
    UserError,
    human_bytes,
    in_range,
    positive_int,
    reminder,
    run,
    say,
    split_words,
)
from common.conversations import (
    Skip,
    add_data_arguments,
    count_text,
    first_question,
    longest_sample,
    prepare,
    read_rows,
)
from common.decode import decode, not_applied, random_numbers, sampling_settings
from common.files import (
    STRAY,
    TEMPORARY,
    append_sealed,
    check_output_folder,
    lock_folder,
    read_sealed,
    replace_file,
    sha256_file,
    sha256_tensors,
    write_sealed,
)
from common.plan import say_storages, serving_size, storages, weight_bits
from common.provenance import target_record
from common.rendering import Renderer, chat_ids
from common.sglang import SGLang, server_command
from common.shards import (
    ACKNOWLEDGED,
    CANDIDATES,
    FORMAT,
    FREE,
    JOURNAL,
    MANIFEST,
    SCALES,
    STORE,
    TEACHER,
    Journals,
    acknowledged,
    add,
    bytes_per_token,
    finished,
    fitting,
    read_manifest,
    settings_sha256,
    shard_name,
    store_states,
    stored_tensors,
    write_shard,
)
from common.target import (
    Target,
    choices,
    end_ids,
    load_tokenizer,
    open_target,
    parse_layers,
    stop_ids,
)
from common.target_model import TargetModel, check_capture, fp8_kernels

PLACE = itemgetter("sample_id", "turn_id")
# A block, the lines of one shard, is computed in memory and redone whole after an interruption.
BLOCK_LINES, BLOCK_BYTES = 512, 2 << 30
# Of large data, --generate-rows times as many answers make a group: places that are free are taken again, and
# few idle while the last ones end. MANY: so many groups there must then be, for processes to share.
ROUNDS, MANY = 4, 256
ANSWERS = "answers-{}-{}.safetensors"  # of a group of blocks, its first and last, until all have states


def parse_args():
    usage = "%(prog)s --target MODEL --data ROWS --out SHARDS [--regenerate] [options]"
    parser = Parser(__doc__, usage)
    add = parser.add_argument_group("what everyone gives").add_argument
    add("--target", required=True, metavar="MODEL", help="folder of a Hugging Face model, or a hub id")
    add("--data", required=True, metavar="ROWS", help="JSON lines (README lists the kinds); - is stdin")
    add("--out", type=Path, metavar="SHARDS",
        help="folder for the shards: new, empty, or one that this command began; not needed for --dry-run")

    add_data_arguments(parser.add_argument_group("samples"))

    add = parser.add_argument_group("answers").add_argument
    add("--regenerate", action="store_true",
        help="let the target write the answers: a drafter learns what the target says, and that is what it "
             "will be asked to guess; default off, those of the rows")
    add("--max-new-tokens", type=positive_int, default=512,
        help="longest answer; default 512: most chats end before")
    add("--temperature", default="0", metavar="T",
        help="of the answers; default 0, greedy, what a drafter guesses best; config: what the target's "
             "generation config says")
    add("--top-p", type=float, default=1.0, metavar="P",
        help="for temperature > 0; default 1, which keeps everything")
    add("--top-k", type=int, default=0, metavar="K",
        help="for temperature > 0; default 0, which keeps everything")
    add("--seed", type=int, default=0,
        help="of the sampled answers; with line and turn it fixes each answer's random numbers; default 0")

    add = parser.add_argument_group("what is stored").add_argument
    add("--layers", default="auto",
        help="three HF hidden_states indices like 2,15,27; default auto, [2, n/2, n-3], as the engines "
             "capture by themselves")
    add("--store", choices=list(STORE), default="fp8",
        help="dtype of the states on disk; default fp8, float8_e4m3fn with a scale for each state: half of "
             "bf16, and drafters learn as much from it (docs/extraction.md)")
    add("--teacher", choices=["states", "compact"], default="compact",
        help="what training learns from beside the three layers' states; default compact: the likeliest "
             "tokens' log-probabilities at supervised rows, which spare training the product with the "
             "target's lm_head, too. states: the lm_head's input, from which its whole distribution can be "
             "computed")

    add = parser.add_argument_group("what runs the target").add_argument
    add("--backend", choices=["hf", "sglang"], default="hf",
        help="default hf, transformers, which needs nothing else; sglang: a stock SGLang, faster for large "
             "targets")
    add("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto",
        help="of the target; default auto, that of its files, as it is served")
    add("--server-url", metavar="URL",
        help="of a running SGLang; --dry-run prints the command that starts one; default none: an engine in "
             "this process")
    add("--states-folder", type=Path, metavar="DIR",
        help="where the states of that SGLang pass, as this machine sees it; default where the server says "
             "it writes, or memory")
    add("--server-arguments", type=lambda text: split_words("--server-arguments", text), default=[],
        metavar="TEXT", help="more arguments of sglang.launch_server, like '--tp 8'; default none")

    add = parser.add_argument_group("folder and going on").add_argument
    add("--max-disk-gb", type=in_range(0, 1e9), metavar="GB",
        help="for train_drafter.py --follow, which trains meanwhile: held-out samples come first, extraction "
             "pauses when so many GB are there, and removes what the training has read; default none: all "
             "shards stay")
    add("--dry-run", action="store_true",
        help="print samples, tokens, bytes and expected hours and stop; touches nothing. The hours are from "
             "a short trial with --backend hf, for which it loads the target; a folder without weights is "
             "planned from its config and tokenizer")
    add("--tokens-per-second", type=in_range(0), metavar="X",
        help="for the hours of --dry-run: what is known of the speed of all processes together; default "
             "none: tried")
    add("--gpu-gb", type=in_range(0), default=80, metavar="GB",
        help="memory of one GPU, for the --tp of a server that --dry-run prints; default 80")
    add("--verify", action="store_true",
        help="when going on, check the sha256 of the finished shards and redo damaged ones")
    add("--force", action="store_true",
        help="go on although target, tokenizer or template changed since these shards were begun")

    add = parser.add_argument_group("rarely").add_argument
    add("--block-lines", type=positive_int,
        help=f"input lines of a shard; default {BLOCK_LINES}, fewer where they could pass "
             f"{human_bytes(BLOCK_BYTES)}: it is held in memory")
    add("--max-batch-tokens", type=positive_int,
        help="tokens of a forward pass; default 4096 on a CPU, 32768 on a GPU: full speed, little memory")
    add("--generate-rows", type=positive_int, default=128,
        help="answers written at once, for as many shards as that takes; default 128: more is faster until "
             "memory ends")
    add("--trust-remote-code", action="store_true", help="run code that comes with the target")
    add("--revision", metavar="NAME", help="of a hub id; default its main one")
    return parser.parse_args()


def check_arguments(args, processes):
    """Raises UserError for arguments that exclude each other."""
    if not args.out and not args.dry_run:
        raise UserError("the following arguments are required: --out; --help lists the arguments")
    if args.tokens_per_second and not args.dry_run:
        raise UserError("--tokens-per-second is for --dry-run; give that too, or leave it out")
    if processes > 1 and args.data == "-":
        raise UserError(f"--data - can be read by one process, and there are {processes}; give a file")
    for key in ("server_url", "states_folder", "server_arguments"):
        if getattr(args, key) and args.backend != "sglang":
            raise UserError(f"--{key.replace('_', '-')} is for --backend sglang; give that too")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if args.backend == "sglang" and not args.server_url and here > 1:
        raise UserError("several processes would each start an SGLang on the same GPUs; start one, with "
                        "--server-arguments '--tp N' for N GPUs, or give --server-url")
    if args.out:
        check_output_folder(args.out, MANIFEST)


def main():
    started = time.monotonic()
    args = parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # of this command, on all machines
    check_arguments(args, processes)
    job = open_job(args, processes)
    rows = read(job)
    begun = read_manifest(args.out) if args.out and (args.out / MANIFEST).exists() else None
    if begun and not job.target.weights:
        raise UserError(f"{args.out} holds an extraction, and {args.target} no weights to compare with its "
                        "target; leave --out out, or give the folder with the weights")
    plan = make_plan(rows, begun, job)
    say_plan(rows, plan, job)
    if not job.target.weights:
        return dry_run(None, rows, plan, job, started)
    manifest = new_manifest(rows, plan, job)
    if begun:
        manifest["forced"] = check_same(begun, manifest, args)
        manifest["versions"] = begun["versions"]
    if args.dry_run:
        return dry_run(begun, rows, plan, job, started)

    with ExitStack() as held:  # the lock of the folder, and what runs the target
        group = join(manifest) if processes > 1 else None
        if begun and RANK == 0:
            held.enter_context(begin(manifest, begun, plan, args))
        if group:
            group.wait_for_everyone()
            group.destroy_process_group()
            if begun and RANK != 0:
                add(manifest, finished(read_manifest(args.out)))
        before = sum_up(manifest)
        missing = unfinished(plan, finished(manifest))
        if begun:
            say(f"{len(plan.blocks) - len(missing)} of {len(plan.blocks)} shards are finished")
        check_space(args, space_needed(missing, plan, args))
        mine = [group for number, group in enumerate(plan.groups)
                if number % processes == RANK and not set(group).isdisjoint(missing)]
        if mine:
            backend = held.enter_context(open_backend(job, group and group.device))
            if RANK == 0 and not begun:
                held.enter_context(begin(manifest, None, plan, args))
            hours = 0
            if RANK == 0:
                hours = expect(backend, missing, plan, job)
            else:
                held.enter_context(follow(manifest, args.out))
            extract(manifest, mine, set(missing), plan, backend, job, 3600 * hours)
        if RANK != 0:
            return {}
        wait_for_others(manifest, plan, args.out)
        complete(manifest, args.out)
    return report(manifest, before, rows, job, time.monotonic() - started)


# The plan


@dataclass
class Job:
    """What the flags ask for, settled by what the target says."""

    args: Namespace  # the flags as they were given
    target: Target
    renderer: Renderer
    layers: list  # three HF hidden_states indices
    max_length: int  # tokens of a sample
    sampling: dict | None  # of the answers that the target writes; None: those of the rows are kept
    candidates: int  # of the compact teacher; 0 with --teacher states
    batch_tokens: int  # of a forward pass
    processes: int  # of this command
    warnings: list  # sentences


@dataclass
class Rows:
    """What --data holds."""

    count: int
    lines: int
    sha256: str
    conversations: list  # dicts, see common.conversations.prepare
    skipped: list  # (line, reason) of rows of no use
    notes: Counter  # of turns and samples that are not as the rows have them
    sources: list  # names


@dataclass
class Plan:
    """The work in blocks of lines, one a shard: the same in every process and whenever it is gone on with."""

    blocks: list  # of each its conversations
    skipped: list  # of each a Counter of reasons
    groups: list  # ranges of blocks: what one process makes, whose answers are written together
    block_lines: int
    block_most: int | None  # bytes; None: however many they are, a block is so many lines
    supervised: int  # tokens, where answers are written at most
    row_bytes: float  # of a token on disk
    # `planned` of the manifest: lines, blocks, samples, tokens (at most), and what plan_room adds
    stated: dict


def open_job(args, processes):
    folder = Path(args.target)
    bare = args.dry_run and folder.is_dir() and not any(folder.glob("*.safetensors"))
    target = open_target(args.target, args.revision, args.trust_remote_code, config_only=bare)
    if args.backend == "hf":
        check_capture(target)
    layers = parse_layers(args.layers, target.num_layers)
    max_length = longest_sample(args, target)
    tokenizer = load_tokenizer(target, args.trust_remote_code)
    stops = stop_ids(target, tokenizer)
    sampling = None
    if args.regenerate:
        sampling = {**sampling_settings(target, args.temperature, args.top_p, args.top_k), "seed": args.seed,
                    "max_new_tokens": args.max_new_tokens, "stop_ids": stops}
    renderer = Renderer(tokenizer, args.template_kwargs, stops)
    candidates = min(CANDIDATES, target.vocab_size) if args.teacher == "compact" else 0
    batch_tokens = args.max_batch_tokens or (32768 if torch.cuda.is_available() else 4096)
    warnings = not_applied(target, sampling) if sampling else []
    for warning in warnings:
        say(f"warning: {warning}")
    return Job(args, target, renderer, layers, max_length, sampling, candidates, batch_tokens, processes,
               warnings)


def read(job):
    args = job.args
    rows, lines, sha256 = read_rows(args.data, args.limit)
    if not rows:
        raise UserError(f"--data {args.data} holds no rows; give JSON lines")
    return Rows(len(rows), lines, sha256, *prepare(rows, job.renderer, job.target, args, job.max_length))


def make_plan(rows, begun, job):
    """begun: the manifest of an extraction that is gone on with, None for a new one."""
    args = job.args
    tokens, supervised = token_counts(rows.conversations, job)
    room = None if args.max_disk_gb is None else int(args.max_disk_gb * 1e9)  # bytes
    block_lines, most = args.block_lines, None
    if block_lines is None:
        block_lines, most = BLOCK_LINES, BLOCK_BYTES if room is None else min(BLOCK_BYTES, room // 10)
    if begun and args.block_lines in (None, begun["block_lines"]):
        block_lines, most = begun["block_lines"], begun.get("block_most")
    blocks, skipped, aside = lay_out(rows, block_lines, most, job)
    stated = {"lines": rows.lines, "blocks": len(blocks),
              "samples": sum(c["samples"] for c in rows.conversations), "tokens": tokens}
    if room is not None:
        stated |= plan_room(blocks, aside, room, job)
    groups = group_blocks(blocks, args.generate_rows if job.sampling else 1)
    return Plan(blocks, skipped, groups, block_lines, most, supervised, row_bytes(job, supervised / tokens),
                stated)


def group_blocks(blocks, generate_rows):
    """Ranges of consecutive blocks with at least so many conversations each but the last: the same for any
    number of processes."""
    conversations = sum(map(len, blocks))
    wanted = generate_rows * (ROUNDS if conversations >= MANY * ROUNDS * generate_rows else 1)
    groups, first, count = [], 0, 0
    for block, part in enumerate(blocks, start=1):
        count += len(part)
        if count >= wanted or block == len(blocks):
            groups.append(range(first, block))
            first, count = block, 0
    return groups


def conversations_of(blocks, plan):
    return [conversation for block in blocks for conversation in plan.blocks[block]]


def bound(blocks, plan):
    """Tokens of these blocks, at most where answers are written."""
    return sum(c["bound"] for c in conversations_of(blocks, plan))


def token_counts(conversations, job):
    """(tokens, supervised ones), both at most where answers are written."""
    tokens = sum(c["bound"] for c in conversations)
    if job.sampling:
        return tokens, tokens
    return tokens, sum(sum(c["loss_mask"]) for c in conversations)


def row_bytes(job, supervised=1.0):
    """Bytes of a token on disk, where a share `supervised` of the tokens is supervised."""
    return bytes_per_token(job.target.hidden_size, job.args.store, job.candidates, supervised)


def lay_out(rows, block_lines, most, job):
    """(conversations of each block, a Counter of the skipped rows of each, how many held-out blocks come
    first).

    A block is so many lines in order, or fewer that take no more than `most` bytes. For a training that
    follows, held-out samples have blocks of their own, which come first and stay.
    """
    followed = job.args.max_disk_gb is not None
    aside = [c for c in rows.conversations if followed and c["heldout"]]
    others = [c for c in rows.conversations if not followed or not c["heldout"]]
    heldout_starts = block_starts([(n, c["bound"]) for n, c in enumerate(aside)], len(aside), block_lines,
                                  most and most / row_bytes(job))
    starts = block_starts([(c["line"], c["bound"]) for c in others], rows.lines, block_lines,
                          most and most / row_bytes(job))
    first = len(heldout_starts)
    blocks = [[] for _ in range(first + len(starts))]
    skipped = [Counter() for _ in blocks]
    for number, conversation in enumerate(aside):
        blocks[bisect(heldout_starts, number) - 1].append(conversation)
    for conversation in others:
        blocks[first + bisect(starts, conversation["line"]) - 1].append(conversation)
    for line, reason in rows.skipped:
        skipped[first + bisect(starts, line) - 1][reason] += 1
    return blocks, skipped, first


def block_starts(sized, lines, block_lines, most):
    """The first lines of the blocks of so many `lines`. sized: (line, tokens) of conversations, in order.
    most: tokens of a block of several conversations; None for no bound."""
    starts, filled = [0], 0
    for line, tokens in sized:
        while line >= starts[-1] + block_lines:
            starts.append(starts[-1] + block_lines)
            filled = 0
        if filled and most and filled + tokens > most:
            starts.append(line)
            filled = 0
        filled += tokens
    while lines > starts[-1] + block_lines:
        starts.append(starts[-1] + block_lines)
    return starts if lines else []


def plan_room(blocks, aside, room, job):
    """What the manifest states for --max-disk-gb, `room` in bytes: what each block takes at most, and what
    the first `aside`, the held-out ones, leave."""
    sizes = []
    for part in blocks:
        tokens, supervised = token_counts(part, job)
        rows = int(tokens * row_bytes(job, supervised / tokens)) if tokens else 0
        index, header = 64 * sum(c["samples"] for c in part), 4096
        sizes.append(rows + index + header)
    heldout = sum(blocks[:aside], [])
    kept, largest = sum(sizes[:aside]), max(sizes[aside:])
    flag = f"--max-disk-gb {job.args.max_disk_gb:g}"
    if kept > room / 2:
        raise UserError(f"the held-out samples stay and take {human_bytes(kept)}, {flag} is "
                        f"{human_bytes(room)}, of which they may take half; give a lower --heldout than "
                        f"{job.args.heldout:g}, or more disk")
    if largest > (room - kept) / 4:
        raise UserError(f"a shard takes up to {human_bytes(largest)} and {flag} leaves "
                        f"{human_bytes(room - kept)} beside the held-out samples, of which it may take a "
                        "quarter; give fewer --block-lines, or more disk")
    return {"heldout_blocks": aside, "heldout_samples": sum(c["samples"] for c in heldout),
            "heldout_tokens": sum(c["bound"] for c in heldout), "room": room - kept, "block_bytes": sizes}


def say_plan(rows, plan, job):
    at_most, tokens = "at most " if job.sampling else "", plan.stated["tokens"]
    shards = f"{len(plan.blocks)} shards"
    if job.sampling:
        shards += f" ({len(plan.groups)} groups of answers)"
    if "room" in plan.stated:
        room, aside = human_bytes(job.args.max_disk_gb * 1e9), plan.stated["heldout_blocks"]
        shards += f", {room} at a time: {aside} with held-out samples and {fitting(plan.stated)} others"
    skipped = count_text(Counter(reason for _, reason in rows.skipped)) or "none"
    say(f"{len(rows.conversations)} of {rows.count} rows, {at_most}{tokens} tokens, "
        f"{at_most}{plan.row_bytes:.0f} bytes per token, {at_most}{human_bytes(tokens * plan.row_bytes)} in "
        f"{shards}, {human_bytes(free_space(job.args.out or Path()))} free; skipped: {skipped}")
    for what, turns in rows.notes.items():
        say(f"{turns} {what}")
    if job.args.heldout and not any(conversation["heldout"] for conversation in rows.conversations):
        say(f"warning: of {plan.stated['samples']} samples --heldout {job.args.heldout:g} holds out none, so "
            "that no accept length can be measured on them; give a larger share, or more rows")


# The journal: what was begun, what is finished


# What the user calls a part of the manifest.
FLAGS = {"dtype": "--store", "compute_dtype": "--dtype", "stored": "--teacher",
         "data_sha256": "--data and --limit, with hash", "max_disk_gb": "--max-disk-gb"}
FORCIBLE = {"tokenizer_sha256", "tokenizer_probe_sha256", "chat_template_sha256", "target tensors_sha256",
            "target text_config_sha256", "target sample_sha256"}


def new_manifest(rows, plan, job):
    args, tokenizer = job.args, job.renderer.tokenizer
    versions = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    return {
        "format": FORMAT, **target_record(job.target, job.target.facts(), tokenizer), "layers": job.layers,
        "dtype": str(STORE[args.store]).removeprefix("torch."), "stored": stored_tensors(args.teacher),
        "candidates": job.candidates, "template_kwargs": args.template_kwargs, "system": args.system,
        "sampling": job.sampling, "max_length": job.max_length, "data_sha256": rows.sha256,
        "max_disk_gb": args.max_disk_gb, "block_lines": plan.block_lines, "block_most": plan.block_most,
        "heldout": args.heldout,
        "compute_dtype": args.dtype, "backend": args.backend, "sources": rows.sources,
        "special_ids": {"eos": end_ids(job.target, tokenizer), "chat": chat_ids(tokenizer)},
        "batches": {"max_batch_tokens": job.batch_tokens, "generate_rows": args.generate_rows},
        "planned": plan.stated, "done": {}, "complete": False, "forced": [],
        "versions": {"python": python_version(), **versions},
        "shards": [], "empty_blocks": [], "run": os.urandom(8).hex(),
    }


def check_same(begun, manifest, args):
    """Names of what differs from `begun`, the manifest on disk, by force: now, and when it was written.

    Raises UserError for settings that differ otherwise.
    """
    forced = set(begun["forced"])
    if begun["batches"] != manifest["batches"]:
        say(f"{args.out} was begun with batches {short(begun['batches'])}, now they are "
            f"{short(manifest['batches'])}: what is computed from here on is rounded otherwise, and of "
            "answers in bfloat16 some may be others")
    settings = content_settings(begun)
    for key, now in content_settings(manifest).items():
        before = settings.get(key)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):  # only what differs
            before, now = ({name: part[name] for name in part if before.get(name) != now.get(name)}
                           for part in (before, now))
        name = FLAGS.get(key, key)
        found = f"{args.out} was begun with {name} {short(before)}"
        if key not in FORCIBLE or not args.force:
            raise UserError(f"{found}, this command has {short(now)}; give the settings it was begun with, "
                            "or another --out")
        forced.add(name)
        say(f"forced: {found}, now it is {short(now)}")
    return sorted(forced)


def content_settings(manifest):
    """{name: value} of all that decides what is in the shards."""
    found = {key: value for key, value in manifest.items() if key not in FREE and key != "planned"}
    found["planned blocks"] = manifest["planned"]["blocks"]
    for key in ("vocab_size", "hidden_size", "tensors_sha256", "text_config_sha256", "sample_sha256"):
        found[f"target {key}"] = manifest["target"][key]
    return found


def short(value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text[:100]


def join(manifest):
    """Meet the other processes of this command: give the manifest the `run` of rank 0. Returns their group.

    Raises UserError where their settings or data differ.
    """
    from accelerate import PartialState

    group = PartialState(timeout=timedelta(days=1))  # what rank 0 looks through meanwhile may be large
    # On CPUs without its launcher accelerate counts one process and gathers nothing; torch counts them all.
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, (manifest["run"], settings_sha256(manifest)))
    if len({settings for _, settings in everyone}) > 1:
        raise UserError("the processes of this command have different settings, data or targets; give all of "
                        "them the same")
    manifest["run"] = everyone[0][0]
    return group


def begin(manifest, begun, plan, args):
    """Rank 0, before any process computes: lock the folder, remove what a killed run left half-written, take
    over what is finished. Answers stay of groups of which a block lacks its states.

    Returns the lock, an open file. All processes of a command share it, so that another one waits for the
    last of them.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(args.out, "written")
    if not begun and (args.out / MANIFEST).exists():
        raise UserError(f"--out {args.out} was begun by another command just now; give the same command "
                        "again")
    for stray in args.out.iterdir():
        if TEMPORARY.match(stray.name) or STRAY.fullmatch(stray.name):
            stray.unlink()
    if begun:
        add(manifest, intact(read_manifest(args.out), args))  # read once more: nobody else changes it now
        remove_read(manifest["planned"], args.out)
    missing = set(unfinished(plan, finished(manifest)))
    wanted = {answers_name(group) for group in plan.groups if not missing.isdisjoint(group)}
    for path in args.out.glob(ANSWERS.format("*", "*")):
        if path.name not in wanted:
            path.unlink()
    fcntl.flock(lock, fcntl.LOCK_SH)
    save(manifest, args.out)
    remove_journals(args.out)
    return lock


def follow(manifest, out):
    """Another rank, while rank 0 loads the target: wait for its manifest. Returns the lock that all share.

    Raises Failed when another command has begun the folder.
    """
    while not (out / MANIFEST).exists():
        time.sleep(0.1)
    if read_manifest(out).get("run") != manifest["run"]:
        raise Failed(f"another command has begun {out} meanwhile; give this one again when it is done")
    return lock_folder(out, "written", shared=True)


def intact(begun, args):
    """The entries of the finished blocks whose shards are there, or with --max-disk-gb were read and removed;
    others are named."""
    gone = acknowledged(args.out, begun["planned"])
    return [entry for entry in finished(begun)
            if entry["block"] in gone or whole(entry, args)]


def whole(entry, args):
    """Whether a finished block's shard is still there, of its size, and with --verify of its hash."""
    if "file" not in entry:  # a block of which nothing was kept
        return True
    path = args.out / entry["file"]
    good = path.exists() and path.stat().st_size == entry["bytes"]
    if good and args.verify:
        good = sha256_file(path) == entry["sha256"]
    if not good:
        say(f"{path} is missing or damaged and is to be made again")
    return good


def remove_journals(out):
    for path in out.glob(JOURNAL.format("*")):
        path.unlink()


def unfinished(plan, entries):
    """The blocks that are not among the finished ones, ascending."""
    return sorted(set(range(len(plan.blocks))) - {entry["block"] for entry in entries})


def record(entry, out):
    """A block is finished: a line in this process's journal, which costs the same for any number of
    blocks."""
    append_sealed(out / JOURNAL.format(RANK), entry)


def save(manifest, out):
    manifest["done"] = sum_up(manifest)
    write_sealed(out / MANIFEST, manifest)


def sum_up(manifest):
    entries = finished(manifest)
    keys = {"read": "read", "samples": "samples", "tokens": "rows", "supervised_tokens": "supervised_tokens",
            "heldout_samples": "heldout_samples", "answers_cut": "cut"}
    total = {key: sum(entry.get(name, 0) for entry in entries) for key, name in keys.items()}
    skipped = Counter()
    for entry in entries:
        skipped.update(entry["skipped"])
    return {**total, "skipped": dict(skipped)}


def remove_read(planned, out, since=None):
    """Remove the shards that a training which follows has acknowledged, from block `since` on, by default
    all. Returns the first block that it has not."""
    blocks = acknowledged(out, planned)
    for block in range(blocks.start if since is None else since, blocks.stop):
        (out / shard_name(block)).unlink(missing_ok=True)  # another process may be faster
    return blocks.stop


def wait_for_room(manifest, block, read, out):
    """With --max-disk-gb: wait until the shards from the first unread one to `block` fit. read: what it
    returned before, the first unread block.

    All is decided by planned bytes, so that processes need not ask each other. Raises Failed when the
    training has ended before.
    """
    planned = manifest["planned"]
    if "room" not in planned or block < planned["heldout_blocks"]:
        return read
    sizes, remind = planned["block_bytes"], reminder(5.0)  # a short wait needs no words
    while True:
        read = remove_read(planned, out, read)
        if sum(sizes[read : block + 1]) <= planned["room"]:
            return read
        if (out / ACKNOWLEDGED).exists() and read_sealed(out / ACKNOWLEDGED)["finished"]:
            raise Failed(f"the training that follows has ended with {read - planned['heldout_blocks']} of "
                         f"{planned['blocks'] - planned['heldout_blocks']} shards read, as its --max-steps "
                         "said; no more are made")
        remind(f"paused: shards of up to {human_bytes(sum(sizes[read:block]))} wait for train_drafter.py "
               "--follow to read them")
        time.sleep(0.5)


def wait_for_others(manifest, plan, out):
    """Rank 0, when its blocks are made: list those of all processes, until all are there."""
    remind, journals, entries, read = reminder(), Journals(out), [], None
    left = set(unfinished(plan, finished(manifest)))
    while True:
        new = journals.read()
        entries += new
        left.difference_update(entry["block"] for entry in new)
        read = remove_read(manifest["planned"], out, read)
        if not left:
            return add(manifest, entries)
        remind(f"{len(left)} blocks are still being made by other processes")
        time.sleep(0.2)


def complete(manifest, out):
    if not manifest["shards"]:
        reasons = count_text(Counter(sum_up(manifest)["skipped"]))
        raise UserError(f"none of the samples could be kept ({reasons}); there is nothing to train on")
    manifest["complete"] = True
    del manifest["run"]  # only to tell running commands apart
    save(manifest, out)
    remove_journals(out)


# What runs the target: the backends


class Transformers:
    """The target in transformers; a context manager, as common.sglang.SGLang is.

    Its answers, its states and its lm_head, a function of [n, H] to [n, V], are all that an extraction needs.
    `dtype` is that of the states, `device` where they lie.
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
        """The target's answers to prompts: lists of ids, the end token included, each cut at its limit. The
        random numbers of each depend on its seed alone. report(ids) is called with each answer as it ends."""
        drawn = [random_numbers(seed, [], limit) for seed, limit in zip(seeds, limits, strict=True)]
        group = decode(self.model, prompts, limits, set(sampling["stop_ids"]), sampling=sampling,
                       most=self.most, numbers=lambda n, first, count: drawn[n][first : first + count],
                       prefill_tokens=self.batch_tokens, report=report)
        return [answer.ids for answer in group.answers]

    def states(self, samples):
        """[(aux [T, 3H], last [T, H])] of id lists, in one forward pass, padded on the right."""
        ids = pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True)  # [B, T]
        aux, last = self.model.states(ids.to(self.device))  # [B, T, 3H], [B, T, H]
        return [(aux[n, : len(sample)], last[n, : len(sample)]) for n, sample in enumerate(samples)]

    def flow(self, batches):
        """The states of each batch, in order. The next one is computed meanwhile, but on a CPU, whose cores
        are wanted already."""
        return (map if self.device.type == "cpu" else ahead)(self.states, batches)


def open_backend(job, device=None):
    """What --backend names, ready to run. Raises UserError when it cannot."""
    args = job.args
    if args.backend == "hf":
        check_fits(job, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return Transformers(job.target, job.layers, args.dtype, args.generate_rows, job.batch_tokens, device,
                            args.trust_remote_code)
    return SGLang(job.target, job.layers, args.dtype, job.max_length, args.server_url, args.states_folder,
                  args.server_arguments, args.trust_remote_code)


# Before the work: memory, disk and hours


def check_fits(job, device):
    """Refuse a target whose weights alone are more than what is free on a device, before they are loaded."""
    need, free = loaded_bytes(job.target, job.args.dtype), free_memory(torch.device(device))
    if need > free:
        say_server(job)
        raise UserError(f"the weights of {job.target.name} take {human_bytes(need)} and {human_bytes(free)} "
                        f"are free on {device}; start the server above and give --backend sglang "
                        "--server-url URL")


def loaded_bytes(target, dtype):
    """Bytes of a target's weights as transformers holds them, by the headers of its files."""
    wanted, quantised = 0 if dtype == "auto" else getattr(torch, dtype).itemsize, target.quantisation
    plain = quantised.get("quant_method") == "compressed-tensors" or not fp8_kernels()
    bits = weight_bits(quantised, target.text) or 16
    total = 0
    for path in sorted(set(target.weights.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                count, kind = math.prod(part.get_shape()), part.get_dtype()  # like F8_E4M3, BF16, I32
                size = int(re.search(r"\d+|$", kind)[0] or 8) // 8
                if name.endswith("_packed"):
                    count, size = count * 8 * size // int(bits), wanted or 2
                elif "F" in kind and (size > 1 or quantised and plain):
                    size = wanted or max(size, 2)
                total += count * size
    return total


def free_memory(device):
    """Bytes that are free on a GPU, or available to the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024


def free_space(out):
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    return shutil.disk_usage(place).free


def space_needed(missing, plan, args):
    """Bytes that the missing blocks will take, at most. With --max-disk-gb what is there is part of it."""
    need = bound(missing, plan) * plan.row_bytes
    if args.max_disk_gb is None:
        return need
    there = sum(path.stat().st_size for path in args.out.glob("shard-*.safetensors"))
    return min(need, int(args.max_disk_gb * 1e9) - there)


def check_space(args, need):
    free = free_space(args.out)
    if need <= free:
        return
    found = f"{human_bytes(need)} and the disk of {args.out} has {human_bytes(free)} free"
    if args.regenerate:
        say(f"warning: the shards need at most {found}")
        return
    smaller = ", a smaller --max-disk-gb" if args.max_disk_gb else ""
    raise UserError(f"the shards need {found}; give fewer rows (--limit), a smaller --max-length{smaller}, "
                    "or another disk")


def dry_run(begun, rows, plan, job, started):
    """Say what there is and how long the rest will take. Returns the summary."""
    args, tokens = job.args, plan.stated["tokens"]
    missing, hours = unfinished(plan, intact(begun, args) if begun else []), None
    done = len(plan.blocks) - len(missing)
    if begun:
        say(f"{done} of {len(plan.blocks)} shards are finished")
    share = plan.supervised / tokens
    sizes = storages(job.target.hidden_size, min(CANDIDATES, job.target.vocab_size), share)
    say_storages(sizes, tokens)
    left = bound(missing, plan)
    if args.tokens_per_second:
        hours = left / args.tokens_per_second / 3600
        say(f"at {args.tokens_per_second:g} tokens/s this will take {hours:.1f} hours")
    elif args.backend == "hf" and RANK == 0 and left and job.target.weights:
        with open_backend(job) as backend:
            hours = expect(backend, missing, plan, job)
    command = None
    if args.backend == "sglang" or not job.target.weights:
        command = say_server(job)
    return {"dry_run": True, "samples": plan.stated["samples"],
            "skipped": dict(Counter(reason for _, reason in rows.skipped)), "tokens": tokens,
            "supervised_tokens": None if job.sampling else plan.supervised,
            "bytes": int(tokens * plan.row_bytes), "bytes_per_token": plan.row_bytes,
            "bytes_by_storage": {name: int(tokens * size) for name, size in sizes.items()}, "hours": hours,
            "seconds": time.monotonic() - started, "tokens_per_second": args.tokens_per_second,
            "shards": len(plan.blocks), "finished": done, "server_command": command,
            "warnings": job.warnings, "out": args.out and str(args.out)}


def say_server(job):
    """Say the command that starts an SGLang for --server-url, over as many GPUs as the target wants. Returns
    it."""
    args, out = job.args, job.args.out or Path("shards")
    folder = args.states_folder or out.absolute().with_name(f"{out.name}-states")
    arguments = args.server_arguments
    if not {"--tp", "--tp-size", "--tensor-parallel-size"} & set(arguments):
        parameters, size, gpus = serving_size(job.target, args.gpu_gb, args.trust_remote_code)
        if gpus is None:
            say("how large the target is cannot be told from its config: add --tp N for N GPUs to the server")
        else:
            say(f"the target has {parameters / 1e9:,.1f} B parameters, about {human_bytes(size)} as served: "
                f"GPUs of {args.gpu_gb:g} GB: {gpus}")
        if gpus and gpus > 1:
            arguments = ["--tp", str(gpus), *arguments]
    command = server_command(job.target, job.layers, args.dtype, job.max_length, folder, arguments,
                             args.trust_remote_code)
    say(f"a server for --backend sglang --server-url URL, with a folder that both sides see: {command}")
    return command


def expect(backend, missing, plan, job):
    """Say how long the missing blocks will take, at most where answers are written, by a short trial with
    some of their samples. Returns hours."""
    start, conversations = time.monotonic(), conversations_of(missing, plan)
    some = trial_samples(conversations, job)
    work, written, most = 0.0, "", ""  # seconds of one process
    if job.sampling:
        first, token = time_answers(backend, some, job.sampling)
        longest = job.sampling["max_new_tokens"]
        work = sum(c["samples"] for c in conversations) * (first + longest * token)
        written = f" and {1 / token:.0f} tokens/s of answers" if token else ""
        most = f", if all answers take {longest} tokens"
    began = time.monotonic()
    pack(backend, some, backend.states(ids_of(some)), job, Counter())
    rate = sum(len(sample["input_ids"]) for sample in some) / (time.monotonic() - began)
    seconds = (work + sum(c["bound"] for c in conversations) / rate) / job.processes
    if seconds > 5400:
        words = f"{seconds / 3600:.1f} hours"
    elif seconds > 90:
        words = f"{seconds / 60:.0f} minutes"
    else:
        words = f"{seconds:.0f} s"
    processes = f"; {job.processes} processes" if job.processes > 1 else ""
    say(f"this will take about {words}{most} ({rate:.0f} tokens/s of states{written} in a trial of "
        f"{len(some)} samples, {time.monotonic() - start:.1f} s{processes})")
    return seconds / 3600


def trial_samples(conversations, job):
    """Some of the samples, from all over, as many as are computed at once and fit into a small batch."""
    some, room = [], job.batch_tokens // 4
    count = job.args.generate_rows
    for conversation in conversations[:: max(1, len(conversations) // count)][:count]:
        if job.sampling:
            ids = job.renderer.prompt_ids(first_question(conversation), conversation["tools"])
            mask = [0] + [1] * (len(ids) - 1)  # as many rows to teach as there can be
        else:
            ids, mask = conversation["input_ids"], conversation["loss_mask"]
        if some and len(ids) > room:
            break
        room -= len(ids)
        some.append(sample_of(conversation, ids, mask))
    return some


def time_answers(backend, samples, sampling):
    """(seconds an answer until its first token, seconds of each further token) of answers to `samples`."""
    prompts, took, count = ids_of(samples), {}, {}
    for limit in (1, 1, 9):  # the first token takes the prompt's forward pass; the very first call is slower
        start = time.monotonic()
        answers = backend.answer(prompts, [limit] * len(prompts), sampling, [0] * len(prompts))
        took[limit], count[limit] = time.monotonic() - start, sum(map(len, answers))
    more = count[9] - len(samples)
    token = max((took[9] - took[1]) / more, 0.0) if more else 0.0
    return took[1] / len(samples), token


# The extraction


def extract(manifest, mine, missing, plan, backend, job, seconds):
    """Make the missing blocks of the groups `mine`, which will take so many seconds. Each is written by a
    thread while the next one is computed."""
    blocks = [[block for block in group if block in missing] for group in mine]
    tokens = bound(sum(blocks, []), plan)
    read = None  # the first block that a training which follows has not read
    with (ThreadPoolExecutor(1) as writer,
          closing(Progress(tokens, "tokens", "extracting", expected=seconds)) as progress):
        if not job.sampling:
            blocks = [sum(blocks, [])]
        writing = None
        for group, left in zip(mine, blocks, strict=False):
            answers = None
            if job.sampling:
                answers = group_answers(backend, group, bound(left, plan), plan, job, progress)
            for block, samples, skipped, cut in compute(backend, left, answers, plan, job, progress):
                if writing:
                    writing.result()  # no more than two blocks are in memory
                read = wait_for_room(manifest, block, read, job.args.out)
                lines = len(plan.blocks[block]) + plan.skipped[block].total()
                facts = {"block": block, "read": lines, "skipped": dict(skipped), "cut": cut}
                done = job.args.out / answers_name(group) if answers and block == left[-1] else None
                writing = writer.submit(write, samples, facts, done, job.args.out)
        writing.result()


def compute(backend, blocks, answers, plan, job, progress):
    """Yield (block, its samples with their states, Counter of what was skipped, answers cut by a limit).
    answers: of the group that these are of, None where those of the rows are kept."""
    ready = {}

    def prepared(block):
        if block not in ready:
            ready[block] = block_samples(plan.blocks[block], answers)
        return ready[block]

    batches = (ids_of(batch) for block in blocks for batch in in_batches(prepared(block)[0], job))
    computed = backend.flow(batches)  # further on than what is taken of it
    for block in blocks:
        samples, skipped, cut = prepared(block)
        skipped += plan.skipped[block]
        kept = []
        for batch in in_batches(samples, job):
            kept += pack(backend, batch, next(computed), job, skipped)
            if answers is None:
                progress.update(sum(len(sample["input_ids"]) for sample in batch))
        del ready[block]
        yield block, sorted(kept, key=PLACE), skipped, cut


def write(samples, facts, done, out):
    """Write a shard and list it. done: the file of answers that nobody needs then, if any."""
    need = sum(value.nbytes for sample in samples for value in sample.values() if torch.is_tensor(value))
    free = shutil.disk_usage(out).free
    if free < 1.05 * need + (1 << 20):
        raise Failed(f"the disk of {out} has {human_bytes(free)} left and the next shard needs "
                     f"{human_bytes(need)}; make room and give the same command again")
    entry = write_shard(out, facts["block"], samples) or {}
    record({**entry, **facts}, out)
    if done:
        done.unlink(missing_ok=True)


def sample_of(conversation, ids, mask, turn=0):
    return {"input_ids": torch.as_tensor(ids, dtype=torch.int32),
            "loss_mask": torch.tensor(mask, dtype=torch.uint8), "sample_id": conversation["line"],
            "turn_id": turn, "source_id": conversation["source_id"], "heldout": conversation["heldout"]}


def ids_of(samples):
    return [sample["input_ids"].tolist() for sample in samples]


@dataclass
class Answers:
    """What the target wrote to the conversations of a group of blocks."""

    ids: list  # of each answer int32 [T]: prompt and answer
    prompts: list  # of each how many of them are the prompt's
    places: list  # of each (line, turn)
    skipped: list  # (line, reason) of answers that are not there
    cut: list  # lines of the answers that a limit cut


def answers_name(group):
    return ANSWERS.format(*(f"{block:05d}" for block in (group[0], group[-1])))


def group_answers(backend, group, tokens, plan, job, progress):
    """The Answers of a group of blocks: of its file, or the target writes them, and the file. tokens: planned
    ones, which have passed then."""
    path = job.args.out / answers_name(group)
    if path.exists():
        progress.update(tokens)
        return load_answers(path)
    answers = write_answers(backend, conversations_of(group, plan), job, tokens, progress)
    save_answers(path, answers)
    return answers


def save_answers(path, answers):
    tensors = {"ids": torch.cat([*answers.ids, torch.zeros(0, dtype=torch.int32)]),
               "lengths": torch.tensor(list(map(len, answers.ids)), dtype=torch.int64),
               "prompts": torch.tensor(answers.prompts, dtype=torch.int64),
               "places": torch.tensor(answers.places, dtype=torch.int64).view(-1, 2),
               "cut": torch.tensor(answers.cut, dtype=torch.int64)}
    facts = {"skipped": json.dumps(answers.skipped), "sha256": sha256_tensors(tensors.values())}
    replace_file(path, lambda temporary: save_file(tensors, temporary, metadata=facts))


def load_answers(path):
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
        tensors = {name: file.get_tensor(name) for name in ("ids", "lengths", "prompts", "places", "cut")}
    if sha256_tensors(tensors.values()) != facts["sha256"]:
        raise UserError(f"{path} was changed after it was written; remove it, and its answers are written "
                        "again")
    return Answers(list(tensors["ids"].split(tensors["lengths"].tolist())), tensors["prompts"].tolist(),
                   list(map(tuple, tensors["places"].tolist())), json.loads(facts["skipped"]),
                   tensors["cut"].tolist())


def block_samples(conversations, answers):
    """(samples of a block, Counter of answers skipped, how many a limit cut). answers: of its group, None
    where those of the rows are kept."""
    if answers is None:
        return [sample_of(c, c["input_ids"], c["loss_mask"]) for c in conversations], Counter(), 0
    own, samples = {c["line"]: c for c in conversations}, []
    for ids, prompt, (line, turn) in zip(answers.ids, answers.prompts, answers.places, strict=True):
        if line in own:
            mask = [0] * prompt + [1] * (len(ids) - prompt)
            samples.append(sample_of(own[line], ids, mask, turn))
    skipped = Counter(reason for line, reason in answers.skipped if line in own)
    return samples, skipped, sum(line in own for line in answers.cut)


def write_answers(backend, conversations, job, tokens, progress):
    """The Answers that the target writes, turn by turn, each in the context of its own earlier answers. With
    each its share of the planned `tokens` has passed, however long it is: so the time left is right."""
    answers, written, start = Answers([], [], [], [], []), 0, time.monotonic()
    share = tokens // max(1, sum(c["samples"] for c in conversations))

    def ended(ids):
        nonlocal written
        written += len(ids)
        progress.update(share, f"{written / (time.monotonic() - start):.0f} tokens/s of answers")

    while asked := ask(conversations, job, answers.skipped):
        sampling, prompts = job.sampling, [prompt for _, _, prompt in asked]
        limits = [min(sampling["max_new_tokens"], job.max_length - len(prompt)) for prompt in prompts]
        numbers = [random_numbers(sampling["seed"], [c["line"], turn], 1)[0] for c, turn, _ in asked]
        seeds = [int(number * 2**31) for number in numbers]
        found = backend.answer(prompts, limits, sampling, seeds, ended)
        for (conversation, turn, prompt), ids in zip(asked, found, strict=True):
            answers.ids.append(torch.tensor(prompt + ids, dtype=torch.int32))
            answers.prompts.append(len(prompt))
            answers.places.append((conversation["line"], turn))
            if ids[-1] not in sampling["stop_ids"]:
                answers.cut.append(conversation["line"])
            put_back(conversation, ids, job.renderer, answers.skipped)
    progress.update(tokens - share * len(answers.ids))
    return answers


def put_back(conversation, answer, renderer, skipped):
    """Make an answer part of what the next turn is told, as an engine would; where that cannot be, no more is
    asked."""
    messages, told = conversation["messages"], first_question(conversation)
    if messages.count(None) == 1:
        messages.clear()
        return
    try:
        messages[len(told)] = renderer.message(answer, told, conversation["tools"])
    except Skip as skip:
        skipped.append((conversation["line"], skip.reason))
        messages.clear()


def ask(conversations, job, skipped):
    """[(conversation, number of the turn, prompt ids)] of those that lack an answer; where the prompt has
    become too long, no more is asked of them."""
    asked = []
    for conversation in conversations:
        if None not in conversation["messages"]:
            continue
        told = first_question(conversation)
        try:
            prompt = job.renderer.prompt_ids(told, conversation["tools"])
            if len(prompt) >= job.max_length:
                raise Skip("prompt too long")
        except Skip as skip:
            skipped.append((conversation["line"], skip.reason))
            conversation["messages"].clear()
            continue
        turn = sum(message["role"] == "assistant" for message in told)
        asked.append((conversation, turn, prompt))
    return asked


def in_batches(samples, job):
    """Lists of samples of like length, longest first, each of a forward pass's tokens."""
    samples, batches = sorted(samples, key=lambda sample: (-len(sample["input_ids"]), *PLACE(sample))), []
    while samples:
        count = max(1, job.batch_tokens // len(samples[0]["input_ids"]))
        batches.append(samples[:count])
        samples = samples[count:]
    return batches


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


def pack(backend, batch, states, job, skipped):
    """The samples with what is stored of their states, a list of (aux [T, 3H], last [T, H]), on the CPU.

    Samples with states that are not finite are named, counted in `skipped` and left out.
    """
    # [N, 3H], [N, H]: rows of all samples
    aux, last = (torch.cat(part) for part in zip(*states, strict=True))
    lengths = [len(sample["input_ids"]) for sample in batch]
    finite = (aux.isfinite().all(1) & last.isfinite().all(1)).cpu().split(lengths)
    mask = torch.cat([sample["loss_mask"] for sample in batch])  # [N]
    teach = mask[1:].nonzero()[:, 0]  # [M] rows whose next token is supervised; no sample's first one ever is
    chosen, ids, logprobs = choices(backend.target, backend.lm_head, last, teach.to(backend.device),
                                    job.candidates)  # [N], [M, C], [M, C]
    made, stored = {"target_argmax": chosen.int()}, {"aux_hidden_states": aux}
    if job.candidates:
        made |= {"teacher_ids": ids.int(), "teacher_logprobs": logprobs.bfloat16()}
    else:
        stored["last_hidden_state"] = last
    for key, state in stored.items():
        parts = state.shape[1] // backend.target.hidden_size
        made[key], scale = store_states(state, parts, STORE[job.args.store])
        if scale is not None:
            made[SCALES[key]] = scale
    taught = [int(sample["loss_mask"].sum()) for sample in batch]
    made = {name: value.to("cpu").split(taught if name in TEACHER else lengths)
            for name, value in made.items()}
    kept = []
    for n, sample in enumerate(batch):
        if not finite[n].all():
            overflow = backend.dtype == torch.float16
            hint = "; float16 overflows in this target, --dtype bfloat16 does not" if overflow else ""
            say(f"line {sample['sample_id'] + 1}, turn {sample['turn_id']}: states that are not finite, "
                f"skipped{hint}")
            skipped["non-finite states"] += 1
            continue
        if job.candidates:
            sample["teacher_rows"] = sample["loss_mask"][1:].nonzero()[:, 0]
        kept.append({**sample, **{name: value[n] for name, value in made.items()}})
    return kept


# The end


def report(manifest, before, rows, job, seconds):
    """Say what there is and return the summary. before: what was done when this command began."""
    done = manifest["done"]
    if done["answers_cut"]:
        say(f"{done['answers_cut']} of {done['samples']} answers were cut at --max-new-tokens or "
            "--max-length")
    say(f"{job.args.out} is complete: {done['samples']} samples, {done['tokens']} tokens")
    return {**done, "bytes": sum(entry["bytes"] for entry in manifest["shards"]),
            "bytes_per_token": row_bytes(job, done["supervised_tokens"] / done["tokens"]), "seconds": seconds,
            "tokens_per_second": (done["tokens"] - before["tokens"]) / seconds,
            "shards": len(manifest["shards"]), "dropped_or_cut": dict(rows.notes),
            "forced": manifest["forced"], "warnings": job.warnings, "out": str(job.args.out)}


if __name__ == "__main__":
    run(main)
