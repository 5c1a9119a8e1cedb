"""`check graph` on a GPU: every planted violation by its kind and line; clean code is captured, compared and timed."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from needs import needs

needs("gpu")

from opusmon.checks.result import to_json  # noqa: E402
from opusmon.checks.run import run  # noqa: E402

TARGETS = Path(__file__).parent / "targets"
AT_A_TIME = 10

PLANTED = {
    "graph_plain": {
        "item": "item",
        "branch": "branch",
        "opaque": "item",
        "host_copy": "host_copy",
        "to_host": "host_copy",
        "over_lines": "host_copy",
        "tolist": "host_copy",
        "host_tensor": "host_tensor",
        "nonzero": "dynamic_shape",
        "mask": "dynamic_shape",
        "unique": "dynamic_shape",
        "synchronize": "synchronize",
        "generator": "generator",
        "host_random": "host_random",
        "python_state": "python_state",
    },
    "graph_cuda": {
        "stream_synchronize": "synchronize",
        "event_synchronize": "synchronize",
        "swallowed": "synchronize",
        "allocation": "allocation",
        "pageable_copy": "pageable_copy",
        "legacy_stream": "legacy_stream",
        "uncaptured_stream": "uncaptured_stream",
        "unjoined_stream": "unjoined_stream",
    },
    "graph_reads": {
        **dict.fromkeys(("histc", "same_ends", "normal", "sorter", "segments", "eigh"), "item"),
        **dict.fromkeys(("svd", "matrix_exp", "filled_with", "ends"), "item"),
        **dict.fromkeys(("sparse", "mask_of_tensor", "two_masks"), "dynamic_shape"),
        **dict.fromkeys(("index_of_host", "number_at_rows", "one_element", "moved"), "pageable_copy"),
        "filled_from_host": "pageable_copy",
        "copied_out": "host_copy",
        "list_index": "host_tensor",
    },
    "graph_numpy": {
        "array_index": "pageable_copy",
        **dict.fromkeys(("numpy_random", "rarer_draw", "numpy_generator", "own_generator"), "host_random"),
    },
}
"""Target to kind; the line is the one that is marked with the target's name."""

SILENT = {"legacy_stream", "uncaptured_stream", "python_state", "host_random"}
"""A capture goes through them, or may: replays are wrong."""

CLEAN = {
    "graph_plain": ("mlp", "filled", "same_device", "harmless_state"),
    "graph_cuda": ("joined_stream", "random_numbers", "cache", "two_values"),
    "graph_reads": ("clean_reads",),
    "graph_numpy": ("made_anew",),
}
OTHER = {
    "graph_plain": ("two",),
    "graph_cuda": ("cpu_input", "other_thread"),
    "graph_reads": ("threaded",),
}


def check(module, name, **buckets):
    options = {"target": f"{TARGETS / module}.py:{name}", "buckets": buckets}
    result = run("graph", options, limit_s=300)
    if folder := os.environ.get("OPUSMON_TEST_OUT"):
        with Path(folder, "graph.jsonl").open("a") as out:
            out.write(json.dumps(to_json(result)) + "\n")
    return result


@pytest.fixture(scope="module")
def results():
    names = [
        (module, name) for group in (PLANTED, CLEAN, OTHER) for module in group for name in group[module]
    ]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = list(pool.map(lambda one: check(*one), names))
    return {name: result for (_, name), result in zip(names, found, strict=True)}


def line_of(module, mark):
    lines = (TARGETS / f"{module}.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# HERE {mark}")]
    return number


def found(result):
    return [
        (one.kind, int(one.where.rpartition(":")[2] or 0))
        for one in result.problems
        if one.level == "problem"
    ]


def fact(result, name):
    return next((one.value for one in result.facts if one.name == name), None)


def compared(result):
    return [row for table in result.tables if table.title.startswith("replay against") for row in table.rows]


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [(module, name, kind) for module in PLANTED for name, kind in PLANTED[module].items()],
)
def test_a_planted_violation_is_named_with_its_line(results, module, name, kind):
    result = results[name]
    assert result.error == ""
    assert (kind, line_of(module, name)) in found(result)
    assert result.basis.startswith("measured on ")
    if kind not in SILENT:
        assert found(result)[0] == (kind, line_of(module, name))
        assert result.problems[0].code
        assert result.problems[0].facts["fails_in_modes"] == "global, thread_local"
        assert fact(result, "captured_global") == 0


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in CLEAN for name in CLEAN[module]])
def test_clean_code_is_captured_in_both_modes_and_its_replay_is_the_same(results, module, name):
    result = results[name]
    assert result.error == ""
    assert found(result) == []
    assert fact(result, "captured_global") == fact(result, "captured_thread_local") >= 1
    rows = compared(result)
    assert {row[1] for row in rows} >= {"as given"}
    assert all(row[-1] is True for row in rows)
    assert "replay" not in " ".join(one.what for one in result.not_measured)


def test_times_and_pool_are_given_for_each_bucket():
    result = check("graph_plain", "mlp", batch=[1, 64])
    (table,) = [table for table in result.tables if table.title == "times, medians"]
    assert [row[0] for row in table.rows] == ["batch=1", "batch=64"]
    assert all(value > 0 for row in table.rows for value in row[1:7])
    assert fact(result, "captured_global") == 2
    assert fact(result, "graphs") == 2
    print(*table.columns, *table.rows, *(one.text for one in result.facts), sep="\n")


def test_a_value_in_the_hosts_memory_makes_replays_stale(results):
    result = results["cpu_input"]
    (stale,) = [one for one in result.problems if one.kind == "stale_result"]
    assert "scale" in stale.what
    # linspace(-1, 1) * 3 against half of that times 1.5, reversed: at the ends 1.5 against 0.75.
    assert stale.facts["max_abs_difference"] == pytest.approx(0.75)
    notes = [(one.kind, int(one.where.rpartition(":")[2])) for one in result.problems if one.level == "note"]
    assert ("cpu_input", line_of("graph_cuda", "cpu_input")) in notes


def test_what_another_thread_does_breaks_the_global_mode_only(results):
    result = results["other_thread"]
    assert fact(result, "captured_global") == 0
    assert fact(result, "captured_thread_local") == 1
    assert found(result) == [("other_thread", line_of("graph_cuda", "other_thread"))]
    assert result.problems[0].facts["fails_in_modes"] == "global"
    assert [row[-1] for row in compared(result)] == [True, True]


def test_a_thread_that_reads_a_value_breaks_the_global_mode_and_makes_replays_of_the_other_stale(results):
    result = results["threaded"]
    assert found(result)[0] == ("other_thread", line_of("graph_reads", "threaded"))
    assert result.problems[0].code.startswith("900 ")
    # The sum of all 64 values, read at capture, is half as much with halved values.
    assert [row[1::4] for row in compared(result)] == [
        ("as given", True),
        ("floats halved, in reverse", False),
    ]
    assert [one.kind for one in result.problems if one.level == "problem"] == ["other_thread", "stale_result"]


def test_the_first_is_measured_and_the_further_lines_are_said_to_be_static(results):
    first, second = results["two"].problems[:2]
    assert (first.kind, first.where.rpartition(":")[2]) == ("item", str(line_of("graph_plain", "two_item")))
    assert second.kind == "dynamic_shape"
    assert second.what.startswith("static: ")
    assert second.where.endswith(f":{line_of('graph_plain', 'two_nonzero')}")


def test_whole_numbers_are_tried_with_the_values_of_the_other_inputs(results):
    rows = [row[:2] for row in compared(results["two_values"])]
    assert rows == [
        ("inputs 1", "as given"),
        ("inputs 1", "those of inputs 2"),
        ("inputs 2", "as given"),
        ("inputs 2", "those of inputs 1"),
    ]
    assert results["two_values"].not_measured == []
