"""A draft vocabulary smaller than the target's: the tokens that the data supervises most."""

import numpy as np

from osprey_jax.command import UserError
from osprey_jax.data.rows import Rows


def most_frequent_tokens(rows: Rows, size: int, vocab_size: int) -> tuple[np.ndarray, float]:
    """(target ids of the `size` most frequent supervised tokens, ascending int32; share of supervised tokens covered).

    Ties go to the smaller id.

    Raises:
      UserError: `size` exceeds the target's vocabulary.
    """
    if size > vocab_size:
        raise UserError(f"draft_vocab_size {size} exceeds the target's vocabulary of {vocab_size}")
    supervised = rows.arrays["token_ids"][rows.arrays["loss_mask"] > 0]
    count = np.bincount(supervised, minlength=vocab_size)
    chosen = np.sort(np.argsort(-count, kind="stable")[:size])
    return chosen.astype(np.int32), float(count[chosen].sum() / max(count.sum(), 1))
