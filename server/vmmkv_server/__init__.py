"""Serving: an OpenAI-shaped HTTP server with the engine in a process of its own, or the engine in your process.

    from vmmkv_server import LLM, SamplingParams

`launch.run` starts the server; `http.app` has its routes; `engine` computes; `protocol` is what the two processes say.
The engine has a process of its own because a busy Python thread beside it makes driver calls a hundred times dearer.
Importing this package imports none of its modules; they come with the first name that needs them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vmmkv_server.engine.errors import EngineDied
    from vmmkv_server.llm import LLM, CompletionOutput, RequestOutput
    from vmmkv_server.models import ModelUnavailable, UnsupportedModel
    from vmmkv_server.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineDied", "ModelUnavailable", "RequestOutput", "SamplingParams", "UnsupportedModel"]

_MODULE_OF = {
    "CompletionOutput": "llm",
    "EngineDied": "engine.errors",
    "LLM": "llm",
    "ModelUnavailable": "models",
    "RequestOutput": "llm",
    "SamplingParams": "sampling_params",
    "UnsupportedModel": "models",
}


if not TYPE_CHECKING:  # to a type checker every name would be one of the package's

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        try:
            module = import_module(f"{__name__}.{_MODULE_OF[name]}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("vmmkv"):
                raise
            remedy = "in a checkout: pip install '.[server,hf]'"
            raise ImportError(f"{name} needs {error.name}, which is not installed; {remedy}") from None
        return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
