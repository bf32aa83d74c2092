"""A small target and backbone for the tests of this folder."""

import dataclasses

from osprey_jax.benchmark import shapes

SMALL = dataclasses.replace(
    shapes.QWEN3_4B_2LAYER,
    vocab_size=96,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    tie_word_embeddings=False,
)
TARGET = dataclasses.replace(SMALL, hidden_size=20, num_layers=8, num_heads=6)
