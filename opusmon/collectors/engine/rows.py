"""Figures to rows of `engine` and `engine_bucket`, and the reasons of what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opusmon.channels import DCGM, ENGINE, ENGINE_BUCKET
from opusmon.collectors.engine.dcgm import HbmShare
from opusmon.collectors.engine.figures import Figures
from opusmon.collectors.engine.vocabulary import EngineKind
from opusmon.collectors.notes import Key
from opusmon.quantiles import NAN
from opusmon.schema import Batch, StringTable

_TEXTS = ("engine", "model", "kind", "pid", "dt_ns", "scrape_ns")
"""The fields before the measured ones, in the order of `ENGINE`."""
_MEASURED = tuple(field.name for field in ENGINE.fields if field.name not in _TEXTS)


@dataclass(frozen=True, slots=True)
class Scrape:
    """Where and when a page was read.

    Attributes:
        t: when its last byte was there, monotonic ns.
        dt_ns: time since the good scrape before, 0 for the first.
        scrape_ns: time it took.
        label: of the engine.
        kind: of the engine.
        pid: process that listens there, 0 where that is not known.
    """

    t: int
    dt_ns: int
    scrape_ns: int
    label: str
    kind: EngineKind
    pid: int = 0


def batches(scrape: Scrape, entries: Sequence[Figures], strings: StringTable) -> Iterator[Batch]:
    """A batch of `engine` rows and, where there were observations, one of `engine_bucket` rows."""
    if entries:
        yield Batch(ENGINE, ENGINE.rows(_engine_records(scrape, entries, strings)))
    records = list(_bucket_records(scrape, entries, strings))
    if records:
        yield Batch(ENGINE_BUCKET, ENGINE_BUCKET.rows(records))


def dcgm_batch(t: int, label: str, shares: Sequence[HbmShare], strings: StringTable) -> Batch:
    """Rows of `dcgm`, one per GPU or instance of a non-empty sequence."""
    engine = strings.intern(label)
    return Batch(
        DCGM,
        DCGM.rows(
            (t, engine, one.gpu, strings.intern(one.uuid), strings.intern(one.instance), one.hbm_bw_pct)
            for one in shares
        ),
    )


def _engine_records(
    scrape: Scrape, entries: Sequence[Figures], strings: StringTable
) -> Iterator[tuple[float, ...]]:
    label, kind = strings.intern(scrape.label), strings.intern(scrape.kind.name)
    for entry in entries:
        head = (
            scrape.t,
            label,
            strings.intern(entry.model),
            kind,
            scrape.pid,
            scrape.dt_ns,
            scrape.scrape_ns,
        )
        yield (*head, *(entry.values.get(name, NAN) for name in _MEASURED))


def _bucket_records(
    scrape: Scrape, entries: Sequence[Figures], strings: StringTable
) -> Iterator[tuple[float, ...]]:
    label = strings.intern(scrape.label)
    for entry in entries:
        for metric, found in entry.buckets.items():
            head = (scrape.t, label, strings.intern(entry.model), strings.intern(metric), scrape.dt_ns)
            for lo, hi, count in zip(found.lo, found.hi, found.count, strict=True):
                yield (*head, float(lo), float(hi), float(count))


def reasons(label: str, kind: EngineKind, entries: Sequence[Figures]) -> Iterator[tuple[Key, str, str, str]]:
    """Why fields are missing in all rows of an engine: key, state, reason and remedy of a `status` row each.

    Only for a window that has counts; the first one and the one of a restart say by `dt_ns` and `restarts` why they
    have none.
    """
    there = {name for entry in entries for name in entry.values}
    looked = {name: names for entry in entries for name, names in entry.missing.items()}
    for name in _MEASURED:
        if name not in there:
            names = looked.get(name, "")
            reason = (
                f"{kind.title} does not publish {names}" if names else f"{kind.title} has no metric for it"
            )
            # A page that gives others has its metrics on: this version lacks the one.
            remedy = kind.enable if names and not there else ""
            yield ("engine", name, label), "not_supported", reason, remedy
    for name in sorted({name for entry in entries for name in entry.gauged}):
        reason = f"{kind.title} gives its own running average here, not the share in this window"
        yield ("engine", name, label), "sampled", reason, ""
    yield from _bare(label, kind, entries)


def _bare(label: str, kind: EngineKind, entries: Sequence[Figures]) -> Iterator[tuple[Key, str, str, str]]:
    bare = sorted({name for entry in entries for name in entry.bare})
    if bare:
        reason = f"{kind.title} gives no whole histogram of {', '.join(bare)}: means only, no percentiles"
        yield ("engine_bucket", "count", label), "not_supported", reason, ""
