"""1.5 Memory: trading time for memory."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, renamed, rule, section, when


@dataclass(frozen=True)
class MemoryParameters:
    """Recomputation, fused losses and offloading: parameters that save memory."""

    release_grads: bool = parameter(
        False,
        "Free the memory of gradients after every optimizer step instead of keeping it for the next one.",
    )
    use_sparse_head_and_loss_fn: bool = parameter(
        False,
        "Compute the head and the loss only at the positions that have a label. Loss and gradients stay the same; "
        "memory and time of the logits are proportional to the share of trained tokens.",
    )
    use_fused_head_and_loss_fn: bool = parameter(
        False,
        "Compute head and loss together for one chunk of the sequence at a time, so that the logits of a long pack are "
        "never in memory at once. Loss and gradients stay the same.",
    )
    use_attn_mask_startend_row_indices: bool = parameter(
        True,
        "Describe by a few row indices per token (FlashMask), instead of a matrix, which tokens attend to each other. "
        "When false a dense mask is built from the same indices, whose size grows with the square of `max_seq_len`. "
        "Its size is logged at the start, and the run is refused if the mask exceeds the available memory.",
    )
    recompute: bool = parameter(
        False,
        "Keep only the input of each layer in the forward pass and compute the rest again in the backward pass. It "
        "saves most of the activation memory; a step takes at most a third longer, and took 1.09 to 1.13 times as long "
        "where docs/memory.md measured it. Losses and gradients stay the same. The layers of an audio encoder are "
        "computed again as a whole, whatever `recompute_granularity` and `no_recompute_layers` say of the decoder's; "
        "frozen layers that keep nothing run once.",
        example=True,
    )
    recompute_granularity: str = parameter(
        "full",
        "How much of a layer is computed again: all of it (`full`), the attention block (`full_attn`), or the "
        "attention product alone (`core_attn`, which keeps queries, keys and values). Recomputing less is "
        "faster and takes more memory. Losses and gradients stay the same.",
        choices=("full", "full_attn", "core_attn"),
        needs=when("recompute"),
    )
    recompute_use_reentrant: bool = parameter(
        False,
        "Which of Paddle's two recomputation mechanisms is used: its PyLayer when true, hooks on saved tensors "
        "when false.",
        needs=when("recompute"),
    )
    no_recompute_layers: int = parameter(
        0,
        "Do not recompute the first this many layers. Each one saves time and takes the memory of its activations.",
        minimum=0,
        unit="layers",
        needs=when("recompute"),
        example=4,
    )
    offload_optim: bool = parameter(
        False,
        "Offload AdamW's moments, and its float32 copies of 16-bit weights, from the device: into pinned host memory "
        "with a GPU, on a CPU into a memory-mapped file in `output_dir`, whose memory the system can reclaim. The "
        "optimizer step loads one tensor after another. With `sharding` each rank offloads its shard. Losses stay the "
        "same.",
        example=True,
    )


@rule("offload_optim", "tensorwise_offload_optimizer", verbs=("train",))
def states_are_offloaded_once(builder: ConfigBuilder) -> None:
    """`offload_optim` adds nothing to `tensorwise_offload_optimizer`."""
    if builder.differs("offload_optim") and builder["tensorwise_offload_optimizer"]:
        builder.no_effect("offload_optim", "because tensorwise_offload_optimizer offloads the same states already")


@rule("optim", "offload_optim", "tensorwise_offload_optimizer", "use_lowprecision_moment", verbs=("train",))
def stored_moments_need_their_optimizer(builder: ConfigBuilder) -> None:
    """`optim: adamw` has no effect where moments are offloaded or stored in bfloat16: `adamw_custom` does that."""
    names = ("offload_optim", "tensorwise_offload_optimizer", "use_lowprecision_moment")
    stored = [name for name in names if builder[name]]
    if builder.is_set("optim") and builder["optim"] == "adamw" and stored and builder["do_train"]:
        builder.no_effect("optim", f"because {stored[0]} is true, which adamw_custom does; it runs instead")


SECTION = section(
    MemoryParameters,
    key="memory",
    title="1.5 Memory",
    verbs=("train",),
    rules=(states_are_offloaded_once, stored_moments_need_their_optimizer),
    aliases=(
        renamed(
            "use_attn_mask_start_row_indices",
            "use_attn_mask_startend_row_indices",
            "The former name of `use_attn_mask_startend_row_indices`.",
        ),
    ),
)
