"""`chatrt run`: one question, one answer on stdout as it streams.

Knows: where the question comes from and the answer goes. Does not know: how it is made: by the
running server if it serves the model, else by an engine in this process. Both give the same events.
Invariant: stdout holds the answer (or one JSON document) and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli import common
from chatrt.errors import ChatrtError, InvalidValue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from chatrt.launch import ServerRecord
    from chatrt.paths import Paths
    from chatrt.settings import Resolved


def run(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from stdin.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model; default: the settings'.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [the model's]")] = None,
    top_p: Annotated[float | None, typer.Option(help="[the model's]")] = None,
    top_k: Annotated[int | None, typer.Option(help="[the model's]")] = None,
    min_p: Annotated[float | None, typer.Option(help="[the model's]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; drawn and reported if left out.")] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option("--max-output-tokens", "-n", help="Longest answer in tokens.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print the turn's figures.")] = False,
    json: common.JsonOption = False,
    local: Annotated[
        bool, typer.Option("--local", help="Answer in this process, whatever server runs.")
    ] = False,
) -> None:
    """Answer one prompt; the text goes to stdout as it streams."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise InvalidValue("the prompt is empty", param="prompt")
    fields = {
        "input": _items(text, system),
        "temperature": temperature,
        "top_p": top_p,
        "max_output_tokens": max_output_tokens,
        "chatrt": {"top_k": top_k, "min_p": min_p, "seed": seed, "stop": stop or None},
    }
    paths = common.find_paths()
    resolved = common.load_settings(paths, {"model": model})
    asyncio.run(_run(_without_none(fields), resolved, paths, stats=stats, json=json, local=local))


async def _run(
    fields: dict[str, Any],
    resolved: Resolved,
    paths: Paths,
    *,
    stats: bool,
    json: bool,
    local: bool,
) -> None:
    record = None if local else _server_for(resolved.settings.model, paths)
    events = _from_server(fields, record, resolved, paths) if record else None
    if events is None:
        events = _from_engine(fields, resolved, paths)
    response: dict[str, Any] = {}
    async for event in events:
        if event["type"] == "response.output_text.delta" and not json:
            sys.stdout.write(event["delta"])
            sys.stdout.flush()
        response = event.get("response", response)
    if response.get("status") == "failed":
        raise ChatrtError(response["error"]["message"], code=response["error"]["code"])
    if json:
        common.show_json(_document(response))
    else:
        sys.stdout.write("\n")
    if stats:
        typer.echo(_stats(response), err=True)


def _server_for(model: str, paths: Paths) -> ServerRecord | None:
    """The running server, if it serves the model."""
    from chatrt.launch import find_server
    from chatrt.models.sources import resolve

    record = find_server(paths)
    if record is None or record.model != resolve(model, cache_dir=paths.cache).name:
        return None
    return record


async def _from_server(
    fields: dict[str, Any], record: ServerRecord, resolved: Resolved, paths: Paths
) -> AsyncIterator[dict[str, Any]]:
    from chatrt.api_keys import ensure_api_keys
    from chatrt.client import ChatClient, ResponseRequest

    key_file = resolved.settings.api_key_file or paths.api_key
    sampling: dict[str, Any] = {
        name: fields[name]
        for name in ("temperature", "top_p", "max_output_tokens")
        if name in fields
    }
    request = ResponseRequest(
        input=fields["input"], sampling=sampling, chatrt=fields.get("chatrt", {}), store=False
    )
    async with await ChatClient.connect(record.url, api_key=ensure_api_keys(key_file)[0]) as client:
        async for event in await client.send(request):
            yield event.data


async def _from_engine(
    fields: dict[str, Any], resolved: Resolved, paths: Paths
) -> AsyncIterator[dict[str, Any]]:
    import time

    from chatrt.cli.build import build_runtime, build_service
    from chatrt.host import EngineHost
    from chatrt.models.sources import fetch, resolve
    from chatrt.params import SamplingParams
    from chatrt.server.service import CallContext
    from chatrt.wire.encode import encode
    from chatrt.wire.messages import ResponseCreate, decode

    message = decode(encode({"type": "response.create", "store": False, **fields}))
    assert isinstance(message, ResponseCreate)
    message.sampling(SamplingParams())  # a number out of range is refused before the model loads
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    with common.ProgressBar() as progress:
        source = resolve(resolved.settings.model, cache_dir=paths.cache)
        files = fetch(source, cache_dir=paths.cache, progress=progress)
    with common.waiting() as report:
        quiet = report if sys.stderr.isatty() else _say_nothing
        runtime = build_runtime(files, resolved, paths, quiet, warm=False)
    host = EngineHost(runtime.engine)
    host.start()
    service = build_service(runtime, host, resolved.settings, None)
    changed = asyncio.Event()
    try:
        context = CallContext("local", "run", "run", time.perf_counter_ns())
        log = await service.create(message, context)
        subscription = log.subscribe(changed.set)
        while not subscription.exhausted:
            while (event := subscription.take()) is not None:
                if event["type"] == "response.output_text.delta":
                    log.mark_sent(time.perf_counter_ns())
                yield event
            if not subscription.exhausted:
                await changed.wait()
                changed.clear()
    finally:
        await host.stop()


def _say_nothing(_: str) -> None:
    """Without a terminal nobody watches the model load."""


def _items(text: str, system: str | None) -> list[dict[str, str]]:
    items = [{"type": "message", "role": "user", "content": text}]
    if system:
        items.insert(0, {"type": "message", "role": "system", "content": system})
    return items


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    cleaned = {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return {name: value for name, value in cleaned.items() if value is not None}


def _document(response: dict[str, Any]) -> dict[str, Any]:
    parts = [part["text"] for item in response["output"] for part in item["content"]]
    return {
        "text": "".join(parts),
        "status": response["status"],
        "incomplete_details": response["incomplete_details"],
        "model": response["model"],
        "usage": response["usage"],
        "chatrt": response["chatrt"],
    }


def _stats(response: dict[str, Any]) -> str:
    usage, figures = response["usage"], response["chatrt"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    why = (response["incomplete_details"] or {}).get("reason")
    parts = [
        f"{usage['input_tokens']} tokens in ({cached} cached)",
        f"{usage['output_tokens']} out" + (f" (cut: {why})" if why else ""),
        f"TTFT {figures['ttft_ms'] or 0:.0f} ms",
    ]
    if figures["decode_tps"] is not None:
        parts.append(f"{figures['tpot_ms']:.1f} ms per token ({figures['decode_tps']:.1f} tok/s)")
    return " · ".join([*parts, f"seed {figures['seed']}"])


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)
