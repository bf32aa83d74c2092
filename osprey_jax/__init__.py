"""Drafters for speculative decoding, made from pretrained small language models, in JAX."""

import os

# transformers is used for tokenizers and configs alone; it would warn at every start that PyTorch is not there.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

__version__ = "0.1.0"
