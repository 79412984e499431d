"""The words of `erniekit server`: who may listen where, and what is refused before anything is loaded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli import main
from erniekit.cli.server import KEY_VARIABLE, api_key
from erniekit.config import Config
from erniekit.errors import ConfigurationError
from erniekit.web.listen import address_of, bind
from tests.inference.speaking.speaker_folder import speaker_folder


def serving(*words: str):
    return Config.load(None, list(words), verb="server").serving


@pytest.mark.proves("host", "api_key_file")
def test_a_host_that_others_reach_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert api_key(serving()) == api_key(serving("host=localhost")) == api_key(serving("host=::1")) == ""
    with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0: others reach this address.*\n.*api_key_file"):
        api_key(serving("host=0.0.0.0"))
    file = tmp_path / "key"
    file.write_text("one-long-key\nmore\n")
    assert api_key(serving("host=0.0.0.0", f"api_key_file={file}")) == "one-long-key"
    monkeypatch.setenv(KEY_VARIABLE, "another-key")
    assert api_key(serving("host=0.0.0.0")) == "another-key"
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigurationError, match="has 5 characters") as caught:
        api_key(serving())
    assert "short" not in str(caught.value)


@pytest.mark.parametrize(("content", "told"), [(None, "No such file"), ("\nkey", "its first line is empty")])
def test_a_file_without_a_key_is_told(tmp_path: Path, content: str | None, told: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=told):
        api_key(serving(f"api_key_file={file}"))


def test_what_is_wrong_is_told_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        assert main(["server", str(tmp_path), f"port={address_of(taken)[1]}"]) == 2
    assert "another program listens there" in capsys.readouterr().err
    assert main(["server", str(tmp_path), "port=0", "--adapters", "brief"]) == 2
    assert "expected NAME=FOLDER" in capsys.readouterr().err
    assert main(["server", str(tmp_path), "port=0", "--adapters", "a=x", "--adapters", "a=y"]) == 2
    assert "stands for x already" in capsys.readouterr().err
    assert main(["server", str(tmp_path / "absent"), "port=0", "--device", "cpu"]) == 2
    assert "absent" in capsys.readouterr().err


def test_answers_are_drawn_by_the_seed(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.serving import open as opening

    seeds = []
    monkeypatch.setattr(opening, "open_served", lambda loading, serving, sampling, *given: seeds.append(sampling.seed))
    monkeypatch.setattr(opening, "run", lambda *given: None)
    assert main(["server", str(tiny_base), "port=0", "seed=7"]) == 0
    assert seeds == [7]


def test_it_listens_where_it_is_told(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.serving import open as opening

    hosts = []
    monkeypatch.setattr(opening, "open_served", lambda *given: None)
    monkeypatch.setattr(opening, "run", lambda served, listening, *given: hosts.append(address_of(listening)[0]))
    assert main(["server", str(tiny_base), "port=0", "host=127.0.0.2"]) == 0
    assert hosts == ["127.0.0.2"]


def test_a_model_that_speaks_is_opened_as_the_parameters_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.cli.server import _load
    from erniekit.inference.speaking.speaker import SpeechModel

    model = speaker_folder(tmp_path / "speaker")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"future_key": 1}))
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(SpeechModel, "load", lambda folder, **named: given.append(named))
    options = argparse.Namespace(lora_path=None, codec=None)
    words = ["seed=7", "device=cpu", "ignore_config_keys=[future_key]"]
    _load(options, Config.load(None, words, verb="server"), model)
    assert given == [{"adapters": None, "codec": None, "seed": 7, "ignored_keys": ("future_key",), "device": "cpu"}]
