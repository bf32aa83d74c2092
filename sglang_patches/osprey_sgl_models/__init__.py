"""Drafters of this project for SGLang: set `SGLANG_EXTERNAL_MODEL_PACKAGE=osprey_sgl_models`.

SGLang logs a model file that cannot be imported as a warning and goes on with its own class of the same name, which
would serve another model under our weights. What is imported here instead stops the server.
"""

import sglang

VERSION = "0.5.23"
if sglang.__version__ != VERSION:
    raise ImportError(f"osprey_sgl_models is written for SGLang {VERSION}; this is {sglang.__version__}")

from osprey_sgl_models import eagle3  # noqa: E402, F401
