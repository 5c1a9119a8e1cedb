"""Facilities, looked at through trees built here that stand for hosts."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from opusmon.collectors import (
    facilities,
    facilities_ebpf,
    facilities_gpu,
    facilities_local,
    stalls,
    streams,
)
from opusmon.collectors.facility import Facility, Host

KERNEL = "6.8.0-85-generic"
ORDINARY = "Name:\tpython3\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n"
ROOT = "Name:\tpython3\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n"
DOCKER = "Name:\tpython3\nUid:\t0\t0\t0\t0\nCapEff:\t00000000a80425fb\n"
"""Default capabilities of a Docker container: DAC_OVERRIDE among them, no SYS_PTRACE, SYS_ADMIN, PERFMON, BPF."""

UBUNTU = 'NAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n'
DEBIAN = "ID=debian\n"
ROCKY = 'ID="rocky"\nID_LIKE="rhel centos fedora"\n'
LEAP = 'ID="opensuse-leap"\nID_LIKE="suse opensuse"\n'
MANJARO = "ID=manjaro\nID_LIKE=arch\n"
OTHER = "ID=nixos\n"

NVRM_OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)\n"
)
NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12\n"


class Tree:
    """A host under construction."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("/proc/sys/kernel/osrelease", f"{KERNEL}\n").put("/proc/self/status", ORDINARY).put(
            "/etc/os-release", UBUNTU
        )

    def put(self, path: str, content: str | bytes = "") -> Tree:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())
        return self

    def link(self, path: str, target: str) -> Tree:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
        return self

    def host(self, modules: tuple[str, ...] = (), **env: str) -> Host:
        return Host(self.root, env, modules, "/opt/venv/bin/python")

    def ask(self, probe: Callable[[Host], Facility], **env: str) -> Facility:
        return facilities.ask(probe, self.host(**env))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# -- gpu


def test_driver_versions_of_both_kernel_modules(tree: Tree) -> None:
    assert (
        tree.put("/proc/driver/nvidia/version", NVRM_OPEN).ask(facilities_gpu.driver).found
        == "580.159.04, open kernel module"
    )
    assert tree.put("/proc/driver/nvidia/version", NVRM).ask(facilities_gpu.driver).found == "535.183.01"


def test_without_a_driver_the_reason_depends_on_the_bus(tree: Tree) -> None:
    tree.put("/sys/bus/pci/devices/0000:00:01.0/vendor", "0x8086\n").put(
        "/sys/bus/pci/devices/0000:00:01.0/class", "0x030000\n"
    )
    nothing = tree.ask(facilities_gpu.driver)
    assert (nothing.state, nothing.reason) == ("missing", "no NVIDIA device is on this machine's PCI bus")
    tree.put("/sys/bus/pci/devices/0000:3b:00.0/vendor", "0x10de\n").put(
        "/sys/bus/pci/devices/0000:3b:00.0/class", "0x030200\n"
    )
    tree.put("/sys/bus/pci/devices/0000:c4:00.0/vendor", "0x10de\n").put(
        "/sys/bus/pci/devices/0000:c4:00.0/class", "0x068000\n"
    )
    idle = tree.ask(facilities_gpu.driver)
    assert idle.reason.startswith("1 NVIDIA device(s)")  # an NVSwitch (class 0680) is no GPU
    assert idle.remedy == "sudo ubuntu-drivers install --gpgpu && sudo modprobe nvidia"
    tree.put(f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko.zst")
    assert tree.ask(facilities_gpu.driver).remedy == "sudo modprobe nvidia"


def test_library_is_found_as_the_loader_finds_it(tree: Tree) -> None:
    assert tree.ask(facilities_gpu.library).state == "missing"
    tree.put("/usr/lib64/libnvidia-ml.so.1")
    assert tree.ask(facilities_gpu.library).found == "/usr/lib64/libnvidia-ml.so.1"
    tree.put("/opt/nv/libnvidia-ml.so.1").put(
        "/etc/ld.so.cache", b"glibc-ld.so.cache1.1\0libnvidia-ml.so.1\0/opt/nv/libnvidia-ml.so.1\0x\0"
    )
    assert tree.ask(facilities_gpu.library).found == "/opt/nv/libnvidia-ml.so.1"
    tree.put("/stub/libnvidia-ml.so.1")
    assert tree.ask(facilities_gpu.library, LD_LIBRARY_PATH="/none::/stub").found == "/stub/libnvidia-ml.so.1"


def test_a_cache_entry_whose_file_is_gone_does_not_count(tree: Tree) -> None:
    tree.put("/etc/ld.so.cache", b"\0/opt/nv/libnvidia-ml.so.1\0")
    assert tree.ask(facilities_gpu.library).state == "missing"


def test_library_missing_in_a_container(tree: Tree) -> None:
    tree.put("/proc/driver/nvidia/version", NVRM).put("/.dockerenv")
    assert "--gpus all" in tree.ask(facilities_gpu.library).remedy


def test_driver_upgraded_without_a_reboot(tree: Tree) -> None:
    tree.put("/proc/driver/nvidia/version", NVRM_OPEN).put(
        "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04"
    )
    tree.link("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "libnvidia-ml.so.580.159.04")
    assert tree.ask(facilities_gpu.versions_agree).found == "both 580.159.04"
    tree.put("/proc/driver/nvidia/version", NVRM)
    worse = tree.ask(facilities_gpu.versions_agree)
    assert (worse.state, worse.found) == ("missing", "kernel module 535.183.01, library 580.159.04")
    assert worse.remedy.startswith("sudo reboot")


def test_a_library_that_links_to_itself_has_no_version(tree: Tree) -> None:
    tree.put("/proc/driver/nvidia/version", NVRM).put("/usr/lib64/libnvidia-ml.so.1")
    assert tree.ask(facilities_gpu.versions_agree).state == "unknown"


def test_binding_old_new_and_none(tree: Tree, tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    (old / "pynvml").mkdir(parents=True)
    (old / "pynvml" / "__init__.py").write_text("from pynvml.nvml import *")
    (old / "pynvml" / "nvml.py").write_text("raise RuntimeError('imported')\ndef nvmlInit(): pass\n")
    (new / "nvidia_ml_py-13.615.71.dist-info").mkdir(parents=True)
    (new / "pynvml.py").write_text("raise RuntimeError('imported')\ndef nvmlGpmMetricsGet(metrics): pass\n")
    ok = facilities_gpu.binding(tree.host((str(new),)))
    assert (ok.state, ok.found) == ("ok", "13.615.71")
    shadowed = facilities_gpu.binding(tree.host((str(old), str(new))))
    assert shadowed.state == "limited"
    assert shadowed.remedy.startswith(
        "/opt/venv/bin/python -m pip uninstall -y pynvml && /opt/venv/bin/python -m pip install"
    )
    assert facilities_gpu.binding(tree.host(())).state == "missing"


@pytest.mark.parametrize(
    ("params", "status", "state"),
    [
        ("RmProfilingAdminOnly: 0\n", ORDINARY, "ok"),
        ("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n", ORDINARY, "missing"),
        ("RmProfilingAdminOnly: 1\n", ROOT, "ok"),
        ("RmProfilingAdminOnly: 1\n", DOCKER, "missing"),
        ("", ROOT, "unknown"),
    ],
)
def test_profiling_counters(tree: Tree, params: str, status: str, state: str) -> None:
    tree.put("/proc/driver/nvidia/params", params).put("/proc/self/status", status)
    assert tree.ask(facilities_gpu.profiling).state == state


def test_cupti_of_the_driver(tree: Tree) -> None:
    tree.put("/proc/driver/nvidia/version", NVRM_OPEN)
    assert tree.ask(facilities_gpu.cupti).remedy == "sudo apt install cuda-cupti-13-0"
    tree.put("/proc/driver/nvidia/version", NVRM).put("/etc/os-release", ROCKY)
    assert tree.ask(facilities_gpu.cupti).remedy == "sudo dnf install cuda-cupti-12-2"
    tree.put("/usr/local/cuda-13.0/extras/CUPTI/lib64/libcupti.so.13").put(
        "/usr/local/cuda-12.4/lib64/libcupti.so.12"
    )
    assert tree.ask(facilities_gpu.cupti).found == "/usr/local/cuda-12.4/lib64/libcupti.so.12 and 1 more"


# -- eBPF


def status(uid: int, *caps: int) -> str:
    return f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{sum(1 << cap for cap in caps):016x}\n"


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        (ROOT, "ok", ""),
        (ORDINARY, "missing", "CAP_BPF, CAP_PERFMON, CAP_DAC_OVERRIDE, CAP_SYS_PTRACE"),
        (DOCKER, "missing", "CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE"),
        (status(1000, 38, 39), "missing", "CAP_DAC_OVERRIDE, CAP_SYS_PTRACE"),
        (status(1000, 1, 38, 39), "limited", "CAP_SYS_PTRACE"),
        (status(1000, 1, 19, 38, 39), "ok", ""),
        (status(1000, 1, 19, 21), "ok", ""),
    ],
)
def test_privileges_by_capability(tree: Tree, text: str, state: str, words: str) -> None:
    """Numbers from linux/capability.h: DAC_OVERRIDE 1, SYS_PTRACE 19, SYS_ADMIN 21, PERFMON 38, BPF 39."""
    facility = tree.put("/proc/self/status", text).ask(facilities_ebpf.privileges)
    assert facility.state == state
    assert words in facility.reason


def test_root_in_a_container_is_told_what_the_container_lacks(tree: Tree) -> None:
    facility = tree.put("/proc/self/status", DOCKER).ask(facilities_ebpf.privileges)
    assert (
        facility.remedy
        == "Start the container with: --pid host --cap-add BPF --cap-add PERFMON --cap-add SYS_PTRACE"
    )


@pytest.mark.parametrize(
    ("level", "text", "state"),
    [
        ("2\n", ORDINARY, "ok"),
        ("-1\n", ORDINARY, "ok"),
        ("3\n", ORDINARY, "missing"),
        ("4\n", ROOT, "ok"),
        ("x\n", ROOT, "unknown"),
    ],
)
def test_perf_event_paranoid(tree: Tree, level: str, text: str, state: str) -> None:
    """Debian 13 sets 3: CAP_BPF and CAP_PERFMON are not enough then, and the sysctl must be named."""
    tree.put("/proc/sys/kernel/perf_event_paranoid", level).put("/proc/self/status", text)
    facility = tree.ask(facilities_ebpf.perf_event_paranoid)
    assert facility.state == state
    assert (facility.remedy == "sudo sysctl kernel.perf_event_paranoid=2") == (state == "missing")


def test_large_reads_of_sysctl_files() -> None:
    """The kernel answers ENOMEM to a read of megabytes from /proc/sys: the real file must be readable."""
    assert Host().text("/proc/sys/kernel/osrelease") == os.uname().release


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("[none] integrity confidentiality\n", "ok"),
        ("none [integrity] confidentiality\n", "ok"),
        ("none integrity [confidentiality]\n", "missing"),
    ],
)
def test_lockdown(tree: Tree, text: str, state: str) -> None:
    assert tree.put("/sys/kernel/security/lockdown", text).ask(facilities_ebpf.lockdown).state == state


FULL_CONFIG = "CONFIG_BPF_SYSCALL=y\nCONFIG_BPF_EVENTS=y\nCONFIG_UPROBES=y\nCONFIG_UPROBE_EVENTS=y\n"


def test_kernel_options_packed_plain_and_absent(tree: Tree) -> None:
    assert tree.ask(facilities_ebpf.kernel_options).state == "unknown"
    tree.put(f"/boot/config-{KERNEL}", FULL_CONFIG)
    assert tree.ask(facilities_ebpf.kernel_options).state == "ok"
    without = FULL_CONFIG.replace("CONFIG_UPROBE_EVENTS=y", "# CONFIG_UPROBE_EVENTS is not set")
    tree.put("/proc/config.gz", gzip.compress(without.encode()))
    facility = tree.ask(facilities_ebpf.kernel_options)
    assert (facility.state, facility.reason) == (
        "missing",
        "this kernel was built without CONFIG_UPROBE_EVENTS",
    )
    tree.put("/proc/config.gz", b"\x1f\x8b broken")
    assert tree.ask(facilities_ebpf.kernel_options).state == "unknown"


def test_tracefs_is_mounted_or_not(tree: Tree) -> None:
    tree.put("/proc/self/mounts", "sysfs /sys sysfs rw 0 0\ndebugfs /sys/kernel/debug debugfs rw 0 0\n")
    facility = tree.ask(facilities_ebpf.tracefs)
    assert (facility.state, facility.remedy) == (
        "missing",
        "sudo mount -t tracefs tracefs /sys/kernel/tracing",
    )
    tree.put("/proc/self/mounts", "tracefs /sys/kernel/tracing tracefs rw,nosuid 0 0\n")
    assert tree.ask(facilities_ebpf.tracefs).found == "/sys/kernel/tracing"


@pytest.mark.parametrize(
    ("release", "command"),
    [
        (UBUNTU, "sudo apt install python3-bpfcc"),
        (DEBIAN, "sudo apt install python3-bpfcc"),
        (ROCKY, "sudo dnf install python3-bcc"),
        (LEAP, "sudo zypper install python3-bcc"),
        (MANJARO, "sudo pacman -S python-bcc"),
        (OTHER, "Install your distribution's bcc for Python (the package bcc on PyPI is something else)"),
    ],
)
def test_commands_are_the_distributions_own(tree: Tree, release: str, command: str) -> None:
    assert tree.put("/etc/os-release", release).ask(facilities_ebpf.bcc).remedy == command


def test_root_is_not_told_to_use_sudo(tree: Tree) -> None:
    assert tree.put("/proc/self/status", ROOT).ask(facilities_ebpf.bcc).remedy == "apt install python3-bpfcc"


def test_bcc_is_the_distributions_and_needs_its_library(tree: Tree) -> None:
    tree.put("/usr/lib/python3/dist-packages/bcc/__init__.py")
    assert tree.ask(facilities_ebpf.bcc).state == "missing"  # PyPI's bcc has no table.py
    tree.put("/usr/lib/python3/dist-packages/bcc/table.py")
    assert tree.ask(facilities_ebpf.bcc).reason == "its library libbcc.so.0 was not found"
    tree.put("/usr/lib/x86_64-linux-gnu/libbcc.so.0")
    assert tree.ask(facilities_ebpf.bcc).state == "ok"


@pytest.mark.parametrize(
    ("path", "state"),
    [
        (f"/lib/modules/{KERNEL}/build/include/x", "ok"),
        (f"/usr/src/linux-headers-{KERNEL}/include/x", "ok"),
        ("/sys/kernel/kheaders.tar.xz", "ok"),
        ("/usr/src/linux-headers-6.1.0-57-amd64/include/x", "limited"),
        ("/usr/src/kernels/5.14.0-503.el9.x86_64/include/x", "limited"),
        ("/usr/src/other", "missing"),
    ],
)
def test_kernel_headers(tree: Tree, path: str, state: str) -> None:
    assert tree.put(path).ask(facilities_ebpf.headers).state == state


@pytest.mark.parametrize(
    ("release", "kernel", "command"),
    [
        (UBUNTU, KERNEL, f"sudo apt install linux-headers-{KERNEL}"),
        (UBUNTU, "6.18.44-custom", "sudo apt install linux-headers-generic"),
        (DEBIAN, "6.1.0-57-amd64", "sudo apt install linux-headers-6.1.0-57-amd64"),
        (DEBIAN, "6.18.44-custom", "sudo apt install linux-headers-amd64"),
        (ROCKY, "5.14.0-503.el9.x86_64", "sudo dnf install kernel-devel-5.14.0-503.el9.x86_64"),
    ],
)
def test_headers_of_a_kernel_the_distribution_does_not_have(
    tree: Tree, release: str, kernel: str, command: str
) -> None:
    tree.put("/etc/os-release", release).put("/proc/sys/kernel/osrelease", kernel)
    assert tree.ask(facilities_ebpf.headers).remedy == command


MAPS = "7f0000000000-7f0000001000 r-xp 00000000 08:01 42 /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04\n"


def test_processes_that_map_libcuda(tree: Tree) -> None:
    tree.put("/proc/1/maps", "7f00-7f01 r-xp 0 08:01 1 /sbin/init\n").put("/proc/self/maps", MAPS)
    assert tree.ask(facilities_ebpf.cuda_processes).state == "missing"
    tree.put("/proc/4242/maps", "x" * 100 + "\n" + MAPS).put("/proc/4243/maps", MAPS)
    assert tree.ask(facilities_ebpf.cuda_processes).found == "2 found"


@pytest.mark.parametrize("before", [65_520, 65_530, 65_536])
def test_a_name_across_two_reads_is_found(tree: Tree, before: int) -> None:
    tree.put("/proc/7/maps", b" " * before + b"/libcuda.so.1\n")
    assert tree.ask(facilities_ebpf.cuda_processes).found == "1 found"


def test_processes_of_others_are_counted_not_raised(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.put("/proc/4242/maps", MAPS).put("/proc/4243/maps", MAPS)
    real = Path.open

    def refuse(self: Path, *args: object, **kwargs: object) -> object:
        if "4243" in str(self):
            raise PermissionError(13, "Permission denied")
        return real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", refuse)
    facility = tree.ask(facilities_ebpf.cuda_processes)
    assert (facility.state, facility.found) == ("limited", "1 found, 1 not readable")


def test_the_scan_keeps_to_its_budget(tree: Tree) -> None:
    tree.put("/proc/4242/maps", MAPS).put("/proc/4243/maps", MAPS)
    facility = facilities_ebpf.cuda_processes(tree.host(), budget_s=-1)
    assert (facility.state, facility.found) == ("limited", "0 found")
    assert facility.reason.startswith("2 processes were not looked at")


# -- recording and terminal


def test_recordings_go_to_the_state_folder(tree: Tree) -> None:
    tree.put("/home/ana/.profile").put("/proc/self/mounts", "/dev/sda1 / ext4 rw 0 0\n")
    assert (
        tree.ask(facilities_local.state_dir, HOME="/home/ana").found
        == "/home/ana/.local/state/opusmon (ext4)"
    )
    tree.put("/var/x/y")
    assert (
        tree.ask(facilities_local.state_dir, HOME="/home/ana", XDG_STATE_HOME="/var/x").found
        == "/var/x/opusmon (ext4)"
    )


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "lustre"])
def test_a_network_filesystem_is_said(tree: Tree, kind: str) -> None:
    tree.put("/home/ana/.profile")
    tree.put(
        "/proc/self/mounts",
        f"filer:/h /home {kind} rw 0 0\n/dev/sda1 / ext4 rw 0 0\ntmpfs /home/analog tmpfs rw 0 0\n",
    )
    facility = tree.ask(facilities_local.state_dir, HOME="/home/ana")
    assert (facility.state, kind in facility.reason) == ("limited", True)


def test_a_state_folder_that_cannot_be_made(tree: Tree) -> None:
    tree.put("/home/ana", "a file where a folder should be")
    facility = tree.ask(facilities_local.state_dir, HOME="/home/ana")
    assert facility.state == "missing"
    assert "/home/ana cannot be written to" in facility.reason


@pytest.mark.parametrize(("free_b", "state"), [(10**7, "missing"), (5 * 10**8, "limited"), (10**12, "ok")])
def test_free_space(free_b: int, state: str) -> None:
    assert facilities_local.space_for(free_b).state == state


@pytest.mark.parametrize(
    ("wall_ns", "source", "state"),
    [
        (1_795_961_001 * 10**9, "tsc\n", "ok"),
        (86_400 * 10**9, "tsc\n", "limited"),
        (1_795_961_001 * 10**9, "hpet\n", "limited"),
    ],
)
def test_clocks(tree: Tree, wall_ns: int, source: str, state: str) -> None:
    tree.put("/sys/devices/system/clocksource/clocksource0/current_clocksource", source)
    assert facilities_local.clock(tree.host(), wall_ns, 71 * 10**9).state == state


@pytest.mark.parametrize(
    ("env", "states"),
    [
        ({}, ("missing", "limited", "limited")),
        ({"TERM": "dumb", "LANG": "C"}, ("missing", "limited", "limited")),
        ({"TERM": "xterm-256color", "LANG": "de_DE.UTF-8"}, ("ok", "ok", "ok")),
        ({"TERM": "linux", "LANG": "de_DE.UTF-8", "LC_ALL": "C", "NO_COLOR": "1"}, ("ok", "limited", "ok")),
        ({"TERM": "vt100", "LC_CTYPE": "C.utf8", "COLORTERM": "truecolor"}, ("ok", "ok", "ok")),
    ],
)
def test_terminal(tree: Tree, env: dict[str, str], states: tuple[str, str, str]) -> None:
    probes = (facilities_local.term, facilities_local.locale, facilities_local.colours)
    assert tuple(tree.ask(probe, **env).state for probe in probes) == states


def test_terminal_size(tree: Tree) -> None:
    assert facilities_local.size(tree.host(), (160, 50)).state == "ok"
    assert facilities_local.size(tree.host(), (79, 24)).state == "limited"
    assert facilities_local.size(tree.host(), (0, 0)).state == "unknown"


# -- all together


def test_an_empty_host_answers_every_question(tmp_path: Path) -> None:
    found = facilities.survey(host=Host(tmp_path, {}, ()))
    assert len(found) == len(facilities.PROBES)
    assert len({facility.name for facility in found}) == len(found)
    for facility in found:
        assert facility.state in ("ok", "missing", "limited", "unknown")
        assert facility.needed_by
        assert facility.reason or facility.state in ("ok", "unknown"), facility
        assert "\n" not in facility.reason + facility.remedy + facility.found


def test_streams_and_stalls_say_what_is_missing_and_how_to_get_it(tree: Tree) -> None:
    answer = streams.probe(tree.host())
    assert answer is not None
    assert answer.reason == (
        "libbpf.so.1: not found, it loads the probes; "
        "privileges: an ordinary user, probes in the kernel need CAP_BPF, CAP_PERFMON, CAP_DAC_OVERRIDE, CAP_SYS_PTRACE"
    )
    assert answer.remedy == 'sudo apt install libbpf1 && sudo "$(command -v opusmon)"'
    assert stalls.probe(tree.host()) == answer


def prepared(tree: Tree) -> Tree:
    tree.put("/proc/self/mounts", "tracefs /t tracefs rw 0 0\n").put("/proc/self/status", ROOT)
    return tree.put("/usr/lib64/libbcc.so.0")


def test_a_prepared_host_can_watch_streams_and_stalls(tree: Tree) -> None:
    prepared(tree).put("/usr/lib/python3/dist-packages/bcc/table.py")
    tree.put(f"/lib/modules/{KERNEL}/build/include/x")
    assert streams.probe(tree.host()) is None
    assert stalls.probe(tree.host()) is None


def test_an_unpacked_bcc_and_its_headers_do_as_well(tree: Tree) -> None:
    prepared(tree).put("/opt/b/python/bcc/table.py").put("/opt/b/h/include/x")
    assert streams.probe(tree.host(("/opt/b/python",), BCC_KERNEL_SOURCE="/opt/b/h")) is None
    answer = streams.probe(tree.host(("/opt/b/python",), BCC_KERNEL_SOURCE="/opt/none"))
    assert answer is not None
    assert answer.reason.startswith("libbpf.so.1: ")


def test_root_and_libbpf_are_all_that_streams_need(tree: Tree) -> None:
    tree.put("/proc/self/status", ROOT).put("/usr/lib64/libbpf.so.1")
    assert streams.probe(tree.host()) is None
    for probe in (facilities_ebpf.libbpf, facilities_ebpf.bcc, facilities_ebpf.headers, facilities_ebpf.btf):
        assert tree.ask(probe).state == "ok"
    answer = streams.probe(tree.host(OPUSMON_BPF="bcc"))
    assert answer is not None
    assert answer.remedy == "unset OPUSMON_BPF"
    for probe in (facilities_ebpf.bcc, facilities_ebpf.headers):
        assert tree.ask(probe, OPUSMON_BPF="bcc").state == "missing"
    tree.put("/usr/src/linux-headers-6.1.0-57-amd64/include/x")
    assert tree.ask(facilities_ebpf.headers).state == "ok"  # that they are not of this kernel is no news then


BY_CAPS = "Name:\tpython3\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t000000c000080002\n"
"""DAC_OVERRIDE, SYS_PTRACE, PERFMON and BPF."""


@pytest.mark.parametrize(
    ("kernel", "status", "state"),
    [
        ("6.6.0-1-generic", BY_CAPS, "ok"),
        ("6.5.13-custom", BY_CAPS, "missing"),
        ("5.15.0-85-generic", BY_CAPS, "missing"),
        ("5.15.0-85-generic", ROOT, "ok"),
        ("5.15.0-85-generic", ORDINARY, "ok"),  # that is said of privileges
        ("10.0", BY_CAPS, "ok"),
    ],
)
def test_libbpf_on_kernels_that_set_uprobes_for_administrators_only(
    tree: Tree, kernel: str, status: str, state: str
) -> None:
    tree.put("/usr/lib64/libbpf.so.1").put("/proc/sys/kernel/osrelease", kernel).put(
        "/proc/self/status", status
    )
    assert tree.ask(facilities_ebpf.libbpf).state == state


def test_bcc_and_headers_stand_in_for_libbpf(tree: Tree) -> None:
    prepared(tree).put("/usr/lib/python3/dist-packages/bcc/table.py")
    assert tree.ask(facilities_ebpf.libbpf).state == "missing"
    tree.put("/usr/src/linux-headers-6.1.0-57-amd64/include/x")
    assert tree.ask(facilities_ebpf.libbpf).state == "limited"
    assert tree.ask(facilities_ebpf.libbpf).remedy == "apt install libbpf1"
    assert tree.ask(facilities_ebpf.libbpf, OPUSMON_BPF="libbpf").state == "missing"


def test_steps_that_are_no_commands_are_given_as_they_are(tree: Tree) -> None:
    prepared(tree).put("/usr/lib/python3/dist-packages/bcc/table.py").put("/proc/self/status", DOCKER)
    tree.put(f"/lib/modules/{KERNEL}/build/include/x")
    answer = streams.probe(tree.host())
    assert answer is not None
    assert (
        answer.remedy
        == "Start the container with: --pid host --cap-add BPF --cap-add PERFMON --cap-add SYS_PTRACE"
    )
