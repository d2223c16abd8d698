"""What partitioning leaves alone: the exported program's data, and guards of shapes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.export import ExportedProgram, exported_program

_LOCK = threading.RLock()


def own_tables(program: ExportedProgram) -> None:
    """Give ``program`` tables of constants and parameters of its own.

    ExecuTorch takes what delegates take over out of them, and shares one of them with the program
    that it was given.
    """
    tables: Any = program
    tables._constants = copy.copy(program.constants)
    tables._state_dict = copy.copy(program.state_dict)


@contextmanager
def unguarded() -> Generator[None]:
    """Let no program that is made meanwhile spell out the guards of its shapes.

    Each does so when it is made, for its ``module()`` alone, which programs that are only converted
    have no use for. Measured on two blocks of Swin V2 with dynamic height and width: 440 guards,
    0.4 s for each of hundreds of programs.
    """
    # The function is one of the whole process: patches of several threads are not to interleave.
    with _LOCK, mock.patch.object(exported_program, "_convert_guards_to_code", return_value=[]):
        yield
