"""The comparison with the oracle finds every known way to get LAMB wrong, on the data that the real tests use.

Each mutant is an oracle that is wrong in one place. The op that passes against the right one must fail against it: then a
wrong op would fail against the right oracle by as much.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from tests.optim import checks

MUTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no clipping": ("paper", {"clip": "off"}),
    "clipping before unscaling": ("paper", {"clip": "scaled"}),
    "correction after the norms": ("paper", {"correction": "step"}),
    "correction before the norms": ("deepspeed", {"correction": "moments"}),
    "no correction": ("paper", {"correction": "none"}),
    "no correction of the step": ("deepspeed", {"correction": "none"}),
    "eps inside the root": ("paper", {"eps_inside_sqrt": True}),
    "eps outside the root": ("eps_inside_sqrt", {"eps_inside_sqrt": False}),
    "decay outside the norm": ("paper", {"decay_in_norm": False}),
    "norm of absolute values": ("paper", {"norm": 1}),
    "gradient not averaged": ("paper", {"grad_averaging": False}),
    "gradient averaged": ("no_averaging", {"grad_averaging": True}),
    "no clamp of the ratio": ("deepspeed_tight", {"min_coeff": 0.0, "max_coeff": math.inf}),
    "ratio clamped below alone": ("deepspeed_tight", {"max_coeff": math.inf}),
    "ratio clamped above alone": ("deepspeed_tight", {"min_coeff": 0.0}),
    "clamp of the ratio on the weight norm": ("deepspeed_tight", {"clamp_weight_norm_by_coeff": True}),
    "clamp of the weight norm on the ratio": (
        "phi",
        {"min_coeff": 0.1, "max_coeff": 0.5, "min_weight_norm": 0.0, "max_weight_norm": math.inf},
    ),
    "no clamp of the weight norm": ("phi", {"min_weight_norm": 0.0, "max_weight_norm": math.inf}),
    "step counted from 0": ("paper", {"step_offset": -1}),
    "step one too many": ("paper", {"step_offset": 1}),
    "step one too many on the step": ("deepspeed", {"step_offset": 1}),
    "norms of a part of the layer": ("paper", {"norm_share": 0.5}),
    "layers without decay adapted": ("apex_without_decay", {"adapt": "all"}),
    "layers without decay not adapted": ("nvlamb", {"adapt": "decayed"}),
    "nothing adapted": ("paper", {"adapt": "none"}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_check_fails_for_a_mutant(mutant: str) -> None:
    name, changes = MUTANTS[mutant]
    variant = checks.BY_NAME[name]
    switches = dataclasses.replace(variant.switches, **changes)
    # Ten steps are enough, and are among those that the real test looks at.
    assert not checks.is_right(checks.worst_errors(variant, "auto", switches, steps=10))


def test_the_check_passes_without_a_mutant() -> None:
    for name in {name for name, _ in MUTANTS.values()}:
        assert checks.is_right(checks.worst_errors(checks.BY_NAME[name], "auto", steps=10))
