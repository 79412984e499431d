"""Open the scheduler of a model: which kind of step computes it, and how many key-value blocks there are."""

from __future__ import annotations

from typing import Any

from erniekit.errors import ConfigurationError
from erniekit.export.saved_program import SavedProgram
from erniekit.inference.decoding.blocks import blocks_of
from erniekit.inference.decoding.decoder_step import DecoderStep
from erniekit.inference.decoding.native_step import NativeStep, refusal
from erniekit.inference.decoding.program_step import ProgramStep
from erniekit.inference.decoding.scheduler import MAX_RUNNING, STEP_TOKENS, Scheduler
from erniekit.inference.decoding.step import BLOCK_TOKENS, Step
from erniekit.model.lora.sets import AdapterSets

CACHE_BYTES = 4 << 30  # of keys and values on each rank, unless one request of the longest kind needs more


def open_scheduler(model: Any, *, max_running: int = MAX_RUNNING, adapters: AdapterSets | None = None) -> Scheduler:
    """Return a scheduler without requests.

    Args:
        model: a decoder, a pipeline of its stages, or an exported program.
        max_running: how many requests are computed side by side.
        adapters: the sets of adapters that requests may name; None: they name none.
    """
    step_tokens = max(STEP_TOKENS, max_running)
    blocks = block_count(model)
    return Scheduler(open_step(model, blocks, adapters), blocks, max_running=max_running, step_tokens=step_tokens)


def block_count(model: Any) -> int:
    """Return how many key-value blocks a model gets: the same on every rank.

    They hold at least one request of the longest kind. Memory is taken as they are used.
    """
    config = model.config
    width = config.num_key_value_heads * config.head_dim
    own = getattr(config, "own", {})
    if "kv_lora_rank" in own:  # the cache has keys and values of all heads, not the latents that they are made of
        width = config.num_attention_heads * (own["qk_nope_head_dim"] + config.head_dim)
    if not isinstance(model, SavedProgram):
        width = width // model.tp.size or 1
    block_bytes = 2 * 4 * BLOCK_TOKENS * width * config.num_hidden_layers  # in float32, as an upper bound
    return max(CACHE_BYTES // block_bytes, blocks_of(config.max_position_embeddings))


def open_step(model: Any, blocks: int, adapters: AdapterSets | None = None) -> Step:
    """Return what computes the steps of a model over so many blocks: in one call of our C library where it can."""
    if isinstance(model, SavedProgram):
        if adapters is not None and adapters.names:
            raise ConfigurationError("adapters: an exported program takes none; name the trained model in its place")
        return ProgramStep(model, blocks)
    use = _no_other_set if adapters is None else adapters.use
    return NativeStep(model, use) if refusal(model) is None else DecoderStep(model, blocks, use)


def _no_other_set(name: str) -> None:
    assert not name, "requests name adapters that nobody has loaded"
