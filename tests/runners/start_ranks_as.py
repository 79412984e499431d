"""Start one machine's ranks of a job as Slurm, MPI or a Kubernetes operator would: with their variables, nothing else.

    python start_ranks_as.py LAUNCHER NODE NODES RANKS_PER_NODE MASTER_ADDR MASTER_PORT COMMAND ...

The launchers themselves are not on the machines that run the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys


def variables(launcher: str, node: int, nodes: int, each: int, local: int, host: str, port: str) -> dict[str, str]:
    rank, size = node * each + local, nodes * each
    master = {"MASTER_ADDR": host, "MASTER_PORT": port}
    if launcher == "slurm":  # as srun sets them; the list of nodes begins with that of rank 0
        return {
            "SLURM_JOB_ID": "4711",
            "SLURM_NTASKS": str(size),
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NODELIST": f"{host},unused",
            "MASTER_PORT": port,
        }
    if launcher == "mpi":  # mpirun -x MASTER_ADDR -x MASTER_PORT
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        numbers = zip(names, (rank, size, local, each), strict=True)
        return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers} | master
    if launcher == "kubernetes":  # of the operators for PyTorch jobs: one rank in each pod
        assert each == 1
        return {"RANK": str(rank), "WORLD_SIZE": str(size), **master}
    raise SystemExit(f"{launcher}: unknown launcher")


def main() -> int:
    launcher, node, nodes, each, host, port, *command = sys.argv[1:]
    ranks = [
        subprocess.Popen(
            command, env=os.environ | variables(launcher, int(node), int(nodes), int(each), local, host, port)
        )
        for local in range(int(each))
    ]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
