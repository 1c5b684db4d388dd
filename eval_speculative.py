#!/usr/bin/env python3
"""Measure drafters: how many drafted tokens the target accepts, and how much faster that makes it.

Decodes prompts with the target in transformers, greedily and one at a time: plainly, and with every drafter given, in turn, in
the same run. Prints a table on stderr and one line of JSON on stdout. In float32 the answers must equal those of plain decoding,
id by id; the exit code is 1 if any differs.
"""

import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch

from common.cli import Parser, Progress, UserError, positive_int, run, say
from common.conversations import Skip, parse_row, read_rows
from common.decode import plain_decode, speculative_decode
from common.drafter import load_drafter
from common.files import replace_file
from common.generate import stop_ids
from common.rendering import Renderer
from common.target import chat_template_sha256, check_same_target, default_layers, load_tokenizer, open_target, tokenizer_sha256
from common.target_model import TargetModel

WARM_UP = 16  # tokens decoded before anything is timed


def parse_arguments():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--target", required=True, metavar="MODEL", help="folder of a Hugging Face model, or a hub id; no default")
    add("--drafter", required=True, action="append", type=Path, metavar="DIR",
        help="folder that train_drafter.py wrote; give it several times to compare several; no default")
    add("--prompts", required=True, metavar="FILE",
        help="JSON lines with turns, messages, conversations, prompt, text or input_ids, or - for standard input; no default. The last "
             "user message is answered; of turns each one, behind the plain answers to those before. A row's category is reported apart")
    add("--backend", choices=["local"], default="local", help="default local: target and drafter in this process, in transformers")
    add("--steps", type=positive_int, default=3, metavar="K", help="tokens drafted a verification; default 3, as big models are served")
    add("--topk", type=int, default=1, metavar="N", help="drafted alternatives of each token; default, and only choice, 1: a chain")
    add("--draft-tokens", type=int, metavar="N", help="tokens of one verification, the root included; default, and only choice, steps + 1")
    add("--max-new-tokens", type=positive_int, default=256, metavar="N",
        help="longest answer; default 256: acceptance has settled by then, longer answers only cost time")
    add("--temperature", type=float, default=0.0, help="default 0, greedy, and the only one there is: answers can be compared id by id")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
        help="of target and drafters; default auto, the target's own, as it is served. float32 proves that answers are identical")
    add("--limit", type=positive_int, metavar="N", help="read only the first N rows; default all")
    add("--out", type=Path, metavar="FILE",
        help="also write the answers, and the drafted tokens of every verification, as JSON lines; default no")
    add("--trust-remote-code", action="store_true", help="run code that comes with the target; default no, since it can do anything")
    add("--revision", metavar="NAME", help="of the target on the hub; default its main one")
    add("--force", action="store_true", help="use a drafter made for another target of the same sizes; default no: it accepts nothing")
    args = parser.parse_args()
    if args.topk != 1:
        raise UserError(f"--topk {args.topk}: only a chain can be drafted here; give --topk 1")
    if args.draft_tokens not in (None, args.steps + 1):
        raise UserError(f"--draft-tokens {args.draft_tokens}: a chain of {args.steps} steps has {args.steps + 1} tokens with its root; "
                        f"give --draft-tokens {args.steps + 1}, or leave it out")
    if args.temperature != 0:
        raise UserError(f"--temperature {args.temperature:g}: only greedy decoding can be measured here; give --temperature 0")
    if args.out and (args.out.exists() or not args.out.parent.is_dir()):
        fault = "is there already" if args.out.exists() else "lies in a folder that does not exist"
        raise UserError(f"--out {args.out} {fault}; give the name of a new file in a folder that does exist")
    return args


def main():
    args = parse_arguments()
    target = open_target(args.target, args.revision, args.trust_remote_code)
    tokenizer = load_tokenizer(target.folder, args.trust_remote_code)
    loaded = [load_drafter(folder) for folder in args.drafter]
    warnings = check_drafters(args, target, tokenizer, [drafter.config for drafter, _ in loaded])
    layers = [captured_layers(drafter.config, target, folder) for (drafter, _), folder in zip(loaded, args.drafter, strict=True)]
    template_kwargs = common_template_kwargs([drafter.config for drafter, _ in loaded], args.drafter)
    eos_ids = set(stop_ids(target, tokenizer))
    scripts, skipped = read_prompts(args.prompts, args.limit, tokenizer)

    # every layer that some drafter reads is captured; `layers` is set to one drafter's own before its turn
    model = TargetModel(target, sorted(set().union(*layers)), args.dtype, trust_remote_code=args.trust_remote_code)
    embedding = target.embedding().to(model.device, model.dtype)
    decoders = [(plain_decode, (), model.layers)]
    for (drafter, rows), own in zip(loaded, layers, strict=True):
        rows = None if rows is None else rows.to(model.device)
        decoders.append((speculative_decode, (drafter.to(model.device, model.dtype), embedding, rows), own))

    def decode(number, prompt_ids, limit):
        function, drafter, model.layers = decoders[number]
        more = (args.steps,) if drafter else ()
        return function(model, *drafter, prompt_ids, *more, limit, eos_ids)

    settings = {
        "backend": args.backend, "steps": args.steps, "topk": args.topk, "draft_tokens": args.steps + 1, "temperature": args.temperature,
        "dtype": str(model.dtype).removeprefix("torch."), "max_new_tokens": args.max_new_tokens, "concurrency": 1,
        "template_kwargs": template_kwargs, "eos_ids": sorted(eos_ids),
        "versions": {name: version(name) for name in ("torch", "transformers")}, "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
    }
    room = target.text["max_position_embeddings"] - args.max_new_tokens - args.steps
    renderer = Renderer(tokenizer, template_kwargs, eos_ids)
    records = []  # one a prompt: (line, turn, category, prompt ids, [plain Answer, one Answer a drafter])
    progress = Progress(sum(script.count(None) for *_, script in scripts), "prompts", "decoding")
    for line, category, tools, script in scripts:
        messages, turns = [], 0
        for message in script:
            if message is not None:
                messages.append(message)
                continue
            try:
                prompt_ids = messages[0] if isinstance(messages[0], list) else renderer.prompt_ids(messages, tools)
                if len(prompt_ids) > room:
                    raise Skip("too long", f"{len(prompt_ids)} tokens, with --max-new-tokens {args.max_new_tokens} more than the target's "
                                           f"{target.text['max_position_embeddings']} positions")
                if max(prompt_ids) >= target.vocab_size:
                    raise Skip("malformed", f"token id {max(prompt_ids)}, the target has {target.vocab_size}")
            except Skip as skip:
                skipped[skip.reason] += script.count(None) - turns
                say(f"line {line + 1} skipped: {skip}")
                break
            if not records:
                for number in range(len(decoders)):
                    decode(number, prompt_ids, WARM_UP)
            answers = [None] * len(decoders)
            for step in range(len(decoders)):  # each decoder is first, second, ... equally often
                number = (step + len(records)) % len(decoders)
                answers[number] = decode(number, prompt_ids, args.max_new_tokens)
            records.append((line, turns, category, prompt_ids, answers))
            words = answers[0].ids[:-1] if answers[0].ids[-1] in eos_ids else answers[0].ids
            messages.append({"role": "assistant", "content": tokenizer.decode(words)})
            turns += 1
            progress.update(1)
    progress.close()
    if not records:
        raise UserError(f"{args.prompts} holds no prompt that can be used ({reasons(skipped)})")

    drafters = []
    categories = sorted({category for _, _, category, *_ in records if category is not None})
    for number, folder in enumerate(args.drafter, start=1):
        pairs = [(answers[0], answers[number]) for *_, answers in records]
        entry = {"drafter": str(folder), "draft_vocab": loaded[number - 1][0].config["draft_vocab_size"], **figures(pairs, args.steps)}
        entry["first_difference"] = first_difference(model, records, number)
        if categories:
            entry["categories"] = {
                name: figures([pair for pair, record in zip(pairs, records, strict=True) if record[2] == name], args.steps)
                for name in categories}
        drafters.append(entry)
    baseline = sum(len(answers[0].ids) for *_, answers in records) / sum(answers[0].seconds for *_, answers in records)
    summary = {"target": target.name, "settings": settings, "baseline_tokens_per_second": round(baseline, 3), "drafters": drafters,
               "prompts": len(records), "skipped": dict(skipped), "warnings": warnings}
    if args.out:
        write_answers(args.out, args.drafter, records)
    report(summary)
    return summary, int(model.dtype == torch.float32 and any(entry["first_difference"] for entry in drafters))


def check_drafters(args, target, tokenizer, configs):
    """Refuse drafters of other sizes or of another target. Returns what was let pass, in sentences."""
    warnings = []
    for folder, config in zip(args.drafter, configs, strict=True):
        for key, wanted in (("target_hidden_size", target.hidden_size), ("hidden_size", target.hidden_size),
                            ("vocab_size", target.vocab_size)):
            if config[key] != wanted:
                raise UserError(f"{folder} has {key} {config[key]}, {args.target} needs {wanted}; use the target that it was trained for")
    facts = target.facts()
    ours = {"tokenizer_sha256": tokenizer_sha256(target.folder),
            "chat_template_sha256": chat_template_sha256(tokenizer)}
    for folder, config in zip(args.drafter, configs, strict=True):
        trained = config.get("training") or {}
        if not trained.get("target"):
            warnings.append(f"{folder} does not say which target it was trained for; only the sizes were compared")
        elif warning := check_same_target(trained["target"], facts, f"drafter {folder} was", args.force):
            warnings.append(f"--force: {warning}")
        for key, value in ours.items():
            if trained.get(key, value) != value:
                warning = (f"{folder} was trained with another {key.removesuffix('_sha256').replace('_', ' ')}: hash "
                           f"{str(trained[key])[:12]} there, {str(value)[:12]} here")
                if key == "tokenizer_sha256" and not args.force:
                    raise UserError(f"{warning}; use that tokenizer (--force goes on all the same)")
                warnings.append(warning)
    for warning in warnings:
        say(f"warning: {warning}")
    return warnings


def captured_layers(config, target, folder):
    """The three HF hidden_states indices that a drafter reads: as its training block, its config or the engines' default says."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = (config.get("training") or {}).get("layers") or config.get("eagle_aux_hidden_state_layer_ids")
    layers = layers or (nested and [layer + 1 for layer in nested]) or default_layers(target.num_layers)
    if len(layers) != 3 or layers[0] < 1 or layers != sorted(set(layers)) or layers[-1] >= target.num_layers:
        raise UserError(f"{folder} reads layers {layers}; three ascending ones in 1..{target.num_layers - 1} are wanted for {target.name}")
    return layers


def common_template_kwargs(configs, folders):
    """The chat-template arguments that the drafters were trained with; all must have had the same, since they get the same prompts."""
    found = [(config.get("training") or {}).get("template_kwargs") for config in configs]
    known = [(kwargs, folder) for kwargs, folder in zip(found, folders, strict=True) if kwargs is not None]
    for kwargs, folder in known:
        if kwargs != known[0][0]:
            raise UserError(f"{folder} was trained with chat-template arguments {json.dumps(kwargs)}, {known[0][1]} with "
                            f"{json.dumps(known[0][0])}; evaluate them in separate runs")
    return known[0][0] if known else {}


def read_prompts(path, limit, tokenizer):
    """([(line, category, tools, script)], Counter of skipped rows by reason).

    A script is messages with None where the target answers; of text and input_ids rows it is [ids, None].
    """
    rows, _, _ = read_rows(path, limit)
    scripts, skipped = [], Counter()
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
        scripts.append((line, category if category is None else str(category), tools, script))
    if not scripts:
        raise UserError(f"{path} holds no prompt that can be used ({reasons(skipped)})")
    return scripts, skipped


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


def figures(pairs, steps):
    """The figures of one drafter over (plain Answer, its Answer) pairs."""
    plain, ours = zip(*pairs, strict=True)
    accepted = [count for answer in ours for count in answer.accepted]
    reached = [count for answer in ours for count in answer.reached]
    rounds = len(accepted)
    acceptance = []
    for depth in range(1, steps + 1):
        judged = sum(count >= depth for count in reached)
        acceptance.append(round(sum(count >= depth for count in accepted) / judged, 4) if judged else None)
    speed, plain_speed = (sum(len(answer.ids) for answer in side) / sum(answer.seconds for answer in side) for side in (ours, plain))
    return {
        "accept_length": round(1 + sum(accepted) / rounds, 4) if rounds else None, "acceptance": acceptance,
        "tokens_per_second": round(speed, 3), "speed_up": round(speed / plain_speed, 4),
        "identical": sum(a.ids == b.ids for a, b in pairs), "prompts": len(pairs),
        "draft_ms": round(1000 * sum(answer.draft_seconds for answer in ours) / rounds, 3) if rounds else None,
        "verify_ms": round(1000 * sum(answer.verify_seconds for answer in ours) / rounds, 3) if rounds else None,
        "verifications": rounds, "accepted": sum(accepted), "tokens": sum(len(answer.ids) for answer in ours),
    }


@torch.inference_mode()
def first_difference(model, records, number):
    """Where drafter `number` first wrote another id than plain decoding, and how close the target's two best logits were there."""
    for line, turn, _, prompt_ids, answers in records:
        plain, ours = answers[0].ids, answers[number].ids
        if plain == ours:
            continue
        position = next((n for n, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b), min(len(plain), len(ours)))
        _, last = model.states(torch.tensor([prompt_ids + plain[:position]], device=model.device))
        best = model.logits(last[0, -1]).topk(2)
        return {"line": line + 1, "turn": turn, "position": position, "plain": plain[position : position + 1],
                "drafted": ours[position : position + 1], "best_two": best.indices.tolist(),
                "gap": round(float(best.values[0] - best.values[1]), 6)}
    return None


def write_answers(path, folders, records):
    lines = []
    for line, turn, _, prompt_ids, answers in records:
        for folder, answer in zip([None, *folders], answers, strict=True):
            lines.append(json.dumps({"line": line + 1, "turn": turn, "drafter": folder and str(folder), "prompt_ids": prompt_ids,
                                     "ids": answer.ids, "candidates": answer.candidates, "accepted": answer.accepted}))
    replace_file(path, lambda temporary: temporary.write_text("\n".join(lines) + "\n"))


def reasons(skipped):
    return ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "the file has no rows"


def report(summary):
    """The summary as a table on stderr."""
    settings = summary["settings"]
    say(f"{summary['target']}, {settings['dtype']}, {settings['device']}, {settings['threads']} threads: {summary['prompts']} prompts, "
        f"one at a time, {settings['steps']} steps; plain decoding {summary['baseline_tokens_per_second']:.1f} tokens/s")
    depths = " ".join(f"{f'depth {depth}':>8}" for depth in range(1, settings["steps"] + 1))
    say(f"{'':32} {'vocab':>7} {'accept':>7} {depths} {'tok/s':>7} {'speed-up':>8} {'draft ms':>8} {'verify ms':>9}  identical")
    for entry in summary["drafters"]:
        say(table_line(entry["drafter"][-32:], entry["draft_vocab"], entry))
        for name, part in entry["categories"].items() if len(entry.get("categories", {})) > 1 else ():
            say(table_line(f"  {name}"[:32], "", part))
    for entry in summary["drafters"]:
        if difference := entry["first_difference"]:
            tie = "" if settings["dtype"] == "float32" else f" (in {settings['dtype']} near ties fall either way)"
            say(f"{entry['drafter']} differs from plain decoding in {entry['prompts'] - entry['identical']} of {entry['prompts']} prompts, "
                f"first at line {difference['line']}, answer token {difference['position']}: {difference['drafted']} for "
                f"{difference['plain']}; the target's two best logits are {difference['gap']:.4g} apart there{tie}")


def table_line(name, vocab, entry):
    def cell(value, width, digits):
        return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"

    depths = " ".join(cell(value, 8, 3) for value in entry["acceptance"])
    return (f"{name:32} {vocab:>7} {cell(entry['accept_length'], 7, 3)} {depths} {cell(entry['tokens_per_second'], 7, 1)} "
            f"{cell(entry['speed_up'], 8, 2)} {cell(entry['draft_ms'], 8, 1)} {cell(entry['verify_ms'], 9, 1)}  "
            f"{entry['identical']} of {entry['prompts']}")


if __name__ == "__main__":
    run(main)
