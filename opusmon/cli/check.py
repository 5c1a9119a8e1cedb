"""`opusmon check`: what keeps the user's own torch code off the fast path."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opusmon.cli.words import ERROR, FINDINGS, OK, UsageError, duration_ns
from opusmon.text import counted

if TYPE_CHECKING:
    from opusmon.checks.result import Result

DESCRIPTION = """\
Runs your own torch code in a child process, away from the server, and says what keeps it off the fast path.

TARGET is module:callable or file.py:callable. It is called without arguments, or with those of --bucket, and returns
(fn, inputs) or (module, inputs). Inputs are a tuple of arguments or a dict; a list of them is one bucket of shapes each.
"""

EPILOG = """\
exit status: 0 clean (static: nothing was measured), 1 could not run, 2 usage, 3 problems found
"""


def arguments(check: argparse.ArgumentParser) -> None:
    """Add the checks and their options to the parser of the verb."""
    check.description = DESCRIPTION
    check.epilog = EPILOG
    check.formatter_class = argparse.RawDescriptionHelpFormatter
    names = check.add_subparsers(metavar="CHECK", title="checks", dest="check", required=True)
    _with_target(
        _check(names, "graph", "can this be captured as a CUDA Graph, and if not, which line breaks it?")
    )
    _with_target(
        _check(names, "compile", "what torch.compile makes of this: graph breaks, recompiles, operators")
    )
    _kv_layout(
        _check(names, "kv-layout", "does this KV cache fit the attention kernels, or is it copied each step?")
    )
    _with_target(_check(names, "triton", "what Triton compiles and tunes for this, and why again"))
    _init(_check(names, "init", "what first use costs on this host, and in which order it is safe"))


def _whole(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number of an option."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text[:10]) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most:,}")
        return int(text)

    return read


_count = _whole(1, 999_999_999)


def _check(
    names: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help_text: str
) -> argparse.ArgumentParser:
    parser = names.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:])
    parser.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,  # what stands before the name of the check counts too
        help="show a traceback instead of one line",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter that has torch (default the one that runs opusmon)",
    )
    parser.add_argument(
        "--time-limit", default="5m", metavar="TIME", help="end the child after this long (default 5m)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--mark", type=Path, metavar="FILE", help="add what was found to this recording, as marks"
    )
    parser.add_argument("--mark-at", metavar="TIME", help="at this time of it (default its end)")
    return parser


def _init(parser: argparse.ArgumentParser) -> None:
    from opusmon.checks.init_parts import MAX_THREADS, PARTS

    parser.add_argument(
        "--repeats",
        type=_whole(1, 1_000_000),
        default=20,
        metavar="N",
        help="fresh processes for each capture and race (default 20; a proof takes 1000)",
    )
    parser.add_argument(
        "--threads",
        type=_whole(2, MAX_THREADS),
        default=8,
        metavar="N",
        help="threads that race (default 8)",
    )
    parser.add_argument(
        "--device", type=_whole(0, 1023), default=0, metavar="N", help="CUDA's number of the GPU (default 0)"
    )
    parser.add_argument(
        "--at-once",
        type=_whole(1, 64),
        metavar="N",
        help="processes at a time (default a quarter of the cores, at most 4)",
    )
    parser.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        metavar="PART",
        help=f"only this: {', '.join(PARTS)} (repeatable)",
    )


def _with_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="module:callable or file.py:callable")
    parser.add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="call TARGET with these values, one bucket of shapes each (repeatable)",
    )


def _kv_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="SOURCE",
        nargs="?",
        help="a dump (.pt, .safetensors), or a TARGET that returns (k, v[, q[, page_table]]) or a dict of tensors",
    )
    tensors = parser.add_argument_group("tensors, by name (default the usual names)")
    for name, help_text in (
        ("k", "keys"),
        ("v", "values"),
        ("kv", "one tensor that holds both"),
        ("q", "queries"),
        ("page-table", "page table"),
        ("q-descale", "scale of FP8 queries"),
        ("k-descale", "scale of FP8 keys"),
        ("v-descale", "scale of FP8 values"),
    ):
        tensors.add_argument(f"--{name}", metavar="NAME", help=help_text)
    parser.set_defaults(recorder=[sys.executable, "-P", "-m", "opusmon"])
    _kv_call(parser.add_argument_group("how they are used"))
    _kv_tile(parser.add_argument_group("bank conflicts of a tile in shared memory"))


def _kv_call(group: argparse._ArgumentGroup) -> None:
    layouts = ("auto", "dense", "varlen", "paged", "nhd", "hnd", "vllm", "sglang")
    group.add_argument("--layout", choices=layouts, default="auto", help="order of dimensions (default auto)")
    group.add_argument("--page-size", type=_count, metavar="N", help="tokens of a page; makes it paged")
    group.add_argument(
        "--dtype", metavar="NAME", help="what q, K and V of uint8 are viewed as, for example float8_e4m3fn"
    )
    group.add_argument(
        "--build",
        choices=("upstream", "vllm"),
        help="whose FlashAttention-3 (default upstream; vllm with --layout vllm)",
    )
    group.add_argument(
        "--mask", choices=("full", "causal", "local"), help="attention mask (default all three)"
    )
    group.add_argument("--q-heads", type=_count, metavar="N", help="heads of q, without --q")
    group.add_argument(
        "--seqlen-q", type=_count, metavar="N", help="query tokens of a sequence; 1 when decoding"
    )
    group.add_argument("--softcap", action="store_true", help="scores are capped")
    group.add_argument(
        "--appends", action="store_true", help="the kernel writes new keys, or pads on the left"
    )
    group.add_argument("--layers", type=_count, default=1, metavar="N", help="calls of a step (default 1)")


def _kv_tile(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tile", metavar="ROWSxCOLS", help="for example 128x64; needs no SOURCE")
    group.add_argument(
        "--elem", action="append", choices=("bf16", "fp8", "fp32"), help="element (default bf16 and fp8)"
    )
    group.add_argument(
        "--swizzle", choices=("none", "32B", "64B", "128B"), help="pattern of the tile (default all)"
    )
    group.add_argument(
        "--access", choices=("row", "column", "ldmatrix"), help="how a warp reads it (default all)"
    )
    group.add_argument(
        "--pad", type=_count, metavar="BYTES", help="padding after each row, without a swizzle"
    )
    group.add_argument(
        "--width",
        type=_count,
        choices=(1, 2, 4, 8, 16),
        metavar="BYTES",
        help="what a lane loads: 1, 2, 4, 8 or 16",
    )


_NOT_OPTIONS = frozenset({"run", "check", "python", "time_limit", "json", "mark", "mark_at", "bucket"})


def check(args: argparse.Namespace) -> int:
    """`opusmon check`."""
    from opusmon.checks.kv_load import itemsize_of
    from opusmon.checks.report import as_text
    from opusmon.checks.result import to_json
    from opusmon.checks.run import run
    from opusmon.checks.target import TargetError, parse_buckets

    options: dict[str, Any] = {name: value for name, value in vars(args).items() if name not in _NOT_OPTIONS}
    try:
        if "bucket" in args:
            options["buckets"] = parse_buckets(args.bucket)
        if options.get("dtype") is not None:
            itemsize_of(options["dtype"])
    except TargetError as error:
        raise UsageError(str(error)) from error
    if args.mark is None and args.mark_at is not None:
        raise UsageError("--mark-at says where in a recording: name it with --mark FILE")
    at = _mark_at(args.mark, args.mark_at) if args.mark is not None else 0
    limit_s = duration_ns("--time-limit", args.time_limit) / 1e9
    with _ending_in_order():
        result = run(args.check, options, python=args.python, limit_s=limit_s)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(json.dumps(to_json(result), indent=2) + "\n" if args.json else as_text(result, columns), end="")
    if args.mark is not None:
        _mark(args.mark, at, result)
    if result.error:
        return ERROR
    return OK if result.clean else FINDINGS


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """A lost terminal or a kill ends the child too, and takes its files away, as Ctrl-C does."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        # What nohup ignores stays so; and only the main thread may say what a signal does.
        if signal.getsignal(number) is signal.SIG_DFL
        and threading.current_thread() is threading.main_thread()
    ]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _mark_at(path: Path, at: str | None) -> int:
    """Where the marks go, monotonic ns. Before the check runs: a wrong name is no reason to run it again."""
    from opusmon.cli.words import open_recording
    from opusmon.recording.append import need_finished
    from opusmon.times import parse_time

    with open_recording(path) as recording:
        need_finished(recording)
        if at is None:
            return recording.t1
        return parse_time(at, anchors=recording.anchors, t0=recording.t0, t1=recording.t1)


def _mark(path: Path, t: int, result: Result) -> None:
    """Add the verdict and each problem to a recording."""
    from opusmon.checks.report import headline, verdict
    from opusmon.recording.append import add_marks
    from opusmon.recording.store import Mark

    head = f"check {result.check}"
    target = f" {result.target}" if result.target else ""
    texts = [f"{head}{target}: {verdict(result)}"]
    texts += [f"{head}: {headline(problem)}" for problem in result.problems]
    add_marks(path, [Mark(t, t, "check", text) for text in texts])
    print(f"opusmon: {counted(len(texts), 'mark')} added to {path}", file=sys.stderr)
