"""Rules about NVLink: links that are down, that count errors, or that carry much more or less than the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.triage.episodes import Flags
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.rules_gpu import gpu_name
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.triage.sustained import Floats, Spell, floats, grown, number, rows_of, spells

Places = np.ndarray[tuple[Any, ...], np.dtype[np.intp]]

_LEAST_LINKS = 4
"""Of fewer links read together nothing can be said about the usual one. Without GPM four are read at a time."""
_MOST_LINKS = 1 << 15
"""Link numbers are below this: they have 16 bits and a sign."""
_DIRECTIONS = (("tx_bps", "TX"), ("rx_bps", "RX"))


def _ticks(rows: Rows) -> Iterator[Places]:
    """Places of the rows of links that were read together, shape (readings, links), by number of links."""
    if not len(rows):
        return
    same = (np.diff(rows["t"]) == 0) & (np.diff(rows["gpu"]) == 0) & (np.diff(rows["link"]) > 0)
    starts = np.concatenate(([0], np.flatnonzero(~same) + 1))
    sizes = np.diff(starts, append=len(rows))
    for size in np.unique(sizes).tolist():
        if size >= _LEAST_LINKS:
            yield starts[sizes == size][:, None] + np.arange(size)


def _share(scene: Scene, rows: Rows, field: str) -> Floats:
    """Traffic in percent of the line rate."""
    speed = floats(rows, "speed_bps")
    return 100 * floats(rows, field) / np.where(speed > 0, speed, scene.limits["nvlink_line_bps"])


def _link_rows(rows: Rows, on: Flags) -> Iterator[tuple[int, int, Places]]:
    """The links of which some row is on, each with the places of its rows."""
    code = rows["gpu"].astype(np.int32) * _MOST_LINKS + rows["link"]
    for one in np.unique(code[on]).tolist():
        gpu, link = divmod(one, _MOST_LINKS)
        yield gpu, link, np.flatnonzero(code == one)


# -- traffic -----------------------------------------------------------------------------------------------------


def _surely_even(scene: Scene) -> bool:
    """Whether, by what is summarised, no reading of a GPU's links can be one of `_uneven_readings`."""
    told = scene.extremes("nvlink", "tx_bps", "rx_bps", "speed_bps")
    if told is None or (told["speed_bps_min"] <= 0).any():
        return False
    line = scene.limits["nvlink_line_bps"]  # of rows without a speed
    slowest, fastest = np.fmin(told["speed_bps_min"], line), np.fmax(told["speed_bps_max"], line)
    for field, _ in _DIRECTIONS:
        high, low = 100 * told[f"{field}_max"] / slowest, 100 * told[f"{field}_min"] / fastest
        for gpu in np.unique(told["gpu"]).tolist():
            own = told["gpu"] == gpu
            bounds = np.stack([np.fmin.reduce(low[own]), np.fmax.reduce(high[own])])
            if _is_uneven(scene, bounds[1:], bounds[:1]).any():
                return False
    return True


@rule("nvlink", join_s=30, quiet=_surely_even)
def nvlink_hot_link(scene: Scene) -> Iterator[Finding]:
    """A few links carry much more than the usual one.

    Thresholds: `nvlink_hot_ratio` times the median of the GPU's links read together, on at most `nvlink_hot_share_pct`
    of them, and at least `nvlink_busy_pct` of the line rate; a warning from `nvlink_full_pct` on.
    """
    for field, word, rows, share, readings in _uneven_readings(scene):
        median = np.full(len(rows), np.nan)
        on = np.zeros(len(rows), np.bool_)
        for places in readings:
            middle = np.median(share[places], axis=1)[:, None]
            on[places] = _hot(scene, share[places], middle)
            median[places] = np.broadcast_to(middle, places.shape)
        for gpu, link, own in _link_rows(rows, on):
            for one in spells(scene, rows[own], on[own], share[own], count=int(scene.limits["gpu_in_a_row"])):
                usual = float(median[own][one.place])
                yield _hot_link(scene, f"{gpu_name(gpu)} link {link} {word}", field, one, usual)


def _uneven_readings(scene: Scene) -> Iterator[tuple[str, str, Rows, Floats, list[Places]]]:
    """Directions, with readings in which a link is busy and another carries half of it or less.

    Field, word, all rows, their share of the line rate, and the places of those readings. Nearly always there are
    none, and they are what both rules about traffic look at.
    """
    rows = rows_of(scene, "nvlink")
    ticks: list[Places] | None = None
    for field, word in _DIRECTIONS:
        share = _share(scene, rows, field)
        if not (share >= scene.limits["nvlink_busy_pct"]).any():
            continue
        ticks = list(_ticks(rows)) if ticks is None else ticks
        readings = [places[_uneven(scene, share[places])] for places in ticks]
        readings = [places for places in readings if len(places)]
        if readings:
            yield field, word, rows, share, readings


def _uneven(scene: Scene, share: Floats) -> Flags:
    """Readings with a busy link and one that carries far less. A missing link makes both NaN, and nothing is said."""
    return _is_uneven(scene, share.max(axis=1), share.min(axis=1))


def _is_uneven(scene: Scene, highest: Floats, lowest: Floats) -> Flags:
    limits = scene.limits
    ratio = max(limits["nvlink_uneven_ratio"], 1 / limits["nvlink_hot_ratio"])
    return np.asarray((highest >= limits["nvlink_busy_pct"]) & (lowest <= ratio * highest))


def _hot(scene: Scene, share: Floats, median: Floats) -> Flags:
    limits = scene.limits
    hot = (share >= limits["nvlink_hot_ratio"] * median) & (share >= limits["nvlink_busy_pct"])
    few = hot.sum(axis=1, keepdims=True) * 100 <= limits["nvlink_hot_share_pct"] * share.shape[1]
    return np.asarray(hot & few)


def _hot_link(scene: Scene, subject: str, field: str, one: Spell, usual_pct: float) -> Finding:
    limits = scene.limits
    return one.finding(
        "nvlink_hot_link",
        subject,
        WARN if one.weight >= limits["nvlink_full_pct"] else NOTE,
        title=f"NVLink hot: {subject} at {one.weight:.0f} % of its line rate, the usual link at {usual_pct:.0f} %",
        evidence=(
            Evidence("share of line rate", one.weight, "%", limits["nvlink_busy_pct"]),
            Evidence("median of the links", usual_pct, "%"),
            Evidence(field, number(one.row, field), "B/s"),
        ),
        cause="traffic likely goes to one peer, or by a route that uses few of the links",
        next="nvidia-smi topo -m; see which peer those links lead to, and whether other links are down",
    )


@rule("nvlink", join_s=30, quiet=_surely_even)
def nvlink_imbalance(scene: Scene) -> Iterator[Finding]:
    """The links of a GPU share its traffic unevenly, beyond a few hot ones.

    Thresholds: the least link below `nvlink_uneven_ratio` of the busiest, which carries `nvlink_busy_pct` or more of its
    line rate; a warning from `nvlink_full_pct` on.
    """
    for _, word, rows, share, readings in _uneven_readings(scene):
        on, least = np.zeros(len(rows), np.bool_), np.full(len(rows), np.nan)
        for places in _ticks(rows):
            # The busiest link stands for the reading.
            chosen = places[np.arange(len(places)), share[places].argmax(axis=1)]
            least[chosen] = share[places].min(axis=1)
        for places in readings:
            part = share[places]
            hot = _hot(scene, part, np.median(part, axis=1)[:, None]).any(axis=1)
            uneven = part.min(axis=1) < scene.limits["nvlink_uneven_ratio"] * part.max(axis=1)
            on[places[np.arange(len(part)), part.argmax(axis=1)]] = uneven & ~hot
        if on.any():
            yield from _imbalance(scene, word, rows, on, np.where(np.isnan(least), np.nan, share), least)


def _imbalance(
    scene: Scene, word: str, rows: Rows, on: Flags, share: Floats, least: Floats
) -> Iterator[Finding]:
    limits = scene.limits
    for gpu in np.unique(rows["gpu"][on]).tolist():
        own = (rows["gpu"] == gpu) & ~np.isnan(least)
        for one in spells(scene, rows[own], on[own], share[own], count=int(limits["gpu_in_a_row"])):
            low = float(least[own][one.place])
            yield one.finding(
                "nvlink_imbalance",
                f"{gpu_name(gpu)} {word}",
                WARN if one.weight >= limits["nvlink_full_pct"] else NOTE,
                title=f"NVLink of GPU {gpu} uneven: {word} {low:.0f} to {one.weight:.0f} % of the line rate by link",
                evidence=(
                    Evidence("busiest link", one.weight, "%", limits["nvlink_busy_pct"]),
                    Evidence("least link", low, "%", limits["nvlink_uneven_ratio"] * one.weight),
                    Evidence("busiest link's number", number(one.row, "link")),
                ),
                cause="traffic likely goes to some peers only; where all links lead to one switch, a link is slow or down",
                next="nvidia-smi topo -m and nvidia-smi nvlink -s; see link states and errors",
            )


# -- state and errors --------------------------------------------------------------------------------------------


def _surely_up(scene: Scene) -> bool:
    """Whether, by what is summarised, no link was down, and no event tells of one."""
    told = scene.extremes("nvlink", "state")
    return told is not None and not (told["state_min"] <= 0).any() and not len(scene.rows("gpu_event"))


@rule("nvlink", "gpu_event", join_s=30, quiet=_surely_up)
def nvlink_down(scene: Scene) -> Iterator[Finding]:
    """NVLink links went down, or are down while others of the GPU are up.

    All links inactive from the start (no bridge fitted) say nothing.
    """
    yield from _gone_down(scene)
    rows = rows_of(scene, "nvlink")
    down = floats(rows, "state") == 0
    if not down.any():
        return
    on, count = np.zeros(len(rows), np.bool_), np.full(len(rows), np.nan)
    for places in _ticks(rows):
        many = down[places].sum(axis=1)
        count[places[:, 0]] = many
        on[places[:, 0]] = (many > 0) & (many < places.shape[1])
    for gpu in np.unique(rows["gpu"][on]).tolist():
        own = (rows["gpu"] == gpu) & ~np.isnan(count)
        for one in spells(scene, rows[own], on[own], count[own]):
            at = (rows["t"] == one.t) & (rows["gpu"] == gpu)
            links = rows["link"][at & down].tolist()
            yield one.finding(
                "nvlink_down",
                gpu_name(gpu),
                CRIT,
                title=f"NVLink of GPU {gpu}: {_listed(links)} down",
                evidence=(
                    Evidence("links down", float(len(links)), "", 0),
                    Evidence("links", _listed(links)),
                ),
                cause=_DOWN_CAUSE,
                next=_DOWN_NEXT,
            )


_DOWN_CAUSE = (
    "a link failed to train or was switched off; collectives go over the links that are left, or by PCIe"
)
_DOWN_NEXT = (
    "nvidia-smi nvlink -s and -e; look for XID 74 or 144-150 in dmesg; a reset of the GPUs trains them anew"
)


def _gone_down(scene: Scene) -> Iterator[Finding]:
    """Links that went down, by the event."""
    rows = rows_of(scene, "gpu_event")
    kinds = [kind for kind in np.unique(rows["kind"]).tolist() if scene.text(kind) == "link_down"]
    rows = rows[np.isin(rows["kind"], kinds)]
    for gpu, t in sorted(set(zip(rows["gpu"].tolist(), rows["t"].tolist(), strict=True))):
        links = [
            int(code) for code in rows["code"][(rows["gpu"] == gpu) & (rows["t"] == t)] if math.isfinite(code)
        ]
        yield Finding(
            "nvlink_down",
            gpu_name(gpu),
            CRIT,
            t,
            t,
            f"NVLink of GPU {gpu}: {_listed(links)} went down",
            (Evidence("links down", float(len(links)), "", 0), Evidence("links", _listed(links))),
            _DOWN_CAUSE,
            _DOWN_NEXT,
            weight=float(len(links)),
        )


def _listed(links: list[int], most: int = 4) -> str:
    """`link 7`, `links 3, 7`, `18 links`."""
    if len(links) > most:
        return f"{len(links)} links"
    return f"link{'s' if len(links) > 1 else ''} {', '.join(map(str, links))}"


_ERRORS = (
    ("crc_errors", "CRC errors"),
    ("replay_errors", "replays"),
    ("recovery_errors", "recoveries"),
)


def _surely_at_rest(scene: Scene) -> bool:
    return scene.never_grows("nvlink", *(field for field, _ in _ERRORS))


@rule("nvlink", join_s=60, quiet=_surely_at_rest)
def nvlink_errors(scene: Scene) -> Iterator[Finding]:
    """Error counts of a link grow: CRC errors, replays, recoveries.

    The words tell the count since the driver loaded, as it stood at the last growth. Counts that were read further
    apart than `count_gap_s` are not compared.
    """
    rows = rows_of(scene, "nvlink")
    for field, words in _ERRORS:
        counts = floats(rows, field)
        if not (counts > 0).any():
            continue
        for gpu, link, own in _link_rows(rows, counts > 0):
            yield from _growing(scene, gpu, link, field, words, rows[own], counts[own])


def _growing(
    scene: Scene, gpu: int, link: int, field: str, words: str, rows: Rows, counts: Floats
) -> Iterator[Finding]:
    rows, counts = rows[~np.isnan(counts)], counts[~np.isnan(counts)]
    more = grown(rows["t"], counts, scene.limits["count_gap_s"] * NS)
    for one in spells(scene, rows, more > 0, counts):
        yield one.finding(
            "nvlink_errors",
            f"{gpu_name(gpu)} link {link} {field}",
            WARN,
            title=f"NVLink link {link} of GPU {gpu} counts {words}: {one.weight:.0f} since the driver loaded",
            evidence=(
                Evidence(field, one.weight),
                Evidence("since the reading before", float(more[one.place]), "", 0),
            ),
            cause="likely a poor connection: a bridge or cable not seated, a dirty or damaged contact, heat",
            next=f"nvidia-smi nvlink -e -i {gpu}; drain the host if they go on growing",
        )
