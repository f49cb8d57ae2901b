"""The table of `bench quality`.

Knows: rich, what each figure is called and held to. Does not know: how it was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from chatrt.bench.quality import MAX_MEAN_KL, MAX_PERPLEXITY_CHANGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from chatrt.bench.quality import QualityFigures

_DEFINITIONS = (
    "Reference: the same weights, dequantised, in float32. Each window of the text begins anew.",
    "KL: of next-token distributions, KL(reference || served), in nats.",
)


def quality_report(figures: QualityFigures, notes: Sequence[str]) -> RenderableType:
    """The figures, what they are held to, and `notes` below them."""
    table = Table(
        title=f"Quality over {figures.num_tokens:,} tokens",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    table.add_column("")
    for name in ("served", "reference", "difference", "at most"):
        table.add_column(name, justify="right")
    perplexity, change = figures.perplexity, figures.perplexity_ratio - 1
    table.add_row(
        "perplexity",
        f"{perplexity.served:.4f}",
        f"{perplexity.reference:.4f}",
        _judged(f"{change:+.3%}", over=abs(change) > MAX_PERPLEXITY_CHANGE),
        f"±{MAX_PERPLEXITY_CHANGE:.1%}",
    )
    kl = _judged(f"{figures.mean_kl:.6f}", over=figures.mean_kl > MAX_MEAN_KL)
    table.add_row("mean KL", "", "", kl, f"{MAX_MEAN_KL}")
    table.add_row("same likeliest token", "", "", f"{figures.top1_agreement:.2%}", "")
    table.add_row("largest logit difference", "", "", f"{figures.max_logit_difference:.4f}", "")
    return Group(table, *(Text(line, style="dim") for line in (*notes, *_DEFINITIONS)))


def _judged(text: str, *, over: bool) -> Text:
    return Text(text, style="red" if over else "")
