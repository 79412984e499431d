"""2.13 Rewards: what scores the answers that are learned from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section
from erniekit.config.values import OPTIONAL_NUMBERS, TEXTS

REWARD_VERBS = ("train", "eval")
_LABELLED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_KIND = re.compile(r"([A-Za-z_]\w*)(?::(.*))?", re.DOTALL)
_FUNCTION = re.compile(r"(.*\.py:|([^\W\d]\w*\.)+)[^\W\d]\w*", re.DOTALL)
_LENGTH = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})")


@dataclass(frozen=True)
class DeclaredReward:
    """One item of `rewards`.

    Attributes:
        name: what figures and records call it.
        kind: what computes it: one of KINDS.
        argument: what stands behind the colon; "" for nothing.
    """

    name: str
    kind: str
    argument: str = ""


@dataclass(frozen=True)
class RewardKind:
    """A kind of reward.

    Attributes:
        example: the text of `rewards` that errors show.
        argument: what its argument is; "" if it takes none.
        needs_argument: whether it cannot do without.
    """

    example: str
    argument: str = ""
    needs_argument: bool = False


KINDS: Mapping[str, RewardKind] = {
    "exact_match": RewardKind("exact_match"),
    "numeric": RewardKind("numeric:0.001", "the largest relative error"),
    "regex": RewardKind(r"regex:^The answer is \d+", "a regular expression", needs_argument=True),
    "json_schema": RewardKind("json_schema:schemas/answer.json", "the file of a JSON schema", needs_argument=True),
    "length": RewardKind("length:20-400", "the fewest and the most characters", needs_argument=True),
    "reward_model": RewardKind("reward_model:output/rm", "the folder of a reward model", needs_argument=True),
    "python": RewardKind(
        "python:my_rewards.score", "a function, as MODULE.FUNCTION or FILE.py:FUNCTION", needs_argument=True
    ),
}


IN_PROCESSES = ("regex", "json_schema", "python")  # kinds that may take for ever, or fail in other ways
WITH_REFERENCE = ("exact_match", "numeric", "python")  # kinds that read, or may read, the reference answer


def read_reward(text: str) -> DeclaredReward:
    """Return what an item of `rewards` declares: `KIND`, `KIND:ARGUMENT`, or either with `NAME=` in front.

    Raises:
        ValueError: it declares no reward; the text says what is wrong and what to write.
    """
    label, rest = match.groups() if (match := _LABELLED.fullmatch(text.strip())) else ("", text.strip())
    kind, argument = match.groups() if (match := _KIND.fullmatch(rest)) else (rest, None)
    if kind not in KINDS:
        raise ValueError(f"`{text}` is no reward; write one of {', '.join(KINDS)}, such as `{KINDS['regex'].example}`")
    known = KINDS[kind]
    argument = (argument or "").strip()
    if argument and not known.argument:
        raise ValueError(f"`{text}`: {kind} takes no argument; write `{known.example}`")
    if known.needs_argument and not argument:
        raise ValueError(f"`{text}`: {kind} needs {known.argument}; write it behind a colon, as in `{known.example}`")
    _check_argument(kind, argument, text)
    own = re.split(r"[.:]", argument)[-1] if kind == "python" else kind
    return DeclaredReward(label or own, kind, argument)


def read_tolerance(argument: str) -> float:
    """Return the largest relative error of `numeric`; 0 for no argument. Raises ValueError."""
    return float(argument or 0)


def read_range(argument: str) -> tuple[int, int]:
    """Return the fewest and the most characters of `length`. Raises ValueError."""
    match = _LENGTH.fullmatch(argument)
    if not match:
        raise ValueError(argument)
    fewest, most = int(match[1] or 0), int(match[2])
    if most < 1 or fewest > most:
        raise ValueError(argument)
    return fewest, most


def files_of(rewards: Iterable[str]) -> list[str]:
    """Return the files and folders that rewards read: schemas, models, files of functions."""
    files = []
    for text in rewards:
        with suppress(ValueError):
            declared = read_reward(text)
            read = declared.argument
            file = {"json_schema": read, "reward_model": read, "python": declared.argument.rpartition(":")[0]}
            files.append(file.get(declared.kind, ""))
    return [file for file in files if file]


def _check_argument(kind: str, argument: str, text: str) -> None:
    what = f"`{text}`: {KINDS[kind].argument}"
    example = f"as in `{KINDS[kind].example}`"
    if kind == "numeric":
        try:
            tolerance = read_tolerance(argument)
        except ValueError:
            tolerance = math.nan
        if not 0 <= tolerance < 1:
            raise ValueError(f"{what} is a number from 0 and below 1, {example}")
    elif kind == "length":
        try:
            read_range(argument)
        except ValueError:
            raise ValueError(f"{what} are two whole numbers, the smaller one first, {example}") from None
    elif kind == "python" and not _FUNCTION.fullmatch(argument):
        raise ValueError(f"{what}, {example} or `python:rewards/my_rewards.py:score`")
    elif kind == "regex":
        try:
            re.compile(argument)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{what} cannot be read: {error}") from None


@dataclass(frozen=True)
class RewardParameters:
    """What scores the answers that the model gives while it learns from them."""

    rewards: tuple[str, ...] = parameter(
        (),
        "What an answer is worth: one reward or several, whose weighted sum is learned from. `exact_match` is 1 where "
        "the answer is the record's reference answer, `numeric` where it ends in the same number (`numeric:0.01`: up "
        "to a relative error), `regex:PATTERN` where the pattern is found in it, `json_schema:FILE` where it is JSON "
        "of that schema, `length:20-400` where it has so many characters, and less the further it is from that; "
        "`reward_model:FOLDER` is the score of a model of stage RM. "
        "`python:MODULE.FUNCTION` and `python:FILE.py:FUNCTION` are functions of yours, which run in a process of "
        "their own. `NAME=` in front gives a reward another name, which two of one kind need. Write a YAML list where "
        "one has a comma in it.",
        kind=TEXTS,
        verbs=REWARD_VERBS,
        example=["exact_match", "short=length:1-200"],
    )
    reward_weights: tuple[float, ...] = parameter(
        (),
        "The weight of each of `rewards` in their sum, in the same order. Empty means 1 for each.",
        kind=OPTIONAL_NUMBERS,
        verbs=REWARD_VERBS,
        example=[1.0, 0.2],
    )
    reference_field: str = parameter(
        "",
        "The field of a record that has its reference answer, for `exact_match`, `numeric` and functions; a dot leads "
        "into an object, as in `reward_model.ground_truth`. Empty means the first there is of `reference`, `answer`, "
        "`solution`, `ground_truth` and `reward_model.ground_truth`, else the dialogue's last answer.",
        verbs=REWARD_VERBS,
        example="solution",
    )

    reward_time_limit: float = parameter(
        60.0,
        "How long a reward that runs in a process of its own (`python`, `regex`, `json_schema`) may take for the "
        "answers of one step or evaluation. After that it is ended, and the run ends with its name and the answer "
        "that it was at. It has a minute to start, or this limit if that is more. Raise it for functions that ask a "
        "service.",
        above=0.0,
        maximum=86_400.0,
        unit="seconds",
        verbs=REWARD_VERBS,
        example=300.0,
    )
    reward_memory_limit: float = parameter(
        4.0,
        "How much memory a reward that runs in a process of its own may take: all that it may write to, whether it "
        "does or not.",
        minimum=0.125,
        maximum=4096.0,
        unit="GiB",
        verbs=REWARD_VERBS,
        example=16.0,
    )


@rule("rewards", "reward_weights", stages=("GRPO",))
def rewards_are_known(builder: ConfigBuilder) -> None:
    """Every item of `rewards` is a reward, no two have the same name, and `reward_weights` has a weight for each."""
    names: list[str] = []
    for text in builder["rewards"]:
        try:
            declared = read_reward(text)
        except ValueError as error:
            builder.problem("rewards", str(error))
            return
        if declared.name in names:
            what = f"two rewards are called {declared.name}"
            builder.problem("rewards", what, f"write a name in front of one, as in `other_{declared.name}={text}`")
            return
        if declared.name == "std":  # of the figure `reward_std`
            builder.problem("rewards", f"`{text}`: `reward_std` is the deviation within groups", "write another name")
            return
        names.append(declared.name)
    if not names:
        if builder.verb == "train":
            builder.missing("rewards")
        return
    weights = builder["reward_weights"]
    if weights and len(weights) != len(names):
        what = f"{len(weights)} weights for {len(names)} rewards ({', '.join(names)})"
        builder.problem("reward_weights", what, "write one for each, in the same order, or none for 1 each")
    elif weights and not any(weights):
        builder.problem("reward_weights", "are all 0, so that nothing is learned", "write at least one other than 0")


@rule("rewards", "reference_field", "reward_time_limit", "reward_memory_limit", stages=("GRPO",))
def rewards_read_what_is_written(builder: ConfigBuilder) -> None:
    """`reference_field` has an effect on `exact_match`, `numeric` and functions, limits on rewards in processes."""
    kinds = {read_reward(text).kind for text in builder["rewards"]}
    readers = {
        "reference_field": WITH_REFERENCE,
        "reward_time_limit": IN_PROCESSES,
        "reward_memory_limit": IN_PROCESSES,
    }
    for name, of in readers.items():
        if kinds and kinds.isdisjoint(of) and builder.differs(name):
            builder.no_effect(name, f"because none of the rewards is one of {', '.join(of)}")


SECTION = section(
    RewardParameters,
    key="rewards",
    title="2.13 Rewards",
    verbs=REWARD_VERBS,
    stages=("GRPO",),
    rules=(rewards_are_known, rewards_read_what_is_written),
)
