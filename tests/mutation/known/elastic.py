"""Defects of a freeze or a change of the shape, which lose or double something."""

from . import Known

_WRAPPED, _LIVE, _MOVES = (f"tests/elastic/test_elastic_{name}.py" for name in ("wrapped", "live", "moves"))

KNOWN = (
    Known("a moment stays behind", "elastic.moves.reshape", "_device), **moments}",
          '_device), **{k: torch.zeros_like(v) if k == "exp_avg" else v for k, v in moments.items()}}',
          f"{_WRAPPED} -k bits"),
    Known("a group's decay is lost", "elastic.moves.reshape",
          "        found.append(first[1])\n    return found\n",
          '        found.append(first[1])\n    return [{**each, "weight_decay": found[0]["weight_decay"]} for each in found]\n',
          f"{_LIVE} -k live_layers"),
    Known("stages of a place stay one on each in another shape", "elastic.moves.start",
          "return places_of(places, engine.token_pipeline, len(ModelChunks(engine.module).specs))",
          "return tuple(range(places))", "tests/elastic/test_elastic_decisions.py -k back"),
    Known("a module keeps the places of its shape before", "elastic.moves.layers", "            vars(module).pop(name, None)\n",
          "            pass\n", "tests/elastic/test_elastic_bits.py -k always"),
    Known("frozen weights decay", "pipeline.training", "        engine._exec_optimizer_step()\n",
          "        engine._exec_optimizer_step()\n" "        group = engine.basic_optimizer.param_groups[0]\n"
          "        for parameter in (p for p in engine.module.parameters() if not p.requires_grad):\n"
          '            parameter.data.mul_(1 - group["lr"] * group["weight_decay"])\n', f"{_LIVE} -k live_layers"),
    Known("a stale copy is trained", "elastic.moves.groups",
          '        group["params"] = [parameter for _, parameter in members]\n',
          '        group["params"] = [nn.Parameter(p.detach().clone()) if name in states else p for name, p in members]\n',
          f"{_LIVE} -k live_layers"),
    Known("a sample is handed over twice", "elastic.redistribute", "first % part, first % part + stop - first",
          "0, stop - first", f"{_MOVES} -k replica"),
    Known("a sample is trained twice at a change of the shape", "elastic.sampler",
          "self.consumed = micro_batch, replicas, replica, consumed\n",
          "self.consumed = micro_batch, replicas, replica, max(consumed - 1, 0)\n",
          "tests/elastic/test_sampler.py -k sequence_of_shapes"),
    Known("what was set on a parameter stays behind", "elastic.moves.transfer",
          "{key: value for key, value in vars(parameter).items() if is_plain(value)}", "{}", f"{_LIVE} -k live_layers"),
    Known("random streams count a replica's own micro-batches", "pipeline.operators.random_streams",
          "        self._step, self._first = step, first_micro_batch\n",
          "        self._step, self._first = step, 0\n", "tests/pipeline/test_random_streams.py -k no_placement_replicas"),
    Known("frozen layers keep their dropout", "elastic.freezing", "                layer.eval()\n",
          "                layer.train()\n", f"{_LIVE} -k live_layers"),
    Known("masters go as what the layers compute with", "elastic.moves.masters",
          "    found[MASTER] = _share(place, place.master)\n",
          "    found[MASTER] = _share(place, place.master.bfloat16().float())\n", f"{_WRAPPED} -k bits"),
    Known("a wrapper that was taken off keeps its tensors", "elastic.moves.masters",
          "            delattr(wrapper, name)\n", "            pass\n", f"{_WRAPPED} -k bucket"),
    Known("a bucket as large as a tensor", "elastic.moves.shares",
          "        room, size = self._memory.view(share.values.dtype), share.shape.numel()\n",
          "        room, size = torch.empty(share.shape.numel(), dtype=share.values.dtype), share.shape.numel()\n",
          f"{_WRAPPED} -k bucket"),
    Known("the loss scale begins again", "elastic.moves.masters", "    for name in _SCALING:\n",
          "    for name in ():\n", f"{_WRAPPED} -k fp16"),
)  # fmt: skip
