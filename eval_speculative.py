#!/usr/bin/env python3
"""Measure drafters: how many drafted tokens the target accepts, and how much faster that makes it.

Decodes prompts plainly and with every drafter given, with the target in transformers (in turn, in the same run) or on SGLang
servers. With --shards also, or only, the accept length is simulated on held-out samples, for which no target runs. Prints a table
on stderr and one line of JSON on stdout. In float32, greedy answers must equal those of plain decoding id by id: exit code 1 if not.
"""

import json
import math
import os
import shlex
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch

from common.accept import FEW, figures, names, rounded, simulated_figures, speed_interval
from common.cli import Parser, Progress, UserError, in_range, positive_int, run, say, split_words
from common.conversations import Skip, count_text, parse_row, read_rows
from common.decode import decode, distribution, head_seconds, transformers_generate
from common.drafter import captured_layers, check_embedding, load_drafter
from common.files import replace_file
from common.loss import simulated
from common.plots import check_plot, plot
from common.rendering import Renderer
from common.sglang import answer, serve_commands, server_settings, start_server
from common.shards import Shards, check_shards, check_tokenizer, open_shards_target, other_template
from common.target import chat_template_sha256, check_same_target, load_tokenizer, open_target, stop_ids, tokenizer_sha256
from common.target_model import TargetModel
from common.vocab import MAP_FILE, check_coverage, coverage, map_facts

PLAIN, TRANSFORMERS = 0, -1  # decoders' numbers; drafters are 1, 2, ...
WARM_UP = 16  # tokens decoded before anything is timed
LEAST_CHANCE = 1e-4  # of a right sampler's chi-square; --check-sampling fails below
COMPARED = 4  # prompts that transformers' own generate answers too
NOT_MEASURED = ("coverage", "accept_length", "acceptance", "tokens_per_second", "speed_up", "identical", "prompts", "draft_ms", "verify_ms")


def parse_arguments():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--target", metavar="MODEL",
        help="folder of a Hugging Face model, or a hub id; no default, but --shards alone finds it by itself, to read its embedding")
    add("--drafter", action="append", type=Path, default=[], metavar="DIR",
        help="folder that train_drafter.py wrote; give it several times to compare several; no default (only --server-url goes without)")
    add("--prompts", metavar="FILE",
        help="JSON lines with turns, messages, conversations, prompt, text or input_ids, or - for standard input. The last user message is "
             "answered; of turns each one, behind the plain answers to those before. A row's category is reported apart. A folder of "
             "shards: the prompts of its held-out samples. No default; --shards alone goes without")
    add("--shards", metavar="DIR",
        help="simulate the accept length on whole held-out answers of these shards, for which the target does not run; default no")
    add("--verify", action="store_true", help="first check the sha256 of every file of --shards; default no: it reads all of them")
    add("--prediction", type=Path, metavar="MAP",
        help="folder of build_vocab_map.py --predict: what it says of every size stands beside what is measured; default none")
    add("--backend", choices=["local", "sglang"], default="local",
        help="default local: target and drafters in this process, in transformers. sglang: on servers, as in production")
    add("--server-url", metavar="URL",
        help="a running SGLang server with the drafter loaded; default none: servers are started and stopped here")
    add("--baseline-url", metavar="URL", help="the same without a drafter, for speed-up and identical answers; default none")
    add("--sglang-python", default=sys.executable, metavar="FILE",
        help="Python of SGLang's environment; default the one that runs this script")
    add("--server-arguments", default="", metavar="TEXT", help="more arguments of sglang.launch_server, in one text; default none")
    add("--steps", type=positive_int, default=3, metavar="K", help="depth of a draft; default 3, as big models are served")
    add("--topk", type=positive_int, default=1, metavar="N",
        help="drafted alternatives behind a token; default 1, a chain: cheapest to verify. More draft a tree, as in EAGLE-2")
    add("--draft-tokens", type=positive_int, metavar="N",
        help="tokens of one verification, the root included; default all of a chain, steps + 1; a tree has no default")
    add("--concurrency", type=lambda text: [positive_int(part) for part in text.split(",")], default=[1], metavar="N,...",
        help="prompts decoded at once; several numbers with commas measure each; default 1")
    add("--max-new-tokens", type=positive_int, default=256, metavar="N",
        help="longest answer; default 256: acceptance has settled by then, longer answers only cost time")
    add("--temperature", type=in_range(0, low_too=True), default=0.0, help="default 0, greedy: answers can be compared id by id")
    add("--top-p", type=in_range(0, 1), default=1.0, help="draw from the likeliest tokens of this share only; default 1, all")
    add("--top-k", type=int, default=0, metavar="N", help="draw from the N likeliest tokens only; default 0, all")
    add("--seed", type=int, default=0, help="of drawn tokens; default 0")
    add("--check-sampling", type=positive_int, metavar="N",
        help="also draw N answers of three tokens to the first prompt and compare their frequencies with the target's distribution "
             "(chi-square; needs a temperature above 0, local only; exit code 1 where that has less than a chance of 1e-4; some "
             "thousands see a fault of some percent); default no")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
        help="of target and drafters; default auto, the target's own, as it is served. float32 proves that answers are identical")
    add("--limit", type=positive_int, metavar="N", help="read only the first N rows; default all")
    add("--out", type=Path, metavar="FILE",
        help="also write the answers, and the drafted tokens of every verification, as JSON lines; default no")
    add("--plot", type=Path, metavar="PNG",
        help="also plot accept lengths, acceptance per depth and, of several draft vocabularies, speed over size; default no. A PNG "
             "that is there is replaced")
    add("--trust-remote-code", action="store_true", help="run code that comes with the target; default no, since it can do anything")
    add("--revision", metavar="NAME", help="of the target on the hub; default its main one")
    add("--force", action="store_true",
        help="use a drafter or a prediction made for another target of the same sizes; default no: neither would hold")
    args = parser.parse_args()
    if not args.prompts and not args.shards:
        raise UserError("nothing to measure; give --prompts, or --shards to simulate")
    if args.prompts and not args.target:
        raise UserError("--prompts needs --target, whose answers are measured and whose tokenizer reads them")
    if args.backend == "local" and (args.server_url or args.baseline_url or args.server_arguments):
        raise UserError("--server-url, --baseline-url and --server-arguments are for --backend sglang; add it, or leave them out")
    args.server_arguments = split_words("--server-arguments", args.server_arguments)
    if args.baseline_url and not args.server_url:
        raise UserError("--baseline-url goes with --server-url, the server with the drafter; give both, or neither to start servers here")
    if not args.drafter and not (args.server_url and args.prompts and not args.shards):
        raise UserError("--drafter is missing; give the folder that train_drafter.py wrote")
    if args.server_url and len(args.drafter) > 1:
        raise UserError(f"--server-url has one drafter loaded, {len(args.drafter)} are given; give the one that it serves")
    nodes = args.topk + (args.steps - 1) * args.topk**2 + 1  # all that a tree may hold, the root included
    if args.topk == 1 and args.draft_tokens not in (None, args.steps + 1):
        raise UserError(f"--draft-tokens {args.draft_tokens}: a chain of {args.steps} steps has {args.steps + 1} tokens with its root; "
                        f"give --draft-tokens {args.steps + 1}, or leave it out")
    if args.topk > 1 and not 2 <= (args.draft_tokens or 0) <= nodes:
        raise UserError(f"--topk {args.topk} with {args.steps} steps needs a --draft-tokens from 2 to {nodes}, the root included; "
                        f"{'none' if args.draft_tokens is None else args.draft_tokens} is given")
    args.draft_tokens = args.draft_tokens or args.steps + 1
    if args.top_k < 0:
        raise UserError(f"--top-k {args.top_k}: 0 for all tokens, or a number of at least 1, is wanted")
    if args.check_sampling and (args.backend != "local" or not args.temperature or not args.prompts):
        raise UserError("--check-sampling needs --prompts, --backend local and a --temperature above 0")
    if 0 < args.temperature < 1e-5:
        raise UserError(f"--temperature {args.temperature}: 0, greedy, or at least 1e-5 is wanted; give 0")
    if not -(2**63) <= args.seed < 2**64:
        raise UserError(f"--seed {args.seed} has more than 64 bits; give a smaller number")
    if args.out and (not args.prompts or args.out == args.plot):
        raise UserError(f"--out {args.out} holds answers to --prompts; give those, and another file than --plot, or leave it out")
    if (path := args.out) and (path.exists() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK)):
        fault = "is there already" if path.exists() else "lies in a folder that does not exist, or cannot be written to"
        raise UserError(f"--out {path} {fault}; give the name of a new file in a folder where files can be made")
    if args.plot:
        check_plot(args.plot)
    return args


def main():
    args = parse_arguments()
    shards = Shards(args.shards, args.verify, first=0) if args.shards else None
    target = open_shards_target(shards, args.target, args.revision, args.trust_remote_code) if shards else open_target(
        args.target, args.revision, args.trust_remote_code)
    tokenizer = load_tokenizer(target.folder, args.trust_remote_code)
    loaded = [load_drafter(folder) for folder in args.drafter]
    configs = [drafter.config for drafter, _ in loaded]
    layers = [captured_layers(config, target.num_layers, folder) for config, folder in zip(configs, args.drafter, strict=True)]
    facts = target.facts()
    warnings = check_drafters(args, target, facts, tokenizer, configs, shards)
    for own in layers if shards else ():
        warnings += check_shards(shards, target, facts, own, args.force)
    prediction, more = read_prediction(args.prediction, facts, args.steps, args.force) if args.prediction else (None, [])
    for warning in (warnings := list(dict.fromkeys(warnings + more))):
        say(f"warning: {warning}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {
        **{key: getattr(args, key) for key in ("backend", "steps", "topk", "draft_tokens", "temperature", "top_p", "top_k", "seed", "dtype",
                                               "max_new_tokens", "concurrency")},
        "template_kwargs": common_template_kwargs(configs, args.drafter),
        "eos_ids": stop_ids(target, tokenizer), "versions": {name: version(name) for name in ("torch", "transformers")},
        "threads": torch.get_num_threads(), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    summary = {"target": target.name, "settings": settings, "baseline_tokens_per_second": None, "transformers_tokens_per_second": None,
               "drafters": [{"drafter": str(folder), "draft_vocab": config["draft_vocab_size"], **dict.fromkeys(NOT_MEASURED)}
                            for folder, config in zip(args.drafter, configs, strict=True)],
               "verdict": None, "prompts": 0, "skipped": {}, "warnings": warnings}
    if shards:
        dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
        for entry, own in zip(summary["drafters"], place(loaded, layers, target, device, dtype), strict=True):
            entry.update(simulate_accept_length(shards, own, args))
    code = 0
    if args.prompts:
        model = None
        if args.backend == "local":
            # every layer that some drafter reads is captured
            model = TargetModel(target, sorted(set().union(*layers)), args.dtype, trust_remote_code=args.trust_remote_code)
            model.check_logits()
            settings["dtype"] = str(model.dtype).removeprefix("torch.")
            drafters = place(loaded, layers, target, model.device, model.dtype)
            sessions = [nullcontext((None, local_decoders(args, model, drafters, settings)))]
        else:
            sessions = server_sessions(args, target, configs, summary)
        runs = decode_all(args, target, tokenizer, settings, sessions, summary)
        code = fill(summary, runs, model, loaded, args)
        if args.check_sampling:
            code = max(code, check_samplings(args, model, drafters, runs, summary))
        if args.out:
            write_answers(args.out, [entry["drafter"] for entry in summary["drafters"]], runs)
    more = coverage_warnings(summary["drafters"], configs)
    for warning in more + (compare_prediction(summary, prediction, args.prediction) if prediction else []):
        warn(summary, warning)
    for line in table(summary):
        say(line)
    for folder in args.drafter:
        commands = serve_commands(target.folder, folder, args.steps, args.topk, args.draft_tokens, settings["dtype"],
                                  args.trust_remote_code)
        commands["sglang"] = " ".join([commands["sglang"], shlex.join(args.server_arguments)]).strip()
        say(f"to serve {folder}:\n  {commands['sglang']}\n  {commands['vllm'] or '(vLLM drafts chains only: --topk 1)'}")
        for entry in summary["drafters"]:
            if entry["drafter"] == str(folder):
                entry["serve"] = commands
    if args.plot:
        plot(args.plot, summary)
    return summary, code


def check_drafters(args, target, facts, tokenizer, configs, shards):
    """Refuse drafters of other sizes or of another target. Returns what was let pass, in sentences.

    The chat templates of drafters and of shards (None: there are none) are compared with the target's, the odd one is told of once.
    """
    ours = {"tokenizer_sha256": tokenizer_sha256(target.folder), "chat_template_sha256": chat_template_sha256(tokenizer)}
    made, where = (shards.manifest, shards.folder) if shards else ({}, None)
    warnings = other_template(ours, made, where, target.name)
    for folder, config in zip(args.drafter, configs, strict=True):
        for key in ("target_hidden_size", "hidden_size", "vocab_size"):
            if config[key] != (wanted := getattr(target, key.removeprefix("target_"))):
                raise UserError(f"{folder} has {key} {config[key]}, {target.name} needs {wanted}; use the target that it was trained for")
        if args.topk > config["draft_vocab_size"]:
            raise UserError(f"--topk {args.topk} is more than {folder} can draft, {config['draft_vocab_size']} tokens; give at most that")
        check_embedding(folder, target)
        trained = config.get("training") or {}
        if not trained.get("target"):
            warnings.append(f"{folder} does not say which target it was trained for; only the sizes were compared")
        elif warning := check_same_target(trained["target"], facts, f"drafter {folder} was", args.force):
            warnings.append(f"--force: {warning}")
        warnings += other_template({key: trained[key] for key in trained.keys() - ours}, made, where, f"the drafter {folder}")
        for key, value in ours.items():
            if trained.get(key, value) not in (value, made.get(key, value)):  # where the shards are alike, they are told of
                warning = (f"{folder} was trained with another {key.removesuffix('_sha256').replace('_', ' ')}: hash "
                           f"{str(trained[key])[:12]} there, {str(value)[:12]} here")
                if key == "tokenizer_sha256" and not args.force:
                    raise UserError(f"{warning}; use that tokenizer (--force goes on all the same)")
                warnings.append(warning)
    return warnings


def common_template_kwargs(configs, folders):
    """The chat-template arguments that the drafters were trained with; all must have had the same, since they get the same prompts."""
    found = [(config.get("training") or {}).get("template_kwargs") for config in configs]
    known = [(kwargs, folder) for kwargs, folder in zip(found, folders, strict=True) if kwargs is not None]
    for kwargs, folder in known:
        if kwargs != known[0][0]:
            raise UserError(f"{folder} was trained with chat-template arguments {json.dumps(kwargs)}, {known[0][1]} with "
                            f"{json.dumps(known[0][0])}; evaluate them in separate runs")
    return known[0][0] if known else {}


def warn(summary, warning):
    summary["warnings"].append(warning)
    say(f"warning: {warning}")


def place(loaded, layers, target, device, dtype):
    """[(Drafter, embedding [V, H], rows int64 [D] or None, layers)] as decode takes them, from what load_drafter returned."""
    embedding = target.embedding().to(device, dtype)
    return [(drafter.to(device, dtype), embedding, None if rows is None else rows.to(device), own)
            for (drafter, rows), own in zip(loaded, layers, strict=True)]


def simulate_accept_length(shards, drafter, args):
    """Figures of a placed drafter from a walk over held-out samples, as serving would take it."""
    samples = shards.heldout.nonzero()[0][: args.limit]
    if not len(samples):
        raise UserError(f"{args.shards} holds no held-out samples; extract with --heldout, or give shards that have some")
    progress = Progress(len(samples), "samples", "simulating")
    with torch.inference_mode():
        counts = simulated(*drafter[:3], shards, samples, args.steps, progress)
    progress.close()
    return {**simulated_figures(counts), "simulated_samples": len(samples),
            "simulated_coverage": simulated_coverage(shards, samples, drafter[2])}


def local_decoders(args, model, drafters, settings):
    """{number: function(prompts, limit, concurrency) to a Group}, all through the same target."""
    eos_ids, numbers = set(settings["eos_ids"]), seeded(args.seed)

    def decoder(drafter):
        return lambda prompts, limit, concurrency: decode(model, prompts, limit, eos_ids, drafter, args.steps, args.topk,
                                                          args.draft_tokens, settings, numbers)

    decoders = {number: decoder(drafter) for number, drafter in enumerate([(), *drafters])}  # PLAIN is the first
    decoders[TRANSFORMERS] = lambda prompts, limit, concurrency: transformers_generate(model, prompts[0], limit, eos_ids)
    return decoders


def seeded(seed):
    """The random numbers of an evaluation, as decode takes them: one after the other, whichever answer they are for."""
    generator = np.random.default_rng(seed % 2**64)
    return lambda prompt, first, count: generator.random(count)


def server_sessions(args, target, configs, summary):
    """Contexts, one a server, plain decoding first. Each yields (positions that a request may take, decoders as local_decoders')."""
    settings = summary["settings"]
    eos_ids = set(settings["eos_ids"])
    shape = {"steps": args.steps, "topk": args.topk, "draft_tokens": args.draft_tokens}
    logs = None if args.server_url else Path(tempfile.mkdtemp(prefix="sglang-"))

    @contextmanager
    def session(number, url):
        drafter = args.drafter[number - 1] if number and args.drafter else None
        server = nullcontext(url) if url else start_server(
            args.sglang_python, target.folder, drafter, **shape, dtype=args.dtype, extra=args.server_arguments,
            log=logs / f"server-{number}.log", trust_remote_code=args.trust_remote_code)
        with server as address:
            found = server_settings(address, drafter_expected=number != PLAIN)
            check_server(found, address, number)
            steps = args.steps if number else None
            yield found["room"], {number: lambda prompts, limit, concurrency: answer(
                address, prompts, limit, eos_ids, concurrency, settings, steps)}

    def check_server(found, address, number):
        wrong = [f"{key.replace('_', '-')} {found[key]} for {value}" for key, value in shape.items() if found[key] != value]
        if number and wrong:
            raise UserError(f"{address} drafts with {', '.join(wrong)}; give its own numbers with --steps, --topk and --draft-tokens")
        if number and args.temperature and found["device"] == "cpu":
            raise UserError(f"{address} runs on a CPU, where SGLang judges drafts greedily whatever is asked for; give --temperature 0")
        first = settings.setdefault("server", dict(found))
        if first["dtype"] != found["dtype"]:
            raise UserError(f"{address} runs in {found['dtype']}, the other one in {first['dtype']}; start both alike")
        if args.server_url and args.dtype not in ("auto", found["dtype"]):
            raise UserError(f"{address} runs in {found['dtype']}, --dtype {args.dtype} is given; start it so, or leave --dtype out")
        if other := [f"{key} {found[key]} for {first[key]}" for key in ("version", "device", "tp_size") if found[key] != first[key]]:
            warn(summary, f"{address} differs from the other server ({', '.join(other)}): their speeds do not compare")
        settings["server"] |= {key: value for key, value in found.items() if value is not None}
        settings["dtype"] = found["dtype"]
        given = [("model", args.target, target.folder), *(("drafter", folder, folder) for folder in args.drafter if number)]
        for key, name, folder in given if args.server_url else ():
            there, here = Path(str(found[key])), Path(folder).resolve()  # another machine may keep it elsewhere
            if found[key] != str(name) and (there.resolve() != here if there.exists() else there.name != here.name):
                warn(summary, f"{address} serves {key} {found[key]}, {name} is given; only the names were compared")
        if number and not args.drafter:
            summary["drafters"] = [{"drafter": found["drafter"], "draft_vocab": None, **dict.fromkeys(NOT_MEASURED)}]

    if args.server_url:
        return [session(PLAIN, args.baseline_url)] * bool(args.baseline_url) + [session(1, args.server_url)]
    return [session(number, None) for number in range(len(configs) + 1)]


def decode_all(args, target, tokenizer, settings, sessions, summary):
    """Decode every prompt with every decoder. Returns {concurrency: its Waves, those that hold prompts}."""
    conversations, skipped, warnings = read_prompts(args.prompts, args.limit, tokenizer, target, args.force)
    if (most := max(args.concurrency)) > len(conversations):
        warnings.append(f"--concurrency {most} is more than there are prompts: at most {len(conversations)} were decoded at once")
    for warning in warnings:
        warn(summary, warning)
    renderer = Renderer(tokenizer, settings["template_kwargs"], settings["eos_ids"])
    positions = target.text["max_position_embeddings"] - args.draft_tokens
    # a server is given all prompts of a category and turn, and has so many of them in work; here a batch is so many
    runs = {number: waves(conversations, number if args.backend == "local" else len(conversations)) for number in args.concurrency}
    answers = sum(len(wave.conversations) for run in runs.values() for wave in run)
    progress = Progress(answers * (len(args.drafter) + 1 if args.backend == "local" else len(sessions)), "answers", "decoding")
    for session in sessions:
        with session as (server_room, decoders):
            room = min(positions, server_room or positions) - args.max_new_tokens
            for concurrency, run_waves in runs.items():
                warm = set()
                for index, wave in enumerate(run_waves):
                    if wave.prompts is None:
                        counted = skipped if concurrency == args.concurrency[0] else Counter()
                        wave.prepare(renderer, room, target.vocab_size, counted)
                    if not wave.prompts:
                        continue
                    prompts = [ids for _, ids in wave.prompts]
                    numbers = [number for number in decoders if number != TRANSFORMERS or index < COMPARED and concurrency == 1]
                    for step in range(len(numbers)):  # each decoder is first, second, ... equally often
                        number = numbers[(step + index) % len(numbers)]
                        if number not in warm:
                            warm.add(number)
                            left = room + args.max_new_tokens - max(map(len, prompts))  # positions behind the longest prompt
                            decoders[number](prompts[:concurrency], max(1, min(WARM_UP, left)), concurrency)
                        wave.groups[number] = decoders[number](prompts, args.max_new_tokens, concurrency)
                        progress.update(len(prompts) * (number != TRANSFORMERS))
                    if len(wave.groups) == len(numbers):
                        wave.answered(wave.groups[max(PLAIN, min(numbers))], renderer)
    progress.close()
    runs = {concurrency: [wave for wave in run_waves if wave.prompts] for concurrency, run_waves in runs.items()}
    summary["skipped"], summary["prompts"] = dict(skipped), sum(len(wave.prompts) for wave in runs[args.concurrency[0]])
    if not summary["prompts"]:
        raise UserError(f"{args.prompts} holds no prompt that can be used ({count_text(skipped)})")
    return runs


def fill(summary, runs, model, loaded, args):
    """Put the figures into the summary: an entry for every drafter and concurrency. Returns the exit code."""
    def own_figures(chosen, number):
        plain = [wave.groups[PLAIN] for wave in chosen if PLAIN in wave.groups]
        found = figures(plain or None, [wave.groups[number] for wave in chosen], args.steps)
        if loaded:
            drafter, rows = loaded[number - 1]
            found["coverage"] = answers_coverage(plain, rows, drafter.config["vocab_size"])
        return {**found, "identical": None} if args.temperature else found  # drawn answers differ, as they should

    entries, verdicts = [], []
    for concurrency, run_waves in runs.items():
        for number, entry in enumerate(summary["drafters"], start=1):
            entry = {**entry, "concurrency": concurrency, **own_figures(run_waves, number)}
            names = sorted({wave.category for wave in run_waves}, key=str)
            entry["categories"] = {name or "(none)": own_figures([wave for wave in run_waves if wave.category == name], number)
                                   for name in names if names != [None]}
            if model and entry["draft_ms"]:
                head_ms = 1000 * head_seconds(loaded[number - 1][0], concurrency)
                share = head_ms / entry["draft_ms"]  # above 1 where other work came between the two
                entry |= {"head_ms": round(head_ms, 4), "head_share": round(share, 4) if share <= 1 else None}
            entry["differences"] = None if args.temperature or entry["identical"] is None else differences(model, run_waves, number)
            entries.append(entry)
        numbers = range(1, len(summary["drafters"]) + 1)
        verdicts.append(verdict(entries[-len(numbers) :], [[wave.groups[number] for wave in run_waves] for number in numbers],
                                summary["settings"]))
    summary["drafters"], summary["verdict"] = entries, [found for found in verdicts if found] or None
    summary["baseline_tokens_per_second"] = entries[0]["baseline_tokens_per_second"]
    compared = [wave for wave in runs.get(1, ()) if TRANSFORMERS in wave.groups]
    if compared:
        both = figures([wave.groups[TRANSFORMERS] for wave in compared], [wave.groups[PLAIN] for wave in compared], args.steps)
        summary["transformers_tokens_per_second"] = both["baseline_tokens_per_second"]
        summary["plain_over_transformers"] = both["speed_up"]
    return int(summary["settings"]["dtype"] == "float32" and any(entry["differences"] for entry in entries))


def check_samplings(args, model, drafters, runs, summary):
    """Put a chi-square check into every drafter's entry. Returns 1 if one fails."""
    _, prompt_ids = runs[args.concurrency[0]][0].prompts[0]
    numbers, code = seeded(args.seed), 0
    for number, drafter in enumerate(drafters):
        found = check_sampling(model, prompt_ids, args.check_sampling, summary["settings"], drafter, args.steps, args.topk,
                               args.draft_tokens, numbers)
        failed = found["p_value"] is not None and found["p_value"] < LEAST_CHANCE
        code |= failed
        verdict = "too few draws to tell" if found["p_value"] is None else (
            f"p = {found['p_value']:.2g}, {'NOT' if failed else 'no difference from'} the distribution of the target")
        say(f"{args.drafter[number]}: {found['draws']} answers of three tokens drawn, chi-square {found['chi_square']} over the "
            f"{found['cells']} that can be told apart: {verdict} (below {LEAST_CHANCE} fails)")
        for entry in summary["drafters"][number :: len(drafters)]:
            entry["sampling_check"] = found
    return int(code)


@torch.inference_mode()
def differences(model, run_waves, number):
    """Where drafter `number` first wrote another id than plain decoding, for every prompt with one; with a `model`, how far apart
    the target's logits of the two ids are, also in rounding steps of its dtype at that size: few are a near tie, many a fault."""
    found = []
    for wave in run_waves:
        for (line, prompt_ids), plain, ours in zip(wave.prompts, wave.groups[PLAIN].answers, wave.groups[number].answers, strict=True):
            plain, ours = plain.ids, ours.ids
            if plain == ours:
                continue
            position = next((n for n, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b), min(len(plain), len(ours)))
            entry = {"line": line + 1, "turn": wave.turn, "position": position, "plain": plain[position : position + 1],
                     "drafted": ours[position : position + 1], "best_two": None, "gap": None, "rounding_steps": None}
            if model:
                _, last = model.states(torch.tensor([prompt_ids + plain[:position]], device=model.device))
                logits = model.logits(last[0, -1])
                best = logits.topk(2)
                entry["best_two"] = best.indices.tolist()
                if entry["plain"] and entry["drafted"]:
                    high, low = float(logits[entry["plain"][0]]), float(logits[entry["drafted"][0]])
                    step = torch.finfo(model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(high), abs(low), 1e-9)))
                    entry |= {"gap": round(high - low, 6), "rounding_steps": round(abs(high - low) / step, 1)}
            found.append(entry)
    return found


def write_answers(path, drafters, runs):
    """JSON lines of every answer. drafters: their names, number 1 first."""
    lines = []
    for concurrency, run_waves in runs.items():
        for wave in run_waves:
            for number, group in sorted(wave.groups.items()):
                if number == TRANSFORMERS:
                    continue
                for (line, prompt_ids), one in zip(wave.prompts, group.answers, strict=True):
                    lines.append(json.dumps({
                        "line": line + 1, "turn": wave.turn, "drafter": None if number == PLAIN else drafters[number - 1],
                        "concurrency": concurrency, "prompt_ids": prompt_ids, "ids": one.ids, "candidates": one.candidates,
                        "accepted": one.accepted}))
    replace_file(path, lambda temporary: temporary.write_text("\n".join(lines) + "\n"))


@dataclass
class Conversation:
    """One row. `script` holds messages, with None where the target is still to answer; of rows of ids or text it is [ids, None]."""

    line: int
    category: str | None
    tools: list | None
    script: list


@dataclass
class Wave:
    """Prompts that are decoded together: answer number `turn` of some conversations of one category."""

    category: str | None
    conversations: list
    turn: int
    prompts: list | None = None  # [(line, prompt ids)], made when the turns before are answered
    groups: dict = field(default_factory=dict)  # decoder number to its Group

    def prepare(self, renderer, room, vocab_size, skipped):
        """Make the prompts; a conversation that cannot go on is counted in `skipped` with all that is left of it, and ends."""
        self.prompts, kept = [], []
        for conversation in self.conversations:
            script = conversation.script
            if None not in script:
                continue
            told = script[: script.index(None)]
            try:
                ids = told[0] if isinstance(told[0], list) else renderer.prompt_ids(told, conversation.tools)
                if len(ids) > room:
                    raise Skip("too long", f"{len(ids)} tokens, and {room} leave room for the answer in the target's positions")
                if max(ids) >= vocab_size:
                    raise Skip("malformed", f"token id {max(ids)}, the target has {vocab_size}")
            except Skip as skip:
                skipped[skip.reason] += script.count(None)
                say(f"line {conversation.line + 1} skipped: {skip}")
                script.clear()
                continue
            kept.append(conversation)
            self.prompts.append((conversation.line, ids))
        self.conversations = kept

    def answered(self, group, renderer):
        """Put the answers into the conversations, for the turns that follow."""
        for conversation, one in zip(self.conversations, group.answers, strict=True):
            conversation.script[conversation.script.index(None)] = renderer.message(one.ids)


def waves(conversations, size):
    """Fresh Waves over all answers of `conversations`: of one category, up to `size` conversations at a time, turn after turn."""
    found = []
    for category in dict.fromkeys(conversation.category for conversation in conversations):
        own = [replace(c, script=[*c.script]) for c in conversations if c.category == category]
        for first in range(0, len(own), size):
            part = own[first : first + size]
            for turn in range(max(conversation.script.count(None) for conversation in part)):
                found.append(Wave(category, [conversation for conversation in part if conversation.script.count(None) > turn], turn))
    return found


def read_prompts(path, limit, tokenizer, target, force=False):
    """([Conversation], Counter of skipped rows by reason, [warnings]) of JSON lines, or of held-out samples of a folder of shards."""
    if path != "-" and Path(path).is_dir():
        shards = Shards(path, first=0)
        warning = check_tokenizer(tokenizer_sha256(target.folder), shards, f"the tokenizer of {target.name}", force)
        return heldout_prompts(shards, limit), Counter(), [f"--force: {warning}"] if warning else []
    rows, _, _ = read_rows(path, limit)
    conversations, skipped = [], Counter()
    for line, row in rows:
        try:
            tools, script = parse_prompt(row, tokenizer)
        except Skip as skip:
            skipped[skip.reason] += 1
            say(f"line {line + 1} skipped: {skip}")
            continue
        if not isinstance(script[0], list) and not tokenizer.chat_template:
            raise UserError(f"{path}, line {line + 1} is a conversation and the target's tokenizer has no chat template; add its "
                            f"chat_template.jinja, or give rows with text or input_ids")
        category = row.get("category")
        conversations.append(Conversation(line, category if category is None else str(category), tools, script))
    if not conversations:
        raise UserError(f"{path} holds no prompt that can be used ({count_text(skipped) or 'the file has no rows'})")
    return conversations, skipped, []


def heldout_prompts(shards, limit):
    """The samples' ids up to their first answer, as Conversations of the samples' sources."""
    found = []
    for number in shards.heldout.nonzero()[0][:limit]:
        sample = shards.sample(int(number), ("input_ids", "loss_mask"))
        ids, first = sample["input_ids"].tolist(), int(sample["loss_mask"].int().argmax())
        if first:
            found.append(Conversation(int(number), shards.manifest["sources"][shards.index[number, 4]] or None, None, [ids[:first], None]))
    if not found:
        raise UserError(f"{shards.folder} holds no held-out sample with a prompt; extract with --heldout, or give a file of prompts")
    return found


def parse_prompt(row, tokenizer):
    """(tools, script) of one row: a conversation with answers ends at its last user message, one without gets one behind each."""
    try:
        parsed = parse_row(row)
    except Skip as skip:
        if skip.reason != "no answer":
            raise
        parsed = parse_row(row, regenerate=True)
    if "text" in parsed:
        return None, [tokenizer(parsed["text"])["input_ids"], None]
    if "input_ids" in parsed:
        answer = parsed["loss_mask"].index(1) if row.get("loss_mask") and 1 in parsed["loss_mask"] else 0
        return None, [parsed["input_ids"][:answer] if answer else parsed["input_ids"], None]
    script = parsed["messages"]
    if None not in script:
        last = max(n for n, message in enumerate(script) if message["role"] == "user")
        script = [*script[: last + 1], None]
    return parsed["tools"], script


PREDICTED = ("accept_length", "ceiling", "draft_ms", "tokens_per_second", "speed_up")
NOISY = 1.2  # times as long: the verifications of drafters beside each other, which are the same work
COMPARED_FIGURES = {"accept_length": "accept length", "tokens_per_second": "tokens/s", "speed_up": "speed-up"}


def answers_coverage(groups, rows, vocab_size):
    """Share of the tokens of the groups' answers that could be drafted, all but each answer's first, whose id is in the draft
    vocabulary: `rows` int64 [D], None for the full one. None without such tokens."""
    return _share([token for group in groups for answer in group.answers for token in answer.ids[1:]], rows, vocab_size)


def simulated_coverage(shards, samples, rows):
    """The same of what a simulated walk goes over in `samples` of Shards: it drafts no answer's first token, and no sample's second."""
    drafted = []
    for number in samples:
        sample = shards.sample(int(number), ("input_ids", "loss_mask"))
        supervised = sample["loss_mask"].bool()
        drafted += sample["input_ids"][2:][supervised[2:] & supervised[1:-1]].tolist()
    return _share(drafted, rows, shards.manifest["target"]["vocab_size"])


def _share(tokens, rows, vocab_size):
    counts = np.bincount(np.array(tokens, dtype=np.int64), minlength=vocab_size)
    return rounded(coverage(counts, slice(None) if rows is None else rows.cpu().numpy()))


def coverage_warnings(entries, configs):
    """Sentences on drafters whose vocabulary covers clearly less of what was decoded or simulated than their `configs` promise.

    It is no fault: other domains are measured on purpose. entries: those of one concurrency first, in the order of `configs`.
    """
    found = [check_coverage(entry[key], config.get("training") or {}, f"the draft vocabulary of {entry['drafter']}", True, tokens)
             for entry, config in zip(entries, configs, strict=False)
             for key, tokens in (("coverage", "the plain answers' tokens"), ("simulated_coverage", "the held-out answers' tokens"))
             if entry.get(key) is not None]
    return [warning for warning in found if warning]


def verdict(entries, groups, settings):
    """Which drafter of one run is the fastest, a dict, or None where fewer than two were timed.

    entries: the figures of every drafter on the same prompts at one concurrency; groups: of each entry the Groups it was made of.

    The winner has the most tokens/s. It is `too_close` to tell where the 95 % interval of its tokens/s over the runner-up's (bootstrap
    over the prompts that were decoded together, both drafters' times of the same prompts drawn together) includes 1, with few prompts,
    and where the same verification took drafters so different times that other work on the machine decides.

    Plain decoding is reached at an accept length of accept_length(winner) * tokens/s(plain) / tokens/s(winner).
    """
    order = sorted((n for n, entry in enumerate(entries) if entry["tokens_per_second"]), key=lambda n: -entries[n]["tokens_per_second"])
    if len(order) < 2:
        return None
    titles, (first, second) = names(entries), order[:2]
    winner, rate, length = entries[first], entries[first]["tokens_per_second"], entries[first]["accept_length"]
    interval = speed_interval(groups[first], groups[second])
    verifying = [entries[n]["verify_ms"] for n in order if entries[n]["verify_ms"]] or [1]
    doubts = [words for words, holds in (
        ("one batch of prompts cannot tell", interval is None), ("too close to tell", interval is not None and interval[0] <= 1),
        (f"{winner['prompts']} prompts are too few to tell", interval is not None and winner["prompts"] < FEW),
        (f"other work on the machine decides: a verification took {min(verifying):.0f} to {max(verifying):.0f} ms",
         max(verifying) > NOISY * min(verifying))) if holds]
    ratio = rate / entries[second]["tokens_per_second"]
    where = settings["backend"] if settings["backend"] != "local" else settings["device"] if settings["device"] != "cpu" else (
        f"cpu, {settings['threads']} thread{'s' * (settings['threads'] > 1)}")
    span = "" if interval is None else f" (95 %: {interval[0]:.2f}-{interval[1]:.2f})"
    sentences = [f"fastest here ({where}, {settings['dtype']}, {winner['concurrency']} at once): {titles[first]} with {rate:.1f} tokens/s, "
                 f"{ratio:.2f} times {titles[second]}{span}{''.join(f'; {words}' for words in doubts)}"]
    plain, beaten = winner["baseline_tokens_per_second"], None
    if plain and length:
        beaten, needed = plain > rate, length * plain / rate
        span = winner["speed_up_interval"]
        unclear = ", too close to tell" if span is None or span[0] <= 1 <= span[1] else ""
        if beaten:
            sentences.append(f"plain decoding beats them all with {plain:.1f} tokens/s{unclear}: {titles[first]} would have to reach an "
                             f"accept length of {needed:.2f}, and reached {length:.2f}{beyond(needed, settings['steps'])}")
        elif unclear:
            sentences.append(f"plain decoding makes {plain:.1f} tokens/s: whether {titles[first]} is faster is too close to tell")
    even, more = break_even(entries, order, settings["steps"])
    return {"concurrency": winner["concurrency"], "winner": winner["drafter"], "runner_up": entries[second]["drafter"],
            "ratio": rounded(ratio), "ratio_interval": interval, "too_close": bool(doubts), "plain_beats_all": beaten,
            "break_even": even, "sentences": sentences + more}


def break_even(entries, order, steps):
    """What each drafter would have to reach to be as fast as the winner, the first in `order` (numbers of entries): (dicts, sentences).

    A round of K steps takes K * draft_ms + verify_ms and brings accept_length tokens, so that is an accept length of

        accept_length(winner) * round(other) / round(winner)

    draft_ms is each one's median; verify_ms the median of all drafters', as verifying is the same work behind each. Empty where rounds
    are not timed, as on servers.
    """
    timed = [n for n in order if entries[n]["accept_length"] and entries[n]["draft_ms"]]
    if order[0] not in timed:
        return [], []
    titles, winner, verify_ms = names(entries), entries[order[0]], median(entries[n]["verify_ms"] for n in timed)
    found, sentences = [], []
    for n in timed[1:]:
        entry, (round_ms, winner_ms) = entries[n], [steps * one["draft_ms"] + verify_ms for one in (entries[n], winner)]
        reached, needed = entry["accept_length"], winner["accept_length"] * round_ms / winner_ms
        found.append({"drafter": entry["drafter"], "draft_vocab": entry["draft_vocab"], "accept_length": reached,
                      "break_even_accept_length": rounded(needed), "round_ms": rounded(round_ms), "winner_round_ms": rounded(winner_ms)})
        told = (f"{titles[n]} ({entry['draft_vocab']} rows) would have to reach an accept length of {needed:.2f} to be as fast as "
                f"{titles[order[0]]} ({winner['draft_vocab']} rows): it drafts in {entry['draft_ms']:.1f} ms for {winner['draft_ms']:.1f}, "
                f"a verification takes {verify_ms:.1f}, and it reached {reached:.2f}")
        if reached >= needed:
            told += "; by these medians it is as fast, but tokens/s also hold reading the prompts and rounds that other work slowed"
        else:
            told += beyond(needed, steps)
        sentences.append(told)
    return found, sentences


def beyond(needed, steps):
    return f", where {steps} steps cannot give more than {steps + 1}" if needed > steps + 1 else ""


def read_prediction(folder, facts, steps, force):
    """(what build_vocab_map.py --predict wrote into the map in `folder`, warnings).

    facts: of the target that is measured. Raises UserError where there is none, and where it is for other steps or another target.
    """
    facts_there = map_facts(folder, "--prediction")
    found, target = facts_there.get("prediction"), facts_there.get("target") or {}
    again = f"make one with build_vocab_map.py --predict {steps}"
    if found is None:
        raise UserError(f"--prediction {folder}: its {MAP_FILE} holds no prediction; {again}")
    sizes = found.get("sizes") if isinstance(found, dict) else None
    if not isinstance(sizes, list) or not all(
            isinstance(size, dict) and type(size.get("draft_vocab")) is int
            and all(size.get(key) is None or type(size[key]) in (int, float) and 0 <= size[key] < 1e12 for key in PREDICTED)
            for size in sizes):
        raise UserError(f"--prediction {folder}: the prediction in its {MAP_FILE} cannot be used; {again}")
    if found.get("steps") != steps:
        raise UserError(f"--prediction {folder} is for {found.get('steps')} steps, {steps} are measured; give the same --steps, or {again}")
    warnings = [check_same_target(made_for, facts, f"--prediction {folder} was", force)
                for made_for in (target, {**target, "tensors_sha256": found.get("target_sha256")})]
    return found, [f"--force: {warning}" for warning in dict.fromkeys(warnings) if warning]


def compare_prediction(summary, prediction, folder):
    """Put what was predicted for its size into every drafter's entry, and into the summary how far the measurement is from it.

    Returns warnings. Times are compared at concurrency 1, which is what is predicted.
    """
    settings, entries = summary["settings"], summary["drafters"]
    sizes = {size["draft_vocab"]: {key: rounded(size.get(key)) for key in PREDICTED} for size in prediction["sizes"]}
    for entry in entries:
        entry["predicted"] = sizes.get(entry["draft_vocab"])
    errors, told = {}, []
    for key, title in COMPARED_FIGURES.items():
        pairs = [(entry["predicted"][key], entry.get(key) or key == "accept_length" and entry.get("simulated_accept_length"), name)
                 for entry, name in zip(entries, names(entries), strict=True)
                 if entry["predicted"] and (key == "accept_length" or entry.get("concurrency") == 1)]
        found = [(abs(predicted / measured - 1), name) for predicted, measured, name in pairs if predicted is not None and measured]
        errors[key] = rounded(max(found)[0]) if found else None
        told += [f"{title} {max(found)[0]:.1%} ({max(found)[1]})"] if found else []
    summary["prediction"] = {"map": str(folder), "largest_error": errors, "sentences": [
        f"largest error of the prediction: {', '.join(told)}" if told else "the prediction names no figure that was measured here"]}
    ours = {**settings, "device": "cpu" if settings["device"] == "cpu" else "cuda"}  # settings name the card
    wrong = [f"{name} {wanted} for {ours[name]}" for name, wanted in {
        "backend": "local", "topk": 1, "temperature": 0.0, **{key: prediction.get(key) for key in ("dtype", "device", "threads")}}.items()
        if summary["prompts"] and ours[name] != wanted]
    if summary["prompts"] and max(settings["concurrency"]) > 1:
        wrong.append("one prompt at once")
    return [f"--prediction {folder} is for {', '.join(wrong)}: what it says of times does not compare"] if wrong else []


LENGTH = 3  # tokens: the one that prefill gives, and two that drafts are judged for
BATCH = 64  # answers drawn at once
CELL = 5  # expected count from which an answer is a cell of its own; all others are one together


@torch.inference_mode()
def check_sampling(model, prompt_ids, draws, sampling, drafter, steps, topk, draft_tokens, numbers):
    """Pearson's chi-square of `draws` answers of three tokens, decoded as always, against their exact chances.

    drafter, steps, topk, draft_tokens, numbers: as decode takes them. Returns a dict of chi_square, cells, p_value.
    """
    chances = exact_chances(model, prompt_ids, draws, sampling)
    counts = dict.fromkeys(chances, 0)
    for first in range(0, draws, BATCH):
        group = decode(model, [prompt_ids] * min(BATCH, draws - first), LENGTH, frozenset(), drafter, steps, topk, draft_tokens, sampling,
                       numbers)
        for one in group.answers:
            if tuple(one.ids) in counts:
                counts[tuple(one.ids)] += 1
    observed = torch.tensor([*counts.values(), draws - sum(counts.values())], dtype=torch.float64)
    expected = torch.tensor([*chances.values(), 1 - sum(chances.values())], dtype=torch.float64) * draws
    return {"draws": draws, **chi_square(observed, expected)}


def chi_square(observed, expected):
    """Of counts float64 [C]: the last cell is merged into the one before when it expects too little."""
    if len(expected) > 1 and expected[-1] < CELL:
        observed, expected = (torch.cat([part[:-2], part[-2:].sum()[None]]) for part in (observed, expected))
    statistic = float(((observed - expected) ** 2 / expected.clamp_min(1e-12)).sum())
    freedom = len(expected) - 1
    p_value = float(torch.special.gammaincc(*torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)))
    return {"chi_square": round(statistic, 3), "cells": len(expected), "p_value": p_value if freedom else None}


def exact_chances(model, prompt_ids, draws, sampling):
    """{answer of LENGTH ids: its chance} of all that are expected CELL times or more in so many draws, from the target alone."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        longer, prefixes = {}, list(found)
        for first in range(0, len(prefixes), BATCH):
            part = prefixes[first : first + BATCH]
            _, last = model.states(torch.tensor([[*prompt_ids, *prefix] for prefix in part], device=model.device))
            chances, ids = distribution(model.logits(last[:, -1]), sampling)  # [B, C]
            for i, prefix in enumerate(part):
                whole = found[prefix] * chances[i].double()
                for place in (whole * draws >= CELL).nonzero()[:, 0].tolist():
                    token = place if ids is None else int(ids[i, place])
                    longer[(*prefix, token)] = float(whole[place])
        found = longer
    return found


TIE = 4  # rounding steps between two logits: as much as another order of adding up moves them

SHOWN = 5  # differences of one drafter in the table

COLUMNS = [  # title, key, digits
    ("vocab", "draft_vocab", 0), ("cover", "coverage", 4), ("conc.", "concurrency", 0), ("accept", "accept_length", 3),
    ("95 %", "accept_length_interval", 2),
    ("d", "acceptance", 3), ("simul.", "simulated_accept_length", 3), ("95 %", "simulated_accept_length_interval", 2),
    ("s", "simulated_acceptance", 3), ("s. cover", "simulated_coverage", 4), ("tok/s", "tokens_per_second", 1),
    ("plain", "baseline_tokens_per_second", 1), ("speed-up", "speed_up", 2), ("95 %", "speed_up_interval", 2), ("draft ms", "draft_ms", 2),
    ("head", "head_share", 2), ("verify ms", "verify_ms", 1), ("identical", "identical", 0),
]

BESIDE = [  # measured, then predicted, then the accept length of a drafter that is always right where its vocabulary has the token
    ("vocab", "draft_vocab", 0), ("accept", "accept_length", 3), ("simul.", "simulated_accept_length", 3),
    ("pred. accept", "predicted.accept_length", 3), ("tok/s", "tokens_per_second", 1), ("pred. tok/s", "predicted.tokens_per_second", 1),
    ("speed-up", "speed_up", 2), ("pred. x", "predicted.speed_up", 2), ("draft ms", "draft_ms", 2), ("pred. ms", "predicted.draft_ms", 2),
    ("pred. ceiling", "predicted.ceiling", 3),
]

def table(summary):
    """The summary as lines, of at most 160 characters in the table; columns that nothing was measured for are left out. The verdict's
    sentences come last."""
    settings, entries = summary["settings"], summary["drafters"]
    words = [f"{key.replace('_', ' ')} {settings[key]}" for key in
             ("backend", "dtype", "device", "threads", "steps", "topk", "draft_tokens", "max_new_tokens", "temperature")
             if settings.get(key) is not None]
    if settings.get("temperature"):
        words += [f"{key.replace('_', ' ')} {settings[key]}" for key in ("top_p", "top_k", "seed")]
    samples = [entry["simulated_samples"] for entry in entries if "simulated_samples" in entry]
    what = [f"{summary['prompts']} prompts"] * bool(summary["prompts"]) + [f"{count} held-out samples simulated" for count in samples[:1]]
    lines = [f"{summary['target']}, {', '.join(what)}: {', '.join(words)}"]
    if min(filter(None, [summary["prompts"], *samples]), default=0) < FEW:
        lines.append(f"fewer than {FEW} prompts: the intervals are rough")
    first = f", {entries[0]['concurrency']} at once" if len({entry.get("concurrency") for entry in entries}) > 1 else ""
    for key, name in (("baseline_tokens_per_second", f"plain decoding{first}"),
                      ("transformers_tokens_per_second", "transformers' own generate, one prompt at a time")):
        if summary.get(key) is not None:
            lines.append(f"{name}: {summary[key]:.1f} tokens/s")
    if ratio := summary.get("plain_over_transformers"):
        lines[-1] += f"; plain decoding of the same prompts {ratio:.2f} times that"
    rows = []
    for name, entry in zip(names(entries), entries, strict=True):
        rows.append((name, entry))
        parts = entry.get("categories") or {}
        rows += [(f"  {category}", part) for category, part in parts.items() if len(parts) > 1]
    lines += grid(rows, COLUMNS)
    for name, entry in zip(names(entries), entries, strict=True):
        if differences := entry.get("differences"):
            lines.append(f"{name} differs from plain decoding in {len(differences)} of {entry['prompts']} prompts")
            for one in differences[:SHOWN]:
                lines.append(f"  line {one['line']}, answer token {one['position'] + 1}: {one['drafted']} for {one['plain']}")
                if (steps := one.get("rounding_steps")) is not None:
                    lines[-1] += (f", whose logit is {one['gap']:.4g} higher, {steps:g} rounding step{'s' * (steps != 1)} of "
                                  f"{settings['dtype']}: {'a near tie' if steps <= TIE else 'MORE than rounding'}")
            if len(differences) > SHOWN:
                lines.append(f"  and {len(differences) - SHOWN} more in the summary")
    for part in summary.get("verdict") or ():
        lines += part["sentences"]
    if prediction := summary.get("prediction"):
        lines += ["prediction beside measurement:", *grid(list(zip(names(entries), entries, strict=True)), BESIDE),
                  *prediction["sentences"]]
    return lines

def grid(rows, columns):
    """Lines of a table of (name, entry) rows and (title, key, digits) columns; those that no entry has a value for are left out."""
    found = [["drafter", *(name for name, _ in rows)]]
    for title, key, digits in columns:
        values = [_value(entry, key) for _, entry in rows]
        parts = [(title, values)]
        if key in ("acceptance", "simulated_acceptance"):
            depths = max((len(value) for value in values if value), default=0)
            parts = [(f"{title}{depth + 1}", [value[depth] if value else None for value in values]) for depth in range(depths)]
        found += [[name, *(_cell(value, digits) for value in part)] for name, part in parts
                  if any(value not in (None, "") for value in part)]
    widths = [max(map(len, column)) for column in found]
    widths[0] = min(widths[0], max(12, 160 - sum(widths[1:]) - 2 * len(widths[1:])))
    lines = []
    for first, *cells in zip(*found, strict=True):
        short = first if len(first) <= widths[0] else f"{first[: 2 if first[0] == ' ' else 0]}…{first[-widths[0] + 3 :]}"
        lines.append("  ".join([f"{short:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))]))
    return lines

def _value(entry, key):
    """entry["a"]["b"] for a.b; "" where categories have none, None where nothing was measured or predicted."""
    if key == "identical":
        return "-" if entry.get(key) is None else f"{entry[key]} of {entry['prompts']}"
    first, _, second = key.partition(".")
    value = entry.get(first, "")
    return value[second] if second and value else value

def _cell(value, digits):
    if isinstance(value, str):  # also "": drafters have it and categories do not
        return value
    if isinstance(value, list):
        return "-".join(f"{item:.{digits}f}" for item in value)
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    run(main, interrupted="nothing was kept; give the command again")
