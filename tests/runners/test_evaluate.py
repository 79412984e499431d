"""Evaluation on its own: whose model it measures, what it leaves, and what keeps it from beginning."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.cli import main
from erniekit.cli.eval import evaluation_config
from erniekit.errors import CheckpointError, ConfigurationError, ModelFileError
from erniekit.runners import evaluate as evaluate_module
from erniekit.runners.evaluate import run_evaluation
from tests.log_capture import captured_log

ROOT = Path(__file__).parents[2]


@pytest.fixture
def second(records: Path, tmp_path: Path) -> Path:
    """Other held-out records, some with several turns."""
    lines = (ROOT / "examples/data/sft-eval.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    dialogues = [json.loads(line) for line in lines]
    dialogues[0] |= {"src": ["What is 1 + 1?", *dialogues[0]["src"]], "tgt": ["2", *dialogues[0]["tgt"]]}
    path = tmp_path / "second.jsonl"
    path.write_text("".join(json.dumps(dialogue) + "\n" for dialogue in dialogues), encoding="utf-8")
    return path


@pytest.fixture
def trained(train: Callable[..., Any], records: Path, second: Path) -> Any:
    """A short run whose configuration names two held-out files."""
    return train(
        do_eval=True, eval_dataset_path=f"{records},{second}", eval_steps=4, max_evaluate_steps=-1,
        save_strategy="steps", save_steps=2,
    )  # fmt: skip


def evaluate(named: Path, *words: str) -> tuple[Any, str]:
    with captured_log() as lines:
        result = run_evaluation(evaluation_config(named, words))
    return result, "\n".join(lines)


def test_the_model_that_a_run_has_left_is_evaluated(trained: Any, tmp_path: Path) -> None:
    """By its configuration, its folder or a checkpoint; the figures are those of the run itself."""
    last = trained.result.evaluation
    for named in (tmp_path / "config.yaml", trained.output, trained.output / "checkpoint-4"):
        result, said = evaluate(named, "eval_answers=0")
        assert result.loss == pytest.approx(last.loss, rel=1e-6)
        assert result.metrics == pytest.approx(last.metrics, rel=1e-6)
        folder = named if named.name == "checkpoint-4" else trained.output
        assert f"evaluation of {folder}" in said
    earlier, _ = evaluate(trained.output / "checkpoint-2", "eval_answers=0")
    assert earlier.loss != last.loss
    # a model that the command line names comes first
    chosen = f"model_name_or_path={trained.output / 'checkpoint-2'}"
    other, _ = evaluate(tmp_path / "config.yaml", chosen, "eval_answers=0")
    assert other.loss == pytest.approx(earlier.loss, rel=1e-6)
    # and new adapters change nothing of it
    same, said = evaluate(tmp_path / "config.yaml", chosen, "lora=true", "eval_answers=0")
    assert same.loss == pytest.approx(other.loss, rel=1e-6)
    assert f"evaluation of {trained.output / 'checkpoint-2'} " in said
    fresh, said = evaluate(tmp_path / "config.yaml", chosen, "continue_training=false", "eval_answers=0")
    assert fresh.loss > other.loss and "evaluation of random weights" in said


def test_a_folder_is_evaluated_as_far_as_its_configuration(
    train: Callable[..., Any], records: Path, tmp_path: Path
) -> None:
    """A run leaves its resolved configuration, with one batch and no answers where its own said nothing."""
    run = train(do_eval=True, eval_dataset_path=str(records), per_device_eval_batch_size=1)
    stored = (run.output / "training_config.yaml").read_text()
    assert "max_evaluate_steps: 1\n" in stored and "eval_answers: 0\n" in stored
    for named in (tmp_path / "config.yaml", run.output):
        config = evaluation_config(named, [])
        assert (config.evaluation.max_evaluate_steps, config.evaluation.eval_answers) == (-1, 100)
        config = evaluation_config(named, ["max_evaluate_steps=1", "eval_answers=0"])
        assert (config.evaluation.max_evaluate_steps, config.evaluation.eval_answers) == (1, 0)


def test_results_may_go_elsewhere(trained: Any, tmp_path: Path) -> None:
    """What the run left stays as it is."""
    before = {path.name: path.stat().st_mtime_ns for path in trained.output.iterdir()}
    for number, named in enumerate((tmp_path / "config.yaml", trained.output, trained.output / "checkpoint-4")):
        elsewhere = tmp_path / f"elsewhere-{number}"
        result, _ = evaluate(named, f"output_dir={elsewhere}", "eval_answers=1")
        assert result.loss == pytest.approx(trained.result.evaluation.loss, rel=1e-6)
        found = {path.name for path in elsewhere.iterdir() if not path.name.startswith(".")}
        assert found == {"eval_results.json", "eval_samples.jsonl"}
    assert before == {path.name: path.stat().st_mtime_ns for path in trained.output.iterdir()}


def test_every_file_has_its_figures(trained: Any, records: Path, second: Path, tmp_path: Path) -> None:
    whole, said = evaluate(tmp_path / "config.yaml", "eval_answers=0")
    assert set(whole.sources) == {str(records), str(second)}
    assert str(second) in said and "token accuracy" in said
    for path in (records, second):
        alone, _ = evaluate(tmp_path / "config.yaml", f"eval_dataset_path={path}", "eval_answers=0")
        assert not alone.sources
        part = whole.sources[str(path)]
        assert (part.loss, part.units) == (pytest.approx(alone.loss, rel=1e-6), alone.units)
    parts = whole.sources.values()
    assert whole.units == sum(part.units for part in parts)
    assert whole.loss == pytest.approx(sum(part.loss * part.units for part in parts) / whole.units, rel=1e-6)
    stored = json.loads((trained.output / "eval_results.json").read_text())
    assert stored["eval_loss"] > 0


@pytest.mark.parametrize(
    "words", [["packing=true"], ["packing=false", "per_device_eval_batch_size=1"],
              ["packing=true", "per_device_eval_batch_size=5", "use_fused_head_and_loss_fn=true"],
              ["batch_tokens=200", "packing=false"]],
)  # fmt: skip
def test_figures_do_not_depend_on_the_batches(trained: Any, tmp_path: Path, words: list[str]) -> None:
    expected, _ = evaluate(tmp_path / "config.yaml", "eval_answers=4")
    found, _ = evaluate(tmp_path / "config.yaml", "eval_answers=4", *words)
    assert found.units == expected.units
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)
    for name, part in expected.sources.items():
        assert found.sources[name].metrics == pytest.approx(part.metrics, rel=1e-6)


def test_a_cap_is_told(trained: Any, tmp_path: Path) -> None:
    result, said = evaluate(tmp_path / "config.yaml", "eval_answers=0", "max_evaluate_steps=2")
    assert result.batches == 2 < result.batches_available
    assert f"2 of {result.batches_available} batches" in said


def test_answers_are_scored_and_kept(trained: Any, second: Path, tmp_path: Path) -> None:
    result, said = evaluate(tmp_path / "config.yaml", f"eval_dataset_path={second}", "eval_answers=5")
    samples = [json.loads(line) for line in (trained.output / "eval_samples.jsonl").read_text().splitlines()]
    assert len(samples) == 5 == result.metrics["answers"]
    assert {"exact_match", "rouge1", "rouge2", "rougeL", "bleu"} <= result.metrics.keys()
    for sample in samples:
        path, line = sample["place"].rsplit(":", 1)
        record = json.loads(Path(path).read_text().splitlines()[int(line) - 1])
        assert sample["expected"] == record["tgt"][-1]
        assert [message["content"] for message in sample["messages"]][-1] == record["src"][-1]
    assert result.metrics["rougeL"] == pytest.approx(sum(sample["rougeL"] for sample in samples) / 5, abs=1e-4)
    assert "exact match" in said and f"> {samples[0]['messages'][-1]['content']}" in said
    every, _ = evaluate(tmp_path / "config.yaml", f"eval_dataset_path={second}", "eval_answers=-1")
    assert every.metrics["answers"] == 12
    stored = json.loads((trained.output / "eval_results.json").read_text())
    assert stored["eval_rougeL"] == pytest.approx(every.metrics["rougeL"])
    none, _ = evaluate(tmp_path / "config.yaml", f"eval_dataset_path={second}", "eval_answers=0")
    assert "exact_match" not in none.metrics


def test_answers_may_decide_the_best_model(train: Callable[..., Any], second: Path) -> None:
    run = train(
        do_eval=True, eval_dataset_path=str(second), eval_steps=2, eval_answers=3, metric_for_best_model="rougeL",
        load_best=True, save_strategy="steps", save_steps=100,
    )  # fmt: skip
    state = json.loads((run.output / "checkpoint-4/trainer_state.json").read_text())
    assert 0 <= state["best"]["value"] <= 1
    log = [json.loads(line) for line in (run.output / "training_log.jsonl").read_text().splitlines()]
    assert [entry["eval_answers"] for entry in log if "eval_rougeL" in entry] == [3, 3]


def test_adapters_and_pairs_are_evaluated(train: Callable[..., Any], tiny_base: Path, tmp_path: Path) -> None:
    pairs = ROOT / "examples/data/preference-eval.jsonl"
    values = {
        "stage": "DPO", "model_name_or_path": str(tiny_base), "continue_training": True, "max_steps": 2,
        "train_dataset_path": str(pairs), "eval_dataset_path": str(pairs), "do_eval": True, "eval_steps": 2,
    }  # fmt: skip
    for more in ({}, {"lora": True, "lora_rank": 4}):
        run = train(**values, **more)
        result, said = evaluate(tmp_path / "config.yaml", "eval_answers=2", "max_evaluate_steps=1")
        assert result.metrics["reward_margin"] == pytest.approx(
            run.result.evaluation.metrics["reward_margin"], abs=2e-5
        )
        assert result.metrics["kl_to_reference"] != 0
        assert "reference: " in said and "exact_match" in result.metrics
    shutil.copytree(run.output, tmp_path / "adapters")
    again, _ = evaluate(
        tmp_path / "adapters", f"output_dir={tmp_path / 'other'}", "eval_answers=0", "max_evaluate_steps=1"
    )
    assert again.metrics["reward_margin"] == pytest.approx(result.metrics["reward_margin"], rel=1e-5)
    # a whole model alone has nothing to be compared with
    alone, said = evaluate(tmp_path / "config.yaml", f"model_name_or_path={tiny_base}", "lora=false", "eval_answers=0")
    assert "reference: none" in said and "kl_to_reference" not in alone.metrics


def test_the_reference_is_what_the_run_began_with(train: Callable[..., Any], tiny_base: Path, tmp_path: Path) -> None:
    pairs = ROOT / "examples/data/preference-eval.jsonl"
    values = {
        "stage": "DPO", "model_name_or_path": str(tiny_base), "continue_training": True, "max_steps": 2,
        "train_dataset_path": str(pairs), "eval_dataset_path": str(pairs), "do_eval": True, "eval_steps": 2,
        "max_evaluate_steps": 1, "learning_rate": 0.02,
    }  # fmt: skip
    whole = shutil.copytree(train(**values).output, tmp_path / "whole")
    adapters = shutil.copytree(train(**values, lora=True, lora_rank=4).output, tmp_path / "adapters")
    for more in (
        {"init_from_checkpoint": str(whole)},
        {"init_from_checkpoint": str(whole), "lora": True, "lora_rank": 4},
        {"init_from_checkpoint": str(adapters), "lora": True},
        {"lora_path": str(adapters), "lora": True},
        {"lora": True, "lora_rank": 4, "lora_init": "pissa"},
        {"lora": True, "lora_rank": 4, "dora": True},
    ):
        run = train(**values, **more)
        for named in (tmp_path / "config.yaml", run.output):
            result, said = evaluate(named, "eval_answers=0", "max_evaluate_steps=1")
            assert result.metrics == pytest.approx(run.result.evaluation.metrics, rel=1e-4, abs=1e-5), said
            assert abs(result.metrics["reward_margin"]) > 1e-3


def test_what_cannot_be_evaluated_is_told(
    make_config: Callable[..., Any], records: Path, tmp_path: Path, capsys: Any
) -> None:
    make_config(do_eval=True, eval_dataset_path=str(records))
    with pytest.raises(ConfigurationError, match="this run has not been trained"):
        evaluation_config(tmp_path / "config.yaml", [])
    with pytest.raises(ConfigurationError, match="does not exist"):
        evaluation_config(tmp_path / "none.yaml", [])
    with pytest.raises(ConfigurationError, match=r"holds no training_config\.yaml"):
        evaluation_config(tmp_path, [])
    make_config()
    assert main(["eval", str(tmp_path / "config.yaml")]) == 2
    assert "eval_dataset_path" in capsys.readouterr().err


def test_an_evaluation_on_its_own_is_refused_before_it_begins(
    make_config: Callable[..., Any], records: Path, tmp_path: Path, train: Callable[..., Any], logged: list[str]
) -> None:
    alone = {"do_train": False, "do_eval": True, "eval_dataset_path": str(records)}
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"output_dir .*/file/out cannot be written"):
        run_evaluation(make_config(**alone, output_dir=str(tmp_path / "file/out")))
    damaged = train(save_strategy="steps", save_steps=4).output / "checkpoint-4"
    weights = damaged / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelFileError, match=r"model\.safetensors does not have the content that was written"):
        run_evaluation(make_config(**alone, init_from_checkpoint=str(damaged), continue_training=True))
    assert not any(line.startswith("evaluation at") for line in logged)

    program = "import sys; from pathlib import Path; from erniekit.training.checkpoint.lock import locked\n"
    program += "with locked(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(CheckpointError, match="another run is writing"):
            run_evaluation(make_config(**alone))
    finally:
        other.stdin.close()
        other.stdout.close()
        other.wait()


def test_the_best_adapters_are_what_a_run_leaves(
    train: Callable[..., Any], tiny_base: Path, records: Path, second: Path
) -> None:
    """A greater loss taken for a better one makes the first evaluation the best, before and after a resume."""
    values = {
        "model_name_or_path": str(tiny_base), "continue_training": True, "lora": True, "lora_rank": 4, "do_eval": True,
        "eval_dataset_path": [str(records), str(second)], "eval_steps": 1, "max_evaluate_steps": -1, "load_best": True,
        "greater_is_better": True, "save_strategy": "steps", "save_steps": 100, "save_total_limit": 1,
        "report_to": "visualdl", "max_steps": 3,
    }  # fmt: skip
    run = train(**values)
    best = (run.output / "checkpoint-1/adapter_model.safetensors").read_bytes()
    assert (run.output / "adapter_model.safetensors").read_bytes() == best
    assert (run.output / "checkpoint-3/adapter_model.safetensors").read_bytes() != best
    results = json.loads((run.output / "train_results.json").read_text())
    assert results["best_step"] == 1
    result, _ = evaluate(run.output, "eval_answers=0")
    assert result.loss == pytest.approx(results["best_eval_loss"], rel=1e-6)
    resumed = train(**{**values, "max_steps": 5, "resume_from_checkpoint": True})
    assert sorted(path.name for path in run.output.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-5"]
    assert (resumed.output / "adapter_model.safetensors").read_bytes() == best


@pytest.mark.proves("prompt_seconds", "text_frontend", "lora_codebooks", "eval_answers", "speech_judge")
def test_texts_are_spoken_with_the_values_of_the_run(
    make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("evaluation_dataset", "codec_of_run"):
        monkeypatch.setattr(evaluate_module, name, lambda *arguments: None)
    monkeypatch.setattr(evaluate_module, "SpokenAnswers", lambda dataset, tokenizer, codec, settings: settings)
    mesh = SimpleNamespace(topology=SimpleNamespace(pipeline=1), rank=0)

    def settings(**values: Any) -> Any:
        config = make_config(stage="TTS", train_dataset_type="codes", eval_answers=4, do_eval=True, **values)
        return evaluate_module.build_generation_evaluator(config, None, None, mesh)  # type: ignore[arg-type]

    values = {"tts_objective": "ar_nar", "eval_dataset_path": "codes", "eval_dataset_type": "codes"}
    plain = settings(**values)
    assert (plain.count, plain.judge, plain.voice_seconds, plain.frontend) == (4, "", 6.0, "tokenizer")
    assert plain.adapted is None and plain.speaking.class_temperature == 0.0
    others = {"prompt_seconds": "1,2.5", "text_frontend": "characters", "speech_judge": "ears"}
    adapters = {"lora": True, "lora_codebooks": "0", "continue_training": True}
    more = {"class_temperature": 0.5, "seed": 7, "text_normalizer": "basic", "device": "cpu"}
    other = settings(**values, **others, **adapters, **more)
    assert (other.seed, other.normalizer, other.device) == (7, "basic", "cpu")
    assert (other.judge, other.voice_seconds, other.frontend) == ("ears", 2.5, "characters")
    assert other.adapted == (0,) and other.speaking.class_temperature == 0.5


def test_texts_that_are_not_spoken_choose_no_model(make_config: Callable[..., Any]) -> None:
    mesh = SimpleNamespace(topology=SimpleNamespace(pipeline=2), rank=0)
    values = {"stage": "TTS", "train_dataset_type": "codes", "eval_answers": 4, "do_eval": True, "speech_judge": "ears"}
    values |= {
        "eval_dataset_path": "codes",
        "eval_dataset_type": "codes",
        "evaluation_strategy": "steps",
        "save_strategy": "steps",
        "load_best_model_at_end": True,
    }
    config = make_config(**values, metric_for_best_model="eval_wer")
    with pytest.raises(ConfigurationError, match="`metric_for_best_model: eval_wer`: texts are not spoken"):
        evaluate_module._spoken_answers(config, None, mesh)  # type: ignore[arg-type]
    assert evaluate_module._spoken_answers(make_config(**values), None, mesh) is None  # type: ignore[arg-type]
