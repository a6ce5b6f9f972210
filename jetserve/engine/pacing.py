"""How much a step does: prompt tokens to prefill, tokens to decode in one dispatch. Host side; imports no jax."""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """What there is to do.

    Attributes:
      running: rows that decode; 0 for none.
      generate_rows: compiled size that covers them; 0 for none.
      generate_context: positions attended to by one token of each of them.
      fewest_left: tokens until the first of them must end.
      prompt_tokens: that could be prefilled now: of prompts under way, and of those that would get a slot.
      prefill_context: positions that the first of these tokens attends to.
      slack_seconds: until the most urgent of these prompts misses its first-token target or deadline; infinite without.
    """

    running: int
    generate_rows: int
    generate_context: int
    fewest_left: int
    prompt_tokens: int
    prefill_context: int
    slack_seconds: float


class Pace(NamedTuple):
    """What the next step does.

    Attributes:
      prefill_tokens: at most so many prompt tokens; at least 1 whenever `Load.prompt_tokens` is.
      generate_steps: one of the compiled sizes.
    """

    prefill_tokens: int
    generate_steps: int
