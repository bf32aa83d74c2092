"""Train a backbone on text (`stage: pretrain`) or a drafter on conversations (`stage: distill`)."""

import os
import socket
import time

from osprey_jax.command import UserError, run
from osprey_jax.config import TrainConfig, config_parser, load_config

PATIENCE = 300.0  # seconds for the first process to be there; JAX gives the others as much


def main() -> None:
    parser = config_parser("osprey_jax.train", __doc__)
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes: found through Slurm, Open MPI or Kubernetes, or told by "
        "JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID",
    )
    arguments = parser.parse_intermixed_args()  # overrides may stand between options
    config = load_config(arguments.config, arguments.overrides, TrainConfig)
    # Here, since processes that prepare data import this module too, and have no need of JAX.
    import jax

    if config.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(config.compilation_cache.expanduser().absolute()))
    if arguments.distributed:
        _join()
    from osprey_jax.training import stages
    from osprey_jax.training.loop import check_run_directory, train
    from osprey_jax.training.mesh import make_mesh

    check_run_directory(config.run_dir)
    mesh = make_mesh(config.mesh, rows=config.batch_size // config.accumulation)
    train(config, stages.set_up(config, mesh), mesh)


def _join() -> None:
    """Become one of the processes of a run. `UserError` where they cannot be found."""
    import jax

    _await_first()
    # On CPUs a program in flight may wait for one of another process that is itself held back behind many others.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    told = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    try:
        numbers = {name: int(os.environ[variable]) for name, variable in told.items() if variable in os.environ}
        jax.distributed.initialize(**numbers)
    except Exception as error:  # of JAX, of its coordination service, or of a number that is none
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--distributed: the other processes were not found ({reason}); start it with srun or mpirun, or set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID for each process"
        ) from error


def _await_first() -> None:
    """Until the first process listens, where the environment says at which address.

    JAX ends a process that waits in vain by an abort in native code, which no `except` sees.
    """
    address, process = os.environ.get("JAX_COORDINATOR_ADDRESS", ""), os.environ.get("JAX_PROCESS_ID", "0")
    host, _, port = address.rpartition(":")
    if process == "0" or not host or not port.isdecimal():
        return
    until = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > until:
                raise UserError(
                    f"--distributed: no first process at JAX_COORDINATOR_ADDRESS {address} within {PATIENCE:.0f} s "
                    f"({error}); start process 0 there, or correct the address"
                ) from error
        time.sleep(0.5)


if __name__ == "__main__":
    run(main)
