"""Local evaluation: what is accepted, what is counted, and that the answers are those of plain decoding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from common import decode
from common.cli import UserError
from common.decode import Chain, cut, plain_decode, speculative_decode
from common.drafter import Drafter, drafter_config, load_drafter, save_drafter
from common.target import default_layers, open_target
from common.target_model import TargetModel
from eval_speculative import captured_layers, figures, main, parse_prompt
from tests import tiny
from tests.reference import draft_logits

ROOT = Path(__file__).parent.parent
LAYERS = default_layers(8)
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(folder):
    return TargetModel(open_target(folder), LAYERS, "float32", device="cpu")


def make_drafter(path, target, size=None, layers=LAYERS, seed=1, training=True, **other):
    """A random drafter's folder; of the reduced vocabulary `size` it holds every third id and what is left to fill it."""
    torch.manual_seed(seed)
    rows = None
    if size:
        order = [*range(0, target.vocab_size, 3), *(i for i in range(target.vocab_size) if i % 3)]
        rows = torch.tensor(sorted(order[:size]))
    config = {**drafter_config(target, size or target.vocab_size, layers), "torch_dtype": "float32", **other}
    if training:
        config["training"] = {"target": target.facts(), "layers": layers}
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3 if parameter.dim() == 1 else 0.2)
    save_drafter(path, drafter.state_dict(), config, rows)
    return path


def prompts(count=3, length=9):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (length + n,), generator=generator).tolist() for n in range(count)]


def speculate(model, path, prompt, limit=24, eos_ids=frozenset(), steps=STEPS):
    drafter, rows = load_drafter(path)
    return speculative_decode(model, drafter, model.target.embedding().float(), rows, prompt, steps, limit, eos_ids)




def oracle(monkeypatch, model, prompt, wrong=lambda position: False):
    """Make every drafter an oracle for one prompt. Returns 100 ids of its plain answer."""
    plain = plain_decode(model, prompt, 100, frozenset()).ids
    full = prompt + plain

    def draft(chain, steps):
        places = range(chain.length + 1, chain.length + 1 + steps)
        return torch.tensor([full[place] + 1 if wrong(place - len(prompt)) else full[place] for place in places])

    monkeypatch.setattr(Chain, "draft", draft)
    return plain


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["eval_speculative.py", *map(str, arguments)])
    return main()


def command(*arguments, stdin=None):
    return subprocess.run([sys.executable, "eval_speculative.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
                          input=stdin, env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("size", [None, 120])
def test_answers_equal_plain_decoding(tmp_path, kind, size):
    target = open_target(tiny.make_target(tmp_path / "target", kind))
    model = TargetModel(target, LAYERS, "float32", device="cpu")
    path = make_drafter(tmp_path / "drafter", target, size)
    for prompt in prompts(2):
        plain = plain_decode(model, prompt, 24, {2})
        assert speculate(model, path, prompt, eos_ids={2}).ids == plain.ids
    ids = torch.tensor([prompt])
    own = model.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0)
    assert own[0, len(prompt) :].tolist() == plain.ids


def test_a_half_right_drafter_is_accepted_in_part_and_changes_nothing(model, tmp_path, monkeypatch):
    """Caches of target and drafter are cut at every possible place; ids must stay those of plain decoding."""
    path = make_drafter(tmp_path / "drafter", model.target)
    prompt = prompts(1)[0]
    plain = oracle(monkeypatch, model, prompt, wrong=lambda place: place % 13 in (0, 1, 3, 6))
    answer = speculate(model, path, prompt, limit=60)
    assert answer.ids == plain[:60]
    assert set(answer.accepted) == {0, 1, 2, 3}


def test_constructed_drafters_give_exactly_steps_plus_1_and_1(model, tmp_path, monkeypatch):
    path = make_drafter(tmp_path / "drafter", model.target)
    prompt = prompts(1)[0]
    for steps in (1, 3, 5):
        limit = 1 + 4 * (steps + 1)
        plain = oracle(monkeypatch, model, prompt)
        right = speculate(model, path, prompt, limit, steps=steps)
        found = figures([(plain_decode(model, prompt, limit, frozenset()), right)], steps)
        assert right.ids == plain[:limit]
        assert found["accept_length"] == steps + 1 and found["acceptance"] == [1.0] * steps and found["verifications"] == 4
        oracle(monkeypatch, model, prompt, wrong=lambda place: True)
        wrong = speculate(model, path, prompt, limit, steps=steps)
        found = figures([(plain_decode(model, prompt, limit, frozenset()), wrong)], steps)
        assert wrong.ids == plain[:limit]
        assert found["accept_length"] == 1.0 and found["acceptance"] == [0.0] + [None] * (steps - 1)
        assert found["verifications"] == limit - 1


def test_the_figures_are_over_all_verifications_and_conditional(model):
    one = decode.Answer([1] * 10, 2.0, accepted=[3, 0, 1], reached=[3, 1, 2], draft_seconds=0.3, verify_seconds=0.6)
    two = decode.Answer([1] * 2, 1.0, accepted=[1], reached=[1])
    plain = [decode.Answer([1] * 10, 4.0), decode.Answer([1, 2], 2.0)]
    found = figures(list(zip(plain, [one, two], strict=True)), 3)
    assert found["accept_length"] == 1 + 5 / 4
    assert found["acceptance"] == [3 / 4, 0.5, 1.0]
    assert found["tokens_per_second"] == 4.0 and found["speed_up"] == 2.0 and found["identical"] == 1
    assert found["draft_ms"] == 75.0 and found["verify_ms"] == 150.0


@pytest.mark.parametrize("size", [None, 120])
def test_drafting_equals_recomputation_step_by_step(model, tmp_path, monkeypatch, size):
    """Every round's drafts against section-1 formulas in float64 without any cache, after accepted and rejected drafts alike."""
    path = make_drafter(tmp_path / "drafter", model.target, size)
    drafter, rows = load_drafter(path)
    embedding = model.target.embedding().float()
    prompt = prompts(1)[0]
    full = prompt + plain_decode(model, prompt, 60, frozenset()).ids
    aux, _ = model.states(torch.tensor([full]))
    logits, chains = [], []
    choose, draft = Chain.choose, Chain.draft

    def spy(chain, hidden):
        logits[-1].append(drafter.lm_head(drafter.norm(hidden))[0])
        return choose(chain, hidden)

    def half(chain, steps):
        """Real drafting, whose result is replaced by the right tokens in every other round so that some are accepted."""
        logits.append([])
        chains.append(draft(chain, steps).tolist())
        right = torch.tensor(full[chain.length + 1 : chain.length + 1 + steps])
        return right if len(chains) % 2 else torch.tensor(chains[-1])

    monkeypatch.setattr(Chain, "choose", spy)
    monkeypatch.setattr(Chain, "draft", half)
    answer = speculative_decode(model, drafter, embedding, rows, prompt, 4, 24, frozenset())
    assert answer.ids == full[len(prompt) : len(prompt) + 24]
    root = len(prompt)
    assert len(chains) >= 6
    for chain, found, accepted in zip(chains, logits, answer.accepted, strict=True):
        wanted = draft_logits(drafter, embedding, full, aux[0], root - 1, chain[:-1])
        assert torch.allclose(torch.stack(found).double(), wanted, atol=1e-4, rtol=1e-4)
        best = wanted.argmax(-1)
        assert chain == (best if rows is None else rows[best]).tolist()
        root += accepted + 1


def test_an_end_token_in_an_accepted_run_cuts(model, tmp_path, monkeypatch):
    path = make_drafter(tmp_path / "drafter", model.target)
    prompt = prompts(1)[0]
    plain = oracle(monkeypatch, model, prompt)
    place = next(n for n in range(1, 40) if n % 4 == 2 and plain[n] not in plain[:n])  # the second draft of a round
    answer = speculate(model, path, prompt, 60, eos_ids={plain[place]})
    assert answer.ids == plain[: place + 1] == plain_decode(model, prompt, 60, {plain[place]}).ids
    assert answer.accepted == [3] * (place // 4) + [2] and answer.reached == answer.accepted


@pytest.mark.parametrize("limit, accepted, reached", [(1, [], []), (2, [1], [1]), (4, [3], [3]), (5, [3], [3]), (6, [3, 1], [3, 1])])
def test_the_limit_cuts(model, tmp_path, monkeypatch, limit, accepted, reached):
    path = make_drafter(tmp_path / "drafter", model.target)
    prompt = prompts(1)[0]
    plain = oracle(monkeypatch, model, prompt)
    answer = speculate(model, path, prompt, limit)
    assert (answer.ids, answer.accepted, answer.reached) == (plain[:limit], accepted, reached)


def test_cut():
    assert cut([5, 6, 7], 9, {6}) == [5, 6]
    assert cut([5, 6, 7], 2, {7}) == [5, 6]
    assert cut([5, 6, 7], 9, {8}) == [5, 6, 7]


def test_a_token_outside_the_draft_vocabulary_is_a_miss(model, tmp_path):
    """The head's only ids are ones that the target never writes: each verification counts, and accepts nothing."""
    prompt = prompts(1)[0]
    written = set(plain_decode(model, prompt, 24, frozenset()).ids)
    config = {**drafter_config(model.target, 20, LAYERS), "torch_dtype": "float32"}
    rows = torch.tensor([i for i in range(model.target.vocab_size) if i not in written][:20])
    save_drafter(tmp_path / "drafter", Drafter(config).state_dict(), config, rows)
    answer = speculate(model, tmp_path / "drafter", prompt)
    assert answer.accepted == [0] * 23 and answer.reached == [1] * 23
    assert {token for candidates in answer.candidates for token in candidates[1:]} <= set(rows.tolist())


def test_candidates_are_the_root_and_its_drafts(model, tmp_path):
    answer = speculate(model, make_drafter(tmp_path / "drafter", model.target), prompts(1)[0])
    assert all(len(candidates) == STEPS + 1 for candidates in answer.candidates)
    roots, place = [], 0
    for accepted in answer.accepted:
        roots.append(answer.ids[place])
        place += accepted + 1
    assert [candidates[0] for candidates in answer.candidates] == roots


def test_a_verifier_that_accepts_everything_is_caught(folder, tmp_path, monkeypatch):
    path = make_drafter(tmp_path / "drafter", open_target(folder))
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(3))
    arguments = ("--target", folder, "--drafter", path, "--prompts", rows, "--dtype", "float32", "--max-new-tokens", 20)
    summary, code = run_main(monkeypatch, *arguments)
    assert code == 0 and summary["drafters"][0]["identical"] == 3 and summary["drafters"][0]["first_difference"] is None

    def credulous(drafts, best):
        best[: len(drafts)] = drafts
        return len(drafts)

    monkeypatch.setattr(decode, "agreeing", credulous)
    summary, code = run_main(monkeypatch, *arguments)
    assert code == 1 and summary["drafters"][0]["identical"] == 0
    difference = summary["drafters"][0]["first_difference"]
    assert difference["position"] == 1 and difference["gap"] > 0 and difference["plain"] == difference["best_two"][:1]
    summary, code = run_main(monkeypatch, *arguments, "--dtype", "bfloat16")
    assert code == 0 and summary["drafters"][0]["identical"] == 0


def test_one_run_of_two_drafters_with_other_layers_and_categories(folder, tmp_path):
    target = open_target(folder)
    one = make_drafter(tmp_path / "one", target, size=120)
    two = make_drafter(tmp_path / "two", target, layers=[1, 3, 6], training=False)
    rows = [{"turns": ["How many apples?", "And dogs?"], "category": "fruit"}, {"prompt": "jumps over", "category": "dogs"},
            {"text": "The quick brown"}, {"input_ids": [40, 50, 60]}, {"input_ids": [9999]}, {"messages": []}]
    result = command("--target", folder, "--drafter", one, "--drafter", two, "--prompts", "-", "--max-new-tokens", "12",
                     "--dtype", "float32", "--out", tmp_path / "answers.jsonl", stdin="".join(json.dumps(row) + "\n" for row in rows))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    summary = json.loads(result.stdout)
    assert summary["prompts"] == 5 and summary["skipped"] == {"malformed": 1, "empty": 1}
    assert summary["settings"]["steps"] == 3 and summary["settings"]["draft_tokens"] == 4 and summary["settings"]["dtype"] == "float32"
    assert len(summary["warnings"]) == 1 and "two" in summary["warnings"][0]
    for entry, size in zip(summary["drafters"], (120, 328), strict=True):
        assert entry["draft_vocab"] == size and entry["identical"] == entry["prompts"] == 5
        assert {name: part["prompts"] for name, part in entry["categories"].items()} == {"fruit": 2, "dogs": 1}
        assert entry["accept_length"] == round(1 + entry["accepted"] / entry["verifications"], 4)
        assert None not in (entry["tokens_per_second"], entry["speed_up"], entry["draft_ms"], entry["verify_ms"])
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 15
    assert answers[0]["ids"] == answers[1]["ids"] == answers[2]["ids"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = tokenizer.decode([token for token in answers[0]["ids"] if token != 2])
    second = tokenizer.apply_chat_template([{"role": "user", "content": "How many apples?"}, {"role": "assistant", "content": words},
                                            {"role": "user", "content": "And dogs?"}], tokenize=False, add_generation_prompt=True)
    assert answers[3]["prompt_ids"] == tokenizer(second, add_special_tokens=False)["input_ids"]


def test_each_drafter_gets_its_own_layers(folder, tmp_path, monkeypatch):
    """Captured together, two drafters propose what each proposes alone."""
    target = open_target(folder)
    paths = [make_drafter(tmp_path / "one", target), make_drafter(tmp_path / "two", target, layers=[1, 3, 6], seed=3)]
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(2))

    def drafted(*chosen):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"  # --out never overwrites
        run_main(monkeypatch, "--target", folder, "--prompts", rows, "--dtype", "float32", "--max-new-tokens", 10, "--out", out,
                 *(word for path in chosen for word in ("--drafter", path)))
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        return {(line["line"], line["drafter"]): line["candidates"] for line in lines if line["drafter"]}

    assert drafted(*paths) == drafted(paths[0]) | drafted(paths[1])


def test_layers_of_a_drafter_are_found(folder):
    target = open_target(folder)
    assert captured_layers({"training": {"layers": [1, 3, 6]}, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, target, "") == [1, 3, 6]
    assert captured_layers({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, target, "") == [1, 3, 6]
    assert captured_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, target, "") == [1, 3, 6]
    assert captured_layers({}, target, "") == [2, 4, 5]


def test_prompts_end_at_the_last_user_message():
    def user(text):
        return {"role": "user", "content": text}

    def wrote(text):
        return {"role": "assistant", "content": text}

    assert parse_prompt({"messages": [user("a"), wrote("b"), user("c"), wrote("d")]}, None)[1] == [user("a"), wrote("b"), user("c"), None]
    assert parse_prompt({"messages": [user("a"), wrote("b"), user("c")]}, None)[1] == [user("a"), wrote("b"), user("c"), None]
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

    refused(monkeypatch, attempt(make_drafter(tmp_path / "wide", target, hidden_size=96, target_hidden_size=96)), 96, 64)
    refused(monkeypatch, attempt(make_drafter(tmp_path / "vocab", target, vocab_size=400, draft_vocab_size=400, training=False)), 400, 328)
    refused(monkeypatch, attempt(tmp_path / "nowhere"), "nowhere", "is no folder")
    other = open_target(tiny.make_target(tmp_path / "other", seed=9))
    stranger = make_drafter(tmp_path / "stranger", other)
    hashes = [facts["tensors_sha256"][:12] for facts in (target.facts(), other.facts())]
    refused(monkeypatch, attempt(stranger), "another target", *hashes)
    summary, code = run_main(monkeypatch, *attempt(stranger), "--force")
    assert code == 0 and all(word in summary["warnings"][0] for word in ("--force", "another target", *hashes))

    result = command(*attempt(folder))
    assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert all(word in result.stderr.splitlines()[-1] for word in ("'LlamaForCausalLM'", "LlamaForCausalLMEagle3"))


def test_mistakes_are_one_sentence(folder, tmp_path, monkeypatch):
    path = make_drafter(tmp_path / "drafter", open_target(folder))
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.conversations(1))
    broken, empty = tmp_path / "broken.jsonl", tmp_path / "empty.jsonl"
    broken.write_text('{"prompt": "a"}\nno\n')
    empty.write_text('{"messages": []}\n')
    bare = tiny.make_target(tmp_path / "bare", chat_template=None)

    def attempt(*more, prompts=rows, target=folder):
        return "--target", target, "--drafter", path, "--prompts", prompts, *more

    refused(monkeypatch, attempt("--topk", 4), "--topk 4")
    refused(monkeypatch, attempt("--draft-tokens", 8), "--draft-tokens 8", "--draft-tokens 4")
    refused(monkeypatch, attempt("--temperature", 0.7), "--temperature 0.7")
    refused(monkeypatch, attempt("--backend", "sglang"), "--backend", "'sglang'")
    refused(monkeypatch, attempt(prompts=tmp_path / "none.jsonl"), "none.jsonl is no file")
    refused(monkeypatch, attempt(prompts=broken), "line 2")
    refused(monkeypatch, attempt(prompts=empty), "no prompt", "1 empty")
    refused(monkeypatch, attempt("--max-new-tokens", 500), "no prompt", "1 too long")
    refused(monkeypatch, attempt("--out", tmp_path / "none" / "x"), "--out", "does not exist")
    refused(monkeypatch, attempt(target=bare), "no chat template")
