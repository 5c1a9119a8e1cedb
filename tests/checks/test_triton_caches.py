"""The state of the user's cache directories, from directories made for it."""

from __future__ import annotations

import os

from opusmon.checks import triton_caches
from opusmon.checks.triton_caches import filesystem, states
from opusmon.checks.triton_tables import caches

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /tmp rw - tmpfs tmpfs rw,size=1g
31 22 0:31 / /mnt/my\\040disk rw shared:5 master:2 - nfs4 host:/x rw
32 22 0:32 / /mnt/over rw - ext4 /dev/sdb rw
33 22 0:33 / /mnt/over rw - xfs /dev/sdc rw
"""


def of_triton(monkeypatch, path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(path))
    return states()[0]


def test_entries_files_and_bytes(tmp_path, monkeypatch):
    for name, size_b in (("AAAA", 100), ("BBBB", 23)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.cubin").write_bytes(b"x" * size_b)
    os.utime(tmp_path / "AAAA" / "kernel.cubin", (0, 0))
    found = of_triton(monkeypatch, tmp_path)
    assert (found.exists, found.entries, found.files, found.size_b) == (True, 2, 2, 123)
    assert found.is_whole
    assert found.writable
    assert found.chosen_by == "TRITON_CACHE_DIR"
    assert found.changed_s < 3600  # the newest file, not the one of 1970


def test_a_directory_that_is_too_large_to_count_is_said_to_hold_so_much_or_more(tmp_path, monkeypatch):
    for number in range(4):
        (tmp_path / f"{number}.cubin").write_bytes(b"x" * 2_000_000)
    monkeypatch.setattr(triton_caches, "MAX_FILES", 3)
    table = caches([of_triton(monkeypatch, tmp_path)])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["files"], row["size_mb"]) == ("3 or more", "6 or more")
    monkeypatch.setattr(triton_caches, "MAX_FILES", 5)
    table = caches([of_triton(monkeypatch, tmp_path)])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["files"], row["size_mb"]) == (4, 8.0)


def test_a_directory_that_is_not_there_could_be_made(tmp_path, monkeypatch):
    found = of_triton(monkeypatch, tmp_path / "no" / "such")
    assert (found.exists, found.entries, found.changed_s, found.writable) == (False, 0, None, True)
    assert not (tmp_path / "no").exists()


def test_defaults(tmp_path, monkeypatch):
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "a/b")
    triton, inductor = states()
    assert (triton.path, triton.chosen_by) == (str(tmp_path / ".triton" / "cache"), "default")
    assert inductor.path.endswith("/torchinductor_a_b")


def test_triton_home(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert states()[0].path == str(tmp_path / ".triton" / "cache")


def test_filesystems(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS, encoding="ascii")

    def of(path):
        return filesystem(path, str(mounts))

    assert of("/tmp/x/y") == "tmpfs on /tmp"
    assert of("/tmpx/y") == "ext4 on /"
    assert of("/mnt/my disk/a") == "nfs4 on /mnt/my disk"
    assert of("/mnt/over") == "xfs on /mnt/over"
    assert filesystem("/tmp", str(tmp_path / "none")) == ""
