"""What may be loaded when, and words that must not be in the tree."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import opusmon

TREE = Path(opusmon.__file__).parents[1]
HEAVY = {"numpy", "textual", "rich", "pynvml", "bcc", "torch", "sqlite3"}
SCREEN = {"textual", "rich", "pynvml"}

VAGUE = {"Manager", "Handler", "Helper", "Processor", "Utils", "Data", "Info"}
"""Words of no meaning in the field: not used in names of classes and modules."""


def modules_of(code: str) -> set[str]:
    """`sys.modules` after a fresh interpreter has run some code."""
    script = f"{code}\nimport sys\nprint(*sorted(sys.modules), file=sys.stderr)\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=TREE
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def loaded(code: str) -> set[str]:
    """Top-level modules after a fresh interpreter has run some code."""
    return {name.partition(".")[0] for name in modules_of(code)}


def test_the_measure_sees_an_import() -> None:
    assert {"numpy"} == loaded("import numpy") & HEAVY


def test_importing_opusmon_loads_nothing_heavy() -> None:
    assert loaded("import opusmon") & HEAVY == set()


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["dump", "--help"]])
def test_help_loads_no_screen_and_no_driver(argv: list[str]) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['opusmon', *{argv!r}]\n"
        "try:\n    runpy.run_module('opusmon', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
    )
    assert loaded(code) & (SCREEN | {"numpy"}) == set()


def test_ctrl_c_while_modules_are_loaded_is_silent() -> None:
    code = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "opusmon.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from opusmon.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=TREE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "module",
    [
        "opusmon.collectors",
        "opusmon.collectors.gpu",
        "opusmon.collectors.facilities",
        "opusmon.collectors.nvml_check",
        "opusmon.collectors.streams",
        "opusmon.collectors.stalls",
        "opusmon.collectors.host",
        "opusmon.collectors.engine",
        "opusmon.collectors.proxy",
        "opusmon.collectors.canary",
        "opusmon.collectors.otlp",
        "opusmon.collectors.l2",
        "opusmon.triage.run",
        "opusmon.doctor",
        "opusmon.export.rows",
        "opusmon.export.summary",
        "opusmon.recording",
        "opusmon.session",
    ],
)
def test_nothing_below_the_screen_loads_it_or_a_driver(module: str) -> None:
    assert loaded(f"import {module}") & SCREEN == set()


@pytest.mark.parametrize("name", ["host", "engine", "proxy", "canary", "otlp"])
def test_collectors_in_need_of_no_gpu_or_probes_load_neither_package(name: str) -> None:
    modules = modules_of(f"import opusmon.collectors.{name}")
    assert f"opusmon.collectors.{name}" in modules
    assert not modules & {"opusmon.collectors.gpu", "opusmon.collectors.ebpf"}


def test_examining_a_host_loads_no_driver() -> None:
    code = "from opusmon.collectors.facilities import survey\nsurvey()"
    assert loaded(code) & (SCREEN | {"bcc"}) == set()


# -- words


def sources(*suffixes: str) -> Iterator[Path]:
    """Files of the project with these suffixes, wherever they lie; not what tools leave behind."""
    left_behind = {"build", "dist", "__pycache__"}
    for folder, below, files in os.walk(TREE):
        below[:] = sorted(
            name for name in below if name == ".ci" or not (name.startswith(".") or name in left_behind)
        )
        shown = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in shown if path.suffix in suffixes)


def found(pattern: str, *suffixes: str) -> list[str]:
    """`file:line: text` of every line that matches."""
    regex = re.compile(pattern)
    return [
        f"{path.relative_to(TREE)}:{number}: {line.strip()[:120]}"
        for path in sources(*suffixes)
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if regex.search(line)
    ]


TEXT = (".py", ".md", ".toml", ".tcss", ".c", ".h", ".sh", ".yml", "")


def test_the_search_reads_the_tree() -> None:
    assert any("class Channel" in line for line in found(r"^class Channel\b", ".py"))
    assert {path.name for path in sources(".toml")} >= {"pyproject.toml"}


def test_no_folder_of_one_machine_is_named() -> None:
    assert found(r"(?<![\w./-])/(?:root|work)(?![\w-])", *TEXT) == []


def test_nothing_is_left_to_do() -> None:
    words = "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX"))
    assert found(rf"\b(?:{words})\b", *TEXT) == []


def test_no_errors_are_swallowed_and_nothing_is_evaluated() -> None:
    calls = {"eval", "exec", "__import__"}
    modules = {"pickle", "marshal", "shelve"}
    bad: list[str] = []
    for path in sources(".py"):
        if "tests" in path.relative_to(TREE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(TREE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler) and _swallows_all(node):
                bad.append(f"{where}: swallows every error")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
                bad.append(f"{where}: {node.func.id}()")
            if isinstance(node, ast.Call) and any(
                _is_true(word) for word in node.keywords if word.arg == "shell"
            ):
                bad.append(f"{where}: shell=True")
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                bad += [f"{where}: {name}" for name in names & modules]
    assert bad == []


def _swallows_all(node: ast.ExceptHandler) -> bool:
    everything = node.type is None or (
        isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
    )
    return everything and all(isinstance(line, ast.Pass) for line in node.body)


def _is_true(word: ast.keyword) -> bool:
    return isinstance(word.value, ast.Constant) and word.value.value is True


def test_names_mean_something() -> None:
    modules = [
        str(path) for path in sources(".py") if {word.capitalize() for word in path.stem.split("_")} & VAGUE
    ]
    classes = [
        f"{path}: {name}"
        for path in sources(".py")
        for name in re.findall(r"^ *class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if set(re.findall(r"[A-Z][a-z]+", name)) & VAGUE
    ]
    assert (modules, classes) == ([], [])


def test_no_module_is_over_600_lines() -> None:
    package = [path for path in sources(".py", ".c", ".h") if path.is_relative_to(TREE / "opusmon")]
    assert [path.name for path in package if path.read_text(encoding="utf-8").count("\n") > 600] == []
