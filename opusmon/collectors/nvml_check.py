"""Ask NVML whether it works, in a process that may hang or crash without hurting the one that asks.

The child runs this very file, so it imports nothing of opusmon: only `pynvml` and the standard library.
It prints one JSON object. The parent never waits longer than its limit: a child stuck in the driver cannot
even be killed, and is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

LIMIT_S = 5.0
_LEFT_BEHIND_S = 0.2


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU as NVML lists it.

    Attributes:
        index: in NVML order.
        name: product name, "" when not given.
        gpm: whether it gives GPM metrics; None when the driver did not say.
        error: what went wrong with this device, "" for nothing.
    """

    index: int
    name: str = ""
    gpm: bool | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What NVML said.

    Attributes:
        driver: driver version.
        cuda: CUDA version of the driver, such as "13.0".
        devices: the GPUs.
        error: why there is no answer, "" when there is one.
    """

    driver: str = ""
    cuda: str = ""
    devices: tuple[Device, ...] = field(default_factory=tuple)
    error: str = ""


def ask(limit_s: float = LIMIT_S) -> Answer:
    """Run the check in a child process and wait at most `limit_s` seconds. Never raises."""
    command = [sys.executable, "-P", __file__]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Answer(error=f"the check could not be started: {error}")
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _abandon(child)
        return Answer(error=f"NVML did not answer within {limit_s:g} s: the driver or a GPU hangs")
    return parse(out, err, child.returncode)


def parse(out: bytes, err: bytes, status: int) -> Answer:
    """Read what the child left: its standard output and error, and its exit status (negative: a signal)."""
    if status < 0:
        # Here, because the child runs this file alone.
        from opusmon.processes import signal_name

        return Answer(error=f"NVML crashed the process that asked it ({signal_name(-status)})")
    try:
        body = json.loads(out.splitlines()[-1])
        devices = tuple(Device(**device) for device in body["devices"])
        return Answer(str(body["driver"]), str(body["cuda"]), devices, str(body["error"]))
    except (ValueError, KeyError, TypeError, IndexError):
        lines = err.decode("utf-8", "replace").strip().splitlines()
        return Answer(
            error=f"the check ended with status {status}: {lines[-1] if lines else 'no message'}"[:300]
        )


def _abandon(child: subprocess.Popen[bytes]) -> None:
    """Kill the child; one that is stuck in the kernel is left to it."""
    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_LEFT_BEHIND_S)


def main() -> int:
    """The child: print the answer as JSON. Exit 0 when NVML answered."""
    try:
        import pynvml
    except ImportError as error:
        answer = Answer(error=f"pynvml cannot be imported: {error}")
    else:
        answer = _answer(pynvml)
    # What a library below NVML prints comes before it, on lines of its own.
    os.write(1, b"\n" + json.dumps(asdict(answer)).encode())
    return 1 if answer.error else 0


def _answer(nvml: Any) -> Answer:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Answer(error=f"nvmlInit: {error}")
    try:
        count = int(nvml.nvmlDeviceGetCount())
        devices = tuple(_device(nvml, index) for index in range(count))
        return Answer(_driver(nvml), _cuda(nvml), devices)
    except nvml.NVMLError as error:
        return Answer(error=f"nvmlDeviceGetCount: {error}")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> Device:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return Device(index, error=str(error))
    return Device(index, name, _gpm(nvml, handle))


def _gpm(nvml: Any, handle: Any) -> bool | None:
    """Whether the device gives GPM metrics; None for a module or a driver too old to say."""
    query = getattr(nvml, "nvmlGpmQueryDeviceSupport", None)
    if query is None:
        return None
    try:
        return bool(query(handle).isSupportedDevice)
    except nvml.NVMLError:
        return None


def _driver(nvml: Any) -> str:
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return ""


def _cuda(nvml: Any) -> str:
    """`13000` is 13.0 and `12080` is 12.8."""
    try:
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    except (nvml.NVMLError, AttributeError):
        return ""
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    sys.exit(main())
