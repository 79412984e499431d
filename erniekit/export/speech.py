"""What an exported model that writes codes has beside its weights: the codec that makes sound of them, and how it reads
texts."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from erniekit.build.codec_folder import codec_candidates
from erniekit.build.speech import AUDIO_TOKENIZER
from erniekit.build.text_reading import text_reading_of, write_text_reading
from erniekit.errors import ConfigurationError
from erniekit.export.trained_model import TrainedModel, ignored_config_keys
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import code_layout

logger = logging.getLogger(__name__)


def copy_codec(model: TrainedModel, target: Path) -> None:
    """Copy the codec of a trained model into `audio_tokenizer` of an exported folder, where `erniekit speak` and the
    package omnivoice look for it; tell where there is none."""
    folders = [folder for folder in (model.folder, model.model_folder, model.base) if folder]
    found = next((folder for folder in codec_candidates(folders, model.parameters) if folder.is_dir()), None)
    if found is None:
        logger.warning(f"codec: not copied, its folder is not here; speak needs it beside {target.name}: --codec DIR")
        return
    shutil.copytree(found, target / AUDIO_TOKENIZER)
    logger.info(f"codec: {found}, copied into {AUDIO_TOKENIZER}")


def copy_text_reading(model: TrainedModel, target: Path) -> None:
    """Write into an exported folder how the run's texts became ids and how fast its data is spoken; nothing of a model
    that no run of ours has trained."""
    found = text_reading_of(model.parameters, [model.folder, model.folder.parent, model.model_folder])
    if found is not None:
        write_text_reading(target, found)


def refuse_adapters_of_levels(model: TrainedModel) -> None:
    """Raise ConfigurationError for adapters that serve some levels only, which weights that they are merged into cannot
    do."""
    served = set(model.parameters.get("lora_codebooks") or ())
    if not (model.is_adapter and served):
        return
    config = ModelConfig.from_folder(model.model_folder, ignored_config_keys(model.parameters))
    levels = code_layout(config).levels
    if served != {*range(levels)}:
        raise ConfigurationError(
            f"{model.folder}: the adapters serve the levels {', '.join(map(str, sorted(served)))} of {levels} "
            "(`lora_codebooks`), and merged weights would serve all\n"
            f"  Speak with the adapters as they are: erniekit speak {model.folder} --text TEXT"
        )
