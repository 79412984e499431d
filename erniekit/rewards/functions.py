"""Rewards that run in processes of their own: functions of users, patterns, JSON schemas."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from erniekit.rewards.answer import Answer, RewardError, sample
from erniekit.rewards.process import FailedError, Limits, RewardProcess
from erniekit.rewards.references import reference_of

TRY_IT = "erniekit rewards CONFIG shows what it gives, without training"


class ProcessReward:
    """A reward that a process computes.

    A function that scores all answers at once and fails is called again for each of them alone, to find the one that
    it fails for.

    Args:
        name: of the reward.
        program: what the process computes, see `child.open_function`.
        reference_field: the field of records that has the reference answer; "" for the first there is.

    Raises:
        RewardError: it cannot be opened.
    """

    def __init__(self, name: str, program: Mapping[str, Any], limits: Limits, reference_field: str = "") -> None:
        self._name, self._limits, self._field = name, limits, reference_field
        try:
            self._process = RewardProcess(name, program, limits)
        except FailedError as error:
            raise self._error(str(error), error.advice) from None

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Return a number for each answer. Raises RewardError."""
        if not answers:
            return []
        return self._all_at_once(answers) if self._process.wants.many else self._one_by_one(answers)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _one_by_one(self, answers: Sequence[Answer]) -> list[float]:
        calls = [self._arguments_of_one(answer) for answer in answers]
        try:
            results = self._process.call({"each": calls}, len(answers))
        except FailedError as error:
            at = f" for {sample(answers[error.done])}" if error.done >= 0 else " where it is opened again"
            raise self._error(f"{error}{at}", error.advice) from None
        return [self._number(result, answer) for result, answer in zip(results, answers, strict=True)]

    def _all_at_once(self, answers: Sequence[Answer]) -> list[float]:
        request = {"all": self._arguments_of_many(answers)}
        try:
            (result,) = self._process.call(request, 1)
        except FailedError as error:
            raise self._blamed(answers, error) from None
        if "numbers" in result and len(result["numbers"]) == len(answers):
            return [
                self._number({"number": number}, answer)
                for number, answer in zip(result["numbers"], answers, strict=True)
            ]
        if "place" in result:
            place = result["place"]
            if place < len(answers):
                self._number(result, answers[place])
        raise self._error(
            _wrong_list(result, answers), "return a list with one number for each completion, in their order"
        )

    def _number(self, result: Mapping[str, Any], answer: Answer) -> float:
        advice = "a reward is a finite number; return 0.0 where there is nothing to judge"
        if "number" not in result:
            raise self._error(f"gives {result['no_number']} for {sample(answer)}", advice)
        if not math.isfinite(result["number"]):
            raise self._error(f"gives {result['number']} for {sample(answer)}", advice)
        return float(result["number"])

    def _blamed(self, answers: Sequence[Answer], failed: FailedError) -> RewardError:
        """Return the error of a function that has failed for many answers, with the one that it fails for alone.

        Those that it does not fail for may take together as long as one call.
        """
        if len(answers) == 1:
            return self._error(f"{failed} for {sample(answers[0])}", failed.advice)
        begin = time.monotonic()
        for answer in answers:
            try:
                self._process.call({"all": self._arguments_of_many([answer])}, 1)
            except FailedError as error:
                if error.done < 0:
                    return self._error(
                        f"{failed} for {_span(answers)}, and {error} where it is opened again", error.advice
                    )
                return self._error(f"{error} for {sample(answer)}", error.advice)
            if time.monotonic() - begin > self._limits.seconds:
                what = f"{failed} for {_span(answers)} together, and not for those up to {answer.where} alone"
                return self._error(what, failed.advice)
        return self._error(f"{failed} for {_span(answers)} together, and for none of them alone", failed.advice)

    def _arguments_of_many(self, answers: Sequence[Answer]) -> dict[str, Any]:
        given: dict[str, Callable[[], Any]] = {
            "completions": lambda: [answer.text for answer in answers],
            "prompts": lambda: [answer.messages for answer in answers],
            "references": lambda: [self._reference(answer) for answer in answers],
        }
        columns = dict.fromkeys(name for answer in answers for name in answer.record)
        return self._arguments(
            given, list(columns), lambda name: [answer.record.get(name) for answer in answers], answers
        )

    def _arguments_of_one(self, answer: Answer) -> dict[str, Any]:
        given: dict[str, Callable[[], Any]] = {
            "completion": lambda: answer.text,
            "prompt": lambda: answer.messages,
            "reference": lambda: self._reference(answer),
            "solution_str": lambda: answer.text,
            "ground_truth": lambda: self._reference(answer),
        }
        defaults = {"data_source": "", "extra_info": {}}  # fields of verl's records
        record = {**{name: value for name, value in defaults.items() if name not in answer.record}, **answer.record}
        return self._arguments(given, list(record), lambda name: record.get(name), [answer])

    def _arguments(
        self,
        given: Mapping[str, Callable[[], Any]],
        columns: Sequence[str],
        column: Callable[[str], Any],
        answers: Sequence[Answer],
    ) -> dict[str, Any]:
        """Return the arguments that the function takes: what is given by name, then the fields of records."""
        wants = self._process.wants
        names = [name for name in wants.names if name in given or name in columns]
        lacking = [name for name in wants.needed if name not in names]
        if lacking:
            there = ", ".join(dict.fromkeys([*given, *columns]))
            what = f"takes `{lacking[0]}`, which is no field of the record at {answers[0].where} (there are {there})"
            raise self._error(what, f"give it a default, {lacking[0]}=None, or take another name")
        if wants.others:
            names += [name for name in columns if name not in names and name not in given]
        arguments = {name: given[name]() if name in given else column(name) for name in names}
        return {name: value for name, value in arguments.items() if self._can_be_sent(name, value, answers)}

    def _can_be_sent(self, name: str, value: Any, answers: Sequence[Answer]) -> bool:
        """Return False for a field that JSON has no form for, such as bytes, unless the function asks for it by name.

        Raises:
            RewardError: it does.
        """
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            if name not in self._process.wants.names:
                return False
            what = f"takes the field `{name}`, and that of the record at {answers[0].where} is no JSON"
            raise self._error(what, "take a field of texts, numbers, lists and objects") from None
        return True

    def _reference(self, answer: Answer) -> str | list[str]:
        try:
            return reference_of(answer.record, self._field)
        except ValueError as error:
            advice = "name the field of the records that has the reference answer: reference_field: NAME"
            raise self._error(f"takes a reference answer, and at {answer.where} {error}", advice) from None

    def _error(self, what: str, advice: str) -> RewardError:
        return RewardError(f"reward {self._name}: it {what}\n  {advice[0].upper()}{advice[1:]}; {TRY_IT}")


def _span(answers: Sequence[Answer]) -> str:
    first, last = answers[0].where, answers[-1].where
    return f"{len(answers):,} answers (the first to {first}, the last to {last})"


def _wrong_list(result: Mapping[str, Any], answers: Sequence[Answer]) -> str:
    many = _span(answers)
    if "one" in result:
        return f"gives one number, {result['one']:g}, for {many}"
    if "no_list" in result:
        return f"gives {result['no_list']} for {many}"
    got = len(result["numbers"]) if "numbers" in result else f"more than {result['place']:,}"
    return f"gives {got} numbers for {many}"
