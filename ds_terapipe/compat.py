"""Every private name of DeepSpeed, Megatron, PyTorch and transformers that the package uses, and whether it is there.

A name is written ``module:attribute.path``; ``module:function#name`` stands for a name that the function's code uses,
an attribute that ``__init__`` sets among them. To use another private name, add a line to ``NAMES``; a test asserts
that all of them exist in the versions that are installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any, NamedTuple

from .errors import ConfigError

logger = logging.getLogger(__name__)


class Tested(NamedTuple):
    """A package, the module with its version, and the versions that the tests have run on: from ``first`` on, below ``below``."""

    name: str
    module: str
    first: tuple[int, ...]
    below: tuple[int, ...]

    @property
    def version(self) -> str:
        """The one that is installed."""
        return str(importlib.import_module(self.module).__version__)

    @property
    def holds(self) -> bool:
        """Whether the installed version is one of them."""
        return self.first <= _release(self.version) < self.below

    def texts(self) -> tuple[str, str, str]:
        """The version that is installed, the tested range, and the command that installs one of it."""
        first, below = _dotted(self.first), _dotted(self.below)
        install = f"pip install '{self.name.lower()}>={first},<{below}'"
        return f"{self.name} {self.version}", f"{first} or newer, below {below}", install


DEEPSPEED = Tested("DeepSpeed", "deepspeed", (0, 19, 8), (0, 20))
MEGATRON_CORE = Tested("megatron-core", "megatron.core", (0, 16), (0, 20))
_SAID: set[Tested] = set()  # of which a line has been written in this process


class Name(NamedTuple):
    """A private name, the version that was checked, and its use."""

    path: str
    seen: str
    reason: str
    needed: bool = True
    """False for a name that is only used to refuse objects of it."""

    @property
    def package(self) -> str:
        return self.path.partition(":")[0].partition(".")[0]


_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"
_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_BASE = "deepspeed.runtime.engine:DeepSpeedEngine"
_MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
_GRID = "deepspeed.runtime.pipe.topology:PipelineParallelGrid"
_CORE_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ZERO = "deepspeed.runtime.base_optimizer:ZeROOptimizer"

NAMES: tuple[Name, ...] = (
    Name("deepspeed:initialize", "0.19.8", "register: wrapped"),
    Name(
        "deepspeed:initialize#PipelineEngine",
        "0.19.8",
        "register: the class that initialize looks up and builds, unless another package has wrapped it too",
        needed=False,
    ),
    Name("deepspeed:PipelineEngine", "0.19.8", "register: replaced while initialize runs"),
    Name("deepspeed.runtime.tensor_parallel.init_utils:load_ds_config", "0.19.8", "register: reads ds_config.json"),
    Name("deepspeed.runtime.config_utils:DeepSpeedConfigModel", "0.19.8", "config: base of the keys' models"),
    Name(
        "deepspeed.runtime.config:DeepSpeedConfig._initialize_params#pipeline", "0.19.8", "register: pipe_partitioned"
    ),
    Name("deepspeed.runtime.config:DeepSpeedConfig", "0.19.8", "refusals: reads the configuration once before"),
    Name("deepspeed.runtime.config:DtypeEnum", "0.19.8", "refusals: names of types"),
    Name("deepspeed.utils:logger", "0.19.8", "refusals: silent during that"),
    Name("deepspeed.runtime.constants:GRADIENT_CLIPPING_DEFAULT", "0.19.8", "refusals: is clipping on"),
    Name("deepspeed.runtime.pipe.dualpipev:DualPipeVModule", "0.19.8", "refusals: refused"),
    Name("deepspeed.moe.layer:MoE", "0.19.8", "refusals: refused by the name of its package", needed=False),
    Name(
        "deepspeed.sequence.layer:DistributedAttention",
        "0.19.8",
        "refusals: refused by the name of its package",
        needed=False,
    ),
    Name(f"{_MODULE}.__init__#world_group", "0.19.8", "refusals: findings are exchanged over it"),
    Name(f"{_MODULE}.__init__#local_rank", "0.19.8", "refusals: device of that exchange"),
    Name(
        f"{_MODULE}.__init__#forward_funcs",
        "0.19.8",
        "refusals: layers that are functions; pipeline: layers that are timed",
    ),
    Name(f"{_MODULE}.__init__#_local_start", "0.19.8", "refusals: number of a layer"),
    Name(f"{_MODULE}.get_additional_losses", "0.19.8", "refusals: refused where it returns something"),
    Name("deepspeed.ops.op_builder.builder:OpBuilder.load", "0.19.8", "check: no extension is compiled"),
    Name("deepspeed.comm.torch:build_shm_op", "0.19.8", "check: no ranks to share memory with"),
    Name(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._release_ipg_buffers",
        "0.19.8",
        "check: end of a step",
    ),
    Name(
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer.__init__#fp32_groups_gradients_flat", "0.19.8", "check: sums"
    ),
    Name("torch:UntypedStorage._cdata", "2.13", "storages: identity, of fake tensors too"),
    Name("torch._subclasses.fake_tensor:FakeTensorMode", "2.13", "check: tensors without memory"),
    Name("torch.testing._internal.distributed.fake_pg:FakeStore", "2.13", "check: groups of ranks that are not there"),
    Name(f"{_ENGINE}.__init__#is_pipe_partitioned", "0.19.8", "register: off"),
    Name(f"{_ENGINE}.__init__#is_grad_partitioned", "0.19.8", "register: off"),
    Name(f"{_ENGINE}._exec_reduce_tied_grads", "0.19.8", "engine: end of a step"),
    Name(f"{_ENGINE}._exec_reduce_grads", "0.19.8", "engine: end of a step"),
    Name(f"{_BASE}.allreduce_no_retain", "0.19.8", "engine: end of a step of several replicas"),
    Name(f"{_ENGINE}._exec_optimizer_step", "0.19.8", "engine: end of a step"),
    Name(f"{_ENGINE}._aggregate_total_loss", "0.19.8", "engine: the loss of a step, on all ranks"),
    Name(f"{_ENGINE}.eval_batch#fwd_outputs", "0.19.8", "engine: losses of the micro-batches"),
    Name(f"{_ENGINE}._aggregate_total_loss#total_loss", "0.19.8", "engine: sum of those losses"),
    Name(f"{_ENGINE}._bcast_pipe_scalar", "0.19.8", "engine: eval_batch"),
    Name(f"{_ENGINE}._reduce_outputs", "0.19.8", "engine: eval_batch"),
    Name(f"{_ENGINE}._next_batch", "0.19.8", "engine: reads a micro-batch"),
    Name(f"{_ENGINE}.train_batch#total_additional_losses", "0.19.8", "engine: reset as train_batch does"),
    Name(f"{_ENGINE}.train_batch#agg_train_loss", "0.19.8", "engine: set as train_batch sets it"),
    Name(f"{_BASE}.clip_fp32_gradients", "0.19.8", "clipping: overridden, the true norm"),
    Name(f"{_BASE}._take_model_step#clip_fp32_gradients", "0.19.8", "clipping: where clipping happens"),
    Name(
        f"{_BASE}._take_model_step#_global_grad_norm", "0.19.8", "clipping: the norm that get_global_grad_norm returns"
    ),
    Name(f"{_BASE}.__init__#_running_engine_backward", "0.19.8", "engine: hooks on gradients look at it"),
    Name(f"{_BASE}.__init__#torch_autocast_z0_gradscaler", "0.19.8", "engine: loss scaling"),
    Name("deepspeed.runtime.torch_autocast:autocast_if_enabled", "0.19.8", "engine: around a forward pass"),
    Name("deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.__init__#loss_scale_config", "0.19.8", "engine: fp16"),
    Name(
        "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.__init__#loss_scale_config",
        "0.19.8",
        "engine: the true norm under fp16",
    ),
    Name("deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.step#_global_grad_norm", "0.19.8", "engine"),
    Name("deepspeed.runtime.bf16_optimizer:BF16_Optimizer.clear_lp_grads", "0.19.8", "engine: after a backward pass"),
    Name(f"{_ZERO}.scale_if_loss", "0.19.8", "engine: loss scaling under ZeRO-1"),
    Name(f"{_ZERO}.clear_backward_seen_flag", "0.19.8", "engine: before a backward pass"),
    Name(f"{_ZERO}.enter_backward", "0.19.8", "engine: before a backward pass"),
    Name(f"{_ZERO}.backward_epilogue", "0.19.8", "engine: after a backward pass"),
    Name(f"{_ZERO}.exit_backward", "0.19.8", "engine: after a backward pass"),
    Name(f"{_MODULE}._build", "0.19.8", "elastic: a module of other layers"),
    Name(f"{_MODULE}._set_bounds#_local_stop", "0.19.8", "elastic: which entries are here"),
    Name(f"{_MODULE}._index_tied_modules", "0.19.8", "elastic: groups of tied layers"),
    Name(f"{_MODULE}.__init__#_layer_specs", "0.19.8", "shared_weights, elastic: what builds a layer"),
    Name(f"{_MODULE}.__init__#_topo", "0.19.8", "elastic: the shape"),
    Name(f"{_MODULE}.__init__#fwd_map", "0.19.8", "elastic: names of layers"),
    Name(f"{_MODULE}.__init__#tied_weight_attrs", "0.19.8", "elastic: tied layers"),
    Name(f"{_ENGINE}._build_data_iter", "0.19.8", "elastic: the order of training_data"),
    Name(f"{_BASE}._configure_lr_scheduler", "0.19.8", "elastic: the scheduler stays"),
    Name(f"{_BASE}._broadcast_model", "0.19.8", "elastic: weights stay"),
    Name(f"{_BASE}._do_optimizer_sanity_check", "0.19.8", "engine, elastic: what the optimizer is wrapped in"),
    Name(f"{_ENGINE}.module_state_dict#_curr_ckpt_path", "0.19.8", "loss_state: the folder of a checkpoint"),
    Name(f"{_ENGINE}.load_module_state_dict", "0.19.8", "loss_state: read with the layers"),
    Name(f"{_MODULE}.ckpt_layer_path", "0.19.8", "loss_state: a file like a layer's"),
    Name("deepspeed.checkpoint.utils:clone_tensors_for_torch_save", "0.19.8", "loss_state: as layers are saved"),
    Name(
        "deepspeed.runtime.pipe.module:LayerSpec.__init__#module_args",
        "0.19.8",
        "shared_weights: what a layer is built from",
    ),
    Name(
        "deepspeed.runtime.pipe.module:LayerSpec.__init__#module_kwargs",
        "0.19.8",
        "shared_weights: what a layer is built from",
    ),
    Name(f"{_BASE}._configure_bf16_optimizer", "0.19.8", "elastic: wraps it again"),
    Name(f"{_BASE}._configure_zero_optimizer", "0.19.8", "elastic: wraps it again"),
    Name(f"{_BASE}._configure_fp16_optimizer", "0.19.8", "elastic: wraps it again"),
    Name("deepspeed.runtime.base_optimizer:DeepSpeedOptimizer", "0.19.8", "elastic: what wraps an optimizer"),
    Name("deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.__init__#fp16_groups", "0.19.8", "elastic: masters"),
    Name(
        "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.__init__#fp32_groups_flat", "0.19.8", "elastic: masters"
    ),
    Name(
        "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.__init__#fp16_groups",
        "0.19.8",
        "elastic: masters",
    ),
    Name(
        "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.__init__#fp32_groups",
        "0.19.8",
        "elastic: masters",
    ),
    Name(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__#loss_scaler",
        "0.19.8",
        "elastic: the loss scale goes on",
    ),
    Name(f"{_BASE}.destroy#_python_gc_generation", "0.19.8", "elastic: outlives a reshape"),
    Name(f"{_BASE}._get_ckpt_name", "0.19.8", "elastic: where a checkpoint has an optimizer's state"),
    Name(f"{_BASE}._get_zero_ckpt_name", "0.19.8", "elastic: where a checkpoint has masters and moments"),
    Name(f"{_BASE}.use_node_local_storage", "0.19.8", "checkpoints: who renames"),
    Name("deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine", "0.19.8", "checkpoints: written here and now"),
    Name(f"{_BF16}._setup_for_real_optimizer#_param_slice_mappings", "0.19.8", "saved_files: parts of this model"),
    Name(f"{_ZERO12}.__init__#_param_slice_mappings", "0.19.8", "saved_files: parts of this model"),
    Name("deepspeed.runtime.bf16_optimizer:BF16_Optimizer.__init__#bf16_groups", "0.19.8", "elastic: masters"),
    Name(
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer.__init__#fp32_groups_flat_partition",
        "0.19.8",
        "elastic: masters",
    ),
    Name("deepspeed.runtime.bf16_optimizer:BF16_Optimizer.destroy", "0.19.8", "elastic: masters"),
    Name(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__#bit16_groups",
        "0.19.8",
        "elastic: masters",
    ),
    Name(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__#single_partition_of_fp32_groups",
        "0.19.8",
        "elastic: masters",
    ),
    Name("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.destroy", "0.19.8", "elastic: masters"),
    Name("deepspeed.runtime.pipe.p2p:_grid", "0.19.8", "elastic: of the former shape"),
    Name("deepspeed.monitor.config:get_monitor_config", "0.19.8", "elastic: writers stay"),
    Name(f"{_MODULE}._is_checkpointable", "0.19.8", "layer_range: which layers are checkpointed"),
    Name(f"{_MODULE}.forward#micro_offset", "0.19.8", "layer_range: seeds"),
    Name(f"{_MODULE}.forward#seed_layers", "0.19.8", "layer_range: seeds"),
    Name(f"{_MODULE}.forward#base_seed", "0.19.8", "layer_range: seeds"),
    Name(f"{_MODULE}.forward#seed_fn", "0.19.8", "layer_range: seeds"),
    Name(f"{_MODULE}.forward#activation_checkpoint_func", "0.19.8", "layer_range: checkpoints"),
    Name(f"{_BASE}._configure_optimizer", "0.19.8", "engine: a stage that trains nothing"),
    Name(f"{_BASE}.__init__#param_names", "0.19.8", "engine: a stage that trains nothing"),
    Name(f"{_MODULE}.forward#activation_checkpoint_interval", "0.19.8", "engine, layer_range: is there checkpointing"),
    Name(f"{_MODULE}.forward#curr_layer", "0.19.8", "layer_range: which layer runs"),
    Name(f"{_CHECKPOINTING}:reset", "0.19.8", "stage: after a forward pass without a backward one"),
    Name(f"{_CHECKPOINTING}:CONTIGUOUS_CHECKPOINTING", "0.19.8", "refusals: refused where something is cut"),
    Name(f"{_CHECKPOINTING}:PARTITION_ACTIVATIONS", "0.19.8", "stage: inputs lose their data"),
    Name(f"{_CHECKPOINTING}:CPU_CHECKPOINT", "0.19.8", "stage: inputs lose their data"),
    Name(f"{_CHECKPOINTING}:_CUDA_RNG_STATE_TRACKER", "0.19.8", "random_streams: Megatron-DeepSpeed's random states"),
    Name(
        "deepspeed.runtime.config:DeepSpeedConfig.__init__#_param_dict",
        "0.19.8",
        "engine: set_slices looks at it again",
    ),
    Name(f"{_BASE}.compile#_is_compiled_autograd_enabled", "0.19.8", "engine: has no effect"),
    Name(f"{_MODULE}.compile", "0.19.8", "engine: compiles the layers one by one"),
    Name(f"{_MODULE}._set_bounds", "0.19.8", "megatron: stages of given sizes; elastic: entries of the stages"),
    Name(
        f"{_MODULE}._partition_layers#parts",
        "0.19.8",
        "megatron: stages of given sizes; elastic: entries of the stages",
    ),
    Name(f"{_GRID}.__init__#pipe_groups", "0.19.8", "engine: ranks of each pipeline"),
    Name(f"{_GRID}.__init__#ds_model_proc_group", "0.19.8", "teardown: destroyed"),
    Name(f"{_GRID}.__init__#dp_proc_group", "0.19.8", "teardown: destroyed"),
    Name(f"{_GRID}.__init__#pp_proc_group", "0.19.8", "teardown: destroyed"),
    Name(f"{_GRID}.__init__#slice_proc_group", "0.19.8", "teardown: destroyed"),
    Name(f"{_MODULE}.__init__#_grid", "0.19.8", "teardown: whose groups are destroyed; elastic: the shape"),
    Name("deepspeed.utils.groups:mpu", "0.19.8", "teardown: no longer the grid of a module that is closed"),
    Name(f"{_BASE}.__init__#module_forward_pre_hook", "0.19.8", "teardown: removed"),
    Name(f"{_BASE}.__init__#module_forward_post_hook", "0.19.8", "teardown: removed"),
    Name(f"{_BASE}.__init__#training_dataloader", "0.19.8", "teardown: its workers end"),
    Name(f"{_ENGINE}.__init__#data_iterator", "0.19.8", "teardown: its workers end"),
    Name(f"{_ZERO}.unregister_grad_acc_post_hooks", "0.19.8", "teardown: hooks that keep the engine"),
    Name("deepspeed.monitor.monitor:MonitorMaster.__init__#tb_monitor", "0.19.8", "teardown: its file is closed"),
    Name(f"{_GRID}.stage_to_global", "0.19.8", "engine: rank of a stage"),
    Name("deepspeed.utils.bwc:bwc_tensor_model_parallel_rank", "0.19.8", "clipping: tensor-parallel rank"),
    Name("deepspeed.utils.bwc:bwc_tensor_model_parallel_world_size", "0.19.8", "engine_hooks: are there several"),
    Name("deepspeed.utils.bwc:bwc_tensor_model_parallel_group", "0.19.8", "engine_hooks: tensor-parallel ranks"),
    Name(f"{_GRID}.get_model_parallel_group", "0.19.8", "clipping, engine_hooks: ranks of a replica of the model"),
    Name(f"{_MODULE}._index_tied_modules#ds_pipe_replicated", "0.19.8", "clipping: a tied weight counts once"),
    Name(f"{_MODULE}.get_tied_weights_and_groups", "0.19.8", "engine_hooks: who holds a tied weight"),
    Name(f"{_MODULE}.__init__#tied_comms", "0.19.8", "engine_hooks: tied modules"),
    Name(f"{_ENGINE}._INSTRUCTION_MAP", "0.19.8", "engine_hooks: backward pass of a scaled loss"),
    Name(f"{_ENGINE}._exec_backward_pass#loss", "0.19.8", "engine_hooks: the loss that is scaled"),
    Name(f"{_BASE}.optimizer_name#client_optimizer", "0.19.8", "engine_hooks: the optimizer's name"),
    Name(f"{_BASE}._configure_optimizer#basic_optimizer", "0.19.8", "engine_hooks: the optimizer in the wrapper"),
    Name(f"{_BASE}._configure_lr_scheduler#basic_optimizer", "0.19.8", "json_keys: what the scheduler is made with"),
    Name(f"{_BASE}.__init__#has_moe_layers", "0.19.8", "engine_hooks: refused"),
    Name(f"{_BASE}._take_model_step#overflow", "0.19.8", "engine_hooks: a skipped step"),
    Name(f"{_BASE}.load_checkpoint#_load_zero_checkpoint", "0.19.8", "bf16_parts: bf16 pipelines without ZeRO"),
    Name(f"{_BF16}.get_grads_for_norm", "0.19.8", "clipping: a rank that counts no parameter"),
    Name(f"{_BF16}._restore_from_bit16_weights", "0.19.8", "bf16_parts: bf16 pipelines without ZeRO"),
    Name(f"{_BF16}._setup_for_real_optimizer#fp32_groups_gradients_flat", "0.19.8", "clipping: its device"),
    Name(f"{_ZERO12}.__init__#check_grad_overflow", "0.19.8", "engine_hooks: on, or bf16 trains on after a nan"),
    Name("deepspeed.utils.mixed_precision_linkage:_init_lp_to_hp_mapping#_hp_mapping", "0.19.8", "sharding: parts"),
    Name("deepspeed.utils.mixed_precision_linkage:_init_lp_to_hp_mapping#_dp_group", "0.19.8", "sharding: their ranks"),
    Name("deepspeed.utils.tensor_fragment:tensor_fragment.update_hp#hp_fragment", "0.19.8", "sharding: parts"),
    Name(
        "deepspeed.utils.tensor_fragment:tensor_fragment.get_hp_fragment_address#hp_fragment_address",
        "0.19.8",
        "sharding: place of a part in the flat partition",
    ),
    Name(
        "deepspeed.utils.tensor_fragment:get_full_hp_param#lp_fragment_address",
        "0.19.8",
        "sharding: place of a part in its parameter",
    ),
    Name("deepspeed.runtime.config:DEEPSPEED_OPTIMIZERS", "0.19.8", "register: names that are DeepSpeed's own"),
    Name("deepspeed.runtime.lr_schedules:WarmupLR", "0.19.8", "register: the module of DeepSpeed's own schedules"),
    Name("torch:ops.aten.scaled_dot_product_attention", "2.13.0", "sdpa: overridden"),
    Name("torch.utils.cpp_extension:_get_cuda_arch_flags", "2.13.0", "optim: what the CUDA op is compiled for"),
    Name("torch:ops.aten.embedding_dense_backward", "2.13.0", "weight_gradients: of an embedding"),
    Name("torch.nn.modules.linear:NonDynamicallyQuantizableLinear", "2.13.0", "interception: never called"),
    Name("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu", "2.13.0", "kernels: CPU"),
    Name("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "2.13.0", "kernels: CPU"),
    Name("torch:ops.aten._flash_attention_forward", "2.13.0", "kernels: CUDA"),
    Name("torch:ops.aten._flash_attention_backward", "2.13.0", "kernels: CUDA"),
    Name("torch:ops.aten._efficient_attention_forward", "2.13.0", "kernels: CUDA"),
    Name("torch:ops.aten._efficient_attention_backward", "2.13.0", "kernels: CUDA"),
    Name("torch:ops.aten._unsafe_view", "2.13.0", "deferred: results that are no views"),
    Name("torch._subclasses.fake_tensor:FakeTensor", "2.13.0", "attention: torch.compile is at work"),
    Name(
        "torch.distributed.distributed_c10d:_set_pg_timeout", "2.13.0", "watchdog: groups that end their waits in time"
    ),
    Name(
        "torch.distributed.distributed_c10d:_get_default_store", "2.13.0", "watchdog: who is where, for a hang report"
    ),
    Name("torch._dynamo.eval_frame:OptimizedModule", "2.13.0", "refusals: refused by its class name"),
    Name("torch.nn:Module.compile#_compiled_call_impl", "2.13.0", "refusals: a compiled module"),
    Name(
        "torch._dynamo.eval_frame:_TorchDynamoContext.__call__#_torchdynamo_orig_callable",
        "2.13.0",
        "refusals: a compiled function",
    ),
    Name(f"{_CORE_ATTENTION}.__init__#scale_mask_softmax", "0.16.1", "core_attention: its scale"),
    Name(f"{_CORE_ATTENTION}.__init__#softmax_scale", "0.16.1", "core_attention: its scale"),
    Name(f"{_CORE_ATTENTION}.__init__#attention_dropout", "0.16.1", "core_attention: its dropout"),
    Name(f"{_CORE_ATTENTION}.__init__#attn_mask_type", "0.16.1", "core_attention: is it causal"),
    Name(f"{_CORE_ATTENTION}.forward#attention_mask", "0.16.1", "core_attention: name of its argument"),
    Name(f"{_CORE_ATTENTION}.forward#packed_seq_params", "0.16.1", "core_attention: refused"),
    Name("megatron.core.transformer.attention:Attention.__init__#core_attention", "0.16.1", "core_attention: by name"),
    Name(
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear._forward_impl",
        "0.16.1",
        "interception: its product",
        needed=False,
    ),
    Name(
        "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.__init__#vocab_start_index",
        "0.16.1",
        "interception: by this attribute",
        needed=False,
    ),
    Name(
        "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward#embedding",
        "0.16.1",
        "interception: its lookup",
        needed=False,
    ),
    Name(
        "megatron.core.tensor_parallel:get_cuda_rng_tracker",
        "0.16.1",
        "core_attention: dropout of tensor-parallel ranks",
    ),
    Name(
        "megatron.core.tensor_parallel.random:_CUDA_RNG_STATE_TRACKER",
        "0.16.1",
        "random_streams: seeded where it keeps states, and not made where nobody did",
        needed=False,
    ),
    Name("megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec", "0.16.1", "megatron: a layer's parts"),
    Name("megatron.core.models.bert.bert_layer_specs:bert_layer_local_spec", "0.16.1", "megatron: a layer's parts"),
    Name("megatron.core.datasets.bert_dataset:BERTMaskedWordPieceDataset", "0.16.1", "megatron: samples"),
    Name(
        "megatron.core.tensor_parallel.layers:set_tensor_model_parallel_attributes",
        "0.16.1",
        "megatron: a bias of which each rank has a part",
    ),
    Name("megatron.core.parallel_state:create_group#_global_process_group_list", "0.16.1", "megatron: what to destroy"),
    Name("megatron.core.process_groups_config:ProcessGroupCollection", "0.16.1", "megatron: groups of a layer"),
    Name(
        "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
        "0.16.1",
        "megatron: output layer on the tied embedding",
    ),
    Name("transformers:PreTrainedModel._init_weights", "5.23.0", "hf: values of new weights and of buffers"),
    Name("transformers:PreTrainedModel._can_set_attn_implementation", "5.23.0", "hf: attention by AttentionInterface"),
    Name("transformers.initialization:normal_#_is_hf_initialized", "5.23.0", "hf: weights that are read are not drawn"),
    Name("transformers:PreTrainedConfig._attn_implementation", "5.23.0", "hf: which attention a model calls"),
    Name(
        "megatron.core.transformer.moe.moe_layer:MoELayer",
        "0.16.1",
        "refusals: refused by the name of its package",
        needed=False,
    ),
)


def report(names: Iterable[Name] = NAMES, packages: Sequence[str] | None = None) -> dict[Name, bool]:
    """Check which names exist in the installed versions.

    Args:
        names: names to check.
        packages: look only for names of these packages; by default of all that are installed.

    Returns:
        For each name looked for, whether it is there.
    """
    return {name: exists(name.path) for name in names if _asked(name.package, packages)}


def exists(path: str) -> bool:
    """Whether ``module:attribute.path`` or ``module:function#name`` is there."""
    module, _, rest = path.partition(":")
    attributes, _, used = rest.partition("#")
    try:
        value: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError):
        return False
    return not used or used in _names_in(getattr(value, "ds_terapipe_original", value))


def _names_in(function: Any) -> set[str]:
    """Names of globals, attributes, arguments and string keys that a function's code uses, inner functions included."""
    codes = [getattr(function, "__code__", None)]
    found: set[str] = set()
    for code in codes:
        if isinstance(code, CodeType):
            found.update(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
            found.update(constant for constant in code.co_consts if isinstance(constant, str))
            codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return found


def _asked(package: str, packages: Sequence[str] | None) -> bool:
    if packages is not None:
        return package in packages
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return package in sys.modules


def require(key: str = "token_pipeline") -> None:
    """Raise if the installed DeepSpeed lacks a required name; log an untested version.

    Args:
        key: the requesting key, the beginning of the message.

    Raises:
        ConfigError: naming the missing names.
    """
    missing = [name.path for name, there in report(packages=("deepspeed",)).items() if name.needed and not there]
    if missing:
        found, wanted, use = DEEPSPEED.texts()
        raise ConfigError(f"{key}: {found} lacks {', '.join(missing)}, must be {wanted}, use {use}")
    say_untested(DEEPSPEED, key)


def say_untested(tested: Tested, key: str) -> None:
    """Warn once, on the launch's first process, of a version that no test has run on. It is used all the same."""
    if tested.holds or tested in _SAID or os.environ.get("RANK", "0") != "0":
        return
    _SAID.add(tested)
    found, _, use = tested.texts()
    logger.warning(f"{key}: got {found}, which no test has run on, use {use} where something fails")


def _release(version: str) -> tuple[int, ...]:
    from packaging.version import Version

    release: tuple[int, ...] = Version(version).release
    return release


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in release)
