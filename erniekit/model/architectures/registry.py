"""Every architecture by its `model_type`. To add a family, write its module and list it here."""

from __future__ import annotations

from typing import Any

from erniekit.errors import ModelFileError
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.deepseek_v3 import DEEPSEEK_V3
from erniekit.model.architectures.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from erniekit.model.architectures.gemma3 import GEMMA3_TEXT
from erniekit.model.architectures.glm4 import GLM4
from erniekit.model.architectures.gpt_oss import GPT_OSS
from erniekit.model.architectures.granite import GRANITE
from erniekit.model.architectures.llama import LLAMA
from erniekit.model.architectures.mistral import MISTRAL
from erniekit.model.architectures.mixtral import MIXTRAL
from erniekit.model.architectures.olmo2 import OLMO2
from erniekit.model.architectures.qwen import QWEN2, QWEN3
from erniekit.model.architectures.qwen2_audio import QWEN2_AUDIO
from erniekit.model.architectures.qwen_moe import QWEN2_MOE, QWEN3_MOE
from erniekit.model.architectures.smollm3 import SMOLLM3
from erniekit.model.architectures.voxtral import VOXTRAL

ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture
    for architecture in (
        DEEPSEEK_V3,
        ERNIE4_5,
        ERNIE4_5_MOE,
        GEMMA3_TEXT,
        GLM4,
        GPT_OSS,
        GRANITE,
        LLAMA,
        MISTRAL,
        MIXTRAL,
        OLMO2,
        QWEN2,
        QWEN2_AUDIO,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        SMOLLM3,
        VOXTRAL,
    )
}


def architecture_of(model_type: Any, where: str) -> Architecture:
    """Return the architecture of a `model_type`; `where` heads the error.

    Raises:
        ModelFileError: no architecture has this `model_type`.
    """
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelFileError(f"{where}: model_type {model_type!r} is not supported; supported: {known}")
    return ARCHITECTURES[model_type]
