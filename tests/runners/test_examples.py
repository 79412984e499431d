"""Every shipped configuration trains: two steps on a tiny model in place of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from erniekit.config import Config
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.weights import save_model_folder
from erniekit.runners.train import run_training

CODES = ("codes.yaml", "tts-codes.yaml")  # for `erniekit codes`


def _marks(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    return {mark for mark in ("--world-size", "stage: TTS") if mark in text}


# Those that declare a layout of ranks run in test_layout_examples; codes of recordings are made, not shipped.
EXAMPLES = sorted(
    path
    for path in Path("examples/configs").glob("*/*.yaml")
    if path.name not in CODES and not {"--world-size", "stage: TTS"} & _marks(path)
)
SPEECH = [path for path in EXAMPLES if "train_dataset_type: asr" in path.read_text(encoding="utf-8")]
SPEAKING = sorted(path for path in Path("examples/configs").glob("*/*.yaml") if "stage: TTS" in _marks(path))
LISTENER = Path("examples/models/tiny-listener")
UNITS = Path("examples/configs/quickstart/units.yaml")  # its records are made, not shipped


@pytest.fixture(scope="module")
def base(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder with weights."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer_files = [tiny_model / name for name in ("tokenizer.json", "tokenizer_config.json")]
    save_model_folder(build_model(ModelConfig.from_folder(tiny_model), None, seed=1), folder, tokenizer_files)
    return folder


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny listener with weights, and `data.jsonl` with a few recordings of noise in its folder."""
    folder = tmp_path_factory.mktemp("listener")
    files = [path for path in LISTENER.iterdir() if path.name != "config.json"]
    save_model_folder(build_model(ModelConfig.from_folder(LISTENER), None, seed=1), folder, files)
    rng, lines = np.random.default_rng(0), []
    for number in range(6):
        soundfile.write(folder / f"{number}.wav", rng.normal(0, 0.1, 8000 + 4000 * number), 16_000)
        lines.append(json.dumps({"audio_path": f"{number}.wav", "text": "one two"}))
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path not in SPEECH], ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_it_trains(path: Path, base: Path, tmp_path: Path) -> None:
    own = {"train_dataset_path": "examples/data/units-dialogues.jsonl"} if path == UNITS else {}
    if "dialogue_template" in path.read_text(encoding="utf-8"):
        own["max_seq_len"] = "512"  # its instruction alone is long in a tiny vocabulary
    if "teacher_model_name_or_path:" in path.read_text(encoding="utf-8"):
        own["teacher_model_name_or_path"] = str(base)
    _train_two_steps(path, tmp_path, {"model_name_or_path": base, **own})


@pytest.mark.slow
@pytest.mark.parametrize("path", SPEECH, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_trains_on_recordings(path: Path, listener: Path, tmp_path: Path) -> None:
    _train_two_steps(path, tmp_path, {"model_name_or_path": listener, "train_dataset_path": listener / "data.jsonl"})


def _train_two_steps(path: Path, tmp_path: Path, own: dict[str, object]) -> None:
    overrides = {
        "from_hf_hub": "false",
        "output_dir": tmp_path / "run",
        "data_cache_dir": tmp_path / "cache",
        "max_steps": 2,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
        "max_seq_len": 128,
        "do_eval": "false",
        "report_to": "none",
        **own,
    }
    config = Config.load(path, overrides=[f"{name}={value}" for name, value in overrides.items()], verb="train")
    assert run_training(config).step == 2
    weights = "adapter_model.safetensors" if config.lora.lora else "model.safetensors"
    assert (tmp_path / "run" / weights).is_file()


@pytest.mark.parametrize("path", SPEAKING, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_value_of_one_that_speaks_has_an_effect(path: Path) -> None:
    assert [line for line in Config.load(path).messages if "no effect" in line] == []


def test_there_are_examples() -> None:
    assert {path.parent.name for path in EXAMPLES} >= {
        "quickstart",
        "ernie-4.5-0.3b",
        "qwen3-0.6b",
        "llama-3.2-1b",
        "speech",
    }
