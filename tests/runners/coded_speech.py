"""Recordings of number words as `erniekit codes` leaves them, whose codes can be told from their texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from erniekit.codecs.residual_kmeans import ResidualKMeans, ResidualKMeansConfig
from erniekit.codecs.spectrogram import MelFrames
from erniekit.data.media.code_shards import CodedRecording, write_index, write_shard
from erniekit.data.media.codes_folder import CODEC, CodesFacts, shard_files, write_facts

WORDS = ("one", "two", "three", "four")
LEVELS, CODES, FRAMES_OF_A_WORD = 2, 8, 5


def coded_speech(folder: Path, count: int = 12, *, seed: int = 0, speakers: int = 3, shards: int = 1) -> Path:
    """Write shards of recordings of one to three words, with their index, `codes.json` and the codec."""
    random = np.random.default_rng(seed)
    codec = _codec(np.random.default_rng(99))  # the same for all data
    for name in ("audios", "txts", CODEC):
        (folder / name).mkdir(parents=True)
    codec.save(folder / CODEC)
    samples = [_recording(number, random, codec.frame_rate, speakers) for number in range(count)]
    written = [write_shard(shard_files(folder, number), samples[number::shards], CODES) for number in range(shards)]
    write_index(folder / "data.lst", written)
    seconds = sum(shard.seconds or 0.0 for shard in written)
    sizes = (codec.sampling_rate, codec.frame_rate, LEVELS, CODES)
    write_facts(
        folder, CodesFacts(CODEC, codec.fingerprint, *sizes, {}, complete=True, recordings=count, seconds=seconds)
    )
    return folder


def _codec(random: np.random.Generator) -> ResidualKMeans:
    frames = MelFrames()
    mean = random.standard_normal(frames.mel_bins).astype(np.float32)
    codebooks = random.standard_normal((LEVELS, CODES, frames.mel_bins)).astype(np.float32)
    return ResidualKMeans(ResidualKMeansConfig(frames=frames, levels=LEVELS, codebook_size=CODES), mean, codebooks)


def _recording(number: int, random: np.random.Generator, frame_rate: float, speakers: int) -> CodedRecording:
    said = random.integers(0, len(WORDS), int(random.integers(1, 4)))
    first = np.repeat(said, FRAMES_OF_A_WORD)
    codes = np.stack([first, (first + np.tile(np.arange(FRAMES_OF_A_WORD), len(said))) % CODES])
    frames = codes.shape[1]
    record = {
        "id": f"r{number}",
        "text": " ".join(WORDS[word] for word in said),
        "speaker": f"s{number % speakers}",
        "language": "en",
        "instruct": "calm",
        "num_tokens": frames,
        "audio_duration": round(frames / frame_rate, 3),
    }
    return CodedRecording(f"r{number}", codes, record)
