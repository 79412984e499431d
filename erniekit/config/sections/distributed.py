"""1.4 Distributed training: how ranks share the model, the data and the work of a step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from erniekit.config.parameter import ConfigBuilder, Derived, parameter, rule, section, when
from erniekit.config.sections.distributed_flags import (
    PIPELINE_FLAGS,
    PIPELINE_RULES,
    SHARDING_FLAGS,
    SHARDING_RULES,
    TENSOR_PARALLEL_FLAGS,
    tensor_parallel_flags,
)
from erniekit.config.values import SEGMENTS, WORDS

MOST_RANKS = 2**20  # of a job; no cluster is larger, and every rank is planned
ALL_RANKS = -1  # of `sharding_parallel_degree`
WITH_TP = when("tensor_parallel_degree", above=1)
WITH_PP = when("pipeline_parallel_degree", above=1)
WITH_SHARDING = (when("sharding_parallel_degree", above=1), when("sharding_parallel_degree", ALL_RANKS))


@dataclass(frozen=True)
class DistributedParameters:
    """How the ranks shard the model and share a step. The degrees multiply; data parallelism takes the other ranks."""

    tensor_parallel_degree: int = parameter(
        1,
        "Shard every large matrix into this many slices, one per device. This shards weights, gradients, optimizer "
        "states and most activations, and communicates in every layer. Raise it when the model does not fit into the "
        "memory of one device, and keep the group within one machine.",
        minimum=1,
        maximum=MOST_RANKS,
        unit="ranks",
        example=8,
    )
    tensor_parallel_config: tuple[str, ...] = parameter(
        (),
        "Options of tensor parallelism. `sync_param`, `sync_grad` and `sync_moment` broadcast replicated "
        "parameters, their gradients and their moments within a group, so that they stay equal on all its ranks even "
        "when kernels sum in different orders. `enable_mp_skip_c_identity` avoids a copy of the input of each block. "
        "The other flags have no effect; a message says why.",
        kind=WORDS,
        choices=TENSOR_PARALLEL_FLAGS,
        needs=WITH_TP,
        example="sync_param sync_grad sync_moment",
    )
    tensor_parallel_output: bool = parameter(
        True,
        "Keep the logits sharded by vocabulary and compute the loss from the shards, so that no device ever holds "
        "all logits.",
        needs=WITH_TP,
    )
    sequence_parallel: bool = parameter(
        True,
        "Shard the sequence across the ranks of a tensor-parallel group wherever layers do not need all tokens, so "
        "that activations are stored once instead of once per rank. It is false without tensor parallelism.",
    )
    use_sp_callback: bool = parameter(
        False,
        "Reduce the gradients of parameters that sequence parallelism replicates once per step, after the last "
        "micro-batch, instead of in every backward pass.",
        needs=when("sequence_parallel"),
    )
    pipeline_parallel_degree: int = parameter(
        1,
        "Split the layers into this many consecutive stages, one per device. Micro-batches flow through the stages; "
        "`gradient_accumulation_steps` should be several times the degree, or the stages wait for each other.",
        minimum=1,
        maximum=MOST_RANKS,
        unit="ranks",
        example=2,
    )
    pipeline_parallel_config: tuple[str, ...] = parameter(
        (),
        "Options of pipeline parallelism. `disable_p2p_cache_shape` sends the shape with every tensor. "
        "`disable_partial_send_recv` sends full tensors instead of one slice per tensor-parallel rank. "
        "`disable_batch_p2p_comm` sends tensors one by one instead of in batches; `disable_non_batch_p2p_comm` "
        "requires batches. `enable_overlap_p2p_comm` overlaps communication with computation in interleaved "
        "pipelines, and `best_unbalanced_scheduler` gives them another schedule. `enable_clear_every_step_cache` "
        "clears the cached shapes after each step, `enable_timer` logs the time of every phase, and "
        "`enable_release_grads` sets `release_grads`. The other flags are refused or have no effect; a message says "
        "why.",
        kind=WORDS,
        choices=PIPELINE_FLAGS,
        needs=WITH_PP,
        example="disable_partial_send_recv enable_clear_every_step_cache",
    )
    pp_seg_method: str | tuple[int, ...] = parameter(
        "layer:DecoderLayer",
        "Where the layers are split into stages. `layer:DecoderLayer` gives every stage the same number of decoder "
        "layers (separate several class names by `|`), `uniform` balances the number of all layers (the default does "
        "so, too, where the layers cannot be divided equally, and a message says so), and a list such as "
        "[0, 29, 57] gives the first layer of each stage, or of each model chunk with `virtual_pp_degree`. The last "
        "boundary of a list, the number of layers, is optional.",
        kind=SEGMENTS,
        needs=WITH_PP,
        example=[0, 29, 57],
    )
    virtual_pp_degree: int = parameter(
        1,
        "Give every stage this many smaller model chunks instead of one large one (interleaved pipeline). It "
        "shrinks the pipeline bubble and communicates more.",
        minimum=1,
        maximum=MOST_RANKS,
        needs=WITH_PP,
        example=2,
    )
    add_tail_layers: int = parameter(
        0,
        "Append this many empty layers, so that the number of layers is a multiple of the number of (virtual) stages.",
        minimum=0,
        unit="layers",
        needs=WITH_PP,
        example=3,
    )
    sharding: str = parameter(
        "none",
        "Which tensors a sharding group shards across its ranks: optimizer states (`stage1`), also gradients "
        "(`stage2`), also parameters, frozen ones included (`stage3`). `stage1` works with every other kind of "
        "parallelism, the others with data parallelism only.",
        choices=("none", "stage1", "stage2", "stage3"),
        spellings={"": "none", "null": "none"},
        needs=WITH_SHARDING,
        example="stage1",
    )
    sharding_parallel_degree: int = parameter(
        Derived(
            "-1 where `sharding` is set and `moe_group` is not `data`, else 1",
            lambda builder: _sharding_degree(builder),
            1,
        ),
        "The number of ranks that shard optimizer states, gradients or parameters, as `sharding` says. Each rank "
        "trains on different data. -1 takes all ranks that train on different data, however many are started: the "
        "number of ranks divided by `tensor_parallel_degree` and `pipeline_parallel_degree`. 1 leaves those ranks to "
        "plain data parallelism.",
        minimum=-1,
        maximum=MOST_RANKS,
        unit="ranks",
        example=8,
    )
    sharding_parallel_config: tuple[str, ...] = parameter(
        (),
        "Options of sharding. In `stage1`, `split_param` shards every parameter evenly across the ranks instead of "
        "assigning full parameters to ranks, and `enable_stage1_tensor_fusion` communicates parameters and gradients "
        "in large buffers. `enable_release_grads` sets `release_grads`. The other flags have no effect; a message "
        "says why.",
        kind=WORDS,
        choices=SHARDING_FLAGS,
        needs=WITH_SHARDING,
        example="split_param enable_release_grads",
    )
    moe_group: str = parameter(
        "dummy",
        "Expert parallelism: the group of ranks that the experts of a mixture-of-experts model are distributed over. "
        "With `dummy` every rank has all experts, `mp` is the tensor-parallel group, and `data` (also written `dp`) "
        "are the ranks that train on different data. The number of experts must be a multiple of the number of these "
        "ranks. Routed experts are not sharded; shared experts are sharded like other matrices. It never changes the "
        "loss.",
        choices=("dummy", "mp", "data"),
        spellings={"dp": "data"},
        example="mp",
    )
    distributed_timeout: float = parameter(
        1800.0,
        "How long a rank waits for another rank before it ends the job and reports where the other rank hangs. It "
        "must exceed the longest time that one rank works alone, such as rank 0 while it writes a checkpoint; raise it "
        "when slow but healthy ranks time out.",
        above=0,
        unit="seconds",
        example=600,
    )
    max_restarts: int = parameter(
        0,
        "How often a run restarts after a rank has failed: from its newest complete checkpoint, or from the "
        "beginning when there is none. A run does not restart after an error that the user must correct or after a "
        "signal, nor when another launcher than `erniekit` started the ranks.",
        minimum=0,
        unit="restarts",
        verbs=("train",),
        example=3,
    )


def _sharding_degree(builder: ConfigBuilder) -> tuple[int, str]:
    if builder["sharding"] == "none":
        return 1, ""
    if builder["moe_group"] == "data":
        return 1, "because moe_group: data distributes the experts over the ranks of plain data parallelism"
    return ALL_RANKS, f"all ranks that train on different data, for sharding: {builder['sharding']}"


@rule("sharding_parallel_degree")
def no_degree_of_zero(builder: ConfigBuilder) -> None:
    """`sharding_parallel_degree` is a number of ranks, or -1 for all."""
    if builder["sharding_parallel_degree"] == 0:
        builder.problem("sharding_parallel_degree", "0 ranks cannot share anything", "write 1, more, or -1 for all")


@rule("tensor_parallel_degree", "sequence_parallel")
def sequence_parallel_needs_tensor_parallel(builder: ConfigBuilder) -> None:
    """`sequence_parallel` is false while `tensor_parallel_degree` is 1."""
    if builder["tensor_parallel_degree"] == 1:
        builder.change("sequence_parallel", False, "tensor_parallel_degree is 1")


@rule("pp_seg_method", "pipeline_parallel_degree", "virtual_pp_degree")
def boundaries_are_increasing(builder: ConfigBuilder) -> None:
    """A list in `pp_seg_method` starts at 0, increases, and has one entry for each stage or model chunk."""
    bounds, degree = builder["pp_seg_method"], builder["pipeline_parallel_degree"] * builder["virtual_pp_degree"]
    if not isinstance(bounds, (list, tuple)):
        return
    if bounds[0] != 0 or any(left >= right for left, right in pairwise(bounds)):
        builder.problem("pp_seg_method", "the boundaries must start at 0 and increase", "for example [0, 29, 57]")
    elif builder["pipeline_parallel_degree"] > 1 and len(bounds) not in (degree, degree + 1):
        what = f"{len(bounds)} boundaries do not make {degree} {_chunk_noun(builder)}"
        builder.problem("pp_seg_method", what, f"write the {degree} first layers, and optionally the end")


def _chunk_noun(builder: ConfigBuilder) -> str:
    return "stages" if builder["virtual_pp_degree"] == 1 else "chunks (pipeline_parallel_degree x virtual_pp_degree)"


SECTION = section(
    DistributedParameters,
    key="distributed",
    title="1.4 Distributed training",
    verbs=("train", "eval"),
    rules=(
        sequence_parallel_needs_tensor_parallel,
        tensor_parallel_flags,
        boundaries_are_increasing,
        no_degree_of_zero,
        *PIPELINE_RULES,
        *SHARDING_RULES,
    ),
)
