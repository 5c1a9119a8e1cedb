"""Parts of a pass that need no Triton."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from needs import needs

from opusmon.checks.triton_pass import defined, environment
from opusmon.checks.where import NOWHERE

needs("torch")

import torch  # noqa: E402

# torch.compile imports what torch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def plain(x):
    return x


class Doubles(torch.nn.Module):
    def forward(self, x):
        return x * 2


def line_of(found):
    return found.where.endswith(f"{Path(__file__).name}:{inspect.getsourcelines(plain)[1]}")


def test_the_line_of_a_function_behind_torch_compile():
    for called in (plain, torch.compile(plain)):
        assert line_of(defined(called))
        assert defined(called).line == "def plain(x):"


def test_the_line_of_a_module():
    for called in (Doubles(), torch.compile(Doubles())):
        assert defined(called).line == "def forward(self, x):"


def test_what_is_not_the_users_has_no_line():
    assert defined(torch.nn.Linear(2, 2)) == NOWHERE
    assert defined(len) == NOWHERE


def test_all_caches_of_a_pass_lie_in_its_directory(tmp_path):
    found = environment(tmp_path)
    directories = {name: value for name, value in found.items() if name.endswith("_DIR")}
    assert sorted(directories) == ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"]
    assert all(Path(value).parent == tmp_path for value in directories.values())
