"""What the traces of a cold and a warm pass mean: cases that take a GPU, or a broken host, to see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opusmon.checks.triton_caches import CacheState
from opusmon.checks.triton_hooks import Recorder
from opusmon.checks.triton_problems import after_restart, problems
from opusmon.checks.triton_tables import facts, pays
from opusmon.checks.triton_trace import At, Compilation, Launcher, Load, Times, Trace, Tune, read, write
from opusmon.checks.triton_why import Argument, Specialisation
from opusmon.checks.where import Place

DEFINED, LAUNCHED = Place("kernels.py:3", "def add(x):"), Place("model.py:9", "add[(1,)](x)")


def compiled(
    case=0, call=0, *, tune=-1, kernel="add", maker="triton", value="1", function=0, ms=10.0, cached=False
):
    what = Specialisation({"B": Argument("", value, is_constexpr=True)})
    defined = DEFINED if maker == "triton" else Place("", "")
    return Compilation(
        At(case, call, tune), kernel, maker, function, defined, LAUNCHED, what, ms, {"cubin": 4.0}, cached
    )


def tuned(case=0, key="(8,)", *, maker="triton", cached=False, ms=100.0):
    return Tune(At(case, 0), "add", maker, DEFINED, LAUNCHED, key, 3, ms, "B: 8", cached)


def times(*labels):
    return [Times(label, 50.0, 1.0, 5) for label in labels]


def cache(**changed):
    state = CacheState("Triton", "/c", "default", True, 1, 1, 1, True, True, "ext4 on /", 5.0)
    return replace(state, **changed)


def kinds(cold, warm=None, caches=()):
    return [(problem.kind, problem.level) for problem in problems(cold, warm or Trace(), caches)]


def test_equal_changes_at_one_line_are_one_problem():
    trace = Trace(compilations=[compiled(n, value=str(n)) for n in range(6)], times=times(*"abcdef"))
    first, note = problems(trace, Trace(), ())
    assert note.level == "note"
    assert first.what.startswith("add was compiled 5 more times: constexpr B was 0 and is 1 now; ")
    assert first.what.endswith("and 2 more")
    assert first.facts == {
        "compilations": 5,
        "compile_ms": 50.0,
        "ptxas_ms": 20.0,
        "bucket": "b, c, d, and 2 more",
        "defined": "kernels.py:3",
    }


def test_kernels_that_inductor_writes_anew_are_one_problem_for_each_call():
    held = [compiled(case, kernel=f"triton_{n}", maker="inductor") for case in (0, 1) for n in (1, 2)]
    found = problems(Trace(compilations=held, times=times("a", "b")), Trace(), ())
    assert [(one.kind, one.level, one.facts["compilations"]) for one in found] == [
        ("recompile_inductor", "problem", 2),
        ("first_use", "note", 2),
    ]
    assert "check compile" in found[0].change


def test_compiled_within_autotuning_is_no_recompilation():
    trace = Trace(compilations=[compiled(value="1", tune=0), compiled(value="2", tune=0)], tunes=[tuned()])
    assert kinds(trace) == [("autotune", "note")]


def test_after_a_restart_the_first_of_equals_belongs_to_the_first():
    cold = Trace(compilations=[compiled(), compiled(call=1), compiled(value="7")])
    warm = Trace(compilations=[compiled(ms=3.0), compiled(call=1, ms=2.0)])
    assert after_restart(cold, warm) == [3.0, 2.0, None]


def test_what_a_restarted_worker_does_again():
    cold = Trace(compilations=[compiled()], tunes=[tuned()], tuning_cache=False)
    warm = Trace(compilations=[compiled()], tunes=[tuned()])
    found = {problem.kind: problem for problem in problems(cold, warm, ())}
    assert found["cache_miss"].level == "problem"
    assert found["autotune_restart"].level == "note"
    assert "does not keep results" in found["autotune_restart"].change
    cached = Trace(compilations=[compiled(cached=True)], tunes=[tuned(cached=True)])
    assert {"cache_miss", "autotune_restart"}.isdisjoint(kind for kind, _ in kinds(cold, cached))


def test_new_keys_of_one_kernel_are_one_problem():
    trace = Trace(tunes=[tuned(0), tuned(1, "(16,)"), tuned(2, "(32,)")], times=times("a", "b", "c"))
    found = problems(trace, Trace(), ())[0]
    assert found.what == "add was tuned 2 times by trial for the new keys (16,), (32,)"
    assert (found.facts["autotune_ms"], found.facts["configurations"]) == (200.0, 6)


def test_cache_directories():
    own = Trace(compilations=[compiled()])
    assert kinds(own, caches=[cache(writable=False)])[0] == ("cache_not_writable", "problem")
    assert ("cache_volatile", "note") in kinds(own, caches=[cache(filesystem="tmpfs on /tmp")])
    assert kinds(own, caches=[cache(), cache(name="inductor", writable=False)]) == kinds(own)
    # Where no kernel was compiled the directory matters to nobody.
    assert kinds(Trace(), caches=[cache(writable=False)]) == []
    inductor = Trace(compilations=[compiled(maker="inductor")])
    assert ("cache_not_writable", "problem") in kinds(
        inductor, caches=[cache(name="inductor", writable=False)]
    )


def test_autotuning_counts_once_in_what_a_first_call_pays():
    trace = Trace(
        compilations=[compiled(ms=7.0), compiled(tune=0, ms=9.0), compiled(call=3, ms=99.0)],
        loads=[Load(At(0, 0), "add", 2.0), Load(At(0, 0, 0), "add", 3.0)],
        launchers=[Launcher(At(0, 0), "launcher", 5.0)],
        tunes=[tuned(ms=20.0)],
        times=times("a"),
    )
    ((label, first, steady, pays_ms, *rest),) = pays(trace, "x").rows
    assert (label, first, steady, pays_ms) == ("a", 50.0, 1.0, 49.0)
    assert rest == [2, 0, 7.0, 2, 2.0, 5.0, 1, 20.0, 49.0 - 34.0]


def test_a_trace_comes_back_as_it_was_written(tmp_path):
    trace = Trace("basis", True, [compiled(tune=0)], [Load(At(0, 0), "add", 1.0)])
    trace.launchers.append(Launcher(At(-1, 0), "cuda_utils", 300.0))
    trace.tunes.append(tuned())
    trace.times, trace.missing, trace.facts = times("a"), [("what", "why")], ["fact"]
    write(trace, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_mode & 0o777 == 0o600
    assert read(tmp_path / "trace.json") == trace
    assert read(tmp_path / "none") == Trace()


class InductorTuner:
    """Stands for torch._inductor.runtime.triton_heuristics.CachingAutotuner, which takes a GPU."""

    def __init__(self, function):
        self.fn, self.launchers = function, ["slow", "fast"]

    def autotune_to_one_config(self, *args):
        self.launchers = self.launchers[1:]


def test_autotuning_by_inductor_is_seen(tmp_path):
    def triton_poi_0():
        pass

    class Tuner(InductorTuner):
        pass

    recorder = Recorder(Trace(), tmp_path)
    recorder._wrap_inductor_tuner(Tuner)
    Tuner(triton_poi_0).autotune_to_one_config()
    (found,) = recorder.trace.tunes
    assert (found.kernel, found.maker, found.configs, found.cached) == ("triton_poi_0", "inductor", 2, False)


@pytest.mark.parametrize(("first_ms", "words"), [(1.5, "0.5 ms"), (13.4, "12 ms"), (3201.0, "3,200 ms")])
def test_what_first_calls_cost_is_not_rounded_to_nothing(first_ms, words):
    trace = Trace(times=[Times("a", first_ms, 1.0, 5)])
    (paid,) = [fact for fact in facts(trace, Trace()) if fact.name == "first_calls_cold_ms"]
    assert f"take {words} more than steady ones" in paid.text
