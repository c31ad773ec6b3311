"""What `vmmkv serve`, or an `Engine` of this process, was asked to do: validated once and passed down."""

import dataclasses
import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Final

from vmmkv.config import LOG_LEVELS, PREFIX
from vmmkv.units import KIB, MIB, PAGE_BYTES, counted, format_bytes, parse_bytes

# -------- settings

DEFAULT_MODEL: Final = "smollm2-135m"
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
MODEL_IMPLS: Final = ("auto", "vmmkv", "transformers")
LOAD_FORMATS: Final = ("auto", "dummy")

LOG_FORMATS: Final = ("console", "json")

_TEXTS: Final = ("model", "host", "device", "dtype", "model_impl", "load_format", "log_level", "log_format")
_NUMBERS: Final = {
    "port": "a port's number",
    "kv_budget_bytes": "a number of bytes, such as 4 * vmmkv.GIB, or None",
    "max_tokens": "a number of tokens, or None",
    "max_num_seqs": "a number of sequences",
    "max_num_batched_tokens": "a number of tokens, or None",
    "seed": "an integer",
}
_MAY_BE_NONE: Final = ("kv_budget_bytes", "max_tokens", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The settings of one engine, and of the server before it. Picklable, so that it can be handed to the engine process.

    An option that is wrong is named as its field, which who calls from Python gave: `device='gpu'`. The command line has its
    flags in its place (`vmmkv.server.config.with_flags`).

    Raises: ValueError naming the option, what it was and what it may be.
    """

    model: str = DEFAULT_MODEL
    """A known name, a local directory or a hub name: see `vmmkv.server.models.resolve`."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    device: str = "auto"
    """`auto` is the first GPU if there is one that works, else the CPU."""
    dtype: str = "auto"
    """Of weights, activations and KV; `auto` is float32 on the CPU and bfloat16 on a GPU."""
    kv_budget_bytes: int | None = None
    """Physical memory for the KV cache; None lets the engine choose from what is free."""
    max_tokens: int | None = None
    """The longest sequence, prompt and answer together; None is the model's own limit."""
    max_num_seqs: int = 256
    """Sequences that run at once; further requests wait."""
    max_num_batched_tokens: int | None = None
    """Tokens that one step computes at most, of prompts and answers together; None lets the engine choose for its device."""
    prefix_cache: bool = True
    """Whether prompts share the KV of what they have in common, with those that run and those that ran."""
    model_impl: str = "auto"
    """Whose code computes the model: `vmmkv` is the decoder driven by configuration, `transformers` that library's own,
    unmodified; `auto` is the first for models that it knows, else the second."""
    load_format: str = "auto"
    """`auto` reads the weights from safetensors; `dummy` makes random ones from config.json alone, to measure speed."""
    seed: int = 0
    """Of dummy weights, and of requests in this process that have none of their own."""
    log_level: str = "info"
    log_format: str = "console"
    """`console` logs lines for people, `json` an object a line."""

    def __post_init__(self) -> None:
        self._check_types()
        if not self.model:
            raise ValueError(f"model='' is empty; name a model such as {DEFAULT_MODEL}, or a directory")
        if not self.host:
            raise ValueError("host='' is empty; use 127.0.0.1 for this machine alone, or 0.0.0.0 for all its networks")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port={self.port} is no port; use 1 to 65535, or 0 for any that is free")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r} is not known; use auto, cpu, cuda or cuda:0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not known; use one of {', '.join(DTYPES)}")
        if self.kv_budget_bytes is not None and self.kv_budget_bytes < PAGE_BYTES:
            raise ValueError(
                f"kv_budget_bytes is {format_bytes(self.kv_budget_bytes)}, less than one page of {format_bytes(PAGE_BYTES)}; "
                f"a small model wants {format_bytes(256 * MIB)} or more"
            )
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ValueError(f"max_tokens={self.max_tokens}: a sequence needs at least 2, one of a prompt and one of an answer")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs}: at least 1 sequence has to run")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: each "
                f"sequence needs one token a step; raise it to {self.max_num_seqs} or lower max_num_seqs to "
                f"{max(1, self.max_num_batched_tokens)}"
            )
        if self.model_impl not in MODEL_IMPLS:
            raise ValueError(f"model_impl={self.model_impl!r} is not known; use one of {', '.join(MODEL_IMPLS)}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format={self.load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed} is out of range; use 0 to 2**63 - 1")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level={self.log_level!r} is not known; use one of {', '.join(LOG_LEVELS)}")
        if self.log_format not in LOG_FORMATS:
            raise ValueError(f"log_format={self.log_format!r} is not known; use one of {', '.join(LOG_FORMATS)}")

    def _check_types(self) -> None:
        for name in _TEXTS:
            if not isinstance(text := getattr(self, name), str):
                raise ValueError(f"{name} is {text!r}; wanted a text")
        for name, wanted in _NUMBERS.items():
            value: Any = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise ValueError(f"{name} is {value!r}; wanted {wanted}")
            object.__setattr__(self, name, int(value))  # numpy's numbers do not go into JSON
        if not isinstance(self.prefix_cache, bool):
            raise ValueError(f"prefix_cache is {self.prefix_cache!r}; wanted True or False")


# -------- front settings
# What the HTTP process alone is to know: who may ask, and for how much. The engine's process never sees a key.

LEAST_KEY_CHARS: Final = 8
_KEY: Final = re.compile(r"[\x21-\x7e]+")
"""Visible ASCII, which a header carries as it is."""
_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """The limits and keys of one HTTP server.

    Raises: ValueError naming the option, what it was and what it may be. A key is in no message.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Who has none of them gets 401 on every route but /health. Empty: everybody may ask."""
    api_key_file: str | None = None
    """A file with more of them, one a line. None once it is read."""
    admin_key: str | None = field(default=None, repr=False)
    """Opens /kv/reset and /kv/resize, which are not there without it, and all else."""
    admin_key_file: str | None = None
    """A file with this key alone. None once it is read."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are answered, beside addresses and localhost, where only this machine can reach the server;
    once there are any, only these everywhere."""
    max_queued_requests: int = 1024
    """Sequences that may wait or be tokenised beyond those that run."""
    max_queued_tokens: int = 1 << 22
    """Tokens of prompts whose answers have not begun."""
    max_body_bytes: int = 16 * MIB
    """Of one request; of all that are being read or worked on together MAX_BODIES times as much."""
    request_timeout_s: float | None = None
    """From a request's arrival to the end of its answer, however long it waits; a request may ask for less."""
    drain_timeout_s: float = 25.0
    """How long requests in flight may go on after the first signal to stop."""
    stuck_after_s: float = 120.0
    """An engine that has work and makes no step for so long is reported."""

    def __post_init__(self) -> None:
        for key in self.api_keys:
            _check_key("--api-key", key)
        if self.admin_key is not None:
            _check_key("--admin-key", self.admin_key)
        self._read_files()
        if self.admin_key in self.api_keys:
            raise ValueError("--admin-key is one of the API keys: its holder could do all that the administrator can")
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                raise ValueError(f"--allowed-host {name!r} is no host's name; write it as llm.example.org, without a port")
        self._at_least("--max-queued-requests", self.max_queued_requests, 0, "sequences that wait")
        self._at_least("--max-queued-tokens", self.max_queued_tokens, 1, "tokens of prompts that wait")
        if self.max_body_bytes < 4 * KIB:
            raise ValueError(f"--max-body-size is {format_bytes(self.max_body_bytes)}; at least {format_bytes(4 * KIB)} works")
        if self.request_timeout_s is not None:
            self._seconds("--request-timeout", self.request_timeout_s)
        if self.drain_timeout_s != 0:
            self._seconds("--drain-timeout", self.drain_timeout_s)
        self._seconds("--stuck-after", self.stuck_after_s)

    def _read_files(self) -> None:
        if self.api_key_file is not None:
            keys = (*self.api_keys, *read_keys("--api-key-file", Path(self.api_key_file)))
            object.__setattr__(self, "api_keys", keys)
            object.__setattr__(self, "api_key_file", None)
        object.__setattr__(self, "api_keys", tuple(dict.fromkeys(self.api_keys)))
        if self.admin_key_file is not None:
            admins = {self.admin_key, *read_keys("--admin-key-file", Path(self.admin_key_file))} - {None}
            if len(admins) > 1:
                raise ValueError("--admin-key and --admin-key-file name several keys; the administrator has one")
            object.__setattr__(self, "admin_key", admins.pop())
            object.__setattr__(self, "admin_key_file", None)

    def _at_least(self, name: str, value: int, least: int, what: str) -> None:
        if value < least:
            raise ValueError(f"{name} {value}: it must be at least {least} ({what})")

    def _seconds(self, name: str, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} {value:g}: wanted a number of seconds above 0")


def _check_key(where: str, key: str) -> None:
    """Can a header carry it, and is it long enough? Raises: ValueError, which says where it was found, and not the key."""
    if len(key) < LEAST_KEY_CHARS or not _KEY.fullmatch(key):
        raise ValueError(
            f"{where} has a key of {counted(len(key), 'character')} that cannot be used: it needs {LEAST_KEY_CHARS} or more, "
            "visible ASCII without spaces; `openssl rand -hex 24` makes one"
        )


def read_keys(option: str, path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that begin with # are none.

    Raises: ValueError for a file that cannot be read, or has a key that cannot be used or none at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{option} {path} is not UTF-8; write one key a line, of visible ASCII") from None
    keys = {number: key for number, line in enumerate(lines, 1) if (key := line.strip()) and not key.startswith("#")}
    for number, key in keys.items():
        _check_key(f"{option} {path}, line {number},", key)
    if not keys:
        raise ValueError(f"{option} {path} has no key in it; write one a line")
    return tuple(keys.values())


# -------- options
# The options of `vmmkv serve`, derived from CONFIGS: a field of one is a flag, a variable and a key of the file at once.
#
#     max_num_seqs     --max-num-seqs 7       VMMKV_MAX_NUM_SEQS=7      max_num_seqs = 7
#     kv_budget_bytes  --kv-budget 4GiB       VMMKV_KV_BUDGET=4GiB      kv_budget = "4GiB"
#     prefix_cache     --no-prefix-cache      VMMKV_PREFIX_CACHE=false  prefix_cache = false
#     deadline_s       --deadline 3           VMMKV_DEADLINE=3          deadline = 3
#
# A flag goes before a variable, that before the file, that before the field's default. The command line (`vmmkv.cli.serve`)
# reads flags and variables; this module knows their names, reads the file and puts all together.

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
