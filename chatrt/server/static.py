"""The web page's files: a fixed table, read once, and the headers that keep the page safe.

Knows: the files in `chatrt/web`, their types, the browser's security headers.
Does not know: keys, conversations, what the page does.
Invariant: a path is looked up in the table, never on the disk, so no path leads out of it; nothing
that is not the package's own runs in the page.
Source: Content Security Policy level 3; `'self'` does not mean the socket in every browser, so the
socket's address is named beside it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING

from chatrt.server.http import Reply, Target

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from websockets.datastructures import Headers

INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".ts": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Names are the same in every version: a browser asks, and mostly hears that nothing changed.
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # Text can then become markup nowhere, not even by a mistake in the page's own script.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_AUTHORITY = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    etag: str


class WebPage:
    """The page's files by their path; `folder` is where they are read from, once, here."""

    def __init__(self, folder: Traversable | None = None) -> None:
        folder = files("chatrt") / "web" if folder is None else folder
        self._files: dict[str, _File] = {}
        for entry in folder.iterdir():
            _, dot, suffix = entry.name.rpartition(".")
            content_type = _TYPES.get(dot + suffix)
            if content_type is not None:
                body = entry.read_bytes()
                etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                self._files[f"/{entry.name}"] = _File(body, content_type, etag)
        if f"/{INDEX}" in self._files:
            self._files["/"] = self._files[f"/{INDEX}"]

    def has(self, target: Target) -> bool:
        """Whether the request is for one of the files, by its exact path.

        With a slash behind it what the page names would lie elsewhere: one folder further down.
        """
        is_read = target.method in ("GET", "HEAD") and not target.upgrade
        return is_read and target.sent_path in self._files

    def reply(self, target: Target, headers: Headers) -> Reply:
        """The file, or that it has not changed; call it only where `has` says so.

        For HEAD the server leaves the body out.
        """
        file = self._files[target.sent_path]
        reply_headers = {
            **_HEADERS,
            "ETag": file.etag,
            "Content-Security-Policy": _policy(headers.get("Host", "")),
        }
        if _names(headers.get_all("If-None-Match"), file.etag):
            return Reply(HTTPStatus.NOT_MODIFIED, b"", file.content_type, reply_headers)
        return Reply(HTTPStatus.OK, file.body, file.content_type, reply_headers)


def _policy(host: str) -> str:
    """The page's policy; the socket of `host`, which the gate let pass, may be reached."""
    socket = f" ws://{host} wss://{host}" if _AUTHORITY.fullmatch(host) else ""
    return "; ".join((*_POLICY, f"connect-src 'self'{socket}"))


def _names(values: list[str], etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for value in values for tag in value.split(",")]
    return etag in tags or "*" in tags
