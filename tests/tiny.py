"""Tiny random targets with a tokenizer and a chat template, and random drafters for them, made on the
spot.
"""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.drafter import Drafter, drafter_config, save_drafter
from common.target import default_layers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["How many apples does Ann have if she buys 3 and eats 1? She has 3 - 1 = 2 apples.",
        "user assistant system\n",
        "The quick brown fox jumps over the lazy dog, 0123456789 times; then it sleeps."] * 3

KINDS = ("llama", "llama_tied", "qwen3", "gemma2", "gemma3", "mixtral", "llava", "llava_tied", "gpt2")


def save_tokenizer(folder, chat_template=CHAT_TEMPLATE):
    """A byte-level BPE of 320 tokens; returns it, loaded by transformers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320,
                                  special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>",
                                                pad_token="<|endoftext|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast


def make_target(folder, kind="llama", layers=8, seed=0, vocab_size=328, chat_template=CHAT_TEMPLATE,
                sharp=True, head_dim=16):
    """Save a random model of `kind` with a tokenizer into `folder` and return the folder.

    vocab_size is larger than the tokenizer, as padded lm_heads are. `sharp` scales the embedding, so that
    answers are not one token repeated, and the lm_head, so that the greedy choice has a clear margin.
    """
    torch.manual_seed(seed)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shape = dict(vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
                 num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=2,
                 pad_token_id=0)
    tied = kind.endswith("_tied")
    if kind in ("llama", "llama_tied"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, head_dim=head_dim,
                                                                       tie_word_embeddings=tied))
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=32,
                                                                       tie_word_embeddings=False))
    elif kind == "gemma2":
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape, head_dim=16,
                                                                         final_logit_softcapping=5.0))
    elif kind == "gemma3":
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**shape, head_dim=16,
                                                                             sliding_window=8))
    elif kind == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape, num_local_experts=4))
    elif kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=vocab_size, n_embd=64, n_layer=layers, n_head=4, n_positions=512, bos_token_id=0,
                                                                     eos_token_id=2))
    elif kind in ("llava", "llava_tied"):
        text = transformers.LlamaConfig(**shape, tie_word_embeddings=tied)
        vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                               num_attention_heads=2,
                                               image_size=8, patch_size=4)
        config = transformers.LlavaConfig(vision_config=vision, text_config=text,
                                          image_token_index=vocab_size - 1,
                                          tie_word_embeddings=tied)
        model = transformers.LlavaForConditionalGeneration(config)
    else:
        raise ValueError(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.6 / parameter.shape[1] ** 0.5)
            elif "norm" in name and "gemma" in kind:
                parameter.normal_(0, 0.1)
        if sharp:
            tied_here = model.get_input_embeddings().weight is model.get_output_embeddings().weight
            model.get_input_embeddings().weight.mul_(1.0 if tied_here else 10.0)
            model.get_output_embeddings().weight.mul_(4.0 if tied_here else 40.0)
    model.save_pretrained(folder)
    save_tokenizer(folder, chat_template)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [2],
                                                               "pad_token_id": 0}))
    return folder


def write_rows(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversations(count=24, seed=0):
    """Rows of short chats with answers."""
    import random

    random.seed(seed)
    names, things = ["Ann", "Bob", "Cem", "Dan"], ["apples", "dogs", "times", "eggs"]
    rows = []
    for _ in range(count):
        a, b = random.randint(2, 9), random.randint(1, 9)
        rows.append({"messages": [
            {"role": "user", "content": f"How many {random.choice(things)} does {random.choice(names)} have "
                                        f"with {a} and {b}?"},
            {"role": "assistant", "content": f"{a} + {b} = {a + b}. So it is {a + b}."},
        ]})
    return rows


def make_drafter(path, target, size=None, layers=None, seed=1, training=True, **other):
    """A random drafter's folder; of the reduced vocabulary `size` it holds every third id and what is left to
    fill it.
    """
    torch.manual_seed(seed)
    layers, rows = layers or default_layers(target.num_layers), None
    if size:
        order = [*range(0, target.vocab_size, 3), *(i for i in range(target.vocab_size) if i % 3)]
        rows = torch.tensor(sorted(order[:size]))
    config = {**drafter_config(target, size or target.vocab_size, layers), "torch_dtype": "float32", **other}
    if training:
        config["training"] = {"target": target.facts(), "layers": layers}
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0,
                              0.3 if parameter.dim() == 1 else 0.2)
    save_drafter(path, drafter.state_dict(), config, rows)
    return path
