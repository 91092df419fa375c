"""Defects with which FusedLamb still trains: mostly trust ratios of something that is no whole layer."""

from . import Known

_SHARDED, _ENGINES = "tests/optim/test_lamb_sharded.py -k", "tests/optim/test_deepspeed_engines.py -k test_plain_engines"

KNOWN = (
    Known("norms are not summed over tensor-parallel ranks", "optim.sharding", "_by_group([self.tensor_group] * len(layers))",
          "_by_group([])", f"{_SHARDED} tensor"),
    Known("norms are not summed over the ranks that ZeRO cuts a layer over", "optim.sharding",
          "        data = _by_group([layer.data_group for layer in layers])", "        data = []", _ENGINES),
    Known("all layers of a flat buffer have one trust ratio", "optim.op.segments",
          "        self.segments[:, LAYER] = self.layer\n",
          "        first = [self.layer[self.tensor == tensor].min() for tensor in self.tensor]\n"
          "        self.segments[:, LAYER] = self.layer = np.array(first, dtype=np.int64)\n", _ENGINES),
    Known("queries, keys and values are one layer in spite of split_qkv", "optim.op.segments",
          "    if pattern is None:\n        yield", "    if True:\n        yield",
          "tests/optim/test_lamb_numbers.py -k fused_attention"),
    Known("each rank clips by the norm of what it has of the gradients", "optim.op.device_table",
          "        self.control[SQUARES:] = found[:2].to(self.device)",
          "        self.control[FOUND_INF] = found[1].to(self.device)", f"{_SHARDED} clipped"),
    Known("tied and replicated gradients are in the norm as often as there are copies", "optim.sharding",
          "[is_counted(parameter, tensor_rank) for parameter in parameters]", "[True] * len(parameters)", f"{_SHARDED} clipped"),
    Known("a step with nan or inf in a gradient is made", "optim.op.device_table",
          "            self.op.square_sum(self.tables, control)",
          "            self.op.square_sum(self.tables, control)\n            control[FOUND_INF] = 0",
          "tests/optim/test_lamb_state.py -k bad_gradient"),
    Known("a first step counts though all gradients are zero", "optim.op.device_table",
          "        return self._rules.has_started if self._started is None else bool(self._started > 0)",
          "        return True", "tests/optim/test_lamb_state.py -k priming"),
    Known("biases and norms decay in spite of exclude", "optim.modes",
          '    decay = 0.0 if excluded else float(group["weight_decay"])', '    decay = float(group["weight_decay"])',
          "tests/optim/test_lamb_numbers.py -k excluded"),
    Known("biases and norms have a trust ratio in spite of exclude", "optim.modes", "    adapts = not excluded and (",
          "    adapts = (", "tests/optim/test_lamb_numbers.py -k excluded"),
    Known("loaded moments are corrected as if they were new", "optim.lamb", "            self.state[parameter].update(values)",
          "            self.state[parameter].update(values, step=0)", "tests/optim/test_lamb_state.py -k goes_on"),
    Known("each pipeline stage and tensor-parallel rank clips by the norm of its own gradients", "clipping",
          "        dist.all_reduce(squares, group=mpu.get_model_parallel_group())",
          "        dist.all_reduce(squares.clone(), group=mpu.get_model_parallel_group())",
          "tests/optim/test_deepspeed_engines.py -k test_pipelines"),
)  # fmt: skip
