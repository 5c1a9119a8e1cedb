"""`opusmon check init` without a GPU: forks, counts, and the whole of it against libraries that keep CUDA's rules."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections import Counter

import pytest
from init_stub import built
from needs import needs

from opusmon.checks.init import _visible
from opusmon.checks.init_fork import Ended, Stages, run_forks, run_one
from opusmon.checks.init_race import WORKS, merged, together
from opusmon.checks.init_scenarios import EMPTY, WRONG, Lab, Seen, all_scenarios, work
from opusmon.checks.init_tally import Costs, Count, legend
from opusmon.checks.init_torch import error_words
from opusmon.checks.init_words import NOT_MEASURED, problems, safe_order
from opusmon.checks.result import Result
from opusmon.checks.run import run
from opusmon.cli import main


def _fails(error):
    raise error


def test_a_fork_says_what_its_work_returned_also_when_it_is_long():
    ended = run_one(lambda _: {"text": "x" * 300_000}, hang_s=10)
    assert ended == Ended({"text": "x" * 300_000})


def test_a_fork_whose_work_raises_says_so():
    ended = run_one(lambda _: _fails(KeyError("no")), hang_s=10)
    assert ended.said == {"raised": "KeyError: 'no'"}


def test_a_fork_that_crashes_is_known_by_its_signal_and_its_call():
    def crash(stages):
        faulthandler.disable()
        stages.enter("cuInit")
        stages.leave()
        stages.enter("cuLaunchKernel")
        os.kill(os.getpid(), signal.SIGSEGV)

    ended = run_one(crash, hang_s=10)
    assert (ended.said, ended.signal, ended.inside) == (None, "SIGSEGV", ["cuLaunchKernel"])


def test_a_fork_that_crashes_outside_of_calls_names_none():
    def crash(stages):
        faulthandler.disable()
        stages.enter("cuInit")
        stages.leave()
        os.kill(os.getpid(), signal.SIGSEGV)

    assert run_one(crash, hang_s=10) == Ended(None, "SIGSEGV")


def test_a_fork_that_hangs_is_killed_and_known_by_the_calls_of_its_threads():
    def hang(stages):
        def thread(slot):
            stages.thread(slot)
            stages.enter(f"cuCall{slot}")
            threading.Event().wait()

        for slot in (1, 2):
            threading.Thread(target=thread, args=(slot,)).start()
        stages.enter("cuStreamSynchronize")
        threading.Event().wait()

    begun = time.monotonic()
    ended = run_one(hang, hang_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 30
    assert (ended.said, ended.hung) == (None, True)
    assert ended.inside == ["cuCall1", "cuCall2", "cuStreamSynchronize"]


def test_at_the_deadline_forks_are_killed_and_not_counted():
    seen: list[tuple[int, Ended]] = []
    jobs = iter([(0, lambda _: {"pid": os.getpid()}), (1, lambda _: threading.Event().wait())])
    done = run_forks(
        jobs,
        lambda key, ended: seen.append((key, ended)),
        at_once=2,
        deadline_s=time.monotonic() + 0.5,
        hang_s=60,
    )
    assert not done
    assert [key for key, _ in seen] == [0]
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_no_more_forks_run_at_once_than_asked_for():
    spans: list[tuple[float, float]] = []

    def nap(_):
        start = time.monotonic()
        time.sleep(0.05)
        return {"span": [start, time.monotonic()]}

    done = run_forks(
        iter([(number, nap) for number in range(6)]),
        lambda _, ended: spans.append(tuple(ended.said["span"])),
        at_once=2,
        deadline_s=time.monotonic() + 20,
        hang_s=10,
    )
    assert done
    assert len(spans) == 6
    inside = [sum(a <= start < b for a, b in spans) for start, _ in spans]
    assert max(inside) == 2


def test_threads_that_meet_inside_have_overlapped():
    meeting = threading.Barrier(3)
    outcome = together(
        Stages(), 3, lambda number, state: meeting.wait(5) and None, setup=lambda number: number
    )
    assert outcome == (WORKS, True)


def test_a_thread_that_raises_something_unknown_leaves_nobody_waiting():
    outcome, _ = together(Stages(), 3, lambda number, _: _fails(KeyError()) if number == 1 else None)
    assert outcome == "KeyError"


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([WORKS, WORKS], "works"),
        ([WORKS, "b", "a", "b"], "a + b"),
        (["not reached", "a"], "a"),
        (["not reached", WORKS], "not reached"),
    ],
)
def test_outcomes_of_threads_as_one(outcomes, said):
    assert merged(outcomes) == said


def _count(name, mode="global", **outcomes):
    scenario = next(item for item in all_scenarios() if item.name == name and item.mode in (mode, ""))
    count = Count.of(scenario)
    for outcome, n in outcomes.items():
        for _ in range(n):
            said = {"outcomes": {"": outcome.replace("_", " ")}, "overlapped": None, "ms": 2.0}
            count.add(Ended(said))
    return count


def test_what_ended_without_an_answer_is_counted_by_how_it_ended():
    count = _count("safe-order", works=2)
    count.add(Ended(None, "SIGSEGV", inside=["cuInit"]))
    count.add(Ended(None, hung=True, inside=["cuInit"]))
    count.add(Ended({"raised": "CudaError: 3 not initialized at cuInit"}))
    assert (count.done, count.worked, count.hangs, count.median_ms) == (5, 2, 1, 2.0)
    assert count.outcomes[""] == Counter(
        {"works": 2, "crash SIGSEGV in cuInit": 1, "hangs in cuInit": 1, "3 not initialized at cuInit": 1}
    )


def test_an_actor_that_fails_makes_the_repetition_fail():
    count = _count("open-allocate")
    for one, other in (("works", "works"), ("works", "900 no"), ("901 no", "works")):
        said = {
            "outcomes": {"capturing thread": one, "other threads": other},
            "overlapped": None,
            "ms": 1.0,
        }
        count.add(Ended(said))
    # Each of them worked twice, both at once only in the first.
    assert (count.done, count.worked, count.failures()) == (3, 1, "1 x 901 no; 1 x 900 no")


def test_a_count_survives_the_way_through_json():
    count = _count("safe-order", works=2, no=1)
    assert Count.unpacked(json.loads(json.dumps(count.packed()))) == count


def test_only_the_safe_order_and_plain_initialisation_make_problems():
    counts = [
        _count("open-allocate", works=1, no=19),
        _count("init-race", works=999, no=1),
        _count("safe-order", works=1000),
        _count("safe-order-threads", works=19, silently_empty_graph=1),
    ]
    found = [(problem.kind, problem.level, problem.code) for problem in problems(counts)]
    assert found == [
        ("init_race_fails", "problem", "1 x no"),
        ("safe_order_fails", "problem", "1 x silently empty graph"),
        ("unsafe_order", "note", "19 x no"),
    ]


def test_the_safe_order_says_what_was_measured_and_what_was_not():
    costs = Costs()
    costs.take("lazy", {"cuInit": 10.0, "launch, first": 5.0, "launch, same kernel again": 0.5})
    costs.take("lazy", {"cuInit": 30.0, "launch, first": 7.0, "launch, same kernel again": 0.5})
    counts = [
        _count("safe-order", works=7),
        _count("first-launch-in-capture", works=1, silently_empty_graph=2),
        _count("first-launch-in-capture", "relaxed", works=3),
    ]
    facts = {fact.name: fact.value for fact in safe_order(costs, counts)}
    assert facts == {
        "safe_order_1_initialise": "cuInit 20 ms",
        "safe_order_2_warm_up": (
            "launch, first 6 ms, again 0.5 ms; without it, context, module loaded, first launch inside the "
            "capture: works in 4 of 6 (fails: lazy global)"
        ),
        "safe_order_3_other_threads": NOT_MEASURED,
        "safe_order_4_capture": "works in 7 of 7",
        "safe_order_5_count_nodes": "silently empty graphs in 2 of 13 repetitions with a capture",
    }


def test_costs_are_medians_of_the_repetitions_and_failures_are_kept_apart():
    costs = Costs()
    for ms in (1.0, 9.0, 2.0):
        costs.add("eager", Ended({"cuInit": ms}))
    costs.add("eager", Ended({"raised": "CudaError: 46 device unavailable at cuInit"}))
    assert costs.table("t").rows == (("cuInit", "eager", 2.0, 1.0, 9.0, 3),)
    assert costs.failed == ["46 device unavailable at cuInit"]


def test_every_scenario_of_one_name_is_the_same_thing_in_another_mode():
    scenarios = all_scenarios()
    assert len(legend("", map(Count.of, scenarios)).rows) == len({item.text for item in scenarios})
    assert len({(item.name, item.loading, item.mode) for item in scenarios}) == len(scenarios)


def test_a_fork_gets_the_environment_of_its_scenario():
    from dataclasses import replace

    def body(lab, stages, mode):
        return Seen({"": f"{os.environ['CUDA_MODULE_LOADING']} {os.environ['X']} {mode}"})

    scenario = replace(all_scenarios()[0], body=body, loading="eager", mode="relaxed")
    ended = run_one(work(scenario, Lab(b"", 2, "", {"X": "1"})), hang_s=10)
    assert ended.said["outcomes"] == {"": "EAGER 1 relaxed"}


def test_a_device_is_one_of_those_that_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _visible(3) == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1")
    assert _visible(1) == "GPU-1"
    with pytest.raises(IndexError):
        _visible(2)


def test_of_two_errors_torch_raised_the_first_is_told():
    def both():
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
        except RuntimeError:
            raise RuntimeError("CUDA error: previous error during capture")  # noqa: B904

    with pytest.raises(RuntimeError) as caught:
        both()
    assert error_words(caught.value) == "CUDA error: operation not permitted when stream is capturing"
    caught.value.__context__.error_code = 900
    assert error_words(caught.value).startswith("900 CUDA error: operation")


# Against the stub.


def _run(*, old: bool = False, limit_s: float = 60.0, **options) -> Result:
    needs("gcc")
    library = str(built(old=old))
    told = {name: options.pop(name) for name in list(options) if name.startswith("STUB_")}
    env = {"OPUSMON_LIBCUDA": library, "OPUSMON_LIBCUDART": library, **told}
    asked = {"repeats": 3, "threads": 3, "at_once": 2, "part": ["safe"], "limit_s": limit_s, **options}
    return run("init", asked, limit_s=limit_s, env=env)


def _outcomes(result: Result) -> dict[tuple[str, str, str, str], dict[str, int]]:
    """Of scenario, loading, mode and actor."""
    found: dict[tuple[str, str, str, str], dict[str, int]] = {}
    for table in result.tables:
        if table.columns[0] == "scenario" and "outcome" in table.columns:
            for scenario, loading, mode, who, outcome, n, *_ in table.rows:
                found.setdefault((scenario, loading, mode, who), {})[outcome] = n
    return found


def test_the_safe_order_works_where_cuda_keeps_its_rules():
    result = _run()
    assert result.error == ""
    assert result.problems == []
    assert result.basis.startswith("measured on Stub GPU, driver ")
    assert result.basis.endswith(", CUDA 13.0")
    outcomes = _outcomes(result)
    assert len(outcomes) == 9
    assert all(counts == {"works": 3} for counts in outcomes.values())


def test_a_driver_without_the_newer_calls_is_asked_by_the_older():
    result = _run(old=True, part=["safe", "costs"])
    assert all(counts == {"works": 3} for counts in _outcomes(result).values())
    assert not result.not_measured


def test_captures_that_begin_too_early_or_beside_others_are_counted_by_their_codes():
    outcomes = _outcomes(_run(part=["first", "open"], repeats=2))
    assert outcomes["capture-before-init", "-", "global", "-"] == {
        "3 not initialized at cuStreamBeginCapture_v2": 2
    }
    assert outcomes["capture-before-context", "-", "global", "-"] == {
        "201 invalid context at cuStreamBeginCapture_v2": 2
    }
    assert outcomes["first-launch-in-capture", "eager", "relaxed", "-"] == {"works": 2}
    assert outcomes["runtime-capture-first", "-", "thread-local", "-"] == {"works": 2}
    assert outcomes["open-allocate", "lazy", "global", "other threads"] == {
        "900 unsupported in capture at cuMemAlloc_v2": 2
    }
    assert outcomes["open-allocate", "lazy", "global", "capturing thread"] == {
        "901 invalidated at cuLaunchKernel, then 901 invalidated at cuStreamEndCapture": 2
    }
    assert outcomes["open-allocate", "lazy", "thread-local", "other threads"] == {"works": 2}
    assert outcomes["open-allocate", "lazy", "thread-local", "capturing thread"] == {"works": 2}


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ({"STUB_EMPTY": "1"}, EMPTY),
        ({"STUB_LOSE": "1"}, WRONG),
        ({"STUB_CRASH": "cuStreamEndCapture"}, "crash SIGSEGV in cuStreamEndCapture"),
        ({"STUB_FAIL": "cuStreamEndCapture=901"}, "901 invalidated at cuStreamEndCapture"),
    ],
)
def test_a_safe_order_that_fails_is_a_problem(how, outcome):
    result = _run(**how)
    assert _outcomes(result)["safe-order", "lazy", "global", "-"] == {outcome: 3}
    kinds = {problem.kind for problem in result.problems}
    assert kinds == {"safe_order_fails"}
    assert not result.clean


def test_a_race_in_plain_initialisation_that_fails_is_a_problem():
    result = _run(part=["race"], STUB_FAIL="cudaMalloc=2")
    found = {
        problem.facts["works"]: problem.code
        for problem in result.problems
        if problem.kind == "init_race_fails"
    }
    assert found == {0: "3 x 2 out of memory at cudaMalloc"}


def test_a_scenario_that_hangs_is_given_up_after_three():
    result = _run(repeats=20, hang_s=0.2, at_once=9, STUB_HANG="cuStreamEndCapture")
    hung = _outcomes(result)["safe-order", "lazy", "global", "-"]
    assert list(hung) == ["hangs in cuStreamEndCapture"]
    assert 3 <= hung["hangs in cuStreamEndCapture"] < 20
    assert any(missing.why.endswith("have hung") for missing in result.not_measured)


def test_out_of_time_it_says_how_many_repetitions_were_done():
    result = _run(repeats=1_000_000, limit_s=2.0)
    assert result.error == ""
    done = [sum(counts.values()) for counts in _outcomes(result).values()]
    assert len(done) == 9
    assert min(done) >= 1
    assert max(done) - min(done) <= 2
    missing = [item for item in result.not_measured if "time limit" in item.why]
    assert missing[0].what == (
        f"the rest of 1000000 repetitions: {min(done)} to {max(done)} of each scenario were done"
    )


def test_costs_are_told_step_by_step_lazy_and_eager():
    result = _run(part=["costs"])
    (table,) = result.tables
    steps = {(step, loading): n for step, loading, *_, n in table.rows}
    assert set(steps.values()) == {3}
    assert {("cuInit", "lazy"), ("context", "eager"), ("cudaFree(0) as the first call", "-")} <= steps.keys()
    assert all(least <= middle <= most for _, _, middle, least, most, _ in table.rows)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (
            {"OPUSMON_LIBCUDA": "/nowhere/libcuda.so.1"},
            "/nowhere/libcuda.so.1: cannot open shared object file",
        ),
        ({"STUB_FAIL": "cuInit=100"}, "100 no device at cuInit"),
        ({"STUB_CRASH": "cuInit"}, "crash SIGSEGV in cuInit"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES names no device 1"),
    ],
)
def test_without_a_driver_or_gpu_it_says_so(how, error, monkeypatch, capfd):
    needs("gcc")
    monkeypatch.setenv("OPUSMON_LIBCUDA", str(built()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in how.items():
        monkeypatch.setenv(name, value)
    assert main(["check", "init", "--part", "safe", "--device", "1", "--json"]) == 1
    document = json.loads(capfd.readouterr().out)
    assert document["error"].startswith(error)
    assert ("GPU" in document["remedy"]) == ("CUDA_VISIBLE_DEVICES" not in how)


def test_the_command_line_shows_outcomes_and_ends_with_their_status(monkeypatch, capfd):
    needs("gcc")
    monkeypatch.setenv("OPUSMON_LIBCUDA", str(built()))
    monkeypatch.setenv("OPUSMON_LIBCUDART", str(built()))
    words = ["check", "init", "--repeats", "2", "--threads", "2", "--part", "safe"]
    assert main(words) == 0
    said = capfd.readouterr().out
    assert "check init: clean" in said
    assert "safe order 4: then capture, on a stream of its own: works in 18 of 18" in said
    monkeypatch.setenv("STUB_EMPTY", "1")
    assert main(words) == 3
    assert "the safe order fails: context, module, warm-up launch, then capture (lazy, global)" in (
        capfd.readouterr().out
    )


@pytest.mark.parametrize(
    "words", [["--threads", "1"], ["--repeats", "0"], ["--part", "x"], ["--threads", "²"]]
)
def test_numbers_out_of_range_are_refused(words, capfd):
    with pytest.raises(SystemExit) as ended:
        main(["check", "init", *words])
    assert ended.value.code == 2
    assert words[0] in capfd.readouterr().err


def test_what_needs_torch_says_what_is_missing():
    needs("torch")
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    result = _run(part=["torch"])
    assert result.error == ""
    assert "built without CUDA" in result.not_measured[-1].why
