"""Train an EAGLE-3 drafter on hidden-state shards.

    accelerate launch train_drafter.py --shards SHARDS --target TARGET --draft-vocab 32000 --vocab-map MAP \\
        --out DRAFTER

OUT is the best drafter so far, as SGLang and vLLM load it (config.json, model.safetensors), beside
metrics.jsonl and checkpoints/step-NNNNNN, each of them a drafter too, with the training state in its folder
state/.
"""

import json
import math
import os
import re
import shlex
import shutil
import sys
import threading
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from common.accept import accept_figures
from common.cli import (
    PATIENCE,
    RANK,
    Failed,
    Parser,
    Progress,
    UserError,
    finite,
    human_bytes,
    in_range,
    positive_int,
    reminder,
    run,
    say,
)
from common.drafter import (
    Drafter,
    captured_layers,
    draft_layer,
    drafter_config,
    load_drafter,
    rotary_entries,
    save_drafter,
    weights_file,
)
from common.files import (
    STRAY,
    check_output_folder,
    lock_folder,
    read_sealed,
    replace_file,
    replace_folder,
    sha256_file,
    write_sealed,
)
from common.loss import (
    DEVICE_PIECE,
    PIECE,
    CompactTeacher,
    Teacher,
    TrainStep,
    chunk_rows,
    packs,
    simulate,
    simulated,
)
from common.plan import FILLED, say_storages, serving_size, storages
from common.plots import check_plot, plot_training
from common.provenance import compare, made_for, target_record
from common.shards import (
    ACKNOWLEDGED,
    CANDIDATES,
    MANIFEST,
    Shards,
    acknowledged,
    broken_rows,
    check_shards,
    finished,
    read_manifest,
    settings_sha256,
)
from common.target import OTHER_PARTS, Target, load_config, native_class, open_target, plain_weight
from common.ttt import fuses, make_batch, supervised_rows
from common.vocab import (
    check_coverage,
    check_size,
    coverage,
    load_map,
    map_sha256,
    rows_to_d2t,
    shortened,
)

LAYER_FLAGS = {"hidden_size": "hidden_size", "heads": "num_attention_heads",
               "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
               "intermediate_size": "intermediate_size"}
PRINCIPAL_TOKENS = 16384  # at most so many say which directions of the target's states a narrow drafter keeps
WARMUP = 0.03  # share of the steps with a rising rate, then cosine to zero: enough for AdamW's moments
MAX_GRAD_NORM = 0.5  # gradients are scaled down to this norm, as in EAGLE
DEPTH_DECAY = 0.8  # depth k counts this to the power k in the loss, as in EAGLE-3
EVAL_SAMPLES = 256  # at most so many held-out samples, to keep measuring cheap
LOSS_SAMPLES = 64  # of these: a loss of 7 depths costs three times an accept length of 3
READERS = 4  # threads that read a step's samples: one fills no fast disk
PROBED, PROBED_TOKENS = 32, 8192  # at most so many say what a checkpoint is worth: seconds on a CPU
DOUBTFUL = 0.4  # acceptance at the first depth from which on no fresh drafter of a few steps could be as good
FRESH_STEPS, FRESH_TOKENS = 32, 256  # what its steps are: half a minute on two cores with 49,152 rows
DIVERGED = "training diverged; begin again in another --out with a lower --lr and --muon-lr"

FAULT = "fault"  # where a process leaves word for the others of why it ends
# Of accelerate's configuration, as its launcher hands it on in the environment, what is not heeded: the value
# that asks for nothing, whether another one is refused, and what is done or to be done.
NOT_HEEDED = [
    ("ACCELERATE_USE_DEEPSPEED", "false", True, "FSDP (--use_fsdp) is what spreads a drafter over processes"),
    ("ACCELERATE_USE_MEGATRON_LM", "false", True,
     "FSDP (--use_fsdp) is what spreads a drafter over processes"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "false", True,
     "documents are shared out over processes, nothing smaller; leave it out"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", True,
     "give train_drafter.py --gradient-accumulation-steps instead"),
    ("FSDP_OFFLOAD_PARAMS", "false", True,
     "weights and moments stay on the GPU; switch it off, and take more processes"),
    ("FSDP_ACTIVATION_CHECKPOINTING", "false", True,
     "switch it off, and give train_drafter.py --gradient-checkpointing"),
    ("FSDP_IGNORED_MODULES", "none", True, "all weights are spread; leave it out"),
    ("FSDP_VERSION", "2", False, "weights are spread as by version 2"),
    ("FSDP_SHARDING_STRATEGY", "full_shard", False, "weights are spread over all processes"),
    ("FSDP_AUTO_WRAP_POLICY", "no_wrap", False, "the drafter is spread as one piece"),
    ("FSDP_STATE_DICT_TYPE", "full_state_dict", False, "a checkpoint is whole, whatever number resumes it"),
    ("FSDP_CPU_RAM_EFFICIENT_LOADING", "false", False, "every process reads all weights of the drafter"),
    ("ACCELERATE_DYNAMO_BACKEND", "no", False, "torch.compile is not used"),
]

# Of the arguments: what --resume may change, and what is compared by content, wherever it lies.
PLANNING = ("tokens", "tokens_per_second", "gpu_gb")  # what only --dry-run reads
MAY_CHANGE = (*PLANNING, "out", "resume", "dry_run", "verify", "log_with", "keep", "save_every", "plot",
              "gradient_checkpointing")
BY_CONTENT = ("target", "shards", "eval_shards", "vocab_map", "checkpoint", "remap_vocab")
FILES = ("config.json", "model.safetensors", "state/weights.safetensors", "state/optimizer.safetensors",
         "state/progress.json")  # of a checkpoint
STEP = re.compile(r"step-\d{6,}")
# What a killed run leaves half-written: our own temporary files, and those that safetensors makes beside the
# file it saves.
TEMPORARY = re.compile(r"\.(run\.json|metrics\.jsonl|config\.json|model\.safetensors|step-\d+)\.tmp-\d+")


@dataclass
class Inputs:
    """What is trained on, and for which target."""

    target: Target
    facts: dict  # the target's facts()
    head: torch.Tensor  # [V, H] its lm_head
    embedding: torch.Tensor  # [V, H] its raw table
    shards: Shards
    evaluation: Shards  # where the held-out samples are: --eval-shards, or `shards` itself
    samples: np.ndarray  # int64 [n] numbers in `shards` of those to train on; with --follow none is there yet
    heldout: np.ndarray  # int64 [m] numbers in `evaluation` of those to measure on
    yardstick: tuple  # (Shards, int64 [k] numbers) for the fresh drafter that a checkpoint is compared with
    warnings: list  # sentences


@dataclass
class Start:
    """The drafter as it starts, in float32 on the CPU, and its vocabulary."""

    drafter: Drafter
    map_rows: torch.Tensor | None  # int64 [D] target ids, ascending; None for the full vocabulary
    copied: int | None = None  # tensors of the layer that are the target's, from scratch
    unread: int = 0  # tensors of the target's last layer that are stored in a way that is not read
    kept: float | None = None  # of a narrow one from scratch: the share of the states' variance in its width
    remapped: dict | None = None  # with --remap-vocab, how many rows were carried over, are new, were dropped
    coverage: float | None = None  # of the supervised tokens that are trained on
    coverage_heldout: float | None = None
    trainable: int = 0  # parameters


@dataclass
class Plan:
    """The steps: their samples, how fast they learn, and after which the drafter is measured and saved."""

    order: Any  # an Order or a Stream
    epochs: int
    batch_tokens: int
    lr: float  # peak rate of AdamW
    every: int
    save_every: int


@dataclass
class Blame:
    """Which of a batch's samples holds states that are not finite."""

    samples: list  # their numbers
    bounds: list  # of the batch
    broken: dict  # name -> bool [N] on the device


@dataclass
class Training:
    """A training that has begun, as this process holds it."""

    args: Any
    inputs: Inputs
    start: Start
    plan: Plan
    accelerator: Accelerator
    lock: Any  # of --out, held by the main process
    embedding: torch.Tensor  # [V, H] on the device
    map_rows: torch.Tensor | None  # int64 [D] on the device
    step: TrainStep  # the drafter with its loss
    model: Any  # the same as the processes share it
    sharded: bool  # whether weights are spread over the processes
    parameters: dict  # name -> parameter, of those that are trained
    optimizers: list
    progress: dict  # the counters, and the last and the best measurement, as progress.json holds them
    writer: ThreadPoolExecutor  # one thread, of the main process
    writing: Any  # the Future of what it writes, or None
    saved: int  # step of the last checkpoint, on disk or being written
    probed: dict | None  # what the checkpoint that it started from was worth
    block: dict  # the `training` block of config.json, but for the figures of the step


def parse_args():
    parser = Parser(__doc__, usage="%(prog)s --shards DIR --target MODEL --draft-vocab N|full "
                                   "[--vocab-map DIR] --out DIR [options]")
    add = parser.add_argument_group("what everyone gives").add_argument
    add("--shards", metavar="DIR", help="folder of extract_hidden_states.py")
    add("--target", required=True, metavar="MODEL", help="folder or hub id of the target; its config, "
        "embedding and lm_head are read, it is never loaded")
    add("--out", type=Path, metavar="DIR", help="folder for the drafter; new, empty, or with "
        "--resume an earlier run's")
    add("--draft-vocab", required=True, metavar="N|full", help="rows of the drafter's lm_head: a size such "
        "as 32000, which needs --vocab-map, or full. No default: fewer rows are faster at every drafting "
        "step, missing rows cost accepted drafts")

    add = parser.add_argument_group("vocabulary and start").add_argument
    add("--vocab-map", metavar="DIR", help="folder of build_vocab_map.py for a reduced vocabulary, with "
        "--init scratch or --remap-vocab; default none, and none is ever picked up by itself: a checkpoint "
        "has its own")
    add("--init", choices=["scratch", "checkpoint"], default="scratch", help="default scratch: lm_head rows "
        "start as the target's rows, the layer as the target's last one where that fits. checkpoint: go on "
        "from --checkpoint, with its own vocabulary; one that is worth nothing here is refused before the "
        "first step")
    add("--checkpoint", metavar="DIR", help="drafter folder for --init checkpoint")
    add("--remap-vocab", action="store_true", help="give the checkpoint another vocabulary, that of "
        "--vocab-map or full: lm_head rows of tokens in both are carried over, others start from the "
        "target's; default off: its rows mean the tokens of its own map")

    add("--hidden-size", type=positive_int, metavar="N", help="width of the drafter, from scratch; default "
        "the target's. A narrower one has an embedding of its own, made from the target's and frozen, and "
        "makes all rows of the lm_head as cheap as fewer of them")
    for flag, what in (("--heads", "attention heads"), ("--kv-heads", "key-value heads"),
                       ("--head-dim", "width of a head"), ("--intermediate-size", "width of the MLP")):
        add(flag, type=positive_int, metavar="N", help=f"{what}: the draft layer's, from scratch; default "
            "the target's, or what docs/targets.md says")

    add = parser.add_argument_group("recipe").add_argument
    add("--ttt-steps", type=in_range(1, 128, low_too=True, kind=int), default=3, help="depth of "
        "training-time test; default 3, for serving with 3 drafts: deeper costs more and served those 3 "
        "worse. Take the number of drafts that you serve with; EAGLE-3 trains 7")
    add("--epochs", type=positive_int, help="passes over the samples; default 2: on few samples the held-out "
        "accept length still grows in the second. With --follow 1, as each shard is there once")
    add("--max-steps", type=positive_int, help="stop after so many optimizer steps; default: all epochs")
    add("--lr", type=in_range(0), help="peak rate of AdamW, which trains the lm_head and the norms; default "
        "0.3 / hidden size: measured at 576, and such rates fall as models get wider")
    add("--muon-lr", type=in_range(0), default=0.02, help="peak rate of muon, which trains the layer's "
        "matrices; default 0.02, the usual one whatever the width")
    add("--batch-tokens", type=in_range(1, 2**40, low_too=True, kind=int), help="tokens per optimizer step "
        "over all processes and accumulation steps; default 8192, or less (down to 512) where that would be "
        "fewer than 500 steps: little data wants many small steps")
    add("--loss", choices=["kl", "lk"], default="kl", help="default kl: cross entropy against the target's "
        "distribution over the draft rows. lk gives way to the acceptance itself (arXiv 2602.23881), and "
        "costs more")
    add("--freeze-lm-head", action="store_true", help="keep the lm_head as it starts; saves the gradient and "
        "the moments of its rows")
    add("--seed", type=in_range(0, 2**63 - 1, low_too=True, kind=int), default=0, help="of the order of the "
        "samples and the first weights; default 0, so that runs can be repeated")

    add = parser.add_argument_group("memory and speed").add_argument
    add("--gradient-accumulation-steps", type=positive_int, default=1, help="default 1; more saves memory "
        "and changes nothing else")
    add("--gradient-checkpointing", action="store_true", help="compute the MLP of every depth again in the "
        "backward pass: half of the kept tensors for a sixth more time. Try --gradient-accumulation-steps "
        "first, which costs nothing")
    add("--mixed-precision", choices=["no", "bf16"], help="bf16 computes in bfloat16; weights and moments "
        "stay float32. no: float32, on a GPU with TF32. Default bf16 on a GPU that has it, in a plan by "
        "--tokens and where accelerate's configuration says so, else no")

    add = parser.add_argument_group("measuring").add_argument
    add("--eval-shards", metavar="DIR", help="measure on all samples of this folder, and train on all of "
        "--shards; default: the samples of --shards that were set aside. With --follow those are not trained "
        "on all the same")
    add("--eval-every", type=positive_int, help="steps between measurements of the held-out accept length; "
        "default: a tenth of the run")
    add("--eval-steps", type=in_range(1, 128, low_too=True, kind=int), default=3, help="drafts per "
        "verification in the simulated accept length; default 3, as big models are served")
    add("--log-with", choices=["tensorboard", "wandb", "trackio", "all"], help="also log to this tracker; "
        "metrics.jsonl is always written")
    add("--plot", type=Path, metavar="PNG", help="at the end, also plot losses, held-out accept length and "
        "acceptance, and learning rate; default no. A PNG that is there is replaced")

    add = parser.add_argument_group("folder and resuming").add_argument
    add("--save-every", type=positive_int, help="steps between checkpoints to resume from; default: as "
        "--eval-every")
    add("--keep", type=positive_int, default=2, help="how many of this run's last checkpoints stay; default "
        "2, should the last one be damaged")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, if there is one")
    add("--follow", action="store_true", help="train on shards as extract_hidden_states.py --max-disk-gb "
        "writes them, each once, and acknowledge what a checkpoint covers, which is then removed; default "
        "off: all shards are there")
    add("--dry-run", action="store_true", help="print what would be trained and what it costs, and stop")
    add("--tokens", type=positive_int, help="with --dry-run and without --shards and --out: plan for so many "
        "tokens from the target's config.json alone, without weights; default none: the shards are counted")
    add("--tokens-per-second", type=in_range(0), help="with --tokens: the speed of training, all processes "
        "together, for the hours; default none: no hours")
    add("--gpu-gb", type=in_range(0), default=80, metavar="GB", help="with --tokens: memory of one GPU, for "
        "the printed commands; default 80")

    add = parser.add_argument_group("rarely").add_argument
    add("--verify", action="store_true", help="first check the sha256 of every shard, which reads all of "
        "them; default off: sizes, headers and shapes are always checked")
    add("--revision", metavar="NAME", help="hub revision of --target; default its main one")
    add("--trust-remote-code", action="store_true", help="allow code that comes with the target's config")
    add("--force", action="store_true", help="go on although hashes or figures say that shards, map or "
        "checkpoint were made for another target or other data; default off, since such a drafter is seldom "
        "worth its training")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = open_accelerator(args)
    with ending_together(accelerator):
        return whole_run(args, accelerator)


def whole_run(args, accelerator):
    check_arguments(args)
    if args.tokens:
        return plan_from_config(args, accelerator)
    inputs = open_inputs(args)
    start = choose_start(args, inputs)
    plan = make_plan(args, inputs, start)
    settings = run_settings(args, inputs, start, plan, accelerator)
    if not args.dry_run and RANK == 0:
        check_run(args.out, settings, args.resume)
    describe(args, inputs, start, plan, accelerator.num_processes)
    if args.dry_run:
        return dry_run_summary(args, inputs, start, plan, accelerator)
    training = begin(args, inputs, start, plan, accelerator, settings)
    with training.writer:
        train(training)
        finish(training)
    return report(training)


def check_arguments(args):
    """Refuse what can be told from the arguments alone."""
    if args.tokens and not args.dry_run:
        raise UserError("--tokens is for --dry-run; give that too, or --shards to train on")
    if args.tokens and (args.shards or args.init == "checkpoint" or args.follow):
        raise UserError("--tokens plans a new drafter without shards; leave out --tokens, or --shards, "
                        "--follow and --init checkpoint")
    if args.tokens_per_second and not args.tokens:
        raise UserError("--tokens-per-second is for --dry-run with --tokens; give those, or leave it out")
    wanted = ("shards", "out") if RANK == 0 else ("shards",)  # the first process alone reads and writes --out
    missing = [f"--{name}" for name in wanted if not args.tokens and not getattr(args, name)]
    if missing:
        raise UserError(f"the following arguments are required: {', '.join(missing)}; --help lists the "
                        "arguments")
    if args.init == "checkpoint" and not args.checkpoint:
        raise UserError("--init checkpoint needs --checkpoint, the folder of the drafter to start from")
    if args.init == "scratch" and args.checkpoint:
        raise UserError("--checkpoint goes with --init checkpoint; leave it out with --init scratch")
    if args.init == "scratch" and args.remap_vocab:
        raise UserError("--remap-vocab goes with --init checkpoint; leave it out with --init scratch")
    if args.init == "checkpoint" and given_shape(args):
        flags = [f"--{flag.replace('_', '-')}" for flag in LAYER_FLAGS]
        raise UserError(f"{', '.join(flags)} are for --init scratch; leave them out, a checkpoint has its "
                        "own")
    if args.follow and (args.epochs or 1) > 1:
        raise UserError(f"--epochs {args.epochs}: with --follow each shard is there once; leave --epochs "
                        "out, or extract without --max-disk-gb")
    if args.log_with == "all" and not get_available_trackers():
        raise UserError("--log-with all: none is installed; pip install tensorboard, or leave --log-with out")
    if args.log_with not in (None, "all") and not find_spec(args.log_with):
        raise UserError(f"--log-with {args.log_with}: it is not installed; pip install {args.log_with}")
    if args.plot and RANK == 0:
        check_plot(args.plot, args.out)
    if args.out and RANK == 0:
        check_output_folder(args.out, "run.json")


# The processes


def open_accelerator(args):
    """The Accelerator, which also starts the processes' talk."""
    check_configuration()
    # gradients lie in the buckets that are sent; there are no buffers
    buckets = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
    accelerator = Accelerator(mixed_precision=choose_precision(args), log_with=args.log_with,
                              project_dir=str(args.out), dynamo_backend="no", kwargs_handlers=[buckets])
    if accelerator.device.type not in ("cpu", "cuda"):
        raise UserError(f"device {accelerator.device.type} is not supported, only cuda and cpu; set "
                        "ACCELERATE_USE_CPU=true to train on the CPU")
    if accelerator.mixed_precision == "no" and accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    return accelerator


def check_configuration():
    """Refuse what of accelerate's configuration is not heeded and matters, and warn of the rest of it."""
    on = {name for name, value in os.environ.items() if value.lower() == "true"}
    for variable, harmless, refused, words in NOT_HEEDED:
        value = os.environ.get(variable, "")
        unused = variable.startswith("FSDP_") and "ACCELERATE_USE_FSDP" not in on
        if unused or value.lower() in ("", harmless):
            continue
        name = variable.removeprefix("ACCELERATE_").lower()
        if refused:
            raise UserError(f"accelerate's configuration says {name} {value}, which is not supported: "
                            f"{words}")
        say(f"warning: accelerate's configuration says {name} {value}, which is not heeded: {words}")


def choose_precision(args):
    """"bf16" or "no". A launcher's "no" is also what it says where nobody was asked, and so no wish."""
    if args.mixed_precision:
        return args.mixed_precision
    told = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if told not in ("no", "bf16"):
        raise UserError(f"accelerate's configuration says mixed precision {told}, which is not supported; "
                        "take bf16, or --mixed-precision no for float32")
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    able = not on_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
    return "bf16" if told == "bf16" or able or args.tokens else "no"


@contextmanager
def ending_together(accelerator):
    """A fault of one process ends all: each looks every second for one of another, for which it would wait in
    a collective until that gives up, which takes ten minutes or more. The first process of a machine says
    what it was."""
    if accelerator.num_processes == 1:
        yield
        return
    store, done = torch.distributed.distributed_c10d._get_default_store(), threading.Event()
    watcher = threading.Thread(target=watch_others, args=(store.clone(), done), daemon=True)
    watcher.start()
    try:
        yield
        accelerator.wait_for_everyone()  # none leaves while another may still look for it
    except BaseException as error:
        done.set()
        tell_others(store, error)
        raise
    finally:
        done.set()
        watcher.join()


def tell_others(store, error):
    """Leave word of this process's fault. Raises Failed in place of what only follows from another's, a
    connection that broke."""
    words = str(error) or type(error).__name__
    broken = isinstance(error, torch.distributed.DistError) or (
        type(error) is RuntimeError and re.search("gloo|NCCL|onnection (reset|closed)", words))
    if broken:
        time.sleep(2.0)  # the other leaves its word
        raise Failed(others_fault(store)[1]) from None
    if not isinstance(error, (UserError, Failed, OSError, KeyboardInterrupt)):
        words = f"{type(error).__name__}, of which its output tells more"
    fault = [2 if isinstance(error, UserError) else 1, f"process {RANK} of {os.uname().nodename}: {words}"]
    with suppress(RuntimeError):  # there is nobody left
        store.set(FAULT, json.dumps(fault))


def others_fault(store):
    """(exit code, sentence) of what another process left word of, or that it could not."""
    with suppress(RuntimeError):
        if store.check([FAULT]):
            return json.loads(store.get(FAULT))
    return 1, ("the connection to another process broke: one was ended, which its machine's output or memory "
               "may explain; the same command with --resume goes on from the last checkpoint")


def watch_others(store, done):
    """End this process when another has left word of a fault, or the store is gone. It does not wait for
    this one's main thread, which may be in a collective."""
    while not done.wait(1.0):
        try:
            if not store.check([FAULT]):
                continue
        except RuntimeError:
            if done.wait(5.0):
                return
        code, words = others_fault(store)
        first = os.environ.get("LOCAL_RANK", str(RANK)) == "0"
        if not first and done.wait(PATIENCE):  # torchrun ends all when one ends: that one shall have spoken
            return
        if first:
            print(f"{os.path.basename(sys.argv[0])}: {words}", file=sys.stderr, flush=True)
        os._exit(code)


# What is trained on


def open_inputs(args):
    """The Inputs. Raises UserError where shards and target do not belong together."""
    target = open_target(args.target, args.revision, args.trust_remote_code)
    shards = wait_for_heldout(args) if args.follow else Shards(args.shards, args.verify)
    evaluation = Shards(args.eval_shards, args.verify) if args.eval_shards else shards
    head, embedding = target.lm_head(), target.embedding()
    facts = target.facts(head, embedding)
    here = {**target_record(target, facts), "layers": shards.manifest["layers"]}
    warnings = check_shards(shards, here, args.force)
    if args.eval_shards:
        warnings += check_shards(evaluation, here, args.force)
        compact = ["teacher_ids" in folder.manifest["stored"] for folder in (shards, evaluation)]
        if compact[0] != compact[1]:
            raise UserError(f"of {args.shards} and {args.eval_shards} one holds the compact teacher, one the "
                            "last states; extract both alike")
        if evaluation.sha256 == shards.sha256:
            warnings.append(f"--eval-shards {args.eval_shards} are the shards that are trained on: held-out "
                            "figures are of what was learnt")
        if args.follow and shards.heldout.any():
            aside = shards.heldout.sum()
            warnings.append(f"--follow: the {aside} held-out samples of {args.shards} are not trained on")
        samples, heldout = np.arange(len(shards.index)), np.arange(len(evaluation.index))
    else:
        samples, heldout = np.flatnonzero(~shards.heldout), np.flatnonzero(shards.heldout)
    if args.follow and args.init == "checkpoint" and not len(heldout):
        raise UserError("--follow with --init checkpoint needs held-out samples, or --eval-shards, to see "
                        "whether the checkpoint fits")
    if not args.follow and not shards.index[samples, 5].sum():
        raise UserError(f"{args.shards} holds no supervised token outside of its held-out samples; there is "
                        "nothing to learn from")
    yardstick = (evaluation, heldout[len(heldout) // 2 :]) if args.follow else (shards, samples)
    return Inputs(target, facts, head, embedding, shards, evaluation, samples, heldout[:EVAL_SAMPLES],
                  yardstick, warnings)


def wait_for_heldout(args):
    """The Shards of an extraction with --max-disk-gb, once its held-out part is there; not in a dry run."""
    folder, remind = Path(args.shards), reminder(0.0)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--shards {folder} is a file; give the folder of an extraction")
    while True:
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            if "room" not in manifest["planned"]:
                raise UserError(f"--follow: {folder} was extracted without --max-disk-gb; leave --follow out "
                                "and train on it when it is complete, or extract again with it")
            aside = manifest["planned"]["heldout_blocks"]
            if sum(entry["block"] < aside for entry in finished(manifest)) == aside:
                return Shards(folder, args.verify, first=0)
        if args.dry_run:
            raise UserError(f"--follow: the held-out part of {folder} is not there yet; start "
                            "extract_hidden_states.py --max-disk-gb, which makes it first")
        remind(f"waiting for the held-out part of {folder}, which extract_hidden_states.py --max-disk-gb "
               "makes first")
        time.sleep(0.5)


# How the drafter starts


def choose_start(args, inputs):
    """The Start. Raises UserError for a vocabulary, map or checkpoint that does not fit."""
    draft_vocab = decide_vocabulary(args.draft_vocab, inputs.target.vocab_size)
    if args.init == "checkpoint":
        start, promise = start_from_checkpoint(args, inputs, draft_vocab)
    else:
        rows, promise = named_map(args, inputs, draft_vocab)
        start = start_from_scratch(args, inputs, draft_vocab, rows)
    start.coverage, start.coverage_heldout = covered_share(args, inputs, start.map_rows, promise)
    start.drafter.recompute = args.gradient_checkpointing
    if args.freeze_lm_head:
        start.drafter.lm_head.weight.requires_grad_(False)
    start.trainable = sum(parameter.numel() for parameter in start.drafter.parameters()
                          if parameter.requires_grad)
    return start


def decide_vocabulary(text, vocab_size):
    """Rows of the draft vocabulary from `--draft-vocab`; the full one may be written as a number."""
    if text == "full":
        return vocab_size
    try:
        size = int(text)
    except ValueError:
        raise UserError(f"--draft-vocab {shortened(text)} is neither full nor a number in 1..{vocab_size} "
                        "such as 32000, without separators") from None
    check_size(size, vocab_size)
    return size


def named_map(args, inputs, draft_vocab):
    """(target ids int64 [D] of --vocab-map, the facts beside it), or (None, {}) for the full vocabulary."""
    vocab_size = inputs.target.vocab_size
    if draft_vocab == vocab_size:
        if args.vocab_map:
            raise UserError(f"--draft-vocab {args.draft_vocab} is the full vocabulary and takes no "
                            "--vocab-map; leave one of them out")
        return None, {}
    if not args.vocab_map:
        raise UserError(f"--draft-vocab {draft_vocab} needs --vocab-map, the folder that build_vocab_map.py "
                        "made for these shards (or --draft-vocab full, which needs none)")
    rows, facts = load_map(args.vocab_map)
    if len(rows) != draft_vocab:
        raise UserError(f"--vocab-map {args.vocab_map} has {len(rows)} rows, --draft-vocab says "
                        f"{draft_vocab}; name the map of that size")
    if facts["vocab_size"] != vocab_size:
        raise UserError(f"--vocab-map {args.vocab_map} is for a target of {facts['vocab_size']} rows, "
                        f"{args.target} has {vocab_size}; make a map for this target")
    compare_with_shards(args, inputs, made_for(facts), f"the map {args.vocab_map}")
    return torch.from_numpy(rows), facts


def compare_with_shards(args, inputs, made, what):
    """Refuse `what`, made for the record `made`, where it does not belong to the target and the shards; what
    only warns is kept. Of the target the shards' own differences were told of already."""
    shards = made_for(inputs.shards.manifest)
    here = {**shards, "target": inputs.facts}
    inputs.warnings += compare(made, here, what, args.force, told=shards)


def start_from_checkpoint(args, inputs, draft_vocab):
    """(Start of --init checkpoint, the facts that say what its vocabulary covers)."""
    target, layers = inputs.target, inputs.shards.manifest["layers"]
    drafter, own = load_drafter(args.checkpoint, ordered=not args.remap_vocab, target=target)
    say(f"{args.checkpoint}: {drafter.used}")
    config, wanted = drafter.config, drafter_config(target, draft_vocab, layers)
    for key in ("vocab_size", "target_hidden_size"):
        if config[key] != wanted[key]:
            raise UserError(f"{args.checkpoint} has {key} {config[key]}, this run wants {wanted[key]}; it is "
                            "no drafter for this")
    trained = config.get("training") or {}
    made = {**made_for(trained), "layers": captured_layers(config, target.num_layers, args.checkpoint,
                                                        target.model_class)}
    compare_with_shards(args, inputs, made, f"the checkpoint {args.checkpoint}")
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "rms_norm_eps", "torch_dtype")
    drafter.config = {**wanted, **{key: config[key] for key in kept},
                      **rotary_entries(config["rope_parameters"])}
    drafter.train()
    if args.remap_vocab:
        rows, promise = named_map(args, inputs, draft_vocab)
        return Start(drafter, rows, remapped=remap(drafter, own, rows, inputs.head)), promise
    check_own_vocabulary(args, config["draft_vocab_size"], own, draft_vocab)
    return Start(drafter, own), trained


def check_own_vocabulary(args, size, own, draft_vocab):
    """Refuse another vocabulary than the checkpoint's, `size` rows for the target ids `own`, None for all."""
    if size != draft_vocab:
        full = " (full)" if own is None else ""
        raise UserError(f"{args.checkpoint} has a draft vocabulary of {size}{full}, --draft-vocab says "
                        f"{args.draft_vocab}; say it as the checkpoint has it, or --remap-vocab to change it")
    if not args.vocab_map:
        return
    if own is None:
        raise UserError(f"{args.checkpoint} has the full vocabulary and takes no --vocab-map; leave it out")
    if not np.array_equal(load_map(args.vocab_map)[0], own.numpy()):
        raise UserError(f"--vocab-map {args.vocab_map} is not the map of {args.checkpoint}, whose lm_head "
                        "rows would mean other tokens; leave it out to use the checkpoint's own, or "
                        "--remap-vocab to carry its rows over")


def remap(drafter, own, rows, head):
    """Give the drafter lm_head rows for the target ids `rows`, int64 [D]: its own where it has the id, else
    the target's, moved by the mean of what has moved its own rows from the target's. Unmoved ones would
    outbid all that were trained: going from 32,000 rows to 49,152 the quickstart's drafter fell from 1.88 to
    1.56, and with the move stayed at 1.88. Of a narrow drafter they are the target's by the linear map that
    comes nearest to its own rows, by least squares.

    own: int64 [D'] target ids of the drafter, in any order; None stands for all, in both; head: the target's
    lm_head [V, H]. Returns how many rows were carried over, are new, and were dropped.
    """
    own, rows = (torch.arange(len(head)) if ids is None else ids for ids in (own, rows))
    place = torch.full((len(head),), -1).index_copy_(0, own, torch.arange(len(own)))
    place = place[rows]  # int64 [D] the checkpoint's row, or -1
    carried = place >= 0
    trained = drafter.lm_head.weight.detach()  # [D', H]
    started = head.float()  # [V, H]
    if trained.shape[1] < head.shape[1]:
        started = started @ nearest_map(started[own], trained)  # [V, h]
    weight = started[rows] + (trained - started[own]).mean(0)  # [D, h]
    weight[carried] = trained[place[carried]]
    drafter.lm_head.weight, drafter.lm_head.out_features = torch.nn.Parameter(weight), len(rows)
    found = int(carried.sum())
    return {"carried": found, "new": len(rows) - found, "dropped": len(own) - found}


def nearest_map(rows, wanted):
    """float32 [H, h]: the matrix M for which rows [D, H] @ M comes nearest to `wanted` [D, h], with a little
    weight decay where the rows leave some of it open."""
    gram = (rows.T @ rows).double()  # [H, H]
    gram.diagonal().add_(1e-4 * gram.diagonal().mean())
    return torch.linalg.solve(gram, (rows.T @ wanted).double()).float()


def layer_sources(target):
    """Names of the target's tensors, by that of the parameter of the drafter that starts as each; both
    without .weight. q, k, v see the same weights for both halves of their input, halved."""
    last = f"layers.{target.num_layers - 1}."
    same = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.up_proj", "mlp.down_proj", "input_layernorm")
    mlp_norm = "post_attention_layernorm"
    if target.find(f"{last}pre_feedforward_layernorm.weight"):  # Gemma
        mlp_norm = "pre_feedforward_layernorm"
    sources = {f"midlayer.{name}": last + name for name in same}
    sources["midlayer.hidden_norm"] = f"{last}input_layernorm"
    sources["midlayer.post_attention_layernorm"] = last + mlp_norm
    sources["norm"] = "norm"
    return sources


def given_shape(args):
    """What the user says of the draft layer, as draft_layer takes it."""
    return {key: getattr(args, flag) for flag, key in LAYER_FLAGS.items() if getattr(args, flag)}


def norms_add_one(target, trust_remote_code):
    """Whether the target's norms multiply by 1 + w (Gemma, Qwen3-Next): what its own does where w is 0."""
    config = load_config(target.folder, trust_remote_code)
    native = native_class(config, target.model_class)
    if native is None:  # code of its own is not run for this
        return False
    with torch.device("meta"):
        model = native(config)
    name = min((name for name, _ in model.named_modules() if name.endswith("norm") and "layers" not in name
                and not any(part in name for part in OTHER_PARTS)), key=len, default=None)
    if name is None:
        return False
    norm = model.get_submodule(name).to_empty(device="cpu")
    for tensor in (*norm.parameters(), *norm.buffers()):
        tensor.data.zero_()
    return bool(norm(torch.ones(1, 1, target.hidden_size)).abs().max() > 0)


def start_from_scratch(args, inputs, draft_vocab, map_rows):
    """The Start of --init scratch: lm_head rows start as the target's rows, the layer and the final norm as
    the target's last ones wherever they fit, fc near to passing the last captured state through, and the rest
    small and random. A narrow drafter starts as all of this seen in the directions that say most, see
    `principal` and `project`."""
    target = inputs.target
    torch.manual_seed(args.seed)
    layers = inputs.shards.manifest["layers"]
    drafter = Drafter(drafter_config(target, draft_vocab, layers, **given_shape(args)))
    width, full = drafter.config["hidden_size"], target.hidden_size
    spread = target.text.get("initializer_range") or 0.02
    found, unread = last_layer(args, target)
    found["lm_head"] = inputs.head if map_rows is None else inputs.head[map_rows]
    kept, directions = None, torch.eye(full)
    if width < full:
        directions, kept = principal(inputs, width)  # [Ht, h]
        project(found, directions)
    copied = 0
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.1 * spread if name == "fc.weight" else spread)
            tensor = found.get(name.removesuffix(".weight"))
            if tensor is None:
                continue
            if tensor.dim() == 2 and tensor.shape[1] * 2 == parameter.shape[1]:
                tensor = torch.cat([tensor, tensor], dim=1) / 2
            if tensor.shape == parameter.shape:
                parameter.copy_(tensor)
                copied += name != "lm_head.weight"
        drafter.fc.weight[:, 2 * full :] += directions.T
        if width < full:
            table = inputs.embedding.float() @ directions  # [V, h]
            table *= inputs.embedding.float().norm() / table.norm() * math.sqrt(width / full)
            drafter.embed_tokens.weight.copy_(table.bfloat16())  # as it is exported: it is not trained
    return Start(drafter, map_rows, copied=copied, unread=unread, kept=kept)


def last_layer(args, target):
    """({parameter of a drafter, without .weight: tensor of the target's last layer or final norm}, how many
    are stored in a way that is not read)."""
    found, unread = {}, 0
    one = 1.0 if norms_add_one(target, args.trust_remote_code) else 0.0
    for name, source in layer_sources(target).items():
        stored = target.find(f"{source}.weight")
        if stored is None:
            continue
        tensor = plain_weight(target, stored)
        if tensor is None:
            unread += 1
            continue
        found[name] = tensor + one if "norm" in name else tensor
    return found, unread


def principal(inputs, width):
    """(P float32 [Ht, h], the share of the variance that it keeps): the first h principal directions of what
    a drafter's states have to hold, the embeddings of the tokens, as often as they occur, and the states that
    the lm_head reads. Each part counts the same. For the second stands the last captured state, which is
    stored in every kind of shards, with the length and the weights that the final norm gives it."""
    target, (shards, samples) = inputs.target, inputs.yardstick
    counts, states, tokens = torch.full((len(inputs.embedding),), 0.5), [], 0
    for number in samples:
        sample = shards.sample(int(number), ("input_ids", "aux_hidden_states"))
        counts += sample["input_ids"].bincount(minlength=len(counts))
        states.append(sample["aux_hidden_states"][:, 2 * target.hidden_size :])
        tokens += len(states[-1])
        if tokens >= PRINCIPAL_TOKENS:
            break
    parts = [inputs.embedding.float() * counts.sqrt()[:, None]]  # [V, Ht]
    if states:
        parts.append(F.rms_norm(torch.cat(states).float(), (target.hidden_size,)))  # [T, Ht]
    covariance = sum((part.T @ part / part.square().sum()).double() for part in parts)  # [Ht, Ht]
    values, vectors = torch.linalg.eigh(covariance)  # ascending
    return vectors[:, -width:].float(), float(values[-width:].sum() / values.sum())


def project(found, directions):
    """Turn the tensors of `last_layer` and the lm_head into those of a drafter whose states are the target's
    in the `directions` [Ht, h], in place. What reads states has its norm's weights folded into its columns,
    and is as large as before on states that are shorter by sqrt(h / Ht); what writes them is projected."""
    full, width = directions.shape
    longer = math.sqrt(full / width)
    norms = {"midlayer.self_attn.": "midlayer.input_layernorm", "midlayer.mlp.":
             "midlayer.post_attention_layernorm", "lm_head": "norm"}
    for name in [name for name in found if "norm" not in name]:
        tensor = found[name].float()
        if name.endswith(("o_proj", "down_proj")):
            found[name] = directions.T @ tensor  # [h, ...]
            continue
        norm = next(norm for part, norm in norms.items() if name.startswith(part))
        weights = found.get(norm, torch.ones(full)).float()
        found[name] = (tensor * weights) @ directions / longer  # [..., h]
    for name in [name for name in found if "norm" in name]:
        found[name] = torch.ones(width)


def covered_share(args, inputs, rows, promise):
    """(coverage of the supervised tokens that are trained on, of the held-out ones or None), for target ids
    `rows`, int64 [D] or None.

    With --follow nothing that is trained on is there yet: the first is None, and the held-out ones are what
    is checked. Raises UserError where the map covers nothing, or clearly less than its facts, `promise`, say.
    """
    shards = inputs.shards
    if rows is None:
        return 1.0, 1.0 if args.eval_shards or shards.heldout.any() else None
    counted, aside = shards.supervised_counts()
    if args.eval_shards:
        counted, aside = counted + aside, sum(inputs.evaluation.supervised_counts())
    unseen = coverage(aside, rows.numpy())
    covered = unseen if args.follow else coverage(counted, rows.numpy())
    if covered is None:
        raise UserError("--follow with a reduced draft vocabulary needs held-out samples, or --eval-shards, "
                        "to see what the map covers")
    if not covered:
        raise UserError("no supervised token is in the draft vocabulary: the map was counted on other data; "
                        "make one for these shards")
    what = f"the draft vocabulary of {args.checkpoint}"
    if args.vocab_map:
        what = f"the map {args.vocab_map}"
    broken = check_coverage(covered, promise, what, args.force)
    if broken:
        inputs.warnings.append(broken)
    if promise.get("coverage") is None and promise.get("coverage_heldout") is None:
        inputs.warnings.append(f"{what} states no coverage: nothing was compared with the {covered:.2%} that "
                               "it covers here")
    if covered < 0.5 or len(rows) == 1:
        inputs.warnings.append(f"the draft vocabulary of {len(rows)} covers {covered:.2%} of the supervised "
                               "tokens: little can be drafted")
    return None if args.follow else covered, unseen


# The plan


def make_plan(args, inputs, start):
    """The Plan: what was not said is chosen by the data and the drafter."""
    shards, samples = inputs.shards, inputs.samples
    epochs = args.epochs or (1 if args.follow else 2)
    tokens = expected_tokens(shards) if args.follow else int(shards.index[samples, 2].sum()) * epochs
    batch_tokens = step_tokens(args, tokens)
    if args.follow:
        order = Stream(shards, args.out, batch_tokens, args.max_steps, args.seed)
    else:
        order = Order(shards.index[:, 2], samples, epochs, batch_tokens, args.max_steps, args.seed)
    lr = args.lr or float(f"{0.3 / start.drafter.config['hidden_size']:.1e}")
    every = args.eval_every or max(1, order.steps // 10)
    return Plan(order, epochs, batch_tokens, lr, every, args.save_every or every)


def step_tokens(args, tokens):
    """Tokens of a step, of `tokens` in all epochs."""
    return args.batch_tokens or min(8192, max(512, tokens // 500))


class Order:
    """All samples are there: each epoch takes them in an order that depends on seed and data alone."""

    position = {}  # all of it follows from the step

    def __init__(self, lengths, samples, epochs, batch_tokens, max_steps, seed):
        """lengths: int64 [S] tokens of every sample; samples: the numbers of those to train on."""
        self.samples = len(samples)
        self.numbers, self.ends = plan_steps(lengths, samples, epochs, batch_tokens, max_steps, seed)
        self.steps = len(self.ends) - 1
        self.tokens = int(lengths[self.numbers[: self.ends[-1]]].sum())
        self.epochs = -(-int(self.ends[-1]) // self.samples)

    def step(self, number):
        """(numbers of the samples of 0-based step `number`, {}), or None after the last."""
        if number >= self.steps:
            return None
        return self.numbers[self.ends[number] : self.ends[number + 1]], {}

    def epoch(self, number):
        return int(self.ends[number]) // self.samples

    def place(self, progress):
        """Where the next step is on the schedule of `steps` steps."""
        return progress["step"]


def plan_steps(lengths, samples, epochs, batch_tokens, max_steps, seed):
    """(order int32 [n], ends int64 [steps + 1]): step s takes the samples order[ends[s] : ends[s + 1]], epoch
    after epoch. lengths: int64 [S] tokens of every sample; samples: the numbers of those to train on."""
    orders, ends, total = [], [0], len(samples)
    if max_steps is None and epochs * total > 2 * 10**8:
        raise UserError(f"--epochs {epochs} over {total} samples are too many to plan; give --max-steps, too")
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(samples.astype(np.int32))
        orders.append(order)
        tokens = lengths[order]
        start = np.cumsum(tokens) - tokens  # int64 [n] tokens before each sample
        middle = start + tokens / 2
        first = 0
        while first < total:
            # a step ends before the sample of which less than half would fit, and holds at least one
            fits = int(middle.searchsorted(start[first] + batch_tokens, side="right"))
            first = max(first + 1, fits)
            ends.append(epoch * total + first)
            if len(ends) > (max_steps or math.inf):
                return np.concatenate(orders), np.array(ends)
    return np.concatenate(orders), np.array(ends)


def expected_tokens(shards):
    """Tokens of the shards that are not held out, of an extraction with --max-disk-gb: those planned, which
    for answers that were to be written is the most they could be, times the share that it came to in the
    held-out ones."""
    planned, found = shards.manifest["planned"], int(shards.index[:, 2].sum())
    aside = planned["heldout_tokens"]
    return int((planned["tokens"] - aside) * (found / aside if aside else 1))


class Stream:
    """Shards of an extraction with --max-disk-gb, each read once, when it is there: in their order, the
    samples of a shard shuffled by the seed. What is trained on does not depend on when shards appear. A step
    that would reach over more shards than half of the bound ends before.

    Where it is after a step, its position, is the first block that is not read to its end, `taken` of whose
    samples are, and all samples taken. `steps` and `tokens` are what is expected: of planned samples some are
    skipped, and answers end before their limit.
    """

    epochs = 1

    def __init__(self, shards, out, batch_tokens, max_steps, seed):
        self.shards, self.out, self.seed = shards, out, seed
        self.batch_tokens, self.max_steps = batch_tokens, max_steps
        self.planned = shards.manifest["planned"]
        self.position = {"block": self.planned["heldout_blocks"], "taken": 0, "samples": 0}
        self.queue, self.stopped = None, threading.Event()
        self.path = shards.folder / ACKNOWLEDGED
        self.samples = self.planned["samples"] - self.planned["heldout_samples"]
        if RANK == 0:
            self._check()
        self.tokens = expected_tokens(shards)
        self.steps = max(1, round(self.tokens / batch_tokens))
        fits = self.planned["room"] * self.planned["tokens"] // (2 * sum(self.planned["block_bytes"]))
        if batch_tokens > fits:
            say(f"warning: --batch-tokens {batch_tokens} are more than half of what --max-disk-gb lets be "
                f"there, about {fits} tokens, and steps are cut to that")
        if max_steps and max_steps < self.steps:
            self.tokens, self.steps = max_steps * batch_tokens, max_steps

    def step(self, number):
        """(numbers of the samples of the next step, the position after it), or None after the last. Waits for
        what is not there yet."""
        if number == self.max_steps:
            return None
        first = self.position["block"]
        self.shards.close(first)  # all of an earlier step is in memory
        block, taken = first, self.position["taken"]
        chosen, tokens = [], 0
        while tokens < self.batch_tokens and block < self.planned["blocks"]:
            if self.queue is None:
                if chosen and sum(self.planned["block_bytes"][first : block + 1]) > self.planned["room"] / 2:
                    break
                self.queue = self._read(block)
            if taken < len(self.queue):
                length = int(self.shards.index[self.queue[taken], 2])
                if chosen and tokens + length / 2 > self.batch_tokens:  # a step ends as in plan_steps
                    break
                chosen.append(self.queue[taken])
                taken, tokens = taken + 1, tokens + length
            if taken == len(self.queue):
                block, taken, self.queue = block + 1, 0, None
        samples = self.position["samples"] + len(chosen)
        self.position = {"block": block, "taken": taken, "samples": samples}
        return (np.array(chosen), self.position) if chosen else None

    def epoch(self, number):
        return 0

    def place(self, progress):
        """Where the next step is on the schedule of `steps` steps: at the share of the samples that are gone,
        or with --max-steps at the step where that is further."""
        place = self.steps * progress["samples"] / self.samples
        if self.max_steps:
            place = max(place, progress["step"])
        return min(place, self.steps)

    def _check(self):
        """Raises UserError where nothing can be trained on, or another training follows: only one can."""
        folder = self.shards.folder
        if self.samples <= 0:
            raise UserError(f"{folder} holds held-out samples only; extract with a lower --heldout")
        if not os.access(folder, os.W_OK):
            raise UserError(f"{folder} cannot be written, and --follow acknowledges there what it has read; "
                            "make it writable")
        if not self.path.exists():
            return
        before = read_sealed(self.path)
        own = read_sealed(self.out / "run.json").get("run") if (self.out / "run.json").exists() else None
        if before["run"] != own:
            raise UserError(f"{folder} is followed by the training in {before['out']}, which has "
                            f"acknowledged the shards before {before['blocks']}: go on with that one "
                            f"(--resume), or extract again; if none was removed, remove {self.path}")

    def begin(self, progress):
        """Go on at the position of `progress`, acknowledging in the name that run.json gives this training.
        Raises UserError where shards are gone that are to be read."""
        self.position = {key: progress[key] for key in self.position}
        if RANK == 0:
            self.run = read_sealed(self.out / "run.json")["run"]
            gone = acknowledged(self.shards.folder, self.planned).stop
            if gone > self.position["block"]:
                raise UserError(f"--resume: {self.out} goes on at shard {self.position['block']}, and those "
                                f"before {gone} were removed when a later checkpoint had read them; restore "
                                "that checkpoint, or extract again and train anew")
        self.acknowledged = self.position["block"]
        self.acknowledge(self.acknowledged)

    def due(self, block):
        """Whether a checkpoint should make room, with all shards before `block` read: at half of what may be
        there, so that the other half is left for a step. All processes find the same."""
        return sum(self.planned["block_bytes"][self.acknowledged : block]) > self.planned["room"] / 2

    def acknowledge(self, block, finished=False):
        """A durable checkpoint covers all shards before `block`: they may be removed."""
        if RANK == 0:
            write_sealed(self.path, {"run": self.run, "out": str(self.out.absolute()), "blocks": block,
                                     "finished": finished})

    def close(self):
        """End a wait."""
        self.stopped.set()

    def _read(self, block):
        """int64 [n] the samples of a block, shuffled; none when all of its rows were skipped."""
        entry = self._wait_for(block)
        if "file" not in entry:
            return np.zeros(0, dtype=np.int64)
        return np.random.default_rng([self.seed, block]).permutation(self.shards.extend(entry))

    def _wait_for(self, block):
        """The entry of a block in the manifest, as soon as it is there."""
        remind = reminder()
        while True:
            manifest = read_manifest(self.shards.folder)
            if settings_sha256(manifest) != self.shards.sha256:
                raise UserError(f"{self.shards.folder} is another extraction's now; train anew")
            for entry in finished(manifest):
                if entry["block"] == block:
                    return entry
            remind(f"shard {block} of {self.planned['blocks']} is not there yet: is the extraction running?")
            if self.stopped.wait(1.0):
                raise UserError("stopped")


def run_settings(args, inputs, start, plan, accelerator):
    """What decides every bit of a run, as run.json holds it: --resume wants all of it again."""
    settings = {key: value for key, value in vars(args).items() if key not in MAY_CHANGE + BY_CONTENT}
    rows, checkpoint = start.map_rows, args.checkpoint
    return finite({
        **settings, "epochs": plan.epochs, "batch_tokens": plan.batch_tokens, "lr": plan.lr,
        "eval_every": plan.every, "mixed_precision": accelerator.mixed_precision,
        "shards_sha256": inputs.shards.sha256,
        "eval_shards_sha256": inputs.evaluation.sha256 if args.eval_shards else None,
        "checkpoint_sha256": sha256_file(weights_file(checkpoint)) if checkpoint else None,
        "target_sha256": inputs.facts["tensors_sha256"],
        "map_sha256": None if rows is None else map_sha256(rows_to_d2t(rows.numpy())),
    })


def check_run(out, settings, resume):
    """Refuse a folder that holds another run, or this one without --resume."""
    if os.path.lexists(out / "checkpoints") and not (out / "checkpoints").is_dir():
        raise UserError(f"--out {out}: its checkpoints is no folder; remove it, or give another --out")
    if not (out / "run.json").exists():
        return
    if not resume:
        raise UserError(f"--out {out} holds an earlier run; --resume goes on with it, or give another folder")
    before = read_sealed(out / "run.json")
    for key in settings:
        if before.get(key) != settings[key]:
            raise UserError(f"--resume: {key} is {settings[key]} now and was {before.get(key)} when the run "
                            f"in {out} began; give the same arguments, or another --out")


def describe(args, inputs, start, plan, processes):
    """Say what is to be trained, and what is doubtful about it."""
    for warning in inputs.warnings:
        say(f"warning: {warning}")
    if start.remapped:
        say("draft vocabulary remapped: {carried} lm_head rows are carried over, {new} are new and start "
            "from the target's, {dropped} are dropped".format(**start.remapped))
    if start.copied is not None:
        unread = f", {start.unread} of these quantised in a way that is not read" if start.unread else ""
        say(f"{start.copied} of {len(layer_sources(inputs.target))} tensors of the layer start as the "
            f"target's last layer and final norm, the rest random{unread}")
    config = start.drafter.config
    kinds = ""
    if args.init == "scratch":
        kinds = "".join(f"; {reason}" for reason in draft_layer(inputs.target.text, **given_shape(args))[1])
    narrow = config["hidden_size"] < inputs.target.hidden_size
    if start.kept is not None:
        say(f"the drafter is {config['hidden_size']} wide, its target {inputs.target.hidden_size}: it starts "
            f"in the directions that hold {start.kept:.1%} of the variance of embeddings and states")
    say(f"draft layer: {config['hidden_size']} wide, {config['num_attention_heads']} heads of "
        f"{config['head_dim']}, {config['num_key_value_heads']} key-value heads, MLP of "
        f"{config['intermediate_size']}{kinds}")
    head, layer = head_and_layer(start.drafter)
    full = " (full, no map)" if start.map_rows is None else ""
    shares = []
    if start.coverage is not None:
        shares.append(f"{start.coverage:.2%} of the supervised tokens that are trained on")
    if start.coverage_heldout is not None:
        shares.append(f"{start.coverage_heldout:.2%} of the held-out ones")
    say(f"draft vocabulary: {len(start.drafter.lm_head.weight)} of {inputs.target.vocab_size} rows{full}, "
        f"lm_head {head / 1e6:.1f} M parameters beside {layer / 1e6:.1f} M in the layer; it covers "
        f"{' and '.join(shares)}")
    order, about = plan.order, "about " if args.follow else ""
    frozen = "the embedding is its own, frozen" if narrow else "the embedding is the target's, frozen"
    if args.freeze_lm_head:
        frozen += ", the lm_head stays as it is"
    say(f"training {start.trainable / 1e6:.1f} M parameters ({frozen}) for {about}{order.steps} steps of "
        f"about {order.tokens / order.steps:.0f} tokens by muon at a rate of up to {args.muon_lr:.2g} and "
        f"AdamW at up to {plan.lr:.2g}, depth {args.ttt_steps}, {order.samples} samples, "
        f"{len(inputs.heldout)} held out")
    doubts(args, inputs, start, plan, processes)


def doubts(args, inputs, start, plan, processes):
    """Say which steps and checkpoints will be a waste."""
    order = plan.order
    if order.steps < 100 and order.steps != args.max_steps:
        more = "" if args.follow else " or more --epochs"
        say(f"warning: {order.steps} steps are few; a smaller --batch-tokens{more} gives more")
    length = inputs.shards.index[:, 2].mean()
    busy = max(1, round(order.tokens / order.steps / length))
    if busy < processes:
        say(f"warning: a step of {plan.batch_tokens} tokens has about {busy} samples, so that of {processes} "
            f"processes {processes - busy} have nothing to do; --batch-tokens {round(processes * length)} or "
            "more gives each one, in fewer steps")
    room = inputs.shards.manifest["planned"]["room"] if args.follow else math.inf
    whole = checkpoint_bytes(start.drafter)
    if whole > room / 4:
        say(f"warning: a checkpoint takes {human_bytes(whole)}, and one is written for every half of the "
            f"{human_bytes(room)} that --max-disk-gb leaves to shards: saving may take most of the time; "
            "extract with a larger --max-disk-gb")


def head_and_layer(drafter):
    """How many parameters the lm_head has, and all others."""
    head = drafter.lm_head.weight.numel()
    return head, sum(parameter.numel() for parameter in drafter.parameters()) - head


def dry_run_summary(args, inputs, start, plan, accelerator):
    """The summary of --dry-run, after what it costs was said."""
    order = plan.order
    compact = "teacher_ids" in inputs.shards.manifest["stored"]
    table = start.drafter.table(inputs.embedding).nbytes
    # A sample is not cut: a process takes the longest one whole, alone.
    longest = int(inputs.shards.index[:, 2].max())
    parts = accelerator.num_processes * args.gradient_accumulation_steps
    fullest = max(plan.batch_tokens, longest * parts)
    memory = step_memory(args, start.drafter, table, compact, fullest, accelerator, accelerator.device)
    disk = checkpoint_bytes(start.drafter)
    tried = ""
    if args.init == "checkpoint":
        tried = "; the checkpoint is tried before the first step, not in a dry run"
    parts = ", ".join(f"{human_bytes(size)} for {what}" for what, size in memory.items())
    say(f"each process needs about {human_bytes(sum(memory.values()))}: {parts}; a checkpoint takes "
        f"{human_bytes(disk)} of disk, and {args.keep} are kept{tried}")
    return {
        "steps": order.steps, "epochs": order.epochs, "tokens": order.tokens,
        "trainable_params": start.trainable, "draft_vocab": len(start.drafter.lm_head.weight),
        "init": args.init, "memory_bytes": sum(memory.values()), "checkpoint_bytes": disk, "dry_run": True,
        "batch_tokens": plan.batch_tokens, "lr": plan.lr, "warnings": inputs.warnings, "out": str(args.out),
    }


def is_matrix(name, parameter):
    """Whether muon takes it: a matrix of the layer."""
    return parameter.dim() == 2 and name != "lm_head.weight"


def checkpoint_bytes(drafter):
    """Of a checkpoint: float32 weights and the export in bfloat16; of what is trained two moments, of the
    layer's matrices one."""
    total = 6 * drafter.embed_tokens.weight.numel() if hasattr(drafter, "embed_tokens") else 0
    for name, parameter in drafter.named_parameters():
        moments = 4 if is_matrix(name, parameter) else 8
        total += parameter.numel() * (6 + parameter.requires_grad * moments)
    return total


def step_memory(args, drafter, embedding_bytes, compact, batch_tokens, accelerator, device):
    """{what: bytes} of a process at the fullest moment of a step of `batch_tokens` on `device`, all of them
    supervised; without the device's own and what is lost between pieces. The drafter may be on the meta
    device."""
    processes, wide = accelerator.num_processes, 2 if accelerator.mixed_precision == "bf16" else 4
    config, depths = drafter.config, args.ttt_steps
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    full = config["target_hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = drafter.lm_head.weight.numel()
    layer = sum(part.numel() for name, part in drafter.named_parameters() if is_matrix(name, part))
    trained = sum(part.numel() for part in drafter.parameters() if part.requires_grad)
    tokens = -(-batch_tokens // (processes * args.gradient_accumulation_steps))

    # Weights, gradients, moments: muon has one, AdamW two.
    state = 4 * sum(part.numel() for part in drafter.parameters()) + 12 * trained - 4 * layer
    if sharded():
        state = state // processes + wide * (head + layer) + 4 * trained
    elif processes > 1 and args.gradient_accumulation_steps > 1:
        state += 4 * trained  # DDP's buckets, into which the sum of the first micro-batches is copied
    teacher_rows = 0 if compact else config["vocab_size" if args.loss != "kl" else "draft_vocab_size"]
    # In bfloat16 the layer's matrices once more, in float32 those that are joined; all their gradients; the
    # lm_head's copy and the product that is added to its gradient.
    joined = layer if wide == 2 else 2 * hidden * (heads + 2 * kv_heads) * size + 2 * hidden * inner
    copies = wide * (joined + layer + head * ((wide == 2) + drafter.lm_head.weight.requires_grad))
    # What autograd keeps of a row: of each depth seven of the width, four of the MLP's, q, k, v and the
    # output, and where keys are not repeated also q and k before their rotation; once, what tokens add.
    # Fused attention keeps the keys and values of all depths so far at each depth.
    attention = size * (6 * heads if kv_heads == heads else 4 * heads + kv_heads)
    if fuses(device):
        attention = size * (3 * heads + (depths + 3) * kv_heads)
    mlp = 0 if args.gradient_checkpointing else hidden + 4 * inner
    kept = depths * (6 * hidden + mlp + attention) + 3 * hidden + size * (2 * heads + 2 * kv_heads)
    kept += 3 * full if wide == 4 else 0  # the batch's states, which come in bfloat16
    batch = 2 * (3 if compact else 4) * full + (6 * CANDIDATES if compact else 0) + 17
    rows = config["draft_vocab_size"]
    computed = torch.bfloat16 if wide == 2 else torch.float32
    chunk = min(tokens, chunk_rows(device, computed, rows, depths))
    piece = DEVICE_PIECE if fuses(device) else PIECE
    logits = wide * rows * (chunk * (depths + (1 if compact else 2)) + piece)
    return {"weights, gradients and moments": state,
            "embedding, teacher and copies": embedding_bytes + wide * teacher_rows * full + copies,
            "batches and what is kept of them": tokens * (wide * kept + 2 * batch) + logits}


def sharded():
    """Whether weights are spread over the processes."""
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return fsdp and torch.distributed.is_initialized()


def plan_from_config(args, accelerator):
    """The summary of --dry-run --tokens, after the plan was said: of the target its config.json is all that
    is read."""
    target = open_target(args.target, args.revision, args.trust_remote_code, config_only=True)
    full, chosen = target.vocab_size, decide_vocabulary(args.draft_vocab, target.vocab_size)
    epochs = args.epochs or 2
    tokens = args.tokens * epochs
    batch_tokens = step_tokens(args, tokens)
    columns = {rows: plan_drafter(args, target, rows, batch_tokens, accelerator)
               for rows in sorted({chosen, min(32000, full), full})}
    steps = min(-(-tokens // batch_tokens), args.max_steps or tokens)
    hours = tokens / args.tokens_per_second / 3600 if args.tokens_per_second else None
    took = "" if hours is None else f", {hours:.1f} hours at {args.tokens_per_second:g} tokens/s"
    precision = accelerator.mixed_precision
    say(f"plan for {target.name}: {args.tokens:,} tokens, {epochs} epochs, about {steps:,} steps of "
        f"{batch_tokens:,} tokens, depth {args.ttt_steps}, mixed precision {precision}{took}")
    say_columns(columns)
    sizes = storages(target.hidden_size, min(CANDIDATES, full))
    say_storages(sizes, args.tokens)
    commands = plan_commands(args, target, chosen, columns[chosen]["memory_bytes"])
    for command in commands:
        say(command)
    mine = columns[chosen]
    return {
        "dry_run": True, "tokens": tokens, "epochs": epochs, "steps": steps, "batch_tokens": batch_tokens,
        "draft_vocab": chosen, "sizes": {str(rows): column for rows, column in columns.items()},
        "memory_bytes": mine["memory_bytes"], "checkpoint_bytes": mine["checkpoint_bytes"],
        "bytes_per_token": sizes, "bytes": {name: int(size * args.tokens) for name, size in sizes.items()},
        "hours": hours, "commands": commands,
    }


def plan_drafter(args, target, rows, batch_tokens, accelerator):
    """A column of the plan: parameters and bytes of a new drafter with so many lm_head rows, and its
    training by the compact teacher."""
    layers = [2, 3, 4]  # no size depends on which
    with torch.device("meta"):
        drafter = Drafter(drafter_config(target, rows, layers, **given_shape(args)))
    drafter.lm_head.weight.requires_grad_(not args.freeze_lm_head)
    drafter_head, others = head_and_layer(drafter)
    fc, table = drafter.fc.weight.numel(), target.vocab_size * drafter.config["hidden_size"]
    narrow = drafter.config["hidden_size"] < target.hidden_size
    table_bytes = table * (4 if narrow or target.text.get("dtype") == "float32" else 2)
    memory = step_memory(args, drafter, table_bytes, True, batch_tokens, accelerator, "cuda")
    return {"layer": others - fc, "fc": fc, "lm_head": drafter_head, "embedding": table, "memory": memory,
            "memory_bytes": sum(memory.values()), "checkpoint_bytes": checkpoint_bytes(drafter)}


def say_columns(columns):
    """The drafter and its training, a column for each number of lm_head rows."""
    def line(title, values):
        say(f"{title:<50}" + "".join(f"{value:>16}" for value in values))

    line("drafter: rows of its lm_head", [f"{rows:,}" for rows in columns])
    columns = list(columns.values())
    for title, key in (("the layer", "layer"), ("fc", "fc"), ("lm_head", "lm_head"),
                       ("embedding, frozen", "embedding")):
        line(f"  {title}", [f"{column[key] / 1e6:,.1f} M" for column in columns])
    for title in columns[0]["memory"]:
        line(f"  {title}", [human_bytes(column["memory"][title]) for column in columns])
    line("  memory of a process, together", [human_bytes(column["memory_bytes"]) for column in columns])
    line("  a checkpoint on disk", [human_bytes(column["checkpoint_bytes"]) for column in columns])


def plan_commands(args, target, draft_vocab, memory):
    """The shell commands of the job: extraction, map, training."""
    commands = [f"python extract_hidden_states.py --target {shlex.quote(str(args.target))} --data ROWS "
                "--out shards --regenerate"]
    gpus = serving_size(target, args.gpu_gb, args.trust_remote_code)[2]
    if gpus != 1:
        commands[0] += f" --backend sglang --server-arguments '--tp {gpus or 'N'}'"
    words, skip, left_out = [], False, {f"--{name.replace('_', '-')}" for name in (*PLANNING, "out")}
    for word in sys.argv[1:]:
        flag = word.split("=")[0]
        if not skip and flag not in {*left_out, "--dry-run"}:
            words.append(word)
        skip = word in left_out  # and its value
    if draft_vocab < target.vocab_size:
        commands.append(f"python build_vocab_map.py --shards shards --draft-vocab {draft_vocab} --out map")
        if not args.vocab_map:
            words += ["--vocab-map", "map"]
    launch = "accelerate launch"
    if memory > FILLED * args.gpu_gb * 1e9:  # weights, gradients and moments spread over GPUs
        launch += " --use_fsdp --fsdp_version 2 --fsdp_cpu_ram_efficient_loading false --num_processes 8"
    commands.append(f"{launch} train_drafter.py --shards shards --out drafter {shlex.join(words)}")
    return commands


# The beginning, or where a run goes on


def begin(args, inputs, start, plan, accelerator, settings):
    """The Training: its folder is made and locked, its weights and moments are those of the last checkpoint
    or the first ones. Nothing is written before a checkpoint was found worth going on from."""
    device = accelerator.device
    compute = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    embedding, drafter = inputs.embedding.to(device), start.drafter.to(device)
    map_rows = None if start.map_rows is None else start.map_rows.to(device)
    teacher = make_teacher(args, inputs, start, device, compute)
    begun, probed = RANK == 0 and (args.out / "run.json").exists(), None
    if begun:
        probed = read_sealed(args.out / "run.json")["start"]
    begun, probed = from_main((begun, probed))
    if not begun and args.init == "checkpoint":
        probed = probe(args, inputs, start, embedding, teacher, map_rows)
    if probed and probed["warning"]:
        inputs.warnings.append(probed["warning"])
    accelerator.wait_for_everyone()
    lock = claim(args, settings, probed) if accelerator.is_main_process else None
    if args.log_with:
        curves = {key: value for key, value in settings.items() if value is not None}
        accelerator.init_trackers("eagle3", config=curves)

    progress = {"step": 0, "tokens": 0, "seconds": 0.0, "waited": 0.0, "loss": None, "last": None,
                "best": None, **plan.order.position}
    moments = {}
    if args.resume:
        if RANK == 0:
            progress, moments = load_checkpoint(args.out, drafter, progress)
        progress = from_main(progress)
    for weight in drafter.state_dict().values() if accelerator.num_processes > 1 else ():
        torch.distributed.broadcast(weight, 0)
    if args.follow:
        plan.order.begin(progress)
    step = TrainStep(drafter, embedding, teacher, args.ttt_steps, DEPTH_DECAY, args.loss)
    model = shard(step, accelerator, compute) if sharded() else accelerator.prepare(step)
    parameters = {name: parameter for name, parameter in drafter.named_parameters()
                  if parameter.requires_grad}
    optimizers = make_optimizers(parameters, plan.lr, args.muon_lr)
    restore_moments(optimizers, parameters, moments)
    return Training(
        args, inputs, start, plan, accelerator, lock, embedding, map_rows, step, model, sharded(), parameters,
        optimizers, progress, ThreadPoolExecutor(1), None, saved=progress["step"], probed=probed,
        block=training_block(args, inputs, start, settings, probed),
    )


def from_main(value):
    """`value` as the main process has it: --out is read by no other."""
    return broadcast_object_list([value])[0]


def make_teacher(args, inputs, start, device, compute):
    target = inputs.target
    if "teacher_ids" in inputs.shards.manifest["stored"]:
        return CompactTeacher(target.vocab_size, start.map_rows, device, compute)
    return Teacher(inputs.head, start.map_rows, target.logit_softcap, target.logit_scale, device, compute,
                   whole=args.loss != "kl")


def claim(args, settings, probed):
    """The lock of --out, which is made with its run.json where it is new."""
    args.out.mkdir(parents=True, exist_ok=True)
    lock = lock_run(args.out)
    check_run(args.out, settings, args.resume)  # again: another process may have begun a run meanwhile
    if not (args.out / "run.json").exists():
        name = {"run": os.urandom(8).hex()} if args.follow else {}
        write_sealed(args.out / "run.json", {**settings, "start": finite(probed), **name})
    return lock


def lock_run(out):
    """An open file that one process can hold; with it, what a killed run left half-written is removed."""
    lock = lock_folder(out, "trained")
    for stray in [*out.iterdir(), *(out / "checkpoints").glob("*")]:
        if TEMPORARY.fullmatch(stray.name) or STRAY.fullmatch(stray.name):
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
    return lock


def shard(step, accelerator, compute):
    """The TrainStep with its weights, gradients and moments spread over the processes; not by accelerate,
    which on CPUs would quietly not shard."""
    processes = accelerator.num_processes
    say(f"weights, gradients and moments are spread over {processes} processes: each holds 1/{processes} of "
        "them, and all weights during a step")
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(accelerator.device.type, (processes,))
    return fully_shard(step, mesh=mesh, mp_policy=policy)


def make_optimizers(parameters, lr, muon_lr):
    """Muon for the layer's matrices, which learns more from the same steps than AdamW and costs no more with
    larger batches; AdamW for the lm_head and the norms. Without weight decay, as the runs are short. Each
    group states its peak rate as initial_lr."""
    matrices = [parameter for name, parameter in parameters.items() if is_matrix(name, parameter)]
    others = [parameter for name, parameter in parameters.items() if not is_matrix(name, parameter)]
    return [
        torch.optim.AdamW([{"params": others, "initial_lr": lr}], lr=lr, betas=(0.9, 0.95), weight_decay=0.0,
                          fused=True),
        Muon([{"params": matrices, "initial_lr": muon_lr}], lr=muon_lr, weight_decay=0.0,
             adjust_lr_fn="original"),
    ]


class Muon(torch.optim.Muon):
    """torch's, with the same bits, but each process orthogonalises its share of the matrices only and hands
    them to the others. Without weight decay, and with a gradient for each matrix."""

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        matrices, updates = group["params"], []
        for matrix in matrices:
            own = self.state[matrix]
            if not own:
                own["momentum_buffer"] = torch.zeros_like(matrix.grad)
            momentum = own["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
            update = matrix.grad.lerp(momentum, group["momentum"]).bfloat16()
            updates.append(update.full_tensor() if isinstance(update, DTensor) else update)
        several = torch.distributed.is_initialized()
        processes = torch.distributed.get_world_size() if several else 1
        costs = np.array([matrix.numel() * min(matrix.shape) for matrix in matrices], dtype=np.int64)
        shares = share_out(np.arange(len(matrices)), costs, processes)
        for number in shares[torch.distributed.get_rank() if several else 0]:
            updates[number] = orthogonal(updates[number], group["ns_coefficients"], group["ns_steps"],
                                         group["eps"])
        for process, share in enumerate(shares):
            for number in share:
                matrix, update = matrices[number], updates[number]
                if several:
                    torch.distributed.broadcast(update, process)
                if isinstance(matrix, DTensor):
                    update = distribute_tensor(update, matrix.device_mesh, matrix.placements,
                                               src_data_rank=None)
                matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1, matrix.shape[0] / matrix.shape[1])))


def orthogonal(matrix, coefficients, steps, eps):
    """The nearest orthogonal matrix to `matrix` [m, n], bfloat16, about: Newton-Schulz as in torch's Muon."""
    a, b, c = coefficients
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide if matrix.shape[0] <= matrix.shape[1] else wide.T).contiguous()


def training_block(args, inputs, start, settings, probed):
    """The `training` block of the drafter's config.json: what it was made for, from and with."""
    manifest = inputs.shards.manifest
    made_from = ("data_sha256", "tokenizer_sha256", "tokenizer_probe_sha256", "chat_template_sha256",
                 "template_kwargs")
    packages = ("torch", "transformers", "accelerate", "safetensors", "numpy")
    return {
        "target": inputs.facts, "layers": manifest["layers"],
        "draft_vocab": start.drafter.config["draft_vocab_size"], "map_sha256": settings["map_sha256"],
        "coverage": start.coverage, "coverage_heldout": start.coverage_heldout, "init": args.init,
        "remapped": start.remapped, "start": probed, **{key: manifest[key] for key in made_from},
        "warnings": inputs.warnings, "versions": {name: version(name) for name in packages},
        "command": " ".join(sys.argv),
    }


# What a checkpoint is worth


def probe(args, inputs, start, embedding, teacher, map_rows):
    """What a checkpoint is worth before its first step, beside the best constant guess and, where that is in
    doubt, a fresh drafter.

    Every process computes the same. Returns the figures, with the `warning` that they call for or None.
    Raises UserError for a checkpoint that is worth nothing here, if not forced.
    """
    shards, inside, unseen = probe_samples(inputs)
    counts = simulated(start.drafter, embedding, map_rows, shards, inside, args.eval_steps)  # [S, 2, K]
    guesses = constant_guess(shards, inside, args.eval_steps)
    length, acceptance = accept_figures(*counts.sum(0).tolist())
    constant, _ = accept_figures(*guesses.sum(0).tolist())
    figures = {"accept_length": length, "acceptance": acceptance, "constant": constant, "fresh": None,
               "fresh_steps": 0, "samples": len(inside), "warning": None}
    if length is None:
        figures["warning"] = (f"whether {args.checkpoint} fits here was not measured: no answer of three "
                              "tokens is there to draft")
        say(f"warning: {figures['warning']}")
        return figures

    drawn = length - constant <= 2 * scatter(counts, guesses)
    beside = ""
    if (drawn or acceptance[0] < DOUBTFUL) and len(unseen):
        say(f"{args.checkpoint} starts at an accept length of {length:.3f}: a fresh drafter learns for a "
            "moment, to compare")
        fresh, steps = train_fresh(args, inputs, start, embedding, teacher, unseen)
        counts = simulated(fresh, embedding, map_rows, shards, inside, args.eval_steps)
        figures["fresh"], _ = accept_figures(*counts.sum(0).tolist())
        figures["fresh_steps"] = steps
        beside = f", a fresh drafter reaches {figures['fresh']:.3f} after {steps} steps"
    sentence = (f"{args.checkpoint} starts at an accept length of {length:.3f} on {len(inside)} samples here "
                f"(best constant guess {constant:.3f}){beside}")
    verdict = judge(length, drawn, figures["fresh"])
    if verdict == "worthless":
        figures["warning"] = (f"{sentence}: it was made for another model, has learnt nothing yet, or its "
                              "vocabulary lacks what is said here")
        if not args.force:
            raise UserError(f"{figures['warning']}; train from scratch (--init scratch), or --force to go on")
    elif verdict == "weak":
        figures["warning"] = f"{sentence}: it is of little use here; --init scratch may well be better"
    say(f"warning: {figures['warning']}" if figures["warning"] else sentence)
    return figures


def judge(length, drawn, fresh):
    """"worthless", "weak" or "good". drawn: it is no better than a constant guess; fresh: the accept length
    of a fresh drafter, None where none was needed or could be trained."""
    if fresh is None:
        return "worthless" if drawn else "good"
    if (drawn and length <= fresh) or length - 1 < (fresh - 1) / 2:
        return "worthless"
    return "weak" if drawn or length < fresh else "good"


def probe_samples(inputs):
    """(Shards, numbers of its samples to measure a checkpoint on, numbers in inputs.yardstick[0] of those
    that a fresh drafter may learn from)."""
    learnt, unseen = inputs.yardstick
    shards, inside = inputs.evaluation, inputs.heldout
    if not len(inside):  # half of few samples are left to the fresh drafter
        shards, inside = learnt, unseen[: (len(unseen) + 1) // 2]
    inside = inside[:PROBED]
    fit = int(shards.index[inside, 2].cumsum().searchsorted(PROBED_TOKENS, side="right"))
    inside = inside[: max(1, fit)]
    return shards, inside, np.setdiff1d(unseen, inside) if shards is learnt else unseen


def constant_guess(shards, samples, steps):
    """The counts of `simulate`, int64 [S, 2, steps], for always drafting the one token that the target
    chooses most often."""
    parts = [shards.sample(int(number), ("input_ids", "loss_mask", "target_argmax")) for number in samples]
    choices = torch.cat([part["target_argmax"][:-1][part["loss_mask"][1:] == 1] for part in parts])
    best = choices.bincount().argmax() if len(choices) else -1
    counts = []
    for part in parts:
        mask, bounds = part["loss_mask"].bool(), [0, len(part["loss_mask"])]
        rows, supervised = supervised_rows(mask, bounds, steps)
        later = rows + torch.arange(1, steps + 1)[:, None]  # [K, R] the row that decides
        hits = part["target_argmax"][later.clamp(max=bounds[1] - 1)] == best
        counts.append(simulate(mask, bounds, rows, supervised & hits))
    return torch.cat(counts)


def scatter(counts, others):
    """Standard error of the difference of two accept lengths, from the counts of `simulate` for the same
    samples, [S, 2, K] each."""
    apart = 0.0
    for sign, part in ((1, counts.double()), (-1, others.double())):
        accepted, starts = part[:, 1].sum(1), part[:, 0, 0]  # [S]
        apart = apart + sign * (accepted - starts * accepted.sum() / starts.sum()) / starts.sum()
    return float(apart.square().sum().sqrt())


def train_fresh(args, inputs, start, embedding, teacher, samples):
    """(A drafter that starts from scratch and learns the first depth for a few quick steps, how many): a
    yardstick, not a training. samples: numbers in inputs.yardstick[0]."""
    shards, device, hidden = inputs.yardstick[0], embedding.device, inputs.target.hidden_size
    draft_vocab = start.drafter.config["draft_vocab_size"]
    drafter = start_from_scratch(args, inputs, draft_vocab, start.map_rows).drafter
    drafter.lm_head.weight.requires_grad_(False)  # it would cost as much as all the rest
    step = TrainStep(drafter.to(device), embedding, teacher, 1, 1.0)
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1.2 / hidden, betas=(0.9, 0.95), weight_decay=0.0)
    order = cycle(np.random.default_rng(args.seed).permutation(samples).tolist())
    tokens = number = 0
    while number < FRESH_STEPS and tokens < 4 * FRESH_STEPS * FRESH_TOKENS:
        chosen, size = [], 0
        while size < FRESH_TOKENS:
            chosen.append(next(order))
            size += int(shards.index[chosen[-1], 2])
        for group in optimizer.param_groups:
            group["lr"] = 1.2 / hidden * min(1, (number + 1) / 5)
        batch = make_batch([shards.sample(sample) for sample in chosen], device)
        loss, _, _ = step(batch, 1 / max(1, shards.index[chosen, 5].sum()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens, number = tokens + size, number + 1
    return drafter.eval(), number


# Checkpoints to go on from


def checkpoints(out):
    """This run's checkpoints by step, oldest first, without any that somebody has taken files from."""
    return [folder for folder in step_folders(out) if all((folder / file).exists() for file in FILES)]


def step_folders(out):
    found = [folder for folder in (out / "checkpoints").glob("step-*") if STEP.fullmatch(folder.name)]
    return sorted(found, key=step_of)


def step_of(folder):
    return int(folder.name.removeprefix("step-"))


def load_checkpoint(out, drafter, fresh):
    """Go on from the last checkpoint that is whole: its weights are loaded into `drafter`, lines logged after
    it are dropped, and damaged ones after it get a name under which nothing counts them.

    Returns (counters, {parameter: {key: tensor}} of the optimizer), or (`fresh`, {}) without one. Raises
    UserError when there are damaged ones only, beside a drafter that training from the start would replace.
    """
    progress, moments = fresh, {}
    for folder in reversed(checkpoints(out)):
        try:
            progress, moments = read_checkpoint(folder, drafter)
        except (UserError, OSError, SafetensorError, ValueError) as error:
            say(f"{folder} is damaged ({str(error)[:200]}); the one before it is tried")
            continue
        say(f"going on after step {progress['step']} of {folder}")
        break
    later = [folder for folder in step_folders(out) if step_of(folder) > progress["step"]]
    # without any, before the first save of a run, its drafter is replaced
    if later and progress is fresh and (out / "model.safetensors").exists():
        raise UserError(f"--resume: none of the checkpoints in {out} is whole, and training anew would "
                        f"replace its drafter; give another --out, or remove {out / 'model.safetensors'}")
    for folder in later:
        names = (folder.with_name(f"{folder.name}.damaged-{number}") for number in count(1))
        os.rename(folder, next(name for name in names if not os.path.lexists(name)))
    if (out / "metrics.jsonl").exists():
        kept = [f"{line}\n" for line, record in read_metrics(out)
                if progress is not fresh and record["step"] <= progress["step"]]
        replace_file(out / "metrics.jsonl", lambda path: path.write_text("".join(kept), encoding="utf-8"))
    return progress, moments


def read_checkpoint(folder, drafter):
    """(counters, moments by parameter) of a checkpoint, whose weights are loaded into `drafter` when all was
    found right. Raises UserError, OSError, SafetensorError or ValueError for a damaged one."""
    progress = read_sealed(folder / "state" / "progress.json")
    if progress["step"] != step_of(folder):
        raise ValueError(f"progress.json is of step {progress['step']}")
    weights = load_file(folder / "state" / "weights.safetensors")
    stored = load_file(folder / "state" / "optimizer.safetensors")
    moments = {}
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            own = [key for key in stored if key.endswith(f"/{name}")]
            moments[name] = {key.split("/")[0]: stored[key] for key in own}
    if not all(moments.values()):
        raise ValueError("moments of a parameter are missing")
    broken = not_finite({**weights, **stored})
    if broken:
        raise ValueError(f"{broken} is not finite")
    wanted = {name: value.shape for name, value in drafter.state_dict().items()}
    if {name: value.shape for name, value in weights.items()} != wanted:
        raise ValueError("its weights have other names or shapes")  # found before any of them is loaded
    drafter.load_state_dict(weights)
    return progress, moments


def read_metrics(out):
    """[(line, its record)] of metrics.jsonl, without those that were cut off when the run was killed, or
    edited so that they lack something."""
    found, path = [], out / "metrics.jsonl"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n"):
        with suppress(ValueError, TypeError, AttributeError):
            record = json.loads(line)
            wanted = {"accept_length", "acceptance"} if "heldout" in record else {"lr"}
            if {"step", "loss", *wanted} <= record.keys() and type(record["step"]) is int:
                found.append((line, record))
    return found


def not_finite(tensors):
    """Name of the first tensor with NaN, infinity or a norm beyond float32; None without one."""
    return next((name for name, tensor in tensors.items() if not tensor.float().norm().isfinite()), None)


def restore_moments(optimizers, parameters, moments):
    """Give the optimizers the moments that load_checkpoint found in the main process, one after the other; of
    a parameter that is spread, a part."""
    found = {name: {key: value.shape for key, value in own.items()} for name, own in moments.items()}
    found = from_main(found)
    names = {parameter: name for name, parameter in parameters.items()}
    for optimizer in optimizers if found else ():
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            name = names[parameter]
            for key, shape in found[name].items():
                value = moments[name][key] if name in moments else torch.empty(shape)
                value = value.to(parameter.device)
                if torch.distributed.is_initialized():
                    torch.distributed.broadcast(value, 0)
                if shape and isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements,
                                              src_data_rank=None)
                on_cpu = key == "step" and not parameter.is_cuda
                optimizer.state[parameter][key] = value.cpu() if on_cpu else value


# The training


def train(training):
    """All steps that are left, measured and saved. A thread reads the samples of the next step meanwhile."""
    args, plan, progress = training.args, training.plan, training.progress
    if args.init == "checkpoint" and not progress["step"]:
        progress["best"] = progress["last"] = measure(training)  # what the checkpoint is worth here
        store(training, best=True, checkpoint=False)
    bar = Progress(plan.order.steps, "steps", "train", done=progress["step"])
    loader, readers = ThreadPoolExecutor(1), ThreadPoolExecutor(READERS)
    upcoming = loader.submit(load_step, training, progress["step"], readers.map)
    begun = time.monotonic() - progress["seconds"]  # later by all the time that is no training
    try:
        while True:
            moment = time.monotonic()
            loaded = upcoming.result()
            progress["waited"] += time.monotonic() - moment
            if loaded is None:
                break
            chosen, position, batches = loaded
            step = progress["step"]
            upcoming = loader.submit(load_step, training, step + 1, readers.map)
            share = schedule(plan.order.place(progress), plan.order.steps, WARMUP)
            figures, norm = learn(training, chosen, batches, share)
            tokens = int(training.inputs.shards.index[chosen, 2].sum())
            progress |= {"step": step + 1, "tokens": progress["tokens"] + tokens, "loss": figures[0],
                         "seconds": time.monotonic() - begun, **position}
            written(training, wait=False)
            note_step(training, bar, figures, {"lr": plan.lr * share, "grad_norm": norm, "tokens": tokens})

            moment = time.monotonic()
            due = args.follow and plan.order.due(progress["block"])
            look(training, (step + 1) % plan.every == 0, due or (step + 1) % plan.save_every == 0)
            begun += time.monotonic() - moment
    finally:
        if args.follow:
            plan.order.close()  # a wait for the next shard
        loader.shutdown()
        readers.shutdown()
        bar.close()
    if not progress["step"]:
        raise UserError(f"none of the samples of {args.shards} could be trained on")


def load_step(training, number, spread):
    """The samples of a step, the place in the order after it, and this process's micro-batches, as many as
    every other's, since all take part in each; None after the last step. spread: see make_batch.

    Batches hold all integers of their step (TrainStep.prepare), and who is to blame for what is not finite,
    which the device finds while it is there: a Blame.
    """
    accelerator, shards = training.accelerator, training.inputs.shards
    found = training.plan.order.step(number)
    if found is None:
        return None
    chosen, place = found
    parts = min(len(chosen), accelerator.num_processes * training.args.gradient_accumulation_steps)
    parts = [part for part in share_out(chosen, sample_costs(training, chosen), parts) if part]
    mine = parts[accelerator.process_index :: accelerator.num_processes]
    idle = len(mine) * accelerator.num_processes < len(parts)
    if idle:  # nothing of its own is left: it takes another's samples and learns nothing from them
        mine.append(parts[-1])
    batches = []
    for number, part in enumerate(mine):
        samples = [shards.sample(sample, raw=True) for sample in part]
        if idle and number == len(mine) - 1:
            for sample in samples:
                sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
        batch = make_batch(samples, accelerator.device, training.step.prepare, spread)
        position = batch["prepared"][0].position  # [N]; the row after a document's last is of another
        used = (batch["loss_mask"] & (position > 0)).roll(-1)
        batches.append(batch | {"blame": Blame(part, batch["bounds"], broken_rows(batch, used))})
    return chosen, place, batches


def sample_costs(training, samples, heldout=False):
    """int64 [n] the products that a step, or a measurement, needs for each sample: fc for each token; for
    each label and depth all other weights, and attention over half of the sample's tokens."""
    index = (training.inputs.evaluation if heldout else training.inputs.shards).index[samples]
    drafter, depths = training.step.drafter, training.args.ttt_steps
    fc, width = drafter.fc.weight.numel(), drafter.config["num_attention_heads"] * drafter.config["head_dim"]
    each = sum(head_and_layer(drafter)) - fc
    return index[:, 2] * fc + index[:, 5] * depths * (each + index[:, 2] * width)


def share_out(samples, costs, parts):
    """Split samples into `parts` lists of about equal cost; the same split wherever it is computed."""
    shares, loads = [[] for _ in range(parts)], [0] * parts
    for number in np.argsort(-costs, kind="stable"):
        lightest = loads.index(min(loads))
        shares[lightest].append(int(samples[number]))
        loads[lightest] += int(costs[number])
    return shares


def schedule(place, steps, warmup):
    """Share of the peak rate at 0-based step `place` of `steps`: linear warm-up, then cosine to zero."""
    rising = max(1, round(steps * warmup))
    if place < rising:
        return min(1.0, (place + 1) / rising)
    return 0.5 * (1 + math.cos(math.pi * (place - rising) / max(1, steps - rising)))


def learn(training, chosen, batches, share):
    """One optimizer step at `share` of the peak rates: this process's micro-batches of the samples `chosen`.

    Returns ([1 + 2 K] floats over all processes: the loss, of each depth the sum of its cross entropies, of
    each depth its rows; the gradient norm).
    """
    accelerator, sharded, parameters = training.accelerator, training.sharded, training.parameters
    labels = max(int(training.inputs.shards.index[chosen, 5].sum()), 1)
    # Those that are returned, and last whether a state is broken.
    figures = torch.zeros(2 + 2 * training.args.ttt_steps, device=accelerator.device)
    for number, batch in enumerate(batches):
        together = sharded or number == len(batches) - 1
        with nullcontext() if together else accelerator.no_sync(training.model):
            with accelerator.autocast():
                # gradients are averaged over the processes: undone here
                loss, sums, rows = training.model(batch, accelerator.num_processes / labels)
            loss.backward()  # not accelerate's, which divides by a number of its own configuration
        own = loss.detach()[None] / accelerator.num_processes
        broken = torch.stack([rows.any() for rows in batch["blame"].broken.values()]).any()[None]
        figures += torch.cat([own, sums.detach(), rows, broken])
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters.values()])
    norm = norm.full_tensor() if sharded else norm
    # The only time that the device is waited for in a step.
    numbers = torch.cat([accelerator.reduce(figures), norm[None]])
    *figures, broken, total = numbers.tolist()
    step = training.progress["step"] + 1
    if broken:
        blame_sample(training, batches, step)
    if not math.isfinite(total):
        raise Failed(f"the gradient of step {step} is not finite (norm {total}): {DIVERGED}")
    if total > MAX_GRAD_NORM:
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), MAX_GRAD_NORM, norm)
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return figures, total


def blame_sample(training, batches, step):
    """Raises UserError for the first sample that holds a broken state, Failed if another process has it."""
    for batch in batches:
        blame = batch["blame"]
        for name, rows in blame.broken.items():
            if rows.any():
                row = int(rows.nonzero()[0])
                training.inputs.shards.refuse(blame.samples[bisect_right(blame.bounds, row) - 1], name)
    raise Failed(f"a sample of step {step} that another process read is broken; its error names the sample")


def note_step(training, bar, figures, facts):
    """Show and log a step: `figures` as learn returns them, and what else is known of it."""
    progress, depths = training.progress, training.args.ttt_steps
    speed = progress["tokens"] / progress["seconds"]
    best = progress["best"] and progress["best"]["accept_length"]
    reached = f", best accept length {best:.3f}" if best else ""
    bar.update(1, f"loss {figures[0]:.3f}, {speed:.0f} tokens/s{reached}")
    sums, rows = figures[1 : 1 + depths], figures[1 + depths :]
    log(training, {
        "step": progress["step"], "epoch": training.plan.order.epoch(progress["step"] - 1),
        "loss": figures[0], "depth_losses": [s / max(r, 1) for s, r in zip(sums, rows, strict=True)], **facts,
        "tokens_per_second": speed, "waiting": progress["waited"] / progress["seconds"],
        "seconds_left": bar.seconds_left(),
    })


def log(training, record):
    """A line of metrics.jsonl, and points of the curves of --log-with."""
    if training.accelerator.is_main_process:
        with open(training.args.out / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record)) + "\n")
    if not training.args.log_with:
        return
    group, curves = "heldout" if "heldout" in record else "train", {}
    for key, value in record.items():
        if type(value) in (int, float) and key != "step":
            curves[f"{group}/{key}"] = value
    for key in ("acceptance", "depth_losses"):
        for depth, value in enumerate(record.get(key, []), start=1):
            if value is not None:
                curves[f"{group}/{key}/{depth}"] = value
    training.accelerator.log(curves, step=record["step"])


# Measuring and saving


def look(training, measuring, saving):
    """Measure, keep what is better than the best so far, and save a checkpoint."""
    progress, improved = training.progress, False
    best = progress["best"] and progress["best"]["accept_length"]
    if measuring:
        progress["last"] = measure(training)
        length = progress["last"]["accept_length"]
        improved = length is None or best is None or length >= best  # of equals the later, which learnt more
    if improved:
        progress["best"] = progress["last"]
    if improved or saving:
        store(training, improved, saving)


def measure(training):
    """Accept length, simulated, and loss on the held-out samples: the same for any number of processes."""
    accelerator, inputs, drafter = training.accelerator, training.inputs, training.step.drafter
    device, evaluation = accelerator.device, inputs.evaluation
    some = inputs.heldout[:LOSS_SAMPLES]
    mine, mine_of_some = (share_out(samples, sample_costs(training, samples, heldout=True),
                                    accelerator.num_processes)[accelerator.process_index]
                          for samples in (inputs.heldout, some))
    if training.sharded:
        training.model.unshard()
    with accelerator.autocast(), torch.no_grad():
        counts = simulated(drafter, training.embedding, training.map_rows, evaluation, mine,
                           training.args.eval_steps).sum(0).to(device)  # [2, K]
        loss = torch.zeros((), device=device)
        for part in packs(mine_of_some, evaluation.index[:, 2]):
            batch = make_batch([evaluation.sample(number) for number in part], device)
            # not the module itself, whose hooks would wait for the other processes
            loss += training.step.forward(batch, 1.0)[0]
    if training.sharded:
        training.model.reshard()
    reached, accepted = accelerator.reduce(counts).tolist()
    loss = accelerator.reduce(loss).item() / max(int(evaluation.index[some, 5].sum()), 1)
    length, acceptance = accept_figures(reached, accepted)
    record = {"step": training.progress["step"], "accept_length": length, "acceptance": acceptance,
              "loss": loss if len(some) else None, "coverage": training.start.coverage_heldout}
    log(training, {**record, "heldout": True})
    figures = "not measured" if length is None else f"{length:.3f}, loss {loss:.3f}"
    say(f"step {record['step']}: held-out accept length {figures}")
    return record


def store(training, best, checkpoint):
    """Have the drafter of --out, a checkpoint, or both written: copied here, gathered from all processes, and
    written by a thread of the main one, of which one writes at a time."""
    args, progress, main_one = training.args, training.progress, training.accelerator.is_main_process
    written(training)
    weights = gather(training.step.drafter.state_dict(), main_one)
    moments = {}
    if checkpoint:
        for optimizer in training.optimizers:
            for name, parameter in training.parameters.items():
                own = optimizer.state.get(parameter, {})
                moments |= {f"{key}/{name}": value for key, value in own.items()}
        moments = gather(moments, main_one)
    broken = not_finite({**weights, **moments})
    if broken:
        raise Failed(f"{broken} is not finite after step {progress['step']}: {DIVERGED}")
    last = progress["last"] or {}
    figures = {"steps": progress["step"], "loss": progress["loss"],
               "accept_length": last.get("accept_length"), "acceptance": last.get("acceptance")}
    config = {**training.step.drafter.config, "training": finite({**training.block, **figures})}
    counters = finite(progress)

    def write():
        if best:
            save_drafter(args.out, weights, config, training.map_rows)
        if checkpoint:
            save_checkpoint(args.out, lambda folder: save_drafter(folder, weights, config, training.map_rows),
                            weights, moments, counters, args.keep)
        if checkpoint and args.follow:
            training.plan.order.acknowledge(counters["block"])

    if checkpoint:
        training.saved = progress["step"]
        if args.follow:
            training.plan.order.acknowledged = progress["block"]
    if main_one:
        training.writing = training.writer.submit(write)


def written(training, wait=True):
    """Raise what the thread failed with: after it has ended or, without `wait`, if it has."""
    if training.writing and (wait or training.writing.done()):
        training.writing.result()
        training.writing = None


def gather(tensors, keep):
    """Copies on the CPU of the tensors of a dict, whole where they are spread over the processes, each of
    which must call this; {} unless `keep`."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return whole


def save_checkpoint(out, export, weights, moments, progress, keep):
    """checkpoints/step-NNNNNN: the drafter as served, and in state/ the float32 weights, moments and
    counters, whole or absent. Only the last `keep` stay; of the others this run's files are removed and
    anything else is left."""
    def fill(folder):
        export(folder)
        state = folder / "state"
        state.mkdir()
        replace_file(state / "weights.safetensors", lambda path: save_file(weights, path))
        replace_file(state / "optimizer.safetensors", lambda path: save_file(moments, path))
        write_sealed(state / "progress.json", progress)

    (out / "checkpoints").mkdir(exist_ok=True)
    replace_folder(out / "checkpoints" / f"step-{progress['step']:06d}", fill)
    folders = step_folders(out)
    oldest = checkpoints(out)[-keep:][0]
    for old in folders[: folders.index(oldest)]:
        for file in FILES:
            (old / file).unlink(missing_ok=True)
        for place in (old / "state", old):
            with suppress(OSError):  # it holds somebody's files, or is not there
                place.rmdir()


# The end


def finish(training):
    """Measure and save what was not yet, let go of the folder, and plot."""
    args, progress, accelerator = training.args, training.progress, training.accelerator
    measured = progress["last"] is not None and progress["last"]["step"] == progress["step"]
    look(training, measuring=not measured, saving=training.saved < progress["step"])
    written(training)
    if args.follow:
        training.plan.order.acknowledge(progress["block"], finished=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        training.lock.close()
    if RANK == 0 and not (args.out / "model.safetensors").exists():
        raise UserError(f"{args.out} has lost its model.safetensors since it was trained; copy that of one "
                        "of its checkpoints there")
    if args.log_with:
        accelerator.end_training()
    if args.plot and accelerator.is_main_process:
        records = [record for _, record in read_metrics(args.out)]
        if records:
            plot_training(args.plot, records)
        else:
            say(f"nothing is plotted: {args.out / 'metrics.jsonl'} holds no step any more")


def report(training):
    """The summary."""
    args, start, plan, progress = training.args, training.start, training.plan, training.progress
    best, warnings = progress["best"], training.block["warnings"]
    if best["accept_length"]:
        worth = f"held-out accept length {best['accept_length']:.3f}"
    elif len(training.inputs.heldout):
        worth = "nothing could be measured on the held-out samples"
    else:
        worth = "no sample was held out"
    say(f"{args.out} is the drafter of step {best['step']}, {worth}")
    if best["step"] == 0:
        warnings.append("no step was better than the checkpoint that it began from; lower --lr and --muon-lr")
        say(f"warning: {warnings[-1]}")
    return {
        "steps": progress["step"], "epochs": plan.order.epochs, "tokens": progress["tokens"],
        "loss": progress["loss"], "accept_length": best["accept_length"], "acceptance": best["acceptance"],
        "best_step": best["step"], "trainable_params": start.trainable,
        "draft_vocab": start.drafter.config["draft_vocab_size"], "init": args.init,
        "remapped": start.remapped, "start": training.probed, "coverage": start.coverage,
        "coverage_heldout": start.coverage_heldout,
        "tokens_per_second": progress["tokens"] / progress["seconds"],
        "seconds": progress["seconds"], "batch_tokens": plan.batch_tokens, "lr": plan.lr,
        "processes": training.accelerator.num_processes, "warnings": warnings, "out": str(args.out),
    }


if __name__ == "__main__":
    run(main, interrupted="the same command with --resume goes on from the last checkpoint, or begins again "
                          "where there is none yet")
