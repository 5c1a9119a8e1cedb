"""Rules that put a GPU beside those who use it: launches that nobody sees, requests that wait, a cache that misses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np

from opusmon.channels import KEYFRAME_NS
from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.text import printable
from opusmon.triage.episodes import Flags, Times
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.rules_gpu import GIB, device_at, gpu_name
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import NOTE, WARN
from opusmon.triage.sustained import Floats, Spell, floats, number, rows_of, spells

_SAID_NS = KEYFRAME_NS * 3 // 2
"""A status row holds for this long: it is repeated every 60 s."""
_ENGINE_NS = 15 * NS
"""An engine that was scraped so recently is running."""
_ALIGN_NS = 5 * NS // 2
"""Rows of different channels this close belong together: two of the usual intervals, and jitter."""


# -- launches that nobody sees -----------------------------------------------------------------------------------


@rule("gpu", lookback_s=240, join_s=30)
def gpu_busy_blind(scene: Scene) -> Iterator[Finding]:
    """A GPU works, the probes are on, and no launch, copy or wait is seen.

    Thresholds: `blind_busy_pct` of the time with a kernel, `blind_s` without a sign of any. Launches that are only
    sampled (NaN) are a sign.
    """
    limits = scene.limits
    busy_pct, quiet_s = limits["blind_busy_pct"], limits["blind_s"]
    if not len(scene.rows("status")) or not (floats(scene.rows("gpu"), "gpu_busy_pct") >= busy_pct).any():
        return
    signs = _signs(rows_of(scene, "stream"))
    watching = _watching(scene)
    for (gpu, gi), rows in scene.series("gpu", "gpu", "gi"):
        busy = floats(rows, "gpu_busy_pct")
        t = rows["t"]
        quiet_ns = int(quiet_s * NS)
        quiet = t - _newest(t, signs, scene.t0) > quiet_ns
        on = (busy >= busy_pct) & quiet & _holds(t, watching) & _holds(t - quiet_ns, watching)
        for one in spells(scene, rows, on, busy, count=int(limits["gpu_in_a_row"])):
            yield one.finding(
                "gpu_busy_blind",
                gpu_name(gpu, gi),
                NOTE,
                title=f"GPU {gpu} busy {one.weight:.0f} % of the time, but no launch is seen on this host",
                evidence=(
                    Evidence("gpu_busy_pct", one.weight, "%", busy_pct),
                    Evidence("without a launch for at least", quiet_s, "s", quiet_s),
                    *_holder(scene, gpu, gi, one.t),
                ),
                cause="likely a program whose libcuda is not probed: another container or static copy, or one started "
                "just now",
                next="opusmon doctor; then look at which process holds the GPU (gpu pane)",
                pane="streams",
            )


def _signs(rows: Rows) -> Times:
    """Times of `stream` rows in which something was launched, copied or waited for, or may have been."""
    work = np.zeros(len(rows), np.bool_)
    for name in ("launches", "graph_launches", "copies", "waits"):
        value = floats(rows, name)
        work |= (value > 0) | np.isnan(value)
    return cast("Times", rows["t"][work])


def _watching(scene: Scene) -> tuple[Times, Flags]:
    """When the streams collector said how it is, and whether it was well."""
    rows = rows_of(scene, "status")
    names = {
        number: scene.text(number)
        for number in np.unique(np.stack([rows["collector"], rows["state"]])).tolist()
    }
    streams = [number for number, name in names.items() if name == "streams"]
    well = [number for number, name in names.items() if name == "ok"]
    whole = (rows["channel"] == 0) & (rows["field"] == 0) & (rows["scope"] == 0)
    rows = rows[whole & np.isin(rows["collector"], streams)]
    return cast("Times", rows["t"]), np.isin(rows["state"], well)


def _newest(t: Times, signs: Times, otherwise: int) -> Times:
    """Time of the newest sign before each time; `otherwise` where there is none in sight."""
    place = np.searchsorted(signs, t, side="right")
    return cast("Times", np.append(otherwise, signs)[place])


def _holds(t: Times, said: tuple[Times, Flags]) -> Flags:
    """Whether the newest word before each time is good and not too old."""
    times, good = said
    if not len(times):
        return np.zeros(len(t), np.bool_)
    place = np.searchsorted(times, t, side="right") - 1
    return np.asarray((place >= 0) & good[place] & (t - times[place] <= _SAID_NS))


def _holder(scene: Scene, gpu: int, gi: int, t: int) -> Iterator[Evidence]:
    """The process with the largest share of the GPU at `t`."""
    rows = rows_of(scene, "gpu_process", 15 * NS)
    near = rows[(rows["gpu"] == gpu) & (rows["gi"] == gi) & (rows["t"] <= t) & (rows["t"] > t - 15 * NS)]
    if len(near):
        row = near[int(np.argmax(np.nan_to_num(floats(near, "sm_pct"), nan=-1.0)))]
        yield Evidence("process", f"{scene.text(row['name'])} {row['pid']}")


# -- requests that wait ------------------------------------------------------------------------------------------


@rule("engine", "request_open")
def gpu_idle_requests_wait(scene: Scene) -> Iterator[Finding]:
    """Requests wait while no GPU of this host has work.

    Thresholds: `idle_waiting` requests in an engine's queue, or without a token for `idle_no_token_s` as the proxy
    sees them; `idle_sm_pct` of the SMs of the busiest GPU. What the proxy sees counts only while an engine runs here:
    it may stand before a server far away.
    """
    gpus = scene.rows("gpu", _ALIGN_NS)
    if not len(gpus) or not len(scene.rows("engine", _ENGINE_NS)):
        return
    for rows, waiting, who in (*_queues(scene), *_without_token(scene)):
        yield from _idle(scene, rows, waiting, who, gpus)


def _queues(scene: Scene) -> Iterator[tuple[Rows, Floats, str]]:
    """What each engine says about its queue, where something waits."""
    if not (floats(scene.rows("engine"), "waiting") >= scene.limits["idle_waiting"]).any():
        return
    for (engine, model), rows in scene.series("engine", "engine", "model"):
        served = f" ({scene.text(model)})" if model else ""
        yield rows, floats(rows, "waiting"), f"engine {scene.text(engine)}{served}"


def _without_token(scene: Scene) -> Iterator[tuple[Rows, Floats, str]]:
    """How many requests in flight have had no token for a while, by who sees them, while an engine runs here."""
    least_ns = scene.limits["idle_no_token_s"] * NS
    if scene.stays_below("request_open", no_token_ns=least_ns):
        return
    if not (floats(scene.rows("request_open"), "no_token_ns") >= least_ns).any():
        return
    engines = scene.rows("engine", _ENGINE_NS)["t"]
    for (source,), rows in scene.series("request_open", "source"):
        t, firsts = np.unique(rows["t"], return_index=True)
        wait = np.isnan(floats(rows, "ttft_ns")) & (floats(rows, "no_token_ns") >= least_ns)
        counts = np.add.reduceat(wait.astype(np.float64), firsts)
        here = t - _newest(t, engines, -_ENGINE_NS) <= _ENGINE_NS
        yield rows[firsts], np.where(here, counts, 0.0), f"requests seen by the {scene.text(source)}"


def _idle(scene: Scene, rows: Rows, waiting: Floats, who: str, gpus: Rows) -> Iterator[Finding]:
    limits = scene.limits
    work = floats(gpus, "sm_util_pct")
    busiest = _busiest(rows["t"], gpus["t"], np.where(np.isnan(work), floats(gpus, "gpu_busy_pct"), work))
    on = (waiting >= limits["idle_waiting"]) & (busiest < limits["idle_sm_pct"])
    rank = np.where(np.isnan(busiest), np.nan, waiting)
    for one in spells(scene, rows, on, rank, count=int(limits["gpu_in_a_row"])):
        sm_pct = float(busiest[one.place])
        yield one.finding(
            "gpu_idle_requests_wait",
            who,
            WARN,
            title=f"{one.weight:.0f} waiting ({who}) while no GPU is over {max(sm_pct, 1):.0f} % busy",
            evidence=(
                Evidence("waiting", one.weight, "requests", limits["idle_waiting"], who),
                Evidence("sm_util_pct, busiest GPU", sm_pct, "%", limits["idle_sm_pct"], "NVML"),
                Evidence("running", number(one.row, "running"), "requests", source=who),
                Evidence("kv_used_max_pct", number(one.row, "kv_used_max_pct"), "%", source=who),
            ),
            cause="likely the engine is held up on the host: its scheduler or tokenizer, a lock, loading or compiling; "
            "or the KV cache is full",
            next="see the stalls of the engine's threads at that time, and its KV cache",
            pane="stalls",
        )


def _busiest(t: Times, at: Times, work: Floats) -> Floats:
    """The largest value of any GPU in the time just before each of `t`; NaN where there is none."""
    known = ~np.isnan(work)
    at, work = at[known], work[known]
    first = np.searchsorted(at, t - _ALIGN_NS, side="right")
    last = np.searchsorted(at, t, side="right")
    out = np.full(len(t), np.nan)
    some = last > first
    if some.any():
        bounds = np.stack([first[some], last[some]], axis=1).reshape(-1)
        out[some] = np.maximum.reduceat(np.append(work, -np.inf), bounds)[::2]
    return out


# -- two programs on one GPU -------------------------------------------------------------------------------------


@rule("gpu", join_s=30)
def gpu_contended(scene: Scene) -> Iterator[Finding]:
    """Two programs share a GPU whose memory bandwidth or NVLink is used up: each slows the other down.

    Thresholds: `contended_hbm_pct` with two programs of `contended_sm_pct` each; `nvlink_full_pct` of the line rate of all
    links with two programs whatever they do, for copies run on no SM (a peer copy reads 0 %, H200, measured).
    """
    limits = scene.limits
    users = rows_of(scene, "gpu_process", _USER_NS)
    for (gpu, gi), rows in scene.series("gpu", "gpu", "gi"):
        own = users[(users["gpu"] == gpu) & (users["gi"] == gi)]
        if len(np.unique(own["pid"])) < 2:
            continue
        links = number(device_at(scene, gpu, gi, scene.t1), "links") * limits["nvlink_line_bps"]
        traffic = np.fmax(floats(rows, "nvlink_tx_bps"), floats(rows, "nvlink_rx_bps"))
        for what, share, limit, least_sm in (
            ("HBM bandwidth", floats(rows, "hbm_bw_pct"), "contended_hbm_pct", limits["contended_sm_pct"]),
            ("NVLink", 100 * traffic / links if links > 0 else np.nan * traffic, "nvlink_full_pct", 0.0),
        ):
            on = share >= limits[limit]
            if on.any():
                on &= _number_of_users(own[~(floats(own, "sm_pct") < least_sm)], rows["t"]) >= 2
            for one in spells(scene, rows, on, share, count=int(limits["gpu_in_a_row"])):
                yield _contended(scene, gpu_name(gpu, gi), what, one, limits[limit], own)


_USER_NS = 15 * NS
"""Rows of `gpu_process` come every 5 s."""


def _number_of_users(users: Rows, t: Times) -> Times:
    """How many processes were seen in the 15 s before each instant, shape (n,)."""
    count = np.zeros(len(t), np.int64)
    for pid in np.unique(users["pid"]).tolist():
        seen = users["t"][users["pid"] == pid]
        count += np.searchsorted(seen, t, "right") > np.searchsorted(seen, t - _USER_NS, "right")
    return count


def _contended(scene: Scene, name: str, what: str, one: Spell, limit: float, users: Rows) -> Finding:
    near = users[(users["t"] <= one.t) & (users["t"] > one.t - _USER_NS)]
    _, first = np.unique(near["pid"][::-1], return_index=True)
    newest = near[::-1][first]
    held = np.nan_to_num(floats(newest, "mem_b"))
    by_memory = newest[np.argsort(held, kind="stable")]
    guest = f"{printable(scene.text(by_memory[0]['name']))} {by_memory[0]['pid']}"
    return one.finding(
        "gpu_contended",
        f"{name} {what}",
        WARN,
        title=f"{len(newest)} programs share {name}, {what} at {one.weight:.0f} %",
        evidence=(
            Evidence(f"{what} used", one.weight, "%", limit),
            *(
                Evidence(
                    f"{printable(scene.text(row['name']))} {row['pid']} holds",
                    float(row["mem_b"]) / GIB,
                    "GiB",
                )
                for row in by_memory[:4]
            ),
        ),
        cause=f"likely {guest}, which holds the least memory of them: an engine takes nearly all for its cache",
        next="see the processes of this GPU (gpu pane), and stop or move the one that does not serve",
    )


# -- the cache ---------------------------------------------------------------------------------------------------


@rule("l2", lookback_s=240, join_s=60)
def l2_misses_slow(scene: Scene) -> Iterator[Finding]:
    """L2 misses rose over their threshold while waits or launch calls took longer than in the minute before.

    Thresholds: `l2_miss_pct`, `l2_miss_rise_pct`, `l2_slower_ratio`; `l2_recent_s` against `l2_before_s`. The miss
    share is 100 - `l2_hit_pct`, or the HBM reads per L2 request where only those are measured; never mixed. Streams
    do not tell their GPU: the waits are those of all.
    """
    limits = scene.limits
    streams = scene.rows("stream")
    if not len(streams):
        return
    for (gpu,), rows in scene.series("l2", "gpu"):
        name, miss = "l2 misses", 100 - floats(rows, "l2_hit_pct")
        if np.isnan(miss).all():
            name, miss = "l2_to_hbm_ratio", 100 * floats(rows, "l2_to_hbm_ratio")
        if (miss >= limits["l2_miss_pct"]).any():
            yield from _misses(scene, gpu, name, rows, miss, streams)


def _misses(scene: Scene, gpu: int, name: str, rows: Rows, miss: Floats, streams: Rows) -> Iterator[Finding]:
    limits = scene.limits
    rows, miss = rows[~np.isnan(miss)], miss[~np.isnan(miss)]
    t = rows["t"]
    now_pct, before_pct = _compared(scene, t, t, miss, np.ones(len(t)))
    rose = (now_pct >= limits["l2_miss_pct"]) & (now_pct - before_pct >= limits["l2_miss_rise_pct"])
    if not rose.any():
        return
    slower, words = np.full(len(t), np.nan), np.zeros(len(t), np.int64)
    kinds = (("wait_ns", "waits", "waits"), ("launch_call_ns", "timed_launches", "launch calls"))
    for place, (amount, weight, _) in enumerate(kinds):
        count = np.nan_to_num(floats(streams, weight))
        total = np.nan_to_num(floats(streams, amount)) * (count if weight == "timed_launches" else 1)
        now, before = _compared(scene, t, streams["t"], total, count)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(before > 0, now / before, np.nan)
        better = ~(ratio <= slower) & ~np.isnan(ratio)
        slower, words = np.where(better, ratio, slower), np.where(better, place, words)
    for one in spells(scene, rows, rose & (slower >= limits["l2_slower_ratio"]), slower):
        at = one.place
        what = kinds[int(words[at])][2]
        yield one.finding(
            "l2_misses_slow",
            gpu_name(gpu),
            WARN,
            title=f"L2 of GPU {gpu} misses {now_pct[at]:.0f} %, {what} take {one.weight:.1f} times as long",
            evidence=(
                Evidence(name, float(now_pct[at]), "%", limits["l2_miss_pct"]),
                Evidence(f"{name} before", float(before_pct[at]), "%"),
                Evidence(f"{what} against before", one.weight, "", limits["l2_slower_ratio"]),
                Evidence("hbm_read_bps", number(one.row, "hbm_read_bps"), "B/s"),
            ),
            cause="the working set likely outgrew L2: larger batches, longer contexts, or a second program on the GPU",
            next="see what changed with it: running requests, input sizes, processes on the GPU",
        )


def _compared(scene: Scene, at: Times, t: Times, total: Floats, count: Floats) -> tuple[Floats, Floats]:
    """Mean (sum of `total` over sum of `count`) of the recent past of each of `at`, and of the time before that."""
    recent, before = (int(scene.limits[name] * NS) for name in ("l2_recent_s", "l2_before_s"))
    sums = np.concatenate(([0.0], np.cumsum(total))), np.concatenate(([0.0], np.cumsum(count)))
    edges = [np.searchsorted(t, at - back, side="right") for back in (before + recent, recent, 0)]
    # Where the range before is not in sight as a whole there is nothing to compare with.
    seen = (at - (before + recent) >= t[0]) if len(t) else np.zeros(len(at), np.bool_)
    means = []
    for a, b in ((edges[1], edges[2]), (edges[0], edges[1])):
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (sums[0][b] - sums[0][a]) / (sums[1][b] - sums[1][a])
        means.append(np.where(seen, mean, np.nan))
    return means[0], means[1]
