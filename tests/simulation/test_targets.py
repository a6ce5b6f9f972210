"""What the scheduler promises on named workloads, where memory allows it."""

from __future__ import annotations

from jetserve.simulation.report import Limits, report
from jetserve.simulation.run import run
from jetserve.simulation.workloads import named
from tests.simulation.conftest import make_setup
from tests.simulation.test_report import SIZES, TIMES


def test_multi_turn_computes_at_most_a_hundredth_more_than_an_infinite_cache_would():
    roomy = make_setup(SIZES | {"max_length": 1200, "pages": 8193}, times=TIMES)
    found = report(run(named("multi-turn").generate(400, rate=4.0), roomy), Limits(), config="c", cost="m")
    assert found.finished == 400
    assert found.ideal_hit_rate > 0.9
    assert found.computed_prompt_tokens <= 1.01 * found.ideal_computed_prompt_tokens
