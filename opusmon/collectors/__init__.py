"""The collectors by name. Nothing is imported until it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opusmon.collectors.base import Unavailable


@dataclass(frozen=True, slots=True)
class Entry:
    """A collector that exists.

    Attributes:
        place: "module:class".
        options: what its constructor takes by keyword, and the type of each; `list` collects repeated ones.
        needs: the option without which it has nothing to watch, "" for none. Such a collector does not run by itself.
        enabled_by: the command that makes it run, for the pane that misses it.
        in_process: it runs in the screen's own process; the others get a child process each.
        end_s: how long its child may take, once told to end, for last rows or for removing probes; then it is killed.
    """

    place: str
    options: Mapping[str, type] = field(default_factory=dict)
    needs: str = ""
    enabled_by: str = ""
    in_process: bool = False
    end_s: float = 0.0


REGISTRY: dict[str, Entry] = {
    "gpu": Entry("opusmon.collectors.gpu:GpuCollector"),
    # The kernel, which removes the probes of a killed process one by one, takes up to 10 s for what they do in 0.2 s.
    "streams": Entry("opusmon.collectors.streams:StreamsCollector", {"launch_budget_pct": float}, end_s=0.3),
    "stalls": Entry(
        "opusmon.collectors.stalls:StallsCollector", {"threshold_ns": int, "budget_pct": float}, end_s=0.3
    ),
    "host": Entry("opusmon.collectors.host:HostCollector", in_process=True),
    "engine": Entry(
        "opusmon.collectors.engine:EngineCollector",
        {"urls": list, "discover": bool},
        enabled_by="opusmon --engine http://127.0.0.1:8000",
        in_process=True,
    ),
    "proxy": Entry(
        "opusmon.collectors.proxy:ProxyCollector",
        {"upstream": str, "listen": str, "allow": list},
        needs="upstream",
        enabled_by="opusmon --proxy http://127.0.0.1:8000   (and point clients at http://127.0.0.1:8788)",
        end_s=1.0,
    ),
    "canary": Entry(
        "opusmon.collectors.canary:CanaryCollector",
        {
            "base_url": str,
            "model": str,
            "per_hour": float,
            "max_tokens": int,
            "prompt_tokens": int,
            "hourly_tokens": int,
            "timeout_s": float,
        },
        needs="base_url",
        enabled_by="opusmon --probe http://127.0.0.1:8000 --probe-model MODEL   (it spends tokens)",
        end_s=1.0,
    ),
    "otlp": Entry(
        "opusmon.collectors.otlp:OtlpCollector",
        {"listen": str},
        needs="listen",
        enabled_by="opusmon --otlp-listen 127.0.0.1:4318   (and point an OTLP exporter at it)",
        end_s=1.0,
    ),
    "l2": Entry(
        "opusmon.collectors.l2:L2Collector",
        {"deep": bool, "budget_pct": float, "bank_conflicts": bool},
        needs="deep",
        enabled_by="opusmon --deep   (reads hardware counters)",
    ),
}
"""Name, as `--only` takes it, to what is behind it."""

Options = Mapping[str, Mapping[str, Any]]
"""Collector to its keyword options."""


def load(name: str) -> Any:
    """The collector class of that name.

    Raises:
        KeyError: there is none.
    """
    module, _, attribute = REGISTRY[name].place.partition(":")
    return getattr(import_module(module), attribute)


def probe(name: str) -> Unavailable | None:
    """Why a collector cannot run here; None when it can."""
    answer: Unavailable | None = load(name).probe()
    return answer


_OF_ROOT = frozenset({"privileges", "tracefs", "perf_event_paranoid", "profiling counters"})
"""Facilities that root has on any host, whatever else it lacks."""


def lacks_only_root(name: str) -> bool:
    """Whether a collector that cannot run here could, as root."""
    from opusmon.collectors.facilities import Host, lacking

    needs = getattr(import_module(REGISTRY[name].place.partition(":")[0]), "NEEDS", ())
    missing = {facility.name for facility in lacking(needs, Host())}
    return bool(missing) and missing <= _OF_ROOT


def to_words(options: Mapping[str, Any]) -> list[str]:
    """Options as `name=value` words for a child's command line."""
    pairs = [(name, one) for name, value in options.items() for one in _each(value)]
    return [f"{name}={one}" for name, one in pairs]


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def from_words(name: str, words: Sequence[str]) -> dict[str, Any]:
    """The options of a collector from `name=value` words.

    Raises:
        ValueError: it has no such option, or the value is not of its type.
    """
    types = REGISTRY[name].options
    found: dict[str, Any] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals or option not in types:
            raise ValueError(f"{name} takes {', '.join(f'{key}=...' for key in types) or 'no options'}")
        if types[option] is list:
            found.setdefault(option, []).append(value)
        elif types[option] is bool:
            found[option] = value == "True"
        else:
            found[option] = types[option](value)
    return found
