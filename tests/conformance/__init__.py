"""coremltools' own MIL op tests, with their predictions served by an engine of this package.

The wheel of coremltools holds about ten thousand of them. On macOS they compare Core ML's results
with values that each test states or computes; elsewhere they stop before the comparison. ``plugin``
lets them go on, and writes down which of them reached a prediction and how they ended::

    python -m tests.conformance --engine reference --sample 0.02 --results results.json
"""
