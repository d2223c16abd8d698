"""Core ML delegate for ExecuTorch: lower, explain, reproduce and run anywhere."""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())
