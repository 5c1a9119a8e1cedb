"""Shared-memory loads on a GPU: cycles and time of a load with given addresses.

32 warps on each SM issue the same load over and over, so that shared memory is never idle: what a load then takes of
the SM's cycles is what it occupies shared memory for. Each load's address depends on what an earlier one returned
(zeros), so that none is left out or moved by the compiler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opusmon.checks.banks import LANES, Access
from opusmon.checks.basis import of_torch
from opusmon.checks.nvrtc import CannotMeasure, Kernel

WARPS = 32
CHAINS = 8
"""Loads of a warp that do not wait for each other."""
ROUNDS = 2048
REPEATS = 5
ROOM_B = 48 * 1024
"""Shared memory of a block that needs no permission."""

_SOURCE = """
extern "C" __global__ void loads(const int *places, int rounds, long long *cycles, int *sink) {
  __shared__ __align__(1024) unsigned char tile[ROOM_B];
  for (int n = threadIdx.x; n < ROOM_B / 4; n += blockDim.x) ((int *)tile)[n] = 0;
  unsigned at[CHAINS];
  unsigned base = (unsigned)__cvta_generic_to_shared(tile);
  for (int c = 0; c < CHAINS; c++) at[c] = base + places[c * 32 + threadIdx.x % 32];
  __syncthreads();
  long long begin = clock64();
  for (int n = 0; n < rounds; n++) {
    #pragma unroll
    for (int c = 0; c < CHAINS; c++) { unsigned a, b = 0, d = 0, e = 0; LOAD; at[c] += a | b | d | e; }
  }
  __syncthreads();
  long long end = clock64();
  unsigned sum = 0;
  for (int c = 0; c < CHAINS; c++) sum += at[c];
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - begin;
}
"""
_ONE = 'asm volatile("ld.shared.{} %0, [%1];" : "=r"(a) : "r"(at[c]))'
LOADS = {
    1: _ONE.format("u8"),
    2: _ONE.format("u16"),
    4: _ONE.format("b32"),
    8: 'asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(at[c]))',
    16: 'asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" '
    ': "=r"(a), "=r"(b), "=r"(d), "=r"(e) : "r"(at[c]))',
}
LDMATRIX = (
    'asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" '
    ': "=r"(a), "=r"(b), "=r"(d), "=r"(e) : "r"(at[c]))'
)


def source(load: str) -> str:
    """The kernel around one load."""
    text = _SOURCE.replace("LOAD;", f"{load};")
    return text.replace("ROOM_B", str(ROOM_B)).replace("CHAINS", str(CHAINS))


@dataclass(frozen=True, slots=True)
class Timing:
    """What a warp's load takes when shared memory is kept busy.

    Attributes:
        cycles: of an SM, median of the SMs.
        ns: the same by events around the kernel, its start included.
    """

    cycles: float
    ns: float


@dataclass(frozen=True, slots=True)
class Busy:
    """A stretch of time that was full of loads.

    Attributes:
        begin_ns, end_ns: CLOCK_MONOTONIC.
        loads: of warps, on all SMs.
    """

    begin_ns: int
    end_ns: int
    loads: int

    @property
    def loads_per_s(self) -> float:
        """Loads of warps a second."""
        return self.loads / (self.end_ns - self.begin_ns) * 1e9


class Gpu:
    """The current device.

    Raises:
        CannotMeasure: there is none that torch can use.
    """

    def __init__(self) -> None:
        try:
            import torch
        except ModuleNotFoundError as error:
            raise CannotMeasure("torch is not installed here") from error
        if not torch.cuda.is_available():
            raise CannotMeasure(f"no GPU is visible to torch {torch.__version__}")
        self._torch = torch
        if torch.version.cuda is None:
            raise CannotMeasure(f"torch {torch.__version__} is not built for CUDA")
        self._sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._kernels: dict[str, Kernel] = {}

    def measure(self, access: Access) -> Timing:
        """Cycles and time of a load.

        Raises:
            CannotMeasure: it does not fit, or the kernel does not compile or run.
        """
        torch = self._torch
        run, cycles = self._prepared(access)
        loads = ROUNDS * CHAINS * WARPS
        run(ROUNDS)
        times_ms = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(ROUNDS)
            end.record()
            torch.cuda.synchronize()
            times_ms.append(begin.elapsed_time(end))
        per_sm = [value / loads for value in cycles.tolist()]
        return Timing(statistics.median(per_sm), statistics.median(times_ms) * 1e6 / loads)

    def keep_busy(self, access: Access, enough: Callable[[int], bool], limit_s: float) -> Busy:
        """Loads until there are enough, at most for so long.

        Args:
            access: the load.
            enough: asked now and then, with the time of the first (CLOCK_MONOTONIC ns).
            limit_s: longest.

        Raises:
            CannotMeasure: as `measure`.
        """
        run, _cycles = self._prepared(access)
        run(ROUNDS)
        self._torch.cuda.synchronize()
        begin_ns, launches = time.monotonic_ns(), 0
        while time.monotonic_ns() - begin_ns < limit_s * 1e9 and not enough(begin_ns):
            # Some at a time, so that the GPU does not wait for the host.
            for _ in range(16):
                run(ROUNDS)
            self._torch.cuda.synchronize()
            launches += 16
        loads = launches * ROUNDS * CHAINS * WARPS * self._sms
        return Busy(begin_ns, time.monotonic_ns(), loads)

    def _prepared(self, access: Access) -> tuple[Callable[[int], None], Any]:
        torch = self._torch
        # Banks repeat every 128 bytes, and swizzles every 1024.
        first = min(access.addresses) // 1024 * 1024
        places = [address - first for address in access.addresses]
        if max(places) + access.width_b > ROOM_B:
            raise CannotMeasure(f"the load spans more than {ROOM_B} bytes of shared memory")
        kernel = self._kernel(LDMATRIX if access.kind == "ldmatrix" else LOADS[access.width_b])
        table = torch.tensor(places * CHAINS, dtype=torch.int32, device="cuda")
        cycles = torch.zeros(self._sms, dtype=torch.int64, device="cuda")
        sink = torch.zeros(self._sms * WARPS * LANES, dtype=torch.int32, device="cuda")

        def run(rounds: int) -> None:
            kernel.launch(self._sms, WARPS * LANES, [table, rounds, cycles, sink])

        return run, cycles

    def _kernel(self, load: str) -> Kernel:
        if load not in self._kernels:
            self._kernels[load] = Kernel(source(load), "loads")
        return self._kernels[load]

    def describe(self) -> str:
        """Device, driver, CUDA and torch."""
        return of_torch()

    @property
    def index(self) -> int:
        """The device's number among all of the host, in PCI order, as far as torch knows it."""
        current = int(self._torch.cuda.current_device())
        physical = getattr(self._torch.cuda, "_get_nvml_device_index", None)
        try:
            return int(physical(current)) if physical is not None else current
        except (RuntimeError, ValueError, IndexError):
            return current
