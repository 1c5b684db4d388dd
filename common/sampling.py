"""How the target's next token is chosen, greedy or drawn, and where an answer ends."""

import hashlib

import numpy as np
import torch

from common.cli import UserError
from common.files import read_json

LEAST_TEMPERATURE = 1e-5  # vLLM takes less for greedy, and so does SGLang, from 1e-6 on; at last logits would overflow


def end_ids(target, tokenizer):
    """Every end-of-sequence id, ascending, also those beyond the lm_head: of the generation config, the config and the tokenizer."""
    found = set()
    file = target.folder / "generation_config.json"
    for value in (tokenizer.eos_token_id, read_json(file).get("eos_token_id") if file.exists() else None, target.text.get("eos_token_id"),
                  target.raw_text.get("eos_token_id")):
        found.update(token for token in (value if isinstance(value, list) else [value]) if type(token) is int and token >= 0)
    return sorted(found)


def stop_ids(target, tokenizer):
    """The end-of-sequence ids that the target can say, ascending: engines stop at all of them."""
    return [token for token in end_ids(target, tokenizer) if token < target.vocab_size]


def sampling_settings(target, temperature, top_p, top_k):
    """{temperature, top_p, top_k}, checked. `temperature` is a text: a number, 0 for greedy, or `config` for all three from the
    target's generation config."""
    if temperature == "config":
        file = target.folder / "generation_config.json"
        config = read_json(file) if file.exists() else {}
        temperature = (config.get("temperature") or 1.0) if config.get("do_sample") else 0
        top_p, top_k = config.get("top_p") or 1.0, config.get("top_k") or 0
    try:
        temperature, top_p, top_k = float(temperature), float(top_p), int(top_k)
        right = (temperature == 0 or LEAST_TEMPERATURE <= temperature < float("inf")) and 0 < top_p <= 1 and top_k >= 0
    except (TypeError, ValueError, OverflowError):
        right = False
    if not right:
        raise UserError(f"temperature {temperature}, top-p {top_p}, top-k {top_k}: a temperature of 0 (greedy), at least "
                        f"{LEAST_TEMPERATURE}, or config, a top-p above 0, up to 1, and a top-k of at least 0 are wanted")
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k}


def distribution(logits, sampling):
    """(chances, ids or None) of float32 logits [..., V] at temperature, top_k and top_p: chances [..., C] sum to 1, of token ids
    [..., C], likeliest first, or of all in order (None)."""
    logits, ids = logits / sampling["temperature"], None
    if sampling["top_k"] or sampling["top_p"] < 1:
        logits, ids = logits.topk(min(sampling["top_k"] or logits.shape[-1], logits.shape[-1]))
    chances = logits.softmax(-1)
    if sampling["top_p"] < 1:
        least = max(sampling["top_p"], 1e-30)  # less is 0 in float32, and would leave nothing
        chances = chances.masked_fill(chances.cumsum(-1) - chances >= least, 0.0)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances, ids


def pick(chances, ids, numbers):
    """int64 [N]: ids drawn from a `distribution` over [N, C], by inverting its cumulative sum at uniform `numbers` float64 [N]."""
    ladder = chances.double().cumsum(-1)
    places = torch.searchsorted(ladder, (numbers * ladder[:, -1])[:, None], right=True)
    return (places if ids is None else ids.gather(1, places))[:, 0]


def choose(model, last, sampling, numbers):
    """int64 [N]: the target's next ids for last states [N, H], greedy, or drawn at N uniform `numbers`, float64."""
    return pick(*distribution(model.logits(last), sampling), numbers.flatten()) if sampling["temperature"] else model.argmax(last)


def random_numbers(seed, name, count):
    """float64 [count] uniform numbers that depend on nothing but the seed and `name`, any JSON value."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little"))).random(count)
