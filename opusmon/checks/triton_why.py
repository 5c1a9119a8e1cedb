"""Why Triton compiled a kernel again: two specialisations, and what changed from one to the other.

Triton compiles for what it knows of each argument: its type, whether an integer is 1 or a multiple of 16, whether a
pointer is aligned to 16 bytes, the value of each constexpr; and for the options of the launch.
Source: `native_specialize_impl` of Triton 3.6 to 3.9, `AttrsDescriptor` of 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["dtype", "constexpr", "options", "equal_to_1", "alignment"]

ORDER: tuple[Kind, ...] = ("dtype", "constexpr", "options", "equal_to_1", "alignment")
"""Of several changes the first in this order names the recompilation."""

OPTIONS = (
    "num_warps",
    "num_stages",
    "num_ctas",
    "maxnreg",
    "cluster_dims",
    "enable_fp_fusion",
    "launch_cooperative_grid",
    "launch_pdl",
    "ptx_options",
    "ir_override",
    "default_dot_input_precision",
    "sanitize_overflow",
    "debug",
    "instrumentation_mode",
)
"""Options of a launch that are compared; the others follow from these, the GPU and the version."""

_DIVISIBILITY, _EQUAL_TO = "tt.divisibility", "tt.equal_to"
_CONSTEXPR = "constexpr"
_MAX_VALUE = 60


@dataclass(frozen=True, slots=True)
class Argument:
    """What a kernel was compiled for, of one argument.

    Attributes:
        dtype: as `*fp32` or `i32`, `tuple` types in full; "" where the value is compiled in.
        value: the value that is compiled in, None where none is.
        is_constexpr: declared `tl.constexpr`.
        aligned: `16` where an address or integer is known to be a multiple of 16, else "". Of a tuple, the places.
    """

    dtype: str
    value: str | None = None
    is_constexpr: bool = False
    aligned: str = ""

    @property
    def is_one(self) -> bool:
        """An integer that is compiled in because it is 1."""
        return self.value == "1" and not self.is_constexpr


@dataclass(frozen=True, slots=True)
class Specialisation:
    """All that a kernel was compiled for: arguments by name, options by name."""

    arguments: dict[str, Argument] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """One difference; `argument` is an option's name where `kind` is `options`."""

    kind: Kind
    argument: str
    text: str


def specialisation(
    names: Sequence[str],
    constexprs: Iterable[int],
    signature: Mapping[str, Any],
    constants: Mapping[Any, Any],
    attributes: Any,
    options: Mapping[str, Any],
) -> Specialisation:
    """The same form for what the versions of Triton keep differently.

    Args:
        names: of the kernel's parameters.
        constexprs: places of those that are declared constexpr.
        signature: type by name. Since 3.3 a value that is compiled in has the type `constexpr`; before, a constexpr is
            left out, and an integer 1 keeps its type.
        constants: value by place (`(3,)`; a longer path within a tuple) or, before 3.3, by name.
        attributes: `[["tt.divisibility", 16]]` by path; before 3.3 an `AttrsDescriptor`, whose `arg_properties` hold
            the places by property.
        options: of the launch; those in `OPTIONS` are kept.
    """
    declared = frozenset(constexprs)
    values = _by_place(names, constants)
    aligned = _aligned(attributes)
    found = {}
    for place, name in enumerate(names):
        dtype = signature.get(name, _CONSTEXPR)
        value = values.get(place)
        fixed = value is not None and (place in declared or dtype == _CONSTEXPR or value == "1")
        found[name] = Argument(
            dtype="" if fixed else str(dtype),
            value=value if fixed else None,
            is_constexpr=place in declared,
            aligned="" if fixed else aligned.get(place, ""),
        )
    kept = {name: _text(options[name]) for name in OPTIONS if options.get(name) is not None}
    return Specialisation(found, kept)


def _by_place(names: Sequence[str], constants: Mapping[Any, Any]) -> dict[int, str]:
    """Values that are compiled in, as text, by the place of their argument; parts of tuples are in its type."""
    found = {}
    for key, value in constants.items():
        if isinstance(key, str):
            if key not in names:
                continue
            place = list(names).index(key)
        elif isinstance(key, tuple):
            if len(key) != 1:
                continue
            place = int(key[0])
        else:
            place = int(key)
        found[place] = _text(value)
    return found


def _aligned(attributes: Any) -> dict[int, str]:
    properties = getattr(attributes, "arg_properties", None)
    if properties is not None:
        return {int(place): "16" for place in properties.get(_DIVISIBILITY, ())}
    found: dict[int, list[str]] = {}
    for path, pairs in dict(attributes or {}).items():
        if not any(pair[0] == _DIVISIBILITY for pair in pairs):
            continue
        steps = path if isinstance(path, tuple) else (path,)
        found.setdefault(int(steps[0]), []).append(".".join(map(str, steps[1:])))
    return {place: "16" if inner == [""] else ",".join(sorted(inner)) for place, inner in found.items()}


def _text(value: Any) -> str:
    """A value of the key; one that Triton wraps is shown as it was written."""
    text = str(getattr(value, "value", value))
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."


def changes(before: Specialisation, after: Specialisation) -> list[Change]:
    """What differs, the most telling first; empty when nothing that is compared does."""
    found: list[Change] = []
    for name, new in after.arguments.items():
        old = before.arguments.get(name)
        if old is not None and old != new:
            found.append(_of_argument(name, old, new))
    for name in dict.fromkeys((*before.options, *after.options)):
        old_value, new_value = before.options.get(name, "unset"), after.options.get(name, "unset")
        if old_value != new_value:
            found.append(Change("options", name, f"{name} was {old_value} and is {new_value} now"))
    return sorted(found, key=lambda change: ORDER.index(change.kind))


def _of_argument(name: str, old: Argument, new: Argument) -> Change:
    if new.is_constexpr:
        return Change("constexpr", name, f"constexpr {name} was {old.value} and is {new.value} now")
    if old.is_one or new.is_one:
        return Change(
            "equal_to_1", name, f"{name} was 1 and is not now" if old.is_one else f"{name} is 1 now"
        )
    if (old.dtype, old.value) != (new.dtype, new.value):
        return Change(
            "dtype", name, f"{name} was {old.dtype or old.value} and is {new.dtype or new.value} now"
        )
    return Change("alignment", name, _alignment(name, old, new))


def _alignment(name: str, old: Argument, new: Argument) -> str:
    if new.dtype.startswith("*"):
        what, yes = f"the address of {name}", "aligned to 16 bytes"
    elif new.dtype.startswith(("i", "u")):
        what, yes = name, "a multiple of 16"
    else:
        return f"what of {name} is a multiple of 16 was {old.aligned or 'nothing'} and is {new.aligned or 'nothing'} now"
    return f"{what} was {yes} and is not now" if old.aligned else f"{what} is {yes} now and was not"


def nearest(earlier: Sequence[Specialisation], new: Specialisation) -> list[Change]:
    """Changes from that earlier specialisation from which there are fewest; of equals the latest one counts."""
    return min((changes(one, new) for one in reversed(earlier)), key=len)


def remedy(found: Sequence[Change]) -> str:
    """What to change so that these do not compile again; "" for no changes."""
    by_kind: dict[Kind, list[Change]] = {}
    for change in found:
        by_kind.setdefault(change.kind, []).append(change)
    return "; ".join(_REMEDIES[kind](own) for kind, own in by_kind.items())


def _quoted(found: Sequence[Change]) -> str:
    return ", ".join(f'"{change.argument}"' for change in found)


def _of_alignment(found: Sequence[Change]) -> str:
    pointers = [change for change in found if change.text.startswith("the address")]
    others = [change for change in found if change not in pointers]
    ways = []
    if pointers:
        ways.append(
            f"let the data of {', '.join(change.argument for change in pointers)} begin at a multiple of 16 bytes "
            "(a slice or view shifts it)"
        )
    if others:
        ways.append(f"pad {', '.join(change.argument for change in others)} to a multiple of 16")
    return f"{' and '.join(ways)}, or @triton.jit(do_not_specialize_on_alignment=[{_quoted(found)}])"


_REMEDIES: dict[Kind, Callable[[Sequence[Change]], str]] = {
    "alignment": _of_alignment,
    "equal_to_1": lambda found: (
        f"@triton.jit(do_not_specialize=[{_quoted(found)}]) makes one kernel of all its values"
    ),
    "constexpr": lambda found: (
        f"let {', '.join(change.argument for change in found)} take few values, or make it an ordinary argument"
    ),
    "dtype": lambda found: f"keep one dtype of {', '.join(change.argument for change in found)}",
    "options": lambda found: f"launch with one value of {', '.join(change.argument for change in found)}",
}
