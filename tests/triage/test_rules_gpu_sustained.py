"""Stretches of samples that are on, against a plain walk over them; and how findings of pieces become one."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from opusmon.channels import GPU, STREAM
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch, StringTable
from opusmon.triage.finding import Finding, merge
from opusmon.triage.scene import Scene
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.triage.sustained import sustained
from opusmon.window import Window


def walked(t, on, count, gap_ns, hold_ns):
    """The same, sample by sample."""
    rows, row = [], []
    for place in range(len(t)):
        if row and (not on[place] or t[place] - t[row[-1]] > gap_ns):
            rows.append(row)
            row = []
        if on[place]:
            row.append(place)
    rows = [one for one in [*rows, row] if len(one) >= max(count, 1)]
    joined = []
    for first, last in ((one[0], one[-1]) for one in rows):
        if joined and t[first] - t[joined[-1][1]] <= hold_ns:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return [(first, last, last == len(t) - 1) for first, last in joined]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=40),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 12),
)
def test_like_a_walk_over_the_samples(samples, count, gap_ns, hold_ns):
    t = np.cumsum(np.array([step for step, _ in samples], np.int64))
    on = np.array([flag for _, flag in samples], np.bool_)
    found = sustained(t, on, count=count, gap_ns=gap_ns, hold_ns=hold_ns)
    assert [(one.first, one.last, one.open) for one in found] == walked(t, on, count, gap_ns, hold_ns)


BASE = Finding("rule", "subject", NOTE, 0, 10, "base", (), "", "")


def test_the_weightier_gives_the_words_and_the_worse_the_severity():
    light_but_critical = replace(BASE, t0=5, t1=20, severity=CRIT, title="light", weight=1.0, open=True)
    heavy = replace(BASE, t0=0, t1=10, severity=WARN, title="heavy", weight=2.0)
    for order in ((heavy, light_but_critical), (light_but_critical, heavy)):
        (one,) = merge(order, 0)
        assert (one.t0, one.t1, one.severity, one.title, one.open) == (0, 20, CRIT, "heavy", True)


def test_of_equal_weight_the_worse_and_of_those_the_later_gives_the_words():
    (one,) = merge(
        [replace(BASE, severity=WARN, title="worse"), replace(BASE, t0=3, t1=12, title="later")], 0
    )
    assert one.title == "worse"
    (one,) = merge([replace(BASE, title="earlier"), replace(BASE, t0=3, t1=12, title="later")], 0)
    assert one.title == "later"


def test_series_are_split_by_value_in_time_order():
    rows = np.zeros(6, STREAM.dtype)
    rows["t"] = np.arange(1, 7) * NS
    rows["pid"] = [9, 7, 9, 7, 9, 9]
    rows["stream"] = [2, 3, 2, 3, 2**64 - 1, 2]
    view = Window(StringTable(), Anchors(), channels=[GPU])
    view.push(Batch(STREAM, rows))
    scene = Scene(view, 0, 7 * NS)
    for _ in range(2):  # the second time from memory
        series = [(key, (part["t"] // NS).tolist()) for key, part in scene.series("stream", "pid", "stream")]
        assert series == [((7, 3), [2, 4]), ((9, -1), [5]), ((9, 2), [1, 3, 6])]
    assert list(scene.series("stream", "no_such_field")) == []
    assert list(scene.series("gpu", "gpu")) == []
    assert len(scene.rows("never heard of")) == 0
