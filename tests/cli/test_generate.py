"""What `erniekit generate` takes from the configuration of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from erniekit.cli import main
from erniekit.errors import DataError
from erniekit.inference import prompts


def test_recordings_of_prompts_lie_below_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    def read(path: Path, media_dirs: tuple[str, ...]) -> None:
        folders.append(media_dirs)
        raise DataError("enough")

    monkeypatch.setattr(prompts, "read_prompts", read)
    values = {
        "model_name_or_path": "m", "output_dir": str(tmp_path / "out"), "train_dataset_path": "t",
        "media_dir": str(tmp_path / "media"),
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "out").mkdir()
    assert main(["generate", str(tmp_path / "run.yaml"), "--prompts", str(tmp_path / "p.jsonl")]) == 2
    assert folders == [(str(tmp_path / "media"),)]
