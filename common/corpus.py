"""Rows of a file made ready for the target: rendered, tokenised, masked, cut, and some of them set aside."""

import json
from argparse import ArgumentTypeError
from collections import Counter

from common.cli import Progress, UserError, in_range, positive_int, say
from common.conversations import Skip, count_text, held_out, parse_row

MAX_LENGTH = 2048  # tokens of a sample, unless said otherwise
# What transformers' apply_chat_template takes for itself, or gives to the template by itself.
RESERVED = {"self", "conversation", "conversations", "messages", "tools", "chat_template", "compiled_template", "add_generation_prompt",
            "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
            "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}


def add_data_arguments(parser):
    """What decides which tokens of --data are samples, supervised, or held out: the same wherever a file is read."""
    add = parser.add_argument
    add("--max-length", type=positive_int, metavar="N",
        help=f"longest sample in tokens, the rest is cut off; default {MAX_LENGTH}, or the target's maximum where that is less: most chats "
             "fit")
    add("--heldout", type=in_range(0, 1, low_too=True), default=0.05, metavar="SHARE",
        help="share of conversations set aside for measuring, by a hash of their content; default 0.05: enough to measure, little lost. "
             "1 makes shards to evaluate on")
    add("--template-kwargs", type=json_object, default={}, metavar="JSON",
        help="arguments for the chat template, the same as when serving, like {\"enable_thinking\": false}")
    add("--system", help="system prompt for rows that have none")
    add("--limit", type=positive_int, metavar="N", help="only the first N rows; default all")


def longest_sample(args, target):
    """Tokens of the longest sample: --max-length or its default, never more than the target's positions."""
    longest = target.text.get("max_position_embeddings") or MAX_LENGTH
    if args.max_length and args.max_length > longest:
        raise UserError(f"--max-length {args.max_length} is more than the target's {longest} positions; give at most {longest}")
    return args.max_length or min(MAX_LENGTH, longest)


def json_object(text):
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text} is no JSON object like {{\"enable_thinking\": false}}")
    if reserved := RESERVED & value.keys():
        raise ArgumentTypeError(f"{min(reserved)} is set by this script, not by template arguments")
    return value


def prepare(rows, renderer, target, args, max_length):
    """(conversations, [(line, reason) of skipped rows], Counter of things to tell, names of sources): all that is known before the
    target runs. A conversation is parse_row's dict with line, source_id, heldout, `bound` (its tokens, at most when
    regenerated), `samples`, and input_ids and loss_mask of what is given."""
    conversations, skipped, notes, sources, example = [], [], Counter(), {}, None
    progress = Progress(len(rows), "rows", "reading")
    for line, row in rows:
        progress.update(1)
        try:
            conversation = parse_row(row, args.system, args.regenerate)
            if "messages" in conversation and not renderer.tokenizer.chat_template:
                raise UserError(f"{target.folder} has no chat template and line {line + 1} of {args.data} needs one; put the model's "
                                f"chat_template.jinja there, or give rows with text or input_ids")
            encode(conversation, renderer, target, args, max_length, notes)
        except Skip as skip:
            skipped.append((line, skip.reason))
            example = example or f"line {line + 1}: {skip}"
            continue
        source = str(row.get("source") or row.get("category") or "")
        conversations.append({**conversation, "line": line, "source_id": sources.setdefault(source, len(sources))})
    progress.close()
    if not conversations:
        reasons = count_text(Counter(reason for _, reason in skipped))
        raise UserError(f"--data {args.data}: none of its {len(rows)} rows gives a sample ({reasons}; {example})")
    for conversation, flag in zip(conversations, held_out([c["key"] for c in conversations], args.heldout), strict=True):
        conversation["heldout"] = int(flag)
    if not args.regenerate:
        share = sum(sum(c["loss_mask"]) for c in conversations) / sum(c["bound"] for c in conversations)
        if share < 0.02:
            say(f"warning: only {share:.2%} of the tokens are supervised; is this the right chat template?")
    return conversations, skipped, +notes, list(sources)


def encode(conversation, renderer, target, args, max_length, notes):
    """Add bound and samples, and the ids and mask of a given conversation. Raises Skip when nothing is left to learn from."""
    if args.regenerate:
        script, gaps = conversation["messages"], conversation["messages"].count(None)
        ids = renderer.prompt_ids(first_question(conversation), conversation["tools"])
        check_ids(ids, target)
        prompt = len(ids)
        if prompt >= max_length:
            raise Skip("prompt too long", f"its prompt fills the {max_length} tokens of --max-length")
        later = len(renderer.ids("\n".join(message["content"] for message in script[script.index(None) :] if message)))
        each = min(max_length, prompt + later + gaps * args.max_new_tokens + 16 * len(script))  # 16: room for headers
        conversation.update(samples=gaps, bound=each * gaps)
        notes["answers that call tools are kept as given, not regenerated"] += sum(
            1 for message in script if message and message["role"] == "assistant")
        return
    if "messages" in conversation:
        ids, mask, dropped = renderer.encode(conversation["messages"], conversation["tools"])
        for what, turns in dropped.items():
            notes[f"answers whose {what} the chat template drops"] += turns
    elif "text" in conversation:
        ids = renderer.tokenizer(conversation["text"])["input_ids"]
        mask = [1] * len(ids)
    else:
        ids, mask = conversation["input_ids"], conversation["loss_mask"]
    check_ids(ids, target)
    notes[f"samples cut at {max_length} tokens"] += len(ids) > max_length
    mask = [0, *mask[1:max_length]]  # nothing predicts the first token
    if not any(mask):
        raise Skip("no supervised token")
    conversation.update(input_ids=ids[:max_length], loss_mask=mask, bound=len(mask), samples=1)


def check_ids(ids, target):
    """Skip a row with a token that has no row in the target's lm_head, be it given or its tokenizer's."""
    if max(ids, default=0) >= target.vocab_size:
        raise Skip("malformed", f"token id {max(ids)} is not in 0..{target.vocab_size - 1}, the rows of the target's lm_head")


def first_question(conversation):
    """The messages before the first answer that is to be written."""
    return conversation["messages"][: conversation["messages"].index(None)]
