"""Hooks for PyTorch training loops that record gradients and layer inputs.

    from ckptz.hooks import Calibration, SensitivityTracker

See docs/hooks.md.
"""

from __future__ import annotations

from ckptz.hooks.calibration import Calibration
from ckptz.hooks.sensitivity import SensitivityTracker

__all__ = ["Calibration", "SensitivityTracker"]
