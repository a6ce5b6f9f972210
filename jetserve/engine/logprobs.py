"""Log probabilities as they come from the device, made into what streams carry. Host side; imports no jax."""

from __future__ import annotations

import math

from jetserve.engine.plan import LogprobArrays
from jetserve.request import TokenLogprobs


def token_logprobs(arrays: LogprobArrays, at: int | tuple[int, int], token_id: int, top: int) -> TokenLogprobs:
    """The entry of one token.

    Args:
      at: index of the token on the leading axes of `arrays`.
      top: how many of the most likely tokens are wanted.
    """
    pairs = zip(arrays.top_ids[at][:top].tolist(), arrays.top[at][:top].tolist(), strict=True)
    # A vocabulary smaller than MAX_LOGPROBS leaves entries that are no tokens.
    return TokenLogprobs(token_id, float(arrays.chosen[at]), tuple(pair for pair in pairs if pair[1] > -math.inf))
