"""Looks that go forward read each row once; and ten-minute summaries spare reading what cannot be a finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.clock import NS
from opusmon.recording import Recording, store
from opusmon.recording.stage import Stage
from opusmon.schema import Batch
from opusmon.triage import run
from opusmon.triage.trail import Trail
from opusmon.window import Window

from .session import T0, Session
from .test_rules_host import CALM

MINUTES = 40
LINE_BPS = 26.562e9
WRITE_NS = 20 * NS
"""Time between two writes; the recorder writes each second, which takes seconds for a session."""


class Counted:
    """A view that counts the rows it gives, by channel."""

    def __init__(self, view: Window) -> None:
        self._view = view
        self.rows: dict[str, int] = {}

    def __getattr__(self, name):
        return getattr(self._view, name)

    def query(self, channel, t0, t1):
        rows = self._view.query(channel, t0, t1)
        self.rows[channel] = self.rows.get(channel, 0) + len(rows)
        return rows


class Unsummed(Counted):
    """A view without summaries."""

    def extremes(self, *_):
        return None


def serving(*only: str, **wrong) -> Session:
    """Links, processes, requests in flight: quiet, but for what is wrong: a function of the second by channel.

    Args:
        only: channels that there are besides gpu and engine; all by default.
        wrong: fields by channel.
    """
    session = Session()

    def add(channel, t, **fields):
        if not only or channel in only:
            session.add(channel, t, **{**fields, **wrong.get(channel, lambda _: {})(t)})

    for t in range(1, 60 * MINUTES + 1):
        add("host", t, **CALM)
        add("cgroup", t, cgroup="/vllm", throttled_pct=0, mem_used_b=30e9, mem_limit_b=64e9, oom_kills=2)
        session.add("engine", t, engine="h:1", model="m", running=8, waiting=0)
        session.add("gpu", t, gpu=0, gi=-1, sm_util_pct=5.0, gpu_busy_pct=5.0)
        add("process", t, pid=7, name="vllm", run_delay_pct=0.5)
        add("request_open", t, source="proxy", number=t // 8, no_token_ns=1e6)
        for link in range(4) if not only or "nvlink" in only else ():
            fields = {"tx_bps": 9e9, "rx_bps": 8e9, "state": 1, "speed_bps": LINE_BPS, "crc_errors": 3}
            more = wrong.get("nvlink", lambda _: {})(t) if link == 2 else {}
            session.add("nvlink", t, gpu=0, link=link, **{**fields, **more})
    return session


def filed(session: Session, path: Path) -> Recording:
    """As the recorder writes it, but for its pace."""
    view = session.view()
    connection, _ = store.create(path)
    connection.execute("PRAGMA synchronous=OFF")
    stage = Stage(session.strings)
    for begin in range(view.t0 - 1, view.t1, WRITE_NS):
        parts = {name: view.query(name, begin, begin + WRITE_NS) for name in view.channels}
        batches = [Batch(view.channels[name], rows) for name, rows in parts.items() if len(rows)]
        stage.build(batches).apply(connection)
    stage.finish([("closed", "0")]).apply(connection)
    store.finish(connection)
    return Recording.open(path, through=True)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """Forty minutes without any finding."""
    with filed(serving(), tmp_path_factory.mktemp("quiet") / "quiet.opusmon") as recording:
        yield recording


def over(view):
    return run.look_over(view, T0, T0 + MINUTES * 60 * NS)


# -- the trail ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ranges=st.lists(st.tuples(st.integers(-50, 700), st.integers(-5, 300)), min_size=1, max_size=12))
def test_a_trail_gives_the_rows_of_the_view_below_in_whatever_order_it_is_asked(ranges):
    session = Session()
    rng = np.random.default_rng(3)
    for t in np.sort(rng.integers(1, 600, 900)).tolist():  # many at the same instant
        session.add("stall", t, kind="wait", pid=int(rng.integers(0, 9)), dur_ns=1e7)
    view = session.view()
    trail = Trail(view)
    for first, length in ranges:
        t0, t1 = T0 + first * NS, T0 + (first + length) * NS
        assert trail.query("stall", t0, t1).tobytes() == view.query("stall", t0, t1).tobytes()


def test_a_look_over_a_recording_reads_each_row_once(quiet):
    """In pieces of ten minutes, each with up to eight minutes before it."""
    counted = Counted(Window.over(quiet))
    assert over(counted) == []
    assert quiet.counts()["gpu"] == counted.rows["gpu"] == 60 * MINUTES
    # Rules that look ten minutes further back by themselves make it hold more from their second piece on.
    assert 60 * MINUTES <= counted.rows["engine"] <= 60 * MINUTES + 600


# -- summaries ---------------------------------------------------------------------------------------------------


def test_what_summaries_rule_out_is_not_read(quiet):
    counted = Counted(Window.over(quiet))
    over(counted)
    assert set(counted.rows).isdisjoint({"nvlink", "process", "request_open", "host", "cgroup"})


@pytest.mark.parametrize(
    ("channel", "second", "fields", "rule"),
    [
        ("nvlink", range(1000, 1010), {"tx_bps": 22e9}, "nvlink_hot_link"),
        ("nvlink", range(1000, 1010), {"rx_bps": 1e9}, "nvlink_imbalance"),
        ("nvlink", range(1000, 1010), {"state": 0}, "nvlink_down"),
        ("nvlink", range(1000, 2401), {"crc_errors": 4}, "nvlink_errors"),
        ("process", range(1000, 1010), {"run_delay_pct": 30}, "process_starved"),
        ("host", range(1000, 1010), {"psi_cpu_some_pct": 60}, "cpu_saturated"),
        ("host", range(1000, 1010), {"runnable": 2000}, "cpu_saturated"),
        ("host", range(1000, 1010), {"psi_memory_some_pct": 60}, "memory_pressure"),
        ("host", range(1000, 1010), {"swap_in_bps": 0.6e6, "swap_out_bps": 0.6e6}, "memory_pressure"),
        ("host", range(1000, 1010), {"cpu_iowait_pct": 60}, "storage_waits"),
        ("host", range(1000, 1010), {"cpu_steal_pct": 60}, "cpu_stolen"),
        ("host", range(1000, 2401), {"oom_kills": 1}, "oom_kill"),
        ("cgroup", range(1000, 2401), {"oom_kills": 3}, "oom_kill"),
        ("cgroup", range(1000, 1010), {"throttled_pct": 60}, "cpu_quota_throttling"),
        ("cgroup", range(1000, 1010), {"mem_used_b": 63.9e9}, "cgroup_memory_near_limit"),
        ("request_open", range(1000, 1010), {"no_token_ns": 5e9}, "gpu_idle_requests_wait"),
    ],
)
def test_what_lasts_ten_seconds_is_found_as_without_summaries(tmp_path, channel, second, fields, rule):
    session = serving(channel, **{channel: lambda t: fields if t in second else {}})
    with filed(session, tmp_path / "wrong.opusmon") as recording:
        found = over(Counted(Window.over(recording)))
        plain = over(Unsummed(Window.over(recording)))
    assert rule in {one.rule for one in found}
    assert list(map(repr, found)) == list(map(repr, plain))


def test_a_file_that_is_still_written_has_no_summaries_of_its_end(tmp_path):
    view = serving(process=lambda t: {"run_delay_pct": 30} if t > 60 * MINUTES - 60 else {}).view()
    connection, _ = store.create(tmp_path / "open.opusmon")
    stage = Stage(view.strings)
    stage.build([Batch(view.channels["process"], view.query("process", 0, view.t1))]).apply(connection)
    connection.close()
    with Recording.open(tmp_path / "open.opusmon") as recording:
        assert recording.extremes("process", ["run_delay_pct"], T0, view.t1) is None
        (found,) = over(Window.over(recording))
    assert (found.rule, found.t1, found.open) == ("process_starved", view.t1, True)
