"""Defects of what the layer list does not say by itself: a loss with a state, shared weights, what is trained, and by whom."""

from . import Known

KNOWN = (
    Known("a loss stays behind", "elastic.moves.reshape", "            values = self._rooms[name][0]\n",
          "            values = self._rooms[name][0].fill_(1.0) if name.startswith(LOSS) else self._rooms[name][0]\n",
          "tests/elastic/test_elastic_outside.py -k loss_that_is_a_module"),
    Known("copies of a shared weight are trained", "pipeline.shared_weights",
          "    found = split(shared, parts, places)\n    if found is None:\n        return\n", "    return\n",
          "tests/pipeline/test_shared_weights.py"),
    Known("requires_grad is not looked at", "pipeline.parameter_groups", "    if not switched:\n        return\n",
          "    return\n", "tests/pipeline/test_frozen.py -k 'by_hand or cannot_train'"),
    Known("a policy's fewer entries change nothing", "elastic.policies.freezer", "        self.frozen = wanted\n",
          "        self.frozen = max(self.frozen, wanted)\n", "tests/elastic/test_freeze.py -k fewer_frozen"),
    Known("frozen parameters stay in their groups", "pipeline.parameter_groups",
          "[each for each, trained in zip(group[key], kept, strict=True) if trained]", "list(group[key])",
          "tests/elastic/test_elastic_moves.py -k empty_group"),
    Known("a tied weight's flat parts are read from both of its stages", "elastic.saved.restore",
          ".setdefault(stage, {})", ".setdefault(0, {})",
          "tests/elastic/test_elastic_elsewhere.py -k 'same_bits and tied'"),
)  # fmt: skip
