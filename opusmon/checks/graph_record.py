"""Watches a function's operations while it runs: those that a CUDA Graph does not take, each with the user's line."""

from __future__ import annotations

import inspect
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, resolve_name
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from opusmon.checks.graph_inputs import memory_of, tensors
from opusmon.checks.graph_operators import (
    index_kind,
    is_indexing,
    reads_value,
    sizes_by_value,
    written_out,
)
from opusmon.checks.result import Level
from opusmon.checks.where import Place, expression, here

_READS = frozenset({"tolist", "numpy", "cpu", "__array__", "__repr__"})
_LISTED = frozenset({"tolist", "numpy", "__array__"})
_FROM_HOST = frozenset({"tensor", "as_tensor", "new_tensor", "asarray", "from_numpy", "scalar_tensor"})
_FACTORIES = frozenset(
    {
        *("arange", "range", "linspace", "logspace", "eye", "zeros", "ones", "full"),
        *("empty", "empty_strided", "empty_permuted"),
        *("rand", "randn", "randint", "randperm", "normal"),
        *("tril_indices", "triu_indices", "fft_fftfreq", "fft_rfftfreq"),
        *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window"),
    }
)
_MOVES = frozenset({"to", "cuda", "type_as"})
_INDEXES = frozenset({"__getitem__", "__setitem__"})
_CPU = re.compile(r"""["']cpu["']""")
_OF_TORCH = frozenset({"aten", "prim", "prims", "higher_order", "profiler"})
_CHOOSING = frozenset({"cond", "while_loop"})
_COPIED: tuple[str, Level] = ("host_tensor", "problem")
_FROZEN: tuple[str, Level] = ("frozen_tensor", "note")
_WAITS = (
    ("torch.cuda.synchronize", torch.cuda, "synchronize", "synchronize"),
    ("Stream.synchronize", torch.cuda.Stream, "synchronize", "synchronize"),
    ("Event.synchronize", torch.cuda.Event, "synchronize", "synchronize"),
    ("Stream.query", torch.cuda.Stream, "query", "event_query"),
    ("Event.query", torch.cuda.Event, "query", "event_query"),
)
_NO_DRAWS = frozenset({"seed", "getstate", "setstate", "get_state", "set_state", "default_rng"})


@dataclass(frozen=True, slots=True)
class Seen:
    """An operation that a graph does not take, or takes wrongly.

    Attributes:
        way: entry of graph_words.WAYS that tells of it; "" for the words of the kind.
    """

    kind: str
    op: str
    place: Place
    level: Level = "problem"
    way: str = ""


class Recorder:
    """What a call does.

    Args:
        on_gpu: the tensors are where they will be. Otherwise every tensor is taken for one of the GPU.
        before: called with each operation's name before it runs.
        after: called with its name and the exception it raised, or None.

    Attributes:
        seen: in the order of the call, repeated as often as it happened.
        last: the operation that ran last.
        devices: those of all tensors that were used.
        opaque: operators that are not torch's own, whose inside is not seen.
        new_tensors: outputs that took memory of their own.
        new_bytes: that memory.
        threads: started during the call; what they do is not seen.
    """

    def __init__(
        self,
        *,
        on_gpu: bool,
        before: Callable[[str], None] | None = None,
        after: Callable[[str, BaseException | None], None] | None = None,
    ) -> None:
        self.seen: list[Seen] = []
        self.last = ""
        self.devices: set[str] = set()
        self.opaque: set[str] = set()
        self.new_tensors = 0
        self.new_bytes = 0
        self.threads = 0
        self._on_gpu = on_gpu
        self._before = before
        self._after = after
        self._outer = ""
        self._checks_on_host = False
        self._number_is_written = False
        self._makes_on_host = False
        self._of_host: dict[int, torch.Tensor] = {}
        self._drawn: dict[int, Seen] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, operations are recorded; what was compiled runs as it was written."""
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for name, owner, attribute, kind in _WAITS:
                noted = self._noting(getattr(owner, attribute), name, kind)
                stack.enter_context(_patched(owner, attribute, noted))
            for module, name in _draws():
                noted = self._noting(getattr(module, name), f"{module.__name__}.{name}", "host_random")
                stack.enter_context(_patched(module, name, noted))
            stack.enter_context(_patched(threading.Thread, "start", self._counting(threading.Thread.start)))
            stack.enter_context(_Functions(self))
            stack.enter_context(_Operations(self))
            yield

    def note(self, kind: str, op: str, level: Level = "problem", way: str = "") -> None:
        """Something happens at the line that is being executed."""
        if kind == "item" and _in_step_count():
            kind = "optimizer"
        self.seen.append(Seen(kind, op, here(), level, way))

    def function(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call of the torch API, as the user wrote it."""
        name = getattr(func, "__name__", "")
        self._outer = (resolve_name(func) or name).replace("torch.Tensor.", "Tensor.")
        self.last = self._outer
        self._checks_on_host = not self._on_gpu and name == "one_hot" and _says_classes(args, kwargs)
        self._number_is_written = name == "__setitem__" and not isinstance(args[2], torch.Tensor)
        # Of no harm until it is moved, or what was drawn is read.
        self._makes_on_host = (
            not self._on_gpu
            and name in _FACTORIES
            and not _has_tensor(args, kwargs)
            and _has_no_device(kwargs)
        )
        if args and self._is_theirs(args[0]):
            if name in _READS or (name == "to" and not self._on_gpu and _names_cpu()):
                way = "new_pinned" if name == "to" and _does_not_wait(args, kwargs) else ""
                self.note("host_copy", self._outer, way=way)
            elif name in _INDEXES and (kind := written_out(args[1])):
                self.note(kind, self._outer)
        elif args and name in _LISTED:
            self._note_draw(args[:1])
        try:
            return self._called(name, func, args, kwargs)
        finally:
            self._outer = ""
            self._checks_on_host = self._number_is_written = self._makes_on_host = False

    def _called(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if name in _MOVES and not self._on_gpu and self._leaves_host(name, args, kwargs):
            self.note("pageable_copy", self._outer)
            made = func(*args, **kwargs)
            # On the CPU it is the same tensor, which stays one of the host.
            there = made.view_as(made)
            self._of_host.pop(id(there), None)
            self._drawn.pop(id(there), None)
            return there
        if name not in _FROM_HOST or _has_tensor(args, kwargs):
            return func(*args, **kwargs)
        copied = self._is_copied(args, kwargs)
        kind, level = _COPIED if copied else _FROZEN
        self.note(kind, self._outer, level)
        made = func(*args, **kwargs)
        if not copied:
            self._keep_of_host(made)
        return made

    def _keep_of_host(self, made: Any, draw: Seen | None = None) -> None:
        # Kept alive, so that its id stays its own.
        self._of_host |= {id(tensor): tensor for _, tensor in tensors(made)}
        if draw is not None:
            self._drawn |= {id(tensor): draw for _, tensor in tensors(made)}

    def _note_draw(self, values: Iterable[Any]) -> None:
        """What was drawn on the host is read there: a replay sees the number that was drawn at capture."""
        if (draw := self._draw_of(values)) is not None:
            self.seen.append(draw)

    def _draw_of(self, values: Iterable[Any]) -> Seen | None:
        return next((self._drawn[id(value)] for value in values if id(value) in self._drawn), None)

    def _leaves_host(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a tensor of the host is told to go where others are, which would be the GPU."""
        if id(args[0]) not in self._of_host:
            return False
        if name == "cuda":
            return True
        given = [*args[1:], *kwargs.values()]
        other = [one for one in given if isinstance(one, torch.Tensor)]
        if other:
            return any(map(self._is_theirs, other))
        return any(isinstance(one, str | torch.device) for one in given) and not _names_cpu()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operator of ATen or of the user's own."""
        name = str(func.name()).partition(".")[0]
        op = self._outer or name
        self.last = op
        if "::" in name and name.partition("::")[0] not in _OF_TORCH:
            self.opaque.add(name)
        used = [tensor for _, tensor in tensors([args, dict(kwargs)])]
        self.devices.update(str(tensor.device) for tensor in used)
        kind = self._kind(func, name, args, kwargs)
        # The call of the API above has said it already.
        if kind and self._outer.rpartition(".")[2] not in _READS | _FROM_HOST:
            self.note(kind, op, "note" if kind == "cpu_input" else "problem")
        if self._drawn and reads_value(func, name, args, kwargs, lambda value: id(value) in self._drawn):
            self._note_draw(used)
        if self._before is not None:
            self._before(op)
        try:
            made = func(*args, **kwargs)
        except BaseException as error:
            if self._after is not None:
                self._after(op, error)
            raise
        if self._after is not None:
            self._after(op, None)
        self._count(used, made)
        if not self._on_gpu and self._is_of_host(used, kwargs):
            # One with a generator of its own is named for that already.
            draws = (
                torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
                and kwargs.get("generator") is None
            )
            drawn = Seen("host_random", op, here()) if draws else self._draw_of(used)
            self._keep_of_host(made, drawn)
        return made

    def _kind(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        if self._checks_on_host:
            return None
        if reads_value(func, name, args, kwargs, self._is_theirs):
            return "branch" if self._outer.endswith("__bool__") else "item"
        if name in _CHOOSING:
            return "branch"
        if is_indexing(name):
            return index_kind(name, args, self._is_theirs, is_number=self._number_is_written)
        first = next((tensor for _, tensor in tensors(args)), None)
        if self._is_theirs(first) and sizes_by_value(func, name, kwargs):
            return "dynamic_shape"
        if kwargs.get("generator") is not None:
            return "generator"
        if self._on_gpu:
            # A number is written as a fill; it is in the code and changes with that only.
            fills = self._number_is_written and name.startswith("aten::fill")
            return None if fills else _between_devices(name, args, kwargs)
        return self._copies(name, args)

    def _copies(self, name: str, args: tuple[Any, ...]) -> str | None:
        """Copies between the host and what is taken for the GPU."""
        if name != "aten::copy_":
            return None
        there = self._is_theirs(args[0])
        # One element is written by a copy, as `x[0, 0] = 1.0`; more by a fill.
        of_host = self._number_is_written or not self._is_theirs(args[1])
        if there:
            return "pageable_copy" if of_host else None
        return None if of_host else "host_copy"

    def _is_of_host(self, used: list[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
        """Whether what an operator makes lies on the host: of tensors of the host, or as the user's call says."""
        if used:
            return not any(map(self._is_theirs, used))
        return self._makes_on_host or (kwargs.get("device") is not None and _names_cpu())

    def _is_theirs(self, value: Any) -> bool:
        """Whether it is a tensor of the GPU, or would be."""
        if not isinstance(value, torch.Tensor):
            return False
        theirs: bool = value.is_cuda if self._on_gpu else id(value) not in self._of_host
        return theirs

    def _is_copied(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a tensor of Python values goes to the GPU; without one, to where the user says it goes."""
        if args and isinstance(args[0], torch.Tensor):
            return self._is_theirs(args[0])
        device = kwargs.get("device")
        if not self._on_gpu:
            return device is not None and not _names_cpu()
        return str(torch.device(device or torch.get_default_device()).type) == "cuda"

    def _count(self, used: list[torch.Tensor], made: Any) -> None:
        known = {memory_of(tensor) for tensor in used} | {None}
        for _, tensor in tensors(made):
            self.devices.add(str(tensor.device))
            address = memory_of(tensor)
            if address not in known:
                known.add(address)
                self.new_tensors += 1
                self.new_bytes += tensor.untyped_storage().nbytes()

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        caller = threading.get_ident()

        @wraps(original)
        def started(thread: threading.Thread) -> None:
            self.threads += threading.get_ident() == caller
            original(thread)

        return started

    def _noting(self, original: Callable[..., Any], name: str, kind: str) -> Callable[..., Any]:
        @wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(kind, name)
            self.last = name
            return original(*args, **kwargs)

        return noted


def _draws() -> list[tuple[Any, str]]:
    """Functions that draw numbers on the host, of Python's module and of numpy's where that is loaded."""
    modules = [module for module in (random, sys.modules.get("numpy.random")) if module is not None]
    return [
        (module, name)
        for module in modules
        for name in module.__all__
        if name.islower() and name not in _NO_DRAWS and callable(getattr(module, name))
    ]


@contextmanager
def standing_in() -> Iterator[None]:
    """Where there is no GPU to wait for, calls that wait do nothing; torch would raise."""
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            for _, owner, attribute, _ in _WAITS:
                stack.enter_context(_patched(owner, attribute, lambda *_args, **_kwargs: None))
        yield


@contextmanager
def _patched(owner: Any, attribute: str, new: Callable[..., Any]) -> Iterator[None]:
    own = vars(owner).get(attribute)
    setattr(owner, attribute, new)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, own)


class _Functions(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.function(func, args, kwargs or {})


class _Operations(TorchDispatchMode):  # type: ignore[misc]
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operation(func, args, kwargs or {})


def _in_step_count() -> bool:
    """Whether an optimizer of torch reads how many steps it has made."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_get_value":
            return str(frame.f_globals.get("__name__")).startswith("torch.optim.")
        frame = frame.f_back
    return False


def _says_classes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether one_hot is told how many classes there are: on a GPU it then reads no value (ATen's Onehot.cpp)."""
    return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) != -1)


def _has_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """As in torch.as_tensor(t); the tensor that new_tensor is called on makes no difference."""
    given = args[1:] if args and isinstance(args[0], torch.Tensor) and len(args) > 1 else args
    return any(isinstance(value, torch.Tensor) for value in (*given, *kwargs.values()))


def _does_not_wait(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether Tensor.to is given non_blocking=True; by place it is the first of the two bools."""
    given = next((one for one in args[1:] if isinstance(one, bool)), False)
    return bool(kwargs.get("non_blocking", given))


def _has_no_device(kwargs: Mapping[str, Any]) -> bool:
    """Whether nothing says where a new tensor goes: then it is the host, also where everything else is on a GPU."""
    if kwargs.get("device") is not None:
        return False
    # torch.set_default_device() and `with torch.device()` around the call: without a GPU they say "cpu" as well.
    return not any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def _names_cpu() -> bool:
    """Whether the user's call says "cpu" itself: without a GPU, `x.to(y.device)` and `.to(DEVICE)` mean it as well."""
    return bool(_CPU.search(expression()))


def _between_devices(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Copies between host and GPU, and tensors of the host among those of the GPU."""
    if name == "aten::_to_copy" and kwargs.get("device") is not None:
        source, to_gpu = args[0], torch.device(kwargs["device"]).type == "cuda"
        waits = not kwargs.get("non_blocking", False)
    elif name == "aten::copy_":
        source, to_gpu = args[1], args[0].is_cuda
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        found = [tensor.is_cuda for _, tensor in tensors(args)]
        return "cpu_input" if any(found) and not all(found) and not name.endswith("lift_fresh") else None
    if source.is_cuda and not to_gpu:
        return "host_copy" if waits else None
    if to_gpu and not source.is_cuda:
        return "pageable_copy" if waits or not source.is_pinned() else None
    return None
