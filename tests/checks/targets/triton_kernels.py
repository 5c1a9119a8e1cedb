"""Kernels that Triton compiles again for known reasons, and some that it does not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))

from triton_compile_only import use_where_there_is_no_gpu

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


GRID = (16,)


def strided(source, target, n):
    copy_strided[GRID](source, target, n, 1, BLOCK=64)
    return target


def every_reason():
    """Each call differs from the first in one thing; each launch has a line of its own."""
    target, source, halves = tensor(4096), tensor(4096), tensor(4096, torch.float16)

    def call(which):
        if which == "first":
            copy_strided[GRID](source, target, 1024, 1, BLOCK=64)  # first
        elif which == "same":
            copy_strided[GRID](source, target, 2048, 1, BLOCK=64)  # same specialisation
        elif which == "multiple of 16":
            copy_strided[GRID](source, target, 1000, 1, BLOCK=64)  # n
        elif which == "address":
            copy_strided[GRID](source[1:], target, 1024, 1, BLOCK=64)  # address
        elif which == "one":
            copy_strided[GRID](source, target, 1024, 2, BLOCK=64)  # stride
        elif which == "constexpr":
            copy_strided[GRID](source, target, 1024, 1, BLOCK=128)  # block
        elif which == "dtype":
            copy_strided[GRID](halves, target, 1024, 1, BLOCK=64)  # dtype
        elif which == "options":
            copy_strided[GRID](source, target, 1024, 1, BLOCK=64, num_warps=8)  # options
        return target

    names = ("first", "same", "multiple of 16", "address", "one", "constexpr", "dtype", "options")
    return call, [{"which": name} for name in names]


def clean(n=1024):
    def call(source, target, n):
        copy_any[(triton.cdiv(n, 64),)](source, target, n, BLOCK=64)
        return target

    return call, (tensor(4096), tensor(4096), n)


def tuned():
    def call(source, target, n):
        copy_tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](source, target, n)  # tuned
        return target

    return call, [(tensor(4096), tensor(4096), n) for n in (1024, 2048, 1024)]


def of_a_function():
    """A function as constexpr: what some hooks of Triton cannot write down."""

    def call(source, target, n):
        applied[(triton.cdiv(n, 64),)](source, target, n, FN=plus_one, BLOCK=64)
        return target

    return call, (tensor(4096), tensor(4096), 1024)


def own_cache():
    """Sets a cache directory by itself, as some servers do."""
    directory = os.environ["TEST_OWN_CACHE"]
    os.environ["TRITON_CACHE_DIR"] = directory
    if hasattr(triton, "knobs"):
        triton.knobs.cache.dir = directory
    return clean()


def later_call():
    """Each call is another position, as of a token that is decoded."""
    position = iter(range(1024, 2048))

    def call(source, target):
        return strided(source, target, next(position))

    return call, (tensor(4096), tensor(4096))


def second_kernel():
    def call(source, target, n):
        if n > 1024:
            copy_any[(triton.cdiv(n, 64),)](source, target, n, BLOCK=64)  # second kernel
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

        inner[(1,)](source, target, BLOCK=64)  # anew
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
