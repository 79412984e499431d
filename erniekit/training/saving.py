"""What a run writes into its `output_dir`: checkpoints, exports and the final model. The loop says when."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paddle import Tensor

from erniekit.config import Config
from erniekit.config.sections.checkpoint import moment_quantization, saves_asynchronously
from erniekit.errors import CheckpointError
from erniekit.manifest import problems
from erniekit.training.checkpoint.async_save import SYNC_SAVER, AsyncSaver, Saver, SyncSaver
from erniekit.training.checkpoint.atomic_folder import checkpoint_name, publish_files, write_folder
from erniekit.training.checkpoint.master_weights import SEPARATE_MASTER_WEIGHTS, MasterWeightPolicy, has_master_weights
from erniekit.training.checkpoint.quantized_state import FORMATS
from erniekit.training.checkpoint.resume import RunIdentity, Start, check_identity, remove_superseded
from erniekit.training.checkpoint.sharded import (
    NO_SHARDS,
    WEIGHTS,
    CheckpointShards,
    check_shared_filesystem,
    has_same_layout,
    local_shard_of,
    sharded_kinds,
)
from erniekit.training.checkpoint.state import (
    TrainerState,
    changed_parameters,
    copy_model_files,
    load_identity,
    load_optimizer,
    load_state,
    save_checkpoint,
    write_config,
)
from erniekit.training.collectives import SINGLE_PROCESS, Ranks

logger = logging.getLogger(__name__)


@dataclass
class RunFolder:
    """The `output_dir` of a run, on every rank: the first one writes, the others send their shards or write their own.

    Attributes:
        write_model: puts model and tokenizer files into a folder; with None it only sends this rank's shards.
        write_checkpoint_model: of checkpoints; None: as `write_model`.
        master_weights: how checkpoints have the float32 copies of 16-bit weights.
        shards: what every rank writes of its own.
        extra_state: returns what a checkpoint must hold for the objective.
        saver: completes checkpoints; `open` chooses it. The run is inside its context.
        saved_step: the step of the newest checkpoint in this folder; -1: none.
    """

    config: Config
    identity: RunIdentity
    resolved_config: Mapping[str, Any]
    parameters: Mapping[str, Tensor]  # by Hugging Face name
    optimizer: Any
    write_model: Callable[[Path | None], None]
    write_checkpoint_model: Callable[[Path | None], None] | None = None
    master_weights: MasterWeightPolicy = SEPARATE_MASTER_WEIGHTS
    shards: CheckpointShards = NO_SHARDS
    extra_state: Callable[[], Mapping[str, Tensor]] = dict
    ranks: Ranks = SINGLE_PROCESS
    saver: Saver = field(default=SYNC_SAVER, init=False)
    saved_step: int = field(default=-1, init=False)
    _saved_choices: Mapping[str, Any] = field(default_factory=dict, init=False)  # those of the user then

    @property
    def path(self) -> Path:
        return self.config.output_dir

    def load(self, checkpoint: Path) -> TrainerState:
        """Return the state of the run at a checkpoint, whose weights the model has, and give AdamW its moments.

        Raises:
            CheckpointError: the checkpoint does not fit this run.
        """
        for warning in check_identity(load_identity(checkpoint), self.identity, checkpoint):
            logger.warning(warning)
        for change in changed_parameters(checkpoint, self.resolved_config):
            logger.info(f"changed since the checkpoint: {change}")
        state = load_state(checkpoint)
        same_folder = checkpoint.resolve().parent == self.path.resolve()
        self.saved_step, self._saved_choices = state.step if same_folder else -1, state.choices
        if self.config.checkpoint.ignore_load_lr_and_optim:
            logger.info("ignore_load_lr_and_optim: AdamW starts with fresh moments, which is not bit-exact")
        else:
            stored = load_optimizer(checkpoint, self.optimizer, self.parameters, self.ranks, self.master_weights)
            if stored is not None:
                logger.warning(f"resuming is not bit-exact: {checkpoint} holds {stored}")
        return state

    def open(self, start: Start, on_save: Callable[[Path], None]) -> None:
        """Prepare the folder for this run, and choose how checkpoints are written.

        Args:
            on_save: called on the first rank with each complete checkpoint.
        """
        section = self.config.checkpoint
        moment_format = FORMATS.get(moment_quantization(section))
        if moment_format is not None and not section.ignore_save_lr_and_optim:
            logger.info(f"checkpoints hold {moment_format}: resuming from them is not bit-exact")
        if self.shards.kinds and section.save_strategy != "no":
            check_shared_filesystem(self.path, self.ranks)
        if self.master_weights.stored != "beside":
            self._report_unused_option()
        single_node = len(set(self.ranks.all_gather_object(socket.gethostname()))) == 1
        if self.ranks.is_main_process:
            limit = section.save_total_limit
            self.saver = SyncSaver(limit, on_save)
            if saves_asynchronously(section):
                seen_by_all = single_node or not self.shards.kinds
                self.saver = AsyncSaver(limit, on_save, shared_memory=seen_by_all)
            remove_superseded(self.path, start)
            write_config(self.path, self.resolved_config)

    def _report_unused_option(self) -> None:
        if not any(self.ranks.all_gather_object(has_master_weights(self.optimizer, self.parameters))):
            word = "remove_master_weight" if self.master_weights.stored == "nowhere" else "skip_save_model_weight"
            logger.info(f"{word} has no effect here: the weights are float32, without master weights")

    def save(self, state: TrainerState) -> None:
        """Write a checkpoint of this step, or begin to."""
        section = self.config.checkpoint
        self.saver.wait()
        best = self._best_checkpoint(state)
        save_checkpoint(
            self.path,
            state,
            identity=self.identity,
            resolved_config=self.resolved_config,
            write_model=self.write_checkpoint_model or self.write_model,
            optimizer=None if section.ignore_save_lr_and_optim else self.optimizer,
            parameters=self.parameters,
            extra_state=self.extra_state(),
            moments=FORMATS.get(moment_quantization(section)),
            ranks=self.ranks,
            shards=self.shards,
            master_weights=self.master_weights,
            saver=self.saver,
            keep=[best] if best else [],
        )
        if self.saved_step != state.step:  # otherwise the checkpoint has stayed as it was
            self.saved_step, self._saved_choices = state.step, state.choices

    def save_on_stop(self, state: TrainerState, *, saves: bool) -> None:
        """Save the step where the run stops, unless it saves nothing at all, and say how it goes on."""
        if not saves:
            logger.info(f"stopped after step {state.step}; nothing was saved, because save_strategy is no")
            return
        if self.saved_step != state.step:
            self.save(state)
        self.saver.wait()
        if later := [name for name, value in state.choices.items() if value != self._saved_choices.get(name)]:
            saved = checkpoint_name(self.saved_step)
            what = " and ".join(f"`{name}`" for name in later)
            logger.info(f"{saved} was saved before {what}: give the command again to the run that resumes from it")
        logger.info(f"stopped after step {state.step}; continue with resume_from_checkpoint=true")

    def export(self, state: TrainerState) -> None:
        """Write the model as it is now into a folder of its own, which no limit of checkpoints removes."""
        folder = self.path / f"export-{state.step}"
        self.saver.wait()
        if self.ranks.is_main_process:
            write_folder(folder, self._write_described_model)
        else:
            self.write_model(None)
        logger.info(f"export: {folder} holds the model after step {state.step:,}")

    def _write_described_model(self, folder: Path) -> None:
        """Write the model, and the parameters of the run, which say how to use it."""
        self.write_model(folder)
        write_config(folder, self.resolved_config)

    def save_final_model(self, state: TrainerState) -> None:
        """Write the last model, or with `load_best_model_at_end` that of the best evaluation."""
        self.saver.wait()
        write, which = self.write_model, ""
        best, wanted = state.best, self.config.evaluation.load_best_model_at_end
        folder = self._best_checkpoint(state, hashes=wanted)
        if wanted and best.step is not None and best.step != state.step:
            shown = f"{checkpoint_name(best.step)}, where {best.metric} was best,"
            is_sharded = self.ranks.is_main_process and folder is not None and WEIGHTS in sharded_kinds(folder)
            is_sharded = self.ranks.all_gather_object(is_sharded)[0]  # others need not see the folder where it is whole
            if folder is None:
                logger.info(f"{shown} is not complete in {self.path}: the last model is saved")
            elif is_sharded and not has_same_layout(folder, self.ranks):
                logger.info(f"{shown} was written by the ranks of another layout: the last model is saved")
            else:
                if is_sharded:  # then written as the last model would be
                    self.shards.load_model(local_shard_of(folder, self.ranks))
                else:
                    write = partial(copy_model_files, folder)
                which = f" of step {best.step}, where {best.metric} was best ({best.value:.4g}),"
        if self.ranks.is_main_process:
            publish_files(self.path, write)
        elif write is self.write_model:
            write(None)
        logger.info(f"saved the model{which} to {self.path}")

    def _best_checkpoint(self, state: TrainerState, *, hashes: bool = False) -> Path | None:
        """The checkpoint of the best evaluation, where it was saved and is complete; see `manifest.problems`."""
        step = state.best.step
        folder = None if step is None else self.path / checkpoint_name(step)
        complete = self.ranks.is_main_process and folder is not None and not problems(folder, hashes=hashes)
        return folder if self.ranks.all_gather_object(complete)[0] else None  # others may not see the first rank's disk

    def complete_last_checkpoint(self) -> str:
        """Wait for a checkpoint that is being written; return why it could not be, or ""."""
        try:
            self.saver.wait()
        except CheckpointError as failed:
            return str(failed)
        return ""
