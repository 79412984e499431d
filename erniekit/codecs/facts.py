"""What a codec's `config.json` says of its codes, without opening the codec. Needs neither Paddle nor NumPy.

A test compares it with what each kind of codec says once it is open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from erniekit.codecs.config_values import config_reader
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.json_files import read_json_object

Read = Callable[[str, Any], Any]


class CodeFacts(NamedTuple):
    """The codes of a codec; attributes as of `Codec`."""

    levels: int
    codebook_size: int
    frame_rate: float
    sampling_rate: int


def code_facts(folder: Path, levels: int | None = None) -> CodeFacts:
    """Return what the codec in a folder makes of sound.

    Args:
        levels: use so many codebooks, from the coarsest. None: all that the codec has.

    Raises:
        ModelFileError: there is no codec, or a value of its `config.json` has another type.
        ConfigurationError: it has fewer levels, or its codes cannot become sound.
    """
    if not folder.is_dir():
        raise ModelFileError(f"{folder}: no such folder. A codec is a folder with config.json and model.safetensors")
    path = folder / "config.json"
    values = read_json_object(path)
    kind = values.get("model_type")
    if kind == "kmeans":
        raise ConfigurationError(f"{folder}: units of k-means cannot become sound, so a model of them could not speak")
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise ModelFileError(f"{path}: model_type is {kind!r:.80}, which is no codec of sound; such are {known}")
    facts = _READERS[kind](path, values)
    if levels is not None and not 1 <= levels <= facts.levels:
        raise ConfigurationError(f"{levels} levels: {folder} has {facts.levels}; choose from 1 to that")
    return facts if levels is None else facts._replace(levels=levels)


def _encodec(path: Path, values: Mapping[str, Any]) -> CodeFacts:
    read = config_reader(path, values)
    rate, hop = read("sampling_rate", 24_000), math.prod(read("upsampling_ratios", (8, 5, 4, 2)))
    size, bandwidths = read("codebook_size", 1024), read("target_bandwidths", (1.5, 3.0, 6.0, 12.0, 24.0))
    levels = int(1000 * bandwidths[-1] // (math.ceil(rate / hop) * math.ceil(math.log2(size))))
    chunk, overlap = int(read("chunk_length_s", 0.0) * rate), read("overlap", 0.0)
    stride = max(1, int((1.0 - overlap) * chunk))
    return CodeFacts(levels, size, rate * math.ceil(chunk / hop) / stride if chunk else rate / hop, rate)


def _dac(path: Path, values: Mapping[str, Any]) -> CodeFacts:
    read = config_reader(path, values)
    rate, hop = read("sampling_rate", 16_000), math.prod(read("downsampling_ratios", (2, 4, 8, 8)))
    return CodeFacts(read("n_codebooks", 9), read("codebook_size", 1024), rate / hop, rate)


def _mimi(path: Path, values: Mapping[str, Any]) -> CodeFacts:
    read = config_reader(path, values)
    rate, hop = read("sampling_rate", 24_000), 2 * math.prod(read("upsampling_ratios", (8, 6, 5, 4)))
    return CodeFacts(read("num_quantizers", 32), read("codebook_size", 2048), read("frame_rate", rate / hop), rate)


def _higgs(path: Path, values: Mapping[str, Any]) -> CodeFacts:
    read, acoustic = config_reader(path, values), values.get("acoustic_model_config")
    of_dac = config_reader(path, acoustic if isinstance(acoustic, dict) else {})
    rate, hop = read("sample_rate", 24_000), math.prod(of_dac("downsampling_ratios", (8, 5, 4, 2)))
    size, bandwidth = read("codebook_size", 1024), read("target_bandwidths", (0.5, 1.0, 1.5, 2.0, 4.0))[-1]
    frames = math.ceil(rate / hop)
    levels = int(1000 * bandwidth // (frames * math.ceil(math.log2(size))))
    used = math.floor(bandwidth / (math.log2(size) * frames / 1000))
    return CodeFacts(min(levels, max(1, used)), size, rate / hop, rate)


def _residual_kmeans(path: Path, values: Mapping[str, Any]) -> CodeFacts:
    read, frames = config_reader(path, values), values.get("frames")
    of_frames = config_reader(path, frames if isinstance(frames, dict) else {})
    rate = of_frames("sampling_rate", 16_000)
    return CodeFacts(read("levels", 4), read("codebook_size", 256), rate / of_frames("hop_length", 160), rate)


_READERS: Mapping[str, Callable[[Path, Mapping[str, Any]], CodeFacts]] = {
    "encodec": _encodec,
    "dac": _dac,
    "mimi": _mimi,
    "higgs_audio_v2_tokenizer": _higgs,
    "residual_kmeans": _residual_kmeans,
}
