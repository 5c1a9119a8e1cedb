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
        program: BPF program at its entry, "" for none.
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
    """The most used first: probes are removed in this order, at 0.1 s each or some at once, and cost until then."""
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


def _timed() -> Iterator[Entry]:
    """The most used first, as of launches. A group of its own, set by itself at the same places."""
    kinds = {
        "cuLaunchKernel": "time_stack",
        "cuLaunchKernelEx": "time_config",
        "cuGraphLaunch": "time_graph",
        "cuLaunchCooperativeKernel": "time_stack",
    }
    for suffix, variant in (("", ""), ("_ptsz", "_pt")):
        for symbol, program in kinds.items():
            yield Entry(f"{symbol}{suffix}", f"{program}{variant}", "time_end", "launch")


TIMED_ENTRIES: dict[str, Entry] = {entry.symbol: entry for entry in _timed()}
"""Launch calls by symbol, to be timed from entry to return. All of them are of the group launch."""


# What the stalls collector probes

CALLS: tuple[str, ...] = (
    "",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuCtxSynchronize",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpy",
    "cuMemcpy2D_v2",
    "cuMemcpy3D_v2",
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemCreate",
    "cuMemFree_v2",
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleLoadFatBinary",
    "cuLibraryLoadData",
    "cuFuncLoad",
    "cuInit",
    "cuDevicePrimaryCtxRetain",
    "cuCtxCreate",
    "cuStreamBeginCapture_v2",
    "cuStreamBeginCaptureToGraph",
    "cuStreamEndCapture",
    "cuGraphLaunch",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamQuery",
    "cuEventQuery",
    "SSL_do_handshake",
)
"""Number of a call in stalls.bpf.c to its name; variants (`_ptsz`, versions) share one."""


def _stall_waits() -> Iterator[Entry]:
    yield from _pair("cuStreamSynchronize", "on_cuStreamSynchronize", "_ptsz", "end_wait")
    yield Entry("cuEventSynchronize", "on_cuEventSynchronize", "end_wait")
    for symbol in ("cuCtxSynchronize", "cuCtxSynchronize_v2"):
        yield Entry(symbol, "on_cuCtxSynchronize", "end_wait")
    for symbol in ("cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpy", "cuMemcpy2D_v2", "cuMemcpy3D_v2"):
        yield from _pair(symbol, f"on_{symbol}", "_ptds", "end_wait")
    yield Entry("cuMemcpy2DUnaligned_v2", "on_cuMemcpy2D_v2", "end_wait")


def _stall_memory_and_code() -> Iterator[Entry]:
    yield from _pair("cuMemAllocAsync", "on_cuMemAllocAsync", "_ptsz", "end_slow")
    memory = ("cuMemAlloc_v2", "cuMemCreate", "cuMemFree_v2")
    modules = ("cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary")
    for symbol in (*memory, *modules, "cuLibraryLoadData", "cuFuncLoad"):
        yield Entry(symbol, f"on_{symbol}", "end_slow")
    for symbol in ("cuInit", "cuDevicePrimaryCtxRetain"):
        yield Entry(symbol, f"on_{symbol}", "end_init")
    for symbol in ("cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4"):
        yield Entry(symbol, "on_cuCtxCreate", "end_init")


def _stall_captures() -> Iterator[Entry]:
    for symbol in ("cuStreamBeginCapture_v2", "cuStreamBeginCaptureToGraph"):
        yield from _pair(symbol, f"on_{symbol}", "_ptsz", "end_begin")
    yield from _pair("cuStreamEndCapture", "on_cuStreamEndCapture", "_ptsz", "end_end")
    yield from _pair("cuGraphLaunch", "on_cuGraphLaunch", "_ptsz")


def _stall_launches() -> Iterator[Entry]:
    """Launches with their results, then what else makes up a captured sequence; the most used first."""
    for symbol in ("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"):
        yield from _pair(symbol, f"on_{symbol}", "_ptsz", f"on_{symbol}_result", "launch")
    copies = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpyAsync")
    others = ("cuMemsetD8Async", "cuMemsetD32Async", "cuEventRecord", "cuStreamWaitEvent")
    for symbol in (*copies, *others):
        yield from _pair(symbol, f"on_{symbol}", "_ptsz", group="launch")
    for symbol in ("cuEventRecordWithFlags", "cuEventRecordWithFlags_ptsz"):
        variant = "_pt" if symbol.endswith("_ptsz") else ""
        yield Entry(symbol, f"on_cuEventRecord{variant}", group="launch")


def _stall_polls() -> Iterator[Entry]:
    for symbol in ("cuStreamQuery", "cuStreamQuery_ptsz"):
        yield Entry(symbol, "", "on_cuStreamQuery_result", "poll")
    yield Entry("cuEventQuery", "", "on_cuEventQuery_result", "poll")


STALL_ENTRIES: dict[str, Entry] = {
    entry.symbol: entry
    for entry in (
        *_stall_waits(),
        *_stall_memory_and_code(),
        *_stall_captures(),
        *_stall_launches(),
        *_stall_polls(),
    )
}
"""By symbol, of libcuda. The groups launch and poll have a budget, as for streams."""

TLS_ENTRIES: dict[str, Entry] = {
    entry.symbol: entry
    for entry in (
        Entry("SSL_do_handshake", "on_handshake", "end_handshake"),
        Entry("SSL_free", "on_ssl_free"),
    )
}
"""By symbol, of OpenSSL's libssl. Other TLS libraries (Go, rustls, BoringSSL linked in) are not seen."""
