"""A small streaming server on one GPU, to plant causes in: continuous batching, a replayed graph for each step.

    python small_server.py --port 8000

POST /v1/messages streams as the Messages API does; /metrics has the names of vLLM's counters, of which it keeps the few that it
knows. What it answers means nothing: a step reads 6.4 GB of weights and waits on the device for 3 ms, a prompt costs a matrix
product and 60 us a token. POST /plant {"cause": ..., "seconds": N} makes it misbehave: `sync_stall`, `capture_abort`, `jit`,
`fill` (takes "gib" at once), `memory_growth`. Needs torch with CUDA, triton, aiohttp and prometheus-client.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import os
import queue
import tempfile
import threading
import time

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="small-server-")

import torch
from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

MODEL = "small"
WIDTH, LAYERS, BATCH = 8192, 48, 32
CYCLES_PER_MS = 1_700_000
PROMPT_CYCLES = 100_000
"""Per token of a prompt."""

SECONDS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)


class Numbers:
    """Under the names that vLLM gives them."""

    def __init__(self):
        self.registry = CollectorRegistry()
        labels, more = ["model_name"], {"registry": self.registry}
        self.running = Gauge("vllm:num_requests_running", "", labels, **more).labels(MODEL)
        self.waiting = Gauge("vllm:num_requests_waiting", "", labels, **more).labels(MODEL)
        self.prompt = Counter("vllm:prompt_tokens", "", labels, **more).labels(MODEL)
        self.generated = Counter("vllm:generation_tokens", "", labels, **more).labels(MODEL)
        self.ttft = Histogram("vllm:time_to_first_token_seconds", "", labels, buckets=SECONDS, **more).labels(
            MODEL
        )
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "", labels, buckets=SECONDS, **more).labels(
            MODEL
        )


class Request:
    def __init__(self, prompt_tokens, tokens, loop):
        self.prompt_tokens, self.left = prompt_tokens, tokens
        self.came, self.loop, self.out = time.monotonic(), loop, asyncio.Queue()

    def say(self, word):
        self.loop.call_soon_threadsafe(self.out.put_nowait, word)


class Engine(threading.Thread):
    def __init__(self, numbers):
        super().__init__(name="engine", daemon=True)
        self.numbers, self.inbox, self.plants = numbers, queue.Queue(), queue.Queue()
        self.ready = threading.Event()
        self.kept = []

    def run(self):
        torch.cuda.set_device(0)
        self.stream = torch.cuda.Stream()
        self.weights = [
            torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.01 for _ in range(LAYERS)
        ]
        self.x = torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.prompt = torch.randn(4096, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.tokens = torch.empty(BATCH, device="cuda", dtype=torch.int64)
        self.host_tokens = torch.empty(BATCH, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self.stream):
            for rows in (1, 64, 512, 4096):
                self.compute_prompt(rows)
            for _ in range(3):
                self.step()
            self.stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.step()
            self.ready.set()
            self.serve()

    def step(self):
        y = self.x
        for weight in self.weights:
            y = y @ weight
        torch.cuda._sleep(3 * CYCLES_PER_MS)
        self.tokens.copy_(y.argmax(dim=1))

    def compute_prompt(self, rows):
        y = self.prompt[:rows]
        for weight in self.weights:
            y = y @ weight
        torch.cuda._sleep(rows * PROMPT_CYCLES)

    def serve(self):
        active, plant, until = [], None, 0.0
        while True:
            while not self.plants.empty():
                plant, until = self.plants.get()
            if plant is not None and (time.monotonic() > until or plant(self)):
                plant = None
            while len(active) < BATCH and not self.inbox.empty():
                request = self.inbox.get()
                self.compute_prompt(min(4096, request.prompt_tokens))
                active.append(request)
                self.numbers.prompt.inc(request.prompt_tokens)
                request.fresh = True
            self.numbers.running.set(len(active))
            self.numbers.waiting.set(self.inbox.qsize())
            if not active:
                time.sleep(0.002)
                continue
            self.graph.replay()
            self.host_tokens.copy_(self.tokens, non_blocking=True)
            self.stream.synchronize()
            for request in active:
                if request.fresh:
                    self.numbers.ttft.observe(time.monotonic() - request.came)
                    request.fresh = False
                request.left -= 1
                request.say("token")
                self.numbers.generated.inc()
                if request.left == 0:
                    request.say(None)
                    self.numbers.e2e.observe(time.monotonic() - request.came)
            active = [request for request in active if request.left > 0]


def sync_stall(engine):
    """Each step waits for the whole context while the device waits for the host: 180 ms with nothing to do."""
    runtime, libc = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libc.so.6")
    runtime.cudaLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3
    usleep = ctypes.cast(libc.usleep, ctypes.c_void_p)
    runtime.cudaLaunchHostFunc(engine.stream.cuda_stream, usleep, ctypes.c_void_p(180_000))
    torch.cuda.synchronize()


def capture_abort(engine):
    """Every two seconds a graph is captured anew while another thread allocates from the driver."""
    if time.monotonic() < getattr(engine, "next_capture", 0.0):
        return
    engine.next_capture = time.monotonic() + 2.0

    def allocate():
        torch.cuda.set_device(0)
        place = ctypes.c_uint64()
        ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(64 << 20))

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=engine.stream):
            engine.step()
            loader = threading.Thread(target=allocate, name="loader")
            loader.start()
            loader.join()
            engine.step()
    except Exception as error:  # the planted failure
        del error
    del graph
    gc.collect()


def jit(engine):
    """Two new kernels a second: a constant of the kernel changes with the request."""
    import triton
    import triton.language as tl

    if time.monotonic() < getattr(engine, "next_jit", 0.0):
        return
    engine.next_jit = time.monotonic() + 0.5
    if not hasattr(engine, "kernel"):

        @triton.jit
        def kernel(x, STEP: tl.constexpr):  # noqa: N803  (a compile-time constant)
            at = tl.arange(0, 128)
            tl.store(x + at, tl.load(x + at) + STEP)

        engine.kernel, engine.constant = kernel, 1
    engine.constant += 1
    engine.kernel[(1,)](engine.tokens, STEP=engine.constant)


def filling(gib):
    def fill(engine):
        engine.kept.append(torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda"))
        return True

    return fill


def memory_growth(engine):
    """A cache that keeps what it takes: 200 MB every two seconds."""
    if time.monotonic() < getattr(engine, "next_growth", 0.0):
        return
    engine.next_growth = time.monotonic() + 2.0
    engine.kept.append(torch.empty(200_000_000, dtype=torch.uint8, device="cuda"))


CAUSES = {one.__name__: one for one in (sync_stall, capture_abort, jit, memory_growth)}


class Server:
    def __init__(self):
        self.numbers = Numbers()
        self.engine = Engine(self.numbers)

    async def messages(self, http):
        body = await http.json()
        words = sum(len(str(message["content"]).split()) for message in body["messages"])
        request = Request(max(1, words), int(body.get("max_tokens", 64)), asyncio.get_running_loop())
        self.engine.inbox.put(request)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(http)

        async def send(kind, **more):
            data = json.dumps({"type": kind, **more})
            await answer.write(f"event: {kind}\ndata: {data}\n\n".encode())

        usage = {"input_tokens": words, "output_tokens": 0}
        head = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [],
            "usage": usage,
        }
        count = 0
        while await request.out.get() is not None:
            if count == 0:
                await send("message_start", message=head)
                await send("content_block_start", index=0, content_block={"type": "text", "text": ""})
            count += 1
            await send("content_block_delta", index=0, delta={"type": "text_delta", "text": "word "})
        await send("content_block_stop", index=0)
        await send("message_delta", delta={"stop_reason": "max_tokens"}, usage={"output_tokens": count})
        await send("message_stop")
        return answer

    async def metrics(self, http):
        return web.Response(
            body=generate_latest(self.numbers.registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def plant(self, http):
        body = await http.json()
        cause = filling(body["gib"]) if body["cause"] == "fill" else CAUSES[body["cause"]]
        self.engine.plants.put((cause, time.monotonic() + body["seconds"]))
        return web.json_response({"t": time.monotonic_ns()})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    server = Server()
    server.engine.start()
    server.engine.ready.wait()
    app = web.Application()
    app.router.add_post("/v1/messages", server.messages)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/plant", server.plant)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
