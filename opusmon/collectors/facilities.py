"""Every facility of the host that opusmon can use, asked cheaply and without side effects.

Nothing here imports a vendor library, opens a network connection or starts a process; a driver that hangs
cannot hang it. What only the driver can answer is asked by `nvml_check`, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from opusmon.collectors import facilities_ebpf as ebpf
from opusmon.collectors import facilities_gpu as gpu
from opusmon.collectors import facilities_local as local
from opusmon.collectors.facility import Facility, Host, State

__all__ = ["PROBES", "Facility", "Host", "State", "ask", "lacking", "survey"]

PROBES: tuple[Callable[[Host], Facility], ...] = (
    gpu.driver,
    gpu.library,
    gpu.versions_agree,
    gpu.binding,
    gpu.gpm,
    ebpf.privileges,
    ebpf.perf_event_paranoid,
    ebpf.unprivileged_bpf,
    ebpf.lockdown,
    ebpf.kernel_options,
    ebpf.btf,
    ebpf.tracefs,
    ebpf.bcc,
    ebpf.libbpf,
    ebpf.headers,
    ebpf.cuda_processes,
    gpu.profiling,
    gpu.cupti,
    local.http,
    local.anthropic_sdk,
    local.otlp_protobuf,
    local.pressure,
    local.state_dir,
    local.free_space,
    local.sqlite,
    local.clock,
    local.python_version,
    local.term,
    local.locale,
    local.colours,
    local.size,
)
"""In the order in which `doctor` shows them."""


def survey(root: Path = Path("/"), host: Host | None = None) -> list[Facility]:
    """Ask every probe.

    Args:
        root: folder that holds the host's tree.
        host: the whole view, when more than the root differs.
    """
    view = host or Host(root)
    return [ask(probe, view) for probe in PROBES]


def ask(probe: Callable[[Host], Facility], host: Host) -> Facility:
    """Ask one probe; for root its command goes without `sudo`, which containers often lack."""
    facility = probe(host)
    return replace(facility, remedy=facility.remedy.replace("sudo ", "")) if host.is_root else facility


def lacking(probes: Iterable[Callable[[Host], Facility]], host: Host) -> list[Facility]:
    """The facilities that are missing, in the order of the probes."""
    return [facility for probe in probes if (facility := ask(probe, host)).state == "missing"]
