"""Text for measured qualities, in tables and reports."""

from __future__ import annotations

from typing import Final

from ckptz.format.index import CHANGES, STEPS_LOST, QualityRecord
from ckptz.words import shorten

WORDS: Final = {STEPS_LOST: "steps of training lost"}  # of metrics whose numbers have a unit of their own


def quality_loss(record: QualityRecord) -> float:
    """Return how much worse the measured value is than the exact one, in the unit of the budget."""
    if record.metric in WORDS:
        return record.measured
    change = (1.0 if record.lower_is_better else -1.0) * (record.measured - record.exact)
    return change / abs(record.exact) if record.is_relative and record.exact else change


def metric_name(record: QualityRecord) -> str:
    """Return the name of a metric for people, with "(resumed)" for metrics of resumed training."""
    if CHANGES in record.metric:
        metric, _, unit = record.metric.rpartition(CHANGES)
        return f"per-{shorten(unit, 20)} change of {shorten(metric, 40)}"
    resumed = " (resumed)" if record.promise == "resume-gap" else ""
    return WORDS.get(record.metric) or shorten(record.metric, 40) + resumed


def quality_text(record: QualityRecord) -> str:
    """Describe a measured quality with its limit."""
    if record.promise == "rmse":
        measured = f"{record.measured:.4g} (limit {record.max_drop:.4g})"
        return f"quality not measured, {shorten(record.metric, 40)} {measured}"
    if CHANGES in record.metric:
        text = f"{metric_name(record)} {record.measured:.2g} (limit {record.max_drop:.2g})"
        return text if record.is_met else f"{text}, EXCEEDED"
    if record.metric in WORDS:
        text, limit = f"{record.measured:.3g} {metric_name(record)}", f"{record.max_drop:.3g}"
        return f"{text} (limit {limit})" if record.is_met else f"{text} (limit {limit}, EXCEEDED)"
    change, values = quality_loss(record), f"{record.measured:.6g} against {record.exact:.6g}"
    limit = f"{100 * record.max_drop:.4g}%" if record.is_relative else f"{record.max_drop:.4g}"
    if not record.is_met:
        limit += ", EXCEEDED"
    elif abs(change) > record.max_drop * (1 + 1e-6):  # the recorded limit is rounded
        limit += "; too few examples to be sure"
    how = change_text(change, is_relative=record.is_relative)
    return f"{metric_name(record)} {values}, {how} (limit {limit})"


def change_text(change: float, *, is_relative: bool) -> str:
    """Format the change of a quality as "0.5% worse" or "0.5% better"; positive changes are worse."""
    return f"{amount_text(abs(change), is_relative=is_relative)} {'better' if change < 0 else 'worse'}"


def amount_text(value: float, *, is_relative: bool) -> str:
    """Format a change as a percentage, or as a number in the unit of its metric."""
    return f"{value:.2%}" if is_relative else f"{value:.4g}"
