"""How an engine's metric names become the fields of channel `engine`: the words that the tables in `kinds` are written in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

Where = Mapping[str, frozenset[str]]

_SUFFIXES = ("", "_bucket", "_sum", "_count", "_created")


@dataclass(frozen=True, slots=True)
class Pick:
    """One metric, whatever its name has been over the versions.

    Attributes:
        names: sample names (a histogram's without `_bucket`), the newest first; the first one on the page counts.
        where: accepted values per label, "" for none; a series whose label is not named here is accepted.
        scale: factor to the field's unit.
    """

    names: tuple[str, ...]
    where: Where = field(default_factory=dict)
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A share of two picks: the first over the sum of all of `whole`."""

    part: Pick
    whole: tuple[Pick, ...]


@dataclass(frozen=True, slots=True)
class Mean:
    """A latency known as a counter of seconds and one of observations, without a histogram."""

    total: Pick
    number: Pick


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What one kind of engine publishes.

    Attributes:
        name: as in the field `kind`.
        title: as written by its makers.
        prefixes: its sample names begin with one of these.
        enable: what makes it publish its metrics, "" when it always does.
        model_labels: labels that hold the model's name, the first one that is there counts.
        rank_labels: series that differ here come from different ranks, each with requests of its own.
        copy_labels: series that differ only here tell of the same requests: the highest counts.
        paths: where it serves the page.
        ports: ports it listens on unless told otherwise.
        programs: words that begin the name of its program, script or Python module.
        gauges: field to metric; ranks are summed.
        kv: share of the KV cache in use, 0-1.
        kv_of: blocks in use and blocks in all, for versions without `kv`.
        counts: field to metrics; growth in the window, ranks and metrics summed.
        rates: likewise, per second.
        ratios: field to shares of two growths; the first one whose names are on the page counts.
        shares: field to a gauge, 0-1, for versions without the counters of `ratios`; mean over ranks.
        latencies: entry of `METRICS` to histogram.
        means: entry of `METRICS` to two counters.
    """

    name: str
    title: str
    prefixes: tuple[str, ...]
    enable: str = ""
    model_labels: tuple[str, ...] = ("model_name",)
    rank_labels: frozenset[str] = frozenset()
    copy_labels: frozenset[str] = frozenset()
    paths: tuple[str, ...] = ("/metrics",)
    ports: frozenset[int] = frozenset()
    programs: tuple[str, ...] = ()
    gauges: Mapping[str, tuple[Pick, ...]] = field(default_factory=dict)
    kv: Pick | None = None
    kv_of: Ratio | None = None
    counts: Mapping[str, tuple[Pick, ...]] = field(default_factory=dict)
    rates: Mapping[str, tuple[Pick, ...]] = field(default_factory=dict)
    ratios: Mapping[str, tuple[Ratio, ...]] = field(default_factory=dict)
    shares: Mapping[str, Pick] = field(default_factory=dict)
    latencies: Mapping[str, Pick] = field(default_factory=dict)
    means: Mapping[str, Mean] = field(default_factory=dict)


def picks(value: object) -> Iterator[Pick]:
    """Every pick in a kind, or in any part of one."""
    if isinstance(value, Pick):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from picks(part)
    elif isinstance(value, tuple):
        for part in value:
            yield from picks(part)
    elif isinstance(value, EngineKind | Ratio | Mean):
        for one in fields(value):
            yield from picks(getattr(value, one.name))


def sample_names(kind: EngineKind) -> Iterator[str]:
    """Every sample name that may be needed of an engine of this kind."""
    for pick in picks(kind):
        for name in pick.names:
            yield from (name + suffix for suffix in _SUFFIXES)
            yield name.removesuffix("_total") + "_created"


def counters(kind: EngineKind) -> frozenset[str]:
    """Sample names of this kind that never go back while the engine lives; a sum may, it holds clock differences."""
    plain = (name for part in (kind.counts, kind.rates, kind.ratios, kind.means) for name in _names(part))
    counted = (name + end for name in _names(kind.latencies) for end in ("_bucket", "_count"))
    return frozenset(plain) | frozenset(counted)


def _names(value: object) -> Iterator[str]:
    return (name for pick in picks(value) for name in pick.names)
