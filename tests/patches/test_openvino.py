"""OpenVINO's import and private interfaces, and why they are needed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import openvino

from coreml_delegate.patches.openvino import infer_method


def _run(code: str) -> str:
    """Output of a new process that runs the code."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=True, text=True
    ).stdout.strip()


def test_the_import_of_openvino_reports_itself() -> None:
    code = """
        import openvino_telemetry

        class Telemetry:
            def __init__(self, **options): pass
            def send_event(self, *event): print(*event)

        openvino_telemetry.Telemetry = Telemetry
        import openvino
    """
    assert _run(code) == "ov import general_import"


def test_our_import_does_not_and_other_packages_may_import_the_telemetry() -> None:
    code = """
        import sys

        from coreml_delegate.patches.openvino import import_openvino

        import_openvino()
        missing = "openvino_telemetry" not in sys.modules
        import openvino_telemetry
        print(missing, openvino_telemetry.Telemetry is not None)
    """
    assert _run(code) == "True True"


def test_the_public_method_of_inference_wraps_that_of_the_extension() -> None:
    assert vars(openvino.InferRequest)["infer"] is not infer_method()
