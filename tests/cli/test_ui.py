"""`erniekit ui`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from erniekit.cli import main


def test_folders_that_are_not_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["ui", str(tmp_path), "--also", str(tmp_path / "none")]) == 2
    assert main(["ui", "--port", "many"]) == 2
    assert "expected a port from 0 to 65535" in capsys.readouterr().err


def test_webui_is_the_same_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["webui", "--help"]) == 0
    assert "usage: erniekit ui" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_is_served_until_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "erniekit", "ui", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        found = re.fullmatch(r"  (http://127\.0\.0\.1:(\d+))/#token=([\w-]+)\n", said[1])
        assert found and str(tmp_path) in said[0] and "runs go on" in said[2]
        address, port, token = found.groups()
        asked = urllib.request.Request(f"{address}/api/session", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 200 and str(tmp_path) in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{address}/api/session")
        second = subprocess.run([*command[:-1], port], capture_output=True, text=True)
        assert second.returncode == 2 and port in second.stderr and "listens there" in second.stderr
        assert "Traceback" not in second.stderr
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode in (0, 130) and "Traceback" not in errors and token not in errors
