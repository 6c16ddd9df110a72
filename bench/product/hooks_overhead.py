"""What the hooks of training cost: a step with and without a SensitivityTracker, and the sums of Calibration.

    python -m bench.product.hooks_overhead [--rounds N]

The steps are those of the demo's GPT with AdamW, in float32. Sums are compared with the same ones in
float64; their error is counted against the damping of 1 % of the mean square that rounding with them
adds. Writes results/hooks_steps.csv, hooks_sums.csv and hooks_overhead.json; about two minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch

from bench.core.measure import interleave, machine, save_rows, timed, verdict
from bench.core.report import finish
from bench.core.tiny_gpt import TinyGPT, batches, loss_of, read_corpus
from ckptz.hooks import Calibration, SensitivityTracker

DAMPING = 0.01
MOST_OVERHEAD = 0.01  # of a training step


class Training:
    """Steps of the demo's model."""

    def __init__(self, data: torch.Tensor, batch: int) -> None:
        torch.manual_seed(0)
        self.model = TinyGPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._batches: Iterator[torch.Tensor] = batches(data, batch=batch, context=128, seed=1)

    def step(self) -> float:
        """Seconds of one step."""
        batch = next(self._batches)

        def run() -> None:
            self.optimizer.zero_grad()
            loss_of(self.model, batch).backward()
            self.optimizer.step()

        return timed(run)


def step_rows(data: torch.Tensor, rounds: int) -> list[dict[str, object]]:
    """A step without a tracker, with one, and what the tracker itself takes of it."""
    rows = []
    for batch in (4, 32):
        plain, tracked = Training(data, batch), Training(data, batch)
        tracker = SensitivityTracker(tracked.model)
        for training in (plain, tracked):
            training.step()

        def update(tracker: SensitivityTracker = tracker, training: Training = tracked) -> float:
            return timed(lambda: tracker._update(training.optimizer))

        times = interleave({"plain": plain.step, "tracked": tracked.step, "update": update}, rounds)
        tracker.remove()
        best = {name: 1000 * timing.best for name, timing in times.items()}
        share = best["update"] / best["plain"]
        rows.append(
            {
                "tokens a step": batch * 128,
                "step, ms": f"{best['plain']:.1f}",
                "with tracker, ms": f"{best['tracked']:.1f}",
                "tracker alone, ms": f"{best['update']:.2f}",
                "tracker / step": f"{share:.2%}",
                "target": f"<= {MOST_OVERHEAD:.0%}",
                "verdict": verdict(share <= MOST_OVERHEAD),
            }
        )
    return rows


def exact_moments(model: TinyGPT, run: Callable[[], None]) -> dict[str, torch.Tensor]:
    """Sums over the inputs of all linear layers, in float64."""
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def add(_: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
            rows = args[0].flatten(0, -2).double()
            sums[name] = rows.T @ rows + sums.get(name, 0)

        return add

    layers = [(name, one) for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers]
    run()
    for handle in handles:
        handle.remove()
    return sums


def sum_rows(data: torch.Tensor) -> list[dict[str, object]]:
    """Errors of float32 sums after few and many batches; the worst layer."""
    training = Training(data, 16)
    for _ in range(20):
        training.step()
    model, rows = training.model.eval(), []
    for n_batches in (4, 64):
        source = batches(data, batch=16, context=128, seed=2)
        tokens = [next(source)[:, :-1] for _ in range(n_batches)]

        def run(tokens: list[torch.Tensor] = tokens) -> None:
            for one in tokens:
                model(one)

        calibration = Calibration(model)

        def record(calibration: Calibration = calibration, run: Callable[[], None] = run) -> None:
            with calibration:
                run()

        with torch.no_grad():
            plain = timed(run)
            exact = exact_moments(model, run)
        seconds = timed(record)
        errors = {name: calibration.moments(name).double() - one for name, one in exact.items()}
        relative = max(float(error.norm() / exact[name].norm()) for name, error in errors.items())
        damped = max(
            float(torch.linalg.matrix_norm(error, 2) / (DAMPING * exact[name].diagonal().mean()))
            for name, error in errors.items()
        )
        rows.append(
            {
                "vectors": n_batches * 16 * 128,
                "forward, s": f"{plain:.2f}",
                "forward and sums, s": f"{seconds:.2f}",
                "relative error": f"{relative:.1e}",
                "error / damping": f"{damped:.1e}",
                "target": "error / damping <= 0.01",
                "verdict": verdict(damped <= 0.01),
            }
        )
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    data, _ = read_corpus()
    save_rows("hooks_steps", step_rows(data, rounds))
    save_rows("hooks_sums", sum_rows(data))
    finish("hooks_overhead", machine(), threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
