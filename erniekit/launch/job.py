"""Run one command on several ranks of this machine: how many there are, what is done before they start, restarts.

Needs no Paddle. `launch/local.py` starts the processes and `launch/watch.py` watches them. On several machines another
launcher starts the ranks: see `launch/external.py`.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from erniekit.build.data import evaluates, evaluation_dataset, training_dataset
from erniekit.build.model import initial_weights, open_tokenizer
from erniekit.build.preflight import preflight
from erniekit.config import Config
from erniekit.config.values import other_device
from erniekit.distributed.rank import is_rank
from erniekit.distributed.topology import AXES, Topology, topology_from
from erniekit.errors import ConfigurationError
from erniekit.hub.cache import is_fetched
from erniekit.hub.download import model_folder
from erniekit.hub.fetched import FETCHED
from erniekit.launch.external import refuse_several_nodes
from erniekit.launch.local import rank_log_path, spawn, visible_gpus
from erniekit.launch.watch import Failure, received_signals, root_cause, signal_forwarder, watch
from erniekit.manifest import MANIFEST
from erniekit.temp_folders import temp_folder
from erniekit.terminal import escape_control_characters
from erniekit.training.checkpoint.atomic_folder import checkpoint_folders, newest_complete
from erniekit.training.control import Commands, forward_commands

logger = logging.getLogger(__name__)

LOG_FOLDER = "rank_logs"  # in output_dir
USER_ERROR = 2  # exit code
_REPORTS = "erniekit-job-"  # begins the name of the temporary folder for what failing ranks say
RESUME = "resume_from_checkpoint"


@dataclass(frozen=True)
class Job:
    """A command that several ranks of this machine run.

    Attributes:
        command: the command line of each rank; `name=value` words can be appended.
        nproc: the number of ranks; each has a GPU of its own where `gpu`.
        logs: the folder for the output of each rank.
    """

    config: Config
    command: tuple[str, ...]
    nproc: int
    gpu: bool
    logs: Path


def plan_job(config: Config, command: tuple[str, ...], *, nproc: int | None, logs: Path | None) -> Job | None:
    """Return the job that this process should start; None where it does the work itself, alone or as a rank of a job.

    A single rank is a job where `max_restarts` may start it again.

    Args:
        nproc: the number of ranks on this machine, if the user gave it. Otherwise one for each GPU that is visible, or,
            on a CPU, as many as the degrees of the configuration need.

    Raises:
        ConfigurationError: the layout does not fit the number of ranks, this process is a rank already, or NNODES asks
            for several machines.
    """
    if is_rank():
        if nproc is not None:
            raise ConfigurationError(
                f"--nproc {nproc}: this process is rank {os.environ['PADDLE_TRAINER_ID']} of a job already "
                "(PADDLE_TRAINER_ID is set)\n  leave --nproc out, or unset the PADDLE_ variables"
            )
        return None
    refuse_several_nodes(os.environ, command)
    device = config.basic.device
    other = other_device(device)
    gpus = 0 if device == "cpu" or other else visible_gpus()
    if gpus and nproc is not None and nproc > gpus:
        raise ConfigurationError(
            f"--nproc {nproc}: every rank needs a GPU of its own, and {gpus} can be seen\n"
            f"  write --nproc {gpus}, or device=cpu"
        )
    if nproc is None and gpus:
        nproc = 1 if ":" in device else gpus
    elif nproc is None:
        nproc = max(1, topology_from(config).world_size)
    topology_from(config, nproc)
    if other and nproc > 1:
        raise ConfigurationError(
            f"device: {device}: ERNIEKit itself starts ranks on CPUs and GPUs only; start these {nproc} ranks with\n"
            f"  python -m paddle.distributed.launch --devices {','.join(map(str, range(nproc)))} "
            f'"$(which erniekit)" {" ".join(command[3:])}'
        )
    if nproc == 1 and not config.distributed.max_restarts:
        return None
    folder = logs or _output_dir(config) / LOG_FOLDER
    return Job(config, command, nproc, gpus > 0, folder)


def run_job(job: Job) -> int:
    """Run a job to its end, or to its last failure.

    Returns:
        The exit code: 0; that of the rank that failed first (2 for a mistake of the user); 130 or 143 where a signal
        ended the job.

    Raises:
        UserError: model, data or layout cannot be used; raised before any rank is started.
    """
    if is_fetched(job.config):
        model_folder(job.config)  # fetched first, so that there is something to check
    preflight(job.config, world_size=job.nproc)
    prepare(job.config)
    topology = topology_from(job.config, job.nproc)
    _make_log_folder(job.logs)
    logger.info(_announcement(job, topology))
    return _run_until_done(job)


def prepare(config: Config) -> None:
    """Do once what every rank would otherwise do at the same time: fetch the model, tokenise the data.

    Raises:
        UserError: model or data cannot be used.
    """
    tokenizer, template = open_tokenizer(config)
    initial_weights(config)
    if config.stage.reads_prompts:  # which are read, and not kept
        return
    if config.basic.do_train:
        training_dataset(config, tokenizer, template)
    if evaluates(config) or not config.basic.do_train:
        evaluation_dataset(config, tokenizer, template)


@dataclass(frozen=True)
class _Attempt:
    """How the ranks ended.

    Attributes:
        code: the exit code where nothing failed: 0, or 128 + the signal that stopped the ranks.
        stopped: a signal asked the job to end.
    """

    failures: list[Failure]
    code: int
    stopped: bool


@dataclass(frozen=True)
class _Verdict:
    """What follows from an attempt: the failure to report, the exit code, and whether the job starts again."""

    failure: Failure | None
    code: int
    restart: bool = False
    resume: bool = False
    notes: tuple[str, ...] = ()


def _run_until_done(job: Job) -> int:
    before = _checkpoints(job.config)
    resume, attempt = False, 0
    while True:
        verdict = _verdict(job, _run_once(job, resume), attempt, before)
        if verdict.failure is not None:
            print(f"error: {escape_control_characters(str(verdict.failure))}", file=sys.stderr)
            if verdict.failure.cause != "user error":
                said = escape_control_characters(str(_logs(job)))
                print(f"all ranks were ended; the output of each: {said}", file=sys.stderr)
        for note in verdict.notes:
            logger.info(note)
        if not verdict.restart:
            return verdict.code
        resume, attempt = verdict.resume, attempt + 1


def _run_once(job: Job, resume: bool) -> _Attempt:
    """Start the ranks and wait until all have ended or one has failed."""
    command = job.command
    if resume:
        command = (*(word for word in command if not word.startswith(f"{RESUME}=")), f"{RESUME}=true")
    for rank in range(job.nproc):
        with rank_log_path(job.logs, rank).open("a", encoding="utf-8") as log:
            log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} rank {rank} of {job.nproc}\n")

    with temp_folder(_REPORTS) as reports, received_signals() as received:
        ranks = spawn(
            job.nproc, command, logs=job.logs, reports=reports, gpu=job.gpu, variables={FETCHED: "1"}
        )  # what URLs name is here since this process has begun
        try:
            waiting, typed = signal_forwarder(received, ranks), Commands.typed()

            def keep_waiting() -> bool:
                if problem := forward_commands(typed.lines(), _output_dir(job.config)):
                    print(escape_control_characters(problem), file=sys.stderr)
                return waiting()

            failures = watch(ranks, keep_waiting=keep_waiting)
            if len(received) > 1:
                failures = []  # the user ended them at once, so a rank may have lost one that was quicker
        finally:
            ranks.kill()
    numbers = [abs(ended.code) % 128 for ended in ranks.ended.values() if ended.code]  # of signals, if nothing failed
    code = 128 + (received[0] if received else numbers[0]) if numbers else 0
    return _Attempt(failures, code, bool(received))


def _verdict(job: Job, ended: _Attempt, attempt: int, before: dict[Path, int]) -> _Verdict:
    """Decide what comes after an attempt.

    Args:
        before: the checkpoints that existed before the first attempt, and when each was completed.
    """
    if not ended.failures:
        return _Verdict(None, ended.code)
    failure = root_cause(ended.failures)
    if failure.cause == "user error":
        return _Verdict(failure, USER_ERROR)
    restarts = job.config.distributed.max_restarts
    if attempt == restarts or ended.stopped:
        return _Verdict(failure, failure.code)
    newest, skipped = newest_complete(_output_dir(job.config))
    own = newest is not None and before.get(newest) != _completion_time(newest)  # others may be what this job replaces
    resume_source = f"from {newest}" if own else "this job has written no complete checkpoint, so it begins as it began"
    notes = (*skipped, f"restart {attempt + 1} of {restarts}: {resume_source}")
    return _Verdict(failure, failure.code, restart=True, resume=own, notes=notes)


def _announcement(job: Job, topology: Topology) -> str:
    layout = " x ".join(f"{axis} {topology.degree(axis)}" for axis in AXES if topology.degree(axis) > 1)
    ranks = f"{topology.world_size} ranks ({layout})" if layout else "1 rank"
    return f"{ranks}; the output of each: {_logs(job)}"


def _make_log_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{folder}: the output of the ranks cannot be written there: {error.strerror}\n"
            "  write another output_dir, or --rank-logs DIR for that output alone"
        ) from None


def _logs(job: Job) -> Path:
    return rank_log_path(job.logs, 0).with_name("rank-N.log")


def _output_dir(config: Config) -> Path:
    return Path(config.basic.output_dir).expanduser()


def _checkpoints(config: Config) -> dict[Path, int]:
    return {folder: _completion_time(folder) for folder in checkpoint_folders(_output_dir(config))}


def _completion_time(checkpoint: Path) -> int:
    """When a checkpoint was completed (nanoseconds); 0 where it is not complete."""
    manifest = checkpoint / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.is_file() else 0
