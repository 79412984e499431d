"""One object for each family of models: everything that tells it from the plain decoder. Needs no Paddle.

An architecture is a value: tables, and functions of a configuration. Where it says nothing it is the decoder of
`plain_decoder.py`. Modules in this folder declare one or a few; `registry.py` lists them by `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from erniekit.model.architectures import plain_decoder
from erniekit.model.architectures.parts import AUDIO
from erniekit.model.architectures.plain_decoder import (
    PRE_NORMS,
    LayerAttention,
    Multipliers,
    Routing,
    Shapes,
    renamed,
)
from erniekit.model.architectures.rope_parameters import RopeKeys
from erniekit.model.architectures.rope_scaling import Frequencies
from erniekit.model.architectures.scores import SCORE_RULE, with_score
from erniekit.model.architectures.sharding import ModuleRule, Placement, RuleTable, WeightInfo, prefixed

if TYPE_CHECKING:
    from paddle import Tensor, nn

    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.architectures.speaking import CodeLayout
    from erniekit.model.decoder import Decoder, DecoderModules
    from erniekit.model.tensor_parallel import TensorParallel

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
ALWAYS = "always"
# Keys of `config.json` that paddlenlp writes for any family, with the values that change nothing.
NEUTRAL_FOR_PADDLENLP: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "rope_scaling_type": (None,),
    "use_long_sequence_strategies": (False,),
    "long_sequence_init_args": ({},),
}


class Key(NamedTuple):
    """What is asked of the value of a key of `config.json`.

    Attributes:
        kind: its type; an integer is accepted as a float.
        minimum: the smallest value; None: any value of the type.
        required: whether the key must be there.
        most: the largest value; None: of an integer what Paddle's sizes, int32, can hold, of a float what float32 can.
        default: the value where the key is absent.
        nullable: whether null is a value of its own; otherwise null means absent.
    """

    kind: type
    minimum: float | None = None
    required: bool = False
    most: float | None = None
    default: Any = None
    nullable: bool = False


class EncoderConfig(NamedTuple):
    """A dictionary in `config.json` that describes an encoder, such as `audio_config`.

    Attributes:
        model_type: what its key of that name says; where there is none, it is this.
        sizes: makes what ModelConfig keeps in `own` of the values of `keys`, by name.
        keys: what it says, by the names that `sizes` has for it.
        key_names: the key in the file where it is not that name.
        aliases, neutral, inert_keys, saved_keys: as of `Architecture`.
    """

    model_type: str
    sizes: Callable[..., Any]
    keys: Mapping[str, Key]
    key_names: Mapping[str, str] = {}
    aliases: Mapping[str, str] = {}
    neutral: Mapping[str, tuple[Any, ...]] = {}
    inert_keys: tuple[str, ...] = ()
    saved_keys: Mapping[str, Any] = {}


class PaddleFiles(NamedTuple):
    """How Paddle's libraries store the weights of a family (see `storage/layouts.py`).

    Attributes:
        library: the one that can open its pickled files.
        prefix: of weight names, in place of "model.".
        grouped_qkv: the order of queries, keys and values in a fused tensor where several query heads share a key head.
    """

    library: str
    prefix: str
    grouped_qkv: Literal["blocks", "groups"] = "groups"


class EncoderInput(NamedTuple):
    """What the audio encoder of a model takes; the same values as the data path's `AudioInputs` (`build/data.py`).

    Attributes:
        placeholder_id: the token in whose places the encoder's states stand.
        mel_bins: the channels of the log-mel spectrogram.
        window_frames: the frames that the encoder takes at once.
        window_tokens: the states that it makes of them.
        tokens_of: the number of placeholder tokens of a window with so many frames of sound (1 to window_frames).
    """

    placeholder_id: int
    mel_bins: int
    window_frames: int
    window_tokens: int
    tokens_of: Callable[[int], int]


class Tower(NamedTuple):
    """An encoder in front of the decoder, such as that of audio: all weights whose names begin with `prefix`.

    It lies on the first pipeline stage. Nothing is divided that its own rules do not divide, and adapters reach it only
    through a pattern that begins with its prefix.

    Attributes:
        prefix: of its weight names, with the dot at its end, such as "audio_tower.".
        shapes: of its weights, by name without the prefix.
        rules: of its modules, by path without the prefix.
        build: makes the layer from the configuration and the tensor-parallel ranks.
        part: the part of the model that it is (`parts.py`): an encoder of audio or of images, or the projector between
            an encoder and the decoder.
    """

    prefix: str
    shapes: Callable[[ModelConfig], Shapes]
    rules: Mapping[str, ModuleRule]
    build: Callable[[ModelConfig, TensorParallel], nn.Layer]
    part: str = AUDIO


@dataclass(frozen=True, eq=False)
class Architecture:
    """A family of models. Only `model_type` and `transformers_class` have no default.

    Attributes of `config.json`:
        model_type: what the key of that name says.
        transformers_class: the class of `transformers`, for `architectures` in a saved file.
        name: of the family, where several share a `model_type`, see `key`.
        defaults: values of fields of ModelConfig whose keys are absent.
        own_fields: optional fields of ModelConfig that this family has.
        key_names: the key of a field where it is not the field's name.
        own_keys: keys that only this family has; ModelConfig keeps their values in `own`.
        head_dim: where the key is absent; None means hidden_size / num_attention_heads.
        aliases: other names of keys, and the key that each means; both are written.
        neutral: keys that would change the computation, with the values that are available.
        inert_keys: keys that change nothing in this family, whatever their value; for those that change nothing in any
            family see `config_keys.py`. Every other key that is not read is refused.
        rope_sets: where types of layers have rope tables of their own, the name of each type in `rope_parameters` and
            the keys that transformers 4 writes of it (`rope_parameters.py`).
        saved_keys: written into a saved file that had no such keys.
        problems: one line for each thing in a configuration that cannot be used.
        small_values: values of `own` that fit a shrunk model (`runners/shrink.py`).
        text: the family of the decoder, whose keys stand in a dictionary; None: they are the file's own keys. Other
            attributes of this group are then of the keys around that dictionary.
        text_key: the key of that dictionary.
        encoders: the further dictionaries, by key, such as "audio_config".
        copied_keys: keys of the decoder that a saved file has around that dictionary as well.

    Attributes of the weights:
        decoder_prefix: of the decoder's names in files, such as "language_model.".
        stores_tied_head: files have tied embeddings a second time, as the head (`storage/tied_head.py`).
        stacked_experts: tensors of files that hold a weight of all experts (`storage/stacked_tensors.py`).
        names: what files call parts of paths that the decoder calls otherwise.
        decoder_shapes: the Hugging Face name and shape of every weight of the decoder, in its order.
        rules: what each module is and how ranks share it, by pattern of its path (`sharding.py`).
        mtp_rules: the same of multi-token prediction layers; files may have more of these than the model.
        towers: encoders, or tables of codes, in front of the decoder.
        inert_tensors: names of tensors in files that are no weights.
        lora_targets: patterns of the linear layers that adapters stand beside where the user names none; none: all
            linear layers of the decoder.
        tensor_parallel_sizes: what the tensor-parallel degree must divide, by the names of keys.
        paddle_files: how Paddle's libraries store the weights; None: they do not know the family.

    Attributes of the computation:
        modules: the classes of embedding, layer, final norm, head and attention.
        attention_shapes: the weights of attention by name, and their shapes.
        qk_head_dim: the channels of each query and key, which values do not exceed.
        input_names: the arrays of a batch that `embed` reads.
        embed: makes the hidden states that enter the first layer from these arrays, by the embedding and the towers.
        audio: what the model's audio encoder takes; None: the family has none.
        codes: which rows and logits stand for codes; None: the family writes none (`speaking.py`).
        biases: the field that gives a linear its bias, or ALWAYS; linears not named here have none.
        attention_sinks: each query head may attend to nothing, with a learnt score.
        norms: those that a layer has of the norms before and after attention and MLP (`plain_decoder`).
        norm_offset: is added to the weights of norms.
        qk_norm: queries and keys pass an RMSNorm before they are turned, over each head or the whole projection.
        multipliers: constants that multiply embeddings, branches, attention scores and logits.
        activation: what joins gate and up in an MLP (`mlp.ACTIVATIONS`).
        fused_gate_up: gate and up are one linear layer, `gate_up_proj`.
        rotary_interleaved: rotary embeddings turn channels (2i, 2i + 1) of a head; otherwise (i, i + D / 2).
        rope_tables: the frequencies that layers choose from.
        layer_attention: the window and the rope table of the layer with this number.
        has_experts: whether the layer with this number has experts in place of its MLP.
        routing: how routers choose experts.
        shared_experts_size: the channels of the shared experts together.
        shared_expert_gate: the output of the shared experts is multiplied by sigmoid(w x).
    """

    model_type: str
    transformers_class: str
    name: str = ""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    own_fields: tuple[str, ...] = ()
    key_names: Mapping[str, str] = field(default_factory=dict)
    own_keys: Mapping[str, Key] = field(default_factory=dict)
    head_dim: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert_keys: tuple[str, ...] = ()
    rope_sets: Mapping[str, RopeKeys] = field(default_factory=dict)
    saved_keys: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    problems: Callable[[ModelConfig], list[str]] = lambda config: []
    small_values: Mapping[str, Any] = field(default_factory=dict)
    text: Architecture | None = None
    text_key: str = "text_config"
    encoders: Mapping[str, EncoderConfig] = field(default_factory=dict)
    copied_keys: tuple[str, ...] = ()

    decoder_prefix: str = ""
    stores_tied_head: bool = False
    stacked_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    decoder_shapes: Callable[[ModelConfig], Shapes] = plain_decoder.decoder_shapes
    rules: Mapping[str, ModuleRule] = field(
        default_factory=lambda: plain_decoder.decoder_rules(plain_decoder.DENSE_LAYER)
    )
    mtp_rules: Mapping[str, ModuleRule] = field(default_factory=dict)
    towers: tuple[Tower, ...] = ()
    inert_tensors: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ()
    tensor_parallel_sizes: Callable[[ModelConfig], dict[str, int]] = plain_decoder.tensor_parallel_sizes
    paddle_files: PaddleFiles | None = None

    modules: Callable[[], DecoderModules] = plain_decoder.plain_modules
    attention_shapes: Callable[[ModelConfig], Shapes] = plain_decoder.attention_shapes
    qk_head_dim: Callable[[ModelConfig], int] = lambda config: config.head_dim
    input_names: tuple[str, ...] = ("input_ids",)
    embed: Callable[[Decoder, Mapping[str, Tensor]], Tensor] = plain_decoder.embed_tokens
    audio: Callable[[ModelConfig], EncoderInput] | None = None
    codes: Callable[[ModelConfig], CodeLayout] | None = None
    biases: Mapping[str, str] = field(default_factory=dict)
    attention_sinks: bool = False
    norms: tuple[str, ...] = PRE_NORMS
    norm_offset: float = 0.0
    qk_norm: Literal["head", "projection"] | None = None
    multipliers: Callable[[ModelConfig], Multipliers] = lambda config: Multipliers()
    activation: str = "swiglu"
    fused_gate_up: bool = False
    rotary_interleaved: bool = False
    rope_tables: Callable[[ModelConfig], tuple[Frequencies, ...]] = plain_decoder.one_rope_table
    layer_attention: Callable[[ModelConfig, int], LayerAttention] = plain_decoder.full_attention
    has_experts: Callable[[ModelConfig, int], bool] = plain_decoder.has_experts
    routing: Callable[[ModelConfig], Routing] = lambda config: Routing()
    shared_experts_size: Callable[[ModelConfig], int] = plain_decoder.shared_experts_size
    shared_expert_gate: bool = False

    @property
    def key(self) -> str:
        """What `ModelConfig.model_type` says of the family."""
        return self.name or self.model_type

    def weight_shapes(self, config: ModelConfig) -> Shapes:
        """Return every weight's Hugging Face name and shape (linear weights are [out, in]): towers, then decoder."""
        towers = {tower.prefix + name: shape for tower in self.towers for name, shape in tower.shapes(config).items()}
        shapes = self.decoder_shapes(config)
        if config.scored:
            shapes = with_score(shapes, plain_decoder.HEAD, config.hidden_size)
        return towers | {self.decoder_prefix + name: shape for name, shape in shapes.items()}

    def file_name(self, path: str) -> str:
        """Return the Hugging Face name of a weight or module that the decoder, or a tower, has under this path."""
        if path.startswith(tuple(tower.prefix for tower in self.towers)):
            return path
        return self.decoder_prefix + (renamed(path, self.names) if self.names else path)

    def weight_info(self, name: str) -> WeightInfo:
        """Return what the rules say of a weight, or of a parameter of an adapter.

        Raises:
            LookupError: no rule names it. Files are checked before this, so it is an omission of the architecture.
        """
        found = self._table.find(name)
        if found is None:
            raise LookupError(
                f"{name}: no rule of the architecture {self.key} names this weight, so nothing is known of "
                f"where it lies on ranks. Add its module to `rules` (erniekit/model/architectures)."
            )
        return found

    def placement(self, name: str, *, sequence_parallel: bool = False) -> Placement:
        """Return where a weight lies on tensor-parallel ranks; see `WeightInfo.placement`. Raises as `weight_info`."""
        return self.weight_info(name).placement(sequence_parallel=sequence_parallel)

    def is_linear(self, name: str) -> bool:
        """Return whether this is the weight of a `Linear`. Raises as `weight_info`."""
        return self.weight_info(name).is_linear

    def is_mtp_weight(self, name: str) -> bool:
        """Return whether this weight, or adapter, belongs to multi-token prediction, which a run may leave out."""
        return self._mtp_table.find(name) is not None

    def linear_shapes(self, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """Return the path of every linear layer, those of towers included, and its (out, in)."""
        shapes = config.weight_shapes()
        return {
            name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes.items() if self.is_linear(name)
        }

    @cached_property
    def _table(self) -> RuleTable:
        towers = {path: rule for tower in self.towers for path, rule in prefixed(tower.prefix, tower.rules).items()}
        rules = {**self.rules, **self.mtp_rules, "score": SCORE_RULE}
        return RuleTable(prefixed(self.decoder_prefix, rules), towers)

    @cached_property
    def _mtp_table(self) -> RuleTable:
        return RuleTable(prefixed(self.decoder_prefix, self.mtp_rules), {})
