"""Print the quickstart's comparison from the lines of JSON that its stages left in FOLDER.

    python -m quickstart.report FOLDER      # from the repository's root
"""

import argparse
import json
from pathlib import Path

STAGES = ("target", "extract", "vocab-map", "drafter-reduced", "drafter-full", "identical", "speed")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the quickstart's run folder; no default")
    folder = parser.parse_args().folder
    stages = {name: json.loads((folder / f"{name}.json").read_text()) for name in STAGES}
    seconds = {name: sum(map(int, (folder / f"{name}.seconds").read_text().split())) for name in STAGES}

    extract = stages["extract"]
    print(f"\n{extract['samples']} answers of the target, {extract['tokens']:,} tokens "
          f"({extract['supervised_tokens']:,} supervised), {extract['bytes'] / 1e6:,.0f} MB of hidden states")
    each = ", ".join(f"{name} {seconds[name]}" for name in STAGES)
    print(f"seconds: {each}; together {sum(seconds.values())}\n")

    training = [stages["drafter-reduced"], stages["drafter-full"]]
    # in the order in which the command line named them
    exact, fast = stages["identical"]["drafters"], stages["speed"]["drafters"]
    vocab_map = stages["vocab-map"]
    full_params = vocab_map["lm_head_params"] // vocab_map["draft_vocab"] * vocab_map["vocab_size"]
    steps, dtype = stages["speed"]["settings"]["steps"], stages["speed"]["settings"]["dtype"]
    identical = [f"{result['identical']} of {result['prompts']}" for result in exact]
    depths = [" ".join(number(share) for share in result["acceptance"]) for result in fast]
    table("draft vocabulary", [vocab_map["draft_vocab"], f"full ({vocab_map['vocab_size']})"])
    table("coverage, counted", [percent(vocab_map["coverage"]), percent(1.0)])
    table("coverage, held out", [percent(vocab_map["coverage_heldout"]), percent(1.0)])
    table("lm_head parameters", [f"{vocab_map['lm_head_params']:,}", f"{full_params:,}"])
    table("trainable parameters", [f"{drafter['trainable_params']:,}" for drafter in training])
    table("training steps", [drafter["steps"] for drafter in training])
    table("training seconds", [seconds["drafter-reduced"], seconds["drafter-full"]])
    table("accept length, simulated on held-out samples",
          [number(drafter["accept_length"]) for drafter in training])
    table(f"accept length, {steps} steps, float32", [interval(result) for result in exact])
    table("answers identical to plain decoding, float32", identical)
    table(f"accept length, {steps} steps, {dtype}", [interval(result) for result in fast])
    table("acceptance at each depth", depths)
    table(f"tokens per second, {dtype}", [number(result["tokens_per_second"]) for result in fast])
    table("speed-up over plain decoding", [number(result["speed_up"]) for result in fast])

    best = max(fast, key=lambda result: result["speed_up"] or 0)
    print("\nTo serve the faster one:", *(f"  {command}" for command in best["serve"].values()), sep="\n")


def table(title, values):
    print(f"{title:<50}" + "".join(f"{value:>22}" for value in values))


def number(value):
    return "-" if value is None else f"{value:.3f}"


def interval(result):
    low, high = result["accept_length_interval"] or (None, None)
    return f"{number(result['accept_length'])} ({number(low)}-{number(high)})"


def percent(value):
    return "-" if value is None else f"{value:.2%}"


if __name__ == "__main__":
    main()
