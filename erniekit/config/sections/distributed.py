"""1.4 Distributed training: how the work is divided between devices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section, when
from erniekit.config.sections.distributed_flags import (
    PIPELINE_FLAGS,
    PIPELINE_RULES,
    SHARDING_FLAGS,
    SHARDING_RULES,
    TENSOR_PARALLEL_FLAGS,
    tensor_parallel_flags,
)
from erniekit.config.values import SEGMENTS, WORDS

WITH_TP = when("tensor_parallel_degree", above=1)
WITH_PP = when("pipeline_parallel_degree", above=1)
WITH_SHARDING = when("sharding_parallel_degree", above=1)


@dataclass(frozen=True)
class DistributedParameters:
    """How one model and one step are divided between devices. The degrees multiply; data parallelism takes the rest."""

    tensor_parallel_degree: int = parameter(
        1,
        "Cut every large matrix into this many slices, one per device. It divides weights, gradients, optimizer "
        "states and much of the activations, at the price of communication in every layer.",
        minimum=1,
        unit="ranks",
        example=8,
    )
    tensor_parallel_config: tuple[str, ...] = parameter(
        (),
        "Options of tensor parallelism. `sync_param`, `sync_grad` and `sync_moment` keep the copies of parameters "
        "that are not cut, their gradients and their moments equal on all ranks of a group, should their kernels add "
        "in different orders. `enable_mp_skip_c_identity` saves a copy of what enters each block. The other words are "
        "reported with the reason why they change nothing.",
        kind=WORDS,
        choices=TENSOR_PARALLEL_FLAGS,
        needs=WITH_TP,
        example="sync_param sync_grad sync_moment",
    )
    tensor_parallel_output: bool = parameter(
        True,
        "Leave the logits cut by vocabulary and compute the loss from the slices, so that no device ever holds "
        "them whole.",
        needs=WITH_TP,
    )
    sequence_parallel: bool = parameter(
        True,
        "Divide the sequence between the ranks of a tensor-parallel group wherever the layers do not need it "
        "whole, so that activations are stored once instead of once per rank. Without tensor parallelism it is "
        "false.",
    )
    use_sp_callback: bool = parameter(
        False,
        "Add up the gradients of parameters that sequence parallelism keeps on all ranks once a step, after the last "
        "micro-batch, instead of during every backward pass.",
        needs=when("sequence_parallel"),
    )
    pipeline_parallel_degree: int = parameter(
        1,
        "Cut the stack of layers into this many consecutive stages, one per device. Micro-batches flow through the "
        "stages; `gradient_accumulation_steps` should be several times the degree.",
        minimum=1,
        unit="ranks",
        example=2,
    )
    pipeline_parallel_config: tuple[str, ...] = parameter(
        (),
        "Options of pipeline parallelism. How stages exchange tensors: with their shapes each time "
        "(`disable_p2p_cache_shape`), whole instead of in parts (`disable_partial_send_recv`), one by one "
        "(`disable_batch_p2p_comm`) instead of together, as `disable_non_batch_p2p_comm` insists on, and beside "
        "computation in interleaved pipelines (`enable_overlap_p2p_comm`). `best_unbalanced_scheduler` chooses another "
        "order for these, `enable_clear_every_step_cache` forgets exchanged shapes after each step, `enable_timer` "
        "logs the time of every phase, `enable_release_grads` stands for `release_grads`. The other words are refused "
        "or reported, with the reason.",
        kind=WORDS,
        choices=PIPELINE_FLAGS,
        needs=WITH_PP,
        example="disable_partial_send_recv enable_clear_every_step_cache",
    )
    pp_seg_method: str | tuple[int, ...] = parameter(
        "layer:DecoderLayer",
        "Where the stack is cut. `layer:DecoderLayer` gives every stage the same number of decoder layers (several "
        "class names are separated by `|`), `uniform` counts all layers alike, and a list such as [0, 29, 57] "
        "names the first layer of each stage (of each run, with `virtual_pp_degree`); the end may be left out.",
        kind=SEGMENTS,
        needs=WITH_PP,
        example=[0, 29, 57],
    )
    virtual_pp_degree: int = parameter(
        1,
        "Give every stage this many shorter runs of layers instead of one long one (interleaved pipeline). It "
        "shortens the time in which stages wait, and communicates more.",
        minimum=1,
        needs=WITH_PP,
        example=2,
    )
    add_tail_layers: int = parameter(
        0,
        "Append this many empty layers, so that the number of layers can be divided by the number of (virtual) stages.",
        minimum=0,
        unit="layers",
        needs=WITH_PP,
        example=3,
    )
    sharding: str = parameter(
        "none",
        "What the ranks of a sharding group divide between them instead of each keeping all of it: optimizer states "
        "(`stage1`), gradients too (`stage2`), parameters too (`stage3`, frozen ones as well). `stage1` goes with "
        "every other kind of parallelism, the others with data parallelism.",
        choices=("none", "stage1", "stage2", "stage3"),
        spellings={"": "none", "null": "none"},
        needs=WITH_SHARDING,
        example="stage1",
    )
    sharding_parallel_degree: int = parameter(
        1,
        "The number of ranks that divide optimizer states, gradients or parameters between them. Each works on its "
        "own data.",
        minimum=1,
        unit="ranks",
        example=8,
    )
    sharding_parallel_config: tuple[str, ...] = parameter(
        (),
        "Options of sharding. In `stage1`, `split_param` splits single parameters evenly between ranks, instead of "
        "giving whole ones to each, and `enable_stage1_tensor_fusion` exchanges them in large pieces. "
        "`enable_release_grads` stands for `release_grads`. The other words are reported with the reason why they "
        "change nothing.",
        kind=WORDS,
        choices=SHARDING_FLAGS,
        needs=WITH_SHARDING,
        example="split_param enable_release_grads",
    )
    moe_group: str = parameter(
        "dummy",
        "Which ranks divide the experts of a mixture-of-experts model: none (`dummy`, every rank holds all "
        "experts), the tensor-parallel group (`mp`), or the ranks that work on different data (`data`, also "
        "written `dp`). Their number must divide the number of experts. A routed expert stays whole; shared experts "
        "are cut as other matrices are. It never changes the loss.",
        choices=("dummy", "mp", "data"),
        spellings={"dp": "data"},
        example="mp",
    )
    distributed_timeout: float = parameter(
        1800.0,
        "How long a rank waits for another one before it takes it for lost. A slower rank is no fault; one that hangs "
        "longer ends the job, which shows where it hangs. It must exceed the longest time that one rank works alone, "
        "such as rank 0 while it writes a checkpoint.",
        above=0,
        unit="seconds",
        example=600,
    )
    max_restarts: int = parameter(
        0,
        "How often a run is started again when it fails, on one rank or several: from the newest complete checkpoint "
        "that it has written, or from its beginning where there is none. What the user can mend, and a run that a "
        "signal has stopped, is not started again; nor are ranks that another launcher than `erniekit` has started.",
        minimum=0,
        unit="restarts",
        verbs=("train",),
        example=3,
    )


@rule("tensor_parallel_degree", "sequence_parallel")
def sequence_parallel_needs_tensor_parallel(builder: ConfigBuilder) -> None:
    """`sequence_parallel` is false while `tensor_parallel_degree` is 1."""
    if builder["tensor_parallel_degree"] == 1:
        builder.change("sequence_parallel", False, "tensor_parallel_degree is 1")


@rule("pp_seg_method", "pipeline_parallel_degree", "virtual_pp_degree")
def boundaries_are_increasing(builder: ConfigBuilder) -> None:
    """A list in `pp_seg_method` starts at 0, increases, and names as many runs of layers as the degrees make."""
    bounds, degree = builder["pp_seg_method"], builder["pipeline_parallel_degree"] * builder["virtual_pp_degree"]
    if not isinstance(bounds, (list, tuple)):
        return
    if bounds[0] != 0 or any(left >= right for left, right in pairwise(bounds)):
        builder.problem("pp_seg_method", "the boundaries must start at 0 and increase", "for example [0, 29, 57]")
    elif builder["pipeline_parallel_degree"] > 1 and len(bounds) not in (degree, degree + 1):
        what = f"{len(bounds)} boundaries do not make {degree} {_chunk_noun(builder)}"
        builder.problem("pp_seg_method", what, f"write {degree} first layers, and the end if you like")


def _chunk_noun(builder: ConfigBuilder) -> str:
    return "stages" if builder["virtual_pp_degree"] == 1 else "runs (pipeline_parallel_degree x virtual_pp_degree)"


SECTION = section(
    DistributedParameters,
    key="distributed",
    title="1.4 Distributed training",
    verbs=("train", "eval"),
    rules=(
        sequence_parallel_needs_tensor_parallel,
        tensor_parallel_flags,
        boundaries_are_increasing,
        *PIPELINE_RULES,
        *SHARDING_RULES,
    ),
)
