"""`opusmon doctor`: what this host has, what is missing, why that matters and the command that mends it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import TextIO

from opusmon import __version__
from opusmon.collectors import facilities, nvml_check, stalls, streams
from opusmon.collectors.base import Unavailable
from opusmon.collectors.facility import Facility, Host
from opusmon.text import hanging, printable

WIDTH = 80
FORMAT = 1
"""Version of the `--json` document; it grows when a key changes its meaning, not when one is added."""

_NAME_COLUMNS = 24
_INDENT = " " * 10
_GROUPS = (
    ("gpu", "gpu"),
    ("streams", "streams, stalls"),
    ("latency", "latency"),
    ("host", "host"),
    ("l2", "l2 (--deep)"),
    ("recording", "recording"),
    ("terminal", "terminal"),
)
"""The value in `needed_by` and the title above its facilities."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found.

    Attributes:
        facilities: in the order in which they are shown.
        nvml: what NVML answered.
        panes: why a pane has nothing to show, by name.
        release: of the kernel.
    """

    facilities: Sequence[Facility]
    nvml: nvml_check.Answer
    panes: dict[str, Unavailable]
    release: str

    @property
    def gpu_ok(self) -> bool:
        """Whether the gpu pane can show at least one device."""
        return any(not device.error for device in self.nvml.devices)


def run(
    json: bool = False,
    out: TextIO | None = None,
    root: Path = Path("/"),
    ask_nvml: Callable[[], nvml_check.Answer] = nvml_check.ask,
) -> int:
    """Examine the host and print what was found.

    Args:
        json: print one JSON document instead of the table.
        out: where to, standard output by default.
        root: folder that holds the host's tree.
        ask_nvml: asks NVML itself.

    Returns:
        0 when the gpu pane can show something, else 1.
    """
    report = examine(Host(root), ask_nvml)
    text = document(report) if json else "\n".join(table(report)) + "\n"
    (out or sys.stdout).write(text)
    return 0 if report.gpu_ok else 1


def examine(host: Host, ask_nvml: Callable[[], nvml_check.Answer] = nvml_check.ask) -> Report:
    """Ask every probe, and NVML in a process of its own."""
    answer = ask_nvml()
    found = [_with_answer(facility, answer) for facility in facilities.survey(host=host)]
    place = next(i for i, facility in enumerate(found) if facility.name == "gpm")
    found.insert(place, _nvml(answer, found))
    asked = {"streams": streams.probe(host), "stalls": stalls.probe(host)}
    panes = {name: why for name, why in asked.items() if why is not None}
    return Report(found, answer, panes, host.release)


def document(report: Report) -> str:
    """The report as JSON text, one object."""
    body = {
        "format": FORMAT,
        "opusmon": __version__,
        "kernel": report.release,
        "gpu_ok": report.gpu_ok,
        "facilities": [asdict(facility) for facility in report.facilities],
        "nvml": asdict(report.nvml),
        "panes": {name: asdict(why) for name, why in report.panes.items()},
    }
    return dumps(body, indent=2, ensure_ascii=False) + "\n"


def table(report: Report) -> Iterator[str]:
    """The report as lines of at most `WIDTH` columns, grouped by pane."""
    yield f"opusmon {__version__}, kernel {report.release}"
    for key, title in _GROUPS:
        yield ""
        yield title
        if key in report.panes:
            yield from hanging("  note: ", report.panes[key].reason, WIDTH)
        for facility in report.facilities:
            if facility.needed_by[:1] == (key,):
                yield from _entry(facility)
    yield ""
    yield from _verdict(report)


def _verdict(report: Report) -> Iterator[str]:
    if report.gpu_ok:
        count = sum(not device.error for device in report.nvml.devices)
        yield f"{count} GPU{'s' if count > 1 else ''} can be watched: run `opusmon`."
    else:
        yield "No GPU can be watched here. `opusmon demo` shows a recorded session."


def _entry(facility: Facility) -> Iterator[str]:
    """State, name and what was found; below it why and how to mend it, unless all is well."""
    head = f"  {facility.state:<8}{facility.name:<{_NAME_COLUMNS}}"
    room = WIDTH - len(head)
    yield f"{head}{_fitted(printable(facility.found), room)}".rstrip()
    if facility.state == "ok":
        return
    if facility.reason:
        yield from hanging(f"{_INDENT}why: ", facility.reason, WIDTH)
    if facility.remedy:
        yield from _remedy(facility.remedy)


def _remedy(remedy: str) -> Iterator[str]:
    """A step is wrapped as text; a command is continued with backslashes, so that it can still be pasted."""
    if remedy[0].isupper():
        yield from hanging(f"{_INDENT}fix: ", remedy, WIDTH)
        return
    line, start = f"{_INDENT}fix:", True
    for word in re.findall(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", remedy):
        if not start and len(line) + len(word) + 3 > WIDTH:
            yield f"{line} \\"
            line = _INDENT + " " * 4
        line, start = f"{line} {word}", False
    yield line


def _fitted(text: str, room: int) -> str:
    """The text, or when it is too long its end, which is the telling part of a path."""
    return text if len(text) <= room else "..." + text[-(room - 3) :]


def _with_answer(facility: Facility, answer: nvml_check.Answer) -> Facility:
    """Fill in what only the driver knows."""
    if facility.name != "gpm" or not answer.devices:
        return facility
    having = [device for device in answer.devices if device.gpm]
    found = f"{len(having)} of {len(answer.devices)} devices"
    if len(having) == len(answer.devices):
        return replace(facility, state="ok", found=found, reason="")
    if any(device.gpm is None and not device.error for device in answer.devices):
        return replace(facility, found=found, reason="the driver or nvidia-ml-py is too old to say")
    reason = "without GPM there is no HBM bandwidth, SM occupancy or NVLink traffic per link (Hopper and newer have it)"
    return replace(facility, state="limited" if having else "missing", found=found, reason=reason)


def _nvml(answer: nvml_check.Answer, found: Sequence[Facility]) -> Facility:
    """NVML's own answer as a facility."""
    name, needed_by = "nvml answers", ("gpu",)
    if answer.error:
        # The first gpu facility that is missing is nearest to the cause, and carries the remedy.
        known = any(one.state == "missing" and one.needed_by == needed_by for one in found)
        remedy = "Mend what is missing above" if known else "Look for NVRM lines in the output of: sudo dmesg"
        return Facility(name, "missing", "no", answer.error, remedy, needed_by)
    lost = [device for device in answer.devices if device.error]
    text = f"{len(answer.devices)} GPUs, driver {answer.driver}, CUDA {answer.cuda or '?'}"
    if not answer.devices:
        reason = "the driver is loaded but lists no device"
        return Facility(
            name,
            "missing",
            text,
            reason,
            "Check that the GPU is given to this machine or container",
            needed_by,
        )
    if lost:
        reason = "; ".join(f"GPU {device.index}: {device.error}" for device in lost)
        return Facility(
            name, "limited", text, reason, "Look for XID lines in the output of: sudo dmesg", needed_by
        )
    return Facility(name, "ok", text, needed_by=needed_by)
