"""`check graph` without a GPU: every planted violation by its kind and line, and nothing on clean code."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from needs import needs

needs("torch")

import torch  # noqa: E402

from opusmon.checks import graph, graph_static, graph_watch  # noqa: E402
from opusmon.checks.graph import merged  # noqa: E402
from opusmon.checks.graph_inputs import changes, keep, key, memory_of, other_values, restore  # noqa: E402
from opusmon.checks.graph_words import WORDS, code_of, kind_of, problem, said  # noqa: E402
from opusmon.checks.report import as_text  # noqa: E402
from opusmon.checks.result import Fact, Result, Table  # noqa: E402
from opusmon.checks.run import run  # noqa: E402
from opusmon.checks.target import Case, load  # noqa: E402
from opusmon.checks.where import Place  # noqa: E402
from opusmon.checks.worker import SCRATCH  # noqa: E402

TARGETS = Path(__file__).parent / "targets" / "graph_plain.py"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_graph_gpu.py has it")


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path):
    """What the check sets in the environment goes with the test."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", SCRATCH):
        monkeypatch.setenv(name, str(tmp_path))


def line_of(mark):
    lines = TARGETS.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# HERE {mark}")]
    return number


def checked(name, **buckets):
    return graph_static.check({"target": f"{TARGETS}:{name}", "buckets": buckets}, lambda stage: None)


def found(result, level="problem"):
    return [(one.kind, int(one.where.rpartition(":")[2])) for one in result.problems if one.level == level]


def fact(result, name):
    return next(one.value for one in result.facts if one.name == name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("item", "item"),
        ("branch", "branch"),
        ("cond", "branch"),
        ("host_copy", "host_copy"),
        ("to_host", "host_copy"),
        ("to_pinned", "host_copy"),
        ("to_pinned_by_place", "host_copy"),
        ("over_lines", "host_copy"),
        ("tolist", "host_copy"),
        ("printed", "host_copy"),
        ("host_tensor", "host_tensor"),
        ("nonzero", "dynamic_shape"),
        ("mask", "dynamic_shape"),
        ("unique", "dynamic_shape"),
        ("synchronize", "synchronize"),
        ("generator", "generator"),
        ("host_random", "host_random"),
        ("python_state", "python_state"),
        ("nested_state", "python_state"),
    ],
)
def test_a_planted_violation_is_named_with_its_line(name, kind):
    result = checked(name)
    assert found(result) == [(kind, line_of(name))]
    one = result.problems[0]
    assert one.line.endswith(f"# HERE {name}")
    assert one.change
    assert not result.clean
    assert result.basis.startswith("static: one call on the CPU")
    assert f"torch {torch.__version__}" in result.basis


@pytest.mark.parametrize("name", ["to_pinned", "to_pinned_by_place"])
def test_a_copy_to_the_host_that_does_not_wait_is_told_by_the_buffer_it_makes(name):
    (one,) = checked(name).problems
    assert one.what.startswith("Tensor.to makes a new pinned buffer on the host in each call")
    assert "waits" not in one.what
    assert "pinned.copy_(x, non_blocking=True)" in one.change
    assert "after the replay" in one.change


def test_a_copy_to_the_host_that_waits_says_so():
    (one,) = checked("to_host").problems
    assert one.what == "Tensor.to copies from the GPU to the host and waits for it"


@pytest.mark.parametrize("name", ["mlp", "filled", "same_device", "not_a_number"])
def test_clean_code_has_no_problems_and_no_notes(name):
    result = checked(name)
    assert result.problems == []
    assert [one.what for one in result.not_measured] == ["capture, replay, their results and times"]
    assert fact(result, "repeatable") is True
    assert fact(result, "graph_breaks") == 0
    assert fact(result, "exports") is True


def test_a_constant_of_the_host_and_a_counter_nobody_reads_are_notes():
    frozen = checked("frozen")
    assert frozen.clean
    assert found(frozen, "note") == [("frozen_tensor", line_of("frozen"))]
    counted = checked("harmless_state")
    assert counted.clean
    assert found(counted, "note") == [("python_state", line_of("harmless_state"))]
    assert "self.calls" in counted.problems[0].what


def test_a_counter_that_the_result_depends_on_is_a_problem():
    result = checked("python_state")
    assert fact(result, "repeatable") is False
    assert "self.step" in result.problems[0].what


@pytest.mark.parametrize(("name", "variable"), [("enclosed_state", "step"), ("enclosed_list", "log")])
def test_state_in_a_variable_of_the_enclosing_function_is_a_problem(name, variable):
    result = checked(name)
    assert found(result) == [("python_state", line_of(name))]
    assert result.problems[0].what.startswith(f"{variable} changes on each call")


def test_results_that_differ_for_no_reason_that_was_seen_are_a_note():
    result = checked("tensor_state")
    assert result.clean
    assert [one.kind for one in result.problems] == ["hidden_state"]


def test_the_step_count_of_an_optimizer_is_told_with_what_makes_it_capturable():
    result = checked("optimizer")
    assert ("optimizer", line_of("optimizer")) in found(result)
    (one,) = [one for one in result.problems if one.kind == "optimizer"]
    assert "capturable=True" in one.change
    assert not any("profiler::" in one.what for one in result.not_measured)


def test_one_hot_reads_values_only_where_it_is_not_told_the_classes():
    assert found(checked("one_hot")) == [("item", line_of("one_hot"))]


def test_code_in_which_nothing_runs_is_not_clean():
    result = checked("lazy")
    assert [one.kind for one in result.problems if one.level == "problem"] == ["empty_graph"]


def test_a_stream_without_a_gpu_is_told_with_its_line():
    result = graph.check({"target": f"{TARGETS}:stream", "buckets": {}}, lambda stage: None)
    assert result.error.startswith("the target needs a GPU, and torch sees none: ")
    assert f":{line_of('stream')}: " in result.error


def test_problems_come_in_the_order_of_the_call():
    assert found(checked("two")) == [("item", line_of("two_item")), ("dynamic_shape", line_of("two_nonzero"))]


def test_a_line_in_a_loop_is_one_problem_with_its_count():
    (one,) = checked("loop").problems
    assert one.facts == {"times": 3}


def test_dynamo_says_its_reason_on_a_line_that_is_known():
    (one,) = checked("branch").problems
    assert one.code == "dynamo: data-dependent jump"
    assert fact(checked("branch"), "exports") is False


def test_the_inside_of_an_operator_of_ones_own_is_said_not_to_be_seen():
    result = checked("opaque")
    assert result.clean
    assert "what happens inside opusmon_test::scaled" in [one.what for one in result.not_measured]


def test_a_graph_break_alone_is_a_note():
    result = checked("graph_break")
    assert result.clean
    assert found(result, "note") == [("graph_break", line_of("graph_break"))]
    assert fact(result, "graph_breaks") == 1


def test_allocations_of_torch_are_counted_and_are_no_problem():
    # 8 x 32 after the first layer, again after the ReLU, 8 x 4 after the second; 4 bytes each.
    result = checked("mlp")
    assert fact(result, "new_tensors") == 3
    assert f"{4 * (8 * 32 * 2 + 8 * 4):,} bytes" in as_text(result)


def test_inputs_that_change_between_buckets_are_named_and_the_graphs_counted():
    result = checked("buckets", batch=[1, 4], scale=[1, 2])
    (table,) = [table for table in result.tables if table.columns == ("input", "what", "values")]
    assert table.rows == (
        ("x", "shape", "(1, 16) | (1, 16) | (4, 16) | (4, 16)"),
        ("scale", "value", "1 | 2 | 1 | 2"),
    )
    assert fact(result, "graphs") == 4
    assert fact(result, "moving_inputs") == 1
    assert "secret" not in as_text(result)


def test_code_that_raises_is_named_with_its_line_through_the_child():
    result = run("graph", {"target": f"{TARGETS}:raises", "buckets": {}}, limit_s=120)
    assert result.error.startswith("RuntimeError: ")
    assert f"graph_plain.py:{line_of('raises')}: return x @ x" in result.error


def test_the_command_ends_with_3_and_a_document_for_programs():
    command = [sys.executable, "-m", "opusmon", "check", "graph", f"{TARGETS}:item", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    (one,) = json.loads(done.stdout)["problems"]
    assert (one["kind"], one["where"].rpartition(":")[2]) == ("item", str(line_of("item")))


def call_of(fn, *args, **kwargs):
    return Case("", fn, args, kwargs)


def test_a_stride_that_follows_from_the_shape_is_no_change_of_its_own():
    def fn(x, past):
        return x

    one = call_of(fn, torch.zeros(4, 2), [torch.zeros(3)])
    wider = call_of(fn, torch.zeros(4, 3), [torch.zeros(3)])
    turned = call_of(fn, torch.zeros(2, 4).T, [torch.zeros(3, dtype=torch.float16)])
    assert changes([one, wider]) == [("x", "shape", "(4, 2) | (4, 3)")]
    assert changes([one, turned]) == [
        ("x", "stride", "(2, 1) | (1, 4)"),
        ("past[0]", "dtype", "float32 | float16"),
    ]
    assert key(one) == key(call_of(fn, torch.ones(4, 2), [torch.ones(3)]))
    assert len({key(one), key(wider), key(turned)}) == 3


def test_a_sparse_input_has_no_stride_and_no_memory_of_its_own():
    sparse = torch.eye(3).to_sparse()
    case = call_of(lambda x: x, sparse)
    assert memory_of(sparse) is None
    assert keep(case) == []
    assert changes([case, call_of(lambda x: x, torch.eye(3))]) == [
        ("x", "stride", "torch.sparse_coo | (3, 1)")
    ]


def test_other_values_are_halved_in_reverse_and_whole_numbers_stay():
    assert other_values(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist() == [[2.0, 1.5], [1.0, 0.5]]
    assert other_values(torch.tensor([1, 2])) is None


@pytest.mark.parametrize("how", ["plain", "grad", "inference", "expanded"])
def test_inputs_get_their_values_back(how):
    if how == "inference":
        with torch.inference_mode():
            tensor = torch.arange(4.0)
    elif how == "expanded":
        tensor = torch.ones(1).expand(4)
    else:
        tensor = torch.arange(4.0).requires_grad_(how == "grad")
    before = tensor.tolist()
    kept = keep(call_of(lambda x: x, tensor))
    if how != "expanded":
        with torch.inference_mode():
            tensor.fill_(7.0)
    restore(kept)
    assert tensor.tolist() == before
    assert len(kept) == (how != "expanded")


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (
            "CUDA error: operation not permitted when stream is capturing\nSearch for `cuda",
            900,
            "900 not permitted while a stream is capturing",
        ),
        (
            "CUDA error: operation failed due to a previous error during capture",
            901,
            "901 invalidated by an earlier error",
        ),
        ("CUDA error: capturing stream has unjoined work", 904, "904 a forked stream was not joined"),
        (
            "CUDA error: operation would make the legacy stream depend on a capturing blocking stream",
            906,
            "906 implicit dependency on the legacy stream",
        ),
        ("shapes differ\nmore", None, "shapes differ"),
    ],
)
def test_what_cuda_says_is_told_by_its_text(text, code, words):
    assert code_of(text) == code
    assert said(text) == words


def test_the_kind_of_a_failure_comes_from_the_code_then_what_was_seen_then_the_line():
    assert kind_of(904, "x.item()", "item") == "unjoined_stream"
    assert kind_of(900, "x.item()", "item") == "item"
    assert kind_of(907, "event.synchronize()", "synchronize") == "synchronize"
    assert kind_of(907, "event.wait()", None) == "captured_event"
    assert kind_of(901, "driver.cuMemAlloc_v2(place, size)", None) == "allocation"
    assert kind_of(901, "cudart.cudaMalloc(place, size)", None) == "allocation"
    assert kind_of(900, "return x * x.sum().item()", None) == "item"
    assert kind_of(900, "rows = x.cpu()", None) == "host_copy"
    assert kind_of(901, "extension.step(x)", None) == "capture_failed"
    assert all(problem(kind, "op", Place("", "")).what for kind in WORDS)


def test_captures_come_first_and_what_only_the_recording_names_is_said_to_be_static():
    def one(kind, where):
        return problem(kind, "it", Place(where, ""))

    measured = [one("item", "a.py:1")]
    static = [
        one("item", "a.py:1"),
        one("host_copy", "a.py:1"),
        one("dynamic_shape", "a.py:2"),
        one("python_state", "a.py:3"),
    ]
    both = merged(measured, static, captured=False)
    assert [(problem.kind, problem.where, problem.level) for problem in both] == [
        ("item", "a.py:1", "problem"),
        ("dynamic_shape", "a.py:2", "problem"),
        ("python_state", "a.py:3", "problem"),
    ]
    assert [problem.what.startswith("static: ") for problem in both] == [False, True, True]
    taken = merged([], static, captured=True)
    assert [problem.level for problem in taken] == ["note", "note", "note", "problem"]


class BrokenAfter:
    """Stands in for the driver: the capture is invalid once `done` says so."""

    def __init__(self, done):
        self.done = done

    def status(self, stream):
        return graph_watch.INVALIDATED if self.done() else graph_watch.ACTIVE


class Stream:
    cuda_stream = 7


def test_a_call_past_torch_after_which_a_capture_is_invalid_is_named_by_its_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    fn, inputs = load(f"{TARGETS}:python_state")()
    watch = graph_watch.Watch(BrokenAfter(lambda: fn.step > 0), 7)
    with watch.watching():
        fn(*inputs)
    assert watch.broke.where.endswith(f"graph_plain.py:{line_of('python_state')}")
    assert watch.broke_op == ""


def test_an_operation_after_which_a_capture_is_invalid_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    fn, inputs = load(f"{TARGETS}:raises")()
    watch = graph_watch.Watch(BrokenAfter(lambda: watch.recorder.last), 7)
    with pytest.raises(RuntimeError), watch.watching():
        fn(*inputs)
    assert watch.broke.where.endswith(f"graph_plain.py:{line_of('raises')}")
    assert watch.broke_op == "Tensor.matmul"


def test_a_target_that_needs_a_gpu_says_so_and_what_to_do(tmp_path):
    target = tmp_path / "needs_gpu.py"
    target.write_text(
        "import torch\n\n\ndef make():\n    return torch.sin, (torch.zeros(2, device='cuda'),)\n"
    )
    result = graph.check({"target": f"{target}:make", "buckets": {}}, lambda stage: None)
    assert result.error.startswith("the target needs a GPU, and torch sees none: ")
    assert "needs_gpu.py:5: return torch.sin" in result.error
    assert result.remedy


def on_a_gpu(monkeypatch, devices, captured):
    """`graph.check` with stand-ins for the GPU and for every process."""
    stages = []

    def part(name, options, **_):
        if name == "graph-static":
            facts = [Fact("devices", devices, "")]
            return Result(
                "graph", basis="static: ", problems=[problem("item", "it", Place("a.py:1", ""))], facts=facts
            )
        return Parts(1, lambda mode, at, warm_ups: not captured).run(name, options, say=stages.append)

    monkeypatch.setattr(graph, "run", part)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return graph.check({"target": "a.py:make"}, lambda stage: None)


def test_with_tensors_on_a_gpu_the_captures_decide(monkeypatch):
    taken = on_a_gpu(monkeypatch, "cpu cuda:0", captured=True)
    assert taken.clean
    assert taken.basis.startswith("measured on NVIDIA H200, ")
    assert f"CUDA 13.0, torch {torch.__version__}" in taken.basis
    assert [(one.level, one.what[:8]) for one in taken.problems] == [("note", "static: ")]
    refused = on_a_gpu(monkeypatch, "cuda:0", captured=False)
    assert [(one.level, one.kind, one.code) for one in refused.problems] == [("problem", "item", "900")]


def test_with_tensors_on_the_cpu_a_gpu_is_left_alone(monkeypatch):
    result = on_a_gpu(monkeypatch, "cpu", captured=True)
    assert result.basis == "static: "
    assert not result.clean


class Parts:
    """Stands in for the processes that capture: `fails` says by mode, place and warm-ups which do."""

    def __init__(self, calls, fails):
        self.calls = calls
        self.fails = fails
        self.started = []

    def run(self, name, options, *, say, **_):
        assert name == "graph-capture"
        say(f"capturing call {options['first']}")
        result = Result(name)
        at, last = options["first"], options["first"] + 1 if options["one"] else self.calls
        self.started.append((options["mode"], at, options["watch"], options["warm_ups"]))
        captured = True
        while at < last and captured:
            captured = not self.fails(options["mode"], at, options["warm_ups"])
            at += 1
        if not captured:
            seen = "other_thread" if options["other_threads"] else "item"
            kind = seen if options["watch"] else "capture_failed"
            result.problems.append(problem(kind, "it", Place(f"a.py:{at}", ""), code="900"))
        result.facts += [
            Fact("calls", self.calls, ""),
            Fact("next", at, ""),
            Fact("captured", captured, ""),
        ]
        if options["measured"] is not None:
            tried = range(options["first"], at if captured else at - 1)
            rows = [(options["mode"], one) for one in tried if one not in options["measured"]]
            result.tables.append(Table("times", ("mode", "inputs"), tuple(rows)))
        return result


def captures(monkeypatch, calls, fails, say=lambda stage: None):
    parts = Parts(calls, fails)
    monkeypatch.setattr(graph, "run", parts.run)
    found = graph.Captures({"target": "a.py:make"}, say, time.monotonic() + 60)
    found.all()
    return parts, found


def test_what_a_process_is_doing_is_a_stage_of_the_check(monkeypatch):
    stages = []
    captures(monkeypatch, 1, lambda mode, at, warm_ups: False, stages.append)
    assert stages[:3] == ["capture in mode global", "capturing call 0", "capture in mode thread_local"]


def test_a_call_that_fails_ends_its_process_and_the_next_goes_on_after_it(monkeypatch):
    parts, found = captures(monkeypatch, 3, lambda mode, at, warm_ups: at == 1 and mode != "relaxed")
    assert [one for one in parts.started if one[0] == "global"] == [
        ("global", 0, False, 3),
        ("global", 2, False, 3),
        ("global", 1, True, 3),
    ]
    assert [(one.kind, one.where, one.facts) for one in found.problems] == [
        ("item", "a.py:2", {"fails_in_modes": "global, thread_local"})
    ]
    facts = {fact.name: fact.value for fact in found.facts}
    assert facts == {"captured_global": 2, "captured_thread_local": 2, "captured_relaxed": True}
    assert found.tables()[0].rows == (("global", 0), ("global", 2))
    assert not found.is_captured


def test_what_only_the_global_mode_minds_is_said(monkeypatch):
    _, found = captures(monkeypatch, 2, lambda mode, at, warm_ups: mode == "global" and at == 0)
    (only,) = found.problems
    assert (only.kind, only.facts) == ("other_thread", {"fails_in_modes": "global"})
    assert 'capture_error_mode="thread_local"' in only.change
    # What no graph of the global mode was there for is measured with the other's.
    assert found.tables()[0].rows == (("global", 1), ("thread_local", 0))


def test_what_only_the_global_mode_minds_is_said_of_a_failure_that_watching_hides(monkeypatch):
    parts = Parts(1, lambda mode, at, warm_ups: mode == "global")

    def run_unwatched(name, options, **more):
        if options["watch"]:
            return Result(name, error="was killed by SIGSEGV")
        return parts.run(name, options, **more)

    monkeypatch.setattr(graph, "run", run_unwatched)
    found = graph.Captures({"target": "a.py:make"}, lambda stage: None, time.monotonic() + 60)
    found.all()
    (only,) = found.problems
    assert (only.kind, only.where, only.code) == ("other_thread", "a.py:1", "900")
    assert only.what.startswith("noticed here: another thread does ")


def test_a_mode_that_was_not_seen_to_the_end_puts_no_blame_on_other_threads(monkeypatch):
    parts = Parts(1, lambda mode, at, warm_ups: mode == "global")

    def run_once(name, options, **more):
        if options["mode"] == "thread_local":
            return Result(name, error="was killed by SIGSEGV")
        return parts.run(name, options, **more)

    monkeypatch.setattr(graph, "run", run_once)
    found = graph.Captures({"target": "a.py:make"}, lambda stage: None, time.monotonic() + 60)
    found.all()
    assert [one.kind for one in found.problems] == ["item"]
    assert [one.what for one in found.not_measured] == ["capture in mode thread_local"]


def test_a_first_use_that_fails_in_a_capture_is_a_note(monkeypatch):
    parts, found = captures(monkeypatch, 1, lambda mode, at, warm_ups: not warm_ups)
    assert parts.started[-1] == ("global", 0, False, 0)
    assert [(one.level, one.where) for one in found.problems] == [("note", "a.py:1")]
    assert found.is_captured


def test_a_process_that_dies_before_it_captured_anything_is_an_error(monkeypatch):
    monkeypatch.setattr(graph, "run", lambda *_, **__: Result("graph-capture", error="was killed by SIGSEGV"))
    found = graph.Captures({"target": "a.py:make"}, lambda stage: None, time.monotonic() + 60)
    found.all()
    assert found.error == "capture in mode global: was killed by SIGSEGV"


def test_a_process_that_dies_later_leaves_no_verdict_and_what_was_found_stands(monkeypatch):
    parts = Parts(3, lambda mode, at, warm_ups: at == 0)

    def run_until_the_second(name, options, **more):
        if options["first"] == 1:
            return Result(name, error="was killed by SIGSEGV", remedy="look at the core")
        return parts.run(name, options, **more)

    monkeypatch.setattr(graph, "run", run_until_the_second)
    found = graph.Captures({"target": "a.py:make"}, lambda stage: None, time.monotonic() + 60)
    found.all()
    assert (found.error, found.remedy) == (
        "capture in mode global: was killed by SIGSEGV",
        "look at the core",
    )
    assert [(one.kind, one.where) for one in found.problems] == [("capture_failed", "a.py:1")]
    assert not found.is_captured


def test_out_of_time_no_further_process_is_started_and_what_was_found_stands(monkeypatch):
    clock = [0.0]
    parts = Parts(1, lambda mode, at, warm_ups: False)

    def slow(name, options, *, limit_s, **more):
        assert limit_s == 60.0 - clock[0]
        clock[0] += 40.0
        return parts.run(name, options, **more)

    monkeypatch.setattr(graph, "run", slow)
    monkeypatch.setattr(graph.time, "monotonic", lambda: clock[0])
    found = graph.Captures({"target": "a.py:make"}, lambda stage: None, 60.0)
    found.all()
    assert [one[0] for one in parts.started] == ["global", "thread_local"]
    assert (found.error, found.is_captured) == ("", True)
    assert {one.what: one.why for one in found.not_measured} == {
        "operations during the capture in mode global": "the time limit",
        "capture without a warm-up": "the time limit",
    }


@pytest.mark.parametrize(("stream", "kind"), [(0, "legacy_stream"), (9, "uncaptured_stream"), (7, None)])
def test_work_on_a_stream_outside_of_the_capture_is_named(monkeypatch, stream, kind):
    class Other:
        cuda_stream = stream

    class Driver:
        def status(self, asked):
            return graph_watch.ACTIVE if asked == 7 else graph_watch.NONE

    monkeypatch.setattr(torch.cuda, "current_stream", Other)
    fn, inputs = load(f"{TARGETS}:frozen")()
    watch = graph_watch.Watch(Driver(), 7)
    with watch.watching():
        fn(*inputs)
    kinds = {seen.kind for seen in watch.outside}
    assert kinds == ({kind} if kind else set())
