"""Drafters of this project for SGLang, 0.5.9 and 0.5.23: set `SGLANG_EXTERNAL_MODEL_PACKAGE=osprey_sgl_models`.

SGLang logs a model file that cannot be imported as a warning and goes on with its own class of the same name, which
would serve another model under our weights. What is imported here instead stops the server. The imports are relative,
since `apply.sh` puts these very files into SGLang.
"""

from . import eagle3  # noqa: F401
