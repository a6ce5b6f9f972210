"""Sampling on the device against the float64 sampler of oracle.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from numpy.typing import NDArray

from jetserve.engine import loading, sampling
from jetserve.engine.logprobs import token_logprobs
from jetserve.engine.plan import Admission, LogprobArrays
from jetserve.engine.sampling import History, SampleRule
from jetserve.engine.state import SamplingRows, insert_layout, sampling_fields, write_admission
from jetserve.request import MAX_LOGPROBS, SamplingParams
from tests.engine.oracle import Choice, choose, uniform

Logits = NDArray[np.float32]

WIDE = SampleRule(vocab_limit=1290, group=2)  # of 1300: three segments of the plain draw, far more than 64 candidates
SMALL = SampleRule(vocab_limit=37, group=2)  # of 40: fewer than 64 candidates
VOCAB = {WIDE: 1300, SMALL: 40}
BATCH = {WIDE: 6, SMALL: 64}  # every other size is compiled too
EDITS = 8


@pytest.fixture(scope="module", autouse=True)
def programs_outlive_the_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """In pytest's cache, as the engines of conftest.py do."""
    loading.use_compilation_cache(str(request.config.cache.mkdir("jetserve-programs")))
    yield
    loading.use_compilation_cache(None)


class Row(NamedTuple):
    """One row to sample."""

    logits: Logits
    params: SamplingParams
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    position: int = 0

    def choice(self, rule: SampleRule) -> Choice:
        return choose(
            self.logits[: rule.vocab_limit],
            self.params,
            stop_token_ids=self.stop_token_ids,
            prompt=self.prompt,
            generated=self.generated,
        )


SampleAt = Callable[[SampleRule, Sequence[Row], Sequence[float]], list[int]]
LogprobsOf = Callable[[Logits, list[int], SampleRule], LogprobArrays]


def on_device(rows: Sequence[Row]) -> SamplingRows:
    """The rows' parameters as admissions carry them."""
    layout = insert_layout(len(rows))
    vector = layout.blank()
    fields = layout.views(vector)
    for at, row in enumerate(rows):
        params = SamplingParams(**{**vars_of(row.params), "max_tokens": 1000})
        write_admission(fields, at, Admission(at, params, row.stop_token_ids, row.seed, len(row.prompt)))
    control = layout.unpack(jnp.asarray(vector))
    return SamplingRows(**{name: control[name] for name in sampling_fields(1)})


def vars_of(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def history(rows: Sequence[Row], vocab: int) -> History:
    """Counts lie in other slots than the rows' own numbers, among slots full of rubbish."""
    slots = [2 * at + 1 for at in range(len(rows))]
    counts = np.full((2 * len(rows) + 1, vocab), 12345, np.int32)
    for slot, row in zip(slots, rows, strict=True):
        if row.params.has_penalties:
            counts[slot] = 0
            for token in row.prompt:
                counts[slot, token] |= 1
            for token in row.generated:
                counts[slot, token] += 2
    return History(
        jnp.asarray(counts),
        jnp.asarray(slots, jnp.int32),
        jnp.asarray([row.position for row in rows], jnp.int32),
        jnp.asarray([len(row.generated) for row in rows], jnp.int32),
    )


@jax.jit
def _sample_wide(logits: Array, rows: SamplingRows, history: History, active: Array) -> Array:
    return sampling.sample(logits, rows, history, active, WIDE)


@jax.jit
def _sample_small(logits: Array, rows: SamplingRows, history: History, active: Array) -> Array:
    return sampling.sample(logits, rows, history, active, SMALL)


def sample(rule: SampleRule, rows: Sequence[Row], batch: int = 0) -> list[int]:
    """Tokens of the rows, in batches of one size."""
    batch = batch or BATCH[rule]
    program = _sample_wide if rule is WIDE else _sample_small
    tokens: list[int] = []
    for first in range(0, len(rows), batch):
        some = list(rows[first : first + batch])
        real = len(some)
        some += [some[-1]] * (batch - real)
        logits = jnp.asarray(np.stack([row.logits for row in some]))
        active = jnp.arange(batch) < real
        tokens += np.asarray(program(logits, on_device(some), history(some, VOCAB[rule]), active))[:real].tolist()
    return tokens


@pytest.fixture(scope="module")
def sample_at() -> SampleAt:
    """The same with u given instead of drawn, so that the whole distribution can be walked."""
    programs = {
        rule: jax.jit(lambda *arguments, rule=rule: sampling.sample(*arguments, rule)) for rule in (WIDE, SMALL)
    }
    batch = 64

    def run(rule: SampleRule, rows: Sequence[Row], us: Sequence[float]) -> list[int]:
        bits = np.array(us, np.float32).view(np.int32).tolist()
        rows = [row._replace(position=position) for row, position in zip(rows, bits, strict=True)]
        tokens: list[int] = []
        for first in range(0, len(rows), batch):
            some = rows[first : first + batch]
            real = len(some)
            some = some + [some[-1]] * (batch - real)
            logits = jnp.asarray(np.stack([row.logits for row in some]))
            active = jnp.arange(batch) < real
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sampling, "_uniform", lambda _, position: lax.bitcast_convert_type(position, jnp.float32))
                found = programs[rule](logits, on_device(some), history(some, VOCAB[rule]), active)
            tokens += np.asarray(found)[:real].tolist()
        return tokens

    return run


def logits_of(rng: np.random.Generator, rule: SampleRule, spread: float) -> Logits:
    """Random ones; padding is by far the most likely (R53)."""
    logits = (rng.normal(size=VOCAB[rule]) * spread).astype(np.float32)
    logits[rule.vocab_limit :] = 500.0
    return logits


def probes(shares: NDArray[np.float64], count: int) -> list[float]:
    """u in the middle of the first, the last and some other shares that float32 sums can resolve."""
    ends = np.cumsum(shares)
    wide = np.flatnonzero(shares > 4e-6)
    picked = {*wide[:3], *wide[-3:], *wide[:: max(1, len(wide) // count)]}
    return [float(ends[at] - shares[at] / 2) for at in sorted(picked)]


FILTERS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.3, 1.0, 2.5), (0, 1, 5, 63, 64, 65, 200, 10**6), (1.0, 0.93, 0.5, 1e-6), (0.0, 0.04, 1.0)
    )
]


@pytest.mark.parametrize(("rule", "spread"), [(WIDE, 2.0), (WIDE, 0.4), (SMALL, 1.0)])
def test_filters_keep_exactly_the_right_tokens(sample_at: SampleAt, rule: SampleRule, spread: float) -> None:
    """The middle of every token's share gives that token: the kept set, its order and its weights all agree."""
    rng = np.random.default_rng(1)
    rows, us, expected, sizes = [], [], [], set()
    for filters in FILTERS:
        row = Row(logits_of(rng, rule, spread), SamplingParams(**filters))
        tokens, shares = row.choice(rule)
        sizes.add(len(tokens))
        for u in probes(shares, 4):
            rows.append(row)
            us.append(u)
            expected.append(tokens[int(np.searchsorted(np.cumsum(shares), u))])
        rows += [row, row]
        us += [0.0, float(np.float32(1 - 2**-24))]
        expected += [tokens[0], None]

    found = sample_at(rule, rows, us)

    wrong = [
        (row.params, u, token, right)
        for row, u, token, right in zip(rows, us, found, expected, strict=True)
        if right is not None and token != right
    ]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[:3]}"
    for row, token, right in zip(rows, found, expected, strict=True):
        assert right is not None or token in row.choice(rule).tokens
    assert {1, 5} <= sizes
    assert rule is SMALL or (max(sizes) == 1290 and any(64 < size < 1290 for size in sizes))


def test_drawn_token_is_the_inverse_distribution_at_the_documented_uniform() -> None:
    rng = np.random.default_rng(2)
    rows = []
    for filters in (FILTERS[0], {"temperature": 1.0}, {"top_p": 0.9, "temperature": 0.8}, {"top_k": 100}):
        for _ in range(60):
            rows.append(
                Row(
                    logits_of(rng, WIDE, 2.0),
                    SamplingParams(**filters),
                    seed=int(rng.integers(2**64, dtype=np.uint64)),
                    position=int(rng.integers(2**31 - 1)),
                )
            )
    rows[0] = rows[0]._replace(seed=2**64 - 1)
    rows[1] = rows[1]._replace(seed=2**63)
    found = sample(WIDE, rows)
    exact = 0
    for row, token in zip(rows, found, strict=True):
        u = uniform(row.seed, row.position)
        exact += row.choice(WIDE).at(u) == token
        assert token in row.choice(WIDE).near(u, 2e-6)
    assert exact >= len(rows) - 2


@pytest.mark.parametrize("rule", [WIDE, SMALL])
def test_greedy_takes_the_lowest_of_equal_ids(rule: SampleRule) -> None:
    vocab, limit = VOCAB[rule], rule.vocab_limit
    rows, expected = [], []
    for ids in ([5, 3, 9], [0], [limit - 1], [limit - 2, limit - 1], range(limit)):
        logits = np.full(vocab, -3.0, np.float32)
        logits[list(ids)] = 7.0
        logits[limit:] = 8.0
        rows.append(Row(logits, SamplingParams(temperature=0.0)))
        expected.append(min(ids))
    assert sample(rule, rows) == expected


def test_top_k_keeps_the_lowest_of_equal_ids(sample_at: SampleAt) -> None:
    logits = np.zeros(1300, np.float32)
    logits[1290:] = 9.0
    grid = [(k, (at + 0.5) / k) for k in (1, 3, 64, 70) for at in range(k)]
    rows = [Row(logits, SamplingParams(top_k=k)) for k, _ in grid]
    found = sample_at(WIDE, rows, [u for _, u in grid])
    assert found == [at for k in (1, 3, 64, 70) for at in range(k)]


@pytest.mark.parametrize("rule", [WIDE, SMALL])
def test_tiny_temperatures_are_greedy(rule: SampleRule) -> None:
    """R72: logits up to 1e3, no NaN; down to temperatures that float32 holds as subnormal or not at all."""
    rng = np.random.default_rng(3)
    rows = []
    for temperature in (1e-2, 1e-4, 1e-6, 1e-20, 1e-37, 1e-38, 1e-40, 1e-45, 1e-300):
        for filters in ({}, {"top_p": 1e-6}, {"top_k": 3}, {"min_p": 0.5}, {"top_p": 0.9, "top_k": 90}):
            logits = rng.uniform(-1e3, 1e3, VOCAB[rule]).astype(np.float32)
            logits[rng.integers(rule.vocab_limit)] = 1010.0
            logits[rule.vocab_limit :] = 2e3
            rows.append(Row(logits, SamplingParams(temperature=temperature, **filters), seed=len(rows)))
    assert sample(rule, rows) == [int(np.argmax(row.logits[: rule.vocab_limit])) for row in rows]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 100}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_tokens_at_minus_infinity_are_never_drawn(filters: dict[str, float]) -> None:
    """One possible token, wherever it is, and then two."""
    rows, possible = [], []
    for ids in ([0], [511], [512], [1023], [1289], [3, 1200]):
        logits = np.full(1300, -np.inf, np.float32)
        logits[ids] = -40.0
        for seed in range(5):
            rows.append(Row(logits, SamplingParams(**filters), seed=seed))
            possible.append(ids)
    for token, ids in zip(sample(WIDE, rows), possible, strict=True):
        assert token in ids


def test_last_uniform_below_one_stays_in_the_vocabulary(sample_at: SampleAt) -> None:
    """Float32 sums of a flat distribution may end a little below or above their total."""
    rng = np.random.default_rng(4)
    rows = [
        Row(logits_of(rng, rule, spread), SamplingParams(**filters))
        for rule, spread in itertools.product((WIDE,), (1e-3, 1.0, 3.0))
        for filters in ({}, {"top_p": 0.999}, {"top_k": 1000}, {"min_p": 1e-3}, {"temperature": 50.0})
    ]
    found = sample_at(WIDE, rows, [1 - 2**-24] * len(rows))
    for row, token in zip(rows, found, strict=True):
        assert token in row.choice(WIDE).tokens


def _edits(rng: np.random.Generator, rule: SampleRule) -> Iterator[Row]:
    limit = rule.vocab_limit
    ids = [int(x) for x in rng.permutation(limit)[:12]]
    penalties = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.7},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.4},
        {"presence_penalty": -2.0, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"logit_bias": {ids[0]: 6.5, ids[1]: -100.0, limit - 1: 5.0}},
        {"logit_bias": {ids[0]: 100.0}},
        {"allowed_token_ids": tuple(ids[:3])},
        {"allowed_token_ids": (ids[4],)},
        {"allowed_token_ids": (limit - 1, ids[0]), "logit_bias": {ids[0]: 3.0, ids[7]: 50.0}},
        {"min_tokens": 6},
        {"min_tokens": 5},
        {"min_tokens": 6, "presence_penalty": 0.5, "logit_bias": {ids[2]: 4.0}, "allowed_token_ids": tuple(ids)},
        {},
    ]
    prompt, generated = (ids[0], ids[1], ids[1], ids[5]), (ids[0], ids[2], ids[2], ids[2], ids[6])
    for edit in penalties:
        logits = logits_of(rng, rule, 1.0)
        logits[[ids[0], ids[2], ids[5]]] += 2.5  # what penalties and end tokens meet is likely
        for filters in ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 4}, {"top_p": 0.7}):
            params = SamplingParams(**filters, **edit)
            yield Row(logits, params, prompt, generated, (ids[2], ids[5], limit - 1))


@pytest.mark.parametrize("rule", [WIDE, SMALL])
def test_penalties_biases_allowed_and_forbidden_tokens(sample_at: SampleAt, rule: SampleRule) -> None:
    rows, us, expected = [], [], []
    for row in _edits(np.random.default_rng(5), rule):
        tokens, shares = row.choice(rule)
        for u in probes(shares, EDITS):
            rows.append(row)
            us.append(u)
            expected.append(tokens[int(np.searchsorted(np.cumsum(shares), u))])
    found = sample_at(rule, rows, us)
    wrong = [
        (row.params, u, token, right)
        for row, u, token, right in zip(rows, us, found, expected, strict=True)
        if token != right
    ]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[:3]}"


def test_smallest_repetition_penalty_keeps_tokens_in_the_vocabulary() -> None:
    rng = np.random.default_rng(12)
    for penalty in (1e-30, 1e-38, 1e-45, 1e-300):
        rows = [
            Row(logits_of(rng, WIDE, 2.0), SamplingParams(repetition_penalty=penalty, **filters), (1, 2), (3,), seed=7)
            for filters in ({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 99})
        ]
        for row, token in zip(rows, sample(WIDE, rows), strict=True):
            assert token in [seen for seen in (1, 2, 3) if row.logits[seen] > 0] or not (row.logits[1:4] > 0).any()


def test_row_draws_the_same_token_in_any_batch() -> None:
    """Alone, at any place, beside rows of any kind: a row meets the same operations."""
    rng = np.random.default_rng(6)
    kinds = [row._replace(position=at) for at, row in enumerate(_edits(rng, WIDE))]
    kinds += [
        Row(logits_of(rng, WIDE, 0.5), SamplingParams(**filters), seed=at, position=3 * at)
        for at, filters in enumerate(FILTERS[::7])
    ]
    alone = sample(WIDE, kinds, batch=1)
    order = rng.permutation(len(kinds))
    assert sample(WIDE, [kinds[at] for at in order]) == [alone[at] for at in order]


def test_inactive_rows_change_nothing_for_active_ones() -> None:
    rng = np.random.default_rng(7)
    rows = [Row(logits_of(rng, WIDE, 1.0), SamplingParams(seed=1), seed=at, position=at) for at in range(6)]
    logits = jnp.asarray(np.stack([row.logits for row in rows]))
    for active in ([True] * 6, [False, True] * 3, [True, False, False, False, False, True]):
        found = _sample_wide(logits, on_device(rows), history(rows, 1300), jnp.asarray(active))
        if all(active):
            whole = found
        for at in range(6):
            assert not active[at] or int(found[at]) == int(whole[at])


@pytest.mark.parametrize("filters", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 1.5}])
def test_draws_are_distributed_as_they_should(filters: dict[str, float]) -> None:
    """Chi-square over 3000 positions of one seed; the threshold is passed by chance once in 10,000 such seeds."""
    row = Row(logits_of(np.random.default_rng(8), SMALL, 1.0), SamplingParams(**filters), seed=99)
    choice = row.choice(SMALL)
    draws = sample(SMALL, [row._replace(position=position) for position in range(3000)])
    observed = np.array([draws.count(token) for token in choice.tokens])
    assert observed.sum() == len(draws)
    expected = choice.probabilities * len(draws)
    freedom = len(choice.tokens) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile at 1 - 1e-4.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert ((observed - expected) ** 2 / expected).sum() < limit


def test_draws_at_different_seeds_and_positions_differ() -> None:
    row = Row(np.zeros(1300, np.float32), SamplingParams())
    by_position = sample(WIDE, [row._replace(position=at) for at in range(120)])
    by_seed = sample(WIDE, [row._replace(seed=at) for at in range(120)])
    high_words = sample(WIDE, [row._replace(seed=at << 32) for at in range(120)])
    for draws in (by_position, by_seed, high_words):
        assert len(set(draws)) > 100


@pytest.fixture(scope="module")
def logprobs_of() -> LogprobsOf:
    def run(logits: Logits, tokens: list[int], rule: SampleRule) -> LogprobArrays:
        compute = jax.jit(lambda logits, tokens, wanted: sampling.logprobs(logits, tokens, wanted, rule))
        found = compute(logits, np.array(tokens, np.int32), np.ones(len(tokens), bool))
        return LogprobArrays(*map(np.asarray, found))

    return run


@pytest.mark.parametrize("rule", [WIDE, SMALL])
def test_logprobs_are_of_the_raw_distribution_without_padding(logprobs_of: LogprobsOf, rule: SampleRule) -> None:
    rng = np.random.default_rng(9)
    logits = np.stack([logits_of(rng, rule, spread) for spread in (0.5, 2.0, 300.0)])
    logits[1, [4, 30, 20]] = logits[1, : rule.vocab_limit].max() + 1  # equal ones come by id
    chosen = [0, 30, int(np.argmin(logits[2, : rule.vocab_limit]))]

    found = logprobs_of(logits, chosen, rule)

    for at, row in enumerate(logits[:, : rule.vocab_limit].astype(np.float64)):
        right = row - (row.max() + np.log(np.exp(row - row.max()).sum()))
        order = sorted(range(rule.vocab_limit), key=lambda token, row=row: (-row[token], token))[:MAX_LOGPROBS]
        assert found.top_ids[at].tolist() == order
        np.testing.assert_allclose(found.top[at], right[order], rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(found.chosen[at], right[chosen[at]], rtol=1e-6, atol=1e-5)
    assert found.top_ids[1, :3].tolist() == [4, 20, 30]


@pytest.mark.parametrize(("vocab", "limit"), [(16, 12), (40, 12), (12, 12)])
def test_logprobs_of_a_tiny_vocabulary_are_finite(logprobs_of: LogprobsOf, vocab: int, limit: int) -> None:
    """R46: entries that are no tokens are left out, so nothing infinite reaches a client."""
    logits = np.linspace(0, 1, vocab, dtype=np.float32)[None]
    entry = token_logprobs(logprobs_of(logits, [3], SampleRule(limit, 2)), 0, 3, MAX_LOGPROBS)
    assert [token for token, _ in entry.top] == list(range(limit - 1, -1, -1))
    assert np.isfinite([entry.logprob, *(value for _, value in entry.top)]).all()


def test_logprobs_nobody_wants_are_zeros() -> None:
    found = sampling.logprobs(jnp.ones((2, 40)), jnp.zeros(2, jnp.int32), jnp.zeros(2, bool), SMALL)
    assert not any(np.asarray(array).any() for array in found)
