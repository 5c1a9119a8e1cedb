"""The window: what is in memory, what falls through to the recording, and that nobody can tell which was which."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.clock import NS, Anchors, ManualClock
from opusmon.recording import Mark, Recorder, Recording
from opusmon.schema import Batch, Channel, Field, StringTable
from opusmon.stats import rollup
from opusmon.window import Window

CHANNEL = Channel(
    "load", "gauge", (Field("gpu", "<i2"), Field("pct", "<f4"), Field("b", "<f8")), key=("gpu",)
)
numbers = itertools.count()


def batch(*rows):
    return Batch(CHANNEL, CHANNEL.rows(rows))


def window(**kwargs):
    return Window(StringTable(), Anchors(), **kwargs)


def test_a_query_is_open_at_the_start_and_closed_at_the_end():
    view = window()
    view.push(batch(*((t, 0, t, t) for t in (10, 20, 30))))
    assert view.query("load", 10, 30)["t"].tolist() == [20, 30]
    assert view.query("load", 0, 9)["t"].tolist() == []
    assert view.query("nobody", 0, 99).tolist() == []


def test_late_rows_find_their_place_after_their_equals():
    view = window()
    view.push(batch((10, 0, 1, 1), (30, 0, 2, 2)))
    view.push(batch((10, 0, 3, 3), (20, 0, 4, 4)))
    assert view.query("load", 0, 99)["pct"].tolist() == [1, 3, 4, 2]


def test_rows_of_an_older_version_of_a_channel_are_taken_with_what_they_lack_missing():
    view = window(channels=[Channel("load", "gauge", (*CHANNEL.fields, Field("watts", "<f4")), key=("gpu",))])
    view.push(batch((10, 0, 1, 2)))
    (row,) = view.query("load", 0, 99)
    assert (row["pct"], row["b"]) == (1, 2)
    assert np.isnan(row["watts"])


def test_memory_lets_go_by_age_and_by_size():
    view = window(keep_ns=100)
    for t in range(0, 1000, 10):
        view.push(batch((t, 0, 0, 0)))
    assert view.query("load", -1, 2000)["t"].min() > 890 - 10
    small = window(cap_b=CHANNEL.dtype.itemsize * 100)
    for t in range(1000):
        small.push(batch((t, 0, 0, 0)))
    held = small.query("load", -1, 2000)
    assert held["t"][-1] == 999
    assert held.nbytes <= CHANNEL.dtype.itemsize * 100


def test_newest_row_of_each_series():
    view = window()
    view.push(batch((10, 0, 1, 1), (10, 1, 2, 2), (20, 0, 3, 3)))
    assert view.latest("load", 25, 20)["pct"].tolist() == [3, 2]
    assert view.latest("load", 25, 10)["pct"].tolist() == [3]


def test_samples_are_stepped_through_by_distinct_times():
    view = window()
    view.push(batch((10, 0, 1, 1), (10, 1, 2, 2), (20, 0, 3, 3)))
    assert view.step("load", 10, 1) == 20
    assert view.step("load", 15, -1) == 10
    assert view.step("load", 20, 1) is None
    assert view.step("load", 10, -1) is None
    assert view.step("nobody", 10, -1) is None


rows = st.lists(
    st.tuples(st.integers(1, 600), st.integers(0, 2), st.sampled_from([0.0, 1.5, float("nan"), 99.0]), st.integers(0, 2**40)),
    min_size=1,
    max_size=12,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(rows, min_size=1, max_size=8),
    keep_s=st.integers(1, 400),
    asks=st.lists(st.tuples(st.integers(0, 650), st.integers(1, 650), st.sampled_from([1, 5, 10, 60])), min_size=3, max_size=6),
)  # fmt: skip
def test_for_every_instant_the_replayed_window_equals_the_live_one(tmp_path_factory, batches, keep_s, asks):
    """Live (memory over a file), live without a file, and replay give the same bytes."""
    path = tmp_path_factory.mktemp("window") / f"{next(numbers)}.opusmon"
    strings, clock = StringTable(), ManualClock(0, 10**18)
    recorder = Recorder(path, strings=strings, clock=clock, flush_ns=1)
    memory = window()
    store = Recording.open(path)
    live = Window(strings, Anchors(), channels=[CHANNEL], store=store, keep_ns=keep_s * NS)
    for records in batches:
        new = batch(*((t * NS, gpu, pct, b) for t, gpu, pct, b in records))
        for sink in (live, memory, recorder):
            sink.push(new)
    recorder.close()
    store.refresh()
    replayed = Window.over(Recording.open(path))
    for t_s, span_s, step_s in asks:
        t0, t1 = (t_s - span_s) * NS, t_s * NS
        expected = memory.query("load", t0, t1).tobytes()
        assert replayed.query("load", t0, t1).tobytes() == expected
        assert live.query("load", t0, t1).tobytes() == expected
        assert (
            replayed.latest("load", t1, span_s * NS).tobytes()
            == live.latest("load", t1, span_s * NS).tobytes()
        )
        for direction in (1, -1):
            assert replayed.step("load", t1, direction) == memory.step("load", t1, direction)
            assert live.step("load", t1, direction) == memory.step("load", t1, direction)
        bins = rollup(memory.query("load", t0, t1), CHANNEL, ["pct", "b"], step_s * NS)
        for view in (replayed, live):
            got = view.binned("load", ["pct", "b"], t0, t1, step_s * NS)
            assert got.dtype == bins.dtype
            for name in bins.dtype.names:
                np.testing.assert_allclose(got[name], bins[name], rtol=1e-6)  # the file keeps means as f4
    store.close()


def test_a_mark_is_seen_at_once_and_once(tmp_path):
    path = tmp_path / "m.opusmon"
    strings = StringTable()
    recorder = Recorder(path, strings=strings, clock=ManualClock(), flush_ns=1)
    store = Recording.open(path)
    view = Window(strings, Anchors(), store=store)
    recorder.mark(5, 5, "bookmark", "here")
    view.add_mark(Mark(5, 5, "bookmark", "here"))
    assert [mark.text for mark in view.marks()] == ["here"]
    recorder.close()
    store.refresh()
    assert [mark.text for mark in view.marks()] == ["here"]
    assert view.marks(6, 9) == []
    store.close()


def test_wide_spans_and_near_ones_are_asked_of_the_same_view():
    view = window()
    view.push(batch(*((n * NS, 0, n, n) for n in range(1, 601))))
    wide = view.binned("load", ["pct"], 0, 600 * NS, 60 * NS)
    assert wide["pct_mean"][1] == pytest.approx(np.mean(range(60, 120)))
    assert wide["pct_n"].tolist() == [59] + [60] * 9 + [1]
