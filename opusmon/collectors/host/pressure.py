"""Pressure stall information: shares of time from the microseconds that tasks have waited in all.

The kernel's own averages (`avg10`) smear a stall over 10 s and more; the totals tell the exact share between two
readings, and the kernel brings them up to date on every read.
"""

from __future__ import annotations

import re
from dataclasses import replace

from opusmon.collectors.host.files import MALFORMED, read
from opusmon.collectors.host.reading import Answer, Rates, Row, scaled
from opusmon.collectors.missing import Missing

RESOURCES = {"cpu": ("some",), "memory": ("some", "full"), "io": ("some", "full")}
"""What is read of each. The "full" line of cpu holds zeros that mean nothing: the kernel keeps it for old readers."""
REMEDY = "boot the kernel with psi=1"
NO_PSI = Missing(
    "not_supported",
    "pressure stall information is off in this kernel (CONFIG_PSI_DEFAULT_DISABLED) or not built in (CONFIG_PSI)",
    REMEDY,
)
CPU_FULL = Missing("not_supported", "the kernel defines it for control groups only, not for the whole system")

_TOTALS = re.compile(rb"^(some|full)\b[^\n]* total=(\d{1,20})$", re.MULTILINE)


def totals(text: bytes) -> dict[str, int]:
    """Microseconds waited, by "some" and "full"; what the text lacks is left out."""
    return {word.decode("ascii"): int(number) for word, number in _TOTALS.findall(text)}


def share(rate_us: Answer) -> Answer:
    """Percent of time from microseconds per second; a reading that came late by a hair is not over 100 %."""
    answer = scaled(rate_us, 1e-4)
    return answer if isinstance(answer, Missing) else min(answer, 100.0)


class SystemPressure:
    """The pressure fields of channel `host`.

    Args:
        proc: the /proc folder.
    """

    def __init__(self, proc: str) -> None:
        self._paths = {what: f"{proc}/pressure/{what}" for what in RESOURCES}
        self._rates = {what: Rates() for what in RESOURCES}

    def read(self, row: Row, at: int) -> None:
        """Fill the fields at `at` (monotonic ns)."""
        for what, words in RESOURCES.items():
            text = read(self._paths[what])
            found = {} if isinstance(text, Missing) else totals(text)
            shares = self._rates[what].update(found, at)
            lacking = _lacking(text)
            for word in words:
                row.put(f"psi_{what}_{word}_pct", share(shares.get(word, lacking)))
        row.put("psi_cpu_full_pct", CPU_FULL)


def _lacking(text: bytes | Missing) -> Missing:
    """Why there is no number: the file cannot be read, or lacks the line."""
    if not isinstance(text, Missing):
        return replace(MALFORMED, reason="this kernel's pressure file lacks the line")
    return NO_PSI if text.state == "not_supported" else text
