"""What recording and drawing need: a place to write, clocks, a terminal; and what the kernel says about pressure."""

from __future__ import annotations

import os
import re
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path

from opusmon.collectors.facility import Facility, Host, State
from opusmon.paths import filesystem_at, is_network
from opusmon.times import format_duration

RECORDING = ("recording",)
LATENCY = ("latency",)
HOST = ("host",)
TERMINAL = ("terminal",)

_ENOUGH_B = 1024**3
_TOO_LITTLE_B = 64 * 1024**2
_RELEASE_YEAR = 2026
_SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies"})


def state_dir(host: Host) -> Facility:
    """Where recordings go by default (`$XDG_STATE_HOME/opusmon`): writable, and not on a network filesystem."""
    name, folder = "recordings", _state_folder(host)
    place = _nearest(host, folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = f"{_shown(host, place)} cannot be written to"
        return Facility(name, "missing", folder, reason, 'export XDG_STATE_HOME="$(mktemp -d)"', RECORDING)
    kind = _filesystem(host, folder)
    if is_network(kind):
        reason = f"it is on a network filesystem ({kind}), where a recording can stall or be damaged"
        return Facility(name, "limited", folder, reason, "export XDG_STATE_HOME=/var/tmp", RECORDING)
    return Facility(name, "ok", f"{folder} ({kind})" if kind else folder, needed_by=RECORDING)


def free_space(host: Host) -> Facility:
    """Room on the filesystem of the recordings."""
    name = "free space"
    try:
        stat = os.statvfs(_nearest(host, _state_folder(host)))
    except OSError:
        return Facility(name, "unknown", "not readable", needed_by=RECORDING)
    return space_for(stat.f_bavail * stat.f_frsize)


def space_for(free_b: int) -> Facility:
    """Judge so many free bytes."""
    name, found = "free space", f"{free_b / 1024**3:.1f} GiB"
    remedy = "df -h ~   # make room there, or point XDG_STATE_HOME at another disk"
    if free_b < _TOO_LITTLE_B:
        return Facility(name, "missing", found, "there is no room for a recording", remedy, RECORDING)
    if free_b < _ENOUGH_B:
        return Facility(name, "limited", found, "a recording of a day may not fit", remedy, RECORDING)
    return Facility(name, "ok", found, needed_by=RECORDING)


def sqlite(host: Host) -> Facility:
    """The standard library's sqlite3, which some Python builds lack."""
    spec = PathFinder.find_spec("_sqlite3", list(host.module_paths))
    if spec is not None or "_sqlite3" in sys.builtin_module_names:
        return Facility("sqlite3", "ok", "in Python", needed_by=RECORDING)
    reason = "this Python was built without SQLite, in which recordings are kept"
    return Facility("sqlite3", "missing", host.python, reason, "Use your distribution's python3", RECORDING)


def clock(host: Host, wall_ns: int | None = None, monotonic_ns: int | None = None) -> Facility:
    """Wall clock and monotonic clock, and whether reading them is cheap."""
    name = "clocks"
    wall_ns = time.time_ns() if wall_ns is None else wall_ns
    uptime_ns = time.monotonic_ns() if monotonic_ns is None else monotonic_ns
    source = host.text("/sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown source"
    year = time.gmtime(wall_ns // 1_000_000_000).tm_year
    if year < _RELEASE_YEAR:
        reason = f"the wall clock says {year}: times shown and typed will not match your logs"
        return Facility(name, "limited", source, reason, "sudo timedatectl set-ntp true", RECORDING)
    if source in _SLOW_CLOCKS:
        reason = "the kernel has given up its fast clock: every time stamp costs a microsecond or more"
        return Facility(name, "limited", source, reason, "sudo dmesg | grep -i clocksource", RECORDING)
    return Facility(name, "ok", f"{source}, up {format_duration(uptime_ns)}", needed_by=RECORDING)


def python_version(host: Host) -> Facility:
    """The interpreter in use."""
    return Facility("python", "ok", f"{sys.version.split()[0]} {host.python}", needed_by=RECORDING)


def pressure(host: Host) -> Facility:
    """Pressure stall information: the share of time in which tasks waited for CPU, memory or I/O."""
    name = "pressure (PSI)"
    text = host.text("/proc/pressure/cpu")
    if text is not None and "total=" in text:
        return Facility(name, "ok", "/proc/pressure", needed_by=HOST)
    reason = "the shares of time lost to waiting for CPU, memory and I/O stay empty"
    remedy = "Boot the kernel with psi=1 (CONFIG_PSI_DEFAULT_DISABLED), or use one built with CONFIG_PSI"
    return Facility(name, "limited", "off in this kernel", reason, remedy, HOST)


def http(host: Host) -> Facility:
    """aiohttp, which asks engines for their metrics and is the proxy."""
    return _module(host, "aiohttp", "engines cannot be scraped and there is no proxy", "aiohttp")


def anthropic_sdk(host: Host) -> Facility:
    """The SDK that the canary sends its requests with."""
    return _module(host, "anthropic", "there is no canary (--probe)", "anthropic")


def otlp_protobuf(host: Host) -> Facility:
    """The message types of OTLP; JSON needs none."""
    reason = "--otlp-listen takes JSON only"
    return _module(host, "opentelemetry.proto", reason, "'opusmon[otlp]'", state="limited")


def _module(host: Host, name: str, reason: str, package: str, state: State = "missing") -> Facility:
    """Whether a module of that name lies on the module path."""
    below = name.replace(".", "/")
    place = next((folder for folder in host.module_paths if host.exists(f"{folder}/{below}")), None)
    if place is not None:
        return Facility(name, "ok", place, needed_by=LATENCY)
    return Facility(name, state, "not installed", reason, f"pip install {package}", LATENCY)


def term(host: Host) -> Facility:
    """What `TERM` promises."""
    name, value = "TERM", host.env.get("TERM", "")
    if value in ("", "dumb"):
        reason = "the terminal promises no cursor movement, so the screen cannot be drawn"
        return Facility(name, "missing", value or "not set", reason, "export TERM=xterm-256color", TERMINAL)
    inside = " in tmux" if host.env.get("TMUX") else ""
    return Facility(name, "ok", value + inside, needed_by=TERMINAL)


def locale(host: Host) -> Facility:
    """Braille and block characters need UTF-8; without it charts are drawn in ASCII."""
    name = "locale"
    value = next((host.env[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if host.env.get(key)), "")
    if re.search(r"utf-?8", value, re.IGNORECASE):
        return Facility(name, "ok", value, needed_by=TERMINAL)
    reason = "not a UTF-8 locale: charts are drawn in ASCII, at a quarter of the resolution"
    return Facility(name, "limited", value or "not set", reason, "export LC_CTYPE=C.UTF-8", TERMINAL)


def colours(host: Host) -> Facility:
    """How many colours the environment promises."""
    name, env = "colours", host.env
    if env.get("NO_COLOR"):
        return Facility(name, "ok", "none, as NO_COLOR asks", needed_by=TERMINAL)
    if env.get("COLORTERM") in ("truecolor", "24bit"):
        return Facility(name, "ok", "16 million", needed_by=TERMINAL)
    if "256color" in env.get("TERM", ""):
        return Facility(name, "ok", "256", needed_by=TERMINAL)
    reason = "heat maps are coarser in 16 colours"
    return Facility(name, "limited", "16", reason, "export TERM=xterm-256color COLORTERM=truecolor", TERMINAL)


def size(_host: Host, columns_lines: tuple[int, int] | None = None) -> Facility:
    """Columns and lines of the terminal on standard output or error."""
    name, got = "size", columns_lines or _terminal_size()
    if got is None or 0 in got:
        return Facility(name, "unknown", "not a terminal", needed_by=TERMINAL)
    found = f"{got[0]}x{got[1]}"
    if got[0] < 80 or got[1] < 24:
        reason = "under 80x24 panes are cut; all four fit side by side from 100x30"
        return Facility(name, "limited", found, reason, "Enlarge the window", TERMINAL)
    return Facility(name, "ok", found, needed_by=TERMINAL)


def _terminal_size() -> tuple[int, int] | None:
    for descriptor in (1, 2, 0):
        try:
            got = os.get_terminal_size(descriptor)
        except OSError:
            continue
        return got.columns, got.lines
    return None


def _state_folder(host: Host) -> str:
    """As `opusmon.paths.state_dir`, from the environment of the host looked at."""
    value = host.env.get("XDG_STATE_HOME", "")
    home = host.env.get("HOME", "") or str(Path.home())
    return (
        f"{value.rstrip('/')}/opusmon"
        if value.startswith("/")
        else f"{home.rstrip('/')}/.local/state/opusmon"
    )


def _nearest(host: Host, folder: str) -> Path:
    """The folder, or the nearest parent that exists: where it would be made."""
    place = host.path(folder)
    while place not in (host.root, Path("/")) and not os.path.lexists(place):
        place = place.parent
    return place


def _shown(host: Host, place: Path) -> str:
    return (
        "/" + str(place.relative_to(host.root)).lstrip("./")
        if place.is_relative_to(host.root)
        else str(place)
    )


def _filesystem(host: Host, folder: str) -> str:
    """Type of the filesystem that holds a path."""
    lines = (line.split(" ") for line in (host.text("/proc/self/mounts") or "").splitlines())
    return filesystem_at(Path(folder), ((parts[1], parts[2]) for parts in lines if len(parts) >= 3))[1]
