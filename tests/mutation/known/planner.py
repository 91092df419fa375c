"""Ways in which ``"slices": "auto"`` can do without the plan that it says it has, or make one that is not the best."""

from . import Known

_CUTTING = "tests/pipeline/test_slice_plan.py -k "
_SLICES = "tests/plan/test_slices.py -k "
_LOOP = "tests/schedule/test_simulate.py -k event_loop"
_AUTO, _PLANNER = "pipeline.autotune.auto", "pipeline.autotune.planner"
_BEGIN, _FOUND = "        return turn.slices\n", "            return None if other else cost\n"
_WINNER = "    return 1 + ratios.index(max(ratios)) if max(ratios, default=0.0) > worse else 0\n"
_SOURCE = "                also = messages.popleft()[1]\n"

KNOWN = (
    Known("filling makes weight gradients twice", "schedule.fill", "            pending.clear()\n", "",
          "tests/schedule/test_orders.py -k golden"),
    Known("filling leaves the last weight gradients out", "schedule.fill", "while self._waiting:\n", "while False:\n",
          "tests/schedule/test_orders.py -k golden"),
    Known("filling knows no limit", "schedule.fill", "self._held + takes > self._limit", "False",
          "tests/schedule/test_orders.py -k filling"),
    Known("weight gradients may come before their backward", "schedule.validate",
          "elif op is Op.WEIGHT_GRADIENTS:\n        yield", "elif op is Op.WEIGHT_GRADIENTS and not unit:\n        yield",
          "tests/schedule/test_validate.py -k damage"),
    Known("messages that lock up one queue are sent at once", "schedule.lower", "if locks_up else lowered",
          "if False else lowered", "tests/schedule/test_orders.py -k every_order"),
    Known("a group leaves its first layer out", "pipeline.stage", "(weight) in layers)", "(weight) in layers[1:])",
          "tests/pipeline/test_auto.py -k given_is_what_runs"),
    Known("a plan's slices are made equal", _AUTO, _BEGIN, "        cut = turn.slices\n"
          "        return cut._replace(slices=cut.slices if isinstance(cut.slices, int) else len(cut.slices))\n", _CUTTING +
          "'planned_is_what_runs and measurements'"),
    Known("a plan's schedule is not used", _AUTO, _BEGIN,
          "        return turn.slices._replace(schedule=self._planner.schedule)\n",
          _CUTTING + "'planned_is_what_runs and plan]'"),
    Known("the engine cuts equally", "pipeline.batch", "slice_lengths(length, few, self",
          "slice_lengths(length, few if isinstance(few, int) else len(few), self",
          "tests/pipeline/test_set_slices.py -k next_step"),
    Known("the engine runs its default schedule", "pipeline.step_grid", "complete(order(schedule,",
          'complete(order(schedule if schedule == FORWARD_ONLY else "1f1b",', "tests/pipeline/test_set_slices.py -k next_step"),
    Known("plan_path is not read", _AUTO, "        if config.plan_path is not None:\n", "        if False:\n",
          _CUTTING + "'planned_is_what_runs and plan]'"),
    Known("a checkpoint's plan is not used", _AUTO, "                self._adopt(plan)\n                self._say(",
          "                self._say(", _CUTTING + "'planned_is_what_runs and checkpoint'"),
    Known("no order is searched on places of several stages without weight gradients", "plan.improve",
          "    if times.placement.is_plain:", "    if True:", "tests/plan/test_choose.py -k placement_and_its"),
    Known("an order by another name is a rival", _PLANNER,
          "times.grid(planned.runs, count) == times.grid(self.schedule, count)", "False", _CUTTING + "best_of_them"),
    Known("measurements of this run are not used", _PLANNER, _FOUND, "            return None\n",
          _CUTTING + "used_again_in_the_same_run"),
    Known("measurements of another run are used", _PLANNER, _FOUND, "            return cost\n",
          _CUTTING + "used_again_in_the_same_run"),
    Known("a plan for another run is used", "pipeline.autotune.run_info", "    if schedule not in (AUTO, plan.schedule):\n",
          "    return None\n    if schedule not in (AUTO, plan.schedule):\n", _CUTTING + "another_run_is_refused"),
    Known("memory_gb is no limit", "pipeline.autotune.memory_limit",
          "        return self._limit / GIGABYTE if given is None and self._limit is not None else given\n",
          "        return None\n", _CUTTING + "too_little_memory"),
    Known("plans that do not fit are chosen", "plan.request",
          "        return max(use.total for use in self.memory_of(schedule, lengths)) <= self.memory_gb * GIGABYTE\n",
          "        return True\n", _CUTTING + "too_little_memory"),
    Known("a plan that disappoints stays", "pipeline.autotune.trials", _WINNER, "    return 0\n", _CUTTING + "rival_wins"),
    Known("a plan gives way to a slower trial", "pipeline.autotune.trials", _WINNER, "    return len(rivals)\n",
          _CUTTING + "rival_wins"),
    Known("the programme gives equal slices", "plan.slices", "    return best\n\n\ndef even_cuts",
          "    each, more = divmod(len(times), len(best.counts))\n"
          "    counts = tuple(each + (i < more) for i in range(len(best.counts)))\n"
          "    own = [float(times[sum(counts[:i]), count - 1]) for i, count in enumerate(counts)]\n"
          "    return Cut(counts, sum(own), max(own))\n\n\ndef even_cuts", _SLICES + "programme_finds"),
    Known("even cuts are equal lengths", "plan.stages",
          "            out[parts] = tuple(b - a for a, b in pairwise(reversed(ends)))\n",
          "            out[parts] = tuple(n // parts + (i < n % parts) for i in range(parts))\n", _SLICES + "even_cuts"),
    Known("the slowest slice is not bounded", "plan.slices",
          "    bound = best.slowest\n", "    return best\n    bound = best.slowest\n", _SLICES + "programme_finds"),
    Known("a receive does not wait for its message", "schedule.replay", _SOURCE,
          "                messages.popleft()\n", _LOOP),
    Known("a message does not wait for the one before it", "schedule.replay",
          "also, last[link] = last[link], node\n", "last[link] = node\n", _LOOP),
    Known("weight gradients take no time", "schedule.replay", "            out.append(duration(action))\n",
          "            out.append(0.0 if op is _W else duration(action))\n", _LOOP),
    Known("weight gradients of some slices take as long as of all", "plan.evaluate",
          "weights[stage] * tokens(action) / total", "weights[stage]", "tests/plan/test_choose.py -k work_of_every"),
    Known("operands are let go with the first of a micro-batch's weight gradients", "plan.costs.memory",
          "sum(self._lengths[index] for index in self._covered[action]) / group.groups", "self._whole",
          "tests/plan/test_choose.py -k operands_of_weight"),
    Known("an order's weight gradients are made a second time", "schedule.lower", "(row, apart - ordered)",
          "(row, apart)", "tests/schedule/test_actions.py -k any_placement"),
    Known("what is before a slice costs nothing", "plan.evaluate",
          "            context = np.array([0, *accumulate(key)][:-1], dtype=float)\n",
          "            context = np.array([0 for _ in accumulate(key)], dtype=float)\n",
          "tests/plan/test_choose.py -k weight_gradients_are_work"),
)  # fmt: skip
