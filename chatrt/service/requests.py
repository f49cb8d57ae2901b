"""From a request on the wire to what the service works with: sampling, an ask, limits checked.

Knows: the message's fields, the model's defaults, this server's caps. Does not know: history, ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from chatrt.errors import InvalidValue, ModelNotFound
from chatrt.service.prompts import Ask
from chatrt.text.messages import Message
from chatrt.turn import TurnKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chatrt.params import SamplingParams
    from chatrt.wire.messages import ResponseCreate


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What the service needs to know of the model and the limits.

    `max_output_tokens` caps every answer (None: the context does); `max_input_tokens` caps one
    turn's sequence. `share_prefixes` lets keys share KV pages. An answer that ended can be replayed
    for `resume_window_s`.
    """

    model: str
    max_context: int
    sampling: SamplingParams
    max_output_tokens: int | None = None
    max_input_tokens: int | None = None
    share_prefixes: bool = False
    resume_window_s: float = 60.0
    model_aliases: frozenset[str] = field(default_factory=frozenset)


class RequestReader:
    """Reads requests for one model, whose vocabulary has `vocab_size` ids."""

    def __init__(self, settings: ServiceSettings, vocab_size: int) -> None:
        self._settings = settings
        self._vocab_size = vocab_size

    def models(self) -> list[dict[str, Any]]:
        """The one model that is served, as the API lists models, with the context that it holds."""
        settings = self._settings
        return [
            {
                "id": settings.model,
                "object": "model",
                "created": 0,
                "owned_by": "chatrt",
                "max_context": settings.max_context,
            }
        ]

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound for the name of a model that is not served here."""
        known = {self._settings.model, *self._settings.model_aliases}
        if name is not None and name not in known:
            raise ModelNotFound(
                f"model {name} is not served here, {self._settings.model} is", param="model"
            )

    def sampling(self, message: ResponseCreate) -> SamplingParams:
        """How the turn is sampled.

        Raises:
            InvalidValue: A token id is not in the vocabulary, or the answer is to be too long.
        """
        sampling = message.sampling(self._settings.sampling)
        self._check_token_ids("logit_bias", sampling.logit_bias)
        self._check_token_ids("stop_token_ids", sampling.stop_token_ids)
        cap, asked = self._settings.max_output_tokens, sampling.max_output_tokens
        if cap is not None and asked is not None and asked > cap:
            raise InvalidValue(
                f"max_output_tokens is {asked}, this server allows at most {cap}",
                param="max_output_tokens",
            )
        return sampling if asked is not None else replace(sampling, max_output_tokens=cap)

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        size = self._vocab_size
        for token_id in token_ids:
            if token_id >= size:
                raise InvalidValue(
                    f"{name} has token id {token_id}, the vocabulary has {size} ids",
                    param=f"chatrt.{name}",
                )

    def ask(self, message: ResponseCreate, sampling: SamplingParams) -> Ask:
        """What the turn wants appended, for the prompt planner."""
        kind = TurnKind.ANSWER
        if not message.generate:
            kind = TurnKind.TYPED_AHEAD if message.partial else TurnKind.PREFILL
        quarter = self._settings.max_context // 4
        return Ask(
            messages=tuple(Message(item.role, item.content) for item in message.input),
            instructions=message.instructions,
            kind=kind,
            drop_oldest=message.truncation == "auto",
            num_reserved=min(sampling.max_output_tokens or quarter, quarter),
        )


def num_drafts(message: ResponseCreate) -> int | None:
    """The draft length that a request fixes: 0 turns drafting off, None leaves it open."""
    speculation = message.chatrt.speculation
    return speculation.k if speculation.enabled else 0
