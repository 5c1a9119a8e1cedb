"""Reading goes on, or says why not, whatever happens to the file under the screen."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
from sessions import h200x2

from opusmon.channels import BY_NAME, GPU
from opusmon.clock import NS, ManualClock
from opusmon.guarded import GuardedStore
from opusmon.recording import Recorder, Recording
from opusmon.schema import Batch, Channel, Field, StringTable
from opusmon.session import ReplaySession
from opusmon.ui.glyphs import BRAILLE
from opusmon.ui.header import Facts, header
from opusmon.ui.marks import Places
from opusmon.ui.panes import PANES
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.screens.cost import cost_lines
from opusmon.window import Window

STREAMS = Path(__file__).parent / "data" / "h200-streams.opusmon"


def draw_everything(window, t):
    """All pure functions of the screen."""
    for pane in PANES:
        for state in (PaneState(), PaneState(maximized=True, processes=True)):
            frame = Frame(window, t, 300 * NS, Size(78, 21), BRAILLE, state)
            pane.title(frame), pane.render(frame), pane.summary(frame), pane.items(frame)
    header(window, t, Facts("h", "PAUSED", False, 0, "", "", None, 0), 160)
    cost_lines(window, t)
    Places(window).update()


def arbitrary_rows(channel, t0, texts, n=40):
    """Rows of any numbers and of text ids that mostly exist."""
    random_ = np.random.default_rng(len(channel.fields))
    rows = np.zeros(n, channel.dtype)
    rows["t"] = t0 + np.arange(n) * NS
    for field in channel.fields:
        rows[field.name] = random_.integers(0, texts, n) * (1 if field.text or field.unit != "ns" else 10**7)
    return rows


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("change", ["drop", "retype"])
def test_a_session_of_another_version_is_drawn_as_far_as_it_goes(tmp_path, name, change):
    """Every field of every channel, dropped or of another type in turn."""
    original = Recording.open(STREAMS if name == "stream" else h200x2())
    if name in original.channels:
        rows = original.query(name, 0, original.t0 + 70 * NS)
    else:
        rows = arbitrary_rows(BY_NAME[name], original.t0, texts=50)
    for field in BY_NAME[name].fields:
        others = tuple(f for f in BY_NAME[name].fields if f.name != field.name)
        if change == "retype":
            others += (Field(field.name, "<i8" if field.dtype != "<i8" else "<f8"),)
        key = tuple(k for k in BY_NAME[name].key if k in {f.name for f in others})
        theirs = Channel(name, BY_NAME[name].kind, others, key)
        path = tmp_path / f"{field.name}.opusmon"
        recorder = Recorder(path, strings=original.strings, clock=ManualClock(original.t1))
        for batch in original.batches(0, original.t0 + 70 * NS):
            if batch.channel.name != name:
                recorder.push(batch)
        out = np.zeros(len(rows), theirs.dtype)
        with np.errstate(invalid="ignore"):
            for column in theirs.dtype.names:
                if column in rows.dtype.names:
                    out[column] = rows[column]
        recorder.push(Batch(theirs, out))
        recorder.close()
        store = GuardedStore(Recording.open(path))
        window = Window.over(store)
        assert window.query(name, 0, window.t1).dtype == BY_NAME[name].dtype
        draw_everything(window, window.t1)
        assert store.trouble == ""
        store.close()
    original.close()


def test_a_missing_column_is_missing_and_not_zero(tmp_path):
    fields = tuple(f for f in GPU.fields if f.name != "power_mw")
    theirs = Channel("gpu", "gauge", fields, GPU.key)
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock())
    recorder.push(Batch(theirs, np.ones(1, theirs.dtype)))
    recorder.close()
    store = GuardedStore(Recording.open(tmp_path / "a"))
    (row,) = store.query("gpu", 0, 9)
    assert np.isnan(row["power_mw"])
    assert row["temp_c"] == 1
    (binned,) = store.binned("gpu", ["power_mw", "temp_c"], 0, 9, NS)
    assert (binned["power_mw_n"], binned["temp_c_mean"]) == (0, 1)
    store.close()


def test_summaries_are_those_of_the_file_where_its_columns_are_the_declared_ones(tmp_path):
    """And none while rows of the channel are in memory: those of the file may be only some of all."""
    fewer = Channel("gpu", "gauge", GPU.fields[:-1], key=GPU.key)
    for channel, there in ((GPU, True), (fewer, False)):
        path = tmp_path / f"{there}.opusmon"
        recorder = Recorder(path, strings=StringTable(), clock=ManualClock(0, 10**18))
        rows = np.zeros(3, channel.dtype)
        rows["t"], rows["power_mw"] = np.array([1, 2, 3]) * NS, (500, 700, 600)
        recorder.push(Batch(channel, rows))
        recorder.close()
        with Recording.open(path) as recording:
            window = Window.over(GuardedStore(recording))
            told = window.extremes("gpu", ["power_mw"], 0, 3 * NS)
            assert (told is not None) == there
            if told is not None:
                assert told[["power_mw_min", "power_mw_max"]].tolist() == [(500, 700)]
            window.push(Batch(GPU, np.zeros(1, GPU.dtype)))
            assert window.extremes("gpu", ["power_mw"], 0, 3 * NS) is None


@pytest.mark.parametrize("seed", range(6))
def test_a_file_that_is_damaged_while_it_is_shown(tmp_path, seed):
    path = tmp_path / "copy.opusmon"
    path.write_bytes(h200x2().read_bytes())
    session = ReplaySession(Recording.open(path), ManualClock(), follow=True)
    t = session.window.t1
    rng = random.Random(seed)
    size = path.stat().st_size
    if seed % 2:
        os.truncate(path, rng.randrange(size))
    else:
        with path.open("r+b") as file:
            file.seek(rng.randrange(size // 2))
            file.write(rng.randbytes(40_000))
    for back_s in (0, 30, 100, 200):
        session.window.refresh()
        draw_everything(session.window, t - back_s * NS)
    assert isinstance(session.trouble, str)
    session.close()


def test_what_cannot_be_read_is_said(tmp_path):
    path = tmp_path / "copy.opusmon"
    path.write_bytes(h200x2().read_bytes())
    session = ReplaySession(Recording.open(path), ManualClock())
    os.truncate(path, 30_000)
    assert len(session.window.query("gpu", 0, session.window.t1)) == 0
    assert session.trouble
    assert "\n" not in session.trouble
    session.close()


def test_a_follower_knows_when_the_recorder_has_ended_and_when_it_is_silent(tmp_path):
    wall = 1_700_000_000 * NS
    clock = ManualClock(10 * NS, wall)
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=clock, flush_ns=1)
    session = ReplaySession(Recording.open(tmp_path / "a"), clock, follow=True)
    assert session.word == "FOLLOW"
    clock.advance(25 * NS)
    assert session.late_ns(10 * NS) == 25 * NS
    recorder.close()
    session.window.refresh()
    assert session.word == "ENDED"
    assert session.late_ns(10 * NS) == 0
    session.close()
