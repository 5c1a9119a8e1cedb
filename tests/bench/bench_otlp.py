"""What receiving OTLP costs: records per second and per core through decoders and mapping, and over HTTP.

    python tests/bench/bench_otlp.py [BATCHES]

Prints medians over the batches. A batch holds 512 spans or events, as the exporters send them.
"""

import asyncio
import json
import sys
import time
from contextlib import aclosing
from statistics import median

from opusmon.clock import SystemClock
from opusmon.collectors.otlp import OtlpCollector
from opusmon.collectors.otlp.decode import decode_json, decode_protobuf
from opusmon.schema import StringTable

RECORDS = 512
NOISE = 20
"""Attributes that are not read, beside each record's own: people, sessions, terminals."""


def body():
    now = time.time_ns()
    own = {"model": "claude-opus-5", "ttft_ms": "812", "input_tokens": "2", "output_tokens": "1200"}
    pairs = [{"key": name, "value": {"stringValue": value}} for name, value in own.items()]
    pairs += [{"key": f"user.{n}", "value": {"stringValue": "x" * 40}} for n in range(NOISE)]
    span = {
        "traceId": "0af7651916cd43dd8448eb211c80319c",
        "spanId": "b7ad6b7169203331",
        "name": "claude_code.llm_request",
        "startTimeUnixNano": str(now - 5_000_000_000),
        "endTimeUnixNano": str(now),
        "attributes": pairs,
    }
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span] * RECORDS}]}]}).encode()


def as_protobuf(text):
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    content = json.loads(text)
    for span in content["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        span["traceId"], span["spanId"] = "CvdlGRbNQ92ESOshHIAxnA==", "t61rcWkgMzE="
    return json_format.ParseDict(content, ExportTraceServiceRequest()).SerializeToString()


def timed(work, count):
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return median(times)


async def over_http(payload, kind, count):
    """Median time of a POST to its answer, the collector in another task of this loop."""
    import aiohttp

    collector = OtlpCollector(StringTable(), SystemClock(), listen="127.0.0.1:0")
    async with aclosing(collector.batches()) as batches:
        await anext(batches)
        url, times = f"http://{collector.address}/v1/traces", []
        async with aiohttp.ClientSession() as session:
            for _ in range(count):
                begun = time.perf_counter()
                async with session.post(url, data=payload, headers={"Content-Type": kind}) as answer:
                    assert answer.status == 200, answer.status
                    await answer.read()
                times.append(time.perf_counter() - begun)
                await asyncio.sleep(0.1)  # within the rate that is allowed
    return median(times)


def main(count):
    text = body()
    binary = as_protobuf(text)
    collector = OtlpCollector(StringTable(), SystemClock())
    records = decode_json("traces", text).records
    mapping_s = timed(lambda: collector.take(records[:RECORDS]), min(count, 30))
    for name, kind, payload, decode in (
        ("json", "application/json", text, decode_json),
        ("protobuf", "application/x-protobuf", binary, decode_protobuf),
    ):
        decode_s = timed(lambda decode=decode, payload=payload: decode("traces", payload), count)
        http_s = asyncio.run(over_http(payload, kind, min(count, 20)))
        print(
            f"{name:9} {len(payload) / 1024:7.0f} KiB  decode {decode_s / RECORDS * 1e6:6.1f} us/record"
            f"  map {mapping_s / RECORDS * 1e6:5.1f} us/record  POST of {RECORDS} {http_s * 1e3:6.1f} ms"
            f"  {RECORDS / http_s:,.0f} records/s"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
