"""Conversations by a model's own chat template.

The template renders a whole conversation each time. Of that, a language model gets only the tokens
that are not in its context yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.llm.generator import Choose, Ending, Generator
from coreml_delegate.llm.tokenizer import TOKENIZER, TextStream, tokenizer_file
from coreml_delegate.third_party import transformers, wrap_errors

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_PROBE = "This is an answer."  # text whose end is looked for in what the template renders


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user`` or ``assistant``.
        content: The text.
    """

    role: str
    content: str


class ChatTokenizer:
    """The tokenizer and the chat template of a checkpoint folder; nothing is downloaded.

    Args:
        path: The folder, or the ``tokenizer.json`` in it.
        template: Name of the template, for a folder with several; None for ``default``.

    Attributes:
        ends: Tokens that end an answer: what the template writes behind one, and the tokenizer's
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
        self._template = self._find(template)
        self.ends = self._end_tokens()

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(self._library.backend_tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return self._decoded(tokens, special=False)

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, up to the place where the next answer begins.

        Texts of messages that look like control tokens are encoded as texts.

        Args:
            messages: One at least.

        Raises:
            OptionError: The template cannot render these messages.
        """
        return list(self._apply(messages, add_generation_prompt=True, sanitize_control_tokens=True))

    def answer_in(self, rest: Sequence[int], answer: Sequence[int]) -> int | None:
        """Return how many tokens of a rendering stand for an answer.

        A model may have written the answer with other tokens than the tokenizer would. Then the
        texts have to be equal, up to the token that ends the answer.

        Args:
            rest: Tokens of the rendering, from the place where the answer begins.
            answer: Tokens that the model has generated.

        Returns:
            The number; None if the rendering has another answer.
        """
        if list(rest[: len(answer)]) == list(answer):
            return len(answer)
        end = next((at for at, token in enumerate(rest) if token in self.ends), None)
        if end is None:
            return None
        texts = [self._decoded(tokens, special=True) for tokens in (rest[:end], answer)]
        return end if texts[0] == texts[1] else None

    def _decoded(self, tokens: Sequence[int], *, special: bool) -> str:
        backend = self._library.backend_tokenizer
        return str(backend.decode(list(tokens), skip_special_tokens=not special))

    def _find(self, name: str | None) -> str:
        """Return the text of a template."""
        found: str | dict[str, str] | None = self._library.chat_template
        if not found:
            raise OptionError(
                f"{self._folder} has no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                remedy="Take the folder of a model that was made for chats, or leave out --chat",
            )
        templates = {"default": found} if isinstance(found, str) else found
        if (name or "default") not in templates:
            raise OptionError(
                f"{self._folder} has no such chat template",
                got=name or "default",
                expected=near_matches(name or "default", templates),
                remedy="Name one with --chat-template",
            )
        return templates[name or "default"]

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        _check_texts(messages)
        with wrap_errors(f"the chat template of {self._folder} cannot render the messages"):
            return self._library.apply_chat_template(
                [asdict(message) for message in messages],
                chat_template=self._template,
                return_dict=False,
                **options,
            )

    def _end_tokens(self) -> tuple[int, ...]:
        answered = (Message(USER, "question"), Message(ASSISTANT, _PROBE))
        _, found, behind = str(self._apply(answered, tokenize=False)).rpartition(_PROBE)
        # Without it the template changes answers, and the place is unknown.
        behind = behind if found else ""
        tokens = self._library.backend_tokenizer.encode(behind, add_special_tokens=False).ids
        added = self._library.added_tokens_decoder
        first = next((token for token in tokens if token in added), None)
        ends = [token for token in (first, self._library.eos_token_id) if token is not None]
        return tuple(dict.fromkeys(ends))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and what it took.

    Attributes:
        text: What was said.
        tokens: Its tokens.
        ending: Why it ended.
        kept: Number of tokens that were in the context before the question.
        fed: Number of tokens that the question, and what the template adds, took.
    """

    text: str
    tokens: tuple[int, ...]
    ending: Ending | None
    kept: int
    fed: int


class Conversation:
    """A conversation with a language model, whose context keeps what was said.

    Args:
        generator: The model; its context is begun anew.
        tokenizer: Renders the messages.
        system: Text of the system message, or None.

    Attributes:
        generator: The model.
        messages: All turns so far.
        replies: One for each answer.
    """

    def __init__(
        self, generator: Generator, tokenizer: ChatTokenizer, system: str | None = None
    ) -> None:
        self.generator = generator
        self._tokenizer = tokenizer
        self._rendered: list[int] = []  # the template's tokens up to the last answer
        self._answer: list[int] = []  # the model's tokens of it
        self._said: list[int] = []  # what the model has seen or made; the context has its beginning
        self.messages = opening(system)
        self.replies: list[Reply] = []
        generator.reset()

    def ask(
        self,
        text: str,
        choose: Choose,
        *,
        limit: int | None = None,
        stops: Collection[int] = (),
        stop_texts: Sequence[str] = (),
    ) -> Iterator[str]:
        """Take a turn of the user, and generate the answer.

        The turn counts when the answer is complete; a question whose answer is not read to its end
        was not asked.

        Args:
            text: The user's turn.
            choose: See ``Generator.generate``.
            limit: See ``Generator.generate``.
            stops: Tokens that end the answer, besides those of model and tokenizer.
            stop_texts: Texts that end the answer.

        Yields:
            The answer's text, piece by piece.

        Raises:
            InputError: The conversation does not fit into the context.
            OptionError: The template cannot render the conversation; or see ``Generator.generate``.
        """
        asked = [*self.messages, Message(USER, text)]
        kept = self._continue(self._tokenizer.render(asked))
        new = self._said[kept:]
        stream, pieces = TextStream(self._tokenizer, stop_texts), list[str]()
        ends = {*stops, *self._tokenizer.ends}
        for token in self.generator.generate(new, choose, limit=limit, stops=ends):
            self._answer.append(token)
            self._said.append(token)
            pieces.append(stream.push(token))
            yield pieces[-1]
            if stream.stopped:
                break
        pieces.append(stream.end())
        yield pieces[-1]
        answer = "".join(pieces)
        ending = Ending.STOP if stream.stopped else self.generator.ending
        self.messages = [*asked, Message(ASSISTANT, answer)]
        self.replies.append(Reply(answer, tuple(self._answer), ending, kept, len(new)))

    def _continue(self, rendered: list[int]) -> int:
        """Set the tokens that the context has to hold; return how many of them it holds already.

        A template may change earlier turns; then the context is begun anew.
        """
        start = len(self._rendered)
        rest = rendered[start:]
        known = self._tokenizer.answer_in(rest, self._answer)
        if rendered[:start] != self._rendered or known is None or known == len(rest):
            self.generator.reset()
            self._said = list(rendered)
        else:
            self._said = [*self._said, *rest[known:]]
        self._rendered, self._answer = rendered, []
        return self.generator.position


def opening(system: str | None) -> list[Message]:
    """Return the messages before the first turn of the user."""
    return [] if system is None else [Message(SYSTEM, system)]


def _check_texts(messages: Sequence[Message]) -> None:
    """Refuse texts that no tokenizer takes: bytes of the command line that are not UTF-8."""
    for message in messages:
        if any("\ud800" <= character <= "\udfff" for character in message.content):
            raise OptionError(f"the text of the {message.role} is not UTF-8")
