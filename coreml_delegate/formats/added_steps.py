"""Steps that an export adds around a model: the normalization of images, and softmax.

``verify`` compares an ``.mlpackage`` with the PyTorch model, which lacks these steps. The entry
``coreml_delegate.added_steps`` of the user-defined metadata, which Core ML ignores, is a JSON
object::

    {"images": {input: [scale, bias]}, "softmax": [output], "outputs": [output, ...]}

``scale`` and ``bias`` are lists of one number, or one for each channel. ``outputs`` are the names
of the model's outputs, in its order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

from coreml_delegate.errors import BlobFormatError

METADATA_KEY: Final = "coreml_delegate.added_steps"

BRIGHTEST: Final = 255
"""The largest value of an 8-bit pixel."""

Factors = tuple[float, ...]
"""A number, or one for each channel."""


@dataclass(frozen=True, slots=True)
class AddedSteps:
    """The steps around a model.

    Attributes:
        images: Scale and bias of the images that are normalized, by input.
        softmax: Outputs to which softmax is applied, over all elements.
        outputs: Names of the model's outputs, in its order; empty if they are in the package's.
    """

    images: Mapping[str, tuple[Factors, Factors]] = field(
        default_factory=dict[str, tuple[Factors, Factors]]
    )
    softmax: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def write(self, metadata: MutableMapping[str, str]) -> None:
        """Store the steps in the user-defined metadata of a model; changed in place."""
        if self == AddedSteps():
            metadata.pop(METADATA_KEY, None)
            return
        content = {"images": self.images, "softmax": self.softmax, "outputs": self.outputs}
        metadata[METADATA_KEY] = json.dumps(content, sort_keys=True)

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> AddedSteps:
        """Return the steps that ``write`` stored.

        Raises:
            BlobFormatError: The entry has another form.
        """
        try:
            content: Any = json.loads(metadata.get(METADATA_KEY, "{}"))
            images = {
                str(name): (_factors(scale), _factors(bias))
                for name, (scale, bias) in content.get("images", {}).items()
            }
            softmax, outputs = (
                tuple(str(name) for name in content.get(key, ())) for key in ("softmax", "outputs")
            )
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            raise BlobFormatError(
                f"malformed metadata {METADATA_KEY}", got=str(error)[:200]
            ) from error
        return cls(images, softmax, outputs)


def _factors(values: Any) -> Factors:
    return tuple(float(value) for value in values)
