"""What the counts and costs mean: problems, notes, and the order that is safe here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opusmon.checks.init_race import WORKS
from opusmon.checks.init_tally import Costs, Count
from opusmon.checks.result import Fact, Problem, Value

NOT_MEASURED = "not measured in this run"

_WARM_UP = (
    "initialise, launch each kernel and each matmul shape once, and synchronise, before the first capture"
)
_OTHERS = "let no other thread do this while a capture is open, or capture in thread-local mode"
_CHANGES = {
    "first": _WARM_UP,
    "open": _OTHERS,
    "race": "let one thread initialise and warm up before the others capture",
    "torch": _WARM_UP,
}


def problems(counts: Iterable[Count]) -> list[Problem]:
    """Problems where the safe order or plain initialisation fails; notes where another order does."""
    found = []
    for count in counts:
        if count.done == count.worked:
            continue
        facts: dict[str, Value] = {"works": count.worked, "repetitions": count.done}
        said = count.failures()
        if count.kind == "safe":
            found.append(
                Problem("safe_order_fails", f"the safe order fails: {count.label()}", code=said, facts=facts)
            )
        elif count.kind == "init":
            found.append(
                Problem(
                    "init_race_fails", f"plain initialisation fails: {count.label()}", code=said, facts=facts
                )
            )
        else:
            found.append(
                Problem(
                    "unsafe_order",
                    f"not safe here: {count.label()}",
                    code=said,
                    change=_CHANGES[count.part],
                    level="note",
                    facts=facts,
                )
            )
    return sorted(found, key=lambda problem: problem.level == "note")


def safe_order(costs: Costs, counts: Sequence[Count]) -> list[Fact]:
    """The steps, each with what was measured for it."""
    steps = (
        ("initialise", _initialise(costs, counts)),
        ("warm_up", _warm_up(costs, counts)),
        ("other_threads", _other_threads(counts)),
        ("capture", _capture(counts)),
        ("count_nodes", _count_nodes(counts)),
    )
    return [
        Fact(f"safe_order_{number}_{name}", measured, f"safe order {number}: {text}: {measured}")
        for number, (name, (text, measured)) in enumerate(steps, 1)
    ]


def _initialise(costs: Costs, counts: Sequence[Count]) -> tuple[str, str]:
    parts = [
        f"{step} {ms:.3g} ms"
        for step, ms in (
            *(
                (step, costs.median_ms(step, "lazy"))
                for step in ("cuInit", "context", "module of 64 kernels")
            ),
            *((step, costs.median_ms(step, "")) for step in ("cudaFree(0) as the first call",)),
        )
        if ms is not None
    ]
    parts += [f"{count.label()} {_share([count])}" for count in counts if count.kind == "init" and count.done]
    return "make the context and load modules before any capture", "; ".join(parts) or NOT_MEASURED


def _warm_up(costs: Costs, counts: Sequence[Count]) -> tuple[str, str]:
    parts = []
    for first, again in (
        ("launch, first", "launch, same kernel again"),
        ("torch: matmul (cuBLAS), first", "torch: matmul (cuBLAS), again"),
    ):
        before, after = costs.median_ms(first, "lazy"), costs.median_ms(again, "lazy")
        if before is not None and after is not None:
            parts.append(f"{first} {before:.3g} ms, again {after:.3g} ms")
    for name in ("first-launch-in-capture", "load-in-capture", "torch-capture-first"):
        chosen = [count for count in counts if count.name == name and count.done]
        if chosen:
            parts.append(f"without it, {chosen[0].text}: {_share(chosen)}{_exceptions(chosen)}")
    return "launch each kernel and each matmul shape once, and synchronise", "; ".join(parts) or NOT_MEASURED


def _other_threads(counts: Sequence[Count]) -> tuple[str, str]:
    chosen = [count for count in counts if count.name.startswith(("open-", "torch-open-")) and count.done]
    bad = [count for count in chosen if count.worked < count.done]
    text = "while a capture is open, keep other threads from what breaks it or fails beside it"
    if not chosen:
        return text, NOT_MEASURED
    return text, "; ".join(f"{count.label()} {_share([count])}" for count in bad) or (
        f"nothing that was tried did ({_share(chosen)})"
    )


def _capture(counts: Sequence[Count]) -> tuple[str, str]:
    chosen = [count for count in counts if count.kind == "safe" and count.done]
    return "then capture, on a stream of its own", _share(chosen) if chosen else NOT_MEASURED


def _count_nodes(counts: Sequence[Count]) -> tuple[str, str]:
    chosen = [count for count in counts if count.mode and count.done]
    if not chosen:
        return "see that the graph has nodes", NOT_MEASURED
    empty = sum(count.empty for count in chosen)
    done = sum(count.done for count in chosen)
    return (
        "see that the graph has nodes",
        f"silently empty graphs in {empty:,} of {done:,} repetitions with a capture",
    )


def _share(counts: Sequence[Count]) -> str:
    worked, done = sum(count.worked for count in counts), sum(count.done for count in counts)
    return f"{WORKS} in {worked:,} of {done:,}"


def _exceptions(counts: Sequence[Count]) -> str:
    """Which of several ways failed, when not all did."""
    bad = [count for count in counts if count.worked < count.done]
    if not bad or len(bad) == len(counts):
        return ""
    return f" (fails: {', '.join(f'{count.loading} {count.mode}'.strip() for count in bad)})"
