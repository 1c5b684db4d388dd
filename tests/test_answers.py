"""Answers of the target as history: what an engine's chat endpoint makes of them, and the prompt that
follows."""

import json

import pytest
from tokenizers import AddedToken

from common.conversations import Skip, parse_row
from common.rendering import Renderer
from tests import tiny

# As gpt-oss's: refuses channels in the content, shows reasoning only in the last answer and beside calls.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('a channel in the content') }}{% endif %}"
    "{% if m.tool_calls %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
    "<|end|>{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# As Kimi-K2-Thinking's: reasoning only behind the last answer without calls, an empty block before.
KIMI = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% if loop.index0 <= ns.last %}<think></think>"
    "{% else %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
# As Qwen3's, whose header may open the thinking itself.
QWEN = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content.strip('\n') }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n{\"name\": \"{{ c.function.name }}\", "
    "\"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if opens %}<think>\n{% endif %}{% endif %}"
)
# As Qwen3-Coder's.
CODER = QWEN.replace(
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>")
TOOLS = [{"type": "function", "function": {"name": "eggs", "parameters": {"type": "object", "properties": {
    "n": {"type": "integer"}, "who": {"type": "string"}}}}}]
ASK = {"role": "user", "content": "Eggs?"}
CALL = '<|tool_call_begin|>functions.eggs:7<|tool_call_argument_begin|>{"n":  3}<|tool_call_end|>'
HERMES_CALL = '\n<tool_call>\n{"name": "eggs", "arguments": {"n": 3}}\n</tool_call>'
CODER_CALL = ("\n<tool_call>\n<function=eggs>\n<parameter=n>\n3\n</parameter>\n"
              "<parameter=who>\n3\n</parameter>\n</function>\n</tool_call>")
# template, its arguments, tools, what the target wrote, how it stands in the next prompt
ANSWERS = {
    "harmony": (HARMONY, {}, None, "<|channel|>analysis<|message|>Hens.<|end|><|start|>assistant"
                "<|channel|>final<|message|>Two.",
                "<|start|>assistant<|channel|>final<|message|>Two.<|end|>"),
    "harmony, call": (HARMONY, {}, TOOLS, "<|channel|>analysis<|message|>Hens.<|end|><|start|>assistant"
                      "<|channel|>commentary to=functions.eggs <|constrain|>json<|message|>{\"n\":3}",
                      "<|start|>assistant<|channel|>analysis<|message|>Hens.<|end|><|start|>assistant "
                      "to=functions.eggs<|channel|>commentary json<|message|>{\"n\": 3}<|call|>"),
    "harmony, cut": (HARMONY, {}, None, "<|channel|>analysis<|message|>Hens la",
                     "<|start|>assistant<|channel|>final<|message|><|end|>"),
    "kimi": (KIMI, {}, None, "<think>Hens.</think>Two.", "<|im_assistant|><think></think>Two.<|im_end|>"),
    "kimi, call": (KIMI, {}, TOOLS, f"<think>Hens.</think>So:<|tool_calls_section_begin|>{CALL}"
                   "<|tool_calls_section_end|>",
                   "<|im_assistant|><think>Hens.</think>So:<|tool_calls_section_begin|>"
                   "<|tool_call_begin|>functions.eggs:0<|tool_call_argument_begin|>{\"n\": 3}"
                   "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"),
    "qwen": (QWEN, {}, None, "<think>\nHens.\n</think>\n\nTwo.", "<|im_start|>assistant\nTwo.<|im_end|>\n"),
    "qwen, opened": (QWEN, {"opens": True}, None, "Hens.\n</think>\n\nTwo.",
                     "<|im_start|>assistant\nTwo.<|im_end|>\n"),
    "qwen, cut": (QWEN, {"opens": True}, None, "Hens la", "<|im_start|>assistant\n<|im_end|>\n"),
    "qwen, no thought": (QWEN, {}, None, "Two.", "<|im_start|>assistant\nTwo.<|im_end|>\n"),
    "qwen, call": (QWEN, {}, TOOLS, f"<think>\nHens.\n</think>\n\nSo:{HERMES_CALL}",
                   f"<|im_start|>assistant\nSo:{HERMES_CALL}<|im_end|>\n"),
    "qwen, tool unknown": (QWEN, {}, TOOLS, "So:" + HERMES_CALL.replace("eggs", "hens"),
                           "<|im_start|>assistant\nSo:<|im_end|>\n"),
    "qwen, no JSON": (QWEN, {}, TOOLS, "So:\n<tool_call>\n{eggs\n</tool_call>",
                      "<|im_start|>assistant\nSo:\n<tool_call>\n{eggs\n</tool_call><|im_end|>\n"),
    "qwen, no tools": (QWEN, {}, None, f"So:{HERMES_CALL}",
                       f"<|im_start|>assistant\nSo:{HERMES_CALL}<|im_end|>\n"),
    "coder, call": (CODER, {}, TOOLS, f"So:{CODER_CALL}",
                    f"<|im_start|>assistant\nSo:{CODER_CALL}<|im_end|>\n"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Some of the marks are special tokens, as those of harmony and Kimi are."""
    tokenizer = tiny.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in (
        "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>")])
    tokenizer.add_tokens(["<think>", "</think>", "[TOOL_CALLS]"])
    return tokenizer


def renderer_of(tokenizer, template, kwargs=None):
    tokenizer.chat_template = template
    return Renderer(tokenizer, kwargs or {}, [tokenizer.eos_token_id])


@pytest.mark.parametrize("case", ANSWERS)
def test_the_next_prompt_holds_an_answer_as_engines_give_it_back(tokenizer, case):
    template, kwargs, tools, wrote, shown = ANSWERS[case]
    renderer = renderer_of(tokenizer, template, kwargs)
    message = renderer.message([*renderer.ids(wrote), tokenizer.eos_token_id], [ASK], tools)
    text = renderer.prompt([ASK, message, {"role": "user", "content": "And hens?"}], tools)
    before = renderer.render([ASK], tools)
    assert text.startswith(before + shown) and text[len(before + shown) :].count("And hens?") == 1
    assert "Eggs?" not in text[len(before) :]


def test_calls_that_no_endpoint_takes_or_nothing_here_reads_end_a_conversation(tokenizer):
    renderer = renderer_of(tokenizer, QWEN)
    with pytest.raises(Skip, match="arguments of eggs"):
        wrote = renderer.ids('<tool_call>{"name": "eggs", "arguments": [3]}</tool_call>')
        renderer.message(wrote, [ASK], TOOLS)
    # by a token of its own, and by what the template writes before a name
    other = QWEN.replace('{\"name\": \"{{', "<invoke name={{")
    for template, text in ((tiny.CHAT_TEMPLATE, '[TOOL_CALLS][{"name": "eggs"}]'),
                           (other, "So: <tool_call>\n<invoke name=eggs")):
        renderer = renderer_of(tokenizer, template)
        with pytest.raises(Skip) as skip:
            renderer.message(renderer.ids(text), [ASK], TOOLS)
        assert skip.value.reason == "tool call in a form that is not known"
        assert renderer.message(renderer.ids(text), [ASK])["content"] == text
        assert renderer.message(renderer.ids("Two."), [ASK], TOOLS)["content"] == "Two."


def test_special_tokens_in_an_answer_are_no_text(tokenizer):
    renderer = renderer_of(tokenizer, tiny.CHAT_TEMPLATE)
    assert renderer.message(renderer.ids("Two<|im_start|> hens.<|im_end|>"), [ASK])["content"] == "Two hens."


def test_a_call_that_no_plain_answer_can_replace_is_supervised(tokenizer):
    """gpt-oss's template shows the reasoning beside a call only while no final answer follows, and refuses a
    tool's result behind a plain answer."""
    template = HARMONY.replace("{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
                               "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to=",
                               "{% if m.thinking and messages[-1].tool_calls %}<|start|>assistant<|channel|>"
                               "analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to=")
    template = template.replace("{% else %}<|start|>{{ m.role }}", (
        "{% else %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}<|start|>{{ m.role }}"))
    call = {"function": {"name": "eggs", "arguments": {"n": 3}}}
    chat = [ASK, {"role": "assistant", "content": None, "reasoning": "Hens.", "tool_calls": [call]},
            {"role": "tool", "content": "4"}, {"role": "assistant", "content": "Two."}]
    ids, mask, dropped = renderer_of(tokenizer, template).encode(parse_row({"messages": chat})["messages"])
    assert tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on]) == (
        " to=functions.eggs<|channel|>commentary json<|message|>{\"n\": 3}<|call|>"
        "<|channel|>final<|message|>Two.<|return|>")
    assert dropped == {"reasoning_content": 1}


def test_the_result_of_a_tool_is_not_part_of_the_call(tokenizer):
    """Where the template shows it in another way behind a plain answer, as DeepSeek-V3.2's."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>"
        "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].tool_calls %}"
        "<result>{{ m.content }}</result>{% else %}{{ m.content }}"
        "{% endif %}<|im_end|>{% else %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}")
    call = {"function": {"name": "eggs", "arguments": {}}}
    chat = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "Two."}]
    ids, mask, _ = renderer_of(tokenizer, template).encode(parse_row({"messages": chat})["messages"])
    assert tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on]) == (
        "<call>eggs</call><|im_end|>Two.<|im_end|>")


def test_an_answer_of_harmony_is_supervised_with_its_channels(tokenizer):
    renderer = renderer_of(tokenizer, HARMONY)
    row = {"messages": [ASK, {"role": "assistant", "content": "Two.", "thinking": "Hens."}]}
    ids, mask, dropped = renderer.encode(parse_row(row)["messages"])
    assert tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on]) == (
        "<|channel|>analysis<|message|>Hens.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Two.<|return|>")
    assert not dropped


def test_a_real_tool_call_stays_as_it_was_written(tokenizer):
    """A row's call and the same call written by the target stand alike in the history."""
    renderer = renderer_of(tokenizer, QWEN)
    given = {"role": "assistant", "content": "So:", "tool_calls": [
        {"function": {"name": "eggs", "arguments": json.dumps({"n": 3})}}]}
    row = parse_row({"messages": [ASK, given], "tools": TOOLS})
    written = renderer.message(renderer.ids(f"So:{HERMES_CALL}<|im_end|>"), [ASK], TOOLS)
    assert renderer.prompt(row["messages"], row["tools"]) == renderer.prompt([ASK, written], TOOLS)
