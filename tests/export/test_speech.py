"""A model that writes codes is exported with its codec, and only as Hugging Face files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from erniekit.build.text_reading import Pace, TextReading, read_text_reading, write_text_reading
from erniekit.cli import main
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.export.logit_difference import compare, prompt_logits
from erniekit.export.speech import refuse_adapters_of_levels
from erniekit.export.static_program import save_program
from erniekit.export.trained_model import TrainedModel
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.builder import build_model
from erniekit.model.weights import named_weights, save_model_folder
from tests.log_capture import captured_log
from tests.model.tiny_speech import omnivoice_config, speaking_model, vall_e_config

CONFIGS = {"omnivoice": omnivoice_config(llm={"vocab_size": 512}), "vall_e": vall_e_config(llm={"vocab_size": 512})}


@pytest.fixture(params=CONFIGS)
def trained(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "trained"
    save_model_folder(speaking_model(CONFIGS[request.param]), folder, load_tokenizer(tiny_model).files)
    return folder


def test_an_exported_folder_has_the_weights_and_the_codec(trained: Path, tmp_path: Path) -> None:
    codec = trained / "audio_tokenizer"
    codec.mkdir()
    (codec / "config.json").write_text(json.dumps({"model_type": "dac"}))
    target = tmp_path / "exported"
    assert main(["export", str(trained), "--output", str(target)]) == 0
    assert json.loads((target / "audio_tokenizer/config.json").read_text()) == {"model_type": "dac"}
    card = (target / "README.md").read_text()
    assert "erniekit speak FOLDER --text TEXT" in card or f"erniekit speak {target}" in card
    config = ModelConfig.from_folder(target)
    expected, found = (named_weights(build_model(config, folder)) for folder in (trained, target))
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), weight.numpy(), err_msg=name)


@pytest.mark.proves("text_frontend")
def test_an_exported_folder_remembers_how_texts_are_read(trained: Path, tmp_path: Path) -> None:
    write_text_reading(trained, TextReading("tokenizer", Pace(0.125, 0.25)))
    (trained / "training_config.yaml").write_text("stage: TTS\ntext_frontend: characters\n")
    assert main(["export", str(trained), "--output", str(tmp_path / "exported")]) == 0
    assert read_text_reading([tmp_path / "exported"]) == TextReading("characters", Pace(0.125, 0.25))


@pytest.mark.proves("lora_codebooks")
def test_adapters_of_some_levels_are_not_merged(trained: Path, tmp_path: Path) -> None:
    def adapters_of(*served: int) -> TrainedModel:
        return TrainedModel(trained, True, trained, "", {"lora_codebooks": list(served)})

    refuse_adapters_of_levels(replace(adapters_of(0), is_adapter=False))
    levels = code_layout(ModelConfig.from_folder(trained)).levels
    refuse_adapters_of_levels(adapters_of())
    refuse_adapters_of_levels(adapters_of(*range(levels)))
    with pytest.raises(ConfigurationError, match=r"the adapters serve the levels 0 of \d .*merged weights would serve"):
        refuse_adapters_of_levels(adapters_of(0))


def test_a_missing_codec_is_told(trained: Path, tmp_path: Path) -> None:
    with captured_log() as lines:
        assert main(["export", str(trained), "--output", str(tmp_path / "exported")]) == 0
    assert any("codec: not copied, its folder is not here" in line for line in lines)


def test_programs_are_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "program"
    assert main(["export", str(trained), "--output", str(target), "--format", "inference"]) == 2
    assert "writes codes, and programs (--format inference) write text only" in capsys.readouterr().err
    assert not target.exists()
    with pytest.raises(ModelFileError, match="it writes codes, and a saved program writes text only"):
        save_program(build_model(ModelConfig.from_folder(trained), trained), target)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_of_all_levels_are_compared(kind: str) -> None:
    prompts = [[5, 6, 7, 8, 9], [4, 3]]
    decoder = speaking_model(CONFIGS[kind])
    logits = prompt_logits(decoder, prompts)
    assert [each.shape for each in logits] == [(5, 68 if kind == "omnivoice" else 65), (2, logits[0].shape[1])]
    assert compare(logits, prompt_logits(decoder, prompts)).largest == 0
    head = decoder.head.weight if kind == "omnivoice" else decoder.head.proj[3].weight
    head.set_value(head * 1.5)
    assert compare(logits, prompt_logits(decoder, prompts)).largest > 0.01
