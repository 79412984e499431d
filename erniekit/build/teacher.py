"""Build the teacher of stage DISTILL, and check that it has the vocabulary of the trained model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.build.checks import compared_config, has_tokenizer
from erniekit.build.vocabulary import run_tokenizer_folder
from erniekit.config import Config
from erniekit.data.tokenizers.files import needs_paddlenlp
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.hub.cache import chosen_hub, find_local_folder
from erniekit.hub.download import find_model_folder, model_folder

if TYPE_CHECKING:
    from erniekit.distributed.mesh import Mesh
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.decoder import Decoder

logger = logging.getLogger(__name__)

PARAMETER = "teacher_model_name_or_path"


def teacher_config(config: Config, model_config: ModelConfig) -> ModelConfig | None:
    """Return the shape of the teacher; None if it is not here yet.

    Raises:
        ModelFileError: the folder is not one of a model.
    """
    name = config.distillation.teacher_model_name_or_path
    return compared_config(config, model_config, PARAMETER, name, "teacher", same_rows=False)


def check_teacher(config: Config, model_config: ModelConfig) -> None:
    """Check the folder of the teacher, and that it has the student's tokens and reads what the student reads.

    Raises:
        ModelFileError: it has not.
        ConfigurationError: a parameter asks for more than a teacher with so many rows of logits gives.
    """
    other = teacher_config(config, model_config)
    if other is None:
        return
    folder = find_local_folder(config.distillation.teacher_model_name_or_path, chosen_hub(config))
    assert folder is not None, "its shape has been read"
    if other.architecture.codes is not None:
        raise ModelFileError(f"{PARAMETER}: {folder} writes codes of speech and no text\n  Write a model of texts.")
    if model_config.architecture.audio is not None and other.architecture.audio is None:
        raise ModelFileError(
            f"{PARAMETER}: {folder} has no audio encoder and the trained model has one\n"
            "  Write a teacher that hears what the student hears."
        )
    own, rows = model_folder(config), (model_config.vocab_size, other.vocab_size)
    k = config.distillation.teacher_top_k
    if k > min(rows):
        raise ConfigurationError(f"teacher_top_k: {k:,} of {min(rows):,} tokens\n  Write at most {min(rows):,}.")
    if needs_paddlenlp(folder) or needs_paddlenlp(own) or not (has_tokenizer(folder) and has_tokenizer(own)):
        check_rows(config, folder, *rows, tokens=None)
        return
    student, teacher = load_tokenizer(run_tokenizer_folder(config, own)), load_tokenizer(folder)
    check_rows(config, folder, *rows, tokens=max(student.vocab_size, teacher.vocab_size))
    different = first_difference(student, teacher)
    if different is not None:
        texts = [tokenizer.decode([different], False) for tokenizer in (student, teacher)]
        raise ModelFileError(
            f"{PARAMETER}: token {different:,} is {texts[1]!r} to {folder} and {texts[0]!r} to the trained model: a "
            "distribution over other tokens teaches nothing\n  Write a teacher with the trained model's tokenizer."
        )


def check_rows(config: Config, folder: Path, student: int, teacher: int, tokens: int | None) -> None:
    """Check that one model has more rows of logits than the other only where no token is, and what then cannot be.

    Args:
        folder: of the teacher.
        student, teacher: their rows of logits.
        tokens: of the larger tokenizer; None: unknown.

    Raises:
        ModelFileError: rows of tokens are missing, or that is unknown.
        ConfigurationError: a parameter needs as many rows in both.
    """
    if student == teacher:
        return
    section, told = config.distillation, f"{folder} has {teacher:,} rows of logits and the trained model {student:,}"
    if tokens is None:
        raise ModelFileError(
            f"{PARAMETER}: {told}, and whether the others are padding is unknown without the tokenizers of both\n"
            "  Put the tokenizer's files into both folders, or write a teacher with as many rows."
        )
    if tokens > min(student, teacher):
        raise ModelFileError(
            f"{PARAMETER}: {told}: their tokenizers, with up to {tokens:,} tokens, differ\n"
            "  Write a teacher with the trained model's tokenizer."
        )
    if config.distributed.tensor_parallel_degree > 1 and not section.teacher_top_k:
        raise ConfigurationError(
            f"tensor_parallel_degree: {told}; ranks that divide them would compare rows of other tokens\n"
            "  Write teacher_top_k: 64, or tensor_parallel_degree: 1, or a teacher with as many rows."
        )
    if teacher > student:
        return
    if section.distill_divergence == "reverse_kl":
        raise ConfigurationError(
            f"distill_divergence: {told}; `reverse_kl` is infinite where the student gives probability to a row that "
            "the teacher lacks\n  Write jsd with jsd_beta close to 1, or a teacher with as many rows."
        )
    if section.on_policy_ratio:
        raise ConfigurationError(
            f"on_policy_ratio: {told}; the student may write a row that the teacher cannot read\n"
            "  Write 0, or a teacher with as many rows."
        )


def first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """Return the first token id that stands for another text in the other tokenizer; None if there is none."""
    if one.fingerprint == other.fingerprint:
        return None
    ids = range(min(one.vocab_size, other.vocab_size))
    return next((each for each in ids if one.decode([each], False) != other.decode([each], False)), None)


def open_teacher(config: Config, mesh: Mesh) -> Decoder:
    """Open the teacher in this process, divided among tensor-parallel ranks as the student is.

    Raises:
        ModelFileError: the folder is not valid.
    """
    from erniekit.build.distributed import model_shard_arguments
    from erniekit.build.model import read_model_config
    from erniekit.build.precision import apply_mixed_precision
    from erniekit.model.builder import build_model
    from erniekit.model.weights import named_weights

    name = config.distillation.teacher_model_name_or_path
    folder = find_model_folder(name, chosen_hub(config), weights=True, parameter=PARAMETER)
    shape = read_model_config(config)
    other = teacher_config(config, shape)
    assert other is not None, "it has been fetched"
    check_teacher(config, shape)
    model = build_model(other, folder, **model_shard_arguments(config, other, mesh))
    apply_mixed_precision(config, model, logging.DEBUG)
    logger.info(f"teacher: {folder}, {sum(weight.size for weight in named_weights(model).values()):,} parameters")
    return model
