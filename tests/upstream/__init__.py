"""The tests of ExecuTorch's own Core ML backend, with our classes in place of theirs.

They come with the executorch wheel. ``python -m tests.upstream [FILE ...]`` runs them; what they
keep for a Mac, executing the programs, runs here too.
"""
