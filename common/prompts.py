"""What an evaluation asks: conversations whose answers are written one after the other, in waves of several prompts."""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.cli import UserError, say
from common.conversations import Skip, count_text, parse_row, read_rows
from common.shards import Shards, check_tokenizer
from common.target import tokenizer_sha256


@dataclass
class Conversation:
    """One row. `script` holds messages, with None where the target is still to answer; of rows of ids or text it is [ids, None]."""

    line: int
    category: str | None
    tools: list | None
    script: list


@dataclass
class Wave:
    """Prompts that are decoded together: answer number `turn` of some conversations of one category."""

    category: str | None
    conversations: list
    turn: int
    prompts: list | None = None  # [(line, prompt ids)], made when the turns before are answered
    groups: dict = field(default_factory=dict)  # decoder number to its Group

    def prepare(self, renderer, room, vocab_size, skipped):
        """Make the prompts; a conversation that cannot go on is counted in `skipped` with all that is left of it, and ends."""
        self.prompts, kept = [], []
        for conversation in self.conversations:
            script = conversation.script
            if None not in script:
                continue
            told = script[: script.index(None)]
            try:
                ids = told[0] if isinstance(told[0], list) else renderer.prompt_ids(told, conversation.tools)
                if len(ids) > room:
                    raise Skip("too long", f"{len(ids)} tokens, and {room} leave room for the answer in the target's positions")
                if max(ids) >= vocab_size:
                    raise Skip("malformed", f"token id {max(ids)}, the target has {vocab_size}")
            except Skip as skip:
                skipped[skip.reason] += script.count(None)
                say(f"line {conversation.line + 1} skipped: {skip}")
                script.clear()
                continue
            kept.append(conversation)
            self.prompts.append((conversation.line, ids))
        self.conversations = kept

    def answered(self, group, renderer):
        """Put the answers into the conversations, for the turns that follow."""
        for conversation, answer in zip(self.conversations, group.answers, strict=True):
            conversation.script[conversation.script.index(None)] = renderer.message(answer.ids)


def waves(conversations, size):
    """Fresh Waves over all answers of `conversations`: of one category, up to `size` conversations at a time, turn after turn."""
    found = []
    for category in dict.fromkeys(conversation.category for conversation in conversations):
        own = [replace(c, script=[*c.script]) for c in conversations if c.category == category]
        for first in range(0, len(own), size):
            part = own[first : first + size]
            for turn in range(max(conversation.script.count(None) for conversation in part)):
                found.append(Wave(category, [conversation for conversation in part if conversation.script.count(None) > turn], turn))
    return found


def read_prompts(path, limit, tokenizer, target, force=False):
    """([Conversation], Counter of skipped rows by reason, [warnings]) of JSON lines, or of held-out samples of a folder of shards."""
    if path != "-" and Path(path).is_dir():
        shards = Shards(path, first=0)
        warning = check_tokenizer(tokenizer_sha256(target.folder), shards, f"the tokenizer of {target.name}", force)
        return heldout_prompts(shards, limit), Counter(), [f"--force: {warning}"] if warning else []
    rows, _, _ = read_rows(path, limit)
    conversations, skipped = [], Counter()
    for line, row in rows:
        try:
            tools, script = parse_prompt(row, tokenizer)
        except Skip as skip:
            skipped[skip.reason] += 1
            say(f"line {line + 1} skipped: {skip}")
            continue
        if not isinstance(script[0], list) and not tokenizer.chat_template:
            raise UserError(f"{path}, line {line + 1} is a conversation and the target's tokenizer has no chat template; add its "
                            f"chat_template.jinja, or give rows with text or input_ids")
        category = row.get("category")
        conversations.append(Conversation(line, category if category is None else str(category), tools, script))
    if not conversations:
        raise UserError(f"{path} holds no prompt that can be used ({count_text(skipped) or 'the file has no rows'})")
    return conversations, skipped, []


def heldout_prompts(shards, limit):
    """The samples' ids up to their first answer, as Conversations of the samples' sources."""
    found = []
    for number in shards.heldout.nonzero()[0][:limit]:
        sample = shards.sample(int(number), ("input_ids", "loss_mask"))
        ids, first = sample["input_ids"].tolist(), int(sample["loss_mask"].int().argmax())
        if first:
            found.append(Conversation(int(number), shards.manifest["sources"][shards.index[number, 4]] or None, None, [ids[:first], None]))
    if not found:
        raise UserError(f"{shards.folder} holds no held-out sample with a prompt; extract with --heldout, or give a file of prompts")
    return found


def parse_prompt(row, tokenizer):
    """(tools, script) of one row: a conversation with answers ends at its last user message, one without gets one behind each."""
    try:
        parsed = parse_row(row)
    except Skip as skip:
        if skip.reason != "no answer":
            raise
        parsed = parse_row(row, regenerate=True)
    if "text" in parsed:
        return None, [tokenizer(parsed["text"])["input_ids"], None]
    if "input_ids" in parsed:
        answer = parsed["loss_mask"].index(1) if row.get("loss_mask") and 1 in parsed["loss_mask"] else 0
        return None, [parsed["input_ids"][:answer] if answer else parsed["input_ids"], None]
    script = parsed["messages"]
    if None not in script:
        last = max(n for n, message in enumerate(script) if message["role"] == "user")
        script = [*script[: last + 1], None]
    return parsed["tools"], script
