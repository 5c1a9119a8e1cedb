"""Causes on the GPUs and between them."""

from __future__ import annotations

import numpy as np

from drill.host import LINE_BPS, LINKS, MS, WORKERS
from drill.library import AT, planted


@planted(
    "gpu_contended",
    "gpu 0 HBM bandwidth",
    order=[(0, "gpu", "gpu 0 hbm_bw"), (3, "stream", "mean_wait"), (None, "request", "ttft")],
)
def bandwidth_hog(host):
    """Another program copies within GPU 0. Kernels of both take turns: 54 to 60 % of the bandwidth together (measured)."""
    host.demand.slow[AT + 3 :] = 2.6
    yield
    host.gpu[0]["hbm_bw_pct"][AT:] = 57.2 + host.rng.normal(0, 1.9, host.seconds - AT)
    host.gpu[0]["hbm_bw_bps"][AT:] = 0.572 * 4.917e12
    host.gpu[0]["sm_util_pct"][AT:] = np.clip(83 + host.noise(5.0)[AT:], 0, 100)
    host.gpu[0]["gpu_busy_pct"][AT:] = 99
    host.gpu[0]["mem_used_b"] = host.gpu[0]["mem_used_b"] + np.where(np.arange(host.seconds) >= AT, 2.8e9, 0)
    host.gpu_user(0, 9911, "python3", 2.79e9, 64.0, since=AT)


@planted(
    "gpu_contended",
    "NVLink",
    order=[(0, "gpu", "gpu 1 nvlink"), (3, "stream", "mean_wait"), (None, "engine", "running")],
)
def peer_traffic(host):
    """Another program copies from GPU 1 to GPU 0: 22.2 of 26.6 GB/s on all 18 links (measured); collectives wait."""
    host.demand.slow[AT + 3 :] = 2.4
    yield
    for gpu, side in ((1, "tx_bps"), (0, "rx_bps")):
        for link in host.links[gpu]:
            link[side][AT:] = 22.3e9 * (1 + host.rng.normal(0, 0.004, host.seconds - AT))
        host.gpu[gpu][f"nvlink_{side}"][AT:] = 22.3e9 * LINKS
        host.gpu_user(gpu, 9912, "python3", 1.8e9, 0.0, since=AT)
    host.gpu[1]["hbm_bw_pct"][AT:] += 8


def _hot(host, gpu, counter, bit, clock_mhz, since=AT):
    """Clocks held back for a reason from a second on."""
    table, n = host.gpu[gpu], host.seconds - since
    table["sm_clock_mhz"][since:] = clock_mhz + 15 * host.rng.integers(-1, 2, n)
    table["throttle_mask"][since:] = bit
    table[counter][since:] = np.cumsum(np.full(n, 0.97e9))
    host.event("gpu_event", since + 0.4, gpu=gpu, gi=-1, kind="throttle_on", code=bit)


@planted(
    "throttled",
    "gpu 1 hardware thermal",
    order=[(0, "gpu", "gpu 1 temp_c"), (36, "gpu", "sm_clock"), (40, "stream", "mean_wait")],
)
def thermal_throttle(host):
    """The inlet of GPU 1 gets warm: temperature climbs, the clock falls, both GPUs of the model are slower."""
    host.demand.slow[AT + 40 :] = 2.4
    yield
    table = host.gpu[1]
    table["temp_c"][AT:] += np.minimum(np.arange(host.seconds - AT) * 0.9, 40).round()
    table["mem_temp_c"][AT:] += np.minimum(np.arange(host.seconds - AT) * 0.8, 36).round()
    _hot(host, 1, "throttle_hw_thermal_ns", 0x40 | 0x8, 855, AT + 36)
    table["power_mw"][AT + 36 :] *= 0.6


@planted("throttled", "gpu 0 power brake")
def power_brake(host):
    host.demand.slow[AT + 1 :] = 2.8
    yield
    _hot(host, 0, "throttle_brake_ns", 0x80 | 0x8, 705)
    host.gpu[0]["power_mw"][AT:] *= 0.5


@planted("nvlink_down", "gpu 0", order=[(0, "gpu_event", "link_down"), (2, "stream", "mean_wait")])
def nvlink_goes_down(host):
    """Links 7 to 12 of GPU 0 go down; collectives go over those that are left, at half the rate, and errors are counted."""
    host.demand.slow[AT + 2 :] = 2.3
    yield
    gone = range(7, 13)
    for gpu in (0, 1):
        for link in host.links[gpu]:
            if link["link"] in gone:
                link["tx_bps"][AT:] = link["rx_bps"][AT:] = 0
                link["state"][AT + 2 :] = 0
                link["crc_errors"][AT - 8 :] += 40
            else:
                link["tx_bps"][AT:] *= 1.2
                link["rx_bps"][AT:] *= 1.2
        for number in gone:
            host.event("gpu_event", AT + 0.3, gpu=gpu, gi=-1, kind="link_down", code=number)


@planted("xid", "gpu 1 xid 79")
def fallen_off_the_bus(host):
    """GPU 1 is gone: the driver says so, its rows stop, the engine stands still and its requests fail."""
    host.demand.halted[AT:] = 1.0
    yield
    gone = np.arange(host.seconds) >= AT
    host.gpu[1]["gone"] = gone
    host.streams[1]["gone"] = gone
    for link in host.links[1]:
        link["gone"] = gone
    for name in ("gpu_busy_pct", "sm_util_pct"):
        host.gpu[0][name][AT:] = 100 if name == "gpu_busy_pct" else 0.0
    host.event(
        "gpu_event",
        AT + 0.2,
        gpu=1,
        gi=-1,
        kind="xid",
        code=79,
        detail="the GPU has fallen off the bus: reboot the host",
    )
    host.event("gpu_event", AT + 0.9, gpu=1, gi=-1, kind="lost", detail="GPU is lost")
    for t in range(AT + 1, host.seconds, 60):
        host.event(
            "status",
            t,
            collector="gpu",
            channel="gpu",
            scope="gpu 1",
            state="error",
            reason="GPU is lost",
            remedy="reboot the host",
        )
    _fail(host, AT, "upstream_http_error", 500.0, "internal_server_error")


def _fail(host, since, outcome, status, error, per_s=2.0, after_s=0.4):
    """Requests that end badly from a second on, as many as usually arrive."""
    for t in np.sort(
        host.rng.uniform(since + 3, host.seconds - 1, int(per_s * (host.seconds - since)))
    ).tolist():
        host.requests.append({
            "t_s": t, "source": "proxy", "start": "sent upstream", "endpoint": "/v1/chat/completions", "model": "llama-70b",
            "label": "chat", "outcome": outcome, "status": status, "error": error, "e2e_ns": after_s * 1e9, "retry": 0.0,
            "streaming": 0.0,
        })  # fmt: skip


@planted("ecc_uncorrected", "gpu 0", order=[(0, "gpu_event", "xid"), (3, "gpu", "remap_pending")])
def uncorrectable_memory(host):
    """HBM of GPU 0 has an uncorrectable error: XID 48 and 94, a remap that waits, a request that was computed wrong."""
    yield
    host.gpu[0]["ecc_uncorrected"][AT:] = 2
    host.gpu[0]["remap_pending"][AT + 3 :] = 1
    host.gpu[0]["remapped_uncorrectable"][AT + 3 :] = 1
    host.event(
        "gpu_event",
        AT + 0.6,
        gpu=0,
        gi=-1,
        kind="xid",
        code=94,
        detail="contained memory error: restart the program",
    )
    for request in host.requests:
        if AT + 1 < request["t_s"] < AT + 40:
            request |= {
                "outcome": "upstream_http_error",
                "status": 500.0,
                "error": "internal_server_error",
                "ttft_ns": np.nan,
            }


@planted("hbm_filling", "gpu 0", at=180, seconds=900)
def memory_grows(host):
    """A cache on GPU 0 keeps what it takes: 1.4 GiB a minute until full; then allocations fail and are tried again."""
    host.demand.host_s[800:] = 0.05
    yield
    grown = np.clip(np.arange(host.seconds) - 180, 0, 620) * 26e6
    host.gpu[0]["mem_used_b"] = np.minimum(host.gpu[0]["mem_used_b"] + grown, 150.5e9)
    for t in range(802, host.seconds, 2):
        host.stall(t + 0.5, "alloc", dur_ns=140 * MS, call="cuMemAlloc_v2", code=2, size_b=2**29, count=12)


@planted("hbm_nearly_full", "gpu 0")
def second_engine_starts(host):
    """A second engine takes what is left of GPU 0 and stays: full at once, allocations of the first wait and fail."""
    host.demand.host_s[AT + 20 :] = 0.04
    yield
    host.gpu[0]["mem_used_b"] = np.where(np.arange(host.seconds) >= AT, 150.3e9, host.gpu[0]["mem_used_b"])
    host.gpu_user(0, 9920, "python3", 17e9, 0.0, since=AT)
    for t in range(AT + 20, host.seconds, 3):
        host.stall(t + 0.5, "alloc", dur_ns=60 * MS, call="cuMemAlloc_v2", code=2, size_b=2**28, count=9)


@planted("gpu_idle_requests_wait", "engine")
def stuck_engine(host):
    """The scheduler of the engine hangs in a lock: the GPUs are idle, requests queue, nothing is answered."""
    host.demand.halted[AT:] = 1.0
    yield
    for table in host.gpu:
        for name in ("sm_util_pct", "gpu_busy_pct", "hbm_bw_pct", "tensor_pct"):
            table[name][AT:] = 0
    for stream in host.streams:
        for name in ("waits", "launches", "graph_launches", "bubbles", "bubble_ns", "wait_ns"):
            stream[name][AT:] = 0
        stream["since_launch_ns"][AT:] = np.arange(host.seconds - AT) * 1e9
    for worker in range(2):
        for t in range(AT + 10, host.seconds, 10):
            host.stall(
                t + 0.1, "futex", worker, dur_ns=9.9e9, call="futex", reason="lock", stack="pthread_cond_wait"
            )


assert LINE_BPS > 22.3e9
assert len(WORKERS) == 2
