"""A host with two H200s that serves one model, as a recording of it would hold: every channel, noise, side effects.

Levels and scatter are those of recordings of such hosts: an SM clock of 1980 MHz that does not move, links that carry
the same within 1 %, waits of one decode step each, CPU pressure of a fraction of a per cent with single spikes.
"""

from __future__ import annotations

import numpy as np

from drill.engine import Demand, serve
from opusmon.channels import BY_NAME, WHOLE_CONTEXT, WHOLE_GPU
from opusmon.clock import NS, Anchor, Anchors
from opusmon.schema import Batch, StringTable
from opusmon.window import Window

T0 = 7_000 * NS
WALL = 1_790_000_000 * NS
ENGINE, MODEL = "127.0.0.1:8000/metrics", "llama-70b"
API, WORKERS = 4100, (4242, 4243)
"""Processes: the API server, and one worker per GPU."""
TIDS = (4242, 4243)
HANDLES = (0x55D0C84B2E00, 0x55D0C84B3F00)
LINKS, LINE_BPS = 18, 26.562e9
OBJECTIVE = "ttft_p95<1500ms"
POD, SLICE = "/kubepods.slice/pod7f", "/kubepods.slice"
_EDGES_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, np.inf)
MS = 1e6


class Table(dict):
    """The samples of one series: columns by name, shape (seconds,) or one value for all; texts as text."""

    def __init__(self, channel, **columns):
        super().__init__(columns)
        self.channel = channel


class Host:
    """A session being made. Sample i ends about at second i + 1 and covers the second before.

    Attributes:
        demand: what the engine is asked for; change it before `lay_out`.
        tables: the series; change them after it.
    """

    def __init__(self, seconds=600, seed=0, gpus=2, per_s=2.0):
        self.seconds, self.gpus = seconds, gpus
        self.rng = np.random.default_rng(seed)
        self.demand = Demand.usual(seconds, per_s)
        self.strings = StringTable()
        self.events = []
        self.tables = []
        self.served = None

    def lay_out(self):
        """Serve the demand, and draw every channel of a host that does so."""
        self.served = serve(self.demand, self.rng)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._lay_out_gpus()
            self._lay_out_streams()
            self._lay_out_host()
            self._lay_out_engine()
        self._lay_out_requests()
        self._lay_out_stalls()
        self._lay_out_status()

    # -- noise -------------------------------------------------------------------------------------------------------

    def noise(self, sd, rho=0.5):
        """Autocorrelated noise of mean 0, shape (seconds,)."""
        out, last = np.empty(self.seconds), 0.0
        for n, value in enumerate(self.rng.normal(size=self.seconds) * sd * np.sqrt(1 - rho * rho)):
            last = out[n] = rho * last + value
        return out

    def around(self, level, relative=0.05):
        """A level with noise, never below 0."""
        return np.maximum(level * (1 + self.noise(relative)), 0)

    def spiky(self, level, every_s=40, height=5.0):
        """A small figure that is up and down, with a spike now and then."""
        value = level * self.rng.lognormal(0, 0.7, self.seconds)
        spikes = self.rng.uniform(size=self.seconds) < 1 / every_s
        return np.where(spikes, value * height, value)

    # -- the channels ------------------------------------------------------------------------------------------------

    def table(self, channel, **columns):
        """Add a series."""
        made = Table(channel, **columns)
        self.tables.append(made)
        return made

    def event(self, channel, t_s, /, **fields):
        """Add a row at a time."""
        self.events.append((channel, t_s, fields))

    def stall(self, t_s, kind, worker=0, **fields):
        """Add a stall of a worker that ends at a time."""
        who = {
            "pid": WORKERS[worker],
            "tid": TIDS[worker],
            "process": "VLLM::Worker",
            "thread": "VLLM::Worker",
        }
        self.event("stall", t_s, **{**who, "stream": WHOLE_CONTEXT, "count": 1, "kind": kind, **fields})

    def busy(self):
        """Share of each second in which kernels ran: all of the steps but the gaps between them."""
        return np.minimum(self.served.decode_s * 0.9 + self.served.prefill_s, 1)

    def _lay_out_gpus(self):
        served, slow = self.served, self.demand.slow
        busy, decode, prefill = self.busy(), served.decode_s / slow, served.prefill_s / slow
        self.gpu, self.links, self.users = [], [], []
        for gpu in range(self.gpus):
            used = 0.88 * 150.8e9
            hbm = self.around(4 + 42 * decode + 18 * prefill, 0.03)
            power = self.around(1e3 * (125 + 320 * decode + 480 * prefill), 0.03)
            traffic = self.around(2.0e8 + 6e6 * served.tokens / np.maximum(slow, 1), 0.05)
            self.gpu.append(
                self.table(
                    "gpu", gpu=gpu, gi=WHOLE_GPU, mem_used_b=used, mem_total_b=150.8e9, mem_reserved_b=6.4e8,
                    hbm_bw_pct=hbm, hbm_bw_bps=hbm / 100 * 4.917e12, mem_busy_pct=np.minimum(hbm * 1.1, 100),
                    gpu_busy_pct=np.clip(self.around(100 * busy, 0.03), 0, 100).round(),
                    sm_util_pct=np.clip(self.around(72 * decode + 97 * prefill, 0.04), 0, 100),
                    sm_occupancy_pct=np.clip(self.around(20 * busy, 0.05), 0, 100),
                    tensor_pct=self.around(5 * decode + 45 * prefill, 0.08),
                    pcie_tx_bps=self.spiky(2e6), pcie_rx_bps=self.spiky(3e6),
                    nvlink_tx_bps=traffic * LINKS, nvlink_rx_bps=traffic * LINKS,
                    power_mw=power, temp_c=(38 + power / 3e4).round(), mem_temp_c=(41 + power / 3.2e4).round(),
                    sm_clock_mhz=np.full(self.seconds, 1980.0), mem_clock_mhz=3201.0,
                    throttle_mask=np.zeros(self.seconds), throttle_power_ns=np.zeros(self.seconds),
                    throttle_sync_ns=0.0, throttle_sw_thermal_ns=np.zeros(self.seconds),
                    throttle_hw_thermal_ns=np.zeros(self.seconds), throttle_brake_ns=np.zeros(self.seconds),
                    ecc_corrected=0.0, ecc_uncorrected=np.zeros(self.seconds), remapped_correctable=0.0,
                    remapped_uncorrectable=np.zeros(self.seconds), remap_pending=np.zeros(self.seconds), remap_failed=0.0,
                )
            )  # fmt: skip
            self.links.append([
                self.table(
                    "nvlink", gpu=gpu, link=link, tx_bps=traffic * (1 + self.rng.normal(0, 0.004, self.seconds)),
                    rx_bps=traffic * (1 + self.rng.normal(0, 0.004, self.seconds)), state=np.ones(self.seconds),
                    speed_bps=LINE_BPS, replay_errors=np.zeros(self.seconds), recovery_errors=0.0,
                    crc_errors=np.zeros(self.seconds),
                )
                for link in range(LINKS)
            ])  # fmt: skip
            self.gpu_user(gpu, WORKERS[gpu], "VLLM::Worker", used - 6e8, self.gpu[gpu]["sm_util_pct"])

    def gpu_user(self, gpu, pid, name, mem_b, sm_pct, since=0, until=None):
        """A process on a GPU, seen every 5 s."""
        for t in range(max(since, 0) // 5 * 5 + 5, until or self.seconds, 5):
            mem, sm = (value if np.isscalar(value) else value[t - 1] for value in (mem_b, sm_pct))
            self.event(
                "gpu_process", t + 0.3, gpu=gpu, gi=WHOLE_GPU, pid=pid, name=name, user="llm", kind="compute",
                mem_b=mem, sm_pct=round(float(sm)),
            )  # fmt: skip

    def _lay_out_streams(self):
        served = self.served
        waits = np.maximum(self.around(served.steps, 0.02).round(), 0)
        mean = np.where(served.steps > 0, 0.72 * served.decode_s / np.maximum(served.steps, 1e-9), 0)
        counted = self.rng.uniform(size=self.seconds) > 0.12
        timed = self.rng.uniform(size=self.seconds) < 0.25
        self.streams = []
        for gpu in range(self.gpus):
            wait = self.around(mean * NS * waits, 0.05)
            plain = (served.steps * 14 + served.prefills * 520).round()
            gap = self.around((1.6 * MS + self.demand.host_s * NS) * waits, 0.08)
            self.streams.append(
                self.table(
                    "stream", pid=WORKERS[gpu], stream=HANDLES[gpu], tid=TIDS[gpu], process="VLLM::Worker",
                    thread="VLLM::Worker", launches=np.where(counted, plain, np.nan),
                    graph_launches=served.steps.round(), copies=(served.steps * 6).round(),
                    h2d_b=served.prefill_tokens * 8 + served.steps * 4096, d2h_b=served.tokens * 4, d2d_b=0.0,
                    other_b=0.0, waits=waits, wait_ns=wait, wait_max_ns=np.where(waits > 0, 1.4 * mean * NS + 4 * MS, 0),
                    wait_lt_100ms=waits, bubbles=np.where(counted, waits, np.nan),
                    bubble_ns=np.where(counted, gap, np.nan), bubble_max_ns=np.where(counted, 9 * MS, np.nan),
                    since_launch_ns=np.where(counted, 8 * MS, np.nan),
                    timed_launches=np.where(timed, served.steps.round(), 0),
                    launch_call_ns=np.where(timed & (served.steps > 1), self.around(9.2e3, 0.08), np.nan),
                    launch_call_max_ns=np.where(timed, 4e4, np.nan), not_ready=0.0,
                )
            )  # fmt: skip

    def _lay_out_host(self):
        served, n = self.served, self.seconds
        work = served.tokens / 500
        cpu = self.around(4 + 3 * np.minimum(work, 3), 0.12)
        self.host = self.table(
            "host", cpus=32.0, cpu_busy_pct=cpu, cpu_iowait_pct=self.spiky(0.01, 30), cpu_steal_pct=self.spiky(0.03),
            cpu_irq_pct=self.around(0.4, 0.3), load1=2 + cpu / 5, runnable=1.0 + self.rng.poisson(1.6, n),
            blocked=(self.rng.uniform(size=n) < 0.02) * 1.0, switches_per_s=self.around(4000 + 2000 * work, 0.1),
            interrupts_per_s=self.around(5000, 0.1), psi_cpu_some_pct=self.spiky(0.08, 40, 12),
            psi_memory_some_pct=np.zeros(n), psi_memory_full_pct=np.zeros(n), psi_io_some_pct=self.spiky(0.05, 60, 40),
            psi_io_full_pct=self.spiky(0.05, 60, 40), mem_total_b=270.3e9, mem_available_b=self.around(np.full(n, 196e9), 0.001),
            page_cache_b=self.around(np.full(n, 51e9), 0.001), dirty_b=self.spiky(1.2e6), swap_used_b=np.zeros(n),
            swap_in_bps=np.zeros(n), swap_out_bps=np.zeros(n), disk_read_bps=self.spiky(2e4), disk_write_bps=self.spiky(4e5),
            major_faults_per_s=(self.rng.uniform(size=n) < 0.03) * 2.0, direct_reclaim_pages_per_s=np.zeros(n),
            oom_kills=np.zeros(n), net_rx_bps=self.around(2e5 * (1 + work), 0.2), net_tx_bps=self.around(4e5 * (1 + work), 0.2),
        )  # fmt: skip
        self.cgroups = {
            path: self.table(
                "cgroup", cgroup=path, cpu_quota_cores=np.nan, cpu_cores=cpu * 0.29 * share, throttled_pct=np.zeros(n),
                throttled_periods_pct=np.zeros(n), mem_used_b=self.around(np.full(n, 58e9), 0.002), mem_limit_b=np.nan,
                mem_cache_b=41e9, mem_pressure_pct=0.0, cpu_pressure_pct=self.spiky(0.05, 40, 10), oom_kills=np.zeros(n),
                limit_hits=0.0,
            )
            for path, share in ((POD, 0.9), (SLICE, 1.0))
        }  # fmt: skip
        self.processes = {
            pid: self.table(
                "process", pid=pid, name=name, user="llm", cgroup=POD, cpu_pct=np.minimum(self.around(level, 0.08), 104),
                cpu_system_pct=self.around(np.full(n, 2.0), 0.4), run_delay_pct=self.spiky(0.01, 60, 40), rss_b=rss, swap_b=0.0,
                threads=64.0, fds=120.0, major_faults_per_s=0.0, minor_faults_per_s=self.spiky(40, 60, 8),
                voluntary_switches_per_s=self.around(300 * (1 + work), 0.1), forced_switches_per_s=self.spiky(1.0),
                read_bps=0.0, write_bps=self.spiky(8e3), age_ns=(86_400 + np.arange(n)) * NS,
            )
            for pid, name, level, rss in (
                (API, "vllm", 18 + 8 * work, 2.1e9),
                *((pid, "VLLM::Worker", 60 + 35 * np.minimum(work, 1), 7.2e9) for pid in WORKERS[: self.gpus]),
            )
        }  # fmt: skip
        for own in ("gpu", "streams", "stalls", "host", "engine", "proxy"):
            for t in range(5, n, 5):
                self.event(
                    "cost", t + 0.4, collector=own, dt_ns=5 * NS, cpu_ns=self.rng.normal(4e7, 4e6), rss_b=6.2e7, calls=40,
                    call_ns=self.rng.normal(2e7, 2e6), slowest_ns=3e6, slowest="read", late=0, dropped=0,
                )  # fmt: skip

    def _lay_out_engine(self):
        served, n = self.served, self.seconds
        ended = served.ended
        second = np.clip(ended[:, 2].astype(int), 0, n - 1)
        first = np.clip(ended[:, 1].astype(int), 0, n - 1)

        def per_second(at, values=None):
            return np.bincount(at, values, minlength=n).astype(float)

        ttft, e2e = ended[:, 1] - ended[:, 0], ended[:, 2] - ended[:, 0]
        tpot = (ended[:, 2] - ended[:, 1]) / np.maximum(ended[:, 4] - 1, 1)
        itl_n = served.tokens.round()
        self.engine = self.table(
            "engine", engine=ENGINE, model=MODEL, kind="vllm", pid=API, scrape_ns=self.around(np.full(n, 3e6), 0.2), ranks=1.0,
            running=served.running, waiting=served.waiting, kv_used_pct=served.kv_pct.clip(0, 100),
            kv_used_max_pct=served.kv_pct.clip(0, 100), prefix_hit_pct=np.nan, preemptions=served.preemptions,
            input_tps=served.prefill_tokens, output_tps=served.tokens, finished=per_second(second), failed=np.zeros(n),
            graph_pct=np.nan, spec_accept_pct=np.nan, restarts=np.zeros(n),
            ttft_n=per_second(first), ttft_sum_s=per_second(first, ttft), e2e_n=per_second(second),
            e2e_sum_s=per_second(second, e2e), queue_n=per_second(first), queue_sum_s=per_second(first, ended[:, 5]),
            itl_n=itl_n, itl_sum_s=served.decode_s * np.maximum(served.running, 1),
        )  # fmt: skip
        for metric, at, values in (
            ("ttft", first, ttft),
            ("e2e", second, e2e),
            ("queue", first, ended[:, 5]),
            ("tpot", second, tpot),
        ):
            place = np.searchsorted(_EDGES_S, values)
            cells, counts = np.unique(np.stack((at, place)), axis=1, return_counts=True)
            for (t, edge), count in zip(cells.T.tolist(), counts.tolist(), strict=True):
                self.event(
                    "engine_bucket", t + 1.2, engine=ENGINE, model=MODEL, metric=metric, dt_ns=NS,
                    lo_s=_EDGES_S[edge - 1] if edge else 0.0, hi_s=_EDGES_S[edge], count=count,
                )  # fmt: skip

    def _lay_out_requests(self):
        """What the proxy saw; `requests` are dicts until the session is built, so that causes can change them."""
        self.requests = []
        upstream = self.demand.upstream_s
        for number, (start, first, end, given, made, _) in enumerate(self.served.ended.tolist(), 1):
            more = max(upstream[min(int(start), self.seconds - 1)] * self.rng.lognormal(0, 0.15), 0)
            ttft, e2e = first - start + more + 0.002, end - start + more + 0.004
            self.requests.append({
                "t_s": end + more, "source": "proxy", "start": "sent upstream", "endpoint": "/v1/chat/completions",
                "model": MODEL, "label": "chat", "number": number, "outcome": "ok", "stop": "stop", "streaming": 1.0,
                "status": 200.0, "e2e_ns": e2e * NS, "headers_ns": (0.003 + more / 2) * NS, "first_event_ns": ttft * NS,
                "ttft_ns": ttft * NS, "first_answer_ns": ttft * NS, "last_token_ns": e2e * NS - 1e6,
                "tpot_ns": (e2e - ttft) / max(made - 1, 1) * NS, "chunks": made, "input_tokens": given, "output_tokens": made,
                "cache_read_tokens": 0.0, "retry": 0.0, "connect_ns": np.nan, "reused": 1.0, "own_ns": 2.1e5,
                "own_chunk_ns": 1.6e4, "request_b": given * 4.2, "response_b": made * 180,
            })  # fmt: skip

    def _lay_out_stalls(self):
        served, rng = self.served, self.rng
        mean_ns = 0.72 * served.decode_s / np.maximum(served.steps, 1e-9) * NS
        for worker in range(self.gpus):
            for t in np.flatnonzero(mean_ns > 5 * MS).tolist():
                count = max(int(served.steps[t]) - 4, 1)
                for k in range(4):
                    dur = mean_ns[t] * rng.lognormal(0, 0.1)
                    self.stall(t + 0.1 + 0.2 * k + rng.uniform(0, 0.1), "wait", worker, dur_ns=dur, code=0, call="cuEventSynchronize",
                               reason="waiting for the GPU", stack="engine_step;cuEventSynchronize")  # fmt: skip
                self.stall(t + 0.99, "wait", worker, dur_ns=mean_ns[t] * count, code=0, count=count,
                           reason="shorter ones, folded")  # fmt: skip
            for t in rng.uniform(0, self.seconds, self.seconds // 3).tolist():
                self.stall(
                    t,
                    "off_cpu",
                    worker,
                    dur_ns=rng.uniform(6, 20) * MS,
                    call="clock_nanosleep",
                    reason="sleep",
                )
            for t in rng.uniform(0, self.seconds, self.seconds // 60).tolist():
                self.stall(t, "run_queue", worker, dur_ns=rng.uniform(5, 9) * MS, reason="preempted")
            for t in rng.uniform(0, self.seconds, self.seconds // 12).tolist():
                self.stall(t, "futex", worker, dur_ns=rng.uniform(5, 12) * MS, call="futex", reason="lock")

    def _lay_out_status(self):
        for t in range(1, self.seconds, 60):
            for own in ("gpu", "streams", "stalls", "host", "engine", "proxy"):
                self.event("status", t + 0.05, collector=own, state="ok")
            self.event("status", t + 0.06, collector="slo", state="ok", reason=OBJECTIVE)
            for gpu in range(self.gpus):
                self.event(
                    "gpu_device", t + 0.1, gpu=gpu, gi=WHOLE_GPU, name="NVIDIA H200", uuid=f"GPU-{gpu}", driver="580.159.04",
                    memory_kind="device", bus_width_bits=6144, power_limit_mw=7e5, max_sm_clock_mhz=1980, max_mem_clock_mhz=3201,
                    links=LINKS, gpm=1, mig=0,
                )  # fmt: skip

    # -- the view ----------------------------------------------------------------------------------------------------

    def window(self):
        """Everything as a view, as rules and comparisons read it."""
        view = Window(self.strings, Anchors([Anchor(T0, WALL)]), keep_ns=10**16, cap_b=2**40)
        clocks = {name: self._clock() for name in sorted({one.channel for one in self.tables})}
        parts = {}
        for one in self.tables:
            parts.setdefault(one.channel, []).append(self._sampled(one, *clocks[one.channel]))
        for request in self.requests:
            fields = dict(request)
            self.event("request", fields.pop("t_s"), **fields)
        for name in sorted({channel for channel, _, _ in self.events}):
            parts.setdefault(name, []).append(self._events(name))
        for name, rows in parts.items():
            joined = np.concatenate(rows)
            joined = joined[np.argsort(joined["t"], kind="stable")]
            joined = joined[joined["t"] <= T0 + (self.seconds + 1) * NS]
            view.push(Batch(BY_NAME[name], joined))
        return view

    def _clock(self):
        """Ends of the samples of a collector in s, a little late each, and their lengths."""
        ends = (
            np.arange(self.seconds + 1)
            + self.rng.uniform(0, 0.2)
            + self.rng.uniform(0, 0.02, self.seconds + 1)
        )
        return ends[1:], np.diff(ends)

    def _sampled(self, one, ends, lengths):
        kind = BY_NAME[one.channel]
        rows = np.zeros(self.seconds, kind.dtype)
        rows["t"] = T0 + (ends * NS).astype(np.int64)
        columns = {"dt_ns": (lengths * NS).astype(np.int64), **one} if "dt_ns" in kind.by_name else one
        self._fill(rows, kind, columns)
        gone = one.get("gone")
        return rows if gone is None else rows[~gone]

    def _fill(self, rows, kind, columns):
        for field in kind.fields:
            if field.name in columns:
                value = columns[field.name]
                rows[field.name] = self.strings.intern(value) if isinstance(value, str) else value
            elif field.dtype in ("<f4", "<f8"):
                rows[field.name] = np.nan
        assert set(columns) <= {"gone", *kind.by_name}, (
            f"{kind.name} has no {set(columns) - set(kind.by_name)}"
        )

    def _events(self, name):
        kind, mine = BY_NAME[name], [(t, fields) for channel, t, fields in self.events if channel == name]
        rows = np.zeros(len(mine), kind.dtype)
        rows["t"] = [T0 + round(t * NS) for t, _ in mine]
        for field in kind.fields:
            missing = np.nan if field.dtype in ("<f4", "<f8") else 0
            values = [fields.get(field.name, missing) for _, fields in mine]
            rows[field.name] = [self.strings.intern(v) if isinstance(v, str) else v for v in values]
        known = {field.name for field in kind.fields}
        strange = {key for _, fields in mine for key in fields} - known
        assert not strange, f"{name} has no {strange}"
        return rows
