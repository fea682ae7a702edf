"""Whether training is deterministic: ``JAP_SELFCHECK=1`` has every stage run the first batch twice and compare.

The second run is one of a copy of the stage, from the same inputs and the same draws. Where anything differs, the
first block that made a difference is named, in the member's own output. Training then goes on with the first run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slurm_jap import trees
from slurm_jap.blocks import describe
from slurm_jap.errors import PREFIX
from slurm_jap.inspection import same_bits
from slurm_jap.shipment import StageShipment
from slurm_jap.stage import MemberStage, StepOrder

_Event = tuple[str, int, list[Tensor]]


def make_stage(shipment: StageShipment, device: torch.device, **options: Any) -> MemberStage:
    """A stage; one that checks itself where the member asked for it."""
    kind = _CheckedStage if shipment.settings.selfcheck else MemberStage
    return kind(shipment, device, **options)


class _CheckedStage(MemberStage):
    """See the module's text."""

    def __init__(self, shipment: StageShipment, device: torch.device, **options: Any) -> None:
        super().__init__(shipment, device, **options)
        self._twin: MemberStage | None = MemberStage(shipment, device, copy=True)
        self._checked: int | None = None
        """Iteration that is run twice."""
        self._culprits: list[tuple[int, str, float]] = []
        """(block, what differs, by how much), of one kind; outputs before gradients."""

    def prepare(self, order: StepOrder, targets: Sequence[Any] | None) -> None:
        """See :class:`MemberStage`."""
        super().prepare(order, targets)
        if self._checked is None:
            self._checked = order.iteration
        if self._twin is not None:
            self._twin.prepare(order, targets)

    def forward(self, order: StepOrder, number: int, tree: Any, target: Any) -> Any:
        """See :class:`MemberStage`."""
        twin = self._twin
        if twin is None:
            return super().forward(order, number, tree, target)
        again = trees.cloned((tree, target))
        first = self._recorded()
        output = super().forward(order, number, tree, target)
        second = self._recorded(twin)
        twin.forward(order, number, *again)
        for (_, block, ours), (_, _, theirs) in zip(first, second, strict=False):
            self._compare(block, "output", ours, theirs)
        return output

    def backward(self, order: StepOrder, number: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """See :class:`MemberStage`."""
        twin = self._twin
        if twin is None:
            return super().backward(order, number, grads)
        again = None if grads is None else trees.cloned(list(grads))
        first = self._recorded()
        result = super().backward(order, number, grads)
        second = self._recorded(twin)
        other = twin.backward(order, number, again)
        if not any(what == "output" for _, what, _ in self._culprits):
            for (_, block, ours), (_, _, theirs) in zip(first, second, strict=False):
                self._compare(block + 1, "gradient", ours, theirs)  # what arrives at a block, the next one made
            pairs = [(a, b) for a, b in zip(result, other, strict=True) if a is not None and b is not None]
            self._compare(self._everything[0].number, "gradient", [a for a, _ in pairs], [b for _, b in pairs])
        if number == len(order.sizes) - 1:
            self._end(twin)
        return result

    def _recorded(self, stage: MemberStage | None = None) -> list[_Event]:
        """What the stage, or this one, does from now on, as it comes."""
        events: list[_Event] = []

        def watch(what: str, block: int, tensors: Sequence[Tensor]) -> None:
            events.append((what, block, [t.detach().clone() for t in tensors]))

        (stage or self).watch = watch
        return events

    def _compare(self, block: int, what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        for a, b in zip(ours, theirs, strict=False):
            if not same_bits(a, b):
                gap = (a.double() - b.double()).abs().max().item() if a.shape == b.shape else float("nan")
                self._culprits.append((block, what, gap))
                return

    def _end(self, twin: MemberStage) -> None:
        if not any(what == "output" for _, what, _ in self._culprits):
            for mine, other in zip(self._everything, twin._everything, strict=True):
                for name, parameter in mine.parameters.items():
                    theirs = other.parameters[name].grad
                    if parameter.grad is not None and theirs is not None:
                        self._compare(mine.number, "gradient", [parameter.grad], [theirs])
        self._tell()
        self._twin = self.watch = None

    def _tell(self) -> None:
        outputs = [culprit for culprit in self._culprits if culprit[1] == "output"]
        where = f"{PREFIX} selfcheck: stage {self.stage}"
        names = {block.number: describe(block.call) for block in self._everything}
        if not self._culprits:
            print(f"{where}: the first batch gave the same bits twice", file=sys.stderr)
            return
        # Outputs go wrong from the first block that differs on, gradients from the last one.
        block, what, gap = min(outputs) if outputs else max(self._culprits)
        block = min(block, self._loss_block)
        print(
            f"{where}: block {block} ({names.get(block, 'of the next stage')}): its {what} differs by up to {gap:.3g} "
            "between two runs of the first batch: the model is not deterministic, and its numbers differ from run to "
            "run, alone as in a sweep; torch.use_deterministic_algorithms(True) may name the operation",
            file=sys.stderr,
        )
