"""What is done behind turns that are over: the next one is prepared, deleted ones are wiped.

Knows: stored turns, their sequences, the engine's host. Does not know: running answers, the wire.
Invariant: a call for deletion returns when neither the engine, nor main memory, nor a file holds
KV pages that only the deleted turns needed.
Cost: what a deletion reads and hashes grows with the conversation; nothing here is in a TTFT.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from chatrt.errors import ServerUnavailable
from chatrt.params import SamplingParams
from chatrt.service.prompts import history_ids, sequence_ids
from chatrt.turn import TurnKind, TurnRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import TypeAlias

    from chatrt.archive import Archive
    from chatrt.engine import Engine
    from chatrt.host import EngineHost
    from chatrt.service.history import History
    from chatrt.service.prompts import PromptPlanner
    from chatrt.store import StoredTurn

    Sequences: TypeAlias = list[tuple[str, list[int]]]

_log = logging.getLogger(__name__)
_FLUSH_S = 10.0


class Upkeep:
    """Prepares and wipes; `archive` is where pages are kept that left the device, if anywhere."""

    def __init__(
        self, host: EngineHost, planner: PromptPlanner, history: History, archive: Archive | None
    ) -> None:
        self._host = host
        self._planner = planner
        self._history = history
        self._archive = archive

    async def prepare(self, turn: StoredTurn, *, salt: str) -> None:
        """Have what every turn behind this one begins with computed at idle time."""
        chain = await self._history.known_chain(turn.response_id, turn.key_id)
        token_ids = self._planner.next_turn_ids(chain) if chain else []
        if not token_ids:
            return
        request = TurnRequest(
            response_id=f"prepared for {turn.response_id}",
            kind=TurnKind.PREPARED,
            token_ids=token_ids,
            num_history=0,
            sampling=SamplingParams(temperature=0.0, max_output_tokens=1),
            parent_id=turn.response_id,
            salt=salt,
            owner=turn.key_id,
        )
        self._host.post(lambda engine: engine.prepare(request))

    async def sequences(self, response_ids: Collection[str], key_id: str, salt: str) -> Sequences:
        """The sequences of turns that are about to be deleted, to be wiped when they are.

        Those of turns that others continue are parts of theirs, but for answers that read otherwise
        once another turn follows, and where the other began anew. Each of them under the salts of
        both settings of shared prefixes: it may have been written under the other one.
        """
        if self._archive is None:
            return []
        found: list[list[int]] = []
        chains = [await self._history.known_chain(one, key_id) for one in response_ids]
        parents = {chain[-1].parent_id for chain in chains if chain and not chain[-1].is_whole}
        for chain in filter(None, chains):
            settles = chain[-1].settled_from is not None
            if chain[-1].response_id not in parents or settles:
                found.append(sequence_ids(chain))
            if settles:
                found.append(history_ids(chain))
        return [(one, ids) for one in sorted({"", key_id, salt}) for ids in found]

    async def wipe(self, response_ids: Sequence[str], sequences: Sequences) -> None:
        """Forget responses, with the pages that only these sequences need, on disk too."""
        archive = self._archive
        try:
            await self._host.call(lambda engine: engine.forget(response_ids))
            # One between two steps: to name the pages of a long one takes a millisecond.
            for one in sequences:
                await self._host.call(partial(_wipe, one))
        except ServerUnavailable:  # the engine has ended, its pages with it: the files are left
            if archive is not None:
                for salt, token_ids in sequences:
                    archive.wipe_sequence(salt, token_ids)
        if archive is not None and sequences:
            is_done = await asyncio.to_thread(archive.flush, _FLUSH_S)
            if not is_done:
                _log.warning("KV pages of a deleted conversation are still on disk")


def _wipe(sequence: tuple[str, list[int]], engine: Engine) -> None:
    engine.forget((), [sequence])
