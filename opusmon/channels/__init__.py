"""Every channel opusmon knows, declared once, with its unit and its caveat.

bps is bytes per second. A missing number is NaN and a `status` row says why; zero is a measured zero.
"""

from __future__ import annotations

from opusmon.channels.api import ENGINE, ENGINE_BUCKET, METRICS, REQUEST, REQUEST_OPEN
from opusmon.channels.cuda import STALL, STREAM, WHOLE_CONTEXT
from opusmon.channels.gpu import DCGM, GPU, GPU_DEVICE, GPU_EVENT, GPU_PROCESS, L2, NVLINK, WHOLE_GPU
from opusmon.channels.host import CGROUP, HOST, PROCESS
from opusmon.channels.own import COST, KEYFRAME_NS, STATUS
from opusmon.schema import Channel

__all__ = [
    "ALL",
    "BY_NAME",
    "CGROUP",
    "COST",
    "DCGM",
    "ENGINE",
    "ENGINE_BUCKET",
    "GPU",
    "GPU_DEVICE",
    "GPU_EVENT",
    "GPU_PROCESS",
    "HOST",
    "KEYFRAME_NS",
    "L2",
    "METRICS",
    "NVLINK",
    "PROCESS",
    "REQUEST",
    "REQUEST_OPEN",
    "STALL",
    "STATUS",
    "STREAM",
    "WHOLE_CONTEXT",
    "WHOLE_GPU",
]

ALL: tuple[Channel, ...] = (
    GPU,
    GPU_DEVICE,
    NVLINK,
    GPU_PROCESS,
    GPU_EVENT,
    L2,
    DCGM,
    STREAM,
    STALL,
    HOST,
    CGROUP,
    PROCESS,
    ENGINE,
    ENGINE_BUCKET,
    REQUEST,
    REQUEST_OPEN,
    STATUS,
    COST,
)
BY_NAME = {channel.name: channel for channel in ALL}
