"""Ways in which a token pipeline can be wrong and still run to its end."""

from . import Known

_TAKEN = "_add(sums, kept.take(first_slice))"

KNOWN = (
    Known("a user's observers are not called", "pipeline.training", "engine._replicas, *engine.observers,",
          "engine._replicas,", "tests/pipeline/test_set_slices.py"),
    Known("garbage is collected in a watched step", "pipeline.recording.accounting", "            gc.collect()",
          "            pass", "tests/pipeline/test_memory_of_steps.py -k garbage"),
    Known("attention ignores earlier slices", "pipeline.operators.attention", "        state.write(k, v, span)\n",
          "        state.write(k, v, span)\n        first = span.start\n", "tests/pipeline/test_attention.py"),
    Known("dK and dV of later slices dropped", "pipeline.operators.buffers",
          "first).add_(dk)\n            self._dv.narrow(2, first, stop - first).add_(dv)\n",
          "first).copy_(dk)\n            self._dv.narrow(2, first, stop - first).copy_(dv)\n",
          "tests/pipeline/test_attention.py"),
    Known("learned positions of slice 0", "pipeline.batch", "        return part_of(value, cuts, span)\n",
          "        tokens, positions = part_of(value, cuts, span)\n        return tokens, positions - span.start\n",
          "tests/pipeline/test_runtime.py"),
    Known("rotary positions of slice 0", "megatron.layers", "span.start if span else 0", "0",
          "tests/megatron/test_layers.py -k rotary"),
    Known("labels of the neighbouring slice", "pipeline.loss", "        span = self._spans[len(self._terms)]\n        labels =",
          "        span = self._spans[len(self._terms)]\n"
          "        start = min(self._spans[len(self._terms) - 1].start, span.total - span.length)\n"
          "        span = Span(start, start + span.length, span.total)\n        labels =",
          "tests/rows/test_rows.py -k per-token"),
    Known("a denominator per slice", "pipeline.loss", "/ self._weight ",
          "/ self._loss_fn.token_weight(labels) / len(self._spans) ", "tests/rows/test_rows.py -k per-token"),
    Known("a weight gradient left out", "pipeline.operators.weight_gradients", _TAKEN,
          "_add(sums, [(p, 0 * g) for p, g in kept.take(first_slice)] if kept is layers[0] else kept.take(first_slice))",
          "tests/pipeline/test_weight_gradients.py"),
    Known("a weight gradient counted twice", "pipeline.operators.weight_gradients", _TAKEN,
          "_add(sums, kept.take(first_slice) * (2 if kept is layers[0] else 1))", "tests/pipeline/test_weight_gradients.py"),
    Known("a tied gradient not reduced", "pipeline.training", "        reduce_tied(engine, engine._exec_reduce_tied_grads)\n",
          "        pass\n", "tests/pipeline/test_engine_layers.py -k checkpointed"),
    Known("a tied gradient is reduced before the first stage has added to it", "pipeline.replicas",
          "{id(weight) for weight, _ in module.get_tied_weights_and_groups()}", "set()", "tests/rows -k DP2"),
    Known("a destroyed engine holds the replicas' group", "pipeline.replicas", "self._connected = True",
          "self._connected = dp_group", "tests/pipeline/test_close.py"),
    Known("a gradient sent for the wrong unit", "pipeline.transport.p2p",
          '        sender.send(unit, gradients, f"gradients of {unit}")\n',
          "        sent, shapes = vars(self).setdefault('sent', {}), (stage, *(t.shape for t in gradients))\n"
          "        gradients, sent[shapes] = sent.get(shapes, gradients), gradients\n"
          '        sender.send(unit, gradients, f"gradients of {unit}")\n', "tests/rows/test_rows.py -k PP2+"),
    Known("a stage hands its inputs on", "pipeline.runtime", "_handed_over(outputs)\n", "_handed_over(inputs)\n",
          "tests/rows/test_rows.py -k placement:v"),
    Known("a layer stays on its old place", "elastic.moves.layers", "    for name in list(module.fwd_map):\n",
          "    for name in list(module.fwd_map)[1:]:\n", "tests/pipeline/test_placing.py -k their_places"),
    Known("two receives are posted ahead", "schedule.channels", "POSTED_AHEAD = 1\n", "POSTED_AHEAD = 2\n",
          "tests/schedule/test_hardware_queue.py"),
    Known("a received buffer is shared by all units", "pipeline.transport.p2p",
          "            message, tensors = new_message(spec, self._device)\n",
          "            message, tensors = vars(self).setdefault('kept', {}).setdefault(spec, new_message(spec, self._device))\n",
          "tests/pipeline/test_links.py"),
    Known("a rank that its device holds is never reported", "pipeline.transport.watchdog",
          "return Waiting(\"its own action\", since) if ended else None", "return None",
          "tests/pipeline/test_watchdog.py -k stands_still_ends"),
    Known("shapes are announced for each length", "pipeline.transport.p2p",
          "        self._known[boundary][key if follows else (key, span)] = spec\n",
          "        self._known[boundary][key, span] = spec\n", "tests/pipeline/test_engine_data.py -k lengths"),
    Known("tensors of a message overlap", "pipeline.transport.boundary", "    return [0, *accumulate(sizes)]\n",
          "    return [0, *accumulate(size // 2 for size in sizes[:-1]), sum(sizes)]\n", "tests/pipeline/test_links.py"),
)  # fmt: skip
