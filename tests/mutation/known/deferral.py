"""Defects of weight gradients that wait, and modules that are left changed."""

from . import Known

_EMBEDDING = "tests/pipeline/test_weight_gradients.py -k embedding"

KNOWN = (
    Known("the end of one stage rounds the sums of others", "pipeline.operators.gradient_sums",
          "        for parameter in parameters:  # one", "        for parameter in [*parameters, *self._sums]:  # one",
          "tests/pipeline/test_gradient_sums.py"),
    Known("an embedding's gradient left out", "pipeline.operators.weight_gradients", "return [make(gradient, indices",
          "return [0 * make(gradient, indices", _EMBEDDING),
    Known("an embedding's gradient made twice", "pipeline.operators.weight_gradients",
          "return [make(gradient, indices", "return [2 * make(gradient, indices", _EMBEDDING),
    Known("an embedding's gradient of the last slice", "pipeline.operators.weight_gradients",
          "for each in zip(*operands, strict=True))", "for each in zip(*operands[:1], strict=True))", _EMBEDDING),
    Known("a copy bound to the original", "pipeline.operators.interception",
          "module.__dict__[method] = MethodType(function, module)",
          "module.__dict__[method] = lambda *args, **kwargs: function(module, *args, **kwargs)",
          "tests/pipeline/test_interception.py -k 'copy and deepcopy'"),
    Known("an attribute left behind", "pipeline.operators.interception", "            del module.__dict__[method]\n",
          "            pass\n", "tests/pipeline/test_interception.py -k closed_it_leaves"),
)  # fmt: skip
