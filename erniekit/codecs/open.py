"""Open the codec of a folder by the `model_type` of its `config.json`; its module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from erniekit.codecs.codec import Codec
from erniekit.data.media.recording import MAX_RATE
from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.storage.model_folder import refuse_half_written

# By model type: the module, and what opens a folder in it, given the folder and `levels`.
CODECS: dict[str, tuple[str, str]] = {
    "encodec": ("erniekit.codecs.encodec", "Encodec"),
    "dac": ("erniekit.codecs.dac", "Dac"),
    "mimi": ("erniekit.codecs.mimi", "Mimi"),
    "residual_kmeans": ("erniekit.codecs.residual_kmeans", "open_residual_kmeans"),
    "kmeans": ("erniekit.codecs.kmeans", "open_kmeans"),
    "higgs_audio_v2_tokenizer": ("erniekit.codecs.higgs", "Higgs"),
}
SPEECH_MODELS = ("hubert", "wav2vec2")  # that `codec_features` may name


def open_codec(folder: Path | str, *, levels: int | None = None) -> Codec:
    """Open the codec in a folder.

    Args:
        folder: has `config.json` and weights, as transformers or `erniekit codes` writes them.
        levels: use so many codebooks, from the coarsest, both to encode and to decode. None: all that the codec has.

    Raises:
        ModelFileError: the folder is missing, has no codec, or one of its files is damaged.
        ConfigurationError: the codec has fewer levels.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file; name its folder" if folder.exists() else "no such folder"
        raise ModelFileError(f"{folder}: {what}. A codec is a folder with config.json and model.safetensors")
    refuse_half_written(folder)
    config_path = folder / "config.json"
    config = read_json_object(config_path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CODECS:
        known = ", ".join(sorted(CODECS))
        speech = " (codec: kmeans with this folder as codec_features makes units of a speech model's states)"
        hint = speech if model_type in SPEECH_MODELS else ""
        raise ModelFileError(
            f"{config_path}: model_type is {model_type!r:.80}, which is no codec; codecs are {known}{hint}"
        )
    module, name = CODECS[model_type]
    codec: Codec = getattr(import_module(module), name)(folder, levels=levels)
    if codec.sampling_rate > MAX_RATE:  # recordings would be read at this rate
        raise ModelFileError(
            f"{config_path}: a sampling rate of {codec.sampling_rate:,} Hz: recordings have at most {MAX_RATE:,}"
        )
    return codec
