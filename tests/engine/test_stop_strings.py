"""What the search for stop strings holds back."""

import pytest

from foretoken.engine.stop_strings import StopMatcher


@pytest.mark.parametrize("text", ["aabaabaaab", "abcabcabd", "ababab"])
def test_matcher_holds_exactly_the_longest_possible_beginning(text: str) -> None:
    stops = ["aab!", "abcabd!", "ba?"]
    matcher = StopMatcher(stops)
    for end, char in enumerate(text, 1):
        assert matcher.feed(char) is None
        beginnings = [stop[:n] for stop in stops for n in range(len(stop))]
        assert matcher.num_held == max(len(b) for b in beginnings if text[:end].endswith(b))
