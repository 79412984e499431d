"""Temporary folders: kept while somebody holds them, gone with the next start when their owner was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.temp_folders import new_temp_folder, remove_abandoned, temp_folder

OWNER = """
import sys
from pathlib import Path
from erniekit.temp_folders import new_temp_folder
own = new_temp_folder("job-", Path(sys.argv[1]))
print(own.folder, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    (folder / "0.json").write_text("said")
    (tmp_path / "job-list").write_text("a file of others")
    (tmp_path / "other-1").mkdir()
    (tmp_path / "job-link").symlink_to(tmp_path / "other-1")
    assert remove_abandoned("job-", tmp_path) == []
    owner.kill()
    owner.communicate()
    assert remove_abandoned("job-", tmp_path) == [folder]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-link", "job-list", "other-1"]


def test_a_folder_is_gone_after_its_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = new_temp_folder("job-")
    left.close()
    with pytest.raises(ValueError, match="of the body"), temp_folder("job-") as folder:
        assert list(tmp_path.iterdir()) == [folder]
        raise ValueError("of the body")
    assert list(tmp_path.iterdir()) == []
