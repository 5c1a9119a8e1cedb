"""What collectors say of themselves, as panes read and draw it."""

from __future__ import annotations

import numpy as np

from opusmon.ui.panes.statuses import (
    STATUS_LOOKBACK_NS,
    Status,
    read_statuses,
    trouble_line,
    troubles,
    waiting,
    whole,
)
from opusmon.ui.panes.waiting import NO_DATA
from opusmon.ui.text import plain

from .fakeview import FakeView

NS = 1_000_000_000
T = 1_000 * NS


def said(view: FakeView, t: int, collector: str, state: str, **words: str) -> None:
    row = {"channel": "", "field": "", "scope": "", "reason": "", "remedy": "", **words}
    view.add("status", t, collector=collector, state=state, **row)


def status(state: str, **words: str) -> Status:
    names = ("collector", "channel", "field", "scope", "reason", "remedy")
    return Status(state=state, **{name: words.get(name, "") for name in names})


def test_the_collectors_asked_for_are_read_each_as_a_whole_first() -> None:
    view = FakeView()
    said(view, T - 3, "streams", "sampled", channel="stream", field="launches")
    said(view, T - 2, "streams", "stale", reason="no rows")
    said(view, T - 1, "stalls", "error")
    said(view, T, "canary", "error")
    found = read_statuses(view, T, "streams", "canary")
    assert [(one.collector, one.field, one.state) for one in found] == [
        ("canary", "", "error"),
        ("streams", "", "stale"),
        ("streams", "launches", "sampled"),
    ]
    assert read_statuses(view, T, "gpu") == ()


def test_only_the_newest_word_counts_and_none_that_was_not_said_again() -> None:
    view = FakeView()
    said(view, T - STATUS_LOOKBACK_NS, "host", "error", field="swap_used_b")
    said(view, T - 2, "host", "error")
    said(view, T - 1, "host", "ok")
    said(view, T + 1, "host", "stale")
    assert [one.state for one in read_statuses(view, T, "host")] == ["ok"]


def test_text_from_outside_is_cleaned() -> None:
    view = FakeView()
    said(view, T, "streams", "error", reason="\x1b[2Jlib\x07.so")
    assert read_statuses(view, T, "streams")[0].reason == "lib?.so"


def test_rows_of_a_version_without_these_fields_say_nothing() -> None:
    class Older(FakeView):
        def latest(self, channel: str, t: int, lookback_ns: int) -> np.ndarray:
            return np.zeros(2, [("t", "<i8"), ("collector", "<u4"), ("state", "<u4")])

    assert read_statuses(Older(), T, "") == ()


def test_the_order_of_importance() -> None:
    states = ["sampled", "stale", "no_permission", "restarting", "unavailable", "error"]
    ranks = [status(state).rank for state in states]
    assert ranks == sorted(ranks, reverse=True) == [5, 4, 3, 2, 1, 0]


def test_what_is_said_of_the_whole_and_what_is_wrong() -> None:
    one, two = status("stale", field="launches"), status("error", reason="gone")
    assert whole([one, two]) is two
    assert whole([one]) is None
    assert troubles([one, status("ok"), two]) == [one, two]
    assert status("stale", field="launches", scope="pid 7").text == "pid 7 launches: stale"
    assert two.text == "gone"


def test_a_pane_without_data_waits_unless_its_collector_is_well() -> None:
    nothing = waiting("streams", 3, ("lanes",), None)
    assert nothing is not None
    assert (nothing.why, nothing.remedy, nothing.shows) == (NO_DATA, "", ("lanes",))
    off = waiting("streams", 3, (), status("unavailable", remedy="sudo opusmon"))
    assert off is not None
    assert (off.name, off.number, off.why, off.remedy) == ("streams", 3, "unavailable", "sudo opusmon")
    assert waiting("streams", 3, (), status("ok")) is None


def test_the_line_says_the_reason_the_remedy_and_how_many_more() -> None:
    line = trouble_line("no probes", "sudo opusmon", 2, 80, is_wrong=True)
    assert plain(line) == "! no probes (sudo opusmon)  +2 more: w"
    assert [style for text, style in line if text.strip()] == ["warn", "key", "dim", "key"]
    quiet = trouble_line("sampled", "", 0, 80, is_wrong=False)
    assert quiet == (("sampled", "dim"),)


def test_the_line_is_cut_with_a_mark_and_keeps_how_many_more() -> None:
    cut = trouble_line("no probes", "sudo opusmon", 23, 24, is_wrong=True)
    assert plain(cut) == "! no probe~  +23 more: w"
    assert len(plain(cut)) == 24
    assert plain(trouble_line("no probes", "", 0, 8, is_wrong=True)) == "! no pr~"
