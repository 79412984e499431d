"""The training loop: steps, logging, evaluation, saving, and the ways a run can end."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from paddle import Tensor
from paddle.nn import Layer

from erniekit.config import Config
from erniekit.errors import TrainingError
from erniekit.training.callbacks import Callback, CallbackList, TrainingRun
from erniekit.training.checkpoint.atomic_folder import checkpoint_name, newest_complete
from erniekit.training.checkpoint.resume import Start
from erniekit.training.checkpoint.state import TrainerState
from erniekit.training.choices import (
    choose,
    describe_events,
    next_learning_rate,
    refusal,
    status_line,
    take_events,
)
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.control import (
    NO_COMMANDS,
    Command,
    Commands,
    ForcedStopError,
    StopRequest,
    parse,
    stop_signals,
)
from erniekit.training.early_stopping import out_of_patience, stop_reason, update_best
from erniekit.training.evaluation import EvaluationResult, Plan
from erniekit.training.gradients import MAX_SCALE, SKIPPED_STEPS, LossScale
from erniekit.training.metrics import Totals
from erniekit.training.not_finite import describe_micro_batches, not_finite_error
from erniekit.training.objectives.objective import Objective
from erniekit.training.optim.adamw import trainable_parameters
from erniekit.training.optim.schedules import dropout_scale
from erniekit.training.result import TrainResult, result_of
from erniekit.training.saving import RunFolder
from erniekit.training.step import NotFiniteError, StepResult, train_step

logger = logging.getLogger(__name__)


def is_due(strategy: str, every: int, finished_steps: int, *, epoch_ended: bool, last: bool) -> bool:
    """Return whether something with this strategy (steps, epoch, no) happens after `finished_steps` updates.

    After the `last` update everything that happens at all happens once more, so that the end of a run is covered.
    """
    if strategy == "no":
        return False
    return last or (epoch_ended if strategy == "epoch" else every > 0 and finished_steps % every == 0)


# (first step, step to stop before) -> the micro-batches of each step; closed when the run ends early.
ReadSteps = Callable[[int, int], Generator[Sequence[Any], None, None]]


@dataclass
class Trainer:
    """A run from its parts. Generic over model, data plan and objective; `runners/` choose them."""

    model: Layer  # offers .begin_micro_batch(step=, micro_batch=, dropout_scale=, share=) and .end_step(skipped=)
    parameters: Mapping[str, Tensor]  # by Hugging Face name
    optimizer: Any  # AdamW, or what divides its state among ranks
    plan: Plan
    objective: Objective
    config: Config
    total_steps: int
    folder: RunFolder
    run_evaluation: Callable[[], EvaluationResult] | None = None  # on held-out data, where there is any
    callbacks: Sequence[Callback] = ()
    commands: Commands = NO_COMMANDS  # asked on the first rank
    initial_loss_scale: float | None = None  # of a float16 run
    loss_scale_bounds: tuple[float, float] = (1.0, MAX_SCALE)
    read_steps: ReadSteps | None = None  # default: plan.micro_batches, when its step comes
    relative_learning_rates: Mapping[str, float] = field(default_factory=dict)  # name in the log -> multiple
    describe_sample: Callable[[int], str] = str  # index in the training data -> "file.jsonl:17"
    ranks: Ranks = SINGLE_PROCESS
    state: TrainerState = field(default_factory=TrainerState, init=False)
    last_evaluation: EvaluationResult | None = field(default=None, init=False)
    _stopped_by: int | None = field(default=None, init=False)
    _quit_requested: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._notify = CallbackList(self.callbacks)

    def fit(self, start: Start) -> TrainResult:
        """Train to the last step and save the final model into `output_dir`.

        `model` must already have the weights of `start.checkpoint`. Afterwards either the run is finished, or a signal
        ended it (`TrainResult.stopped_by`) and the newest checkpoint is where it stopped.

        Raises:
            CheckpointError: the checkpoint does not fit this run, or the disk is full.
            TrainingError: loss or gradient is not finite.
        """
        try:
            self._begin(start)
            with stop_signals() as request, self.folder.saver:
                self._notify.on_train_begin(self._run_info())
                self.model.train()
                self._run_steps(request)
                finished = self._is_finished()
                if finished:
                    self.folder.save_final_model(self.state)
                else:
                    saves = self.config.checkpoint.save_strategy != "no" or self._quit_requested
                    self.folder.save_on_stop(self.state, saves=saves)
            result = result_of(self.state, self.last_evaluation, None if finished else self._stopped_by)
            if finished:
                self._notify.on_train_end(result)
            return result
        except ForcedStopError:
            newest, _ = newest_complete(self.config.output_dir)
            left = "no checkpoint was saved" if newest is None else f"the newest checkpoint is {newest}"
            logger.info(f"a second signal: stopped at once; {left}")
            raise
        finally:
            self._notify.close()

    def evaluate(self) -> EvaluationResult:
        """Evaluate now, report it, and leave training as it was."""
        assert self.run_evaluation is not None
        self.last_evaluation = result = self.run_evaluation()
        progress = {"step": self.state.step, "epoch": round(self.state.epoch, 4)}
        self._notify.on_evaluate(progress | result.results())
        return result

    def _run_info(self) -> TrainingRun:
        path, resolved = self.folder.path, self.folder.resolved_config
        return TrainingRun(path.resolve().name, path, resolved, self.state.step, self.total_steps)

    def _begin(self, start: Start) -> None:
        if self.initial_loss_scale is not None:
            floor, ceiling = self.loss_scale_bounds
            self.state.loss_scale = LossScale(self.initial_loss_scale, floor=floor, ceiling=ceiling)
        if start.checkpoint is not None:
            fresh, self.state = self.state, self.folder.load(start.checkpoint)
            wanted, stored_scale = fresh.loss_scale, self.state.loss_scale
            self.state.loss_scale = (
                wanted if wanted is None or stored_scale is None else stored_scale.within(wanted.floor, wanted.ceiling)
            )
            if self.state.events:
                logger.info(f"{describe_events(self.state.events)}; `events clear` forgets them")
            if self._is_finished():
                where = f"at step {self.state.step} of {self.total_steps}"
                early = ", where it stopped early" if self._stops_early() else ""
                logger.info(f"the checkpoint is {where}{early}: nothing to train")
        self.folder.open(start, self._notify.on_save)

    def _run_steps(self, request: StopRequest) -> None:
        first, stop = self.state.step, self.total_steps
        read_steps = self.read_steps or (
            lambda first, stop: (self.plan.micro_batches(step) for step in range(first, stop))
        )
        with closing(read_steps(first, stop)) as steps:
            while not self._is_finished() and not self._should_stop(request):
                self.folder.saver.check()
                started = time.perf_counter()
                result = self._step(next(steps))
                result.totals.seconds = time.perf_counter() - started  # waiting for data included
                self._finish_step(result)
        if self._stopped_by is not None and not self._is_finished():
            name = signal.Signals(self._stopped_by).name
            logger.info(f"{name}: stopping after this step; send it again to stop immediately")

    def _should_stop(self, request: StopRequest) -> bool:
        """Return whether all ranks stop after this step: a signal reached one of them, or a user wrote `quit`.

        Other commands are executed here.
        """
        request.check()  # what is raised in a destructor, Python drops
        own = [request.signal or 0, self.commands.lines() if self.ranks.is_main_process else []]
        of_ranks = self.ranks.all_gather_object(own)
        self._stopped_by = max(number for number, _ in of_ranks) or None
        for line in of_ranks[0][1]:
            try:
                self._execute(parse(line))
            except ValueError as error:
                logger.error(str(error))
        return self._stopped_by is not None or self._quit_requested

    def _execute(self, command: Command) -> None:
        """Do what a command says, remember it for a later step, or say why that is not possible in this run."""
        name, step = command.name, self.state.step
        if problem := refusal(command, self.state, self.total_steps):
            logger.error(problem)
        elif command.step is not None or name not in ("save", "quit", "eval", "export", "status"):
            logger.info(choose(command, self.state, self.total_steps, self.config.training))
        elif name == "save":
            self.folder.save(self.state)
            logger.info(f"save: {'writing' if self.folder.saver.writing else 'saved'} {checkpoint_name(step)}")
        elif name == "quit":
            self._quit_requested = True
        elif name == "eval" and self.run_evaluation is None:
            logger.info(
                "eval: this run has no held-out data; it needs do_eval: true and eval_dataset_path or eval_split"
            )
        elif name == "eval":
            self.evaluate()
        elif name == "export":
            self.folder.export(self.state)
        else:
            saved, writing = self.folder.saved_step, bool(self.folder.saver.writing)
            logger.info(status_line(self.state, self.total_steps, self._learning_rate(), saved, writing))

    def _learning_rate(self) -> float:
        """Of the next step."""
        return next_learning_rate(self.state, self.total_steps, self.config.training)

    def _step(self, batches: Sequence[Any]) -> StepResult:
        step, tried = self.state.step, self.state.loss_scale.scale if self.state.loss_scale else 1.0
        try:
            result = train_step(
                self.model,
                list(trainable_parameters(self.parameters).values()),
                self.optimizer,
                self.objective,
                batches,
                step=step,
                learning_rate=self._learning_rate(),
                dropout_scale=dropout_scale(step, self.config.basic.dropout_warmup_steps),
                max_grad_norm=self.config.training.max_grad_norm,
                release_grads=self.config.memory.release_grads,
                loss_scale=self.state.loss_scale,
                ranks=self.ranks,
            )
        except NotFiniteError as error:
            raise self._not_finite(error, batches) from None
        scale = self.state.loss_scale
        if result.overflowed and scale is not None:
            skipped = f"step {step + 1}: skipped, a gradient overflows at the loss scale {tried:,.0f}"
            if scale.overflows_at_floor:
                bound = f"the lower bound (min_loss_scale): {scale.overflows_at_floor} in a row"
                logger.warning(f"{skipped}, {bound}, {SKIPPED_STEPS} end the run")
            else:
                logger.info(f"{skipped}; the next step has {scale.scale:,.0f}")
        elif not result.updated:
            logger.info(f"step {step + 1}: skipped, its batches hold no {self.objective.unit}")
        return result

    def _finish_step(self, result: StepResult) -> None:
        config, state = self.config, self.state
        state.step += 1
        earlier_epoch, state.epoch = state.epoch, self.plan.epoch_of(state.step)
        state.since_log.add(result.totals)
        state.whole_run.add(result.totals)

        def happens(strategy: str, every: int) -> bool:
            epoch_ended = math.floor(state.epoch) > math.floor(earlier_epoch)
            return is_due(strategy, every, state.step, epoch_ended=epoch_ended, last=self._is_finished())

        if result.updated:
            self.objective.after_update(state.step)
            self._notify.on_step(self._record(result.totals, result))
        if happens(config.basic.logging_strategy, config.basic.logging_steps) and state.since_log.units:
            self._notify.on_log(self._record(state.since_log, result))
            state.since_log = Totals()
        is_best, judged = False, config.evaluation
        if self.run_evaluation is not None and happens(judged.evaluation_strategy, judged.eval_steps):
            is_best = update_best(state.best, self.evaluate().record(), state.step, judged)
            if self._stops_early():
                logger.info(stop_reason(state.best, judged))
        for event in take_events(state.events, state.step):  # before a save, which then holds what they change
            self._execute(event)
        saves = happens(config.checkpoint.save_strategy, config.checkpoint.save_steps)
        if saves or (is_best and judged.load_best_model_at_end):
            self.folder.save(self.state)

    def _record(self, totals: Totals, latest: StepResult) -> dict[str, Any]:
        return {
            "step": self.state.step,
            "epoch": round(self.state.epoch, 4),
            "loss": totals.loss,
            "learning_rate": latest.learning_rate,
            **{name: ratio * latest.learning_rate for name, ratio in self.relative_learning_rates.items()},
            "grad_norm": latest.grad_norm,
            **totals.metrics,
            "tokens": self.state.whole_run.tokens,
            "tokens_per_second": round(totals.tokens_per_second, 1),
            **({"audio_seconds_per_second": round(totals.audio_seconds_per_second, 1)} if totals.audio_seconds else {}),
        }

    def _is_finished(self) -> bool:
        return self.state.step >= self.total_steps or self._stops_early()

    def _stops_early(self) -> bool:
        return out_of_patience(self.state.best, self.config.evaluation)

    def _not_finite(self, error: NotFiniteError, batches: Sequence[Any]) -> TrainingError:
        own = describe_micro_batches(error, batches, self.describe_sample)
        unsaved = self.folder.complete_last_checkpoint()
        newest, _ = newest_complete(self.config.output_dir)
        return not_finite_error(self.state, error, self.ranks.all_gather_object(own), newest, unsaved)
