"""What a thing was made for, and the one comparison of two such records.

Shards, a map and a drafter state under the same names what they were made for: in manifest.json, in
vocab_map.json, and in the `training` block of the drafter's config.json. What a side does not state is not
compared.

| what differs                                  | is    | with --force |
| ---                                           | ---   | ---          |
| target: vocab_size, hidden_size               | refused | refused    |
| layers                                        | refused | refused    |
| target: tensors_sha256 (lm_head, embedding)   | refused | a warning  |
| target: text_config_sha256                    | refused | a warning  |
| tokenizer_sha256, tokenizer_probe_sha256      | refused | a warning  |
| map_sha256 (the draft vocabulary)             | refused | a warning  |
| target: sample_sha256 (of all other weights)  | a warning | a warning |
| chat_template_sha256, template_kwargs         | a warning | a warning |
| no target is stated                           | a warning | a warning |
"""

import re

from common.cli import UserError
from common.target import chat_template_sha256, probe_sha256, stored_template_sha256, tokenizer_sha256

RECORD = ("target", "tokenizer_sha256", "tokenizer_probe_sha256", "chat_template_sha256", "template_kwargs",
          "layers", "map_sha256")
UNSTATED = object()
NEVER, FORCED, WARNED = range(3)  # lets pass: nothing, --force, anybody
RULES = (  # key, what it is called, what lets a difference pass, what to do or what follows
    ("target.vocab_size", "another target: vocabulary", NEVER, "use the target that it was made for"),
    ("target.hidden_size", "another target: hidden size", NEVER, "use the target that it was made for"),
    ("layers", "other layers:", NEVER, "extract those layers"),
    ("target.tensors_sha256", "another target: lm_head and "
                              "embedding", FORCED, "use the target that it was made for"),
    ("target.text_config_sha256", "another target: text "
                                  "config", FORCED, "use the target that it was made for"),
    ("tokenizer_sha256", "another tokenizer: "
                         "hash", FORCED, "use the tokenizer, shards and map that belong together"),
    ("tokenizer_probe_sha256", "a tokenizer that gives other "
                               "ids: hash", FORCED, "use the same libraries, and --trust-remote-code or not"),
    ("map_sha256", "another draft vocabulary: map", FORCED, "use the map that it was made for"),
    ("target.sample_sha256", "other weights behind the same lm_head and embedding:", WARNED,
     "if one is a fine-tune of the other, fewer drafts are right"),
    ("chat_template_sha256", "another chat template:", WARNED, "its prompts are others"),
    ("template_kwargs", "other arguments of the template:", WARNED, "its prompts are others"),
)


def target_record(target, facts, tokenizer=None):
    """The record of an opened Target, whose facts() are given.

    tokenizer: where it is loaded. Without it what it does is not stated, and the chat template is that of the
    target's files, or not stated where they do not tell.
    """
    record = {"target": facts, "tokenizer_sha256": tokenizer_sha256(target.folder)}
    if tokenizer is not None:
        record["tokenizer_probe_sha256"] = probe_sha256(tokenizer)
        record["chat_template_sha256"] = chat_template_sha256(tokenizer)
    elif (stored := stored_template_sha256(target.folder)) is not None:
        record["chat_template_sha256"] = stored or None
    return record


def made_for(block):
    """The record that a JSON block states: of a manifest, a vocab_map.json, a drafter's `training`."""
    return {key: block[key] for key in RECORD if key in block}


def compare(made, here, what, force=False, told=None):
    """Sentences on the differences of `what`, with record `made`, from the record `here` that warn.

    told: a record whose differences from `here` were told of already: what differs alike is left out. Raises
    UserError for a difference that is refused (see the table above).
    """
    warnings = []
    if not made.get("target"):
        warnings.append(f"{what} does not say which target it was made for; only the sizes were compared")
    for key, name, passes, advice in RULES:
        theirs, ours = _find(made, key), _find(here, key)
        if theirs == ours or theirs is UNSTATED or ours is UNSTATED:
            continue
        if told is not None and _find(told, key) == theirs:
            continue
        of, place = "", ""
        if key.startswith("target."):
            of, place = f" of {made['target'].get('name')}", f" of {here['target'].get('name')}"
        sentence = f"{what} was made for {name} {_short(theirs)}{of} there, {_short(ours)}{place} here"
        if passes == NEVER or passes == FORCED and not force:
            hint = " (--force goes on all the same)" if passes == FORCED else ""
            raise UserError(f"{sentence}; {advice}{hint}")
        warnings.append(f"--force: {sentence}" if passes == FORCED else f"{sentence}: {advice}")
    return warnings


def _find(record, key):
    """record["a"]["b"] for a.b, UNSTATED where it is not there. None is no chat template, and of all else
    unknown."""
    found = record
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return UNSTATED
        found = found[part]
    return UNSTATED if found is None and key != "chat_template_sha256" else found


def _short(value):
    text = str(value)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text[:200]
