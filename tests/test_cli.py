"""What a command line may hold, and how a script ends."""

import subprocess
import sys
from argparse import ArgumentTypeError

import pytest

from common.cli import Parser, UserError
from common.conversations import json_object
from common.files import check_output_folder
from tests.scripts import ROOT

ENDS = [  # how a script is started, its exit code and what it says
    ("> /dev/full", 1, "No space left on device"), (">&-", 1, "Bad file descriptor"),
        ("<&- >&-", 1, "Bad file descriptor"),
    ("| true", 0, ""), ("<&-", 0, ""),
]


@pytest.mark.parametrize(("redirection", "code", "words"), ENDS)
def test_a_summary_that_cannot_be_written_is_told_in_one_sentence(redirection, code, words):
    script = "import sys; from common.cli import run; run(lambda: {'read': sys.stdin.read()})"
    done = subprocess.run(["bash", "-c", f'set -o pipefail; "$0" -c "$1" {redirection}', sys.executable,
                           script], cwd=ROOT,
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == code and words in done.stderr, done.stderr
    assert done.stderr.count("\n") == bool(words)
    assert done.stdout == ('{"read": ""}\n' if redirection == "<&-" else "")


def test_arguments_are_utf8(monkeypatch):
    parser = Parser("")
    parser.add_argument("--system", help="")
    monkeypatch.setattr(sys, "argv", ["script", "--system", "grüße 日本 😀"])
    assert parser.parse_args().system == "grüße 日本 😀"
    monkeypatch.setattr(sys, "argv", ["script", "--system", "a\udcff"])  # how Python takes the byte 0xff
    with pytest.raises(UserError, match=r"'a\\udcff' is no UTF-8"):
        parser.parse_args()


@pytest.mark.parametrize("name", ["self", "messages", "tools", "continue_final_message",
                                  "return_assistant_tokens_mask", "padding"])
def test_template_arguments_that_rendering_sets_itself_are_refused(name):
    with pytest.raises(ArgumentTypeError, match=f"{name} is set by this script"):
        json_object(f'{{"enable_thinking": false, "{name}": true}}')
    assert json_object('{"documents": [], "wörld": "😀"}') == {"documents": [], "wörld": "😀"}


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\udcff": 1}', '{"a": NaN}', "[" * 10**5, "1"])
def test_template_arguments_are_an_object_that_can_be_written(text):
    with pytest.raises(ArgumentTypeError, match="no JSON object"):
        json_object(text)


def test_a_place_that_holds_no_files_is_no_output_folder():
    """As root /proc looks writable, and has no byte free."""
    with pytest.raises(UserError,
                       match="--out /proc/nope/x cannot be made: /proc is no disk that holds files"):
        check_output_folder("/proc/nope/x", "run.json")
