"""extract_hidden_states.py: which states are stored, what is written when, what is refused."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import extract_hidden_states
from common.cli import Failed, UserError
from common.decode import choose, decode, random_numbers, sampling_settings
from common.provenance import compare
from common.shards import Shards
from common.target import load_tokenizer, open_target
from common.target_model import TargetModel
from tests import tiny

ROOT = Path(__file__).parent.parent


def extract(monkeypatch, **flags):
    """Run main() with flags given as target=..., max_length=..., True for a flag without a value. Returns its
    summary.
    """
    flags = {"store": "bf16", "teacher": "states", **flags}
    words = [f"--{key}" if value is True else f"--{key}={value}"
             for key, value in ((key.replace("_", "-"), value) for key, value in flags.items())]
    monkeypatch.setattr(sys, "argv", ["extract_hidden_states.py", *words])
    return extract_hidden_states.main()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.make_target(tmp_path_factory.mktemp("llama") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", tiny.conversations(24))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_stored_states_are_the_models_own(tmp_path, monkeypatch, kind, data):
    folder = tiny.make_target(tmp_path / "target", kind)
    extract(monkeypatch, target=folder, data=data, out=tmp_path / "out", dtype="float32", limit=5,
            max_batch_tokens=150)
    shards, info = Shards(tmp_path / "out"), open_target(folder)
    model = TargetModel(info, [2, 4, 5], "float32").model
    for number in range(5):
        sample = shards.sample(number)
        with torch.inference_mode():
            output = model(input_ids=sample["input_ids"][None].long(), output_hidden_states=True)
            logits = torch.nn.functional.linear(sample["last_hidden_state"].float(), info.lm_head().float())
        own = output.logits[0].float()
        aux = torch.cat([output.hidden_states[layer][0] for layer in (2, 4, 5)], dim=-1)
        # stored in bfloat16
        torch.testing.assert_close(sample["aux_hidden_states"].float(), aux, atol=1e-4, rtol=2**-7)
        assert torch.equal(sample["target_argmax"].long(), own.argmax(-1))
        best = own.topk(2).values
        clear = best[:, 0] - best[:, 1] > 0.02 * best[:, 0].abs()  # elsewhere bfloat16 may turn the order
        assert clear.float().mean() > 0.5 or kind == "gemma2"  # its soft cap leaves small gaps
        assert torch.equal(logits.argmax(-1)[clear], own.argmax(-1)[clear])


def test_a_toy_whose_layer_k_adds_k_plus_1_tells_which_states_were_taken(tmp_path, monkeypatch, data):
    folder = tiny.make_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text()) | {"mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"].zero_()
    for k in range(8):
        for part, size in (("gate_proj", 96), ("up_proj", 96), ("down_proj", 64)):
            added = float(k + 1) if part == "down_proj" else 0.0
            tensors[f"model.layers.{k}.mlp.{part}.bias"] = torch.full((size,), added)
        tensors[f"model.layers.{k}.mlp.down_proj.weight"].zero_()
        tensors[f"model.layers.{k}.self_attn.o_proj.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    extract(monkeypatch, target=folder, data=data, out=tmp_path / "out", limit=2, layers="1,3,7")
    sample = Shards(tmp_path / "out").sample(0)
    # hidden_states[i] is the sum of what layers 0..i-1 add: 1, 1+2+3, 1+..+7; behind the final norm a
    # constant is 1
    for part, value in zip(sample["aux_hidden_states"].split(64, dim=-1), (1, 6, 28), strict=True):
        assert torch.equal(part.float(), torch.full_like(part.float(), value))
    assert torch.allclose(sample["last_hidden_state"].float(), torch.ones(1), atol=0.01)


def test_every_row_is_accounted_for_and_ids_do_not_move(tmp_path, monkeypatch, target):
    chat = tiny.conversations(1)[0]
    rows = [chat, {"messages": []}, {**chat, "source": "b"}, {"prompt": "Hi"}, {"text": "She has 2 apples."},
            {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 0, 1]}, {"input_ids": [5, 328]},
            {"input_ids": [5]}]
    lines = [json.dumps(row) for row in rows]
    lines.insert(2, "")
    (tmp_path / "rows").write_text("\n".join(lines))
    summary = extract(monkeypatch, target=target, data=tmp_path / "rows", out=tmp_path / "out", block_lines=1)
    tensors = [load_file(file) for file in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert [tensor["sample_ids"].tolist() for tensor in tensors] == [[0], [3], [5], [6]]
    assert [tensor["source_ids"].tolist() for tensor in tensors] == [[0], [1], [0], [0]]
    assert tensors[3]["loss_mask"].tolist() == [0, 0, 0, 1]
    assert tensors[3]["input_ids"].tolist() == [5, 6, 7, 8]
    assert tensors[2]["loss_mask"].tolist() == [0] + [1] * (len(tensors[2]["input_ids"]) - 1)
    assert summary["read"] == 8 and summary["samples"] == 4 and summary["shards"] == 4
    assert summary["skipped"] == {"empty": 1, "no answer": 1, "malformed": 1, "no supervised token": 1}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["done"]["tokens"] == summary["tokens"] == sum(len(t["input_ids"]) for t in tensors)
    assert manifest["sources"] == ["", "b"]
    assert manifest["planned"] == {"lines": 9, "blocks": 9, "samples": 4, "tokens": 124}
    assert manifest["special_ids"] == {"eos": [2], "chat": {"<|im_start|>": 1, "<|im_end|>": 2}}
    assert summary["bytes_per_token"] == 4 * 64 * 2 + 9


def test_a_cut_answer_stays_supervised_up_to_the_cut(tmp_path, monkeypatch, target):
    rows = tiny.write_rows(tmp_path / "rows", tiny.conversations(2))
    extract(monkeypatch, target=target, data=rows, out=tmp_path / "whole")
    summary = extract(monkeypatch, target=target, data=rows, out=tmp_path / "cut", max_length=50)
    for number in range(2):
        whole, cut = Shards(tmp_path / "whole").sample(number), Shards(tmp_path / "cut").sample(number)
        assert len(whole["input_ids"]) > 50 == len(cut["input_ids"])
        assert torch.equal(cut["loss_mask"], whole["loss_mask"][:50]) and cut["loss_mask"][-1]
    assert summary["dropped_or_cut"] == {"samples cut at 50 tokens": 2}


def shard_bytes(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("shard-*"))}


def test_interrupted_and_resumed_equals_one_go(tmp_path, monkeypatch, capsys, target, data):
    flags = dict(target=target, data=data, block_lines=6, regenerate=True, max_new_tokens=6, temperature=1)
    extract(monkeypatch, **flags, out=tmp_path / "once")
    once = shard_bytes(tmp_path / "once")
    assert len(once) == 4
    write_shard = extract_hidden_states.write_shard

    def interrupted(folder, block, samples):
        if block == 2:
            raise KeyboardInterrupt
        return write_shard(folder, block, samples)

    out = tmp_path / "twice"
    monkeypatch.setattr(extract_hidden_states, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract(monkeypatch, **flags, out=out)
    assert set(shard_bytes(out)) == {"shard-00000.safetensors", "shard-00001.safetensors"}
    with pytest.raises(UserError, match="2 of 4 blocks"):
        Shards(out)
    (out / ".shard-00002.safetensors.tmp-1").write_bytes(b"half")
    finished = (out / "shard-00000.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(extract_hidden_states, "write_shard", write_shard)
    extract(monkeypatch, **flags, out=out)
    assert shard_bytes(out) == once and (out / "shard-00000.safetensors").stat().st_mtime_ns == finished
    assert sorted(file.name for file in out.iterdir()) == [".lock", "manifest.json", *sorted(once)]
    one, other = (json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path / "once", out))
    assert one == other
    # a damaged shard is made again, when asked also one of the right size
    damaged = out / "shard-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    looked = extract(monkeypatch, **flags, out=out, verify=True, dry_run=True)
    assert (looked["shards"], looked["finished"]) == (4, 3) and shard_bytes(out) != once
    assert "shard-00001.safetensors is missing or damaged" in capsys.readouterr().err
    extract(monkeypatch, **flags, out=out, verify=True)
    assert shard_bytes(out) == once


def other_rows(data, change):
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    change(rows)
    return tiny.write_rows(Path(data).with_name(f"{len(list(Path(data).parent.iterdir()))}.jsonl"), rows)


def hashes(key):
    return rf"was begun with {key} [0-9a-f]{{12}}, this command has [0-9a-f]{{12}}"


@pytest.mark.parametrize("change, words", [
    ({"max_length": 100}, "max_length 512, this command has 100"),
    ({"layers": "1,2,3"}, r"layers \[2, 4, 5\], this command has \[1, 2, 3\]"),
    ({"limit": 5}, hashes("--data and --limit, with hash")),
    ({"data": lambda rows: rows[3]["messages"][1].update(content="No.")},
     hashes("--data and --limit, with hash")),
    ({"data": lambda rows: rows.reverse()}, hashes("--data and --limit, with hash")),
    ({"target": {"seed": 3}}, r"target tensors_sha256 [0-9a-f]{12}, this command has [0-9a-f]{12}"),
    ({"target": "rms_norm_eps"}, hashes("target text_config_sha256")),
    ({"target": {"chat_template": "x" + tiny.CHAT_TEMPLATE}}, hashes("chat_template_sha256")),
    ({"template_kwargs": '{"a": 1}'}, 'template_kwargs {}, this command has {"a": 1}'),
    ({"system": "Be brief."}, "system null, this command has Be brief"),
    ({"store": "fp8"}, "--store bfloat16, this command has float8_e4m3fn"),
    ({"dtype": "float32"}, "--dtype auto, this command has float32"),
    ({"teacher": "compact"}, r"--teacher \[.*last_hidden_state.*\], this command has \[.*teacher_ids.*\]"),
    ({"heldout": 0.5}, "heldout 0.05, this command has 0.5"),
    ({"block_lines": 7}, "block_lines 512, this command has 7"),
    ({"regenerate": True}, "sampling null, this command has {.*max_new_tokens.*}"),
])
def test_other_settings_are_refused_with_both_values(tmp_path, monkeypatch, target, data, change, words):
    flags = dict(target=target, data=data, out=tmp_path / "out")
    extract(monkeypatch, **flags)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    if "data" in change:
        change = {"data": other_rows(data, change["data"])}
    if change.get("target") == "rms_norm_eps":
        change = {"target": shutil.copytree(target, tmp_path / "target")}
        config = json.loads((target / "config.json").read_text())
        (tmp_path / "target" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    elif "target" in change:
        change = {"target": tiny.make_target(tmp_path / "target", **change["target"])}
    with pytest.raises(UserError, match=words):
        extract(monkeypatch, **{**flags, **change})
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_another_number_of_candidates_is_refused(tmp_path, monkeypatch, target, data):
    flags = dict(target=target, data=data, out=tmp_path / "out", teacher="compact")
    extract(monkeypatch, **flags)
    monkeypatch.setattr(extract_hidden_states, "CANDIDATES", 16)
    with pytest.raises(UserError, match="candidates 64, this command has 16"):
        extract(monkeypatch, **flags)


def test_another_template_is_refused_unless_forced(tmp_path, monkeypatch, data):
    folder = tiny.make_target(tmp_path / "target")
    flags = dict(target=folder, data=data, out=tmp_path / "out", limit=3)
    extract(monkeypatch, **flags)
    tiny.save_tokenizer(folder, "x" + tiny.CHAT_TEMPLATE)
    with pytest.raises(UserError, match="chat_template_sha256"):
        extract(monkeypatch, **flags)
    assert extract(monkeypatch, **flags, force=True)["forced"] == ["chat_template_sha256"]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "llava"])
def test_answers_equal_those_of_transformers(tmp_path, kind):
    folder = tiny.make_target(tmp_path / "target", kind)
    model = TargetModel(open_target(folder), [2, 4, 5], "float32")
    torch.manual_seed(1)
    prompts = [torch.randint(3, 320, (length,)).tolist() for length in (3, 11, 5, 5, 20, 1, 8, 30, 2, 9, 7)]
    limits = [25, 3, 25, 25, 25, 1, 25, 25, 25, 25, 25]
    stops = list(range(100, 116))
    ended = []
    answers = [answer.ids for answer in decode(model, prompts, limits, set(stops), most=4, prefill_tokens=40,
                                               report=ended.append).answers]
    for prompt, limit, answer in zip(prompts, limits, answers, strict=True):
        wanted = model.model.generate(torch.tensor([prompt]),
                                      attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                      do_sample=False,
                                      max_new_tokens=limit, eos_token_id=stops, pad_token_id=0)[0,
                                                                                                len(prompt) :]
        assert answer == wanted.tolist()
    assert sorted(map(len, ended)) == sorted(map(len, answers))
    assert sum(answer[-1] in stops for answer in answers) >= 2
    assert sum(len(answer) == 25 for answer in answers) >= 2


def test_a_samples_random_numbers_do_not_depend_on_its_company(target):
    model = TargetModel(open_target(target), [2, 4, 5], "float32")
    prompts = [[1, 5, 9], [7, 8], [30, 31, 32, 33], [4], [50, 60], *([70 + n, 80] for n in range(9))]

    def sampled(order, most, seed=0, **more):
        limits = [12 - n % 5 for n in order]  # some idle until a quarter of the batch has ended
        drawn = [random_numbers(seed, [n, 0], limit) for n, limit in zip(order, limits, strict=True)]
        sampling = {"temperature": 4.0, "top_p": 0.95, "top_k": 50, **more}
        group = decode(model, [prompts[n] for n in order], limits, {2}, sampling=sampling, most=most,
                       numbers=lambda n, first, count: drawn[n][first : first + count])
        return [answer.ids for answer in group.answers]

    together = sampled(range(5), 5)
    assert sampled([3, 1], 2) == [together[3], together[1]] and sampled(range(5), 1) == together
    assert sampled(range(14), 9) == sampled(range(14), 14) and sampled(range(14), 9)[:5] == together
    assert sampled(range(5), 5, seed=1) != together
    assert sampled(range(5), 5, top_k=1) == sampled(range(5), 5, temperature=0)


def test_sampling_inverts_the_filtered_distribution(target):
    model = TargetModel(open_target(target), [2, 4, 5], "float32")
    torch.manual_seed(0)
    last = torch.randn(1, 64)
    logits = model.logits(last)[0].double() / 20.0
    order = logits.argsort(descending=True).tolist()
    # top-k first, renormalised, then top-p
    chances = [logits.softmax(0)[token].item() for token in order[:40]]
    chances = [chance / sum(chances) for chance in chances]
    kept, total = [], 0.0
    for token, chance in zip(order, chances, strict=False):
        if total < 0.8:
            kept.append((token, chance))
            total += chance
    count = 20000
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen = choose(model, last.expand(count, -1), {"temperature": 20.0, "top_k": 40, "top_p": 0.8}, numbers)
    shares = torch.bincount(chosen, minlength=328).double() / count
    for token, chance in kept:
        assert abs(shares[token].item() - chance / total) < 2e-4
    assert shares.count_nonzero() == len(kept) > 5


def test_regenerated_turns_stand_in_the_context_of_their_own_answers(tmp_path, monkeypatch, target):
    given = {"role": "assistant", "content": "",
             "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = [{"turns": ["Hi Ann", "And Bob?"], "category": "x"},
            {"messages": [{"role": "user", "content": "2 + 2?"}, given, {"role": "tool", "content": "4"},
                          {"role": "assistant", "content": "It is 4."}]}]
    data = tiny.write_rows(tmp_path / "rows", rows)
    summary = extract(monkeypatch, target=target, data=data, out=tmp_path / "out", regenerate=True,
                      dtype="float32", max_new_tokens=8)
    assert summary["samples"] == 3
    tensors = load_file(tmp_path / "out" / "shard-00000.safetensors")
    assert tensors["sample_ids"].tolist() == [0, 0, 1] and tensors["turn_ids"].tolist() == [0, 1, 1]
    shards, tokenizer = Shards(tmp_path / "out"), load_tokenizer(open_target(target))
    answers = []
    for number in range(3):
        sample = shards.sample(number)
        first = int(sample["loss_mask"].argmax())
        assert sample["loss_mask"][first:].all() and 1 <= len(sample["input_ids"]) - first <= 8
        # greedy: what the target wrote is what it would write, row by row
        assert torch.equal(sample["target_argmax"][first - 1 : -1], sample["input_ids"][first:])
        answers.append((sample["input_ids"][:first].tolist(), sample["input_ids"][first:].tolist()))
    first_words = tokenizer.decode([token for token in answers[0][1] if token != 2])
    words = ("user", "Hi Ann"), ("assistant", first_words), ("user", "And Bob?")
    context = [{"role": role, "content": content} for role, content in words]
    assert answers[1][0] == tokenizer.apply_chat_template(context, add_generation_prompt=True,
                                                          return_dict=False)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["sampling"] == {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0,
                                    "max_new_tokens": 8, "stop_ids": [2]}


def test_temperature_config_takes_the_generation_config(tmp_path, target):
    folder = shutil.copytree(target, tmp_path / "target")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6,
                                                               "top_p": 0.9, "top_k": 20}))
    found = sampling_settings(open_target(folder), "config", 1.0, 0)
    assert found == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    for values in (("hot", 1.0, 0), ("-1", 1.0, 0), ("1", 0.0, 0), ("1", 1.0, -1)):
        with pytest.raises(UserError, match="wanted|neither"):
            sampling_settings(open_target(folder), *values)


def test_states_that_are_not_finite_are_named_skipped_and_counted(tmp_path, monkeypatch, capsys):
    folder = tiny.make_target(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][300] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rows = tiny.write_rows(tmp_path / "rows",
                           [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 300, 7]}, {"input_ids": [9, 10]}])
    summary = extract(monkeypatch, target=folder, data=rows, out=tmp_path / "out")
    assert summary["samples"] == 2 and summary["skipped"] == {"non-finite states": 1}
    assert "line 2" in capsys.readouterr().err
    assert load_file(tmp_path / "out" / "shard-00000.safetensors")["sample_ids"].tolist() == [0, 2]


@pytest.mark.parametrize("store", ["bf16", "fp8"])
def test_states_of_any_size_fit_into_every_store(tmp_path, monkeypatch, data, store):
    folder = tiny.make_target(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"].mul_(1e6)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    made = extract(monkeypatch, target=folder, data=data, out=tmp_path / "out", store=store)
    shards = Shards(tmp_path / "out")
    assert made["samples"] == 24 and made["skipped"] == {}
    for number in range(24):
        states = shards.sample(number)["aux_hidden_states"]  # float16 ends at 65504
        assert states.isfinite().all() and states.abs().max() > 1e6


def test_dry_run_reads_stdin_says_the_size_and_touches_nothing(tmp_path, monkeypatch, target, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(data).read_bytes())))
    dry = extract(monkeypatch, target=target, data="-", out=tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    real = extract(monkeypatch, target=target, data=data, out=tmp_path / "out")
    for key in ("samples", "tokens", "supervised_tokens", "skipped", "shards"):
        assert dry[key] == real[key]
    # ids of the samples, and the header
    assert dry["bytes"] <= real["bytes"] <= dry["bytes"] + 24 * 40 + 4096
    assert 0 < dry["hours"] < 1
    most = extract(monkeypatch, target=target, data=data, out=tmp_path / "two", dry_run=True, regenerate=True,
                   max_new_tokens=30)
    assert most["hours"] > dry["hours"]
    made = extract(monkeypatch, target=target, data=data, out=tmp_path / "two", regenerate=True,
                   max_new_tokens=30)
    assert most["samples"] == made["samples"] and made["tokens"] <= most["tokens"]


@pytest.mark.parametrize("store", ["bf16", "fp8"])
@pytest.mark.parametrize("teacher", ["states", "compact"])
def test_the_bytes_told_before_are_those_stored(tmp_path, monkeypatch, target, data, store, teacher):
    monkeypatch.setattr(extract_hidden_states, "CANDIDATES", 16)
    flags = dict(target=target, data=data, out=tmp_path / "out", store=store, teacher=teacher)
    told = extract(monkeypatch, **flags, dry_run=True)
    made = extract(monkeypatch, **flags)
    assert abs(told["bytes_per_token"] - made["bytes_per_token"]) < 1e-9
    # ids of the samples, and the header
    assert told["bytes"] <= made["bytes"] <= told["bytes"] + 24 * 40 + 4096


def test_the_hours_told_before_grow_with_the_data(tmp_path, monkeypatch, target, capsys):
    told = {}
    for count in (20, 400):
        rows = tiny.write_rows(tmp_path / f"{count}.jsonl", tiny.conversations(count))
        told[count] = min(extract(monkeypatch, target=target, data=rows, out=tmp_path / "out",
                                  dry_run=True)["hours"] for _ in range(3))
    assert 5 < told[400] / told[20] < 80
    assert "tokens/s of states in a trial of" in capsys.readouterr().err


def test_a_backend_that_is_not_there_is_one_sentence(tmp_path, monkeypatch, target, data):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(UserError, match="SGLang cannot be imported here .* --backend hf"):
        extract(monkeypatch, target=target, data=data, out=tmp_path / "out", backend="sglang")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="--server-url is for --backend sglang"):
        extract(monkeypatch, target=target, data=data, out=tmp_path / "out", server_url="http://localhost:1")


@pytest.mark.parametrize("dtype, size", [("auto", 4), ("bfloat16", 2)])
def test_a_target_that_cannot_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch, capsys, target, data,
                                                                 dtype, size):
    need = size * sum(tensor.numel() for tensor in load_file(target / "model.safetensors").values())
    assert extract_hidden_states.loaded_bytes(open_target(target), dtype) == need
    monkeypatch.setattr(extract_hidden_states, "free_memory", lambda device: need - 1)
    monkeypatch.setattr(extract_hidden_states, "TargetModel", lambda *_: 1 / 0)
    with pytest.raises(UserError, match="the weights of .* are free on .* --backend sglang --server-url URL"):
        extract(monkeypatch, target=target, data=data, out=tmp_path / "out", dtype=dtype)
    assert "-m sglang.launch_server" in capsys.readouterr().err and not (tmp_path / "out").exists()


class Shifted:
    """Stands in for what runs the target: states that say which token they are of."""

    asked = []  # how many answers at once, of all that were made

    def __init__(self, target, *_):
        self.target, self.dtype, self.device = target, torch.float32, torch.device("cpu")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def answer(self, prompts, limits, sampling, seeds, report=lambda ids: None):
        self.asked.append(len(prompts))
        answers = [[5 + seed % 3, 2][:limit] for seed, limit in zip(seeds, limits, strict=True)]
        for ids in answers:
            report(ids)
        return answers

    def states(self, samples):
        rows = [torch.tensor(sample, dtype=torch.float32)[:, None] for sample in samples]
        return [(own.expand(-1, 192), own.expand(-1, 64)) for own in rows]

    def flow(self, batches):
        return map(self.states, batches)

    def lm_head(self, last):
        return torch.nn.functional.one_hot(last[:, 0].long(), 328).float()


def test_a_backend_needs_no_more_than_answers_states_and_an_lm_head(tmp_path, monkeypatch, target, data):
    monkeypatch.setattr(extract_hidden_states, "SGLang", Shifted)
    extract(monkeypatch, target=target, data=data, out=tmp_path / "out", backend="sglang", regenerate=True,
            max_batch_tokens=150)
    shards = Shards(tmp_path / "out")
    for number in range(len(shards.index)):
        sample = shards.sample(number)
        assert torch.equal(sample["target_argmax"], sample["input_ids"]) and sample["input_ids"][-1] == 2
        # bfloat16 of up to 327
        assert (sample["aux_hidden_states"].float() - sample["input_ids"][:, None]).abs().max() <= 1


def test_answers_are_written_in_groups_and_kept_until_all_blocks_have_states(tmp_path, monkeypatch, target,
                                                                            data):
    """A group is whole blocks; after an interruption only what was not decided yet is asked for again."""
    monkeypatch.setattr(extract_hidden_states, "SGLang", Shifted)
    monkeypatch.setattr(Shifted, "asked", [])
    flags = dict(target=target, data=data, backend="sglang", regenerate=True, block_lines=2)
    extract(monkeypatch, **flags, out=tmp_path / "out", generate_rows=9)
    trial, groups = Shifted.asked[:3], Shifted.asked[3:]
    assert len(set(trial)) == 1 and groups == [10, 10, 4]
    once, out = shard_bytes(tmp_path / "out"), tmp_path / "killed"
    write_shard = extract_hidden_states.write_shard

    def interrupted(folder, block, samples):
        if block == 7:
            raise KeyboardInterrupt
        return write_shard(folder, block, samples)

    monkeypatch.setattr(extract_hidden_states, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract(monkeypatch, **flags, out=out, generate_rows=9)
    assert [path.name for path in out.glob("answers*")] == ["answers-00005-00009.safetensors"]
    monkeypatch.setattr(extract_hidden_states, "write_shard", write_shard)
    Shifted.asked.clear()
    extract(monkeypatch, **flags, out=out, generate_rows=9)
    assert Shifted.asked[3:] == [4] and shard_bytes(out) == once and not list(out.glob("answers*"))
    (out / "shard-00002.safetensors").unlink()
    Shifted.asked.clear()
    extract(monkeypatch, **flags, out=out, generate_rows=9)
    assert Shifted.asked[3:] == [10] and shard_bytes(out) == once


@pytest.mark.parametrize("lines, most, starts", [
    (7, None, [0, 3, 6]), (6, None, [0, 3]), (0, None, []),
    (7, 10, [0, 2, 4, 5]),  # the long line is alone, the others are as many as fit
    (20, 10, [0, 2, 4, 5, 8, 11, 14, 17]),
])
def test_a_long_row_does_not_set_the_size_of_all_blocks(lines, most, starts):
    sized = [(0, 4), (1, 5), (2, 3), (3, 1), (4, 30), (5, 2), (6, 2)][:lines]
    assert extract_hidden_states.block_starts(sized, lines, 3, most) == starts


def test_a_full_disk_is_told_before_and_leaves_whole_shards(tmp_path, monkeypatch, target, data):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100000))
    with pytest.raises(UserError, match=r"the shards need 714.8 KiB and the disk .* has 97.7 KiB free"):
        extract(monkeypatch, target=target, data=data, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = tmp_path / "out"
    monkeypatch.setattr(shutil, "disk_usage",
                        lambda path: usage._replace(free=100000 if shard_bytes(out) else 1 << 40))
    with pytest.raises(Failed, match=r"97.7 KiB left and the next shard needs .* the same command again"):
        extract(monkeypatch, target=target, data=data, out=out, block_lines=12)
    assert sorted(file.name for file in out.iterdir()) == [".lock", "journal-0.jsonl", "manifest.json",
                                                           "shard-00000.safetensors"]
    monkeypatch.undo()
    assert extract(monkeypatch, target=target, data=data, out=out, block_lines=12)["samples"] == 24


def remove(folder, *patterns):
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()


def without_lm_head(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BAD_TARGETS = {
    "no tokenizer": (lambda folder: remove(folder, "tokenizer*", "chat_template*"), "holds no tokenizer"),
    "no template": (lambda folder: tiny.save_tokenizer(folder, None) and remove(folder, "chat_template*"),
                    "has no chat template"),
    "no lm_head": (without_lm_head, "holds no lm_head"),
    "few layers": (lambda folder: tiny.make_target(folder, layers=4), "4 layers"),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_bad_targets(tmp_path, monkeypatch, target, data, name):
    spoil, words = BAD_TARGETS[name]
    folder = shutil.copytree(target, tmp_path / "target")
    spoil(folder)
    with pytest.raises(UserError, match=words):
        extract(monkeypatch, target=folder, data=data, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_rows_need_no_template(tmp_path, monkeypatch, target):
    folder = shutil.copytree(target, tmp_path / "target")
    tiny.save_tokenizer(folder, None)
    remove(folder, "chat_template*")
    rows = tiny.write_rows(tmp_path / "rows", [{"text": "She has 2 apples."}])
    assert extract(monkeypatch, target=folder, data=rows, out=tmp_path / "out")["samples"] == 1


@pytest.mark.parametrize("text, words", [
    (None, "is no file"),
    ("", "holds no rows"),
    ('{"text": "a"}\n{oops\n', "line 2 is no JSON"),
    ('{"messages": []}\n', r"none of its 1 rows gives a sample \(1 empty"),
    ('{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}\n', "1 no supervised token"),
])
def test_bad_data(tmp_path, monkeypatch, target, text, words):
    if text is not None:
        (tmp_path / "rows").write_text(text)
    with pytest.raises(UserError, match=words):
        extract(monkeypatch, target=target, data=tmp_path / "rows", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_folder_with_something_else_and_too_long_a_length(tmp_path, monkeypatch, target, data):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds something else \(thesis.txt\)"):
        extract(monkeypatch, target=target, data=data, out=tmp_path / "out")
    with pytest.raises(UserError, match="more than the target's 512 positions"):
        extract(monkeypatch, target=target, data=data, out=tmp_path / "new", max_length=513)


def test_command_line_one_line_of_json_and_exit_codes(tmp_path, target, data):
    def call(*words):
        return subprocess.run([sys.executable, ROOT / "extract_hidden_states.py", "--target", target,
                               "--data", data, *words],
                              capture_output=True, text=True, cwd=tmp_path)

    done = call("--out", tmp_path / "out")
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    keys = ("samples skipped tokens supervised_tokens bytes bytes_per_token seconds tokens_per_second shards "
            "out")
    assert set(keys.split()) <= json.loads(done.stdout).keys()
    wrong = call("--out", data)
    assert wrong.returncode == 2 and wrong.stdout == "" and wrong.stderr.count("\n") == 1
    assert "is a file" in wrong.stderr




def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.pop("model.layers.3.mlp.up_proj.weight"), "lacks 1 of the model's tensors"),
    (lambda t: t["lm_head.weight"][7].fill_(float("nan")), "its logits are not lm_head"),
    (lambda t: t["model.layers.6.mlp.up_proj.weight"].fill_(float("nan")), "its logits are not lm_head"),
])
def test_incomplete_or_broken_weights_are_refused(tmp_path, monkeypatch, data, change, words):
    folder = tiny.make_target(tmp_path / "target")
    change_tensors(folder, change)
    with pytest.raises(UserError, match=words):
        extract(monkeypatch, target=folder, data=data, out=tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()


def test_a_stray_weights_file_is_not_read(tmp_path):
    folder = tiny.make_target(tmp_path / "target")
    facts = open_target(folder).facts()
    shutil.copy(tiny.make_target(tmp_path / "other", seed=5) / "model.safetensors", folder / "zz.safetensors")
    assert open_target(folder).facts() == facts


def test_a_fine_tune_with_the_same_lm_head_does_not_pass_silently(tmp_path, monkeypatch, data):
    """Inner weights only, in bfloat16 and one tensor: going on with these shards is refused, other uses are
    warned.
    """
    folder, tuned = tiny.make_target(tmp_path / "target"), tmp_path / "tuned"
    shutil.copytree(folder, tuned)
    change_tensors(tuned, lambda tensors: tensors["model.layers.3.mlp.up_proj.weight"].mul_(1.1))
    facts, other = open_target(folder).facts(), open_target(tuned).facts()
    assert facts["tensors_sha256"] == other["tensors_sha256"]
    warned = compare({"target": facts}, {"target": other}, "these shards")
    assert len(warned) == 1 and "other weights behind the same lm_head and embedding" in warned[0]
    assert not compare({"target": facts}, {"target": {**facts, "name": "elsewhere"}}, "these shards")
    extract(monkeypatch, target=folder, data=data, out=tmp_path / "out")
    with pytest.raises(UserError, match=hashes("target sample_sha256")):
        extract(monkeypatch, target=tuned, data=data, out=tmp_path / "out")
    shutil.move(tuned / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(UserError, match=hashes("target sample_sha256")):
        extract(monkeypatch, target=folder, data=data, out=tmp_path / "out")


def test_a_folder_with_a_users_temporary_name_is_something_else(tmp_path, monkeypatch, target, data):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "my.tmp-notes").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        extract(monkeypatch, target=target, data=data, out=tmp_path / "out")
    assert (tmp_path / "out" / "my.tmp-notes").read_text() == "mine"


def test_files_can_be_read_by_others(tmp_path, monkeypatch, target, data):
    extract(monkeypatch, target=target, data=data, out=tmp_path / "out", dtype="float32", limit=3)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # safetensors alone would leave its files to their owner
