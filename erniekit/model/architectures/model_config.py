"""The shape of a model, read from a Hugging Face `config.json`. Needs neither Paddle nor NumPy."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.architecture import ALWAYS, Architecture
from erniekit.model.architectures.config_reading import read_config, written_config
from erniekit.model.architectures.registry import architecture_named, architecture_of
from erniekit.model.architectures.rope_scaling import yarn_remark
from erniekit.model.architectures.scores import SCORE_KEYS, is_scored, score_problems, scored_class
from erniekit.model.processor_files import check_processor_files
from erniekit.model.storage.model_folder import refuse_sharded_checkpoint
from erniekit.model.vocabulary import GrownVocabulary

CONFIG_FILE = "config.json"
logger = logging.getLogger(__name__)


class WrappedDecoder(NamedTuple):
    """What the files of a model hold to which a run gives tables and heads of codes, or a score; see
    `storage/wrapped_weights.py`.

    Attributes:
        config: of the decoder in the files.
        seed: of the draws of everything else.
    """

    config: ModelConfig
    seed: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model of one of the architectures of `registry.py`.

    Field names are the keys of `config.json`, unless the architecture names another key for a field.

    Attributes:
        own: the values of the keys that only this architecture has (`Architecture.own_keys`), and by the names of their
            dictionaries the sizes of encoders (`Architecture.encoders`).
        other_keys: every key that this project does not use, so that a saved model folder loses nothing; those of a
            dictionary within the file under its name.
        vocabulary: the new rows that a run gives the model, which its files lack (`vocabulary.grow`); `vocab_size`
            counts them.
        wrapped: of a model that writes codes, or gives a score, whose files hold its decoder alone; the rest is drawn.
        remarks: lines for the user on what the file says and does not act here.
        scored: the head gives a text one score: `score.weight` [1, H], as in transformers' classes for sequence
            classification with one label; otherwise it predicts tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 131072
    rope_theta: float = 500000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_bias: bool = False  # ERNIE-4.5: of all linears
    attention_bias: bool = False  # Llama, Qwen3
    mlp_bias: bool = False  # Llama
    tie_word_embeddings: bool = True
    moe_num_experts: int = 0
    moe_k: int = 0
    moe_intermediate_size: int = 0
    moe_num_shared_experts: int = 0
    moe_layer_start_index: int = 0
    moe_layer_end_index: int = -1  # inclusive; -1: the last layer
    moe_layer_interval: int = 1
    moe_norm_min: float = 1e-12
    num_nextn_predict_layers: int = 0
    model_type: str = "ernie4_5"
    own: dict[str, Any] = field(default_factory=dict, hash=False)
    other_keys: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    vocabulary: GrownVocabulary | None = None
    wrapped: WrappedDecoder | None = field(default=None, compare=False, repr=False)
    remarks: tuple[str, ...] = field(default=(), compare=False, repr=False)
    scored: bool = False

    @property
    def architecture(self) -> Architecture:
        return architecture_named(self.model_type)

    @property
    def windows(self) -> frozenset[int]:
        """The windows of its layers, in positions; those that attend to all have none."""
        found = (self.architecture.layer_attention(self, layer).window for layer in range(self.num_hidden_layers))
        return frozenset(window for window in found if window)

    @property
    def ties_head(self) -> bool:
        """Whether the head is the embedding. `tie_word_embeddings` says it of decoders whose head predicts tokens."""
        return self.tie_word_embeddings and self.architecture.codes is None and not self.scored

    def has_bias(self, linear: str) -> bool:
        """Return whether the linear with this last part of its name, such as "q_proj", has a bias."""
        key = self.architecture.biases.get(linear)
        return key is not None and (key == ALWAYS or getattr(self, key))

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has experts in place of its MLP."""
        return self.architecture.has_experts(self, layer)

    @classmethod
    def from_folder(cls, folder: Path | str, ignored_keys: Sequence[str] = ()) -> ModelConfig:
        """Read `folder/config.json`, and log what it says that does not act here, once.

        Args:
            ignored_keys: see `from_json`.

        Raises:
            ModelFileError: the file is missing, unreadable or inconsistent, or has a key that is not understood.
        """
        path = Path(folder) / CONFIG_FILE
        if not path.is_file():
            refuse_sharded_checkpoint(folder)
            raise ModelFileError(f"{path}: no such file. A model folder needs a Hugging Face {CONFIG_FILE}.")
        config = cls.from_json(read_json_object(path), where=str(path), ignored_keys=ignored_keys)
        for remark in config.remarks:
            _warn_once(f"{path}: {remark}")
        if config.architecture.audio is not None:
            check_processor_files(Path(folder), config.architecture.audio(config))
        return config

    @classmethod
    def from_json(
        cls, values: dict[str, Any], where: str = CONFIG_FILE, ignored_keys: Sequence[str] = ()
    ) -> ModelConfig:
        """The configuration that the keys of a `config.json` describe, as transformers 4 or 5 writes them.

        Absent keys have the family's defaults; `num_key_value_heads` is num_attention_heads then. Of a family with
        encoders the decoder's keys stand in `text_config`, of one that speaks in `llm_config`.

        Args:
            where: heads the error message.
            ignored_keys: keys that are not understood here, and of which the user says that they change nothing.

        Raises:
            ModelFileError: a value cannot be used, values contradict each other, or a key is not understood.
        """
        architecture = architecture_of(values, where)
        reading = read_config(architecture, values, ignored_keys)
        problems = reading.problems
        if not problems:
            config = cls(**reading.fields, other_keys=reading.other_keys)
            yarn = yarn_remark(config.rope_scaling, config.max_position_embeddings)
            config = replace(config, remarks=(*reading.remarks, *filter(None, [yarn])), scored=is_scored(values))
            problems = [*architecture.problems(config), *score_problems(config, values)]
        if problems:
            raise ModelFileError(f"{where} cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems))
        return config

    def to_json(self) -> dict[str, Any]:
        """Every key of `config.json`, those this project does not use included; weights are float32, not quantised.

        Keys that transformers 5 renamed are written under both names, so that it and transformers 4 read the same.
        """
        return {
            **written_config(self),
            **(SCORE_KEYS if self.scored else {}),
            "architectures": [scored_class(self.architecture) if self.scored else self.architecture.transformers_class],
            **stored_type("float32"),
        }

    def parameter_count(self) -> int:
        """The number of weights; tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's Hugging Face name and shape (linear weights are [out, in]), in the order of the decoder."""
        return dict(self._weight_shapes)

    @cached_property
    def _weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.architecture.weight_shapes(self)  # a tenth of a second where there are thousands of experts

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """The path of every linear layer between embedding and head, and its (out, in)."""
        return dict(self._linear_shapes)

    @cached_property
    def _linear_shapes(self) -> dict[str, tuple[int, int]]:
        return self.architecture.linear_shapes(self)


def stored_type(name: str) -> dict[str, str]:
    """Return the keys of `config.json` that say the type of the stored weights, such as "bfloat16"."""
    return {"torch_dtype": name, "dtype": name}  # of transformers 4 and 5


@lru_cache(maxsize=256)
def _warn_once(line: str) -> None:
    logger.warning(line)  # a run reads the file of its model several times
