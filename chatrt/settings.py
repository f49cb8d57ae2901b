"""Settings: a flag wins over a `CHATRT_*` variable, that over config.toml, that over the default.

Knows: every setting, its default, what it allows, and where its value came from.
Does not know: what a setting does. Invariant: a `Settings` holds only allowed values, so nobody
behind this module checks them again.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from chatrt import setting_kinds as kinds
from chatrt.errors import InvalidValue, SettingsError
from chatrt.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chatrt.setting_kinds import Setting

FLAG = "flag"
CONFIG_FILE = "config.toml"
MODEL = "model"
DEFAULT = "default"

DEFAULT_MODEL = "smollm2-135m-instruct"
CLIENT_NAMES = frozenset({"typing_ahead"})  # settings of the terminal client, not of a server
SAMPLING_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, checked. None means: decided later, as the setting's own text says."""

    model: Annotated[
        str, kinds.text("model to serve: a known name, a file, a folder, org/name")
    ] = DEFAULT_MODEL
    host: Annotated[str, kinds.text("address to listen on; any but loopback needs an API key")] = (
        "127.0.0.1"
    )
    port: Annotated[int, kinds.whole(0, 65535, "port to listen on; 0 takes a free one")] = 8642
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        kinds.one_of(
            "auto", "cpu", "cuda", doc="where the model runs; auto takes a GPU if there is one"
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float64", "bfloat16", "float16"],
        kinds.one_of(
            *("auto", "float32", "float64", "bfloat16", "float16"),
            doc="type of activations; auto is float32 on a CPU, bfloat16 on a GPU",
        ),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "bf16", "fp16", "fp8", "int8", "int4"],
        kinds.one_of(
            *("auto", "float32", "bfloat16", "float16", "bf16", "fp16", "fp8", "int8", "int4"),
            doc="type of KV pages; auto is float16 with native kernels, else that of activations; "
            "drafts keep 8 bits where the target has 4",
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "triton", "reference"],
        kinds.one_of(
            *("auto", "native", "triton", "reference"),
            doc="what computes: kernels compiled for this CPU (native), Triton's on a GPU, or "
            "PyTorch; auto takes the device's own where they can be had",
        ),
    ] = "auto"
    quantize: Annotated[
        Literal["auto", "none", "q8", "q4"],
        kinds.one_of(
            *("auto", "none", "q8", "q4"),
            doc="format of weights that come unquantised (safetensors); auto is q8 on a CPU with "
            "native kernels, none elsewhere",
        ),
    ] = "auto"
    threads: Annotated[
        int | None, kinds.whole(1, 4096, "threads that compute; unset: one for each core")
    ] = None
    kv_memory_fraction: Annotated[
        float | None,
        kinds.above_zero(
            "share of memory for KV pages; unset: 0.9 of what is free on a GPU after the weights, "
            "0.25 of RAM on a CPU",
            high=1.0,
        ),
    ] = None
    kv_memory_bytes: Annotated[
        int | None, kinds.size("memory for KV pages, such as 4GiB; wins over kv_memory_fraction")
    ] = None
    host_kv_bytes: Annotated[
        int | None,
        kinds.size(
            "main memory for KV pages that left the device; unset: 4GiB for a GPU, 0 on a CPU",
            low=0,
        ),
    ] = None
    disk_kv_bytes: Annotated[
        int, kinds.size("disk for KV pages of stored conversations, 0 for none", low=0)
    ] = 4 * 2**30
    kv_dir: Annotated[
        Path | None, kinds.file("folder for KV pages on disk; unset: one in the cache folder")
    ] = None
    page_size: Annotated[int, kinds.whole(1, 1024, "token slots of one KV page")] = 16
    max_context: Annotated[
        int | None, kinds.whole(1, None, "longest conversation in tokens; unset: the model's own")
    ] = None
    max_num_batched_tokens: Annotated[
        int, kinds.whole(1, 1 << 20, "most rows of one step, prefill and decode together")
    ] = 512
    max_num_seqs: Annotated[int, kinds.whole(1, 4096, "most sequences that run at once")] = 64
    max_gap_ms: Annotated[
        float | None,
        kinds.above_zero(
            "a prefill may hold a running stream up this long; none: not limited in time"
        ),
    ] = 30.0
    max_input_tokens: Annotated[
        int | None, kinds.whole(1, None, "longest prompt in tokens; unset: what the context leaves")
    ] = None
    max_output_tokens: Annotated[
        int, kinds.whole(1, None, "longest answer in tokens, also where a request names none")
    ] = 4096
    max_message_bytes: Annotated[
        int, kinds.size("longest message that a client may send; a longer one closes its socket")
    ] = 4 * 2**20
    max_connections_per_key: Annotated[
        int, kinds.whole(1, None, "most open connections of one API key")
    ] = 64
    max_pages_per_key: Annotated[
        int | None,
        kinds.whole(1, None, "most KV pages that running answers of one API key hold; unset: all"),
    ] = None
    max_lanes: Annotated[int, kinds.whole(1, None, "most lanes (stream_id) of a connection")] = 32
    max_active_lanes: Annotated[
        int, kinds.whole(1, None, "most lanes of a connection that answer at once; others wait")
    ] = 16
    speculation: Annotated[
        Literal["auto", "off", "ngram", "head", "model"],
        kinds.one_of(
            *("auto", "off", "ngram", "head", "model"),
            doc="what drafts tokens to verify; auto takes a trained head or the draft model where "
            "there is one, n-grams where text repeats itself",
        ),
    ] = "auto"
    draft: Annotated[
        str | None,
        kinds.text("draft model, or a folder made by train-draft; unset: the shipped head"),
    ] = None
    max_draft: Annotated[int, kinds.whole(1, 16, "most tokens drafted in one step")] = 6
    api_key_file: Annotated[
        Path | None, kinds.file("file with API keys, one a line; unset: the generated one")
    ] = None
    insecure_no_auth: Annotated[bool, kinds.flag("serve without an API key, on any address")] = (
        False
    )
    allow_origin: Annotated[
        tuple[str, ...], kinds.names("web origins allowed besides loopback ones")
    ] = ()
    allow_host: Annotated[
        tuple[str, ...], kinds.names("names of this host that requests may be addressed to")
    ] = ()
    share_prefixes: Annotated[
        Literal["key", "global"],
        kinds.one_of("key", "global", doc="who shares cached prefixes: one API key, or everybody"),
    ] = "key"
    store: Annotated[bool, kinds.flag("keep conversations on disk")] = True
    idle_exit_s: Annotated[
        float | None,
        kinds.duration(
            "end this long (90, 90s, 30m) after the last client left; unset: never, and 30m for a "
            "server that `chatrt chat` started"
        ),
    ] = None
    typing_ahead: Annotated[
        bool,
        kinds.flag(
            "send what is being typed before Enter, so that the server has read it by then; "
            "nothing of it is stored unless it is sent"
        ),
    ] = True
    drain_s: Annotated[
        float,
        kinds.duration("seconds that running answers may take when the server is told to end"),
    ] = 10.0
    disconnect_grace_s: Annotated[
        float,
        kinds.duration(
            "seconds that an answer goes on when its client is gone, which may resume it meanwhile"
        ),
    ] = 30.0
    otel: Annotated[
        bool,
        kinds.flag(
            "send turns' times by OpenTelemetry too, where OTEL_* variables say; needs the extra "
            "`otel`"
        ),
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        kinds.one_of("debug", "info", "warning", "error", doc="what the log tells"),
    ] = "info"


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and where it came from."""

    value: object
    origin: str


_NO_TABLE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, where each came from, and the sampling tables of config.toml."""

    settings: Settings
    origins: Mapping[str, str]
    sampling: Mapping[str, Any] = field(default_factory=lambda: _NO_TABLE)
    model_sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _NO_TABLE)

    def origin(self, name: str) -> str:
        """`flag`, the variable's name, `config.toml` or `default`."""
        return self.origins[name]

    def sampling_defaults(self, model: str, own: Mapping[str, object]) -> dict[str, Sourced]:
        """What a request of `model` gets for each of `SAMPLING_NAMES` that it leaves out.

        The model's table in config.toml wins over `[sampling]`, that over `own` (the model's
        generation config; None and other names in it are passed over), that over "off".
        """
        tables = (
            (CONFIG_FILE, self.model_sampling.get(model, _NO_TABLE)),
            (CONFIG_FILE, self.sampling),
            (MODEL, {name: value for name, value in own.items() if value is not None}),
        )
        off = SamplingParams()
        found: dict[str, Sourced] = {}
        for name in SAMPLING_NAMES:
            sources = (Sourced(table[name], origin) for origin, table in tables if name in table)
            found[name] = next(sources, Sourced(getattr(off, name), DEFAULT))
        return found


def describe() -> dict[str, Setting]:
    """Every setting by name, in the order of `Settings`."""
    hints = get_type_hints(Settings, include_extras=True)
    return {one.name: hints[one.name].__metadata__[0] for one in fields(Settings)}


def _may_be_unset() -> set[str]:
    hints = get_type_hints(Settings)
    return {name for name, hint in hints.items() if type(None) in get_args(hint)}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"CHATRT_{name.upper()}"


def load(flags: Mapping[str, object], environ: Mapping[str, str], path: Path) -> Resolved:
    """Resolves every setting; a flag that is None was not given.

    `path` is config.toml, which need not exist. An empty variable counts as not set; the word
    `none` unsets a setting that may be unset.

    Raises:
        SettingsError: A value is not allowed, a key is unknown, or the file cannot be read. The
            sentence has the key, the value, where it came from and what is allowed.
    """
    table = _read_config(path)
    known = describe()
    unknown = [name for name in flags if name not in known]
    assert not unknown, f"flags without a setting: {unknown}"
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, DEFAULT)
    for name, setting in known.items():
        from_environ = environ.get(variable(name)) or None
        if (flag := flags.get(name)) is not None:
            source = "--" + name.removesuffix("_s").replace("_", "-")
            values[name], origins[name] = _read(name, setting, flag, source), FLAG
        elif from_environ is not None:
            values[name] = _read(name, setting, from_environ, variable(name))
            origins[name] = variable(name)
        elif name in table:
            values[name] = _read(name, setting, table[name], str(path))
            origins[name] = CONFIG_FILE
    models = _table("models", table.get("models", {}), path)
    return Resolved(
        settings=Settings(**values),
        origins=origins,
        sampling=_read_sampling("sampling", table.get("sampling", {}), path),
        model_sampling={name: _read_model(name, one, path) for name, one in models.items()},
    )


def _read(name: str, setting: Setting, value: object, source: str) -> object:
    if name in _may_be_unset() and isinstance(value, str) and value.lower() == "none":
        return None
    try:
        return setting.read(value)
    except (ValueError, OverflowError) as error:
        raise SettingsError(
            f"{name} is {_shown(value)} (from {source}), it must be {setting.allowed}", param=name
        ) from error


def _shown(value: object) -> str:
    return str(value) if isinstance(value, Path) else repr(value)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
    _refuse_unknown(table, (*describe(), "sampling", "models"), "", path)
    return table


def _read_model(model: str, value: object, path: Path) -> Mapping[str, Any]:
    where = f'models."{model}"'
    table = _table(where, value, path)
    _refuse_unknown(table, ("sampling",), where + ".", path)
    return _read_sampling(where + ".sampling", table.get("sampling", {}), path)


def _read_sampling(where: str, value: object, path: Path) -> Mapping[str, Any]:
    table = _table(where, value, path)
    _refuse_unknown(table, SAMPLING_NAMES, where + ".", path)
    for name, one in table.items():
        whole = name == "top_k"
        if isinstance(one, bool) or not isinstance(one, int if whole else int | float):
            kind = "a whole number" if whole else "a number"
            raise SettingsError(
                f"{where}.{name} is {one!r} (from {path}), it must be {kind}", param=name
            )
    try:
        SamplingParams(**table)
    except InvalidValue as error:
        raise SettingsError(f"{where}.{error.message} (from {path})", param=error.param) from error
    return table


def _table(where: str, value: object, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingsError(f"{where} is {value!r} (from {path}), it must be a table", param=where)
    return value


def _refuse_unknown(
    table: Mapping[str, object], known: tuple[str, ...], prefix: str, path: Path
) -> None:
    for name in table:
        if name not in known:
            raise SettingsError(
                f"{prefix}{name} is not a setting (from {path}), it must be one of "
                + ", ".join(sorted(known)),
                param=name,
            )
