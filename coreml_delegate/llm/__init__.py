"""Language models: a model in torch, its export to a ``.pte``, and text generation from one."""

from coreml_delegate.llm.audio import read_wav, spectrogram
from coreml_delegate.llm.candidates import Candidates
from coreml_delegate.llm.chat import ChatTokenizer, Conversation
from coreml_delegate.llm.embedding import Embedder
from coreml_delegate.llm.evaluation import (
    perplexity,
    predict_with_module,
    predict_with_program,
)
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.grammar import Grammar, json_rule, lark_rule, regex_rule
from coreml_delegate.llm.sampling import LogProbabilities, Sampler, Sampling
from coreml_delegate.llm.speculation import Draft, PromptLookup
from coreml_delegate.llm.transcriber import Transcriber

__all__ = [
    "Candidates",
    "ChatTokenizer",
    "Conversation",
    "Draft",
    "Embedder",
    "Generator",
    "Grammar",
    "LogProbabilities",
    "PromptLookup",
    "Sampler",
    "Sampling",
    "Transcriber",
    "json_rule",
    "lark_rule",
    "perplexity",
    "predict_with_module",
    "predict_with_program",
    "read_wav",
    "regex_rule",
    "spectrogram",
]
