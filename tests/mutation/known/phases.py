"""Defects of a training in phases, and of any of our LR schedules: a step off, or something forgotten at a switch."""

from . import Known

KNOWN = (
    Known("LR, batch and length of a phase come with its second step", "optim.schedules.phases",
          "        if step < phase.steps:", "        if step <= phase.steps:", "tests/optim/test_schedules.py -k every_step"),
    Known("every step but the first uses the LR of the one before", "optim.schedules.lr_rules",
          "        if step < self.warmup_steps:\n", "        step = max(step - 1, 0)\n        if step < self.warmup_steps:\n",
          "tests/optim/test_schedules.py -k every_step"),
    Known("all phases have the batch of the first one", "optim.schedules.mixed_batch",
          "    engine.set_train_batch_size(batch_size)\n",
          '    batch_size = engine.__dict__.setdefault("_first_batch", batch_size) // micro_batch_size * micro_batch_size\n'
          "    engine.set_train_batch_size(batch_size)\n", "tests/optim/test_mixed_batch_engine.py -k every_step"),
    Known("all phases have sequences as long as in the first one", "optim.schedules.mixed_batch",
          "            dataset.set_seq_length(self.phase.seq_length)",
          "            dataset.set_seq_length(self.phases[0].seq_length)", "tests/optim/test_mixed_batch_engine.py -k own"),
    Known("at a switch the samples of the epoch come again from the first on", "optim.schedules.training_loader",
          "        if self._started:\n            self._read_on()\n\n    def seek",
          "        if self._started:\n            self.delivered = 0\n            self._read_on()\n\n    def seek",
          "tests/optim/test_schedules.py -k read_ahead"),
    Known("a run that goes on from a checkpoint has the LR of a first step", "optim.schedules.lr_rules",
          '        self.steps_taken = int(state["steps_taken"])', "        self.steps_taken = 0",
          "tests/optim/test_schedules.py -k resumed"),
)  # fmt: skip
