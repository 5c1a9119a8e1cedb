"""What `opusmon check compile` finds on a GPU."""

import torch


def mutated():
    def fn(cache, x):
        cache.add_(x)  # writes to an input
        return cache * 2

    return fn, (torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda"))


def cpu_scalar():
    def fn(x, scale):
        return x * scale + 1  # reads a CPU tensor

    return fn, (torch.ones(1024, device="cuda"), torch.tensor(2.0))


def chain():
    def fn(x):
        return torch.relu(x + 1) * 2 - x.abs() + x.sin()

    return fn, (torch.ones(1 << 26, device="cuda"),)


def matmul():
    def fn(x, w):
        return torch.nn.functional.silu(x @ w) + x

    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    return fn, [(torch.randn(n, 1024, **bf16), torch.randn(1024, 1024, **bf16)) for n in (8, 16, 32)]
