"""What the options of `chatrt bench speculation` mean that are lists, files or numbers with a word.

Knows: how they are written. Does not know: what is done with them.
Invariant: what makes no sense is refused in one sentence that has the text as it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.bench.prompts import Prompt

AUTO = "auto"
_DRAFTERS = ("auto", "head", "ngram", "model")
_MAX_DEPTH = 8
_MAX_TEMPERATURE = 2.0


def chosen_prompts(
    path: Path | None, kinds: str | None, per_kind: int | None
) -> tuple[Prompt, ...]:
    """The bundled prompts or a file's, of these kinds (with commas), so many of each, in order.

    Raises:
        InvalidValue: The file cannot be used, or there is a kind that it or the bundle lacks.
    """
    from chatrt.bench.prompts import bundled_prompts, load_prompts

    wanted = None if kinds is None else tuple(kinds.split(","))
    if path is None:
        return bundled_prompts(wanted, per_kind)
    counts: dict[str, int] = {}
    chosen = []
    for prompt in load_prompts(path):
        counts[prompt.kind] = counts.get(prompt.kind, 0) + 1
        within = per_kind is None or counts[prompt.kind] <= per_kind
        if within and (wanted is None or prompt.kind in wanted):
            chosen.append(prompt)
    missing = [kind for kind in wanted or () if kind not in counts]
    if missing:
        raise InvalidValue(
            f"{path} has no prompt of the kind {', '.join(missing)}, it has {', '.join(counts)}",
            param="--kinds",
        )
    return tuple(chosen)


def drafters_of(text: str) -> tuple[str, ...]:
    """The drafters of `auto,ngram`, each once.

    Raises:
        InvalidValue: One is not a drafter.
    """
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in _DRAFTERS:
            raise InvalidValue(
                f"--drafter has {name!r}, it must be of {', '.join(_DRAFTERS)}", param="--drafter"
            )
    return names


def depth_of(text: str) -> int | None:
    """A number of drafts; None for `auto`.

    Raises:
        InvalidValue: It is neither.
    """
    if text == AUTO:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_DEPTH:
        raise InvalidValue(
            f"--depth is {text!r}, it must be auto or a whole number from 1 to {_MAX_DEPTH}",
            param="--depth",
        )
    return int(text)


def temperatures_of(text: str) -> tuple[float, ...]:
    """The temperatures of `0,0.8`, each once.

    Raises:
        InvalidValue: It is anything else.
    """
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 <= one <= _MAX_TEMPERATURE for one in found):
        raise InvalidValue(
            f"--temperature is {text!r}, it must be numbers from 0 to {_MAX_TEMPERATURE:g}, "
            "such as 0,0.8",
            param="--temperature",
        )
    return found
