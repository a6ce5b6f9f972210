"""An engine whose device costs nothing, with a real vocabulary: what is left is our own host code. Imports no jax."""

from __future__ import annotations

import tempfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jetserve.engine.engine import Engine, LoadedModel, ModelInfo
from jetserve.engine.fake import FreeExecutor
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.request import ModelLimits
from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.loading import load_tokenizer
from tests.links import ROOT

MAX_LENGTH = 512
PAGE_SIZE = 16
VOCAB_SIZE = 4096


def fake_model(slots: int, step_seconds: float = 0.0) -> LoadedModel:
    """A model of `slots` rows whose executor answers at once, or after `step_seconds`."""
    tokenizer = byte_pair_tokenizer()
    pages = slots * (MAX_LENGTH // PAGE_SIZE) + 1
    sizing = Sizing(
        slots=slots,
        max_length=MAX_LENGTH,
        page_size=PAGE_SIZE,
        pages=pages,
        prefill_sizes=(512,),
        prefill_rows=32,
        prefill_tokens=512,
        generate_rows=(slots,),
        generate_steps=(1,),
    )
    executor = FreeExecutor(sizing, tokenizer.vocab_size, step_seconds=step_seconds)
    limits = ModelLimits(tokenizer.vocab_size, MAX_LENGTH, (), MAX_LENGTH - 1)
    info = ModelInfo("fake", 0, "float32", tokenizer.vocab_size, MAX_LENGTH, "none")
    return LoadedModel(Engine(Scheduler(sizing), executor), tokenizer, limits, "fake", info)


def byte_pair_tokenizer() -> Tokenizer:
    """The vocabulary of `write_tokenizer`, loaded as any other."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return load_tokenizer(Path(folder))


def write_tokenizer(folder: Path) -> None:
    """Trains a byte-level BPE vocabulary on our own sources: a tenth of a second, and no download."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, show_progress=False, initial_alphabet=alphabet)
    trained.train([str(file) for file in sorted((ROOT / "jetserve").rglob("*.py"))], trainer)
    trained.save(str(folder / "tokenizer.json"))
