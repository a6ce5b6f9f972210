"""The offline Python API: a model in this process, prompts in, completions out. No server, no event loop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jetserve import config as configs
from jetserve.config import Config
from jetserve.engine.engine import LoadedModel
from jetserve.errors import ConfigError, InvalidRequest
from jetserve.orchestrator.intake import MIN_RETRY_SECONDS, hopeless
from jetserve.orchestrator.stream import Sample
from jetserve.request import FinishReason, Request, SamplingParams, TokenLogprobs, Usage

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `token_ids` holds the end token, `text` does not."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]
    usage: Usage
    stop_reason: str | int | None = None


class LLM:
    """A loaded model.

    Args:
      model: as `jetserve serve --model`: demo, demo-gemma, a folder or a .gguf file.
      dtype: of weights and matmuls; "auto" takes what the chip is good at.
      progress: show bars on stderr; by default when it is a terminal.
      overrides: settings by their own name (`slots=8`, `max_length=512`) or by path (`**{"engine.slots": 8}`).
    Raises: ConfigError, CheckpointError, TokenizerError, FetchError.

    Example: LLM("demo").generate(["Once upon a time"], SamplingParams(max_tokens=20))[0].text
    """

    def __init__(
        self, model: str = "demo", dtype: str = "auto", *, progress: bool | None = None, **overrides: object
    ) -> None:
        settings: dict[str, object] = {"model.name": model, "model.dtype": dtype}
        settings |= {configs.path_of(name): value for name, value in overrides.items()}
        self._start(configs.load(overrides=settings), progress)

    @classmethod
    def from_config(cls, config: Config, *, progress: bool | None = None) -> LLM:
        """A model as a whole configuration tree describes it; its server section is not read."""
        llm = cls.__new__(cls)
        llm._start(config, progress)
        return llm

    def _start(self, config: Config, progress: bool | None) -> None:
        self._shows_progress = sys.stderr.isatty() if progress is None else progress
        with self._bar() as bar:
            task = bar.add_task("loading", total=None)

            def report(what: str, fraction: float) -> None:
                bar.update(task, description=what, completed=int(100 * fraction), total=100)

            self.model: LoadedModel | None = _load(config, report)

    @property
    def loaded(self) -> LoadedModel:
        """The model; for its limits, its tokenizer and what it is."""
        if self.model is None:
            raise ConfigError("this LLM was closed; make a new one")
        return self.model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Completes all prompts, as many at once as there are slots.

        Args:
          prompts: texts or lists of token ids, or a single one.
          params: for all of them; None samples at temperature 1 to the end of the context.
          cache_salt: cached prefixes are shared only among calls with an equal one.
        Returns: completions in the order of the prompts, `params.n` behind one another for each.
        Raises: InvalidRequest naming the prompt; then none was run. Overloaded when `scheduler.shed_hopeless` gave a
          prompt up; then no answer is returned.
        """
        params = params or SamplingParams()
        requests = [self._request(index, prompt, params, cache_salt) for index, prompt in enumerate(_as_list(prompts))]
        model = self.loaded
        engine = model.engine
        samples = {
            (request.request_id, index): Sample(request, index, model.tokenizer)
            for request in requests
            for index in range(params.n)
        }
        with _interrupts_held() as interrupt:
            try:
                for request in requests:
                    engine.add(request)
                self._run(samples, interrupt)
            except BaseException:
                for request in requests:
                    engine.abort(request.request_id)
                raise
        return [
            _completion(request, samples[request.request_id, index])
            for request in requests
            for index in range(params.n)
        ]

    def flush_cache(self) -> int:
        """Forgets all cached prefixes. Returns how many pages that freed."""
        return self.loaded.engine.flush()

    def close(self) -> None:
        """Lets go of weights and cache."""
        self.model = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, index: int, prompt: Prompt, params: SamplingParams, cache_salt: str | None) -> Request:
        model = self.loaded
        try:
            ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            request = Request.create(ids, params, model.limits, cache_salt=cache_salt)
            model.engine.require_fit(request)
        except InvalidRequest as error:
            raise InvalidRequest(f"prompt {index}: {error}") from None
        return request

    def _run(self, samples: dict[tuple[str, int], Sample], interrupt: Callable[[], None]) -> None:
        engine = self.loaded.engine
        with self._bar() as bar:
            task = bar.add_task("generating", total=len(samples))
            while engine.has_work:
                for update in engine.step(time.monotonic()):
                    sequence = update.sequence
                    if not update.token_ids:
                        if update.finish_reason is not None:
                            raise hopeless(sequence, engine.status().retry_after_seconds or MIN_RETRY_SECONDS)
                        continue
                    sample = samples[sequence.request.request_id, sequence.index]
                    if sample.arrive(update):
                        engine.abort(sequence.request.request_id, sequence.index)
                    if sample.finish_reason is not None:
                        bar.advance(task)
                interrupt()

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not self._shows_progress,
        )


def _load(config: Config, report: Callable[[str, float], None]) -> LoadedModel:
    from jetserve.engine import loading  # brings jax, which the rest of this module does not need

    return loading.load(config, report)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the yielded function is called, or the end: a step must not be cut in two.

    A device program that was dispatched has taken its arguments' memory, so an engine that never hears of its result is
    lost. A second Ctrl-C is not held back: whoever has waited long enough may lose the engine.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def hold(_number: int, frame: FrameType | None) -> None:
        held.append(frame)
        if len(held) > 1:
            deliver()

    def deliver() -> None:
        if held:
            frame = held.pop()
            held.clear()
            before(signal.SIGINT, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, before)
    deliver()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # a flat sequence of ids is one prompt
    return prompts  # type: ignore[return-value]


def _completion(request: Request, sample: Sample) -> Completion:
    delta = sample.take()
    assert delta.finish_reason is not None
    assert delta.usage is not None
    return Completion(
        text=delta.text,
        token_ids=delta.token_ids,
        prompt_token_ids=request.prompt_token_ids,
        finish_reason=delta.finish_reason,
        logprobs=delta.logprobs,
        usage=delta.usage,
        stop_reason=delta.stop_reason,
    )
