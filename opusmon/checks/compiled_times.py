"""Eager against compiled: results and times. Imported in the child only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from opusmon.checks.compiled_inputs import fresh, in_eager, tensors
from opusmon.checks.differences import Difference, difference
from opusmon.checks.target import Case
from opusmon.checks.timing import Times, on_gpu, on_host


def apart(came_out: Any, expected: Any) -> Difference:
    """Compare all tensors of what `result` gave."""
    return difference(
        *([(str(n), one) for n, one in enumerate(tensors(side))] for side in (came_out, expected))
    )


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
    ours, theirs = (apart(_double(values), exact) for values in (compiled, eager))
    return None if ours.other or theirs.other else (ours.max_abs, theirs.max_abs)


def _double(values: Any) -> Any:
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, values
    )


def times(case: Case, fn: Callable[..., Any], *, gpu: bool, step: Callable[[], None] = lambda: None) -> Times:
    """Time calls after a warm-up: wall clock on the CPU, CUDA events on a GPU.

    Args:
        case: gives the inputs, the same for all calls.
        fn: what is called.
        gpu: its tensors are on a GPU.
        step: done before each call, not timed.
    """
    args, kwargs = fresh(case)

    def call() -> Any:
        return fn(*args, **kwargs)

    return on_gpu(call, step)[1] if gpu else on_host(call, step)


def eager_times(case: Case, *, gpu: bool) -> Times:
    """The same, uncompiled."""
    with in_eager():
        return times(case, case.fn, gpu=gpu)


def needs_grad(came_out: Any) -> bool:
    """Whether what `result` gave carries gradients; inputs that do are not meant."""
    return any(tensor.requires_grad for tensor in tensors(came_out[0]))
