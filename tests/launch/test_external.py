"""Ranks that other launchers have started: whose variables are understood, and what is refused."""

from __future__ import annotations

import pytest

from erniekit.errors import ConfigurationError
from erniekit.launch import external
from erniekit.launch.external import adopt_rank

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7000"}
ENDPOINTS = "10.0.0.1:6000,10.0.0.1:6001,10.0.0.2:6000,10.0.0.2:6001"
PADDLE = {
    "PADDLE_TRAINER_ID": "2",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_LOCAL_RANK": "0",
    "PADDLE_LOCAL_SIZE": "2",
    "PADDLE_MASTER": "10.0.0.1:5999",
    "PADDLE_TRAINER_ENDPOINTS": ENDPOINTS,
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6000",
}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MASTER}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    **MASTER,
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", **MASTER}
SLURM = {
    "SLURM_JOB_ID": "12005",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODELIST": "127.0.0.[1-2]",
}


def adopted(variables: dict[str, str], **more: str) -> dict[str, str]:
    environ = {**variables, **more}
    adopt_rank(environ, gpu=False)
    return environ


def names(environ: dict[str, str]) -> tuple[str, ...]:
    which = ("TRAINER_ID", "TRAINERS_NUM", "LOCAL_RANK", "LOCAL_SIZE", "MASTER")
    return tuple(environ[f"PADDLE_{name}"] for name in which)


@pytest.mark.parametrize("variables", [TORCHRUN, OPEN_MPI, MPICH], ids=["torchrun", "open mpi", "mpich"])
def test_a_launcher_says_which_rank_this_is(variables: dict[str, str]) -> None:
    environ = adopted(variables)
    assert names(environ) == ("2", "4", "0", "2", "127.0.0.1:7000")
    assert environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[2] == environ["PADDLE_CURRENT_ENDPOINT"] == "127.0.0.1:7002"
    assert len(environ["PADDLE_TRAINER_ENDPOINTS"].split(",")) == 4
    assert "MASTER_ADDR" not in environ  # Paddle would prefer it


def test_slurm_says_where_rank_0_is() -> None:
    environ = adopted(SLURM)
    assert names(environ) == ("2", "4", "0", "2", "127.0.0.1:20005")
    assert names(adopted(SLURM, MASTER_PORT="99"))[-1] == "127.0.0.1:99"
    assert names(adopted(SLURM, **MASTER))[-1] == "127.0.0.1:7000"
    assert "OMP_NUM_THREADS" not in environ
    assert adopted(SLURM, SLURM_CPUS_PER_TASK="6")["OMP_NUM_THREADS"] == "6"
    assert adopted(SLURM, SLURM_CPUS_PER_TASK="6", OMP_NUM_THREADS="3")["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a,b", "a"),
        ("rack[1-2]-ib", "rack1-ib"),
        ("node-1.cluster,node-2.cluster", "node-1.cluster"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert external._first_slurm_host(nodes) == first


def test_the_ranks_of_each_slurm_node() -> None:
    assert list(external._slurm_counts("4(x2),1")) == [4, 4, 1]
    with pytest.raises(ConfigurationError, match="SLURM_STEP_TASKS_PER_NODE=four"):
        list(external._slurm_counts("four"))


def test_a_pod_without_local_numbers_has_one_rank() -> None:
    assert names(adopted({"RANK": "1", "WORLD_SIZE": "2", **MASTER})) == ("1", "2", "0", "1", "127.0.0.1:7000")


@pytest.mark.parametrize("more", [{}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}, TORCHRUN | {"RANK": "3"}])
def test_paddles_own_variables_stay_and_come_first(more: dict[str, str]) -> None:
    environ = adopted(PADDLE, **more)
    assert {name: environ[name] for name in PADDLE} == PADDLE
    assert "MASTER_ADDR" not in environ


def test_paddles_variables_may_name_rank_0_alone() -> None:
    small = {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "PADDLE_MASTER": "127.0.0.1:7000"}
    assert adopted(small)["PADDLE_TRAINER_ENDPOINTS"] == "127.0.0.1:7000,127.0.0.1:7001"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MASTER_ADDR": "10.0.0.1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {name: word for name, word in SLURM.items() if name != "SLURM_STEP_NUM_TASKS"},  # a batch script without srun
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # an interactive shell
        {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"},
    ],
)
def test_a_process_alone_stays_as_it_is(variables: dict[str, str]) -> None:
    assert adopted(variables) == variables


def test_the_inner_launcher_counts() -> None:
    """One launcher a node, started by srun, which starts two ranks; and mpirun within a Slurm job."""
    outer = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert names(adopted({**outer, **TORCHRUN})) == ("2", "4", "0", "2", "127.0.0.1:7000")
    mpi = {name: word for name, word in OPEN_MPI.items() if name not in MASTER}
    assert names(adopted({**outer, **mpi})) == ("2", "4", "0", "2", "127.0.0.1:20005")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PADDLE_TRAINER_ID": "1"}, "PADDLE_TRAINER_ID=1 is set and PADDLE_TRAINERS_NUM is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set and RANK is not: .*\n  set RANK, or unset WORLD_SIZE"),
        ({"RANK": "4", "WORLD_SIZE": "4", **MASTER}, "RANK=4 and WORLD_SIZE=4 contradict each other"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK=one: write a whole number from 0 on"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not set, so it cannot find rank 0"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999: write a whole number from 1 to 65535"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "started by Open MPI, and MASTER_ADDR and"),
        ({**TORCHRUN, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1"}, "RANK=2 of .* and OMPI_COMM_WORLD_RANK=1 of .*contrad"),
        (PADDLE | {"PADDLE_TRAINERS_NUM": "3"}, "lists 4 addresses and PADDLE_TRAINERS_NUM is 3"),
        (PADDLE | {"PADDLE_CURRENT_ENDPOINT": "10.0.0.3:1"}, "10.0.0.3:1 is not address 2 of PADDLE_TRAINER_ENDPOINTS"),
        ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
    ],
)
def test_half_of_the_variables_or_contradictions_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        adopted(variables)


@pytest.mark.parametrize(("visible", "chosen"), [(1, "0"), (2, "1"), (8, "1")])
def test_each_rank_has_a_gpu(visible: int, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "visible_gpus", lambda: visible)
    environ = TORCHRUN | {"LOCAL_RANK": "1"}
    adopt_rank(environ)
    assert environ["FLAGS_selected_gpus"] == chosen
    with pytest.raises(ConfigurationError, match="8 ranks on this machine, and each sees 2 GPUs"):
        monkeypatch.setattr(external, "visible_gpus", lambda: 2)
        adopt_rank(TORCHRUN | {"LOCAL_WORLD_SIZE": "8"})
