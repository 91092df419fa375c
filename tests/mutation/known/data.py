"""Defects of ``ds_terapipe prepare-data``."""

from . import Known

KILLED = "tests/megatron/test_data.py -k run_that_is_killed"
BUILDER = "tests/megatron/test_data.py -k files_are_those"

KNOWN = (
    Known("documents of workers are in another order", "commands.preparing.workers", "waiting.append(", "waiting.appendleft(",
          KILLED),
    Known("workers outlive a process that is killed", "commands.preparing.workers",
          "    threading.Thread(target=_end_with_parent, daemon=True).start()\n", "", KILLED),
    Known("an index is there before its tokens", "commands.preparing.dataset",
          "zip(temporary, names, strict=True)", "zip(temporary[::-1], names[::-1], strict=True)", KILLED),
    Known("an old index is beside new tokens", "commands.preparing.dataset", "            os.remove(names[1])\n",
          "            pass\n", KILLED),
    Known("a tokenizer cuts documents", "commands.preparing.tokens", "    found.no_truncation()\n", "", BUILDER),
)  # fmt: skip
