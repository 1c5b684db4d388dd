"""The local engine: what is drafted, what is accepted and counted, and that answers are those of plain
decoding.
"""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import eval_speculative as sampling_check
from common import decode as engine
from common.accept import figures
from common.cli import UserError
from common.decode import (
    NEUTRAL,
    NEUTRAL_DRAWN,
    Answer,
    Draft,
    Group,
    Tree,
    cut,
    decode,
    distribution,
    not_applied,
    pick,
    sampling_settings,
    transformers_generate,
)
from common.drafter import Drafter, drafter_config, load_drafter, save_drafter
from common.target import default_layers, open_target
from common.target_model import SlotCache, TargetModel
from eval_speculative import LEAST_CHANCE, check_sampling, chi_square
from tests import tiny
from tests.reference import draft_logits

LAYERS = default_layers(8)
STEPS = 3
TREE = {"steps": 3, "topk": 3, "draft_tokens": 9}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TargetModel(open_target(tiny.make_target(tmp_path_factory.mktemp("target"))), LAYERS, "float32",
                       device="cpu")


def prompts(count=3, length=9):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (length + 2 * n,), generator=generator).tolist() for n in range(count)]


def load(model, path):
    drafter, rows = load_drafter(path)
    return drafter, model.target.embedding().float(), rows


def ids(group):
    return [answer.ids for answer in group.answers]


def speculate(model, path, prompt, limit=24, eos_ids=frozenset(), steps=STEPS, **tree):
    return decode(model, [prompt], limit, eos_ids, load(model, path),
                  **{"steps": steps, "draft_tokens": steps + 1, **tree}).answers[0]


def oracle(monkeypatch, model, asked, wrong=lambda position: False):
    """Make every drafter an oracle for the prompts. Returns 100 ids of the plain answer of each."""
    plain = [ids(decode(model, [prompt], 100, frozenset()))[0] for prompt in asked]

    def whole(draft, row):  # the sequence is known by what was read of it, as rows leave the batch
        return next(prompt + answer for prompt, answer in zip(asked, plain, strict=True)
                    if prompt == draft.cache.prompts[row])

    extend, move = Draft.extend, SlotCache.move

    def remember(draft, part, aux, next_ids, counts):
        if draft.cache.copies is not None:  # prompts are read
            draft.cache.prompts = [next(p for p in asked if p[1:] == row[: count - 1]) for row, count in
                                   zip(next_ids.tolist(), counts.tolist(), strict=True)]
        extend(draft, part, aux, next_ids, counts)

    def follow(cache, old, new):
        move(cache, old, new)
        if hasattr(cache, "prompts"):
            cache.prompts[new] = cache.prompts[old]

    def chain(draft, roots, steps, *_):
        tokens = []
        for row, length in enumerate(draft.cache.lengths):
            full = whole(draft, row)
            places = range(length + 1, length + 1 + steps)
            tokens.append([full[place] + 1 if wrong(place - len(draft.cache.prompts[row])) else full[place]
                           for place in places])
        return Tree(torch.cat([roots[:, None], torch.tensor(tokens)], 1))

    def tree(draft, roots, steps, topk, draft_tokens):
        """Two branches behind every node; the right token is on one that changes, and is missing where
        `wrong` says so.
        """
        tokens = []
        for row, length in enumerate(draft.cache.lengths):
            full, own = whole(draft, row), [0]
            for depth in range(1, 3):
                place = length + depth
                right = full[place]
                if wrong(place - len(draft.cache.prompts[row])):
                    right = (right + 5) % 300
                pair = [right, right + 1] if place % 2 else [right + 1, right]
                own += pair * (2 ** (depth - 1))
            tokens.append(own)
        tokens = torch.tensor(tokens)
        tokens[:, 0] = roots
        parents = torch.tensor([0, 0, 0, 1, 1, 2, 2])
        ancestors = torch.eye(7, dtype=torch.bool)
        for _ in range(3):
            ancestors = ancestors | ancestors[parents]
        return Tree(tokens, ancestors.expand(len(roots), 7, 7))

    for name, function in (("extend", remember), ("chain", chain), ("tree", tree)):
        monkeypatch.setattr(Draft, name, function)
    monkeypatch.setattr(SlotCache, "move", follow)
    return plain


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("size", [None, 120])
def test_answers_equal_plain_decoding(tmp_path, kind, size):
    """Chain and tree, alone and in a batch; a batch drafts what each prompt drafts alone."""
    target = open_target(tiny.make_target(tmp_path / "target", kind))
    model = TargetModel(target, LAYERS, "float32", device="cpu")
    drafter = load(model, tiny.make_drafter(tmp_path / "drafter", target, size))
    asked = prompts(3)
    plain = [ids(decode(model, [prompt], 20, {2}))[0] for prompt in asked]
    assert ids(decode(model, asked, 20, {2})) == plain
    for shape in ({}, TREE):
        alone = [decode(model, [prompt], 20, {2}, drafter, **shape).answers[0] for prompt in asked]
        together = decode(model, asked, 20, {2}, drafter, **shape).answers
        assert [answer.ids for answer in alone] == plain and together == alone
    if size:
        assert [ids(transformers_generate(model, prompt, 20, {2}))[0] for prompt in asked] == plain


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma2", "mixtral", "gpt2"])
@pytest.mark.parametrize("topk", [1, 2])
def test_a_half_right_drafter_is_accepted_in_part_and_changes_nothing(tmp_path, monkeypatch, kind, topk):
    """Caches of target and drafter are cut at every possible place; ids must stay those of plain decoding, of
    each row of a batch.
    """
    target = open_target(tiny.make_target(tmp_path / "target", kind))
    model = TargetModel(target, LAYERS, "float32", device="cpu")
    drafter = load(model, tiny.make_drafter(tmp_path / "drafter", target))
    asked = prompts(3)
    plain = oracle(monkeypatch, model, asked, wrong=lambda place: place % 13 in (0, 1, 3, 6))
    shape = {"topk": topk, "draft_tokens": 7} if topk > 1 else {}
    for limit, group in ((60, asked), (33, asked[:1]), (41, asked[1:])):
        answers = decode(model, group, limit, frozenset(), drafter, **shape).answers
        assert [answer.ids for answer in answers] == [plain[asked.index(prompt)][:limit] for prompt in group]
        for answer in answers:
            assert set(answer.accepted) == ({0, 1, 2, 3} if topk == 1 else {0, 1, 2}), answer.accepted


def test_constructed_drafters_give_exactly_steps_plus_1_and_1(model, tmp_path, monkeypatch):
    path = tiny.make_drafter(tmp_path / "drafter", model.target)
    prompt = prompts(1)[0]
    for steps in (1, 3, 5):
        limit = 1 + 4 * (steps + 1)
        plain = oracle(monkeypatch, model, [prompt])[0][:limit]
        baseline = [Group([Answer(plain)], 1.0)]
        right = speculate(model, path, prompt, limit, steps=steps)
        found = figures(baseline, [Group([right], 1.0)], steps)
        assert right.ids == plain
        assert found["accept_length"] == steps + 1 and found["acceptance"] == [1.0] * steps
        assert found["verifications"] == 4
        oracle(monkeypatch, model, [prompt], wrong=lambda place: True)
        wrong = speculate(model, path, prompt, limit, steps=steps)
        found = figures(baseline, [Group([wrong], 1.0)], steps)
        assert wrong.ids == plain
        assert found["accept_length"] == 1.0 and found["acceptance"] == [0.0] + [None] * (steps - 1)
        assert found["verifications"] == limit - 1


@pytest.mark.parametrize("size", [None, 120])
def test_drafting_equals_recomputation_step_by_step(model, tmp_path, monkeypatch, size):
    """Every round's drafts against section-1 formulas in float64 without any cache, after accepted and
    rejected drafts alike.
    """
    drafter, embedding, rows = load(model, tiny.make_drafter(tmp_path / "drafter", model.target, size))
    prompt = prompts(1)[0]
    full = prompt + ids(decode(model, [prompt], 60, frozenset()))[0]
    aux, _ = model.states(torch.tensor([full]))
    logits, chains = [], []
    head, chain = Draft.head, Draft.chain

    def spy(draft, hidden):
        logits[-1].append(head(draft, hidden)[0])
        return head(draft, hidden)

    def half(draft, roots, steps, *more):
        """Real drafting, whose result is replaced by the right tokens in every other round so that some are
        accepted.
        """
        logits.append([])
        chains.append(chain(draft, roots, steps, *more).tokens[0].tolist())
        right = full[draft.cache.lengths[0] + 1 : draft.cache.lengths[0] + 1 + steps]
        return Tree(torch.tensor([[chains[-1][0], *right] if len(chains) % 2 else chains[-1]]))

    monkeypatch.setattr(Draft, "head", spy)
    monkeypatch.setattr(Draft, "chain", half)
    answer = decode(model, [prompt], 24, frozenset(), (drafter, embedding, rows), steps=4,
                    draft_tokens=5).answers[0]
    assert answer.ids == full[len(prompt) : len(prompt) + 24]
    root = len(prompt)
    assert len(chains) >= 6
    for tokens, found, accepted in zip(chains, logits, answer.accepted, strict=True):
        wanted = draft_logits(drafter, embedding, full, aux[0], root - 1, tokens[1:-1])
        assert torch.allclose(torch.stack(found).double(), wanted, atol=1e-4, rtol=1e-4)
        best = wanted.argmax(-1)
        assert tokens[1:] == (best if rows is None else rows[best]).tolist()
        root += accepted + 1


def slow_tree(drafter, embedding, rows, full, aux, t, steps, topk, draft_tokens):
    """EAGLE-2's tree behind row t, every node recomputed from nothing.

    Returns ([(path of target ids, chance)], the likeliest of all nodes, and of each depth the logits [beams,
    D]).
    """
    beams, nodes, logits = [((), 1.0)], [], []
    for _ in range(steps):
        new = []
        logits.append([draft_logits(drafter, embedding, full, aux, t, list(path))[-1] for path, _ in beams])
        for (path, chance), row in zip(beams, logits[-1], strict=True):
            share = row.softmax(-1)
            for token in share.argsort(descending=True)[:topk].tolist():
                new.append((path + (token if rows is None else int(rows[token]),),
                            chance * float(share[token])))
        nodes += new
        beams = sorted(new, key=lambda node: -node[1])[:topk]
    return sorted(nodes,
                  key=lambda node: -node[1])[: draft_tokens - 1], [torch.stack(rows) for rows in logits]


@pytest.mark.parametrize("size", [None, 120])
def test_a_tree_holds_the_likeliest_paths(model, tmp_path, monkeypatch, size):
    drafter, embedding, rows = load(model, tiny.make_drafter(tmp_path / "drafter", model.target, size))
    asked, trees, logits = prompts(2)[::-1], [], []  # the longest is sequence 0
    tree, head = Draft.tree, Draft.head
    monkeypatch.setattr(Draft, "head", lambda draft, hidden: logits.append(head(draft, hidden)) or logits[-1])
    monkeypatch.setattr(Draft, "tree", lambda draft,
                        *rest: trees.append((list(draft.cache.lengths), tree(draft, *rest))) or trees[-1][1])
    group = decode(model, asked, 8, frozenset(), (drafter, embedding, rows), steps=4, topk=3, draft_tokens=12)
    for row, (prompt, answer) in enumerate(zip(asked, group.answers, strict=True)):
        full = prompt + answer.ids
        aux, _ = model.states(torch.tensor([full]))
        for number, (lengths, (tokens, ancestors, _)) in enumerate(trees[:3]):
            t = lengths[row] - 1
            assert int(tokens[row, 0]) == full[t + 1]
            wanted, beams = slow_tree(drafter, embedding, rows, full, aux[0], t, 4, 3, 12)
            paths = [tuple(tokens[row, ancestors[row, node]].tolist()[1:]) for node in range(12)]
            assert sorted(paths[1:]) == sorted(path for path, _ in wanted)
            for step, rows_wanted in enumerate(beams):  # what a branch attends to are its ancestors
                assert torch.allclose(logits[4 * number + step][row].double(), rows_wanted, atol=1e-4,
                                      rtol=1e-4)


def test_an_end_token_in_an_accepted_run_cuts(model, tmp_path, monkeypatch):
    path = tiny.make_drafter(tmp_path / "drafter", model.target)
    prompt = prompts(1)[0]
    plain = oracle(monkeypatch, model, [prompt])[0]
    # the second draft of a round
    place = next(n for n in range(1, 40) if n % 4 == 2 and plain[n] not in plain[:n])
    answer = speculate(model, path, prompt, 60, eos_ids={plain[place]})
    assert answer.ids == plain[: place + 1] == ids(decode(model, [prompt], 60, {plain[place]}))[0]
    assert answer.accepted == [3] * (place // 4) + [2] and answer.reached == answer.accepted


@pytest.mark.parametrize("limit, accepted, reached",
                         [(1, [], []), (2, [1], [1]), (4, [3], [3]), (5, [3], [3]), (6, [3, 1], [3, 1])])
def test_the_limit_cuts(model, tmp_path, monkeypatch, limit, accepted, reached):
    path = tiny.make_drafter(tmp_path / "drafter", model.target)
    prompt = prompts(1)[0]
    plain = oracle(monkeypatch, model, [prompt])[0]
    answer = speculate(model, path, prompt, limit)
    assert (answer.ids, answer.accepted, answer.reached) == (plain[:limit], accepted, reached)


def test_cut():
    assert cut([5, 6, 7], 9, {6}) == [5, 6]
    assert cut([5, 6, 7], 2, {7}) == [5, 6]
    assert cut([5, 6, 7], 9, {8}) == [5, 6, 7]


def test_a_token_outside_the_draft_vocabulary_is_a_miss(model, tmp_path):
    """The head's only ids are ones that the target never writes: each verification counts, and accepts
    nothing.
    """
    prompt = prompts(1)[0]
    written = set(ids(decode(model, [prompt], 24, frozenset()))[0])
    config = {**drafter_config(model.target, 20, LAYERS), "torch_dtype": "float32"}
    rows = torch.tensor([i for i in range(model.target.vocab_size) if i not in written][:20])
    save_drafter(tmp_path / "drafter", Drafter(config).state_dict(), config, rows)
    answer = speculate(model, tmp_path / "drafter", prompt)
    assert answer.accepted == [0] * 23 and answer.reached == [1] * 23
    assert {token for candidates in answer.candidates for token in candidates[1:]} <= set(rows.tolist())


def test_candidates_are_the_root_and_its_drafts(model, tmp_path):
    answer = speculate(model, tiny.make_drafter(tmp_path / "drafter", model.target), prompts(1)[0])
    assert all(len(candidates) == STEPS + 1 for candidates in answer.candidates)
    roots, place = [], 0
    for accepted in answer.accepted:
        roots.append(answer.ids[place])
        place += accepted + 1
    assert [candidates[0] for candidates in answer.candidates] == roots


def test_chi_square_has_the_known_tail():
    found = chi_square(torch.tensor([60.0, 40.0], dtype=torch.float64),
                       torch.tensor([50.0, 50.0], dtype=torch.float64))
    assert found["chi_square"] == 4.0 and abs(found["p_value"] - 0.0455003) < 1e-6
    found = chi_square(torch.tensor([30.0, 68.0, 2.0], dtype=torch.float64),
                       torch.tensor([33.0, 66.0, 1.0], dtype=torch.float64))
    assert found["cells"] == 2  # what is expected only once is counted with its neighbour


def numbers():
    generator = np.random.default_rng(1)
    return lambda prompt, first, count: generator.random(count)


FLAT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@pytest.mark.parametrize("temperature, top_p", [(1e-5, 1.0), (1.0, 1e-300), (1e-5, 5e-324), (0.7, 1e-12)])
def test_next_to_no_temperature_or_share_draws_the_likeliest(temperature, top_p):
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 30
    drawn = pick(*distribution(logits, {"temperature": temperature, "top_p": top_p, "top_k": 0}),
                 torch.rand(50, dtype=torch.float64))
    assert torch.equal(drawn, logits.argmax(-1))


@pytest.mark.parametrize("values", [("1e-320", 1.0, 0), ("9e-6", 1.0, 0), ("nan", 1.0, 0), ("inf", 1.0, 0),
                                    ("1", 0.0, 0),
                                    (None, 1.0, 0), ("1", "all", 0), ("1", 1.0, [3])])
def test_settings_that_cannot_be_drawn_with_are_refused(model, values):
    with pytest.raises(UserError, match="temperature of 0"):
        sampling_settings(model.target, *values)


@pytest.mark.parametrize("config, temperature, told", [
    ({"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.0, "min_length": 0}, 1, ""),
    ({"repetition_penalty": 1.1, "no_repeat_ngram_size": 3}, 0,
     "repetition_penalty 1.1, no_repeat_ngram_size 3"),
    ({"min_p": 0.05, "typical_p": 0.9, "top_k": None}, 0, ""),
    ({"min_p": 0.05, "typical_p": 0.9, "top_h": None}, 1, "min_p 0.05, typical_p 0.9"),
    ({"suppress_tokens": [3, 4], "bad_words_ids": [], "forced_eos_token_id": 2}, 0,
     "suppress_tokens [3, 4], forced_eos_token_id 2")])
def test_what_a_generation_config_asks_for_is_named_where_it_is_not_applied(tmp_path, config, temperature,
                                                                            told):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    found = not_applied(SimpleNamespace(folder=tmp_path, name="T"), {"temperature": temperature})
    assert ("; ".join(found).partition(" asks for ")[2].partition(", which is")[0]) == told


def test_every_key_of_a_generation_config_is_known():
    """A key that transformers adds is to be looked at: does it change answers?"""
    applied = {"do_sample", "temperature", "top_k", "top_p", "eos_token_id"}
    harmless = {"max_length", "max_new_tokens", "max_time", "num_return_sequences", "pad_token_id",
                "bos_token_id", "decoder_start_token_id", "transformers_version", "return_dict_in_generate",
                "remove_invalid_values", "renormalize_logits", "low_memory", "prefill_chunk_size", "use_mtp"}
    of_beams = {"early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups"}
    kinds = re.compile("^_|^output_|cache|compil|assist|lookbehind|speculation|matching_ngram|prompt_lookup"
                       "|continuous_batching")
    keys = {key for key in transformers.GenerationConfig().to_dict() if not kinds.search(key)}
    assert keys <= applied | harmless | of_beams | NEUTRAL.keys() | NEUTRAL_DRAWN.keys()


def test_transformers_decodes_plainly_whatever_the_generation_config_asks_for(tmp_path):
    """With each rule its answer would be another one; ours is the one without, and so is theirs here."""
    asked = prompts(2)
    folder = tiny.make_target(tmp_path / "target")
    favourite = decode(TargetModel(open_target(folder), LAYERS, "float32", device="cpu"), asked[:1], 1,
                       set()).answers[0].ids
    (folder / "generation_config.json").write_text(json.dumps({
        "repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "suppress_tokens": favourite, "min_length": 99,
        "forced_eos_token_id": 5, "num_beams": 3, "do_sample": True, "min_p": 0.5, "eos_token_id": [2]}))
    model = TargetModel(open_target(folder), LAYERS, "float32", device="cpu")
    plain = ids(decode(model, asked, 20, {2}))
    assert plain[0][0] == favourite[0]
    assert [ids(transformers_generate(model, prompt, 20, {2}))[0] for prompt in asked] == plain


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """A target whose answers vary."""
    target = open_target(tiny.make_target(tmp_path_factory.mktemp("flat"), sharp=False))
    model = TargetModel(target, LAYERS, "float32", device="cpu")
    model.lm_head.weight.mul_(20)
    return model


@pytest.mark.parametrize("draws, size, shape, sampling", [
    (20000, 120, {}, FLAT), (4000, None, {}, FLAT), (4000, 120, {},
                                                     {"temperature": 1.5, "top_p": 0.9, "top_k": 0}),
    (4000, None, {}, {"temperature": 1.3, "top_p": 1.0, "top_k": 12}), (4000, 120, TREE, FLAT)])
def test_sampling_draws_from_the_targets_distribution(flat, tmp_path, monkeypatch, draws, size, shape,
                                                      sampling):
    monkeypatch.setattr(sampling_check, "BATCH", 1000)
    drafter = load(flat, tiny.make_drafter(tmp_path / "drafter", flat.target, size))
    shape = {"steps": 3, "topk": 1, "draft_tokens": 4, **shape}
    found = check_sampling(flat, prompts(1)[0], draws, sampling, drafter, **shape, numbers=numbers())
    assert found["cells"] > 5 and found["p_value"] > 1e-3, found


@pytest.mark.parametrize("fault", ["accepts too much", "draws the replacement from p", "forgets the map"])
def test_a_broken_sampler_is_caught(flat, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(sampling_check, "BATCH", 1000)
    drafter, embedding, rows = load(flat, tiny.make_drafter(tmp_path / "drafter", flat.target, 120))
    if fault == "accepts too much":
        judge = engine.judge
        monkeypatch.setattr(engine, "judge",
                            lambda *given: judge(*given[:-1], given[-1] * torch.tensor([0.0, 0.0, 0.0, 1.0])))
    elif fault == "draws the replacement from p":
        monkeypatch.setattr(torch.Tensor, "clamp_", lambda tensor, **_: tensor + 1)
    else:
        rows = torch.arange(120)
        chain = Draft.chain

        def shifted(draft, *rest):
            tree = chain(draft, *rest)
            return tree._replace(chances=tree.chances.roll(1, 2))

        monkeypatch.setattr(Draft, "chain", shifted)
    found = check_sampling(flat, prompts(1)[0], 4000, FLAT, (drafter, embedding, rows), 3, 1, 4, numbers())
    assert found["p_value"] < 1e-6, found


@pytest.fixture(scope="module")
def outside(flat, tmp_path_factory):
    """(drafter, embedding, rows) whose draft vocabulary of 120 has neither the target's likeliest first token
    behind prompts(1)[0] nor its likeliest second ones."""
    prompt = prompts(1)[0]
    first = flat.logits(flat.states(torch.tensor([prompt]))[1][0, -1]).softmax(-1)
    favourites = {int(first.argmax())}
    for token in first.topk(8).indices.tolist():
        favourites.add(int(flat.logits(flat.states(torch.tensor([[*prompt, token]]))[1][0, -1]).argmax()))
    rows = torch.tensor([i for i in range(flat.target.vocab_size) if i not in favourites][::2][:120])
    config = {**drafter_config(flat.target, 120, LAYERS), "torch_dtype": "float32"}
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("outside") / "drafter"
    save_drafter(folder, Drafter(config).state_dict(), config, rows)
    drafter = load(flat, folder)
    assert favourites.isdisjoint(drafter[2].tolist()) and first.max() > 0.02
    return drafter


@pytest.mark.parametrize("shape", [{}, TREE])
def test_a_favourite_outside_the_map_is_drawn_as_often_as_it_should(flat, outside, monkeypatch, shape):
    monkeypatch.setattr(sampling_check, "BATCH", 1000)
    found = check_sampling(flat, prompts(1)[0], 20000, FLAT, outside,
                           **{"steps": 3, "topk": 1, "draft_tokens": 4, **shape},
                           numbers=numbers())
    assert found["cells"] > 20 and found["p_value"] > LEAST_CHANCE, found


@pytest.mark.parametrize("fault", ["the draft vocabulary alone", "ids without the map"])
def test_a_sampler_that_mistakes_the_map_is_caught(flat, outside, monkeypatch, fault):
    """What replaces a draft is drawn from the draft vocabulary alone; the drafter's chances are taken for
    those of ids 0, 1, 2, ...
    """
    monkeypatch.setattr(sampling_check, "BATCH", 1000)
    chain, rows = Draft.chain, outside[2]
    if fault == "the draft vocabulary alone":
        lost = torch.ones(flat.target.vocab_size, dtype=torch.bool).index_fill_(0, rows, False)

        def of_the_map(logits, sampling):
            return distribution(logits.masked_fill(lost, -torch.inf) if logits.shape[-1] == len(lost)
                                else logits, sampling)

        monkeypatch.setattr(engine, "distribution", of_the_map)
    else:
        def unmapped(draft, *rest):
            tree = chain(draft, *rest)
            chances = torch.zeros_like(tree.chances)
            chances[..., : len(rows)] = tree.chances[..., rows]
            return tree._replace(chances=chances)

        monkeypatch.setattr(Draft, "chain", unmapped)
    found = check_sampling(flat, prompts(1)[0], 4000, FLAT, outside, 3, 1, 4, numbers())
    assert found["p_value"] < 1e-6, found


@pytest.mark.parametrize("shape", [{"steps": 3, "topk": 1, "draft_tokens": 4}, TREE,
                                   {"steps": 2, "topk": 2, "draft_tokens": 5}])
def test_draft_ms_is_of_one_depth_a_round_of_all_and_a_verification(model, tmp_path, monkeypatch, shape):
    """On a clock that goes 1 s with every use of the head and 1,000 s with every verification."""
    now, head, judge_states = [0.0], Draft.head, TargetModel.judge_states

    def counted(function, seconds):
        def wrapped(*given):
            now[0] += seconds
            return function(*given)

        return wrapped

    monkeypatch.setattr(engine, "clock", lambda device: now[0])
    monkeypatch.setattr(Draft, "head", counted(head, 1.0))
    monkeypatch.setattr(TargetModel, "judge_states", counted(judge_states, 1000.0))
    group = decode(model, prompts(2), 12, frozenset(),
                   load(model, tiny.make_drafter(tmp_path / "drafter", model.target)), **shape)
    found = figures(None, [group], shape["steps"])
    assert (found["draft_ms"], found["verify_ms"]) == (1000.0, 1_000_000.0)
    rounds = len(group.verify_seconds)
    assert rounds * (shape["steps"] * found["draft_ms"] + found["verify_ms"]) == 1000 * group.seconds


def test_a_drafter_that_overflows_changes_no_text(model, tmp_path):
    drafter, embedding, rows = load(model, tiny.make_drafter(tmp_path / "drafter", model.target))
    drafter.lm_head.weight.data.fill_(torch.nan)
    plain = decode(model, prompts(), 12, frozenset())
    for size in ({}, TREE):
        assert ids(decode(model, prompts(), 12, frozenset(), (drafter, embedding, rows),
                          **size)) == ids(plain)
