"""Where KV pages go that leave the device: main memory, a folder, both or neither, as settings say.

Knows: settings, folders, what the bytes of a page depend on. Does not know: how pages are kept.
Invariant: a folder that cannot be used costs a line in the log, never the start.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from chatrt import __version__
from chatrt.archive import Archive, DiskPages
from chatrt.engine.archiving import Archiving
from chatrt.errors import ChatrtError
from chatrt.kvcache import format_bytes
from chatrt.page_bytes import PageBytes
from chatrt.paths import ensure_folder
from chatrt.streamed_pages import StreamedPages
from chatrt_kernels.kv_formats import KVFormat
from chatrt_kernels.streams import cuda_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from chatrt.cli.build import Runtime
    from chatrt.host import EngineHost
    from chatrt.kvcache import KVCache
    from chatrt.page_bytes import PageCopier
    from chatrt.paths import Paths
    from chatrt.settings import Settings
    from chatrt_kernels.page_moves import MakePageMoves
    from chatrt_kernels.streams import Streams

_log = logging.getLogger(__name__)

_GPU_HOST_BYTES = 4 * 2**30


def open_archive(
    runtime: Runtime, host: EngineHost, settings: Settings, paths: Paths
) -> Archive | None:
    """The archive of a running engine, which uses it from now on; None if nothing is to be kept."""
    kv = runtime.target.kv
    host_bytes = settings.host_kv_bytes
    if host_bytes is None:  # on a CPU the pages lie in main memory already
        host_bytes = 0 if kv.data.device.type == "cpu" else _GPU_HOST_BYTES
    disk = _open_disk(settings.kv_dir or paths.kv_pages, settings)
    if disk is None and not host_bytes:
        return None
    caches = [kv, *([] if runtime.paired_kv is None else [runtime.paired_kv])]
    copier, fingerprint = page_copier(caches, runtime.page_moves), _fingerprint(runtime, caches)
    archive = Archive(
        page_bytes=copier.num_bytes,
        page_size=kv.page_size,
        fingerprint=fingerprint,
        host_bytes=host_bytes,
        disk=disk,
        wake=host.wake,
    )
    sessions = runtime.engine.sessions
    archiving = Archiving(archive, copier, sessions, fingerprint=fingerprint)
    host.post(lambda engine: engine.keep_pages_in(archiving))
    return archive


def page_copier(
    caches: Sequence[KVCache],
    make_moves: MakePageMoves | None,
    make_streams: Callable[[torch.device], Streams] = cuda_streams,
) -> PageCopier:
    """What copies pages out and back: at once, or beside the steps where moves are given."""
    if make_moves is None:
        return PageBytes(caches)
    try:
        return StreamedPages(caches, make_moves, make_streams(caches[0].data.device))
    except RuntimeError as error:  # no room for buffers, in either memory
        _log.warning("KV pages are copied between steps, which wait for it: %s", error)
        return PageBytes(caches)


def _open_disk(folder: Path, settings: Settings) -> DiskPages | None:
    max_bytes = settings.disk_kv_bytes
    if not max_bytes or not settings.store:
        return None
    try:
        disk = DiskPages(ensure_folder(folder), max_bytes=max_bytes)
    except (ChatrtError, OSError) as error:
        _log.warning("KV pages are not kept on disk: %s", error)
        return None
    _log.info("KV pages on disk: up to %s in %s", format_bytes(max_bytes), folder)
    return disk


def _fingerprint(runtime: Runtime, caches: list[KVCache]) -> str:
    """All that must be equal for a page to mean the same rows."""
    facts: list[object] = [__version__, runtime.fingerprint, runtime.ops.name]
    facts += [(kv.dtype, kv.layout.name, tuple(kv.data[:, :, 0].shape)) for kv in caches]
    facts += ["turned keys" for kv in caches if KVFormat.of(kv.dtype).turns_keys]
    return " | ".join(map(str, facts))
