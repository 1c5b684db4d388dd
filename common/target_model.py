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

    def truncate(self, length):
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def select(self, rows, first=0):
        """Keep only the batch rows `rows` and the positions from `first` on."""
        self.keys, self.values = self.keys[rows, :, first:], self.values[rows, :, first:]
        self.key_buffer, self.value_buffer = self.keys, self.values


class GrowingCache(Cache):
    """KV cache of a decoder for `forward(cache=...)`: grows in place, can be cut back and thinned out."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def truncate(self, length):
        for layer in self.layers:
            layer.truncate(length)

    def select(self, rows, first=0):
        for layer in self.layers:
            layer.select(rows, first)


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
        aux = torch.cat([self.captured[layer] for layer in self.layers], dim=-1)
        return aux, output.last_hidden_state

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
