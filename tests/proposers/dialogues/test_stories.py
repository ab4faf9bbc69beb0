import re

from foretoken.proposers.training.corpus import Record, content_key
from foretoken.proposers.training.dialogues.stories import stories, summary

OPENINGS = ("The fox walked slowly to the old mill beside the river", "A small bird sang in the garden behind the white house",
            "The miller carried a heavy sack of flour up the stairs", "The children looked for the golden key under the bridge")


def book(paragraphs: int = 120) -> Record:
    """A small book: narration and speech in turns, every paragraph a little different."""
    parts = ["# A Small Book"]
    for number in range(paragraphs):
        walk, sing, carry, look = (f"{opening} on day {number}." for opening in OPENINGS)
        parts.append(f'{walk} {sing} {carry} "I have seen {number} sheep on the hill," said the shepherd, and he sat down. {look} '
                     f"Then everybody went home and had {number} cups of tea before the fire, for it was very late and very cold outside.")
    text = "\n\n".join(parts)
    return Record("book", text, (), content_key(text))


def answers_to(pattern: str) -> list[tuple[str, str]]:
    turns = [dialogue.messages[-2:] for dialogue in stories([book()])]
    return [(user["content"], reply["content"]) for user, reply in turns if re.search(pattern, user["content"])]


def test_summary_picks_the_sentences_whose_words_recur():
    text = ("Once there was a day like any other day of that year. The red dragon lived in the red mountain near the lake. "
            "Somebody bought eleven green umbrellas yesterday afternoon. The red dragon guarded the lake under the mountain.")
    assert summary(text, 1) == "The red dragon lived in the red mountain near the lake."
    assert summary(text, 2) == ("The red dragon lived in the red mountain near the lake. "
                                "The red dragon guarded the lake under the mountain.")


def test_all_answers_but_continuations_are_copied_from_the_question():
    copied = 0
    for dialogue in stories([book()]):
        question, answer = dialogue.messages[-2]["content"], dialogue.messages[-1]["content"]
        if re.search(r"(?i)continue|what happens next|go on\?|next part", question):
            continue
        body = re.sub(r"^In short: ", "", answer)
        said = re.fullmatch(r'The shepherd said: "(.+)"', body)
        for sentence in re.split(r"(?<=\.) ", said[1] if said else body):
            assert sentence in question
            copied += 1
    assert copied > 100


def test_a_summary_is_shorter_than_its_passage():
    summaries = [(question, answer) for question, answer in answers_to("") if answer.startswith("In short: ")]
    assert summaries and all(len(answer) * 2 < len(question) for question, answer in summaries)


def test_the_speaker_is_named():
    asked = answers_to(r'Who sa(id|ys) "')
    assert asked
    for question, answer in asked:
        quote = re.search(r'Who sa(?:id|ys) "([^"]+)"', question)
        assert quote and answer == f'The shepherd said: "{quote[1]}"'


def test_the_sentence_found_contains_the_word_asked_for():
    asked = answers_to(r"(mentions|contains the word|say about|with the word) \"")
    assert asked
    for question, answer in asked:
        word = re.search(r'(?:mentions|word|about) "(\w+)"', question)
        assert word and word[1] in answer.lower()


def test_a_completed_sentence_begins_as_asked():
    asked = answers_to(r'(Complete this sentence from the text:|Complete the sentence|begins with) "')
    assert asked
    for question, answer in asked:
        start = re.search(r'(?:text:|sentence|with) "(.+?)(?: \.\.\.)?"', question)
        assert start and answer.startswith(start[1])


def test_headings_and_tables_are_no_passages_and_the_rest_is_deterministic():
    assert list(stories([Record("table", "# Contents\n\n" + "| one | two |\n\n" * 50, (), 3)])) == []
    assert list(stories([book()])) == list(stories([book()]))
