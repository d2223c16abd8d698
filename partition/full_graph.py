"""Options that cannot go with ``lower_full_graph``."""

from __future__ import annotations

from collections.abc import Mapping

from coreml_delegate.errors import OptionError


def check_full_graph(compatible: Mapping[str, bool]) -> None:
    """Refuse options that leave something to the CPU.

    Args:
        compatible: By option whether its value leaves nothing.

    Raises:
        OptionError: One of them does not; lists all.
    """
    clashing = [name for name, fine in compatible.items() if not fine]
    if clashing:
        raise OptionError(
            "lower_full_graph=True leaves nothing to the CPU",
            got=f"together with {', '.join(clashing)}",
            remedy="Drop these options, or set lower_full_graph=False",
        )
