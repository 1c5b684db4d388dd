"""Rows of JSON lines to conversations, conversations to samples: ids with a loss mask, or questions that the
target shall answer.

Rows of no use are skipped, each for a reason that is counted.
"""

import hashlib
import json
import sys
from argparse import ArgumentTypeError
from collections import Counter

from common.cli import Progress, UserError, in_range, positive_int, say
from common.files import sha256_json

ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
         "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool",
         "observation": "tool", "ipython": "tool"}
KINDS = ("messages", "conversations", "turns", "prompt", "text", "input_ids")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of what was thought before an answer
LEARNT = ("weight", "train", "loss")  # names of what says, with 0 or false, that an answer is not learnt
TOOLS = ("tools", "tool_defs", "functions")  # names of a row's list of tools
MAX_LENGTH = 2048  # tokens of a sample, unless said otherwise
# what transformers' apply_chat_template takes for itself, or gives to the template by itself
RESERVED = {"self", "conversation", "conversations", "messages", "tools", "chat_template",
            "compiled_template", "add_generation_prompt", "continue_final_message", "tokenize",
            "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
            "return_assistant_tokens_mask", "tokenizer_kwargs"}


class Skip(Exception):
    """A row that gives no sample. `reason` is counted, the message says more."""

    def __init__(self, reason, detail=""):
        super().__init__(detail or reason)
        self.reason = reason


def count_text(skipped):
    """"3 empty, 1 no user", the reasons in order; "" where nothing was skipped."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))


def add_data_arguments(group):
    """What decides which tokens of --data are samples, supervised, or held out: the same wherever a file is
    read. group: a parser, or a group of one."""
    add = group.add_argument
    add("--max-length", type=positive_int,
        help=f"longest sample in tokens, the rest is cut off; default {MAX_LENGTH}, or the target's maximum "
             f"where that is less: most chats fit")
    add("--heldout", type=in_range(0, 1, low_too=True), default=0.05, metavar="SHARE",
        help="share of conversations set aside for measuring, by a hash of their content; default 0.05: "
             "enough to measure, little lost. 1 makes shards to evaluate on")
    add("--template-kwargs", type=json_object, default={}, metavar="JSON",
        help="arguments for the chat template, the same as when serving, like {\"enable_thinking\": false}")
    add("--system", help="system prompt for rows that have none")
    add("--limit", type=positive_int, help="only the first N rows; default all")


def json_object(text):
    """argparse type: arguments for the chat template."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text} is no JSON object like {{\"enable_thinking\": false}}")
    reserved = RESERVED & value.keys()
    if reserved:
        raise ArgumentTypeError(f"{min(reserved)} is set by this script, not by template arguments")
    return value


def longest_sample(args, target):
    """Tokens of the longest sample: --max-length or its default, never more than the target's positions."""
    longest = target.text.get("max_position_embeddings") or MAX_LENGTH
    if args.max_length and args.max_length > longest:
        raise UserError(f"--max-length {args.max_length} is more than the target's {longest} positions; give "
                        f"at most {longest}")
    return args.max_length or min(MAX_LENGTH, longest)


def read_rows(path, limit=None):
    """JSON lines of a file, or of stdin for "-": (list of (0-based line, row), number of lines, sha256 of
    what was read).

    Lines end at "\\n" only: rows may hold U+2028. Blank lines count as lines and are no rows. `limit` stops
    after so many rows. Raises UserError with the 1-based line for anything that is no JSON object.
    """
    if path == "-":
        return _parse_lines(sys.stdin.buffer, "standard input", limit)
    try:
        with open(path, "rb") as file:
            return _parse_lines(file, path, limit)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UserError(f"{path} is no file; give a file of JSON lines, or - for standard input") from None


def _parse_lines(file, name, limit):
    rows, lines, digest = [], 0, hashlib.sha256()
    for line, raw in enumerate(file):
        if limit is not None and len(rows) == limit:
            break
        lines = line + 1
        raw = raw.removesuffix(b"\n")
        digest.update(raw + b"\n")
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode("utf-8-sig" if line == 0 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}, line {lines} is no JSON ({error}); one JSON object a line is "
                            f"wanted") from None
        if not isinstance(row, dict):
            raise UserError(f"{name}, line {lines} holds a JSON {type(row).__name__}; one JSON object a line "
                            f"is wanted")
        rows.append((line, row))
    return rows, lines, digest.hexdigest()


def parse_row(row, system=None, regenerate=False):
    """What a row says, as a dict with either `messages` (and `tools`), or `text`, or `input_ids` and
    `loss_mask`; and `key`, the hash of its content that decides whether it is held out.

    With `regenerate`, `messages` holds None where the target shall write an answer. Raises Skip for a row of
    no use.
    """
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Skip("malformed", "half a surrogate pair, which is no text") from None
    kind = next((name for name in KINDS if row.get(name) is not None), None)
    if kind is None:
        raise Skip("no known key", f"none of {', '.join(KINDS)} in it")
    if kind in ("text", "input_ids") and regenerate:
        raise Skip("nothing to regenerate",
                   "text and input_ids rows hold no question that the target could answer")
    if kind == "text":
        return _parse_text(row["text"])
    if kind == "input_ids":
        return _parse_ids(row["input_ids"], row.get("loss_mask"))
    messages = _parse_messages(row, kind)
    _check_roles([message["role"] for message in messages], regenerate)
    if not any(message["content"].strip() for message in messages if message["role"] == "user"):
        raise Skip("empty")
    tools = _tools(row)
    # the questions without the answers: two answers to one question never end up on both sides, and
    # regenerating moves no sample
    key = sha256_json([[message["role"], message["content"]] for message in messages
                       if message["role"] != "assistant"])
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if regenerate:
        messages = _with_gaps(messages)
    return {"messages": messages, "tools": tools, "key": key}


def _parse_text(text):
    if not isinstance(text, str):
        raise Skip("malformed", f"text is a JSON {type(text).__name__}, a string is wanted")
    if not text.strip():
        raise Skip("empty")
    return {"text": text, "key": sha256_json(text)}


def _parse_ids(ids, mask):
    if not isinstance(ids, list) or any(type(token) is not int or token < 0 for token in ids):
        raise Skip("malformed", "input_ids is no list of token ids")
    if not ids:
        raise Skip("empty")
    mask = [1] * len(ids) if mask is None else mask
    if not isinstance(mask, list) or len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
        raise Skip("malformed", "loss_mask is no list of 0 and 1 as long as input_ids")
    return {"input_ids": ids, "loss_mask": [int(value) for value in mask], "key": sha256_json(ids)}


def _parse_messages(row, kind):
    value = row[kind]
    if kind == "prompt":
        value = [{"role": "user", "content": value}]
        if row.get("response") is not None:
            reasoning = {key: row.get(key) for key in REASONING}
            value.append({"role": "assistant", "content": row["response"], **reasoning})
    elif kind == "turns" and isinstance(value, list):
        value = [{"role": "user", "content": turn} for turn in value]
    if not isinstance(value, list):
        raise Skip("malformed", f"{kind} is a JSON {type(value).__name__}, a list is wanted")
    return [_message(message) for message in value]


def _message(raw):
    if not isinstance(raw, dict):
        raise Skip("malformed", f"a message is a JSON {type(raw).__name__}, an object is wanted")
    role = raw.get("role", raw.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise Skip("unknown role", f"role {role!r}")
    message = {"role": ROLES[role], "content": _content(raw.get("content", raw.get("value")))}
    message.update({key: raw[key] for key in ("name", "tool_call_id") if raw.get(key)})
    reasoning = _one(raw, REASONING)
    if reasoning is not None and not isinstance(reasoning, str):
        raise Skip("malformed", f"reasoning is a JSON {type(reasoning).__name__}, a string is wanted")
    if reasoning:
        message["reasoning_content"] = reasoning
    learnt = _one(raw, LEARNT)
    if learnt not in (None, 0, 1):
        raise Skip("malformed", f"{learnt!r} says whether a message is learnt; 0 or 1, false or true is "
                                f"wanted")
    if learnt == 0 and message["role"] == "assistant":
        message["weight"] = 0
    calls = raw.get("tool_calls") or raw.get("function_call") and [{"function": raw["function_call"]}]
    if calls and not isinstance(calls, list):
        raise Skip("malformed", "tool_calls is no list")
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _one(raw, names):
    """The value that has one of `names`; None where none has one. Raises Skip where they contradict."""
    values = [raw[name] for name in names if raw.get(name) not in (None, "")]
    if any(value != values[0] for value in values):
        raise Skip("malformed", f"{', '.join(name for name in names if name in raw)} contradict each other")
    return values[0] if values else None


def _tools(row):
    """The row's tools as a chat endpoint takes them, or None. Columnar files give every object the keys of
    all others, as nulls: they are left out."""
    tools = _one(row, TOOLS)
    if isinstance(tools, str):
        tools = _json_or(tools, tools)
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Skip("malformed", "tools is no list of objects")
    tools = [_json_or(tool, tool) if isinstance(tool, str) else tool for tool in tools]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Skip("malformed", "tools is no list of objects")
    tools = [_without_nulls(tool) for tool in tools]
    return [tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
            for tool in tools]


def _without_nulls(value):
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _content(content):
    if isinstance(content, list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise Skip("non-text content")
        content = "\n".join(part["text"] for part in parts)
    if content is None:
        content = ""  # as the engines do: most templates cannot add null to a string
    if not isinstance(content, str):
        raise Skip("malformed", f"content is a JSON {type(content).__name__}, a string is wanted")
    return content


def _tool_call(call):
    """The call as a chat endpoint takes it; its arguments are a string where the row has one, otherwise an
    object."""
    call = _without_nulls(call)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Skip("malformed", "a tool call names no function")
    arguments = function.get("arguments") or {}
    if not isinstance(_json_or(arguments, None) if isinstance(arguments, str) else arguments, dict):
        raise Skip("malformed", "a tool call's arguments are no JSON object")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _json_or(text, otherwise):
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def _check_roles(roles, regenerate):
    spoken = [role for role in roles if role != "system"]
    if not roles:
        raise Skip("empty")
    if not spoken:
        raise Skip("only system")
    if "user" not in spoken:
        raise Skip("no user")
    if spoken[0] != "user":
        raise Skip("assistant first")
    if "assistant" not in spoken:
        if not regenerate:
            raise Skip("no answer", "no assistant message; extract_hidden_states.py --regenerate lets the "
                                    "target write one")
    elif any(a == b and a in ("user", "assistant") for a, b in zip(roles, roles[1:], strict=False)):
        raise Skip("doubled role")


def _with_gaps(messages):
    """The messages with None for every answer that the target shall write. Answers that call tools are kept
    as given."""
    ask_all = all(message["role"] != "assistant" for message in messages)
    script = []
    for n, message in enumerate(messages):
        role, last = message["role"], n == len(messages) - 1
        given = role != "assistant" or message.get("tool_calls")
        script.append(message if given else None)
        if role == "user" and ask_all or last and role in ("user", "tool"):
            script.append(None)
    if None not in script:
        raise Skip("only tool calls")
    return script


def first_question(conversation):
    """The messages before the first answer that is to be written."""
    return conversation["messages"][: conversation["messages"].index(None)]


def held_out(keys, fraction):
    """For every key (a sha256 in hex) whether it is set aside: those whose hash lies below `fraction`, equal
    keys alike.

    From 20 samples on at least one is set aside, then that with the smallest hash; but never all of them.
    """
    flags = [int(key[:13], 16) / 16**13 < fraction for key in keys]
    if fraction > 0 and len(keys) >= 20 and not any(flags):
        flags = [key == min(keys) for key in keys]
    return [False] * len(flags) if all(flags) and fraction < 1 else flags


def prepare(rows, renderer, target, args, max_length):
    """(conversations, [(line, reason) of skipped rows], Counter of things to tell, names of sources): all
    that is known before the target runs.

    A conversation is parse_row's dict with line, source_id, heldout, `bound` (its tokens, at most when
    regenerated), `samples`, and input_ids and loss_mask of what is given. args: of add_data_arguments, and
    data, regenerate and, with that, max_new_tokens.
    """
    conversations, skipped, notes, sources, example = [], [], Counter(), {}, None
    progress = Progress(len(rows), "rows", "reading")
    for line, row in rows:
        progress.update(1)
        try:
            conversation = parse_row(row, args.system, args.regenerate)
            if "messages" in conversation and not renderer.tokenizer.chat_template:
                raise UserError(f"{target.folder} has no chat template and line {line + 1} of {args.data} "
                                f"needs one; put the model's chat_template.jinja there, or give rows with "
                                f"text or input_ids")
            if args.regenerate:
                _size_up(conversation, renderer, target, args.max_new_tokens, max_length, notes)
            else:
                _encode(conversation, renderer, target, max_length, notes)
        except Skip as skip:
            skipped.append((line, skip.reason))
            example = example or f"line {line + 1}: {skip}"
            continue
        source = str(row.get("source") or row.get("category") or "")
        conversation |= {"line": line, "source_id": sources.setdefault(source, len(sources))}
        conversations.append(conversation)
    progress.close()
    if not conversations:
        reasons = count_text(Counter(reason for _, reason in skipped))
        raise UserError(f"--data {args.data}: none of its {len(rows)} rows gives a sample ({reasons}; "
                        f"{example})")
    flags = held_out([conversation["key"] for conversation in conversations], args.heldout)
    for conversation, flag in zip(conversations, flags, strict=True):
        conversation["heldout"] = int(flag)
    if not args.regenerate:
        supervised = sum(sum(conversation["loss_mask"]) for conversation in conversations)
        share = supervised / sum(conversation["bound"] for conversation in conversations)
        if share < 0.02:
            say(f"warning: only {share:.2%} of the tokens are supervised; is this the right chat template?")
    return conversations, skipped, +notes, list(sources)


def _size_up(conversation, renderer, target, max_new_tokens, max_length, notes):
    """Add bound and samples to a conversation whose answers the target shall write. Raises Skip when its
    first prompt leaves no room for one."""
    script = conversation["messages"]
    gaps = script.count(None)
    ids = renderer.prompt_ids(first_question(conversation), conversation["tools"])
    _check_ids(ids, target)
    if len(ids) >= max_length:
        raise Skip("prompt too long", f"its prompt fills the {max_length} tokens of --max-length")
    later = "\n".join(message["content"] for message in script[script.index(None) :] if message)
    headers = 16 * len(script)  # more than they take
    each = len(ids) + len(renderer.ids(later)) + gaps * max_new_tokens + headers
    conversation.update(samples=gaps, bound=min(max_length, each) * gaps)
    notes["answers that call tools are kept as given, not regenerated"] += sum(
        1 for message in script if message and message["role"] == "assistant")


def _encode(conversation, renderer, target, max_length, notes):
    """Add input_ids, loss_mask, bound and samples to a conversation whose answers are given. Raises Skip when
    nothing is left to learn from."""
    if "messages" in conversation:
        ids, mask, dropped = renderer.encode(conversation["messages"], conversation["tools"])
        for what, turns in dropped.items():
            notes[f"answers whose {what} the chat template drops"] += turns
    elif "text" in conversation:
        ids = text_ids(renderer.tokenizer, conversation["text"])
        mask = [1] * len(ids)
    else:
        ids, mask = conversation["input_ids"], conversation["loss_mask"]
    _check_ids(ids, target)
    notes[f"samples cut at {max_length} tokens"] += len(ids) > max_length
    mask = [0, *mask[1:max_length]]  # nothing predicts the first token
    if not any(mask):
        raise Skip("no supervised token")
    conversation.update(input_ids=ids[:max_length], loss_mask=mask, bound=len(mask), samples=1)


def text_ids(tokenizer, text):
    """Ids of a whole text with what the tokenizer adds to one; a BOS that the text has is not added again."""
    ids = tokenizer(text)["input_ids"]
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    twice = plain[:1] == [tokenizer.bos_token_id] and ids[1 : len(plain) + 1] == plain
    return ids[1:] if twice else ids


def _check_ids(ids, target):
    """Skip a row with a token that has no row in the target's lm_head, be it given or its tokenizer's."""
    if max(ids, default=0) >= target.vocab_size:
        raise Skip("malformed", f"token id {max(ids)} is not in 0..{target.vocab_size - 1}, the rows of the "
                                f"target's lm_head")
