"""Every family of targets through every stage, from checkpoints in their published layout."""

import json
import os
import subprocess

import pytest
import torch
import transformers

from common.cli import UserError
from common.drafter import load_drafter
from common.shards import Shards
from common.target import open_target
from tests import families, tiny
from tests.scripts import EXACT, ROOT, call

LIMIT = 10  # tokens of an answer
PYTHONS = {"sglang": "SGLANG_PYTHON", "vllm": "VLLM_PYTHON"}
PAGE = ROOT / "docs" / "targets.md"
# of the refusal of local evaluation, for a cache that cannot forget
SERVED = "cache cannot go back behind rejected drafts in transformers; measure it on a server"
EXPECTED = {  # family: (as users call it, {stage: words of its refusal}); every other stage works
    "kimi_k2": ("Kimi-K2", {}),
    "kimi_k25": ("Kimi-K2.5, bf16", {}),
    "kimi_k25_int4": ("Kimi-K2.5, int4", {}),
    "deepseek_v3_fp8": ("DeepSeek-V3, fp8", {}),
    "deepseek_v32": ("DeepSeek-V3.2, fp8", {"evaluate": SERVED}),
    "qwen3_fp8": ("Qwen3, fp8", {}),
    "qwen3_moe": ("Qwen3-MoE", {}),
    "qwen3_next": ("Qwen3-Next", {"evaluate": SERVED}),
    "qwen3_5": ("Qwen3.5", {"evaluate": SERVED}),
    "qwen3_vl": ("Qwen3-VL", {}),
    "gpt_oss": ("gpt-oss, bf16", {}),
    "gpt_oss_mxfp4": ("gpt-oss, mxfp4", {}),
    "glm4_moe": ("GLM-4.5", {}),
    "glm4_moe_lite": ("GLM-4.7-Flash", {}),
    "gemma2": ("Gemma 2", {}),
    "gemma3_text": ("Gemma 3, text", {}),
    "gemma3": ("Gemma 3, with images", {}),
    "llama31": ("Llama 3.1", {}),
    "llama4": ("Llama 4", {"evaluate": SERVED}),
    "mistral3": ("Mistral Small 3", {}),
    "phi4": ("Phi-4", {}),
    "phi4_mini": ("Phi-4-mini", {}),
    "granite": ("Granite 3", {}),
    "cohere": ("Command R", {}),
    "cohere2": ("Command A, Command R7B", {}),
    "olmo2": ("OLMo 2", {}),
    "exaone4": ("EXAONE 4", {}),
    "ernie45": ("ERNIE 4.5", {}),
    "minimax": ("MiniMax-Text-01", {"evaluate": SERVED}),
    "falcon_h1": ("Falcon-H1", {"evaluate": SERVED}),
}


every_family = pytest.mark.parametrize("name", families.FAMILIES)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A function of a family's name and a stage: what the stage returned, or raises what it raised; every
    stage runs once."""
    outcomes, work = {}, {}

    def run(name, stage):
        if name not in work:
            work[name] = tmp_path_factory.mktemp(name)
            families.FAMILIES[name](work[name] / "target")
            questions = [{"messages": row["messages"][:1]} for row in tiny.conversations(4)]
            tiny.write_rows(work[name] / "rows.jsonl", questions)
        if (name, stage) not in outcomes:
            if stage != "extract":
                run(name, "extract" if stage == "train" else "train")
            try:
                outcomes[name, stage] = STAGES[stage](work[name]), None
            except Exception as error:
                outcomes[name, stage] = None, error
        found, error = outcomes[name, stage]
        if error:
            raise error
        return work[name], found

    return run


def extract(work):
    return call("extract_hidden_states", *EXACT, "--target", work / "target", "--data", work / "rows.jsonl",
                "--out", work / "shards", "--regenerate", "--max-new-tokens", LIMIT, "--dtype", "float32",
                "--heldout", 0)


def train(work):
    return call("train_drafter", "--shards", work / "shards", "--target", work / "target",
                "--out", work / "drafter", "--draft-vocab", "full", "--max-steps", 1, "--ttt-steps", 2,
                "--eval-shards", work / "shards")


def evaluate(work):
    return call("eval_speculative", "--target", work / "target", "--drafter", work / "drafter",
                "--prompts", work / "rows.jsonl", "--limit", 2, "--max-new-tokens", LIMIT,
                "--dtype", "float32")


STAGES = {"extract": extract, "train": train, "evaluate": evaluate}


def check_refusal(done, name, stage, monkeypatch):
    """True where a refusal is expected, after it was seen: one sentence, before weights are loaded."""
    words = EXPECTED[name][1].get(stage)
    if words is None:
        return False

    def loaded(*arguments, **named):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", loaded)
    with pytest.raises(UserError, match=words) as raised:
        done(name, stage)
    assert "\n" not in str(raised.value)
    return True


@every_family
def test_shards_hold_what_the_published_model_computes(done, name, monkeypatch):
    if check_refusal(done, name, "extract", monkeypatch):
        return
    work, _ = done(name, "extract")
    shards, model = Shards(work / "shards"), families.reference(work / "target")
    target, layers = open_target(work / "target"), shards.manifest["layers"]
    assert torch.equal(target.lm_head().float(), model.get_output_embeddings().weight)
    assert torch.equal(target.embedding().float(), model.get_input_embeddings().weight)
    assert layers == [2, 4, 5] and len(shards.index) == 4
    for number in range(4):
        sample = shards.sample(number)
        ids = sample["input_ids"].long()
        with torch.inference_mode():
            output = model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        assert torch.equal(sample["target_argmax"].long(), output.logits[0].argmax(-1))
        aux = torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1)
        torch.testing.assert_close(sample["aux_hidden_states"].float(), aux, atol=2e-3, rtol=2**-7)
        written = sample["loss_mask"][1:] == 1
        assert written.sum() > 2
        assert torch.equal(ids[1:][written], sample["target_argmax"].long()[:-1][written])


@every_family
def test_a_step_is_trained(done, name, monkeypatch):
    if not check_refusal(done, name, "train", monkeypatch):
        work, _ = done(name, "train")
        assert (work / "drafter" / "model.safetensors").exists()


@every_family
def test_answers_with_a_drafter_are_those_of_plain_decoding(done, name, monkeypatch):
    if check_refusal(done, name, "evaluate", monkeypatch):
        return
    summary, code = done(name, "evaluate")[1]
    assert code == 0 and summary["drafters"][0]["identical"] == summary["prompts"] == 2


@pytest.fixture(scope="module", params=PYTHONS)
def read(request, done, tmp_path_factory):
    """{name: what an engine's own code makes of the drafter, see tests/engine_configs.py}."""
    python = os.environ.get(PYTHONS[request.param])
    if not python:
        pytest.skip(f"{PYTHONS[request.param]} is not set; it names the Python of an environment with "
                    f"{request.param}, as .ci/run makes it")
    drafters = {}
    for name in families.FAMILIES:
        try:
            drafters[name] = str(done(name, "train")[0] / "drafter")
        except Exception:  # told by its own test
            continue
    work = tmp_path_factory.mktemp(request.param)
    target = str(done("llama31", "train")[0] / "target")
    (work / "job.json").write_text(json.dumps({"target": target, "drafters": drafters}))
    command = [python, str(ROOT / "tests" / "engine_configs.py"), request.param, str(work / "job.json"),
               str(work / "out.json")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return request.param, json.loads((work / "out.json").read_text()), drafters


@pytest.mark.parametrize("name", families.FAMILIES)
def test_an_engine_reads_the_drafter_as_we_do(read, name):
    """Sizes and the rotary table, from the engine's own code."""
    engine, found, drafters = read
    if name not in drafters:
        pytest.skip("it was not trained, which its own test tells")
    assert found[name]["refused"] is None, engine
    drafter = load_drafter(ROOT / drafters[name])[0]
    assert found[name]["draft"] == {key: drafter.config[key] for key in found[name]["draft"]}
    theirs = torch.tensor(found[name]["rope"])
    angles = torch.arange(len(theirs))[:, None] * drafter.inverse_frequencies
    ours = torch.cat([angles.cos(), angles.sin()], dim=1) * drafter.rope_factor
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def page_rows():
    """The table of docs/targets.md, from what is expected here."""
    yield "| target | extraction | training | local evaluation |"
    yield "| --- | --- | --- | --- |"
    for title, refusals in EXPECTED.values():
        cells = ["refused" if stage in refusals else "works" for stage in STAGES]
        yield f"| {title} | {' | '.join(cells)} |"


def test_the_page_says_what_is_tested():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert rows == list(page_rows())
    assert EXPECTED.keys() == families.FAMILIES.keys()


if __name__ == "__main__":
    print(*page_rows(), sep="\n")
