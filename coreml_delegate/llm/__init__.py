"""Language models: a decoder in torch, its export to a ``.pte``, and text generation from one."""

from coreml_delegate.llm.candidates import Candidates
from coreml_delegate.llm.chat import ChatTokenizer, Conversation
from coreml_delegate.llm.generator import Generator, Sampler, Sampling

__all__ = ["Candidates", "ChatTokenizer", "Conversation", "Generator", "Sampler", "Sampling"]
