"""A model that counts, for servers without a device: as a module for tests, as a program for those that need a process.

python -m tests.server.numbers --step-seconds 0.01 --set server.grpc_port=0
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jetserve import config
from jetserve.config import SchedulerSettings
from jetserve.engine.engine import Engine, LoadedModel, ModelInfo
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.request import ModelLimits
from jetserve.tokenizer.pieces import Pieces

VOCAB_SIZE = 1000
BOS, EOS = 900, 999
SLOTS = 4
MAX_LENGTH = 256


@dataclass
class NumberTokenizer:
    """The text of id 7 is " 7"; "5 6" is 5, 6, and a word that is no number is its length."""

    pieces: Pieces = field(
        default_factory=lambda: Pieces([f" {i}".encode() for i in range(VOCAB_SIZE)], special=frozenset({BOS, EOS}))
    )
    vocab_size: int = VOCAB_SIZE
    bos_token_id: int | None = BOS
    eos_token_ids: tuple[int, ...] = (EOS,)
    chat_template: str | None = "{{ messages }}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [int(word) if word.isdecimal() else len(word) for word in text.split()]
        return [BOS, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in token_ids if not (skip_special_tokens and token in (BOS, EOS)))

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()


def sizing(slots: int = SLOTS, max_length: int = MAX_LENGTH) -> Sizing:
    page_size = 16
    return Sizing(
        slots=slots,
        max_length=max_length,
        page_size=page_size,
        pages=slots * (max_length // page_size) + 1,
        prefill_sizes=(32, 512),
        prefill_rows=8,
        prefill_tokens=512,
        generate_rows=(slots,),
        generate_steps=(1,),
    )


def loaded_model(
    executor_of: Callable[[Sizing], FakeExecutor], shapes: Sizing, settings: SchedulerSettings | None = None
) -> LoadedModel:
    limits = ModelLimits(VOCAB_SIZE, shapes.max_length, (EOS,), shapes.max_length - 1)
    info = ModelInfo("llama", 12345, "float32", VOCAB_SIZE, shapes.max_length, "fake x1")
    engine = Engine(Scheduler(shapes, settings), executor_of(shapes))
    return LoadedModel(engine, NumberTokenizer(), limits, "numbers", info)


def main() -> int:
    """Serves the numbers model until a signal."""
    from jetserve.server import serving

    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()

    def load(report: Callable[[str, float], None]) -> LoadedModel:
        report("counting to ten", 0.5)
        time.sleep(given.load_seconds)
        return loaded_model(
            lambda shapes: FakeExecutor(shapes, VOCAB_SIZE, step_seconds=given.step_seconds, fail_at=given.fail_at),
            sizing(),
            tree.scheduler,
        )

    settings = ["server.grpc_port=0", "server.http_port=0", *given.set]
    tree = config.load(None, settings)
    return serving.run(tree, load, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
