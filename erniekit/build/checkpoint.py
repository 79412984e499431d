"""What a rank writes and reads of the model where every rank has a part of checkpoints of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import paddle
from paddle import Tensor

from erniekit.config import Config
from erniekit.config.sections.checkpoint import NAME, reason_ignored
from erniekit.errors import CheckpointError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.decoder import Decoder
from erniekit.model.local_tensors import SingleProcessTensors, local_tensors
from erniekit.model.lora.lora import named_adapter_weights
from erniekit.model.quantization.fp8 import read_averages, write_averages
from erniekit.model.weights import named_weights, weight_reader
from erniekit.training.checkpoint.master_weights import MasterWeightPolicy, MasterWeightStorage
from erniekit.training.checkpoint.sharded import OPTIMIZER, WEIGHTS, CheckpointShards
from erniekit.training.checkpoint.tensors import open_tensors, write_tensors
from erniekit.training.collectives import Ranks

_STEM = "weights"


def shards_of(config: Config, model: Decoder, ranks: Ranks) -> CheckpointShards:
    """What every rank of a run writes of its own, and how it reads what it has written of the model."""
    section, own = config.checkpoint, LocalModelShard(model, ranks, config.lora.lora)
    kinds: frozenset[str] = frozenset()
    if not section.unified_checkpoint:
        kinds = frozenset({WEIGHTS, OPTIMIZER})
    elif "ignore_merge_optimizer" in section.unified_checkpoint_config:
        kinds = frozenset({OPTIMIZER})
    return CheckpointShards(kinds, own.write, own.load, config["optim_shard_num"])


@dataclass(frozen=True)
class LocalModelShard:
    """This rank's part of the trained model: all its weights, or the adapters where these are trained.

    Attributes:
        model: what this rank has of it.
        adapters: whether adapters are trained.
    """

    model: Decoder
    ranks: Ranks
    adapters: bool

    def write(self, folder: Path) -> None:
        """Put the values that this rank has into `folder`, as they lie in memory. Exchanges nothing, for another rank
        may have failed before it came here."""
        write_tensors(folder, _STEM, SingleProcessTensors(local_tensors(self._tensors())))
        if self.model.activation_scales:
            write_averages(folder, self.model.activation_scales.local_averages())

    @paddle.no_grad()
    def load(self, folder: Path) -> None:
        """The opposite, on the same layout.

        Raises:
            CheckpointError: the files are those of another model.
        """
        own, stored = self._tensors(), open_tensors(folder, _STEM)
        missing, surplus = sorted(own.keys() - set(stored.names)), sorted(set(stored.names) - own.keys())
        if missing or surplus:
            raise CheckpointError(
                f"{folder}: the weights are those of another model: {len(missing)} missing (for example "
                f"{missing[:2]}), {len(surplus)} unknown (for example {surplus[:2]})"
            )
        for name, tensor in own.items():
            values = stored.read(name)
            if values.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{folder}: {name}: expected shape {list(tensor.shape)}, got {list(values.shape)}; it is of "
                    "another model"
                )
            tensor.set_value(paddle.to_tensor(values).astype(tensor.dtype))
        if self.model.activation_scales:
            self.model.activation_scales.restore(read_averages(folder))

    def _tensors(self) -> Mapping[str, Tensor]:
        return self.ranks.local_shards((named_adapter_weights if self.adapters else named_weights)(self.model))


# How the checkpoints of a run have its master weights, from the words of `unified_checkpoint_config`.


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
