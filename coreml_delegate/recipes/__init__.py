"""Recipes for ``executorch.export``; the import registers them under our own backend name."""

from coreml_delegate.patches.third_party import quiet_import

with quiet_import():
    from executorch.export import recipe_registry

    from coreml_delegate.recipes.provider import (
        COREML_BACKEND,
        CoreMLRecipeProvider,
        CoreMLRecipeType,
    )

recipe_registry.register_backend_recipe_provider(CoreMLRecipeProvider())

__all__ = ["COREML_BACKEND", "CoreMLRecipeProvider", "CoreMLRecipeType"]
