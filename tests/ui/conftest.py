"""A working folder with a configuration, a model and data, and a client of the page's application."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from erniekit.ui.app import make_app
from erniekit.ui.workspace import Workspace

ROOT = Path(__file__).parents[2]
ADDRESS, TOKEN = "http://127.0.0.1:8600", "token-of-the-tests"
CONFIGURATION = """\
# a small run
stage: SFT
model_name_or_path: model   # without weights
continue_training: false
output_dir: out/sft
train_dataset_path: data/train.jsonl
max_seq_len: 128
packing: true
max_steps: 4
learning_rate: 1.0e-3
report_to: none
data_cache_dir: cache
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, records: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which is also the current one."""
    root = tmp_path / "work"
    shutil.copytree(tiny_model, root / "model")
    (root / "data").mkdir()
    shutil.copy(records, root / "data" / "train.jsonl")
    (root / "sft.yaml").write_text(CONFIGURATION, encoding="utf-8")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def workspace(folder: Path) -> Workspace:
    return Workspace.of(folder)


@pytest.fixture
def client(workspace: Workspace) -> Iterator[TestClient]:
    """A client that knows the token."""
    with TestClient(
        make_app(workspace, TOKEN), base_url=ADDRESS, headers={"Authorization": f"Bearer {TOKEN}"}
    ) as client:
        yield client
