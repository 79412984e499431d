"""One command on several ranks: how many, what is done before they start, and starting again after a failure.

Needs no Paddle. Where the processes come from, how they are watched, and how several machines work together:
`launch/local.py`, `launch/watch.py`, `launch/rendezvous.py`.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from erniekit.build.data import evaluates, evaluation_dataset, training_dataset
from erniekit.build.layout import known_model_config, partition_layers
from erniekit.build.model import initial_weights, open_tokenizer
from erniekit.config import Config
from erniekit.distributed.rank import is_rank
from erniekit.distributed.topology import AXES, Topology, topology_from
from erniekit.errors import ConfigurationError
from erniekit.launch.local import free_port, rank_log_path, spawn, visible_gpus
from erniekit.launch.rendezvous import NodeLostError, Nodes, Rendezvous, connect_nodes
from erniekit.launch.watch import Failure, received_signals, root_cause, signal_forwarder, watch
from erniekit.training.checkpoint.atomic_folder import MANIFEST, checkpoint_folders, newest_complete
from erniekit.training.control import NO_COMMANDS, Commands, forward_commands

logger = logging.getLogger(__name__)

LOG_FOLDER = "rank_logs"  # in output_dir
FAILED, USER_ERROR = 1, 2  # exit codes
RESUME = "resume_from_checkpoint"


@dataclass(frozen=True)
class Job:
    """A command that several ranks run.

    Attributes:
        command: what each of them runs; `name=value` words can be appended.
        here: the number of ranks on this machine; each has a GPU of its own where `gpu`.
        rendezvous: where this machine meets the others of the job; None for one machine.
        logs: the folder for the output of each rank.
    """

    config: Config
    command: tuple[str, ...]
    nproc_per_node: int
    gpu: bool
    rendezvous: Rendezvous | None
    logs: Path


def plan_job(config: Config, command: tuple[str, ...], *, nproc: int | None, logs: Path | None) -> Job | None:
    """The job that this process should start; None where it does the work itself, alone or as a rank of a job.

    One rank alone is a job where it may have to be started again.

    Args:
        nproc: the number of ranks on this machine, if the user gave it. Otherwise one for each GPU that is visible, or,
            on a CPU, as many as the degrees of the configuration need.

    Raises:
        ConfigurationError: the layout does not fit the number of ranks, or this process is a rank already.
    """
    if is_rank():
        if nproc is not None:
            raise ConfigurationError(
                f"--nproc {nproc}: this process is rank {os.environ['PADDLE_TRAINER_ID']} of a job already "
                "(PADDLE_TRAINER_ID is set)\n  leave --nproc out, or unset the PADDLE_ variables"
            )
        return None
    rendezvous = Rendezvous.from_environment()
    nodes = rendezvous.nodes if rendezvous else 1
    device = config.basic.device
    gpus = 0 if device == "cpu" else visible_gpus()
    if gpus and nproc is not None and nproc > gpus:
        raise ConfigurationError(
            f"--nproc {nproc}: every rank needs a GPU of its own, and {gpus} can be seen\n"
            f"  write --nproc {gpus}, or device=cpu"
        )
    if nproc is None and gpus:
        nproc = 1 if ":" in device else gpus
    elif nproc is None:
        nproc = max(1, topology_from(config).world_size // nodes)
    if rendezvous is None:
        topology_from(config, nproc)
        if nproc == 1 and not config.distributed.max_restarts:
            return None
    folder = logs or _output_dir(config) / LOG_FOLDER
    return Job(config, command, nproc, gpus > 0, rendezvous, folder)


def run_job(job: Job) -> int:
    """Run a job to its end, or to its last failure.

    Returns:
        The exit code: 0, that of the rank that failed first (2 for what the user can mend), or 130 and 143 where a
        signal ended the job.

    Raises:
        UserError: what the user can mend, found before any rank was started.
    """
    prepare(job.config)
    if job.rendezvous:
        reach = ", which only this machine can reach" if job.rendezvous.is_loopback else ""
        logger.info(f"{job.rendezvous.nodes} nodes meet at {job.rendezvous}{reach}")
    with connect_nodes(job.rendezvous, job.nproc_per_node, job.config.distributed.distributed_timeout) as nodes:
        topology = topology_from(job.config, sum(nodes.counts))
        model = known_model_config(job.config)
        if not isinstance(model, str):  # otherwise the ranks say what is wrong with it
            partition_layers(job.config, model, topology)
        _make_log_folder(job.logs)
        logger.info(_announcement(job, nodes, topology))
        try:
            return _run_until_done(job, nodes)
        except NodeLostError as error:
            print(f"error: {error}; the ranks of this node were ended", file=sys.stderr)
            return FAILED


def prepare(config: Config) -> None:
    """Do once what every rank would otherwise do at the same time: fetch the model, tokenise the data.

    Raises:
        UserError: model or data cannot be used.
    """
    tokenizer, template = open_tokenizer(config)
    initial_weights(config)
    if config.basic.do_train:
        training_dataset(config, tokenizer, template)
    if evaluates(config) or not config.basic.do_train:
        evaluation_dataset(config, tokenizer, template)


@dataclass(frozen=True)
class _Attempt:
    """How the ranks of one node ended. As a dict it travels to node 0."""

    failures: list[Failure]
    code: int  # where nothing failed: 0, or what a signal made of it
    stopped: bool  # a signal asked for an end


@dataclass(frozen=True)
class _Verdict:
    """What node 0 makes of an attempt. As a dict it travels to the others."""

    failure: Failure | None
    code: int
    restart: bool = False
    resume: bool = False
    notes: tuple[str, ...] = ()


def _run_until_done(job: Job, nodes: Nodes) -> int:
    before = _checkpoints(job.config)
    resume, attempt = False, 0
    while True:
        port = nodes.broadcast(free_port(""))
        ended = _run_once(job, nodes, port, attempt, resume)
        all_ended = [
            _Attempt(**payload | {"failures": [Failure(**failure) for failure in payload["failures"]]})
            for payload in nodes.gather(asdict(ended))
        ]
        verdict = _verdict(job, all_ended, attempt, before) if nodes.node_rank == 0 else None
        payload = nodes.broadcast(None if verdict is None else asdict(verdict))
        verdict = _Verdict(**payload | {"failure": Failure(**payload["failure"]) if payload["failure"] else None})
        if verdict.failure is not None:
            print(f"error: {verdict.failure}", file=sys.stderr)
            if verdict.failure.cause != "user error":
                print(f"all ranks were ended; the output of each: {_logs(job)}", file=sys.stderr)
        for note in verdict.notes:
            logger.info(note)
        if not verdict.restart:
            return verdict.code
        resume, attempt = verdict.resume, attempt + 1


def _run_once(job: Job, nodes: Nodes, port: int, attempt: int, resume: bool) -> _Attempt:
    """Start the ranks of this node and wait for their end, or for a failure anywhere."""
    command = job.command
    if resume:
        command = (*(word for word in command if not word.startswith(f"{RESUME}=")), f"{RESUME}=true")
    local_ranks = nodes.local_ranks(port)
    for rank in local_ranks.ranks:
        with rank_log_path(job.logs, rank).open("a", encoding="utf-8") as log:
            log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} rank {rank} of {local_ranks.world_size}\n")

    def remote_failures() -> list[Failure]:
        heard = (alarm for alarm in nodes.poll_alarms() if alarm["attempt"] == attempt)
        return [Failure(**failure) for alarm in heard for failure in alarm["failures"]]

    with tempfile.TemporaryDirectory(prefix="erniekit-ranks-") as reports, received_signals() as received:
        ranks = spawn(local_ranks, command, logs=job.logs, reports=Path(reports), gpu=job.gpu)
        try:
            waiting, typed = (
                signal_forwarder(received, ranks),
                Commands.typed() if nodes.node_rank == 0 else NO_COMMANDS,
            )

            def keep_waiting() -> bool:
                if problem := forward_commands(typed.lines(), _output_dir(job.config)):
                    print(problem, file=sys.stderr)
                return waiting()

            failures = watch(ranks, keep_waiting=keep_waiting, remote_failures=remote_failures)
            if len(received) > 1:
                failures = []  # ended at once, as was asked for: one may have lost another that was quicker
            if failures:
                nodes.broadcast_alarm({"attempt": attempt, "failures": [asdict(failure) for failure in failures]})
        finally:
            ranks.kill()
    numbers = [abs(ended.code) % 128 for ended in ranks.ended.values() if ended.code]  # of signals, if nothing failed
    code = 128 + (received[0] if received else numbers[0]) if numbers else 0
    return _Attempt(failures, code, bool(received))


def _verdict(job: Job, ended: list[_Attempt], attempt: int, before: dict[Path, int]) -> _Verdict:
    """What comes after an attempt.

    Args:
        before: the checkpoints that were there before the first attempt, and when each was completed.
    """
    failures = [failure for each in ended for failure in each.failures]
    if not failures:
        return _Verdict(None, next((each.code for each in ended if each.code), 0))
    failure = root_cause(failures)
    if failure.cause == "user error":
        return _Verdict(failure, USER_ERROR)
    restarts = job.config.distributed.max_restarts
    if attempt == restarts or any(each.stopped for each in ended):
        return _Verdict(failure, failure.code)
    newest, skipped = newest_complete(_output_dir(job.config))
    own = newest is not None and before.get(newest) != _completion_time(newest)  # others may be what this job replaces
    resume_source = f"from {newest}" if own else "this job has written no complete checkpoint, so it begins as it began"
    notes = (*skipped, f"restart {attempt + 1} of {restarts}: {resume_source}")
    return _Verdict(failure, failure.code, restart=True, resume=own, notes=notes)


def _announcement(job: Job, nodes: Nodes, topology: Topology) -> str:
    layout = " x ".join(f"{axis} {topology.degree(axis)}" for axis in AXES if topology.degree(axis) > 1)
    ranks = f"{topology.world_size} ranks ({layout})" if layout else "1 rank"
    if nodes.links:
        node_ranks = nodes.local_ranks(0).ranks
        own = f"{node_ranks[0]} to {node_ranks[-1]}" if len(node_ranks) > 1 else f"rank {node_ranks[0]}"
        ranks += f", of which node {nodes.node_rank} of {len(nodes.counts)} runs {own}"
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
