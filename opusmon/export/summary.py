"""What a recording holds, for `opusmon info`: as a document for programs and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import tzinfo
from pathlib import Path
from typing import Any, Protocol

from opusmon.channels import GPU_DEVICE, WHOLE_GPU
from opusmon.clock import NS
from opusmon.export.rows import RowSource
from opusmon.text import counted, printable
from opusmon.times import format_duration, format_iso

_LABEL_COLUMNS = 10
_NOT_CLOSED = "no: being written, its writer was killed, or it was copied while it was written"


class SummarySource(RowSource, Protocol):
    """What is summarised; a `Recording` is one."""

    @property
    def session(self) -> Mapping[str, str]:
        """What the file says of its host and its writer."""
        ...

    @property
    def t0(self) -> int:
        """First instant, monotonic ns."""
        ...

    @property
    def t1(self) -> int:
        """Last instant, monotonic ns."""
        ...

    @property
    def size_b(self) -> int:
        """Bytes on disk."""
        ...

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the writer closed it."""
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """What was wrong with it, one line each."""
        ...

    @property
    def damaged_chunks(self) -> int:
        """Chunks met so far that could not be read."""
        ...

    def marks(self, t0: int | None = None, t1: int | None = None) -> Sequence[tuple[int, int, str, str]]:
        """(t0, t1, kind, text) of the marks in a time range; None leaves a side open."""
        ...


def summary(recording: SummarySource, tz: tzinfo | None = None) -> dict[str, Any]:
    """The facts about a recording; values are JSON types, times ISO 8601 in `tz` (None: this machine's zone).

    Without rows there is no `start` and no `end`: they are null.
    """
    session, anchors = recording.session, recording.anchors
    counts, gpus = _counts(recording), _gpus(recording)
    marks = recording.marks()
    drivers = {str(gpu["driver"]): None for gpu in gpus if gpu["driver"]}
    steps = [anchor for anchor in anchors if anchor.step_ns]
    return {
        "file": str(recording.path),
        "size_b": recording.size_b,
        "start": format_iso(anchors, recording.t0, tz) if recording.t1 else None,
        "end": format_iso(anchors, recording.t1, tz) if recording.t1 else None,
        "duration_s": (recording.t1 - recording.t0) / NS,
        "t0": recording.t0,
        "t1": recording.t1,
        "finished": recording.finished,
        "host": session.get("host", ""),
        "kernel": session.get("kernel", ""),
        "driver": ", ".join(drivers),
        "opusmon": session.get("opusmon", ""),
        "session": dict(session),
        "channels": {
            name: {"kind": channel.kind, "rows": counts.get(name, 0)}
            for name, channel in sorted(recording.channels.items())
        },
        "gpus": gpus,
        "marks": dict(sorted(Counter(kind for _, _, kind, _ in marks).items())),
        "dropped": [text for _, _, kind, text in marks if kind == "drop"],
        "clock_steps": [
            {"time": format_iso(anchors, anchor.t, tz), "step_s": anchor.step_ns / NS} for anchor in steps
        ],
        "damaged_chunks": recording.damaged_chunks,
        "warnings": list(recording.warnings),
    }


def render(facts: Mapping[str, Any]) -> str:
    """The facts as text for a person, without a newline at the end. Names from outside lose control characters."""
    return "\n".join(printable(line) for line in _lines(facts))


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield _line("file", f"{facts['file']}  {_size(facts['size_b'])}")
    if facts["start"] is None:
        yield _line("time", "no rows")
    else:
        yield _line("time", f"{_seconds(facts['start'])} to {_seconds(facts['end'])}")
        yield _line("lasts", format_duration(round(facts["duration_s"] * NS)))
    host = [
        facts["host"] or "unknown host",
        *(f"{key} {facts[key]}" for key in ("kernel", "driver") if facts[key]),
    ]
    yield _line("host", "  ".join(host))
    yield _line("opusmon", facts["opusmon"] or "unknown version")
    yield _line("closed", "yes" if facts["finished"] else _NOT_CLOSED)
    for label, gpu in zip(_labels("gpus"), facts["gpus"], strict=False):
        yield _line(label, f"{gpu['gpu']}  {gpu['name']}  {gpu['uuid']}")
    for label, (name, channel) in zip(_labels("channels"), facts["channels"].items(), strict=False):
        yield _line(label, f"{name:<16}{channel['kind']:<9}{channel['rows']:>12,} rows")
    if facts["marks"]:
        yield _line("marks", ", ".join(f"{count} {kind}" for kind, count in facts["marks"].items()))
    yield from _troubles(facts)


def _troubles(facts: Mapping[str, Any]) -> Iterator[str]:
    """What a reader must know before trusting the numbers; nothing when there is nothing."""
    steps = [f"{step['step_s']:+.3f} s at {_seconds(step['time'])}" for step in facts["clock_steps"]]
    for label, text in zip(_labels("stepped"), steps, strict=False):
        yield _line(label, f"the wall clock by {text}")
    for label, text in zip(_labels("dropped"), facts["dropped"], strict=False):
        yield _line(label, text)
    if facts["damaged_chunks"]:
        chunks = counted(facts["damaged_chunks"], "chunk")
        yield _line("damaged", f"{chunks} could not be read: `opusmon salvage` makes a copy of the rest")
    for label, text in zip(_labels("warning"), facts["warnings"], strict=False):
        yield _line(label, text)


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_COLUMNS}}{text}"


def _labels(first: str) -> Iterator[str]:
    """The label on the first of several lines only."""
    yield first
    while True:
        yield ""


def _counts(recording: SummarySource) -> Mapping[str, int]:
    """Rows per channel: from the file's index when the recording offers it, else by reading."""
    counts = getattr(recording, "counts", None)
    if counts is not None:
        found: Mapping[str, int] = counts()
        return found
    tally: Counter[str] = Counter()
    for batch in recording.batches(recording.t0 - 1, recording.t1):
        tally[batch.channel.name] += len(batch.rows)
    return tally


def _gpus(recording: SummarySource) -> list[dict[str, Any]]:
    """The GPUs as last described in `gpu_device`, in order of origin and index."""
    if GPU_DEVICE.name not in recording.channels:
        return []
    text = recording.strings.text
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for batch in recording.batches(recording.t0 - 1, recording.t1, [GPU_DEVICE.name]):
        if not {"gpu", "gi", "name", "uuid", "driver"} <= set(batch.channel.by_name):
            continue
        for row in batch.rows[batch.rows["gi"] == WHOLE_GPU]:
            index = int(row["gpu"])
            words = {key: text(int(row[key])) for key in ("name", "uuid", "driver")}
            found[batch.origin, index] = {"gpu": index, "origin": batch.origin, **words}
    return [found[key] for key in sorted(found)]


def _size(size_b: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_b >= size:
            return f"{size_b / size:.1f} {unit}"
    return f"{size_b} B"


def _seconds(iso: str) -> str:
    """`2026-11-29 14:03:21 +01:00` of an ISO time with microseconds."""
    return f"{iso[:10]} {iso[11:19]} {iso[26:]}"
