"""``CoreMLRecipeType``: names of the recipes, the same as in ExecuTorch's own backend."""

from __future__ import annotations

from executorch.export import RecipeType

COREML_BACKEND = "coreml_delegate"
"""The backend in ExecuTorch's recipe registry; its own Core ML backend is ``coreml`` there."""


class CoreMLRecipeType(RecipeType):
    """What ``ExportRecipe.get_recipe`` takes; see ``CoreMLRecipeProvider`` for the keywords."""

    FP32 = "coreml_fp32"
    FP16 = "coreml_fp16"
    PT2E_INT8_STATIC = "coreml_pt2e_int8_static"
    PT2E_INT8_WEIGHT_ONLY = "coreml_pt2e_int8_weight_only"
    TORCHAO_INT4_WEIGHT_ONLY_PER_CHANNEL = "coreml_torchao_int4_weight_only_per_channel"
    TORCHAO_INT4_WEIGHT_ONLY_PER_GROUP = "coreml_torchao_int4_weight_only_per_group"
    TORCHAO_INT8_WEIGHT_ONLY_PER_CHANNEL = "coreml_torchao_int8_weight_only_per_channel"
    TORCHAO_INT8_WEIGHT_ONLY_PER_GROUP = "coreml_torchao_int8_weight_only_per_group"
    CODEBOOK_WEIGHT_ONLY = "coreml_codebook_weight_only"

    @classmethod
    def get_backend_name(cls) -> str:
        """Return the backend that provides these recipes."""
        return COREML_BACKEND
