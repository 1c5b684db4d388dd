"""What a job will take, told from the target's config alone: bytes of hidden states, GPUs that serve the
target."""

import torch

from common.cli import human_bytes, say
from common.shards import bytes_per_token
from common.target import load_config

STORAGES = (("fp8, compact", "fp8", True), ("bf16, compact", "bf16", True), ("fp8, states", "fp8", False),
            ("bf16, states", "bf16", False))  # --store and --teacher; the default first
BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}  # of a weight, where the kind of quantisation says it
FILLED = 0.8  # of a GPU's memory by weights: the rest is for the KV cache and what is computed


def storages(hidden, candidates, supervised=1.0):
    """{storage: bytes of a token's states}, at a share `supervised` of supervised tokens; last the plain
    layout, three captured states and the last one in bfloat16."""
    sizes = {name: bytes_per_token(hidden, store, candidates if compact else 0, supervised)
             for name, store, compact in STORAGES}
    return {**sizes, "plain, 4 H in bf16": 8 * hidden}


def say_storages(sizes, tokens):
    """A line for each of `sizes`, as storages returns them, for so many tokens."""
    say(f"{'hidden states (--store, --teacher)':<36}{'bytes a token':>18}{f'{tokens:,} tokens':>22}")
    for name, size in sizes.items():
        say(f"  {name:<34}{size:>18,.0f}{human_bytes(size * tokens):>22}")


def weight_bits(stated, text):
    """Bits of a weight in the target's files by the quantisation that its config states, {} for none, and its
    text config, scales of groups included; None for a quantisation that does not say."""
    if not stated:
        return 32 if (text.get("dtype") or text.get("torch_dtype")) == "float32" else 16
    groups = list((stated.get("config_groups") or {}).values())
    weights = groups[0]["weights"] if groups else stated
    bits = BITS.get(stated.get("quant_method")) or weights.get("num_bits") or weights.get("bits")
    if type(bits) is not int:
        return None
    group = weights.get("group_size") or 0
    return bits + 16 / group if group > 0 else bits


def serving_size(target, gpu_gb, trust_remote_code=False):
    """(parameters of the target's text model, about how many bytes they are as served, GPUs of `gpu_gb` GB
    for it, a power of two); None for what cannot be told. The model is built without memory for it."""
    from transformers import AutoModelForCausalLM

    config = load_config(target.folder, trust_remote_code).get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError):  # no class for it in this transformers
        return None, None, None
    count = sum(parameter.numel() for parameter in model.parameters())
    bits = weight_bits(target.quantisation, target.text)
    if bits is None:
        return count, None, None
    size, gpus = int(count * bits / 8), 1
    while size > gpus * FILLED * gpu_gb * 1e9:
        gpus *= 2
    return count, size, gpus
