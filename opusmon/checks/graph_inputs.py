"""The inputs of a call by name, what changes between calls, and how they get their values back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from opusmon.checks.target import Case


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What is in nested tuples, lists and dicts, with its path, as `past[0].k`."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from leaves(item, f"{path}[{place}]")
    else:
        yield path, value


def tensors(value: Any, path: str = "out") -> list[tuple[str, torch.Tensor]]:
    """The tensors among them."""
    return [(name, item) for name, item in leaves(value, path) if isinstance(item, torch.Tensor)]


def named(case: Case) -> dict[str, Any]:
    """Every leaf of a call's inputs by the name of its argument."""
    called: Callable[..., Any] = case.fn.forward if isinstance(case.fn, torch.nn.Module) else case.fn
    try:
        bound = dict(inspect.signature(called).bind(*case.args, **case.kwargs).arguments)
    except (TypeError, ValueError):
        bound = {f"argument {place}": value for place, value in enumerate(case.args, 1)} | dict(case.kwargs)
    return dict(leaf for name, value in bound.items() for leaf in leaves(value, name))


def input_tensors(case: Case) -> list[tuple[str, torch.Tensor]]:
    """The tensors among a call's inputs."""
    return [(name, value) for name, value in named(case).items() if isinstance(value, torch.Tensor)]


def own_tensors(fn: Any) -> list[torch.Tensor]:
    """Parameters and buffers of a module; none of a plain function."""
    return [*fn.parameters(), *fn.buffers()] if isinstance(fn, torch.nn.Module) else []


Aspects = dict[str, str]
"""What a graph holds fixed of an input: shape, dtype, stride, device of a tensor; the value of anything else."""


def aspects(value: Any) -> Aspects:
    """What a graph holds fixed of one input. Texts and objects are shown by their type only."""
    if isinstance(value, torch.Tensor):
        return {
            "shape": str(tuple(value.shape)),
            "dtype": str(value.dtype).removeprefix("torch."),
            "stride": str(tuple(value.stride())) if value.layout == torch.strided else str(value.layout),
            "device": str(value.device),
        }
    if value is None or isinstance(value, bool | int | float):
        return {"value": repr(value)}
    return {"type": type(value).__name__}


def changes(found: Sequence[Case]) -> list[tuple[str, str, str]]:
    """Inputs that are not alike in all calls: name, aspect, and its values in the order of the calls."""
    calls = [{name: aspects(value) for name, value in named(case).items()} for case in found]
    rows = []
    for name in dict.fromkeys(name for call in calls for name in call):
        for aspect in dict.fromkeys(aspect for call in calls for aspect in call.get(name, {})):
            values = [call.get(name, {}).get(aspect, "--") for call in calls]
            if len(set(values)) > 1:
                rows.append((name, aspect, " | ".join(values)))
    # A stride that follows from the shape is no change of its own.
    shapes = {name for name, aspect, _ in rows if aspect == "shape"}
    return [row for row in rows if not (row[1] == "stride" and row[0] in shapes)]


def key(case: Case) -> tuple[Any, ...]:
    """Calls with the same key can share a graph."""
    return tuple((name, tuple(aspects(value).items())) for name, value in named(case).items())


def memory_of(tensor: torch.Tensor) -> int | None:
    """Address of a tensor's memory, views and whole alike; None when it has none of its own, as a sparse one."""
    try:
        address: int = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    return address or None


def moved(found: Sequence[Case]) -> list[str]:
    """Tensor inputs that lie at another address in another call."""
    addresses: dict[str, set[int | None]] = {}
    for case in found:
        for name, tensor in input_tensors(case):
            addresses.setdefault(name, set()).add(memory_of(tensor))
    return [name for name, places in addresses.items() if len(places) > 1]


Values = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors with the values they get."""


def keep(case: Case) -> Values:
    """Inputs and buffers with copies of them; not those that no copy can fill: sparse, or one value repeated."""
    buffers = list(case.fn.buffers()) if isinstance(case.fn, torch.nn.Module) else []
    found = [*(tensor for _, tensor in input_tensors(case)), *buffers]
    return [(tensor, tensor.detach().clone()) for tensor in found if not _has_no_room(tensor)]


def _has_no_room(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided:
        return True
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def restore(values: Values) -> None:
    """Give tensors their values, in place."""
    # It lets tensors be changed that were made in it, and those that take gradients.
    with torch.inference_mode():
        for tensor, value in values:
            tensor.copy_(value)


def other_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Other values of the same kind: the same in reverse order, halved. None for what could leave its range.

    Whole numbers are often indices or lengths, which only their user can change rightly.
    """
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        return None
    return tensor.detach().flatten().flip(0).reshape(tensor.shape) * 0.5
