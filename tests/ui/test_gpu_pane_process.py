import math

import numpy as np
import pytest

from opusmon.channels import GPU
from opusmon.clock import NS
from opusmon.ui.panes.history import histories, nice_step

from .fakeview import (
    END,
    GIB,
    NAN,
    PANE,
    T0,
    FakeView,
    add_processes,
    frame,
    gpu_fields,
    render,
    session,
    text,
)


def test_mig_instances_are_indented_under_their_gpu():
    view = session(1)
    for gi in (1, 2):
        view.add(
            "gpu", END, gpu=0, **gpu_fields(gi=gi, mem_total_b=16 * GIB, mem_used_b=4 * GIB, power_mw=NAN)
        )
    lines = render(view, 80, 17)
    rows = [line for line in lines if line.startswith("   gi")]
    assert [row.split()[0] for row in rows] == ["gi1", "gi2"]
    assert all("4/16" in row and " --" in row for row in rows)
    assert lines.index(rows[0]) > next(at for at, line in enumerate(lines) if "H200" in line)
    assert PANE.items(frame(view)) == 3


def processes(**state):
    view = session(2)
    add_processes(view, END - 2 * NS, 2, each=3)
    view.add(
        "gpu_process",
        END - 2 * NS,
        gpu=1,
        gi=-1,
        pid=99,
        name="",
        user="root",
        kind="",
        mem_b=NAN,
        sm_pct=NAN,
    )
    lines = render(view, 80, 17, processes=True, **state)
    at = next(place for place, line in enumerate(lines) if "PID" in line)
    return [line for line in lines[at + 1 : -1] if line]


def test_processes_are_sorted_by_memory_with_the_unknown_last():
    pids = [line.lstrip("> ").split()[0] for line in processes()]
    assert pids == ["12000", "12001", "12002", "12100", "12101", "12102", "99"]
    assert processes()[-1].split(None, 3)[-1].endswith("(not visible from here)")


@pytest.mark.parametrize(
    ("sort", "first"), [("pid", "99"), ("sm", "12000"), ("name", "99"), ("user", "99"), ("gpu", "12000")]
)
def test_processes_can_be_sorted(sort, first):
    assert processes(sort=sort)[0].lstrip("> ").split()[0] == first


def test_processes_can_be_filtered():
    assert len(processes(filter="worker-1")) == 2
    assert len(processes(filter="ROOT")) == 1
    assert processes(filter="nothing")[0] == ' no process matches "nothing"'


def test_the_selection_moves_among_the_processes():
    assert [line.startswith(">") for line in processes(selected=2)] == [False, False, True, *[False] * 4]


def test_a_process_that_ended_is_gone_at_the_next_scan():
    view = session(1)
    add_processes(view, END - 6 * NS, 1, each=2)
    add_processes(view, END - NS, 1, each=1)
    body = text(view, 80, 24, processes=True)
    assert "12000" in body
    assert "12001" not in body


def test_a_process_name_cannot_reach_the_terminal():
    view = session(1)
    view.add(
        "gpu_process",
        END,
        gpu=0,
        gi=-1,
        pid=7,
        name="\x1b[2J\x07[red]x\n\u202e",
        user="a\tb",
        kind="",
        mem_b=1,
    )
    body = text(view, 80, 20)
    assert "?[red]x ?" in body
    assert body.replace("\n", "").isprintable()


def history(view, t, columns=60, span_ns=60 * NS):
    drawn = frame(view, t=t, span_ns=span_ns)
    return histories(drawn, "gpu", ["hbm_bw_pct"], GPU.key, columns, NS)[0, -1]["hbm_bw_pct"]


def test_steps_are_round_and_never_finer_than_the_rows():
    assert nice_step(60 * NS, 60, NS) == NS
    assert nice_step(60 * NS, 400, NS) == NS
    assert nice_step(300 * NS, 200, NS) == 2 * NS
    assert nice_step(3600 * NS, 100, NS) == 60 * NS
    assert nice_step(24 * 3600 * NS, 100, NS) == 1200 * NS
    assert nice_step(10**18, 10, NS) % (24 * 3600 * NS) == 0


def test_history_holds_the_measured_values_in_order():
    view = FakeView()
    for second in range(1, 61):
        view.add("gpu", T0 + second * NS, gpu=0, **gpu_fields(hbm_bw_pct=float(second)))
    assert history(view, END).tolist() == [float(second) for second in range(1, 61)]


def test_a_gap_stays_a_gap_and_one_late_tick_is_bridged():
    view = FakeView()
    for second in range(1, 61):
        if not 20 <= second < 30 and second != 50:
            value = NAN if second == 55 else float(second)
            view.add("gpu", T0 + second * NS, gpu=0, **gpu_fields(hbm_bw_pct=value))
    values = history(view, END)
    assert np.isnan(values[19:29]).all()
    assert values[18] == 19
    assert values[29] == 30
    assert values[49] == 49
    assert math.isnan(values[54])  # a row without a value is not bridged


def test_bins_do_not_shimmer_as_the_playhead_moves():
    view = session(1)
    early, late = history(view, END - NS, 20), history(view, END - NS + 100_000_000, 20)
    assert early.tolist() == late.tolist()
    step_ns = nice_step(60 * NS, 20, NS)
    moved = history(view, END - NS + step_ns, 20)
    assert moved[:-2].tolist() == early[1:-1].tolist()
