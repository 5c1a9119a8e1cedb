"""`opusmon check init` on a real GPU. What was measured goes to the folder that OPUSMON_TEST_OUT names.

OPUSMON_TEST_REPEATS (default 20) says how often each capture and race is repeated, OPUSMON_TEST_LIMIT_S (default
300) how long all of it may take.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from needs import needs

from opusmon.checks.report import as_text
from opusmon.checks.result import Result, to_json
from opusmon.checks.run import run

REPEATS = int(os.environ.get("OPUSMON_TEST_REPEATS", "20"))
LIMIT_S = float(os.environ.get("OPUSMON_TEST_LIMIT_S", "300"))


@pytest.fixture(scope="module")
def measured() -> Result:
    """One run of the whole check, in a process of its own: this one may have CUDA in use."""
    needs("gpu")
    result = run("init", {"repeats": REPEATS, "threads": 8, "limit_s": LIMIT_S}, limit_s=LIMIT_S)
    print(as_text(result))
    if folder := os.environ.get("OPUSMON_TEST_OUT"):
        with Path(folder, "init.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(to_json(result)) + "\n")
    return result


def _outcomes(result: Result) -> dict[tuple[str, str, str, str], dict[str, int]]:
    """Of scenario, loading, mode and actor."""
    found: dict[tuple[str, str, str, str], dict[str, int]] = {}
    for table in result.tables:
        if "outcome" in table.columns:
            for scenario, loading, mode, who, outcome, n, *_ in table.rows:
                found.setdefault((scenario, loading, mode, who), {})[outcome] = n
    return found


def _ms(result: Result, step: str, loading: str = "lazy") -> float:
    """Median of a step."""
    for table in result.tables:
        if table.columns[0] == "step":
            for name, how, median_ms, *_ in table.rows:
                if (name, how) == (step, loading):
                    return float(median_ms)
    pytest.fail(f"{step} ({loading}) was not measured: {result.not_measured}")


def test_it_runs_and_names_device_driver_and_torch(measured):
    assert measured.error == ""
    assert measured.basis.startswith("measured on ")
    assert ", torch " in measured.basis
    assert "unknown" not in measured.basis


def test_the_safe_order_works_every_time(measured):
    safe = {key: counts for key, counts in _outcomes(measured).items() if key[0].startswith("safe-order")}
    assert {key[0] for key in safe} == {
        "safe-order",
        "safe-order-threads",
        "safe-order-runtime",
        "safe-order-torch",
    }
    assert {key: counts for key, counts in safe.items() if set(counts) != {"works"}} == {}


def test_plain_initialisation_by_many_threads_works_every_time(measured):
    races = {
        key: counts for key, counts in _outcomes(measured).items() if key[0].endswith(("init-race", "0-race"))
    }
    assert len(races) == 4
    assert {key: counts for key, counts in races.items() if set(counts) != {"works"}} == {}


def test_threads_are_in_the_driver_at_one_moment_in_most_races(measured):
    table = next(table for table in measured.tables if "all_inside" in table.columns)
    place, of = table.columns.index("all_inside"), table.columns.index("of")
    races = [row for row in table.rows if row[0] in ("init-race", "free0-race", "malloc-race")]
    assert races
    assert sum(row[place] for row in races) >= 0.9 * sum(row[of] for row in races)


def test_a_capture_before_cuinit_is_refused(measured):
    counts = _outcomes(measured)["capture-before-init", "-", "global", "-"]
    assert set(counts) == {"3 not initialized at cuStreamBeginCapture_v2"}


def test_allocation_beside_a_capture_fails_in_global_mode_only(measured):
    """As the driver's documentation of capture modes says."""
    outcomes = _outcomes(measured)
    others = outcomes["open-allocate", "lazy", "global", "other threads"]
    assert set(others) == {"900 unsupported in capture at cuMemAlloc_v2"}
    capturing = outcomes["open-allocate", "lazy", "global", "capturing thread"]
    assert all("901 " in outcome for outcome in capturing)
    for mode in ("thread-local", "relaxed"):
        assert set(outcomes["open-allocate", "lazy", mode, "other threads"]) == {"works"}
        assert set(outcomes["open-allocate", "lazy", mode, "capturing thread"]) == {"works"}


def test_first_use_costs_more_than_second(measured):
    assert _ms(measured, "cuInit") > 1
    assert _ms(measured, "context") > 1
    assert _ms(measured, "import torch") > 100
    assert _ms(measured, "launch, first") > _ms(measured, "launch, same kernel again")
    assert _ms(measured, "torch: matmul (cuBLAS), first") > 10 * _ms(
        measured, "torch: matmul (cuBLAS), again"
    )
    assert _ms(measured, "cudaFree(0) as the first call", "-") > 10 * _ms(
        measured, "cudaMalloc after cudaFree(0)", "-"
    )


def test_every_part_of_it_was_measured(measured):
    assert [missing for missing in measured.not_measured if "time limit" not in missing.why] == []
