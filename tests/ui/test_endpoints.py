"""What the page asks its server for: configurations, checks, layouts, previews, the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from erniekit.config.registry import ALIASES, PARAMETERS
from tests.ui.conftest import CONFIGURATION


def test_session_names_the_folder(client: TestClient, folder: Path) -> None:
    assert client.get("/api/session").json()["folder"] == str(folder)


def test_schema_has_every_parameter_and_alias(client: TestClient) -> None:
    described = client.get("/api/schema").json()
    names = [item["name"] for section in described["sections"] for item in section["parameters"]]
    aliases = [item["name"] for section in described["sections"] for item in section["aliases"]]
    assert sorted(names) == sorted(PARAMETERS) and sorted(aliases) == sorted(ALIASES)
    assert set(described["first"]) <= set(names)
    kinds = {item["name"]: item["kind"] for section in described["sections"] for item in section["parameters"]}
    assert (kinds["packing"], kinds["stage"], kinds["learning_rate"]) == ("boolean", "choice", "text")


def test_files_are_listed_read_and_saved(client: TestClient, folder: Path) -> None:
    (folder / ".hidden.yaml").write_text("seed: 1")
    (folder / "out").mkdir()
    (folder / "out" / "training_config.yaml").write_text("seed: 1")
    assert client.get("/api/files").json() == ["sft.yaml"]
    file = client.get("/api/file", params={"path": "sft.yaml"}).json()
    assert file["text"] == CONFIGURATION
    saved = client.post("/api/file", json={**file, "text": "seed: 7\n"}).json()
    assert (folder / "sft.yaml").read_text() == saved["text"] == "seed: 7\n"
    new = client.post("/api/file", json={"path": "runs/new.yaml", "text": "seed: 8\n"})
    assert new.status_code == 200 and client.get("/api/files").json() == ["sft.yaml", "runs/new.yaml"]


def test_nothing_is_overwritten_unseen(client: TestClient, folder: Path) -> None:
    file = client.get("/api/file", params={"path": "sft.yaml"}).json()
    (folder / "sft.yaml").write_text("seed: 9\n")
    answer = client.post("/api/file", json={**file, "text": "seed: 7\n"})
    assert answer.status_code == 422 and "changed by another program" in answer.json()["error"]
    answer = client.post("/api/file", json={"path": "sft.yaml", "text": "seed: 7\n"})
    assert answer.status_code == 422 and "is there already" in answer.json()["error"]
    assert (folder / "sft.yaml").read_text() == "seed: 9\n"


@pytest.mark.parametrize("path", ["../x.yaml", "/tmp/x.yaml", "link/x.yaml", ".ssh/x.yaml"])
def test_files_elsewhere_are_neither_read_nor_written(client: TestClient, folder: Path, path: str) -> None:
    (folder / "link").symlink_to(folder.parent)
    (folder.parent / "x.yaml").write_text("seed: 1")
    assert client.get("/api/file", params={"path": path}).status_code == 403
    assert client.post("/api/file", json={"path": path, "text": "seed: 2"}).status_code == 403
    assert (folder.parent / "x.yaml").read_text() == "seed: 1"


@pytest.mark.parametrize("path", ["data/train.jsonl", "none.yaml", "model", "notes.txt"])
def test_what_is_no_configuration_is_not_opened(client: TestClient, path: str) -> None:
    assert client.get("/api/file", params={"path": path}).status_code == 422


def test_the_form_changes_the_text(client: TestClient) -> None:
    asked = {"path": "sft.yaml", "text": CONFIGURATION, "name": "max_steps", "value": "many"}
    answer = client.post("/api/change", json=asked).json()
    assert answer["text"] == CONFIGURATION.replace("max_steps: 4", "max_steps: many")
    assert [problem["name"] for problem in answer["problems"]] == ["max_steps"]
    assert client.post("/api/change", json={**asked, "name": "none"}).status_code == 422


def test_layout_has_the_numbers_of_validate(client: TestClient) -> None:
    answer = client.post("/api/layout", json={"path": "sft.yaml", "text": CONFIGURATION, "ranks": 2}).json()
    assert answer["ranks"] == 2 and answer["degrees"]["data"] == 2 and len(answer["places"]) == 2
    (stage,) = answer["stages"]
    assert stage["layers"] == "0-1" and sum(stage["memory"].values()) == stage["total"]
    text = CONFIGURATION + "pipeline_parallel_degree: 2\n"
    stages = client.post("/api/layout", json={"path": "sft.yaml", "text": text, "ranks": 0}).json()["stages"]
    assert [stage["layers"] for stage in stages] == ["0", "1"]
    answer = client.post("/api/layout", json={"path": "sft.yaml", "text": "max_steps: x\n", "ranks": 0})
    assert answer.status_code == 422 and "max_steps" in answer.json()["error"]


@pytest.mark.slow
def test_preview_shows_what_is_trained(client: TestClient, folder: Path) -> None:
    asked = {"path": "sft.yaml", "text": CONFIGURATION, "rows": 1, "documents": 2}
    answer = client.post("/api/preview", json=asked).json()
    (row,) = answer["rows"]
    assert row["what"] == "documents" and len(row["documents"]) == 2 and 0 < row["positions"] <= 128
    document = row["documents"][0]
    assert document["location"].startswith("data/train.jsonl:") and document["targets"][0] > 0
    stretches = [stretch for part in document["parts"] for stretch in part["stretches"]]
    assert {stretch["trained"] for stretch in stretches} == {True, False}
    (folder / "data" / "train.jsonl").write_text("{}\n")
    answer = client.post("/api/preview", json=asked)
    assert answer.status_code == 422 and "which no format has" in answer.json()["error"]


def test_secrets_of_the_environment_are_masked(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijkl")
    answer = client.post("/api/layout", json={"path": "sft.yaml", "text": "seed: hf_abcdefghijkl\n", "ranks": 0})
    assert "***" in answer.json()["error"] and "hf_abcdefghijkl" not in answer.text
