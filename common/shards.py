"""Hidden-state shards: a folder of safetensors with many samples each, and the manifest that says what they are.

A reader trusts only what the manifest lists. All tensors of a shard share its rows: sample s is rows
cu_seqlens[s]..cu_seqlens[s+1]. No padding is stored.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.cli import UserError, say
from common.files import read_json, replace_file, sha256_file, sha256_json
from common.target import check_same_target, open_target, stored_template_sha256, tokenizer_sha256
from common.vocab import count_ids

FORMAT = 1
STORE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
ROWS = ("input_ids", "loss_mask", "aux_hidden_states", "aux_scale", "last_hidden_state", "last_scale", "target_argmax")
TEACHER = ("teacher_rows", "teacher_ids", "teacher_logprobs")
SCALES = {"aux_hidden_states": "aux_scale", "last_hidden_state": "last_scale"}
MANIFEST, ACKNOWLEDGED = "manifest.json", "acknowledged.json"
FREE = {"batches", "run", "done", "complete", "versions", "shards", "empty_blocks", "forced", "format", "target"}  # may change later
REQUIRED = {"target": dict, "layers": list, "shards": list, "planned": dict, "complete": bool, "tokenizer_sha256": str, "data_sha256": str,
            "special_ids": dict, "empty_blocks": list, "stored": list, "block_lines": int, "template_kwargs": dict,
            "sources": list}


def _all(kind, values):
    return all(type(value) is kind for value in values)


def _can_follow(planned):
    """Whether what is planned with --max-disk-gb can be right."""
    sizes = planned.get("block_bytes")
    return (_all(int, map(planned.get, FOLLOWED)) and isinstance(sizes, list) and _all(int, sizes) and len(sizes) == planned["blocks"]
            and 0 <= planned["heldout_blocks"] <= planned["blocks"] and 0 <= planned["heldout_samples"] <= planned["samples"]
            and 0 <= planned["heldout_tokens"] <= planned["tokens"] and 0 <= min(sizes) <= sum(sizes) and planned["room"] > 0)


FOLLOWED = ("room", "heldout_blocks", "samples", "tokens", "heldout_tokens", "heldout_samples")  # of `planned` with --max-disk-gb
USABLE = {  # what is asked of an entry beyond its type
    "target": lambda target: _all(str, map(target.get, ("name", "tensors_sha256", "text_config_sha256")))
    and _all(int, map(target.get, ("vocab_size", "hidden_size", "num_layers"))) and isinstance(target.get("text_config"), dict),
    "layers": lambda layers: _all(int, layers) and len(layers) == 3 and 0 < layers[0] < layers[1] < layers[2],
    "shards": lambda shards: all(isinstance(entry, dict) and _all(str, map(entry.get, ("file", "sha256")))
                                 and _all(int, map(entry.get, ("block", "bytes", "rows", "samples"))) for entry in shards),
    "stored": lambda stored: {"aux_hidden_states", "target_argmax"} <= set(map(str, stored)) <= {*ROWS, *TEACHER},
    "block_lines": lambda lines: type(lines) is int and lines > 0,
    "planned": lambda planned: type(planned.get("blocks")) is int and ("room" not in planned or _can_follow(planned)),
    "empty_blocks": lambda empty: all(isinstance(entry, dict) and type(entry.get("block")) is int for entry in empty),
    "special_ids": lambda special: isinstance(special.get("eos"), list) and _all(int, special["eos"])
    and isinstance(special.get("chat"), dict) and all(number is None or type(number) is int for number in special["chat"].values()),
    "sources": lambda sources: _all(str, sources) and sources,
}


def shard_name(block):
    return f"shard-{block:05d}.safetensors"


def write_shard(folder, block, samples):
    """Write one shard from a list of samples and return its manifest entry, None for no samples.

    A sample is a dict of the tensors of ROWS that are stored, each [T, ...], perhaps of those of TEACHER, whose teacher_rows count
    from the sample's first row, and of the numbers sample_id, turn_id, source_id, heldout. The tensors are gone from it afterwards.
    """
    if not samples:
        return None
    lengths = [len(sample["input_ids"]) for sample in samples]
    bounds = [0, *np.cumsum(lengths).tolist()]
    if "teacher_rows" in samples[0]:
        for sample, start in zip(samples, bounds, strict=False):
            sample["teacher_rows"] = sample["teacher_rows"] + start
    # taken out of the samples one by one, so that no second copy of all of them is in memory
    tensors = {name: torch.cat([sample.pop(name) for sample in samples]) for name in (*ROWS, *TEACHER) if name in samples[0]}
    tensors["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int64)
    for name, key, dtype in (("sample_ids", "sample_id", torch.int64), ("turn_ids", "turn_id", torch.int64),
                             ("source_ids", "source_id", torch.int32), ("heldout", "heldout", torch.uint8)):
        tensors[name] = torch.tensor([sample[key] for sample in samples], dtype=dtype)
    file = Path(folder) / shard_name(block)
    replace_file(file, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    return {
        "file": file.name, "block": block, "samples": len(samples), "rows": sum(lengths), "bytes": file.stat().st_size,
        "sha256": sha256_file(file), "supervised_tokens": int(tensors["loss_mask"].sum()),
        "heldout_samples": int(tensors["heldout"].sum()),
    }


def stored_tensors(teacher):
    """Names of what a sample holds beside its ids and mask, with --teacher states or compact."""
    return ["aux_hidden_states", *(["last_hidden_state"] if teacher == "states" else TEACHER[1:]), "target_argmax"]


def bytes_per_token(hidden, store, candidates=0, supervised=1.0):
    """Bytes of a stored token: states, id, mask, choice; of the compact teacher also its candidates in a share `supervised` of the rows."""
    states = 3 if candidates else 4
    scales = 4 * states if store == "fp8" else 0
    teacher = (8 + 6 * candidates) * supervised if candidates else 0
    return states * hidden * STORE[store].itemsize + scales + 9 + teacher


def store_states(states, parts, dtype):
    """(stored [T, parts * H], scale float32 [T, parts] or None) of states [T, parts * H]: float8 with a scale for each part of a row.

    value = stored * scale, scale = amax / 448, float8_e4m3fn's largest number; 1 for a row of zeros.
    """
    if dtype != torch.float8_e4m3fn:
        return states.to(dtype), None
    split = states.float().unflatten(1, (parts, -1))
    scale = split.abs().amax(2) / 448  # [T, parts]
    scale = torch.where(scale > 0, scale, 1)
    return (split / scale[:, :, None]).flatten(1).to(dtype), scale


class Shards:
    """A folder of shards: the manifest, an index of the samples, and their tensors read on demand.

    `index` has one row a sample, in the order stored: shard, first row, length, heldout, source, and labels, the number of
    supervised tokens that a drafter can predict (the first two of a sample it never does).
    """

    def __init__(self, folder, verify=False, first=None):
        """verify: check every file's hash, too, which reads all of them. first: of an extraction with --max-disk-gb, finished or not,
        open the held-out shards and so many of the others; default all of a finished one."""
        self.folder, self.verify = Path(folder), verify
        if not self.folder.is_dir():
            raise UserError(f"{folder} is no folder of shards; extract_hidden_states.py makes one")
        if not (self.folder / MANIFEST).exists():
            raise UserError(f"{folder} holds no {MANIFEST}; give a folder that extract_hidden_states.py made")
        self.manifest = read_manifest(self.folder)
        planned, entries = self.manifest["planned"], self.manifest["shards"]
        self.followed = "room" in planned
        if self.followed and first is not None:
            blocks = planned["heldout_blocks"] + first
            if first > (most := fitting(planned)):
                raise UserError(f"--first-shards {first}: of {folder} at most {most} shards beside the held-out ones can be there before "
                                f"training reads them (--max-disk-gb); give at most {most}")
            found = sum(entry["block"] < blocks for entry in entries + self.manifest["empty_blocks"])
            if found < blocks:
                raise UserError(f"{found} of the {blocks} first shards that are wanted of {folder} ({planned['heldout_blocks']} held-out, "
                                f"{first} others) are finished; wait for the rest")
            entries = [entry for entry in entries if entry["block"] < blocks]
        elif not self.manifest["complete"] and self.followed:
            raise UserError(f"{folder} is not finished ({len(entries)} of {planned['blocks']} blocks): train_drafter.py --follow trains "
                            f"meanwhile, build_vocab_map.py --first-shards N counts what is there; if the extraction stopped, give its "
                            f"command again")
        elif not self.manifest["complete"]:
            raise UserError(f"{folder} is not finished ({len(entries)} of {planned['blocks']} blocks); give the extraction's command "
                            f"again and it goes on")
        read = acknowledged(self.folder, planned)
        if gone := sum(entry["block"] in read and not (self.folder / entry["file"]).exists() for entry in entries):
            raise UserError(f"{folder} lacks {gone} of its shards, which were removed after the training that follows had read them; its "
                            f"held-out part stays: extract again without --max-disk-gb for all of them")
        self.entries, self.files, self.teacher_rows = [], [], []
        parts = [np.zeros((0, 6), dtype=np.int64), *(self._read(entry) for entry in entries)]
        listed = {entry["file"] for entry in self.manifest["shards"]}
        if foreign := sorted(file.name for file in self.folder.glob("shard-*.safetensors") if file.name not in listed):
            say(f"{self.folder / foreign[0]} is not listed in the manifest and is not read ({len(foreign)} such files)")
        self.index = np.concatenate(parts)
        if not len(self.index) and first is None:
            raise UserError(f"{folder} holds no samples")

    def extend(self, entry):
        """Open a shard that has been written since; its samples are numbered on, int64 [n]."""
        before = len(self.index)
        self.index = np.concatenate([self.index, self._read(entry)])
        return np.arange(before, len(self.index))

    def close(self, block):
        """Let go of the shards before `block` that are not held out: only then is their place on the disk free."""
        for number, entry in enumerate(self.entries):
            if self.manifest["planned"]["heldout_blocks"] <= entry["block"] < block:
                self.files[number] = self.teacher_rows[number] = None

    def _read(self, entry):
        """Open a shard; its rows of the index, int64 [n, 6]."""
        file = self._open(entry)
        self.entries.append(entry)
        self.files.append(file)
        compact = "teacher_ids" in self.manifest["stored"]
        self.teacher_rows.append(file.get_tensor("teacher_rows").numpy().copy() if compact else None)
        bounds = file.get_tensor("cu_seqlens").numpy()
        mask = np.concatenate([[0], np.cumsum(file.get_tensor("loss_mask").numpy(), dtype=np.int64)])
        rows = np.stack([
            np.full(len(bounds) - 1, len(self.files) - 1), bounds[:-1], np.diff(bounds), file.get_tensor("heldout").numpy(),
            file.get_tensor("source_ids").numpy(), mask[bounds[1:]] - mask[np.minimum(bounds[:-1] + 2, bounds[1:])],
        ], axis=1).astype(np.int64)
        if rows[:, 4].max(initial=0) >= len(self.manifest["sources"]):
            raise UserError(f"{self.folder} holds samples of source {rows[:, 4].max()}, its {MANIFEST} names "
                            f"{len(self.manifest['sources'])}; it was changed after it was written: extract again")
        return rows

    def _open(self, entry):
        path = self.folder / entry["file"]
        if not path.exists():
            raise UserError(f"{path} is listed in the manifest and missing; extract again or restore it")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise UserError(f"{path} has {size} bytes, the manifest says {entry['bytes']}; restore it or extract it again")
        if self.verify and (found := sha256_file(path)) != entry["sha256"]:
            raise UserError(f"{path} has hash {found}, the manifest says {entry['sha256']}: it is damaged; the extraction's command with "
                            f"--verify makes it again")
        try:
            file = safe_open(path, framework="pt")
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors raises its own kinds for a broken header
            raise UserError(f"{path} cannot be read as safetensors ({str(error)[:200]}); extract it again") from None
        rows = {**dict.fromkeys(("input_ids", "aux_hidden_states"), entry["rows"]), "cu_seqlens": entry["samples"] + 1}
        for name in (*rows, "loss_mask", "heldout", "source_ids", *self.manifest["stored"]):
            found = shapes.get(name, [None])[0]
            if found is None or found != rows.get(name, found):
                raise UserError(f"{path} holds {name} of {found or 'no'} rows, the manifest says {rows.get(name, 'it is there')}; it is of "
                                f"another extraction: restore it or extract it again")
        return file

    @property
    def sha256(self):
        """Hash of all shards' content, as the manifest states it; with --max-disk-gb, of what decides that content."""
        return settings_sha256(self.manifest) if self.followed else sha256_json([entry["sha256"] for entry in self.entries])

    @property
    def heldout(self):
        """bool [S]: samples set aside at extraction."""
        return self.index[:, 3].astype(bool)

    def sample(self, number, names=None):
        """dict of the named tensors of sample `number`, default all that are stored: each [T, ...] in its stored dtype.

        float8 states come as bfloat16, with their scale. teacher_ids, int32 [T, C], is -1 in rows that have no teacher.
        Raises UserError for ids that the target does not have, and for states that are not finite where they are used: of the
        lm_head's input only the rows that predict a supervised token.
        """
        names = names or ("input_ids", "loss_mask", *self.manifest["stored"])
        shard, first, length = (int(value) for value in self.index[number, :3])
        file = self.files[shard]
        rows = slice(first, first + length)
        tensors = {name: file.get_slice(name)[rows] for name in names if name not in TEACHER}
        for name in SCALES.keys() & tensors.keys():
            if tensors[name].dtype == torch.float8_e4m3fn:
                scale = file.get_slice(SCALES[name])[rows]  # [T, parts]
                tensors[name] = (tensors[name].float().unflatten(1, (scale.shape[1], -1)) * scale[:, :, None]).flatten(1).bfloat16()
        if "teacher_ids" in names:
            at = self.teacher_rows[shard]
            low, high = np.searchsorted(at, [first, first + length])
            own = torch.from_numpy(at[low:high] - first)
            for name, empty in (("teacher_ids", -1), ("teacher_logprobs", -torch.inf)):
                found = file.get_slice(name)[low:high]
                tensors[name] = found.new_full((length, found.shape[1]), empty).index_copy_(0, own, found)
        where = f"{self.folder / self.entries[shard]['file']}, rows {first}..{first + length - 1} (sample {number})"
        size = self.manifest["target"]["vocab_size"]
        for name in {"input_ids", "target_argmax", "teacher_ids"} & tensors.keys():
            low, high = tensors[name].aminmax()
            if low < -(name == "teacher_ids") or high >= size:
                raise UserError(f"{where}: {name} holds {int(low if low < 0 else high)}, the target's ids are 0..{size - 1}; "
                                f"extract it again")
        for name in SCALES.keys() & tensors.keys():
            used = tensors[name]
            if name == "last_hidden_state" and "loss_mask" in tensors:
                used = used[:-1][tensors["loss_mask"][1:] == 1]
            if not used.isfinite().all():
                raise UserError(f"{where}: {name} holds NaN or infinity; extract it again")
        if "teacher_logprobs" in tensors and tensors["teacher_logprobs"].isnan().any():
            raise UserError(f"{where}: teacher_logprobs holds NaN; extract it again")
        return tensors

    def supervised(self):
        """The supervised tokens, shard by shard: (ids int32 [n], held out bool [n], source int32 [n]).

        Raises UserError for an id that the target does not have.
        """
        size = self.manifest["target"]["vocab_size"]
        for file in self.files:
            keep = file.get_tensor("loss_mask").numpy().astype(bool)
            lengths = np.diff(file.get_tensor("cu_seqlens").numpy())
            aside = np.repeat(file.get_tensor("heldout").numpy().astype(bool), lengths)[keep]
            source = np.repeat(file.get_tensor("source_ids").numpy(), lengths)[keep]
            ids = file.get_tensor("input_ids").numpy()[keep]
            if len(ids) and not 0 <= ids.min() <= ids.max() < size:
                raise UserError(f"{self.folder} holds token id {ids.min() if ids.min() < 0 else ids.max()}, the target's are "
                                f"0..{size - 1}: extract again")
            yield ids, aside, source

    def supervised_counts(self):
        """How often each id is supervised: (int64 [V] in the samples to train on, int64 [V] in the held-out ones)."""
        return count_ids(self.supervised(), self.manifest["target"]["vocab_size"])


def read_manifest(folder):
    manifest = read_json(Path(folder) / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{folder}/{MANIFEST} is of format {manifest.get('format')}, this version reads format {FORMAT}")
    for key, kind in REQUIRED.items():
        if not isinstance(manifest.get(key), kind) or key in USABLE and not USABLE[key](manifest[key]):
            raise UserError(f"{folder}/{MANIFEST} has no usable {key}; it was changed after it was written: extract again")
    if manifest["layers"][-1] >= manifest["target"]["num_layers"]:
        raise UserError(f"{folder}/{MANIFEST} states layers {manifest['layers']} of a target with {manifest['target']['num_layers']}; it "
                        f"was changed after it was written: extract again")
    return manifest


def settings_sha256(manifest):
    """Hash of all that an extraction is begun with and that never changes afterwards."""
    target = [manifest["target"][key] for key in ("tensors_sha256", "text_config_sha256")]
    return sha256_json([target, {key: value for key, value in manifest.items() if key not in FREE}])


def fitting(planned):
    """With --max-disk-gb: how many shards beside the held-out ones can be there before training has read any."""
    sizes = planned["block_bytes"][planned["heldout_blocks"] :]
    return int(np.searchsorted(np.cumsum(sizes), planned["room"], side="right"))


def acknowledged(folder, planned):
    """The blocks, a range, that a training which follows has read for good: they are or may be removed. It ends at the first unread one,
    and is empty without --max-disk-gb."""
    path = Path(folder) / ACKNOWLEDGED
    if "room" not in planned:
        return range(0)
    if not path.exists():
        return range(planned["heldout_blocks"], planned["heldout_blocks"])
    block = read_json(path).get("blocks")
    if type(block) is not int or not planned["heldout_blocks"] <= block <= planned["blocks"]:
        raise UserError(f"{path} acknowledges {block} blocks, {planned['heldout_blocks']}..{planned['blocks']} are possible; it is of "
                        f"another extraction or was edited: restore it")
    return range(planned["heldout_blocks"], block)


def open_shards_target(shards, name=None, revision=None, trust_remote_code=False):
    """The Target that shards were made with: `name`, or where the manifest says it was. It is not loaded."""
    if name:
        return open_target(name, revision, trust_remote_code)
    try:
        return open_target(str(shards.manifest["target"].get("name")), revision, trust_remote_code)
    except UserError as error:
        raise UserError(f"the target of {shards.folder} cannot be read where it was ({error}); give --target, its place now") from None


def check_shards(shards, target, facts, layers, force):
    """Refuse shards of other layers, or of another target or tokenizer than `target`, whose facts() are given.

    Returns warnings: what was let pass by force, now and at the extraction.
    """
    if shards.manifest["layers"] != layers:
        raise UserError(f"{shards.folder} holds layers {shards.manifest['layers']}, layers {layers} are wanted; extract those layers")
    found = [check_same_target(shards.manifest["target"], facts, f"{shards.folder} was", force),
             check_tokenizer(tokenizer_sha256(target.folder), shards, f"the tokenizer of {target.name}", force)]
    if "chat_template_sha256" in shards.manifest and (now := stored_template_sha256(target.folder)) is not None:
        found += other_template({"chat_template_sha256": now or None}, shards.manifest, shards.folder, target.name)
    if shards.manifest.get("forced"):
        found.append(f"{shards.folder} was gone on with by force although these had changed: {', '.join(shards.manifest['forced'])}")
    return [warning for warning in found if warning]


def other_template(facts, made, where, what):
    """Sentences on the chat template and its arguments of `what`, with `facts`, where `where`, with facts `made`, states others."""
    return [f"{what} has {name} {str(facts[key])[:size]}, {where} was made with {str(made[key])[:size]}: they are of other prompts"
            for key, name, size in (("chat_template_sha256", "chat template", 12), ("template_kwargs", "arguments of the template", 200))
            if key in facts and key in made and facts[key] != made[key]]


def check_tokenizer(found, shards, what, force):
    """Refuse when `found`, the hash of `what`, is not that of the tokenizer the shards were made with. Returns a warning if forced."""
    wanted = shards.manifest["tokenizer_sha256"]
    if found == wanted:
        return None
    message = f"{what} has hash {str(found)[:12]}, {shards.folder} was made with {str(wanted)[:12]}"
    if not force:
        raise UserError(f"{message}; use the tokenizer, shards and map that belong together (--force goes on all the same)")
    return message
