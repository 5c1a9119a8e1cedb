"""A load that plants stalls and says which: waits, captures that fail, allocations, JIT, page faults, locks.

    opusmon record --only gpu,streams,stalls -o planted.opusmon &
    python planted_stalls.py > planted.jsonl

One JSON line per group: kind, how many, what they were told to take, and when (CLOCK_MONOTONIC ns).
Needs torch with CUDA, and triton for the JIT; changes no setting of the GPU.
"""

import ctypes
import gc
import json
import mmap
import os
import tempfile
import threading
import time

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="planted-")

import torch

CYCLES_PER_MS = 1_700_000
"""Of the SM clock, roughly; the wait itself is measured."""


def say(kind, t0, **more):
    print(json.dumps({"kind": kind, "t0": t0, "t1": time.monotonic_ns(), **more}), flush=True)
    time.sleep(0.3)


def timed(call):
    began = time.monotonic_ns()
    call()
    return time.monotonic_ns() - began


def waits(stream, event):
    """Blocking waits for 30 ms of GPU time, in every way there is."""
    for name, count, wait in (
        ("cuStreamSynchronize", 11, stream.synchronize),
        ("cuEventSynchronize", 7, event.synchronize),
        ("cuCtxSynchronize", 5, torch.cuda.synchronize),
    ):
        t0, took = time.monotonic_ns(), []
        for _ in range(count):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(30 * CYCLES_PER_MS)
                event.record(stream)
            took.append(timed(wait))
        say("wait", t0, call=name, count=count, took_ns=took, stream=hex(stream.cuda_stream))


def captures(x, stream):
    """Five that end well, then three ways to break one."""
    torch.cuda.synchronize()
    t0 = time.monotonic_ns()
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            x.mul_(1.0)
            x.add_(1.0)
    say("capture", t0, count=5, code=0)
    broken("same thread reads back", 3, x, stream, lambda: x.sum().item())
    broken("another thread allocates", 4, x, stream, lambda: elsewhere(allocate))
    broken("a side stream is not joined", 2, x, stream, lambda: fork(x, stream))


def broken(how, count, x, stream, spoil):
    t0, said = time.monotonic_ns(), []
    for _ in range(count):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                x.mul_(1.0)
                x.add_(1.0)
                x.mul_(1.0)
                spoil()
        except Exception as error:  # the planted failure
            said.append(str(error).splitlines()[0][:120])
        del graph
        gc.collect()
        try:
            torch.cuda.synchronize()
        except Exception as error:
            said.append(f"then {str(error).splitlines()[0][:80]}")
    say("capture_aborted", t0, how=how, count=count, said=said, tid=threading.get_native_id())


def allocate():
    """A fresh block from the driver, whatever the caching allocator holds: not allowed while a capture is global."""
    torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(3 << 30))


def elsewhere(call):
    def run():
        try:
            call()
        except Exception as error:  # the planted failure
            del error

    thread = threading.Thread(target=run, name="spoiler")
    thread.start()
    thread.join()


def fork(x, stream):
    side = torch.cuda.Stream()
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        x.mul_(1.0)


def serve_quietly(x, seconds):
    """As a server that has warmed up: launches, no allocation, no loading."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            x.mul_(1.0)
        torch.cuda.synchronize()
        time.sleep(0.02)


def allocations():
    """The driver's own calls, past every cache."""
    driver = ctypes.CDLL("libcuda.so.1")
    t0, took = time.monotonic_ns(), []
    for _ in range(23):
        place = ctypes.c_uint64()
        took.append(
            timed(lambda place=place: driver.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(512 << 20)))
        )
        driver.cuMemFree_v2(place)
    say("alloc", t0, count=23, size_b=512 << 20, took_ns=took)


def jit():
    """Kernels that nobody has compiled yet."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, STEP: tl.constexpr):  # noqa: N803  (a compile-time constant)
        at = tl.arange(0, 128)
        tl.store(x + at, tl.load(x + at) + STEP)

    x = torch.zeros(128, device="cuda")
    t0 = time.monotonic_ns()
    took = [timed(lambda step=step: kernel[(1,)](x, STEP=step)) for step in (2, 3, 5)]
    torch.cuda.synchronize()
    say("jit", t0, count=3, took_ns=took)


def faults():
    t0 = time.monotonic_ns()
    with mmap.mmap(-1, 512 << 20) as block:
        block.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, 512 << 20, 4096):
            block[at] = 1
    say("page_faults", t0, count=(512 << 20) // 4096)


def locks(x):
    """A thread that launches waits for a lock that another one holds for 40 ms."""
    t0 = time.monotonic_ns()
    lock = threading.Lock()
    for _ in range(5):
        taken = threading.Event()

        def hold(taken=taken):
            with lock:
                taken.set()
                time.sleep(0.04)

        thread = threading.Thread(target=hold, name="holder")
        thread.start()
        taken.wait()
        x.mul_(1.0)
        with lock:
            x.mul_(1.0)
        thread.join()
    torch.cuda.synchronize()
    say("futex", t0, count=5, held_ns=40_000_000)


def launches(x, stream, count=20_000):
    """A launch-bound loop, five times: its rate is what watching may change."""
    rates = []
    t0 = time.monotonic_ns()
    with torch.cuda.stream(stream):
        for _ in range(5):
            began = time.monotonic_ns()
            for _ in range(count):
                x.mul_(1.0)
            rates.append(count / (time.monotonic_ns() - began) * 1e9)
            stream.synchronize()
    say("launches", t0, count=5 * count, per_s=rates)


def main():
    x = torch.rand(4096, device="cuda:0")
    stream, event = torch.cuda.Stream(), torch.cuda.Event(blocking=False)
    x.sum().item()
    time.sleep(
        float(os.environ.get("PLANTED_SETTLE_S", "12"))
    )  # the probes are there by then, and it is warm
    say("begin", time.monotonic_ns(), pid=os.getpid(), tid=threading.get_native_id())
    launches(x, stream)
    waits(stream, event)
    captures(x, stream)
    serve_quietly(x, float(os.environ.get("PLANTED_QUIET_S", "22")))
    allocations()
    jit()
    faults()
    locks(x)
    launches(x, stream)
    say("end", time.monotonic_ns())


if __name__ == "__main__":
    main()
