"""What the NVIDIA kernel module says of itself in /proc/driver/nvidia/version."""

from __future__ import annotations

import re

PROC_VERSION = "/proc/driver/nvidia/version"


def module_version(text: str) -> str:
    """Version of the kernel module, open or not, from the file's text; "" when it names none."""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""
