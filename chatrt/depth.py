"""How many tokens to draft for each session: those that pay, by what they cost and how they fared.

    # each step   choose → drafts → one pass of the target → record, observe_drafts, observe_pass

Knows: what passes and drafts take (ms), how many drafts of a session were accepted at each place.
Does not know: tokens, who a source of drafts is, how a chain is made.
Invariant: a depth never exceeds its wish; probes take at most `_PROBE_SHARE` of the time, over all
sessions together, plus what they win back.
Cost: 9 µs for one session, 24 µs for eight with four drafts each, in every fourth step; linear in
sessions × depth.
Source: expected tokens per round of a chain, arXiv 2211.17192, here by place in the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.step_times import DraftCost, StepCosts, StepTimes, further_draft_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Depth", "DepthController", "DraftCost", "StepCosts", "Wish"]

# Acceptance: evidence halves in 30 rounds; what is known of a source counts as three rounds.
_KEEP = 0.5 ** (1 / 30)
_PRIOR_ROUNDS = 3.0
_PRIOR_RATE = 1 / 256
# The text has changed when a run of equal outcomes at the first draft was so unlikely; outcomes of
# a chance above `_LIKELY` speak against it.
_LIKELY, _STRANGE, _KEEP_IF_STRANGE = 0.75, 0.005, 0.25
# How far a place in the chain follows the one before it when that is unlike other sessions'.
_CARRY = 0.5
# Probing: waits in steps, the share of the time it may take, what may be saved up in steps.
_FIRST_WAIT, _LAST_WAIT, _UNANSWERED_WAIT = 8, 256, 4
_PROBE_SHARE, _USUAL_SHARE = 0.01, 0.003
_MOST_SAVED_STEPS = 2.0
# Above this chance the first draft is not what is in doubt: the second is.
_SURE = 0.9
# A choice is good for so many steps if nobody's wish changes: acceptance is learnt over dozens.
_STEPS_PER_CHOICE = 4
# Drafts that promise less, as a part of one session's tokens, are not made: so much is within the
# error of what is known of costs.
_LEAST_GAIN = 0.05
_MOST_FLOOR = 0.9


@dataclass(frozen=True, slots=True)
class Wish:
    """One decoding session: `source` would draft up to `max_tokens` tokens for it, possibly 0."""

    session_id: int
    source: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Depth:
    """Draft `num_tokens`, fewer once the chain's own probability has fallen below `floor`."""

    num_tokens: int
    floor: float


_NO_DRAFTS = Depth(0, 0.0)


class DepthController:
    """Chooses the depths that bring the most tokens in a millisecond, 0 included.

    A session's state belongs to its source of drafts too; what is new about either starts from
    what all sessions have shown. `costs` stay as they were given: steps are timed beside them.
    """

    def __init__(self, costs: StepCosts, *, max_tokens: int) -> None:
        self.costs = costs
        self._max_tokens = max_tokens
        self._times = StepTimes(costs)
        self._priors = {
            source: [cost.first_guess] * max_tokens for source, cost in costs.drafts.items()
        }
        self._tracks: dict[int, dict[str, _Track]] = {}
        self._num_steps = self._chosen_at = self._good_until = 0
        self._wishes: Sequence[Wish] = ()
        self._depths: list[Depth] = []
        self._saved_ms = self._times.pass_ms(1)

    def choose(self, wishes: Sequence[Wish]) -> list[Depth]:
        """A depth for each session that decodes in this step, chosen for all of them together.

        Sessions without drafts belong here too (`max_tokens` 0): their rows are part of the pass.
        At most one of the sessions is probed: drafted for deeper than seems to pay, to learn.
        """
        self._num_steps += 1
        if self._num_steps < self._good_until and wishes == self._wishes:
            return self._depths
        chains = [self._chain(wish) for wish in wishes]
        if not any(chain.cap for chain in chains):
            return [_NO_DRAFTS] * len(chains)
        plan = self._plan(chains)
        step_ms = self._times.pass_ms(len(chains))
        saved_ms = _PROBE_SHARE * step_ms * (self._num_steps - self._chosen_at)
        self._saved_ms = min(self._saved_ms + saved_ms, _MOST_SAVED_STEPS * step_ms)
        depths = self._with_floors(chains, plan)
        probed = self._probe(chains, plan, depths)
        self._wishes, self._depths, self._chosen_at = wishes, depths, self._num_steps
        self._good_until = self._num_steps + (1 if probed else _STEPS_PER_CHOICE)
        return depths

    def record(self, session_id: int, source: str, *, num_drafts: int, num_accepted: int) -> None:
        """A pass has verified `num_drafts` (at least 1) of a session and kept `num_accepted`."""
        if source not in self._times.drafts:
            return
        track = self._track(session_id, source)
        if track.probe_depth:
            self._saved_ms += track.end_probe(num_accepted, self._num_steps)
        track.learn(self._priors[source], num_drafts, num_accepted)

    def observe_pass(self, *, num_rows: int, time_ms: float) -> None:
        """A pass of decodes and drafts alone (no prefill) took so long, with all that it entails.

        What a step does besides drafting belongs to it: choosing tokens, bookkeeping.
        """
        self._times.observe_pass(num_rows, time_ms)

    def observe_drafts(
        self, source: str, *, num_steps: int, num_sessions: int, time_ms: float
    ) -> None:
        """A proposal took so long; `num_steps` is its longest chain, 0 where none was made."""
        self._times.observe_drafts(
            source, num_steps=num_steps, num_sessions=num_sessions, time_ms=time_ms
        )

    def close(self, session_id: int) -> None:
        """The session ended; what it showed stays in what is known of its sources."""
        self._tracks.pop(session_id, None)

    def _track(self, session_id: int, source: str) -> _Track:
        by_source = self._tracks.get(session_id)
        if by_source is None:
            by_source = self._tracks[session_id] = {}
        track = by_source.get(source)
        if track is None:
            track = by_source[source] = _Track(self._priors[source], self._num_steps)
        return track

    def _chain(self, wish: Wish) -> _Chain:
        cap = min(wish.max_tokens, self._max_tokens)
        if cap <= 0 or wish.source not in self._times.drafts:
            return _NO_CHAIN
        track = self._track(wish.session_id, wish.source)
        return _Chain(wish.source, cap, track)

    def _plan(self, chains: Sequence[_Chain]) -> _Plan:
        """The best set of drafts: a prefix of all of them in order of what they bring for a ms.

        Within a chain no draft is likelier to be kept than the one before it, so any prefix is a
        valid choice, and all prefixes are looked at, from none to everything.
        """
        times, num_sessions = self._times, len(chains)
        row_ms = times.pass_ms(num_sessions + 1) - times.pass_ms(num_sessions)
        order: list[tuple[float, int, int]] = []
        for index, chain in enumerate(chains):
            if chain.cap:
                # A row and a step may be free; the sort puts the best first.
                weight = -1 / (row_ms + times.drafts[chain.source].step_ms + 1e-6)
                reach = chain.track.reach
                order += [(weight * reach[d], index, d) for d in range(chain.cap)]
        order.sort()
        off_rate = rate = num_sessions / times.pass_ms(num_sessions)
        tokens, draft_ms, best = float(num_sessions), 0.0, 0
        deepest: dict[str, int] = {}
        pass_ms = times.up_to(num_sessions + len(order))
        for count, (_, index, depth) in enumerate(order, 1):
            source = chains[index].source
            tokens += chains[index].track.reach[depth]
            used = deepest.get(source, 0)
            draft_ms += further_draft_ms(times.drafts[source], depth + 1, used)
            if depth >= used:
                deepest[source] = depth + 1
            new_rate = tokens / (pass_ms[num_sessions + count] + draft_ms)
            if new_rate > rate:
                rate, best = new_rate, count
        if rate < (1 + _LEAST_GAIN / num_sessions) * off_rate:
            rate, best = off_rate, 0
        depths = [0] * num_sessions
        for _, index, depth in order[:best]:
            depths[index] = depth + 1
        return _Plan(depths, rate, num_sessions + best)

    def _with_floors(self, chains: Sequence[_Chain], plan: _Plan) -> list[Depth]:
        if plan.num_rows == len(chains):
            return [_NO_DRAFTS] * len(chains)
        row_ms = self._times.pass_ms(plan.num_rows) - self._times.pass_ms(plan.num_rows - 1)
        drafting = [c.source for c, depth in zip(chains, plan.depths, strict=True) if depth]
        worths: dict[str, float] = {}  # tokens that the time of one more draft brings elsewhere
        for source in set(drafting):
            cost, sharers = self._times.drafts[source], drafting.count(source)
            draft_ms = (cost.step_ms + (sharers - 1) * cost.row_ms) / sharers
            worths[source] = (row_ms + draft_ms) * plan.rate
        return [
            Depth(self._settled_depth(chain, depth), _floor(worths[chain.source], chain.track))
            if depth
            else _NO_DRAFTS
            for chain, depth in zip(chains, plan.depths, strict=True)
        ]

    def _settled_depth(self, chain: _Chain, depth: int) -> int:
        """A chain that ends where it has become unlikely goes as deep as it likes until then.

        How deep pays differs more from place to place in a text than between texts.
        """
        return chain.cap if self._times.drafts[chain.source].ends_early else depth

    def _probe(self, chains: Sequence[_Chain], plan: _Plan, depths: list[Depth]) -> bool:
        """Deepens one of the depths if its probe is due and paid for; it has no floor then.

        Whether one of them was.
        """
        probed, num_sessions = False, len(chains)
        # What one of the sessions may lose in a step, all of them together `_USUAL_SHARE` of it.
        usual_ms = _USUAL_SHARE * self._times.pass_ms(num_sessions) / num_sessions
        # Turns change from step to step: one that always succeeds leaves some to the others.
        for turn in range(num_sessions):
            index = (self._num_steps + turn) % num_sessions
            chain = chains[index]
            if not chain.cap:
                continue
            track, settled = chain.track, plan.depths[index]
            self._saved_ms += track.settle(settled, self._num_steps)
            if probed or track.next_probe > self._num_steps:
                continue
            depth = settled + 1 if settled or track.reach[0] < _SURE else 2
            ends_early = self._times.drafts[chain.source].ends_early
            if depth > chain.cap or (settled and ends_early):
                continue
            loss_ms = self._loss_ms(chains, plan, index, depth)
            if loss_ms <= self._saved_ms:
                self._saved_ms -= loss_ms
                track.start_probe(depth, loss_ms, 1 / plan.rate, rest=int(loss_ms / usual_ms))
                depths[index] = Depth(depth, 0.0)
                probed = True
        return probed

    def _loss_ms(self, chains: Sequence[_Chain], plan: _Plan, index: int, depth: int) -> float:
        """What a probe is expected to lose: its time, less that of the tokens it may bring."""
        chain, settled = chains[index], plan.depths[index]
        used = max(d for c, d in zip(chains, plan.depths, strict=True) if c.source == chain.source)
        times, num_rows = self._times, plan.num_rows
        time_ms = times.pass_ms(num_rows + depth - settled) - times.pass_ms(num_rows)
        for d in range(settled + 1, depth + 1):
            time_ms += further_draft_ms(self._times.drafts[chain.source], d, used)
            used = max(used, d)
        tokens = sum(chain.track.reach[settled:depth])
        return max(time_ms - tokens / plan.rate, 0.0)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Depths by session, the tokens per ms that they bring, the rows of their pass."""

    depths: list[int]
    rate: float
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Chain:
    """What one wish comes to: at most `cap` drafts, 0 where nobody could draft."""

    source: str
    cap: int
    track: _Track


class _Track:
    """How the drafts of one source fared in one session, and when to probe there again.

    `reach[d]` is the chance that draft d (0-based) and all before it are accepted. Places of the
    chain that were not drafted, or lie behind a rejected draft, show nothing.
    """

    __slots__ = (
        "_hits",
        "_last_accepted",
        "_ms_per_token",
        "_probe_loss_ms",
        "_rest",
        "_run_chance",
        "_tries",
        "_wait",
        "next_probe",
        "probe_depth",
        "reach",
        "settled",
    )

    def __init__(self, prior: Sequence[float], step: int) -> None:
        self._hits = [0.0] * len(prior)
        self._tries = [0.0] * len(prior)
        self._last_accepted, self._run_chance = True, 1.0
        self.settled = 0
        self._wait = self._rest = _FIRST_WAIT
        self.next_probe = step + _FIRST_WAIT
        self.probe_depth = 0
        self._probe_loss_ms = self._ms_per_token = 0.0
        self.reach = self._reach(prior)

    def learn(self, prior: list[float], num_drafts: int, num_accepted: int) -> None:
        """One round; `prior`, what all sessions show of this source, moves a little too."""
        keep = self._keep(num_accepted > 0)
        self._hits = [value * keep for value in self._hits]
        self._tries = [value * keep for value in self._tries]
        for place in range(min(num_drafts, num_accepted + 1, len(prior))):
            accepted = 1.0 if place < num_accepted else 0.0
            self._tries[place] += 1.0
            self._hits[place] += accepted
            prior[place] += (accepted - prior[place]) * _PRIOR_RATE
        self.reach = self._reach(prior)

    def _keep(self, first_accepted: bool) -> float:
        """The share of the evidence that stays: less after a run of equal outcomes unlike it."""
        chance = self.reach[0] if self.reach else 0.0
        chance = chance if first_accepted else 1.0 - chance
        run_chance = self._run_chance if first_accepted == self._last_accepted else 1.0
        self._last_accepted = first_accepted
        self._run_chance = min(run_chance * chance / _LIKELY, 1.0)
        if self._run_chance > _STRANGE:
            return _KEEP
        self._run_chance = 1.0
        return _KEEP_IF_STRANGE

    def _reach(self, prior: Sequence[float]) -> list[float]:
        reach: list[float] = []
        product, carried = 1.0, 0.0
        for hits, tries, usual in zip(self._hits, self._tries, prior, strict=True):
            mean = min(max(usual + carried, 0.0), 1.0)
            chance = (hits + _PRIOR_ROUNDS * mean) / (tries + _PRIOR_ROUNDS)
            carried = _CARRY * (chance - usual)
            product *= min(chance, 1.0)
            reach.append(product)
        return reach

    def settle(self, depth: int, step: int) -> float:
        """The depth that pays now; returns the ms to give back for a probe that was not drafted."""
        unused_ms = 0.0
        if self.probe_depth:
            unused_ms, self.probe_depth = self._probe_loss_ms, 0
            self.next_probe = step + _UNANSWERED_WAIT
        if depth != self.settled:
            self.settled, self._wait = depth, _FIRST_WAIT
            self.next_probe = min(self.next_probe, step + _FIRST_WAIT)
        return unused_ms

    def start_probe(self, depth: int, loss_ms: float, ms_per_token: float, *, rest: int) -> None:
        """The next round is a probe; `ms_per_token` is what an accepted token is worth.

        The cheaper a probe, the sooner the next: `rest` steps after it are enough.
        """
        self._rest = max(rest, _FIRST_WAIT)
        self.probe_depth = depth
        self._probe_loss_ms = loss_ms
        self._ms_per_token = ms_per_token

    def end_probe(self, num_accepted: int, step: int) -> float:
        """After success at once again, so that evidence gathers; after failure twice as late.

        Returns the ms that it won back: by what it brought beyond what was expected of it.
        """
        settled = self.settled
        won = max(min(num_accepted, self.probe_depth) - settled, 0)
        expected = sum(self.reach[settled : self.probe_depth])
        self.probe_depth = 0
        if won:
            self._wait = _FIRST_WAIT
            self.next_probe = step + 1
        else:
            if num_accepted == settled:
                self._wait = min(2 * self._wait, _LAST_WAIT)
            self.next_probe = step + min(self._wait, self._rest)
        return (won - expected) * self._ms_per_token


def _floor(worth: float, track: _Track) -> float:
    """How likely a chain must be so far: the next draft still has to be accepted too."""
    return min(worth / max(track.reach[0], worth), _MOST_FLOOR)


_NO_CHAIN = _Chain("", 0, _Track([], 0))
