"""Which hardware counters are collected, and the row that becomes of them.

All of `MAIN`, `LINKS` and `LOOKUPS` together fits one pass on GH100 (checked on an H200, CUDA 13.0), so that all of it
covers the very same time. The plain hit-rate metrics of the L2 (`lts__t_sector_hit_rate` and its kin) need two passes
there, which PM sampling refuses (NOT_SUPPORTED). Hence two hit rates, measured side by side on a part with 60 MB:

* of bytes: what the GPCs (the SMs) ask for and is not read from HBM was in the L2. Reading buffers of known size gives
  100 % up to 32 MiB, 98.5 at 40, 70.5 at 48, 6.5 at 56 and 1.3 to 0.3 % from 64 MiB on; 970 of 3269 GB/s that the
  kernel read at 48 MiB came from HBM, which is 70.3 %.
* of lookups, by the counters of the L2 itself. A sector that lies in the other half of the L2 is looked up twice, so
  it is lower where some hit: 97, 65.6 and 5 % at 40, 48 and 56 MiB.

NVLink is payload: `data_user` counts 392.8 GB/s out and 0.0 in during a one-way copy that moves 393.1, where
`nvltx__bytes`, all that crosses the wire, counts 418.2 and 291.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opusmon.channels import L2
from opusmon.collectors.l2.cupti import Samples
from opusmon.stats import Floats

SECTOR_B = 32

READ = "dram__bytes_read.sum"
WRITE = "dram__bytes_write.sum"
SECTORS = "lts__t_sectors.sum"
SECTORS_GPC = "lts__t_sectors_srcnode_gpc.sum"
HALF_HIT = "LTS.TriageCompute.lts__average_t_sector_hit_rate_realtime.pct"
"""Half of the hits per lookup: 50.0 where every access hits (a 16 MiB buffer read, anything written), 25.5 in a copy, whose
reads miss and writes hit (H200, CUDA 13.0)."""
SM = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
PCIE_READ = "pcie__read_bytes.sum"
PCIE_WRITE = "pcie__write_bytes.sum"
NVLINK_RX = "nvlrx__bytes_data_user.sum"
NVLINK_TX = "nvltx__bytes_data_user.sum"
BANK_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"

MAIN: tuple[str, ...] = (READ, WRITE, SECTORS, SECTORS_GPC, SM, WARPS, TENSOR, PCIE_READ, PCIE_WRITE)
LINKS: tuple[str, ...] = (NVLINK_RX, NVLINK_TX)
"""Asked for where the device has NVLink; elsewhere the library refuses the configuration (999)."""
LOOKUPS: tuple[str, ...] = (HALF_HIT,)
"""Where the chip has it."""
BANKS: tuple[str, ...] = (BANK_CONFLICTS,)
"""Does not fit into a pass with the others: sampled instead of them."""

TRICKLE_BPS = 1e8
"""Under so many bytes a second asked of the L2 a ratio says nothing; a display alone makes some."""

_RATES: tuple[tuple[str, str, float], ...] = (
    ("l2_bps", SECTORS, SECTOR_B),
    ("hbm_read_bps", READ, 1),
    ("hbm_write_bps", WRITE, 1),
    ("pcie_read_bps", PCIE_READ, 1),
    ("pcie_write_bps", PCIE_WRITE, 1),
    ("nvlink_rx_bps", NVLINK_RX, 1),
    ("nvlink_tx_bps", NVLINK_TX, 1),
    ("bank_conflicts_per_s", BANK_CONFLICTS, 1),
)
_SHARES: tuple[tuple[str, str], ...] = (
    ("sm_active_pct", SM),
    ("warps_active_pct", WARPS),
    ("tensor_pct", TENSOR),
)


def usable(samples: Samples, metrics: Sequence[str], *, started: bool) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which samples count: the first after a start also covers the time before it, and some hold NaN.

    Args:
        samples: as decoded.
        metrics: names of the columns; the hit rate of a sample without traffic is no number, and that sample counts.
        started: sampling was started since the last decode.

    Returns:
        Shape (n,).
    """
    counted = samples.values[:, [name != HALF_HIT for name in metrics]]
    good: np.ndarray[Any, np.dtype[np.bool_]] = np.asarray(np.isfinite(counted).all(axis=1))
    good &= samples.end_ns > samples.start_ns
    if started and len(good):
        good[0] = False
    return good


def means(
    samples: Samples, metrics: Sequence[str], good: np.ndarray[Any, np.dtype[np.bool_]]
) -> tuple[dict[str, float], int]:
    """Per second values of the sums, time-weighted means of the shares, and the time they cover (ns)."""
    length_ns = (samples.end_ns - samples.start_ns)[good].astype(np.float64)
    total_ns = float(length_ns.sum())
    if total_ns == 0:
        return {}, 0
    values = samples.values[good]
    found = {
        name: float(values[:, n].sum() / total_ns * 1e9)
        if name.endswith(".sum")
        else float((values[:, n] * length_ns).sum() / total_ns)
        for n, name in enumerate(metrics)
    }
    if HALF_HIT in found:
        found[HALF_HIT] = _weighted(values[:, metrics.index(HALF_HIT)], values[:, metrics.index(SECTORS)])
    return found, int(total_ns)


def _weighted(values: Floats, weights: Floats) -> float:
    """Mean of what is a number, by weight; NaN where nothing weighs."""
    weights = np.where(np.isfinite(values), weights, 0.0)
    total = float(weights.sum())
    return float((np.nan_to_num(values) * weights).sum() / total) if total else math.nan


def fields(found: Mapping[str, float]) -> dict[str, float]:
    """Values of the fields of channel `l2`; NaN for what was not measured.

    Args:
        found: metric to its value: sums per second, shares in percent.
    """
    nan = math.nan
    row = {field: found.get(metric, nan) * scale for field, metric, scale in _RATES}
    row |= {field: found.get(metric, nan) for field, metric in _SHARES}
    read, asked = found.get(READ, nan), found.get(SECTORS_GPC, nan) * SECTOR_B
    total = row["l2_bps"]
    row["l2_to_hbm_ratio"] = read / total if total > TRICKLE_BPS else nan
    row["l2_lookup_hit_pct"] = 2 * found.get(HALF_HIT, nan) if total > TRICKLE_BPS else nan
    row["l2_hit_pct"] = 100 * (1 - read / asked) if asked > TRICKLE_BPS and read <= asked else nan
    return row


def record(t: int, gpu: int, dt_ns: int, source: int, row: Mapping[str, float]) -> tuple[Any, ...]:
    """A record of channel `l2` in column order."""
    head: dict[str, Any] = {"gpu": gpu, "dt_ns": dt_ns, "source": source}
    return (t, *({**head, **row}[field.name] for field in L2.fields))
