"""What a recording holds beside its rows: channels, texts, anchors, session keys, its first and last time."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import Any

from opusmon.clock import Anchor, Anchors
from opusmon.recording.store import Mark, clamp
from opusmon.schema import MAX_TEXT_CHARS, Channel, SchemaError, StringTable

MAX_CHANNELS = 1024
MAX_SCHEMA_CHARS = 262_144
MAX_STRINGS = 1_000_000
MAX_ANCHORS = 1_000_000
MAX_SESSION_KEYS = 1000
MAX_MARKS = 1_000_000
MAX_TEXT_ID = 2**32 - 1

_LAST_T1 = """
SELECT max(t1) FROM chunk WHERE channel=:c AND t0 >=
    (SELECT max(t0) FROM chunk WHERE channel=:c) - COALESCE((SELECT max_ns FROM span WHERE channel=:c), 4611686018427387904)
"""


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
        rows = connection.execute("SELECT key, value FROM session").fetchmany(MAX_SESSION_KEYS)
        self.session.update({str(key): str(value) for key, value in rows})
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
            "SELECT id, name, substr(schema_json, 1, ?) FROM channel WHERE id>? ORDER BY id",
            (MAX_SCHEMA_CHARS, self._last_channel),
        ).fetchmany(MAX_CHANNELS)
        for number, name, text in found:
            self._last_channel = max(self._last_channel, number)
            try:
                channel = Channel.from_json(str(text))
            except SchemaError as error:
                self.warnings.append(f"channel {str(name)[:80]!r} cannot be read: {error}")
                continue
            if channel.name in self.channels or len(self.channels) >= MAX_CHANNELS or "n" in channel.key:
                self.warnings.append(
                    f"channel {channel.name[:80]!r} is not shown: its description is unusable"
                )
                continue
            self.channels[channel.name] = channel
            self.ids[channel.name] = number

    def _load_strings(self, connection: sqlite3.Connection) -> None:
        found = connection.execute(
            "SELECT rowid, id, substr(text, 1, ?) FROM string WHERE rowid>? ORDER BY rowid",
            (MAX_TEXT_CHARS, self._last_string),
        ).fetchmany(MAX_STRINGS)
        for row, number, text in found:
            self._last_string = max(self._last_string, row)
            if isinstance(number, int) and 0 <= number <= MAX_TEXT_ID and len(self.strings) < MAX_STRINGS:
                self.strings.put(number, str(text))

    def _load_anchors(self, connection: sqlite3.Connection) -> None:
        last = self.anchors.last
        found = connection.execute(
            "SELECT monotonic, realtime, step FROM clock WHERE monotonic>? ORDER BY monotonic",
            (-(2**63) if last is None else last.t,),
        ).fetchmany(MAX_ANCHORS)
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
    """Marks that touch `t0 < t <= t1`, by start; None leaves a side open.

    Raises:
        sqlite3.Error: the file cannot be read.
    """
    found = connection.execute(
        "SELECT t0, t1, kind, substr(text, 1, :chars) FROM mark "
        "WHERE (:a IS NULL OR t1>:a) AND (:b IS NULL OR t0<=:b) ORDER BY t0, id",
        {
            "chars": MAX_TEXT_CHARS,
            "a": None if t0 is None else clamp(t0),
            "b": None if t1 is None else clamp(t1),
        },
    ).fetchmany(MAX_MARKS)
    return [Mark(a, b, str(kind)[:MAX_TEXT_CHARS], str(text)) for a, b, kind, text in found if all_ints(a, b)]


def all_ints(*values: Any) -> bool:
    """Whether stored values are integers, as they should be."""
    return all(isinstance(value, int) for value in values)
