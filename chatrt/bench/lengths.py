"""Whole numbers that a workload draws: always the same one, evenly from a range, or lognormally.

    48        always 48
    32-128    every number from 32 to 128 alike
    48~0.5    lognormal: half lie below 48, two thirds within 48 × e^±0.5

Knows: how the three are written and drawn. Does not know: what the numbers are lengths of.
Invariant: what is drawn lies from `least` to `most`; a lognormal number that would lie more than
three sigma off is set to the border there, so that one draw in a thousand cannot fill a context.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from random import Random

MOST_SIGMA = 2.0
_CLIPPED_SIGMAS = 3.0
_FORM = re.compile(r"([0-9]+)(?:-([0-9]+)|~([0-9]+(?:\.[0-9]+)?))?")


@dataclass(frozen=True, slots=True)
class Length:
    """A whole number drawn evenly from `least` to `most`, both included."""

    least: int
    most: int

    @staticmethod
    def parse(text: str, *, param: str, at_least: int = 1) -> Length:
        """`64` is always 64, `32-128` anything from 32 to 128, `48~0.5` a `Lognormal`.

        Raises:
            InvalidValue: It is none of them, begins below `at_least`, or has a sigma that is
                not above 0 and at most `MOST_SIGMA`.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise InvalidValue(
                f"{param} is {text!r}, it must be a number like 64, a range like 32-128, or a "
                "median and a sigma like 48~0.5",
                param=param,
            )
        least = int(found[1])
        most = int(found[2] or least)
        if not at_least <= least <= most:
            raise InvalidValue(
                f"{param} is {text!r}, it must rise from at least {at_least}", param=param
            )
        if found[3] is None:
            return Length(least, most)
        sigma = float(found[3])
        if not 0 < sigma <= MOST_SIGMA or not least:
            raise InvalidValue(
                f"{param} is {text!r}, it must have a median of at least 1 and a sigma above 0 and "
                f"at most {MOST_SIGMA:g}",
                param=param,
            )
        return Lognormal.around(least, sigma, at_least=at_least)

    def draw(self, random: Random) -> int:
        """The next number."""
        return random.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class Lognormal(Length):
    """A whole number whose logarithm is normal around that of `median`, clipped to the range."""

    median: int
    sigma: float

    @classmethod
    def around(cls, median: int, sigma: float, *, at_least: int = 1) -> Self:
        """Clipped at three sigma, and to at least `at_least`."""
        width = math.exp(_CLIPPED_SIGMAS * sigma)
        return cls(
            max(at_least, round(median / width)), round(median * width), median=median, sigma=sigma
        )

    def draw(self, random: Random) -> int:
        """The next number."""
        drawn = random.lognormvariate(math.log(self.median), self.sigma)
        return min(max(round(drawn), self.least), self.most)

    def __str__(self) -> str:
        return f"{self.median}~{self.sigma:g}"
