"""Language models: a model in torch, its export to a ``.pte``, and text generation from one."""

from coreml_delegate.llm.audio import read_wav, spectrogram
from coreml_delegate.llm.generator import Generator, Sampler, Sampling

__all__ = ["Generator", "Sampler", "Sampling", "read_wav", "spectrogram"]
