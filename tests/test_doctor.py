"""The doctor: its table, its document, and NVML asked in a process that may hang or crash."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs

from opusmon import doctor
from opusmon.collectors import nvml_check
from opusmon.collectors.facility import Facility
from opusmon.collectors.nvml_check import Answer, Device

H200X2 = Answer("580.159.04", "13.0", (Device(0, "NVIDIA H200", True), Device(1, "NVIDIA H200", True)))
NO_LIBRARY = Answer(error="nvmlInit: NVML Shared Library Not Found")


def fake_pynvml(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Put a module pynvml before the real one, for child processes."""
    (folder / "pynvml.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def examined(root: Path, answer: Answer) -> tuple[int, str, dict[str, object]]:
    """Exit status, table and document."""
    text, document = io.StringIO(), io.StringIO()
    status = doctor.run(False, text, root, lambda: answer)
    assert doctor.run(True, document, root, lambda: answer) == status
    return status, text.getvalue(), json.loads(document.getvalue())


def test_a_crash_of_nvml_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pynvml(monkeypatch, tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert nvml_check.ask().error == "NVML crashed the process that asked it (SIGSEGV)"


def test_a_hang_of_nvml_is_an_answer_and_its_process_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    fake_pynvml(
        monkeypatch,
        tmp_path,
        f"import os, signal, sys\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n",
    )
    assert nvml_check.ask(1.0).error == "NVML did not answer within 1 s: the driver or a GPU hangs"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_broken_module_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pynvml(monkeypatch, tmp_path, "raise RuntimeError('half an upgrade')\n")
    assert nvml_check.ask().error == "the check ended with status 1: RuntimeError: half an upgrade"


def test_what_a_library_prints_does_not_hide_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An old module: no GPM call, bytes instead of text, and chatter on standard output without a line end."""
    fake_pynvml(
        monkeypatch,
        tmp_path,
        "import os\n"
        "class NVMLError(Exception): pass\n"
        "def nvmlInit(): os.write(1, b'{loaded')\n"
        "def nvmlShutdown(): raise NVMLError('gone')\n"
        "def nvmlDeviceGetCount(): return 2\n"
        "def nvmlDeviceGetHandleByIndex(i):\n"
        "    if i: raise NVMLError('GPU is lost')\n"
        "def nvmlDeviceGetName(h): return b'Tesla T4'\n"
        "def nvmlSystemGetDriverVersion(): return b'450.80.02'\n",
    )
    assert nvml_check.ask() == Answer(
        "450.80.02", "", (Device(0, "Tesla T4"), Device(1, error="GPU is lost"))
    )


@pytest.mark.parametrize(
    "out", [b"", b"{}", b"[]", b"null", b'{"devices": [{"colour": 1}]}', b"\xff", b'{"devices": 3}']
)
def test_no_output_of_the_child_raises(out: bytes) -> None:
    assert nvml_check.parse(out, b"why\n", 0).error == "the check ended with status 0: why"


def test_neither_the_current_folder_nor_its_own_is_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under sudo a pynvml.py in the current folder would run as root."""
    copy = shutil.copy(nvml_check.__file__, tmp_path)
    (tmp_path / "pynvml.py").write_text("raise RuntimeError('picked up')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nvml_check, "__file__", copy)
    assert "picked up" not in nvml_check.ask().error


@pytest.mark.parametrize(("profile", "gpm"), [("h200", True), ("a100", False)])
def test_against_a_stub_of_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: str, gpm: bool
) -> None:
    needs("gcc")
    from nvml_stub import Stub

    stub = Stub(tmp_path).build().configure(devices=2, profile=profile)
    for key, value in stub.env().items():
        monkeypatch.setenv(key, value)
    answer = nvml_check.ask()
    assert (answer.driver, answer.error) == ("580.159.04", "")
    assert [(device.index, device.gpm) for device in answer.devices] == [(0, gpm), (1, gpm)]
    assert doctor.run(True, io.StringIO()) == 0


def test_a_good_host_ends_with_0_and_a_bare_one_with_1(tmp_path: Path) -> None:
    status, text, document = examined(tmp_path, H200X2)
    assert (status, document["gpu_ok"]) == (0, True)
    assert text.splitlines()[-1] == "2 GPUs can be watched: run `opusmon`."
    status, text, document = examined(tmp_path, NO_LIBRARY)
    assert (status, document["gpu_ok"]) == (1, False)
    assert "why: nvmlInit: NVML Shared Library Not Found" in text


def test_the_table_fits_and_is_plain(tmp_path: Path) -> None:
    for answer in (H200X2, NO_LIBRARY, Answer(error="x" * 300)):
        _, text, _ = examined(tmp_path, answer)
        assert max(map(len, text.splitlines())) <= 80
        assert all(c.isprintable() for line in text.splitlines() for c in line)
    titles = [line for line in text.splitlines()[1:-1] if line and not line.startswith(" ")]
    assert titles == ["gpu", "streams, stalls", "latency", "host", "l2 (--deep)", "recording", "terminal"]


def test_every_facility_is_in_the_table(tmp_path: Path) -> None:
    _, text, document = examined(tmp_path, H200X2)
    for facility in document["facilities"]:
        line = next(line for line in text.splitlines() if line[10:].startswith(f"{facility['name']} "))
        assert line.split()[0] == facility["state"]


def test_what_is_missing_says_why_and_how_to_mend_it(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text("ID=debian\n")
    _, text, _ = examined(tmp_path, H200X2)
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("  missing bcc for Python"))
    assert lines[place + 1 : place + 3] == [
        "          why: where libbpf.so.1 is not there, it compiles and loads the probes",
        "          fix: sudo apt install python3-bpfcc",
    ]


def test_a_long_command_can_still_be_pasted() -> None:
    command = "/opt/a/very/long/path/to/some/venv/bin/python -m pip uninstall -y pynvml && echo 'two  words' && sudo apt install something"
    lines = list(doctor._entry(Facility("pynvml", "limited", "x", "y", command, ("gpu",))))
    pasted = "\n".join(lines[2:]).replace("fix:", "", 1)
    assert len(lines) > 3
    assert max(map(len, lines)) <= 80
    assert shlex.split(pasted.replace("\\\n", "")) == shlex.split(command)  # as sh(1) joins lines


def test_control_characters_from_outside_are_not_printed(tmp_path: Path) -> None:
    _, text, _ = examined(tmp_path, Answer(error="bad \x1b]0;title\x07 name"))
    assert "\x1b" not in text
    assert "bad ?]0;title? name" in text


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (H200X2, "ok", "2 of 2 devices"),
        (Answer("535.1", "12.2", (Device(0, "A100", False),)), "missing", "0 of 1 devices"),
        (
            Answer("535.1", "12.2", (Device(0, "A100", False), Device(1, "H100", True))),
            "limited",
            "1 of 2 devices",
        ),
        (Answer("450.8", "", (Device(0, "T4", None),)), "unknown", "0 of 1 devices"),
        (NO_LIBRARY, "unknown", "not asked"),
    ],
)
def test_gpm_is_what_the_driver_says(tmp_path: Path, answer: Answer, state: str, words: str) -> None:
    _, _, document = examined(tmp_path, answer)
    gpm = next(facility for facility in document["facilities"] if facility["name"] == "gpm")
    assert (gpm["state"], gpm["found"]) == (state, words)


def test_a_lost_gpu_is_limited_and_the_others_can_be_watched(tmp_path: Path) -> None:
    status, text, document = examined(
        tmp_path, Answer("580.1", "13.0", (Device(0, "H200", True), Device(1, error="GPU is lost")))
    )
    assert status == 0
    assert "why: GPU 1: GPU is lost" in text
    assert text.splitlines()[-1] == "1 GPU can be watched: run `opusmon`."
    assert document["nvml"]["devices"][1] == {"index": 1, "name": "", "gpm": None, "error": "GPU is lost"}


def test_no_device_is_not_success(tmp_path: Path) -> None:
    status, text, _ = examined(tmp_path, Answer("580.1", "13.0"))
    assert status == 1
    assert "the driver is loaded but lists no device" in text


def test_the_document_is_stable(tmp_path: Path) -> None:
    _, _, document = examined(tmp_path, H200X2)
    assert set(document) == {"format", "opusmon", "kernel", "gpu_ok", "facilities", "nvml", "panes"}
    assert document["format"] == 1
    assert set(document["facilities"][0]) == {"name", "state", "found", "reason", "remedy", "needed_by"}
    assert set(document["panes"]) == {"streams", "stalls"}


def test_it_needs_no_terminal_and_no_environment(tmp_path: Path) -> None:
    code = "import sys\nfrom opusmon import doctor\nsys.exit(doctor.run(json=True))"
    package = str(Path(doctor.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": package},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
    )
    assert json.loads(done.stdout)["opusmon"]
    assert done.stderr == b""
    assert done.returncode in (0, 1)
