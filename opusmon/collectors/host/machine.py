"""One row of channel `host`."""

from __future__ import annotations

from opusmon.channels import HOST
from opusmon.clock import Clock
from opusmon.collectors.host.devices import Devices
from opusmon.collectors.host.pressure import SystemPressure
from opusmon.collectors.host.reading import Row
from opusmon.collectors.host.system import System
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key

_COLUMNS = tuple(field.name for field in HOST.fields if field.name != "dt_ns")


class Machine:
    """Reads what the kernel says about the whole machine.

    Args:
        proc: the /proc folder.
        sys: the /sys folder.
        clock: time of the rows. Each group of files gets a time of its own for its rates: on a starved host the
            reader may be held up between two files.

    Attributes:
        missing: why fields of the last row have no value.
    """

    def __init__(self, proc: str, sys: str, clock: Clock) -> None:
        self.missing: dict[Key, Missing] = {}
        self._clock = clock
        self._system, self._devices = System(proc), Devices(proc, sys)
        self._pressure = SystemPressure(proc)
        self._at = 0

    def read(self) -> tuple[float, ...]:
        """The row in column order; rates cover the time since the last call."""
        row, t = Row(), self._clock.now()
        self._system.read(row, self._clock.now())
        self._pressure.read(row, self._clock.now())
        self._devices.read(row, self._clock.now())
        self.missing = row.reasons(HOST)
        dt_ns, self._at = t - self._at, t
        return (t, dt_ns, *row.record(_COLUMNS))
