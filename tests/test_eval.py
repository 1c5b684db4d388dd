"""eval_speculative.py as its users run it: what it measures, what it says, and what it refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Lock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import eval_speculative
from common import decode as engine
from common.cli import UserError
from common.drafter import captured_layers, load_drafter, save_drafter
from common.files import read_sealed, write_sealed
from common.target import default_layers, open_target
from common.target_model import TargetModel
from eval_speculative import Conversation, main, parse_prompt, waves
from tests import tiny
from tests.scripts import EXACT, call
from tests.test_serve import INFO, Fake, facts
from tests.tiny import make_drafter

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_target(tmp_path_factory.mktemp("target"))


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["eval_speculative.py", *map(str, arguments)])
    return main()


def command(*arguments, stdin=None):
    return subprocess.run([sys.executable, "eval_speculative.py", *map(str, arguments)], cwd=ROOT,
                          capture_output=True, text=True,
                          input=stdin, env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"})


def test_a_verifier_that_accepts_everything_is_caught(folder, tmp_path, monkeypatch):
    path = make_drafter(tmp_path / "drafter", open_target(folder))
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(3))
    arguments = ("--target", folder, "--drafter", path, "--prompts", rows, "--dtype", "float32",
                 "--max-new-tokens", 20)
    summary, code = run_main(monkeypatch, *arguments)
    assert (code == 0 and summary["drafters"][0]["identical"] == 3
            and summary["drafters"][0]["differences"] == [])
    judge = engine.judge

    def credulous(model, tree, last, *rest):
        """Takes every draft of a chain for right, and the first branch of a tree."""
        accepted, path, written = judge(model, tree, last, *rest)
        if tree.tokens.shape[1] == 1:  # plain decoding
            return accepted, path, written
        if path is None:
            written[:, :-1] = tree.tokens[:, 1:]
            return torch.full_like(accepted, 3), None, written
        return torch.ones_like(accepted), torch.tensor([[0, 1]]), tree.tokens[:, 1:3]

    monkeypatch.setattr(engine, "judge", credulous)
    for tree in ((), ("--topk", 2, "--draft-tokens", 5)):
        summary, code = run_main(monkeypatch, *arguments, *tree)
        assert code == 1 and summary["drafters"][0]["identical"] == 0
        found = summary["drafters"][0]["differences"]
        assert (len(found) == 3 and found[0]["position"] == 1 and found[0]["gap"] > 0
                and found[0]["rounding_steps"] > 1000)
        assert all(difference["plain"] == difference["best_two"][:1] for difference in found)
        summary, code = run_main(monkeypatch, *arguments, *tree, "--dtype", "bfloat16")
        assert code == 0 and summary["drafters"][0]["identical"] == 0  # not proved, but every gap is told


def test_one_run_of_two_drafters_with_other_layers_and_categories(folder, tmp_path):
    target = open_target(folder)
    one = make_drafter(tmp_path / "one", target, size=120)
    two = make_drafter(tmp_path / "two", target, layers=[1, 3, 6], training=False)
    rows = [{"turns": ["How many "
                       "apples?", "And "
                                  "dogs?"], "category": "fruit"},
            {"prompt": "jumps over", "category": "dogs"},
            {"text": "The quick brown"}, {"input_ids": [40, 50, 60]}, {"input_ids": [9999]}, {"messages": []}]
    result = command("--target", folder, "--drafter", one, "--drafter", two, "--prompts", "-",
                     "--max-new-tokens", "12",
                     "--dtype", "float32", "--out", tmp_path / "answers.jsonl",
                     stdin="".join(json.dumps(row) + "\n" for row in rows))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    summary = json.loads(result.stdout)
    assert summary["prompts"] == 5 and summary["skipped"] == {"malformed": 1, "empty": 1}
    settings = summary["settings"]
    assert {key: settings[key] for key in ("backend", "steps", "topk", "draft_tokens", "temperature", "dtype",
                                           "concurrency")} == {
        "backend": "local", "steps": 3, "topk": 1, "draft_tokens": 4, "temperature": 0.0, "dtype": "float32",
                                               "concurrency": [1]}
    assert settings["versions"].keys() == {"torch", "transformers"}
    assert len(summary["warnings"]) == 1 and "two" in summary["warnings"][0]
    assert summary["transformers_tokens_per_second"] > 0 and summary["plain_over_transformers"] > 0
    for entry, size in zip(summary["drafters"], (120, 328), strict=True):
        assert entry["draft_vocab"] == size and entry["identical"] == entry["prompts"] == 5
        prompts = {name: part["prompts"] for name, part in entry["categories"].items()}
        assert prompts == {"fruit": 2, "dogs": 1, "(none)": 2}
        assert entry["accept_length"] == round(1 + entry["accepted"] / entry["verifications"], 4)
        assert None not in (entry["tokens_per_second"], entry["speed_up"], entry["draft_ms"],
                            entry["verify_ms"])
        low, high = entry["accept_length_interval"]
        assert low <= entry["accept_length"] <= high
        assert 0 < entry["head_share"] <= 1
        assert entry["serve"]["sglang"] in result.stderr and entry["serve"]["vllm"] in result.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 15
    by_prompt = {(answer["line"], answer["turn"], answer["drafter"]): answer for answer in answers}
    assert all(by_prompt[1, 0, str(path)]["ids"] == by_prompt[1, 0, None]["ids"] for path in (one, two))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = tokenizer.decode([token for token in by_prompt[1, 0, None]["ids"] if token != 2])
    second = tokenizer.apply_chat_template([{"role": "user", "content": "How many apples?"},
                                            {"role": "assistant", "content": words},
                                            {"role": "user", "content": "And dogs?"}], tokenize=False,
                                           add_generation_prompt=True)
    assert by_prompt[1, 1, None]["prompt_ids"] == tokenizer(second, add_special_tokens=False)["input_ids"]


def test_what_a_generation_config_asks_for_is_one_warning_of_both_summaries(folder, tmp_path, monkeypatch):
    other = shutil.copytree(folder, tmp_path / "target")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "repetition_penalty": 1.5}))
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(2))
    words = "asks for repetition_penalty 1.5, which is not applied"
    drafter = make_drafter(tmp_path / "drafter", open_target(other))
    summary, code = run_main(monkeypatch, "--target", other, "--prompts", rows, "--max-new-tokens", 6,
                             "--dtype", "float32", "--drafter", drafter)
    assert code == 0 and len(summary["warnings"]) == 1 and words in summary["warnings"][0]
    for regenerate in (("--regenerate", "--max-new-tokens", 4), ()):
        out = tmp_path / f"shards-{bool(regenerate)}"
        found = call("extract_hidden_states", "--target", other, "--data", rows, "--out", out, *regenerate)
        assert [words in warning for warning in found["warnings"]] == [True] * bool(regenerate)


def test_each_drafter_gets_its_own_layers(folder, tmp_path, monkeypatch):
    """Captured together, two drafters propose what each proposes alone; several prompts at once, what they
    propose one by one."""
    target = open_target(folder)
    paths = [make_drafter(tmp_path / "one", target),
             make_drafter(tmp_path / "two", target, layers=[1, 3, 6], seed=3)]
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(3))

    def drafted(*chosen, concurrency="1"):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"  # --out never overwrites
        summary, code = run_main(monkeypatch, "--target", folder, "--prompts", rows, "--dtype", "float32",
                                 "--max-new-tokens", 10,
                                 "--out", out, "--concurrency", concurrency,
                                 *(word for path in chosen for word in ("--drafter", path)))
        sizes = [entry["concurrency"] for entry in summary["drafters"][:: len(chosen)]]
        assert code == 0 and sizes == [int(number) for number in concurrency.split(",")]
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        return {(line["line"], line["drafter"], line["concurrency"]): line["candidates"]
                for line in lines if line["drafter"]}

    together = drafted(*paths, concurrency="1,2")
    alone = drafted(paths[0]) | drafted(paths[1])
    assert together == alone | {(line, path, 2): value for (line, path, _), value in alone.items()}


def test_decoders_take_turns_and_are_warmed_up_outside_the_figures(folder, tmp_path, monkeypatch):
    """Each is first equally often, and what is decoded to warm up is in nobody's tokens or seconds."""
    paths = [make_drafter(tmp_path / name, open_target(folder), seed=seed)
             for name, seed in (("one", 1), ("two", 2))]
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(6))
    calls, decode = [], eval_speculative.decode

    def spy(model, prompts, limit, eos_ids, drafter, **rest):
        calls.append((drafter[0].config["_name"] if drafter else "plain", limit))
        return decode(model, prompts, limit, eos_ids, drafter, **rest)

    load = eval_speculative.load_drafter

    def named(path, target):
        drafter, rows = load(path, target=target)
        drafter.config["_name"] = Path(path).name
        return drafter, rows

    monkeypatch.setattr(eval_speculative, "decode", spy)
    monkeypatch.setattr(eval_speculative, "load_drafter", named)
    monkeypatch.setattr(eval_speculative, "COMPARED", 0)
    summary, _ = run_main(monkeypatch, "--target", folder, "--drafter", paths[0], "--drafter", paths[1],
                          "--prompts", rows,
                          "--dtype", "float32", "--max-new-tokens", 9)
    measured = [name for name, limit in calls if limit == 9]
    assert sorted(name for name, limit in calls if limit == 16) == ["one", "plain", "two"]
    assert calls[0][1] == 16 and sorted(measured[::3]) == ["one", "one", "plain", "plain", "two", "two"]
    assert all(entry["tokens"] <= 6 * 9 for entry in summary["drafters"])


def test_shards_are_simulated_without_a_target_and_asked_as_prompts(folder, tmp_path, monkeypatch):
    """On what the target itself wrote, the walk and the measurement count the same."""
    target = open_target(folder)
    path = make_drafter(tmp_path / "drafter", target)
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(24))
    call("extract_hidden_states", *EXACT, "--target", folder, "--data", rows,
         "--out", tmp_path / "shards", "--regenerate", "--temperature", 0,
         "--max-new-tokens", 24, "--heldout", 0.3, "--dtype", "float32")
    summary, code = run_main(monkeypatch, "--drafter", path, "--shards", tmp_path / "shards", "--steps", 4)
    alone = summary["drafters"][0]
    assert (code == 0 and alone["accept_length"] is None and summary["prompts"] == 0
            and alone["simulated_accept_length"] >= 1)
    summary, code = run_main(monkeypatch, "--target", folder, "--drafter", path, "--shards",
                             tmp_path / "shards",
                             "--prompts", tmp_path / "shards", "--steps", 4, "--dtype", "float32",
                             "--max-new-tokens", 24,
                             "--plot", tmp_path / "plot.png")
    both = summary["drafters"][0]
    assert (alone["coverage"] is None and alone["simulated_coverage"] == both["simulated_coverage"]
            == both["coverage"] == 1.0)
    assert both["simulated_accept_length"] == alone["simulated_accept_length"] == both["accept_length"]
    assert (both["simulated_samples"] == both["prompts"] > 1
            and both["simulated_acceptance"] == both["acceptance"])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    few = prune(path, tmp_path / "few", torch.arange(7, 328, 9), coverage_heldout=0.9, coverage=1.0)
    summary, _ = run_main(monkeypatch, "--drafter", path, "--drafter", few, "--shards", tmp_path / "shards",
                          "--plot", tmp_path / "simulated.png")
    covered = summary["drafters"][1]["simulated_coverage"]
    assert 0 < covered < 0.5 and summary["verdict"] is None and [all(word in warning for word in (
        str(few), f"{covered:.2%}", "90.00%", "held-out "
                                              "answers")) for warning in summary["warnings"]] == [True]
    told = prune(path, tmp_path / "told", torch.arange(328)[1:], template_kwargs={"thinking": True})
    summary, _ = run_main(monkeypatch, "--drafter", told, "--shards", tmp_path / "shards")
    words = f"drafter {told} was made for other arguments of the template: {{'thinking': True}}"
    assert words in summary["warnings"][0]
    # another chat template is told of once, whose ever it is
    manifest_file, odd = tmp_path / "shards" / "manifest.json", "0" * 64
    made = read_sealed(manifest_file)
    for of_drafter, of_shards in ((odd, made["chat_template_sha256"]), (odd, odd),
                                  (made["chat_template_sha256"], odd)):
        write_sealed(manifest_file, made | {"chat_template_sha256": of_shards})
        told = prune(path, tmp_path / f"{of_drafter[:4]}-{of_shards[:4]}", torch.arange(328)[1:],
                     chat_template_sha256=of_drafter)
        [warning] = run_main(monkeypatch, "--drafter", told, "--shards", tmp_path / "shards")[0]["warnings"]
        assert "chat template" in warning and (str(told) in warning) == (of_shards != odd)
    write_sealed(manifest_file, made)
    other = make_drafter(tmp_path / "other", target, layers=[1, 3, 6])
    refused(monkeypatch, ("--drafter", other, "--shards", tmp_path / "shards"), "[2, 4, 5]", "[1, 3, 6]")
    refused(monkeypatch, ("--drafter", path, "--shards", tmp_path / "none"), "none is no folder of shards")
    refused(monkeypatch, ("--drafter", path, "--shards", tmp_path / "shards", "--out", tmp_path / "x"),
            "--out", "--prompts")
    write_sealed(manifest_file, made | {"tokenizer_sha256": "another"})
    arguments = ("--target", folder, "--drafter", path, "--prompts", tmp_path / "shards", "--max-new-tokens",
                 4)
    refused(monkeypatch, arguments, "tokenizer", "another", "--force")
    summary, _ = run_main(monkeypatch, *arguments, "--force", "--concurrency", 99)
    assert ("another" in summary["warnings"][0] and f"at most {summary['prompts']} "
                                                    "were" in summary["warnings"][1])


def prune(folder, out, rows, **training):
    """A full-vocabulary drafter cut to the target ids `rows`, as build_vocab_map.py --prune does."""
    state, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    config |= {"draft_vocab_size": len(rows)}
    config["training"] |= {"draft_vocab": len(rows),
                           "pruned_from": {"draft_vocab": 328, "model_sha256": "0" * 64}, **training}
    save_drafter(out, {**state, "lm_head.weight": state["lm_head.weight"][rows]}, config, rows)
    return out


def test_sizes_are_compared_in_one_run_beside_their_prediction(folder, tmp_path, monkeypatch, capsys):
    """A full drafter and two cut from it: coverage of the answers counted here, a verdict, what was
    predicted, and what was promised."""
    target = open_target(folder)
    full = make_drafter(tmp_path / "full", target)
    half = prune(full, tmp_path / "half", torch.arange(0, 328, 2), coverage_heldout=0.99)
    tenth = prune(full, tmp_path / "tenth", torch.arange(5, 328, 10), coverage_heldout=None, coverage=0.02)
    rows = tiny.write_rows(tmp_path / "rows.jsonl",
                           [{**row, "category": f"kind {number % 2}"} for number, row in
                                                     enumerate(tiny.conversations(4))])
    arguments = ["--target", folder, "--prompts", rows, "--dtype", "float32", "--max-new-tokens", 16,
                 *(word for path in (full, half, tenth) for word in ("--drafter", path))]
    sizes = [{"draft_vocab": size, "accept_length": length, "ceiling": 4.0, "draft_ms": 1.0,
              "tokens_per_second": 50.0, "speed_up": 0.5}
             for size, length in ((328, 1.25), (164, 1.0))]
    prediction = {"steps": 3, "target_sha256": target.facts()["tensors_sha256"], "dtype": "bfloat16",
                  "device": "cpu",
                  "threads": torch.get_num_threads(), "sizes": sizes}
    (tmp_path / "map").mkdir()
    write_sealed(tmp_path / "map" / "vocab_map.json", {"target": target.facts(), "prediction": prediction})
    summary, code = run_main(monkeypatch, *arguments, "--prediction", tmp_path / "map", "--plot",
                             tmp_path / "plot.png",
                             "--out", tmp_path / "answers.jsonl", "--concurrency", "1,4")
    assert code == 0 and [entry["identical"] for entry in summary["drafters"]] == [4] * 6
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    plain = [token for answer in answers if answer["drafter"] is None and answer["concurrency"] == 1
             for token in answer["ids"][1:]]
    wanted = [1.0, *(round(sum(token in ids for token in plain) / len(plain), 4)
                     for ids in (range(0, 328, 2), range(5, 328, 10)))]
    assert [entry["coverage"]
            for entry in summary["drafters"]] == wanted * 2 and 0 < wanted[2] < wanted[1] < 1
    assert all(part["coverage"] is not None for entry in summary["drafters"]
               for part in entry["categories"].values())
    told = capsys.readouterr().err
    [covered, compared] = summary["warnings"]
    assert all(word in covered for word in (str(half), f"{wanted[1]:.2%}", "99.00%",
                                            "plain answers")), covered
    assert all(word in compared for word in ("--prediction", "dtype bfloat16 for "
                                                             "float32", "one prompt at once"))
    assert [found["concurrency"] for found in summary["verdict"]] == [1, 4]
    for number, found in enumerate(summary["verdict"]):
        part = summary["drafters"][3 * number : 3 * number + 3]
        best = max(part, key=lambda entry: entry["tokens_per_second"])
        assert found["winner"] == best["drafter"] and len(found["break_even"]) == 2
        low, high = found["ratio_interval"]
        assert low <= found["ratio"] <= high and low < high
        assert found["plain_beats_all"] == (best["baseline_tokens_per_second"] > best["tokens_per_second"])
        assert all(sentence in told for sentence in found["sentences"])
    first, second, third = summary["drafters"][:3]
    assert (first["predicted"]["accept_length"] == 1.25 and second["predicted"]["ceiling"] == 4.0
            and third["predicted"] is None)
    errors = summary["prediction"]["largest_error"]
    lengths = [(entry["accept_length"], entry["predicted"]["accept_length"])
               for entry in summary["drafters"] if entry["predicted"]]
    off = max(abs(predicted / measured - 1) for measured, predicted in lengths)
    assert errors["accept_length"] == round(off, 4)
    assert errors["tokens_per_second"] == pytest.approx(max(abs(50 / one["tokens_per_second"] - 1)
                                                            for one in (first, second)), abs=1e-3)
    assert (tmp_path / "plot.png").stat().st_size > 10000 and "pred. tok/s" in told

    summary, _ = run_main(monkeypatch, *arguments[:10])  # one drafter: nothing to compare
    assert (summary["verdict"] is None and "predicted" not in summary["drafters"][0]
            and summary["warnings"] == [])
    refused(monkeypatch, [*arguments, "--steps", 2, "--prediction", tmp_path / "map"],
            "is for 3 steps, 2 are measured", "--predict 2")
    refused(monkeypatch, [*arguments, "--prediction", tmp_path], "holds no vocab_map.json")


def test_sampled_answers(folder, tmp_path, monkeypatch, capsys):
    """With a temperature nothing is compared id by id; the same seed draws the same, and the check on a
    prompt is in the summary."""
    path = make_drafter(tmp_path / "drafter", open_target(folder))
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(2))
    arguments = ("--target", folder, "--drafter", path, "--prompts", rows, "--dtype", "float32",
                 "--max-new-tokens", 12, "--temperature", 2)

    def drawn(number, *more):
        summary, code = run_main(monkeypatch, *arguments, "--out", tmp_path / f"{number}.jsonl", *more)
        assert code == 0 and summary["drafters"][0]["differences"] is None
        return [json.loads(line)["ids"] for line
                in (tmp_path / f"{number}.jsonl").read_text().splitlines()], summary["drafters"][0]

    first, entry = drawn(1, "--check-sampling", 300)
    assert entry["sampling_check"]["draws"] == 300 and entry["sampling_check"]["p_value"] > 1e-4
    assert "chi-square" in capsys.readouterr().err
    assert drawn(2)[0] == first != drawn(3, "--seed", 1)[0]


def test_servers_are_measured_as_the_local_engine_is(folder, tmp_path, monkeypatch, capsys):
    """Two servers that answer with the local engine's ids and SGLang's counters."""
    target = open_target(folder)
    path = make_drafter(tmp_path / "drafter", target)
    model, lock = TargetModel(target, default_layers(8), "float32", device="cpu"), Lock()
    rows = tiny.write_rows(tmp_path / "rows.jsonl",
                           [{"turns": ["How many apples?", "And dogs?"], "category": "fruit"},
                                                     *({"prompt": word, "category": "dogs"}
                                                       for word in ("jumps", "fox", "lazy"))])
    drafter = (load_drafter(path)[0], target.embedding().float(), None)

    def server(drafter, algorithm, **more):
        def generate(body):
            settings = body["sampling_params"]
            with lock:
                group = engine.decode(model, [body["input_ids"]], settings["max_new_tokens"],
                                      set(settings["stop_token_ids"]), drafter)
            ids, accepted = group.answers[0].ids, group.answers[0].accepted
            counts = [accepted.count(drafts) for drafts in range(4)] if drafter else []
            return 200, {"output_ids": ids, "meta_info": facts(*counts,
                                                               reason="stop" if ids[-1] == 2 else "length")}

        info = {**INFO, "model_path": str(folder), "device": "cpu", "speculative_algorithm": algorithm,
                "speculative_draft_model_path": algorithm and str(path), **more}
        return Fake({"/generate": generate, "/flush_cache": (200, "ok"), "/server_info": (200, info)})

    arguments = ["--target", folder, "--drafter", path, "--prompts", rows, "--max-new-tokens", 12,
                 "--concurrency", "1,3"]
    local, _ = run_main(monkeypatch, *arguments, "--dtype", "float32")
    with server(drafter, "EAGLE3") as drafting, server((), None) as plain:
        remote = ["--backend", "sglang", "--server-url", drafting.url]
        summary, code = run_main(monkeypatch, *arguments, *remote, "--baseline-url", plain.url)
        assert (code == 0 and summary["settings"]["dtype"] == "float32"
                and summary["settings"]["server"]["version"] == "0.5.23")
        assert drafting.most == plain.most == 3
        for ours, theirs in zip(local["drafters"], summary["drafters"], strict=True):
            for key in ("accept_length", "identical", "prompts", "tokens", "verifications", "concurrency"):
                assert ours[key] == theirs[key], key
            assert theirs["speed_up"] > 0 and theirs["draft_ms"] is None
            assert {name: part["accept_length"] for name, part in theirs["categories"].items()} == {
                name: part["accept_length"] for name, part in ours["categories"].items()}
        summary, _ = run_main(monkeypatch, *arguments[:2], *arguments[4:], *remote)
        entry = summary["drafters"][0]
        assert (entry["drafter"], entry["speed_up"], entry["identical"]) == (str(path), None, None)
        assert entry["accept_length"] == local["drafters"][0]["accept_length"]
        refused(monkeypatch, [*arguments, *remote, "--steps", 5], "steps 3 for 5")
        refused(monkeypatch, [*arguments, *remote, "--dtype", "bfloat16"], "float32", "--dtype bfloat16")
        other = make_drafter(tmp_path / "run" / "drafter", target)
        summary, _ = run_main(monkeypatch, *arguments[:2], "--drafter", other, *arguments[4:], *remote)
        assert [str(other) in warning for warning in summary["warnings"]] == [True]
        with server((), None, tp_size=4) as larger:
            summary, _ = run_main(monkeypatch, *arguments, *remote, "--baseline-url", larger.url)
            assert "tp_size 1 for 4" in summary["warnings"][0]
        refused(monkeypatch, [*arguments, *remote, "--temperature", 1], "CPU", "--temperature 0")
        refused(monkeypatch, [*arguments, "--backend", "sglang", "--server-url", plain.url],
                "without a drafter")


def test_waves_hold_one_category_and_turns_follow_each_other():
    def talk(line, category, turns):
        return Conversation(line, category, None, [{"role": "user", "content": "a"}, None] * turns)

    found = waves([talk(0, "a", 2), talk(1, None, 1), talk(2, "a", 1), talk(3, "a", 2)], 2)
    assert [(wave.category, wave.turn, [c.line for c in wave.conversations]) for wave in found] == [
        ("a", 0, [0, 2]), ("a", 1, [0]), ("a", 0, [3]), ("a", 1, [3]), (None, 0, [1])]


def test_layers_of_a_drafter_are_found():
    named = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    assert captured_layers({"training": {"layers": [1, 2, 3]}, **named}, 8, "") == [1, 2, 3]
    assert captured_layers(named, 8, "") == [1, 3, 6]
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}
    assert captured_layers(nested, 8, "") == [1, 3, 6]
    assert captured_layers({}, 8, "") == [2, 4, 5]


def test_prompts_end_at_the_last_user_message():
    def user(text):
        return {"role": "user", "content": text}

    def wrote(text):
        return {"role": "assistant", "content": text}

    asked = [user("a"), wrote("b"), user("c"), None]
    assert parse_prompt({"messages": [user("a"), wrote("b"), user("c"), wrote("d")]}, None)[1] == asked
    assert parse_prompt({"messages": [user("a"), wrote("b"), user("c")]}, None)[1] == asked
    assert parse_prompt({"conversations": [{"from": "human", "value": "a"}]}, None)[1] == [user("a"), None]
    assert parse_prompt({"turns": ["a", "b"]}, None)[1] == [user("a"), None, user("b"), None]
    assert parse_prompt({"prompt": "a", "response": "b"}, None)[1] == [user("a"), None]
    assert parse_prompt({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}, None)[1] == [[5, 6], None]


def refused(monkeypatch, arguments, *words):
    """main() ends with one sentence for people that holds `words`."""
    with pytest.raises(UserError) as error:
        run_main(monkeypatch, *arguments)
    assert "\n" not in str(error.value) and all(str(word) in str(error.value) for word in words), error.value


def test_unfit_drafters_are_refused_with_both_numbers(folder, tmp_path, monkeypatch):
    target = open_target(folder)
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(1))

    def attempt(path):
        return "--target", folder, "--drafter", path, "--prompts", rows, "--max-new-tokens", 4

    refused(monkeypatch, attempt(make_drafter(tmp_path / "wide", target, hidden_size=96,
                                              target_hidden_size=96)), 96, 64)
    refused(monkeypatch, attempt(make_drafter(tmp_path / "vocab", target, vocab_size=400,
                                              draft_vocab_size=400, training=False)), 400, 328)
    refused(monkeypatch, attempt(tmp_path / "nowhere"), "nowhere", "is no folder")
    other = open_target(tiny.make_target(tmp_path / "other", seed=9))
    stranger = make_drafter(tmp_path / "stranger", other)
    hashes = [facts["tensors_sha256"][:12] for facts in (target.facts(), other.facts())]
    refused(monkeypatch, attempt(stranger), "another target", *hashes)
    summary, code = run_main(monkeypatch, *attempt(stranger), "--force")
    assert code == 0 and all(word in summary["warnings"][0]
                             for word in ("--force", "another target", *hashes))

    result = command(*attempt(folder))
    assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert all(word in result.stderr.splitlines()[-1]
               for word in ("'LlamaForCausalLM'", "LlamaForCausalLMEagle3"))


def test_broken_drafters_are_one_sentence(folder, tmp_path, monkeypatch):
    target, rows = open_target(folder), tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(1))

    def attempt(name, change=None, tensors=None, *more):
        path = make_drafter(tmp_path / name, target)
        config = json.loads((path / "config.json").read_text())
        weights = load_file(path / "model.safetensors")
        config.update(change or {})
        weights.update(tensors or {})
        (path / "config.json").write_text(json.dumps(config))
        save_file(weights, path / "model.safetensors")
        return "--target", folder, "--drafter", path, "--prompts", rows, "--max-new-tokens", 4, *more

    for key, value in (("num_attention_heads", 0), ("head_dim", None), ("hidden_size", -1),
                       ("rope_parameters", "x")):
        refused(monkeypatch, attempt(key, {key: value}), tmp_path / key, "describes no drafter")
    refused(monkeypatch, attempt("kind", {"norm_before_residual": True}), "norm_before_residual")
    for number, layers in enumerate(("abc", 7, [1.0, 3.0, 6.0], {"a": 1})):
        refused(monkeypatch, attempt(f"layers{number}", {"training": {"layers": layers}}), layers,
                "three ascending ones in 1..7")
    refused(monkeypatch, attempt("nested", {"training": None, "eagle_config": 7}), "reads layers 7")
    refused(monkeypatch, attempt("block", {"training": {"target": "x"}}), "training block")
    refused(monkeypatch, attempt("nan", None, {"norm.weight": torch.full([64], torch.nan)}),
            "norm.weight holds NaN")
    refused(monkeypatch, attempt("share", {"training": {"coverage": -5}}), "training block")
    refused(monkeypatch, attempt("half", None, {"fc.weight": torch.full([64, 192], 1e8)}, "--dtype",
                                 "float16"), "finite", "--dtype")
    small = make_drafter(tmp_path / "small", target, size=4)
    arguments = ("--target", folder, "--drafter", small, "--prompts", rows, "--topk", 5, "--draft-tokens", 6)
    refused(monkeypatch, arguments, "--topk 5", "4 tokens")


def test_a_target_without_numbers_is_refused(folder, tmp_path, monkeypatch):
    target = open_target(folder)
    path = make_drafter(tmp_path / "drafter", target)
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(1))
    monkeypatch.setattr(TargetModel, "logits", lambda model,
                        last: torch.full((*last.shape[:-1], 328), torch.nan))
    refused(monkeypatch, ("--target", folder, "--drafter", path, "--prompts", rows), "nan")


def test_mistakes_are_one_sentence(folder, tmp_path, monkeypatch):
    path = make_drafter(tmp_path / "drafter", open_target(folder))
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(1))
    broken, empty = tmp_path / "broken.jsonl", tmp_path / "empty.jsonl"
    broken.write_text('{"prompt": "a"}\nno\n')
    empty.write_text('{"messages": []}\n')
    bare = tiny.make_target(tmp_path / "bare", chat_template=None)

    def attempt(*more, prompts=rows, target=folder):
        return "--target", target, "--drafter", path, "--prompts", prompts, *more

    refused(monkeypatch, attempt("--topk", 4), "--draft-tokens", "--topk 4", "2 to 37", "none is given")
    refused(monkeypatch, attempt("--topk", 4, "--draft-tokens", 38), "38 is given", "2 to 37")
    refused(monkeypatch, attempt("--draft-tokens", 8), "--draft-tokens 8", "--draft-tokens 4")
    refused(monkeypatch, attempt("--temperature", -1), "--temperature", "-1")
    refused(monkeypatch, attempt("--concurrency", "1,x"), "--concurrency")
    refused(monkeypatch, attempt("--check-sampling", 9), "--check-sampling", "--temperature")
    refused(monkeypatch, attempt("--server-url", "http://127.0.0.1:1"), "--server-url", "--backend sglang")
    refused(monkeypatch, attempt("--backend", "sglang", "--server-url", "http://127.0.0.1:1"),
            "http://127.0.0.1:1")
    refused(monkeypatch, attempt("--backend", "sglang", "--baseline-url", "http://127.0.0.1:1"),
            "--baseline-url", "--server-url")
    refused(monkeypatch, attempt("--backend", "vllm"), "--backend", "'vllm'")
    refused(monkeypatch, attempt(prompts=tmp_path / "none.jsonl"), "none.jsonl is no file")
    refused(monkeypatch, attempt(prompts=broken), "line 2")
    refused(monkeypatch, attempt(prompts=empty), "no prompt", "1 empty")
    refused(monkeypatch, attempt("--max-new-tokens", 500), "no prompt", "1 too long")
    refused(monkeypatch, attempt("--out", tmp_path / "none" / "x"), "--out", "does not exist")
    refused(monkeypatch, attempt("--plot", broken), "--plot", "is there already")
    refused(monkeypatch, attempt("--out", tmp_path / "x", "--plot", tmp_path / "x"), "--plot",
            "a file of its own")
    refused(monkeypatch, attempt("--temperature", 1e-40), "--temperature 1e-40", "1e-05")
    refused(monkeypatch, attempt("--seed", 2**64), "--seed", "at most 18446744073709551615")
    refused(monkeypatch, attempt("--backend", "sglang", "--server-arguments", "'a"), "--server-arguments",
            "quotes")
    refused(monkeypatch, attempt(prompts=tmp_path), "manifest.json", "extract_hidden_states.py")
    monkeypatch.setattr("os.access", lambda *_: False)  # a superuser may write everywhere
    refused(monkeypatch, attempt("--out", tmp_path / "x"), "--out", "cannot be written to")
    monkeypatch.undo()
    refused(monkeypatch, attempt(target=bare), "no chat template")
    refused(monkeypatch, ("--target", folder, "--drafter", path), "--prompts", "--shards")
    refused(monkeypatch, ("--drafter", path, "--prompts", rows), "--target")
    refused(monkeypatch, ("--target", folder, "--prompts", rows), "--drafter")
