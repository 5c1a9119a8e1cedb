"""The thresholds of the rules, in one table: value, unit, and where the number is from.

`triage.toml` in the config folder, or `--limits FILE`, overrides them by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from opusmon.triage import limits_api, limits_cuda, limits_gpu, limits_host
from opusmon.triage.limit import Limit


class LimitError(Exception):
    """A threshold that does not exist or is not a number; the text is one line."""


_MOST = 1e300
"""Larger values are none; nor is infinity, nor what is no number."""

LIMITS: Mapping[str, Limit] = {
    **limits_gpu.LIMITS,
    **limits_cuda.LIMITS,
    **limits_api.LIMITS,
    **limits_host.LIMITS,
}
"""Name to limit."""


def overridden(changes: Mapping[str, object]) -> dict[str, float]:
    """The values in force when some are changed.

    Raises:
        LimitError: there is no limit of that name, or the value is no number.
    """
    values = {name: limit.value for name, limit in LIMITS.items()}
    for name, value in changes.items():
        if name not in values:
            raise LimitError(f"there is no limit {name!r}; `opusmon triage --limits-help` lists them")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
            raise LimitError(f"{name} must be a number ({LIMITS[name].unit or 'no unit'})")
        values[name] = float(value)
    return values
