from foretoken.proposers.training.corpus import Record, content_key
from foretoken.proposers.training.dialogues.small_talk import assistant_chats, personas, small_talk, trivia


def chat(*contents: str, origin: str = "chat") -> Record:
    roles = ("user", "assistant") * len(contents)
    messages = tuple({"role": role, "content": content} for role, content in zip(roles, contents, strict=False))
    return Record(origin, "", messages, content_key("".join(contents)))


def answers(builder, *records: Record) -> list[str]:
    return [dialogue.messages[-1]["content"] for dialogue in builder(records)]


def test_short_english_answers_are_kept():
    assert answers(assistant_chats, chat("What is the sea?", "The sea is a large body of salt water.")) == [
        "The sea is a large body of salt water."]


def test_other_languages_code_and_placeholders_are_left_out():
    assert answers(
        assistant_chats,
        chat("¿Qué es el mar?", "El mar es una gran masa de agua salada que cubre la mayor parte de la Tierra."),
        chat("Fix the loop", "int main() {\n    return 0;\n}"),
        chat("Write a bio for me", "Hi there! I'm [name] and I am from [area]."),
    ) == []


def test_long_answers_end_with_a_paragraph_or_are_left_out():
    paragraph = "The sea is a very large body of salt water and it is deep. " * 6
    (kept,) = answers(assistant_chats, chat("What is the sea?", "\n\n".join([paragraph.strip()] * 4)))
    assert kept == "\n\n".join([paragraph.strip()] * 2)
    assert answers(assistant_chats, chat("What is the sea?", paragraph * 4)) == []
    assert answers(assistant_chats, chat("Name the seas", "\n\n".join(["1. " + paragraph.strip()] * 4))) == []


def test_personas_are_cut_into_short_chats_without_placeholders():
    turns = ["Hi, I'm [user 1's name].", "Hello, what is your name?"]
    for number in range(20):
        turns += [f"Do you like the {number} books on the shelf?", f"Yes, I read the {number} books in the summer."]
    dialogues = list(personas([chat(*turns)]))
    assert len(dialogues) > 4
    for dialogue in dialogues:
        spoken = [turn for turn in dialogue.messages if turn["role"] != "system"]
        assert [turn["role"] for turn in spoken] == ["user", "assistant"] * (len(spoken) // 2) and 2 <= len(spoken) <= 6
        assert all("user 1" not in turn["content"] for turn in spoken)


def test_a_chat_does_not_begin_with_an_answer():
    assert list(personas([chat("Oh, that sounds like fun to me!", "It is a lot of fun in the summer.")])) == []


def test_trivia_answers_are_sentences_of_plain_topics():
    record = chat("what is the capital of Peru?", "lima", origin="data/english/trivia.yml")
    (dialogue,) = trivia([record])
    assert [turn["content"] for turn in dialogue.messages[-2:]] == ["What is the capital of Peru?", "Lima."]
    assert list(trivia([chat("what is the capital of Peru?", "lima", origin="data/english/psychology.yml")])) == []


def test_small_talk_is_varied_and_alternates():
    dialogues = list(small_talk(()))
    assert len(dialogues) > 2500 and len({dialogue.key for dialogue in dialogues}) == len(dialogues)
    for dialogue in dialogues:
        spoken = [turn for turn in dialogue.messages if turn["role"] != "system"]
        assert [turn["role"] for turn in spoken] == ["user", "assistant"] * (len(spoken) // 2)
        assert all(turn["content"] and "{" not in turn["content"] for turn in spoken)
        assert all(turn["content"].endswith((".", "!", "?")) for turn in spoken if turn["role"] == "assistant")
    assert dialogues == list(small_talk(()))
