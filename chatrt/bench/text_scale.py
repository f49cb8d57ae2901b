"""How many words make so many tokens, asked of the server itself.

Knows: everyday words, `generate: false`. Does not know: tokenizers, what the texts are for.
Invariant: nothing is assumed of the model's vocabulary; two prompts of different lengths tell how
many tokens a word takes and how many the template adds.
Cost: two prefills of a few words.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from chatrt.bench.workload import sentence
from chatrt.client import ResponseRequest

if TYPE_CHECKING:
    from chatrt.client import ChatClient

NUM_PREFILLS = 2
_SHORT_WORDS, _LONG_WORDS = 10, 30


@dataclass(frozen=True, slots=True)
class TextScale:
    """What a word costs in tokens, and a first message with nothing but its number (`numbered`)."""

    tokens_per_word: float
    overhead_tokens: float

    def num_words(self, num_tokens: int) -> int:
        """Words of a first message whose whole prompt has about `num_tokens`; at least one."""
        return max(1, round((num_tokens - self.overhead_tokens) / self.tokens_per_word))


def numbered(number: str, text: str) -> str:
    """A text behind its number, so that no two first messages of a run begin alike."""
    return f"{number}: {text}"


async def measure_scale(client: ChatClient, *, seed: int) -> TextScale:
    """The scale of the model behind `client`.

    Raises:
        ChatrtError: The server refuses the prompts, or is gone.
    """
    random = Random(f"{seed}/scale")
    # The longer text goes on from the shorter one, so that nothing but its words differs.
    words = sentence(random, _LONG_WORDS).removesuffix(".").split()
    short, long = [
        await _num_prompt_tokens(client, numbered("00", " ".join(words[:count])))
        for count in (_SHORT_WORDS, _LONG_WORDS)
    ]
    per_word = (long - short) / (_LONG_WORDS - _SHORT_WORDS)
    if per_word <= 0:  # a server that does not count: everyday words are about a token each
        return TextScale(1.0, 0.0)
    return TextScale(per_word, short - per_word * _SHORT_WORDS)


async def _num_prompt_tokens(client: ChatClient, text: str) -> int:
    answer = await client.send(ResponseRequest(input=text, generate=False))
    result = await answer.collect()
    return int(result.usage.get("input_tokens", 0))
