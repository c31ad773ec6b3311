"""The HTTP server over vmmkv: an OpenAI-shaped API in one process, the engine in another; or the engine in your own process.

`launch.run` starts both. This process does HTTP, tokenising and detokenising (`app`, `tokenizer`, `detokenize`);
`engine` alone launches kernels and maps memory, since a busy Python thread beside a driver call makes it a hundred
times dearer. They speak `protocol` over one local socket.

    from vmmkv.server import Engine, SamplingParams

is the same engine without HTTP, for prompts that are at hand: see `offline`. Importing this package imports neither; they
come when they are asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vmmkv.server.llm import Completion, CompletionOutput, Engine
    from vmmkv.server.models import ModelUnavailable, UnsupportedModel
    from vmmkv.server.sampling_params import SamplingParams

__all__ = ["Completion", "CompletionOutput", "Engine", "ModelUnavailable", "SamplingParams", "UnsupportedModel"]

_MODULE_OF = {
    "Completion": "llm",
    "CompletionOutput": "llm",
    "Engine": "llm",
    "ModelUnavailable": "models",
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
            raise ImportError(f"{name} needs {error.name}, which is not installed: pip install 'vmmkv[server]'") from error
        return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
