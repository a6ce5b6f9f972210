"""From a configuration to a model that can serve: weights, cache, compiled programs, warm-up."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, Sharding
from numpy.typing import NDArray

from jetserve.config import Config
from jetserve.engine import programs, sampling, sizing, state, steps
from jetserve.engine.compilations import COUNTER
from jetserve.engine.cost import LinearCost, ModelWork, StepTimes, prior_times
from jetserve.engine.engine import Engine, Footprint, LoadedModel, ModelInfo
from jetserve.engine.executor import DeviceExecutor
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.errors import ConfigError
from jetserve.kernels.attention import ScoreRule
from jetserve.kernels.attention_xla import XLA
from jetserve.kernels.sharded import over_heads
from jetserve.models import checkpoint as checkpoints
from jetserve.models import demo, hugging_face, random_init
from jetserve.models.spec import ModelConfig, ParamSpec
from jetserve.models.transformer import Weights, param_specs
from jetserve.request import ModelLimits
from jetserve.sharding import budget, chips
from jetserve.sharding.mesh import make_mesh
from jetserve.sharding.rules import HeadCounts, padded_vocab, place, replicated
from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.loading import load_tokenizer

log = logging.getLogger(__name__)

Report = Callable[[str, float], None]
Leaf = TypeVar("Leaf")

_PROBE_TOKENS = 1024  # of the cache that programs are measured with


def load(config: Config, report: Report = lambda _what, _fraction: None) -> LoadedModel:
    """Makes the configured model ready to serve; takes as long as reading weights and compiling takes.

    Args:
      report: called with (what is being done, fraction of it done).
    Raises: ConfigError, CheckpointError, TokenizerError, FetchError.
    """
    use_compilation_cache(config.engine.compilation_cache)
    source = _open(config, report)
    report("reading the vocabulary", 0.0)
    tokenizer = load_tokenizer(
        Path(config.model.tokenizer).expanduser() if config.model.tokenizer else source.tokenizer
    )
    mesh = make_mesh(config.mesh.tensor)
    form = _Form.of(config, source.config, mesh)
    _sizes(config, form.footprint())  # settings that contradict each other are refused before weights are read
    weights = source.weights(form, report)
    vocab_limit = min(source.config.vocab_size, tokenizer.vocab_size)
    footprint = _footprint(config, form, weights, vocab_limit, report)
    sizes = _sizes(config, footprint)
    engine = _build(config, form, weights, sizes, vocab_limit, report)
    limits = _limits(source.config, tokenizer, sizes, vocab_limit)
    return LoadedModel(
        engine=engine,
        tokenizer=tokenizer,
        limits=limits,
        name=_served_name(config, source.config),
        info=ModelInfo(
            family=source.config.family.value,
            parameters=sum(leaf.size for leaf in jax.tree.leaves(weights)),
            dtype=form.dtype.name,
            vocab_size=source.config.vocab_size,
            max_length=limits.max_length,
            devices=chips.describe(list(mesh.devices.flat)),
        ),
        footprint=footprint,
    )


def build_engine(
    config: Config,
    model: ModelConfig,
    weights: Weights[Array],
    vocab_limit: int | None = None,
    report: Report = lambda _what, _fraction: None,
) -> Engine:
    """Builds an engine of weights at hand: no files are read, and `config.model.name` is not looked at.

    Args:
      weights: whole, in the model's own shapes; they keep their form, unrolled or stacked.
      vocab_limit: ids from here on are never sampled; the model's vocabulary when not set.
    Raises: ConfigError.
    """
    use_compilation_cache(config.engine.compilation_cache)
    form = _Form.of(config, model, make_mesh(config.mesh.tensor))
    placed = form.put_all(weights)
    limit = model.vocab_size if vocab_limit is None else vocab_limit
    sizes = _sizes(config, _footprint(config, form, placed, limit, report))
    return _build(config, form, placed, sizes, limit, report)


def use_compilation_cache(folder: str | None) -> None:
    """Keeps compiled programs in a folder, so that the next start reads them. "auto" is in the user's cache folder.

    Raises: ConfigError when the folder cannot be written (R04).
    """
    if folder is None:
        _set_compilation_cache(None)
        return
    path = Path.home() / ".cache" / "jetserve" / "compiled" if folder == "auto" else Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        if folder != "auto":
            raise ConfigError(
                f"engine.compilation_cache={folder!r} cannot be written ({error.strerror}); name another folder or null"
            ) from error
        log.warning("no persistent compilation cache: %s cannot be written (%s)", path, error.strerror)
        _set_compilation_cache(None)
        return
    _set_compilation_cache(str(path))


def _set_compilation_cache(folder: str | None) -> None:
    if folder != jax.config.values["jax_compilation_cache_dir"]:
        # jax settles at its first compilation whether and where it caches, which may be behind us.
        compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _Form(NamedTuple):
    """How a model is held on its chips."""

    config: ModelConfig
    mesh: Mesh
    heads: HeadCounts
    dtype: np.dtype[np.generic]
    platform: str

    @property
    def is_stacked(self) -> bool:
        """XLA:CPU has no fast bfloat16 matmul on weights sliced out of a stack; elsewhere a stack compiles faster."""
        return self.platform != "cpu"

    @property
    def cache_dtype(self) -> np.dtype[np.generic]:
        """XLA:CPU updates a bfloat16 cache by converting all of it."""
        return np.dtype(jnp.float32) if self.platform == "cpu" else self.dtype

    @property
    def cache_bytes_per_token(self) -> int:
        c = self.config
        return c.num_layers * self.heads.loaded_kv_heads * 2 * c.head_dim * self.cache_dtype.itemsize

    @property
    def vocab_size(self) -> int:
        """Of the logits, padding included."""
        return padded_vocab(self.config.vocab_size, self.mesh)

    def cache(self, sizes: Sizing) -> jax.ShapeDtypeStruct:
        shape = programs.cache_shape(sizes, self.config.num_layers, self.heads.loaded_kv_heads, self.config.head_dim)
        return jax.ShapeDtypeStruct(shape, self.cache_dtype, sharding=programs.cache_sharding(self.mesh))

    def footprint(self, cache_bytes: int | None = None) -> Footprint:
        return Footprint(self.platform, self.config.max_position, self.cache_bytes_per_token, cache_bytes)

    @property
    def block_sharding(self) -> Sharding | None:
        """Of a page in host memory; on CPU that is where it is anyway."""
        return None if self.platform == "cpu" else programs.page_sharding(self.mesh).with_memory_kind("pinned_host")

    def put(self, _name: str, spec: ParamSpec, values: NDArray[np.generic]) -> Array:
        """`checkpoint.Place`"""
        return place(np.asarray(values, self.dtype), spec.axes, self.mesh, self.heads)

    def put_all(self, weights: Weights[Array]) -> Weights[Array]:
        """Places weights that are at hand as a whole, unrolled or stacked."""
        placed: Weights[Array] = jax.tree.map(
            lambda values, spec: self.put("", spec, np.asarray(values)),
            weights,
            param_specs(self.config, stacked=isinstance(weights.layers, dict)),
            is_leaf=lambda node: isinstance(node, ParamSpec),
        )
        return placed

    @staticmethod
    def of(config: Config, model: ModelConfig, mesh: Mesh) -> _Form:
        platform = mesh.devices.flat[0].platform
        name = config.model.dtype
        if name == "auto":
            name = "bfloat16" if chips.multiplies_bfloat16(platform) else "float32"
        heads = HeadCounts.on(mesh, heads=model.num_heads, kv_heads=model.num_kv_heads, head_dim=model.head_dim)
        return _Form(model, mesh, heads, np.dtype(getattr(jnp, name)), platform)


class _Checkpoint(NamedTuple):
    """Weights from files."""

    files: checkpoints.Checkpoint

    @property
    def config(self) -> ModelConfig:
        return self.files.config

    @property
    def tokenizer(self) -> Path:
        return self.files.tokenizer_source()

    def weights(self, form: _Form, report: Report) -> Weights[Array]:
        return checkpoints.load_weights(
            self.files,
            form.put,
            stacked=form.is_stacked,
            progress=lambda done, total: report("loading weights", done / total),
        )


class _RandomWeights(NamedTuple):
    """A Hugging Face folder of which only the configuration and the vocabulary are used."""

    folder: Path
    config: ModelConfig

    @property
    def tokenizer(self) -> Path:
        return self.folder

    def weights(self, form: _Form, report: Report) -> Weights[Array]:
        report("drawing random weights", 0.0)
        return form.put_all(random_init.random_weights(form.config, jnp.float32, 0, form.is_stacked))


def _open(config: Config, report: Report) -> _Checkpoint | _RandomWeights:
    name = config.model.name
    if not config.model.random_weights:
        return _Checkpoint(
            checkpoints.open_checkpoint(name, progress=lambda done, total: report(f"fetching {name}", done / total))
        )
    folder = Path(name).expanduser()
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"model.random_weights needs model.name to be a folder with a config.json, got {name!r} ({error.strerror})"
        ) from error
    return _RandomWeights(folder, hugging_face.read_config(json.loads(text)))


def _served_name(config: Config, model: ModelConfig) -> str:
    name = config.model.name
    return config.model.served_name or (name if name in demo.DEMO_MODELS else model.name or Path(name).stem)


def _limits(model: ModelConfig, tokenizer: Tokenizer, sizes: Sizing, vocab_limit: int) -> ModelLimits:
    max_length = min(sizes.max_length, sizes.max_pool_tokens)  # a small pool holds no longer sequence
    return ModelLimits(
        vocab_size=vocab_limit,
        max_length=max_length,
        eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, *tokenizer.eos_token_ids))),
        max_prompt_tokens=max_length - 1,
    )


def _require_host_memory(config: Config) -> None:
    memory_bytes, wanted = chips.host_memory_bytes(), config.engine.host_kv_bytes
    if memory_bytes is not None and wanted >= memory_bytes:
        raise ConfigError(
            f"engine.host_kv_bytes={wanted} does not fit the {memory_bytes} bytes of memory that this machine has; "
            f"lower it"
        )


def _sizes(config: Config, footprint: Footprint) -> Sizing:
    _require_host_memory(config)
    return sizing.resolve(config.engine, config.scheduler, **footprint._asdict())


def _footprint(config: Config, form: _Form, weights: Weights[Array], vocab_limit: int, report: Report) -> Footprint:
    limit = chips.memory_limit_bytes(form.mesh.devices.flat[0])
    if limit is None or config.engine.kv_pages is not None:
        return form.footprint()
    # Temporaries and code do not depend on how many pages there are: compile with few, and fill what is left.
    few = _sizes(config, form.footprint(form.cache_bytes_per_token * _PROBE_TOKENS))
    report("measuring memory", 0.0)
    memory = programs.measure(list(_table(form, weights, few, vocab_limit)))
    weight_bytes = sum(shard.data.nbytes for leaf in jax.tree.leaves(weights) for shard in leaf.addressable_shards[:1])
    return form.footprint(budget.cache_bytes(limit, weight_bytes, memory) * form.mesh.size)


def _build(
    config: Config, form: _Form, weights: Weights[Array], sizes: Sizing, vocab_limit: int, report: Report
) -> Engine:
    """Compiles the program table, hands it to an executor and runs the smallest program of each kind once."""
    started = time.perf_counter()
    hits = COUNTER.cache_hits
    rows = list(_table(form, weights, sizes, vocab_limit))
    table = programs.compile_table(rows, sizes, report)
    log.info(
        "compiled programs=%d cache_hits=%d seconds=%.1f",
        len(rows),
        COUNTER.cache_hits - hits,
        time.perf_counter() - started,
    )
    kv = form.cache(sizes)
    executor = DeviceExecutor(
        table,
        sizes,
        weights,
        _zeros(functools.partial(state.initial, sizes, form.vocab_size), replicated(form.mesh)),
        _zeros(functools.partial(jnp.zeros, kv.shape, kv.dtype), kv.sharding),
        blocks=form.block_sharding,
        strict=config.engine.strict_compile,
    )
    report("warming up", 0.0)
    executor.warm_up()
    cost = LinearCost(_prior_times(form, weights, sizes))
    scheduler = Scheduler(sizes, config.scheduler, cost, is_observed=config.kv_events.endpoint is not None)
    return Engine(scheduler, executor)


def _prior_times(form: _Form, weights: Weights[Array], sizes: Sizing) -> StepTimes:
    """How long steps should take on these chips, before one was measured."""
    c, chip_count = form.config, form.mesh.size
    work = ModelWork(
        layer_parameters=sum(leaf.size for leaf in jax.tree.leaves(weights.layers)) // chip_count,
        head_parameters=form.vocab_size * c.embed_dim // chip_count,
        bytes_per_parameter=form.dtype.itemsize,
        kv_bytes_per_token=form.cache_bytes_per_token // chip_count,
        attention_flops_per_position=4 * c.num_layers * form.heads.heads * c.head_dim // chip_count,
    )
    chip = form.mesh.devices.flat[0]
    # Emulated CPU devices share one machine.
    share = chip_count if form.platform == "cpu" else 1
    peak = chips.speed(chip.device_kind, form.platform)
    return prior_times(
        sizes,
        work,
        flops_per_second=peak.flops_per_second / share,
        bytes_per_second=peak.bytes_per_second / share,
    )


def _table(form: _Form, weights: Weights[Array], sizes: Sizing, vocab_limit: int) -> Iterator[programs.Program]:
    model = form.config
    rule = steps.StepRule(
        config=model,
        attention=over_heads(XLA, form.mesh),
        scores=ScoreRule(model.attention_scale, model.attention_softcap),
        sample=sampling.SampleRule(
            vocab_limit,
            group=8 if form.platform == "tpu" else 2,
            mesh=form.mesh if form.mesh.size > 1 else None,
        ),
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights)
    return programs.program_table(rule, sizes, form.mesh, shapes, form.cache(sizes), form.vocab_size)


def _zeros(make: Callable[[], Leaf], sharding: Sharding) -> Leaf:
    """Builds arrays where they will live."""
    made: Leaf = jax.jit(make, out_shardings=sharding)()
    return made
