"""What an evaluation comes to, in sentences: the drafter that wins, what the others would have to reach, how near a prediction came."""

from pathlib import Path
from statistics import median

import numpy as np

from common.cli import UserError
from common.figures import names, rounded, speed_interval
from common.files import read_json
from common.target import check_same_target
from common.vocab import MAP_FILE, check_coverage, coverage

PREDICTED = ("accept_length", "ceiling", "draft_ms", "tokens_per_second", "speed_up")
COMPARED = {"accept_length": "accept length", "tokens_per_second": "tokens/s", "speed_up": "speed-up"}


def answers_coverage(groups, rows, vocab_size):
    """Share of the tokens of the groups' answers that could be drafted, all but each answer's first, whose id is in the draft
    vocabulary: `rows` int64 [D], None for the full one. None without such tokens."""
    return _share([token for group in groups for answer in group.answers for token in answer.ids[1:]], rows, vocab_size)


def simulated_coverage(shards, samples, rows):
    """The same of what a simulated walk goes over in `samples` of Shards: it drafts no answer's first token, and no sample's second."""
    drafted = []
    for number in samples:
        sample = shards.sample(int(number), ("input_ids", "loss_mask"))
        supervised = sample["loss_mask"].bool()
        drafted += sample["input_ids"][2:][supervised[2:] & supervised[1:-1]].tolist()
    return _share(drafted, rows, shards.manifest["target"]["vocab_size"])


def _share(tokens, rows, vocab_size):
    counts = np.bincount(np.array(tokens, dtype=np.int64), minlength=vocab_size)
    return rounded(coverage(counts, slice(None) if rows is None else rows.cpu().numpy()))


def coverage_warnings(entries, configs):
    """Sentences on drafters whose vocabulary covers clearly less of what was decoded or simulated than their `configs` promise.

    It is no fault: other domains are measured on purpose. entries: those of one concurrency first, in the order of `configs`.
    """
    found = [check_coverage(entry[key], config.get("training") or {}, f"the draft vocabulary of {entry['drafter']}", True, tokens)
             for entry, config in zip(entries, configs, strict=False)
             for key, tokens in (("coverage", "the plain answers' tokens"), ("simulated_coverage", "the held-out answers' tokens"))
             if entry.get(key) is not None]
    return [warning for warning in found if warning]


def verdict(entries, groups, settings):
    """Which drafter of one run is the fastest, a dict, or None where fewer than two were timed.

    entries: the figures of every drafter on the same prompts at one concurrency; groups: of each entry the Groups it was made of.

    The winner has the most tokens/s. It is `too_close` to tell where the 95 % interval of its tokens/s over the runner-up's (bootstrap
    over the prompts that were decoded together, both drafters' times of the same prompts drawn together) includes 1.

    Plain decoding is reached at an accept length of accept_length(winner) * tokens/s(plain) / tokens/s(winner).
    """
    order = sorted((n for n, entry in enumerate(entries) if entry["tokens_per_second"]), key=lambda n: -entries[n]["tokens_per_second"])
    if len(order) < 2:
        return None
    titles, (first, second) = names(entries), order[:2]
    winner, rate, length = entries[first], entries[first]["tokens_per_second"], entries[first]["accept_length"]
    interval = speed_interval(groups[first], groups[second])
    too_close = interval is None or interval[0] <= 1
    ratio = rate / entries[second]["tokens_per_second"]
    where = settings["backend"] if settings["backend"] != "local" else settings["device"] if settings["device"] != "cpu" else (
        f"cpu, {settings['threads']} thread{'s' * (settings['threads'] > 1)}")
    doubt = "" if not too_close else ", too close to tell" if interval else ", and one batch of prompts cannot tell"
    span = "" if interval is None else f" (95 %: {interval[0]:.2f}-{interval[1]:.2f})"
    sentences = [f"fastest here ({where}, {settings['dtype']}, {winner['concurrency']} at once): {titles[first]} with {rate:.1f} tokens/s, "
                 f"{ratio:.2f} times {titles[second]}{span}{doubt}"]
    plain, beaten = winner["baseline_tokens_per_second"], None
    if plain and length:
        beaten, needed = plain > rate, length * plain / rate
        span = winner["speed_up_interval"]
        unclear = ", too close to tell" if span is None or span[0] <= 1 <= span[1] else ""
        if beaten:
            sentences.append(f"plain decoding beats them all with {plain:.1f} tokens/s{unclear}: {titles[first]} would have to reach an "
                             f"accept length of {needed:.2f}, and reached {length:.2f}")
        elif unclear:
            sentences.append(f"plain decoding makes {plain:.1f} tokens/s: whether {titles[first]} is faster is too close to tell")
    even, more = break_even(entries, order, settings["steps"])
    return {"concurrency": winner["concurrency"], "winner": winner["drafter"], "runner_up": entries[second]["drafter"],
            "ratio": rounded(ratio), "ratio_interval": interval, "too_close": too_close, "plain_beats_all": beaten,
            "break_even": even, "sentences": sentences + more}


def break_even(entries, order, steps):
    """What each drafter would have to reach to be as fast as the winner, the first in `order` (numbers of entries): (dicts, sentences).

    A round of K steps takes K * draft_ms + verify_ms and brings accept_length tokens, so that is an accept length of

        accept_length(winner) * round(other) / round(winner)

    draft_ms is each one's median; verify_ms the median of all drafters', as verifying is the same work behind each. Empty where rounds
    are not timed, as on servers.
    """
    timed = [n for n in order if entries[n]["accept_length"] and entries[n]["draft_ms"]]
    if order[0] not in timed:
        return [], []
    titles, winner, verify_ms = names(entries), entries[order[0]], median(entries[n]["verify_ms"] for n in timed)
    found, sentences = [], []
    for n in timed[1:]:
        entry, (round_ms, winner_ms) = entries[n], [steps * one["draft_ms"] + verify_ms for one in (entries[n], winner)]
        reached, needed = entry["accept_length"], winner["accept_length"] * round_ms / winner_ms
        found.append({"drafter": entry["drafter"], "draft_vocab": entry["draft_vocab"], "accept_length": reached,
                      "break_even_accept_length": rounded(needed), "round_ms": rounded(round_ms), "winner_round_ms": rounded(winner_ms)})
        told = (f"{titles[n]} ({entry['draft_vocab']} rows) would have to reach an accept length of {needed:.2f} to be as fast as "
                f"{titles[order[0]]} ({winner['draft_vocab']} rows): it drafts in {entry['draft_ms']:.1f} ms for {winner['draft_ms']:.1f}, "
                f"a verification takes {verify_ms:.1f}, and it reached {reached:.2f}")
        if reached >= needed:
            told += "; by these medians it is as fast, but tokens/s also hold reading the prompts and rounds that other work slowed"
        elif needed > steps + 1:
            told += f", where {steps} steps cannot give more than {steps + 1}"
        sentences.append(told)
    return found, sentences


def read_prediction(folder, facts, steps, force):
    """(what build_vocab_map.py --predict wrote into the map in `folder`, warnings).

    facts: of the target that is measured. Raises UserError where there is none, and where it is for other steps or another target.
    """
    map_facts = read_json(Path(folder) / MAP_FILE)
    found = map_facts.get("prediction")
    again = f"make one with build_vocab_map.py --predict {steps}"
    if found is None:
        raise UserError(f"--prediction {folder}: its {MAP_FILE} holds no prediction; {again}")
    sizes = found.get("sizes") if isinstance(found, dict) else None
    if not isinstance(sizes, list) or not all(
            isinstance(size, dict) and type(size.get("draft_vocab")) is int
            and all(isinstance(size.get(key), (int, float, type(None))) for key in PREDICTED) for size in sizes):
        raise UserError(f"--prediction {folder}: the prediction in its {MAP_FILE} cannot be used; {again}")
    if found.get("steps") != steps:
        raise UserError(f"--prediction {folder} is for {found.get('steps')} steps, {steps} are measured; give the same --steps, or {again}")
    made_for = {**facts, "name": (map_facts.get("target") or {}).get("name"), "tensors_sha256": found.get("target_sha256")}
    warning = check_same_target(made_for, facts, f"--prediction {folder} was", force)
    return found, [f"--force: {warning}"] if warning else []


def compare_prediction(summary, prediction, folder):
    """Put what was predicted for its size into every drafter's entry, and into the summary how far the measurement is from it.

    Returns warnings. Times are compared at concurrency 1, which is what is predicted.
    """
    settings, entries = summary["settings"], summary["drafters"]
    sizes = {size["draft_vocab"]: {key: rounded(size.get(key)) for key in PREDICTED} for size in prediction["sizes"]}
    for entry in entries:
        entry["predicted"] = sizes.get(entry["draft_vocab"])
    errors, told = {}, []
    for key, title in COMPARED.items():
        pairs = [(entry["predicted"][key], entry.get(key) or key == "accept_length" and entry.get("simulated_accept_length"), name)
                 for entry, name in zip(entries, names(entries), strict=True)
                 if entry["predicted"] and (key == "accept_length" or entry.get("concurrency") == 1)]
        found = [(abs(predicted / measured - 1), name) for predicted, measured, name in pairs if predicted is not None and measured]
        errors[key] = rounded(max(found)[0]) if found else None
        told += [f"{title} {max(found)[0]:.1%} ({max(found)[1]})"] if found else []
    summary["prediction"] = {"map": str(folder), "largest_error": errors, "sentences": [
        f"largest error of the prediction: {', '.join(told)}" if told else "the prediction names no figure that was measured here"]}
    ours = {**settings, "device": "cpu" if settings["device"] == "cpu" else "cuda"}  # settings name the card
    wrong = [f"{name} {wanted} for {ours[name]}" for name, wanted in {
        "backend": "local", "topk": 1, "temperature": 0.0, **{key: prediction.get(key) for key in ("dtype", "device", "threads")}}.items()
        if summary["prompts"] and ours[name] != wanted]
    if summary["prompts"] and max(settings["concurrency"]) > 1:
        wrong.append("one prompt at once")
    return [f"--prediction {folder} is for {', '.join(wrong)}: what it says of times does not compare"] if wrong else []
