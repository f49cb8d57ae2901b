"""Every error that chatrt raises on purpose.

    ChatrtError
    ├── CallerError                 the caller asked for something impossible (4xx, exit code 2)
    │   ├── InvalidValue            a parameter is out of range or of the wrong type
    │   ├── UnsupportedParameter    a known parameter that is not served here
    │   ├── ContextLengthExceeded   prompt and answer do not fit in the context
    │   ├── NotFound                an id that does not exist (or is not the caller's)
    │   │   └── ModelNotFound
    │   └── Conflict                the request contradicts what is running
    ├── CapacityError               the machine is full; the same call may work later (429/503)
    │   ├── OutOfPages              no KV page free or evictable
    │   └── Overloaded              too many requests, lanes or connections
    ├── ModelError                  a model's files cannot be used
    │   ├── ModelFileError          missing, truncated or with the wrong hash
    │   └── UnsupportedModel        an architecture or tensor type that is not served
    ├── SettingsError               a setting cannot be used (exit code 2)
    ├── StoreError                  the conversation store cannot be read or written
    ├── ArchiveError                the folder for KV pages on disk cannot be used
    │   └── FolderInUse             another process has it
    ├── PeerFailed                  another runtime that chatrt is measured against cannot go on
    └── ServerUnavailable           a server cannot be reached or started (exit code 1)

Knows: the tree, and the code that each error has on the wire.
Does not know: how an error is shown.
Invariant: a message is one sentence, with both numbers where there are two.
"""

from __future__ import annotations


class ChatrtError(Exception):
    """Base of all errors below; `code` is what clients branch on, `status` the HTTP-like class."""

    code: str = "server_error"
    status: int = 500

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class CallerError(ChatrtError):
    """The caller's fault: the same call will fail again."""

    code = "invalid_request_error"
    status = 400


class InvalidValue(CallerError):
    """A value is out of range or of the wrong type."""

    code = "invalid_value"


class UnsupportedParameter(CallerError):
    """A parameter of the API that this server does not serve."""

    code = "unsupported_parameter"


class ContextLengthExceeded(CallerError):
    """Prompt and answer do not fit in the context; the message has both numbers."""

    code = "context_length_exceeded"


class NotFound(CallerError):
    """An id that does not exist, or belongs to another key."""

    code = "not_found"
    status = 404


class ModelNotFound(NotFound):
    """A model name that is neither known, nor a folder, nor a file."""

    code = "model_not_found"


class Conflict(CallerError):
    """The request contradicts the state of what it names."""

    code = "response_already_in_flight"
    status = 409


class CapacityError(ChatrtError):
    """The machine is full; the same call may succeed later."""

    code = "rate_limit_exceeded"
    status = 429


class OutOfPages(CapacityError):
    """No KV page is free or can be reclaimed."""

    code = "kv_exhausted"

    def __init__(self, need: int, free: int, evictable: int, total: int) -> None:
        super().__init__(f"need {need} pages, {free} free and {evictable} evictable of {total}")
        self.need = need
        self.free = free
        self.evictable = evictable
        self.total = total


class Overloaded(CapacityError):
    """A limit on requests, lanes or connections is reached."""


class ModelError(ChatrtError):
    """A model's files cannot be used."""

    code = "model_error"


class ModelFileError(ModelError):
    """A model file is missing, truncated, or not the one expected."""


class UnsupportedModel(ModelError):
    """An architecture or a tensor type that is not served; the message says what is."""


class SettingsError(ChatrtError):
    """A flag, variable or line of config.toml that cannot be used."""

    code = "settings_error"
    status = 400


class StoreError(ChatrtError):
    """The conversation store cannot be read or written."""

    code = "store_error"


class ArchiveError(ChatrtError):
    """The folder for KV pages on disk cannot be used; a server runs without it."""

    code = "archive_error"


class FolderInUse(ArchiveError):
    """Another process keeps its KV pages in this folder."""


class PeerFailed(ChatrtError):
    """A peer's process crashed, hung, or could not do what it was asked."""

    code = "peer_failed"


class ServerUnavailable(ChatrtError):
    """A server cannot be reached or started."""

    code = "server_unavailable"
    status = 503


class NobodyListens(ServerUnavailable):
    """Nothing is at the address: a server has to be started."""


class StillLoading(ServerUnavailable):
    """A server is there, but its model is not yet."""

    def __init__(self) -> None:
        super().__init__("the model is still loading; try again in a few seconds")
