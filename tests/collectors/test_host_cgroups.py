"""Control groups, v1, v2 and both, in trees made by hand: exact arithmetic, limits above, what cannot be seen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from opusmon.clock import NS, ManualClock
from opusmon.collectors.host.cgroup_tree import hierarchies, label, membership
from opusmon.collectors.host.cgroups import (
    _COLUMNS,
    ELSEWHERE,
    HIDDEN_ABOVE,
    SHARED,
    Groups,
    held_back_pct,
    periods_pct,
)
from opusmon.collectors.host.pressure import NO_PSI
from opusmon.collectors.missing import WENT_BACK

V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNTS = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
"""


class Tree:
    """A /proc and a /sys under construction, and the groups read from them."""

    def __init__(self, root: Path, mounts: str) -> None:
        self.proc, self.sys, self.clock = root / "proc", root / "sys", ManualClock(5 * NS)
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/mountinfo").write_text("23 1 0:20 / /proc rw - proc proc rw\n" + mounts)

    def put(self, folder: str, **contents: str) -> None:
        """Write files of a group; "_" in their names stands for "."."""
        place = self.sys / "fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (place / name.replace("__", ".")).write_text(text)

    def groups(self) -> Groups:
        return Groups(hierarchies(str(self.proc), str(self.sys)), self.clock)


def read(groups: Groups, *memberships: str) -> dict[str, dict[str, float]]:
    """Rows by group and field."""
    members = {label(paths): paths for text in memberships if (paths := membership(text.encode()))}
    return {row.cgroup: dict(zip(_COLUMNS, row.values, strict=True)) for row in groups.read(members)}


def second(tree: Tree, groups: Groups, *memberships: str) -> dict[str, dict[str, float]]:
    """The rows of a second reading, a second after the first, with nothing changed."""
    read(groups, *memberships)
    tree.clock.advance(NS)
    return read(groups, *memberships)


def v2_group(usage_us: int, throttled_us: int = 0, periods: int = 0, throttled: int = 0) -> dict[str, str]:
    """Files of a v2 group that has both controllers."""
    return {
        "cgroup__events": "populated 1\nfrozen 0\n",
        "cpu__stat": f"usage_usec {usage_us}\nuser_usec 1\nsystem_usec 1\nnr_periods {periods}\n"
        f"nr_throttled {throttled}\nthrottled_usec {throttled_us}\nnr_bursts 0\nburst_usec 0\n",
        "memory__current": "3000\n",
        "memory__stat": "anon 1000\nfile 1900\nkernel 1\nshmem 400\n",
        "memory__events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n",
        "cpu__pressure": f"some avg10=0.00 avg60=0.00 avg300=0.00 total={usage_us}\n",
        "memory__pressure": f"some avg10=0.00 avg60=0.00 avg300=0.00 total={throttled_us}\n",
    }


def v2_tree(tmp_path: Path) -> Tree:
    """pod (2 cores, 8000 B) > main (no limit of its own), on a whole machine."""
    tree = Tree(tmp_path, V2_MOUNT)
    tree.put(".", cpu__stat="usage_usec 1\n", memory__stat="file 1\nshmem 0\n")
    tree.put("pod", **v2_group(10_000_000), cpu__max="200000 100000\n", memory__max="8000\n")
    tree.put("pod/main", **v2_group(1_000_000), cpu__max="max 100000\n", memory__max="max\n")
    return tree


def test_a_v2_group_and_the_one_above_that_limits_it(tmp_path: Path) -> None:
    tree = v2_tree(tmp_path)
    groups = tree.groups()
    assert read(groups, "0::/pod/main\n") == {}
    tree.clock.advance(2 * NS)
    tree.put("pod/main", **v2_group(4_000_000, throttled_us=500_000))
    tree.put("pod", **v2_group(13_000_000, throttled_us=1_000_000, periods=20, throttled=15))
    rows = read(groups, "0::/pod/main\n")
    main = rows["/pod/main"]
    assert main["cpu_cores"] == 1.5  # 3 s of CPU in 2 s
    assert main["cpu_quota_cores"] == 2.0
    # pod: 0.5 s/s held back, 1.5 s/s used; two run queues wanted to run: a quarter of the time of each
    assert main["throttled_pct"] == 25.0
    assert main["throttled_periods_pct"] == 75.0
    assert (main["mem_used_b"], main["mem_limit_b"], main["mem_cache_b"]) == (3000, 8000, 1500)
    assert (main["oom_kills"], main["limit_hits"]) == (1, 7)
    assert main["cpu_pressure_pct"] == 100.0  # 3 s of waiting in 2 s: not over the whole time
    assert main["mem_pressure_pct"] == 25.0  # 0.5 s of 2 s
    assert rows.keys() == {"/pod/main", "/pod"}
    assert rows["/pod"]["cpu_cores"] == 1.5
    assert groups.missing == {}


def test_one_busy_thread_held_to_half_a_core_was_held_back_half_of_the_time() -> None:
    assert held_back_pct({"throttled_ns": 0.5 * NS, "usage_ns": 0.5 * NS}) == 50.0
    assert held_back_pct({"throttled_ns": 4.0 * NS, "usage_ns": 4.0 * NS}) == 50.0
    assert held_back_pct({"throttled_ns": 0.01 * NS, "usage_ns": 0.01 * NS}) == pytest.approx(1.0)
    assert held_back_pct({"throttled_ns": 30.0 * NS, "usage_ns": 0.0}) == 100.0


def test_the_root_of_a_whole_machine_has_no_limits(tmp_path: Path) -> None:
    tree = v2_tree(tmp_path)
    groups = tree.groups()
    read(groups, "0::/\n")
    tree.clock.advance(NS)
    root = read(groups, "0::/\n")["/"]
    assert root["cpu_cores"] == 0.0
    assert math.isnan(root["cpu_quota_cores"])
    assert root["throttled_pct"] == 0.0  # nothing limits it: a measured zero
    assert math.isnan(root["mem_used_b"])
    assert "channel host" in groups.missing["cgroup", "mem_used_b", "/"].reason
    assert ("cgroup", "cpu_quota_cores", "/") not in groups.missing  # none is no gap


def test_inside_a_container_limits_above_are_out_of_sight(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2_MOUNT)
    tree.put(".", **v2_group(1), cpu__max="50000 100000\n", memory__max="9000\n")
    groups = tree.groups()
    read(groups, "0::/\n")
    tree.clock.advance(NS)
    row = read(groups, "0::/\n")["/"]
    assert (row["cpu_quota_cores"], row["mem_limit_b"], row["mem_used_b"]) == (0.5, 9000, 3000)
    assert groups.missing["cgroup", "cpu_quota_cores", ""] is HIDDEN_ABOVE
    assert groups.missing["cgroup", "mem_limit_b", ""] is HIDDEN_ABOVE


def test_a_group_outside_of_the_view_is_not_mistaken_for_another(tmp_path: Path) -> None:
    tree = v2_tree(tmp_path)
    groups = tree.groups()
    rows = second(tree, groups, "0::/../pod/main\n")
    assert all(math.isnan(value) for value in rows["/../pod/main"].values())
    assert groups.missing["cgroup", "mem_used_b", "/../pod/main"] is ELSEWHERE


def test_a_mount_of_a_part_of_the_tree(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2_MOUNT.replace("0:38 / ", "0:38 /docker/ab\\040c "))
    tree.put("worker", **v2_group(1), cpu__max="100000 100000\n")
    (found,) = hierarchies(str(tree.proc), str(tree.sys)).values()
    assert found.root == "/docker/ab c"
    steps = found.steps("/docker/ab c/worker")
    assert steps is not None
    assert [step.path for step in steps] == ["/docker/ab c/worker", "/docker/ab c"]
    assert found.steps("/docker/ab cd") is None
    groups = tree.groups()
    rows = second(tree, groups, "0::/docker/ab c/worker\n")
    assert rows["/docker/ab c/worker"]["cpu_quota_cores"] == 1.0


def test_a_group_made_again_starts_anew(tmp_path: Path) -> None:
    tree = v2_tree(tmp_path)
    groups = tree.groups()
    read(groups, "0::/pod/main\n")
    tree.clock.advance(NS)
    tree.put("pod/main", **v2_group(400_000))  # went back, in the same folder
    rows = read(groups, "0::/pod/main\n")
    assert math.isnan(rows["/pod/main"]["cpu_cores"])
    assert groups.missing["cgroup", "cpu_cores", "/pod/main"] is WENT_BACK
    tree.clock.advance(NS)
    (tree.sys / "fs/cgroup/pod/main").rename(tmp_path / "removed")
    tree.put("pod/main", **v2_group(90_000_000))  # another folder with a greater count: no 89 cores
    rows = read(groups, "0::/pod/main\n")
    assert math.isnan(rows["/pod/main"]["cpu_cores"])
    tree.clock.advance(NS)
    tree.put("pod/main", **v2_group(91_000_000))
    assert read(groups, "0::/pod/main\n")["/pod/main"]["cpu_cores"] == 1.0
    assert groups.missing == {}


def v1_tree(tmp_path: Path, usage_ns: int, throttled_ns: int, periods: int, throttled: int) -> Tree:
    """docker/a: 4 cores; memory limit 6000 above, none of its own."""
    new = not (tmp_path / "proc").exists()
    tree = Tree(tmp_path, V1_MOUNTS) if new else Tree.__new__(Tree)
    tree.sys = tmp_path / "sys"
    for name in ("cpu,cpuacct", "memory"):
        tree.put(name, release_agent="")
    tree.put(
        "cpu,cpuacct", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n", cpu__stat="nr_periods 0\n"
    )
    tree.put(
        "cpu,cpuacct/docker/a",
        cpu__cfs_quota_us="400000\n",
        cpu__cfs_period_us="100000\n",
        cpu__stat=f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_time {throttled_ns}\n",
        cpuacct__usage=f"{usage_ns}\n",
    )
    unlimited = "9223372036854771712\n"
    tree.put("memory", memory__limit_in_bytes=unlimited)
    for folder, limit in (("memory/docker", "6000\n"), ("memory/docker/a", unlimited)):
        tree.put(
            folder,
            memory__limit_in_bytes=limit,
            memory__usage_in_bytes="5000\n",
            memory__stat="cache 1\nhierarchical_memory_limit 6000\ntotal_cache 2000\ntotal_shmem 500\n",
            memory__failcnt="3\n",
            memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        )
    return tree


V1 = "4:memory:/docker/a\n2:cpu,cpuacct:/docker/a\n1:name=systemd:/docker/a\n"


def test_a_v1_group(tmp_path: Path) -> None:
    tree = v1_tree(tmp_path, 5 * NS, 0, 100, 0)
    groups = tree.groups()
    read(groups, V1)
    tree.clock.advance(NS)
    v1_tree(tmp_path, 8 * NS, NS, 110, 5)
    rows = read(groups, V1)
    row = rows["/docker/a"]
    assert (row["cpu_cores"], row["cpu_quota_cores"]) == (3.0, 4.0)
    assert row["throttled_pct"] == 25.0  # 1 s held back, 3 s used
    assert row["throttled_periods_pct"] == 50.0
    assert (row["mem_used_b"], row["mem_limit_b"], row["mem_cache_b"]) == (5000, 6000, 1500)
    assert (row["oom_kills"], row["limit_hits"]) == (2, 3)
    assert rows.keys() == {"/docker/a", "/docker"}
    assert groups.missing["cgroup", "cpu_pressure_pct", "/docker/a"].reason.startswith("cgroup v1")
    assert ("cgroup", "cpu_quota_cores", "") not in groups.missing  # the root is in view


def test_a_v1_container_sees_the_memory_limit_above_but_not_the_cpu_limit(tmp_path: Path) -> None:
    tree = v1_tree(tmp_path, 0, 0, 0, 0)
    (tree.proc / "self/mountinfo").write_text(
        "32 31 0:29 /docker/a /sys/fs/cgroup/cpu,cpuacct/docker/a rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 /docker/a /sys/fs/cgroup/memory/docker/a rw - cgroup cgroup rw,memory\n"
    )
    groups = tree.groups()
    rows = second(tree, groups, V1)
    assert rows.keys() == {"/docker/a"}
    assert (rows["/docker/a"]["mem_limit_b"], rows["/docker/a"]["cpu_quota_cores"]) == (6000, 4.0)
    assert groups.missing["cgroup", "cpu_quota_cores", ""] is HIDDEN_ABOVE
    assert ("cgroup", "mem_limit_b", "") not in groups.missing


def test_no_period_passes_while_nothing_runs() -> None:
    assert periods_pct({"nr_throttled": 0.0, "nr_periods": 0.0}) == 0.0
    assert periods_pct({"nr_throttled": 3.0, "nr_periods": 4.0}) == 75.0
    assert periods_pct({"nr_throttled": WENT_BACK, "nr_periods": 4.0}) is WENT_BACK


HYBRID = V1_MOUNTS + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def test_both_kinds_together(tmp_path: Path) -> None:
    """v1 has the controllers, v2 only the pressure: it is that of the process only where it is in the same group."""
    tree = v1_tree(tmp_path, 0, 0, 0, 0)
    (tree.proc / "self/mountinfo").write_text(HYBRID)
    pressed = {name: v2_group(0)[name] for name in ("cpu__pressure", "memory__pressure", "cpu__stat")}
    tree.put("unified", **pressed)
    tree.put("unified/docker/a", **pressed, cgroup__events="")
    groups = tree.groups()
    same, apart = V1 + "0::/docker/a\n", "4:memory:/docker\n2:cpu,cpuacct:/\n0::/\n"
    rows = second(tree, groups, same, apart)
    assert rows["/docker/a"]["cpu_pressure_pct"] == 0.0
    assert rows["/docker/a"]["mem_used_b"] == 5000
    assert math.isnan(rows["/docker"]["cpu_pressure_pct"])
    assert math.isnan(rows["/docker"]["cpu_cores"])  # the root's would be the whole machine's
    assert groups.missing["cgroup", "cpu_cores", "/docker"] is SHARED
    assert rows["/docker"]["mem_used_b"] == 5000


def test_no_pressure_in_this_kernel(tmp_path: Path) -> None:
    tree = v2_tree(tmp_path)
    (tree.sys / "fs/cgroup/pod/main/cpu.pressure").unlink()
    groups = tree.groups()
    rows = second(tree, groups, "0::/pod/main\n")
    assert math.isnan(rows["/pod/main"]["cpu_pressure_pct"])
    assert rows["/pod/main"]["mem_pressure_pct"] == 0.0
    assert groups.missing["cgroup", "cpu_pressure_pct", "/pod/main"] is NO_PSI


def test_controllers_that_are_not_enabled(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2_MOUNT)
    tree.put(".", cpu__stat="usage_usec 1\n")
    tree.put("s", cgroup__events="", cpu__stat="usage_usec 5\n")
    groups = tree.groups()
    row = second(tree, groups, "0::/s\n")["/s"]
    assert (row["cpu_cores"], row["throttled_pct"]) == (0.0, 0.0)
    assert math.isnan(row["mem_used_b"])
    assert "not enabled" in groups.missing["cgroup", "mem_used_b", "/s"].reason


@pytest.mark.parametrize("text", ["", "garbage\n", "max\n", "1e400 100000\n", "-5 -5\n", "9" * 400 + " 1\n"])
def test_nonsense_is_no_limit_and_no_number(tmp_path: Path, text: str) -> None:
    tree = v2_tree(tmp_path)
    for name in (
        "cpu__max",
        "cpu__stat",
        "memory__current",
        "memory__stat",
        "memory__events",
        "cpu__pressure",
    ):
        tree.put("pod/main", **{name: text})
    groups = tree.groups()
    row = second(tree, groups, "0::/pod/main\n")["/pod/main"]
    for name in ("cpu_cores", "mem_used_b", "mem_cache_b", "cpu_pressure_pct", "oom_kills"):
        assert math.isnan(row[name])
        assert ("cgroup", name, "/pod/main") in groups.missing


def test_the_deepest_path_names_a_group_and_is_cleaned() -> None:
    assert label({"": "/", "memory": "/a/b", "cpu": "/a"}) == "/a/b"
    assert label({"": "/a/b", "memory": "/c/d"}) == "/a/b"
    assert label({"memory": "/x\x1b[2Jy"}) == "/x?[2Jy"
    assert label({}) == "/"
