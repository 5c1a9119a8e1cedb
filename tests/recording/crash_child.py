"""A recorder to be killed: `crash_child.py FILE FLUSH_NS` pushes a row every few ms and prints its number and time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from opusmon.clock import SystemClock
from opusmon.recording import Recorder
from opusmon.schema import Batch, Channel, Field, StringTable

COUNT = Channel("count", "counter", (Field("i", "<i8"), Field("word", "<u4", text=True)))


def main() -> None:
    clock, strings = SystemClock(), StringTable()
    recorder = Recorder(Path(sys.argv[1]), strings=strings, clock=clock, flush_ns=int(sys.argv[2]))
    i = 0
    while True:
        t = clock.now()
        recorder.push(Batch(COUNT, COUNT.rows([(t, i, strings.intern(f"word {i}"))])))
        print(i, t, flush=True)
        i += 1
        time.sleep(0.002)


if __name__ == "__main__":
    main()
