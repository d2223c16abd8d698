"""JAX's own test harnesses of its primitives, compiled to Core ML and compared with JAX on the CPU.

``jax._src.internal_test_util.test_harnesses`` holds 5,594 calls of 132 primitives. Those whose
arguments have element types that Core ML can carry are lowered to StableHLO, compiled, and run on
each engine::

    python -m tests.jax_suite -n 2 --results build/jax-suite.json
"""
