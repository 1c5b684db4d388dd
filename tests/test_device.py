"""What a training step asks of a device: few launches, hardly a wait, nothing mixed with the CPU.

    python -m tests.test_device    # prints the counts of the step of docs/scale.md
"""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.drafter import Drafter
from common.loss import DEVICE_CHUNK_BYTES, DEVICE_PIECE, CompactTeacher, Teacher, TrainStep
from common.shards import broken_rows
from common.ttt import make_batch
from tests.fake_device import FakeDevice
from train_drafter import Blame, learn, make_optimizers

H, V, D, DEPTHS = 32, 128, 64, 7
TOKENS = 64  # of each of four documents; those of the real step have SCALE times as many
SCALE = 2048 // TOKENS
ANSWERS = {"one answer": [(2, TOKENS)], "eight answers": [(8 * i + 2, 8 * i + 8) for i in range(8)]}


def samples_of(answers):
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(TOKENS, dtype=torch.uint8)
    for first, last in answers:
        mask[first:last] = 1
    samples = []
    for _ in range(4):
        ids = torch.stack([torch.randperm(V, generator=generator)[:16] for _ in range(TOKENS)]).int()
        ids[:, 0] = ids[:, 0] // 2 * 2  # the target's choice is in the map
        samples.append({
            "input_ids": torch.randint(0, V, (TOKENS,), generator=generator), "loss_mask": mask,
            "aux_hidden_states": torch.randn(TOKENS, 3 * H, generator=generator).bfloat16(),
            "last_hidden_state": torch.randn(TOKENS, H, generator=generator).bfloat16(),
            "target_argmax": ids[:, 0].clone(), "teacher_ids": ids,
            "teacher_logprobs": torch.randn(TOKENS, 16, generator=generator).log_softmax(-1).half()})
    return samples


def step_of(kind, loss, put):
    """A TrainStep of a small drafter; put: what brings tensors to the device."""
    torch.manual_seed(0)
    drafter = Drafter({"hidden_size": H, "target_hidden_size": H, "intermediate_size": 64,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                       "rms_norm_eps": 1e-6, "draft_vocab_size": D, "vocab_size": V,
                       "max_position_embeddings": 4096,
                       "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    embedding, head, rows = torch.randn(V, H).bfloat16(), torch.randn(V, H).bfloat16(), torch.arange(0, V, 2)
    if put:
        put.put_module(drafter)
    device = put.device if put else "cpu"
    if kind == "compact":
        teacher = CompactTeacher(V, rows, device, torch.bfloat16)
    else:
        teacher = Teacher(head, rows, None, 1.0, device, torch.bfloat16, whole=loss != "kl")
    return TrainStep(drafter, put.put(embedding) if put else embedding, teacher, DEPTHS, 0.8, loss)


class FlexInOne(torch.autograd.Function):
    """FlexAttention as a device runs it, one kernel forward and three backward; computed densely here."""

    @staticmethod
    def forward(ctx, fake, mask, *qkv):
        ctx.fake, ctx.inputs = fake, [x.data_.detach().requires_grad_() for x in qkv]
        q, k, v = ctx.inputs
        with fake.counted_as("flex_attention", 1), torch.enable_grad():
            query, column = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
            seen = mask.mask_mod(0, 0, fake.put(query), fake.put(column)).data_
            ctx.out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return fake.put(ctx.out)

    @staticmethod
    def backward(ctx, grad):
        with ctx.fake.counted_as("flex_attention_backward", 3):
            found = torch.autograd.grad(ctx.out, ctx.inputs, grad.data_)
        return None, None, *map(ctx.fake.put, found)


def begin(fake, answers, kind, loss, monkeypatch):
    """(TrainStep, its batch) on a fake device, whose pieces and chunks are as many as those of the real step
    with D = 32,000 in bfloat16, in documents of 2,048 tokens."""
    monkeypatch.setattr("common.loss.DEVICE_CHUNK_BYTES", DEVICE_CHUNK_BYTES // SCALE * D // 32000)
    monkeypatch.setattr("common.loss.DEVICE_PIECE", DEVICE_PIECE // SCALE)
    monkeypatch.setattr("common.ttt._flex", lambda: lambda q, k, v, block_mask, enable_gqa:
                        FlexInOne.apply(fake, block_mask, q, k, v))
    step = step_of(kind, loss, fake)
    return step, make_batch(samples_of(ANSWERS[answers]), fake.device, step.prepare)


def count_step(answers, kind, loss, monkeypatch):
    """(launches, waits) of all of an optimizer step, of `learn`; the second, as the first makes moments."""
    with FakeDevice() as fake:
        step, batch = begin(fake, answers, kind, loss, monkeypatch)
        used = (batch["loss_mask"] & (batch["prepared"][0].position > 0)).roll(-1)
        batch["blame"] = Blame([0, 1, 2, 3], batch["bounds"], broken_rows(batch, used))
        monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices",
                            lambda: ["meta"])
        parameters = dict(step.drafter.named_parameters())
        accelerator = SimpleNamespace(device=fake.device, num_processes=1, autocast=nullcontext,
                                      no_sync=lambda model: nullcontext(), reduce=lambda tensor: tensor)
        training = SimpleNamespace(
            accelerator=accelerator, sharded=False, parameters=parameters, model=step,
            inputs=SimpleNamespace(shards=SimpleNamespace(index=np.ones((4, 6)))),
            args=SimpleNamespace(ttt_steps=DEPTHS), progress={"step": 0},
            optimizers=make_optimizers(parameters, 1e-3, 1e-2))
        for _ in range(2):
            fake.launches.clear()
            fake.waits.clear()
            learn(training, np.arange(4), [batch], 1.0)
        return fake.launches.copy(), fake.waits.copy()


@pytest.mark.parametrize("kind, loss", [("compact", "kl"), ("states", "kl"), ("states", "lk")])
@pytest.mark.parametrize("answers", ANSWERS)
def test_a_step_is_few_launches_and_no_wait(answers, kind, loss, monkeypatch):
    """And it computes what a CPU computes, to bfloat16's rounding; a mix of devices would have raised."""
    launches, waits = count_step(answers, kind, loss, monkeypatch)
    assert launches.total() <= 3000 and waits == {"tolist": 1}
    with FakeDevice() as fake:
        step, batch = begin(fake, answers, kind, loss, monkeypatch)
        value, *_ = step(batch, 1e-3)
        value.backward()
        value = value.item()
        grads = {name: part.grad.data_.float() for name, part in step.drafter.named_parameters()}
    step, batch = step_of(kind, loss, None), make_batch(samples_of(ANSWERS[answers]))
    with torch.autocast("cpu", torch.bfloat16):
        wanted, *_ = step(batch, 1e-3)
    wanted.backward()
    assert value == pytest.approx(wanted.item(), rel=1e-2)
    for name, parameter in step.drafter.named_parameters():
        assert F.cosine_similarity(grads[name].flatten(), parameter.grad.flatten(), 0) > 0.99, name


def test_the_fake_device_notices():
    with FakeDevice() as fake:
        x = torch.randn(4, 4).to(fake.device)
        assert fake.waits.total() == 1  # a copy that blocks
        y = (x @ x)[1:].T
        assert fake.launches == {"_to_copy": 1, "mm": 1}
        y.sum().item(), x[x > 0], x.nonzero(), x.tolist(), x.cpu()
        assert fake.waits.total() == 6
        torch.randn(4, 4).to(fake.device, non_blocking=True)
        assert fake.waits.total() == 6
        with pytest.raises(AssertionError, match="mixes the device with a CPU tensor"):
            x + torch.ones(4)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        for answers in ANSWERS:
            for kind, loss in (("compact", "kl"), ("states", "kl"), ("states", "lk")):
                launches, waits = count_step(answers, kind, loss, patch)
                print(f"{answers}, {kind}, {loss}: {launches.total():,} launches, {waits.total():,} waits; "
                      f"most {launches.most_common(12)}")
