"""Bank conflicts and cache addresses on a real GPU. With OPUSMON_TEST_OUT=FOLDER what was measured is written there."""

import json
import os
import sys
from pathlib import Path

import pytest
from needs import needs

from opusmon.checks.banks import Access, Tile, access
from opusmon.checks.kv_layout import check

needs("gpu")

RECORDER = [sys.executable, "-m", "opusmon"]


def write(name, document):
    print(json.dumps(document))
    if folder := os.environ.get("OPUSMON_TEST_OUT"):
        with (Path(folder) / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(document) + "\n")


@pytest.fixture(scope="module")
def gpu():
    from opusmon.checks.banks_gpu import Gpu

    return Gpu()


def timed(gpu, one, label):
    timing = gpu.measure(one)
    write(
        "kv_banks",
        {
            "device": gpu.describe(),
            "what": label,
            "width_b": one.width_b,
            "wavefronts": one.wavefronts,
            "ideal": one.ideal,
            "cycles": timing.cycles,
            "ns": timing.ns,
        },
    )
    return timing


# Shared memory serves a wavefront in a cycle, so that is what a load takes when it is kept busy. What the loop itself
# takes shows only in loads of one or two cycles.


@pytest.mark.parametrize("words_apart", [1, 2, 3, 4, 8, 16, 32])
def test_a_stride_of_words_takes_a_cycle_for_each_word_of_a_bank(gpu, words_apart):
    load = Access("column", 4, tuple(4 * words_apart * lane for lane in range(32)))
    timing = timed(gpu, load, f"words {words_apart} apart")
    # 32 lanes over 32 / gcd(words_apart, 32) banks.
    assert load.wavefronts == {1: 1, 2: 2, 3: 1, 4: 4, 8: 8, 16: 16, 32: 32}[words_apart]
    assert timing.cycles == pytest.approx(load.wavefronts, rel=0.1, abs=0.45)


@pytest.mark.parametrize(
    ("rows", "cols", "element", "swizzle", "kind"),
    [
        (128, 64, element, swizzle, kind)
        for element in ("bf16", "fp8")
        for swizzle in ("none", "64B")
        for kind in ("row", "column", "ldmatrix")
    ]
    + [(128, 128, "fp8", "128B", "ldmatrix"), (128, 64, "bf16", "128B", "ldmatrix")],
)
def test_cycles_of_a_tiles_load_are_its_wavefronts(gpu, rows, cols, element, swizzle, kind):
    load = access(Tile(rows, cols, element, swizzle), kind)
    timing = timed(gpu, load, f"{rows}x{cols} {element} {swizzle} {kind}")
    assert timing.cycles == pytest.approx(load.wavefronts, rel=0.1, abs=0.45)


def test_a_kernel_that_does_not_compile_or_run_says_why(gpu):
    from opusmon.checks.nvrtc import CannotMeasure, Kernel

    with pytest.raises(CannotMeasure, match=r"does not compile: .*error"):
        Kernel("nonsense", "loads")
    with pytest.raises(CannotMeasure, match="cuModuleGetFunction: 500"):
        Kernel('extern "C" __global__ void loads() {}', "other")
    with pytest.raises(CannotMeasure, match="cuLaunchKernel: 1 "):
        Kernel('extern "C" __global__ void loads() {}', "loads").launch(1, 4096, [])


def test_padding_frees_a_column(gpu):
    plain, padded = (
        timed(gpu, access(Tile(32, 32, "fp32", pad_b=pad_b), "column"), f"32x32 fp32 pad {pad_b}")
        for pad_b in (0, 4)
    )
    assert plain.cycles / padded.cycles > 16


def test_the_hardware_counts_what_was_worked_out():
    """The counter needs privileges and a CUPTI that fits the driver; without, the check says why."""
    say = print
    options = {"tile": "128x64", "recorder": RECORDER}
    result = check(options, say)
    (table,) = result.tables
    write(
        "kv_counted",
        {
            "basis": result.basis,
            "columns": table.columns,
            "rows": table.rows,
            "not_measured": [[one.what, one.why] for one in result.not_measured],
        },
    )
    assert "measured on" in result.basis
    why = {one.what: one.why for one in result.not_measured}
    column = table.columns.index
    counted = [row for row in table.rows if row[column("measured_conflicts")] is not None]
    if not counted:
        assert why["conflicts by the hardware counter"]
        pytest.skip(f"no counter: {why['conflicts by the hardware counter']}")
    # Loads of up to 4 bytes a lane: a conflict is a wavefront beyond the first, with nothing to argue about.
    narrow = [row for row in counted if row[column("width_b")] <= 4]
    assert narrow
    for row in narrow:
        assert row[column("measured_conflicts")] == pytest.approx(row[column("conflicts")], rel=0.05, abs=0.1)


def test_the_line_and_the_address_of_a_cache_on_the_gpu_are_known(tmp_path):
    target = tmp_path / "kv_on_gpu.py"
    target.write_text(
        "import torch\n"
        "def make():\n"
        "    k = torch.zeros(2, 512, 4, 132, device='cuda', dtype=torch.bfloat16)\n"
        "    k = k[..., 4:]\n"
        "    return k, torch.zeros(2, 512, 4, 128, device='cuda', dtype=torch.bfloat16)\n"
    )
    try:
        result = check({"target": f"{target}:make"}, lambda _stage: None)
    finally:
        sys.modules.pop("kv_on_gpu", None)
        sys.path.remove(str(tmp_path))
    # Heads step by 264 bytes, and the first element lies 8 bytes after the start of its allocation.
    assert [(one.kind, one.facts) for one in result.problems] == [
        ("alignment", {"stride_b": 264}),
        ("alignment", {"offset_b": 8}),
    ]
    assert {one.where.rpartition(":")[2] for one in result.problems} == {"4"}
    assert not [one for one in result.not_measured if "alignment" in one.what]


def test_a_silent_copy_moves_the_bytes_that_are_said(gpu):
    """What the wrapper does, `.contiguous()`, allocates exactly the bytes named."""
    import torch

    from opusmon.checks.kv_load import of_values
    from opusmon.checks.kv_rules import Call, copies
    from opusmon.checks.kv_tensor import read

    k = torch.zeros(4, 8, 128, 2048, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2)
    v = torch.zeros(4, 2048, 8, 128, device="cuda", dtype=torch.bfloat16)
    found = of_values((k, v))
    ((name, copied),) = copies(read([found["k"], found["v"]]), Call(), None)
    torch.cuda.synchronize()
    before_b = torch.cuda.memory_allocated()
    kept = k.contiguous()
    assert name == "K"
    assert torch.cuda.memory_allocated() - before_b == copied.size_b == 4 * 2048 * 8 * 128 * 2
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kept = k.contiguous()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    write("kv_copy", {"device": gpu.describe(), "copied_b": copied.size_b, "ms": sorted(times)[5]})
    assert kept.stride(-1) == 1
