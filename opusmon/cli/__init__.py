"""argv -> a session and what is done with it. No logic of its own; heavy imports wait until a verb needs them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from opusmon import config
from opusmon.cli import arguments
from opusmon.cli.words import ERROR, OK, CliError
from opusmon.text import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run opusmon; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, verbs = arguments.parser()
    if not words or (words[0] not in verbs and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "live")
    # Text ids, paths and threads never need many threads of linear algebra: one keeps memory and start small.
    # The user's own code, which `check` runs, is left as it is.
    if words[0] != "check":
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    debug = "--debug" in words
    try:
        if words[0] in ("live", "record"):
            verbs[words[0]].set_defaults(**config.defaults(screen=words[0] == "live"))
        args = parser.parse_args(_join_times(words))
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        if debug or not _expected(error):
            raise
        print(f"opusmon: {printable(str(error))}", file=sys.stderr)
        return ERROR
    return status


def _join_times(words: list[str]) -> list[str]:
    """Write `--from -10m` as `--from=-10m`: argparse would take the time for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--at", "--from", "--to", "--mark-at") and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _expected(error: Exception) -> bool:
    """Whether the text of an error is meant for the user."""
    from opusmon.config import ConfigError
    from opusmon.recording import RecordingError
    from opusmon.session import NothingToWatch
    from opusmon.sudo import SudoRefused
    from opusmon.times import TimeError

    if type(error).__name__ in (
        "CanaryRefused",
        "LimitError",
        "ExplainError",
    ):  # known without loading their modules
        return True
    expected = CliError | ConfigError | RecordingError | NothingToWatch | SudoRefused | TimeError | OSError
    return isinstance(error, expected)
