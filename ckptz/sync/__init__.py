"""Weight sync: a trainer publishes what changed, and any number of inference engines follow.

    from ckptz.sync import Publisher, Follower

    Publisher("run/weights").publish(model.state_dict(), step)       # the trainer, after every step
    Follower("run/weights").apply_to(model.state_dict())             # an engine, whenever it likes

The folder is all that they share: a path, or an fsspec URL. See docs/weight-sync.md.
"""

from __future__ import annotations

from ckptz.sync.follower import Follower, Update
from ckptz.sync.publisher import Publisher, PublishReport

__all__ = ["Follower", "PublishReport", "Publisher", "Update"]
