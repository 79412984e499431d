"""OLMo 2: norms after attention and MLP in place of those before them, and queries and keys normalised as a whole.

Defaults are those of transformers 4.55's configuration class.
"""

from __future__ import annotations

from erniekit.model.architectures.architecture import ATTENTION_LINEARS, Architecture
from erniekit.model.architectures.plain_decoder import (
    ATTENTION,
    ATTENTION_OUTPUT_NORM,
    MLP,
    MLP_OUTPUT_NORM,
    POST_NORMS,
    PROJECTION_QK_NORM,
    decoder_rules,
)
from erniekit.model.architectures.sharding import NORM

NAMES = {ATTENTION_OUTPUT_NORM: "post_attention_layernorm", MLP_OUTPUT_NORM: "post_feedforward_layernorm"}

OLMO2 = Architecture(
    "olmo2",
    "Olmo2ForCausalLM",
    own_fields=("attention_bias",),
    defaults={
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    names=NAMES,
    rules=decoder_rules({**ATTENTION, **PROJECTION_QK_NORM, **MLP, **dict.fromkeys(POST_NORMS, NORM)}, NAMES),
    biases=dict.fromkeys(ATTENTION_LINEARS, "attention_bias"),
    norms=POST_NORMS,
    qk_norm="projection",
)
