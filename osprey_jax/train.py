"""Train a backbone on text (`stage: pretrain`) or a drafter on conversations (`stage: distill`)."""

from osprey_jax.command import run
from osprey_jax.config import TrainConfig, parse_arguments


def main() -> None:
    config = parse_arguments("osprey_jax.train", __doc__, TrainConfig)
    # Here, since processes that prepare data import this module too, and have no need of JAX.
    from osprey_jax.training import stages
    from osprey_jax.training.loop import check_run_directory, train
    from osprey_jax.training.mesh import make_mesh

    check_run_directory(config.run_dir)
    mesh = make_mesh(config.mesh, rows=config.batch_size // config.accumulation)
    train(config, stages.set_up(config, mesh), mesh)


if __name__ == "__main__":
    run(main)
