"""The configuration of a command: frozen, typed sections, with the origin of every value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from erniekit.config.parameter import CPU_ONLY, DEFAULT, GPU_ONLY, ConfigBuilder, Parameter
from erniekit.config.parse import (
    Entry,
    Problem,
    SourceLocation,
    entries_from,
    pairs_from_text,
    read_overrides,
    read_pairs,
)
from erniekit.config.recognition import foreign_file
from erniekit.config.registry import ALIASES, PARAMETERS, SECTIONS, unmet_needs
from erniekit.config.resolve import resolve
from erniekit.config.sections.acceleration import AccelerationParameters
from erniekit.config.sections.basic import BasicParameters
from erniekit.config.sections.checkpoint import CheckpointParameters
from erniekit.config.sections.codes import CodesParameters
from erniekit.config.sections.distillation import DistillationParameters
from erniekit.config.sections.distributed import DistributedParameters
from erniekit.config.sections.dpo import DpoParameters
from erniekit.config.sections.evaluation import EvaluationParameters
from erniekit.config.sections.fp8 import Fp8Parameters
from erniekit.config.sections.generation import GenerationParameters
from erniekit.config.sections.grpo import GrpoParameters
from erniekit.config.sections.kto import KtoParameters
from erniekit.config.sections.lora import LoraParameters
from erniekit.config.sections.memory import MemoryParameters
from erniekit.config.sections.moe import MoeParameters
from erniekit.config.sections.precision import PrecisionParameters
from erniekit.config.sections.reward_model import RewardModelParameters
from erniekit.config.sections.rewards import RewardParameters
from erniekit.config.sections.serving import ServingParameters
from erniekit.config.sections.sft import SftParameters
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.config.sections.speech import SpeechParameters
from erniekit.config.sections.training import TrainingParameters
from erniekit.config.sections.units import UnitParameters
from erniekit.config.sections.vocabulary import VocabularyParameters
from erniekit.config.stages import STAGES, Stage
from erniekit.config.values import format_value, other_device
from erniekit.errors import ConfigurationError

MOST_SHOWN = 200  # problems; a file with more is not a configuration


class InvalidConfigurationError(ConfigurationError):
    """A configuration with problems. The message lists them all, each with file:line.

    Attributes:
        problems: those of the file in the order of its lines, then those of the command line and missing parameters.
    """

    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Config:
    """A complete configuration. `Config.load` and `Config.from_mapping` create it.

    Attributes:
        messages: lines to print once about values that were expanded or changed, or that have no effect.
        path: the file that it was read from, if any.
        verb: the verb that it was resolved for, such as "train".
        origins: parameter -> "default", "sft.yaml:12", "command line", "compute_type (sft.yaml:3)"; the origin of a
            default that follows from other parameters starts with "default" and gives the reason.
        urls: parameter -> what the user wrote, where that is of an object store and the section has a path of this
            machine instead; see `with_paths`.
    """

    basic: BasicParameters
    evaluation: EvaluationParameters
    training: TrainingParameters
    distributed: DistributedParameters
    memory: MemoryParameters
    checkpoint: CheckpointParameters
    acceleration: AccelerationParameters
    precision: PrecisionParameters
    sft: SftParameters
    lora: LoraParameters
    dpo: DpoParameters
    fp8: Fp8Parameters
    moe: MoeParameters
    vocabulary: VocabularyParameters
    units: UnitParameters
    speech: SpeechParameters
    kto: KtoParameters
    reward_model: RewardModelParameters
    distillation: DistillationParameters
    rewards: RewardParameters
    grpo: GrpoParameters
    generation: GenerationParameters
    codes: CodesParameters
    speaking: SpeakingParameters
    serving: ServingParameters
    messages: tuple[str, ...]
    path: Path | None
    verb: str
    origins: Mapping[str, str]
    urls: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        path: str | Path | None,
        overrides: Sequence[str] = (),
        *,
        verb: str = "train",
        implied: Mapping[str, Any] | None = None,
        inspect: Callable[[ConfigBuilder], None] | None = None,
    ) -> Config:
        """Read a YAML or JSON file and `name=value` overrides, which take precedence.

        Args:
            path: the file; None for the overrides alone.
            overrides: `name=value` arguments of the command line.
            verb: the verb that uses the configuration; it decides which parameters are required.
            implied: values that the command implies, such as `stage: DPO`; the file and the overrides take precedence.
            inspect: adds further problems, such as files that do not exist, so that the user sees them with the others.

        Raises:
            ConfigurationError: the configuration has problems; the message lists all of them, each with file:line.
        """
        file = None if path is None else Path(path)
        entries, problems = _read(file) if file else ([], [])
        words, word_problems = read_overrides(overrides)
        implied_entries = [Entry(name, value, SourceLocation("the command")) for name, value in (implied or {}).items()]
        return cls._from_layers([implied_entries, entries, words], [*problems, *word_problems], verb, file, inspect)

    @classmethod
    def from_text(
        cls, text: str, path: Path, *, verb: str = "train", inspect: Callable[[ConfigBuilder], None] | None = None
    ) -> Config:
        """Resolve the text of a file that is not written yet; `path` is its name in messages, see `load`."""
        entries, problems = _entries(pairs_from_text(text, path), path)
        return cls._from_layers([entries], problems, verb, path, inspect)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], overrides: Sequence[str] = (), *, verb: str = "train") -> Config:
        """Resolve values that are in memory, such as the resolved configuration of a checkpoint; see `load`."""
        words, problems = read_overrides(overrides)
        entries = [Entry(name, _plain(value), SourceLocation("given values")) for name, value in values.items()]
        return cls._from_layers([entries, words], problems, verb, None)

    @classmethod
    def _from_layers(
        cls,
        layers: list[list[Entry]],
        problems: list[Problem],
        verb: str,
        path: Path | None,
        inspect: Callable[[ConfigBuilder], None] | None = None,
    ) -> Config:
        builder = resolve(layers, verb)
        if inspect is not None:
            inspect(builder)
        if problems or builder.problems:
            raise _invalid([*problems, *builder.problems], path)
        sections = {
            section.key: section.dataclass(**{item.name: builder[item.name] for item in section.parameters})
            for section in SECTIONS
        }
        return cls(**sections, messages=tuple(builder.messages), path=path, verb=verb, origins=dict(builder.origins))

    def __getitem__(self, name: str) -> Any:
        """Return the value of any parameter by name."""
        return getattr(getattr(self, PARAMETERS[name].section), name)

    @property
    def output_dir(self) -> Path:
        """The folder of `output_dir`, with `~` expanded."""
        return Path(self.basic.output_dir).expanduser()

    @property
    def stage(self) -> Stage:
        """The properties of the training stage."""
        return STAGES[self.basic.stage]

    def applies(self, name: str) -> bool:
        """Return whether a parameter has an effect in the stage of this configuration."""
        return self.basic.stage in PARAMETERS[name].stages

    def origin(self, name: str) -> str:
        """Return the origin of the value of a parameter, see `origins`."""
        return self.origins[name]

    def is_set(self, name: str) -> bool:
        """Return whether the user wrote the parameter, directly or by an alias."""
        return not self.origins[name].startswith(DEFAULT)

    def resolved(self) -> dict[str, Any]:
        """Return every parameter with its value as plain JSON; loading the result gives the same configuration."""
        return {name: _plain(self.urls.get(name, self[name])) for name in PARAMETERS}

    def with_paths(self, paths: Mapping[str, Any]) -> Config:
        """Return this configuration with paths of this machine where the user wrote URLs; `resolved` keeps the URLs.

        Args:
            paths: parameter -> its value with paths.
        """
        sections = {
            key: replace(getattr(self, key), **{name: paths[name] for name in paths if PARAMETERS[name].section == key})
            for key in {PARAMETERS[name].section for name in paths}
        }
        return replace(self, **sections, urls={**{name: self[name] for name in paths}, **self.urls})

    @property
    def uses_dense_mask(self) -> bool:
        """Whether FlashMask is switched off; attention then uses a dense mask built from the same indices."""
        return not (
            self.acceleration.use_flash_attention
            and self.acceleration.use_sparse_flash_attn
            and self.memory.use_attn_mask_startend_row_indices
        )

    def ignored_on_cpu(self) -> list[str]:
        """Return a line for each GPU-only parameter that the user set; a runner prints them when it runs without a GPU.

        The list is empty if `device` names a GPU, because the run then fails without one.
        """
        if self.basic.device.startswith("gpu"):
            return []
        other = other_device(self.basic.device)
        place, without_effect = other or "a CPU", self.gpu_only_parameters()
        if other:  # neither a CPU nor a GPU
            without_effect += [item for item in self._cpu_only_parameters() if item not in without_effect]
        lines = []
        for parameter in without_effect:
            name = parameter.name
            tail = ": fp32 runs" if name in ("bf16", "fp16") else ""
            lines.append(f"`{name}: {format_value(self[name])}` ({self.origin(name)}) has no effect on {place}{tail}")
        return lines

    def ignored_on_gpu(self) -> list[str]:
        """Return a line for each CPU-only parameter that the user set, as `ignored_on_cpu` does; [] if `device` names
        another device."""
        if self.basic.device == "cpu" or other_device(self.basic.device):
            return []
        return [
            f"`{item.name}: {format_value(self[item.name])}` ({self.origin(item.name)}) has no effect on a GPU"
            for item in self._cpu_only_parameters()
        ]

    def gpu_only_parameters(self) -> list[Parameter]:
        """Return the parameters whose values differ from their defaults and have an effect on a GPU only.

        Mixed precision is one of them on devices other than CPU and GPU, and with `fp16`.
        """
        no_mixed_precision = self.precision.fp16 or other_device(self.basic.device)
        return [
            item
            for item in self._changed_parameters()
            if item.devices == GPU_ONLY or (no_mixed_precision and item.section == "precision")
        ]

    def _cpu_only_parameters(self) -> list[Parameter]:
        return [item for item in self._changed_parameters() if item.devices == CPU_ONLY]

    def _changed_parameters(self) -> list[Parameter]:
        """Return the parameters whose values differ from their defaults and have an effect on some device."""
        values = {name: self[name] for name in PARAMETERS}
        return [
            item for item in PARAMETERS.values() if self[item.name] != item.default and not unmet_needs(item, values)
        ]


def _read(file: Path) -> tuple[list[Entry], list[Problem]]:
    """Return the entries of a file and its problems. Raises ConfigurationError if it is a file of another program."""
    return _entries(read_pairs(file), file)


def _entries(pairs: list[tuple[str, Any, int]], file: Path) -> tuple[list[Entry], list[Problem]]:
    values = {name: value for name, value, _ in pairs}
    if sentence := foreign_file(values, {*PARAMETERS, *ALIASES}):
        raise ConfigurationError(f"{file}: {sentence}")
    return entries_from(pairs, file)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _invalid(problems: list[Problem], path: Path | None) -> InvalidConfigurationError:
    last = 10**9  # sort problems of the command line after the file, and missing parameters last
    ordered = sorted(problems, key=lambda problem: (problem.location.line or last) if problem.location else last + 1)
    error = InvalidConfigurationError(_report(ordered, path))
    error.problems = tuple(ordered)
    return error


def _report(problems: list[Problem], path: Path | None) -> str:
    lines = [str(problem) if problem.location or not path else f"{path}: {problem}" for problem in problems]
    if len(lines) == 1:
        return lines[0]
    more = [f"... and {len(lines) - MOST_SHOWN:,} more"] if len(lines) > MOST_SHOWN else []
    shown = [f"  {line}" for line in [*lines[:MOST_SHOWN], *more]]
    return "\n".join([f"{len(lines):,} problems in the configuration", *shown])
