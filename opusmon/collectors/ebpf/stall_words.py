"""What a stall was, in words: results of captures, system calls, states of threads."""

from __future__ import annotations

import platform

import numpy as np

from opusmon.collectors.ebpf.stall_maps import NO_BEGIN, NOT_BEGUN, RUNS
from opusmon.collectors.ebpf.symbols import CALLS
from opusmon.cuda_codes import CAPTURE_CODES

KINDS = ("", "wait", "off_cpu", "run_queue", "futex", "jit", "capture", "init_in_capture", "tls")
"""`kind` of an event of the kernel, by number."""

_EVENTS, _NETWORK, _FILES, _SLEEP = "waiting for events", "network", "I/O", "sleep"
_DRIVER, _MEMORY, _CHILD = "driver call", "memory mapping", "waiting for a child process"
_REASONS = {
    _EVENTS: "poll ppoll select pselect6 epoll_wait epoll_pwait epoll_pwait2 io_uring_enter",
    _NETWORK: "recvfrom recvmsg sendto sendmsg accept accept4 connect",
    _FILES: "read write readv writev pread64 pwrite64 fsync fdatasync openat msync close",
    _SLEEP: "nanosleep clock_nanosleep",
    _DRIVER: "ioctl",
    _MEMORY: "mmap munmap mprotect madvise",
    _CHILD: "wait4 waitid",
    "lock": "futex futex_waitv semtimedop",
    "waiting for a signal": "rt_sigtimedwait rt_sigsuspend pause",
}
_REASON_OF = {call: reason for reason, calls in _REASONS.items() for call in calls.split()}

_X86_64 = (
    "0 read 1 write 3 close 7 poll 9 mmap 10 mprotect 11 munmap 16 ioctl 17 pread64 18 pwrite64 19 readv 20 writev "
    "23 select 24 sched_yield 26 msync 28 madvise 34 pause 35 nanosleep 42 connect 43 accept 44 sendto 45 recvfrom 46 sendmsg "
    "47 recvmsg 61 wait4 74 fsync 75 fdatasync 128 rt_sigtimedwait 130 rt_sigsuspend 202 futex 219 restart_syscall "
    "220 semtimedop 230 clock_nanosleep 232 epoll_wait 247 waitid 257 openat 270 pselect6 271 ppoll 281 epoll_pwait "
    "288 accept4 426 io_uring_enter 441 epoll_pwait2 449 futex_waitv"
)
_AARCH64 = (
    "22 epoll_pwait 29 ioctl 56 openat 57 close 63 read 64 write 65 readv 66 writev 67 pread64 68 pwrite64 "
    "72 pselect6 73 ppoll 82 fsync 83 fdatasync 95 waitid 98 futex 101 nanosleep 115 clock_nanosleep "
    "124 sched_yield 128 restart_syscall 133 rt_sigsuspend 137 rt_sigtimedwait 192 semtimedop 202 accept 203 connect 206 sendto "
    "207 recvfrom 211 sendmsg 212 recvmsg 215 munmap 222 mmap 226 mprotect 227 msync 233 madvise 242 accept4 "
    "260 wait4 426 io_uring_enter 441 epoll_pwait2 449 futex_waitv"
)


def _table(text: str) -> dict[int, str]:
    words = text.split()
    return {int(number): name for number, name in zip(words[::2], words[1::2], strict=True)}


SYSCALLS = {"x86_64": _table(_X86_64), "aarch64": _table(_AARCH64)}
"""System calls that block or yield, by machine and number: arch/x86/entry/syscalls/syscall_64.tbl, asm-generic/unistd.h."""

_SLEEPING, _UNINTERRUPTIBLE, _STOPPED, _TRACED = 1, 2, 4, 8
_USER_FAULTS = frozenset({4, 5, 6, 7, 20, 21, 22, 23})
"""On x86-64 a page fault leaves its error code where a system call leaves its number."""


def call(number: int) -> str:
    """Name of a call by its number in stalls.bpf.c."""
    return CALLS[number] if 0 <= number < len(CALLS) else ""


def syscall(number: int, state: int, machine: str | None = None) -> str:
    """Name of the system call a thread was blocked in; "" where it was none or is not known.

    Args:
        number: as found in the registers, negative outside a system call.
        state: `prev_state` of the switch.
        machine: as `platform.machine()` says it.
    """
    name = machine or platform.machine()
    if name == "x86_64" and state & _UNINTERRUPTIBLE and number in _USER_FAULTS:
        return ""
    return SYSCALLS.get(name, {}).get(number, "")


def blocked(state: int, system_call: str) -> str:
    """Why a thread was off the CPU and not runnable."""
    if state & (_STOPPED | _TRACED):
        return "stopped or traced"
    reason = _REASON_OF.get(system_call, "")
    if state & _UNINTERRUPTIBLE:
        return (
            reason if reason in (_FILES, _DRIVER, _MEMORY) else "uninterruptible: I/O, page fault or driver"
        )
    return "pipe, socket or terminal" if reason == _FILES else reason or "sleeping"


def queued(state: int, system_call: str) -> str:
    """Why a thread that could run did not."""
    if state & 0xFF:
        return "woken, no CPU was free"
    return "yielded" if system_call == "sched_yield" else "preempted"


def capture(code: int, flags: int) -> str:
    """What became of a capture."""
    if code == 0:
        return "ended; its begin was not seen" if flags & NO_BEGIN else "ended"
    meaning = CAPTURE_CODES.get(code, f"CUDA error {code}")
    return f"did not begin: {meaning}" if flags & NOT_BEGUN else f"aborted: {meaning}"


def exit_status(raw: int, known: bool) -> tuple[float, str]:
    """Exit status and words for it.

    Args:
        raw: as wait(2) gives it: status in the second byte, signal in the low seven bits.
        known: whether the kernel could be asked.

    Returns:
        Status, the negative signal of a killed program, NaN where it is not known; reason.
    """
    if not known:
        return float("nan"), "compiled; exit status not known"
    signal, status = raw & 0x7F, raw >> 8 & 0xFF
    if signal:
        return float(-signal), f"killed by signal {signal}"
    return float(status), "compiled" if status == 0 else f"failed with exit status {status}"


def tls(code: int) -> str:
    """What became of a handshake, by what SSL_do_handshake said last."""
    if code == 1:
        return "slow"
    return "failed: shut down by protocol" if code == 0 else "failed: the connection ended without success"


def in_capture(name: str) -> str:
    """What was set up while a capture was open."""
    first = name.startswith(("cuCtx", "cuDevice"))
    what = "context creation" if first else "initialisation" if name == "cuInit" else "loading of code"
    return f"{what} while a capture is open"


def sequence(recent: np.void) -> str:
    """Calls in order, the oldest first, runs of equal ones folded.

    Args:
        recent: dtype `stall_maps.RECENT`.
    """
    n = int(recent["n"])
    order = [index % RUNS for index in range(max(0, n - RUNS), n)]
    return "; ".join(
        _run(*(int(recent["runs"][at][word]) for word in ("call", "times", "stream"))) for at in order
    )


def _run(number: int, times: int, stream: int) -> str:
    many = f" x{times}" if times > 1 else ""
    where = f" on {stream:#x}" if stream != 2**64 - 1 else ""
    return f"{call(number) or '?'}{many}{where}"
