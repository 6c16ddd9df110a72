"""What a link does with its tensors: one frozen value for both ends, kept with the checkpoint.

policy = LinkPolicy(forward=Uniform(bits=4), backward=Uniform(bits=8))
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from ckptz.errors import ConfigError, own_numbers
from ckptz.format.bits import xxh64
from ckptz.format.dtypes import DType
from ckptz.wire.codecs import (
    RAW,
    Codec,
    TensorPlan,
    TopK,
    Uniform,
    codec_from_dict,
    codec_to_dict,
    plan_of,
)
from ckptz.wire.header import Direction

METADATA_KEY: Final = "ckptz.wire.policy"
Feedback = Literal["ef", "ef21", "ef-mixed", "aqsgd"]
FEEDBACKS: Final = ("ef", "ef21", "ef-mixed", "aqsgd")


class PolicyWarning(UserWarning):
    """A model is used under another wire policy than it was trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPolicy:
    """Codecs, feedback and rounding of the tensors on a link.

    Attributes:
        forward: codec of activations.
        backward: codec of gradients.
        feedback: "ef21" or "ef" in both directions, "aqsgd" forward only; a pair names each direction by
            itself; None keeps no state. "ef-mixed" is received, and sent by bench/studies/paper_b alone.
        reuse: gradients take the positions of the activation's TopK, and no positions travel back.
        rounding: "stochastic" is unbiased: the choice for gradients of 2 or 3 bits.
        eval: "same" compresses at inference too, "raw" does not; "auto" is "raw" with EF21 or AQ-SGD.
        warmup_steps: first steps, sent raw.
        seed: of stochastic rounding.
        ef_decay: share of the old error in the error that "ef" keeps, 0 to 1; 0.0 keeps the newest alone.
        ef_reset: messages after which "ef" forgets its error; 0 never does.
    """

    forward: Codec = RAW
    backward: Codec = RAW
    feedback: Feedback | tuple[Feedback | None, Feedback | None] | None = None
    reuse: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    eval: Literal["auto", "same", "raw"] = "auto"
    warmup_steps: int = 0
    seed: int = 0
    ef_decay: float = 0.0
    ef_reset: int = 0

    def __post_init__(self) -> None:
        own_numbers(self)
        for name in ("forward", "backward"):
            if not isinstance(getattr(self, name), Codec):
                raise ConfigError(f"{name} must be a codec such as Uniform(8), got {getattr(self, name)!r}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"rounding must be nearest or stochastic, got {self.rounding!r}")
        if self.eval not in ("auto", "same", "raw"):
            raise ConfigError(f"eval must be auto, same or raw, got {self.eval!r}")
        if self.warmup_steps < 0 or self.ef_reset < 0 or not 0 <= self.ef_decay < 1:
            raise ConfigError("warmup_steps and ef_reset must not be negative, and ef_decay be 0 to 1")
        self._check_feedback()
        if self.reuse and _share(self.forward) != _share(self.backward):
            raise ConfigError("reuse needs TopK of the same share in both directions")

    def _check_feedback(self) -> None:
        if isinstance(self.feedback, tuple) and len(self.feedback) != len(Direction):
            raise ConfigError(f"feedback is one name or a pair for both directions, got {self.feedback}")
        for direction in Direction:
            kind = self.feedback_of(direction)
            if kind not in (None, *FEEDBACKS):
                raise ConfigError(f"feedback {kind!r} is not one of {', '.join(FEEDBACKS)}")
            if kind == "aqsgd" and direction is Direction.BACKWARD:
                raise ConfigError("aqsgd keeps activations of samples: it is for the forward direction")

    def codec(self, direction: Direction) -> Codec:
        """Give the codec of a direction."""
        return self.forward if direction is Direction.FORWARD else self.backward

    def feedback_of(self, direction: Direction) -> Feedback | None:
        """Give the kind of state of a direction."""
        if isinstance(self.feedback, tuple):
            return self.feedback[direction]
        if self.feedback == "aqsgd" and direction is Direction.BACKWARD:
            return None
        return self.feedback

    @property
    def compresses_eval(self) -> bool:
        """Whether inference goes through the codec too."""
        if self.eval != "auto":
            return self.eval == "same"
        return self.feedback_of(Direction.FORWARD) not in ("ef21", "aqsgd")

    def plan(
        self, direction: Direction, dtype: DType, shape: tuple[int, ...], *, raw: bool = False
    ) -> TensorPlan:
        """Bind the codec of a direction to a tensor; `raw` in warm-up and evaluation without compression."""
        if raw:
            return plan_of(RAW, dtype, shape)
        reuse = self.reuse and direction is Direction.BACKWARD
        if reuse:  # where the activation's plan sends positions
            reuse = isinstance(plan_of(self.forward, dtype, shape).codec, TopK)
        return plan_of(self.codec(direction), dtype, shape, reuse=reuse)

    def to_json(self) -> str:
        """Give the policy as text, for metadata."""
        record: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name in ("forward", "backward"):
            record[name] = codec_to_dict(record[name])
        for name in ("ef_decay", "ef_reset"):  # policies without them keep their text, and so their hash
            if not record[name]:
                del record[name]
        return json.dumps(record, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> LinkPolicy:
        """Read what `to_json` gave.

        Raises:
            ConfigError: the text is no policy.
        """
        try:
            record = json.loads(text)
            for name in ("forward", "backward"):
                record[name] = codec_from_dict(record[name])
            if isinstance(record["feedback"], list):
                record["feedback"] = tuple(record["feedback"])
            return cls(**record)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"not a wire policy: {error}") from None

    def __str__(self) -> str:
        words = [f"forward {self.forward}", f"backward {self.backward}"]
        words += [f"feedback {self.feedback}"] if self.feedback else []
        words += ["index reuse"] if self.reuse else []
        return ", ".join(words)

    @property
    def digest(self) -> int:
        """32 bits that differ between policies."""
        return xxh64(self.to_json().encode()) & 0xFFFFFFFF


def _share(codec: Codec) -> float | None:
    return codec.share if isinstance(codec, TopK) else None


PRESETS: Final[Mapping[str, LinkPolicy]] = MappingProxyType(
    {
        "raw": LinkPolicy(),
        "safe": LinkPolicy(forward=Uniform(8), backward=Uniform(8)),
        "balanced": LinkPolicy(forward=Uniform(4), backward=Uniform(8)),
        "paper_top10": LinkPolicy(forward=TopK(0.1), backward=TopK(0.1), reuse=True, eval="same"),
    }
)


def policy_of(policy: LinkPolicy | str) -> LinkPolicy:
    """Give a policy, or the preset of this name."""
    if isinstance(policy, LinkPolicy):
        return policy
    if not isinstance(policy, str) or policy not in PRESETS:
        raise ConfigError(f"policy {policy!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[policy]


def policy_metadata(policy: LinkPolicy | str) -> dict[str, str]:
    """Make a checkpoint's metadata: `save_file(tensors, path, metadata=policy_metadata(policy))`."""
    return {METADATA_KEY: policy_of(policy).to_json()}


def check_policy(
    metadata: Mapping[str, str] | None, policy: LinkPolicy | str | None = None
) -> LinkPolicy | None:
    """Find the policy that a checkpoint was trained with; warn if it is used under an unfit one.

    Args:
        metadata: of the checkpoint, `safe_open(path).metadata()`.
        policy: what the model will run under, None for no compression.
    """
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        return None
    trained = LinkPolicy.from_json(text)
    reason = _mismatch(trained, policy_of(policy or "raw"))
    if reason:
        warnings.warn(reason, PolicyWarning, stacklevel=2)
    return trained


def _mismatch(trained: LinkPolicy, used: LinkPolicy) -> str | None:
    """Why a model should not run under a policy, or None."""
    compressed = used.compresses_eval and used.codec(Direction.FORWARD) != RAW
    feedback = trained.feedback_of(Direction.FORWARD)
    if feedback in ("ef21", "aqsgd"):
        if compressed:
            return f"trained with {trained}: its state is not there at inference; run it without compression"
        return None
    share = _share(trained.forward)
    if share and (not compressed or _share(used.forward) != share):
        return (
            f"trained with {trained}: the layers behind each cut have only seen the greatest "
            f"{share:.0%} of activations, and lose accuracy on whole ones; "
            "load with the same policy, or train with EF21"
        )
    return None
