"""The config file gives defaults, says what is wrong with it, and the command line wins."""

import pytest

from opusmon import config


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
