"""A load that counts its own CUDA calls on three streams; tests/data/h200-streams.opusmon was recorded beside it.

    opusmon record --only gpu,streams -o h200-streams.opusmon &
    python counted_streams.py > h200-streams-load.json

Needs torch with CUDA; changes no setting of the GPU.
"""

import json
import time

import torch


def capture(x, stream):
    """A graph of four small kernels, with the warm-up that capture asks for."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            x.mul_(1.0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(4):
            x.mul_(1.0)
    torch.cuda.synchronize()
    return graph


def main():
    x = torch.rand(4096, device="cuda:0")
    source = torch.rand(1 << 26, device="cuda:0")
    target = torch.empty_like(source)
    a, b, c = (torch.cuda.Stream() for _ in range(3))
    graph = capture(x, b)
    time.sleep(12)  # the probes are there by then
    counts = {"t0": time.monotonic_ns(), "a_launches": 0, "b_graphs": 0, "c_copies": 0, "syncs_a": 0}
    for _ in range(101):
        with torch.cuda.stream(a):
            for _ in range(53):
                x.mul_(1.0001)
                counts["a_launches"] += 1
        a.synchronize()
        counts["syncs_a"] += 1
        with torch.cuda.stream(b):
            for _ in range(7):
                graph.replay()
                counts["b_graphs"] += 1
        with torch.cuda.stream(c):
            for _ in range(3):
                target.copy_(source, non_blocking=True)
                counts["c_copies"] += 1
        time.sleep(0.09)
    torch.cuda.synchronize()
    counts |= {"t1": time.monotonic_ns(), "copy_b": counts["c_copies"] * source.numel() * 4}
    counts |= {name: hex(stream.cuda_stream) for name, stream in (("a", a), ("b", b), ("c", c))}
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
