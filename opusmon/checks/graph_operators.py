"""Operators of ATen that read on the host what lies on the GPU, or copy to it, without a tag of torch that says so.

Tags tell of `item`, `nonzero` and their like. What is here is from the sources of ATen's operators for CUDA (torch 2.13,
`ATen/native`): they read for a check of their own, for a range, or for a number that is given as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from opusmon.checks.graph_inputs import tensors

_CHECKED = frozenset(
    {
        # Whether they converged, or the matrix was such as they need.
        "aten::_linalg_svd",
        "aten::_linalg_eigh",
        "aten::linalg_eig",
        "aten::_linalg_eigvals",
        "aten::cholesky",
        "aten::cholesky_inverse",
        "aten::cholesky_solve",
        "aten::_cholesky_solve_helper",
        # The norm, which says how many terms it takes.
        "aten::linalg_matrix_exp",
    }
)
_NUMBERS = frozenset({"aten::masked_fill", "aten::masked_fill_", "aten::index_fill", "aten::index_fill_"})
_STEPS = frozenset({"aten::linspace", "aten::logspace"})
_TO_SPARSE = frozenset(
    {
        "aten::_coalesce",
        "aten::_to_sparse",
        "aten::_to_sparse_csr",
        "aten::_to_sparse_csc",
        "aten::_to_sparse_bsr",
        "aten::_to_sparse_bsc",
    }
)
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
_IS_THEIRS = Callable[[Any], bool]


def reads_value(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], theirs: _IS_THEIRS
) -> bool:
    """Whether an operator reads a value of the GPU on the host.

    Args:
        func: the operator.
        name: of it, as `aten::histc`.
        args: its arguments.
        kwargs: its arguments by name.
        theirs: whether a value is a tensor of the GPU.
    """
    tagged = torch.Tag.data_dependent_output in getattr(func, "tags", ())
    if tagged or name.endswith("::_linalg_check_errors") or name in _CHECKED:
        return any(theirs(tensor) for _, tensor in tensors(args))
    if name in _NUMBERS:
        return theirs(_given(func, args, kwargs, "value"))
    if name in _STEPS:
        return any(theirs(_given(func, args, kwargs, end)) for end in ("start", "end"))
    if name == "aten::normal":
        return theirs(_given(func, args, kwargs, "std"))
    if name == "aten::searchsorted":
        return theirs(_given(func, args, kwargs, "sorter"))
    if name == "aten::histc":
        ends = [_given(func, args, kwargs, end) or 0 for end in ("min", "max")]
        return theirs(args[0]) and args[0].numel() > 0 and ends[0] == ends[1]
    if name == "aten::segment_reduce":
        return theirs(args[0]) and not _given(func, args, kwargs, "unsafe")
    return False


def sizes_by_value(func: Any, name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether the size of what an operator makes depends on values; of indexing `index_kind` tells."""
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return name in _TO_SPARSE or torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


def is_indexing(name: str) -> bool:
    """Whether an operator selects by tensors, or writes to what they select."""
    return name in _INDEXING


def index_kind(name: str, args: tuple[Any, ...], theirs: _IS_THEIRS, *, is_number: bool) -> str | None:
    """What keeps an indexing operator out of a capture, None when nothing does.

    Indices of the host are copied to the GPU, and so is a number that is written to what indices select. A mask is made
    into indices, of which the host must know how many; not where one value of the host is written under one mask:
    that is masked_fill.

    Args:
        name: of the operator.
        args: its arguments.
        theirs: whether a value is a tensor of the GPU.
        is_number: the user writes a number of Python.
    """
    indices = [index for _, index in tensors(args[1])]
    if not theirs(args[0]):
        return None
    if not all(theirs(index) for index in indices):
        return "pageable_copy"
    writes = name != "aten::index"
    of_host = writes and args[2].numel() == 1 and (is_number or not theirs(args[2]))
    if any(_is_mask(index) for index in indices):
        adds = writes and len(args) > 3 and bool(args[3])
        return None if of_host and not adds and len(indices) == 1 else "dynamic_shape"
    return "pageable_copy" if of_host else None


def written_out(index: Any) -> str | None:
    """What an index, or a part of one, is when it is no tensor: a list of numbers, or an array of the host's memory."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(_is_numbers(part) for part in parts):
        return "host_tensor"
    return "pageable_copy" if any(_is_array(part) for part in parts) else None


def _is_numbers(part: Any) -> bool:
    if not isinstance(part, list | range):
        return False
    return len(part) > 0 and all(isinstance(one, int) or _is_numbers(one) or _is_array(one) for one in part)


def _is_array(part: Any) -> bool:
    return type(part).__module__ == "numpy" and getattr(part, "ndim", 0) > 0


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """An argument by its name in the operator's schema, None when it was not given."""
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name)
    return None
