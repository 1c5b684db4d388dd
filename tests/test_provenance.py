"""What a difference between two records comes to, and that our own files are believed only as they were
written."""

import json

import pytest

from common.cli import UserError
from common.files import read_sealed, write_sealed
from common.provenance import RECORD, RULES, compare, made_for

TARGET = {"name": "a/target", "vocab_size": 328, "hidden_size": 64, "tensors_sha256": "1" * 64,
          "text_config_sha256": "2" * 64, "sample_sha256": "3" * 64}
HERE = {"target": TARGET, "tokenizer_sha256": "4" * 64, "tokenizer_probe_sha256": "7" * 64,
        "chat_template_sha256": "5" * 64, "template_kwargs": {}, "layers": [2, 4, 5], "map_sha256": "6" * 64}
DIFFERENT = {  # key: (another value, refused, refused although forced, words of the sentence)
    "target.vocab_size": (320, True, True, "another target: vocabulary 320 of a/target there, 328 of "
                                           "a/target here"),
    "target.hidden_size": (32, True, True, "another target: hidden size 32"),
    "layers": ([1, 4, 5], True, True, "other layers: [1, 4, 5] there, [2, 4, 5] here; extract those layers"),
    "target.tensors_sha256": ("0" * 64, True, False, "lm_head and embedding 000000000000 of a/target there"),
    "target.text_config_sha256": ("0" * 64, True, False, "text config 000000000000"),
    "tokenizer_sha256": ("0" * 64, True, False, "another tokenizer: hash 000000000000 there, 444444444444 "
                                                "here"),
    "tokenizer_probe_sha256": ("0" * 64, True, False, "a tokenizer that gives other ids: hash 000000000000"),
    "map_sha256": ("0" * 64, True, False, "another draft vocabulary: map 000000000000"),
    "target.sample_sha256": ("0" * 64, False, False, "other weights behind the same lm_head and embedding: "
                                                     "0000"),
    "chat_template_sha256": (None, False, False, "another chat template: None there, 555555555555 here"),
    "template_kwargs": ({"thinking": True}, False, False, "arguments of the template: {'thinking': True} "
                                                          "there"),
}


def changed(record, key, value):
    """`record` with another `value` under a key, or under b of its dict a for a.b."""
    first, _, second = key.partition(".")
    return {**record, first: {**record[first], second: value} if second else value}


def test_every_rule_is_in_the_table():
    assert [rule[0] for rule in RULES] == list(DIFFERENT)
    assert {key.split(".")[0] for key in DIFFERENT} == set(RECORD)
    assert compare(HERE, HERE, "IT") == []


@pytest.mark.parametrize("key", DIFFERENT)
def test_what_a_difference_comes_to(key):
    value, refused, always, words = DIFFERENT[key]
    other = changed(HERE, key, value)
    if refused:
        with pytest.raises(UserError) as error:
            compare(other, HERE, "IT")
        assert words in str(error.value) and ("--force" in str(error.value)) == (not always)
    if always:
        with pytest.raises(UserError):
            compare(other, HERE, "IT", force=True)
        return
    [sentence] = compare(other, HERE, "IT", force=True)
    assert words in sentence and sentence.startswith("--force: IT was made "
                                                     "for" if refused else "IT was made for")
    assert compare(other, HERE, "IT", force=True, told=other) == []


@pytest.mark.parametrize("key", DIFFERENT)
def test_what_is_not_stated_is_not_compared(key):
    less = changed(HERE, key, "anything")
    inside = less["target"] if key.startswith("target.") else less
    del inside[key.rpartition(".")[2]]
    assert compare(less, HERE, "IT") == compare(HERE, less, "IT") == []


def test_unknown_is_none_but_for_the_template():
    for key in ("tokenizer_sha256", "layers", "map_sha256", "template_kwargs"):
        assert compare({**HERE, key: None}, HERE, "IT") == []
    [sentence] = compare(made_for({"tokenizer_sha256": "4" * 64, "steps": 3}), HERE, "IT")
    assert sentence == "IT does not say which target it was made for; only the sizes were compared"


def test_our_own_files_are_believed_as_they_were_written_only(tmp_path):
    path, value = tmp_path / "own.json", {"b": [1, 2.5, None], "a": {"9": "ü", "10": 0.1}}
    write_sealed(path, {**value, "a": {9: "ü", 10: 0.1}})
    assert read_sealed(path) == value
    text = path.read_text()
    edited = json.loads(text)
    for words, content in (("was changed", text.replace("2.5", "2.25")), ("not readable", text[:-9]),
                           ("was "
                            "changed", json.dumps({**edited, "more": 1})),
                           ("was changed", json.dumps(value))):
        path.write_text(content)
        with pytest.raises(UserError, match=words) as error:
            read_sealed(path)
        assert "\n" not in str(error.value)
    path.write_text(json.dumps(edited, sort_keys=True))  # another order is no other content
    assert read_sealed(path) == value
