"""Answers of the target for many prompts at once, greedy or sampled."""

import hashlib

import numpy as np
import torch
import torch.nn.functional as F

from common.cli import UserError
from common.files import read_json
from common.target_model import GrowingCache


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


@torch.inference_mode()
def generate(model, prompts, limits, names, sampling, max_rows, max_tokens=4096, finished=lambda ids: None):
    """The target's answers: a list of id lists in the order of `prompts`, each up to its limit or with its end token.

    prompts: lists of ids. limits: most new tokens of each. names: any JSON value that identifies each; with the seed it alone
    decides the row's random numbers. sampling: temperature (0 is greedy), top_p, top_k, seed, stop_ids. max_rows: answers written at
    once; max_tokens: of one forward pass over prompts. finished: called with each answer as it ends.

    Rows are padded on the left and share one cache. A row that has ended idles until a quarter of the batch has; then the ended
    rows leave and the next prompts join.
    """
    waiting = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))  # longest taken first: what joins later is shorter
    answers = [[] for _ in prompts]
    stops = set(sampling["stop_ids"])
    numbers = {}  # row -> its uniform random numbers
    rows = []  # rows[i] is the prompt in batch row i, None when it has ended
    cache = padding = last = None  # padding int64 [B]: positions before the row's first token; last [B, H]: its newest state
    while True:
        idle = sum(row is None for row in rows)
        if not rows or idle * 4 >= len(rows):
            keep = [i for i, row in enumerate(rows) if row is not None]
            if not keep and not waiting:
                return answers
            if keep:
                padding = padding[keep]
                first = int(padding.min())
                cache.select(keep, first)
                padding, last = padding - first, last[keep]
            rows = [rows[i] for i in keep]
            while waiting and len(rows) < max_rows:
                fit = max(1, max_tokens // max(1, len(prompts[waiting[-1]])))
                new = [waiting.pop() for _ in range(min(fit, max_rows - len(rows), len(waiting)))]
                if sampling["temperature"]:
                    numbers.update({n: _uniforms(sampling["seed"], names[n], limits[n]) for n in new})
                joined = _prefill(model, [prompts[n] for n in new])
                cache, padding, last = _merge((cache, padding, last), joined) if rows else joined
                rows += new
        chosen = _choose(model, last, sampling, [numbers[n][len(answers[n])] if n in numbers else 0.5 for n in rows])
        for i, token in enumerate(chosen.tolist()):
            n = rows[i]
            if n is None:
                continue
            answers[n].append(token)
            if token in stops or len(answers[n]) == limits[n]:
                rows[i] = None
                finished(answers[n])
        if any(row is not None for row in rows):
            length = cache.layers[0].keys.shape[2]
            mask = torch.arange(length + 1, device=padding.device) >= padding[:, None]  # [B, length + 1]
            _, last = model.states(chosen[:, None], cache, mask.long(), (length - padding)[:, None])
            last = last[:, -1]


def _prefill(model, prompts):
    """(cache, padding int64 [B], last states [B, H]) of prompts of any lengths, padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[longest - len(prompt) :] = torch.tensor(prompt)
    ids, padding = ids.to(model.device), padding.to(model.device)
    places = torch.arange(longest, device=model.device) - padding[:, None]
    cache = GrowingCache()
    _, last = model.states(ids, cache, (places >= 0).long(), places.clamp(min=0))
    return cache, padding, last[:, -1]


def _merge(old, new):
    """Two batches as one, in the cache of the first: the shorter cache gets padding on the left."""
    (cache, padding, last), (other, other_padding, other_last) = old, new
    length, other_length = cache.layers[0].keys.shape[2], other.layers[0].keys.shape[2]
    longest = max(length, other_length)
    for layer, more in zip(cache.layers, other.layers, strict=True):
        for name in ("keys", "values"):
            parts = [F.pad(tensor, (0, 0, longest - tensor.shape[2], 0)) for tensor in (getattr(layer, name), getattr(more, name))]
            setattr(layer, name, torch.cat(parts))
        layer.key_buffer, layer.value_buffer = layer.keys, layer.values
    padding = torch.cat([padding + longest - length, other_padding + longest - other_length])
    return cache, padding, torch.cat([last, other_last])


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


def _choose(model, last, sampling, uniforms):
    """int64 [B]: the next ids for last states [B, H]; sampled by inverting the cumulative distribution at `uniforms`."""
    if not sampling["temperature"]:
        return model.argmax(last)
    chances, ids = distribution(model.logits(last), sampling)
    ladder = chances.double().cumsum(-1)
    places = torch.tensor(uniforms, dtype=torch.float64, device=last.device) * ladder[:, -1]
    places = torch.searchsorted(ladder, places[:, None], right=True)
    return (places if ids is None else ids.gather(1, places))[:, 0]


def _uniforms(seed, name, count):
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little"))).random(count)
