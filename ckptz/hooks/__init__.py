"""Hooks for plain PyTorch training loops: they record gradients and the inputs of layers.

    from ckptz.hooks import Calibration, SensitivityTracker

See docs/hooks.md.
"""

from __future__ import annotations

from ckptz.hooks.calibration import Calibration
from ckptz.hooks.sensitivity import SensitivityTracker

__all__ = ["Calibration", "SensitivityTracker"]
