"""The options of an ``.mlpackage`` for an app: names, images, labels and description.

Imports nothing slow: the options are declared when the command line is parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.mlpackage import SUFFIX
from coreml_delegate.options.declaration import options_of
from coreml_delegate.options.model_interface import ModelInterface
from coreml_delegate.scripts import arguments

PROGRAM_SUFFIX = ".pte"


def add_interface(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ModelInterface``."""
    group = parser.add_argument_group(
        f"inputs and outputs of an {SUFFIX}",
        "NAME is an input, output or state as the model calls it, before --rename",
    )
    arguments.add_options(group, ModelInterface)


def is_package(path: Path | None) -> bool:
    """Return whether an output is an ``.mlpackage``, by its suffix."""
    return path is not None and path.suffix == SUFFIX


def interface_of(args: argparse.Namespace, path: Path | None) -> ModelInterface:
    """Return the interface that the options declare.

    Args:
        args: The arguments of ``add_interface``.
        path: The output; None if none is written.

    Raises:
        OptionError: The options are given for another kind of output, or exclude each other.
    """
    used_options = [
        option.argument.flag
        for option in options_of(ModelInterface)
        if option.argument is not None
        and getattr(args, option.argument.attribute) not in (None, False)
    ]
    if used_options and not is_package(path):
        raise OptionError(
            f"{', '.join(used_options)} {'is' if len(used_options) == 1 else 'are'} "
            f"for an {SUFFIX}",
            got="no output" if path is None else str(path),
            expected=f"--output FILE{SUFFIX}",
        )
    return ModelInterface(**arguments.keywords_of(args, ModelInterface))


def check_suffix(path: Path, accepted: Collection[str]) -> None:
    """Refuse an output path with another suffix.

    Raises:
        OptionError: The suffix is not accepted.
    """
    if path.suffix not in accepted:
        raise OptionError("unknown kind of output", got=str(path), expected=" or ".join(accepted))
