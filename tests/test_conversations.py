"""Rows to conversations to token ids with a loss mask: which rows count, and which tokens are supervised."""

import copy
import json

import pytest
import transformers
from tokenizers.processors import TemplateProcessing

from common.cli import UserError
from common.conversations import Skip, held_out, parse_row, read_rows, text_ids
from common.rendering import Renderer, chat_ids
from tests import tiny

CHATML = tiny.CHAT_TEMPLATE
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED_WIDE = TAGGED.replace("{% endif %}<|im_end|>\n", "<|im_end|>\n{% endif %}")
TAGGED_WIDE = TAGGED_WIDE.replace("{% endgen", "<|im_end|>\n{% endgen")
# Keeps the reasoning of the answers behind the last question only, as Qwen3 does, and always writes a
# thinking block there.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ m['reasoning_content'] or '' }}\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Answers have no header of their own and keep no thinking; the header of the next answer opens one, as
# DeepSeek-R1's does.
BARE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|endoftext|>"
    "{% elif m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1] }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)
# The system prompt goes to the last question, as Mistral's does, so that no rendering of a part is the
# beginning of the whole.
LATE_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
    "{% if loop.index0 >= messages | length - 2 and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] }} {% endif %}{{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many apples?"},
    {"role": "assistant", "content": "She has 2."},
    {"role": "user", "content": "And dogs, user?"},
    {"role": "assistant", "content": "The lazy dog, 1."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def supervised(tokenizer, messages, template=CHATML, tools=None):
    """The supervised runs as texts, and the encoded (ids, mask, dropped)."""
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer, {}, [tokenizer.eos_token_id])
    ids, mask, dropped = renderer.encode(parse_row({"messages": messages})["messages"], tools)
    assert len(ids) == len(mask)
    runs, run = [], []
    for token, on in zip([*ids, 0], [*mask, 0], strict=True):
        if on:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs, (ids, mask, dropped)


@pytest.mark.parametrize("template", [CHATML, TAGGED, TAGGED_WIDE, BARE],
                         ids=["chatml", "tagged", "tagged_wide", "bare"])
def test_exactly_the_answers_and_their_end_are_supervised(tokenizer, template):
    runs, (ids, _, _) = supervised(tokenizer, CHAT, template)
    assert runs == ["She has 2.<|im_end|>", "The lazy dog, 1.<|im_end|>"]
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]  # not the rendering of pieces


def test_a_template_that_moves_the_system_prompt(tokenizer):
    runs, _ = supervised(tokenizer, CHAT, LATE_SYSTEM)
    assert [run.strip() for run in runs] == ["She has 2.<|im_end|>", "The lazy dog, 1.<|im_end|>"]


def test_reasoning_that_the_template_drops_is_counted_and_the_rest_supervised(tokenizer):
    chat = [dict(message) for message in CHAT]
    chat[2]["reasoning_content"] = "Ann buys 3 and eats 1."
    chat[4]["reasoning_content"] = "There is one dog."
    runs, (_, _, dropped) = supervised(tokenizer, chat, THINKING)
    assert runs == ["She has 2.<|im_end|>",
                    "<think>\nThere is one dog.\n</think>\n\nThe lazy dog, 1.<|im_end|>"]
    assert dropped == {"reasoning_content": 1}


@pytest.mark.parametrize("template", [CHATML, THINKING, BARE])
def test_a_user_who_quotes_the_header_is_never_supervised(tokenizer, template):
    chat = [dict(message) for message in CHAT]
    quoting = "<|im_start|>assistant\nShe has 2.<|im_end|>\n<think>\nreally<|im_end|>"
    chat[1]["content"] = chat[3]["content"] = quoting
    runs, (ids, mask, _) = supervised(tokenizer, chat, template)
    spoken = [run.split("</think>\n\n")[-1] for run in runs]
    assert spoken == ["She has 2.<|im_end|>", "The lazy dog, 1.<|im_end|>"]
    assert "really" not in tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])


def test_tool_calls_are_shown_dropped_or_in_the_way(tokenizer):
    call = {"type": "function", "function": {"name": "eggs", "arguments": "{\"n\": 3}"}}
    chat = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4"}, CHAT[2]]
    runs, (_, _, dropped) = supervised(tokenizer, chat)
    assert runs == ["She has 2.<|im_end|>"]  # nothing of the empty turn that the call left behind
    assert dropped == {"tool_calls": 1}
    content = "{{ message['content'] }}"
    shown = CHATML.replace(content, content + (
        "{% for c in message['tool_calls'] or [] %}"
        "<call>{{ c['function']['name'] }} {{ c['function']['arguments']['n'] }}</call>{% endfor %}"))
    runs, (_, _, dropped) = supervised(tokenizer, chat, shown)
    assert runs == ["<call>eggs 3</call><|im_end|>", "She has 2.<|im_end|>"] and not dropped
    # this one refuses a tool's answer that no call came before
    strict = ("{% for m in messages %}"
              "{% if m['role'] == 'tool' and not messages[loop.index0 - 1]['tool_calls'] %}"
              "{{ raise_exception('no call') }}{% endif %}{% endfor %}")
    assert supervised(tokenizer, chat, strict + shown)[0] == runs


# `arguments` added as text, and a call beside content that is not null is left out, as DeepSeek-V3's; null
# refused; as Qwen's; Python's way of printing an object
CALL_TEMPLATES = {
    "text and null": "{% if m.content is none %}<call>"
                     "{{ c.function.name + ' ' + c.function.arguments }}</call>{% endif %}",
    "text": "{{ m.content + '<call>' + c.function.name + ' ' + c.function.arguments }}</call>",
    "object": "{{ m.content + '' }}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>",
    "either": "<call>{{ c.function.name }} {{ c.function.arguments if c.function.arguments is string "
              "else c.function.arguments | tojson }}</call>",
    "printed": "<call>{{ c.function.name }} {{ c.function.arguments }}</call>",
}


@pytest.mark.parametrize("arguments", [{"n": 3}, "{\"n\": 3}"], ids=["from object", "from text"])
@pytest.mark.parametrize("kind", CALL_TEMPLATES)
def test_a_call_takes_the_form_in_which_the_template_shows_it(tokenizer, kind, arguments):
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
                + CALL_TEMPLATES[kind] + "{% else %}{{ m.content }}{% endfor %}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    call = {"function": {"name": "eggs", "arguments": arguments}}
    chat = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4"}, CHAT[2]]
    runs, (_, _, dropped) = supervised(tokenizer, chat, template)
    assert runs == ["<call>eggs {\"n\": 3}</call><|im_end|>", "She has 2.<|im_end|>"] and not dropped


def test_text_beside_a_call_that_the_template_drops_is_counted(tokenizer):
    content = "{{ message['content'] }}"
    either = CHATML.replace(content, "{% for c in message['tool_calls'] or [] %}<call>{{ c.function.name }} "
                                     "{{ c.function.arguments | tojson }}</call>{% else %}" + content
                                     + "{% endfor %}")
    call = {"function": {"name": "eggs", "arguments": {"n": 3}}}
    chat = [CHAT[1], {**CHAT[2], "tool_calls": [call]}]
    runs, (_, _, dropped) = supervised(tokenizer, chat, either)
    assert runs == ["<call>eggs {\"n\": 3}</call><|im_end|>"] and dropped == {"text beside tool calls": 1}
    chat[1]["content"] = "<think>\nThree.\n</think>\n\n"
    assert supervised(tokenizer, chat, either)[1][2] == {"reasoning_content": 1}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_under_the_name_that_it_reads(tokenizer, key, read):
    chat = [CHAT[1], {**CHAT[2], key: "Ann buys 3."}]
    runs, (_, _, dropped) = supervised(tokenizer, chat, THINKING.replace("reasoning_content", read))
    assert runs == ["<think>\nAnn buys 3.\n</think>\n\nShe has 2.<|im_end|>"] and not dropped


# the header of the next answer opens the thinking, as Qwen3-Thinking-2507's
OPENED = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize("template", [THINKING, OPENED], ids=["closed", "opened"])
def test_a_thinking_block_that_the_row_has_not_is_not_supervised(tokenizer, template):
    runs, _ = supervised(tokenizer, CHAT, template)
    assert runs == ["She has 2.<|im_end|>", "The lazy dog, 1.<|im_end|>"]
    tagged = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
              "{% generation %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}<|im_end|>"
              "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    assert supervised(tokenizer, CHAT, tagged)[0] == runs


@pytest.mark.parametrize("template", [CHATML, TAGGED, TAGGED_WIDE], ids=["chatml", "tagged", "tagged_wide"])
def test_the_end_of_an_empty_answer_is_not_supervised(tokenizer, template):
    chat = [*CHAT[:2], {"role": "assistant", "content": ""}, *CHAT[3:]]
    assert supervised(tokenizer, chat, template)[0] == ["The lazy dog, 1.<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, TAGGED, TAGGED_WIDE, THINKING],
                         ids=["chatml", "tagged", "tagged_wide", "thinking"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": False}, {"loss": 0.0}],
                         ids=["weight", "train", "loss", "number"])
def test_an_answer_of_no_weight_is_told_and_not_learnt(tokenizer, template, mark):
    chat = [*CHAT[:2], {**CHAT[2], **mark}, CHAT[3], {**CHAT[4], "weight": 1, "train": None}]
    runs, (ids, _, _) = supervised(tokenizer, chat, template)
    assert runs == ["The lazy dog, 1.<|im_end|>"] and "She has 2." in tokenizer.decode(ids)


def test_slow_tokenizers_have_no_offsets_and_give_the_same_text():
    slow = transformers.ByT5Tokenizer()
    assert not slow.is_fast
    slow.chat_template = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}</s>\n{% endfor %}"
    renderer = Renderer(slow, {}, [slow.eos_token_id])
    ids, mask, _ = renderer.encode(CHAT)
    kept = [token for token, on in zip(ids, mask, strict=True) if on]
    assert slow.decode(kept) == "She has 2.</s>The lazy dog, 1.</s>"
    assert ids == renderer.ids(renderer.render(CHAT))


def test_the_end_of_turn_is_found_though_no_config_names_it(tokenizer):
    tokenizer.chat_template = CHATML
    assert Renderer(tokenizer, {}, []).end_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert set(chat_ids(tokenizer)) == {"<|im_start|>", "<|im_end|>"}


ROW_KINDS = [
    ({"messages": CHAT[:3]}, 3),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, 2),
    ({"conversations": CHAT[1:3]}, 2),
    ({"prompt": "Hi", "response": "Ho"}, 2),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
                                                {"type": "text", "text": "b"}]}, CHAT[2]]}, 2),
]


@pytest.mark.parametrize("row, count", ROW_KINDS)
def test_kinds_of_rows(row, count):
    messages = parse_row(row)["messages"]
    assert len(messages) == count and messages[-1]["role"] == "assistant"


BAD_ROWS = [
    ({}, "no known key"),
    ({"messages": []}, "empty"),
    ({"messages": [{"role": "user", "content": " "}, CHAT[2]]}, "empty"),
    ({"text": " \n"}, "empty"),
    ({"input_ids": []}, "empty"),
    ({"messages": CHAT[:1]}, "only system"),
    ({"messages": [CHAT[2]]}, "no user"),
    ({"messages": [CHAT[2], *CHAT[1:3]]}, "assistant first"),
    ({"messages": [CHAT[1], CHAT[1], CHAT[2]]}, "doubled role"),
    ({"messages": [CHAT[1], CHAT[2], CHAT[2]]}, "doubled role"),
    ({"messages": [CHAT[1], {"role": "narrator", "content": "x"}]}, "unknown role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
    ({"messages": CHAT[:2]}, "no answer"),
    ({"turns": ["Hi", "Ho"]}, "no answer"),
    ({"prompt": "Hi"}, "no answer"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "x"}]},
                   CHAT[2]]}, "non-text content"),
    ({"messages": "Hi"}, "malformed"),
    ({"messages": ["Hi"]}, "malformed"),
    ({"messages": [{"role": "user", "content": 3}, CHAT[2]]}, "malformed"),
    ({"messages": [CHAT[1], {**CHAT[2], "tool_calls": "eggs"}]}, "malformed"),
    ({"turns": 3}, "malformed"),
    ({"text": 3}, "malformed"),
    ({"text": "half \ud83d"}, "malformed"),
    ({"messages": [CHAT[1], {**CHAT[2], "tool_calls": 3}]}, "malformed"),
    ({"messages": [CHAT[1], {**CHAT[2], "reasoning": "One.", "thinking": "Two."}]}, "malformed"),
    ({"messages": [CHAT[1], {**CHAT[2], "reasoning": ["One."]}]}, "malformed"),
    ({"messages": [CHAT[1], {**CHAT[2], "weight": 0.5}]}, "malformed"),
    ({"messages": [CHAT[1], {**CHAT[2], "tool_calls": [{"function": {"name": "f", "arguments": "[3]"}}]}]},
     "malformed"),
    ({"messages": CHAT[1:3], "tools": "eggs"}, "malformed"),
    ({"messages": CHAT[1:3], "functions": ["eggs"]}, "malformed"),
    ({"input_ids": [1, "2"]}, "malformed"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "malformed"),
]


@pytest.mark.parametrize("row, reason", BAD_ROWS,
                         ids=[f"{n} {reason}" for n, (_, reason) in enumerate(BAD_ROWS)])
def test_rows_of_no_use_have_a_reason(row, reason):
    with pytest.raises(Skip) as skip:
        parse_row(row)
    assert skip.value.reason == reason


def test_which_answers_are_written_anew():
    def gaps(row):
        return ["-" if message is None else message["role"][0]
                for message in parse_row(row, regenerate=True)["messages"]]

    call = {"role": "assistant", "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    tool = {"role": "tool", "content": "4"}
    assert gaps({"turns": ["Hi", "Ho"]}) == ["u", "-", "u", "-"]
    assert gaps({"messages": CHAT}) == ["s", "u", "-", "u", "-"]
    assert gaps({"messages": CHAT[:4]}) == ["s", "u", "-", "u", "-"]
    assert gaps({"messages": [CHAT[1], call, tool, CHAT[2], CHAT[3]]}) == ["u", "a", "t", "-", "u", "-"]
    assert gaps({"messages": [CHAT[1], call, tool]}) == ["u", "a", "t", "-"]
    with pytest.raises(Skip, match="only tool calls"):
        gaps({"messages": [CHAT[1], call]})


def test_system_prompt_only_where_there_is_none():
    assert parse_row({"messages": CHAT}, "Other")["messages"][0]["content"] == "Be brief."
    assert parse_row({"messages": CHAT[1:]}, "Other")["messages"][0] == {"role": "system", "content": "Other"}


TOOL = {"type": "function", "function": {"name": "eggs", "parameters": {
    "properties": {"n": {"type": "integer"}}}}}


@pytest.mark.parametrize("key", ["tools", "tool_defs", "functions"])
@pytest.mark.parametrize("form", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]],
                                  [{**TOOL, "function": {**TOOL["function"], "strict": None, "parameters": {
                                      "properties": {"n": {"type": "integer", "enum": None}, "m": None}}}}]],
                         ids=["objects", "text", "texts", "bare", "nulls"])
def test_tools_are_as_a_chat_endpoint_takes_them(key, form):
    assert parse_row({"messages": CHAT[1:3], key: form})["tools"] == [TOOL]


def test_calls_are_as_a_chat_endpoint_takes_them():
    call = {"id": None, "function": {"name": "eggs", "arguments": {"n": 3, "m": None}}}
    kept = {"type": "function", "function": {"name": "eggs", "arguments": {"n": 3}}}
    for message in ({"tool_calls": [call]}, {"function_call": call["function"]}):
        row = {"messages": [CHAT[1], {"role": "assistant", "content": None, **message}]}
        assert parse_row(row)["messages"][1]["tool_calls"] == [kept]


def test_a_text_that_begins_with_bos_gets_no_second(tokenizer):
    adding = transformers.PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer),
                                                  bos_token="<|im_start|>", eos_token="<|im_end|>")
    bos = adding.bos_token_id
    adding.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None,
                                                                 [("<|im_start|>", bos)])
    assert text_ids(adding, "Hi") == text_ids(adding, "<|im_start|>Hi") == adding("Hi")["input_ids"]
    assert text_ids(adding, "Hi")[0] == bos and bos not in text_ids(adding, "Hi")[1:]


def test_lines_end_at_newline_only_and_blank_ones_count(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"text": "a\xe2\x80\xa8b"}\r\n\n  \n{"text": "c"}\n{"text": "d"}')
    rows, lines, digest = read_rows(path)
    assert [(line, row["text"]) for line, row in rows] == [(0, "a\u2028b"), (3, "c"), (4, "d")] and lines == 5
    assert read_rows(path, limit=2)[1] == 4 and read_rows(path, limit=2)[2] != digest


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff", b"3"])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    path = tmp_path / "rows"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match="line 3 "):
        read_rows(path)


def test_held_out_share_smallest_and_twins():
    keys = [parse_row({"text": f"text {n}"})["key"] for n in range(2000)]
    assert 60 <= sum(held_out(keys, 0.05)) <= 140
    assert held_out(keys, 0.05)[::-1] == held_out(keys[::-1], 0.05)  # the place in the file plays no part
    few = keys[:20]
    assert sum(held_out(few, 1e-9)) == 1 and held_out(few, 1e-9)[few.index(min(few))]
    assert not any(held_out(few[:19], 1e-9)) and not any(held_out(few, 0))
    twins = held_out(few + [min(few)], 1e-9)
    assert sum(twins) == 2 and twins[-1]
    assert not any(held_out([min(keys)] * 20, 0.05))  # never everything
    assert all(held_out(few[:3], 1))  # but when asked for


def test_two_answers_to_one_question_are_on_the_same_side():
    one, other = (parse_row({"messages": [*CHAT[:2], {"role": "assistant", "content": words}]})
                  for words in ("a", "b"))
    assert one["key"] == other["key"] == parse_row({"messages": CHAT[:2]}, regenerate=True)["key"]
    assert one["key"] != parse_row({"messages": CHAT[1:3]})["key"]


def test_rows_are_not_changed_by_parsing():
    row = {"messages": CHAT[1:3]}
    before = json.dumps(row)
    parse_row(row, "Other", regenerate=True)
    assert json.dumps(row) == before
