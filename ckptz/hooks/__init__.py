"""Hooks for PyTorch training loops that record gradients and layer inputs.

    from ckptz.hooks import Calibration, SensitivityTracker

See docs/hooks.md.
"""

from __future__ import annotations

from ckptz import lazy

try:
    from ckptz.hooks.calibration import Calibration
    from ckptz.hooks.sensitivity import SensitivityTracker
except ModuleNotFoundError as error:
    raise lazy.needs_extra(error, "torch") from None

__all__ = ["Calibration", "SensitivityTracker"]
