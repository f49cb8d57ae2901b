"""`chatrt serve`: the server in the foreground.

Knows: the order of a start: listen, say so, load, warm up, be ready. Does not know: how each works.
Invariant: the port is taken before the model is loaded, so that a taken port is noticed at once;
`/ready` answers only after the warm-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from chatrt.cli import common
from chatrt.settings import Settings, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.models.files import ModelFiles
    from chatrt.paths import Paths
    from chatrt.server.settings import ServerSettings
    from chatrt.service.deferred import DeferredService
    from chatrt.settings import Resolved

T = TypeVar("T")
_log = logging.getLogger(__name__)
# How soon the network's thread gets the interpreter back from the engine's between two bytecodes.
_SWITCH_INTERVAL_S = 0.0005
_CLOSE_S = 5.0  # for pages that are not on disk yet when the server ends
_SETTINGS, _DEFAULTS = describe(), Settings()


def _help(name: str) -> str:
    """What a setting says of itself, and its default."""
    setting, default = _SETTINGS[name], getattr(_DEFAULTS, name)
    text = f"{setting.doc[0].upper()}{setting.doc[1:]}"
    if setting.allowed.startswith("one of"):
        text += f": {setting.allowed}"
    shown = "" if default in (None, (), False) else common.value_text(default).strip('"')
    return f"{text}. [{shown}]" if shown else f"{text}."


def serve(
    model: Annotated[str | None, typer.Argument(help=_help("model"))] = None,
    host: Annotated[str | None, typer.Option(help=_help("host"))] = None,
    port: Annotated[int | None, typer.Option(help=_help("port"))] = None,
    device: Annotated[str | None, typer.Option(help=_help("device"))] = None,
    dtype: Annotated[str | None, typer.Option(help=_help("dtype"))] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=_help("kv_dtype"))] = None,
    kernels: Annotated[str | None, typer.Option(help=_help("kernels"))] = None,
    quantize: Annotated[str | None, typer.Option(help=_help("quantize"))] = None,
    threads: Annotated[int | None, typer.Option(help=_help("threads"))] = None,
    kv_memory_fraction: Annotated[
        float | None, typer.Option(help=_help("kv_memory_fraction"))
    ] = None,
    kv_memory_bytes: Annotated[str | None, typer.Option(help=_help("kv_memory_bytes"))] = None,
    host_kv_bytes: Annotated[str | None, typer.Option(help=_help("host_kv_bytes"))] = None,
    disk_kv_bytes: Annotated[str | None, typer.Option(help=_help("disk_kv_bytes"))] = None,
    kv_dir: Annotated[Path | None, typer.Option(help=_help("kv_dir"))] = None,
    page_size: Annotated[int | None, typer.Option(help=_help("page_size"))] = None,
    max_context: Annotated[int | None, typer.Option(help=_help("max_context"))] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help=_help("max_num_batched_tokens"))
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help=_help("max_num_seqs"))] = None,
    max_gap_ms: Annotated[str | None, typer.Option(help=_help("max_gap_ms"))] = None,
    max_input_tokens: Annotated[int | None, typer.Option(help=_help("max_input_tokens"))] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help=_help("max_output_tokens"))] = None,
    max_message_bytes: Annotated[str | None, typer.Option(help=_help("max_message_bytes"))] = None,
    max_connections_per_key: Annotated[
        int | None, typer.Option(help=_help("max_connections_per_key"))
    ] = None,
    max_pages_per_key: Annotated[int | None, typer.Option(help=_help("max_pages_per_key"))] = None,
    max_lanes: Annotated[int | None, typer.Option(help=_help("max_lanes"))] = None,
    max_active_lanes: Annotated[int | None, typer.Option(help=_help("max_active_lanes"))] = None,
    speculation: Annotated[str | None, typer.Option(help=_help("speculation"))] = None,
    draft: Annotated[str | None, typer.Option(help=_help("draft"))] = None,
    max_draft: Annotated[int | None, typer.Option(help=_help("max_draft"))] = None,
    api_key_file: Annotated[Path | None, typer.Option(help=_help("api_key_file"))] = None,
    insecure_no_auth: Annotated[
        bool | None, typer.Option("--insecure-no-auth", help=_help("insecure_no_auth"))
    ] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help=_help("allow_origin"))] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help=_help("allow_host"))] = None,
    share_prefixes: Annotated[str | None, typer.Option(help=_help("share_prefixes"))] = None,
    store: Annotated[bool | None, typer.Option("--store/--no-store", help=_help("store"))] = None,
    idle_exit: Annotated[str | None, typer.Option(help=_help("idle_exit_s"))] = None,
    drain: Annotated[str | None, typer.Option(help=_help("drain_s"))] = None,
    disconnect_grace: Annotated[str | None, typer.Option(help=_help("disconnect_grace_s"))] = None,
    otel: Annotated[bool | None, typer.Option("--otel", help=_help("otel"))] = None,
    log_level: Annotated[str | None, typer.Option(help=_help("log_level"))] = None,
) -> None:
    """Serve a model on a WebSocket (OpenAI's Responses API)."""
    given = locals()
    renamed = {
        "idle_exit": "idle_exit_s",
        "drain": "drain_s",
        "disconnect_grace": "disconnect_grace_s",
    }
    flags = {renamed.get(name, name): value for name, value in given.items()}
    flags |= {name: tuple(value) for name, value in flags.items() if isinstance(value, list)}
    paths = common.find_paths()
    resolved = common.load_settings(paths, flags)
    logging.basicConfig(
        level=resolved.settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(resolved, paths))


async def _serve(resolved: Resolved, paths: Paths) -> None:
    from chatrt.launch import register_server, unregister_server, write_status
    from chatrt.models.sources import resolve
    from chatrt.server.server import Server
    from chatrt.service.deferred import DeferredService

    common.require_serving()
    settings = resolved.settings
    if settings.otel:
        from chatrt.metrics.otel import require_otel

        require_otel()
    source = resolve(settings.model, cache_dir=paths.cache)
    service = DeferredService()
    server = Server(service, _server_settings(settings, paths))
    await server.start()
    server.install_signal_handlers()
    record = await asyncio.to_thread(
        register_server,
        paths,
        host=settings.host,
        port=server.port,
        model=source.name,
        started_at=time.time(),
    )
    if record.pid != os.getpid():
        _log.info("the server at %s stays the one that `chatrt chat` finds", record.url)
    elif settings.insecure_no_auth:
        _log.info("web page: %s", record.page)
    else:
        key_file = settings.api_key_file or paths.api_key
        _log.info("web page: %s (it asks for the key in %s)", record.page, key_file)

    def report(text: str) -> None:
        _log.info("%s", text)
        write_status(paths, text)

    ended = asyncio.ensure_future(server.serve_forever())
    work = asyncio.ensure_future(_load_and_run(service, resolved, paths, report, ended))
    try:
        await asyncio.wait((ended, work), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
        await ended
        if service.ready():
            await work
        work.cancel()  # told to end while it was still loading
    finally:
        unregister_server(paths)
        if not ended.done():
            await server.stop()


async def _load_and_run(
    service: DeferredService,
    resolved: Resolved,
    paths: Paths,
    report: Callable[[str], None],
    ended: asyncio.Future[None],
) -> None:
    """Make the service ready, and take it down again when the server has ended."""
    from chatrt.cli.build import build_runtime, build_service
    from chatrt.cli.kv_archive import open_archive
    from chatrt.host import EngineHost
    from chatrt.metrics.otel import OtelSender

    settings = resolved.settings
    files = await _in_daemon_thread(lambda: _fetch(settings, paths, report))
    runtime = await _in_daemon_thread(lambda: build_runtime(files, resolved, paths, report))
    host = EngineHost(runtime.engine, runtime.compilations)
    host.start()
    archive = await asyncio.to_thread(open_archive, runtime, host, settings, paths)
    database = paths.database if settings.store else None
    sender = OtelSender(runtime.model_name) if settings.otel else None
    observers = () if sender is None else (sender.turns,)
    built = build_service(runtime, host, settings, database, archive, observers)
    _spare_what_is_loaded()
    try:
        runtime.compilations.ready()
        service.begin(built)
        report(f"ready: {runtime.model_name}, up to {runtime.max_context:,} tokens")
        await ended
    finally:
        await host.stop()
        await built.close()
        if sender is not None:
            await _in_daemon_thread(sender.close)
        if archive is not None:
            await asyncio.to_thread(archive.close, _CLOSE_S)


def _spare_what_is_loaded() -> None:
    """Modules, weights and vocabularies stay as long as the process.

    Were they looked at whenever garbage is collected, all streams would stop for 120 ms each time.
    """
    gc.collect()
    gc.freeze()


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """What the function returns; a process that ends does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: object) -> None:
        if not future.done():
            setter(value)

    def call() -> None:
        try:
            result = function()
        except Exception as error:  # the edge of the thread: hand it to the caller
            loop.call_soon_threadsafe(settle, future.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, future.set_result, result)

    threading.Thread(target=call, name="chatrt-load", daemon=True).start()
    return await future


def _fetch(settings: Settings, paths: Paths, report: Callable[[str], None]) -> ModelFiles:
    from chatrt.models.sources import fetch, resolve

    told = [-1]

    def progress(done_bytes: int, total_bytes: int | None, what: str) -> None:
        percent = int(100 * done_bytes / total_bytes) if total_bytes else 0
        if percent != told[0]:
            told[0] = percent
            report(f"fetching {what}: {percent} %")

    source = resolve(settings.model, cache_dir=paths.cache)
    return fetch(source, cache_dir=paths.cache, progress=progress)


def _server_settings(settings: Settings, paths: Paths) -> ServerSettings:
    from chatrt.api_keys import ensure_api_keys
    from chatrt.server.settings import ServerSettings

    keys: tuple[str, ...] = ()
    if not settings.insecure_no_auth:
        keys = ensure_api_keys(settings.api_key_file or paths.api_key)
    return ServerSettings(
        host=settings.host,
        port=settings.port,
        api_keys=keys,
        insecure_no_auth=settings.insecure_no_auth,
        allow_origins=settings.allow_origin,
        allow_hosts=settings.allow_host,
        max_message_bytes=settings.max_message_bytes,
        max_connections_per_key=settings.max_connections_per_key,
        max_lanes=settings.max_lanes,
        max_active_lanes=settings.max_active_lanes,
        disconnect_grace_s=settings.disconnect_grace_s,
        drain_s=settings.drain_s,
        idle_exit_s=settings.idle_exit_s,
    )


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(serve)
