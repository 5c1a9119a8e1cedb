from hypothesis import given
from hypothesis import strategies as st

from opusmon.ui.glyphs import ASCII
from opusmon.ui.panes.base import Frame, Size, first_shown
from opusmon.ui.panes.waiting import WaitingPane
from opusmon.ui.text import line_cells, plain

from .fakeview import FakeView

PANE = WaitingPane(
    "stalls",
    4,
    ("off-CPU time per thread, with its stack", "synchronous waits on CUDA streams"),
    "eBPF needs root or CAP_BPF and CAP_PERFMON",
    "sudo opusmon",
)


def frame(width, height):
    return Frame(FakeView(), 0, 1, Size(width, height), ASCII)


def test_reason_remedy_and_what_it_would_show():
    assert [plain(line).rstrip() for line in PANE.render(frame(60, 9))] == [
        "Not running: eBPF needs root or CAP_BPF and CAP_PERFMON",
        "",
        "To enable it:",
        "  sudo opusmon",
        "",
        "It would show:",
        "  off-CPU time per thread, with its stack",
        "  synchronous waits on CUDA streams",
        "",
    ]


def test_a_narrow_pane_wraps_instead_of_losing_words():
    lines = [plain(line).rstrip() for line in PANE.render(frame(20, 20))]
    assert lines[:4] == ["Not running: eBPF", "needs root or", "CAP_BPF and", "CAP_PERFMON"]


def test_without_a_remedy_it_does_not_promise_one():
    bare = WaitingPane("stalls", 4, (), "this kernel has no BPF")
    assert "enable" not in "".join(plain(line) for line in bare.render(frame(60, 9)))


def test_title_and_summary():
    assert PANE.title(frame(60, 9)) == "4 stalls  off"
    assert plain(PANE.summary(frame(40, 1))) == "4 stalls  off: eBPF needs root or CAP_BP"
    assert PANE.items(frame(40, 1)) == 0


def test_text_from_outside_is_cleaned():
    pane = WaitingPane("x", 1, ("\x1b[2Jshow",), "bad\x1b]0;t\x07 reason", "run\nme")
    text = "".join(plain(line) for line in pane.render(frame(40, 10)))
    assert text.isprintable()


@given(st.integers(0, 260), st.integers(0, 80))
def test_exactly_the_size(width, height):
    lines = PANE.render(frame(width, height))
    assert len(lines) == height
    assert {line_cells(line) for line in lines} <= {width}


@given(st.integers(-5, 40), st.integers(-5, 40), st.integers(0, 30), st.integers(0, 20))
def test_the_selected_item_is_always_in_sight(selected, scroll, count, room):
    first = first_shown(selected, scroll, count, room)
    assert 0 <= first <= max(count - max(room, 1), 0)
    if room and count:
        chosen = min(max(selected, 0), count - 1)
        assert first <= chosen < first + max(room, 1)
