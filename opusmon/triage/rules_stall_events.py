"""Rules about captures, compilers, loading, memory, page faults and TLS. How bad one event is says `severity`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from opusmon.jit_words import WARM_UP
from opusmon.schema import Rows
from opusmon.times import format_duration
from opusmon.triage.cuda_names import innermost, process_name, text_of, thread_name
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, NONE, NOTE, STALL_LIMITS, WARN, Levels, distinct
from opusmon.triage.stall_bouts import FAILED, Bout, Sums, begins, bouts
from opusmon.triage.stall_findings import (
    each_counts,
    evidence_of,
    numbers_of,
    of_kinds,
    severity_of,
    stall_finding,
)
from opusmon.triage.warmth import COLD, UNKNOWN, warmth

# -- captures ----------------------------------------------------------------------------------------------------


@rule("stall")
def capture_aborted(scene: Scene) -> Iterator[Finding]:
    """The capture of a CUDA graph failed: with what code, and which thread and call broke it.

    Every one counts: the engine goes on without that graph, or not at all. Other threads that broke it by the same call
    are told together where they have one name: often each is a new one.
    """
    rows = of_kinds(scene, "capture")
    rows = rows[np.nan_to_num(rows["code"]) != 0]
    levels = np.full(len(rows), FAILED, np.int8)
    by = ("pid", "tid", "code", rows["by_tid"] == rows["tid"], "by_thread", "by_call")
    for one in bouts(scene, rows, levels, by, each_counts):
        yield _capture_finding(scene, one)


def _capture_finding(scene: Scene, one: Bout) -> Finding:
    row = one.rows[-1]
    subject, code = thread_name(scene, row), int(row["code"])
    by, who = _culprit(scene, one.rows)
    found = [
        Evidence("code", float(code)),
        Evidence("reason", text_of(scene, row, "reason")),
        Evidence("count", float(one.calls)),
    ]
    if by:
        found += [Evidence("by", by), Evidence("by_code", float(row["by_code"]))]
    found += [Evidence(n, text_of(scene, row, n)) for n in ("before",) if row[n]]
    if stack := one.stack:
        found.append(Evidence("stack", innermost(scene.text(stack))))
    times = f", {one.calls} times in {format_duration(one.span_ns)}" if one.calls > 1 else ""
    cause, change = _capture_words(code, by, is_own=bool(row["by_tid"] == row["tid"]))
    return stall_finding(
        "capture_aborted",
        f"{subject}: {code}{f' by {who}' if who else ''}",
        one,
        f"{subject}: graph capture failed with {code}{f', broken by {by}' if by else ''}{times}",
        tuple(found),
        cause=f"likely {cause}",
        next=change,
        is_state=False,
    )


_LINE = "`opusmon check graph` names the line"
_OF_CODE = {
    904: (
        "a side stream that took part in the capture and was not joined to it again",
        f"let the capturing stream wait for it before the capture ends; {_LINE}",
    ),
    905: (
        "work that waits for a stream outside of the capture, or lets one wait for it",
        f"let that stream join the capture first and come back to it at the end; {_LINE}",
    ),
    906: (
        "work on the default stream, which waits for all others",
        f"do the work on the capturing stream; {_LINE}",
    ),
}
"""Results of a capture that mean one thing, whatever call met them: cause, and what to do."""


def _capture_words(code: int, by: str, *, is_own: bool) -> tuple[str, str]:
    """Cause, and what to do.

    Args:
        code: with which the capture ended.
        by: what broke it, "" where that was not seen.
        is_own: the capturing thread itself did.
    """
    if code in _OF_CODE:
        return _OF_CODE[code]
    if not by:
        return (
            "a call that is not allowed while a stream captures; which one was not seen",
            f"see the calls before it (stalls pane); {_LINE}",
        )
    if is_own:
        return f"{by}, which it may not call meanwhile", f"take that call out of the captured code; {_LINE}"
    return (
        f"{by}: in global mode no thread may call that while another captures",
        "capture in mode thread_local, or keep the other thread still meanwhile; see the calls before it (stalls pane)",
    )


def _culprit(scene: Scene, rows: Rows) -> tuple[str, str]:
    """`cuMemAlloc_v2 in 4 threads nccl`, and what it is called whichever threads they are; "" where that was not seen."""
    row = rows[-1]
    if not row["by_tid"] and not row["by_call"]:
        return "", ""
    call = text_of(scene, row, "by_call") or "a call"
    if not row["by_tid"]:
        return call, call
    if row["by_tid"] == row["tid"]:
        own = f"{call} in the capturing thread"
        return own, own
    name, tids = text_of(scene, row, "by_thread") or "?", np.unique(rows["by_tid"])
    which = f"thread {name} {tids[0]}" if len(tids) == 1 else f"{len(tids)} threads {name}"
    return f"{call} in {which}", f"{call} in thread {name}"


@rule("stall")
def init_in_capture(scene: Scene) -> Iterator[Finding]:
    """Something was used for the first time inside a graph capture: a context, a library, code that is loaded lazily.

    It can break the capture (`severity.STALL_LIMITS`).
    """
    rows = of_kinds(scene, "init_in_capture")
    levels = severity_of(scene, rows)
    for one in bouts(scene, rows, levels, ("pid", "tid", "call"), each_counts):
        subject, call = thread_name(scene, one.worst), text_of(scene, one.worst, "call") or "a call"
        yield stall_finding(
            "init_in_capture",
            f"{subject}: {call}",
            one,
            f"{subject}: {call} inside a graph capture, {numbers_of(one)}",
            (
                Evidence("reason", text_of(scene, one.worst, "reason")),
                *evidence_of(scene, one, "init_in_capture"),
            ),
            cause="likely the first use of a kernel or library, which was not warmed up before the capture",
            next="run the same work once before capturing, or set CUDA_MODULE_LOADING=EAGER",
            is_state=False,
        )


# -- what belongs before serving -----------------------------------------------------------------------------------


def _while_serving(scene: Scene, rows: Rows) -> tuple[Rows, Levels]:
    """Stalls of processes that served already, and their severity; a note at most where that is not known."""
    levels, begun = severity_of(scene, rows), begins(rows)
    kept = np.ones(len(rows), bool)
    for pid in distinct(rows["pid"]):
        own = np.flatnonzero(rows["pid"] == pid)
        warm = warmth(scene, pid, begun[own])
        kept[own[warm == COLD]] = False
        unsure = own[warm == UNKNOWN]
        levels[unsure] = np.minimum(levels[unsure], NOTE)
    return rows[kept], levels[kept]


@rule("stall")
def jit_while_serving(scene: Scene) -> Iterator[Finding]:
    """Kernels were compiled while a process served: requests wait for the compiler.

    Thresholds: `severity.STALL_LIMITS`, `stall_often`, `warm_age_s`, `warm_quiet_s`. Compiling while a process starts is
    no finding. Many short ones are as bad as a long one: what is timed is the compiler alone, not the frontend before it.
    """
    rows, levels = _while_serving(scene, of_kinds(scene, "jit"))

    def grade(sums: Sums) -> Levels:
        often = np.where(sums.calls >= scene.limits["stall_often"], WARN, NONE)
        return np.maximum(each_counts(sums), often).astype(np.int8)

    for one in bouts(scene, rows, levels, ("pid",), grade):
        subject, program = process_name(scene, one.worst), text_of(scene, one.worst, "call") or "a compiler"
        yield stall_finding(
            "jit_while_serving",
            subject,
            one,
            f"{subject} compiled code while serving: {program} {numbers_of(one)}",
            (Evidence("program", program), *evidence_of(scene, one, "jit")),
            cause="likely a shape, dtype or batch size that was not compiled before: Triton, inductor or nvcc",
            next=WARM_UP,
            is_state=False,
        )


def _sums_of_time(scene: Scene, sums: Sums) -> Levels:
    """Rows of alloc, free and module add up a second; calls that are many count as well."""
    levels = np.where((sums.warn > 0) | (sums.calls >= scene.limits["alloc_storm"]), NOTE, NONE)
    levels[(sums.crit > 0) | (sums.warn >= scene.limits["stall_some"])] = WARN
    levels[sums.calls >= 10 * scene.limits["alloc_storm"]] = WARN
    levels[sums.crit >= scene.limits["stall_some"]] = CRIT
    return levels.astype(np.int8)


@rule("stall", join_s=60)
def module_while_serving(scene: Scene) -> Iterator[Finding]:
    """Code was loaded into the GPU after warm-up: it waits for the device.

    Thresholds: `severity.STALL_LIMITS` for the sum of a second; `stall_some`, `alloc_storm` for a minute.
    """
    rows = of_kinds(scene, "module")
    levels = severity_of(scene, rows)
    for one in bouts(scene, rows, levels, ("pid", "tid"), lambda s: _sums_of_time(scene, s)):
        subject, call = thread_name(scene, one.worst), text_of(scene, one.worst, "call")
        yield stall_finding(
            "module_while_serving",
            subject,
            one,
            f"{subject} loaded code after warm-up: {call} {numbers_of(one, each=False)}",
            (Evidence("call", call), *evidence_of(scene, one, "module")),
            cause="likely kernels used for the first time, which CUDA loads lazily",
            next="warm up with such requests, or set CUDA_MODULE_LOADING=EAGER",
        )


@rule("stall", join_s=60)
def allocation_while_serving(scene: Scene) -> Iterator[Finding]:
    """Device memory was taken or freed after warm-up, often or long: such calls wait for the device.

    Thresholds: `severity.STALL_LIMITS` for the sum of a second; `alloc_storm` and `stall_some` for a minute.
    """
    rows = of_kinds(scene, "alloc", "free")
    levels = severity_of(scene, rows)
    for one in bouts(scene, rows, levels, ("pid", "tid"), lambda s: _sums_of_time(scene, s)):
        subject, call = thread_name(scene, one.worst), text_of(scene, one.worst, "call")
        codes = one.rows["code"][np.nan_to_num(one.rows["code"]) != 0]
        failed = f", failed with CUDA error {codes[-1]:.0f}" if len(codes) else ""
        extra = (Evidence("code", float(codes[-1])),) if len(codes) else ()
        calls = Evidence("calls_per_minute", float(one.calls), "", scene.limits["alloc_storm"])
        yield stall_finding(
            "allocation_while_serving",
            subject,
            one,
            f"{subject} took or freed GPU memory after warm-up: {call} {numbers_of(one, each=False)}{failed}",
            (calls, *extra, *evidence_of(scene, one, "alloc")),
            cause="likely memory is short and the framework frees its caches to try again"
            if failed
            else "likely a memory pool that still grows, or a framework cache that is emptied",
            next="look at the free memory of the GPU (gpu pane); leave the framework more room or a larger pool",
        )


@rule("stall", join_s=60)
def page_fault_storm(scene: Scene) -> Iterator[Finding]:
    """A serving process met page faults by the ten thousand in a second.

    Thresholds: `severity.STALL_LIMITS` (10,000 and 100,000 in a row of a second), `stall_some`, and the collector's own.
    Loading a model at the start is no finding.
    """
    rows, levels = _while_serving(scene, of_kinds(scene, "page_faults"))

    def grade(sums: Sums) -> Levels:
        some = scene.limits["stall_some"]
        levels = np.where(sums.warn >= some, WARN, np.where(sums.calls > 0, NOTE, NONE))
        return np.where(sums.crit >= some, CRIT, levels).astype(np.int8)

    for one in bouts(scene, rows, levels, ("pid",), grade):
        subject = process_name(scene, one.worst)
        per_s = one.calls / max(one.total_ns / 1e9, 1e-9)
        yield stall_finding(
            "page_fault_storm",
            subject,
            one,
            f"{subject} met {per_s:,.0f} page faults a second",
            (
                Evidence("faults_per_s", per_s, "1/s"),
                Evidence("faults", float(one.calls)),
                Evidence("total_ns", one.total_ns, "ns"),
            ),
            cause="likely memory that is mapped anew, freed and taken in turn, or dropped from the page cache",
            next=f"look at the host's memory pressure; `pidstat -r -p {int(one.worst['pid'])} 1` tells major faults from minor ones",
        )


# -- connections -------------------------------------------------------------------------------------------------


@rule("stall", join_s=60)
def tls_handshakes(scene: Scene) -> Iterator[Finding]:
    """TLS handshakes fail or are slow: clients wait, or give up.

    Thresholds: `severity.STALL_LIMITS`; single ones are notes, as clients do go away, `stall_some` in a minute are not.
    """
    rows = of_kinds(scene, "tls")
    levels = severity_of(scene, rows)

    def grade(sums: Sums) -> Levels:
        some = scene.limits["stall_some"]
        levels = np.where(sums.warn >= some, WARN, np.where(sums.warn > 0, NOTE, NONE))
        return np.where(sums.crit >= some, CRIT, levels).astype(np.int8)

    for one in bouts(scene, rows, levels, ("pid",), grade):
        yield _tls_finding(scene, one)


def _tls_finding(scene: Scene, one: Bout) -> Finding:
    subject = process_name(scene, one.worst)
    codes = one.rows["code"]
    failed = int(np.count_nonzero(~np.isnan(codes) & (codes != STALL_LIMITS["tls"].success)))
    return stall_finding(
        "tls_handshakes",
        subject,
        one,
        f"TLS handshakes of {subject}: {failed} failed, {len(codes) - failed} slow, longest "
        f"{format_duration(int(one.longest_ns))}",
        (
            Evidence("failed", float(failed), "", scene.limits["stall_some"]),
            Evidence("reason", text_of(scene, one.worst, "reason")),
            *evidence_of(scene, one, "tls"),
        ),
        cause="likely clients that time out or lack the certificate, or an event loop that is busy elsewhere",
        next="`openssl s_client -connect HOST:PORT` shows where a handshake stops; look for stalls of this process",
    )
