"""Links: traffic that is uneven, links that are down, errors that grow. An H200: 18 links of 26.562 GB/s each."""

import pytest
from triage.session import NAN, Session, find, seconds, told

from opusmon.clock import NS
from opusmon.triage.severity import CRIT, NOTE, WARN

LINE_BPS = 26.562e9
GB = 1e9


def links(n, tx=lambda _t, _link: 0.0, *, count=18, gpus=1, **more):
    """Rows of every link each second; `more` are functions of time and link too."""
    session = Session()
    session.each_second(
        "nvlink",
        n,
        lambda t: [
            {
                "gpu": gpu,
                "link": link,
                "tx_bps": tx(t, link),
                "rx_bps": 0.0,
                "state": 1,
                "speed_bps": LINE_BPS,
                **{name: value(t, link) for name, value in more.items()},
            }
            for gpu in range(gpus)
            for link in range(count)
        ],
    )
    return session


def hot(*which, bps=22 * GB, usual=5 * GB, between=(50, 70)):
    def tx(t, link):
        return bps if link in which and between[0] <= t <= between[1] else usual

    return tx


def test_a_hot_link(monkeypatch):
    """22 GB/s are 83 % of the line rate, 5 GB/s 19 %."""
    (found,) = find(monkeypatch, links(130, hot(7)), "nvlink_hot_link", "nvlink_imbalance")
    assert (found.rule, found.subject, found.severity) == ("nvlink_hot_link", "gpu 0 link 7 TX", WARN)
    assert seconds(found) == (50, 70)
    assert told(found)["share of line rate"] == pytest.approx(100 * 22 / 26.562)
    assert told(found)["median of the links"] == pytest.approx(100 * 5 / 26.562)
    assert told(found)["tx_bps"] == pytest.approx(22 * GB)


def test_a_hot_link_with_room_left_is_a_note(monkeypatch):
    (found,) = find(monkeypatch, links(130, hot(7, bps=12 * GB)), "nvlink_hot_link")
    assert found.severity == NOTE


def test_four_of_eighteen_are_hot_links_and_six_are_an_imbalance(monkeypatch):
    """A quarter of 18 are four and a half."""
    found = find(monkeypatch, links(130, hot(0, 1, 2, 3)), "nvlink_hot_link", "nvlink_imbalance")
    assert [one.subject for one in found] == [f"gpu 0 link {link} TX" for link in range(4)]
    (found,) = find(monkeypatch, links(130, hot(*range(6), usual=0.0)), "nvlink_hot_link", "nvlink_imbalance")
    assert (found.rule, found.subject, found.severity) == ("nvlink_imbalance", "gpu 0 TX", WARN)
    assert seconds(found) == (50, 70)
    assert found.title == "NVLink of GPU 0 uneven: TX 0 to 83 % of the line rate by link"


def test_one_slow_link_is_an_imbalance(monkeypatch):
    slow = links(130, lambda t, link: 9 * GB if link == 11 and t >= 60 else 20 * GB)
    (found,) = find(monkeypatch, slow, "nvlink_hot_link", "nvlink_imbalance")
    assert (found.rule, seconds(found), found.open) == ("nvlink_imbalance", (60, 130), True)
    assert told(found)["least link"] == pytest.approx(100 * 9 / 26.562)


def test_even_traffic_light_traffic_and_short_bursts_are_fine(monkeypatch):
    rules = ("nvlink_hot_link", "nvlink_imbalance")
    for tx in (
        lambda t, link: 22 * GB * (1 - 0.01 * (link % 2)) if t > 20 else 0.0,
        lambda _t, link: 5 * GB if link == 7 else 0.0,
        lambda t, link: 22 * GB if link == 7 and t % 3 else 5 * GB,
        lambda _t, link: NAN if link == 3 else 22 * GB if link == 7 else 5 * GB,
    ):
        assert find(monkeypatch, links(90, tx), *rules) == []


def test_rx_and_a_line_rate_that_is_not_told(monkeypatch):
    session = links(
        90, rx_bps=lambda _t, link: 22 * GB if link == 2 else 5 * GB, speed_bps=lambda _t, _link: NAN
    )
    (found,) = find(monkeypatch, session, "nvlink_hot_link")
    assert found.subject == "gpu 0 link 2 RX"
    assert told(found)["share of line rate"] == pytest.approx(100 * 22 / 26.562)


def in_turn(n, tx, state=lambda _t, _link: 1):
    """Without GPM: four links a tick, in turn."""
    session = Session()
    for t in range(1, n + 1):
        for link in range(t % 3 * 4, t % 3 * 4 + 4):
            session.add(
                "nvlink",
                t,
                gpu=0,
                link=link,
                dt_ns=3 * NS,
                tx_bps=tx(t, link),
                state=state(t, link),
                speed_bps=LINE_BPS,
            )
    return session


def test_links_read_in_turn_are_compared_with_those_read_with_them(monkeypatch):
    (found,) = find(monkeypatch, in_turn(200, hot(5, between=(90, 120))), "nvlink_hot_link")
    # Link 5 is read at 1, 4, 7, ... s.
    assert (found.subject, seconds(found)) == ("gpu 0 link 5 TX", (91, 118))


# -- down --------------------------------------------------------------------------------------------------------


def test_links_that_are_down(monkeypatch):
    session = links(
        150, state=lambda t, link: 0 if (link == 3 and 40 <= t <= 90) or (link == 9 and 60 <= t <= 80) else 1
    )
    session.add("gpu_event", 39.5, gpu=0, gi=-1, kind="link_down", code=3, detail="NVLink link 3 is down")
    (found,) = find(monkeypatch, session, "nvlink_down")
    assert (found.subject, found.severity, seconds(found), found.open) == ("gpu 0", CRIT, (39.5, 90), False)
    assert found.title == "NVLink of GPU 0: links 3, 9 down"


def test_all_links_that_go_down_are_told_by_the_events(monkeypatch):
    session = links(150, state=lambda t, _link: 1 if t < 61 else 0)
    for link in range(18):
        session.add("gpu_event", 61, gpu=0, gi=-1, kind="link_down", code=link)
    (found,) = find(monkeypatch, session, "nvlink_down")
    assert (found.title, seconds(found)) == ("NVLink of GPU 0: 18 links went down", (61, 61))


def test_a_board_without_a_bridge_and_unknown_states_are_fine(monkeypatch):
    assert find(monkeypatch, links(70, state=lambda _t, _link: 0), "nvlink_down") == []
    assert find(monkeypatch, links(70, state=lambda _t, _link: NAN), "nvlink_down") == []


def test_a_link_down_among_links_read_in_turn(monkeypatch):
    session = in_turn(200, lambda _t, _link: 0.0, lambda t, link: 0 if link == 5 and t > 60 else 1)
    (found,) = find(monkeypatch, session, "nvlink_down")
    assert (found.title, seconds(found)) == ("NVLink of GPU 0: link 5 down", (61, 199))


# -- errors ------------------------------------------------------------------------------------------------------


def test_errors_that_grow(monkeypatch):
    """Five replays of old, and one more every 4 s from 62 to 82 s."""
    session = links(
        200, replay_errors=lambda t, link: 5.0 + (min(max(t - 58, 0), 24) // 4 if link == 7 else 0)
    )
    (found,) = find(monkeypatch, session, "nvlink_errors")
    assert (found.subject, found.severity, seconds(found)) == ("gpu 0 link 7 replay_errors", WARN, (62, 82))
    assert found.title == "NVLink link 7 of GPU 0 counts replays: 11 since the driver loaded"
    assert told(found)["since the reading before"] == 1


def test_errors_of_old_restarted_counts_and_first_readings_are_none(monkeypatch):
    for crc in (
        lambda _t, _link: 7.0,
        lambda t, _link: 7.0 if t < 60 else 0.0,
        lambda t, _link: NAN if t < 60 else 7.0,
    ):
        assert find(monkeypatch, links(90, crc_errors=crc), "nvlink_errors") == []


def test_counts_read_far_apart_are_not_compared(monkeypatch):
    session = Session()
    session.each_second(
        "nvlink",
        200,
        lambda t: {"gpu": 0, "link": 1, "crc_errors": 1.0 if t < 60 else NAN if t < 130 else 9.0},
    )
    assert find(monkeypatch, session, "nvlink_errors") == []
