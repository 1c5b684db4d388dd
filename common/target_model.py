"""The target, loaded in transformers: captured states and logits of one forward pass, with or without a KV cache."""

import inspect
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from common.cli import UserError
from common.target import choices, process_logits


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
        if not self.is_initialized:
            self.keys, self.values = (states.new_empty(cache.most, states.shape[1], 0, states.shape[3])
                                      for states in (key_states, value_states))
            self.is_initialized = True
        if (have := self.keys.shape[2]) < cache.end:  # zeros, as a masked slot's weight of 0 must not meet a NaN
            self.keys, self.values = (F.pad(buffer, (0, 0, 0, cache.end * 5 // 4 - have)) for buffer in (self.keys, self.values))
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if cache.copies is not None:
                buffer[cache.part, :, : cache.end], buffer[cache.part, :, cache.end :] = states[cache.copies], 0
            elif len(states) == 1:
                buffer[:1, :, cache.end - states.shape[2] : cache.end] = states
            else:
                buffer[cache.own, :, cache.slots] = states.transpose(1, 2)
        if cache.copies is not None:
            return key_states, value_states
        return self.keys[: len(key_states), :, : cache.end], self.values[: len(key_states), :, : cache.end]


class SlotCache(Cache):
    """A KV cache of up to `most` sequences, each of its own length; what lies behind a sequence's length is overwritten.

    `fill` or `append` say what the next forward pass writes, and set `slots`, int64 [B, T], where in each sequence.
    """

    def __init__(self, layers, most):
        weak = weakref.proxy(self)  # no cycle of references: the memory is free as soon as the cache is done with
        super().__init__(layers=[SlotLayer(weak) for _ in range(layers)])
        self.draft = SlotLayer(weak)  # a drafter's layer: of the same sequences
        self.most, self.lengths = most, []
        self.past = self.end = 0
        self.part = self.copies = self.own = self.slots = None

    def fill(self, part, count, copies):
        """The next pass is over prompts padded on the right to `count` tokens; sequences `part`, a slice, are its rows `copies`."""
        self.part, self.copies = part, copies
        self.past, self.end = 0, count
        self.slots = torch.arange(count, device=copies.device).expand(len(copies), count)

    def append(self, count, device, ahead=0):
        """The next pass appends `count` tokens to every sequence, `ahead` slots behind its length."""
        self.copies, self.past = None, max(self.lengths) + ahead
        self.end = self.past + count
        self.own = torch.arange(len(self.lengths), device=device)[:, None]
        self.slots = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(ahead, ahead + count, device=device)

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
    def states(self, input_ids, cache=None, layers=None, attention_mask=None, position_ids=None):
        """One forward pass over int [B, T]. Returns (aux [B, T, 3H], last [B, T, H], the lm_head's input).

        aux: of all captured layers, or of three of them, None of none. Padding on the right needs no mask: no real token sees it.
        """
        layers = self.layers if layers is None else layers
        self.captured.clear()
        output = self.decoder(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                              use_cache=cache is not None, **{self.cache_argument: cache})
        aux = torch.cat([self.captured[layer] for layer in layers], dim=-1) if layers else None
        return aux, output.last_hidden_state

    @torch.inference_mode()
    def judge_states(self, cache, tokens, layers=None, ancestors=None):
        """`states` of N more tokens behind each sequence of a SlotCache: int64 [B, N].

        ancestors: of each token of a tree, bool [B, N, N], itself included; None for a chain.
        """
        count = tokens.shape[1]
        cache.append(count, tokens.device)
        if ancestors is None:
            if len(tokens) == 1:
                return self.states(tokens, cache, layers)  # transformers' own mask is right, and none for one token
            ancestors = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril().expand(len(tokens), count, count)
        lengths = cache.slots[:, :1]  # [B, 1]
        places = torch.arange(cache.end, device=tokens.device)
        seen = (places < lengths)[:, None].repeat(1, count, 1)  # [B, N, end]
        seen.scatter_(2, cache.slots[:, None].expand_as(ancestors), ancestors)
        positions = lengths + ancestors.sum(2) - 1  # the root is its own only ancestor
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
        return self.states(tokens, cache, layers, mask, positions)

    @torch.inference_mode()
    def logits(self, last):
        """The target's own logits, float32 [..., V], of lm_head inputs [..., H]."""
        return process_logits(self.lm_head(last).float(), self.target.logit_softcap, self.target.logit_scale)

    def argmax(self, last):
        """int64 [N]: the target's greedy choice for lm_head inputs [N, H]."""
        return choices(self.target, self.lm_head, last)[0]

    def check_logits(self):
        """Refuse a model whose own logits are not lm_head(captured last state), scaled and capped as its config says."""
        input_ids = torch.arange(min(64, self.target.vocab_size), device=self.device)[None]
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
    dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        model, report = model_class.from_pretrained(target.folder, config=config, dtype=dtype, output_loading_info=True,
                                                    trust_remote_code=trust_remote_code)
    except (ValueError, OSError, ImportError, AttributeError, RuntimeError) as error:
        raise UserError(f"{target.folder}: transformers cannot load it ({str(error).splitlines()[0][:300]})") from None
    if report["missing_keys"]:
        raise UserError(f"{target.folder} lacks {len(report['missing_keys'])} of the model's tensors ({min(report['missing_keys'])}), "
                        f"which would be random; get the complete weights, or a config that fits them")
    return model
