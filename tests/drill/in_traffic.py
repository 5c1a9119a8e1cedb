"""Causes in what is asked: load, lengths, limits, the way to the engine; and sessions in which nothing is wrong."""

from __future__ import annotations

import numpy as np

from drill.host import WORKERS
from drill.library import AT, planted
from drill.on_gpus import bandwidth_hog


@planted("kv_pressure", "engine", per_s=2.0)
def cache_too_small(host):
    """Answers grow long: contexts fill the cache, requests are thrown out of the batch and computed again."""
    host.demand.kv_tokens = 30_000.0
    host.demand.output_tokens = 200.0
    host.demand.input_scale[AT:] = 1.3
    host.demand.arrivals[AT:] *= 1.9
    yield


@planted("slow_upstream", "proxy")
def slow_network(host):
    """The network between proxy and engine loses packets: each request takes 2 s longer, the engine sees nothing."""
    host.demand.upstream_s[AT:] = 2.1
    yield
    for request in host.requests:
        if request["t_s"] > AT and host.rng.uniform() < 0.2:
            request |= {"reused": 0.0, "connect_ns": host.rng.uniform(0.4, 1.4) * 1e9}


@planted("long_inputs", "proxy", until=AT + 180)
def long_inputs(host):
    """A batch of documents is sent for three minutes: prompts seven times as long, all others wait behind them."""
    host.demand.input_scale[AT : AT + 180] = 7.0
    host.demand.kv_tokens = 600_000.0
    yield


@planted("queue_growth", "engine", order=[(None, "engine", "running"), (None, "engine", "waiting")])
def more_arrive_than_leave(host):
    """Traffic triples: the batch is full, the queue rises each second."""
    host.demand.arrivals[AT:] *= 3.6
    host.demand.kv_tokens = 400_000.0
    yield


def _refused(host, status, error, share, since, until, retry_after_s):
    """A share of the requests is refused at once; clients try again after what the server asked for."""
    more = []
    for request in host.requests:
        if since < request["t_s"] < until and host.rng.uniform() < share:
            start = request["t_s"] - request["e2e_ns"] / 1e9
            more.append(request | {
                "t_s": start + 0.05, "outcome": "upstream_http_error", "status": status, "error": error, "e2e_ns": 5e7,
                "ttft_ns": np.nan, "first_event_ns": np.nan, "output_tokens": np.nan, "tpot_ns": np.nan, "streaming": 0.0,
                "retry_after_s": retry_after_s,
            })  # fmt: skip
            request["t_s"] += retry_after_s + 0.1
            request["retry"] = 1.0
    host.requests += more


@planted("rate_limited", "proxy")
def rate_limit_used_up(host):
    """The account's limit of requests is used up: the headroom falls, 40 % are refused with 429 and sent again."""
    yield
    for request in sorted(host.requests, key=lambda one: one["t_s"]):
        left = 1000 - 950 * np.clip((request["t_s"] - AT + 60) / 60, 0, 1)
        request |= {"limit_requests": 1000.0, "left_requests": left if request["t_s"] < AT else 2.0}
    _refused(host, 429.0, "rate_limit_error", 0.4, AT, host.seconds, 3.0)


@planted("overloaded", "proxy")
def service_overloaded(host):
    """The service refuses every second request with 529; those that come through take longer to begin."""
    host.demand.upstream_s[AT:] = 0.4
    yield
    _refused(host, 529.0, "overloaded_error", 0.5, AT, host.seconds, 2.0)


@planted("retries_hide_latency", "proxy", at=0)
def retries(host):
    """Retries all along: clients ask again what they gave up on after two seconds, and single attempts look quick."""
    yield
    more = []
    for request in host.requests:
        if host.rng.uniform() < 0.45:
            start = request["t_s"] - request["e2e_ns"] / 1e9
            more.append(
                request
                | {"t_s": start + 2.0, "outcome": "client_disconnect", "e2e_ns": 2e9, "ttft_ns": np.nan}
            )
            request["t_s"] += 2.5
            request["retry"] = 1.0
    host.requests += more


@planted("request_errors", "proxy")
def wrong_key(host):
    """A client is rolled out with a wrong key: a third of the requests is refused with 401; nothing else moves."""
    yield
    for request in host.requests:
        if request["t_s"] > AT and host.rng.uniform() < 0.33:
            request |= {
                "outcome": "upstream_http_error",
                "status": 401.0,
                "error": "authentication_error",
                "e2e_ns": 4e6,
                "ttft_ns": np.nan,
            }


# -- nothing wrong -------------------------------------------------------------------------------------------------


@planted("", per_s=0.0)
def quiet_idle(host):
    yield


@planted("")
def quiet_steady(host):
    yield


@planted("", seconds=900)
def quiet_two_phases(host):
    """Night, then day: ten times the load within a minute, all of it served."""
    day = 1 / (1 + np.exp(-(np.arange(host.seconds) - 450) / 12))
    host.demand.arrivals[:] = 0.25 + 2.2 * day
    yield


@planted("", allowed=("gpu_bound", "throttled"), seconds=900)
def quiet_batch_job(host):
    """A batch job keeps the GPUs full, at the power cap for a minute at a time: as it should be."""
    host.demand.arrivals[:] = 0
    yield
    for gpu, table in enumerate(host.gpu):
        table["sm_util_pct"] = np.clip(97 + host.noise(1.0), 0, 100)
        table["gpu_busy_pct"] = np.full(host.seconds, 99.0)
        table["tensor_pct"] = 62 + host.noise(1.0)
        table["hbm_bw_pct"] = 38 + host.noise(1.5)
        table["power_mw"] = 6.4e5 + 1e4 * host.noise(1.0)
        capped = (np.arange(host.seconds) // 60) % 3 == 1
        table["sm_clock_mhz"] = np.where(capped, 1755.0, 1980.0)
        table["throttle_mask"] = np.where(capped, 4.0, 0.0)
        table["throttle_power_ns"] = np.cumsum(np.where(capped, 1e9, 0))
        stream = host.streams[gpu]
        stream["launches"] = host.around(np.full(host.seconds, 900.0))
        stream["waits"] = np.full(host.seconds, 4.0)
        stream["wait_ns"] = 9.3e8 * (1 + host.noise(0.01))
        stream["wait_max_ns"] = 2.6e8
        stream["bubbles"], stream["bubble_ns"] = 4.0, 6e6
        stream["timed_launches"] = 0.0
        stream["launch_call_ns"] = np.nan
        for t in range(host.seconds):
            for k in range(4):
                host.stall(
                    t + 0.24 * (k + 1),
                    "wait",
                    gpu,
                    dur_ns=2.3e8,
                    code=0,
                    call="cuStreamSynchronize",
                    reason="waiting for the GPU",
                )


@planted("", seconds=900)
def quiet_restart(host):
    """A planned restart at night: drained first, then the engine is gone for 70 s, loads, captures and serves again."""
    host.demand.arrivals[:] = 1.5
    host.demand.arrivals[330:440] = 0
    yield
    begin, end = 360, 430
    gone = (np.arange(host.seconds) >= begin) & (np.arange(host.seconds) < end)
    for table in (host.engine, *host.streams, *host.processes.values()):
        table["gone"] = gone
    for table in (*host.streams, *(host.processes[pid] for pid in WORKERS)):  # another process from then on
        table["pid"] = np.where(np.arange(host.seconds) < begin, table["pid"], table["pid"] + 1000)
    host.engine["restarts"][end] = 1
    host.engine["running"][begin:440] = host.engine["waiting"][begin:440] = 0
    for table in host.processes.values():
        table["age_ns"] = np.where(
            np.arange(host.seconds) < begin, table["age_ns"], (np.arange(host.seconds) - begin + 1) * 1e9
        )
    used = host.gpu[0]["mem_used_b"]
    loading = np.clip((np.arange(host.seconds) - 375) / 50, 0, 1)
    for worker, table in enumerate(host.gpu):
        table["mem_used_b"] = np.where(np.arange(host.seconds) < begin, used, 6e8 + loading * (used - 6e8))
        who = {"pid": WORKERS[worker] + 1000, "tid": WORKERS[worker] + 1000}
        for t in range(432, 438):
            host.stall(
                t + 0.5,
                "capture",
                worker,
                dur_ns=4e8,
                code=0,
                call="cuStreamEndCapture",
                reason="ended",
                **who,
            )
        for t in range(425, 432):  # allocations and loading are not recorded of a process that is not warm
            host.stall(t + 0.5, "jit", worker, dur_ns=9e8, call="ptxas", code=0, reason="compiles", **who)
            host.stall(t + 0.9, "page_faults", worker, dur_ns=1e9, count=210_000, reason="minor", **who)
    host.host["disk_read_bps"][375:425] = 1.6e9
    host.host["psi_io_some_pct"][375:425] = 6.0
    host.host["page_cache_b"] = host.host["page_cache_b"] + loading * 1e9


# -- something else is found as well, and is not the cause --------------------------------------------------------


def _log_rotation(host, at):
    """A few seconds in which tasks wait for the disk."""
    for name, level in (("psi_io_some_pct", 38.0), ("psi_io_full_pct", 20.0), ("disk_write_bps", 9e8)):
        host.host[name][at : at + 6] = level


@planted("gpu_contended", "gpu 0 HBM bandwidth", beside=("storage_waits",))
def hog_during_a_log_rotation(host):
    """The hog, seconds after the disk was busy: a cause further down by its kind, too short to explain ten minutes."""
    steps = bandwidth_hog(host)
    next(steps)
    yield
    next(steps, None)
    _log_rotation(host, AT - 12)
    _log_rotation(host, AT + 40)


@planted("queue_growth", "engine", beside=("nvlink_errors", "page_fault_storm"))
def burst_on_a_host_with_a_poor_link(host):
    """Traffic triples on a host whose link 3 has counted an error now and then all day, and once had page faults."""
    steps = more_arrive_than_leave(host)
    next(steps)
    yield
    next(steps, None)
    host.links[1][3]["crc_errors"] = np.cumsum(np.isin(np.arange(host.seconds), (40, 171, 455))).astype(float)
    for t in range(100, 104):
        host.stall(t + 0.9, "page_faults", 0, dur_ns=1e9, count=15_000, reason="minor")


@planted("slow_upstream", "proxy", beside=("hbm_nearly_full", "throttled"))
def slow_network_at_a_full_gpu(host):
    """The network loses packets; the engine was given 98.5 % of the memory since ever, and meets its power cap at times."""
    steps = slow_network(host)
    next(steps)
    yield
    next(steps, None)
    for table in host.gpu:
        table["mem_used_b"] = 0.985 * 150.8e9
        capped = (np.arange(host.seconds) // 30) % 5 == 0
        table["throttle_mask"] = np.where(capped, 4.0, 0.0)
        table["throttle_power_ns"] = np.cumsum(np.where(capped, 1e9, 0))
