"""Build what a run reads from checkpoints and writes to them: its start, the model, its shards and its identity."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import paddle
from paddle import Tensor

from erniekit.build.adapters import (
    AdapterPlan,
    adapter_plan,
    base_name,
    initial_adapters,
    refuse_other_checkpoint,
)
from erniekit.build.checks import batch_settings
from erniekit.build.data import DataParallelRank
from erniekit.build.model import initial_weights
from erniekit.build.precision import precision_identity
from erniekit.config import Config
from erniekit.config.sections.checkpoint import NAME, reason_ignored
from erniekit.environment import package_versions, rounding_settings
from erniekit.errors import CheckpointError
from erniekit.hub.download import model_folder
from erniekit.hub.fetched import locked
from erniekit.hub.object_store import open_folder
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.decoder import Decoder
from erniekit.model.local_tensors import LocalTensors, SingleProcessTensors, local_tensors
from erniekit.model.lora.lora import base_fingerprint, local_adapters, named_adapter_weights, save_adapters
from erniekit.model.native import path_in_use
from erniekit.model.processor_files import write_processor_files
from erniekit.model.quantization.fp8 import read_averages, write_averages
from erniekit.model.vocabulary import already_grown
from erniekit.model.weights import (
    GENERATION_CONFIG_FILE,
    named_weights,
    save_companion_files,
    save_model_folder,
    weight_reader,
)
from erniekit.training.checkpoint.master_weights import MasterWeightPolicy, MasterWeightStorage, master_weights_as_model
from erniekit.training.checkpoint.resume import RunIdentity, Start, open_output_folder
from erniekit.training.checkpoint.sharded import (
    OPTIMIZER,
    WEIGHTS,
    CheckpointShards,
    check_same_layout,
    local_shard_of,
    sharded_kinds,
)
from erniekit.training.checkpoint.stored_start import bring_checkpoint
from erniekit.training.checkpoint.tensors import open_tensors, write_tensors
from erniekit.training.collectives import Ranks

_STEM = "weights"


@contextmanager
def open_run_folder(config: Config, rank: int) -> Iterator[Start | None]:
    """Lock `output_dir` for the first rank and yield the start of the run; yield None on other ranks.

    Raises:
        UserError: the folder is in use or holds another run, or the checkpoint to resume from is damaged.
    """
    if rank > 0:
        yield None
        return
    with open_output_folder(
        config.output_dir,
        resume_from_checkpoint=config.checkpoint.resume_from_checkpoint,
        overwrite_output_dir=config.basic.overwrite_output_dir,
        model_folder=model_folder(config),
        weights_from=initial_adapters(config) or initial_weights(config),
    ) as start:
        yield start


def with_checkpoint_here(config: Config, start: Start) -> Start:
    """Return the start of a run with a checkpoint that this machine has.

    Where the output folder is one of an object store, another machine than that of the first rank has a folder of its
    own, into which its ranks, taking turns, download the checkpoint.
    """
    if "output_dir" not in config.urls or start.checkpoint is None or start.checkpoint.is_dir():
        return start
    named = config.checkpoint.resume_from_checkpoint
    folder = Path(named) if isinstance(named, str) else config.output_dir / start.checkpoint.name
    with locked(config.output_dir.with_name(".ranks")):
        if not folder.is_dir():
            bring_checkpoint(open_folder(config.urls["output_dir"]), folder.parent, folder.name)
    return replace(start, checkpoint=folder)


@dataclass(frozen=True)
class ModelSource:
    """Where the weights of a run come from.

    Attributes:
        weights: the folder that the model is built from; None for random weights.
        adapters: the adapters that are trained; None if all weights are trained.
        sharded_checkpoint: a checkpoint of which each rank reads its shard after the model has been built.
    """

    weights: Path | None
    adapters: AdapterPlan | None
    sharded_checkpoint: Path | None


def model_source(config: Config, model_config: ModelConfig, checkpoint: Path | None) -> ModelSource:
    """Return the source of the weights of a new run, or of a run that resumes from `checkpoint`.

    Raises:
        CheckpointError: the run that wrote the checkpoint trained other weights.
    """
    sharded = checkpoint if checkpoint and WEIGHTS in sharded_kinds(checkpoint) else None
    full = None if sharded else checkpoint
    if sharded:
        refuse_other_checkpoint(config, model_config, sharded)
    adapters = adapter_plan(config, model_config, full)
    weights = full if full and not adapters else initial_weights(config)
    return ModelSource(weights, adapters, sharded)


def load_own_shard(source: ModelSource, shards: CheckpointShards, ranks: Ranks) -> None:
    """Load this rank's shard of the model if the run resumes from a sharded checkpoint.

    Raises:
        CheckpointError: the checkpoint was written on another layout.
    """
    if source.sharded_checkpoint is not None:
        check_same_layout(source.sharded_checkpoint, ranks)
        shards.load_model(local_shard_of(source.sharded_checkpoint, ranks))


class IdentifiedData(Protocol):
    """The data of a run, as far as its identity is concerned."""

    @property
    def plan(self) -> Any: ...  # has `.dataset.fingerprint`
    @property
    def dp_rank(self) -> DataParallelRank: ...


def run_identity(config: Config, model: Decoder, data: IdentifiedData) -> RunIdentity:
    """Return the values that must not change when a run resumes.

    Data-parallel ranks and accumulation steps may change as long as their product stays the same.
    """
    return RunIdentity(
        seed=config.training.seed,
        data_fingerprint=data.plan.dataset.fingerprint,
        batches=batch_settings(config, data.dp_rank.dp_world_size),
        cpu_settings=rounding_settings() | {"cpu_kernels": path_in_use()} | precision_identity(config),
        versions=package_versions(),
        base_weights=base_fingerprint(model),
    )


@dataclass(frozen=True)
class ModelWriter:
    """Writes the trained model, or its adapters, with the files that inference needs.

    Attributes:
        tokenizer_files: the files to copy into the folder.
        generation: `generation_config.json` of the model's folder, read before the run, which may take days.
    """

    config: Config
    model: Decoder
    ranks: Ranks
    tokenizer_files: Iterable[Path]
    generation: Mapping[str, Any]

    def write(self, folder: Path | None, weights: LocalTensors | None = None) -> None:
        """Write the model into `folder`; without a folder, send the local tensors to the rank that writes.

        Args:
            weights: the local tensors to write instead of this rank's weights, if all weights are trained.
        """
        if self.config.lora.lora:
            adapters = self.ranks.full_tensors(local_adapters(self.model))
            save_adapters(self.model, folder, base_name(self.config), adapters)
        else:
            limit = int(self.config.checkpoint.max_shard_size * 10**9)
            tensors = self.ranks.full_tensors(weights or local_tensors(named_weights(self.model)))
            save_model_folder(self.model, folder, self.tokenizer_files, max_shard_bytes=limit, full_tensors=tensors)
        averages = self.model.activation_scales.averages() if self.model.activation_scales else None
        if folder is None:
            return
        if averages is not None:
            write_averages(folder, averages)
        if self.config.lora.lora:
            save_companion_files(self.model, folder, self.tokenizer_files)
        if (audio := self.model.config.architecture.audio) is not None:
            write_processor_files(folder, [model_folder(self.config)], audio(self.model.config))
        path = folder / GENERATION_CONFIG_FILE
        merged = {**json.loads(path.read_text(encoding="utf-8")), **self.generation}
        path.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def write_master_weights(self, optimizer: Any, parameters: Mapping[str, Tensor], folder: Path | None) -> None:
        """Write the model with the master weights of `optimizer` instead of its 16-bit weights."""
        self.write(folder, master_weights_as_model(local_tensors(named_weights(self.model)), optimizer, parameters))


def shards_of(config: Config, model: Decoder, ranks: Ranks) -> CheckpointShards:
    """Return the kinds of tensors that each rank writes as its shard, with the functions that write and load them."""
    section, own = config.checkpoint, LocalModelShard(model, ranks, config.lora.lora)
    kinds: frozenset[str] = frozenset()
    if not section.unified_checkpoint:
        kinds = frozenset({WEIGHTS, OPTIMIZER})
    elif "ignore_merge_optimizer" in section.unified_checkpoint_config:
        kinds = frozenset({OPTIMIZER})
    return CheckpointShards(kinds, own.write, own.load, config["optim_shard_num"])


@dataclass(frozen=True)
class LocalModelShard:
    """This rank's shard of the trained weights: all weights, or only the adapters if these are trained.

    Attributes:
        model: the part of the model on this rank.
        adapters: whether adapters are trained.
    """

    model: Decoder
    ranks: Ranks
    adapters: bool

    def write(self, folder: Path) -> None:
        """Write this rank's local tensors into `folder`, without collectives, because another rank may have failed."""
        write_tensors(folder, _STEM, SingleProcessTensors(local_tensors(self._tensors())))
        if self.model.activation_scales:
            write_averages(folder, self.model.activation_scales.local_averages())

    @paddle.no_grad()
    def load(self, folder: Path) -> None:
        """Load the local tensors that `write` has written on the same layout.

        Raises:
            CheckpointError: the files belong to another model.
        """
        own, stored = self._tensors(), open_tensors(folder, _STEM)
        missing, surplus = sorted(own.keys() - set(stored.names)), sorted(set(stored.names) - own.keys())
        if missing or surplus:
            raise CheckpointError(
                f"{folder}: the weights belong to another model: {len(missing)} missing (for example "
                f"{missing[:2]}), {len(surplus)} unknown (for example {surplus[:2]})"
            )
        for name, tensor in own.items():
            values = stored.read(name)
            if values.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{folder}: {name}: expected shape {list(tensor.shape)}, got {list(values.shape)}; the "
                    "weights belong to another model"
                )
            tensor.set_value(paddle.to_tensor(values).astype(tensor.dtype))
        if self.model.activation_scales:
            self.model.activation_scales.restore(read_averages(folder))

    def _tensors(self) -> Mapping[str, Tensor]:
        return self.ranks.local_shards((named_adapter_weights if self.adapters else named_weights)(self.model))


# How the checkpoints of a run store its master weights, from the flags of `unified_checkpoint_config`.


def master_weight_policy(config: Config, model_config: ModelConfig, *, resumes_shards: bool) -> MasterWeightPolicy:
    """Return the policy of `remove_master_weight`, `skip_save_model_weight` and `master_weight_compatible`.

    Args:
        resumes_shards: whether the run resumes from a checkpoint whose weights are sharded by rank.
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
        open_weights=(lambda folder: weight_reader(already_grown(model_config), folder)) if readable else None,
    )
