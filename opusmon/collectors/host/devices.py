"""Traffic of disks and network interfaces, each byte counted once.

Disks: those with hardware behind them (a `device` link in /sys/block). Partitions are not in /sys/block; loop, ram,
zram, dm and md devices have no such link, and what they move is counted on the disks below them; hidden paths of a
multipath NVMe disk are left out. Where no disk has a link (some virtual machines and containers), all but loop, ram,
zram, dm and md count. Network filesystems are no disks: their traffic is the network's.

Interfaces: those with a device behind them, so that what passes through a bond, a bridge, a VLAN or a container's
veth counts once, on the card. Where none has one (inside a container), all but loopback count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from opusmon.collectors.host.files import MALFORMED, exists, read
from opusmon.collectors.host.reading import Answer, Rates, Row, scaled, total
from opusmon.collectors.missing import Missing

SECTOR_B = 512
"""The unit of /proc/diskstats, whatever the disk's own sectors are."""

_STACKED = re.compile(r"(loop|ram|zram|dm-|md)\d")
_DISK = re.compile(rb"^ *\d+ +\d+ +(\S+) \d+ \d+ (\d{1,20}) \d+ \d+ \d+ (\d{1,20}) \d+ ", re.MULTILINE)
_LINK = re.compile(
    rb"^ *([^\s:]+(?::[^\s:]+)*): *(\d{1,20})(?: +\d+){7} +(\d{1,20})(?: +\d+){7} *$", re.MULTILINE
)

Traffic = dict[str, tuple[int, int]]
"""Two cumulative counts by device name: read and written, or received and sent."""


def disk_sectors(text: bytes) -> Traffic:
    """Sectors read and written by device, from /proc/diskstats."""
    return _traffic(_DISK.findall(text))


def interface_bytes(text: bytes) -> Traffic:
    """Bytes received and sent by interface, from /proc/net/dev."""
    return _traffic(_LINK.findall(text))


def without_partitions(names: list[str]) -> list[str]:
    """The names that do not look like a partition of another one (sda1, nvme0n1p1), for want of /sys/block."""
    known = set(names)
    return [
        name
        for name in names
        if not {re.sub(r"\d+$", "", name), re.sub(r"p\d+$", "", name)} & (known - {name})
    ]


def _parsed(text: bytes | Missing, parse: Callable[[bytes], Traffic]) -> Traffic | Missing:
    """Traffic, or why there is none; no device at all is no traffic, a text that makes no sense is no zero."""
    if isinstance(text, Missing):
        return text
    return parse(text) or (MALFORMED if text.strip() else {})


def _traffic(found: Iterable[tuple[bytes, bytes, bytes]]) -> Traffic:
    return {name.decode("utf-8", "replace"): (int(first), int(second)) for name, first, second in found}


class Chosen:
    """Which devices count; asked again only when the list of names changes.

    Args:
        choose: names to those that count.
    """

    def __init__(self, choose: Callable[[list[str]], list[str]]) -> None:
        self._choose = choose
        self._names: list[str] = []
        self._chosen: list[str] = []

    def among(self, names: list[str]) -> list[str]:
        """Those of the names that count."""
        if names != self._names:
            self._names, self._chosen = names, self._choose(names)
        return self._chosen


class Devices:
    """The disk and network fields of channel `host`.

    Args:
        proc: the /proc folder.
        sys: the /sys folder.
    """

    def __init__(self, proc: str, sys: str) -> None:
        self._proc, self._sys = proc, sys
        self._disks, self._links = Chosen(self._whole_disks), Chosen(self._cards)
        self._disk_rates, self._link_rates = Rates(), Rates()

    def read(self, row: Row, at: int) -> None:
        """Fill the fields at `at` (monotonic ns)."""
        sectors = _parsed(read(f"{self._proc}/diskstats"), disk_sectors)
        for name, answer in _rates(self._disk_rates, self._disks, sectors, at, ("read", "write")):
            row.put(f"disk_{name}_bps", scaled(answer, SECTOR_B))
        moved = _parsed(read(f"{self._proc}/net/dev"), interface_bytes)
        for name, answer in _rates(self._link_rates, self._links, moved, at, ("rx", "tx")):
            row.put(f"net_{name}_bps", answer)

    def _whole_disks(self, names: list[str]) -> list[str]:
        disks = [name for name in names if exists(self._block(name))] or without_partitions(names)
        disks = [name for name in disks if not self._hidden(name)]
        real = [name for name in disks if exists(f"{self._block(name)}/device")]
        return real or [name for name in disks if not _STACKED.match(name)]

    def _block(self, name: str) -> str:
        # A "/" in a device's name is "!" in /sys.
        return f"{self._sys}/block/{name.replace('/', '!')}"

    def _hidden(self, name: str) -> bool:
        return read(f"{self._block(name)}/hidden") == b"1\n"

    def _cards(self, names: list[str]) -> list[str]:
        real = [name for name in names if exists(f"{self._sys}/class/net/{name}/device")]
        return real or [name for name in names if name != "lo"]


def _rates(
    rates: Rates, chosen: Chosen, traffic: Traffic | Missing, at: int, words: tuple[str, str]
) -> Iterator[tuple[str, Answer]]:
    """Sum of the rates of the devices that count, by word."""
    if isinstance(traffic, Missing):
        yield from ((word, traffic) for word in words)
        return
    names = chosen.among(list(traffic))
    counters: Mapping[str, int] = {
        f"{word} {name}": traffic[name][place] for name in names for place, word in enumerate(words)
    }
    answers = rates.update(counters, at)
    for word in words:
        yield word, total(answers[f"{word} {name}"] for name in names)
