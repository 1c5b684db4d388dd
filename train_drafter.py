"""Train an EAGLE-3 drafter on hidden-state shards.

    accelerate launch train_drafter.py --shards SHARDS --target TARGET --draft-vocab 32000 --vocab-map MAP --out DRAFTER

OUT is the best drafter so far, as SGLang and vLLM load it (config.json, model.safetensors), beside metrics.jsonl and
checkpoints/step-NNNNNN, each of them a drafter too, with the training state in its folder state/.
"""

import json
import os
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
from accelerate.tracking import get_available_trackers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common.checkpoint import (
    check_run,
    gather,
    load_checkpoint,
    lock_run,
    not_finite,
    read_metrics,
    restore_moments,
    save_checkpoint,
)
from common.cli import Failed, Parser, Progress, UserError, finite, human_bytes, in_range, positive_int, run, say
from common.drafter import Drafter, drafter_config, save_drafter
from common.figures import accept_figures, check_plot, plot_training
from common.files import check_output_folder, read_json, sha256_file, write_json
from common.order import Order, Stream, expected_tokens, schedule, share_out, wait_for_heldout
from common.shards import Shards, check_shards
from common.start import covered_share, decide_vocabulary, named_map, probe, start_from_checkpoint, start_from_scratch
from common.target import open_target
from common.training import CompactTeacher, Teacher, TrainStep, simulated
from common.ttt import make_batch
from common.vocab import map_sha256, rows_to_d2t

DIVERGED = "training diverged; begin again in another --out with a lower --lr and --muon-lr"


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--shards", required=True, metavar="DIR", help="folder of extract_hidden_states.py")
    add("--target", required=True, metavar="MODEL", help="folder or hub id of the target; its config, embedding and lm_head are read, "
        "it is never loaded")
    add("--out", required=True, metavar="DIR", help="folder for the drafter; new, empty, or with --resume an earlier run's")
    add("--draft-vocab", required=True, metavar="N|full", help="rows of the drafter's lm_head: a size such as 32000, which needs "
        "--vocab-map, or full. No default: fewer rows are faster at every drafting step, missing rows cost accepted drafts")
    add("--vocab-map", metavar="DIR", help="folder of build_vocab_map.py for a reduced vocabulary, with --init scratch or --remap-vocab; "
        "default none, and none is ever picked up by itself: a checkpoint has its own")
    add("--init", choices=["scratch", "checkpoint"], default="scratch", help="default scratch: lm_head rows start as the target's rows. "
        "checkpoint: go on from --checkpoint, with its own vocabulary; one that is worth nothing here is refused before the first step")
    add("--init-layer", choices=["target", "random"], default="target", help="with --init scratch, how the layer starts; default target: "
        "as the target's last decoder layer and final norm, where they fit, which learns faster than random")
    add("--checkpoint", metavar="DIR", help="drafter folder for --init checkpoint")
    add("--remap-vocab", action="store_true", help="give the checkpoint another vocabulary, that of --vocab-map or full: lm_head rows of "
        "tokens in both are carried over, others start from the target's. Default off: its rows mean the tokens of its own map")
    add("--ttt-steps", type=in_range(1, 128, low_too=True, kind=int), default=3, help="depth of training-time test; default 3, for "
        "serving with 3 drafts: deeper costs more and served those 3 worse. Take the number of drafts that you serve with; EAGLE-3 trains "
        "7")
    add("--epochs", type=positive_int, help="passes over the samples; default 2: on few samples the held-out accept length still grows in "
        "the second. With --follow 1, as each shard is there once")
    add("--max-steps", type=positive_int, help="stop after so many optimizer steps; default: all epochs")
    add("--lr", type=in_range(0), help="peak rate of AdamW; default 0.3 / hidden size for the lm_head and norms beside muon, 1.2 / hidden "
        "size for everything: measured at 576, and such rates fall as models get wider")
    add("--optimizer", choices=["muon", "adamw"], default="muon", help="default muon, for the layer's matrices (AdamW for lm_head and "
        "norms): it learns more from the same steps than AdamW for all; its cost does not grow with the batch")
    add("--muon-lr", type=in_range(0), default=0.02, help="peak rate of muon; default 0.02, the usual one whatever the width")
    add("--warmup", type=in_range(0, 1, low_too=True), default=0.03, help="share of the steps with a rising rate, "
        "then cosine to zero; default 0.03, enough for AdamW's moments to settle")
    add("--weight-decay", type=in_range(0, low_too=True), default=0.0, help="default 0, as the runs are short")
    add("--max-grad-norm", type=in_range(0), default=0.5, help="gradients are scaled down to this norm; default 0.5, as in EAGLE")
    add("--depth-decay", type=in_range(0, 2), default=0.8, help="the loss is the sum of the depths' cross entropies, depth k times "
        "this to the power k; default 0.8, as in EAGLE-3")
    add("--batch-tokens", type=in_range(1, 2**40, low_too=True, kind=int), help="tokens per optimizer step over all processes and "
        "accumulation steps; default 8192, or less (down to 512) where that would be fewer than 500 steps: little data wants many small "
        "steps")
    add("--gradient-accumulation-steps", type=positive_int, default=1, help="default 1; more saves memory and changes nothing else")
    add("--gradient-checkpointing", action="store_true", help="compute the MLP of every depth again in the backward pass: half of the "
        "kept tensors for a sixth more time. Try --gradient-accumulation-steps first, which costs nothing")
    add("--loss", choices=["kl", "lk", "lk-log"], default="kl", help="default kl: cross entropy against the target's distribution over the "
        "draft rows. lk (kl that gives way to the acceptance itself) and lk-log (log of the acceptance) are those of arXiv 2602.23881, and "
        "cost more")
    add("--freeze-lm-head", action="store_true", help="keep the lm_head as it starts; saves the gradient and the moments of its rows")
    add("--mixed-precision", choices=["no", "bf16"], help="default: what accelerate's configuration says, else no. bf16 computes in "
        "bfloat16; weights and moments stay float32")
    add("--eval-shards", metavar="DIR", help="measure on all samples of this folder, and train on all of --shards; default: the samples "
        "of --shards that were set aside. With --follow those are not trained on all the same")
    add("--eval-every", type=positive_int, help="steps between measurements of the held-out accept length; default: a tenth of the run")
    add("--eval-samples", type=positive_int, default=256, help="at most so many held-out samples; default 256, to keep measuring cheap")
    add("--eval-steps", type=in_range(1, 128, low_too=True, kind=int), default=3, help="drafts per verification in the simulated accept "
        "length; default 3, as big models are served")
    add("--save-every", type=positive_int, help="steps between checkpoints to resume from; default: as --eval-every")
    add("--keep", type=positive_int, default=2, help="how many of this run's last checkpoints stay; default 2, should the last one be "
        "damaged")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, if there is one")
    add("--follow", action="store_true", help="train on shards as extract_hidden_states.py --max-disk-gb writes them, each once, and "
        "acknowledge what a checkpoint covers, which is then removed; default off: all shards are there")
    add("--seed", type=in_range(0, 2**63 - 1, low_too=True, kind=int), default=0, help="of the order of the samples and the first "
        "weights; default 0, so that runs can be repeated")
    add("--log-with", choices=["tensorboard", "wandb", "trackio", "all"], help="also log to this tracker; metrics.jsonl is always written")
    add("--plot", type=Path, metavar="PNG", help="at the end, also plot losses, held-out accept length and acceptance, and learning rate; "
        "default no. A PNG that is there is replaced")
    add("--verify", action="store_true", help="first check the sha256 of every shard, which reads all of them; default off: sizes, headers "
        "and shapes are always checked")
    add("--dry-run", action="store_true", help="print what would be trained and what it costs, and stop")
    add("--revision", metavar="NAME", help="hub revision of --target; default its main one")
    add("--trust-remote-code", action="store_true", help="allow code that comes with the target's config; default off")
    add("--force", action="store_true", help="go on although hashes or figures say that shards, map or checkpoint were made for another "
        "target or other data; default off, since such a drafter is seldom worth its training")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.init == "checkpoint" and not args.checkpoint:
        raise UserError("--init checkpoint needs --checkpoint, the folder of the drafter to start from")
    if args.log_with not in (None, "all") and not find_spec(args.log_with):
        raise UserError(f"--log-with {args.log_with}: it is not installed; pip install {args.log_with}")
    if args.log_with == "all" and not get_available_trackers():
        raise UserError("--log-with all: none is installed; pip install tensorboard, or leave --log-with out")
    if args.init == "scratch" and args.checkpoint:
        raise UserError("--checkpoint goes with --init checkpoint; with --init scratch nothing is read from it")
    if args.init == "scratch" and args.remap_vocab:
        raise UserError("--remap-vocab goes with --init checkpoint, whose lm_head rows it carries over; leave it out with --init scratch")
    if args.plot:
        check_plot(args.plot, args.out)
    out = Path(args.out)
    check_output_folder(out, "run.json")
    if args.follow and (args.epochs or 1) > 1:
        raise UserError(f"--epochs {args.epochs}: with --follow each shard is there once; leave --epochs out, or extract without "
                        f"--max-disk-gb")
    args.epochs = args.epochs or (1 if args.follow else 2)
    target = open_target(args.target, args.revision, args.trust_remote_code)
    shards = wait_for_heldout(Path(args.shards), args) if args.follow else Shards(args.shards, args.verify)
    evaluation = Shards(args.eval_shards, args.verify) if args.eval_shards else shards
    head, embedding = target.lm_head(), target.embedding()
    facts = target.facts(head, embedding)
    layers = shards.manifest["layers"]
    warnings = check_shards(shards, target, facts, layers, args.force)
    if evaluation is not shards:
        warnings += check_shards(evaluation, target, facts, layers, args.force)

    compact = "teacher_ids" in shards.manifest["stored"]
    if compact != ("teacher_ids" in evaluation.manifest["stored"]):
        raise UserError(f"of {args.shards} and {args.eval_shards} one holds the compact teacher, one the last states; extract both alike")

    draft_vocab = decide_vocabulary(args.draft_vocab, target.vocab_size)
    if args.init == "checkpoint":
        drafter, map_rows, promise, remapped = start_from_checkpoint(args, draft_vocab, target, facts, shards, warnings)
    else:
        map_rows, promise = named_map(args, draft_vocab, facts, shards, warnings)
        torch.manual_seed(args.seed)
        drafter, remapped = Drafter(drafter_config(target, draft_vocab, layers)), None
    covered, unseen = covered_share(args, map_rows, promise, shards, evaluation, warnings)

    train_samples = np.arange(len(shards.index)) if args.eval_shards else np.flatnonzero(~shards.heldout)
    eval_samples = np.arange(len(evaluation.index)) if args.eval_shards else np.flatnonzero(shards.heldout)
    if args.follow and args.init == "checkpoint" and not len(eval_samples):
        raise UserError("--follow with --init checkpoint needs held-out samples, or --eval-shards, to see whether the checkpoint fits")
    if args.follow and args.eval_shards and shards.heldout.any():
        warnings.append(f"--follow: the {shards.heldout.sum()} held-out samples of {args.shards} are not trained on")
    probe_samples = eval_samples[len(eval_samples) // 2 :] if args.follow else train_samples  # nothing to train on is there yet
    eval_samples = eval_samples[: args.eval_samples]
    if args.lr is None:
        args.lr = float(f"{(0.3 if args.optimizer == 'muon' else 1.2) / target.hidden_size:.1e}")
    if args.batch_tokens is None:
        tokens = expected_tokens(shards) if args.follow else int(shards.index[train_samples, 2].sum()) * args.epochs
        args.batch_tokens = min(8192, max(512, tokens // 500))
    loss_samples = eval_samples[:64]  # a loss of 7 depths costs three times an accept length of 3
    if not args.follow and not shards.index[train_samples, 5].sum():
        raise UserError(f"{args.shards} holds no supervised token outside of its held-out samples; there is nothing to learn from")
    order = Stream(shards, args, out) if args.follow else Order(shards.index[:, 2], train_samples, args)
    steps = order.steps
    every = args.eval_every or max(1, steps // 10)
    save_every = args.save_every or every

    accelerator = Accelerator(mixed_precision=args.mixed_precision, log_with=args.log_with, project_dir=str(out), dynamo_backend="no")
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UserError(f"mixed precision {accelerator.mixed_precision} is not supported: float16 gradients overflow here; take bf16 or no")
    may_change = ("out", "resume", "dry_run", "verify", "log_with", "keep", "save_every", "plot", "gradient_checkpointing")
    by_content = ("target", "shards", "eval_shards", "vocab_map", "checkpoint", "remap_vocab")
    settings = finite({
        **{key: value for key, value in vars(args).items() if key not in may_change + by_content},
        "eval_every": every, "mixed_precision": accelerator.mixed_precision, "shards_sha256": shards.sha256,
        "eval_shards_sha256": evaluation.sha256 if args.eval_shards else None,
        "checkpoint_sha256": sha256_file(Path(args.checkpoint) / "model.safetensors") if args.checkpoint else None,
        "target_sha256": facts["tensors_sha256"], "map_sha256": None if map_rows is None else map_sha256(rows_to_d2t(map_rows.numpy())),
    })
    if not args.dry_run:
        check_run(out, settings, args.resume)

    if evaluation is not shards and evaluation.sha256 == shards.sha256:
        warnings.append(f"--eval-shards {args.eval_shards} are the shards that are trained on: held-out figures are of what was learnt")
    for warning in filter(None, warnings):
        say(f"warning: {warning}")
    if args.init == "scratch":
        start_from_scratch(drafter, target, head, map_rows, args.init_layer)
    drafter.recompute = args.gradient_checkpointing
    if args.freeze_lm_head:
        drafter.lm_head.weight.requires_grad_(False)
    trainable = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    layer_parameters = sum(p.numel() for name, p in drafter.named_parameters() if name != "lm_head.weight")
    head_parameters = draft_vocab * target.hidden_size
    shares = [f"{share:.2%} of the {which}" for share, which in (
        (covered, "supervised tokens that are trained on"), (unseen, "held-out ones")) if share is not None]
    say(f"draft vocabulary: {draft_vocab} of {target.vocab_size} rows{' (full, no map)' if map_rows is None else ''}, lm_head "
        f"{head_parameters / 1e6:.1f} M parameters beside {layer_parameters / 1e6:.1f} M in the layer; it covers "
        f"{' and '.join(shares)}")
    frozen = "the embedding is the target's, frozen" + (", the lm_head stays as it is" if args.freeze_lm_head else "")
    say(f"training {trainable / 1e6:.1f} M parameters ({frozen}) for {'about ' if args.follow else ''}{steps} steps of about "
        f"{order.tokens / steps:.0f} tokens "
        f"by {f'muon at a rate of up to {args.muon_lr:.2g} and ' if args.optimizer == 'muon' else ''}AdamW at up to {args.lr:.2g}, "
        f"depth {args.ttt_steps}, {order.samples} samples, "
        f"{len(eval_samples)} held out")
    if steps < 100 and steps != args.max_steps:
        say(f"warning: {steps} steps are few; a smaller --batch-tokens{'' if args.follow else ' or more --epochs'} gives more")
    if args.dry_run:
        state = trainable * 4 * 4 + (target.vocab_size + draft_vocab) * target.hidden_size * 4
        disk = 14 * trainable - (4 * layer_parameters if args.optimizer == "muon" else 0)
        say(f"weights, gradients, moments, embedding and teacher need about {human_bytes(state)} in each process, the batches beside "
            f"them; a checkpoint takes {human_bytes(disk)} of disk, and {args.keep} are kept"
            f"{'; the checkpoint is tried before the first step, not in a dry run' if args.init == 'checkpoint' else ''}")
        return {"steps": steps, "epochs": order.epochs, "tokens": order.tokens, "trainable_params": trainable, "draft_vocab": draft_vocab,
                "init": args.init, "memory_bytes": state, "checkpoint_bytes": disk, "dry_run": True, "batch_tokens": args.batch_tokens,
                "lr": args.lr, "warnings": list(filter(None, warnings)), "out": str(out)}

    device = accelerator.device
    compute = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    embedding = embedding.to(device)
    if compact:
        teacher = CompactTeacher(target.vocab_size, map_rows, device, compute)
    else:
        teacher = Teacher(head, map_rows, target.logit_softcap, target.logit_scale, device, compute, whole=args.loss != "kl")
    if map_rows is not None:
        map_rows = map_rows.to(device)
    drafter.to(device)
    probed = None
    if (out / "run.json").exists():
        probed = read_json(out / "run.json").get("start")
    elif args.init == "checkpoint":
        probed = probe(args, target, drafter, embedding, teacher, map_rows, (shards, probe_samples), (evaluation, eval_samples))
    warnings.append(probed and probed["warning"])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        lock = lock_run(out)  # held as long as it is open
        check_run(out, settings, args.resume)  # again: another process may have begun a run meanwhile
        if not (out / "run.json").exists():
            name = {"run": os.urandom(8).hex()} if args.follow else {}
            write_json(out / "run.json", {**settings, "start": finite(probed), **name})
    if args.log_with:
        accelerator.init_trackers("eagle3", config={key: value for key, value in settings.items() if value is not None})

    progress = {"step": 0, "tokens": 0, "seconds": 0.0, "waited": 0.0, "loss": None, "last": None, "best": None}
    progress |= order.position
    moments = {}
    if args.resume:
        progress, moments = load_checkpoint(out, drafter, progress)
    if args.follow:
        order.begin(progress, accelerator.is_main_process and read_json(out / "run.json").get("run"))
    train_step = TrainStep(drafter, embedding, teacher, args.ttt_steps, args.depth_decay, args.loss)
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and torch.distributed.is_initialized()
    if sharded:  # not by accelerate, which on CPUs would quietly not shard
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        model = fully_shard(train_step, mesh=init_device_mesh(device.type, (accelerator.num_processes,)), mp_policy=policy)
        say(f"weights, gradients and moments are spread over {accelerator.num_processes} processes: each holds "
            f"1/{accelerator.num_processes} of them, and all weights during a step")
    else:
        model = accelerator.prepare(train_step)
    parameters = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    vectors = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    lm_head = [parameter for name, parameter in parameters.items() if name == "lm_head.weight"]
    matrices = [parameter for name, parameter in parameters.items() if parameter.dim() == 2 and name != "lm_head.weight"]
    by_adamw = lm_head if args.optimizer == "muon" else lm_head + matrices
    optimizers = [torch.optim.AdamW([{"params": by_adamw, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                                    lr=args.lr, betas=(0.9, 0.95), fused=True)]
    if args.optimizer == "muon":
        optimizers.append(torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=args.weight_decay, adjust_lr_fn="original"))
    restore_moments(optimizers, parameters, moments)

    training_block = {
        "target": facts, "layers": layers, "draft_vocab": draft_vocab, "map_sha256": settings["map_sha256"], "coverage": covered,
        "coverage_heldout": unseen, "init": args.init, "remapped": remapped, "start": probed,
        **{key: shards.manifest[key] for key in ("data_sha256", "tokenizer_sha256", "chat_template_sha256", "template_kwargs")},
        "warnings": [warning for warning in warnings if warning],
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "safetensors", "numpy")},
        "command": " ".join(sys.argv),
    }

    def measure():
        """Simulated accept length and loss on the held-out samples, the same for any number of processes; logged and said."""
        mine, few = (part[accelerator.process_index :: accelerator.num_processes] for part in (eval_samples, loss_samples))
        if sharded:
            model.unshard()
        with accelerator.autocast(), torch.no_grad():
            counts = simulated(drafter, embedding, map_rows, evaluation, mine, args.eval_steps).sum(0).to(device)
            loss = torch.zeros((), device=device)
            for first in range(0, len(few), 8):
                batch = make_batch([evaluation.sample(number) for number in few[first : first + 8]], device)
                loss += train_step.forward(batch, 1.0)[0]  # not the module itself, whose hooks would wait for the other processes
        if sharded:
            model.reshard()
        reached, accepted = accelerator.reduce(counts).tolist()
        loss = accelerator.reduce(loss).item() / max(int(evaluation.index[loss_samples, 5].sum()), 1) if len(eval_samples) else None
        length, acceptance = accept_figures(reached, accepted)
        record = {"step": progress["step"], "accept_length": length, "acceptance": acceptance, "loss": loss, "coverage": unseen}
        log({**record, "heldout": True})
        figures = "not measured" if length is None else f"{length:.3f}, loss {loss:.3f}"
        say(f"step {record['step']}: held-out accept length {figures}")
        return record

    def export(folder, weights):
        config = {**drafter.config, "training": finite({**training_block, "steps": progress["step"], "loss": progress["loss"],
                                                        "accept_length": progress["last"] and progress["last"]["accept_length"],
                                                        "acceptance": progress["last"] and progress["last"]["acceptance"]})}
        save_drafter(folder, weights, config, map_rows)

    def store(best, checkpoint):
        """Write OUT's drafter, a checkpoint, or both; gathered from all processes, written by the main one."""
        weights = gather(drafter.state_dict(), accelerator.is_main_process)
        moments = {f"{key}/{name}": value for optimizer in optimizers for name, parameter in parameters.items()
                   for key, value in optimizer.state.get(parameter, {}).items()}
        moments = gather(moments, accelerator.is_main_process) if checkpoint else {}
        if broken := not_finite({**weights, **moments}):
            raise Failed(f"{broken} is not finite after step {progress['step']}: {DIVERGED}")
        if best and accelerator.is_main_process:
            export(out, weights)
        if checkpoint and accelerator.is_main_process:
            save_checkpoint(out, export, weights, moments, finite(progress), args.keep)
        if checkpoint and args.follow:
            order.acknowledge(progress["block"])

    def log(record):
        if accelerator.is_main_process:
            with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(finite(record)) + "\n")
        if args.log_with:
            group = "heldout" if "heldout" in record else "train"
            curves = {f"{group}/{key}": value for key, value in record.items() if type(value) in (int, float) and key != "step"}
            curves |= {f"{group}/{key}/{depth}": value for key in ("acceptance", "depth_losses")
                       for depth, value in enumerate(record.get(key, []), start=1) if value is not None}
            accelerator.log(curves, step=record["step"])

    def load_step(number):
        """The samples of a step, the place in `order` after it, and this process's micro-batches, as many as every other's, since all
        take part in each; None after the last step."""
        if (found := order.step(number)) is None:
            return None
        chosen, position = found
        parts = min(len(chosen), accelerator.num_processes * args.gradient_accumulation_steps)
        parts = share_out(chosen, shards.index[chosen, 2], parts)
        parts = [part for part in parts if part]
        mine = parts[accelerator.process_index :: accelerator.num_processes]
        if len(mine) * accelerator.num_processes < len(parts):
            mine.append(None)
        batches = [make_batch([shards.sample(sample) for sample in part or parts[-1]], device) for part in mine]
        if mine[-1] is None:  # nothing of its own is left: it takes another's samples and learns nothing from them
            batches[-1]["loss_mask"].zero_()
        return chosen, position, batches

    def look(measuring, saving):
        """Measure, keep what is better than the best so far, and save a checkpoint."""
        best, improved = progress["best"] and progress["best"]["accept_length"], False
        if measuring:
            progress["last"] = measure()
            length = progress["last"]["accept_length"]
            improved = length is None or best is None or length >= best  # of equals the later, which has learnt more
        if improved:
            progress["best"] = progress["last"]
        if improved or saving:
            store(improved, saving)

    if args.init == "checkpoint" and not progress["step"]:
        progress["best"] = progress["last"] = measure()  # what the checkpoint is worth here
        store(best=True, checkpoint=False)
    bar = Progress(steps, "steps", "train", done=progress["step"])
    loader = ThreadPoolExecutor(1)
    start, spent_before = time.monotonic(), progress["seconds"]
    paused = 0.0
    upcoming, saved = loader.submit(load_step, progress["step"]), progress["step"]
    try:
        while True:
            moment = time.monotonic()
            loaded = upcoming.result()
            progress["waited"] += time.monotonic() - moment
            if loaded is None:
                break
            chosen, position, batches = loaded
            step = progress["step"]
            upcoming = loader.submit(load_step, step + 1)
            labels = max(int(shards.index[chosen, 5].sum()), 1)
            share = schedule(order.place(progress), steps, args.warmup)
            for optimizer, peak in zip(optimizers, (args.lr, args.muon_lr), strict=False):
                for group in optimizer.param_groups:
                    group["lr"] = peak * share
            figures = torch.zeros(1 + 2 * args.ttt_steps, device=device)  # loss, cross entropy sums, rows
            for number, batch in enumerate(batches):
                together = sharded or number == len(batches) - 1
                with nullcontext() if together else accelerator.no_sync(model):
                    with accelerator.autocast():
                        loss, sums, rows = model(batch, accelerator.num_processes / labels)  # gradients are averaged: undone here
                    loss.backward()  # not accelerate's, which divides by a number of its own configuration
                figures += torch.cat([loss.detach()[None] / accelerator.num_processes, sums.detach(), rows.to(device)])
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters.values()])
            norm = norm.full_tensor() if sharded else norm
            if not torch.isfinite(norm):
                raise Failed(f"the gradient of step {step + 1} is not finite (norm {norm}): {DIVERGED}")
            if norm > args.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters.values(), args.max_grad_norm, norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            figures = accelerator.reduce(figures).tolist()
            tokens = int(shards.index[chosen, 2].sum())
            progress |= {"step": step + 1, "tokens": progress["tokens"] + tokens, "loss": figures[0], **position}
            progress["seconds"] = spent_before + time.monotonic() - start - paused
            best = progress["best"] and progress["best"]["accept_length"]
            depth_losses = [s / max(r, 1) for s, r in zip(figures[1 : 1 + args.ttt_steps], figures[1 + args.ttt_steps :], strict=True)]
            bar.update(1, f"loss {figures[0]:.3f}, {progress['tokens'] / progress['seconds']:.0f} tokens/s"
                          f"{f', best accept length {best:.3f}' if best else ''}")
            log({"step": step + 1, "epoch": order.epoch(step), "loss": figures[0], "depth_losses": depth_losses,
                 "lr": args.lr * share, "grad_norm": norm.item(), "tokens": tokens,
                 "tokens_per_second": progress["tokens"] / progress["seconds"], "waiting": progress["waited"] / progress["seconds"],
                 "seconds_left": bar.seconds_left()})

            moment = time.monotonic()
            saving = (step + 1) % save_every == 0 or args.follow and order.due(progress["block"])
            saved = step + 1 if saving else saved
            look((step + 1) % every == 0, saving)
            paused += time.monotonic() - moment
    finally:
        if args.follow:
            order.close()  # a wait for the next shard
        loader.shutdown()
    if not progress["step"]:
        raise UserError(f"none of the samples of {args.shards} could be trained on")
    look(not progress["last"] or progress["last"]["step"] < progress["step"], saved < progress["step"])
    if args.follow:
        order.acknowledge(progress["block"], finished=True)
    bar.close()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        lock.close()
    if not (out / "model.safetensors").exists():
        raise UserError(f"{out} has lost its model.safetensors since it was trained; copy that of one of its checkpoints there")
    if args.log_with:
        accelerator.end_training()
    if args.plot and accelerator.is_main_process:
        if lines := read_metrics(out):
            plot_training(args.plot, lines)
        else:
            say(f"nothing is plotted: {out / 'metrics.jsonl'} holds no step any more")
    best = progress["best"]
    length = best["accept_length"]
    unmeasured = "nothing could be measured on the held-out samples" if len(eval_samples) else "no sample was held out"
    say(f"{out} is the drafter of step {best['step']}, " + (f"held-out accept length {length:.3f}" if length else unmeasured))
    if best["step"] == 0:
        training_block["warnings"].append("no step was better than the checkpoint that it began from; lower --lr and --muon-lr")
        say(f"warning: {training_block['warnings'][-1]}")
    return {
        "steps": progress["step"], "epochs": order.epochs, "tokens": progress["tokens"], "loss": progress["loss"],
        "accept_length": best["accept_length"], "acceptance": best["acceptance"], "best_step": best["step"],
        "trainable_params": trainable, "draft_vocab": draft_vocab, "init": args.init, "remapped": remapped, "start": probed,
        "coverage": covered, "coverage_heldout": unseen, "tokens_per_second": progress["tokens"] / max(progress["seconds"], 1e-9),
        "seconds": progress["seconds"], "batch_tokens": args.batch_tokens, "lr": args.lr, "processes": accelerator.num_processes,
        "warnings": training_block["warnings"], "out": str(out),
    }


if __name__ == "__main__":
    run(main, interrupted="the same command with --resume goes on from the last checkpoint, or begins again where there is none yet")
