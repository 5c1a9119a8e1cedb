"""A user whose HOME is somebody else's, as after `sudo -u`: its settings are not theirs, and nothing fails for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs

import opusmon
from opusmon.paths import demo_file, is_there

NOBODY = 65534


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home of root's that nobody else may look into, with settings that would be noticed."""
    needs("root", "readable")
    config = tmp_path / "home" / ".config" / "opusmon"
    (config / "themes").mkdir(parents=True)
    for name in ("config.toml", "triage.toml", "themes/own.toml"):
        (config / name).write_text("broken")
    (tmp_path / "home").chmod(0o700)
    return tmp_path / "home"


def as_nobody(home: Path, call: str) -> tuple[int, str, str]:
    """Exit status and output of a Python expression, run by a child that has given up root once all is loaded.

    The interpreter itself may lie in a folder that only root may enter.
    """
    script = f"""
import os, sys
from opusmon import cli, collectors, config, recording, session
from opusmon.triage import report, run
from opusmon.ui import themes
collectors.load("host")
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
sys.exit({call})
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    environ |= {"HOME": str(home), "PYTHONPATH": str(Path(opusmon.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environ
    )
    return done.returncode, done.stdout, done.stderr


def test_its_settings_are_not_looked_for(home: Path) -> None:
    assert as_nobody(home, "config.defaults() != {}") == (0, "", "")
    assert as_nobody(home, "themes.load_themes()[1] != []") == (0, "", "")
    status, out, err = as_nobody(home, "cli.main(['themes'])")
    assert (status, err) == (0, "")
    assert "own" not in out.split()


def test_triage_uses_its_own_limits(home: Path) -> None:
    status, out, err = as_nobody(home, f"cli.main(['triage', {str(demo_file())!r}])")
    assert (status, err) == (3, "")
    assert "findings" in out


def test_a_recording_there_is_refused_in_one_line(home: Path) -> None:
    status, _, err = as_nobody(home, "cli.main(['record', '--only', 'host', '--duration', '1s'])")
    assert status == 1
    assert err.count("\n") == 1
    assert err.startswith(f"opusmon: cannot write {home}/.local/state/opusmon/")
    assert "permission denied" in err


def test_what_root_may_see_is_there(home: Path) -> None:
    assert is_there(home / ".config" / "opusmon" / "config.toml")
    assert not is_there(home / "nothing")
