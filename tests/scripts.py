"""Run the scripts as a user would, and in the test's own process where a subprocess would only cost time."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def call(script, *arguments):
    """`main()` of a script in this process: its summary, or (summary, code). UserError is raised as it is."""
    module = importlib.import_module(script)
    before, sys.argv = sys.argv, [script + ".py", *map(str, arguments)]
    try:
        return module.main()
    finally:
        sys.argv = before


def shell(script, *arguments, stdin=None, launcher=()):
    """(exit code, summary or None, stderr) of a script in a process of its own, checking that stdout is one line of JSON or empty."""
    done = subprocess.run([*(launcher or [sys.executable]), str(ROOT / f"{script}.py"), *map(str, arguments)], capture_output=True,
                          text=True, input=stdin, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert len(lines) <= 1, f"stdout holds more than the summary: {done.stdout[:500]}"
    return done.returncode, json.loads(lines[0]) if lines else None, done.stderr
