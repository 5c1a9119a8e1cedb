"""`check graph` without a GPU: reads and copies inside torch's operators, which no tag tells of."""

from pathlib import Path

import pytest
from needs import needs

needs("torch")

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from opusmon.checks import graph_static  # noqa: E402
from opusmon.checks.graph_record import Recorder  # noqa: E402
from opusmon.checks.report import as_text  # noqa: E402
from opusmon.checks.target import load  # noqa: E402

TARGETS = Path(__file__).parent / "targets"
READS = "graph_reads.py"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_graph_gpu.py has it")

READING = (
    "histc",
    "same_ends",
    "normal",
    "sorter",
    "segments",
    "eigh",
    "svd",
    "filled_with",
    "ends",
)


def line_of(mark, module=READS):
    lines = (TARGETS / module).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# HERE {mark}")]
    return number


def checked(name, module=READS):
    return graph_static.check({"target": f"{TARGETS / module}:{name}", "buckets": {}}, lambda stage: None)


def found(result):
    return [
        (one.kind, int(one.where.rpartition(":")[2])) for one in result.problems if one.level == "problem"
    ]


@pytest.mark.parametrize("name", READING)
def test_an_operator_that_reads_a_value_for_itself_is_a_read_on_the_host(name):
    assert found(checked(name)) == [("item", line_of(name))]


@pytest.mark.parametrize("name", READING)
def test_torch_does_read_a_value_inside_these_operators(name):
    """The code of these is the same for all devices, but for histc's, so that the CPU shows it."""
    fn, inputs = load(f"{TARGETS / READS}:{name}")()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        fn(*inputs)
    assert "aten::item" in {event.name for event in seen.events()}


def test_the_terms_of_a_matrix_exponential_depend_on_its_norm():
    assert found(checked("matrix_exp")) == [("item", line_of("matrix_exp"))]


@pytest.mark.parametrize("name", ["sparse", "mask_of_tensor", "two_masks"])
def test_a_size_that_depends_on_values_is_named(name):
    assert found(checked(name)) == [("dynamic_shape", line_of(name))]


@pytest.mark.parametrize(
    "name", ["index_of_host", "number_at_rows", "one_element", "moved", "filled_from_host"]
)
def test_a_copy_to_the_gpu_that_nobody_wrote_is_a_problem(name):
    assert found(checked(name)) == [("pageable_copy", line_of(name))]


@pytest.mark.parametrize(
    "name",
    [
        "zeros_moved",
        "arange_held",
        "rand_moved",
        "drawn_in_place",
        "window_moved",
        "arange_index",
        "ones_copied",
    ],
)
def test_what_a_factory_without_a_device_makes_is_copied_from_the_host_where_it_is_moved(name):
    result = checked(name)
    assert [(one.kind, one.level) for one in result.problems] == [("pageable_copy", "problem")]
    assert found(result) == [("pageable_copy", line_of(name))]


def test_factories_that_say_a_device_or_whose_result_stays_on_the_host_are_no_problem():
    result = checked("clean_factories")
    assert found(result) == []
    assert {one.kind for one in result.problems} <= {"graph_break"}


def test_a_default_device_says_where_factories_put_what_they_make():
    torch.set_default_device("cpu")
    try:
        result = checked("zeros_moved")
    finally:
        torch.set_default_device(None)
    assert result.problems == []
    assert found(checked("default_device")) == []


def test_a_factory_is_copied_by_cuda_too():
    recorder = Recorder(on_gpu=False)
    with pytest.raises((AssertionError, RuntimeError)), recorder.recording():
        torch.arange(8).cuda()
    assert [one.kind for one in recorder.seen] == ["pageable_copy"]


@pytest.mark.parametrize("name", ["drawn_and_read", "read_in_place"])
def test_a_number_drawn_by_torch_on_the_host_and_read_is_named_where_it_is_drawn(name):
    assert found(checked(name)) == [("host_random", line_of(name))]


def test_a_draw_from_a_generator_of_its_own_and_the_copy_of_it_are_one_problem_each():
    assert found(checked("own_draw_moved")) == [
        ("generator", line_of("own_draw")),
        ("pageable_copy", line_of("own_draw_moved")),
    ]


def test_a_list_as_an_index_is_a_tensor_of_python_values():
    assert found(checked("list_index")) == [("host_tensor", line_of("list_index"))]


def test_a_copy_into_a_tensor_that_the_line_puts_on_the_host_waits():
    assert found(checked("copied_out")) == [("host_copy", line_of("copied_out"))]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("array_index", "pageable_copy"),
        ("numpy_random", "host_random"),
        ("rarer_draw", "host_random"),
        ("numpy_generator", "host_random"),
        ("own_generator", "host_random"),
    ],
)
def test_arrays_as_indices_and_numbers_that_numpy_draws_are_of_the_host(name, kind):
    pytest.importorskip("numpy")
    assert found(checked(name, "graph_numpy.py")) == [(kind, line_of(name, "graph_numpy.py"))]


def test_an_old_generator_of_numpy_is_one_too():
    pytest.importorskip("numpy")
    assert found(checked("old_generator", "graph_numpy.py")) == [
        ("host_random", line_of("own_generator", "graph_numpy.py"))
    ]


def test_a_generator_that_each_call_makes_with_a_seed_gives_the_same_in_each():
    pytest.importorskip("numpy")
    result = checked("made_anew", "graph_numpy.py")
    assert result.problems == []
    assert next(fact.value for fact in result.facts if fact.name == "repeatable") is True


def test_siblings_that_a_graph_takes_are_no_problem():
    result = checked("clean_reads")
    assert result.problems == []


def test_what_a_thread_of_the_code_does_is_said_not_to_be_seen():
    result = checked("threaded")
    assert ("what 1 thread of the code does", "operations of the calling thread are seen") in [
        (one.what, one.why) for one in result.not_measured
    ]


def test_one_of_a_kind_is_said_in_the_singular():
    text = as_text(checked("histc"))
    assert "1 new tensor in a call" in text
    assert "one graph of 1 operator\n" in text
