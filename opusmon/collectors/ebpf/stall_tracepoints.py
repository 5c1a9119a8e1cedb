"""Tracepoints that the stalls collector uses, and whether this kernel lays their fields out as its programs read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opusmon.collectors.ebpf import tracefs

_FIELD = re.compile(r"^\tfield:.*?(\w+)(?:\[\d*\])?;\toffset:(\d+);\tsize:(\d+);", re.MULTILINE)
Layout = Mapping[str, tuple[int, int]]
"""Field to its offset and size in bytes."""


@dataclass(frozen=True, slots=True)
class Point:
    """A tracepoint.

    Attributes:
        category: its group.
        event: its name.
        programs: of stalls.bpf.c, the best first; the next one where the kernel refuses it.
        layout: of the fields that those read.
        serves: what there is none of without it: values of `kind`.
    """

    category: str
    event: str
    programs: tuple[str, ...]
    layout: Layout
    serves: str


_SWITCH = {"prev_pid": (24, 4), "prev_state": (32, 8), "next_comm": (40, 16), "next_pid": (56, 4)}
POINTS = (
    Point("sched", "sched_switch", ("on_switch", "on_switch_plain"), _SWITCH, "off_cpu, futex, run_queue"),
    Point("sched", "sched_wakeup", ("on_wakeup",), {"pid": (24, 4)}, "run_queue"),
    Point("sched", "sched_process_exit", ("on_exit",), {"pid": (24, 4)}, "jit"),
    Point("sched", "sched_process_exec", ("on_exec",), {"pid": (12, 4)}, "jit"),
    Point("task", "task_newtask", ("on_newtask",), {"pid": (8, 4), "clone_flags": (32, 8)}, "jit"),
    Point("exceptions", "page_fault_user", ("on_fault",), {"address": (8, 8)}, "page_faults"),
)
"""In the order in which they are set: who leaves is seen before who comes."""


def layout(text: str) -> dict[str, tuple[int, int]]:
    """Field to offset and size, from the `format` file of a tracepoint."""
    return {name: (int(offset), int(size)) for name, offset, size in _FIELD.findall(text)}


def misfit(point: Point, roots: tuple[Path, ...] = tracefs.ROOTS) -> str:
    """Why the programs of a tracepoint cannot run here; "" when they can.

    Args:
        point: the tracepoint.
        roots: folders where tracefs may be mounted.
    """
    for root in roots:
        try:
            text = (root / "events" / point.category / point.event / "format").read_text()
        except OSError:
            continue
        found = layout(text)
        other = [name for name, place in point.layout.items() if found.get(name) != place]
        return f"this kernel lays {', '.join(other)} out in another way" if other else ""
    return "this kernel has no such tracepoint, or tracefs is not mounted"
