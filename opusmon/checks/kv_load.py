"""Tensors without their data, from a dump or from what a callable returns.

A `.pt` file goes through `torch.load(weights_only=True)`, which runs no code of the file, and is refused when it is
compressed: what torch reads of it is then no larger than the file. A `.safetensors` file is 8
bytes of header length (little endian), that many bytes of JSON, then the data (huggingface/safetensors, README.md,
Format); its tensors are contiguous, and only the header is read.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opusmon.checks.kv_tensor import Strided, contiguous_strides
from opusmon.checks.result import one_line
from opusmon.checks.target import TargetError
from opusmon.checks.where import NOWHERE, Place, here

MAX_HEADER_B = 100_000_000
"""Longest header that the format's own library reads."""
MAX_TENSORS = 100_000
MAX_DEPTH = 8
MAX_RANK = 16
MAX_NAME = 500
"""Longest name of a tensor, characters."""

DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
}
"""Name in the file to torch's name and bytes."""

VIEWS = dict(DTYPES.values()) | {
    # AMD's, which no safetensors file has.
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
"""What bytes can be viewed as: torch's name to bytes of an element."""

POSITIONS = ("k", "v", "q", "page_table")
"""Names of what a tuple holds, in order."""

ROLES = {
    "kv": ("kv", "kv_cache", "kv_buffer", "key_value_cache"),
    "k": ("k", "key", "keys", "k_cache", "key_cache", "k_buffer", "k_pool"),
    "v": ("v", "value", "values", "v_cache", "value_cache", "v_buffer", "v_pool"),
    "q": ("q", "query", "queries"),
    "page_table": ("page_table", "block_table", "block_tables", "page_indices"),
    "q_descale": ("q_descale", "q_scale"),
    "k_descale": ("k_descale", "k_scale"),
    "v_descale": ("v_descale", "v_scale"),
}
"""What a tensor is for, and the names that say so."""


def is_file(source: str) -> bool:
    """A dump rather than a TARGET."""
    return source.endswith((".pt", ".pth", ".bin", ".safetensors"))


def from_file(path: Path) -> dict[str, Strided]:
    """The tensors of a dump, by name.

    Raises:
        TargetError: it cannot be read, or holds none.
    """
    try:
        found = _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror or error}") from error
    if not found:
        raise TargetError(f"{path} holds no tensors")
    return found


def _safetensors(path: Path) -> dict[str, Strided]:
    with path.open("rb") as file:
        size_b = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size_b < 8 or length > min(MAX_HEADER_B, size_b - 8):
            raise TargetError(f"{path} is no safetensors file: its header does not fit")
        return header(file.read(length), size_b - 8 - length)


def header(data: bytes, data_b: int) -> dict[str, Strided]:
    """The tensors that a safetensors header describes.

    Args:
        data: the JSON.
        data_b: bytes that follow it.

    Raises:
        TargetError: it is none, or describes what cannot be there.
    """
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise TargetError(f"the safetensors header is not what it should be: {error}"[:200]) from error
    if not isinstance(document, dict) or len(document) > MAX_TENSORS:
        raise TargetError("the safetensors header is no list of tensors")
    return {
        _name(name): _entry(name, entry, data_b) for name, entry in document.items() if name != "__metadata__"
    }


def _name(name: str) -> str:
    if len(name) > MAX_NAME:
        raise TargetError(f"a tensor has a name of {len(name):,} characters: {name[:40]}...")
    return name


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _entry(name: str, entry: Any, data_b: int) -> Strided:
    shape, offsets = (_numbers(entry, key) for key in ("shape", "data_offsets"))
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > MAX_RANK:
        raise TargetError(f"tensor {name[:80]} of the safetensors header has no shape and place")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise TargetError(f"tensor {name[:80]} has dtype {str(dtype)[:20]}, which is not known here")
    kind, itemsize = DTYPES[dtype]
    tensor = Strided(name, shape, contiguous_strides(shape), kind, itemsize)
    begin, end = offsets
    if end - begin != tensor.size_b or end > data_b:
        raise TargetError(f"tensor {name[:80]} does not lie within the file")
    return tensor


def _numbers(entry: Any, key: str) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 on."""
    found = entry.get(key) if isinstance(entry, dict) else None
    if isinstance(found, list) and all(type(one) is int and 0 <= one < 2**63 for one in found):
        return tuple(found)
    return None


def _torch_file(path: Path) -> dict[str, Strided]:
    import torch

    try:
        # Mapped, so that a dump of many GB costs no memory; files of before the zip format cannot be.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=_stored(path))
    except (OSError, TargetError):
        raise
    except Exception as error:  # torch raises what its reading of hostile bytes happens to run into
        why = f"it is cut short, or not what torch.save writes ({type(error).__name__})"
        if "weights_only" in str(error):
            why = "it holds more than tensors, or is none"
        elif isinstance(error, RuntimeError):
            why = one_line(error).partition(". ")[0]
        raise TargetError(f"{path} cannot be loaded with weights_only: {why}"[:300]) from error
    return of_values(found)


def _stored(path: Path) -> bool:
    """Whether it is a zip file, as torch.save writes it since 1.6: all in it lies there as it is.

    Raises:
        TargetError: something in it is packed: it could be of any size once it is unpacked.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise TargetError(f"{path} is compressed, which torch.save does not do")
    return True


def of_values(values: Any, places: Callable[[Any], Place] = lambda _tensor: NOWHERE) -> dict[str, Strided]:
    """The tensors in a dict, a tuple or nested ones, by name; those of a tuple are named by `POSITIONS`.

    Args:
        values: what a callable returned or a file held.
        places: the user's line that made a tensor.
    """
    import torch

    plain = isinstance(values, tuple | list) and 2 <= len(values) <= len(POSITIONS)
    if plain and all(one is None or isinstance(one, torch.Tensor) for one in values):
        values = dict(zip(POSITIONS, values, strict=False))
    found: dict[str, Strided] = {}
    for name, tensor in _tensors(values, "", MAX_DEPTH):
        if len(found) >= MAX_TENSORS:
            break
        found[_name(name or "kv")] = _info(tensor, name or "kv", places(tensor))
    return found


def _tensors(values: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(values, torch.Tensor):
        yield name, values
    elif depth and isinstance(values, Mapping | list | tuple):
        pairs: Iterable[tuple[Any, Any]] = (
            values.items() if isinstance(values, Mapping) else enumerate(values)
        )
        for key, value in pairs:
            # A key may be anything, a tensor too.
            own = str(key) if isinstance(key, str | int) else type(key).__name__
            yield from _tensors(value, f"{name}.{own}" if name else own, depth - 1)


def _info(tensor: Any, name: str, place: Place) -> Strided:
    import torch

    if tensor.layout is not torch.strided:
        raise TargetError(f"{name} is {tensor.layout}: it has no strides")
    on_gpu = tensor.is_cuda
    return Strided(
        name,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        tensor.element_size(),
        # Allocations on a GPU begin at multiples of 256 bytes and more.
        tensor.data_ptr() if on_gpu else tensor.storage_offset() * tensor.element_size(),
        str(tensor.device),
        *place,
    )


def from_target(make: Callable[..., Any]) -> dict[str, Strided]:
    """Call it and take the tensors it returns, each with the user's line that gave it its strides.

    Raises:
        TargetError: it returns none.
        Exception: whatever it raises.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    lines: dict[int, Place] = {}

    class Lines(TorchFunctionMode):  # type: ignore[misc]  # torch is not looked at
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else (out,):
                # An id is used again when its tensor is gone: the last one stands.
                if isinstance(one, torch.Tensor):
                    lines[id(one)] = here()
            return out

    with Lines():
        values = make()
    found = of_values(values, lambda tensor: lines.get(id(tensor), NOWHERE))
    if not found:
        raise TargetError("the target returned no tensors; it returns k and v, or a dict of tensors by name")
    return found


def itemsize_of(dtype: str) -> int:
    """Bytes of an element of what --dtype names.

    Raises:
        TargetError: it is none of `VIEWS`.
    """
    if dtype not in VIEWS:
        raise TargetError(f"--dtype {dtype[:40]!r} is not known: it is one of {', '.join(sorted(VIEWS))}")
    return VIEWS[dtype]


def choose(tensors: Mapping[str, Strided], role: str, said: str | None = None) -> Strided | None:
    """The tensor for a role, by the name the user said or the usual ones; None when no name fits.

    Raises:
        TargetError: the name said is not there, or several fit.
    """
    if said is not None:
        if said not in tensors:
            raise TargetError(f"there is no tensor {said}; there is {listed(tensors)}")
        return tensors[said]
    whole = [name for name in tensors if name.lower() in ROLES[role]]
    fitting = whole or [name for name in tensors if name.lower().split(".")[-1] in ROLES[role]]
    if len(fitting) > 1:
        flag = f"--{role.replace('_', '-')}"
        raise TargetError(f"{len(fitting)} tensors may be {role}: say {flag}; there is {listed(tensors)}")
    return tensors[fitting[0]] if fitting else None


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names for a message."""
    all_names = list(names)
    more = f" and {len(all_names) - most} more" if len(all_names) > most else ""
    return ", ".join(all_names[:most]) + more
