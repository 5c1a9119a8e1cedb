"""uprobe_multi links (kernel 6.6 and newer): uprobes that are soon removed, for whoever holds CAP_BPF and CAP_PERFMON.

Other uprobes are perf events. Those the kernel gives to CAP_SYS_ADMIN only (measured on 6.18: EACCES without), and it
removes one at a time: 32 of them in 3.9 s, and in 3.2 s from as many threads, for it waits under a lock. 32 links from
as many threads are gone in 0.14 s, one after another in 1.8 s (6.18). A hit costs the same.
libbpf knows these links from 1.3 on; bpf(2) is called directly, so that any version will do.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from opusmon.collectors.ebpf import maps

ATTACH_TYPE = 48
"""BPF_TRACE_UPROBE_MULTI: programs must have been loaded with it."""

AT_ONCE = 64
"""Links that are closed side by side: about as many as a library has."""

_LINK_CREATE = 28
_RETURN = 1


class _Create(ctypes.Structure):
    """`struct { ... } link_create` of union bpf_attr, with its part for uprobe_multi."""

    _fields_ = (
        ("prog_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("path", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("ref_ctr_offsets", ctypes.c_uint64),
        ("cookies", ctypes.c_uint64),
        ("cnt", ctypes.c_uint32),
        ("probe_flags", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


def supported(program_fd: int) -> bool:
    """Whether the kernel has such links: it then answers that a folder is no file to probe.

    libbpf asks in the same way (`probe_uprobe_multi_link` in its features.c).

    Args:
        program_fd: of a program that was loaded with `ATTACH_TYPE`.
    """
    try:
        os.close(attach(program_fd, "/", 0, on_return=False))
    except OSError as error:
        return error.errno == errno.EBADF
    return False


def close(links: Sequence[int]) -> None:
    """Remove probes, side by side: each waits for the kernel, and they can wait together.

    Args:
        links: descriptors, as `attach` gives them.
    """
    if links:
        with ThreadPoolExecutor(min(len(links), AT_ONCE), "detach") as pool:
            list(pool.map(os.close, links))


def attach(program_fd: int, path: str, offset: int, *, on_return: bool) -> int:
    """Set one uprobe for all processes.

    Args:
        program_fd: of a program that was loaded with `ATTACH_TYPE`.
        path: of the file.
        offset: in the file, bytes.
        on_return: run it when the function returns.

    Returns:
        A descriptor; closing it removes the probe.

    Raises:
        OSError: the kernel refuses, or is too old.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    place = ctypes.c_uint64(offset)
    create = _Create(
        prog_fd=program_fd,
        attach_type=ATTACH_TYPE,
        path=ctypes.addressof(name),
        offsets=ctypes.addressof(place),
        cnt=1,
        probe_flags=_RETURN if on_return else 0,
    )
    answer = maps.call(_LINK_CREATE, create)
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer
