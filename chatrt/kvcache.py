"""The KV cache of one model: its tensors, their copies, and the plan of how many pages fit.

Knows: layers, pages, dtypes, bytes. Does not know: sessions, which page holds what, the model.
Invariant: page p has the same index in every layer, for keys, values and scales alike.
Cost: nothing is touched at allocation, so on a CPU unused pages take no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from chatrt.errors import ModelError
from chatrt_kernels import pages
from chatrt_kernels.kv_formats import KVFormat, bytes_per_head
from chatrt_kernels.ops import KVLayer, KVLayout
from chatrt_kernels.page_moves import PageRuns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from chatrt.session import PageCopy
    from chatrt_kernels.page_moves import MakePageMoves, PageMoves

# In `data` [layers, 2, num_pages, …] as in `scales`.
_PAGE_DIM = 2


@dataclass(frozen=True, slots=True)
class PageContents:
    """The bytes of some pages, pages first: each page is one contiguous run.

    `data` is `[num_pages, layers, 2, page_size, kv_heads, stored_width]`, `scales` (quantised
    caches only) `[num_pages, layers, 2, page_size, kv_heads, …]`.
    """

    data: Tensor
    scales: Tensor | None


class Arrivals(Protocol):
    """What is still on its way to pages."""

    def land(self, page_ids: Iterable[int]) -> None:
        """Whatever the device is given from now on finds in these pages what was put there."""
        ...


class KVCache:
    """Keys and values of all layers, in pages.

    `data` is `[layers, 2, num_pages, page_size, kv_heads, stored_width]` (index 0 of the second
    dimension: keys, 1: values); `scales`, for quantised formats only, `[layers, 2, num_pages,
    page_size, kv_heads, …]`; widths and scales are those of `kv_formats`. Where `layout` is HEADS,
    pages lie outermost in memory, and the numbers of a page in another order than the last three
    dimensions of `data` say; the views that `layer` returns know it.

    `arrivals` are pages that came back and are not in place yet: whoever reads or writes a page on
    the device lands it first. None where pages are in place at once. `moves`, if there are any,
    copy pages of all layers at once.
    """

    __slots__ = ("_layers", "arrivals", "data", "layout", "moves", "scales")

    def __init__(
        self, data: Tensor, scales: Tensor | None = None, *, layout: KVLayout = KVLayout.ROWS
    ) -> None:
        quantised = KVFormat.of(data.dtype) is not KVFormat.FLOAT
        assert (scales is not None) == quantised, f"scales of {data.dtype}"
        assert scales is None or scales.shape[:5] == data.shape[:5], f"{scales.shape}, {data.shape}"
        self.data = data
        self.scales = scales
        self.layout = layout
        self.arrivals: Arrivals | None = None
        self.moves: PageMoves | None = None
        # views, made once: a forward asks for each of them in every step
        self._layers = tuple(
            _layer_view(data[layer], None if scales is None else scales[layer], layout)
            for layer in range(data.shape[0])
        )

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layout: KVLayout = KVLayout.ROWS,
    ) -> KVCache:
        """A cache of unwritten pages; what they hold is arbitrary."""
        rows = (num_layers, 2, num_pages, page_size, kv_heads)
        kind = KVFormat.of(dtype)

        def allocated(of_head: tuple[int, ...], its_dtype: torch.dtype) -> Tensor:
            shape = (*rows, *of_head)
            if layout is KVLayout.ROWS:
                return torch.empty(shape, dtype=its_dtype, device=device)
            # All that a token position has lies together: pages fill memory one after the other.
            by_page = (num_pages, num_layers, 2, *shape[3:])
            return torch.empty(by_page, dtype=its_dtype, device=device).movedim(0, _PAGE_DIM)

        of_scales = kind.scale_shape(head_dim)
        scales = None if of_scales is None else allocated(of_scales, kind.scale_dtype)
        return cls(allocated((kind.stored_width(head_dim),), dtype), scales, layout=layout)

    @property
    def dtype(self) -> torch.dtype:
        """In which keys and values are stored."""
        return self.data.dtype

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.data.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages in each layer."""
        return self.data.shape[_PAGE_DIM]

    @property
    def page_size(self) -> int:
        """Token slots per page."""
        return self.data.shape[_PAGE_DIM + 1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, scales included, whether touched yet or not."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def layer(self, index: int) -> KVLayer:
        """Views of one layer's keys and values; the same object at each call."""
        return self._layers[index]

    def move_pages_by(self, make: MakePageMoves) -> None:
        """Copy rows by these moves from now on, all layers and all copies at once."""
        self.moves = make(self.runs())

    def runs(self) -> tuple[PageRuns, ...]:
        """All that the pages hold, as bytes: data, and scales if there are any."""
        by_rows = self.layout is KVLayout.ROWS
        return tuple(
            PageRuns.of(tensor, page_dim=_PAGE_DIM, by_rows=by_rows) for tensor in self._tensors()
        )

    def land(self, page_ids: Iterable[int]) -> None:
        """Whoever is about to give the device work on these pages says so."""
        if self.arrivals is not None:
            self.arrivals.land(page_ids)

    def copy_rows(self, copies: Iterable[PageCopy]) -> None:
        """Do the copies in order: the first `num_rows` rows of page `src` onto page `dst`.

        Rows of `dst` behind them mean nothing afterwards: where a page does not lie row by row, the
        whole page is copied.
        """
        copies = tuple(copies)
        self.land(page_id for copy in copies for page_id in (copy.src, copy.dst))
        if self.moves is not None:
            self.moves.copy_rows(copies)
            return
        by_rows = self.layout is KVLayout.ROWS
        for copy in copies:
            num_rows = copy.num_rows if by_rows else self.page_size
            for tensor in self._tensors():
                pages.copy_page_rows(tensor, copy.src, copy.dst, num_rows, page_dim=_PAGE_DIM)

    def gather(self, page_ids: Sequence[int]) -> PageContents:
        """Copy pages out, in the order of `page_ids`."""
        self.land(page_ids)
        gathered = [pages.gather_pages(t, page_ids, page_dim=_PAGE_DIM) for t in self._tensors()]
        return PageContents(gathered[0], gathered[1] if self.scales is not None else None)

    def scatter(self, page_ids: Sequence[int], contents: PageContents) -> None:
        """Write what `gather` of a cache of the same shape and dtype returned onto `page_ids`."""
        assert contents.data.dtype == self.dtype, f"{contents.data.dtype} into {self.dtype}"
        self.land(page_ids)
        pages.scatter_pages(self.data, page_ids, contents.data, page_dim=_PAGE_DIM)
        if self.scales is not None:
            assert contents.scales is not None, "pages without scales for a quantised cache"
            pages.scatter_pages(self.scales, page_ids, contents.scales, page_dim=_PAGE_DIM)

    @staticmethod
    def bytes_per_page(
        *, num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one page takes over all layers, keys, values and scales together."""
        return num_layers * 2 * page_size * kv_heads * bytes_per_head(head_dim, dtype)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.data,) if self.scales is None else (self.data, self.scales)


def _layer_view(data: Tensor, scales: Tensor | None, layout: KVLayout) -> KVLayer:
    """One layer's pages `[num_pages, page_size, kv_heads, …]`, however they lie.

    `data` and `scales` are `[2, num_pages, page_size, kv_heads, …]`.
    """
    (keys, values), pair = data, (None, None) if scales is None else (scales[0], scales[1])
    if layout is KVLayout.ROWS:
        return KVLayer(keys, values, *pair)
    num_pages, page_size, kv_heads, width = keys.shape
    by_head = values.view(num_pages, kv_heads, page_size, width)
    return KVLayer(
        _tokens_last(keys),
        by_head.permute(0, 2, 1, 3),
        *(None if one is None else _tokens_last(one) for one in pair),
    )


def _tokens_last(pages: Tensor) -> Tensor:
    """`[num_pages, page_size, kv_heads, …]` over memory in which tokens come last."""
    num_pages, page_size, *inside = pages.shape
    return pages.view(num_pages, *inside, page_size).movedim(-1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How many KV pages there are, and what they are a share of."""

    total_bytes: int  # what the share is taken of
    fraction_of: str  # its name, such as "RAM" or "free GPU memory"
    budget_bytes: int  # for pages; only whole pages of it are used
    explicit: bool  # the budget was given in bytes, not as a fraction
    bytes_per_page: int  # of the target and of what drafts for it
    draft_bytes_per_page: int  # of what drafts alone
    page_size: int
    num_pages: int
    max_context: int  # tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.bytes_per_page

    @property
    def kv_bytes_by_owner(self) -> dict[str, int]:
        """Bytes of all pages: of the `target`, and of `drafts` where something drafts on them."""
        draft_bytes = self.num_pages * self.draft_bytes_per_page
        owners = {"target": self.kv_bytes - draft_bytes}
        return owners | ({"drafts": draft_bytes} if draft_bytes else {})

    @property
    def num_tokens(self) -> int:
        """Token slots of all pages."""
        return self.num_pages * self.page_size

    def describe(self) -> list[str]:
        """Two lines for a person: the cache, and how many full contexts it holds."""
        if self.explicit:
            share = f"{format_bytes(self.kv_bytes)} of {format_bytes(self.budget_bytes)} given"
        else:
            percent = round(100 * self.budget_bytes / self.total_bytes)
            total = f"{format_bytes(self.total_bytes)} {self.fraction_of}"
            share = f"{format_bytes(self.kv_bytes)} = {percent} % of {total}"
        draft = ""
        if self.draft_bytes_per_page:
            draft_bytes = self.num_pages * self.draft_bytes_per_page
            draft = f", {format_bytes(draft_bytes)} of it for drafts"
        pages_per_context = -(-self.max_context // self.page_size)
        fits = self.num_pages / pages_per_context
        return [
            f"KV cache: {self.num_pages:,} pages of {self.page_size} tokens ({share}{draft}), "
            f"{self.num_tokens:,} tokens",
            f"context: up to {self.max_context:,} tokens ({pages_per_context:,} pages), "
            f"which the cache holds {fits:.1f} times",
        ]


def plan_memory(
    *,
    available_bytes: int,
    fraction_of: str,
    fraction: float,
    explicit_bytes: int | None,
    bytes_per_page: int,
    page_size: int,
    max_context: int,
    draft_bytes_per_page: int = 0,
) -> MemoryPlan:
    """Decide how many pages there are: as many whole ones as the budget holds.

    The budget is `explicit_bytes`, or that `fraction` of `available_bytes`. What is available is
    the caller's to measure and to name (`fraction_of`): memory left free behind the weights on a
    GPU, all of RAM on a CPU. `bytes_per_page` is the target's; what drafts for it keeps
    `draft_bytes_per_page` under the same page ids.

    Raises:
        ModelError: Not even one page fits; the message has both sizes.
    """
    budget_bytes = explicit_bytes
    if budget_bytes is None:
        budget_bytes = int(fraction * available_bytes)
    bytes_per_page += draft_bytes_per_page
    num_pages = budget_bytes // bytes_per_page
    if num_pages < 1:
        raise ModelError(
            f"one KV page of {page_size} tokens needs {format_bytes(bytes_per_page)}, "
            f"the KV memory budget is {format_bytes(budget_bytes)}"
        )
    return MemoryPlan(
        total_bytes=available_bytes,
        fraction_of=fraction_of,
        budget_bytes=budget_bytes,
        explicit=explicit_bytes is not None,
        bytes_per_page=bytes_per_page,
        draft_bytes_per_page=draft_bytes_per_page,
        page_size=page_size,
        num_pages=num_pages,
        max_context=max_context,
    )


def format_bytes(num_bytes: int) -> str:
    """A size for a person, in binary units with one decimal: `737,280` is `720.0 KiB`."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
