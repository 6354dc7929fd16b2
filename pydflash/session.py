"""Session: a conversation with an engine, of which only what is new is evaluated each turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from pydflash.errors import InvalidArgumentError
from pydflash.generate import collect
from pydflash.options import SamplingOptions
from pydflash.results import GenerationResult, GenerationStats, Progress, StreamEvent

if TYPE_CHECKING:
    from pydflash.engine import Engine


class Session:
    """Messages of one conversation, and the tokens that they were.

    A turn's prompt is what the template makes of all messages. As far as its text goes on from the text of the turn
    before, its tokens do too: an answer keeps the tokens that were drawn, so that nothing of it is evaluated again.

    Sessions of one engine take turns; each finds its beginning in the engine's prefix cache. One thread at a time.
    """

    def __init__(
        self, engine: Engine, *, messages: Sequence[Mapping[str, object]] = (), options: SamplingOptions | None = None
    ) -> None:
        """Begin a conversation.

        Args:
            engine: whose model has a chat template.
            messages: what was said before, a system message for example.
            options: of all turns that name none.

        Raises:
            InvalidArgumentError: the model has no chat template.
        """
        if engine.chat_template is None:
            raise InvalidArgumentError("engine", engine, "one whose model has a chat template")
        self._engine = engine
        self._options = options
        self._messages: list[dict[str, object]] = [dict(message) for message in messages]
        self._text, self._ids = "", ()  # type: tuple[str, tuple[int, ...]]
        self._stats: GenerationStats | None = None

    def __repr__(self) -> str:
        return f"<Session of {len(self._messages)} messages, {len(self._ids)} tokens>"

    @property
    def messages(self) -> tuple[Mapping[str, object], ...]:
        """What was said, the answers included."""
        return tuple(dict(message) for message in self._messages)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the newest prompt and its answer."""
        return self._ids

    @property
    def stats(self) -> GenerationStats | None:
        """Of the newest turn; ``cached_tokens`` and ``evaluated_tokens`` say what the turn had to read."""
        return self._stats

    def ask(
        self,
        text: str,
        options: SamplingOptions | None = None,
        *,
        progress: Callable[[Progress], object] | None = None,
    ) -> GenerationResult:
        """Say something and wait for the answer. Arguments and errors are those of :meth:`Engine.generate`.

        After an error the conversation is as it was before.
        """
        with closing(self.stream(text, options, progress=progress)) as events:
            return collect(events)

    def stream(
        self,
        text: str,
        options: SamplingOptions | None = None,
        *,
        progress: Callable[[Progress], object] | None = None,
    ) -> Generator[StreamEvent]:
        """The same piece by piece. What was said counts once the last event is there."""
        asked: list[dict[str, object]] = [*self._messages, {"role": "user", "content": text}]
        prompt = self._engine.apply_template(asked)
        if self._text and prompt.startswith(self._text):
            ids = (*self._ids, *self._engine.tokenizer.encode(prompt[len(self._text) :]))
        else:
            ids = tuple(self._engine.tokenizer.encode(prompt))
        answer: list[str] = []
        drawn: list[int] = []
        with closing(self._engine.stream(ids, options or self._options, progress=progress)) as events:
            for event in events:
                answer.append(event.text)
                drawn += event.token_ids
                if event.stats is not None:
                    said = "".join(answer)
                    self._messages = [*asked, {"role": "assistant", "content": said}]
                    self._stats = event.stats
                    self._remember(prompt, ids, said, drawn)
                yield event

    def _remember(self, prompt: str, ids: tuple[int, ...], said: str, drawn: Sequence[int]) -> None:
        """The text that the tokens stand for; nothing when they carry more than what was said, as with a stop text."""
        tokenizer = self._engine.tokenizer
        ended = bool(drawn) and drawn[-1] in tokenizer.special_ids
        body = drawn[:-1] if ended else drawn
        whole = b"".join(tokenizer.token_bytes(i) for i in body if i not in tokenizer.special_ids)
        if whole.decode("utf-8", "replace") != said:
            self._text, self._ids = "", ()
            return
        end = tokenizer.piece(drawn[-1]) if ended else ""
        self._text, self._ids = prompt + said + end, (*ids, *drawn)

    def undo(self) -> bool:
        """Take the newest turn back; False when there is none. Its tokens stay in the prefix cache for a while."""
        asked = [i for i, message in enumerate(self._messages) if message.get("role") == "user"]
        if not asked:
            return False
        self._messages = self._messages[: asked[-1]]
        self._text, self._ids = "", ()
        return True
