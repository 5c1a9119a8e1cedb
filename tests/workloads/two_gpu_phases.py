"""A load with known numbers on one or two GPUs, in phases; the bundled demo was recorded beside it.

    python two_gpu_phases.py --out truth.json [--scale 1.0]

Each phase writes what it did: begin and end (CLOCK_MONOTONIC ns), bytes moved by the device's own clock, and what
a monitor must therefore have seen. Needs torch with CUDA; uses plain device allocations and changes no settings.
"""

import argparse
import json
import time
from pathlib import Path

import torch

GIB = 1024**3


def synchronize():
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def repeat(seconds, work, devices):
    """Run `work` for a while, a few calls ahead of the device; returns (calls, elapsed seconds)."""
    work()
    synchronize()
    began = time.monotonic()
    calls = 0
    while time.monotonic() - began < seconds:
        for _ in range(4):
            work()
        calls += 4
        for device in devices:
            torch.cuda.synchronize(device)
    return calls, time.monotonic() - began


def hbm_copy(seconds, devices):
    """Device copies of 4 GiB: each reads and writes every byte once."""
    pairs = [
        (torch.rand(GIB, device=f"cuda:{d}"), torch.empty(GIB, device=f"cuda:{d}")) for d in devices
    ]  # float32: 4 GiB each

    def work():
        for source, target in pairs:
            target.copy_(source)

    calls, elapsed = repeat(seconds, work, devices)
    return {"hbm_bps": calls * 2 * 4 * GIB / elapsed, "allocated_b": torch.cuda.memory_allocated(devices[0])}


def matmul(seconds, devices):
    """bf16 products of 8192 x 8192 matrices: tensor-bound."""
    n = 8192
    operands = [torch.randn(n, n, device=f"cuda:{d}", dtype=torch.bfloat16) for d in devices]
    results = [torch.empty_like(a) for a in operands]

    def work():
        for a, c in zip(operands, results, strict=True):
            for _ in range(8):
                torch.matmul(a, a, out=c)

    calls, elapsed = repeat(seconds, work, devices)
    return {"tflops": calls * 8 * 2 * n**3 / elapsed / 1e12}


def peer(seconds, routes):
    """Copies of 1 GiB from one GPU to another."""
    pairs = [
        (
            torch.rand(GIB // 4, device=f"cuda:{a}"),
            torch.empty(GIB // 4, device=f"cuda:{b}"),
            torch.cuda.Stream(a),
        )
        for a, b in routes
    ]

    def work():
        for source, target, stream in pairs:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    calls, elapsed = repeat(seconds, work, sorted({d for route in routes for d in route}))
    return {"routes": routes, "peer_bps": calls * GIB / elapsed}


def small_launches(seconds, device):
    """Many short kernels: the GPU waits for the host."""
    x = torch.rand(4096, device=f"cuda:{device}")

    def work():
        for _ in range(200):
            x.mul_(1.0001)

    calls, elapsed = repeat(seconds, work, [device])
    return {"launches_per_s": calls * 200 / elapsed}


def idle(seconds):
    torch.cuda.empty_cache()
    time.sleep(seconds)
    return {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="stretch every phase")
    args = parser.parse_args()
    count = torch.cuda.device_count()
    both = list(range(min(count, 2)))
    phases = [
        ("idle", 15, idle),
        ("hbm copy on gpu 0", 25, lambda s: hbm_copy(s, [0])),
        ("matmul", 30, lambda s: matmul(s, both)),
        ("small launches on gpu 0", 15, lambda s: small_launches(s, 0)),
    ]
    if count > 1:
        phases += [
            ("peer 0 to 1", 25, lambda s: peer(s, [(0, 1)])),
            ("peer 1 to 0", 20, lambda s: peer(s, [(1, 0)])),
            ("peer both ways", 20, lambda s: peer(s, [(0, 1), (1, 0)])),
            ("hbm copy on both", 15, lambda s: hbm_copy(s, both)),
        ]
    phases.append(("idle again", 20, idle))
    truth = []
    for name, seconds, run in phases:
        begin = time.monotonic_ns()
        print(f"{name}: {seconds * args.scale:g} s", flush=True)
        result = run(seconds * args.scale)
        synchronize()
        truth.append({"phase": name, "t0": begin, "t1": time.monotonic_ns(), **result})
        args.out.write_text(json.dumps(truth, indent=1))
        torch.cuda.empty_cache()
        time.sleep(2)


if __name__ == "__main__":
    main()
