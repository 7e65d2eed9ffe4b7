"""The ops of one model, and by which route each of them gives a block the bits of single rows."""

from __future__ import annotations

from collections.abc import Callable

from mlx import nn

from mlx_spec.ops.attention import AttentionCall, KeyStretch
from mlx_spec.ops.choose import Subject, choose, distinct
from mlx_spec.progress import tell
from mlx_spec.verify.routes import Plan, plan_of
from mlx_spec.verify.subjects import find_subjects
from mlx_spec.verify.verdicts import Verdicts


class OpTable:
    """The ops of one model, and the route found for each at each width.

    Args:
        verdicts: where findings are kept.
        to_try: gives the subject that is tried in the place of one with the same key.

    Cost:
        The first question traces the model. A width is tried when it is first needed, once for every
        distinct op.
    """

    def __init__(self, verdicts: Verdicts, to_try: Callable[[Subject], Subject] = lambda subject: subject) -> None:
        self.verdicts = verdicts
        self._to_try = to_try
        self._subjects: dict[int, Subject] | None = None
        self._plans: dict[int, Plan] = {}
        self._attention: dict[tuple[AttentionCall, KeyStretch], str] = {}

    def plan(self, model: nn.Module, width: int) -> Plan:
        """What the model's ops do in a verify call of `width` tokens."""
        if width not in self._plans:
            subjects = self.subjects(model)
            self._plans[width] = plan_of(subjects, self._routes(distinct(list(subjects.values())), width), width)
        return self._plans[width]

    def _routes(self, subjects: dict[str, Subject], width: int) -> dict[str, str]:
        found = {}
        try:
            for place, (key, subject) in enumerate(subjects.items()):
                if self.verdicts.op(key, width) is None:
                    tell("certify", f"certifying W = {width}", place, len(subjects))
                found[key] = self.route(subject, width)
        except BaseException:
            # Whoever gave up need not wait for these again.
            self.verdicts.save()
            raise
        return found

    def route(self, subject: Subject, width: int) -> str:
        """The route of one op at a width."""
        known = self.verdicts.op(subject.key, width)
        if known is None or known not in subject.op.routes:
            known = choose(self._to_try(subject), width)
            self.verdicts.add_op(subject.key, width, known)
        return known

    def attention_route(self, call: AttentionCall, stretch: KeyStretch) -> str:
        """The cheapest way to attend with a block over so many keys that equals single queries."""
        if (call, stretch) not in self._attention:
            key = f"{call} over {stretch}"
            known = self.verdicts.op(key, call.width)
            if known is None or known not in call.ways:
                tell("certify", f"certifying W = {call.width}", 0, 1)
                known = call.route_over(stretch)
                self.verdicts.add_op(key, call.width, known)
                self.verdicts.save()
            self._attention[call, stretch] = known
        return self._attention[call, stretch]

    def subjects(self, model: nn.Module) -> dict[int, Subject]:
        """Every op as the model calls it: id of its module -> subject."""
        if self._subjects is None:
            self._subjects = find_subjects(model)
        return self._subjects
