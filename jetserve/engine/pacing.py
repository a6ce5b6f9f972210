"""How much a step does: prompt tokens to prefill, tokens to decode in one dispatch. Host side; imports no jax.

Running streams want short steps, prompts that wait want large ones. The rules, in this order:

1. Prompts always progress: a step takes at least what the smallest prefill program holds.
2. With a `tpot_target` and rows that decode, a step takes no more prompt tokens than keep it, as predicted, within the
   target. Without, or without rows, it takes up to `Sizing.prefill_tokens`.
3. More than that only where it saves a first token: when at the pace of rule 2 the most urgent prompt would be late and
   at full pace it would not, the step takes the least amount that still is in time. A first token that is lost at any
   pace slows no stream down.
4. Programs come in few sizes, and what they are not filled with is wasted. Of the covering program now, and the largest
   program that the tokens fill with the rest in later steps, the one that costs less in all is taken, by the predicted
   times. With rows running, later steps come anyway and cost no more than what prefill adds to them. Splitting never
   makes a first token late that covering would not.
5. `generate` decodes several tokens per dispatch only while no prompt could be prefilled, and never more than the row
   with the fewest tokens left. Its tokens arrive together, so a block takes at most `tpot_target`, lest the gap before
   it be longer; and at most a quarter of `ttft_target`, because a prompt that arrives waits for the block that runs and
   the one that was dispatched behind it. The smallest block is always allowed.

Longest gap between two tokens of a running stream, for S(p, n) seconds of a step that prefills p tokens beside n
decoded ones per row:

    S(prefill_tokens, n_min)                           without tpot_target, and while rule 3 applies
    max(tpot_target, S(least, n_min), S(0, n_min))     with tpot_target; least is the smallest program's tokens
    S(0, n)                                            while no prompts are there, n as in rule 5

plus what the host needs when it is slower than the device: results are read one step late, but in the order and at the
pace of the device, so lateness delays all tokens and adds to no gap.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple, Self

from jetserve.config import SchedulerSettings
from jetserve.engine.cost import LinearCost, StepCost, nominal_times
from jetserve.engine.plan import StepShape
from jetserve.engine.sizing import Sizing

_BLOCK_SHARE = 0.25  # of ttft_target, that a block of several tokens may take


class Load(NamedTuple):
    """What there is to do.

    Attributes:
      running: rows that decode; 0 for none.
      generate_rows: compiled size that covers them; 0 for none.
      generate_context, generate_longest: positions attended to by one token of each of them, and of the one with most.
      fewest_left: tokens until the first of them must end.
      prompt_tokens: that could be prefilled now: of prompts under way, and of those that would get a slot.
      prefill_context: positions that the first of these tokens attends to.
      slack_seconds: until the most urgent of these prompts misses its first-token target or deadline; infinite without.
      urgent_tokens: of `prompt_tokens` up to the last one of the most urgent prompt; 0 for all of them.
    """

    running: int
    generate_rows: int
    generate_context: int
    fewest_left: int
    prompt_tokens: int
    prefill_context: int
    slack_seconds: float
    urgent_tokens: int = 0
    generate_longest: int = 0


class Pace(NamedTuple):
    """What the next step does.

    Attributes:
      prefill_tokens: at most so many prompt tokens; at least 1 whenever `Load.prompt_tokens` is.
      generate_steps: one of the compiled sizes.
    """

    prefill_tokens: int
    generate_steps: int


class Pacer:
    """Decides by predicted step times. Changes nothing.

    Attributes:
      cost: read here, taught by who measures steps.
    """

    def __init__(
        self,
        sizing: Sizing,
        *,
        cost: StepCost,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
    ) -> None:
        self.cost = cost
        self.ttft_target_seconds = ttft_target_seconds
        self.tpot_target_seconds = tpot_target_seconds
        self._sizes = sizing.prefill_sizes
        self._most = min(sizing.prefill_tokens, self._sizes[-1])
        self._steps = sizing.generate_steps

    @classmethod
    def of(cls, sizing: Sizing, settings: SchedulerSettings, cost: StepCost | None = None) -> Self:
        """Takes the targets from the settings. Without a cost it is learnt from nothing."""
        return cls(
            sizing,
            cost=cost or LinearCost(nominal_times(sizing)),
            ttft_target_seconds=_seconds(settings.ttft_target_ms),
            tpot_target_seconds=_seconds(settings.tpot_target_ms),
        )

    def pace(self, load: Load) -> Pace:
        """What the next step does."""
        if not load.prompt_tokens:
            return Pace(0, self._generate_steps(load))
        most = self._most
        if load.running and self.tpot_target_seconds is not None:
            most = self._hurried(load, self._within(load, min(most, load.prompt_tokens), self.tpot_target_seconds))
        return Pace(self._packed(load, most), self._steps[0])

    def first_token_seconds(self, load: Load, tokens_ahead: int, own_tokens: int) -> float:
        """Predicts when a prompt that arrives now has its first token.

        It is taken to arrive in the middle of a step, to get a slot when its turn comes, and to follow the pace that
        `tpot_target` allows. Where slots or pages are short it is the least it can be.

        Args:
          tokens_ahead: to be prefilled before its own.
          own_tokens: that are not cached.
        """
        pace = self._usual(load)
        tokens = tokens_ahead + own_tokens
        positions = tokens_ahead * (load.prefill_context + pace / 2) + own_tokens * own_tokens / 2
        return self._chunk_seconds(load, 0, 0.0) / 2 + self._total_seconds(load, tokens, pace, positions)

    def drain_seconds(self, load: Load, waiting_tokens: int) -> float:
        """Predicts when so many prompt tokens that wait now have been prefilled, given slots and pages for them."""
        pace = self._usual(load)
        positions = waiting_tokens * (load.prefill_context + pace / 2)
        return self._total_seconds(load, waiting_tokens, pace, positions)

    def _generate_steps(self, load: Load) -> int:
        sizes = self._steps
        if len(sizes) == 1 or not load.running:
            return sizes[0]
        limit = math.inf if self.tpot_target_seconds is None else self.tpot_target_seconds
        if self.ttft_target_seconds is not None:
            limit = min(limit, self.ttft_target_seconds * _BLOCK_SHARE)
        for steps in reversed(sizes[1 : bisect.bisect_right(sizes, load.fewest_left)]):
            if limit == math.inf or self._block_seconds(load, steps) <= limit:
                return steps
        return sizes[0]

    def _usual(self, load: Load) -> int:
        """Prompt tokens of a step while there are plenty."""
        if not load.running or self.tpot_target_seconds is None:
            return self._most
        return self._within(load, self._most, self.tpot_target_seconds)

    def _within(self, load: Load, tokens: int, seconds: float) -> int:
        """Most of the tokens that a step prefills in so many seconds; the smallest program's when not even they fit."""
        low = 0
        found = min(self._sizes[0], tokens)
        for size in self._sizes:
            high = min(size, tokens)
            if self._first_seconds(load, high) <= seconds:
                found = high
            elif high > low + 1 and self._first_seconds(load, low + 1) <= seconds:
                # In one program only the positions attended to grow, so the seconds rise with the tokens.
                fits = range(low + 1, high)
                found = low + bisect.bisect_right(fits, seconds, key=lambda count: self._first_seconds(load, count))
            if high == tokens:
                break
            low = size
        return max(found, min(self._sizes[0], tokens))

    def _hurried(self, load: Load, pace: int) -> int:
        """Raises a pace as far as a first token needs it that still can be in time."""
        tokens = load.urgent_tokens or load.prompt_tokens
        slack = load.slack_seconds - self._chunk_seconds(load, 0, 0.0)  # what was dispatched runs first
        if slack == math.inf or tokens <= pace:
            return pace
        positions = tokens * load.prefill_context + tokens * tokens / 2
        if self._total_seconds(load, tokens, pace, positions) <= slack:
            return pace
        for most in (*(size for size in self._sizes if pace < size < self._most), self._most):
            if self._total_seconds(load, tokens, most, positions) <= slack:
                return most
        return pace

    def _packed(self, load: Load, most: int) -> int:
        """How many tokens to prefill, of at most `most`, so that little time goes into padding."""
        tokens = min(load.prompt_tokens, most)
        filled = self._filled(tokens)
        if filled in (0, tokens):
            return tokens
        base = self._chunk_seconds(load, 0, 0.0)
        if load.prompt_tokens > most:  # so it will be in the next steps, and the rate is what counts
            whole, part = self._first_seconds(load, tokens) - base, self._first_seconds(load, filled) - base
            return filled if part * tokens < whole * filled else tokens
        split = self._split(load, 0, tokens, base)
        if split.first < tokens:
            whole_end = base + self._first_seconds(load, tokens)  # what was dispatched runs first
            if whole_end <= load.slack_seconds < base + split.seconds + split.steps * base:
                return tokens
        return split.first

    def _split(self, load: Load, done: int, tokens: int, base: float) -> _Split:
        """The cheapest way to prefill the tokens: at once, or as many as fill a program and the rest in later steps."""
        filled = self._filled(tokens)
        whole = self._chunk_seconds(load, tokens, _positions(load.prefill_context + done, tokens)) - base
        if filled in (0, tokens):
            return _Split(tokens, 1, whole)
        part = self._chunk_seconds(load, filled, _positions(load.prefill_context + done, filled)) - base
        if part >= whole:
            return _Split(tokens, 1, whole)
        rest = self._split(load, done + filled, tokens - filled, base)
        if part + rest.seconds >= whole:
            return _Split(tokens, 1, whole)
        return _Split(filled, 1 + rest.steps, part + rest.seconds)

    def _filled(self, tokens: int) -> int:
        """The largest program that so many tokens fill; 0 for none."""
        at = bisect.bisect_right(self._sizes, tokens)
        return self._sizes[at - 1] if at else 0

    def _total_seconds(self, load: Load, tokens: int, pace: int, positions: float) -> float:
        """Of the steps that prefill so many tokens, which attend to so many positions together, at a pace."""
        if not tokens:
            return 0.0
        steps, rest = divmod(tokens, pace)
        each = positions / tokens
        total = steps * self._chunk_seconds(load, pace, each * pace) if steps else 0.0
        return total + (self._chunk_seconds(load, rest, each * rest) if rest else 0.0)

    def _first_seconds(self, load: Load, tokens: int) -> float:
        """Of the next step if it prefills so many tokens."""
        return self._chunk_seconds(load, tokens, _positions(load.prefill_context, tokens))

    def _chunk_seconds(self, load: Load, tokens: int, positions: float) -> float:
        """Of a step that prefills so many tokens beside the fewest decoded ones; 0 when there is nothing to do."""
        if not tokens:
            return self._block_seconds(load, self._steps[0]) if load.running else 0.0
        size = self._sizes[bisect.bisect_left(self._sizes, tokens)]
        steps = self._steps[0] if load.running else 0
        return self.cost.seconds(_decoding(load, steps)._replace(prefill_size=size, prefill_context=int(positions)))

    def _block_seconds(self, load: Load, steps: int) -> float:
        return self.cost.seconds(_decoding(load, steps))


class _Split(NamedTuple):
    """Tokens of the first step, number of steps, and what prefilling adds to them all."""

    first: int
    steps: int
    seconds: float


def _positions(start: int, tokens: int) -> int:
    """That tokens from `start` on attend to, each to all before it and itself."""
    return tokens * start + tokens * (tokens + 1) // 2


def _decoding(load: Load, steps: int) -> StepShape:
    """A step that decodes so many tokens of each row, and prefills nothing."""
    grown = steps * (steps - 1) // 2  # each token attends to one position more than the one before
    context, longest = steps * load.generate_context + load.running * grown, steps * load.generate_longest + grown
    return StepShape(0, 0, load.generate_rows, steps, context, longest)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
