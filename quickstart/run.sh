#!/usr/bin/env bash
# A drafter for SmolLM2-135M-Instruct from scratch, with a reduced and with the full draft vocabulary,
# compared.
#
#   bash quickstart/run.sh
#
# Makes a virtual environment in .venv and everything else in quickstart/run. Interrupted, the same command
# goes on; finished stages are not repeated. To start over: rm -r quickstart/run
#
# QUICKSTART_PYTHON=/path/to/python   use this interpreter as it is, make no .venv and install nothing
# QUICKSTART_LIMIT=40                 only so many training prompts and 3 for evaluation, in
#                                     quickstart/run-40: a quick try of the machinery; the drafters will be
#                                     poor
set -euo pipefail
cd "$(dirname "$0")/.."
limit=${QUICKSTART_LIMIT:-}
run=quickstart/run${limit:+-$limit}
target=$run/target
draft_vocab=32000
mkdir -p "$run"

if [ -n "${QUICKSTART_PYTHON:-}" ]; then
  python=$QUICKSTART_PYTHON
else
  python=.venv/bin/python
  if [ ! -e .venv/installed ] || [ requirements.txt -nt .venv/installed ]; then
    echo "== making .venv and installing requirements.txt" >&2
    python3 -m venv .venv
    # Without a GPU the CPU build of torch, a tenth of the size: its version 2.13.0+cpu sorts above the 2.13.0
    # of PyPI, and where its index cannot be reached pip goes on without it.
    index=()
    nvidia-smi -L > /dev/null 2>&1 || index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    "$python" -m pip install --retries 1 "${index[@]}" torch==2.13.0 >&2
    "$python" -m pip install -r requirements.txt >&2
    touch .venv/installed
  fi
fi

# stage NAME COMMAND...: run the command unless it has finished before; keep the line of JSON that it prints
# in run/NAME.json and its seconds, a line for each attempt, in run/NAME.seconds.
stage() {
  local name=$1 start=$SECONDS status=0
  shift
  if [ -s "$run/$name.json" ]; then
    echo "== $name: done before" >&2
    return
  fi
  echo "== $name: $*" >&2
  "$@" > "$run/$name.json.part" || status=$?
  echo $((SECONDS - start)) >> "$run/$name.seconds"
  if [ "$status" != 0 ]; then
    local again="${limit:+QUICKSTART_LIMIT=$limit }bash quickstart/run.sh"
    echo "== $name stopped with exit code $status; $again goes on from here" >&2
    exit "$status"
  fi
  mv "$run/$name.json.part" "$run/$name.json"
}

# train NAME ARGUMENTS...: one drafter in run/NAME. Little data wants many small steps, hence the small
# batches.
train() {
  local name=$1
  shift
  stage "$name" "$python" train_drafter.py --shards "$run/shards" --target "$target" --out "$run/$name" "$@" \
    --ttt-steps 3 --epochs 1 --lr 2e-3 --batch-tokens 512 --mixed-precision "$precision" --resume
}

# A CPU without instructions for bfloat16 is several times slower in it than in float32.
fast=float32 precision=no
if "$python" -c 'import sys, torch
from common.target_model import fast_bfloat16
sys.exit(not fast_bfloat16("cuda" if torch.cuda.is_available() else "cpu"))'; then
  fast=bfloat16 precision=bf16
else
  echo "== no instructions for bfloat16 here: all is computed in float32" >&2
fi

stage target "$python" -m quickstart.get_target "$target"

# The target answers the questions greedily, and its hidden states are kept.
stage extract "$python" extract_hidden_states.py --target "$target" --data quickstart/train_prompts.jsonl \
  --out "$run/shards" --regenerate --temperature 0 --max-new-tokens 256 --block-lines 240 --dtype "$fast" \
  ${limit:+--limit "$limit"}

stage vocab-map "$python" build_vocab_map.py --shards "$run/shards" --draft-vocab "$draft_vocab" \
  --out "$run/vocab-map"

train drafter-reduced --draft-vocab "$draft_vocab" --vocab-map "$run/vocab-map"
train drafter-full --draft-vocab full

# Questions that nothing was trained on: in float32, where answers with a drafter must equal plain ones token
# by token, and in bfloat16, as the target is served, for the speed, where this machine has it.
evaluate() {
  stage "$1" "$python" eval_speculative.py --target "$target" \
    --drafter "$run/drafter-reduced" --drafter "$run/drafter-full" \
    --prompts quickstart/eval_prompts.jsonl --steps 3 --limit "$2" --max-new-tokens "$3" --dtype "$4"
}
questions=12
[ -z "$limit" ] || questions=3
evaluate identical "$questions" 48 float32
evaluate speed "$questions" 64 "$fast"

"$python" -m quickstart.report "$run" | tee "$run/report.txt"
