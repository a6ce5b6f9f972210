"""What is measured: named workloads, shared by the benches. Fixed lengths, greedy, no early end."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ID = 3  # below it vocabularies keep special tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one shape, in a closed loop: each client sends its next request when the last one ended.

    Attributes:
      seed: of the random prompt ids; no two prompts share a prefix.
      concurrency: clients.
      rounds: requests of each client.
      step_seconds: what each step of the fake device takes, for the benches that have one.
    """

    name: str
    seed: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    rounds: int
    step_seconds: float = 0.0

    @property
    def requests(self) -> int:
        return self.concurrency * self.rounds

    @property
    def shape(self) -> str:
        pace = f", device step {self.step_seconds * 1e3:g} ms" if self.step_seconds else ""
        return (
            f"{self.requests} x ({self.prompt_tokens} + {self.output_tokens}) tokens, {self.concurrency} at once{pace}"
        )

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """One prompt for each request."""
        draw = random.Random(self.seed)
        return [[draw.randrange(FIRST_ID, vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


MODELS = ("demo", "demo-gemma")
# The shape that other engines were measured with on the same machine.
MODEL_WORKLOADS = (
    Workload("c1", seed=1, prompt_tokens=128, output_tokens=64, concurrency=1, rounds=4),
    Workload("c8", seed=8, prompt_tokens=128, output_tokens=64, concurrency=8, rounds=2),
    Workload("c32", seed=32, prompt_tokens=128, output_tokens=64, concurrency=32, rounds=2),
)
# As many clients as slots, so that every step is full. At zero cost the engine runs ahead of the streams, which then
# send many tokens in one message; the paced ones are about a message per token, as with a real device.
HOST_WORKLOADS = (
    Workload("slots64", seed=64, prompt_tokens=16, output_tokens=256, concurrency=64, rounds=4),
    Workload("slots256", seed=256, prompt_tokens=16, output_tokens=256, concurrency=256, rounds=2),
    Workload("slots64-5ms", 64, prompt_tokens=16, output_tokens=256, concurrency=64, rounds=4, step_seconds=0.005),
    Workload("slots256-10ms", 256, prompt_tokens=16, output_tokens=256, concurrency=256, rounds=2, step_seconds=0.01),
)
# (slots, prompt tokens): what a step costs must not grow with the context.
SCHEDULE_SHAPES = ((256, 128), (256, 4096), (2048, 128), (2048, 1024))


@dataclass(frozen=True, slots=True)
class SimulatedTrace:
    """Requests of a workload of `jetserve simulate`, for the bench that plays them in real time as well."""

    name: str
    workload: str
    requests: int
    seed: int = 0


SIMULATED_TRACES = (SimulatedTrace("sharegpt-40", "sharegpt", 40), SimulatedTrace("multi-turn-40", "multi-turn", 40))
QUICK_TRACE = SimulatedTrace("quick-trace", "multi-turn", 12)
QUICK = Workload("quick", seed=0, prompt_tokens=16, output_tokens=8, concurrency=2, rounds=1)
