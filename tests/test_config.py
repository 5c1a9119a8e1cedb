"""The config file gives defaults, says what is wrong with it, and the command line wins."""

import pytest

from opusmon import config
from opusmon.triage.limits import LIMITS


def written(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_no_file_says_nothing(tmp_path):
    assert config.defaults(tmp_path / "config.toml") == {}


def test_options_come_under_the_names_of_the_command_line(tmp_path):
    path = written(
        tmp_path, 'slo = ["ttft_p95<800ms"]\nprobe-budget = 0.5\nretain-size = "1GiB"\nspan = "10m"\n'
    )
    assert config.defaults(path) == {
        "slo": ["ttft_p95<800ms"],
        "probe_budget": 0.5,
        "retain_size": "1GiB",
        "span": "10m",
    }
    assert "span" not in config.defaults(path, screen=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slo = 'a<1ms'", "slo must be a list of texts"),
        ("slo = [1]", "slo must be a list of texts"),
        ("deep = 'yes'", "deep must be true or false"),
        ("probe-budget = true", "probe-budget must be a number"),
        ("interval = 1", "interval must be a text in quotes"),
        ("colour = 'red'", "there is no option 'colour'"),
        ("probe = 'http://127.0.0.1'", "there is no option 'probe'"),
        ("span = ", "Invalid value"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, text, words):
    with pytest.raises(config.ConfigError) as said:
        config.defaults(written(tmp_path, text))
    assert words in str(said.value)
    assert "config.toml" in str(said.value)
    assert "\n" not in str(said.value)


def test_limits_of_the_file_are_in_force_and_the_others_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    usual = {name: limit.value for name, limit in LIMITS.items()}
    assert config.limits() == usual
    (tmp_path / "opusmon").mkdir()
    (tmp_path / "opusmon" / "triage.toml").write_text("hbm_bw_pct = 98\n")
    assert config.limits() == usual | {"hbm_bw_pct": 98.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hbm_bw_pcts = 98", "there is no limit 'hbm_bw_pcts'; `opusmon triage --limits-help` lists them"),
        ('hbm_bw_pct = "98"', "hbm_bw_pct must be a number (%)"),
        ("hbm_bw_pct = true", "hbm_bw_pct must be a number (%)"),
        ("hbm_bw_pct = nan", "hbm_bw_pct must be a number (%)"),
        ("hbm_bw_pct = inf", "hbm_bw_pct must be a number (%)"),
        (f"hbm_bw_pct = 1{'0' * 400}", "hbm_bw_pct must be a number (%)"),
        (f"hbm_bw_pct = 1{'0' * 5000}", "integer string conversion"),
        ("hbm_bw_pct", "Expected '='"),
        ("\udcff", "can't decode byte"),
        (None, "no such file"),
    ],
    ids=[
        "unknown",
        "text",
        "flag",
        "not a number",
        "infinite",
        "large",
        "larger",
        "not toml",
        "not text",
        "missing",
    ],
)
def test_limits_that_cannot_be_used_are_one_line_that_names_the_file(tmp_path, text, words):
    place = tmp_path / "limits.toml"
    if text is not None:
        place.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(config.ConfigError) as said:
        config.limits(place)
    assert words in str(said.value)
    assert str(said.value).startswith(f"{place}: ")
    assert "\n" not in str(said.value)
