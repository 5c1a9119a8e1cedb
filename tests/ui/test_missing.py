"""The sheet of all that is missing, and why."""

from __future__ import annotations

from sessions import DATA

from opusmon.clock import Anchors
from opusmon.ui.screens.dashboard import Dashboard
from opusmon.ui.screens.missing import NOTHING, missing_lines
from opusmon.ui.text import Line, line_cells, plain

from .fakeview import FakeView
from .test_dashboard import replay
from .test_statuses import NS, T, said


def sheet(view: FakeView, width: int = 100) -> list[str]:
    lines: list[Line] = missing_lines(view, Anchors(), T, width)
    assert max(map(line_cells, lines)) <= width
    return [plain(line).rstrip() for line in lines]


def test_every_reason_is_there_the_broken_first_those_of_one_reason_together() -> None:
    view = FakeView()
    for gpu in range(2):
        for field in ("nvlink_rx_bps", "nvlink_tx_bps"):
            said(
                view,
                T,
                "gpu",
                "not_supported",
                channel="gpu",
                field=field,
                scope=f"gpu {gpu}",
                reason="no NVLink",
            )
    said(view, T, "host", "not_supported", channel="host", field="psi_cpu_full_pct", reason="cgroups only")
    said(view, T, "streams", "no_permission", scope="hidden", reason="1 process")
    for name in ("canary", "otlp"):
        said(view, T, name, "unavailable", reason="not asked for", remedy="start without --only")
    said(view, T, "stalls", "no_permission", scope="hidden", reason="1 process")
    said(view, T, "proxy", "stale", reason="has sent nothing for 6 s")
    said(view, T, "engine", "ok", reason="watching")
    assert sheet(view)[1:] == [
        "! proxy    has sent nothing for 6 s (stale)",
        "! several  1 process (no permission)",
        "           stalls hidden; streams hidden",
        "  gpu      no NVLink (not supported)",
        "           gpu 0: nvlink_rx_bps, nvlink_tx_bps; gpu 1: nvlink_rx_bps, nvlink_tx_bps",
        "  host     cgroups only (not supported)",
        "           psi_cpu_full_pct",
        "  several  not asked for (unavailable)",
        "           canary; otlp",
        "           start without --only",
    ]


def test_a_long_list_is_on_more_lines_and_loses_nothing() -> None:
    view = FakeView()
    names = [f"field_{n}" for n in range(24)]
    for name in names:
        said(view, T, "engine", "not_supported", channel="engine", field=name, reason="has no metric for it")
    words = " ".join(sheet(view, 60))
    assert [name for name in names if name not in words.replace(",", "").split()] == []


def test_objectives_that_cannot_be_read_are_there_and_those_that_can_are_not() -> None:
    view = FakeView()
    said(view, T, "slo", "ok", scope="0", reason="ttft_p95<800ms")
    assert sheet(view) == [NOTHING]
    said(view, T, "slo", "ok", scope="1", reason="speed>9000")
    lines = sheet(view)[1:]
    assert lines[0].startswith("! slo      ")
    assert "speed>9000" in " ".join(lines)


async def test_l2_that_nobody_asked_for_is_there() -> None:
    """A recording of two H200s from before there was an l2 collector."""
    async with replay() as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        await it.press("w")
        assert "l2       not reported by NVML; run with --deep" in it.text("#sheet")


async def test_w_shows_what_the_foot_has_no_room_for() -> None:
    """Of the llama.cpp server of the demo, 21 values are missing for one reason."""
    async with replay(path=DATA.parents[1] / "opusmon" / "demo" / "incident.opusmon") as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        it.board.frame()
        assert "more: w" in it.text("#pane-latency")
        await it.press("w")
        words = " ".join(it.text("#sheet").split())
        assert "llama.cpp has no metric for it (not supported)" in words
        assert {
            name for name in ("preemptions", "spec_accept_pct", "decode_sum_s") if name not in words
        } == set()
        await it.press("w")
        assert isinstance(it.app.screen, Dashboard)
