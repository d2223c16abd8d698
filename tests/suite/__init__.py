"""ExecuTorch's cross-backend suite, with our partitioner and runtime in place of a backend's own.

The suite (``executorch/backends/test/suite``: operators, torchvision models) comes with the
executorch wheel. It lowers each model, runs the program and compares it with eager torch.
``python -m tests.suite`` runs it with ours, or with ExecuTorch's own Core ML partitioner for
comparison, whose programs our runtime executes too; ``--compare`` sets the two side by side.
"""
