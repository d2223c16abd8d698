"""ExecuTorch's Inspector, for programs whose delegates have several outputs."""

from __future__ import annotations

from typing import Any

from executorch.devtools import Inspector as _Inspector


class Inspector(_Inspector):
    """``executorch.devtools.Inspector``, whose ``calculate_numeric_gap`` takes such delegates.

    ExecuTorch 1.5 counts as many outputs for every op of a delegate as the delegate itself has, and
    then fails with ``IndexError``. With an op counted as one result, it compares them. No issue is
    known.

    Args:
        args: As ExecuTorch's.
        kwargs: As ExecuTorch's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.event_blocks:
            for event in block.events:
                if event.delegate_debug_identifier is not None:
                    event.num_outputs = 1
