"""PM sampling of one GPU through libcupti's C interface: the hardware counters of the whole device.

Wrong use of this library ends the process, and a version that does not fit the driver may do so by itself:
call it in a process that may die.
"""

from __future__ import annotations

import contextlib
import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.collectors.l2 import structs as s

SUCCESS, HARDWARE_BUSY, INSUFFICIENT_PRIVILEGES, UNKNOWN = 0, 26, 35, 999
HARDWARE_BUFFER_B = 32 * 2**20


class CuptiError(Exception):
    """A call failed.

    Attributes:
        call: its name.
        code: CUptiResult.
    """

    def __init__(self, call: str, code: int, words: str) -> None:
        super().__init__(f"{call}: {words} ({code})")
        self.call = call
        self.code = code


@dataclass(frozen=True, slots=True)
class Samples:
    """What was decoded.

    Attributes:
        start_ns: begin of each sample, CLOCK_REALTIME ns, shape (n,).
        end_ns: its end.
        values: one row per sample, one column per metric, shape (n, m).
        overflow: the hardware buffer was too small and samples are missing.
    """

    start_ns: np.ndarray[Any, np.dtype[np.uint64]]
    end_ns: np.ndarray[Any, np.dtype[np.uint64]]
    values: np.ndarray[Any, np.dtype[np.float64]]
    overflow: bool


class Cupti:
    """The library, loaded and initialised.

    Args:
        path: of libcupti.
        driver: of libcuda.

    Raises:
        OSError: it cannot be loaded.
        CuptiError: it does not want to work here.
        AttributeError: it is too old to have PM sampling (before CUDA 12.6).
    """

    def __init__(self, path: str, driver: str = "libcuda.so.1") -> None:
        self._lib = c.CDLL(path)
        for name, params in s.CALLS.items():
            function = getattr(self._lib, name)
            function.argtypes, function.restype = [c.POINTER(params)], c.c_int
        self._driver = c.CDLL(driver)
        code = self._driver.cuInit(0)
        if code != 0:
            raise CuptiError("cuInit", code, "the CUDA driver does not start")
        self.call("cuptiProfilerInitialize", s.Initialize())
        self._available: dict[int, c.Array[c.c_char]] = {}

    @property
    def version(self) -> int:
        """As the library numbers itself, 130000 for CUDA 13.0."""
        number = c.c_uint32()
        self._lib.cuptiGetVersion(c.byref(number))
        return number.value

    def device_count(self) -> int:
        """How many GPUs the driver shows."""
        count = c.c_int()
        code = self._driver.cuDeviceGetCount(c.byref(count))
        if code != 0:
            raise CuptiError("cuDeviceGetCount", code, "the driver does not say how many GPUs there are")
        return count.value

    def call(self, name: str, params: s.Params) -> None:
        """Call a function.

        Raises:
            CuptiError: it did not answer success.
        """
        code = getattr(self._lib, name)(c.byref(params))
        if code != SUCCESS:
            raise CuptiError(name, code, self._words(code))

    def _words(self, code: int) -> str:
        text = c.c_char_p()
        self._lib.cuptiGetResultString(code, c.byref(text))
        return (text.value or b"unknown error").decode("ascii", "replace")

    def chip(self, device: int) -> bytes:
        """Name of a device's chip, for example b"GH100"."""
        params = s.GetChipName(deviceIndex=device)
        self.call("cuptiDeviceGetChipName", params)
        return params.pChipName or b""

    def availability(self, device: int) -> c.Array[c.c_char]:
        """The image that says which counters a device gives us; asked for once: while it samples it does not answer."""
        if device in self._available:
            return self._available[device]
        params = s.GetCounterAvailability(deviceIndex=device)
        self.call("cuptiPmSamplingGetCounterAvailability", params)
        image = c.create_string_buffer(params.counterAvailabilityImageSize)
        params.pCounterAvailabilityImage = c.addressof(image)
        self.call("cuptiPmSamplingGetCounterAvailability", params)
        self._available[device] = image
        return image


class Host:
    """Knows the metrics of a chip, and turns counters into values.

    Args:
        cupti: the library.
        device: index in CUDA's order.
    """

    def __init__(self, cupti: Cupti, device: int) -> None:
        self._cupti = cupti
        self._image = cupti.availability(device)
        params = s.HostInitialize(
            profilerType=s.PM_SAMPLING,
            pChipName=cupti.chip(device),
            pCounterAvailabilityImage=c.addressof(self._image),
        )
        cupti.call("cuptiProfilerHostInitialize", params)
        self._object = params.pHostObject

    def metrics(self, kind: int) -> list[str]:
        """Base names; kind 0 counters, 1 ratios, 2 throughputs."""
        params = s.GetBaseMetrics(pHostObject=self._object, metricType=kind)
        self._cupti.call("cuptiProfilerHostGetBaseMetrics", params)
        return [(params.ppMetricNames[n] or b"").decode() for n in range(params.numMetrics)]

    def config(self, metrics: Sequence[str]) -> c.Array[c.c_char]:
        """The configuration that collects these metrics.

        Raises:
            CuptiError: one of them is not known here.
        """
        names, count = _names(metrics)
        self._cupti.call(
            "cuptiProfilerHostConfigAddMetrics",
            s.ConfigAddMetrics(pHostObject=self._object, ppMetricNames=names, numMetrics=count),
        )
        size = s.GetConfigImageSize(pHostObject=self._object)
        self._cupti.call("cuptiProfilerHostGetConfigImageSize", size)
        image = c.create_string_buffer(size.configImageSize)
        self._cupti.call(
            "cuptiProfilerHostGetConfigImage",
            s.GetConfigImage(
                pHostObject=self._object, configImageSize=len(image), pConfigImage=c.addressof(image)
            ),
        )
        return image

    def passes(self, config: c.Array[c.c_char]) -> int:
        """How often the work would have to run to collect all of it; PM sampling can do 1."""
        params = s.GetNumOfPasses(configImageSize=len(config), pConfigImage=c.addressof(config))
        self._cupti.call("cuptiProfilerHostGetNumOfPasses", params)
        return int(params.numOfPasses)

    def evaluate(self, image: c.Array[c.c_char], sample: int, metrics: Sequence[str]) -> list[float]:
        """Values of one sample, in the order of `metrics`."""
        names, count = _names(metrics)
        values = (c.c_double * count)()
        self._cupti.call(
            "cuptiProfilerHostEvaluateToGpuValues",
            s.EvaluateToGpuValues(
                pHostObject=self._object,
                pCounterDataImage=c.addressof(image),
                counterDataImageSize=len(image),
                rangeIndex=sample,
                ppMetricNames=names,
                numMetrics=count,
                pMetricValues=values,
            ),
        )
        return list(values)

    def close(self) -> None:
        """Let go of it."""
        params = s.HostDeinitialize(pHostObject=self._object)
        with contextlib.suppress(CuptiError):
            self._cupti.call("cuptiProfilerHostDeinitialize", params)


def _names(metrics: Sequence[str]) -> tuple[Any, int]:
    names = (c.c_char_p * len(metrics))(*(name.encode() for name in metrics))
    return names, len(metrics)


class Sampler:
    """PM sampling of one device, one configuration at a time.

    Args:
        cupti: the library.
        device: index in CUDA's order.

    Raises:
        CuptiError: HARDWARE_BUSY while another profiler holds the counters, INSUFFICIENT_PRIVILEGES without the right.
    """

    def __init__(self, cupti: Cupti, device: int) -> None:
        self._cupti = cupti
        params = s.Enable(deviceIndex=device)
        cupti.call("cuptiPmSamplingEnable", params)
        self._object = params.pPmSamplingObject
        self._image: c.Array[c.c_char] | None = None
        self._metrics: Sequence[str] = ()
        self._host: Host | None = None

    def configure(
        self,
        host: Host,
        config: c.Array[c.c_char],
        metrics: Sequence[str],
        *,
        interval_ns: int,
        max_samples: int,
    ) -> None:
        """Choose what is collected from the next start on.

        Args:
            host: knows the metrics.
            config: made by `host.config(metrics)`, of one pass.
            metrics: their names.
            interval_ns: length of a sample.
            max_samples: room for so many in one decode.
        """
        params = s.SetConfig(
            pPmSamplingObject=self._object,
            configSize=len(config),
            pConfig=c.addressof(config),
            hardwareBufferSize=HARDWARE_BUFFER_B,
            samplingInterval=interval_ns,
            triggerMode=s.TIME_INTERVAL,
            hwBufferAppendMode=s.KEEP_LATEST,
        )
        self._cupti.call("cuptiPmSamplingSetConfig", params)
        names, count = _names(metrics)
        size = s.GetImageSize(
            pPmSamplingObject=self._object, pMetricNames=names, numMetrics=count, maxSamples=max_samples
        )
        self._cupti.call("cuptiPmSamplingGetCounterDataSize", size)
        self._image = c.create_string_buffer(size.counterDataSize)
        self._host, self._metrics = host, metrics

    def start(self) -> None:
        """Begin to collect."""
        self._cupti.call("cuptiPmSamplingStart", s.OnSampler(pPmSamplingObject=self._object))

    def stop(self) -> None:
        """Stop collecting; what was collected can still be decoded."""
        self._cupti.call("cuptiPmSamplingStop", s.OnSampler(pPmSamplingObject=self._object))

    def decode(self) -> Samples:
        """What was collected since the last decode.

        Raises:
            CuptiError: UNKNOWN now and then without harm; try again.
        """
        image, host = self._image, self._host
        if image is None or host is None:
            raise CuptiError("decode", UNKNOWN, "nothing is configured")
        where, size_b = c.addressof(image), len(image)
        self._cupti.call(
            "cuptiPmSamplingCounterDataImageInitialize",
            s.ImageInitialize(pPmSamplingObject=self._object, counterDataSize=size_b, pCounterData=where),
        )
        decoded = s.Decode(
            pPmSamplingObject=self._object, pCounterDataImage=where, counterDataImageSize=size_b
        )
        self._cupti.call("cuptiPmSamplingDecodeData", decoded)
        found = s.GetSampleCount(pCounterDataImage=where, counterDataImageSize=size_b)
        self._cupti.call("cuptiPmSamplingGetCounterDataInfo", found)
        count = int(found.numCompletedSamples)
        times = [self._times(n) for n in range(count)]
        values = [host.evaluate(image, n, self._metrics) for n in range(count)]
        return Samples(
            np.array([begin for begin, _ in times], np.uint64),
            np.array([end for _, end in times], np.uint64),
            np.array(values, np.float64).reshape(count, len(self._metrics)),
            bool(decoded.overflow),
        )

    def _times(self, sample: int) -> tuple[int, int]:
        assert self._image is not None  # noqa: S101  (decode has seen to it)
        params = s.GetSampleTimes(
            pPmSamplingObject=self._object,
            pCounterDataImage=c.addressof(self._image),
            counterDataImageSize=len(self._image),
            sampleIndex=sample,
        )
        self._cupti.call("cuptiPmSamplingCounterDataGetSampleInfo", params)
        return int(params.startTimestamp), int(params.endTimestamp)

    def close(self) -> None:
        """Give the counters back."""
        with contextlib.suppress(CuptiError):
            self._cupti.call("cuptiPmSamplingDisable", s.OnSampler(pPmSamplingObject=self._object))
