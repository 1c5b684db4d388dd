"""Which samples each optimizer step takes: of a whole folder of shards, epoch after epoch, or of shards that appear meanwhile."""

import math
import os
import threading
import time

import numpy as np

from common.cli import RANK, UserError, say
from common.files import read_json, write_json
from common.shards import ACKNOWLEDGED, MANIFEST, Shards, acknowledged, read_manifest, settings_sha256


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
