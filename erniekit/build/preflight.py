"""Decide whether a command can begin: the one answer that `erniekit validate` gives and every runner asks for.

Looked at are the configuration, the folders that it names and the installed packages, in seconds and without Paddle;
NumPy only where projections are fused, weights are stored in few bits, or adapters are given. Not decided here, but
where it is read, is what only the records, the values of weights, a hub or the device can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.build.adapters import adapter_plan, check_adapters, initial_adapters, refuse_other_checkpoint
from erniekit.build.checks import (
    answering_folders,
    check_groups,
    check_positions,
    check_rollout_workers,
    check_scoring_libraries,
    check_tokenizer,
    check_trackers,
    check_unit_tokens,
    check_weights,
    local_weights,
    read_generation_config,
    read_local_model,
    reference_config,
    refuse_other_batches,
    tokenizer_folder,
    with_mtp_layers,
)
from erniekit.build.input_paths import check_codec, check_paths, check_shard_paths
from erniekit.build.layout import partition_layers
from erniekit.build.notes import expert_parallel_notes, model_notes, pipeline_notes, run_notes
from erniekit.build.parts import frozen_parts, part_notes
from erniekit.build.reward_models import check_reward_models
from erniekit.build.speech import codec_of_run, with_codes
from erniekit.build.speech_checks import check_judge, check_speech, check_voices
from erniekit.build.teacher import check_teacher
from erniekit.build.tokenizer import renders_dialogues, speech_of, transcription_request
from erniekit.build.vocabulary import added_tokens, refuse_other_tokens, run_tokenizer_folder, with_added_tokens
from erniekit.config import Config
from erniekit.config.sections.basic import template_variables
from erniekit.config.sections.dpo import compares_with_reference
from erniekit.data.formats.media_paths import media_folders
from erniekit.data.tokenizers.files import needs_paddlenlp
from erniekit.distributed.topology import Topology, topology_from
from erniekit.errors import ConfigurationError, UserError
from erniekit.hub.cache import chosen_hub, local_model_folder, missing_files
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.published import published_model
from erniekit.model.storage.layouts import locate_weights
from erniekit.model.storage.model_folder import is_program_folder
from erniekit.training.checkpoint.resume import check_output_folder

ANSWERING = ("chat", "generate")  # verbs that answer with a model


@dataclass(frozen=True)
class Preflight:
    """What is known of a command that can begin.

    Attributes:
        model: with the multi-token prediction layers that are used; None: a hub's model that is not here yet.
        notes: lines about values without effect on this model or in this layout; a run prints them at its start.
    """

    model: ModelConfig | None = None
    notes: tuple[str, ...] = ()


class Findings:
    """Runs checks one after another and keeps what they refuse, so that the user sees all at once."""

    def __init__(self) -> None:
        self._errors: dict[str, UserError] = {}

    def attempt(self, check: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return what a check returns; None if it refuses."""
        try:
            return check(*arguments, **named)
        except UserError as error:
            self._errors.setdefault(str(error), error)
            return None

    def raise_if_any(self) -> None:
        """Raise one error with all messages, of their class if they have the same one."""
        kinds = {type(error) for error in self._errors.values()}
        if kinds:
            raise (kinds.pop() if len(kinds) == 1 else ConfigurationError)("\n".join(self._errors))


def preflight(
    config: Config, *, world_size: int | None = None, reads_files: bool = True, writes_output: bool = True
) -> Preflight:
    """Check that the command of `config.verb` can begin.

    Args:
        world_size: the number of ranks; None: as few as the degrees need.
        reads_files: whether this process opens the data and the checkpoint; other ranks need not see them.
        writes_output: whether the command writes into `output_dir`.

    Raises:
        UserError: it cannot; the message has everything that was found.
    """
    found, known = Findings(), Preflight()
    if config.verb == "train":
        known = _check_run(config, found, world_size, reads_files, writes_output and config.basic.do_train)
    elif config.verb == "preview":
        _check_data(config, found)
    elif config.verb == "codes":
        _check_codes(config, found)
    elif config.verb in ANSWERING and config.basic.model_name_or_path:
        known = _check_answers(config, found)
    found.raise_if_any()
    return known


def _check_run(
    config: Config, found: Findings, world_size: int | None, reads_files: bool, writes_output: bool
) -> Preflight:
    """Check a training run, or an evaluation without training."""
    if reads_files:
        found.attempt(check_paths, config)
    folder, model = _check_model_folder(config, found)
    topology = found.attempt(topology_from, config, world_size)
    if topology is not None and config.stage.reads_prompts and config.basic.do_train:
        found.attempt(check_groups, config, topology.dp_world_size)
        found.attempt(check_rollout_workers, config, topology.dp_world_size)
    if config.applies("rewards") and reads_files:
        found.attempt(check_reward_models, config)
    notes: list[str] = []
    if model is not None:
        found.attempt(check_positions, config, model)
        if config.stage.reads_codes:
            found.attempt(check_speech, config, model)
        used = found.attempt(with_mtp_layers, model, config) or model
        notes += model_notes(config, used, model.num_nextn_predict_layers)
        notes += found.attempt(_check_shares, config, used, folder, topology, found) or []
        if topology is not None:
            notes += expert_parallel_notes(config, used, topology)
            notes += found.attempt(pipeline_notes, config, used, topology) or []
        model = used
    found.attempt(check_trackers, config)
    found.attempt(check_scoring_libraries, config)
    found.attempt(check_judge, config)
    found.attempt(check_voices, config)
    if reads_files and writes_output:
        ranks = None if world_size is None or topology is None else topology.dp_world_size
        found.attempt(_check_output, config, model, folder, ranks)
    return Preflight(model, (*notes, *run_notes(config)))


def _check_codes(config: Config, found: Findings) -> None:
    """Check what `erniekit codes` reads, and where it writes."""
    found.attempt(check_paths, config)
    found.attempt(media_folders, "", config.training.media_dir)
    found.attempt(check_codec, config)
    found.attempt(check_shard_paths, config)


def _check_model_folder(config: Config, found: Findings) -> tuple[Path | None, ModelConfig | None]:
    """Check the small files of the model; return its folder and its shape as far as they are known."""
    folder = found.attempt(local_model_folder, config)
    if folder is None:  # a hub's model that is not here
        published = published_model(config.basic.model_name_or_path)
        return None, published and found.attempt(with_codes, config, published, config.basic.model_name_or_path)
    if not folder.exists():  # `check_paths` says so
        return None, None
    model = found.attempt(read_local_model, config, folder)
    if folder.is_dir():
        model = _check_tokenizer(config, found, folder, model)
        found.attempt(read_generation_config, folder)
    return folder, model


def _check_tokenizer(config: Config, found: Findings, folder: Path, model: ModelConfig | None) -> ModelConfig | None:
    """Check the tokenizer, with the tokens that the run adds, and its template where the stage or the verb renders
    dialogues. Return the model with rows for these tokens, as far as both are known."""
    if needs_paddlenlp(folder):  # opening it would import Paddle
        return None if added_tokens(config, folder) else model
    extended = None if config.verb in ANSWERING else found.attempt(run_tokenizer_folder, config, folder)
    if extended is not None and model is not None:
        model = found.attempt(with_added_tokens, config, model, folder)
    folder = extended or folder
    with_template = renders_dialogues(config) or config.verb in ANSWERING
    variables = template_variables(config.basic)
    request, speech = transcription_request(config), speech_of(config)
    how = {"with_template": with_template, "variables": variables, "request": request, "speech": speech}
    found.attempt(check_tokenizer, folder, model, **how)
    if config.verb not in ANSWERING:
        found.attempt(check_unit_tokens, config, folder)
    return model


def _check_shares(
    config: Config, model: ModelConfig, folder: Path | None, topology: Topology | None, found: Findings
) -> list[str]:
    """Check what the model is divided into, trains, starts from and is compared with; return notes on its parts."""
    if topology is not None:
        found.attempt(partition_layers, config, model, topology)
    starts = folder is None or found.attempt(_starts_with_own_tokens, config, folder)
    plan = found.attempt(adapter_plan, config, model) if starts else None
    frozen = found.attempt(frozen_parts, config, model)
    weights = found.attempt(local_weights, config, folder)
    if weights is not None:
        found.attempt(check_weights, model, weights)
    if config.stage.needs_reference and compares_with_reference(config.dpo):
        found.attempt(reference_config, config, model)
    if config.applies("teacher_model_name_or_path"):
        found.attempt(check_teacher, config, model)
    unknown = frozen is None or (plan is None and config.lora.lora)
    return [] if unknown else part_notes(config, model, plan.settings if plan else None)


def _starts_with_own_tokens(config: Config, folder: Path) -> bool:
    """Check that a model or adapters that the run starts from have no other added tokens than the run; return true."""
    starts = {"init_from_checkpoint": config.checkpoint.init_from_checkpoint}
    if config.lora.lora:
        starts["lora_path"] = config.lora.lora_path
    for parameter, start in starts.items():
        if start:
            refuse_other_tokens(config, folder, Path(start).expanduser(), parameter)
    return True


def _check_output(config: Config, model: ModelConfig | None, folder: Path | None, dp_world_size: int | None) -> None:
    """Check that the run may write into `output_dir`, and that it goes on with what its checkpoint holds."""
    checkpoint = check_output_folder(
        config.output_dir,
        resume_from_checkpoint=config.checkpoint.resume_from_checkpoint,
        overwrite_output_dir=config.basic.overwrite_output_dir,
        model_folder=folder,
        weights_from=initial_adapters(config) or local_weights(config, folder),
    )
    if checkpoint is not None and folder is not None:
        refuse_other_tokens(config, folder, checkpoint, "resume_from_checkpoint")
    if checkpoint is not None and model is not None:
        refuse_other_checkpoint(config, model, checkpoint)
    if checkpoint is not None:
        refuse_other_batches(config, dp_world_size, checkpoint)


def _check_data(config: Config, found: Findings) -> None:
    """Check a command that reads the data, and of the model its tokenizer alone."""
    found.attempt(check_paths, config)
    folder = found.attempt(local_model_folder, config)
    if config.stage.reads_codes:
        found.attempt(codec_of_run, config)
    if folder is not None and folder.exists():
        _check_tokenizer(config, found, folder, None)


def _check_answers(config: Config, found: Findings) -> Preflight:
    """Check a command that answers with the model which the configuration names."""
    named = found.attempt(local_model_folder, config)
    if named is not None and is_program_folder(named):
        return Preflight()
    adapters = Path(config.lora.lora_path).expanduser() if config.lora.lora_path else None
    folders = None if named is None else found.attempt(answering_folders, named, adapters)
    if folders is None:
        return Preflight()
    folder, adapters = folders
    model = found.attempt(ModelConfig.from_folder, folder, config.basic.ignore_config_keys)
    _check_tokenizer(config, found, tokenizer_folder(folder, adapters), None)
    if model is not None and (chosen_hub(config) is None or not missing_files(folder, weights=True)):
        found.attempt(locate_weights, model, folder)
    if model is not None and adapters is not None:
        found.attempt(check_adapters, adapters, model)
    return Preflight(model)
