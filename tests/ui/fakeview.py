"""A view in memory over rows of the real channels, and sessions for the panes to draw."""

from __future__ import annotations

import math

import numpy as np

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchor, Anchors
from opusmon.schema import StringTable
from opusmon.ui.glyphs import ASCII
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.gpu import GpuPane
from opusmon.ui.text import STYLES, line_cells, plain

T0 = 1_000 * NS
"""Monotonic start of the sessions."""
END = T0 + 60 * NS
"""Time of the last row of a session of one minute."""
NAN = math.nan
GIB = 1024**3
PANE = GpuPane()


class FakeView:
    """Rows by channel name; the queries are written out plainly, row by row."""

    def __init__(self, *, wall_ns: int | None = None) -> None:
        self.version = 0
        self.channels = {}
        self.strings = StringTable()
        self.anchors = Anchors([Anchor(0, wall_ns)] if wall_ns is not None else [])
        self._records: dict[str, list[dict]] = {}
        self._arrays: dict[str, np.ndarray] = {}

    def add(self, channel: str, t: int, /, **fields) -> None:
        """Append a row; text is interned, fields left out are NaN (or 0 for whole numbers)."""
        kind = BY_NAME[channel]
        self.channels[channel] = kind
        row = {"t": t}
        for field in kind.fields:
            value = fields.pop(field.name, NAN if field.dtype in ("<f4", "<f8") else 0)
            row[field.name] = self.strings.intern(value) if field.text and isinstance(value, str) else value
        assert not fields, f"{channel} has no {sorted(fields)}"
        self._records.setdefault(channel, []).append(row)
        self._arrays.pop(channel, None)
        self.version += 1

    def rows(self, channel: str) -> np.ndarray:
        if channel not in self._arrays:
            kind = BY_NAME[channel]
            names = ("t", *(field.name for field in kind.fields))
            records = [tuple(row[name] for name in names) for row in self._records.get(channel, [])]
            self._arrays[channel] = kind.rows(records)
        return self._arrays[channel]

    def query(self, channel, t0, t1):
        if channel not in self.channels:
            return np.empty(0, dtype=[("t", "<i8")])
        rows = self.rows(channel)
        return rows[(rows["t"] > t0) & (rows["t"] <= t1)]

    def latest(self, channel, t, lookback_ns):
        rows = self.query(channel, t - lookback_ns, t)
        if not len(rows):
            return rows
        newest = {row: place for place, row in enumerate(rows[list(BY_NAME[channel].key)].tolist())}
        return rows[sorted(newest.values())]

    def binned(self, channel, fields, t0, t1, step_ns):
        rows = self.query(channel, t0, t1)
        key = BY_NAME[channel].key
        dtype = [("t", "<i8"), *((k, "<i4") for k in key), ("n", "<u4")]
        for name in fields:
            dtype += [(f"{name}_{part}", "<f8") for part in ("min", "max", "mean")] + [(f"{name}_n", "<u4")]
        groups: dict[tuple, list] = {}
        for place in range(len(rows)):
            row = rows[place]
            groups.setdefault((int(row["t"]) // step_ns * step_ns, *(int(row[k]) for k in key)), []).append(
                place
            )
        out = np.zeros(len(groups), dtype=dtype)
        for place, (group, members) in enumerate(sorted(groups.items())):
            out[place]["t"], out[place]["n"] = group[0], len(members)
            for name, value in zip(key, group[1:], strict=True):
                out[place][name] = value
            for name in fields:
                values = rows[name][members].astype(float)
                values = values[~np.isnan(values)]
                out[place][f"{name}_n"] = len(values)
                for part in ("min", "max", "mean"):
                    out[place][f"{name}_{part}"] = getattr(np, part)(values) if len(values) else NAN
        return out


def gpu_fields(**changes):
    """A busy H200, with the numbers of `h200` measurements: 4.8 TB/s HBM, 140.4 GiB."""
    fields = {
        "gi": -1,
        "dt_ns": NS,
        "mem_used_b": 98.0 * GIB,
        "mem_total_b": 150_754_820_096,
        "mem_reserved_b": 644_939_776,
        "hbm_bw_pct": 71.0,
        "hbm_bw_bps": 3.42e12,
        "mem_busy_pct": 60.0,
        "gpu_busy_pct": 99.0,
        "sm_util_pct": 84.0,
        "sm_occupancy_pct": 38.0,
        "tensor_pct": 25.0,
        "pcie_tx_bps": 0.2e9,
        "pcie_rx_bps": 2.7e9,
        "nvlink_tx_bps": 99.8e9,
        "nvlink_rx_bps": 0.0,
        "power_mw": 612_000,
        "temp_c": 63,
        "mem_temp_c": 70,
        "sm_clock_mhz": 1830,
        "mem_clock_mhz": 3201,
        "throttle_mask": 0,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "remapped_correctable": 0,
        "remapped_uncorrectable": 0,
        "remap_pending": 0,
        "remap_failed": 0,
    }
    assert set(changes) <= {"t", *(f.name for f in BY_NAME["gpu"].fields)}
    return {**fields, **changes}


def device_fields(**changes):
    fields = {
        "gi": -1,
        "name": "NVIDIA H200",
        "uuid": "GPU-0",
        "driver": "580.159.04",
        "memory_kind": "device",
        "bus_width_bits": 6016,
        "power_limit_mw": 700_000,
        "max_sm_clock_mhz": 1980,
        "max_mem_clock_mhz": 3201,
        "links": 18,
        "gpm": 1,
        "mig": 0,
    }
    return {**fields, **changes}


def link_fields(link, **changes):
    fields = {
        "link": link,
        "tx_bps": 0.0,
        "rx_bps": 0.0,
        "state": 1,
        "speed_bps": 26.562e9,
        "replay_errors": 0,
        "recovery_errors": 0,
        "crc_errors": 0,
    }
    return {**fields, **changes}


def wave(second: int, gpu: int) -> float:
    """A load that rises and falls, 0 to 90 %."""
    return round(45 + 45 * math.sin(second / 9 + gpu), 3)


def session(
    gpus: int, *, seconds: int = 60, links: int = 18, view: FakeView | None = None, **changes
) -> FakeView:
    """GPUs under a wave of load, one row a second; the last second reads as `gpu_fields` says."""
    view = view or FakeView(wall_ns=1_795_956_000 * NS)
    end = T0 + seconds * NS
    for gpu in range(gpus):
        view.add("gpu_device", end - 20 * NS, gpu=gpu, **device_fields())
    for second in range(1, seconds + 1):
        t = T0 + second * NS
        for gpu in range(gpus):
            load = (
                {}
                if second == seconds
                else {"hbm_bw_pct": wave(second, gpu), "sm_util_pct": wave(second, gpu)}
            )
            view.add("gpu", t, gpu=gpu, **gpu_fields(**{**load, **(changes if second == seconds else {})}))
    for gpu in range(gpus):
        for link in range(links):
            view.add("nvlink", end, gpu=gpu, **link_fields(link, tx_bps=99.8e9 / links))
    return view


def end_of(seconds: int = 60) -> int:
    """The playhead of a session: 0.4 s after its last row."""
    return T0 + seconds * NS + 400_000_000


def add_processes(view: FakeView, t: int, gpus: int, *, each: int = 1) -> None:
    for gpu in range(gpus):
        for number in range(each):
            view.add(
                "gpu_process",
                t,
                gpu=gpu,
                gi=-1,
                pid=12_000 + 100 * gpu + number,
                name=f"vllm/worker-{number}",
                user="vllm",
                kind="compute",
                mem_b=(95.1 - 3 * gpu - number) * GIB,
                sm_pct=84 - gpu,
            )


def frame(view, width=80, height=17, *, t=None, glyphs=ASCII, span_ns=60 * NS, **state):
    return Frame(view, end_of() if t is None else t, span_ns, Size(width, height), glyphs, PaneState(**state))


def render(view, *args, **options):
    return [plain(line).rstrip() for line in PANE.render(frame(view, *args, **options))]


def text(view, *args, **options):
    return "\n".join(render(view, *args, **options))


def styles_of(view, words, *args, **options):
    """Styles of the spans that hold `words`."""
    lines = PANE.render(frame(view, *args, **options))
    return {style for line in lines for part, style in line if words in part}


def single(**changes):
    """One GPU, one row, at the end of the session."""
    return session(1, seconds=60, **changes)


def troubled():
    """Four GPUs: one hot and capped, one lost, one with broken links and missing numbers, one with an XID; MIG."""
    view = session(4)
    t = END + NS // 10
    hot = {
        "throttle_mask": 0x5,
        "hbm_bw_pct": 97.5,
        "hbm_bw_bps": 4.68e12,
        "temp_c": 88,
        "mem_used_b": 139.0 * GIB,
    }
    view.add("gpu", t, gpu=0, **gpu_fields(**hot))
    view.add(
        "gpu", t, gpu=2, **gpu_fields(throttle_mask=0x48, hbm_bw_pct=NAN, hbm_bw_bps=NAN, sm_util_pct=NAN)
    )
    view.add("nvlink", t, gpu=2, **link_fields(7, state=0))
    view.add("nvlink", t, gpu=2, **link_fields(9, replay_errors=11))
    view.add("gpu_event", t, gpu=1, gi=-1, kind="lost", detail="fell off the bus")
    view.add("gpu_event", END - 5 * NS, gpu=3, gi=-1, kind="xid", code=79, detail="off the bus")
    view.add("gpu", t, gpu=3, **gpu_fields(gi=1, mem_total_b=16 * GIB, mem_used_b=4 * GIB, power_mw=NAN))
    add_status(view, scope="gpu 1", state="error", reason="GPU is lost", remedy="reset it or reboot")
    add_status(view, field="mem_temp_c", state="not_supported", reason="not measured on this GPU")
    view.add(
        "gpu_process",
        END,
        gpu=0,
        gi=-1,
        pid=1,
        name="\x1b[31m日本語\x1b]0;t\x07 \u202eevil",
        user="ü",
        kind="",
        mem_b=5,
    )
    return view


def add_status(view, t=END, *, channel="gpu", field="", scope="", state="error", reason="", remedy=""):
    view.add(
        "status",
        t,
        collector="gpu",
        channel=channel,
        field=field,
        scope=scope,
        state=state,
        reason=reason,
        remedy=remedy,
    )


def assert_fills(pane, drawn):
    """A pane draws exactly the lines and cells asked for, in known styles."""
    lines = pane.render(drawn)
    assert len(lines) == drawn.size.height
    assert {line_cells(line) for line in lines} <= {drawn.size.width}
    assert {style for line in lines for _, style in line} <= set(STYLES)
    assert line_cells(pane.summary(drawn)) == drawn.size.width
    assert pane.title(drawn)
