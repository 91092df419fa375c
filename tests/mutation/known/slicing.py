"""Defects of how a micro-batch is cut, sent and put together again."""

from . import Known

KNOWN = (
    Known(
        "a slice starts one token early",
        "pipeline.slicing",
        "        return self.stop - self.start\n",
        "        return self.stop - self.start + 1\n",
        "tests/pipeline/test_slicing.py",
    ),
)
