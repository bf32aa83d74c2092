"""Prepare the data of a training config: token rows in its cache, and a report of what became of every record.

`train` does this itself where it is still to be done. What was prepared before, by whichever run, is not done again;
what was interrupted goes on. Beside the rows lie `rejected.jsonl`, with each record that was dropped or cut and why,
and `lengths.png`.
"""

import sys

from osprey_jax.command import UserError, run
from osprey_jax.config import TrainConfig, config_parser, load_config


def main() -> None:
    parser = config_parser("osprey_jax.prepare", __doc__)
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="print N records of data.train, from its first rows, the supervised part marked",
    )
    arguments = parser.parse_args()
    if arguments.show < 0:
        raise UserError(f"--show {arguments.show} is not a number of records; see --help")
    config = load_config(arguments.config, arguments.overrides, TrainConfig)
    # Here, since processes that prepare data import this module too, and have no need of JAX.
    from osprey_jax.data.rows import REJECTED
    from osprey_jax.data.tokenizer import load_tokenizer
    from osprey_jax.reports.data import describe, show, write_histogram
    from osprey_jax.training.stages import prepared, recipe

    rows, eval_rows = prepared(config)
    for name, made in (("data.train", rows), ("data.eval", eval_rows)):
        if made is not None:
            picture = made.directory / "lengths.png"
            if not picture.exists():
                write_histogram(picture, made.report)
            print(f"{name}: {describe(made.report)}")
            print(f"  {made.directory} ({REJECTED}, {picture.name})", flush=True)
    tokenizer = load_tokenizer(recipe(config).tokenizer)
    for text in show(rows, tokenizer, arguments.show, colour=sys.stdout.isatty()):
        print(text)


if __name__ == "__main__":
    run(main)
