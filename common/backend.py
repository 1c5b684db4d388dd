"""What runs the target of an extraction: transformers here, or SGLang (common/capture.py), which has the same methods."""

import torch
from torch.nn.utils.rnn import pad_sequence

from common.capture import SGLang
from common.decode import decode
from common.sampling import random_numbers
from common.target_model import TargetModel


class Transformers:
    """The target in transformers; a context manager.

    Its answers, its states and its lm_head, a function of [n, H] to [n, V], are all that an extraction needs. `dtype` is that of the
    states, `device` where they lie.
    """

    def __init__(self, target, layers, dtype, most, batch_tokens, device=None, trust_remote_code=False):
        """most: answers written at once. batch_tokens: of their prompts' forward passes."""
        self.model = TargetModel(target, layers, dtype, device, trust_remote_code)
        self.model.check_logits()
        self.target = target
        self.dtype, self.device, self.lm_head = self.model.dtype, self.model.device, self.model.lm_head
        self.most, self.batch_tokens = most, batch_tokens

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def answer(self, prompts, limits, sampling, seeds, report=lambda ids: None):
        """The target's answers to prompts: lists of ids, the end token included, each cut at its limit. The random numbers of each
        depend on its seed alone. report(ids) is called with each answer as it ends."""
        drawn = [random_numbers(seed, [], limit) for seed, limit in zip(seeds, limits, strict=True)]
        group = decode(self.model, prompts, limits, set(sampling["stop_ids"]), sampling=sampling, most=self.most,
                       numbers=lambda n, first, count: drawn[n][first : first + count], prefill_tokens=self.batch_tokens, report=report)
        return [answer.ids for answer in group.answers]

    def states(self, samples):
        """[(aux [T, 3H], last [T, H])] of id lists, in one forward pass, padded on the right."""
        ids = pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True).to(self.device)  # [B, T]
        aux, last = self.model.states(ids)  # [B, T, 3H], [B, T, H]
        return [(aux[n, : len(sample)], last[n, : len(sample)]) for n, sample in enumerate(samples)]


def open_backend(args, target, layers, max_length, device=None):
    """What args.backend names, ready to run. Raises UserError when it cannot."""
    if args.backend == "hf":
        return Transformers(target, layers, args.dtype, args.generate_rows, args.max_batch_tokens, device, args.trust_remote_code)
    return SGLang(target, layers, args.dtype, max_length, args.server_url, args.states_folder, args.server_arguments,
                  args.trust_remote_code)
