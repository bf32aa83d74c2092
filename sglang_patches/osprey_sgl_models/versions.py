"""The supported versions of SGLang, and each difference between them that the models meet."""

from sglang.version import __version__

SUPPORTED = ("0.5.9", "0.5.23")
if __version__ not in SUPPORTED:
    raise ImportError(f"osprey_sgl_models is written for SGLang {' and '.join(SUPPORTED)}; this is {__version__}")

if __version__ == "0.5.9":
    from sglang.srt.distributed import get_pp_group

    def draft_window() -> int | None:
        """How many of the last positions a drafter attends to; this version has no such setting: all."""
        return None

else:
    from sglang.srt.runtime_context import get_parallel, get_spec

    def get_pp_group():
        return get_parallel().pp_group

    def draft_window() -> int | None:
        """How many of the last positions a drafter attends to; None: all."""
        return get_spec().speculative_draft_window_size


def rope_config(config) -> tuple[float, dict | None]:
    """(theta, parameters or None) from a config as transformers 5 has it (0.5.23), or 4 (0.5.9)."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters and "rope_theta" in parameters:
        return parameters["rope_theta"], parameters
    return config.rope_theta, config.rope_scaling
