"""`check triton` on a GPU: planted recompilations with their lines, loads, launchers, autotuning, inductor's kernels.

What was measured is printed, and written to the directory that OPUSMON_TEST_OUT names, one JSON document a line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from needs import needs

from opusmon.checks.report import as_text
from opusmon.checks.result import to_json
from opusmon.checks.run import run

needs("gpu", "triton")

TARGETS = Path(__file__).parent / "targets" / "triton_kernels.py"


def checked(name, env=None):
    result = run("triton", {"target": f"{TARGETS}:{name}", "buckets": {}}, limit_s=300, env=env)
    print(as_text(result))
    if out := os.environ.get("OPUSMON_TEST_OUT"):
        with (Path(out) / "check_triton.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"target": name, **to_json(result)}) + "\n")
    assert result.error == ""
    assert result.basis.startswith("measured on ")
    return result


def table(result, begin):
    (found,) = [table for table in result.tables if table.title.startswith(begin)]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def line_of(marker):
    lines = TARGETS.read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"triton_kernels.py:{number}"


def test_every_reason_with_its_line_and_its_loads():
    result = checked("every_reason")
    found = {p.where.rpartition("/")[2]: p.kind for p in result.problems if p.level == "problem"}
    assert found == {
        line_of("n"): "recompile_alignment",
        line_of("address"): "recompile_alignment",
        line_of("stride"): "recompile_equal_to_1",
        line_of("block"): "recompile_constexpr",
        line_of("dtype"): "recompile_dtype",
        line_of("options"): "recompile_options",
    }
    rows = table(result, "what first calls pay: empty caches")
    assert [row["compiled"] for row in rows] == [1, 0, 1, 1, 1, 1, 1, 1]
    assert [row["loads"] for row in rows] == [1, 0, 1, 1, 1, 1, 1, 1]
    again = table(result, "what first calls pay: filled cache directory")
    assert [row["loads"] for row in again] == [1, 0, 1, 1, 1, 1, 1, 1]  # a load is no compilation spared
    assert [row["compiled"] for row in again] == [0] * 8
    assert sum(row["compile_ms"] for row in again) < sum(row["compile_ms"] for row in rows)


def test_autotuning_of_each_key():
    result = checked("tuned")
    rows = table(result, "autotune runs: empty caches")
    assert [(row["configs"], row["cached"]) for row in rows] == [(2, False), (2, False)]
    assert all(row["ms"] > 1 for row in rows)  # each configuration is run for tens of ms
    assert any(problem.kind == "autotune" and problem.level == "problem" for problem in result.problems)


def test_autotuning_that_is_kept():
    import triton

    if not hasattr(getattr(triton, "knobs", None), "autotuning"):
        pytest.skip("this Triton does not keep results of autotuning")
    result = checked("tuned", {"TRITON_CACHE_AUTOTUNING": "1"})
    assert [row["cached"] for row in table(result, "autotune runs: filled")] == [True, True]


def test_clean_code():
    result = checked("clean")
    assert result.clean
    assert [problem.kind for problem in result.problems if problem.kind != "cache_volatile"] == ["first_use"]


def test_a_function_as_constexpr_runs():
    assert checked("of_a_function").clean


def test_kernels_of_a_compiled_module_are_seen():
    result = checked("compiled")
    found = [problem for problem in result.problems if problem.kind == "recompile_inductor"]
    assert len(found) == 1  # the second shape, with dynamic=False
    assert found[0].facts["bucket"] == "inputs 2"
    rows = table(result, "what first calls pay: empty caches")
    assert all(row["compiled"] > 0 and row["loads"] > 0 for row in rows)
    assert any("worker processes" in missing.what for missing in result.not_measured)
