"""The target, loaded in transformers: captured states and logits of one forward pass, with or without a KV cache."""

import inspect

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from common.cli import UserError
from common.target import process_logits


class GrowingLayer(DynamicLayer):
    """A layer of the KV cache that writes into a buffer with room ahead instead of copying everything at every step."""

    room = 128

    def update(self, key_states, value_states, *args, **kwargs):
        """Append [B, kv, T, d] and return everything so far, [B, kv, length, d], as views of the buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.key_buffer, self.value_buffer = self.keys, self.values
        used = self.keys.shape[2]
        total = used + key_states.shape[2]
        if total > self.key_buffer.shape[2] or self.keys.shape[0] != self.key_buffer.shape[0]:
            self.key_buffer, self.value_buffer = self._grow(self.keys, total), self._grow(self.values, total)
        self.key_buffer[:, :, used:total] = key_states
        self.value_buffer[:, :, used:total] = value_states
        self.keys, self.values = self.key_buffer[:, :, :total], self.value_buffer[:, :, :total]
        return self.keys, self.values

    def _grow(self, kept, total):
        batch, heads, used, width = kept.shape
        buffer = kept.new_empty(batch, heads, total + self.room, width)
        buffer[:, :, :used] = kept
        return buffer

    def select(self, rows, first=0):
        """Keep only the batch rows `rows` and the positions from `first` on."""
        self.keys, self.values = self.keys[rows, :, first:], self.values[rows, :, first:]
        self.key_buffer, self.value_buffer = self.keys, self.values


class GrowingCache(Cache):
    """KV cache of a decoder for `forward(cache=...)`: grows in place, can be thinned out."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def select(self, rows, first=0):
        for layer in self.layers:
            layer.select(rows, first)


class SlotLayer(DynamicLayer):
    """A layer of a SlotCache."""

    def __init__(self, cache):
        super().__init__()
        self.cache = cache

    def get_seq_length(self):
        return self.cache.past

    def update(self, key_states, value_states, *args, **kwargs):
        """Write [B, kv, T, d] where the cache says, and return everything up to the last slot in use, [B, kv, end, d]."""
        cache = self.cache
        if not self.is_initialized:  # zeros, as a masked slot's weight of 0 must not meet a NaN
            self.keys, self.values = (states.new_zeros(len(cache.lengths), states.shape[1], cache.capacity, states.shape[3])
                                      for states in (key_states, value_states))
            self.is_initialized = True
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if cache.row is not None:
                buffer[cache.row, :, : states.shape[2]] = states[0]
            elif cache.slots is None:
                buffer[:, :, cache.past : cache.end] = states
            else:
                buffer[cache.rows, :, cache.slots] = states.transpose(1, 2)
        if cache.row is not None:
            return key_states, value_states
        return self.keys[:, :, : cache.end], self.values[:, :, : cache.end]


class SlotCache(Cache):
    """A preallocated KV cache of B sequences, each of its own length; what lies behind a sequence's length is overwritten."""

    def __init__(self, layers, batch, capacity):
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])
        self.lengths, self.capacity = [0] * batch, capacity
        self.past = self.end = 0
        self.row = self.rows = self.slots = None

    def fill(self, row):
        """The next forward pass is over the prompt of sequence `row` alone."""
        self.row, self.past = row, 0

    def append(self, count, device):
        """The next forward pass appends `count` tokens to every sequence. Returns the lengths, int64 [B, 1]."""
        self.row, self.past = None, max(self.lengths)
        self.end = self.past + count
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        self.rows = self.slots = None
        if len(self.lengths) > 1:
            self.rows, self.slots = torch.arange(len(lengths), device=device)[:, None], lengths + torch.arange(count, device=device)
        return lengths

    def filled(self, part, length):
        """Sequence part.start of the slice `part` was filled with `length` tokens; the others of it have the same."""
        others = slice(part.start + 1, part.stop)
        for layer in self.layers if part.stop > others.start else ():
            layer.keys[others], layer.values[others] = layer.keys[part.start], layer.values[part.start]
        self.lengths[part] = [length] * (part.stop - part.start)

    def keep(self, path, counts):
        """Of the tokens appended last, each sequence keeps its first `counts` (a list of B) of int64 [B, P] `path`, ascending; None
        for a path that is 0, 1, 2, ..."""
        if path is not None:
            rows = torch.arange(len(path), device=path.device)[:, None]
            old = torch.tensor(self.lengths, device=path.device)[:, None] + path
            new = old - path + torch.arange(path.shape[1], device=path.device)
            for layer in self.layers:
                layer.keys[rows, :, new], layer.values[rows, :, new] = layer.keys[rows, :, old], layer.values[rows, :, old]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows):
        """Keep only the sequences `rows`, a list."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self.lengths = [self.lengths[row] for row in rows]


class TargetModel:
    """A target in transformers. `layers` are the three HF hidden_states indices to capture."""

    def __init__(self, target, layers, dtype="auto", device=None, trust_remote_code=False):
        self.target, self.layers = target, layers
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = _load(target, dtype, trust_remote_code).to(self.device).eval()
        self.model.requires_grad_(False)
        self.dtype = self.model.get_output_embeddings().weight.dtype
        self.lm_head = self.model.get_output_embeddings()
        self.decoder = self.model.get_decoder()
        blocks = [module for module in self.decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == target.num_layers]
        if not blocks:
            raise UserError(f"{target.folder}: {type(self.model).__name__} has no list of {target.num_layers} decoder layers to capture")
        # transformers renames this argument between 5.19 and 5.24
        self.cache_argument = "cache" if "cache" in inspect.signature(self.decoder.forward).parameters else "past_key_values"
        self.captured = {}
        for layer in layers:
            blocks[0][layer].register_forward_pre_hook(self._capture(layer), with_kwargs=True)

    def _capture(self, layer):
        def hook(module, args, kwargs):
            self.captured[layer] = args[0] if args else kwargs["hidden_states"]
        return hook

    @torch.inference_mode()
    def states(self, input_ids, cache=None, attention_mask=None, position_ids=None):
        """One forward pass over int [B, T]. Returns (aux [B, T, 3H], last [B, T, H], the lm_head's input).

        Padding on the right needs no mask: no real token sees it. With padding on the left give attention_mask
        [B, past + T] and position_ids [B, T].
        """
        self.captured.clear()
        output = self.decoder(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                              use_cache=cache is not None, **{self.cache_argument: cache})
        aux = torch.cat([self.captured[layer] for layer in self.layers], dim=-1) if self.layers else None
        return aux, output.last_hidden_state

    @torch.inference_mode()
    def judge_states(self, cache, tokens, depths=None, ancestors=None):
        """`states` of N more tokens behind each sequence of a SlotCache: int64 [B, N].

        Of a tree: depths int64 [B, N] below the first token, ancestors bool [B, N, N] (itself included); None for a chain.
        """
        count = tokens.shape[1]
        lengths = cache.append(count, tokens.device)  # [B, 1]
        if ancestors is None:
            if len(tokens) == 1:
                return self.states(tokens, cache)  # transformers' own mask is right, and none for one token
            depths = torch.arange(count, device=tokens.device).expand(tokens.shape)
            ancestors = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril().expand(len(tokens), count, count)
        slots = lengths + torch.arange(count, device=tokens.device)  # [B, N]
        places = torch.arange(cache.end, device=tokens.device)
        seen = (places < lengths)[:, None].repeat(1, count, 1).scatter_(2, slots[:, None].expand_as(ancestors), ancestors)  # [B, N, end]
        positions = lengths + depths
        masks = {"full_attention": seen}
        if window := self.target.text.get("sliding_window"):
            # of the tree's own slots the position is at most the place, which changes nothing as no window is shorter than a draft
            masks["sliding_attention"] = seen & (positions[:, :, None] - places < window)
        # added to the scores, which eager attention and sdpa both do
        lowest = torch.finfo(self.dtype).min
        masks = {kind: torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, lowest)[:, None]
                 for kind, mask in masks.items()}
        kinds = set(self.target.text.get("layer_types") or ())
        if kinds - masks.keys():
            raise UserError(f"{self.target.name} has layers of {', '.join(sorted(kinds - masks.keys()))}, for which neither trees nor "
                            f"several prompts at a time can be verified here; give --topk 1 --concurrency 1")
        mask = {kind: masks[kind] for kind in kinds} if kinds else list(masks.values())[-1]
        return self.states(tokens, cache, mask, positions)

    @torch.inference_mode()
    def logits(self, last):
        """The target's own logits, float32 [..., V], of lm_head inputs [..., H]."""
        return process_logits(self.lm_head(last).float(), self.target.logit_softcap, self.target.logit_scale)

    @torch.inference_mode()
    def argmax(self, last, chunk=2048):
        """int64 [N]: the target's greedy choice for lm_head inputs [N, H], without a [N, V] float32 tensor.

        Scale and soft cap keep the order, unless the scale is negative, which no model has.
        """
        return torch.cat([self.lm_head(part).max(-1).indices for part in last.split(chunk)])  # of bfloat16 max is faster than argmax

    def check_logits(self, input_ids):
        """Refuse a model whose own logits for int [1, T] are not lm_head(captured last state), scaled and capped as its config says."""
        with torch.inference_mode():
            own = self.model(input_ids=input_ids, use_cache=False).logits[0].float()  # [T, V]
            _, last = self.states(input_ids)
            ours = self.logits(last)[0]
        gap = (own - ours).abs().max().item() / max(own.abs().max().item(), 1e-9)
        if not gap <= 0.02:  # NaN is no small gap
            raise UserError(f"{type(self.model).__name__}: its logits are not lm_head(last state) with the scale and soft cap of its "
                            f"config (they differ by {gap:.1%} of the largest logit); such a model is not supported")


def _load(target, dtype, trust_remote_code):
    import transformers

    transformers.utils.logging.disable_progress_bar()  # of loading weights: seconds, and noise in every log
    config = transformers.AutoConfig.from_pretrained(target.folder, trust_remote_code=trust_remote_code)
    model_class = getattr(transformers, target.model_class, None)
    if trust_remote_code or not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        model_class = transformers.AutoModelForCausalLM
    kwargs = {} if model_class is not transformers.AutoModelForCausalLM else {"trust_remote_code": trust_remote_code}
    dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        model, report = model_class.from_pretrained(target.folder, config=config, dtype=dtype, output_loading_info=True, **kwargs)
    except (ValueError, OSError, ImportError, AttributeError, RuntimeError) as error:
        raise UserError(f"{target.folder}: transformers cannot load it ({str(error).splitlines()[0][:300]})") from None
    if report["missing_keys"]:
        raise UserError(f"{target.folder} lacks {len(report['missing_keys'])} of the model's tensors ({min(report['missing_keys'])}), "
                        f"which would be random; get the complete weights, or a config that fits them")
    return model
