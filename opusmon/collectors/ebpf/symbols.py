"""The entries of libcuda that are probed, and what each says.

In the variants `_ptsz` and `_ptds` the null stream means the per-thread default stream; their programs end
in `_pt`. cudart asks for either kind through cuGetProcAddress, which answers with these exported addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Group = Literal["launch", "poll", "always"]
"""launch and poll have a budget and may be on only in bursts; always is cheap enough (hundreds to thousands a second)."""

STACK_ARGUMENT_9 = {"x86_64": 24, "aarch64": 0}
"""Machine to where the ninth integer argument lies, in bytes above the stack pointer at function entry.

System V x86-64: six in registers, the return address at 0, the seventh at 8. AAPCS64: eight in registers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One function to probe.

    Attributes:
        symbol: exported name.
        program: BPF program at its entry.
        on_return: BPF program at its return, "" for none.
        group: how it is kept within the budget.
    """

    symbol: str
    program: str
    on_return: str = ""
    group: Group = "always"


def _pair(
    symbol: str, program: str, suffix: str, on_return: str = "", group: Group = "always"
) -> list[Entry]:
    """A function and its per-thread variant."""
    return [
        Entry(symbol, program, on_return, group),
        Entry(f"{symbol}{suffix}", f"{program}_pt", on_return, group),
    ]


def _launches() -> Iterator[Entry]:
    """The most used first: probes are removed in this order, at 0.1 s each, and cost until then."""
    stack, stack_pt = _pair("cuLaunchKernel", "launch_stack", "_ptsz", group="launch")
    config, config_pt = _pair("cuLaunchKernelEx", "launch_config", "_ptsz", group="launch")
    yield from (stack, config, stack_pt, config_pt)
    yield from _pair("cuLaunchCooperativeKernel", "launch_stack", "_ptsz", group="launch")
    yield from _pair("cuGraphLaunch", "launch_graph", "_ptsz")


def _async_copies() -> Iterator[Entry]:
    kinds = {
        "cuMemcpyHtoDAsync_v2": "copy_h2d_async",
        "cuMemcpyDtoHAsync_v2": "copy_d2h_async",
        "cuMemcpyDtoDAsync_v2": "copy_d2d_async",
        "cuMemcpyAsync": "copy_any_async",
        "cuMemcpyPeerAsync": "copy_peer_async",
        "cuMemcpy2DAsync_v2": "copy_2d_async",
        "cuMemcpy3DAsync_v2": "copy_3d_async",
    }
    for symbol, program in kinds.items():
        yield from _pair(symbol, program, "_ptsz")


def _sync_copies() -> Iterator[Entry]:
    waiting = {
        "cuMemcpyHtoD_v2": "copy_h2d",
        "cuMemcpyDtoH_v2": "copy_d2h",
        "cuMemcpy": "copy_any",
        "cuMemcpy2D_v2": "copy_2d",
        "cuMemcpy2DUnaligned_v2": "copy_2d",
        "cuMemcpy3D_v2": "copy_3d",
    }
    for symbol, program in waiting.items():
        yield from _pair(symbol, program, "_ptds", "wait_end")
    yield from _pair("cuMemcpyDtoD_v2", "copy_d2d", "_ptds")
    yield from _pair("cuMemcpyPeer", "copy_peer", "_ptds")


def _waits() -> Iterator[Entry]:
    yield from _pair("cuStreamSynchronize", "wait_stream", "_ptsz", "wait_end")
    yield Entry("cuCtxSynchronize", "wait_context", "wait_end")
    yield Entry("cuCtxSynchronize_v2", "wait_context", "wait_end")
    yield Entry("cuEventSynchronize", "wait_event", "wait_end")
    yield from _pair("cuEventRecord", "event_record", "_ptsz")
    yield from _pair("cuEventRecordWithFlags", "event_record", "_ptsz")


def _polls() -> Iterator[Entry]:
    yield from _pair("cuStreamQuery", "poll_stream", "_ptsz", "poll_end", "poll")
    yield Entry("cuEventQuery", "poll_event", "poll_end", "poll")


ENTRIES: dict[str, Entry] = {
    entry.symbol: entry for entry in (*_launches(), *_async_copies(), *_sync_copies(), *_waits(), *_polls())
}
"""By symbol. A driver that lacks some is probed on the others."""
