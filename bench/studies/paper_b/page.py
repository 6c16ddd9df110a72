"""The page and the picture of paper_b, made from its table: every figure and verdict is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from bench.core.measure import RESULTS, table

Row = Mapping[str, str]
MARGIN = 0.5  # points of accuracy that count as a difference
NATS = 0.05  # the same for the validation loss


class Table:
    """Cells by task and configuration."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row["task"], row["config"]): row for row in rows}

    def value(self, task: str, config: str, column: str = "on") -> float:
        """A mean; not a number where the row was not run."""
        row = self._rows.get((task, config))
        return float(row[column]) if row else float("nan")

    def drop(self, config: str, column: str = "on", task: str = "digits") -> float:
        """How much worse than without compression: points of accuracy, or nats."""
        sign = -1 if task == "gpt" else 1
        return sign * (self.value(task, "none") - self.value(task, config, column))


def _asymmetry(t: Table) -> tuple[str, str]:
    whole = [t.drop(f"{bits}, whole tensor") for bits in ("fw2-bw8", "fw8-bw2")]
    block = [t.drop(f"{bits}, block") for bits in ("fw2-bw8", "fw8-bw2")]
    gpt = [t.drop(f"{bits}, block", task="gpt") for bits in ("fw2-bw32", "fw32-bw2")]
    random = t.drop("fw32-bw2, block, stochastic", task="gpt")
    where = ["with one range per tensor"] if whole[1] > whole[0] + MARGIN else []
    where += ["with a range per block on digits"] if block[1] > block[0] + MARGIN else []
    where += ["at 2 bits rounded to nearest on the GPT"] if gpt[1] > gpt[0] + NATS else []
    gone = " and reversed by stochastic rounding" if random < gpt[0] - NATS else ""
    verdict = f"shown {', '.join(where)}{gone}" if where else "refuted"
    return verdict, (
        f"Digits, one range per tensor: 2-bit activations lose {whole[0]:.2f} points, 2-bit gradients "
        f"{whole[1]:.2f}. One range per block of 256: {block[0]:.2f} and {block[1]:.2f}. GPT, blocks: 2-bit "
        f"activations lose {gpt[0]:.3f} nats, 2-bit gradients {gpt[1]:.3f} rounded to nearest and "
        f"{random:.3f} rounded stochastically."
    )


def _limit(t: Table) -> tuple[str, str]:
    shares = (50, 30, 20, 10, 5, 2)
    digits = {p: t.drop(f"Top{p}") for p in shares}
    gpt = {p: t.drop(f"Top{p}, index reuse", task="gpt") for p in (50, 30, 20, 10)}
    alone = t.drop("Top10", task="gpt")
    holds = digits[10] < 1 < digits[5] and all(digits[p] < MARGIN for p in (50, 30, 20))
    language = max((p for p, loss in gpt.items() if loss > NATS), default=0)
    verdict = f"{'shown' if holds else 'refuted'} for images; language degrades from {language} % on"
    images = ", ".join(f"{p} % {loss:.2f}" for p, loss in digits.items())
    words = ", ".join(f"{p} % {loss:.3f}" for p, loss in gpt.items())
    return verdict, (
        f"Points lost on digits by TopK with independent positions: {images}. Nats lost on the GPT with "
        f"index reuse: {words}; with independent positions 10 % loses {alone:.3f}."
    )


def _inference(t: Table) -> tuple[str, str]:
    gaps = {p: t.value("digits", f"Top{p}") - t.value("digits", f"Top{p}", "off") for p in (30, 10, 5, 2)}
    gpt = t.value("gpt", "Top10, index reuse", "off") - t.value("gpt", "Top10, index reuse")
    verdict = "shown" if gaps[10] > MARGIN and gaps[2] > gaps[10] else "refuted"
    images = ", ".join(f"{p} % {gap:.2f}" for p, gap in gaps.items())
    return verdict, (
        f"Points lost on digits by leaving the links out at inference: {images}; nats on the GPT with 10 % "
        f"and index reuse: {gpt:.3f}."
    )


def _feedback(t: Table) -> tuple[str, str]:
    parts, numbers = [], {}
    for name in ("Top10", "Top10, EF21", "Top10, EF", "Top10, EF mixed"):
        numbers[name] = (t.value("digits", name), t.value("digits", name, "off"))
        parts.append(f"{name} {numbers[name][0]:.2f} / {numbers[name][1]:.2f}")
    shifted = [t.value("digits shifted", name, c) for name in ("Top10", "Top10, EF21") for c in ("on", "off")]
    plain, exact = numbers["Top10"], t.value("digits", "none")
    words = []
    for name in ("EF21", "EF", "EF mixed"):
        on, off = numbers[f"Top10, {name}"]
        closes = off > exact - 1 and off > plain[1] + MARGIN and on < plain[0] + MARGIN
        words.append(f"{'shown' if closes else 'refuted'} for {name}")
    if shifted[3] < shifted[0] - MARGIN:
        words.append("and on shifted images EF21 costs more than it saves")
    verdict = ", ".join(words)
    return verdict, (
        f"Accuracy on digits with / without links at inference: {'; '.join(parts)}. With shifted images: "
        f"Top10 {shifted[0]:.2f} / {shifted[1]:.2f}, EF21 {shifted[2]:.2f} / {shifted[3]:.2f}."
    )


def _aqsgd(t: Table) -> tuple[str, str]:
    base = t.value("digits shifted", "none")
    losses = {p: base - t.value("digits shifted", f"Top{p}, AQ-SGD", "off") for p in (50, 30, 20, 10)}
    verdict = "shown" if losses[20] > 1 > losses[30] else "partly" if losses[10] > MARGIN else "refuted"
    spread = {p: t.value("digits shifted", f"Top{p}, AQ-SGD", "off +-") for p in losses}
    words = ", ".join(f"{p} % {loss:.2f} +- {spread[p]:.2f}" for p, loss in losses.items())
    on = t.value("digits shifted", "Top10, AQ-SGD")
    return verdict, (
        f"Points lost on shifted digits, links left out at inference: {words}. With the links at inference "
        f"the model trained with 10 % has {on:.2f}: unseen samples have no buffer."
    )


def _adaptive(t: Table) -> tuple[str, str]:
    trios = (
        ("digits", "fw8-bw8, whole tensor", "fw8, bw 8 or 2 adaptive, whole tensor", "fw8-bw2, whole tensor"),
        ("digits", "Top30", "Top30 or Top5, adaptive", "Top5"),
        ("digits", "Top30", "Top30 or Top5, adaptive at 0.5", "Top5"),
        (
            *("gpt", "Top50, index reuse", "Top50 or Top10, index reuse, adaptive at 0.5"),
            "Top10, index reuse",
        ),
    )
    parts, n_better = [], 0
    for task, *trio in trios:
        drops = [t.drop(name, task=task) for name in trio]
        cost = [t.value(task, name, "backward B/elt") for name in trio]
        pairs = zip(trio, drops, cost, strict=True)
        parts.append("; ".join(f"{name} {drop:.2f} at {b:.3f} B" for name, drop, b in pairs))
        share = (cost[1] - cost[2]) / (cost[0] - cost[2])
        between = share * drops[0] + (1 - share) * drops[2]
        n_better += drops[1] < between - (NATS if task == "gpt" else MARGIN)
    verdict = f"better than mixing both levels in {n_better} of {len(trios)} cases"
    return verdict, f"Points or nats lost, and bytes for each element of a gradient: {'. '.join(parts)}."


FINDINGS = (
    ("Gradients need milder compression than activations", _asymmetry),
    ("TopK with 10 % is the strongest that hardly hurts; language degrades from 20 %", _limit),
    ("A model trained with TopK needs TopK at inference", _inference),
    ("EF and EF21 do not improve training but allow inference without compression", _feedback),
    ("AQ-SGD with TopK stronger than 30 % hurts", _aqsgd),
    ("Beyond the paper: an adaptive level (Accordion) against both fixed ones", _adaptive),
)


def write_page(rows: Sequence[Row], seconds: int) -> None:
    """results/paper_b.md: the verdicts, then the table."""
    t = Table(rows)
    out = ["# Compressed links: five findings, re-measured", ""]
    out += [
        "Digits: 1,200 images, small residual network, 12 epochs. GPT: 0.2 M parameters, pretrained on code, "
        "150 steps on English text. Three cuts each. *on* and *off*: compression at inference; accuracy in % "
        "or validation loss in nats, mean over seeds and standard deviation. B/elt: bytes sent for each fp32 "
        f"element (4 raw), headers included. {seconds} s in all on one busy core. The tasks are "
        "small: the verdicts are about these tasks.",
        "",
    ]
    for number, (claim, judge) in enumerate(FINDINGS, 1):
        verdict, words = judge(t)
        out += [f"{number}. **{claim}: {verdict}.** {words}", ""]
    out += ["![accuracy and loss by configuration](paper_b.png)", "", table(rows), ""]
    (RESULTS / "paper_b.md").write_text("\n".join(out))


def write_picture(rows: Sequence[Row]) -> None:
    """results/paper_b.png: TopK with and without links at inference, and bits with both scales."""
    t = Table(rows)
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    shares = (50, 30, 20, 10, 5, 2)
    for column, label in (("on", "links at inference"), ("off", "no links at inference")):
        axes[0].plot(shares, [t.value("digits", f"Top{p}", column) for p in shares], "o-", label=label)
    axes[0].axhline(t.value("digits", "none"), color="grey", ls=":", label="no compression")
    axes[0].set(xscale="log", xlabel="TopK share, %", ylabel="accuracy, %", title="Digits, TopK")
    axes[0].set_xticks(shares, [str(p) for p in shares])
    axes[0].set_xticks([], minor=True)
    axes[0].invert_xaxis()
    names = ("fw4-bw4", "fw2-bw8", "fw8-bw2", "fw2-bw2")
    for offset, scale in ((-0.2, "whole tensor"), (0.2, "block")):
        heights = [t.value("digits", f"{name}, {scale}") for name in names]
        axes[1].bar([i + offset for i in range(len(names))], heights, 0.4, label=f"range per {scale}")
    axes[1].set_xticks(range(len(names)), names)
    axes[1].set(ylabel="accuracy, %", title="Digits, uniform levels")
    labels = ["none", "Top10", "Top10, index reuse", "Top20, index reuse", "fw4-bw32, block"]
    labels += ["fw32-bw4, block", "fw32-bw2, block", "fw32-bw2, block, stochastic"]
    axes[2].barh(labels, [t.value("gpt", name) for name in labels])
    axes[2].set(xlabel="validation loss, nats", title="GPT")
    for axis in axes[:2]:
        axis.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(RESULTS / "paper_b.png", dpi=110)
