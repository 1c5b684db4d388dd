"""Formulas of the training-time test: each against a slow independent version."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from common.drafter import Drafter
from common.loss import HeadLoss, Teacher, TrainStep, cut_labels, draft_hits, log_total, simulate
from common.ttt import block_masks, lay_out, make_batch, normed, supervised_rows, ttt_hidden
from tests import reference

V, D, H = 50, 20, 16


def drafter_of(draft_vocab=D, heads=4, kv_heads=2, head_dim=6, norm=1.0):
    torch.manual_seed(1)
    config = dict(hidden_size=H, target_hidden_size=H, intermediate_size=24, num_attention_heads=heads,
                  num_key_value_heads=kv_heads,
                  head_dim=head_dim, rms_norm_eps=1e-5, draft_vocab_size=draft_vocab, vocab_size=V,
                  max_position_embeddings=128,
                  rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    drafter = Drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0, 0.4) if parameter.dim() == 2 else parameter.normal_(norm, 0.2)
    return drafter


def sample_of(length, seed, prompt=4, turns=()):
    """turns: (from, to) of unsupervised tokens behind the prompt."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(length, dtype=torch.uint8)
    mask[:prompt] = 0
    for first, last in turns:
        mask[first:last] = 0
    return {
        "input_ids": torch.randint(0, V, (length,), generator=generator, dtype=torch.int32),
            "loss_mask": mask,
        "aux_hidden_states": torch.randn(length, 3 * H, generator=generator),
        "last_hidden_state": torch.randn(length, H, generator=generator),
        "target_argmax": torch.randint(0, V, (length,), generator=generator, dtype=torch.int32),
    }


EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(7))
LM_HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(8))
MAP = torch.arange(3, 3 + 2 * D, 2)


def test_table_of_rows_inputs_labels_and_weights():
    """Ten tokens, two documents: weight 1 exactly where the label is supervised and in the same document."""
    ids, mask, bounds = list(range(10)), torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1, 1]).bool(), [0, 6, 10]
    rows, supervised = supervised_rows(mask, bounds, 3)
    table = {}
    for k in range(3):
        for i, t in enumerate(rows.tolist()):
            table[k, t] = bool(supervised[k, i])
            end = 6 if t < 6 else 10
            print(f"depth {k} row {t} input {t + 1 + k} label {t + k + 2} teacher {t + k + 1} "
                  f"weight {int(supervised[k, i])}")
            assert table[k, t] == (t + k + 2 < end and bool(mask[ids[t + k + 2]]) if t + k + 2 < 10
                                   else False)
    assert [t for t in range(10) if table.get((0, t))] == [0, 1, 2, 6, 7]
    assert [t for t in range(10) if table.get((1, t))] == [0, 1, 6]
    assert [t for t in range(10) if table.get((2, t))] == [0]


def use_fused_kernels(monkeypatch):
    """Those of other devices: FlexAttention, here uncompiled, in blocks of 4 rows."""
    monkeypatch.setattr("common.ttt.fuses", lambda device: True)
    monkeypatch.setattr("common.loss.fuses", lambda device: True)
    monkeypatch.setattr("common.ttt.BLOCK", 4)
    monkeypatch.setattr("common.ttt._flex", lambda: flex_attention)
    # it refuses gradients on a CPU only because they are slow there
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)


@pytest.mark.parametrize("fused", [False, True], ids=["cpu", "fused"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-8), (torch.float32, 1e-3)],
                         ids=["float64", "float32"])
@pytest.mark.parametrize("shape", [(4, 2, 6), (4, 4, 4), (2, 1, 8)])
def test_every_depth_equals_step_by_step_drafting(shape, dtype, tolerance, fused, monkeypatch):
    """Packed documents, one with three answers, float64 and float32; norms of about 3 show which state is
    normed between steps.
    """
    if fused:
        use_fused_kernels(monkeypatch)
    drafter = drafter_of(heads=shape[0], kv_heads=shape[1], head_dim=shape[2], norm=3.0).to(dtype)
    batch = make_batch([sample_of(9, 1), sample_of(34, 2, 3, [(6, 15), (18, 30)]), sample_of(5, 3)])
    depths = 5
    rows, supervised = supervised_rows(batch["loss_mask"], batch["bounds"], depths)
    with torch.no_grad():
        layout = lay_out(rows, batch["bounds"], depths, "cpu")
        logits = drafter.lm_head(normed(ttt_hidden(drafter, EMBEDDING, batch, layout), drafter.norm))
    compared = 0
    for start, end in zip(batch["bounds"][:-1], batch["bounds"][1:], strict=True):
        ids, aux = batch["input_ids"][start:end], batch["aux_hidden_states"][start:end]
        for i, row in enumerate(rows.tolist()):
            if not start <= row < end:
                continue
            t = row - start
            last = max(k for k in range(depths) if supervised[k, i])
            wanted = reference.draft_logits(drafter, EMBEDDING, ids, aux, t, ids[t + 2 : t + 2 + last])
            assert torch.allclose(logits[: last + 1, i].double(), wanted, atol=tolerance, rtol=tolerance)
            compared += last + 1
    assert compared == int(supervised.sum()) or compared > 40


def slow_loss(drafter, samples, map_rows, depths, decay):
    """The loss of CONTRACTS' formula, row by row in float64, with autograd, and the number of supervised
    labels.
    """
    drafter = drafter.double()
    head = LM_HEAD.double() if map_rows is None else LM_HEAD[map_rows].double()
    total, labels = 0.0, 0
    for sample in samples:
        batch = make_batch([sample])
        mask, n = batch["loss_mask"], len(batch["input_ids"])
        labels += int(mask[2:].sum())
        for t in range(n - 1):
            layout = lay_out(torch.tensor([t]), batch["bounds"], depths, "cpu")
            hidden = ttt_hidden(drafter, EMBEDDING.double(), batch, layout)
            for k in range(depths):
                label = t + k + 2
                if label >= n or not mask[label] or (map_rows is not None
                                                     and batch["target_argmax"][label - 1] not in map_rows):
                    continue
                p = (head @ batch["last_hidden_state"][label - 1].double()).softmax(-1)
                log_q = (drafter.lm_head.weight @ drafter.norm(hidden[k][0])).log_softmax(-1)
                total = total - decay**k * (p * log_q).sum()
    return total / labels, labels


def test_blocks_hold_what_queries_see(monkeypatch):
    """No block that a query sees a column of is left out, and whole ones are seen wholly; both ways."""
    monkeypatch.setattr("common.ttt.BLOCK", 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        bounds = [0, *torch.randint(1, 20, (4,), generator=generator).cumsum(0).tolist()]
        rows = (torch.rand(bounds[-1], generator=generator) < 0.6).nonzero()[:, 0]
        first = [max(bound for bound in bounds[:-1] if bound <= row) for row in rows.tolist()]
        for depth, mask in enumerate(block_masks(rows, bounds, 4, "cpu")):
            columns = -(-bounds[-1] // 4) * 4 + depth * -(-len(rows) // 4) * 4
            assert mask.seq_lengths == (len(rows), columns)
            seen = torch.zeros(-(-len(rows) // 4) * 4, columns, dtype=torch.bool)
            for i, row in enumerate(rows.tolist()):
                seen[i, first[i] : row + 1] = True
                for earlier in range(depth):
                    seen[i, columns - (earlier + 1) * -(-len(rows) // 4) * 4 + i] = True
            place = torch.arange(columns)
            query = torch.arange(len(rows))[:, None]
            assert torch.equal(mask.mask_mod(0, 0, query, place), seen[: len(rows)])
            blocks = seen.unflatten(0, (-1, 4)).unflatten(2, (-1, 4))  # [blocks, 4, blocks, 4]
            tables = {}
            for name in ("kv", "full_kv", "q", "full_q"):
                counts, order = (getattr(mask, f"{name}_{part}")[0, 0] for part in ("num_blocks", "indices"))
                tables[name] = torch.zeros(order.shape, dtype=torch.bool)
                for i, number in enumerate(counts.tolist()):
                    tables[name][i, order[i, :number].long()] = True
            assert torch.equal(tables["kv"], tables["q"].T)
            assert torch.equal(tables["full_kv"], tables["full_q"].T)
            assert not (tables["kv"] & tables["full_kv"]).any()
            assert not (blocks.any(3).any(1) & ~tables["kv"] & ~tables["full_kv"]).any()
            last = blocks[-1, : (len(rows) - 1) % 4 + 1]  # the last block of queries may not be full
            assert not (tables["full_kv"][:-1] & ~blocks[:-1].all(3).all(1)).any()
            assert not (tables["full_kv"][-1] & ~last.all(2).all(0)).any()


@pytest.mark.parametrize("map_rows", [None, MAP], ids=["full", "reduced"])
@pytest.mark.parametrize("fused", [False, True], ids=["cpu", "fused"])
def test_loss_and_gradients(fused, map_rows, monkeypatch):
    """Chunks of a few rows, packed, against float64 row by row; rows whose target is outside of the map are
    left out.
    """
    monkeypatch.setattr("common.loss.CHUNK_BYTES", 4 * D * 3 * 4)
    monkeypatch.setattr("common.loss.DEVICE_CHUNK_BYTES", 4 * D * 3 * 4)
    monkeypatch.setattr("common.loss.DEVICE_PIECE", 5)
    samples, depths, decay = [sample_of(9, 1), sample_of(26, 2, 3, [(6, 15), (18, 23)])], 3, 0.8
    drafter = drafter_of(V if map_rows is None else D)
    teacher = Teacher(LM_HEAD, map_rows, None, 1.0, "cpu", torch.float32)
    wanted, labels = slow_loss(drafter, samples, map_rows, depths, decay)
    wanted.backward()
    slow = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter = drafter_of(V if map_rows is None else D)
    if fused:
        use_fused_kernels(monkeypatch)
    loss, _, counted = TrainStep(drafter, EMBEDDING, teacher, depths, decay)(make_batch(samples), 1 / labels)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert counted.sum() > 0 and (map_rows is None or counted[0] < labels)
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(parameter.grad.double(), slow[name], atol=1e-5, rtol=1e-4), name


def test_packing_changes_only_rounding():
    samples = [sample_of(9, 1), sample_of(12, 2), sample_of(6, 3)]
    teacher = Teacher(LM_HEAD, MAP, None, 1.0, "cpu", torch.float32)
    step = TrainStep(drafter_of(), EMBEDDING, teacher, 3, 0.8)
    together = step(make_batch(samples), 0.1)[0]
    apart = sum(step(make_batch([sample]), 0.1)[0] for sample in samples)
    assert together.item() == pytest.approx(apart.item(), rel=1e-5)


def test_nothing_to_learn_from_is_finite_and_attached():
    sample = sample_of(8, 1)
    sample["loss_mask"][:] = 0
    # a masked teacher row is selected away, not multiplied by zero
    sample["last_hidden_state"][:] = float("nan")
    drafter = drafter_of()
    teacher = Teacher(LM_HEAD, MAP, None, 1.0, "cpu", torch.float32)
    loss, sums, rows = TrainStep(drafter, EMBEDDING, teacher, 3, 0.8)(make_batch([sample]), 1.0)
    loss.backward()
    assert loss.item() == 0 and rows.sum() == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())


def test_soft_cap_and_scale_reach_the_teacher():
    last = torch.randn(5, H)
    teacher = Teacher(LM_HEAD, MAP, 3.0, 0.5, "cpu", torch.float32)
    wanted = (torch.tanh(LM_HEAD[MAP].double() @ last.double().T * 0.5 / 3.0) * 3.0).softmax(0).T
    p, share = teacher.probabilities([last], torch.zeros(5, dtype=torch.int64))
    assert share is None and torch.allclose(p.double(), wanted, atol=1e-6)


def test_frozen_head_gets_no_gradient():
    drafter = drafter_of()
    drafter.lm_head.weight.requires_grad_(False)
    step = TrainStep(drafter, EMBEDDING, Teacher(LM_HEAD, MAP, None, 1.0, "cpu", torch.float32), 2, 0.8)
    step(make_batch([sample_of(9, 1)]), 1.0)[0].backward()
    assert drafter.lm_head.weight.grad is None and drafter.fc.weight.grad.any()


@pytest.mark.parametrize("kind", ["kl", "lk"])
@pytest.mark.parametrize("rows", [None, torch.tensor([0, 2, 3, 6])], ids=["full", "reduced"])
def test_head_loss_matches_autograd(kind, rows):
    """Every loss and its gradients against its formula in float64; with a reduced vocabulary acceptance is of
    the whole distribution.
    """
    torch.manual_seed(0)
    head = torch.randn(7, 4)
    teacher = Teacher(head, rows, 5.0, 1.5, "cpu", torch.float32, whole=kind != "kl")
    size = len(teacher.weight)
    hidden = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(size, 4, dtype=torch.float64, requires_grad=True)
    last, likeliest = torch.randn(6, 4), torch.arange(6) % size
    pairs = [(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 4])), (torch.tensor([0, 2]), torch.tensor([2, 5]))]
    counted, chosen_at = torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int64)
    for depth, (own, target_rows) in enumerate(pairs):
        counted[depth, own], chosen_at[depth, own] = True, target_rows
    labels = cut_labels(counted, chosen_at, likeliest, 2, "cpu")
    by_depth = torch.tensor([1.0, 0.5])
    loss, sums = HeadLoss.apply(hidden, weight, (last,), teacher, labels, by_depth, kind)
    loss.backward()
    wanted = []
    for own, target_rows in pairs:
        whole = (torch.tanh(last.double()[target_rows] @ head.double().T * 1.5 / 5) * 5).softmax(-1)
        whole = whole if rows is None else whole[:, rows]
        p, log_q = whole / whole.sum(-1, keepdim=True), (hidden[len(wanted), own] @ weight.T).log_softmax(-1)
        cross_entropy, accepted = -(p * log_q).sum(-1), torch.minimum(whole, log_q.exp()).sum(-1)
        mix = (-3 * accepted).exp().detach()
        losses = {"kl": cross_entropy, "lk": mix * cross_entropy + (1 - mix) * (1 - accepted)}
        wanted.append(losses[kind].sum())
    gradients = torch.autograd.grad(wanted[0] + 0.5 * wanted[1], [hidden, weight])
    assert torch.allclose(sums.double(), torch.stack(wanted), rtol=1e-5)
    assert loss.item() == pytest.approx((wanted[0] + 0.5 * wanted[1]).item(), rel=1e-5)
    assert torch.allclose(hidden.grad, gradients[0], atol=1e-5)
    assert torch.allclose(weight.grad, gradients[1], atol=1e-5)


def test_simulated_walk_against_played_rounds():
    random.seed(0)
    for trial in range(200):
        length, depths = random.randint(2, 30), random.randint(1, 4)
        mask = torch.tensor([random.random() < 0.7 for _ in range(length)])
        rows, supervised = supervised_rows(mask, [0, length], depths)
        hits = supervised & (torch.rand(supervised.shape,
                                        generator=torch.Generator().manual_seed(trial)) < 0.7)
        place = {row: i for i, row in enumerate(rows.tolist())}
        reached, accepted = simulate(mask, [0, length], rows, hits)[0].tolist()
        wanted = reference.walk(mask.tolist(), lambda k, t: bool(hits[k, place[t]]), depths)  # noqa: B023
        assert (sum(accepted), reached[0]) == wanted


def test_a_vanishing_probability_does_not_cap_the_loss():
    """softmax[j] below the smallest float is no longer of use to find log sum exp(logits)."""
    logits = torch.tensor([[300.0, 100.0, 0.0], [1.0, 2.0, 3.0]])
    wanted = logits.double().logsumexp(-1, keepdim=True)
    assert torch.allclose(log_total(logits, logits.softmax(-1), torch.tensor([2, 0])).double(), wanted)


def test_a_target_outside_the_map_is_a_miss():
    drafter, batch = drafter_of(), make_batch([sample_of(12, 5)])
    batch["target_argmax"][:] = 0  # not in MAP
    rows, hits = draft_hits(drafter, EMBEDDING, batch, MAP, 3)
    assert len(rows) and not hits.any()
    rows, supervised = supervised_rows(batch["loss_mask"], batch["bounds"], 3)
    with torch.no_grad():
        hidden = ttt_hidden(drafter, EMBEDDING, batch, lay_out(rows, batch["bounds"], 3, "cpu"))
        choice = MAP[drafter.lm_head(drafter.norm(hidden[0])).argmax(-1)]
    batch["target_argmax"][rows + 1] = choice
    _, hits = draft_hits(drafter, EMBEDDING, batch, MAP, 3)
    assert torch.equal(hits[0], supervised[0])


def test_a_full_vocabulary_of_163840_trains_in_bounded_memory(monkeypatch):
    """All logits of this step would be 190 MB; what is held of them is three chunks at most."""
    size, chunk, depths = 163_840, 8 * 2**20, 7
    monkeypatch.setattr("common.loss.CHUNK_BYTES", chunk)
    drafter, head = drafter_of(size), torch.randn(size, H)
    teacher = Teacher(head, None, None, 1.0, "cpu", torch.float32)
    sample = sample_of(50, 1)
    loss, _, counted = TrainStep(drafter, EMBEDDING, teacher, depths, 0.8)(make_batch([sample]), 1 / 46)
    loss.backward()
    assert counted.sum() * size * 4 > 20 * chunk
    assert sum(buffer.numel() * buffer.element_size() for buffer in teacher.buffer.kept.values()) <= 3 * chunk
    assert loss.isfinite() and drafter.lm_head.weight.grad.isfinite().all() and drafter.fc.weight.grad.any()
