"""How the target's next token is chosen, greedy or drawn, and where an answer ends."""

import hashlib

import numpy as np
import torch

from common.cli import UserError
from common.files import read_json


def stop_ids(target, tokenizer):
    """Every end-of-sequence id, ascending: of the generation config, the config and the tokenizer, which is what engines stop at."""
    found = {tokenizer.eos_token_id}
    file = target.folder / "generation_config.json"
    for value in (read_json(file).get("eos_token_id") if file.exists() else None, target.text.get("eos_token_id"),
                  target.raw_text.get("eos_token_id")):
        found.update(value if isinstance(value, list) else [value])
    return sorted(token for token in found if isinstance(token, int) and 0 <= token < target.vocab_size)


def sampling_settings(target, temperature, top_p, top_k):
    """{temperature, top_p, top_k}, checked. `temperature` is a text: a number, 0 for greedy, or `config` for all three from the
    target's generation config."""
    if temperature == "config":
        file = target.folder / "generation_config.json"
        config = read_json(file) if file.exists() else {}
        temperature = (config.get("temperature") or 1.0) if config.get("do_sample") else 0
        top_p, top_k = config.get("top_p") or 1.0, config.get("top_k") or 0
    try:
        temperature = float(temperature)
    except ValueError:
        raise UserError(f"--temperature {temperature} is neither a number nor config") from None
    if not 0 <= temperature < float("inf") or not 0 < top_p <= 1 or top_k < 0:
        raise UserError(f"temperature {temperature}, top-p {top_p}, top-k {top_k}: a temperature of at least 0, a top-p above 0, up to 1, "
                        f"and a top-k of at least 0 are wanted")
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k}


def distribution(logits, sampling):
    """(chances, ids or None) of float32 logits [..., V] at temperature, top_k and top_p: chances [..., C] sum to 1, of token ids
    [..., C], likeliest first, or of all in order (None)."""
    logits, ids = logits / sampling["temperature"], None
    if sampling["top_k"] or sampling["top_p"] < 1:
        logits, ids = logits.topk(min(sampling["top_k"] or logits.shape[-1], logits.shape[-1]))
    chances = logits.softmax(-1)
    if sampling["top_p"] < 1:
        chances = chances.masked_fill(chances.cumsum(-1) - chances >= sampling["top_p"], 0.0)
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
