"""Places to jump to, over real windows: failed captures, compilations, restarts, GPU events, read bit by bit or at once."""

import itertools

import numpy as np
import pytest

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchors, ManualClock
from opusmon.recording import Recorder, Recording
from opusmon.recording.store import Mark
from opusmon.schema import Batch
from opusmon.ui import marks
from opusmon.ui.marks import Place, Places, neighbour
from opusmon.ui.widgets.timeline import MARKS
from opusmon.window import Window

from .fakestalls import CAPTURE, JIT, FakeStalls, add_stall
from .fakeview import NAN

HOUR = 3600 * NS
START = 1_000 * NS


def events(view):
    """Two captures that fail, one that does not, one unfinished, a compilation, a wait, an XID, a throttling GPU."""
    add_stall(view, START + 5 * NS, **CAPTURE)
    add_stall(view, START + 21 * NS, **{**CAPTURE, "code": 0})
    add_stall(view, START + 22 * NS, **{**CAPTURE, "code": NAN})
    add_stall(view, START + 33 * NS, **JIT)
    add_stall(view, START + 44 * NS, "wait", dur_ns=9e9)
    add_stall(view, START + 55 * NS, **{**CAPTURE, "code": 906, "by_call": ""})
    view.add("gpu_event", START + 40 * NS, gpu=1, gi=-1, kind="xid", code=79, detail="fell off the bus")
    view.add("gpu_event", START + 41 * NS, gpu=1, gi=-1, kind="throttle_on", code=4, detail="power")
    return view


def scrapes(view, seconds, restarts, engine="127.0.0.1:8000/metrics", models=("llama",), begin=START):
    """A row a second and model; 1 in `restarts` at these seconds, none known of the first scrape."""
    for second in range(seconds):
        for model in models:
            again = NAN if second == 0 else float(second in restarts)
            view.add("engine", begin + second * NS, engine=engine, model=model, kind="vllm", restarts=again)
    return view


def window_of(view, channels=("stall", "gpu_event", "engine"), keep_ns=100 * HOUR):
    window = Window(view.strings, Anchors(), keep_ns=keep_ns)
    for channel in channels:
        if channel in view.channels:
            window.push(Batch(BY_NAME[channel], view.rows(channel)))
    return window


def seconds(places):
    return [((place.t - START) // NS, place.kind) for place in places]


def test_failed_captures_and_compilations_are_marks_among_the_others():
    window = window_of(events(FakeStalls()))
    window.add_mark(Mark(START + 50 * NS, START + 50 * NS, "bookmark", "here"))
    found = Places(window).update()
    assert seconds(found) == [(5, "capture"), (33, "jit"), (40, "xid"), (50, "bookmark"), (55, "capture")]
    assert [place.text for place in found] == [
        "vllm: capture failed, 901 by cuEventQuery",
        "vllm: jit ptxas",
        "GPU 1: fell off the bus",
        "here",
        "vllm: capture failed, 906",
    ]
    assert {place.kind for place in found} <= set(MARKS)


def test_a_storm_is_one_mark_for_each_ten_seconds():
    view = FakeStalls()
    for tenth in range(250):  # 25 s from 1000 s on
        add_stall(view, START + tenth * NS // 10, **JIT)
    found = Places(window_of(view)).update()
    assert seconds(found) == [(0, "jit"), (10, "jit"), (20, "jit")]
    assert [place.text for place in found] == [
        "vllm: jit ptxas, and 99 more in 10 s",
        "vllm: jit ptxas, and 99 more in 10 s",
        "vllm: jit ptxas, and 49 more in 10 s",
    ]


def test_read_row_by_row_they_are_as_read_at_once():
    view = events(FakeStalls())
    for number in range(400):
        add_stall(view, START + 60 * NS + number * NS // 3, **(JIT if number % 3 else CAPTURE))
    window = Window(view.strings, Anchors())
    places = Places(window)
    rows = sorted(
        itertools.chain.from_iterable(
            ((name, row) for row in np.split(view.rows(name), len(view.rows(name))))
            for name in ("stall", "gpu_event")
        ),
        key=lambda item: int(item[1]["t"][0]),
    )
    for name, row in rows:
        window.push(Batch(BY_NAME[name], row))
        places.update()
    assert places.update() == Places(window_of(view)).update()


def test_late_rows_of_the_last_minute_are_found():
    view = events(FakeStalls())
    window = window_of(view)
    places = Places(window)
    places.update()
    late = FakeStalls()
    late.strings = view.strings
    add_stall(late, START + 12 * NS, **JIT)
    window.push(Batch(BY_NAME["stall"], late.rows("stall")))
    assert (12, "jit") in seconds(places.update())


def test_in_a_long_session_only_the_parts_with_such_stalls_are_read():
    view = FakeStalls()
    for minute in range(5 * 60):
        add_stall(view, START + minute * 60 * NS, "wait")
    add_stall(view, START + 2 * HOUR, **JIT)
    add_stall(view, START + 4 * HOUR + 7 * NS, **CAPTURE)
    window = window_of(view)
    read = []
    query = window.query

    def counted(channel, t0, t1):
        rows = query(channel, t0, t1)
        read.append(len(rows) if channel == "stall" else 0)
        return rows

    window.query = counted
    found = Places(window).update()
    assert seconds(found) == [(7200, "jit"), (4 * 3600 + 7, "capture")]
    # one pass over all to find them, which a recording has in its rollups; then ten minutes for each, a wait a minute
    assert [number for number in read if number] == [302, 11, 11]


def test_there_are_never_too_many(monkeypatch):
    monkeypatch.setattr(marks, "MOST", 7)
    view = FakeStalls()
    for number in range(200):
        add_stall(view, START + number * 60 * NS, **JIT)
    newest = [(number * 60, "jit") for number in range(193, 200)]
    assert seconds(Places(window_of(view)).update()) == newest
    window = Window(view.strings, Anchors())
    places = Places(window)
    for row in np.split(view.rows("stall"), 200):
        window.push(Batch(BY_NAME["stall"], row))
        places.update()
    assert seconds(places.update()) == newest


def test_an_engine_that_was_restarted_is_one_mark_whatever_number_of_models_it_serves():
    view = scrapes(FakeStalls(), 60, {7, 33}, models=("a", "b", "c"))
    scrapes(view, 60, {34}, engine="gpu-7:8000/metrics")
    found = Places(window_of(view)).update()
    assert [(*seconds([place])[0], place.text, place.pane) for place in found] == [
        (7, "restart", "engine 127.0.0.1:8000/metrics restarted", "latency"),
        (33, "restart", "engine 127.0.0.1:8000/metrics restarted", "latency"),
        (34, "restart", "engine gpu-7:8000/metrics restarted", "latency"),
    ]
    assert {place.kind for place in found} <= set(MARKS)


def test_an_address_that_leads_to_two_engines_in_turn_has_a_mark_for_each_ten_seconds():
    found = Places(window_of(scrapes(FakeStalls(), 25, range(1, 25)))).update()
    assert seconds(found) == [(1, "restart"), (10, "restart"), (20, "restart")]
    assert found[1].text == "engine 127.0.0.1:8000/metrics restarted, and 9 more in 10 s"


def test_restarts_read_row_by_row_are_as_read_at_once():
    view = scrapes(FakeStalls(), 300, {3, 77, 78, 79, 140, 299}, models=("a", "b"))
    window = Window(view.strings, Anchors())
    places = Places(window)
    for row in np.split(view.rows("engine"), len(view.rows("engine"))):
        window.push(Batch(BY_NAME["engine"], row))
        places.update()
    # Those at 77, 78 and 79 s are of the same ten seconds.
    assert seconds(places.update()) == [(second, "restart") for second in (3, 77, 140, 299)]
    assert places.update() == Places(window_of(view)).update()


def test_restarts_of_a_recording_are_found_in_its_rollups(tmp_path):
    """Two hours: the ten minutes that have one are read, and no more."""
    view = scrapes(FakeStalls(), 7200, {1810, 6500})
    path = tmp_path / "a.opusmon"
    recorder = Recorder(path, strings=view.strings, clock=ManualClock(START))
    recorder.push(Batch(BY_NAME["engine"], view.rows("engine")))
    recorder.close()
    with Recording.open(path) as recording:
        window, read = Window.over(recording), []
        query = window.query

        def counted(channel, t0, t1):
            rows = query(channel, t0, t1)
            read.append(len(rows))
            return rows

        window.query = counted
        assert seconds(Places(window).update()) == [(1810, "restart"), (6500, "restart")]
        assert sorted(filter(None, read)) == [600, 600]


def test_there_are_never_too_many_restarts(monkeypatch):
    monkeypatch.setattr(marks, "MOST", 7)
    view = scrapes(FakeStalls(), 3600, range(0, 3600, 60))
    newest = [(second, "restart") for second in range(3600 - 7 * 60, 3600, 60)]
    assert seconds(Places(window_of(view)).update()) == newest
    window = Window(view.strings, Anchors())
    places = Places(window)
    for rows in np.split(view.rows("engine"), 36):
        window.push(Batch(BY_NAME["engine"], rows))
        places.update()
    assert seconds(places.update()) == newest


def test_nothing_is_read_while_nothing_has_come():
    places = Places(window_of(events(FakeStalls())))
    assert places.update() is places.update()


@pytest.mark.parametrize("channels", [(), ("gpu_event",), ("stall",)])
def test_sessions_without_one_or_both(channels):
    found = Places(window_of(events(FakeStalls()), channels)).update()
    assert {place.kind for place in found} <= {"xid"} if "stall" not in channels else {"capture", "jit"}


def test_what_the_window_forgot_is_no_place_any_more():
    view = events(FakeStalls())
    window = window_of(view, keep_ns=60 * NS)
    places = Places(window)
    assert (5, "capture") in seconds(places.update())
    later = FakeStalls()
    later.strings = view.strings
    add_stall(later, START + 100 * NS, "wait")
    window.push(Batch(BY_NAME["stall"], later.rows("stall")))
    assert seconds(places.update()) == [(55, "capture")]


def test_neighbours():
    found = [Place(10, "jit", ""), Place(20, "xid", ""), Place(20, "jit", ""), Place(30, "jit", "")]
    assert neighbour(found, 10, 1) == found[1]
    assert neighbour(found, 20, -1) == found[0]
    assert neighbour(found, 30, 1) is None
    assert neighbour(found, 10, -1) is None
