"""TLS handshakes of a process, by probes on OpenSSL: slow ones, failed ones, and those that only take several calls."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_stub.stall_watch import StallWatch
from needs import lacking, needs

from opusmon.collectors.stalls import StallsCollector

needs("root")
if why := StallsCollector.probe():
    lacking("libbpf", f"probes cannot be set here: {why.reason}")
if shutil.which("openssl") is None:
    lacking("openssl", "openssl is not installed")
if b"libssl.so" not in Path("/proc/self/maps").read_bytes():
    lacking("openssl", "this Python has no libssl of its own")

MS = 1_000_000

CLIENT = """
import select, socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
strict = ssl.create_default_context()
print("ready", flush=True)
for line in sys.stdin:
    way, port = line.split()
    plain = socket.create_connection(("127.0.0.1", int(port)))
    used = strict if way == "strict" else context
    link = used.wrap_socket(plain, do_handshake_on_connect=False, server_hostname="localhost")
    link.setblocking(way != "poll")
    try:
        while True:
            try:
                link.do_handshake()
                break
            except ssl.SSLWantReadError:
                select.select([link], [], [])
        print("done", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
    link.close()
    del link, plain
"""


class Server:
    """Accepts one connection after another, does with it what it is told, on a thread."""

    def __init__(self, folder: Path) -> None:
        words = (
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        )
        names = ["-keyout", folder / "key", "-out", folder / "ca"]
        subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(folder / "ca", folder / "key")
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.wait_s = 0.0
        self.hang_up = False
        self._over = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._socket.accept()
                self._over.wait(self.wait_s)
                if self.hang_up:
                    plain.close()
                    continue
                with contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as link:
                    link.recv(1)

    def close(self) -> None:
        self._over.set()
        self._socket.close()


class Client:
    """A process that makes connections."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._line() == "ready"

    def connect(self, way: str, port: int) -> str:
        """What became of it: "done" or the name of an exception."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{way} {port}\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    it = Server(tmp_path_factory.mktemp("tls"))
    yield it
    it.close()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    it = Client()
    yield it
    it.close()


@pytest.fixture(scope="module")
def watch(client: Client) -> Iterator[StallWatch]:
    it = StallWatch(only_pids=frozenset({client.pid}), tls_threshold_ns=200 * MS)
    it.until(lambda: it.said("no process maps libcuda; TLS of 1 more"))
    it.until(lambda: it.said("ring buffer"))
    yield it
    it.close()


def next_row(watch: StallWatch, client: Client, server: Server, way: str, wait_s: float) -> dict[str, Any]:
    """The only row that a connection gives, and one after it that is known to give one."""
    count = len(watch.rows("tls"))
    server.wait_s = wait_s
    outcome = client.connect(way, server.port)
    server.hang_up, server.wait_s = False, 0.3
    assert client.connect("block", server.port) == "done"
    watch.until(lambda: len(watch.rows("tls")) >= count + 2)
    first, second = watch.rows("tls")[count:]
    assert (second["reason"], second["code"]) == ("slow", 1)
    return {**first, "outcome": outcome}


@pytest.mark.parametrize("way", ["block", "poll"])
def test_a_slow_handshake_is_one_event_however_many_calls_it_takes(
    watch: StallWatch, client: Client, server: Server, way: str
) -> None:
    row = next_row(watch, client, server, way, 0.4)
    assert (row["outcome"], row["reason"], row["code"]) == ("done", "slow", 1)
    assert 400 * MS <= row["dur_ns"] < 2000 * MS
    assert (row["pid"], row["tid"], row["call"]) == (client.pid, client.pid, "SSL_do_handshake")
    assert "libssl.so" in row["stack"] or "_ssl" in row["stack"]


def test_a_fast_handshake_is_none(watch: StallWatch, client: Client, server: Server) -> None:
    count = len(watch.rows("tls"))
    server.wait_s = 0.0
    for way in ("block", "poll"):
        assert client.connect(way, server.port) == "done"
    server.wait_s = 0.3
    assert client.connect("block", server.port) == "done"
    watch.until(lambda: len(watch.rows("tls")) > count)
    rows = watch.rows("tls")[count:]
    assert all(row["dur_ns"] >= 200 * MS for row in rows)
    assert rows[-1]["dur_ns"] >= 300 * MS


@pytest.mark.parametrize("way", ["block", "poll"])
def test_a_connection_that_ends_without_success_is_a_failure(
    watch: StallWatch, client: Client, server: Server, way: str
) -> None:
    server.hang_up = True
    row = next_row(watch, client, server, way, 0.05)
    assert row["outcome"] != "done"
    assert row["reason"].startswith("failed")
    assert row["code"] <= 0
    assert 50 * MS <= row["dur_ns"] < 1000 * MS


def test_a_certificate_that_nobody_vouches_for_is_a_failure(
    watch: StallWatch, client: Client, server: Server
) -> None:
    row = next_row(watch, client, server, "strict", 0.0)
    assert row["outcome"] == "SSLCertVerificationError"
    assert (row["reason"], row["code"]) == ("failed: the connection ended without success", -1)
