"""What a recording holds beside its rows: channels, texts, anchors, session keys, its first and last time."""

from __future__ import annotations

import sqlite3
import sys
from dataclasses import dataclass, field
from typing import Any

from opusmon.clock import Anchor, Anchors
from opusmon.recording.rollup import stored_dtype
from opusmon.recording.store import I64_MAX, Mark, clamp
from opusmon.schema import MAX_TEXT_CHARS, Channel, SchemaError, StringTable

MAX_CHANNELS = 1024
MAX_SCHEMA_CHARS = 262_144
MAX_STRINGS = 1_000_000
MAX_ANCHORS = 1_000_000
MAX_SESSION_KEYS = 1000
MAX_MARKS = 1_000_000
MAX_TEXT_ID = 2**32 - 1
MAX_TEXT_B = 64 * 1024 * 1024
"""Memory that the texts of a file, or its marks, or its channel descriptions may take."""

MAX_WARNINGS = 100
MAX_WARNING_CHARS = 200

_LAST_T1 = """
SELECT max(t1) FROM chunk WHERE channel=:c AND t0 >=
    (SELECT max(t0) FROM chunk WHERE channel=:c) - COALESCE((SELECT max_ns FROM span WHERE channel=:c), 4611686018427387904)
"""


@dataclass(slots=True)
class TextBudget:
    """How much more text is taken from a file: a short file may claim a lot of it, over and over the same.

    Attributes:
        left_b: bytes of memory left.
    """

    left_b: int = MAX_TEXT_B

    def take(self, *texts: str) -> bool:
        """Count texts; whether there was room for them."""
        if self.left_b > 0:
            self.left_b -= sum(map(sys.getsizeof, texts))
        return self.left_b > 0


@dataclass(slots=True)
class Catalog:
    """The small tables of a recording, in memory; `load` adds what is new.

    Attributes:
        channels: by name.
        ids: the file's number of each channel.
        strings: the texts that rows refer to.
        anchors: both clocks.
        session: facts about the session.
        warnings: one line for each part that cannot be used.
        t0: time of the first row, monotonic ns, 0 without rows.
        t1: time of the last row.
    """

    channels: dict[str, Channel] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    strings: StringTable = field(default_factory=StringTable)
    anchors: Anchors = field(default_factory=Anchors)
    session: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    t0: int = 0
    t1: int = 0
    _last_channel: int = -1
    _last_string: int = 0
    _text: TextBudget = field(default_factory=TextBudget)
    _described: TextBudget = field(default_factory=TextBudget)

    def load(self, connection: sqlite3.Connection) -> bool:
        """Read what was added since the last call; whether there was anything.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        before = (
            len(self.channels),
            self._last_string,
            len(self.anchors),
            self.t0,
            self.t1,
            dict(self.session),
        )
        self._load_channels(connection)
        self._load_strings(connection)
        self._load_anchors(connection)
        self._load_session(connection)
        self._load_range(connection)
        return before != (
            len(self.channels),
            self._last_string,
            len(self.anchors),
            self.t0,
            self.t1,
            self.session,
        )

    def _load_channels(self, connection: sqlite3.Connection) -> None:
        found = connection.execute(
            "SELECT id, substr(name, 1, 80), substr(schema_json, 1, ?) FROM channel WHERE id>? ORDER BY id LIMIT ?",
            (MAX_SCHEMA_CHARS, self._last_channel, MAX_CHANNELS),
        )
        for number, name, text in found:
            if not all_ints(number):
                continue
            self._last_channel = max(self._last_channel, number)
            try:
                channel = read_channel(str(text))
            except SchemaError as error:
                self._warn(f"channel {str(name)!r} cannot be read: {error}")
                continue
            room = len(self.channels) < MAX_CHANNELS and self._described.take(str(text) * 4)
            if channel.name in self.channels or not room:
                self._warn(f"channel {channel.name[:80]!r} is not shown: its description is unusable")
                continue
            self.channels[channel.name] = channel
            self.ids[channel.name] = number

    def _load_strings(self, connection: sqlite3.Connection) -> None:
        found = connection.execute(
            "SELECT rowid, id, substr(text, 1, ?) FROM string WHERE rowid>? ORDER BY rowid LIMIT ?",
            (MAX_TEXT_CHARS, self._last_string, MAX_STRINGS),
        )
        for row, number, text in found:
            if not all_ints(row, number) or not 0 <= number <= MAX_TEXT_ID:
                continue
            if len(self.strings) >= MAX_STRINGS or not self._text.take(str(text)):
                if self._last_string < I64_MAX:
                    self._warn("some texts are not shown: there are too many")
                self._last_string = I64_MAX
                return
            self._last_string = max(self._last_string, row)
            self.strings.put(number, str(text))

    def _load_session(self, connection: sqlite3.Connection) -> None:
        found = connection.execute(
            "SELECT substr(key, 1, :chars), substr(value, 1, :chars) FROM session LIMIT :most",
            {"chars": MAX_TEXT_CHARS, "most": MAX_SESSION_KEYS},
        )
        self.session.update({str(key): str(value) for key, value in found})

    def _warn(self, warning: str) -> None:
        """Tell the user something about the file, in a line of bearable length."""
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(warning[:MAX_WARNING_CHARS])

    def _load_anchors(self, connection: sqlite3.Connection) -> None:
        last = self.anchors.last
        found = connection.execute(
            "SELECT monotonic, realtime, step FROM clock WHERE monotonic>? ORDER BY monotonic LIMIT ?",
            (-(2**63) if last is None else last.t, MAX_ANCHORS - len(self.anchors)),
        )
        for t, wall_ns, step_ns in found:
            if all_ints(t, wall_ns, step_ns):
                self.anchors.add(Anchor(t, wall_ns, step_ns))

    def _load_range(self, connection: sqlite3.Connection) -> None:
        firsts: list[int] = []
        lasts: list[int] = []
        for number in self.ids.values():
            first = connection.execute("SELECT min(t0) FROM chunk WHERE channel=?", (number,)).fetchone()[0]
            last = connection.execute(_LAST_T1, {"c": number}).fetchone()[0]
            if all_ints(first, last):
                firsts.append(first)
                lasts.append(last)
        self.t0, self.t1 = min(firsts, default=0), max(lasts, default=0)


def read_marks(connection: sqlite3.Connection, t0: int | None, t1: int | None) -> list[Mark]:
    """Marks that touch `t0 <= t <= t1`, by start; None leaves a side open.

    Raises:
        sqlite3.Error: the file cannot be read.
    """
    found = connection.execute(
        "SELECT t0, t1, substr(kind, 1, :chars), substr(text, 1, :chars) FROM mark "
        "WHERE (:a IS NULL OR t1>=:a) AND (:b IS NULL OR t0<=:b) LIMIT :most",
        {
            "chars": MAX_TEXT_CHARS,
            "a": None if t0 is None else clamp(t0),
            "b": None if t1 is None else clamp(t1),
            "most": MAX_MARKS,
        },
    )
    marks: list[Mark] = []
    budget = TextBudget()
    for first, last, kind, text in found:
        if not budget.take(str(kind), str(text)):
            break
        if all_ints(first, last):
            marks.append(Mark(first, last, str(kind), str(text)))
    # Sorted here: SQLite would put all texts into a temporary file first.
    return sorted(marks, key=lambda mark: mark.t0)


def read_channel(text: str) -> Channel:
    """A channel from its description in a file.

    Raises:
        SchemaError: it is none, has a name no terminal should see, or cannot be summarised.
    """
    channel = Channel.from_json(text)
    if not channel.name or not channel.name.isprintable():
        raise SchemaError(f"its name {channel.name[:80]!r} has control characters")
    try:
        stored_dtype(channel)
    except ValueError as error:
        raise SchemaError(f"it cannot be summarised: {error}") from error
    return channel


def all_ints(*values: Any) -> bool:
    """Whether stored values are integers, as they should be."""
    return all(isinstance(value, int) for value in values)
