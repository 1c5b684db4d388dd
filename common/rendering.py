"""Conversations to text by the target's chat template, and to token ids with a loss mask on what the
assistant wrote."""

import json
import os
import re
from collections import Counter

from jinja2.exceptions import TemplateError

from common.conversations import Skip

# Stand in for an answer to see what a template writes around it: different first and last characters, nothing
# to trim or parse.
STAND_INS = ("Alpha stand-in one", "Beta stand-in two")
# what templates raise for rows that they cannot take
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


class Renderer:
    """A tokenizer's chat template with fixed arguments, and the ids at which a turn ends."""

    def __init__(self, tokenizer, template_kwargs, eos_ids):
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs
        self.eos_ids, self.end_ids = set(eos_ids), set(eos_ids)
        self.spaces = {}  # {token: whether it is white space}
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
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                                      add_generation_prompt=answer_next,
                                                      **self.template_kwargs)
        except REFUSALS as error:
            told = f"{type(error).__name__}: {str(error)[:200]}"
            raise Skip("refused by the chat template", told) from None

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, messages, tools=None):
        return self.ids(self.render(messages, tools, answer_next=True))

    def message(self, ids):
        """The assistant's message whose text is an answer's ids, without its end token."""
        return _answer(self.tokenizer.decode(ids[:-1] if ids[-1] in self.eos_ids else ids))

    def encode(self, messages, tools=None):
        """(ids, loss mask, Counter of what the template dropped) of a whole conversation.

        The mask is 1 on every answer up to and with its end-of-turn token: from the template's own generation
        tags where they mark anything, otherwise from the places of the answers in the rendering of the whole
        conversation, because templates render earlier turns in another way than the last, or drop their
        reasoning.
        """
        text = self.render(messages, tools)
        dropped = self._dropped(messages, tools, text)
        ids, mask = self._tagged(messages, tools)
        if not any(mask):
            ids, mask = self._mask_spans(text, self.answer_spans(messages, tools, text))
        self._close_turns(ids, mask)
        return ids, mask, dropped

    def _tagged(self, messages, tools):
        template = self.tokenizer.get_chat_template(None, tools)
        if not self.tokenizer.is_fast or "generation" not in template.replace("add_generation_prompt", ""):
            return [], []
        out = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True,
                                                 return_assistant_tokens_mask=True, **self.template_kwargs)
        return list(out["input_ids"]), list(out["assistant_masks"])

    def answer_spans(self, messages, tools, text):
        """(start, end) in `text`, the whole rendering, of every answer that shows in it: behind its header,
        before its end of turn."""
        header = self._answer_header(messages, tools)
        if any(header in message["content"] for message in messages):
            header = ""  # its last occurrence proves nothing
        spans, lower = [], 0
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start, end = self._find_answer(messages, tools, text, n, header, lower)
            start = max(start, lower)
            lower = max(start, end)
            if text[start:lower].strip():
                spans.append((start, lower))
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
        if others[0] == others[1]:  # a tool call whose place no plain answer can take
            return (_common(text, self.render(messages[:n], tools, answer_next=True)),
                    _common(text, self.render(messages[: n + 1], tools)))
        start = _common(text, *others)
        end = len(text) - _common(text[::-1], *(other[::-1] for other in others))
        # the answer begins behind the header: a thinking block that both renderings begin with is part of it
        found = text.rfind(header, lower, start) if header else -1
        return (found + len(header) if found >= 0 else start), end

    def _mask_spans(self, text, spans):
        """(ids, mask) of a rendering whose tokens are supervised in `spans`."""
        if not self.tokenizer.is_fast:
            return self._mask_pieces(text, spans)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

        def supervised(a, b):
            """Whether text[a:b] lies in an answer: a token may take the space before it along, never a part
            of the header."""
            return any(start < b and a < end and not text[a:start].strip(" ") for start, end in spans)

        mask = [int(a < b and supervised(a, b)) for a, b in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), mask

    def _mask_pieces(self, text, spans):
        """The same of a tokenizer that gives no offsets: piece by piece."""
        ids, mask, done = [], [], 0
        for start, end in [*spans, (len(text), len(text))]:
            for piece, supervised in ((text[done:start], 0), (text[start:end], 1)):
                part = self.ids(piece) if piece else []
                ids += part
                mask += [supervised] * len(part)
            done = end
        return ids, mask

    def _close_turns(self, ids, mask):
        """In place: every supervised run ends with its end-of-turn token, where there is one, and not behind
        it."""
        t = 0
        while t < len(ids):
            if not mask[t]:
                t += 1
                continue
            stop = next((n for n in range(t, len(ids)) if not mask[n]), len(ids))
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
        """What could be left out without any change in the rendering, counted by turns."""
        dropped = Counter()
        for n, message in enumerate(messages):
            leaner = {}
            for key in ("reasoning_content", "tool_calls"):
                if message.get(key):
                    leaner[key] = {name: value for name, value in message.items() if name != key}
            if message["role"] == "assistant" and "</think>" in message["content"]:
                spoken = message["content"].rpartition("</think>")[2]
                leaner["reasoning_content"] = {**message, "content": spoken}
            for key, other in leaner.items():
                try:
                    dropped[key] += self.render(_replaced(messages, n, other), tools) == text
                except Skip:
                    continue
        return +dropped


def chat_ids(tokenizer):
    """{token: id} of the added tokens that the chat template writes, and of those that open or close thinking
    and tool calls; an id may lie beyond the target's lm_head."""
    template = json.dumps(tokenizer.chat_template or "", ensure_ascii=False)
    marker = re.compile("tool|think|function|observation|channel", re.IGNORECASE)
    added = sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1])
    return {token: number for token, number in added if token in template or marker.search(token)}


def _answer(text):
    return {"role": "assistant", "content": text}


def _replaced(messages, n, message):
    return [*messages[:n], message, *messages[n + 1 :]]


def _common(*texts):
    """How many characters the texts begin with alike."""
    return len(os.path.commonprefix(texts))
