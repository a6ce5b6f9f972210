"""Every derived number of the engine, computed once. Host side; imports no jax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizing:
    """Shapes of the device programs and of the pool, all resolved.

    Attributes:
      slots: rows of the decode batch.
      max_length: tokens of one sequence, prompt and answer.
      page_size: tokens in a page.
      pages: in the pool, the trash page (id 0) included.
      prefill_sizes, generate_rows, generate_steps: compiled sizes, ascending; the largest generate_rows is `slots`.
      prefill_rows: most chunks in one plan.
      prefill_tokens: most prompt tokens in one plan.
    """

    slots: int
    max_length: int
    page_size: int
    pages: int
    prefill_sizes: tuple[int, ...]
    prefill_rows: int
    prefill_tokens: int
    generate_rows: tuple[int, ...]
    generate_steps: tuple[int, ...]

    @property
    def pages_per_slot(self) -> int:
        return -(-self.max_length // self.page_size)

    @property
    def usable_pages(self) -> int:
        return self.pages - 1

    @property
    def max_pool_tokens(self) -> int:
        return self.usable_pages * self.page_size
