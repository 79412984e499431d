"""Open a reward model, and let it score answers: what a run of stage RM leaves, or any of transformers' models for
sequence classification with one label."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from erniekit.build.checks import tokenizer_folder
from erniekit.build.quantization import base_of_adapters
from erniekit.build.reward_models import find_reward_model
from erniekit.data.collate import collate
from erniekit.data.conversation import Conversation
from erniekit.data.formats.registry import FORMATS, parse_record
from erniekit.data.templates.ernie import (
    IGNORE_INDEX,
    Sample,
    Template,
    TemplateRefusedError,
    chat_template,
    join_segments,
    length_to_last_target,
)
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import UserError
from erniekit.export.trained_model import run_parameters
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder
from erniekit.training.objectives.reward_model import scores_at_labels

BATCH_TOKENS = 4096  # of a forward pass, unless a single answer is longer


@dataclass(frozen=True)
class RewardModel:
    """A model that gives the last answer of a dialogue a score, with its tokenizer and chat template."""

    decoder: Decoder
    tokenizer: Tokenizer
    template: Template

    def score(self, dialogues: Sequence[Conversation], where: Sequence[str] = ()) -> np.ndarray:
        """Return the score of the last answer of each dialogue, float64[dialogues].

        It is read behind the last token of the answer, with the end of its turn, as in training.

        Args:
            where: the place of each dialogue, for errors; by default its number from 1.

        Raises:
            UserError: a dialogue cannot be rendered, is longer than the model reads, or gets a score that is not
                finite.
        """
        places = where or [f"dialogue {number}" for number in range(1, len(dialogues) + 1)]
        samples = self._samples(dialogues, places)
        scores = np.full(len(samples), np.nan)
        forward = scores_at_labels()
        with paddle.no_grad():
            for row in _rows(samples):
                batch = collate([[samples[number] for number in row]], [row], self.tokenizer.pad_id)
                scores[row] = forward(self.decoder, batch).values.numpy()
        for place, score in zip(places, scores, strict=True):
            if not np.isfinite(score):
                raise UserError(f"{place}: the reward model gives the score {score}\n  Its weights are damaged.")
        return scores

    def score_messages(self, dialogues: Sequence[Sequence[Mapping[str, Any]]], where: Sequence[str] = ()) -> np.ndarray:
        """Return the score of the last message of each dialogue in OpenAI's form, an assistant's: float64[dialogues].

        Arguments and errors as of `score`; a `MalformedError` says what is wrong with a message.
        """
        form = FORMATS["messages"]
        parsed = [parse_record(form, {"messages": [dict(message) for message in each]}) for each in dialogues]
        return self.score([each for each in parsed if isinstance(each, Conversation)], where)

    def _samples(self, dialogues: Sequence[Conversation], places: Sequence[str]) -> list[Sample]:
        samples = []
        limit = self.decoder.config.max_position_embeddings
        for place, rendered in zip(places, self.template.render_many(dialogues), strict=True):
            if isinstance(rendered, TemplateRefusedError):
                raise UserError(f"{place}: the chat template refuses it: {rendered}")
            encoded = self.tokenizer.encode_batch([segment.text for segment in rendered])
            tokens, targets = join_segments(rendered, encoded, self.template)
            tokens = tokens[: length_to_last_target(targets)]
            if not tokens:
                raise UserError(f"{place}: there is no answer to score\n  A dialogue ends with the assistant's answer.")
            if len(tokens) > limit:
                raise UserError(
                    f"{place}: the dialogue has {len(tokens):,} tokens, more than the model's "
                    f"max_position_embeddings {limit:,}\n  Shorten it."
                )
            labels = np.full(len(tokens), IGNORE_INDEX, np.int32)
            labels[-1] = tokens[-1]
            samples.append(Sample(np.array(tokens, np.int32), labels))
        return samples


def _rows(samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Yield the numbers of the samples that share a row, in order."""
    row: list[int] = []
    filled = 0
    for number, sample in enumerate(samples):
        length = len(sample.input_ids)
        if row and filled + length > BATCH_TOKENS:
            yield row
            row, filled = [], 0
        row.append(number)
        filled += length
    if row:
        yield row


def open_reward_model(path: str | Path, *, ignored_keys: Sequence[str] = ()) -> RewardModel:
    """Open the model in a folder: an `output_dir` or a checkpoint of stage RM, adapters included, or one that
    transformers has saved.

    Args:
        ignored_keys: keys of `config.json` that change nothing (`ignore_config_keys`).

    Raises:
        ModelFileError: there is no such folder, its files are damaged, or the model gives no score.
    """
    folder, adapters, config = find_reward_model(path, ignored_keys)
    tokenizer = load_tokenizer(tokenizer_folder(folder, adapters))
    quantization = base_of_adapters(run_parameters(adapters)) if adapters else None
    decoder = build_model(config, folder, adapters=adapters, quantization=quantization, log_level=logging.DEBUG)
    decoder.eval()
    return RewardModel(decoder, tokenizer, chat_template(tokenizer))
