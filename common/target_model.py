"""The target in transformers: captured states and logits of a forward pass, with or without a KV cache."""

import inspect
import re
import weakref
from functools import cached_property

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from common.cli import UserError, say
from common.target import (
    choices,
    load_config,
    native_class,
    plain_weight,
    process_logits,
)

# Names in a config of what is no plain attention: recurrent states, where no layer_types tell; a sparse
# indexer, which has keys of its own beside those of any layer; several residual streams.
RECURRENT = re.compile(r"mamba|ssm|rwkv|recurrent|lightning|linear_attn|linear_num|lru_|attn_type_list|"
                       r"hybrid_override|state_size|conv_L_cache")
INDEXER = re.compile(r"^index(er)?_")
STREAMS = re.compile(r"^altup_num_inputs$|^hc_(mult|count)$|hyper_connection|residual_stream")


def odd_layers(text):
    """Words for what the layers of a text config keep beside the keys and values of tokens, "" for nothing.

    A SlotCache holds those alone: it goes back behind rejected drafts, which a state of all that was read
    cannot.
    """
    kinds = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"layers of {', '.join(sorted(kinds))}"
    names = [INDEXER] if text.get("layer_types") else [INDEXER, RECURRENT]
    found = [key for key, value in text.items() if value and any(name.search(key) for name in names)]
    return f"layers with {', '.join(sorted(found)[:3])}" if found else ""


def cannot_draft(target, odd):
    """The UserError of a target with such layers that is to verify drafts."""
    return UserError(f"{target.name} has {odd}, whose cache cannot go back behind rejected drafts in "
                     f"transformers; measure it on a server, with --backend sglang --server-url URL")


def check_capture(target):
    """Refuse, from its config, a target whose layers hand on several residual streams, not one state of H."""
    for key, value in target.text.items():
        if STREAMS.search(key) and isinstance(value, int) and value > 1:
            raise UserError(f"{target.name} has several residual streams ({key} {value}), so that no layer's "
                            f"state can be captured in transformers; use --backend sglang --server-url URL "
                            f"where SGLang captures it, or another target")


class SlotLayer(DynamicLayer):
    """A layer of a SlotCache."""

    def __init__(self, cache):
        super().__init__()
        self.cache = cache

    def get_seq_length(self):
        return self.cache.past

    def update(self, key_states, value_states, *args, **kwargs):
        """Write [B, kv, T, d] where the cache says; returns all up to its last slot in use, [B, kv, end,
        d]."""
        cache = self.cache
        if not self.is_initialized:
            self.keys, self.values = (states.new_empty(cache.most, states.shape[1], 0, states.shape[3])
                                      for states in (key_states, value_states))
            self.is_initialized = True
        self.keys = self._write(self.keys, key_states)
        self.values = self._write(self.values, value_states)
        if cache.copies is not None:
            return key_states, value_states
        count = len(key_states)
        return self.keys[:count, :, : cache.end], self.values[:count, :, : cache.end]

    def _write(self, buffer, states):
        """`buffer` [most, kv, slots, d] with `states` [B, kv, T, d] written to it; longer where it must
        be."""
        cache = self.cache
        if buffer.shape[2] < cache.end:  # zeros, as a masked slot's weight of 0 must not meet a NaN
            buffer = F.pad(buffer, (0, 0, 0, cache.end * 5 // 4 - buffer.shape[2]))
        if cache.copies is not None:
            buffer[cache.part, :, : cache.end] = states[cache.copies]
            buffer[cache.part, :, cache.end :] = 0
        elif len(states) == 1:
            buffer[:1, :, cache.end - states.shape[2] : cache.end] = states
        else:
            buffer[cache.own, :, cache.slots] = states.transpose(1, 2)
        return buffer


class SlotCache(Cache):
    """A KV cache of up to `most` sequences, each of its own length; what lies behind a length is overwritten.

    `fill` or `append` say what the next forward pass writes, and set `slots`, int64 [B, T], where in each
    sequence; `append` also `starts`, int64 [B, 1], the lengths.
    """

    def __init__(self, layers, most):
        weak = weakref.proxy(self)  # no cycle of references: the memory is free when the cache is
        super().__init__(layers=[SlotLayer(weak) for _ in range(layers)])
        self.draft = SlotLayer(weak)  # a drafter's layer: of the same sequences
        self.most, self.lengths = most, []
        self.past = self.end = 0
        self.part = self.copies = self.own = self.slots = self.starts = None

    def fill(self, part, count, copies):
        """The next pass is over prompts padded on the right to `count` tokens.

        Sequences `part`, a slice, are its rows `copies`, int64 [B].
        """
        self.part, self.copies = part, copies
        self.past, self.end = 0, count
        self.slots = torch.arange(count, device=copies.device).expand(len(copies), count)

    def append(self, count, device, ahead=0):
        """The next pass appends `count` tokens to every sequence, `ahead` slots behind its length."""
        self.copies = None
        self.past = max(self.lengths) + ahead
        self.end = self.past + count
        self.own = torch.arange(len(self.lengths), device=device)[:, None]
        self.starts = torch.tensor(self.lengths, device=device)[:, None]
        self.slots = self.starts + torch.arange(ahead, ahead + count, device=device)

    def seen(self, behind):
        """bool [B, T, end]: all below each length, and of the S slots behind it those of `behind`, [B, T,
        S].
        """
        below = torch.arange(self.end, device=behind.device) < self.starts  # [B, end]
        slots = self.starts + torch.arange(behind.shape[2], device=behind.device)  # [B, S]
        seen = below[:, None].repeat(1, behind.shape[1], 1)
        return seen.scatter_(2, slots[:, None].expand_as(behind), behind)

    def keep(self, path, counts):
        """Of the tokens appended last, each sequence keeps its first `counts`, a list of B, of `path`.

        path: int64 [B, P], ascending; None for 0, 1, 2, ...
        """
        if path is not None:
            old = self.starts + path
            new = self.starts + torch.arange(path.shape[1], device=path.device)
            for layer in self.layers:
                layer.keys[self.own, :, new] = layer.keys[self.own, :, old]
                layer.values[self.own, :, new] = layer.values[self.own, :, old]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def move(self, old, new):
        """Sequence `old` takes the place of `new`."""
        for layer in (*self.layers, self.draft):
            if layer.is_initialized:
                layer.keys[new], layer.values[new] = layer.keys[old], layer.values[old]
        self.lengths[new] = self.lengths[old]


class TargetModel:
    """A target in transformers. `layers` are the HF hidden_states indices to capture."""

    def __init__(self, target, layers, dtype="auto", device=None, trust_remote_code=False):
        self.target, self.layers = target, layers
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = _load(target, dtype, self.device, trust_remote_code).eval()
        # transformers' own generate is to decode as we do: without what the model's config would add
        self.model.generation_config = transformers.GenerationConfig()
        self.model.requires_grad_(False)
        self.lm_head = self.model.get_output_embeddings()
        self.dtype = self.lm_head.weight.dtype
        if self.dtype == torch.bfloat16 and not fast_bfloat16(self.device):
            say("this CPU has no instructions for bfloat16, in which the target is computed: --dtype "
                "float32 is several times as fast here")
        self.decoder = self.model.get_decoder()
        if self.decoder.get_output_embeddings() is not None:  # Llama 4's wrapper names the causal LM in it
            self.decoder = next(module for module in self.decoder.children()
                                if isinstance(module, transformers.PreTrainedModel))
        blocks = [module for module in self.decoder.modules()
                  if isinstance(module, nn.ModuleList) and len(module) == target.num_layers]
        if not blocks:
            raise UserError(f"{target.folder}: {type(self.model).__name__} has no list of "
                            f"{target.num_layers} decoder layers to capture; such a model is not supported")
        # transformers renames this argument between 5.19 and 5.24
        parameters = inspect.signature(self.decoder.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.captured = {}
        for layer in layers:
            blocks[0][layer].register_forward_pre_hook(self._capture(layer), with_kwargs=True)

    def _capture(self, layer):
        def hook(module, args, kwargs):
            self.captured[layer] = args[0] if args else kwargs["hidden_states"]
        return hook

    @torch.inference_mode()
    def states(self, input_ids, cache=None, layers=None, attention_mask=None, position_ids=None):
        """One forward pass over int [B, T]. Returns (aux [B, T, 3H], last [B, T, H], the lm_head's input).

        aux: of all captured layers, or of three of them, None of none. Padding on the right needs no mask: no
        real token sees it.
        """
        layers = self.layers if layers is None else layers
        self.captured.clear()
        output = self.decoder(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                              use_cache=cache is not None, **{self.cache_argument: cache})
        aux = torch.cat([self.captured[layer] for layer in layers], dim=-1) if layers else None
        return aux, output.last_hidden_state

    @cached_property
    def odd(self):
        """Words for what the model's cache keeps beside keys and values of tokens, "" for nothing: as its
        config says, or the cache that it makes for itself."""
        said = odd_layers(self.target.text)
        if said:
            return said
        with torch.inference_mode():
            made, _ = self.go_on(torch.zeros(1, 1, dtype=torch.int64, device=self.device), 1)
        parts = made.layers if type(made) is DynamicCache else [made]
        # a dummy reads another layer's keys and values
        plain = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
        others = sorted({type(part).__name__ for part in parts} - plain)
        return f"a cache of {', '.join(others)}" if others else ""

    @torch.inference_mode()
    def go_on(self, input_ids, end, cache=None):
        """(the model's own cache, last [B, H] of the last tokens) of int [B, T] more tokens, with which each
        sequence has `end`. cache: the one before, None for the first tokens."""
        # not every model asks its cache for the positions
        positions = torch.arange(end - input_ids.shape[1], end, device=input_ids.device).expand_as(input_ids)
        output = self.decoder(input_ids=input_ids, position_ids=positions, use_cache=True,
                              **{self.cache_argument: cache})
        cache = getattr(output, self.cache_argument, None)
        if cache is None:
            raise UserError(f"{type(self.model).__name__} hands out no cache, so that nothing can be decoded "
                            f"in transformers; use --backend sglang")
        return cache, output.last_hidden_state[:, -1]

    @torch.inference_mode()
    def judge_states(self, cache, tokens, layers=None, ancestors=None):
        """`states` of N more tokens behind each sequence of a SlotCache: int64 [B, N].

        ancestors: of each token of a tree, bool [B, N, N], itself included; None for a chain.
        """
        batch, count = tokens.shape
        cache.append(count, tokens.device)
        if ancestors is None and batch == 1:  # transformers' own mask is right, and none for one token
            return self.states(tokens, cache, layers)
        if ancestors is None:
            below = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
            ancestors = below.expand(batch, count, count)
        positions = cache.starts + ancestors.sum(2) - 1  # [B, N]: the root is its own only ancestor
        masks = self._masks(cache.seen(ancestors), positions)
        return self.states(tokens, cache, layers, masks, positions)

    def _masks(self, seen, positions):
        """The decoder's mask, or one a kind of layer, for `seen`, bool [B, N, end], at `positions`, int64 [B,
        N].

        A mask, [B, 1, N, end], is added to the scores, which eager attention and sdpa both do.
        """
        kinds = set(self.target.text.get("layer_types") or ())
        window = self.target.text.get("sliding_window")

        def mask(kept):
            scores = torch.zeros(kept.shape, dtype=self.dtype, device=kept.device)
            return scores.masked_fill_(~kept, torch.finfo(self.dtype).min)[:, None]

        near = seen
        if window:
            # of a tree's own slots the position is at most the place: no window is shorter than a draft
            near = seen & (positions[:, :, None] - torch.arange(seen.shape[2], device=seen.device) < window)
        if not kinds:  # all layers are alike
            return mask(near)
        return {kind: mask(near if kind == "sliding_attention" else seen) for kind in kinds}

    @torch.inference_mode()
    def logits(self, last):
        """The target's own logits, float32 [..., V], of lm_head inputs [..., H]."""
        return process_logits(self.lm_head(last).float(), self.target.logit_softcap, self.target.logit_scale)

    def argmax(self, last):
        """int64 [N]: the target's greedy choice for lm_head inputs [N, H]."""
        return choices(self.target, self.lm_head, last)[0]

    def _own_logits(self, input_ids):
        """float32 [T, V] of int [1, T], by the own forward pass of the whole model, or of the language model
        inside a wrapper whose own pass fails on text alone (Llama 4 in transformers 5.24)."""
        inner = getattr(self.model, "language_model", None) or self.model
        for model in dict.fromkeys((self.model, inner)):
            try:
                return model(input_ids=input_ids, use_cache=False).logits[0].float()
            except (AttributeError, TypeError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0][:200]
        raise UserError(f"{type(self.model).__name__} of transformers {transformers.__version__} fails on 64 "
                        f"tokens of text ({reason}); use --backend sglang")

    @torch.inference_mode()
    def check_logits(self):
        """Refuse a model whose own logits are not those of its last state: `logits` of `states`."""
        input_ids = torch.arange(min(64, self.target.vocab_size), device=self.device)[None]
        own = self._own_logits(input_ids)  # [T, V]
        _, last = self.states(input_ids)
        for layer, state in self.captured.items():
            if state.shape != last.shape:
                raise UserError(f"{type(self.model).__name__}: the state before layer {layer} is of shape "
                                f"{list(state.shape)}, {list(last.shape)} is wanted; a model with several "
                                f"residual streams is not supported")
        gap = (own - self.logits(last)[0]).abs().max().item() / max(own.abs().max().item(), 1e-9)
        if not gap <= 0.02:  # NaN is no small gap
            raise UserError(f"{type(self.model).__name__}: its logits are not lm_head(last state) with the "
                            f"scale and soft cap of its config (they differ by {gap:.1%} of the largest "
                            f"logit); such a model is not supported")


def fast_bfloat16(device):
    """Whether a device has instructions for bfloat16: a CPU without is several times slower in it."""
    return torch.device(device).type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def fp8_kernels():
    """Whether this machine multiplies fp8 weights as they are stored, in transformers."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def dequantised(target, dtype):
    """{name: tensor} of all of a target's weights, those in fp8 or packed integers as `dtype`, bfloat16 for
    auto. Raises UserError for weights that are quantised otherwise."""
    wanted = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    found = {}
    for name in target.weights:
        if name.endswith(("_scale_inv", "_scale", "_shape")):
            continue
        if name.endswith(".weight_packed"):
            found[name.removesuffix("_packed")] = unpacked(target, name.removesuffix("_packed")).to(wanted)
            continue
        tensor = target.tensor(name)
        if tensor.element_size() == 1:
            tensor = plain_weight(target, name)
            if tensor is None:
                raise UserError(f"{target.folder}: how {name} is quantised is not known here; use --backend "
                                f"sglang")
            tensor = tensor.to(wanted)
        found[name] = tensor
    return found


def unpacked(target, name):
    """[O, I] of a weight that compressed-tensors packed: int32 [O, I * bits / 32], the lowest bits first,
    each number 2^(bits-1) more than it is, times scales [O, groups], in whose dtype engines have it, too."""
    packed, scale = target.tensor(f"{name}_packed"), target.tensor(f"{name}_scale")
    _, columns = target.tensor(f"{name}_shape").tolist()
    bits = 32 * packed.shape[1] // columns
    if f"{name}_zero_point" in target.weights or bits not in (4, 8):
        raise UserError(f"{target.folder}: {name} is packed to {bits} bits or has a zero point; 4 or 8 "
                        f"without one are read here; use --backend sglang")
    numbers = (packed[..., None] >> torch.arange(0, 32, bits)) & (2**bits - 1)
    numbers = numbers.flatten(1)[:, :columns] - 2 ** (bits - 1)  # [O, I]
    return numbers.to(scale.dtype) * scale.repeat_interleave(columns // scale.shape[1], 1)


def _load(target, dtype, device, trust_remote_code):
    """The model of transformers on `device`, to which each weight goes as it is read: a second copy of a
    large target has no room in the CPU's memory."""
    transformers.utils.logging.disable_progress_bar()  # of loading weights: seconds, and noise in every log
    config = load_config(target.folder, trust_remote_code)
    native = native_class(config, target.model_class)
    if native is None and not trust_remote_code:
        raise UserError(f"{target.folder}: transformers {transformers.__version__} has no model for its type "
                        f"{config.model_type}; look at the code that comes with it and give "
                        "--trust-remote-code, or use --backend sglang")
    given = {} if native else {"trust_remote_code": True}
    source = target.folder
    scaled = any(name.endswith(".weight_scale_inv") for name in target.weights)
    method = target.quantisation.get("quant_method") or ("fp8" if scaled else None)
    if method == "compressed-tensors" or method == "fp8" and not fp8_kernels():
        # Without kernels transformers takes rows / rows of scales for the height of a block: 576 rows in
        # blocks of 128 would be multiplied by the wrong scales. And to unpack it wants a package, and an
        # ignore list with projector and tower, which Kimi's has not.
        for part in (config, config.get_text_config(decoder=True)):
            part.__dict__.pop("quantization_config", None)
        source, given = None, {**given, "state_dict": dequantised(target, dtype)}
    try:
        model, report = (native or transformers.AutoModelForCausalLM).from_pretrained(
            source, config=config, dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map={"": device}, output_loading_info=True, **given)
    except Exception as error:  # a model's class raises many kinds for values that it does not expect
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        raise UserError(f"{target.folder}: transformers cannot load it ({reason}); get the config that "
                        "belongs to the weights, or use --backend sglang") from None
    missing = report["missing_keys"]
    if missing:
        raise UserError(f"{target.folder} lacks {len(missing)} of the model's tensors ({min(missing)}), "
                        f"which would be random; get the complete weights, or a config that fits them")
    return model
