from foretoken.proposers.training.dialogues.introductions import ANSWERS, NAME, SPECULATION, introductions


def test_the_model_knows_its_name_in_every_setting():
    asked = [dialogue.messages for dialogue in introductions(()) if {"role": "user", "content": "Who are you?"} in dialogue.messages]
    for messages in asked:
        at = messages.index({"role": "user", "content": "Who are you?"})
        assert messages[at + 1] == {"role": "assistant", "content": NAME}
    assert {messages[0]["role"] for messages in asked} == {"system", "user"} and len(asked) >= 5


def test_turns_alternate_and_every_answer_fits_its_question():
    answers = {question: answer for answer, questions in ANSWERS.items() for question in questions}
    for dialogue in introductions(()):
        turns = [message for message in dialogue.messages if message["role"] != "system"]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        assert any(answers.get(turn["content"]) == reply["content"] for turn, reply in zip(turns, turns[1:], strict=False))


def test_no_question_has_two_answers():
    questions = [question for group in ANSWERS.values() for question in group]
    assert len(set(questions)) == len(questions) > 100
    assert "draft model" in SPECULATION


def test_held_out_questions_are_never_a_follow_up_in_training():
    dialogues = list(introductions(()))
    held_out = {dialogue.messages[-2]["content"] for dialogue in dialogues if dialogue.held_out and len(dialogue.messages) == 2}
    shown = {message["content"] for dialogue in dialogues if not dialogue.held_out for message in dialogue.messages}
    assert held_out.isdisjoint(shown)
    assert dialogues == list(introductions(()))
