"""Train an EAGLE-3 drafter on hidden-state shards.

    accelerate launch train_drafter.py --shards SHARDS --target TARGET --draft-vocab 32000 --vocab-map MAP --out DRAFTER

OUT is the best drafter so far, as SGLang and vLLM load it (config.json, model.safetensors), beside metrics.jsonl and
checkpoints/step-NNNNNN, each of them a drafter too, with the training state in its folder state/.
"""

import json
import math
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count, cycle
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from common.accept import accept_figures
from common.cli import RANK, Failed, Parser, Progress, UserError, finite, human_bytes, in_range, positive_int, run, say
from common.drafter import Drafter, captured_layers, drafter_config, load_drafter, save_drafter
from common.files import STRAY, check_output_folder, lock_folder, read_json, replace_file, replace_folder, sha256_file, write_json
from common.loss import CompactTeacher, Teacher, TrainStep, simulate, simulated
from common.plots import check_plot, plot_training
from common.shards import (
    ACKNOWLEDGED,
    MANIFEST,
    Shards,
    acknowledged,
    check_shards,
    check_tokenizer,
    other_template,
    read_manifest,
    settings_sha256,
)
from common.target import check_same_target, open_target
from common.ttt import make_batch, supervised_rows
from common.vocab import check_coverage, check_size, coverage, load_map, map_sha256, rows_to_d2t, shortened

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


PROBED, PROBED_TOKENS = 32, 8192  # at most so many held-out samples and tokens say what a checkpoint is worth: seconds on a CPU
DOUBTFUL = 0.4  # acceptance at the first depth from which on no fresh drafter of a few steps could be as good
FRESH_STEPS, FRESH_TOKENS = 32, 256  # what its steps are: half a minute on two cores with 49,152 rows


def decide_vocabulary(text, vocab_size):
    """Rows of the draft vocabulary from `--draft-vocab`; all of them is the full one, whichever way it is written."""
    if text == "full":
        return vocab_size
    try:
        size = int(text)
    except ValueError:
        raise UserError(f"--draft-vocab {shortened(text)} is neither full nor a number in 1..{vocab_size}") from None
    check_size(size, vocab_size)
    return size


def named_map(args, draft_vocab, target, shards, warnings):
    """(target ids int64 [D] of --vocab-map, the facts beside it), or (None, {}) for the full vocabulary. target: its facts()."""
    if draft_vocab == target["vocab_size"]:
        if args.vocab_map:
            raise UserError(f"--draft-vocab {args.draft_vocab} is the full vocabulary and takes no --vocab-map; leave one of them out")
        return None, {}
    if not args.vocab_map:
        raise UserError(f"--draft-vocab {draft_vocab} needs --vocab-map, the folder that build_vocab_map.py made for these shards "
                        f"(or --draft-vocab full, which needs none)")
    rows, facts = load_map(args.vocab_map)
    if len(rows) != draft_vocab:
        raise UserError(f"--vocab-map {args.vocab_map} has {len(rows)} rows, --draft-vocab says {draft_vocab}; name the map of that size")
    warnings.append(check_same_target(facts.get("target") or {}, target, f"the map {args.vocab_map} was", args.force))
    warnings.append(check_tokenizer(facts.get("tokenizer_sha256"), shards, f"the tokenizer of the map {args.vocab_map}", args.force))
    warnings += other_template(facts, shards.manifest, shards.folder, f"the map {args.vocab_map}")
    return torch.from_numpy(rows), facts


def start_from_checkpoint(args, draft_vocab, target, facts, shards, warnings):
    """How --init checkpoint starts: (drafter in float32, its target ids or None, what its coverage is known from, remapped).

    remapped: None, or with --remap-vocab the numbers of lm_head rows that were carried over, are new, and were dropped.
    """
    drafter, own = load_drafter(args.checkpoint, ordered=not args.remap_vocab)
    config, wanted, layers = drafter.config, drafter_config(target, draft_vocab, shards.manifest["layers"]), shards.manifest["layers"]
    for key in ("vocab_size", "hidden_size", "target_hidden_size", "rope_parameters"):
        if config[key] != wanted[key]:
            raise UserError(f"{args.checkpoint} has {key} {config[key]}, this run wants {wanted[key]}; it is no drafter for this")
    trained = config.get("training") or {}
    warnings.append(check_same_target(trained.get("target") or facts, facts, f"the checkpoint {args.checkpoint} was", args.force))
    if not trained.get("target"):
        warnings.append(f"{args.checkpoint} does not say which target it was trained for; only the sizes were compared")
    if trained.get("tokenizer_sha256"):
        what = f"the tokenizer of the checkpoint {args.checkpoint}"
        warnings.append(check_tokenizer(trained["tokenizer_sha256"], shards, what, args.force))
    warnings += other_template(trained, shards.manifest, shards.folder, f"the checkpoint {args.checkpoint}")
    if (stated := captured_layers(config, target.num_layers, args.checkpoint)) != layers:
        raise UserError(f"{args.checkpoint} is for layers {stated}, these shards hold {layers}; extract those layers")
    kept = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    drafter.config = {**wanted, **{key: config[key] for key in kept}, "torch_dtype": config["torch_dtype"]}
    if args.remap_vocab:
        rows, promise = named_map(args, draft_vocab, facts, shards, warnings)
        return drafter.train(), rows, promise, remap(drafter, own, rows, target.lm_head())
    if config["draft_vocab_size"] != draft_vocab:
        raise UserError(f"{args.checkpoint} has a draft vocabulary of {config['draft_vocab_size']}{' (full)' if own is None else ''}, "
                        f"--draft-vocab says {args.draft_vocab}; say it as the checkpoint has it, or --remap-vocab to change it")
    if args.vocab_map:
        if own is None:
            raise UserError(f"{args.checkpoint} has the full vocabulary and takes no --vocab-map; leave it out")
        if not np.array_equal(load_map(args.vocab_map)[0], own.numpy()):
            raise UserError(f"--vocab-map {args.vocab_map} is not the map of {args.checkpoint}, whose lm_head rows would mean other "
                            f"tokens; leave it out to use the checkpoint's own, or --remap-vocab to carry its rows over")
    return drafter.train(), own, trained, None


def remap(drafter, own, rows, head):
    """Give the drafter lm_head rows for the target ids `rows`, int64 [D]: its own where it has the id, else the target's, moved by the
    mean of what has moved its own rows from the target's. Unmoved ones would outbid all that were trained: going from 32,000 rows to
    49,152 the quickstart's drafter fell from 1.88 to 1.56, and with the move stayed at 1.88.

    own: int64 [D'] target ids of the drafter, in any order; None stands for all, in both; head: the target's lm_head [V, H]. Returns
    how many rows were carried over, are new, and were dropped.
    """
    own, rows = (torch.arange(len(head)) if ids is None else ids for ids in (own, rows))
    place = torch.full((len(head),), -1).index_copy_(0, own, torch.arange(len(own)))[rows]  # int64 [D]: the checkpoint's row, or -1
    carried = place >= 0
    weight = head[rows].float() + (drafter.lm_head.weight.detach() - head[own].float()).mean(0)
    weight[carried] = drafter.lm_head.weight.detach()[place[carried]]
    drafter.lm_head.weight, drafter.lm_head.out_features = torch.nn.Parameter(weight), len(rows)
    count = int(carried.sum())
    counts = {"carried": count, "new": len(rows) - count, "dropped": len(own) - count}
    say(f"draft vocabulary remapped: {count} lm_head rows are carried over, {counts['new']} are new and start from the target's, "
        f"{counts['dropped']} are dropped")
    return counts


def covered_share(args, rows, promise, shards, evaluation, warnings):
    """(coverage of the supervised tokens that are trained on, of the held-out ones or None), for target ids `rows`.

    With --follow nothing that is trained on is there yet: the first is None, and the held-out ones are what is checked. Raises UserError
    where the map covers nothing, or clearly less than its facts, `promise`, say.
    """
    if rows is None:
        return 1.0, 1.0 if args.eval_shards or shards.heldout.any() else None
    counted, aside = shards.supervised_counts()
    if args.eval_shards:
        counted, aside = counted + aside, sum(evaluation.supervised_counts())
    covered, unseen = coverage(aside if args.follow else counted, rows.numpy()), coverage(aside, rows.numpy())
    if covered is None:
        raise UserError("--follow with a reduced draft vocabulary needs held-out samples, or --eval-shards, to see what the map covers")
    if not covered:
        raise UserError("no supervised token is in the draft vocabulary: the map was counted on other data; make one for these shards")
    what = f"the map {args.vocab_map}" if args.vocab_map else f"the draft vocabulary of {args.checkpoint}"
    warnings.append(check_coverage(covered, promise, what, args.force))
    if promise and promise.get("coverage") is None and promise.get("coverage_heldout") is None:
        warnings.append(f"{what} states no coverage: nothing was compared with the {covered:.2%} that it covers here")
    if covered < 0.5 or len(rows) == 1:
        warnings.append(f"the draft vocabulary of {len(rows)} covers {covered:.2%} of the supervised tokens: little can be drafted")
    return None if args.follow else covered, unseen


def start_from_scratch(drafter, target, head, map_rows, init_layer):
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
        drafter.lm_head.weight.copy_(head if map_rows is None else head[map_rows])


def probe(args, target, drafter, embedding, teacher, rows, training, heldout):
    """What a checkpoint is worth before its first step, beside the best constant guess and, where that is in doubt, a fresh drafter.

    training, heldout: (Shards, numbers of samples). Every process computes the same. Returns the figures, with the `warning` that they
    call for or None. Raises UserError for a checkpoint that is worth nothing here, if not forced.
    """
    (shards, inside), unseen = heldout, training[1]
    if not len(inside):  # half of few samples are left to the fresh drafter
        shards, inside = training[0], training[1][: (len(training[1]) + 1) // 2]
    inside = inside[:PROBED]
    inside = inside[: max(1, int(shards.index[inside, 2].cumsum().searchsorted(PROBED_TOKENS, side="right")))]
    if shards is training[0]:
        unseen = np.setdiff1d(unseen, inside)

    counts = simulated(drafter, embedding, rows, shards, inside, args.eval_steps)  # [S, 2, K]
    length, acceptance = accept_figures(*counts.sum(0).tolist())
    guesses = constant_guess(shards, inside, args.eval_steps)
    constant, _ = accept_figures(*guesses.sum(0).tolist())
    figures = {"accept_length": length, "acceptance": acceptance, "constant": constant, "fresh": None, "fresh_steps": 0,
               "samples": len(inside), "warning": None}
    if length is None:
        figures["warning"] = f"whether {args.checkpoint} fits here was not measured: no answer of three tokens is there to draft"
        say(f"warning: {figures['warning']}")
        return figures
    drawn, fresh, beside = length - constant <= 2 * scatter(counts, guesses), None, ""
    if (drawn or acceptance[0] < DOUBTFUL) and len(unseen):
        say(f"{args.checkpoint} starts at an accept length of {length:.3f}: a fresh drafter learns for a moment, to compare")
        yardstick, steps = train_fresh(args, target, embedding, teacher, rows, training[0], unseen)
        fresh, _ = accept_figures(*simulated(yardstick, embedding, rows, shards, inside, args.eval_steps).sum(0).tolist())
        figures["fresh"], figures["fresh_steps"] = fresh, steps
        beside = f", a fresh drafter reaches {fresh:.3f} after {steps} steps"
    sentence = (f"{args.checkpoint} starts at an accept length of {length:.3f} on {len(inside)} samples here (best constant guess "
                f"{constant:.3f}){beside}")
    if (drawn and (fresh is None or length <= fresh)) or (fresh is not None and length - 1 < (fresh - 1) / 2):
        figures["warning"] = (f"{sentence}: it was made for another model, has learnt nothing yet, or its vocabulary lacks what is said "
                              f"here")
        if not args.force:
            raise UserError(f"{figures['warning']}; train from scratch (--init scratch), or --force to go on")
    elif drawn or (fresh is not None and length < fresh):
        figures["warning"] = f"{sentence}: it is of little use here; --init scratch may well be better"
    say(f"warning: {figures['warning']}" if figures["warning"] else sentence)
    return figures


def constant_guess(shards, samples, steps):
    """The counts of `simulate`, int64 [S, 2, steps], for always drafting the one token that the target chooses most often."""
    parts = [shards.sample(int(number), ("input_ids", "loss_mask", "target_argmax")) for number in samples]
    choices = torch.cat([part["target_argmax"][:-1][part["loss_mask"][1:] == 1] for part in parts])
    best = choices.bincount().argmax() if len(choices) else -1
    counts = []
    for part in parts:
        mask, bounds = part["loss_mask"].bool(), [0, len(part["loss_mask"])]
        rows, supervised = supervised_rows(mask, bounds, steps)
        later = (rows + torch.arange(1, steps + 1)[:, None]).clamp(max=bounds[1] - 1)  # [K, R] the row that decides
        counts.append(simulate(mask, bounds, rows, supervised & (part["target_argmax"][later] == best)))
    return torch.cat(counts)


def scatter(counts, others):
    """Standard error of the difference of two accept lengths, from the counts of `simulate` for the same samples, [S, 2, K] each."""
    apart = 0.0
    for sign, part in ((1, counts.double()), (-1, others.double())):
        accepted, starts = part[:, 1].sum(1), part[:, 0, 0]  # [S]
        apart = apart + sign * (accepted - starts * accepted.sum() / starts.sum()) / starts.sum()
    return float(apart.square().sum().sqrt())


def train_fresh(args, target, embedding, teacher, rows, shards, samples):
    """(A drafter that starts from scratch and learns the first depth for a few quick steps, how many): a yardstick, not a training."""
    torch.manual_seed(args.seed)
    device = embedding.device
    drafter = Drafter(drafter_config(target, teacher.buffer.columns, shards.manifest["layers"]))
    start_from_scratch(drafter, target, target.lm_head(), None if rows is None else rows.cpu(), "target")
    drafter.lm_head.weight.requires_grad_(False)  # it starts as the target's rows, and would cost as much as all the rest
    step = TrainStep(drafter.to(device), embedding, teacher, 1, 1.0)
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1.2 / target.hidden_size, betas=(0.9, 0.95), weight_decay=0.0)
    order, tokens, number = cycle(np.random.default_rng(args.seed).permutation(samples).tolist()), 0, 0
    while number < FRESH_STEPS and tokens < 4 * FRESH_STEPS * FRESH_TOKENS:
        chosen, size = [], 0
        while size < FRESH_TOKENS:
            chosen.append(next(order))
            size += int(shards.index[chosen[-1], 2])
        for group in optimizer.param_groups:
            group["lr"] = 1.2 / target.hidden_size * min(1, (number + 1) / 5)
        loss, _, _ = step(make_batch([shards.sample(sample) for sample in chosen], device), 1 / max(1, shards.index[chosen, 5].sum()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens, number = tokens + size, number + 1
    return drafter.eval(), number


class Order:
    """All samples are there: each epoch takes them in an order of its own. It depends on the seed and the data alone."""

    position = {}  # all of it follows from the step

    def __init__(self, lengths, samples, args):
        """lengths: int64 [S] tokens of every sample of the folder; samples: the numbers of those to train on."""
        self.samples = len(samples)
        self.numbers, self.ends = plan_steps(lengths, samples, args)
        self.steps, self.tokens = len(self.ends) - 1, int(lengths[self.numbers[: self.ends[-1]]].sum())
        self.epochs = -(-int(self.ends[-1]) // self.samples)

    def step(self, number):
        """(numbers of the samples of 0-based step `number`, {}), or None after the last."""
        return None if number >= self.steps else (self.numbers[self.ends[number] : self.ends[number + 1]], {})

    def epoch(self, number):
        return int(self.ends[number]) // self.samples

    def place(self, progress):
        """Where the next step is on the schedule of `steps` steps."""
        return progress["step"]


class Stream:
    """Shards of an extraction with --max-disk-gb, each read once, when it is there: in their order, the samples of a shard shuffled by the
    seed. What is trained on does not depend on when shards appear. A step that would reach over more shards than half of the bound ends
    before.

    Where it is after a step, its position, is the first block that is not read to its end, `taken` of whose samples are, and all samples
    taken. `steps` and `tokens` are what is expected: of planned samples some are skipped, and answers end before their limit.
    """

    epochs = 1

    def __init__(self, shards, args, out):
        self.shards, self.args, self.out, self.planned = shards, args, out, shards.manifest["planned"]
        self.position = {"block": self.planned["heldout_blocks"], "taken": 0, "samples": 0}
        self.queue, self.stopped = None, threading.Event()
        self.path, self.samples = shards.folder / ACKNOWLEDGED, self.planned["samples"] - self.planned["heldout_samples"]
        self._check()
        self.tokens = expected_tokens(shards)
        self.steps = max(1, round(self.tokens / args.batch_tokens))
        fits = self.planned["room"] * self.planned["tokens"] // (2 * sum(self.planned["block_bytes"]))
        if args.batch_tokens > fits:
            say(f"warning: --batch-tokens {args.batch_tokens} are more than half of what --max-disk-gb lets be there, about {fits} "
                f"tokens, and steps are cut to that")
        if args.max_steps and args.max_steps < self.steps:
            self.tokens, self.steps = args.max_steps * args.batch_tokens, args.max_steps

    def step(self, number):
        """(numbers of the samples of the next step, the position after it), or None after the last. Waits for what is not there yet."""
        if number == self.args.max_steps:
            return None
        self.shards.close(self.position["block"])  # all of an earlier step is in memory
        block, taken, samples = (self.position[key] for key in ("block", "taken", "samples"))
        chosen, tokens = [], 0
        while tokens < self.args.batch_tokens and block < self.planned["blocks"]:
            if self.queue is None:
                if chosen and sum(self.planned["block_bytes"][self.position["block"] : block + 1]) > self.planned["room"] / 2:
                    break
                self.queue = self._read(block)
            if taken == len(self.queue):
                block, taken, self.queue = block + 1, 0, None
                continue
            length = int(self.shards.index[self.queue[taken], 2])
            if chosen and tokens + length / 2 > self.args.batch_tokens:  # a step ends as in plan_steps
                break
            chosen.append(self.queue[taken])
            taken, tokens = taken + 1, tokens + length
        if self.queue is not None and taken == len(self.queue):
            block, taken, self.queue = block + 1, 0, None
        self.position = {"block": block, "taken": taken, "samples": samples + len(chosen)}
        return (np.array(chosen), self.position) if chosen else None

    def epoch(self, number):
        return 0

    def place(self, progress):
        return min(max(self.steps * progress["samples"] / self.samples, progress["step"] if self.args.max_steps else 0), self.steps)

    def _check(self):
        """Raises UserError where nothing can be trained on, or another training follows, since only one can."""
        if self.samples <= 0:
            raise UserError(f"{self.shards.folder} holds no samples but the held-out ones; extract with a lower --heldout")
        if not os.access(self.shards.folder, os.W_OK):
            raise UserError(f"{self.shards.folder} cannot be written, and --follow acknowledges there what it has read; make it writable")
        before = read_json(self.path) if self.path.exists() else {}
        own = read_json(self.out / "run.json").get("run") if (self.out / "run.json").exists() else None
        if before and before.get("run") != own:
            raise UserError(f"{self.shards.folder} is followed by the training in {before.get('out')}, which has acknowledged the shards "
                            f"before {before.get('blocks')}: go on with that one (--resume), or extract again; if none was removed, remove "
                            f"{self.path}")

    def begin(self, progress, run):
        """Go on at the position of `progress`. run: the name of this training. Raises UserError where shards are gone that are to be
        read."""
        self.position, self.run = {key: progress[key] for key in self.position}, run
        gone = acknowledged(self.shards.folder, self.planned).stop
        if RANK == 0 and gone > self.position["block"]:
            raise UserError(f"--resume: {self.out} goes on at shard {self.position['block']}, and those before {gone} were removed when a "
                            f"later checkpoint had read them; restore that checkpoint, or extract again and train anew")
        self.acknowledge(self.position["block"])

    def due(self, block):
        """Whether a checkpoint should make room, with all shards before `block` read: at half of what may be there, so that the other half
        is left for the shards that a step needs. All processes find the same."""
        return sum(self.planned["block_bytes"][self.acknowledged : block]) > self.planned["room"] / 2

    def acknowledge(self, block, finished=False):
        """A durable checkpoint covers all shards before `block`: they may be removed."""
        self.acknowledged = block
        if RANK == 0:
            write_json(self.path, {"run": self.run, "out": str(self.out.absolute()), "blocks": block, "finished": finished})

    def close(self):
        """End a wait."""
        self.stopped.set()

    def _read(self, block):
        """int64 [n] the samples of a block, shuffled; none when all of its rows were skipped."""
        spoke = time.monotonic()
        while True:
            manifest = read_manifest(self.shards.folder)
            if settings_sha256(manifest) != self.shards.sha256:
                raise UserError(f"{self.shards.folder} is another extraction's now than when this training began; train anew")
            entry = next((entry for entry in manifest["shards"] + manifest["empty_blocks"] if entry["block"] == block), None)
            if entry:
                break
            if time.monotonic() - spoke > 60:
                spoke = time.monotonic()
                say(f"shard {block} of {self.planned['blocks']} is not there yet: is the extraction running?")
            if self.stopped.wait(1.0):
                raise UserError("stopped")
        if entry.get("heldout_samples"):
            raise UserError(f"shard {block} of {self.shards.folder} holds held-out samples, which come before; its {MANIFEST} was edited")
        if "file" not in entry:
            return np.zeros(0, dtype=np.int64)
        return np.random.default_rng([self.args.seed, block]).permutation(self.shards.extend(entry))


def expected_tokens(shards):
    """Tokens of the shards that are not held out, of an extraction with --max-disk-gb: those planned, which for answers that were to be
    written is the most they could be, times the share that it came to in the held-out ones."""
    planned, found = shards.manifest["planned"], int(shards.index[:, 2].sum())
    aside = planned["heldout_tokens"]
    return int((planned["tokens"] - aside) * (found / aside if aside else 1))


def wait_for_heldout(folder, args):
    """The Shards of an extraction with --max-disk-gb, as soon as its held-out part is there; --dry-run does not wait."""
    spoke = -math.inf
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--shards {folder} is a file; give the folder of an extraction")
    while True:
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            if "room" not in manifest["planned"]:
                raise UserError(f"--follow: {folder} was extracted without --max-disk-gb; leave --follow out and train on it when it is "
                                f"complete, or extract again with it")
            aside = manifest["planned"]["heldout_blocks"]
            if sum(entry["block"] < aside for entry in manifest["shards"] + manifest["empty_blocks"]) == aside:
                return Shards(folder, args.verify, first=0)
        if args.dry_run:
            raise UserError(f"--follow: the held-out part of {folder} is not there yet; start extract_hidden_states.py --max-disk-gb, "
                            f"which makes it first")
        if time.monotonic() - spoke > 60:
            spoke = time.monotonic()
            say(f"waiting for the held-out part of {folder}, which extract_hidden_states.py --max-disk-gb makes first")
        time.sleep(0.5)


def plan_steps(lengths, samples, args):
    """(order int32 [n], ends int64 [steps + 1]): step s takes the samples order[ends[s] : ends[s + 1]], epoch after epoch.

    It depends on the seed and the data alone. lengths: int64 [S] tokens of every sample; samples: those to train on.
    """
    orders, ends, count = [], [0], len(samples)
    if args.max_steps is None and args.epochs * count > 2 * 10**8:
        raise UserError(f"--epochs {args.epochs} over {count} samples are too many to plan; give --max-steps as well")
    for epoch in range(args.epochs):
        order = np.random.default_rng([args.seed, epoch]).permutation(samples.astype(np.int32))
        orders.append(order)
        tokens = lengths[order]
        start = np.cumsum(tokens) - tokens  # int64 [n] tokens before each sample
        middle = start + tokens / 2
        first = 0
        while first < count:  # a step ends before the sample of which less than half would fit, and holds at least one
            first = max(first + 1, int(middle.searchsorted(start[first] + args.batch_tokens, side="right")))
            ends.append(epoch * count + first)
            if len(ends) > (args.max_steps or math.inf):
                return np.concatenate(orders), np.array(ends)
    return np.concatenate(orders), np.array(ends)


def share_out(samples, lengths, parts):
    """Split samples into `parts` lists of about equal tokens; the same split wherever it is computed."""
    shares, loads = [[] for _ in range(parts)], [0] * parts
    for number in np.argsort(-lengths, kind="stable"):
        lightest = loads.index(min(loads))
        shares[lightest].append(int(samples[number]))
        loads[lightest] += int(lengths[number])
    return shares


def schedule(place, steps, warmup):
    """Share of the peak learning rate at 0-based step `place` of `steps`: linear warm-up, then cosine to zero."""
    rising = max(1, round(steps * warmup))
    if place < rising:
        return min(1.0, (place + 1) / rising)
    return 0.5 * (1 + math.cos(math.pi * (place - rising) / max(1, steps - rising)))


FILES = ("config.json", "model.safetensors", "state/weights.safetensors", "state/optimizer.safetensors", "state/progress.json")
STEP = re.compile(r"step-\d{6,}")
# What a killed run leaves half-written: our own temporary files, and those that safetensors makes beside the file it saves.
TEMPORARY = re.compile(r"\.(run\.json|metrics\.jsonl|config\.json|model\.safetensors|step-\d+)\.tmp-\d+")


def check_run(out, settings, resume):
    """Refuse a folder that holds another run, or this one without --resume."""
    if os.path.lexists(out / "checkpoints") and not (out / "checkpoints").is_dir():
        raise UserError(f"--out {out}: its checkpoints is no folder; remove it, or give another --out")
    if not (out / "run.json").exists():
        return
    if not resume:
        raise UserError(f"--out {out} holds an earlier run; add --resume to go on with it, or give another folder")
    before = read_json(out / "run.json")
    for key in settings:
        if before.get(key) != settings[key]:
            raise UserError(f"--resume: {key} is {settings[key]} now and was {before.get(key)} when the run in {out} began; give the same "
                            f"arguments, or another --out")


def lock_run(out):
    """An open file that only one process can hold; with it, what a killed run left half-written is removed."""
    lock = lock_folder(out, "trained")
    for stray in [*out.iterdir(), *(out / "checkpoints").glob("*")]:
        if TEMPORARY.fullmatch(stray.name) or STRAY.fullmatch(stray.name):
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
    return lock


def checkpoints(out):
    """This run's checkpoints by step, oldest first, without any that somebody has taken files from."""
    return [folder for folder in _step_folders(out) if all((folder / file).exists() for file in FILES)]


def _step_folders(out):
    found = [folder for folder in (out / "checkpoints").glob("step-*") if STEP.fullmatch(folder.name)]
    return sorted(found, key=_step)


def _step(folder):
    return int(folder.name.removeprefix("step-"))


def gather(tensors, keep):
    """The tensors of a dict on the CPU, whole where they are spread over the processes, each of which must call this; {} unless `keep`."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = tensor.detach().cpu().contiguous()
    return whole


def save_checkpoint(out, export, weights, moments, progress, keep):
    """checkpoints/step-NNNNNN: the drafter as served, and in state/ the float32 weights, moments and counters. Whole or absent.

    Of older ones only the last `keep` stay; of the others this run's files are removed and anything else is left.
    """
    def fill(folder):
        export(folder, weights)
        state = folder / "state"
        state.mkdir()
        replace_file(state / "weights.safetensors", lambda path: save_file(weights, path))
        replace_file(state / "optimizer.safetensors", lambda path: save_file(moments, path))
        write_json(state / "progress.json", progress)

    (out / "checkpoints").mkdir(exist_ok=True)
    replace_folder(out / "checkpoints" / f"step-{progress['step']:06d}", fill)
    folders = _step_folders(out)
    for old in folders[: folders.index(checkpoints(out)[-keep:][0])]:
        for file in FILES:
            (old / file).unlink(missing_ok=True)
        for place in (old / "state", old):
            with suppress(OSError):  # it holds somebody's files, or is not there
                place.rmdir()


def load_checkpoint(out, drafter, fresh):
    """Go on from the last checkpoint that is whole: its weights are loaded into `drafter`, lines logged after it are dropped, and damaged
    checkpoints after it get a name under which neither --keep nor a later start counts them.

    Returns (counters, {parameter: {key: tensor}} of the optimizer), or (`fresh`, {}) without one. Raises UserError when there are damaged
    ones only, beside a drafter that training from the start would replace.
    """
    progress, moments = fresh, {}
    trainable = [name for name, parameter in drafter.named_parameters() if parameter.requires_grad]
    for folder in reversed(checkpoints(out)):
        try:
            progress = _read_progress(folder, fresh)
            weights, stored = (load_file(folder / "state" / f"{name}.safetensors") for name in ("weights", "optimizer"))
            moments = {name: {key.split("/")[0]: stored[key] for key in stored if key.endswith(f"/{name}")} for name in trainable}
            if not all(moments.values()):
                raise ValueError("moments of a parameter are missing")
            if broken := not_finite({**weights, **stored}):
                raise ValueError(f"{broken} is not finite")
            shapes, wanted = ({name: value.shape for name, value in state.items()} for state in (weights, drafter.state_dict()))
            if shapes != wanted:
                raise ValueError("its weights have other names or shapes")  # found before any of them is loaded
            drafter.load_state_dict(weights)
        except (UserError, OSError, SafetensorError, ValueError) as error:
            say(f"{folder} is damaged ({str(error)[:200]}); the one before it is tried")
            progress, moments = fresh, {}
            continue
        say(f"going on after step {progress['step']} of {folder}")
        break
    later = [folder for folder in _step_folders(out) if _step(folder) > progress["step"]]
    if later and progress is fresh and (out / "model.safetensors").exists():  # before the first save of a run there is no such folder
        raise UserError(f"--resume: none of the checkpoints in {out} is whole, and training from the start would replace its drafter; "
                        f"give another --out, or remove {out / 'model.safetensors'}")
    if RANK != 0:
        return progress, moments
    for folder in later:  # another process that still reads one finds it as damaged when it is gone
        names = (folder.with_name(f"{folder.name}.damaged-{number}") for number in count(1))
        os.rename(folder, next(name for name in names if not os.path.lexists(name)))
    metrics = out / "metrics.jsonl"
    if metrics.exists():
        kept = []
        for line in metrics.read_text(encoding="utf-8", errors="replace").split("\n"):
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut off when the run was killed
                if progress is not fresh and json.loads(line)["step"] <= progress["step"]:
                    kept.append(line + "\n")
        replace_file(metrics, lambda path: path.write_text("".join(kept), encoding="utf-8"))
    return progress, moments


def _read_progress(folder, fresh):
    """The counters of a checkpoint, all that `fresh` has. Raises UserError or ValueError where they cannot be those of its folder."""
    progress = read_json(folder / "state" / "progress.json")
    if missing := fresh.keys() - progress.keys():
        raise ValueError(f"progress.json lacks {min(missing)}")
    if type(progress["step"]) is not int or progress["step"] != _step(folder):
        raise ValueError(f"progress.json is of step {progress['step']}")
    for key, value in ((key, progress[key]) for key in fresh):
        if key in ("last", "best"):  # a measurement, None before the first one
            right = value is None or isinstance(value, dict) and {"step", "accept_length", "acceptance"} <= value.keys()
        else:
            right = type(value) in (int, float) or key == "loss" and value is None
        if not right:
            raise ValueError(f"{key} in progress.json is {value}")
    return progress


def not_finite(tensors):
    """Name of the first tensor with NaN or infinity, or with a norm beyond float32, as after a step far too large; None without one."""
    return next((name for name, tensor in tensors.items() if not tensor.float().norm().isfinite()), None)


def read_metrics(out):
    """The records of metrics.jsonl that can be plotted: a line that was cut off, or edited so that it lacks something, is left out."""
    records = []
    with suppress(FileNotFoundError):
        for line in (out / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").split("\n"):
            with suppress(ValueError, TypeError, AttributeError):
                record = json.loads(line)
                wanted = {"step", "loss", "accept_length", "acceptance"} if "heldout" in record else {"step", "loss", "lr"}
                if wanted <= record.keys():
                    records.append(record)
    return records


def restore_moments(optimizers, parameters, moments):
    """Give the optimizers the moments that load_checkpoint found, each process its part where parameters are spread over processes."""
    names = {parameter: name for name, parameter in parameters.items()}
    for optimizer in optimizers if moments else ():
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            for key, value in moments[names[parameter]].items():
                if value.dim() and isinstance(parameter, DTensor):
                    value = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)
                optimizer.state[parameter][key] = value.to("cpu" if key == "step" and not parameter.is_cuda else parameter.device)


if __name__ == "__main__":
    run(main, interrupted="the same command with --resume goes on from the last checkpoint, or begins again where there is none yet")
