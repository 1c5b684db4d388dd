"""The EAGLE-3 drafter: its model, its config.json, and the folder that SGLang and vLLM load as it stands.

One decoder layer over the target's own states. For token ids x[0..T) and target states g[t] (three captured
layers, concatenated), row t pairs state t with token t+1 and predicts token t+2:

    h      = fc(g[t])                                              # [N, H]
    a      = cat(input_layernorm(embed(x[t+1])), hidden_norm(h))   # [N, 2H] into q, k, v
    h      = h + attention(a);  h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))                                      # h BEFORE norm is the next step's h
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from common.cli import UserError
from common.files import read_json, replace_file, write_json
from common.target import default_layers
from common.vocab import check_map, map_sha256

ARCHITECTURE = "LlamaForCausalLMEagle3"
INTEGERS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "draft_vocab_size", "max_position_embeddings")  # that a drafter's config must state
DTYPES = ("float32", "bfloat16", "float16")


class RMSNorm(nn.RMSNorm):
    """Computed in float32 and rounded once, as the engines do, whatever the dtypes of input and weight."""

    def forward(self, x):
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class Drafter(nn.Module):
    """Parameters carry the exported names. `config` is the exported config.json as a dict."""

    recompute = False  # in training: the MLP of every depth is computed again in the backward pass, not kept

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        hidden, inner, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]

        def linear(rows, columns):
            return nn.Linear(columns, rows, bias=False)

        self.fc = linear(hidden, 3 * config["target_hidden_size"])
        self.midlayer = nn.ModuleDict({
            "input_layernorm": RMSNorm(hidden, eps=eps),
            "hidden_norm": RMSNorm(hidden, eps=eps),
            "post_attention_layernorm": RMSNorm(hidden, eps=eps),
            "self_attn": nn.ModuleDict({
                "q_proj": linear(self.heads * self.head_dim, 2 * hidden),
                "k_proj": linear(self.kv_heads * self.head_dim, 2 * hidden),
                "v_proj": linear(self.kv_heads * self.head_dim, 2 * hidden),
                "o_proj": linear(hidden, self.heads * self.head_dim),
            }),
            "mlp": nn.ModuleDict({
                "gate_proj": linear(inner, hidden),
                "up_proj": linear(inner, hidden),
                "down_proj": linear(hidden, inner),
            }),
        })
        self.norm = RMSNorm(hidden, eps=eps)
        self.lm_head = linear(config["draft_vocab_size"], hidden)
        inverse_frequencies, self.rope_factor = rotary_settings(config)
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)

    def fuse(self, embedded, hidden):
        """a = cat(norm(e), norm(h)): [..., H] and [..., H] to [..., 2H]."""
        norms = self.midlayer["input_layernorm"], self.midlayer["hidden_norm"]
        return torch.cat([norms[0](embedded), norms[1](hidden)], dim=-1)

    def queries(self, fused, positions):
        """[..., 2H] and int [...] to rotated queries [..., heads, d]."""
        q = self.midlayer["self_attn"]["q_proj"](fused).unflatten(-1, (self.heads, self.head_dim))
        return self.rotate(q, positions)

    def keys_values(self, fused, positions):
        """[..., 2H] and int [...] to rotated keys [..., kv, d] and values [..., kv, d]."""
        attention = self.midlayer["self_attn"]
        k = attention["k_proj"](fused).unflatten(-1, (self.kv_heads, self.head_dim))
        v = attention["v_proj"](fused).unflatten(-1, (self.kv_heads, self.head_dim))
        return self.rotate(k, positions), v

    def finish_layer(self, hidden, attended):
        """Residual of the raw h, output projection, MLP: [..., H], [..., heads*d] to the new h, [..., H],
        before norm."""
        hidden = hidden + self.midlayer["self_attn"]["o_proj"](attended)
        mlp = self.midlayer["mlp"]
        x = self.midlayer["post_attention_layernorm"](hidden)
        return hidden + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))

    def rotate(self, x, positions):
        """Rotary embedding, half-split convention. x: [..., heads, d], positions: int [...]."""
        angles = positions[..., None].float() * self.inverse_frequencies  # [..., d/2]
        cos = (angles.cos() * self.rope_factor).to(x.dtype)[..., None, :]
        sin = (angles.sin() * self.rope_factor).to(x.dtype)[..., None, :]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotary_settings(config):
    """(inverse frequencies float32 [d/2], factor on cos and sin) of a config, as transformers computes
    them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    heads, width = config["num_attention_heads"], config["head_dim"]
    llama = LlamaConfig(
        hidden_size=heads * width,  # any that the heads divide: others are refused, and only head_dim counts
        num_attention_heads=heads, head_dim=width, rope_parameters=dict(config["rope_parameters"]),
        max_position_embeddings=config["max_position_embeddings"],
    )
    rotary = LlamaRotaryEmbedding(llama)
    return rotary.inv_freq.float().clone(), float(rotary.attention_scaling)


def drafter_config(target, draft_vocab, layers):
    """The exported config.json for a drafter of `target`: nothing of MoE, quantisation or biases.

    layers: three HF hidden_states indices. Raises UserError for a target whose drafter could not be loaded.
    """
    text, hidden = target.text, target.hidden_size
    if text["hidden_size"] != hidden:
        raise UserError(f"the target's lm_head is {hidden} wide and its hidden size {text['hidden_size']}: "
                        f"such targets are not supported")
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or hidden // heads
    if text.get("kv_lora_rank") is not None:  # MLA's head_dim is a part of a head: plain heads are taken
        kv_heads, head_dim = heads, hidden // heads
    if head_dim % 2:
        raise UserError(f"the target's heads are {head_dim} wide, an odd number, which rotary embeddings "
                        f"cannot have: not supported")
    intermediate = text.get("intermediate_size") or 4 * hidden
    if isinstance(intermediate, (list, tuple)):  # one a layer
        intermediate = intermediate[0]
    rope = _rope_parameters(text)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": hidden, "target_hidden_size": hidden, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab,
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": text.get("rms_norm_eps") or 1e-6,
        "rope_parameters": rope, "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "bos_token_id": text.get("bos_token_id"), "eos_token_id": text.get("eos_token_id"),
        "torch_dtype": "bfloat16",
        **layer_ids(layers, target.num_layers, target.model_class),
    }


def layer_ids(layers, num_layers, model_class):
    """The config entries that name the captured layers, given as HF hidden_states indices.

    The engines' default needs none. Otherwise vLLM and llama.cpp read the top-level list as HF indices, and
    SGLang only the nested one, to which it adds 1 - except for DeepSeek-V2/V3 style classes, where it does so
    only if the first id is 1. Raises UserError for [1, b, c] on those.
    """
    if num_layers >= 7 and layers == default_layers(num_layers):
        return {}
    nested = [layer - 1 for layer in layers]
    if model_class.startswith(("DeepseekV2", "DeepseekV3", "KimiK2", "KimiK25")):
        if layers[0] == 1:
            raise UserError(f"--layers {layers}: SGLang cannot be told to capture layer 1 of a "
                            f"{model_class}; take 2 or more")
        if layers[0] != 2:
            nested = layers
    return {"eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested}}


def captured_layers(config, num_layers, folder):
    """The three HF hidden_states indices that a drafter reads, as its `config` or the engines' default says.

    Raises UserError where they are no three ascending ones of a target of `num_layers`.
    """
    eagle = config.get("eagle_config") or {}
    layers = (config.get("training") or {}).get("layers") or config.get("eagle_aux_hidden_state_layer_ids")
    try:
        if not layers and eagle.get("eagle_aux_hidden_state_layer_ids"):
            layers = [layer + 1 for layer in eagle["eagle_aux_hidden_state_layer_ids"]]
        layers = layers or default_layers(num_layers)
        usable = [type(layer) for layer in layers] == [int] * 3
        usable = usable and 1 <= layers[0] < layers[1] < layers[2] < num_layers
    except (TypeError, AttributeError):
        layers, usable = layers or eagle, False
    if not usable:
        raise UserError(f"{folder} reads layers {layers}; three ascending ones in 1..{num_layers - 1} are "
                        f"wanted for this target")
    return layers


def save_drafter(folder, state, config, rows=None):
    """Write config.json and model.safetensors, each atomically, into `folder` (made if missing).

    state: the drafter's state dict; rows: int64 [D] target ids, None for the full vocabulary.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}
    if rows is not None:
        rows = torch.as_tensor(rows, dtype=torch.int64)
        tensors["d2t"] = rows - torch.arange(len(rows))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, rows, True)
    metadata = {"format": "pt"}
    replace_file(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata=metadata))
    write_json(folder / "config.json", config)


def load_drafter(folder, dtype=torch.float32, ordered=True):
    """(Drafter in eval mode, rows int64 [D] target ids or None: the full vocabulary) of an exported folder.

    Raises UserError for an ordinary model, tensors that are missing, unknown or of another shape, a broken
    map, or one that is not the map that the drafter was trained with. ordered=False takes a map whose target
    ids do not ascend, for whoever sorts its rows.
    """
    folder = Path(folder)
    config = _read_config(folder)
    try:
        config["rope_parameters"] = _rope_parameters(config)
        config.setdefault("target_hidden_size", config["hidden_size"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        with torch.device("meta"):
            wanted = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    except Exception as error:  # numbers that make no model: torch and transformers raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: its config describes no drafter ({reason}); export it again") from None
    file = folder / "model.safetensors"
    if not file.exists():
        raise UserError(f"{folder} holds no model.safetensors; export the drafter again")
    try:
        tensors = load_file(file)
    except Exception as error:  # safetensors raises its own kinds for a broken header
        raise UserError(f"{file} cannot be read as safetensors ({str(error)[:200]}); export the drafter "
                        f"again") from None
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    tensors.pop("embed_tokens.weight", None)  # the target's is used, as in the engines
    _check_tensors(folder, tensors, wanted)
    rows = _map_rows(folder, config, d2t, t2d, ordered)
    drafter = Drafter(config)
    drafter.load_state_dict(tensors)
    return drafter.to(dtype).eval(), rows


def check_embedding(folder, target):
    """Refuse a drafter with an embedding of its own: vLLM would take it, and SGLang the target's."""
    with safe_open(Path(folder) / "model.safetensors", framework="pt") as handle:
        names = handle.keys()
        if "embed_tokens.weight" not in names:
            return
        own = handle.get_tensor("embed_tokens.weight")
    wanted = target.embedding()
    if own.shape != wanted.shape or not torch.equal(own.to(wanted.dtype), wanted):
        raise UserError(f"{folder} holds an embed_tokens.weight, {list(own.shape)}, that is not the one of "
                        f"{target.name}, {list(wanted.shape)}; export the drafter again without it")


def _read_config(folder):
    """The config.json of a drafter's folder, after what can be said of it before a model is made."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the folder of a drafter, as train_drafter.py writes it")
    config = read_json(folder / "config.json")
    if config.get("architectures") != [ARCHITECTURE]:
        raise UserError(f"{folder} is no EAGLE-3 drafter: its config names {config.get('architectures')}, "
                        f"{[ARCHITECTURE]} is wanted; give a folder that train_drafter.py wrote")
    for key in INTEGERS:
        if type(config.get(key)) is not int:
            raise UserError(f"{folder}: {key} is {config.get(key)!r} in its config, an integer is wanted; "
                            f"export the drafter again")
    if not isinstance(config.get("rms_norm_eps"), float):
        raise UserError(f"{folder}: rms_norm_eps is {config.get('rms_norm_eps')!r} in its config, a number "
                        f"like 1e-6 is wanted; export the drafter again")
    config["torch_dtype"] = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if config["torch_dtype"] not in DTYPES:
        raise UserError(f"{folder}: torch_dtype is {config['torch_dtype']!r} in its config; "
                        f"{', '.join(DTYPES)} are known; export the drafter again")
    if config.get("norm_before_residual"):
        raise UserError(f"{folder} is of the kind with norm_before_residual, which SGLang does not know; use "
                        f"one without")
    if not _usable(config.get("training") or {}):
        raise UserError(f"{folder}: its config has no usable training block (its target, template_kwargs, "
                        f"coverage); export the drafter again")
    return config


def _usable(training):
    """Whether a training block holds what is read of it: objects, and shares of 1 or None."""
    if not isinstance(training, dict):
        return False
    shares = [training.get(key) for key in ("coverage", "coverage_heldout")]
    return (all(isinstance(training.get(key) or {}, dict) for key in ("target", "template_kwargs"))
            and all(share is None or type(share) in (int, float) and 0 <= share <= 1 for share in shares))


def _check_tensors(folder, tensors, wanted):
    """Refuse tensors of other names or shapes than `wanted`, {name: shape}, or without finite numbers."""
    for name in sorted(wanted.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != wanted.get(name):
            raise UserError(f"{folder}: tensor {name} is {found}, {wanted.get(name, 'no such tensor')} is "
                            f"wanted; export the drafter again")
        if not tensors[name].is_floating_point():
            raise UserError(f"{folder}: tensor {name} is {tensors[name].dtype}, floating-point weights are "
                            f"wanted; export the drafter again")
        if not tensors[name].float().isfinite().all():
            raise UserError(f"{folder}: tensor {name} holds NaN or infinity; export the drafter again, or "
                            f"train it with a lower --lr")


def _map_rows(folder, config, d2t, t2d, ordered):
    """int64 [D] target ids of the lm_head's rows, None for the full vocabulary, as the config wants them."""
    size, vocab_size = config["draft_vocab_size"], config["vocab_size"]
    if size == vocab_size:
        if d2t is not None:
            raise UserError(f"{folder} has the full vocabulary and a d2t besides, which vLLM refuses; export "
                            f"it without")
        return None
    if d2t is None or t2d is None:
        raise UserError(f"{folder} has a draft vocabulary of {size} and no d2t and t2d to say which tokens; "
                        f"export the drafter again")
    if d2t.is_floating_point():  # check_map refuses it; numpy has no bfloat16 to tell it with
        d2t = d2t.float()
    rows = torch.from_numpy(check_map(d2t.numpy(), t2d.bool().numpy(), folder, ordered))
    if len(rows) != size or len(t2d) != vocab_size:
        raise UserError(f"{folder}: its map is {len(rows)} of {len(t2d)} ids, its config says {size} of "
                        f"{vocab_size}; export the drafter again")
    stated, found = (config.get("training") or {}).get("map_sha256"), map_sha256(d2t)
    if stated is not None and stated != found:
        raise UserError(f"{folder}: its d2t has hash {found[:12]}, and its lm_head was trained with the map "
                        f"{str(stated)[:12]}: a map was copied over, with which its rows mean other tokens; "
                        f"put back the model.safetensors that training wrote")
    return rows


def _rope_parameters(text):
    """Rotary settings as one dict with rope_type and rope_theta, from either spelling.

    Of Gemma 3's two the global one.
    """
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    old_spelling = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or old_spelling or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0)
    rope.pop("partial_rotary_factor", None)  # the draft rotates whole heads
    return rope
