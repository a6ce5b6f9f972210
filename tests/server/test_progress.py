"""What is shown while something takes long."""

from __future__ import annotations

from jetserve.server.progress import ProgressBar


def test_elsewhere_than_on_a_terminal_each_stage_is_a_line(capsys):
    with ProgressBar() as bar:
        for fraction in (0.0, 0.5, 1.0):
            bar.report("loading weights", fraction)
        bar.report("warming up", 0.0)
        bar.report_bytes("fetching demo")(1_000_000, 98_000_000)
    assert capsys.readouterr().err == "loading weights\nwarming up\nfetching demo (98 MB)\n"


def test_a_full_bar_starts_its_clock_again_with_the_next_stage():
    with ProgressBar() as bar:
        bar.report("loading weights", 1.0)
        assert bar.is_full
        bar.report("compiling", 0.1)
        assert not bar.is_full
