"""VALL-E in torch, written down from the documentation: tables and heads around transformers' Llama.

A sequence is `text sep [language sep] level sep [voice [task] sep] response`, each segment with its separator. Its
embeddings are rows of `embed_tokens`, or for a frame the sum of the rows of its codes; level 0 is read causally, the
others both ways if the model says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaModel


class Spoken(NamedTuple):
    """What is asked for; `language`: token ids, or none; `voice`: codes [C, P], or None."""

    text: Sequence[int]
    voice: torch.Tensor | None = None
    language: Sequence[int] = ()
    continues: bool = False


class Marks(NamedTuple):
    """Token ids."""

    separator: int
    levels: Sequence[int]
    continuation: int
    text: tuple[int, int]
    language: tuple[int, int]


class Reference:
    """Opens a folder that ERNIEKit wrote."""

    def __init__(self, folder: Path, marks: Marks) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.levels, self.codes = config["num_audio_codebook"], config["audio_vocab_size"]
        self.both_ways, self.one_count = config["noncausal_masks"], config["unified_position_ids"]
        self.weights, self.marks = load_file(folder / "model.safetensors"), marks
        llm = {name: value for name, value in config["llm_config"].items() if name not in ("model_type", "torch_dtype")}
        self.model = LlamaModel(LlamaConfig(**llm, attn_implementation="eager")).eval()
        own = {name.removeprefix("model."): value for name, value in self.weights.items() if name.startswith("model.")}
        self.model.load_state_dict(own)

    def logits(self, spoken: Spoken, response: torch.Tensor, level: int) -> torch.Tensor:
        """Return the logits [positions, V] of a level for a response [levels below, T]; for level 0 [1, T]."""
        segments = [self._tokens([self.marks.text[0], *spoken.text, self.marks.text[1]])]
        if spoken.language:
            segments.append(self._tokens([self.marks.language[0], *spoken.language, self.marks.language[1]]))
        segments.append(self._tokens([self.marks.levels[level]]))
        if spoken.voice is not None:
            frames = sum(self._rows("proms_emb", j, spoken.voice[j]) for j in range(max(1, level)))
            task = self._tokens([self.marks.continuation] if spoken.continues else [])
            segments.append(torch.cat([frames, task]))
        separator = self._tokens([self.marks.separator])
        segments = [torch.cat([segment, separator]) for segment in segments]
        if level == 0:
            segments.append(self._rows("resps_emb", 0, response[0]))
        else:
            segments.append(sum(self._rows("resps_emb", 1 + j, response[j]) for j in range(level)))
        inputs = torch.cat(segments)
        length = len(inputs)
        positions = torch.arange(length)
        if not self.one_count:
            positions = torch.cat([torch.arange(len(segment)) for segment in segments])
        seen = torch.ones(length, length, dtype=torch.bool)
        if level == 0 or not self.both_ways:
            seen = seen.tril()
        mask = torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.no_grad():
            hidden = self.model(
                inputs_embeds=inputs[None], attention_mask=mask[None, None], position_ids=positions[None]
            ).last_hidden_state[0]
        logits = hidden @ self.weights[f"classifiers.proj.{level}.weight"].T
        bias = self.weights.get(f"classifiers.proj.{level}.bias")
        return logits if bias is None else logits + bias

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

    def _tokens(self, ids: Sequence[int]) -> torch.Tensor:
        return self.weights["model.embed_tokens.weight"][torch.tensor(ids, dtype=torch.long)]

    def _rows(self, table: str, number: int, codes: torch.Tensor) -> torch.Tensor:
        return self.weights[f"{table}.embeddings.{number}.weight"][codes]
