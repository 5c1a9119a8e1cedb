"""A day of a host that serves a model on 8 GPUs, as the recorder would write it: one chunk per channel and second.

24 h have about 22 million rows: 144 NVLink links, 24 streams, stalls, the host and its processes, an engine with
histograms, a proxy that sees 4 requests a second. Load follows the day; for an hour at its height the engine is past its
knee. Ten-minute incidents are spread over the day: stalls with CPU starvation, throttling, a hot link, HBM filling, a slow
upstream with errors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from opusmon.channels import BY_NAME, WHOLE_GPU
from opusmon.clock import NS, Anchor
from opusmon.recording import store
from opusmon.recording.stage import Stage
from opusmon.schema import Batch, Rows, StringTable

T0 = 5_000 * NS
WALL_NS = 1_700_000_000 * NS
BLOCK_S = 600
GPUS, LINKS, STREAMS, PROCESSES, OPEN = 8, 18, 24, 12, 16
INCIDENTS = ("starved", "throttled", "hot link", "filling", "slow upstream")
"""One of them each `INCIDENT_S`, in turn, for one block."""
INCIDENT_S = 9_000
BATCH_CAP = 32
"""Requests that the engine works on at once: its knee."""


class Day:
    """The rows of one block of ten minutes after the other."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        self.strings = StringTable()
        self.rng = np.random.default_rng(5)

    def block(self, start_s: int) -> list[Batch]:
        """Rows of all channels, in time order each."""
        n = min(BLOCK_S, self.seconds - start_s)
        at = np.arange(start_s + 1, start_s + n + 1)
        place, inside_s = divmod(start_s, INCIDENT_S)
        wrong = INCIDENTS[place % len(INCIDENTS)] if 3_000 <= inside_s < 3_000 + BLOCK_S else ""
        demand = self._demand(at)
        made = {
            **self._gpus(at, demand, wrong),
            **self._cuda(at, wrong),
            **self._host(at, wrong),
            **self._api(at, demand, wrong),
        }
        return [Batch(BY_NAME[name], rows) for name, rows in made.items()]

    def rows(self, channel: str, at_s, each: int = 1, late_s: float = 0.0, /, **columns) -> Rows:
        """`each` rows per instant; what is not named is NaN or 0. Texts are interned."""
        kind = BY_NAME[channel]
        rows = np.zeros(len(at_s) * each, kind.dtype)
        for field in kind.fields:
            if field.name in columns:
                value = columns[field.name]
                rows[field.name] = self.strings.intern(value) if isinstance(value, str) else value
            elif field.dtype in ("<f4", "<f8"):
                rows[field.name] = np.nan
        late = self.rng.integers(0, 2_000_000, len(at_s)) + int(late_s * NS)
        rows["t"] = T0 + np.repeat((np.asarray(at_s) * NS).astype(np.int64) + late, each)
        if "dt_ns" in rows.dtype.names and "dt_ns" not in columns:
            rows["dt_ns"] = NS
        return rows

    def noisy(self, middle, n: int, share: float = 0.05):
        """Values around a middle, as gauges read."""
        return np.asarray(middle) * (1 + share * self.rng.normal(size=n))

    def counts(self, middle, n: int):
        """Whole numbers, as counters read."""
        return self.rng.poisson(middle, n)

    def _demand(self, at):
        """Requests in the system: few at night, for an hour of the day more than the engine takes."""
        share = at % 86_400 / 86_400
        level = 4 + 20 * np.sin(np.pi * share) ** 2 + 50 * ((share > 0.5) & (share < 0.5 + 1 / 24))
        return np.maximum(1, np.round(level * self.rng.lognormal(0, 0.3, len(at))))

    def _gpus(self, at, demand, wrong):
        n = len(at)
        m = n * GPUS
        busy = np.repeat(np.minimum(97, 30 + 2 * demand), GPUS)
        filled = 130e9 + np.arange(n) * (30e6 if wrong == "filling" else 0.0)
        held = np.cumsum(np.full(n, 0.3e9)) if wrong == "throttled" else np.zeros(n)
        gpu = self.rows(
            "gpu", at, GPUS, gpu=np.tile(np.arange(GPUS), n), gi=WHOLE_GPU,
            mem_total_b=150e9, mem_reserved_b=600e6, mem_used_b=np.repeat(np.minimum(filled, 149e9), GPUS),
            hbm_bw_pct=np.minimum(94, self.noisy(0.7 * busy, m)), hbm_bw_bps=self.noisy(3e12, m),
            mem_busy_pct=self.noisy(40, m), gpu_busy_pct=busy, sm_util_pct=self.noisy(0.8 * busy, m),
            sm_occupancy_pct=self.noisy(30, m), tensor_pct=self.noisy(25, m),
            pcie_tx_bps=self.noisy(1e9, m), pcie_rx_bps=self.noisy(1e9, m),
            nvlink_tx_bps=self.noisy(9e10, m), nvlink_rx_bps=self.noisy(9e10, m),
            power_mw=self.noisy(500e3, m), temp_c=np.round(self.noisy(60, m, 0.02)), mem_temp_c=70,
            sm_clock_mhz=1200 if wrong == "throttled" else 1980, mem_clock_mhz=3201,
            throttle_mask=0x20 if wrong == "throttled" else 0, throttle_power_ns=5e9, throttle_sync_ns=0,
            throttle_sw_thermal_ns=5e9 + np.repeat(held, GPUS), throttle_hw_thermal_ns=0, throttle_brake_ns=0,
            ecc_corrected=0, ecc_uncorrected=0, remapped_correctable=0, remapped_uncorrectable=0, remap_pending=0,
            remap_failed=0,
        )  # fmt: skip
        each = GPUS * LINKS
        hot = np.tile(np.arange(each) % LINKS == 7, n) if wrong == "hot link" else np.zeros(n * each, bool)
        nvlink = self.rows(
            "nvlink", at, each, gpu=np.tile(np.repeat(np.arange(GPUS), LINKS), n),
            link=np.tile(np.arange(LINKS), n * GPUS), tx_bps=self.noisy(np.where(hot, 23e9, 5e9), n * each),
            rx_bps=self.noisy(5e9, n * each), state=1, speed_bps=26.5e9, replay_errors=0, recovery_errors=0, crc_errors=0,
        )  # fmt: skip
        third = at[at % 3 == 0]
        l2 = self.rows(
            "l2", third, GPUS, 0.3, gpu=np.tile(np.arange(GPUS), len(third)), source="perfmon 1",
            l2_hit_pct=self.noisy(60, len(third) * GPUS), sm_active_pct=self.noisy(80, len(third) * GPUS),
        )  # fmt: skip
        fifth, minute = at[at % 5 == 0], at[at % 60 == 0]
        using = self.rows(
            "gpu_process", fifth, GPUS, 0.1, gpu=np.tile(np.arange(GPUS), len(fifth)), gi=WHOLE_GPU,
            pid=100 + np.tile(np.arange(GPUS), len(fifth)), name="vllm", kind="compute", mem_b=120e9, sm_pct=60,
        )  # fmt: skip
        device = self.rows(
            "gpu_device", minute, GPUS, 0.1, gpu=np.tile(np.arange(GPUS), len(minute)), gi=WHOLE_GPU,
            name="NVIDIA H200", max_sm_clock_mhz=1980, links=LINKS, gpm=1, mig=0,
        )  # fmt: skip
        return {"gpu": gpu, "nvlink": nvlink, "l2": l2, "gpu_process": using, "gpu_device": device}

    def _cuda(self, at, wrong):
        n, m = len(at), len(at) * STREAMS
        stream = np.tile(np.arange(STREAMS), n)
        slow = 4.0 if wrong == "starved" else 1.0
        streams = self.rows(
            "stream", at, STREAMS, 0.5, pid=100 + stream % GPUS, stream=0x55D000000000 + 64 * stream,
            tid=1000 + stream % GPUS, process="vllm", thread="worker", launches=self.counts(300, m),
            graph_launches=self.counts(50, m), copies=self.counts(10, m), h2d_b=self.noisy(1e6, m),
            d2h_b=self.noisy(1e5, m), d2d_b=0, other_b=0, waits=self.counts(50, m), wait_ns=self.noisy(4e8, m),
            wait_max_ns=self.noisy(2e7, m), wait_lt_10us=0, wait_lt_100us=self.counts(5, m),
            wait_lt_1ms=self.counts(10, m), wait_lt_10ms=self.counts(30, m), wait_lt_100ms=self.counts(5, m),
            wait_lt_1s=0, wait_ge_1s=0, bubbles=self.counts(50, m), bubble_ns=self.noisy(1e8 * slow, m),
            bubble_max_ns=self.noisy(5e6, m), since_launch_ns=self.noisy(1e6, m), timed_launches=self.counts(20, m),
            launch_call_ns=self.noisy(6e3 * slow, m), launch_call_max_ns=self.noisy(4e4, m), not_ready=0,
        )  # fmt: skip
        k = n * (30 if wrong == "starved" else 2)
        when = np.sort(self.rng.uniform(at[0] - 1, at[-1], k))
        starved = self.rng.random(k) < (0.9 if wrong == "starved" else 0.05)
        thread = self.rng.integers(0, GPUS, k)
        names = {
            word: self.strings.intern(word)
            for word in ("run_queue", "preempted", "wait", "waiting for the GPU")
        }
        stalls = self.rows(
            "stall", when, kind=np.where(starved, names["run_queue"], names["wait"]),
            reason=np.where(starved, names["preempted"], names["waiting for the GPU"]), pid=100 + thread,
            tid=1000 + thread, process="vllm", thread="worker", count=1, call="cuStreamSynchronize",
            dur_ns=5e6 * 10 ** self.rng.uniform(0, 0.8, k), stack="main;run;step;cuStreamSynchronize",
        )  # fmt: skip
        return {"stream": streams, "stall": stalls[np.argsort(stalls["t"], kind="stable")]}

    def _host(self, at, wrong):
        n, m = len(at), len(at) * PROCESSES
        pressed = 50 if wrong == "starved" else 2
        host = self.rows(
            "host", at, 1, 0.2, cpus=128, cpu_busy_pct=self.noisy(30, n), cpu_iowait_pct=0.1, cpu_steal_pct=0,
            cpu_irq_pct=self.noisy(1, n), load1=self.noisy(40, n), runnable=self.counts(40, n), blocked=0,
            switches_per_s=self.noisy(2e5, n), interrupts_per_s=self.noisy(1e5, n),
            psi_cpu_some_pct=self.noisy(pressed, n), psi_memory_some_pct=0, psi_io_some_pct=self.noisy(0.5, n),
            mem_total_b=2e12, mem_available_b=self.noisy(1.5e12, n, 0.001), oom_kills=0, major_faults_per_s=0,
            disk_read_bps=0, disk_write_bps=self.noisy(1e6, n), net_rx_bps=self.noisy(1e7, n),
            net_tx_bps=self.noisy(1e7, n), swap_used_b=0, swap_in_bps=0, swap_out_bps=0,
        )  # fmt: skip
        groups = [self.strings.intern(f"system.slice/vllm-{k}.service") for k in range(2)]
        cgroup = self.rows(
            "cgroup", at, 2, 0.2, cgroup=np.tile(groups, n), cpu_quota_cores=64, cpu_cores=self.noisy(20, 2 * n),
            throttled_pct=0, throttled_periods_pct=0, mem_used_b=self.noisy(3e10, 2 * n, 0.001), mem_limit_b=6.4e10,
            mem_pressure_pct=0, cpu_pressure_pct=self.noisy(1, 2 * n), oom_kills=0, limit_hits=0,
        )  # fmt: skip
        process = self.rows(
            "process", at, PROCESSES, 0.2, pid=100 + np.tile(np.arange(PROCESSES), n), name="vllm", user="serve",
            cpu_pct=self.noisy(100, m), cpu_system_pct=self.noisy(10, m),
            run_delay_pct=self.noisy(30 if wrong == "starved" else 0.5, m), rss_b=self.noisy(8e9, m, 0.001), swap_b=0,
            threads=120, fds=300, major_faults_per_s=0, minor_faults_per_s=self.counts(100, m),
            voluntary_switches_per_s=self.counts(3000, m), forced_switches_per_s=self.counts(10, m), read_bps=0,
            write_bps=0, age_ns=np.repeat(at * 1e9, PROCESSES),
        )  # fmt: skip
        return {"host": host, "cgroup": cgroup, "process": process}

    def _api(self, at, demand, wrong):
        n = len(at)
        about = {"engine": "127.0.0.1:8000/metrics", "model": "llama-70b"}
        running = np.minimum(demand, BATCH_CAP)
        ended = self.counts(running / 8, n)
        engine = self.rows(
            "engine", at, 1, 0.4, **about, kind="vllm", pid=100, scrape_ns=self.noisy(4e6, n), ranks=1, running=running,
            waiting=demand - running, kv_used_pct=self.noisy(2 * running, n), kv_used_max_pct=2.2 * running,
            prefix_hit_pct=self.noisy(30, n), preemptions=0, input_tps=self.noisy(500 * running / 8, n),
            output_tps=self.noisy(40 * running, n), finished=ended, failed=0, graph_pct=99, restarts=0,
            ttft_n=ended, ttft_sum_s=ended * 0.4, e2e_n=ended, e2e_sum_s=ended * 8, itl_n=40 * running, itl_sum_s=running,
            queue_n=ended, queue_sum_s=ended * 0.1,
        )  # fmt: skip
        metrics = [
            self.strings.intern(name) for name in ("ttft", "itl", "e2e", "queue", "tpot") for _ in range(8)
        ]
        edges = 0.01 * 2.0 ** np.tile(np.arange(9), (5, 1))
        buckets = self.rows(
            "engine_bucket", at, 40, 0.4, **about, metric=np.tile(metrics, n), lo_s=np.tile(edges[:, :-1].ravel(), n),
            hi_s=np.tile(edges[:, 1:].ravel(), n), count=1 + self.counts(2, 40 * n),
        )  # fmt: skip
        k = 4 * n
        seen = {
            "source": "proxy",
            "start": "sent upstream",
            "endpoint": "/v1/chat/completions",
            "model": "llama-70b",
        }
        labels = [self.strings.intern(word) for word in ("chat", "agent", "batch")]
        size = np.exp(self.rng.uniform(5, 9.5, k))
        slow = wrong == "slow upstream"
        ttft = self.rng.lognormal(np.log(0.25), 0.4, k) * 1e9 * (4 if slow else 1) + 20_000 * size
        bad = self.rng.random(k) < (0.2 if slow else 0.001)
        names = {word: self.strings.intern(word) for word in ("ok", "upstream_http_error")}
        requests = self.rows(
            "request", np.sort(self.rng.uniform(at[0] - 1, at[-1], k)), **seen,
            label=self.rng.choice(labels, k), number=4 * at[0] + np.arange(k),
            outcome=np.where(bad, names["upstream_http_error"], names["ok"]), status=np.where(bad, 529, 200), streaming=1,
            ttft_ns=np.where(bad, np.nan, ttft), e2e_ns=ttft + self.noisy(6e9, k), headers_ns=ttft / 2,
            first_event_ns=ttft / 2, first_answer_ns=ttft, last_token_ns=ttft + 5.9e9, tpot_ns=self.noisy(3e7, k),
            chunks=200, gap_mean_ns=self.noisy(3e7, k), gap_p95_ns=self.noisy(5e7, k), gap_max_ns=self.noisy(2e8, k),
            request_b=size * 4, response_b=9e3, input_tokens=size.round(), output_tokens=self.counts(200, k),
            cache_read_tokens=0, retry=(self.rng.random(k) < (0.3 if slow else 0.001)).astype(float),
            limit_requests=1000, left_requests=self.counts(800, k), own_ns=self.noisy(2e5, k), own_chunk_ns=5e3, reused=1,
        )  # fmt: skip
        flying = self.rows(
            "request_open", at, OPEN, 0.6, **seen, label=labels[0], number=np.repeat(at // 8 * OPEN, OPEN) + np.tile(range(OPEN), n),
            phase="answering", age_ns=self.noisy(3e9, OPEN * n, 0.3), ttft_ns=3e8, chunks=self.counts(80, OPEN * n),
            silent_ns=self.noisy(3e7, OPEN * n), no_token_ns=self.noisy(3e7, OPEN * n),
        )  # fmt: skip
        status = self.rows(
            "status", at[at % 60 == 0], 1, 0.1, collector="slo", scope="ttft_p95<800ms", reason="ttft_p95<800ms",
            state="ok",
        )  # fmt: skip
        return {
            "engine": engine,
            "engine_bucket": buckets,
            "request": requests[np.argsort(requests["t"], kind="stable")],
            "request_open": flying,
            "status": status,
        }


def write(path: Path, hours: float) -> None:
    """Write the file through the writer's own stage, a transaction per second of the session."""
    day = Day(int(hours * 3600))
    connection, _ = store.create(path)
    connection.execute("PRAGMA synchronous=OFF")
    stage = Stage(day.strings)
    stage.build([], anchors=[Anchor(T0, WALL_NS)]).apply(connection)
    for start_s in range(0, day.seconds, BLOCK_S):
        batches = day.block(start_s)
        edges = T0 + np.arange(start_s, start_s + BLOCK_S + 1) * NS
        edges[-1] += NS  # rows of the last second that are a little late
        cuts = [(batch, np.searchsorted(batch.rows["t"], edges, side="right")) for batch in batches]
        for s in range(BLOCK_S):
            second = [
                Batch(batch.channel, batch.rows[cut[s] : cut[s + 1]])
                for batch, cut in cuts
                if cut[s] < cut[s + 1]
            ]
            if second:
                stage.build(second).apply(connection)
    stage.finish([("closed", "0")]).apply(connection)
    store.finish(connection)
