"""Custom operators: those that the code calls, and whether they keep what they promise. Imported in the child only."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from opusmon.checks.compiled_inputs import fresh, fresh_values, in_eager
from opusmon.checks.result import Problem, Table
from opusmon.checks.target import Case
from opusmon.checks.where import Place, here

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""Those of `torch.library.opcheck`, in the order in which they are run."""

_NO_FAKE = re.compile(r"no fake impl registered|UnsupportedOperatorException")
_MUTATED = re.compile(r"Argument (\w+) is not defined as mutable but was mutated")
_MAX_WORDS = 240

_KINDS = {
    "test_schema": "operator_schema",
    "test_autograd_registration": "operator_autograd",
    "test_faketensor": "operator_fake",
    "test_aot_dispatch_dynamic": "operator_compile",
}
_CHANGES = {
    "operator_schema": "return new tensors (a clone, no input and no view of one), and declare what is written to",
    "operator_autograd": "torch.library.register_autograd, or call it without gradients",
    "operator_fake": "make the fake return the sizes, strides, dtype and device of the real one",
    "operator_compile": "the operator behaves differently under torch.compile: see what was said",
    "operator_no_fake": "register one: @torch.library.register_fake({name!r})",
}


@dataclass(slots=True)
class Operator:
    """A custom operator that was called.

    Attributes:
        op: torch's object of it.
        place: the user's line that called it first.
        args: copies of the arguments of that call.
        calls: how often it was called.
        failed: words by test of `opcheck`; only those that ran.
    """

    op: Any
    place: Place
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As `mine::scale`."""
        return str(self.op.name())

    @property
    def fake(self) -> str:
        """Whether there is an implementation for tensors without data: yes, no, or wrong."""
        words = self.failed.get("test_faketensor")
        if words is None:
            return "yes"
        return "no" if _NO_FAKE.search(words) else "wrong"

    @property
    def writes(self) -> list[str]:
        """Arguments that the schema says are written to."""
        schema = self.op._schema  # noqa: SLF001
        return [
            arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write
        ]


@functools.cache
def torch_namespaces() -> frozenset[str]:
    """Namespaces of the operators that torch brings. Asked before the user's module is loaded, and kept."""
    return frozenset(name.split("::")[0] for name in _registered())


def others() -> set[str]:
    """Operators that something else than torch has registered."""
    return {name for name in _registered() if name.split("::")[0] not in torch_namespaces()}


def _registered() -> list[str]:
    names: list[str] = torch._C._dispatch_get_all_op_names()  # noqa: SLF001
    return names


class _Calls(TorchDispatchMode):  # type: ignore[misc]
    """Notes the calls of custom operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Operator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if isinstance(func, OpOverload) and func.namespace not in torch_namespaces():
            if func.name() not in self.found:
                own, own_named = fresh_values((args, named))
                self.found[func.name()] = Operator(func, here(), own, own_named)
            self.found[func.name()].calls += 1
        return func(*args, **named)


def called(cases: Sequence[Case], say: Callable[[str], None]) -> list[Operator]:
    """Run the cases in eager and note the custom operators that they call.

    Raises:
        Exception: what the user's code raises.
    """
    calls = _Calls()
    for case in cases:
        say(f"running in eager: {case.label}" if case.label else "running in eager")
        args, kwargs = fresh(case)
        with in_eager(), calls:
            case.fn(*args, **kwargs)
    return list(calls.found.values())


def opcheck(operator: Operator, say: Callable[[str], None]) -> None:
    """Fill in what `torch.library.opcheck` says with the arguments of the first call.

    Raises:
        ImportError: this torch is built without its tests.
    """
    for test in TESTS:
        say(f"torch.library.opcheck of {operator.name}: {test}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answers = torch.library.opcheck(
                operator.op, operator.args, operator.kwargs, test_utils=test, raise_exception=False
            )
        if answers[test] != "SUCCESS":
            operator.failed[test] = _words(answers[test])


def _words(error: Any) -> str:
    """The first sentence of what a test raised."""
    text = " ".join(str(error).split())
    sentence = re.split(r"(?<=[\w)>`'])[.!] ", text)[0]
    return f"{type(error).__name__}: {sentence}"[:_MAX_WORDS]


def problems(operator: Operator) -> list[Problem]:
    """One for each way in which it fails; tests that fail with the same words are one."""
    by_words: dict[str, list[str]] = {}
    for test, words in operator.failed.items():
        by_words.setdefault(words, []).append(test)
    return [_problem(operator, tests, words) for words, tests in by_words.items()]


def _problem(operator: Operator, tests: list[str], words: str) -> Problem:
    kind = "operator_no_fake" if _NO_FAKE.search(words) else _KINDS[tests[0]]
    what = f"{operator.name} fails {', '.join(tests)} of torch.library.opcheck"
    change = _CHANGES[kind].format(name=operator.name)
    if kind == "operator_no_fake":
        what = f"{operator.name} has no fake (meta) implementation: torch.compile cannot trace through it"
    elif match := _MUTATED.search(words):
        what = f"{operator.name} writes to {match.group(1)}, which its schema does not declare"
        change = f"declare it: mutates_args=({match.group(1)!r},), or (a!) in the schema"
    return Problem(kind, what, *operator.place, code=words, change=change, facts={"failed": ", ".join(tests)})


def table(operators: Sequence[Operator]) -> Table:
    """What they are and how they did."""
    return Table(
        "custom operators that were called",
        ("operator", "calls", "fake", "declares_writes_to", "opcheck"),
        tuple(
            (
                operator.name,
                operator.calls,
                operator.fake,
                ", ".join(operator.writes) or "nothing",
                f"{len(TESTS) - len(operator.failed)} of {len(TESTS)}",
            )
            for operator in operators
        ),
    )
