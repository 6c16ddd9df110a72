"""The policy of a link, which is saved with the checkpoint, and the plan that it makes for one tensor.

    policy = LinkPolicy(forward=Uniform(bits=4), backward=Uniform(bits=8))

Implements spec/08-wire.md#codecs. Codecs and policies are frozen and equal at both ends. `plan_of` binds a
codec to a dtype and a shape, which determines all sizes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from ckptz.errors import ConfigError, check_int, coerce_numeric_fields
from ckptz.format.bits import xxh64
from ckptz.format.dtypes import DType, n_elements
from ckptz.format.values import FLOAT_KINDS as FLOAT_KINDS
from ckptz.kernels.wire_arrays import LARGEST_F32, padded
from ckptz.wire.header import HEADER_BYTES, Direction

BLOCK: Final = 256  # elements of a block; offset and scale add 0.016 bytes per element
MIN_ELEMENTS: Final = 4096  # smaller tensors are sent raw by default: latency dominates
RAW_SHARE: Final = 0.75  # of the raw bytes; a tensor whose payload would be larger is sent raw
RICE_BELOW: Final = 0.03  # share of values up to which gaps are tried; above, a bitmap is nearly as small
MAX_BYTES: Final = (1 << 32) - 1


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        *first, last = map(str, choices)
        raise ConfigError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Raw:
    """The uncompressed bytes of the tensor."""

    def __str__(self) -> str:
        return "raw"


RAW: Final = Raw()


@dataclass(frozen=True, slots=True)
class Uniform:
    """2^bits uniform levels between the smallest and the largest value of a block.

    Attributes:
        bits: 2, 3, 4, 6 or 8.
        scale: the values with a common range: "block", "sample" (first dimension), or "tensor" as in the
            paper.
        block: elements of a block.
        rans: entropy-code the codes if that is smaller; only on transports with variable message sizes.
    """

    bits: int = 8
    scale: Literal["block", "sample", "tensor"] = "block"
    block: int = BLOCK
    rans: bool = False

    def __post_init__(self) -> None:
        coerce_numeric_fields(self)
        _check_choice("bits", self.bits, (2, 3, 4, 6, 8))
        _check_choice("scale", self.scale, ("block", "sample", "tensor"))
        check_int("block", self.block, 8, 1 << 20)

    def __str__(self) -> str:
        scale = f"block{self.block}" if self.scale == "block" else self.scale
        return f"q{self.bits}-{scale}" + "-rans" * self.rans


@dataclass(frozen=True, slots=True)
class TopK:
    """The largest magnitudes of each sample; all other elements are received as zero.

    Attributes:
        share: share of elements of a sample that is sent, above 0 and at most 1; at least one element.
        values: bits of a value, 16 or 8.
        index: encoding of positions: "bitmap", "rice" gaps, or "auto": gaps for shares up to 3 % if message
            sizes may vary.
    """

    share: float = 0.1
    values: Literal[8, 16] = 8
    index: Literal["auto", "bitmap", "rice"] = "auto"

    def __post_init__(self) -> None:
        coerce_numeric_fields(self)
        object.__setattr__(self, "values", check_int("values", self.values))
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1, got {self.share}")
        _check_choice("values", self.values, (8, 16))
        _check_choice("index", self.index, ("auto", "bitmap", "rice"))

    def __str__(self) -> str:
        return f"top{self.share:g}-v{self.values}-{self.index}"

    @property
    def tries_rice(self) -> bool:
        """True if Rice-coded gaps may be used."""
        return self.index == "rice" or (self.index == "auto" and self.share <= RICE_BELOW)


@dataclass(frozen=True, slots=True)
class Tiled:
    """Tiles with a range each, and more bits for rows with larger values.

    After TAH-Quant (arXiv 2506.01352). A row is the last dimension, such as the activations of one token, if
    it is a multiple of the tile; else each tile is a row.

    Attributes:
        bits: mean bits per code, 2 to 8 in steps of 1/16; each row has 2 to 8.
        tile: elements with a common range and rotation: 16, 64 or 256.
        rotate: multiply tiles by signs and a Hadamard matrix, which spreads outliers over the tile.
    """

    bits: float = 4.0
    tile: int = 64
    rotate: bool = True

    def __post_init__(self) -> None:
        coerce_numeric_fields(self)
        if not 2 <= self.bits <= 8 or 16 * self.bits % 1:
            raise ConfigError(f"bits must be 2 to 8 in steps of 1/16, got {self.bits}")
        _check_choice("tile", self.tile, (16, 64, 256))

    def __str__(self) -> str:
        return f"t{self.bits:g}-tile{self.tile}" + "-plain" * (not self.rotate)


Codec = Raw | Uniform | TopK | Tiled
CODECS: Final = (Raw, Uniform, TopK, Tiled)  # in the order of their ids: spec/08-wire.md#codecs


def _codec_record(codec: Codec) -> dict[str, Any]:
    return {"codec": type(codec).__name__.lower()} | dataclasses.asdict(codec)


def _codec_of(record: Mapping[str, Any]) -> Codec:
    """Convert the record of `_codec_record` to the codec.

    Raises:
        ConfigError: unknown codec or invalid settings.
    """
    fields = dict(record)
    name, kinds = str(fields.pop("codec", None)), {kind.__name__.lower(): kind for kind in CODECS}
    if name not in kinds:
        raise ConfigError(f"codec {name!r} is not one of {', '.join(kinds)}")
    try:
        return kinds[name](**fields)
    except TypeError as error:
        raise ConfigError(f"codec {name}: {error}") from None


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A codec for one dtype and shape, with all sizes of its messages."""

    requested: Codec  # codec of the policy
    codec: Codec  # codec in use: raw for integers, small tensors, and if it would save little
    dtype: DType
    shape: tuple[int, ...]
    reuse: bool = False  # TopK values at positions that the other direction sent

    @property
    def n(self) -> int:
        """Elements of the tensor."""
        return n_elements(self.shape)

    @property
    def n_samples(self) -> int:
        """Size of the first dimension."""
        return self.shape[0] if len(self.shape) > 1 and self.n else 1

    @property
    def kind(self) -> int:
        """The number of the float type in the kernels."""
        return FLOAT_KINDS[self.dtype.name]

    @property
    def largest(self) -> float:
        """Largest finite value of the dtype."""
        return LARGEST_F32[self.kind]

    @property
    def raw_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return self.dtype.n_bytes(self.shape)

    @property
    def block(self) -> int:
        """Elements with a common range."""
        codec = self.codec
        if not isinstance(codec, Uniform):
            return BLOCK
        by_scale = {"block": codec.block, "sample": self.n // self.n_samples, "tensor": self.n}
        return by_scale[codec.scale]

    @property
    def k(self) -> int:
        """Values that TopK sends of each sample: the share rounded half up, at least one."""
        assert isinstance(self.codec, TopK)
        size = self.n // self.n_samples
        return min(max(int(self.codec.share * size + 0.5), 1), size)

    @property
    def row(self) -> int:
        """Elements of a row of tiles, which have a common number of bits."""
        assert isinstance(self.codec, Tiled)
        tile = self.codec.tile
        return tile if not self.shape or self.shape[-1] % tile else self.shape[-1]

    @property
    def n_rows(self) -> int:
        """Rows of tiles; the last one is padded with zeros."""
        return -(-self.n // self.row)

    @property
    def n_planes(self) -> int:
        """Bit planes of all rows in a message."""
        assert isinstance(self.codec, Tiled)
        return int(self.codec.bits * self.n_rows)

    @property
    def count(self) -> int:
        """Blocks, values of TopK, or tiles: the header's `count`."""
        codec = self.codec
        if isinstance(codec, Tiled):
            return self.n_rows * self.row // codec.tile
        if isinstance(codec, TopK):
            return self.k * self.n_samples
        return -(-self.n // self.block) if isinstance(codec, Uniform) else 0

    @property
    def cap(self) -> int:
        """Largest size of a message in bytes, with its header; the exact size with `fixed`."""
        return HEADER_BYTES + self.payload_cap

    @property
    def payload_cap(self) -> int:
        """Largest size of a payload in bytes."""
        codec = self.codec
        if isinstance(codec, Uniform):
            return self._blocks_bytes(self.n, self.block, codec.bits)
        if isinstance(codec, TopK):
            bitmap = 0 if self.reuse else padded((self.n + 7) // 8)
            is_short = codec.values == 8
            return bitmap + (self._blocks_bytes(self.count, BLOCK, 8) if is_short else padded(2 * self.count))
        if isinstance(codec, Tiled):
            planes = self.n_planes * self.row // 8
            return padded(2 + self.count) + padded((self.n_rows + 1) // 2) + padded(planes)
        return padded(self.raw_bytes)

    @staticmethod
    def _blocks_bytes(n: int, block: int, bits: int) -> int:
        return padded(4 * math.ceil(n / block)) + padded((n * bits + 7) // 8)

    @property
    def id(self) -> int:
        """Hash of the plan, which must be equal at both ends."""
        text = f"{self.requested}|{self.codec}|{self.dtype.name}|{list(self.shape)}|{self.reuse}"
        return xxh64(text.encode()) & 0xFFFFFFFF

    @property
    def codec_id(self) -> int:
        """Id of the codec in use."""
        return CODECS.index(type(self.codec))

    @property
    def param(self) -> int:
        """Bits of a code or a value; 1/16 bits of tiles."""
        codec = self.codec
        if isinstance(codec, Tiled):
            return int(16 * codec.bits)
        return codec.bits if isinstance(codec, Uniform) else codec.values if isinstance(codec, TopK) else 0


def plan_of(
    codec: Codec,
    dtype: DType,
    shape: tuple[int, ...],
    *,
    reuse: bool = False,
    min_elements: int = MIN_ELEMENTS,
) -> TensorPlan:
    """Make the plan of a codec for one tensor.

    Args:
        codec: the requested codec.
        dtype: of the tensor.
        shape: of the tensor.
        reuse: send TopK values at the positions that the other direction sent.
        min_elements: smaller tensors are sent raw.

    Raises:
        ConfigError: the message would exceed 4 GiB.
    """
    plan = TensorPlan(codec, codec, dtype, tuple(shape), reuse and isinstance(codec, TopK))
    lossy = dtype.name in FLOAT_KINDS and plan.n >= min_elements
    if not lossy or plan.payload_cap >= RAW_SHARE * plan.raw_bytes:
        plan = TensorPlan(codec, RAW, dtype, tuple(shape))
    if plan.cap > MAX_BYTES:
        raise ConfigError(f"a message of {plan.cap} bytes exceeds 4 GiB: split the tensor along dimension 0")
    return plan


METADATA_KEY: Final = "ckptz.wire.policy"
Feedback = Literal["ef", "ef21", "ef-mixed", "aqsgd"]
FEEDBACKS: Final = get_args(Feedback)


class PolicyWarning(UserWarning):
    """A model is used with an unsuitable link policy, given the policy that it was trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPolicy:
    """Codecs, error feedback and rounding of the tensors on a link.

    Attributes:
        forward: codec of activations.
        backward: codec of gradients.
        feedback: "ef" or "ef21" in both directions, "aqsgd" forward only, or None; a pair sets each direction
            separately. "ef-mixed" can only be received.
        reuse: send gradients at the TopK positions of the activation, so that no positions are sent back.
        rounding: "nearest" or "stochastic"; stochastic is unbiased, for gradients of 2 or 3 bits.
        eval: compression at inference: "same", "raw" for none, or "auto": "raw" with EF21 or AQ-SGD.
        warmup_steps: number of first steps that are sent raw.
        seed: seed of stochastic rounding.
        ef_decay: share of the old error in the new error of "ef", at least 0 and below 1.
        ef_reset: number of messages after which "ef" resets its error; 0 for never.
        min_elements: smaller tensors are sent raw, with a header of 64 bytes.
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
    min_elements: int = MIN_ELEMENTS

    def __post_init__(self) -> None:
        coerce_numeric_fields(self)
        for name in ("forward", "backward"):
            if not isinstance(getattr(self, name), Codec):
                raise ConfigError(f"{name} must be a codec such as Uniform(8), got {getattr(self, name)!r}")
        _check_choice("rounding", self.rounding, ("nearest", "stochastic"))
        _check_choice("eval", self.eval, ("auto", "same", "raw"))
        if self.warmup_steps < 0 or self.ef_reset < 0 or not 0 <= self.ef_decay < 1:
            raise ConfigError("warmup_steps and ef_reset must be at least 0, ef_decay 0 to below 1")
        check_int("min_elements", self.min_elements, 1)
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
                raise ConfigError("aqsgd keeps activations of samples; use it for the forward direction only")

    @property
    def has_memory(self) -> bool:
        """Return whether values depend on earlier messages or on their number."""
        has_feedback = any(self.feedback_of(direction) is not None for direction in Direction)
        return has_feedback or self.rounding == "stochastic" or self.warmup_steps > 0

    def codec(self, direction: Direction) -> Codec:
        """Return the codec of a direction."""
        return self.forward if direction is Direction.FORWARD else self.backward

    def feedback_of(self, direction: Direction) -> Feedback | None:
        """Return the feedback of a direction."""
        if isinstance(self.feedback, tuple):
            return self.feedback[direction]
        if self.feedback == "aqsgd" and direction is Direction.BACKWARD:
            return None
        return self.feedback

    @property
    def compresses_eval(self) -> bool:
        """True if messages are compressed at inference too."""
        if self.eval != "auto":
            return self.eval == "same"
        return self.feedback_of(Direction.FORWARD) not in ("ef21", "aqsgd")

    def plan(
        self, direction: Direction, dtype: DType, shape: tuple[int, ...], *, raw: bool = False
    ) -> TensorPlan:
        """Make the plan of a direction for a tensor; `raw` for warm-up and uncompressed inference."""
        if raw:
            return plan_of(RAW, dtype, shape)
        reuse = self.reuse and direction is Direction.BACKWARD
        if reuse:  # only if the activation's plan sends positions
            forward = plan_of(self.forward, dtype, shape, min_elements=self.min_elements)
            reuse = isinstance(forward.codec, TopK)
        return plan_of(self.codec(direction), dtype, shape, reuse=reuse, min_elements=self.min_elements)

    def to_json(self) -> str:
        """Serialize the policy to JSON, for metadata."""
        record: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name in ("forward", "backward"):
            record[name] = _codec_record(record[name])
        for name in ("ef_decay", "ef_reset", "min_elements"):
            if record[name] == type(self).__dataclass_fields__[name].default:
                del record[name]  # added later; the text, and so the hash, of older policies stays the same
        return json.dumps(record, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> LinkPolicy:
        """Parse the JSON of `to_json`.

        Raises:
            ConfigError: the text is not a policy.
        """
        try:
            record = json.loads(text)
            for name in ("forward", "backward"):
                record[name] = _codec_of(record[name])
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
        """32-bit hash of the policy."""
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
    """Return a policy, or the preset with this name.

    Raises:
        ConfigError: no such preset.
    """
    if isinstance(policy, LinkPolicy):
        return policy
    if not isinstance(policy, str) or policy not in PRESETS:
        raise ConfigError(f"policy {policy!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[policy]


def policy_metadata(policy: LinkPolicy | str) -> dict[str, str]:
    """Return the policy as metadata: `save_file(tensors, path, metadata=policy_metadata(policy))`."""
    return {METADATA_KEY: policy_of(policy).to_json()}


def check_policy(
    metadata: Mapping[str, str] | None, policy: LinkPolicy | str | None = None
) -> LinkPolicy | None:
    """Return the policy that a checkpoint was trained with, or None; warn if the new one is unsuitable.

    Args:
        metadata: metadata of the checkpoint, `safe_open(path).metadata()`.
        policy: the policy that the model will be used with, None for no compression.
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
    """Return the reason why a policy is unsuitable for a model, or None."""
    compressed = used.compresses_eval and used.codec(Direction.FORWARD) != RAW
    feedback = trained.feedback_of(Direction.FORWARD)
    if feedback in ("ef21", "aqsgd"):
        if compressed:
            return f"trained with {trained}: its feedback state is missing at inference; disable compression"
        return None
    share = _share(trained.forward)
    if share and (not compressed or _share(used.forward) != share):
        return (
            f"trained with {trained}: the layers after each link have only seen the largest {share:.0%} of "
            "activations, and lose accuracy on complete ones; load with the same policy, or train with EF21"
        )
    return None
