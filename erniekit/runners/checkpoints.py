"""How the checkpoints of a run have its master weights, from the words of `unified_checkpoint_config`."""

from __future__ import annotations

from erniekit.model.configuration import ModelConfig
from erniekit.model.weights import weight_reader
from erniekit.parameters import Config
from erniekit.parameters.checkpoint_words import NAME, why_without_effect
from erniekit.training.master_weights import MasterWeights, Where


def masters_of_checkpoints(config: Config, model_config: ModelConfig, *, resumes_parts: bool) -> MasterWeights:
    """What `remove_master_weight`, `skip_save_model_weight` and `master_weight_compatible` ask for.

    Args:
        resumes_parts: whether the run resumes from weights that ranks wrote, each its own.
    """
    words = {word for word in config[NAME] if not why_without_effect(config, word)}
    readable = not (config.lora.lora or resumes_parts)
    where: Where = "beside"
    if "skip_save_model_weight" in words:
        where = "as weights"
    elif "remove_master_weight" in words:
        where = "nowhere"
    return MasterWeights(
        where,
        compatible="master_weight_compatible" in config[NAME],
        weights_of=(lambda folder: weight_reader(model_config, folder)) if readable else None,
    )
