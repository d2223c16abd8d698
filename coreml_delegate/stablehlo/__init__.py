"""StableHLO programs as Core ML models: ``compile``, ``convert`` and ``Program``.

Needs jaxlib, whose MLIR reads the programs: ``pip install 'coreml-delegate[jax]'``.
"""

from coreml_delegate.stablehlo.program import Program, compile, convert

__all__ = ["Program", "compile", "convert"]
