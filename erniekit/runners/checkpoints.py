"""How the checkpoints of a run have its master weights, from the words of `unified_checkpoint_config`."""

from __future__ import annotations

from erniekit.model.configuration import ModelConfig
from erniekit.model.weights import weight_reader
from erniekit.parameters import Config
from erniekit.parameters.checkpoint_words import NAME, reason_ignored
from erniekit.training.master_weights import MasterWeightPolicy, MasterWeightStorage


def master_weight_policy(config: Config, model_config: ModelConfig, *, resumes_shards: bool) -> MasterWeightPolicy:
    """What `remove_master_weight`, `skip_save_model_weight` and `master_weight_compatible` ask for.

    Args:
        resumes_shards: whether the run resumes from weights that ranks wrote, each its own.
    """
    words = {word for word in config[NAME] if not reason_ignored(config, word)}
    readable = not (config.lora.lora or resumes_shards)
    where: MasterWeightStorage = "beside"
    if "skip_save_model_weight" in words:
        where = "as weights"
    elif "remove_master_weight" in words:
        where = "nowhere"
    return MasterWeightPolicy(
        where,
        compatible="master_weight_compatible" in config[NAME],
        open_weights=(lambda folder: weight_reader(model_config, folder)) if readable else None,
    )
