#!/usr/bin/env python3
"""Measure drafters: how many drafted tokens the target accepts, and how much faster that makes it.

Decodes prompts plainly and with every drafter given, with the target in transformers (in turn, in the same
run) or on SGLang servers. With --shards also, or only, the accept length is simulated on held-out samples,
for which no target runs. Prints a table on stderr and one line of JSON on stdout. In float32, greedy answers
must equal those of plain decoding id by id: exit code 1 if not.
"""

import json
import math
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch

from common.accept import FEW, figures, names, rounded, simulated_figures, speed_interval
from common.cli import Parser, Progress, UserError, in_range, positive_int, run, say, split_words
from common.conversations import Skip, count_text, parse_row, read_rows, text_ids
from common.decode import (
    LEAST_TEMPERATURE,
    decode,
    distribution,
    head_seconds,
    not_applied,
    transformers_generate,
)
from common.drafter import Drafter, captured_layers, check_embedding, load_drafter
from common.files import replace_file
from common.loss import simulated
from common.plots import check_plot, plot
from common.provenance import compare, made_for, target_record
from common.rendering import Renderer
from common.sglang import answer, serve_commands, server_settings, start_server
from common.shards import Shards, check_shards, open_shards_target
from common.target import Target, load_tokenizer, open_target, stop_ids
from common.target_model import TargetModel, cannot_draft, check_capture, odd_layers
from common.vocab import MAP_FILE, check_coverage, coverage, map_facts

PLAIN, TRANSFORMERS = 0, -1  # decoders' numbers; drafters are 1, 2, ...
WARM_UP = 16  # tokens decoded before anything is timed
COMPARED = 4  # prompts that transformers' own generate answers too
NOT_MEASURED = ("coverage", "accept_length", "acceptance", "tokens_per_second", "speed_up", "identical",
                "prompts", "draft_ms", "verify_ms")


def parse_arguments():
    parser = Parser(__doc__, usage="%(prog)s --target MODEL --drafter DIR [--drafter DIR ...] --prompts FILE "
                                   "[options]\n       %(prog)s --drafter DIR --shards DIR [options]")
    add = parser.add_argument_group("what is measured").add_argument
    add("--target", metavar="MODEL",
        help="folder of a Hugging Face model, or a hub id; default for --shards alone: where they say that "
             "it was, only to read its embedding")
    add("--drafter", action="append", type=Path, default=[], metavar="DIR",
        help="folder that train_drafter.py wrote; several are compared in one run. No default (only "
             "--server-url goes without)")
    add("--prompts", metavar="FILE",
        help="JSON lines with turns, messages, conversations, prompt, text or input_ids, or - for standard "
             "input. The last user message is answered; of turns each one, behind the plain answers to those "
             "before. A row's category is reported apart. A folder of shards: the prompts of its held-out "
             "samples. No default; --shards alone goes without")
    add("--shards", metavar="DIR",
        help="simulate the accept length on whole held-out answers of these shards, for which the target "
             "does not run")
    add("--limit", type=positive_int, help="read only the first N rows; default all")

    add = parser.add_argument_group("how tokens are drafted").add_argument
    add("--steps", type=positive_int, default=3, help="depth of a draft; default 3, as big models are served")
    add("--topk", type=positive_int, default=1,
        help="drafted alternatives behind a token; default 1, a chain: cheapest to verify. More draft a "
             "tree, as in EAGLE-2")
    add("--draft-tokens", type=positive_int,
        help="tokens of one verification, the root included; default all of a chain, steps + 1; a tree has "
             "none")
    add("--max-new-tokens", type=positive_int, default=256,
        help="longest answer; default 256: acceptance has settled by then, longer answers only cost time")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
        help="of target and drafters; default auto, the target's own, as it is served. float32 proves that "
             "answers are identical")
    add("--concurrency", type=lambda text: [positive_int(part) for part in text.split(",")], default=[1],
        metavar="N[,N...]",
        help="prompts decoded at once; several numbers measure each; default 1")

    add = parser.add_argument_group("drawn answers").add_argument
    add("--temperature", type=in_range(0, low_too=True), default=0.0,
        help="default 0, greedy: answers can be compared id by id")
    add("--top-p", type=in_range(0, 1), default=1.0,
        help="draw from the likeliest tokens of this share only; default 1, all")
    add("--top-k", type=in_range(0, low_too=True, kind=int), default=0,
        help="draw from the N likeliest tokens only; default 0, all")
    add("--seed", type=in_range(-(2**63), 2**64 - 1, low_too=True, kind=int), default=0,
        help="of drawn tokens")
    add("--check-sampling", type=positive_int,
        help="also draw N answers of three tokens to the first prompt and compare their frequencies with the "
             "target's distribution (chi-square; needs a temperature above 0, local only; exit code 1 where "
             f"that has less than a chance of {LEAST_CHANCE:g}; some thousands see a fault of some percent)")

    add = parser.add_argument_group("servers").add_argument
    add("--backend", choices=["local", "sglang"], default="local",
        help="default local: target and drafters in this process, in transformers. sglang: on servers, as in "
             "production")
    add("--server-url", metavar="URL",
        help="a running SGLang server with the drafter loaded; default none: servers are started and stopped "
             "here")
    add("--baseline-url", metavar="URL", help="the same without a drafter, for speed-up and identical "
                                              "answers")
    add("--sglang-python", default=sys.executable, metavar="FILE",
        help="Python of SGLang's environment; default the one that runs this script")
    add("--server-arguments", default=[], metavar="TEXT",
        type=lambda text: split_words("--server-arguments", text),
        help="more arguments of sglang.launch_server, in one text; default none")

    add = parser.add_argument_group("what is written besides").add_argument
    add("--out", type=Path, metavar="FILE",
        help="the answers, and the drafted tokens of every verification, as JSON lines")
    add("--plot", type=Path, metavar="PNG",
        help="accept lengths, acceptance per depth and, of several draft vocabularies, speed over size; a "
             "PNG that is there is replaced")
    add("--prediction", type=Path, metavar="MAP",
        help="folder of build_vocab_map.py --predict: what it says of every size stands beside what is "
             "measured")

    add = parser.add_argument_group("rarely").add_argument
    add("--trust-remote-code", action="store_true",
        help="run code that comes with the target; default off, since it can do anything")
    add("--revision", metavar="NAME", help="of the target on the hub; default its main one")
    add("--force", action="store_true",
        help="use a drafter, shards or a prediction made for another target of the same sizes; default off: "
             "none would hold")
    args = parser.parse_args()
    check_arguments(args)
    return args


def main():
    args = parse_arguments()
    setup = open_setup(args)
    conversations, skipped, warnings = [], Counter(), check_drafters(args, setup)
    prediction = None
    if args.prediction:
        prediction, more = read_prediction(args.prediction, setup.record, args.steps, args.force)
        warnings += more
    if args.prompts:
        conversations, skipped, more = read_prompts(args.prompts, args.limit, setup, args.force)
        warnings += more + not_applied(setup.target, setup.sampling)
    summary = begin_summary(args, setup)
    for warning in dict.fromkeys(warnings):
        warn(summary, warning)

    if setup.shards:
        simulate_drafters(args, setup, summary)
    code = 0
    if args.prompts:
        local = open_local(args, setup, summary) if args.backend == "local" else None
        runs = decode_all(args, setup, local, conversations, skipped, summary)
        code = fill(args, setup, local, runs, summary)
        if args.check_sampling:
            code = max(code, check_samplings(args, local, runs, summary))
        if args.out:
            write_answers(args.out, [entry["drafter"] for entry in summary["drafters"]], runs)

    for warning in coverage_warnings(summary["drafters"], setup.candidates):
        warn(summary, warning)
    if prediction:
        for warning in compare_prediction(summary, prediction, args.prediction):
            warn(summary, warning)
    report(args, setup, summary)
    return summary, code


def check_arguments(args):
    if not args.prompts and not args.shards:
        raise UserError("nothing to measure; give --prompts, or --shards to simulate")
    if args.prompts and not args.target:
        raise UserError("--prompts needs --target, whose answers are measured and whose tokenizer reads them")
    if not args.drafter and (args.shards or not args.server_url):
        raise UserError("--drafter is missing; give the folder that train_drafter.py wrote")
    if args.backend == "local" and (args.server_url or args.baseline_url or args.server_arguments):
        raise UserError("--server-url, --baseline-url and --server-arguments are for --backend sglang; add "
                        "it, or leave them out")
    if args.baseline_url and not args.server_url:
        raise UserError("--baseline-url goes with --server-url, the server with the drafter; give both, or "
                        "neither to start servers here")
    if args.server_url and len(args.drafter) > 1:
        raise UserError(f"--server-url has one drafter loaded, {len(args.drafter)} are given; give the one "
                        "that it serves")
    if args.topk == 1 and args.draft_tokens not in (None, args.steps + 1):
        raise UserError(f"--draft-tokens {args.draft_tokens}: a chain of {args.steps} steps has "
                        f"{args.steps + 1} tokens with its root; give --draft-tokens {args.steps + 1}, or "
                        "leave it out")
    most = args.topk + (args.steps - 1) * args.topk**2 + 1  # all that a tree may hold, the root included
    if args.topk > 1 and not 2 <= (args.draft_tokens or 0) <= most:
        raise UserError(f"--topk {args.topk} with {args.steps} steps needs a --draft-tokens from 2 to "
                        f"{most}, the root included; {args.draft_tokens or 'none'} is given")
    if 0 < args.temperature < LEAST_TEMPERATURE:
        raise UserError(f"--temperature {args.temperature}: 0, greedy, or at least {LEAST_TEMPERATURE:g} is "
                        "wanted; give 0")
    if args.check_sampling and (args.backend != "local" or not args.temperature or not args.prompts):
        raise UserError("--check-sampling needs --prompts, --backend local and a --temperature above 0")
    if args.out and not args.prompts:
        raise UserError(f"--out {args.out} holds answers to --prompts; give those, or leave it out")
    if args.out and args.out.exists():
        raise UserError(f"--out {args.out} is there already; give the name of a new file")
    if args.out and not os.access(args.out.parent, os.W_OK | os.X_OK):
        raise UserError(f"--out {args.out} lies in a folder that does not exist, or cannot be written to; "
                        "give a file in a folder where files can be made")
    if args.plot:
        check_plot(args.plot, args.out)


@dataclass
class Candidate:
    """A drafter that is measured."""

    folder: Path
    drafter: Drafter
    rows: torch.Tensor | None  # int64 [D], target ids of a reduced draft vocabulary
    layers: list  # the three HF hidden_states indices that it reads

    @property
    def training(self):
        """What train_drafter.py says of it, {} of another program's drafter."""
        return self.drafter.config.get("training") or {}


@dataclass
class Setup:
    """What is opened once, and how tokens are drafted and drawn."""

    target: Target
    record: dict  # what is opened, as common/provenance.py compares it
    tokenizer: object
    candidates: list  # of Candidate
    shards: Shards | None
    template_kwargs: dict
    eos_ids: list
    shape: dict  # steps, topk, draft_tokens, as decode and servers take them
    sampling: dict  # temperature, top_p, top_k


def open_setup(args):
    shards = Shards(args.shards, first=0) if args.shards else None
    given = args.target, args.revision, args.trust_remote_code
    target = open_shards_target(shards, *given) if shards else open_target(*given)
    if args.prompts and args.backend == "local":
        check_capture(target)
        if odd := odd_layers(target.text):
            raise cannot_draft(target, odd)
    tokenizer = load_tokenizer(target, args.trust_remote_code)
    candidates = []
    for folder in args.drafter:
        drafter, rows = load_drafter(folder, target=target)
        layers = captured_layers(drafter.config, target.num_layers, folder, target.model_class)
        candidates.append(Candidate(folder, drafter, rows, layers))
    return Setup(
        target=target, record=target_record(target, target.facts(), tokenizer), tokenizer=tokenizer,
        candidates=candidates, shards=shards, template_kwargs=common_template_kwargs(candidates),
        eos_ids=stop_ids(target, tokenizer),
        shape={"steps": args.steps, "topk": args.topk, "draft_tokens": args.draft_tokens or args.steps + 1},
        sampling={key: getattr(args, key) for key in ("temperature", "top_p", "top_k")})


def common_template_kwargs(candidates):
    """The chat-template arguments that the drafters were trained with: they get the same prompts."""
    known = [(one.folder, one.training["template_kwargs"]) for one in candidates
             if one.training.get("template_kwargs") is not None]
    for folder, kwargs in known:
        if kwargs != known[0][1]:
            raise UserError(f"{folder} was trained with chat-template arguments {json.dumps(kwargs)}, "
                            f"{known[0][0]} with {json.dumps(known[0][1])}; evaluate them in separate runs")
    return known[0][1] if known else {}


def check_drafters(args, setup):
    """Sentences on what of shards and drafters was made for something else than the target that is here.

    Raises UserError for drafters of other sizes, and for what common/provenance.py refuses. Where drafter and
    shards are alike, only the shards are told of.
    """
    target, here, told, warnings = setup.target, setup.record, None, []
    if setup.shards:
        warnings = check_shards(setup.shards, here, args.force)
        told = made_for(setup.shards.manifest)
        here = {**told, **here}  # their layers and template arguments are the drafters' too
    wanted = {"target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    for one in setup.candidates:
        config, folder = one.drafter.config, one.folder
        for key, size in wanted.items():
            if config[key] != size:
                raise UserError(f"{folder} has {key} {config[key]}, {target.name} needs {size}; use the "
                                "target that it was trained for")
        if args.topk > config["draft_vocab_size"]:
            raise UserError(f"--topk {args.topk} is more than {folder} can draft, "
                            f"{config['draft_vocab_size']} tokens; give at most that")
        check_embedding(folder, target)
        made = {**made_for(one.training), "layers": one.layers}
        warnings += compare(made, here, f"drafter {folder}", args.force, told)
    return warnings


def begin_summary(args, setup):
    """The summary before anything is measured: what later steps fill in is None."""
    settings = {
        "backend": args.backend, **setup.shape, **setup.sampling, "seed": args.seed, "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens, "concurrency": args.concurrency,
        "template_kwargs": setup.template_kwargs, "eos_ids": setup.eos_ids,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    drafters = [(str(one.folder), one.drafter.config["draft_vocab_size"]) for one in setup.candidates]
    entries = [{"drafter": name, "draft_vocab": size, **dict.fromkeys(NOT_MEASURED)}
               for name, size in drafters or [(None, None)]]  # a server's own, which it names
    return {"target": setup.target.name, "settings": settings, "baseline_tokens_per_second": None,
            "transformers_tokens_per_second": None, "drafters": entries, "verdict": None, "prompts": 0,
            "skipped": {}, "warnings": []}


def warn(summary, warning):
    summary["warnings"].append(warning)
    say(f"warning: {warning}")


def simulate_drafters(args, setup, summary):
    """Put into every drafter's entry the figures of a walk over held-out samples, as serving would take
    it."""
    samples = setup.shards.heldout.nonzero()[0][: args.limit]
    if not len(samples):
        raise UserError(f"{args.shards} holds no held-out samples; extract with --heldout, or give shards "
                        "that have some")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    for entry, placed in zip(summary["drafters"], place(setup, device, dtype), strict=True):
        drafter, embedding, rows, _ = placed
        progress = Progress(len(samples), "samples", "simulating")
        with torch.inference_mode():
            counts = simulated(drafter, embedding, rows, setup.shards, samples, args.steps, progress)
        progress.close()
        entry |= simulated_figures(counts)
        entry["simulated_samples"] = len(samples)
        entry["simulated_coverage"] = simulated_coverage(setup.shards, samples, rows)


def place(setup, device, dtype):
    """[(Drafter, embedding [V, H], rows int64 [D] or None, layers)] of the candidates, as decode takes
    them."""
    embedding = setup.target.embedding().to(device, dtype)
    placed = []
    for one in setup.candidates:
        rows = None if one.rows is None else one.rows.to(device)
        placed.append((one.drafter.to(device, dtype), embedding, rows, one.layers))
    return placed


@dataclass
class Conversation:
    """One row. `script` holds messages, with None where the target is still to answer; of rows of ids or text
    it is [ids, None]."""

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
        """Make the prompts; a conversation that cannot go on is counted in `skipped` with all that is left of
        it, and its script is emptied."""
        self.conversations = [conversation for conversation in self.conversations if conversation.script]
        self.prompts = []
        for conversation in self.conversations:
            script = conversation.script
            told = script[: script.index(None)]
            try:
                ids = told[0]
                if not isinstance(ids, list):
                    ids = renderer.prompt_ids(told, conversation.tools)
                if len(ids) > room:
                    raise Skip("too long", f"{len(ids)} tokens, and {room} leave room for the answer in the "
                                           "target's positions")
                if max(ids) >= vocab_size:
                    raise Skip("malformed", f"token id {max(ids)}, the target has {vocab_size}")
                self.prompts.append((conversation.line, ids))
            except Skip as skip:
                skipped[skip.reason] += script.count(None)
                say(f"line {conversation.line + 1} skipped: {skip}")
                script.clear()
        self.conversations = [conversation for conversation in self.conversations if conversation.script]

    def answered(self, renderer, skipped):
        """Put the answers into the conversations, for the turns that follow: plain decoding's, without it the
        first drafter's. A conversation that cannot go on is treated as `prepare` does."""
        group = self.groups.get(PLAIN) or self.groups[1]
        for conversation, one in zip(self.conversations, group.answers, strict=True):
            script = conversation.script
            told = script[: script.index(None)]
            if script.count(None) == 1:
                script.clear()
                continue
            try:
                script[len(told)] = renderer.message(one.ids, told, conversation.tools)
            except Skip as skip:
                skipped[skip.reason] += script.count(None) - 1
                say(f"line {conversation.line + 1} skipped: {skip}")
                script.clear()


def read_prompts(path, limit, setup, force=False):
    """([Conversation], Counter of skipped rows by reason, [warnings]) of JSON lines, or of held-out samples
    of a folder of shards."""
    if path != "-" and Path(path).is_dir():
        return read_heldout(path, limit, setup.record, force)
    rows, _, _ = read_rows(path, limit)
    conversations, skipped = [], Counter()
    for line, row in rows:
        try:
            tools, script = parse_prompt(row, setup.tokenizer)
        except Skip as skip:
            skipped[skip.reason] += 1
            say(f"line {line + 1} skipped: {skip}")
            continue
        if not isinstance(script[0], list) and not setup.tokenizer.chat_template:
            raise UserError(f"{path}, line {line + 1} is a conversation and the target's tokenizer has no "
                            "chat template; add its chat_template.jinja, or give rows with text or input_ids")
        category = row.get("category")
        category = None if category is None else str(category)
        conversations.append(Conversation(line, category, tools, script))
    if not conversations:
        found = count_text(skipped) or "the file has no rows"
        raise UserError(f"{path} holds no prompt that can be used ({found})")
    return conversations, skipped, []


def read_heldout(path, limit, record, force):
    """The same of held-out samples: their ids up to the first answer, by source."""
    shards = Shards(path, first=0)
    # ids ask the same of every target that has the tokenizer
    made = {**record, "tokenizer_sha256": shards.manifest["tokenizer_sha256"]}
    warnings = compare(made, record, path, force)
    conversations = [Conversation(number, source or None, None, [ids, None])
                     for number, source, ids in shards.heldout_prompts(limit)]
    return conversations, Counter(), warnings


def parse_prompt(row, tokenizer):
    """(tools, script) of one row: a conversation with answers ends at its last user message, one without gets
    one behind each."""
    try:
        parsed = parse_row(row)
    except Skip as skip:
        if skip.reason != "no answer":
            raise
        parsed = parse_row(row, regenerate=True)
    if "text" in parsed:
        return None, [text_ids(tokenizer, parsed["text"]), None]
    if "input_ids" in parsed:
        ids, mask = parsed["input_ids"], parsed["loss_mask"]
        first = mask.index(1) if 1 in mask else 0
        return None, [ids[:first] or ids, None]
    script = parsed["messages"]
    if None not in script:
        last = max(n for n, message in enumerate(script) if message["role"] == "user")
        script = [*script[: last + 1], None]
    return parsed["tools"], script


def waves(conversations, size):
    """Fresh Waves over all answers of `conversations`: of one category, up to `size` conversations at a time,
    turn after turn."""
    found = []
    for category in dict.fromkeys(conversation.category for conversation in conversations):
        own = [replace(c, script=[*c.script]) for c in conversations if c.category == category]
        for first in range(0, len(own), size):
            part = own[first : first + size]
            for turn in range(max(conversation.script.count(None) for conversation in part)):
                rest = [conversation for conversation in part if conversation.script.count(None) > turn]
                found.append(Wave(category, rest, turn))
    return found


@dataclass
class Local:
    """The target in this process, through which plain decoding and every drafter go."""

    model: TargetModel
    drafters: list  # (Drafter, embedding, rows, layers), as decode takes them
    setup: Setup
    random: Callable  # random numbers, as decode takes them
    room: int | None = None  # positions of a prompt and its answer that it has itself; None: the target's

    @property
    def numbers(self):
        return [PLAIN, *range(1, len(self.drafters) + 1), TRANSFORMERS]

    def decode(self, number, prompts, limit, concurrency):
        """Answers of decoder `number` to prompts (lists of ids), of up to `limit` ids, as a Group. A wave has
        no more prompts than `concurrency`."""
        eos_ids = set(self.setup.eos_ids)
        if number == TRANSFORMERS:
            return transformers_generate(self.model, prompts[0], limit, eos_ids)
        drafter = () if number == PLAIN else self.drafters[number - 1]
        return decode(self.model, prompts, limit, eos_ids, drafter, **self.setup.shape,
                      sampling=self.setup.sampling, numbers=self.random)


@dataclass
class Server:
    """An SGLang server, which is one decoder; used as Local is."""

    url: str
    numbers: list
    setup: Setup
    room: int | None

    def decode(self, number, prompts, limit, concurrency):
        steps = None if number == PLAIN else self.setup.shape["steps"]
        return answer(self.url, prompts, limit, set(self.setup.eos_ids), concurrency, self.setup.sampling,
                      steps)


def open_local(args, setup, summary):
    every_layer = sorted(set().union(*(one.layers for one in setup.candidates)))
    model = TargetModel(setup.target, every_layer, args.dtype, trust_remote_code=args.trust_remote_code)
    model.check_logits()
    if model.odd:  # of code that comes with a model, whose config did not tell
        raise cannot_draft(setup.target, model.odd)
    summary["settings"]["dtype"] = str(model.dtype).removeprefix("torch.")
    return Local(model, place(setup, model.device, model.dtype), setup, seeded(args.seed))


def seeded(seed):
    """The random numbers of an evaluation, as decode takes them: one after the other, whichever answer they
    are for."""
    generator = np.random.default_rng(seed % 2**64)
    return lambda prompt, first, count: generator.random(count)


@contextmanager
def open_server(args, setup, number, url, logs, summary):
    """A Server for decoder `number` at `url`; None: it is started, and stopped in the end, with its output in
    the folder `logs`."""
    if url:
        running = nullcontext(url)
    else:
        drafter = None if number == PLAIN else args.drafter[number - 1]
        running = start_server(
            args.sglang_python, setup.target.folder, drafter, **setup.shape, dtype=args.dtype,
            extra=args.server_arguments, log=logs / f"server-{number}.log",
            trust_remote_code=args.trust_remote_code)
    with running as address:
        found = server_settings(address, drafter_expected=number != PLAIN)
        first = summary["settings"].get("server", found)  # the server before
        check_server(args, setup, number, first, found, address)
        enter_server(args, setup, number, first, found, address, summary)
        yield Server(address, [number], setup, found["room"])


def check_server(args, setup, number, first, found, address):
    """Refuse a server with the settings `found`, `first` being those of the one before it."""
    wrong = [f"{key.replace('_', '-')} {found[key]} for {value}"
             for key, value in setup.shape.items() if found[key] != value]
    if number != PLAIN and wrong:
        raise UserError(f"{address} drafts with {', '.join(wrong)}; give its own numbers with --steps, "
                        "--topk and --draft-tokens")
    if number != PLAIN and args.temperature and found["device"] == "cpu":
        raise UserError(f"{address} runs on a CPU, where SGLang judges drafts greedily whatever is asked "
                        "for; give --temperature 0")
    if first["dtype"] != found["dtype"]:
        raise UserError(f"{address} runs in {found['dtype']}, the other one in {first['dtype']}; start both "
                        "alike")
    if args.server_url and args.dtype not in ("auto", found["dtype"]):
        raise UserError(f"{address} runs in {found['dtype']}, --dtype {args.dtype} is given; start it so, or "
                        "leave --dtype out")


def enter_server(args, setup, number, first, found, address, summary):
    """Put what a server says of itself into the summary, and warn where it is not what was asked for."""
    settings = summary["settings"]
    settings["server"] = {**first, **{key: value for key, value in found.items() if value is not None}}
    settings["dtype"] = found["dtype"]
    other = [f"{key} {found[key]} for {first[key]}" for key in ("version", "device", "tp_size")
             if found[key] != first[key]]
    if other:
        warn(summary, f"{address} differs from the other server ({', '.join(other)}): their speeds do not "
                      "compare")
    given = [("model", args.target, setup.target.folder)]
    if number != PLAIN:
        given += [("drafter", folder, folder) for folder in args.drafter]
    for key, name, folder in given if args.server_url else ():
        there, here = Path(str(found[key])), Path(folder).resolve()  # another machine may keep it elsewhere
        same = there.resolve() == here if there.exists() else there.name == here.name
        if found[key] != str(name) and not same:
            warn(summary, f"{address} serves {key} {found[key]}, {name} is given; only the names were "
                          "compared")
    if number != PLAIN and not args.drafter:
        summary["drafters"][0]["drafter"] = found["drafter"]


def decode_all(args, setup, local, conversations, skipped, summary):
    """Decode every prompt with every decoder. Returns {concurrency: its Waves, those that hold prompts}.

    local: None for servers, which run one after the other.
    """
    count, most = len(conversations), max(args.concurrency)
    if most > count:
        warn(summary, f"--concurrency {most} is more than there are prompts: at most {count} were decoded at "
                      "once")
    renderer = Renderer(setup.tokenizer, setup.template_kwargs, setup.eos_ids)
    # a server is given all prompts of a category and turn, and has so many of them in work; here a batch is
    # so many
    runs = {number: waves(conversations, number if local else count) for number in args.concurrency}
    answers = sum(len(wave.conversations) for run_waves in runs.values() for wave in run_waves)
    urls = [None] * (len(args.drafter) + 1)  # of each decoder; None: it is started here
    if args.server_url:
        urls = [args.baseline_url, args.server_url]
    measured = [number for number, url in enumerate(urls) if url or not args.server_url]
    progress = Progress(answers * len(measured), "answers", "decoding")
    if local:
        decode_with(local, args, runs, renderer, skipped, progress)
    else:
        logs = None if args.server_url else Path(tempfile.mkdtemp(prefix="sglang-"))
        for number in measured:
            with open_server(args, setup, number, urls[number], logs, summary) as server:
                decode_with(server, args, runs, renderer, skipped, progress)
    progress.close()
    runs = {number: [wave for wave in run_waves if wave.prompts] for number, run_waves in runs.items()}
    summary["skipped"] = dict(skipped)
    summary["prompts"] = sum(len(wave.prompts) for wave in runs[args.concurrency[0]])
    if not summary["prompts"]:
        raise UserError(f"{args.prompts} holds no prompt that can be used ({count_text(skipped)})")
    return runs


def decode_with(decoder, args, runs, renderer, skipped, progress):
    """Let a Local or Server answer every wave; what was never answered before goes into its conversation."""
    setup = decoder.setup
    positions = setup.target.text["max_position_embeddings"] - setup.shape["draft_tokens"]
    positions = min(positions, decoder.room or positions)
    room = positions - args.max_new_tokens
    for concurrency, run_waves in runs.items():
        counted = skipped if concurrency == args.concurrency[0] else Counter()
        warm = set()
        for index, wave in enumerate(run_waves):
            fresh = wave.prompts is None
            if fresh:
                wave.prepare(renderer, room, setup.target.vocab_size, counted)
            if not wave.prompts:
                continue
            prompts = [ids for _, ids in wave.prompts]
            numbers = decoder.numbers
            if index >= COMPARED or concurrency > 1:
                numbers = [number for number in numbers if number != TRANSFORMERS]
            shift = index % len(numbers)  # each is first, second, ... equally often
            for number in numbers[shift:] + numbers[:shift]:
                if number not in warm:
                    warm.add(number)
                    behind = positions - max(map(len, prompts))  # the longest prompt
                    decoder.decode(number, prompts[:concurrency], max(1, min(WARM_UP, behind)), concurrency)
                wave.groups[number] = decoder.decode(number, prompts, args.max_new_tokens, concurrency)
                progress.update(len(prompts) * (number != TRANSFORMERS))
            if fresh:
                wave.answered(renderer, counted)


def fill(args, setup, local, runs, summary):
    """Put the figures into the summary: an entry for every drafter and concurrency. Returns the exit code."""
    settings, entries, verdicts = summary["settings"], [], []
    for concurrency, run_waves in runs.items():
        own, groups = [], []
        for number, begun in enumerate(summary["drafters"], start=1):
            measured = measure(args, setup, local, run_waves, number, concurrency)
            own.append({**begun, "concurrency": concurrency, **measured})
            groups.append([wave.groups[number] for wave in run_waves])
        entries += own
        verdicts.append(verdict(own, groups, settings))
    summary["drafters"] = entries
    summary["verdict"] = [found for found in verdicts if found] or None
    summary["baseline_tokens_per_second"] = entries[0]["baseline_tokens_per_second"]

    compared = [wave for wave in runs.get(1, ()) if TRANSFORMERS in wave.groups]
    if compared:
        theirs, plain = ([wave.groups[number] for wave in compared] for number in (TRANSFORMERS, PLAIN))
        both = figures(theirs, plain, args.steps)
        summary["transformers_tokens_per_second"] = both["baseline_tokens_per_second"]
        summary["plain_over_transformers"] = both["speed_up"]
    return int(settings["dtype"] == "float32" and any(entry["differences"] for entry in entries))


def measure(args, setup, local, run_waves, number, concurrency):
    """All that is measured of drafter `number` at one concurrency, a dict."""
    found = wave_figures(args, setup, run_waves, number)
    categories = sorted({wave.category for wave in run_waves}, key=str)
    found["categories"] = {}
    if categories != [None]:
        for category in categories:
            part = [wave for wave in run_waves if wave.category == category]
            found["categories"][category or "(none)"] = wave_figures(args, setup, part, number)
    if local and found["draft_ms"]:
        head_ms = 1000 * head_seconds(setup.candidates[number - 1].drafter, concurrency)
        share = head_ms / found["draft_ms"]
        found["head_ms"] = round(head_ms, 4)
        found["head_share"] = round(share, 4) if share <= 1 else None  # more: other work came between the two
    found["differences"] = None
    if found["identical"] is not None:
        found["differences"] = differences(local.model if local else None, run_waves, number)
    return found


def wave_figures(args, setup, run_waves, number):
    """figures() of drafter `number` over these waves, with the coverage of the plain answers."""
    plain = [wave.groups[PLAIN] for wave in run_waves if PLAIN in wave.groups]
    found = figures(plain or None, [wave.groups[number] for wave in run_waves], args.steps)
    if setup.candidates:
        rows = setup.candidates[number - 1].rows
        found["coverage"] = answers_coverage(plain, rows, setup.target.vocab_size)
    if args.temperature:
        found["identical"] = None  # drawn answers differ, as they should
    return found


@torch.inference_mode()
def differences(model, run_waves, number):
    """Where drafter `number` first wrote another id than plain decoding, for every prompt with one.

    With a `model`, how far apart the target's logits of the two ids are, also in rounding steps of its dtype
    at that size: few are a near tie, many a fault.
    """
    found = []
    for wave in run_waves:
        answers = zip(wave.prompts, wave.groups[PLAIN].answers, wave.groups[number].answers, strict=True)
        for (line, prompt_ids), plain, ours in answers:
            if plain.ids == ours.ids:
                continue
            position = 0
            while plain.ids[position : position + 1] == ours.ids[position : position + 1]:
                position += 1
            entry = {"line": line + 1, "turn": wave.turn, "position": position,
                     "plain": plain.ids[position : position + 1],
                     "drafted": ours.ids[position : position + 1],
                     "best_two": None, "gap": None, "rounding_steps": None}
            if model:
                _, last = model.states(torch.tensor([prompt_ids + plain.ids[:position]], device=model.device))
                logits = model.logits(last[0, -1])  # [V]
                entry["best_two"] = logits.topk(2).indices.tolist()
                if entry["plain"] and entry["drafted"]:  # one may have ended
                    entry |= gap_of(logits, entry["plain"][0], entry["drafted"][0], model.dtype)
            found.append(entry)
    return found


def gap_of(logits, plain, drafted, dtype):
    high, low = float(logits[plain]), float(logits[drafted])
    size = max(abs(high), abs(low), 1e-9)
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(size))
    return {"gap": round(high - low, 6), "rounding_steps": round(abs(high - low) / step, 1)}


def answers_coverage(groups, rows, vocab_size):
    """Share of the tokens of the groups' answers that could be drafted, all but each answer's first, whose id
    is in the draft vocabulary: `rows` int64 [D], None for the full one. None without such tokens."""
    tokens = [token for group in groups for one in group.answers for token in one.ids[1:]]
    return share_covered(tokens, rows, vocab_size)


def simulated_coverage(shards, samples, rows):
    """The same of what a simulated walk goes over in `samples` of Shards: it drafts no answer's first token,
    and no sample's second."""
    drafted = []
    for number in samples:
        sample = shards.sample(int(number), ("input_ids", "loss_mask"))
        supervised = sample["loss_mask"].bool()
        drafted += sample["input_ids"][2:][supervised[2:] & supervised[1:-1]].tolist()
    return share_covered(drafted, rows, shards.manifest["target"]["vocab_size"])


def share_covered(tokens, rows, vocab_size):
    counts = np.bincount(np.array(tokens, dtype=np.int64), minlength=vocab_size)
    return rounded(coverage(counts, slice(None) if rows is None else rows.cpu().numpy()))


def coverage_warnings(entries, candidates):
    """Sentences on drafters whose vocabulary covers clearly less of what was decoded or simulated than was
    promised when it was made.

    It is no fault: other domains are measured on purpose. entries: those of one concurrency first, in the
    order of the candidates.
    """
    found = []
    for entry, one in zip(entries, candidates, strict=False):
        what = f"the draft vocabulary of {entry['drafter']}"
        for key, tokens in (("coverage", "the plain answers' tokens"),
                            ("simulated_coverage", "the held-out answers' tokens")):
            if entry.get(key) is not None:
                found.append(check_coverage(entry[key], one.training, what, True, tokens))
    return [warning for warning in found if warning]


NOISY = 1.2  # times as long: the verifications of drafters beside each other, which are the same work


def verdict(entries, groups, settings):
    """Which drafter of one run is the fastest, a dict, or None where fewer than two were timed.

    entries: the figures of every drafter on the same prompts at one concurrency; groups: of each entry the
    Groups it was made of.

    The winner has the most tokens/s. It is `too_close` to tell where the 95 % interval of its tokens/s over
    the runner-up's (bootstrap over the prompts that were decoded together, both drafters' times of the same
    prompts drawn together) includes 1, with few prompts, and where the same verification took drafters so
    different times that other work on the machine decides.
    """
    timed = [n for n, entry in enumerate(entries) if entry["tokens_per_second"]]
    if len(timed) < 2:
        return None
    order = sorted(timed, key=lambda n: -entries[n]["tokens_per_second"])
    first, second = order[:2]
    titles, winner, runner_up = names(entries), entries[first], entries[second]
    ratio = winner["tokens_per_second"] / runner_up["tokens_per_second"]
    interval = speed_interval(groups[first], groups[second])
    doubts = find_doubts(winner, interval, [entries[n]["verify_ms"] for n in order])

    where = settings["backend"] if settings["backend"] != "local" else settings["device"]
    if where == "cpu":
        where += f", {settings['threads']} thread{'s' * (settings['threads'] > 1)}"
    span = "" if interval is None else f" (95 %: {interval[0]:.2f}-{interval[1]:.2f})"
    told = (f"fastest here ({where}, {settings['dtype']}, {winner['concurrency']} at once): {titles[first]} "
            f"with {winner['tokens_per_second']:.1f} tokens/s, {ratio:.2f} times {titles[second]}{span}")
    plain_beats_all, of_plain = against_plain(winner, titles[first], settings["steps"])
    even, of_others = break_even(entries, order, settings["steps"])
    return {"concurrency": winner["concurrency"], "winner": winner["drafter"],
            "runner_up": runner_up["drafter"], "ratio": rounded(ratio), "ratio_interval": interval,
            "too_close": bool(doubts), "plain_beats_all": plain_beats_all, "break_even": even,
            "sentences": ["; ".join([told, *doubts]), *of_plain, *of_others]}


def find_doubts(winner, interval, verify_ms):
    """Why it cannot be told that the winner is faster: words, none where it can. verify_ms: every drafter's,
    None where rounds are not timed."""
    doubts = []
    if interval is None:
        doubts.append("one batch of prompts cannot tell")
    else:
        if interval[0] <= 1:
            doubts.append("too close to tell")
        if winner["prompts"] < FEW:
            doubts.append(f"{winner['prompts']} prompts are too few to tell")
    timed = [ms for ms in verify_ms if ms]
    if timed and max(timed) > NOISY * min(timed):
        doubts.append(f"other work on the machine decides: a verification took {min(timed):.0f} to "
                      f"{max(timed):.0f} ms")
    return doubts


def against_plain(winner, title, steps):
    """(whether plain decoding is faster than the winner, None where that is not known; sentences).

    Plain decoding is reached at an accept length of accept_length(winner) * tokens/s(plain) /
    tokens/s(winner).
    """
    plain, rate = winner["baseline_tokens_per_second"], winner["tokens_per_second"]
    length, interval = winner["accept_length"], winner["speed_up_interval"]
    if not plain or not length:
        return None, []
    unclear = interval is None or interval[0] <= 1 <= interval[1]
    if plain > rate:
        needed = length * plain / rate
        doubt = ", too close to tell" if unclear else ""
        return True, [f"plain decoding beats them all with {plain:.1f} tokens/s{doubt}: {title} would have "
                      f"to reach an accept length of {needed:.2f}, and reached "
                      f"{length:.2f}{beyond(needed, steps)}"]
    if unclear:
        return False, [f"plain decoding makes {plain:.1f} tokens/s: whether {title} is faster is too close "
                       "to tell"]
    return False, []


def break_even(entries, order, steps):
    """What each drafter would have to reach to be as fast as the winner, the first in `order` (numbers of
    entries): (dicts, sentences).

    A round of K steps takes K * draft_ms + verify_ms and brings accept_length tokens, so that is an accept
    length of

        accept_length(winner) * round(other) / round(winner)

    draft_ms is each one's median; verify_ms the median of all drafters', as verifying is the same work behind
    each. Empty where rounds are not timed, as on servers.
    """
    timed = [n for n in order if entries[n]["accept_length"] and entries[n]["draft_ms"]]
    if order[0] not in timed:
        return [], []
    titles, winner = names(entries), entries[order[0]]
    verify_ms = median(entries[n]["verify_ms"] for n in timed)
    winner_ms = steps * winner["draft_ms"] + verify_ms
    found, sentences = [], []
    for n in timed[1:]:
        entry, reached = entries[n], entries[n]["accept_length"]
        round_ms = steps * entry["draft_ms"] + verify_ms
        needed = winner["accept_length"] * round_ms / winner_ms
        found.append({"drafter": entry["drafter"], "draft_vocab": entry["draft_vocab"],
                      "accept_length": reached, "break_even_accept_length": rounded(needed),
                      "round_ms": rounded(round_ms), "winner_round_ms": rounded(winner_ms)})
        follows = beyond(needed, steps)
        if reached >= needed:
            follows = ("; by these medians it is as fast, but tokens/s also hold reading the prompts and "
                       "rounds that other work slowed")
        sentences.append(f"{titles[n]} ({entry['draft_vocab']} rows) would have to reach an accept length of "
                         f"{needed:.2f} to be as fast as {titles[order[0]]} ({winner['draft_vocab']} rows): "
                         f"it drafts in {entry['draft_ms']:.1f} ms for {winner['draft_ms']:.1f}, a "
                         f"verification takes {verify_ms:.1f}, and it reached {reached:.2f}{follows}")
    return found, sentences


def beyond(needed, steps):
    return f", where {steps} steps cannot give more than {steps + 1}" if needed > steps + 1 else ""


PREDICTED = ("accept_length", "ceiling", "draft_ms", "tokens_per_second", "speed_up")
COMPARED_FIGURES = {"accept_length": "accept length", "tokens_per_second": "tokens/s", "speed_up": "speed-up"}


def read_prediction(folder, record, steps, force):
    """(what build_vocab_map.py --predict wrote into the map in `folder`, warnings).

    record: of the target that is measured. Raises UserError where there is none, and where it is for other
    steps or another target.
    """
    facts = map_facts(folder, "--prediction")
    found = facts.get("prediction")
    again = f"make one with build_vocab_map.py --predict {steps}"
    if found is None:
        raise UserError(f"--prediction {folder}: its {MAP_FILE} holds no prediction; {again}")
    if found["steps"] != steps:
        raise UserError(f"--prediction {folder} is for {found['steps']} steps, {steps} are measured; give "
                        f"the same --steps, or {again}")
    return found, compare(made_for(facts), record, f"--prediction {folder}", force)


def compare_prediction(summary, prediction, folder):
    """Put what was predicted for its size into every drafter's entry, and into the summary how far the
    measurement is from it. Returns warnings."""
    sizes = {size["draft_vocab"]: {key: rounded(size[key]) for key in PREDICTED}
             for size in prediction["sizes"]}
    for entry in summary["drafters"]:
        entry["predicted"] = sizes.get(entry["draft_vocab"])
    errors, told = {}, []
    for key, title in COMPARED_FIGURES.items():
        largest, name = max(prediction_errors(summary["drafters"], key), default=(None, None))
        errors[key] = rounded(largest)
        if name:
            told.append(f"{title} {largest:.1%} ({name})")
    sentence = "the prediction names no figure that was measured here"
    if told:
        sentence = f"largest error of the prediction: {', '.join(told)}"
    summary["prediction"] = {"map": str(folder), "largest_error": errors, "sentences": [sentence]}

    settings = summary["settings"]
    ours = {**settings, "device": "cpu" if settings["device"] == "cpu" else "cuda"}  # settings name the card
    wanted = {"backend": "local", "topk": 1, "temperature": 0.0,
              **{key: prediction[key] for key in ("dtype", "device", "threads")}}
    wrong = [f"{name} {value} for {ours[name]}" for name, value in wanted.items() if ours[name] != value]
    if max(settings["concurrency"]) > 1:
        wrong.append("one prompt at once")
    if not wrong or not summary["prompts"]:
        return []
    return [f"--prediction {folder} is for {', '.join(wrong)}: what it says of times does not compare"]


def prediction_errors(entries, key):
    """[(relative error, drafter's name)] where the figure was predicted and measured; times at concurrency 1,
    for which they are predicted."""
    found = []
    for entry, name in zip(entries, names(entries), strict=True):
        measured = entry.get(key)
        if key == "accept_length":
            measured = measured or entry.get("simulated_accept_length")
        elif entry.get("concurrency") != 1:
            continue
        predicted = entry["predicted"] and entry["predicted"][key]
        if predicted is not None and measured:
            found.append((abs(predicted / measured - 1), name))
    return found


LEAST_CHANCE = 1e-4  # of a right sampler's chi-square; --check-sampling fails below
LENGTH = 3  # tokens: the one that prefill gives, and two that drafts are judged for
BATCH = 64  # answers drawn at once
CELL = 5  # expected count from which an answer is a cell of its own; all others are one together


def check_samplings(args, local, runs, summary):
    """Put a chi-square check into every drafter's entry. Returns 1 if one fails."""
    _, prompt_ids = runs[args.concurrency[0]][0].prompts[0]
    numbers, code = seeded(args.seed), 0
    for number, drafter in enumerate(local.drafters):
        found = check_sampling(local.model, prompt_ids, args.check_sampling, local.setup.sampling, drafter,
                               **local.setup.shape, numbers=numbers)
        chance = found["p_value"]
        if chance is None:
            told = "too few draws to tell"
        elif chance < LEAST_CHANCE:
            code, told = 1, f"p = {chance:.2g}, NOT the distribution of the target"
        else:
            told = f"p = {chance:.2g}, no difference from the distribution of the target"
        say(f"{args.drafter[number]}: {found['draws']} answers of three tokens drawn, chi-square "
            f"{found['chi_square']} over the {found['cells']} that can be told apart: {told} (below "
            f"{LEAST_CHANCE} fails)")
        for entry in summary["drafters"][number :: len(local.drafters)]:
            entry["sampling_check"] = found
    return code


@torch.inference_mode()
def check_sampling(model, prompt_ids, draws, sampling, drafter, steps, topk, draft_tokens, numbers):
    """Pearson's chi-square of `draws` answers of three tokens, decoded as always, against their exact
    chances.

    drafter, steps, topk, draft_tokens, numbers: as decode takes them. Returns a dict of chi_square, cells,
    p_value.
    """
    chances = exact_chances(model, prompt_ids, draws, sampling)
    counts = dict.fromkeys(chances, 0)
    for first in range(0, draws, BATCH):
        prompts = [prompt_ids] * min(BATCH, draws - first)
        group = decode(model, prompts, LENGTH, frozenset(), drafter, steps, topk, draft_tokens, sampling,
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
    return {"chi_square": round(statistic, 3), "cells": len(expected),
            "p_value": p_value if freedom else None}


def exact_chances(model, prompt_ids, draws, sampling):
    """{answer of LENGTH ids: its chance} of all that are expected CELL times or more in so many draws, from
    the target alone."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        longer, prefixes = {}, list(found)
        for first in range(0, len(prefixes), BATCH):
            part = prefixes[first : first + BATCH]
            ids = torch.tensor([[*prompt_ids, *prefix] for prefix in part], device=model.device)
            _, last = model.states(ids)
            chances, order = distribution(model.logits(last[:, -1]), sampling)  # [B, C]
            for i, prefix in enumerate(part):
                whole = found[prefix] * chances[i].double()
                for place in (whole * draws >= CELL).nonzero()[:, 0].tolist():
                    token = place if order is None else int(order[i, place])
                    longer[(*prefix, token)] = float(whole[place])
        found = longer
    return found


TIE = 4  # rounding steps between two logits: as much as another order of adding up moves them
SHOWN = 5  # differences of one drafter in the table
WIDTH = 160  # of the table
SETTINGS = ("backend", "dtype", "device", "threads", "steps", "topk", "draft_tokens", "max_new_tokens",
            "temperature")
COLUMNS = [  # title, key, digits
    ("vocab", "draft_vocab", 0), ("cover", "coverage", 4), ("conc.", "concurrency", 0),
    ("accept", "accept_length", 3), ("95 %", "accept_length_interval", 2), ("d", "acceptance", 3),
    ("simul.", "simulated_accept_length", 3), ("95 %", "simulated_accept_length_interval", 2),
    ("s", "simulated_acceptance", 3), ("s. "
                                       "cover", "simulated_coverage", 4), ("tok/s", "tokens_per_second", 1),
    ("plain", "baseline_tokens_per_second", 1), ("speed-up", "speed_up", 2), ("95 %", "speed_up_interval", 2),
    ("draft ms", "draft_ms", 2), ("head", "head_share", 2), ("verify ms", "verify_ms", 1),
    ("identical", "identical", 0),
]
BESIDE = [  # measured, then predicted; the ceiling is of a drafter that is right wherever it has the token
    ("vocab", "draft_vocab", 0), ("accept", "accept_length", 3), ("simul.", "simulated_accept_length", 3),
    ("pred. accept", "predicted.accept_length", 3), ("tok/s", "tokens_per_second", 1),
    ("pred. tok/s", "predicted.tokens_per_second", 1), ("speed-up", "speed_up", 2),
    ("pred. x", "predicted.speed_up", 2), ("draft ms", "draft_ms", 2), ("pred. ms", "predicted.draft_ms", 2),
    ("pred. ceiling", "predicted.ceiling", 3),
]


def report(args, setup, summary):
    """Say the table and how each drafter is served, which goes into its entries, and plot."""
    for line in table(summary):
        say(line)
    for folder in args.drafter:
        commands = serve_commands(setup.target.folder, folder, **setup.shape,
                                  dtype=summary["settings"]["dtype"],
                                  trust_remote_code=args.trust_remote_code)
        if args.server_arguments:
            commands["sglang"] += f" {shlex.join(args.server_arguments)}"
        vllm = commands["vllm"] or "(vLLM drafts chains only: --topk 1)"
        say(f"to serve {folder}:\n  {commands['sglang']}\n  {vllm}")
        for entry in summary["drafters"]:
            if entry["drafter"] == str(folder):
                entry["serve"] = commands
    if args.plot:
        plot(args.plot, summary)


def table(summary):
    """The summary as lines, of at most WIDTH characters in the table; columns that nothing was measured for
    are left out."""
    entries = summary["drafters"]
    titled = list(zip(names(entries), entries, strict=True))
    lines, rows = head_lines(summary), []
    for name, entry in titled:
        rows.append((name, entry))
        parts = entry.get("categories") or {}
        if len(parts) > 1:
            rows += [(f"  {category}", part) for category, part in parts.items()]
    lines += grid(rows, COLUMNS)
    for name, entry in titled:
        if entry.get("differences"):
            lines += difference_lines(name, entry, summary["settings"]["dtype"])
    for part in summary["verdict"] or ():
        lines += part["sentences"]
    if "prediction" in summary:
        lines += ["prediction beside "
                  "measurement:", *grid(titled, BESIDE), *summary["prediction"]["sentences"]]
    return lines


def head_lines(summary):
    settings, entries, prompts = summary["settings"], summary["drafters"], summary["prompts"]
    shown = SETTINGS + (("top_p", "top_k", "seed") if settings["temperature"] else ())
    words = [f"{key.replace('_', ' ')} {settings[key]}" for key in shown]
    samples = entries[0].get("simulated_samples")
    what = [f"{prompts} prompts"] if prompts else []
    if samples:
        what.append(f"{samples} held-out samples simulated")
    lines = [f"{summary['target']}, {', '.join(what)}: {', '.join(words)}"]
    if min(count for count in (prompts, samples) if count) < FEW:
        lines.append(f"fewer than {FEW} prompts: the intervals are rough")
    plain, theirs = summary["baseline_tokens_per_second"], summary["transformers_tokens_per_second"]
    if plain is not None:
        at_once = f", {entries[0]['concurrency']} at once" if len(settings["concurrency"]) > 1 else ""
        lines.append(f"plain decoding{at_once}: {plain:.1f} tokens/s")
    if theirs is not None:
        lines.append(f"transformers' own generate, one prompt at a time: {theirs:.1f} tokens/s; plain "
                     f"decoding of the same prompts {summary['plain_over_transformers']:.2f} times that")
    return lines


def difference_lines(name, entry, dtype):
    found = entry["differences"]
    lines = [f"{name} differs from plain decoding in {len(found)} of {entry['prompts']} prompts"]
    for one in found[:SHOWN]:
        told, steps = "", one["rounding_steps"]
        if steps is not None:
            kind = "a near tie" if steps <= TIE else "MORE than rounding"
            told = (f", whose logit is {one['gap']:.4g} higher, {steps:g} rounding step{'s' * (steps != 1)} "
                    f"of {dtype}: {kind}")
        lines.append(f"  line {one['line']}, answer token {one['position'] + 1}: {one['drafted']} for "
                     f"{one['plain']}{told}")
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} more in the summary")
    return lines


def grid(rows, columns):
    """Lines of a table of (name, entry) rows and (title, key, digits) columns; those that no entry has a
    value for are left out."""
    found = [["drafter", *(name for name, _ in rows)]]  # column by column
    for title, key, digits in columns:
        values = [_value(entry, key) for _, entry in rows]
        parts = [(title, values)]
        if key in ("acceptance", "simulated_acceptance"):
            depths = max((len(value) for value in values if value), default=0)
            parts = [(f"{title}{depth + 1}", [value[depth] if value else None for value in values])
                     for depth in range(depths)]
        found += [[name, *(_cell(value, digits) for value in part)] for name, part in parts
                  if any(value not in (None, "") for value in part)]
    widths = [max(map(len, column)) for column in found]
    widths[0] = min(widths[0], max(12, WIDTH - sum(widths[1:]) - 2 * len(widths[1:])))
    lines = []
    for first, *cells in zip(*found, strict=True):
        if len(first) > widths[0]:
            indent = "  " if first.startswith(" ") else ""
            first = f"{indent}…{first[-widths[0] + 3 :]}"
        words = [f"{first:{widths[0]}}"]
        words += [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join(words))
    return lines


def _value(entry, key):
    """entry["a"]["b"] for a.b; "" where categories have none, None where nothing was measured or
    predicted."""
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


def write_answers(path, drafters, runs):
    """JSON lines of every answer. drafters: their names, number 1 first."""
    lines = []
    for concurrency, run_waves in runs.items():
        for wave in run_waves:
            for number, group in sorted(wave.groups.items()):
                if number == TRANSFORMERS:
                    continue
                drafter = None if number == PLAIN else drafters[number - 1]
                for (line, prompt_ids), one in zip(wave.prompts, group.answers, strict=True):
                    lines.append(json.dumps({
                        "line": line + 1, "turn": wave.turn, "drafter": drafter, "concurrency": concurrency,
                        "prompt_ids": prompt_ids, "ids": one.ids, "candidates": one.candidates,
                        "accepted": one.accepted}))
    replace_file(path, lambda temporary: temporary.write_text("\n".join(lines) + "\n"))


if __name__ == "__main__":
    run(main, interrupted="nothing was kept; give the command again")
