"""How a drafter starts: the decision on its vocabulary, and its first weights, from scratch or from another drafter."""

import numpy as np
import torch

from common.cli import UserError, say
from common.drafter import drafter_config, load_drafter
from common.shards import check_tokenizer
from common.target import check_same_target, default_layers
from common.vocab import check_size, load_map


def decide_vocabulary(text, vocab_size):
    """Rows of the draft vocabulary from `--draft-vocab`; all of them is the full one, whichever way it is written."""
    if text == "full":
        return vocab_size
    try:
        size = int(text)
    except ValueError:
        raise UserError(f"--draft-vocab {text} is neither full nor a number in 1..{vocab_size}") from None
    check_size(size, vocab_size)
    return size


def scratch_map(args, draft_vocab, facts, shards, warnings):
    """Target ids int64 [D] of the named map, None for the full vocabulary."""
    if draft_vocab == facts["vocab_size"]:
        if args.vocab_map:
            raise UserError(f"--draft-vocab {args.draft_vocab} is the full vocabulary and takes no --vocab-map; leave one of them out")
        return None
    if not args.vocab_map:
        raise UserError(f"--draft-vocab {draft_vocab} needs --vocab-map, the folder that build_vocab_map.py made for these shards "
                        f"(or --draft-vocab full, which needs none)")
    rows, map_facts = load_map(args.vocab_map)
    if len(rows) != draft_vocab:
        raise UserError(f"--vocab-map {args.vocab_map} has {len(rows)} rows, --draft-vocab says {draft_vocab}; name the map of that size")
    warnings.append(check_same_target(map_facts.get("target") or {}, facts, f"the map {args.vocab_map} was", args.force))
    warnings.append(check_tokenizer(map_facts.get("tokenizer_sha256"), shards, f"the tokenizer of the map {args.vocab_map}", args.force))
    return torch.from_numpy(rows)


def start_from_checkpoint(args, draft_vocab, target, layers, warnings, facts):
    """(drafter in float32, its own map's target ids or None) for --init checkpoint."""
    drafter, rows = load_drafter(args.checkpoint)
    config, wanted = drafter.config, drafter_config(target, draft_vocab, layers)
    for key in ("draft_vocab_size", "vocab_size", "hidden_size", "target_hidden_size", "rope_parameters"):
        if config[key] != wanted[key]:
            raise UserError(f"{args.checkpoint} has {key} {config[key]}, this run wants {wanted[key]}; "
                            f"{'say --draft-vocab as the checkpoint has it' if key == 'draft_vocab_size' else 'it is no drafter for this'}")
    trained = config.get("training") or {}
    warnings.append(check_same_target(trained.get("target", facts), facts, f"the checkpoint {args.checkpoint} was", args.force))
    stated = trained.get("layers") or config.get("eagle_aux_hidden_state_layer_ids")  # without either the engines' default
    if stated is None and target.num_layers >= 7:
        stated = default_layers(target.num_layers)
    if stated != layers:
        raise UserError(f"{args.checkpoint} is for layers {stated}, these shards hold {layers}; extract those layers")
    if args.vocab_map:
        if rows is None:
            raise UserError(f"{args.checkpoint} has the full vocabulary and takes no --vocab-map; leave it out")
        named, _ = load_map(args.vocab_map)
        if not np.array_equal(named, rows.numpy()):
            raise UserError(f"--vocab-map {args.vocab_map} is not the map of {args.checkpoint}, whose lm_head rows would mean other "
                            f"tokens; leave it out to use the checkpoint's own")
    kept = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    drafter.config = {**wanted, **{key: config[key] for key in kept}, "torch_dtype": config.get("torch_dtype", "bfloat16")}
    return drafter.train(), rows


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
