"""Find the codec whose codes a run of stage TTS reads; build the model around a decoder.

Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from erniekit.codecs.facts import code_facts
from erniekit.config import Config
from erniekit.config.sections.speech import level_weights
from erniekit.data.media.codes_folder import FACTS, CodesFacts, codec_folder, read_facts
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.hub.cache import chosen_hub, find_local_folder, local_model_folder
from erniekit.json_files import read_json_object
from erniekit.model.architectures import speaking
from erniekit.model.architectures.model_config import CONFIG_FILE, ModelConfig, WrappedDecoder
from erniekit.model.architectures.speaking import KINDS, LLM_CONFIG, OMNIVOICE, VALL_E, code_layout

AUDIO_TOKENIZER = "audio_tokenizer"  # the folder of the codec in that of a model
KIND_OF = {"masked": OMNIVOICE, "ar_nar": VALL_E}  # by `tts_objective`
MANY = 3  # folders in a message


class CodecFacts(NamedTuple):
    """The codec of a run; attributes as of `Codec`.

    Attributes:
        folder: of the codec; it need not be here.
        frame_rate, sampling_rate: 0 where only the sizes of its codes are known.
        fingerprint: of the codec that made the codes; "" where only its folder is known.
    """

    folder: Path
    levels: int
    codebook_size: int
    frame_rate: float
    sampling_rate: int
    fingerprint: str = ""

    def __str__(self) -> str:
        """For the first lines of a run."""
        levels = f"{self.levels} level{'s' if self.levels > 1 else ''} of {self.codebook_size:,}"
        return f"{levels}, {self.frame_rate:g} frames a second (codec {self.folder})"


def codec_facts(folder: Path, levels: int | None = None) -> CodecFacts:
    """Return the codec in a folder; arguments and errors as of `code_facts`."""
    return CodecFacts(folder, *code_facts(folder, levels))


def codec_of_run(config: Config) -> CodecFacts:
    """Return the codec whose codes a run reads: that of `codec`, that of `codes.json` beside the data, or that in the
    model's folder.

    Where none of them is here yet, `codec_levels` and `codebook_size` together say the sizes of its codes.

    Raises:
        UserError: there is none, or codec, data and parameters contradict each other.
    """
    section = config.codes
    made = _codes_of_data(config)
    levels = section.codec_levels if made is None else section.codec_levels or made[1].levels
    facts = _codec_here(config, made, levels)
    if facts is None:
        if not (section.codec_levels and section.codebook_size):
            raise ConfigurationError(no_codec(config))
        named = section.codec or config.basic.model_name_or_path
        return CodecFacts(Path(named), section.codec_levels, section.codebook_size, 0.0, 0)
    _refuse_other_sizes(config, facts, made)
    return facts


def _codec_here(config: Config, made: tuple[Path, CodesFacts] | None, levels: int | None) -> CodecFacts | None:
    section = config.codes
    if section.codec:
        folder = find_local_folder(section.codec, chosen_hub(config))
        sizes_are_known = section.codec_levels and section.codebook_size
        if folder is None or (not folder.is_dir() and sizes_are_known):
            return None
        return codec_facts(folder.absolute(), levels)
    if made is not None:
        home, facts = made
        folder = codec_folder(home, facts).absolute()
        sizes = (facts.levels, facts.codebook_size, facts.frame_rate, facts.sampling_rate)
        return CodecFacts(folder, *sizes, facts.fingerprint)
    folder = local_model_folder(config)
    if folder is not None and (folder / AUDIO_TOKENIZER).is_dir():
        return codec_facts((folder / AUDIO_TOKENIZER).absolute(), levels)
    return None


def _codes_of_data(config: Config) -> tuple[Path, CodesFacts] | None:
    """Return the folder with a `codes.json` beside the data of a run, and what it says.

    Raises:
        ConfigurationError: the data has several, and they are of different codecs.
    """
    found = {}
    for path in (*config.training.train_dataset_path, *config.evaluation.eval_dataset_path):
        for folder in _homes(Path(path).expanduser()):
            if folder not in found and (facts := read_facts(folder)) is not None:
                found[folder] = facts
    if len({facts.fingerprint for facts in found.values()}) > 1:
        named = ", ".join(map(str, list(found)[:MANY]))
        raise ConfigurationError(
            f"the codes are of different codecs: {named}\n  Train on codes of one codec: `erniekit codes` with `codec` "
            "encodes other recordings with it."
        )
    return next(iter(found.items()), None)


def _homes(path: Path) -> Iterable[Path]:
    """Yield the folders in which `codes.json` may lie for a source: its own, those of its parts, and that of a tar file
    or of an index in a folder below."""
    here = path if path.is_dir() else path.parent
    places = [[here], sorted(here.glob("part-*")), [here.parent]]
    return next((held for held in places if any((folder / FACTS).is_file() for folder in held)), [])


def no_codec(config: Config) -> str:
    """Return why it is not known of which codec the codes of a run are."""
    if config.codes.codec:
        return (
            f"{config.origin('codec')}: `codec`: {config.codes.codec} is not here yet\n"
            "  Write codec_levels and codebook_size, too, or fetch it first."
        )
    return (
        f"there is no {FACTS} beside the data, and no {AUDIO_TOKENIZER} in the model's folder, so it is not known of "
        "which codec the codes are\n  Write codec: the folder of the codec that made them."
    )


def _refuse_other_sizes(config: Config, codec: CodecFacts, made: tuple[Path, CodesFacts] | None) -> None:
    """Raise ConfigurationError if parameters or data have other codes than the codec."""
    lines = [
        f"{config.origin(name)}: `{name}: {config[name]}`, and the codec in {codec.folder} has {has}"
        for name, has in (("codec_levels", codec.levels), ("codebook_size", codec.codebook_size))
        if config[name] is not None and config[name] != has
    ]
    if made is not None:
        home, facts = made
        own = {"levels": codec.levels, "codes of a level": codec.codebook_size, "Hz": codec.sampling_rate}
        theirs = {"levels": facts.levels, "codes of a level": facts.codebook_size, "Hz": facts.sampling_rate}
        lines += [
            f"{home / FACTS}: {theirs[name]:,} {name}, and the codec in {codec.folder} has {size:,}"
            for name, size in own.items()
            if theirs[name] != size
        ]
    if lines:
        raise ConfigurationError("\n".join(lines))


def with_codes(config: Config, model: ModelConfig, folder: Path | str) -> ModelConfig:
    """Return the model of a run: in stage TTS one that writes codes, which is put around the decoder of `folder` if its
    files hold no more than that; in other stages `model` itself.

    Raises:
        UserError: the model does not fit the run, or cannot write codes.
    """
    if not config.stage.reads_codes:
        return model
    codec = codec_of_run(config)
    if model.architecture.codes is None:
        return speaking_config(model, config, codec, where=folder)
    layout, wanted = code_layout(model), KIND_OF[config.speech.tts_objective]
    if layout.kind != wanted:
        objective = next(name for name, kind in KIND_OF.items() if kind == layout.kind)
        raise ConfigurationError(
            f"{config.origin('tts_objective')}: `tts_objective: {config.speech.tts_objective}` trains models of the "
            f"family {wanted}, and {folder} holds one of {layout.kind}\n  Write tts_objective: {objective}."
        )
    if (layout.levels, layout.codebook_size) != (codec.levels, codec.codebook_size):
        raise ConfigurationError(
            f"{folder}: the model writes {layout.levels} levels of {layout.codebook_size:,} codes, and the codec in "
            f"{codec.folder} has {codec.levels} of {codec.codebook_size:,}\n  Use codes of the codec that the model "
            "was trained with."
        )
    return model


def holds_codes(folder: Path) -> bool:
    """Return whether the weights in a folder are those of a model that writes codes."""
    path = folder / CONFIG_FILE
    return path.is_file() and read_json_object(path).get("model_type") in KINDS


def speaking_config(
    plain: ModelConfig, config: Config, codec: CodecFacts, where: Path | str = "model_name_or_path"
) -> ModelConfig:
    """Return the model that writes the codes of a codec around a decoder whose files hold no more than that.

    Args:
        where: heads the message about a decoder that cannot.

    Raises:
        UserError: it cannot, or adapters would be trained beside new tables.
    """
    if config.lora.lora:
        raise ConfigurationError(
            f"{config.origin('lora')}: `lora`: {where} writes no codes yet: the code tables are new and adapters would "
            "leave them random\n  Train all weights first (lora: false), or start from a model that speaks."
        )
    architecture = plain.architecture
    if architecture.text is not None:
        raise ModelFileError(
            f"{where}: {plain.model_type} has an encoder in front of its decoder\n  Start from the decoder alone: "
            "a model that speaks is put around it."
        )
    plain = replace(plain, num_nextn_predict_layers=0)
    decoder = plain.to_json()
    kind = KIND_OF[config.speech.tts_objective]
    values = {"model_type": kind, LLM_CONFIG: decoder, "num_audio_codebook": codec.levels, **_token_ids(decoder)}
    if kind == OMNIVOICE:
        weights = config.speech.audio_codebook_weights or speaking.default_weights(codec.levels)
        values |= {
            "audio_vocab_size": codec.codebook_size + 1,
            "audio_mask_id": codec.codebook_size,
            "audio_codebook_weights": list(weights),
        }
    else:
        values["audio_vocab_size"] = codec.codebook_size
    found = ModelConfig.from_json(values, where=f"{where}: as the decoder of {kind}")
    return replace(found, wrapped=WrappedDecoder(plain, config.training.seed))


def _token_ids(decoder: dict[str, object]) -> dict[str, object]:
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {name: decoder[name] for name in names if decoder.get(name) is not None}


def trained_levels(config: Config, levels: int) -> tuple[float, ...]:
    """Return how often a sample trains each level; with `lora_codebooks` only those that the adapters serve.

    Raises:
        ConfigurationError: the weights are not as many as the levels, or none is left.
    """
    try:
        weights = level_weights(config.speech, levels)
    except ValueError as error:
        origin = config.origin("codebook_sampling")
        raise ConfigurationError(
            f"{origin}: `codebook_sampling: {config.speech.codebook_sampling}`: {error}\n  Write one for each level."
        ) from None
    served = config.lora.lora_codebooks if config.lora.lora else ()
    if not served:
        return weights
    origin = config.origin("lora_codebooks")
    if beyond := [level for level in served if level >= levels]:
        raise ConfigurationError(
            f"{origin}: `lora_codebooks`: there is no level {beyond[0]}: the model has {levels}, from 0"
        )
    kept = tuple(weight if level in served else 0.0 for level, weight in enumerate(weights))
    if not any(kept):
        raise ConfigurationError(
            f"{origin}: `lora_codebooks` names levels that `codebook_sampling` never draws\n"
            "  Give one of them a weight."
        )
    return tuple(weight / sum(kept) for weight in kept)
