"""What an exported model that writes codes has beside its weights: the codec that makes sound of them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from erniekit.build.speech import AUDIO_TOKENIZER, codec_candidates
from erniekit.export.trained_model import TrainedModel

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
