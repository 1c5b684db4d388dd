"""Our states, drafts and answers against those of the engines that serve: SGLang and vLLM themselves, in
float32 on the CPU.

SGLANG_PYTHON and VLLM_PYTHON name the Python of an environment with each engine (.ci/run makes both); without
them the tests skip. On a real model: PARITY_TARGET=folder, and PARITY_DRAFTER=drafter folders of that target,
separated by a colon.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.drafter import captured_layers, load_drafter
from common.target import open_target
from common.target_model import TargetModel
from tests import tiny
from tests.scripts import EXACT, ROOT, call

PYTHONS = {"sglang": "SGLANG_PYTHON", "vllm": "VLLM_PYTHON"}
CASES = {  # name: kind of target, draft vocabulary, layers, and more arguments of train_drafter.py
    "llama-reduced": ("llama", 100, "auto"),
    "llama-full-other-layers": ("llama", "full", "3,4,6"),
    "qwen3-full": ("qwen3", "full", "auto"),
    "qwen3-reduced-other-layers": ("qwen3", 100, "1,4,7"),
    "llama-narrow-full": ("llama", "full", "auto", "--hidden-size", 32),
    "qwen3-narrow-reduced": ("qwen3", 100, "auto", "--hidden-size", 48),
}
REAL = dict(enumerate(os.environ["PARITY_DRAFTER"].split(":"))) if os.environ.get("PARITY_TARGET") else {}
NAMES = [*CASES, *(f"real-{number}" for number in REAL)]
FAULTS = ("absolute d2t", "layers off by one", "no fc")
CHAIN = {"steps": 3, "topk": 1, "draft_tokens": 4}
# Of more than two steps SGLang's differ from EAGLE-2's: a beam attends to what its own slot drafted before,
# not to its ancestors.
TREE = {"steps": 2, "topk": 4, "draft_tokens": 10}
LIMIT = 48
# Of the largest value of a layer. The engines' kernels add up in another order than ours; seen: none with
# SGLang, 3e-7 with vLLM.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """{name: {"target", "drafter": folders, "layers", "stop_ids", "plain", "drafted": rows of
    eval_speculative.py --out}}.

    The tiny drafters have learnt their prompts by halves, so that anything from no draft to all of them is
    accepted; the last prompt is a long one that they never saw.
    """
    work = tmp_path_factory.mktemp("parity")
    rows = [{"messages": row["messages"][:1]} for row in tiny.conversations(6)]
    learnt = tiny.write_rows(work / "learnt.jsonl", rows)
    unseen = torch.randint(3, 300, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = tiny.write_rows(work / "prompts.jsonl", [*rows, {"input_ids": unseen}])
    found = {}
    for name, (kind, draft_vocab, layers, *shape) in CASES.items():
        target = work / kind
        if not target.exists():
            tiny.make_target(target, kind, seed=3, head_dim=32)  # vLLM's attention takes no narrower heads
        drafter = half_trained(work / name, target, learnt, draft_vocab, layers, shape)
        found[name] = {"target": target, "drafter": drafter, "prompts": prompts}
    for number, folder in REAL.items():
        found[f"real-{number}"] = {"target": Path(os.environ["PARITY_TARGET"]).resolve(),
                                   "drafter": Path(folder).resolve(),
                                   "prompts": ROOT / "quickstart" / "eval_prompts.jsonl"}
    for case in found.values():
        case |= evaluate(case, CHAIN)
        config, target = load_drafter(case["drafter"])[0].config, open_target(case["target"])
        case["layers"] = captured_layers(config, target.num_layers, case["drafter"])
    found[NAMES[0]]["tree"] = evaluate(found[NAMES[0]], TREE)["drafted"]
    return found


def half_trained(work, target, rows, draft_vocab, layers, shape):
    call("extract_hidden_states", *EXACT, "--target", target, "--data", rows, "--out", work / "shards",
         "--regenerate", "--layers", layers, "--max-new-tokens", LIMIT, "--dtype", "float32", "--heldout", 0)
    vocab_map = []
    if draft_vocab != "full":
        call("build_vocab_map", "--shards", work / "shards", "--draft-vocab", draft_vocab,
             "--out", work / "map")
        vocab_map = ["--vocab-map", work / "map"]
    call("train_drafter", "--shards", work / "shards", "--target", target, "--out", work / "drafter",
         "--draft-vocab", draft_vocab, *vocab_map, *shape, "--eval-shards", work / "shards", "--ttt-steps", 3,
         "--epochs", 12, "--lr", 1e-2, "--batch-tokens", 200)
    return work / "drafter"


def evaluate(case, shape):
    """{"stop_ids", "plain", "drafted"} of eval_speculative.py."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.jsonl"
        summary, code = call("eval_speculative", "--target", case["target"], "--drafter", case["drafter"],
                             "--prompts", case["prompts"], "--limit", 8, "--steps", shape["steps"],
                             "--topk", shape["topk"], "--draft-tokens", shape["draft_tokens"],
                             "--max-new-tokens", LIMIT, "--dtype", "float32", "--out", out)
        answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert code == 0
    return {"stop_ids": summary["settings"]["eos_ids"],
            "plain": [answer for answer in answers if not answer["drafter"]],
            "drafted": [answer for answer in answers if answer["drafter"]]}


@pytest.fixture(scope="module", params=PYTHONS)
def served(request, tmp_path_factory):
    """What an engine wrote: {name: its answers with the drafter, target folder: its plain ones, fault:
    answers}, folder of its states."""
    engine = request.param
    if not os.environ.get(PYTHONS[engine]):
        pytest.skip(f"{PYTHONS[engine]} is not set; it names the Python of an environment with {engine}, as "
                    f".ci/run makes it")
    local, work = request.getfixturevalue("local"), tmp_path_factory.mktemp(engine)
    jobs = {}
    for name, case in local.items():
        job = {"target": str(case["target"]), "prompts": [answer["prompt_ids"] for answer in case["plain"]],
               "max_new_tokens": LIMIT, "stop_ids": case["stop_ids"], **CHAIN}
        jobs[job["target"]] = {**job, "drafter": None, "states": None}
        jobs[name] = {**job, "drafter": str(case["drafter"]), "states": str(work / name)}
    if engine == "sglang":
        jobs["tree"] = {**jobs[NAMES[0]], **TREE, "states": None}
    for fault in FAULTS if engine == "sglang" else ():
        case, folder = break_export(work / fault.replace(" ", "-"), fault, local)
        jobs[fault] = {**jobs[case], "drafter": str(folder), "states": None}
    (work / "job.json").write_text(json.dumps(list(jobs.values())))
    command = [os.environ[PYTHONS[engine]], str(ROOT / "tests" / "engines.py"), engine,
               str(work / "job.json"), str(work / "out.json")]
    with open(work / "log", "w+") as log:
        code = subprocess.run(command, stdout=log, stderr=log).returncode
        log.seek(0)
        lines = log.read().splitlines()
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # into CI's log
        print("", *(line for line in lines if line.startswith(f"{engine} ")), sep="\n", flush=True)
    if code:
        pytest.fail(f"{' '.join(command)} ended with code {code}:\n" + "\n".join(lines[-40:]), pytrace=False)
    return dict(zip(jobs, json.loads((work / "out.json").read_text())["runs"], strict=True)), work


def break_export(folder, fault, local):
    """(the case, the folder of its drafter copied with a fault that SGLang does not notice)."""
    case = {"absolute d2t": "llama-reduced", "layers off by one": "llama-full-other-layers",
            "no fc": "llama-reduced"}[fault]
    shutil.copytree(local[case]["drafter"], folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if fault == "absolute d2t":
        # an id outside the vocabulary would crash the tiny target, and be seen
        rows = torch.arange(len(tensors["d2t"]))
        tensors["d2t"] = (tensors["d2t"] + rows).minimum(config["vocab_size"] - 1 - rows)
    elif fault == "layers off by one":
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = local[case]["layers"]
    else:
        del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return case, folder


def differing_drafts(answers, wanted):
    """(verifications whose candidates are not ours, all verifications)."""
    differing = total = 0
    for answer, ours in zip(answers, wanted, strict=True):
        pairs = list(zip(answer["candidates"], ours["candidates"], strict=False))
        longer = max(len(answer["candidates"]), len(ours["candidates"]))
        differing += sum(theirs != own for theirs, own in pairs) + longer - len(pairs)
        total += longer
    return differing, total


def check_accepted(answers, ours):
    """The engines count a last verification whole, we what the end token or the limit left of it."""
    for answer, own in zip(answers, ours, strict=True):
        cut = len(own["candidates"][-1]) - 1 - own["accepted"][-1]
        assert 0 <= answer["accepted"] - sum(own["accepted"]) <= cut


@pytest.mark.parametrize("name", NAMES)
def test_states_are_the_engines(served, local, name):
    """Every row of every prompt, layer by layer, in the engine that drafts with them; a neighbouring layer
    would be far off."""
    layers, (_, work) = local[name]["layers"], served
    target = open_target(local[name]["target"])
    model = TargetModel(target, range(1, target.num_layers), "float32", device="cpu")
    for number, answer in enumerate(local[name]["plain"]):
        theirs = load_file(work / name / f"{number}.safetensors")
        aux, last = model.states(torch.tensor([answer["prompt_ids"]]))
        states = dict(zip(model.layers, aux[0].chunk(len(model.layers), -1), strict=True))
        assert theirs["aux"].shape == (len(answer["prompt_ids"]), 3 * target.hidden_size)
        for layer, found in zip(layers, theirs["aux"].chunk(3, -1), strict=True):
            assert distance(found, states[layer]) < TOLERANCE
            for neighbour in {layer - 1, layer + 1} & states.keys():
                assert distance(found, states[neighbour]) > 10 * TOLERANCE
        if "last" in theirs:  # vLLM shows its drafter the three layers only
            assert distance(theirs["last"], last[0]) < TOLERANCE


def distance(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens_are_drafted_at_every_verification(served, local, name):
    answers, ours = served[0][name], local[name]["drafted"]
    assert differing_drafts(answers, ours)[0] == 0
    assert [answer["verifications"] for answer in answers] == [len(own["candidates"]) for own in ours]
    accepted = [count for own in ours for count in own["accepted"]]
    assert set(accepted) == set(range(CHAIN["steps"] + 1))  # also where drafts are accepted in part
    check_accepted(answers, ours)


@pytest.mark.parametrize("served", ["sglang"], indirect=True)
def test_the_same_tree_is_drafted_at_every_verification(served, local):
    answers, ours = served[0]["tree"], local[NAMES[0]]["tree"]
    assert differing_drafts(answers, ours)[0] == 0
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in local[NAMES[0]]["plain"]]
    check_accepted(answers, ours)


@pytest.mark.parametrize("name", NAMES)
def test_text_with_a_drafter_is_plain_text(served, local, name):
    for answers in (served[0][name], served[0][str(local[name]["target"])], local[name]["drafted"]):
        assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in local[name]["plain"]]


@pytest.mark.parametrize("served", ["sglang"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_export_is_seen(served, local, fault):
    """SGLang serves all of these without a word, and writes the right text: only comparing drafts tells."""
    case = "llama-full-other-layers" if fault == "layers off by one" else "llama-reduced"
    answers, ours = served[0][fault], local[case]
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in ours["plain"]]
    differing, total = differing_drafts(answers, ours["drafted"])
    assert differing > total / 4
