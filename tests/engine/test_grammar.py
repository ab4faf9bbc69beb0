"""A state's masks are those of a matcher that has read the same tokens and nothing else, whatever was tried in between."""

import random
from itertools import accumulate, chain

import pytest
from grammars import compiled, encode, end_id, fresh_mask, ids, opened, tokenizer, vocab_size

from foretoken.engine import grammar
from foretoken.engine.errors import InvalidRequest
from foretoken.engine.grammar import GrammarState
from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.engine.token_mask import Mask

SCHEMA = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "größer"]}, "maxItems": 3},
            "next": {"$ref": "#"},
            "size": {"type": "number", "minimum": -3, "maximum": 1000},
        },
        "required": ["name", "size"],
        "additionalProperties": False,
    }
)
SPECS = [
    SCHEMA,
    GrammarSpec.json_object(),
    GrammarSpec.regex(r"(foo|bar)+[0-9]{2,4}(, [a-z]{1,8}){0,3}\."),
    GrammarSpec.choice(["yes", "yes, but", "no", "maybe 😀"]),
    GrammarSpec.grammar('start: item ("," item)*\nitem: NAME "=" NUMBER\nNAME: /[a-z]{1,5}/\nNUMBER: /[0-9]+/'),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_looking_ahead_leaves_no_trace(spec: GrammarSpec) -> None:
    dice = random.Random(1)
    for _ in range(4):
        state, tokens = opened(spec)
        start = len(tokens)
        for _ in range(12):
            for _ in range(3):  # look along some paths, legal and not, in any order
                path: list[int] = []
                for _ in range(dice.randint(0, 4)):
                    possible = ids(state.mask(path))
                    path.append(dice.choice(possible) if dice.random() < 0.8 else dice.randrange(vocab_size()))
                state.mask(path)
            step: list[int] = []
            for _ in range(dice.randint(1, 3)):  # then grow by one token or several, as a step with accepted guesses does
                step.append(dice.choice(ids(state.mask(step))))
                if step[-1] == end_id():
                    break
            tokens += step
            assert ids(state.mask(())) == fresh_mask(compiled(spec), tokens[start:])
            if step[-1] == end_id():
                break


def test_going_back_from_one_branch_to_another_in_a_recursive_schema() -> None:
    """Where a matcher that is rolled back forgets that a list has begun."""
    children = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    properties = {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "children": children}
    spec = GrammarSpec.json_schema({"type": "object", "properties": properties, "required": [], "additionalProperties": False})
    named = {str(tokenizer().decode([token])): token for token in range(len(tokenizer()))}
    one = [named[text] for text in ('{"', "child", "ren", '"\n', "\t\t\t", " " * 13, ":\n", " [")]
    other = [*one[:3], named['":[\n']]
    state, _ = opened(spec)
    for path in (one[:-1], one, other):
        assert ids(state.mask(path)) == fresh_mask(compiled(spec), path)
    assert state.legal([*one, other[-1]], [-1, 0, 1, 2, 3, 4, 5, 6, 2]) == [*range(9)]


def test_the_end_comes_when_the_text_is_complete_and_nothing_after_it() -> None:
    state, tokens = opened(GrammarSpec.choice(["yes", "yes, but"]))
    assert end_id() not in ids(state.mask(()))
    tokens += encode("yes")
    assert end_id() in ids(state.mask(())) and len(ids(state.mask(()))) > 1
    tokens += encode(", but")
    assert ids(state.mask(())) == [end_id()]
    assert state.forced(5) == [end_id()]
    for _ in range(3):  # ignore_eos
        tokens.append(end_id())
        assert ids(state.mask(())) == [end_id()] == ids(state.mask([7, 8]))
    assert state.error is None


def test_only_text_can_be_said() -> None:
    special = {i for i in range(vocab_size()) if i >= len(tokenizer()) or i in tokenizer().all_special_ids} - {end_id()}
    assert len(special) > 70
    for spec in SPECS:
        state, tokens = opened(spec)
        dice = random.Random(2)
        while not tokens[2:] or (tokens[-1] != end_id() and len(tokens) < 30):
            allowed = ids(state.mask(()))
            assert special.isdisjoint(allowed)
            tokens.append(dice.choice(allowed))


def test_forced_tokens_are_those_without_a_choice() -> None:
    spec = GrammarSpec.regex("The answer is exactly (one|two)!")
    state, tokens = opened(spec)
    run = state.forced(50)
    assert str(tokenizer().decode(run)).startswith("The answer is exact")
    for i in range(len(run)):
        assert fresh_mask(compiled(spec), run[:i]) == [run[i]]
    assert len(fresh_mask(compiled(spec), run)) > 1
    assert state.forced(2) == run[:2] and state.forced(0) == []
    tokens += run[:3]
    assert state.forced(50) == run[3:]


def test_a_draft_is_cut_at_its_first_illegal_token() -> None:
    state, tokens = opened(SCHEMA)
    tokens += state.forced(50)
    legal = [ids(state.mask(()))[0]]
    for _ in range(3):
        legal.append(ids(state.mask(legal))[0])
    chain = [-1, 0, 1, 2]
    assert state.legal(legal, chain) == [0, 1, 2, 3]
    wrong = vocab_size() - 1
    assert state.legal([legal[0], wrong, *legal[2:]], chain) == [0]
    assert state.legal([wrong, *legal[1:]], chain) == []
    # a tree: 0 -> (1 wrong -> 2, 3 -> 4), 5 wrong -> 6
    tree = [-1, 0, 1, 0, 3, -1, 5]
    assert state.legal([legal[0], wrong, legal[1], legal[1], legal[2], wrong, legal[1]], tree) == [0, 3, 4]


def test_illegal_paths_and_paths_behind_an_end_do_no_harm() -> None:
    state, tokens = opened(GrammarSpec.choice(["no"]))
    before = ids(state.mask(()))
    wrong = vocab_size() - 1
    assert ids(state.mask([wrong])) == ids(state.mask([wrong, wrong])) == [end_id()]
    assert ids(state.mask([*encode("no"), end_id(), 9])) == [end_id()]
    assert ids(state.mask(())) == before
    tokens += encode("no")
    assert ids(state.mask(())) == [end_id()] and state.error is None


def test_a_grammar_that_breaks_on_the_way_ends_that_output_only() -> None:
    """Guesses behind the place where it breaks are cut: the target gets there by itself, with and without speculation."""
    properties = {f"p{i}": {"type": "integer"} for i in range(700)}
    spec = GrammarSpec.json_schema({"type": "object", "properties": properties, "additionalProperties": False})
    state, tokens = opened(spec)
    other, _ = opened(spec)
    first = ids(state.mask(()))[0]
    assert state.mask([first]) is None and state.error is None
    assert ids(state.mask(()))[0] == first
    assert state.legal([first], [-1]) == []
    tokens.append(first)
    assert state.mask(()) is None and state.error is not None and "too complex" in state.error
    with pytest.raises(InvalidRequest, match="too complex"):
        state.require()
    assert state.forced(3) == [] and state.legal([first], [-1]) == []
    tokens.append(first)
    assert state.mask(()) is None
    assert ids(other.mask(()))[0] == first


def test_what_the_library_raises_ends_that_output_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(num_words: int) -> Mask:
        raise MemoryError

    state, tokens = opened(SCHEMA)
    first = ids(state.mask(()))[0]
    monkeypatch.setattr(grammar, "Mask", no_memory)
    assert state.mask([first]) is None and state.legal([first], [-1]) == [] and state.forced(3) == []
    state.require()  # what was guessed did no harm
    state, _ = opened(SCHEMA)
    assert state.forced(3) == [] and state.legal([first], [-1]) == []
    with pytest.raises(MemoryError):
        state.require()


def test_tokens_from_outside_the_language_are_told() -> None:
    state, tokens = opened(GrammarSpec.choice(["no"]))
    tokens.append(vocab_size() - 1)
    with pytest.raises(InvalidRequest, match="left its grammar"):
        state.require()


def test_masks() -> None:
    mask = Mask(3)
    assert mask.only is None
    mask.bits[1] = 1 << 31
    assert mask.only == 63 and mask.allows(63) and not mask.allows(62) and not mask.allows(95)
    assert mask.to_bool(70).nonzero()[0].tolist() == [63]
    mask.bits[1] |= 1
    assert mask.only is None
    mask.bits[1], mask.bits[2] = 0, 5
    assert mask.only is None and mask.to_bool(66).nonzero()[0].tolist() == [64]


def test_choices_of_one_request_do_not_share_a_place() -> None:
    grammar = compiled(SCHEMA)
    first, second = list[int](), list[int]()
    states: list[GrammarState] = [grammar.open(first), grammar.open(second)]
    first += encode('{"name')
    assert ids(states[1].mask(())) == fresh_mask(grammar, [])
    assert ids(states[0].mask(())) != ids(states[1].mask(()))


def test_an_output_that_holds_up_the_others_again_and_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    state, tokens = opened(GrammarSpec.regex("[a-z ]{1,200}"))
    durations = [0.05] * 20 + [0.2] * 3 + [0.0]  # quick ones never count
    clock = accumulate(chain.from_iterable((0.0, duration) for duration in durations))
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(clock))
    for _ in durations[:-1]:
        state.require()
        tokens += encode("a")
    with pytest.raises(InvalidRequest, match="too slow to follow"):
        state.require()
