"""Numbers and names as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")

ROLES: Final = {
    "weight": "weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "factor": "factored second moments",
    "momentum": "momentum",
    "other": "the rest",
}
CODERS: Final = {
    "constant": "one value, nothing to store",
    "stored": "bytes as they are",
    "zstd": "Zstandard, a general compressor",
    "rans-shared": "frequent codes get short bits (rANS, table shared)",
    "rans-own": "frequent codes get short bits (rANS, own table)",
    "sparse": "only what differs from the most frequent code",
}
PREDICTORS: Final = {
    "zero": "by itself",
    "base": "as the change since the base",
    "outer": "as the change from a product of two vectors",
}
MODES: Final = {
    "raw": "exact, byte by byte",
    "rotated": "exact, sign and exponent apart",
    "xor": "exact, bits that changed",
    "difference": "exact, difference of bit patterns",
    "linear": "rounded to a table of values",
    "bits": "rounded to a table of bit patterns",
}
KINDS: Final = {
    "anchor": "stands alone (anchor)",
    "delta": "changes since another file (delta)",
    "exact": "what a lossy file loses (residual)",
    "rebased": "delta that carries its bases",
    "plain": "plain safetensors file",
    "missing": "missing base",
    "broken": "cannot be read",
}
METRICS: Final = {"steps_lost": "steps of training lost"}
PROMISES: Final = {"resume-gap": "resumed"}


def printable(text: str) -> str:
    """Write control characters, and what else does not print, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(n_bytes: float) -> str:
    """Write a number of bytes in decimal units."""
    for unit in UNITS[:-1]:
        if n_bytes < 999.5:
            return f"{n_bytes:.3g} {unit}" if unit != "B" else f"{n_bytes:.0f} B"
        n_bytes /= 1000
    return f"{n_bytes:.4g} {UNITS[-1]}"


def ratio(stored_bytes: int, tensor_bytes: int) -> str:
    """Write stored size by decoded size, in bytes, with both named."""
    if not tensor_bytes:
        return "no tensor bytes"
    share = f"{stored_bytes / tensor_bytes:.4f} of raw"
    if f"{stored_bytes / tensor_bytes:.3g}" == "1":
        return f"1.0x, nothing gained, {share}"
    if stored_bytes > tensor_bytes:
        return f"{times(stored_bytes / tensor_bytes)} larger, {share}"
    return f"{times(tensor_bytes / stored_bytes)} smaller, {share}" if stored_bytes else share


def times(factor: float) -> str:
    """Write a ratio with three digits, or as a whole number where that has more."""
    return f"{factor:,.0f}x" if factor >= 1000 else f"{factor:.3g}x"


def cut(text: str, n: int = 100) -> str:
    """Write at most `n` characters of a text that comes from a file, and what does not print as escapes."""
    return printable(text) if len(text) <= n else f"{printable(text[:n])}... ({len(text)} characters)"


def percent(share: float | None) -> str:
    """Write a share as a percentage of three digits; a dash for None."""
    return "–" if share is None else f"{100 * share:.3g} %"


def worse(quality: Mapping[str, Any]) -> float:
    """Give by how much a measured quality is worse than the exact one, in the unit of its budget."""
    if quality["metric"] in METRICS:
        return float(quality["measured"])
    sign = 1.0 if quality["lower_is_better"] else -1.0
    change = sign * (quality["measured"] - quality["exact"])
    return change / abs(quality["exact"]) if quality["is_relative"] and quality["exact"] else change


def amount(quality: Mapping[str, Any], value: float) -> str:
    """Write a change of a quality, as a percentage where its budget is one, or as steps of training."""
    if quality["metric"] in METRICS:
        return f"{value:.3g} steps"
    return f"{100 * value:+.3g} %" if quality["is_relative"] else f"{value:+.4g}"
