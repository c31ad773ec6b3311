"""The options of `vmmkv serve`, derived from CONFIGS: a field of one is a flag, a variable and a key of the file at once.

    max_num_seqs     --max-num-seqs 7       VMMKV_MAX_NUM_SEQS=7      max_num_seqs = 7
    kv_budget_bytes  --kv-budget 4GiB       VMMKV_KV_BUDGET=4GiB      kv_budget = "4GiB"
    prefix_cache     --no-prefix-cache      VMMKV_PREFIX_CACHE=false  prefix_cache = false
    deadline_s       --deadline 3           VMMKV_DEADLINE=3          deadline = 3

A flag goes before a variable, that before the file, that before the field's default. The command line (`vmmkv.cli.serve`)
reads flags and variables; this module knows their names, reads the file and puts all together.
"""

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vmmkv.config import PREFIX
from vmmkv.server.front_settings import FrontConfig
from vmmkv.server.settings import ServeConfig
from vmmkv.units import parse_bytes

CONFIG_VARIABLE: Final = f"{PREFIX}CONFIG"
URL_VARIABLE: Final = f"{PREFIX}URL"
API_KEY_VARIABLE: Final = f"{PREFIX}API_KEY"

CONFIGS: Final = (ServeConfig, FrontConfig)
"""What the options make, in the order in which `launch.run` takes them; no two have a field of one name."""

_BYTES: Final = "_bytes"
_UNITS: Final = (_BYTES, "_s")
"""That names of fields end with, and those of options do not."""

_NAMES: Final[Mapping[str, str]] = {"api_keys": "api_key", "max_body_bytes": "max_body_size", "allowed_hosts": "allowed_host"}
"""Of options that have another name than their field and its unit."""

_WANTED: Final[Mapping[Any, str]] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple[str, ...]: "a list of texts",
}
"""What a field can be, and how that is said."""

SECRETS: Final = ("api_keys", "admin_key")
"""Fields that no message shows, and that no other process is to inherit."""

_NORMALISED: Final[Mapping[str, Callable[[str], str]]] = {"log_level": str.lower}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of one of CONFIGS, as people give it."""

    field: str
    name: str
    """Of its key in the file; the field's, without its unit: sizes are given with theirs, times are in seconds."""
    kind: Any
    """A key of _WANTED: the field's type, without None; of sizes, text."""
    default: Any
    """The field's."""

    @property
    def is_size(self) -> bool:
        """Is it given as a size, such as 4GiB?"""
        return self.field.endswith(_BYTES)

    @property
    def flag(self) -> str:
        """On the command line; of what is on by default, the one that turns it off has `--no-`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """In the environment."""
        return f"{PREFIX}{self.name.upper()}"

    def value(self, given: Any) -> Any:
        """The field's value. Raises: ValueError for a size that is none."""
        if self.is_size and isinstance(given, str):
            return parse_bytes(given)
        if self.kind == tuple[str, ...]:
            return tuple(given)
        return _NORMALISED[self.field](given) if self.field in _NORMALISED else given

    def of_file(self, found: Any) -> Any:
        """A value as TOML has it, if it is of this option's type. Raises: ValueError, naming what is wanted."""
        is_number = isinstance(found, int) and not isinstance(found, bool)
        if self.kind is float and is_number:
            return float(found)
        if self.is_size:
            fits, wanted = isinstance(found, str) or is_number, 'a size, such as "4GiB", or a number of bytes'
        elif self.kind == tuple[str, ...]:
            found = [found] if isinstance(found, str) else found
            fits, wanted = isinstance(found, list) and all(isinstance(one, str) for one in found), _WANTED[self.kind]
        else:
            fits, wanted = is_number if self.kind is int else isinstance(found, self.kind), _WANTED[self.kind]
        if not fits:
            shown = "something else" if self.field in SECRETS else repr(found)
            raise ValueError(f"{self.name} is {shown}; wanted {wanted}")
        return found


def _option(field: "dataclasses.Field[Any]", annotation: Any) -> Option:
    kind = annotation
    if isinstance(annotation, types.UnionType):
        (kind,) = [one for one in typing.get_args(annotation) if one is not types.NoneType]
    if kind not in _WANTED:
        raise TypeError(f"the field {field.name} is a {kind}, and options are {', '.join(map(str, _WANTED))}, or None")
    is_size = field.name.endswith(_BYTES)
    unit = next((unit for unit in _UNITS if field.name.endswith(unit)), "")
    name = _NAMES.get(field.name, field.name.removesuffix(unit))
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return Option(
        field=field.name, name=name, kind=str if is_size else kind, default=default
    )  # fmt: skip


def _options(config: type[Any]) -> tuple[Option, ...]:
    annotations = typing.get_type_hints(config)
    return tuple(_option(field, annotations[field.name]) for field in dataclasses.fields(config))


OPTIONS: Final = tuple(option for config in CONFIGS for option in _options(config))
VARIABLES: Final = tuple(dict.fromkeys((*(one.variable for one in OPTIONS), CONFIG_VARIABLE, URL_VARIABLE, API_KEY_VARIABLE)))
"""Of the environment, that commands read: all but those of `vmmkv.config`."""


_FIELDS: Final = {one.field: one.flag for one in OPTIONS}
_FIELD: Final = re.compile(
    rf"(?<![\w./-])(?:({'|'.join(_FIELDS)})=|({'|'.join(name for name in _FIELDS if '_' in name)})(?![\w/-]))"
)
"""As messages of the engine name one: with a value behind it, or alone where the name is no word of English."""


def with_flags(message: str) -> str:
    """What the engine says of its options, as the command line has them: `max_tokens=9` is `--max-tokens 9` there."""
    return _FIELD.sub(lambda found: f"{_FIELDS[found[1]]} " if found[1] else _FIELDS[found[2]], message)


def read_file(path: Path) -> dict[str, Any]:
    """What a TOML file says, by field. Raises: ValueError naming the file, and the key or the line that is wrong."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; --config takes a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    by_name = {one.name: one for one in OPTIONS}
    if unknown := [key for key in found if key not in by_name]:
        near = difflib.get_close_matches(unknown[0].replace("-", "_").lower(), by_name, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(by_name)}"
        raise ValueError(f"{path}: unknown key {', '.join(unknown)}; {remedy}")
    try:
        return {by_name[key].field: by_name[key].of_file(value) for key, value in found.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def make_configs(given: Mapping[str, Any], sources: Mapping[str, str], file: Path | None) -> tuple[Any, ...]:
    """One of each of CONFIGS, from what flags and variables gave, by field, and a file for what they did not.

    `sources` names the variable that a field came from; fields that came from a flag are not in it.
    Raises: ValueError, that says where a wrong value came from unless it was a flag.
    """
    found = {} if file is None else read_file(file)
    sources = {**dict.fromkeys(found, str(file)), **{field: sources.get(field, "") for field in given}}
    by_field = {one.field: one for one in OPTIONS}
    field = ""
    try:
        values = {}
        for field, value in {**found, **given}.items():
            values[field] = by_field[field].value(value)
        field = ""
        fields = {config: {field.name for field in dataclasses.fields(config)} for config in CONFIGS}
        return tuple(config(**{name: values[name] for name in fields[config] & values.keys()}) for config in CONFIGS)
    except ValueError as error:
        message = with_flags(str(error))
        at_fault = [one for one in OPTIONS if one.field == field or re.search(rf"{one.flag}(?![\w-])", message)]
        origins = [f"{one.flag} is from {sources[one.field]}" for one in at_fault if sources.get(one.field)]
        raise ValueError("; ".join([message, *origins])) from error
