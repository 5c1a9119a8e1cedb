"""`check graph`: what other threads do to a capture is named by their line."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from needs import needs

needs("torch")

import torch  # noqa: E402

from opusmon.checks import graph_capture, graph_watch  # noqa: E402
from opusmon.checks.graph_capture import Captured  # noqa: E402
from opusmon.checks.graph_lines import following  # noqa: E402

REFUSED = "CUDA error: operation not permitted when stream is capturing"
BROKEN = "CUDA error: operation failed due to a previous error during capture"
HERE = f"{Path(__file__).name}:"


def line_of(mark):
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# HERE {mark}")]
    return number


class Stream:
    cuda_stream = 7


@pytest.fixture
def broken(monkeypatch):
    """Set it and the capture is invalid."""
    event = threading.Event()

    class Driver:
        def status(self, stream):
            return graph_watch.INVALIDATED if event.is_set() else graph_watch.ACTIVE

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return event, graph_watch.Watch(Driver(), 7)


def failure(captured, **options):
    return graph_capture._failure(captured, {"warm_ups": 3, "other_threads": True, **options})


def test_the_line_of_a_thread_after_which_a_capture_is_invalid_is_named(broken):
    event, watch = broken

    def work():
        event.set()  # HERE thread

    with watch.watching():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert watch.broke.where.endswith(f"{HERE}{line_of('thread')}")
    assert watch.is_elsewhere
    found = failure(Captured(None, ended=RuntimeError(BROKEN), watch=watch))
    assert (found.kind, found.where) == ("other_thread", watch.broke.where)
    assert found.what.startswith("another thread does ")
    assert "event.set()" in found.what


def test_a_thread_that_is_no_new_one_is_noticed_at_the_line_that_waits_for_it(broken):
    event, watch = broken

    def call(pool):
        pool.submit(event.set).result()  # HERE pool

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with watch.watching():
            call(pool)
    assert watch.broke.where.endswith(f"{HERE}{line_of('pool')}")
    assert not watch.is_elsewhere
    found = failure(Captured(None, ended=RuntimeError(BROKEN), watch=watch))
    assert (found.kind, found.where) == ("other_thread", watch.broke.where)
    assert found.what.startswith("noticed here: another thread does ")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_a_thread_dies_of_is_the_first_error(capsys):
    def work():
        raise RuntimeError(REFUSED)  # HERE dies

    def unrelated():
        raise KeyError("another matter")

    before = threading.excepthook
    with graph_capture._refused_to_threads() as refused:
        for target in (unrelated, work):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert threading.excepthook is before
    assert [str(error) for error in refused] == [REFUSED]
    captured = Captured(
        None, raised=IndexError("list index out of range"), ended=RuntimeError(BROKEN), elsewhere=refused[0]
    )
    found = failure(captured)
    assert found.where.endswith(f"{HERE}{line_of('dies')}")
    assert found.code == (
        "900 not permitted while a stream is capturing; at the end 901 invalidated by an earlier error"
    )
    assert failure(captured, other_threads=False).kind == "capture_failed"


def test_each_thread_has_lines_of_its_own():
    """A line of one does not end what another is at."""
    seen = []
    before = threading.gettrace()
    turn, back = threading.Event(), threading.Event()

    def work():
        turn.set()
        back.wait(10)
        return 1  # HERE last

    with following(lambda spot, frame: seen.append((threading.get_ident(), spot[1])), threads=True):
        thread = threading.Thread(target=work)
        thread.start()
        turn.wait(10)
        back.set()
        thread.join()
    ident = thread.ident
    last = line_of("last")
    assert [line for of, line in seen if of == ident] == [last - 3, last - 2, last - 1, last]
    assert threading.gettrace() is before


def test_without_threads_those_are_left_alone():
    seen = []

    def work():
        seen.append("ran")

    with following(lambda spot, frame: seen.append(threading.get_ident()), threads=False):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "ran" in seen
    assert thread.ident not in seen
