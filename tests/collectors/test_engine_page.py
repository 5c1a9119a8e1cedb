"""Pages: parsing, whose they are, gauges under names old and new, the HBM of dcgm-exporter."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from opusmon.channels import ENGINE, METRICS
from opusmon.clock import NS
from opusmon.collectors.engine.dcgm import HbmShare, hbm_shares
from opusmon.collectors.engine.deltas import Deltas
from opusmon.collectors.engine.figures import collapse, figures
from opusmon.collectors.engine.kinds import BY_NAME, KINDS, WANTED, recognise
from opusmon.collectors.engine.page import PageError, Reader
from opusmon.collectors.engine.rows import Scrape, batches
from opusmon.collectors.engine.vocabulary import EngineKind, counters
from opusmon.schema import StringTable

from .engine_pages import ENGINE_PAGES, PAGES, Everything, page, window

# --- the page


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.prom")), ids=lambda path: path.stem)
def test_the_pages_read_as_prometheus_reads_them(path: Path) -> None:
    text = path.read_text()
    theirs = {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if v))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    read = Reader(Everything()).read(text)
    ours = {(n, labels): value for n, series in read.samples.items() for labels, value in series.items()}
    # That parser gives a counter the suffix it should have had.
    assert {
        key if key in theirs else (key[0] + "_total", key[1]): value for key, value in ours.items()
    } == theirs
    assert (read.unreadable, read.repeated, read.valueless) == (0, 0, 0)


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        ("x 1", (), 1.0),
        ("x{} 1", (), 1.0),
        ('x{a="b",} 1e3', (("a", "b"),), 1000.0),
        ('x{b="2",a="1"} 1 1796000000000', (("a", "1"), ("b", "2")), 1.0),
        ('x{a="q\\"}\\\\ \\n"} 1', (("a", 'q"}\\ \n'),), 1.0),
        ('x{a=""} 1', (), 1.0),
        ('x { a = "b" } 2', (("a", "b"),), 2.0),
        ('x{a="é # {"} 3', (("a", "é # {"),), 3.0),
        ('x{le="1"} 4 # {trace_id="abc"} 0.5 1.7e9', (("le", "1"),), 4.0),
        ("x 5\r", (), 5.0),
    ],
)
def test_a_sample_line(line: str, labels: tuple[tuple[str, str], ...], value: float) -> None:
    """The text format and OpenMetrics: escapes, time stamps, exemplars, spaces, CRLF."""
    reader = Reader(Everything())
    for _ in range(2):  # the second time from memory
        assert reader.read(line + "\n").samples == {"x": {labels: value}}


@pytest.mark.parametrize(
    "line", ["x", "x{a=1} 1", 'x{a="b" 1', 'x{a="1",a="2"} 1', "x one", "x 1_0", "1x 1", "x 1 2 3"]
)
def test_a_line_that_makes_no_sense_is_counted_and_costs_no_other(line: str) -> None:
    read = Reader(Everything()).read(f"y 1\n{line}\nz 2\n")
    assert (read.samples, read.unreadable) == ({"y": {(): 1.0}, "z": {(): 2.0}}, 1)


def test_numbers_that_are_none_and_series_twice() -> None:
    read = Reader(Everything()).read("a NaN\nb +Inf\nc -Inf\nd 1\nd 2\n")
    assert (read.samples, read.valueless, read.repeated) == ({"d": {(): 1.0}}, 3, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("# HELP x y\n", "no metrics"),
        ("<!DOCTYPE html>\n", "HTML"),
        ('[{"iter": 1}]\n', "JSON"),
        ('{"error": {"code": 501}}\n', "JSON"),
        ("x 1\ny{a=", "cut short"),
        ("x 1\ny 12", "cut short"),
        ("\x7fELF\0\0\n", "not text"),
    ],
)
def test_what_is_no_whole_page_is_refused(text: str, why: str) -> None:
    with pytest.raises(PageError, match=why):
        Reader(Everything()).read(text)


def test_an_openmetrics_page_may_end_without_a_line_end() -> None:
    assert Reader(Everything()).read("x_total 1\n# EOF").samples == {"x_total": {(): 1.0}}


@given(st.text(max_size=300))
def test_no_text_upsets_the_reader(text: str) -> None:
    with suppress(PageError):
        Reader(Everything()).read(text)


@given(st.sampled_from(["vllm", "sglang_old", "tgi", "triton"]), st.data())
def test_a_damaged_page_never_upsets_what_follows(name: str, data: st.DataObject) -> None:
    """Bytes changed, removed or repeated in the second of three pages."""
    text = page(name)[:6000].rpartition("\n")[0] + "\n"
    place = data.draw(st.integers(0, len(text)))
    width = data.draw(st.integers(0, 40))
    bad = text[:place] + data.draw(st.text(max_size=20)) + text[place + width :]
    kind = BY_NAME[name.partition("_")[0]]
    deltas = Deltas(counters(kind))
    for content in (text, bad, text):
        try:
            samples = collapse(Reader(WANTED).read(content).samples, kind.copy_labels)
        except PageError:
            continue
        entries = figures(kind, samples, deltas.advance(samples), NS)
        list(batches(Scrape(1, NS, 1, "x", kind), entries, StringTable()))


# --- the vocabulary


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_tables_name_fields_of_the_channel(kind: EngineKind) -> None:
    named = {*kind.gauges, *kind.counts, *kind.rates, *kind.ratios, *kind.shares}
    assert named <= set(ENGINE.by_name)
    assert {*kind.latencies, *kind.means} <= set(METRICS)


@pytest.mark.parametrize("name", [*ENGINE_PAGES, "dcgm", "dcgm_old"])
def test_each_engine_is_recognised_by_its_page(name: str) -> None:
    found = recognise(Reader(WANTED).read(page(name)).names)
    assert found is not None
    assert found.name == name.partition("_")[0]


def test_a_page_of_something_else_is_not_recognised() -> None:
    assert recognise({"go_goroutines": 1, "prometheus_build_info": 1, "vllmish": 3, "my_vllm_x": 1}) is None


GAUGES = {
    "vllm": {"running": 63, "waiting": 37, "kv_used_pct": 94, "kv_used_max_pct": 97, "ranks": 2},
    "vllm_old": {"running": 12, "waiting": 4, "kv_used_pct": 50, "prefix_hit_pct": 25, "ranks": 1},
    # Two tensor-parallel copies of each of two data-parallel ranks.
    "sglang": {"running": 24, "waiting": 3, "kv_used_pct": 70, "kv_used_max_pct": 80, "ranks": 2},
    "sglang_old": {"running": 5, "waiting": 1, "kv_used_pct": 28, "prefix_hit_pct": 0.75},
    "trtllm": {"running": 8, "waiting": 2, "kv_used_pct": 40, "kv_used_max_pct": 40},
    "tgi": {"running": 9, "waiting": 3},
    "llamacpp": {"running": 2, "waiting": 1},
    "llamacpp_old": {"running": 2, "waiting": 1, "kv_used_pct": 12.5},
}


@pytest.mark.parametrize("name", GAUGES)
def test_gauges_under_old_and_new_names(name: str) -> None:
    [entry] = window(page(name), page(name))
    assert {field: entry.values[field] for field in GAUGES[name]} == pytest.approx(GAUGES[name])


def test_triton_has_a_row_per_model() -> None:
    pre, llm = window(page("triton"), page("triton"))
    assert (pre.model, pre.values["waiting"], "running" in pre.values) == ("preprocessing", 1, False)
    assert (llm.model, llm.values["running"], llm.values["waiting"], llm.values["kv_used_pct"]) == (
        "tensorrt_llm",
        16,
        5,
        75,
    )


def test_triton_before_the_composite_metrics() -> None:
    """Pending requests stand in for the waiting ones, used over all blocks for the fraction."""
    _, llm = window(page("triton_old"), page("triton_old"))
    assert (llm.values["waiting"], llm.values["kv_used_pct"]) == (6, pytest.approx(75, abs=0.01))


def test_an_unused_prefix_cache_of_old_vllm_is_not_minus_one() -> None:
    text = (
        page("vllm_old")
        .replace("gpu_prefix_cache_hit_rate{", 'gpu_prefix_cache_hit_rate{off="1",')
        .replace("} 0.25", "} -1.0")
    )
    [entry] = window(text, text)
    assert "prefix_hit_pct" not in entry.values
    assert entry.missing["prefix_hit_pct"]


# --- dcgm-exporter


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("dcgm_old", [HbmShare(0, "GPU-aaaa-0", "", 71), HbmShare(1, "GPU-aaaa-1", "", 0)]),
        ("dcgm", [HbmShare(0, "GPU-aaaa-0", "", 50), HbmShare(1, "GPU-aaaa-1", "3", 25)]),
    ],
)
def test_hbm_bandwidth_under_old_and_new_names(name: str, found: list[HbmShare]) -> None:
    assert hbm_shares(Reader(WANTED).read(page(name)).samples) == found


def test_a_sentinel_is_no_bandwidth() -> None:
    text = 'DCGM_FI_PROF_DRAM_ACTIVE{gpu="0"} 9223372036854775794\nDCGM_FI_PROF_DRAM_ACTIVE{gpu="x"} 0.5\n'
    assert hbm_shares(Reader(WANTED).read(text).samples) == [HbmShare(-1, "", "", 50)]
