"""How findings about CUDA name what they are about. Text from outside becomes one printable line."""

from __future__ import annotations

import numpy as np

from opusmon.channels import WHOLE_CONTEXT
from opusmon.text import printable
from opusmon.triage.scene import Scene

_STREAMS = {0: "default stream", 1: "default stream", 2: "per-thread stream", WHOLE_CONTEXT: "whole context"}
FRAMES = 3
"""Frames of a stack that a finding shows: the innermost ones."""


def text_of(scene: Scene, row: np.void, field: str) -> str:
    """A text field of a row, printable."""
    return printable(scene.text(row[field]))


def process_name(scene: Scene, row: np.void) -> str:
    """`vllm 1234`, or `pid 1234` where the name is not known."""
    return f"{text_of(scene, row, 'process') or 'pid'} {int(row['pid'])}"


def thread_name(scene: Scene, row: np.void) -> str:
    """`vllm 1234 worker-0 1288`; the thread is left out where it is the process's first one."""
    pid, tid = int(row["pid"]), int(row["tid"])
    if tid == pid:
        return process_name(scene, row)
    return f"{process_name(scene, row)} {text_of(scene, row, 'thread') or 'thread'} {tid}"


def stream_name(handle: int) -> str:
    """`stream 0x55d0c84b2e00`; handles that are no addresses in words."""
    return _STREAMS.get(handle) or f"stream {handle:#x}"


def innermost(stack: str, frames: int = FRAMES) -> str:
    """The last frames of a stack."""
    return printable(";".join(stack.split(";")[-frames:]))
