"""Ranks that another launcher has started: its variables, translated into those that Paddle reads.

`paddle.distributed.launch` sets Paddle's own. Slurm and MPI set others, and what runs on Kubernetes or Ray sets RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does. docs/parallelism.md has a command for each. No Paddle here.
"""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from erniekit.errors import ConfigurationError
from erniekit.launch.local import OWN_PORTS, STORE_VARIABLES, visible_gpus


@dataclass(frozen=True)
class _Launcher:
    """The variables of a launcher; `local_rank` and `local_size` count the ranks of one machine."""

    title: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str


PADDLE = _Launcher(
    "paddle.distributed.launch", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE"
)
# Set by srun for the tasks it starts. A batch script without srun has SLURM_PROCID, too, and is no rank.
SLURM = _Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
# The inner launcher comes first where one runs inside another, such as mpirun within a Slurm job.
LAUNCHERS = (
    PADDLE,
    _Launcher("torchrun, Kubernetes or Ray", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SLURM,
)


def adopt_rank(environ: MutableMapping[str, str], *, gpu: bool = True) -> None:
    """Set Paddle's variables in `environ` where a launcher has started this process as one of several ranks.

    Args:
        environ: usually `os.environ`; left alone where no launcher has set anything.
        gpu: the run may use GPUs, so each rank is given one.

    Raises:
        ConfigurationError: some of a launcher's variables are missing, or contradict each other.
    """
    found = [(launcher, *numbers) for launcher in LAUNCHERS if (numbers := _rank_and_size(launcher, environ))]
    if not found:
        return
    launcher, rank, world_size = found[0]
    for other, other_rank, other_size in found[1:]:
        if launcher is not PADDLE and other_size == world_size and other_rank != rank:
            raise ConfigurationError(
                f"{launcher.rank}={rank} of {launcher.title} and {other.rank}={other_rank} of {other.title} contradict "
                f"each other: both say that there are {world_size} ranks\n"
                f"  unset the variables of the launcher that did not start this process"
            )
    if launcher is PADDLE and world_size > 1:
        _check_paddle_endpoints(rank, world_size, environ)
    if launcher is not PADDLE or world_size > 1:
        environ.update(_paddle_variables(launcher, rank, world_size, environ, gpu=gpu))
        for name in STORE_VARIABLES:
            environ.pop(name, None)


def refuse_several_nodes(environ: Mapping[str, str], command: Sequence[str]) -> None:
    """Raise ConfigurationError where NNODES asks for several machines, with the command that starts them."""
    nodes = environ.get("NNODES", "").strip()
    if nodes in ("", "1"):
        return
    master = f"{environ.get('MASTER_ADDR', 'ADDRESS_OF_NODE_0')}:{environ.get('MASTER_PORT', '8080')}"
    words = shlex.join(command[command.index("erniekit") + 1 :] if "erniekit" in command else command)
    raise ConfigurationError(
        f"NNODES={nodes}: erniekit starts the ranks of one machine; for several, run on each of them\n"
        f"  python -m paddle.distributed.launch --nnodes {nodes} --master {master} "
        f"--rank {environ.get('NODE_RANK') or 'NUMBER_OF_THIS_NODE'} --host ADDRESS_OF_THIS_NODE "
        f'--nproc_per_node RANKS_PER_NODE "$(which erniekit)" {words}\n'
        "  or use the cluster's launcher (docs/parallelism.md, Several machines)"
    )


def _rank_and_size(launcher: _Launcher, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return what a launcher says, or None where it did not start this process as one of several ranks."""
    rank, world_size = environ.get(launcher.rank), environ.get(launcher.world_size)
    if (rank is None and world_size is None) or (launcher is SLURM and world_size is None):
        return None
    if rank is None or world_size is None:
        present, missing = (launcher.rank, launcher.world_size)[:: 1 if world_size is None else -1]
        raise ConfigurationError(
            f"{present}={environ[present]} is set and {missing} is not: a rank started by {launcher.title} has both\n"
            f"  set {missing}, or unset {present} to let erniekit start the ranks of this machine"
        )
    size = _integer(launcher.world_size, world_size, least=1)
    number = _integer(launcher.rank, rank, least=0)
    if number >= size:
        raise ConfigurationError(
            f"{launcher.rank}={number} and {launcher.world_size}={size} contradict each other: "
            f"{size} ranks are numbered from 0 to {size - 1}"
        )
    return (number, size) if size > 1 or launcher is PADDLE else None


def _check_paddle_endpoints(rank: int, world_size: int, environ: Mapping[str, str]) -> None:
    endpoints = [endpoint for endpoint in environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",") if endpoint]
    current = environ.get("PADDLE_CURRENT_ENDPOINT")
    if endpoints and len(endpoints) != world_size:
        raise ConfigurationError(
            f"PADDLE_TRAINER_ENDPOINTS lists {len(endpoints)} addresses and PADDLE_TRAINERS_NUM is {world_size}: "
            "write one host:port for each rank"
        )
    if endpoints and current and endpoints[rank] != current:
        raise ConfigurationError(
            f"PADDLE_CURRENT_ENDPOINT={current} is not address {rank} of PADDLE_TRAINER_ENDPOINTS, {endpoints[rank]}, "
            f"although PADDLE_TRAINER_ID is {rank}"
        )


def _paddle_variables(
    launcher: _Launcher, rank: int, world_size: int, environ: Mapping[str, str], *, gpu: bool
) -> dict[str, str]:
    """Return Paddle's variables for this rank; what Paddle's own launcher has set stays as it is."""
    local_rank, local_size = _local_rank_and_size(launcher, environ)
    listed = environ.get("PADDLE_TRAINER_ENDPOINTS", "") if launcher is PADDLE else ""
    paddle_master = environ.get("PADDLE_MASTER") if launcher is PADDLE else None
    master = paddle_master or listed.partition(",")[0] or _master(launcher, environ)
    host, _, port = master.rpartition(":")
    if listed:
        endpoints = listed.split(",")
    else:  # only this rank's own address is known, and only its own is used
        endpoints = [f"{host}:{int(port) + other}" for other in range(world_size)]
        endpoints[rank] = f"{host if rank == 0 else _own_host(host, int(port))}:{int(port) + rank}"
    variables = {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world_size),
        "PADDLE_LOCAL_RANK": str(local_rank),
        "PADDLE_LOCAL_SIZE": str(local_size),
        "PADDLE_MASTER": master,
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
    }
    if "SLURM_CPUS_PER_TASK" in environ:
        variables["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or environ["SLURM_CPUS_PER_TASK"]
    if launcher is not PADDLE and gpu and (gpus := visible_gpus()):
        if 1 < gpus < local_size:  # one alone is the rank's own, chosen by the launcher
            raise ConfigurationError(
                f"{local_size} ranks on this machine, and each sees {gpus} GPUs: start one per GPU"
            )
        variables["FLAGS_selected_gpus"] = str(local_rank % gpus)
    return variables


def _local_rank_and_size(launcher: _Launcher, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return this rank's number on its machine, and how many there are; 0 and 1 where nothing says so."""
    size = environ.get(launcher.local_size, "1")
    if launcher is SLURM:
        counts = list(_slurm_counts(size))
        node = _integer("SLURM_NODEID", environ.get("SLURM_NODEID", "0"), least=0)
        size = str(counts[min(node, len(counts) - 1)])
    local_rank = _integer(launcher.local_rank, environ.get(launcher.local_rank, "0"), least=0)
    return local_rank, max(local_rank + 1, _integer(launcher.local_size, size, least=1))


def _master(launcher: _Launcher, environ: Mapping[str, str]) -> str:
    """Return host:port of rank 0: MASTER_ADDR and MASTER_PORT, otherwise what the Slurm job implies.

    Raises:
        ConfigurationError: nothing says where rank 0 is.
    """
    host, port = (environ.get(name, "").strip() for name in STORE_VARIABLES)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    host = host or (_first_slurm_host(nodes) if nodes else "")
    if not port and "SLURM_JOB_ID" in environ:
        port = str(OWN_PORTS[_integer("SLURM_JOB_ID", environ["SLURM_JOB_ID"], least=0) % len(OWN_PORTS)])
    if not (host and port):
        missing = " and ".join(name for name, value in zip(STORE_VARIABLES, (host, port), strict=True) if not value)
        raise ConfigurationError(
            f"{launcher.rank} says that this is a rank started by {launcher.title}, and {missing} "
            f"{'are' if ' ' in missing else 'is'} not set, so it cannot find rank 0\n"
            "  set MASTER_ADDR to the address of the machine of rank 0, and MASTER_PORT to a free port there, the same "
            "for all ranks"
        )
    return f"{host}:{_integer('MASTER_PORT', port, least=1, most=65_535)}"


def _own_host(host: str, port: int) -> str:
    """Return the address by which other machines reach this one: that of the interface that leads to rank 0."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(f"{host} (rank 0) cannot be reached: {error.strerror or error}") from None
    return host if own.startswith("127.") else own  # this is the machine of rank 0


def _first_slurm_host(nodes: str) -> str:
    """Return the first host of a list such as "gpu[07-09,12],login1"."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ConfigurationError(f"SLURM_NODELIST={nodes}: expected a list of hosts; set MASTER_ADDR instead")
    return "".join(part or "" for part in match.groups())


def _slurm_counts(text: str) -> Iterator[int]:
    """Yield the tasks of each node; "2(x3),1" stands for 2, 2, 2, 1."""
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise ConfigurationError(f"SLURM_STEP_TASKS_PER_NODE={text}: expected numbers such as 2(x3),1")
        yield from [int(match[1])] * int(match[2] or 1)


def _integer(name: str, word: str, *, least: int, most: int | None = None) -> int:
    if not word.strip().isdecimal() or int(word) < least or (most is not None and int(word) > most):
        raise ConfigurationError(f"{name}={word}: write a whole number from {least} {f'to {most}' if most else 'on'}")
    return int(word)
