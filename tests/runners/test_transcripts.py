"""Runs that write transcripts of held-out recordings: error rates in evaluations, the best model by them, the card."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from erniekit.cli.eval import evaluation_config
from erniekit.config import Config
from erniekit.errors import ModelFileError
from erniekit.export.export import export_model
from erniekit.runners.evaluate import run_evaluation
from tests.inference.listener import listener_folder, write_sound
from tests.log_capture import captured_log


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    lines = []
    for number in range(8):
        write_sound(folder / f"{number}.wav", 0.2 + 0.1 * (number % 3), number)
        lines.append(json.dumps({"audio_path": f"{number}.wav", "text": ("What is it?", "Three.")[number % 2]}) + "\n")
    for name in ("known", "new"):
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.proves("text_normalizer")
def test_error_rates_from_training_to_the_card(
    train: Callable[..., Any], speech: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, held_out = (
        listener_folder(tmp_path_factory.mktemp("listener")),
        [speech / "known.jsonl", speech / "new.jsonl"],
    )
    run = train(
        model_name_or_path=str(model), continue_training=True, max_steps=4, learning_rate=0.02,
        train_dataset_path=str(held_out[0]), train_dataset_type="asr", do_eval=True, eval_steps=2,
        eval_dataset_path=",".join(map(str, held_out)), eval_dataset_type="asr", eval_answers=-1,
        metric_for_best_model="wer", load_best_model_at_end=True, save_strategy="steps", save_steps=100,
    )  # fmt: skip
    assert f"erniekit transcribe {run.output} RECORDINGS" in run.said
    evaluations = [entry for entry in run.log if "eval_wer" in entry]
    assert [entry["eval_answers"] for entry in evaluations] == [16, 16] and "eval_rougeL" not in evaluations[0]
    best = min(evaluations, key=lambda entry: entry["eval_wer"])
    assert f"saved the model of step {best['step']}, where eval_wer was best" in run.said or best is evaluations[-1]
    state = json.loads((run.output / "checkpoint-4/trainer_state.json").read_text())
    assert state["best"]["value"] == best["eval_wer"] and state["best"]["greater"] is False

    with captured_log() as lines:
        plain = run_evaluation(evaluation_config(run.output, ["eval_answers=-1"]))
        basic = run_evaluation(evaluation_config(run.output, ["eval_answers=-1", "text_normalizer=basic"]))
    assert set(basic.sources) == set(map(str, held_out))
    assert basic.metrics["cer"] != plain.metrics["cer"]
    parts = [basic.metrics[name] for name in ("substitutions", "deletions", "insertions")]
    assert basic.metrics["wer"] == pytest.approx(sum(parts)) and basic.metrics["wer"] > 0
    said = "\n".join(lines)
    assert "the worst transcripts:" in said and f"> {held_out[0]}:" in said and "(WER " in said

    export_model(run.output, tmp_path / "exported", Config.load(None, (), verb="export"))
    _, front, body = (tmp_path / "exported/README.md").read_text(encoding="utf-8").split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "automatic-speech-recognition"
    assert "`text_normalizer: basic`" in body and f"| `{held_out[1]}` | {basic.metrics['wer']:.2%} |" in body
    with pytest.raises(ModelFileError, match=r"programs .* read text only"):
        export_model(run.output, tmp_path / "program", Config.load(None, (), verb="export"), form="inference")


@pytest.mark.slow
def test_stages_of_a_pipeline_write_the_same_transcripts(
    speech: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = listener_folder(tmp_path_factory.mktemp("listener"))
    config = {
        "model_name_or_path": str(model), "do_train": False, "do_eval": True,
        "eval_dataset_path": str(speech / "new.jsonl"), "eval_dataset_type": "asr", "eval_answers": 4,
        "device": "cpu", "max_seq_len": 128, "output_dir": str(tmp_path / "one"),
    }  # fmt: skip
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(config))
    words = [f"model_name_or_path={model}", f"output_dir={tmp_path / 'two'}", "pipeline_parallel_degree=2"]
    command = [sys.executable, "-m", "erniekit", "eval", str(tmp_path / "eval.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run_evaluation(evaluation_config(tmp_path / "eval.yaml", words[:1]))
    one, two = ((tmp_path / name / "eval_samples.jsonl").read_text() for name in ("one", "two"))
    assert one == two and len(one.splitlines()) == 4
