"""Where a member of a kernel structure lies, by the kernel's own type information (BTF)."""

from __future__ import annotations

import struct
from pathlib import Path

BTF = Path("/sys/kernel/btf/vmlinux")
_MAGIC = 0xEB9F
_STRUCT = 4
_AFTER_B = {1: 4, 3: 12, 14: 4, 17: 4}
"""Kind to the bytes that follow its head: INT, ARRAY, VAR, DECL_TAG."""
_EACH_B = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
"""Kind to the bytes per member: STRUCT, UNION, ENUM, FUNC_PROTO, DATASEC, ENUM64. Other kinds have none."""


def member_offset(data: bytes, structure: str, member: str) -> int | None:
    """Offset in bytes of a member of a structure; None where there is no such member, or no such information.

    Members of anonymous structures inside it are not looked into.

    Args:
        data: BTF in little-endian order, as /sys/kernel/btf/vmlinux holds it; Documentation/bpf/btf.rst.
        structure: for example "task_struct".
        member: for example "exit_code".
    """
    try:
        return _offset(data, structure.encode() + b"\0", member.encode() + b"\0")
    except (struct.error, ValueError):
        return None


def _offset(data: bytes, structure: bytes, member: bytes) -> int | None:
    magic, _, _, head_b, types_at, types_b, strings_at, _ = struct.unpack_from("<HBBIIIII", data)
    if magic != _MAGIC:
        return None
    at, end, strings = head_b + types_at, head_b + types_at + types_b, head_b + strings_at
    while at < end:
        name, info, _ = struct.unpack_from("<III", data, at)
        kind, count = info >> 24 & 31, info & 0xFFFF
        at += 12
        if kind == _STRUCT and data.startswith(structure, strings + name):
            return _member(data[at : at + 12 * count], data, strings, member, bitfields=bool(info >> 31))
        at += _AFTER_B.get(kind, 0) + _EACH_B.get(kind, 0) * count
    return None


def _member(members: bytes, data: bytes, strings: int, wanted: bytes, *, bitfields: bool) -> int | None:
    for name, _, offset in struct.iter_unpack("<III", members):
        if data.startswith(wanted, strings + name):
            bits: int = offset & 0xFFFFFF if bitfields else offset
            return bits // 8
    return None


def exit_code_offset(path: Path = BTF) -> int:
    """Where a task keeps its exit code, in bytes; 0 where the kernel does not say."""
    try:
        data = path.read_bytes()
    except OSError:
        return 0
    return member_offset(data, "task_struct", "exit_code") or 0
