"""`vmmkv serve`: a model over HTTP, with the API that OpenAI's clients speak."""

import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from vmmkv.server.config import CONFIG_VARIABLE, OPTIONS, SECRETS, VARIABLES, Option, make_configs

SUMMARY = "serve a model over HTTP, its KV cache in vmmkv"

EXAMPLES = """\
examples:
  vmmkv serve                          SmolLM2-135M, fetched first if need be
  vmmkv serve --model ./my-model --device cuda:1
                                       a transformers directory, another GPU
  vmmkv serve --port 0 --kv-budget 512MiB
                                       any free port, and little memory
  vmmkv serve --model ./my-model --load-format dummy
                                       random weights, to measure speed
  vmmkv serve --config serve.toml --port 8080
                                       as the file says, on another port

  curl http://127.0.0.1:8000/v1/chat/completions \\
       -H 'Content-Type: application/json' \\
       -d '{"model": "smollm2-135m", "messages":
            [{"role": "user", "content": "What is the capital of France?"}]}'

configuration:
  Every option can be a flag, a variable of the environment or a key of a
  TOML file. A flag goes before a variable, that before the file, that before
  the default. Unknown VMMKV_ variables and unknown keys are refused.

  flag                variable                   in the file of --config
  --max-num-seqs 64   VMMKV_MAX_NUM_SEQS=64      max_num_seqs = 64
  --kv-budget 4GiB    VMMKV_KV_BUDGET=4GiB       kv_budget = "4GiB"
  --no-prefix-cache   VMMKV_PREFIX_CACHE=false   prefix_cache = false
"""


class Words(NamedTuple):
    """What `--help` says of an option."""

    does: str
    metavar: str | None = None
    default: str | None = None
    """In words, where the field's is None."""


HELP: Final[Mapping[str, Words]] = {
    "model": Words("smollm2-135m, a transformers directory, or a hub name", "NAME|DIR"),
    "host": Words("address to listen on; the default is this machine alone"),
    "port": Words("port to listen on, 0 for any that is free"),
    "device": Words("auto (a GPU if there is one), cpu, cuda or cuda:INDEX"),
    "dtype": Words("auto (float32 on the CPU, else bfloat16), float32, bfloat16 or float16"),
    "kv_budget_bytes": Words("memory for the KV cache, such as 4GiB", "SIZE", "from what is free"),
    "max_tokens": Words("longest prompt and answer together", "N", "the model's"),
    "max_num_seqs": Words("sequences that run at once", "N"),
    "max_num_batched_tokens": Words(
        "tokens that a step computes at most: more is faster in all, fewer keep answers flowing while prompts are computed",
        "N",
        "by the device",
    ),
    "prefix_cache": Words("share what prompts have in common; without, every prompt is computed from its first token"),
    "model_impl": Words(
        "auto (vmmkv for the models that it knows), vmmkv (the decoder driven by the model's configuration) or transformers "
        "(its own code, unmodified)",
    ),
    "load_format": Words("auto (the model's safetensors), or dummy for random weights"),
    "seed": Words("of dummy weights", "N"),
    "api_keys": Words(
        "answer only who has this key, on every route but /health; may be given several times. Other users of this machine "
        "can see it in the list of processes",
        "KEY",
        "answer everybody",
    ),
    "api_key_file": Words("the same, with a key on each line of a file", "FILE"),
    "admin_key": Words("opens /kv/reset and /kv/resize, which are not there without it", "KEY"),
    "admin_key_file": Words("the same, in a file", "FILE"),
    "allowed_hosts": Words(
        "answer requests for this name too, beside addresses and localhost; may be given several times. Once there is one, "
        "other names are refused wherever the server listens",
        "NAME",
        "any name beyond this machine",
    ),
    "max_queued_requests": Words("sequences in flight beyond --max-num-seqs, before requests get 429", "N"),
    "max_queued_tokens": Words("tokens of prompts whose answers have not begun, before requests get 429", "N"),
    "max_body_bytes": Words("of a request", "SIZE", "16MiB"),
    "request_timeout_s": Words("from a request to the end of its answer, after which it gets 408", "SECONDS", "any time"),
    "drain_timeout_s": Words("how long requests in flight may go on after a signal to stop", "SECONDS"),
    "stuck_after_s": Words("report an engine that has work and makes no step for so long", "SECONDS"),
    "log_level": Words("debug, info, warning or error"),
    "log_format": Words("console, or json for an object a line"),
}
"""Of each field of what options make. One that is not here is an option all the same, without words."""


_SWITCHES: Final = "Switches"
"""Options with two flags have a panel of their own: a column for the second one leaves the others too little room."""


def run(context: typer.Context, config: Path | None, **options: Any) -> int:
    """Serve until a signal. Options that are None were given neither as a flag nor in the environment."""
    from vmmkv.config import read_environment

    read_environment(others=VARIABLES)
    given = {field: value for field, value in options.items() if value not in (None, [])}
    variables = {one.field: one.variable for one in OPTIONS}
    sources = {field: variables[field] for field in given if _is_from_environment(context, field)}
    configs = make_configs(given, sources, config)
    for field in SECRETS:  # the engine and the compiler of grammars inherit the environment, and are to see no key
        os.environ.pop(variables[field], None)
    try:
        from vmmkv.server.launch import run as launch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vmmkv"):
            raise
        raise ValueError(f"serving needs {error.name}, which is not installed: pip install 'vmmkv[server,hf]'") from error
    return launch(*configs)


def _is_from_environment(context: typer.Context, field: str) -> bool:
    source = context.get_parameter_source(field)
    return source is not None and source.name == "ENVIRONMENT"


def flags(option: Option) -> list[str]:
    """As they are written: of what can be switched both, for the file may have said either."""
    return [option.flag, f"--no-{option.flag.removeprefix('--')}"] if option.kind is bool else [option.flag]


def _parameters() -> Iterator[inspect.Parameter]:
    """Of `run`, as typer reads them: an option for each of OPTIONS, all of them absent by default."""
    kind = inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("context", kind, annotation=typer.Context)
    file = typer.Option(envvar=CONFIG_VARIABLE, metavar="FILE", help="a TOML file of options; see below")
    yield inspect.Parameter("config", kind, annotation=Annotated[Path | None, file], default=None)
    for one in OPTIONS:
        words = HELP.get(one.field, Words(""))
        shown = words.default or _shown(one.default)
        info = typer.Option(
            "/".join(flags(one)), envvar=one.variable, metavar=words.metavar, help=words.does, show_default=shown,
            rich_help_panel=_SWITCHES if one.kind is bool else None,
        )  # fmt: skip
        of_kind = list[str] if one.kind == tuple[str, ...] else one.kind
        yield inspect.Parameter(one.field, kind, annotation=Annotated[of_kind | None, info], default=None)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None or default == () else str(default)


run.__signature__ = inspect.Signature(list(_parameters()), return_annotation=int)  # type: ignore[attr-defined]
