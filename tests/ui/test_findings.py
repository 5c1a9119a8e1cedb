"""What the rules found, on the screen: the badge in the header, the sheet behind `f`, and `n` and `N`."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from sessions import DATA
from triage.session import Session

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchor, Anchors, ManualClock
from opusmon.recording import Recorder
from opusmon.schema import Batch
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.limits import overridden
from opusmon.triage.rank import rank
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.ui.findings import NONE_YET, covering, sheet_lines
from opusmon.ui.glyphs import ASCII
from opusmon.ui.screens.dashboard import Dashboard
from opusmon.ui.text import plain
from opusmon.window import Window

from .test_dashboard import replay

T0 = 5_000 * NS
"""Where sessions made by `Session` begin."""
EVIL = "\x1b[31m[b]EVIL[/b]\x07\u202e"
ANCHORS = Anchors([Anchor(T0, 1_700_000_000 * NS)])


# -- a session with known findings -------------------------------------------------------------------------------


def night() -> Session:
    """Memory bandwidth at its limit from 60 to 89 s and from 150 s to the end at 180 s, an XID at 75.5 s."""
    session = Session()
    for t in range(0, 180, 60):
        session.add(
            "gpu_device", t + 0.5, gpu=0, gi=-1, name="NVIDIA H200", driver="580.1", max_sm_clock_mhz=1980
        )
    for t in range(1, 181):
        hot = 60 <= t < 90 or t >= 150
        session.add("gpu", t, gpu=0, gi=-1, hbm_bw_pct=97.0 if hot else 40.0, sm_util_pct=90.0)
    session.add("gpu_event", 75.5, gpu=0, gi=-1, kind="xid", code=79, detail=EVIL)
    return session


def write_recording(session: Session, path: Path) -> Path:
    clock = ManualClock(T0, 1_700_000_000 * NS)
    recorder = Recorder(path, strings=session.strings, clock=clock, session={"host": "gpu-host-7"})
    for channel, records in session._records.items():
        recorder.push(Batch(BY_NAME[channel], BY_NAME[channel].rows(records)))
    recorder.close()
    return path


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(night(), tmp_path_factory.mktemp("night") / "night.opusmon")


async def look(it, t_s: float) -> None:
    """Put the playhead at a second of the session and draw until the rules have seen all of it."""
    it.head.seek(T0 + round(t_s * NS))
    it.board._drawn = ()
    it.board.frame()
    await it.pilot.pause()


# -- the badge ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_the_badge_counts_what_holds_at_the_playhead(recording: Path, size: tuple[int, int]) -> None:
    async with replay(size=size, path=recording) as it:
        for t_s, badge in (
            (30, None),
            (61, "1 finding !"),
            (75.5, "2 findings !!"),
            (80, "1 finding !"),
            (120, None),
            (160, "1 finding !"),
            (180, "1 finding !"),
        ):
            await look(it, t_s)
            found = re.search(r"\d+ findings? !+", it.text("#header"))
            assert (found and found[0]) == badge, t_s
            assert len(it.text("#header")) == size[0]
            for word in ("gpu-host-7", "PAUSED "):
                assert word in it.text("#header")


async def test_the_limits_in_force_are_those_of_the_screen(recording: Path) -> None:
    """97 % is over the usual 95, and not over 98."""
    limits = overridden({"hbm_bw_pct": 98})
    async with replay(path=recording, limits=limits) as it:
        await look(it, 180)
        assert [one.rule for one in it.board.triage.findings] == ["xid"]


async def test_in_ascii_the_badge_is_ascii(recording: Path) -> None:
    async with replay(path=recording, glyphs=ASCII, environ={"NO_COLOR": "1"}) as it:
        await look(it, 75.5)
        assert "2 findings !!" in it.text("#header")
        await it.press("f")
        assert it.text("#sheet").isascii()


async def test_notes_count_while_they_hold() -> None:
    async with replay() as it:
        window = it.app.session.window
        for t_s, badge in ((20, False), (60, True), (100, False)):
            it.head.seek(window.t0 + t_s * NS)
            it.board.frame()
            assert ("2 findings i" in it.text("#header")) is badge


# -- the sheet ---------------------------------------------------------------------------------------------------


async def test_f_shows_those_at_the_playhead_in_full_and_the_others_by_a_line(recording: Path) -> None:
    async with replay(path=recording) as it:
        await look(it, 75.5)
        await it.press("f")
        lines = [line.strip(" ║│|") for line in it.lines("#sheet")]
        text = "\n".join(lines)
        heads = [line for line in lines if re.match(r"(!!|!|i) ", line)]
        assert heads[0].startswith("!! ")  # the worst first
        assert "XID 79" in heads[0]
        assert heads[1] == "!  HBM bandwidth of gpu 0 at 97.0 % of its peak"
        assert "next" in text
        assert "likely" in text
        assert "hbm_bw_pct 97 % (limit 95 %)" in text
        others = lines[lines.index("at other times (n and N go there)") :]
        assert sum("HBM bandwidth" in line for line in others) == 1  # that from 150 s on
        await it.press("f")
        assert isinstance(it.app.screen, Dashboard)


async def test_the_sheet_closes_and_the_dashboard_has_the_keys_again(recording: Path) -> None:
    async with replay(path=recording) as it:
        for key in ("f", "escape", "enter"):
            await it.press("f")
            assert "HBM bandwidth" in it.text("#sheet")
            await it.press(key)
            assert isinstance(it.app.screen, Dashboard)
        await it.press("n")
        assert it.head.t == T0 + 60 * NS


async def test_a_session_without_findings_says_so(tmp_path: Path) -> None:
    path = DATA / "h200-streams.opusmon"
    async with replay(path=path) as it:
        it.board.frame()
        assert "finding" not in it.text("#header")
        await it.press("f")
        assert NONE_YET in it.text("#sheet")


async def test_in_a_small_terminal_the_sheet_scrolls_to_its_end(recording: Path) -> None:
    async with replay(size=(80, 24), path=recording) as it:
        await look(it, 75.5)
        await it.press("f")
        seen = ""
        for _ in range(30):
            lines = it.lines("#sheet")
            assert len(lines) <= 24
            assert all(len(line) <= 80 for line in lines)
            seen += "\n".join(lines)
            if "more lines" not in lines[0]:
                break
            await it.press("down")
        assert "XID 79" in seen
        assert "at other times" in seen
        last = [line for line in it.lines("#sheet") if "HBM bandwidth" in line]
        assert last
        await it.press("escape")
        assert isinstance(it.app.screen, Dashboard)


async def test_in_a_small_terminal_what_to_do_next_is_whole(recording: Path) -> None:
    async with replay(size=(80, 24), path=recording) as it:
        await look(it, 80)
        await it.press("f")
        words = " ".join(" ".join(line.strip(" ║") for line in it.lines("#sheet")).split())
        assert "more requests gain nothing now; look for copies among the GPU's processes" in words


async def test_names_from_outside_are_plain_text_on_the_screen(recording: Path) -> None:
    async with replay(path=recording) as it:
        await look(it, 75.5)
        await it.press("f")
        text = it.text("#sheet")
        assert "[b]EVIL[/b]" in text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
        await it.press("escape")
        it.head.seek(T0 + 61 * NS)
        await it.press("n")
        footer = it.text("#footer")
        assert "[b]EVIL[/b]" in footer
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", footer)


# -- n and N -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_n_and_capital_n_go_to_where_findings_begin(recording: Path, size: tuple[int, int]) -> None:
    async with replay(size=size, path=recording) as it:
        await look(it, 10)
        went = []
        for _ in range(6):
            await it.press("n")
            went.append((it.head.t - T0) / NS)
            if "nothing is marked after" in it.text("#footer"):
                break
        assert sorted(set(went)) == [60, 75.5, 150]
        assert went == sorted(went)
        await it.press("N")
        assert (it.head.t - T0) / NS == 75.5
        await it.press("N")
        assert (it.head.t - T0) / NS == 60
        footer = it.text("#footer")
        assert footer.startswith(" warning: HBM bandwidth of gpu 0")
        await it.press("N")
        assert "nothing is marked before this time" in it.text("#footer")
        assert (it.head.t - T0) / NS == 60


async def test_findings_are_marks_on_the_time_bar(recording: Path) -> None:
    async with replay(path=recording, glyphs=ASCII) as it:
        await look(it, 10)
        assert it.text("#timebar").count("!") >= 3


async def test_a_replay_is_looked_at_to_its_end(tmp_path: Path) -> None:
    """The rules look at two minutes at a time; the XID is in the second after them."""
    session = Session()
    for t in range(1, 123):
        session.add("gpu", t, gpu=0, gi=-1, hbm_bw_pct=40.0)
    session.add("gpu_event", 121.5, gpu=0, gi=-1, kind="xid", code=79, detail="d")
    async with replay(path=write_recording(session, tmp_path / "s.opusmon")) as it:
        for _ in range(3):
            await look(it, 121.5)
        assert [one.rule for one in it.board.triage.findings] == ["xid"]


# -- a live session ----------------------------------------------------------------------------------------------


async def test_a_file_that_grows_shows_a_finding_as_it_comes_and_as_it_goes(tmp_path: Path) -> None:
    """Another process records: the badge follows the rows."""
    path = tmp_path / "s.opusmon"
    session = night()
    kind = BY_NAME["gpu"]
    clock = ManualClock(T0, 1_700_000_000 * NS)
    recorder = Recorder(path, strings=session.strings, clock=clock, session={"host": "h"}, flush_ns=1)

    def write(first: int, last: int) -> None:
        wanted = [record for record in session._records["gpu"] if first < (record[0] - T0) / NS <= last]
        recorder.push(Batch(kind, kind.rows(wanted)))

    async def read(window: Window, until_s: int) -> None:
        async with asyncio.timeout(20):
            while window.t1 < T0 + until_s * NS:
                window.refresh()
                await asyncio.sleep(0.01)

    try:
        async with replay(path=path, follow=True) as it:
            it.head.resume()
            badges = []
            for first, last in ((0, 61), (61, 64), (64, 80), (80, 95)):
                write(first, last)
                await read(it.app.session.window, last)
                it.board._drawn = ()
                it.board.frame()
                found = re.search(r"\d+ findings? !+", it.text("#header"))
                badges.append(found and found[0])
            assert badges == [None, "1 finding !", "1 finding !", None]
            (one,) = it.board.triage.findings
            assert ((one.t0 - T0) / NS, (one.t1 - T0) / NS, one.open) == (60, 89, False)
    finally:
        recorder.close()


async def test_a_recorder_that_stopped_is_seen_by_who_follows_its_file(tmp_path: Path) -> None:
    """Nothing comes any more, so nothing but the time makes the screen draw."""
    path = tmp_path / "night.opusmon"
    session, kind = night(), BY_NAME["gpu"]
    clock = ManualClock(T0, 1_700_000_000 * NS)
    recorder = Recorder(path, strings=session.strings, clock=clock, session={"host": "h"}, flush_ns=1)
    try:
        async with replay(path=path, follow=True) as it:
            it.head.resume()
            recorder.push(Batch(kind, kind.rows(session._records["gpu"][:20])))
            async with asyncio.timeout(20):
                while it.app.session.window.t1 < T0 + 20 * NS:
                    it.app.session.window.refresh()
                    await asyncio.sleep(0.01)
            it.clock.wall_ns = 1_700_000_020 * NS  # where the last row is
            it.clock.advance(NS)
            it.board.frame()
            assert "FOLLOW" in it.text("#header")
            assert "LATE" not in it.text("#header")
            it.clock.advance(90 * NS)
            it.board.frame()
            assert "!! LATE 91 s  FOLLOW" in it.text("#header")
    finally:
        recorder.close()


# -- the lines, pure ---------------------------------------------------------------------------------------------


ONE = Finding(
    "r",
    "gpu 0",
    WARN,
    T0 + 10 * NS,
    T0 + 20 * NS,
    "title one",
    (Evidence("x", 1.0, "ms"),),
    "cause " * 40,
    "next step",
)


def test_covering_is_closed_at_both_ends_and_open_ones_have_none() -> None:
    ended, lasting = ONE, replace(ONE, open=True, severity=CRIT)
    assert [covering([ONE], T0 + t * NS) for t in (9, 10, 20, 21)] == [[], [ONE], [ONE], []]
    assert covering([ended, lasting], T0 + 900 * NS) == [lasting]
    assert covering([lasting, ended], T0 + 15 * NS) == [lasting, ended]
    assert covering([lasting], T0) == []


async def test_those_at_the_playhead_are_in_the_order_in_which_triage_tells_all() -> None:
    async with replay(path=DATA.parents[1] / "opusmon" / "demo" / "incident.opusmon") as it:
        await look(it, (it.app.session.window.t0 - T0) / NS + 110)
        findings, t = it.board.triage.findings, it.head.t
        shown = covering(it.board.triage.ranked(), t)
        assert shown[0].rule == "hbm_nearly_full"  # what the failed requests ten seconds later came from
        assert len(shown) == 3
        assert shown == [one for one in rank(findings) if one in shown]


def test_progress_is_said_while_a_long_session_is_looked_at() -> None:
    shown = [plain(line) for line in sheet_lines([], ANCHORS, T0, "looked at up to 03:12:00")]
    assert shown == ["looked at up to 03:12:00", NONE_YET]


def test_a_finding_in_full_has_its_subject_its_range_its_numbers_and_what_to_do() -> None:
    shown = [
        plain(line)
        for line in sheet_lines([ONE, replace(ONE, t0=T0, t1=T0, severity=NOTE)], ANCHORS, T0 + 12 * NS, "")
    ]
    assert shown[1] == "!  title one"
    assert shown[2].startswith("   gpu 0  ")
    assert shown[2].endswith("(10 s)")
    assert shown[3] == "   x 1 ms"
    assert shown[4].startswith("   cause  cause")
    assert shown[5].startswith("          cause cause")  # under the text, not under the word
    assert any(line.startswith("   next   next step") for line in shown)
    assert shown[-1].startswith("i  ")


@pytest.mark.parametrize("at_s", [12, 30])
def test_long_words_of_a_finding_are_on_more_lines_and_not_cut_off(at_s: int) -> None:
    title = "python3 1002: graph capture failed with 901, broken by cuStreamSynchronize in the capturing thread, 3 times"
    subject = "python3 1002: 901 by cuStreamSynchronize in the capturing thread of a process with a long name"
    stack = ";".join(f"function_{n}" for n in range(12))
    one = replace(ONE, title=title, subject=subject, evidence=(Evidence("stack", stack),))
    lines = [plain(line) for line in sheet_lines([one], ANCHORS, T0 + at_s * NS, "", 75)]
    assert max(map(len, lines)) <= 75
    words = " ".join(" ".join(lines).split())
    assert title in words
    assert (subject in words and "function_11" in words) is (at_s == 12)
