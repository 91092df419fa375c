"""Defects of ``ds_terapipe prepare-data``."""

from . import Known

KILLED = "tests/megatron/test_data.py -k run_that_is_killed"

KNOWN = (
    Known("documents of workers are in another order", "commands.preparing.workers", "waiting.append(", "waiting.appendleft(",
          KILLED),
    Known("workers outlive a process that is killed", "commands.preparing.workers",
          "    threading.Thread(target=_end_with_parent, daemon=True).start()\n", "", KILLED),
    Known("an old index is beside new tokens", "commands.preparing.dataset", "            os.remove(names[1])\n",
          "            pass\n", KILLED),
)  # fmt: skip
