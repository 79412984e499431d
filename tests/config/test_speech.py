"""Rules of stage TTS: what its parameters may be, and what they mean together."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.config import Config
from erniekit.config.sections.speech import level_weights
from tests.config.samples import load, problems

TTS: dict[str, Any] = {"stage": "TTS"}
AR_NAR: dict[str, Any] = TTS | {"tts_objective": "ar_nar"}
EVALUATED: dict[str, Any] = TTS | {"do_eval": True, "eval_dataset_path": "eval"}


def told(**values: Any) -> str:
    return "\n".join(load(**values).messages)


def test_the_stage_reads_codes_and_no_templates() -> None:
    config = load(**TTS)
    assert config.stage.reads_codes and not (config.stage.reads_text or config.stage.reads_dialogues)
    assert config.training.train_dataset_type == ("codes",)
    assert config.training.learning_rate == 1e-4
    assert load(**TTS, lora=True).training.learning_rate == 1e-4


@pytest.mark.parametrize("written", ["tts", "Tts", "TTS"])
def test_the_stage_may_be_written_in_any_case(written: str) -> None:
    assert load(stage=written).basic.stage == "TTS"


def test_codes_are_for_this_stage_alone() -> None:
    assert "stage SFT cannot read codes of recordings; write `stage: TTS`" in problems(train_dataset_type="codes")
    assert "stage PT cannot read codes" in problems(stage="PT", train_dataset_type="codes")
    assert "stage TTS reads codes of recordings, not [messages]" in problems(**TTS, train_dataset_type="messages")
    assert "stage TTS reads codes of recordings, not [packed]" in problems(**TTS, train_dataset_type="packed")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"code_mask_ratio": "0.5,0.1"}, "`code_mask_ratio`: is not a smallest and a largest value; write for example"),
        ({"code_mask_ratio": "0"}, "`code_mask_ratio`: is not a smallest and a largest value"),
        ({"code_mask_ratio": "0,0"}, "`code_mask_ratio`: nothing would be hidden"),
        ({"code_mask_ratio": "0,1.5"}, "`code_mask_ratio`: must be at most 1.0, got 1.5"),
        ({"code_prompt_ratio": "0.1,0.2,0.3"}, "`code_prompt_ratio`: is not a smallest and a largest"),
        ({"prompt_seconds": "6,3"}, "`prompt_seconds`: is not a smallest and a largest"),
        ({"prompt_sources": "1,0"}, "`prompt_sources`: expected three numbers, one of them above 0"),
        ({"loss_factors": "0,0,0"}, "`loss_factors`: expected three numbers, one of them above 0"),
        (
            {"codebook_sampling": "often"},
            "`codebook_sampling`: expected auto, equal or a weight for each level, got often",
        ),
        ({"codebook_sampling": "0,0"}, "`codebook_sampling`: expected auto, equal or a weight"),
        ({"codebook_sampling": "2,1", "codec_levels": 8}, "`codebook_sampling`: 2 weights for 8 levels"),
        ({"audio_codebook_weights": "2,1", "codec_levels": 8}, "`audio_codebook_weights`: 2 weights for 8 levels"),
        ({"audio_codebook_weights": "0,0"}, "`audio_codebook_weights`: all levels have weight 0"),
        ({"tts_tasks": "tts sing"}, "`tts_tasks`: expected tts, continuation or stt, got sing"),
        ({"tts_objective": "mask"}, "`tts_objective`: expected masked or ar_nar, got mask; did you mean `masked`?"),
        ({"condition_dropout": 1.1}, "`condition_dropout`: must be at most 1.0"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any], text: str) -> None:
    assert text in problems(**TTS, **values)


def test_values_of_another_objective_have_no_effect() -> None:
    assert "`code_mask_ratio`" in told(**AR_NAR, code_mask_ratio="0.1,1") and "needs" not in told(**AR_NAR)
    assert "because tts_objective is masked; it needs `tts_objective` ar_nar" in told(**TTS, prompt_seconds="1,2")
    assert "no effect with stage SFT" in told(prompt_seconds="1,2")


def test_samples_without_a_condition_are_for_guidance() -> None:
    assert load(**TTS).speech.condition_dropout == 0.1
    assert load(**AR_NAR).speech.condition_dropout == 0.0
    assert load(**AR_NAR, condition_dropout=0.2).speech.condition_dropout == 0.2


def test_words_of_tasks_may_stand_twice() -> None:
    assert load(**AR_NAR, tts_tasks="tts tts continuation").speech.tts_tasks == ("tts", "tts", "continuation")
    assert load(**AR_NAR, tts_tasks=["tts", "tts", "stt"]).speech.tts_tasks == ("tts", "tts", "stt")


@pytest.mark.parametrize(
    ("written", "weights"),
    [("auto", (4 / 7, 2 / 7, 1 / 7)), ("equal", (1 / 3, 1 / 3, 1 / 3)), ("3,0, 1", (0.75, 0.0, 0.25))],
)
def test_levels_are_drawn_by_weights_that_sum_to_one(written: str, weights: tuple[float, ...]) -> None:
    assert level_weights(load(**AR_NAR, codebook_sampling=written).speech, 3) == pytest.approx(weights)


def test_weights_are_as_many_as_the_levels() -> None:
    with pytest.raises(ValueError, match="2 weights for 3 levels"):
        level_weights(load(**AR_NAR, codebook_sampling="2,1").speech, 3)


def test_seconds_replace_packing() -> None:
    config = load(**TTS, batch_seconds=40)
    assert not config.acceleration.packing and config.origin("packing") == "default because batch_seconds is set"
    assert "samples are batched by their seconds, and `packing` is true" in problems(
        **TTS, batch_seconds=40, packing=True
    )
    both = problems(**TTS, batch_seconds=40, batch_tokens=9000)
    assert "samples are batched by their seconds, and `batch_tokens` is 9000" in both
    assert "`per_device_train_batch_size`" in told(**TTS, batch_seconds=40, per_device_train_batch_size=2)
    assert "no effect" not in told(**TTS, batch_seconds=40, max_batch_samples=8, buffer_size=50)
    assert load(batch_seconds=40).acceleration.packing  # of another stage


def test_a_recording_fits_into_its_batch() -> None:
    text = problems(**TTS, batch_seconds=5, duration_range="1,6")
    assert "a recording of 6 seconds (`duration_range`) would exceed 5; write at least 6" in text
    load(**TTS, batch_seconds=6, duration_range="1,6")


def test_recordings_are_left_out_and_never_cut() -> None:
    assert load(**TTS).sft.over_length_policy == "drop"
    assert "changed over_length_policy truncate_turns -> drop" in told(**TTS, over_length_policy="truncate_turns")
    assert load(**TTS, over_length_policy="error").sft.over_length_policy == "error"


def test_a_curriculum_of_durations_needs_recordings() -> None:
    assert load(**TTS, curriculum="duration").sft.curriculum == "duration"
    assert "the samples of stage SFT have tokens and no duration; write `length`" in problems(curriculum="duration")


def test_the_codec_is_for_two_verbs() -> None:
    assert "no effect with stage SFT" in told(codec_levels=4)
    assert "codec" not in told(**TTS, codec="models/c", codec_levels=4, codebook_size=64, duration_range="1,9")
    only_there = load("codes", codec="models/c", codebook_size=64, train_dataset_path="a", output_dir="o").messages
    assert any("`codebook_size`" in line and "codec is models/c" in line for line in only_there)
    fitted = load("codes", codebook_size=64, duration_range="1,9").messages  # a verb without a stage
    assert [line for line in fitted if "no effect" in line and "model_name" not in line] == []


@pytest.mark.parametrize("metric", ["wer", "eval_cer"])
def test_error_rates_need_spoken_texts_and_a_judge(metric: str) -> None:
    text = problems(**EVALUATED, metric_for_best_model=metric)
    assert "needs spoken texts; write how many as `eval_answers`" in text
    text = problems(**EVALUATED, metric_for_best_model=metric, eval_answers=4)
    assert "needs somebody who writes down what the model says; write `speech_judge: pocketsphinx`" in text
    judged = load(**EVALUATED, metric_for_best_model=metric, eval_answers=4, speech_judge="pocketsphinx")
    assert judged.evaluation.greater_is_better is False


def test_metrics_of_the_stage() -> None:
    asked = EVALUATED | {"eval_answers": 4, "metric_for_best_model": "speaker_similarity"}
    assert load(**asked).evaluation.greater_is_better
    assert "stage TTS has no eval_bleu" in problems(**EVALUATED, metric_for_best_model="bleu", eval_answers=4)
    sft = {"do_eval": True, "eval_dataset_path": "e", "eval_answers": 4}
    assert "stage SFT has no eval_speaker_similarity" in problems(**sft, metric_for_best_model="speaker_similarity")


def test_an_evaluation_alone_speaks_where_there_is_a_judge() -> None:
    alone = EVALUATED | {"do_train": False}
    assert load(**alone).evaluation.eval_answers == 0
    assert load(**alone, speech_judge="pocketsphinx").evaluation.eval_answers == 100
    assert "`speech_judge`" in told(**EVALUATED, speech_judge="pocketsphinx")


def test_adapters_serve_levels_that_the_codec_has() -> None:
    adapted = AR_NAR | {"lora": True}
    assert load(**adapted, lora_codebooks="0,2").lora.lora_codebooks == (0, 2)
    assert load(**adapted, lora_codebooks=0).lora.lora_codebooks == (0,)
    assert "there is no level 8: `codec_levels` is 8" in problems(**adapted, lora_codebooks=[8], codec_levels=8)
    assert "samples of tts_objective masked have all levels" in problems(**TTS, lora=True, lora_codebooks="0")
    assert "`lora_codebooks`: contains the same item twice" in problems(**adapted, lora_codebooks="1,1")
    assert "because lora is false" in told(**AR_NAR, lora_codebooks="0")


def test_the_loss_scale_begins_within_its_bounds() -> None:
    text = problems(fp16=True, device="gpu", scale_loss=16, min_loss_scale=32)
    assert "`scale_loss`: the scale begins at 16, outside of its bounds, 32 to 16,777,216" in text
    assert load(fp16=True, device="gpu", scale_loss=2**30).precision.max_loss_scale == 2**30
    load(scale_loss=16, min_loss_scale=32)  # without fp16 it has no effect, which is told


def test_parameters_of_speaking_hold_in_evaluations() -> None:
    config = Config.from_mapping({"model_name_or_path": "m", "unmask_steps": 8, "stage": "TTS"}, verb="eval")
    assert config.speaking.unmask_steps == 8
    assert "no effect with stage SFT" in told(unmask_steps=8)
    spoken = Config.from_mapping({"model_name_or_path": "m", "unmask_steps": 8, "temperature": 0.5}, verb="speak")
    assert [line for line in spoken.messages if "no effect" in line] == []
