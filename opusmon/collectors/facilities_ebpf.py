"""What the streams and stalls panes need from the kernel, the distribution and this process's privileges."""

from __future__ import annotations

import gzip
import re
import time
import zlib
from dataclasses import replace

from opusmon.collectors.facility import (
    CAP_BPF,
    CAP_DAC_OVERRIDE,
    CAP_PERFMON,
    CAP_SYS_ADMIN,
    CAP_SYS_PTRACE,
    Facility,
    Host,
)

PANES = ("streams", "stalls")

_CAP_NAMES = {
    CAP_BPF: "CAP_BPF",
    CAP_PERFMON: "CAP_PERFMON",
    CAP_DAC_OVERRIDE: "CAP_DAC_OVERRIDE",
    CAP_SYS_PTRACE: "CAP_SYS_PTRACE",
}
"""Measured on 6.18: BPF and PERFMON load programs; uprobes through tracefs and reading tracepoint ids also
need DAC_OVERRIDE; /proc/PID/maps of other users' processes needs SYS_PTRACE."""

_AS_ROOT = 'sudo "$(command -v opusmon)"'
_OPTIONS = ("CONFIG_BPF_SYSCALL", "CONFIG_BPF_EVENTS", "CONFIG_UPROBES", "CONFIG_UPROBE_EVENTS")
_BCC_PACKAGES = {
    "debian": "python3-bpfcc",
    "rhel": "python3-bcc",
    "suse": "python3-bcc",
    "arch": "python-bcc",
    "": "Install your distribution's bcc for Python (the package bcc on PyPI is something else)",
}
_LIBBPF_PACKAGES = {
    "debian": "libbpf1",
    "rhel": "libbpf",
    "suse": "libbpf1",
    "arch": "libbpf",
    "": "Install libbpf 1.0 or newer",
}
_MAPS_BLOCK_B = 64 * 1024


def privileges(host: Host) -> Facility:
    """Capabilities of this process; root in a container may lack them too."""
    name = "privileges"
    lacking = [word for cap, word in _CAP_NAMES.items() if not host.has_cap(cap)]
    if not lacking:
        found = "root" if host.is_root else "the capabilities needed"
        return Facility(name, "ok", found, needed_by=PANES)
    remedy = _AS_ROOT
    if host.is_root:
        flags = " ".join(f"--cap-add {word.removeprefix('CAP_')}" for word in lacking)
        remedy = f"Start the container with: --pid host {flags}"
    found = "root, but in a container" if host.is_root else "an ordinary user"
    if lacking == ["CAP_SYS_PTRACE"]:
        reason = "without CAP_SYS_PTRACE the processes of other users cannot be looked into"
        return Facility(name, "limited", found, reason, remedy, PANES)
    return Facility(name, "missing", found, f"probes in the kernel need {', '.join(lacking)}", remedy, PANES)


def perf_event_paranoid(host: Host) -> Facility:
    """Levels above 2 (Debian and Ubuntu have them) refuse even CAP_PERFMON."""
    name = "perf_event_paranoid"
    text = host.text("/proc/sys/kernel/perf_event_paranoid")
    if text is None or not re.fullmatch(r"-?\d+", text):
        return Facility(name, "unknown", "not readable", needed_by=PANES)
    if int(text) <= 2 or host.has_cap(CAP_SYS_ADMIN):
        return Facility(name, "ok", text, needed_by=PANES)
    reason = f"level {text} refuses perf events, and so uprobes, to all but CAP_SYS_ADMIN"
    return Facility(name, "missing", text, reason, "sudo sysctl kernel.perf_event_paranoid=2", PANES)


def unprivileged_bpf(host: Host) -> Facility:
    """Shown because people look for it: opusmon asks for privileges whatever it says."""
    text = host.text("/proc/sys/kernel/unprivileged_bpf_disabled")
    name = "unprivileged bpf"
    if text is None:
        return Facility(name, "unknown", "not readable", needed_by=PANES)
    return Facility(name, "ok", f"disabled={text}, no obstacle to privileged probes", needed_by=PANES)


def lockdown(host: Host) -> Facility:
    """Lockdown "confidentiality" takes tracing away from root as well; "integrity" does not."""
    name, text = "kernel lockdown", host.text("/sys/kernel/security/lockdown")
    if text is None:
        return Facility(name, "ok", "not in force", needed_by=PANES)
    mode = re.search(r"\[(\w+)\]", text)
    if mode is None or mode[1] != "confidentiality":
        return Facility(name, "ok", mode[1] if mode else "not in force", needed_by=PANES)
    reason = "confidentiality mode refuses tracing to everybody, root included"
    remedy = "Boot with lockdown=integrity on the kernel command line"
    return Facility(name, "missing", mode[1], reason, remedy, PANES)


def kernel_options(host: Host) -> Facility:
    """BPF programs and uprobes must be compiled into the kernel."""
    name, text = "kernel options", _kernel_config(host)
    if text is None:
        return Facility(name, "unknown", "the kernel's configuration is not readable here", needed_by=PANES)
    off = [option for option in _OPTIONS if not re.search(rf"^{option}=[ym]$", text, re.MULTILINE)]
    if not off:
        return Facility(name, "ok", "BPF and uprobes", needed_by=PANES)
    reason = f"this kernel was built without {', '.join(off)}"
    return Facility(name, "missing", host.release, reason, "Boot your distribution's stock kernel", PANES)


def btf(host: Host) -> Facility:
    """Shown because people look for it: the probes here read no structure of the kernel, and so need no description of one."""
    name, path = "kernel BTF", "/sys/kernel/btf/vmlinux"
    found = path if host.exists(path) else "not there, and not needed"
    return Facility(name, "ok", found, needed_by=PANES)


def tracefs(host: Host) -> Facility:
    """Tracepoints are found through tracefs; uprobes do without."""
    name = "tracefs"
    mounts = re.findall(r"^\S+ (\S+) tracefs ", host.text("/proc/self/mounts") or "", re.MULTILINE)
    if mounts:
        return Facility(name, "ok", mounts[0], needed_by=PANES)
    if host.has_cap(CAP_SYS_ADMIN):
        return Facility(name, "ok", "not mounted; opusmon mounts it for itself", needed_by=PANES)
    reason = "tracepoints (scheduler, compilers) are listed there; root mounts it for opusmon alone"
    return Facility(
        name, "missing", "not mounted", reason, "sudo mount -t tracefs tracefs /sys/kernel/tracing", PANES
    )


def libbpf(host: Host) -> Facility:
    """`libbpf.so.1` loads ready-compiled probes in 17 ms and 1 MB, against 1.3 s and 99 MB with bcc and headers.

    One of the two is enough: this is missing where neither is usable, and its remedy is the shorter one.
    """
    name, path = "libbpf.so.1", host.library("libbpf.so.1")
    found, reason, remedy = path or "not found", "", ""
    if host.env.get("OPUSMON_BPF") == "bcc":
        reason, remedy = "OPUSMON_BPF=bcc in the environment asks for bcc instead", "unset OPUSMON_BPF"
    elif not path:
        reason, remedy = "it loads the probes", host.install(_LIBBPF_PACKAGES)
    elif not multi_uprobes(host.release) and host.has_cap(CAP_BPF) and not host.has_cap(CAP_SYS_ADMIN):
        reason = f"on kernel {host.release} (older than 6.6) it sets probes for CAP_SYS_ADMIN only"
        remedy = _AS_ROOT
    if not reason:
        return Facility(name, "ok", found, needed_by=PANES)
    if host.env.get("OPUSMON_BPF") != "libbpf" and _bcc_suffices(host):
        return Facility(name, "limited", found, f"{reason}; bcc stands in, with 100 MB more", remedy, PANES)
    return Facility(name, "missing", found, reason, remedy, PANES)


def multi_uprobes(release: str) -> bool:
    """Whether a kernel of this release (as `uname -r` prints it) sets uprobes for CAP_PERFMON: from 6.6 on."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return match is not None and (int(match[1]), int(match[2])) >= (6, 6)


def bcc(host: Host) -> Facility:
    """The distribution's bcc for Python, looked for as files: importing it loads 100 MB of compiler."""
    return _beside_libbpf(_bcc(host), host)


def headers(host: Host) -> Facility:
    """Kernel headers for bcc. Those of another version do for probes that read no kernel structure."""
    return _beside_libbpf(_headers(host), host)


def _beside_libbpf(facility: Facility, host: Host) -> Facility:
    """Nothing is amiss without what is needed only where libbpf is not there."""
    if facility.state == "ok" or not host.library("libbpf.so.1") or host.env.get("OPUSMON_BPF") == "bcc":
        return facility
    return replace(
        facility, state="ok", found=f"{facility.found}; not needed with libbpf", reason="", remedy=""
    )


def _bcc(host: Host) -> Facility:
    name = "bcc for Python"
    patterns = ("/usr/lib/python3/dist-packages/bcc", "/usr/lib*/python3*/site-packages/bcc")
    folders = [folder for pattern in patterns for folder in host.glob(pattern)]
    folders += [f"{folder}/bcc" for folder in host.module_paths]  # one unpacked elsewhere does as well
    found = next((folder for folder in folders if host.exists(f"{folder}/table.py")), None)
    library = host.library("libbcc.so.0")
    if found and library:
        return Facility(name, "ok", found, needed_by=PANES)
    reason = "where libbpf.so.1 is not there, it compiles and loads the probes"
    if found:
        reason = "its library libbcc.so.0 was not found"
    return Facility(name, "missing", found or "not found", reason, host.install(_BCC_PACKAGES), PANES)


def _headers(host: Host) -> Facility:
    name, release = "kernel headers", host.release
    given = host.env.get("BCC_KERNEL_SOURCE", "")
    own = (f"/lib/modules/{release}/build", f"/usr/src/linux-headers-{release}")
    for folder in (given, *own) if given else own:
        if host.exists(f"{folder}/include"):
            return Facility(name, "ok", folder, needed_by=PANES)
    if host.exists("/sys/kernel/kheaders.tar.xz"):
        return Facility(name, "ok", "/sys/kernel/kheaders.tar.xz", needed_by=PANES)
    other = [*host.glob("/usr/src/linux-headers-*/include"), *host.glob("/usr/src/kernels/*/include")]
    if other:
        reason = f"not of the running kernel {release}: enough for probes that read no kernel structure"
        found = other[-1].removesuffix("/include")
        return Facility(name, "limited", found, reason, _headers_install(host), PANES)
    reason = "where libbpf.so.1 is not there, bcc compiles the probes against them"
    return Facility(name, "missing", f"none for {release}", reason, _headers_install(host), PANES)


def _bcc_suffices(host: Host) -> bool:
    """Whether bcc could load the probes here."""
    return all(one.state != "missing" for one in (_bcc(host), _headers(host)))


def cuda_processes(host: Host, budget_s: float = 0.5) -> Facility:
    """Processes that have libcuda mapped, which are the ones to probe; stops looking after `budget_s` seconds."""
    name = "processes using CUDA"
    deadline = time.monotonic() + budget_s
    mapped, hidden, skipped = 0, 0, 0
    for path in host.glob("/proc/[0-9]*/maps"):
        if time.monotonic() > deadline:
            skipped += 1
            continue
        answer = _maps_libcuda(host, path)
        mapped += answer is True
        hidden += answer is None
    found = f"{mapped} found" + (f", {hidden} not readable" if hidden else "")
    if skipped:
        reason = f"{skipped} processes were not looked at: it took over {budget_s:g} s"
        return Facility(name, "limited", found, reason, needed_by=PANES)
    if hidden:
        remedy = "" if host.has_cap(CAP_SYS_PTRACE) else _AS_ROOT
        return Facility(name, "limited", found, "some processes may not be looked into", remedy, PANES)
    if not mapped:
        return Facility(name, "missing", found, "nothing here uses CUDA right now", needed_by=PANES)
    return Facility(name, "ok", found, needed_by=PANES)


def _maps_libcuda(host: Host, path: str) -> bool | None:
    """Whether a process maps libcuda; None when it may not be read. A process that has ended maps nothing."""
    tail = b""
    try:
        with host.path(path).open("rb") as file:
            while block := file.read(_MAPS_BLOCK_B):
                if b"/libcuda.so" in tail + block:
                    return True
                tail = block[-16:]
    except PermissionError:
        return None
    except OSError:
        return False
    return False


def _kernel_config(host: Host) -> str | None:
    packed = host.content("/proc/config.gz")
    if packed is not None:
        try:
            return gzip.decompress(packed).decode("utf-8", "replace")
        except (OSError, EOFError, zlib.error):
            return None
    return host.text(f"/boot/config-{host.release}") or host.text(f"/lib/modules/{host.release}/config")


def _headers_install(host: Host) -> str:
    """The headers of the running kernel where it is the distribution's, else of its current one."""
    release = host.release
    stock = bool(re.search(r"-(amd64|arm64|generic|aws|azure|gcp|oracle|lowlatency|nvidia\S*|kvm)$", release))
    arch = "arm64" if release.endswith(("arm64", "aarch64")) else "amd64"
    fallback = "linux-headers-generic" if host.distribution == "ubuntu" else f"linux-headers-{arch}"
    return host.install(
        {
            "debian": f"linux-headers-{release}" if stock else fallback,
            "rhel": f"kernel-devel-{release}",
            "suse": "kernel-default-devel",
            "arch": "linux-headers",
            "": f"Install the headers of kernel {release}",
        }
    )
