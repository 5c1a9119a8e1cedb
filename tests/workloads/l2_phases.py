"""A load whose HBM and L2 traffic is known: copies, reads and writes of given size, and a sweep over the L2's size.

Writes one JSON line per phase to stdout: name, begin and end (CLOCK_REALTIME and CLOCK_MONOTONIC ns), and the bytes
that its kernels read and wrote, counted from their arguments. Needs torch and a GPU.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

MIB = 2**20


def run(name, once, read_b, write_b, seconds, **more):
    """Repeat `once` for `seconds`, in groups that keep the queue full, and say what it moved."""
    for _ in range(3):
        once()
    torch.cuda.synchronize()
    began = (time.time_ns(), time.monotonic_ns())
    count = 0
    group = max(1, int(2e9 / max(read_b + write_b, 1)))
    while time.monotonic_ns() - began[1] < seconds * 1e9:
        for _ in range(group):
            once()
        count += group
        torch.cuda.synchronize()
    ended = (time.time_ns(), time.monotonic_ns())
    line = {
        "name": name, "wall_ns": [began[0], ended[0]], "t_ns": [began[1], ended[1]],
        "read_b": read_b * count, "write_b": write_b * count, "count": count, **more,
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    time.sleep(0.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", type=int, default=0)
    args = parser.parse_args()
    torch.cuda.set_device(args.device)
    big = torch.ones(2048 * MIB // 4, device="cuda")
    other = torch.empty_like(big)
    size = big.numel() * 4
    run("copy", lambda: other.copy_(big), size, size, args.seconds)
    run("read", big.sum, size, 0, args.seconds)
    run("write", lambda: other.fill_(1.0), 0, size, args.seconds)
    for mib in (4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 512):
        part = big[: mib * MIB // 4]
        run("sweep", part.sum, mib * MIB, 0, args.seconds / 2, mib=mib)
    if torch.cuda.device_count() > 1:
        peer = torch.empty_like(big, device=f"cuda:{1 - args.device}")
        run("peer", lambda: peer.copy_(big), size, 0, args.seconds)


if __name__ == "__main__":
    main()
