"""``CoreMLQuantizer``: the quantizer for ``prepare_pt2e`` and ``prepare_qat_pt2e``."""

from __future__ import annotations

import logging
from typing import Any

from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import ObserverOrFakeQuantize
from torchao.quantization.pt2e.quantizer import EdgeOrNode, Quantizer

from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.quantizer.annotate import Annotator
from coreml_delegate.quantizer.checker import refusal
from coreml_delegate.quantizer.config import read_config
from coreml_delegate.quantizer.matcher import find_matches
from coreml_delegate.quantizer.report import QuantizationReport, describe
from coreml_delegate.quantizer.schedule import MilestoneSchedule, attach_milestones
from coreml_delegate.quantizer.selection import SettingsSelector
from coreml_delegate.quantizer.validation import validate

logger = logging.getLogger(__name__)


class CoreMLQuantizer(Quantizer):
    """Annotates the ops that Core ML runs quantized, by a configuration of coremltools.

    Args:
        config: ``coremltools.optimize.torch.quantization.LinearQuantizerConfig``. Entries of
            ``module_name_configs`` are regular expressions over module paths; they precede
            ``module_type_configs``, whose keys are module classes, their names, or functions;
            ``global_config`` applies to all other calls. An entry None leaves its modules in float.

    Raises:
        OptionError: A setting is not accepted or would have no effect.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._settings = read_config(config)
        self._reports: list[QuantizationReport] = []

    @property
    def report(self) -> QuantizationReport:
        """Report on the last annotated graph.

        Raises:
            ProgramError: No graph was annotated yet.
        """
        if not self._reports:
            raise ProgramError("no report yet", remedy="Prepare a model with this quantizer first")
        return self._reports[-1]

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every matching call, in place.

        Args:
            model: ``torch.export.export(...).module()``.

        Returns:
            The same model.

        Raises:
            OptionError: An entry of the configuration matches no call of this model.
        """
        selector = SettingsSelector(self._settings)
        selector.check_entries(model.graph.nodes)
        annotator = Annotator()
        reasons: dict[Node, str] = {}
        for match in find_matches(model.graph, selector):
            reason = refusal(match)
            if reason is None and match.choice.settings is not None:
                annotator.annotate(match, match.choice.settings)
            elif reason is not None:
                reasons.update(dict.fromkeys(match.nodes, reason))
        report = describe(model.graph, reasons)
        self._reports.append(report)
        if not report.quantized:
            logger.warning("nothing was quantized: see the report of the quantizer")
        return model

    def validate(self, model: GraphModule) -> None:
        """Check an annotated graph.

        Raises:
            UnsupportedOperatorError: An op is annotated that Core ML does not run quantized.
            LoweringError: An annotation cannot be prepared, converted or lowered.
        """
        validate(model)

    def prepare_obs_or_fq_callback(
        self,
        model: GraphModule,  # noqa: ARG002 - of torchao's interface
        edge_or_node_to_obs_or_fq: dict[EdgeOrNode, ObserverOrFakeQuantize],
    ) -> None:
        """Store the milestones of each layer in its fake-quantize modules; torchao calls this."""
        attach_milestones(edge_or_node_to_obs_or_fq)

    def schedule(self, model: GraphModule) -> MilestoneSchedule:
        """Return the milestone schedule of a model; call its ``step`` before each training step.

        Args:
            model: From ``prepare_qat_pt2e`` with this quantizer.

        Raises:
            OptionError: The configuration has no milestones.
        """
        if not self._settings.has_milestones:
            raise OptionError(
                "the configuration has no milestones",
                remedy="Set milestones of ModuleLinearQuantizerConfig",
            )
        return MilestoneSchedule(model)
