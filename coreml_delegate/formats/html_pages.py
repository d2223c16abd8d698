"""Jinja templates of HTML reports; every value is escaped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def page_template(package: str, name: str, **filters: Callable[..., str]) -> Any:
    """Load a Jinja template of a package.

    Args:
        package: Package whose folder has the template.
        name: File name of the template.
        **filters: Functions that the template uses.

    Returns:
        The template, whose ``render`` raises if a name is missing.
    """
    # A late import, because only HTML reports need it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment_filters: Any = environment.filters
    environment_filters.update(filters)
    return environment.get_template(name)
