"""Save a decoder as a static program with a key-value cache, run it, and check it against the trained model.

The program runs on Paddle's inference engine and is also the source of ONNX. It serves both prefill and decoding. It
takes S new tokens per row behind P cached ones, for any B, S and P (also 0):

    input_ids       int64 [B, S]         the new tokens
    position_ids    int64 [B, S]         their positions in the text, from 0
    attention_mask  int64 [B, P + S]     1 for tokens, 0 for padding, cached ones first
    last_positions  int64 [B]            the token of each row, of S, whose logits are returned
    past_key_<layer>, past_value_<layer> float32 [B, K, P, D]

It returns logits [B, V], then key and value of every layer [B, K, P + S, D], the past of the next call. Padding may be
anywhere as long as the mask marks it; a new token attends to all earlier tokens that are not padding.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.static import InputSpec

from erniekit.errors import ModelFileError
from erniekit.export.logit_difference import LogitDifference, compare
from erniekit.manifest import refuse_changed
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.attention_plan import MASKED
from erniekit.model.decoder import Decoder
from erniekit.model.storage.model_folder import PROGRAM_DESCRIPTION

PROGRAM_FILE, PARAMETERS_FILE = "model.json", "model.pdiparams"
TOKEN_INPUTS = ("input_ids", "position_ids", "attention_mask", "last_positions")

Arrays = Sequence[np.ndarray]
Step = Callable[[Arrays], list[np.ndarray]]  # the program's inputs -> its outputs, in the order above


@dataclass(frozen=True)
class ProgramDescription:
    """The facts about a saved program that its caller needs in addition to the order of inputs and outputs."""

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int

    @classmethod
    def of(cls, config: ModelConfig) -> ProgramDescription:
        values = {name: getattr(config, name) for name in cls.__dataclass_fields__}
        return cls(**{**values, "head_dim": config.architecture.qk_head_dim(config)})

    @classmethod
    def read(cls, folder: Path) -> ProgramDescription:
        """Read the description in `folder`. Raises ModelFileError if there is none or it is malformed."""
        path = folder / PROGRAM_DESCRIPTION
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{name: int(stored[name]) for name in cls.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelFileError(f"{path}: not the description of a saved program: {error}") from None

    def write(self, folder: Path) -> None:
        content = {**asdict(self), "inputs": self.input_names()}
        (folder / PROGRAM_DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def input_names(self) -> list[str]:
        past = [f"past_{kind}_{layer}" for layer in range(self.num_hidden_layers) for kind in ("key", "value")]
        return [*TOKEN_INPUTS, *past]

    def empty_past(self, batch: int) -> list[np.ndarray]:
        shape = (batch, self.num_key_value_heads, 0, self.head_dim)
        return [np.zeros(shape, np.float32) for _ in range(2 * self.num_hidden_layers)]


class StaticKeyValueCache:
    """Attention of new tokens to cached ones and to each other; replaces an `AttentionPlan` in a program."""

    def __init__(self, mask: paddle.Tensor, past: Sequence[paddle.Tensor]) -> None:
        """Args:
        mask: additive, [B, 1, 1, S, P + S].
        past: key and value of every layer, [B, K, P, D] each.
        """
        self._mask, self._past = mask, past
        self.present: list[paddle.Tensor] = []

    def attend(
        self,
        q_BSHD: paddle.Tensor,
        k_BSKD: paddle.Tensor,
        v_BSKD: paddle.Tensor,
        *,
        layer: int,
        dropout: float,
        key: Sequence[int],
        window: int | None = None,
        sinks_H: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        assert window is None and sinks_H is None, "save_program refuses windows and sinks"
        assert dropout == 0.0, "programs are saved in evaluation mode"
        k, v = (
            paddle.concat([past, new.transpose([0, 2, 1, 3])], axis=2)
            for past, new in ((self._past[2 * layer], k_BSKD), (self._past[2 * layer + 1], v_BSKD))
        )
        self.present += [k, v]
        batch, length, heads, head_dim = q_BSHD.shape
        key_heads = k_BSKD.shape[2]
        q = (q_BSHD * head_dim**-0.5).reshape([batch, length, key_heads, heads // key_heads, head_dim])
        scores = paddle.matmul(q.transpose([0, 2, 3, 1, 4]), k.unsqueeze(2), transpose_y=True) + self._mask
        out = paddle.matmul(F.softmax(scores), v.unsqueeze(2))
        return out.transpose([0, 3, 1, 2, 4]).reshape([batch, length, heads, head_dim])


class Program(nn.Layer):
    """The layer that is recorded as a program; inputs and outputs are those of the module docstring."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids, position_ids, attention_mask, last_positions, past):  # type: ignore[no-untyped-def]
        length, slots = input_ids.shape[1], attention_mask.shape[1]
        queries = paddle.arange(slots - length, slots).unsqueeze(1)
        seen = (paddle.arange(slots).unsqueeze(0) <= queries).unsqueeze(0) & (attention_mask > 0).unsqueeze(1)
        mask = paddle.where(seen, paddle.zeros([1]), paddle.full([1], MASKED)).unsqueeze(1).unsqueeze(1)
        cache = StaticKeyValueCache(mask, past)
        hidden = self.decoder(input_ids, position_ids, cache)
        rows = paddle.arange(input_ids.shape[0]) * length + last_positions
        last = paddle.gather(hidden.reshape([-1, self.decoder.config.hidden_size]), rows)
        return [self.decoder.head(last), *cache.present]


def save_program(decoder: Decoder, folder: Path) -> None:
    """Write `model.json`, `model.pdiparams`, and `inference_config.json` with what a caller must know."""
    _refuse_missing_features(decoder.config)
    decoder.eval()
    description = ProgramDescription.of(decoder.config)
    names = description.input_names()
    tokens = [InputSpec([None, None], "int64", name) for name in names[:3]] + [InputSpec([None], "int64", names[3])]
    shape = [None, description.num_key_value_heads, None, description.head_dim]
    past = [InputSpec(shape, "float32", name) for name in names[len(TOKEN_INPUTS) :]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about in-place operations does not apply to a program
        recorded = paddle.jit.to_static(Program(decoder), input_spec=[*tokens, past], full_graph=True)
        paddle.jit.save(recorded, str(folder / PROGRAM_FILE.removesuffix(".json")))
    description.write(folder)


def _refuse_missing_features(config: ModelConfig) -> None:
    if config.architecture.codes is not None:
        raise ModelFileError(
            f"{config.model_type}: it writes codes, and a saved program writes text only.\n  Export the model as "
            "Hugging Face files instead."
        )
    if config.architecture.towers:
        raise ModelFileError(
            f"{config.model_type}: an encoder stands in front of the decoder, which a saved program cannot compute yet."
            "\n  Export the model as Hugging Face files instead."
        )
    if config.architecture.attention_sinks:
        raise ModelFileError(
            f"{config.model_type}: attention has sinks, which a saved program cannot compute yet.\n  Export the model "
            "as Hugging Face files instead."
        )
    for window in config.windows:
        raise ModelFileError(
            f"{config.model_type}: layers attend to the last {window:,} positions only (sliding_window), which a saved "
            "program cannot compute yet.\n  Export the model as Hugging Face files instead."
        )


def open_program(folder: Path) -> Step:
    """Open a saved program in Paddle's inference engine.

    Raises:
        ModelFileError: `folder` has no saved program, only half of one, or one that has changed since.
    """
    from paddle import inference

    program, parameters = folder / PROGRAM_FILE, folder / PARAMETERS_FILE
    if not program.is_file() or not parameters.is_file():
        raise ModelFileError(f"{folder}: {PROGRAM_FILE} or {PARAMETERS_FILE} is missing; export the model again")
    refuse_changed(folder, [PROGRAM_FILE, PARAMETERS_FILE])
    names = ProgramDescription.read(folder).input_names()
    settings = inference.Config(str(program), str(parameters))
    settings.disable_glog_info()
    try:
        predictor = inference.create_predictor(settings)
    except (RuntimeError, ValueError) as error:  # saving does not notice a full disk
        reason = str(error).strip().splitlines()[-1].strip()
        raise ModelFileError(f"{folder}: the program cannot be opened; is the disk full? ({reason})") from None

    def step(arrays: Arrays) -> list[np.ndarray]:
        for name, values in zip(names, arrays, strict=True):
            handle = predictor.get_input_handle(name)
            handle.reshape(values.shape)
            handle.copy_from_cpu(np.ascontiguousarray(values))
        predictor.run()
        return [predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names()]

    return step


def prefill(step: Step, description: ProgramDescription, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Run the program on prompts of any lengths; return the logits after each prompt's last token, then the past."""
    lengths = np.array([len(prompt) for prompt in prompts])
    ids = np.zeros((len(prompts), lengths.max()), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    mask = (positions < lengths[:, None]).astype(np.int64)
    return step([ids, positions, mask, lengths - 1, *description.empty_past(len(prompts))])


def generate_greedily(
    step: Step,
    description: ProgramDescription,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
) -> list[list[int]]:
    """Return the most likely continuation of every prompt, without its stop token. Shows how to use a program."""
    lengths = np.array([len(prompt) for prompt in prompts])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    zeros, ones = np.zeros(len(prompts), np.int64), np.ones((len(prompts), 1), np.int64)
    answers: list[list[int]] = [[] for _ in prompts]
    ended = np.zeros(len(prompts), bool)
    logits, *past = prefill(step, description, prompts)
    for number in range(max_new_tokens):
        tokens = logits.argmax(-1)
        ended |= np.isin(tokens, list(stop_token_ids)) | (lengths + number >= description.max_position_embeddings)
        if ended.all():
            break
        for row in np.flatnonzero(~ended):
            answers[row].append(int(tokens[row]))
        mask = np.concatenate([mask, ones], axis=1)
        logits, *past = step([tokens[:, None], (lengths + number)[:, None], mask, zeros, *past])
    return answers


TOLERANCE = 1e-3  # of the largest logit; a program that rounds differently stays far below


def write_program(
    decoder: Decoder, folder: Path, prompts: Sequence[Sequence[int]], expected: Sequence[np.ndarray]
) -> LogitDifference:
    """Save the program and run it from its files.

    Args:
        expected: the trained model's logits after every token of each prompt, each float32 [tokens, V].

    Raises:
        ModelFileError: the program computes other logits.
    """
    save_program(decoder, folder)
    return check_program(open_program(folder), ProgramDescription.read(folder), prompts, expected)


def check_program(
    step: Step, description: ProgramDescription, prompts: Sequence[Sequence[int]], expected: Sequence[np.ndarray]
) -> LogitDifference:
    """Compare a program's logits with the trained model's, for a batch of prompts and for one prompt fed token by
    token.

    Raises:
        ModelFileError: they differ by more than rounding explains.
    """
    last = prefill(step, description, prompts)[0]
    pairs = [(logits[-1:], row[None]) for logits, row in zip(expected, last, strict=True)]
    prompt, logits = max(zip(prompts, expected, strict=True), key=lambda pair: len(pair[0]))
    pairs.append((logits[: len(prompt)], np.concatenate(list(_token_by_token(step, description, prompt)))))
    difference = compare([theirs for theirs, _ in pairs], [ours for _, ours in pairs])
    if difference.largest > TOLERANCE * max(1.0, difference.largest_logit) or not np.isfinite(difference.largest):
        raise ModelFileError(
            f"the saved program computes other logits than the model: {difference}.\n"
            "  Nothing was exported. This is a defect of the exporter or of the engine; please report it."
        )
    return difference


def _token_by_token(step: Step, description: ProgramDescription, prompt: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the logits [1, V] after each token of a prompt, fed one token at a time."""
    past = description.empty_past(1)
    zero = np.zeros(1, np.int64)
    for position, token in enumerate(prompt):
        ids, positions = np.array([[token]], np.int64), np.array([[position]], np.int64)
        logits, *past = step([ids, positions, np.ones((1, position + 1), np.int64), zero, *past])
        yield logits
