"""Families that write the codes of a codec: any decoder between tables and heads of codes.

`omnivoice` fills masked codes of all levels at once (the keys and names are those of the package of that name): a code
of level c has row c V + code of one table, and level c is predicted by rows c V .. c V + V - 1 of one head, with V the
codes and the mask. `vall_e` writes level 0 code by code and each further level at once (Wang et al., 2023,
arXiv:2301.02111): it has tables of prompts and of responses for each level, and a head for each level and for text.
Neither has a head that ties the embedding. `code_layers.py` computes both. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from erniekit.model.architectures.architecture import Architecture, Key, Tower
from erniekit.model.architectures.plain_decoder import HEAD, Shapes, renamed
from erniekit.model.architectures.sharding import ModuleRule

if TYPE_CHECKING:
    from paddle import Tensor, nn

    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.decoder import Decoder, DecoderModules
    from erniekit.model.tensor_parallel import TensorParallel

OMNIVOICE, VALL_E = "omnivoice", "vall_e"
LLM_CONFIG = "llm_config"
TABLE = "audio_embeddings."
PROMPTS, RESPONSES = "proms_emb.", "resps_emb."
OFFSETS = "codebook_layer_offsets"  # a tensor [C] in files of the package: where each level's rows begin
# Of eight levels, where `audio_codebook_weights` is absent.
PUBLISHED_WEIGHTS = (8.0, 8.0, 6.0, 6.0, 4.0, 4.0, 2.0, 2.0)
MOST_LEVELS = 64
TEXT_START, TEXT_END = "<|text_start|>", "<|text_end|>"
LANGUAGE_START, LANGUAGE_END = "<|lang_start|>", "<|lang_end|>"
INSTRUCT_START, INSTRUCT_END = "<|instruct_start|>", "<|instruct_end|>"
DENOISE, SEPARATOR = "<|denoise|>", "<|sep|>"
TASKS = ("continuation", "stt")  # that a token names; the plain task has none
# Of parts of the decoder's paths in files, beside those of its own family.
_NAMES = {OMNIVOICE: {"model": "llm", "lm_head": "audio_heads"}, VALL_E: {"lm_head": "classifiers"}}
# Every rank has all of a table and of a head; with sequence parallelism a head's gradient is a part of the sum, as that
# of all weights that are not divided (`WeightInfo.placement`).
CODE_ROWS = ModuleRule("embedding", ("weight", "bias"))


@dataclass(frozen=True)
class CodeLayout:
    """Which rows and logits stand for codes.

    Attributes:
        kind: "omnivoice" or "vall_e".
        levels: of the codec, L.
        codebook_size: the codes of each level, V.
        mask_id: the number behind the codes that stands for a masked one; None: nothing is masked.
        stop: the number behind the codes of level 0 that ends them; None: lengths are given.
        tables: the name in files and the rows of each table, in the order of the row numbers.
        heads: the name in files and the logits of each level, then of text if the model predicts any.
        both_ways: positions of whole levels see all of their document.
        restarts_positions: each segment of a document counts its positions from 0.
        bias: the heads of levels have one.
    """

    kind: str
    levels: int
    codebook_size: int
    mask_id: int | None
    stop: int | None
    tables: tuple[tuple[str, int], ...]
    heads: tuple[tuple[str, int], ...]
    both_ways: bool = True
    restarts_positions: bool = False
    bias: bool = False

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The number of each table's first row; of one table for all levels, of each level's."""
        if self.kind == OMNIVOICE:
            return tuple(level * (self.codebook_size + 1) for level in range(self.levels))
        return tuple(accumulate((rows for _, rows in self.tables[:-1]), initial=0))

    @property
    def prompts(self) -> tuple[int, ...]:
        """The first row of a prompt's codes of each level; none where prompts have the rows of other codes."""
        return () if self.kind == OMNIVOICE else self.first_rows[: self.levels]

    @property
    def written(self) -> int | None:
        """The first row of the codes of level 0 that are written one by one; None: none are."""
        return None if self.kind == OMNIVOICE else self.first_rows[self.levels]

    @property
    def whole(self) -> tuple[int, ...]:
        """The first row of the codes of each level that whole levels read; without the last level in `vall_e`."""
        return self.first_rows if self.kind == OMNIVOICE else self.first_rows[self.levels + 1 :]

    @property
    def rows(self) -> int:
        """The rows of all tables."""
        return sum(rows for _, rows in self.tables)


def code_layout(config: ModelConfig) -> CodeLayout:
    """Return which rows and logits of a model stand for codes; the model is one that speaks."""
    layout = config.architecture.codes
    assert layout is not None, f"{config.model_type} writes no codes"
    return layout(config)


def decoder_names(config: ModelConfig) -> dict[str, str]:
    """Return the name that each weight of the decoder has in files of the model, and in files of the decoder alone."""
    text = config.architecture.text
    assert text is not None
    names = _NAMES[code_layout(config).kind]
    return {renamed(name, names): name for name in text.decoder_shapes(config) if name != HEAD}


def codebook_weights(config: ModelConfig) -> tuple[float, ...]:
    """Return the weight of each level in the loss that config.json of an `omnivoice` names, not normalised."""
    return tuple(config.own["audio_codebook_weights"] or default_weights(config.own["num_audio_codebook"]))


def default_weights(levels: int) -> tuple[float, ...]:
    """Return the weights of a new model: those that were published with eight levels, otherwise equal ones."""
    return PUBLISHED_WEIGHTS if levels == len(PUBLISHED_WEIGHTS) else (1.0,) * levels


def level_token(level: int) -> str:
    """Return the token that names the level which a document's response belongs to."""
    return f"<|level:{level}|>"


def task_token(task: str) -> str:
    """Return the token that names a task of `TASKS`."""
    return f"<|task:{task}|>"


def control_tokens(kind: str, levels: int) -> tuple[str, ...]:
    """Return the control tokens that a family's documents consist of, in the order in which they are added."""
    if kind == OMNIVOICE:
        return CONTROL_TOKENS[OMNIVOICE]
    return (*CONTROL_TOKENS[VALL_E], *map(level_token, range(levels)))


# Those that do not depend on the levels.
CONTROL_TOKENS: Mapping[str, tuple[str, ...]] = {
    OMNIVOICE: (DENOISE, LANGUAGE_START, LANGUAGE_END, INSTRUCT_START, INSTRUCT_END, TEXT_START, TEXT_END),
    VALL_E: (TEXT_START, TEXT_END, LANGUAGE_START, LANGUAGE_END, SEPARATOR, *map(task_token, TASKS)),
}


def speaking(kind: str, text: Architecture) -> Architecture:
    """Return the family of a kind ("omnivoice" or "vall_e") around the decoder of the family `text`."""
    return _OF_KIND[kind](text)


def _omnivoice(text: Architecture) -> Architecture:
    return _around(
        text,
        OMNIVOICE,
        "OmniVoice",
        codes=_omnivoice_layout,
        head_rules={"audio_heads": CODE_ROWS},
        towers=(Tower(TABLE, _joined_shapes, {"": CODE_ROWS}, _build_joined),),
        own_keys={
            "audio_vocab_size": Key(int, 2, default=1025, most=2**20),
            "audio_mask_id": Key(int, 1, default=1024, most=2**20),
            "num_audio_codebook": Key(int, 1, default=8, most=MOST_LEVELS),
            "audio_codebook_weights": Key(list),
        },
        problems=_omnivoice_problems,
        small_values={
            "audio_vocab_size": 65,
            "audio_mask_id": 64,
            "num_audio_codebook": 2,
            "audio_codebook_weights": None,
        },
        inert_tensors=(OFFSETS,),
    )


def _vall_e(text: Architecture) -> Architecture:
    return _around(
        text,
        VALL_E,
        "VALLE",
        codes=_vall_e_layout,
        head_rules={"classifiers.proj.{level}": CODE_ROWS},
        towers=(_level_tables(PROMPTS), _level_tables(RESPONSES)),
        own_keys={
            "audio_vocab_size": Key(int, 1, default=1024, most=2**20),
            "num_audio_codebook": Key(int, 1, default=8, most=MOST_LEVELS),
            "noncausal_masks": Key(bool, default=True),
            "unified_position_ids": Key(bool, default=True),
            "classifiers_bias": Key(bool, default=False),
        },
        problems=lambda config: [],
        small_values={"audio_vocab_size": 64, "num_audio_codebook": 2},
    )


def _around(
    text: Architecture,
    kind: str,
    transformers_class: str,
    *,
    codes: Callable[[ModelConfig], CodeLayout],
    head_rules: Mapping[str, ModuleRule],
    towers: tuple[Tower, ...],
    own_keys: Mapping[str, Key],
    problems: Callable[[ModelConfig], list[str]],
    small_values: Mapping[str, Any],
    inert_tensors: tuple[str, ...] = (),
) -> Architecture:
    """Return a speaking family.

    Args:
        text: the family of the decoder, whose keys stand in `llm_config`.
        own_keys, problems, small_values: as of `Architecture`, of codes.
    """
    names = _NAMES[kind]
    rules = {renamed(path, names): rule for path, rule in text.rules.items() if path != _module(HEAD)}
    return replace(
        text,
        model_type=kind,
        name=f"{kind}:{text.key}",
        transformers_class=transformers_class,
        own_keys=own_keys,
        aliases={},
        neutral={},
        inert_keys=("tie_word_embeddings", "initializer_range"),  # those of `llm_config` act
        saved_keys={},
        problems=lambda config: [
            *(f"{LLM_CONFIG}.{line}" for line in text.problems(config)),
            *_decoder_problems(config),
            *problems(config),
        ],
        small_values={**text.small_values, **small_values},
        text=text,
        text_key=LLM_CONFIG,
        codes=codes,
        names={**text.names, **names},
        decoder_shapes=lambda config: _decoder_shapes(text, names, config),
        rules={**rules, **head_rules},
        mtp_rules={},
        towers=towers,
        inert_tensors=inert_tensors,
        tensor_parallel_sizes=lambda config: {
            f"{LLM_CONFIG}.{name}": size for name, size in text.tensor_parallel_sizes(config).items()
        },
        paddle_files=None,
        modules=partial(_modules, text, kind),
        input_names=("input_ids", "codes"),
        embed=_embed,
    )


def _module(weight: str) -> str:
    return weight.rpartition(".")[0]


def _decoder_shapes(text: Architecture, names: Mapping[str, str], config: ModelConfig) -> Shapes:
    """Return the weights of the decoder, then those of the heads."""
    own = {renamed(name, names): shape for name, shape in text.decoder_shapes(config).items() if name != HEAD}
    layout, size = code_layout(config), config.hidden_size
    heads: Shapes = {}
    for level, (name, logits) in enumerate(layout.heads):
        rows = logits + heads[name][0] if name in heads else logits  # one matrix of all levels
        heads[name] = (rows, size)
        if layout.bias and level < layout.levels:
            heads[name.removesuffix("weight") + "bias"] = (logits,)
    return own | heads


def _decoder_problems(config: ModelConfig) -> list[str]:
    """Return why a decoder cannot stand between tables and heads of codes."""
    architecture, lines = config.architecture, []
    if config.windows:
        lines.append("layers attend to a window, and a window of documents that are read both ways is not defined here")
    if architecture.attention_sinks:
        lines.append("attention has sinks, and a sink of documents that are read both ways is not defined here")
    if config.num_nextn_predict_layers:
        lines.append("layers of multi-token prediction predict texts, which a model that writes codes does not")
    return [f"{LLM_CONFIG}: {line}" for line in lines]


def _omnivoice_layout(config: ModelConfig) -> CodeLayout:
    levels, size = config.own["num_audio_codebook"], config.own["audio_vocab_size"]
    return CodeLayout(
        OMNIVOICE,
        levels,
        size - 1,
        mask_id=config.own["audio_mask_id"],
        stop=None,
        tables=((f"{TABLE}weight", levels * size),),
        heads=(("audio_heads.weight", size),) * levels,
    )


def _omnivoice_problems(config: ModelConfig) -> list[str]:
    levels, size, mask = (config.own[key] for key in ("num_audio_codebook", "audio_vocab_size", "audio_mask_id"))
    weights, lines = config.own["audio_codebook_weights"], []
    if mask != size - 1:
        lines.append(f"audio_mask_id: {mask} is not supported; only audio_vocab_size - 1, {size - 1}, is")
    if weights is not None:
        numbers = [each for each in weights if isinstance(each, (int, float)) and not isinstance(each, bool)]
        if len(numbers) != len(weights) or not all(0 <= each < 1e6 for each in numbers) or not sum(numbers) > 0:
            lines.append("audio_codebook_weights: expected numbers of 0 or more, which are not all 0")
        elif len(weights) != levels:
            lines.append(f"audio_codebook_weights: {len(weights)} weights of {levels} levels (num_audio_codebook)")
    return lines


def _vall_e_layout(config: ModelConfig) -> CodeLayout:
    levels, size = config.own["num_audio_codebook"], config.own["audio_vocab_size"]
    responses = (size + 1, *[size] * (levels - 1))
    return CodeLayout(
        VALL_E,
        levels,
        size,
        mask_id=None,
        stop=size,
        tables=(
            *((f"{PROMPTS}embeddings.{level}.weight", size) for level in range(levels)),
            *((f"{RESPONSES}embeddings.{number}.weight", rows) for number, rows in enumerate(responses)),
        ),
        heads=tuple(
            (f"classifiers.proj.{number}.weight", logits)
            for number, logits in enumerate((*responses, config.vocab_size))
        ),
        both_ways=config.own["noncausal_masks"],
        restarts_positions=not config.own["unified_position_ids"],
        bias=config.own["classifiers_bias"],
    )


def _level_tables(prefix: str) -> Tower:
    shapes, build = partial(_table_shapes, prefix), partial(_build_tables, prefix)
    return Tower(prefix, shapes, {"embeddings.{level}": CODE_ROWS}, build)


def _joined_shapes(config: ModelConfig) -> Shapes:
    return {"weight": (code_layout(config).rows, config.hidden_size)}


def _table_shapes(prefix: str, config: ModelConfig) -> Shapes:
    tables = code_layout(config).tables
    return {name.removeprefix(prefix): (rows, config.hidden_size) for name, rows in tables if name.startswith(prefix)}


# What computes it, in `code_layers.py`, which imports Paddle.


def _build_joined(config: ModelConfig, tp: TensorParallel) -> nn.Layer:
    from erniekit.model.code_layers import CodeTable

    return CodeTable(code_layout(config).rows, config.hidden_size)


def _build_tables(prefix: str, config: ModelConfig, tp: TensorParallel) -> nn.Layer:
    from erniekit.model.code_layers import CodeTables

    return CodeTables([rows for rows, _ in _table_shapes(prefix, config).values()], config.hidden_size)


def _modules(text: Architecture, kind: str) -> DecoderModules:
    from erniekit.model.code_layers import JoinedHeads, LevelHeads

    return text.modules()._replace(head=JoinedHeads if kind == OMNIVOICE else LevelHeads)


def _embed(decoder: Decoder, inputs: Mapping[str, Tensor]) -> Tensor:
    from erniekit.model.code_layers import embed_codes

    return embed_codes(decoder, inputs)


_OF_KIND = {OMNIVOICE: _omnivoice, VALL_E: _vall_e}
KINDS = tuple(_OF_KIND)
