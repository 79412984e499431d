"""Check what only stage TTS asks for: weights for each level, who judges what is said, and the packages for it.

The model and the codec are checked where they are read, in `speech.py`. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

from pathlib import Path

from erniekit.build.checks import TRANSCRIPT_LIBRARIES, absent_libraries, transcript_libraries_missing
from erniekit.build.speech import trained_levels
from erniekit.config import Config
from erniekit.data.phonemes import LIBRARY as ESPEAK
from erniekit.environment import is_importable
from erniekit.errors import ConfigurationError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.model_config import CONFIG_FILE, ModelConfig
from erniekit.model.architectures.speaking import VALL_E, code_layout

POCKETSPHINX = "pocketsphinx"  # a word of `speech_judge`, and the name of the package
RESEMBLYZER = "resemblyzer"  # tells voices apart
VOICES_MISSING = "Resemblyzer is not installed (pip install resemblyzer; it brings torch and librosa)"


def check_speech(config: Config, model: ModelConfig) -> None:
    """Raise ConfigurationError if a run has weights of levels that the model does not have, or cannot read texts.

    Args:
        model: one that writes codes.
    """
    layout = code_layout(model)
    weights = config.speech.audio_codebook_weights
    if weights and len(weights) != layout.levels:
        raise ConfigurationError(
            f"{config.origin('audio_codebook_weights')}: `audio_codebook_weights`: {len(weights)} weights for "
            f"{layout.levels} levels\n  Write one for each level."
        )
    if layout.kind == VALL_E:
        trained_levels(config, layout.levels)
    if config.speech.text_frontend == "phonemes" and not is_importable(ESPEAK):
        raise ConfigurationError(
            f"{config.origin('text_frontend')}: `text_frontend: phonemes` needs espeak-ng\n"
            "  Install it: pip install 'erniekit[speech-data]'   (or write tokenizer or characters)"
        )


def check_voices(config: Config) -> None:
    """Raise ConfigurationError if the best model is the one with the most similar voice, and nothing here tells voices
    apart."""
    asked = config.stage.reads_codes and config.basic.do_eval and config.evaluation.eval_answers
    metric = config.evaluation.metric_for_best_model
    if asked and metric == "eval_speaker_similarity" and not is_importable(RESEMBLYZER):
        raise ConfigurationError(
            f"{config.origin('metric_for_best_model')}: `metric_for_best_model: {metric}`: {VOICES_MISSING}\n"
            "  Install it, or choose another metric, such as eval_loss."
        )


def check_judge(config: Config) -> None:
    """Raise ConfigurationError if what is said is to be written down and compared, and nobody here can do it."""
    judge = config.evaluation.speech_judge
    if not (config.stage.reads_codes and config.basic.do_eval and config.evaluation.eval_answers and judge):
        return
    if absent := absent_libraries(TRANSCRIPT_LIBRARIES):
        raise ConfigurationError(transcript_libraries_missing(", ".join(absent)))
    origin = f"{config.origin('speech_judge')}: `speech_judge`"
    if judge == POCKETSPHINX:
        if not is_importable(POCKETSPHINX):
            raise ConfigurationError(
                f"{origin}: pocketsphinx is not installed\n"
                "  Install it: pip install pocketsphinx   (or name the folder of a model that transcribes)"
            )
        return
    folder = Path(judge).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigurationError(
            f"{origin}: {judge} is neither {POCKETSPHINX} nor the folder of a model (it has no {CONFIG_FILE})"
        )
    if ModelConfig.from_folder(folder).architecture.audio is None:
        family = read_json_object(folder / CONFIG_FILE).get("model_type")
        raise ConfigurationError(f"{origin}: the model in {judge} ({family}) hears nothing; name one that transcribes")
