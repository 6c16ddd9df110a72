"""Weight sync: a trainer publishes its weights as deltas, and inference engines apply them.

    from ckptz.sync import Publisher, Follower

    Publisher("run/weights").publish(model.state_dict(), step)       # in the trainer, after every step
    Follower("run/weights").apply_to(model.state_dict())             # in an engine, at any time

They communicate only through the folder, a path or an fsspec URL. See docs/weight-sync.md.
"""

from __future__ import annotations

from ckptz import lazy

try:
    from ckptz.sync.follower import Follower, Update
    from ckptz.sync.publisher import Publisher, PublishReport
except ModuleNotFoundError as error:
    raise lazy.needs_extra(error, "torch") from None

__all__ = ["Follower", "PublishReport", "Publisher", "Update"]
