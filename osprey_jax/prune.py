"""Stage 1: cut a pretrained language model to its first blocks.

python -m osprey_jax.prune --source DIR --layers N --out DIR
"""

import dataclasses
from pathlib import Path

from tqdm import tqdm

from osprey_jax.command import ArgumentParser, UserError, run
from osprey_jax.data.tokenizer import copy_tokenizer
from osprey_jax.files import new_directory, read_json
from osprey_jax.models.hf import TensorFiles, abstract_causal_lm, check_tensors, tensor_shapes, write_checkpoint
from osprey_jax.models.hf_config import config_path, transformer_config


def prune(source: str | Path, num_layers: int, out: str | Path) -> None:
    """Write to `out` the checkpoint `source` with its first `num_layers` blocks alone.

    Embedding, final norm and head stay; tensors keep their bytes and dtypes, a tied head stays tied.

    Raises:
      UserError: `source` is no usable Qwen3 or Llama checkpoint, has fewer blocks, or `out` already holds something.
    """
    source = Path(source)
    config = transformer_config(source)
    if not 1 <= num_layers <= config.num_layers:
        raise UserError(f"{source}: has {config.num_layers} layers, {num_layers} of them cannot be kept")
    files = TensorFiles(source)
    check_tensors(files, abstract_causal_lm(config))

    raw = read_json(config_path(source)) | {"num_hidden_layers": num_layers}
    if raw.get("layer_types") is not None:
        raw["layer_types"] = raw["layer_types"][:num_layers]
    kept = tensor_shapes(abstract_causal_lm(dataclasses.replace(config, num_layers=num_layers)))
    with new_directory(out) as directory:
        tensors = {name: files.read(name) for name in tqdm(kept, desc="read", unit="tensor", disable=None)}
        write_checkpoint(directory, tensors, raw)
        copy_tokenizer(source, directory)


def main() -> None:
    parser = ArgumentParser(prog="python -m osprey_jax.prune", description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, type=Path, metavar="DIR", help="HF checkpoint to cut")
    parser.add_argument("--layers", required=True, type=int, metavar="N", help="blocks to keep")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the result goes; must not exist")
    arguments = parser.parse_args()
    prune(arguments.source, arguments.layers, arguments.out)
    print(f"{arguments.out}: first {arguments.layers} layers of {arguments.source}")


if __name__ == "__main__":
    run(main)
