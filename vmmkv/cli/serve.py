"""`vmmkv serve`: a model over HTTP, with the API that OpenAI's clients speak."""

import inspect
import os
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Annotated, Any

import typer

from vmmkv.config import read_environment
from vmmkv_server.config import CONFIG_VARIABLE, OPTIONS, SECRETS, VARIABLES, Option, make_config

SUMMARY = "serve a model over HTTP with OpenAI's API"

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
  TOML file. A flag overrides a variable, and a variable overrides the file.
  Unknown VMMKV_ variables and unknown keys are refused. The server guide
  (docs/guides/server.md) says how to choose.

  flag                variable                   in the file of --config
  --max-num-seqs 64   VMMKV_MAX_NUM_SEQS=64      max_num_seqs = 64
  --kv-budget 4GiB    VMMKV_KV_BUDGET=4GiB       kv_budget = "4GiB"
  --no-prefix-cache   VMMKV_PREFIX_CACHE=false   prefix_cache = false
"""


def run(context: typer.Context, config: Path | None, **options: Any) -> int:
    """Serve until a signal. Options that are None were given neither as a flag nor in the environment."""
    read_environment(others=VARIABLES)
    given = {field: value for field, value in options.items() if value not in (None, [])}
    variables = {one.field: one.variable for one in OPTIONS}
    sources = {field: context.get_parameter_source(field) for field in given}
    of_environment = {field: variables[field] for field, source in sources.items() if source and source.name == "ENVIRONMENT"}
    made = make_config(given, of_environment, config)
    for field in SECRETS:  # the processes of the engine and of grammars inherit the environment
        os.environ.pop(variables[field], None)
    try:
        from vmmkv_server.launch import run as launch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vmmkv"):
            raise
        remedy = "in a checkout: pip install '.[server,hf]'"
        raise ValueError(f"serving needs {error.name}, which is not installed; {remedy}") from error
    return launch(made)


def flags(option: Option) -> list[str]:
    """Flags of an option. A switch has two, since the file may have set either."""
    return [option.flag, f"--no-{option.flag.removeprefix('--')}"] if option.kind is bool else [option.flag]


def shown_default(option: Option) -> str:
    """The default in words."""
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return option.help.default or ("none" if option.default is None else str(option.default))


def _parameters() -> Iterator[inspect.Parameter]:
    """The parameters of `run` as typer reads them: None stands for an option that was not given."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("context", keyword, annotation=typer.Context)
    file = typer.Option(envvar=CONFIG_VARIABLE, metavar="FILE", help="a TOML file of options; see below")
    yield inspect.Parameter("config", keyword, annotation=Annotated[Path | None, file], default=None)
    for one in OPTIONS:
        kind = list[str] if one.kind == tuple[str, ...] else str if one.is_size else one.kind
        info = typer.Option(
            "/".join(flags(one)),
            envvar=one.variable,
            metavar=one.help.metavar,
            help=one.help.text,
            show_default=shown_default(one),
            rich_help_panel=one.help.panel,
            parser=_switch if one.kind is bool else None,
        )
        yield inspect.Parameter(one.field, keyword, annotation=Annotated[kind | None, info], default=None)


def _switch(text: str) -> bool:
    """Value of a switch's environment variable. Raises: typer.BadParameter."""
    if text.lower() not in ConfigParser.BOOLEAN_STATES:
        raise typer.BadParameter(f"{text!r} is not known; use true or false")
    return ConfigParser.BOOLEAN_STATES[text.lower()]


run.__signature__ = inspect.Signature(list(_parameters()), return_annotation=int)  # type: ignore[attr-defined]
