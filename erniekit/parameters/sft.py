"""2.1 SFT: how samples of several sources become an epoch."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.parameters.declaration import Derived, parameter, section, when
from erniekit.parameters.draft import Draft


def _mix_strategy(draft: Draft) -> tuple[str, str]:
    if draft.is_set("num_samples_each_epoch"):
        return "random", "num_samples_each_epoch is set"
    if len(set(draft["train_dataset_prob"])) > 1:
        return "random", "the sources have probabilities"
    return "concat", ""


@dataclass(frozen=True)
class SftParameters:
    """How the samples of one or several sources are mixed, and what happens to those that are too long."""

    mix_strategy: str = parameter(
        Derived(
            "`random` where `train_dataset_prob` holds different values or `num_samples_each_epoch` is set, else "
            "`concat`",
            _mix_strategy,
            "concat",
        ),
        "How several sources become one epoch. `concat` uses every sample exactly once. `random` draws the source "
        "of each sample by `train_dataset_prob`. `interleave_under` takes turns by probability until the first "
        "source is used up, `interleave_over` until the last one is, starting the shorter ones again. Without a "
        "choice of yours nothing is left out or repeated.",
        choices=("random", "concat", "interleave_under", "interleave_over"),
        verbs=("train", "preview"),
    )
    num_samples_each_epoch: int = parameter(
        6_000_000,
        "With `mix_strategy: random`, the number of samples that make an epoch. An epoch never exceeds the data "
        "unless you set this parameter yourself; then samples repeat.",
        minimum=1,
        unit="samples",
        needs=when("mix_strategy", "random"),
        verbs=("train", "preview"),
        example=20_000,
    )
    over_length_policy: str = parameter(
        "truncate_turns",
        "What happens to a conversation of more than `max_seq_len` tokens. `truncate_turns` removes its oldest "
        "turns until it fits, and drops it when even the last turn does not; `drop` leaves it out; `error` stops "
        "with the file and line. The numbers of truncated and dropped samples are printed before the first step.",
        choices=("drop", "truncate_turns", "error"),
        verbs=("train", "eval", "preview"),
    )


SECTION = section(SftParameters, key="sft", title="2.1 SFT", verbs=("train",))
