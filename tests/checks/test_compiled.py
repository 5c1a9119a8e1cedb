"""`opusmon check compile` on the CPU: planted violations are named with their lines."""

from __future__ import annotations

import contextlib
import importlib
import json
import warnings
from pathlib import Path

import pytest
from needs import needs

needs("torch")

from opusmon.checks import compiled  # noqa: E402
from opusmon.checks.result import Result  # noqa: E402
from opusmon.checks.run import run  # noqa: E402
from opusmon.checks.worker import SCRATCH  # noqa: E402
from opusmon.cli import main  # noqa: E402

TARGETS = Path(__file__).parent / "targets"
STAGES: list[str] = []


@contextlib.contextmanager
def torch_warnings_off():
    """Of torch about itself, while it is imported and compiles."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        yield


@pytest.fixture(autouse=True, scope="module")
def scratch(tmp_path_factory):
    """One cache directory for all tests: inductor's own start takes longest."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("scratch"))
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", SCRATCH):
            patch.setenv(name, folder)
        with torch_warnings_off():
            importlib.import_module("opusmon.checks.compiled_inductor")
        yield


@pytest.fixture
def traced_only(monkeypatch):
    """As where inductor does not work: what dynamo says stands all the same."""

    def start(device):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("opusmon.checks.compiled_inductor.start", start)


def checked(target: str, **buckets: list[int]) -> Result:
    STAGES.clear()
    with torch_warnings_off():
        return compiled.check({"target": f"{TARGETS / target}", "buckets": buckets}, STAGES.append)


def found(result: Result) -> list[tuple[str, str]]:
    """Kinds and lines of the problems."""
    return [(problem.kind, problem.line) for problem in result.problems if problem.level == "problem"]


def fact(result: Result, name: str):
    return {each.name: each.value for each in result.facts}[name]


def rows(result: Result, title: str) -> list[dict[str, object]]:
    (table,) = [table for table in result.tables if table.title.startswith(title)]
    assert len(set(table.columns)) == len(table.columns)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


@pytest.mark.parametrize(
    ("name", "kind", "line", "change"),
    [
        ("item", "graph_break", "n = y.sum().item()  # break: item", "on the device"),
        ("branch", "graph_break", "if y.sum() > 0:  # break: branch", "torch.where"),
        ("printed", "graph_break", 'print("here")  # break: print', "hot path"),
        ("sized_by_data", "graph_break", "return x.unique() + 1  # break: unique", "fixed size"),
        ("c_function", "unregistered_operator", "_LIBC.abs(3)  # break: ctypes", "custom_op"),
        ("clock", "graph_break", "time.sleep(0)  # break: sleep", "outside"),
        ("disabled", "graph_break", "return _outside(y) + 1  # break: disabled", ""),
        (
            "compiled_by_target",
            "graph_break",
            "torch._dynamo.graph_break()  # break: in a compiled function",
            "Remove",
        ),
        *(
            (name, "graph_break", "torch._dynamo.graph_break()  # break: in a compiled module", "Remove")
            for name in ("module_by_target", "method_by_target")
        ),
    ],
)
def test_a_graph_break_is_named_with_its_line_and_a_change(traced_only, name, kind, line, change):
    result = checked(f"compiled_breaks.py:{name}")
    assert found(result) == [(kind, line)]
    assert change in result.problems[0].change
    assert fact(result, "graph_breaks") == 1


def test_a_break_in_a_loop_leaves_the_whole_function_in_eager(traced_only):
    result = checked("compiled_breaks.py:in_loop")
    assert found(result) == [
        ("graph_break", "torch._dynamo.graph_break()  # break: loop"),
        ("not_compiled", ""),
    ]
    assert "runs in eager" in result.problems[0].what
    assert fact(result, "graphs") == 0


@pytest.mark.parametrize("name", ["clean", "compiled_module"])
def test_clean_code_is_one_graph_without_problems(traced_only, name):
    result = checked(f"compiled_breaks.py:{name}")
    assert result.problems == []
    assert (fact(result, "graphs"), fact(result, "graph_breaks")) == (1, 0)


def test_where_inductor_does_not_work_dynamo_stands_and_the_rest_is_not_measured(traced_only):
    result = checked("compiled_breaks.py:item")
    (missing,) = [missing for missing in result.not_measured if "kernels" in missing.what]
    assert "C++ compiler (g++" in missing.why
    assert found(result)


def test_a_second_size_recompiles_once_and_makes_the_size_dynamic(traced_only):
    result = checked("compiled_recompiles.py:by_batch", batch=[2, 4, 8])
    assert found(result) == [("recompile", "def forward(self, x):")]
    (problem,) = result.problems
    assert problem.code == "tensor 'x' size mismatch at index 0. expected 2, actual 4"
    assert "mark_dynamic(tensor, 0)" in problem.change
    assert (problem.facts["recompiles"], problem.facts["inputs"]) == (1, "batch=4")
    table = rows(result, "traced")
    assert [row["inputs"] for row in table][2:4] == ["batch=8", "batch=2, again"]
    assert [row["dynamic_sizes"] for row in table] == [False, True, None, None, None, None]
    assert [row["recompiles"] for row in table] == [0, 1, 0, 0, 0, 0]


def test_a_module_of_torchs_own_is_named_by_its_class(traced_only):
    result = checked("compiled_recompiles.py:module_of_torch", batch=[1, 8, 64])
    (problem,) = result.problems
    assert problem.what == "the module (Linear) is compiled again for batch=8"
    assert problem.change.startswith("size 1 keeps a graph of its own")


def test_marked_inputs_keep_their_marks_and_need_one_graph(traced_only):
    result = checked("compiled_recompiles.py:marked", batch=[2, 4])
    assert result.problems == []
    assert [row["dynamic_sizes"] for row in rows(result, "traced")] == [True, None, None, None]


def test_inputs_keep_their_strides(traced_only):
    (problem,) = checked("compiled_recompiles.py:by_stride").problems
    assert problem.code == "tensor 'x' stride mismatch at index 0. expected 4, actual 8"
    assert "contiguous" in problem.change


def test_a_number_that_changes_is_a_guard_at_the_line_that_uses_it(traced_only):
    (problem,) = checked("compiled_recompiles.py:by_number").problems
    assert (problem.line, problem.code) == ("return x * n  # guard: n", "n == 2.5")


def test_the_recompile_limit_is_reached_after_eight_and_no_text_is_shown(traced_only):
    result = checked("compiled_recompiles.py:by_name")
    assert found(result) == [
        ("recompile", 'if name == "double":  # guard: name'),
        ("recompile_limit", "def _named(x, name):"),
    ]
    recompile, limit = result.problems
    # The first of the eight compilations is no recompile.
    assert recompile.facts["recompiles"] == 7
    assert limit.code == "torch._dynamo hit config.recompile_limit (8)"
    assert "secret" not in repr(result)


def test_state_that_changes_recompiles_for_inputs_seen_before(traced_only):
    result = checked("compiled_recompiles.py:by_state")
    assert [problem.kind for problem in result.problems] == ["recompile_again"]


def test_of_three_operators_the_two_wrong_ones_are_named_each_with_its_fault():
    result = checked("compiled_ops.py:all_three")
    assert found(result) == [
        ("operator_no_fake", "z = no_fake(y)  # all three: no fake"),
        ("operator_schema", "wrong_schema(z, out)  # all three: undeclared"),
        ("compile_failed", "z = no_fake(y)  # all three: no fake"),
    ]
    assert "register_fake('planted::no_fake')" in result.problems[0].change
    assert "mutates_args=('out',)" in result.problems[1].change
    assert {row["operator"]: (row["fake"], row["opcheck"]) for row in rows(result, "custom operators")} == {
        "planted::right": ("yes", "4 of 4"),
        "planted::no_fake": ("no", "2 of 4"),
        "planted::wrong_schema": ("yes", "3 of 4"),
    }


def test_right_operators_are_clean_and_those_not_called_are_said_to_be(traced_only):
    result = checked("compiled_ops.py:clean")
    assert result.problems == []
    assert {row["operator"]: row["declares_writes_to"] for row in rows(result, "custom operators")} == {
        "planted::writes": "out",
        "planted::right": "nothing",
    }
    assert any("planted::no_fake" in missing.what for missing in result.not_measured)


def test_an_undeclared_write_is_named_with_its_argument(traced_only):
    assert found(checked("compiled_ops.py:undeclared")) == [
        ("operator_schema", "wrong_schema(x, out)  # line that writes undeclared")
    ]


def test_a_fake_of_another_shape_is_wrong(traced_only):
    result = checked("compiled_ops.py:other_shape")
    assert found(result) == [("operator_fake", "return wrong_fake(x) + 1  # line with a wrong fake")]
    assert rows(result, "custom operators")[0]["fake"] == "wrong"


def test_an_operator_without_a_backward_fails_where_gradients_are_asked_for():
    result = checked("compiled_ops.py:trained")
    assert ("operator_compile", "return no_autograd(x) + 1  # line without autograd") in found(result)
    assert "no autograd formula" in result.problems[0].code


def test_a_pointwise_chain_after_a_matmul_is_one_kernel_and_one_call_of_a_library():
    result = checked("compiled_results.py:fused")
    assert found(result) == []
    assert (fact(result, "operations"), fact(result, "kernels"), fact(result, "external_calls")) == (4, 1, 1)
    first, again = rows(result, "compiled with inductor")
    assert first["call_s"] > again["call_s"]
    assert again["kernels"] == 0
    (row,) = rows(result, "results")
    assert (row["dtype"], row["within_tolerance"]) == ("float32", True)
    (row,) = rows(result, "time of a call")
    assert row["compiled_times_faster"] == pytest.approx(row["eager_ms"] / row["compiled_ms"])
    missing = [missing.what for missing in result.not_measured]
    assert any("CUDA Graphs" in what for what in missing)
    assert "times of compiled code alone" not in missing


def test_compiled_code_that_gives_something_else_is_a_problem_with_the_difference():
    (problem,) = [p for p in checked("compiled_results.py:wrong").problems if p.level == "problem"]
    assert problem.kind == "result_difference"
    # Exactly the planted 1, which eager in float64 does not give.
    assert problem.facts == {"max_abs": 1.0, "max_rel": 0.0, "compiled_error": 1.0, "eager_error": 0.0}


def test_chance_is_no_difference():
    result = checked("compiled_results.py:random")
    assert found(result) == []
    assert any("two calls of eager differ" in missing.why for missing in result.not_measured)


def test_inputs_that_are_written_to_start_anew_for_each_comparison():
    result = checked("compiled_results.py:writes_to_its_input")
    assert found(result) == []
    assert rows(result, "results")[0]["max_abs_difference"] == 0


def test_results_with_gradients_are_noted():
    assert "gradients" in [problem.kind for problem in checked("compiled_results.py:trained").problems]


def test_the_users_caches_are_left_alone(monkeypatch, tmp_path, traced_only):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    checked("compiled_breaks.py:clean")
    import torch._inductor.runtime.cache_dir_utils as caches

    assert not caches.cache_dir().startswith(str(tmp_path))


@pytest.mark.parametrize("debug", [False, True])
def test_what_torch_logs_while_results_and_times_are_taken_is_shown_with_debug_only(capfd, debug):
    options = {"target": f"{TARGETS / 'compiled_recompiles.py'}:counting", "debug": debug}
    result = run("compile", options, limit_s=300)
    assert [one.kind for one in result.problems if one.level == "problem"] == ["recompile_again"]
    assert ("hit config.recompile_limit" in capfd.readouterr().err) is debug
    (missing,) = [one.why for one in result.not_measured if one.what == "times of compiled code alone"]
    assert missing.startswith("6 more graphs came about meanwhile")  # after two, up to the limit of eight


def test_a_crash_in_an_operators_fake_is_named_by_its_stage():
    result = run("compile", {"target": f"{TARGETS / 'compiled_ops.py'}:crashing"}, limit_s=120)
    assert result.error == (
        "the checked code was killed by SIGSEGV during: "
        "torch.library.opcheck of planted::crashes: test_faketensor"
    )


def test_the_command_gives_status_3_and_the_same_problems_as_json(capfd):
    status = main(["check", "compile", f"{TARGETS / 'compiled_ops.py'}:all_three", "--json"])
    document = json.loads(capfd.readouterr().out)
    assert (status, document["error"]) == (3, "")
    assert [problem["kind"] for problem in document["problems"]] == [
        "operator_no_fake",
        "operator_schema",
        "compile_failed",
    ]
