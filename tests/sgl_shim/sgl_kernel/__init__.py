"""Stand-in in plain torch for the CPU build of SGLang's kernels (sgl_kernel, SGLang 0.5.23), which no package
index has.

Only what dense decoders with MHA or GQA (Llama, Qwen2, Qwen3) and EAGLE drafters call with `device="cpu"`:
for tests, not for speed. With VERIFY_LOG=FILE every verification appends one line to FILE: the candidate ids
of the batch, JSON [B, D], root first.
"""

import ctypes
import json
import os

import torch

_VERIFY_LOG = os.environ.get("VERIFY_LOG")

__version__ = "0.4.10+cpu.torchshim"
__all__ = []

_lib = torch.library.Library("sgl_kernel", "DEF")


def _sdpa(q, k, v, scale, logit_cap, mask, sinks=None):
    # q [T,Hq,D]  k,v [S,Hkv,D]  mask [T,S] bool or None
    hq, hk = q.shape[1], k.shape[1]
    q = q.transpose(0, 1).float()
    k = k.transpose(0, 1).float()
    v = v.transpose(0, 1).float()
    if hq != hk:
        k = k.repeat_interleave(hq // hk, 0)
        v = v.repeat_interleave(hq // hk, 0)
    if (not logit_cap) and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=None if mask is None else mask[None, None], scale=scale
        )[0].transpose(0, 1)
    s = torch.matmul(q, k.transpose(1, 2)) * scale
    if logit_cap:
        s = logit_cap * torch.tanh(s / logit_cap)
    if mask is not None:
        s = s.masked_fill(~mask[None], float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(-1, 1, 1).expand(-1, s.shape[1], 1)], -1)
        p = s.softmax(-1)[..., :-1]
    else:
        p = s.softmax(-1)
    return torch.matmul(p, v).transpose(0, 1)


def _decode_attention_cpu(q, k_buffer, v_buffer, k_scale, v_scale, out, k, v, loc, attn_logits,
                          req_to_token, req_pool_indices, seq_lens, scaling, logit_cap,
                          is_cross_attn=False, sliding_window=0, encoder_lens=None, sinks=None):
    if k is not None and v is not None and not is_cross_attn:
        k_buffer[loc] = k.view(-1, k_buffer.shape[1], k_buffer.shape[2]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, v_buffer.shape[1], v_buffer.shape[2]).to(v_buffer.dtype)
    lens = seq_lens.tolist()
    rows = req_pool_indices.tolist()
    for i, (n, r) in enumerate(zip(lens, rows, strict=False)):
        idx = req_to_token[r, :n].long()
        if sliding_window and sliding_window > 0:
            idx = idx[-sliding_window:]
        states = _sdpa(q[i : i + 1], k_buffer[idx], v_buffer[idx], scaling, logit_cap, None, sinks)
        out[i : i + 1] = states.to(out.dtype)


def _extend_attention_cpu(q, k, v, out, k_buffer, v_buffer, k_scale, v_scale, req_to_token,
                          req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, max_len_extend,
                          scaling, logit_cap, is_cross_attn=False, sliding_window=0, encoder_lens=None,
                          sinks=None, tree_mask=None, is_causal=True):
    lens, exts = seq_lens.tolist(), extend_seq_lens.tolist()
    starts, rows = extend_start_loc.tolist(), req_pool_indices.tolist()
    off = 0
    for _i, (n, e, s, r) in enumerate(zip(lens, exts, starts, rows, strict=False)):
        if e == 0:
            continue
        idx = req_to_token[r, :n].long()
        pre = n - e
        qpos = torch.arange(pre, n).unsqueeze(1)
        kpos = torch.arange(n).unsqueeze(0)
        if is_causal:
            mask = kpos <= qpos
        else:
            mask = torch.ones(e, n, dtype=torch.bool)
        if tree_mask is not None:  # QLEN_ONLY [bs, e, e]
            m = tree_mask[off : off + e * e].view(e, e).bool()
            off += e * e
            mask = torch.cat([torch.ones(e, pre, dtype=torch.bool), m], 1)
        if sliding_window and sliding_window > 0:
            mask = mask & (kpos > qpos - sliding_window)
        states = _sdpa(q[s : s + e], k_buffer[idx], v_buffer[idx], scaling, logit_cap, mask, sinks)
        out[s : s + e] = states.to(out.dtype)


_lib.define(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale,"
    " Tensor(c!) out, Tensor? k, Tensor? v, Tensor loc, Tensor attn_logits, Tensor req_to_token,"
    " Tensor req_pool_indices, Tensor seq_lens, float scaling, float logit_cap, bool is_cross_attn,"
    " int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_lib.impl("decode_attention_cpu", _decode_attention_cpu, "CPU")
_lib.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor k_buffer, Tensor v_buffer,"
    " float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,"
    " Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float scaling, float logit_cap,"
    " bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask,"
    " bool is_causal) -> ()"
)
_lib.impl("extend_attention_cpu", _extend_attention_cpu, "CPU")


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset,
                                 out_cache_loc, pool_len):
    o = 0
    for r, s, e in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False):
        n = e - s
        if n > 0:
            req_to_token[r, s:e] = out_cache_loc[o : o + n].to(req_to_token.dtype)
            o += n


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset,
                                 out_cache_loc, pool_len):
    o = 0
    for r, s, e in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False):
        n = e - s
        if n > 0:
            out_cache_loc[o : o + n] = req_to_token[r, s:e].to(out_cache_loc.dtype)
            o += n


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices, req_to_token, seq_lens, out_cache_loc,
                                           pool_len, topk, num_steps):
    n = topk * num_steps
    for i, (r, s) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        out_cache_loc[i * n : (i + 1) * n] = req_to_token[r, s : s + n].to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    # raw bytes: rows of `stride` bytes inside every layer's key and value buffer
    tgt, src = tgt_loc.tolist(), src_loc.tolist()
    for p, st in zip(data_ptrs.tolist(), strides.tolist(), strict=False):
        rows = [ctypes.string_at(p + s * st, st) for s in src]  # copy first: moves may overlap
        for t, b in zip(tgt, rows, strict=False):
            ctypes.memmove(p + t * st, b, st)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """[bs*topk, pool_len] table: committed prefix, then this candidate's own draft slots."""
    bs = seq_lens.numel()
    out = torch.zeros(bs * topk, pool_len, dtype=req_to_token.dtype)
    for i, (r, n) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        for t in range(topk):
            out[i * topk + t, :n] = req_to_token[r, :n]
            a = n + t * num_steps
            out[i * topk + t, n : n + num_steps] = req_to_token[r, a : a + num_steps]
    return out


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    idx = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[idx].to(bonus_tokens.dtype))


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    a = accept_index.reshape(-1)
    a = a[a > -1].long()
    accept_out_cache_loc[: a.numel()] = out_cache_loc[a].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    for i, (s, n) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=False)):
        if n <= 0:
            continue
        input_ids[s : s + n - 1] = input_ids[s + 1 : s + n].clone()
        last = s + n - 1 if select_index is None else int(select_index[i])
        input_ids[last] = topk_index.reshape(-1)[i].to(input_ids.dtype)


def build_tree_kernel_efficient_cpu(parent_list, selected_index, verified_seq_len, tree_mask, positions,
                                    retrieve_index, retrieve_next_token, retrieve_next_sibling,
                                    topk, depth, draft_token_num, tree_mask_mode=1):
    D = draft_token_num
    mode = int(tree_mask_mode)
    seqs = verified_seq_len.tolist()
    parents = parent_list.tolist()
    sel_all = selected_index.tolist()
    prefix = 0
    for b, n in enumerate(seqs):
        sel, par = sel_all[b], parents[b]
        retrieve_index[b] = torch.arange(b * D, (b + 1) * D)
        nxt = [-1] * D
        sib = [-1] * D
        parent_pos = [0] * D
        for i in range(D - 1, 0, -1):
            tb = sel[i - 1] // topk
            if tb == 0:
                pp = 0
            else:
                tok = par[tb]
                pp = sel.index(tok) + 1 if tok in sel else -1
            parent_pos[i] = pp
            if pp >= 0:
                if nxt[pp] != -1:
                    sib[i] = nxt[pp]
                nxt[pp] = i
        retrieve_next_token[b] = torch.tensor(nxt)
        retrieve_next_sibling[b] = torch.tensor(sib)
        m = torch.zeros(D, D, dtype=torch.bool)
        m[:, 0] = True
        pos = [n] * D
        for i in range(1, D):
            d, c = 0, i
            while c > 0:
                m[i, c] = True
                d += 1
                c = parent_pos[c]
            pos[i] = n + d
        positions[b * D : (b + 1) * D] = torch.tensor(pos)
        if mode == 1:  # QLEN_ONLY
            tree_mask[b * D * D : (b + 1) * D * D] = m.reshape(-1).to(tree_mask.dtype)
        elif mode == 0:  # FULL_MASK
            base = b * D * D + prefix * D
            full = torch.cat([torch.ones(D, n, dtype=torch.bool), m], 1).reshape(-1)
            tree_mask[base : base + full.numel()] = full.to(tree_mask.dtype)
        else:
            raise NotImplementedError("QLEN_ONLY_BITPACKING")
        prefix += n


def verify_tree_greedy_cpu(predicts, accept_index, accept_token_num, candidates, retrive_index,
                           retrive_next_token, retrive_next_sibling, target_predict):
    bs, D = candidates.shape
    S = accept_index.shape[1]
    cand, ri = candidates.tolist(), retrive_index.tolist()
    nt, ns = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    if _VERIFY_LOG:
        with open(_VERIFY_LOG, "a") as file:
            file.write(json.dumps(cand) + "\n")
    tp = target_predict.reshape(-1).tolist()
    for b in range(bs):
        last = ri[b][0]
        accept_index[b, 0] = last
        num, cur = 0, 0
        for _ in range(1, S):
            cur = nt[b][cur]
            while cur != -1 and cand[b][cur] != tp[last]:
                cur = ns[b][cur]
            if cur == -1:
                break
            predicts[last] = tp[last]
            num += 1
            last = ri[b][cur]
            accept_index[b, num] = last
        accept_token_num[b] = num
        predicts[last] = tp[last]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def _missing(*a, **k):
        raise NotImplementedError(f"sgl_kernel.{name} is not in the torch CPU shim")

    _missing.__name__ = name
    return _missing
