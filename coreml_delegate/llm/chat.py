"""Conversations that use a model's own chat template.

The template renders the whole conversation each time; the language model gets only the tokens that
are not in its context yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.llm.generator import Choose, Ending, Generator
from coreml_delegate.llm.tokenizer import TOKENIZER, TextStream, tokenizer_file
from coreml_delegate.patches.third_party import transformers, wrap_errors

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_PROBE = "This is an answer."  # the template renders its end tokens after this text


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


class ChatTokenizer:
    """The tokenizer and the chat template of a checkpoint folder; nothing is downloaded.

    Args:
        path: The folder, or the ``tokenizer.json`` in it.
        template: Name of the template, for a folder with several; None for ``default``.

    Attributes:
        ends: Tokens that end an answer: the token that the template adds, and the tokenizer's
            end token.

    Raises:
        OptionError: A file is missing or malformed, there is no such template, or it cannot be
            rendered.
    """

    def __init__(self, path: Path, template: str | None = None) -> None:
        file = tokenizer_file(path)
        if file.name != TOKENIZER:
            raise OptionError(
                "a chat needs the folder of a tokenizer",
                got=str(path),
                expected=f"a folder with {TOKENIZER} and a chat template",
            )
        self._folder = file.parent
        with wrap_errors(f"cannot read a tokenizer from {self._folder}"):
            self._library: Any = transformers().PreTrainedTokenizerFast.from_pretrained(
                self._folder, local_files_only=True
            )
        self._template = self._find_template(template)
        self.ends = self._end_tokens()

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(self._library.backend_tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return self._decode(tokens, special=False)

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to the start of the next answer.

        Control tokens in the text of a message are encoded as plain text.

        Raises:
            OptionError: The template cannot render these messages.
        """
        return list(
            self._apply_template(messages, add_generation_prompt=True, sanitize_control_tokens=True)
        )

    def answer_in(self, rendered: Sequence[int], answer: Sequence[int]) -> int | None:
        """Return how many tokens of a rendering are the answer.

        A model may generate other tokens for a text than the tokenizer does. Then the texts have to
        be equal, up to the token that ends the answer.

        Args:
            rendered: Tokens of the rendering, from the start of the answer.
            answer: Tokens that the model has generated.

        Returns:
            The number; None if the rendering has another answer.
        """
        if list(rendered[: len(answer)]) == list(answer):
            return len(answer)
        end = next((index for index, token in enumerate(rendered) if token in self.ends), None)
        if end is None:
            return None
        texts = [self._decode(tokens, special=True) for tokens in (rendered[:end], answer)]
        return end if texts[0] == texts[1] else None

    def _decode(self, tokens: Sequence[int], *, special: bool) -> str:
        backend = self._library.backend_tokenizer
        return str(backend.decode(list(tokens), skip_special_tokens=not special))

    def _find_template(self, name: str | None) -> str:
        """Return the text of a template."""
        template: str | dict[str, str] | None = self._library.chat_template
        if not template:
            raise OptionError(
                f"{self._folder} has no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                remedy="Use the folder of a chat model, or leave out --chat",
            )
        templates = {"default": template} if isinstance(template, str) else template
        if (name or "default") not in templates:
            raise OptionError(
                f"{self._folder} has no such chat template",
                got=name or "default",
                expected=near_matches(name or "default", templates),
                remedy="Name one with --chat-template",
            )
        return templates[name or "default"]

    def _apply_template(self, messages: Sequence[Message], **options: Any) -> Any:
        _check_texts(messages)
        with wrap_errors(f"the chat template of {self._folder} cannot render the messages"):
            return self._library.apply_chat_template(
                [asdict(message) for message in messages],
                chat_template=self._template,
                return_dict=False,
                **options,
            )

    def _end_tokens(self) -> tuple[int, ...]:
        messages = (Message(USER, "question"), Message(ASSISTANT, _PROBE))
        _, probe, suffix = str(self._apply_template(messages, tokenize=False)).rpartition(_PROBE)
        # A template that changes answers does not contain the probe.
        suffix = suffix if probe else ""
        tokens = self._library.backend_tokenizer.encode(suffix, add_special_tokens=False).ids
        added = self._library.added_tokens_decoder
        first = next((token for token in tokens if token in added), None)
        ends = [token for token in (first, self._library.eos_token_id) if token is not None]
        return tuple(dict.fromkeys(ends))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and the number of tokens of its question.

    Attributes:
        kept: Number of tokens that were in the context before the question.
        fed: Number of tokens fed: the question, and the tokens that the template adds.
    """

    text: str
    tokens: tuple[int, ...]
    ending: Ending | None
    kept: int
    fed: int


class Conversation:
    """A conversation with a language model, whose context keeps the earlier turns.

    Args:
        generator: The model; of its context the part is kept that the first turn begins with.
    """

    def __init__(
        self, generator: Generator, tokenizer: ChatTokenizer, system: str | None = None
    ) -> None:
        self.generator = generator
        self._tokenizer = tokenizer
        self._rendered: list[int] = []  # the template's tokens up to the last answer
        self._answer: list[int] = []  # the model's tokens of it
        self._history: list[int] = []  # tokens fed and generated; the context has a prefix of them
        self.messages = opening(system)
        self.replies: list[Reply] = []

    def ask(
        self,
        text: str,
        choose: Choose,
        *,
        limit: int | None = None,
        stops: Collection[int] = (),
        stop_texts: Sequence[str] = (),
        before_last: Callable[[], None] | None = None,
    ) -> Iterator[str]:
        """Add a turn of the user, and generate the answer.

        The turn becomes part of the conversation when the answer has been read to its end.

        Args:
            text: The user's turn.
            choose: See ``Generator.generate``.
            limit: See ``Generator.generate``.
            stops: Tokens that end the answer, besides the end tokens of model and tokenizer.
            stop_texts: Texts that end the answer.
            before_last: See ``Generator.generate``.

        Yields:
            The answer's text, piece by piece.

        Raises:
            InputError: The conversation does not fit into the context.
            OptionError: The template cannot render the conversation; or see ``Generator.generate``.
        """
        messages = [*self.messages, Message(USER, text)]
        in_context = self._update_context(self._tokenizer.render(messages))
        new = self._history[in_context:]
        stream, pieces = TextStream(self._tokenizer, stop_texts), list[str]()
        ends = {*stops, *self._tokenizer.ends}
        for token in self.generator.generate(
            new, choose, limit=limit, stops=ends, before_last=before_last
        ):
            self._answer.append(token)
            self._history.append(token)
            pieces.append(stream.push(token))
            yield pieces[-1]
            if stream.stopped:
                break
        pieces.append(stream.end())
        yield pieces[-1]
        answer = "".join(pieces)
        ending = Ending.STOP if stream.stopped else self.generator.ending
        self.messages = [*messages, Message(ASSISTANT, answer)]
        self.replies.append(Reply(answer, tuple(self._answer), ending, in_context, len(new)))

    def _update_context(self, rendered: list[int]) -> int:
        """Set the tokens that the context has to hold; return how many it holds already.

        If the template changed earlier turns, the tokens before the change are kept at most.
        """
        start = len(self._rendered)
        new = rendered[start:]
        answer_length = self._tokenizer.answer_in(new, self._answer)
        is_changed = rendered[:start] != self._rendered or answer_length is None
        if is_changed or answer_length == len(new):
            self._history = list(rendered)
        else:
            self._history = [*self._history, *new[answer_length:]]
        self._rendered, self._answer = rendered, []
        return self.generator.resume(self._history)


def opening(system: str | None) -> list[Message]:
    """Return the messages before the first turn of the user."""
    return [] if system is None else [Message(SYSTEM, system)]


def _check_texts(messages: Sequence[Message]) -> None:
    """Refuse surrogate characters: bytes of the command line that are not UTF-8."""
    for message in messages:
        if any("\ud800" <= character <= "\udfff" for character in message.content):
            raise OptionError(f"the text of the {message.role} is not UTF-8")
