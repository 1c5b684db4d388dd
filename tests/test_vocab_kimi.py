"""A draft vocabulary of a real one of 163,840 tokens, Kimi K2's, counted on real prompts.

KIMI_DATA names a folder that holds kimi_k2/tiktoken.model, and train_prompts_10k.jsonl with rows of `source`
and `conversations`; without it the test skips.
"""

import base64
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.convert_slow_tokenizer import TikTokenConverter

from common.vocab import coverage, load_map
from tests import tiny
from tests.test_vocab_map import script

FOLDER = Path(os.environ.get("KIMI_DATA", ""))
V = 163_840
SIZES = (8000, 16_000, 32_000, 64_000)
CHINESE = ("huatuo-med-zh", "awesome-chatgpt-prompts-zh", "gaokao-bench")
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
           10: "<|im_system|>", 11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>",
           13: "<|tool_call_begin|>",
           14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 17: "<|im_middle|>", 22: "<think>",
           23: "</think>"}
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER, LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
# as its tokenizer publishes it
SPLIT = "|".join([r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}",
                  rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}",
                  r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


def make_kimi(folder, ranks):
    """A target of that vocabulary and of hidden size 8, as far as its tokenizer and weights are read; returns
    its tokenizer."""
    def load(_):
        lines = [line.split() for line in ranks.read_bytes().splitlines()]
        return {base64.b64decode(token): int(rank) for token, rank in lines}

    special = [SPECIAL.get(n, f"<|reserved_{n}|>") for n in range(256)]
    converter = TikTokenConverter(ranks, SPLIT, extra_special_tokens=special)
    converter.load_tiktoken_bpe = load  # the library's own asks for the package tiktoken
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=converter.converted(),
                                                     eos_token="[EOS]")
    tokenizer.chat_template = ("{% for m in messages %}"
                               "{% if m.role == 'user' %}<|im_user|>{% else %}<|im_assistant|>{% endif %}"
                               "{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}")
    tokenizer.save_pretrained(folder)
    transformers.LlamaConfig(vocab_size=V, hidden_size=8, intermediate_size=16, num_attention_heads=2,
                             num_key_value_heads=1, head_dim=4, num_hidden_layers=8,
                             architectures=["LlamaForCausalLM"], eos_token_id=163_586).save_pretrained(folder)
    save_file({name: torch.zeros(V, 8) for name in ("model.embed_tokens.weight", "lm_head.weight")},
              folder / "model.safetensors")
    return tokenizer


@pytest.mark.slow
def test_coverage_of_a_real_vocabulary(tmp_path):
    if not (FOLDER / "kimi_k2/tiktoken.model").is_file():
        pytest.skip("KIMI_DATA is not set; it names the folder with kimi_k2/tiktoken.model and "
                    "train_prompts_10k.jsonl")
    tokenizer = make_kimi(tmp_path / "target", FOLDER / "kimi_k2/tiktoken.model")
    assert len(tokenizer) == V
    assert tokenizer.decode(tokenizer("Hello 世界, 12345")["input_ids"]) == "Hello 世界, 12345"
    rows = []
    for line in (FOLDER / "train_prompts_10k.jsonl").read_bytes().split(b"\n"):
        if line.strip():
            row = json.loads(line)
            text = "\n".join(turn["content"] for turn in row["conversations"] if turn["role"] == "user")
            rows.append({"text": text, "source": row["source"]})
    for name, kept in (("all", rows), ("others", [row for row in rows if row["source"] not in CHINESE])):
        tiny.write_rows(tmp_path / f"{name}.jsonl", kept)
        code, summaries, stderr = script("--data", tmp_path / f"{name}.jsonl", "--target",
                                         tmp_path / "target", "--draft-vocab",
                                         ",".join(map(str, SIZES)), "--out", tmp_path / name)
        print(stderr)
        assert code == 0
        if name == "all":
            found = summaries
    shares = [summary["coverage_heldout"] for summary in found]
    assert shares == sorted(set(shares)) and 0.93 < shares[2] < found[2]["coverage"]
    assert 0.95 < found[2]["coverage"] < 0.98
    # the ends of sequence, and what the template writes, and tool and think markers
    assert found[0]["vocab_size"] == V
    assert found[0]["forced"] == [163_584 + n for n in SPECIAL if n not in (0, 10)]

    ids = [token for row in rows if row["source"] == CHINESE[0]
           for token in tokenizer(row["text"])["input_ids"][1:]]
    lacking = {size: coverage(np.bincount(ids, minlength=V), load_map(tmp_path / f"others/{size}")[0])
               for size in SIZES}
    known = {size: coverage(np.bincount(ids, minlength=V), load_map(tmp_path / f"all/{size}")[0])
             for size in SIZES}
    print(f"{CHINESE[0]}, {len(ids)} tokens: ranked without Chinese sources {lacking}, with them {known}")
    assert lacking[32_000] < 0.6 < known[32_000]
