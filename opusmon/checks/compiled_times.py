"""Eager against compiled: results and times. Imported in the child only."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from opusmon.checks.compiled_inputs import fresh, in_eager, tensors
from opusmon.checks.target import Case

TOLERANCES: dict[Any, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
    torch.float8_e4m3fn: (2.0**-3, 0.0),
    torch.float8_e5m2: (2.0**-2, 0.0),
}
"""Relative and absolute, by dtype: those of torch.testing.assert_close; of float8 one step. Others must be equal."""

BUDGET_S = 0.5
"""How long one way to call is timed."""

MIN_CALLS = 5
MAX_CALLS = 200
WARM_CALLS = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two results are apart.

    Attributes:
        max_abs: largest absolute difference.
        max_rel: largest ratio of a difference to the value, where that is not zero.
        within: all values are within the tolerance of their dtype.
        dtype: of the tensor that is furthest out, "" when there is none.
        other: what cannot be compared, as other shapes; "" when all could.
    """

    max_abs: float = 0.0
    max_rel: float = 0.0
    within: bool = True
    dtype: str = ""
    other: str = ""


def difference(left: Any, right: Any) -> Difference:
    """Compare all tensors of two results; `right` is what should come out."""
    ours, theirs = tensors(left), tensors(right)
    if len(ours) != len(theirs):
        return Difference(within=False, other=f"{len(ours)} tensors came out instead of {len(theirs)}")
    worst = Difference()
    for one, two in zip(ours, theirs, strict=True):
        found = _of_tensors(one, two)
        if found.other:
            return found
        further = (not found.within, found.max_abs) > (not worst.within, worst.max_abs)
        worst = replace(
            worst,
            max_abs=max(worst.max_abs, found.max_abs),
            max_rel=max(worst.max_rel, found.max_rel),
            within=worst.within and found.within,
            dtype=found.dtype if further or not worst.dtype else worst.dtype,
        )
    return worst


def _of_tensors(ours: Any, theirs: Any) -> Difference:
    dtype = str(theirs.dtype).removeprefix("torch.")
    for name in ("shape", "dtype", "device"):
        one, two = getattr(ours, name), getattr(theirs, name)
        if one != two:
            return Difference(within=False, dtype=dtype, other=f"{name} {one} instead of {two}")
    if not ours.numel():
        return Difference(dtype=dtype)
    relative, absolute = TOLERANCES.get(ours.dtype, (0.0, 0.0))
    one, two = _wide(ours), _wide(theirs)
    # Equal infinities and NaN in the same place are no difference.
    same = (one == two) | (one.isnan() & two.isnan())
    off = torch.where(same, 0.0, (one - two).abs())
    size = two.abs()
    ratio = torch.where(size > 0, off / size, 0.0).nan_to_num(nan=float("inf"))
    return Difference(
        float(off.nan_to_num(nan=float("inf")).max()),
        float(ratio.max()),
        bool((same | (off <= absolute + relative * size) & two.isfinite()).all()),
        dtype,
    )


def _wide(tensor: Any) -> Any:
    """The same values in a dtype in which differences are exact enough."""
    tensor = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).to(torch.float64)
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.float32 if narrow else torch.float64)


def result(case: Case, fn: Callable[..., Any], *, eager: bool) -> Any:
    """What comes out of a call from the given inputs, and what it leaves in them."""
    args, kwargs = fresh(case)
    if eager:
        with in_eager():
            out = fn(*args, **kwargs)
    else:
        out = fn(*args, **kwargs)
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad),
        (out, args, kwargs),
    )


def against_float64(case: Case, compiled: Any, eager: Any) -> tuple[float, float] | None:
    """Largest absolute errors of compiled and eager against eager in float64; None when that does not run."""
    try:
        fn = copy.deepcopy(case.fn).double() if isinstance(case.fn, torch.nn.Module) else case.fn
        args, kwargs = _double((case.args, dict(case.kwargs)))
        exact = result(replace(case, args=args, kwargs=kwargs), fn, eager=True)
    except Exception:
        return None
    if not any(tensor.dtype == torch.float64 for tensor in tensors(exact[0])):
        return None
    ours, theirs = (difference(_double(values), exact) for values in (compiled, eager))
    return None if ours.other or theirs.other else (ours.max_abs, theirs.max_abs)


def _double(values: Any) -> Any:
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, values
    )


@dataclass(frozen=True, slots=True)
class Times:
    """Of single calls, each begun when the device was idle.

    Attributes:
        median_ms: of the calls.
        low_ms, high_ms: quartiles.
        calls: how many.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    calls: int


def times(case: Case, fn: Callable[..., Any], *, gpu: bool, step: Callable[[], None] = lambda: None) -> Times:
    """Time calls after a warm-up: wall clock on the CPU, CUDA events on a GPU.

    Args:
        case: gives the inputs, the same for all calls.
        fn: what is called.
        gpu: its tensors are on a GPU.
        step: done before each call, not timed.
    """
    args, kwargs = fresh(case)
    once = _events_ms if gpu else _wall_ms
    taken: list[float] = []
    until_s = time.perf_counter() + BUDGET_S
    for number in range(WARM_CALLS + MAX_CALLS):
        step()
        ms = once(lambda: fn(*args, **kwargs))
        if number >= WARM_CALLS:
            taken.append(ms)
        if len(taken) >= MIN_CALLS and time.perf_counter() > until_s:
            break
    low, median, high = statistics.quantiles(taken, n=4, method="inclusive")
    return Times(median, low, high, len(taken))


def eager_times(case: Case, *, gpu: bool) -> Times:
    """The same, uncompiled."""
    with in_eager():
        return times(case, case.fn, gpu=gpu)


def _wall_ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _events_ms(call: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def needs_grad(came_out: Any) -> bool:
    """Whether what `result` gave carries gradients; inputs that do are not meant."""
    return any(tensor.requires_grad for tensor in tensors(came_out[0]))
