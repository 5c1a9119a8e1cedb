"""Copies on GPU 0, then copies from GPU 0 to 1, for so many seconds in all: prints what it moved. Needs torch."""

import json
import sys
import time

import torch

s = float(sys.argv[1])
a = torch.ones(1 << 28, device="cuda:0")
b = torch.empty_like(a)
two = torch.cuda.device_count() > 1
c = torch.empty_like(a, device="cuda:1") if two else b


def go(name, f, secs):
    t0 = time.monotonic_ns()
    n = 0
    while time.monotonic_ns() - t0 < secs * 1e9:
        for _ in range(20):
            f()
        n += 20
        torch.cuda.synchronize(0)
        if two:
            torch.cuda.synchronize(1)
    print(
        json.dumps({"name": name, "t0": t0, "t1": time.monotonic_ns(), "n": n, "b": a.numel() * 4}),
        flush=True,
    )


go("copy", lambda: b.copy_(a), s / 2)
if two:
    go("peer", lambda: c.copy_(a), s / 2)
