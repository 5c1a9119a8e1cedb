"""The wheel, built from the tree, holds what a user needs and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import opusmon

TREE = Path(opusmon.__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built without isolation where the build backend is installed, else with (pip then fetches it)."""
    if not (TREE / "pyproject.toml").exists():
        pytest.skip("opusmon is installed, and not run from its tree")
    if not (TREE / "README.md").exists() or not (TREE / "LICENSE").exists():
        pytest.fail("README.md and LICENSE belong to the package")
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        "-w",
        str(folder),
    ]
    if importlib.util.find_spec("hatchling"):
        command.append("--no-build-isolation")
    done = subprocess.run([*command, str(TREE)], capture_output=True, text=True, timeout=300)
    if done.returncode and _offline(done.stderr):
        pytest.skip("the build backend hatchling is not installed and the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def _offline(text: str) -> bool:
    return any(
        words in text
        for words in ("Could not find a version", "Temporary failure", "Failed to establish", "Max retries")
    )


def _in_tree(pattern: str, name: Callable[[Path], str]) -> set[str]:
    return {name(path) for path in TREE.glob(pattern) if path.is_file()}


def test_every_module_and_file_of_the_package_is_in_it(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for pattern in (
        "opusmon/**/*.py",
        "opusmon/**/*.tcss",
        "opusmon/**/*.opusmon",
        "opusmon/**/*.c",
        "opusmon/py.typed",
    ):
        assert _in_tree(pattern, lambda path: str(path.relative_to(TREE))) <= names


def test_themes_are_inside_the_package(wheel: zipfile.ZipFile) -> None:
    themes = _in_tree("themes/*.toml", lambda path: f"opusmon/themes/{path.name}")
    assert themes, "the tree has no themes"
    assert themes <= set(wheel.namelist())
    for name in themes:
        tomllib.loads(wheel.read(name).decode())


def test_nothing_else_is_in_it(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"opusmon", f"opusmon-{opusmon.__version__}.dist-info"}
    assert [
        name for name in wheel.namelist() if "__pycache__" in name or name.endswith((".so", ".pyc", ".new"))
    ] == []


def test_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"opusmon-{opusmon.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"Version: {opusmon.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert "opusmon = opusmon.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()
    licence = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_it_is_small(wheel: zipfile.ZipFile) -> None:
    """8 MB with the demo: it goes over ssh to a host in trouble."""
    assert sum(item.compress_size for item in wheel.infolist()) < 8_000_000
