"""1.7 Acceleration: attention, fused kernels, packing and data loading."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import CPU_ONLY, GPU_ONLY, ConfigBuilder, Derived, parameter, rule, section, when
from erniekit.config.sections.distributed import WITH_PP, WITH_TP
from erniekit.config.values import FLAG

BY_TOKENS, BY_SECONDS = when("batch_tokens", above=0), when("batch_seconds", above=0)


def _packing(builder: ConfigBuilder) -> tuple[bool, str]:
    if builder["batch_tokens"]:
        return False, "because batch_tokens is set"
    if builder.stage.reads_codes and builder["batch_seconds"]:
        return False, "because batch_seconds is set"
    return True, ""


@dataclass(frozen=True)
class AccelerationParameters:
    """Kernels, packing and data loading: parameters that make a step faster without changing its result."""

    use_flash_attention: bool = parameter(
        True,
        "Compute attention without storing the matrix of attention weights: with Paddle's FlashAttention on a GPU, and "
        "document by document on a CPU, which gives exactly the same. When false a dense mask is used.",
    )
    use_sparse_flash_attn: bool = parameter(
        True,
        "Skip the parts of attention that the FlashMask indices mask out, so that the cost depends on the lengths of "
        "the documents in a pack, not on the square of its length. When false a dense mask is built from the same "
        "indices.",
    )
    fuse_rope: bool = parameter(False, "Apply the rotary position embedding in one fused GPU kernel.", devices=GPU_ONLY)
    fuse_linear: bool = parameter(
        False,
        "Fuse matrix products with the addition of their bias. It has no effect on models without biases, such as "
        "ERNIE-4.5.",
        devices=GPU_ONLY,
    )
    fuse_rms_norm: bool = parameter(False, "Compute RMSNorm in one fused GPU kernel.", devices=GPU_ONLY)
    fuse_swiglu: bool = parameter(
        False,
        "Compute the SwiGLU activation with Paddle's fused kernel, which a CPU has, too, instead of ERNIEKit's own. "
        "Results differ in the last bits only.",
        example=True,
    )
    cpu_kernels: str = parameter(
        "auto",
        "Which kernels compute on a CPU beside matrix products: ERNIEKit's own, written in C, or Paddle's operators. "
        "`auto` takes the fastest path of instructions that the processor has, and Paddle's operators where there is "
        "no library of kernels and no compiler to make one (`erniekit env` says which). A path that is named must be "
        "able to run. Paths differ in the last bits of results, and Paddle's operators draw other attention dropout, "
        "so a run resumes bit for bit on the path that it began with.",
        choices=("auto", "paddle", "avx2", "avx512", "avx512_bf16"),
        verbs=("train", "eval", "chat", "generate", "speak", "export", "server"),
        devices=CPU_ONLY,
        example="avx2",
    )
    packing: bool = parameter(
        Derived("`true`; `false` with `batch_tokens` or `batch_seconds`", _packing, True),
        "Concatenate several samples to one sequence of up to `max_seq_len` tokens, so that no computation is spent on "
        "padding. Samples of a pack do not attend to each other, and the positions of each start at 0. When false "
        "every sample is a separate sequence, padded to the longest of its batch. In stage GRPO samples are the "
        "answers of a micro-batch, and those to one prompt have it once in a pack.",
        verbs=("train", "eval", "preview"),
    )
    greedy_intokens: bool = parameter(
        True,
        "How samples are packed. When true the packer chooses from a window of `buffer_size` samples: the longest one "
        "opens a pack, shuffled ones fill three quarters of it, and the best fits complete it, so that packs are full "
        "and mixed. When false packs are filled in the order of the samples, and a new one begins when the next does "
        "not fit.",
        needs=when("packing"),
        verbs=("train", "eval", "preview"),
    )
    buffer_size: int = parameter(
        100_000,
        "The window of the packer: the number of samples that it may choose from. The packer needs only their lengths, "
        "so a window takes 4 bytes per sample; a large one leaves less than 1% of padding, a small one keeps samples "
        "closer to their order in the file.",
        minimum=1,
        unit="samples",
        needs=(when("greedy_intokens"), BY_TOKENS, BY_SECONDS),
        verbs=("train", "eval", "preview"),
        example=10_000,
    )
    batch_tokens: int = parameter(
        0,
        "With a value above 0, samples of similar length are batched instead of packed. Every sample is a separate "
        "row, and a micro-batch takes as many rows as fit into this many tokens, counted as rows x longest row with "
        "its padding. It replaces `packing`, `per_device_train_batch_size` and `per_device_eval_batch_size`; a step "
        "still takes `gradient_accumulation_steps` micro-batches. Samples are grouped in windows of `buffer_size`. "
        "For backends without FlashMask. 0 is off.",
        minimum=0,
        unit="tokens",
        verbs=("train", "eval", "preview"),
        example=8192,
    )
    max_batch_samples: int = parameter(
        0,
        "The most samples of a micro-batch made by `batch_tokens` or `batch_seconds`, so that many short ones do not "
        "make a very tall batch. 0 sets no limit.",
        minimum=0,
        unit="samples",
        needs=(BY_TOKENS, BY_SECONDS),
        verbs=("train", "eval", "preview"),
        example=64,
    )
    min_sample_len: int = parameter(
        1,
        "Leave out samples of fewer tokens where `batch_tokens` makes the batches; the number is printed.",
        minimum=1,
        unit="tokens",
        needs=BY_TOKENS,
        verbs=("train", "eval", "preview"),
        example=8,
    )
    max_sample_len: int | None = parameter(
        None,
        "Leave out samples of more tokens where `batch_tokens` makes the batches; the number is printed. `none` means "
        "`max_seq_len`, to which `over_length_policy` applies.",
        minimum=1,
        unit="tokens",
        needs=BY_TOKENS,
        verbs=("train", "eval", "preview"),
        example=2048,
    )
    dataloader_num_workers: int = parameter(
        1,
        "The number of background threads that prepare batches ahead of the model (upstream starts processes; tokens "
        "are read from a memory-mapped cache here, so threads do); 0 prepares them between steps. Raise it when steps "
        "wait for data, which a falling number of tokens per second shows while the device is idle; each holds one "
        "prepared step in memory. The order of samples never depends on it.",
        minimum=0,
        unit="workers",
        verbs=("train", "eval"),
        example=4,
    )
    distributed_dataloader: int = parameter(
        0,
        "With 1, one rank of each pipeline and tensor group reads the data and broadcasts the batches to the others; "
        "with 0 every rank reads the data.",
        kind=FLAG,
        needs=(WITH_TP, WITH_PP),
        verbs=("train", "eval"),
        example=1,
    )
    moe_multimodal_dispatch_use_allgather: str = parameter(
        "v2-alltoall-unpad",
        "How tokens reach their experts with expert parallelism (`moe_group`), where each rank has different tokens. "
        "All-to-all sends each token to the ranks of its experts. All-gather sends all tokens to all ranks, which "
        "moves less data where a token has more experts than there are ranks. `unpad` sends the exact sizes; the "
        "others pad to the largest size of any rank. It changes speed and memory, never the loss.",
        choices=("v2-alltoall-unpad", "v2-alltoall", "v2-allgather-unpad", "v2-allgather"),
        spellings={"": "v2-alltoall-unpad", "v2-alltoall-unpad-text": "v2-alltoall-unpad"},
        example="v2-allgather-unpad",
    )


MASK_SWITCHES = ("use_flash_attention", "use_sparse_flash_attn", "use_attn_mask_startend_row_indices")


@rule(*MASK_SWITCHES, verbs=("train",))
def one_switch_turns_flashmask_off(builder: ConfigBuilder) -> None:
    """Any of the three switches of FlashMask that is false makes attention use a dense mask, with the same result."""
    off = [name for name in MASK_SWITCHES if not builder[name]]
    if not off:
        return
    causes = " and ".join(f"{name} is false ({builder.origins[name]})" for name in off)
    builder.messages.append(
        f"attention uses a dense mask, without FlashAttention, because {causes}; any of {', '.join(MASK_SWITCHES)} "
        "does this, while upstream keeps FlashAttention where only use_sparse_flash_attn is false"
    )


@rule("batch_tokens", "packing", "min_sample_len", "max_sample_len", "max_seq_len")
def a_budget_holds_every_sample(builder: ConfigBuilder) -> None:
    """`batch_tokens` replaces `packing`, and must hold the longest sample that may occur."""
    budget = builder["batch_tokens"]
    if not budget:
        return
    if builder["packing"]:
        what = "samples are either packed or batched by length, and `packing` is true"
        builder.problem("batch_tokens", what, "write `packing: false`, or leave out one of the two")
    longest = builder["max_sample_len"] or builder["max_seq_len"]
    if budget < min(longest, builder["max_seq_len"]):
        name = "max_sample_len" if builder["max_sample_len"] else "max_seq_len"
        builder.problem(
            "batch_tokens", f"a sample of {longest:,} tokens (`{name}`) would exceed {budget:,}",
            f"write at least {longest:,}, or `max_sample_len: {budget}`",
        )  # fmt: skip
    if builder["min_sample_len"] > longest:
        builder.problem("min_sample_len", f"no sample can have {builder['min_sample_len']:,} to {longest:,} tokens")


SECTION = section(
    AccelerationParameters,
    key="acceleration",
    title="1.7 Acceleration",
    verbs=("train",),
    rules=(a_budget_holds_every_sample, one_switch_turns_flashmask_off),
)
