"""The EAGLE-3 drafter: its model, its config.json, and the folder that SGLang and vLLM load as it stands.

One decoder layer over the target's own states. For token ids x[0..T) and target states g[t] (three captured
layers, concatenated), row t pairs state t with token t+1 and predicts token t+2:

    h      = fc(g[t])                                              # [N, H]
    a      = cat(input_layernorm(embed(x[t+1])), hidden_norm(h))   # [N, 2H] into q, k, v
    h      = h + attention(a);  h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))                                      # h BEFORE norm is the next step's h

embed is the target's. A drafter narrower than its target, hidden_size below target_hidden_size, has one of
its own, embed_tokens.weight [V, H]; both engines then take that.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from common.cli import UserError
from common.files import read_json, replace_file, write_json
from common.target import default_layers
from common.vocab import check_map, map_sha256

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Of others, for the same model.
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
INTEGERS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "draft_vocab_size", "max_position_embeddings")  # that a drafter's config must state
DTYPES = ("float32", "bfloat16", "float16")
# Rotary types that transformers, SGLang and vLLM compute alike for a draft layer, and the numbers of each.
# SGLang heeds no attention_factor, mscale or truncate of yarn, and has dynamic otherwise than transformers.
ROTARY = {"default": (), "linear": ("factor",),
          "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
          "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")}
# Of yarn and others: SGLang or vLLM leaves these out, or has a kind of its own for them.
OTHERWISE = ("mrope_section", "use_fope", "alpha", "attention_factor", "attn_factor", "extrapolation_factor",
             "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor")
# What engines heed in a drafter's config, and the value that the model here has.
COMPUTED = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "use_aux_norm": False,
            "norm_output": False, "use_aux_hidden_state": True, "num_aux_hidden_states": 3,
            "num_hidden_layers": 1, "hidden_act": "silu", "bias": False, "attention_bias": False,
            "mlp_bias": False, "tie_word_embeddings": False, "logit_scale": 1.0, "quantization_config": None,
            "use_sliding_window": False}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon",
            "layernorm_epsilon")  # however a target's config spells it
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
# SGLang classes that take a list of layers as it stands, unless it begins with 1, as DeepSeek-V2's does.
AS_GIVEN = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
            "GlmMoeDsaForCausalLM", "Glm4MoeLiteForCausalLM", "MistralLarge3ForCausalLM",
            "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
# And one that captures one layer more than others where it is given no list.
OFF_BY_DEFAULT = ("MiniMaxM3SparseForConditionalGeneration",)


class RMSNorm(nn.RMSNorm):
    """Computed in float32 and rounded once, as the engines do, whatever the dtypes of input and weight."""

    def forward(self, x):
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class Drafter(nn.Module):
    """Parameters carry the exported names. `config` is the exported config.json as a dict."""

    used = ""  # of one that was loaded: what of its folder was taken
    recompute = False  # in training: the MLP of every depth is computed again in the backward pass, not kept

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        hidden, inner, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]

        def linear(rows, columns):
            return nn.Linear(columns, rows, bias=False)

        if hidden != config["target_hidden_size"]:  # it is not trained: no parameter
            self.embed_tokens = nn.Module()
            self.embed_tokens.register_buffer("weight", torch.empty(config["vocab_size"], hidden))
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

    def table(self, embedding):
        """The embedding that it drafts with [V, H]: its own, or else the target's raw one, `embedding`."""
        return self.embed_tokens.weight if hasattr(self, "embed_tokens") else embedding

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


def draft_layer(text, **given):
    """({hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size, rope_parameters}
    of a drafter for a target of text config `text`, sentences on what of it is not the target's own).

    given: any of these numbers, taken as they are. Raises UserError for heads that cannot be, and for a
    drafter wider than its target.
    """
    hidden, reasons = given.get("hidden_size", text["hidden_size"]), []
    if hidden > text["hidden_size"]:
        raise UserError(f"a drafter of hidden size {hidden} would be wider than its target, "
                        f"{text['hidden_size']}; give --hidden-size that or less")
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    if text.get("kv_lora_rank") is not None:  # its head_dim is a part of a head
        value_dim = text.get("v_head_dim")
        head_dim = value_dim if value_dim in (64, 128, 256) else 128 if hidden >= 1024 else 64
        if heads * head_dim > 2 * hidden:
            heads = max(1, hidden // head_dim)
        kv_heads = math.gcd(heads, 8)
        reasons.append("plain heads in place of latent attention")
    inner = text.get("intermediate_size_mlp") or text.get("intermediate_size")
    inner = inner or 4 * text["hidden_size"]
    if isinstance(inner, (list, tuple)):  # one a layer
        inner = inner[0]
    if inner < 2 * hidden and any(text.get(key) for key in EXPERTS):
        inner = 3 * hidden
        reasons.append("an MLP of 3 hidden sizes, as the target's experts are narrower than two")
    rope = _stated_rotary(text)
    known = ROTARY.get(rope["rope_type"])
    if known is None or any(key not in rope for key in known if not key.startswith("beta_")):
        reasons.append(f"plain rotary positions in place of {rope['rope_type']}, which engines compute "
                       "otherwise in a drafter")
        rope["rope_type"], known = "default", ()
    rope = {key: rope[key] for key in ("rope_theta", "rope_type", *known) if key in rope}
    layer = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
             "head_dim": head_dim, "intermediate_size": inner, "rope_parameters": rope, **given}
    if layer["num_attention_heads"] % layer["num_key_value_heads"]:
        raise UserError(f"the draft layer would have {layer['num_key_value_heads']} key-value heads for "
                        f"{layer['num_attention_heads']} heads; give --kv-heads a divisor of --heads")
    if layer["head_dim"] % 2:
        raise UserError(f"the draft layer's heads would be {layer['head_dim']} wide, an odd number, which "
                        f"rotary embeddings cannot have; give --head-dim 64, 128 or 256")
    return layer, reasons


def drafter_config(target, draft_vocab, layers, **given):
    """The exported config.json for a drafter of `target`: nothing of MoE, quantisation or biases.

    layers: three HF hidden_states indices; given: numbers of the draft layer, see `draft_layer`. Raises
    UserError for a target whose drafter could not be loaded.
    """
    text = target.text
    layer, _ = draft_layer(text, **given)
    eps = next((text[key] for key in EPSILONS if text.get(key)), 1e-6)
    return {
        "architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1,
        "target_hidden_size": target.hidden_size, **layer,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab,
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": float(eps), **rotary_entries(layer["rope_parameters"]),
        "bos_token_id": text.get("bos_token_id"), "eos_token_id": text.get("eos_token_id"),
        "torch_dtype": "bfloat16",
        **layer_ids(layers, target.num_layers, target.model_class),
    }


def rotary_entries(rope):
    """The config entries of rotary settings, in the new spelling and the old one."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_parameters": rope, "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else scaling}


def layer_ids(layers, num_layers, model_class):
    """The config entries that name the captured layers, given as HF hidden_states indices.

    The engines' default needs none. Otherwise vLLM and llama.cpp read the top-level list as HF indices, and
    SGLang only the nested one, to which it adds 1 - except for the classes AS_GIVEN, where it does so only
    if the first id is 1. Raises UserError for [1, b, c] on those.
    """
    if num_layers >= 7 and layers == default_layers(num_layers) and model_class not in OFF_BY_DEFAULT:
        return {}
    nested = [layer - 1 for layer in layers]
    if model_class in AS_GIVEN:
        if layers[0] == 1:
            raise UserError(f"--layers {layers}: SGLang cannot be told to capture layer 1 of a "
                            f"{model_class}; take 2 or more")
        if layers[0] != 2:
            nested = layers
    return {"eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested}}


def captured_layers(config, num_layers, folder, model_class=""):
    """The three HF hidden_states indices that a drafter reads, as its `config` or the engines' default says.

    vLLM reads the top-level list, as it stands, and SGLang the nested one, by the target's class (see
    `layer_ids`). Raises UserError where both are there and differ, and where they are no three ascending ones
    of a target of `num_layers`.
    """
    eagle = config.get("eagle_config") or {}
    try:
        layers = (config.get("training") or {}).get("layers")
        layers = layers or config.get("eagle_aux_hidden_state_layer_ids")
        nested = eagle.get("eagle_aux_hidden_state_layer_ids")
        if nested and (model_class not in AS_GIVEN or nested[0] == 1):
            nested = [layer + 1 for layer in nested]
        if layers and nested and layers != nested:
            raise UserError(f"{folder} reads layers {layers} in vLLM and {nested} in SGLang, as the two "
                            "lists of its config say; export it again")
        layers = layers or nested or default_layers(num_layers)
        usable = [type(layer) for layer in layers] == [int] * 3
        usable = usable and 1 <= layers[0] < layers[1] < layers[2] < num_layers
    except (TypeError, AttributeError):
        layers, usable = config.get("eagle_aux_hidden_state_layer_ids") or eagle, False
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


def load_drafter(folder, dtype=torch.float32, ordered=True, target=None):
    """(Drafter in eval mode, rows int64 [D] target ids or None: the full vocabulary) of an exported folder,
    ours or in another published layout; the drafter's `used` says what of the folder was taken.

    Raises UserError for an ordinary model, tensors that are missing, unknown or of another shape, a broken
    map, or one that is not the map that the drafter was trained with. ordered=False takes a map whose target
    ids do not ascend, for whoever sorts its rows. target: has the lm_head where the folder has none.
    """
    folder = Path(folder)
    config = _read_config(folder)
    try:
        config["rope_parameters"] = _own_rotary(config, folder)
        config.setdefault("target_hidden_size", config["hidden_size"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        with torch.device("meta"):
            wanted = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    except UserError:
        raise
    except Exception as error:  # numbers that make no model: torch and transformers raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: its config describes no drafter ({reason}); export it again") from None
    tensors = _read_tensors(folder)
    used = [f"{len(tensors)} tensors"]
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if "embed_tokens.weight" not in wanted and tensors.pop("embed_tokens.weight", None) is not None:
        used.append("embed_tokens.weight left out, the target's embedding serves")
    if d2t is not None and t2d is None:
        t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
        ids = d2t.long() + torch.arange(len(d2t))
        t2d[ids[(ids >= 0) & (ids < len(t2d))]] = True
        used.append("t2d made from d2t")
    rows = _map_rows(folder, config, d2t, t2d, ordered)
    if "lm_head.weight" not in tensors and target is not None:
        head = target.lm_head()
        tensors["lm_head.weight"] = head if rows is None else head[rows]
        used.append("lm_head.weight the target's")
    _check_tensors(folder, tensors, wanted)
    drafter = Drafter(config)
    drafter.load_state_dict(tensors)
    drafter.used = ", ".join(used)
    return drafter.to(dtype).eval(), rows


def weights_file(folder):
    """The file of a drafter's tensors. Raises UserError where the folder has none."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (Path(folder) / name).exists():
            return Path(folder) / name
    raise UserError(f"{folder} holds no model.safetensors; export the drafter again")


def _read_tensors(folder):
    """{exported name: tensor} of a drafter's folder, from either of the names and formats in use."""
    file = weights_file(folder)
    try:
        if file.suffix == ".bin":
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        else:
            tensors = load_file(file)
    except Exception as error:  # safetensors and torch raise kinds of their own for a broken file
        raise UserError(f"{file} cannot be read ({str(error)[:200]}); export the drafter again") from None
    return {name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): tensor
            for name, tensor in tensors.items()}


def check_embedding(folder, target):
    """Refuse a drafter as wide as the target that has an embedding of its own: vLLM would take it, and SGLang
    the target's."""
    own = _read_tensors(Path(folder)).get("embed_tokens.weight")
    if own is None or own.shape[1] < target.hidden_size:
        return
    wanted = target.embedding()
    if own.shape != wanted.shape or not torch.equal(own.to(wanted.dtype), wanted):
        raise UserError(f"{folder} holds an embed_tokens.weight, {list(own.shape)}, that is not the one of "
                        f"{target.name}, {list(wanted.shape)}; export the drafter again without it")


def _read_config(folder):
    """The config.json of a drafter's folder, after what can be said of it before a model is made."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the folder of a drafter, as train_drafter.py writes it")
    config = read_json(folder / "config.json")
    if isinstance(config.get("transformer_layer_config"), dict):  # as the library speculators nests it
        own = {key: value for key, value in config.items() if key != "transformer_layer_config"}
        config = {"norm_before_residual": True, **config["transformer_layer_config"], **own}
    if (config.get("architectures") or [None])[0] not in ARCHITECTURES:
        raise UserError(f"{folder} is no EAGLE-3 drafter: its config names {config.get('architectures')}, "
                        f"{' or '.join(ARCHITECTURES)} is wanted; give a folder that train_drafter.py wrote")
    if config.get("draft_vocab_size") is None:
        config["draft_vocab_size"] = config.get("vocab_size")  # as both engines take it
    for key in INTEGERS:
        if type(config.get(key)) is not int:
            raise UserError(f"{folder}: {key} is {config.get(key)!r} in its config, an integer is wanted; "
                            f"export the drafter again")
    if not isinstance(config.get("rms_norm_eps"), float):
        raise UserError(f"{folder}: rms_norm_eps is {config.get('rms_norm_eps')!r} in its config, a number "
                        f"like 1e-6 is wanted; export the drafter again")
    eagle = config["eagle_config"] if isinstance(config.get("eagle_config"), dict) else {}
    for key, computed in COMPUTED.items():
        stated = eagle.get(key, config.get(key))
        if stated is not None and stated != computed:
            raise UserError(f"{folder}: its config states {key} {stated!r}, which "
                            f"engines heed; here drafters have {computed!r}; use one of that kind")
    config["torch_dtype"] = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if config["torch_dtype"] not in DTYPES:
        raise UserError(f"{folder}: torch_dtype is {config['torch_dtype']!r} in its config; "
                        f"{', '.join(DTYPES)} are known; export the drafter again")
    if not _usable(config.get("training") or {}):
        raise UserError(f"{folder}: its config has no usable training block (its target, template_kwargs, "
                        f"coverage); export the drafter again")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads > 0 and heads % kv_heads:
        raise UserError(f"{folder}: its config has {kv_heads} key-value heads for {heads} heads, a divisor "
                        f"of these is wanted; export the drafter again")
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


def _stated_rotary(text):
    """Rotary settings of a config as one dict with rope_type and rope_theta, from any of the spellings.

    Of those with one a kind of layer (Gemma 3), the global one.
    """
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    old_spelling = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or old_spelling or "default"
    if rope["rope_type"] == "mrope":  # of text alone: all its positions are equal
        rope["rope_type"] = "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0)
    return rope


def _own_rotary(config, folder):
    """Rotary settings of a drafter's config. Raises UserError for what the engines would not both compute as
    it is computed here."""
    rope = _stated_rotary(config)
    kind = rope["rope_type"]
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    odd = [key for key in OTHERWISE if rope.get(key) is not None]
    odd += ["partial_rotary_factor"] if partial not in (None, 1, 1.0) else []
    if kind not in ROTARY or odd:
        found = f"{kind} with {', '.join(odd)}" if odd else kind
        raise UserError(f"{folder}: its rotary positions are {found}, which SGLang and vLLM do not both "
                        f"compute as is done here; {', '.join(ROTARY)} alone are known; use another drafter")
    return {key: rope[key] for key in ("rope_theta", "rope_type", *ROTARY[kind]) if key in rope}
