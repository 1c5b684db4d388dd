"""The target, read without loading it: its text config, its embedding and lm_head, its hashes, its layers."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from common.cli import UserError
from common.files import read_json, sha256_file, sha256_json, sha256_tensors

EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight",
                   "embed_in.weight", "embeddings.weight")
OTHER_PARTS = ("vision", "visual", "audio", "image", "mtp", "nextn", "draft", "per_layer", "talker", "codec")
USUAL_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
               "intermediate_size", "max_position_embeddings", "head_dim", "layer_types")
SAME_AS = {"kimi_k2": "deepseek_v3"}  # published under a type of its own, with the other's architecture
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt",
                   "added_tokens.json")
PROBE = ("The 3 quick brown foxes' 1,234,567.89 jumps\tover\n\n  it's WE'LL don\u2019t x=f(a[0]);\r\n# "
         "caf\u00e9 na\u00efve \u4f60\u597d\uff0c\u4e16\u754c\u30ab\u30bf\u30ab\u30ca "
         "\u0645\u0631\u062d\u0628\u0627 \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f600\u200d")
PLAIN_DTYPES = ("F32", "BF16", "F16")
VOLATILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "architectures")


@dataclass
class Target:
    """What the project knows of a target. `text` is its text config with the library's defaults filled in."""

    folder: Path
    name: str
    text: dict
    raw_text: dict  # as the file states it: hashed, so that the hash does not change with the library
    quantisation: dict  # the quantization_config that its config states, {} where it states none
    model_class: str
    weights: dict  # tensor name -> file; {} of a target whose config alone was read
    embedding_name: str | None
    lm_head_name: str | None
    vocab_size: int  # rows of the lm_head, padding rows included
    hidden_size: int
    num_layers: int
    logit_softcap: float | None
    logit_scale: float

    def tensor(self, name):
        with safe_open(self.weights[name], framework="pt") as file:
            return file.get_tensor(name)

    def find(self, ending):
        """Name of the text model's tensor that ends so, None where there is none; of several the shortest."""
        return _find(self.weights, (ending,))

    def embedding(self):
        """[V, H] in the dtype of the file: the raw table, without any scaling that the model applies."""
        return self.tensor(self.embedding_name)

    def lm_head(self):
        """[V, H] in the dtype of the file."""
        return self.tensor(self.lm_head_name)

    def sample_sha256(self):
        """Hash of the first 2048 numbers of up to about 1,000 tensors, in whatever files they lie: tells a
        fine-tune that left lm_head and embedding alone, without reading all weights."""
        names = sorted(self.weights.keys() - {self.lm_head_name, self.embedding_name})  # hashed whole
        some = names[:: max(1, len(names) // 1000)]
        return sha256_tensors(self.tensor(name).flatten()[:2048] for name in some)

    def facts(self, lm_head=None, embedding=None):
        """The JSON block that says which target shards, maps and drafters were made for. Tensors at hand are
        not read again."""
        lm_head = self.lm_head() if lm_head is None else lm_head
        tensors = [lm_head]
        if self.lm_head_name != self.embedding_name:
            tensors.append(self.embedding() if embedding is None else embedding)
        stable = {key: value for key, value in self.raw_text.items() if key not in VOLATILE}
        return {
            "name": self.name,
            "model_class": self.model_class,
            "text_config": self.raw_text,
            "text_config_sha256": sha256_json(stable),
            "tensors_sha256": sha256_tensors(tensors),
            "sample_sha256": self.sample_sha256(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "logit_softcap": self.logit_softcap,
            "logit_scale": self.logit_scale,
        }


def open_target(name, revision=None, trust_remote_code=False, config_only=False):
    """Read the target's config and the headers of its safetensors; of the latter nothing with config_only,
    for a plan, whose vocab_size is then what the config states.

    `name` is a folder or a hub id. Raises UserError when it is neither, has no safetensors, no embedding, or
    no lm_head while its embedding is not tied.
    """
    folder = fetch(name, revision, config_only)
    raw = read_json(folder / "config.json")
    config = load_config(folder, trust_remote_code)
    text_config = config.get_text_config(decoder=True)
    # some families spell these otherwise (GPT-2: n_layer); the config object answers to the usual names
    usual = {key: getattr(text_config, key) for key in USUAL_NAMES if hasattr(text_config, key)}
    text = usual | text_config.to_dict()
    check_numbers(folder, text)
    architectures = raw.get("architectures") or [""]
    facts = dict(
        folder=folder, name=str(name), text=text, raw_text=_raw_text(raw),
        quantisation=stated_quantisation(raw, _raw_text(raw)), model_class=architectures[0],
        num_layers=text["num_hidden_layers"], logit_softcap=text.get("final_logit_softcapping"),
        logit_scale=_logit_scale(text),
    )
    if config_only:
        if not isinstance(text.get("vocab_size"), int):
            raise UserError(f"{folder}: its config states no vocab_size; give a folder with the weights")
        return Target(**facts, weights={}, embedding_name=None, lm_head_name=None,
                      vocab_size=text["vocab_size"], hidden_size=text["hidden_size"])
    weights = _weight_files(folder)
    embedding_name = _find(weights, EMBEDDING_NAMES)
    if embedding_name is None:
        raise UserError(f"{folder} holds no token embedding (a tensor named like model.embed_tokens.weight); "
                        "get the complete weights, or a checkpoint that leaves it unquantised")
    tied = bool(text.get("tie_word_embeddings", False) or getattr(config, "tie_word_embeddings", False))
    stated = bool(raw.get("tie_word_embeddings") or _raw_text(raw).get("tie_word_embeddings"))
    lm_head_name = _head_name(folder, weights, embedding_name, tied, stated)
    for part in (embedding_name, lm_head_name):
        shape = _checked_shape(folder, weights[part], part, text)
    vocab_size, hidden_size = shape
    return Target(**facts, weights=weights, embedding_name=embedding_name, lm_head_name=lm_head_name,
                  vocab_size=vocab_size, hidden_size=hidden_size)


def check_numbers(folder, text):
    """Refuse a text config without the numbers that everything is sized by, or with ones that cannot be."""
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if text.get(key) is None:
            raise UserError(f"{folder}: its config states no {key}; it is no decoder-only model that can be "
                            "used here")
    for key in (*USUAL_NAMES[:4], "max_position_embeddings", "head_dim", "vocab_size"):
        if text.get(key) is not None and not (type(text[key]) is int and text[key] > 0):
            raise UserError(f"{folder}: {key} is {text[key]!r} in its config, an integer above 0 is wanted; "
                            "get the config that belongs to the weights")
    heads, kv_heads = text["num_attention_heads"], text.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise UserError(f"{folder}: its config has {kv_heads} key-value heads for {heads} heads, a divisor "
                        "of these is wanted; get the config that belongs to the weights")


def _head_name(folder, weights, embedding_name, tied, stated):
    """Name of the lm_head's tensor, the embedding's where they are tied: by the config with what its class
    takes for granted, or as the file itself states."""
    name = _find(weights, ("lm_head.weight", "embed_out.weight", "output.weight"))
    if name is None and not tied:
        raise UserError(f"{folder} holds no lm_head and its config does not tie it to the embedding "
                        f"(tie_word_embeddings is false); get the complete weights")
    if name is None:
        return embedding_name
    if not stated:  # one that is there is used, whatever a class takes for granted
        return name
    if not same_rows(weights, name, embedding_name):
        raise UserError(f"{folder}: its config ties the lm_head to the embedding, and {name} is another "
                        "tensor than that: engines would take the one and transformers the other; say "
                        "tie_word_embeddings false in config.json, or remove the tensor")
    return embedding_name


def _checked_shape(folder, file, name, text):
    """[V, H] of an embedding or lm_head, after a look at its dtype and at what the config says."""
    shape, dtype = stored_as(file, name)
    if len(shape) != 2 or dtype not in PLAIN_DTYPES:
        raise UserError(f"{folder}: its {name} is {dtype} of shape {shape}, {', '.join(PLAIN_DTYPES)} of "
                        "[V, H] is wanted; take a checkpoint that leaves it unquantised")
    stated = [text.get("vocab_size", shape[0]), text["hidden_size"]]
    if shape != stated:
        raise UserError(f"{folder}: its {name} is {shape}, its config says {stated} for vocab_size and "
                        "hidden_size; get the config that belongs to the weights")
    return shape


def same_rows(weights, first, second):
    """Whether two tensors [V, H] of the files begin with the same rows."""
    heads = []
    for name in (first, second):
        with safe_open(weights[name], framework="pt") as handle:
            heads.append(handle.get_slice(name)[:64])
    return heads[0].shape == heads[1].shape and bool((heads[0] == heads[1]).all())


def stored_as(file, name):
    """(shape, dtype as safetensors spells it) of one tensor."""
    with safe_open(file, framework="pt") as handle:
        part = handle.get_slice(name)
        return part.get_shape(), part.get_dtype()


def fetch(name, revision=None, config_only=False):
    """A local folder for `name`: itself, or the hub's snapshot of it, with config_only without weights."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise UserError(f"{folder} holds no config.json; give the folder of a Hugging Face model")
        return folder
    if str(name).count("/") > 1 or str(name).startswith((".", "/", "~")):
        raise UserError(f"{name} does not exist; give the folder of a Hugging Face model or a hub id")
    from huggingface_hub import snapshot_download

    try:
        files = [kind for kind in HUB_FILES if not config_only or kind != "*.safetensors"]
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=files))
    except Exception as error:  # the hub library raises many kinds; each means that it could not be had
        words = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise UserError(f"{name} is no folder here and could not be had from the hub ({words})") from None


def load_config(folder, trust_remote_code=False):
    """The target's config by transformers' own class; by code that comes with the model only where
    transformers has none and `trust_remote_code` allows it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    try:
        if kind in SAME_AS:
            own = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
            return CONFIG_MAPPING[SAME_AS[kind]].from_dict(own)
        own_code = trust_remote_code and kind not in CONFIG_MAPPING
        return AutoConfig.from_pretrained(folder, trust_remote_code=own_code)
    except Exception as error:  # its class raises many kinds for values that it does not expect
        hint = "get the config that belongs to the weights"
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            hint = "--trust-remote-code allows code that comes with the model"
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder}: transformers cannot read its config ({reason}); {hint}") from None


def native_class(config, name):
    """transformers' own model class for a config, None where it has none.

    name: as the checkpoint states it in `architectures`. The hub spells some otherwise than transformers,
    which then goes by the type of the config.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    named = getattr(transformers, name, None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    for models in (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in models:
            return models[type(config)]
    return None


def load_tokenizer(target, trust_remote_code=False):
    """The Target's tokenizer.

    Raises UserError when the folder has none, when it names code of its own that is not allowed (what
    transformers takes in its place may give other ids), and when its vocabulary is longer than the lm_head.
    """
    from transformers import AutoTokenizer

    folder, settings = target.folder, target.folder / "tokenizer_config.json"
    if not settings.exists() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UserError(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model); put the target's "
                        "tokenizer files there")
    code = (read_json(settings).get("auto_map") or {}) if settings.exists() else {}
    if "AutoTokenizer" in code and not trust_remote_code:
        raise UserError(f"{folder}: its tokenizer is code of its own, without which some texts get other ids "
                        "than the engines serve; look at it and give --trust-remote-code")
    try:
        # without a config it would read one itself, which not every type lets it
        config = load_config(folder, trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise UserError(f"{folder}: its tokenizer cannot be loaded "
                        f"({str(error).splitlines()[0][:300]})") from None
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    longest = max((token for token in tokenizer.get_vocab().values() if token not in added), default=0)
    if longest >= target.vocab_size:
        raise UserError(f"{folder}: its tokenizer has ids up to {longest} and its lm_head "
                        f"{target.vocab_size} rows; use the tokenizer of these weights")
    return tokenizer


def tokenizer_sha256(folder):
    """Hash of the tokenizer's own files, whichever of them there are."""
    files = [Path(folder) / name for name in TOKENIZER_FILES if (Path(folder) / name).exists()]
    return sha256_json({file.name: sha256_file(file) for file in files})


def probe_sha256(tokenizer):
    """Hash of the ids of a text with all that tokenizers treat differently: the same files give others where
    other code reads them."""
    return sha256_json(tokenizer(PROBE, add_special_tokens=False)["input_ids"])


def chat_template_sha256(tokenizer):
    """Hash of the tokenizer's chat template, None where it has none."""
    return sha256_json(tokenizer.chat_template) if tokenizer.chat_template else None


def stored_template_sha256(folder):
    """The same hash from the files that a tokenizer is loaded from, "" where they hold no template, None
    where that cannot be told."""
    folder = Path(folder)
    if (folder / "additional_chat_templates").exists():
        return None
    if (folder / "chat_template.jinja").exists():
        return sha256_json((folder / "chat_template.jinja").read_text(encoding="utf-8"))
    if not (folder / "tokenizer_config.json").exists():
        return None
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several with names
        return None
    return sha256_json(template) if template else ""


def stated_quantisation(raw, text):
    """The quantization_config of a config.json or of the text config in it, {} where neither states one."""
    return raw.get("quantization_config") or text.get("quantization_config") or {}


def plain_weight(target, name):
    """float32 of a target's tensor, fp8 multiplied by its scale (one number, one a row, or one a block).

    None where it is stored otherwise: packed to 4 bits, say.
    """
    tensor = target.tensor(name)
    if tensor.is_floating_point() and tensor.element_size() >= 2:
        return tensor.float()
    scales = [f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in target.weights]
    if not tensor.is_floating_point() or not scales:
        return None
    tensor, scale = tensor.float(), target.tensor(scales[0]).float()
    if scale.numel() == 1:
        return tensor * scale.flatten()
    if scale.shape in (tensor.shape[:1], (len(tensor), 1)):
        return tensor * scale.view(-1, 1)
    block = target.quantisation.get("weight_block_size") or (128, 128)
    if scale.shape != tuple(-(-size // step) for size, step in zip(tensor.shape, block, strict=True)):
        return None
    whole = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return tensor * whole[: tensor.shape[0], : tensor.shape[1]]


def default_layers(num_layers):
    """The HF hidden_states indices that SGLang, vLLM and llama.cpp capture by default: [2, n//2, n-3].

    Raises UserError when they are not distinct (n < 7).
    """
    if num_layers < 7:
        raise UserError(f"the target has {num_layers} layers, and the default of the engines, [2, n//2, "
                        "n-3], needs at least 7: name three with --layers, e.g. --layers "
                        f"{example_layers(num_layers)}")
    return [2, num_layers // 2, num_layers - 3]


def example_layers(num_layers):
    if num_layers < 4:
        raise UserError(f"the target has {num_layers} layers; three different ones to capture need at least "
                        "4")
    return ",".join(str(layer) for layer in sorted({1, max(num_layers // 2, 1), num_layers - 1}))


def parse_layers(text, num_layers):
    """`auto` or three HF hidden_states indices like `2,15,27`: distinct, ascending, in 1..n-1."""
    if text == "auto":
        return default_layers(num_layers)
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--layers {text} is neither auto nor three numbers like 2,15,27") from None
    if len(layers) != 3 or layers != sorted(set(layers)) or layers[0] < 1 or layers[-1] > num_layers - 1:
        raise UserError(f"--layers {text}: exactly three different ascending numbers in 1..{num_layers - 1} "
                        "are wanted (0 is the embedding, i the output of decoder layer i-1)")
    return layers


def process_logits(logits, softcap, scale):
    """What the target does to its lm_head's output: scale (Cohere, Granite), then soft cap (Gemma 2)."""
    if scale != 1.0:
        logits = logits * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    return logits


@torch.inference_mode()
def choices(target, lm_head, last, rows=None, candidates=0):
    """(int64 [N] the target's greedy choice for lm_head inputs [N, H]; of `rows`, int64 [M] ascending, the
    likeliest tokens int64 [M, C] and their log-probabilities float32 [M, C]), without a [N, V] float32
    tensor.

    lm_head: a function of [n, H] to [n, V]. Scale and soft cap keep the order, unless the scale is negative,
    which no model has. The choice is among the candidates.
    """
    chosen, ids, logprobs = [], [], []
    chunk = 2048 if last.is_cuda else 256  # a CPU is faster where it need not ask for fresh memory
    for start in range(0, len(last), chunk):
        logits = lm_head(last[start : start + chunk])
        chosen.append(logits.max(-1).indices)  # of bfloat16 max is faster than argmax
        own = rows[(rows >= start) & (rows < start + chunk)] - start if candidates else last.new_zeros(0)
        # a CPU is twice as fast on pieces that stay in its cache, and faster by log_softmax than by logsumexp
        piece = 256 if last.is_cuda else max(1, 2**20 // logits.shape[1])
        for part in own.split(piece) if len(own) else ():
            exact = process_logits(logits[part].float(), target.logit_softcap, target.logit_scale)  # [m, V]
            best, order = exact.log_softmax(-1).topk(candidates, -1)
            left_out = (order != chosen[-1][part, None]).all(1)  # of equals topk may take another
            order[left_out, -1], best[left_out, -1] = chosen[-1][part][left_out], best[left_out, 0]
            ids.append(order)
            logprobs.append(best)
    empty = [last.new_zeros(0, candidates, dtype=torch.int64)]
    return torch.cat(chosen), torch.cat(ids or empty), torch.cat(logprobs or [part.float() for part in empty])


def _raw_text(raw):
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(raw.get(key), dict):
            return raw[key]
    return raw


def _logit_scale(text):
    if text.get("logit_scale") is not None:  # Cohere multiplies
        return float(text["logit_scale"])
    if text.get("logits_scaling") is not None:  # Granite divides
        return 1.0 / float(text["logits_scaling"])
    return float(text.get("lm_head_multiplier") or 1.0)  # Falcon-H1


def _weight_files(folder):
    """{tensor name: file}. Raises UserError for a file that is missing or cut, or lacks what the index
    says."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists() or not index.exists():
        if not single.exists():
            raise UserError(f"{folder} holds no model.safetensors and no model.safetensors.index.json; other "
                            "formats are not read")
        return dict.fromkeys(_names(single), single)
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise UserError(f"{index} has no weight_map of tensor names to files; get the complete weights")
    held = {}
    for file in sorted(set(named.values())):
        if not (folder / file).is_file():
            raise UserError(f"{folder}: its index names {file}, which is not there; get the complete weights")
        held[file] = _names(folder / file)
    lacking = [name for name, file in named.items() if name not in held[file]]
    if lacking:
        raise UserError(f"{folder / named[lacking[0]]} lacks {lacking[0]}, which its index names "
                        f"({len(lacking)} such tensors); get the complete weights")
    return {name: folder / file for name, file in named.items()}


def _names(file):
    """Names of a safetensors' tensors, after its header was compared with its size."""
    try:
        with safe_open(file, framework="pt") as handle:
            return set(handle.keys())
    except Exception as error:  # safetensors raises its own kinds for a broken header or a cut file
        raise UserError(f"{file} cannot be read as safetensors ({str(error)[:200]}); get the complete "
                        "weights") from None


def _find(weights, endings):
    for ending in endings:
        found = [name for name in weights if (name == ending or name.endswith("." + ending))
                 and not any(part in name.lower() for part in OTHER_PARTS)]
        if found:
            return min(found, key=len)
    return None


def generation_config(target):
    """What the target's generation_config.json states, {} where it has none."""
    file = target.folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def end_ids(target, tokenizer):
    """Every end-of-sequence id, ascending, also those beyond the lm_head: of the generation config, the
    config and the tokenizer."""
    found = set()
    for stated in (tokenizer, generation_config(target), target.text, target.raw_text):
        value = stated.eos_token_id if stated is tokenizer else stated.get("eos_token_id")
        tokens = value if isinstance(value, list) else [value]
        found.update(token for token in tokens if type(token) is int and token >= 0)
    return sorted(found)


def stop_ids(target, tokenizer):
    """The end-of-sequence ids that the target can say, ascending: engines stop at all of them."""
    return [token for token in end_ids(target, tokenizer) if token < target.vocab_size]
