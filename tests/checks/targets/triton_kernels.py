"""Kernels that Triton compiles again for known reasons, and some that it does not."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))

from triton_compile_only import use_where_there_is_no_gpu  # noqa: E402

DEVICE = use_where_there_is_no_gpu()


@triton.jit
def copy_strided(source, target, n, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at * stride, mask=at < n), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def copy_any(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=8)],
    key=["n"],
)
@triton.jit
def copy_tuned(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


@triton.jit
def plus_one(value):
    return value + 1


@triton.jit
def applied(source, target, n, FN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, FN(tl.load(source + at, mask=at < n)), mask=at < n)


def tensor(n, dtype=torch.float32):
    return torch.arange(n, device=DEVICE).to(dtype)


def strided(source, target, n, stride=1, block=64, warps=4):
    copy_strided[(triton.cdiv(n, block),)](source, target, n, stride, BLOCK=block, num_warps=warps)
    return target


def _calls(*named):
    return strided, [{"target": tensor(4096), **one} for one in named]


def alignment_of_int():
    return _calls({"source": tensor(4096), "n": 1024}, {"source": tensor(4096), "n": 1000})


def alignment_of_pointer():
    return _calls({"source": tensor(4096), "n": 1024}, {"source": tensor(4096)[1:], "n": 1024})


def equal_to_1():
    return _calls({"source": tensor(4096), "n": 1024}, {"source": tensor(4096), "n": 1024, "stride": 2})


def constexpr():
    source = tensor(4096)
    return _calls(*({"source": source, "n": 1024, "block": block} for block in (64, 128, 256)))


def dtype():
    return _calls({"source": tensor(4096), "n": 1024}, {"source": tensor(4096, torch.float16), "n": 1024})


def options():
    return _calls({"source": tensor(4096), "n": 1024}, {"source": tensor(4096), "n": 1024, "warps": 8})


def clean(n=1024):
    def call(source, target, n):
        copy_any[(triton.cdiv(n, 64),)](source, target, n, BLOCK=64)
        return target

    return call, (tensor(4096), tensor(4096), n)


def tuned():
    def call(source, target, n):
        copy_tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](source, target, n)
        return target

    return call, [(tensor(4096), tensor(4096), n) for n in (1024, 2048, 1024)]


def of_a_function():
    """A function as constexpr: what some hooks of Triton cannot write down."""

    def call(source, target, n):
        applied[(triton.cdiv(n, 64),)](source, target, n, FN=plus_one, BLOCK=64)
        return target

    return call, (tensor(4096), tensor(4096), 1024)


def later_call():
    """Each call is another position, as of a token that is decoded."""
    position = iter(range(1024, 2048))

    def call(source, target):
        return strided(source, target, next(position))

    return call, (tensor(4096), tensor(4096))


def second_kernel():
    def call(source, target, n):
        if n > 1024:
            copy_any[(triton.cdiv(n, 64),)](source, target, n, BLOCK=64)
            return target
        return strided(source, target, n)

    return call, [(tensor(4096), tensor(4096), n) for n in (1024, 2048)]


def made_anew():
    """The kernel's function is made in each call."""

    def call(source, target):
        @triton.jit
        def inner(source, target, BLOCK: tl.constexpr):
            at = tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at))

        inner[(1,)](source, target, BLOCK=64)
        return target

    return call, (tensor(4096), tensor(4096))


def fails_later():
    def call(source, target, n):
        strided(source, target, n)
        if n == 2048:
            raise ValueError("planted")

    return call, [(tensor(4096), tensor(4096), n) for n in (1024, 2048)]


def compiled():
    """What inductor writes; on a GPU these are Triton kernels."""

    @torch.compile(dynamic=False)
    def call(x):
        return torch.softmax(x * 2 + 1, dim=-1).sum()

    return call, [torch.randn(n, 512, device=DEVICE) for n in (64, 100)]
