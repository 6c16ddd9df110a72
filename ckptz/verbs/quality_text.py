"""Measured qualities in words, for tables and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptz.words import shorten

if TYPE_CHECKING:
    from ckptz.format.index import QualityRecord

METRICS: Final = {"steps_lost": "steps of training lost"}
CHANGES: Final = "_changes_by_"  # between a metric and the unit of one of its values


def worse(record: QualityRecord) -> float:
    """Return the loss of quality against the exact value, in the unit of its budget."""
    if record.metric in METRICS:
        return record.measured
    change = (1.0 if record.lower_is_better else -1.0) * (record.measured - record.exact)
    return change / abs(record.exact) if record.is_relative and record.exact else change


def metric_name(record: QualityRecord) -> str:
    """Name a metric as people read it; metrics of resumed training say so."""
    if CHANGES in record.metric:
        metric, _, unit = record.metric.rpartition(CHANGES)
        return f"per-{shorten(unit, 20)} change of {shorten(metric, 40)}"
    resumed = " (resumed)" if record.promise == "resume-gap" else ""
    return METRICS.get(record.metric) or shorten(record.metric, 40) + resumed


def quality_text(record: QualityRecord) -> str:
    """Describe a measured quality with its limit."""
    if record.promise == "rmse":
        measured = f"{record.measured:.4g} (limit {record.max_drop:.4g})"
        return f"quality not measured, {shorten(record.metric, 40)} {measured}"
    if CHANGES in record.metric:
        text = f"{metric_name(record)} {record.measured:.2g} (limit {record.max_drop:.2g})"
        return text if record.is_met else f"{text}, EXCEEDED"
    if record.metric in METRICS:
        text, limit = f"{record.measured:.3g} {metric_name(record)}", f"{record.max_drop:.3g}"
        return f"{text} (limit {limit})" if record.is_met else f"{text} (limit {limit}, EXCEEDED)"
    change, values = worse(record), f"{record.measured:.6g} against {record.exact:.6g}"
    limit = f"{100 * record.max_drop:.4g}%" if record.is_relative else f"{record.max_drop:.4g}"
    if not record.is_met:
        limit += ", EXCEEDED"
    elif abs(change) > record.max_drop * (1 + 1e-6):  # it is rounded
        limit += "; too few examples to be sure"
    how = moved(change, is_relative=record.is_relative)
    return f"{metric_name(record)} {values}, {how} (limit {limit})"


def moved(change: float, *, is_relative: bool) -> str:
    """Format the change of a quality; above 0 is worse."""
    return f"{amount(abs(change), is_relative=is_relative)} {'better' if change < 0 else 'worse'}"


def amount(value: float, *, is_relative: bool) -> str:
    """Write a change as a percentage, or as a number in the unit of its metric."""
    return f"{value:.2%}" if is_relative else f"{value:.4g}"
