"""What a rerun decides, from figures alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.launch import LaunchConfig
from autotune.search.rerun_decision import KEEP, REGRESSION, RETUNE, Pair, decide
from autotune.search.score import Scored

BEST, DEFAULT = LaunchConfig(max_num_seqs=64), LaunchConfig()
#: Two launches that differ by 2 %, with what is known from elsewhere.
ERROR, FREEDOM = 0.014, 4.0


def scored(config: LaunchConfig, tok_s: float, error: float = ERROR) -> Scored:
    return Scored(config, tok_s, (tok_s * 0.95, tok_s * 1.05), 2, 2, error, FREEDOM)


def pair(role: str, then: float, now: float | None, error: float = ERROR) -> Pair:
    config = BEST if role == "best" else DEFAULT
    figure = None if now is None else scored(config, now, error)
    return Pair(role, config, scored(config, then), figure, "starts", "" if now else "oom_load: gone")


#: best then and now, the default then and now, decision, word of the reason. Two launches each differ by
#: 2 %: a change of less than 5.5 % (t = 2.78 with 4 degrees of freedom) is noise.
CASES = [
    # --- keep
    (100, 100, 80, 80, KEEP, "within noise"),
    (100, 96, 80, 79, KEEP, "within noise"),
    (100, 120, 80, 96, KEEP, "faster"),
    # The default alone fell: the best is as good as it was.
    (100, 99, 80, 40, KEEP, "within noise"),
    # The default gained a little, and is still behind.
    (100, 100, 80, 90, KEEP, "still the best"),
    # --- both fell alike
    (100, 70, 80, 56, REGRESSION, "settings do not cure"),
    (100, 70, 80, 57, REGRESSION, "30%"),
    (100, 50, 80, 42, REGRESSION, "50%"),
    # --- something else may be better
    (100, 70, 80, 80, RETUNE, "behind"),
    (100, 70, 80, 72, RETUNE, "behind"),
    (100, 70, 60, 54, RETUNE, "another setting"),
    (100, 100, 80, 110, RETUNE, "behind the default"),
    (100, None, 80, 80, RETUNE, "does not serve any more"),
    (100, None, 80, None, RETUNE, "does not serve any more"),
    (100, 70, 80, None, RETUNE, "the default fails"),
    # --- without the default
    (100, 99, 80, None, KEEP, "within noise"),
]


@pytest.mark.parametrize(("then", "now", "other_then", "other_now", "verdict", "said"), CASES)
def test_a_decision(
    then: float, now: float | None, other_then: float, other_now: float | None, verdict: str, said: str
) -> None:
    found = decide([pair("best", then, now), pair("default", other_then, other_now)])
    assert (found.verdict, said in found.reason) == (verdict, True), found.reason


def test_a_configuration_alone_is_kept_or_searched_for_anew() -> None:
    assert decide([pair("best", 100, 99)]).verdict == KEEP
    found = decide([pair("best", 100, 60)])
    assert found.verdict == RETUNE
    assert "nothing else was measured" in found.reason


def test_where_the_default_fails_the_next_best_is_compared_with() -> None:
    second = replace(pair("default", 90, 63), role="second")
    found = decide([pair("best", 100, 70), pair("default", 80, None), second])
    assert found.verdict == REGRESSION
    assert "the second 30%" in found.reason


@pytest.mark.parametrize(("now", "error", "verdict"), [(90, 0.1, KEEP), (90, 0.002, REGRESSION)])
def test_noise_decides_what_is_a_fall(now: float, error: float, verdict: str) -> None:
    best, default = pair("best", 100, now, error), pair("default", 50, now / 2, error)
    pairs = [replace(p, then=replace(p.then, error=error)) for p in (best, default)]
    assert decide(pairs).verdict == verdict


def test_figures_have_their_intervals() -> None:
    said = decide([pair("best", 100, 70), pair("default", 80, 56)]).as_dict()
    change = said["pairs"][0]["change"]
    assert change["best"] == pytest.approx(0.7)
    assert change["ci95"][0] < 0.7 < change["ci95"][1] < 1
    assert said["pairs"][1]["now"]["tok_s"] == 56
