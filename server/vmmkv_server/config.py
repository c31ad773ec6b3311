"""Options of `vmmkv serve` and of `LLM`: fields of two dataclasses, each declared with its check.

    ServeConfig  the HTTP server's, and in it        EngineConfig  the engine process's

Each field is a flag, a variable of the environment and a key of the configuration file:

    max_num_seqs     --max-num-seqs 7       VMMKV_MAX_NUM_SEQS=7      max_num_seqs = 7
    kv_budget_bytes  --kv-budget 4GiB       VMMKV_KV_BUDGET=4GiB      kv_budget = "4GiB"
    prefix_cache     --no-prefix-cache      VMMKV_PREFIX_CACHE=false  prefix_cache = false

A flag overrides a variable, a variable the file, and the file the default. typer reads flags and variables
(`vmmkv.cli.serve`); `make_config` reads the file and merges. A message names fields; `with_flags` turns them into flags.
"""

import dataclasses
import functools
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from vmmkv.config import LOG_LEVELS, PREFIX
from vmmkv.errors import did_you_mean
from vmmkv.layout import KV_KIND_ALIASES, KV_KINDS
from vmmkv.units import KIB, MIB, PAGE_BYTES, counted, format_bytes, parse_bytes
from vmmkv_server.kv_policy import Eviction

DEFAULT_MODEL: Final = "smollm2-135m"
MIN_KEY_CHARS: Final = 8

_KEY: Final = re.compile(r"[\x21-\x7e]+")
"""Visible ASCII, which a header carries as it is."""
_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""Origin of a page, as browsers write it: scheme, host and port, in small letters."""


Check: TypeAlias = Callable[[str, Any], None]
"""Raises ValueError for a value that a field, whose name comes first, cannot have."""


def _must(holds: Callable[[Any], bool], said: str, show: Callable[[Any], str] = str) -> Check:
    """Refuse a value for which this does not hold: `said` stands behind the field's name, with {} for the value as shown."""

    def check(name: str, value: Any) -> None:
        if not holds(value):
            raise ValueError(name + said.format(show(value)))

    return check


def _one_of(*choices: str) -> Check:
    return _must(lambda value: value in choices, f"={{}} is not known; use one of {', '.join(choices)}", repr)


def _check_endpoint(name: str, endpoint: str) -> None:
    if not re.match(r"(tcp|ipc)://.", endpoint):
        raise ValueError(f"{name}={endpoint!r} is no endpoint of ZeroMQ; use tcp://*:5557, or ipc:// and a path")
    if (port := re.fullmatch(r"tcp://.*:(\d+)", endpoint)) and int(port[1]) >= 1 << 16:
        raise ValueError(f"{name}={endpoint!r}: ports go up to 65535")


def _check_policy(name: str, policy: str) -> None:
    try:
        Eviction.of(policy)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def _check_key(name: str, key: str) -> None:
    """Refuse a key that is short or cannot stand in a header; the message does not show it."""
    if len(key) < MIN_KEY_CHARS or not _KEY.fullmatch(key):
        raise ValueError(
            f"{name} has a key of {counted(len(key), 'character')} that cannot be used: it needs {MIN_KEY_CHARS} or more, "
            "visible ASCII without spaces; `openssl rand -hex 24` makes one"
        )


_MUST_BE_A_SIZE: Final = _must(
    lambda size_bytes: size_bytes >= PAGE_BYTES,
    f" is {{}}, less than one page of {format_bytes(PAGE_BYTES)}; a small model wants {format_bytes(256 * MIB)} or more",
    format_bytes,
)
_MUST_BE_SECONDS: Final = _must(
    lambda time_s: math.isfinite(time_s) and time_s > 0, "={}: wanted a number of seconds above 0", "{:g}".format
)
_MUST_BE_A_NAME: Final = _must(
    lambda name: re.fullmatch(r"\w+", name) is not None, "={} is no name of a parser; use auto", repr
)
_TOKENS, _BYTES = "a number of tokens, or None", "a number of bytes, such as {} * vmmkv.GIB, or None"


@dataclass(frozen=True, slots=True)
class Help:
    """Words about a field for its users, and the values that it may have."""

    panel: str
    """The group of options that it stands in."""
    text: str
    metavar: str | None = None
    default: str | None = None
    """Words for the default, where the field's is None or empty."""
    name: str | None = None
    """The option's name, if it is not the field's: options carry no unit, and lists are given one by one."""
    wanted: str | None = None
    """Words for what is wanted, in the refusal of a value of another type; None for the type's name."""
    check: Check | None = None
    """Check of a value of the right type, or of each in a list. Raises: ValueError."""
    kept: Callable[[Any], Any] = lambda value: value
    """The value as it is kept."""


_MODEL, _MEMORY, _PREFIXES, _ADDRESS, _LIMITS, _LOGS = (
    functools.partial(Help, panel)
    for panel in ("Model", "Memory and batches", "Prefix cache", "Address and keys", "Limits", "Logs")
)
_WANTED_OF_KIND: Final[Mapping[Any, tuple[type, str]]] = {
    str: (str, "a text"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    tuple[str, ...]: (tuple, "a list of texts"),
}


def _check_each(config: Any) -> None:
    """Compare each field with its annotation. Keep numpy's numbers as Python's, and a list or a single text as a tuple.

    Raises: ValueError; the values of SECRETS are not in it.
    """
    for option in _options_of(type(config)):
        value, words = getattr(config, option.field), option.help
        if value is None and option.may_be_none:
            continue
        if option.kind == tuple[str, ...] and isinstance(value, str | list):
            value = (value,) if isinstance(value, str) else tuple(value)
        wanted_type, wanted = _WANTED_OF_KIND[option.kind]
        fits = isinstance(value, wanted_type) and (option.kind is bool) == isinstance(value, bool)
        if not fits or (isinstance(value, tuple) and not all(isinstance(each, str) for each in value)):
            shown = "something else" if option.field in SECRETS else repr(value)
            raise ValueError(f"{option.field} is {shown}; wanted {words.wanted or wanted}")
        value = words.kept(option.kind(value) if option.kind in (int, float) else value)
        if words.check is not None:
            for each in value if isinstance(value, tuple) else (value,):
                words.check(option.field, each)
        object.__setattr__(config, option.field, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of one engine. Its process gets it as JSON.

    Raises: ValueError naming the field, its value and what it may be.
    """

    model: Annotated[
        str,
        _MODEL(
            "smollm2-135m, a transformers directory, or a hub name",
            "NAME|DIR",
            check=_must(bool, f"='' is empty; name a model such as {DEFAULT_MODEL}, or a directory"),
        ),
    ] = DEFAULT_MODEL
    device: Annotated[
        str,
        _MODEL(
            "auto (a GPU if there is one), cpu, cuda or cuda:INDEX",
            check=_must(
                lambda device: re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is not None,
                "={} is not known; use auto, cpu, cuda or cuda:0",
                repr,
            ),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        _MODEL(
            "dtype of weights and KV: auto (float32 on a CPU, else bfloat16), float32, bfloat16 or float16",
            check=_one_of("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    model_impl: Annotated[
        str,
        _MODEL(
            "auto (vmmkv for the models that it knows), vmmkv (its own decoder) or transformers (that library's code)",
            check=_one_of("auto", "vmmkv", "transformers"),
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        _MODEL("auto (the model's safetensors), or dummy for random weights, to measure speed", check=_one_of("auto", "dummy")),
    ] = "auto"
    seed: Annotated[
        int,
        _MODEL(
            "seed of dummy weights",
            "N",
            check=_must(lambda seed: 0 <= seed < 1 << 63, "={} is out of range; use 0 to 2**63 - 1"),
        ),
    ] = 0
    """Seed of dummy weights; in the in-process engine also of requests without a seed."""
    tool_call_parser: Annotated[
        str,
        _MODEL(
            "form in which the model writes calls of tools, by vLLM's names; auto: that of its chat template",
            "NAME",
            check=_MUST_BE_A_NAME,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        _MODEL(
            "markers of the model's reasoning, by vLLM's names; auto: those of its chat template; none: it is not read",
            "NAME",
            check=_MUST_BE_A_NAME,
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        _MODEL(
            "number of GPUs to split the model over, from --device on; on a CPU, of processes",
            "N",
            wanted="a number of GPUs",
            check=_must(lambda size: size >= 1, "={}: at least 1 device has to have the model"),
        ),
    ] = 1
    kv_budget_bytes: Annotated[
        int | None,
        _MEMORY(
            "memory for the KV cache, such as 4GiB",
            "SIZE",
            "what is free",
            "kv_budget",
            wanted=_BYTES.format(4),
            check=_MUST_BE_A_SIZE,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        _MEMORY(
            "dtype of the KV cache: auto (that of --dtype), or fp8, int8 or int4, in which more tokens fit",
            "TYPE",
            kept=lambda kind: KV_KIND_ALIASES.get(kind, kind),
            check=_one_of("auto", *KV_KINDS),
        ),
    ] = "auto"
    kv_holder: Annotated[
        str | None, _MEMORY("take KV memory from the `vmmkv hold` at this socket: prefixes outlive the server", "PATH")
    ] = None
    kv_lender: Annotated[
        str | None, _MEMORY("borrow the prefixes of the server that has this --kv-holder, on the same host", "PATH")
    ] = None
    max_tokens: Annotated[
        int | None,
        _MEMORY(
            "most tokens of a prompt and its answer together",
            "N",
            "the model's",
            wanted=_TOKENS,
            check=_must(lambda most: most >= 2, "={}: a sequence needs at least 2, one of a prompt and one of an answer"),
        ),
    ] = None
    max_num_seqs: Annotated[
        int,
        _MEMORY(
            "most sequences that run at once; further requests wait",
            "N",
            wanted="a number of sequences",
            check=_must(lambda most: most >= 1, "={}: at least 1 sequence has to run"),
        ),
    ] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        _MEMORY(
            "most tokens of a step; fewer keep answers flowing during long prompts", "N", "8192, on a CPU 512", wanted=_TOKENS
        ),
    ] = None
    kv_policy: Annotated[
        str | None,
        _MEMORY(
            "default kv_policy of requests: which tokens' KV they keep, such as snapkv:budget=2048 or "
            "streaming_llm:sinks=4,window=2048",
            "POLICY",
            check=_check_policy,
        ),
    ] = None
    prefix_cache: Annotated[bool, _PREFIXES("share the KV cache of common prompt prefixes")] = True
    kv_host_budget_bytes: Annotated[
        int | None,
        _PREFIXES(
            "host memory for prefixes evicted from the device, such as 64GiB; taken at the start",
            "SIZE",
            name="kv_host_budget",
            wanted=_BYTES.format(64),
            check=_MUST_BE_A_SIZE,
        ),
    ] = None
    kv_disk: Annotated[
        str | None, _PREFIXES("a directory for prefixes evicted from the device, found again after a restart", "PATH")
    ] = None
    kv_disk_budget_bytes: Annotated[
        int | None,
        _PREFIXES(
            "disk space for --kv-disk, such as 500GiB; taken at the start",
            "SIZE",
            name="kv_disk_budget",
            wanted=_BYTES.format(64),
            check=_MUST_BE_A_SIZE,
        ),
    ] = None
    kv_store: Annotated[
        str | None,
        _PREFIXES("a store of prefixes that engines share, such as redis://host:6379/0 or mooncake://host:50051", "URL"),
    ] = field(default=None, repr=False)
    kv_events: Annotated[
        str | None,
        _PREFIXES(
            "publish the changes of the prefix cache to routers, at tcp://*:5557 for instance",
            "ENDPOINT",
            check=_check_endpoint,
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        _PREFIXES("send the last KV events again on request, at tcp://*:5558 for instance", "ENDPOINT", check=_check_endpoint),
    ] = None
    kv_events_topic: Annotated[str | None, _PREFIXES("topic of the KV events", "TEXT")] = None
    log_level: Annotated[str, _LOGS("debug, info, warning or error", kept=str.lower, check=_one_of(*LOG_LEVELS))] = "info"
    log_format: Annotated[str, _LOGS("console, or json for one object a line", check=_one_of("console", "json"))] = "console"

    def __post_init__(self) -> None:
        _check_each(self)
        self._check_prefixes()
        self._check_events()
        self._check_ranks()
        self._check_batches()

    def _check_prefixes(self) -> None:
        if bool(self.kv_disk) != (self.kv_disk_budget_bytes is not None):
            raise ValueError("kv_disk names a directory, and kv_disk_budget_bytes the space that it may take: give both")
        others = self.kv_holder or self.kv_lender or self.kv_host_budget_bytes or self.kv_disk or self.kv_store
        if not self.prefix_cache and others:
            raise ValueError(
                "kv_holder, kv_lender, kv_host_budget_bytes, kv_disk and kv_store are for shared prefixes: leave "
                "prefix_cache=False out, or these"
            )
        if self.kv_holder and self.kv_lender:
            raise ValueError(
                "kv_holder and kv_lender: a server lends its prefixes, or borrows those of another one; leave one of them out"
            )

    def _check_events(self) -> None:
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise ValueError("kv_events_replay and kv_events_topic are for the events of kv_events: give that too")
        if self.kv_events is not None and not self.prefix_cache:
            raise ValueError("kv_events tells of shared prefixes: leave prefix_cache=False out, or kv_events")

    def _check_ranks(self) -> None:
        of_one_device = [name for name in ("kv_holder", "kv_lender", "kv_disk", "kv_store", "kv_policy") if getattr(self, name)]
        if self.tensor_parallel_size > 1 and of_one_device:
            raise ValueError(
                f"{of_one_device[0]} does not work with tensor_parallel_size={self.tensor_parallel_size}: leave one of them out"
                + ("" if of_one_device[0] == "kv_policy" else "; kv_host_budget_bytes works with it")
            )

    def _check_batches(self) -> None:
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: each "
                f"sequence needs one token a step; raise it to {self.max_num_seqs} or lower max_num_seqs to "
                f"{max(1, self.max_num_batched_tokens)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The options of one HTTP server: its engine's, its address, limits and keys. The files of keys are read when it is made.

    Raises: ValueError naming the field, its value and what it may be. No message shows a key.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: Annotated[
        str,
        _ADDRESS(
            "address to listen on; the default is this machine alone",
            check=_must(bool, "='' is empty; use 127.0.0.1 for this machine alone, or 0.0.0.0 for all its networks"),
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        _ADDRESS(
            "port to listen on, 0 for any that is free",
            wanted="a port's number",
            check=_must(lambda port: 0 <= port <= 65_535, "={} is no port; use 1 to 65535, or 0 for any that is free"),
        ),
    ] = 8000
    allowed_hosts: Annotated[
        tuple[str, ...],
        _ADDRESS(
            "accept this name in the Host header, besides addresses and localhost; repeatable. Others are then refused",
            "NAME",
            "any name, if reachable from other machines",
            "allowed_host",
            check=_must(
                lambda name: _HOST.fullmatch(name) is not None,
                "={} is no host's name; write it as llm.example.org, without a port",
                repr,
            ),
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        _ADDRESS(
            "let the pages of this origin use the API from a browser, such as http://localhost:5173, or * for those of any; "
            "repeatable",
            "ORIGIN",
            "the server's own",
            "allowed_origin",
            check=_must(
                lambda origin: origin == "*" or _ORIGIN.fullmatch(origin) is not None,
                "={} is no origin; write it as https://chat.example.org or http://localhost:5173, in small letters and without "
                "a path, or * for any",
                repr,
            ),
        ),
    ] = ()
    api_keys: Annotated[
        tuple[str, ...],
        _ADDRESS(
            "require this key on every route but /health and the page's files; repeatable. Other users of this machine see it "
            "in the process list",
            "KEY",
            "no key needed",
            "api_key",
            check=_check_key,
        ),
    ] = field(default=(), repr=False)
    api_key_file: Annotated[str | None, _ADDRESS("a file of API keys, one a line", "FILE")] = None
    admin_key: Annotated[
        str | None, _ADDRESS("enables /kv/reset, /kv/resize, /sleep, /wake_up; opens all routes", "KEY", check=_check_key)
    ] = field(default=None, repr=False)
    admin_key_file: Annotated[str | None, _ADDRESS("a file with the admin key", "FILE")] = None
    max_queued_requests: Annotated[
        int,
        _LIMITS(
            "sequences that may wait beyond --max-num-seqs; further requests get 429",
            "N",
            check=_must(lambda most: most >= 0, "={}: it must be at least 0"),
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        _LIMITS(
            "prompt tokens that may wait for a first token; further requests get 429",
            "N",
            check=_must(lambda most: most >= 1, "={}: it must be at least 1"),
        ),
    ] = 1 << 22
    max_body_bytes: Annotated[
        int,
        _LIMITS(
            "largest request body",
            "SIZE",
            "16MiB",
            "max_body_size",
            check=_must(
                lambda size_bytes: size_bytes >= 4 * KIB, f" is {{}}; at least {format_bytes(4 * KIB)} works", format_bytes
            ),
        ),
    ] = 16 * MIB
    request_timeout_s: Annotated[
        float | None,
        _LIMITS(
            "a request that takes longer gets 408; it may ask for less",
            "SECONDS",
            "no limit",
            "request_timeout",
            check=_MUST_BE_SECONDS,
        ),
    ] = None
    drain_timeout_s: Annotated[
        float,
        _LIMITS(
            "time that requests in flight get after a signal to stop",
            "SECONDS",
            name="drain_timeout",
            check=lambda name, time_s: time_s == 0 or _MUST_BE_SECONDS(name, time_s),  # 0 stops at once
        ),
    ] = 25.0
    stuck_after_s: Annotated[
        float,
        _LIMITS(
            "report an engine that has work but makes no step for this long",
            "SECONDS",
            name="stuck_after",
            check=_MUST_BE_SECONDS,
        ),
    ] = 120.0

    def __post_init__(self) -> None:
        _check_each(self)
        self._read_files()
        if self.admin_key in self.api_keys:
            raise ValueError("--admin-key is one of the API keys: its holder could do all that the administrator can")

    def _read_files(self) -> None:
        keys, admin_keys = list(self.api_keys), [self.admin_key] if self.admin_key is not None else []
        if self.api_key_file is not None:
            keys += read_keys("--api-key-file", Path(self.api_key_file))
        if self.admin_key_file is not None:
            admin_keys += read_keys("--admin-key-file", Path(self.admin_key_file))
        if len(set(admin_keys)) > 1:
            raise ValueError("--admin-key and --admin-key-file name several keys; the administrator has one")
        object.__setattr__(self, "api_keys", tuple(dict.fromkeys(keys)))
        object.__setattr__(self, "admin_key", next(iter(admin_keys), None))
        object.__setattr__(self, "api_key_file", None)
        object.__setattr__(self, "admin_key_file", None)


def read_keys(flag: str, path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and lines that begin with # are skipped.

    Raises: ValueError for a file that cannot be read, or has no key or one that cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} is not UTF-8; write one key a line, of visible ASCII") from None
    keys = {number: key for number, line in enumerate(lines, 1) if (key := line.strip()) and not key.startswith("#")}
    for number, key in keys.items():
        _check_key(f"{flag} {path}, line {number},", key)
    if not keys:
        raise ValueError(f"{flag} {path} has no key in it; write one a line")
    return tuple(keys.values())


# Options: the fields, as the command line, the environment and the file name them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field, and its names outside Python."""

    field: str
    name: str
    """The key in the file."""
    kind: Any
    """The field's type without None: a key of _WANTED_OF_KIND."""
    may_be_none: bool
    default: Any
    help: Help

    @property
    def flag(self) -> str:
        """Flag on the command line. A switch also has a `--no-` form."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Variable in the environment."""
        return f"{PREFIX}{self.name.upper()}"

    @property
    def is_size(self) -> bool:
        """Is the value a size, such as 4GiB?"""
        return self.field.endswith("_bytes")


def _options_of(config: type[Any]) -> tuple[Option, ...]:
    return tuple(option for option in OPTIONS if option.field in config.__dataclass_fields__)


def _option(field: "dataclasses.Field[Any]", annotation: Any) -> Option:
    of_field, words = typing.get_args(annotation)
    kinds = typing.get_args(of_field) if isinstance(of_field, types.UnionType) else (of_field,)
    return Option(
        field=field.name,
        name=words.name or field.name,
        kind=kinds[0],
        may_be_none=len(kinds) > 1,
        default=field.default,
        help=words,
    )


OPTIONS: Final = tuple(
    _option(field, typing.get_type_hints(config, include_extras=True)[field.name])
    for config in (EngineConfig, ServeConfig)
    for field in dataclasses.fields(config)
    if field.name != "engine"
)
SECRETS: Final = ("api_keys", "admin_key", "kv_store")
"""Fields that no message shows, and that no other process finds in its environment. A URL may have a password."""
CONFIG_VARIABLE: Final = f"{PREFIX}CONFIG"
URL_VARIABLE: Final = f"{PREFIX}URL"
API_KEY_VARIABLE: Final = f"{PREFIX}API_KEY"
VARIABLES: Final = tuple(dict.fromkeys((*(one.variable for one in OPTIONS), CONFIG_VARIABLE, URL_VARIABLE, API_KEY_VARIABLE)))
"""Variables of the environment that commands read, besides those of `vmmkv.config`."""

_FLAGS: Final = {one.field: one.flag for one in OPTIONS}
_ANY: Final = "|".join(_FLAGS)
_LONG: Final = "|".join(name for name in _FLAGS if "_" in name)
_FIELD: Final = re.compile(rf"(?<![\w./-])(?:({_ANY})=|(\A(?:{_ANY})(?= is )|(?:{_LONG})(?![\w/-])))")
"""A field in a message: with a value behind it, at the start, or anywhere if its name is no word of English."""


def with_flags(message: str) -> str:
    """A message with flags in place of fields: `max_tokens=9` becomes `--max-tokens 9`, `prefix_cache=False` a `--no-` flag."""
    message = re.sub(r"\b(\w+)=False\b", lambda found: _FLAGS.get(found[1], found[0]).replace("--", "--no-", 1), message)
    return _FIELD.sub(lambda found: f"{_FLAGS[found[1]]} " if found[1] else _FLAGS[found[2]], message)


def read_file(path: Path) -> dict[str, Any]:
    """The values in a TOML file, by field. Raises: ValueError naming the file, and the key or the line that is wrong."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; --config takes a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    fields = {one.name: one.field for one in OPTIONS}
    if unknown := [key for key in found if key not in fields]:
        remedy = did_you_mean(unknown[0].replace("-", "_").lower(), fields) or f"the keys are {', '.join(fields)}"
        raise ValueError(f"{path}: unknown key {', '.join(unknown)}; {remedy}")
    return {fields[key]: value for key, value in found.items()}


def make_config(given: Mapping[str, Any], sources: Mapping[str, str], file: Path | None) -> ServeConfig:
    """The configuration, by field: from `given` (flags and variables), else from the file, else by default.

    `sources` names the variables that fields of `given` came from, if not from flags.
    Raises: ValueError that says where a wrong value came from, unless it was a flag.
    """
    in_file = {} if file is None else read_file(file)
    sources = dict.fromkeys(in_file.keys() - given.keys(), str(file)) | dict(sources)
    values = {**in_file, **given}
    try:
        for option in OPTIONS:
            if option.is_size and option.field in values:
                values[option.field] = _size(option, values[option.field])
        of_engine, of_server = (
            {option.field: values[option.field] for option in _options_of(config) if option.field in values}
            for config in (EngineConfig, ServeConfig)
        )
        return ServeConfig(engine=EngineConfig(**of_engine), **of_server)
    except ValueError as error:
        message = with_flags(str(error))
        at_fault = [one for one in OPTIONS if re.search(rf"{one.flag}(?![\w-])", message)]
        origins = [f"{one.flag} is from {sources[one.field]}" for one in at_fault if one.field in sources]
        raise ValueError("; ".join([message, *origins])) from error


def _size(option: Option, given: Any) -> int:
    if not isinstance(given, int | str) or isinstance(given, bool):
        raise ValueError(f'{option.flag} is {given!r}; wanted a size, such as "4GiB", or a number of bytes')
    try:
        return parse_bytes(str(given))
    except ValueError as error:
        raise ValueError(f"{option.flag}: {error}") from error
