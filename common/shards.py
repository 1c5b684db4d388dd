"""Hidden-state shards: a folder of safetensors with many samples each, and the manifest that says what they
are.

A reader trusts only what the manifest lists. All tensors of a shard share its rows: sample s is rows
cu_seqlens[s]..cu_seqlens[s+1]. No padding is stored.
"""

import base64
import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.cli import UserError, say
from common.files import read_appended, read_sealed, replace_file, sha256_file, sha256_json
from common.provenance import compare, made_for
from common.target import open_target
from common.vocab import count_ids

FORMAT = 1
CANDIDATES = 64  # of the compact teacher: 16 did as well, and the rest is a hundredth of the states
STORE = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
ROWS = ("input_ids", "loss_mask", "aux_hidden_states", "aux_scale", "last_hidden_state", "last_scale",
        "target_argmax")
TEACHER = ("teacher_rows", "teacher_ids", "teacher_logprobs")
SCALES = {"aux_hidden_states": "aux_scale", "last_hidden_state": "last_scale"}
MANIFEST, ACKNOWLEDGED = "manifest.json", "acknowledged.json"
JOURNAL = "journal-{}.jsonl"  # of a process: a line for each block that it has finished
OPEN = 64  # shards mapped at once: a process may have 65,530 maps, and a job has more shards
# Of the manifest, what may be otherwise when an extraction is gone on with.
FREE = {"batches", "run", "done", "complete", "versions", "shards", "empty_blocks", "forced", "format",
        "target"}


def shard_name(block):
    return f"shard-{block:05d}.safetensors"


def write_shard(folder, block, samples):
    """Write one shard from a list of samples and return its manifest entry, None for no samples.

    A sample is a dict of the tensors of ROWS that are stored, each [T, ...], perhaps of those of TEACHER,
    whose teacher_rows count from the sample's first row, and of the numbers sample_id, turn_id, source_id,
    heldout. The tensors are gone from it afterwards.
    """
    if not samples:
        return None
    lengths = [len(sample["input_ids"]) for sample in samples]
    bounds = [0, *np.cumsum(lengths).tolist()]
    if "teacher_rows" in samples[0]:
        for sample, start in zip(samples, bounds, strict=False):
            sample["teacher_rows"] = sample["teacher_rows"] + start
    tensors = {}
    for name in (*ROWS, *TEACHER):
        if name in samples[0]:  # taken out one by one, so that no second copy of all samples is in memory
            tensors[name] = torch.cat([sample.pop(name) for sample in samples])
    tensors["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int64)
    for name, key, dtype in (("sample_ids", "sample_id", torch.int64), ("turn_ids", "turn_id", torch.int64),
                             ("source_ids", "source_id", torch.int32), ("heldout", "heldout", torch.uint8)):
        tensors[name] = torch.tensor([sample[key] for sample in samples], dtype=dtype)
    file = Path(folder) / shard_name(block)
    replace_file(file, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    return {
        "file": file.name, "block": block, "samples": len(samples), "rows": sum(lengths),
        "bytes": file.stat().st_size, "sha256": sha256_file(file),
        "supervised_tokens": int(tensors["loss_mask"].sum()),
        "heldout_samples": int(tensors["heldout"].sum()),
        "index": base64.b64encode(sample_facts(tensors.get).tobytes()).decode(),
    }


def sample_facts(tensor):
    """int32 [S, 4] of a shard's samples: length, heldout, source, labels. tensor(name): of the shard."""
    bounds = tensor("cu_seqlens").numpy()
    mask = np.concatenate([[0], np.cumsum(tensor("loss_mask").numpy(), dtype=np.int64)])
    labels = mask[bounds[1:]] - mask[np.minimum(bounds[:-1] + 2, bounds[1:])]
    columns = [np.diff(bounds), tensor("heldout").numpy(), tensor("source_ids").numpy(), labels]
    return np.stack(columns, axis=1).astype("<i4")


def stored_tensors(teacher):
    """Names of what a sample holds beside its ids and mask, with --teacher states or compact."""
    if teacher == "states":
        return ["aux_hidden_states", "last_hidden_state", "target_argmax"]
    return ["aux_hidden_states", "teacher_ids", "teacher_logprobs", "target_argmax"]


def bytes_per_token(hidden, store, candidates=0, supervised=1.0):
    """Bytes of a stored token: states, id, mask, choice; of the compact teacher also its candidates in a
    share `supervised` of the rows."""
    states = 3 if candidates else 4
    scales = 4 * states if store == "fp8" else 0
    teacher = (8 + 6 * candidates) * supervised if candidates else 0
    return states * hidden * STORE[store].itemsize + scales + 9 + teacher


def store_states(states, parts, dtype):
    """(stored [T, parts * H], scale float32 [T, parts] or None) of states [T, parts * H]: float8 with a scale
    for each part of a row.

    value = stored * scale, scale = amax / 448, float8_e4m3fn's largest number; 1 for a row of zeros.
    """
    if dtype != torch.float8_e4m3fn:
        return states.to(dtype), None
    split = states.float().unflatten(1, (parts, -1))
    scale = split.abs().amax(2) / 448  # [T, parts]
    scale = torch.where(scale > 0, scale, 1)
    return (split / scale[:, :, None]).flatten(1).to(dtype), scale


def widen(tensors):
    """Turn float8 states in a dict of tensors [T, ...] into bfloat16, on their device; their scales go."""
    for name in SCALES.keys() & tensors.keys():
        if tensors[name].dtype == torch.float8_e4m3fn:
            scale = tensors.pop(SCALES[name])  # [T, parts]
            split = tensors[name].float().unflatten(1, (scale.shape[1], -1))  # [T, parts, H]
            tensors[name] = split.mul_(scale[:, :, None]).flatten(1).bfloat16()


def broken_rows(tensors, used):
    """{name: bool [T]} of states and log-probabilities in a dict of tensors [T, ...]: the rows that nothing
    can be learnt from, as they hold NaN or infinity; of the lm_head's input only where `used` (bool [T])."""
    found = {}
    for name in SCALES.keys() & tensors.keys():
        largest = torch.linalg.vector_norm(tensors[name], torch.inf, dim=1)  # NaN where a row holds one
        found[name] = ~largest.isfinite()
    if "last_hidden_state" in found:
        found["last_hidden_state"] &= used
    if "teacher_logprobs" in tensors:  # minus infinity is the end of a short list
        found["teacher_logprobs"] = tensors["teacher_logprobs"].isnan().any(1)
    return found


class Shards:
    """A folder of shards: the manifest, an index of the samples, and their tensors read on demand.

    `index` has one row a sample, in the order stored: shard, first row, length, heldout, source, and labels,
    the number of supervised tokens that a drafter can predict (the first two of a sample it never does).
    """

    def __init__(self, folder, verify=False, first=None):
        """verify: check every file's hash, too, which reads all of them. first: of an extraction with
        --max-disk-gb, finished or not, open the held-out shards and so many of the others; default all of a
        finished one."""
        self.folder, self.verify = Path(folder), verify
        if not self.folder.is_dir():
            raise UserError(f"{folder} is no folder of shards; extract_hidden_states.py makes one")
        if not (self.folder / MANIFEST).exists():
            raise UserError(f"{folder} holds no {MANIFEST}; give a folder that extract_hidden_states.py made")
        self.manifest = read_manifest(self.folder)
        self.followed = "room" in self.manifest["planned"]
        wanted = self._wanted(first)
        read = acknowledged(self.folder, self.manifest["planned"])
        gone = [entry for entry in wanted if entry["block"] in read
                and not (self.folder / entry["file"]).exists()]
        if gone:
            raise UserError(f"{folder} lacks {len(gone)} of its shards, which were removed after the "
                            "training that follows had read them; its held-out part stays: extract again "
                            "without --max-disk-gb for all of them")
        self.entries, self.open, self.lock = [], OrderedDict(), threading.Lock()
        self.index = np.zeros((0, 6), dtype=np.int64)
        there = self._sizes()
        self._list(wanted, there)
        listed = {entry["file"] for entry in self.manifest["shards"]}
        foreign = sorted(there.keys() - listed)
        if foreign:
            say(f"{self.folder / foreign[0]} is not listed in the manifest and is not read "
                f"({len(foreign)} such files)")
        if not len(self.index) and first is None:
            raise UserError(f"{folder} holds no samples")

    def _wanted(self, first):
        """The entries of the manifest to open. Raises UserError where they are not all there."""
        planned, entries = self.manifest["planned"], self.manifest["shards"]
        if self.followed and first is not None:
            return self._first(first)
        if self.manifest["complete"]:
            return entries
        begun = f"{self.folder} is not finished ({len(entries)} of {planned['blocks']} blocks)"
        if self.followed:
            raise UserError(f"{begun}: train_drafter.py --follow trains meanwhile, build_vocab_map.py "
                            "--first-shards N counts what is there; if the extraction stopped, give its "
                            "command again")
        raise UserError(f"{begun}; give the extraction's command again and it goes on")

    def _first(self, first):
        """The entries of the held-out shards and of so many others, with --max-disk-gb."""
        planned, most = self.manifest["planned"], fitting(self.manifest["planned"])
        if first > most:
            raise UserError(f"--first-shards {first}: of {self.folder} at most {most} shards beside the "
                            "held-out ones can be there before training reads them (--max-disk-gb); give at "
                            f"most {most}")
        blocks = planned["heldout_blocks"] + first
        found = sum(entry["block"] < blocks for entry in finished(self.manifest))
        if found < blocks:
            raise UserError(f"{found} of the {blocks} first shards that are wanted of {self.folder} "
                            f"({planned['heldout_blocks']} held-out, {first} others) are finished; wait for "
                            "the rest")
        return [entry for entry in self.manifest["shards"] if entry["block"] < blocks]

    def extend(self, entry):
        """List a shard that has been written since; its samples are numbered on, int64 [n]."""
        before, path = len(self.index), self.folder / entry["file"]
        self._list([entry], {entry["file"]: path.stat().st_size} if path.exists() else {})
        return np.arange(before, len(self.index))

    def close(self, block):
        """Let go of the shards before `block` that are not held out: only then is their place on the disk
        free."""
        with self.lock:
            for number in list(self.open):
                if self.manifest["planned"]["heldout_blocks"] <= self.entries[number]["block"] < block:
                    del self.open[number]

    def _sizes(self):
        """{name: bytes} of the files of shards in the folder."""
        with os.scandir(self.folder) as found:
            return {file.name: file.stat().st_size for file in found
                    if file.name.startswith("shard-") and file.name.endswith(".safetensors")}

    def _list(self, entries, there):
        """Put shards into the index by what their entries say of their samples; those of folders that were
        made without it, and with `verify` all, are opened."""
        facts, first = [], len(self.entries)
        for number, entry in enumerate(entries, start=first):
            self._check_size(entry, there.get(entry["file"]))
            self.entries.append(entry)
            told = np.frombuffer(base64.b64decode(entry.get("index", "")), dtype="<i4").reshape(-1, 4)
            if self.verify or "index" not in entry:
                found = sample_facts(self.file(number).get_tensor)
                if "index" in entry and not np.array_equal(told, found):
                    raise UserError(f"{self.folder / entry['file']} holds other samples than the manifest "
                                    "says; it is of another extraction: restore it or extract it again")
                told = found
            facts.append(told)
        if not entries:
            return
        lengths = np.concatenate([rows[:, 0] for rows in facts]).astype(np.int64)
        counts = [len(rows) for rows in facts]
        shard = np.repeat(np.arange(first, len(self.entries)), counts)
        ends = np.cumsum(lengths)  # over all of these shards
        starts = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(counts)[:-1]])]  # of each shard
        places = ends - lengths - np.repeat(starts, counts)
        others = np.concatenate(facts)[:, 1:].astype(np.int64)
        self.index = np.concatenate([self.index, np.column_stack([shard, places, lengths, others])])

    def _check_size(self, entry, size):
        if size == entry["bytes"] and not self.verify:
            return  # a million shards are quick
        path = self.folder / entry["file"]
        if size is None:
            raise UserError(f"{path} is listed in the manifest and missing; extract again or restore it")
        if size != entry["bytes"]:
            raise UserError(f"{path} has {size} bytes, the manifest says {entry['bytes']}; restore it or "
                            "extract it again")
        if (found := sha256_file(path)) != entry["sha256"]:
            raise UserError(f"{path} has hash {found}, the manifest says {entry['sha256']}: it is damaged; "
                            "the extraction's command with --verify makes it again")

    def file(self, number):
        """safetensors' handle of shard `number`, which is opened, and its header compared with its entry,
        when it is first read. OPEN stay open, those read last."""
        return self._opened(number)[0]

    def _opened(self, number):
        """(handle, teacher_rows int64 [M] or None) of a shard."""
        with self.lock:
            if number not in self.open:
                file = self._open(self.entries[number])
                compact = "teacher_ids" in self.manifest["stored"]
                at = file.get_tensor("teacher_rows").numpy().copy() if compact else None
                self.open[number] = file, at
                if len(self.open) > OPEN:
                    self.open.popitem(last=False)
            self.open.move_to_end(number)
            return self.open[number]

    def _open(self, entry):
        """safetensors' handle of a shard, after its header was compared with its entry."""
        path = self.folder / entry["file"]
        try:
            file = safe_open(path, framework="pt")
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise UserError(f"{path} is listed in the manifest and was removed; extract again or restore "
                            "it") from None
        except Exception as error:  # safetensors raises its own kinds for a broken header
            raise UserError(f"{path} cannot be read as safetensors ({str(error)[:200]}); extract it "
                            "again") from None
        rows = {"input_ids": entry["rows"], "aux_hidden_states": entry["rows"],
                "cu_seqlens": entry["samples"] + 1}
        for name in (*rows, "loss_mask", "heldout", "source_ids", *self.manifest["stored"]):
            found = shapes.get(name, [None])[0]
            if found is None or found != rows.get(name, found):
                wanted = rows.get(name, "it is there")
                raise UserError(f"{path} holds {name} of {found or 'no'} rows, the manifest says {wanted}; "
                                "it is of another extraction: restore it or extract it again")
        return file

    @property
    def sha256(self):
        """Hash of all shards' content, as the manifest states it; with --max-disk-gb, of what decides
        that."""
        if self.followed:
            return settings_sha256(self.manifest)
        return sha256_json([entry["sha256"] for entry in self.entries])

    @property
    def heldout(self):
        """bool [S]: samples set aside at extraction."""
        return self.index[:, 3].astype(bool)

    def where(self, number):
        """Where sample `number` lies, in words."""
        shard, first, length = (int(value) for value in self.index[number, :3])
        path = self.folder / self.entries[shard]["file"]
        return f"{path}, rows {first}..{first + length - 1} (sample {number})"

    def sample(self, number, names=None, raw=False):
        """dict of the named tensors of sample `number`, default all that are stored: each [T, ...] as stored.

        float8 states come as bfloat16, with their scale. teacher_ids, int32 [T, C], is -1 in rows that have
        no teacher. Raises UserError for ids that the target does not have, and for states that are not finite
        where they are used: of the lm_head's input only the rows that predict a supervised token. With raw,
        float8 states stay so and their scales come, too; nothing of them is read and looked at yet (`widen`,
        `broken_rows`).
        """
        names = names or ("input_ids", "loss_mask", *self.manifest["stored"])
        shard, first, length = (int(value) for value in self.index[number, :3])
        file, at = self._opened(shard)
        rows = slice(first, first + length)
        tensors = {name: file.get_slice(name)[rows] for name in names if name not in TEACHER}
        for name in SCALES.keys() & tensors.keys():
            if tensors[name].dtype == torch.float8_e4m3fn:
                tensors[SCALES[name]] = file.get_slice(SCALES[name])[rows]
        if "teacher_ids" in names:
            low, high = np.searchsorted(at, [first, first + length])
            own = torch.from_numpy(at[low:high] - first)
            for name, empty in (("teacher_ids", -1), ("teacher_logprobs", -torch.inf)):
                found = file.get_slice(name)[low:high]
                tensors[name] = found.new_full((length, found.shape[1]), empty).index_copy_(0, own, found)
        self._check_ids(tensors, number)
        if raw:
            return tensors
        widen(tensors)
        used = torch.ones(length, dtype=torch.bool)
        if "loss_mask" in tensors:
            used = torch.cat([tensors["loss_mask"][1:] == 1, torch.tensor([False])])
        for name, broken in broken_rows(tensors, used).items():
            if broken.any():
                self.refuse(number, name)
        return tensors

    def refuse(self, number, name):
        """Raises UserError: the named tensor of sample `number` has broken rows."""
        found = "NaN" if name in TEACHER else "NaN or infinity"
        raise UserError(f"{self.where(number)}: {name} holds {found}; extract it again")

    def _check_ids(self, tensors, number):
        size = self.manifest["target"]["vocab_size"]
        for name in {"input_ids", "target_argmax", "teacher_ids"} & tensors.keys():
            low, high = tensors[name].aminmax()
            least = -1 if name == "teacher_ids" else 0
            if low < least or high >= size:
                found = int(low if low < least else high)
                raise UserError(f"{self.where(number)}: {name} holds {found}, the target's ids are "
                                f"0..{size - 1}; extract it again")

    def supervised(self):
        """The supervised tokens, shard by shard: (ids int32 [n], held out bool [n], source int32 [n]).

        Raises UserError for an id that the target does not have.
        """
        size = self.manifest["target"]["vocab_size"]
        for number in range(len(self.entries)):
            file = self.file(number)
            keep = file.get_tensor("loss_mask").numpy().astype(bool)
            lengths = np.diff(file.get_tensor("cu_seqlens").numpy())
            aside = np.repeat(file.get_tensor("heldout").numpy().astype(bool), lengths)[keep]
            source = np.repeat(file.get_tensor("source_ids").numpy(), lengths)[keep]
            ids = file.get_tensor("input_ids").numpy()[keep]
            if len(ids) and not 0 <= ids.min() <= ids.max() < size:
                wrong = ids.min() if ids.min() < 0 else ids.max()
                raise UserError(f"{self.folder} holds token id {wrong}, the target's are 0..{size - 1}: "
                                "extract again")
            yield ids, aside, source

    def supervised_counts(self):
        """How often each id is supervised: (int64 [V] in the samples to train on, int64 [V] in the held-out
        ones)."""
        return count_ids(self.supervised(), self.manifest["target"]["vocab_size"])

    def heldout_prompts(self, limit=None):
        """[(number, source name, ids)] of up to `limit` held-out samples: their ids up to the first
        answer."""
        found = []
        for number in self.heldout.nonzero()[0][:limit].tolist():
            sample = self.sample(number, ("input_ids", "loss_mask"))
            first = int(sample["loss_mask"].int().argmax())
            if first:
                source = self.manifest["sources"][self.index[number, 4]]
                found.append((number, source, sample["input_ids"][:first].tolist()))
        if not found:
            raise UserError(f"{self.folder} holds no held-out sample with a prompt; extract with --heldout, "
                            "or give a file of prompts")
        return found


class Journals:
    """The journals of an extraction's processes, read on from where they were read to."""

    def __init__(self, folder):
        self.folder, self.places = Path(folder), {}

    def read(self):
        """The entries of the blocks finished since the last call. A damaged line is said, and its block made
        again."""
        entries = []
        for path in sorted(self.folder.glob(JOURNAL.format("*"))):
            values, self.places[path] = read_appended(path, self.places.get(path, 0))
            entries += [value for value in values if value is not None]
            if None in values:
                say(f"{path} was changed after it was written: {values.count(None)} of its lines are not "
                    "read, and what they list is made again")
        return entries


def read_manifest(folder):
    """The manifest of an extraction, with what its journals list while it goes on."""
    path, before = Path(folder) / MANIFEST, None
    while before is None or before != path.stat().st_mtime_ns:  # it took over journals meanwhile
        if path.exists():
            before = path.stat().st_mtime_ns
        manifest = read_sealed(path)
        if manifest["format"] != FORMAT:
            raise UserError(f"{folder}/{MANIFEST} is of format {manifest['format']}, this version reads "
                            f"format {FORMAT}")
        if not manifest["complete"]:
            add(manifest, Journals(folder).read())
    return manifest


def add(manifest, entries):
    """List finished blocks, each once, in order."""
    if not entries:
        return
    found = {entry["block"]: entry for entry in entries + finished(manifest)}
    entries = [found[block] for block in sorted(found)]
    manifest["shards"] = [entry for entry in entries if "file" in entry]
    manifest["empty_blocks"] = [entry for entry in entries if "file" not in entry]


def finished(manifest):
    """The entries of all finished blocks, those without samples included."""
    return manifest["shards"] + manifest["empty_blocks"]


def settings_sha256(manifest):
    """Hash of all that an extraction is begun with and that never changes afterwards."""
    target = [manifest["target"][key] for key in ("tensors_sha256", "text_config_sha256")]
    return sha256_json([target, {key: value for key, value in manifest.items() if key not in FREE}])


def fitting(planned):
    """With --max-disk-gb: how many shards beside the held-out ones can be there before training has read
    any."""
    sizes = planned["block_bytes"][planned["heldout_blocks"] :]
    return int(np.searchsorted(np.cumsum(sizes), planned["room"], side="right"))


def acknowledged(folder, planned):
    """The blocks, a range, that a training which follows has read for good: they are or may be removed. It
    ends at the first unread one, and is empty without --max-disk-gb."""
    if "room" not in planned:
        return range(0)
    first, path = planned["heldout_blocks"], Path(folder) / ACKNOWLEDGED
    return range(first, read_sealed(path)["blocks"] if path.exists() else first)


def open_shards_target(shards, name=None, revision=None, trust_remote_code=False):
    """The Target that shards were made with: `name`, or where the manifest says it was. It is not loaded."""
    if name:
        return open_target(name, revision, trust_remote_code)
    try:
        return open_target(shards.manifest["target"]["name"], revision, trust_remote_code)
    except UserError as error:
        raise UserError(f"the target of {shards.folder} cannot be read where it was ({error}); give "
                        "--target, its place now") from None


def check_shards(shards, here, force=False):
    """Sentences on what shards were made for that is otherwise in the record `here` (common/provenance.py),
    and on what was forced when they were made. Raises UserError for what is refused."""
    warnings = compare(made_for(shards.manifest), here, shards.folder, force)
    forced = shards.manifest["forced"]
    if forced:
        warnings.append(f"{shards.folder} was gone on with by force although these had changed: "
                        f"{', '.join(forced)}")
    return warnings
