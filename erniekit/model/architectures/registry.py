"""Every architecture by its `model_type`. To add a family, write its module and list it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from erniekit.errors import ModelFileError
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.config_keys import shown
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
from erniekit.model.architectures.speaking import KINDS, LLM_CONFIG, speaking
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


# A decoder that only stands in a family that speaks: Llama with GELU in place of SiLU, as VALL-E's.
GELU_LLAMA = replace(
    LLAMA,
    name="llama_gelu",
    neutral={**LLAMA.neutral, "hidden_act": ("gelu",)},
    saved_keys={"hidden_act": "gelu"},
    activation="geglu",
    paddle_files=None,
)


def architecture_named(key: str) -> Architecture:
    """Return the architecture that `ModelConfig.model_type` names: a key of `ARCHITECTURES`, or the kind of a family
    that speaks and its decoder's, such as "omnivoice:qwen3"."""
    return ARCHITECTURES[key] if key in ARCHITECTURES else _speaking(*key.split(":"))


@cache
def _speaking(kind: str, text: str) -> Architecture:
    return speaking(kind, GELU_LLAMA if text == GELU_LLAMA.key else ARCHITECTURES[text])


def around(kind: str, text: Architecture) -> Architecture:
    """Return the family that speaks of a kind of `speaking.KINDS` around this decoder."""
    return architecture_named(f"{kind}:{text.key}")


def architecture_of(values: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture of the keys of a `config.json`; `where` heads the error.

    Raises:
        ModelFileError: no architecture has this `model_type`.
    """
    model_type = values.get("model_type")
    if model_type in KINDS:
        return around(str(model_type), _text_architecture(values.get(LLM_CONFIG), where))
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join((*ARCHITECTURES, *KINDS))
        raise ModelFileError(f"{where}: model_type {model_type!r} is not supported; supported: {known}")
    return ARCHITECTURES[model_type]


def _text_architecture(values: Any, where: str) -> Architecture:
    """Return the architecture of the dictionary `llm_config`."""
    if not isinstance(values, dict):
        raise ModelFileError(f"{where}: {LLM_CONFIG}: expected the keys of a decoder, got {shown(values)}")
    found = ARCHITECTURES.get(str(values.get("model_type")))
    if found is None or found.text is not None:
        known = ", ".join(name for name, each in ARCHITECTURES.items() if each.text is None)
        raise ModelFileError(
            f"{where}: {LLM_CONFIG}.model_type {shown(values.get('model_type'))} is not supported; supported: {known}"
        )
    return GELU_LLAMA if found is LLAMA and values.get("hidden_act") == "gelu" else found
