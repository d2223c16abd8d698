"""What a quantization has made of the size of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coreml_delegate.quantization_modes import QuantizationAssignment
from coreml_delegate.runtime.delegate import read_blob
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts import console
from coreml_delegate.scripts.delegates import partitions_of
from coreml_delegate.scripts.inputs.source import Source
from coreml_delegate.scripts.quantization import weight_bytes
from coreml_delegate.scripts.weight_inventory import weights_of


@dataclass(frozen=True, slots=True)
class QuantizationSummary:
    """Sizes in bytes before and after.

    Attributes:
        assignment: How the model was quantized.
        before: Of the parameters and buffers of the model.
        after: Of the weights in the Core ML delegates; None before they are made.
        program: Of the ``.pte``; None before it is made.
    """

    assignment: QuantizationAssignment
    before: int
    after: int | None = None
    program: int | None = None

    @classmethod
    def of(cls, source: Source, assignment: QuantizationAssignment) -> QuantizationSummary:
        """Of a model that is yet to be quantized."""
        return cls(assignment, weight_bytes(source))

    def with_program(self, pte: bytes) -> QuantizationSummary:
        """With the sizes of what was made of it."""
        program = PteProgram.open(pte)
        # Methods may share a blob, which is then one and the same buffer.
        blobs = [
            partition.blob
            for method in program.methods
            for partition in partitions_of(program, method)
        ]
        models = [read_blob(blob)[0] for blob in blobs]
        stored = sum(weight.stored_bytes for model in models for weight in weights_of(model))
        return replace(self, after=stored, program=len(pte))

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "config": self.assignment.as_dict(),
            "model_weight_bytes": self.before,
            "delegate_weight_bytes": self.after,
            "program_bytes": self.program,
        }

    def __str__(self) -> str:
        mixed = f" and modes for {len(self.assignment.modules)} modules"
        mode = f"{self.assignment.mode.name}{mixed if self.assignment.modules else ''}"
        text = f"quantized by {mode}: weights {console.size(self.before)}"
        if self.after is None or self.program is None:
            return text
        share = f" ({self.after / self.before:.0%})" if self.before else ""
        return (
            f"{text} before, {console.size(self.after)} after{share}; "
            f"program {console.size(self.program)}"
        )
