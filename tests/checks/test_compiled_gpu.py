"""`opusmon check compile` on a GPU: skipped CUDA Graphs, kernels and times."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from needs import needs

needs("gpu")

from opusmon.checks.result import Result  # noqa: E402
from opusmon.checks.run import run  # noqa: E402

TARGETS = Path(__file__).parent / "targets"


def checked(name: str, **env: str) -> Result:
    """In a child, as the command does it; what it measured is written down."""
    result = run("compile", {"target": f"{TARGETS / 'compiled_gpu.py'}:{name}"}, limit_s=400, env=env)
    if folder := os.environ.get("OPUSMON_TEST_OUT"):
        with Path(folder, "compile.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps({"target": name, "env": env, **asdict(result)}) + "\n")
    assert result.error == ""
    return result


def rows(result: Result, title: str) -> list[dict[str, object]]:
    """As lists of pairs would be: columns that come twice keep the last value."""
    (table,) = [table for table in result.tables if table.title.startswith(title)]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def fact(result: Result, name: str):
    return {each.name: each.value for each in result.facts}[name]


def test_an_input_that_is_written_to_keeps_cuda_graphs_away():
    result = checked("mutated")
    (problem,) = [problem for problem in result.problems if problem.kind == "cudagraph_skip"]
    assert "mutated inputs (1 instances)" in problem.code
    assert problem.line == "cache.add_(x)  # writes to an input"


def test_a_tensor_on_the_cpu_keeps_cuda_graphs_away_where_graphs_are_not_split():
    result = checked("cpu_scalar", TORCHINDUCTOR_GRAPH_PARTITION="0")
    (problem,) = [problem for problem in result.problems if problem.kind == "cudagraph_skip"]
    assert "cpu device" in problem.code
    assert problem.line == "return x * scale + 1  # reads a CPU tensor"


def test_a_tensor_on_the_cpu_is_compared_and_timed_as_torch_does_it_by_default():
    result = checked("cpu_scalar")
    assert rows(result, "results")[0]["within_tolerance"]
    assert rows(result, "time of a call")[0]["CUDA_Graphs_ms"] > 0


def test_a_chain_over_memory_becomes_one_kernel_and_faster():
    result = checked("chain")
    assert (fact(result, "kernels"), fact(result, "external_calls")) == (1, 0)
    assert [problem for problem in result.problems if problem.level == "problem"] == []
    (row,) = rows(result, "time of a call (CUDA events")
    # Seven passes over memory become one; 256 MiB is read and written, at 4.8 TB/s at most.
    assert row["compiled_ms"] > 2 * 4 * (1 << 26) / 4.8e12 * 1e3
    assert row["eager_ms"] / row["compiled_ms"] > 2


def test_a_matmul_recompiles_once_for_its_sizes_and_stays_within_bf16():
    result = checked("matmul")
    assert [problem.kind for problem in result.problems if problem.level == "problem"] == ["recompile"]
    assert fact(result, "external_calls") == 1
    assert len(rows(result, "time of a call")) == 3
    assert {row["dtype"] for row in rows(result, "results")} == {"bfloat16"}


def test_the_basis_names_device_driver_cuda_and_torch():
    import torch

    basis = checked("mutated").basis
    assert basis.startswith(f"measured on {torch.cuda.get_device_name()}, driver ")
    assert torch.version.cuda in basis


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["chain"])
def test_as_many_kernels_run_as_are_reported(name):
    """Counted by the profiler, which knows nothing of inductor."""
    import importlib.util

    import torch
    from torch.profiler import ProfilerActivity, profile

    spec = importlib.util.spec_from_file_location("compiled_gpu_targets", TARGETS / "compiled_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fn, args = getattr(module, name)()
    compiled = torch.compile(fn)
    compiled(*args)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        compiled(*args)
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() if "triton" in event.name]
    result = checked(name)
    assert len(kernels) == fact(result, "kernels")
