"""The collectors by name. Nothing is imported until it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opusmon.collectors.base import Unavailable

REGISTRY: dict[str, str] = {
    "gpu": "opusmon.collectors.gpu:GpuCollector",
    "streams": "opusmon.collectors.streams:StreamsCollector",
}
"""Collectors that exist: name, as `--only` takes it, to "module:class"."""

AWAITED: dict[str, str] = {
    "latency": "opusmon.collectors.latency",
    "stalls": "opusmon.collectors.stalls",
}
"""Panes whose collector this version does not have: name to the module whose `probe()` says what it will need."""


OPT_IN: dict[str, tuple[str, str]] = {
    "streams": (
        "eBPF probes on libcuda run only when asked for: 141 MB, and about 1 us per CUDA call within a budget",
        "opusmon --only gpu,streams   (as root)",
    ),
}
"""Collectors that run only when `--only` names them: reason and command, for their pane."""


def load(name: str) -> Any:
    """The collector class of that name.

    Raises:
        KeyError: there is none.
    """
    module, _, attribute = REGISTRY[name].partition(":")
    return getattr(import_module(module), attribute)


def probe(name: str) -> Unavailable | None:
    """Why `name`, a collector or an awaited one, cannot run here; None when it can."""
    if name in REGISTRY:
        answer: Unavailable | None = load(name).probe()
        return answer
    awaited: Unavailable | None = import_module(AWAITED[name]).probe()
    return awaited
