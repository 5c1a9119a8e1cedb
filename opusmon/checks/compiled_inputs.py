"""Inputs for many calls that all start from the same, and the calls in eager. Imported in the child only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from opusmon.checks.target import Case


def fresh(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of their own for one call: equal values, strides and sharing of memory."""
    return fresh_values((case.args, dict(case.kwargs)))  # type: ignore[no-any-return]


def fresh_values(values: Any) -> Any:
    """The same, with tensors of their own. Tensors that share memory do so again."""
    memory: dict[int, Any] = {}

    def copied(tensor: Any) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        storage = tensor.untyped_storage()
        key = id(tensor) if storage.data_ptr() == 0 else storage.data_ptr()
        own = memory.setdefault(key, None)
        if own is None:
            own = memory[key] = storage.clone()
        with torch.no_grad():
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            made.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.requires_grad_(tensor.requires_grad)
        # Where torch._dynamo.mark_dynamic keeps its marks.
        vars(made).update({name: value for name, value in vars(tensor).items() if name.startswith("_dynamo")})
        return made

    return tree_map_only(torch.Tensor, copied, values)


@contextlib.contextmanager
def in_eager() -> Iterator[None]:
    """Code that the target has compiled itself runs uncompiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


def plain(cases: Sequence[Case]) -> list[Case]:
    """The cases, with modules that the target compiled in place (`module.compile()`) as they were.

    Their graphs would be theirs and not those of the check. Functions that the target compiled torch sees through.
    """
    for case in cases:
        for module in case.fn.modules() if isinstance(case.fn, torch.nn.Module) else ():
            if getattr(module, "_compiled_call_impl", None) is not None:
                module._compiled_call_impl = None  # noqa: SLF001
    return list(cases)


def tensors(values: Any) -> list[Any]:
    """All tensors in nested containers."""
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]
