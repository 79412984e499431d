"""VALL-E in torch, written down from the documentation: tables and heads around transformers' Llama.

A sequence is `text sep [language sep] level sep [voice [task] sep] response`, each segment with its separator. Its
embeddings are rows of `embed_tokens`, or for a frame the sum of the rows of its codes; level 0 is read causally, the
others both ways if the model says so. A transcript is `response sep [language sep] level sep text`, read causally.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaModel


class Spoken(NamedTuple):
    """What is asked for; `language`: token ids, or none; `voice`: codes [C, P], or None."""

    text: Sequence[int]
    voice: torch.Tensor | None = None
    language: Sequence[int] = ()
    continues: bool = False


class Learnt(NamedTuple):
    """A document to learn from: the response's codes [C, T], of one level; of none: the text is written down."""

    spoken: Spoken
    codes: torch.Tensor
    level: int | None


class Summed(NamedTuple):
    """-log p, summed over the targets of a part of a document: "response", "prompt", "text" or "transcript"."""

    part: str
    level: int
    loss: torch.Tensor
    count: int


class Marks(NamedTuple):
    """Token ids."""

    separator: int
    levels: Sequence[int]
    continuation: int
    text: tuple[int, int]
    language: tuple[int, int]


class Reference:
    """Opens a folder that ERNIEKit wrote.

    Attributes:
        weights: by their names on disk, with gradients.
    """

    def __init__(self, folder: Path, marks: Marks) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.levels, self.codes = config["num_audio_codebook"], config["audio_vocab_size"]
        self.both_ways, self.one_count = config["noncausal_masks"], config["unified_position_ids"]
        self.weights, self.marks = load_file(folder / "model.safetensors"), marks
        llm = {name: value for name, value in config["llm_config"].items() if name not in ("model_type", "torch_dtype")}
        self.model = LlamaModel(LlamaConfig(**llm, attn_implementation="eager")).eval()
        own = {name.removeprefix("model."): value for name, value in self.weights.items() if name.startswith("model.")}
        self.model.load_state_dict(own)
        for value in self.weights.values():
            value.requires_grad_()
        self.weights |= {f"model.{name}": value for name, value in self.model.named_parameters()}

    def logits(self, spoken: Spoken, response: torch.Tensor, level: int) -> torch.Tensor:
        """Return the logits [positions, V] of a level for a response [levels below, T]; for level 0 [1, T]."""
        with torch.no_grad():
            return self._classified(self._hidden(self._segments(spoken, response, level), level == 0), level)

    def speak(self, spoken: Spoken, most: int) -> torch.Tensor:
        """Return the likeliest codes [C, T], at most so many frames."""
        codes = torch.zeros(1, 0, dtype=torch.long)
        while codes.shape[1] < most:
            code = self.logits(spoken, codes, 0)[-1].argmax()
            if code == self.codes:
                break
            codes = torch.cat([codes, code.reshape(1, 1)], dim=1)
        frames = codes.shape[1]
        for level in range(1, self.levels):
            found = self.logits(spoken, codes, level)
            codes = torch.cat([codes, found[len(found) - frames :].argmax(-1)[None]])
        return codes

    def losses(self, learnt: Learnt) -> list[Summed]:
        """Return the losses of a document, those of its text and its prompt only where they are not seen before."""
        spoken, codes, level = learnt
        if level is None:
            return [self._transcript_loss(learnt)]
        segments = self._segments(spoken, codes[: max(1, level)], level)
        hidden = self._hidden(segments, level == 0)
        frames = codes.shape[1]
        if level:
            return [self._summed("response", level, hidden[-frames:], codes[level])]
        ended = torch.cat([codes[0], torch.tensor([self.codes])])
        said = torch.tensor([*spoken.text, self.marks.text[1]])
        found = [
            self._summed("response", 0, hidden[-frames - 1 :], ended),
            self._summed("text", self.levels, hidden[: len(said)], said),
        ]
        if spoken.voice is not None:
            first = sum(map(len, segments[:-2]))
            targets = spoken.voice[0, 1:]
            found.append(self._summed("prompt", 0, hidden[first : first + len(targets)], targets))
        return found

    def _transcript_loss(self, learnt: Learnt) -> Summed:
        spoken, codes, _ = learnt
        frames = self._rows("resps_emb", 0, codes[0])
        for level in range(1, self.levels - 1):
            frames = frames + self._rows("resps_emb", 1 + level, codes[level])
        segments = [self._ended(frames), *self._language(spoken), self._ended(self._tokens([self.marks.levels[0]]))]
        text = [self.marks.text[0], *spoken.text, self.marks.text[1]]
        segments.append(self._tokens(text[:-1]))
        hidden = self._hidden(segments, True)
        return self._summed("transcript", self.levels, hidden[-len(text) :], torch.tensor(text))

    def _segments(self, spoken: Spoken, response: torch.Tensor, level: int) -> list[torch.Tensor]:
        """Return the embeddings of each segment; the response's come last."""
        text = self._tokens([self.marks.text[0], *spoken.text, self.marks.text[1]])
        before = [self._ended(text), *self._language(spoken), self._ended(self._tokens([self.marks.levels[level]]))]
        if spoken.voice is not None:
            frames = sum(self._rows("proms_emb", j, spoken.voice[j]) for j in range(max(1, level)))
            task = self._tokens([self.marks.continuation] if spoken.continues else [])
            before.append(self._ended(torch.cat([frames, task])))
        if level == 0:
            return [*before, self._rows("resps_emb", 0, response[0])]
        return [*before, sum(self._rows("resps_emb", 1 + j, response[j]) for j in range(level))]

    def _language(self, spoken: Spoken) -> list[torch.Tensor]:
        first, last = self.marks.language
        return [self._ended(self._tokens([first, *spoken.language, last]))] if spoken.language else []

    def _ended(self, segment: torch.Tensor) -> torch.Tensor:
        return torch.cat([segment, self._tokens([self.marks.separator])])

    def _hidden(self, segments: Sequence[torch.Tensor], causal: bool) -> torch.Tensor:
        """Return the last hidden states [S, H] of a sequence, after the norm."""
        inputs = torch.cat(list(segments))
        length = len(inputs)
        positions = torch.arange(length)
        if not self.one_count:
            positions = torch.cat([torch.arange(len(segment)) for segment in segments])
        seen = torch.ones(length, length, dtype=torch.bool)
        if causal or not self.both_ways:
            seen = seen.tril()
        mask = torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
        return self.model(
            inputs_embeds=inputs[None], attention_mask=mask[None, None], position_ids=positions[None]
        ).last_hidden_state[0]

    def _classified(self, hidden: torch.Tensor, level: int) -> torch.Tensor:
        """Return the logits of a level; behind the last one those of text."""
        return F.linear(
            hidden, self.weights[f"classifiers.proj.{level}.weight"], self.weights.get(f"classifiers.proj.{level}.bias")
        )

    def _summed(self, part: str, level: int, hidden: torch.Tensor, targets: torch.Tensor) -> Summed:
        loss = F.cross_entropy(self._classified(hidden, level), targets, reduction="sum")
        return Summed(part, level, loss, len(targets))

    def _tokens(self, ids: Sequence[int]) -> torch.Tensor:
        return self.weights["model.embed_tokens.weight"][torch.tensor(ids, dtype=torch.long)]

    def _rows(self, table: str, number: int, codes: torch.Tensor) -> torch.Tensor:
        return self.weights[f"{table}.embeddings.{number}.weight"][codes]
