"""Times as people type them. Expected values come from calendars and `date -d`, not from the module."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.clock import NS, Anchor, Anchors
from opusmon.times import TimeError, format_duration, format_iso, format_wall, parse_duration, parse_time

BERLIN = ZoneInfo("Europe/Berlin")
NEW_YORK = ZoneInfo("America/New_York")
MINUTE = 60 * NS
HOUR = 60 * MINUTE
DAY = 24 * HOUR
BOOT = 5_000 * NS
"""Uptime when the sessions of these tests begin."""


def epoch(text: str) -> int:
    """Epoch ns of an ISO 8601 time with offset."""
    return int(datetime.fromisoformat(text).timestamp()) * NS


def session(start: str, lasts: int) -> dict[str, object]:
    """Arguments for a session with one anchor that begins at `start` and lasts so many ns."""
    return {"anchors": Anchors([Anchor(BOOT, epoch(start))]), "t0": BOOT, "t1": BOOT + lasts, "tz": UTC}


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("10m", 600 * NS),
        ("90s", 90 * NS),
        ("90", 90 * NS),
        ("1.5", 1_500_000_000),
        (".5", 500_000_000),
        ("1h30m", 5_400 * NS),
        ("1h 30m", 5_400 * NS),
        ("500ms", 500_000_000),
        ("10m20s", 620 * NS),
        ("2d", 172_800 * NS),
        ("250us", 250_000),
        ("250µs", 250_000),
        ("7ns", 7),
        ("3 minutes", 180 * NS),
        ("0:30", 30 * NS),
        ("00:15", 15 * NS),
        ("1:02:03.5", 3_723_500_000_000),
        ("71 s", 71 * NS),
        ("0", 0),
    ],
)
def test_durations(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize(
    "text",
    [
        "",
        "m",
        "10x",
        "-90s",
        "1m1m",
        "1:75",
        "1e9",
        "nan",
        "inf",
        "10m foo",
        "9" * 30,
        "9" * 5000,
        "\N{ARABIC-INDIC DIGIT ONE}",
        "300000d",
    ],
)
def test_what_is_no_duration_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(TimeError, match="is not a duration: use 10m") as caught:
        parse_duration(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 130


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_500, "1.5 us"),
        (17_200_000, "17.2 ms"),
        (84_249_000, "84.2 ms"),
        (999_600_000, "1 s"),
        (1_944_000_000, "1.94 s"),
        (9_996_000_000, "10 s"),
        (71 * NS, "71 s"),
        (119_400_000_000, "119 s"),
        (119_600_000_000, "2m"),
        (320 * NS, "5m20s"),
        (3_599_700_000_000, "1h"),
        (3 * HOUR + 12 * MINUTE, "3h12m"),
        (DAY - 1, "1d"),
        (51 * HOUR, "2d3h"),
        (-71 * NS, "-71 s"),
    ],
)
def test_durations_are_written_short(ns: int, text: str) -> None:
    assert format_duration(ns) == text


@given(st.integers(0, 400 * DAY))
def test_a_written_duration_reads_back_within_its_digits(ns: int) -> None:
    text = format_duration(ns)
    assert abs(parse_duration(text) - ns) <= max(ns * 0.021, 0)  # worst case: 1d30m is written 1d
    assert len(text) <= 8


@given(st.integers(0, 10**18), st.sampled_from(["ns", "us", "ms", "s", "m", "h", "d"]))
def test_whole_numbers_of_a_unit_are_exact(count: int, unit: str) -> None:
    size = {"ns": 1, "us": 10**3, "ms": 10**6, "s": NS, "m": MINUTE, "h": HOUR, "d": DAY}[unit]
    if count * size < 2**63:
        assert parse_duration(f"{count}{unit}") == count * size
    else:
        with pytest.raises(TimeError):
            parse_duration(f"{count}{unit}")


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("10m", 600 * NS),
        ("+90s", 90 * NS),
        ("90", 90 * NS),
        ("+0:30", 30 * NS),
        ("start", 0),
        ("end", HOUR),
        ("-90s", HOUR - 90 * NS),
        ("\N{MINUS SIGN}90s", HOUR - 90 * NS),
        ("-0:30", HOUR - 30 * NS),
        ("3m ago", HOUR - 180 * NS),
        ("14:03", 3 * MINUTE),
        ("14:03:21", 201 * NS),
        ("14:03:21.5", 201_500_000_000),
        ("14:03:21.123456789", 201_123_456_789),
        ("2026-11-29T14:03", 3 * MINUTE),
        ("2026-11-29 14:03:21", 201 * NS),
        ("2026-11-29T14:03:21.5Z", 201_500_000_000),
        ("2026-11-29T15:03:21+01:00", 201 * NS),
        ("20261129T140321", None),
        ("2026-11-29", 0),
        ("today 14:30", 30 * MINUTE),
        ("1795961001", 201 * NS),
        ("1795961001.25", 201_250_000_000),
        ("1795961001250", 201_250_000_000),
        ("1795961001250000", 201_250_000_000),
        ("1795961001250000001", 201_250_000_001),
        (" 14:03 ", 3 * MINUTE),
    ],
)
def test_times_in_a_session_from_14_to_15_utc(text: str, after: int | None) -> None:
    assert epoch("2026-11-29T14:03:21+00:00") == 1_795_961_001 * NS  # date -u -d @1795961001
    args = session("2026-11-29T14:00:00+00:00", HOUR)
    if after is None:
        with pytest.raises(TimeError, match="is not a time"):
            parse_time(text, **args)
    else:
        assert parse_time(text, **args) - BOOT == after


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "25:00",
        "14:60",
        "14:03:61",
        "2026-13-01",
        "2026-11-29T25:00",
        "+",
        "-",
        "ago",
        "x" * 99,
        "1:2:3:4",
    ],
)
def test_what_is_no_time_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(TimeError, match=r"is not a (time|duration): use 10m") as caught:
        parse_time(text, **session("2026-11-29T14:00:00+00:00", HOUR))
    assert "\n" not in str(caught.value)


def test_escape_sequences_are_not_echoed() -> None:
    with pytest.raises(TimeError) as caught:
        parse_time("\x1b[2J", **session("2026-11-29T14:00:00+00:00", HOUR))
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "2h",
        "-2h",
        "13:59",
        "15:01",
        "0:30",
        "2026-11-28",
        "yesterday",
        "9999999999",
        "0001-01-01T00:00+14:00",
    ],
)
def test_outside_the_session_the_error_names_its_range(text: str) -> None:
    with pytest.raises(TimeError) as caught:
        parse_time(text, **session("2026-11-29T14:00:10+00:00", HOUR))
    assert (
        "is outside the recording: 2026-11-29 14:00:10 to 15:00:10 (1h)" in str(caught.value)
    ) or text.startswith("0001")
    assert ("write +0:30 to count from the start" in str(caught.value)) == (text == "0:30")


def test_a_clock_time_stands_for_its_last_digit() -> None:
    """A session from 14:03:21.4 is found by 14:03 and 14:03:21, as the header shows it, not by 14:02."""
    args = session("2026-11-29T14:03:21+00:00", HOUR)
    args["anchors"] = Anchors([Anchor(BOOT, epoch("2026-11-29T14:03:21+00:00") + 400_000_000)])
    assert parse_time("14:03", **args) == BOOT
    assert parse_time("14:03:21", **args) == BOOT
    assert parse_time("2026-11-29T14", **args) == BOOT
    with pytest.raises(TimeError):
        parse_time("14:02", **args)
    with pytest.raises(TimeError):
        parse_time("14:03:21.3", **args)


def test_when_live_minus_counts_from_now() -> None:
    args = session("2026-11-29T14:00:00+00:00", HOUR)
    now = BOOT + HOUR + 20 * NS
    assert parse_time("-30s", **args, now=now) == now - 30 * NS
    assert parse_time("now", **args, now=now) == now
    assert parse_time("15:00:15", **args, now=now) == BOOT + HOUR + 15 * NS


def test_over_midnight_the_latest_such_time_counts() -> None:
    args = session("2026-11-27T22:00:00+00:00", 28 * HOUR)  # until 02:00 on the 29th
    assert parse_time("23:30", **args) == BOOT + 25 * HOUR + 30 * MINUTE
    assert parse_time("0:30", **args) == BOOT + 26 * HOUR + 30 * MINUTE
    assert parse_time("12:00", **args) == BOOT + 14 * HOUR
    assert parse_time("yesterday 0:30", **args) == BOOT + 2 * HOUR + 30 * MINUTE
    assert parse_time("yesterday", **args) == BOOT + 2 * HOUR
    assert parse_time("today 00:30", **args) == BOOT + 26 * HOUR + 30 * MINUTE


def test_the_hour_that_comes_twice() -> None:
    """Berlin, 2026-10-25: 02:30 CEST is 00:30 UTC and 02:30 CET is 01:30 UTC."""
    args = {**session("2026-10-25T00:00:00+00:00", 3 * HOUR), "tz": BERLIN}
    assert parse_time("2:30", **args) == BOOT + 90 * MINUTE
    assert parse_time("2026-10-25T02:30:00+02:00", **args) == BOOT + 30 * MINUTE
    first_only = {**args, "t1": BOOT + 45 * MINUTE}
    assert parse_time("2:30", **first_only) == BOOT + 30 * MINUTE
    assert format_iso(args["anchors"], BOOT + 30 * MINUTE, BERLIN) == "2026-10-25T02:30:00.000000+02:00"
    assert format_iso(args["anchors"], BOOT + 90 * MINUTE, BERLIN) == "2026-10-25T02:30:00.000000+01:00"


def test_the_hour_that_never_comes() -> None:
    """New York, 2026-03-08: 01:59:59 EST is followed by 03:00 EDT."""
    args = {**session("2026-03-08T06:00:00+00:00", 3 * HOUR), "tz": NEW_YORK}
    assert parse_time("3:15", **args) == BOOT + 75 * MINUTE
    with pytest.raises(TimeError, match="outside the recording"):
        parse_time("2:30", **args)


def test_without_a_zone_it_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.environ.get("TZ")
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        args = {**session("2026-11-29T14:00:00+00:00", HOUR), "tz": None}
        assert parse_time("19:33", **args) == BOOT + 3 * MINUTE
        assert parse_time("2026-11-29T19:33", **args) == BOOT + 3 * MINUTE
        assert format_wall(args["anchors"], BOOT) == "19:30:00"
        assert format_iso(args["anchors"], BOOT) == "2026-11-29T19:30:00.000000+05:30"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert os.environ.get("TZ") == before


def test_wall_clock_set_back_an_hour() -> None:
    """Two stretches bear 14:10; the later one counts, and one that only the first bore is found there."""
    wall = epoch("2026-11-29T14:00:00+00:00")
    anchors = Anchors([Anchor(0, wall), Anchor(30 * MINUTE, wall - 30 * MINUTE, -HOUR)])
    args = {"anchors": anchors, "t0": 0, "t1": 80 * MINUTE, "tz": UTC}  # 14:00-14:30, then 13:30-14:20
    assert parse_time("14:10", **args) == 70 * MINUTE
    assert parse_time("14:25", **args) == 25 * MINUTE
    assert parse_time("13:40", **args) == 40 * MINUTE
    with pytest.raises(TimeError):
        parse_time("14:35", **args)


def test_wall_clock_set_forward_an_hour() -> None:
    """A time the clock jumped over is the instant of the jump."""
    wall = epoch("2026-11-29T14:00:00+00:00")
    anchors = Anchors([Anchor(0, wall), Anchor(10 * MINUTE, wall + 70 * MINUTE, HOUR)])
    args = {"anchors": anchors, "t0": 0, "t1": 20 * MINUTE, "tz": UTC}  # 14:00-14:10, then 15:10-15:20
    assert parse_time("14:40", **args) == 10 * MINUTE
    assert parse_time("15:15", **args) == 15 * MINUTE


@pytest.mark.parametrize(
    ("ns", "precision", "text"),
    [
        (0, 0, "14:00:00"),
        (999_999_999, 0, "14:00:00"),
        (999_999_999, 1, "14:00:00.9"),
        (59_999_999_999, 3, "14:00:59.999"),
        (1, 9, "14:00:00.000000001"),
    ],
)
def test_wall_clock_is_cut_not_rounded(ns: int, precision: int, text: str) -> None:
    assert format_wall(session("2026-11-29T14:00:00+00:00", 0)["anchors"], BOOT + ns, precision, UTC) == text


@given(
    at=st.integers(0, 20 * HOUR),
    precision=st.integers(0, 9),
    drift_ns=st.integers(-2_000_000, 2_000_000),
    zone=st.sampled_from([UTC, BERLIN, NEW_YORK, ZoneInfo("Asia/Kathmandu")]),
    start=st.integers(epoch("2026-01-01T00:00:00+00:00") // NS, epoch("2027-01-01T00:00:00+00:00") // NS),
)
def test_what_the_header_shows_can_be_typed_back(
    at: int, precision: int, drift_ns: int, zone: ZoneInfo, start: int
) -> None:
    """With anchors an hour apart that drift, the time found bears the text that was typed."""
    anchors = Anchors([Anchor(BOOT + i * HOUR, start * NS + i * (HOUR + drift_ns)) for i in range(21)])
    args = {"anchors": anchors, "t0": BOOT, "t1": BOOT + 20 * HOUR, "tz": zone}
    shown = format_wall(anchors, BOOT + at, precision, zone)
    found = parse_time(shown, **args)
    again = format_wall(anchors, found, precision, zone)
    jumped = any(
        anchors.wall(BOOT + i * HOUR - 1) < anchors.wall(found) <= anchors.wall(BOOT + i * HOUR)
        for i in range(21)
    )
    assert again == shown or jumped


@given(at=st.integers(0, 100 * DAY), micro=st.booleans())
def test_iso_round_trip(at: int, micro: bool) -> None:
    args = {**session("2026-06-29T14:00:00+00:00", 100 * DAY), "tz": BERLIN}
    text = format_iso(args["anchors"], BOOT + at, BERLIN)
    assert parse_time(text, **args) == BOOT + at // 1000 * 1000


@given(st.text(max_size=30))
def test_any_text_gives_a_time_inside_or_a_time_error(text: str) -> None:
    args = session("2026-11-29T14:00:00+00:00", 30 * HOUR)
    try:
        t = parse_time(text, **args)
    except TimeError:
        return
    assert BOOT <= t <= BOOT + 30 * HOUR


@given(st.text(alphabet="0123456789:.+-TZW dhmsago ", max_size=24))
def test_texts_near_the_forms_never_fail_otherwise(text: str) -> None:
    test_any_text_gives_a_time_inside_or_a_time_error.hypothesis.inner_test(text)
