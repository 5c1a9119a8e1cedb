"""How far two results are apart, and whether that is rounding. Imported in the child only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Named = Sequence[tuple[str, Any]]
"""Tensors by name, in order."""

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


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two results. Where some tensors are not the same, only these count.

    Attributes:
        path: name of the tensor with the largest absolute difference, "" when there is none.
        dtype: its dtype.
        max_abs: largest absolute difference; infinite where only one value is a number, or nothing can be compared.
        max_rel: largest ratio of a difference to the value expected or, by the largest, to the largest of its tensor.
        same: all are within the tolerance of their dtype.
        other: what cannot be compared, as other shapes; "" when all could.
    """

    path: str = ""
    dtype: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    same: bool = True
    other: str = ""

    @property
    def words(self) -> str:
        """`out[0] off by 0.25`, or why it cannot be compared."""
        return self.other or f"{self.path} off by {self.max_abs:.3g}"


def difference(got: Named, expected: Named, *, by_largest: bool = False) -> Difference:
    """Compare two results.

    Args:
        got: what came out.
        expected: what should.
        by_largest: the relative tolerance is of the largest value of a tensor instead of each one's own: sums of many
            values, some of which come out near zero, may round otherwise.
    """
    if len(got) != len(expected):
        return _incomparable("", "", f"{len(got)} tensors came out instead of {len(expected)}")
    found = []
    for (name, one), (wanted, two) in zip(got, expected, strict=True):
        if name != wanted:
            return _incomparable(wanted, "", f"{name} came out instead of {wanted}")
        found.append(_of_tensors(name, one, two, by_largest=by_largest))
        if found[-1].other:
            return found[-1]
    if not found:
        return Difference()
    counted = [one for one in found if not one.same] or found
    worst = max(counted, key=lambda one: one.max_abs)
    max_rel = max(one.max_rel for one in counted)
    return Difference(worst.path, worst.dtype, worst.max_abs, max_rel, worst.same)


def _incomparable(path: str, dtype: str, why: str) -> Difference:
    return Difference(path, dtype, float("inf"), float("inf"), same=False, other=why)


def _of_tensors(name: str, got: Any, expected: Any, *, by_largest: bool) -> Difference:
    dtype = str(expected.dtype).removeprefix("torch.")
    if got.layout != expected.layout or got.is_nested != expected.is_nested:
        return _incomparable(name, dtype, f"layout {got.layout} instead of {expected.layout}")
    if expected.is_nested:
        got, expected = (torch.nested.to_padded_tensor(one, 0.0) for one in (got, expected))
    elif expected.layout != torch.strided:
        got, expected = got.to_dense(), expected.to_dense()
    for aspect in ("shape", "dtype", "device"):
        one, two = getattr(got, aspect), getattr(expected, aspect)
        if one != two:
            return _incomparable(name, dtype, f"{aspect} {one} instead of {two}")
    if not got.numel():
        return Difference(name, dtype)
    relative, absolute = TOLERANCES.get(got.dtype, (0.0, 0.0))
    one, two = _wide(got), _wide(expected)
    # Equal infinities and NaN in the same place are no difference.
    alike = (one == two) | (one.isnan() & two.isnan())
    off = _far(torch.where(alike, 0.0, (one - two).abs()))
    size = two.abs()
    if by_largest:
        size = size.nan_to_num(0.0, 0.0, 0.0).max()
    ratio = _far(torch.where(size > 0, off / size, off if by_largest else 0.0))
    within = alike | ((off <= absolute + relative * size) & two.isfinite())
    return Difference(name, dtype, float(off.max()), float(ratio.max()), bool(within.all()))


def _far(tensor: Any) -> Any:
    """NaN is as far away as infinity."""
    return tensor.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _wide(tensor: Any) -> Any:
    """The same values in a dtype in which differences are exact enough."""
    tensor = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).to(torch.float64)
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.float32 if narrow else torch.float64)
