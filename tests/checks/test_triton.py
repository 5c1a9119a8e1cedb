"""`check triton` over kernels that Triton compiles for an H200 in earnest, without a GPU; nothing is launched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs

from opusmon.checks.run import run
from opusmon.checks.worker import run as run_here

needs("triton")

TARGETS = Path(__file__).parent / "targets" / "triton_kernels.py"


def line_of(marker):
    """`triton_kernels.py:57` of the line that ends with a comment."""
    lines = TARGETS.read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"triton_kernels.py:{number}"


def line_of_kernel(name):
    lines = TARGETS.read_text(encoding="utf-8").splitlines()
    return f"triton_kernels.py:{lines.index(next(line for line in lines if line.startswith(f'def {name}('))) + 1}"


def checked(name, buckets=None):
    stages = []
    result = run_here("triton", {"target": f"{TARGETS}:{name}", "buckets": buckets or {}}, stages.append)
    return result, stages


def table(result, begin):
    (found,) = [table for table in result.tables if table.title.startswith(begin)]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


@pytest.fixture(scope="module")
def every_reason():
    result, _ = checked("every_reason")
    assert result.error == ""
    return result


@pytest.mark.parametrize(
    ("kind", "marker", "text"),
    [
        ("recompile_alignment", "n", "n was a multiple of 16 and is not now"),
        ("recompile_alignment", "address", "the address of source was aligned to 16 bytes and is not now"),
        ("recompile_equal_to_1", "stride", "stride was 1 and is not now"),
        ("recompile_constexpr", "block", "constexpr BLOCK was 64 and is 128 now"),
        ("recompile_dtype", "dtype", "source was *fp32 and is *fp16 now"),
        ("recompile_options", "options", "num_warps was 4 and is 8 now"),
    ],
)
def test_each_reason_is_named_with_the_line_of_the_launch(every_reason, kind, marker, text):
    (found,) = [problem for problem in every_reason.problems if problem.where.endswith(line_of(marker))]
    assert (found.kind, found.level) == (kind, "problem")
    assert found.what == f"copy_strided was compiled again: {text}"
    assert found.line.startswith("copy_strided[GRID](")
    assert found.facts["defined"].endswith(line_of_kernel("copy_strided"))
    assert found.facts["compilations"] == 1
    assert found.facts["compile_ms"] > found.facts["ptxas_ms"] > 0
    assert found.change


def test_the_same_specialisation_is_no_problem_and_the_first_one_a_note(every_reason):
    assert len(every_reason.problems) == 7
    (note,) = [problem for problem in every_reason.problems if problem.level == "note"]
    assert (note.kind, note.facts["compilations"]) == ("first_use", 1)


def test_a_restarted_worker_takes_the_kernels_from_the_directory(every_reason):
    rows = table(every_reason, "JIT compilation")
    assert [row["cached"] for row in rows] == [False] * 7
    assert all(row["after_restart_ms"] < row["ms"] for row in rows[1:])
    assert not any(problem.kind == "cache_miss" for problem in every_reason.problems)


def test_stages_of_a_compilation_add_up(every_reason):
    for row in table(every_reason, "JIT compilation"):
        parts = row["frontend_ms"] + row["lowering_ms"] + row["ptxas_ms"]
        assert 0 < parts <= row["ms"]


def test_what_each_first_call_pays(every_reason):
    rows = table(every_reason, "what first calls pay: empty caches")
    assert [row["compiled"] for row in rows] == [1, 0, 1, 1, 1, 1, 1, 1]
    again = table(every_reason, "what first calls pay: filled")
    assert [row["compiled"] for row in again] == [0] * 8
    assert [row["from_cache"] for row in again] == [1, 0, 1, 1, 1, 1, 1, 1]
    for row in (*rows, *again):
        assert row["pays_ms"] == pytest.approx(row["first_ms"] - row["steady_ms"])
        parts = row["compile_ms"] + row["load_ms"] + row["launcher_ms"] + row["autotune_ms"]
        assert row["pays_ms"] == pytest.approx(parts + row["rest_ms"])
        assert row["compile_ms"] <= row["first_ms"]
    (paid,) = [fact.value for fact in every_reason.facts if fact.name == "first_calls_cold_ms"]
    assert paid == pytest.approx(sum(row["pays_ms"] for row in rows))


def test_the_basis_says_that_there_was_no_gpu(every_reason):
    if not every_reason.basis.startswith("measured on"):
        assert every_reason.basis.startswith("compiled for cuda 90, no GPU is visible here, torch ")
        assert any("on a GPU" in missing.what for missing in every_reason.not_measured)


def test_the_words_are_those_of_the_stalls_pane(every_reason):
    pytest.importorskip("textual")
    from opusmon.ui.panes.stalls_words import KINDS

    words = {kind.name: kind.words for kind in KINDS}
    (text,) = [fact.text for fact in every_reason.facts if fact.name == "seen_as"]
    assert f'{words["jit"]} (kind "jit")' in text
    assert f'{words["module"].removesuffix(" after warm-up")} (kind "module")' in text


@pytest.fixture(scope="module")
def tuned():
    return checked("tuned")


def test_autotuning_is_a_problem_for_each_new_key_after_the_first_call(tuned):
    result, stages = tuned
    first, later = (
        next(p for p in result.problems if p.kind == "autotune" and p.level == level)
        for level in ("note", "problem")
    )
    assert first.where.endswith(line_of("tuned"))
    assert (first.facts["autotune_runs"], first.facts["configurations"], first.facts["compilations"]) == (
        1,
        2,
        2,
    )
    assert "(2048, 'torch.float32', 'torch.float32')" in later.what
    assert (later.facts["bucket"], later.facts["compilations"]) == ("inputs 2", 0)
    rows = table(result, "autotune runs: empty caches")
    assert [row["key"][:5] for row in rows] == ["(1024", "(2048"]  # the third bucket has the key of the first
    assert rows[0]["best"].startswith("BLOCK: ")
    assert [row["why"] for row in table(result, "JIT compilation")] == ["autotuning"] * 2
    assert "empty caches: first call, inputs 1" in stages
    assert "filled caches: further calls, inputs 3" in stages


def test_a_restarted_worker_tunes_again_unless_results_are_kept(tuned, monkeypatch):
    result, _ = tuned
    (note,) = [problem for problem in result.problems if problem.kind == "autotune_restart"]
    assert note.facts["autotune_runs"] == 2
    assert "TRITON_CACHE_AUTOTUNING=1" in note.change
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "1")
    result, _ = checked("tuned")
    assert not any(problem.kind == "autotune_restart" for problem in result.problems)
    assert [row["cached"] for row in table(result, "autotune runs: empty")] == [False, False]
    assert [row["cached"] for row in table(result, "autotune runs: filled")] == [True, True]


def test_clean_code_is_clean_also_with_a_function_as_constexpr():
    for name in ("clean", "of_a_function"):
        result, _ = checked(name, {"n": [1024, 1000, 1]} if name == "clean" else {})
        assert (result.error, result.clean) == ("", True)
        assert [problem.kind for problem in result.problems] == ["first_use"]


def test_a_later_call_of_the_same_inputs_counts_as_serving():
    result, _ = checked("later_call")
    (found,) = [problem for problem in result.problems if problem.level == "problem"]
    assert (found.kind, found.facts["bucket"]) == ("recompile_alignment", "inputs (a later call)")


def test_a_kernel_of_a_later_bucket():
    result, _ = checked("second_kernel")
    (found,) = [problem for problem in result.problems if problem.level == "problem"]
    assert (found.kind, found.facts["bucket"]) == ("first_use", "inputs 2")
    assert found.where.endswith(line_of("second kernel"))


def test_a_function_that_is_made_in_each_call():
    result, _ = checked("made_anew")
    (found,) = [problem for problem in result.problems if problem.level == "problem"]
    assert found.kind == "recompile_function"
    assert found.what.startswith("inner was looked up in the cache directory 5 more times")
    assert found.where.endswith(line_of("anew"))


def test_what_was_found_before_a_failure_stands():
    result, _ = checked("fails_later")
    assert result.error.startswith("ValueError: planted at ")
    assert any(missing.what == "all that comes after the failure" for missing in result.not_measured)
    assert [row["bucket"] for row in table(result, "what first calls pay")] == ["inputs 1"]


def test_the_users_caches_are_left_alone(tmp_path, monkeypatch):
    own, set_by_target = tmp_path / "own", tmp_path / "set"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(own))
    monkeypatch.setenv("TEST_OWN_CACHE", str(set_by_target))
    result, _ = checked("own_cache")
    assert result.error == ""
    assert list(tmp_path.iterdir()) == []
    assert any("sets a cache directory" in fact.text for fact in result.facts)
    (row,) = [row for row in table(result, "cache directories") if row["cache"] == "Triton"]
    assert (row["directory"], row["exists"], row["named_by"]) == (str(own), False, "TRITON_CACHE_DIR")


def test_the_child_has_a_directory_that_goes_with_it_and_tells_its_stages(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stages = []
    result = run("triton", {"target": "nowhere.py:x", "buckets": {}}, limit_s=60, say=stages.append)
    assert result.error == "there is no file nowhere.py"
    assert "empty caches: making the inputs" in stages  # the grandchild's
    assert result.facts == []  # what did not run compiled not nothing
    assert list(tmp_path.iterdir()) == []


def test_code_that_is_ended_before_the_limit_is_told_why(tmp_path):
    (tmp_path / "slow.py").write_text("import time\n\n\ndef hangs():\n    time.sleep(600)\n")
    result = run("triton", {"target": f"{tmp_path}/slow.py:hangs", "buckets": {}}, limit_s=8.0)
    assert re.match(r"still running after [\d.]+ s during: empty caches: ", result.error)
    assert result.error.endswith(" (of the 8 s some are kept to say what was found)")
    assert result.remedy == "--time-limit gives it longer"


def test_the_command_line():
    ran = subprocess.run(
        [sys.executable, "-m", "opusmon", "check", "triton", f"{TARGETS}:second_kernel", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=120,
        check=False,
    )
    assert ran.returncode == 3, ran.stderr
    assert json.loads(ran.stdout)["problems"][0]["kind"] == "first_use"
