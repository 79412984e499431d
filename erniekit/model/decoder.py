"""The decoder of every family: an ordered list of stages (embedding, N layers, final norm, head), or a part of it.

Shapes: B batch, S tokens, H hidden size, N query heads, K key heads, D head size. Parameter names inside a stage are
Hugging Face's; `Decoder.named_blocks` gives each stage's prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import nn

from erniekit.config.sections.moe import MoeParameters
from erniekit.model import bf16
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.decoder_layer import AttentionBackend, BatchContext, DecoderLayer, Rotation, SelfAttention
from erniekit.model.linear import ZEROS
from erniekit.model.moe.dispatch import NO_EXPERT_PARALLEL, ExpertParallel
from erniekit.model.moe.experts import MoE
from erniekit.model.moe.router import NO_BALANCE_LOSSES, ExpertBalance
from erniekit.model.mtp import MultiTokenPrediction
from erniekit.model.new_rows import NewRows, grown_logits, look_up, place_rows
from erniekit.model.norm import RMSNorm
from erniekit.model.randomness import Randomness
from erniekit.model.recompute import Recompute
from erniekit.model.rope import rotary_tables
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel
from erniekit.model.vocabulary import NEW_ROWS, GrownVocabulary


class VocabularyRows:
    """Where the new rows of a layer with a row for each token are (`model/new_rows.py`).

    The layer has them as its parameter `new_rows` once adapters are attached (`lora/new_rows.py`).

    Attributes:
        switched_off: compute with W alone, whose rows of new tokens stay as they began.
        tp: the ranks that divide W.
    """

    def __init__(self, vocabulary: GrownVocabulary | None, tp: TensorParallel) -> None:
        self.vocabulary, self.switched_off, self.tp = vocabulary, False, tp

    def place(self, layer: nn.Layer) -> NewRows | None:
        """Return the layer's new rows and their place in this rank's shard of its weight; None: it has none."""
        values = getattr(layer, NEW_ROWS, None)
        if self.vocabulary is None or values is None or self.switched_off:
            return None
        return place_rows(values, self.vocabulary.first, self.tp.rank, layer.weight.shape[0])


class Embedding(nn.Layer):
    """Token ids [B, S] -> hidden states [B, S, H]. The ranks of `tensor` divide the vocabulary."""

    def __init__(self, config: ModelConfig, tp: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        self.tp = tp
        shape = [tp.local_size(config.vocab_size), config.hidden_size]
        self.weight: Any = self.create_parameter(shape, default_initializer=ZEROS)
        self.mapped: Any = None  # a `MappedWeight` in the place of `weight`
        self.vocabulary = VocabularyRows(config.vocabulary, tp)

    def forward(self, input_ids_BS: paddle.Tensor) -> paddle.Tensor:
        if self.mapped is not None:
            return self.mapped.rows(input_ids_BS)
        new_rows = self.vocabulary.place(self)
        if self.tp.size == 1:
            found_BSH = F.embedding(input_ids_BS, self.weight)
            return found_BSH if new_rows is None else look_up(new_rows, input_ids_BS, found_BSH)
        rows_BS = input_ids_BS - self.tp.rank * self.weight.shape[0]
        is_local_BS = (rows_BS >= 0) & (rows_BS < self.weight.shape[0])
        found_BSH = F.embedding(paddle.where(is_local_BS, rows_BS, paddle.zeros_like(rows_BS)), self.weight)
        if new_rows is not None:
            found_BSH = look_up(new_rows, rows_BS, found_BSH)
        return self.tp.reduce_from_tp(found_BSH * is_local_BS.unsqueeze(-1).astype(found_BSH.dtype))


class Head(nn.Layer):
    """Hidden states [..., H] -> logits [..., V]. With tied embeddings it has no weight of its own.

    The ranks of `tensor` divide the vocabulary.
    """

    def __init__(self, config: ModelConfig, tied_to: Embedding | None, tp: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        self.tp = tp
        self.parallel_output = (
            True  # whether a loss is computed from the slices of the logits (`tensor_parallel_output`)
        )
        if tied_to is not None:
            self._owner = [tied_to]  # in a list, so that Paddle does not register it a second time
        else:
            shape = [tp.local_size(config.vocab_size), config.hidden_size]
            self.weight: Any = self.create_parameter(shape, default_initializer=ZEROS)
            self.mapped: Any = None  # as of `Embedding`
            self.vocabulary = VocabularyRows(config.vocabulary, tp)
            self._owner = [self]

    @property
    def owner(self) -> Any:
        """The layer that has the weight: this one, or an embedding."""
        return self._owner[0]

    @property
    def projection(self) -> paddle.Tensor:
        """W [V, H] of logits = hidden W^T; this rank's slice of it, or a copy of one that is mapped."""
        return self.owner.weight if self.owner.mapped is None else self.owner.mapped.dense()

    @property
    def new_rows_here(self) -> NewRows | None:
        """The rows that stand for some of W's, trained beside adapters; None: there are none."""
        return self.owner.vocabulary.place(self.owner)

    def _logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        if self.owner.mapped is not None:
            return self.owner.mapped(hidden)
        new_rows = self.new_rows_here
        if new_rows is None:
            if bf16.computes(bf16.HEAD, hidden, self.projection):
                return bf16.linear(hidden, self.projection, transpose_weight=True)
            return paddle.matmul(hidden, self.projection, transpose_y=True)
        return grown_logits(hidden, self.projection, new_rows)

    def logits_for_loss(self, hidden: paddle.Tensor) -> tuple[paddle.Tensor, TensorParallel]:
        """Logits for a loss, and the ranks that divide them; `entered` has entered the head (`tensor.enter`)."""
        logits = self._logits(hidden)
        return (logits, self.tp) if self.parallel_output else (self.tp.gather_from_tp(logits), NO_TENSOR_PARALLEL)

    def forward(self, hidden: paddle.Tensor, compute: Callable[[paddle.Tensor], Any] | None = None) -> Any:
        """The logits, or what `compute` makes of `hidden`: whoever uses the weight does so in here, because ranks that
        divide parameters have it only while its layer computes."""
        if compute is not None:
            return compute(hidden)
        logits = self._logits(self.tp.copy_to_tp(hidden))
        return self.tp.gather_from_tp(logits)


class ScoreHead(nn.Layer):
    """Hidden states [T, H] -> scores [T], in float32 or wider. The ranks of `tp` divide the channels of its weight."""

    def __init__(self, config: ModelConfig, tp: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        self.tp = tp
        self.parallel_output = True  # as of `Head`; scores are never divided
        self.weight = self.create_parameter([1, tp.local_size(config.hidden_size)], default_initializer=ZEROS)

    def forward(self, hidden_TH: paddle.Tensor) -> paddle.Tensor:
        """Return the scores of hidden states that `tp.copy_to_tp` has prepared."""
        width = self.weight.shape[1]
        own_TH = hidden_TH[:, self.tp.rank * width : (self.tp.rank + 1) * width]
        wide = own_TH.dtype if own_TH.dtype == paddle.float64 else "float32"
        scores_T = paddle.matmul(own_TH.astype(wide), self.weight.astype(wide), transpose_y=True).flatten()
        return self.tp.add_parts(scores_T)


class DecoderModules(NamedTuple):
    """The classes that a decoder is made of (`Architecture.modules`).

    One that an architecture puts in the place of a plain class takes the same arguments, and the methods and attributes
    of the plain class are called on it: `Embedding`, `DecoderLayer`, `RMSNorm`, `Head`, `SelfAttention`.
    """

    embedding: type[nn.Layer]
    layer: type[nn.Layer]
    norm: type[nn.Layer]  # the last one, before the head
    head: type[nn.Layer]
    attention: type[nn.Layer]


PLAIN_MODULES = DecoderModules(Embedding, DecoderLayer, RMSNorm, Head, SelfAttention)


def last_stage_needs_embedding(config: ModelConfig) -> bool:
    """Whether what comes after the layers uses the embedding, too."""
    return config.ties_head or config.num_nextn_predict_layers > 0


@dataclass(frozen=True)
class PipelineStage:
    """What one stage of a pipeline has of the stack.

    Attributes:
        model_chunks: the numbers of the decoder layers of each of its runs.
        first: the embedding, too.
        last: the final norm, multi-token prediction and the head, too. Where these use the embedding, this stage has a
            copy of it, whose gradient is a part of the embedding's.
    """

    model_chunks: tuple[range, ...]
    first: bool
    last: bool

    def __str__(self) -> str:
        """For one line of a log: which layers are here."""
        model_chunks = [
            f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else str(chunk[0]) for chunk in self.model_chunks if chunk
        ]
        words = ["the embedding"] if self.first else []
        words += [f"layers {', '.join(model_chunks)}"] if model_chunks else []
        return ", ".join(words + (["norm and head"] if self.last else [])) or "nothing"


class Decoder(nn.Layer):
    """The decoder; build it with `builder.build_model`, which also gives it weights.

    Attributes:
        part: what it has of the stack; attributes of stages that it does not have must not be asked for.
        input_names: the arrays of a batch that `embed` reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        balance: MoeParameters | None = None,
        tp: TensorParallel = NO_TENSOR_PARALLEL,
        expert_parallel: ExpertParallel = NO_EXPERT_PARALLEL,
        pipeline_stage: PipelineStage | None = None,
    ) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        self.pipeline_stage = pipeline_stage = pipeline_stage or PipelineStage(
            (range(config.num_hidden_layers),), first=True, last=True
        )
        self.randomness = Randomness(seed, dp_rank, dp_world_size)
        self.balance = ExpertBalance(balance or NO_BALANCE_LOSSES, expert_parallel.all_reduce_loads)
        architecture, modules = config.architecture, config.architecture.modules()
        self.input_names = architecture.input_names
        self.rope_tables = architecture.rope_tables(config)
        self.recompute: Recompute | None = None
        self.adapters: Any = None  # the kind of adapters beside its weights (adapters.lora.Kind), if it has any
        self.activation_scales: Any = None  # of its FP8 products (quantization.fp8.ActivationScales), if it has any

        def decoder_layer(number: int, moe: bool) -> DecoderLayer:
            return modules.layer(
                config,
                number,
                self.randomness,
                self.balance,
                moe=moe,
                hidden_dropout=hidden_dropout,
                attention_dropout=attention_dropout,
                tp=tp,
                dispatcher=expert_parallel.dispatcher,
            )

        predictions = config.num_nextn_predict_layers if pipeline_stage.last else 0
        towers = architecture.towers if pipeline_stage.first else ()
        self.towers = nn.LayerList(tower.build(config, tp) for tower in towers)
        if pipeline_stage.first or (pipeline_stage.last and last_stage_needs_embedding(config)):
            self.embedding = modules.embedding(config, tp)
        self.model_chunks = nn.LayerList(
            nn.LayerList(decoder_layer(number, config.is_moe_layer(number)) for number in chunk)
            for chunk in pipeline_stage.model_chunks
        )
        # The block of depth d is made as layer d is; its number goes on from theirs, so that its draws are its own.
        self.mtp = nn.LayerList(
            MultiTokenPrediction(config, decoder_layer(config.num_hidden_layers + depth, config.is_moe_layer(depth)))
            for depth in range(predictions)
        )
        if pipeline_stage.last:
            offset = architecture.norm_offset
            scale = 1.0 if config.scored else architecture.multipliers(config).logits
            self.norm = modules.norm(config.hidden_size, config.rms_norm_eps, offset=offset, scale=scale)
            if config.scored:
                self.head = ScoreHead(config, tp)
            else:
                self.head = modules.head(config, self.embedding if config.ties_head else None, tp)

    @property
    def layers(self) -> list[DecoderLayer]:
        """The decoder layers that are here, in their order."""
        return [layer for chunk in self.model_chunks for layer in chunk]

    def named_blocks(self) -> Iterator[tuple[str, nn.Layer]]:
        """Every stage that is here with the prefix of its weight names, which `Architecture.file_name` makes those of
        Hugging Face."""
        for tower, layer in zip(self.config.architecture.towers, self.towers, strict=False):
            yield tower.prefix, layer
        if hasattr(self, "embedding"):
            yield "model.embed_tokens.", self.embedding
        for layer in self.layers:
            yield f"model.layers.{layer.layer}.", layer
        if self.pipeline_stage.last:
            yield "model.norm.", self.norm
        for depth, prediction in enumerate(self.mtp):
            yield f"model.mtp_block.{depth}.", prediction.block
            yield f"model.mtp_emb_norm.{depth}.", prediction.emb_norm
            yield f"model.mtp_hidden_norm.{depth}.", prediction.hidden_norm
            yield f"model.mtp_linear_proj.{depth}.", prediction.linear_proj
        if self.pipeline_stage.last:
            yield "score." if self.config.scored else "lm_head.", self.head

    def begin_micro_batch(
        self, *, step: int, micro_batch: int, dropout_scale: float = 1.0, loss_weight: float = 1.0
    ) -> None:
        """Tell the model its place in the run; `share` is this micro-batch's part of the units of the step."""
        self.randomness.set(step=step, micro_batch=micro_batch, dropout_scale=dropout_scale)
        self.balance.begin_micro_batch(micro_batch, loss_weight)

    def end_step(self, *, skipped: bool = False) -> None:
        """After the optimizer's update: what follows the step but no gradient. Of a step whose update was skipped
        nothing is learnt."""
        blocks = [] if skipped else [*self.layers, *(prediction.block for prediction in self.mtp)]
        self.balance.end_step(layer.mlp.router for layer in blocks if isinstance(layer.mlp, MoE))
        if self.activation_scales is not None:
            self.activation_scales.end_step(skipped=skipped)

    def forward(
        self,
        input_ids_BS: paddle.Tensor,
        position_ids_BS: paddle.Tensor,
        plan: AttentionBackend,
        is_token_BS: paddle.Tensor | None = None,
        **inputs: paddle.Tensor,
    ) -> paddle.Tensor:
        """Return hidden states [B, S, H] after the final norm, for `head.token_loss` or `decoder.head`.

        Args:
            input_ids_BS: int64 token ids.
            position_ids_BS: int64 positions, restarting at 0 in every document.
            plan: an `AttentionPlan` of the batch, or the attention of a step of decoding over cached keys and values.
            is_token_BS: 1.0 for tokens and 0.0 for padding, for the losses of routers; None: there is no padding.
            inputs: the other arrays that `embed` reads, by name.
        """
        context = self.context(position_ids_BS, plan, is_token_BS)
        return self.norm(self.forward_layers(self.embed({"input_ids": input_ids_BS, **inputs}), context))

    def embed(self, inputs: Mapping[str, paddle.Tensor]) -> paddle.Tensor:
        """Return the hidden states [B, S, H] that enter the first layer.

        Nothing else calls the embedding layer, so this is the place where a tower puts its states at positions of the
        text. Stages of a pipeline that have no embedding must not call it.

        Args:
            inputs: arrays of a batch by name: those of `input_names` that the batch has; `input_ids` int64 [B, S].
        """
        return self.config.architecture.embed(self, inputs)

    def context(
        self, position_ids_BS: paddle.Tensor, plan: AttentionBackend, is_token_BS: paddle.Tensor | None = None
    ) -> BatchContext:
        """What all layers share while they compute a batch; arguments as of `forward`."""
        heads = (self.config.num_attention_heads, self.config.num_key_value_heads)
        interleaved = self.config.architecture.rotary_interleaved
        rotations = tuple(
            Rotation(
                *(
                    rotary_tables(position_ids_BS, self.tp.local_size(count), frequencies, interleaved=interleaved)
                    for count in heads
                )
            )
            for frequencies in self.rope_tables
        )
        if is_token_BS is not None:
            is_token_BS = self.tp.local_tokens(is_token_BS)
        return BatchContext(rotations, plan, position_ids_BS.shape, is_token_BS)

    def forward_layers(self, hidden_BSH: paddle.Tensor, context: BatchContext, chunk: int = 0) -> paddle.Tensor:
        """Return the hidden states after the decoder layers of a model chunk."""
        for layer in self.model_chunks[chunk]:
            hidden_BSH = self._forward_layer(layer, hidden_BSH, context)
        return hidden_BSH

    def forward_mtp(
        self,
        hidden_BSH: paddle.Tensor,
        context: BatchContext,
        shifted_inputs: Sequence[Mapping[str, paddle.Tensor]],
    ) -> list[paddle.Tensor]:
        """Run multi-token prediction, depth after depth, on hidden states that have passed all layers.

        Args:
            shifted_inputs: for depth d from 1 what `embed` reads, of the tokens d positions later
                (`mtp.shift_within_documents`). The states of depth d at position i predict the token at i + d + 1.

        Returns:
            Hidden states [B, S, H] of each depth, before the final norm, as `hidden_BSH` is.
        """
        states = [hidden_BSH]
        for prediction, inputs in zip(self.mtp, shifted_inputs, strict=True):
            joined_BSH = prediction.combine_inputs(self.embed(inputs), states[-1])
            states.append(self._forward_layer(prediction.block, joined_BSH, context))
        return states[1:]

    def _forward_layer(self, layer: DecoderLayer, hidden_BSH: paddle.Tensor, context: BatchContext) -> paddle.Tensor:
        return self.recompute(layer, hidden_BSH, context) if self.recompute else layer(hidden_BSH, context)
