"""The k-means method: fits a map to the histogram of a weight; the base's codes may be contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.coded import CodedQuantizer, CodedSource
from ckptz.codec.histogram import RELATIVE_ERROR, Histogram
from ckptz.codec.lossless import EXACT, counts_by_base, exact_with_note
from ckptz.codec.method import (
    MIN_ELEMENTS,
    MOMENTS_FROM,
    SENSITIVITY,
    Method,
    Recipe,
    Setting,
    is_large_weight,
    register,
)
from ckptz.codec.partitions import Cut, Partitions, fit_partitions
from ckptz.codec.quantizer import Quantizer
from ckptz.codec.rounding_rule import (
    LEAST_OF_CLUSTERS,
    SEED_KEY,
    TO_NEAREST,
    RoundingRule,
    choose_rounding,
    deciding_elements,
    is_explained,
)
from ckptz.codec.sensitivity import SensitivityHistogram, floats_of
from ckptz.codec.tensor import (
    GuidedSensitivities,
    MapFunction,
    SideInformation,
    TensorToEncode,
    sensitivities_of,
    summed,
)
from ckptz.codec.tensor_plan import TensorPlan, stream_tables
from ckptz.errors import ConfigError, check_float, check_int
from ckptz.format.context_rules import BaseCode
from ckptz.format.dtypes import DType
from ckptz.format.frequency import entropy_bits
from ckptz.format.plan import Domain, ExplicitTable, Plan, QuantizationMap
from ckptz.format.sources import Patterns, TensorSource
from ckptz.format.values import FLOAT_KINDS
from ckptz.kernels.floats import F32
from ckptz.state.roles import Role

NO_GRADIENT: Final = "has no average of gradients; ranked by magnitude"
BAD_GRADIENT: Final = "has gradients that are not finite, or negative squares; ranked by magnitude"


WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "protect_as": ("exact", "bf16"),
    "prune_by": ("magnitude", "sensitivity"),
    "protect_by": ("magnitude", "sensitivity", "either"),
}


@dataclass(frozen=True, slots=True)
class Clusters(Recipe):
    """Recipe of a weight with k-means levels.

    Attributes:
        partitions: number of levels, and shares to prune and protect.
    """

    partitions: Partitions
    name: ClassVar[str] = "kmeans"

    def settings(self) -> dict[str, Setting]:
        """Return the settings; rankings and roundings only if they are not the default."""
        wanted = self.partitions
        asked: dict[str, Setting] = {
            "levels": wanted.levels,
            "prune": wanted.prune,
            "protect": wanted.protect,
        }
        if wanted.protect_as_bf16:
            asked["protect_as"] = "bf16"
        words = {"prune_by": wanted.prune_by, "protect_by": wanted.protect_by}
        return asked | {name: word for name, word in words.items() if word != "magnitude"}

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan a weight; shares by sensitivity need the gradients of its side information."""
        source, run = tensor.source, tensor.run
        if isinstance(source, CodedSource):
            plan = Plan(quant_map=source.quant_map, domain=Domain.LINEAR)
            return _regrouped(tensor, TensorPlan(plan, CodedQuantizer(source)))
        histogram, kind = tensor.guide.histogram, FLOAT_KINDS[source.dtype.name]
        if histogram is None:
            histogram = summed(run, lambda b: Histogram.of(source.patterns(*b), kind), source)
        if not histogram.is_finite:
            return exact_with_note(tensor, "holds NaN or infinity")
        if (moving := self._moving(tensor, histogram)) is not None:
            return _regrouped(tensor, moving)
        ranked, note = rank(source, tensor.guide, self.partitions, run)
        quant_map, quantizer = _fit(source, histogram, self.partitions, ranked, run)
        plan = Plan(quant_map=quant_map, domain=Domain.LINEAR)
        return _regrouped(tensor, TensorPlan(plan, quantizer, note))

    def _moving(self, tensor: TensorToEncode, histogram: Histogram) -> TensorPlan | None:
        """Plan a weight that was restored from the newest file of its run and trained further; else None.

        Its values are near that file's levels: rounding to the nearest would undo all movement since. The map
        is kept, and values are rounded stochastically to one of the two adjacent levels. The outer levels
        become the outermost values, as values beyond all levels would be rounded with a bias.
        """
        newest, source = tensor.newest or tensor.base, tensor.source
        stored = None if newest is None else newest.stored
        if stored is None or stored.method != self.name or stored.plan.quant_map is None:
            return None
        asked = {name: value for name, value in stored.settings.items() if name != SEED_KEY}
        old = stored.plan.quant_map
        has_escape = old.escape_code is not None
        if asked != self.settings() or old.table.shape[0] > 1 or old.n_codes - has_escape < 2:
            return None
        levels = old.table.expand()[0][: old.escape_code].view(np.float32)
        ceiling = Cut.of(self.partitions.by_magnitude(), histogram).ceiling if has_escape else np.inf
        quantizer = LevelQuantizer(
            levels,
            FLOAT_KINDS[source.dtype.name],
            TO_NEAREST,
            old.escape_code,
            float(ceiling),
            self.partitions.protect_as_bf16,
        )
        assert newest is not None
        old_rule = RoundingRule.of_record(stored, self.name)
        rule = quantizer.choose_rounding(tensor, newest, old_rule)
        if rule is None:
            return None
        values, _ = histogram.occupied()
        levels = _extended(levels, values[np.abs(values) * (1 + RELATIVE_ERROR) <= ceiling])
        entries = old.table.expand().copy()
        entries[0, : len(levels)] = levels.view(np.uint32)
        plan = Plan(
            quant_map=QuantizationMap(
                ExplicitTable(entries), np.zeros(1, np.int64), escape_code=old.escape_code
            ),
            domain=Domain.LINEAR,
        )
        quantizer = replace(quantizer, levels=levels, rounding_rule=rule)
        return TensorPlan(plan, quantizer, recorded=rule.record())


def _extended(levels: NDArray[np.float32], values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return ascending levels [n] whose outer ones are beyond all values [n_values] of a histogram."""
    if not len(values):
        return levels
    margins = np.abs(values) * RELATIVE_ERROR
    low, high = values - margins, values + margins  # bounds of the buckets
    levels = levels.copy()
    if high.min() < levels[0]:  # so that levels of unchanged values stay
        levels[0] = low.min()
    if low.max() > levels[-1]:
        levels[-1] = high.max()
    return levels


@dataclass(frozen=True, slots=True)
class LevelQuantizer(Quantizer):
    """Quantizer that rounds stochastically to one of the two levels adjacent to a value.

    Attributes:
        levels: ascending levels, float32 [n_levels], at least two.
        kind: float type of the patterns.
        rounding_rule: the rule; stochastic in a plan.
        escape_code: code of values that are kept exactly, or None.
        ceiling: magnitude above which values escape.
        keep_as_bf16: whether escaped values are rounded to BF16, stochastically as well.
    """

    levels: NDArray[np.float32]
    kind: int
    rounding_rule: RoundingRule
    escape_code: int | None
    ceiling: float
    keep_as_bf16: bool

    def kept(self, begin: int, patterns: Patterns) -> Patterns:
        if not self.keep_as_bf16 or self.kind != F32:
            return patterns
        thresholds = self.rounding_rule.thresholds(begin, len(patterns))
        low = (thresholds * np.float32(1 << 16)).astype(np.uint32)
        rounded = (patterns + low) & np.uint32(0xFFFF0000)
        is_infinite = (rounded & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
        return np.where(is_infinite, patterns, rounded)

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        values = floats_of(patterns, self.kind)
        below, share = self._places(values)
        upper = self.rounding_rule.thresholds(begin, end - begin) >= np.float32(1) - share
        codes = (below + upper).astype(np.uint8)
        if self.escape_code is not None:
            codes[np.abs(values) > self.ceiling] = self.escape_code
        return codes

    def _places(self, values: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Return the index of the level below each value, and its position from there to the next level."""
        below = np.clip(np.searchsorted(self.levels, values, side="right") - 1, 0, len(self.levels) - 2)
        low, high = self.levels[below], self.levels[below + 1]
        return below, np.clip((values - low) / (high - low), np.float32(0), np.float32(1))

    def choose_rounding(
        self, tensor: TensorToEncode, base: TensorSource, old: RoundingRule
    ) -> RoundingRule | None:
        """Choose the rounding rule from a sample; `old` is the rule of the base's file.

        Returns:
            The rule: `old` if nothing has moved, or stochastic; None to fit new levels.
        """
        source = tensor.source
        movements, shares, thresholds = [], [], []
        for (begin, end), indices in deciding_elements(source, base):
            at = indices - begin
            values, decoded = (floats_of(one.patterns(begin, end)[at], self.kind) for one in (source, base))
            below, share = self._places(values)
            gaps = (self.levels[1:] - self.levels[:-1]).astype(np.float64)[below]
            is_between = (share > 0) & (share < 1)
            movements.append(values.astype(np.float64) - decoded)
            shares.append(np.where(is_between, movements[-1] / gaps, np.nan))
            thresholds.append(old.thresholds(begin, end - begin)[at].astype(np.float64))
        # The movements of all elements, by no gap, do not correlate with thresholds after a restore. Those
        # scaled by the gap on their side would, as elements were rounded more often over the wider gap.
        moved, drawn = np.concatenate(movements), np.concatenate(thresholds)
        if not moved.any():
            return old
        if tensor.was_restored:
            return RoundingRule(tensor.dither_seed())
        if is_explained(moved, drawn):
            return old
        rule = choose_rounding(np.concatenate(shares), None, old, tensor.dither_seed, LEAST_OF_CLUSTERS)
        return rule if rule.is_stochastic else None


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class KMeans(Method):
    """Weights with k-means levels: protect, quantize, prune (Inshrinkerator, arXiv 2306.11800).

    Only floating-point weights of two or more dimensions and `min_elements` elements become lossy;
    everything else stays lossless. There is no limit on the loss of quality: the file records the measured
    errors.

    Attributes:
        levels: number of values of a tensor's elements, 2 to 255.
        embedding_levels: the same for embeddings; by default `levels`.
        prune: share of each tensor, smallest elements first, that becomes zero; 0 to below 1.
        protect: share of each tensor, largest elements first, that is kept; 0 to below 1. Without it, a few
            outliers use most levels: on a sentence encoder, 16 levels keep a cosine of 0.70 to the exact
            embeddings with 0, of 0.95 with 0.005 (14x and 8.9x smaller).
        protect_as: how protected elements are kept, "exact" or "bf16" (rounded to nearest).
        prune_by: ranking for `prune`: "magnitude", or "sensitivity", which is |g*w| with the average gradient
            g. Tensors without gradients are ranked by magnitude. Elements with a gradient of 0 are ranked by
            magnitude among themselves, and the same share of them is pruned.
        protect_by: ranking for `protect`, likewise; "either" keeps the share `protect` by each ranking.
        layer_prune: other prune shares by layer type, for example (("head", 0.0),).
        sigma: weight of frequency against magnitude in the fit, section 4 of the paper.
        min_elements: smaller tensors stay lossless.

    Example:
        >>> from ckptz import KMeans
        >>> KMeans(levels=16, prune=0.1).levels
        16
    """

    levels: int = 16
    embedding_levels: int | None = None
    prune: float = 0.0
    protect: float = 0.005
    protect_as: str = "exact"
    prune_by: str = "magnitude"
    protect_by: str = "magnitude"
    layer_prune: tuple[tuple[str, float], ...] = ()
    sigma: float = 0.2
    min_elements: int = MIN_ELEMENTS

    name: ClassVar[str] = "kmeans"
    reads: ClassVar[frozenset[str]] = frozenset({MOMENTS_FROM, SENSITIVITY})
    fits_whole_tensors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Method.__post_init__(self)
        object.__setattr__(self, "layer_prune", _by_layer(self.layer_prune))
        for levels in (self.levels, self.embedding_levels):
            if levels is not None:
                check_int("levels", levels, 2, 255)
        for name, share in (("prune", self.prune), ("protect", self.protect), *self.layer_prune):
            if not 0 <= share < 1:
                raise ConfigError(f"{name} must be a share from 0 to below 1, got {share}")
            if name != "protect" and share + self.protect >= 1:
                raise ConfigError(f"prune {share} and protect {self.protect} leave nothing to quantize")
        if not 0 <= self.sigma <= 1:
            raise ConfigError(f"sigma must be from 0 to 1, got {self.sigma}")
        self._check_words()

    def _check_words(self) -> None:
        for name, known in WORDS.items():
            if getattr(self, name) not in known:
                words = ", ".join(map(repr, known))
                raise ConfigError(f"{name} must be one of {words}, got {getattr(self, name)!r}")

    def recipe(self, role: Role, dtype: DType, shape: tuple[int, ...]) -> Recipe:
        """Return the recipe: large weights of two or more dimensions become lossy."""
        if not is_large_weight(role, dtype, shape, self.min_elements):
            return EXACT
        levels = self.levels
        if role.layer_type == "embedding" and self.embedding_levels is not None:
            levels = self.embedding_levels
        return Clusters(
            Partitions(
                levels=levels,
                prune=dict(self.layer_prune).get(role.layer_type, self.prune),
                protect=self.protect,
                protect_as_bf16=self.protect_as == "bf16",
                sigma=self.sigma,
                prune_by=self.prune_by,
                protect_by=self.protect_by,
            )
        )

    @property
    def least_elements(self) -> int:
        return self.min_elements

    def for_shards(self) -> Self:
        if {self.prune_by, self.protect_by} != {"magnitude"}:
            raise ConfigError("shards are ranked by magnitude; leave prune_by and protect_by out")
        return replace(self, min_elements=1)


def _by_layer(layer_prune: Any) -> tuple[tuple[str, float], ...]:
    """Convert `layer_prune` to pairs of a layer type and a share.

    Raises:
        ConfigError: it is something else.
    """
    rows = layer_prune if isinstance(layer_prune, list | tuple) else (None,)
    if not all(isinstance(row, list | tuple) and len(row) == 2 for row in rows):
        raise ConfigError(f"layer_prune must be pairs such as (('head', 0.0),), got {layer_prune!r}")
    return tuple(
        (layer_type, check_float(f"layer_prune of {layer_type}", share)) for layer_type, share in rows
    )


def _regrouped(tensor: TensorToEncode, encoding: TensorPlan) -> TensorPlan:
    """Use the base's codes as contexts if it has codes and the result is smaller."""
    source, base, quantizer = tensor.source, tensor.base, encoding.quantizer
    if base is None or base.n_codes is None or quantizer is None:
        return encoding
    counted = counts_by_base(source, base, quantizer, tensor.run)
    if entropy_bits(counted.counts) >= entropy_bits(counted.total[None]):
        return encoding
    old, n = encoding.plan.quant_map, base.n_codes
    assert old is not None
    quant_map = QuantizationMap(old.table, np.zeros(n, np.int64), escape_code=old.escape_code)
    tables = (stream_tables(counted, n),)
    return replace(
        encoding, plan=replace(encoding.plan, quant_map=quant_map, rules=(BaseCode(n),), tables=tables)
    )


@dataclass(frozen=True, slots=True)
class SensitivityRanks:
    """Sensitivities of a tensor and their histogram."""

    sensitivities: GuidedSensitivities
    histogram: SensitivityHistogram


def rank(
    source: TensorSource, guide: SideInformation, wanted: Partitions, run: MapFunction = map
) -> tuple[SensitivityRanks | None, str]:
    """Rank a tensor by sensitivity if a share needs it; with a note if gradients are missing or invalid."""
    if not wanted.needs_sensitivity:
        return None, ""
    sensitivities = sensitivities_of(source, guide)
    if sensitivities is None:
        return None, NO_GRADIENT

    def histogram(bounds: tuple[int, int]) -> SensitivityHistogram:
        patterns = source.patterns(*bounds)
        return SensitivityHistogram.of(sensitivities(*bounds, patterns), patterns, sensitivities.kind)

    ranks = summed(run, histogram, source)
    return (
        (SensitivityRanks(sensitivities, ranks), "")
        if ranks.sensitivities.is_finite
        else (None, BAD_GRADIENT)
    )


def _fit(
    source: TensorSource,
    histogram: Histogram,
    wanted: Partitions,
    ranked: SensitivityRanks | None,
    run: MapFunction,
) -> tuple[QuantizationMap, Quantizer]:
    """Fit the map; values that sensitivity decides are excluded in a second pass."""
    if ranked is None:
        return fit_partitions(histogram, wanted.by_magnitude())
    cut = Cut.of(wanted, histogram, ranked.histogram)

    def left_in(bounds: tuple[int, int]) -> Histogram:
        patterns = source.patterns(*bounds)
        magnitudes = np.abs(floats_of(patterns, histogram.kind))
        stays = cut.by_sensitivity.leaves(ranked.sensitivities(*bounds, patterns), magnitudes)
        return Histogram.of(patterns[stays], histogram.kind)

    left = summed(run, left_in, source)
    return fit_partitions(left, wanted, cut, ranked.sensitivities)
