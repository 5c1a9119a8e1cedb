"""What the gpu pane and the deep L2 counters need from the host."""

from __future__ import annotations

import re
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from opusmon.collectors.facility import CAP_SYS_ADMIN, Facility, Host
from opusmon.nvrm import PROC_VERSION, module_version

GPU = ("gpu",)
DEEP = ("l2",)

_NVIDIA_PCI_VENDOR = "0x10de"
_RELOAD = "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia"
_DRIVER_PACKAGES = {
    "debian": "nvidia-driver",
    "rhel": "nvidia-driver nvidia-driver-cuda",
    "suse": "nvidia-open-driver-G06-signed-kmp-default nvidia-compute-utils-G06",
    "arch": "nvidia-open nvidia-utils",
    "": "Install the NVIDIA driver of your distribution",
}
_NVML_PACKAGES = {
    "debian": "libnvidia-ml1",
    "rhel": "nvidia-driver-cuda-libs",
    "suse": "nvidia-compute-G06",
    "arch": "nvidia-utils",
    "": "Install the user-space part of the NVIDIA driver, the same version as the kernel module",
}
_CUPTI_BY_BRANCH = {535: "12-2", 550: "12-4", 560: "12-6", 565: "12-7", 570: "12-8", 575: "12-9", 580: "13-0"}
"""CUDA version of each driver branch, from NVIDIA's table of toolkit and driver versions."""


def driver(host: Host) -> Facility:
    """The NVIDIA kernel module, and when there is none whether the host has an NVIDIA device at all."""
    name, version = "nvidia driver", kernel_module(host)
    if version:
        text = host.text(PROC_VERSION) or ""
        flavour = ", open kernel module" if "Open Kernel Module" in text else ""
        return Facility(name, "ok", version + flavour, needed_by=GPU)
    devices = _pci_devices(host)
    if devices == 0:
        reason = "no NVIDIA device is on this machine's PCI bus"
        return Facility(
            name, "missing", "not loaded", reason, "Run opusmon on the host that has the GPUs", GPU
        )
    if devices is None:
        reason = "the kernel module is not loaded, and the PCI bus cannot be read from here"
        return Facility(name, "missing", "not loaded", reason, "sudo modprobe nvidia", GPU)
    reason = f"{devices} NVIDIA device(s) on the PCI bus, but the kernel module is not loaded"
    installed = host.glob(f"/lib/modules/{host.release}/**/nvidia.ko*")
    remedy = "sudo modprobe nvidia" if installed else _driver_install(host)
    return Facility(name, "missing", "not loaded", reason, remedy, GPU)


def library(host: Host) -> Facility:
    """`libnvidia-ml.so.1`, which answers every question of the gpu pane."""
    name, path = "libnvidia-ml.so.1", host.library("libnvidia-ml.so.1")
    if path:
        return Facility(name, "ok", path, needed_by=GPU)
    if kernel_module(host) and host.exists("/.dockerenv"):
        remedy = "Start the container with: --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    else:
        remedy = host.install(_NVML_PACKAGES) if kernel_module(host) else "Comes with the NVIDIA driver"
    return Facility(
        name, "missing", "not found", "NVML is the source of every number in the gpu pane", remedy, GPU
    )


def versions_agree(host: Host) -> Facility:
    """Kernel module and library must be of one version; after an upgrade without a reboot they are not."""
    name, kernel, user = "driver and library", kernel_module(host), _library_version(host)
    if not kernel or not user:
        return Facility(name, "unknown", "one of the two was not found", needed_by=GPU)
    if kernel == user:
        return Facility(name, "ok", f"both {kernel}", needed_by=GPU)
    reason = (
        "the driver was upgraded without loading the new module; NVML answers error 18 until that is done"
    )
    return Facility(
        name,
        "missing",
        f"kernel module {kernel}, library {user}",
        reason,
        f"sudo reboot   # or, with no GPU process running: {_RELOAD}",
        GPU,
    )


def binding(host: Host) -> Facility:
    """The Python module `pynvml` of the package nvidia-ml-py, looked at and not imported."""
    name = "pynvml (nvidia-ml-py)"
    install = f"{host.python} -m pip install --force-reinstall nvidia-ml-py"
    spec = PathFinder.find_spec("pynvml", list(host.module_paths))
    if spec is None or not spec.origin:
        return Facility(name, "missing", "not found", "opusmon asks NVML through this module", install, GPU)
    version = _package_version(Path(spec.origin))
    if _has_gpm(spec):
        return Facility(name, "ok", version or spec.origin, needed_by=GPU)
    reason = "an old package named pynvml hides nvidia-ml-py: it has no GPM, so no HBM bandwidth and no NVLink traffic"
    remedy = f"{host.python} -m pip uninstall -y pynvml && {install}"
    return Facility(name, "limited", spec.origin, reason, remedy, GPU)


def gpm(_host: Host) -> Facility:
    """Whether the devices give GPM metrics; only the driver knows."""
    reason = "only the driver knows whether its devices give HBM bandwidth and NVLink traffic (Hopper and newer do)"
    return Facility("gpm", "unknown", "not asked", reason, needed_by=GPU)


def profiling(host: Host) -> Facility:
    """Hardware counters may be reserved to the administrator (`RmProfilingAdminOnly`)."""
    name = "profiling counters"
    match = re.search(
        r"^RmProfilingAdminOnly:\s*(\d+)", host.text("/proc/driver/nvidia/params") or "", re.MULTILINE
    )
    if match is None:
        return Facility(name, "unknown", "the driver does not say", needed_by=DEEP)
    if match[1] == "0":
        return Facility(name, "ok", "open to every user", needed_by=DEEP)
    if host.has_cap(CAP_SYS_ADMIN):
        return Facility(name, "ok", "administrators only, and this process is one", needed_by=DEEP)
    reason = "the driver gives hardware counters to administrators only (RmProfilingAdminOnly: 1)"
    return Facility(name, "missing", "administrators only", reason, 'sudo "$(command -v opusmon)"', DEEP)


def cupti(host: Host) -> Facility:
    """`libcupti.so` of the driver's own CUDA version; one of another version can crash its caller."""
    name, paths = "libcupti", cupti_paths(host)
    if paths:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return Facility(name, "ok", paths[0] + more, needed_by=DEEP)
    reason = "L2 counters are read through CUPTI, of the same CUDA version as the driver"
    return Facility(name, "missing", "not found", reason, _cupti_install(host), DEEP)


def kernel_module(host: Host) -> str:
    """Version of the loaded NVIDIA kernel module, "" when none is."""
    return module_version(host.text(PROC_VERSION) or "")


def _library_version(host: Host) -> str:
    """Version in the name of the file that `libnvidia-ml.so.1` links to, "" when it names none."""
    path = host.library("libnvidia-ml.so.1")
    for _ in range(8):
        if path is None:
            return ""
        if match := re.search(r"\.so\.(\d+\.\d+(?:\.\d+)*)$", path):
            return match[1]
        try:
            target = str(host.path(path).readlink())
        except OSError:
            return ""
        path = target if target.startswith("/") else str(Path(path).parent / target)
    return ""


def _pci_devices(host: Host) -> int | None:
    """How many NVIDIA display controllers (PCI class 03) the bus has; None when it cannot be read."""
    slots = host.glob("/sys/bus/pci/devices/*")
    if not slots and not host.exists("/sys/bus/pci/devices"):
        return None
    nvidia = (slot for slot in slots if host.text(f"{slot}/vendor") == _NVIDIA_PCI_VENDOR)
    return sum((host.text(f"{slot}/class") or "").startswith("0x03") for slot in nvidia)


def _driver_install(host: Host) -> str:
    if host.distribution == "ubuntu":
        return "sudo ubuntu-drivers install --gpgpu && sudo modprobe nvidia"
    return host.install(_DRIVER_PACKAGES)


def _has_gpm(spec: ModuleSpec) -> bool:
    """Whether the module's source defines the GPM calls (nvidia-ml-py since 11.525)."""
    origin = Path(spec.origin or "")
    files = sorted(origin.parent.glob("*.py")) if origin.name == "__init__.py" else [origin]
    try:
        return any(b"def nvmlGpmMetricsGet" in file.read_bytes() for file in files)
    except OSError:
        return False


def _package_version(origin: Path) -> str:
    folders = sorted(origin.parent.glob("nvidia_ml_py-*.dist-info"))
    return folders[-1].name.removeprefix("nvidia_ml_py-").removesuffix(".dist-info") if folders else ""


def cupti_paths(host: Host) -> list[str]:
    """Every libcupti that the loader, a toolkit or a wheel on the module path offers, as found."""
    toolkit = [path for prefix in ("/usr/local/cuda*", "/opt/cuda*") for path in _toolkit_cupti(host, prefix)]
    loader = next((path for n in (13, 12) if (path := host.library(f"libcupti.so.{n}"))), None)
    wheels = [
        str(found)
        for entry in host.module_paths
        for found in sorted(Path(entry).glob("nvidia/*/lib/libcupti.so*"))
    ]
    return list(dict.fromkeys([*([loader] if loader else []), *toolkit, *wheels]))


def _toolkit_cupti(host: Host, prefix: str) -> list[str]:
    return [
        p
        for folder in ("lib64", "extras/CUPTI/lib64")
        for p in host.glob(f"{prefix}/{folder}/libcupti.so.1?")
    ]


def _cupti_install(host: Host) -> str:
    branch = int(kernel_module(host).split(".")[0] or 0)
    version = _CUPTI_BY_BRANCH.get(branch, "")
    if not version:
        return "Install CUPTI of the CUDA version that nvidia-smi prints (package cuda-cupti-MAJOR-MINOR)"
    package = f"cuda-cupti-{version}"
    other = f"Install {package} from NVIDIA's repository"
    return host.install({"debian": package, "rhel": package, "suse": package, "arch": "cuda", "": other})
