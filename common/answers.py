"""What an engine's chat endpoint makes of an answer: reasoning, content and calls of tools.

An answer becomes history in these parts, not as the text that the target wrote: templates leave reasoning
out, and refuse or double the marks.
"""

import json
import re

from common.conversations import Skip

# what opens and closes reasoning
THINKING = (("<think>", "</think>"), ("◁think▷", "◁/think▷"), ("[THINK]", "[/THINK]"),
            ("<mm:think>", "</mm:think>"), ("<seed:think>", "</seed:think>"))
HARMONY = ("<|channel|>", "<|message|>")
HARMONY_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
# of calls: what the first begins with, and the body of one
KIMI = ("<|tool_calls_section_begin|>",
        re.compile(r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+):\d+\s*<\|tool_call_argument_begin\|>"
                   r"\s*(\{.*?\})\s*<\|tool_call_end\|>", re.DOTALL))
HERMES = ("<tool_call>", re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL))
XML_CALL = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|$)", re.DOTALL)
XML_ARGUMENT = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def marks_of(template):
    """The marks of reasoning and calls that a chat template knows: (kind of the calls: "harmony", "kimi",
    "xml", "hermes" or None; (open, close) of reasoning or None; all of these marks)."""
    if all(mark in template for mark in HARMONY):
        return "harmony", None, [*HARMONY, "<|start|>", "<|end|>"]
    thinking = next((pair for pair in THINKING if pair[1] in template), None)
    if KIMI[0] in template:
        return "kimi", thinking, [KIMI[0], "<|tool_call_begin|>", *(thinking or ())]
    kind = None
    if HERMES[0] in template and "<arg_key>" not in template:
        kind = "xml" if "<function=" in template else "hermes"
    return kind, thinking, [*([HERMES[0]] if kind else []), *(thinking or ())]


def parse_answer(text, template, tools, opened):
    """(reasoning, content, calls) of an answer; calls: [(name, arguments, an object)].

    tools: those of the request, or None: without them engines leave calls in the text. opened: whether the
    prompt ends within reasoning. Raises Skip for calls that an engine would not take back.
    """
    kind, thinking, _ = marks_of(template)
    if kind == "harmony":
        return _parse_harmony(text, tools)
    starts = {"kimi": KIMI[0], "xml": HERMES[0], "hermes": HERMES[0]}
    start = starts.get(kind)
    reasoning, content = _split_reasoning(text, thinking, opened, start) if thinking else ("", text)
    if not tools or not start or start not in content:
        return reasoning, content, []
    before = content.partition(start)[0]
    if kind == "kimi":
        return reasoning, before, _checked(KIMI[1].findall(content), None)
    if kind == "xml":
        return reasoning, before, _checked(_xml_calls(content, tools), tools)
    try:
        calls = [json.loads(body) for body in HERMES[1].findall(content)]
    except ValueError:
        return reasoning, content, []  # as the engines do
    calls = [call for part in calls for call in (part if isinstance(part, list) else [part])]
    calls = [(call.get("name"), call.get("parameters") or call.get("arguments") or {}) for call in calls
             if isinstance(call, dict)]
    return reasoning, before.strip(), _checked(calls, tools)


def _split_reasoning(text, thinking, opened, start):
    """(reasoning, content); start: what begins calls, which end reasoning that is not closed, or None."""
    before, found, rest = text.partition(thinking[0])
    if found and not before.strip():
        text, opened = rest, True
    if not opened and thinking[1] not in text:
        return "", text
    reasoning, closed, content = text.partition(thinking[1])
    if not closed and start and start in reasoning:
        reasoning, content = text[: text.index(start)], text[text.index(start) :]
    return reasoning, content


def _parse_harmony(text, tools):
    """Of channels: the header that the prompt ends with is an assistant's start."""
    reasoning, content, calls = "", "", []
    for piece in HARMONY_ENDS.split(text):
        header, found, body = piece.partition("<|message|>")
        recipient = re.search(r"\bto=(?:[\w-]+\.)*([\w-]+)", header)
        if not found:
            content += "" if header.strip() == "assistant" or "<|channel|>" in header else header
        elif recipient and tools:
            calls.append((recipient[1], body.strip() or "{}"))
        elif "analysis" in header:
            reasoning += body
        else:
            content += piece if recipient else body
    return reasoning, content, _checked(calls, tools)


def _xml_calls(text, tools):
    """[(name, arguments)]; a value is a string where the tool's parameters say so or where it is no JSON."""
    schemas = {}
    for tool in tools:
        function = tool.get("function") or {}
        schemas[function.get("name")] = (function.get("parameters") or {}).get("properties") or {}
    calls = []
    for name, body in XML_CALL.findall(text):
        arguments = {}
        for key, value in XML_ARGUMENT.findall(body):
            kind = (schemas.get(name, {}).get(key) or {}).get("type", "string")  # or a list of them
            word = value.lower()
            try:
                plain = "string" in kind and word != "null"
                arguments[key] = value if plain else json.loads(
                    word if word in ("null", "true", "false") else value)
            except ValueError:
                arguments[key] = value
        calls.append((name, arguments))
    return calls


def _checked(calls, tools):
    """The calls with arguments as objects. Those of tools that the request has not are left out, as SGLang
    does; tools: None where any is taken. Raises Skip for arguments that no endpoint takes back."""
    names = tools and {(tool.get("function") or {}).get("name") for tool in tools}
    checked = []
    for name, arguments in calls:
        if names and name not in names:
            continue
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise Skip("malformed tool call", f"the arguments of {name} are no JSON object")
        checked.append((name, arguments))
    return checked
