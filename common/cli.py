"""Command-line habits: errors for people, talk on stderr, one line of JSON on stdout."""

import argparse
import errno
import json
import logging
import math
import os
import shlex
import sys
import time
from contextlib import suppress

from tqdm import tqdm

RANK = int(os.environ.get("RANK", "0"))  # set by accelerate launch and torchrun; read before torch starts
PATIENCE = 10.0  # seconds
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # what is no fault of the program


class UserError(Exception):
    """A mistake in the arguments or the input. Shown as one sentence, exit code 2."""


class Failed(Exception):
    """The work itself went wrong in a way that is understood. Shown as one sentence, exit code 1."""


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors, one sentence each, and whose help says every default that its
    text does not."""

    def __init__(self, doc, usage=None):
        super().__init__(description=doc, usage=usage, formatter_class=_Help, allow_abbrev=False)

    def parse_args(self):
        for word in sys.argv[1:]:
            if word != word.encode(errors="replace").decode():  # it will stand in files of JSON
                raise UserError(f"the argument {word!a} is no UTF-8; write it in UTF-8 (a file of such a "
                                "name: rename it)")
        for action in self._actions:
            if action.type and not action.choices and not action.metavar:
                action.metavar = "N" if getattr(action.type, "kind", action.type) is int else "X"
        return super().parse_args()

    def error(self, message):
        raise UserError(f"{message}; --help lists the arguments")


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        if "default" in action.help or action.required or action.default in (argparse.SUPPRESS, {}):
            return action.help
        default = "none" if action.default is None else "off" if action.default is False else "%(default)s"
        return f"{action.help}; default {default}"


def run(main, interrupted="the same command goes on from what is on disk"):
    """Call `main()`, print its summary as one line of JSON on stdout, and exit with 0, 1 or 2.

    `main` returns (summary, exit code), or just the summary for exit code 0. Everything that libraries print
    to stdout while it runs goes to stderr, so that `script | jq` works. Only rank 0 writes to stdout.
    """
    stdout = os.dup(1) if sys.__stdout__ else -1  # closed: what has its number now may be anything
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    if not {"-h", "--help"} & set(sys.argv[1:]):
        with suppress(OSError):  # stderr may be closed, too
            os.dup2(2, 1)
        sys.stdout = sys.stderr
    logging.captureWarnings(True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        result = main()
    except UserError as error:
        _leave(error, 2)
    except Failed as error:
        _leave(error, 1)
    except OSError as error:
        _leave_for_the_system(error, interrupted)
    except KeyboardInterrupt:
        say(f"interrupted; {interrupted}")
        sys.exit(130)
    summary, code = result if isinstance(result, tuple) else (result, 0)
    if RANK == 0:
        _write_summary(stdout, summary)
    sys.exit(code)


def _leave(words, code):
    """Exit with one sentence. It is rank 0's to say: the others leave it time for that, as the first to end
    has all ended by torchrun. From another rank it is printed only if rank 0 goes on."""
    if RANK != 0:
        time.sleep(PATIENCE)
    print(f"{os.path.basename(sys.argv[0])}: {words}", file=sys.stderr, flush=True)
    sys.exit(code)


def _leave_for_the_system(error, interrupted):
    """Exit with a sentence on what the system refused, where it is no fault of the program."""
    said = error.strerror
    if isinstance(error, (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError)):
        _leave(f"{error.filename}: {said}; give a path that can be read and written", 2)
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        _leave(f"{str(error.filename)[:100]}: {said}; give another path", 2)
    if error.errno == errno.ENOSPC:
        _leave(f"the disk is full: no room for {error.filename or 'more'}; make some; {interrupted}", 1)
    if error.errno in DISK:
        _leave(f"{error.filename}: {said}; {interrupted}", 1)
    raise error


def _write_summary(stdout, summary):
    line = json.dumps(finite(summary), ensure_ascii=False) + "\n"
    rest = line.encode(errors="backslashreplace")  # as JSON does it
    try:
        while rest:
            rest = rest[os.write(stdout, rest) :]
    except BrokenPipeError:
        pass  # whoever was to read it has gone; the work is done
    except OSError as error:
        _leave("the work is done, but its summary cannot be written to standard output "
               f"({error.strerror}); send that elsewhere", 1)


def say(*words):
    """One line on stderr, from rank 0 only; a progress bar in progress is not torn."""
    if RANK == 0:
        tqdm.write(" ".join(str(word) for word in words), file=sys.stderr)
        sys.stderr.flush()


def finite(value):
    """`value` with every non-finite float replaced by None: JSON knows no NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def split_words(flag, text):
    """The words of `text`, quoted as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{flag} {text} cannot be split into words ({error}); balance its quotes") from None


def reminder(first=60.0):
    """A function that says its words of a wait at most once a minute, and not within `first` seconds."""
    due = time.monotonic() + first

    def remind(words):
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + 60.0
            say(words)

    return remind


class Progress:
    """A bar on stderr when that is a terminal, otherwise a plain line every `every` seconds."""

    def __init__(self, total, unit, title, every=20.0, done=0, expected=None):
        """expected: seconds that all of it will take, as far as is known; a fiftieth of the work outweighs
        it."""
        self.expected, self.title, self.unit, self.every = expected, title, unit, every
        terminal = RANK == 0 and sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=done, unit=unit, desc=title, file=sys.stderr,
                        disable=not terminal, dynamic_ncols=True,
                        unit_scale=True)
        self.plain = RANK == 0 and not terminal
        self.total, self.done, self.before = total, done, done
        self.start = self.spoke = time.monotonic()

    def update(self, amount, note=""):
        self.done += amount
        self.bar.update(amount)
        if note:
            self.bar.set_postfix_str(note)
        now = time.monotonic()
        if not self.plain or now - self.spoke < self.every:
            return
        self.spoke = now
        rate = (self.done - self.before) / max(now - self.start, 1e-9)
        left = f", {self.seconds_left():.0f} s left" if self.total else ""
        of = f"/{self.total}" if self.total else ""
        speed = f"{rate:.1f} {self.unit}/s" if rate >= 1 else f"{1 / max(rate, 1e-9):.1f} s each"
        say(f"{self.title}: {self.done}{of} {self.unit}, {speed}{left}{', ' + note if note else ''}")

    def seconds_left(self):
        """Until `total`, at the speed since this object was made."""
        seconds, done = time.monotonic() - self.start, self.done - self.before
        if self.expected:
            seconds, done = seconds + self.expected / 50, done + (self.total - self.before) / 50
        return max(self.total - self.done, 0) * seconds / max(done, 1e-9)

    def close(self):
        self.bar.close()


def in_range(low, high=math.inf, low_too=False, kind=float):
    """argparse type: a finite number above `low` (or at least `low`) and at most `high`."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not ((low <= value if low_too else low < value) and value <= high and value < math.inf):
            wanted = f"{'of at least' if low_too else 'above'} {low}"
            if high != math.inf:
                wanted += f" and at most {high}"
            raise argparse.ArgumentTypeError(f"{text} is no {'integer' if kind is int else 'number'} "
                                             f"{wanted}")
        return value

    parse.kind = kind  # --help tells integers by it
    return parse


positive_int = in_range(1, low_too=True, kind=int)


def human_bytes(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
