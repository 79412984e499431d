"""`erniekit validate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.cli import main
from erniekit.cli.validate import report
from erniekit.parameters import Config

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "configs" / "quickstart" / "sft.yaml")
TINY = str(ROOT / "examples" / "models" / "tiny-ernie")


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_good_file_shows_values_origins_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(
        tmp_path / "sft.yaml",
        f"model_name_or_path: {TINY}\noutput_dir: out\ntrain_dataset_path: t.jsonl\nmax_seq_len: 512\n"
        "batch_size: 2\ngradient_accumulation_steps: 4\ncompute_type: bf16\n",
    )
    assert main(["validate", file, "max_steps=1200"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        f"{file}: valid for `erniekit train`",
        "max_steps 1200 command line",
        "per_device_train_batch_size 2 batch_size (sft.yaml:5)",
        "bf16 true compute_type (sft.yaml:7)",
        "learning_rate 3e-05 default for SFT",
        "global batch 8 packs of up to 512 tokens, at most 4,096 tokens",
        "steps 1,200",
        "`bf16: true` (compute_type (sft.yaml:7)) has no effect on a CPU: fp32 runs",
    ):
        assert line in lines
    parameters = next(line for line in lines if line.startswith("parameters"))
    assert int(parameters.split()[1].replace(",", "")) > 100_000
    assert any(line.startswith("memory about ") and "optimizer" in line for line in lines)
    assert not any(line.startswith("weight_decay") for line in lines)


def test_all_shows_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    from erniekit.parameters.schema import PARAMETERS

    assert main(["validate", QUICKSTART, "--all"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(PARAMETERS) <= words


def test_every_problem_of_every_file_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _write(tmp_path / "a.yaml", "max_steps: many\n")
    second = _write(tmp_path / "b.yaml", "lerning_rate: 1\n")
    assert main(["validate", first, second, QUICKSTART, str(tmp_path / "c.yaml")]) == 2
    captured = capsys.readouterr()
    assert f"{first}:1: `max_steps`: expected an integer, got many" in captured.err
    assert f"{second}:1: `lerning_rate`: unknown parameter; did you mean `learning_rate`?" in captured.err
    assert f"{tmp_path}/c.yaml: no such file" in captured.err
    assert f"{QUICKSTART}: valid" in captured.out


def test_numbers_that_cannot_be_known_say_why() -> None:
    values = {"model_name_or_path": "absent", "output_dir": "o", "train_dataset_path": "t"}
    text = report(Config.from_mapping(values))
    assert "unknown: absent/config.json: no such file" in " ".join(text.split())
    assert "depend on the data; --data counts them" in text


def test_dense_mask_and_fused_head_change_the_estimate() -> None:
    values = {"model_name_or_path": TINY, "output_dir": "o", "train_dataset_path": "t"}
    shapes = [{}, {"use_sparse_flash_attn": False}, {"use_fused_head_and_loss_fn": True}]
    estimates = {report(Config.from_mapping(values | shape)).partition("memory")[2].splitlines()[0] for shape in shapes}
    assert len(estimates) == 3


def test_data_is_read_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["validate", QUICKSTART, "--data", f"data_cache_dir={tmp_path}", "num_train_epochs=2"]
    words += ["per_device_train_batch_size=2", "gradient_accumulation_steps=2"]
    assert main(words) == 0
    steps = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("steps:"))
    assert "in total" in steps and "4 packs each" in steps
    assert main([*words, "train_dataset_path=absent.jsonl"]) == 2
    assert "absent.jsonl" in capsys.readouterr().err


def test_other_verbs_need_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(tmp_path / "chat.yaml", "max_new_tokens: 16\n")
    assert main(["validate", file, "--verb", "chat"]) == 0
    assert "global batch" not in capsys.readouterr().out
    assert main(["validate", file]) == 2


def test_no_file_is_a_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "seed=3"]) == 2
    assert "name at least one configuration file" in capsys.readouterr().err


def test_a_home_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(TINY).parent))
    text = report(
        Config.from_mapping({"model_name_or_path": "~/tiny-ernie", "output_dir": "o", "train_dataset_path": "t"})
    )
    assert "unknown" not in text


def test_positions_that_the_model_does_not_have_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(tmp_path / "a.yaml", f"model_name_or_path: {TINY}\noutput_dir: o\ntrain_dataset_path: t\n")
    assert main(["validate", file, "max_seq_len=4096"]) == 0
    assert main(["validate", file, "max_seq_len=4097"]) == 2
    error = capsys.readouterr().err
    assert "max_seq_len 4,097 (command line)" in error and "max_position_embeddings 4,096" in error
