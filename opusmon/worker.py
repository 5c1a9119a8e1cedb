"""A collector in a child process: the same batches, over a pipe.

Used where a facility can hang or crash its caller, or needs root. The child is `opusmon stream`, so the same
source works behind ssh. The parent never waits for a child: one that is stuck in the driver cannot be killed,
and the screen must close all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from opusmon.channels import BY_NAME
from opusmon.clock import Clock, SystemClock
from opusmon.collectors import load, to_words
from opusmon.collectors.base import Collector, Status, Unavailable, status_batch
from opusmon.processes import die_with_parent
from opusmon.schema import Batch, Channel, StringTable
from opusmon.wire import Decoder, Encoder, WireError

SILENT_S = 6.0
"""A child sends something every second; after this long without a byte its pane is told."""
GIVE_UP_S = 60.0
"""After this long without a byte the child is replaced."""
LAST_ROWS_S = 1.0
"""A collector with a `stop` has so long for its last rows."""
_STDERR_B = 4096
_END_S = 0.3


class SourceLost(Exception):  # noqa: N818  (it reads as what happened)
    """A source has ended; it may be started again.

    Attributes:
        why: reason and remedy.
        final: starting it again at once is of no use.
    """

    def __init__(self, why: Unavailable, *, final: bool = False) -> None:
        super().__init__(why.reason)
        self.why = why
        self.final = final


class WorkerSource:
    """A Source that runs in a child process.

    Args:
        name: the collector, as `opusmon stream --only` takes it.
        strings: the session's table; the child's text ids are translated into it.
        argv: the child's command line; by default this interpreter running `opusmon stream`.
        same_terminal: the child keeps our terminal session, by which sudo knows that it may run.
        origin: host the rows come from, "" for this one.
        pids: processes to watch, all of them when empty.
        end_s: how long the child may take to end, once its stdin is closed; 0 kills it at once.

    Attributes:
        last: batches that the child gave out after `batches` was closed or cancelled; whoever did that takes them.
    """

    def __init__(
        self,
        name: str,
        strings: StringTable,
        clock: Clock,
        *,
        argv: Sequence[str] = (),
        same_terminal: bool = False,
        env: Mapping[str, str] | None = None,
        origin: str = "",
        interval_ns: int = 1_000_000_000,
        pids: Sequence[int] = (),
        silent_s: float = SILENT_S,
        give_up_s: float = GIVE_UP_S,
        end_s: float = 0.0,
    ) -> None:
        self.name = name
        self.strings = strings
        self.channels: Sequence[Channel] = tuple(BY_NAME.values())
        self._clock = clock
        self._argv = list(argv) or child_argv(name, interval_ns, pids)
        self._same_terminal = same_terminal
        self._env = dict(env) if env is not None else None
        self._origin = origin
        self._silent_s = silent_s
        self._give_up_s = give_up_s
        self._end_s = end_s
        self.last: list[Batch] = []

    async def batches(self) -> AsyncIterator[Batch]:
        """Batches of one life of the child.

        Raises:
            SourceLost: the child could not start, ended, sent garbage or stayed silent too long.
        """
        try:
            child = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,  # its end of file tells the child that we are gone
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._env,
                # ctrl+c in the terminal is ours alone: a session of its own, or at least a process group.
                start_new_session=not self._same_terminal,
                process_group=0 if self._same_terminal else None,
            )
        except OSError as error:
            raise SourceLost(Unavailable(f"cannot start {self._argv[0]}: {error.strerror}")) from error
        errors = bytearray()
        drain = asyncio.create_task(_drain(child.stderr, errors))
        decoder = Decoder(self.strings, self._origin)
        try:
            async for batch in self._read(child, decoder):
                yield batch
            await asyncio.wait({drain}, timeout=0.5)
            raise SourceLost(Unavailable(f"the {self.name} worker ended{_last_words(errors)}"))
        except (asyncio.CancelledError, GeneratorExit):
            await self._last_rows(child, decoder)
            raise
        finally:
            drain.cancel()
            await _let_go(child)

    async def _last_rows(self, child: asyncio.subprocess.Process, decoder: Decoder) -> None:
        """Tell the child to end, and keep what it gives out until it has."""
        if not self._end_s or child.stdin is None or child.stdout is None:
            return
        child.stdin.close()
        with contextlib.suppress(TimeoutError, WireError):
            async with asyncio.timeout(self._end_s):
                while data := await child.stdout.read(65_536):
                    self.last.extend(decoder.feed(data))

    async def _read(self, child: asyncio.subprocess.Process, decoder: Decoder) -> AsyncIterator[Batch]:
        assert child.stdout is not None  # noqa: S101  (a pipe was asked for)
        # Counted in waits, not by the clock: after ctrl+z both sides were stopped, and nobody was silent.
        silent_s = 0.0
        while True:
            try:
                # Not wait_for: before Python 3.12 it loses a cancellation that comes together with data.
                async with asyncio.timeout(self._silent_s):
                    data = await child.stdout.read(65_536)
            except TimeoutError:
                silent_s += self._silent_s
                if silent_s > self._give_up_s:
                    raise SourceLost(
                        Unavailable(f"the {self.name} worker has been silent for {silent_s:.0f} s")
                    ) from None
                yield self._status(
                    "stale",
                    f"the {self.name} worker has sent nothing for {silent_s:.0f} s; a driver call may hang",
                )
                continue
            if not data:
                break
            if silent_s:
                silent_s = 0.0
                yield self._status("ok", "")
            try:
                for batch in decoder.feed(data):
                    yield batch
            except WireError as error:
                raise SourceLost(Unavailable(f"the {self.name} worker sent garbage: {error}")) from error
        if decoder.unavailable is not None:
            raise SourceLost(Unavailable(*decoder.unavailable), final=True)

    def _status(self, state: str, reason: str) -> Batch:
        return status_batch(self._clock.now(), [Status(self.name, state, reason)], self.strings)


def child_argv(
    name: str, interval_ns: int, pids: Sequence[int] = (), options: Mapping[str, Any] | None = None
) -> list[str]:
    """Command line of a child that streams one collector from this host."""
    argv = [
        sys.executable,
        "-P",  # a file called queue.py in the current folder must not run here, least of all as root
        "-m",
        "opusmon",
        "stream",
        "--only",
        name,
        "--interval",
        f"{interval_ns / 1e9:g}s",
    ]
    argv += [word for pid in pids for word in ("--pid", str(pid))]
    return [*argv, *(word for one in to_words(options or {}) for word in ("--option", one))]


async def _drain(stream: asyncio.StreamReader | None, into: bytearray) -> None:
    """Keep the last 4 KiB of what a child says, so that it never blocks on a full pipe."""
    while stream is not None and (data := await stream.read(4096)):
        into += data
        del into[:-_STDERR_B]


def _last_words(errors: bytes | bytearray) -> str:
    """The last line a child wrote to stderr, as a clause."""
    lines = bytes(errors).decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""


async def _let_go(child: asyncio.subprocess.Process) -> None:
    """End a child; one that is stuck in the kernel and cannot end is left behind."""
    if child.stdin is not None:
        child.stdin.close()
    # One that is just ending is not signalled: that would take its exit status from asyncio, which complains.
    ending = child.stdout is not None and child.stdout.at_eof()
    if not (ending and await _has_ended(child)):
        # A child behind sudo may not be killed; the end of its stdin has told it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            child.kill()
        await _has_ended(child)
    # Closing the transport now is what keeps interpreter exit from waiting for such a child.
    transport = getattr(child, "_transport", None)
    if transport is not None:
        transport.close()


async def _has_ended(child: asyncio.subprocess.Process) -> bool:
    """Whether a child has ended, after a moment if need be."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await child.wait()
            return True
    return False


def serve(
    name: str,
    interval_ns: int,
    *,
    pids: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    compress: bool = False,
) -> int:
    """Run one collector and write its batches to stdout as frames, until stdin ends. The child's side.

    A collector that has a `stop` is then told to, and gives out its last rows; SIGTERM does the same.

    Returns:
        Exit status: 0 when told to stop, 1 when the collector cannot run.
    """
    die_with_parent()
    out = os.dup(1)
    os.dup2(2, 1)  # a stray print of some library must not damage the stream
    strings = StringTable()
    encoder = Encoder(strings, compress=compress)
    _write(out, encoder.hello(socket.gethostname()))
    try:
        collector = load(name)(strings, SystemClock(), interval_ns, frozenset(pids), **(options or {}))
        asyncio.run(_serve(collector, encoder, out))
    except SourceLost as lost:
        _write(out, encoder.unavailable(lost.why.reason, lost.why.remedy))
        return 1
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    return 0


async def _serve(collector: Collector, encoder: Encoder, out: int) -> None:
    why = None
    try:
        pump = asyncio.create_task(_pump(collector.batches(), encoder, out))
        stop: Callable[[], None] | None = getattr(collector, "stop", None)
        gone = asyncio.create_task(_stdin_closed(at_sigterm=stop is not None))
        await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        if stop is not None:
            stop()
            await asyncio.wait({pump}, timeout=LAST_ROWS_S)
        for task in (pump, gone):
            task.cancel()
        if pump.done():
            pump.result()
    except Exception as error:
        why = getattr(error, "why", None)
        if not isinstance(why, Unavailable):
            raise
    if why is not None:
        raise SourceLost(why, final=True)


async def _pump(batches: AsyncIterator[Batch], encoder: Encoder, out: int) -> None:
    async for batch in batches:
        _write(out, encoder.batch(batch))


async def _stdin_closed(*, at_sigterm: bool) -> None:
    """Return at end of file on stdin: the reader has gone, however it went. At SIGTERM too, when that is asked for."""
    gone = asyncio.Event()
    if at_sigterm:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, gone.set)

    def readable() -> None:
        if not os.read(0, 4096):
            asyncio.get_running_loop().remove_reader(0)
            gone.set()

    with contextlib.suppress(OSError, ValueError):  # stdin is a plain file: nothing to watch
        asyncio.get_running_loop().add_reader(0, readable)
    await gone.wait()


def _write(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]
