"""What the card of a model that listens says: its task, its error rates, and on what they were measured."""

from __future__ import annotations

from typing import Any

import yaml

from erniekit.export.model_card import model_card, use_of_listener

PARAMETERS = {
    "train_dataset_path": ["train.jsonl"], "train_dataset_type": ["asr"], "eval_dataset_path": ["a.jsonl", "b.jsonl"],
    "text_normalizer": "english", "stage": "SFT",
}  # fmt: skip
RATES = {"eval_wer": 0.1234567, "eval_cer": 0.05, "eval_answers": 40.0}


def card(results: dict[str, Any], parameters: dict[str, Any] = PARAMETERS, **named: Any) -> tuple[dict[str, Any], str]:
    values = {
        "name": "listener", "base": "", "base_folder": None, "is_adapter_merged": False, "parameters": parameters,
        "results": results, "facts": {}, "use": use_of_listener("QwenListens", parameters), "library": "transformers",
        "listens": True,
    }  # fmt: skip
    _, front, body = model_card(**{**values, **named}).split("---\n", 2)
    return yaml.safe_load(front), body


def test_error_rates_stand_with_their_data_and_normaliser() -> None:
    front, body = card(RATES)
    assert front["pipeline_tag"] == "automatic-speech-recognition"
    assert "`text_normalizer: english`" in body
    assert "| `a.jsonl`, `b.jsonl` | 12.35% | 5.00% | 40 |" in body
    (entry,) = front["model-index"][0]["results"]
    assert entry["task"] == {"type": "automatic-speech-recognition"}
    assert entry["metrics"][0] == {"type": "wer", "value": 12.35, "name": "WER (english)"}
    assert entry["dataset"]["name"] == "a.jsonl, b.jsonl"


def test_each_file_has_its_row() -> None:
    sources = {"a.jsonl": {**RATES, "eval_answers": 10.0}, "b.jsonl": {**RATES, "eval_wer": 0.5}}
    front, body = card({**RATES, "eval_sources": sources})
    assert "| `a.jsonl` | 12.35% | 5.00% | 10 |" in body and "| `b.jsonl` | 50.00% | 5.00% | 40 |" in body
    assert len(front["model-index"][0]["results"]) == 3


def test_what_an_evaluation_has_recorded_comes_first() -> None:
    record = {"eval_dataset_path": ["other.jsonl"], "text_normalizer": "basic"}
    _, body = card({**RATES, "eval_transcripts": record})
    assert "| `other.jsonl` |" in body and "`text_normalizer: basic`" in body
    split = {**PARAMETERS, "eval_dataset_path": [], "eval_split": 0.1}
    assert "| `0.1 of train.jsonl` |" in card(RATES, split)[1]


def test_a_model_without_error_rates_has_none_in_its_card() -> None:
    front, body = card({"eval_loss": 1.0})
    assert "model-index" not in front and "Transcription" not in body
    assert card({}, {**PARAMETERS, "train_dataset_type": ["messages"]})[0]["pipeline_tag"] == "audio-text-to-text"
    assert card({}, {}, listens=False)[0]["pipeline_tag"] == "text-generation"


def test_the_command_asks_as_the_training_did() -> None:
    _, body = card({})
    assert "erniekit transcribe FOLDER recording.wav\n" in body and "import AutoProcessor, QwenListens\n" in body
    _, body = card({}, {**PARAMETERS, "asr_prompt": "Write it down:", "asr_language": "de"})
    assert "recording.wav --asr-prompt 'Write it down:' --language de\n" in body
