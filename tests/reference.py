"""Slow, independent versions in float64 of what the project computes fast."""

import torch


def rms_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, position, inverse_frequencies):
    """[heads, d] at one position."""
    angle = position * inverse_frequencies.double()
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def draft_logits(drafter, embedding, input_ids, aux, t, tokens):
    """Logits of step-by-step drafting from row t, one row at a time, everything recomputed: float64
    [len(tokens)+1, D].

    tokens: the drafted tokens x[t+2], x[t+3], ... that are fed back after the first step.
    """
    w = {name: value.double() for name, value in drafter.state_dict().items()}
    eps, (heads, kv, width) = drafter.config["rms_norm_eps"], (drafter.heads, drafter.kv_heads,
                                                               drafter.head_dim)
    freq = drafter.inverse_frequencies

    def fuse(token, hidden):
        return torch.cat([rms_norm(embedding[token].double(), w["midlayer.input_layernorm.weight"], eps),
                          rms_norm(hidden, w["midlayer.hidden_norm.weight"], eps)])

    def key_value(fused, position):
        k = (w["midlayer.self_attn.k_proj.weight"] @ fused).view(kv, width)
        return rotate(k, position, freq), (w["midlayer.self_attn.v_proj.weight"] @ fused).view(kv, width)

    cache = []
    for row in range(t):
        cache.append(key_value(fuse(input_ids[row + 1], w["fc.weight"] @ aux[row].double()), row))
    hidden, out = w["fc.weight"] @ aux[t].double(), []
    for step, token in enumerate([input_ids[t + 1], *tokens]):
        fused = fuse(token, hidden)
        cache.append(key_value(fused, t + step))
        q = rotate((w["midlayer.self_attn.q_proj.weight"] @ fused).view(heads, width), t + step, freq)
        attended = []
        for head in range(heads):
            group = head // (heads // kv)
            scores = torch.stack([(q[head] * k[group]).sum() for k, _ in cache]) / width**0.5
            attended.append((scores.softmax(0)[:, None] * torch.stack([v[group] for _, v in cache])).sum(0))
        hidden = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
        x = rms_norm(hidden, w["midlayer.post_attention_layernorm.weight"], eps)
        gate = w["midlayer.mlp.gate_proj.weight"] @ x
        up = w["midlayer.mlp.up_proj.weight"] @ x
        hidden = hidden + w["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        out.append(w["lm_head.weight"] @ rms_norm(hidden, w["norm.weight"], eps))
    return torch.stack(out)


def walk(loss_mask, hit, depths):
    """(accepted, verifications) of one document by playing the rounds: hit(depth, row) says whether that
    draft is right.
    """
    accepted = verifications = 0
    answers, position = [], 0
    while position < len(loss_mask):
        if loss_mask[position]:
            first = position
            while position < len(loss_mask) and loss_mask[position]:
                position += 1
            answers.append((max(first, 1), position))
        position += 1
    for first, end in answers:
        known = first + 1  # tokens that stand before the round's drafts; prefill wrote the answer's first one
        while known < end:
            right = 0
            while right < depths and known + right < end and hit(right, known - 2):
                right += 1
            verifications += 1
            accepted += right
            known += right + 1
    return accepted, verifications
