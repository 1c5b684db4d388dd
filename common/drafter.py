"""The EAGLE-3 drafter: its model, its config.json, and the folder that SGLang and vLLM load as it stands.

One decoder layer over the target's own states. For token ids x[0..T) and target states g[t] (three captured layers,
concatenated), row t pairs state t with token t+1 and predicts token t+2:

    h      = fc(g[t])                                       # [N, H]
    a      = cat(input_layernorm(embed(x[t+1])), hidden_norm(h))   # [N, 2H] into q, k, v
    h      = h + attention(a);  h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))                               # h BEFORE norm is the next step's h
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from common.cli import UserError
from common.files import read_json, replace_file, write_json
from common.target import default_layers
from common.vocab import check_map, map_sha256, rows_to_d2t

ARCHITECTURE = "LlamaForCausalLMEagle3"


class RMSNorm(nn.RMSNorm):
    """Computed in float32 and rounded once, as the engines do, whatever the dtypes of input and weight."""

    def forward(self, x):
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class Drafter(nn.Module):
    """Parameters carry the exported names. `config` is the exported config.json as a dict."""

    recompute = False  # when training: the MLP of every depth is computed again in the backward pass instead of kept

    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads, self.head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        eps = config["rms_norm_eps"]

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
                "gate_proj": linear(inner, hidden), "up_proj": linear(inner, hidden), "down_proj": linear(hidden, inner),
            }),
        })
        self.norm = RMSNorm(hidden, eps=eps)
        self.lm_head = linear(config["draft_vocab_size"], hidden)
        inverse_frequencies, self.rope_factor = rotary_settings(config)
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)

    def fuse(self, embedded, hidden):
        """a = cat(norm(e), norm(h)): [N, H] and [N, H] to [N, 2H]."""
        return torch.cat([self.midlayer["input_layernorm"](embedded), self.midlayer["hidden_norm"](hidden)], dim=-1)

    def queries(self, fused, positions):
        """[N, 2H] and int [N] to rotated queries [N, heads, d]."""
        q = self.midlayer["self_attn"]["q_proj"](fused).view(-1, self.heads, self.head_dim)
        return self.rotate(q, positions)

    def keys_values(self, fused, positions):
        """[N, 2H] and int [N] to rotated keys [N, kv, d] and values [N, kv, d]."""
        attention = self.midlayer["self_attn"]
        k = attention["k_proj"](fused).view(-1, self.kv_heads, self.head_dim)
        v = attention["v_proj"](fused).view(-1, self.kv_heads, self.head_dim)
        return self.rotate(k, positions), v

    def finish_layer(self, hidden, attended):
        """Residual of the raw h, output projection, MLP: [N, H] and [N, heads*d] to the new h, [N, H], before norm."""
        hidden = hidden + self.midlayer["self_attn"]["o_proj"](attended)
        mlp = self.midlayer["mlp"]
        x = self.midlayer["post_attention_layernorm"](hidden)
        return hidden + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))

    def rotate(self, x, positions):
        """Rotary embedding, half-split convention. x: [N, heads, d], positions: int [N]."""
        angles = positions[:, None].float() * self.inverse_frequencies[None]  # [N, d/2]
        cos = (angles.cos() * self.rope_factor).to(x.dtype)[:, None]
        sin = (angles.sin() * self.rope_factor).to(x.dtype)[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotary_settings(config):
    """(inverse frequencies float32 [d/2], factor on cos and sin) of an exported config, as transformers computes them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    llama = LlamaConfig(
        # only head_dim counts; a hidden size that the heads do not divide, as some targets have, would be refused
        hidden_size=config["num_attention_heads"] * config["head_dim"], num_attention_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        max_position_embeddings=config["max_position_embeddings"], rope_parameters=dict(config["rope_parameters"]),
    )
    rotary = LlamaRotaryEmbedding(llama)
    return rotary.inv_freq.float().clone(), float(rotary.attention_scaling)


def drafter_config(target, draft_vocab, layers):
    """The exported config.json for a drafter of `target`: only what the draft has, nothing of MoE, quantisation or biases."""
    text = target.text
    hidden = target.hidden_size
    if text["hidden_size"] != hidden:
        raise UserError(f"the target's lm_head is {hidden} wide and its hidden size {text['hidden_size']}: such targets are not supported")
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    latent_attention = text.get("kv_lora_rank") is not None  # MLA's head_dim is a part of a head: plain heads are taken
    head_dim = hidden // heads if latent_attention or not text.get("head_dim") else text["head_dim"]
    if head_dim % 2:
        raise UserError(f"the target's heads are {head_dim} wide, an odd number, which rotary embeddings cannot have: not supported")
    rope = _rope_parameters(text)
    rope_type = rope["rope_type"]
    intermediate = text.get("intermediate_size")
    if isinstance(intermediate, (list, tuple)):
        intermediate = intermediate[0]
    return {
        "architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": hidden, "target_hidden_size": hidden, "intermediate_size": intermediate or 4 * hidden,
        "num_attention_heads": heads, "num_key_value_heads": heads if latent_attention else kv_heads, "head_dim": head_dim,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab,
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": text.get("rms_norm_eps") or 1e-6,
        "rope_parameters": rope, "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope_type == "default" else {key: value for key, value in rope.items() if key != "rope_theta"},
        "bos_token_id": text.get("bos_token_id"), "eos_token_id": text.get("eos_token_id"),
        "torch_dtype": "bfloat16",
        **layer_ids(layers, target.num_layers, target.model_class),
    }


def layer_ids(layers, num_layers, model_class):
    """The config entries that name the captured layers, given as HF hidden_states indices.

    The engines' default needs none. Otherwise vLLM and llama.cpp read the top-level list as HF indices, and SGLang only the
    nested one, to which it adds 1 - except for DeepSeek-V2/V3 style classes, where it does so only if the first id is 1.
    Raises UserError for [1, b, c] on those.
    """
    if num_layers >= 7 and layers == default_layers(num_layers):
        return {}
    nested = [layer - 1 for layer in layers]
    if model_class.startswith(("DeepseekV2", "DeepseekV3", "KimiK2", "KimiK25")):
        if layers[0] == 1:
            raise UserError(f"--layers {layers}: SGLang cannot be told to capture layer 1 of a {model_class}; take 2 or more")
        nested = [1, *nested[1:]] if layers[0] == 2 else layers
    return {"eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested}}


def captured_layers(config, num_layers, folder):
    """The three HF hidden_states indices that a drafter reads: as its training block, its config or the engines' default says."""
    layers = (config.get("training") or {}).get("layers") or config.get("eagle_aux_hidden_state_layer_ids")
    try:
        nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        layers = layers or (nested and [layer + 1 for layer in nested]) or default_layers(num_layers)
        usable = [type(layer) for layer in layers] == [int] * 3 and 1 <= layers[0] < layers[1] < layers[2] < num_layers
    except (TypeError, AttributeError):
        layers, usable = layers or config["eagle_config"], False
    if not usable:
        raise UserError(f"{folder} reads layers {layers}; three ascending ones in 1..{num_layers - 1} are wanted for this target")
    return layers


def save_drafter(folder, state, config, rows=None):
    """Write config.json and model.safetensors, each atomically, into `folder` (made if missing).

    state: the drafter's state dict; rows: int64 [D] target ids of a reduced vocabulary, None for the full one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}
    if rows is not None:
        rows = torch.as_tensor(rows, dtype=torch.int64)
        tensors["d2t"] = rows - torch.arange(len(rows))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, rows, True)
    replace_file(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_json(folder / "config.json", config)


def load_drafter(folder, dtype=torch.float32, ordered=True):
    """(Drafter in eval mode, rows int64 [D] or None) from an exported folder.

    Raises UserError for an ordinary model, tensors that are missing, unknown or of another shape, a broken map, or one that is not the
    map that the drafter was trained with. ordered=False takes a map whose target ids do not ascend, for whoever sorts its rows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; the folder of a drafter, as train_drafter.py writes it, is wanted")
    config = read_json(folder / "config.json")
    if config.get("architectures") != [ARCHITECTURE]:
        raise UserError(f"{folder} is no EAGLE-3 drafter: its config names {config.get('architectures')}, {[ARCHITECTURE]} is wanted")
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings"):
        if type(config.get(key)) is not int:
            raise UserError(f"{folder}: {key} is {config.get(key)!r} in its config, an integer is wanted")
    training = config.get("training") or {}
    if not isinstance(config.get("rms_norm_eps"), float) or not isinstance(training, dict) or not all(
            isinstance(training.get(key) or {}, dict) for key in ("target", "template_kwargs")):
        raise UserError(f"{folder}: its config has no usable rms_norm_eps or training block; export the drafter again")
    if type(config.get("draft_vocab_size")) is not int:
        raise UserError(f"{folder}: draft_vocab_size is {config.get('draft_vocab_size')!r} in its config, an integer is wanted")
    if config.get("norm_before_residual"):
        raise UserError(f"{folder} is of the kind with norm_before_residual, which SGLang does not know; use one without")
    try:
        config["rope_parameters"] = _rope_parameters(config)
        config.setdefault("target_hidden_size", config["hidden_size"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        with torch.device("meta"):
            wanted = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    except Exception as error:  # numbers that make no model: torch and transformers raise many kinds
        raise UserError(f"{folder}: its config describes no drafter ({' '.join(str(error).split())[:200]}); export it again") from None
    file = folder / "model.safetensors"
    if not file.exists():
        raise UserError(f"{folder} holds no model.safetensors")
    try:
        with safe_open(file, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own kinds for a broken header
        raise UserError(f"{file} cannot be read as safetensors ({str(error)[:200]}); export the drafter again") from None
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    tensors.pop("embed_tokens.weight", None)  # the target's is used, as in the engines
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UserError(f"{folder}: tensor {name} is {found.get(name, 'missing')}, {wanted.get(name, 'no such tensor')} is wanted; "
                            f"export the drafter again")
        if not tensors[name].is_floating_point():
            raise UserError(f"{folder}: tensor {name} is {tensors[name].dtype}, floating-point weights are wanted")
        if not tensors[name].float().isfinite().all():
            raise UserError(f"{folder}: tensor {name} holds NaN or infinity; export the drafter again, or train it with a lower --lr")
    rows = None
    if config["draft_vocab_size"] != config["vocab_size"]:
        if d2t is None or t2d is None:
            raise UserError(f"{folder} has a draft vocabulary of {config['draft_vocab_size']} and no d2t and t2d to say which tokens")
        rows = torch.from_numpy(check_map((d2t.float() if d2t.is_floating_point() else d2t).numpy(), t2d.bool().numpy(), folder, ordered))
        if len(rows) != config["draft_vocab_size"] or len(t2d) != config["vocab_size"]:
            raise UserError(f"{folder}: its map is {len(rows)} of {len(t2d)} ids, its config says {config['draft_vocab_size']} of "
                            f"{config['vocab_size']}")
        stated, found = training.get("map_sha256"), map_sha256(rows_to_d2t(rows.sort().values.numpy()))
        if isinstance(stated, str) and stated != found:
            raise UserError(f"{folder}: its d2t has hash {found[:12]}, and its lm_head was trained with the map {stated[:12]}: a map was "
                            f"copied over, with which its rows mean other tokens; put back the model.safetensors that training wrote")
    elif d2t is not None:
        raise UserError(f"{folder} has the full vocabulary and a d2t besides, which vLLM refuses; export it without")
    drafter = Drafter(config)
    drafter.load_state_dict(tensors)
    return drafter.to(dtype).eval(), rows


def check_embedding(folder, target):
    """Refuse a drafter's folder with an embedding of its own: SGLang would take the target's all the same, and vLLM this one."""
    with safe_open(Path(folder) / "model.safetensors", framework="pt") as handle:
        if "embed_tokens.weight" not in handle.keys():  # noqa: SIM118
            return
        own = handle.get_tensor("embed_tokens.weight")
    wanted = target.embedding()
    if own.shape != wanted.shape or not torch.equal(own.to(wanted.dtype), wanted):
        raise UserError(f"{folder} holds an embed_tokens.weight, {list(own.shape)}, that is not the one of {target.name}, "
                        f"{list(wanted.shape)}; export the drafter again without it")


def _rope_parameters(text):
    """Rotary settings as one dict with rope_type and rope_theta, from either spelling; Gemma 3's global one of its two."""
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    rope["rope_theta"] = float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0)
    rope.pop("partial_rotary_factor", None)  # the draft rotates whole heads
    return rope
