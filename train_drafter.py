"""Train an EAGLE-3 drafter on hidden-state shards.

    accelerate launch train_drafter.py --shards SHARDS --target TARGET --draft-vocab 32000 --vocab-map MAP --out DRAFTER

OUT is the best drafter so far, as SGLang and vLLM load it (config.json, model.safetensors), beside metrics.jsonl and
checkpoints/step-NNNNNN, each of them a drafter too, with the training state in its folder state/.
"""

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from common.checkpoint import check_run, load_checkpoint, lock_run, save_checkpoint
from common.cli import Parser, Progress, UserError, finite, human_bytes, in_range, positive_int, run, say
from common.drafter import Drafter, drafter_config, load_drafter, save_drafter
from common.figures import accept_figures
from common.files import check_output_folder, sha256_file, write_json
from common.shards import Shards, check_shards, check_tokenizer
from common.target import check_same_target, open_target
from common.training import Teacher, TrainStep, make_batch, simulated
from common.vocab import check_size, coverage, load_map, map_sha256, rows_to_d2t


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--shards", required=True, metavar="DIR", help="folder of extract_hidden_states.py")
    add("--target", required=True, metavar="MODEL", help="folder or hub id of the target; its config, embedding and lm_head are read, "
        "it is never loaded")
    add("--out", required=True, metavar="DIR", help="folder for the drafter; new, empty, or with --resume an earlier run's")
    add("--draft-vocab", required=True, metavar="N|full", help="rows of the drafter's lm_head: a size such as 32000, which needs "
        "--vocab-map, or full. No default: fewer rows are faster at every drafting step, missing rows cost accepted drafts")
    add("--vocab-map", metavar="DIR", help="folder of build_vocab_map.py for a reduced vocabulary; none is ever picked up by itself")
    add("--init", choices=["scratch", "checkpoint"], default="scratch", help="default scratch: lm_head rows start as the target's rows. "
        "checkpoint: go on from --checkpoint, with its own vocabulary")
    add("--init-layer", choices=["target", "random"], default="target", help="with --init scratch, how the layer starts; default target: "
        "as the target's last decoder layer and final norm, where they fit, which learns faster than random")
    add("--checkpoint", metavar="DIR", help="drafter folder for --init checkpoint")
    add("--ttt-steps", type=positive_int, default=7, help="depth of training-time test; default 7, as in EAGLE-3. 3 costs less than half "
        "and is enough when serving drafts 3 tokens")
    add("--epochs", type=positive_int, default=2, help="passes over the samples; default 2: on few samples the "
        "held-out accept length still grows in the second")
    add("--max-steps", type=positive_int, help="stop after so many optimizer steps; default: all epochs")
    add("--lr", type=in_range(0), default=4e-4, help="peak learning rate; default 4e-4, for large batches. Of 5e-4, 1e-3 and 2e-3 the last "
        "did best with 512 tokens a step on a few hundred conversations")
    add("--warmup", type=in_range(0, 1, low_too=True), default=0.03, help="share of the steps with a rising rate, "
        "then cosine to zero; default 0.03, enough for AdamW's moments to settle")
    add("--weight-decay", type=in_range(0, low_too=True), default=0.0, help="default 0, as the runs are short")
    add("--max-grad-norm", type=in_range(0), default=0.5, help="gradients are scaled down to this norm; default 0.5, as in EAGLE")
    add("--depth-decay", type=in_range(0), default=0.8, help="the loss is the sum of the depths' cross entropies, depth k times "
        "this to the power k; default 0.8, as in EAGLE-3")
    add("--batch-tokens", type=positive_int, default=8192, help="tokens per optimizer step over all processes and accumulation steps; "
        "default 8192. Small data wants many small steps (512 for a few hundred conversations)")
    add("--gradient-accumulation-steps", type=positive_int, default=1, help="default 1; more saves memory and changes nothing else")
    add("--loss", choices=["kl"], default="kl", help="default kl: cross entropy against the target's distribution over the draft rows")
    add("--freeze-lm-head", action="store_true", help="keep the lm_head as it starts; saves the gradient and the moments of its rows")
    add("--mixed-precision", choices=["no", "bf16"], help="default: what accelerate's configuration says, else no. bf16 computes in "
        "bfloat16; weights and moments stay float32")
    add("--eval-shards", metavar="DIR", help="measure on all samples of this folder; default: the samples of --shards that were set aside")
    add("--eval-every", type=positive_int, help="steps between measurements of the held-out accept length; default: a tenth of the run")
    add("--eval-samples", type=positive_int, default=256, help="at most so many held-out samples; default 256, to keep measuring cheap")
    add("--eval-steps", type=positive_int, default=3, help="drafts per verification in the simulated accept length; default 3, as big "
        "models are served")
    add("--save-every", type=positive_int, help="steps between checkpoints to resume from; default: as --eval-every")
    add("--keep", type=positive_int, default=2, help="how many of this run's last checkpoints stay; default 2, should the last one be "
        "damaged")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, if there is one")
    add("--seed", type=int, default=0, help="of the order of the samples and the first weights; default 0, so that runs can be repeated")
    add("--log-with", choices=["tensorboard", "wandb", "trackio", "all"], help="also log to this tracker; metrics.jsonl is always written")
    add("--dry-run", action="store_true", help="print what would be trained and what it costs, and stop")
    add("--revision", metavar="NAME", help="hub revision of --target; default its main one")
    add("--trust-remote-code", action="store_true", help="allow code that comes with the target's config; default off")
    add("--force", action="store_true", help="go on although hashes say that shards, map or checkpoint were made for another target")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.init == "checkpoint" and not args.checkpoint:
        raise UserError("--init checkpoint needs --checkpoint, the folder of the drafter to start from")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed} is negative; 0 or more is wanted")
    if args.log_with not in (None, "all") and not find_spec(args.log_with):
        raise UserError(f"--log-with {args.log_with}: it is not installed; pip install {args.log_with}")
    if args.init == "scratch" and args.checkpoint:
        raise UserError("--checkpoint goes with --init checkpoint; with --init scratch nothing is read from it")
    out = Path(args.out)
    check_output_folder(out, "run.json")
    shards = Shards(args.shards)
    evaluation = Shards(args.eval_shards) if args.eval_shards else shards
    target = open_target(args.target, args.revision, args.trust_remote_code)
    facts = target.facts()
    layers = shards.manifest["layers"]
    warnings = check_shards(shards, target, facts, layers, args.force)
    if evaluation is not shards:
        warnings += check_shards(evaluation, target, facts, layers, args.force)

    draft_vocab = decide_vocabulary(args.draft_vocab, target.vocab_size)
    map_rows = map_facts = None
    if args.init == "checkpoint":
        drafter, map_rows = start_from_checkpoint(args, draft_vocab, target, layers, warnings, facts)
    else:
        map_rows, map_facts = scratch_map(args, draft_vocab, facts, shards, warnings)
        torch.manual_seed(args.seed)
        drafter = Drafter(drafter_config(target, draft_vocab, layers))
        start_from_scratch(drafter, target, map_rows, args.init_layer)
    if args.freeze_lm_head:
        drafter.lm_head.weight.requires_grad_(False)
    trainable = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)

    train_samples = np.flatnonzero(~shards.heldout) if not args.eval_shards else np.arange(len(shards.index))
    eval_samples = (np.arange(len(evaluation.index)) if args.eval_shards else np.flatnonzero(shards.heldout))[: args.eval_samples]
    if not shards.index[train_samples, 5].sum():
        raise UserError(f"{args.shards} holds no supervised token outside of its held-out samples; there is nothing to learn from")
    plan = plan_steps(shards.index, train_samples, args)
    every = args.eval_every or max(1, len(plan) // 10)
    save_every = args.save_every or every

    for warning in filter(None, warnings):
        say(f"warning: {warning}")
    covered = 1.0 if map_rows is None else coverage(shards.supervised_counts(target.vocab_size)[0], map_rows.numpy())
    unseen = (map_facts or {}).get("coverage_heldout")
    layer_parameters = sum(p.numel() for name, p in drafter.named_parameters() if name != "lm_head.weight")
    head_parameters = draft_vocab * target.hidden_size
    say(f"draft vocabulary: {draft_vocab} of {target.vocab_size} rows{' (full, no map)' if map_rows is None else ''}, lm_head "
        f"{head_parameters / 1e6:.1f} M parameters beside {layer_parameters / 1e6:.1f} M in the layer; it covers {covered:.2%} of the "
        f"supervised tokens that are trained on{f' and {unseen:.2%} of the held-out ones' if unseen else ''}")
    say(f"training {trainable / 1e6:.1f} M parameters (the embedding is the target's, frozen) for {len(plan)} steps of about "
        f"{args.batch_tokens} tokens, depth {args.ttt_steps}, {len(train_samples)} samples, {len(eval_samples)} held out")
    if len(plan) < 100:
        say(f"warning: {len(plan)} steps are few; a smaller --batch-tokens or more --epochs gives more")
    if args.dry_run:
        state = trainable * 4 * 4 + (target.vocab_size + draft_vocab) * target.hidden_size * 4
        say(f"weights, gradients, moments, embedding and teacher need about {human_bytes(state)} in each process, the batches beside them")
        return {"steps": len(plan), "epochs": plan[-1][0] + 1, "tokens": int(sum(shards.index[part, 2].sum() for _, part in plan)),
                "trainable_params": trainable, "draft_vocab": draft_vocab, "init": args.init, "memory_bytes": state, "dry_run": True,
                "out": str(out)}

    accelerator = Accelerator(mixed_precision=args.mixed_precision, log_with=args.log_with, project_dir=str(out))
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UserError(f"mixed precision {accelerator.mixed_precision} is not supported: float16 gradients overflow here; take bf16 or no")
    settings = {
        **{key: value for key, value in vars(args).items() if key not in ("out", "resume", "dry_run", "log_with", "keep", "save_every",
                                                                           "target", "shards", "eval_shards", "vocab_map", "checkpoint")},
        "eval_every": every, "mixed_precision": accelerator.mixed_precision, "shards_sha256": shards.sha256,
        "eval_shards_sha256": evaluation.sha256 if args.eval_shards else None,
        "checkpoint_sha256": sha256_file(Path(args.checkpoint) / "model.safetensors") if args.checkpoint else None,
        "target_sha256": facts["tensors_sha256"], "map_sha256": None if map_rows is None else map_sha256(rows_to_d2t(map_rows.numpy())),
    }
    check_run(out, finite(settings), args.resume)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        lock = lock_run(out)  # held as long as it is open
        if not (out / "run.json").exists():
            write_json(out / "run.json", finite(settings))
    if args.log_with:
        accelerator.init_trackers("eagle3", config=finite({key: value for key, value in settings.items() if value is not None}))

    device = accelerator.device
    compute = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    embedding = target.embedding().to(device)
    teacher = Teacher(target.lm_head(), map_rows, target.logit_softcap, target.logit_scale, device, compute)
    if map_rows is not None:
        map_rows = map_rows.to(device)
    drafter.to(device)
    model = accelerator.prepare(TrainStep(drafter, embedding, teacher, args.ttt_steps, args.depth_decay))
    parameters = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    matrices = [parameter for parameter in parameters.values() if parameter.dim() == 2]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.95), fused=True)

    training_block = {
        "target": facts, "layers": layers, "draft_vocab": draft_vocab, "map_sha256": settings["map_sha256"], "coverage": covered,
        "coverage_heldout": unseen, "init": args.init, "data_sha256": shards.manifest["data_sha256"],
        "tokenizer_sha256": shards.manifest["tokenizer_sha256"], "chat_template_sha256": shards.manifest["chat_template_sha256"],
        "template_kwargs": shards.manifest["template_kwargs"], "warnings": [warning for warning in warnings if warning],
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "safetensors", "numpy")},
        "command": " ".join(sys.argv),
    }
    progress = {"step": 0, "tokens": 0, "seconds": 0.0, "loss": None, "last": None, "best": None}
    if args.resume:
        progress = load_checkpoint(out, drafter, optimizer, parameters, progress)

    def measure():
        """Simulated accept length on the held-out samples, the same for any number of processes; logged and said."""
        mine = eval_samples[accelerator.process_index :: accelerator.num_processes]
        with accelerator.autocast():
            counts = simulated(drafter, embedding, map_rows, evaluation, mine, args.eval_steps).sum(0).to(device)
        reached, accepted = accelerator.reduce(counts).tolist()
        length, acceptance = accept_figures(reached, accepted)
        record = {"step": progress["step"], "accept_length": length, "acceptance": acceptance}
        log({**record, "heldout": True})
        loss = "" if progress["loss"] is None else f"loss {progress['loss']:.3f}, "
        say(f"step {record['step']}: {loss}held-out accept length {'not measured' if length is None else f'{length:.3f}'}")
        return record

    def export(folder):
        config = {**drafter.config, "training": finite({**training_block, "steps": progress["step"], "loss": progress["loss"],
                                                        "accept_length": progress["last"] and progress["last"]["accept_length"],
                                                        "acceptance": progress["last"] and progress["last"]["acceptance"]})}
        save_drafter(folder, drafter.state_dict(), config, map_rows)

    def log(record):
        if accelerator.is_main_process:
            with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(finite(record)) + "\n")
        accelerator.log({key: value for key, value in record.items() if isinstance(value, (int, float))}, step=record["step"])

    def load_step(number):
        """This process's micro-batches of a step; at least one, so that every process takes part in the gradient's sum."""
        _, chosen = plan[number]
        parts = share_out(chosen, shards.index[chosen, 2], accelerator.num_processes * args.gradient_accumulation_steps)
        mine = [part for part in parts[accelerator.process_index :: accelerator.num_processes] if part]
        batches = [make_batch([shards.sample(sample) for sample in part], device) for part in mine or parts[:1]]
        if not mine:  # nothing of its own: it takes another's samples and learns nothing from them
            batches[0]["loss_mask"].zero_()
        return batches

    if args.init == "checkpoint" and not progress["step"]:
        progress["last"] = measure()  # what the checkpoint is worth here
    bar = Progress(len(plan), "steps", "train")
    bar.update(progress["step"])
    loader = ThreadPoolExecutor(1)
    start, waited, spent_before = time.monotonic(), 0.0, progress["seconds"]
    paused = 0.0
    upcoming = loader.submit(load_step, progress["step"]) if progress["step"] < len(plan) else None
    while progress["step"] < len(plan):
        step = progress["step"]
        moment = time.monotonic()
        batches = upcoming.result()
        waited += time.monotonic() - moment
        if step + 1 < len(plan):
            upcoming = loader.submit(load_step, step + 1)
        epoch, chosen = plan[step]
        labels = max(int(shards.index[chosen, 5].sum()), 1)
        rate = args.lr * schedule(step, len(plan), args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        figures = torch.zeros(1 + 2 * args.ttt_steps, device=device)  # loss, cross entropy sums, rows
        for number, batch in enumerate(batches):
            last_one = number == len(batches) - 1
            with nullcontext() if last_one else accelerator.no_sync(model):
                loss, sums, rows = model(batch, accelerator.num_processes / labels)  # DDP averages: undone here
                accelerator.backward(loss)
            figures += torch.cat([loss.detach()[None] / accelerator.num_processes, sums.detach(), rows.to(device)])
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), args.max_grad_norm)
        if not torch.isfinite(norm):
            raise RuntimeError(f"the gradient of step {step + 1} is not finite (norm {norm}); the last whole checkpoint is untouched")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        figures = accelerator.reduce(figures).tolist()
        tokens = int(shards.index[chosen, 2].sum())
        progress["step"], progress["tokens"], progress["loss"] = step + 1, progress["tokens"] + tokens, figures[0]
        progress["seconds"] = spent_before + time.monotonic() - start - paused
        depth_losses = [s / max(r, 1) for s, r in zip(figures[1 : 1 + args.ttt_steps], figures[1 + args.ttt_steps :], strict=True)]
        log({"step": step + 1, "epoch": epoch, "loss": figures[0], "depth_losses": depth_losses, "lr": rate, "grad_norm": norm.item(),
             "tokens": tokens, "tokens_per_second": progress["tokens"] / progress["seconds"], "waiting": waited / progress["seconds"]})
        best = progress["best"] and progress["best"]["accept_length"]
        bar.update(1, f"loss {figures[0]:.3f}, {progress['tokens'] / progress['seconds']:.0f} tokens/s"
                      f"{f', accept length {best:.3f}' if best else ''}")

        moment = time.monotonic()
        final = step + 1 == len(plan)
        if final or (step + 1) % every == 0:
            progress["last"] = measure()
            length = progress["last"]["accept_length"]
            if length is None or best is None or length >= best:  # of equals the later, which has learnt more
                progress["best"] = progress["last"]
                if accelerator.is_main_process:
                    export(out)
        if accelerator.is_main_process and (final or (step + 1) % save_every == 0):
            save_checkpoint(out, export, drafter, optimizer, parameters, finite(progress), args.keep)
        paused += time.monotonic() - moment
    bar.close()
    loader.shutdown()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        lock.close()
    if not (out / "model.safetensors").exists():
        raise UserError(f"{out} has lost its model.safetensors since it was trained; copy that of one of its checkpoints there")
    if args.log_with:
        accelerator.end_training()
    best = progress["best"]
    length = best["accept_length"]
    say(f"{out} is the drafter of step {best['step']}, " + (f"held-out accept length {length:.3f}" if length else "no sample was held out"))
    return {
        "steps": progress["step"], "epochs": plan[-1][0] + 1, "tokens": progress["tokens"], "loss": progress["loss"],
        "accept_length": best["accept_length"], "acceptance": best["acceptance"], "best_step": best["step"],
        "trainable_params": trainable, "draft_vocab": draft_vocab, "init": args.init, "coverage": covered,
        "tokens_per_second": progress["tokens"] / max(progress["seconds"], 1e-9), "seconds": progress["seconds"],
        "processes": accelerator.num_processes, "warnings": training_block["warnings"], "out": str(out),
    }


def decide_vocabulary(text, vocab_size):
    """Rows of the draft vocabulary from `--draft-vocab`; all of them is the full one, whichever way it is written."""
    if text == "full":
        return vocab_size
    try:
        size = int(text)
    except ValueError:
        raise UserError(f"--draft-vocab {text} is neither full nor a number in 1..{vocab_size}") from None
    check_size(size, vocab_size)
    return size


def scratch_map(args, draft_vocab, facts, shards, warnings):
    """(target ids int64 [D], the map's facts), or (None, None) for the full vocabulary."""
    if draft_vocab == facts["vocab_size"]:
        if args.vocab_map:
            raise UserError(f"--draft-vocab {args.draft_vocab} is the full vocabulary and takes no --vocab-map; leave one of them out")
        return None, None
    if not args.vocab_map:
        raise UserError(f"--draft-vocab {draft_vocab} needs --vocab-map, the folder that build_vocab_map.py made for these shards "
                        f"(or --draft-vocab full, which needs none)")
    rows, map_facts = load_map(args.vocab_map)
    if len(rows) != draft_vocab:
        raise UserError(f"--vocab-map {args.vocab_map} has {len(rows)} rows, --draft-vocab says {draft_vocab}; name the map of that size")
    warnings.append(check_same_target(map_facts.get("target") or {}, facts, f"the map {args.vocab_map} was", args.force))
    warnings.append(check_tokenizer(map_facts.get("tokenizer_sha256"), shards, f"the tokenizer of the map {args.vocab_map}", args.force))
    return torch.from_numpy(rows), map_facts


def start_from_checkpoint(args, draft_vocab, target, layers, warnings, facts):
    """(drafter in float32, its own map's target ids or None) for --init checkpoint."""
    drafter, rows = load_drafter(args.checkpoint)
    config, wanted = drafter.config, drafter_config(target, draft_vocab, layers)
    for key in ("draft_vocab_size", "vocab_size", "hidden_size", "target_hidden_size", "rope_parameters"):
        if config[key] != wanted[key]:
            raise UserError(f"{args.checkpoint} has {key} {config[key]}, this run wants {wanted[key]}; "
                            f"{'say --draft-vocab as the checkpoint has it' if key == 'draft_vocab_size' else 'it is no drafter for this'}")
    trained = config.get("training") or {}
    warnings.append(check_same_target(trained.get("target", facts), facts, f"the checkpoint {args.checkpoint} was", args.force))
    if trained.get("layers", layers) != layers:
        raise UserError(f"{args.checkpoint} was trained on layers {trained['layers']}, these shards hold {layers}; extract those layers")
    if args.vocab_map:
        if rows is None:
            raise UserError(f"{args.checkpoint} has the full vocabulary and takes no --vocab-map; leave it out")
        named, _ = load_map(args.vocab_map)
        if not np.array_equal(named, rows.numpy()):
            raise UserError(f"--vocab-map {args.vocab_map} is not the map of {args.checkpoint}, whose lm_head rows would mean other "
                            f"tokens; leave it out to use the checkpoint's own")
    drafter.config = {**wanted, "torch_dtype": config.get("torch_dtype", "bfloat16")}
    return drafter.train(), rows


def start_from_scratch(drafter, target, map_rows, init_layer):
    """lm_head rows start as the target's rows; the rest small and random, or as the target's last layer wherever that fits.

    As the target's layer: q, k, v see the same weights for both halves of their input, halved; fc passes the last captured
    state through; the final norm is the target's.
    """
    random = 0.1 if init_layer == "target" else 1.0  # fc starts near to passing through
    parts = {}  # parameter -> tensor of the target, by the ends of their names
    if init_layer == "target":
        last = f"layers.{target.num_layers - 1}."
        same = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                "mlp.down_proj", "input_layernorm")
        mlp_norm = "pre_feedforward_layernorm" if target.find(f"{last}pre_feedforward_layernorm.weight") else "post_attention_layernorm"
        sources = {**dict(zip(same, same, strict=True)), "hidden_norm": "input_layernorm", "post_attention_layernorm": mlp_norm}
        parts = {f"midlayer.{name}.weight": f"{last}{source}.weight" for name, source in sources.items()}
        parts["norm.weight"] = "norm.weight"
    spread = target.text.get("initializer_range") or 0.02
    copied = 0
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, spread * (random if name == "fc.weight" else 1.0))
            source = target.find(parts[name]) if name in parts else None
            if source is None:
                continue
            tensor = target.tensor(source).float()
            if "norm" in name and target.model_class.startswith("Gemma"):
                tensor = tensor + 1.0  # Gemma's norms multiply by 1 + w
            if tensor.dim() == 2 and tensor.shape[1] * 2 == parameter.shape[1]:
                tensor = torch.cat([tensor, tensor], dim=1) / 2
            if tensor.shape == parameter.shape:
                parameter.copy_(tensor)
                copied += 1
        if init_layer == "target":
            hidden = target.hidden_size
            drafter.fc.weight[:, 2 * hidden :] += torch.eye(hidden)
            say(f"{copied} of {len(parts)} tensors of the layer start as the target's last layer and final norm, the rest random")
        head = target.lm_head()
        drafter.lm_head.weight.copy_(head if map_rows is None else head[map_rows])


def plan_steps(index, samples, args):
    """The samples of every optimizer step: a list of (epoch, int64 [n]). It depends on the seed and the data alone."""
    plan = []
    for epoch in range(args.epochs):
        order = np.random.default_rng([args.seed, epoch]).permutation(samples)
        first = tokens = 0
        for number, length in enumerate(index[order, 2].tolist()):
            if tokens and tokens + length / 2 > args.batch_tokens:  # without this sample the batch is nearer to its size
                plan.append((epoch, order[first:number]))
                first, tokens = number, 0
            tokens += length
        plan.append((epoch, order[first:]))
    return plan[: args.max_steps]


def share_out(samples, lengths, parts):
    """Split samples into `parts` lists of about equal tokens; the same split wherever it is computed."""
    shares, loads = [[] for _ in range(parts)], [0] * parts
    for number in np.argsort(-lengths, kind="stable"):
        lightest = loads.index(min(loads))
        shares[lightest].append(int(samples[number]))
        loads[lightest] += int(lengths[number])
    return shares


def schedule(step, steps, warmup):
    """Share of the peak learning rate at 0-based `step`: linear warm-up, then cosine to zero."""
    rising = max(1, round(steps * warmup))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


if __name__ == "__main__":
    run(main, interrupted="the same command with --resume goes on from the last checkpoint")
