"""Role, parameter and layer type of a tensor, from its name and shape.

The first matching pattern of a table applies; rules of users come first.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Final

from ckptz.errors import ConfigError

ROLES: Final = ("weight", "exp_avg", "exp_avg_sq", "factor", "momentum", "other")
LAYER_TYPES: Final = ("embedding", "attention", "linear", "conv", "norm", "head", "other")
# Names of optimizer state: Adam, AdamW and Lion, RMSprop, SGD and Muon, Adafactor (factors are sums over rows
# and columns of a second moment), bitsandbytes (8-bit codes already). All other state is lossless.
_STATE_ROLES: Final = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "square_avg": "exp_avg_sq",
    "variance": "exp_avg_sq",
    "momentum_buffer": "momentum",
    "exp_avg_sq_row": "factor",
    "exp_avg_sq_col": "factor",
    "row_var": "factor",
    "col_var": "factor",
    "step": "other",
    "max_exp_avg_sq": "other",
    **dict.fromkeys(("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"), "other"),
}
SECOND_MOMENTS: Final = frozenset(name for name, role in _STATE_ROLES.items() if role == "exp_avg_sq")
# Factors of SOAP: its moments are in the basis of these factors, not per element of the parameter.
BASES: Final = frozenset({"GG", "Q"})

# (pattern in the parameter's name, layer type); not part of the format. `inspect` shows the result.
_LAYER_PATTERNS: Final = (
    (r"(^|[._])(lm_head|head|classifier|score|output_projection)([._]|$)", "head"),
    (r"(embed|(^|[._])(wte|wpe|token|position|tok|pos|word_embeddings)([._]|$))", "embedding"),
    (r"(norm|(^|[._])ln(_?\w{1,2})?([._]|$)|bn\d*([._]|$))", "norm"),
    (r"(attn|attention|qkv|(^|[._])([qkvo](_proj)?|query|key|value|out_proj|c_attn)([._]|$))", "attention"),
    (r"(conv|downsample|patch_embed)", "conv"),
)


@dataclass(frozen=True, slots=True)
class Role:
    """Role, parameter and layer type of one tensor."""

    role: str  # one of ROLES
    parameter: str  # name of the parameter
    layer_type: str  # one of LAYER_TYPES


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the user: sets role or layer type, if not None, of names that match the glob `name`."""

    name: str
    role: str | None = None
    layer_type: str | None = None
    pattern: re.Pattern[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for value, known in ((self.role, ROLES), (self.layer_type, LAYER_TYPES)):
            if value is not None and value not in known:
                raise ConfigError(f"role rule {self.name!r}: {value!r} is not one of {', '.join(known)}")
        object.__setattr__(self, "pattern", re.compile(translate(self.name)))


def load_rules(text: str) -> tuple[Rule, ...]:
    """Parse rules from TOML: `[[rule]]` tables with `name` and `role`, `layer_type` or both."""
    try:
        rows = tomllib.loads(text).get("rule", [])
        return tuple(Rule(**row) for row in rows)
    except ConfigError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"roles file: {error}") from None


_WORDS: Final = "|".join(_STATE_ROLES)
_STATE: Final = re.compile(
    rf"(?:optimizer\.)?(?:state\.)?(?:(?P<parameter>.+)\.(?P<word>{_WORDS})|(?P<first>{_WORDS})\.(?P<rest>.+))"
)
_LAYERS: Final = tuple((re.compile(pattern), layer_type) for pattern, layer_type in _LAYER_PATTERNS)


def role_of(name: str, shape: Sequence[int], is_float: bool, rules: Iterable[Rule] = ()) -> Role:
    """Return the role of a tensor by name and shape; rules come first, and integers have role "other"."""
    if match := _STATE.fullmatch(name):
        role = _STATE_ROLES[match["word"] or match["first"]]
        parameter = (match["parameter"] or match["rest"]).removeprefix("model.")
    elif name.startswith("optimizer."):
        role, parameter = "other", name
    else:
        role, parameter = "weight", name.removeprefix("model.")
    role = role if is_float else "other"
    by_shape = "linear" if len(shape) == 2 else "conv" if len(shape) > 2 else "other"
    lowered = parameter.lower()
    layer_type = next((kind for pattern, kind in _LAYERS if pattern.search(lowered)), by_shape)
    for rule in rules:
        if rule.pattern.match(name):
            return Role(rule.role or role, parameter, rule.layer_type or layer_type)
    return Role(role, parameter, layer_type)
