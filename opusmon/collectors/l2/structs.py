"""Parameter structures of CUPTI's PM sampling and profiler host interfaces, CUDA 12.6 to 13.x.

Every call takes one structure that begins with its own size; the library reads only that much, so later versions
that append fields still accept these. Layouts are checked against the vendor's headers by a test.
"""

from __future__ import annotations

import ctypes as c
from typing import Any, ClassVar

PM_SAMPLING = 1
"""CUPTI_PROFILER_TYPE_PM_SAMPLING."""
TIME_INTERVAL = 1
"""CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL: the interval is in ns; not on Turing and GA100."""
KEEP_LATEST = 1
"""CUPTI_PM_SAMPLING_HARDWARE_BUFFER_APPEND_MODE_KEEP_LATEST."""


class Params(c.Structure):
    """A parameter structure: size and private pointer are filled in."""

    _fields_: ClassVar[Any] = [("structSize", c.c_size_t), ("pPriv", c.c_void_p)]

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.structSize = type(self).size()

    @classmethod
    def size(cls) -> int:
        """Bytes up to the end of the last field, without padding: what the vendor's macro computes."""
        last = getattr(cls, (cls.__dict__.get("_fields_") or Params._fields_)[-1][0])
        return int(last.offset + last.size)


class Initialize(Params):
    """CUpti_Profiler_Initialize_Params."""

    _fields_: ClassVar[Any] = []

    @classmethod
    def size(cls) -> int:
        """Size and private pointer only."""
        return c.sizeof(Params)


class GetChipName(Params):
    """CUpti_Device_GetChipName_Params."""

    _fields_: ClassVar[Any] = [("deviceIndex", c.c_size_t), ("pChipName", c.c_char_p)]


class GetCounterAvailability(Params):
    """CUpti_PmSampling_GetCounterAvailability_Params."""

    _fields_: ClassVar[Any] = [
        ("deviceIndex", c.c_size_t),
        ("counterAvailabilityImageSize", c.c_size_t),
        ("pCounterAvailabilityImage", c.c_void_p),
    ]


class HostInitialize(Params):
    """CUpti_Profiler_Host_Initialize_Params."""

    _fields_: ClassVar[Any] = [
        ("profilerType", c.c_int),
        ("pChipName", c.c_char_p),
        ("pCounterAvailabilityImage", c.c_void_p),
        ("pHostObject", c.c_void_p),
    ]


class HostDeinitialize(Params):
    """CUpti_Profiler_Host_Deinitialize_Params."""

    _fields_: ClassVar[Any] = [("pHostObject", c.c_void_p)]


class GetBaseMetrics(Params):
    """CUpti_Profiler_Host_GetBaseMetrics_Params."""

    _fields_: ClassVar[Any] = [
        ("pHostObject", c.c_void_p),
        ("metricType", c.c_int),
        ("ppMetricNames", c.POINTER(c.c_char_p)),
        ("numMetrics", c.c_size_t),
    ]


class ConfigAddMetrics(Params):
    """CUpti_Profiler_Host_ConfigAddMetrics_Params."""

    _fields_: ClassVar[Any] = [
        ("pHostObject", c.c_void_p),
        ("ppMetricNames", c.POINTER(c.c_char_p)),
        ("numMetrics", c.c_size_t),
    ]


class GetConfigImageSize(Params):
    """CUpti_Profiler_Host_GetConfigImageSize_Params."""

    _fields_: ClassVar[Any] = [("pHostObject", c.c_void_p), ("configImageSize", c.c_size_t)]


class GetConfigImage(Params):
    """CUpti_Profiler_Host_GetConfigImage_Params."""

    _fields_: ClassVar[Any] = [
        ("pHostObject", c.c_void_p),
        ("configImageSize", c.c_size_t),
        ("pConfigImage", c.c_void_p),
    ]


class GetNumOfPasses(Params):
    """CUpti_Profiler_Host_GetNumOfPasses_Params."""

    _fields_: ClassVar[Any] = [
        ("configImageSize", c.c_size_t),
        ("pConfigImage", c.c_void_p),
        ("numOfPasses", c.c_size_t),
    ]


class EvaluateToGpuValues(Params):
    """CUpti_Profiler_Host_EvaluateToGpuValues_Params."""

    _fields_: ClassVar[Any] = [
        ("pHostObject", c.c_void_p),
        ("pCounterDataImage", c.c_void_p),
        ("counterDataImageSize", c.c_size_t),
        ("rangeIndex", c.c_size_t),
        ("ppMetricNames", c.POINTER(c.c_char_p)),
        ("numMetrics", c.c_size_t),
        ("pMetricValues", c.POINTER(c.c_double)),
    ]


class Enable(Params):
    """CUpti_PmSampling_Enable_Params."""

    _fields_: ClassVar[Any] = [("deviceIndex", c.c_size_t), ("pPmSamplingObject", c.c_void_p)]


class OnSampler(Params):
    """CUpti_PmSampling_Start_Params, Stop_Params and Disable_Params, which are alike."""

    _fields_: ClassVar[Any] = [("pPmSamplingObject", c.c_void_p)]


class SetConfig(Params):
    """CUpti_PmSampling_SetConfig_Params."""

    _fields_: ClassVar[Any] = [
        ("pPmSamplingObject", c.c_void_p),
        ("configSize", c.c_size_t),
        ("pConfig", c.c_void_p),
        ("hardwareBufferSize", c.c_size_t),
        ("samplingInterval", c.c_uint64),
        ("triggerMode", c.c_int),
        ("hwBufferAppendMode", c.c_int),
    ]


class Decode(Params):
    """CUpti_PmSampling_DecodeData_Params."""

    _fields_: ClassVar[Any] = [
        ("pPmSamplingObject", c.c_void_p),
        ("pCounterDataImage", c.c_void_p),
        ("counterDataImageSize", c.c_size_t),
        ("decodeStopReason", c.c_int),
        ("overflow", c.c_uint8),
    ]


class GetImageSize(Params):
    """CUpti_PmSampling_GetCounterDataSize_Params."""

    _fields_: ClassVar[Any] = [
        ("pPmSamplingObject", c.c_void_p),
        ("pMetricNames", c.POINTER(c.c_char_p)),
        ("numMetrics", c.c_size_t),
        ("maxSamples", c.c_uint32),
        ("counterDataSize", c.c_size_t),
    ]


class ImageInitialize(Params):
    """CUpti_PmSampling_CounterDataImage_Initialize_Params."""

    _fields_: ClassVar[Any] = [
        ("pPmSamplingObject", c.c_void_p),
        ("counterDataSize", c.c_size_t),
        ("pCounterData", c.c_void_p),
    ]


class GetSampleCount(Params):
    """CUpti_PmSampling_GetCounterDataInfo_Params."""

    _fields_: ClassVar[Any] = [
        ("pCounterDataImage", c.c_void_p),
        ("counterDataImageSize", c.c_size_t),
        ("numTotalSamples", c.c_size_t),
        ("numPopulatedSamples", c.c_size_t),
        ("numCompletedSamples", c.c_size_t),
    ]


class GetSampleTimes(Params):
    """CUpti_PmSampling_CounterData_GetSampleInfo_Params."""

    _fields_: ClassVar[Any] = [
        ("pPmSamplingObject", c.c_void_p),
        ("pCounterDataImage", c.c_void_p),
        ("counterDataImageSize", c.c_size_t),
        ("sampleIndex", c.c_size_t),
        ("startTimestamp", c.c_uint64),
        ("endTimestamp", c.c_uint64),
    ]


CALLS: dict[str, type[Params]] = {
    "cuptiProfilerInitialize": Initialize,
    "cuptiDeviceGetChipName": GetChipName,
    "cuptiPmSamplingGetCounterAvailability": GetCounterAvailability,
    "cuptiProfilerHostInitialize": HostInitialize,
    "cuptiProfilerHostDeinitialize": HostDeinitialize,
    "cuptiProfilerHostGetBaseMetrics": GetBaseMetrics,
    "cuptiProfilerHostConfigAddMetrics": ConfigAddMetrics,
    "cuptiProfilerHostGetConfigImageSize": GetConfigImageSize,
    "cuptiProfilerHostGetConfigImage": GetConfigImage,
    "cuptiProfilerHostGetNumOfPasses": GetNumOfPasses,
    "cuptiProfilerHostEvaluateToGpuValues": EvaluateToGpuValues,
    "cuptiPmSamplingEnable": Enable,
    "cuptiPmSamplingDisable": OnSampler,
    "cuptiPmSamplingStart": OnSampler,
    "cuptiPmSamplingStop": OnSampler,
    "cuptiPmSamplingSetConfig": SetConfig,
    "cuptiPmSamplingDecodeData": Decode,
    "cuptiPmSamplingGetCounterDataSize": GetImageSize,
    "cuptiPmSamplingCounterDataImageInitialize": ImageInitialize,
    "cuptiPmSamplingGetCounterDataInfo": GetSampleCount,
    "cuptiPmSamplingCounterDataGetSampleInfo": GetSampleTimes,
}
"""Every function that is called, and its parameter structure."""
