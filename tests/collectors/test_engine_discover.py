"""Finding engines: from a /proc made for the purpose, and a real server behind it."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from opusmon.clock import SystemClock
from opusmon.collectors.engine import EngineCollector
from opusmon.collectors.engine.discover import PER_SCAN, Candidate, Questions, View, choose, ephemeral, look
from opusmon.collectors.engine.explain import nothing
from opusmon.collectors.engine.listeners import Listener, Program, kind_of, listeners, parse_table
from opusmon.schema import Batch, StringTable

NS = 10**9
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(host: str, port: int, inode: int, state: str = "0A") -> str:
    """A socket as the kernel prints it: 32-bit words in this machine's byte order (little-endian)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host)
    words = "".join(f"{word:08X}" for word in struct.unpack(f"<{len(packed) // 4}I", packed))
    return f"   0: {words}:{port:04X} {'0' * len(words)}:0000 {state} 00000000:00000000 00:00000000 00000000  0  0 {inode} 1\n"


class Proc:
    """A /proc folder in the making."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tables = {"tcp": [HEAD], "tcp6": [HEAD]}
        (root / "net").mkdir()
        (root / "sys/net/ipv4").mkdir(parents=True)
        (root / "sys/net/ipv4/ip_local_port_range").write_text("32768\t60999\n")
        self.write()

    def write(self) -> None:
        for name, lines in self.tables.items():
            (self.root / "net" / name).write_text("".join(lines))

    def listen(self, port: int, inode: int, host: str = "0.0.0.0") -> None:
        self.tables["tcp6" if ":" in host else "tcp"].append(line(host, port, inode))
        self.write()

    def close(self, port: int) -> None:
        self.tables = {
            name: [one for one in lines if f":{port:04X} " not in one] for name, lines in self.tables.items()
        }
        self.write()

    def run(self, pid: int, comm: str, *arguments: str, inodes: tuple[int, ...] = ()) -> None:
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "comm").write_text(comm + "\n")
        (folder / "cmdline").write_text("\0".join(arguments) + "\0")
        for number, inode in enumerate(inodes, 3):
            (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


# --- /proc


def test_the_kernels_own_table_reads_right() -> None:
    """A socket of this test is found in the real /proc/net/tcp."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, inode = server.getsockname()[1], os.fstat(server.fileno()).st_ino
        assert Listener("127.0.0.1", port, inode) in listeners()
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port, inode = server.getsockname()[1], os.fstat(server.fileno()).st_ino
        assert Listener("::1", port, inode) in listeners()


def test_reading_ends_at_the_first_socket_that_does_not_listen() -> None:
    table = [
        line("0.0.0.0", 8000, 7),
        line("::", 8001, 8),
        line("1.2.3.4", 8002, 9, "01"),
        line("0.0.0.0", 8003, 10),
    ]
    assert [(one.host, one.port, one.inode) for one in parse_table(table)] == [
        ("0.0.0.0", 8000, 7),
        ("::", 8001, 8),
    ]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.1.1"),
        ("::1", "::1"),
        ("10.0.0.5", ""),
        ("fd00::5", ""),
    ],
)
def test_only_loopback_is_ever_asked(host: str, loopback: str) -> None:
    [one] = parse_table([line(host, 8000, 1)])
    assert (one.host, one.loopback) == (host, loopback)


def test_one_listener_per_port_and_rather_the_one_that_loopback_reaches(proc: Proc) -> None:
    proc.listen(8000, 1, "10.0.0.5")
    proc.listen(8000, 2, "::1")
    assert [(one.host, one.inode) for one in listeners(proc.root)] == [("::1", 2)]


@given(st.text(max_size=200))
def test_no_table_upsets_the_reader(text: str) -> None:
    try:
        list(parse_table([text]))
    except ValueError:
        assert len(text.split()) >= 10  # only the kernel writes there


@pytest.mark.parametrize(
    ("comm", "arguments", "kind"),
    [
        ("vllm", "/usr/bin/python3 /usr/local/bin/vllm serve m --port 8000", "vllm"),
        ("VLLM::APIServer", "VLLM::APIServer", "vllm"),
        ("python3", "python3 -m vllm.entrypoints.openai.api_server --model m", "vllm"),
        ("python", "python -u -m sglang.launch_server --port 30000", "sglang"),
        ("sglang::schedul", "sglang::scheduler", "sglang"),
        ("trtllm-serve", "/usr/bin/python3 /usr/local/bin/trtllm-serve m", "trtllm"),
        ("tritonserver", "/opt/tritonserver/bin/tritonserver --model-repository=/m", "triton"),
        ("text-generation", "text-generation-router --port 80", "tgi"),
        ("llama-server", "./llama-server -m x.gguf --metrics", "llamacpp"),
        ("dcgm-exporter", "dcgm-exporter", "dcgm"),
        ("python3.12", "python3.12 serve.py", ""),
        ("uvicorn", "/venv/bin/python /venv/bin/uvicorn app:app", ""),
        ("docker-proxy", "/usr/bin/docker-proxy -proto tcp -host-port 8000", ""),
        ("vim", "vim vllm.py", None),
        ("python3", "/usr/bin/python3 -P -m opusmon stream --only gpu", None),
        ("opusmon", "opusmon", None),
        ("sshd", "sshd: /usr/sbin/sshd -D", None),
        ("nginx", "nginx: master process", None),
    ],
)
def test_what_a_process_looks_like(comm: str, arguments: str, kind: str | None) -> None:
    assert kind_of(comm, arguments.split()) == kind


# --- the policy


def candidates(proc: Proc, **options: object) -> list[tuple[int, int, str]]:
    return [(one.listener.port, one.pid, one.kind) for one in look(proc.root, **options).candidates]  # type: ignore[arg-type]


def test_the_named_port_comes_first_and_strays_of_the_kernel_never(proc: Proc) -> None:
    """vLLM on 8010 with the sockets it also has: NCCL, ZeroMQ and torch.distributed on ports the kernel gave out."""
    for port, inode in ((8010, 1), (45001, 2), (60000, 3), (29500, 4), (5555, 5)):
        proc.listen(port, inode)
    proc.run(70, "vllm", "python3", "/usr/bin/vllm", "serve", "m", "--port", "8010", inodes=(1, 2, 3, 4, 5))
    assert candidates(proc) == [(8010, 70, "vllm"), (5555, 70, "vllm")]


def test_a_port_the_kernel_gives_out_is_asked_when_the_command_line_names_it(proc: Proc) -> None:
    proc.listen(45001, 1)
    proc.run(70, "python3", "python3", "serve.py", "--bind=0.0.0.0:45001", inodes=(1,))
    assert candidates(proc) == [(45001, 70, "")]


def test_other_services_are_left_alone(proc: Proc) -> None:
    for inode, port in enumerate((22, 25, 2049, 3306, 5432, 6379, 11211, 27017), 1):
        proc.listen(port, inode)
    proc.run(70, "python3", "python3", "x.py", inodes=tuple(range(1, 9)))
    proc.listen(9999, 99)
    proc.run(71, "java", "java", "-jar", "x.jar", inodes=(99,))
    assert candidates(proc) == []


def test_opusmon_does_not_ask_itself(proc: Proc) -> None:
    proc.listen(8788, 1)
    proc.listen(8789, 2)
    proc.run(70, "python3", "python3", "-m", "opusmon", inodes=(1,))
    proc.run(71, "python3", "python3", "test.py", inodes=(2,))
    assert candidates(proc, own=(71,)) == []


def test_a_known_port_is_asked_even_of_a_stranger(proc: Proc) -> None:
    """Another user's engine: whose socket it is may not be seen."""
    for inode, port in enumerate((8000, 30000, 8002, 9400, 7777), 1):
        proc.listen(port, inode)
    assert [port for port, _, _ in candidates(proc)] == [8000, 8002, 9400, 30000]


def test_the_owner_is_told_by_its_command_line_where_its_sockets_are_hidden(proc: Proc) -> None:
    proc.listen(8123, 1)
    proc.run(70, "llama-server", "llama-server", "--port", "8123")
    assert candidates(proc) == [(8123, 70, "llamacpp")]


def test_only_the_asked_for_processes(proc: Proc) -> None:
    for inode, pid in ((1, 70), (2, 71)):
        proc.listen(8000 + inode, inode)
        proc.run(pid, "vllm", "vllm", inodes=(inode,))
    assert candidates(proc, only_pids=frozenset({71})) == [(8002, 71, "vllm")]


def test_forked_workers_share_a_socket_and_the_first_one_owns_it(proc: Proc) -> None:
    proc.listen(8000, 1)
    for pid in (72, 70, 71):
        proc.run(pid, "vllm", "vllm", "serve", inodes=(1,))
    assert candidates(proc) == [(8000, 70, "vllm")]


def test_without_a_proc_there_is_nothing(tmp_path: Path) -> None:
    assert look(tmp_path / "none") == View()
    assert ephemeral(tmp_path) == (32768, 60999)


def view(*ports: int, pid: int = 0, inode: int = 1) -> View:
    return View(tuple(Candidate(Listener("0.0.0.0", port, inode), pid, "", 4) for port in ports))


def ports(found: list[Candidate]) -> list[int]:
    return [one.listener.port for one in found]


def test_a_listener_is_asked_once_and_after_a_minute_and_every_five() -> None:
    questions, seen = Questions(), view(8000)
    asked = []
    for second in range(0, 1000, 10):
        for one in questions.due(seen, second * NS):
            questions.asked(one, second * NS)
            asked.append(second)
    assert asked == [0, 60, 360, 660, 960]


def test_a_new_process_at_the_port_is_asked_at_once() -> None:
    questions = Questions()
    for one in questions.due(view(8000), 0):
        questions.asked(one, 0)
    assert ports(questions.due(view(8000), NS)) == []
    assert ports(questions.due(view(8000, inode=2), NS)) == [8000]


def test_a_few_per_scan() -> None:
    questions, seen = Questions(), view(*range(7000, 7010))
    rounds = []
    for scan in range(4):
        due = questions.due(seen, scan * 10 * NS)
        rounds.append(ports(due))
        for one in due:
            questions.asked(one, scan * 10 * NS)
    assert rounds == [[7000, 7001, 7002, 7003], [7004, 7005, 7006, 7007], [7008, 7009], []]
    assert PER_SCAN == 4


def test_the_other_ports_of_a_found_engine_are_left_alone() -> None:
    questions, seen = Questions(), view(8000, 8100, pid=70)
    questions.settle(seen.candidates[0])
    assert ports(questions.due(seen, 0)) == []
    assert ports(Questions().due(seen, 0, taken={8000})) == []


# --- the words


def test_why_nothing_was_found() -> None:
    assert "nothing that listens" in nothing(View()).reason
    assert "--enable-metrics" in nothing(View()).remedy
    assert "2 likely ports" in nothing(view(8000, 8001)).reason
    assert "hidden from this user" in nothing(View(hidden=2)).reason
    contained = nothing(View(programs=(Program(70, "vllm", frozenset()),)))
    assert "vLLM runs (pid 70)" in contained.reason
    assert "container" in contained.remedy
    remote = choose([Listener("10.0.0.5", 8000, 1)], [Program(70, "vllm", frozenset())], {1: 70})
    assert nothing(remote).remedy == "Name it: --engine http://10.0.0.5:8000"


# --- with a real server


async def drain(source: EngineCollector, enough: object, limit_s: float = 60.0) -> list[Batch]:
    seen: list[Batch] = []
    async with asyncio.timeout(limit_s), aclosing(source.batches()) as stream:
        async for batch in stream:
            seen.append(batch)
            if enough(seen):  # type: ignore[operator]
                break
    return seen


def told(source: EngineCollector, seen: list[Batch]) -> list[tuple[str, str, str]]:
    return [
        (
            source.strings.text(row["scope"]),
            source.strings.text(row["reason"]),
            source.strings.text(row["remedy"]),
        )
        for batch in seen
        if batch.channel.name == "status"
        for row in batch.rows
        if not row["field"]
    ]


def engines(seen: list[Batch]) -> list[object]:
    return [row for batch in seen if batch.channel.name == "engine" for row in batch.rows]


class Server:
    """A server on loopback that can go away and come back at its port."""

    def __init__(self) -> None:
        self.text = ""
        self.status = 200
        self.asked: list[float] = []
        self.port = 0

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(time.monotonic())
        return web.Response(text=self.text, status=self.status)

    async def __aenter__(self) -> Server:
        self.runner = web.ServerRunner(web.Server(self.answer), shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


def finder(proc: Proc, **options: object) -> EngineCollector:
    return EngineCollector(StringTable(), SystemClock(), NS // 4, proc=proc.root, scan_ns=NS // 10, **options)  # type: ignore[arg-type]


async def test_an_engine_is_found_and_followed(proc: Proc) -> None:
    async with Server() as server:
        server.text = 'vllm:num_requests_running{model_name="m"} 3\n'
        proc.listen(server.port, 1)
        proc.run(70, "vllm", "vllm", "serve", "--port", str(server.port), inodes=(1,))
        source = finder(proc)
        seen = await drain(source, lambda seen: len(engines(seen)) == 3)
        gaps = [b - a for a, b in zip(server.asked, server.asked[1:], strict=False)]
    row = engines(seen)[0]
    assert (row["pid"], row["running"]) == (70, 3)  # type: ignore[index]
    assert source.strings.text(row["engine"]) == f"127.0.0.1:{server.port}/metrics"  # type: ignore[index]
    assert min(gaps) > 0.15  # the question was the first scrape, and the second one came an interval later
    assert not any("inference engine" in reason for _, reason, _ in told(source, seen))


async def test_an_engine_that_comes_back_is_a_restart(proc: Proc) -> None:
    """It goes, its listener goes, it comes back with lower counters: one engine, and its row says so."""
    async with Server() as server:
        server.text = 'vllm:generation_tokens_total{model_name="m"} 500\n'
        proc.listen(server.port, 1)
        proc.run(70, "vllm", "vllm", "--port", str(server.port), inodes=(1,))
        source, step = finder(proc), 0

        async with asyncio.timeout(60), aclosing(source.batches()) as stream:
            seen = []
            async for batch in stream:
                seen.append(batch)
                if step == 0 and len(engines(seen)) == 2:
                    await server.__aexit__()
                    proc.close(server.port)
                    step = 1
                elif step == 1 and any("it has gone" in reason for _, reason, _ in told(source, seen)):
                    server.text = 'vllm:generation_tokens_total{model_name="m"} 7\n'
                    await server.__aenter__()
                    proc.listen(server.port, 2)
                    step = 2
                elif step == 2 and len(engines(seen)) == 3:
                    break
    assert [row["restarts"] for row in engines(seen)][1:] == [0, 1]  # type: ignore[index]


async def test_sglang_without_metrics_is_told_what_to_do_while_it_lives(proc: Proc) -> None:
    async with Server() as server:
        server.status = 404
        proc.listen(server.port, 1)
        arguments = ("python3", "-m", "sglang.launch_server", "--port", str(server.port))
        proc.run(70, "python3", *arguments, inodes=(1,))
        source = finder(proc)
        place = f"127.0.0.1:{server.port}"

        def enough(seen: list[Batch]) -> bool:
            if any("404" in reason for _, reason, _ in told(source, seen)):
                proc.close(server.port)
            return (place, "", "") in told(source, seen)

        seen = await drain(source, enough)
    words = "it looks like SGLang, but it answers HTTP 404"
    assert (place, words, "Start SGLang with --enable-metrics") in told(source, seen)


async def test_it_can_be_started_again(proc: Proc) -> None:
    """As after a fault: what was found is followed on."""
    async with Server() as server:
        server.text = 'vllm:num_requests_running{model_name="m"} 3\n'
        proc.listen(server.port, 1)
        proc.run(70, "vllm", "vllm", "--port", str(server.port), inodes=(1,))
        source = finder(proc)
        for _ in range(2):
            seen = await drain(source, lambda seen: len(engines(seen)) == 2)
            assert len(engines(seen)) == 2


async def test_a_server_that_is_no_engine_is_asked_once_and_not_talked_about(proc: Proc) -> None:
    async with Server() as server:
        server.text = "go_goroutines 5\n"
        proc.listen(server.port, 1)
        proc.run(70, "python3", "python3", "app.py", f"--port={server.port}", inodes=(1,))
        source = finder(proc)
        seen = await drain(source, lambda seen: any("one likely" in r for _, r, _ in told(source, seen)))
        assert len(server.asked) == 1
    [(scope, reason, remedy)] = told(source, seen)
    assert (scope, reason) == (
        "",
        "this host has one likely port, and no metrics of an inference engine there",
    )
    assert "--engine http://HOST:PORT" in remedy


async def test_a_dcgm_exporter_gives_hbm_bandwidth_and_is_no_engine(proc: Proc) -> None:
    async with Server() as server:
        server.text = 'DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",UUID="GPU-a"} 0.5\n'
        proc.listen(server.port, 1)
        proc.run(70, "dcgm-exporter", "dcgm-exporter", f":{server.port}", inodes=(1,))
        source = finder(proc)
        seen = await drain(source, lambda seen: any(batch.channel.name == "dcgm" for batch in seen))
    (row,) = next(batch.rows for batch in seen if batch.channel.name == "dcgm")
    assert (row["gpu"], row["hbm_bw_pct"]) == (0, 50.0)
    assert source.strings.text(row["engine"]) == f"127.0.0.1:{server.port}/metrics"
    assert not engines(seen)


async def test_a_named_engine_is_not_discovered_a_second_time(proc: Proc) -> None:
    async with Server() as server:
        server.text = "llamacpp:requests_processing 1\n"
        proc.listen(server.port, 1)
        proc.run(70, "llama-server", "llama-server", "--port", str(server.port), inodes=(1,))
        source = finder(proc, urls=[f"http://localhost:{server.port}"])
        seen = await drain(source, lambda seen: len(engines(seen)) == 3)
    assert engines(seen)[-1]["pid"] == 70  # type: ignore[index]
    assert {source.strings.text(row["engine"]) for row in engines(seen)} == {
        f"localhost:{server.port}/metrics"
    }  # type: ignore[index]
