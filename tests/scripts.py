"""Run the scripts as a user would, and in the test's own process where a subprocess would only cost time."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

from tests import tiny

# shards of which the target's whole distribution can be computed
EXACT = ("--store", "bf16", "--teacher", "states")
ROOT = Path(__file__).resolve().parent.parent


def call(script, *arguments):
    """`main()` of a script in this process: its summary, or (summary, code). UserError is raised as it is."""
    module = importlib.import_module(script)
    if "accelerate.state" in sys.modules:  # whose precision a process cannot change otherwise
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=False)
    before, sys.argv = sys.argv, [script + ".py", *map(str, arguments)]
    try:
        return module.main()
    finally:
        sys.argv = before


def make_work(folder, conversations, new_tokens, draft_vocab):
    """In `folder`: a tiny target, shards of its own answers to so many conversations, and a map. Returns the
    folder."""
    tiny.make_target(folder / "target")
    questions = [{"messages": row["messages"][:1]} for row in tiny.conversations(conversations)]
    tiny.write_rows(folder / "rows.jsonl", questions)
    call("extract_hidden_states", "--target", folder / "target", "--data", folder / "rows.jsonl",
         "--out", folder / "shards", "--regenerate", "--max-new-tokens", new_tokens, "--dtype", "float32",
         "--heldout", 0.2, *EXACT)
    call("build_vocab_map", "--shards", folder / "shards", "--draft-vocab", draft_vocab,
         "--out", folder / "map")
    return folder


def shell(script, *arguments, stdin=None, launcher=()):
    """(exit code, summary or None, stderr) of a script in a process of its own, checking that stdout is one
    line of JSON or empty."""
    done = subprocess.run([*(launcher or [sys.executable]), str(ROOT / f"{script}.py"), *map(str, arguments)],
                          capture_output=True, text=True, input=stdin, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert len(lines) <= 1, f"stdout holds more than the summary: {done.stdout[:500]}"
    return done.returncode, json.loads(lines[0]) if lines else None, done.stderr
