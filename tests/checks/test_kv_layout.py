"""`opusmon check kv-layout` as a whole: planted violations with their lines, files, and the command line."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs

from opusmon.checks import tiles
from opusmon.checks.kv_layout import check
from opusmon.checks.target import TargetError
from opusmon.checks.worker import run

needs("torch")
TARGETS = Path(__file__).parent / "targets" / "kv.py"
LINES = TARGETS.read_text().splitlines()
PREFILL = {"mask": "causal"}


@pytest.fixture(autouse=True)
def _forget_the_target():
    yield
    sys.modules.pop("kv", None)
    sys.path[:] = [place for place in sys.path if place != str(TARGETS.parent)]


def checked(name, **options):
    return check({"target": f"{TARGETS}:{name}", **options}, lambda _stage: None)


def facts(result):
    return {fact.name: fact.value for fact in result.facts}


def planted(kind):
    (line,) = [number for number, text in enumerate(LINES, 1) if text.endswith(f"# planted: {kind}")]
    return line


def test_a_clean_cache_is_clean():
    result = checked("clean", **PREFILL)
    assert result.problems == []
    # 64 query tokens x 8 heads a KV head are 512 rows, over 128; pages of 128 are whole tiles.
    assert facts(result)["loads"] == "tma"
    assert facts(result)["copied_b_per_step"] == 0
    assert facts(result)["order"] == "NHD"
    assert "tensors on cpu" in result.basis
    assert [missing.what for missing in result.not_measured] == ["alignment of the allocation on a GPU"]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("silent_copy", "silent_copy", {}),
        ("refused_stride", "last_dim", PREFILL),
        ("mixed", "dtype_mismatch", PREFILL),
        ("misaligned", "alignment", {}),
        ("long_table", "page_table", PREFILL),
        ("descale_of_q_heads", "descale", PREFILL),
        ("small_pages", "no_tma", PREFILL),
        ("heads_that_do_not_divide", "heads", PREFILL),
        ("batch_of_another_size", "shape", {}),
        ("bytes_of_fp8", "dtype", {"page_size": 16}),
    ],
)
def test_a_planted_violation_is_named_with_its_line(name, kind, options):
    result = checked(name, **options)
    assert {problem.kind for problem in result.problems} >= {kind}
    (problem,) = [one for one in result.problems if one.kind == kind][:1]
    assert problem.where.endswith(f"kv.py:{planted(kind)}")
    assert problem.line == LINES[planted(kind) - 1].strip()
    assert not result.clean


def test_head_dims_of_fp8_are_named_for_k_and_v():
    found = [problem.what for problem in checked("odd_head_dim").problems if problem.kind == "head_dim"]
    assert found == [f"head dim 72 of {name} is no multiple of 16, as float8_e4m3fn needs" for name in "KV"]


def test_the_bytes_of_a_silent_copy_are_those_of_all_layers():
    result = checked("silent_copy", layers=80)
    # 2 x 512 x 4 x 128 elements of 2 bytes, 80 times.
    assert facts(result)["copied_b_per_step"] == 80 * 2**20


def test_bytes_can_be_said_to_be_fp8():
    result = checked("bytes_of_fp8", page_size=16, dtype="float8_e4m3fn")
    assert result.problems == []
    assert facts(result)["output_dtype"] == "bfloat16"
    assert facts(result)["v_transposed"] is True
    assert facts(result)["page_size"] == 16
    # What is no uint8 is what it is.
    assert "bfloat16" in next(
        one.text for one in checked("clean", dtype="float8_e4m3fn").facts if one.name == "k_b"
    )


def saved(folder, dtype, *shape):
    import torch

    path = folder / "kv.pt"
    k = torch.zeros(*shape, dtype=getattr(torch, dtype))
    torch.save({"k": k, "v": torch.zeros_like(k), "page_table": torch.zeros(1, 2, dtype=torch.uint8)}, path)
    return str(path)


def test_bytes_viewed_as_two_are_what_torch_makes_of_them(tmp_path):
    path = saved(tmp_path, "uint8", 32, 16, 8, 128)
    result = check({"target": path, "dtype": "float16", "layout": "paged"}, lambda _stage: None)
    (text,) = [one.text for one in result.facts if one.name == "k_b"]
    # 32 x 16 x 8 x 128 bytes stay 512 KiB.
    assert text == "K (k): (32, 16, 8, 64) float16, strides (8192, 512, 64, 1), 512 KiB"
    # A page table is no part of it.
    assert [one.what for one in result.problems] == ["the page table is uint8"]


def test_bytes_that_are_no_view_are_an_error(tmp_path):
    path = saved(tmp_path, "uint8", 32, 16, 8, 126)
    with pytest.raises(TargetError, match="its last dimension is no multiple of 4"):
        check({"target": path, "dtype": "float32"}, lambda _stage: None)


def test_a_dtype_that_changes_nothing_is_a_note():
    (note,) = checked("clean", dtype="float8_e4m3fn", **PREFILL).problems
    assert (note.kind, note.level) == ("dtype", "note")
    assert note.what.startswith("--dtype float8_e4m3fn is what uint8 is viewed as")


def test_a_dtype_that_is_none_is_an_error():
    with pytest.raises(TargetError, match="--dtype 'float9' is not known: it is one of bfloat16, bool"):
        checked("clean", dtype="float9")


def test_a_cache_that_is_refused_is_not_taken_as_it_is(tmp_path):
    path = saved(tmp_path, "bfloat16", 2, 64, 8, 320)
    result = check({"target": path, "layout": "dense"}, lambda _stage: None)
    (table,) = [one for one in result.tables if one.title.startswith("who")]
    assert {row[2:] for row in table.rows} == {("no: head dim 320 is over 256", 0)}


def test_a_cache_with_k_and_v_in_one_tensor():
    result = checked("vllm")
    assert facts(result)["kind"] == "paged"
    (table,) = [one for one in result.tables if one.title.startswith("who")]
    assert ("vLLM FlashAttention", "(2, blocks, block size, heads, dim)", "as is", 0) in table.rows


def test_what_decides_between_tma_and_cp_async_is_asked_for():
    result = checked("vllm")
    assert {"which mask", "q's dtype, shape and strides"} <= {one.what for one in result.not_measured}
    # Pages of 16 are never whole tiles, whatever q is.
    assert facts(result)["loads"] == "cp.async"
    unknown = checked("clean", q="block_table", mask="causal")
    assert unknown.problems  # an int32 q is none


def test_tma_that_depends_on_q_is_said_to_depend(tmp_path):
    path = file_of(tmp_path, k=("BF16", [8, 128, 4, 128]), v=("BF16", [8, 128, 4, 128]))
    result = check({"target": str(path), "page_size": 128, "mask": "causal"}, lambda _stage: None)
    assert facts(result)["loads"] == "depends"
    assert "TMA or cp.async" in {one.what for one in result.not_measured}
    known = {"q_heads": 32, "seqlen_q": 17}
    result = check({"target": str(path), "page_size": 128, "mask": "causal", **known}, lambda _stage: None)
    assert facts(result)["loads"] == "tma"
    assert "TMA or cp.async" not in {one.what for one in result.not_measured}


def file_of(folder, **tensors):
    entries, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I32": 4}[dtype]
        for length in shape:
            size *= length
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    path = folder / "kv.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return path


def test_a_dump_of_many_gigabytes_is_read_from_its_header(tmp_path):
    # 64 GiB of holes.
    path = file_of(tmp_path, k=("BF16", [2**18, 128, 8, 64]), v=("BF16", [2**18, 128, 8, 64]))
    result = check({"target": str(path), "page_size": 128}, lambda _stage: None)
    assert facts(result)["k_b"] == 2**35
    assert not [one for one in result.problems if one.level == "problem"]


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("nothing", {}, "returned no tensors"),
        ("clean", {"k": "nope"}, "no tensor nope; there is key_cache"),
        ("clean", {"layout": "varlen"}, "varlen needs 3 dimensions"),
        ("clean", {"page_size": 32}, "has no pages of 32"),
        ("nowhere", {}, "no callable named nowhere"),
    ],
)
def test_what_cannot_be_looked_at_is_an_error(name, options, why):
    with pytest.raises(TargetError, match=why):
        checked(name, **options)


def test_names_that_are_missing_or_ambiguous_are_listed(tmp_path):
    shape = ("BF16", [8, 16, 4, 128])
    path = file_of(tmp_path, **{"0.k": shape, "0.v": shape, "1.k": shape, "1.v": shape})
    with pytest.raises(TargetError, match=r"2 tensors may be k: say --k; there is 0\.k, 0\.v, 1\.k, 1\.v"):
        check({"target": str(path)}, lambda _stage: None)
    chosen = check({"target": str(path), "k": "1.k", "v": "1.v"}, lambda _stage: None)
    assert "K (1.k)" in next(fact.text for fact in chosen.facts if fact.name == "k_b")
    alone = file_of(tmp_path, cache=shape)
    with pytest.raises(TargetError, match="no tensor is named like k and v: say --k and --v, or --kv"):
        check({"target": str(alone)}, lambda _stage: None)


def test_what_the_target_raises_is_said_with_its_line():
    result = run("kv-layout", {"target": f"{TARGETS}:raises"}, lambda _stage: None)
    assert result.error.startswith("RuntimeError: no cache today at ")
    assert f"kv.py:{planted('error')}" in result.error


def test_nothing_to_look_at_is_an_error():
    with pytest.raises(TargetError, match="nothing to look at"):
        check({}, lambda _stage: None)


# The tile part, without a GPU.


def tile_rows(result):
    (table,) = [one for one in result.tables if "tile" in one.title]
    return {row[:3]: row[4:7] for row in table.rows}


@pytest.fixture
def _no_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")


@pytest.mark.usefixtures("_no_gpu")
def test_a_tile_alone():
    result = check({"tile": "128x64"}, lambda _stage: None)
    rows = tile_rows(result)
    # As worked out in test_banks.py: wavefronts, ideal, conflicts.
    assert rows["bf16", "none", "column"] == (32, 1, 31)
    assert rows["fp8", "none", "column"] == (16, 1, 15)
    assert rows["bf16", "128B", "ldmatrix"] == (4, 4, 0)
    # 4 swizzles x 3 accesses x 2 elements, but rows of 64 bytes fit no swizzle of 128.
    assert len(rows) == 21
    assert result.problems == []
    assert facts(result)["wavefronts_column_none"] == 16
    assert {one.what: one.why for one in result.not_measured}[
        "cycles, time and conflicts of the tile"
    ].startswith("no GPU is visible")


@pytest.mark.usefixtures("_no_gpu")
def test_conflicts_of_the_one_pattern_asked_for_are_a_problem():
    one = {"tile": "32x32", "elem": ["fp32"], "swizzle": "none", "access": "column"}
    (problem,) = check(one, lambda _stage: None).problems
    assert problem.facts == {"wavefronts": 32, "ideal": 1, "conflicts": 31}
    # Rows of 33 words: each lane has a bank of its own. A swizzle spreads 8 rows over the banks, so 4 share one.
    assert problem.change == "4 bytes of padding a row: 1 wavefront a load"
    assert check({**one, "pad": 4}, lambda _stage: None).problems == []


def test_a_swizzle_is_proposed_where_padding_would_break_the_alignment():
    one = {"tile": "64x64", "elem": ["bf16"], "swizzle": "none", "access": "ldmatrix"}
    (problem,) = check(one, lambda _stage: None).problems
    # Rows of 128 bytes: the 8 rows of a matrix lie in the same banks.
    assert problem.facts == {"wavefronts": 32, "ideal": 4, "conflicts": 28}
    assert problem.change == "swizzle 128B: 4 wavefronts a load"


def test_what_was_computed_stands_where_the_gpu_is_full(monkeypatch):
    class Full:
        def measure(self, access):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore")

    monkeypatch.setattr(tiles.banks_gpu, "Gpu", Full)
    result = check({"tile": "128x64"}, lambda _stage: None)
    assert len(tile_rows(result)) == 21
    (missing,) = [one.why for one in result.not_measured if one.what.startswith("cycles")]
    assert missing == "CUDA out of memory. Tried to allocate 2.00 MiB."


@pytest.mark.parametrize("tile", ["128", "8x8x8", "0x4"])
def test_a_tile_that_is_none_is_an_error(tile):
    with pytest.raises(TargetError):
        check({"tile": tile}, lambda _stage: None)


def test_the_one_pattern_that_cannot_be_is_an_error():
    with pytest.raises(TargetError, match="do not fit the 128B swizzle"):
        check({"tile": "128x64", "elem": ["fp8"], "swizzle": "128B", "access": "row"}, lambda _stage: None)


# The command line: real processes.


def opusmon(*words, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "opusmon", "check", "kv-layout", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        **kwargs,
    )


def test_a_torch_file_through_the_command_line(tmp_path):
    import torch

    k = torch.zeros(2, 4, 128, 512, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    torch.save({"k": k, "v": torch.zeros(2, 512, 4, 128, dtype=torch.bfloat16)}, tmp_path / "kv.pt")
    done = opusmon(tmp_path / "kv.pt", "--layers", 32)
    assert done.returncode == 3, done.stderr
    assert "!! K (k) has stride 512 in its last dimension" in done.stdout
    assert "read_b_per_step 33,554,432" in done.stdout
    assert "silent copies of q, K and V: 32 MiB read and as many written" in done.stdout


def test_a_safetensors_file_through_the_command_line(tmp_path):
    path = file_of(tmp_path, k=("F8_E4M3", [8, 128, 4, 128]), v=("F8_E4M3", [8, 128, 4, 128]))
    done = opusmon(path, "--page-size", 128, "--mask", "causal", "--json", "--tile", "128x128")
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert document["check"] == "kv-layout"
    assert {"V is transposed"} == {
        fact["text"][:15] for fact in document["facts"] if fact["name"] == "v_transposed"
    }
    assert [table["title"].split()[0] for table in document["tables"]] == ["who", "how", "one"]


def test_wrong_words_are_usage(tmp_path):
    assert opusmon("--layers", "0").returncode == 2
    assert opusmon("--layout", "nchw").returncode == 2
    assert opusmon().returncode == 1


def test_a_name_with_escapes_does_not_reach_the_terminal(tmp_path):
    path = file_of(tmp_path, **{"k": ("BF16", [8, 128, 4, 128]), "v\x1b[31m": ("BF16", [8, 128, 4, 128])})
    done = opusmon(path, env={**os.environ, "PYTHONUTF8": "1"})
    assert done.returncode == 1
    assert "v?[31m" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_cache_read_as_dense_is_told_how_to_be_read_as_pages():
    assert kind_of("misaligned").startswith("read as dense (one of pages needs --page-size")
    assert kind_of("clean").startswith("read as paged, FlashAttention-3")


def kind_of(name, **options):
    return next(one.text for one in checked(name, **options).facts if one.name == "kind")
