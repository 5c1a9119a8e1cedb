"""Why a value is missing, for collectors that read many at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a value is missing, as a `status` row says it.

    Attributes:
        state: one of the states of `opusmon.channels.STATUS`.
        reason: one sentence.
        remedy: what mends it, "" if nothing does.
        code: the NVML return code, 0 when the reason is not one.
    """

    state: str
    reason: str
    remedy: str = ""
    code: int = 0


WENT_BACK = Missing("error", "the counter went back (reset or wrapped); the rate starts anew")
FIRST = Missing("unavailable", "a rate needs two readings of the counter")
