"""`erniekit params` and `erniekit docs`."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from erniekit.cli import main
from erniekit.config.registry import ALIASES, PARAMETERS

ROOT = Path(__file__).parents[2]


def test_params_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params"]) == 0
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert {*PARAMETERS, *ALIASES} <= words


@pytest.mark.parametrize("name", [*PARAMETERS, *ALIASES])
def test_params_explains_each(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name} ")
    assert max(map(len, text.splitlines())) <= 100


def test_params_explains_with_everything_declared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", "LR_scheduler_type"]) == 0
    text = capsys.readouterr().out
    for part in ("1.3 Training", "default", "linear, cosine, polynomial", "used by", "lr_scheduler_type: cosine"):
        assert part in text


def test_params_searches_names_and_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", "warmup"]) == 0
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert found[:2] == ["dropout_warmup_steps", "warmup_steps"]
    assert main(["params", "cosine", "periods"]) == 0
    assert capsys.readouterr().out.startswith("num_cycles")


def test_params_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", "lerning_rat"]) == 2
    assert "did you mean `learning_rate`?" in capsys.readouterr().err


def test_docs_writes_checks_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "docs"
    check = ["docs", "--check", "--output", str(folder)]
    assert main(check) == 1
    assert main(["docs", "--output", str(folder)]) == 0
    assert main(check) == 0
    page = (folder / "lora.md").read_text(encoding="utf-8")
    (folder / "lora.md").write_text(f"{page}edited", encoding="utf-8")
    (folder / "old.md").write_text(page, encoding="utf-8")
    capsys.readouterr()
    assert main(check) == 1
    error = capsys.readouterr().err
    assert "lora.md is out of date" in error and "old.md is out of date" in error and "sft.md" not in error
    assert main(["docs", "--output", str(folder)]) == 0
    assert "2 changed" in capsys.readouterr().out
    assert not (folder / "old.md").exists()
    assert main(check) == 0


def test_docs_leaves_the_files_of_others_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = {"notes.txt": b"mine", "figure.png": bytes(range(256)), "README.md": "Größe".encode("latin-1")}
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    words = ["docs", "--output", str(tmp_path)]
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in mine} == mine

    (tmp_path / "index.md").write_text("my own index", encoding="utf-8")
    (tmp_path / "sft.md").unlink()
    capsys.readouterr()
    assert main(words) == 2
    assert "index.md: not written by `erniekit docs`" in capsys.readouterr().err
    assert (tmp_path / "index.md").read_text(encoding="utf-8") == "my own index"
    assert not (tmp_path / "sft.md").exists()  # nothing is written where something is refused


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/docs", "/proc/erniekit"])
def test_docs_that_cannot_be_written_are_one_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "--output", folder]) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder}: cannot be written: ")


def test_names_of_other_suites_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for name, told in {
        "cutoff_len": "max_seq_len   (1.3 Training)",
        "compute_dtype": "compute_type   (alias",
        "download_hub": "from_hf_hub: true",
        "pre_alloc_memory": "It has no effect: memory is allocated when tensors need it.",
        "val_size": "Write eval_split, the fraction of the training records that is held out.",
    }.items():
        assert main(["params", name]) == 0
        assert told in capsys.readouterr().out


def test_the_page_on_migrating_is_fresh() -> None:
    tool = runpy.run_path(str(ROOT / "tools/migrating.py"))
    assert tool["page"]() == (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
