"""Any session, any size, any choice: exactly the lines and cells asked for, in known styles."""

from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.clock import NS
from opusmon.ui.glyphs import BY_NAME as GLYPHS
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.stalls_state import SORTS

from .fakestalls import PANE, FakeStalls, add_host, add_stall, add_status, four, many, quiet
from .fakeview import END, NAN, assert_fills

VIEWS = [FakeStalls(), quiet(), four(), many(40), FakeStalls(), FakeStalls()]
add_stall(
    VIEWS[4],
    END,
    "wait",
    process="日本語" * 9,
    thread="日本" * 9,
    call="語" * 60,
    reason="語" * 60,
    pid=2**31 - 1,
    tid=-1,
    dur_ns=1e300,
    code=-3e38,
    count=3e38,
    size_b=1e300,
    before="x" * 5000,
    stack=";".join(["f" * 300] * 20),
)
add_host(VIEWS[4], cpus=0, runnable=1e9, swap_in_bps=1e30)
add_stall(VIEWS[5], END, "capture", dur_ns=-5e9, code=901, stream=2**64 - 1, count=NAN)
add_stall(VIEWS[5], END, "", process="", thread="", call="", dur_ns=NAN)
add_status(VIEWS[5], channel="stall", field="x", state="error", reason="no", remedy="yes")


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(VIEWS),
    st.integers(0, 240),
    st.integers(0, 60),
    st.sampled_from(list(GLYPHS.values())),
    st.builds(
        PaneState,
        selected=st.integers(0, 40),
        scroll=st.integers(0, 40),
        filter=st.sampled_from(["", "vllm", "zzz", "!"]),
        sort=st.sampled_from(["", *SORTS]),
        detail=st.booleans(),
        maximized=st.booleans(),
    ),
    st.sampled_from([0, 1, NS, 60 * NS, 300 * NS, 86_400 * NS]),
)
def test_exactly_the_size(view, width, height, glyphs, state, span_ns):
    it = Frame(view, END + NS // 3, span_ns, Size(width, height), glyphs, state)
    assert_fills(PANE, it)
