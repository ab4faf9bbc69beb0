"""What `truncation` makes of a conversation that is longer than the context."""

from ...engine.errors import ContextTooLong
from ..chat import Chat, read_chat
from ..schemas import ChatRequest
from ..serving import Serving


async def read_within_context(asked: ChatRequest, serving: Serving) -> Chat:
    """The prompt without the oldest turns, as many as must go for the rest, and the longest output, to fit.

    System messages at the start stay, and what follows them begins with a message of the user. The last turn stays even if it
    does not fit: that is told by the engine. Raises ApiError, InvalidRequest.
    """
    messages, room = asked.messages, serving.max_tokens - max(asked.most_tokens()[1] or 1, 1)
    num_system = next((at for at, message in enumerate(messages) if message.role not in ("system", "developer")), len(messages))
    starts = [num_system, *(at for at in range(num_system + 1, len(messages)) if messages[at].role == "user")]
    low, high = 0, len(starts) - 1  # the right one is among these
    while True:
        start = (low + high) // 2 if low else 0  # mostly all fits
        kept = asked.model_copy(update={"messages": [*messages[:num_system], *messages[starts[start] :]]})
        try:
            chat = await read_chat(kept, serving)
        except ContextTooLong:
            if low == high:
                raise
            low = start + 1
            continue
        fits = len(chat.prompt.token_ids) <= room
        if low == high or (fits and start == low):
            return chat
        low, high = (low, start) if fits else (start + 1, high)
