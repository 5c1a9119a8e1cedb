"""Maps in the kernel, read and written through bpf(2): whole maps at once, as numpy arrays."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_SYSCALL = {"x86_64": 321, "aarch64": 280}
_LOOKUP, _UPDATE, _DELETE, _LOOKUP_BATCH = 1, 2, 3, 24
_ATTR_B = 128
Table = np.ndarray[tuple[int], np.dtype[Any]]


class _Elem(ctypes.Structure):
    """`struct { map_fd, key, value, flags }` of union bpf_attr."""

    _fields_ = (
        ("map_fd", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class _Batch(ctypes.Structure):
    """`struct { ... } batch` of union bpf_attr."""

    _fields_ = (
        ("in_batch", ctypes.c_uint64),
        ("out_batch", ctypes.c_uint64),
        ("keys", ctypes.c_uint64),
        ("values", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("map_fd", ctypes.c_uint32),
        ("elem_flags", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class HashMap:
    """A hash map with keys and values of fixed dtypes.

    Args:
        fd: of the map.
        key: dtype of a key, as large as the kernel's.
        value: dtype of a value, likewise.
        bound: entries the map can hold.
    """

    def __init__(self, fd: int, key: np.dtype[Any], value: np.dtype[Any], bound: int) -> None:
        self._fd = fd
        self._bound = bound
        self._keys: Table = np.zeros(bound, key)
        self._values: Table = np.zeros(bound, value)

    def read(self) -> tuple[Table, Table]:
        """All entries: keys and values, shape (n,), copies.

        Raises:
            OSError: the kernel refuses (older than 5.6).
        """
        position = np.zeros(1, np.uint32)
        batch = _Batch(
            0,
            position.ctypes.data,
            self._keys.ctypes.data,
            self._values.ctypes.data,
            self._bound,
            self._fd,
            0,
            0,
        )
        code = _bpf(_LOOKUP_BATCH, batch)
        if code not in (0, errno.ENOENT):  # ENOENT says that the end was reached
            raise OSError(code, os.strerror(code))
        return self._keys[: batch.count].copy(), self._values[: batch.count].copy()

    def delete(self, key: np.void) -> None:
        """Remove an entry; one that is not there is no error."""
        buffer = ctypes.create_string_buffer(key.tobytes(), key.nbytes)
        _bpf(_DELETE, _Elem(self._fd, ctypes.addressof(buffer), 0, 0))


def read_slot(fd: int, slot: int, into: np.ndarray[Any, Any]) -> int:
    """Read what an array or a map of stacks holds under a number.

    Args:
        fd: of the map.
        slot: the number.
        into: contiguous and as large as a value, of all CPUs where the map keeps one for each.

    Returns:
        0, or the errno.
    """
    key = ctypes.c_uint32(slot)
    return _bpf(_LOOKUP, _Elem(fd, ctypes.addressof(key), into.ctypes.data, 0))


def read_percpu(fd: int, slot: int) -> int:
    """Sum over all CPUs of one u64 slot of a per-CPU array.

    Raises:
        OSError: there is no such slot.
    """
    values = np.zeros(possible_cpus(), np.uint64)
    code = read_slot(fd, slot, values)
    if code:
        raise OSError(code, os.strerror(code))
    return int(values.sum())


def write(fd: int, slot: int, value: bytes) -> None:
    """Set one slot of an array.

    Raises:
        OSError: there is no such slot.
    """
    key, buffer = ctypes.c_uint32(slot), ctypes.create_string_buffer(value, len(value))
    code = _bpf(_UPDATE, _Elem(fd, ctypes.addressof(key), ctypes.addressof(buffer), 0))
    if code:
        raise OSError(code, os.strerror(code))


@cache
def possible_cpus(path: Path = Path("/sys/devices/system/cpu/possible")) -> int:
    """CPUs the kernel keeps room for: one more than the highest number in the file."""
    numbers = re.findall(r"\d+", path.read_text(encoding="ascii"))
    return int(numbers[-1]) + 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _bpf(command: int, attr: ctypes.Structure) -> int:
    """Call bpf(2) where it answers nothing; returns 0, or the errno."""
    return -min(0, call(command, attr))


def call(command: int, attr: ctypes.Structure) -> int:
    """Call bpf(2). The attributes are padded with zeros, as newer kernels and older ones both accept.

    Args:
        command: number of `enum bpf_cmd`.
        attr: the part of `union bpf_attr` for it; the kernel may write there.

    Returns:
        What it answers (0, or a descriptor), or minus the errno.
    """
    buffer = ctypes.create_string_buffer(bytes(attr), _ATTR_B)
    number = _SYSCALL[platform.machine()]
    done = _libc().syscall(
        ctypes.c_long(number), ctypes.c_int(command), buffer, ctypes.c_uint(ctypes.sizeof(attr))
    )
    answer = int(done) if done >= 0 else -ctypes.get_errno()
    ctypes.memmove(ctypes.addressof(attr), buffer, ctypes.sizeof(attr))
    return answer
