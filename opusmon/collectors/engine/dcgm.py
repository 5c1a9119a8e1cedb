"""HBM bandwidth from a dcgm-exporter page, for GPUs before Hopper, where NVML does not give it.

`DCGM_FI_PROF_DRAM_ACTIVE` (called `DCGM_FI_PROF_DRAM_UTIL_RATIO` since DCGM 4.6) is the share of cycles in which the
device memory moved data, 0-1. The exporter asks DCGM every 30 s unless told otherwise, so a value may be that old.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opusmon.collectors.engine.page import Samples

NAMES = ("DCGM_FI_PROF_DRAM_UTIL_RATIO", "DCGM_FI_PROF_DRAM_ACTIVE")
STALE_NS = 30_000_000_000
"""The exporter's own interval by default."""


@dataclass(frozen=True, slots=True)
class HbmShare:
    """How busy the memory of a GPU, or of a MIG instance on it, was.

    Attributes:
        gpu: index as DCGM counts, which is NVML's order; -1 where the page does not say.
        uuid: of the GPU, "" where the page does not say.
        instance: GPU instance id of a MIG device, "" for a whole GPU.
        hbm_bw_pct: share of the peak bandwidth in percent.
    """

    gpu: int
    uuid: str
    instance: str
    hbm_bw_pct: float


def hbm_shares(samples: Samples) -> list[HbmShare]:
    """One entry per GPU or instance, in that order; none where the exporter does not have the profiling fields.

    A page that holds both names is read by the newer one. A share outside 0-1 is a sentinel and is left out. Of
    series that differ in pod or container only, which hold the same value, one is kept.
    """
    name = next((name for name in NAMES if name in samples), "")
    found = {(one.gpu, one.uuid, one.instance): one for one in _shares(samples.get(name, {}))}
    return [found[key] for key in sorted(found)]


def _shares(series: dict[tuple[tuple[str, str], ...], float]) -> Iterator[HbmShare]:
    for labels, value in series.items():
        held = dict(labels)
        gpu = held.get("gpu", "")
        if 0.0 <= value <= 1.0:
            yield HbmShare(
                int(gpu) if gpu.isascii() and gpu.isdecimal() else -1,
                held.get("UUID", "")[:80],
                held.get("GPU_I_ID", "")[:8],
                100 * value,
            )
