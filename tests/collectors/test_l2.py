"""The hardware-counter collector against a libcupti whose answers are known."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cupti_stub import CuptiStub
from needs import needs

from opusmon.channels import L2
from opusmon.clock import NS, SystemClock
from opusmon.collectors.base import Unavailable
from opusmon.collectors.l2 import library, metrics, next_period
from opusmon.collectors.l2.cupti import Samples
from opusmon.collectors.l2.library import Found, choose, cuda_version
from opusmon.schema import StringTable
from opusmon.worker import SourceLost, WorkerSource, child_argv


def samples(values, starts=None, ends=None, overflow=False):
    n = len(values)
    starts = [k * 100_000_000 for k in range(n)] if starts is None else starts
    ends = [start + 100_000_000 for start in starts] if ends is None else ends
    return Samples(
        np.array(starts, np.uint64), np.array(ends, np.uint64), np.array(values, np.float64), overflow
    )


# -- arithmetic --------------------------------------------------------------------------------------------


def test_sums_become_rates_and_shares_time_weighted_means():
    taken = samples([[10.0, 100.0], [30.0, 0.0]], [0, 100_000_000], [100_000_000, 400_000_000])
    found, dt_ns = metrics.means(taken, ["a.sum", "b.pct"], np.array([True, True]))
    assert dt_ns == 400_000_000
    assert found == {"a.sum": 100.0, "b.pct": 25.0}


def test_the_first_sample_after_a_start_and_those_with_nan_do_not_count():
    taken = samples([[1.0], [2.0], [math.nan], [4.0]])
    assert metrics.usable(taken, ["a.sum"], started=True).tolist() == [False, True, False, True]
    assert metrics.usable(taken, ["a.sum"], started=False).tolist() == [True, True, False, True]


def test_hits_per_lookup_are_weighed_by_the_lookups_and_no_lookup_is_no_reason_to_drop_a_sample():
    names = [metrics.SECTORS, metrics.HALF_HIT]
    taken = samples(
        [[3e9, 50.0], [1e9, 10.0], [0.0, math.nan]],
        [0, 100_000_000, 200_000_000],
        [100_000_000, 200_000_000, 300_000_000],
    )
    good = metrics.usable(taken, names, started=False)
    assert good.tolist() == [True, True, True]
    found, _ = metrics.means(taken, names, good)
    assert metrics.fields(found)["l2_lookup_hit_pct"] == pytest.approx(2 * (3 * 50 + 1 * 10) / 4)
    idle, _ = metrics.means(taken, names, np.array([False, False, True]))
    assert math.isnan(metrics.fields(idle)["l2_lookup_hit_pct"])
    assert metrics.means(samples(np.empty((0, 1))), ["a.sum"], np.zeros(0, bool)) == ({}, 0)


def test_what_the_sms_ask_for_and_is_not_read_from_hbm_was_in_the_l2():
    row = metrics.fields({metrics.READ: 3e12, metrics.SECTORS_GPC: 1.25e11, metrics.SECTORS: 2.5e11})
    assert row["l2_hit_pct"] == pytest.approx(25.0)  # 4 TB/s asked for, 3 read
    assert row["l2_to_hbm_ratio"] == pytest.approx(0.375)  # 3 of 8 TB/s
    assert row["l2_bps"] == pytest.approx(8e12)
    assert math.isnan(row["hbm_write_bps"])


@pytest.mark.parametrize(
    ("read", "sectors"),
    [(5e12, 1.25e11), (0.0, 1e6), (math.nan, 1.25e11), (1e12, math.nan)],
    ids=["copy engines read more", "an idle GPU", "no reads", "no sectors"],
)
def test_a_hit_rate_that_would_say_nothing_is_missing(read, sectors):
    assert math.isnan(
        metrics.fields({metrics.READ: read, metrics.SECTORS_GPC: sectors, metrics.SECTORS: sectors})[
            "l2_hit_pct"
        ]
    )


def test_a_record_has_the_columns_of_the_channel():
    row = metrics.fields({metrics.READ: 1.0})
    (made,) = L2.rows([metrics.record(7, 1, 5, 0, row)])
    assert (made["t"], made["gpu"], made["dt_ns"], made["hbm_read_bps"]) == (7, 1, 5, 1.0)
    assert set(row) | {"gpu", "dt_ns", "source"} == {field.name for field in L2.fields}


def test_decoding_stays_within_its_budget():
    period = 1 * NS
    for _ in range(20):
        period = next_period(period, 50_000_000, 1.0, NS)  # 50 ms a decode at 1 % is one in 5 s
    assert period == pytest.approx(5 * NS, rel=0.001)
    assert next_period(NS, 1_000_000, 1.0, NS) == NS
    assert next_period(30 * NS, 10 * NS, 1.0, NS) == 30 * NS


# -- which library -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "version"),
    [(130_001, (13, 0)), (130_500, (13, 5)), (28, (12, 9)), (24, (12, 6)), (23, (0, 0)), (0, (0, 0))],
)
def test_cupti_numbers_itself_in_two_ways(number, version):
    assert cuda_version(number) == version


def test_the_newest_that_is_not_newer_than_the_driver_is_chosen():
    there = [Found("a", (12, 8)), Found("b", (13, 0)), Found("c", (13, 4)), Found("d", (0, 0))]
    assert choose(there, (13, 0)) == there[1]
    assert choose(there, (13, 2)) == there[1]
    assert choose(there, (12, 9)) == there[0]
    too_new = choose(there, (12, 6))
    assert isinstance(too_new, Unavailable)
    assert "of CUDA 12.8, newer than the driver's 12.6" in too_new.reason
    assert "nvidia-cuda-cupti==12.6.*" in too_new.remedy
    nothing = choose([Found("d", (0, 0))], (13, 0))
    assert isinstance(nothing, Unavailable)
    assert "no libcupti of CUDA 13.0" in nothing.reason


def test_a_library_that_others_may_change_is_not_loaded(tmp_path):
    ours, open_to_all = tmp_path / "a.so", tmp_path / "b.so"
    for path, mode in ((ours, 0o755), (open_to_all, 0o777)):
        path.write_bytes(b"")
        path.chmod(mode)
    paths = [str(ours), str(open_to_all), str(tmp_path / "none.so")]
    assert library._trusted(paths) == [str(ours)]


# -- the whole, against the stub ---------------------------------------------------------------------------


@pytest.fixture
def stub(tmp_path):
    needs("gcc")
    return CuptiStub(tmp_path).build()


class Watched:
    """Rows of a collector in a child process, as the screen would get them."""

    def __init__(self, stub, **options):
        self.strings = StringTable()
        env = {**os.environ, **stub.env()}
        argv = child_argv("l2", NS, (), options)
        self.source = WorkerSource("l2", self.strings, SystemClock(), argv=argv, env=env)

    async def rows(self, channel, wanted):
        found = []
        async with asyncio.timeout(15):
            batches = self.source.batches()
            try:
                async for batch in batches:
                    if batch.channel.name == channel:
                        found.extend(batch.rows)
                    if len(found) >= wanted:
                        return found
            finally:
                await batches.aclose()
        return found


async def test_rows_say_what_the_counters_counted(stub):
    stub.rates(devices=2, nan_first=1)
    watched = Watched(stub)
    rows = await watched.rows("l2", 4)
    assert {int(row["gpu"]) for row in rows} == {0, 1}
    row = rows[-1]
    assert row["hbm_read_bps"] == pytest.approx(3.0e12)
    assert row["hbm_write_bps"] == pytest.approx(0.5e12)
    assert row["l2_bps"] == pytest.approx(8e12)
    assert row["l2_hit_pct"] == pytest.approx(25.0)
    assert row["l2_lookup_hit_pct"] == pytest.approx(30.0)
    assert (row["sm_active_pct"], row["warps_active_pct"], row["tensor_pct"]) == (80, 40, 25)
    assert (row["nvlink_rx_bps"], row["nvlink_tx_bps"]) == (3e9, 4e9)
    assert math.isnan(row["bank_conflicts_per_s"])
    assert watched.strings.text(row["source"]) == "CUPTI 13.0 PM sampling"
    assert 0 <= SystemClock().now() - int(row["t"]) < 5 * NS
    assert 10_000_000 < int(row["dt_ns"]) < 200_000_000  # a window is 20 ms on a machine at rest


async def test_a_gpu_without_links_is_sampled_without_them(stub):
    stub.rates(**{"unknown__nvlrx__bytes_data_user.sum": 1})
    (row,) = await Watched(stub).rows("l2", 1)
    assert math.isnan(row["nvlink_rx_bps"])
    assert row["hbm_read_bps"] == pytest.approx(3.0e12)
    assert row["l2_lookup_hit_pct"] == pytest.approx(30.0)


async def test_a_chip_without_lookup_counters_is_sampled_without_them(stub):
    stub.rates(**{f"unknown__{metrics.HALF_HIT}": 1})
    (row,) = await Watched(stub).rows("l2", 1)
    assert math.isnan(row["l2_lookup_hit_pct"])
    assert row["l2_hit_pct"] == pytest.approx(25.0)
    assert row["nvlink_tx_bps"] == pytest.approx(4e9)


async def test_bank_conflicts_are_sampled_instead_of_the_rest(stub):
    stub.rates()
    (row,) = await Watched(stub, bank_conflicts=True).rows("l2", 1)
    assert row["bank_conflicts_per_s"] == pytest.approx(5e6)
    assert math.isnan(row["hbm_read_bps"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fail__cuptiPmSamplingEnable": 35}, "administrators only"),
        ({"fail__cuptiPmSamplingEnable": 26}, "another profiler holds"),
        ({"fail__cuptiPmSamplingSetConfig": 43}, "MIG"),
        ({"driver": 12080}, "newer than the driver's 12.8"),
        ({"fail__cuInit": 100}, "the CUDA driver does not start"),
        ({"devices": 0}, "the driver shows no GPU"),
        ({"passes__dram__bytes_read.sum": 2}, "no PM sampling"),
    ],
)
async def test_a_refusal_is_a_reason_and_no_crash(stub, settings, words):
    stub.configure(**settings)
    with pytest.raises(SourceLost) as lost:
        await Watched(stub).rows("l2", 1)
    assert words in lost.value.why.reason, lost.value.why
    assert lost.value.final


async def test_one_gpu_that_refuses_does_not_take_the_other_along(stub):
    stub.rates(devices=2, fail__cuptiPmSamplingEnable="26 1")  # the first one asked
    watched = Watched(stub)
    statuses = await watched.rows("status", 3)
    said = {watched.strings.text(row["scope"]): watched.strings.text(row["reason"]) for row in statuses}
    assert "another profiler" in said["gpu 0"]
    assert {int(row["gpu"]) for row in await Watched(stub).rows("l2", 1)} == {1}


async def test_a_decode_that_fails_once_is_tried_again(stub):
    stub.rates(fail__cuptiPmSamplingDecodeData="999 1")
    rows = await Watched(stub).rows("l2", 1)
    assert rows[0]["hbm_read_bps"] == pytest.approx(3.0e12)


async def test_a_library_that_kills_its_process_is_a_lost_source(stub):
    stub.rates(crash__cuptiPmSamplingDecodeData=1)
    with pytest.raises(SourceLost) as lost:
        await Watched(stub).rows("l2", 1)
    assert "the l2 worker ended" in lost.value.why.reason
    assert not lost.value.final


async def test_lost_samples_are_said(stub):
    stub.rates(overflow=1)
    watched = Watched(stub)
    statuses = await watched.rows("status", 3)
    assert any("ran over" in watched.strings.text(row["reason"]) for row in statuses)


async def test_watching_is_on_the_bill(stub):
    stub.rates()
    watched = Watched(stub)
    (row,) = await watched.rows("cost", 1)
    assert watched.strings.text(row["collector"]) == "l2"
    # Three windows at least, each with a start, a stop and a decode.
    assert row["calls"] >= 9
    assert row["rss_b"] > 5e6


# -- layouts -----------------------------------------------------------------------------------------------

VENDOR = {
    "Initialize": "CUpti_Profiler_Initialize_Params",
    "GetChipName": "CUpti_Device_GetChipName_Params",
    "OnSampler": "CUpti_PmSampling_Start_Params",
}


def test_structures_are_laid_out_as_in_the_vendors_headers(tmp_path):
    """Sizes, offsets and widths of every field, asked of the C compiler."""
    needs("gcc", "cupti")
    from importlib.metadata import files

    from opusmon.collectors.l2 import structs

    found = {
        path.name: path.locate() for path in files("nvidia-cuda-cupti") or () if path.name.startswith("cupti")
    }
    (tmp_path / "string").write_text("")  # a C++ header that one of them includes for nothing
    (tmp_path / "cuda.h").write_text(
        "#include <stddef.h>\n#include <stdint.h>\n"
        "typedef int CUresult; typedef int CUdevice; typedef struct CUctx_st *CUcontext;\n"
    )
    headers = (
        "cupti_result.h",
        "cupti_pmsampling.h",
        "cupti_profiler_host.h",
        "cupti_profiler_target.h",
        "cupti_target.h",
    )
    lines = [
        "#include <stdio.h>",
        "#include <cuda.h>",
        *(f"#include <{name}>" for name in headers),
        "int main(void) {",
    ]
    for params in {*structs.CALLS.values()}:
        theirs = VENDOR.get(params.__name__) or params.__doc__.split()[0].rstrip(".,")
        lines.append(f'printf("{params.__name__} {{}} %zu\\n", (size_t){theirs}_STRUCT_SIZE);')
        for name, _ in params.__dict__.get("_fields_") or ():
            member = f"(({theirs} *)0)->{name}"
            lines.append(
                f'printf("{params.__name__} {name} %zu %zu\\n", offsetof({theirs}, {name}), sizeof({member}));'
            )
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join([*lines, "return 0; }"]))
    include = found["cupti_pmsampling.h"].parent
    subprocess.run(["gcc", f"-I{tmp_path}", f"-I{include}", str(source), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) > 80
    for line in said:
        params, field, *numbers = line.split()
        ours = getattr(structs, params)
        if field == "{}":
            assert [ours.size()] == [int(n) for n in numbers], params
        else:
            place = getattr(ours, field)
            assert [place.offset, place.size] == [int(n) for n in numbers], (params, field)


def test_the_child_ends_with_its_parent(stub):
    """SIGKILL of the parent while a sample is being taken leaves no sampler behind."""
    stub.rates()
    parent = (
        "import asyncio,os,sys\n"
        "from opusmon.worker import WorkerSource\nfrom opusmon.schema import StringTable\n"
        "from opusmon.clock import SystemClock\n"
        "async def main():\n"
        "    async for batch in WorkerSource('l2', StringTable(), SystemClock()).batches():\n"
        "        children = open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read()\n"
        "        print(children, flush=True)\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, **stub.env()}
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    for _ in range(200):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the child lives on")
