"""Language models: a decoder in torch, its export to a ``.pte``, and text generation from one."""

from coreml_delegate.llm.generator import Generator, Sampler, Sampling

__all__ = ["Generator", "Sampler", "Sampling"]
