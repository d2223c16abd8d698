"""The public documents that the rules cite."""

from __future__ import annotations

from typing import Final

from coreml_delegate.device_check.records import Source


def _issue(repository: str, number: int, subject: str, *, kind: str = "issues") -> Source:
    return Source(
        f"{repository}#{number}: {subject}", f"https://github.com/{repository}/{kind}/{number}"
    )


def _guide(page: str, title: str) -> Source:
    return Source(
        f"Guide to Core ML Tools: {title}",
        f"https://apple.github.io/coremltools/docs-guides/source/{page}.html",
    )


AUTHORING_RULES: Final = Source(
    "Apple, Core AI: rules for models on the Neural Engine",
    "https://github.com/apple/coreai-models/blob/main/skills/skills/model-authoring/references/"
    "neural_engine_rules.md",
)
TRANSFORMERS: Final = Source(
    "Apple: Deploying Transformers on the Apple Neural Engine",
    "https://machinelearning.apple.com/research/neural-engine-transformers",
)
RANGES: Final = Source(
    "Apple Developer Forums: an engineer on flexible shapes",
    "https://developer.apple.com/forums/thread/724930",
)
TYPED_EXECUTION: Final = _guide("typed-execution-example", "Typed Execution Workflow Example")
PRECISION: Final = _guide("convert-to-ml-program", "Set the ML Program Precision")
COMPUTE_UNITS: Final = Source(
    "Apple: MLComputeUnits", "https://developer.apple.com/documentation/coreml/mlcomputeunits"
)
MULTIFUNCTION: Final = _guide("multifunction-models", "Multifunction Models")
PALETTES: Final = Source(
    "coremltools: palettize_weights",
    "https://apple.github.io/coremltools/source/coremltools.optimize.coreml.palettization.html",
)
MIL_OPS: Final = Source(
    "coremltools: MIL ops of each opset",
    "https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html",
)
TROUBLESHOOTING: Final = Source(
    "ExecuTorch: Core ML troubleshooting",
    "https://docs.pytorch.org/executorch/stable/backends/coreml/coreml-troubleshooting.html",
)
LLAMA: Final = Source(
    "ExecuTorch: ANE-friendly Llama models",
    "https://github.com/pytorch/executorch/blob/main/examples/apple/coreml/llama/readme.md",
)
SIXTEEN_BIT: Final = Source(
    "M. Hollemans: Is the ANE 16-bit?",
    "https://github.com/hollance/neural-engine/blob/master/docs/16-bit.md",
)

DIMENSIONS: Final = _issue(
    "sbryngelson/ANEForge", 182, "the largest dimension of each family of chips", kind="pull"
)
LARGEST_TENSOR: Final = _issue(
    "sbryngelson/ANEForge", 240, "a vocabulary in tiles of the largest dimension", kind="pull"
)
STATE_WIDTH: Final = _issue("apple/coremltools", 2631, "states whose width is not a multiple of 32")
STATE_AND_RANGE: Final = _issue(
    "apple/coremltools", 2548, "stateful models with fixed and flexible inputs"
)
ENUMERATED_NORM: Final = _issue("apple/coremltools", 1909, "layer norm with enumerated shapes")
RECURRENT: Final = _issue("apple/coremltools", 1780, "RNN and LSTM run on the CPU")
LARGE_FILE: Final = _issue("apple/coremltools", 1807, "weight files beyond 2 GB")
TOPK_PLAN: Final = _issue(
    "roboflow/rf-detr", 1495, "compute plans of detectors with topk", kind="pull"
)
TOPK_TIME: Final = _issue("apple/coreai-torch", 66, "what topk costs")
ATTENTION: Final = _issue(
    "pytorch/executorch", 16057, "attention on the neural engine of iOS 26", kind="pull"
)
EMBEDDING: Final = _issue(
    "pytorch/executorch", 7616, "tokens as uint16 on the neural engine", kind="pull"
)
GPU_ATTENTION: Final = _issue(
    "apple/coremltools", 2650, "attention on the GPU with a batch of ten or more"
)
