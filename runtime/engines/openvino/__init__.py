"""The OpenVINO engine: the program as one compiled graph on the CPU."""

from coreml_delegate.runtime.engines.openvino.engine import OPENVINO

__all__ = ["OPENVINO"]
