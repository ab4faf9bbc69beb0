import pytest
from speculation_figures import figures

from foretoken.engine.bench.choice import Score, choose, pays_up_to, score, scores, survivors
from foretoken.engine.bench.speculation_figures import OFF, Figures, Setting

NGRAM, DRAFT = Setting("ngram", 7, adaptive=True), Setting("draft_model", 7, adaptive=True)
TABLE = Setting("ngram_cache", 7, adaptive=True)
FIXED = Setting("draft_model", 3)


def chosen(*found: Figures) -> Setting:
    return choose(scores(found))


def test_the_fastest_is_chosen_if_it_is_clearly_faster() -> None:
    assert chosen(figures(NGRAM, 1.4), figures(DRAFT, 1.5), figures(FIXED, 1.45)) == DRAFT
    assert chosen(figures(DRAFT, 1.5), figures(FIXED, 1.6)) == FIXED


def test_within_two_percent_the_simpler_one_is_chosen() -> None:
    assert chosen(figures(NGRAM, 1.48), figures(DRAFT, 1.5)) == NGRAM, "nothing to load"
    assert chosen(figures(TABLE, 1.48), figures(DRAFT, 1.5)) == TABLE and chosen(figures(NGRAM, 1.48), figures(TABLE, 1.5)) == NGRAM
    assert chosen(figures(FIXED, 1.5), figures(DRAFT, 1.49)) == DRAFT, "k that looks after itself"
    assert chosen(figures(Setting("draft_model", 5), 1.5), figures(FIXED, 1.49)) == FIXED, "fewer guesses"
    assert chosen(figures(NGRAM, 1.019)) == OFF
    assert chosen(figures(NGRAM, 1.03)) == NGRAM


def test_noise_is_no_gain() -> None:
    assert chosen(figures(NGRAM, 1.1)) == NGRAM
    assert chosen(figures(NGRAM, 1.1, noise=0.3)) == OFF
    assert chosen(figures(NGRAM, 1.4), figures(DRAFT, 1.5, noise=0.3)) == NGRAM
    assert chosen(figures(NGRAM, 1.8, mu=0.0, rate=None)) == OFF, "what guesses nothing cannot be faster"
    assert score([figures(NGRAM, 1.8, mu=0.3)]).value == pytest.approx(1.3)


def test_several_numbers_of_requests_count_alike() -> None:
    assert score([figures(NGRAM, 2.0, 1), figures(NGRAM, 0.5, 8)]).value == pytest.approx(1.0)
    assert chosen(figures(NGRAM, 1.3, 1), figures(NGRAM, 1.3, 8), figures(DRAFT, 2.0, 1), figures(DRAFT, 0.9, 8)) == DRAFT


def test_a_fixed_k_is_off_above_the_requests_up_to_which_it_pays() -> None:
    falling = [figures(FIXED, 2.0, 1), figures(FIXED, 0.99, 8), figures(FIXED, 0.5, 32)]
    assert pays_up_to(falling) == 8
    assert score(falling).value == pytest.approx((2.0 * 0.99) ** (1 / 3))
    assert pays_up_to([figures(FIXED, 0.9, 1), figures(FIXED, 2.0, 8)]) == 0
    assert score([figures(FIXED, 0.9, 1)]) == Score(1.0, 0.0)


def test_the_better_half_survives_and_never_fewer_than_wanted() -> None:
    scored = {Setting("ngram", k): Score(1 + k / 10, 0.0) for k in range(1, 8)}
    assert [setting.k for setting in survivors(scored, 3)] == [7, 6, 5, 4]
    assert [setting.k for setting in survivors(scored, 6)] == [7, 6, 5, 4, 3, 2]
    assert len(survivors(dict(list(scored.items())[:2]), 3)) == 2
