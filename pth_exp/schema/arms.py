"""Arms: one dataclass for each set of parameters that a loss can have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Optional

from pth_exp.schema.choices import Advantage, Aggregation, Correction, OldPolicy
from pth_exp.schema.fields import MISSING, Role, spec

_SCIENCE, _OUTPUT = Role.science, Role.output


@dataclass
class Arm:
    """One method of a comparison. A subclass adds its loss's parameters; nothing outside the arm can be set from it."""

    name: str = spec(MISSING, _SCIENCE, "name of the arm")
    loss: str = spec(MISSING, _SCIENCE, "name of the loss in the registry of pth_exp.losses")
    label: str = spec(MISSING, _OUTPUT, "how the arm is called in tables and figures")
    equation: Optional[str] = spec(
        MISSING, _OUTPUT, "the loss as written, in the language of pth_exp.equations; null: check 4 cannot judge the loss"
    )
    old_policy: OldPolicy = spec(OldPolicy.recomputed, _SCIENCE, "whose log-probabilities are old_logp")
    correction: Correction = spec(MISSING, _SCIENCE, "how the arm claims to correct for the sampler's lag")
    needs_reference: bool = spec(False, _SCIENCE, "the loss reads the reference policy's log-probabilities")
    needs_sampler_logp: bool = spec(False, _SCIENCE, "the loss, or its old policy, reads the sampler's log-probabilities")
    advantage: Advantage = spec(Advantage.group_std, _SCIENCE, "how rewards of a group become advantages")

    def parameters(self) -> dict[str, Any]:
        """The arguments of the arm's loss: the fields that the subclass adds."""
        common = {f.name for f in dataclasses.fields(Arm)}
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in common}


@dataclass
class PpoClipArm(Arm):
    """PPO's clipped loss; ``grpo`` and ``ppo_clip`` differ only in whose log-probabilities are ``old_logp``."""

    clip_low: float = spec(0.2, _SCIENCE, "the ratio is clipped below at 1 - clip_low")
    clip_high: float = spec(0.2, _SCIENCE, "the ratio is clipped above at 1 + clip_high")
    dual_clip: Optional[float] = spec(3.0, _SCIENCE, "bound c of verl's dual clip for negative advantages; null: off")
    aggregation: Aggregation = spec(Aggregation.token_mean, _SCIENCE, "how token terms become one number")
    norm_tokens: Optional[float] = spec(None, _SCIENCE, "what seq_mean_token_sum_norm divides a sum by (Dr. GRPO)", "tokens")


@dataclass
class DrGrpoArm(PpoClipArm):
    """GRPO with a constant in place of a response's length."""

    aggregation: Aggregation = spec(Aggregation.seq_mean_token_sum_norm, _SCIENCE, "how token terms become one number")


@dataclass
class TisPpoArm(PpoClipArm):
    """The PPO-clip loss times the detached truncated importance weight."""

    cap: float = spec(2.0, _SCIENCE, "the weight is truncated above at this value")


@dataclass
class TisReinforceArm(Arm):
    """REINFORCE times the detached truncated importance weight."""

    cap: float = spec(2.0, _SCIENCE, "the weight is truncated above at this value")
    aggregation: Aggregation = spec(Aggregation.seq_mean_token_sum, _SCIENCE, "how token terms become one number")
    norm_tokens: Optional[float] = spec(None, _SCIENCE, "what seq_mean_token_sum_norm divides a sum by (Dr. GRPO)", "tokens")


@dataclass
class SanArm(Arm):
    """Self-anchored normalisation, its variants and its parts; they have no parameters."""


@dataclass
class AsympoReadingArm(Arm):
    """A reading of ASymPO's abstract."""

    floor: float = spec(1e-6, _SCIENCE, "smallest mean surprisal of a response that its own is divided by", "nats")


@dataclass
class DecoupledPpoArm(PpoClipArm):
    """The PPO-clip loss times the detached importance weight, which nothing truncates unless ``cap`` is set."""

    dual_clip: Optional[float] = spec(None, _SCIENCE, "bound c of verl's dual clip for negative advantages; null: off")
    cap: Optional[float] = spec(None, _SCIENCE, "the weight is truncated above at this value; null: it is not")


@dataclass
class MaskedArm(PpoClipArm):
    """The PPO-clip loss where old policy and sampler agree; what lies outside the bounds is rejected."""

    upper: Optional[float] = spec(2.0, _SCIENCE, "a ratio of old policy to sampler above this is rejected; null: none is")
    lower: float = spec(0.0, _SCIENCE, "a ratio of old policy to sampler below this is rejected; 0: none is")
    weighted: bool = spec(True, _SCIENCE, "an accepted ratio multiplies its term; otherwise it rejects only")
    count_rejected: bool = spec(True, _SCIENCE, "what is rejected counts in the denominators; otherwise it is removed from them")


@dataclass
class MaskedGeometricArm(MaskedArm):
    """Responses rejected by the geometric mean of their ratios, whose scale is that of one token's mean drift."""

    upper: Optional[float] = spec(1.001, _SCIENCE, "a geometric mean above this rejects its response; null: none does")
    lower: float = spec(0.999, _SCIENCE, "a geometric mean below this rejects its response; 0: none does")
    weighted: bool = spec(False, _SCIENCE, "an accepted ratio multiplies its terms; otherwise it rejects only")
    count_rejected: bool = spec(False, _SCIENCE, "what is rejected counts in the denominators; otherwise it is removed from them")


@dataclass
class IcePopArm(MaskedArm):
    """Tokens rejected on both sides, in the paper's form."""

    upper: Optional[float] = spec(5.0, _SCIENCE, "a ratio of old policy to sampler above this is rejected; null: none is")
    lower: float = spec(0.5, _SCIENCE, "a ratio of old policy to sampler below this is rejected; 0: none is")
    dual_clip: Optional[float] = spec(None, _SCIENCE, "bound c of verl's dual clip for negative advantages; null: off")
    aggregation: Aggregation = spec(Aggregation.seq_mean_token_mean, _SCIENCE, "how token terms become one number")


@dataclass
class GspoArm(Arm):
    """PPO's clip on one ratio a response; the loss is a mean over responses."""

    clip_low: float = spec(3e-4, _SCIENCE, "the response's ratio is clipped below at 1 - clip_low")
    clip_high: float = spec(4e-4, _SCIENCE, "the response's ratio is clipped above at 1 + clip_high")


@dataclass
class CispoArm(Arm):
    """REINFORCE with a clipped, detached ratio."""

    clip_low: Optional[float] = spec(None, _SCIENCE, "the ratio is clipped below at 1 - clip_low; null: it is not")
    clip_high: float = spec(0.2, _SCIENCE, "the ratio is clipped above at 1 + clip_high")
    aggregation: Aggregation = spec(Aggregation.token_mean, _SCIENCE, "how token terms become one number")
    norm_tokens: Optional[float] = spec(None, _SCIENCE, "what seq_mean_token_sum_norm divides a sum by (Dr. GRPO)", "tokens")


@dataclass
class M2poArm(Arm):
    """The unclipped ratio, with tokens masked until the batch's second moment is small enough."""

    threshold: float = spec(0.04, _SCIENCE, "mean squared log-ratio of what is not masked, at most", "nats^2")
    harmful_only: bool = spec(False, _SCIENCE, "consider only tokens that a clip could stop (A > 0 with r > 1, A < 0 with r < 1)")
    aggregation: Aggregation = spec(Aggregation.token_mean, _SCIENCE, "how token terms become one number")
    norm_tokens: Optional[float] = spec(None, _SCIENCE, "what seq_mean_token_sum_norm divides a sum by (Dr. GRPO)", "tokens")


BUILTIN_ARMS: dict[str, type[Arm]] = {
    "grpo": PpoClipArm,
    "ppo_clip": PpoClipArm,
    "dr_grpo": DrGrpoArm,
    "tis_ppo": TisPpoArm,
    "tis_seq": TisPpoArm,
    "tis_reinforce": TisReinforceArm,
    "san": SanArm,
    "san_plus": SanArm,
    "san_plus_written": SanArm,
    "san_ref": SanArm,
    "san_ref_written": SanArm,
    "seq_norm": SanArm,
    "seq_gain": SanArm,
    "token_weights": SanArm,
    "asympo_reading": AsympoReadingArm,
    "decoupled_ppo": DecoupledPpoArm,
    "mis": MaskedArm,
    "mis_seq": MaskedArm,
    "mis_geo": MaskedGeometricArm,
    "icepop": IcePopArm,
    "gspo": GspoArm,
    "cispo": CispoArm,
    "m2po": M2poArm,
}
"""Loss name to the dataclass of the arms that use it; `pth_exp.extensions` adds a user's own."""
