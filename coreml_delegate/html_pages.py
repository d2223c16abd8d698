"""HTML pages of reports: templates that lie beside the code, filled in with everything escaped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def page_template(package: str, name: str, **filters: Callable[..., str]) -> Any:
    """A Jinja template of a package.

    Args:
        package: Package in whose folder the template lies.
        name: Its file name.
        **filters: Functions that the template uses.

    Returns:
        The template, whose ``render`` raises if a name is missing.
    """
    # Imported here, because only these forms of reports need it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known: Any = environment.filters
    known.update(filters)
    return environment.get_template(name)
