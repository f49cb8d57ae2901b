"""Pages that leave the device and come back while it computes: pinned memory, streams beside.

    # out           page ──gather──▶ slot, device ──copy──▶ slot, pinned ──▶ payload
    # in            payload ──▶ slot, pinned ──copy──▶ slot, device ──scatter──▶ page
    # in order of   host         compute        out, back           compute, before the next use

    # a slot out    free │ gathered into │ being copied │ done: payloads are taken │ free
    # its page      the engine's throughout: given up, evicted, written anew whenever it likes
    # a slot in     free │ filled │ being copied │ landed: its scatter is in order │ free
    # its pages     the engine's throughout: whoever touches one lands first what is bound for it

Knows: slots, page ids, marks. Does not know: tokens, sessions, files.
Invariant: pages are read and written by the computing stream alone, in the order in which the host
says it; the streams beside move bytes between slots. A slot's pinned half is touched by the host
only when the copy that reads or writes it is done. So no page is held for a copy's sake.
Cost: a launch and an event for each batch; the host copies payloads to and from pinned memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from chatrt.kvcache import KVCache
    from chatrt.page_bytes import CopyOut, Payload
    from chatrt_kernels.page_moves import MakePageMoves
    from chatrt_kernels.streams import Mark, Streams

SLOT_BYTES = 8 << 20
_MOST_PAGES = 16
_SLOTS_OUT, _SLOTS_IN = 2, 4


class _Slot:
    """Room for some pages on the device, and as much in main memory."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device, *, pinned: bool):
        shape = (num_pages, page_bytes)
        self.device = torch.empty(shape, dtype=torch.uint8, device=device)
        self.host: Tensor = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        self.bytes = self.host.view(-1).numpy().data
        self.page_bytes = page_bytes
        self.emptied: Mark | None = None  # behind the last scatter out of the device's half

    def page(self, index: int) -> memoryview:
        """One page of the half in main memory."""
        return self.bytes[index * self.page_bytes : (index + 1) * self.page_bytes]


@dataclass(slots=True, eq=False)
class _Out:
    """Implements `CopyOut`: pages on their way to main memory, then taken one by one."""

    slot: _Slot
    num_pages: int
    copied: Mark
    free: list[_Slot]
    num_taken: int = 0

    def is_done(self) -> bool:
        return self.copied.is_done()

    def wait(self) -> None:
        self.copied.wait()

    def take(self) -> bytes:
        assert self.copied.is_done(), "a page is taken before it is there"
        payload = bytes(self.slot.page(self.num_taken))
        self.num_taken += 1
        if self.num_taken == self.num_pages:
            self.free.append(self.slot)
        return payload


@dataclass(frozen=True, slots=True, eq=False)
class _In:
    """Pages on their way to the device."""

    slot: _Slot
    page_ids: tuple[int, ...]
    copied: Mark


class StreamedPages:
    """Implements `PageCopier` and `Arrivals` for caches whose pages share ids, and tells them so.

    Args:
        caches: Whose pages they are.
        make_moves: What gathers and scatters them.
        streams: Of their device.
        slot_pages: Pages of a batch; None: as many as fit into `SLOT_BYTES`, at most 16.
    """

    def __init__(
        self,
        caches: Sequence[KVCache],
        make_moves: MakePageMoves,
        streams: Streams,
        *,
        slot_pages: int | None = None,
    ) -> None:
        self._moves = make_moves([runs for kv in caches for runs in kv.runs()])
        self._streams = streams
        self.num_bytes = self._moves.page_bytes
        most = max(1, min(_MOST_PAGES, SLOT_BYTES // self.num_bytes))
        self._slot_pages = most if slot_pages is None else slot_pages
        device = caches[0].data.device
        slots = [
            _Slot(self._slot_pages, self.num_bytes, device, pinned=streams.pinned)
            for _ in range(_SLOTS_OUT + _SLOTS_IN)
        ]
        self._free_out, self._free_in = slots[:_SLOTS_OUT], slots[_SLOTS_OUT:]
        self._coming: deque[_In] = deque()
        self._landed: list[_In] = []
        for kv in caches:
            kv.arrivals = self

    @property
    def num_out(self) -> int:
        """Pages that `copy_out` takes now."""
        return self._slot_pages if self._free_out else 0

    @property
    def num_in(self) -> int:
        """Pages that `copy_in` takes now: of one slot, for the host copies them itself."""
        return self._slot_pages if self._free_in else 0

    @property
    def is_busy(self) -> bool:
        """Whether `poll` wants to be called now and then."""
        return bool(self._coming or self._landed)

    def copy_out(self, page_ids: Sequence[int]) -> CopyOut:
        """Begin to copy pages as they are now, behind all that the device was given."""
        self.land(page_ids)
        compute, out = self._streams.compute, self._streams.out
        slot, count = self._free_out.pop(), len(page_ids)
        compute.launch(partial(self._moves.gather, tuple(page_ids), slot.device))
        out.wait(compute.record())
        out.launch(partial(_copy, slot.device, slot.host, count))
        return _Out(slot, count, out.record(), self._free_out)

    def copy_in(self, pages: Sequence[tuple[int, Payload]]) -> None:
        """Begin to copy payloads to the device; they land before their pages are used."""
        assert len(pages) <= self.num_in, f"{len(pages)} pages, {self.num_in} are taken"
        back, slot = self._streams.back, self._free_in.pop()
        for index, (_, payload) in enumerate(pages):
            slot.page(index)[:] = payload
        if slot.emptied is not None:
            back.wait(slot.emptied)
        back.launch(partial(_copy, slot.host, slot.device, len(pages)))
        page_ids = tuple(page_id for page_id, _ in pages)
        self._coming.append(_In(slot, page_ids, back.record()))

    def land(self, page_ids: Iterable[int]) -> None:
        """Scatter what is bound for these pages, and what came before it, before all that follows.

        The device waits for their copies where these are not done, the host does not.
        """
        if not self._coming:
            return
        wanted = set(page_ids)
        touched = [not wanted.isdisjoint(one.page_ids) for one in self._coming]
        while any(touched):
            del touched[0]
            self._land_first()

    def poll(self) -> None:
        """Between two steps: what has come lands, and slots that nobody uses are free again."""
        while self._coming and self._coming[0].copied.is_done():
            self._land_first()
        if self._landed:
            done = [one for one in self._landed if one.copied.is_done()]
            self._landed = [one for one in self._landed if one not in done]
            self._free_in += [one.slot for one in done]

    def _land_first(self) -> None:
        one, compute = self._coming.popleft(), self._streams.compute
        compute.wait(one.copied)
        compute.launch(partial(self._moves.scatter, one.page_ids, one.slot.device))
        one.slot.emptied = compute.record()
        self._landed.append(one)


def _copy(source: Tensor, target: Tensor, num_pages: int) -> None:
    target[:num_pages].copy_(source[:num_pages], non_blocking=True)
