"""argv -> a session and what is done with it. No logic of its own; heavy imports wait until a verb needs them."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opusmon import config
from opusmon.cli import arguments
from opusmon.cli.words import ERROR, OK, USAGE, CliError, UsageError
from opusmon.paths import is_there
from opusmon.text import printable, reason_of

_UNWRITTEN = frozenset({errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC})


def main(argv: Sequence[str] | None = None) -> int:
    """Run opusmon; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, verbs = arguments.parser()
    first = words[0] if words else ""
    if not words or (words[0] not in verbs and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "live")
    # Text ids, paths and threads never need many threads of linear algebra: one keeps memory and start small.
    # The user's own code, which `check` runs, is left as it is.
    if words[0] != "check":
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    debug = "--debug" in words
    _stand_in()
    status, whence = OK, ""
    defaults: Mapping[str, Any] = {}
    try:
        if words[0] in ("live", "record"):
            defaults = config.defaults(screen=words[0] == "live")
            verbs[words[0]].set_defaults(**defaults)
            # A value that cannot be used may be one that nobody has typed.
            whence = f" (options of {config.path()} are in force)" if defaults else ""
        try:
            args = _parse(parser, verbs, words, first)
            _typed_replaces(args, defaults)
            status = args.run(args)
        except SystemExit:  # the help was asked for, or a word cannot be used
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_unwritten()
    except Exception as error:
        if debug or not _expected(error):
            raise
        if isinstance(error, config.ConfigError):
            whence = ""  # it names its file
        print(f"opusmon: {printable(_line(error))}{whence}", file=sys.stderr)
        _drop_unwritten()
        return _status(error)
    return status


def _typed_replaces(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Take what is in a list by default out of it where words were typed: argparse adds them to it."""
    for name, default in defaults.items():
        said = getattr(args, name)
        if isinstance(default, list) and len(said) > len(default):
            setattr(args, name, said[len(default) :])


def _parse(
    parser: argparse.ArgumentParser,
    verbs: Mapping[str, argparse.ArgumentParser],
    words: Sequence[str],
    first: str,
) -> argparse.Namespace:
    """What the words say; ends the program with status 2 where they say nothing, with the usage of their verb.

    Args:
        parser: of all verbs.
        verbs: the parser of each.
        words: a verb and its words.
        first: the first word as it was typed; `live` stands before one that is no verb.
    """
    args, unknown = parser.parse_known_args(_join_times(list(words)))
    if unknown and unknown[0] == first and not first.startswith("-"):
        parser.error(_no_verb(first))
    if unknown:
        verbs[words[0]].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _no_verb(word: str) -> str:
    """What is said of a first word that is no verb; many programs take a file there."""
    if is_there(Path(word)):
        return f"there is no verb {word!r}; to look at a recording: opusmon replay {word}"
    return f"there is no verb {word!r}; opusmon --help lists them"


def _line(error: Exception) -> str:
    """What is said of an error: its text where that is meant for the user, else what the system refused."""
    if not isinstance(error, OSError):
        return str(error)
    if error.filename is not None:
        return f"{error.filename}: {reason_of(error)}"
    # Files are opened by name, and what a full one refuses is said by who writes it: what is left is print.
    return f"cannot write to stdout: {reason_of(error)}" if error.errno in _UNWRITTEN else reason_of(error)


def _stand_in() -> None:
    """Put something in the place of a standard stream that is closed (`>&-`).

    A recording must not become file number 1, and Python prints to stdout what is meant for a missing stderr.
    Writing to the stand-in for stdout fails: whoever asked for data must learn that there is none.
    """
    for name, how in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, how)
            os.set_inheritable(file, True)
            setattr(sys, name, os.fdopen(file, "r" if name == "stdin" else "w"))


def _drop_unwritten() -> None:
    """Forget what stdout does not take: Python would complain of it at the end, and make the status its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _join_times(words: list[str]) -> list[str]:
    """Write `--from -10m` as `--from=-10m`: argparse would take the time for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--at", "--from", "--to", "--mark-at") and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _status(error: Exception) -> int:
    """As argparse has it where a word cannot be used, so that a script can tell that from what went wrong."""
    from opusmon.session import NoSuchCollector
    from opusmon.times import TimeError

    if isinstance(error, UsageError | NoSuchCollector | TimeError) or type(error).__name__ == "CanaryRefused":
        return USAGE
    return ERROR


def _expected(error: Exception) -> bool:
    """Whether the text of an error is meant for the user."""
    from opusmon.config import ConfigError
    from opusmon.recording import RecordingError
    from opusmon.session import NothingToWatch
    from opusmon.sudo import SudoRefused
    from opusmon.times import TimeError

    if type(error).__name__ in (
        "CanaryRefused",
        "ExplainError",
    ):  # known without loading their modules
        return True
    expected = CliError | ConfigError | RecordingError | NothingToWatch | SudoRefused | TimeError | OSError
    return isinstance(error, expected)
