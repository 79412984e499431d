"""Write a copy of tied embeddings as the head, in files of families in which transformers 5 ties nothing.

Its Voxtral and Qwen2-Audio have a head of their own whatever `tie_word_embeddings` says, which a file without one
leaves random; transformers 4 ties them and reads either file. `layouts.py` compares a stored copy with the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.plain_decoder import EMBEDDING, HEAD
from erniekit.model.storage.safetensors import StoredTensor


def specs_with_head(specs: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of the files of a model, with the copy right behind its embeddings if they have one."""
    copy, embedding = _names(config)
    if not _has_copy(config):
        return dict(specs)
    return {
        name: spec
        for original, spec in specs.items()
        for name in ([original, copy] if original == embedding else [original])
    }


def contents_with_head(
    contents: Iterable[tuple[str, Iterable[Any]]], config: ModelConfig
) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield the same names and bytes, and those of the copy, in the order of `specs_with_head`. The embeddings are kept
    while they are written."""
    copy, embedding = _names(config)
    for name, blocks in contents:
        if name != embedding or not _has_copy(config):
            yield name, blocks
            continue
        kept = [bytes(block) for block in blocks]
        yield name, kept
        yield copy, kept


def _has_copy(config: ModelConfig) -> bool:
    return config.architecture.stores_tied_head and config.ties_head


def _names(config: ModelConfig) -> tuple[str, str]:
    return config.architecture.file_name(HEAD), config.architecture.file_name(EMBEDDING)
