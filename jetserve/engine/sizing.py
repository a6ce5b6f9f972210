"""Every derived number of the engine, computed once. Host side; imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from jetserve.config import EngineSettings, SchedulerSettings
from jetserve.errors import ConfigError


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
      prefix_cache: pages stay in a prefix tree for others.
      host_blocks: pages that fit the host memory set aside for them.
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
    prefix_cache: bool = True
    host_blocks: int = 0

    @property
    def pages_per_slot(self) -> int:
        return -(-self.max_length // self.page_size)

    @property
    def usable_pages(self) -> int:
        return self.pages - 1

    @property
    def max_pool_tokens(self) -> int:
        return self.usable_pages * self.page_size


def resolve(
    engine: EngineSettings,
    scheduler: SchedulerSettings,
    *,
    platform: str,
    max_position: int,
    page_bytes_per_token: int,
    cache_bytes: int | None = None,
) -> Sizing:
    """Computes every size once.

    Args:
      platform: "tpu", "cpu" or "gpu"; decides the defaults.
      max_position: the model's own limit of positions.
      page_bytes_per_token: keys and values of one token in all layers, on all chips together.
      cache_bytes: what the memory budget leaves for the cache; None where `engine.kv_bytes` decides.
    Raises: ConfigError when sizes contradict each other.
    """
    on_tpu = platform == "tpu"
    max_length = engine.max_length or min(max_position, 8192 if on_tpu else 2048)
    if max_length > max_position:
        raise ConfigError(f"engine.max_length={max_length} exceeds the model's {max_position} positions; lower it")
    page_size = min(engine.page_size or (128 if on_tpu else 16), max_length)
    slots = engine.slots
    steps = tuple(sorted(set(engine.generate_steps)))
    if steps[-1] > page_size:
        raise ConfigError(
            f"engine.generate_steps={steps[-1]} exceeds engine.page_size={page_size}; a block may cross one page border"
        )
    per_slot = -(-max_length // page_size)
    wanted = slots * per_slot
    budget = (cache_bytes or engine.kv_bytes) // (page_bytes_per_token * page_size)
    usable = (engine.kv_pages - 1) if engine.kv_pages else min(wanted, budget)
    if engine.kv_pages == 1:
        raise ConfigError("engine.kv_pages=1 is the page for padding alone, no sequence would fit; set 2 or more")
    if usable < 1:
        raise ConfigError(
            f"the KV pool has no page: {cache_bytes or engine.kv_bytes} bytes, "
            f"{page_bytes_per_token * page_size} a page; raise engine.kv_bytes "
            f"or lower engine.page_size"
        )
    prefill_sizes = tuple(sorted(set(engine.prefill_sizes)))
    rows = {slots, *(engine.generate_rows or _default_rows(slots, on_tpu))}
    if max(rows) > slots:
        raise ConfigError(f"engine.generate_rows={max(rows)} exceeds engine.slots={slots}; drop it or raise the slots")
    return Sizing(
        slots=slots,
        max_length=max_length,
        page_size=page_size,
        pages=usable + 1,
        prefill_sizes=prefill_sizes,
        prefill_rows=engine.prefill_rows,
        prefill_tokens=min(scheduler.prefill_tokens or prefill_sizes[-1], prefill_sizes[-1]),
        generate_rows=tuple(sorted(rows)),
        generate_steps=steps,
        prefix_cache=engine.prefix_cache,
        host_blocks=_host_blocks(engine, page_bytes_per_token * page_size),
    )


def _host_blocks(engine: EngineSettings, page_bytes: int) -> int:
    if not engine.host_kv_bytes:
        return 0
    if not engine.prefix_cache:
        raise ConfigError(
            f"engine.host_kv_bytes={engine.host_kv_bytes} keeps pages of the prefix cache, and engine.prefix_cache is "
            f"off; turn it on or set engine.host_kv_bytes=0"
        )
    if engine.host_kv_bytes < page_bytes:
        raise ConfigError(
            f"engine.host_kv_bytes={engine.host_kv_bytes} holds no page, one is {page_bytes} bytes; raise it or set 0"
        )
    return engine.host_kv_bytes // page_bytes


def _default_rows(slots: int, on_tpu: bool) -> tuple[int, ...]:
    """A TPU step costs about the same for a few rows or many; on CPU it grows with the rows."""
    if on_tpu:
        return (slots,)
    return tuple(rows for rows in (2, 8, 32, 128, 512) if rows < slots)
