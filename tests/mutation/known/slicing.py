"""Defects of how a micro-batch is cut, and of whose memory a layer gets."""

from . import Known

KNOWN = (
    Known("a slice is one token longer", "pipeline.slicing", "        return self.stop - self.start\n",
          "        return self.stop - self.start + 1\n", "tests/pipeline/test_slicing.py"),
    Known("a layer writes into the user's data", "pipeline.training", "lambda: own(engine._next_batch())",
          "engine._next_batch", "tests/pipeline/test_engine_layers.py -k buffer"),
    Known("slices share the memory that layers write into", "pipeline.slicing",
          "    return part.detach().clone() if shares else part.detach()\n", "    return part.detach()\n",
          "tests/pipeline/test_slicing.py -k writes_into"),
    Known("a layer behind a boundary gets a leaf", "pipeline.slicing",
          "[alias(t) if t.requires_grad else t.detach() for t in as_tuple(value)]", "list(as_tuple(value))",
          "tests/pipeline/test_engine_layers.py"),
)  # fmt: skip
