"""NVIDIA GPUs: memory, bandwidth, NVLink, processes and events through NVML."""

from opusmon.collectors.gpu.collector import Cadence, GpuCollector
from opusmon.collectors.gpu.nvml import CollectorUnavailable

__all__ = ["Cadence", "CollectorUnavailable", "GpuCollector"]
