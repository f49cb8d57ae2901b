"""A target and a draft model over the same pages, driven by hand, with truth to compare with.

Where the draft model has the target's weights, the target's own keys and values say what every row
of the draft's must be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchRows
from chatrt.drafter import DraftRequest, TargetPass
from chatrt.pages import PageAllocator
from chatrt.params import SamplingParams
from chatrt.prefix import PrefixTree
from chatrt.sampling import DraftChoice, Sampler
from chatrt.session_manager import SessionManager
from chatrt.speculative import Verified, verify
from chatrt.testing.engine import PAGE_SIZE, tiny_target
from chatrt_drafts.draft_model import ModelDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.engine import Target
    from chatrt.session import Attached, PageCopy, Session
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_kernels.ops import Ops

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8)


def prompt(length: int, first: int = 0) -> list[int]:
    """Tokens that repeat nothing for long; other ones for another `first`."""
    return [(first + 7 * i + i * i // 3) % 128 for i in range(length)]


class ErringSampler(Sampler):
    """The turn's own sampler; among a drafter's logits it errs at one depth, if there is one."""

    errs_at: int | None = None

    def choose_among(
        self,
        logits: Tensor,
        token_ids: Tensor,
        *,
        position: int,
        drafts_before: Sequence[int] = (),
    ) -> DraftChoice:
        choice = super().choose_among(
            logits, token_ids, position=position, drafts_before=drafts_before
        )
        if len(drafts_before) != self.errs_at:
            return choice
        return DraftChoice((choice.token_id + 1) % len(token_ids), choice.probability)


@dataclass(slots=True, eq=False)
class Talk:
    """One session that is being decoded."""

    session: Session
    sampler: ErringSampler

    def request(self, num_drafts: int, floor: float = 0.0) -> DraftRequest:
        session = self.session
        return DraftRequest(
            session.session_id,
            session.token_ids,
            session.page_ids,
            num_drafts,
            self.sampler,
            floor,
        )


@dataclass(frozen=True, slots=True)
class Round:
    """What a step drafted for one session, and what came of it."""

    drafts: list[int]
    verified: Verified


@dataclass
class Pair:
    """A target, its sessions, and a drafter; the draft model has the weights of `draft_seed`."""

    tokenizer: Tokenizer
    num_pages: int = 64
    draft_seed: int = 0
    ops: Ops | None = None
    max_catch_up_rows: int = 64
    max_context: int = 256
    vocab_size: int | None = None
    target: Target = field(init=False)
    drafter: ModelDrafter = field(init=False)
    sessions: SessionManager = field(init=False)
    talks: list[Talk] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.target = tiny_target(self.tokenizer, num_pages=self.num_pages, ops=self.ops)
        draft = tiny_target(
            self.tokenizer, num_pages=self.num_pages, seed=self.draft_seed, ops=self.ops
        )
        self.drafter = ModelDrafter(
            draft.decoder,
            draft.kv,
            draft.batches,
            vocab_size=self.vocab_size or self.tokenizer.vocab_size,
            max_context=self.max_context,
            max_catch_up_rows=self.max_catch_up_rows,
        )
        allocator = PageAllocator(self.num_pages)
        tree = PrefixTree(allocator, PAGE_SIZE)
        self.sessions = SessionManager(allocator, tree, page_size=PAGE_SIZE)

    def open(
        self, token_ids: Sequence[int], params: SamplingParams = GREEDY, *, seed: int = 0
    ) -> Talk:
        """A new session whose prompt the target has computed but for its last token."""
        return self._attach(self.sessions.open("", token_ids), params, seed)

    def fork(self, talk: Talk, num_tokens: int) -> Talk:
        attached = self.sessions.fork(talk.session, num_tokens)
        return self._attach(attached, talk.sampler.params, talk.sampler.seed)

    def rewind(self, talk: Talk, num_tokens: int, token_ids: Sequence[int]) -> None:
        """Go back to the first tokens and go on with others; the drafter sees what is computed."""
        self._copy(self.sessions.rewind(talk.session, num_tokens))
        self.sessions.extend(talk.session, token_ids)
        self._prefill(talk)

    def forget(self, talk: Talk) -> None:
        self.talks.remove(talk)
        self.sessions.forget(talk.session)
        self.drafter.close(talk.session.session_id)

    def step(self, depths: dict[Talk, int]) -> dict[Talk, Round]:
        """Propose, one pass of the target, observe, verify, commit."""
        for talk, num_drafts in depths.items():
            self.sessions.reserve(talk.session, 1 + num_drafts)
        proposals = self.drafter.propose([talk.request(k) for talk, k in depths.items()])
        logits = self._forward(list(depths), proposals)
        rounds = {}
        for talk, drafts, rows in zip(depths, proposals, logits, strict=True):
            length = len(talk.session.token_ids)
            verified = verify(talk.sampler, rows, drafts, position=length)
            talk.sampler.accept(verified.token_ids)
            self._commit(talk, verified.token_ids, length + verified.num_accepted)
            rounds[talk] = Round(drafts, verified)
        return rounds

    def num_right(self, talk: Talk) -> int:
        return self.drafter.num_right(talk.request(0))

    def assert_right_rows_are_the_targets(self, talk: Talk) -> None:
        """Of a draft model with the target's weights."""
        num_rows = self.num_right(talk)
        assert num_rows <= talk.session.num_computed
        for layer in range(self.target.kv.num_layers):
            own, true = self.drafter.kv.layer(layer), self.target.kv.layer(layer)
            for tensor, expected in ((own.keys, true.keys), (own.values, true.values)):
                found, wanted = (t[talk.session.page_ids].flatten(0, 1) for t in (tensor, expected))
                torch.testing.assert_close(
                    found[:num_rows], wanted[:num_rows], rtol=1e-3, atol=1e-4
                )

    def _attach(self, attached: Attached, params: SamplingParams, seed: int) -> Talk:
        self._copy(attached.copies)
        sampler = ErringSampler(
            params,
            seed=seed,
            vocab_size=self.tokenizer.vocab_size,
            prompt_ids=attached.session.token_ids,
        )
        talk = Talk(attached.session, sampler)
        self.talks.append(talk)
        self._prefill(talk)
        return talk

    def _prefill(self, talk: Talk) -> None:
        session = talk.session
        token_ids = session.token_ids[session.num_computed : -1]
        if token_ids:
            self.sessions.reserve(session, len(token_ids))
            rows = [BatchRows(token_ids, session.num_computed, session.page_ids)]
            self._run(rows, [talk])
            self._commit(talk, [], len(session.token_ids) - 1)

    def _forward(self, talks: list[Talk], proposals: list[list[int]]) -> list[Tensor]:
        rows = [
            BatchRows(
                [talk.session.token_ids[-1], *drafts],
                talk.session.num_computed,
                talk.session.page_ids,
                range(len(drafts) + 1),
            )
            for talk, drafts in zip(talks, proposals, strict=True)
        ]
        return self._run(rows, talks)

    def _run(self, rows: list[BatchRows], talks: list[Talk]) -> list[Tensor]:
        self.drafter.observe(TargetPass([talk.session.session_id for talk in talks], rows))
        batch = self.target.batches.build(rows)
        logits = self.target.decoder.forward(batch, self.target.kv).values.clone()
        return [logits[r.start : r.stop] for r in batch.logit_ranges]

    def _commit(self, talk: Talk, token_ids: list[int], num_computed: int) -> None:
        self.sessions.commit(talk.session, token_ids, num_computed=num_computed)
        self.sessions.trim(talk.session)
        self.drafter.commit(talk.session.session_id, num_computed)

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        self.target.kv.copy_rows(copies)
        self.drafter.kv.copy_rows(copies)
