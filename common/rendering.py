"""Conversations to text by the target's chat template, and to token ids with a loss mask on what the
assistant wrote."""

import json
import os
import re
from collections import Counter
from functools import cached_property

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from common.answers import THINKING, marks_of, parse_answer
from common.conversations import REASONING, Skip

# Stand in for an answer to see what a template writes around it: different first and last characters, nothing
# to trim or parse.
STAND_INS = ("Alpha stand-in one", "Beta stand-in two")
# what templates raise for rows that they cannot take
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
# how a template may want a call: its arguments as an object or as JSON text, the content beside it "" or
# null. The first is what engines give; the others are for templates that refuse or hide such calls.
CALL_FORMS = ((False, ""), (False, None), (True, ""), (True, None))
CALL_TOKEN = re.compile("tool|function|python", re.IGNORECASE)  # tokens that stand around calls
LEARNT, LEFT_OUT = 1, 2  # kinds of spans of a rendering that stand for an answer
# a thinking block without a thought, also one that the header opened
EMPTY_THINKING = re.compile(r"\s*(?:" + "|".join(f"(?:{re.escape(opened)})?\\s*{re.escape(closed)}"
                                                for opened, closed in THINKING) + r")\s*")
EMPTY_THINKING_LAST = re.compile(EMPTY_THINKING.pattern + "$")


class Renderer:
    """A tokenizer's chat template with fixed arguments, and the ids at which a turn ends."""

    def __init__(self, tokenizer, template_kwargs, eos_ids):
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs
        self.eos_ids, self.end_ids = set(eos_ids), set(eos_ids)
        self.spaces = {}  # {token: whether it is white space}
        self.reasoning_key = self._reasoning_key()
        try:
            tail = self.render([{"role": "user", "content": "Hi"}, _answer(STAND_INS[0])])
        except Skip:
            return
        # what the template writes behind an answer
        first = self.ids(tail.rpartition(STAND_INS[0])[2].lstrip())[:1]
        self.end_ids.update(set(first) & set(tokenizer.get_added_vocab().values()))

    def render(self, messages, tools=None, answer_next=False):
        """The text of a conversation, with the header of the next answer if `answer_next`. Raises Skip where
        the template refuses."""
        try:
            if _has_null(messages):  # apply_chat_template takes null for no content at all
                settings = {**self.tokenizer.special_tokens_map, **self.template_kwargs}
                texts, _ = render_jinja_template(
                    [messages], tools=tools, chat_template=self.tokenizer.get_chat_template(None, tools),
                    add_generation_prompt=answer_next, **settings)
                return texts[0]
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                                      add_generation_prompt=answer_next,
                                                      **self.template_kwargs)
        except REFUSALS as error:
            told = f"{type(error).__name__}: {str(error)[:200]}"
            raise Skip("refused by the chat template", told) from None

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt(self, messages, tools=None):
        """The text that ends with the header of the next answer."""
        return self.render(self.served(messages, tools), tools, answer_next=True)

    def prompt_ids(self, messages, tools=None):
        return self.ids(self.prompt(messages, tools))

    def _reasoning_key(self):
        """The name under which the template reads reasoning; the first where it reads none."""
        call = {**_answer(""), "tool_calls": [_stand_in_call(0)]}
        for key in REASONING:
            for answer in (_answer(STAND_INS[0]), call):  # some show it beside calls only
                try:
                    text = self.render([{"role": "user", "content": "Hi"}, {**answer, key: STAND_INS[1]}])
                except Skip:
                    continue
                if STAND_INS[1] in text:
                    return key
        return REASONING[0]

    def served(self, messages, tools=None):
        """The messages in the form in which the template shows their reasoning and calls: that of CALL_FORMS
        with the most calls in the rendering, the first of several."""
        messages = [{self.reasoning_key if key == REASONING[0] else key: value
                     for key, value in message.items()} for message in messages]
        if not any(message.get("tool_calls") for message in messages):
            return messages
        stood_in, count = [], 0
        for message in messages:
            calls = message.get("tool_calls", [])
            if calls:
                calls = [{**call, "function": _stand_in_call(count + n)["function"]}
                         for n, call in enumerate(calls)]
                message = {**message, "tool_calls": calls}
            count += len(calls)
            stood_in.append(message)
        best, most = CALL_FORMS[0], -1
        for form in CALL_FORMS:
            try:
                text = self.render([_in_form(message, *form) for message in stood_in], tools)
            except Skip:
                continue
            shown = sum(_shows(text, _stand_in_call(n)["function"]) for n in range(count))
            if shown > most:
                best, most = form, shown
            if shown == count:
                break
        return [_in_form(message, *best) for message in messages]

    @cached_property
    def _calls_are_read(self):
        """(whether a call as the template writes it is read back, what it writes before the name, or the name
        of a stand-in where that cannot be told)."""
        call, told = _stand_in_call(0), [{"role": "user", "content": "Hi"}]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        kinds = {key: {"type": "string", "description": "Stand-in"} for key in arguments}
        tools = [{"type": "function", "function": {
            "name": name, "description": "Stand-in", "parameters": {"type": "object", "properties": kinds}}}]
        template = self.tokenizer.get_chat_template(None, tools)
        _, thinking, _ = marks_of(template)
        try:
            before = self.prompt(told, tools)
            text = self.render(self.served([*told, {**_answer(""), "tool_calls": [call]}], tools), tools)
            shared = _common(text, before)
            text = re.search("<[^>]*$|$", text[:shared])[0] + text[shared:]  # never a part of a mark
            opened = bool(thinking) and before.rstrip().endswith(thinking[0])
            read = parse_answer(text, template, tools, opened)[2] == [(name, arguments)]
        except Skip:
            read, text = False, ""
        start = text.partition(name)[0] if name in text else ""
        return read, (start.rpartition(thinking[1])[2] if thinking else start).strip() or name

    def message(self, ids, told, tools=None):
        """The assistant's message that an engine makes of an answer's ids to the messages `told`. Raises Skip
        for a call that cannot be told."""
        template = self.tokenizer.get_chat_template(None, tools)
        _, thinking, marks = marks_of(template)
        ids = ids[:-1] if ids[-1] in self.eos_ids else ids
        whole = self.tokenizer.decode(ids)
        # engines leave special tokens out, and know marks that are special
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if any(mark in whole and mark not in text for mark in marks):
            text = whole
        opened = bool(thinking) and self.prompt(told, tools).rstrip().endswith(thinking[0])
        read, mark = self._calls_are_read if tools else (True, "")
        reasoning, content, calls = parse_answer(text, template, tools if read else None, opened)
        if not read and (mark in content or any(CALL_TOKEN.search(token) and token in content
                                                for token in self.tokenizer.get_added_vocab())):
            raise Skip("tool call in a form that is not known", "nothing here reads this template's calls")
        message = _answer(content)
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:  # numbered as Kimi's are; of others the ids are random, and no template shows them
            before = sum(len(earlier.get("tool_calls", [])) for earlier in told)
            message["tool_calls"] = [
                {"id": f"functions.{name}:{before + n}", "type": "function",
                 "function": {"name": name, "arguments": arguments}}
                for n, (name, arguments) in enumerate(calls)]
        return message

    def encode(self, messages, tools=None):
        """(ids, loss mask, Counter of what the template dropped) of a whole conversation.

        The mask is 1 on every answer up to and with its end-of-turn token: from the template's own generation
        tags where they mark anything, otherwise from the places of the answers in the rendering of the whole
        conversation, because templates render earlier turns in another way than the last, or drop their
        reasoning. It is 0 on answers of weight 0, on thinking blocks that the template puts into answers that
        have none, and on the end of an answer that shows nothing else.
        """
        messages = self.served(messages, tools)
        text = self.render(messages, tools)
        dropped, messages = self._dropped(messages, tools, text)
        ids, mask = self._tagged(messages, tools)
        found, kinds = self._mask_spans(text, self.answer_spans(messages, tools, text))
        if not any(mask):
            ids, mask = found, [int(kind == LEARNT) for kind in kinds]
        out = [int(kind == LEFT_OUT) for kind in kinds]
        self._close_turns(ids, mask)
        self._close_turns(ids, out)
        return ids, [int(a > b) for a, b in zip(mask, out, strict=True)], dropped

    def _tagged(self, messages, tools):
        template = self.tokenizer.get_chat_template(None, tools)
        tags = "generation" in template.replace("add_generation_prompt", "")
        if not tags or not self.tokenizer.is_fast or _has_null(messages):
            return [], []
        out = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True,
                                                 return_assistant_tokens_mask=True, **self.template_kwargs)
        return list(out["input_ids"]), list(out["assistant_masks"])

    def answer_spans(self, messages, tools, text):
        """[(start, end, LEARNT or LEFT_OUT)] in `text`, the whole rendering, of every answer that shows in
        it: behind its header, before its end of turn."""
        header = self._answer_header(messages, tools)
        if any(header in (message["content"] or "") for message in messages):
            header = ""  # its last occurrence proves nothing
        spans, lower = [], 0
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start, end = self._find_answer(messages, tools, text, n, header, lower)
            upper, start = lower, max(start, lower)
            lower = max(start, end)
            if not text[start:lower].strip():
                continue
            if message.get("weight") == 0:
                spans.append((start, lower, LEFT_OUT))
                continue
            if not EMPTY_THINKING.match(message["content"] or ""):  # otherwise the target wrote it
                block = EMPTY_THINKING.match(text, start, lower)
                start = block.end() if block else start
                before = max(upper, start - 64)
                block = EMPTY_THINKING_LAST.search(text[before:start])
                if block:
                    spans.append((before + block.start(), start, LEFT_OUT))
            if start < lower:
                spans.append((start, lower, LEARNT))
        return spans

    def _answer_header(self, messages, tools):
        """What the template writes before the first answer, "" where that cannot be told."""
        first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        without = self.render(messages[:first], tools)
        asked = self.render(messages[:first], tools, answer_next=True)
        return asked.removeprefix(without) if asked.startswith(without) else ""

    def _find_answer(self, messages, tools, text, n, header, lower):
        """(start, end) in `text` of the answer messages[n]; header: "" where it is no help, lower: the end of
        the answer before."""
        try:
            others = [self.render(_replaced(messages, n, _answer(words)), tools) for words in STAND_INS]
        except Skip:
            others = [text, text]
        calls = messages[n].get("tool_calls")
        alone = _common(text, self.render(messages[: n + 1], tools)) if calls else len(text)
        if others[0] == others[1]:  # a tool call whose place no plain answer can take
            return _common(text, self.render(messages[:n], tools, answer_next=True)), alone
        start = _common(text, *others)
        end = len(text) - _common(text[::-1], *(other[::-1] for other in others))
        if start < alone:  # what follows may show calls and plain answers in different ways
            end = min(end, alone)
        # the answer begins behind the header: a thinking block that both renderings begin with is part of it
        found = text.rfind(header, lower, start - 1 + len(header)) if header else -1
        return (found + len(header) if found >= 0 else start), end

    def _mask_spans(self, text, spans):
        """(ids, of each the kind of its span or 0) of a rendering."""
        if not self.tokenizer.is_fast:
            return self._mask_pieces(text, spans)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

        def kind_of(a, b):
            """Of the span that text[a:b] lies in: a token may take the space before it along, never a part of
            the header."""
            return next((kind for start, end, kind in spans
                         if start < b and a < end and not text[a:start].strip(" ")), 0)

        return list(encoded["input_ids"]), [kind_of(a, b) if a < b else 0
                                            for a, b in encoded["offset_mapping"]]

    def _mask_pieces(self, text, spans):
        """The same of a tokenizer that gives no offsets: piece by piece."""
        ids, mask, done = [], [], 0
        for start, end, kind in [*spans, (len(text), len(text), 0)]:
            for piece, value in ((text[done:start], 0), (text[start:end], kind)):
                part = self.ids(piece) if piece else []
                ids += part
                mask += [value] * len(part)
            done = end
        return ids, mask

    def _close_turns(self, ids, mask):
        """In place: every supervised run ends with its end-of-turn token, where there is one, and not behind
        it; one that holds nothing else is no answer that was written."""
        t = 0
        while t < len(ids):
            if not mask[t]:
                t += 1
                continue
            stop = next((n for n in range(t, len(ids)) if not mask[n]), len(ids))
            if all(token in self.end_ids or self._is_space(token) for token in ids[t:stop]):
                mask[t:stop] = [0] * (stop - t)
                t = stop
                continue
            last = stop
            while last > t and self._is_space(ids[last - 1]):
                last -= 1
            if last > t and ids[last - 1] in self.end_ids:
                mask[last:stop] = [0] * (stop - last)
            else:
                last = stop
                while last < len(ids) and self._is_space(ids[last]):
                    last += 1
                if last < len(ids) and ids[last] in self.end_ids:
                    mask[stop : last + 1] = [1] * (last + 1 - stop)
            t = max(stop, last) + 1

    def _is_space(self, token):
        if token not in self.spaces:
            self.spaces[token] = self.tokenizer.decode([token]).isspace()
        return self.spaces[token]

    def _dropped(self, messages, tools, text):
        """(what could be left out without any change in the rendering, counted by turns; the messages without
        reasoning of that kind, whose beginnings are rendered as in the whole)."""
        dropped, kept = Counter(), [*messages]
        for n, message in enumerate(messages):
            leaner = {}
            for key, what in ((self.reasoning_key, "reasoning_content"), ("tool_calls", "tool_calls")):
                if message.get(key):
                    leaner[what] = {name: value for name, value in message.items() if name != key}
            thought, closed, spoken = (message["content"] or "").rpartition("</think>")
            if message.get("tool_calls") and spoken.strip():
                leaner["text beside tool calls"] = {**message, "content": thought + closed}
            if message["role"] == "assistant" and closed:
                leaner["reasoning_content"] = {**message, "content": spoken}
            for key, other in leaner.items():
                try:
                    same = self.render(_replaced(messages, n, other), tools) == text
                except Skip:
                    continue
                dropped[key] += same
                if same and message.get(self.reasoning_key) and self.reasoning_key not in other:
                    kept[n] = other
        return +dropped, kept


def chat_ids(tokenizer):
    """{token: id} of the added tokens that the chat template writes, and of those that open or close thinking
    and tool calls; an id may lie beyond the target's lm_head."""
    template = json.dumps(tokenizer.chat_template or "", ensure_ascii=False)
    marker = re.compile("tool|think|function|observation|channel", re.IGNORECASE)
    added = sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1])
    return {token: number for token, number in added if token in template or marker.search(token)}


def _answer(text):
    return {"role": "assistant", "content": text}


def _stand_in_call(n):
    """A call whose name and value stand nowhere else."""
    return {"type": "function", "id": f"functions.call_stand_in_{n}_:{n}",
            "function": {"name": f"call_stand_in_{n}_", "arguments": {"key_stand_in": f"value {n} stand-in"}}}


def _shows(text, function):
    """Whether a stand-in call is in a rendering, its arguments not as Python prints an object."""
    arguments = function["arguments"]
    return (function["name"] in text and all(value in text for value in arguments.values())
            and repr(arguments) not in text)


def _in_form(message, as_text, content):
    """The message with the arguments of its calls as JSON text or as objects, and `content` for ""."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) != as_text:
            arguments = json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls, "content": message["content"] or content}


def _has_null(messages):
    return any(message["content"] is None for message in messages)


def _replaced(messages, n, message):
    return [*messages[:n], message, *messages[n + 1 :]]


def _common(*texts):
    """How many characters the texts begin with alike."""
    return len(os.path.commonprefix(texts))
