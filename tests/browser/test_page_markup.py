"""Model output and history are data: what looks like markup is shown, never obeyed; markdown comes out as it should."""

import json
from typing import Any

import pytest

ATTACKS = [
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "[click](javascript:document.title='owned')",
    "![x](https://example.com/leak.png)",
    "```html\n<svg onload=\"document.title='owned'\"></svg>\n```",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_model_says_is_never_obeyed(tab: Any, attack: str) -> None:
    """The model is made to say it by a grammar of one choice."""

    def forced(route: Any) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"structured_outputs": {"choice": [attack]}}))

    tab.page.route("**/v1/chat/completions", forced)
    tab.ask("Say it.")
    assert tab.stored()[-1]["answer"]["content"] == attack
    check_harmless(tab, attack)


def check_harmless(tab: Any, attack: str) -> None:
    tab.page.wait_for_timeout(200)
    assert tab.page.title() != "owned"
    assert tab.page.locator("#transcript :is(img, script, iframe, object, form)").count() == 0
    links = tab.page.locator("#transcript a").evaluate_all("all => all.map(a => a.protocol)")
    assert set(links) <= {"http:", "https:", "mailto:"}
    tab.page.uncheck("#formatted")
    assert tab.answer.text_content() == attack, "it is shown as it was said"


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_lies_in_the_history_is_never_obeyed(tab: Any, attack: str) -> None:
    answer = {"content": attack, "reasoning": attack, "names": [attack], "tokens": [[3, 0, 500], ["x", None, attack]], "metrics": attack}
    messages = [
        {"role": "user", "content": attack},
        {"role": "assistant", "model": attack, "answer": answer, "failure": {"message": attack, "advice": attack}},
        {"role": "system", "content": attack},
        None,
    ]
    chat = {"messages": messages, "updated": 1}
    tab.page.evaluate("chat => localStorage.setItem('foretoken.chat.evil', JSON.stringify(chat))", chat)
    tab.page.evaluate("localStorage.setItem('foretoken.chat.broken', '{')")
    tab.page.evaluate("localStorage.setItem('foretoken.settings', '[1')")
    tab.page.reload()
    assert tab.page.locator(".message").count() == 2
    check_harmless(tab, attack)


def test_reasoning_is_kept_apart_from_the_answer(tab: Any) -> None:
    """As a reasoning model's stream has it; the embedded one does not reason."""
    parts = [({"reasoning": "Let me *see*."}, None), ({"reasoning": " Yes."}, "ngram"), ({"content": "It is **so**."}, "ngram")]
    chunks = []
    for delta, proposer in parts:
        text = next(iter(delta.values()))
        said = {"token": text, "bytes": list(text.encode()), "logprob": -0.1, "top_logprobs": []}
        speculation = [{"token_id": 1, "proposer": proposer}]
        choice = {"index": 0, "delta": delta, "logprobs": {"content": [said]}, "speculation": speculation, "finish_reason": None}
        chunks.append({"choices": [choice]})
    chunks.append({"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    tab.ask("Is it so?")
    assert tab.answer.inner_text() == "It is so."
    assert tab.answer.locator("strong .token:not(.of-target)").inner_text() == "so"
    thoughts = tab.page.locator(".reasoning")
    assert thoughts.locator(".tokens").is_hidden()
    thoughts.locator("summary").click()
    assert thoughts.locator(".tokens").inner_text() == "Let me see. Yes."
    assert thoughts.locator(".token:not(.of-target)").inner_text().strip() == "Yes."
    tab.ask("Sure?")
    assert [message["content"] for message in tab.sent[-1]["messages"]] == ["Is it so?", "It is **so**.", "Sure?"]
    tab.page.reload()
    assert tab.answer.inner_text() == "It is so." and tab.page.locator(".reasoning").count() == 2


def test_markdown_can_be_switched_off_while_an_answer_is_written(tab: Any) -> None:
    tab.ask_for_much()
    tab.page.uncheck("#formatted")
    assert tab.answer.locator(".plain-text").count() == 1
    tab.page.click("#send")
    tab.finished()
    assert tab.answer.locator(".plain-text").count() == 1 and tab.page.locator(".message").count() == 2
    assert tab.answer.text_content() == tab.stored()[-1]["answer"]["content"]
    tab.page.get_by_role("button", name="Edit your message and ask again").click()
    tab.page.fill(".edit-box", "half written")
    tab.page.check("#formatted")
    assert tab.page.locator(".edit-box").input_value() == "half written" and tab.answer.locator(".plain-text").count() == 0


def rendered(tab: Any, source: str) -> str:
    """The page's own elements for a text, as a short outline: names and text."""
    script = """async (source) => {
      const { Rendering } = await import("/page/rendering.js");
      const { Answer } = await import("/page/answer.js");
      const outline = (node) => node.nodeType === 3 ? node.data
        : node.className === "code-head" ? ""
        : `<${node.localName}>${[...node.childNodes].map(outline).join("")}</${node.localName}>`;
      const holder = document.createElement("div");
      new Rendering(holder, { markdown: true, styleOf: () => "" }).update(Answer.from({ content: source }));
      return [...holder.childNodes].map(outline).join("");
    }"""
    return tab.page.evaluate(script, source)


MARKDOWN = {
    "a *b* **c** ***d*** ~~e~~ `f*g*`": "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <del>e</del> <code>f*g*</code></p>",
    "2*3*4 snake_case_name * alone **open": "<p>2*3*4 snake_case_name * alone **open</p>",
    "\\*not\\* a\\_b": "<p>*not* a_b</p>",
    "# One\n\n### Two": "<h3>One</h3><h5>Two</h5>",
    "a\nb  \nc": "<p>a\nb  <br>c</p>".replace("<br>", "<br></br>"),
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b\n\ntext": "<ol><li>a</li><li>b</li></ol><p>text</p>",
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "- a\n  ```py\n  x = 1\n  ```": "<ul><li>a<div><pre><code>x = 1\n</code></pre></div></li></ul>",
    "> a\n> **b**\n\nc": "<blockquote><p>a\n<strong>b</strong></p></blockquote><p>c</p>",
    "```js\nlet a = `b`;\n\n  c\n```\nd": "<div><pre><code>let a = `b`;\n\n  c\n</code></pre></div><p>d</p>",
    "```\nnever closed": "<div><pre><code>never closed</code></pre></div>",
    "a\n\n---\n\nb": "<p>a</p><hr></hr><p>b</p>",
    "|a|b|\n|-|-|\n|1|`2`|": (
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table></div>"
    ),
    "As here:\n|a|\n|-|": "<p>As here:</p><div><table><thead><tr><th>a</th></tr></thead><tbody></tbody></table></div>",
    "see [the *docs*](https://a.org/b_(c)) now": "<p>see <a>the <em>docs</em></a> now</p>",
    "https://a.org/x. And [b](c) [d]": "<p><a>https://a.org/x</a>. And [b](c) [d]</p>",
    "<b>x</b> &amp; a < b": "<p><b>x</b> &amp; a < b</p>",
}


def test_markdown(tab: Any) -> None:
    assert {source: rendered(tab, source) for source in MARKDOWN} == MARKDOWN


def test_texts_made_to_be_slow_are_not(tab: Any) -> None:
    runs = "".join("`" * length + " " for length in range(300))
    stairs = "\n".join(" " * depth + "- a" for depth in range(400))
    table = "|" * 30_000 + "\n|-|\n" + "|a" * 30_000
    hostile = ["*a " * 20_000, "**a*" * 20_000, "[" * 50_000, "[a](" * 20_000, "`" * 40_000 + "a", runs]
    hostile += ["> " * 5_000 + "a", "- " * 5_000, stairs, table]
    for source in hostile:
        took = tab.page.evaluate(
            """async (source) => {
              const { blocks } = await import("/page/markdown.js");
              const start = performance.now();
              blocks(source);
              return performance.now() - start;
            }""",
            source,
        )
        assert took < 2000, (source[:20], took)


SAID = """
  const { Answer } = await import("/page/answer.js");
  const answer = new Answer();
  const utf8 = new TextEncoder();
  /** tokens: [text or its bytes, proposer] */
  const add = (delta, tokens, finish = null) => answer.add({ choices: [{
    delta, finish_reason: finish,
    logprobs: { content: tokens.map(([said]) => ({ token: "", bytes: [...(said.buffer ? said : utf8.encode(said))], logprob: -0.5 })) },
    speculation: tokens.map(([, proposer]) => ({ token_id: 0, proposer })),
  }] });
"""


def test_tokens_follow_the_text_through_markdown_held_back_pieces_and_emoji(tab: Any) -> None:
    """Bytes of one character in several tokens, markers without text, and a chunk that brings tokens before their text."""
    script = """async () => {
      const smile = utf8.encode("🙂");
      add({ content: "" }, [["<think>", null]]);
      add({ content: "Hi" }, [["Hi", null], [smile.slice(0, 2), "ngram"], [smile.slice(2), "ngram"]]);
      add({ content: "🙂!" }, [["!", null]]);
      add({ content: "" }, [["<|end|>", "ngram"]], "stop");
      const cut = (a) => a.tokens.map((t) => [a.text.slice(t.start, t.end), t.proposer, t.position]);
      return [cut(answer), cut(Answer.from(JSON.parse(JSON.stringify(answer)))), answer.passes];
    }"""
    placed, again, passes = tab.page.evaluate(script.replace("{", "{" + SAID, 1))
    expected = [["", None, 0], ["Hi", None, 0], ["", "ngram", 1], ["🙂", "ngram", 2], ["!", None, 0], ["", "ngram", 1]]
    assert placed == again == expected and passes == 4


def test_tokens_are_found_behind_white_space_that_ends_reasoning(tab: Any) -> None:
    """Such a token has the last letters of the reasoning and the white space before its end marker, which the text lacks."""
    script = """async () => {
      const pieces = [
        [{ reasoning: "Yes" }, ["<think>", "\\n", "Yes"]],
        [{ reasoning: "." }, [".\\n\\n"]],
        [{}, ["</think>", "\\n\\n"]],
        [{ content: "It is." }, ["It", " is", "."]],
        [{}, ["<|im_end|>"], "stop"],
      ];
      for (const [delta, tokens, finish] of pieces) add(delta, tokens.map((token) => [token, "ngram"]), finish);
      return answer.tokens.map((t) => answer.text.slice(t.start, t.end));
    }"""
    assert tab.page.evaluate(script.replace("{", "{" + SAID, 1)) == ["", "", "Yes", ".", "", "", "It", " is", ".", ""]
